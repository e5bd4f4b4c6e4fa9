//! Which page sizes the guest itself maps its memory with: its own tables, read through its process, from where its vCPUs say.
//!
//! ```text
//!   query-cpus-fast ─▶ a few vCPUs, others at each look ─▶ info registers of each ─▶ CR3, levels
//!                                                                                      │
//!   /proc/PID/mem ◀── guest-physical to the process's addresses (exact: the monitor's) ◀┘ ─▶ page size by window
//! ```
//!
//! It needs the monitor twice: for CR3, and for guest-physical addresses that are not guessed. To print its registers a vCPU leaves the
//! guest once, and QEMU's main loop waits for it: 0.4 ms each on the build machine, 2.5 ms where there are more vCPUs than cores. So it is
//! asked rarely, a few vCPUs at a time, each in a turn of the main loop of its own. What is seen is what runs on these at that
//! moment, and what the kernel maps to itself.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use wideleaf_memory::RamRange;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::sensors::guest_tables::{
    GuestTables, NoTables, ProcessRam, TABLES_MAX, TableLevels, TableSource, Walked, walk,
};
use wideleaf_policies::GpaRange;

use crate::monitor::Monitor;
use crate::process::NEEDED_TO_LOOK;
use crate::qmp::Question;
use crate::ram::RamMap;
use crate::registers::PagingMode;

/// Who changes page sizes does so in minutes (a database that starts, khugepaged in the guest); `auto` weighs a benefit by them.
const EVERY: Duration = Duration::from_secs(30);

/// Asked for their registers at one look.
const VCPUS_MAX: usize = 8;

/// No further vCPU is asked after that: the gate asks the same monitor once a second.
const ASK_FOR: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug)]
pub(crate) struct OutsideTables {
    monitor: Arc<Monitor>,
    ram: ProcessRam,
    ranges: Vec<GpaRange>,
    /// Locked for as long as a look takes.
    state: Mutex<State>,
    /// Why the latest look saw nothing. Locked for moments: who asks waits for no monitor.
    why_not: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct State {
    /// vCPUs asked so far, in turn.
    asked: usize,
    /// Several managed parts of a guest look one behind the other, and are told the same.
    latest: Option<(Instant, GuestTables)>,
}

impl OutsideTables {
    /// The tables of this guest.
    ///
    /// # Errors
    /// What it needs, in a line.
    pub fn of(host: &ProcessHost, monitor: Option<&Arc<Monitor>>, ram: &RamMap) -> Result<OutsideTables, String> {
        let unknown = |why: &str| format!("the guest's own page sizes are not known: {why}");
        let monitor = monitor.ok_or_else(|| unknown("needs a QMP socket of its own"))?;
        if ram.pieces.iter().any(|piece| piece.is_guess) {
            return Err(unknown("guest-physical addresses are guessed"));
        }
        let ranges: Vec<RamRange> = ram.pieces.iter().map(|piece| piece.range).collect();
        let gpas = ranges.iter().map(|range| range.gpa).collect();
        let ram = ProcessRam::open(host, ranges);
        let ram = ram.map_err(|error| unknown(&format!("{error} (needs {NEEDED_TO_LOOK})")))?;
        Ok(OutsideTables {
            monitor: Arc::clone(monitor),
            ram,
            ranges: gpas,
            state: Mutex::default(),
            why_not: Mutex::default(),
        })
    }

    /// Why nothing was seen at the latest look.
    pub fn why_not(&self) -> Option<String> {
        self.why_not.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks now.
    ///
    /// # Errors
    /// [`NoTables`].
    fn look(&self, state: &mut State) -> Result<Walked, NoTables> {
        let vcpus = self.ask(Question::Cpus).map(|cpus| indexes(&cpus))?;
        let modes = self.modes(&vcpus, state)?;
        let waits = modes.len() as u64;
        let (levels, roots) = roots(&modes)?;
        let tables = walk(&self.ram, &self.ranges, &roots, levels, TABLES_MAX);
        Ok(Walked { tables, waits })
    }

    /// How the next few vCPUs page.
    fn modes(&self, vcpus: &[u64], state: &mut State) -> Result<Vec<PagingMode>, NoTables> {
        let (began, mut modes) = (Instant::now(), Vec::new());
        while modes.len() < vcpus.len().min(VCPUS_MAX) && (modes.is_empty() || began.elapsed() < ASK_FOR) {
            let text = self.ask(Question::Registers(vcpus[state.asked % vcpus.len()]))?;
            state.asked = state.asked.wrapping_add(1);
            let mode = text.as_str().and_then(PagingMode::parse);
            modes.push(mode.ok_or_else(|| NoTables::NotNow("QEMU's registers are not understood".into()))?);
        }
        Ok(modes)
    }

    fn ask(&self, question: Question) -> Result<Value, NoTables> {
        let answer = self.monitor.with(|qmp| qmp.ask(question)).map_err(|error| NoTables::NotNow(error.to_string()))?;
        answer.map_err(|refused| NoTables::NotNow(refused.to_string()))
    }
}

impl TableSource for OutsideTables {
    fn every(&self) -> Duration {
        EVERY
    }

    fn sample(&self) -> Result<Walked, NoTables> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, tables)) = &state.latest
            && at.elapsed() < EVERY / 2
        {
            return Ok(Walked { tables: tables.clone(), waits: 0 });
        }
        let looked = self.look(&mut state);
        state.latest = looked.as_ref().ok().map(|walked| (Instant::now(), walked.tables.clone()));
        let why_not =
            looked.as_ref().err().map(|why| format!("the guest's own page sizes are not known for now: {why}"));
        *self.why_not.lock().unwrap_or_else(PoisonError::into_inner) = why_not;
        looked
    }
}

/// `[{"cpu-index": 0, …}, …]`
fn indexes(cpus: &Value) -> Vec<u64> {
    cpus.as_array().into_iter().flatten().filter_map(|cpu| cpu["cpu-index"].as_u64()).collect()
}

/// The roots of those that agree on the number of levels with the first: CR4.LA57 differs only while vCPUs start.
fn roots(modes: &[PagingMode]) -> Result<(TableLevels, Vec<u64>), NoTables> {
    let long = |mode: &PagingMode| match *mode {
        PagingMode::Long { root, levels } => Some((levels, root)),
        PagingMode::Off | PagingMode::Pae | PagingMode::Legacy => None,
    };
    if let Some((levels, _)) = modes.iter().find_map(long) {
        let roots = modes.iter().filter_map(long).filter(|(of, _)| *of == levels).map(|(_, root)| root).collect();
        return Ok((levels, roots));
    }
    let refused = |what: &str| NoTables::NotThese(format!("the guest pages in {what}, which is not followed"));
    match modes {
        _ if modes.contains(&PagingMode::Pae) => Err(refused("32-bit mode with PAE (three levels)")),
        _ if modes.contains(&PagingMode::Legacy) => Err(refused("32-bit mode (two levels)")),
        _ => Err(NoTables::NotNow("no vCPU that was asked has paging switched on".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn vcpus_are_those_that_qemu_names() {
        let cpus =
            json!([{ "cpu-index": 0, "target": "x86_64" }, { "cpu-index": 4, "thread-id": 7 }, { "thread-id": 8 }]);
        assert_eq!(indexes(&cpus), [0, 4]);
        assert!(indexes(&json!({ "cpu-index": 0 })).is_empty());
    }

    #[test]
    fn vcpus_that_do_not_page_count_for_nothing_and_32_bit_ones_are_refused_by_name() {
        let long = |root, levels| PagingMode::Long { root, levels };
        let (four, five) = (TableLevels::Four, TableLevels::Five);
        let mixed = [PagingMode::Off, long(1, four), PagingMode::Pae, long(2, five), long(3, four)];
        assert_eq!(roots(&mixed).ok(), Some((four, vec![1, 3])));
        let refused = |modes: &[PagingMode]| roots(modes).expect_err("nothing to follow");
        assert!(matches!(refused(&[PagingMode::Off, PagingMode::Pae]), NoTables::NotThese(why) if why.contains("PAE")));
        assert!(matches!(refused(&[PagingMode::Legacy]), NoTables::NotThese(why) if why.contains("two levels")));
        assert!(matches!(refused(&[PagingMode::Off]), NoTables::NotNow(_)));
        assert!(matches!(refused(&[]), NoTables::NotNow(_)), "a monitor that names no vCPU");
    }
}
