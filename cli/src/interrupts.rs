//! Ctrl-C and `SIGTERM` set a flag that everything that waits looks at; a second one ends the process.
//!
//! ```text
//!   first signal ──▶ flag ──▶ looked at in time: the command ends by itself, and puts right what it changed
//!                      └────▶ not looked at within GRACE: a call does not return (a file system that hangs) ─┐
//!   second signal ───────────────────────────────────────────────────────────────────────────────────────────┴▶ undo, exit code 130
//! ```
//!
//! A thread does what is on the right: a handler may not. A run stands it down before it enters its sandbox, in which
//! no thread may be that is not restricted; from there on the second signal ends the process in its handler.

use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use wideleaf_vmm::sys::signals::end_at_the_second_of;

use crate::failure::Failure;
use crate::output::say;
use crate::{stderr, undo};

const BOTH: [i32; 2] = [SIGINT, SIGTERM];

/// How long a command has to look at the flag. All that wait do so within a tenth of a second; on a host with a load
/// of 20 within one.
const GRACE: Duration = Duration::from_secs(3);

/// Signals that come together are one: timeout(1) sends each twice, to the process and to its group.
const ONE_WISH: Duration = Duration::from_millis(100);

/// How often the thread looks whether the command has.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long the last words may take: standard error may be a pipe that its reader leaves full.
const WORDS: Duration = Duration::from_millis(200);

/// The flag.
#[derive(Clone, Debug)]
pub struct Interrupts {
    state: Arc<State>,
    /// What ends the process at the second signal.
    at_once: Arc<Mutex<Vec<SigId>>>,
    watch: Arc<Mutex<Option<Watch>>>,
}

#[derive(Debug, Default)]
struct State {
    /// A signal came.
    flag: Arc<AtomicBool>,
    /// The command has seen that.
    is_noticed: AtomicBool,
    /// The next signal ends the process in its handler.
    is_next_the_end: Arc<AtomicBool>,
}

/// The thread, and how it is told to end.
#[derive(Debug)]
struct Watch {
    handle: Handle,
    thread: JoinHandle<()>,
}

static OF_THIS_PROGRAM: OnceLock<Interrupts> = OnceLock::new();

impl Interrupts {
    /// Takes over both signals.
    ///
    /// # Errors
    /// [`Failure::Host`] where the kernel refuses a handler or a thread.
    pub fn install() -> Result<Interrupts, Failure> {
        let interrupts = Interrupts { state: Arc::default(), at_once: Arc::default(), watch: Arc::default() };
        interrupts.register().map_err(|error| Failure::Host(format!("cannot handle signals: {error}")))?;
        // The first stays: a program takes them over once.
        let _ = OF_THIS_PROGRAM.set(interrupts.clone());
        Ok(interrupts)
    }

    /// Those that this program has taken over; `None` while a signal ends it at once.
    pub(crate) fn of_this_program() -> Option<&'static Interrupts> {
        OF_THIS_PROGRAM.get()
    }

    /// Handlers run in the order in which they are registered: what ends the process sees the flag as the signal
    /// before left it.
    fn register(&self) -> std::io::Result<()> {
        for signal in BOTH {
            let is_end = self.state.is_next_the_end.clone();
            let id = signal_hook::flag::register_conditional_shutdown(signal, Failure::INTERRUPTED, is_end)?;
            self.at_once.lock().unwrap_or_else(PoisonError::into_inner).push(id);
            signal_hook::flag::register(signal, self.state.flag.clone())?;
        }
        let signals = Signals::new(BOTH)?;
        let (handle, state) = (signals.handle(), self.state.clone());
        let thread = std::thread::Builder::new().name("signals".into()).spawn(move || watch(signals, &state))?;
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(Watch { handle, thread });
        Ok(())
    }

    /// From here on no thread ends the process for a flag that is not looked at: what follows may take as long as it
    /// takes, or be in a sandbox. The second signal ends it at once.
    pub(crate) fn stand_down(&self) {
        let Some(Watch { handle, thread }) = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        handle.close();
        // It panics nowhere.
        let _ = thread.join();
        // The first signal still only sets the flag.
        match end_at_the_second_of(&BOTH, Failure::INTERRUPTED) {
            Ok(handlers) => self.at_once.lock().unwrap_or_else(PoisonError::into_inner).extend(handlers),
            Err(error) => tracing::warn!("a second signal will not end the process: {error}"),
        }
        if self.state.flag.load(Ordering::Relaxed) {
            self.state.is_next_the_end.store(true, Ordering::Relaxed);
        }
    }

    /// The next signal ends the process: what is left to do is worth less than an end, and nothing would be left
    /// behind.
    pub(crate) fn end_at_the_next(&self) {
        self.state.is_next_the_end.store(true, Ordering::Relaxed);
    }

    /// The second signal no longer ends the process: another handler does, which has something to put right before.
    pub(crate) fn leave_the_second_to_others(&self) {
        for id in self.at_once.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }

    /// Whether a signal asked for the end. Asking this is what keeps the command from being ended before it ends by
    /// itself.
    pub fn is_set(&self) -> bool {
        let is_set = self.state.flag.load(Ordering::Relaxed);
        if is_set {
            self.state.is_noticed.store(true, Ordering::Relaxed);
        }
        is_set
    }

    /// The flag itself, for a wait that looks at nothing else.
    pub fn flag(&self) -> &AtomicBool {
        &self.state.flag
    }

    /// An error if so.
    ///
    /// # Errors
    /// [`Failure::Interrupted`].
    pub fn check(&self) -> Result<(), Failure> {
        if self.is_set() { Err(Failure::Interrupted) } else { Ok(()) }
    }
}

/// Until the command ends by itself, or is ended here.
fn watch(mut signals: Signals, state: &State) {
    let mut first: Option<Instant> = None;
    while !signals.handle().is_closed() {
        // Without waiting once there is something to look at.
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
    // Should this thread be held up as well.
    state.is_next_the_end.store(true, Ordering::Relaxed);
    undo::all();
    let why = if is_second { "" } else { " in a call that does not return: a file system or a device does not answer" };
    let words = std::thread::Builder::new().spawn(move || {
        // A person who pressed Ctrl-C twice knows it.
        if !(is_second && std::io::stderr().is_terminal()) {
            say(format_args!("wideleaf: interrupted{why}"));
            stderr::end();
        }
    });
    let began = Instant::now();
    while words.as_ref().is_ok_and(|words| !words.is_finished()) && began.elapsed() < WORDS {
        std::thread::sleep(LOOK_EVERY / 20);
    }
    signal_hook::low_level::exit(Failure::INTERRUPTED)
}
