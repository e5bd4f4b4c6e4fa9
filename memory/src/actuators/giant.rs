//! Giants: 1 GiB of a live guest's RAM goes onto one page of the hugetlb pool, and back. Linux has no collapse to 1 GiB, so
//! the memory is copied while the guest runs, and the copy put in its place while the vCPUs stand still.
//!
//! ```text
//!   vCPUs   ──run──────────────────────────────────────────────┤  still  ├──run──────────────────────────▶
//!   us        ready the copy   log on, copy all   copy what was   the rest,  log off, free the old pages,
//!             (page, zeroed)                      written, again  exchange   look again
//!                                                 └── rounds ──┘
//! ```
//!
//! What must hold: from the start of the log to the end of the pause only vCPUs write to the giant, and devices whose writes are in
//! [`SecondLevel::take_dirty_log`] and which [`SecondLevel::pause`] stops. The kernel exchanges page tables whole and
//! does not look whether a page is pinned: what is read from a disk directly must be over when the pause begins, or the
//! transfer ends in a page that the guest no longer has. So [`SecondLevel::pause`] waits for the transfers of this
//! process's devices, and refuses where one does not end; a VMM with devices beside those (vhost, VFIO) must stop them
//! there too, or has no giants. [`crate::claims`] keeps our own sensors and actuators away meanwhile. Reads by others
//! are harmless: both copies are equal when they are exchanged. So RAM that other processes may map (a memfd) is
//! refused: they would go on with the old pages.
//!
//! What is promised: the guest stands still for about [`SwapLimits::pause_max`] at most, or nothing changes
//! ([`Refusal::OutrunByWrites`]). Where the exchange fails, the old mapping is back before the guest goes on.
//!
//! A panic is a mistake of ours and costs no byte of the guest's: before the exchange and after it the guest goes on with what
//! is mapped. In its midst nobody knows what is mapped, so the guest stays paused, and its memory is kept wherever it is.
//!
//! KVM maps no page larger than its memslot: with slots of less than 1 GiB only the host's own tables become giant.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Bytes, Cost, Gpa, GpaRange, Hva, Moment, OutcomeResult, PageSize, Refusal, Skip};

use super::dirty::{DirtyLog, DirtyPages, refused};
use crate::backing::BackingKind;
use crate::claims::{Claimed, GiantClaim};
use crate::host::{Advice, Host, HostError, PageRun, SideContents};
use crate::panicked::{self, Panicked};
use crate::pool::{HugetlbPools, PoolError, PoolLease};
use crate::region::GuestRam;
use crate::second_level::SecondLevel;
use crate::side_mapping::{GIANT, GiantFile, GiantPage, SideMapping};

/// What the exchange itself takes of the pause, beyond the copying: the kick of the vCPUs, the moving of 1 GiB of page
/// tables (0.05 to 0.18 ms), the new mapping and its first touch (0.03 ms), and the fetching of the log. Measured with 4K
/// pages on a shared machine, and rounded up.
const EXCHANGE_ALLOWANCE: Duration = Duration::from_micros(500);

/// How often something is tried that must succeed lest the guest stay paused.
const MUST_SUCCEED_ATTEMPTS: u32 = 3;

/// What a panic is to a policy: no errno says why.
const AFTER_A_PANIC: OutcomeResult = OutcomeResult::Refused(Refusal::Other(0));

/// What copying one base page takes until it was measured: 1 GiB/s, slower than any machine we know.
const PAGE_TIME_AT_FIRST: Duration = Duration::from_micros(4);

/// A round of fewer pages says nothing about the speed of copying: fetching the log outweighs it.
const PAGES_TO_MEASURE_LEAST: u64 = 256;

/// How much a guest may be made to bear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapLimits {
    /// How long its vCPUs may stand still.
    pub pause_max: Duration,
    /// How many rounds what it wrote meanwhile is copied before it is let alone.
    pub rounds_max: u32,
}

impl SwapLimits {
    /// 3 ms: a tenth of what a stalled window of memfd RAM costs in collapse, and enough for 2000 pages. 8 rounds: a guest
    /// that writes at half the speed of copying needs six to get from 200 ms of writes to 3 ms.
    pub const DEFAULT: SwapLimits = SwapLimits { pause_max: Duration::from_millis(3), rounds_max: 8 };
}

impl Default for SwapLimits {
    /// [`SwapLimits::DEFAULT`].
    fn default() -> SwapLimits {
        SwapLimits::DEFAULT
    }
}

/// The VM whose giant is swapped.
#[derive(Clone, Copy)]
pub struct SwapSite<'a> {
    /// Its address space.
    pub host: &'a dyn Host,
    /// Its RAM.
    pub ram: &'a GuestRam,
    /// KVM's side of it: without a dirty log and a pause there is no live copy.
    pub second_level: &'a dyn SecondLevel,
}

impl SwapSite<'_> {
    fn hva(&self, gpa: Gpa) -> Hva {
        self.ram.base() + (gpa - Gpa::new(0))
    }
}

/// A swap that was tried, or found needless.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GiantSwap {
    /// What came of it.
    pub result: OutcomeResult,
    /// Copied bytes and CPU time of everything.
    pub cost: Cost,
    /// Time of everything.
    pub elapsed: Duration,
    /// The longest time the vCPUs stood still, from the kick to the resume.
    pub unavailable: Duration,
    /// Pauses. All but the last were broken off, because too much had been written, or because a vCPU was so slow to leave
    /// the guest that no time was left (on a host with more work than CPUs).
    pub pauses: u32,
    /// Rounds in which written pages were copied again.
    pub rounds: u32,
    /// Pages the guest wrote while its memory was copied, counted once a round.
    pub written_pages: u64,
    /// Became resident only because the page is giant.
    pub bloat: Bytes,
    /// Memslots whose dirty log could not be switched off again: they stay at 4 KiB until they are recovered.
    pub logs_left_on: u32,
    /// The old mapping could not be restored, or the guest not be resumed, though tried again and again, or who exchanged the
    /// mappings panicked: its vCPUs stand still and its memory is kept, so that nothing is lost, but it will not go on.
    pub is_stuck: bool,
    /// Who moved it panicked: a mistake of ours, after which this VM is better left alone.
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

    /// Nothing was tried, because of this.
    pub(crate) fn not_tried(result: OutcomeResult) -> GiantSwap {
        GiantSwap { result, ..GiantSwap::begun() }
    }

    /// Nobody knows how far it came.
    pub(crate) fn ended_by(panicked: Panicked) -> GiantSwap {
        GiantSwap { panicked: Some(panicked), ..GiantSwap::not_tried(AFTER_A_PANIC) }
    }
}

/// Moves giants onto pages of the pool and back.
///
/// Which giants are on one is known to the RAM ([`crate::claims::Claims`]), which has the pages too: whoever moves them next need not be who moved
/// them there. A page is back in the pool when its giant is moved back, or with the RAM.
#[derive(Debug)]
pub struct GiantPages {
    pools: HugetlbPools,
    grows_pool: bool,
    limits: SwapLimits,
}

impl GiantPages {
    /// Nothing is moved yet. `grows_pool`: whether the pool may be made larger where it has no free page (root; the kernel may have
    /// to move a gibibyte of memory, which takes seconds).
    pub fn new(pools: HugetlbPools, grows_pool: bool, limits: SwapLimits) -> GiantPages {
        GiantPages { pools, grows_pool, limits }
    }

    /// Puts the giant at `giant` onto a giant page while the guest runs.
    pub fn promote(&self, site: SwapSite<'_>, giant: Gpa) -> GiantSwap {
        match site.ram.claims().giant(giant) {
            Ok(claim) => self.promote_claimed(site, claim),
            Err(claimed) => GiantSwap::not_tried(Claimed::result(claimed)),
        }
    }

    /// As [`GiantPages::promote`], for a giant that was claimed before. The claim ends with it.
    pub fn promote_claimed(&self, site: SwapSite<'_>, claim: GiantClaim) -> GiantSwap {
        let swap = Swap::run(site, &claim, self.limits, |swap| {
            check_promotable(site, &claim)?;
            let lease = self.room()?;
            let page = Arc::new(GiantPage::new(site.host.create_giant()?, lease));
            swap.promote(&page)?;
            swap.look_again()
        });
        end(claim, swap)
    }

    /// Puts the giant at `giant` back onto anonymous memory while the guest runs: in base pages, or in huge ones as far as
    /// the kernel has them. The giant page goes back to the pool.
    pub fn demote(&self, site: SwapSite<'_>, giant: Gpa, to: PageSize) -> GiantSwap {
        match site.ram.claims().giant(giant) {
            Ok(claim) => self.demote_claimed(site, claim, to),
            Err(claimed) => GiantSwap::not_tried(Claimed::result(claimed)),
        }
    }

    /// As [`GiantPages::demote`], for a giant that was claimed before. The claim ends with it.
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

    /// Sees that the pool has a page: `None` where it has one, a lease where it was made larger.
    fn room(&self) -> Result<Option<PoolLease>, Unswapped> {
        match self.pools.check(PageSize::Giant1G, GIANT) {
            Ok(()) => Ok(None),
            Err(PoolError::Short(_)) if self.grows_pool => Ok(Some(self.pools.lease(PageSize::Giant1G, 1)?)),
            Err(error) => Err(error.into()),
        }
    }
}

/// Lets others have the giant again, unless its guest stands still for good.
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

/// Why nothing was swapped, or nobody can tell.
struct Unswapped {
    result: OutcomeResult,
    panicked: Option<Panicked>,
    /// The old mapping is not back; the vCPUs must not go on. Otherwise everything is as it was.
    is_stuck: bool,
}

impl Unswapped {
    /// The same in the midst of an exchange, where a panic leaves nobody to know what is mapped.
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

/// A panic of `act` is a failure like any other.
fn caught<T>(act: impl FnOnce() -> Result<T, Unswapped>) -> Result<T, Unswapped> {
    panicked::caught(act).unwrap_or_else(|panicked| Err(panicked.into()))
}

impl From<PoolError> for Unswapped {
    fn from(error: PoolError) -> Unswapped {
        tracing::debug!(%error, "no giant page");
        let result = match error {
            PoolError::Short(_) | PoolError::NoRoom(_) | PoolError::InUse { .. } => {
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

/// Puts `next` in the place of what is mapped, while no vCPU runs. Where it fails, the old mapping is back, or the error
/// says that the guest is stuck. Which page the giant is on is told the claim in it: nothing can come in between.
type Exchange<'a> = &'a dyn Fn() -> Result<(), Unswapped>;

/// One swap under way.
struct Swap<'a> {
    site: SwapSite<'a>,
    claim: &'a GiantClaim,
    giant: Gpa,
    limits: SwapLimits,
    /// What there was when the copying began.
    occupied: Bytes,
    /// Written and not yet copied.
    pending: DirtyPages,
    /// What copying one page takes.
    page_time: Duration,
    report: GiantSwap,
}

impl<'a> Swap<'a> {
    /// Runs `act` and reports what became of it.
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
        // Collapse and hold leave different marks on different windows, and each mark is a mapping of its own.
        host.advise(start, GIANT, ram.backing().advice_at_start())?;
        if !host.is_one_mapping(start, GIANT)? {
            return Err(OutcomeResult::Refused(Refusal::NotEligible).into());
        }
        let next = host.map_aside(SideContents::Giant(page.file()))?;
        host.advise(next.start(), GIANT, Advice::PopulateWrite)?;
        // Perhaps the only copy of a guest's memory: it stays, for whoever looks at what went wrong, unless all went well.
        let kept = ManuallyDrop::new(host.map_aside(SideContents::Nothing)?);
        let exchanged = self.copy_and_exchange(&next, &|| {
            host.move_aside(ram, giant, &kept)?;
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
        let next = host.map_aside(SideContents::Anonymous)?;
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

    /// Copies everything the guest has, while it runs. A page that reads zero is left out: it reads zero there already.
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

    /// Copies what was written meanwhile until so little is left that the pause suffices for it.
    fn rounds(&mut self, log: &DirtyLog<'_>, next: &SideMapping, exchange: Exchange<'_>) -> Result<(), Unswapped> {
        for _ in 0..self.limits.rounds_max {
            let began = self.site.host.now();
            self.take(log)?;
            self.copy_pending(next, began);
            self.report.rounds += 1;
            // What is written during a round this short can be copied in a pause as short.
            let took = self.site.host.now().since(began);
            if took + EXCHANGE_ALLOWANCE <= self.limits.pause_max && self.pause_and_exchange(log, next, exchange)? {
                return Ok(());
            }
        }
        Err(OutcomeResult::Refused(Refusal::OutrunByWrites).into())
    }

    /// Stops the vCPUs, copies the rest and exchanges the mappings. `Ok(false)`: the rest was too much, and the guest runs
    /// on as before.
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

    /// Copies what was written, zeroes too: the copy may have had something else there.
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

    /// Whether the page tables say what the calls said.
    fn look_again(&mut self) -> Result<(), Unswapped> {
        let mut runs: Vec<PageRun> = Vec::new();
        self.site.host.scan(self.site.hva(self.giant), GIANT, &mut runs)?;
        let huge: Bytes = runs.iter().filter(|run| run.is_huge).map(|run| run.bytes).sum();
        if huge == GIANT { Ok(()) } else { Err(OutcomeResult::Refused(Refusal::NotObserved).into()) }
    }
}

/// The failure to report after `restore` has brought the old mapping back.
fn restored(error: HostError, restore: impl Fn() -> Result<(), HostError>) -> Unswapped {
    match retried(restore) {
        Ok(()) => error.into(),
        Err(lost) => {
            tracing::error!(%lost, "cannot restore guest RAM");
            Unswapped { is_stuck: true, ..lost.into() }
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
