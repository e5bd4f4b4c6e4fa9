//! Ctrl-C and `SIGTERM` set a flag that every waiting loop checks; a second signal ends the process.
//!
//! ```text
//!   first signal ──▶ flag ─┬▶ checked in time: the command ends by itself and restores what it changed
//!                          └▶ not checked within GRACE: a call does not return (a hung file system) ─┬▶ undo,
//!   second signal ───────────────────────────────────────────────────────────────────────────────────┘  exit code 130
//! ```
//!
//! A thread does the actions on the right, because a signal handler may not. A run stops it before it enters its
//! sandbox, in which every thread must be restricted. From then on the second signal ends the process in its
//! handler.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use wideleaf_vmm::sys::signals::end_at_the_second_of;

use crate::failure::Failure;
use crate::undo;

const BOTH: [i32; 2] = [SIGINT, SIGTERM];

/// Time in which a command must check the flag. All waiting loops check it within a tenth of a second, and within
/// one second on a host with a load of 20.
const GRACE: Duration = Duration::from_secs(3);

/// Signals closer together than this count as one: timeout(1) sends each twice, to the process and to its group.
const ONE_WISH: Duration = Duration::from_millis(100);

/// Interval at which the thread checks whether the command has seen the flag.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Time limit for the last message: standard error may be a full pipe that is not read.
const WORDS: Duration = Duration::from_millis(200);

/// The interrupt flag, with its handlers.
#[derive(Clone, Debug)]
pub struct Interrupts {
    state: Arc<State>,
    /// Handlers that end the process at the second signal.
    at_once: Arc<Mutex<Vec<SigId>>>,
    watch: Arc<Mutex<Option<Watch>>>,
}

#[derive(Debug, Default)]
struct State {
    /// Whether a signal came.
    flag: Arc<AtomicBool>,
    /// Whether the command has seen the flag.
    is_noticed: AtomicBool,
    /// Whether the next signal ends the process in its handler.
    is_next_the_end: Arc<AtomicBool>,
    /// What the program says before a signal ends it.
    last_words: Option<LastWords>,
}

/// Says that a signal ends the program: the second signal (`true`), or the first while a call does not return.
pub type LastWords = fn(is_second: bool);

/// The watching thread, and the means to end it.
#[derive(Debug)]
struct Watch {
    handle: Handle,
    thread: JoinHandle<()>,
}

static OF_THIS_PROGRAM: OnceLock<Interrupts> = OnceLock::new();

impl Interrupts {
    /// Installs handlers for both signals, in a program that says nothing before a signal ends it.
    ///
    /// # Errors
    /// [`Failure::Host`] if the kernel refuses a handler or a thread.
    pub fn install() -> Result<Interrupts, Failure> {
        Interrupts::with_state(State::default())
    }

    /// Installs handlers for both signals.
    ///
    /// # Errors
    /// As [`Interrupts::install`].
    pub fn install_with(last_words: LastWords) -> Result<Interrupts, Failure> {
        Interrupts::with_state(State { last_words: Some(last_words), ..State::default() })
    }

    fn with_state(state: State) -> Result<Interrupts, Failure> {
        let interrupts = Interrupts { state: Arc::new(state), at_once: Arc::default(), watch: Arc::default() };
        interrupts.register().map_err(|error| Failure::Host(format!("cannot handle signals: {error}")))?;
        // The first stays: a program installs them once.
        let _ = OF_THIS_PROGRAM.set(interrupts.clone());
        Ok(interrupts)
    }

    /// Lets a closed terminal (`SIGHUP`) set the flag too, unless this program was started to ignore that, as by
    /// nohup(1). A second one does not end the process: a shell sends one, and the kernel another.
    ///
    /// # Errors
    /// As [`Interrupts::install`].
    pub fn also_at_hangup(self) -> Result<Interrupts, Failure> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if !is_ignored(SIGHUP, &status) {
            let flag = signal_hook::flag::register(SIGHUP, self.state.flag.clone());
            flag.map_err(|error| Failure::Host(format!("cannot handle signals: {error}")))?;
        }
        Ok(self)
    }

    /// The program's handlers; `None` while a signal ends it at once.
    pub fn of_this_program() -> Option<&'static Interrupts> {
        OF_THIS_PROGRAM.get()
    }

    /// Handlers run in the order of their registration, so the handler that ends the process sees the flag as the
    /// previous signal left it.
    fn register(&self) -> std::io::Result<()> {
        for signal in BOTH {
            let is_end = self.state.is_next_the_end.clone();
            let id = signal_hook::flag::register_conditional_shutdown(signal, Failure::INTERRUPTED, is_end)?;
            self.at_once.lock().push(id);
            signal_hook::flag::register(signal, self.state.flag.clone())?;
        }
        let signals = Signals::new(BOTH)?;
        let (handle, state) = (signals.handle(), self.state.clone());
        let thread = std::thread::Builder::new().name("signals".into()).spawn(move || watch(signals, &state))?;
        *self.watch.lock() = Some(Watch { handle, thread });
        Ok(())
    }

    /// From here on no thread ends the process for an unchecked flag: what follows may take a long time, or run in
    /// a sandbox. The second signal ends the process at once.
    pub fn stand_down(&self) {
        let Some(Watch { handle, thread }) = self.watch.lock().take() else {
            return;
        };
        handle.close();
        // The thread never panics.
        let _ = thread.join();
        // The first signal still only sets the flag.
        match end_at_the_second_of(&BOTH, Failure::INTERRUPTED) {
            Ok(handlers) => self.at_once.lock().extend(handlers),
            Err(error) => tracing::warn!("cannot let a second signal end the process: {error}"),
        }
        if self.state.flag.load(Ordering::Relaxed) {
            self.state.is_next_the_end.store(true, Ordering::Relaxed);
        }
    }

    /// Lets the next signal end the process: the remaining work is worth less than a prompt end, and nothing would
    /// be left behind.
    pub fn end_at_the_next(&self) {
        self.state.is_next_the_end.store(true, Ordering::Relaxed);
    }

    /// The second signal no longer ends the process: another handler does, after it has restored its state.
    pub fn leave_the_second_to_others(&self) {
        for id in self.at_once.lock().drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }

    /// Whether a signal came. Asking this keeps the thread from ending the command before it ends by itself.
    pub fn is_set(&self) -> bool {
        let is_set = self.state.flag.load(Ordering::Relaxed);
        if is_set {
            self.state.is_noticed.store(true, Ordering::Relaxed);
        }
        is_set
    }

    /// The flag itself, for a wait that checks nothing else.
    pub fn flag(&self) -> &AtomicBool {
        &self.state.flag
    }

    /// Returns an error if a signal came.
    ///
    /// # Errors
    /// [`Failure::Interrupted`] if so.
    pub fn check(&self) -> Result<(), Failure> {
        if self.is_set() { Err(Failure::Interrupted) } else { Ok(()) }
    }
}

/// Whether a process with this text in `/proc/PID/status` ignores the signal.
fn is_ignored(signal: i32, status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Watches until the command ends by itself, or is ended here.
fn watch(mut signals: Signals, state: &State) {
    let mut first: Option<Instant> = None;
    while !signals.handle().is_closed() {
        // It does not wait once there is a signal to check.
        let is_heard = if first.is_none() { signals.wait().count() } else { signals.pending().count() } > 0;
        let is_second = is_heard && first.is_some_and(|first| first.elapsed() > ONE_WISH);
        if is_heard && first.is_none() {
            first = Some(Instant::now());
        }
        let is_late =
            || first.is_some_and(|first| first.elapsed() > GRACE) && !state.is_noticed.load(Ordering::Relaxed);
        if is_second || is_late() {
            end(state, is_second);
        }
        if first.is_some() {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Undoes what can be undone, and ends the process whatever its other threads wait for.
fn end(state: &State, is_second: bool) -> ! {
    // In case this thread is held up as well.
    state.is_next_the_end.store(true, Ordering::Relaxed);
    undo::all();
    let last_words = state.last_words;
    let words = std::thread::Builder::new().spawn(move || last_words.iter().for_each(|say| say(is_second)));
    let began = Instant::now();
    while words.as_ref().is_ok_and(|words| !words.is_finished()) && began.elapsed() < WORDS {
        std::thread::sleep(LOOK_EVERY / 20);
    }
    signal_hook::low_level::exit(Failure::INTERRUPTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_ignored_if_its_bit_is_set() {
        let status = "SigBlk:\t0000000000000001\nSigIgn:\t0000000000001002\nSigCgt:\t0000000000000001\n";
        assert_eq!([SIGHUP, SIGINT, SIGTERM].map(|signal| is_ignored(signal, status)), [false, true, false]);
        assert!(!is_ignored(SIGHUP, ""));
    }
}
