//! `/dev/kvm`: opened with errors one can act on; and what the host's second level is made of.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use kvm_bindings::{CpuId, KVM_CAP_BINARY_STATS_FD, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm, VmFd};
use wideleaf_memory::Paging;

use super::KvmError;

/// The only version of the KVM API there has ever been (KVM API, 4.1 `KVM_GET_API_VERSION`).
pub const API_VERSION: i32 = 12;

/// Where KVM is.
pub const DEVICE: &str = "/dev/kvm";

/// An open `/dev/kvm` that has what wideleaf needs.
#[derive(Debug)]
pub struct KvmSystem {
    kvm: Kvm,
}

impl KvmSystem {
    /// Opens [`DEVICE`].
    ///
    /// # Errors
    /// See [`KvmSystem::open_at`].
    pub fn open() -> Result<KvmSystem, KvmError> {
        Self::open_at(Path::new(DEVICE))
    }

    /// Opens the KVM device at `path`, checks its version and the capabilities there is no way around.
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
        Ok(KvmSystem { kvm })
    }

    /// Whether the VM's statistics can be read through a file descriptor (Linux 5.14).
    pub fn has_binary_stats(&self) -> bool {
        self.kvm.check_extension_raw(u64::from(KVM_CAP_BINARY_STATS_FD)) > 0
    }

    /// Whether KVM's local APICs have a timer that takes deadlines (KVM API, `KVM_CAP_TSC_DEADLINE_TIMER`).
    pub fn has_deadline_timer(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// The most memslots a VM can have.
    pub fn memslots_max(&self) -> usize {
        self.kvm.get_nr_memslots()
    }

    /// The most vCPUs a VM can have.
    pub fn vcpus_max(&self) -> usize {
        self.kvm.get_max_vcpus()
    }

    /// The CPUID leaves this host can give to a guest (KVM API, 4.46 `KVM_GET_SUPPORTED_CPUID`).
    ///
    /// # Errors
    /// [`KvmError::Ioctl`].
    pub fn supported_cpuid(&self) -> Result<CpuId, KvmError> {
        self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(KvmError::ioctl("KVM_GET_SUPPORTED_CPUID"))
    }

    /// Creates an empty VM. Retried when a signal interrupts it: creation is the one ioctl that is slow enough.
    ///
    /// # Errors
    /// [`KvmError::Ioctl`].
    pub fn create_vm(&self) -> Result<VmFd, KvmError> {
        /// More interruptions than any sane sender of signals causes.
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

/// Why it is not known what the second level is made of.
#[derive(Debug, thiserror::Error)]
pub enum PagingError {
    /// No vendor module of KVM is loaded, or sysfs is not there.
    #[error("no KVM vendor module under {}: is sysfs mounted?", modules.display())]
    NoVendorModule {
        /// Where modules were looked for.
        modules: PathBuf,
    },
    /// A parameter is there and not a yes or a no.
    #[error("{} says {text:?}, expected Y or N", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What it says.
        text: String,
    },
    /// A parameter is there and cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Finds out what the second level is made of, from the parameters of KVM's vendor modules below `sys` (`/sys`).
///
/// Only one vendor module can be active, but several may be loaded; the one that uses two-dimensional paging is the
/// active one. `kvm_pvm` has no such parameter: it always shadows.
///
/// # Errors
/// [`PagingError`]; absent, malformed and unreadable are told apart.
pub fn detect_paging(sys: &Path) -> Result<Paging, PagingError> {
    let modules = sys.join("module");
    let vendors = [("kvm_intel", "ept", Paging::Ept), ("kvm_amd", "npt", Paging::Npt), ("kvm_pvm", "", Paging::Shadow)];
    let mut is_loaded = false;
    for (module, parameter, paging) in vendors {
        let module = modules.join(module);
        if !module.is_dir() {
            continue;
        }
        is_loaded = true;
        if !parameter.is_empty() && read_flag(&module.join("parameters").join(parameter))? {
            return Ok(paging);
        }
    }
    if is_loaded { Ok(Paging::Shadow) } else { Err(PagingError::NoVendorModule { modules }) }
}

fn read_flag(path: &Path) -> Result<bool, PagingError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| PagingError::Unreadable { path: path.to_owned(), source })?;
    match text.trim() {
        // Kernels before 4.2 printed kvm_amd's flag as a number.
        "Y" | "1" => Ok(true),
        "N" | "0" => Ok(false),
        _ => Err(PagingError::Malformed { path: path.to_owned(), text }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn sys_with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        sys
    }

    #[test]
    fn two_dimensional_paging_is_told_by_the_vendor_module() {
        let intel = sys_with(&[("module/kvm_intel/parameters/ept", "Y\n")]);
        assert_eq!(detect_paging(intel.path()).unwrap(), Paging::Ept);
        let amd = sys_with(&[("module/kvm_amd/parameters/npt", "Y\n")]);
        assert_eq!(detect_paging(amd.path()).unwrap(), Paging::Npt);
        let old_amd = sys_with(&[("module/kvm_amd/parameters/npt", "1\n")]);
        assert_eq!(detect_paging(old_amd.path()).unwrap(), Paging::Npt);
    }

    #[test]
    fn without_it_paging_is_shadow() {
        let switched_off = sys_with(&[("module/kvm_intel/parameters/ept", "N\n")]);
        assert_eq!(detect_paging(switched_off.path()).unwrap(), Paging::Shadow);
        let pvm = sys_with(&[("module/kvm_pvm/refcnt", "0\n")]);
        assert_eq!(detect_paging(pvm.path()).unwrap(), Paging::Shadow);
    }

    #[test]
    fn the_module_that_uses_it_wins_over_one_that_is_only_loaded() {
        let both = sys_with(&[("module/kvm_intel/parameters/ept", "N\n"), ("module/kvm_amd/parameters/npt", "Y\n")]);
        assert_eq!(detect_paging(both.path()).unwrap(), Paging::Npt);
    }

    #[test]
    fn absent_malformed_and_unreadable_are_different_errors() {
        let nothing = sys_with(&[("module/snd/refcnt", "0\n")]);
        assert!(matches!(detect_paging(nothing.path()), Err(PagingError::NoVendorModule { .. })));
        let odd = sys_with(&[("module/kvm_intel/parameters/ept", "maybe\n")]);
        assert!(matches!(detect_paging(odd.path()), Err(PagingError::Malformed { text, .. }) if text == "maybe\n"));
        let unreadable = sys_with(&[("module/kvm_intel/refcnt", "0\n")]);
        assert!(matches!(detect_paging(unreadable.path()), Err(PagingError::Unreadable { .. })));
    }

    #[test]
    fn an_absent_device_says_how_to_get_one() {
        let dir = tempfile::tempdir().unwrap();
        let error = KvmSystem::open_at(&dir.path().join("kvm")).unwrap_err();
        assert!(matches!(error, KvmError::Absent { .. }));
        assert!(error.to_string().contains("modprobe kvm_intel"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_kvm_is_refused_by_its_version() {
        // An ioctl on an ordinary file answers -1, which no version of KVM ever said.
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = KvmSystem::open_at(file.path()).unwrap_err();
        assert!(matches!(error, KvmError::ApiVersion { found: -1, .. }), "{error}");
    }
}
