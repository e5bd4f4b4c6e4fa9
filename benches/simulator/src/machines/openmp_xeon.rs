//! "Xeon (HT)" with the numbers in a table of the OpenMP superpage paper.

use super::nocona::NOCONA;
use super::{array, first_level};
use crate::machine::{Machine, TlbArray, doubtful};
use wideleaf_policies::units::PageSize::{Base4K, Huge2M};

const TABLE: &str = "table 1 of the OpenMP superpage paper; no CPUID dump of a Xeon of that generation confirms it";

/// Nocona with the paper's TLB. Use it only for comparison with that paper.
pub(super) const OPENMP_XEON: Machine = Machine {
    name: "openmp-xeon",
    title: "Intel Xeon with Hyper-Threading, as in the OpenMP superpage measurements",
    source: TABLE,
    data_tlb: TLB,
    instruction_tlb: TLB,
    ..NOCONA
};

const TLB: &[crate::machine::TlbLevel] = &[first_level(&[
    TlbArray { pages: &[Base4K], array: array(doubtful(128, TABLE), doubtful(4, TABLE), super::LRU) },
    TlbArray { pages: &[Huge2M], array: array(doubtful(32, TABLE), doubtful(4, TABLE), super::LRU) },
])];
