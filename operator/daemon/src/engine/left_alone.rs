//! Guests that a client has left alone for a time, for example while they migrate away.

use std::time::Instant;

use wideleaf_control::protocol::LEFT_ALONE_S_MAX;

use super::vm::{LeftAloneUntil, Vm};
use super::{Engine, told};
use crate::guests::ProcessId;

impl Engine {
    /// Leaves a guest alone for `for_s` seconds, or ends that where it is 0. The tick ends it otherwise.
    pub(super) fn leave_alone(&self, process: ProcessId, for_s: u64) -> Result<(), String> {
        if for_s > LEFT_ALONE_S_MAX {
            return Err(format!("a guest is left alone for at most {LEFT_ALONE_S_MAX} s: set its policy to off"));
        }
        let care = {
            let mut table = self.table();
            let vm = table.vms.get_mut(&process).ok_or("the VM has just ended")?;
            let name = &vm.found.name;
            let care = vm.care().ok_or_else(|| format!("{name} manages itself: `wideleaf set {name} policy=off`"))?;
            vm.left_alone_until = (for_s > 0).then(|| LeftAloneUntil::after(for_s));
            care
        };
        told(&care, |care| care.leave_alone(for_s > 0)).ok_or("the VM has just ended")?;
        self.refresh(process);
        Ok(())
    }

    /// Ends it for guests that were left alone long enough. A guest that is busy with another request has its end at a
    /// later tick.
    pub(super) fn end_of_leaving_alone(&self, now: Instant) {
        let is_over = |vm: &Vm| vm.left_alone_until.is_some_and(|until| until.is_over(now));
        let over: Vec<_> = {
            let table = self.table();
            let over = table.vms.iter().filter(|(_, vm)| is_over(vm));
            over.filter_map(|(process, vm)| Some((*process, vm.care()?))).collect()
        };
        for (process, care) in over {
            // A client may ask for more time meanwhile: before the guest is told, or after.
            let told = super::told_if_free(&care, |care| {
                if self.table().vms.get(&process).is_some_and(is_over) {
                    care.leave_alone(false);
                }
            });
            if told.is_some()
                && let Some(vm) = self.table().vms.get_mut(&process).filter(|vm| is_over(vm))
            {
                vm.left_alone_until = None;
                tracing::info!("{} is no longer left alone: the time that a client asked for is over", vm.found.name);
            }
        }
    }
}
