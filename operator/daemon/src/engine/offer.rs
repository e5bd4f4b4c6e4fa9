//! Bids of one VM for huge pages of the host, as its manager reported them, until they are too old.
//!
//! ```text
//!   report ─▶ offer holds ── ten seconds without a newer report ──▶ holds no more
//!                ▲ report, each second                                   │ report
//!                └───────────────────────────────────────────────────────┘
//! ```

use wideleaf_control::protocol::BidsReport;
use wideleaf_policies::Bids;
use wideleaf_policies::market::Level;

/// Time in seconds for which an offer holds without a newer report. Managers report each second. One that is stopped,
/// as by a debugger, takes no page, and others would give theirs up for it again and again.
const HOLDS_FOR_S: u32 = 10;

/// Offer of one VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Offer {
    pub(super) bids: Bids,
    /// Free huge pages, if its manager was refused one.
    pub(super) free: Option<u64>,
    /// Number of seconds for which its manager has reported nothing newer.
    age_s: u32,
}

impl Offer {
    /// Counts a second without a newer report. Returns whether the offer still holds.
    pub(super) fn grow_older(&mut self) -> bool {
        self.age_s += 1;
        self.age_s <= HOLDS_FOR_S
    }
}

impl From<&BidsReport> for Offer {
    fn from(report: &BidsReport) -> Offer {
        let level = |&(cycles_per_s, wanted, held): &(u64, u32, u32)| Level { cycles_per_s, wanted, held };
        Offer { bids: Bids::of_levels(report.levels.iter().map(level)), free: report.free, age_s: 0 }
    }
}
