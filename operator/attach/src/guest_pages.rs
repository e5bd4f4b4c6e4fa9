//! Page sizes with which the guest maps its memory. They come from the guest's own tables, read through its
//! process. Their roots come from its vCPUs' registers.
//!
//! ```text
//!   query-cpus-fast ─▶ a few vCPUs, others at each look ─▶ info registers of each ─▶ CR3, levels
//!                                                                                      │
//!   /proc/PID/mem ◀── guest-physical to the process's addresses (exact: the monitor's) ◀┘ ─▶ page size by window
//! ```
//!
//! This needs the monitor twice: for CR3, and for exact guest-physical addresses. To print its registers a vCPU
//! leaves the guest once, and QEMU's main loop waits for it: 0.4 ms each on the build machine, 2.5 ms where there
//! are more vCPUs than cores. So this happens rarely and for a few vCPUs at a time, each in its own turn of the
//! main loop. It covers the address spaces that run on these vCPUs at that moment; other memory is unknown.
//!
//! The watcher reads the tables. The manager's loop never waits for a monitor: it receives the latest result, until
//! that is too old.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use wideleaf_memory::RamRange;
use wideleaf_memory::host::Host as _;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::panicked::caught;
use wideleaf_memory::second_level::PagingMode;
use wideleaf_memory::sensors::guest_tables::{NoTables, ProcessRam, TABLES_MAX, TableSource, Walked, roots, walk};
use wideleaf_policies::GpaRange;

use crate::monitor::Monitor;
use crate::process::NEEDED_TO_LOOK;
use crate::qmp::Question;
use crate::ram::RamMap;
use crate::registers::paging_mode;

/// Interval between reads. Page sizes change over minutes (a database that starts, khugepaged in the guest), and
/// `auto` weighs a benefit by them.
const EVERY: Duration = Duration::from_secs(30);

/// Pause after a long read, as a multiple of its duration: half a per cent of a core, as for the
/// manager's own samplers.
const PAUSE: u32 = 200;

/// Time that a result remains valid after its replacement was due, for the same reason as [`EVERY`].
const KEPT_FOR: Duration = Duration::from_secs(120);

/// Number of vCPUs asked for their registers in one read.
const VCPUS_MAX: usize = 8;

/// Time after which no further vCPU is asked: the gate asks the same monitor once a second.
const ASK_FOR: Duration = Duration::from_millis(100);

type Looked = Result<Walked, NoTables>;

/// The guest's own tables, read from outside; see the module.
pub(crate) struct OutsideTables {
    look: Mutex<Box<dyn FnMut() -> Looked + Send>>,
    /// Locked for moments, never during a read.
    latest: Mutex<Latest>,
}

/// Results of the reads.
#[derive(Debug, Default)]
struct Latest {
    seen: Option<Seen>,
    /// Time of the next read; `None`: at once.
    next_at: Option<Instant>,
    /// Reason why the latest read failed.
    trouble: Option<NoTables>,
}

#[derive(Debug)]
struct Seen {
    walked: Walked,
    /// Time until which the result is valid.
    until: Instant,
}

impl OutsideTables {
    /// The tables of this guest, read once.
    ///
    /// # Errors
    /// One line: what it needs.
    pub fn of(host: &Arc<ProcessHost>, monitor: Option<&Arc<Monitor>>, ram: &RamMap) -> Result<OutsideTables, String> {
        let unknown = |why: &str| format!("the guest's own page sizes are not known: {why}");
        let monitor = monitor.ok_or_else(|| unknown("needs a QMP socket of its own"))?;
        if ram.pieces.iter().any(|piece| piece.is_guess) {
            return Err(unknown("guest-physical addresses are guessed"));
        }
        let ranges: Vec<RamRange> = ram.pieces.iter().map(|piece| piece.range).collect();
        let gpas = ranges.iter().map(|range| range.gpa).collect();
        let ram = ProcessRam::open(host, ranges);
        let ram = ram.map_err(|error| unknown(&format!("{error} (needs {NEEDED_TO_LOOK})")))?;
        let (host, monitor) = (Arc::clone(host), Arc::clone(monitor));
        let mut looker = Looker { host, monitor, ram, ranges: gpas, asked: 0 };
        Ok(OutsideTables::over(move || looker.look()))
    }

    fn over(look: impl FnMut() -> Looked + Send + 'static) -> OutsideTables {
        let tables = OutsideTables { look: Mutex::new(Box::new(look)), latest: Mutex::default() };
        tables.refresh();
        tables
    }

    /// Reads the tables again when it is time to. It waits for the monitor's answers, at most half a second each.
    pub fn refresh(&self) {
        if self.latest().next_at.is_some_and(|at| Instant::now() < at) {
            return;
        }
        let began = Instant::now();
        // The watcher survives a panic on unexpected guest tables.
        let looked = caught(|| self.look.lock()());
        let looked = looked.unwrap_or_else(|panicked| Err(NoTables::NotNow(format!("reading its tables {panicked}"))));
        let now = Instant::now();
        let next_at = now + EVERY.max((now - began) * PAUSE);
        let mut latest = self.latest();
        latest.next_at = Some(next_at);
        match looked {
            Ok(walked) => {
                latest.trouble = None;
                latest.seen = Some(Seen { walked, until: next_at + KEPT_FOR });
            }
            Err(why) => latest.trouble = Some(why),
        }
    }

    /// Reason why the latest read failed.
    pub fn why_not(&self) -> Option<String> {
        let unknown = |why: &NoTables| format!("the guest's own page sizes are not known for now: {why}");
        self.latest().trouble.as_ref().map(unknown)
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock()
    }
}

impl fmt::Debug for OutsideTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutsideTables").field("latest", &self.latest).finish_non_exhaustive()
    }
}

impl TableSource for OutsideTables {
    fn every(&self) -> Duration {
        EVERY
    }

    /// The latest result, at once. All managed parts of a guest receive it, and only the first one its cost.
    fn sample(&self) -> Looked {
        let mut latest = self.latest();
        let Latest { seen, trouble, .. } = &mut *latest;
        match (seen, trouble) {
            (_, Some(NoTables::NotThese(why))) => Err(NoTables::NotThese(why.clone())),
            (Some(seen), _) if Instant::now() < seen.until => {
                let told = seen.walked.clone();
                (seen.walked.waits, seen.walked.cpu_elsewhere) = (0, Duration::ZERO);
                Ok(told)
            }
            (seen, trouble) => {
                let why = trouble.as_ref().map_or_else(|| "they are no longer read".to_owned(), ToString::to_string);
                Err(if seen.is_some() { NoTables::TooOld(why) } else { NoTables::NotNow(why) })
            }
        }
    }
}

/// Reader of the tables.
struct Looker {
    host: Arc<ProcessHost>,
    monitor: Arc<Monitor>,
    ram: ProcessRam,
    ranges: Vec<GpaRange>,
    /// Number of vCPUs asked so far, in turn.
    asked: usize,
}

impl Looker {
    fn look(&mut self) -> Looked {
        let began_cpu = self.host.thread_cpu_time();
        let vcpus = self.ask(Question::Cpus).map(|cpus| indexes(&cpus))?;
        let modes = self.modes(&vcpus)?;
        let waits = modes.len() as u64;
        let (levels, roots) = roots(&modes)?;
        let tables = walk(&self.ram, &self.ranges, &roots, levels, TABLES_MAX);
        let cpu_elsewhere = self.host.thread_cpu_time().saturating_sub(began_cpu);
        Ok(Walked { tables, waits, cpu_elsewhere })
    }

    /// Paging modes of the next few vCPUs.
    fn modes(&mut self, vcpus: &[u64]) -> Result<Vec<PagingMode>, NoTables> {
        let (began, mut modes) = (Instant::now(), Vec::new());
        while modes.len() < vcpus.len().min(VCPUS_MAX) && (modes.is_empty() || began.elapsed() < ASK_FOR) {
            let text = self.ask(Question::Registers(vcpus[self.asked % vcpus.len()]))?;
            self.asked = self.asked.wrapping_add(1);
            let mode = text.as_str().and_then(paging_mode);
            modes.push(mode.ok_or_else(|| NoTables::NotNow("QEMU's registers are not understood".into()))?);
        }
        Ok(modes)
    }

    fn ask(&self, question: Question) -> Result<Value, NoTables> {
        let answer = self.monitor.with(|qmp| qmp.ask(question)).map_err(|error| NoTables::NotNow(error.to_string()))?;
        answer.map_err(|refused| NoTables::NotNow(refused.to_string()))
    }
}

/// Parses `[{"cpu-index": 0, …}, …]`.
fn indexes(cpus: &Value) -> Vec<u64> {
    cpus.as_array().into_iter().flatten().filter_map(|cpu| cpu["cpu-index"].as_u64()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::sync::mpsc;
    use std::thread;
    use wideleaf_memory::sensors::guest_tables::GuestTables;
    use wideleaf_policies::{GuestMapping, WindowIndex};

    fn walked(mapping: GuestMapping) -> Walked {
        let windows = vec![(WindowIndex::new(0), mapping)];
        let tables = GuestTables { windows, tables: 1, is_complete: true };
        Walked { tables, waits: 3, cpu_elsewhere: Duration::from_millis(1) }
    }

    fn mapping(tables: &OutsideTables) -> GuestMapping {
        tables.sample().expect("it was seen").tables.windows[0].1
    }

    #[test]
    fn the_loop_receives_the_latest_result_while_a_monitor_hangs_until_that_is_too_old() {
        let (answer, answers) = mpsc::channel::<Looked>();
        answer.send(Ok(walked(GuestMapping::Huge2M))).expect("heard");
        let tables = OutsideTables::over(move || answers.recv().expect("the test answers"));
        assert_eq!(tables.sample().expect("it was seen"), walked(GuestMapping::Huge2M));
        let again = tables.sample().expect("still");
        assert_eq!((again.waits, again.cpu_elsewhere), (0, Duration::ZERO), "a read is paid for once");
        tables.refresh(); // it is not time to, and no answer would come
        tables.latest().next_at = None;
        thread::scope(|scope| {
            let looking = scope.spawn(|| tables.refresh());
            // No answer has come yet, and none will come before this assertion.
            assert_eq!((mapping(&tables), tables.why_not()), (GuestMapping::Huge2M, None));
            answer.send(Err(NoTables::NotNow("QEMU is stuck".into()))).expect("heard");
            looking.join().expect("it does not panic");
        });
        assert_eq!(mapping(&tables), GuestMapping::Huge2M);
        assert!(tables.why_not().expect("a reason").ends_with("not known for now: QEMU is stuck"));
        tables.latest().seen.as_mut().expect("it was seen").until = Instant::now();
        assert!(matches!(tables.sample(), Err(NoTables::TooOld(why)) if why == "QEMU is stuck"));
        tables.latest().next_at = None;
        answer.send(Ok(walked(GuestMapping::Base4K))).expect("heard");
        tables.refresh();
        assert_eq!((mapping(&tables), tables.why_not()), (GuestMapping::Base4K, None));
    }

    #[test]
    fn unsupported_tables_are_reported_at_once_and_tables_never_read_are_not_too_old() {
        let never = OutsideTables::over(|| Err(NoTables::NotNow("it starts".into())));
        assert!(matches!(never.sample(), Err(NoTables::NotNow(why)) if why == "it starts"));
        let mut looks = [Ok(walked(GuestMapping::Huge2M)), Err(NoTables::NotThese("32 bits".into()))].into_iter();
        let tables = OutsideTables::over(move || looks.next().expect("two looks"));
        tables.latest().next_at = None;
        tables.refresh();
        assert!(matches!(tables.sample(), Err(NoTables::NotThese(why)) if why == "32 bits"));
    }

    #[test]
    fn vcpus_are_those_that_qemu_names() {
        let cpus =
            json!([{ "cpu-index": 0, "target": "x86_64" }, { "cpu-index": 4, "thread-id": 7 }, { "thread-id": 8 }]);
        assert_eq!(indexes(&cpus), [0, 4]);
        assert!(indexes(&json!({ "cpu-index": 0 })).is_empty());
    }
}
