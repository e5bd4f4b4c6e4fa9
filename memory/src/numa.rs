//! NUMA: the nodes of the host, what is free on each, and the nodes on which guest RAM lies.

pub mod access;
pub mod host;
pub mod placement;
pub mod seen;
