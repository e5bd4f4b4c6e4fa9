//! Tracks at each tick the memory that guests gave back. Devices release at once what they can; the rest
//! is checked here.
//!
//! ```text
//!   sense   book ─▶ rows: pages given back   window with more pages present than the book says: looked at page by page
//!                                            pages kept for a large page that is gone: due
//!   act     due, or kept while memory is short ─▶ [`GiveBack::look_again`], some windows a tick
//! ```

use std::sync::Arc;

use wideleaf_policies::{PageSet, PageSize, VmSnapshot, WindowIndex};

use super::vm_state::VmState;
use super::{ManagedVm, ManagerLoop};
use crate::actuators::give_back::GiveBack;
use crate::host::{Host, HostError};
use crate::kernel::Kernel;
use crate::region::GuestRam;
use crate::sensors::host_backing::pages_of;
use crate::sensors::host_memory::host_memory;

/// Windows checked page by page in a tick, 10 us each. For the others the book counts, and such a window
/// is not promoted.
const SETTLED_PER_TICK: usize = 256;

/// Windows checked again in a tick, and perhaps split, at most 0.3 ms each.
const LOOKED_AT_PER_TICK: usize = 64;

impl ManagerLoop {
    /// Gives back the memory that may go by now.
    pub(super) fn look_again_at_given_back(&mut self) {
        if !self.host.is_own() {
            return;
        }
        let has_given_back = self.vms.iter().any(VmState::has_given_back);
        let is_short = has_given_back && self.shortage.update(host_memory(&*self.host).ok());
        for vm in &mut self.vms {
            vm.look_again_at_given_back(&self.host, is_short);
        }
    }
}

impl VmState {
    /// Fills the column `given_back` of a snapshot.
    pub(super) fn sense_given_back(&self, host: &dyn Host, rows: &mut VmSnapshot) {
        let Some(ram) = self.managed.ram.as_ref().filter(|_| host.is_own()) else { return };
        let windows: Vec<_> = ram.given_back().book().windows().collect();
        let mut settled = 0;
        for window in windows {
            let Some(row) = rows.row(window) else { continue };
            // Locked from the check on, so that nothing is released in between.
            let mut book = ram.given_back().book();
            if settled < SETTLED_PER_TICK && book.contradicts(window, rows.resident[row]) {
                settled += 1;
                // Pages that cannot be scanned stay in the book.
                if let Ok(present) = present_pages(host, ram, window) {
                    book.settle(window, present);
                }
            }
            // Pages of the pool stay in any case.
            if !rows.backing[row].is_large() && ram.backing().fixed_page().is_none() {
                book.set_not_large(window);
            }
            rows.given_back[row] = book.count(window);
        }
    }

    fn has_given_back(&self) -> bool {
        self.managed.ram.as_ref().is_some_and(|ram| !ram.given_back().book().is_empty())
    }

    /// `is_short`: whether the host is short of memory. Where nothing is given back, that is asked only after the next
    /// page is, and no huge page is split before.
    fn look_again_at_given_back(&mut self, host: &Arc<dyn Kernel>, is_short: bool) {
        let Some(ram) = self.managed.ram.clone() else { return };
        let has_given_back = self.has_given_back();
        ram.given_back().set_short(is_short && has_given_back);
        if !has_given_back || !self.may_be_disturbed() {
            return;
        }
        if let Ok(give_back) = GiveBack::new(host.clone(), ram) {
            let next = give_back.look_again(self.given_back_from, LOOKED_AT_PER_TICK);
            self.given_back_from = next.unwrap_or(WindowIndex::new(0));
        }
    }
}

impl ManagedVm {
    /// Whether a large page there would occupy again what the guest gave back.
    pub(super) fn is_given_back(&self, window: WindowIndex) -> bool {
        self.ram.as_ref().is_some_and(|ram| ram.given_back().book().is_given_back(window))
    }
}

fn present_pages(host: &dyn Host, ram: &GuestRam, window: WindowIndex) -> Result<PageSet, HostError> {
    let Some(start) = ram.hva(window.start()) else { return Ok(PageSet::default()) };
    let mut runs = Vec::new();
    host.scan(start, PageSize::Huge2M.bytes(), &mut runs)?;
    Ok(pages_of(&runs, start, window))
}
