//! Decides whether to ask the kernel for another huge page, on a host that has none. A failed request is expensive:
//! the kernel compacts its memory, which takes 20 to 40 ms of CPU (`experiment run fragmented`, a host of 24 GiB),
//! and may move pages of guests, which wait for them.
//!
//! ```text
//!            no huge page available,
//!            or memory free only in pieces
//!   Plenty ───────────────────────▶ Scarce   asked for as many windows as blocks of 2 MiB have become free since,
//!     ▲                               │      and once in a while for one all the same: after 500 times what
//!     └─── 32 in a row had a page: ───┘      the request took, twice that, … a minute. One that had its page is
//!          compaction makes them             followed by one at the next tick, then two, four, …
//!          or 32 blocks are free for a minute, and no window waits
//! ```
//!
//! While the state is scarce, windows count as waiting, so the supply of free blocks
//! ([`block_supply`](crate::block_supply)) goes on. After one success it would rest, and all loops would compact for
//! themselves until the next refusal.
//!
//! Memory that is free only in pieces is what kcompactd keeps compacting (`vm.compaction_proactiveness`): if it has
//! left no block, a request is likely to fail as well, so the first one waits as if one had been refused. With little
//! free memory at all, the kernel takes back file pages first, and the request is made at once. So it is where half of
//! the host's compactions since boot have made their block, and once some for this manager have.
//!
//! Each NUMA node that a plan names has a state of its own: a node without huge pages does not stop promotions on
//! another one. Requests that name no node share one state, which counts the free blocks of all nodes.
//!
//! While windows wait for huge pages, each pulse of the loop counts the free blocks, and a new one is a reason for a
//! tick at once. Ticks of the manager of an external guest are up to 10 s apart while nothing is done, and khugepaged
//! would be as fast.
//!
//! khugepaged waits too, a minute after each failure (`alloc_sleep_millisecs`,
//! Documentation/admin-guide/mm/transhuge.rst). The cost of a request depends on the kernel: after a compaction
//! without success, it refuses at once for a while (mm/compaction.c, `defer_compaction`).

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{Bytes, HugePages, Moment, NodeId, NodeSet, OutcomeResult, Refusal};

use crate::host::Host;
use crate::sensors::compactions::Compactions;
use crate::sensors::free_blocks::{FreeMemory, free_now, free_now_on};
use crate::sensors::host_memory::host_memory;

/// Wait after the first refusal, as a multiple of its CPU time: failed requests use at most 0.2 % of a core. Each
/// further one doubles it.
const PAUSE_TIMES: u32 = 500;
const PAUSE_SHORTEST: Duration = Duration::from_secs(1);
const PAUSE_LONGEST: Duration = Duration::from_secs(60);

/// Wait before a first request on memory that is free only in pieces: that after a refusal of 20 ms.
const PAUSE_IN_PIECES: Duration = Duration::from_secs(10);

/// Memory that is free, as a part of all of it, from which a lack of free blocks means that it is in pieces: one in so
/// many. The kernel's high watermark, up to which it frees memory by itself, is below a hundredth by default.
const FREE_PART: u64 = 20;

/// Number of attempts without a free block that have to succeed in a row before all requests are allowed again, and of
/// free blocks that count as plenty.
const PLENTY_AFTER: u64 = 32;

/// Time for which that number of blocks has to be free. If that was too early, the next request is refused.
const PLENTY_FOR: Duration = Duration::from_secs(60);

/// Longest pulse while a window waits for a huge page. Counting the free blocks takes some 30 us.
pub(super) const SHORTAGE_PULSE: Duration = Duration::from_millis(500);

/// State of the host's huge pages, shared by the threads that copy.
#[derive(Debug, Default)]
pub(super) struct HugePageBackoff(Mutex<States>);

/// At most one of either kind for each node, and for requests without a node.
#[derive(Debug, Default)]
struct States {
    /// Nodes that had no huge page.
    scarce: Vec<Scarce>,
    /// The others, as far as they were asked at this tick.
    plenty: Vec<Plenty>,
    /// Those of the others where compaction has made [`PLENTY_AFTER`] pages in a row.
    compacted: Vec<Option<NodeId>>,
}

/// State of a node, or a host, that has refused no huge page.
#[derive(Clone, Copy, Debug)]
struct Plenty {
    node: Option<NodeId>,
    /// Number of requests until the free blocks are counted again.
    left: u64,
}

/// State of a node, or a host, that had no huge page, or is likely to have none.
#[derive(Clone, Copy, Debug)]
struct Scarce {
    /// NUMA node of the requests; `None`: the plan names none.
    node: Option<NodeId>,
    /// Time between two attempts.
    pause: Duration,
    /// Moment of the next attempt without a free block.
    next_attempt: Moment,
    /// Number of such attempts that had their page since the latest refusal.
    made: u64,
    /// Number of them that may be tried at once at this tick: as many as had their page.
    attempts: u64,
    /// Huge pages in free blocks that the kernel did not hand out: its reserves, or those of another node.
    kept: u64,
    /// Number of pages that may still be requested at this tick; `None` before the first request.
    left: Option<u64>,
    /// Number of requests that were not allowed at the latest tick.
    waiting: u64,
    /// Number of free pages that are in no counted block, and have not been requested yet.
    promised: u64,
    /// Moment since which each tick found plenty of free blocks and no waiting window.
    plenty_since: Option<Moment>,
}

/// Reason why the kernel may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grounds {
    /// No refusal so far, or none since compaction made the pages.
    Plenty,
    /// At least one block is free.
    FreeBlock,
    /// The wait is over.
    Attempt,
}

impl HugePageBackoff {
    /// Lets the next request count the free blocks again, and forgets a shortage that is over.
    pub fn begin_tick(&self, host: &dyn Host) {
        let States { scarce, plenty, .. } = &mut *self.lock();
        plenty.clear();
        scarce.retain_mut(|scarce| !scarce.is_over(host));
        for scarce in scarce {
            (scarce.left, scarce.waiting, scarce.attempts) = (None, 0, scarce.made);
        }
    }

    /// Whether a window was not promoted at the latest tick, for want of a huge page.
    pub fn is_waited_for(&self) -> bool {
        self.waiting() > 0
    }

    /// Number of windows that were not promoted at the latest tick, for want of a huge page.
    pub fn waiting(&self) -> u64 {
        self.lock().scarce.iter().map(|scarce| scarce.waiting).sum()
    }

    /// NUMA nodes of these windows; empty if some of them may be on any node.
    pub fn nodes_waited_for(&self) -> NodeSet {
        let states = self.lock();
        let waiting = states.scarce.iter().filter(|scarce| scarce.waiting > 0);
        waiting.map(|scarce| scarce.node).collect::<Option<NodeSet>>().unwrap_or_default()
    }

    /// Notes free pages that `/proc/buddyinfo` does not count: on the lists of the CPUs. Their node is not known: they
    /// are tried where most windows wait.
    pub fn promise(&self, pages: u64) {
        if let Some(scarce) = self.lock().scarce.iter_mut().max_by_key(|scarce| scarce.waiting) {
            scarce.promised = scarce.promised.saturating_add(pages);
        }
    }

    /// Whether a window waits for a huge page and a block has become free since.
    pub fn has_new_block(&self, host: &dyn Host) -> bool {
        self.lock().scarce.iter_mut().any(|scarce| scarce.waiting > 0 && scarce.new_blocks(host) > 0)
    }

    /// The host's supply of huge pages, as the requests of this manager found it: with the free blocks of nodes that
    /// had their pages.
    pub fn supply(&self, host: &dyn Host) -> HugePages {
        match self.shortage(host) {
            HugePages::Scarce { free } => {
                let states = &self.lock().scarce;
                let is_of_all = states.iter().any(|scarce| scarce.node.is_none());
                let of_short = || states.iter().map(|scarce| free_now_on(host, scarce.node)).sum::<u64>();
                let of_other_nodes = if is_of_all { 0 } else { free_now(host).saturating_sub(of_short()) };
                HugePages::Scarce { free: free.saturating_add(of_other_nodes) }
            }
            plenty => plenty,
        }
    }

    /// The supply of the nodes that had no huge page, or of the host if the plans name no node.
    pub fn shortage(&self, host: &dyn Host) -> HugePages {
        let states = &mut self.lock().scarce;
        if states.is_empty() {
            return HugePages::Plenty;
        }
        let free = |scarce: &mut Scarce| scarce.new_blocks(host).saturating_add(scarce.promised);
        HugePages::Scarce { free: states.iter_mut().map(free).fold(0, u64::saturating_add) }
    }

    /// Whether the manager may ask the kernel for one huge page, of that node if the plan names one.
    pub fn may_ask(&self, host: &dyn Host, node: Option<NodeId>) -> Option<Grounds> {
        let States { scarce, plenty, compacted } = &mut *self.lock();
        if let Some(scarce) = scarce.iter_mut().find(|scarce| scarce.node == node) {
            return scarce.may_ask(host);
        }
        if let Some(plenty) = plenty.iter_mut().find(|plenty| plenty.node == node && plenty.left > 0) {
            plenty.left -= 1;
            return Some(Grounds::Plenty);
        }
        let free = FreeMemory::on(host, node);
        if !compacted.contains(&node) && is_in_pieces(host, free) {
            scarce.push(Scarce::new(host, node, PAUSE_IN_PIECES));
            return None;
        }
        plenty.retain(|plenty| plenty.node != node);
        let left = if free.nodes == 0 { u64::MAX } else { free.huge_pages.saturating_sub(1) };
        plenty.push(Plenty { node, left });
        Some(Grounds::Plenty)
    }

    /// Learns the result of a request and its CPU time.
    pub fn learn(&self, host: &dyn Host, node: Option<NodeId>, grounds: Grounds, result: OutcomeResult, cpu: Duration) {
        let States { scarce: states, compacted, .. } = &mut *self.lock();
        let place = states.iter().position(|scarce| scarce.node == node);
        let state = place.map(|place| states[place]);
        match (result, grounds) {
            (OutcomeResult::Refused(Refusal::NoHugePage), _) => {
                // Several threads may have asked before the first refusal: theirs count as one refusal.
                let waiting = state.map_or(0, |scarce| scarce.waiting) + 1;
                let before = state.filter(|_| grounds != Grounds::Plenty).map_or(Duration::ZERO, |scarce| scarce.pause);
                let pause = (before * 2).max(cpu.saturating_mul(PAUSE_TIMES)).clamp(PAUSE_SHORTEST, PAUSE_LONGEST);
                compacted.retain(|compacted| *compacted != node);
                states.retain(|scarce| scarce.node != node);
                states.push(Scarce { waiting, ..Scarce::new(host, node, pause) });
            }
            (OutcomeResult::Done, Grounds::Attempt) => {
                states.iter_mut().filter(|scarce| scarce.node == node).for_each(|scarce| scarce.made += 1);
                let before = states.len();
                states.retain(|scarce| scarce.node != node || scarce.made < PLENTY_AFTER);
                compacted.extend((states.len() < before).then_some(node));
            }
            _ => {}
        }
    }

    /// Takes back a permission that was not used: another window may ask the kernel.
    pub fn return_unused(&self, host: &dyn Host, node: Option<NodeId>, grounds: Grounds) {
        for scarce in self.lock().scarce.iter_mut().filter(|scarce| scarce.node == node) {
            match grounds {
                Grounds::Plenty => {}
                Grounds::FreeBlock => scarce.left = scarce.left.map(|left| left + 1),
                Grounds::Attempt => scarce.next_attempt = host.now(),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, States> {
        // Replaced as a whole, or in one field that a tick resets.
        self.0.lock()
    }
}

/// Whether there is no block in a lot of free memory, and the host's compactions so far have mostly failed. False where
/// the kernel does not say how much is free.
fn is_in_pieces(host: &dyn Host, free: FreeMemory) -> bool {
    let is_a_lot = |total: Bytes| free.bytes.get() >= total.get() / FREE_PART.saturating_mul(free.nodes);
    free.huge_pages == 0
        && free.nodes > 0
        && host_memory(host).is_ok_and(|memory| is_a_lot(memory.total))
        && !Compactions::read(host).mostly_succeed()
}

impl Scarce {
    /// That of a node which has just refused a page, or is likely to: the window that asks waits.
    fn new(host: &dyn Host, node: Option<NodeId>, pause: Duration) -> Scarce {
        Scarce {
            node,
            pause,
            next_attempt: host.now() + pause,
            made: 0,
            attempts: 0,
            kept: free_now_on(host, node),
            left: Some(0),
            waiting: 1,
            promised: 0,
            plenty_since: None,
        }
    }

    /// Number of blocks that have become free since the last refusal.
    fn new_blocks(&mut self, host: &dyn Host) -> u64 {
        let free = free_now_on(host, self.node);
        self.kept = self.kept.min(free);
        free - self.kept
    }

    /// Whether no window has waited for [`PLENTY_FOR`], with plenty of free blocks at each tick.
    fn is_over(&mut self, host: &dyn Host) -> bool {
        let is_plenty = self.waiting == 0 && self.new_blocks(host) >= PLENTY_AFTER;
        self.plenty_since = self.plenty_since.or(Some(host.now())).filter(|_| is_plenty);
        self.plenty_since.is_some_and(|since| host.now().since(since) >= PLENTY_FOR)
    }

    fn may_ask(&mut self, host: &dyn Host) -> Option<Grounds> {
        let left = match self.left {
            Some(left) => left,
            None => self.new_blocks(host),
        };
        self.left = Some(left);
        if left > 0 {
            self.left = Some(left - 1);
            return Some(Grounds::FreeBlock);
        }
        if self.promised > 0 {
            self.promised -= 1;
            return Some(Grounds::FreeBlock);
        }
        if self.attempts > 0 {
            self.attempts -= 1;
            return Some(Grounds::Attempt);
        }
        let now = host.now();
        let is_due = now >= self.next_attempt;
        if is_due {
            // The next attempt waits, whatever the result of this one is.
            self.next_attempt = now + self.pause;
        }
        self.waiting += u64::from(!is_due);
        is_due.then_some(Grounds::Attempt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sensors::compactions::VMSTAT;
    use crate::sensors::free_blocks::BUDDYINFO;
    use crate::testing::fake_host::FakeHost;

    const NO: OutcomeResult = OutcomeResult::Refused(Refusal::NoHugePage);

    const SECOND: Duration = Duration::from_secs(1);

    /// CPU time so short that the wait is the shortest.
    const CHEAP: Duration = Duration::from_millis(1);

    fn set_free(host: &FakeHost, huge_pages: u64) {
        host.set_text(BUDDYINFO, &format!("Node 0, zone Normal 9 9 9 9 9 9 9 9 9 {huge_pages} 0\n"));
    }

    /// A host that has just refused a huge page, with `kept` pages in free blocks that it does not hand out.
    fn scarce(kept: u64) -> (FakeHost, HugePageBackoff) {
        let (host, backoff) = (FakeHost::default(), HugePageBackoff::default());
        set_free(&host, kept);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Plenty));
        backoff.learn(&host, None, Grounds::Plenty, NO, CHEAP);
        (host, backoff)
    }

    #[test]
    fn an_unused_permission_is_there_for_another_window() {
        let (host, backoff) = scarce(0);
        host.sleep(PAUSE_LONGEST);
        for _ in 0..3 {
            assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Attempt));
            backoff.return_unused(&host, None, Grounds::Attempt);
        }
        set_free(&host, 1);
        backoff.begin_tick(&host);
        for _ in 0..3 {
            assert_eq!(backoff.may_ask(&host, None), Some(Grounds::FreeBlock));
            backoff.return_unused(&host, None, Grounds::FreeBlock);
        }
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::FreeBlock));
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Attempt), "one block, one permission");
        assert_eq!(backoff.may_ask(&host, None), None);
    }

    #[test]
    fn windows_wait_for_the_nodes_that_their_requests_named() {
        let (host, backoff) = (FakeHost::default(), HugePageBackoff::default());
        set_free(&host, 0);
        let nodes_after = |node: Option<u16>| {
            backoff.learn(&host, node.map(NodeId), Grounds::Plenty, NO, CHEAP);
            backoff.nodes_waited_for().to_string()
        };
        assert_eq!(backoff.nodes_waited_for(), NodeSet::EMPTY);
        assert_eq!([Some(1), Some(3), Some(3), None].map(nodes_after), ["1", "1,3", "1,3", ""]);
        backoff.begin_tick(&host);
        assert_eq!(backoff.nodes_waited_for(), NodeSet::EMPTY, "none waits any more");
    }

    #[test]
    fn every_request_is_allowed_before_a_refusal_for_want_of_a_page() {
        let (host, backoff) = (FakeHost::default(), HugePageBackoff::default());
        set_free(&host, 2);
        for result in [OutcomeResult::Done, OutcomeResult::Refused(Refusal::Busy)] {
            assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Plenty));
            backoff.learn(&host, None, Grounds::Plenty, result, CHEAP);
        }
        set_free(&host, 0);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Plenty), "little memory is free at all");
    }

    /// With free memory of 18 MiB in pieces, apart from these huge pages.
    fn with_memory(mib: u64, huge_pages: u64) -> (FakeHost, HugePageBackoff) {
        let (host, backoff) = (FakeHost::default(), HugePageBackoff::default());
        set_free(&host, huge_pages);
        host.set_text("/proc/meminfo", &format!("MemTotal: {} kB\nMemAvailable: 1 kB\n", mib << 10));
        (host, backoff)
    }

    #[test]
    fn a_first_request_on_much_memory_in_pieces_waits_as_after_a_refusal() {
        for (mib, waits) in [(300, true), (400, false)] {
            let (host, backoff) = with_memory(mib, 0);
            assert_eq!(backoff.may_ask(&host, None).is_none(), waits, "{mib} MiB");
            assert_eq!(backoff.is_waited_for(), waits);
        }
        let (host, backoff) = with_memory(300, 0);
        host.set_text(VMSTAT, "compact_stall 100\ncompact_success 90\n");
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Plenty), "compactions of this host succeed");
        host.set_text(VMSTAT, "compact_stall 100\ncompact_success 9\n");
        assert_eq!(backoff.may_ask(&host, None), None);
        host.sleep(PAUSE_IN_PIECES);
        backoff.begin_tick(&host);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Attempt));
        backoff.learn(&host, None, Grounds::Attempt, NO, CHEAP);
        host.sleep(PAUSE_IN_PIECES * 2 - SECOND);
        assert_eq!(backoff.may_ask(&host, None), None, "a refusal doubles the wait");
        set_free(&host, 1);
        backoff.begin_tick(&host);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::FreeBlock));
    }

    #[test]
    fn free_blocks_of_memory_in_pieces_are_requested_first_and_counted_once() {
        let (host, backoff) = with_memory(300, 2);
        let asked = || [(); 2].map(|()| backoff.may_ask(&host, None));
        assert_eq!(asked(), [Some(Grounds::Plenty); 2]);
        assert_eq!(host.calls(), 1);
        set_free(&host, 0);
        assert_eq!(asked(), [None; 2]);
        assert_eq!(backoff.supply(&host), free(0));
    }

    #[test]
    fn after_a_refusal_there_are_as_many_requests_as_newly_free_blocks() {
        let (host, backoff) = scarce(3);
        assert_eq!(backoff.may_ask(&host, None), None);
        set_free(&host, 5);
        assert_eq!(backoff.may_ask(&host, None), None, "counted once a tick");
        backoff.begin_tick(&host);
        assert_eq!(
            [(); 3].map(|()| backoff.may_ask(&host, None)),
            [Some(Grounds::FreeBlock), Some(Grounds::FreeBlock), None]
        );
        // The kernel gave those, and one that it had kept: now it has fewer to keep.
        set_free(&host, 2);
        backoff.learn(&host, None, Grounds::FreeBlock, OutcomeResult::Done, CHEAP);
        backoff.begin_tick(&host);
        assert_eq!(backoff.may_ask(&host, None), None);
        set_free(&host, 3);
        backoff.begin_tick(&host);
        assert_eq!([(); 2].map(|()| backoff.may_ask(&host, None)), [Some(Grounds::FreeBlock), None]);
    }

    #[test]
    fn policies_see_the_blocks_that_the_kernel_has_not_kept_to_itself() {
        let (host, backoff) = (FakeHost::default(), HugePageBackoff::default());
        assert_eq!((backoff.supply(&host), host.calls()), (HugePages::Plenty, 0), "nothing is looked at");
        let (host, backoff) = scarce(3);
        let supplies = [3, 5, 2, 4].map(|free| {
            set_free(&host, free);
            backoff.supply(&host)
        });
        assert_eq!(supplies, [0, 2, 0, 2].map(|free| HugePages::Scarce { free }));
    }

    #[test]
    fn a_new_block_is_noticed_while_a_window_waits_for_one() {
        let (host, backoff) = scarce(3);
        backoff.begin_tick(&host);
        assert!(!backoff.is_waited_for(), "no window was planned");
        set_free(&host, 4);
        assert!(!backoff.has_new_block(&host));
        set_free(&host, 3);
        assert_eq!(backoff.may_ask(&host, None), None);
        assert!(backoff.is_waited_for() && !backoff.has_new_block(&host));
        set_free(&host, 2);
        assert!(!backoff.has_new_block(&host), "another program took one");
        set_free(&host, 3);
        assert!(backoff.has_new_block(&host), "and gave it back");
        backoff.begin_tick(&host);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::FreeBlock));
        backoff.learn(&host, None, Grounds::FreeBlock, NO, CHEAP);
        assert!(backoff.is_waited_for() && !backoff.has_new_block(&host), "the kernel keeps it");
    }

    #[test]
    fn promised_pages_are_requested_once_and_a_refusal_ends_the_promise() {
        let (host, backoff) = (FakeHost::default(), HugePageBackoff::default());
        backoff.promise(5);
        assert_eq!(backoff.supply(&host), HugePages::Plenty, "no page was refused, so none is counted");
        let (host, backoff) = scarce(3);
        backoff.promise(2);
        assert_eq!(backoff.supply(&host), HugePages::Scarce { free: 2 });
        let may_ask = || [(); 3].map(|()| backoff.may_ask(&host, None).is_some());
        assert_eq!(may_ask(), [true, true, false]);
        backoff.promise(9);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::FreeBlock));
        backoff.learn(&host, None, Grounds::FreeBlock, NO, CHEAP);
        assert_eq!(may_ask(), [false; 3]);
    }

    #[test]
    fn free_blocks_that_the_kernel_keeps_are_not_requested_again() {
        let (host, backoff) = scarce(0);
        set_free(&host, 7);
        backoff.begin_tick(&host);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::FreeBlock));
        backoff.learn(&host, None, Grounds::FreeBlock, NO, CHEAP);
        for _ in 0..3 {
            assert_eq!(backoff.may_ask(&host, None), None);
            backoff.begin_tick(&host);
        }
    }

    #[test]
    fn attempts_without_a_free_block_come_at_growing_intervals() {
        let (host, backoff) = scarce(0);
        let mut asked_at = Vec::new();
        for second in 0..200 {
            if let Some(grounds) = backoff.may_ask(&host, None) {
                assert_eq!((grounds, backoff.may_ask(&host, None)), (Grounds::Attempt, None), "one at a time");
                backoff.learn(&host, None, grounds, NO, CHEAP);
                asked_at.push(second);
            }
            backoff.begin_tick(&host);
            host.sleep(Duration::from_secs(1));
        }
        assert_eq!(asked_at, [1, 3, 7, 15, 31, 63, 123, 183]);
    }

    #[test]
    fn an_expensive_refusal_means_a_longer_wait_up_to_a_minute() {
        for (cpu_ms, second_attempt) in [(20, 10), (40, 20), (1000, 60)] {
            let (host, backoff) = (FakeHost::default(), HugePageBackoff::default());
            backoff.learn(&host, None, Grounds::Plenty, NO, Duration::from_millis(cpu_ms));
            host.sleep(Duration::from_millis(second_attempt * 1000 - 1));
            assert_eq!(backoff.may_ask(&host, None), None, "{cpu_ms} ms");
            host.sleep(Duration::from_millis(1));
            assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Attempt), "{cpu_ms} ms");
        }
    }

    #[test]
    fn an_attempt_that_was_not_made_waits_and_counts_as_no_refusal() {
        let (host, backoff) = scarce(0);
        host.sleep(PAUSE_SHORTEST);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Attempt));
        backoff.learn(&host, None, Grounds::Attempt, OutcomeResult::Refused(Refusal::Busy), CHEAP);
        assert_eq!(backoff.may_ask(&host, None), None);
        host.sleep(PAUSE_SHORTEST);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Attempt));
    }

    /// Number of requests of each tick that are allowed, at most 100. `result`: that of the n-th of all.
    fn allowed(host: &FakeHost, backoff: &HugePageBackoff, result: impl Fn(u64) -> OutcomeResult) -> [u64; 8] {
        let mut all = 0;
        [(); 8].map(|()| {
            let before = all;
            backoff.begin_tick(host);
            while let Some(grounds) = backoff.may_ask(host, None).filter(|_| all < before + 100) {
                backoff.learn(host, None, grounds, result(all), CHEAP);
                all += 1;
            }
            all - before
        })
    }

    #[test]
    fn requests_are_allowed_by_and_by_once_compaction_makes_pages_again() {
        let (host, backoff) = scarce(0);
        host.sleep(PAUSE_SHORTEST);
        assert_eq!(allowed(&host, &backoff, |_| OutcomeResult::Done), [1, 1, 2, 4, 8, 100, 100, 100]);
        assert_eq!(backoff.supply(&host), HugePages::Plenty);
    }

    #[test]
    fn once_compaction_makes_pages_of_memory_in_pieces_no_request_waits_until_one_is_refused() {
        let (host, backoff) = with_memory(300, 0);
        assert_eq!(backoff.may_ask(&host, None), None);
        host.sleep(PAUSE_IN_PIECES);
        assert_eq!(allowed(&host, &backoff, |_| OutcomeResult::Done), [1, 1, 2, 4, 8, 100, 100, 100]);
        assert_eq!(allowed(&host, &backoff, |number| if number == 1 { NO } else { OutcomeResult::Done })[0], 2);
        assert_eq!(allowed(&host, &backoff, |_| NO), [0; 8]);
    }

    #[test]
    fn windows_wait_while_compaction_has_not_made_many_pages_in_a_row() {
        let (host, backoff) = scarce(0);
        host.sleep(PAUSE_SHORTEST);
        // The ninth is refused.
        let results = |number| if number == 8 { NO } else { OutcomeResult::Done };
        assert_eq!(allowed(&host, &backoff, results), [1, 1, 2, 4, 1, 0, 0, 0]);
        assert!(backoff.is_waited_for());
        assert_eq!(backoff.supply(&host), HugePages::Scarce { free: 0 });
    }

    /// Ticks `seconds` times, a second apart. At each, this number of windows is promoted.
    fn tick(host: &FakeHost, backoff: &HugePageBackoff, seconds: u32, windows: u64) {
        for _ in 0..seconds {
            backoff.begin_tick(host);
            for _ in 0..windows {
                let grounds = backoff.may_ask(host, None).expect("a block is free");
                backoff.learn(host, None, grounds, OutcomeResult::Done, CHEAP);
            }
            host.sleep(Duration::from_secs(1));
        }
    }

    #[test]
    fn the_shortage_is_over_once_many_blocks_were_free_for_a_minute() {
        for windows in [0, 5] {
            let (host, backoff) = scarce(3);
            set_free(&host, 35);
            tick(&host, &backoff, 61, windows); // at the first, the window that was refused waits
            assert_eq!(backoff.supply(&host), free(32), "{windows}");
            tick(&host, &backoff, 1, windows);
            assert_eq!(backoff.supply(&host), HugePages::Plenty, "{windows}");
        }
    }

    #[test]
    fn the_minute_begins_again_after_a_tick_with_few_free_blocks_or_a_waiting_window() {
        let (host, backoff) = scarce(3);
        set_free(&host, 35);
        tick(&host, &backoff, 40, 0);
        set_free(&host, 34);
        tick(&host, &backoff, 1, 0);
        set_free(&host, 35);
        tick(&host, &backoff, 40, 32);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Attempt), "its wait is over; all blocks are taken");
        assert_eq!(backoff.may_ask(&host, None), None, "one more waits");
        tick(&host, &backoff, 60, 0);
        assert_eq!(backoff.supply(&host), free(32));
    }

    #[test]
    fn threads_that_were_refused_together_wait_as_for_one() {
        let (host, backoff) = scarce(0);
        (0..8).for_each(|_| backoff.learn(&host, None, Grounds::Plenty, NO, CHEAP));
        host.sleep(PAUSE_SHORTEST);
        assert_eq!(backoff.may_ask(&host, None), Some(Grounds::Attempt));
    }

    #[test]
    fn a_node_without_huge_pages_does_not_stop_another() {
        let (host, backoff) = (FakeHost::default(), HugePageBackoff::default());
        let set = |first: u64, second: u64| {
            let zone = |node, pages| format!("Node {node}, zone Normal 9 9 9 9 9 9 9 9 9 {pages} 0\n");
            host.set_text(BUDDYINFO, &(zone(0, first) + &zone(1, second)));
        };
        let [first, second] = [Some(NodeId(0)), Some(NodeId(1))];
        set(40, 2);
        backoff.learn(&host, second, Grounds::Plenty, NO, CHEAP);
        assert_eq!((backoff.may_ask(&host, first), backoff.may_ask(&host, second)), (Some(Grounds::Plenty), None));
        // Policies may plan with the blocks of the first node; a supply of blocks is wanted for the second.
        assert_eq!((backoff.supply(&host), backoff.shortage(&host)), (free(40), free(0)));
        set(60, 2);
        assert!(!backoff.has_new_block(&host), "a block of the other node is no reason to ask again");
        set(60, 3);
        assert!(backoff.has_new_block(&host));
        backoff.begin_tick(&host);
        assert_eq!(backoff.may_ask(&host, second), Some(Grounds::FreeBlock));
        backoff.learn(&host, first, Grounds::Plenty, NO, CHEAP);
        assert_eq!((backoff.supply(&host), backoff.shortage(&host)), (free(1), free(1)), "now both are short");
    }

    fn free(free: u64) -> HugePages {
        HugePages::Scarce { free }
    }
}
