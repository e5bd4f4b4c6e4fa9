//! Why there is no result: one line on the console, and the code of the `exit` line that follows.

use std::fmt;

use wideleaf_protocol::{ExitCode, Message};

use crate::emit;

/// A reason, and what it counts as.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// What it counts as.
    pub code: ExitCode,
    /// One sentence.
    pub message: String,
}

impl Failure {
    /// The machine lacks something.
    pub fn unsupported(message: impl fmt::Display) -> Failure {
        Failure { code: ExitCode::Unsupported, message: message.to_string() }
    }

    /// A word, or what the image was made for, makes no sense.
    pub fn bad_arguments(message: impl fmt::Display) -> Failure {
        Failure { code: ExitCode::BadArguments, message: message.to_string() }
    }

    /// Prints both lines.
    pub fn report(&self) -> ExitCode {
        emit(&Message::Panic { message: &self.message });
        emit(&Message::Exit { code: self.code });
        self.code
    }
}
