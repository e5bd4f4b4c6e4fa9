//! Shares of the budget, permission to grow, and guarantees: pursued, and reported where they are missed.

use std::time::Duration;

use wideleaf_policies::BudgetLimits;

use super::vm::Vm;
use super::{Engine, SharedCare, Table, told_if_free};
use crate::config::Wanted;
use crate::guests::ProcessId;
use crate::share;
use wideleaf_attach::guarantee::GuaranteeEvent;

impl Engine {
    pub(super) fn watch_host(&self) {
        let available = (self.doors.available)();
        let mut table = self.table();
        let was_short = table.host.is_short;
        let Table { host, config, .. } = &mut *table;
        host.update(available, &config.host);
        match (was_short, host.is_short) {
            (false, true) => {
                tracing::warn!("the host is short of memory ({} available): no promotion may take more", host.available)
            }
            (true, false) => tracing::info!("the host has enough memory again ({} available)", host.available),
            _ => {}
        }
    }

    pub(super) fn watch_guarantees(&self, now: Duration) {
        let mut missed = Vec::new();
        let mut table = self.table();
        let grace = table.config.defaults.grace;
        for (process, vm) in &mut table.vms {
            match vm.watch_guarantee(now, grace) {
                Some(GuaranteeEvent::Missed) => missed.push((*process, vm.care())),
                Some(GuaranteeEvent::MetAgain) => {
                    vm.missed_because = None;
                    tracing::info!("{} meets its guarantee of {} again", vm.found.name, vm.wanted.guarantee);
                }
                None => {}
            }
        }
        drop(table);
        for (process, care) in missed {
            let explanation = care.as_ref().and_then(|care| told_if_free(care, |care| care.explain()));
            let reason = match explanation.map(|explanation| explanation.reasons.into_iter().next()) {
                Some(Some(reason)) => format!("{} windows: {}", reason.windows, reason.text),
                None if care.is_some() => "it was busy just now: ask `wideleaf explain`".to_owned(),
                _ => "only its own process knows why".to_owned(),
            };
            if let Some(vm) = self.table().vms.get_mut(&process) {
                tracing::warn!("{} is below its guarantee of {}: {reason}", vm.found.name, vm.wanted.guarantee);
                vm.missed_because = Some(reason);
            }
        }
    }

    /// Gives each manager the policy that is due now: another one while a guarantee is pursued. A busy one gets it at
    /// the next tick.
    pub(super) fn pursue_guarantees(&self) {
        let due: Vec<(ProcessId, SharedCare, Wanted)> = {
            let table = self.table();
            let due = |(process, vm): (&ProcessId, &Vm)| Some((*process, vm.care()?, vm.due()?));
            table.vms.iter().filter_map(due).collect()
        };
        for (process, care, due) in due {
            let applied = told_if_free(&care, |care| care.apply(&due));
            let mut table = self.table();
            let Some(vm) = table.vms.get_mut(&process) else { continue };
            let name = &vm.found.name;
            match applied {
                // A request may have set another policy in between; the next tick compares again.
                Some(Ok(())) => {
                    tracing::info!("{name}: policy {} for its guarantee of {}", due.policy, due.guarantee);
                    vm.applied = due.policy;
                }
                Some(Err(error)) => tracing::debug!("{name} keeps its policy {}: {error}", vm.applied),
                None => {}
            }
        }
    }

    /// Gives each VM its share of the budget, and decides whether it may grow. Only VMs with a change are called. A
    /// busy one gets it at the next tick.
    pub(super) fn share_out(&self) {
        let _one_at_a_time = self.sharing.lock();
        let mut told_so: Vec<(ProcessId, SharedCare, BudgetLimits, bool)> = Vec::new();
        let mut table = self.table();
        let claims: Vec<share::Claim> = table.vms.values().map(Vm::claim).collect();
        let parts = share::parts(table.config.budget.limits(), &claims);
        let is_short = table.host.is_short;
        for ((process, vm), limits) in table.vms.iter_mut().zip(parts) {
            let may_grow = !is_short && !vm.is_bloated();
            if (vm.limits, vm.may_grow) != (Some(limits), may_grow) {
                (vm.limits, vm.may_grow) = (Some(limits), may_grow);
                told_so.extend(vm.care().map(|care| (*process, care, limits, may_grow)));
            }
        }
        drop(table);
        for (process, care, limits, may_grow) in told_so {
            let is_told = told_if_free(&care, |care| {
                care.set_limits(limits);
                care.set_may_grow(may_grow);
            });
            if let (None, Some(vm)) = (is_told, self.table().vms.get_mut(&process)) {
                vm.limits = None;
            }
        }
    }
}
