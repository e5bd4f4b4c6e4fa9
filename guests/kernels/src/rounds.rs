//! Repeating a round of work on every vCPU, with progress lines and a record of interruptions.
//!
//! ```text
//!   vCPU 0   work(0, r) ──┐         ┌─ again(r)? ─┐
//!   vCPU 1   work(1, r) ──┤ barrier │   (waits)   │ barrier ──▶ next round, or the end
//!   vCPU 2   work(2, r) ──┘         └─   (waits)  ┘
//! ```
//!
//! All rounds are one job of the team, so that every vCPU keeps its histogram on its own stack.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name, VCPUS_MAX};

use crate::latency_histogram::{Histogram, Summary};
use crate::parameters::Parameters;
use crate::team::Barrier;
use crate::{KernelError, Platform};

/// Runs `work(vcpu, round, batches)` for round 0, 1, … on every vCPU until `again(round)` returns false, which only
/// vCPU 0 calls while the others wait. Returns the summary of each vCPU's histogram, by vCPU.
pub fn run_rounds(
    platform: &dyn Platform,
    work: impl Fn(usize, u64, &mut Batches<'_>) + Sync,
    again: impl Fn(u64) -> bool + Sync,
) -> [Summary; VCPUS_MAX] {
    let vcpus = platform.vcpus();
    let meeting = Meeting::default();
    let slots: [Slot; VCPUS_MAX] = core::array::from_fn(|_| Slot::default());
    platform.run_on_all(&|vcpu| {
        let mut histogram = Histogram::new();
        for round in 0.. {
            let mut batches = Batches { platform, histogram: &mut histogram, last: platform.now() };
            work(vcpu, round, &mut batches);
            if !meeting.agree(vcpu, vcpus, || again(round)) {
                break;
            }
        }
        slots[vcpu].set(histogram.summary());
    });
    slots.each_ref().map(Slot::get)
}

/// Criterion for the end of the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// End after this number of rounds.
    Rounds(u64),
    /// End after the round in which this number of seconds has passed, or the machine's user has asked for the end.
    Seconds(u64),
}

/// The parameter that gives a time instead of a number of rounds.
const SECONDS: &str = "seconds";
/// Upper limit in seconds, longer than a century.
const SECONDS_MAX: u64 = 1 << 32;

impl Until {
    /// Reads the parameters: `seconds`, or a number of rounds up to `most` under the name `rounds`.
    pub fn read<'a>(
        parameters: &Parameters<'a>,
        rounds: &'static str,
        most: u64,
        default: u64,
    ) -> Result<Self, KernelError<'a>> {
        match (parameters.count(rounds, 1, most)?, parameters.count(SECONDS, 1, SECONDS_MAX)?) {
            (Some(_), Some(_)) => Err(KernelError::Conflict { one: rounds, other: SECONDS }),
            (None, Some(seconds)) => Ok(Self::Seconds(seconds)),
            (count, None) => Ok(Self::Rounds(count.unwrap_or(default))),
        }
    }

    /// Refuses seconds if the frequency of the counter is unknown. A run of seconds can be ended early from now on.
    pub fn prepare<'a>(self, platform: &dyn Platform) -> Result<(), KernelError<'a>> {
        match self {
            Self::Seconds(_) if platform.tsc_hz() == 0 => return Err(KernelError::NeedsClock { name: SECONDS }),
            Self::Seconds(_) => platform.accept_end(),
            Self::Rounds(_) => {}
        }
        Ok(())
    }

    /// Number of planned rounds; 0 if the time decides, as in progress lines.
    pub const fn planned(self) -> u64 {
        match self {
            Self::Rounds(rounds) => rounds,
            Self::Seconds(_) => 0,
        }
    }

    /// Whether this number of rounds, which took this number of ticks, is enough.
    pub fn is_reached(self, platform: &dyn Platform, rounds: u64, ticks: u64) -> bool {
        match self {
            Self::Rounds(planned) => rounds >= planned,
            Self::Seconds(seconds) => ticks >= seconds.saturating_mul(platform.tsc_hz()) || platform.is_asked_to_end(),
        }
    }
}

/// A meeting point of all vCPUs of a job, at which vCPU 0 decides for all. Reusable.
#[derive(Debug, Default)]
pub struct Meeting {
    barrier: Barrier,
    verdict: AtomicBool,
}

impl Meeting {
    /// Waits until all `vcpus` have arrived. Returns the result of `decide`, which only vCPU 0 calls while the
    /// others wait.
    pub fn agree(&self, vcpu: usize, vcpus: usize, decide: impl FnOnce() -> bool) -> bool {
        self.barrier.wait(vcpus);
        if vcpu == 0 {
            self.verdict.store(decide(), Ordering::Relaxed);
        }
        self.barrier.wait(vcpus);
        self.verdict.load(Ordering::Relaxed)
    }
}

/// Clock of one vCPU's batches within one round.
pub struct Batches<'h> {
    platform: &'h dyn Platform,
    histogram: &'h mut Histogram,
    last: u64,
}

impl Batches<'_> {
    /// Begins the first batch now; the time before (setup, printing) was not work and is not a gap.
    pub fn restart(&mut self) -> u64 {
        self.last = self.platform.now();
        self.last
    }

    /// Ends a batch and begins the next: counts the time since the previous call. Returns the time.
    #[inline]
    pub fn end_batch(&mut self) -> u64 {
        let now = self.platform.now();
        // Counters of two CPUs may differ by some ticks if a thread moves between them.
        self.histogram.record(now.saturating_sub(self.last));
        self.last = now;
        now
    }
}

/// A summary that its vCPU writes and the leader reads after the job.
#[derive(Default)]
struct Slot([AtomicU64; 5]);

impl Slot {
    fn set(&self, summary: Summary) {
        let values = [summary.count, summary.p50, summary.p99, summary.p999, summary.max];
        for (slot, value) in self.0.iter().zip(values) {
            slot.store(value, Ordering::Relaxed);
        }
    }

    fn get(&self) -> Summary {
        let [count, p50, p99, p999, max] = self.0.each_ref().map(|slot| slot.load(Ordering::Relaxed));
        Summary { count, p50, p99, p999, max }
    }
}

/// Work done so far. Each vCPU counts on its own cache line, so that counting invalidates no other vCPU's line.
#[derive(Default)]
pub struct Tally([Line; VCPUS_MAX]);

#[derive(Default)]
#[repr(align(64))]
struct Line(AtomicU64);

impl Tally {
    /// Records that `vcpu` has done `total` units since the phase began.
    #[inline]
    pub fn set(&self, vcpu: usize, total: u64) {
        self.0[vcpu].0.store(total, Ordering::Relaxed);
    }

    /// Number of units done by all vCPUs.
    pub fn sum(&self) -> u64 {
        self.0.iter().map(|line| line.0.load(Ordering::Relaxed)).sum()
    }
}

/// Assumed frequency of a counter with an unknown one, 2.5 GHz, for spacing lines and for the length of runs. No
/// result depends on it.
pub const ASSUMED_TSC_HZ: u64 = 2_500_000_000;

/// Shortest interval of progress lines that can be asked for: at a hundred a second their exits cost at most some per
/// cent of the run, the same share all the time.
const PROGRESS_MS_MIN: u64 = 10;

/// Reads the minimum time between two progress lines, in milliseconds; 0 for none.
pub fn progress_ms<'a>(parameters: &Parameters<'a>, default: u64) -> Result<u64, KernelError<'a>> {
    Ok(match parameters.count("progress_ms", 0, 1 << 32)?.unwrap_or(default) {
        0 => 0,
        interval => interval.max(PROGRESS_MS_MIN),
    })
}

/// Spaces the progress lines of one phase and adds up their cost. Only vCPU 0 uses it.
pub struct Progress<'p> {
    platform: &'p dyn Platform,
    phase: Name<'p>,
    total: u64,
    /// Minimum ticks between two lines; `u64::MAX` for no lines.
    interval: u64,
    next: AtomicU64,
    console_ticks: AtomicU64,
}

impl<'p> Progress<'p> {
    /// Lines for `phase` at least `interval_ms` apart (0: no lines), of `total` units (0: until the time is up).
    pub fn new(platform: &'p dyn Platform, phase: Name<'p>, total: u64, interval_ms: u64) -> Self {
        let hz = if platform.tsc_hz() == 0 { ASSUMED_TSC_HZ } else { platform.tsc_hz() };
        let interval = if interval_ms == 0 { u64::MAX } else { (hz / 1000).saturating_mul(interval_ms) };
        let next = platform.now().saturating_add(interval);
        Self { platform, phase, total, interval, next: AtomicU64::new(next), console_ticks: AtomicU64::new(0) }
    }

    /// Whether enough time has passed for another line.
    #[inline]
    pub fn is_due(&self, now: u64) -> bool {
        now >= self.next.load(Ordering::Relaxed)
    }

    /// Prints a line: `done` units were done at `now`.
    pub fn emit(&self, now: u64, done: u64) {
        self.platform.emit(&Message::Progress { phase: self.phase, tsc: now, done, total: self.total });
        let after = self.platform.now();
        self.console_ticks.fetch_add(after.saturating_sub(now), Ordering::Relaxed);
        self.next.store(after.saturating_add(self.interval), Ordering::Relaxed);
    }

    /// Prints a line if enough time has passed since the one before: `done` units are done.
    pub fn note(&self, done: u64) {
        let now = self.platform.now();
        if self.is_due(now) {
            self.emit(now, done);
        }
    }

    /// Ticks spent printing so far.
    pub fn console_ticks(&self) -> u64 {
        self.console_ticks.load(Ordering::Relaxed)
    }
}

/// Part `index` of `count` nearly equal parts of `0..total`, as a half-open range.
pub fn part(total: u64, index: usize, count: usize) -> core::ops::Range<u64> {
    let border = |index: usize| (u128::from(total) * index as u128 / count as u128) as u64;
    border(index)..border(index + 1)
}
