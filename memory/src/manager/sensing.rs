//! Senses every window at a tick, and marks the windows that no policy may name.
//!
//! ```text
//!   host backing ─┐                                          the whole VM: gone, left alone, panicked
//!   slots         ├─▶ rows of a VM ── ready_at = NEVER ◀──── windows: cannot be huge, kept holes, a giant under way,
//!   samples      ─┘        │                                          memslots that others hold
//!                          └── KVM's totals ─▶ check
//! ```
//!
//! RAM of another process comes and goes during a scan. A failed scan is counted, logged once until the next success,
//! and its windows count as unbacked, which no policy acts on.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{
    Action, Backing, GpaRange, HostMemory, HugePagePrice, HugePages, MappingStats, Snapshot, VmId, VmSnapshot,
    WindowIndex, WindowRow, account,
};

use super::giants;
use super::pacing::{Overhead, Sensed};
use super::vm_state::VmState;
use super::{KvmCheck, ManagedVm, ManagerLoop, ManagerReport, NEVER, Sample};
use crate::gate::GateState;
use crate::host::{Host, HostError};
use crate::region::RamRange;
use crate::second_level::SlotId;
use crate::second_level::guard::SecondLevelGuard;
use crate::sensors::host_backing::{HostBackingSensor, WindowBacking, window_backing};
use crate::sensors::host_memory::host_memory;
use crate::sensors::swapped::{Swapped, max_swapped, swapped};

impl ManagerLoop {
    /// Asks every gate. A VM that is gone stays so. What became of its windows behind a closed gate is not known.
    pub(super) fn ask_gates(&mut self) {
        for vm in self.vms.iter_mut().filter(|vm| vm.is_there()) {
            let before = std::mem::replace(&mut vm.gate, self.steering.gate_state(&vm.managed));
            if before != vm.gate && vm.gate == GateState::Open {
                self.scan.forget();
            }
            if vm.gate == GateState::Gone {
                // The guest's manager knows its name, and reports it.
                tracing::debug!("{} has ended", vm.managed.id);
            }
        }
    }

    /// Asks which guests are paused: their slower sensors rest.
    pub(super) fn ask_pauses(&mut self) {
        let now = self.host.now();
        for vm in self.vms.iter_mut().filter(|vm| vm.is_there()) {
            let is_paused = vm.managed.is_paused();
            vm.sampling.note_pause(is_paused, now);
            self.report.ticks_paused += u64::from(is_paused);
        }
    }

    /// Senses all VMs: every window if that is due, or else those of the latest plan alone.
    pub(super) fn sense_in_turn(&mut self) -> Snapshot {
        let began = self.host.thread_cpu_time();
        let vms = self.vms.iter().map(|vm| &vm.managed);
        let is_due = self.scan.is_due(self.host.as_ref(), vms, self.config.tick_longest);
        let snapshot = self.sense_these(if is_due { Windows::All } else { Windows::ActedOn });
        let took = self.host.thread_cpu_time().saturating_sub(began);
        self.overhead = Overhead { whole: took, scan: if is_due { took } else { Duration::ZERO } };
        if is_due {
            self.scan.done(Sensed { at: self.host.now(), took });
        }
        snapshot
    }

    /// Senses all windows of all VMs.
    pub(super) fn sense(&mut self) -> Snapshot {
        self.sense_these(Windows::All)
    }

    fn sense_these(&mut self, windows: Windows) -> Snapshot {
        let host = self.sense_host();
        let plan = self.plan.actions();
        let sense = |vm: &mut VmState| {
            let of_vm = plan.iter().map(|planned| planned.action).filter(|action| action.vm() == vm.managed.id);
            let acted_on = (windows == Windows::ActedOn).then(|| of_vm.map(Action::window).collect());
            let tolerated = self.config.given_back.tolerated;
            vm.sense(self.host.as_ref(), &mut self.sensor, acted_on, tolerated, &mut self.report)
        };
        let mut vms: Vec<_> = self.vms.iter_mut().map(sense).collect();
        self.sense_totals(&mut vms);
        Snapshot { host, vms }
    }

    /// Reads KVM's totals once for each second level, and compares them with all the RAM that has it. The samples of
    /// a VM that is gone end with the last one before its end.
    fn sense_totals(&mut self, rows: &mut [VmSnapshot]) {
        for index in 0..self.vms.len() {
            if !self.vms[index].is_there() {
                continue;
            }
            let first = self.vms[index].first_of_second_level;
            rows[index].mapping = if first < index && self.vms[first].is_there() {
                rows[first].mapping
            } else {
                self.vms[index].sense_mapping(&mut self.report)
            };
            let (host, mapping) = (account::host_backing(&rows[index]), rows[index].mapping);
            let sample = Sample { at: self.host.now(), host, mapping };
            keep_sample(&mut self.report.samples[index].1, sample, self.config.samples_kept);
        }
        for first in 0..self.vms.len() {
            let parts = || (first..self.vms.len()).filter(|index| self.vms[*index].first_of_second_level == first);
            // During the exchange of a giant, the two readings belong to different moments.
            let is_steady = |index: usize| self.vms[index].is_there() && !self.giants.is_under_way_in(index);
            let is_steady = parts().next().is_some() && parts().all(is_steady);
            if let (true, Some(stats)) = (is_steady, rows[first].mapping) {
                let possible = parts().map(|index| large_windows(&rows[index])).sum();
                check_totals(&mut self.report.kvm_checks[first], stats, possible);
            }
        }
    }

    fn sense_host(&mut self) -> Option<HostMemory> {
        let huge_pages = self.huge_pages();
        if !self.needs.host_memory {
            return None;
        }
        let memory = host_memory(self.host.as_ref());
        memory
            .inspect_err(|error| {
                tracing::warn!("the host's memory: {error}");
                *self.report.sensor_failures.entry("host_memory").or_default() += 1;
            })
            .map(|memory| {
                let giant_pages_free = self.giant_pages_free();
                HostMemory { giant_pages_free, huge_pages, ..memory }
            })
            .ok()
    }

    /// Supply of huge pages: the host's price, if there is one, or else what this manager found. If it was refused a
    /// page itself, it counts the free ones at each tick, which is newer than what came with the price.
    fn huge_pages(&self) -> HugePages {
        let found = self.huge_pages.supply(self.host.as_ref());
        match (self.steering.take_price(self.host.now()), found) {
            (None, found) => found,
            (Some(price), HugePages::Scarce { free }) => HugePages::Priced(HugePagePrice { free: Some(free), ..price }),
            (Some(price), _) => HugePages::Priced(price),
        }
    }
}

/// Windows that are looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Windows {
    All,
    /// Those of the latest plan; the others are as they were.
    ActedOn,
}

impl VmState {
    /// Senses every window of the VM, or those acted on. `tolerated`: number of given-back pages that a promoted window
    /// may have.
    fn sense(
        &mut self,
        host: &dyn Host,
        sensor: &mut HostBackingSensor,
        acted_on: Option<Vec<WindowIndex>>,
        tolerated: u16,
        report: &mut ManagerReport,
    ) -> VmSnapshot {
        let is_whole = acted_on.is_none();
        let mut rows = self.sense_rows(host, sensor, acted_on, report);
        self.managed.ram.iter().filter(|_| host.is_own()).for_each(|ram| giants::mark(ram, &mut rows));
        if self.is_seen() && !host.is_own() {
            self.kernel_work.see(&rows.backing);
        }
        if self.is_seen() && is_whole {
            self.sense_swapped(host, &rows, report);
        }
        leave_to_others(self.second_level_guard.as_deref(), &mut rows, &mut report.foreign_logs);
        self.hold_back(&mut rows);
        (rows.given_back_tolerated, rows.guarantee) = (tolerated, self.managed.guarantee);
        self.sense_given_back(host, &mut rows);
        rows.progress = self.managed.progress.as_ref().map(|readings| readings.take()).unwrap_or_default();
        rows
    }

    /// One row for each window, also after failures: otherwise the row numbers would shift.
    fn sense_rows(
        &mut self,
        host: &dyn Host,
        sensor: &mut HostBackingSensor,
        acted_on: Option<Vec<WindowIndex>>,
        report: &mut ManagerReport,
    ) -> VmSnapshot {
        let vm = &self.managed;
        let began = host.now();
        let as_before = acted_on.and_then(|windows| as_before_except(host, vm, &self.backing, &windows));
        let is_scan = as_before.is_none() && self.gate != GateState::Gone;
        let ranges = match self.gate {
            GateState::Gone => vm.ranges.iter().map(|range| Ok(unbacked(range.gpa).collect())).collect(),
            GateState::Open | GateState::Closed(_) => match as_before {
                Some(rows) => vec![Ok(rows)],
                None => host_backing(sensor, host, vm),
            },
        };
        let mut rows = VmSnapshot::with_capacity(vm.id, self.windows.len());
        let mut logged = vm.second_level.as_ref().map(|kvm| kvm.slots()).unwrap_or_default();
        logged.retain(|slot| slot.is_dirty_logged);
        let is_held = |gpa| logged.iter().any(|slot| slot.range.contains(gpa));
        let mut known: Vec<_> = Vec::with_capacity(self.windows.len());
        let mut failure = None;
        self.backing.clear();
        for range in ranges {
            let seen = range.unwrap_or_else(|(gpa, error)| {
                failure = Some(error);
                unbacked(gpa).collect()
            });
            self.backing.extend_from_slice(&seen);
            for row in seen {
                known.push(WindowRow {
                    is_held: is_held(row.window.start()),
                    ready_at: self.windows[known.len()].ready_at(),
                    ..WindowRow::new(row.window, row.resident, row.backing)
                });
            }
        }
        if failure.is_some() {
            self.backing.clear(); // All are looked at again at the next tick.
        } else if is_scan {
            self.scanned_at = Some(began);
        }
        self.sampling.fill(&mut known, host.now());
        known.into_iter().for_each(|row| rows.push(row));
        self.tell_of_host_backing(failure, report);
        rows
    }

    /// Whether this tick has seen the windows.
    fn is_seen(&self) -> bool {
        self.gate != GateState::Gone && !self.failing.contains("host_backing")
    }

    fn sense_swapped(&mut self, host: &dyn Host, rows: &VmSnapshot, report: &mut ManagerReport) {
        match swapped(host, self.managed.backing.kind(), &self.managed.ranges, &rows.resident) {
            Ok(swapped) => {
                self.failing.remove("swapped");
                if matches!(swapped, Swapped::Pages(_)) {
                    self.swapped_max = max_swapped(host);
                }
                self.swapped = swapped;
            }
            Err(error) if error.is_gone() => {
                tracing::info!("{} has ended", self.managed.id);
                self.gate = GateState::Gone;
            }
            Err(error) => {
                self.swapped = Swapped::Unknown;
                self.tell_of_failure("swapped", &error, report);
            }
        }
    }

    fn tell_of_host_backing(&mut self, failure: Option<HostError>, report: &mut ManagerReport) {
        match failure {
            None => {
                self.failing.remove("host_backing");
            }
            Some(error) if error.is_gone() => {
                tracing::info!("{} has ended", self.managed.id);
                self.gate = GateState::Gone;
            }
            Some(error) => self.tell_of_failure("host_backing", &error, report),
        }
    }

    /// Counts a failure, and logs the first of several in a row.
    pub(super) fn tell_of_failure(
        &mut self,
        sensor: &'static str,
        error: &dyn std::error::Error,
        report: &mut ManagerReport,
    ) {
        *report.sensor_failures.entry(sensor).or_default() += 1;
        if self.failing.insert(sensor) {
            tracing::warn!("{}: {sensor}: {error}", self.managed.id);
        }
    }

    /// Marks the windows that no policy may name now: all, or those that can never be huge, those with holes that
    /// must stay, and large ones that must not be split ([`crate::gate`]).
    fn hold_back(&self, rows: &mut VmSnapshot) {
        if !self.may_be_disturbed() {
            rows.ready_at.fill(NEVER);
            return;
        }
        for (ready_at, why) in rows.ready_at.iter_mut().zip(&self.barred) {
            if why.is_some() {
                *ready_at = NEVER;
            }
        }
        let (keeps_holes, is_watched) = (self.managed.keeps_holes().is_some(), self.managed.is_watched());
        let waits = |resident, is_large| keeps_holes && has_hole(resident) || is_watched && is_large;
        let all_wait = is_watched && self.managed.is_shared();
        for (row, ready_at) in rows.ready_at.iter_mut().enumerate() {
            let is_swapped = self.swapped.of_row(row) > self.swapped_max;
            if all_wait || is_swapped || waits(rows.resident[row], rows.backing[row].is_large()) {
                *ready_at = NEVER;
            }
        }
    }

    fn sense_mapping(&mut self, report: &mut ManagerReport) -> Option<MappingStats> {
        match self.managed.second_level.as_ref()?.mapping_stats() {
            Ok(stats) => {
                self.failing.remove("kvm_stats");
                Some(stats)
            }
            Err(error) => {
                self.tell_of_failure("kvm_stats", &error, report);
                None
            }
        }
    }
}

/// Whether pages are absent from a window that is in use.
pub(super) const fn has_hole(resident: u16) -> bool {
    0 < resident && resident < BASE_PAGES_PER_WINDOW
}

fn unbacked(gpa: GpaRange) -> impl Iterator<Item = WindowBacking> {
    gpa.windows().map(|window| WindowBacking { window, resident: 0, backing: Backing::Unbacked })
}

/// Backing of every window of a VM, range by range, each at a moment without an exchange of a giant.
fn host_backing(
    sensor: &mut HostBackingSensor,
    host: &dyn Host,
    vm: &ManagedVm,
) -> Vec<Result<Vec<WindowBacking>, (GpaRange, HostError)>> {
    let mut look = |range: &RamRange| match sensor.sample(host, *range, vm.backing.fixed_page()) {
        Ok(seen) => Ok(seen.collect()),
        Err(error) => Err((range.gpa, error)),
    };
    let steadily = |range| match &vm.ram {
        Some(ram) => ram.claims().steadily(|| look(range)),
        None => look(range),
    };
    vm.ranges.iter().map(steadily).collect()
}

/// The backing of all windows as it was, except for these. `None` without an earlier one, if one cannot be looked at,
/// or if one was or is part of a giant, since all of that changed.
fn as_before_except(
    host: &dyn Host,
    vm: &ManagedVm,
    before: &[WindowBacking],
    windows: &[WindowIndex],
) -> Option<Vec<WindowBacking>> {
    let mut rows = (!before.is_empty()).then(|| before.to_vec())?;
    for window in windows {
        let range = vm.ranges.iter().find(|range| range.gpa.contains(window.start()))?;
        let row = rows.binary_search_by_key(window, |row| row.window).ok()?;
        let look = || window_backing(host, *range, vm.backing.fixed_page(), *window);
        let seen = vm.ram.as_ref().map_or_else(look, |ram| ram.claims().steadily(look)).ok()?;
        if [rows[row], seen].iter().any(|seen| seen.backing == Backing::Giant1G) {
            return None;
        }
        rows[row] = seen;
    }
    Some(rows)
}

/// Marks the windows of memslots with dirty logs that other parts of the VMM switched on: no action may name them.
fn leave_to_others(guard: Option<&SecondLevelGuard>, rows: &mut VmSnapshot, told: &mut BTreeSet<(VmId, SlotId)>) {
    for slot in guard.iter().flat_map(|guard| guard.foreign_logs()) {
        told.insert((rows.vm, slot.id));
        let row_of = |gpa| rows.windows.partition_point(|window| window.start() < gpa);
        let (first, end) = (row_of(slot.range.start()), row_of(slot.range.end()));
        rows.ready_at[first..end].fill(NEVER);
    }
}

/// Number of windows that KVM may map large.
fn large_windows(rows: &VmSnapshot) -> u64 {
    (0..rows.len()).filter(|row| rows.backing[*row].is_large() && !rows.is_held[*row]).count() as u64
}

fn check_totals(check: &mut Option<KvmCheck>, stats: MappingStats, possible: u64) {
    /// The host is read before KVM, and the guest runs on in between: a window or two may have become large.
    const SLACK: u64 = 2;
    let large = stats.pages_2m + stats.pages_1g * 512;
    let check = check.get_or_insert(KvmCheck { large_at_first: large, ..KvmCheck::default() });
    check.large_at_most = check.large_at_most.max(large);
    check.contradictions += u64::from(large > possible + SLACK);
}

/// By VM: index of the first VM with the same second level; its own index if it is the first or has none. One guest
/// may have several entries, one for each kind of RAM.
pub(super) fn firsts_of_second_levels(vms: &[ManagedVm]) -> Vec<usize> {
    let second_level = |vm: &ManagedVm| vm.second_level.as_ref().map(|kvm| Arc::as_ptr(kvm).cast::<()>());
    let first = |(index, vm): (usize, &ManagedVm)| match second_level(vm) {
        Some(own) => vms.iter().position(|other| second_level(other) == Some(own)).unwrap_or(index),
        None => index,
    };
    vms.iter().enumerate().map(first).collect()
}

/// Keeps a sample. Where there are `most` already, every second one is dropped.
fn keep_sample(samples: &mut Vec<Sample>, sample: Sample, most: usize) {
    if samples.len() >= most {
        let mut number = 0;
        samples.retain(|_| {
            number += 1;
            number % 2 == 1
        });
    }
    samples.push(sample);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::region::GuestRam;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, Moment, PageSize};

    #[test]
    fn of_more_samples_than_are_kept_the_first_and_the_latest_remain() {
        let sample = |second| Sample {
            at: Moment::after_start(Duration::from_secs(second)),
            host: account::HostBacking::default(),
            mapping: None,
        };
        let mut samples = Vec::new();
        for second in 0..100 {
            keep_sample(&mut samples, sample(second), 16);
            assert!(samples.len() <= 16);
        }
        assert!(samples.len() >= 8);
        assert_eq!([samples.first(), samples.last()], [Some(&sample(0)), Some(&sample(99))]);
    }

    #[test]
    fn between_two_scans_only_the_windows_acted_on_are_looked_at() {
        let host = FakeHost::default();
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let range = GpaRange::new(Gpa::new(0), mib(6)).expect("fits");
        let ram = GuestRam::map(&[range], backing).expect("memory");
        let (vm, hva) = (ManagedVm::new(VmId(0), ram.clone(), None), ram.ranges()[0].hva);
        let scan = || host_backing(&mut HostBackingSensor::default(), &host, &vm).into_iter().flatten().flatten();
        let before: Vec<_> = scan().collect();
        (0..3).for_each(|window| host.make_present(hva + mib(2) * window, mib(1), false));
        let look = |windows: &[u64]| {
            let windows: Vec<_> = windows.iter().copied().map(WindowIndex::new).collect();
            let rows = as_before_except(&host, &vm, &before, &windows)?;
            Some(rows.into_iter().map(|row| row.resident).collect::<Vec<_>>())
        };
        assert_eq!(look(&[]), Some(vec![0, 0, 0]));
        assert_eq!(look(&[2, 0]), Some(vec![256, 0, 256]));
        assert_eq!(look(&[7]), None, "it has no such window");
        assert_eq!(as_before_except(&host, &vm, &[], &[]), None, "there was no scan");
        host.fail_call(0, libc::EIO);
        assert_eq!(look(&[1]), None);
    }
}
