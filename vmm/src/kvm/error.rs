//! Errors of KVM's requests, each with the remedy where one is known.

use std::io;
use std::path::PathBuf;

use wideleaf_memory::region::RamHasOwner;

/// Version of the KVM API, the only one that has ever existed (KVM API, 4.1 `KVM_GET_API_VERSION`).
pub(super) const API_VERSION: i32 = 12;

/// The reasons why KVM refuses a request.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The device does not exist.
    #[error(
        "cannot open {}: it does not exist; load a KVM module (modprobe kvm_intel or kvm_amd), or switch \
         virtualisation on in the firmware",
        path.display()
    )]
    Absent {
        /// The path that was tried.
        path: PathBuf,
    },
    /// The device exists, but this user may not open it.
    #[error("cannot open {}: no permission; add this user to the group kvm, or run as root", path.display())]
    NotPermitted {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device cannot be opened for another reason.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// Path of the device.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// KVM's interface is not the one that has been stable since Linux 2.6.22.
    #[error(
        "cannot use KVM API version {found}: wideleaf needs {}; check that {} is really KVM",
        API_VERSION, path.display()
    )]
    ApiVersion {
        /// Path of the device.
        path: PathBuf,
        /// Version that it reported.
        found: i32,
    },
    /// KVM lacks a capability that wideleaf cannot do without.
    #[error("cannot use this kernel's KVM: it has no {name}; use Linux {since} or newer")]
    MissingCapability {
        /// The capability, by its name in the KVM API.
        name: &'static str,
        /// The first release that has it.
        since: &'static str,
    },
    /// The RAM has an exclusive owner.
    #[error(transparent)]
    RamHasOwner(#[from] RamHasOwner),
    /// KVM could not set back a register by which it writes into guest RAM.
    #[error("cannot set back model-specific register {index:#x}, by which KVM writes into guest RAM")]
    MsrStays {
        /// Number of the register.
        index: u32,
    },
    /// KVM does not set a register to the value that a guest had elsewhere.
    #[error(
        "cannot set model-specific register {index:#x} to {data:#x}: this KVM refuses it; use a host as the guest's"
    )]
    MsrNotSet {
        /// Number of the register.
        index: u32,
        /// Value that the guest had.
        data: u64,
    },
    /// KVM does not shift the guest's time stamp counter, which would go back.
    #[error(
        "cannot let the guest's time stamp counter continue at {saved}: this KVM shows it the host's counter, which is \
         at {here}; use the host that saved it, without a reboot in between"
    )]
    TscGoesBack {
        /// Value that the guest had.
        saved: u64,
        /// Value that it would have.
        here: u64,
    },
    /// An ioctl failed.
    #[error("{what} failed: {source}")]
    Ioctl {
        /// Name of the request in the KVM API.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl KvmError {
    /// Converts a failed ioctl, for `map_err`.
    pub(crate) fn ioctl(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
        move |errno| KvmError::Ioctl { what, source: errno.into() }
    }
}
