//! In which order BT, SP and LU go through their fields. The numbers are the same up to rounding; what memory sees is not.
//!
//! ```text
//!   fused       plane by plane: all terms of the right-hand side ─▶ x ─▶ y       few arrays at a time, pages stay in the TLB
//!   reference   one term ─▶ one term ─▶ … ─▶ x ─▶ y ─▶ z                         each a sweep over the whole grid, up to nine arrays
//! ```

use crate::KernelError;
use crate::parameters::{Parameter, Parameters};

/// The order of the sweeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As few passes over memory as there can be.
    Fused,
    /// The loops of the serial NPB 3.3 one after the other, over arrays that lie as in its common blocks: for traces that are compared
    /// with counters of the published programs.
    ///
    /// In native programs alone: traces are of these, and a guest image with it would be a quarter larger, and copied at each start.
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

    /// The parameter, for a kernel's table.
    pub const PARAMETER: Parameter = Parameter {
        name: "order",
        default: "fused",
        unit: "word",
        meaning: "reference, in native programs alone, sweeps over the whole grid term by term, as the serial NPB 3.3 does",
    };

    /// The order that the command line names, or fused.
    pub fn from_parameters<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        Ok(Self::ALL[parameters.choice(Self::PARAMETER.name, Self::WORDS)?.unwrap_or(0)])
    }
}
