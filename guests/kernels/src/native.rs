//! The platform of an ordinary process: threads instead of vCPUs. Native runs are the baseline without a second
//! level of translation.

use std::boxed::Box;
use std::io::{self, Write as _};
use std::string::ToString as _;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use wideleaf_protocol::Message;

use crate::Platform;
use crate::team::{Team, ticks};

/// Receiver of the lines of a native run.
pub type Sink<'s> = Box<dyn FnMut(&Message<'_>) + Send + 's>;

/// Threads of this process as a platform. It exists inside [`run`].
pub struct Native<'s> {
    team: Team,
    vcpus: usize,
    tsc_hz: u64,
    sink: Mutex<Sink<'s>>,
}

impl Platform for Native<'_> {
    fn now(&self) -> u64 {
        ticks()
    }

    fn tsc_hz(&self) -> u64 {
        self.tsc_hz
    }

    fn vcpus(&self) -> usize {
        self.vcpus
    }

    fn emit(&self, message: &Message<'_>) {
        // A sink that has panicked is still the only place for the lines that follow.
        let mut sink = self.sink.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        sink(message);
    }

    fn run_on_all(&self, job: &(dyn Fn(usize) + Sync)) {
        self.team.lead(job);
    }
}

/// Runs `body` with a platform of `threads` threads, including the calling one, and ends them afterwards.
///
/// `tsc_hz` is the frequency of the time stamp counter, for instance from [`measure_tsc_hz`].
///
/// # Panics
/// Panics if `threads` is 0, and if `body` panics.
pub fn run<R>(threads: usize, tsc_hz: u64, sink: Sink<'_>, body: impl FnOnce(&Native<'_>) -> R) -> R {
    let native = Native { team: Team::new(), vcpus: threads, tsc_hz, sink: Mutex::new(sink) };
    native.team.set_members(threads);
    thread::scope(|scope| {
        for index in 1..threads {
            let team = &native.team;
            scope.spawn(move || team.follow(index));
        }
        // This dismisses the threads also if the body panics: the scope waits for them.
        let _dismissal = Dismissal(&native.team);
        body(&native)
    })
}

struct Dismissal<'t>(&'t Team);

impl Drop for Dismissal<'_> {
    fn drop(&mut self) {
        self.0.dismiss();
    }
}

/// A sink that prints every line on standard output, at once. A closed standard output is not an error.
pub fn print_lines() -> Sink<'static> {
    Box::new(|message| {
        let mut line = message.to_string();
        line.push('\n');
        let mut out = io::stdout().lock();
        let _ = out.write_all(line.as_bytes());
        let _ = out.flush();
    })
}

/// Frequency of the time stamp counter in Hz, measured against the monotonic clock over `span`. Good to about one
/// microsecond in `span`: 100 ms give 1 in 100,000.
pub fn measure_tsc_hz(span: Duration) -> u64 {
    let reading = || {
        let instant = Instant::now();
        (instant, ticks())
    };
    let (start_instant, start_ticks) = reading();
    thread::sleep(span);
    let (end_instant, end_ticks) = reading();
    let elapsed_ns = end_instant.duration_since(start_instant).as_nanos().max(1);
    let hz = u128::from(end_ticks.saturating_sub(start_ticks)) * 1_000_000_000 / elapsed_ns;
    u64::try_from(hz).unwrap_or(0)
}
