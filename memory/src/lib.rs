//! What the host kernel knows of guest memory: its backing, the sensors that observe it, the actuators that change
//! it, and the loop that connects them.
//!
//! | module | kernel interface | privilege |
//! |---|---|---|
//! | [`region`] | `mmap`, `memfd_create` | none |
//! | [`backing`] | `madvise` advice, hugetlb flags | none; hugetlb needs a pool |
//! | [`pool`] | `/sys/kernel/mm/hugepages`, `/sys/devices/system/node`, `/proc/buddyinfo`, `/proc/*/smaps` | reading: none; of other users, and resizing: root |
//! | [`block_supply`] | `MADV_COLLAPSE` (6.1), `/proc/pressure`, `/proc/vmstat`, `setpriority(2)` | none |
//! | [`giant_maker`] | as [`pool`], hugetlb memfd | root |
//! | [`sensors`] | `PAGEMAP_SCAN` (6.7), `/proc/self/smaps`, `/proc/buddyinfo`, KVM statistics; access: [`detached`] | none; access: as below |
//! | [`sensors::minor_faults`] | `userfaultfd(2)`, minor faults (5.14) | as first touch |
//! | [`sensors::kernel_flags`] | `/proc/kpageflags` | `CAP_SYS_ADMIN` |
//! | [`sensors::damon`] | `/sys/kernel/mm/damon/admin`, for this process and for others | root |
//! | [`sensors::outside_heat`] | none: heat of RAM that another process has | none |
//! | [`actuators`] | `MADV_COLLAPSE` (6.1), `MADV_COLD` (5.4), `MADV_POPULATE_WRITE` (5.14), KVM dirty logging; swap, vacate: [`detached`] | none; swap, vacate: as below |
//! | [`actuators::release`] | [`detached`] | as that |
//! | [`side_mapping`] | `mremap` (`MREMAP_DONTUNMAP`, 5.7), hugetlb memfd | none; needs a pool |
//! | [`first_touch`] | `userfaultfd(2)`, missing faults | root, `vm.unprivileged_userfaultfd`, or `/dev/userfaultfd` |
//! | [`reserved_frames`] | `userfaultfd(2)`, missing and minor faults (5.14), `fallocate(2)`, `fsopen(2)` (5.2) | root; without `CAP_SYS_ADMIN` its promotions copy |
//! | [`restore`] | `userfaultfd(2)`, missing faults, `UFFDIO_MOVE` (6.8) | as first touch |
//! | [`detached`] | `userfaultfd(2)`, `UFFDIO_MOVE` (6.8) | the same |
//! | [`host::process`] | `pidfd_open(2)` (5.3), `process_madvise(2)` (5.10; collapse: 6.1), `/proc/PID` | the owner's uid and `CAP_SYS_NICE` |
//! | [`sandboxed`] | `/dev/userfaultfd` (6.1), kept open for a process that gives up its rights | as it says |
//! | [`input_file`] | `open(2)` of a file that a user named, without waiting | none |
//! | [`deadline`] | none: bounds the time that a read of `/proc/PID` may take | none |
//! | [`save`] | `PAGEMAP_SCAN` (6.7), `lseek(2)` (`SEEK_DATA`), KVM dirty logging | none |
//! | [`gate`], [`explain`] | none: whether a VM may be acted on, and why its windows are not huge | none |
//! | [`khugepaged`] | `/sys/kernel/mm/transparent_hugepage/khugepaged` | root |
//! | [`recorder`] | `write(2)` to a file it is given | none |
//! | [`walk_cost`] | `/proc/cpuinfo`, KVM's module parameters, a file of `wideleaf tlbcost --save` | none |
//! | [`allocator`] | none: `mallopt(3)` of the C library | none |
//! | [`warming`] | `madvise(2)`: memory made fast before a measurement | none |
//! | [`numa::host`] | `/sys/devices/system/node`, `/proc/self/status` | none |
//! | [`numa::placement`] | `mbind(2)`, `set_mempolicy(2)`, `get_mempolicy(2)` | none |
//! | [`numa::seen`] | `/sys/devices/system/node`, `/proc/buddyinfo` | none |
//! | [`progress`] | none: a guest's own count of its work | none |
//! | [`manager`] | all of the above through [`kernel::Kernel`] and [`second_level::SecondLevel`] | none |
//!
//! Every effect on the kernel goes through one of three interfaces: [`kernel::Kernel`] (an address space, of which
//! [`host::Host`] is the part that also another process has), [`mover::Mover`] (the pages of one VM) and
//! [`second_level::SecondLevel`] (KVM's side of it). Each has a fake that can fail at every call, and a wrapper of
//! the real one that fails at random (module `testing`, with the feature of that name). There are exceptions. In
//! [`first_touch`] and [`reserved_frames`] the kernel reports the faults, so their userfaultfd is always the real
//! one. [`reserved_frames`] and [`sensors::minor_faults`] have small interfaces of their own, with fakes.
//! [`sensors::damon`] reads and writes files under a root that tests choose. `unsafe` is in `sys` alone.

pub mod actuators;
pub mod backing;
pub mod block_supply;
pub mod capabilities;
pub mod claims;
pub mod deadline;
pub mod detached;
pub mod explain;
mod faults;
pub mod first_touch;
pub mod gate;
pub mod giant_maker;
mod giant_page;
pub mod guest_freed;
pub mod host;
pub mod input_file;
pub mod kernel;
pub mod khugepaged;
pub mod manager;
pub mod mover;
pub mod numa;
mod page_tables_freed;
pub mod panicked;
pub mod pool;
mod proc_fields;
pub mod progress;
mod ram_range;
pub mod recorder;
pub mod region;
pub mod reserved_frames;
pub mod restore;
pub mod sandboxed;
pub mod save;
pub mod second_level;
pub mod sensors;
pub mod side_mapping;
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod thp_settings;
pub mod walk_cost;
pub mod warming;

pub use backing::{BackingConfig, BackingKind};
pub use first_touch::{FirstTouch, FirstTouchReport};
pub use host::{Host, linux::LinuxHost, process::ProcessHost};
pub use kernel::Kernel;
pub use manager::{Manager, ManagerConfig, ManagerReport};
pub use region::{GuestRam, RamRange};
pub use reserved_frames::{ReservedFrames, ReservedFramesReport};
pub use restore::{RestoreConfig, RestoreReport, Restorer, SavedRam, SavedWindow};
pub use second_level::{Paging, SecondLevel};
pub use sys::allocator;
pub use sys::cached_pages::cached_pages;

/// The example in the repository's README compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
