//! Everything that the manager asks of the kernel for one address space, by subject. Each subject is a trait, so that
//! a test double replaces one of them and leaves the others real.
//!
//! ```text
//!   Kernel ─┬─ Host            advice, scans, kernel files, clocks     also of another process
//!           ├─ GiantMappings   giant pages in the place of guest RAM   own memory only
//!           └─ Userfaultfds    movers of windows, minor faults         own memory only
//! ```

use crate::host::Host;

mod giant_mappings;
mod userfaultfds;

pub use giant_mappings::GiantMappings;
pub use userfaultfds::Userfaultfds;

/// All subjects together.
pub trait Kernel: Host + GiantMappings + Userfaultfds {}

impl<T: Host + GiantMappings + Userfaultfds> Kernel for T {}
