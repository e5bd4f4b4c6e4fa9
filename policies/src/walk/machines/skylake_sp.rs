//! Intel Skylake-SP.

use super::k8::K8;
use crate::walk::machine::Machine;

/// To be written.
pub(super) const SKYLAKE_SP: Machine = Machine { name: "skylake-sp", ..K8 };
