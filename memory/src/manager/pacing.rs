//! Decides when the next tick comes.
//!
//! ```text
//!   something done, or much new in a sample   after `tick_shortest`, or four times what the tick took
//!   nothing                                   after twice the time, up to `tick_longest`
//!     and memory came into use since          at the next pulse, or twenty times what a scan took after the last one
//!     and a gate opened or closed             at the next pulse
//!     and a huge page is free that a window   at the next pulse, or twenty times what the tick took
//!     waits for, or a sample is urgent
//! ```
//!
//! What a tick took is the CPU time of sensing, deciding and publishing: all of them look at each window. Actions and
//! samples have budgets of their own.
//!
//! A tick scans every window, 9 us for one in base pages, or 80 ms of CPU for a guest of 16 GiB, if the latest scan was
//! ten times its own CPU time ago. In between, a tick looks only at the windows on which the loop has just acted. So
//! scans use at most a tenth of a core while there is work, and a twentieth while a guest fills its memory, unless
//! `tick_longest` comes first: those 16 GiB are scanned once a second all the same. A guest in another process is
//! scanned at each tick, since its memory changes behind the loop's back. A pulse between ticks costs one read of a
//! small file, and a call for each VM on a memfd. Fifty idle external guests with a second between pulses cost fifty
//! such reads a second.

use std::time::Duration;

use wideleaf_policies::Moment;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

use super::{ManagedVm, ManagerConfig};
use crate::host::Host;
use crate::sensors::resident::{pages_in_use, resident_pages};

/// Interval at which an idle loop checks whether memory came into use: the longest delay for a hot phase that
/// begins with an allocation. Waking up and checking takes 0.1 ms in a virtual machine, 0.2 % of a core.
pub(super) const PULSE: Duration = Duration::from_millis(50);

const BUSY_PART: u32 = 4;
const PULSE_PART: u32 = 20;
const SCAN_PART: u32 = 10;

/// Sensing of one tick, or all of its work beside actions and samples.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sensed {
    pub at: Moment,
    /// CPU time of the thread.
    pub took: Duration,
}

impl Sensed {
    fn is_at_least(self, times: u32, now: Moment) -> bool {
        now.since(self.at) >= self.took * times
    }
}

/// The latest scan of all windows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LatestScan(Option<Sensed>);

impl LatestScan {
    /// Whether all windows are to be scanned now.
    pub fn is_due(self, now: Moment, tick_longest: Duration) -> bool {
        self.0.is_none_or(|scan| scan.is_at_least(SCAN_PART, now) || now.since(scan.at) >= tick_longest)
    }

    fn at(self) -> Option<Moment> {
        self.0.map(|scan| scan.at)
    }

    /// Notes a scan.
    pub fn done(&mut self, scan: Sensed) {
        self.0 = Some(scan);
    }

    /// Makes a scan due.
    pub fn forget(&mut self) {
        self.0 = None;
    }
}

/// The time between ticks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pacing {
    pause: Duration,
    latest: Sensed,
    scan: LatestScan,
    /// Minimum number of pages in use since the last scan. A minimum, since memory that other parts free must not
    /// hide what a guest touches.
    in_use: Option<u64>,
}

impl Pacing {
    pub fn new(config: &ManagerConfig, now: Moment) -> Pacing {
        let latest = Sensed { at: now, took: Duration::ZERO };
        Pacing { pause: config.tick_shortest, latest, scan: LatestScan::default(), in_use: None }
    }

    /// Time to the next tick, unless it is urgent.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// Records a tick. `overhead`: its CPU time, without actions and samples. `scan`: latest scan of all windows.
    pub fn ticked<'a>(
        &mut self,
        host: &dyn Host,
        vms: impl IntoIterator<Item = &'a ManagedVm>,
        config: &ManagerConfig,
        overhead: Duration,
        scan: LatestScan,
        is_busy: bool,
    ) {
        self.pause = if is_busy {
            config.tick_shortest.max(overhead * BUSY_PART).min(config.tick_longest)
        } else {
            (self.pause * 2).min(config.tick_longest)
        };
        self.latest = Sensed { at: host.now(), took: overhead };
        if self.scan.at() != scan.at() || self.in_use.is_none() {
            (self.scan, self.in_use) = (scan, in_use(host, vms));
        }
    }

    /// Whether at least a window's worth of memory came into use since the last scan. Also when the host no longer
    /// reports it, as after the end of the process. Never on a host that never reported it.
    pub fn is_urgent<'a>(&mut self, host: &dyn Host, vms: impl IntoIterator<Item = &'a ManagedVm>) -> bool {
        let Some(least) = self.in_use else { return false };
        let Some(now) = in_use(host, vms) else { return true };
        self.in_use = Some(least.min(now));
        let has_grown = now.saturating_sub(least) >= u64::from(BASE_PAGES_PER_WINDOW);
        has_grown && self.scan.0.is_none_or(|scan| scan.is_at_least(PULSE_PART, host.now()))
    }

    /// Whether one more tick now would keep to its part of a core.
    pub fn is_rested(&self, host: &dyn Host) -> bool {
        self.latest.is_at_least(PULSE_PART, host.now())
    }
}

fn in_use<'a>(host: &dyn Host, vms: impl IntoIterator<Item = &'a ManagedVm>) -> Option<u64> {
    let rams = vms.into_iter().filter_map(|vm| vm.ram.as_deref());
    if host.is_own() { pages_in_use(host, rams) } else { resident_pages(host) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::region::GuestRam;
    use crate::testing::fake_host::FakeHost;
    use std::sync::atomic::Ordering;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize, VmId};

    fn set_resident(host: &FakeHost, pages: u64) {
        set_resident_of_which_files(host, pages + 700, 700);
    }

    fn set_resident_of_which_files(host: &FakeHost, pages: u64, of_files: u64) {
        host.set_text("/proc/self/statm", &format!("900000 {pages} {of_files} 400 0 30000 0\n"));
    }

    fn scanned(host: &FakeHost, took: Duration) -> LatestScan {
        LatestScan(Some(Sensed { at: host.now(), took }))
    }

    fn pacing(host: &FakeHost, sensed_in: Duration) -> Pacing {
        let mut pacing = Pacing::new(&ManagerConfig::default(), host.now());
        pacing.ticked(host, &[], &ManagerConfig::default(), sensed_in, scanned(host, sensed_in), false);
        pacing
    }

    #[test]
    fn pauses_double_while_idle_and_follow_the_cost_of_sensing_while_busy() {
        let (host, config) = (FakeHost::default(), ManagerConfig::default());
        let mut pacing = Pacing::new(&config, host.now());
        let mut after = |sensed_ms, is_busy| {
            let sensed_in = Duration::from_millis(sensed_ms);
            pacing.ticked(&host, &[], &config, sensed_in, scanned(&host, sensed_in), is_busy);
            pacing.pause().as_millis()
        };
        let pauses = [after(1, false), after(1, false), after(1, true), after(80, true), after(400, true)];
        assert_eq!(pauses, [20, 40, 10, 320, 1000]);
        assert_eq!([after(1, false), after(1, true)], [1000, 10]);
    }

    #[test]
    fn a_window_of_new_memory_is_urgent_and_less_is_not() {
        let host = FakeHost::default();
        set_resident(&host, 1000);
        let mut pacing = pacing(&host, Duration::ZERO);
        for (pages, is_urgent) in [(1511, false), (1512, true), (900, false), (1411, false), (1412, true)] {
            set_resident(&host, pages);
            assert_eq!(pacing.is_urgent(&host, &[]), is_urgent, "{pages}");
        }
    }

    #[test]
    fn all_pages_of_another_process_count_and_its_end_is_urgent() {
        let host = FakeHost::default();
        host.be_of_another_process();
        set_resident_of_which_files(&host, 9000, 8000);
        let mut pacing = pacing(&host, Duration::ZERO);
        assert!(!pacing.is_urgent(&host, &[]));
        set_resident_of_which_files(&host, 9512, 8512);
        assert!(pacing.is_urgent(&host, &[]));
        set_resident_of_which_files(&host, 9000, 8000);
        assert!(!pacing.is_urgent(&host, &[]));
        host.fail_call(0, libc::ESRCH);
        assert!(pacing.is_urgent(&host, &[]));
    }

    #[test]
    fn pages_of_a_file_that_a_sample_unmaps_and_the_guest_maps_again_are_not_new() {
        let host = FakeHost::default();
        set_resident_of_which_files(&host, 9000, 8000);
        let mut pacing = pacing(&host, Duration::ZERO);
        for of_files in [4000, 8000, 12_000] {
            set_resident_of_which_files(&host, of_files + 1000, of_files);
            assert!(!pacing.is_urgent(&host, &[]), "{of_files}");
        }
    }

    #[test]
    fn pages_that_a_guest_writes_in_a_file_are_new() {
        let range = GpaRange::new(Gpa::new(0), mib(2)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).expect("memfd has base pages");
        let ram = GuestRam::map(&[range], backing).expect("memory");
        let vms = [ManagedVm::new(VmId(0), ram.clone(), None)];
        let host = FakeHost::default();
        set_resident(&host, 1000);
        let mut pacing = Pacing::new(&ManagerConfig::default(), host.now());
        pacing.ticked(&host, &vms, &ManagerConfig::default(), Duration::ZERO, scanned(&host, Duration::ZERO), false);
        assert!(!pacing.is_urgent(&host, &vms));
        ram.words(ram.ranges()[0]).iter().step_by(512).for_each(|word| word.store(1, Ordering::Relaxed));
        assert!(pacing.is_urgent(&host, &vms));
    }

    #[test]
    fn expensive_sensing_happens_less_often() {
        let host = FakeHost::default();
        set_resident(&host, 0);
        let mut pacing = pacing(&host, Duration::from_millis(5));
        set_resident(&host, 100_000);
        assert!(!pacing.is_urgent(&host, &[]));
        host.sleep(Duration::from_millis(100));
        assert!(pacing.is_urgent(&host, &[]));
    }

    #[test]
    fn memory_that_came_into_use_before_a_tick_without_a_scan_is_urgent_after_it() {
        let host = FakeHost::default();
        set_resident(&host, 0);
        let took = Duration::from_millis(5);
        let mut pacing = pacing(&host, took);
        let scan = pacing.scan;
        host.sleep(Duration::from_millis(99));
        set_resident(&host, 512);
        pacing.ticked(&host, &[], &ManagerConfig::default(), Duration::ZERO, scan, true);
        assert!(!pacing.is_urgent(&host, &[]));
        host.sleep(Duration::from_millis(1));
        assert!(pacing.is_urgent(&host, &[]));
    }

    #[test]
    fn a_scan_is_due_after_ten_times_what_the_latest_took_or_the_longest_time_between_ticks() {
        let host = FakeHost::default();
        let longest = Duration::from_secs(1);
        assert!(LatestScan::default().is_due(host.now(), longest));
        let due_after = |took_ms, after_ms| {
            let scan = scanned(&host, Duration::from_millis(took_ms));
            host.sleep(Duration::from_millis(after_ms));
            scan.is_due(host.now(), longest)
        };
        assert_eq!(
            [due_after(2, 19), due_after(2, 20), due_after(200, 999), due_after(200, 1000)],
            [false, true, false, true]
        );
        let mut scan = scanned(&host, longest);
        scan.forget();
        assert!(scan.is_due(host.now(), longest));
    }

    #[test]
    fn a_host_without_page_counts_is_never_urgent() {
        let host = FakeHost::default();
        let mut pacing = pacing(&host, Duration::ZERO);
        set_resident(&host, 100_000);
        assert!(!pacing.is_urgent(&host, &[]));
    }
}
