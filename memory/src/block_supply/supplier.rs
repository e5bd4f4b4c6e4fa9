//! The steps of a supply: at each one, it makes one block or finds a reason not to.
//!
//! ```text
//!                        free < low
//!          ┌──────── rests ───────────▶ round: take ─ take ─ take ──┬─ held = high   ─┐
//!          │           ▲                                            ├─ no credit      ├─▶ gives all back
//!          ▼           │                                            ├─ pressure       │
//!   half a second, or a pause that doubles ◀────────────────────────┴─ refused ───────┘
//!   after each round that made nothing
//! ```

use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Moment, NodeSet};

use super::held_blocks::{Blocks, HELD_MAX};
use super::pressure::{LOOK_EVERY, PressureWatch, Reading, Stop};
use super::{SupplyDemand, SupplyReport, SupplyRules};
use crate::host::Host;
use crate::sensors::compactions::Compactions;
use crate::sensors::free_blocks::free_now;
use crate::sensors::share::{nanoseconds, part};

/// Pause after a round: the loops notice free blocks within half a second, and what they lack then is known here a
/// second later, where a daemon asks for all of them.
pub(super) const SETTLE: Duration = Duration::from_secs(2);

/// CPU time with which a round begins, at least. A round takes the free blocks first, so shorter ones would hold and
/// give back the same ones.
const ROUND_LEAST: Duration = Duration::from_millis(20);

/// Credit that a supply owes at its start, as if a request had been refused: with the default share, its first round
/// begins after ten seconds. Windows wait because the kernel has just refused a page, or is likely to, so that the next
/// compaction may fail as well. Of three that moved a guest's pages in `fragmented`, the shortest took 94 ms.
const OWED: Duration = Duration::from_millis(80);

/// First pause after rounds that made nothing. A compaction may find nothing because an earlier one has marked its
/// blocks as tried (`pageblock_skip`, mm/compaction.c); a later one clears the marks.
const FRUITLESS_FIRST: Duration = Duration::from_secs(1);

/// Longest pause after rounds that made nothing, as khugepaged's after a failure (`alloc_sleep_millisecs`,
/// Documentation/admin-guide/mm/transhuge.rst).
pub(super) const PAUSE_LONGEST: Duration = Duration::from_secs(60);

/// What a page that the kernel moves costs the guest that uses it: faults, and waits for them. Measured under shadow
/// paging, where a compaction of 30 839 pages took 241 ms from GUPS over base pages, and not yet with EPT or NPT.
const MOVED_PAGE: Duration = Duration::from_micros(8);

/// State of a supply; see the module.
pub(super) struct Supplier<B> {
    host: Arc<dyn Host>,
    blocks: B,
    credit: Credit,
    pressure: PressureWatch,
    /// Whether compaction made a block in the present round.
    has_made: bool,
    /// Pause after the next round that makes nothing.
    fruitless_pause: Duration,
    /// Time of the next step.
    next_at: Moment,
    stopped_by: Option<Stop>,
    report: SupplyReport,
}

/// What a step found to do.
enum Work {
    /// Enough is free, or none is wanted.
    Nothing,
    /// It has to wait, for a reason that is no pressure.
    Wait,
    Stop(Stop),
    /// A block is to be made, up to this number in the round.
    Take {
        goal: u64,
    },
}

impl<B: Blocks> Supplier<B> {
    pub fn new(host: Arc<dyn Host>, blocks: B) -> Supplier<B> {
        Supplier {
            credit: Credit::new(host.now()),
            next_at: host.now(),
            host,
            blocks,
            pressure: PressureWatch::new(),
            has_made: false,
            fruitless_pause: FRUITLESS_FIRST,
            stopped_by: None,
            report: SupplyReport::default(),
        }
    }

    pub fn report(&self) -> &SupplyReport {
        &self.report
    }

    /// Whether it holds blocks that a step has to give back.
    pub fn is_holding(&self) -> bool {
        self.blocks.held() > 0
    }

    /// Time until the next step.
    pub fn pause(&self) -> Duration {
        self.next_at.since(self.host.now())
    }

    /// Makes one block, or gives all back. [`Supplier::pause`] then says when the next step is due.
    pub fn step(&mut self, demand: SupplyDemand, rules: SupplyRules) {
        let cpu_before = self.host.thread_cpu_time();
        self.credit.earn(self.host.now(), &rules);
        let work = self.work(demand, &rules);
        self.note_stop(&work);
        match work {
            Work::Take { goal } => self.take(goal, &demand.nodes),
            Work::Nothing | Work::Wait | Work::Stop(_) => self.rest(LOOK_EVERY),
        }
        let cpu = self.host.thread_cpu_time().saturating_sub(cpu_before);
        self.credit.spend(cpu);
        self.report.cpu += cpu;
    }

    fn work(&mut self, demand: SupplyDemand, rules: &SupplyRules) -> Work {
        let goal = rules.high.min(demand.blocks(rules)).min(HELD_MAX);
        let is_begun = self.blocks.held() > 0;
        if rules.cpu.get() == 0 || goal == 0 || (!is_begun && demand.free >= rules.low.min(goal)) {
            return Work::Nothing;
        }
        if demand.is_host_short {
            return Work::Stop(Stop::HostShort);
        }
        match self.pressure.look(self.host.as_ref(), rules) {
            Reading::Pressure(stop) => Work::Stop(stop),
            Reading::Calm if self.credit.suffices(is_begun, rules) => Work::Take { goal },
            Reading::Calm | Reading::NotYet => Work::Wait,
        }
    }

    /// Counts a stop once, however long it lasts.
    fn note_stop(&mut self, work: &Work) {
        let stop = if let Work::Stop(stop) = work { Some(*stop) } else { None };
        if let Some(stop) = stop.filter(|_| stop != self.stopped_by) {
            *self.report.stopped.entry(stop.name()).or_default() += 1;
        }
        self.stopped_by = stop;
    }

    /// Takes one block, the first one of a round from these NUMA nodes, as all others of the round. It ends when there
    /// are enough, or the kernel has no more.
    fn take(&mut self, goal: u64, nodes: &NodeSet) {
        let (before, began) = (Compactions::read(self.host.as_ref()), self.host.now());
        if self.blocks.held() == 0 {
            self.blocks.take_from(nodes);
        }
        let taken = self.blocks.take();
        self.pressure.was_busy(self.host.now().since(began));
        let after = Compactions::read(self.host.as_ref());
        let moved = after.moved.saturating_sub(before.moved);
        self.report.moved_pages += moved;
        match taken {
            Ok(()) if after.made_one_since(&before) => {
                self.report.made += 1;
                self.has_made = true;
            }
            Ok(()) => self.report.found += 1,
            Err(error) => {
                tracing::debug!("no free block of 2 MiB could be made: {error}");
                self.report.refused += 1;
                // Nothing pays for these moves, so that they use up credit as CPU time does.
                self.credit.spend(MOVED_PAGE.saturating_mul(u32::try_from(moved).unwrap_or(u32::MAX)));
                return self.end_round();
            }
        }
        if self.blocks.held() >= goal {
            self.end_round();
        }
    }

    /// Gives all back. A round that made nothing is followed by a longer pause each time.
    fn end_round(&mut self) {
        let pause = if self.has_made { SETTLE } else { self.fruitless_pause };
        self.fruitless_pause = (self.fruitless_pause * 2).min(PAUSE_LONGEST);
        self.rest(pause);
    }

    /// Gives all back, and waits.
    fn rest(&mut self, pause: Duration) {
        let held = self.blocks.held();
        if held > 0 {
            let before = free_now(self.host.as_ref());
            self.blocks.give_back();
            let seen = free_now(self.host.as_ref()).saturating_sub(before);
            self.report.unseen += held.saturating_sub(seen);
        }
        if std::mem::take(&mut self.has_made) {
            self.fruitless_pause = FRUITLESS_FIRST;
        }
        self.next_at = self.host.now() + pause;
    }
}

/// CPU time that may still be used. A request takes as long as it takes, so it can be below zero.
#[derive(Clone, Copy, Debug)]
struct Credit {
    ns: i64,
    earned_at: Moment,
}

impl Credit {
    fn new(now: Moment) -> Credit {
        Credit { ns: -nanoseconds(OWED), earned_at: now }
    }

    fn earn(&mut self, now: Moment, rules: &SupplyRules) {
        let earned = nanoseconds(part(now.since(self.earned_at), rules.cpu));
        self.ns = self.ns.saturating_add(earned).min(nanoseconds(rules.cpu_burst));
        self.earned_at = now;
    }

    fn spend(&mut self, time: Duration) {
        self.ns = self.ns.saturating_sub(nanoseconds(time));
    }

    /// Whether it suffices for one more request of a round, or for the begin of one.
    fn suffices(&self, is_begun: bool, rules: &SupplyRules) -> bool {
        if is_begun { self.ns > 0 } else { self.ns >= nanoseconds(ROUND_LEAST.min(rules.cpu_burst)) }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use parking_lot::Mutex;

    use wideleaf_policies::{NodeId, PerTenThousand};

    use super::*;
    use crate::block_supply::pressure::{CPU, MEMORY};
    use crate::host::HostError;
    use crate::sensors::compactions::VMSTAT;
    use crate::sensors::free_blocks::BUDDYINFO;
    use crate::testing::fake_host::FakeHost;

    /// CPU time of a request on the fake host.
    const REQUEST: Duration = Duration::from_millis(2);

    /// Memory of a host: blocks that are free, and blocks that compaction can still make.
    #[derive(Debug, Default)]
    struct Memory {
        free: u64,
        possible: u64,
        compacted: u64,
        /// Number of pages that each refused request moves.
        moves_of_refused: u64,
        moved: u64,
        held: u64,
        /// Blocks that stay on the list of a CPU when they are given back.
        on_list: u64,
        /// Nodes of each round.
        nodes: Vec<NodeSet>,
    }

    /// Blocks of a fake host; clones share it.
    #[derive(Clone)]
    struct FakeBlocks(Arc<FakeHost>, Arc<Mutex<Memory>>);

    impl FakeBlocks {
        fn memory(&self) -> parking_lot::MutexGuard<'_, Memory> {
            self.1.lock()
        }

        fn tell(&self) {
            let (compacted, moved, counted) = {
                let memory = self.memory();
                (memory.compacted, memory.moved, memory.free.saturating_sub(memory.on_list))
            };
            self.0.set_text(BUDDYINFO, &format!("Node 0, zone Normal 9 9 9 9 9 9 9 9 9 {counted} 0\n"));
            let moved = 256 * compacted + moved;
            self.0.set_text(VMSTAT, &format!("compact_success {compacted}\npgmigrate_success {moved}\n"));
        }
    }

    impl Blocks for FakeBlocks {
        fn take(&mut self) -> Result<(), HostError> {
            self.0.sleep(REQUEST);
            let has_block = {
                let mut memory = self.memory();
                let has_block = memory.free + memory.possible > 0;
                match (memory.free, memory.possible) {
                    (1.., _) => memory.free -= 1,
                    (0, 1..) => (memory.possible, memory.compacted) = (memory.possible - 1, memory.compacted + 1),
                    (0, 0) => memory.moved += memory.moves_of_refused,
                }
                memory.held += u64::from(has_block);
                has_block
            };
            self.tell();
            let refusal = || HostError { what: "a collapse", source: io::Error::from_raw_os_error(libc::ENOMEM) };
            has_block.then_some(()).ok_or_else(refusal)
        }

        fn held(&self) -> u64 {
            self.memory().held
        }

        fn give_back(&mut self) {
            {
                let mut memory = self.memory();
                memory.free += std::mem::take(&mut memory.held);
            }
            self.tell();
        }

        fn take_from(&mut self, nodes: &NodeSet) {
            assert_eq!(self.held(), 0);
            self.memory().nodes.push(*nodes);
        }
    }

    /// A supply on a host that is calm and has saved up all credit.
    struct Bench {
        host: Arc<FakeHost>,
        blocks: FakeBlocks,
        supplier: Supplier<FakeBlocks>,
        rules: SupplyRules,
        keeps_reserve: bool,
    }

    impl Bench {
        fn new(free: u64, possible: u64) -> Bench {
            let host = Arc::<FakeHost>::default();
            let memory = Memory { free, possible, ..Memory::default() };
            let blocks = FakeBlocks(host.clone(), Arc::new(Mutex::new(memory)));
            blocks.tell();
            let (supplier, rules) = (Supplier::new(host.clone(), blocks.clone()), SupplyRules::default());
            let bench = Bench { host, blocks, supplier, rules, keeps_reserve: false };
            bench.wait_for(0, 0);
            bench.host.sleep(Duration::from_secs(100));
            bench
        }

        /// Sets the time in which other threads have waited so far.
        fn wait_for(&self, cpu_ms: u64, memory_ms: u64) {
            for (path, ms) in [(CPU, cpu_ms), (MEMORY, memory_ms)] {
                self.host.set_text(path, &format!("some avg10=0.00 total={}\n", ms * 1000));
            }
        }

        /// Runs this long while this number of windows waits. Their managers see all free blocks.
        fn run(&mut self, windows: u64, time: Duration) {
            let until = self.host.now() + time;
            while self.host.now() < until {
                let free = self.blocks.memory().free;
                let keeps_reserve = self.keeps_reserve;
                self.step(SupplyDemand { windows, free, keeps_reserve, ..SupplyDemand::default() }, until);
            }
        }

        /// Runs this long with an unchanged demand.
        fn run_with(&mut self, demand: SupplyDemand, time: Duration) {
            let until = self.host.now() + time;
            while self.host.now() < until {
                self.step(demand, until);
            }
        }

        /// Makes a step, if it is due before `until`, and waits for the next one.
        fn step(&mut self, demand: SupplyDemand, until: Moment) {
            if self.supplier.pause().is_zero() {
                self.supplier.step(demand, self.rules);
            }
            self.host.sleep(self.supplier.pause().min(until.since(self.host.now())));
        }

        fn report(&self) -> SupplyReport {
            self.supplier.report().clone()
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn blocks_are_made_up_to_the_high_mark_once_fewer_than_the_low_mark_are_free() {
        for (free, windows, made) in [(0, 99, 32), (7, 99, 25), (8, 99, 0), (0, 5, 5), (1, 2, 1), (2, 2, 0), (0, 0, 0)]
        {
            let mut bench = Bench::new(free, 1000);
            bench.run(windows, 10 * SECOND);
            assert_eq!((bench.report().made, bench.blocks.memory().free), (made, free + made), "{free} {windows}");
            assert_eq!(bench.report().moved_pages, 256 * made);
        }
    }

    #[test]
    fn a_new_supply_makes_nothing_for_ten_seconds() {
        let mut bench = Bench::new(0, 1000);
        bench.supplier = Supplier::new(bench.host.clone(), bench.blocks.clone());
        bench.run(99, 9 * SECOND);
        assert_eq!((bench.report().made, bench.report().refused), (0, 0));
        bench.run(99, 2 * SECOND);
        assert!(bench.report().made > 0);
    }

    #[test]
    fn a_reserve_is_filled_up_to_the_low_mark_while_fewer_windows_wait() {
        for (free, windows, made) in [(0, 0, 8), (5, 0, 3), (8, 0, 0), (1, 1, 7), (0, 20, 20)] {
            let mut bench = Bench::new(free, 1000);
            bench.keeps_reserve = true;
            bench.run(windows, 10 * SECOND);
            assert_eq!((bench.report().made, bench.blocks.memory().free), (made, free + made), "{free} {windows}");
        }
    }

    #[test]
    fn blocks_that_are_taken_are_replaced_within_the_share_of_a_core() {
        let mut bench = Bench::new(0, 100_000);
        for _ in 0..1000 {
            bench.run(99, SECOND);
            bench.blocks.memory().free = 0;
        }
        // A hundredth of 1100 s, of which at most the burst was saved up, in requests of 2 ms.
        let cpu = bench.report().cpu;
        assert!((10 * SECOND..11 * SECOND).contains(&cpu), "{cpu:?}");
        assert!(bench.report().made >= 5_000, "{:?}", bench.report());
    }

    #[test]
    fn a_kernel_that_has_no_block_is_asked_after_pauses_that_double_up_to_a_minute() {
        let mut bench = Bench::new(0, 0);
        bench.run(99, 3 * 60 * SECOND);
        // The first one, and those after 1, 2, 4, 8, 16, 32, 60 s more.
        assert_eq!(bench.report().refused, 8);
        bench.blocks.memory().possible = 1000;
        bench.run(99, 2 * 60 * SECOND);
        assert_eq!((bench.report().made, bench.blocks.memory().free), (32, 32));
        bench.blocks.memory().free = 0;
        bench.run(99, 3 * SECOND);
        assert_eq!(bench.report().made, 64, "and soon again after a success");
    }

    #[test]
    fn pages_that_refused_requests_moved_use_up_credit() {
        let refused_in_a_minute = |moves| {
            let mut bench = Bench::new(0, 0);
            bench.blocks.memory().moves_of_refused = moves;
            bench.run(99, 60 * SECOND);
            assert_eq!(bench.report().moved_pages, bench.report().refused * moves);
            bench.report().refused
        };
        // Without moves it is asked after pauses of 1, 2, 4, 8, 16 s. 60,000 pages cost 480 ms, nearly all that can be
        // saved up: the second request comes after 1 s, and the third once a hundredth of the time is worth both.
        assert_eq!([0, 60_000, 600_000].map(refused_in_a_minute), [6, 3, 1]);
    }

    #[test]
    fn blocks_that_were_found_free_are_no_success() {
        // The windows cannot get them, for instance as they are of another node.
        let mut bench = Bench::new(1000, 0);
        for _ in 0..3 * 60 {
            bench.run_with(SupplyDemand { windows: 99, ..SupplyDemand::default() }, SECOND);
        }
        assert_eq!((bench.report().made, bench.report().found), (0, 8 * 32));
    }

    #[test]
    fn blocks_that_stay_on_the_list_of_a_cpu_are_counted_as_unseen() {
        for on_list in [0, 5, 32] {
            let mut bench = Bench::new(0, 1000);
            bench.blocks.memory().on_list = on_list;
            bench.run(99, SECOND);
            assert_eq!((bench.report().made, bench.report().unseen), (32, on_list));
        }
    }

    #[test]
    fn pressure_stops_it_at_once_and_counts_once_by_reason() {
        let mut bench = Bench::new(0, 1000);
        bench.rules.high = 200;
        bench.run(200, SECOND / 2 + REQUEST * 3);
        assert!(bench.blocks.held() > 0, "a round is under way");
        bench.host.sleep(SECOND / 2);
        bench.wait_for(900, 0);
        bench.run(200, REQUEST);
        assert_eq!(bench.blocks.held(), 0, "what it held is free");
        for look in 1..=5 {
            bench.wait_for(900 + look * 900, 0);
            bench.run(200, SECOND / 2);
        }
        bench.wait_for(5_400, 400);
        bench.run(200, SECOND / 2);
        let demand = SupplyDemand { windows: 200, is_host_short: true, ..SupplyDemand::default() };
        (0..3).for_each(|_| bench.supplier.step(demand, bench.rules));
        let stopped = bench.report().stopped;
        assert_eq!(stopped.keys().copied().collect::<Vec<_>>(), ["cpu_pressure", "host_short", "memory_pressure"]);
        assert_eq!(stopped["cpu_pressure"], 1, "{stopped:?}");
    }

    #[test]
    fn a_round_keeps_to_the_nodes_that_were_wanted_at_its_begin() {
        let mut bench = Bench::new(0, 1000);
        let [here, there] = [0, 1].map(|node| NodeSet::of(NodeId(node)));
        let on = |nodes| SupplyDemand { windows: 99, nodes, ..SupplyDemand::default() };
        bench.run_with(on(here), SECOND / 2 + REQUEST * 3);
        assert!(bench.blocks.held() > 0, "a round is under way");
        while bench.blocks.held() > 0 {
            bench.supplier.step(on(there), bench.rules);
        }
        assert_eq!(bench.blocks.memory().nodes, [here]);
        bench.run_with(on(there), 3 * SECOND);
        assert_eq!(bench.blocks.memory().nodes, [here, there]);
    }

    #[test]
    fn a_share_of_zero_makes_nothing() {
        let mut bench = Bench::new(0, 1000);
        bench.rules.cpu = PerTenThousand::new(0);
        bench.run(99, 100 * SECOND);
        assert_eq!((bench.report().made, bench.report().refused), (0, 0));
    }

    #[test]
    fn nothing_is_held_once_no_window_waits() {
        let mut bench = Bench::new(0, 1000);
        bench.rules.high = 200;
        bench.run(200, SECOND / 2 + REQUEST * 3);
        assert!(bench.supplier.is_holding());
        bench.run(0, REQUEST);
        assert!(!bench.supplier.is_holding());
    }
}
