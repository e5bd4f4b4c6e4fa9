//! What `auto` keeps for a window from one plan to the next.

use core::time::Duration;

use alloc::collections::BTreeMap;

use super::audit::Kind;
use crate::action::Action;
use crate::outcome::{Outcome, OutcomeResult};
use crate::snapshot::{AccessHistory, VmId, VmSnapshot};
use crate::units::{Moment, WindowIndex};

/// Number of newest samples without a touch that make a window cold: one may miss an access by chance.
const COLD_AFTER_SAMPLES: u8 = 2;

/// How a window lost its huge page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum GivenUp {
    /// Not since its latest promotion.
    #[default]
    No,
    /// It gave its huge page back, to another window or to the host.
    Vacated,
    /// Its zero pages were released.
    ZeroPages,
    /// It was cold and was demoted.
    Cold,
    /// Several NUMA nodes shared it.
    Shared,
}

/// Whether samples see a window touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heat {
    /// Now and then, or there are no samples.
    Between,
    /// Every sample sees a touch.
    Hot,
    /// A full history has no touch.
    Cold,
}

/// Heat, and the start of the period in which it has been as it is, in nanoseconds from the manager's start: in one
/// number, of which the lowest two bits are the heat. The others suffice for 146 years.
#[derive(Clone, Copy, Debug, Default)]
struct HeatSince(u64);

impl HeatSince {
    const fn new(heat: Heat, since_ns: u64) -> HeatSince {
        let most = u64::MAX >> 2;
        HeatSince((if since_ns < most { since_ns } else { most }) << 2 | heat as u64)
    }

    const fn heat(self) -> Heat {
        match self.0 & 0b11 {
            0 => Heat::Between,
            1 => Heat::Hot,
            _ => Heat::Cold,
        }
    }

    const fn since_ns(self) -> u64 {
        self.0 >> 2
    }
}

/// State that the policy keeps for a window. A plan passes several times over that of all windows and waits mostly for
/// memory, so it is kept small: two in a cache line.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Memory {
    heat: HeatSince,
    /// Cycles that its promotion has cost and not yet earned.
    pub owed: u64,
    /// Number of base pages present when its promotion was planned.
    pub resident_before: u16,
    /// How it lost its huge page since its latest promotion: it is promoted again by proof only.
    pub given_up: GivenUp,
    /// Number of base pages that were in use when it was given up.
    pub resident_after: u16,
    /// Least number of zero pages since `zeroes_since_s`.
    pub zeroes: u16,
    /// Second from the start since which about as many pages have stayed zero.
    pub zeroes_since_s: u32,
    /// Kind of candidate that it was when it was planned.
    pub kind: Kind,
    /// Number of the plan that last left it small because its NUMA node had no huge page.
    pub waited_in: u32,
}

const _: () = assert!(size_of::<Memory>() == 32);

impl Memory {
    /// Number of base pages of a large window that the guest may use.
    pub fn used(&self, vm: &VmSnapshot, row: usize) -> u16 {
        if self.resident_before > 0 { self.resident_before } else { vm.resident[row] }
    }

    pub fn was_given_up(&self) -> bool {
        self.given_up != GivenUp::No
    }

    /// Whether its huge page was split, and not moved to another window.
    pub fn was_split(&self) -> bool {
        self.was_given_up() && self.given_up != GivenUp::Vacated
    }

    /// Start of the period in which every sample saw a touch, in nanoseconds from the manager's start.
    pub fn hot_since_ns(&self) -> Option<u64> {
        (self.heat.heat() == Heat::Hot).then_some(self.heat.since_ns())
    }

    /// Whole seconds since a full history first had no touch; 0 while it has one.
    pub fn cold_for_s(&self, now: Moment) -> u32 {
        let since = Moment::after_start(Duration::from_nanos(self.heat.since_ns()));
        if self.heat.heat() == Heat::Cold { now_s(now).saturating_sub(now_s(since)) } else { 0 }
    }

    /// Makes a hot window prove anew that it is hot.
    pub fn forget_hot(&mut self) {
        if self.heat.heat() == Heat::Hot {
            self.heat = HeatSince::new(Heat::Between, self.heat.since_ns());
        }
    }

    /// Time for which [`Memory::zeroes`] pages have stayed zero.
    pub fn zeroes_stayed(&self, now: Moment) -> Duration {
        Duration::from_secs(now_s(now).saturating_sub(self.zeroes_since_s).into())
    }

    /// It writes only at a change: a plan looks at all windows, and most stay as they are.
    pub fn note_heat(&mut self, access: AccessHistory, now: Moment) {
        let heat = if is_idle(access) {
            Heat::Cold
        } else if access.idle_samples() < COLD_AFTER_SAMPLES.min(access.samples()) {
            Heat::Hot
        } else {
            Heat::Between
        };
        if heat != self.heat.heat() {
            self.heat = HeatSince::new(heat, now_ns(now));
        }
    }

    /// A few pages more or fewer are no change.
    pub fn note_zeroes(&mut self, zero: u16, now: Moment) {
        if zero == 0 && self.zeroes == 0 {
            return;
        }
        let has_stayed = self.zeroes - self.zeroes / 8 <= zero && zero / 2 <= self.zeroes;
        if has_stayed && self.zeroes > 0 {
            self.zeroes = self.zeroes.min(zero);
        } else {
            (self.zeroes, self.zeroes_since_s) = (zero, now_s(now));
        }
    }
}

/// Huge pages that the latest plan gives up, by window. A request that is not done leaves the window as it was.
#[derive(Clone, Debug, Default)]
pub(super) struct Giving(BTreeMap<(VmId, WindowIndex), Given>);

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Given {
    pub given_up: GivenUp,
    /// Number of base pages in use: a split may free the zero pages, so that these are left at least.
    pub used: u16,
    is_done: bool,
}

impl Giving {
    /// Notes a request.
    pub fn planned(&mut self, vm: &VmSnapshot, row: usize, given_up: GivenUp) {
        let given = Given { given_up, used: used(vm, row), is_done: false };
        self.0.insert((vm.vm, vm.windows[row]), given);
    }

    /// Notes what was done.
    pub fn learn(&mut self, outcome: &Outcome) {
        let gives = matches!(outcome.action, Action::Release { .. } | Action::Demote { .. } | Action::Vacate { .. });
        let key = (outcome.action.vm(), outcome.action.window());
        if gives
            && outcome.result == OutcomeResult::Done
            && let Some(given) = self.0.get_mut(&key)
        {
            given.is_done = true;
        }
    }

    /// The windows that have lost their huge page. Forgets the plan.
    pub fn take_done(&mut self) -> impl Iterator<Item = (VmId, WindowIndex, Given)> + use<> {
        let all = core::mem::take(&mut self.0).into_iter();
        all.filter(|(_, given)| given.is_done).map(|((vm, window), given)| (vm, window, given))
    }
}

/// Number of base pages that do not hold only zeroes.
pub(super) fn used(vm: &VmSnapshot, row: usize) -> u16 {
    vm.resident[row] - vm.zero[row].unwrap_or(0).min(vm.resident[row])
}

/// Seconds from the start, for columns of many windows.
pub(super) fn now_s(now: Moment) -> u32 {
    u32::try_from(now.since_start().as_secs()).unwrap_or(u32::MAX)
}

/// Nanoseconds from the start.
pub(super) fn now_ns(now: Moment) -> u64 {
    u64::try_from(now.since_start().as_nanos()).unwrap_or(u64::MAX)
}

/// Whether a full history has no touch at any sample.
pub(super) fn is_idle(access: AccessHistory) -> bool {
    access.idle_samples() == AccessHistory::SAMPLES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_and_its_beginning_share_a_number_and_the_latest_beginning_is_in_146_years() {
        for heat in [Heat::Between, Heat::Hot, Heat::Cold] {
            for since_ns in [0, 1, 3, u64::MAX >> 2] {
                let both = HeatSince::new(heat, since_ns);
                assert_eq!((both.heat(), both.since_ns()), (heat, since_ns));
            }
            assert_eq!(HeatSince::new(heat, u64::MAX).since_ns(), u64::MAX >> 2);
        }
        assert_eq!(HeatSince::default().heat(), Heat::Between);
    }
}
