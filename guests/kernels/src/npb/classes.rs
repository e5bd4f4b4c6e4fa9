//! The classes: sizes that everybody who runs the NPB means by the same letter.

use core::fmt;

use crate::KernelError;
use crate::parameters::{Parameter, Parameters, position_of};

/// A problem size. S is for tests, W for a workstation of 1994; A, B and C are about four times as large each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Sample: a fraction of a second.
    S,
    /// Workstation.
    W,
    /// The smallest of the standard ones.
    A,
    /// About four times A.
    B,
    /// About four times B.
    C,
}

impl Class {
    /// All of them, the smallest first.
    pub const ALL: [Self; 5] = [Self::S, Self::W, Self::A, Self::B, Self::C];
    const LETTERS: &'static [&'static str] = &["S", "W", "A", "B", "C"];

    /// The parameter, for a kernel's table.
    pub const PARAMETER: Parameter =
        Parameter { name: "class", default: "S", unit: "letter", meaning: "size of the problem: S, W, A, B or C" };

    /// The class that the command line names, or S.
    pub fn from_parameters<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        Ok(Self::ALL[parameters.choice(Self::PARAMETER.name, Self::LETTERS)?.unwrap_or(0)])
    }

    /// The class of this letter, in upper or lower case.
    pub fn from_letter(letter: &str) -> Option<Self> {
        position_of(letter, Self::LETTERS).map(|index| Self::ALL[index])
    }

    /// Its letter.
    pub const fn letter(self) -> &'static str {
        Self::LETTERS[self as usize]
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.letter())
    }
}
