//! When the next tick comes.
//!
//! ```text
//!   something done, or much new in a sample   after `tick_shortest`, or four times what sensing took
//!   nothing                                   after twice the time, up to `tick_longest`
//!     and memory came into use meanwhile      at the next pulse, or twenty times what sensing took after the last tick
//! ```
//!
//! Sensing looks at every window, 9 us for one in base pages: a guest of 16 GiB takes 80 ms of CPU. So it is at most a fifth
//! of a core while there is work, and a twentieth while a guest fills its memory, unless `tick_longest` comes first: those 16 GiB
//! are looked at once a second all the same. Between ticks a pulse costs one read of a small file, and a call for each VM on a memfd.
//! Fifty idle guests of others, with a second between pulses, are fifty such reads a second.

use std::time::Duration;

use wideleaf_policies::Moment;
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

use super::{ManagedVm, ManagerConfig};
use crate::host::Host;
use crate::sensors::resident::{pages_in_use, resident_pages};

/// How often an idle loop looks whether memory came into use: a hot phase that begins with an allocation waits no longer.
/// Waking up and looking takes 0.1 ms in a virtual machine, 0.2 % of a core.
pub(super) const PULSE: Duration = Duration::from_millis(50);

const BUSY_PART: u32 = 4;
const PULSE_PART: u32 = 20;

/// The time between ticks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pacing {
    pause: Duration,
    ticked_at: Moment,
    sensed_in: Duration,
    /// Pages in use, the least since the last tick: what others free must not hide what a guest touches.
    in_use: Option<u64>,
}

impl Pacing {
    pub fn new(config: &ManagerConfig, now: Moment) -> Pacing {
        Pacing { pause: config.tick_shortest, ticked_at: now, sensed_in: Duration::ZERO, in_use: None }
    }

    /// Time to the next tick, unless it is urgent.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// After a tick whose sensing took `sensed_in` of CPU time.
    pub fn ticked(
        &mut self,
        host: &dyn Host,
        vms: &[ManagedVm],
        config: &ManagerConfig,
        sensed_in: Duration,
        is_busy: bool,
    ) {
        self.pause = if is_busy {
            config.tick_shortest.max(sensed_in * BUSY_PART).min(config.tick_longest)
        } else {
            (self.pause * 2).min(config.tick_longest)
        };
        (self.ticked_at, self.sensed_in) = (host.now(), sensed_in);
        self.in_use = in_use(host, vms);
    }

    /// Whether a window's worth of memory came into use since the last tick. On a host that does not say, never.
    pub fn is_urgent(&mut self, host: &dyn Host, vms: &[ManagedVm]) -> bool {
        let (Some(now), Some(least)) = (in_use(host, vms), self.in_use) else { return false };
        self.in_use = Some(least.min(now));
        let has_grown = now.saturating_sub(least) >= u64::from(BASE_PAGES_PER_WINDOW);
        has_grown && host.now().since(self.ticked_at) >= self.sensed_in * PULSE_PART
    }
}

fn in_use(host: &dyn Host, vms: &[ManagedVm]) -> Option<u64> {
    if host.is_own() { pages_in_use(host, vms.iter().filter_map(|vm| vm.ram.as_deref())) } else { resident_pages(host) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::host::fake::FakeHost;
    use crate::region::GuestRam;
    use std::sync::atomic::Ordering;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize, VmId};

    fn set_resident(host: &FakeHost, pages: u64) {
        set_resident_of_which_files(host, pages + 700, 700);
    }

    fn set_resident_of_which_files(host: &FakeHost, pages: u64, of_files: u64) {
        host.set_text("/proc/self/statm", &format!("900000 {pages} {of_files} 400 0 30000 0\n"));
    }

    fn pacing(host: &FakeHost, sensed_in: Duration) -> Pacing {
        let mut pacing = Pacing::new(&ManagerConfig::default(), host.now());
        pacing.ticked(host, &[], &ManagerConfig::default(), sensed_in, false);
        pacing
    }

    #[test]
    fn pauses_double_while_idle_and_follow_the_cost_of_sensing_while_busy() {
        let (host, config) = (FakeHost::default(), ManagerConfig::default());
        let mut pacing = Pacing::new(&config, host.now());
        let mut after = |sensed_ms, is_busy| {
            pacing.ticked(&host, &[], &config, Duration::from_millis(sensed_ms), is_busy);
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
    fn what_a_guest_writes_to_ram_of_a_file_is_new() {
        let range = GpaRange::new(Gpa::new(0), mib(2)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).expect("memfd has base pages");
        let ram = GuestRam::map(&[range], backing).expect("memory");
        let vms = [ManagedVm::new(VmId(0), ram.clone(), None)];
        let host = FakeHost::default();
        set_resident(&host, 1000);
        let mut pacing = Pacing::new(&ManagerConfig::default(), host.now());
        pacing.ticked(&host, &vms, &ManagerConfig::default(), Duration::ZERO, false);
        assert!(!pacing.is_urgent(&host, &vms));
        ram.words(ram.ranges()[0]).iter().step_by(512).for_each(|word| word.store(1, Ordering::Relaxed));
        assert!(pacing.is_urgent(&host, &vms));
    }

    #[test]
    fn what_is_dear_to_look_at_is_looked_at_less_often() {
        let host = FakeHost::default();
        set_resident(&host, 0);
        let mut pacing = pacing(&host, Duration::from_millis(5));
        set_resident(&host, 100_000);
        assert!(!pacing.is_urgent(&host, &[]));
        host.sleep(Duration::from_millis(100));
        assert!(pacing.is_urgent(&host, &[]));
    }

    #[test]
    fn a_host_that_does_not_say_is_never_urgent() {
        let host = FakeHost::default();
        let mut pacing = pacing(&host, Duration::ZERO);
        set_resident(&host, 100_000);
        assert!(!pacing.is_urgent(&host, &[]));
    }
}
