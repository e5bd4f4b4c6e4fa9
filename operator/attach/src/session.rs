//! A guest of others under the manager: one loop for it, and a thread that keeps its gate up to date.
//!
//! ```text
//!   VmProcess ─▶ RAM by kind ─▶ a ManagedVm for each ─▶ Manager over ProcessHost ──▶ Live ─▶ view, explain, windows
//!                               GuestGate ◀── refreshed by who asks, or watcher ─┬ RAM has changed ─▶ a new Manager
//!                               KVM's totals, the guest's own tables ◀── asked ──┘
//! ```
//!
//! The guest is never stopped or asked to do anything, and leaving it changes none of its pages.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use wideleaf_control::view::{Care, Explanation, Reason, VmView, Vmm, WindowMap, WindowRange};
use wideleaf_memory::deadline::{self, NoAnswer};
use wideleaf_memory::explain::{Barred, WhyNot};
use wideleaf_memory::gate::{Gate as _, GateState};
use wideleaf_memory::host::process::{Claim, ProcessHost};
use wideleaf_memory::host::{Host as _, HostError};

use wideleaf_memory::manager::{Live, ManagedVm, Manager, ManagerConfig, ManagerError};
use wideleaf_memory::{BackingConfig, BackingKind, SecondLevel};
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{AccessHistory, BudgetLimits, MappingStats, PageSize, Policy, PolicyChoice, VmId, VmSnapshot};

use crate::gate::GuestGate;
use crate::guest_pages::OutsideTables;
use crate::live_view;
use crate::monitor::Monitor;
use crate::process::{NEEDED_TO_ACT, VmProcess};
use crate::ram::{RamKind, RamMap, RamPiece};
use crate::ram_watch::{self, RamWatch};
use crate::reasons::reasons;
use crate::refuse::refuse_policy;
use crate::second_level::OutsideView;
use crate::survey::{self, Survey};
use crate::work::Work;

/// How often a gate is refreshed that asks other processes.
const REFRESH_EVERY: Duration = Duration::from_secs(1);
/// How often the watcher wakes where the gate looks for itself and nobody is asked what KVM maps, for the RAM alone: to wake each second for
/// 50 guests would take half a per cent of a core.
const WATCH_EVERY: Duration = ram_watch::LOOK_EVERY;

/// A look at a terabyte takes a tenth of a second. Who attaches waits for the first, so that there is something to show.
const FIRST_LOOK_WITHIN: Duration = Duration::from_millis(500);

/// Reading the RAM map of a terabyte takes seconds, and a monitor may be asked several questions. The client of a
/// daemon waits for ten.
const ATTACH_WITHIN: Duration = Duration::from_secs(8);

/// A guest that hangs is not waited for as long as for a large one: the daemon has two threads for changes, and
/// libvirt waits for one of them.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// A manager ends after the action it is at, some milliseconds later. One whose guest hangs ends with the guest's
/// process, or when that answers.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// Age of the latest tick from which on the guest is said not to answer: twice the longest pause between ticks.
const TICK_AGE_MAX: Duration = Duration::from_secs(20);

/// How a guest is to be managed.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// By which policy; `None`: off, it is only looked at.
    pub policy: Option<PolicyChoice>,
    /// Whether shared memory may be collapsed, which stops the guest for 15 to 30 ms a window.
    pub may_collapse_shared: bool,
    /// A QMP socket of the guest's that nobody else is connected to.
    pub qmp: Option<PathBuf>,
    /// What it may cost.
    pub limits: BudgetLimits,
    /// What a TLB miss costs on this machine.
    pub walk: WalkCost,
}

/// Why a guest can not be managed.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The policy is of no use there.
    #[error("{0}")]
    Policy(String),
    /// It has a manager of its own.
    #[error("process {0} is `wideleaf run`, which manages its guest itself: say there which policy it should follow")]
    ManagesItself(u32),
    /// Somebody else has attached it, or it is a VMM that manages its guest itself under another name.
    #[error(
        "process {0} has a manager already, its own or one that somebody else attached: leave it to that, or detach it there"
    )]
    HasManager(u32),
    /// Its memory can not be seen or advised.
    #[error("process {pid} can not be managed: {source} (needs {NEEDED_TO_ACT})")]
    Host {
        /// The process.
        pid: u32,
        /// The kernel's answer.
        source: HostError,
    },
    /// It has ended.
    #[error("process {0} has ended")]
    Gone(u32),
    /// It does not answer.
    #[error("process {pid} {why}; try again once it does")]
    NoAnswer {
        /// The process.
        pid: u32,
        /// What it does instead, in words that follow its name.
        why: String,
    },
    /// Its RAM was not found.
    #[error("the RAM of process {pid} was not found: {why}")]
    NoRam {
        /// The process.
        pid: u32,
        /// Why.
        why: String,
    },
    /// No thread can be had.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// No thread can be had.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// A guest under the manager. Dropped, it is left to itself with its pages as they are. That takes a second at most:
/// threads that wait for a process that hangs end when it answers, or ends.
pub struct Attached {
    /// Until it is dropped.
    parts: Option<(Arc<Guest>, Watcher)>,
}

/// What its watcher has in hand as well.
struct Guest {
    process: VmProcess,
    monitor: Option<Arc<Monitor>>,
    host: Arc<ProcessHost>,
    opened_at: SystemTime,
    gate: Arc<GuestGate>,
    kvm: Option<Arc<OutsideView>>,
    notes: Vec<String>,
    /// Held while a manager is made: there is one change at a time.
    changing: Mutex<()>,
    /// Locked for moments.
    now: Mutex<Now>,
    /// Behind the manager, which is gone before another may come.
    _claim: Claim,
}

/// What changes.
struct Now {
    ram: Arc<RamMap>,
    settings: Settings,
    manager: Manager,
    /// Where the policy asks for the guest's own tables.
    tables: Option<Tables>,
    /// What managers before this one did.
    before: Work,
}

/// The guest's own tables, or why they can not be had.
type Tables = Result<Arc<OutsideTables>, String>;

impl Now {
    fn tables_note(&self) -> Option<String> {
        match self.tables.as_ref()? {
            Ok(tables) => tables.why_not(),
            Err(why) => Some(why.clone()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Attached {
    /// Takes a guest under management. It is looked at before this returns, which is within `ATTACH_WITHIN`.
    ///
    /// # Errors
    /// [`AttachError`]; nothing is then done to the guest.
    pub fn start(process: VmProcess, settings: Settings) -> Result<Attached, AttachError> {
        check(settings.policy.as_ref())?;
        let (pid, key) = (process.pid, process.key());
        if process.vmm == Vmm::Wideleaf {
            return Err(AttachError::ManagesItself(pid));
        }
        if let Some(why) = process.no_answer {
            return Err(AttachError::NoAnswer { pid, why });
        }
        let answers = process.answers(ANSWER_WITHIN);
        let started =
            answers.and_then(|()| deadline::ask(key, ATTACH_WITHIN, move || Attached::start_now(process, settings)));
        started.unwrap_or_else(|no_answer| Err(silent(pid, &no_answer)))
    }

    fn start_now(process: VmProcess, settings: Settings) -> Result<Attached, AttachError> {
        let pid = process.pid;
        let host = ProcessHost::open(pid).map_err(|source| AttachError::Host { pid, source })?;
        let claim = host.claim().map_err(|source| AttachError::Host { pid, source })?;
        let claim = claim.ok_or(AttachError::HasManager(pid))?;
        // From here on the process is held by its descriptor; before, its number may have passed to another.
        if !process.is_alive() {
            return Err(AttachError::Gone(pid));
        }
        let opened_at = SystemTime::now() - host.now().since_start();
        let mut notes: Vec<String> = process.descriptors.as_ref().err().map(ToString::to_string).into_iter().collect();
        let asked = settings.qmp.as_ref().map(|path| Monitor::of(&process, path));
        let monitor = asked.and_then(|asked| asked.map_err(|error| notes.push(error.to_string())).ok()).map(Arc::new);
        let ram_watch = RamWatch::new(&process, monitor.as_deref());
        let ram = Arc::new(survey::map(&process, monitor.as_deref()));
        if ram.pieces.is_empty() {
            return Err(AttachError::NoRam { pid, why: ram.notes.join("; ") });
        }
        let kvm = OutsideView::of(&process, monitor.as_ref()).map_err(|why| notes.push(why)).ok().map(Arc::new);
        let host = Arc::new(host);
        let gate = Arc::new(GuestGate::of(host.clone(), process.clone(), monitor.clone()));
        let tables = tables(&settings, &host, monitor.as_ref(), &ram);
        let parts = Parts { ram: &ram, gate: &gate, kvm: kvm.as_ref(), host: &host, tables: tables.as_ref() };
        let manager = parts.manager(&settings)?;
        let now = Now { ram, settings, manager, tables, before: Work::none() };
        let (changing, now) = (Mutex::default(), Mutex::new(now));
        let guest =
            Arc::new(Guest { process, monitor, host, opened_at, gate, kvm, notes, changing, now, _claim: claim });
        let watcher = Watcher::start(Arc::clone(&guest), ram_watch)?;
        Ok(Attached { parts: Some((guest, watcher)) })
    }

    fn guest(&self) -> &Arc<Guest> {
        &self.parts.as_ref().expect("it is not dropped yet").0
    }

    /// The process.
    pub fn process(&self) -> &VmProcess {
        &self.guest().process
    }

    /// What is done from now on; `None`: it is only looked at. Counters go on.
    ///
    /// # Errors
    /// [`AttachError`]; all is then as it was.
    pub fn set_policy(&mut self, policy: Option<PolicyChoice>) -> Result<(), AttachError> {
        check(policy.as_ref())?;
        let (guest, key) = (Arc::clone(self.guest()), self.guest().process.key());
        let change = move || {
            let _one_at_a_time = lock(&guest.changing);
            let ram = Arc::clone(&guest.now().ram);
            guest.go_on_with(ram, policy)
        };
        // A guest that hangs has one manager that waits for it, and gets no second.
        let answers = self.guest().process.answers(ANSWER_WITHIN);
        let changed = answers.and_then(|()| deadline::ask(key, ATTACH_WITHIN, change));
        let pid = key.pid;
        changed.unwrap_or_else(|no_answer| Err(silent(pid, &no_answer)))
    }

    /// What it may cost from now on.
    pub fn set_limits(&mut self, limits: BudgetLimits) {
        let mut now = self.guest().now();
        now.settings.limits = limits;
        now.manager.set_limits(limits);
    }

    /// Nothing is done to it for now, or again.
    pub fn leave_alone(&self, is_asked: bool) {
        self.guest().gate.leave_alone(is_asked);
    }

    /// Whether promotions may make pages resident that are not; where the host is short they had better not.
    pub fn set_may_grow(&self, may_grow: bool) {
        self.guest().gate.keep_holes(!may_grow);
    }

    /// Whether the guest is gone.
    pub fn has_ended(&self) -> bool {
        self.guest().now().manager.has_ended() || self.guest().gate.state() == GateState::Gone
    }

    /// All about it, as it was at the end of the latest tick.
    pub fn view(&self) -> VmView {
        let guest = self.guest();
        let now = guest.now();
        let live = now.manager.live();
        let care = match (&now.settings.policy, guest.gate.state()) {
            (None, _) => Care::Off,
            (_, GateState::Closed(why)) => Care::LeftAlone { reason: why.to_string() },
            (_, GateState::Gone) => Care::LeftAlone { reason: "it has ended".to_owned() },
            (_, GateState::Open) => Care::Managed,
        };
        let policy = now.settings.policy.as_ref().map_or("off".to_owned(), PolicyChoice::to_string);
        let (ram, work) =
            (Arc::clone(&now.ram), now.before.with(&live).view(&live, guest.opened_at, &now.settings.walk));
        let tables_note = now.tables_note();
        drop(now);
        VmView {
            care,
            policy: Some(policy),
            mapping: guest.mapping().map(survey::mapping_view),
            notes: (guest.notes.iter().chain(&ram.notes).chain(&live.panics).cloned())
                .chain(tables_note)
                .chain(guest.trouble())
                .chain(guest.silence(&live))
                .collect(),
            ..live_view::view(&guest.process, &ram, &live, work)
        }
    }

    /// Why windows are not huge.
    pub fn explain(&self) -> Explanation {
        let (live, ram) = self.guest().seen();
        let tables_note = self.guest().now().tables_note();
        let mut counts = BTreeMap::<WhyNot, u64>::new();
        for (why, windows) in live.vms.iter().flat_map(|vm| &vm.why_not) {
            *counts.entry(*why).or_default() += windows;
        }
        let huge = live.snapshot.vms.iter().flat_map(|vm| &vm.backing).filter(|backing| backing.is_large()).count();
        Explanation {
            name: self.guest().process.name.clone(),
            windows: Some(live.snapshot.vms.iter().map(|vm| vm.len() as u64).sum()),
            huge: Some(huge as u64),
            reasons: reasons(&counts),
            guest_pages: live_view::guest_pages(&live).map(Box::new),
            notes: self.guest().notes.iter().chain(&ram.notes).cloned().chain(tables_note).collect(),
        }
    }

    /// What is behind every window.
    pub fn windows(&self) -> WindowMap {
        let ((live, _), mapping) = (self.guest().seen(), self.guest().mapping());
        let mut ranges: Vec<_> = live.snapshot.vms.iter().flat_map(|vm| window_ranges(vm, mapping)).collect();
        ranges.sort_by_key(|range| range.gpa);
        WindowMap { name: self.guest().process.name.clone(), ranges }
    }

    /// Leaves the guest to itself.
    pub fn stop(self) {
        drop(self);
    }
}

impl Guest {
    fn now(&self) -> MutexGuard<'_, Now> {
        lock(&self.now)
    }

    /// The latest tick, and the RAM it was of.
    fn seen(&self) -> (Arc<Live>, Arc<RamMap>) {
        let now = self.now();
        (now.manager.live(), Arc::clone(&now.ram))
    }

    fn mapping(&self) -> Option<MappingStats> {
        self.kvm.as_ref()?.mapping_stats().ok()
    }

    fn tables(&self) -> Option<Arc<OutsideTables>> {
        self.now().tables.as_ref()?.as_ref().ok().cloned()
    }

    /// Why what KVM maps is not as new as it should be.
    fn trouble(&self) -> Option<String> {
        self.kvm.as_ref()?.trouble()
    }

    /// Whether the guest hangs, as far as can be told without asking it.
    fn silence(&self, live: &Live) -> Option<String> {
        let age = self.host.now().since(live.at);
        let late = || format!("the latest look at it is {} s old: it hangs, or this host is very busy", age.as_secs());
        match deadline::silence_of(self.process.key()) {
            Some(no_answer) => Some(format!("it {no_answer}")),
            None => (age > TICK_AGE_MAX && self.gate.state() != GateState::Gone).then(late),
        }
    }

    /// Ends one manager and begins another; whoever calls this holds `changing`. Two loops for a moment, of which the old one may still be
    /// at a window: each looks at what it did by itself.
    fn go_on_with(&self, ram: Arc<RamMap>, policy: Option<PolicyChoice>) -> Result<(), AttachError> {
        let settings = Settings { policy: policy.clone(), ..self.now().settings.clone() };
        let tables = tables(&settings, &self.host, self.monitor.as_ref(), &ram);
        let (host, kvm) = (&self.host, self.kvm.as_ref());
        let next = Parts { ram: &ram, gate: &self.gate, kvm, host, tables: tables.as_ref() }.manager(&settings)?;
        let mut now = self.now();
        // They may have changed meanwhile.
        next.set_limits(now.settings.limits);
        now.before = now.before.with(&now.manager.live());
        (now.ram, now.settings.policy, now.tables) = (ram, policy, tables);
        let old = std::mem::replace(&mut now.manager, next);
        drop(now);
        drop(old); // waits for its thread, and nobody waits for this
        Ok(())
    }

    /// Goes on with the RAM that is there now. What was unplugged is no longer managed.
    ///
    /// # Errors
    /// [`AttachError`]: the RAM can not be told for now, or no thread be had; all is then as it was.
    fn follow_ram(&self) -> Result<(), AttachError> {
        let ram = survey::map(&self.process, self.monitor.as_deref());
        let is_told = self.monitor.is_none() || !ram.pieces.iter().any(|piece| piece.is_guess);
        if ram.pieces.is_empty() || !is_told {
            return Err(AttachError::NoRam { pid: self.process.pid, why: ram.notes.join("; ") });
        }
        let _one_at_a_time = lock(&self.changing);
        let policy = {
            let now = self.now();
            if *now.ram == ram {
                return Ok(());
            }
            now.settings.policy.clone()
        };
        self.go_on_with(Arc::new(ram), policy)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let Some((guest, watcher)) = self.parts.take() else { return };
        let end = move || {
            drop(watcher);
            drop(guest);
        };
        deadline::leave_behind("leaving", STOP_WITHIN, end);
    }
}

fn silent(pid: u32, no_answer: &NoAnswer) -> AttachError {
    AttachError::NoAnswer { pid, why: no_answer.to_string() }
}

/// What would be done to a guest, and what would not, one line each. Nothing is.
///
/// # Errors
/// [`AttachError`] where the policy is of no use there.
pub fn plan(process: &VmProcess, settings: &Settings) -> Result<Vec<String>, AttachError> {
    check(settings.policy.as_ref())?;
    let survey = Survey::take(process, settings.qmp.as_deref());
    let explanation = survey.reasons(settings.may_collapse_shared, otherwise(settings));
    let (Some(huge), Some(windows)) = (explanation.huge, explanation.windows) else { return Ok(explanation.notes) };
    let mib = |windows: u64| windows * (PageSize::Huge2M.bytes().get() >> 20);
    let line = |reason: &Reason| match (reason.name.as_str(), &settings.policy) {
        (name, Some(policy)) if name == WhyNot::NotChosen.name() => {
            format!("{} windows ({} MiB) may be promoted, as {policy} chooses", reason.windows, mib(reason.windows))
        }
        (name, None) if name == WhyNot::PolicyNeverPromotes.name() => {
            format!("{} windows are only looked at: the policy is off", reason.windows)
        }
        _ => format!("{} windows stay as they are: {}", reason.windows, reason.text),
    };
    let mut lines = vec![format!("{huge} of {windows} windows are huge already")];
    lines.extend(explanation.reasons.iter().map(line));
    lines.extend(explanation.notes);
    Ok(lines)
}

/// What is to be said of windows that have no reason of their own to stay small.
fn otherwise(settings: &Settings) -> WhyNot {
    if policy(settings).promotes() { WhyNot::NotChosen } else { WhyNot::PolicyNeverPromotes }
}

fn check(policy: Option<&PolicyChoice>) -> Result<(), AttachError> {
    policy.and_then(refuse_policy).map_or(Ok(()), |why| Err(AttachError::Policy(why)))
}

/// The policy in force: `never` where it is off.
fn policy(settings: &Settings) -> Box<dyn Policy> {
    let off = || PolicyChoice::parse("never").expect("the policy that does nothing exists");
    settings.policy.clone().unwrap_or_else(off).make_for(&settings.walk)
}

/// The guest's own tables, where the policy asks for them.
fn tables(
    settings: &Settings,
    host: &Arc<ProcessHost>,
    monitor: Option<&Arc<Monitor>>,
    ram: &RamMap,
) -> Option<Tables> {
    let is_asked = policy(settings).needs().guest_mapping;
    is_asked.then(|| OutsideTables::of(host, monitor, ram).map(Arc::new))
}

/// What a manager is made of.
struct Parts<'a> {
    ram: &'a RamMap,
    gate: &'a Arc<GuestGate>,
    kvm: Option<&'a Arc<OutsideView>>,
    host: &'a Arc<ProcessHost>,
    tables: Option<&'a Tables>,
}

impl Parts<'_> {
    fn manager(&self, settings: &Settings) -> Result<Manager, AttachError> {
        let policy = policy(settings);
        let config = ManagerConfig { limits: settings.limits, ..ManagerConfig::for_guests_of_others() };
        let manager =
            Manager::spawn(Arc::clone(self.host) as _, self.vms(settings.may_collapse_shared), policy, config)?;
        manager.activate();
        let until = Instant::now() + FIRST_LOOK_WITHIN;
        while manager.live().ticks == 0 && !manager.has_ended() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(manager)
    }

    /// One for each kind of RAM. KVM's totals are of all of them together.
    fn vms(&self, may_collapse_shared: bool) -> Vec<ManagedVm> {
        let mut kinds: Vec<BackingConfig> = self.ram.pieces.iter().map(|piece| backing_of(piece.kind)).collect();
        kinds.dedup();
        let kinds = kinds.into_iter().fold(Vec::new(), |mut unique, kind| {
            if !unique.contains(&kind) {
                unique.push(kind);
            }
            unique
        });
        let vm = |(number, backing): (usize, BackingConfig)| {
            let pieces: Vec<_> = self.ram.pieces.iter().filter(|piece| backing_of(piece.kind) == backing).collect();
            let ranges = pieces.iter().map(|piece| piece.range).collect();
            let kvm = self.kvm.map(|kvm| Arc::clone(kvm) as Arc<dyn SecondLevel>);
            ManagedVm {
                gate: Some(Arc::clone(self.gate) as _),
                guest_tables: self.tables.and_then(|tables| tables.as_ref().ok()).map(|tables| Arc::clone(tables) as _),
                may_collapse_shared,
                barred: pieces.into_iter().filter_map(barred).collect(),
                ..ManagedVm::of_others(VmId(number as u32), ranges, backing, kvm)
            }
        };
        kinds.into_iter().enumerate().map(vm).collect()
    }
}

fn backing_of(kind: RamKind) -> BackingConfig {
    let backing = match kind {
        RamKind::Anonymous => BackingConfig::new(BackingKind::Anon, PageSize::Base4K),
        RamKind::Shmem | RamKind::File => BackingConfig::new(BackingKind::Memfd, PageSize::Base4K),
        RamKind::Hugetlb(size) => BackingConfig::new(BackingKind::Hugetlb, size),
    };
    backing.expect("the kernel made such memory")
}

fn barred(piece: &RamPiece) -> Option<Barred> {
    Some(Barred { range: piece.range.gpa, why: piece.never_huge.as_ref()?.why() })
}

/// A range for each run of windows without a gap.
fn window_ranges(vm: &VmSnapshot, mapping: Option<MappingStats>) -> Vec<WindowRange> {
    let rows: Vec<usize> = (0..vm.len()).collect();
    let follows = |a: &usize, b: &usize| vm.windows[*a].get() + 1 == vm.windows[*b].get();
    let range = |rows: &[usize]| {
        let backing = rows.iter().map(|row| vm.backing[*row]);
        let range = survey::window_range(vm.windows[rows[0]].start().get(), backing, mapping);
        WindowRange { heat: rows.iter().map(|row| heat(vm.access[*row])).collect(), ..range }
    };
    rows.chunk_by(follows).map(range).collect()
}

/// The share of samples that saw an access, in tenths, cut off at nine.
fn heat(access: AccessHistory) -> char {
    let tenths = |rate: u32| char::from_digit((rate / 1000).min(9), 10).expect("a digit");
    access.rate().map_or('?', |rate| tenths(rate.get()))
}

/// Keeps a guest's gate up to date, and what is managed of it, until it is dropped or the guest is gone.
struct Watcher {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    fn start(guest: Arc<Guest>, mut ram: RamWatch) -> std::io::Result<Watcher> {
        let (stop, stopped) = mpsc::channel::<()>();
        let of_gate = if guest.gate.is_quick() { WATCH_EVERY } else { REFRESH_EVERY };
        let of_kvm = guest.kvm.as_ref().and_then(|kvm| kvm.refresh_every());
        let every = of_kvm.map_or(of_gate, |every| every.min(of_gate));
        let watch = move || {
            while guest.gate.state() != GateState::Gone && stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout)
            {
                if !guest.gate.is_quick() {
                    guest.gate.refresh();
                }
                guest.kvm.iter().for_each(|kvm| kvm.refresh());
                guest.tables().iter().for_each(|tables| tables.refresh());
                // What could not be followed is tried again at the next look.
                if let Some(change) = ram.change(&guest.process, guest.monitor.as_deref()) {
                    let began = Instant::now();
                    let is_followed = guest.follow_ram().is_ok();
                    ram.read(began.elapsed());
                    if is_followed {
                        ram.followed(change);
                    }
                }
            }
        };
        let thread = thread::Builder::new().name("watcher".into()).spawn(watch)?;
        Ok(Watcher { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::tests::{add_process, fake_places};
    use wideleaf_memory::RamRange;
    use wideleaf_policies::snapshot::WindowRow;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Backing, Gpa, GpaRange, GuestMapping, Hva, Moment, WindowIndex};

    #[test]
    fn windows_with_a_gap_between_are_two_ranges_with_their_heat() {
        let mut vm = VmSnapshot::with_capacity(VmId(0), 3);
        let hot = AccessHistory::default().with(true);
        for (index, resident, backing, access) in [
            (0, 512, Backing::Huge2M, hot),
            (1, 7, Backing::Base4K, AccessHistory::default()),
            (2048, 0, Backing::Unbacked, hot.with(false)),
        ] {
            let window = WindowIndex::new(index);
            let (is_held, ready_at, guest_mapping) = (false, Moment::START, GuestMapping::default());
            vm.push(WindowRow {
                window,
                resident,
                backing,
                is_held,
                ready_at,
                access,
                written: None,
                zero: None,
                guest_mapping,
                given_back: 0,
            });
        }
        let ranges = window_ranges(&vm, Some(MappingStats { pages_4k: 7, pages_2m: 1, pages_1g: 0 }));
        let seen: Vec<_> =
            ranges.iter().map(|r| (r.gpa, r.backing.as_str(), r.second_level.as_str(), r.heat.as_str())).collect();
        assert_eq!(seen, [(0, "24", "24", "9?"), (4 << 30, ".", ".", "5")]);
    }

    #[test]
    fn a_vmm_that_manages_its_guest_itself_is_left_to_it() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["/usr/bin/wideleaf", "run", "gups"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("a VM");
        let refused = Attached::start(process, Settings::default()).err().expect("refused");
        assert!(matches!(refused, AttachError::ManagesItself(7)), "{refused}");
    }

    #[test]
    fn a_policy_that_is_of_no_use_is_refused_before_anything_is_done() {
        let giant = PolicyChoice::parse("giant").expect("it exists");
        let refused = check(Some(&giant)).expect_err("only our own VMM can");
        assert!(refused.to_string().contains("wideleaf run"), "{refused}");
        assert!(check(None).is_ok());
    }

    #[test]
    fn what_was_unplugged_is_no_longer_managed() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("a VM");
        let gate = Arc::new(GuestGate::new(process, None));
        let host = Arc::new(ProcessHost::open(std::process::id()).expect("anybody may open his own"));
        let piece = |name: &str, start: u64, kind| {
            let gpa = GpaRange::new(Gpa::new(start), mib(128)).expect("small");
            let range = RamRange { gpa, hva: Hva::new((1 << 40) + start) };
            RamPiece { name: name.to_owned(), range, kind, never_huge: None, is_guess: false }
        };
        let (first, plugged) = (piece("ram", 0, RamKind::Anonymous), piece("dimm", 4 << 30, RamKind::Shmem));
        let managed = |pieces: Vec<RamPiece>| {
            let ram = RamMap { pieces, notes: Vec::new() };
            let vms = Parts { ram: &ram, gate: &gate, kvm: None, host: &host, tables: None }.vms(false);
            vms.iter().flat_map(|vm| vm.ranges.iter().map(|range| range.gpa.start().get())).collect::<Vec<_>>()
        };
        assert_eq!(managed(vec![first.clone(), plugged]), [0, 4 << 30]);
        assert_eq!(managed(vec![first]), [0]);
    }
}
