//! Counts the zero pages of a rotating share of the windows.

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::rotation::Rotation;
use wideleaf_policies::{Backing, Moment, PerTenThousand, WindowIndex, WindowRow};

use super::{EndOfTick, Kind, SlowSensor, Starting};
use crate::manager::managed_vm::ManagedVm;
use crate::manager::report::ManagerReport;
use crate::region::{GuestRam, RamRange};
use crate::sensors::share::Share;
use crate::sensors::zero_pages::window_zero_pages;

pub(super) const KIND: Kind = Kind {
    question: "which pages are zero",
    turn: 0,
    is_needed: |needs| needs.zero,
    shares_budget: true,
    causes_faults: false,
    start: |starting| Ok(Box::new(ZeroSampling::start(starting)?)),
};

/// Assumed cost of a search for zero pages before it is measured: 0.7 ms where all is zero, microseconds
/// in ordinary memory.
const ZERO_COST: Duration = Duration::from_micros(100);
const ZERO_LEAST: usize = 1;
/// 64 windows full of zeroes, found at once, take 45 ms of the loop's thread.
const ZERO_MOST: usize = 64;

struct ZeroSampling {
    ram: Arc<GuestRam>,
    rotation: Rotation,
    share: Share,
    pages: Vec<Option<u16>>,
}

impl ZeroSampling {
    fn start(starting: &Starting<'_>) -> Result<ZeroSampling, String> {
        let ram = starting.vm.ram.clone().ok_or("only RAM that is mapped in this process can be read")?;
        let share = starting.share(ZERO_LEAST, ZERO_MOST, ZERO_COST, Duration::ZERO);
        Ok(ZeroSampling { ram, rotation: Rotation::default(), share, pages: vec![None; starting.windows.len()] })
    }
}

impl SlowSensor for ZeroSampling {
    fn start(&mut self, tick: &EndOfTick<'_>, report: &mut ManagerReport) {
        let EndOfTick { host, vm, windows, backed, uses_zero, .. } = *tick;
        if !uses_zero {
            return;
        }
        if tick.has_acted() {
            self.share.changed();
        }
        let cost = report.sensor_costs.entry("zero_pages").or_default();
        let share = self.rotation.next_share(backed, self.share.next(host.now(), backed.len()));
        if share.is_empty() {
            cost.ticks_without += u64::from(!backed.is_empty());
            return;
        }
        let began_cpu = host.thread_cpu_time();
        let mut unchanged = 0;
        for window in share.iter().copied() {
            let (Some(range), Ok(row)) = (range_of(vm, window), windows.binary_search(&window)) else { continue };
            let pages = match window_zero_pages(host, &self.ram, range, window) {
                Ok(zero) => Some(zero.pages()),
                Err(error) => {
                    tracing::warn!("{}: zero pages of {window}: {error}", vm.id);
                    *report.sensor_failures.entry("zero_pages").or_default() += 1;
                    None
                }
            };
            if self.pages[row] == pages {
                unchanged += 1;
            } else {
                self.share.changed();
            }
            self.pages[row] = pages;
        }
        self.share.unchanged(unchanged, backed.len());
        let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
        self.share.paid(share.len() as u64, cpu);
        cost.add_sample(share.len() as u64, 0, cpu);
    }

    fn fill(&self, rows: &mut [WindowRow], _now: Moment) {
        for (row, pages) in rows.iter_mut().zip(&self.pages) {
            let is_present = row.backing != Backing::Unbacked;
            // Pages may have gone since they were counted.
            row.zero = pages.filter(|zero| is_present && *zero <= row.resident);
        }
    }

    fn forget(&mut self) {
        self.pages.fill(None);
    }

    fn set_budget(&mut self, budget: PerTenThousand) {
        self.share.set_budget(budget);
    }
}

fn range_of(vm: &ManagedVm, window: WindowIndex) -> Option<RamRange> {
    vm.ranges.iter().find(|range| range.gpa.contains(window.start())).copied()
}
