//! The means of collapsing one VM's shared memory while it is unmapped. Opened at the first such collapse, and then
//! kept. Where the kernel has no minor faults, windows are collapsed while they are mapped.

use std::sync::{Arc, OnceLock};

use wideleaf_policies::WindowIndex;

use super::managed_vm::ManagedVm;
use super::steering::Steering;
use crate::actuators::collapse::{Collapse, collapse_full_window, collapse_window};
use crate::actuators::unmapped_collapse::UnmappedCollapse;
use crate::backing::BackingKind;
use crate::host::Host;
use crate::kernel::Kernel;
use crate::region::{GuestRam, RamRange};
use crate::sensors::minor_faults::OpenMinorFaults;

/// State for the collapses of one VM; see the module.
pub(super) struct Collapsing {
    host: Arc<dyn Kernel>,
    unmapped: OnceLock<Option<UnmappedCollapse>>,
}

impl Collapsing {
    /// Opens nothing yet.
    pub fn new(host: Arc<dyn Kernel>) -> Collapsing {
        Collapsing { host, unmapped: OnceLock::new() }
    }

    /// Collapses a window of the VM in the way in which the guest waits least.
    pub fn run(
        &self,
        host: &dyn Host,
        vm: &ManagedVm,
        range: RamRange,
        window: WindowIndex,
        steering: &Steering,
    ) -> Collapse {
        match (self.unmapped_of(vm), vm.keeps_holes().is_some()) {
            (Some(unmapped), keeps_holes) => steering.unseen(|| unmapped.run(host, range, window, keeps_holes)),
            (None, true) => collapse_full_window(host, range, window),
            (None, false) => collapse_window(host, range, window),
        }
    }

    fn unmapped_of(&self, vm: &ManagedVm) -> Option<&UnmappedCollapse> {
        let ram = vm.ram.as_ref().filter(|ram| ram.backing().kind() == BackingKind::Memfd)?;
        self.unmapped.get_or_init(|| self.open(ram)).as_ref()
    }

    fn open(&self, ram: &Arc<GuestRam>) -> Option<UnmappedCollapse> {
        match self.host.open_minor_faults(ram.clone()) {
            Ok(OpenMinorFaults { faults, claims, .. }) => Some(UnmappedCollapse::new(faults, claims)),
            Err(why) => {
                tracing::info!("the whole guest stops while a window of its shared memory is collapsed: {why}");
                None
            }
        }
    }
}
