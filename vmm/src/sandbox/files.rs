//! Which files can be opened once the guest runs (Landlock: Documentation/userspace-api/landlock.rst). What is open already, disks, the
//! image, a recording, stays usable.
//!
//! ```text
//!   read    /proc/self, a few of /proc, /sys/kernel/mm, KVM's parameters, NUMA nodes     what the manager's sensors read
//!   write   the folder of --output, if there is one                                      the report
//!   else    nothing: no other file, no TCP, no abstract socket, no signal to a process outside
//! ```
//!
//! A kernel without Landlock, or one of an early version, restricts less; what, is said.

use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetStatus, Scope,
};

use super::{SandboxConfig, SandboxError};

/// What a process of ours reads while its guest runs. What is not there on a host is left out.
pub const READ: &[&str] = &[
    "/proc/self",
    "/proc/buddyinfo",
    "/proc/cpuinfo",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys/kernel/osrelease",
    "/sys/devices/system/node",
    "/sys/kernel/mm",
    "/sys/module/kvm",
    "/sys/module/kvm_amd",
    "/sys/module/kvm_intel",
];

/// Newest rights that are asked for: those of Linux 6.12. An older kernel gives what it has.
pub(super) const RIGHTS: ABI = ABI::V6;

/// What has all of them, for people.
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
    /// Opens them. They are kept open as long as the sandbox lives: a file of `/proc` that nobody has open may be forgotten by the
    /// kernel and made anew, and the rule is for the one that was opened.
    pub(super) fn open(config: &SandboxConfig) -> Files {
        let open = |path: &Path| PathFd::new(path).ok().map(|file| Opened { file, is_folder: path.is_dir() });
        Files {
            read: READ.iter().filter_map(|path| open(Path::new(path))).collect(),
            write: config.writable.iter().filter_map(|path| open(path)).collect(),
        }
    }

    /// Restricts the calling thread. The layers that hold, in words, and what is missing of them.
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
                let missing = "this kernel's Landlock is older than Linux 6.12: files are restricted, not all of TCP, devices and signals";
                (vec!["files by Landlock".into()], vec![missing.into()])
            }
            RulesetStatus::NotEnforced => {
                let missing = "files are not restricted: this kernel has no Landlock (Linux 5.13, `landlock` among the LSMs at boot)";
                (Vec::new(), vec![missing.into()])
            }
        })
    }
}

/// Nobody makes a program, a device, a socket or a folder where a report goes.
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

/// Of a file, only the rights that files have.
fn beneath(
    opened: &[Opened],
    access: BitFlags<AccessFs>,
) -> impl Iterator<Item = Result<PathBeneath<&PathFd>, landlock::RulesetError>> {
    opened.iter().map(move |Opened { file, is_folder }| {
        let of_file = access & AccessFs::from_file(RIGHTS);
        Ok(PathBeneath::new(file, if *is_folder { access } else { of_file }))
    })
}
