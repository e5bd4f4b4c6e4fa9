//! Guests that come, change and go.
//!
//! ```text
//!   found ─▶ take ─▶ being attached ─▶ on the table ─ set ─▶ on the table ─ ended ─▶ bury
//!                         │ refused         └── other fixed settings ─▶ taken again └ detached ─▶ forget
//!                         └─▶ logged once
//! ```

use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;
use wideleaf_control::protocol::{ASK_AGAIN, Settings};
use wideleaf_control::view::{Vmm, WorkView};
use wideleaf_memory::panicked::caught;

use super::vm::{self, Hands, LeftAloneUntil, Vm};
use super::{Engine, leave, now_s, told};
use crate::config::Wanted;
use crate::guests::{Found, ProcessId};
use crate::state::Remembered;

/// What a guest keeps of its earlier managers.
#[derive(Clone, Debug, Default)]
pub(super) struct Earlier {
    work: WorkView,
    left_alone_until: Option<LeftAloneUntil>,
}

impl Earlier {
    pub(super) fn of(guest: &Remembered) -> Earlier {
        let left_alone_until = guest.left_alone_until_s.and_then(LeftAloneUntil::noted);
        Earlier { work: guest.work.clone(), left_alone_until }
    }
}

impl Engine {
    /// Takes up an earlier daemon's guests that are still the same process, and its room in the pools. A guest that
    /// does not answer is taken up by the first scouting that finds it answering.
    ///
    /// # Errors
    /// The running guests cannot be listed; nothing is taken up or forgotten then.
    pub fn resume(&self) -> Result<(), String> {
        let running = self.running()?;
        let pending = self.table().pending.clone();
        self.take_up(pending, &running);
        let given_back = self.give_back_abandoned();
        self.save();
        given_back
    }

    /// The running guests, from now on also known to requests.
    pub(super) fn running(&self) -> Result<Vec<Found>, String> {
        let running = self.doors.guests.find()?;
        self.looks.keep(running.clone());
        Ok(running)
    }

    fn take_up(&self, pending: Vec<Remembered>, running: &[Found]) {
        for guest in pending {
            let earlier = Earlier::of(&guest);
            let Remembered { process, name, said, .. } = guest;
            // A request may have settled it in between.
            let is_settled = !self.table().pending.iter().any(|pending| pending.process == process);
            match running.iter().find(|found| found.process == process) {
                _ if is_settled => {}
                Some(found) if found.no_answer.is_some() || !self.take_or_warn(found, said, earlier) => {
                    self.table().postponed.insert(process);
                    continue;
                }
                Some(_) => {}
                None => tracing::info!("{name} (pid {}) has ended", process.pid),
            }
            let mut table = self.table();
            table.pending.retain(|pending| pending.process != process);
            table.postponed.remove(&process);
        }
    }

    /// Surveys for new guests and abandoned rooms.
    ///
    /// # Errors
    /// The running guests cannot be listed. That does not mean that none runs, so nothing is given back.
    pub fn scout(&self) -> Result<(), String> {
        let running = self.running()?;
        let postponed = {
            let table = self.table();
            table.pending.iter().filter(|guest| table.postponed.contains(&guest.process)).cloned().collect()
        };
        self.take_up(postponed, &running);
        let is_running = |process: &ProcessId| running.iter().any(|found| found.process == *process);
        let came: Vec<Found> = {
            let mut table = self.table();
            table.left.retain(is_running);
            table.refused.retain(|process, _| is_running(process));
            table.mistakes.retain(|process, _| is_running(process));
            table.flavors.retain(|process, _| is_running(process));
            table.registered.retain(|process, _| is_running(process));
            // An earlier daemon's guest keeps its settings, however long it takes to take it up.
            let is_new = |found: &Found| {
                !table.vms.contains_key(&found.process)
                    && !table.left.contains(&found.process)
                    && table.remembered(found.process).is_none()
            };
            // A guest that does not answer may have a name with other rules in the configuration.
            let is_named = |found: &Found| {
                found.vmm != Vmm::Wideleaf
                    && found.no_answer.is_none()
                    && table.config.attach.automatic.is_match(&found.believed_name())
            };
            running.iter().filter(|found| is_new(found) && is_named(found)).cloned().collect()
        };
        for found in &came {
            // Taking the ones before it may have taken so long that an operator has detached it.
            if !self.table().left.contains(&found.process) {
                self.take_or_warn(found, Settings::default(), Earlier::default());
            }
        }
        let given_back = self.give_back_abandoned();
        self.save();
        given_back
    }

    /// Takes a guest under management, and returns whether it is. Logs a refusal once; the next scouting tries again.
    fn take_or_warn(&self, found: &Found, said: Settings, earlier: Earlier) -> bool {
        let refusal = self.take(found, said, earlier).err();
        let mut table = self.table();
        let before = match &refusal {
            Some(error) => table.refused.insert(found.process, error.clone()),
            None => table.refused.remove(&found.process),
        };
        let is_taken = refusal.is_none();
        if let Some(error) = refusal.filter(|error| before.as_ref() != Some(error)) {
            tracing::warn!("{} (pid {}) is not managed: {error}", found.name, found.process.pid);
        }
        is_taken
    }

    /// Takes a guest under management, which may take seconds. A guest that is managed already gets the
    /// settings and stays.
    pub(super) fn take(&self, found: &Found, said: Settings, earlier: Earlier) -> Result<(), String> {
        if found.vmm == Vmm::Wideleaf {
            return Err("the guest runs under `wideleaf run`, which has a manager of its own".into());
        }
        let wanted = {
            let mut table = self.table();
            if table.vms.contains_key(&found.process) {
                drop(table);
                return self.set(found.process, &said);
            }
            let wanted = table.wanted(found, &said)?;
            if !table.being_attached.insert(found.process) {
                return Err(format!("the guest is being attached already; {ASK_AGAIN}"));
            }
            wanted
        };
        self.attach_as(found, said, wanted, earlier)
    }

    /// Attaches a guest that is marked as being attached, and puts it on the table. It is left alone from the start
    /// where a client has asked for that.
    fn attach_as(&self, found: &Found, said: Settings, wanted: Wanted, earlier: Earlier) -> Result<(), String> {
        let Earlier { work: before, left_alone_until } = earlier;
        // A panic on unexpected data of a guest must not prevent another attempt.
        let taken = caught(|| {
            let mut care = self.doors.guests.attach(found, &wanted, left_alone_until.is_some())?;
            let view = care.view();
            let hands = Hands::Attached(Arc::new(Mutex::new(Some(care))));
            Ok(Vm::new(found.clone(), said, wanted, before, hands, view))
        });
        let taken = taken.unwrap_or_else(|panicked| Err(format!("attaching it {panicked}")));
        let mut table = self.table();
        table.being_attached.remove(&found.process);
        self.attach_ended.notify_all();
        let mut vm = taken?;
        vm.left_alone_until = left_alone_until;
        tracing::info!("{} (pid {}) is managed: policy {}", vm.found.name, vm.found.process.pid, vm.wanted.policy);
        table.left.remove(&found.process);
        table.rooms.iter_mut().filter(|room| room.belongs_to(found)).for_each(|room| room.see(found.process, now_s()));
        table.vms.insert(found.process, vm);
        // Its settings of an earlier daemon are of no use any more.
        table.pending.retain(|pending| pending.process != found.process);
        table.postponed.remove(&found.process);
        drop(table);
        self.share_out();
        Ok(())
    }

    /// Attaches a guest again where `said` changes settings that are fixed at attach: its monitor, and whether
    /// shared memory may be collapsed. Counters continue. Returns whether it did. Where the guest cannot be
    /// attached like that, it is attached as before.
    pub(super) fn take_anew(&self, found: &Found, said: &Settings) -> Result<bool, String> {
        let (wanted, vm, key, earlier) = {
            let mut table = self.table();
            let Some(vm) = table.vms.get(&found.process) else { return Ok(false) };
            let (Some(key), Some(earlier)) = (vm.settled_otherwise(said), vm.remembered()) else { return Ok(false) };
            let wanted = table.wanted(&vm.found, said)?;
            if !table.being_attached.insert(found.process) {
                return Err(format!("the guest is being attached already; {ASK_AGAIN}"));
            }
            // If this daemon is killed now, the next one takes the guest up. It stays until it is attached.
            table.pending.push(earlier.clone());
            (wanted, table.vms.remove(&found.process), key, earlier)
        };
        tracing::info!("{} (pid {}) is attached again, for its {key}", found.name, found.process.pid);
        let (was, left_alone_until) = vm.as_ref().map(|vm| (vm.wanted.clone(), vm.left_alone_until)).unzip();
        let left_alone_until = left_alone_until.flatten();
        vm.as_ref().and_then(Vm::care).iter().for_each(leave);
        let kept = Earlier { work: earlier.work.clone(), left_alone_until };
        let attached = self.attach_as(found, said.clone(), wanted, kept.clone());
        if let (Err(error), Some(was)) = (&attached, was) {
            tracing::warn!("{} (pid {}) is attached as before: {error}", found.name, found.process.pid);
            self.table().being_attached.insert(found.process);
            if let Err(error) = self.attach_as(found, earlier.said, was, kept) {
                // Its earlier manager may hang at the guest, and hold it until then. Each scouting tries again.
                tracing::warn!("{} (pid {}) is not managed for now: {error}", found.name, found.process.pid);
                let mut table = self.table();
                table.postponed.insert(found.process);
                table.refused.insert(found.process, error);
            }
        }
        attached.map(|()| true)
    }

    /// Changes the settings of a VM, one change after the other. Invalid ones are refused, and all stays as it was.
    pub(super) fn set(&self, process: ProcessId, changes: &Settings) -> Result<(), String> {
        let setting = self.table().vms.get(&process).map(|vm| vm.setting.clone()).ok_or("the VM has just ended")?;
        let _one_at_a_time = setting.lock();
        let (said, wanted, care) = {
            let table = self.table();
            let vm = table.vms.get(&process).ok_or("the VM has just ended")?;
            let said = vm::merged(&vm.said, changes);
            let wanted = vm.keeping_settled(changes, table.wanted(&vm.found, &said)?)?;
            if (&vm.said, &vm.wanted) == (&said, &wanted) {
                return Ok(());
            }
            (said, wanted, vm.care())
        };
        if let Some(care) = care {
            told(&care, |care| care.apply(&wanted)).unwrap_or(Err("the VM has just ended".into()))?;
        }
        let mut table = self.table();
        if let Some(vm) = table.vms.get_mut(&process) {
            tracing::info!("{} is set: policy {}, guarantee {}", vm.found.name, wanted.policy, wanted.guarantee);
            vm.said = said.clone();
            vm.applied = wanted.policy.clone();
            vm.wanted = wanted;
            if let Hands::Registered(_) = vm.hands {
                table.registered.insert(process, said);
            }
        }
        drop(table);
        self.refresh(process);
        self.share_out();
        Ok(())
    }

    /// Reads the view of one VM now, so that the client sees its change.
    pub(super) fn refresh(&self, process: ProcessId) {
        let care = self.table().vms.get(&process).and_then(Vm::care);
        let view = care.and_then(|care| told(&care, |care| care.view()));
        if let (Some(view), Some(vm)) = (view, self.table().vms.get_mut(&process)) {
            vm.see(view);
        }
    }

    /// Removes a VM that has ended from the table.
    ///
    /// The next scouting gives its room back: a pool may be locked for a minute, and the tick must not wait for it.
    pub(super) fn bury(&self, process: ProcessId) {
        let Some(vm) = self.off_the_table(process, "has ended") else { return };
        let Hands::Attached(care) = vm.hands else { return };
        // Its threads may wait for an answer, and this thread must not wait for them. Without a new thread, `care`
        // is dropped here.
        let leaving = thread::Builder::new().name("leaving".into()).spawn(move || leave(&care));
        drop(leaving);
        self.save();
    }

    /// Removes a VM from the table and ends its management.
    pub(super) fn forget(&self, process: ProcessId, why: &str) {
        if let Some(care) = self.off_the_table(process, why).as_ref().and_then(Vm::care) {
            leave(&care);
        }
    }

    fn off_the_table(&self, process: ProcessId, why: &str) -> Option<Vm> {
        let vm = self.table().vms.remove(&process)?;
        tracing::info!("{} (pid {}) {why}", vm.found.name, process.pid);
        Some(vm)
    }
}
