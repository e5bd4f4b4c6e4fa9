//! Paths of the kernel's and of libvirt's files, and what these say of the host and of domains (proc(5),
//! transhuge.rst). Another user may have written a file in libvirt's folder; such a file is ignored.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use wideleaf_policies::{Bytes, PageSize};

/// Paths of the files of the kernel and of libvirt; tests have their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Folder of the processes, `/proc`.
    pub proc: PathBuf,
    /// libvirt's files about running domains, `NAME.pid` and `NAME.xml`.
    pub libvirt: PathBuf,
    /// Folder of the devices, `/sys`.
    pub sys: PathBuf,
    /// User that libvirt runs as: root. Files of other users in its folder are ignored.
    pub libvirt_uid: u32,
}

impl Default for Places {
    fn default() -> Places {
        Places { proc: "/proc".into(), libvirt: "/run/libvirt/qemu".into(), sys: "/sys".into(), libvirt_uid: 0 }
    }
}

impl Places {
    /// Path of libvirt's file about a domain; `None` where no file can have such a name.
    pub fn domain_file(&self, domain: &str, suffix: &str) -> Option<PathBuf> {
        (!domain.is_empty() && !domain.contains(['/', '\0'])).then(|| self.libvirt.join(format!("{domain}.{suffix}")))
    }

    /// Memory of the host in bytes (proc_meminfo(5)); `None` where it is not readable.
    pub fn host_memory(&self) -> Option<Bytes> {
        let text = fs::read_to_string(self.proc.join("meminfo")).ok()?;
        let kibibytes = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?.trim().strip_suffix(" kB")?;
        kibibytes.parse::<u64>().ok()?.checked_mul(1 << 10).map(Bytes::new)
    }

    /// Whether the host's THP setting is `never` (transhuge.rst).
    pub fn is_thp_never(&self) -> bool {
        chosen(&self.sys.join("kernel/mm/transparent_hugepage/enabled")).as_deref() == Some("never")
    }

    /// Sizes between 4 KiB and 2 MiB in which this host also makes pages (multi-size THP, transhuge.rst), ascending:
    /// those that are not `never`, or inherit a setting that is not.
    pub fn smaller_folios(&self) -> Vec<Bytes> {
        let folder = self.sys.join("kernel/mm/transparent_hugepage");
        let is_on = |name: &str| match chosen(&folder.join(name).join("enabled")).as_deref() {
            Some("inherit") => chosen(&folder.join("enabled")).is_some_and(|setting| setting != "never"),
            Some(setting) => setting != "never",
            None => false,
        };
        let size = |name: &str| {
            let kibibytes = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?;
            kibibytes.checked_mul(1 << 10).map(Bytes::new).filter(|size| *size < PageSize::Huge2M.bytes())
        };
        let names = fs::read_dir(&folder).into_iter().flatten();
        let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut sizes: Vec<Bytes> = names.filter(|name| is_on(name)).filter_map(|name| size(&name)).collect();
        sizes.sort_unstable();
        sizes
    }

    /// The process of a running domain according to libvirt. `None` also where another user may have written the
    /// file: a link, a file of another user, or one that other users can write or replace.
    pub fn domain_pid(&self, domain: &str) -> Option<u32> {
        let path = self.domain_file(domain, "pid")?;
        // A FIFO in its place would make this call wait.
        let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
        let file = fs::File::options().read(true).custom_flags(flags).open(path).ok()?;
        let is_libvirts = |of: &fs::Metadata| of.uid() == self.libvirt_uid && of.mode() & WRITABLE_BY_OTHERS == 0;
        let folder = fs::metadata(&self.libvirt).ok().filter(is_libvirts)?;
        file.metadata().ok().filter(is_libvirts).filter(|file| file.is_file() && folder.is_dir())?;
        let mut text = String::new();
        file.take(PID_BYTES_MAX).read_to_string(&mut text).ok()?;
        text.trim().parse().ok()
    }

    /// The libvirt domain of a process, for one that does not answer.
    pub(crate) fn domain_of(&self, pid: u32) -> Option<String> {
        let names = fs::read_dir(&self.libvirt).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut domains = names.filter_map(|name| name.strip_suffix(".pid").map(str::to_owned));
        domains.find(|domain| self.domain_pid(domain) == Some(pid))
    }

    /// Whether libvirt assigns that domain to another process, which lives.
    pub(crate) fn is_domain_of_another(&self, domain: &str, pid: u32) -> bool {
        self.domain_pid(domain).is_some_and(|other| other != pid && self.proc.join(other.to_string()).exists())
    }
}

/// The chosen word of a setting like `always [madvise] never`.
fn chosen(setting: &Path) -> Option<String> {
    let text = fs::read_to_string(setting).ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Write permission for the group and other users (inode(7)).
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Upper bound on a file with a process id, in bytes. A process id has seven digits (proc_sys_kernel(5), `pid_max`).
const PID_BYTES_MAX: u64 = 32;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// A `/proc` with one process, and a folder of libvirt's.
    pub(crate) fn fake_places() -> (tempfile::TempDir, Places) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let places = Places {
            proc: folder.path().join("proc"),
            libvirt: folder.path().join("libvirt"),
            sys: folder.path().join("sys"),
            libvirt_uid: nix::unistd::geteuid().as_raw(),
        };
        for path in [&places.proc, &places.libvirt, &places.sys] {
            fs::create_dir(path).expect("the folder is new");
        }
        fs::set_permissions(&places.libvirt, Permissions::from_mode(0o755)).expect("its owner's");
        (folder, places)
    }

    /// Assigns a process to a domain, as libvirt does.
    pub(crate) fn say_domain(places: &Places, name: &str, pid: u32) {
        let file = places.libvirt.join(format!("{name}.pid"));
        fs::write(&file, pid.to_string()).expect("written");
        fs::set_permissions(&file, Permissions::from_mode(0o644)).expect("its owner's");
    }

    #[test]
    fn only_a_file_that_libvirt_alone_can_write_says_which_process_a_domain_is() {
        let (folder, places) = fake_places();
        let file = places.libvirt.join("web.pid");
        let chmod = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("its owner's");
        say_domain(&places, "web", 7);
        assert_eq!(places.domain_pid("web"), Some(7));
        assert_eq!(
            Places { libvirt_uid: places.libvirt_uid + 1, ..places.clone() }.domain_pid("web"),
            None,
            "another user"
        );
        for path in [&file, &places.libvirt] {
            let before = fs::metadata(path).expect("it is there").permissions();
            for mode in [0o775, 0o757] {
                chmod(path, mode);
                assert_eq!(places.domain_pid("web"), None, "{} is {mode:o}", path.display());
            }
            fs::set_permissions(path, before).expect("its owner's");
        }
        fs::rename(&file, folder.path().join("elsewhere")).expect("it was there");
        symlink(folder.path().join("elsewhere"), &file).expect("the link is new");
        assert_eq!(places.domain_pid("web"), None, "a link");
        fs::remove_file(&file).expect("it was there");
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRUSR).expect("a FIFO");
        assert_eq!(places.domain_pid("web"), None, "the read does not wait for a writer");
    }

    #[test]
    fn sizes_between_4k_and_2m_are_those_that_the_host_has_switched_on() {
        let (_folder, places) = fake_places();
        assert!(places.smaller_folios().is_empty(), "an old kernel");
        let folder = places.sys.join("kernel/mm/transparent_hugepage");
        for (name, setting) in [
            ("hugepages-64kB", "always inherit [madvise] never"),
            ("hugepages-16kB", "always [inherit] madvise never"),
            ("hugepages-32kB", "always inherit madvise [never]"),
            ("hugepages-2048kB", "always [inherit] madvise never"),
            ("hugepages-xkB", "[always]"),
        ] {
            fs::create_dir_all(folder.join(name)).expect("the folder is new");
            fs::write(folder.join(name).join("enabled"), setting).expect("written");
        }
        let kib = |sizes: Vec<Bytes>| sizes.iter().map(|size| size.get() >> 10).collect::<Vec<_>>();
        for (all, expected) in [("always [madvise] never", &[16, 64][..]), ("always madvise [never]", &[64])] {
            fs::write(folder.join("enabled"), all).expect("written");
            assert_eq!(kib(places.smaller_folios()), expected, "{all}");
        }
    }

    #[test]
    fn no_file_of_libvirts_is_outside_its_folder() {
        let places = Places::default();
        assert_eq!(places.domain_file("../../etc/shadow", "pid"), None);
        assert_eq!(places.domain_file("", "pid"), None);
        assert_eq!(places.domain_file("web", "pid"), Some("/run/libvirt/qemu/web.pid".into()));
    }
}
