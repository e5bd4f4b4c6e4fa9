//! An external guest under the manager: one loop for it, and a thread that keeps its gate up to date.
//!
//! ```text
//!   VmProcess ─▶ RAM by kind ─▶ a ManagedVm for each ─▶ Manager over ProcessHost ──▶ Live ─▶ view, explain, windows
//!                               GuestGate ◀── refreshed by caller, or by watcher ┬ RAM has changed ─▶ a new Manager
//!                               KVM's totals, the guest's own tables ◀── asked ──┘
//! ```
//!
//! The guest is never stopped or asked to do anything, and detaching changes none of its pages.

use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_control::protocol::BidsReport;
use wideleaf_control::view::{Care, Explanation, Reason, SavedView, VmView, Vmm, WindowMap};
use wideleaf_memory::deadline::{self, NoAnswer};
use wideleaf_memory::explain::{Barred, WhyNot};
use wideleaf_memory::gate::{Gate as _, GateState};
use wideleaf_memory::host::process::{Claim, ProcessHost};
use wideleaf_memory::host::{Host as _, HostError};

use wideleaf_memory::manager::{Live, ManagedVm, Manager, ManagerConfig, ManagerError, OutOfReach, SharedRecovery};
use wideleaf_memory::sensors::kernel_flags::MergedPages;
use wideleaf_memory::sensors::page_tables::table_memory;
use wideleaf_memory::{BackingConfig, BackingKind, SecondLevel};
use wideleaf_policies::recovery::{Cause, Progress, RecoveryLimits};
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{BudgetLimits, HugePagePrice, MappingStats, PageSize, Policy, PolicyChoice, VmId};

use crate::gate::{EVENT_EVERY, GuestGate};
use crate::guest_pages::OutsideTables;
use crate::heat::WatchedRam;
use crate::live_view::{self, OfLatest};
use crate::monitor::Monitor;
use crate::placed::Placed;
use crate::process::{NEEDED_TO_ACT, VmProcess};
use crate::ram::{RamKind, RamMap, RamPiece};
use crate::ram_watch::{self, RamWatch, Watched};
use crate::refuse::refuse_policy;
use crate::second_level::{NOT_KNOWN, OutsideView};
use crate::survey::{self, Survey};
use crate::window_map::{self, About};
use crate::work::Work;

/// Interval between refreshes of a gate that asks other processes.
const REFRESH_EVERY: Duration = Duration::from_secs(1);
/// Interval of the watcher where the gate refreshes itself and KVM's totals need no other process. It then wakes
/// for the RAM alone: to wake each second for 50 guests would take half a per cent of a core.
const WATCH_EVERY: Duration = ram_watch::LOOK_EVERY;

/// Time that an attach waits for the first tick, so that there is something to show. A tick over a terabyte takes a
/// tenth of a second.
const FIRST_LOOK_WITHIN: Duration = Duration::from_millis(500);

/// Time that an attach of a small guest may take, or a change of policy: a monitor may need several questions, and the
/// client of a daemon waits for ten seconds. A large guest is attached in more, since its RAM map takes some seconds
/// for each terabyte.
const ATTACH_WITHIN: Duration = Duration::from_secs(8);

/// Time that a guest has to show that it does not hang, less than for a large guest: the daemon has two threads for
/// changes, and libvirt waits for one of them.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Time to wait for the end of a manager. It ends after the present action, some milliseconds later. If its guest
/// hangs, it ends with the guest's process, or when that answers.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// Age of the latest tick after which the guest counts as not answering: twice the longest pause between ticks.
const TICK_AGE_MAX: Duration = Duration::from_secs(20);

/// Settings for the management of a guest.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Policy to use; `None`: off, the guest is only observed.
    pub policy: Option<PolicyChoice>,
    /// Whether shared memory may be collapsed, which stops the guest for 15 to 30 ms a window.
    pub may_collapse_shared: bool,
    /// A QMP socket of the guest with no other client.
    pub qmp: Option<PathBuf>,
    /// Limits on its costs.
    pub limits: BudgetLimits,
    /// Largest part of the time for which windows may be out of the guest's reach.
    pub out_of_reach: OutOfReach,
    /// Cost of a TLB miss on this machine.
    pub walk: WalkCost,
    /// Bounds on recoveries after a migration, a dirty log, a balloon and the like.
    pub recovery: RecoveryLimits,
    /// Whether the guest is left alone from the start, until [`Attached::leave_alone`] ends that.
    pub is_left_alone: bool,
}

impl Settings {
    /// Settings of the guest's manager.
    fn of_manager(&self) -> ManagerConfig {
        let Settings { limits, out_of_reach, .. } = *self;
        ManagerConfig { limits, out_of_reach, ..ManagerConfig::for_external_guests() }
    }
}

/// Reason why a guest cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The policy cannot manage this guest.
    #[error("{0}")]
    Policy(String),
    /// The guest has a manager of its own.
    #[error("process {0} is `wideleaf run`, which manages its guest itself: set the policy there")]
    ManagesItself(u32),
    /// Another process has attached it, or it is a VMM under another name that manages its guest itself.
    #[error(
        "process {0} has a manager already, its own or one that another process attached: leave it to that one, or \
         detach it there"
    )]
    HasManager(u32),
    /// Its memory cannot be read or advised.
    #[error("cannot manage process {pid}: {source} (needs {NEEDED_TO_ACT})")]
    Host {
        /// Id of the process.
        pid: u32,
        /// Error from the kernel.
        source: HostError,
    },
    /// What backs its memory cannot be seen, as before Linux 6.7 (`PAGEMAP_SCAN`): all of it would seem absent.
    #[error("cannot see what backs the memory of process {pid}: {source} (needs Linux 6.7 and {NEEDED_TO_ACT})")]
    Unseen {
        /// Id of the process.
        pid: u32,
        /// Error from the kernel.
        source: HostError,
    },
    /// The process has ended.
    #[error("process {0} has ended")]
    Gone(u32),
    /// The process does not answer.
    #[error("process {pid} {why}; try again once it does")]
    NoAnswer {
        /// Id of the process.
        pid: u32,
        /// What it does instead, in words that follow its name.
        why: String,
    },
    /// Its RAM was not found.
    #[error("cannot find the RAM of process {pid}: {why}")]
    NoRam {
        /// Id of the process.
        pid: u32,
        /// Reason in words.
        why: String,
    },
    /// The manager cannot be started.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// A guest under the manager. A drop ends the management and leaves the pages as they are. That takes at most a
/// second: threads that wait for a process that hangs end when it answers, or ends.
pub struct Attached {
    /// `None` only after the drop.
    parts: Option<(Arc<Guest>, Watcher)>,
}

/// Parts that the watcher uses as well.
struct Guest {
    process: VmProcess,
    monitor: Option<Arc<Monitor>>,
    host: Arc<ProcessHost>,
    opened_at: SystemTime,
    gate: Arc<GuestGate>,
    kvm: Option<Arc<OutsideView>>,
    notes: Vec<String>,
    /// What was large before events, for each kind of RAM, over all managers.
    recoveries: Recoveries,
    /// Held while a manager is made: there is one change at a time.
    changing: Mutex<()>,
    /// Locked for moments.
    now: Mutex<Now>,
    /// Figures of the latest tick that was looked at.
    figures: OfLatest<Live, Figures>,
    /// Declared after the manager, so that it is released after the manager's end.
    _claim: Claim,
}

/// Parts that change.
struct Now {
    ram: Arc<RamMap>,
    settings: Settings,
    manager: Manager,
    /// The guest's own tables, where the policy needs them.
    tables: Option<Tables>,
    /// Which memory the guest uses, where the policy needs that.
    heat: Option<WatchedRam>,
    /// Work of the managers before this one.
    before: Arc<Work>,
}

/// Figures that change at a tick of the manager only. To compute them takes a look at every window.
struct Figures {
    view: VmView,
    explanation: Explanation,
}

/// The guest's own tables, or why they are not available.
type Tables = Result<Arc<OutsideTables>, String>;

impl Now {
    fn tables_note(&self) -> Option<String> {
        match self.tables.as_ref()? {
            Ok(tables) => tables.why_not(),
            Err(why) => Some(why.clone()),
        }
    }

    /// Age and error of the heat, or why it is unknown.
    fn heat_note(&self) -> Option<String> {
        self.heat.as_ref().map(WatchedRam::note)
    }
}

impl Attached {
    /// Takes a guest under management. It is surveyed before this returns, which is within `ATTACH_WITHIN`, longer for
    /// a large guest.
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
        let within = process.time_with_mappings(ATTACH_WITHIN);
        let started = answers.and_then(|()| deadline::ask(key, within, move || Attached::start_now(process, settings)));
        started.unwrap_or_else(|no_answer| Err(silent(pid, &no_answer)))
    }

    fn start_now(process: VmProcess, settings: Settings) -> Result<Attached, AttachError> {
        let pid = process.pid;
        let host = ProcessHost::open(pid).map_err(|source| AttachError::Host { pid, source })?;
        let claim = host.claim().map_err(|source| AttachError::Host { pid, source })?;
        let claim = claim.ok_or(AttachError::HasManager(pid))?;
        // From here on a descriptor holds the process; before, another process may have received its number.
        if !process.is_alive() {
            return Err(AttachError::Gone(pid));
        }
        let opened_at = SystemTime::now() - host.now().since_start();
        let mut notes: Vec<String> = process.descriptors.as_ref().err().map(ToString::to_string).into_iter().collect();
        let asked = settings.qmp.as_ref().map(|path| Monitor::now_or_later(&process, path));
        let monitor = asked.and_then(|asked| asked.map_err(|error| notes.push(error.to_string())).ok()).map(Arc::new);
        let ram_watch = RamWatch::new(&process, monitor.as_deref());
        let ram = Arc::new(survey::map(&process, monitor.as_deref()));
        let Some(RamPiece { range: first, .. }) = ram.pieces.first() else {
            return Err(AttachError::NoRam { pid, why: ram.notes.join("; ") });
        };
        let seen = host.scan(first.hva, first.gpa.bytes().min(PageSize::Huge2M.bytes()), &mut Vec::new());
        seen.map_err(|source| AttachError::Unseen { pid, source })?;
        let kvm =
            OutsideView::now_or_later(&process, monitor.as_ref()).map_err(|why| notes.push(why)).ok().map(Arc::new);
        let host = Arc::new(host);
        let gate = Arc::new(GuestGate::of(host.clone(), process.clone(), monitor.clone()));
        gate.mappings_say(ram.is_watched);
        gate.leave_alone(settings.is_left_alone);
        let tables = tables(&settings, &host, monitor.as_ref(), &ram);
        let recoveries = Recoveries::default();
        let heat = WatchedRam::after(None, needs_access(&settings), &host, &ram);
        let parts = Parts {
            ram: &ram,
            gate: &gate,
            kvm: kvm.as_ref(),
            host: &host,
            tables: tables.as_ref(),
            heat: heat.as_ref(),
            recoveries: &recoveries,
        };
        let manager = parts.manager(&settings)?;
        let now = Now { ram, settings, manager, tables, heat, before: Arc::new(Work::none()) };
        let (changing, now) = (Mutex::default(), Mutex::new(now));
        let guest = Arc::new(Guest {
            process,
            monitor,
            host,
            opened_at,
            gate,
            kvm,
            notes,
            recoveries,
            changing,
            now,
            figures: OfLatest::default(),
            _claim: claim,
        });
        let watcher = Watcher::start(Arc::clone(&guest), ram_watch)?;
        Ok(Attached { parts: Some((guest, watcher)) })
    }

    fn guest(&self) -> &Arc<Guest> {
        &self.parts.as_ref().expect("it is not dropped yet").0
    }

    /// The process of the guest.
    pub fn process(&self) -> &VmProcess {
        &self.guest().process
    }

    /// Sets the policy; `None`: the guest is only observed. Counters continue.
    ///
    /// # Errors
    /// [`AttachError`]; all is then as it was.
    pub fn set_policy(&mut self, policy: Option<PolicyChoice>) -> Result<(), AttachError> {
        check(policy.as_ref())?;
        let (guest, key) = (Arc::clone(self.guest()), self.guest().process.key());
        // The thread that makes the change decides that it is made, or this one that it is too late: the first counts.
        let is_made = Arc::new(OnceLock::new());
        let decided = Arc::clone(&is_made);
        let change = move || {
            let _one_at_a_time = guest.changing.lock();
            let ram = Arc::clone(&guest.now().ram);
            guest.go_on_with(ram, policy, || decided.set(true).is_ok())
        };
        // A guest that hangs has one manager that waits for it, and gets no second.
        let answers = self.guest().process.answers(ANSWER_WITHIN);
        let changed = answers.and_then(|()| deadline::ask(key, ATTACH_WITHIN, change));
        changed.unwrap_or_else(|no_answer| match is_made.set(false) {
            Ok(()) => Err(silent(key.pid, &no_answer)),
            Err(_) => Ok(()), // the end of the manager before is what takes long
        })
    }

    /// Sets the limits on the costs.
    pub fn set_limits(&mut self, limits: BudgetLimits) {
        let mut now = self.guest().now();
        now.settings.limits = limits;
        now.manager.set_limits(limits);
    }

    /// Sets the largest part of the time for which windows may be out of the guest's reach.
    pub fn set_out_of_reach(&mut self, part: OutOfReach) {
        let mut now = self.guest().now();
        now.settings.out_of_reach = part;
        now.manager.set_out_of_reach(part);
    }

    /// Bids for huge pages, while the host lacks them.
    pub fn bids(&self) -> Option<BidsReport> {
        live_view::bids(&self.guest().now().manager.live())
    }

    /// Sets the price of huge pages on this host. No window of an external guest can give its huge page back.
    pub fn set_huge_page_price(&self, price: Option<HugePagePrice>) {
        self.guest().now().manager.set_huge_page_price(price);
    }

    /// Tells the manager of free huge pages that `/proc/buddyinfo` does not count.
    pub fn promise_huge_pages(&self, pages: u64) {
        self.guest().now().manager.promise_huge_pages(pages);
    }

    /// Whether the guest is in an event that a recovery follows: a migration, a dirty log, a stop and the like, as of
    /// the latest look at it.
    pub fn is_in_event(&self) -> bool {
        self.guest().gate.is_in_event()
    }

    /// Sets the bounds on recoveries from now on.
    pub fn set_recovery(&mut self, recovery: RecoveryLimits) {
        let guest = self.guest();
        guest.now().settings.recovery = recovery;
        guest.recoveries.set_limits(recovery);
    }

    /// Leaves the guest alone for now, or ends that.
    pub fn leave_alone(&self, is_asked: bool) {
        self.guest().gate.leave_alone(is_asked);
    }

    /// Whether promotions may make absent pages resident, which they should not where the host is short.
    pub fn set_may_grow(&self, may_grow: bool) {
        self.guest().gate.keep_holes(!may_grow);
    }

    /// Whether the guest has ended.
    pub fn has_ended(&self) -> bool {
        self.guest().now().manager.has_ended() || self.guest().gate.state() == GateState::Gone
    }

    /// Full description, as of the end of the latest tick.
    pub fn view(&self) -> VmView {
        let guest = self.guest();
        let (live, ram, figures) = guest.seen();
        let now = guest.now();
        let care = match (&now.settings.policy, guest.gate.state()) {
            (None, _) => Care::Off,
            (_, GateState::Closed(why)) => Care::LeftAlone { reason: why.to_string() },
            (_, GateState::Gone) => Care::LeftAlone { reason: "it has ended".to_owned() },
            (_, GateState::Open) => Care::Managed,
        };
        let policy = now.settings.policy.as_ref().map_or("off".to_owned(), PolicyChoice::to_string);
        let (tables_note, heat_note) = (now.tables_note(), now.heat_note());
        drop(now);
        let view = figures.view.clone();
        let merged = guest.merged();
        let saved = SavedView { merged: merged.as_ref().map_or(None, |merged| *merged), ..view.saved };
        VmView {
            care,
            policy: Some(policy),
            mapping: guest.mapping().map(survey::mapping_view),
            saved,
            notes: (guest.notes.iter().chain(&ram.notes).chain(&live.panics).cloned())
                .chain(tables_note)
                .chain(heat_note)
                .chain(guest.trouble())
                .chain(guest.gate.note())
                .chain(survey::unknown_savings(&saved, merged.is_ok()))
                .chain(guest.silence(&live))
                .chain(live.vms.iter().filter_map(|vm| vm.recovering).map(recovering))
                .collect(),
            ..view
        }
    }

    /// Reasons why windows are not huge.
    pub fn explain(&self) -> Explanation {
        let guest = self.guest();
        let (_, ram, figures) = guest.seen();
        let tables_note = guest.now().tables_note();
        let notes = guest.notes.iter().chain(&ram.notes).cloned().chain(tables_note).chain(guest.gate.note());
        let explanation = figures.explanation.clone();
        Explanation { notes: notes.chain(explanation.notes).collect(), ..explanation }
    }

    /// The map of all its windows.
    pub fn windows(&self) -> WindowMap {
        let guest = self.guest();
        let (live, tables_note, walk) = {
            let now = guest.now();
            (now.manager.live(), now.tables_note(), now.settings.walk)
        };
        let why = guest.notes.iter().find(|note| note.starts_with(NOT_KNOWN)).map_or(NOT_KNOWN, String::as_str);
        let about = About {
            name: &guest.process.name,
            opened_at: guest.opened_at,
            totals: guest.mapping().ok_or(why),
            is_shadowed: walk.is_shadowed(),
            no_tables: tables_note.as_deref(),
        };
        let mut map = window_map::of_live(&about, &live);
        map.notes.extend(guest.trouble().into_iter().chain(guest.silence(&live)));
        map
    }

    /// Ends the management of the guest.
    pub fn stop(self) {
        drop(self);
    }
}

impl Guest {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock()
    }

    /// The latest tick, the RAM that it covered, and its figures.
    fn seen(&self) -> (Arc<Live>, Arc<RamMap>, Arc<Figures>) {
        let (live, ram, before, walk) = {
            let now = self.now();
            (now.manager.live(), Arc::clone(&now.ram), Arc::clone(&now.before), now.settings.walk)
        };
        let figures = self.figures.of(&live, || {
            let work = before.with(&live).view(&live, self.opened_at, &walk);
            let page_tables = Some(survey::tables_view(table_memory(self.host.as_ref())));
            Figures {
                view: VmView { page_tables, ..live_view::view(&self.process, &ram, &live, work) },
                explanation: live_view::explanation(&self.process.name, &live, &ram.placed(), Vec::new()),
            }
        });
        (live, ram, figures)
    }

    /// Refreshes the gate. The manager hears at once of an event that has begun or ended.
    fn refresh_gate(&self) {
        let before = self.gate.changes();
        self.gate.refresh();
        if self.gate.changes() != before {
            self.now().manager.look();
        }
    }

    fn mapping(&self) -> Option<MappingStats> {
        self.kvm.as_ref()?.mapping_stats().ok()
    }

    fn tables(&self) -> Option<Arc<OutsideTables>> {
        self.now().tables.as_ref()?.as_ref().ok().cloned()
    }

    /// Reason why KVM's totals are not as new as they should be.
    fn trouble(&self) -> Option<String> {
        self.kvm.as_ref()?.trouble()
    }

    /// Whether the guest hangs, as far as is visible without a question to it.
    fn silence(&self, live: &Live) -> Option<String> {
        let age = self.host.now().since(live.at);
        let late =
            || format!("its manager's latest tick is {} s old: it hangs, or this host is very busy", age.as_secs());
        match deadline::silence_of(self.process.key()) {
            Some(no_answer) => Some(format!("it {no_answer}")),
            None => (age > TICK_AGE_MAX && self.gate.state() != GateState::Gone).then(late),
        }
    }

    /// Its merged memory. Takes at most [`deadline::BRIEF`]: the kernel may wait for the lock of the memory map.
    fn merged(&self) -> Result<Option<u64>, NoAnswer> {
        let host = Arc::clone(&self.host);
        deadline::ask(self.process.key(), deadline::BRIEF, move || survey::merged(&host))
    }

    /// Replaces one manager by another if this is still wanted once the other is there; the caller holds `changing`.
    /// There are two loops for a moment, and the old one may still be at a window: each checks only its own work.
    fn go_on_with(
        &self,
        ram: Arc<RamMap>,
        policy: Option<PolicyChoice>,
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<(), AttachError> {
        let settings = Settings { policy: policy.clone(), ..self.now().settings.clone() };
        let tables = tables(&settings, &self.host, self.monitor.as_ref(), &ram);
        let before = self.now().heat.clone();
        let heat = WatchedRam::after(before, needs_access(&settings), &self.host, &ram);
        let parts = Parts {
            ram: &ram,
            gate: &self.gate,
            kvm: self.kvm.as_ref(),
            host: &self.host,
            tables: tables.as_ref(),
            heat: heat.as_ref(),
            recoveries: &self.recoveries,
        };
        let next = parts.manager(&settings)?;
        let mut now = self.now();
        if !is_wanted() {
            drop(now);
            return Ok(());
        }
        // They may have changed since.
        next.set_limits(now.settings.limits);
        next.set_out_of_reach(now.settings.out_of_reach);
        now.before = Arc::new(now.before.with(&now.manager.live()));
        (now.ram, now.settings.policy, now.tables) = (ram, policy, tables);
        let old = (std::mem::replace(&mut now.manager, next), std::mem::replace(&mut now.heat, heat));
        drop(now);
        drop(old); // waits for its thread, and for the kernel's monitor; `now` is free again
        Ok(())
    }

    /// Continues with the present RAM. Unplugged memory is no longer managed.
    ///
    /// # Errors
    /// [`AttachError`]: the RAM is not readable for now, or no thread is available. All is then as it was.
    fn follow_ram(&self) -> Result<(), AttachError> {
        let ram = survey::map(&self.process, self.monitor.as_deref());
        // Mappings that could not be read say nothing: an earlier userfaultfd may still be there.
        if ram.is_watched || !ram.pieces.is_empty() {
            self.gate.mappings_say(ram.is_watched);
        }
        let guesses = |map: &RamMap| map.pieces.iter().any(|piece| piece.is_guess);
        // A monitor that does not answer for a moment; one that never told more is not asked for better.
        let is_worse = self.monitor.is_some() && guesses(&ram) && !guesses(&self.now().ram);
        if ram.pieces.is_empty() || is_worse {
            return Err(AttachError::NoRam { pid: self.process.pid, why: ram.notes.join("; ") });
        }
        let _one_at_a_time = self.changing.lock();
        let policy = {
            let now = self.now();
            if (&now.ram.pieces, &now.ram.notes) == (&ram.pieces, &ram.notes) {
                return Ok(());
            }
            now.settings.policy.clone()
        };
        self.go_on_with(Arc::new(ram), policy, || true)
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

/// Note about a recovery under way.
fn recovering(progress: Progress) -> String {
    let (after, Progress { large, small, .. }) = (event(progress.cause), progress);
    format!("it recovers from {after}: {large} windows are large again, {small} are not yet")
}

/// An event in words.
fn event(cause: Cause) -> &'static str {
    match cause {
        Cause::Unseen => "a time in which it did not answer",
        Cause::Balloon => "a balloon",
        Cause::Stop => "a stop",
        Cause::DirtyLog => "a dirty log",
        Cause::Migration => "a migration",
        Cause::FaultsServed => "a restore or a postcopy (userfaultfd)",
        Cause::Snapshot => "a snapshot",
        Cause::Arrival => "its arrival by migration",
    }
}

fn silent(pid: u32, no_answer: &NoAnswer) -> AttachError {
    AttachError::NoAnswer { pid, why: no_answer.to_string() }
}

/// Actions that would be taken on a guest, and those that would not, one line each. It changes nothing.
///
/// # Errors
/// [`AttachError`] where the policy cannot manage this guest.
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
            format!("{} windows are only observed: the policy is off", reason.windows)
        }
        _ => format!("{} windows stay as they are: {}", reason.windows, reason.text),
    };
    let mut lines = vec![format!("{huge} of {windows} windows are huge already")];
    lines.extend(explanation.reasons.iter().map(line));
    lines.extend(explanation.notes);
    Ok(lines)
}

/// Reason for windows that have no reason of their own to stay small.
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

/// Whether the policy asks which memory the guest uses.
fn needs_access(settings: &Settings) -> bool {
    policy(settings).needs().access
}

/// The guest's own tables, where the policy needs them.
fn tables(
    settings: &Settings,
    host: &Arc<ProcessHost>,
    monitor: Option<&Arc<Monitor>>,
    ram: &RamMap,
) -> Option<Tables> {
    let is_asked = policy(settings).needs().guest_mapping;
    is_asked.then(|| OutsideTables::of(host, monitor, ram).map(Arc::new))
}

/// Parts of a manager.
struct Parts<'a> {
    ram: &'a RamMap,
    gate: &'a Arc<GuestGate>,
    kvm: Option<&'a Arc<OutsideView>>,
    host: &'a Arc<ProcessHost>,
    tables: Option<&'a Tables>,
    heat: Option<&'a WatchedRam>,
    recoveries: &'a Recoveries,
}

/// Recoveries of a guest, by kind of RAM.
#[derive(Default)]
struct Recoveries(Mutex<Vec<(BackingConfig, SharedRecovery)>>);

impl Recoveries {
    fn of(&self, backing: BackingConfig, limits: RecoveryLimits) -> SharedRecovery {
        let mut all = self.0.lock();
        let known = all.iter().find(|(of, _)| *of == backing).map(|(_, recovery)| Arc::clone(recovery));
        let recovery = known.unwrap_or_else(|| {
            all.push((backing, SharedRecovery::default()));
            Arc::clone(&all.last().expect("just added").1)
        });
        recovery.lock().set_limits(limits);
        recovery
    }

    fn set_limits(&self, limits: RecoveryLimits) {
        self.0.lock().iter().for_each(|(_, recovery)| recovery.lock().set_limits(limits));
    }
}

impl Parts<'_> {
    fn manager(&self, settings: &Settings) -> Result<Manager, AttachError> {
        let policy = policy(settings);
        let config = settings.of_manager();
        let manager = Manager::spawn(Arc::clone(self.host) as _, self.vms(settings), policy, config)?;
        manager.activate();
        let until = Instant::now() + FIRST_LOOK_WITHIN;
        while manager.live().ticks == 0 && !manager.has_ended() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(manager)
    }

    /// One for each kind of RAM. KVM's totals cover all of them together.
    fn vms(&self, settings: &Settings) -> Vec<ManagedVm> {
        let may_collapse_shared = settings.may_collapse_shared;
        let kinds = self.ram.pieces.iter().map(|piece| backing_of(piece.kind));
        let kinds = kinds.fold(Vec::new(), |mut unique, kind| {
            if !unique.contains(&kind) {
                unique.push(kind);
            }
            unique
        });
        let vm = |(number, backing): (usize, BackingConfig)| {
            let pieces: Vec<_> = self.ram.pieces.iter().filter(|piece| backing_of(piece.kind) == backing).collect();
            let ranges = pieces.iter().map(|piece| piece.range).collect();
            let kvm = self.kvm.map(|kvm| Arc::clone(kvm) as Arc<dyn SecondLevel>);
            let placed = Placed::of(pieces.iter().map(|piece| (piece.name.as_str(), piece.nodes)));
            // KSM merges anonymous memory alone.
            let merged = (backing.kind() == BackingKind::Anon).then(|| MergedPages::open(self.host).ok()).flatten();
            ManagedVm {
                merged,
                gate: Some(Arc::clone(self.gate) as _),
                guest_tables: self.tables.and_then(|tables| tables.as_ref().ok()).map(|tables| Arc::clone(tables) as _),
                heat: self.heat.map(WatchedRam::source),
                may_collapse_shared,
                barred: pieces.into_iter().filter_map(barred).collect(),
                bound_to: placed.bound_to,
                fixes_nodes: placed.fixes_nodes,
                recovery: Some(self.recoveries.of(backing, settings.recovery)),
                ..ManagedVm::external(VmId(number as u32), ranges, backing, kvm)
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

/// Keeps a guest's gate and its RAM up to date until it is dropped or the guest is gone.
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
            let every = || if guest.gate.is_in_event() { every.min(EVENT_EVERY) } else { every };
            while guest.gate.state() != GateState::Gone
                && stopped.recv_timeout(every()) == Err(RecvTimeoutError::Timeout)
            {
                if !guest.gate.is_quick() {
                    guest.refresh_gate();
                }
                guest.kvm.iter().for_each(|kvm| kvm.refresh());
                let is_watched = guest.gate.is_watched();
                // Tables of a guest that is being restored may be absent, and reading one would fail.
                guest.tables().iter().filter(|_| !is_watched).for_each(|tables| tables.refresh());
                let watched = Watched { by_it: guest.gate.has_userfaultfd(), by_any: is_watched };
                // A change that could not be followed is tried again at the next check.
                if let Some(change) = ram.change(&guest.process, guest.monitor.as_deref(), watched) {
                    let began = Instant::now();
                    match guest.follow_ram() {
                        Ok(()) => ram.read(change, began.elapsed()),
                        Err(_) => ram.not_read(),
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
    use crate::places::tests::fake_places;
    use crate::process::tests::add_process;
    use wideleaf_memory::RamRange;
    use wideleaf_memory::numa::placement::{MemoryMode, NodePolicy};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, Hva, NodeId, NodeSet};

    #[test]
    fn a_vmm_that_manages_its_guest_itself_is_refused() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["/usr/bin/wideleaf", "run", "gups"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("a VM");
        let refused = Attached::start(process, Settings::default()).err().expect("refused");
        assert!(matches!(refused, AttachError::ManagesItself(7)), "{refused}");
    }

    #[test]
    fn a_policy_that_cannot_manage_the_guest_is_refused_before_anything_is_done() {
        let giant = PolicyChoice::parse("giant").expect("it exists");
        let refused = check(Some(&giant)).expect_err("only our own VMM can");
        assert!(refused.to_string().contains("wideleaf run"), "{refused}");
        assert!(check(None).is_ok());
    }

    #[test]
    fn the_manager_keeps_to_the_limits_and_the_part_of_the_time_that_the_settings_say() {
        let out_of_reach = "10%".parse().expect("it is a part");
        let limits = BudgetLimits { copy_per_second: mib(7), ..BudgetLimits::default() };
        let config = Settings { limits, out_of_reach, ..Settings::default() }.of_manager();
        assert_eq!((config.limits, config.out_of_reach), (limits, out_of_reach));
        assert_eq!(Settings::default().of_manager().out_of_reach, ManagerConfig::default().out_of_reach);
    }

    #[test]
    fn unplugged_memory_is_no_longer_managed() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("a VM");
        let gate = Arc::new(GuestGate::new(process, None));
        let host = Arc::new(ProcessHost::open(std::process::id()).expect("a process may open itself"));
        let piece = |name: &str, start: u64, kind| {
            let gpa = GpaRange::new(Gpa::new(start), mib(128)).expect("small");
            let range = RamRange { gpa, hva: Hva::new((1 << 40) + start) };
            RamPiece { name: name.to_owned(), range, kind, never_huge: None, is_guess: false, nodes: None }
        };
        let (first, plugged) = (piece("ram", 0, RamKind::Anonymous), piece("dimm", 4 << 30, RamKind::Shmem));
        let managed = |pieces: Vec<RamPiece>| {
            let ram = RamMap { pieces, ..RamMap::default() };
            let recoveries = &Recoveries::default();
            let parts = Parts { ram: &ram, gate: &gate, kvm: None, host: &host, tables: None, heat: None, recoveries };
            let vms = parts.vms(&Settings::default());
            vms.iter().flat_map(|vm| vm.ranges.iter().map(|range| range.gpa.start().get())).collect::<Vec<_>>()
        };
        assert_eq!(managed(vec![first.clone(), plugged]), [0, 4 << 30]);
        assert_eq!(managed(vec![first]), [0]);
    }

    #[test]
    fn the_nodes_of_backends_bind_the_manager() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("a VM");
        let gate = Arc::new(GuestGate::new(process, None));
        let host = Arc::new(ProcessHost::open(std::process::id()).expect("a process may open itself"));
        let piece = |start: u64, node: u16| {
            let gpa = GpaRange::new(Gpa::new(start), mib(128)).expect("small");
            let range = RamRange { gpa, hva: Hva::new((1 << 40) + start) };
            let nodes = Some(NodePolicy { mode: MemoryMode::Bind, nodes: NodeSet::of(NodeId(node)) });
            let (name, kind) = (format!("m{node}"), RamKind::Anonymous);
            RamPiece { name, range, kind, never_huge: None, is_guess: false, nodes }
        };
        let nodes = |pieces: Vec<RamPiece>| {
            let ram = RamMap { pieces, ..RamMap::default() };
            let recoveries = &Recoveries::default();
            let parts = Parts { ram: &ram, gate: &gate, kvm: None, host: &host, tables: None, heat: None, recoveries };
            let vms = parts.vms(&Settings::default());
            vms.iter().map(|vm| (vm.bound_to.map(|nodes| nodes.to_string()), vm.fixes_nodes)).collect::<Vec<_>>()
        };
        assert_eq!(nodes(vec![piece(0, 1), piece(4 << 30, 1)]), [(Some("1".to_owned()), false)]);
        assert_eq!(nodes(vec![piece(0, 0), piece(4 << 30, 1)]), [(Some("0-1".to_owned()), true)]);
    }
}
