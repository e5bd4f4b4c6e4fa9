//! Policies on recordings: on real ones (`recordings/`, made by `wideleaf run --record`), and on small ones that
//! show the behaviour of the simulated host.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::time::Duration;

use wideleaf_policies::policy::{POLICIES, by_name};
use wideleaf_policies::recording::{DecodeError, Encoder, Header, VmHeader};
use wideleaf_policies::units::{gib, kib, mib};
use wideleaf_policies::{
    Action, Backing, Budget, BudgetLimits, Bytes, Cost, GuestProgress, HostMemory, MappingStats, Moment, NodeId,
    Outcome, OutcomeResult, PageSize, PerTenThousand, Plan, Policy, PolicyChoice, Refusal, ReservationRules, Snapshot,
    VmId, VmSnapshot, WindowIndex, WindowRow,
};
use wideleaf_simulator::replay::{Recording, Tally};

const VM: VmId = VmId(0);

fn recordings() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| (path.display().to_string(), fs::read(path).unwrap())).collect()
}

fn replay(recording: &Recording<'_>, policy: &str) -> Tally {
    recording.replay(by_name(policy).unwrap().with_defaults().as_mut())
}

/// A wrapper around a policy that checks every plan against its budget.
struct Watched(Box<dyn Policy>);

impl Policy for Watched {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        let mut granted = budget.clone();
        self.0.plan(snapshot, now, budget, plan);
        for planned in plan.actions() {
            assert_eq!(granted.try_take(planned.cost), Ok(()), "{}: {:?}", self.name(), planned.action);
        }
    }

    fn decides_at_first_touch(&self) -> bool {
        self.0.decides_at_first_touch()
    }

    fn reserves(&self) -> Option<ReservationRules> {
        self.0.reserves()
    }

    fn first_touch(&mut self, vm: VmId, window: WindowIndex) -> PageSize {
        self.0.first_touch(vm, window)
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.0.learn(outcome);
    }
}

#[test]
fn every_policy_replays_every_recording_within_its_budget_and_repeatably() {
    assert_eq!(recordings().len(), 3);
    for (file, bytes) in recordings() {
        let recording = Recording::read(&bytes).unwrap();
        assert!(recording.is_closed && recording.ticks > 0, "{file}");
        for policy in POLICIES {
            let watched = recording.replay(&mut Watched(policy.with_defaults()));
            assert_eq!(watched, replay(&recording, policy.name), "{file}: {}", policy.name);
        }
    }
}

#[test]
fn the_recorded_policy_repeats_its_actions_when_replayed() {
    for (file, bytes) in recordings() {
        let recording = Recording::read(&bytes).unwrap();
        let mut again = replay(&recording, &recording.header().policy);
        again.budget_refusals = None; // which a recording does not contain
        assert_eq!(again, recording.recorded(), "{file}");
    }
}

#[test]
fn a_recording_cut_off_anywhere_is_replayed_up_to_there() {
    for (file, bytes) in recordings() {
        for length in 0..bytes.len() {
            match Recording::read(&bytes[..length]) {
                Ok(recording) => {
                    assert!(!recording.is_closed);
                    replay(&recording, "greedy");
                }
                Err(error) => assert!(
                    matches!(error, DecodeError::NoRecording | DecodeError::CutOff { .. }),
                    "{file}, {length} bytes: {error}"
                ),
            }
        }
    }
}

#[test]
fn a_damaged_recording_is_refused_or_replayed_without_a_panic() {
    for (_, bytes) in recordings() {
        for place in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[place] ^= 0x15;
            if let Ok(recording) = Recording::read(&damaged) {
                POLICIES.iter().for_each(|policy| drop(replay(&recording, policy.name)));
            }
        }
    }
}

/// A policy that requests the given actions, tick by tick.
struct ScriptedPolicy(VecDeque<Vec<Action>>);

impl ScriptedPolicy {
    fn ticks<const N: usize>(ticks: [Vec<Action>; N]) -> ScriptedPolicy {
        ScriptedPolicy(ticks.into())
    }
}

impl Policy for ScriptedPolicy {
    fn name(&self) -> &'static str {
        "told"
    }

    fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, plan: &mut Plan) {
        for action in self.0.pop_front().unwrap_or_default() {
            plan.push(action, Cost::default());
        }
    }
}

/// A recording under construction: one second a tick, one VM with a second level.
struct Making {
    bytes: Vec<u8>,
    encoder: Encoder,
    second: u64,
}

impl Making {
    fn of(policy: &str, limits: BudgetLimits) -> Making {
        Making::on("anon", policy, limits)
    }

    fn on(backing: &str, policy: &str, limits: BudgetLimits) -> Making {
        let mut bytes = Vec::new();
        let vm = VmHeader { vm: VM, backing: backing.into(), start_page: PageSize::Base4K, ranges: Vec::new() };
        let header = Header { policy: policy.into(), limits, vms: vec![vm], facts: Vec::new() };
        let encoder = Encoder::start(&header, &mut bytes).unwrap();
        Making { bytes, encoder, second: 0 }
    }

    fn now(&self) -> Moment {
        Moment::after_start(Duration::from_secs(self.second))
    }

    /// Adds a snapshot of these rows, a plan, and the outcomes.
    fn tick(&mut self, rows: &[WindowRow], outcomes: &[(Action, OutcomeResult, Cost)]) -> &mut Making {
        self.tick_with(gib(4), rows, outcomes)
    }

    /// Does the same as [`Making::tick`], with `available` of the host's 8 GiB available.
    fn tick_with(
        &mut self,
        available: Bytes,
        rows: &[WindowRow],
        outcomes: &[(Action, OutcomeResult, Cost)],
    ) -> &mut Making {
        self.second += 1;
        let mut vm = VmSnapshot::with_capacity(VM, rows.len());
        rows.iter().for_each(|row| vm.push(*row));
        vm.mapping = Some(MappingStats::default());
        let host = Some(HostMemory { total: gib(8), available, giant_pages_free: 1, ..HostMemory::default() });
        let now = self.now();
        self.encoder.snapshot(now, &Snapshot { host, vms: vec![vm] }, &mut self.bytes);
        self.encoder.plan(now, &[], &mut self.bytes);
        for (action, result, cost) in outcomes {
            let outcome = Outcome { action: *action, at: now, cost: *cost, unavailable: cost.cpu, result: *result };
            self.encoder.outcome("collapse", &outcome, &mut self.bytes);
        }
        self
    }

    fn replay(&self, policy: &mut dyn Policy) -> Tally {
        Recording::read(&self.bytes).unwrap().replay(policy)
    }
}

fn making() -> Making {
    Making::of("greedy", BudgetLimits::default())
}

fn row(window: u64, resident: u16, backing: Backing) -> WindowRow {
    WindowRow::new(WindowIndex::new(window), resident, backing)
}

fn base(window: u64, resident: u16) -> WindowRow {
    row(window, resident, Backing::Base4K)
}

fn promote(window: u64) -> Action {
    Action::Promote { vm: VM, window: WindowIndex::new(window), to: PageSize::Huge2M }
}

/// Coverage at each second at which it changed.
fn coverage(tally: &Tally) -> Vec<(u64, u32)> {
    tally.coverage.iter().map(|(at, share)| (at.since_start().as_secs(), share.get())).collect()
}

#[test]
fn windows_that_the_recorded_policy_promoted_are_base_pages_for_another_policy() {
    // 128 pages of window 0 were present before it became huge
    let done = (promote(0), OutcomeResult::Done, Cost { copied: mib(2), cpu: Duration::from_micros(700) });
    let mut making = making();
    making.tick(&[base(0, 128)], &[done]).tick(&[row(0, 512, Backing::Huge2M)], &[]);
    let never = making.replay(&mut ScriptedPolicy::ticks([]));
    assert_eq!((coverage(&never), never.resident_at_end), (vec![(1, 0)], kib(512)));
    let recorded = Recording::read(&making.bytes).unwrap().recorded();
    assert_eq!((coverage(&recorded), recorded.bloat), (vec![(1, 0), (2, 10_000)], kib(1536)));
    // a second later than the recorded policy: that tick has no recorded outcome, so the median applies
    let late = making.replay(&mut ScriptedPolicy::ticks([vec![], vec![promote(0)]]));
    assert_eq!((late.cpu, late.bloat), (Duration::from_micros(700), kib(1536)));
}

#[test]
fn the_moves_of_a_recording_do_not_change_the_price_of_its_promotions() {
    let done = |action, copied, us| (action, OutcomeResult::Done, Cost { copied, cpu: Duration::from_micros(us) });
    let sparse = |window| Action::Move { vm: VM, window: WindowIndex::new(window), node: NodeId(1) };
    let rows = [base(0, 512), base(1, 2), base(2, 2), base(3, 512)];
    let outcomes = [done(promote(0), mib(2), 700), done(sparse(1), kib(8), 20), done(sparse(2), kib(8), 20)];
    let mut making = making();
    making.tick(&rows, &outcomes).tick(&rows, &[]);
    let late = making.replay(&mut ScriptedPolicy::ticks([vec![], vec![promote(3)]]));
    assert_eq!((late.copied, late.cpu), (mib(2), Duration::from_micros(700)));
}

/// A policy that keeps the readings of the guest's progress.
struct Reading(Vec<GuestProgress>);

impl Policy for Reading {
    fn name(&self) -> &'static str {
        "reading"
    }

    fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {
        self.0.extend(&snapshot.vms[0].progress);
    }
}

#[test]
fn only_the_recorded_policy_gets_the_recorded_readings_of_the_guests_progress() {
    let reading = |done| GuestProgress { phase: 1, done, cpu: Duration::from_millis(done) };
    let replayed = |recorded_policy: &str| {
        let (mut recording, limits) = (Vec::new(), BudgetLimits::default());
        let header = Header { policy: recorded_policy.into(), limits, vms: Vec::new(), facts: Vec::new() };
        let mut encoder = Encoder::start(&header, &mut recording).unwrap();
        for (second, progress) in [(1, vec![reading(50), reading(100)]), (2, vec![]), (3, vec![reading(150)])] {
            let now = Moment::after_start(Duration::from_secs(second));
            let vm = VmSnapshot { progress, ..VmSnapshot::with_capacity(VM, 0) };
            encoder.snapshot(now, &Snapshot { host: None, vms: vec![vm] }, &mut recording);
            encoder.plan(now, &[], &mut recording);
        }
        let mut policy = Reading(Vec::new());
        Recording::read(&recording).unwrap().replay(&mut policy);
        policy.0
    };
    assert_eq!(replayed("reading"), [50, 100, 150].map(reading));
    assert_eq!(replayed("never"), []);
}

#[test]
fn windows_that_were_large_from_the_start_stay_large() {
    let mut making = making();
    making.tick(&[row(0, 512, Backing::Huge2M)], &[]).tick(&[row(0, 512, Backing::Huge2M)], &[]);
    assert_eq!(coverage(&making.replay(&mut ScriptedPolicy::ticks([]))), [(1, 10_000)]);
}

#[test]
fn a_promoted_window_stays_large_while_it_is_present() {
    let mut making = making();
    making.tick(&[base(0, 8)], &[]).tick(&[base(0, 9)], &[]);
    making.tick(&[row(0, 0, Backing::Unbacked)], &[]).tick(&[base(0, 1)], &[]);
    let tally = making.replay(&mut ScriptedPolicy::ticks([vec![promote(0)]]));
    assert_eq!(coverage(&tally), [(1, 0), (2, 10_000), (3, 0)]);
    assert_eq!(tally.coverage_area, Duration::from_secs(1));
    assert_eq!(tally.coverage_mean(), PerTenThousand::new(3_333));
    assert_eq!(tally.resident_at_end, kib(4));
}

#[test]
fn a_recorded_refusal_is_repeated_and_the_window_backs_off() {
    let refused = (promote(0), OutcomeResult::Refused(Refusal::NoHugePage), Cost::default());
    let mut making = making();
    making.tick(&[base(0, 8)], &[refused]).tick(&[base(0, 8)], &[]).tick(&[base(0, 8)], &[]);
    let tally = making.replay(&mut ScriptedPolicy::ticks([vec![promote(0)], vec![promote(0)]]));
    assert_eq!((tally.count_of("promote_2m", "refused_no_huge_page"), tally.count_of("promote_2m", "done")), (1, 1));
    assert_eq!(coverage(&tally), [(1, 0), (3, 10_000)], "a quarter of a second of back-off is over a second later");
}

#[test]
fn impossible_actions_are_counted_and_cost_nothing() {
    let mut making = making();
    making.tick(&[base(0, 8), row(1, 512, Backing::Huge2M), row(2, 0, Backing::Unbacked)], &[]);
    let window = WindowIndex::new(0);
    let giant = Action::Promote { vm: VM, window, to: PageSize::Giant1G };
    let release = Action::Release { vm: VM, window };
    let demote = Action::Demote { vm: VM, window: WindowIndex::new(1), to: PageSize::Huge2M };
    let tick = vec![giant, release, promote(1), promote(2), promote(9), demote];
    let tally = making.replay(&mut ScriptedPolicy::ticks([tick]));
    let counted: Vec<_> = tally.actions.iter().map(|((action, result), n)| (*action, *result, *n)).collect();
    assert_eq!(
        counted,
        [
            ("demote_2m", "skipped_no_mechanism", 1),
            ("promote_1g", "refused_not_eligible", 1),
            ("promote_2m", "skipped_already_done", 1),
            ("promote_2m", "skipped_not_resident", 2), // unbacked; not in the snapshot
            ("release", "skipped_backing_off", 1),     // window 0 refused just before
        ]
    );
    assert_eq!((tally.copied, tally.cpu), (Bytes::ZERO, Duration::ZERO));
}

#[test]
fn a_giant_takes_a_page_of_the_pool_until_the_pool_is_empty() {
    let rows: Vec<WindowRow> = (0..1024).map(|window| base(window, 512)).collect();
    let mut making = making();
    making.tick(&rows, &[]).tick(&rows, &[]).tick(&rows, &[]);
    let giant = |window| Action::Promote { vm: VM, window: WindowIndex::new(window), to: PageSize::Giant1G };
    let tally = making.replay(&mut ScriptedPolicy::ticks([vec![giant(0)], vec![giant(512)]]));
    assert_eq!((tally.count_of("promote_1g", "done"), tally.count_of("promote_1g", "refused_no_huge_page")), (1, 1));
    assert_eq!((tally.copied, coverage(&tally)), (gib(1), vec![(1, 0), (2, 5_000)]));
}

#[test]
fn a_recorded_giant_has_its_earlier_pages_for_another_policy() {
    // 512 windows, the first with 8 pages, the others without any, made one giant page by the recorded policy
    let empty = (1..512).map(|window| row(window, 0, Backing::Unbacked));
    let before: Vec<WindowRow> = [base(0, 8)].into_iter().chain(empty).collect();
    let after: Vec<WindowRow> = (0..512).map(|window| row(window, 512, Backing::Giant1G)).collect();
    let giant = Action::Promote { vm: VM, window: WindowIndex::new(0), to: PageSize::Giant1G };
    let mut making = making();
    making.tick(&before, &[(giant, OutcomeResult::Done, Cost::default())]).tick(&after, &[]);
    let never = making.replay(&mut ScriptedPolicy::ticks([]));
    assert_eq!((coverage(&never), never.resident_at_end), (vec![(1, 0)], kib(32)));
}

#[test]
fn released_pages_are_gone_until_the_guest_uses_others() {
    let seen = WindowRow { zero: Some(400), ..row(0, 512, Backing::Huge2M) };
    let mut making = making();
    making.tick(&[seen], &[]).tick(&[seen], &[]);
    let release = Action::Release { vm: VM, window: WindowIndex::new(0) };
    let tally = making.replay(&mut ScriptedPolicy::ticks([vec![release]]));
    assert_eq!((tally.released, tally.resident_at_end), (kib(1600), kib(448)));
    assert_eq!(coverage(&tally), [(1, 10_000), (2, 0)]);
    making.tick(&[base(0, 500)], &[]);
    assert_eq!(making.replay(&mut ScriptedPolicy::ticks([vec![release]])).resident_at_end, kib(2000));
}

#[test]
fn demotion_of_anonymous_ram_splits_it_and_promotion_copies_it() {
    let rows = [WindowRow { zero: Some(12), ..row(0, 512, Backing::Huge2M) }];
    let mut making = making();
    making.tick(&rows, &[]).tick(&rows, &[]).tick(&rows, &[]);
    let split = Action::Demote { vm: VM, window: WindowIndex::new(0), to: PageSize::Base4K };
    let tally = making.replay(&mut ScriptedPolicy::ticks([vec![split], vec![split]]));
    assert_eq!((tally.count_of("demote_4k", "done"), tally.count_of("demote_4k", "skipped_already_done")), (1, 1));
    assert_eq!((coverage(&tally), tally.resident_at_end), (vec![(1, 10_000), (2, 0)], kib(2000)));
    let tally = making.replay(&mut ScriptedPolicy::ticks([vec![split], vec![promote(0)]]));
    assert_eq!((tally.copied, coverage(&tally)), (mib(2), vec![(1, 10_000), (2, 0), (3, 10_000)]));
}

#[test]
fn a_vacated_window_of_anonymous_ram_has_all_contents_on_base_pages() {
    let rows = [WindowRow { zero: Some(12), ..row(0, 512, Backing::Huge2M) }];
    let vacate = Action::Vacate { vm: VM, window: WindowIndex::new(0) };
    let [mut anonymous, mut memfd] = ["anon", "memfd"].map(|on| Making::on(on, "never", BudgetLimits::default()));
    for making in [&mut anonymous, &mut memfd] {
        making.tick(&rows, &[]).tick(&rows, &[]).tick(&rows, &[]);
    }
    let tally = anonymous.replay(&mut ScriptedPolicy::ticks([vec![vacate], vec![vacate]]));
    assert_eq!((tally.count_of("vacate", "done"), tally.count_of("vacate", "skipped_already_done")), (1, 1));
    assert_eq!((coverage(&tally), tally.resident_at_end), (vec![(1, 10_000), (2, 0)], mib(2)));
    assert_eq!((tally.copied, tally.released), (mib(2), Bytes::ZERO));
    let tally = anonymous.replay(&mut ScriptedPolicy::ticks([vec![vacate], vec![promote(0)]]));
    assert_eq!((tally.bloat, coverage(&tally)), (Bytes::ZERO, vec![(1, 10_000), (2, 0), (3, 10_000)]));
    let tally = memfd.replay(&mut ScriptedPolicy::ticks([vec![vacate]]));
    assert_eq!((tally.count_of("vacate", "skipped_no_mechanism"), coverage(&tally)), (1, vec![(1, 10_000)]));
}

#[test]
fn demotion_of_other_ram_holds_it_and_promotion_recovers_it_without_a_copy() {
    let rows = [row(0, 512, Backing::Huge2M)];
    let mut making = Making::on("memfd", "never", BudgetLimits::default());
    making.tick(&rows, &[]).tick(&rows, &[]).tick(&rows, &[]);
    let hold = Action::Demote { vm: VM, window: WindowIndex::new(0), to: PageSize::Base4K };
    let tally = making.replay(&mut ScriptedPolicy::ticks([vec![hold], vec![promote(0)], vec![promote(0)]]));
    assert_eq!((tally.count_of("demote_4k", "done"), tally.copied), (1, Bytes::ZERO));
    assert_eq!(tally.count_of("promote_2m", "done"), 1);
    assert_eq!(tally.count_of("promote_2m", "skipped_already_done"), 1);
}

#[test]
fn every_policy_gets_the_budget_of_the_recording() {
    // 2 MiB per second, with one second saved up: one window a tick
    let limits =
        BudgetLimits { copy_per_second: mib(2), cpu_share: PerTenThousand::ALL, burst: Duration::from_secs(1) };
    let rows: Vec<WindowRow> = (0..8).map(|window| base(window, 512)).collect();
    let mut making = Making::of("never", limits);
    for _ in 0..4 {
        making.tick(&rows, &[]);
    }
    let tally = making.replay(by_name("greedy").unwrap().with_defaults().as_mut());
    assert_eq!((tally.count_of("promote_2m", "done"), tally.copied), (4, mib(8)));
    assert_eq!(tally.budget_refusals, Some(4));
    assert_eq!(coverage(&tally), [(1, 0), (2, 1_250), (3, 2_500), (4, 3_750)]);
}

/// Answers first touches of even windows with huge pages.
struct EvenHuge;

impl Policy for EvenHuge {
    fn name(&self) -> &'static str {
        "even_huge"
    }

    fn plan(&mut self, _: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {}

    fn decides_at_first_touch(&self) -> bool {
        true
    }

    fn first_touch(&mut self, _: VmId, window: WindowIndex) -> PageSize {
        if window.get().is_multiple_of(2) { PageSize::Huge2M } else { PageSize::Base4K }
    }
}

#[test]
fn each_window_has_one_first_touch() {
    let mut making = making();
    making.tick(&[row(0, 0, Backing::Unbacked), base(1, 1)], &[]);
    making.tick(&[base(0, 512), base(1, 512)], &[]).tick(&[base(0, 512), base(1, 512)], &[]);
    let tally = making.replay(&mut EvenHuge);
    assert_eq!((tally.count_of("first_touch_2m", "done"), tally.count_of("first_touch_4k", "done")), (1, 1));
    assert_eq!(coverage(&tally), [(1, 0), (2, 5_000)]);
}

/// Window 0 fills, window 1 stays half full.
#[test]
fn a_reserved_window_becomes_large_without_a_copy_when_the_recorded_guest_has_filled_it() {
    let mut making = making();
    making.tick(&[row(0, 0, Backing::Unbacked), row(1, 0, Backing::Unbacked)], &[]);
    making.tick(&[base(0, 511), base(1, 256)], &[]).tick(&[base(0, 512), base(1, 256)], &[]);
    let tally = making.replay(by_name("reservation").unwrap().with_defaults().as_mut());
    let counts = ["reserve_2m", "promote_in_place_2m", "break_reservation"].map(|name| tally.count_of(name, "done"));
    assert_eq!((counts, tally.copied, tally.bloat), ([2, 1, 0], Bytes::ZERO, Bytes::ZERO));
    let half_filled = PolicyChoice::parse("reservation:threshold=256").unwrap();
    let tally = making.replay(half_filled.make().as_mut());
    assert_eq!((tally.count_of("promote_in_place_2m", "done"), tally.bloat), (2, kib(4) + kib(1024)));
}

#[test]
fn a_window_that_the_recorded_guest_emptied_is_reserved_anew_but_a_broken_one_is_not() {
    let mut making = making();
    for (pages, available) in [(1, gib(4)), (0, gib(4)), (2, gib(4)), (3, mib(64)), (512, gib(4))] {
        let backing = if pages == 0 { Backing::Unbacked } else { Backing::Base4K };
        making.tick_with(available, &[row(0, pages, backing)], &[]);
    }
    let tally = making.replay(by_name("reservation").unwrap().with_defaults().as_mut());
    let counts = ["reserve_2m", "promote_in_place_2m", "break_reservation"].map(|name| tally.count_of(name, "done"));
    assert_eq!(counts, [2, 0, 1]);
}
