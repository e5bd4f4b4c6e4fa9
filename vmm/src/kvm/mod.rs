//! KVM's ioctls, typed, one per method. Only this module, [`crate::sys`] and one signal handler contain `unsafe` code.
//!
//! | module | file descriptor | what it does |
//! |---|---|---|
//! | [`system`] | `/dev/kvm` | opens it with actionable errors, reads its capabilities, detects the second level's kind |
//! | [`vm`] | the VM | memslots, interrupt controllers, vCPUs |
//! | [`memslot`] | – | divides RAM into memslots, and keeps the state of each |
//! | [`vcpu`] | a vCPU | registers, CPUID, `KVM_RUN` |
//! | [`kick`] | a vCPU | takes a vCPU out of the guest from another thread |
//! | [`saved`] | the VM, a vCPU | the state of both, taken and restored: at a reset, and in a snapshot |
//! | [`stats`] | the VM's statistics | reads `pages_4k`, `pages_2m`, `pages_1g` |
//! | [`second_level`] | – | the manager's access to KVM, built from the above |
//! | [`guest_memory`] | – | guest RAM as the loaders see it |

mod error;
pub mod guest_memory;
pub mod kick;
pub mod memslot;
pub mod saved;
pub mod second_level;
pub mod stats;
pub mod system;
pub mod vcpu;
pub mod vm;

pub use error::KvmError;
pub use guest_memory::GuestMemory;
pub use kick::{Kicker, TickedTime};
pub use second_level::KvmSecondLevel;
pub use stats::{KvmStats, VcpuStats};
pub use system::KvmSystem;
pub use vcpu::Vcpu;
pub use vm::Vm;
