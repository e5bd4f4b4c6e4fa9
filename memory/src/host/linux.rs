//! The real host: this process's own address space under Linux. It calls the kernel and decides nothing; no call
//! changes the contents of memory.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use wideleaf_policies::{Bytes, Hva, Moment, NodeId};

use super::ready_page::ReadyPage;
use super::{Advice, Host, HostError, PageRun};
use crate::numa::host::HostNodes;
use crate::sys;

/// Address space of this process.
#[derive(Debug)]
pub struct LinuxHost {
    pagemap: File,
    opened_at: Instant,
    ready_page: ReadyPage,
    /// Whether the machine has several NUMA nodes with memory.
    has_nodes: bool,
}

impl LinuxHost {
    /// Opens `/proc/self/pagemap`. That needs no privilege, since page frame numbers are not read.
    ///
    /// # Errors
    /// [`HostError`] if `/proc` is not mounted.
    pub fn open() -> Result<LinuxHost, HostError> {
        let pagemap =
            File::open("/proc/self/pagemap").map_err(|source| HostError { what: "open /proc/self/pagemap", source })?;
        let has_nodes = HostNodes::are_several(Path::new("/"));
        Ok(LinuxHost { pagemap, opened_at: Instant::now(), ready_page: ReadyPage::default(), has_nodes })
    }
}

impl Host for LinuxHost {
    fn now(&self) -> Moment {
        Moment::after_start(self.opened_at.elapsed())
    }

    fn thread_cpu_time(&self) -> Duration {
        sys::clock::thread_cpu_time()
    }

    fn process_cpu_time(&self) -> Option<Duration> {
        sys::clock::process_cpu_time()
    }

    fn sleep_until_process_used(&self, cpu_time: Duration) -> bool {
        sys::clock::sleep_until_process_used(cpu_time)
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError> {
        let what = match advice {
            Advice::HugePage => "madvise(MADV_HUGEPAGE)",
            Advice::NoHugePage => "madvise(MADV_NOHUGEPAGE)",
            Advice::Collapse => "madvise(MADV_COLLAPSE)",
            Advice::PopulateWrite => "madvise(MADV_POPULATE_WRITE)",
            Advice::PopulateRead => "madvise(MADV_POPULATE_READ)",
            Advice::Cold => "madvise(MADV_COLD)",
        };
        sys::madvise::madvise(start, bytes, advice).map_err(|source| HostError { what, source })
    }

    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        sys::pagemap::scan(&self.pagemap, start, bytes, runs)
            .map_err(|source| HostError { what: "PAGEMAP_SCAN of /proc/self/pagemap", source })
    }

    fn scan_occupied(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        sys::pagemap::scan_occupied(&self.pagemap, start, bytes, runs)
            .map_err(|source| HostError { what: "PAGEMAP_SCAN of /proc/self/pagemap", source })
    }

    fn is_one_mapping(&self, start: Hva, bytes: Bytes) -> Result<bool, HostError> {
        Ok(covers(&self.read_text("/proc/self/maps")?, start.get(), (start + bytes).get()))
    }

    fn read_text(&self, path: &str) -> Result<String, HostError> {
        std::fs::read_to_string(path).map_err(|source| HostError { what: "read a kernel file", source })
    }

    fn nodes_of(&self, pages: &[Hva], nodes: &mut Vec<Option<NodeId>>) -> Result<(), HostError> {
        sys::page_nodes::nodes_of(0, pages, nodes).map_err(|source| HostError { what: "move_pages", source })
    }

    fn move_to_node(&self, pages: &[Hva], node: NodeId) -> Result<(), HostError> {
        sys::page_nodes::move_to(0, pages, node).map_err(|source| HostError { what: "move_pages", source })
    }

    fn threads(&self) -> Result<Vec<u32>, HostError> {
        threads_in(Path::new("/proc/self/task"))
    }

    fn make_huge_page_ready(&self, start: Hva) {
        let node = self.has_nodes.then(|| sys::page_nodes::node_of(start).ok().flatten()).flatten();
        if let Err(error) = self.ready_page.make(node) {
            tracing::debug!("no huge page was made ready for a collapse: {error}");
        }
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Numbers of the threads in a folder `/proc/PID/task` (proc_pid_task(5)), ascending.
pub(super) fn threads_in(folder: &Path) -> Result<Vec<u32>, HostError> {
    let cannot = |source| HostError { what: "read /proc/PID/task", source };
    let names = std::fs::read_dir(folder).map_err(cannot)?;
    let mut threads: Vec<u32> = names.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    threads.sort_unstable();
    Ok(threads)
}

/// Whether a line of `/proc/<pid>/maps` (`start-end …` in hexadecimal; proc_pid_maps(5)) covers all of `[start, end)`.
pub(super) fn covers(maps: &str, start: u64, end: u64) -> bool {
    let bounds = |line: &str| {
        let (first, behind) = line.split_whitespace().next()?.split_once('-')?;
        Some((u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(behind, 16).ok()?))
    };
    maps.lines().filter_map(bounds).any(|(first, behind)| first <= start && end <= behind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_two_mappings_is_not_covered() {
        //  [1000---3000) [3000---4000)
        let maps = "1000-3000 rw-p 00000000 00:00 0\n3000-4000 rw-p 00000000 00:00 0 [heap]\n";
        assert!(covers(maps, 0x1000, 0x3000) && covers(maps, 0x2000, 0x3000) && covers(maps, 0x3000, 0x4000));
        assert!(!covers(maps, 0x2000, 0x4000) && !covers(maps, 0x4000, 0x5000) && !covers("", 0, 1));
    }
}
