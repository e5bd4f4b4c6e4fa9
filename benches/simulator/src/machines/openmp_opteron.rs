//! "Opteron 270" with the numbers in a table of the OpenMP superpage paper.

use super::k8::K8;
use crate::machine::Machine;

/// The table has K8's numbers. (The paper's prose says 128 and 1024 entries instead, which no dump of
/// the part shows.)
pub(super) const OPENMP_OPTERON: Machine = Machine {
    name: "openmp-opteron",
    title: "AMD Opteron 270, as in the OpenMP superpage measurements",
    source: "table 1 of the paper, which agrees with K8's CPUID dump; the paper's prose does not",
    ..K8
};
