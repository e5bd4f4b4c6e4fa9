//! The pages of RAM that may hold data, found by scans of the host. All other memory reads zero, and a save does not
//! touch it: a touch would allocate it.

use std::collections::BTreeMap;
use std::io;

use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSet, PageSize, WindowIndex};

use super::PagesByWindow;
use crate::backing::BackingKind;
use crate::host::{Host, HostError, PageRun};
use crate::region::{GuestRam, RamRange};

/// Pages in use, and page sizes, at some time of the save's start.
#[derive(Debug, Default)]
pub(super) struct Used {
    pub pages: PagesByWindow,
    /// Windows that are on a page larger than 4 KiB.
    pub page_sizes: BTreeMap<WindowIndex, PageSize>,
}

impl Used {
    /// Scans all RAM.
    pub fn all(host: &dyn Host, ram: &GuestRam) -> Result<Used, HostError> {
        let mut used = Used::default();
        for range in ram.ranges() {
            for part in used_parts(host, ram, *range)? {
                add(&mut used.pages, part);
            }
            used.add_sizes(host, ram, *range)?;
        }
        Ok(used)
    }

    /// Page sizes alone.
    pub fn sizes(host: &dyn Host, ram: &GuestRam) -> Result<BTreeMap<WindowIndex, PageSize>, HostError> {
        let mut used = Used::default();
        ram.ranges().iter().try_for_each(|range| used.add_sizes(host, ram, *range))?;
        Ok(used.page_sizes)
    }

    /// A window counts as large only if all of it is mapped so.
    fn add_sizes(&mut self, host: &dyn Host, ram: &GuestRam, range: RamRange) -> Result<(), HostError> {
        let mut huge = PagesByWindow::new();
        for run in present(host, range)?.iter().filter(|run| run.is_huge) {
            add(&mut huge, gpa_range(range, *run));
        }
        let whole = huge.into_iter().filter(|(_, pages)| *pages == PageSet::ALL);
        let of_pool = ram.backing().fixed_page();
        self.page_sizes.extend(whole.map(|(window, _)| {
            let is_giant = of_pool == Some(PageSize::Giant1G) || ram.claims().is_on_giant_page(window);
            (window, if is_giant { PageSize::Giant1G } else { PageSize::Huge2M })
        }));
        Ok(())
    }
}

/// The pages of one window that may hold data now.
pub(super) fn of_window(host: &dyn Host, ram: &GuestRam, window: WindowIndex) -> Result<PageSet, HostError> {
    let mut pages = PagesByWindow::new();
    let whole = GpaRange::new(window.start(), PageSize::Huge2M.bytes());
    for range in ram.ranges() {
        if let Some(part) = whole.and_then(|whole| range.part(whole)) {
            used_parts(host, ram, part)?.into_iter().for_each(|part| add(&mut pages, part));
        }
    }
    Ok(pages.remove(&window).unwrap_or_default())
}

/// All windows with RAM, ascending.
pub(super) fn windows(ram: &GuestRam) -> impl Iterator<Item = WindowIndex> + '_ {
    let mut next = 0;
    ram.ranges().iter().flat_map(move |range| {
        let first = WindowIndex::containing(range.gpa.start()).get().max(next);
        next = WindowIndex::containing(Gpa::new(range.gpa.end().get() - 1)).get() + 1;
        (first..next).map(WindowIndex::new)
    })
}

fn used_parts(host: &dyn Host, ram: &GuestRam, range: RamRange) -> Result<Vec<GpaRange>, HostError> {
    let in_file = |source: io::Error| HostError { what: "lseek of the guest RAM memfd", source };
    match ram.backing().kind() {
        BackingKind::Anon => {
            // A giant has no page for a moment while its mapping is exchanged. The logs' claims exclude that.
            let mut runs = Vec::new();
            host.scan_occupied(range.hva, range.gpa.bytes(), &mut runs)?;
            Ok(runs.into_iter().map(|run| gpa_range(range, run)).collect())
        }
        BackingKind::Memfd | BackingKind::Hugetlb => ram.in_file_of(range.gpa).map_err(in_file),
    }
}

fn present(host: &dyn Host, range: RamRange) -> Result<Vec<PageRun>, HostError> {
    let mut runs = Vec::new();
    host.scan(range.hva, range.gpa.bytes(), &mut runs)?;
    Ok(runs)
}

fn gpa_range(of: RamRange, run: PageRun) -> GpaRange {
    GpaRange::new(of.gpa.start() + (run.start - of.hva), run.bytes).expect("pages of RAM end where RAM does or before")
}

/// Adds the pages of a stretch, window by window.
pub(super) fn add(pages: &mut PagesByWindow, stretch: GpaRange) {
    let mut at = stretch.start();
    while at < stretch.end() {
        let window = WindowIndex::containing(at);
        let end = (window.start() + PageSize::Huge2M.bytes()).min(stretch.end());
        let of_window = pages.entry(window).or_default();
        *of_window = of_window.with(numbers(at - window.start(), end - window.start()));
        at = end;
    }
}

/// The pages from one offset in a window to another.
fn numbers(from: Bytes, to: Bytes) -> PageSet {
    if from == Bytes::ZERO && to == PageSize::Huge2M.bytes() {
        return PageSet::ALL;
    }
    let number = |offset: Bytes| offset.pages(PageSize::Base4K) as u16;
    (number(from)..number(to)).collect()
}
