//! View of a VM under a manager, from the manager's [`Live`]. It serves both external guests (`session`) and the
//! guest of `wideleaf run` in its own process, [`OwnGuest`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use wideleaf_control::protocol::BidsReport;
use wideleaf_control::view::{
    BackingView, Care, Explanation, Guarantee, GuestPagesView, SavedView, VmView, Vmm, WindowMap, WorkView,
};
use wideleaf_memory::explain::WhyNot;
use wideleaf_memory::manager::Live;
use wideleaf_memory::sensors::page_tables::table_memory;
use wideleaf_memory::walk_cost::ChosenWalkCost;
use wideleaf_memory::{BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{Backing, Bytes, GpaRange, GuestMapping, HugePages, MappingStats, PageSize};

use crate::host_clock::HostClock;
use crate::numa;
use crate::placed::Placed;
use crate::places::Places;
use crate::process::VmProcess;
use crate::ram::{NeverHuge, RamKind, RamMap, RamPiece};
use crate::reasons::reasons;
use crate::survey;
use crate::window_map::{self, About};
use crate::work::Work;

/// A value that is computed from the latest `T`, once for all that ask until there is a newer one.
pub(crate) struct OfLatest<T, V>(Mutex<Option<(Weak<T>, Arc<V>)>>);

impl<T, V> OfLatest<T, V> {
    pub fn of(&self, latest: &Arc<T>, compute: impl FnOnce() -> V) -> Arc<V> {
        let mut known = self.0.lock();
        match &*known {
            // No other value comes to this address while there is a weak reference to it.
            Some((of, value)) if of.as_ptr() == Arc::as_ptr(latest) => Arc::clone(value),
            _ => {
                let value = Arc::new(compute());
                *known = Some((Arc::downgrade(latest), Arc::clone(&value)));
                value
            }
        }
    }
}

impl<T, V> Default for OfLatest<T, V> {
    fn default() -> OfLatest<T, V> {
        OfLatest(Mutex::default())
    }
}

/// View of a managed VM with the manager's policy, without the age of its latest scan. The caller overrides fields that
/// it knows better.
pub(crate) fn view(process: &VmProcess, ram: &RamMap, live: &Live, work: WorkView) -> VmView {
    VmView {
        name: process.name.clone(),
        uuid: process.uuid.clone(),
        pid: process.pid,
        started_at: process.started_at,
        vmm: process.vmm,
        cgroup: process.cgroup(),
        care: Care::Managed,
        policy: Some(live.policy.to_owned()),
        guarantee: Guarantee::BestEffort,
        ram: ram.pieces.iter().map(RamPiece::view).collect(),
        backing: Some(backing(ram, live)),
        scan_age_s: None,
        mapping: None,
        page_tables: None,
        numa: numa::of_attached(live, &ram.placed()),
        guest_pages: guest_pages(live),
        saved: SavedView { swapped: swapped(live), merged: None },
        work: Some(work),
        notes: live.panics.iter().cloned().chain(window_map::not_scanned(live).map(str::to_owned)).collect(),
    }
}

/// Bids for huge pages; `None` while there are plenty of them on the host, as far as the manager knows.
pub fn bids(live: &Live) -> Option<BidsReport> {
    let free = match live.huge_pages {
        HugePages::Scarce { free } => Some(free),
        HugePages::Plenty | HugePages::Priced(_) => None,
    };
    let levels = live.bids.iter().flat_map(|bids| bids.levels());
    let levels = levels.map(|level| (level.cycles_per_s, level.wanted, level.held)).collect();
    (free.is_some() || live.bids.is_some()).then_some(BidsReport { free, levels })
}

/// Swapped memory of all kinds of RAM; `None` where one of them is not known.
fn swapped(live: &Live) -> Option<u64> {
    live.vms.iter().map(|vm| vm.swapped).sum::<Option<Bytes>>().map(Bytes::get)
}

/// Reasons why windows are not huge. The caller adds the age of the latest scan, and the notes about the VM.
pub(crate) fn explanation(name: &str, live: &Live, placed: &Placed, notes: Vec<String>) -> Explanation {
    let mut counts = BTreeMap::<WhyNot, u64>::new();
    for (why, windows) in live.vms.iter().flat_map(|vm| &vm.why_not) {
        *counts.entry(*why).or_default() += windows;
    }
    let huge = live.snapshot.vms.iter().flat_map(|vm| &vm.backing).filter(|backing| backing.is_large()).count();
    let nodes = numa::of_attached(live, placed).map(|numa| numa.explanation()).unwrap_or_default();
    Explanation {
        name: name.to_owned(),
        windows: Some(live.snapshot.vms.iter().map(|vm| vm.len() as u64).sum()),
        huge: Some(huge as u64),
        reasons: reasons(&counts),
        scan_age_s: None,
        guest_pages: guest_pages(live).map(Box::new),
        notes: notes.into_iter().chain(nodes).chain(window_map::not_scanned(live).map(str::to_owned)).collect(),
    }
}

/// Backing by windows. Memory outside of windows, at the borders of RAM, is not managed and not counted as resident.
fn backing(ram: &RamMap, live: &Live) -> BackingView {
    let mut backing = BackingView::default();
    let misaligned = misaligned(ram);
    for vm in &live.snapshot.vms {
        for (row, window) in vm.windows.iter().enumerate() {
            let bytes = u64::from(vm.resident[row]) * PageSize::Base4K.bytes().get();
            *match vm.backing[row] {
                Backing::Unbacked | Backing::Base4K => &mut backing.base_4k,
                Backing::Huge2M => &mut backing.huge_2m,
                Backing::Giant1G => &mut backing.giant_1g,
            } += bytes;
            let is_misaligned = misaligned.iter().any(|range| range.contains(window.start()));
            backing.misaligned += if is_misaligned { bytes } else { 0 };
        }
    }
    backing.unbacked = ram.bytes().get().saturating_sub(backing.resident());
    backing
}

/// Page sizes in the guest's own tables; `None` where no window was ever examined.
pub(crate) fn guest_pages(live: &Live) -> Option<GuestPagesView> {
    let mut pages = GuestPagesView::default();
    let mut is_any_known = false;
    for mapping in live.snapshot.vms.iter().flat_map(|vm| &vm.guest_mapping) {
        is_any_known |= *mapping != GuestMapping::Unknown;
        *match mapping {
            GuestMapping::Unknown => &mut pages.unknown,
            GuestMapping::Unmapped => &mut pages.unmapped,
            GuestMapping::Base4K => &mut pages.base_4k,
            GuestMapping::Huge2M => &mut pages.huge_2m,
            GuestMapping::Giant1G => &mut pages.giant_1g,
            GuestMapping::Mixed => &mut pages.mixed,
        } += 1;
    }
    is_any_known.then_some(pages)
}

/// The misaligned pieces, mostly none: plugged memory is hundreds of pieces, and each window is compared with these.
fn misaligned(ram: &RamMap) -> Vec<GpaRange> {
    let is_misaligned = |piece: &&RamPiece| piece.never_huge.as_ref().is_some_and(NeverHuge::is_misaligned);
    ram.pieces.iter().filter(is_misaligned).map(|piece| piece.range.gpa).collect()
}

/// The guest of the calling process, which runs and manages it.
#[derive(Clone, Debug)]
pub struct OwnGuest {
    process: VmProcess,
    ram: RamMap,
    clock: HostClock,
    walk: WalkCost,
}

impl OwnGuest {
    /// The guest of this process, in that RAM; `clock` is that of its manager's host. `None` before it has a VM.
    pub fn of_this_process(ram: &GuestRam, clock: HostClock) -> Option<OwnGuest> {
        let process = VmProcess::look(&Places::default(), std::process::id()).ok()??;
        let process = VmProcess { vmm: Vmm::Wideleaf, ..process };
        let walk = ChosenWalkCost::read(Path::new("/")).cost;
        Some(OwnGuest { process, ram: map_of(ram), clock, walk })
    }

    /// Full description of the guest.
    pub fn view(&self, live: &Live, mapping: Option<MappingStats>) -> VmView {
        let work = Work::none().with(live).view(live, self.clock, &self.walk);
        let host = LinuxHost::open().ok();
        VmView {
            mapping: mapping.map(survey::mapping_view),
            scan_age_s: self.clock.age_s(live.scanned_at()),
            page_tables: host.map(|host| survey::tables_view(table_memory(&host))),
            ..view(&self.process, &self.ram, live, work)
        }
    }

    /// Reasons why windows are not huge.
    pub fn explanation(&self, live: &Live) -> Explanation {
        let notes = live.panics.iter().chain(&live.unanswered).cloned().collect();
        let scan_age_s = self.clock.age_s(live.scanned_at());
        Explanation { scan_age_s, ..explanation(&self.process.name, live, &self.ram.placed(), notes) }
    }

    /// The map of all its windows.
    pub fn windows(&self, live: &Live, mapping: Option<MappingStats>) -> WindowMap {
        let about = About {
            name: &self.process.name,
            clock: self.clock,
            totals: mapping.ok_or("KVM's statistics cannot be read"),
            is_shadowed: self.walk.is_shadowed(),
            no_tables: None,
        };
        window_map::of_live(&about, live)
    }
}

/// RAM that this process has mapped itself: nothing is guessed, and all of it can be huge.
fn map_of(ram: &GuestRam) -> RamMap {
    let backing = ram.backing();
    let kind = match backing.kind() {
        BackingKind::Anon => RamKind::Anonymous,
        BackingKind::Memfd => RamKind::Shmem,
        BackingKind::Hugetlb => RamKind::Hugetlb(backing.start_page()),
    };
    let piece = |range: &_| RamPiece {
        name: "ram".to_owned(),
        range: *range,
        kind,
        never_huge: None,
        is_guess: false,
        // The manager has the placement of RAM that is mapped here.
        nodes: None,
    };
    RamMap { pieces: ram.ranges().iter().map(piece).collect(), ..RamMap::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use wideleaf_memory::RamRange;
    use wideleaf_policies::units::{kib, mib};
    use wideleaf_policies::{Gpa, Hva};

    #[test]
    fn a_value_is_computed_once_until_there_is_a_newer_one() {
        let (first, second) = (Arc::new("first"), Arc::new("second"));
        let (lengths, times) = (OfLatest::default(), Cell::new(0));
        let length_of = |word: &Arc<&'static str>| {
            let compute = || {
                times.set(times.get() + 1);
                word.len()
            };
            *lengths.of(word, compute)
        };
        assert_eq!((length_of(&first), length_of(&first), times.get()), (5, 5, 1));
        assert_eq!((length_of(&second), length_of(&second), times.get()), (6, 6, 2));
    }

    #[test]
    fn windows_are_compared_with_misaligned_pieces_alone() {
        let piece = |(number, never_huge): (u64, Option<NeverHuge>)| {
            let gpa = GpaRange::new(Gpa::new(number << 32), mib(128)).expect("it fits");
            let range = RamRange { gpa, hva: Hva::new((1 << 40) + (number << 32)) };
            let (name, kind) = (format!("dimm{number}"), RamKind::Anonymous);
            RamPiece { name, range, kind, never_huge, is_guess: false, nodes: None }
        };
        let never_huge = [None, Some(NeverHuge::NoHugePage), Some(NeverHuge::Address(kib(4))), None];
        let pieces = (0..).zip(never_huge).map(piece).collect();
        let ram = RamMap { pieces, ..RamMap::default() };
        assert_eq!(misaligned(&ram), [ram.pieces[2].range.gpa]);
    }
}
