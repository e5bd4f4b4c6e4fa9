//! Flags of single frames (`/proc/kpageflags`, Documentation/admin-guide/mm/pagemap.rst): which pages of a window KSM
//! has merged with equal ones. A large page would give each its own memory again.
//!
//! ```text
//!   pagemap     present, mapped more than once?  ── frame number ──▶  kpageflags: KSM?
//!   ksm_stat    number of merged pages of a process: without frame numbers, which need CAP_SYS_ADMIN
//! ```
//!
//! Private memory without merged pages is mapped once, so that a window costs one read of 4 KiB: some 20 us.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Hva, OutcomeResult, PageSize};

use crate::host::process::ProcessHost;
use crate::host::{Host, HostError};

/// Size of an entry in bytes: both files have a number of 64 bits for each page.
const ENTRY: u64 = size_of::<u64>() as u64;
const WINDOW_ENTRIES: usize = BASE_PAGES_PER_WINDOW as usize;

/// Bits of an entry of `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const EXCLUSIVELY_MAPPED: u64 = 1 << 56;
const FRAME: u64 = (1 << 55) - 1;
/// Bit of `/proc/kpageflags`: `KPF_KSM`.
const KSM: u64 = 1 << 21;

/// Finds merged pages in one process.
#[derive(Debug)]
pub struct MergedPages {
    pagemap: File,
    kpageflags: File,
}

/// Why the merged pages are not known.
#[derive(Debug, thiserror::Error)]
pub enum KernelFlagsError {
    /// A file cannot be opened or read.
    #[error("cannot find pages merged by KSM: {what}: {source}; run as root (CAP_SYS_ADMIN)")]
    File {
        /// The file, and the operation on it.
        what: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel hides frame numbers from this process.
    #[error("cannot find pages merged by KSM: frame numbers are hidden; run as root (CAP_SYS_ADMIN)")]
    FramesHidden,
    /// The process cannot be asked.
    #[error(transparent)]
    Process(#[from] HostError),
}

impl From<KernelFlagsError> for OutcomeResult {
    fn from(error: KernelFlagsError) -> OutcomeResult {
        let error = match error {
            KernelFlagsError::File { what, source } => HostError { what, source },
            KernelFlagsError::FramesHidden => {
                HostError { what: "frame numbers", source: io::Error::from_raw_os_error(libc::EPERM) }
            }
            KernelFlagsError::Process(error) => error,
        };
        (&error).into()
    }
}

impl MergedPages {
    /// Opens the files for this process.
    ///
    /// # Errors
    /// [`KernelFlagsError`] if its pagemap or the kernel's flags may not be read.
    pub fn open(process: &ProcessHost) -> Result<MergedPages, KernelFlagsError> {
        let open = |source| KernelFlagsError::File { what: "open /proc/kpageflags", source };
        let kpageflags = File::open("/proc/kpageflags").map_err(open)?;
        Ok(MergedPages::of_files(process.open_file("pagemap")?, kpageflags))
    }

    /// Uses these files in place of the kernel's.
    pub fn of_files(pagemap: File, kpageflags: File) -> MergedPages {
        MergedPages { pagemap, kpageflags }
    }

    /// Number of base pages of the window at `start` that are merged with others.
    ///
    /// # Errors
    /// [`KernelFlagsError`] if the files cannot be read, or hide their contents.
    pub fn of_window(&self, start: Hva) -> Result<u16, KernelFlagsError> {
        let mut entries = [0_u8; WINDOW_ENTRIES * ENTRY as usize];
        let at = start.get() / PageSize::Base4K.bytes().get() * ENTRY;
        let read = |source| KernelFlagsError::File { what: "read /proc/PID/pagemap", source };
        self.pagemap.read_exact_at(&mut entries, at).map_err(read)?;
        let (entries, _) = entries.as_chunks();
        let is_shared = |entry: &u64| entry & PRESENT != 0 && entry & EXCLUSIVELY_MAPPED == 0;
        let mut merged = 0;
        for entry in entries.iter().map(|entry| u64::from_ne_bytes(*entry)).filter(is_shared) {
            merged += u16::from(self.is_merged(entry & FRAME)?);
        }
        Ok(merged)
    }

    fn is_merged(&self, frame: u64) -> Result<bool, KernelFlagsError> {
        if frame == 0 {
            return Err(KernelFlagsError::FramesHidden);
        }
        let mut flags = [0; ENTRY as usize];
        let read = |source| KernelFlagsError::File { what: "read /proc/kpageflags", source };
        self.kpageflags.read_exact_at(&mut flags, frame * ENTRY).map_err(read)?;
        Ok(u64::from_ne_bytes(flags) & KSM != 0)
    }
}

/// Number of merged pages of a process, without saying which (`/proc/PID/ksm_stat`, Linux 6.1; its owner may read
/// it). `None` if the kernel does not report it.
///
/// # Errors
/// [`HostError`] if the file cannot be read.
pub fn merged_pages(host: &dyn Host) -> Result<Option<u64>, HostError> {
    Ok(parse_merged(&host.read_text("/proc/self/ksm_stat")?))
}

fn parse_merged(ksm_stat: &str) -> Option<u64> {
    ksm_stat.lines().find_map(|line| line.strip_prefix("ksm_merging_pages "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use std::io::Write;
    use tempfile::tempfile;
    use wideleaf_policies::units::kib;

    const START: Hva = Hva::new(1 << 30);
    const FRAMES: u64 = 700;

    /// A pagemap with these entries from [`START`] on and no others, and a kernel in which KSM has merged
    /// the odd frames.
    fn sensor(entries: &[u64]) -> MergedPages {
        let pagemap = tempfile().expect("a temporary file");
        let at = START.get() / kib(4).get() * ENTRY;
        pagemap.set_len(at + WINDOW_ENTRIES as u64 * ENTRY).expect("sparse");
        for (index, entry) in entries.iter().enumerate() {
            pagemap.write_all_at(&entry.to_ne_bytes(), at + index as u64 * ENTRY).expect("written");
        }
        let mut kpageflags = tempfile().expect("a temporary file");
        for frame in 0..FRAMES {
            let flags = if frame % 2 == 1 { KSM } else { !KSM };
            kpageflags.write_all(&flags.to_ne_bytes()).expect("written");
        }
        MergedPages::of_files(pagemap, kpageflags)
    }

    #[test]
    fn only_pages_that_are_present_shared_and_ksms_are_merged() {
        // merged, not KSM's, mapped once, swapped out (frame bits are something else there), merged, nothing
        let entries = [PRESENT | 3, PRESENT | 4, PRESENT | EXCLUSIVELY_MAPPED | 5, 1 << 62 | 7, PRESENT | 699, 0];
        assert_eq!(sensor(&entries).of_window(START).expect("files"), 2);
        assert_eq!(sensor(&[]).of_window(START).expect("files"), 0);
    }

    #[test]
    fn frames_that_are_hidden_and_files_that_end_are_errors() {
        let hidden = sensor(&[PRESENT]).of_window(START);
        assert!(matches!(hidden, Err(KernelFlagsError::FramesHidden)), "{hidden:?}");
        let beyond = sensor(&[PRESENT | FRAMES]).of_window(START);
        assert!(matches!(beyond, Err(KernelFlagsError::File { .. })), "{beyond:?}");
        let no_such_window = sensor(&[]).of_window(START + kib(4));
        assert!(matches!(no_such_window, Err(KernelFlagsError::File { .. })), "{no_such_window:?}");
    }

    #[test]
    fn a_process_says_how_many_of_its_pages_are_merged() {
        let host = FakeHost::default();
        assert!(merged_pages(&host).is_err(), "an old kernel has no such file");
        host.set_text("/proc/self/ksm_stat", "ksm_rmap_items 7\nksm_zero_pages 0\nksm_merging_pages 512\n");
        assert_eq!(merged_pages(&host).expect("a file"), Some(512));
        host.set_text("/proc/self/ksm_stat", "ksm_merging_pages many\n");
        assert_eq!(merged_pages(&host).expect("a file"), None);
    }
}
