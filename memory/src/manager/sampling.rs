//! The slower sensors of one VM, each as often as its cost allows and only where the policy asks for it: access and zero
//! pages of a rotating share of the windows per tick, the guest's own tables whole but rarely.
//!
//! ```text
//!   tick:  finish ──▶ sense (host backing, all windows) ──▶ decide ──▶ act ──▶ start
//!            │ what was touched since                                            │ the next share goes aside
//!            └───────────────── between two ticks the guest runs ────────────────┘
//! ```
//!
//! A window that is aside looks unbacked, so no sample is under way while the loop senses and acts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wideleaf_policies::policy::Needs;
use wideleaf_policies::{AccessHistory, Backing, GuestMapping, Moment, VmSnapshot, WindowIndex, WindowRow};

use super::ManagedVm;
use crate::actuators::swap::Swapper;
use crate::aside::WindowMover;
use crate::host::Host;
use crate::region::{GuestRam, RamRange};
use crate::second_level::SecondLevel;
use crate::sensors::access::{AccessConfig, AccessCost, AccessSensor, Rotation, Seen};
use crate::sensors::guest_tables::{self, TableLevels};
use crate::sensors::zero_pages::window_zero_pages;

/// Windows of an access sample. With a third of a millisecond each and a tick a second when nothing happens: half a per
/// cent of a core, and no window is missed for longer than it takes to go round.
const ACCESS_SHARE: usize = 16;

/// Windows searched for zero pages per tick: 0.7 ms each where all is zero, a few microseconds in ordinary memory.
const ZERO_SHARE: usize = 8;

/// How often the guest's own tables are walked: a walk stops the guest for as long as a kick takes and reads all its tables.
const GUEST_TABLES_INTERVAL: Duration = Duration::from_secs(2);

/// What a sensor did and what that cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SensorCost {
    /// Samples.
    pub samples: u64,
    /// Windows looked at.
    pub windows: u64,
    /// Times the guest had to wait: touches of windows that were aside, pauses.
    pub waits: u64,
    /// CPU time in the manager's thread.
    pub cpu: Duration,
}

impl SensorCost {
    fn add(&mut self, other: SensorCost) {
        self.samples += other.samples;
        self.windows += other.windows;
        self.waits += other.waits;
        self.cpu += other.cpu;
    }
}

/// What the slower sensors did, by name.
pub type SensorCosts = BTreeMap<&'static str, SensorCost>;

/// The slower sensors of one VM and what they saw last, by row of its snapshot.
pub(super) struct Sampling {
    windows: Vec<WindowIndex>,
    /// Of the access sensor, as of the last time it finished.
    histories: Vec<AccessHistory>,
    access: Option<SharedAccess>,
    zero: Option<ZeroSampling>,
    guest_tables: Option<GuestTables>,
}

/// The access sensor of a VM, shared with whoever has to see every window in its place.
#[derive(Clone)]
pub(super) struct SharedAccess(Arc<Mutex<AccessSampling>>);

impl SharedAccess {
    /// Brings every window back. None is aside as long as the answer lives.
    pub(super) fn in_place(&self, host: &dyn Host) -> MutexGuard<'_, AccessSampling> {
        let mut access = self.lock();
        access.finish(host);
        access
    }

    /// Something that swaps windows, unless somebody looks at them.
    pub(super) fn swapper(&self) -> Swapper {
        Swapper::new(self.lock().mover.aside().clone())
    }

    /// Calls `swap` while nobody looks who wants to see every window in its place.
    pub(super) fn unseen<T>(&self, swap: impl FnOnce() -> T) -> T {
        let _turn = self.lock();
        swap()
    }

    fn lock(&self) -> MutexGuard<'_, AccessSampling> {
        // A thread that panicked half-way has left windows aside; the mover brings them back, and nobody is told of them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct AccessSampling {
    // Before the mover: it brings back what it took.
    sensor: AccessSensor,
    mover: WindowMover,
    rotation: Rotation,
    windows: Vec<WindowIndex>,
    histories: Vec<AccessHistory>,
    is_under_way: bool,
    /// Not yet reported.
    cost: SensorCost,
}

struct ZeroSampling {
    ram: Arc<GuestRam>,
    rotation: Rotation,
    pages: Vec<Option<u16>>,
}

struct GuestTables {
    ram: Arc<GuestRam>,
    second_level: Arc<dyn SecondLevel>,
    walked_at: Option<Moment>,
    mappings: Vec<GuestMapping>,
}

impl Sampling {
    /// The sensors that `needs` names and this VM and host have. For each that they have not, `unanswered` gets a line.
    pub(super) fn new(host: &Arc<dyn Host>, vm: &ManagedVm, needs: Needs, unanswered: &mut Vec<String>) -> Sampling {
        let windows: Vec<_> = vm.ranges.iter().flat_map(|range| range.gpa.windows()).collect();
        let rows = windows.len();
        let mut told = |question: &str, why: String| unanswered.push(format!("{}: {question}: {why}", vm.id));
        let access = needs.access.then(|| AccessSampling::start(host, vm, windows.clone()));
        let access = access.and_then(|access| access.map_err(|why| told("which windows are used", why)).ok());
        let access = access.map(|access| SharedAccess(Arc::new(Mutex::new(access))));
        let zero = needs.zero.then(|| ZeroSampling::start(vm, rows));
        let zero = zero.and_then(|zero| zero.map_err(|why| told("which pages are zero", why)).ok());
        let guest_tables = needs.guest_mapping.then(|| GuestTables::start(vm, rows));
        let guest_tables =
            guest_tables.and_then(|tables| tables.map_err(|why| told("which pages the guest itself uses", why)).ok());
        Sampling { windows, histories: Vec::new(), access, zero, guest_tables }
    }

    /// Ends what is under way. Afterwards every window is where the guest sees it.
    pub(super) fn finish(&mut self, host: &dyn Host, costs: &mut SensorCosts) {
        if let Some(access) = &self.access {
            let mut access = access.in_place(host);
            self.histories.clone_from(&access.histories);
            costs.entry("access").or_default().add(std::mem::take(&mut access.cost));
        }
    }

    /// The access sensor, if there is one.
    pub(super) fn access(&self) -> Option<SharedAccess> {
        self.access.clone()
    }

    /// Looks again where it is time, and takes the next share aside. `rows` is what was sensed at this tick.
    pub(super) fn start(&mut self, host: &dyn Host, vm: &ManagedVm, rows: &VmSnapshot, costs: &mut SensorCosts) {
        if let Some(zero) = &mut self.zero {
            zero.look(host, vm, rows, &self.windows, costs.entry("zero_pages").or_default());
        }
        if let Some(tables) = &mut self.guest_tables {
            tables.look(host, &self.windows, costs.entry("guest_tables").or_default());
        }
        // Last: what was taken aside is not to be looked at.
        if let Some(access) = &self.access {
            access.lock().start_share(host, rows);
        }
    }

    /// What is known of a row, beside its host backing.
    pub(super) fn fill(&self, index: usize, row: WindowRow) -> WindowRow {
        let is_present = row.backing != Backing::Unbacked;
        WindowRow {
            access: self.histories.get(index).copied().unwrap_or_default(),
            // Pages may have gone since they were counted.
            zero: self
                .zero
                .as_ref()
                .and_then(|zero| zero.pages[index])
                .filter(|zero| is_present && *zero <= row.resident),
            guest_mapping: self.guest_tables.as_ref().map_or(row.guest_mapping, |tables| tables.mappings[index]),
            ..row
        }
    }
}

impl AccessSampling {
    fn start(host: &Arc<dyn Host>, vm: &ManagedVm, windows: Vec<WindowIndex>) -> Result<AccessSampling, String> {
        let ram = vm.ram.clone().ok_or("only RAM that is mapped in this process can be taken aside")?;
        let mover = WindowMover::start(host.clone(), ram).map_err(|error| error.to_string())?;
        Ok(AccessSampling {
            sensor: AccessSensor::new(mover.aside().clone(), AccessConfig::default()),
            mover,
            rotation: Rotation::new(ACCESS_SHARE),
            histories: vec![AccessHistory::default(); windows.len()],
            windows,
            is_under_way: false,
            cost: SensorCost::default(),
        })
    }

    fn start_share(&mut self, host: &dyn Host, rows: &VmSnapshot) {
        let share = self.rotation.next_share(&backed_by_pages_of_their_own(rows));
        self.sensor.start(host, &share);
        self.is_under_way = true;
    }

    fn finish(&mut self, host: &dyn Host) {
        if !std::mem::take(&mut self.is_under_way) {
            return;
        }
        let sample = self.sensor.finish(host);
        for (window, seen) in sample.rows {
            let Ok(row) = self.windows.binary_search(&window) else { continue };
            match seen {
                Seen::Touched => self.histories[row] = self.histories[row].with(true),
                Seen::Untouched => self.histories[row] = self.histories[row].with(false),
                Seen::Unknown(_) => {}
            }
        }
        let AccessCost { windows, events, cpu } = sample.cost;
        self.cost.add(SensorCost { samples: 1, windows, waits: events, cpu });
    }
}

impl ZeroSampling {
    fn start(vm: &ManagedVm, rows: usize) -> Result<ZeroSampling, String> {
        let ram = vm.ram.clone().ok_or("only RAM that is mapped in this process can be read")?;
        Ok(ZeroSampling { ram, rotation: Rotation::new(ZERO_SHARE), pages: vec![None; rows] })
    }

    fn look(
        &mut self,
        host: &dyn Host,
        vm: &ManagedVm,
        rows: &VmSnapshot,
        windows: &[WindowIndex],
        cost: &mut SensorCost,
    ) {
        let began_cpu = host.thread_cpu_time();
        for window in self.rotation.next_share(&backed_by_pages_of_their_own(rows)) {
            let (Some(range), Ok(row)) = (range_of(vm, window), windows.binary_search(&window)) else { continue };
            self.pages[row] = window_zero_pages(host, &self.ram, range, window).ok().map(|zero| zero.pages());
            cost.windows += 1;
        }
        cost.samples += 1;
        cost.cpu += host.thread_cpu_time().saturating_sub(began_cpu);
    }
}

impl GuestTables {
    fn start(vm: &ManagedVm, rows: usize) -> Result<GuestTables, String> {
        let ram = vm.ram.clone().ok_or("only RAM that is mapped in this process can be read")?;
        let second_level = vm.second_level.clone().ok_or("a process has no guest's tables")?;
        Ok(GuestTables { ram, second_level, walked_at: None, mappings: vec![GuestMapping::Unknown; rows] })
    }

    fn look(&mut self, host: &dyn Host, windows: &[WindowIndex], cost: &mut SensorCost) {
        let now = host.now();
        if self.walked_at.is_some_and(|at| now.since(at) < GUEST_TABLES_INTERVAL) {
            return;
        }
        self.walked_at = Some(now);
        let began_cpu = host.thread_cpu_time();
        // No guest of ours has five levels: `wideleaf_vmm` offers none.
        match guest_tables::sample(self.second_level.as_ref(), &self.ram, TableLevels::Four) {
            // A guest that has ended, or is paused by somebody else for long: what was seen last stays.
            Err(error) => tracing::debug!("the guest's tables: {error}"),
            Ok(tables) => {
                for (window, mapping) in tables.windows {
                    if let Ok(row) = windows.binary_search(&window) {
                        self.mappings[row] = mapping;
                    }
                }
                cost.samples += 1;
                cost.waits += 1;
                cost.windows += windows.len() as u64;
            }
        }
        cost.cpu += host.thread_cpu_time().saturating_sub(began_cpu);
    }
}

/// The windows that can be looked at one by one: what is on a giant page can neither be taken aside nor given back.
fn backed_by_pages_of_their_own(rows: &VmSnapshot) -> Vec<WindowIndex> {
    let is_own = |row: &usize| !matches!(rows.backing[*row], Backing::Unbacked | Backing::Giant1G);
    (0..rows.len()).filter(is_own).map(|row| rows.windows[row]).collect()
}

fn range_of(vm: &ManagedVm, window: WindowIndex) -> Option<RamRange> {
    vm.ranges.iter().find(|range| range.gpa.contains(window.start())).copied()
}
