//! State that a policy keeps for each window from one plan to the next: its own column beside those
//! of the snapshot.

use alloc::vec::Vec;

use crate::snapshot::{Snapshot, VmId, VmSnapshot};

/// One value per window. A VM that appears, disappears or changes its windows starts with default values.
#[derive(Clone, Debug, Default)]
pub struct WindowMemory<T> {
    columns: Vec<Column<T>>,
}

#[derive(Clone, Debug)]
struct Column<T> {
    vm: VmId,
    values: Vec<T>,
}

impl<T: Clone + Default> WindowMemory<T> {
    /// Makes the columns fit the snapshot. Takes constant time per VM if nothing has changed.
    pub fn fit(&mut self, snapshot: &Snapshot) {
        let same = |(column, vm): (&Column<T>, &VmSnapshot)| column.vm == vm.vm && column.values.len() == vm.len();
        let fits = self.columns.len() == snapshot.vms.len() && self.columns.iter().zip(&snapshot.vms).all(same);
        if fits {
            return;
        }
        let mut old = core::mem::take(&mut self.columns);
        self.columns.extend(snapshot.vms.iter().map(|vm| {
            let kept =
                old.iter_mut().find(|column| same((column, vm))).map(|column| core::mem::take(&mut column.values));
            Column { vm: vm.vm, values: kept.unwrap_or_else(|| alloc::vec![T::default(); vm.len()]) }
        }));
    }

    /// The values of a VM of the snapshot last fitted to, by row.
    pub fn of(&self, vm: VmId) -> Option<&[T]> {
        self.columns.iter().find(|column| column.vm == vm).map(|column| column.values.as_slice())
    }

    /// The values of the VM at `index` of the snapshot last fitted to, by row.
    pub fn of_vm(&mut self, index: usize) -> &mut [T] {
        &mut self.columns[index].values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{Backing, WindowRow};
    use crate::units::WindowIndex;

    fn vm(id: u32, windows: u64) -> VmSnapshot {
        let mut vm = VmSnapshot::with_capacity(VmId(id), 0);
        (0..windows).for_each(|window| vm.push(WindowRow::new(WindowIndex::new(window), 1, Backing::Base4K)));
        vm
    }

    #[test]
    fn the_state_of_a_vm_survives_the_end_of_another() {
        let mut remembered = WindowMemory::<u8>::default();
        remembered.fit(&Snapshot { host: None, vms: alloc::vec![vm(1, 2), vm(5, 3)] });
        remembered.of_vm(1)[2] = 7;
        remembered.fit(&Snapshot { host: None, vms: alloc::vec![vm(5, 3)] });
        assert_eq!(remembered.of_vm(0), [0, 0, 7]);
        assert_eq!((remembered.of(VmId(5)), remembered.of(VmId(1))), (Some(&[0, 0, 7][..]), None));
        remembered.fit(&Snapshot { host: None, vms: alloc::vec![vm(5, 4)] });
        assert_eq!(remembered.of_vm(0), [0, 0, 0, 0]);
    }
}
