//! KVM's side of a VM in memory, for tests: slots have a flag, the test sets the mapping totals, and every call can
//! be made to fail.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{Gfn, Gpa, GpaRange, MappingStats, PageSize};

use crate::testing::fake_calls::FakeCalls;

use crate::second_level::{
    FaultCounters, Paging, PagingMode, SecondLevel, SecondLevelError, Slot, SlotId, TableLevels,
};

/// A fake second level; see the module.
#[derive(Debug)]
pub struct FakeSecondLevel {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    slots: Vec<Slot>,
    stats: MappingStats,
    /// Counts of faults; `None`: this KVM has none.
    faults: Option<FaultCounters>,
    /// CPU time of the vCPUs; `None`: it is not known.
    vcpu_time: Option<Duration>,
    paging: Paging,
    paused: u32,
    calls: FakeCalls,
    ignores_dirty_log: bool,
    /// Whether logs can begin with all pages set.
    starts_logs_set: bool,
    paging_modes: Vec<PagingMode>,
    /// Frames written while their slot was logged, until the log is fetched.
    dirty: BTreeSet<u64>,
}

impl FakeSecondLevel {
    /// A VM with these memslots, without mappings yet.
    pub fn new(slots: &[GpaRange]) -> FakeSecondLevel {
        let slots = slots
            .iter()
            .zip(0..)
            .map(|(range, id)| Slot { id: SlotId(id), range: *range, is_dirty_logged: false })
            .collect();
        FakeSecondLevel {
            state: Mutex::new(State {
                slots,
                stats: MappingStats::default(),
                faults: None,
                vcpu_time: None,
                paging: Paging::Npt,
                paused: 0,
                calls: FakeCalls::default(),
                ignores_dirty_log: false,
                starts_logs_set: false,
                paging_modes: vec![PagingMode::Long { root: 0x1000, levels: TableLevels::Four }],
                dirty: BTreeSet::new(),
            }),
        }
    }

    /// Sets the answer of [`SecondLevel::mapping_stats`] from now on.
    pub fn set_stats(&self, stats: MappingStats) {
        self.state().stats = stats;
    }

    /// Sets the answer of [`SecondLevel::paging_modes`] from now on.
    pub fn set_paging_modes(&self, modes: &[PagingMode]) {
        self.state().paging_modes = modes.to_vec();
    }

    /// Sets the answer of [`SecondLevel::fault_counters`] from now on. Before the first such call, the statistics are
    /// missing, and asking for them is not a call that can fail.
    pub fn set_fault_counters(&self, counters: FaultCounters) {
        self.state().faults = Some(counters);
    }

    /// Sets the answer of [`SecondLevel::vcpu_time`] from now on. Asking for it is not a call that can fail.
    pub fn set_vcpu_time(&self, time: Duration) {
        self.state().vcpu_time = Some(time);
    }

    /// Sets the kind of tables from now on.
    pub fn set_paging(&self, paging: Paging) {
        self.state().paging = paging;
    }

    /// The `call`-th call that can fail from now on (the next is 0) fails with `errno`, once.
    pub fn fail_call(&self, call: u64, errno: i32) {
        self.state().calls.fail(call, errno);
    }

    /// The `call`-th call that can fail from now on (the next is 0) panics, once, before it has changed anything.
    pub fn panic_in_call(&self, call: u64) {
        self.state().calls.panic(call);
    }

    /// From now on, switching a dirty log succeeds and does nothing.
    pub fn ignore_dirty_log(&self) {
        self.state().ignores_dirty_log = true;
    }

    /// From now on, dirty logs can begin with all pages set, as with a newer KVM. Before, asking for that is not a call
    /// that can fail.
    pub fn start_logs_set(&self) {
        self.state().starts_logs_set = true;
    }

    /// Number of pages of which the log has a write.
    pub fn logged_pages(&self) -> usize {
        self.state().dirty.len()
    }

    /// Writes here like the guest: the log of its slot shows it, if that is on.
    pub fn write(&self, gpa: Gpa) {
        let mut state = self.state();
        if state.slots.iter().any(|slot| slot.is_dirty_logged && slot.range.contains(gpa)) {
            state.dirty.insert(Gfn::containing(gpa).get());
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A call that panics has changed nothing yet.
        self.state.lock()
    }

    fn enter(&self, what: &'static str) -> Result<MutexGuard<'_, State>, SecondLevelError> {
        let mut state = self.state();
        state.calls.enter().map_err(|source| SecondLevelError::Ioctl { what, source })?;
        Ok(state)
    }
}

impl State {
    fn logged(&self, slot: SlotId) -> Result<Slot, SecondLevelError> {
        let slot = *self.slots.iter().find(|s| s.id == slot).ok_or(SecondLevelError::NoSuchSlot(slot))?;
        let off = SecondLevelError::WrongState("the memslot's dirty log is off");
        if slot.is_dirty_logged { Ok(slot) } else { Err(off) }
    }

    fn bits(&self, slot: Slot) -> Vec<u64> {
        let pages = frames(slot);
        let mut bits = vec![0; slot.range.bytes().pages(PageSize::Base4K).div_ceil(64) as usize];
        for page in self.dirty.range(pages.clone()) {
            bits[((page - pages.start) / 64) as usize] |= 1 << ((page - pages.start) % 64);
        }
        bits
    }
}

/// Frames of a slot.
fn frames(slot: Slot) -> Range<u64> {
    Gfn::containing(slot.range.start()).get()..Gfn::containing(slot.range.end()).get()
}

impl SecondLevel for FakeSecondLevel {
    fn paging(&self) -> Paging {
        self.state().paging
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        self.enter("fake statistics").map(|state| state.stats)
    }

    fn fault_counters(&self) -> Result<FaultCounters, SecondLevelError> {
        if self.state().faults.is_none() {
            return Err(SecondLevelError::NoSuchStatistic("pf_fixed"));
        }
        self.enter("fake fault counters").map(|state| state.faults.unwrap_or_default())
    }

    fn vcpu_time(&self) -> Result<Duration, SecondLevelError> {
        self.state().vcpu_time.ok_or(SecondLevelError::NoSuchStatistic("vcpu_time"))
    }

    fn slots(&self) -> Vec<Slot> {
        self.state().slots.clone()
    }

    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
        let mut state = self.enter("fake dirty log")?;
        let ignores = state.ignores_dirty_log;
        let slot = state.slots.iter_mut().find(|s| s.id == slot).ok_or(SecondLevelError::NoSuchSlot(slot))?;
        slot.is_dirty_logged = if ignores { slot.is_dirty_logged } else { is_on };
        Ok(())
    }

    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let mut state = self.enter("fake dirty log")?;
        let slot = state.logged(slot)?;
        let bits = state.bits(slot);
        state.dirty.retain(|page| !frames(slot).contains(page));
        Ok(bits)
    }

    fn start_dirty_log_set(&self, slot: SlotId) -> Result<bool, SecondLevelError> {
        if !self.state().starts_logs_set {
            return Ok(false);
        }
        let mut state = self.enter("fake dirty log")?;
        let slot = state.slots.iter_mut().find(|s| s.id == slot).ok_or(SecondLevelError::NoSuchSlot(slot))?;
        if std::mem::replace(&mut slot.is_dirty_logged, true) {
            return Err(SecondLevelError::WrongState("the memslot's dirty log is on"));
        }
        let pages = frames(*slot);
        state.dirty.extend(pages);
        Ok(true)
    }

    fn read_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let state = self.enter("fake dirty log")?;
        let slot = state.logged(slot)?;
        Ok(state.bits(slot))
    }

    fn clear_dirty_log(&self, slot: SlotId, first_page: u64, pages: &[u64]) -> Result<(), SecondLevelError> {
        let mut state = self.enter("fake dirty log")?;
        let slot = state.logged(slot)?;
        assert!(first_page.is_multiple_of(64), "KVM refuses it");
        let first = frames(slot).start + first_page;
        for (word, at) in pages.iter().zip((first..).step_by(64)) {
            (0..64).filter(|bit| word >> bit & 1 == 1).for_each(|bit| {
                state.dirty.remove(&(at + bit));
            });
        }
        Ok(())
    }

    fn pause(&self) -> Result<(), SecondLevelError> {
        self.enter("fake pause")?.paused += 1;
        Ok(())
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        let mut state = self.enter("fake resume")?;
        state.paused = state.paused.checked_sub(1).ok_or(SecondLevelError::WrongState("the VM is not paused"))?;
        Ok(())
    }

    fn is_paused(&self) -> bool {
        self.state().paused > 0
    }

    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        let state = self.enter("fake roots")?;
        if state.paused == 0 {
            return Err(SecondLevelError::WrongState("the VM is not paused"));
        }
        Ok(state.paging_modes.clone())
    }
}
