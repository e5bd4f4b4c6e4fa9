//! Makes the manager of a guest: a [`ManagedVm`] for each kind of its RAM (anonymous, shared, hugetlb), with the gate,
//! the sensors and the bounds that the settings ask for. It reads the guest's RAM map and starts a thread.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_memory::explain::Barred;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::manager::{ManagedVm, Manager, SharedRecovery};
use wideleaf_memory::sensors::kernel_flags::MergedPages;
use wideleaf_memory::{BackingConfig, BackingKind, SecondLevel};
use wideleaf_policies::recovery::RecoveryLimits;
use wideleaf_policies::{PageSize, VmId};

use super::error::AttachError;
use super::settings::{Settings, policy};
use crate::gate::GuestGate;
use crate::guest_pages::OutsideTables;
use crate::heat::WatchedRam;
use crate::monitor::Monitor;
use crate::placed::Placed;
use crate::ram::{RamKind, RamMap, RamPiece};
use crate::second_level::OutsideView;

/// Time that an attach waits for the first tick, so that there is something to show. A tick over a terabyte takes a
/// tenth of a second.
const FIRST_LOOK_WITHIN: Duration = Duration::from_millis(500);

/// The guest's own tables, or why they are not available.
pub(super) type Tables = Result<Arc<OutsideTables>, String>;

/// The guest's own tables, where the policy needs them.
pub(super) fn tables(
    settings: &Settings,
    host: &Arc<ProcessHost>,
    monitor: Option<&Arc<Monitor>>,
    ram: &RamMap,
) -> Option<Tables> {
    let is_asked = policy(settings).needs().guest_mapping;
    is_asked.then(|| OutsideTables::of(host, monitor, ram).map(Arc::new))
}

/// Parts of a manager.
pub(super) struct Parts<'a> {
    pub(super) ram: &'a RamMap,
    pub(super) gate: &'a Arc<GuestGate>,
    pub(super) kvm: Option<&'a Arc<OutsideView>>,
    pub(super) host: &'a Arc<ProcessHost>,
    pub(super) tables: Option<&'a Tables>,
    pub(super) heat: Option<&'a WatchedRam>,
    pub(super) recoveries: &'a Recoveries,
}

/// Recoveries of a guest, by kind of RAM.
#[derive(Default)]
pub(super) struct Recoveries(Mutex<Vec<(BackingConfig, SharedRecovery)>>);

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

    pub(super) fn set_limits(&self, limits: RecoveryLimits) {
        self.0.lock().iter().for_each(|(_, recovery)| recovery.lock().set_limits(limits));
    }
}

impl Parts<'_> {
    /// Starts a manager, and waits for its first tick.
    ///
    /// # Errors
    /// [`AttachError`]: no thread is available.
    pub(super) fn manager(&self, settings: &Settings) -> Result<Manager, AttachError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::tests::fake_places;
    use crate::process::VmProcess;
    use crate::process::tests::add_process;
    use wideleaf_memory::RamRange;
    use wideleaf_memory::numa::placement::{MemoryMode, NodePolicy};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, Hva, NodeId, NodeSet};

    /// What a manager gets of RAM in these pieces.
    fn managed(pieces: Vec<RamPiece>) -> Vec<ManagedVm> {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("a VM");
        let gate = Arc::new(GuestGate::new(process, None));
        let host = Arc::new(ProcessHost::open(std::process::id()).expect("a process may open itself"));
        let ram = RamMap { pieces, ..RamMap::default() };
        let recoveries = &Recoveries::default();
        let parts = Parts { ram: &ram, gate: &gate, kvm: None, host: &host, tables: None, heat: None, recoveries };
        parts.vms(&Settings::default())
    }

    fn piece(start: u64, kind: RamKind) -> RamPiece {
        let gpa = GpaRange::new(Gpa::new(start), mib(128)).expect("small");
        let range = RamRange { gpa, hva: Hva::new((1 << 40) + start) };
        RamPiece { name: "ram".to_owned(), range, kind, never_huge: None, is_guess: false, nodes: None }
    }

    #[test]
    fn unplugged_memory_is_no_longer_managed() {
        let starts = |pieces| {
            let vms = managed(pieces);
            vms.iter().flat_map(|vm| vm.ranges.iter().map(|range| range.gpa.start().get())).collect::<Vec<_>>()
        };
        let (first, plugged) = (piece(0, RamKind::Anonymous), piece(4 << 30, RamKind::Shmem));
        assert_eq!(starts(vec![first.clone(), plugged]), [0, 4 << 30]);
        assert_eq!(starts(vec![first]), [0]);
    }

    #[test]
    fn the_nodes_of_backends_bind_the_manager() {
        let on = |node, start| {
            let nodes = Some(NodePolicy { mode: MemoryMode::Bind, nodes: NodeSet::of(NodeId(node)) });
            RamPiece { name: format!("m{node}"), nodes, ..piece(start, RamKind::Anonymous) }
        };
        let nodes = |pieces| {
            let vms = managed(pieces);
            vms.iter().map(|vm| (vm.bound_to.map(|nodes| nodes.to_string()), vm.fixes_nodes)).collect::<Vec<_>>()
        };
        assert_eq!(nodes(vec![on(1, 0), on(1, 4 << 30)]), [(Some("1".to_owned()), false)]);
        assert_eq!(nodes(vec![on(0, 0), on(1, 4 << 30)]), [(Some("0-1".to_owned()), true)]);
    }
}
