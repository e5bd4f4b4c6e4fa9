//! The benchmark kernels: one source, run in the freestanding guest image and natively on the host.
//!
//! ```text
//!   image: arena = guest RAM, team = vCPUs ─┐
//!                                           ├─▶ registry::run("gups log2_words=25") ──▶ gups::run ──▶ Messages
//!   native: arena = mapped memory, threads ─┘          │
//!                                                      ├─ pattern::run
//!                                                      ├─ phases::run
//!                                                      ├─ npb::{bt, cg, ep, ft, is, lu, mg, sp}::run
//!                                                      └─ {stream, sweep3d, amr, eos, latency}::run
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`registry`] | the table of kernels; finds one, runs it, turns its result into an exit code |
//! | [`kernel`], [`error`] | description of a kernel, which each kernel gives; why a run failed |
//! | [`gups`] | HPCC RandomAccess: random updates all over a table, which verifies itself |
//! | [`pattern`] | fills RAM with predictable words and keeps checking them to find lost, stale and misplaced pages |
//! | [`phases`] | memory of four kinds at once, one of which moves: shows how policies differ |
//! | [`npb`] | the NAS Parallel Benchmarks, which verify themselves against published values |
//! | [`stream`] | STREAM: bandwidth of four loops over three arrays |
//! | [`sweep3d`] | Sweep3D: neutron transport through a cube by wavefronts |
//! | [`amr`] | fields in blocks of cells, the variables of a cell side by side, as in FLASH |
//! | [`eos`] | an equation of state in every zone of a mesh, by lookups in a table of 21 arrays, as in FLASH |
//! | [`mesh`] | the memory of amr and eos: blocks of cells, the variables of a cell side by side |
//! | [`latency`], [`chase`] | pointer chases over growing footprints, and the TLB levels they show |
//! | [`disk`], [`net`], [`vsock`], [`balloon`] | drive a device and check that it loses no byte; need a guest that has it |
//! | [`devices`] | all of these devices at once, each from a vCPU of its own |
//! | [`virtio`], [`virtio_disk`] | the drivers' common part, and the disk's |
//! | [`platform`] | what a kernel needs from its environment: a clock, a console, a team |
//! | [`arena`] | the memory a kernel works on, as words or as typed slices |
//! | [`team`], [`parts`], [`planes`], [`wavefront`] | several vCPUs or threads doing one job: disjoint parts for each, and their gathered results |
//! | [`native`] | the platform of an ordinary process (feature `std`) |
//! | [`rounds`] | repeating a round of work on every vCPU, with progress lines and a histogram of what interrupted it |
//! | [`report`] | output of a kernel on typed memory |
//! | [`vectors`] | loops compiled for narrow and for wide vector registers |
//! | [`test_pattern`] | predictable words, and the record of wrong ones |
//! | [`parameter`], [`parameters`], [`latency_histogram`], [`text`], [`caches`] | a parameter, parsing parameters, the histogram, formatting without allocation, the size of the last cache |
//!
//! A kernel is free of `unsafe`: it sees its memory as `&[AtomicU64]` and reads and writes with relaxed ordering,
//! which compiles to the plain moves that are measured. Two vCPUs that update one word at once may lose an update,
//! and nothing worse. The NPB kernels, STREAM, Sweep3D, amr and eos see typed slices instead, and each vCPU gets
//! its own part of them.
#![no_std]

#[cfg(any(test, feature = "std"))]
extern crate std;

pub mod amr;
pub mod arena;
pub mod balloon;
pub mod caches;
pub mod chase;
pub mod copy;
pub mod devices;
pub mod disk;
pub mod eos;
pub mod error;
pub mod gups;
pub mod kernel;
pub mod latency;
pub mod latency_histogram;
pub mod mesh;
#[cfg(any(test, feature = "std"))]
pub mod native;
pub mod net;
pub mod npb;
pub mod parameter;
pub mod parameters;
pub mod parts;
pub mod pattern;
pub mod phases;
pub mod planes;
pub mod platform;
pub mod registry;
pub mod report;
pub mod rounds;
pub mod stream;
pub mod sweep3d;
pub mod team;
pub mod test_pattern;
pub mod text;
pub mod vectors;
pub mod virtio;
pub mod virtio_disk;
pub mod vsock;
pub mod wavefront;

pub use arena::Arena;
pub use error::KernelError;
pub use kernel::Kernel;
pub use platform::Platform;
pub use registry::KERNELS;
