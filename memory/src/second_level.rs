//! Interface to KVM's side of one VM. The trait is defined here, where the loop uses it. It is implemented in
//! `vmm/src/kvm`, and by `testing::fake_second_level::FakeSecondLevel` for tests.
//!
//! KVM counts leaf mappings per VM, not per window. The mapping of a window is inferred from its host backing and the
//! state of its memslot, and checked against these totals.

use std::time::Duration;

use wideleaf_policies::{GpaRange, MappingStats};

mod detect;
pub mod guard;
mod paging_mode;

pub use detect::{PagingError, detect_paging, emulates_guest_kernels};
pub use paging_mode::{ControlRegisters, PagingMode, TableLevels};

/// Kind of tables of the second level on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Paging {
    /// Intel's extended page tables: two-dimensional paging in hardware.
    Ept,
    /// AMD's nested page tables: two-dimensional paging in hardware.
    Npt,
    /// Shadow paging: KVM combines both levels into one table. Mapping sizes are real (the smaller of the guest's and
    /// the host's page), but there is no two-dimensional walk to save.
    Shadow,
}

impl Paging {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Paging::Ept => "ept",
            Paging::Npt => "npt",
            Paging::Shadow => "shadow",
        }
    }
}

/// Number of a memslot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// A memslot: the unit in which the second level can be held at 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Number of the memslot.
    pub id: SlotId,
    /// Guest-physical memory that it covers.
    pub range: GpaRange,
    /// Whether dirty logging is on, which makes KVM map it with 4 KiB leaves.
    pub is_dirty_logged: bool,
}

/// Counts of a VM's vCPUs since they began. Of a VM with many vCPUs they may be those of some, always the same ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounters {
    /// Number of second-level faults after which KVM had entered a mapping.
    pub faults: u64,
    /// Number of times that a vCPU left the guest, for any reason.
    pub exits: u64,
    /// CPU time of the vCPUs' threads in the kernel, without the time in the guest. It grows by ticks of the kernel's
    /// timer.
    pub system_time: Duration,
    /// All CPU time of these threads by the same ticks, with the time in the guest.
    pub ticked_time: Duration,
    /// All CPU time of these threads, exact.
    pub cpu_time: Duration,
}

impl FaultCounters {
    /// What was counted since `before`; `None` if a vCPU has ended meanwhile, so that less is counted.
    pub fn since(self, before: FaultCounters) -> Option<FaultCounters> {
        Some(FaultCounters {
            faults: self.faults.checked_sub(before.faults)?,
            exits: self.exits.checked_sub(before.exits)?,
            system_time: self.system_time.checked_sub(before.system_time)?,
            ticked_time: self.ticked_time.checked_sub(before.ticked_time)?,
            cpu_time: self.cpu_time.checked_sub(before.cpu_time)?,
        })
    }

    /// CPU time in the kernel, of what was counted in some time: the exact CPU time, of which ticks tell the part. No
    /// clock has that part alone, and ticks alone miss much of a thread that runs for less than a tick after each of
    /// its timers. Linux scales the times of proc_pid_stat(5) likewise (`cputime_adjust`, kernel/sched/cputime.c).
    pub fn time_in_kernel(&self) -> Duration {
        let [system, ticked, all] = [self.system_time, self.ticked_time, self.cpu_time].map(|time| time.as_nanos());
        // Without ticks, nothing is known of the part; the three clocks are read one after the other.
        let in_kernel = (all * system).checked_div(ticked).unwrap_or(0).min(all);
        Duration::from_nanos(u64::try_from(in_kernel).unwrap_or(u64::MAX))
    }
}

/// Error of a call on a dirty log that is cleared page by page.
const NO_MANUAL_LOG: &str = "the dirty log of this memslot is cleared by each fetch, not page by page";

/// KVM's side of one VM. Every call may fail, and none may block for longer than a vCPU needs to leave the guest.
pub trait SecondLevel: Send + Sync {
    /// Kind of tables of the second level.
    fn paging(&self) -> Paging;

    /// KVM's count of leaf mappings by size, now.
    ///
    /// # Errors
    /// [`SecondLevelError`] if the statistics cannot be read.
    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError>;

    /// Counts of the vCPUs' faults and of the time that they take, now.
    ///
    /// # Errors
    /// [`SecondLevelError`]; [`SecondLevelError::NoSuchStatistic`] where they are never known.
    fn fault_counters(&self) -> Result<FaultCounters, SecondLevelError> {
        Err(SecondLevelError::NoSuchStatistic("pf_fixed"))
    }

    /// CPU time of all vCPUs' threads so far, in the guest and in the kernel; less than before once one has ended.
    ///
    /// # Errors
    /// [`SecondLevelError::NoSuchStatistic`] where it is never known.
    fn vcpu_time(&self) -> Result<Duration, SecondLevelError> {
        Err(SecondLevelError::NoSuchStatistic("vcpu_time"))
    }

    /// All memslots that hold guest RAM, ascending by address.
    fn slots(&self) -> Vec<Slot>;

    /// Switches dirty logging of a memslot: on makes KVM drop large mappings there and map 4 KiB leaves as the guest
    /// touches memory, off lets it map large again, on the next touch (`KVM_SET_USER_MEMORY_REGION`,
    /// `KVM_MEM_LOG_DIRTY_PAGES`).
    ///
    /// # Errors
    /// [`SecondLevelError`]; the slot is then as it was.
    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError>;

    /// Fetches and clears the dirty log of a memslot: one bit per base page, lowest address first
    /// (`KVM_GET_DIRTY_LOG`).
    ///
    /// # Errors
    /// [`SecondLevelError`], also where logging is off.
    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError>;

    /// Switches dirty logging of a memslot on and changes no mapping: every page counts as written until it is cleared
    /// by [`SecondLevel::clear_dirty_log`], and KVM holds a part at 4 KiB from then on
    /// (`KVM_DIRTY_LOG_INITIALLY_SET`). Returns whether this KVM can; if not, the slot is as it was.
    ///
    /// # Errors
    /// [`SecondLevelError`], also where logging is on already; the slot is then as it was.
    fn start_dirty_log_set(&self, _slot: SlotId) -> Result<bool, SecondLevelError> {
        Ok(false)
    }

    /// Fetches the dirty log of a memslot that [`SecondLevel::start_dirty_log_set`] has switched on, and clears none of
    /// the vCPUs' bits. Bits of devices are returned once.
    ///
    /// # Errors
    /// [`SecondLevelError`], also where logging is off.
    fn read_dirty_log(&self, _slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        Err(SecondLevelError::WrongState(NO_MANUAL_LOG))
    }

    /// Clears bits of the vCPUs in a dirty log that [`SecondLevel::start_dirty_log_set`] has switched on: bit b of word
    /// w of `pages` is page `first_page + 64 * w + b` of the memslot. `first_page` is a multiple of 64. A write after
    /// this call is in the log again, so a page is cleared first and copied then (`KVM_CLEAR_DIRTY_LOG`).
    ///
    /// # Errors
    /// [`SecondLevelError`], also where logging is off; some of the bits may then be cleared.
    fn clear_dirty_log(&self, _slot: SlotId, _first_page: u64, _pages: &[u64]) -> Result<(), SecondLevelError> {
        Err(SecondLevelError::WrongState(NO_MANUAL_LOG))
    }

    /// Takes all vCPUs out of the guest. When it returns, none runs guest code any more, and no device of the VM
    /// writes its RAM. Calls nest: the vCPUs run again after as many [`SecondLevel::resume`] as `pause`.
    ///
    /// # Errors
    /// [`SecondLevelError`] if a vCPU does not leave the guest in time, or a device does not end its transfer; then
    /// none is paused. A slow device stops the vCPUs for no longer than a pause may last: the wait for it happens
    /// while they run.
    fn pause(&self) -> Result<(), SecondLevelError>;

    /// Undoes one [`SecondLevel::pause`].
    ///
    /// # Errors
    /// [`SecondLevelError`] if nothing was paused.
    fn resume(&self) -> Result<(), SecondLevelError>;

    /// Whether no vCPU runs guest code, and none will before a pause is undone, whichever part of the VMM has paused
    /// them. `false` where that is not known.
    fn is_paused(&self) -> bool {
        false
    }

    /// Paging mode of each vCPU, in order, with the root of its tables. The vCPUs must be paused.
    ///
    /// # Errors
    /// [`SecondLevelError`], also if the VM is not paused.
    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError>;
}

/// Why KVM's side did not answer.
#[derive(Debug, thiserror::Error)]
pub enum SecondLevelError {
    /// An ioctl failed.
    #[error("{what} failed: {source}")]
    Ioctl {
        /// Name of the request in the KVM API.
        what: &'static str,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// The memslot does not exist.
    #[error("there is no memslot {}", .0.0)]
    NoSuchSlot(SlotId),
    /// A giant in it is being moved.
    #[error("cannot use the dirty log of memslot {}: a giant in it is being moved; try again later", .0.0)]
    Claimed(SlotId),
    /// Another user of the dirty log needs it.
    #[error(
        "cannot use the dirty log of memslot {}: a program other than the manager, perhaps a migration, switched it \
         on; it is left alone",
        .0.0
    )]
    OfOthers(SlotId),
    /// A vCPU did not leave the guest in time.
    #[error("vcpu {vcpu} did not leave the guest within {waited_ms} ms")]
    PauseTimedOut {
        /// Index of the first vCPU that did not.
        vcpu: usize,
        /// Time waited, in milliseconds.
        waited_ms: u64,
    },
    /// A device did not finish a request in time.
    #[error("a device of the VM did not finish a request within {waited_ms} ms: its disk or its peer is slow")]
    DeviceBusy {
        /// Time waited, in milliseconds.
        waited_ms: u64,
    },
    /// The call does not fit the state of the VM.
    #[error("{0}")]
    WrongState(&'static str),
    /// KVM does not have this statistic.
    #[error("this kernel's KVM has no statistic {0}")]
    NoSuchStatistic(&'static str),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_the_kernel_is_the_exact_cpu_time_in_the_ratio_of_the_ticks() {
        let in_kernel = |system: u64, ticked: u64, cpu_us: u64| {
            let [system_time, ticked_time] = [system, ticked].map(|ticks| Duration::from_millis(4 * ticks));
            let cpu_time = Duration::from_micros(cpu_us);
            let counters = FaultCounters { system_time, ticked_time, cpu_time, ..FaultCounters::default() };
            counters.time_in_kernel().as_micros()
        };
        assert_eq!(in_kernel(75, 77, 413_400), 402_662, "ticks: 300 ms");
        assert_eq!([in_kernel(3, 3, 9_000), in_kernel(0, 3, 9_000)], [9_000, 0], "all of it, or nothing");
        assert_eq!(in_kernel(0, 0, 3_000), 0, "no tick has found it");
        assert_eq!(in_kernel(4, 3, 9_000), 9_000, "a tick between two readings");
    }
}
