//! Values of a kernel's parameters, read from a command line. A key that the kernel does not know, and a value that is
//! not of its kind or not in its range, is an error before the kernel touches memory.

use wideleaf_protocol::CommandLine;
use wideleaf_protocol::arguments::{parse_count, parse_size};

use crate::KernelError;
pub use crate::parameter::Parameter;

/// A kernel's part of a command line, checked against the kernel's parameters.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<'a> {
    line: CommandLine<'a>,
}

impl<'a> Parameters<'a> {
    /// Rejects the first key that is neither the image's nor in `known`.
    pub fn new(line: CommandLine<'a>, known: &'static [Parameter]) -> Result<Self, KernelError<'a>> {
        let unknown =
            line.kernel_arguments().find(|argument| known.iter().all(|parameter| parameter.name != argument.key));
        match unknown {
            Some(argument) => Err(KernelError::UnknownParameter { name: argument.key, known }),
            None => Ok(Self { line }),
        }
    }

    /// A count from `least` to `most`; `None` if it is absent.
    pub fn count(&self, name: &'static str, least: u64, most: u64) -> Result<Option<u64>, KernelError<'a>> {
        self.read(name, least, most, "a count", parse_count)
    }

    /// A size in bytes from `least` to `most`, with an optional K, M, G or T; `None` if it is absent.
    pub fn size(&self, name: &'static str, least: u64, most: u64) -> Result<Option<u64>, KernelError<'a>> {
        self.read(name, least, most, "a size in bytes (K, M, G, T)", parse_size)
    }

    /// Index of the given word among `choices`, in upper or lower case; `None` if it is absent.
    pub fn choice(
        &self,
        name: &'static str,
        choices: &'static [&'static str],
    ) -> Result<Option<usize>, KernelError<'a>> {
        let Some(value) = self.line.value(name) else { return Ok(None) };
        match position_of(value, choices) {
            Some(index) => Ok(Some(index)),
            None => Err(KernelError::BadChoice { name, value, choices }),
        }
    }

    fn read(
        &self,
        name: &'static str,
        least: u64,
        most: u64,
        what: &'static str,
        parse: fn(&str) -> Option<u64>,
    ) -> Result<Option<u64>, KernelError<'a>> {
        let Some(value) = self.line.value(name) else { return Ok(None) };
        match parse(value) {
            Some(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(KernelError::BadValue { name, value, what, least, most }),
        }
    }
}

/// Index of a value among these words, in upper or lower case.
pub fn position_of(value: &str, choices: &[&str]) -> Option<usize> {
    choices.iter().position(|choice| choice.eq_ignore_ascii_case(value))
}
