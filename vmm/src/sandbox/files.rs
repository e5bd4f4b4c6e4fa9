//! The files that can be opened once the guest runs (Landlock: Documentation/userspace-api/landlock.rst). Files
//! that are already open, such as disks, the image or a recording, stay usable.
//!
//! ```text
//!   read    /proc/self, a few of /proc, /sys/kernel/mm, KVM's parameters, NUMA nodes     the manager's sensors
//!   write   the folder of --output, if there is one                                      the report
//!   else    nothing: no other file, no TCP, no abstract socket, no signal to a process outside
//! ```
//!
//! A kernel without Landlock, or with an early version, restricts less; the report names the missing parts.

use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetStatus, Scope,
};

use super::{SandboxConfig, SandboxError};

/// Files that the process reads while its guest runs. Files that a host does not have are left out.
pub const READ: &[&str] = &[
    "/proc/self",
    "/proc/buddyinfo",
    "/proc/cpuinfo",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/pressure",
    "/proc/stat",
    "/proc/sys/kernel/osrelease",
    "/proc/vmstat",
    "/sys/devices/system/node",
    "/sys/kernel/mm",
    "/sys/module/kvm",
    "/sys/module/kvm_amd",
    "/sys/module/kvm_intel",
];

/// Newest rights that are requested: those of Linux 6.12. An older kernel gives the rights that it knows.
pub(super) const RIGHTS: ABI = ABI::V6;

/// First version with all of them, for messages.
pub(super) const NEWEST_ABI: &str = "ABI 6, Linux 6.12";

/// Files that stay accessible, opened before anything is restricted.
#[derive(Debug)]
pub(super) struct Files {
    read: Vec<Opened>,
    write: Vec<Opened>,
}

#[derive(Debug)]
struct Opened {
    file: PathFd,
    is_folder: bool,
}

impl Files {
    /// Opens the files. They stay open as long as the sandbox lives: the kernel may forget a file of `/proc` that
    /// no process has open, and create it anew, but the rule applies to the opened one.
    pub(super) fn open(config: &SandboxConfig) -> Files {
        let open = |path: &Path| PathFd::new(path).ok().map(|file| Opened { file, is_folder: path.is_dir() });
        Files {
            read: READ.iter().filter_map(|path| open(Path::new(path))).collect(),
            write: config.writable.iter().filter_map(|path| open(path)).collect(),
        }
    }

    /// Restricts the calling thread. Returns the names of the active layers, and the missing restrictions.
    pub(super) fn restrict(&self) -> Result<(Vec<String>, Vec<String>), SandboxError> {
        let status = Ruleset::default()
            .handle_access(AccessFs::from_all(RIGHTS))?
            .handle_access(AccessNet::from_all(RIGHTS))?
            .scope(Scope::from_all(RIGHTS))?
            .create()?
            .add_rules(beneath(&self.read, AccessFs::ReadFile | AccessFs::ReadDir))?
            .add_rules(beneath(&self.write, AccessFs::from_all(RIGHTS) & !refused_in_folders()))?
            .restrict_self()?;
        Ok(match status.ruleset {
            RulesetStatus::FullyEnforced => (vec!["files and TCP by Landlock".into()], Vec::new()),
            RulesetStatus::PartiallyEnforced => {
                let missing = "this kernel's Landlock is older than Linux 6.12: it restricts files, but not all of \
                    TCP, devices and signals";
                (vec!["files by Landlock".into()], vec![missing.into()])
            }
            RulesetStatus::NotEnforced => {
                let missing = "files are not restricted: this kernel has no Landlock (Linux 5.13, \
                    `landlock` among the LSMs at boot)";
                (Vec::new(), vec![missing.into()])
            }
        })
    }
}

/// Rights that a report's folder does not give: to create programs, devices, sockets or folders.
fn refused_in_folders() -> BitFlags<AccessFs> {
    AccessFs::Execute
        | AccessFs::MakeBlock
        | AccessFs::MakeChar
        | AccessFs::MakeDir
        | AccessFs::MakeFifo
        | AccessFs::MakeSock
        | AccessFs::MakeSym
        | AccessFs::RemoveDir
        | AccessFs::IoctlDev
}

/// The rules for these files; a file has only the rights that apply to files.
fn beneath(
    opened: &[Opened],
    access: BitFlags<AccessFs>,
) -> impl Iterator<Item = Result<PathBeneath<&PathFd>, landlock::RulesetError>> {
    opened.iter().map(move |Opened { file, is_folder }| {
        let of_file = access & AccessFs::from_file(RIGHTS);
        Ok(PathBeneath::new(file, if *is_folder { access } else { of_file }))
    })
}
