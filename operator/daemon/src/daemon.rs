//! The daemon from start to end: its parts in the order of their start, and the reverse order of their end.
//!
//! ```text
//!   socket bound ─▶ state read ─▶ metrics, requests ─▶ threads ─▶ READY=1 ─▶ signals ──▶ STOPPING=1 ─▶ sockets,
//!   (another one lives: end)                           │ tick                │ HUP: reload           threads, guests,
//!                                                      │ resume, then scout  │ TERM, INT: end        state
//! ```

use std::fs::{File, TryLockError};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::abort;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use wideleaf_control::server::ended_by;

use crate::config::{Config, ConfigFile};
use crate::engine::{Doors, Engine, Service, TICK_INTERVAL};
use crate::metrics::MetricsServer;
use crate::permissions::Access;
use crate::server::{Bound, ListenError};
use crate::state::{self, Loaded, State};

/// Reason for the daemon's failure.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The control socket or the metrics endpoint is not available.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The state can neither be read nor moved aside.
    #[error("cannot read the state in {}: {source}; run as root, or set another state.path", path.display())]
    State {
        /// Path of the state file.
        path: PathBuf,
        /// Error from the kernel.
        source: io::Error,
    },
    /// Another daemon holds the state.
    #[error("cannot open the state in {}: another wideleafd holds it; end it, or set another state.path", .0.display())]
    StateHeld(PathBuf),
    /// Signals cannot be handled.
    #[error("cannot handle signals: {0}")]
    Signals(io::Error),
}

/// Runs until a signal ends it. Guests stay as they are, and the state stays for the next daemon.
///
/// # Errors
/// [`RunError`]; nothing keeps running then.
pub fn run(config: Config, config_file: ConfigFile, doors: Doors) -> Result<(), RunError> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(RunError::Signals)?;
    let engine = Arc::new(Engine::new(doors, config.clone(), config_file));
    engine.begin();
    let access = Access::new(config.socket.group.clone());
    let bound = Bound::at(&config.socket, &access)?;
    let adopted = claimed_state(&config).and_then(|claim| {
        engine.adopt(earlier_state(&config)?);
        Ok((claim, start_metrics(&config, &engine)?))
    });
    let (_claim, metrics) = match adopted {
        Ok(adopted) => adopted,
        Err(error) => {
            bound.end();
            return Err(error);
        }
    };
    // Clients that have connected by now are answered from the earlier daemon's state.
    let server = bound.serve(Arc::new(Service::new(engine.clone(), access)));
    let stop = Arc::new(Stop::default());
    let threads = [("the tick", tick(&engine, &stop)), ("the scout", scout(&engine, &stop))];
    tracing::info!("wideleafd {} listens at {}", env!("CARGO_PKG_VERSION"), config.socket.path.display());
    notify(NotifyState::Ready);
    for signal in signals.forever() {
        if signal != SIGHUP {
            break;
        }
        reload(&engine);
    }
    notify(NotifyState::Stopping);
    stop.set();
    // Any part that has not ended by then waits for a process that hangs, or changes a pool. The next daemon finds
    // the result of that change.
    let until = Instant::now() + END_WITHIN;
    server.stop(until);
    metrics.into_iter().for_each(|metrics| metrics.stop(until));
    let ended = threads.into_iter().map(|(what, thread)| ended_by(what, thread, until));
    ended.flatten().for_each(|problem| tracing::warn!("{problem}"));
    engine.stop(until.saturating_duration_since(Instant::now()).max(SAVE_WITHIN));
    tracing::info!("wideleafd has ended; the guests are as they were");
    Ok(())
}

/// Time for requests under way to be answered and for threads to end: systemd kills a daemon that does not end, and
/// an operator waits for it.
const END_WITHIN: Duration = Duration::from_millis(600);

/// Least time that remains for saving the state and ending managers, which take less.
const SAVE_WITHIN: Duration = Duration::from_millis(300);

/// Runs in its own thread: a guest that hangs must not delay the daemon's end.
fn reload(engine: &Arc<Engine>) {
    let engine = Arc::clone(engine);
    let reload = move || {
        if let Err(error) = engine.reload() {
            tracing::error!("cannot reload: {error}; the earlier configuration stays in force");
        }
    };
    if let Err(error) = thread::Builder::new().name("reload".into()).spawn(reload) {
        tracing::error!("cannot read the configuration again: {error}");
    }
}

fn earlier_state(config: &Config) -> Result<State, RunError> {
    let path = &config.state.path;
    let at = |source| RunError::State { path: path.clone(), source };
    Ok(match state::load(path).map_err(at)? {
        Loaded::Known(state) => state,
        Loaded::Fresh => State::default(),
        Loaded::Damaged { aside, why } => {
            tracing::warn!(
                "cannot read the state ({why}): a new one begins, and the old one is kept as {}; its room in the \
                 pools stays: see `wideleaf pool list`",
                aside.display()
            );
            State::default()
        }
    })
}

/// Two daemons that write one state would each lose the other's changes, and the state is final only once the other
/// daemon has ended.
fn claimed_state(config: &Config) -> Result<File, RunError> {
    let path = config.state.path.clone();
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|source| RunError::State { path: path.clone(), source })?;
    }
    state::claim(&path).map_err(|error| match error {
        TryLockError::WouldBlock => RunError::StateHeld(path),
        TryLockError::Error(source) => RunError::State { path, source },
    })
}

fn start_metrics(config: &Config, engine: &Arc<Engine>) -> Result<Option<MetricsServer>, RunError> {
    let engine = engine.clone();
    let metrics = MetricsServer::start(&config.metrics, move || engine.scrape())?;
    if metrics.is_some() {
        tracing::info!("metrics are at {}", config.metrics.listen);
    }
    Ok(metrics)
}

/// Without a service manager this does nothing.
fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot notify systemd: {error}");
    }
}

fn tick(engine: &Arc<Engine>, stop: &Arc<Stop>) -> JoinHandle<()> {
    let (engine, stop) = (engine.clone(), stop.clone());
    thread::spawn(move || {
        or_abort("the tick", || {
            while !stop.wait(TICK_INTERVAL) {
                engine.tick(engine.now());
            }
        });
    })
}

fn scout(engine: &Arc<Engine>, stop: &Arc<Stop>) -> JoinHandle<()> {
    let (engine, stop) = (engine.clone(), stop.clone());
    thread::spawn(move || {
        or_abort("the scout", || {
            while let Err(error) = engine.resume() {
                tracing::error!("cannot take up earlier guests yet: {error}");
                if stop.wait(engine.scout_interval()) {
                    return;
                }
            }
            loop {
                engine.scout().unwrap_or_else(|error| tracing::error!("cannot look for guests: {error}"));
                engine.has_looked();
                if stop.wait(engine.scout_interval()) {
                    return;
                }
            }
        });
    })
}

/// A daemon that answers but manages nothing is worse than none. systemd starts another, which continues
/// from the state.
fn or_abort(what: &'static str, run: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(run)).is_err() {
        tracing::error!("{what} panicked and ends wideleafd: its message is above");
        abort();
    }
}

/// Whether threads should end, and a way to sleep until then.
#[derive(Default)]
struct Stop {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn set(&self) {
        *self.is_set.lock() = true;
        self.changed.notify_all();
    }

    /// Sleeps, and returns whether it is time to end.
    fn wait(&self, time: Duration) -> bool {
        let mut is_set = self.is_set.lock();
        self.changed.wait_while_for(&mut is_set, |is_set| !*is_set, time);
        *is_set
    }
}
