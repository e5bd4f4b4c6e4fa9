//! KVM's ioctls, typed, one per method. With [`crate::sys`] the only place of the crate that is `unsafe`.
//!
//! | module | file descriptor | what it does |
//! |---|---|---|
//! | [`system`] | `/dev/kvm` | opens it with errors one can act on, asks what it can do, finds out what the second level is made of |
//! | [`vm`] | the VM | memslots, interrupt controllers, vCPUs |
//! | [`memslot`] | – | how RAM is cut into memslots, and the state of each |
//! | [`vcpu`] | a vCPU | registers, CPUID, `KVM_RUN` |
//! | [`kick`] | a vCPU | takes a vCPU out of the guest from another thread |
//! | [`fresh`] | the VM, a vCPU | takes both as they are before the first instruction, and puts them back |
//! | [`stats`] | the VM's statistics | reads `pages_4k`, `pages_2m`, `pages_1g` |
//! | [`second_level`] | – | the manager's door, made of the above |
//! | [`guest_memory`] | – | guest RAM as the loaders want to see it |

pub mod fresh;
pub mod guest_memory;
pub mod kick;
pub mod memslot;
pub mod second_level;
pub mod stats;
pub mod system;
pub mod vcpu;
pub mod vm;

pub use guest_memory::GuestMemory;
pub use kick::Kicker;
pub use second_level::KvmSecondLevel;
pub use stats::KvmStats;
pub use system::KvmSystem;
pub use vcpu::Vcpu;
pub use vm::Vm;

use std::io;
use std::path::PathBuf;

use wideleaf_memory::region::RamHasOwner;

/// Why KVM does not do what is asked.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no such device.
    #[error(
        "{} does not exist: load a KVM module (modprobe kvm_intel or kvm_amd), or switch virtualisation on in the firmware",
        path.display()
    )]
    Absent {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The device exists and may not be opened.
    #[error("no permission to open {}: add this user to the group kvm, or run as root", path.display())]
    NotPermitted {
        /// Which device.
        path: PathBuf,
    },
    /// The device cannot be opened for another reason.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// Which device.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// KVM's interface is not the one that has been stable since Linux 2.6.22.
    #[error("KVM speaks API version {found}, wideleaf needs {}: is this {} really KVM?", system::API_VERSION, path.display())]
    ApiVersion {
        /// Which device.
        path: PathBuf,
        /// What it said.
        found: i32,
    },
    /// KVM lacks something there is no way around.
    #[error("this kernel's KVM has no {name}: use Linux {since} or newer")]
    MissingCapability {
        /// The capability, by its name in the KVM API.
        name: &'static str,
        /// The first release that has it.
        since: &'static str,
    },
    /// The RAM is not for a guest.
    #[error(transparent)]
    RamHasOwner(#[from] RamHasOwner),
    /// A register by which KVM writes into guest RAM cannot be put back.
    #[error("KVM does not put model-specific register {index:#x} back, by which it writes into guest RAM")]
    MsrStays {
        /// Which.
        index: u32,
    },
    /// An ioctl failed.
    #[error("{what} failed: {source}")]
    Ioctl {
        /// Which request, by its name in the KVM API.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl KvmError {
    /// An ioctl that failed, for `map_err`.
    pub(crate) fn ioctl(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
        move |errno| KvmError::Ioctl { what, source: errno.into() }
    }
}
