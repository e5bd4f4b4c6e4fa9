//! NUMA nodes of the host.

pub mod seen;
