//! One guest, or one native kernel, observed from its first line to its last. The session reads the counters
//! exactly where the guest marks them, lets the policy act when it is time, and puts everything into a report.
//!
//! ```text
//!   guest line ──▶ on_line ──┬─ begin, end   take counters now: the vCPU that wrote the line is out of the guest
//!   (vCPU thread)            ├─ progress     (guest clock, host clock, work done): rates of any stretch afterwards
//!                            └─ result, gaps, verify, …  kept as they are, up to the bounds of `session/limits.rs`
//! ```

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_control::vm::PhaseView;
use wideleaf_memory::manager::ManagerReport;
use wideleaf_memory::progress::ProgressReadings;
use wideleaf_memory::{GuestRam, Host as _, LinuxHost, Manager, SecondLevel};
use wideleaf_policies::{Bytes, Gpa, GpaRange, GuestProgress, Moment};
use wideleaf_protocol::message::{Mismatch, PREFIX};
use wideleaf_protocol::{Entry, Message, Status, parse};

use self::limits::{
    GAPS_MAX, MALFORMED_MAX, Mark, Marks, PHASES_MAX, REGIONS_MAX, REGIONS_OF_RAM_MAX, SampleAllowance, begin_of,
};
use self::log::{Log, PhaseLog, kernel_panic};
use crate::front_end::{FrontEnd, Progress};
use crate::guards::Noted;
use crate::report::{Gaps, Hello, Measurement, Problem, Verification};
use crate::text::clean;

mod limits;
mod log;
mod observations;
mod saved;
mod steering;

pub use log::{Observed, rate_over, seconds_of};
pub use saved::SavedSession;

/// Longest time that a question about the phase waits for the log.
const LOG_WITHIN: Duration = Duration::from_millis(50);

/// Observes one run. Shared between the thread that waits and the vCPU threads that bring the lines.
pub struct Session {
    host: Arc<LinuxHost>,
    ram: Arc<GuestRam>,
    policy_delay: Option<Duration>,
    /// Progress of the guest, for the manager.
    readings: Arc<ProgressReadings>,
    front: Arc<dyn FrontEnd>,
    progress: Arc<dyn Progress>,
    /// Set once the guest is built; an earlier line waits for it.
    attached: OnceLock<Attached>,
    /// Whether the policy is switched off: nothing activates it until it is switched on again.
    is_off: AtomicBool,
    /// Observations and calls of the manager that lines may cause, over all boots.
    allowance: Mutex<SampleAllowance>,
    log: Mutex<Log>,
}

struct Attached {
    second_level: Option<Arc<dyn SecondLevel>>,
    manager: Mutex<Option<(Manager, Noted)>>,
}

impl Attached {
    /// Calls `look` while the manager's access sensor has no window of the guest detached.
    fn in_place<T>(&self, look: impl FnOnce() -> T) -> T {
        match self.manager.lock().as_ref() {
            Some((manager, _)) => manager.with_all_in_place(look),
            None => look(),
        }
    }
}

impl Session {
    /// Makes a session over `ram`; `front` and `progress` show what the guest says and does.
    pub fn new(
        host: Arc<LinuxHost>,
        ram: Arc<GuestRam>,
        policy_delay: Option<Duration>,
        front: Arc<dyn FrontEnd>,
        progress: Arc<dyn Progress>,
    ) -> Arc<Session> {
        let (attached, is_off, log) = (OnceLock::new(), AtomicBool::new(false), Mutex::default());
        let allowance = Mutex::new(SampleAllowance::new(host.now()));
        let readings = Arc::default();
        Arc::new(Session { host, ram, policy_delay, readings, front, progress, attached, is_off, allowance, log })
    }

    /// Readings of the guest's progress, for the manager.
    pub fn readings(&self) -> Arc<ProgressReadings> {
        self.readings.clone()
    }

    /// Attaches KVM's counters and the manager. From now on lines are processed.
    pub fn attach(&self, second_level: Option<Arc<dyn SecondLevel>>, manager: Option<Manager>) {
        if let Some(manager) = manager.as_ref().filter(|_| self.policy_delay.is_none()) {
            manager.activate();
        }
        let manager = manager.map(|manager| (manager, Noted::taken("manager")));
        let attached = Attached { second_level, manager: Mutex::new(manager) };
        assert!(self.attached.set(attached).is_ok(), "a session is attached once");
    }

    /// The guest has reset its machine and boots again: its messages belong to a boot that is over. The panic of a
    /// kernel is reported, because it would otherwise have ended the run. A policy with a delay waits again.
    pub fn forget_guest(&self) {
        let mut log = self.log();
        if let Some(why) = &log.kernel_panic {
            self.front.say(&format!("wideleaf: the guest's kernel panicked and boots again: {why}"));
        }
        *log = Log { first_line_at: log.first_line_at, cut: std::mem::take(&mut log.cut), ..Log::default() };
        drop(log);
        self.progress.set_position(0);
        if self.policy_delay.is_some() {
            self.with_manager(Manager::pause);
        }
    }

    /// Processes a line of the guest's console, without its end. Returns `false` if it is not a protocol line.
    pub fn on_line(&self, line: &str) -> bool {
        match parse(line) {
            // A line that was cut off when the guest was stopped may be the beginning of a protocol line; an empty
            // line is not.
            None => {
                if let Some(why) = kernel_panic(line) {
                    self.log().kernel_panic.get_or_insert(why);
                }
                return !line.is_empty() && PREFIX.starts_with(line);
            }
            Some(Ok(message)) => self.on_message(&message),
            Some(Err(error)) => {
                let log = &mut *self.log();
                let line = clean(begin_of(&format!("{error}: {line}")));
                log.cut.keep("malformed_lines", &mut log.malformed, MALFORMED_MAX, line);
            }
        }
        true
    }

    /// Processes a message, from a line or directly from a native kernel.
    pub fn on_message(&self, message: &Message<'_>) {
        let attached = self.attached.wait();
        let at = self.host.now();
        let mut log = self.log();
        let log = &mut *log;
        log.first_line_at.get_or_insert_with(Instant::now);
        match *message {
            Message::Hello { kernel, vcpus, guest_page, tsc_hz, entry, .. } => {
                log.hello = Some(Hello::new(kernel, vcpus, guest_page, entry));
                log.tsc_hz = tsc_hz;
                log.entry = Some(entry);
            }
            Message::Problem { class, size, iterations } => log.problem = Some(Problem::new(class, size, iterations)),
            Message::Region { name, address, bytes } => self.place_region(log, name.as_str(), address, bytes),
            Message::Begin { phase, tsc } => self.begin_phase(log, attached, phase.as_str(), at, tsc),
            Message::End { phase, tsc } => self.end_phase(log, attached, phase.as_str(), at, tsc),
            Message::Progress { phase, tsc, done, total } => {
                self.progress.set_length(total.max(done));
                self.progress.set_position(done);
                self.mark_progress(log, attached, phase.as_str(), Mark { at, tsc, done });
            }
            Message::Result { name, value, unit } => {
                log.keep_result(name.as_str(), Measurement { value, unit: begin_of(unit.as_str()).to_owned() });
            }
            Message::Gaps { vcpu, count, p50_ns, p99_ns, p999_ns, max_ns } => {
                let gaps = Gaps { vcpu, count, p50_ns, p99_ns, p999_ns, max_ns };
                log.cut.keep("gaps", &mut log.gaps, GAPS_MAX, gaps);
            }
            Message::Mismatch(Mismatch { address, expected, found, kind }) => {
                log.mismatch = Some(format!("at {address:#x}: expected {expected:#x}, found {found:#x} ({kind})"));
            }
            Message::Verify { status, errors, checked } => {
                log.verification =
                    Some(Verification { passed: status == Status::Pass, errors, checked, first_mismatch: None });
            }
            Message::Panic { message } => log.panic = Some(clean(begin_of(message))),
            Message::Exit { code } => log.exit = Some(code),
        }
    }

    /// Keeps a region of the guest's data, if the place of its address in RAM is known.
    fn place_region(&self, log: &mut Log, name: &str, address: u64, bytes: u64) {
        let start = match log.entry {
            Some(Entry::Native) => address.checked_sub(self.ram.base().get()),
            // An address of a process in the guest: only Linux knows its place in RAM.
            Some(Entry::Linux) => None,
            _ => Some(address),
        };
        if let Some(range) = start.and_then(|start| GpaRange::new(Gpa::new(start), Bytes::new(bytes))) {
            self.keep_region(log, name, range);
        }
    }

    /// Opens a phase, with an observation of the host if one is allowed now.
    fn begin_phase(&self, log: &mut Log, attached: &Attached, phase: &str, at: Moment, tsc: u64) {
        // An observation costs the guest the restoration of its detached windows, so it is skipped if its result is
        // not kept.
        if log.phases.len() >= PHASES_MAX {
            return log.cut.count("phases", 1);
        }
        if self.may_look(log, at) {
            log.latest = attached.in_place(|| self.counters(attached));
        }
        self.progress.set_part(phase);
        log.phases.push(PhaseLog {
            name: begin_of(phase).to_owned(),
            began_at: self.host.now(),
            begin_tsc: tsc,
            end_tsc: None,
            at_begin: log.latest,
            at_end: None,
            is_complete: true,
            marks: Marks::default(),
            walks: None,
        });
        self.front.begin_walks();
    }

    /// Closes the latest open phase of this name, with an observation of the host if one is allowed now.
    fn end_phase(&self, log: &mut Log, attached: &Attached, phase: &str, at: Moment, tsc: u64) {
        let is_open = |open: &PhaseLog| open.end_tsc.is_none() && open.name == phase;
        let Some(index) = log.phases.iter().rposition(is_open) else {
            return log.cut.count("ends_of_no_phase", 1);
        };
        log.phases[index].walks = self.front.end_walks();
        if self.may_look(log, at) {
            let look = || {
                let regions = log.regions.iter().map(|(name, range)| self.region(name, *range)).collect();
                (self.counters(attached), regions)
            };
            (log.latest, log.regions_seen) = attached.in_place(look);
            log.resident_beyond_guest_ram = self.resident_beyond_guest_ram();
        }
        (log.phases[index].end_tsc, log.phases[index].at_end) = (Some(tsc), Some(log.latest));
    }

    /// Keeps a mark of a phase's progress; once the policy's delay is over, the policy may act.
    fn mark_progress(&self, log: &mut Log, attached: &Attached, phase: &str, mark: Mark) {
        let at = mark.at;
        let Some(index) = log.phases.iter().rposition(|open| open.name == phase) else { return };
        if let Some(cpu) = self.cpu_time(attached) {
            self.readings.add(GuestProgress { phase: index as u64, done: mark.done, cpu });
        }
        let open = &mut log.phases[index];
        log.cut.count("progress_marks", open.marks.add(mark));
        if self.policy_delay.is_some_and(|delay| at.since(open.began_at) >= delay) && self.allowance().may_call(at) {
            self.activate();
        }
    }

    /// CPU time that the guest has used until now; of a native kernel, that of the thread that reports its progress.
    fn cpu_time(&self, attached: &Attached) -> Option<Duration> {
        match &attached.second_level {
            Some(kvm) => kvm.vcpu_time().ok(),
            None => Some(self.host.thread_cpu_time()),
        }
    }

    /// The number of times that a phase has reached its `total`, or its number of units done. A caller that waits
    /// for the guest to touch its memory again watches this.
    pub fn units_done(&self, phase: &str) -> Option<u64> {
        let log = self.log();
        let open = log.phases.iter().rev().find(|open| open.name == phase)?;
        Some(open.marks.last().map_or(0, |mark| mark.done))
    }

    /// The latest phase that has begun and not ended; `None` also where the log is busy for longer than a status may
    /// take.
    pub fn phase_under_way(&self) -> Option<PhaseView> {
        // The guest's thread may hold it while the host is slow.
        let log = self.log.try_lock_for(LOG_WITHIN)?;
        let open = log.phases.iter().rev().find(|open| open.end_tsc.is_none())?;
        Some(PhaseView {
            name: open.name.clone(),
            since_s: self.host.now().since(open.began_at).as_secs_f64(),
            done: open.marks.last().map_or(0, |mark| mark.done),
        })
    }

    /// Progress of the latest phase while this process had the guest, by the host's clock: seconds since
    /// `process_start` at which each mark came, and units of work done.
    pub fn progress_here(&self, process_start: Instant) -> Vec<(f64, u64)> {
        // Both clocks are monotonic; the host's began later.
        let host_began = process_start.elapsed().saturating_sub(self.host.now().since_start());
        let log = self.log();
        let marks = log.phases.last().map_or(&[][..], |phase| phase.marks.all());
        // Marks of a saved guest are at the start: they came in another process.
        let here = marks.iter().filter(|mark| mark.at > Moment::START);
        here.map(|mark| ((host_began + mark.at.since_start()).as_secs_f64(), mark.done)).collect()
    }

    /// Place of the guest's data, once the guest has reported it.
    pub fn region_of(&self, name: &str) -> Option<GpaRange> {
        self.log().regions.iter().find(|(of, _)| of == name).map(|(_, range)| *range)
    }

    /// Takes out what the guest reported, with the rates before and after the manager's actions.
    pub fn observed(&self, manager: Option<&ManagerReport>, process_start: Instant) -> Observed {
        self.log().observed(manager, process_start)
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock()
    }

    fn allowance(&self) -> MutexGuard<'_, SampleAllowance> {
        self.allowance.lock()
    }

    /// Whether a line may cause an observation of the host now. A refused line is counted, and uses the latest
    /// observation.
    fn may_look(&self, log: &mut Log, now: Moment) -> bool {
        let may = self.allowance().take(now);
        log.cut.count("looks_at_begin_or_end", u64::from(!may));
        may
    }

    /// Keeps a region, while there are few of them and their total size is a small multiple of the guest's RAM.
    fn keep_region(&self, log: &mut Log, name: &str, range: GpaRange) {
        let kept: u64 = log.regions.iter().map(|(_, range)| range.bytes().get()).fold(0, u64::saturating_add);
        let most = self.ram.bytes().get().saturating_mul(REGIONS_OF_RAM_MAX);
        if kept.saturating_add(range.bytes().get()) > most {
            return log.cut.count("regions", 1);
        }
        log.cut.keep("regions", &mut log.regions, REGIONS_MAX, (begin_of(name).to_owned(), range));
    }
}

#[cfg(test)]
mod tests {
    use wideleaf_memory::{BackingConfig, BackingKind};
    use wideleaf_policies::PageSize;
    use wideleaf_policies::units::mib;

    use super::limits::{RESULTS_MAX, TEXT_MAX};
    use super::*;
    use crate::front_end::{NoProgress, Quiet};

    pub(super) fn session() -> Arc<Session> {
        let layout = [GpaRange::new(Gpa::new(0), mib(4)).expect("it fits")];
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous base pages exist");
        let ram = GuestRam::map(&layout, backing).expect("4 MiB can be mapped");
        let host = Arc::new(LinuxHost::open().expect("this host"));
        let session = Session::new(host, ram, Some(Duration::ZERO), Arc::new(Quiet), Arc::new(NoProgress));
        session.attach(None, None);
        session
    }

    /// Lower bound of the bytes that the log keeps.
    fn kept_bytes(log: &Log) -> usize {
        let texts = log
            .regions
            .iter()
            .map(|(name, _)| name.len())
            .chain(log.malformed.iter().map(String::len))
            .chain(log.results.iter().map(|(name, result)| name.len() + result.unit.len()))
            .chain(log.phases.iter().map(|phase| phase.name.len()))
            .chain(log.regions_seen.iter().map(|region| region.name.len()))
            .chain(log.panic.iter().chain(&log.kernel_panic).chain(&log.mismatch).map(String::len));
        let marks: usize = log.phases.iter().map(|phase| size_of_val(phase.marks.all())).sum();
        let lists = size_of_val(&log.regions[..]) + size_of_val(&log.phases[..]) + size_of_val(&log.gaps[..]);
        texts.sum::<usize>() + marks + lists + log.results.len() * size_of::<(String, Measurement)>()
    }

    fn feed(session: &Session, lines: u64, line: &dyn Fn(u64) -> String) {
        for number in 0..lines {
            session.on_line(&line(number));
        }
    }

    /// More than a million lines: first one kind after the other, then all kinds in turn.
    #[test]
    fn the_log_of_any_guest_is_bounded_to_a_few_mebibytes_and_the_rest_is_counted() {
        const LINES: u64 = 100_000;
        type Kind<'a> = &'a dyn Fn(u64) -> String;
        let long = "x".repeat(4000);
        let kinds: [(&str, Kind<'_>); 12] = [
            ("malformed_lines", &|_| format!("@wideleaf {long}")),
            ("phases", &|number| format!("@wideleaf begin phase=p{number} tsc={number}")),
            ("", &|number| format!("@wideleaf end phase=p{} tsc={number}", number % 256)),
            ("ends_of_no_phase", &|number| format!("@wideleaf end phase=p{number} tsc={number}")),
            ("progress_marks", &|number| {
                format!("@wideleaf progress phase=p{} tsc={number} done={number} total=0", number % 2)
            }),
            ("regions", &|number| format!("@wideleaf region name=r{number} address={number:#x} bytes=4096")),
            ("results", &|number| format!("@wideleaf result name=r{number} value=1 unit=s")),
            ("gaps", &|vcpu| format!("@wideleaf gaps vcpu={vcpu} count=1 p50_ns=1 p99_ns=1 p999_ns=1 max_ns=1")),
            ("", &|number| format!("@wideleaf panic message={number}{long}")),
            ("", &|number| format!("Kernel panic - not syncing: {number}{long}")),
            ("", &|number| format!("@wideleaf mismatch address={number:#x} expected=0x1 found=0x2 kind=stale")),
            ("", &|number| {
                format!("@wideleaf hello version=1 kernel=k{number} vcpus=1 guest_page=4k tsc_hz=1 entry=pvh")
            }),
        ];
        let session = session();
        for (cut, line) in kinds {
            feed(&session, LINES, line);
            let (log, line) = (session.log(), line(0));
            let counted = log.cut.by_name().get(cut).copied();
            assert!(cut.is_empty() || counted > Some(LINES / 2), "{line:.60}: {:?}", log.cut);
            assert!(kept_bytes(&log) < 10 << 20, "{line:.60}: {} bytes", kept_bytes(&log));
        }
        feed(&session, LINES, &|number| kinds[number as usize % kinds.len()].1(number));
        assert!(kept_bytes(&session.log()) < 10 << 20);
        let observed = session.observed(None, Instant::now());
        assert_eq!(
            (observed.phases.len(), observed.gaps.len(), observed.results.len()),
            (PHASES_MAX, GAPS_MAX, RESULTS_MAX)
        );
        assert_eq!(observed.malformed.len(), MALFORMED_MAX);
        assert!(observed.malformed.iter().chain(&observed.panic).all(|text| text.chars().count() <= TEXT_MAX));
        assert!(
            observed.cut["looks_at_begin_or_end"] > 0,
            "the host is not observed for each line: {:?}",
            observed.cut
        );
    }

    #[test]
    fn progress_lines_become_readings_with_one_number_a_phase_and_cpu_time() {
        let session = session();
        for line in ["begin phase=a tsc=1", "progress phase=a tsc=2 done=5 total=0", "begin phase=b tsc=3"] {
            session.on_line(&format!("@wideleaf {line}"));
        }
        session.on_line("@wideleaf progress phase=b tsc=4 done=7 total=0");
        session.on_line("@wideleaf progress phase=unknown tsc=5 done=9 total=0");
        let readings = session.readings().take();
        let counts: Vec<_> = readings.iter().map(|reading| (reading.phase, reading.done)).collect();
        assert_eq!(counts, [(0, 5), (1, 7)], "a phase that never began has no reading");
        assert!(readings[0].cpu <= readings[1].cpu && readings[1].cpu > Duration::ZERO, "{readings:?}");
    }

    #[test]
    fn lines_that_were_not_kept_are_counted_over_all_boots() {
        let session = session();
        feed(&session, 100, &|_| "@wideleaf nonsense".to_owned());
        session.forget_guest();
        feed(&session, 100, &|_| "@wideleaf nonsense".to_owned());
        let observed = session.observed(None, Instant::now());
        assert_eq!((observed.malformed.len(), observed.cut["malformed_lines"]), (64, 2 * 36));
    }

    #[test]
    fn a_kernels_panic_is_known_by_its_reason() {
        let line = "[    1.5] Kernel panic - not syncing: Attempted to kill init!\u{1b}[0m exitcode=0x00000300";
        assert_eq!(kernel_panic(line).expect("a panic"), "Attempted to kill init![0m exitcode=0x00000300");
        assert_eq!(kernel_panic("[    1.5] ---[ end Kernel panic - not syncing"), None);
        assert_eq!(
            kernel_panic(&format!("Kernel panic - not syncing: {}", "x".repeat(5000))).expect("a panic").len(),
            200
        );
    }
}
