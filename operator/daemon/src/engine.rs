//! All VMs of the host under one budget.
//!
//! ```text
//!   every second   tick    view of each VM · ended ones removed · guarantees · budget shared · state saved
//!   every interval scout   new guests: taken, if the configuration names them · abandoned rooms: given back
//!   at any time    answer  requests.rs: from the last tick's views, or by a change
//! ```
//!
//! The table of VMs is locked for moments only, and never during a call to a guest. A monitor that does not answer
//! delays only the clients that asked for its guest. The tick skips a guest that is busy with another request.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex, MutexGuard};
use wideleaf_control::protocol::{ASK_AGAIN, Settings};
use wideleaf_control::view::VmView;
use wideleaf_memory::deadline::{self, Questions};
use wideleaf_policies::Bytes;

use crate::block_supply::Supply;
use crate::config::{Config, ConfigError, ConfigFile, Wanted};
use crate::guests::{Care, Found, Guests, ProcessId, WindowCounts};
use crate::host_memory::HostMemoryWatch;
use crate::metrics::{Scrape, ScrapedVm};
use crate::pool_reservations::{Pools, Room};
use crate::state::{self, Remembered, State};
use crate::usage;

mod kept_view;
mod left_alone;
mod lifecycle;
mod market;
mod metadata;
mod offer;
mod promotable;
mod reported;
mod requests;
mod reservations;
mod shares;
mod starting;
mod supplying;
mod surveys;
mod vm;

use market::Market;
use offer::Offer;
use promotable::Promotable;
pub use requests::Service;
use starting::Starting;
use surveys::Surveys;
use vm::Vm;

/// Interval between views of every VM. Policies plan by themselves; this is for people, and for the budget.
pub const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between writes of changing counters. It is long enough not to wear a disk, and at most ten seconds of a
/// counter are lost.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);

/// Upper bound on the detached guests that are remembered, so that they are not taken again. Each scouting forgets
/// those that have ended, so this bounds only those of one interval.
const LEFT_MAX: usize = 4096;

/// The host as the daemon accesses it.
pub struct Doors {
    /// Guests of the host.
    pub guests: Arc<dyn Guests>,
    /// Hugetlb pools of the host.
    pub pools: Box<dyn Pools>,
    /// Available memory of the host, in bytes; `None` where it is unknown.
    pub available: Box<dyn Fn() -> Option<Bytes> + Send + Sync>,
    /// Maker of free blocks of 2 MiB.
    pub supply: Arc<dyn Supply>,
    /// Questions to guests' processes, each with a deadline.
    pub questions: Arc<Questions>,
}

/// The daemon without its sockets and threads.
pub struct Engine {
    doors: Doors,
    config_file: ConfigFile,
    state_path: PathBuf,
    started: Instant,
    // A panic happens in a guest's code or before a change: the table's own changes do not panic half way.
    table: Mutex<Table>,
    saved: Mutex<Saved>,
    changing_pools: Mutex<()>,
    /// Held from the computation of the shares until all managers have them: the last ones sent are the
    /// last ones computed.
    sharing: Mutex<()>,
    looks: Arc<Surveys>,
    /// A registered VM has reported; waited for with the table.
    reported: Condvar,
    /// An attach has ended, with or without success; waited for with the table.
    attach_ended: Condvar,
    starting: Starting,
    promotable: Mutex<Promotable>,
}

/// Relation of the state file to the table.
enum Saved {
    /// The file has an earlier daemon's state, which must not be overwritten before it is read.
    NotYetRead,
    /// The file is older than the table.
    Old,
    /// The file has this state.
    As(State),
    /// The file has the last state of this daemon, which is ending.
    Final,
}

/// The daemon's knowledge, locked for moments.
struct Table {
    config: Config,
    vms: BTreeMap<ProcessId, Vm>,
    being_attached: BTreeSet<ProcessId>,
    left: BTreeSet<ProcessId>,
    /// Guests of an earlier daemon that are not taken up yet. They stay in the state until they are.
    pending: Vec<Remembered>,
    /// Those among them that did not answer, or could not be taken up: they are tried again at each look.
    postponed: BTreeSet<ProcessId>,
    /// Reasons why guests could not be taken, as last logged.
    refused: BTreeMap<ProcessId, String>,
    /// Mistakes in the metadata of running domains.
    mistakes: BTreeMap<ProcessId, Vec<String>>,
    /// Nova's flavors of running domains, which rules of the configuration may name.
    flavors: BTreeMap<ProcessId, String>,
    /// Settings of registered VMs over the socket: a VM may register again, also with another daemon.
    registered: BTreeMap<ProcessId, Settings>,
    rooms: Vec<Room>,
    host: HostMemoryWatch,
    market: Market,
    /// Number of free blocks that `/proc/buddyinfo` does not count and that managers were told of.
    known_unseen: u64,
    /// Latest second at which a window waited for a huge page; `None`: none has.
    waited_at: Option<Duration>,
    saved_at: Duration,
}

impl Table {
    /// Whether libvirt has reported a domain of that name: one that is managed, or one with room in a pool.
    fn has_domain(&self, name: &str) -> bool {
        let mut domains = self.vms.values().filter_map(|vm| vm.found.domain.as_deref());
        domains.any(|domain| domain == name) || self.rooms.iter().any(|room| room.domain == name)
    }

    /// Whether an earlier daemon managed the guest, and this one could not take it up when it tried.
    fn cannot_take_up(&self, process: ProcessId) -> bool {
        self.remembered(process).is_some() && self.refused.contains_key(&process)
    }

    /// An earlier daemon's record of a guest that is not taken up again yet.
    fn remembered(&self, process: ProcessId) -> Option<Remembered> {
        self.pending.iter().find(|guest| guest.process == process).cloned()
    }

    /// Effective settings of a guest with `said`, its settings over the socket.
    fn wanted(&self, found: &Found, said: &Settings) -> Result<Wanted, String> {
        let flavor = self.flavors.get(&found.process).map(String::as_str);
        self.config.wanted(&found.believed_name(), flavor, said)
    }
}

/// A managed guest, shared by the threads that call it; `None` once it was detached.
type SharedCare = Arc<Mutex<Option<Box<dyn Care>>>>;

/// Present time in seconds since the epoch.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Engine {
    /// An engine without guests. [`Engine::reload`] reads `config_file`.
    pub fn new(doors: Doors, config: Config, config_file: ConfigFile) -> Engine {
        let state_path = config.state.path.clone();
        let table = Table {
            config,
            vms: BTreeMap::new(),
            being_attached: BTreeSet::new(),
            left: BTreeSet::new(),
            pending: Vec::new(),
            postponed: BTreeSet::new(),
            refused: BTreeMap::new(),
            mistakes: BTreeMap::new(),
            flavors: BTreeMap::new(),
            registered: BTreeMap::new(),
            rooms: Vec::new(),
            host: HostMemoryWatch::default(),
            market: Market::default(),
            known_unseen: 0,
            waited_at: None,
            saved_at: Duration::ZERO,
        };
        let looks = Arc::new(Surveys::new(Arc::clone(&doors.questions)));
        Engine {
            doors,
            config_file,
            state_path,
            started: Instant::now(),
            table: Mutex::new(table),
            saved: Mutex::new(Saved::NotYetRead),
            changing_pools: Mutex::new(()),
            sharing: Mutex::new(()),
            looks,
            reported: Condvar::new(),
            attach_ended: Condvar::new(),
            starting: Starting::default(),
            promotable: Mutex::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Time since its creation: the clock of [`Engine::tick`].
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Longest pause between scoutings.
    pub fn scout_interval(&self) -> Duration {
        self.table().config.attach.interval
    }

    /// Takes over an earlier daemon's state, which may be overwritten from then on. It is called once,
    /// before any request.
    pub fn adopt(&self, state: State) {
        let State { guests, left, rooms, mistakes, flavors, registered, .. } = state;
        let mut table = self.table();
        table.left.extend(left);
        table.rooms.extend(rooms);
        table.mistakes.extend(mistakes);
        table.flavors.extend(flavors);
        table.registered.extend(registered);
        table.pending = guests;
        drop(table);
        *self.saved.lock() = Saved::Old;
    }

    /// Measures the host's memory before the first request.
    pub fn begin(&self) {
        self.watch_host();
    }

    /// Work of every second.
    pub fn tick(&self, now: Duration) {
        self.watch_host();
        let cares: Vec<(ProcessId, SharedCare)> =
            self.table().vms.iter().filter_map(|(process, vm)| Some((*process, vm.care()?))).collect();
        for (process, care) in cares {
            let look = |care: &mut (dyn Care + 'static)| {
                let bids = care.bids().as_ref().map(Offer::from);
                (care.view(), care.counts(), bids)
            };
            match told_if_free(&care, |care| (!care.has_ended()).then(|| look(care))) {
                Some(Some((view, counts, offer))) => self.see(process, view, counts, offer),
                Some(None) => self.bury(process),
                None => {}
            }
        }
        self.end_of_leaving_alone(Instant::now());
        self.table().vms.values_mut().for_each(Vm::count_activity);
        self.watch_guarantees(now);
        self.pursue_guarantees();
        self.share_out();
        self.clear_market(now);
        self.want_blocks(now);
        if now.saturating_sub(self.table().saved_at) >= SAVE_INTERVAL {
            self.table().saved_at = now;
            self.save();
        }
    }

    fn see(&self, process: ProcessId, view: VmView, counts: WindowCounts, offer: Option<Offer>) {
        if let Some(vm) = self.table().vms.get_mut(&process) {
            vm.see(view);
            (vm.counts, vm.offer) = (counts, offer);
        }
    }

    /// Reads the configuration again and applies changes to every VM. Counters continue.
    ///
    /// # Errors
    /// The mistake in the file; nothing is changed then.
    pub fn reload(&self) -> Result<(), ConfigError> {
        let read = self.config_file.read()?;
        let processes: Vec<ProcessId> = {
            let mut table = self.table();
            // Those that this daemon started with.
            let Config { socket, metrics, state, .. } = table.config.clone();
            let config = Config { socket, metrics, state, ..read.clone() };
            if (&read.socket, &read.metrics, &read.state) != (&config.socket, &config.metrics, &config.state) {
                tracing::warn!("[socket], [metrics] and [state] stay as they were: restart wideleafd to change them");
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

    /// Writes the state if it has changed, and logs an error.
    fn save(&self) {
        if let Err(error) = self.write_state() {
            tracing::error!("{error}");
        }
    }

    /// Writes the state if it has changed. When it returns, the next daemon knows all of the state.
    fn write_state(&self) -> Result<(), String> {
        let mut saved = self.saved.lock();
        let state = self.state();
        match &*saved {
            Saved::NotYetRead => return Err("the state of an earlier wideleafd is not read yet: try again".into()),
            Saved::Final => return Err(format!("wideleafd is ending: {ASK_AGAIN}")),
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
            flavors: table.flavors.iter().map(|(process, flavor)| (*process, flavor.clone())).collect(),
            registered: table.registered.iter().map(|(process, said)| (*process, said.clone())).collect(),
        }
    }

    /// Called after the first scan for guests, with those of an earlier daemon taken up: from now on
    /// answers are complete.
    pub fn has_looked(&self) {
        self.starting.end();
    }

    /// Leaves all guests as they are, and keeps the state for the next daemon. It returns after at most `within`. A
    /// manager with a guest that hangs ends with this process, which changes nothing for the guest.
    pub fn stop(self: &Arc<Self>, within: Duration) {
        let engine = Arc::clone(self);
        let until = Instant::now() + within;
        let is_done = deadline::leave_behind("ending", within, move || {
            engine.save();
            // A thread that is late would save a table without guests.
            *engine.saved.lock() = Saved::Final;
            let vms = std::mem::take(&mut engine.table().vms);
            let left = || until.saturating_duration_since(Instant::now());
            let (ended, ends) = mpsc::channel();
            for care in vms.values().filter_map(Vm::care) {
                let ended = ended.clone();
                // Without a thread the manager ends with this process.
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

    /// View of every managed VM, as of the last tick.
    pub fn views(&self) -> Vec<VmView> {
        self.table().vms.values().map(Vm::view).collect()
    }

    /// Data of a scrape, from the last tick, so that its cost does not depend on the guests.
    pub fn scrape(&self) -> Scrape {
        let scraped = |vm: &Vm| ScrapedVm {
            view: vm.view(),
            counted: vm.counted(),
            windows: vm.windows_by_reason(),
            is_guarantee_met: !vm.is_guarantee_missed(),
            is_guarantee_pursued: vm.is_pursued(),
        };
        let (vms, huge_page_price) = {
            let table = self.table();
            (table.vms.values().map(scraped).collect(), table.market.price())
        };
        let (daemon, pools, supply) = (self.daemon_view(), self.doors.pools.status(), self.doors.supply.report());
        Scrape { vms, daemon, resident: usage::resident(), pools, huge_page_price, supply }
    }
}

/// Calls a guest; `None` where it was detached in between.
fn told<T>(care: &SharedCare, tell: impl FnOnce(&mut (dyn Care + 'static)) -> T) -> Option<T> {
    care.lock().as_deref_mut().map(tell)
}

/// As [`told`], for the tick, which waits for no guest: `None` also where another thread calls it now.
fn told_if_free<T>(care: &SharedCare, tell: impl FnOnce(&mut (dyn Care + 'static)) -> T) -> Option<T> {
    care.try_lock()?.as_deref_mut().map(tell)
}

fn leave(care: &SharedCare) {
    if let Some(care) = care.lock().take() {
        care.stop();
    }
}

#[cfg(test)]
mod tests;
