//! Bids of one VM, as its manager reported them.

use wideleaf_control::protocol::BidsReport;
use wideleaf_policies::Bids;
use wideleaf_policies::market::Level;

/// Offer of one VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Offer {
    pub(super) bids: Bids,
    /// Free huge pages, if its manager was refused one.
    pub(super) free: Option<u64>,
}

impl From<&BidsReport> for Offer {
    fn from(report: &BidsReport) -> Offer {
        let level = |&(cycles_per_s, wanted, held): &(u64, u32, u32)| Level { cycles_per_s, wanted, held };
        Offer { bids: Bids::of_levels(report.levels.iter().map(level)), free: report.free }
    }
}
