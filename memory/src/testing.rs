//! Doubles of the interfaces to the kernel, for tests of this crate and its users (feature `testing`).
//!
//! ```text
//!   fake_*      in memory, without a kernel: every call can be made to fail       tests of one decision
//!   failing_*   before the real one: some calls fail, at random                   long tests on the real kernel
//! ```
//!
//! [`page_copies`] is not one of these: it restores RAM as others do, for comparisons. [`two_nodes`] has the files of a
//! host with two NUMA nodes.

pub mod failing_host;
pub mod failing_minor_faults;
pub mod failing_mover;
pub mod failing_second_level;
mod fake_calls;
pub mod fake_host;
pub mod fake_minor_faults;
pub mod fake_mover;
mod fake_pages;
pub mod fake_second_level;
pub mod fault_injection;
pub mod page_copies;
pub mod two_nodes;
