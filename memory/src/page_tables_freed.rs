//! Whether the kernel frees a page table with its last page (Linux 6.14 and later): only then does a huge page arrive
//! whole where base pages were.

use std::fs;
use std::path::Path;

use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize, WindowIndex};

use crate::backing::{BackingConfig, BackingKind};
use crate::host::{Advice, Host as _, linux::LinuxHost};
use crate::proc_fields::bytes_of;
use crate::region::GuestRam;

/// Number of page tables that are emptied, one a window: enough that those of other threads, which come and go
/// meanwhile, cannot be taken for them.
const WINDOWS: u32 = 64;

/// Whether a page table goes when its last page is dropped, by the process's own count of page tables.
pub(crate) fn page_tables_freed(root: &Path) -> Result<String, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).map_err(|error| text(&error))?;
    let bytes = mib(2) * u64::from(WINDOWS);
    let range = GpaRange::new(Gpa::new(0), bytes).expect("it fits");
    let ram = GuestRam::map(&[range], backing).map_err(|error| text(&error))?;
    let host = LinuxHost::open().map_err(|error| text(&error))?;
    for window in 0..u64::from(WINDOWS) {
        let page = ram.base() + mib(2) * window;
        host.advise(page, PageSize::Base4K.bytes(), Advice::PopulateWrite).map_err(|error| text(&error))?;
    }
    let status = root.join("proc/self/status");
    let count = || {
        let text = fs::read_to_string(&status).map_err(|error| format!("{}: {error}", status.display()))?;
        bytes_of(&text, "VmPTE").ok_or_else(|| format!("{} has no VmPTE in kB", status.display()))
    };
    let before = count()?;
    for window in 0..u64::from(WINDOWS) {
        ram.window(WindowIndex::new(window)).discard().map_err(|error| text(&error))?;
    }
    judge_page_tables(before, count()?)
}

/// Each window had one page table, of a base page. At least half of them must be gone.
fn judge_page_tables(before: Bytes, after: Bytes) -> Result<String, String> {
    let gone = before.saturating_sub(after);
    let text = format!("of {WINDOWS} emptied page tables {} went", gone.pages(PageSize::Base4K).min(WINDOWS.into()));
    if gone >= PageSize::Base4K.bytes() * u64::from(WINDOWS / 2) { Ok(text) } else { Err(text) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::kib;

    #[test]
    fn page_tables_are_freed_if_most_of_them_went() {
        let text = "of 64 emptied page tables 63 went";
        assert_eq!(judge_page_tables(kib(352), kib(100)), Ok(text.into()));
        assert_eq!(judge_page_tables(kib(100), kib(352)), Err("of 64 emptied page tables 0 went".into()));
        assert!(judge_page_tables(kib(352), kib(352 - 31 * 4)).is_err());
    }
}
