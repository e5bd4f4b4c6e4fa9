//! Finds the processes that hold pages of the pools.
//!
//! `/proc/PID/status` has the sum of all sizes (`HugetlbPages`), which is cheap to read. Only processes with pages
//! are asked mapping by mapping (`smaps`). proc_pid_smaps(5): `KernelPageSize`, `Private_Hugetlb`, `Shared_Hugetlb`.
//! A page that two processes map counts for both, and unmapped pages of files are invisible: the sum may be more than
//! the pages in use, or less.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Bytes, PageSize};

use super::{HugetlbPools, numbers_in};
use crate::deadline::{self, ProcessKey};

/// One process with pages of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Identifier of the process.
    pub pid: u32,
    /// Name of the process (proc_pid_comm(5)).
    pub name: String,
    /// Page size of the pool.
    pub size: PageSize,
    /// Number of pages that it alone maps.
    pub private: u64,
    /// Number of pages that other processes may map as well.
    pub shared: u64,
}

/// Processes that hold pages, as far as visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// Processes with pages, by number.
    pub found: Vec<Holder>,
    /// Processes that have or may have pages but refuse access; root is not refused.
    pub hidden: Vec<u32>,
    /// Processes that have pages and do not answer, mostly because their memory map is locked.
    pub silent: Vec<u32>,
}

/// Time limit for reading a process's mappings, which takes some milliseconds a gibibyte.
const SMAPS_WITHIN: Duration = Duration::from_secs(2);

/// Number of processes that are asked at the same time.
const AT_ONCE: usize = 8;

impl Holders {
    /// Holders of pages of one pool.
    pub fn of(&self, size: PageSize) -> impl Iterator<Item = &Holder> {
        self.found.iter().filter(move |holder| holder.size == size)
    }

    /// Pages of a pool with a known holder.
    pub fn pages(&self, size: PageSize) -> u64 {
        self.of(size).fold(0, |sum, holder| sum.saturating_add(holder.private).saturating_add(holder.shared))
    }
}

impl HugetlbPools {
    /// Asks every process once. One that ends in the meantime holds nothing. Silent processes cost two seconds for
    /// each `AT_ONCE` of them.
    pub fn holders(&self) -> Holders {
        let mut holders = Holders::default();
        let proc = self.root.join("proc");
        let folder = |pid: u32| proc.join(pid.to_string());
        let pids = numbers_in(&proc, "").into_iter().filter(|pid| !self.has_no_pages(&folder(*pid)));
        for some in pids.collect::<Vec<u32>>().chunks(AT_ONCE) {
            let question = |pid: &u32| {
                let (files, smaps) = (Arc::clone(&self.files), folder(*pid).join("smaps"));
                (ProcessKey::of(&proc, *pid), move || files.read(&smaps))
            };
            let answers = deadline::ask_all(SMAPS_WITHIN, some.iter().map(question));
            for (pid, answer) in some.iter().copied().zip(answers) {
                match answer {
                    Ok(Ok(smaps)) => holders.found.extend(self.pages_of(pid, &folder(pid), &smaps)),
                    Ok(Err(_)) if !folder(pid).is_dir() => {}
                    Ok(Err(_)) => holders.hidden.push(pid),
                    Err(_) => holders.silent.push(pid),
                }
            }
        }
        holders
    }

    /// Whether the kernel says so; kernels before 4.4 and processes that just ended say nothing.
    fn has_no_pages(&self, folder: &Path) -> bool {
        let status = self.files.read(&folder.join("status")).unwrap_or_default();
        let pages = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:"));
        // A kernel thread maps nothing and has no such line, nor the line about its memory size.
        let is_kernel_thread = !status.is_empty() && !status.lines().any(|line| line.starts_with("VmSize:"));
        is_kernel_thread || pages.is_some_and(|pages| pages.trim() == "0 kB")
    }

    fn pages_of(&self, pid: u32, folder: &Path, smaps: &str) -> Vec<Holder> {
        let name = self.files.read(&folder.join("comm")).unwrap_or_default().trim().to_owned();
        let sizes = [PageSize::Huge2M, PageSize::Giant1G].into_iter();
        let holder = |size| {
            let (private, shared) = pages_in(smaps, size);
            Holder { pid, name: name.clone(), size, private, shared }
        };
        sizes.map(holder).filter(|holder| (holder.private, holder.shared) != (0, 0)).collect()
    }
}

/// Number of private and shared pages of one size in an smaps file.
fn pages_in(smaps: &str, size: PageSize) -> (u64, u64) {
    let (mut private, mut shared, mut is_of_size) = (Bytes::ZERO, Bytes::ZERO, false);
    for line in smaps.lines() {
        let Some((field, Some(bytes))) = line.split_once(':').map(|(field, value)| (field, in_kib(value))) else {
            continue;
        };
        let sum = match field {
            "KernelPageSize" => {
                is_of_size = bytes == size.bytes();
                continue;
            }
            "Private_Hugetlb" if is_of_size => &mut private,
            "Shared_Hugetlb" if is_of_size => &mut shared,
            _ => continue,
        };
        *sum = sum.checked_add(bytes).unwrap_or(*sum);
    }
    (private.get() / size.bytes().get(), shared.get() / size.bytes().get())
}

fn in_kib(value: &str) -> Option<Bytes> {
    let kibibytes: u64 = value.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1 << 10).map(Bytes::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::fake_kernel::Tree;

    const SMAPS: &str = "\
7f0000000000-7f0000800000 rw-p 00000000 00:0f 7   /anon_hugepage (deleted)
Size:               8192 kB
KernelPageSize:     2048 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:    6144 kB
7f0040000000-7f00c0000000 rw-s 00000000 00:10 8   /dev/hugepages1G/ram
KernelPageSize:  1048576 kB
Shared_Hugetlb:  1048576 kB
Private_Hugetlb:       0 kB
7f0100000000-7f0100001000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
Private_Hugetlb:    4096 kB
VmFlags: rd wr
";

    #[test]
    fn holders_are_listed_by_pool_and_processes_without_pages_are_not_asked() {
        let tree = Tree::new();
        tree.put("proc/30/status", "VmSize:\t 10 kB\nHugetlbPages:\t 1054720 kB\n");
        tree.put("proc/30/smaps", SMAPS);
        tree.put("proc/30/comm", "qemu-system-x86\n");
        // Has pages of the pool but reports none: it is not asked.
        tree.put("proc/31/status", "VmSize:\t 10 kB\nHugetlbPages:\t       0 kB\n");
        tree.put("proc/31/smaps", SMAPS);
        let holders = tree.pools().holders();
        let holder = |size, private, shared| Holder { pid: 30, name: "qemu-system-x86".into(), size, private, shared };
        assert_eq!(holders.found, [holder(PageSize::Huge2M, 3, 0), holder(PageSize::Giant1G, 0, 1)]);
        assert_eq!((holders.pages(PageSize::Huge2M), holders.pages(PageSize::Giant1G)), (3, 1));
        assert_eq!(holders.hidden, [0; 0]);
    }

    #[test]
    fn a_process_that_refuses_access_is_named_and_kernel_threads_are_not() {
        let tree = Tree::new();
        tree.put("proc/40/status", "Name:\t a\nVmSize:\t 10 kB\nHugetlbPages:\t 2048 kB\n"); // and no smaps
        tree.put("proc/2/status", "Name:\tkthreadd\n");
        assert_eq!(tree.pools().holders(), Holders { hidden: vec![40], ..Holders::default() });
    }

    #[test]
    fn a_silent_process_is_named_and_the_others_are_listed() {
        let tree = Tree::new();
        for pid in [81, 82] {
            tree.put(&format!("proc/{pid}/status"), "VmSize:\t 10 kB\nHugetlbPages:\t 1054720 kB\n");
            tree.put(&format!("proc/{pid}/smaps"), SMAPS);
        }
        let hanging = tree.path().join("proc/81/smaps");
        std::fs::remove_file(&hanging).expect("it was there");
        nix::unistd::mkfifo(&hanging, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO without a writer");
        let holders = tree.pools().holders();
        let found: Vec<u32> = holders.of(PageSize::Huge2M).map(|holder| holder.pid).collect();
        assert_eq!((found, holders.silent, holders.hidden), (vec![82], vec![81], vec![]));
        drop(std::fs::File::options().write(true).open(&hanging).expect("a reader waits"));
    }
}
