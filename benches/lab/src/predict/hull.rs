//! The largest saving that a page size can give a program which makes its visits at its own pace.
//!
//! ```text
//!   saved of a visit                       ╭────── 1 chain
//!          │                 ╭─ 2 chains ──╯
//!          │      ╭─ 4 ──────╯
//!          │ free ╯
//!          └──────────────▲───────────────▶ time of a visit on base pages
//!                         pace of the program
//! ```
//!
//! The program is some mix of these laps, and of arithmetic, which no page size changes. A mix takes the mean of their
//! times and saves the mean of their savings, so no mix that is as fast as the program saves more than the hull over
//! them at the program's own time a visit.
//!
//! Laps that prefetch their lines ([`Prefetching`]) belong to the mix only if the program is faster than every lap that
//! prefetches less: such a program prefetches, or has hardware prefetchers that do, and gains most of its time that
//! way. Any other program would be modelled as prefetching for a part of its time and idling in the rest. A page
//! size would then save more than of a program that waits: for GUPS of 2^26 words, which never prefetches, twice as
//! much. A program that prefetches and also computes for so long that a program without prefetching is as fast may
//! save more than this bound.

use super::laps::Prefetching;
use super::replay::Pace;

/// Upper bound of what 2 MiB pages can save per visit, in nanoseconds, if the program makes one in `pace_ns` on
/// base pages. If that is faster than all laps, the saving of the fastest lap, which is not a bound
/// ([`is_bounded`]).
pub fn saved_at_most(paces: &[Pace], pace_ns: f64) -> f64 {
    for most in [Prefetching::Never, Prefetching::Early, Prefetching::Only] {
        let mix: Vec<Pace> = paces.iter().filter(|pace| pace.way.prefetching() <= most).copied().collect();
        if is_bounded(&mix, pace_ns) {
            return hull(&mix, pace_ns);
        }
    }
    paces.iter().min_by(|one, other| one.base_ns.total_cmp(&other.base_ns)).map_or(0.0, Pace::saved)
}

/// Whether there is a bound at that pace: a program that is faster than every lap overlaps more than any of them shows.
pub fn is_bounded(paces: &[Pace], pace_ns: f64) -> bool {
    paces.iter().any(|pace| pace.base_ns <= pace_ns)
}

/// The largest saving of all mixes that take at most `pace_ns` per visit; the rest of the time is arithmetic.
fn hull(paces: &[Pace], pace_ns: f64) -> f64 {
    let alone = paces.iter().filter(|pace| pace.base_ns <= pace_ns).map(Pace::saved);
    let mixed = paces.iter().filter(|slow| slow.base_ns > pace_ns).flat_map(|slow| {
        let fast = paces.iter().filter(|fast| fast.base_ns <= pace_ns);
        fast.map(|fast| {
            let of_slow = (pace_ns - fast.base_ns) / (slow.base_ns - fast.base_ns);
            slow.saved() * of_slow + fast.saved() * (1.0 - of_slow)
        })
    });
    alone.chain(mixed).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::laps::LapOrder;
    use super::*;

    fn pace(base_ns: f64, huge_ns: f64) -> Pace {
        Pace { way: LapOrder::Free, base_ns, huge_ns }
    }

    fn asked(base_ns: f64, huge_ns: f64) -> Pace {
        Pace { way: LapOrder::Asked, base_ns, huge_ns }
    }

    #[test]
    fn a_mix_of_two_paces_saves_at_most_the_mean_of_both() {
        let paces = [pace(100.0, 60.0), pace(10.0, 6.0)];
        assert_eq!(saved_at_most(&paces, 10.0), 4.0);
        // Half of the accesses one after another, half of them at once.
        assert_eq!(saved_at_most(&paces, 55.0), 22.0);
        assert_eq!(saved_at_most(&paces, 100.0), 40.0);
        assert_eq!(saved_at_most(&paces, 1_000.0), 40.0, "no access saves more than one that the next one waits for");
    }

    #[test]
    fn the_bound_is_the_convex_hull() {
        // The middle pace saves less than the mix of its neighbours: the program may be that mix.
        let paces = [pace(100.0, 60.0), pace(55.0, 54.0), pace(10.0, 6.0)];
        assert_eq!(saved_at_most(&paces, 55.0), 22.0);
        // The fast pace saves more than all slower ones: a program that waits elsewhere still can.
        assert_eq!(saved_at_most(&[pace(10.0, 2.0), pace(100.0, 99.0)], 50.0), 8.0);
    }

    #[test]
    fn a_program_faster_than_its_replay_saves_what_the_fastest_does_and_has_no_bound() {
        let paces = [pace(10.0, 6.0), pace(100.0, 60.0)];
        assert_eq!((saved_at_most(&paces, 5.0), is_bounded(&paces, 5.0)), (4.0, false));
        assert!(is_bounded(&paces, 10.0));
        assert_eq!(saved_at_most(&[pace(10.0, 11.0)], 20.0), 0.0, "pages that cost more save nothing");
        assert_eq!((saved_at_most(&[], 20.0), is_bounded(&[], 20.0)), (0.0, false));
    }

    #[test]
    fn a_program_faster_than_all_loading_laps_is_a_mix_with_lines_that_are_only_prefetched() {
        let paces = [asked(6.0, 3.0), pace(10.0, 9.0), pace(110.0, 70.0)];
        // As slow as the lap that loads: only laps that load.
        assert_eq!(saved_at_most(&paces, 10.0), 1.0);
        // Between: of 104 ns between prefetching and one chain, 2.08 are a fiftieth.
        assert!((saved_at_most(&paces, 8.08) - (3.0 + 37.0 / 50.0)).abs() < 1e-12);
        assert_eq!((saved_at_most(&paces, 6.0), is_bounded(&paces, 6.0)), (3.0, true));
        assert!(!is_bounded(&paces, 5.9));
    }

    #[test]
    fn a_program_as_slow_as_a_lap_without_prefetching_is_not_a_mix_with_one_that_prefetches() {
        let early = |base_ns, huge_ns| Pace { way: LapOrder::Ahead(64), base_ns, huge_ns };
        let paces = [asked(1.0, 0.9), early(5.0, 3.0), pace(10.0, 9.0), pace(110.0, 70.0)];
        assert_eq!(saved_at_most(&paces, 10.0), 1.0);
        // Faster than all laps without prefetching, slower than the lap that prefetches: those two kinds, and no
        // lap that only prefetches.
        assert_eq!(saved_at_most(&paces, 5.0), 2.0);
        assert_eq!(saved_at_most(&paces, 15.5), 1.0 + 39.0 * 5.5 / 100.0);
        assert!((saved_at_most(&paces, 9.2) - (2.0 + 38.0 * 4.2 / 105.0)).abs() < 1e-12);
    }

    /// Paces on base pages, and the part of each that 2 MiB pages take: sometimes more than 1, because of noise.
    fn paces(way: LapOrder) -> impl Strategy<Value = Vec<Pace>> {
        let one =
            (0.1..200.0, 0.1..1.1).prop_map(move |(base_ns, part)| Pace { way, base_ns, huge_ns: base_ns * part });
        prop::collection::vec(one, 1..8)
    }

    /// A program that makes these parts of its visits at each pace, and computes for `idle_ns` in between: its
    /// pace, and its saving.
    fn program(paces: &[Pace], parts: &[f64], idle_ns: f64) -> (f64, f64) {
        let all: f64 = parts.iter().take(paces.len()).sum();
        let mean =
            |of: fn(&Pace) -> f64| paces.iter().zip(parts).map(|(pace, part)| of(pace) * part).sum::<f64>() / all;
        let (base, huge) = (mean(|pace| pace.base_ns), mean(|pace| pace.huge_ns));
        (base + idle_ns, base - huge)
    }

    proptest! {
        #[test]
        fn no_mix_of_laps_that_load_saves_more_than_the_bound(
            paces in paces(LapOrder::Free),
            faster in paces(LapOrder::Asked),
            parts in prop::collection::vec(0.01..1.0, 8),
            idle_ns in 0.0..100.0,
        ) {
            let (pace_ns, saved) = program(&paces, &parts, idle_ns);
            let all = [faster, paces].concat();
            // Precision of a sum of eight products.
            let pace_ns = pace_ns * (1.0 + 1e-9);
            prop_assert!(is_bounded(&all, pace_ns));
            prop_assert!(saved <= saved_at_most(&all, pace_ns) + 1e-6);
        }

        #[test]
        fn no_mix_with_prefetched_lines_that_is_faster_than_all_loading_laps_saves_more_than_the_bound(
            loading in paces(LapOrder::Free),
            parts in prop::collection::vec(0.01..1.0, 8),
            (faster, huge_part) in (0.01..0.99, 0.1..1.1),
            (slower, idle) in (0.0..0.99, 0.0..0.99),
        ) {
            let fastest = loading.iter().map(|pace| pace.base_ns).fold(f64::INFINITY, f64::min);
            let asked = asked(fastest * faster, fastest * faster * huge_part);
            let (loading_ns, of_loading) = program(&loading, &parts, 0.0);
            // It loads the part that puts it a part `slower` of the way from prefetching to the fastest lap that
            // loads; it computes for some of the rest.
            let part = slower * (fastest - asked.base_ns) / (loading_ns - asked.base_ns);
            let mean = |loads: f64, asks: f64| part * loads + (1.0 - part) * asks;
            let busy_ns = mean(loading_ns, asked.base_ns);
            let pace_ns = busy_ns + idle * (fastest - busy_ns);
            let all = [loading, vec![asked]].concat();
            prop_assert!(pace_ns < fastest && is_bounded(&all, pace_ns));
            let saved = mean(of_loading, asked.base_ns - asked.huge_ns);
            prop_assert!(saved <= saved_at_most(&all, pace_ns * (1.0 + 1e-9)) + 1e-6);
        }
    }
}
