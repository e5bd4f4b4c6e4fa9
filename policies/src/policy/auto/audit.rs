//! What promotions gain a guest, measured by the guest's own progress, where it reports any.
//!
//! ```text
//!                    ┌────────── no measure, or no finding ──────────▶ Undecided: as assumed
//!   candidates of ───┤                                                     │ the guest does other work
//!   one kind         └─ trial ─┬─ faster ────────────────────────▶ Kept    ▼
//!   Open ◀── after a pause ──┐ └─ gained less than it is worth ─▶ Stopped ─▶ Open
//!                            └────────── (grows each time) ───────────┘
//! ```
//!
//! `auto` assumes misses from touches, so a guest with all its misses hidden (out of order, prefetched) looks like one
//! that waits for each of them. A *trial* tells them apart. Of the candidates of a kind without a verdict, one in
//! twenty is promoted; the others wait. The guest's speed after that is compared with its speed before
//! ([`trial`], [`speed`], [`sign_test`]). The error of each verdict is at most 3.4 % for noise that is independent from
//! one reading to the next. A neighbour on the host that comes or goes is no such noise: a steady baseline and the
//! guards below protect a stop from it. Nothing protects *kept* alongside, which only changes what is reported.
//!
//! **Why the whole guest is measured, and not the treated windows against the others.** The work of a guest is shared:
//! when walks of some windows become shorter, the program comes round sooner to all windows, and touches of treated
//! windows and of the others become more frequent together. Their difference is zero for GUPS, whatever it gains.
//! Besides, the access sensor takes a huge window aside whole and a base window by some of its pages, so that a
//! promotion changes what a touch means. Work over CPU time means the same before and after, whatever the page size.
//! Faults and exits over CPU time do not: at a fixed timer a busy guest has the same number of them at any speed.
//!
//! **What a guest pays.** Without a measure nothing waits. With one, candidates wait while the count is live and
//! steady, for 2.5 s at most, and then a hundredth of the time ([`CREDIT_MAX`], [`CREDIT_PART`]). A guest that is too
//! unsteady is known by its first speeds. The more there is to gain, the sooner a trial is over. Promotions that did
//! not wait are compared too, but such a trial only finds that they were worth it.
//!
//! **What it cannot tell.** A guest that becomes faster or slower of its own accord in those two seconds, by about what
//! the promotion gains. So a guest with a drift before the trial is left alone, one that becomes slower is not stopped,
//! a stop ends with the guest's phase, and it is only a pause.

use alloc::vec::Vec;
use core::time::Duration;

use self::speed::{News, Speedometer};
use self::trial::{CANDIDATES_MIN, Finding, INTERVALS_MIN, Trial, worth};
use crate::action::Action;
use crate::candidates::missing;
use crate::outcome::{Outcome, OutcomeResult, Skip};
use crate::snapshot::{GuestMapping, GuestProgress, Snapshot, VmId, VmSnapshot};
use crate::units::{Moment, WindowIndex};

mod sign_test;
mod speed;
mod trial;

/// Longest time for which candidates wait at first: ten speeds before, two that are left out and ten after, at 10 Hz.
const CREDIT_MAX: Duration = Duration::from_millis(2_500);

/// Candidates wait for one part in this many of the time that follows.
const CREDIT_PART: u32 = 100;

/// Time for which a kind stays stopped at first, and at most; it doubles from one stop to the next.
const PAUSE_MIN: Duration = Duration::from_secs(120);
const PAUSE_MAX: Duration = Duration::from_secs(3_600);

/// Number of kinds of candidates.
const KINDS: usize = 4;

/// Kind of a candidate: windows of one kind are expected to gain alike. Whether a window is proven hot is no part of
/// it: candidates become proven during a trial. One in twenty of a mixture gains a twentieth of what the mixture does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kind(u8);

impl Kind {
    const fn new(is_base_in_guest: bool, is_full: bool) -> Kind {
        Kind(is_base_in_guest as u8 | (is_full as u8) << 1)
    }

    /// The kind of a window on base pages.
    pub fn of(vm: &VmSnapshot, row: usize) -> Kind {
        Kind::new(vm.guest_mapping[row] == GuestMapping::Base4K, missing(vm, row) == 0)
    }

    const fn index(self) -> usize {
        self.0 as usize
    }

    const fn is_full(self) -> bool {
        self.0 & 0b10 != 0
    }
}

/// Source of the cycles that a promotion earns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Earnings {
    /// The policy's assumption.
    Assumed,
    /// A trial is under way, and will tell.
    Pending,
    /// A trial measured that number of cycles per second for each window.
    Measured(u64),
}

impl Earnings {
    /// The same, but at most `per_s` cycles per second, the largest number that can be right for any window.
    pub fn at_most(self, per_s: u64) -> Earnings {
        match self {
            Earnings::Measured(measured) => Earnings::Measured(measured.min(per_s)),
            other => other,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Verdict {
    #[default]
    Open,
    Kept {
        per_s: u64,
    },
    Stopped {
        until: Duration,
        /// Number of candidates of the trial.
        candidates: u64,
    },
    Undecided,
}

/// Candidates of one plan.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    windows: u64,
    assumed_per_s: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct OfKind {
    verdict: Verdict,
    /// Length of its latest pause.
    pause: Duration,
    /// Number of trials so far.
    round: u64,
    now: Count,
    before: Count,
}

/// Numbers that gains are compared with.
#[derive(Clone, Copy, Debug)]
struct Scale {
    /// Cycles of a core in a second.
    core_per_s: u64,
    /// Largest gain in millionths that the promotion of all candidates must have.
    worth_max: u64,
}

/// Time for which candidates may still wait.
#[derive(Clone, Copy, Debug)]
struct Credit {
    left: Duration,
    at: Duration,
}

/// Counts for reports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Findings {
    pub kept: u64,
    pub stopped: u64,
    pub undecided: u64,
    /// Number of candidates at the latest plan that wait for a trial.
    pub waiting_now: u64,
    /// Number of candidates at the latest plan that are measured to gain nothing.
    pub stopped_now: u64,
}

/// All that is known of one guest.
#[derive(Clone, Debug)]
struct OfVm {
    vm: VmId,
    meter: Speedometer,
    is_live: bool,
    kinds: [OfKind; KINDS],
    trial: Option<Trial>,
    credit: Credit,
    has_waited: bool,
}

/// The audit of all guests.
#[derive(Clone, Debug)]
pub(super) struct Audit {
    /// Gain in millionths of a guest's speed from which on all candidates of a kind are worth it; 0: no audit.
    worth_max: u64,
    vms: Vec<OfVm>,
    findings: Findings,
    /// Windows to which a trial added pages for nothing.
    added_for_nothing: Vec<(VmId, WindowIndex)>,
}

impl Audit {
    /// An audit of promotions that are worth `worth_percent` of a guest's speed at most; of none for 0.
    pub fn new(worth_percent: u64) -> Audit {
        Audit {
            worth_max: worth_percent * (speed::MILLION / 100),
            vms: Vec::new(),
            findings: Findings::default(),
            added_for_nothing: Vec::new(),
        }
    }

    /// Takes the guests' readings, ends and begins trials. Called once a plan, before the first candidate.
    /// `core_per_s`: cycles of a core in a second.
    pub fn observe(&mut self, snapshot: &Snapshot, now: Moment, core_per_s: u64) {
        if self.worth_max == 0 {
            return;
        }
        self.fit(snapshot);
        (self.findings.waiting_now, self.findings.stopped_now) = (0, 0);
        let Audit { worth_max, vms, findings, added_for_nothing } = self;
        let scale = Scale { core_per_s, worth_max: *worth_max };
        for (of_vm, vm) in vms.iter_mut().zip(&snapshot.vms) {
            of_vm.observe(&vm.progress, now.since_start(), scale, findings, added_for_nothing);
        }
    }

    /// Whether a candidate may be promoted at this plan; it is assumed to save `assumed_per_s` cycles per second.
    /// `index`: place of its VM in the snapshot.
    pub fn admits(&mut self, index: usize, window: WindowIndex, kind: Kind, assumed_per_s: u64) -> bool {
        match self.vms.get_mut(index) {
            Some(of_vm) if of_vm.is_live || of_vm.trial.is_some() => {
                of_vm.admits(window, kind, assumed_per_s, &mut self.findings)
            }
            Some(of_vm) if of_vm.is_stopped(kind) => {
                self.findings.stopped_now += 1;
                false
            }
            _ => true,
        }
    }

    /// Whether promotions of this kind are measured to gain nothing.
    pub fn is_stopped(&self, index: usize, kind: Kind) -> bool {
        self.vms.get(index).is_some_and(|of_vm| of_vm.is_stopped(kind))
    }

    /// Notes a promotion since the latest plan.
    pub fn promoted(&mut self, index: usize, window: WindowIndex, kind: Kind) {
        if let Some(of_vm) = self.vms.get_mut(index) {
            of_vm.promoted(window, kind);
        }
    }

    /// Source of the earnings of promoted windows of this kind.
    pub fn earnings(&self, index: usize, kind: Kind) -> Earnings {
        self.vms.get(index).map_or(Earnings::Assumed, |of_vm| of_vm.earnings(kind))
    }

    /// Whether candidates wait for a trial, so that the next plan should come soon.
    pub fn is_waiting(&self) -> bool {
        self.findings.waiting_now > 0
    }

    /// Counts for reports.
    pub fn findings(&self) -> Findings {
        self.findings
    }

    /// Whether a trial added pages for nothing that are still there, as far as known.
    pub fn has_to_undo(&self) -> bool {
        !self.added_for_nothing.is_empty()
    }

    /// Forgets the added pages of a window that is released, or can never be.
    pub fn learn(&mut self, outcome: &Outcome) {
        if let (Action::Release { vm, window }, OutcomeResult::Done | OutcomeResult::Skipped(Skip::NoMechanism)) =
            (outcome.action, outcome.result)
        {
            self.added_for_nothing.retain(|added| *added != (vm, window));
        }
    }

    /// Windows to which a trial added pages for nothing. The caller removes those that it has dealt with.
    pub fn added_for_nothing(&mut self) -> &mut Vec<(VmId, WindowIndex)> {
        &mut self.added_for_nothing
    }

    /// The verdict on VMs that stay is kept.
    fn fit(&mut self, snapshot: &Snapshot) {
        let is_same = self.vms.len() == snapshot.vms.len();
        if is_same && self.vms.iter().zip(&snapshot.vms).all(|(of_vm, vm)| of_vm.vm == vm.vm) {
            return;
        }
        let mut old = core::mem::take(&mut self.vms);
        let mut kept = |id| old.iter().position(|of_vm| of_vm.vm == id).map(|at| old.swap_remove(at));
        self.vms.extend(snapshot.vms.iter().map(|vm| kept(vm.vm).unwrap_or_else(|| OfVm::new(vm.vm))));
        self.added_for_nothing.retain(|(vm, _)| snapshot.vm(*vm).is_some());
    }
}

impl OfVm {
    fn new(vm: VmId) -> OfVm {
        OfVm {
            vm,
            meter: Speedometer::default(),
            is_live: false,
            kinds: [OfKind::default(); KINDS],
            trial: None,
            credit: Credit { left: CREDIT_MAX, at: Duration::ZERO },
            has_waited: false,
        }
    }

    fn observe(
        &mut self,
        readings: &[GuestProgress],
        now: Duration,
        scale: Scale,
        findings: &mut Findings,
        added_for_nothing: &mut Vec<(VmId, WindowIndex)>,
    ) {
        self.credit.pass(now, core::mem::take(&mut self.has_waited));
        for reading in readings {
            let finding = self.read(*reading);
            self.conclude(finding, now, scale, findings, added_for_nothing);
        }
        self.meter.note_time(now, readings.len());
        self.is_live = self.meter.is_live(now);
        let finding = self.advance(now);
        self.conclude(finding, now, scale, findings, added_for_nothing);
        self.kinds.iter_mut().for_each(|kind| kind.next_plan(now, self.credit));
        self.begin_trial(now, scale);
    }

    fn read(&mut self, reading: GuestProgress) -> Option<Finding> {
        match self.meter.read(reading) {
            News::None => None,
            News::OtherWork => {
                self.kinds.iter_mut().for_each(OfKind::forget);
                self.trial.is_some().then_some(Finding::OtherWork)
            }
            News::Speed(speed) => match &mut self.trial {
                Some(trial) if trial.compares() => trial.pair(speed),
                Some(trial) if !trial.takes_baseline() => None,
                _ => {
                    self.meter.keep(speed);
                    None
                }
            },
        }
    }

    /// Ends a held trial that cannot end in time, or takes the next step.
    fn advance(&mut self, now: Duration) -> Option<Finding> {
        let intervals = self.trial.as_ref()?.intervals_left(self.meter.before().len());
        let is_in_time = self.is_live && self.can_pay_for(intervals);
        let trial = self.trial.as_mut()?;
        if trial.is_held() && !is_in_time {
            return Some(Finding::Unclear);
        }
        trial.advance(now, self.meter.before())
    }

    fn conclude(
        &mut self,
        finding: Option<Finding>,
        now: Duration,
        scale: Scale,
        findings: &mut Findings,
        added_for_nothing: &mut Vec<(VmId, WindowIndex)>,
    ) {
        let (Some(finding), Some(mut trial)) = (finding, self.trial.take_if(|_| finding.is_some())) else { return };
        if trial.has_promoted() {
            self.meter.take_before();
        }
        match finding {
            Finding::Faster(gain) => {
                findings.kept += 1;
                let windows = trial.promoted_by_kind().iter().sum::<u64>().max(1);
                let per_s =
                    (u128::from(scale.core_per_s) * u128::from(gain) / u128::from(speed::MILLION)) as u64 / windows;
                self.judge(&trial, |_| Verdict::Kept { per_s });
            }
            Finding::NoGain => {
                findings.stopped += 1;
                added_for_nothing.extend(trial.take_added().into_iter().map(|window| (self.vm, window)));
                let candidates = trial.candidates();
                self.judge(&trial, |kind| Verdict::Stopped { until: now + kind.lengthen_pause(), candidates });
            }
            Finding::TooFew => self.meter.restore(trial.take_before()),
            Finding::Unclear => {
                findings.undecided += 1;
                if trial.is_held() {
                    self.judge(&trial, |_| Verdict::Undecided);
                }
            }
            Finding::OtherWork => findings.undecided += 1,
        }
    }

    /// Sets the verdict on all kinds that the trial is about.
    fn judge(&mut self, trial: &Trial, mut verdict: impl FnMut(&mut OfKind) -> Verdict) {
        let held = trial.kind().map(Kind::index);
        for (index, kind) in self.kinds.iter_mut().enumerate() {
            if held == Some(index) || held.is_none() && trial.promoted_by_kind()[index] > 0 {
                kind.verdict = verdict(kind);
            }
        }
    }

    /// Begins a trial of the kind with the most candidates, if one can end in time.
    fn begin_trial(&mut self, now: Duration, scale: Scale) {
        if self.trial.is_some() || !self.may_wait() || !self.meter.is_settled() {
            return;
        }
        let open = (0..KINDS).filter(|index| self.kinds[*index].is_worth_a_trial());
        let Some(index) = open.max_by_key(|index| self.kinds[*index].before.windows) else { return };
        let kind = &mut self.kinds[index];
        let Count { windows, assumed_per_s } = kind.before;
        self.trial = Some(Trial::held(Kind(index as u8), kind.round, windows, worth(assumed_per_s, scale), now));
        kind.round += 1;
    }

    /// Whether candidates may wait, because a trial that begins now can end in time.
    fn may_wait(&self) -> bool {
        self.is_live && self.can_pay_for(INTERVALS_MIN)
    }

    /// Whether candidates may wait for that number of intervals between readings. Before the second reading, the
    /// interval counts as short.
    fn can_pay_for(&self, intervals: u32) -> bool {
        let interval = self.meter.interval().unwrap_or_default();
        self.credit.left > Duration::ZERO && self.credit.left >= interval * intervals
    }

    fn admits(&mut self, window: WindowIndex, kind: Kind, assumed_per_s: u64, findings: &mut Findings) -> bool {
        let may_wait = self.may_wait();
        let of_kind = &mut self.kinds[kind.index()];
        of_kind.now.add(assumed_per_s);
        let admits = match (of_kind.verdict, &mut self.trial) {
            (Verdict::Kept { .. } | Verdict::Undecided, _) => true,
            (Verdict::Stopped { .. }, _) => {
                findings.stopped_now += 1;
                return false;
            }
            (Verdict::Open, Some(trial)) => trial.admits(window, kind),
            // The first plan with candidates of this kind counts them.
            (Verdict::Open, None) => of_kind.before.windows > 0 || !may_wait,
        };
        findings.waiting_now += u64::from(!admits);
        self.has_waited |= !admits;
        admits
    }

    fn is_stopped(&self, kind: Kind) -> bool {
        matches!(self.kinds[kind.index()].verdict, Verdict::Stopped { .. })
    }

    fn promoted(&mut self, window: WindowIndex, kind: Kind) {
        let is_measured = self.meter.before().len() >= sign_test::PAIRS_MIN;
        if self.trial.is_none() && self.is_live && is_measured {
            self.trial = Some(Trial::alongside(self.meter.take_before(), self.credit.at));
        }
        if let Some(trial) = &mut self.trial {
            trial.note(window, kind, !kind.is_full());
        }
        self.meter.promoted();
    }

    fn earnings(&self, kind: Kind) -> Earnings {
        let is_compared = |trial: &Trial| trial.promoted_by_kind()[kind.index()] > 0;
        match self.kinds[kind.index()].verdict {
            _ if self.trial.as_ref().is_some_and(is_compared) => Earnings::Pending,
            Verdict::Kept { per_s } => Earnings::Measured(per_s),
            Verdict::Stopped { .. } => Earnings::Measured(0),
            Verdict::Open | Verdict::Undecided => Earnings::Assumed,
        }
    }
}

impl OfKind {
    /// The counts of the latest plan become those of the one before. A stop ends after its pause, or when there are
    /// twice as many candidates, once another trial can be paid for.
    fn next_plan(&mut self, now: Duration, credit: Credit) {
        (self.before, self.now) = (self.now, Count::default());
        let Verdict::Stopped { until, candidates } = self.verdict else { return };
        let is_over = until <= now || self.before.windows > 2 * candidates;
        if is_over && credit.left == CREDIT_MAX {
            self.verdict = Verdict::Open;
        }
    }

    /// Forgets what holds for other work only.
    fn forget(&mut self) {
        if !matches!(self.verdict, Verdict::Kept { .. }) {
            self.verdict = Verdict::Open;
        }
    }

    fn is_worth_a_trial(&self) -> bool {
        self.verdict == Verdict::Open && self.before.windows >= CANDIDATES_MIN
    }

    fn lengthen_pause(&mut self) -> Duration {
        self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        self.pause
    }
}

impl Count {
    fn add(&mut self, assumed_per_s: u64) {
        self.windows += 1;
        self.assumed_per_s = self.assumed_per_s.saturating_add(assumed_per_s);
    }
}

impl Credit {
    /// Spends the time since the latest plan if candidates waited, and earns a part of it else.
    fn pass(&mut self, now: Duration, has_waited: bool) {
        let time = now.saturating_sub(self.at);
        self.left = match has_waited {
            true => self.left.saturating_sub(time),
            false => (self.left + time / CREDIT_PART).min(CREDIT_MAX),
        };
        self.at = now;
    }
}
