//! A small VMM on KVM; `wideleaf-memory` manages its guest RAM.
//!
//! ```text
//!   VmConfig ──┐
//!   GuestRam ──┼─▶ Machine::start ─▶ one thread per vCPU ─▶ Machine::wait ─▶ GuestExit
//!   SerialSink─┘        │
//!                       └─▶ Machine::second_level(): the manager's access to KVM's tables
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`config`] | the configuration of a VM, validated: once built, it cannot contradict itself |
//! | [`cells`] | NUMA cells of a guest: its vCPUs, memory and distances by node |
//! | [`boot`] | the numbered steps from a configuration to a runnable VM; the image formats |
//! | [`machine`] | a running VM: start, wait, stop, and observations of it |
//! | [`run_loop`] | the vCPU thread: its states, its exits, pause and resume |
//! | [`kvm`] | KVM's ioctls, typed, one per method; with [`sys`] and one signal handler of the sandbox the only `unsafe` of the crate |
//! | [`x86`] | the state of the guest's CPU and memory at the entry |
//! | [`devices`] | the ports that a guest can reach, and its virtio devices |
//! | [`dma`] | the devices' access to RAM, and the log of their writes |
//! | [`state`] | the state of a machine in a snapshot: what is taken, and when a restore is refused |
//! | [`sandbox`] | the limits of the process while the guest runs |
//! | [`sys`] | system calls that devices need |

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod boot;
pub mod cells;
pub mod config;
pub mod devices;
pub mod dma;
mod hardware;
pub mod kvm;
pub mod machine;
pub mod run_loop;
pub mod sandbox;
pub mod state;
pub mod sys;
pub mod x86;

pub use config::{ConfigError, HostLimits, ImageSource, VmConfig, VmOptions};
pub use machine::{Hardware, Machine, WaitLimits};
pub use run_loop::{GuestExit, RegisterDump};
pub use state::{MachineState, RestoreError, SaveError};
