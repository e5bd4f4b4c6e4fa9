//! Moves giants for the loop, one at a time over all VMs. A move has a thread of its own: copying a gibibyte takes
//! a third of a second, and the loop has other windows to manage.
//!
//! ```text
//!   loop     tick ── start ─────── tick ── tick ────────── tick: ended? ── record, learn, settle with the budget
//!                    │ claim                                  │
//!   thread           └─▶ [ copy, rounds, pause, exchange ] ───┘ claim ends
//! ```
//!
//! The loop claims the giant before the thread starts, so no window of it is acted on in the same tick either.
//! Neither the loop nor the access sensor gets one, and its dirty log is not switched (see [`crate::claims`]).

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use wideleaf_policies::{
    AccessHistory, Action, Backing, Bytes, GpaRange, Moment, OutcomeResult, PageSize, PlannedAction, Refusal, Skip,
    Snapshot, VmSnapshot, WindowIndex,
};

use super::attempt::{Attempt, Mechanism};
use super::giant_making::{GiantMaking, Made, News};
use super::managed_vm::ManagedVm;
use super::{ManagerLoop, NEVER};
use crate::actuators::giant::{GiantPages, GiantSwap, SwapLimits, SwapSite};
use crate::backing::BackingKind;
use crate::claims::Claimed;
use crate::first_touch::GiantSource;
use crate::gate::GateState;
use crate::giant_maker::GiantMaker;
use crate::kernel::Kernel;
use crate::numa::placement::NodePolicy;
use crate::panicked::Panicked;
use crate::pool::HugetlbPools;
use crate::region::GuestRam;
use crate::second_level::SecondLevel;
use crate::second_level::guard::SecondLevelGuard;
use crate::side_mapping::GIANT;

/// Names under which pages that are made are counted.
const GIANT_PAGE: &str = "giant_page";
const GIANT_PAGE_NOT_MADE: &str = "giant_page_not_made";

/// Direction of a giant's move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Onto a page of the pool.
    Promote,
    /// Back to anonymous memory in pages of this size.
    Demote(PageSize),
}

impl Way {
    const fn mechanism(self) -> Mechanism {
        match self {
            Way::Promote => Mechanism::GiantPromote,
            Way::Demote(_) => Mechanism::GiantDemote,
        }
    }
}

/// Requested move of a giant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    planned: PlannedAction,
    way: Way,
    /// Index of the VM, in the order given.
    vm: usize,
    /// The giant's first window; its state holds the back-off of the whole giant.
    first: WindowIndex,
    row: usize,
}

/// The giant that is being moved, of all VMs, and the pools that its page comes from.
pub(super) struct Giants {
    pools: HugetlbPools,
    under_way: Option<UnderWay>,
    making: GiantMaking,
}

/// Means of moving the giants of one VM.
#[derive(Clone)]
pub(super) struct GiantVm {
    ram: Arc<GuestRam>,
    /// The second level without claims, which no other part of the manager has.
    second_level: Arc<dyn SecondLevel>,
    pages: Arc<GiantPages>,
}

struct UnderWay {
    request: Request,
    /// The page that was made for it; `None`: one of the pool.
    made: Option<Made>,
    thread: JoinHandle<GiantSwap>,
}

impl GiantVm {
    /// Means of moving the giants of `vm`, if it has any that can be moved. All other parts of the manager get a
    /// second level that leaves alone a giant that is being moved.
    ///
    /// The page comes from the user's pool, or from a maker ([`ManagerLoop::with_giant_maker`]).
    pub(super) fn new(vm: &mut ManagedVm, guard: Arc<SecondLevelGuard>, giants: &Giants) -> Option<GiantVm> {
        let ram = vm.ram.clone()?;
        vm.second_level = Some(Arc::new(guard.claiming()));
        let pages = Arc::new(GiantPages::new(giants.pools.clone(), false, SwapLimits::default()));
        (vm.backing.kind() == BackingKind::Anon).then_some(GiantVm { ram, second_level: guard, pages })
    }

    /// Direction of the move, if the action is about a giant.
    fn way(&self, action: Action) -> Option<Way> {
        match action {
            Action::Promote { to: PageSize::Giant1G, .. } => Some(Way::Promote),
            Action::Demote { window, to, .. } if self.ram.claims().is_on_giant_page(window) => Some(Way::Demote(to)),
            _ => None,
        }
    }

    /// Whether a giant page there would occupy again what the guest gave back.
    fn is_given_back(&self, first: WindowIndex) -> bool {
        let giant = GpaRange::new(first.start(), GIANT);
        giant.is_some_and(|giant| self.ram.given_back().book().is_any_given_back(giant))
    }
}

/// Adds to a snapshot what its sensors cannot see: the windows on a giant page, and those under way, which no
/// policy may name.
pub(super) fn mark(ram: &GuestRam, rows: &mut VmSnapshot) {
    for giant in ram.claims().giants_in_use() {
        let row_of = |end| rows.windows.partition_point(|window| window.start() < end);
        for row in row_of(giant.start)..row_of(giant.start + GIANT) {
            if giant.is_on_giant_page && rows.backing[row].is_large() {
                rows.backing[row] = Backing::Giant1G;
                // Both values belong to the pages it had before: a window on a giant page is neither
                // sampled nor searched.
                rows.access[row] = AccessHistory::default();
                rows.zero[row] = None;
            }
            if giant.is_under_way {
                rows.ready_at[row] = NEVER;
            }
        }
    }
}

impl Giants {
    /// No giant is under way yet.
    pub(super) fn of_this_machine() -> Giants {
        Giants { pools: HugetlbPools::of_this_machine(), under_way: None, making: GiantMaking::none() }
    }

    /// The reason why no giant can get a page, if so. A user that chose a policy with giants needs to know it.
    pub(super) fn why_no_page(&self) -> Option<String> {
        self.pools.check(PageSize::Giant1G, GIANT).err().map(|error| no_page(&error))
    }

    /// Where pages for first touches come from.
    pub(super) fn source(&self) -> GiantSource {
        GiantSource { pools: self.pools.clone(), maker: self.making.maker() }
    }

    /// Whether a giant of this VM is being moved.
    pub(super) fn is_under_way_in(&self, vm: usize) -> bool {
        self.under_way.as_ref().is_some_and(|under_way| under_way.request.vm == vm)
    }

    /// Starts to move a giant.
    ///
    /// # Errors
    /// The result, where it is known at once.
    fn start(&mut self, host: &Arc<dyn Kernel>, vm: &GiantVm, request: Request) -> Result<(), OutcomeResult> {
        if self.under_way.is_some() {
            return Err(OutcomeResult::Skipped(Skip::GiantUnderWay));
        }
        let vm = vm.clone();
        let claim = vm.ram.claims().giant(request.first.start()).map_err(Claimed::result)?;
        let policy = vm.ram.placement().giant_policy(request.first.start());
        let made = if request.way == Way::Promote { self.made_page(policy, host.now())? } else { None };
        let (host, page) = (Arc::clone(host), made.as_ref().map(|made| made.page.clone()));
        let work = move || {
            let site = SwapSite { host: host.as_ref(), ram: &vm.ram, second_level: vm.second_level.as_ref() };
            match (request.way, page) {
                (Way::Promote, Some(page)) => vm.pages.promote_onto(site, claim, &page),
                (Way::Promote, None) => vm.pages.promote_claimed(site, claim),
                (Way::Demote(to), _) => vm.pages.demote_claimed(site, claim, to),
            }
        };
        let thread = std::thread::Builder::new().name("giant-mover".into()).spawn(work);
        let no_thread = |error: std::io::Error| Refusal::Other(error.raw_os_error().unwrap_or(0));
        let thread = thread.map_err(|error| OutcomeResult::Refused(no_thread(error)))?;
        self.under_way = Some(UnderWay { request, made, thread });
        Ok(())
    }

    /// The page that is ready for a giant, if it was made; `None` where the pool has one by this memory policy.
    ///
    /// # Errors
    /// A page is being made, and this request came too early.
    fn made_page(&mut self, policy: Option<NodePolicy>, now: Moment) -> Result<Option<Made>, OutcomeResult> {
        if let Some(made) = self.making.take(policy) {
            return Ok(Some(made));
        }
        // The pool says what it lacks where no page is made either.
        let is_short = self.pools.check_for(policy.as_ref(), PageSize::Giant1G, GIANT).is_err();
        let is_being_made = is_short && self.making.begin(policy, now);
        if is_being_made { Err(OutcomeResult::Skipped(Skip::PageBeingMade)) } else { Ok(None) }
    }

    /// Result of the giant that was under way, if its thread has ended.
    fn ended(&mut self, now: Moment) -> Option<(Request, GiantSwap)> {
        let under_way = self.under_way.take_if(|under_way| under_way.thread.is_finished())?;
        Some(self.join(under_way, now))
    }

    /// Waits for the giant that is under way, if any. That takes one copy, and a bounded number of further copies
    /// of what the guest writes during it ([`SwapLimits::rounds_max`]).
    fn wait(&mut self, now: Moment) -> Option<(Request, GiantSwap)> {
        self.under_way.take().map(|under_way| self.join(under_way, now))
    }

    /// Waits for the thread, and keeps a page that was made and not used.
    fn join(&mut self, under_way: UnderWay, now: Moment) -> (Request, GiantSwap) {
        let (request, swap, made) = under_way.join();
        // The mapping of a stuck guest is unknown: the page may be in it.
        if let Some(made) = made.filter(|_| !swap.is_stuck && swap.panicked.is_none()) {
            self.making.put_back(made, now);
        }
        (request, swap)
    }
}

/// Why no giant can get a page, for the report.
fn no_page(why: &dyn std::fmt::Display) -> String {
    format!("{NO_PAGE}{why}")
}

/// Beginning of that line.
const NO_PAGE: &str = "pages of 1 GiB: ";

impl UnderWay {
    fn join(self) -> (Request, GiantSwap, Option<Made>) {
        // The swap catches its own panics; after a panic elsewhere in the thread, the claim stays.
        let panicked = |payload: Box<dyn Any + Send>| GiantSwap::ended_by(Panicked::new(payload.as_ref()));
        (self.request, self.thread.join().unwrap_or_else(panicked), self.made)
    }
}

impl Drop for Giants {
    /// Waits for the giant: no thread moves memory of a VM after its manager is gone.
    fn drop(&mut self) {
        drop(self.under_way.take().map(UnderWay::join));
    }
}

impl ManagerLoop {
    /// Takes giant pages from these pools under these limits, instead of from this machine's pools under
    /// the default limits.
    #[must_use]
    pub fn with_giants_from(mut self, pools: HugetlbPools, limits: SwapLimits) -> ManagerLoop {
        for giants in self.vms.iter_mut().filter_map(|vm| vm.giants.as_mut()) {
            giants.pages = Arc::new(GiantPages::new(pools.clone(), false, limits));
        }
        self.giants.pools = pools;
        self
    }

    /// Has giant pages made by `maker` where the pool has none free.
    #[must_use]
    pub fn with_giant_maker(mut self, maker: Arc<dyn GiantMaker>) -> ManagerLoop {
        self.giants.making = GiantMaking::by(maker);
        // A pool without a page is no reason any more.
        self.report.unanswered.retain(|line| !line.starts_with(NO_PAGE));
        self
    }

    /// Reports why RAM that was prepared before has no page of 1 GiB.
    #[must_use]
    pub fn without_giant_page(mut self, why: &str) -> ManagerLoop {
        let line = no_page(&why);
        if !self.report.unanswered.contains(&line) {
            self.report.unanswered.push(line);
        }
        self
    }

    /// Number of pages that giants of some VM could use: free in the pool, or to be made.
    pub(super) fn giant_pages_free(&self) -> u64 {
        let mut of_vms = self.vms.iter().filter_map(|vm| vm.giants.as_ref());
        let has_giants = of_vms.any(|giants| giants.ram.giants().next().is_some());
        let status = has_giants.then(|| self.giants.pools.status(PageSize::Giant1G));
        let of_pool = status.and_then(Result::ok).map_or(0, |pool| pool.available());
        of_pool.saturating_add(if has_giants { self.giants.making.pages(self.host.now()) } else { 0 })
    }

    /// Records the result of the giant that was under way, if it is over. Returns whether one was.
    pub(super) fn finish_giant(&mut self) -> bool {
        self.look_at_giant_making();
        let now = self.host.now();
        self.giants.ended(now).map(|(request, swap)| self.record_giant(request, swap)).is_some()
    }

    /// Counts what became of a page that was made.
    fn look_at_giant_making(&mut self) {
        let news = self.giants.making.look(self.host.now());
        let mut count = |of, what| *self.report.outcomes.entry((of, what)).or_default() += 1;
        match news {
            Some(News::Made) => count(GIANT_PAGE, "made"),
            Some(News::Unused) => count(GIANT_PAGE, "unused"),
            Some(News::NotMade(error)) => {
                count(GIANT_PAGE_NOT_MADE, error.reason());
                tracing::info!("{}", no_page(&error));
                // Each name once, with the first reason: the counter has the rest.
                if self.report.outcomes[&(GIANT_PAGE_NOT_MADE, error.reason())] == 1 {
                    self.report.unanswered.push(no_page(&error));
                }
            }
            None => {}
        }
        let given_back = self.giants.making.given_back();
        if given_back > 0 {
            self.report.outcomes.insert((GIANT_PAGE, "given_back"), given_back);
        }
    }

    /// Ends the making of pages. Those in use go back with the RAM.
    pub(super) fn end_giant_making(&mut self) {
        self.look_at_giant_making();
        self.giants.making.end();
        self.look_at_giant_making();
    }

    /// Waits for the last giant and records its result.
    pub(super) fn finish_last_giant(&mut self) {
        if let Some((request, swap)) = self.giants.wait(self.host.now()) {
            self.record_giant(request, swap);
        }
    }

    /// The move of a giant that an action requests, if it is about one.
    pub(super) fn giant_request(&self, planned: &PlannedAction, snapshot: &Snapshot) -> Option<Request> {
        let (vm, _) = self.find(planned.action, snapshot)?;
        let way = self.vms[vm].giants.as_ref()?.way(planned.action)?;
        let first = WindowIndex::containing(planned.action.window().start().align_down(PageSize::Giant1G));
        let row = snapshot.vms[vm].row(first)?;
        Some(Request { planned: *planned, way, vm, first, row })
    }

    /// Begins the move. Returns whether it has begun.
    pub(super) fn begin_giant(&mut self, request: Request) -> bool {
        let vm = &mut self.vms[request.vm];
        let giants = vm.giants.as_ref().expect("only VMs with giants are asked for them");
        let is_given_back = request.way == Way::Promote && giants.is_given_back(request.first);
        let state = &mut vm.windows[request.row];
        let begun = match state.begin(self.host.now()) {
            _ if self.should_stop.load(Ordering::Relaxed) => Err(OutcomeResult::Skipped(Skip::Stopping)),
            _ if vm.is_left_alone => Err(OutcomeResult::Skipped(Skip::NoMechanism)),
            _ if self.steering.gate_state(&vm.managed) != GateState::Open => {
                Err(OutcomeResult::Skipped(Skip::LeftAlone))
            }
            Err(_) => Err(OutcomeResult::Skipped(Skip::BackingOff)),
            Ok(_) if is_given_back => Err(OutcomeResult::Skipped(Skip::GivenBack)),
            Ok(acting) => self.giants.start(&self.host, giants, request).map(|()| *state = acting),
        };
        if let Err(result) = begun {
            let refused = Attempt::requested(request.planned, 0, self.host.now());
            self.record(&refused.ended(request.way.mechanism(), result));
        }
        begun.is_ok()
    }

    fn record_giant(&mut self, request: Request, swap: GiantSwap) {
        if let Some(panicked) = &swap.panicked {
            let giant = request.first.start();
            self.leave_alone(
                request.planned.action.vm(),
                &format!("the thread that moved its giant at {giant} {panicked}"),
            );
        }
        tracing::debug!(?swap, "{} of {}", request.way.mechanism().name(), request.first.start());
        let GiantSwap { result, cost, unavailable, .. } = swap;
        let mechanism = request.way.mechanism();
        let is_done = result == OutcomeResult::Done;
        let at = self.host.now();
        let bloat = if is_done { swap.bloat } else { Bytes::ZERO };
        let requested = Attempt::requested(request.planned, 0, at);
        let ended = Attempt { mechanism, result, cost, unavailable, bloat, ..requested };
        self.publisher.remember(&ended);
        self.record(&ended);
        let state = &mut self.vms[request.vm].windows[request.row];
        let next = match result {
            OutcomeResult::Refused(refusal) => state.refused(refusal, at),
            OutcomeResult::Done | OutcomeResult::Skipped(_) => state.done(),
        };
        *state = next.expect("a giant that was begun may be done or refused");
        // The pause is already counted, as the time that the giant was out of reach.
        self.report.copy_time += swap.elapsed.saturating_sub(if is_done { unavailable } else { Duration::ZERO });
        for (what, count) in [("logs_left_on", u64::from(swap.logs_left_on)), ("guest_stuck", u64::from(swap.is_stuck))]
        {
            if count > 0 {
                *self.report.outcomes.entry((mechanism.name(), what)).or_default() += count;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use wideleaf_policies::{NodeId, NodeSet};

    use super::*;
    use crate::numa::placement::MemoryMode;
    use crate::pool::NotMade;
    use crate::pool::fake_kernel::{FakeKernel, FakeNode, State};
    use crate::side_mapping::GiantFile;

    #[derive(Debug)]
    struct MakesNone;

    impl GiantMaker for MakesNone {
        fn left(&self) -> u64 {
            1
        }

        fn make(&self, _: Option<NodePolicy>) -> Result<GiantFile, NotMade> {
            Err(NotMade::elsewhere("no_room", "no room"))
        }
    }

    #[test]
    fn a_page_is_made_for_a_giant_that_is_bound_to_a_node_without_a_free_one() {
        let has_one = FakeNode { total: 1, free: 1, ..FakeNode::default() };
        let state = State { nodes: vec![has_one, FakeNode::default()], is_giant: true, ..State::default() };
        let kernel = FakeKernel::new(state);
        let bound_to = |node| Some(NodePolicy { mode: MemoryMode::Bind, nodes: NodeSet::of(NodeId(node)) });
        let made = |policy| {
            let making = GiantMaking::by(Arc::new(MakesNone));
            let mut giants = Giants { pools: kernel.pools(), under_way: None, making };
            giants.made_page(policy, Moment::START).map(|made| made.is_some())
        };
        assert_eq!([made(None), made(bound_to(0)), made(NodePolicy::preferring(1))], [Ok(false); 3], "the pool has it");
        assert_eq!(made(bound_to(1)), Err(OutcomeResult::Skipped(Skip::PageBeingMade)));
    }
}
