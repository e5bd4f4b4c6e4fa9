//! A guest under a manager, as its clients and its watcher share it: what was found of it, and the manager, which
//! another one replaces when the policy or the RAM changes.
//!
//! ```text
//!   policy set by a client ──┐  one at a time                  locked for a moment
//!   RAM that has changed ────┴─▶ a new manager, its first tick ──▶ in the place of the old one, which then ends
//! ```
//!
//! A change that fails leaves the manager before as it was. Counters and what is to be recovered continue.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_control::view::{Explanation, VmView};
use wideleaf_memory::host::Host as _;
use wideleaf_memory::host::process::{Claim, ProcessHost};
use wideleaf_memory::manager::{Live, Manager};
use wideleaf_memory::sensors::page_tables::table_memory;
use wideleaf_policies::{PageSize, PolicyChoice};

use super::error::AttachError;
use super::manager_parts::{Parts, Recoveries, Tables, tables};
use super::settings::{Settings, needs_access};
use crate::gate::GuestGate;
use crate::guest_pages::OutsideTables;
use crate::heat::WatchedRam;
use crate::host_clock::HostClock;
use crate::live_view::{self, OfLatest};
use crate::monitor::Monitor;
use crate::process::VmProcess;
use crate::ram::{RamMap, RamPiece};
use crate::ram_watch::RamWatch;
use crate::second_level::OutsideView;
use crate::survey;
use crate::work::Work;

/// A guest, its gate, what KVM tells of it, and its manager.
pub(super) struct Guest {
    pub(super) process: VmProcess,
    pub(super) monitor: Option<Arc<Monitor>>,
    pub(super) host: Arc<ProcessHost>,
    pub(super) clock: HostClock,
    pub(super) gate: Arc<GuestGate>,
    pub(super) kvm: Option<Arc<OutsideView>>,
    pub(super) notes: Vec<String>,
    /// What was large before events, for each kind of RAM, over all managers.
    pub(super) recoveries: Recoveries,
    /// Held while a manager is made: there is one change at a time.
    pub(super) changing: Mutex<()>,
    /// Locked for moments.
    now: Mutex<Now>,
    /// Figures of the latest tick that was looked at.
    figures: OfLatest<Live, Figures>,
    /// Declared after the manager, so that it is released after the manager's end.
    _claim: Claim,
}

/// What another manager changes.
pub(super) struct Now {
    pub(super) ram: Arc<RamMap>,
    pub(super) settings: Settings,
    pub(super) manager: Manager,
    /// The guest's own tables, where the policy needs them.
    pub(super) tables: Option<Tables>,
    /// Which memory the guest uses, where the policy needs that.
    pub(super) heat: Option<WatchedRam>,
    /// Work of the managers before this one.
    before: Arc<Work>,
}

/// Figures that change at a tick of the manager only. To compute them takes a look at every window.
pub(super) struct Figures {
    pub(super) view: VmView,
    pub(super) explanation: Explanation,
}

impl Now {
    pub(super) fn tables_note(&self) -> Option<String> {
        match self.tables.as_ref()? {
            Ok(tables) => tables.why_not(),
            Err(why) => Some(why.clone()),
        }
    }

    /// Age and error of the heat, or why it is unknown.
    pub(super) fn heat_note(&self) -> Option<String> {
        self.heat.as_ref().map(WatchedRam::note)
    }
}

impl Guest {
    /// Opens the process, finds the guest's RAM and starts the manager. Also returned: the watch over that RAM.
    ///
    /// # Errors
    /// [`AttachError`]; nothing is then done to the guest.
    pub(super) fn open(process: VmProcess, settings: Settings) -> Result<(Guest, RamWatch), AttachError> {
        let pid = process.pid;
        let host = ProcessHost::open(pid).map_err(|source| AttachError::Host { pid, source })?;
        let claim = host.claim().map_err(|source| AttachError::Host { pid, source })?;
        let claim = claim.ok_or(AttachError::HasManager(pid))?;
        // From here on a descriptor holds the process; before, another process may have received its number.
        if !process.is_alive() {
            return Err(AttachError::Gone(pid));
        }
        let clock = HostClock::showing(host.now());
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
        let guest = Guest {
            process,
            monitor,
            host,
            clock,
            gate,
            kvm,
            notes,
            recoveries,
            changing,
            now,
            figures: OfLatest::default(),
            _claim: claim,
        };
        Ok((guest, ram_watch))
    }

    pub(super) fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock()
    }

    /// The latest tick, the RAM that it covered, and its figures.
    pub(super) fn seen(&self) -> (Arc<Live>, Arc<RamMap>, Arc<Figures>) {
        let (live, ram, before, walk) = {
            let now = self.now();
            (now.manager.live(), Arc::clone(&now.ram), Arc::clone(&now.before), now.settings.walk)
        };
        let figures = self.figures.of(&live, || {
            let work = before.with(&live).view(&live, self.clock, &walk);
            let page_tables = Some(survey::tables_view(table_memory(self.host.as_ref())));
            Figures {
                view: VmView { page_tables, ..live_view::view(&self.process, &ram, &live, work) },
                explanation: live_view::explanation(&self.process.name, &live, &ram.placed(), Vec::new()),
            }
        });
        (live, ram, figures)
    }

    /// Refreshes the gate. The manager hears at once of an event that has begun or ended.
    pub(super) fn refresh_gate(&self) {
        let before = self.gate.changes();
        self.gate.refresh();
        if self.gate.changes() != before {
            self.now().manager.look();
        }
    }

    pub(super) fn tables(&self) -> Option<Arc<OutsideTables>> {
        self.now().tables.as_ref()?.as_ref().ok().cloned()
    }

    /// Replaces one manager by another if this is still wanted once the other is there; the caller holds `changing`.
    /// There are two loops for a moment, and the old one may still be at a window: each checks only its own work.
    pub(super) fn go_on_with(
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
    pub(super) fn follow_ram(&self) -> Result<(), AttachError> {
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
