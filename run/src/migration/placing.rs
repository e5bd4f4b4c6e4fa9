//! Puts the pages that come into guest RAM, which no guest uses yet.
//!
//! ```text
//!   first pages of a window ── on a huge page at the source, and most of it comes? ─ yes ─▶ MADV_HUGEPAGE ─▶ one fault
//!                                                                                    └ no ──▶ base pages, one by one
//!   pages of zeroes         ── written before? ─ yes ─▶ cleared     └ no ─▶ nothing: missing memory reads zero
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use wideleaf_memory::host::Advice;
use wideleaf_memory::{BackingKind, GuestRam, Host, RamRange};
use wideleaf_policies::{GpaRange, PageSet, PageSize, WindowIndex};

use super::frames::{Malformed, PAGE_BYTES, PagesHead};

/// Fewest pages of a window that go onto a huge page: below it, the kernel would clear more than comes.
const PAGES_FOR_HUGE: u16 = 256;

/// RAM that is being filled.
pub struct Placing<'a> {
    ram: &'a GuestRam,
    host: &'a dyn Host,
    written: BTreeMap<WindowIndex, PageSet>,
    /// Number of windows that were marked for a huge page.
    pub windows_huge: u64,
    /// Number of pages that were written, those that came again too.
    pub pages: u64,
}

impl<'a> Placing<'a> {
    /// Begins with empty RAM.
    pub fn new(ram: &'a GuestRam, host: &'a dyn Host) -> Placing<'a> {
        Placing { ram, host, written: BTreeMap::new(), windows_huge: 0, pages: 0 }
    }

    /// Puts the pages of a message into RAM. `pages` has those with content, ascending.
    ///
    /// # Errors
    /// [`Malformed::Outside`] if one of them is no RAM; then none was written.
    pub fn place(&mut self, head: &PagesHead, pages: &[u8]) -> Result<(), Malformed> {
        let all = head.stored.with(head.zero);
        let places: Option<Vec<_>> = all.runs().map(|run| self.place_of(head.window, &run)).collect();
        let places = places.ok_or(Malformed::Outside(head.window))?;
        let (ram, written) = (self.ram, self.written.get(&head.window).copied().unwrap_or_default());
        if written.is_empty() && head.is_huge && head.stored.len() >= PAGES_FOR_HUGE {
            self.mark(head.window);
        }
        let mut pages = pages.chunks_exact(PAGE_BYTES);
        for (run, (range, part)) in all.runs().zip(places) {
            let words = &ram.words(range)[words_of(&range, part)];
            for (page, words) in run.zip(words.chunks_exact(PAGE_BYTES / 8)) {
                if head.stored.contains(page) {
                    write(words, pages.next().unwrap_or(&[0; PAGE_BYTES]));
                } else if written.contains(page) {
                    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
                }
            }
        }
        self.pages += u64::from(head.stored.len());
        if !head.stored.is_empty() {
            self.written.insert(head.window, written.with(head.stored));
        }
        Ok(())
    }

    /// Takes note of windows with missing pages, which come later; pages of zeroes are cleared.
    ///
    /// # Errors
    /// [`Malformed::Outside`] if one of them is not wholly RAM.
    pub fn miss(&mut self, heads: Vec<PagesHead>) -> Result<Vec<PagesHead>, Malformed> {
        for head in &heads {
            self.place_of(head.window, &(0..512)).ok_or(Malformed::Outside(head.window))?;
            self.place(&PagesHead { stored: PageSet::EMPTY, ..*head }, &[])?;
        }
        Ok(heads)
    }

    /// The range of RAM that has all pages of a run, and their place.
    fn place_of(&self, window: WindowIndex, run: &Range<u16>) -> Option<(RamRange, GpaRange)> {
        let page = PageSize::Base4K.bytes();
        let start = window.start() + page * u64::from(run.start);
        let part = GpaRange::new(start, page * u64::from(run.end - run.start))?;
        let is_whole = |range: &&RamRange| range.part(part).is_some_and(|found| found.gpa == part);
        self.ram.ranges().iter().find(is_whole).map(|range| (*range, part))
    }

    /// Lets the first touch of a window make a huge page. The mark stays, as after a promotion. Without a free
    /// huge page the kernel makes base pages, and the manager promotes later.
    fn mark(&mut self, window: WindowIndex) {
        let whole = self.place_of(window, &(0..512)).filter(|_| self.ram.backing().kind() == BackingKind::Anon);
        let Some((range, part)) = whole else { return };
        let start = range.hva + (part.start() - range.gpa.start());
        match self.host.advise(start, part.bytes(), Advice::HugePage) {
            Ok(()) => self.windows_huge += 1,
            Err(error) => tracing::warn!("{window} comes onto base pages: {error}"),
        }
    }
}

fn words_of(range: &RamRange, part: GpaRange) -> Range<usize> {
    let first = (part.start() - range.gpa.start()).as_usize() / 8;
    first..first + part.bytes().as_usize() / 8
}

fn write(words: &[AtomicU64], page: &[u8]) {
    for (word, bytes) in words.iter().zip(page.chunks_exact(8)) {
        word.store(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use wideleaf_memory::{BackingConfig, LinuxHost};
    use wideleaf_policies::Gpa;
    use wideleaf_policies::units::mib;

    use super::*;

    /// RAM from 2 MiB to 6 MiB, and from 8 MiB to 10 MiB.
    fn ram() -> Arc<GuestRam> {
        let range = |start, bytes| GpaRange::new(Gpa::new(0) + mib(start), mib(bytes)).expect("it fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous base pages exist");
        let ram = GuestRam::map(&[range(2, 4), range(8, 2)], backing).expect("6 MiB can be mapped");
        ram.share().expect("it has no owner");
        ram
    }

    fn host() -> LinuxHost {
        LinuxHost::open().expect("this host")
    }

    fn head(window: u64, stored: &[u16], zero: &[u16]) -> PagesHead {
        let set = |pages: &[u16]| pages.iter().copied().collect();
        PagesHead { window: WindowIndex::new(window), is_huge: true, stored: set(stored), zero: set(zero) }
    }

    /// First word of a page.
    fn word(ram: &GuestRam, range: usize, page: usize) -> u64 {
        ram.words(ram.ranges()[range])[page * 512].load(Ordering::Relaxed)
    }

    fn pages(values: &[u8]) -> Vec<u8> {
        values.iter().flat_map(|value| [*value; PAGE_BYTES]).collect()
    }

    #[test]
    fn pages_come_to_their_places_and_zeroes_replace_what_came_before() {
        let (ram, host) = (ram(), host());
        let mut placing = Placing::new(&ram, &host);
        placing.place(&head(2, &[0, 2, 511], &[5]), &pages(&[1, 2, 3])).expect("it is RAM");
        let at = |page: usize| word(&ram, 0, 512 + page) & 0xff;
        assert_eq!([0, 1, 2, 5, 511].map(at), [1, 0, 2, 0, 3]);
        placing.place(&head(2, &[1], &[0, 511]), &pages(&[9])).expect("it is RAM");
        assert_eq!([0, 1, 2, 511].map(at), [0, 9, 2, 0]);
        assert_eq!((placing.pages, placing.windows_huge), (4, 0));
    }

    #[test]
    fn a_window_of_which_most_comes_is_marked_once_and_another_is_not() {
        let (ram, host) = (ram(), host());
        let mut placing = Placing::new(&ram, &host);
        let most: Vec<u16> = (0..PAGES_FOR_HUGE).collect();
        let values = vec![1; most.len()];
        placing.place(&head(1, &most, &[]), &pages(&values)).expect("it is RAM");
        placing.place(&head(1, &most, &[]), &pages(&values)).expect("it is RAM");
        placing.place(&head(2, &most[1..], &[]), &pages(&values[1..])).expect("it is RAM");
        assert_eq!(placing.windows_huge, 1);
        let base = PagesHead { is_huge: false, ..head(2, &most, &[]) };
        Placing::new(&ram, &host).place(&base, &pages(&values)).expect("it is RAM");
    }

    #[test]
    fn pages_outside_ram_are_refused_and_none_is_written() {
        let (ram, host) = (ram(), host());
        let mut placing = Placing::new(&ram, &host);
        // Before RAM, in the hole, and behind RAM.
        for (window, stored) in [(0, vec![0]), (3, vec![0, 511]), (5, vec![300]), (1 << 40, vec![0])] {
            let values = vec![7; stored.len()];
            let placed = placing.place(&head(window, &stored, &[]), &pages(&values));
            assert_eq!(placed, Err(Malformed::Outside(WindowIndex::new(window))), "{window} {stored:?}");
        }
        assert!(placing.place(&head(5, &[], &[256]), &[]).is_err(), "zeroes outside RAM");
        assert_eq!((word(&ram, 1, 0), placing.pages), (0, 0));
        assert!(placing.place(&head(4, &[0, 511], &[]), &pages(&[7, 8])).is_ok(), "the last page of RAM");
        assert_eq!(word(&ram, 1, 511) & 0xff, 8);
    }
}
