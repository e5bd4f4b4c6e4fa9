//! Runs guests of QEMU, alone or with a wideleafd, and disturbs them: by a save and a restore, a move by postcopy, a
//! dirty log, or a process that takes huge pages.
//!
//! ```text
//!   hog? ─ wideleafd? ─ QEMU ─ attach? ─▶ the timed part ─▶ event ─▶ … ─▶ each guest checks its memory and ends
//!                                             └ looks at RAM and free blocks, every 100 ms ┘
//! ```
//!
//! Everything ends with this process: QEMU and wideleafd by the kernel, the hog when its input ends.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use wideleaf_control::client;
use wideleaf_control::protocol::{Request, Settings, Target};
use wideleaf_experiments::disturbance::{
    DAEMON_CPU_S, DisturbedGuests, Event, FREE_HUGE_PAGES, KHUGEPAGED_CPU_S, LOOK_EVERY_MS, PromotionOwner,
    TO_NEARLY_ALL_S, WATCHED_S,
};
use wideleaf_experiments::each_guest::{AT_THE_SAME_TIME, AT_THE_SAME_TIME_MIN_PERCENT};
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::Measured;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

use super::qemu::{RamSample, Watch, with_clock};
use super::together::Daemon;
use super::together::shared_time::{SharedTime, TimedPart};
use super::wideleaf_run::MIB;
use crate::experiment::host_state::fragmentation::{Hog, free_blocks_now};
use crate::experiment::host_state::khugepaged;
use guest_messages::GuestMessages;
use machine::{Machine, Place};

pub(super) mod guest_messages;
pub(super) mod machine;
pub(super) mod monitor;

const LOOK_EVERY: Duration = Duration::from_millis(LOOK_EVERY_MS);
/// Interval at which the consoles are read.
const PACE: Duration = Duration::from_millis(5);
/// Work of the guests before the event.
const BEFORE: Duration = Duration::from_millis(1500);
/// Coverage that counts as all.
const NEARLY_ALL: f64 = 0.99;
/// Speed of a save to a file, in bytes a second: no limit.
const UNLIMITED: u64 = 1 << 40;
/// Speed of the precopy before a postcopy, in bytes a second: the guest is faster, so that pages are left.
const PRECOPY: u64 = 64 << 20;
/// Length of the precopy.
const PRECOPY_FOR: Duration = Duration::from_millis(300);
/// Length of the dirty log in seconds, the shortest that QEMU takes.
const DIRTY_LOG_S: u64 = 1;

/// Runs the guests until they end.
pub(super) fn run(work: &DisturbedGuests, timeout: Duration, interrupts: &Interrupts) -> Result<Measured, Failure> {
    let khugepaged_before = khugepaged::cpu_time();
    let work = &DisturbedGuests { guest: with_clock(&work.guest), ..work.clone() };
    let place = Place::make()?;
    let hog = work.event.hog_at_the_start().map(Hog::take).transpose().map_err(Failure::Host)?;
    let daemon = (work.keeper == PromotionOwner::Daemon).then(|| Daemon::start(interrupts)).transpose()?;
    let deadline = Deadline { at: Instant::now() + timeout, timeout };
    let mut state =
        RunState { work, place, daemon, interrupts, deadline, guests: vec![], hog, seen: vec![], notes: vec![] };
    for number in 0..work.count {
        state.start(number)?;
    }
    let since = state.disturb()?;
    let mut measured = state.end(since)?;
    let cpu = khugepaged_before.and_then(|before| khugepaged::cpu_time()?.checked_sub(before));
    measured.told.extend(cpu.map(|cpu| (KHUGEPAGED_CPU_S.to_owned(), cpu.as_secs_f64())));
    Ok(measured)
}

/// Time at which a run is given up.
struct Deadline {
    at: Instant,
    timeout: Duration,
}

/// One guest, in the QEMU that has it now.
struct WatchedGuest {
    machine: Machine,
    watch: Watch,
    said: GuestMessages,
}

/// What was seen at one instant.
struct GuestsSample {
    at: Instant,
    looks: Vec<RamSample>,
    free_huge_pages: u64,
}

/// The guests of a run, what disturbs them, and what was seen of them.
struct RunState<'a> {
    work: &'a DisturbedGuests,
    place: Place,
    daemon: Option<Daemon>,
    interrupts: &'a Interrupts,
    deadline: Deadline,
    guests: Vec<WatchedGuest>,
    hog: Option<Hog>,
    seen: Vec<GuestsSample>,
    notes: Vec<String>,
}

impl RunState<'_> {
    /// Starts a guest and waits until its timed part has begun.
    fn start(&mut self, number: u32) -> Result<(), Failure> {
        let machine = self.machine(&format!("stock-{number}"), None)?;
        let watch = Watch::of(machine.pid());
        self.guests.push(WatchedGuest { machine, watch, said: GuestMessages::default() });
        self.wait("a guest's timed part", |guests| guests.iter().all(|guest| guest.said.began.is_some()))
    }

    /// A QEMU, attached to the daemon if there is one.
    fn machine(&self, name: &str, incoming: Option<&str>) -> Result<Machine, Failure> {
        let machine = Machine::start(&self.place, self.work, name, incoming, self.interrupts)?;
        if let Some(daemon) = &self.daemon {
            let settings = Settings { qmp: Some(machine.monitor_for_daemon().to_owned()), ..Settings::default() };
            let request = Request::Attach { target: Target::Pid(machine.pid()), settings };
            client::ask(&daemon.socket(), request)
                .map_err(|error| machine::cannot(&format!("attach QEMU {}", machine.pid()), &error))?;
        }
        Ok(machine)
    }

    /// Reads consoles and looks at RAM until the guests are as wanted.
    fn wait(&mut self, what: &str, mut is_there: impl FnMut(&mut [WatchedGuest]) -> bool) -> Result<(), Failure> {
        loop {
            self.interrupts.check()?;
            self.look()?;
            if is_there(&mut self.guests) {
                return Ok(());
            }
            if Instant::now() > self.deadline.at {
                let Deadline { timeout, .. } = self.deadline;
                return Err(Failure::Host(format!("cannot wait longer than {} s for {what}", timeout.as_secs())));
            }
            thread::sleep(PACE);
        }
    }

    fn pass(&mut self, time: Duration) -> Result<(), Failure> {
        let until = Instant::now() + time;
        self.wait("a pause", |_| Instant::now() >= until)
    }

    /// Reads consoles, and looks at RAM when it is time to.
    fn look(&mut self) -> Result<(), Failure> {
        for WatchedGuest { machine, said, .. } in &mut self.guests {
            machine.tell(said);
            // A guest that gave up would be waited for without end.
            if said.is_over() { said.judge()? } else { machine.check(said)? }
        }
        let at = Instant::now();
        if self.seen.last().is_none_or(|seen| at.duration_since(seen.at) >= LOOK_EVERY) {
            let look = |guest: &mut WatchedGuest| guest.watch.look(&[guest.said.hot?.1]);
            let looks = self.guests.iter_mut().filter_map(look).collect();
            self.seen.push(GuestsSample { at, looks, free_huge_pages: free_blocks_now() });
        }
        Ok(())
    }

    /// Lets the event happen. Returns its end, from which speed and coverage count; `None` for the start itself.
    fn disturb(&mut self) -> Result<Option<Instant>, Failure> {
        if self.work.event.is_later() {
            self.pass(BEFORE)?;
        }
        match self.work.event {
            Event::Start | Event::StartBesideHog { .. } => {
                self.notes.extend(self.hog.as_ref().map(|hog| format!("A hog stayed: {}.", hog.said())));
                return Ok(None);
            }
            Event::HogEnds { .. } => self.end_hog(),
            Event::Restore => self.restore(None)?,
            Event::RestoreBesideHog { hog_pages_2m } => {
                self.restore(Some(hog_pages_2m))?;
                self.pass(BEFORE)?;
                self.end_hog();
            }
            Event::Postcopy => self.postcopy()?,
            Event::DirtyLog => self.dirty_log()?,
        }
        if self.guests.iter().any(|guest| guest.said.ended.is_some()) {
            let why = "the event took longer than the guest's timed part: run it on a machine with less other work";
            return Err(Failure::Host(format!("cannot measure after the event: {why}")));
        }
        Ok(Some(Instant::now()))
    }

    fn end_hog(&mut self) {
        if let Some(hog) = self.hog.take() {
            self.notes.push(format!("A hog ended: {}.", hog.said()));
        }
    }

    /// Saves the guest to a file, ends its QEMU, and restores it in another one.
    fn restore(&mut self, hog_pages_2m: Option<u64>) -> Result<(), Failure> {
        let bandwidth = json!({ "max-bandwidth": UNLIMITED });
        self.monitor().command("migrate-set-parameters", &bandwidth)?;
        self.monitor().command("migrate", &json!({ "uri": "exec:cat > saved" }))?;
        self.until_migrated()?;
        let WatchedGuest { machine, mut said, .. } = self.guests.remove(0);
        machine.end(&mut said);
        self.hog = hog_pages_2m.map(Hog::take).transpose().map_err(Failure::Host)?;
        let machine = self.machine("stock-restored", Some("exec:cat saved"))?;
        self.guests.push(WatchedGuest { watch: Watch::of(machine.pid()), machine, said });
        self.until_it_runs()
    }

    /// Moves the guest by postcopy.
    fn postcopy(&mut self) -> Result<(), Failure> {
        let mut target = self.machine("stock-moved", Some("defer"))?;
        let capability = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
        target.monitor.command("migrate-set-capabilities", &capability)?;
        self.monitor().command("migrate-set-capabilities", &capability)?;
        let uri = json!({ "uri": "unix:moves.sock" });
        target.monitor.command("migrate-incoming", &uri)?;
        self.monitor().command("migrate-set-parameters", &json!({ "max-bandwidth": PRECOPY }))?;
        self.monitor().command("migrate", &uri)?;
        self.pass(PRECOPY_FOR)?;
        self.monitor().command("migrate-start-postcopy", &json!({}))?;
        self.until_migrated()?;
        let WatchedGuest { machine, mut said, .. } = self.guests.remove(0);
        machine.end(&mut said);
        self.guests.push(WatchedGuest { watch: Watch::of(target.pid()), machine: target, said });
        self.until_it_runs()
    }

    /// Has QEMU measure the dirty rate, which write-protects all memory meanwhile.
    fn dirty_log(&mut self) -> Result<(), Failure> {
        let how = json!({ "calc-time": DIRTY_LOG_S, "mode": "dirty-bitmap" });
        self.monitor().command("calc-dirty-rate", &how)?;
        self.until("query-dirty-rate", &["measured"], &[])
    }

    fn until_migrated(&mut self) -> Result<(), Failure> {
        self.until("query-migrate", &["completed"], &["failed", "cancelled", "postcopy-paused"])
    }

    fn until_it_runs(&mut self) -> Result<(), Failure> {
        self.until("query-status", &["running"], &["internal-error", "io-error"])
    }

    /// Asks QEMU for a status until it is one of those wanted.
    fn until(&mut self, query: &str, wanted: &[&str], bad: &[&str]) -> Result<(), Failure> {
        let mut status = Ok(String::new());
        self.wait(query, |guests| {
            status = guests[0].machine.monitor.status(query);
            status.as_ref().map_or(true, |status| [wanted, bad].concat().contains(&status.as_str()))
        })?;
        match status? {
            status if wanted.contains(&status.as_str()) => Ok(()),
            status => Err(Failure::Host(format!("cannot go on after {query} of QEMU: its status is {status}"))),
        }
    }

    fn monitor(&mut self) -> &mut monitor::Monitor {
        &mut self.guests[0].machine.monitor
    }

    /// Waits for the guests' end, at which their daemon must still run. Returns all measurements.
    fn end(mut self, since: Option<Instant>) -> Result<Measured, Failure> {
        self.wait("the guests' end", |guests| guests.iter().all(|guest| guest.said.is_over()))?;
        self.daemon.as_mut().map_or(Ok(()), Daemon::check)?;
        self.measured(since)
    }

    /// All measurements, from the event on, or from the start without one.
    fn measured(self, since: Option<Instant>) -> Result<Measured, Failure> {
        let said: Vec<&GuestMessages> = self.guests.iter().map(|guest| &guest.said).collect();
        let why = "cannot measure: a guest made too few marks of progress; run it on a machine with less other work";
        let Rates { rates, same_time_percent } = Rates::of(&said, since).ok_or_else(|| Failure::Host(why.into()))?;
        let named = self.guests.iter().filter_map(|guest| Some(guest.said.hot?.0)).min();
        let ended = self.guests.iter().filter_map(|guest| guest.said.ended).min();
        let mut measured = Measured { notes: self.notes, ..Measured::default() };
        let mut put = |metric, value: Option<f64>| measured.metrics.extend(value.map(|value| (metric, value)));
        put(Metric::Figure, (!rates.is_empty()).then(|| rates.iter().sum()));
        let highest = rates.iter().copied().fold(0.0, f64::max);
        let lowest = rates.iter().copied().fold(highest, f64::min);
        put(Metric::Fairness, (rates.len() > 1).then(|| lowest / highest));
        let gap =
            |index: usize| self.guests.iter().filter_map(|guest| Some(guest.said.gaps_us?[index])).reduce(f64::max);
        put(Metric::GapP99Us, gap(0));
        put(Metric::GapMaxUs, gap(1));
        let daemon_cpu = self.daemon.as_ref().map(|daemon| daemon.cpu_time().unwrap_or_default().as_secs_f64());
        put(Metric::ManagerCpuS, Some(daemon_cpu.unwrap_or_default()));
        measured.told.extend(same_time_percent.map(|percent| (AT_THE_SAME_TIME.to_owned(), percent)));
        let guests = self.guests.len();
        let (Some(since), Some(ended)) = (since.or(named), ended) else { return Ok(measured) };
        let last = self.seen.iter().rfind(|seen| seen.at <= ended && seen.looks.len() == guests);
        let resident =
            |seen: &GuestsSample| seen.looks.iter().map(|look| look.backing.resident().get() as f64 / MIB).sum();
        put(Metric::ResidentMib, last.map(resident));
        put(Metric::CoveragePercent, last.and_then(|seen| Some(covered(seen)? * 100.0)));
        let reached = time_to_nearly_all(&self.seen, guests, since, ended);
        let mut tell = |name: &str, value: Option<f64>| {
            measured.told.extend(value.map(|value| (name.to_owned(), value)));
        };
        tell(TO_NEARLY_ALL_S, reached.map(|time| time.as_secs_f64()));
        tell(WATCHED_S, Some(ended.saturating_duration_since(since).as_secs_f64()));
        tell(FREE_HUGE_PAGES, last.map(|seen| seen.free_huge_pages as f64));
        tell(DAEMON_CPU_S, daemon_cpu);
        Ok(measured)
    }
}

/// Speeds of all guests.
#[derive(Debug, Default, PartialEq)]
struct Rates {
    /// Billions of updates a second of each guest. Empty if the guests were at work together for too little time.
    rates: Vec<f64>,
    /// Time in which all of several guests were at work, in percent of the shortest timed part.
    same_time_percent: Option<f64>,
}

impl Rates {
    /// After the event; without one, in the time in which all guests are at work: one that starts early has the CPUs
    /// with fewer others. `None` if a guest made too few marks.
    fn of(said: &[&GuestMessages], since: Option<Instant>) -> Option<Rates> {
        if let Some(since) = since {
            let rates = said.iter().map(|said| said.rate_since(since)).collect::<Option<_>>()?;
            return Some(Rates { rates, same_time_percent: None });
        }
        let Some(began) = said.iter().filter_map(|said| said.began).min() else { return Some(Rates::default()) };
        let parts: Vec<TimedPart> = said.iter().map(|said| said.timed_part(began)).collect::<Option<_>>()?;
        let shared = SharedTime::of(&parts)?;
        let same_time_percent = (parts.len() > 1).then(|| shared.percent());
        if shared.percent() < AT_THE_SAME_TIME_MIN_PERCENT {
            return Some(Rates { rates: vec![], same_time_percent });
        }
        let rate = |part: &TimedPart| Some(shared.rate_per_s(part)? / 1e9);
        Some(Rates { rates: parts.iter().map(rate).collect::<Option<_>>()?, same_time_percent })
    }
}

/// Share of the hot sets on huge pages; `None` if none was seen.
fn covered(seen: &GuestsSample) -> Option<f64> {
    let windows: u64 = seen.looks.iter().map(|look| look.windows).sum();
    let large: u64 = seen.looks.iter().map(|look| look.windows_large).sum();
    (windows > 0).then(|| large as f64 / windows as f64)
}

/// Time from `since` to the first look that found 99 % of the hot sets of all guests on huge pages.
fn time_to_nearly_all(seen: &[GuestsSample], guests: usize, since: Instant, ended: Instant) -> Option<Duration> {
    let watched = seen.iter().filter(|seen| seen.at >= since && seen.at <= ended && seen.looks.len() == guests);
    let is_all = |seen: &&GuestsSample| covered(seen).is_some_and(|share| share >= NEARLY_ALL);
    watched.into_iter().find(is_all).map(|seen| seen.at.duration_since(since))
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_experiments::peers::{Guest, QemuRam};
    use wideleaf_policies::account::HostBacking;

    /// The end of a run after its guests have ended.
    fn end_beside(daemon: Option<Daemon>) -> Result<Measured, Failure> {
        let (keeper, event) = (PromotionOwner::Daemon, Event::Start);
        let work = DisturbedGuests { guest: Guest::new("gups", "", 64), count: 0, ram: QemuRam::Thp, keeper, event };
        let (place, interrupts) = (Place::make()?, Interrupts::install()?);
        let deadline = Deadline { at: Instant::now() + Duration::from_secs(60), timeout: Duration::from_secs(60) };
        let (work, interrupts) = (&work, &interrupts);
        let state = RunState {
            work,
            place,
            daemon,
            interrupts,
            deadline,
            guests: vec![],
            hog: None,
            seen: vec![],
            notes: vec![],
        };
        state.end(None)
    }

    #[test]
    fn a_daemon_that_ended_before_its_guests_fails_their_run_in_its_last_words() {
        let why = end_beside(Some(Daemon::ended("out of memory"))).expect_err("it has ended").to_string();
        assert!(why.contains("wideleafd ended before its guests, with exit status: 3: out of memory"), "{why}");
        assert!(end_beside(Some(Daemon::of_shell("exec sleep 600"))).is_ok(), "it runs");
        assert!(end_beside(None).is_ok(), "the kernel alone");
    }

    /// A guest that begins its timed part at that second, and does this number of updates in each second of it.
    fn guest(started: Instant, begin_s: u64, updates: &[u64]) -> GuestMessages {
        let mut said = GuestMessages::default();
        let at = |second| started + Duration::from_secs(begin_s + second);
        said.hear(at(0), "@wideleaf hello version=1 kernel=gups vcpus=1 guest_page=2m tsc_hz=1 entry=pvh");
        said.hear(at(0), "@wideleaf begin phase=update tsc=0");
        for second in 1..=updates.len() {
            let done: u64 = updates[..second].iter().sum();
            let line = format!("@wideleaf progress phase=update tsc={second} done={done} total=0");
            said.hear(at(second as u64), &line);
        }
        said
    }

    #[test]
    fn guests_that_start_one_after_the_other_are_measured_while_all_are_at_work() {
        const FAST: u64 = 1_000_000_000;
        const SLOW: u64 = FAST / 2;
        // Each is fast as long as it is alone.
        let started = Instant::now();
        let first = guest(started, 0, &[FAST, FAST, SLOW, SLOW]);
        let second = guest(started, 2, &[SLOW, SLOW, FAST, FAST]);
        let both = [&first, &second];
        let together = Rates { rates: vec![0.5, 0.5], same_time_percent: Some(50.0) };
        assert_eq!(Rates::of(&both, None), Some(together));
        let alone = Rates { rates: vec![0.75], same_time_percent: None };
        assert_eq!(Rates::of(&both[..1], None), Some(alone));
        let event = Rates { rates: vec![0.5], same_time_percent: None };
        assert_eq!(Rates::of(&both[..1], Some(started + Duration::from_secs(2))), Some(event));
        let late = guest(started, 4, &[FAST, FAST]);
        let apart = Rates { rates: vec![], same_time_percent: Some(0.0) };
        assert_eq!(Rates::of(&[&first, &late], None), Some(apart));
        assert_eq!(Rates::of(&[&first, &guest(started, 0, &[])], None), None, "no marks");
    }

    /// A look at each of these guests, of which the given number of 100 windows are large.
    fn seen(began: Instant, at_ms: u64, large: &[u64]) -> GuestsSample {
        let at = began + Duration::from_millis(at_ms);
        let look = |large: &u64| RamSample::of_windows(at, HostBacking::default(), 100, *large);
        GuestsSample { at, looks: large.iter().map(look).collect(), free_huge_pages: 0 }
    }

    #[test]
    fn all_guests_count_and_only_looks_after_the_event() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let looks = [
            seen(began, 0, &[100, 100]),
            seen(began, 100, &[0, 100]),
            seen(began, 200, &[100]), // the other guest could not be looked at
            seen(began, 300, &[98, 100]),
            seen(began, 400, &[100, 100]),
        ];
        let time = |since, ended| time_to_nearly_all(&looks, 2, at(since), at(ended)).map(|time| time.as_millis());
        assert_eq!(time(50, 1000), Some(250), "198 of 200 windows are 99 %");
        assert_eq!((time(0, 1000), time(50, 250)), (Some(0), None));
    }
}
