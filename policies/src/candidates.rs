//! The rows of a snapshot that a policy may name, and the order in which it visits them.

use core::ops::ControlFlow;

use alloc::vec::Vec;

use crate::snapshot::{Backing, Snapshot, VmSnapshot};
use crate::units::{BASE_PAGES_PER_WINDOW, Moment};

/// Whether the window is served with base pages and may be promoted now: either the host backs it with base
/// pages, or it is large and the second level is held at 4 KiB. A window in which the guest gave back more
/// than is tolerated stays on base pages. Promoting a held large window takes no memory back, because its page
/// is still there.
pub fn is_promotable(vm: &VmSnapshot, row: usize, now: Moment) -> bool {
    let is_small = match vm.backing[row] {
        Backing::Unbacked => false,
        Backing::Base4K => !vm.is_given_back(row),
        Backing::Huge2M | Backing::Giant1G => vm.is_held[row],
    };
    is_small && vm.ready_at[row] <= now
}

/// Whether the window is served with a huge page and may now be demoted, or have its zero pages released. Giant
/// pages stay: no mechanism takes one window out of them.
pub fn is_demotable(vm: &VmSnapshot, row: usize, now: Moment) -> bool {
    vm.backing[row] == Backing::Huge2M && !vm.is_held[row] && vm.ready_at[row] <= now
}

/// Number of base pages that promotion would have to add.
pub fn missing(vm: &VmSnapshot, row: usize) -> u16 {
    BASE_PAGES_PER_WINDOW - vm.resident[row]
}

/// One window of a snapshot, by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index into [`Snapshot::vms`].
    pub vm: u32,
    /// Row within that VM.
    pub row: u32,
}

impl Place {
    /// The row `row` of the VM at `vm`.
    pub const fn new(vm: usize, row: usize) -> Place {
        Place { vm: vm as u32, row: row as u32 }
    }

    /// The VM, and the row in it.
    pub fn of(self, snapshot: &Snapshot) -> (&VmSnapshot, usize) {
        (&snapshot.vms[self.vm as usize], self.row as usize)
    }
}

/// Visits all windows, taking one from each VM in turn, each VM in address order, so that a large VM does
/// not starve a small one. Linear in the number of windows. The list of VMs keeps its capacity from one
/// visit to the next.
///
/// ```text
///   vm 0: a b c        order: a d b e c f g
///   vm 1: d e f g
/// ```
#[derive(Clone, Debug, Default)]
pub struct Turns {
    live: Vec<u32>,
}

impl Turns {
    /// Calls `visit` for each window until it breaks.
    pub fn visit(&mut self, snapshot: &Snapshot, mut visit: impl FnMut(Place) -> ControlFlow<()>) {
        let len = |vm: &u32| snapshot.vms[*vm as usize].len();
        self.live.clear();
        self.live.extend((0..snapshot.vms.len() as u32).filter(|vm| len(vm) > 0));
        let mut row = 0;
        while let Some(shortest) = self.live.iter().map(len).min() {
            for row in row..shortest {
                for vm in &self.live {
                    if visit(Place { vm: *vm, row: row as u32 }).is_break() {
                        return;
                    }
                }
            }
            row = shortest;
            self.live.retain(|vm| len(vm) > shortest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{VmId, WindowRow};
    use crate::units::WindowIndex;

    fn snapshot(lengths: &[u64]) -> Snapshot {
        let vms = lengths.iter().enumerate().map(|(id, windows)| {
            let mut vm = VmSnapshot::with_capacity(VmId(id as u32), 0);
            (0..*windows).for_each(|window| vm.push(WindowRow::new(WindowIndex::new(window), 512, Backing::Base4K)));
            vm
        });
        Snapshot { host: None, vms: vms.collect() }
    }

    #[test]
    fn vms_of_different_size_take_turns_and_every_window_is_visited_once() {
        let mut order = Vec::new();
        Turns::default().visit(&snapshot(&[3, 0, 1, 4]), |place| {
            order.push((place.vm, place.row));
            ControlFlow::Continue(())
        });
        assert_eq!(order, [(0, 0), (2, 0), (3, 0), (0, 1), (3, 1), (0, 2), (3, 2), (3, 3)]);
    }

    #[test]
    fn a_held_huge_page_is_promotable_and_a_mapped_one_demotable() {
        let mut vm = VmSnapshot::with_capacity(VmId(0), 2);
        vm.push(WindowRow { is_held: true, ..WindowRow::new(WindowIndex::new(0), 512, Backing::Huge2M) });
        vm.push(WindowRow::new(WindowIndex::new(1), 512, Backing::Huge2M));
        let both = |row| (is_promotable(&vm, row, Moment::START), is_demotable(&vm, row, Moment::START));
        assert_eq!((both(0), both(1)), ((true, false), (false, true)));
    }
}
