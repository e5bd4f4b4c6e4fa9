//! One VM in the daemon's table.

use std::time::Duration;

use wideleaf_control::protocol::{Limits, SettingName, Settings};
use wideleaf_control::view::{Care, VmView, WorkView};
use wideleaf_policies::{BudgetLimits, Bytes};

use super::SharedCare;
use crate::carry;
use crate::config::Wanted;
use crate::guarantee::{GuaranteeEvent, GuaranteeWatch};
use crate::guests::Found;
use crate::server::ConnectionId;
use crate::share::Claim;
use crate::state::Remembered;

/// In whose hands its pages are.
pub(super) enum Hands {
    /// Ours.
    Attached(SharedCare),
    /// Of the process that runs it, which tells us of it over this connection.
    Registered(ConnectionId),
}

/// One VM.
pub(super) struct Vm {
    pub(super) found: Found,
    /// Over the socket.
    pub(super) said: Settings,
    /// By the configuration and what was said.
    pub(super) wanted: Wanted,
    pub(super) hands: Hands,
    /// What was told last. `None`: nothing yet.
    pub(super) limits: Option<BudgetLimits>,
    pub(super) may_grow: bool,
    /// Why it is under its guarantee, once it is reported.
    pub(super) missed_because: Option<String>,
    /// Counted by earlier daemons.
    before: WorkView,
    /// As it tells it.
    seen: VmView,
    watch: GuaranteeWatch,
    activity: Activity,
    is_busy: bool,
}

/// Totals that rise when a VM has work: done or refused.
type Activity = (u64, u64, u64);

impl Vm {
    pub(super) fn new(
        found: Found,
        said: Settings,
        wanted: Wanted,
        before: WorkView,
        hands: Hands,
        seen: VmView,
    ) -> Vm {
        Vm {
            found,
            said,
            wanted,
            hands,
            limits: None,
            may_grow: true,
            missed_because: None,
            before,
            activity: activity(&seen),
            seen,
            watch: GuaranteeWatch::default(),
            is_busy: false,
        }
    }

    /// `wanted`, with what was settled when the guest was attached as it was then: a reload changes all the rest. What of that is unset is
    /// forgotten for the next time.
    pub(super) fn keeping_settled(&self, changes: &Settings, wanted: Wanted) -> Result<Wanted, String> {
        if let Some(key) = self.settled_otherwise(changes) {
            return Err(format!("{key} is settled when a guest is attached: detach it, and attach it again"));
        }
        let Wanted { collapse_shared, qmp, .. } = &self.wanted;
        Ok(Wanted { collapse_shared: *collapse_shared, qmp: qmp.clone(), ..wanted })
    }

    /// The first key of `said` that was settled as something else when the guest was attached.
    pub(super) fn settled_otherwise(&self, said: &Settings) -> Option<&'static str> {
        let Hands::Attached(_) = self.hands else { return None };
        let Wanted { collapse_shared, qmp, .. } = &self.wanted;
        let of_shared = said.collapse_shared.is_some_and(|may| may != *collapse_shared).then_some("collapse_shared");
        of_shared.or((said.qmp.is_some() && said.qmp != *qmp).then_some("qmp"))
    }

    pub(super) fn care(&self) -> Option<SharedCare> {
        match &self.hands {
            Hands::Attached(care) => Some(care.clone()),
            Hands::Registered(_) => None,
        }
    }

    /// Takes a look into account. A gate that closes or opens is worth a line.
    pub(super) fn see(&mut self, view: VmView) {
        match (&self.seen.care, &view.care) {
            (Care::LeftAlone { reason: before }, Care::LeftAlone { reason }) if before == reason => {}
            (_, Care::LeftAlone { reason }) => tracing::info!("{} is left alone: {reason}", self.found.name),
            (Care::LeftAlone { .. }, _) => tracing::info!("{} is acted on again", self.found.name),
            _ => {}
        }
        self.seen = view;
    }

    /// Whether it had work since the last time: once a second.
    pub(super) fn count_activity(&mut self) {
        let now = activity(&self.seen);
        self.is_busy = now != self.activity;
        self.activity = now;
    }

    pub(super) fn claim(&self) -> Claim {
        Claim { weight: self.wanted.weight, is_busy: self.is_busy, copy_per_second_max: self.wanted.copy_per_second }
    }

    /// Whether it has as much memory as it may only because its pages are large.
    pub(super) fn is_bloated(&self) -> bool {
        let bloat = self.seen.work.as_ref().map_or(0, |work| work.bloat);
        self.wanted.bloat_max.is_some_and(|max| bloat >= max.get())
    }

    pub(super) fn watch_guarantee(&mut self, now: Duration, grace: Duration) -> Option<GuaranteeEvent> {
        self.watch.update(self.wanted.guarantee, self.seen.coverage(), now, grace)
    }

    /// All that is known of it.
    pub(super) fn view(&self) -> VmView {
        let mut view = self.seen.clone();
        view.guarantee = self.wanted.guarantee;
        view.work = view.work.map(|work| carry::continued(&self.before, &work));
        if let Some(reason) = &self.missed_because {
            view.notes.insert(0, format!("it is under its guarantee of {}: {reason}", self.wanted.guarantee));
        }
        if self.is_bloated() {
            view.notes.push("it has taken as much memory for large pages as its bloat_max allows".into());
        }
        view
    }

    /// What was counted since this daemon took it. What is scraped begins at nothing with each daemon: the totals of one that was killed are
    /// some seconds old, and a counter that goes back by a little and then on looks to Prometheus as if all of it had come again.
    pub(super) fn counted(&self) -> Option<WorkView> {
        self.seen.work.clone()
    }

    /// Whether it is under its guarantee for longer than the grace time.
    pub(super) fn is_guarantee_missed(&self) -> bool {
        self.watch.is_missed()
    }

    /// What outlives the daemon. A VM of ours comes back by itself: its process registers again.
    pub(super) fn remembered(&self) -> Option<Remembered> {
        let Hands::Attached(_) = self.hands else { return None };
        let work =
            self.seen.work.as_ref().map_or_else(|| self.before.clone(), |work| carry::continued(&self.before, work));
        Some(Remembered {
            process: self.found.process,
            name: self.found.name.clone(),
            said: self.said.clone(),
            work: carry::totals(&work),
        })
    }

    /// What a process of ours is told. It knows nothing of memory that runs short, so it copies nothing then; the policy is its own until
    /// somebody sets another.
    pub(super) fn limits_reply(&self) -> Limits {
        let limits = self.limits.unwrap_or_default();
        let copy = if self.may_grow { limits.copy_per_second } else { Bytes::ZERO };
        let policy = self.said.policy.as_ref().map(|_| self.wanted.policy.to_string());
        let policy = policy.filter(|policy| self.seen.policy.as_ref() != Some(policy));
        Limits { copy_per_second: copy.get(), cpu_share: limits.cpu_share.get(), policy }
    }
}

fn activity(view: &VmView) -> Activity {
    view.work.as_ref().map_or((0, 0, 0), |work| (carry::actions(work), work.copied, work.budget_refusals))
}

/// `before` with what `changes` says, and without what they unset.
pub(super) fn merged(before: &Settings, changes: &Settings) -> Settings {
    let kept = |name: SettingName| !changes.unset.contains(&name);
    let Settings { policy, guarantee, collapse_shared, qmp, unset: _ } = before.clone();
    Settings {
        policy: changes.policy.clone().or(policy.filter(|_| kept(SettingName::Policy))),
        guarantee: changes.guarantee.clone().or(guarantee.filter(|_| kept(SettingName::Guarantee))),
        collapse_shared: changes.collapse_shared.or(collapse_shared.filter(|_| kept(SettingName::CollapseShared))),
        qmp: changes.qmp.clone().or(qmp.filter(|_| kept(SettingName::Qmp))),
        unset: Vec::new(),
    }
}
