//! What `auto` promotes, in which order, and what it gives up: it weighs what each window saves against its cost.

use std::time::Duration;

use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{
    AccessHistory, Action, GuestMapping, Moment, OutcomeResult, PageSize, PolicyChoice, SampleQuality, Snapshot, VmId,
    WindowIndex, WindowRow,
};

use crate::drawn::{Desk, HOT, IDLE, PROOF, of, promote, samples, seconds, used, vm_with};

/// A hot window with one page missing.
fn hot_for_proof(access: AccessHistory, guest: GuestMapping) -> Snapshot {
    of(vec![vm_with(0, "f", |_, row| (row.access, row.guest_mapping, row.resident) = (access, guest, 511))])
}

/// The first second at which auto promotes a window that is hot from 0 on.
fn promoted_after(snapshot: &Snapshot) -> Option<u64> {
    let mut desk = Desk::new(PROOF);
    (0..120).find(|now| !desk.plan(snapshot, seconds(*now)).is_empty())
}

/// The cost is 560 us × 2000 = 1.12 M cycles, and half as much again is required: 1.68 M. Aligned: 10 000 misses ×
/// 19 × 4 = 760 k cycles a second, 2.2 s. Guest on base pages: 10 000 × 5 × 4 = 200 k, 8.4 s.
#[test]
fn auto_promotes_when_a_window_has_been_hot_long_enough_to_pay() {
    let after = |guest| promoted_after(&hot_for_proof(samples(HOT), guest));
    let guests = [GuestMapping::Huge2M, GuestMapping::Base4K, GuestMapping::Unmapped];
    assert_eq!(guests.map(after), [Some(3), Some(9), None]);
}

#[test]
fn auto_promotes_a_full_window_without_proof_unless_its_latest_sample_was_idle() {
    let after = |drawn| {
        let snapshot = of(vec![vm_with(0, "f", |_, row| row.access = samples(drawn))]);
        Desk::new("auto").plan(&snapshot, seconds(0))
    };
    assert_eq!(["x", "-x", "x-", "-"].map(after), [vec![promote(0)], vec![promote(0)], vec![], vec![]]);
}

#[test]
fn auto_takes_an_idle_sample_of_many_windows_for_no_proof_of_one() {
    let after = |windows| {
        let quality = SampleQuality::new(Duration::from_secs(5), windows);
        let snapshot = of(vec![vm_with(0, "f", |_, row| (row.access, row.access_quality) = (samples("-"), quality))]);
        Desk::new("auto").plan(&snapshot, seconds(0))
    };
    assert_eq!([1, 4, 5].map(after), [vec![], vec![], vec![promote(0)]]);
}

/// In a guest on base pages. Touched 1000 times a second: at the upper limit, 170 000 × 20 = 3.4 M cycles a second,
/// 0.5 s; with 2 MiB pages × 76 = 12.9 M, 0.13 s. Touched 100 times, 96 in its bucket: × 512 × 20 = 983 k, 1.7 s.
/// Touched once: 10 240, which bring 614 k in the horizon of a minute.
#[test]
fn auto_weighs_a_window_by_its_touch_frequency_not_by_its_touched_samples() {
    let touched = |touches, guest| hot_for_proof(samples(HOT).with_touches_per_s(Some(touches)), guest);
    let after = |touches| promoted_after(&touched(touches, GuestMapping::Base4K));
    assert_eq!([1000, 100, 1].map(after), [Some(1), Some(2), None]);
    let mut desk = Desk::new(PROOF);
    let aligned = touched(1000, GuestMapping::Huge2M);
    let at = |ms| Moment::after_start(Duration::from_millis(ms));
    assert_eq!([0, 100, 200].map(|ms| desk.plan(&aligned, at(ms)).len()), [0, 0, 1]);
}

/// The busiest window of a guest on base pages, with 1 page present: 170 000 / 512 × 20 = 6 640 cycles a second
/// against 511 000 of bloat. With 71: 471 460 against 441 000, so 30 460 a second, which bring 1.68 M within the
/// minute. With 70: 22 820, which do not.
#[test]
fn auto_never_promotes_a_sparse_window_that_does_not_pay_for_its_bloat() {
    let busiest = samples(HOT).with_touches_per_s(Some(1_000_000));
    let hot = |drawn| of(vec![vm_with(0, drawn, |_, row| row.access = busiest)]);
    assert_eq!(promoted_after(&hot("s")), None);
    let present = |pages| of(vec![vm_with(0, "q", |_, row| (row.access, row.resident) = (busiest, pages))]);
    assert_eq!([70, 71].map(|pages| promoted_after(&present(pages))), [None, Some(56)]);
    let mut desk = Desk::new("auto");
    desk.plan(&hot("ss"), seconds(1));
    assert_eq!(desk.figure("sparse_now"), 2);
}

#[test]
fn auto_restarts_the_hot_time_of_a_window_that_was_cold() {
    let with = |drawn| hot_for_proof(samples(drawn), GuestMapping::Base4K);
    let mut desk = Desk::new(PROOF);
    assert_eq!(desk.plan(&with(HOT), seconds(0)), []);
    assert_eq!(desk.plan(&with("xxxxxxxxxxxxxxx-"), seconds(5)), [], "one sample without an access may be chance");
    assert_eq!(desk.plan(&with("xxxxxxxxxxxxxx--"), seconds(6)), []);
    assert_eq!(desk.plan(&with(HOT), seconds(9)), [], "hot for 9 s, except for one break");
    assert_eq!(desk.plan(&with(HOT), seconds(18)), [promote(0)]);
}

#[test]
fn auto_puts_the_best_return_first_and_unproven_windows_last() {
    let change = |at: usize, row: &mut WindowRow| {
        row.access = [AccessHistory::default(), samples("x-x-x-x-x-x-x-x-"), samples(HOT)][at];
        row.guest_mapping = GuestMapping::Huge2M;
        row.resident = [512, 511, 511][at];
    };
    let snapshot = of(vec![vm_with(0, "fff", change)]);
    let mut desk = Desk::new(PROOF);
    assert_eq!(desk.promotions(&snapshot, seconds(0)), [(0, 0)], "no window has been hot for any time yet");
    assert_eq!(desk.promotions(&snapshot, seconds(30)), [(0, 2), (0, 1), (0, 0)]);
    assert_eq!((desk.figure("planned_on_access"), desk.figure("planned_on_residency")), (2, 2));
}

#[test]
fn auto_without_samples_promotes_nearly_full_windows_the_guest_maps() {
    let guests = [GuestMapping::Unknown, GuestMapping::Huge2M, GuestMapping::Unmapped, GuestMapping::Base4K];
    let snapshot = of(vec![vm_with(0, "nnnm", |at, row| row.guest_mapping = guests[at])]);
    assert_eq!(Desk::new("auto").promotions(&snapshot, seconds(0)), [(0, 1), (0, 0)]);
}

/// Accesses to windows that a promotion cannot help are of no use to `auto`, unless they are large already.
#[test]
fn auto_uses_no_samples_of_windows_that_shadow_tables_keep_small() {
    let mappings = [GuestMapping::Base4K, GuestMapping::Huge2M, GuestMapping::Unknown, GuestMapping::Base4K];
    let vm = vm_with(0, "fffH", |at, row| row.guest_mapping = mappings[at]);
    let used = |walk: WalkCost| {
        let mut desk = Desk::new("auto");
        desk.0.take_walk_cost(&walk);
        [0, 1, 2, 3].map(|row| desk.0.uses_access(&vm, row))
    };
    assert_eq!(used(WalkCost::PRIOR), [true; 4]);
    assert_eq!(used(WalkCost::PRIOR.under_shadow_paging()), [false, true, true, true]);
}

/// With 67 pages the busiest window saves 444 920 cycles a second, and its bloat costs 445 000; with 68 pages it saves
/// 451 560 and costs 444 000.
#[test]
fn auto_samples_a_window_that_cannot_pay_for_its_bloat_once_a_minute() {
    let uses = |pages, access, age_s| {
        let quality = SampleQuality::new(Duration::from_secs(age_s), 1);
        let vm = vm_with(0, "q", |_, row| (row.resident, row.access, row.access_quality) = (pages, access, quality));
        Desk::new("auto").0.uses_access(&vm, 0)
    };
    let (none, hot) = (AccessHistory::default(), samples(HOT));
    assert_eq!([uses(1, none, 0), uses(1, hot, 0), uses(67, hot, 59), uses(67, hot, 60)], [true, false, false, true]);
    assert_eq!([68, 512].map(|pages| uses(pages, hot, 0)), [true; 2], "the busiest of these pay");
}

/// A full window and a hot one for each mapping of the guest: no promotion where shadow tables keep the guest's
/// base pages unchanged.
#[test]
fn auto_under_shadow_paging_skips_windows_that_the_guest_maps_with_base_pages() {
    let guests = [GuestMapping::Base4K, GuestMapping::Huge2M, GuestMapping::Unknown, GuestMapping::Mixed];
    let change = |at: usize, row: &mut WindowRow| (row.access, row.guest_mapping) = (samples(HOT), guests[at % 4]);
    let snapshot = of(vec![vm_with(0, "ffffnnnn", change)]);
    let promoted = |walk: WalkCost| {
        let mut desk = Desk(PolicyChoice::parse("auto").expect("a policy").make_for(&walk));
        desk.plan(&snapshot, seconds(0));
        let mut windows: Vec<u64> =
            desk.promotions(&snapshot, seconds(60)).into_iter().map(|(_, window)| window).collect();
        windows.sort_unstable();
        windows
    };
    assert_eq!(promoted(WalkCost::PRIOR), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(promoted(WalkCost::PRIOR.under_shadow_paging()), [1, 2, 3, 5, 6, 7]);
}

#[test]
fn auto_adds_no_page_while_the_host_is_short_and_gives_up_what_pays() {
    let change = |at: usize, row: &mut WindowRow| {
        row.access =
            [AccessHistory::default(), AccessHistory::default(), samples(IDLE), samples(HOT), samples(IDLE)][at];
        row.zero = [None, None, Some(500), Some(500), Some(10)][at];
    };
    let snapshot = Snapshot { host: used(90), vms: vec![vm_with(0, "fnHHH", change)] };
    let release = |window| Action::Release { vm: VmId(0), window: WindowIndex::new(window) };
    let demote = Action::Demote { vm: VmId(0), window: WindowIndex::new(4), to: PageSize::Base4K };
    assert_eq!(Desk::new("auto").plan(&snapshot, seconds(1)), [release(2), demote, promote(0)]);
}

/// Auto's figures after a promotion at 9 s, when the window continues as `later` for ten samples of a second each.
fn score_after(later: &'static str) -> (u64, u64, u64) {
    let mut desk = Desk::new(PROOF);
    let hot = hot_for_proof(samples(HOT), GuestMapping::Base4K);
    desk.plan(&hot, seconds(0));
    assert_eq!(desk.plan(&hot, seconds(9)), [promote(0)]);
    desk.hears(promote(0), seconds(9), OutcomeResult::Done);
    let after = of(vec![vm_with(0, "H", |_, row| row.access = samples(later))]);
    (10..20).for_each(|now| assert_eq!(desk.plan(&after, seconds(now)), []));
    (desk.figure("paid_back"), desk.figure("written_off"), desk.figure("caution_percent"))
}

#[test]
fn auto_scores_its_own_decisions_and_becomes_cautious() {
    assert_eq!(score_after(HOT), (1, 0, 100)); // 200 k a second pay 1.12 M in 6 s
    assert_eq!(score_after(IDLE), (0, 1, 111)); // one of nine
    assert_eq!(score_after("x---------------"), (0, 0, 100)); // 12.5 k a second: not paid back yet, and not written off
}
