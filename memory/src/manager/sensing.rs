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

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, GpaRange, HostMemory, MappingStats, Snapshot, VmId, VmSnapshot, WindowRow, account};

use super::{KvmCheck, ManagedVm, ManagerLoop, NEVER, SAMPLES_KEPT, Sample};
use crate::gate::GateState;
use crate::host::{Host, HostError};
use crate::region::RamRange;
use crate::second_level::SlotId;
use crate::second_level::own_logs::OwnLogs;
use crate::sensors::host_backing::{HostBackingSensor, WindowBacking};
use crate::sensors::host_memory::host_memory;

impl ManagerLoop {
    /// Asks every gate. A VM that is gone stays so.
    pub(super) fn ask_gates(&mut self) {
        for (gate, vm) in self.gates.iter_mut().zip(&self.vms).filter(|(gate, _)| **gate != GateState::Gone) {
            *gate = self.steering.gate_state(vm);
            match gate {
                GateState::Open => {}
                GateState::Closed(why) => *self.report.ticks_left_alone.entry(why.name()).or_default() += 1,
                // The guest's manager knows its name, and reports it.
                GateState::Gone => tracing::debug!("{} has ended", vm.id),
            }
        }
    }

    /// Senses all VMs.
    pub(super) fn sense(&mut self) -> Snapshot {
        let host = self.sense_host();
        let mut vms: Vec<_> = (0..self.vms.len()).map(|index| self.sense_vm(index)).collect();
        self.sense_totals(&mut vms);
        Snapshot { host, vms }
    }

    fn sense_vm(&mut self, index: usize) -> VmSnapshot {
        let mut rows = self.sense_rows(index);
        self.giants.mark(index, &mut rows);
        leave_to_others(self.own_logs[index].as_deref(), &mut rows, &mut self.report.logs_of_others);
        self.hold_back(index, &mut rows);
        self.sense_given_back(index, &mut rows);
        rows
    }

    /// Reads KVM's totals once for each second level, and compares them with all the RAM that has it. The samples of
    /// a VM that is gone end with the last one before its end.
    fn sense_totals(&mut self, vms: &mut [VmSnapshot]) {
        let is_there = |gates: &[GateState], index: usize| gates[index] != GateState::Gone;
        for index in (0..vms.len()).filter(|index| is_there(&self.gates, *index)).collect::<Vec<_>>() {
            let first = self.second_level_of[index];
            vms[index].mapping = if first < index && is_there(&self.gates, first) {
                vms[first].mapping
            } else {
                self.sense_mapping(index)
            };
            let sample =
                Sample { at: self.host.now(), host: account::host_backing(&vms[index]), mapping: vms[index].mapping };
            keep_sample(&mut self.report.samples[index].1, sample);
        }
        for first in 0..vms.len() {
            let parts = || (first..vms.len()).filter(|index| self.second_level_of[*index] == first);
            // During the exchange of a giant, the two readings belong to different moments.
            let is_steady = parts().all(|index| is_there(&self.gates, index) && !self.giants.is_under_way_in(index));
            if let (true, Some(stats)) = (is_steady && parts().next().is_some(), vms[first].mapping) {
                let possible = parts().map(|index| large_windows(&vms[index])).sum();
                check_totals(&mut self.report.kvm_checks[first], stats, possible);
            }
        }
    }

    /// One row for each window of a VM, also after failures: otherwise the row numbers would shift.
    fn sense_rows(&mut self, index: usize) -> VmSnapshot {
        let vm = &self.vms[index];
        let ranges = match self.gates[index] {
            GateState::Gone => vm.ranges.iter().map(|range| Ok(unbacked(range.gpa).collect())).collect(),
            GateState::Open | GateState::Closed(_) => host_backing(&mut self.sensor, self.host.as_ref(), vm),
        };
        let states = &self.states[index];
        let mut rows = VmSnapshot::with_capacity(vm.id, states.len());
        let slots = vm.second_level.as_ref().map(|kvm| kvm.slots()).unwrap_or_default();
        let is_held = |gpa| slots.iter().any(|slot| slot.is_dirty_logged && slot.range.contains(gpa));
        let columns = self.sampling[index].columns();
        let mut failure = None;
        for range in ranges {
            let seen = range.unwrap_or_else(|(gpa, error)| {
                failure = Some(error);
                unbacked(gpa).collect()
            });
            for row in seen {
                let row = WindowRow {
                    is_held: is_held(row.window.start()),
                    ready_at: states[rows.len()].ready_at(),
                    ..WindowRow::new(row.window, row.resident, row.backing)
                };
                rows.push(columns.fill(rows.len(), row));
            }
        }
        drop(columns);
        self.tell_of_host_backing(index, failure);
        rows
    }

    fn tell_of_host_backing(&mut self, index: usize, failure: Option<HostError>) {
        match failure {
            None => self.failing.remove(&(index, "host_backing")),
            Some(error) if error.is_gone() => {
                tracing::info!("{} has ended", self.vms[index].id);
                self.gates[index] = GateState::Gone;
                false
            }
            Some(error) => self.tell_of_failure(index, "host_backing", &error),
        };
    }

    /// Counts a failure, and logs the first of several in a row.
    fn tell_of_failure(&mut self, index: usize, sensor: &'static str, error: &dyn std::error::Error) -> bool {
        *self.report.sensor_failures.entry(sensor).or_default() += 1;
        let is_first = self.failing.insert((index, sensor));
        if is_first {
            tracing::warn!("{}: {sensor}: {error}", self.vms[index].id);
        }
        is_first
    }

    /// Marks the windows that no policy may name now: all, or those that can never be huge and those with holes
    /// that must stay.
    fn hold_back(&self, index: usize, rows: &mut VmSnapshot) {
        if self.is_left_alone[index] || self.gates[index] != GateState::Open {
            rows.ready_at.fill(NEVER);
            return;
        }
        for (ready_at, why) in rows.ready_at.iter_mut().zip(&self.barred[index]) {
            if why.is_some() {
                *ready_at = NEVER;
            }
        }
        if self.vms[index].keeps_holes() {
            for (ready_at, resident) in rows.ready_at.iter_mut().zip(&rows.resident) {
                if has_hole(*resident) {
                    *ready_at = NEVER;
                }
            }
        }
    }

    fn sense_mapping(&mut self, index: usize) -> Option<MappingStats> {
        match self.vms[index].second_level.as_ref()?.mapping_stats() {
            Ok(stats) => {
                self.failing.remove(&(index, "kvm_stats"));
                Some(stats)
            }
            Err(error) => {
                self.tell_of_failure(index, "kvm_stats", &error);
                None
            }
        }
    }

    fn sense_host(&mut self) -> Option<HostMemory> {
        if !self.needs.host_memory {
            return None;
        }
        let memory = host_memory(self.host.as_ref());
        memory
            .inspect_err(|error| {
                tracing::warn!("the host's memory: {error}");
                *self.report.sensor_failures.entry("host_memory").or_default() += 1;
            })
            .map(|memory| HostMemory { giant_pages_free: self.giants.pages_free(), ..memory })
            .ok()
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

/// Marks the windows of memslots with dirty logs that other parts of the VMM switched on: no action may name them.
fn leave_to_others(own: Option<&OwnLogs>, rows: &mut VmSnapshot, told: &mut BTreeSet<(VmId, SlotId)>) {
    for slot in own.iter().flat_map(|own| own.of_others()) {
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

fn keep_sample(samples: &mut Vec<Sample>, sample: Sample) {
    if samples.len() >= SAMPLES_KEPT {
        let mut number = 0;
        samples.retain(|_| {
            number += 1;
            number % 2 == 1
        });
    }
    samples.push(sample);
}
