//! Decides when all windows are scanned again.
//!
//! ```text
//!   a window's worth of memory came into use, or went   after 10 times what the latest scan took; 20 between ticks
//!   neither                                             after 100 times; after 400 for a guest in another process
//!   a host that does not tell the memory in use         after 10 times, or `tick_longest`
//!   an event of the guest begins or ends                at once, and when a gate opens
//! ```
//!
//! All of it is CPU time. A scan takes 9 us for a window in base pages on one Xeon and 1 us on one EPYC, also if one of
//! them alone is present: 80 or 10 ms for a guest of 16 GiB. So scans use at most a tenth of a core while there is
//! something to see, a twentieth while a guest fills its memory, and otherwise a hundredth: of 64 GiB in base pages one
//! comes every 30 s on that Xeon. Between scans a tick looks at the windows alone on which the loop has just acted.
//!
//! The memory in use is the process's, with the loop's own: a snapshot of 20 GiB has as many bytes as a window. So all
//! readings are made between two ticks, when the loop holds the same of it. The one before a scan is what later ones
//! are compared with: what comes into use while the scan is under way makes the next one due.
//!
//! Guests in other processes share one daemon, which may have fifty of them: there a scan of 64 GiB in base pages comes
//! every two minutes. The kernel changes page sizes in all guests (khugepaged, a split before swapping), and the VMM in
//! an event, without a change of the memory in use. A window is looked at before each action on it and at the next
//! tick, so that an old row costs a skipped action at most.

use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

use super::ManagedVm;
use super::pacing::Sensed;
use crate::host::Host;
use crate::sensors::resident::{pages_in_use, resident_pages};

/// Of a core, while memory comes into use or goes.
const BUSY_PART: u32 = 10;
/// The same between ticks.
const PULSE_PART: u32 = 20;
/// While neither happens.
const QUIET_PART: u32 = 100;
/// The same for a guest in another process: fifty take an eighth of a core at most.
const QUIET_PART_OUTSIDE: u32 = 400;

/// The latest scan of all windows, and the memory in use since.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LatestScan {
    scan: Option<Sensed>,
    in_use: Option<InUse>,
    /// Base pages in use when a scan was last asked for.
    asked_at: Option<u64>,
}

/// Base pages in use.
#[derive(Clone, Copy, Debug)]
struct InUse {
    before_scan: u64,
    /// Minimum since. What comes into use is counted from it: memory that other parts free must not hide what a guest
    /// touches.
    least: u64,
}

impl LatestScan {
    /// Whether all windows are to be scanned now, at the beginning of a tick. At once where there was no scan.
    pub fn is_due<'a>(
        &mut self,
        host: &dyn Host,
        vms: impl IntoIterator<Item = &'a ManagedVm>,
        tick_longest: Duration,
    ) -> bool {
        let now = host.now();
        self.asked_at = in_use(host, vms);
        let Some(scan) = self.scan else { return true };
        match self.change(self.asked_at) {
            Some(Change { came: false, went: false }) => scan.is_at_least(quiet_part(host), now),
            Some(_) => scan.is_at_least(BUSY_PART, now),
            None => scan.is_at_least(BUSY_PART, now) || now.since(scan.at) >= tick_longest,
        }
    }

    /// Whether a tick is to come before its time, since a window's worth of memory came into use. Also when the host no
    /// longer tells the memory in use, as after the end of the process. Never on a host that never told it.
    pub fn is_urgent<'a>(&mut self, host: &dyn Host, vms: impl IntoIterator<Item = &'a ManagedVm>) -> bool {
        if self.in_use.is_none() {
            return false;
        }
        let is_worth_it = self.change(in_use(host, vms)).is_none_or(|change| change.came);
        is_worth_it && self.scan.is_none_or(|scan| scan.is_at_least(PULSE_PART, host.now()))
    }

    /// Notes the scan that was due and has just ended.
    pub fn done(&mut self, scan: Sensed) {
        self.scan = Some(scan);
        self.in_use = self.asked_at.map(|pages| InUse { before_scan: pages, least: pages });
    }

    /// Makes a scan due.
    pub fn forget(&mut self) {
        self.scan = None;
    }

    /// What became of the memory in use since before the scan; `None` if the host does not tell.
    fn change(&mut self, in_use: Option<u64>) -> Option<Change> {
        /// In base pages.
        const WORTH_A_SCAN: u64 = BASE_PAGES_PER_WINDOW as u64;
        let (since, now) = (self.in_use.as_mut()?, in_use?);
        since.least = since.least.min(now);
        let is_worth_it = |from: u64, to: u64| to.saturating_sub(from) >= WORTH_A_SCAN;
        Some(Change { came: is_worth_it(since.least, now), went: is_worth_it(since.least, since.before_scan) })
    }
}

/// Whether a window's worth of memory came into use, and went out of it.
struct Change {
    came: bool,
    went: bool,
}

fn quiet_part(host: &dyn Host) -> u32 {
    if host.is_own() { QUIET_PART } else { QUIET_PART_OUTSIDE }
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

    fn set_in_use(host: &FakeHost, pages: u64) {
        set_resident(host, pages + 700, 700);
    }

    fn set_resident(host: &FakeHost, pages: u64, of_files: u64) {
        host.set_text("/proc/self/statm", &format!("900000 {pages} {of_files} 400 0 30000 0\n"));
    }

    fn scanned_in(host: &FakeHost, took_ms: u64) -> LatestScan {
        let mut scan = LatestScan::default();
        scan.is_due(host, &[], Duration::MAX);
        scan.done(Sensed { at: host.now(), took: Duration::from_millis(took_ms) });
        scan
    }

    fn is_due(scan: &mut LatestScan, host: &FakeHost) -> bool {
        scan.is_due(host, &[], Duration::from_secs(1))
    }

    #[test]
    fn a_window_of_new_memory_is_urgent_and_less_is_not() {
        let host = FakeHost::default();
        set_in_use(&host, 1000);
        let mut scan = scanned_in(&host, 0);
        for (pages, is_urgent) in [(1511, false), (1512, true), (900, false), (1411, false), (1412, true)] {
            set_in_use(&host, pages);
            assert_eq!(scan.is_urgent(&host, &[]), is_urgent, "{pages}");
        }
    }

    #[test]
    fn all_pages_of_another_process_count_and_its_end_is_urgent() {
        let host = FakeHost::default();
        host.be_of_another_process();
        set_resident(&host, 9000, 8000);
        let mut scan = scanned_in(&host, 0);
        assert!(!scan.is_urgent(&host, &[]));
        set_resident(&host, 9512, 8512);
        assert!(scan.is_urgent(&host, &[]));
        set_resident(&host, 9000, 8000);
        assert!(!scan.is_urgent(&host, &[]));
        host.fail_call(0, libc::ESRCH);
        assert!(scan.is_urgent(&host, &[]));
    }

    #[test]
    fn pages_of_a_file_that_a_sample_unmaps_and_the_guest_maps_again_are_not_new() {
        let host = FakeHost::default();
        set_resident(&host, 9000, 8000);
        let mut scan = scanned_in(&host, 0);
        for of_files in [4000, 8000, 12_000] {
            set_resident(&host, of_files + 1000, of_files);
            assert!(!scan.is_urgent(&host, &[]), "{of_files}");
        }
    }

    #[test]
    fn pages_that_a_guest_writes_in_a_file_are_new() {
        let range = GpaRange::new(Gpa::new(0), mib(2)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).expect("memfd has base pages");
        let ram = GuestRam::map(&[range], backing).expect("memory");
        let vms = [ManagedVm::new(VmId(0), ram.clone(), None)];
        let host = FakeHost::default();
        set_in_use(&host, 1000);
        let mut scan = LatestScan::default();
        scan.is_due(&host, &vms, Duration::MAX);
        scan.done(Sensed { at: host.now(), took: Duration::ZERO });
        assert!(!scan.is_urgent(&host, &vms));
        ram.words(ram.ranges()[0]).iter().step_by(512).for_each(|word| word.store(1, Ordering::Relaxed));
        assert!(scan.is_urgent(&host, &vms));
    }

    #[test]
    fn a_scan_that_took_long_is_urgent_later() {
        let host = FakeHost::default();
        set_in_use(&host, 0);
        let mut scan = scanned_in(&host, 5);
        set_in_use(&host, 100_000);
        assert!(!scan.is_urgent(&host, &[]));
        host.sleep(Duration::from_millis(100));
        assert!(scan.is_urgent(&host, &[]));
    }

    #[test]
    fn a_scan_is_due_after_ten_times_what_the_latest_took_where_memory_came_or_went_and_else_after_a_hundred_times() {
        let host = FakeHost::default();
        assert!(is_due(&mut LatestScan::default(), &host));
        for (in_use, times) in [(1000, 100), (1511, 100), (489, 100), (1512, 10), (488, 10)] {
            set_in_use(&host, 1000);
            let mut scan = scanned_in(&host, 200);
            set_in_use(&host, in_use);
            host.sleep(Duration::from_millis(200 * times - 1));
            assert!(!is_due(&mut scan, &host), "{in_use}");
            host.sleep(Duration::from_millis(1));
            assert!(is_due(&mut scan, &host), "{in_use}");
        }
        let mut scan = scanned_in(&host, 200);
        scan.forget();
        assert!(is_due(&mut scan, &host));
    }

    #[test]
    fn a_quiet_guest_in_another_process_is_scanned_after_400_times_what_the_latest_took() {
        let host = FakeHost::default();
        host.be_of_another_process();
        for (in_use, times) in [(1000, 400), (1511, 400), (489, 400), (1512, 10), (488, 10)] {
            set_resident(&host, 1000, 0);
            let mut scan = scanned_in(&host, 200);
            set_resident(&host, in_use, 0);
            host.sleep(Duration::from_millis(200 * times - 1));
            assert!(!is_due(&mut scan, &host), "{in_use}");
            host.sleep(Duration::from_millis(1));
            assert!(is_due(&mut scan, &host), "{in_use}");
        }
    }

    #[test]
    fn memory_that_went_and_came_back_between_two_scans_makes_one_due() {
        let host = FakeHost::default();
        set_in_use(&host, 1000);
        let mut scan = scanned_in(&host, 1);
        host.sleep(Duration::from_millis(10));
        for (in_use, is_due_now) in [(900, false), (400, true), (1000, true)] {
            set_in_use(&host, in_use);
            assert_eq!(is_due(&mut scan, &host), is_due_now, "{in_use}");
        }
    }

    #[test]
    fn memory_that_came_into_use_during_a_scan_makes_the_next_one_due() {
        let host = FakeHost::default();
        set_in_use(&host, 1000);
        let mut scan = LatestScan::default();
        assert!(is_due(&mut scan, &host));
        set_in_use(&host, 1512);
        scan.done(Sensed { at: host.now(), took: Duration::from_millis(1) });
        host.sleep(Duration::from_millis(10));
        assert!(is_due(&mut scan, &host));
    }

    #[test]
    fn a_host_without_page_counts_is_never_urgent_and_scanned_in_its_longest_time() {
        let host = FakeHost::default();
        let mut scan = scanned_in(&host, 200);
        set_in_use(&host, 100_000);
        assert!(!scan.is_urgent(&host, &[]));
        let due_after = |took_ms, after_ms| {
            let host = FakeHost::default();
            let mut scan = scanned_in(&host, took_ms);
            host.sleep(Duration::from_millis(after_ms));
            is_due(&mut scan, &host)
        };
        assert_eq!(
            [due_after(2, 19), due_after(2, 20), due_after(200, 999), due_after(200, 1000)],
            [false, true, false, true]
        );
    }
}
