//! What the kernel says of single frames (`/proc/kpageflags`, Documentation/admin-guide/mm/pagemap.rst): which pages of a window
//! are merged with equal ones (KSM). A large page would give each its own memory again.
//!
//! ```text
//!   pagemap     present, mapped more than once?  ── frame number ──▶  kpageflags: KSM?
//!   ksm_stat    how many pages of a process are merged: without the numbers, which need CAP_SYS_ADMIN
//! ```
//!
//! Private memory that nobody merges is mapped once, so that a window costs one read of 4 KiB: some 20 us.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Hva, OutcomeResult, PageSize};

use crate::host::process::ProcessHost;
use crate::host::{Host, HostError};

/// A number of 64 bits for each page, in both files.
const ENTRY: u64 = size_of::<u64>() as u64;
const WINDOW_ENTRIES: usize = BASE_PAGES_PER_WINDOW as usize;

/// Bits of `/proc/PID/pagemap`.
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

/// Why it is not known which pages are merged.
#[derive(Debug, thiserror::Error)]
pub enum KernelFlagsError {
    /// A file can not be opened or read.
    #[error("{what}: {source}: which pages KSM has merged needs root (CAP_SYS_ADMIN)")]
    File {
        /// Which, and what was done to it.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel hides frame numbers from us.
    #[error("frame numbers are hidden: which pages KSM has merged needs CAP_SYS_ADMIN")]
    FramesHidden,
    /// The process can not be asked.
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
    /// For this process.
    ///
    /// # Errors
    /// [`KernelFlagsError`] where its pagemap or the kernel's flags may not be read.
    pub fn open(process: &ProcessHost) -> Result<MergedPages, KernelFlagsError> {
        let open = |source| KernelFlagsError::File { what: "open /proc/kpageflags", source };
        let kpageflags = File::open("/proc/kpageflags").map_err(open)?;
        Ok(MergedPages::of_files(process.open_file("pagemap")?, kpageflags))
    }

    /// With these files in the place of the kernel's.
    pub fn of_files(pagemap: File, kpageflags: File) -> MergedPages {
        MergedPages { pagemap, kpageflags }
    }

    /// How many base pages of the window at `start` are merged with others.
    ///
    /// # Errors
    /// [`KernelFlagsError`] where the files can not be read, or say nothing to us.
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

/// How many pages of a process are merged, without saying which (`/proc/PID/ksm_stat`, Linux 6.1; its owner may read it). `None`
/// where the kernel does not say.
///
/// # Errors
/// [`HostError`] where the file can not be read.
pub fn merged_pages(host: &dyn Host) -> Result<Option<u64>, HostError> {
    Ok(parse_merged(&host.read_text("/proc/self/ksm_stat")?))
}

fn parse_merged(ksm_stat: &str) -> Option<u64> {
    ksm_stat.lines().find_map(|line| line.strip_prefix("ksm_merging_pages "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::FakeHost;
    use std::io::Write;
    use tempfile::tempfile;
    use wideleaf_policies::units::kib;

    const START: Hva = Hva::new(1 << 30);
    const FRAMES: u64 = 700;

    /// A pagemap with these entries from [`START`] on and nothing beside, and a kernel in which the odd frames are KSM's.
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
