//! The kernel's monitor on the RAM of other processes: one kdamond for all guests of this process, within a bound on
//! its work that neither RAM nor the number of guests raises.
//!
//! ```text
//!   watch() ─▶ Watch ─┐                ┌── targets: owner, guest, owner, guest, ...   at most 16 guests a turn
//!   watch() ─▶ Watch ─┼─▶ the thread ──┤
//!   drop    ─▶ gone ──┘  "guest-heat"  └── every 5 s or later: regions ─▶ Heat of each guest ─▶ its manager
//! ```
//!
//! The monitor's results do not name their target. So a target of the owner's, one page that is never mapped, stands
//! before each guest: in the results its region begins the part of the next guest.
//!
//! The kernel thread looks at no more than 1600 accessed bits a second, at 400 regions. It follows that large RAM has
//! large regions, down to the pages that are used differently from their neighbours. Where there is no monitor, the
//! thread ends at once, or looks once a minute whether the monitor is free.
//!
//! While a guest's memory map is locked, the kernel thread waits for it, and any write to the monitor's files waits for
//! the kernel thread. So the thread asks each guest first, and leaves the monitor alone until all answer.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use wideleaf_policies::{Bytes, Hva, PageSize, PerTenThousand};

use super::kdamonds::{DamonError, Kind, OwnKdamonds, Region, Setup, Target};
use super::{KINDS, Kdamonds};
use crate::deadline::{self, ProcessKey};
use crate::host::process::ProcessHost;
use crate::region::RamRange;
use crate::sensors::outside_heat::{Heat, HeatRegion, HeatSource, LatestHeat};
use crate::sys;

/// Times of the monitor: ten looks make a result, and with 400 regions there are 1600 looks a second.
pub(super) const KIND: Kind = Kind { sample_us: 250_000, aggregation_us: 2_500_000, is_external: true };
/// Number of looks that make a result.
const LOOKS: u64 = KIND.aggregation_us / KIND.sample_us;
/// Minimum number of regions: one for each window where the guests have few windows.
const REGIONS_LEAST: std::ops::RangeInclusive<u64> = 10..=100;
/// Maximum number of regions: four times the minimum, for the reason in the parent module.
const REGIONS_MOST_FOR_EACH_LEAST: u64 = 4;
/// Number of regions at the beginning: the kernel splits them while there are at most half the maximum.
const REGIONS_AT_FIRST: u64 = 200;
/// Maximum number of guests at the same time; more take turns. With 16 guests each has 25 regions.
const GUESTS_MOST: usize = 16;
/// Maximum number of ranges of all guests at the same time, of each guest the largest ones. Each is at least one
/// region. A guest with much plugged memory has more.
const RANGES_MOST: usize = 64;
/// Largest number of times that a reading's CPU time is waited for until the next: a quarter of a per cent of a core.
const PAUSE_FOR_EACH_CPU: u32 = 400;
/// Time that the end of a watch waits for the monitor to be given back.
const GIVE_BACK_WITHIN: Duration = Duration::from_secs(2);
/// The page before each guest: below `vm.mmap_min_addr`, so no process maps it.
const SEPARATOR: (Hva, Hva) = (Hva::new(1 << 12), Hva::new(2 << 12));

/// Times between the steps of the thread.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// Time from the start of the monitor to the first reading.
    first: Duration,
    /// Shortest time between two readings.
    every: Duration,
    /// Time of a turn, where guests take turns.
    turn: Duration,
    /// Time to the next attempt after a refusal.
    retry: Duration,
}

impl Times {
    /// One aggregation; two, so that at most half of the time is not in any reading; a turn of twelve readings.
    const REAL: Times = Times {
        first: Duration::from_millis(2600),
        every: Duration::from_secs(5),
        turn: Duration::from_secs(60),
        retry: Duration::from_secs(60),
    };
}

/// The monitor of all guests of this process.
pub struct GuestMonitor {
    root: PathBuf,
    times: Times,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    guests: Vec<Arc<Guest>>,
    /// Number of changes of `guests`, and how many of them the thread has carried out.
    changes: u64,
    carried_out: u64,
    is_running: bool,
    /// Reason why this host will never have heat.
    never: Option<String>,
}

/// One guest that is watched.
struct Guest {
    process: Arc<ProcessHost>,
    key: ProcessKey,
    ranges: Vec<RamRange>,
    latest: Mutex<Latest>,
}

#[derive(Default)]
struct Latest {
    heat: Option<(u64, Instant, Arc<Heat>)>,
    why_not: Option<String>,
    /// End of its latest turn, for the order of turns.
    watched_at: Option<Instant>,
}

/// Watches one guest until it is dropped. The drop of the last one gives the monitor back.
pub struct Watch {
    monitor: Arc<GuestMonitor>,
    guest: Arc<Guest>,
}

/// The kernel's monitor while it runs.
struct Running {
    kdamonds: OwnKdamonds,
    /// All guests when it was set up, and those of them that it watches.
    all: Vec<Arc<Guest>>,
    turn: Vec<Arc<Guest>>,
    since: Instant,
}

/// The monitor of this process. There is one, since the kernel has one directory of kdamonds.
static OF_THIS_HOST: LazyLock<Arc<GuestMonitor>> = LazyLock::new(|| GuestMonitor::at(Path::new("/"), Times::REAL));

impl GuestMonitor {
    /// The monitor of this process.
    pub fn of_this_host() -> Arc<GuestMonitor> {
        Arc::clone(&OF_THIS_HOST)
    }

    fn at(root: &Path, times: Times) -> Arc<GuestMonitor> {
        Arc::new(GuestMonitor { root: root.to_owned(), times, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Watches these ranges of a process. Pages of 1 GiB have one accessed bit each, so such ranges are not useful.
    pub fn watch(self: &Arc<Self>, process: Arc<ProcessHost>, ranges: &[RamRange]) -> Watch {
        let key = ProcessKey::of(Path::new("/proc"), process.pid());
        let guest = Arc::new(Guest { process, key, ranges: ranges.to_vec(), latest: Mutex::default() });
        let watch = Watch { monitor: Arc::clone(self), guest: Arc::clone(&guest) };
        let mut state = self.state.lock();
        if let Some(why) = &state.never {
            guest.say(Some(why.clone()));
            return watch;
        }
        guest.say(Some("the kernel's monitor begins, and has a first result in some seconds".to_owned()));
        state.guests.push(guest);
        state.changes += 1;
        self.changed.notify_all();
        if !state.is_running {
            let this = Arc::clone(self);
            let started = thread::Builder::new().name("guest-heat".to_owned()).spawn(move || this.run());
            state.is_running = started.is_ok();
            if let Err(error) = started {
                state.guests.iter().for_each(|guest| guest.say(Some(format!("cannot start a thread: {error}"))));
            }
        }
        watch
    }

    /// Carries out all changes and reads the monitor, until there is no guest.
    fn run(self: Arc<Self>) {
        let _end = EndOfThread(&self);
        let mut running = None;
        loop {
            let (changes, guests) = {
                let state = self.state.lock();
                (state.changes, state.guests.clone())
            };
            let next = self.step(&mut running, &guests);
            drop(guests);
            let mut state = self.state.lock();
            state.carried_out = changes;
            self.changed.notify_all();
            match next {
                Some(wait) => {
                    self.changed.wait_while_for(&mut state, |state| state.changes == changes, wait);
                }
                None if state.changes == changes => {
                    state.is_running = false;
                    return;
                }
                None => {}
            }
        }
    }

    /// One step, and the time to the next; `None` if there is nothing to do until a guest comes.
    fn step(&self, running: &mut Option<Running>, guests: &[Arc<Guest>]) -> Option<Duration> {
        if let Some(silent) = running.iter().flat_map(|running| &running.turn).find(|guest| guest.is_silent()) {
            let why = format!("process {} does not answer, and the kernel's monitor waits for it", silent.key.pid);
            guests.iter().for_each(|guest| guest.say(Some(why.clone())));
            return Some(self.times.every);
        }
        let here: Vec<_> = guests.iter().filter(|guest| !guest.process.has_ended()).cloned().collect();
        if here.is_empty() {
            *running = None;
            return (!guests.is_empty()).then_some(self.times.retry);
        }
        match running {
            Some(known) if !known.is_outdated(&here, self.times.turn) => match known.read() {
                Ok(cpu) => Some(self.times.every.max(cpu.saturating_mul(PAUSE_FOR_EACH_CPU))),
                Err(error) => self.refused(running, guests, &error),
            },
            _ => self.set_up(running, here),
        }
    }

    /// Starts the monitor for the guests of the next turn. Keeps the kdamond if there is one.
    fn set_up(&self, running: &mut Option<Running>, all: Vec<Arc<Guest>>) -> Option<Duration> {
        let kdamonds = running.take().map(Running::end_turn);
        let turn = next_turn(&all);
        if turn.is_empty() {
            return Some(self.times.retry);
        }
        let kdamonds = kdamonds.map_or_else(|| Kdamonds::claim(&self.root, &KINDS), Ok);
        match kdamonds.and_then(|kdamonds| kdamonds.monitor(&setup(&turn)).map(|()| kdamonds)) {
            Ok(kdamonds) => {
                *running = Some(Running { kdamonds, all, turn, since: Instant::now() });
                Some(self.times.first)
            }
            Err(error) => self.refused(running, &all, &error),
        }
    }

    /// Gives the monitor back, and says why to all guests.
    fn refused(&self, running: &mut Option<Running>, guests: &[Arc<Guest>], error: &DamonError) -> Option<Duration> {
        *running = None;
        tracing::info!("access heat of guests: {error}");
        guests.iter().for_each(|guest| guest.say(Some(error.to_string())));
        if !error.is_final() {
            return Some(self.times.retry);
        }
        let mut state = self.state.lock();
        state.never = Some(error.to_string());
        // Some may have come meanwhile.
        state.guests.drain(..).for_each(|guest| guest.say(Some(error.to_string())));
        state.changes += 1;
        None
    }
}

/// Marks the end of the thread if it panics. Guests that come later start another one.
struct EndOfThread<'a>(&'a GuestMonitor);

impl Drop for EndOfThread<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.state.lock().is_running = false;
            self.0.changed.notify_all();
        }
    }
}

impl Guest {
    fn say(&self, why_not: Option<String>) {
        self.latest.lock().why_not = why_not;
    }

    /// Whether its memory map is locked. The question has a deadline, and a thread of its own.
    fn is_silent(&self) -> bool {
        let file = format!("/proc/{}/cmdline", self.key.pid);
        deadline::ask(self.key, deadline::BRIEF, move || drop(std::fs::read(file))).is_err()
    }

    fn tell(&self, regions: &[Region]) {
        let heat_region = |region: &Region| HeatRegion {
            start: region.start,
            end: region.end,
            rate: PerTenThousand::of(region.accesses.min(LOOKS), LOOKS),
        };
        let heat = Heat::new(regions.iter().map(heat_region).collect());
        let mut latest = self.latest.lock();
        let number = latest.heat.as_ref().map_or(0, |(number, ..)| number + 1);
        latest.heat = Some((number, Instant::now(), Arc::new(heat)));
        latest.why_not = None;
    }
}

impl Running {
    /// Ends the turn of its guests.
    fn end_turn(self) -> OwnKdamonds {
        let now = Instant::now();
        self.turn.iter().for_each(|guest| guest.latest.lock().watched_at = Some(now));
        self.kdamonds
    }

    /// Whether guests have come or gone, or the turn is over.
    fn is_outdated(&self, here: &[Arc<Guest>], turn: Duration) -> bool {
        let is_same = self.all.len() == here.len() && self.all.iter().zip(here).all(|(a, b)| Arc::ptr_eq(a, b));
        !is_same || (self.turn.len() < here.len() && self.since.elapsed() >= turn)
    }

    /// Reads the monitor and tells each guest. Returns the CPU time.
    fn read(&self) -> Result<Duration, DamonError> {
        let began = sys::clock::thread_cpu_time();
        let regions = self.kdamonds.regions()?;
        let parts: Vec<_> = regions.split(|region| (region.start, region.end) == SEPARATOR).skip(1).collect();
        if parts.len() != self.turn.len() {
            return Err(DamonError::OtherTargets { found: parts.len(), expected: self.turn.len() });
        }
        // A process that has ended has no regions, and its id may belong to another one by now.
        let alive = self.turn.iter().zip(parts).filter(|(guest, _)| !guest.process.has_ended());
        alive.for_each(|(guest, regions)| guest.tell(regions));
        Ok(sys::clock::thread_cpu_time().saturating_sub(began))
    }
}

impl HeatSource for Watch {
    fn latest(&self) -> Option<LatestHeat<Arc<Heat>>> {
        let latest = self.guest.latest.lock();
        let (number, at, heat) = latest.heat.as_ref()?;
        Some(LatestHeat { number: *number, age: at.elapsed(), heat: Arc::clone(heat) })
    }

    fn why_not(&self) -> Option<String> {
        self.guest.latest.lock().why_not.clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Watch { monitor, guest } = self;
        let mut state = monitor.state.lock();
        state.guests.retain(|watched| !Arc::ptr_eq(watched, guest));
        state.changes += 1;
        let change = state.changes;
        monitor.changed.notify_all();
        let is_pending = |state: &mut State| state.is_running && state.carried_out < change;
        monitor.changed.wait_while_for(&mut state, is_pending, GIVE_BACK_WITHIN);
    }
}

/// The guests that answer and were not watched for the longest time. The others are told why they are not among them.
fn next_turn(all: &[Arc<Guest>]) -> Vec<Arc<Guest>> {
    let (silent, mut turn): (Vec<_>, Vec<_>) = all.iter().cloned().partition(|guest| guest.is_silent());
    silent.iter().for_each(|guest| guest.say(Some("the process does not answer".to_owned())));
    turn.sort_by_key(|guest| guest.latest.lock().watched_at);
    for guest in turn.drain(GUESTS_MOST.min(turn.len())..) {
        guest.say(Some(format!("the kernel's monitor watches {GUESTS_MOST} guests at a time: its turn comes")));
    }
    turn
}

/// Number of ranges that each guest may have: guests with few ranges leave theirs to the others.
fn ranges_of_each(turn: &[Arc<Guest>]) -> usize {
    let ranges = |most: usize| turn.iter().map(|guest| guest.ranges.len().min(most)).sum::<usize>();
    (1..=RANGES_MOST).rev().find(|most| ranges(*most) <= RANGES_MOST).unwrap_or(1)
}

/// The largest ranges, `most` of them, by ascending address.
fn largest(ranges: &[RamRange], most: usize) -> Vec<RamRange> {
    let mut ranges = ranges.to_vec();
    ranges.sort_by_key(|range| std::cmp::Reverse(range.gpa.bytes()));
    ranges.truncate(most);
    ranges.sort_by_key(|range| range.hva);
    ranges
}

/// What the monitor is told for these guests. The regions at the beginning are whole windows, equally long.
fn setup(turn: &[Arc<Guest>]) -> Setup {
    let most = ranges_of_each(turn);
    let ranges: Vec<_> = turn.iter().map(|guest| largest(&guest.ranges, most)).collect();
    let bytes = ranges.iter().flatten().map(|range| range.gpa.bytes()).sum::<Bytes>().get();
    let window = PageSize::Huge2M.bytes().get();
    let length = bytes.div_ceil(REGIONS_AT_FIRST).next_multiple_of(window).max(window);
    let least = (bytes / window).clamp(*REGIONS_LEAST.start(), *REGIONS_LEAST.end());
    let separator = || Target { pid: std::process::id(), regions: vec![SEPARATOR] };
    let regions = |ranges: &[RamRange]| ranges.iter().flat_map(|range| pieces(range, length)).collect();
    let target = |guest: &Guest, ranges: &[RamRange]| Target { pid: guest.key.pid, regions: regions(ranges) };
    let pairs = turn.iter().zip(&ranges);
    let targets = pairs.flat_map(|(guest, ranges)| [separator(), target(guest, ranges)]).collect();
    Setup { kind: KIND, regions: (least, least * REGIONS_MOST_FOR_EACH_LEAST), targets }
}

fn pieces(range: &RamRange, length: u64) -> impl Iterator<Item = (Hva, Hva)> {
    let (start, end) = (range.hva.get(), (range.hva + range.gpa.bytes()).get());
    let piece = move |at: u64| (Hva::new(at), Hva::new(end.min(at + length)));
    (start..end).step_by(usize::try_from(length).unwrap_or(usize::MAX)).map(piece)
}

#[cfg(test)]
mod tests;
