//! A small VMM on KVM whose guest RAM is managed by `wideleaf-memory`.
//!
//! ```text
//!   VmConfig ──┐
//!   GuestRam ──┼─▶ Machine::start ─▶ one thread per vCPU ─▶ Machine::wait ─▶ GuestExit
//!   SerialSink─┘        │
//!                       └─▶ Machine::second_level(): the manager's door to KVM's tables
//! ```
//!
//! | module | what is in it |
//! |---|---|
//! | [`config`] | what a VM is, validated: once built, it cannot contradict itself |
//! | [`boot`] | the numbered steps from a configuration to a runnable VM; which images are understood |
//! | [`machine`] | a running VM: start, wait, stop, and what it was seen to do |
//! | [`run_loop`] | the vCPU thread: its states, its exits, pause and resume |
//! | [`kvm`] | KVM's ioctls, typed, one per method; with [`sys`] and one signal handler of the sandbox the only `unsafe` of the crate |
//! | [`x86`] | what the guest's CPU and memory look like at the entry |
//! | [`devices`] | the ports a guest can reach, and its virtio devices |
//! | [`dma`] | how devices reach RAM, and who sees what they wrote there |
//! | [`sandbox`] | what the process can still do once the guest runs |
//! | [`sys`] | the kernel's calls that devices need |

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod boot;
pub mod config;
pub mod devices;
pub mod dma;
pub mod kvm;
pub mod machine;
pub mod run_loop;
pub mod sandbox;
pub mod sys;
pub mod x86;

pub use config::{ConfigError, HostLimits, ImageSource, VmConfig, VmOptions};
pub use machine::{Hardware, Machine, WaitLimits};
pub use run_loop::{GuestExit, RegisterDump};
