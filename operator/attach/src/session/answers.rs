//! Answers about a guest under a manager: its description, why windows are not huge, and the map of its windows. All
//! of it is as of the manager's latest tick. A guest that hangs holds up an answer by [`deadline::BRIEF`] at most.

use std::sync::Arc;
use std::time::Duration;

use wideleaf_control::view::{Care, Explanation, SavedView, VmView, WindowMap};
use wideleaf_memory::SecondLevel as _;
use wideleaf_memory::deadline::{self, NoAnswer};
use wideleaf_memory::gate::{Gate as _, GateState};
use wideleaf_memory::host::Host as _;
use wideleaf_memory::manager::Live;
use wideleaf_policies::recovery::{Cause, Progress};
use wideleaf_policies::{MappingStats, PolicyChoice};

use super::guest::Guest;
use crate::second_level::NOT_KNOWN;
use crate::survey;
use crate::window_map::{self, About};

/// Age of the latest tick after which the guest counts as not answering: twice the longest pause between ticks.
const TICK_AGE_MAX: Duration = Duration::from_secs(20);

impl Guest {
    /// Full description, as of the end of the latest tick.
    pub(super) fn view(&self) -> VmView {
        let (live, ram, figures) = self.seen();
        let now = self.now();
        let care = match (&now.settings.policy, self.gate.state()) {
            (None, _) => Care::Off,
            (_, GateState::Closed(why)) => Care::LeftAlone { reason: why.to_string() },
            (_, GateState::Gone) => Care::LeftAlone { reason: "it has ended".to_owned() },
            (_, GateState::Open) => Care::Managed,
        };
        let policy = now.settings.policy.as_ref().map_or("off".to_owned(), PolicyChoice::to_string);
        let (tables_note, heat_note) = (now.tables_note(), now.heat_note());
        drop(now);
        let view = figures.view.clone();
        let merged = self.merged();
        let saved = SavedView { merged: merged.as_ref().map_or(None, |merged| *merged), ..view.saved };
        VmView {
            care,
            policy: Some(policy),
            mapping: self.mapping().map(survey::mapping_view),
            scan_age_s: self.clock.age_s(live.scanned_at()),
            saved,
            notes: (self.notes.iter().chain(&ram.notes).chain(&live.panics).cloned())
                .chain(tables_note)
                .chain(heat_note)
                .chain(self.trouble())
                .chain(self.gate.note())
                .chain(survey::unknown_savings(&saved, merged.is_ok()))
                .chain(self.silence(&live))
                .chain(window_map::not_scanned(&live).map(str::to_owned))
                .chain(live.vms.iter().filter_map(|vm| vm.recovering).map(recovering))
                .collect(),
            ..view
        }
    }

    /// Reasons why windows are not huge.
    pub(super) fn explain(&self) -> Explanation {
        let (live, ram, figures) = self.seen();
        let tables_note = self.now().tables_note();
        let notes = self.notes.iter().chain(&ram.notes).cloned().chain(tables_note).chain(self.gate.note());
        let explanation = figures.explanation.clone();
        let scan_age_s = self.clock.age_s(live.scanned_at());
        Explanation { scan_age_s, notes: notes.chain(explanation.notes).collect(), ..explanation }
    }

    /// The map of all its windows.
    pub(super) fn windows(&self) -> WindowMap {
        let (live, tables_note, walk) = {
            let now = self.now();
            (now.manager.live(), now.tables_note(), now.settings.walk)
        };
        let why = self.notes.iter().find(|note| note.starts_with(NOT_KNOWN)).map_or(NOT_KNOWN, String::as_str);
        let about = About {
            name: &self.process.name,
            clock: self.clock,
            totals: self.mapping().ok_or(why),
            is_shadowed: walk.is_shadowed(),
            no_tables: tables_note.as_deref(),
        };
        let mut map = window_map::of_live(&about, &live);
        map.notes.extend(self.trouble().into_iter().chain(self.silence(&live)));
        map
    }

    fn mapping(&self) -> Option<MappingStats> {
        self.kvm.as_ref()?.mapping_stats().ok()
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
