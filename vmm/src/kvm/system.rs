//! `/dev/kvm`, opened with actionable errors: a KVM that lacks what every VM needs is refused here, before there is a
//! VM, and optional capabilities are asked for by name.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use kvm_bindings::{
    CpuId, KVM_CAP_BINARY_STATS_FD, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MAX_CPUID_ENTRIES, kvm_enable_cap,
};
use kvm_ioctls::{Cap, Kvm, VmFd};

use super::KvmError;
use super::error::API_VERSION;

/// Path of the KVM device.
pub const DEVICE: &str = "/dev/kvm";

/// An open `/dev/kvm` with all required capabilities.
#[derive(Debug)]
pub struct KvmSystem {
    kvm: Kvm,
    /// Whether dirty logs are to be cleared by each fetch, as an older KVM does.
    clears_logs_at_fetch: bool,
}

impl KvmSystem {
    /// Opens the device at [`DEVICE`].
    ///
    /// # Errors
    /// See [`KvmSystem::open_at`].
    pub fn open() -> Result<KvmSystem, KvmError> {
        Self::open_at(Path::new(DEVICE))
    }

    /// Opens the KVM device at `path`, checks its version and the required capabilities.
    ///
    /// # Errors
    /// [`KvmError`]: absent, not permitted, another version, or too old; each with its remedy.
    pub fn open_at(path: &Path) -> Result<KvmSystem, KvmError> {
        let open_error = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => KvmError::Absent { path: path.to_owned() },
            io::ErrorKind::PermissionDenied => KvmError::NotPermitted { path: path.to_owned() },
            _ => KvmError::Open { path: path.to_owned(), source },
        };
        let c_path = CString::new(path.as_os_str().as_bytes())
            .map_err(|nul| open_error(io::Error::new(io::ErrorKind::InvalidInput, nul)))?;
        let kvm = Kvm::new_with_path(&c_path).map_err(|errno| open_error(errno.into()))?;
        let found = kvm.get_api_version();
        if found != API_VERSION {
            return Err(KvmError::ApiVersion { path: path.to_owned(), found });
        }
        for (capability, name, since) in
            [(Cap::UserMemory, "KVM_CAP_USER_MEMORY", "2.6.25"), (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT", "4.13")]
        {
            if !kvm.check_extension(capability) {
                return Err(KvmError::MissingCapability { name, since });
            }
        }
        Ok(KvmSystem { kvm, clears_logs_at_fetch: false })
    }

    /// The same, for VMs with dirty logs as those of a KVM before Linux 5.7: for tests and comparisons.
    #[must_use]
    pub fn with_logs_cleared_at_fetch(self) -> KvmSystem {
        KvmSystem { clears_logs_at_fetch: true, ..self }
    }

    /// The request that lets a VM's dirty logs begin set, and be cleared page by page, if this KVM can (KVM API, 7.18
    /// `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`, Linux 5.7).
    pub(super) fn manual_logs(&self) -> Option<kvm_enable_cap> {
        const WANTED: u64 = (KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET) as u64;
        let cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
        let has = u64::try_from(self.kvm.check_extension_raw(cap.into())).unwrap_or(0);
        let can = !self.clears_logs_at_fetch && has & WANTED == WANTED;
        can.then(|| kvm_enable_cap { cap, args: [WANTED, 0, 0, 0], ..kvm_enable_cap::default() })
    }

    /// Whether the VM's statistics can be read through a file descriptor (Linux 5.14).
    pub fn has_binary_stats(&self) -> bool {
        self.kvm.check_extension_raw(u64::from(KVM_CAP_BINARY_STATS_FD)) > 0
    }

    /// Whether KVM's local APICs have a timer with deadlines (KVM API, `KVM_CAP_TSC_DEADLINE_TIMER`).
    pub fn has_deadline_timer(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// Whether the CPU scales the guests' time stamp counters (KVM API, `KVM_CAP_TSC_CONTROL`).
    pub fn can_scale_tsc(&self) -> bool {
        self.kvm.check_extension(Cap::TscControl)
    }

    /// Largest number of memslots of a VM.
    pub fn memslots_max(&self) -> usize {
        self.kvm.get_nr_memslots()
    }

    /// Largest number of vCPUs of a VM.
    pub fn vcpus_max(&self) -> usize {
        self.kvm.get_max_vcpus()
    }

    /// The model-specific registers of a vCPU that this KVM lists (KVM API, 4.3 `KVM_GET_MSR_INDEX_LIST`).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn msrs(&self) -> Result<Vec<u32>, KvmError> {
        let list = self.kvm.get_msr_index_list().map_err(KvmError::ioctl("KVM_GET_MSR_INDEX_LIST"))?;
        Ok(list.as_slice().to_vec())
    }

    /// The CPUID leaves that this host can give to a guest (KVM API, 4.46 `KVM_GET_SUPPORTED_CPUID`).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn supported_cpuid(&self) -> Result<CpuId, KvmError> {
        self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(KvmError::ioctl("KVM_GET_SUPPORTED_CPUID"))
    }

    /// Creates an empty VM. Retries when a signal interrupts it: creation is the only ioctl that is slow
    /// enough for that.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`] where KVM refuses the call.
    pub fn create_vm(&self) -> Result<VmFd, KvmError> {
        /// More interruptions than any reasonable sender of signals causes.
        const ATTEMPTS_MAX: usize = 100;
        let mut last = kvm_ioctls::Error::new(libc::EINTR);
        for _ in 0..ATTEMPTS_MAX {
            match self.kvm.create_vm() {
                Err(errno) if errno.errno() == libc::EINTR => last = errno,
                answer => return answer.map_err(KvmError::ioctl("KVM_CREATE_VM")),
            }
        }
        Err(KvmError::ioctl("KVM_CREATE_VM")(last))
    }
}

#[cfg(test)]
impl KvmSystem {
    /// Opens it for a test; without KVM, prints why not, or fails where `WIDELEAF_REQUIRE` demands it.
    pub(crate) fn open_or_skip() -> Option<KvmSystem> {
        let unusable = match KvmSystem::open() {
            Ok(system) => return Some(system),
            Err(error) => error,
        };
        let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|word| word.trim() == "kvm"), "WIDELEAF_REQUIRE has kvm: {unusable}");
        println!("skipped: {unusable}");
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_an_absent_device_names_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let error = KvmSystem::open_at(&dir.path().join("kvm")).unwrap_err();
        assert!(matches!(error, KvmError::Absent { .. }));
        assert!(error.to_string().contains("modprobe kvm_intel"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_kvm_is_refused_by_its_version() {
        // An ioctl on an ordinary file answers -1, which no version of KVM has ever returned.
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = KvmSystem::open_at(file.path()).unwrap_err();
        assert!(matches!(error, KvmError::ApiVersion { found: -1, .. }), "{error}");
    }
}
