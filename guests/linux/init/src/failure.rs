//! Why there is no result: one line on the console, and the code of the following `exit` line. The host reads both;
//! nothing else of the guest reports a failure.

use std::fmt;

use wideleaf_protocol::{ExitCode, Message};

use crate::emit;

/// A reason, and its exit code.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// Exit code for this reason.
    pub code: ExitCode,
    /// Reason in one sentence.
    pub message: String,
}

impl Failure {
    /// The machine lacks something.
    pub fn unsupported(message: impl fmt::Display) -> Failure {
        Failure { code: ExitCode::Unsupported, message: message.to_string() }
    }

    /// A word, or the kernel of the image, is invalid.
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
