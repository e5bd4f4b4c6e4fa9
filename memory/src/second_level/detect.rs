//! Detects the tables of the host's second level, and what runs the guest's kernel, from the modules of KVM.
//!
//! ```text
//!   /sys/module/kvm_intel/parameters/ept = Y ─▶ ept ┐
//!   /sys/module/kvm_amd/parameters/npt   = Y ─▶ npt ┼─ else one of them or kvm_pvm is loaded ─▶ shadow │ none: error
//! ```

use std::io;
use std::path::{Path, PathBuf};

use super::Paging;

/// Why the kind of the second level is not known.
#[derive(Debug, thiserror::Error)]
pub enum PagingError {
    /// No vendor module of KVM is loaded, or sysfs is not mounted.
    #[error(
        "cannot detect paging: no KVM vendor module under {}; load one, and check that sysfs is mounted",
        modules.display()
    )]
    NoVendorModule {
        /// Path of the searched directory.
        modules: PathBuf,
    },
    /// A parameter is neither yes nor no.
    #[error("cannot detect paging: {} says {text:?}, expected Y or N", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Contents of the file.
        text: String,
    },
    /// A parameter cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// Detects the kind of the second level, from the parameters of KVM's vendor modules below `sys` (`/sys`).
///
/// Only one vendor module can be active, but several may be loaded; the one that uses two-dimensional paging is the
/// active one. `kvm_pvm` has no such parameter: it always shadows.
///
/// # Errors
/// [`PagingError`]; absent, malformed and unreadable files are distinguished.
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

/// Whether KVM emulates what a guest executes in ring 0, below `root` (`/`). `kvm_pvm` does: the KVM of hosts that
/// are virtual machines themselves and have neither VT-x nor SVM. It emulates some million instructions a second, and
/// not all kinds. The CPU runs ring 3 in every case.
pub fn emulates_guest_kernels(root: &Path) -> bool {
    let is_loaded = |module: &str| root.join("sys/module").join(module).is_dir();
    let cpu = std::fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let has_flag = |flag: &str| {
        let mut flags = cpu.lines().filter(|line| line.starts_with("flags"));
        flags.next().is_some_and(|line| line.split_ascii_whitespace().any(|word| word == flag))
    };
    // A module that is built into the kernel has a folder there on every CPU.
    let has_hardware = [("kvm_intel", "vmx"), ("kvm_amd", "svm")]
        .into_iter()
        .any(|(module, flag)| is_loaded(module) && has_flag(flag));
    is_loaded("kvm_pvm") && !has_hardware
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
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use std::fs;

    const PVM: (&str, &str) = ("sys/module/kvm_pvm/refcnt", "0\n");
    const AMD: (&str, &str) = ("sys/module/kvm_amd/parameters/npt", "Y\n");
    const PLAIN_CPU: (&str, &str) = ("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu svme de\nbugs\t\t: svm\n");
    const SVM_CPU: (&str, &str) = ("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu svm de\n");

    #[test]
    fn only_a_kvm_without_hardware_emulates_guest_kernels() {
        let emulates = |files: &[_]| emulates_guest_kernels(sys_with(files).path());
        assert!(emulates(&[PVM, PLAIN_CPU]) && emulates(&[PVM]));
        assert!(emulates(&[PVM, AMD, PLAIN_CPU]), "kvm_amd is there, and cannot be used");
        assert!(!emulates(&[PVM, AMD, SVM_CPU]), "kvm_pvm is there, and is not used");
        assert!(emulates(&[PVM, SVM_CPU]), "the CPU could, and nothing uses it");
        assert!(!emulates(&[AMD, SVM_CPU]) && !emulates(&[AMD, PLAIN_CPU]) && !emulates(&[]));
    }

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
    fn the_vendor_module_says_whether_paging_is_two_dimensional() {
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
}
