//! The terminal behind standard input: raw while the guest uses it, and restored afterwards, however the run ends.
//!
//! ```text
//!   returns, fails, panics ───────▶ dropped ──────────────────────┐
//!   SIGINT SIGTERM SIGHUP SIGQUIT ▶ the run ends as by Ctrl-C ────┼─▶ settings as before
//!   a second one of them ─────────▶ (the run hangs) ──────────────┘   and exit 130
//!   SIGCONT ──────────────────────▶ raw again: the shell has set its own mode
//! ```
//!
//! From the first terminal on, a thread in this module ends the process at the second signal, and no longer the
//! handler of [`Interrupts`], also while the report is written after the guest's end.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use parking_lot::{Mutex, MutexGuard};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use wideleaf_run::interrupts::Interrupts;

/// Exit code of a process that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

/// A terminal in raw mode until this is dropped.
pub(super) struct Terminal {
    modes: Arc<Modes>,
    /// Pending signals, until the thread handles them.
    signals: Option<Signals>,
    interrupts: Interrupts,
}

/// Settings, shared with the thread that handles the signals.
struct Modes(Mutex<Settings>);

struct Settings {
    before: Termios,
    /// Raw mode; `None` after the guest has released the terminal.
    raw: Option<Termios>,
}

impl Modes {
    /// Restores the original settings for good.
    fn restore(&self) {
        let mut settings = self.lock();
        settings.raw = None;
        set(&settings.before);
    }

    /// Sets raw mode again, if the guest uses the terminal.
    fn again(&self) {
        self.lock().raw.iter().for_each(set);
    }

    fn lock(&self) -> MutexGuard<'_, Settings> {
        self.0.lock()
    }
}

impl Terminal {
    /// Sets raw mode; `None` if standard input is not a terminal.
    pub(super) fn open(interrupts: &Interrupts) -> io::Result<Option<Terminal>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        // Lines of the program, and of guests that end them with a line feed alone, begin at the left.
        raw.output_flags = before.output_flags;
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCONT])?;
        let modes = Arc::new(Modes(Mutex::new(Settings { before, raw: Some(raw.clone()) })));
        // From now on the settings are changed, so a second signal waits for the thread.
        interrupts.leave_the_second_to_others();
        let terminal = Terminal { modes, signals: Some(signals), interrupts: interrupts.clone() };
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw)?;
        Ok(Some(terminal))
    }

    /// Handles the signals, also those since raw mode was set, in a thread that does `begin` first.
    pub(super) fn handle_signals(&mut self, begin: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let Some(signals) = self.signals.take() else { return Ok(()) };
        let (modes, interrupts) = (Arc::clone(&self.modes), self.interrupts.clone());
        let work = move || {
            begin();
            handle_signals(signals, &modes, &interrupts);
        };
        std::thread::Builder::new().name("terminal".into()).spawn(work).map(drop)
    }
}

/// Runs for as long as the process lives.
fn handle_signals(mut signals: Signals, modes: &Modes, interrupts: &Interrupts) {
    let mut is_second = false;
    for signal in signals.forever() {
        match signal {
            SIGCONT => modes.again(),
            _ if is_second => {
                modes.restore();
                signal_hook::low_level::exit(INTERRUPTED);
            }
            _ => {
                is_second = true;
                interrupts.flag().store(true, Ordering::Relaxed);
            }
        }
    }
}

/// At once: a terminal that takes no more output would delay the end.
fn set(settings: &Termios) {
    // The terminal may be gone.
    let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, settings);
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.modes.restore();
    }
}
