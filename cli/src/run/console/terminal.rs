//! The terminal behind standard input: raw while the guest has it, and as it was afterwards, however that comes.
//!
//! ```text
//!   returns, fails, panics ───────▶ dropped ──────────────────────┐
//!   SIGINT SIGTERM SIGHUP SIGQUIT ▶ the run ends as by Ctrl-C ────┼─▶ settings as before
//!   a second one of them ─────────▶ (the run hangs) ──────────────┘   and exit 130
//!   SIGCONT ──────────────────────▶ raw again: a shell has set its own meanwhile
//! ```
//!
//! From the first terminal on it is a thread here, and no longer the handler of [`Interrupts`], that ends the process at the second signal; also
//! when the guest has gone and its report is being written.

use std::io::{self, IsTerminal};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::interrupts::Interrupts;

/// What a process that Ctrl-C ended exits with.
const INTERRUPTED: i32 = 130;

/// A terminal in raw mode until this is dropped.
pub(super) struct Terminal {
    modes: Arc<Modes>,
    /// Until somebody hears them.
    signals: Option<Signals>,
    interrupts: Interrupts,
}

/// Shared with the thread that hears the signals.
struct Modes(Mutex<Settings>);

struct Settings {
    before: Termios,
    /// `None` once the guest does not have it any more.
    raw: Option<Termios>,
}

impl Modes {
    /// As it was, for good.
    fn restore(&self) {
        let mut settings = self.lock();
        settings.raw = None;
        set(&settings.before);
    }

    /// Raw again, if the guest has it.
    fn again(&self) {
        self.lock().raw.iter().for_each(set);
    }

    fn lock(&self) -> MutexGuard<'_, Settings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Terminal {
    /// Makes it raw; `None` where standard input is no terminal.
    pub(super) fn open(interrupts: &Interrupts) -> io::Result<Option<Terminal>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        // Lines of ours, and of guests that end them with a line feed alone, begin at the left.
        raw.output_flags = before.output_flags;
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCONT])?;
        let modes = Arc::new(Modes(Mutex::new(Settings { before, raw: Some(raw.clone()) })));
        // From now on, for the settings are not as before: a second signal waits until it is heard.
        interrupts.leave_the_second_to_others();
        let terminal = Terminal { modes, signals: Some(signals), interrupts: interrupts.clone() };
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw)?;
        Ok(Some(terminal))
    }

    /// Hears the signals, also those that came since it was made raw, in a thread that does `begin` first.
    pub(super) fn hear(&mut self, begin: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let Some(signals) = self.signals.take() else { return Ok(()) };
        let (heard, told) = (Arc::clone(&self.modes), self.interrupts.clone());
        let work = move || {
            begin();
            hear(signals, &heard, &told);
        };
        std::thread::Builder::new().name("terminal".into()).spawn(work).map(drop)
    }
}

/// For as long as the process lives.
fn hear(mut signals: Signals, modes: &Modes, interrupts: &Interrupts) {
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

/// At once: a terminal that takes no output any more would hold up the end.
fn set(settings: &Termios) {
    // It may be gone.
    let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, settings);
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.modes.restore();
    }
}
