//! Mappings of a process: `smaps`, for which the kernel walks the page tables, and `maps`, for which it does not
//! (proc_pid_smaps(5)). The process chooses the names in both, and may keep their lock for ever.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use procfs::process::{MMPermissions, MMapPath, MemoryMap, MemoryMaps, Process, VmFlags};
use procfs::{FromBufRead as _, ProcError};
use wideleaf_memory::deadline::{self, NoAnswer};
use wideleaf_policies::{Bytes, Hva, PageSize};

use super::{Lost, NEEDED_TO_LOOK, VmProcess, bounded, open};
use crate::mapping::Mapping;

impl VmProcess {
    /// Its mappings, ascending. The kernel walks the process's page tables for this: a few milliseconds per
    /// gibibyte in base pages. Takes at most `MAPPINGS_WITHIN`, longer for a large process.
    ///
    /// # Errors
    /// [`Lost`] without the permission or an answer.
    pub fn mappings(&self) -> Result<Vec<Mapping>, Lost> {
        let lost = |error: ProcError| Lost { what: MAPPINGS, why: short(&error), needs: NEEDED_TO_LOOK };
        let silent = |no_answer: NoAnswer| Lost { what: MAPPINGS, why: format!("it {no_answer}"), needs: ANSWER };
        let (places, pid) = (self.places.clone(), self.pid);
        let read = move || {
            let process = open(&places, pid)?;
            let file_systems = file_systems(&process);
            let maps = smaps(&process)?;
            Ok(maps.into_iter().map(|map| mapping(&map, &file_systems)).collect())
        };
        deadline::ask(self.key(), self.time_with_mappings(MAPPINGS_WITHIN), read).map_err(silent)?.map_err(lost)
    }

    /// Time for work that reads the mappings: `least`, and more the more memory the process has in use.
    pub(crate) fn time_with_mappings(&self, least: Duration) -> Duration {
        let gibibytes = self.status().map_or(0, |status| status.in_use.get() >> 30);
        least + MORE_FOR_EACH_GIB * u32::try_from(gibibytes).unwrap_or(u32::MAX)
    }

    /// Its mappings as `maps` has them, a line each, which costs no walk of page tables. Takes at most
    /// [`deadline::BRIEF`]; `None` where they are not readable for now.
    pub(crate) fn maps(&self) -> Option<String> {
        let (places, pid) = (self.places.clone(), self.pid);
        let read = move || bounded(&open(&places, pid)?, "maps", MAPS_BYTES_MAX);
        let bytes = deadline::ask(self.key(), deadline::BRIEF, read).ok()?.ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Figure of [`Lost`] for the mappings.
const MAPPINGS: &str = "its mappings (smaps)";

/// Remedy for a process that hangs.
const ANSWER: &str = "the process to answer";

/// Time for the mappings of a small process.
const MAPPINGS_WITHIN: Duration = Duration::from_secs(10);

/// More time for each GiB in use: several times what the kernel takes for it in base pages, since the host may be busy.
const MORE_FOR_EACH_GIB: Duration = Duration::from_millis(20);

/// Upper bound on `smaps`, in bytes: forty thousand mappings, of which a QEMU with a thousand threads has a tenth.
/// The kernel allows a million, with long names.
const SMAPS_BYTES_MAX: usize = 32 << 20;

/// Upper bound on `maps`, in bytes: a twelfth of `smaps` for the same mappings.
const MAPS_BYTES_MAX: usize = 4 << 20;

/// The kernel's error without the path, which does not help a reader.
fn short(error: &ProcError) -> String {
    match error {
        ProcError::PermissionDenied(_) => "permission denied".into(),
        ProcError::NotFound(_) => "the process has ended".into(),
        other => other.to_string(),
    }
}

/// The process chooses the names in there. Names like those of System V shared memory are changed to lower case,
/// since the parser trusts their form. It does not know `ui`, a userfaultfd for minor faults: that becomes `um`.
fn smaps(process: &Process) -> Result<MemoryMaps, ProcError> {
    let bytes = bounded(process, "smaps", SMAPS_BYTES_MAX)?;
    let text = String::from_utf8_lossy(&bytes).replace("/SYSV", "/sysv");
    MemoryMaps::from_buf_read(text.split_inclusive('\n').map(with_known_flags).collect::<String>().as_bytes())
}

fn with_known_flags(line: &str) -> Cow<'_, str> {
    match line.starts_with("VmFlags:") && line.contains(" ui") {
        true => Cow::Owned(line.replace(" ui", " um")),
        false => Cow::Borrowed(line),
    }
}

/// File systems by device, as the process has them mounted; empty where that is not readable.
fn file_systems(process: &Process) -> HashMap<String, String> {
    let mounts = process.mountinfo().map(|mounts| mounts.0).unwrap_or_default();
    mounts.into_iter().map(|mount| (mount.majmin, mount.fs_type)).collect()
}

fn mapping(map: &MemoryMap, file_systems: &HashMap<String, String>) -> Mapping {
    let flags = map.extension.vm_flags;
    let path = match &map.pathname {
        MMapPath::Anonymous | MMapPath::Heap | MMapPath::Stack => None,
        // Anonymous memory that its process has named (PR_SET_VMA_ANON_NAME).
        MMapPath::Other(name) if name.starts_with("anon:") => None,
        MMapPath::Path(path) => Some(path.to_string_lossy().into_owned()),
        other => Some(format!("{other:?}")),
    };
    Mapping {
        start: Hva::new(map.address.0),
        bytes: Bytes::new(map.address.1.saturating_sub(map.address.0)),
        offset: Bytes::new(map.offset),
        is_writable: map.perms.contains(MMPermissions::WRITE),
        is_private: map.perms.contains(MMPermissions::PRIVATE),
        file_system: path.as_ref().and_then(|_| file_systems.get(&format!("{}:{}", map.dev.0, map.dev.1)).cloned()),
        path,
        kernel_page: map
            .extension
            .map
            .get("KernelPageSize")
            .map_or(PageSize::Base4K.bytes(), |bytes| Bytes::new(*bytes)),
        is_kept_small: flags.contains(VmFlags::NH),
        is_watched: flags.intersects(VmFlags::UM | VmFlags::UW),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::tests::fake_places;
    use crate::process::tests::{add_process, end_of, hang};
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn mappings_that_hang_or_never_end_are_lost_within_the_deadline() {
        let (_folder, places) = fake_places();
        add_process(&places, 74, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let guest = VmProcess::look(&places, 74).expect("it is there").expect("a VM");
        symlink("/dev/zero", places.proc.join("74/maps")).expect("the link is new");
        assert_eq!(guest.maps(), None);
        hang(&places, 74, "maps");
        assert_eq!(guest.maps(), None);
        // The kernel holds one lock for both files.
        let lost = guest.mappings().expect_err("it hangs").to_string();
        assert!(lost.contains("it does not answer"), "{lost}");
        end_of(&places, 74, "maps");
    }

    #[test]
    fn anonymous_memory_with_a_name_is_anonymous() {
        let (_folder, places) = fake_places();
        add_process(&places, 14, &["firecracker"], &["anon_inode:kvm-vm"]);
        let text = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0    [anon:guest ram]\nSize: 2048 kB\n";
        fs::write(places.proc.join("14/smaps"), text).expect("written");
        let guest = VmProcess::look(&places, 14).expect("it is there").expect("a VM");
        assert_eq!(guest.mappings().expect("readable")[0].path, None);
    }

    #[test]
    fn memory_with_a_userfaultfd_of_any_mode_is_watched() {
        let (_folder, places) = fake_places();
        add_process(&places, 15, &["firecracker"], &["anon_inode:kvm-vm"]);
        let guest = VmProcess::look(&places, 15).expect("it is there").expect("a VM");
        for (flags, is_watched) in [("", false), (" um", true), (" uw", true), (" ui", true), (" ui uw", true)] {
            let head = "7f0000000000-7f0000200000 rw-s 00000000 00:01 7    /memfd:a ui (deleted)\nSize: 2048 kB\n";
            let text = format!("{head}VmFlags: rd wr sh mr mw me ms{flags} \n");
            fs::write(places.proc.join("15/smaps"), text).expect("written");
            let mappings = guest.mappings().expect("readable");
            assert_eq!(mappings[0].is_watched, is_watched, "{flags:?}");
            assert!(mappings[0].path.as_ref().is_some_and(|path| path.contains("a ui")), "{:?}", mappings[0].path);
        }
    }
}
