//! Counters of the service, in all and by range of RAM: the pages of each size at the first touch, and what is there
//! now.
//!
//! ```text
//!   touch ─▶ answer ─▶ [first page of the window]          at the end: the page tables
//!                          2m ───────────────────────────▶ 2m: as it was   4k: demoted   nothing: given back whole
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use hdrhistogram::Histogram;
use wideleaf_policies::{Backing, Gpa, GpaRange, PageSize, VmId};

use crate::faults::{ServiceReport, answer_times};
use crate::host::Host;
use crate::region::GuestRam;
use crate::sensors::host_backing::HostBackingSensor;
use crate::sensors::swapped::swapped;

/// Counters of the service.
#[derive(Clone)]
pub struct FirstTouchReport {
    /// Number of windows that the policy was asked about, once each. The sum of the next three and of all `refused`.
    pub asked: u64,
    /// Number of windows answered 4k.
    pub answered_4k: u64,
    /// Number of windows answered 2m, or 1g where no giant page was to be had, and seen to be huge afterwards.
    pub answered_2m: u64,
    /// Number of giants answered 1g and put on a page of 1 GiB.
    pub answered_1g: u64,
    /// Number of huge windows where the collapse, not the fault, brought the huge page.
    pub by_collapse: u64,
    /// Number of giants that were on a page of 1 GiB before the service began: a loader had touched them.
    pub giant_before: u64,
    /// Number of pages of 1 GiB that were made for it, because the pool had none.
    pub giant_pages_made: u64,
    /// Number of giants answered 1g that got no giant page, by the obstacle; 2m was tried.
    pub giant_refused: BTreeMap<&'static str, u64>,
    /// Number of windows answered 2m or 1g that stayed at base pages, by the obstacle.
    pub refused: BTreeMap<&'static str, u64>,
    /// Number of windows that were not asked about: they had pages before the first missing page was touched.
    pub backed_before: u64,
    /// Number of touches of a window that was let go before they were read.
    pub touched_again: u64,
    /// Number of touches that waited until a giant page was ready, beside the first one of the giant.
    pub waited_for_giant: u64,
    /// Number of pages answered one by one because their window could not be let go.
    pub zero_pages: u64,
    /// Number of touches that had no effect because the page or the mapping had changed since. They are retried.
    pub raced: u64,
    /// Additional wait of a touch, from reading its message to the answer, in nanoseconds; includes the decision. The
    /// wait for a giant page is not in it.
    pub answer_ns: Histogram<u64>,
    /// Reason for an early end of the service, if any.
    pub gave_up: Option<String>,
    /// The same by range of RAM, VM by VM.
    pub regions: Vec<RegionReport>,
}

/// One range of RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionReport {
    /// VM of the range.
    pub vm: VmId,
    /// Guest-physical addresses of the range.
    pub gpa: GpaRange,
    /// Number of faults that the service received.
    pub faults: u64,
    /// Windows that were let go to base pages, windows on huge pages and giants on giant pages, by their first touch.
    pub at_first: PageCounts,
    /// Pages now, or at the end of the service; `None` if the page tables could not be read.
    pub now: Option<PagesNow>,
    /// Windows and giants of `at_first` that got no larger page than they have, by the obstacle.
    pub refused: BTreeMap<&'static str, u64>,
    /// First page of each window; `None` before its first touch.
    first: Vec<Option<PageSize>>,
}

/// Numbers by page size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Windows on base pages.
    pub windows_4k: u64,
    /// Windows on huge pages.
    pub windows_2m: u64,
    /// Giants on giant pages.
    pub giants: u64,
}

/// What the page tables hold of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagesNow {
    /// Number of base pages.
    pub pages_4k: u64,
    /// Number of huge pages.
    pub pages_2m: u64,
    /// Number of giant pages.
    pub pages_1g: u64,
    /// Windows with a huge page at the first touch and base pages now. None of them was promoted again.
    pub demoted_2m: u64,
    /// Giants with a giant page at the first touch and smaller pages now.
    pub demoted_1g: u64,
    /// Windows with a large page at the first touch and none now: the guest gave them back. None of them is swapped out
    /// as far as the kernel tells: it does not for a file where the host's swap is in use.
    pub given_back: u64,
}

impl Default for FirstTouchReport {
    fn default() -> FirstTouchReport {
        FirstTouchReport {
            asked: 0,
            answered_4k: 0,
            answered_2m: 0,
            answered_1g: 0,
            by_collapse: 0,
            giant_before: 0,
            giant_pages_made: 0,
            giant_refused: BTreeMap::new(),
            refused: BTreeMap::new(),
            backed_before: 0,
            touched_again: 0,
            waited_for_giant: 0,
            zero_pages: 0,
            raced: 0,
            answer_ns: answer_times(),
            gave_up: None,
            regions: Vec::new(),
        }
    }
}

impl FirstTouchReport {
    /// Number of windows answered 2m or 1g that are at base pages all the same.
    pub fn huge_refused(&self) -> u64 {
        self.refused.values().sum()
    }

    /// Every non-zero counter, by its name.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counters = [
            ("asked", self.asked),
            ("answered_4k", self.answered_4k),
            ("answered_2m", self.answered_2m),
            ("answered_1g", self.answered_1g),
            ("by_collapse", self.by_collapse),
            ("giant_before", self.giant_before),
            ("giant_pages_made", self.giant_pages_made),
            ("backed_before", self.backed_before),
            ("touched_again", self.touched_again),
            ("waited_for_giant", self.waited_for_giant),
            ("zero_pages", self.zero_pages),
            ("raced", self.raced),
            ("gave_up", u64::from(self.gave_up.is_some())),
        ];
        let obstacles = self.giant_refused.iter().chain(&self.refused).map(|(name, n)| (*name, *n));
        counters.into_iter().chain(obstacles).filter(|(_, n)| *n > 0)
    }

    /// Begins the ranges of these VMs. Giants that are on a giant page already were put there for a loader.
    pub(super) fn begin(&mut self, vms: &[(VmId, Arc<GuestRam>)]) {
        for (vm, ram) in vms {
            let giants = ram.claims().giants_in_use();
            let giants: Vec<_> = giants.iter().filter(|giant| giant.is_on_giant_page).collect();
            for range in ram.ranges() {
                let mut region = RegionReport::new(*vm, range.gpa);
                for giant in giants.iter().filter(|giant| range.gpa.contains(giant.start)) {
                    region.begin(giant.start, PageSize::Giant1G);
                    self.giant_before += 1;
                }
                self.regions.push(region);
            }
        }
    }

    /// Reads the page tables of every range. `ram_of`: the RAM of a VM.
    pub(super) fn look<'a>(&mut self, host: &dyn Host, ram_of: impl Fn(VmId) -> Option<&'a GuestRam>) {
        for region in &mut self.regions {
            region.now = ram_of(region.vm).and_then(|ram| region.pages_now(host, ram));
        }
    }
}

impl fmt::Debug for FirstTouchReport {
    /// Shows the counters by name; the histogram alone would be pages of zeroes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.by_name()).finish()
    }
}

impl RegionReport {
    /// A range of which nothing was touched yet.
    pub(super) fn new(vm: VmId, gpa: GpaRange) -> RegionReport {
        RegionReport {
            vm,
            gpa,
            faults: 0,
            at_first: PageCounts::default(),
            now: None,
            refused: BTreeMap::new(),
            first: vec![None; gpa.windows().len()],
        }
    }

    /// Records the first page of the windows at `start`, as many as a page of that size has.
    pub(super) fn begin(&mut self, start: Gpa, size: PageSize) {
        let windows = size.bytes().pages(PageSize::Huge2M).max(1) as usize;
        let first = (start - self.gpa.start()).pages(PageSize::Huge2M) as usize;
        self.first[first..first + windows].fill(Some(size));
        let count = match size {
            PageSize::Base4K => &mut self.at_first.windows_4k,
            PageSize::Huge2M => &mut self.at_first.windows_2m,
            PageSize::Giant1G => &mut self.at_first.giants,
        };
        *count += 1;
    }

    fn pages_now(&self, host: &dyn Host, ram: &GuestRam) -> Option<PagesNow> {
        let range = *ram.ranges().iter().find(|range| range.gpa == self.gpa)?;
        let mut sensor = HostBackingSensor::default();
        let seen: Vec<_> = sensor.sample(host, range, ram.backing().fixed_page()).ok()?.collect();
        let resident: Vec<u16> = seen.iter().map(|seen| seen.resident).collect();
        let swapped = swapped(host, ram.backing().kind(), &[range], &resident).ok()?;
        let mut now = PagesNow::default();
        let mut giant_windows = [0, 0];
        for (row, (seen, first)) in seen.into_iter().zip(&self.first).enumerate() {
            let backing = ram.claims().known(seen).backing;
            let was_large = first.is_some_and(|size| size > PageSize::Base4K);
            match backing {
                Backing::Unbacked => now.given_back += u64::from(was_large && swapped.of_row(row) == 0),
                Backing::Base4K => now.pages_4k += u64::from(seen.resident),
                Backing::Huge2M => now.pages_2m += 1,
                Backing::Giant1G => giant_windows[0] += 1,
            }
            match (first, backing) {
                (Some(PageSize::Huge2M), Backing::Base4K) => now.demoted_2m += 1,
                (Some(PageSize::Giant1G), backing) if backing != Backing::Giant1G => giant_windows[1] += 1,
                _ => {}
            }
        }
        [now.pages_1g, now.demoted_1g] =
            giant_windows.map(|windows: u64| windows / PageSize::Giant1G.bytes().pages(PageSize::Huge2M));
        Some(now)
    }
}

impl ServiceReport for FirstTouchReport {
    fn answer_ns(&mut self) -> &mut Histogram<u64> {
        &mut self.answer_ns
    }

    fn gave_up(&mut self) -> &mut Option<String> {
        &mut self.gave_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;

    #[test]
    fn a_window_that_lost_its_huge_page_is_demoted_and_an_empty_one_given_back() {
        // first     2m   2m   2m   4k   -    2m
        // now       2m   4k   -    4k   -    swapped out
        let range = GpaRange::new(Gpa::new(0), mib(12)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = GuestRam::map(&[range], backing).expect("12 MiB can be mapped");
        let host = FakeHost::default();
        host.make_present(ram.base(), mib(2), true);
        host.make_present(ram.base() + mib(2), mib(1), false);
        host.make_present(ram.base() + mib(6), PageSize::Base4K.bytes(), false);
        host.swap_out(ram.base() + mib(10), mib(2));
        host.set_text("/proc/self/status", "VmSwap:\t2048 kB\n");
        let mut region = RegionReport::new(VmId(0), range);
        [0, 1, 2, 5].into_iter().for_each(|window| region.begin(Gpa::new(0) + mib(2) * window, PageSize::Huge2M));
        region.begin(Gpa::new(0) + mib(6), PageSize::Base4K);
        assert_eq!(region.at_first, PageCounts { windows_4k: 1, windows_2m: 4, giants: 0 });
        let expected = PagesNow { pages_4k: 256 + 1, pages_2m: 1, demoted_2m: 1, given_back: 1, ..PagesNow::default() };
        let mut report = FirstTouchReport { regions: vec![region], ..FirstTouchReport::default() };
        report.look(&host, |_| Some(&*ram));
        assert_eq!(report.regions[0].now, Some(expected));
        report.look(&host, |_| None);
        assert_eq!(report.regions[0].now, None, "the page tables of other RAM say nothing");
    }
}
