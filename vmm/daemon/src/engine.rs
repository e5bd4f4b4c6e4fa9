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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{VmView, Vmm, WorkView};
use wideleaf_memory::panicked::caught;
use wideleaf_policies::{BudgetLimits, Bytes};

use crate::config::{Config, ConfigError, Wanted};
use crate::guarantee::GuaranteeEvent;
use crate::guests::{Care, Found, Guests, ProcessId};
use crate::host_memory::HostMemoryWatch;
use crate::metrics::{Scrape, ScrapedVm};
use crate::rooms::{Pools, Room};
use crate::share;
use crate::state::{self, Remembered, State};
use crate::usage;

mod looks;
mod pool_rooms;
mod requests;
mod vm;

use looks::Looks;
pub use requests::Service;
use vm::{Hands, Vm};

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
    /// Why guests could not be taken, as it was said last.
    refused: BTreeMap<ProcessId, String>,
    rooms: Vec<Room>,
    host: HostMemoryWatch,
    saved_at: Duration,
}

impl Table {
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
            refused: BTreeMap::new(),
            rooms: Vec::new(),
            host: HostMemoryWatch::default(),
            saved_at: Duration::ZERO,
        };
        Engine {
            doors,
            config_path,
            state_path,
            started: Instant::now(),
            table: Mutex::new(table),
            saved: Mutex::new(Saved::NotYetRead),
            changing_pools: Mutex::new(()),
            sharing: Mutex::new(()),
            looks: Arc::default(),
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
        let State { guests, left, rooms, .. } = state;
        let mut table = self.table();
        table.left.extend(left);
        table.rooms.extend(rooms);
        table.pending = guests;
        drop(table);
        *locked(&self.saved) = Saved::Old;
    }

    /// Takes up what it left: guests that are still the same process, and room in the pools.
    ///
    /// # Errors
    /// Where nobody can tell which guests run; nothing is taken up or forgotten then.
    pub fn resume(&self) -> Result<(), String> {
        let running = self.doors.guests.find()?;
        let pending = self.table().pending.clone();
        for Remembered { process, name, said, work } in pending {
            // Whoever asked meanwhile has settled it.
            let is_settled = !self.table().pending.iter().any(|pending| pending.process == process);
            match running.iter().find(|found| found.process == process) {
                _ if is_settled => {}
                Some(found) => self.take_or_warn(found, said, work),
                None => tracing::info!("{name} (pid {}) has ended meanwhile", process.pid),
            }
            self.table().pending.retain(|pending| pending.process != process);
        }
        let given_back = self.give_back_abandoned();
        self.save();
        given_back
    }

    /// A refusal is a line in the log, once: the next scouting tries again.
    fn take_or_warn(&self, found: &Found, said: Settings, work: WorkView) {
        let refusal = self.take(found, said, work).err();
        let mut table = self.table();
        let before = match &refusal {
            Some(error) => table.refused.insert(found.process, error.clone()),
            None => table.refused.remove(&found.process),
        };
        if let Some(error) = refusal.filter(|error| before.as_ref() != Some(error)) {
            tracing::warn!("{} (pid {}) is not managed: {error}", found.name, found.process.pid);
        }
    }

    /// Takes a guest under management, which may take seconds. One that is managed already is told what was said, and stays.
    fn take(&self, found: &Found, said: Settings, before: WorkView) -> Result<(), String> {
        if found.vmm == Vmm::Wideleaf {
            return Err("it is run by `wideleaf run`, which has a manager of its own".into());
        }
        let wanted = {
            let mut table = self.table();
            if table.vms.contains_key(&found.process) {
                drop(table);
                return self.set(found.process, &said);
            }
            let wanted = table.config.wanted(&found.believed_name(), &said)?;
            if !table.being_attached.insert(found.process) {
                return Err("it is being attached already".into());
            }
            wanted
        };
        self.attach_as(found, said, wanted, before)
    }

    /// Attaches a guest that is noted as being attached, and puts it on the table.
    fn attach_as(&self, found: &Found, said: Settings, wanted: Wanted, before: WorkView) -> Result<(), String> {
        // Whatever a guest shows of itself that nobody thought of, it can be tried again.
        let taken = caught(|| {
            let mut care = self.doors.guests.attach(found, &wanted)?;
            let view = care.view();
            Ok(Vm::new(found.clone(), said, wanted, before, Hands::Attached(Arc::new(Mutex::new(Some(care)))), view))
        });
        let taken = taken.unwrap_or_else(|panicked| Err(format!("attaching it {panicked}")));
        let mut table = self.table();
        table.being_attached.remove(&found.process);
        let vm = taken?;
        tracing::info!("{} (pid {}) is managed: policy {}", vm.found.name, vm.found.process.pid, vm.wanted.policy);
        table.left.remove(&found.process);
        table.rooms.iter_mut().filter(|room| room.belongs_to(found)).for_each(|room| room.start(found.process));
        table.vms.insert(found.process, vm);
        drop(table);
        self.share_out();
        Ok(())
    }

    /// Attaches a guest anew, where that is what it takes for what is `said` to hold: its monitor, and whether shared memory may be collapsed,
    /// are settled when a guest is attached. Counters go on. Says whether it did; where the guest can not be attached like that, it is
    /// attached as it was.
    fn take_anew(&self, found: &Found, said: &Settings) -> Result<bool, String> {
        let (wanted, vm, key, earlier) = {
            let mut table = self.table();
            let Some(vm) = table.vms.get(&found.process) else { return Ok(false) };
            let (Some(key), Some(earlier)) = (vm.settled_otherwise(said), vm.remembered()) else { return Ok(false) };
            let wanted = table.config.wanted(&vm.found.believed_name(), said)?;
            if !table.being_attached.insert(found.process) {
                return Err("it is being attached already".into());
            }
            // A daemon that is killed now is followed by one that takes it up.
            table.pending.push(earlier.clone());
            (wanted, table.vms.remove(&found.process), key, earlier)
        };
        tracing::info!("{} (pid {}) is attached anew, for its {key}", found.name, found.process.pid);
        let was = vm.as_ref().map(|vm| vm.wanted.clone());
        vm.as_ref().and_then(Vm::care).iter().for_each(leave);
        let attached = self.attach_as(found, said.clone(), wanted, earlier.work.clone());
        if let (Err(error), Some(was)) = (&attached, was) {
            tracing::warn!("{} (pid {}) is attached as it was: {error}", found.name, found.process.pid);
            self.table().being_attached.insert(found.process);
            let again = self.attach_as(found, earlier.said, was, earlier.work);
            again.unwrap_or_else(|error| tracing::warn!("{} is not managed any more: {error}", found.name));
        }
        self.table().pending.retain(|guest| guest.process != found.process);
        attached.map(|()| true)
    }

    /// Changes what is said of a VM. What it can not be is refused, and all stays as it was.
    fn set(&self, process: ProcessId, changes: &Settings) -> Result<(), String> {
        let (said, wanted, care) = {
            let table = self.table();
            let vm = table.vms.get(&process).ok_or("it has just ended")?;
            let said = vm::merged(&vm.said, changes);
            let wanted = vm.keeping_settled(changes, table.config.wanted(&vm.found.believed_name(), &said)?)?;
            if (&vm.said, &vm.wanted) == (&said, &wanted) {
                return Ok(());
            }
            (said, wanted, vm.care())
        };
        if let Some(care) = care {
            told(&care, |care| care.apply(&wanted)).unwrap_or(Err("it has just ended".into()))?;
        }
        if let Some(vm) = self.table().vms.get_mut(&process) {
            tracing::info!("{} is set: policy {}, guarantee {}", vm.found.name, wanted.policy, wanted.guarantee);
            vm.said = said;
            vm.wanted = wanted;
        }
        self.refresh(process);
        self.share_out();
        Ok(())
    }

    /// Looks at one VM now, so that who changed it sees the change.
    fn refresh(&self, process: ProcessId) {
        let care = self.table().vms.get(&process).and_then(Vm::care);
        let view = care.and_then(|care| told(&care, |care| care.view()));
        if let (Some(view), Some(vm)) = (view, self.table().vms.get_mut(&process)) {
            vm.see(view);
        }
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

    fn watch_host(&self) {
        let available = (self.doors.available)();
        let mut table = self.table();
        let was_short = table.host.is_short;
        let Table { host, config, .. } = &mut *table;
        host.update(available, &config.host);
        match (was_short, host.is_short) {
            (false, true) => {
                tracing::warn!("the host is short of memory ({} available): nothing grows", host.available)
            }
            (true, false) => tracing::info!("the host has memory again ({} available)", host.available),
            _ => {}
        }
    }

    fn watch_guarantees(&self, now: Duration) {
        let mut missed = Vec::new();
        let mut table = self.table();
        let grace = table.config.defaults.grace;
        for (process, vm) in &mut table.vms {
            match vm.watch_guarantee(now, grace) {
                Some(GuaranteeEvent::Missed) => missed.push((*process, vm.care())),
                Some(GuaranteeEvent::MetAgain) => {
                    vm.missed_because = None;
                    tracing::info!("{} has its guarantee of {} again", vm.found.name, vm.wanted.guarantee);
                }
                None => {}
            }
        }
        drop(table);
        for (process, care) in missed {
            let explanation = care.as_ref().and_then(|care| told_if_free(care, |care| care.explain()));
            let reason = match explanation.map(|explanation| explanation.reasons.into_iter().next()) {
                Some(Some(reason)) => format!("{} windows: {}", reason.windows, reason.text),
                None if care.is_some() => "ask `wideleaf explain`, it was busy just now".to_owned(),
                _ => "only its own process knows why".to_owned(),
            };
            if let Some(vm) = self.table().vms.get_mut(&process) {
                tracing::warn!("{} is under its guarantee of {}: {reason}", vm.found.name, vm.wanted.guarantee);
                vm.missed_because = Some(reason);
            }
        }
    }

    /// Gives each VM its part of the budget, and says whether it may grow. Only who gets something new is told; who is busy is told by
    /// the next tick.
    fn share_out(&self) {
        let _one_at_a_time = locked(&self.sharing);
        let mut told_so: Vec<(ProcessId, SharedCare, BudgetLimits, bool)> = Vec::new();
        let mut table = self.table();
        let claims: Vec<share::Claim> = table.vms.values().map(Vm::claim).collect();
        let parts = share::parts(table.config.budget.limits(), &claims);
        let is_short = table.host.is_short;
        for ((process, vm), limits) in table.vms.iter_mut().zip(parts) {
            let may_grow = !is_short && !vm.is_bloated();
            if (vm.limits, vm.may_grow) != (Some(limits), may_grow) {
                (vm.limits, vm.may_grow) = (Some(limits), may_grow);
                told_so.extend(vm.care().map(|care| (*process, care, limits, may_grow)));
            }
        }
        drop(table);
        for (process, care, limits, may_grow) in told_so {
            let is_told = told_if_free(&care, |care| {
                care.set_limits(limits);
                care.set_may_grow(may_grow);
            });
            if let (None, Some(vm)) = (is_told, self.table().vms.get_mut(&process)) {
                vm.limits = None;
            }
        }
    }

    /// Takes a VM that has ended off the table, and what was made for it back.
    ///
    /// Room for which no process was seen yet is for the next start of the domain, and is kept.
    fn bury(&self, process: ProcessId) {
        let Some(vm) = self.off_the_table(process, "has ended") else { return };
        // A guest of ours that has registered is no domain, and has no room.
        let Hands::Attached(care) = vm.hands else { return };
        self.give_back_rooms_if_free(|room| room.has_started && room.belongs_to(&vm.found));
        // Its threads may be waiting for an answer, and nobody waits for them. Without a thread, `care` is dropped here.
        let leaving = thread::Builder::new().name("leaving".into()).spawn(move || leave(&care));
        drop(leaving);
        self.save();
    }

    /// Takes a VM off the table and leaves it to itself.
    fn forget(&self, process: ProcessId, why: &str) {
        if let Some(care) = self.off_the_table(process, why).as_ref().and_then(Vm::care) {
            leave(&care);
        }
    }

    fn off_the_table(&self, process: ProcessId, why: &str) -> Option<Vm> {
        let vm = self.table().vms.remove(&process)?;
        tracing::info!("{} (pid {}) {why}", vm.found.name, process.pid);
        Some(vm)
    }

    /// Looks for guests that came and rooms that nobody came for.
    ///
    /// # Errors
    /// Where nobody can tell which guests run: that is not to say that none does, and nothing is given back.
    pub fn scout(&self) -> Result<(), String> {
        let running = self.doors.guests.find()?;
        let is_running = |process: &ProcessId| running.iter().any(|found| found.process == *process);
        let came: Vec<Found> = {
            let mut table = self.table();
            table.left.retain(is_running);
            table.refused.retain(|process, _| is_running(process));
            let is_new =
                |found: &Found| !table.vms.contains_key(&found.process) && !table.left.contains(&found.process);
            let is_named = |found: &Found| {
                found.vmm != Vmm::Wideleaf && table.config.attach.automatic.is_match(&found.believed_name())
            };
            running.iter().filter(|found| is_new(found) && is_named(found)).cloned().collect()
        };
        for found in &came {
            // To take those before it may have taken long enough for somebody to detach it.
            if !self.table().left.contains(&found.process) {
                self.take_or_warn(found, Settings::default(), WorkView::default());
            }
        }
        let given_back = self.give_back_abandoned();
        self.save();
        given_back
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
        }
    }

    /// Leaves all guests as they are, and keeps the state for the next daemon.
    pub fn stop(&self) {
        self.save();
        let vms = std::mem::take(&mut self.table().vms);
        for care in vms.values().filter_map(Vm::care).filter_map(|care| locked(&care).take()) {
            care.stop();
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
