//! Moves of giants on the fake host, which fails at every call, and on the running kernel under writing threads:
//! guest RAM has the same contents after a swap as before, whatever failed in between.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::turn_at_the_pools;
use wideleaf_memory::actuators::giant::{GiantPages, GiantSwap, SwapLimits, SwapSite};
use wideleaf_memory::claims::Claimed;
use wideleaf_memory::detached::{self, AsideError, WindowMover};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::second_level::guard::SecondLevelGuard;
use wideleaf_memory::second_level::{PagingMode, SecondLevelError, Slot, SlotId};
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, Host, LinuxHost, Paging, SecondLevel};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, MappingStats, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

const GIANT: Gpa = Gpa::new(1 << 30);
const PAGE_SIZE: PageSize = PageSize::Base4K;
const PAGE: Bytes = PAGE_SIZE.bytes();
/// Limits for shared machines, which stop for tens of milliseconds; the benches measure the length of a pause.
const PATIENT: SwapLimits = SwapLimits { pause_max: Duration::from_secs(60), rounds_max: 8 };

/// RAM `[0, 2 GiB)`; the test swaps the second giant.
fn map(kind: BackingKind) -> Arc<GuestRam> {
    let range = GpaRange::new(Gpa::new(0), gib(2)).unwrap();
    GuestRam::map(&[range], BackingConfig::new(kind, PageSize::Base4K).unwrap()).unwrap()
}

/// The word at an address.
fn word(ram: &GuestRam, gpa: Gpa) -> &AtomicU64 {
    &ram.words(ram.ranges()[0])[((gpa - Gpa::new(0)).get() / 8) as usize]
}

/// Places of the tests' words: at both ends, and at the borders of windows.
fn places() -> impl Iterator<Item = Gpa> {
    [Bytes::ZERO, PAGE, mib(2), mib(512) - PAGE, gib(1) - PAGE].into_iter().map(|offset| GIANT + offset)
}

fn fill(ram: &GuestRam) {
    places().for_each(|place| word(ram, place).store(place.get(), Ordering::Relaxed));
}

fn assert_filled(ram: &GuestRam, when: &str) {
    for place in places() {
        assert_eq!(word(ram, place).load(Ordering::Relaxed), place.get(), "{when}: the word at {place}");
    }
}

/// A captured sysfs tree with a pool of one free giant page.
fn pool_of_one() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("sys/kernel/mm/hugepages/hugepages-1048576kB");
    std::fs::create_dir_all(&pool).unwrap();
    for (name, value) in [("nr_hugepages", 1), ("free_hugepages", 1), ("resv_hugepages", 0), ("surplus_hugepages", 0)] {
        std::fs::write(pool.join(name), format!("{value}\n")).unwrap();
    }
    dir
}

/// A VM on fakes, with some words in its RAM.
struct FakeVm {
    host: FakeHost,
    second_level: Arc<FakeSecondLevel>,
    ram: Arc<GuestRam>,
    giants: GiantPages,
    pool: tempfile::TempDir,
}

impl FakeVm {
    fn new(limits: SwapLimits) -> FakeVm {
        let ram = map(BackingKind::Anon);
        fill(&ram);
        let host = FakeHost::default();
        places().for_each(|place| host.make_present(ram.hva(place).unwrap(), PAGE, false));
        let slots = [Bytes::ZERO, gib(1), gib(1) + mib(512)].map(|start| Gpa::new(0) + start);
        let ranges = [gib(1), mib(512), mib(512)];
        let slots: Vec<GpaRange> = slots.into_iter().zip(ranges).map(|(s, b)| GpaRange::new(s, b).unwrap()).collect();
        let pool = pool_of_one();
        let giants = GiantPages::new(HugetlbPools::at(pool.path()), false, limits);
        FakeVm { host, second_level: Arc::new(FakeSecondLevel::new(&slots)), ram, giants, pool }
    }

    fn site(&self) -> SwapSite<'_> {
        SwapSite { host: &self.host, ram: &self.ram, second_level: self.second_level.as_ref() }
    }

    fn promote(&self) -> GiantSwap {
        self.giants.promote(self.site(), GIANT)
    }

    fn demote(&self) -> GiantSwap {
        self.giants.demote(self.site(), GIANT, PageSize::Base4K)
    }

    fn is_giant(&self) -> bool {
        self.ram.claims().is_on_giant_page(WindowIndex::containing(GIANT))
    }

    fn is_mapped_giant(&self) -> bool {
        let mut runs = Vec::new();
        self.host.scan(self.ram.hva(GIANT).unwrap(), gib(1), &mut runs).unwrap();
        runs.iter().filter(|run| run.is_huge).map(|run| run.bytes).sum::<Bytes>() == gib(1)
    }

    /// Asserts that every word is in guest RAM, or in its pages that were moved aside.
    fn assert_kept(&self, when: &str) {
        for place in places() {
            let aside = self.host.moved_aside_to().map(|start| start + (place - GIANT));
            let found = self.ram.hva(place).into_iter().chain(aside).find(|at| word_at(*at) == Some(place.get()));
            assert!(found.is_some(), "{when}: the word at {place} is nowhere");
        }
    }

    /// Asserts that no dirty log is on except those that a swap has reported as left on, and that the guest runs.
    fn assert_at_rest(&self, swap: &GiantSwap, when: &str) {
        let logged = self.second_level.slots().iter().filter(|slot| slot.is_dirty_logged).count();
        assert_eq!(logged, swap.logs_left_on as usize, "{when}");
        assert!(!swap.is_stuck, "{when}");
        assert!(
            matches!(self.second_level.resume(), Err(SecondLevelError::WrongState(_))),
            "{when}: nothing is paused"
        );
        let (claims, window) = (self.ram.claims(), WindowIndex::containing(GIANT));
        assert!(!claims.is_under_way(window), "{when}: it is free for other users again");
        assert_filled(&self.ram, when);
    }
}

#[test]
fn a_giant_goes_onto_one_page_and_back_with_all_its_words() {
    let vm = FakeVm::new(PATIENT);
    let promoted = vm.promote();
    assert_eq!((promoted.result, promoted.pauses), (OutcomeResult::Done, 1));
    assert_eq!(promoted.bloat, gib(1) - PAGE * 5, "all but five pages");
    assert_eq!(promoted.cost.copied, PAGE * 5);
    assert!(vm.is_giant());
    assert_eq!(vm.promote().result, OutcomeResult::Skipped(Skip::AlreadyDone));
    vm.assert_at_rest(&promoted, "promoted");
    let demoted = vm.demote();
    assert_eq!(demoted.result, OutcomeResult::Done);
    assert!(!vm.is_giant());
    assert_eq!(vm.demote().result, OutcomeResult::Skipped(Skip::AlreadyDone));
    vm.assert_at_rest(&demoted, "demoted");
}

#[test]
fn a_later_swapper_knows_the_giants_that_an_earlier_one_made() {
    let mut vm = FakeVm::new(PATIENT);
    assert_eq!(vm.promote().result, OutcomeResult::Done);
    vm.giants = GiantPages::new(HugetlbPools::at(vm.pool.path()), false, PATIENT);
    let again = vm.promote();
    assert_eq!((again.result, again.cost.copied), (OutcomeResult::Skipped(Skip::AlreadyDone), Bytes::ZERO));
    assert!(vm.is_giant(), "a look does not end it");
    vm.assert_at_rest(&again, "left alone");
    vm.host.fail_call(3, libc::ENOMEM); // moving in: only the owner of its file can map the page again
    let refused = vm.demote();
    assert!(matches!(refused.result, OutcomeResult::Refused(_)) && vm.is_giant(), "{refused:?}");
    vm.assert_at_rest(&refused, "refused");
    let demoted = vm.demote();
    assert_eq!((demoted.result, vm.is_giant()), (OutcomeResult::Done, false));
    vm.assert_at_rest(&demoted, "demoted");
}

/// The word at an address of this process; `None` where nothing is mapped.
fn word_at(at: Hva) -> Option<u64> {
    let mut bytes = [0; 8];
    File::open("/proc/self/mem").unwrap().read_exact_at(&mut bytes, at.get()).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

/// Upper bound of the calls of a swap.
const CALLS_BOUND: u64 = 14;

/// Fails one call after the other; returns the number of swaps that failed.
fn failing_each_call(is_promoted_first: bool, fail: impl Fn(&FakeVm, u64)) -> usize {
    let mut unchanged = 0;
    for call in 0..CALLS_BOUND {
        let vm = FakeVm::new(PATIENT);
        if is_promoted_first {
            assert_eq!(vm.promote().result, OutcomeResult::Done);
        }
        fail(&vm, call);
        let swap = if is_promoted_first { vm.demote() } else { vm.promote() };
        // A failure that is still pending is not the swap's.
        fail(&vm, u64::MAX >> 1);
        let when = format!("call {call} failed, {swap:?}");
        vm.assert_at_rest(&swap, &when);
        let is_unchanged = vm.is_giant() == is_promoted_first;
        if is_unchanged {
            assert!(matches!(swap.result, OutcomeResult::Refused(_)), "{when}");
            unchanged += 1;
        }
    }
    unchanged
}

#[test]
fn a_promotion_loses_nothing_if_any_host_call_fails() {
    // Host calls: advise, one mapping?, create, fill, map aside, populate, map aside, scan, move aside, map over,
    // populate. The check afterwards changes nothing.
    assert_eq!(failing_each_call(false, |vm, call| vm.host.fail_call(call, libc::ENOMEM)), 11);
}

#[test]
fn a_promotion_loses_nothing_if_any_call_of_the_second_level_fails() {
    // Calls: two logs on, two logs fetched, pause, two logs fetched. A failure of resume or of switching off does
    // not fail the swap.
    assert_eq!(failing_each_call(false, |vm, call| vm.second_level.fail_call(call, libc::ENOMEM)), 7);
}

#[test]
fn a_demotion_loses_nothing_if_any_host_call_fails() {
    // Host calls: map aside, advise, scan, move in.
    assert_eq!(failing_each_call(true, |vm, call| vm.host.fail_call(call, libc::ENOMEM)), 4);
}

#[test]
fn a_demotion_loses_nothing_if_any_call_of_the_second_level_fails() {
    assert_eq!(failing_each_call(true, |vm, call| vm.second_level.fail_call(call, libc::ENOMEM)), 7);
}

/// Panics in one call after the other: the guest goes on with all its words, or stays paused and they are kept.
/// Returns the number of swaps that panicked, and of those that left the guest paused.
fn panicking_in_each_call(is_promoted_first: bool, panic: impl Fn(&FakeVm, u64)) -> (usize, usize) {
    let (mut panicked, mut stuck) = (0, 0);
    for call in 0..CALLS_BOUND {
        let vm = FakeVm::new(PATIENT);
        if is_promoted_first {
            assert_eq!(vm.promote().result, OutcomeResult::Done);
        }
        panic(&vm, call);
        let swap = if is_promoted_first { vm.demote() } else { vm.promote() };
        panic(&vm, u64::MAX >> 1); // a pending one is not the swap's
        let when = format!("call {call} panicked, {swap:?}");
        panicked += usize::from(swap.panicked.is_some());
        stuck += usize::from(swap.is_stuck);
        assert_eq!(vm.is_giant(), vm.is_mapped_giant(), "{when}");
        assert_eq!(vm.ram.claims().is_under_way(WindowIndex::containing(GIANT)), swap.is_stuck, "{when}");
        assert_eq!(vm.second_level.resume().is_ok(), swap.is_stuck, "{when}: it is paused if it is stuck");
        let mut looks = 0;
        vm.ram.claims().steadily(|| looks += 1);
        assert_eq!(looks, 1, "{when}: every observer sees the end of the exchange");
        let logged = vm.second_level.slots().iter().filter(|slot| slot.is_dirty_logged).count();
        assert!(logged <= 1, "{when}: at most the log that panicked while being switched off stays on");
        if swap.is_stuck {
            vm.assert_kept(&when);
        } else {
            assert_filled(&vm.ram, &when);
        }
    }
    (panicked, stuck)
}

#[test]
fn a_promotion_that_panics_in_any_host_call_loses_nothing() {
    // As many calls as can fail, and the check afterwards. Stuck in the exchange: move aside, map over, populate.
    assert_eq!(panicking_in_each_call(false, |vm, call| vm.host.panic_in_call(call)), (12, 3));
}

#[test]
fn a_promotion_that_panics_in_any_call_of_the_second_level_loses_nothing() {
    // Two logs on, two fetched, pause, two fetched, resume, two off. A guest that cannot be resumed is stuck.
    assert_eq!(panicking_in_each_call(false, |vm, call| vm.second_level.panic_in_call(call)), (10, 1));
}

#[test]
fn a_move_aside_that_fails_half_way_loses_nothing() {
    let vm = FakeVm::new(PATIENT);
    vm.host.fail_after_moving_aside();
    let swap = vm.promote();
    assert!(swap.is_stuck && matches!(swap.result, OutcomeResult::Refused(_)), "{swap:?}");
    assert!(vm.second_level.resume().is_ok(), "the guest does not run on with holes in its RAM");
    vm.assert_kept("half-way");
}

#[test]
fn a_demotion_that_panics_in_any_host_call_loses_nothing() {
    // Map aside, advise, scan; stuck while it moves in.
    assert_eq!(panicking_in_each_call(true, |vm, call| vm.host.panic_in_call(call)), (4, 1));
}

#[test]
fn a_demotion_that_panics_in_any_call_of_the_second_level_loses_nothing() {
    assert_eq!(panicking_in_each_call(true, |vm, call| vm.second_level.panic_in_call(call)), (10, 1));
}

#[test]
fn a_log_that_another_user_switched_on_is_reported_before_any_copy() {
    let vm = FakeVm::new(PATIENT);
    let theirs = vm.second_level.slots()[2];
    vm.second_level.set_dirty_log(theirs.id, true).unwrap();
    vm.second_level.write(theirs.range.start());
    let own = SecondLevelGuard::new(vm.second_level.clone(), vm.ram.claims().clone());
    let swap = vm.giants.promote(SwapSite { second_level: &own, ..vm.site() }, GIANT);
    assert_eq!((swap.result, swap.cost.copied), (OutcomeResult::Refused(Refusal::Busy), Bytes::ZERO));
    let logged: Vec<bool> = vm.second_level.slots().iter().map(|slot| slot.is_dirty_logged).collect();
    assert_eq!(logged, [false, false, true], "as before");
    assert_eq!(vm.second_level.take_dirty_log(theirs.id).unwrap()[0], 1, "it has the written page");
    assert!(!vm.is_giant());
}

#[test]
fn a_guest_with_too_short_a_pause_limit_is_left_alone() {
    let vm = FakeVm::new(SwapLimits { pause_max: Duration::ZERO, rounds_max: 5 });
    let swap = vm.promote();
    assert_eq!(swap.result, OutcomeResult::Refused(Refusal::OutrunByWrites));
    assert_eq!((swap.rounds, swap.pauses), (5, 0));
    vm.assert_at_rest(&swap, "left alone");
    assert!(!vm.is_giant());
}

#[test]
fn a_giant_with_a_claim_is_busy_and_is_not_changed() {
    let vm = FakeVm::new(PATIENT);
    let in_work = vm.ram.claims().window(WindowIndex::containing(GIANT)).unwrap();
    let calls = vm.host.calls();
    assert_eq!(vm.promote().result, OutcomeResult::Refused(Refusal::Busy));
    assert_eq!(vm.host.calls(), calls);
    drop(in_work);
    assert_eq!(vm.promote().result, OutcomeResult::Done);
}

#[test]
fn windows_of_a_demoted_giant_can_be_taken_aside_again() {
    if let Err(why) = detached::probe() {
        println!("skipped: {why}");
        return;
    }
    let vm = FakeVm::new(PATIENT);
    let mover = WindowMover::start(Arc::new(LinuxHost::open().unwrap()), vm.ram.clone()).unwrap();
    let (aside, window) = (mover.aside(), WindowIndex::containing(GIANT));
    let there_and_back = || aside.set_aside(window).and_then(|()| aside.bring_back(window));
    assert!(there_and_back().unwrap().is_none(), "no thread touched it");
    vm.promote();
    assert!(matches!(there_and_back(), Err(AsideError::Claimed(_, Claimed::OnGiantPage))));
    vm.demote();
    // The mapping differs from the one that was watched before.
    assert!(there_and_back().unwrap().is_none());
    aside.set_aside(window).unwrap();
    assert_filled(&vm.ram, "touched while it was aside");
    assert!(aside.bring_back(window).unwrap().is_some(), "the touch was seen");
}

#[test]
fn a_held_slot_stays_held_and_no_write_is_lost() {
    let vm = FakeVm::new(PATIENT);
    let second = vm.second_level.slots()[1].id;
    vm.second_level.set_dirty_log(second, true).unwrap();
    vm.second_level.write(GIANT);
    let promoted = vm.promote();
    assert_eq!((promoted.result, promoted.logs_left_on), (OutcomeResult::Done, 0));
    assert_eq!(promoted.written_pages, 0, "pages written before the copy are not copied twice");
    let logged: Vec<bool> = vm.second_level.slots().iter().map(|slot| slot.is_dirty_logged).collect();
    assert_eq!(logged, [false, true, false], "as before");
    assert_filled(&vm.ram, "held");
}

#[test]
fn ram_in_several_mappings_is_refused_before_anything_is_copied() {
    let vm = FakeVm::new(PATIENT);
    vm.host.cut_mappings();
    let swap = vm.promote();
    assert_eq!((swap.result, swap.cost.copied), (OutcomeResult::Refused(Refusal::NotEligible), Bytes::ZERO));
    vm.assert_at_rest(&swap, "refused");
}

#[test]
fn a_pool_without_a_page_is_a_refusal() {
    let vm = FakeVm::new(PATIENT);
    std::fs::write(vm.pool.path().join("sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages"), "0\n").unwrap();
    assert_eq!(vm.promote().result, OutcomeResult::Refused(Refusal::NoHugePage));
}

#[test]
fn memory_other_than_a_whole_giant_of_anonymous_ram_has_no_mechanism() {
    let vm = FakeVm::new(PATIENT);
    let no_mechanism = OutcomeResult::Skipped(Skip::NoMechanism);
    let site = SwapSite { host: &vm.host, ram: &vm.ram, second_level: vm.second_level.as_ref() };
    assert_eq!(vm.giants.promote(site, Gpa::new(0) + gib(2)).result, no_mechanism);
    let shared = map(BackingKind::Memfd);
    let site = SwapSite { host: &vm.host, ram: &shared, second_level: vm.second_level.as_ref() };
    assert_eq!(vm.giants.promote(site, GIANT).result, no_mechanism, "other processes may have it mapped");
}

// ---- threads that write, on the running kernel
// ------------------------------------------------------------------------------

/// Threads instead of vCPUs: they write under this lock and only while they are not paused.
struct Writers {
    ram: Arc<GuestRam>,
    state: Mutex<WriterState>,
    resumed: Condvar,
}

struct WriterState {
    pauses: u32,
    is_logged: bool,
    /// Pages that any thread ever wrote. The log always has all of them, since it may report too many.
    written: Vec<u64>,
}

impl Writers {
    fn new(ram: Arc<GuestRam>) -> Writers {
        let written = vec![0; (gib(1).pages(PageSize::Base4K) / 64) as usize];
        let state = WriterState { pauses: 0, is_logged: false, written };
        Writers { ram, state: Mutex::new(state), resumed: Condvar::new() }
    }

    /// Increments the word at `place`, which must be `expected`.
    fn count_up(&self, place: Gpa, expected: u64) {
        let mut state = self.state.lock();
        self.resumed.wait_while(&mut state, |state| state.pauses > 0);
        let page = (place - GIANT).pages(PAGE_SIZE);
        state.written[(page / 64) as usize] |= 1 << (page % 64);
        assert_eq!(word(&self.ram, place).fetch_add(1, Ordering::Relaxed), expected, "the word at {place}");
    }
}

impl SecondLevel for Writers {
    fn paging(&self) -> Paging {
        Paging::Shadow
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        Err(SecondLevelError::NoSuchStatistic("threads have none"))
    }

    fn slots(&self) -> Vec<Slot> {
        let range = GpaRange::new(GIANT, gib(1)).unwrap();
        vec![Slot { id: SlotId(0), range, is_dirty_logged: self.state.lock().is_logged }]
    }

    fn set_dirty_log(&self, _: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
        self.state.lock().is_logged = is_on;
        Ok(())
    }

    fn take_dirty_log(&self, _: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        Ok(self.state.lock().written.clone())
    }

    fn pause(&self) -> Result<(), SecondLevelError> {
        self.state.lock().pauses += 1;
        Ok(())
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        self.state.lock().pauses -= 1;
        self.resumed.notify_all();
        Ok(())
    }

    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        Ok(Vec::new())
    }
}

/// Number of pages that each thread counts in, spread over the giant.
const PAGES_PER_THREAD: u64 = 97;
const THREADS: u64 = 2;

fn place(thread: u64, step: u64) -> Gpa {
    GIANT + mib(10) * (step % PAGES_PER_THREAD) + PAGE * thread
}

/// Increments one page after the other until told to stop; asserts that every word has kept every count.
fn write_until(writers: &Writers, thread: u64, stop: &AtomicBool) {
    let mut step = 0;
    while !stop.load(Ordering::Relaxed) {
        writers.count_up(place(thread, step), step / PAGES_PER_THREAD);
        step += 1;
    }
}

/// Swaps there and back under writing threads; runs `act` once all of them have begun.
fn under_writers(act: impl FnOnce(&Writers)) {
    let writers = Writers::new(map(BackingKind::Anon));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (writers, stop) = (&writers, &stop);
            scope.spawn(move || write_until(writers, thread, stop));
        }
        act(&writers);
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn threads_that_write_lose_nothing_when_their_memory_is_swapped() {
    under_writers(|writers| {
        // The fake host really moves memory, with ordinary pages for giant ones: no pool is needed.
        let mut vm = FakeVm::new(PATIENT);
        vm.ram = Arc::clone(&writers.ram);
        let places = (0..THREADS).flat_map(|thread| (0..PAGES_PER_THREAD).map(move |step| place(thread, step)));
        places.for_each(|place| vm.host.make_present(vm.ram.hva(place).unwrap(), PAGE, false));
        for _ in 0..3 {
            let site = SwapSite { host: &vm.host, ram: &vm.ram, second_level: writers };
            assert_eq!(vm.giants.promote(site, GIANT).result, OutcomeResult::Done);
            assert_eq!(vm.giants.demote(site, GIANT, PageSize::Base4K).result, OutcomeResult::Done);
        }
    });
}

#[test]
fn writing_threads_lose_nothing_on_a_page_of_the_pool_and_the_pool_gets_it_back() {
    let _turn = turn_at_the_pools();
    let pools = HugetlbPools::of_this_machine();
    let Ok(before) = pools.status(PageSize::Giant1G) else {
        println!("skipped: no hugetlb pool of 1g pages in this kernel");
        return;
    };
    let skipped = |why: &dyn std::fmt::Display| {
        let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|word| word == "hugetlb1g"), "WIDELEAF_REQUIRE={required}, and {why}");
        println!("skipped: {why}");
    };
    if let Err(error) = pools.lease(PageSize::Giant1G, 1) {
        return skipped(&error);
    }
    let host = LinuxHost::open().unwrap();
    under_writers(|writers| {
        let giants = GiantPages::new(pools.clone(), true, PATIENT);
        let site = SwapSite { host: &host, ram: &writers.ram, second_level: writers };
        let promoted = giants.promote(site, GIANT);
        if promoted.result == OutcomeResult::Refused(Refusal::NoHugePage) {
            return skipped(&"something else took memory of the gibibyte that was free just now");
        }
        assert_eq!(promoted.result, OutcomeResult::Done, "{promoted:?}");
        assert!(writers.ram.claims().is_on_giant_page(WindowIndex::containing(GIANT)));
        let demoted = giants.demote(site, GIANT, PageSize::Huge2M);
        assert_eq!(demoted.result, OutcomeResult::Done, "{demoted:?}");
    });
    assert_eq!(pools.status(PageSize::Giant1G).unwrap(), before);
}
