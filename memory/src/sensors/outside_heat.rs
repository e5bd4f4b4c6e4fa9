//! Access heat of RAM that another process has mapped, as a monitor outside of that process sees it.
//!
//! ```text
//!   regions   [  7 of 10 accesses )[      0 of 10       )[ 3 )      of any length, each one result
//!   windows   [ 0  ][ 1  ][ 2  ][ 3  ][ 4  ][ 5  ]
//!   heat        .7    .7   .35     0     0    .3          weighted by the covered bytes; shared by up to 3 windows
//! ```

use std::time::Duration;

use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, Hva, PageSize, PerTenThousand};

/// Minimum part of a window in regions, in bytes: a region that only reaches into a window says nothing of it.
const COVERED_LEAST: Bytes = kib(512);

/// A range with one result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeatRegion {
    /// First address of the range.
    pub start: Hva,
    /// First address behind it.
    pub end: Hva,
    /// Share of the looks at it that saw an access.
    pub rate: PerTenThousand,
}

/// Heat of one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowHeat {
    /// Share of the looks that saw an access.
    pub rate: PerTenThousand,
    /// Number of windows that share the result, because they lie in one region; at least 1.
    pub windows: u64,
}

/// One reading of a monitor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heat {
    regions: Vec<HeatRegion>,
}

impl Heat {
    /// A reading with these regions, which need no order.
    pub fn new(mut regions: Vec<HeatRegion>) -> Heat {
        regions.sort_unstable_by_key(|region| region.start);
        Heat { regions }
    }

    /// The regions, by ascending address.
    pub fn regions(&self) -> &[HeatRegion] {
        &self.regions
    }

    /// Heat of the window that begins at this address; `None` where regions cover less than a quarter of it.
    pub fn of_window(&self, start: Hva) -> Option<WindowHeat> {
        let end = start + PageSize::Huge2M.bytes();
        let first = self.regions.partition_point(|region| region.end <= start);
        let parts = self.regions[first..].iter().take_while(|region| region.start < end);
        let (mut covered, mut accessed, mut windows) = (0, 0, 1);
        for region in parts {
            let bytes = (region.end.min(end) - region.start.max(start)).get();
            covered += bytes;
            accessed += bytes * u64::from(region.rate.get());
            windows = windows.max((region.end - region.start).get().div_ceil(PageSize::Huge2M.bytes().get()));
        }
        let rate = PerTenThousand::new(u32::try_from(accessed.checked_div(covered)?).ok()?);
        (covered >= COVERED_LEAST.get()).then_some(WindowHeat { rate, windows })
    }
}

/// The latest reading of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatestHeat<H> {
    /// Ascending number of the reading.
    pub number: u64,
    /// Time since it was taken.
    pub age: Duration,
    /// The reading itself, with all its regions.
    pub heat: H,
}

/// Source of the heat of a guest's RAM. It works on its own thread: no call waits for the guest or the monitor.
pub trait HeatSource: Send + Sync {
    /// The latest reading; `None` before the first.
    fn latest(&self) -> Option<LatestHeat<std::sync::Arc<Heat>>>;

    /// Reason in words why there is no reading, or no newer one; `None` where readings come.
    fn why_not(&self) -> Option<String>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn region(start_mib: u64, end_mib: u64, rate: u32) -> HeatRegion {
        let at = |mib: u64| Hva::new(mib * MIB);
        HeatRegion { start: at(start_mib), end: at(end_mib), rate: PerTenThousand::new(rate) }
    }

    #[test]
    fn a_window_has_the_mean_of_the_regions_that_cover_it_and_the_width_of_the_widest() {
        let heat = Heat::new(vec![region(5, 11, 0), region(0, 5, 7000), region(11, 12, 3000)]);
        let of = |window: u64| heat.of_window(Hva::new(window * 2 * MIB));
        let expected = [(7000, 3), (7000, 3), (3500, 3), (0, 3), (0, 3), (1500, 3)];
        for (window, (rate, windows)) in expected.into_iter().enumerate() {
            let rate = PerTenThousand::new(rate);
            assert_eq!(of(window as u64), Some(WindowHeat { rate, windows }), "{window}");
        }
        assert_eq!(of(6), None);
    }

    #[test]
    fn a_region_that_only_reaches_into_a_window_says_nothing_of_it() {
        let reaching = |kib: u64| {
            let end = Hva::new(2 * MIB + kib * 1024);
            Heat::new(vec![HeatRegion { start: Hva::new(0), end, rate: PerTenThousand::ALL }])
        };
        assert_eq!(reaching(511).of_window(Hva::new(2 * MIB)), None);
        let known = reaching(512).of_window(Hva::new(2 * MIB)).map(|heat| (heat.rate, heat.windows));
        assert_eq!(known, Some((PerTenThousand::ALL, 2)));
    }

    proptest! {
        #[test]
        fn no_window_is_hotter_or_colder_than_all_regions(cuts in prop::collection::btree_set(0_u64..4096, 2..40),
            rates in prop::collection::vec(0_u32..=10_000, 40), window in 0_u64..8) {
            let cuts: Vec<_> = cuts.into_iter().map(|page| Hva::new(page << 12)).collect();
            let regions = cuts.windows(2).zip(&rates);
            let regions: Vec<_> = regions
                .map(|(cut, rate)| HeatRegion { start: cut[0], end: cut[1], rate: PerTenThousand::new(*rate) })
                .collect();
            let (least, most) = (regions.iter().map(|r| r.rate).min(), regions.iter().map(|r| r.rate).max());
            if let Some(heat) = Heat::new(regions).of_window(Hva::new(window * 2 * MIB)) {
                prop_assert!(least <= Some(heat.rate) && Some(heat.rate) <= most);
                prop_assert!((1..=8).contains(&heat.windows));
            }
        }
    }
}
