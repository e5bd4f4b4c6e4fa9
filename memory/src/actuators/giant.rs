//! Giants: 1 GiB of a running guest's RAM moves onto one page of the hugetlb pool, and back. Linux has no
//! collapse to 1 GiB, so the memory is copied while the guest runs, and the copy replaces the original while the
//! vCPUs are stopped.
//!
//! ```text
//!   vCPUs   ──run──────────────────────────────────────────────┤  still  ├──run──────────────────────────▶
//!   us        ready the copy   log on, copy all   copy what was   the rest,  log off, free the old pages,
//!             (page, zeroed)                      written, again  exchange   look again
//!                                                 └── rounds ──┘
//! ```
//!
//! Condition: from the start of the log to the end of the pause, only two kinds of writers may write to the giant:
//! vCPUs, and devices with writes in [`SecondLevel::take_dirty_log`] that [`SecondLevel::pause`] stops. The kernel
//! exchanges whole page tables and does not check whether a page is pinned. A direct read from a disk must be over
//! when the pause begins, or the transfer ends in a page that the guest no longer has. So [`SecondLevel::pause`]
//! waits for the transfers of this process's devices, and refuses if one does not end. A VMM with other devices
//! (vhost, VFIO) must stop them there too, or must not use giants. [`crate::claims`] keeps our own sensors and
//! actuators away during the move. Reads by others are harmless, since both copies are equal when they are exchanged.
//! RAM that other processes may map (a memfd) is refused: they would continue with the old pages.
//!
//! Promise: the guest is stopped for at most about [`SwapLimits::pause_max`], or nothing changes
//! ([`Refusal::OutrunByWrites`]). Where further rounds make it shorter, for at most about a third of that. If the
//! exchange fails, the old mapping is back before the guest continues.
//!
//! A panic is a defect of wideleaf and loses no byte of the guest's. Before and after the exchange the guest
//! continues with the present mapping. A panic during the exchange leaves the mapping unknown: the guest stays
//! paused, and all its memory is kept.
//!
//! KVM maps no page larger than its memslot: with slots of less than 1 GiB only the host's own tables become giant.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Bytes, Cost, Gpa, GpaRange, Hva, Moment, OutcomeResult, PageSize, Refusal, Skip};

use super::dirty::{DirtyLog, DirtyPages, refused};
use crate::backing::BackingKind;
use crate::claims::{Claimed, GiantClaim};
use crate::host::{Advice, HostError, PageRun};
use crate::kernel::Kernel;
use crate::panicked::{self, Panicked};
use crate::pool::{HugetlbPools, NewPages, NotMade, PoolError};
use crate::region::GuestRam;
use crate::second_level::SecondLevel;
use crate::side_mapping::{GIANT, GiantFile, GiantPage, SideContents, SideMapping};

/// Duration of the exchange itself, within the pause: the kick of the vCPUs, moving 1 GiB of page tables (0.05 to
/// 0.18 ms), the new mapping and its first touch (0.03 ms), and fetching the log. Measured with 4K pages on a shared
/// machine, and rounded up.
const EXCHANGE_ALLOWANCE: Duration = Duration::from_micros(500);

/// Number of attempts at a step that must succeed lest the guest stay paused.
const MUST_SUCCEED_ATTEMPTS: u32 = 3;

/// Result that a policy learns after a panic, which has no errno.
const AFTER_A_PANIC: OutcomeResult = OutcomeResult::Refused(Refusal::Other(0));

/// Assumed time to copy one base page until it is measured: 1 GiB/s, slower than any known machine.
const PAGE_TIME_AT_FIRST: Duration = Duration::from_micros(4);

/// Part of the longest pause that is aimed at, while a further round would leave less to copy: 1 of 3 ms.
const PAUSE_GOAL_PART: u32 = 3;

/// Minimum number of pages in a round that measures the copying speed: in smaller rounds, fetching the log dominates.
const PAGES_TO_MEASURE_LEAST: u64 = 256;

/// Limits on the disturbance of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapLimits {
    /// Maximum time that the vCPUs are stopped.
    pub pause_max: Duration,
    /// Maximum number of rounds that copy newly written pages before the swap is given up.
    pub rounds_max: u32,
}

impl SwapLimits {
    /// 3 ms: a tenth of the stall that collapsing a window of memfd RAM causes, and enough for 2000 pages. 8 rounds:
    /// a guest that writes at half the speed of copying needs six to get from 200 ms of writes to 3 ms.
    pub const DEFAULT: SwapLimits = SwapLimits { pause_max: Duration::from_millis(3), rounds_max: 8 };

    /// Whether to begin the pause after a round that took this long, after one that took `before`. Pages written during
    /// a round can be copied in a pause that is equally long. As long as rounds become shorter by at least a quarter,
    /// another one is worth it until the pause meets its goal.
    fn may_pause_after(self, took: Duration, before: Duration, is_last: bool) -> bool {
        let is_shrinking = took < before / 4 * 3;
        let limit = if is_shrinking && !is_last { self.pause_max / PAUSE_GOAL_PART } else { self.pause_max };
        took + EXCHANGE_ALLOWANCE <= limit
    }
}

impl Default for SwapLimits {
    /// The limits of [`SwapLimits::DEFAULT`].
    fn default() -> SwapLimits {
        SwapLimits::DEFAULT
    }
}

/// The VM with the giant that is swapped.
#[derive(Clone, Copy)]
pub struct SwapSite<'a> {
    /// Address space of the VM.
    pub host: &'a dyn Kernel,
    /// RAM of the VM.
    pub ram: &'a GuestRam,
    /// KVM's side of the VM: a live copy needs its dirty log and its pause.
    pub second_level: &'a dyn SecondLevel,
}

impl SwapSite<'_> {
    fn hva(&self, gpa: Gpa) -> Hva {
        self.ram.base() + (gpa - Gpa::new(0))
    }
}

/// A swap that was tried, or found unnecessary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GiantSwap {
    /// Result of the swap.
    pub result: OutcomeResult,
    /// Copied bytes and CPU time of all steps.
    pub cost: Cost,
    /// Elapsed time of all steps.
    pub elapsed: Duration,
    /// Longest time that the vCPUs were stopped, from the kick to the resume.
    pub unavailable: Duration,
    /// Number of pauses. All but the last were broken off: too much had been written, or a vCPU left the guest so
    /// slowly that no time was left (on a host with more work than CPUs).
    pub pauses: u32,
    /// Number of rounds that copied written pages again.
    pub rounds: u32,
    /// Number of pages that the guest wrote during the copy, counted once a round.
    pub written_pages: u64,
    /// Bytes that became resident only because the page is giant.
    pub bloat: Bytes,
    /// Number of memslots with a dirty log that could not be switched off again: they stay at 4 KiB until
    /// they are recovered.
    pub logs_left_on: u32,
    /// Whether the guest is stuck: the old mapping could not be restored or the guest not be resumed, after several
    /// attempts, or the exchange panicked. Its vCPUs are stopped and its memory is kept, so no data is lost, but it
    /// will not continue.
    pub is_stuck: bool,
    /// The panic of the moving thread, if any: a defect of wideleaf, after which this VM should be left alone.
    pub panicked: Option<Panicked>,
}

impl GiantSwap {
    fn begun() -> GiantSwap {
        GiantSwap {
            result: OutcomeResult::Done,
            cost: Cost::default(),
            elapsed: Duration::ZERO,
            unavailable: Duration::ZERO,
            pauses: 0,
            rounds: 0,
            written_pages: 0,
            bloat: Bytes::ZERO,
            logs_left_on: 0,
            is_stuck: false,
            panicked: None,
        }
    }

    /// A swap that was not tried, with this result.
    pub(crate) fn not_tried(result: OutcomeResult) -> GiantSwap {
        GiantSwap { result, ..GiantSwap::begun() }
    }

    /// A swap that ended in a panic at an unknown point.
    pub(crate) fn ended_by(panicked: Panicked) -> GiantSwap {
        GiantSwap { panicked: Some(panicked), ..GiantSwap::not_tried(AFTER_A_PANIC) }
    }
}

/// Moves giants onto pages of the pool and back.
///
/// The RAM knows which giants are on a page ([`crate::claims::Claims`]) and owns the pages, so another instance may
/// move them next. A page returns to the pool when its giant is moved back, or with the end of the RAM.
#[derive(Debug)]
pub struct GiantPages {
    pools: HugetlbPools,
    grows_pool: bool,
    limits: SwapLimits,
}

impl GiantPages {
    /// Moves nothing yet. `grows_pool`: whether a page may be made if the pool has no free one
    /// ([`HugetlbPools::with_new_pages`]). That needs root, and the kernel may have to move a gibibyte of memory, which
    /// takes seconds.
    pub fn new(pools: HugetlbPools, grows_pool: bool, limits: SwapLimits) -> GiantPages {
        GiantPages { pools, grows_pool, limits }
    }

    /// Moves the giant at `giant` onto a giant page while the guest runs.
    pub fn promote(&self, site: SwapSite<'_>, giant: Gpa) -> GiantSwap {
        match site.ram.claims().giant(giant) {
            Ok(claim) => self.promote_claimed(site, claim),
            Err(claimed) => GiantSwap::not_tried(Claimed::result(claimed)),
        }
    }

    /// Like [`GiantPages::promote`], for a giant that is already claimed. The claim ends with it.
    pub fn promote_claimed(&self, site: SwapSite<'_>, claim: GiantClaim) -> GiantSwap {
        let swap = Swap::run(site, &claim, self.limits, |swap| {
            check_promotable(site, &claim)?;
            let page = Arc::new(self.page(site, claim.giant())?);
            swap.promote(&page)?;
            swap.look_again()
        });
        end(claim, swap)
    }

    /// Like [`GiantPages::promote_claimed`], onto a page that was made for it.
    pub(crate) fn promote_onto(&self, site: SwapSite<'_>, claim: GiantClaim, page: &Arc<GiantPage>) -> GiantSwap {
        let swap = Swap::run(site, &claim, self.limits, |swap| {
            check_promotable(site, &claim)?;
            swap.promote(page)?;
            swap.look_again()
        });
        end(claim, swap)
    }

    /// Moves the giant at `giant` back to anonymous memory while the guest runs: in base pages, or in huge ones where
    /// the kernel has them. The giant page goes back to the pool.
    pub fn demote(&self, site: SwapSite<'_>, giant: Gpa, to: PageSize) -> GiantSwap {
        match site.ram.claims().giant(giant) {
            Ok(claim) => self.demote_claimed(site, claim, to),
            Err(claimed) => GiantSwap::not_tried(Claimed::result(claimed)),
        }
    }

    /// Like [`GiantPages::demote`], for a giant that is already claimed. The claim ends with it.
    pub fn demote_claimed(&self, site: SwapSite<'_>, claim: GiantClaim, to: PageSize) -> GiantSwap {
        let swap = Swap::run(site, &claim, self.limits, |swap| {
            let page = claim.page().ok_or(OutcomeResult::Skipped(Skip::AlreadyDone))?;
            let advice = match to {
                PageSize::Base4K => Advice::NoHugePage,
                PageSize::Huge2M => Advice::HugePage,
                PageSize::Giant1G => return Err(OutcomeResult::Skipped(Skip::AlreadyDone).into()),
            };
            swap.demote(page.file(), advice)
        });
        end(claim, swap)
    }

    /// A page of the pool, or one that is made, for that giant.
    fn page(&self, site: SwapSite<'_>, giant: Gpa) -> Result<GiantPage, Unswapped> {
        let (host, policy) = (site.host, site.ram.placement().giant_policy(giant));
        match self.pools.check_for(policy.as_ref(), PageSize::Giant1G, GIANT) {
            Ok(()) => {}
            Err(PoolError::Short(_)) if self.grows_pool => {
                let node = policy.and_then(|policy| policy.single_node()).map(|node| u32::from(node.0));
                let (file, new) = (host.create_giant()?, NewPages { size: PageSize::Giant1G, pages: 1, node });
                self.pools.with_new_pages(&new, || host.fill_giant(&file, policy.as_ref()))?;
                return Ok(GiantPage::of_pool(file));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(GiantPage::of_pool(host.create_giant()?))
    }
}

/// Ends the claim on the giant, unless its guest stays paused.
fn end(claim: GiantClaim, swap: GiantSwap) -> GiantSwap {
    if swap.is_stuck {
        claim.keep();
    }
    swap
}

fn check_promotable(site: SwapSite<'_>, claim: &GiantClaim) -> Result<(), Unswapped> {
    if claim.page().is_some() {
        return Err(OutcomeResult::Skipped(Skip::AlreadyDone).into());
    }
    if site.ram.backing().kind() != BackingKind::Anon || !site.ram.giants().any(|whole| whole == claim.giant()) {
        return Err(OutcomeResult::Skipped(Skip::NoMechanism).into());
    }
    Ok(())
}

/// Reason why nothing was swapped, or why the state is unknown.
struct Unswapped {
    result: OutcomeResult,
    panicked: Option<Panicked>,
    /// The old mapping is not back; the vCPUs must not continue. Otherwise everything is unchanged.
    is_stuck: bool,
}

impl Unswapped {
    /// The same failure during an exchange, where a panic leaves the mapping unknown.
    fn in_exchange(self) -> Unswapped {
        Unswapped { is_stuck: self.is_stuck || self.panicked.is_some(), ..self }
    }
}

impl From<OutcomeResult> for Unswapped {
    fn from(result: OutcomeResult) -> Unswapped {
        Unswapped { result, panicked: None, is_stuck: false }
    }
}

impl From<HostError> for Unswapped {
    fn from(error: HostError) -> Unswapped {
        OutcomeResult::from(&error).into()
    }
}

impl From<Panicked> for Unswapped {
    fn from(panicked: Panicked) -> Unswapped {
        Unswapped { panicked: Some(panicked), ..AFTER_A_PANIC.into() }
    }
}

/// Turns a panic of `act` into an ordinary failure.
fn caught<T>(act: impl FnOnce() -> Result<T, Unswapped>) -> Result<T, Unswapped> {
    panicked::caught(act).unwrap_or_else(|panicked| Err(panicked.into()))
}

impl From<PoolError> for Unswapped {
    fn from(error: PoolError) -> Unswapped {
        tracing::debug!(%error, "no giant page");
        let result = match error {
            PoolError::Short(_) | PoolError::NotEnoughMemory(_) | PoolError::InUse { .. } => {
                OutcomeResult::Refused(Refusal::NoHugePage)
            }
            PoolError::NoPool(..) | PoolError::NoNode { .. } => OutcomeResult::Skipped(Skip::NoMechanism),
            PoolError::File { source, .. } | PoolError::Write { source, .. } => {
                (&HostError { what: "the hugetlb pool's files", source }).into()
            }
            PoolError::Malformed { .. }
            | PoolError::Contradiction { .. }
            | PoolError::Locked { .. }
            | PoolError::Untrusted { .. }
            | PoolError::NotBegun(_)
            | PoolError::Changed { .. } => OutcomeResult::Refused(Refusal::Other(0)),
        };
        result.into()
    }
}

impl From<NotMade> for Unswapped {
    fn from(error: NotMade) -> Unswapped {
        match error {
            NotMade::Pool(error) => error.into(),
            NotMade::HostShort { .. } | NotMade::NotMapped(_) | NotMade::Elsewhere { .. } => {
                tracing::debug!(%error, "no giant page");
                OutcomeResult::Refused(Refusal::NoHugePage).into()
            }
        }
    }
}

/// Puts `next` in the place of the present mapping, while no vCPU runs. On a failure the old mapping is back, or the
/// error says that the guest is stuck. It also updates the claim's page, so that nothing can come in between.
type Exchange<'a> = &'a dyn Fn() -> Result<(), Unswapped>;

/// One swap under way.
struct Swap<'a> {
    site: SwapSite<'a>,
    claim: &'a GiantClaim,
    giant: Gpa,
    limits: SwapLimits,
    /// Bytes present when the copying began.
    occupied: Bytes,
    /// Pages that are written and not yet copied.
    pending: DirtyPages,
    /// Time to copy one page.
    page_time: Duration,
    report: GiantSwap,
}

impl<'a> Swap<'a> {
    /// Runs `act` and reports the result.
    fn run(
        site: SwapSite<'a>,
        claim: &'a GiantClaim,
        limits: SwapLimits,
        act: impl FnOnce(&mut Swap<'a>) -> Result<(), Unswapped>,
    ) -> GiantSwap {
        assert!(claim.is_of(site.ram.claims()), "the claim is on other RAM");
        let (began, began_cpu) = (site.host.now(), site.host.thread_cpu_time());
        let giant = claim.giant();
        let mut swap = Swap {
            site,
            claim,
            giant,
            limits,
            occupied: Bytes::ZERO,
            pending: DirtyPages::none(giant),
            page_time: PAGE_TIME_AT_FIRST,
            report: GiantSwap::begun(),
        };
        if let Err(Unswapped { result, panicked, .. }) = caught(|| act(&mut swap)) {
            (swap.report.result, swap.report.panicked) = (result, panicked);
        }
        if swap.report.is_stuck {
            tracing::error!(%giant, "the guest stays paused");
        }
        swap.report.elapsed = site.host.now().since(began);
        swap.report.cost.cpu = site.host.thread_cpu_time().saturating_sub(began_cpu);
        swap.report
    }

    fn promote(&mut self, page: &Arc<GiantPage>) -> Result<(), Unswapped> {
        let (host, ram, giant, start) = (self.site.host, self.site.ram, self.giant, self.site.hva(self.giant));
        let claim = self.claim;
        // Collapse and hold leave different marks on different windows, and each mark makes a mapping of its own.
        host.advise(start, GIANT, ram.backing().advice_at_start())?;
        if !host.is_one_mapping(start, GIANT)? {
            return Err(OutcomeResult::Refused(Refusal::NotEligible).into());
        }
        // The kernel clears the page here, and not at a touch: that would hold up all faults of the process.
        let policy = ram.placement().giant_policy(giant);
        host.fill_giant(page.file(), policy.as_ref())?;
        let next = host.map_aside(SideContents::Giant(page.file()))?;
        host.advise(next.start(), GIANT, Advice::PopulateWrite)?;
        // A page that was made for it may come from any node.
        if policy.is_some_and(|policy| !policy.permits_page_at(next.start())) {
            tracing::debug!("{giant}: the page of 1 GiB is on a node that its memory policy excludes");
            return Err(OutcomeResult::Refused(Refusal::NoHugePage).into());
        }
        if page.begin_use() {
            next.clear(page.file());
        }
        // Perhaps the only copy of a guest's memory: it is kept for an analysis unless all went well.
        let kept = ManuallyDrop::new(host.map_aside(SideContents::Nothing)?);
        let exchanged = self.copy_and_exchange(&next, &|| {
            host.move_aside(ram, giant, &kept).map_err(|error| unless_moved(host, &kept, error))?;
            let placed = host.map_over(ram, giant, page.file()).and_then(|()| {
                claim.moved_to(Some(page.clone()));
                host.advise(start, GIANT, Advice::PopulateWrite)
            });
            let restore = || host.move_in(&kept, ram, giant).map(|()| claim.moved_to(None));
            placed.map_err(|error| restored(error, restore))
        });
        if !is_stuck(&exchanged) {
            drop(ManuallyDrop::into_inner(kept));
        }
        self.report.bloat = GIANT.saturating_sub(self.occupied);
        exchanged
    }

    fn demote(&mut self, page: &GiantFile, advice: Advice) -> Result<(), Unswapped> {
        let (host, ram, giant, claim) = (self.site.host, self.site.ram, self.giant, self.claim);
        let next = host.map_aside(SideContents::Anonymous(ram.placement().policy_at(giant).copied()))?;
        host.advise(next.start(), GIANT, advice)?;
        self.copy_and_exchange(&next, &|| {
            let placed = host.move_in(&next, ram, giant).map(|()| claim.moved_to(None));
            placed.map_err(|error| restored(error, || host.map_over(ram, giant, page)))
        })
    }

    fn copy_and_exchange(&mut self, next: &SideMapping, exchange: Exchange<'_>) -> Result<(), Unswapped> {
        let range = GpaRange::new(self.giant, GIANT).expect("RAM does not reach the end of 64 bits");
        let log = DirtyLog::start(self.site.second_level, range).map_err(|error| refused(&error))?;
        let exchanged = self.copy_all(next).and_then(|()| self.rounds(&log, next, exchange));
        self.report.logs_left_on = log.stop();
        exchanged
    }

    /// Copies all present pages while the guest runs. It skips a page that reads zero, since the copy reads
    /// zero there already.
    fn copy_all(&mut self, next: &SideMapping) -> Result<(), Unswapped> {
        let began = self.site.host.now();
        let mut runs: Vec<PageRun> = Vec::new();
        self.site.host.scan_occupied(self.site.hva(self.giant), GIANT, &mut runs)?;
        self.occupied = runs.iter().map(|run| run.bytes).sum();
        let (ram, start, giant) = (self.site.ram, self.site.hva(self.giant), self.giant);
        let pages = runs.iter().flat_map(|run| {
            let first = giant + Bytes::new(run.start.get() - start.get());
            (0..run.bytes.pages(PageSize::Base4K)).map(move |i| first + PageSize::Base4K.bytes() * i)
        });
        let mut copied = 0;
        for page in pages.filter(|page| !ram.is_zero(*page)) {
            next.copy_page(ram, page);
            copied += 1;
        }
        self.account(copied, began);
        Ok(())
    }

    /// Copies the pages written in the meantime until the rest fits into the pause.
    fn rounds(&mut self, log: &DirtyLog<'_>, next: &SideMapping, exchange: Exchange<'_>) -> Result<(), Unswapped> {
        let mut before = Duration::MAX;
        for round in 1..=self.limits.rounds_max {
            let began = self.site.host.now();
            self.take(log)?;
            self.copy_pending(next, began);
            self.report.rounds += 1;
            let took = self.site.host.now().since(began);
            let is_time = self.limits.may_pause_after(took, before, round == self.limits.rounds_max);
            if is_time && self.pause_and_exchange(log, next, exchange)? {
                return Ok(());
            }
            before = took;
        }
        Err(OutcomeResult::Refused(Refusal::OutrunByWrites).into())
    }

    /// Stops the vCPUs, copies the rest and exchanges the mappings. `Ok(false)`: the rest was too much, and the guest
    /// continues as before.
    fn pause_and_exchange(
        &mut self,
        log: &DirtyLog<'_>,
        next: &SideMapping,
        exchange: Exchange<'_>,
    ) -> Result<bool, Unswapped> {
        let began = self.site.host.now();
        self.site.second_level.pause().map_err(|error| refused(&error))?;
        self.report.is_stuck = true; // until it is resumed
        let exchanged = caught(|| self.exchange_in_time(began, log, next, exchange));
        if !is_stuck(&exchanged) {
            self.resume();
        }
        self.report.pauses += 1;
        self.report.unavailable = self.report.unavailable.max(self.site.host.now().since(began));
        exchanged
    }

    fn exchange_in_time(
        &mut self,
        began: Moment,
        log: &DirtyLog<'_>,
        next: &SideMapping,
        exchange: Exchange<'_>,
    ) -> Result<bool, Unswapped> {
        self.take(log)?;
        let pages = u32::try_from(self.pending.count()).unwrap_or(u32::MAX);
        let spent = self.site.host.now().since(began);
        if spent + self.page_time.saturating_mul(pages) + EXCHANGE_ALLOWANCE > self.limits.pause_max {
            return Ok(false);
        }
        self.copy_pending(next, self.site.host.now());
        self.claim.exchanging(|| caught(exchange).map_err(Unswapped::in_exchange)).map(|()| true)
    }

    fn resume(&mut self) {
        let attempt = || self.site.second_level.resume();
        match retried(attempt) {
            Ok(()) => self.report.is_stuck = false,
            Err(error) => tracing::error!(giant = %self.giant, %error, "cannot resume the guest"),
        }
    }

    fn take(&mut self, log: &DirtyLog<'_>) -> Result<(), Unswapped> {
        log.take_into(&mut self.pending).map_err(|error| refused(&error).into())
    }

    /// Copies the written pages, zeroes too: the copy may hold other data there.
    fn copy_pending(&mut self, next: &SideMapping, began: Moment) {
        let (ram, mut copied) = (self.site.ram, 0);
        self.pending.drain(|page| {
            next.copy_page(ram, page);
            copied += 1;
        });
        self.report.written_pages += copied;
        self.account(copied, began);
    }

    fn account(&mut self, pages: u64, began: Moment) {
        self.report.cost.copied += PageSize::Base4K.bytes() * pages;
        if pages >= PAGES_TO_MEASURE_LEAST {
            let time_ns = self.site.host.now().since(began).as_nanos() as u64;
            self.page_time = Duration::from_nanos(time_ns / pages);
        }
    }

    /// Checks that the page tables confirm the calls.
    fn look_again(&mut self) -> Result<(), Unswapped> {
        let mut runs: Vec<PageRun> = Vec::new();
        self.site.host.scan(self.site.hva(self.giant), GIANT, &mut runs)?;
        let huge: Bytes = runs.iter().filter(|run| run.is_huge).map(|run| run.bytes).sum();
        if huge == GIANT { Ok(()) } else { Err(OutcomeResult::Refused(Refusal::NotObserved).into()) }
    }
}

/// The failure to report after `restore` has restored the old mapping.
fn restored(error: HostError, restore: impl Fn() -> Result<(), HostError>) -> Unswapped {
    match retried(restore) {
        Ok(()) => error.into(),
        Err(lost) => {
            tracing::error!(%lost, "cannot restore guest RAM");
            Unswapped { is_stuck: true, ..lost.into() }
        }
    }
}

/// Why guest RAM was not moved aside. Where a part of it was (Linux 6.17 and later move mappings one by one), the guest
/// is stuck: it would read zeroes in the place of that part.
fn unless_moved(host: &dyn Kernel, kept: &SideMapping, error: HostError) -> Unswapped {
    let mut moved = Vec::new();
    match host.scan_occupied(kept.start(), GIANT, &mut moved) {
        Ok(()) if moved.is_empty() => error.into(),
        _ => {
            tracing::error!(%error, "a part of guest RAM was moved aside");
            Unswapped { is_stuck: true, ..error.into() }
        }
    }
}

fn retried<E>(attempt: impl Fn() -> Result<(), E>) -> Result<(), E> {
    let mut last = attempt();
    for _ in 1..MUST_SUCCEED_ATTEMPTS {
        if last.is_ok() {
            break;
        }
        last = attempt();
    }
    last
}

fn is_stuck<T>(exchanged: &Result<T, Unswapped>) -> bool {
    exchanged.as_ref().is_err_and(|unswapped| unswapped.is_stuck)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_begins_when_it_meets_its_goal_or_when_rounds_no_longer_become_shorter() {
        let ms = Duration::from_millis;
        let may = |took, before, is_last| SwapLimits::DEFAULT.may_pause_after(took, before, is_last);
        // The exchange takes half a millisecond of the goal of one.
        let goal = Duration::from_micros(500);
        assert!(may(goal, Duration::MAX, false) && !may(goal + Duration::from_nanos(1), Duration::MAX, false));
        assert!(!may(ms(1), ms(2), false), "another round leaves half of it");
        assert!(may(ms(2), Duration::from_micros(2_600), false), "the guest writes nearly as fast as rounds copy");
        assert!(may(ms(1), ms(2), true), "it is the last round");
        assert!(!may(ms(3), ms(3), true) && !may(ms(3), ms(3), false), "longer than the longest pause");
    }
}
