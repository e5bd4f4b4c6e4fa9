//! Counts the pages that the guest writes, by the dirty logs of a rotating share of the memslots.

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Backing, Moment, PerTenThousand, WindowIndex, WindowRow};

use super::{EndOfTick, Kind, SlowSensor, Starting};
use crate::host::Host;
use crate::manager::fault_price::PriceSource;
use crate::manager::report::ManagerReport;
use crate::second_level::SecondLevel;
use crate::sensors::share::Share;
use crate::sensors::written::WriteSensor;

pub(super) const KIND: Kind = Kind {
    question: "which pages are written",
    turn: 2,
    is_needed: |needs| needs.written,
    shares_budget: true,
    causes_faults: true,
    start: |starting| Ok(Box::new(WrittenSampling::start(starting)?)),
};

/// Assumed cost of a slot's interval before it is measured: a thousand written pages.
const WRITTEN_COST: Duration = Duration::from_millis(22);
/// Assumed cost of the first write to each page of a logged slot, a fault: 22 us under kvm_pvm on an Intel Xeon.
/// Nothing else than these faults makes refaults in a guest that is not sampled otherwise, so once refaults are
/// measured, that is the price.
const WRITE_FAULT: Duration = Duration::from_micros(22);
/// Maximum number of slots logged at the same time.
const WRITTEN_MOST: usize = 2;

struct WrittenSampling {
    second_level: Arc<dyn SecondLevel>,
    sensor: WriteSensor,
    share: Share,
    /// Number of slots with a running interval.
    slots: usize,
    began_cpu: Duration,
    /// Price of a fault of the running interval.
    fault: Duration,
    pages: Vec<Option<u16>>,
}

impl WrittenSampling {
    fn start(starting: &Starting<'_>) -> Result<WrittenSampling, String> {
        let second_level = starting.vm.second_level.clone().ok_or("a process has no dirty log")?;
        Ok(WrittenSampling {
            second_level,
            sensor: WriteSensor::default(),
            share: starting.share(1, WRITTEN_MOST, WRITTEN_COST, Duration::ZERO),
            slots: 0,
            began_cpu: Duration::ZERO,
            fault: WRITE_FAULT,
            pages: vec![None; starting.windows.len()],
        })
    }

    /// A slot that another part had claimed is not a failure: it is sampled another time.
    fn tell_claimed(&mut self, report: &mut ManagerReport) {
        if let claimed @ 1.. = self.sensor.take_claimed() {
            report.sensor_costs.entry("written").or_default().claimed += claimed;
        }
    }
}

impl SlowSensor for WrittenSampling {
    fn start(&mut self, tick: &EndOfTick<'_>, report: &mut ManagerReport) {
        let host = tick.host;
        if tick.has_acted() {
            self.share.changed();
        }
        let all = self.second_level.slots().len();
        let slots = self.share.next(host.now(), all);
        if slots == 0 {
            report.sensor_costs.entry("written").or_default().ticks_without += u64::from(all > 0);
            return;
        }
        self.fault = if tick.fault.source == PriceSource::Refaults { tick.fault.time } else { WRITE_FAULT };
        let began_cpu = host.thread_cpu_time();
        match self.sensor.begin(self.second_level.as_ref(), slots) {
            Ok(slots) => self.slots = slots,
            Err(error) => failed("written", &error, report),
        }
        self.tell_claimed(report);
        self.began_cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    }

    fn finish(&mut self, host: &dyn Host, windows: &[WindowIndex], report: &mut ManagerReport) {
        let slots = std::mem::take(&mut self.slots);
        if slots == 0 {
            return;
        }
        let began_cpu = host.thread_cpu_time();
        let rows = self.sensor.end(self.second_level.as_ref());
        let rows = rows.inspect_err(|error| failed("written", error, report)).unwrap_or_default();
        self.tell_claimed(report);
        let (mut faults, mut is_changed) = (0, false);
        for row in &rows {
            let Ok(index) = windows.binary_search(&row.window) else { continue };
            faults += u64::from(row.pages);
            is_changed |= self.pages[index].is_none_or(|before| (before > 0) != (row.pages > 0));
            self.pages[index] = Some(row.pages);
        }
        if is_changed {
            self.share.changed();
        } else {
            self.share.unchanged(slots, self.second_level.slots().len());
        }
        let cpu = self.began_cpu + host.thread_cpu_time().saturating_sub(began_cpu);
        let of_the_guest = self.fault.saturating_mul(u32::try_from(faults).unwrap_or(u32::MAX));
        self.share.paid(slots as u64, cpu + of_the_guest);
        report.sensor_costs.entry("written").or_default().add_sample(rows.len() as u64, faults, cpu);
    }

    fn fill(&self, rows: &mut [WindowRow], _now: Moment) {
        for (row, pages) in rows.iter_mut().zip(&self.pages) {
            row.written = pages.filter(|_| row.backing != Backing::Unbacked);
        }
    }

    fn forget(&mut self) {
        self.pages.fill(None);
    }

    fn set_budget(&mut self, budget: PerTenThousand) {
        self.share.set_budget(budget);
    }
}

impl Drop for WrittenSampling {
    fn drop(&mut self) {
        // A loop that is dropped half-way leaves no slot at 4 KiB. An error here can only mean the end of the VM.
        let _ = self.sensor.end(self.second_level.as_ref());
    }
}

fn failed(sensor: &'static str, error: &dyn std::error::Error, report: &mut ManagerReport) {
    tracing::warn!("{sensor}: {error}");
    *report.sensor_failures.entry(sensor).or_default() += 1;
}
