//! All VMs of the host, one budget, one view.
//!
//! ```text
//!   every second   tick    look at each VM · forget who ended · guarantees · one budget shared out · state saved
//!   every interval scout   guests that came: taken, if the configuration names them · rooms nobody came for: given back
//!   at any time    answer  requests.rs: from what the last tick saw, or by a change
//! ```
//!
//! The table of VMs is locked for moments only, and never while a guest is asked or told something: a monitor that does not answer
//! holds up who asked for that guest, and nobody else. The tick passes a guest over that somebody asks something meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use wideleaf_control::protocol::Settings;
use wideleaf_control::view::VmView;
use wideleaf_memory::deadline::{self, Questions};
use wideleaf_policies::Bytes;

use crate::config::{Config, ConfigError};
use crate::guests::{Care, Guests, ProcessId};
use crate::host_memory::HostMemoryWatch;
use crate::metrics::{Scrape, ScrapedVm};
use crate::rooms::{Pools, Room};
use crate::state::{self, Remembered, State};
use crate::usage;

mod comings;
mod looks;
mod metadata;
mod pool_rooms;
mod requests;
mod shares;
mod starting;
mod vm;

use looks::Looks;
pub use requests::Service;
use starting::Starting;
use vm::Vm;

/// How often every VM is looked at. Policies plan by themselves; this is for people, and for the budget.
pub const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// How often counters are written while they change. Fewer writes than that wear no disk, and nobody misses ten seconds of a
/// counter.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);

/// Guests that somebody detached are remembered so that they are not taken again; those that have ended are forgotten at the next
/// scouting, so this bounds only what one interval can bring.
const LEFT_MAX: usize = 4096;

/// The host, as far as the daemon asks it.
pub struct Doors {
    /// Its guests.
    pub guests: Arc<dyn Guests>,
    /// Its pools.
    pub pools: Box<dyn Pools>,
    /// How much memory is available; `None` where it can not be told.
    pub available: Box<dyn Fn() -> Option<Bytes> + Send + Sync>,
    /// Questions to guests' processes, each with a deadline.
    pub questions: Arc<Questions>,
}

/// The daemon without its sockets and threads.
pub struct Engine {
    doors: Doors,
    config_path: Option<PathBuf>,
    state_path: PathBuf,
    started: Instant,
    table: Mutex<Table>,
    saved: Mutex<Saved>,
    changing_pools: Mutex<()>,
    /// Held from when parts are made until all are told: what is told last is what was made last.
    sharing: Mutex<()>,
    looks: Arc<Looks>,
    starting: Starting,
}

/// What is in the state file.
enum Saved {
    /// What an earlier daemon left, which must not be overwritten before it is known.
    NotYetRead,
    /// Something older than what is known.
    Old,
    /// That.
    As(State),
}

/// What is known. Locked for moments.
struct Table {
    config: Config,
    vms: BTreeMap<ProcessId, Vm>,
    being_attached: BTreeSet<ProcessId>,
    left: BTreeSet<ProcessId>,
    /// Guests of an earlier daemon that are not taken up yet: they stay in the state until they are.
    pending: Vec<Remembered>,
    /// Those of them that did not answer when they were to be taken up.
    silent: BTreeSet<ProcessId>,
    /// Why guests could not be taken, as it was said last.
    refused: BTreeMap<ProcessId, String>,
    /// What is wrong in the metadata of domains that run all the same.
    mistakes: BTreeMap<ProcessId, Vec<String>>,
    rooms: Vec<Room>,
    host: HostMemoryWatch,
    saved_at: Duration,
}

impl Table {
    /// Whether libvirt has told of a domain of that name: one that is managed, or one that has room in a pool.
    fn has_domain(&self, name: &str) -> bool {
        let mut domains = self.vms.values().filter_map(|vm| vm.found.domain.as_deref());
        domains.any(|domain| domain == name) || self.rooms.iter().any(|room| room.domain == name)
    }

    /// What an earlier daemon knew of a guest that is not taken up again yet.
    fn remembered(&self, process: ProcessId) -> Option<Remembered> {
        self.pending.iter().find(|guest| guest.process == process).cloned()
    }
}

/// A guest that is looked after, for whoever wants to ask it something; `None` once it was left to itself.
type SharedCare = Arc<Mutex<Option<Box<dyn Care>>>>;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panicked did so in a guest's code or before a change: the table's own changes do not panic half way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Seconds since the epoch.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Engine {
    /// One that knows of no guest yet. `config_path` is where [`Engine::reload`] reads; `None`: there is no file, and the defaults hold.
    pub fn new(doors: Doors, config: Config, config_path: Option<PathBuf>) -> Engine {
        let state_path = config.state.path.clone();
        let table = Table {
            config,
            vms: BTreeMap::new(),
            being_attached: BTreeSet::new(),
            left: BTreeSet::new(),
            pending: Vec::new(),
            silent: BTreeSet::new(),
            refused: BTreeMap::new(),
            mistakes: BTreeMap::new(),
            rooms: Vec::new(),
            host: HostMemoryWatch::default(),
            saved_at: Duration::ZERO,
        };
        let looks = Arc::new(Looks::new(Arc::clone(&doors.questions)));
        Engine {
            doors,
            config_path,
            state_path,
            started: Instant::now(),
            table: Mutex::new(table),
            saved: Mutex::new(Saved::NotYetRead),
            changing_pools: Mutex::new(()),
            sharing: Mutex::new(()),
            looks,
            starting: Starting::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        locked(&self.table)
    }

    /// Time since it was made: the clock of [`Engine::tick`].
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// How long scouting may wait.
    pub fn scout_interval(&self) -> Duration {
        self.table().config.attach.interval
    }

    /// Learns what an earlier daemon knew: from then on its state may be overwritten. Once, before anything is asked of this one.
    pub fn adopt(&self, state: State) {
        let State { guests, left, rooms, mistakes, .. } = state;
        let mut table = self.table();
        table.left.extend(left);
        table.rooms.extend(rooms);
        table.mistakes.extend(mistakes);
        table.pending = guests;
        drop(table);
        *locked(&self.saved) = Saved::Old;
    }

    /// Looks at the host's memory before anything is asked.
    pub fn begin(&self) {
        self.watch_host();
    }

    /// What happens every second.
    pub fn tick(&self, now: Duration) {
        self.watch_host();
        let cares: Vec<(ProcessId, SharedCare)> =
            self.table().vms.iter().filter_map(|(process, vm)| Some((*process, vm.care()?))).collect();
        for (process, care) in cares {
            match told_if_free(&care, |care| (!care.has_ended()).then(|| care.view())) {
                Some(Some(view)) => self.see(process, view),
                Some(None) => self.bury(process),
                None => {}
            }
        }
        self.watch_guarantees(now);
        self.share_out();
        if now.saturating_sub(self.table().saved_at) >= SAVE_INTERVAL {
            self.table().saved_at = now;
            self.save();
        }
    }

    fn see(&self, process: ProcessId, view: VmView) {
        if let Some(vm) = self.table().vms.get_mut(&process) {
            vm.see(view);
            vm.count_activity();
        }
    }

    /// Reads the configuration again and tells every VM what has changed for it. Counters go on.
    ///
    /// # Errors
    /// What is wrong with the file; nothing is changed then.
    pub fn reload(&self) -> Result<(), ConfigError> {
        let config = self.config_path.as_deref().map_or(Ok(Config::default()), Config::read)?;
        let processes: Vec<ProcessId> = {
            let mut table = self.table();
            let is_elsewhere = config.socket != table.config.socket
                || config.metrics != table.config.metrics
                || config.state != table.config.state;
            if is_elsewhere {
                tracing::warn!("[socket], [metrics] and [state] are as they were until wideleafd is restarted");
            }
            table.config = config;
            table.vms.keys().copied().collect()
        };
        for process in processes {
            if let Err(error) = self.set(process, &Settings::default()) {
                tracing::warn!("pid {} stays as it was: {error}", process.pid);
            }
        }
        tracing::info!("the configuration was read again");
        Ok(())
    }

    /// Writes the state, if it has changed.
    fn save(&self) {
        if let Err(error) = self.write_state() {
            tracing::error!("{error}");
        }
    }

    /// The same; when it returns, the next daemon knows all that is known.
    fn write_state(&self) -> Result<(), String> {
        let mut saved = locked(&self.saved);
        let state = self.state();
        match &*saved {
            Saved::NotYetRead => return Err("what an earlier wideleafd left is not read yet: try again".into()),
            Saved::As(there) if *there == state => return Ok(()),
            Saved::Old | Saved::As(_) => {}
        }
        let at = |error| format!("cannot save the state in {}: {error}", self.state_path.display());
        state::save(&self.state_path, &state).map_err(at)?;
        *saved = Saved::As(state);
        Ok(())
    }

    fn state(&self) -> State {
        let table = self.table();
        let pending = table.pending.iter().filter(|guest| !table.vms.contains_key(&guest.process));
        State {
            version: state::VERSION,
            guests: table.vms.values().filter_map(Vm::remembered).chain(pending.cloned()).collect(),
            left: table.left.iter().take(LEFT_MAX).copied().collect(),
            rooms: table.rooms.clone(),
            mistakes: table.mistakes.iter().map(|(process, lines)| (*process, lines.clone())).collect(),
        }
    }

    /// Guests were looked for, and those of an earlier daemon taken up: from now on answers are whole.
    pub fn has_looked(&self) {
        self.starting.end();
    }

    /// Leaves all guests as they are, and keeps the state for the next daemon. Returns when `within` has passed at
    /// the latest: a manager
    /// whose guest hangs is left to the end of this process, which changes nothing for the guest.
    pub fn stop(self: &Arc<Self>, within: Duration) {
        let engine = Arc::clone(self);
        let until = Instant::now() + within;
        let is_done = deadline::leave_behind("ending", within, move || {
            engine.save();
            let vms = std::mem::take(&mut engine.table().vms);
            let left = || until.saturating_duration_since(Instant::now());
            let (ended, ends) = mpsc::channel();
            for care in vms.values().filter_map(Vm::care) {
                let ended = ended.clone();
                // Where there is no thread, the manager ends with this process.
                let _ = thread::Builder::new().name("leaving".into()).spawn(move || {
                    leave(&care);
                    let _ = ended.send(());
                });
            }
            drop(ended);
            while ends.recv_timeout(left()).is_ok() {}
        });
        if !is_done {
            tracing::warn!("some guests do not answer: their managers end with this process");
        }
    }

    /// What is known of every VM that is managed, as of the last tick.
    pub fn views(&self) -> Vec<VmView> {
        self.table().vms.values().map(Vm::view).collect()
    }

    /// What is scraped: of the last tick, so that it costs the same however the guests are.
    pub fn scrape(&self) -> Scrape {
        let scraped =
            |vm: &Vm| ScrapedVm { view: vm.view(), counted: vm.counted(), is_guarantee_met: !vm.is_guarantee_missed() };
        let vms = self.table().vms.values().map(scraped).collect();
        Scrape { vms, daemon: self.daemon_view(), resident: usage::resident(), pools: self.doors.pools.status() }
    }
}

/// Asks or tells a guest something; `None` where it was left to itself meanwhile.
fn told<T>(care: &SharedCare, tell: impl FnOnce(&mut (dyn Care + 'static)) -> T) -> Option<T> {
    locked(care).as_deref_mut().map(tell)
}

/// The same, for who looks after all guests and waits for none of them: `None` also where somebody else asks it something just now.
fn told_if_free<T>(care: &SharedCare, tell: impl FnOnce(&mut (dyn Care + 'static)) -> T) -> Option<T> {
    match care.try_lock() {
        Ok(mut care) => care.as_deref_mut().map(tell),
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().as_deref_mut().map(tell),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn leave(care: &SharedCare) {
    if let Some(care) = locked(care).take() {
        care.stop();
    }
}

#[cfg(test)]
mod tests;
