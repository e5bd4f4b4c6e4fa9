//! Frames are reserved at the first touch, and a window becomes large in place once it is populated (Navarro et
//! al., OSDI '02; FreeBSD's `vm_reserv`; with a threshold of 64 Quicksilver, ATC '20).
//!
//! Nothing is copied, and only memory that the guest uses becomes large. The price is paid at the touch: one fault
//! a page until the window is large, and 2 MiB cleared at its first page. A guest that touches half of many windows
//! holds twice the memory until the host is short. Then the reservation that was changed longest ago is broken.
//!
//! Pages that the guest gives back leave their reservation at once, and a large window that loses one has base pages
//! again until the guest uses all of it.
//!
//! Quicksilver fills the rest of a window when 64 pages are populated. Here the kernel clears the whole window with
//! the first page, so no page is left to fill, and no daemon is needed.

use super::{Policy, RamStart};
use crate::action::Plan;
use crate::budget::Budget;
use crate::parameter_table::{ParameterInfo, Parameters};
use crate::reservations::ReservationRules;
use crate::snapshot::Snapshot;
use crate::units::{Moment, PerTenThousand};

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[
    ParameterInfo::number(
        "threshold",
        512,
        (1, 512),
        "base pages",
        "populated pages that make a window large (FreeBSD: 512, all; Quicksilver: 64)",
    ),
    ParameterInfo::number(
        "break_from",
        85,
        (1, 100),
        "% of host memory",
        "memory use from which on reservations are broken, the one changed longest ago first",
    ),
    ParameterInfo::number("break_to", 70, (1, 100), "% of host memory", "memory use below which breaking stops"),
];

/// Leaves all decisions to the reservations; plans no action.
#[derive(Clone, Copy, Debug)]
pub struct Reservation {
    rules: ReservationRules,
}

impl Reservation {
    /// Makes the policy with the rules from these parameters.
    pub fn new(parameters: &Parameters) -> Reservation {
        let percent = |name| PerTenThousand::of(parameters.number(name), 100);
        let threshold = parameters.number("threshold") as u16;
        let rules = ReservationRules { threshold, break_from: percent("break_from"), break_to: percent("break_to") };
        Reservation { rules }
    }
}

impl Policy for Reservation {
    fn name(&self) -> &'static str {
        "reservation"
    }

    fn plan(&mut self, _snapshot: &Snapshot, _now: Moment, _budget: &mut Budget, _plan: &mut Plan) {}

    fn reserves(&self) -> Option<ReservationRules> {
        Some(self.rules)
    }

    fn ram_start(&self) -> RamStart {
        RamStart::OnReservableFrames
    }
}
