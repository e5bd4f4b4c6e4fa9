//! What TLBs and page walks cost on machines that are not at hand, and what policies would have done: all of it
//! computed, nothing measured.
//!
//! ```text
//!   accesses ──▶ Simulator (TLBs ▶ walk caches ▶ caches) on an AddressSpace ──▶ Counts
//!      │             ▲
//!      └──▶ Managed: a policy on a simulated host changes the address space ──▶ Tally, History
//!
//!   recording of a run ──▶ Recording: another policy on the recorded snapshots ──▶ Tally
//! ```
//!
//! Like `wideleaf-policies` it has no `std`, no clock and no randomness of its own: the same accesses on the same
//! machine always give the same counts. Its only `unsafe` code compares and moves tags as vectors
//! (`sets/vector.rs`), of AVX2 where the CPU has it: the counts are the same.

#![no_std]
#![deny(unsafe_code)]

extern crate alloc;

pub(crate) mod caches;
pub mod calibrated;
pub mod counts;
pub mod machine;
pub mod machines;
pub(crate) mod options;
pub(crate) mod purpose;
pub mod replay;
pub(crate) mod sets;
pub mod simulated;
pub mod simulator;
pub mod space;
pub mod streams;
pub(crate) mod tlb;
pub(crate) mod walker;

pub use counts::Counts;
pub use machine::Machine;
pub use machines::{machine, machines};
pub use simulator::Simulator;
pub use space::{AddressSpace, Paging};
