//! The order in which BT, SP and LU go through their fields. The results are the same up to rounding; the memory
//! accesses are not.
//!
//! ```text
//!   fused       plane by plane: all terms of the right-hand side ─▶ x ─▶ y
//!               few arrays at a time, pages stay in the TLB
//!   reference   one term ─▶ one term ─▶ … ─▶ x ─▶ y ─▶ z
//!               each a sweep over the whole grid, up to nine arrays
//! ```

use crate::KernelError;
use crate::parameters::{Parameter, Parameters};

/// The order of the sweeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As few passes over memory as possible.
    Fused,
    /// The loops of the serial NPB 3.3 one after the other, over arrays laid out as in its common blocks. It is for
    /// traces that are compared with counters of the published programs.
    ///
    /// Only native programs have it: traces are of these, and a guest image with it would be a quarter larger, and
    /// is copied at each start.
    #[cfg(feature = "std")]
    Reference,
}

impl Order {
    const ALL: &'static [Self] = &[
        Self::Fused,
        #[cfg(feature = "std")]
        Self::Reference,
    ];
    const WORDS: &'static [&'static str] = &[
        "fused",
        #[cfg(feature = "std")]
        "reference",
    ];

    /// The parameter `order=`, for a kernel's table.
    pub const PARAMETER: Parameter = Parameter {
        name: "order",
        default: "fused",
        unit: "word",
        meaning: "reference, only in native programs, sweeps over the whole grid term by term like the serial NPB 3.3",
    };

    /// The order on the command line, fused by default.
    pub fn from_parameters<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        Ok(Self::ALL[parameters.choice(Self::PARAMETER.name, Self::WORDS)?.unwrap_or(0)])
    }
}
