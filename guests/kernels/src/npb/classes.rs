//! The classes: problem sizes that every user of the NPB denotes by the same letters, and the parameter `class=`. The
//! numbers of each class stand in the kernel's own file.

use core::fmt;

use crate::KernelError;
use crate::parameters::{Parameter, Parameters, position_of};

/// A problem size. S is for tests, W for a workstation of 1994; A, B and C are about four times as large each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Sample: runs for a fraction of a second.
    S,
    /// Workstation of 1994.
    W,
    /// The smallest standard size.
    A,
    /// About four times class A.
    B,
    /// About four times class B.
    C,
}

impl Class {
    /// All classes, smallest first.
    pub const ALL: [Self; 5] = [Self::S, Self::W, Self::A, Self::B, Self::C];
    const LETTERS: &'static [&'static str] = &["S", "W", "A", "B", "C"];

    /// The parameter `class=`, for a kernel's table.
    pub const PARAMETER: Parameter =
        Parameter { name: "class", default: "S", unit: "letter", meaning: "size of the problem: S, W, A, B or C" };

    /// The class on the command line, S by default.
    pub fn from_parameters<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        Ok(Self::ALL[parameters.choice(Self::PARAMETER.name, Self::LETTERS)?.unwrap_or(0)])
    }

    /// The class of this letter, in upper or lower case.
    pub fn from_letter(letter: &str) -> Option<Self> {
        position_of(letter, Self::LETTERS).map(|index| Self::ALL[index])
    }

    /// Letter of the class.
    pub const fn letter(self) -> &'static str {
        Self::LETTERS[self as usize]
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.letter())
    }
}
