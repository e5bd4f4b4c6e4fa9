//! Host backing of every window: how many of its base pages are present, and whether a huge page covers it. From
//! `PAGEMAP_SCAN`; one pass over the page tables, 2 ms for 512 MiB in base pages, a quarter of that in huge pages.

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, GpaRange, Hva, PageSet, PageSize, WindowIndex};

use crate::host::{Host, HostError, PageRun};
use crate::region::RamRange;

/// Backing of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowBacking {
    /// Index of the window.
    pub window: WindowIndex,
    /// Number of base pages present.
    pub resident: u16,
    /// Page size of the backing.
    pub backing: Backing,
}

/// Scans ranges of guest RAM; keeps its buffer from one scan to the next.
#[derive(Debug, Default)]
pub struct HostBackingSensor {
    runs: Vec<PageRun>,
}

impl HostBackingSensor {
    /// The backing of every whole window of `range`, ascending. `fixed_page` is the page size of RAM that can have no
    /// other (hugetlb): the scan distinguishes huge pages from base pages, but not 2 MiB from 1 GiB.
    ///
    /// # Errors
    /// [`HostError`] if the scan fails.
    pub fn sample(
        &mut self,
        host: &dyn Host,
        range: RamRange,
        fixed_page: Option<PageSize>,
    ) -> Result<impl Iterator<Item = WindowBacking>, HostError> {
        self.runs.clear();
        host.scan(range.hva, range.gpa.bytes(), &mut self.runs)?;
        let mut runs = WindowCursor::new(&self.runs);
        Ok(range.gpa.windows().map(move |window| {
            let start = range.hva + (window.start() - range.gpa.start());
            let (resident, huge) = runs.count(start.get(), PageSize::Huge2M.bytes().get());
            let resident = (resident / PageSize::Base4K.bytes().get()) as u16;
            let backing = match (resident, fixed_page) {
                (0, _) => Backing::Unbacked,
                (_, Some(PageSize::Giant1G)) => Backing::Giant1G,
                (_, Some(_)) => Backing::Huge2M,
                (BASE_PAGES_PER_WINDOW, None) if huge == PageSize::Huge2M.bytes().get() => Backing::Huge2M,
                (_, None) => Backing::Base4K,
            };
            WindowBacking { window, resident, backing }
        }))
    }
}

/// Walks ascending runs window by window.
pub(super) struct WindowCursor<'a> {
    runs: &'a [PageRun],
    next: usize,
}

impl<'a> WindowCursor<'a> {
    /// A cursor at the first window.
    pub(super) fn new(runs: &'a [PageRun]) -> WindowCursor<'a> {
        WindowCursor { runs, next: 0 }
    }

    /// Bytes present, and of these in huge pages, in `[start, start + bytes)`. Starts must ascend.
    pub(super) fn count(&mut self, start: u64, bytes: u64) -> (u64, u64) {
        let end = start + bytes;
        let (mut resident, mut huge) = (0, 0);
        while let Some(run) = self.runs.get(self.next) {
            let run_end = (run.start + run.bytes).get();
            let overlap = run_end.min(end).saturating_sub(run.start.get().max(start));
            resident += overlap;
            huge += if run.is_huge { overlap } else { 0 };
            if run_end > end {
                break; // the rest of this run belongs to later windows
            }
            self.next += 1;
        }
        (resident, huge)
    }
}

/// The present backing of one window, to check an outcome.
///
/// # Errors
/// [`HostError`] if the scan fails.
pub fn window_backing(
    host: &dyn Host,
    range: RamRange,
    fixed_page: Option<PageSize>,
    window: WindowIndex,
) -> Result<WindowBacking, HostError> {
    look_at(&mut HostBackingSensor::default(), host, range, fixed_page, window)
}

/// The present backing of one window, and those of its pages that are present, from one scan.
///
/// # Errors
/// [`HostError`] if the scan fails.
pub fn window_pages(
    host: &dyn Host,
    range: RamRange,
    fixed_page: Option<PageSize>,
    window: WindowIndex,
) -> Result<(WindowBacking, PageSet), HostError> {
    let mut sensor = HostBackingSensor::default();
    let backing = look_at(&mut sensor, host, range, fixed_page, window)?;
    let start = range.hva + (window.start() - range.gpa.start());
    Ok((backing, pages_of(&sensor.runs, start, window)))
}

fn look_at(
    sensor: &mut HostBackingSensor,
    host: &dyn Host,
    range: RamRange,
    fixed_page: Option<PageSize>,
    window: WindowIndex,
) -> Result<WindowBacking, HostError> {
    let one = RamRange {
        gpa: GpaRange::new(window.start(), PageSize::Huge2M.bytes())
            .expect("a window inside a range does not reach the end of 64 bits"),
        hva: range.hva + (window.start() - range.gpa.start()),
    };
    let mut rows = sensor.sample(host, one, fixed_page)?;
    Ok(rows.next().expect("one window holds one window"))
}

/// The pages of a window, which begins at `start`, in runs of a scan of it.
pub(crate) fn pages_of(runs: &[PageRun], start: Hva, window: WindowIndex) -> PageSet {
    let of_run = |run: &PageRun| {
        let range = GpaRange::new(window.start() + (run.start - start), run.bytes);
        range.map_or_else(PageSet::default, |range| PageSet::of_range(window, range))
    };
    runs.iter().map(of_run).fold(PageSet::default(), PageSet::with)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::Gpa;
    use wideleaf_policies::units::{kib, mib};

    #[test]
    fn runs_are_cut_at_window_borders() {
        // 4K runs   [-1M---3M)          huge [4M------8M)      8M..10M: nothing
        // windows   [ 0-2M )[ 2-4M )[ 4-6M )[ 6-8M )[ 8-10M )
        let base = Hva::new(1 << 40);
        let host = FakeHost::with_runs(vec![
            PageRun { start: base + mib(1), bytes: mib(2), is_huge: false },
            PageRun { start: base + mib(4), bytes: mib(4), is_huge: true },
        ]);
        let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(10)).expect("fits"), hva: base };
        let mut sensor = HostBackingSensor::default();
        let rows: Vec<(u16, Backing)> = sensor
            .sample(&host, range, None)
            .expect("the fake answers")
            .map(|row| (row.resident, row.backing))
            .collect();
        assert_eq!(
            rows,
            [
                (256, Backing::Base4K),
                (256, Backing::Base4K),
                (512, Backing::Huge2M),
                (512, Backing::Huge2M),
                (0, Backing::Unbacked)
            ]
        );
    }

    #[test]
    fn a_window_with_one_page_is_backed_by_base_pages() {
        let base = Hva::new(1 << 40);
        let host = FakeHost::with_runs(vec![PageRun { start: base + mib(2), bytes: kib(4), is_huge: false }]);
        let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(4)).expect("fits"), hva: base };
        let row = window_backing(&host, range, None, WindowIndex::new(1)).expect("the fake answers");
        assert_eq!((row.resident, row.backing), (1, Backing::Base4K));
        let seen = window_pages(&host, range, None, WindowIndex::new(1)).expect("the fake answers");
        assert_eq!(seen, (row, PageSet::from_iter([0])));
    }
}
