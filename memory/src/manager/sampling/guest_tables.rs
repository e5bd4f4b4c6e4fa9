//! Reads the guest's own page tables, whole but rarely.

use std::sync::Arc;

use wideleaf_policies::{GuestMapping, Moment, PerTenThousand, WindowRow};

use super::{EndOfTick, Kind, SAMPLING_BUDGET, SlowSensor, Starting};
use crate::manager::report::ManagerReport;
use crate::sensors::guest_tables::{NoTables, OwnTables, TableSource, Walked};

pub(super) const KIND: Kind = Kind {
    question: "which pages the guest itself uses",
    turn: 1,
    is_needed: |needs| needs.guest_mapping,
    shares_budget: false,
    causes_faults: false,
    start: |starting| Ok(Box::new(GuestTables::start(starting)?)),
};

struct GuestTables {
    source: Arc<dyn TableSource>,
    next_at: Moment,
    mappings: Vec<GuestMapping>,
}

impl GuestTables {
    fn start(starting: &Starting<'_>) -> Result<GuestTables, String> {
        let vm = starting.vm;
        let source = match (&vm.guest_tables, &vm.ram, &vm.second_level) {
            (Some(source), ..) => Arc::clone(source),
            (None, None, _) => return Err("only RAM that is mapped in this process can be read".into()),
            (None, Some(_), None) => return Err("a process has no guest's tables".into()),
            (None, Some(ram), Some(second_level)) => {
                Arc::new(OwnTables { ram: ram.clone(), second_level: second_level.clone() })
            }
        };
        Ok(GuestTables {
            source,
            next_at: Moment::START,
            mappings: vec![GuestMapping::Unknown; starting.windows.len()],
        })
    }
}

impl SlowSensor for GuestTables {
    fn start(&mut self, tick: &EndOfTick<'_>, report: &mut ManagerReport) {
        let EndOfTick { host, windows, .. } = *tick;
        // The report names the sensor also before its first sample.
        let cost = report.sensor_costs.entry("guest_tables").or_default();
        let began_at = host.now();
        if began_at < self.next_at {
            return;
        }
        let began_cpu = host.thread_cpu_time();
        match self.source.sample() {
            Err(why @ NoTables::NotNow(_)) => tracing::debug!("the guest's tables: {why}"),
            Err(why @ (NoTables::NotThese(_) | NoTables::TooOld(_))) => {
                tracing::debug!("the guest's tables: {why}");
                self.mappings.fill(GuestMapping::Unknown);
            }
            Ok(Walked { tables, waits, cpu_elsewhere }) => {
                for (window, mapping) in tables.windows {
                    if let Ok(row) = windows.binary_search(&window) {
                        // A table that could not be read may map it.
                        let is_known = tables.is_complete || mapping != GuestMapping::Unmapped;
                        self.mappings[row] = if is_known { mapping } else { GuestMapping::Unknown };
                    }
                }
                let cpu = host.thread_cpu_time().saturating_sub(began_cpu) + cpu_elsewhere;
                cost.add_sample(windows.len() as u64, waits, cpu);
            }
        }
        // Elapsed time, not CPU time: the process that supplies the roots works as well, or makes the guest wait.
        let spent = host.now().since(began_at);
        let pause = spent.saturating_mul(PerTenThousand::ALL.get() / SAMPLING_BUDGET.get());
        self.next_at = host.now() + self.source.every().max(pause);
    }

    fn fill(&self, rows: &mut [WindowRow], _now: Moment) {
        rows.iter_mut().zip(&self.mappings).for_each(|(row, mapping)| row.guest_mapping = *mapping);
    }

    fn forget(&mut self) {
        self.mappings.fill(GuestMapping::Unknown);
    }
}
