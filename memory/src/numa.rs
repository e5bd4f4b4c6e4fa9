//! NUMA: the nodes of the host, and the nodes on which guest RAM lies.

pub mod host;
pub mod placement;
