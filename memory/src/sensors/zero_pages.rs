//! Present base pages that hold only zeroes: memory that can be given back without the guest noticing. A huge page
//! has many of them if the guest uses a part of it.
//!
//! Only present pages are read (according to `PAGEMAP_SCAN`), since reading must not fill a hole. Reading stops at
//! the first word that is not zero, so a page in use costs eight bytes, a zero page 4 KiB.

use wideleaf_policies::{Bytes, GpaRange, Hva, PageSize, WindowIndex};

use crate::host::{Host, HostError, PageRun};
use crate::region::{GuestRam, RamRange, WORDS_PER_PAGE};
use crate::sys::mapping::Piece;

/// Zero pages of one window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZeroPages {
    /// Runs of present base pages that were zero when they were read, ascending. The guest may have written since.
    pub runs: Vec<GpaRange>,
    /// Bytes of guest memory read for it.
    pub read: Bytes,
}

impl ZeroPages {
    /// Number of zero pages.
    pub fn pages(&self) -> u16 {
        self.bytes().pages(PageSize::Base4K) as u16
    }

    /// Bytes of all zero pages.
    pub fn bytes(&self) -> Bytes {
        self.runs.iter().map(|run| run.bytes()).sum()
    }

    fn push(&mut self, page: GpaRange) {
        match self.runs.last_mut() {
            Some(run) if run.end() == page.start() => *run = range(run.start(), run.bytes() + page.bytes()),
            _ => self.runs.push(page),
        }
    }
}

/// Finds the zero pages of one window of `of`, which is a range of `ram`.
///
/// # Errors
/// [`HostError`] if the scan for present pages fails.
pub fn window_zero_pages(
    host: &dyn Host,
    ram: &GuestRam,
    of: RamRange,
    window: WindowIndex,
) -> Result<ZeroPages, HostError> {
    let mut present = Vec::new();
    let start = of.hva + (window.start() - of.gpa.start());
    host.scan(start, PageSize::Huge2M.bytes(), &mut present)?;
    let runs = present.iter().map(|run| gpa_range(of, *run));
    Ok(zero_pages_of(ram, of, runs))
}

/// Those pages of these runs (of present pages, in `of`) that hold only zeroes now.
fn zero_pages_of(ram: &GuestRam, of: RamRange, runs: impl Iterator<Item = GpaRange>) -> ZeroPages {
    let memory = ram.piece(of);
    let mut found = ZeroPages::default();
    for run in runs {
        for (page, _) in run.pieces(PageSize::Base4K) {
            let page = range(page, PageSize::Base4K.bytes());
            let (is_zero, read) = read_in_search_of_use(memory.part(page.start() - of.gpa.start(), page.bytes()));
            found.read += read;
            if is_zero {
                found.push(page);
            }
        }
    }
    found
}

/// Whether a base page holds only zeroes now, and the number of bytes read to find out.
pub(crate) fn read_in_search_of_use(page: Piece<'_>) -> (bool, Bytes) {
    let zeroes = page.leading_zeroes();
    let read = (zeroes + 1).min(WORDS_PER_PAGE) * size_of::<u64>();
    (zeroes == WORDS_PER_PAGE, Bytes::new(read as u64))
}

fn gpa_range(of: RamRange, run: PageRun) -> GpaRange {
    let base: Hva = of.hva;
    range(of.gpa.start() + (run.start - base), run.bytes)
}

fn range(start: wideleaf_policies::Gpa, bytes: Bytes) -> GpaRange {
    GpaRange::new(start, bytes).expect("pages of RAM end where RAM does or before")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use crate::{BackingConfig, BackingKind};
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use wideleaf_policies::Gpa;
    use wideleaf_policies::units::{kib, mib};

    const WINDOW: WindowIndex = WindowIndex::new(1);

    /// Two windows of real memory; the fake host says which of its pages are present.
    fn ram() -> Arc<GuestRam> {
        let layout = [range(Gpa::new(0), mib(4))];
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("exists");
        GuestRam::map(&layout, backing).expect("four mebibytes")
    }

    fn write(ram: &GuestRam, gpa: Gpa) {
        ram.words(ram.ranges()[0])[gpa.get() as usize / 8].store(1, Ordering::Relaxed);
    }

    #[test]
    fn runs_of_zero_pages_are_cut_by_pages_in_use_and_by_holes() {
        // page     0     1     2     3     4     5
        //        zero   used  zero  zero  hole  zero
        let ram = ram();
        let start = WINDOW.start();
        let host = FakeHost::default();
        host.make_present(ram.base() + mib(2), kib(16), false);
        host.make_present(ram.base() + mib(2) + kib(20), kib(4), false);
        write(&ram, start + kib(4));
        let found = window_zero_pages(&host, &ram, ram.ranges()[0], WINDOW).expect("the fake answers");
        let expected = [(0, 4), (8, 8), (20, 4)].map(|(at, bytes)| range(start + kib(at), kib(bytes)));
        assert_eq!(found.runs, expected);
        assert_eq!(found.pages(), 4);
        assert_eq!(found.read, kib(16) + Bytes::new(8), "four pages whole, one word of the page in use");
    }

    #[test]
    fn a_page_with_a_written_last_word_is_in_use() {
        let ram = ram();
        let host = FakeHost::default();
        host.make_present(ram.base() + mib(2), kib(4), false);
        write(&ram, WINDOW.start() + kib(4 - 1) + Bytes::new(1016));
        let found = window_zero_pages(&host, &ram, ram.ranges()[0], WINDOW).expect("the fake answers");
        assert_eq!((found.pages(), found.read), (0, kib(4)));
    }

    #[test]
    fn a_scan_that_fails_is_an_error() {
        let ram = ram();
        let host = FakeHost::default();
        host.fail_call(0, libc::ENOMEM);
        assert!(window_zero_pages(&host, &ram, ram.ranges()[0], WINDOW).is_err());
    }
}
