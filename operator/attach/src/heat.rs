//! Which memory of an external guest is used: its RAM under the kernel's monitor, where the policy asks for that.
//!
//! ```text
//!   policy needs access ─▶ GuestMonitor::watch(process, RAM) ─┬─▶ ManagedVm::heat ─▶ snapshot, heat digits
//!   the same RAM later  ─▶ the same watch                     └─▶ a note: age and error, or why it is unknown
//! ```

use std::sync::Arc;

use wideleaf_memory::RamRange;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::sensors::damon::GuestMonitor;
use wideleaf_memory::sensors::outside_heat::{Heat, HeatSource, LatestHeat};
use wideleaf_policies::PageSize;

use crate::ram::{RamKind, RamMap, RamPiece};

/// The guest's RAM under the kernel's monitor.
#[derive(Clone)]
pub(crate) struct WatchedRam {
    ranges: Vec<RamRange>,
    source: Arc<dyn HeatSource>,
}

impl WatchedRam {
    /// Watches the RAM if `is_needed`. A watch from `before` continues where it is the same RAM: what the monitor has
    /// learnt is kept. On pages of 1 GiB the kernel has one accessed bit for 512 windows, which says nothing of one.
    pub(crate) fn after(
        before: Option<WatchedRam>,
        is_needed: bool,
        host: &Arc<ProcessHost>,
        ram: &RamMap,
    ) -> Option<WatchedRam> {
        let is_useful = |piece: &&RamPiece| piece.kind != RamKind::Hugetlb(PageSize::Giant1G);
        let ranges: Vec<_> = ram.pieces.iter().filter(is_useful).map(|piece| piece.range).collect();
        if ranges.is_empty() || !is_needed {
            return None;
        }
        Some(before.filter(|before| before.ranges == ranges).unwrap_or_else(|| {
            let source = Arc::new(GuestMonitor::of_this_host().watch(Arc::clone(host), &ranges));
            WatchedRam { ranges, source }
        }))
    }

    /// The source for a manager.
    pub(crate) fn source(&self) -> Arc<dyn HeatSource> {
        Arc::clone(&self.source)
    }

    /// Age and error of the heat, or why it is unknown, in words.
    pub(crate) fn note(&self) -> String {
        note(self.source.latest(), self.source.why_not())
    }
}

fn note(latest: Option<LatestHeat<Arc<Heat>>>, why_not: Option<String>) -> String {
    match (latest, why_not) {
        (None, why) => format!("which memory it uses is not known: {}", why.unwrap_or_else(|| "not yet".to_owned())),
        (Some(LatestHeat { age, .. }), Some(why)) => {
            format!("which memory it uses was last seen {} s ago: {why}", age.as_secs())
        }
        (Some(LatestHeat { age, heat, .. }), None) => format!(
            "which memory it uses: seen {} s ago by DAMON, with one result for {} windows on average",
            age.as_secs(),
            windows_for_each_region(&heat)
        ),
    }
}

fn windows_for_each_region(heat: &Heat) -> u64 {
    let bytes = heat.regions().iter().map(|region| (region.end - region.start).get()).sum::<u64>();
    bytes.div_ceil(heat.regions().len().max(1) as u64).div_ceil(PageSize::Huge2M.bytes().get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use wideleaf_memory::sensors::outside_heat::HeatRegion;
    use wideleaf_policies::{Hva, PerTenThousand};

    #[test]
    fn a_note_has_age_and_error_or_the_reason() {
        let region = |start: u64, end: u64| HeatRegion {
            start: Hva::new(start << 20),
            end: Hva::new(end << 20),
            rate: PerTenThousand::ALL,
        };
        let heat = Arc::new(Heat::new(vec![region(0, 2), region(2, 8)]));
        let latest = Some(LatestHeat { number: 3, age: Duration::from_secs(7), heat });
        let refused = Some("another program has 1 DAMON threads".to_owned());
        assert_eq!(
            note(latest.clone(), None),
            "which memory it uses: seen 7 s ago by DAMON, with one result for 2 windows on average"
        );
        assert_eq!(
            note(latest, refused.clone()),
            "which memory it uses was last seen 7 s ago: another program has 1 DAMON threads"
        );
        assert_eq!(note(None, refused), "which memory it uses is not known: another program has 1 DAMON threads");
    }
}
