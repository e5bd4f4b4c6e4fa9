//! One VM in the daemon's table.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_attach::guarantee::{GuaranteeEvent, GuaranteeWatch, may_promote, pursuit_policy};
use wideleaf_control::protocol::{LEFT_ALONE_S_MAX, Limits, PriceOfHugePage, SettingName, Settings};
use wideleaf_control::view::{BackingView, Care, VmView, WorkView};
use wideleaf_memory::manager::OutOfReach;
use wideleaf_policies::market::Allowances;
use wideleaf_policies::node::NODES_MAX;
use wideleaf_policies::{BudgetLimits, Bytes, HugePagePrice, NodeId, PerTenThousand, TouchedFrom};

use super::kept_view::KeptView;
use super::offer::Offer;
use super::reported::ReportedWindows;
use super::{SharedCare, now_s};
use crate::config::{PolicySetting, Wanted};
use crate::guests::{Found, WindowCounts};
use crate::metrics::LARGE;
use crate::persistent_counters;
use crate::server::ConnectionId;
use crate::share::Claim;
use crate::state::Remembered;

/// Time at which a guest is no longer left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeftAloneUntil {
    at: Instant,
    /// The same in seconds since the epoch, for the next daemon.
    at_s: u64,
}

impl LeftAloneUntil {
    pub(super) fn after(seconds: u64) -> LeftAloneUntil {
        LeftAloneUntil { at: Instant::now() + Duration::from_secs(seconds), at_s: now_s().saturating_add(seconds) }
    }

    /// As an earlier daemon noted it. A clock that was set back makes it no longer than a client may ask for.
    pub(super) fn noted(at_s: u64) -> Option<LeftAloneUntil> {
        let left = at_s.saturating_sub(now_s()).min(LEFT_ALONE_S_MAX);
        (left > 0).then(|| LeftAloneUntil::after(left))
    }

    pub(super) fn is_over(self, now: Instant) -> bool {
        self.at <= now
    }
}

/// Manager of its pages.
pub(super) enum Hands {
    /// A manager of this daemon.
    Attached(SharedCare),
    /// The process that runs it, which reports over this connection.
    Registered(ConnectionId),
}

/// One VM in the table.
pub(super) struct Vm {
    pub(super) found: Found,
    /// Settings over the socket or from metadata.
    pub(super) said: Settings,
    /// Effective settings, of the configuration and `said`.
    pub(super) wanted: Wanted,
    pub(super) hands: Hands,
    /// Limits that it received last; `None` before the first ones.
    pub(super) limits: Option<BudgetLimits>,
    pub(super) may_grow: bool,
    /// Policy that its manager received last, if this daemon has the manager.
    pub(super) applied: PolicySetting,
    /// Policy of a registered VM when the pursuit of its guarantee began, until it reports that policy again.
    registered_with: Option<String>,
    /// Reason why it is below its guarantee, once that is reported.
    pub(super) missed_because: Option<String>,
    /// Counters of earlier daemons.
    before: WorkView,
    /// Its latest view.
    seen: KeptView,
    /// Its windows, counted at the last tick, if this daemon has its manager.
    pub(super) counts: WindowCounts,
    /// Its windows according to its own process, if that manages it.
    pub(super) windows: ReportedWindows,
    /// Its bids for huge pages, while the host lacks them.
    pub(super) offer: Option<Offer>,
    /// Price of a huge page for it, and what it may give back until it is told; `None` while none are short.
    pub(super) price: Option<HugePagePrice>,
    /// Whether its manager has a price, if this daemon has the manager.
    pub(super) has_price: bool,
    /// Pages that it was allowed to give back of late: its latest view may not show that they are gone.
    pub(super) allowed: Allowances,
    /// Number of free huge pages that `/proc/buddyinfo` does not count, until its process is told of them.
    pub(super) promised: u64,
    /// Time at which it is no longer left alone as a client asked; `None` where no client asked.
    pub(super) left_alone_until: Option<LeftAloneUntil>,
    /// Held while its settings are changed, so that no change is made from settings that another one replaces.
    pub(super) setting: Arc<Mutex<()>>,
    watch: GuaranteeWatch,
    activity: Activity,
    is_busy: bool,
}

/// Factor of a VM's weight while its guarantee is pursued.
const PURSUIT_WEIGHT: u32 = 8;

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
            applied: wanted.policy.clone(),
            registered_with: None,
            wanted,
            hands,
            limits: None,
            may_grow: true,
            missed_because: None,
            before,
            activity: activity(&seen),
            seen: seen.into(),
            counts: WindowCounts::default(),
            windows: ReportedWindows::default(),
            offer: None,
            price: None,
            has_price: false,
            allowed: Allowances::default(),
            promised: 0,
            left_alone_until: None,
            setting: Arc::default(),
            watch: GuaranteeWatch::default(),
            is_busy: false,
        }
    }

    /// `wanted` with the settings that are fixed at attach as they were then: a reload changes all others. An unset
    /// fixed setting takes effect at the next attach.
    pub(super) fn keeping_settled(&self, changes: &Settings, wanted: Wanted) -> Result<Wanted, String> {
        if let Some(key) = self.settled_otherwise(changes) {
            return Err(format!("{key} is fixed when a guest is attached: detach it, and attach it again"));
        }
        let Wanted { collapse_shared, qmp, .. } = &self.wanted;
        Ok(Wanted { collapse_shared: *collapse_shared, qmp: qmp.clone(), ..wanted })
    }

    /// The first key of `said` that differs from a setting fixed at attach.
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

    /// Stores a view. A gate that closes or opens is logged.
    pub(super) fn see(&mut self, view: VmView) {
        match (&self.seen.care, &view.care) {
            (Care::LeftAlone { reason: before }, Care::LeftAlone { reason }) if before == reason => {}
            (_, Care::LeftAlone { reason }) => tracing::info!("{} is left alone: {reason}", self.found.name),
            (Care::LeftAlone { .. }, _) => tracing::info!("{} is managed again", self.found.name),
            _ => {}
        }
        self.log_recoveries(&view);
        self.seen = view.into();
    }

    /// Logs the recoveries that are over since the view before.
    fn log_recoveries(&self, view: &VmView) {
        let recoveries = |view: &VmView| view.work.as_ref().map(|work| work.recoveries.clone()).unwrap_or_default();
        let (before, name) = (recoveries(&self.seen), &self.found.name);
        for (event, now) in recoveries(view) {
            let before = before.get(&event).copied().unwrap_or_default();
            if let (true, Some(seconds)) = (now.done > before.done, now.last_s) {
                tracing::info!("{name}: 99 % of its large pages are back {seconds:.1} s after {event}");
            }
            if now.cut_off > before.cut_off {
                tracing::warn!("{name}: its large pages are not all back after {event}: see `wideleaf explain {name}`");
            }
        }
    }

    /// Updates whether it had work since the last call, once a second.
    pub(super) fn count_activity(&mut self) {
        let now = activity(&self.seen);
        self.is_busy = now != self.activity;
        self.activity = now;
    }

    /// Its claim on the budget. While its guarantee is pursued it goes before others, and has
    /// work; so it has after an event.
    pub(super) fn claim(&self) -> Claim {
        let Wanted { weight, copy_per_second, .. } = self.wanted;
        let is_pursued = self.is_pursued();
        let is_recovering = self.seen.work.as_ref().is_some_and(|work| work.is_recovering);
        let weight = if is_pursued { weight.saturating_mul(PURSUIT_WEIGHT) } else { weight };
        Claim { weight, is_busy: is_pursued || is_recovering || self.is_busy, copy_per_second_max: copy_per_second }
    }

    /// Its backing as of its latest view; `None` where it cannot be seen.
    pub(super) fn backing(&self) -> Option<BackingView> {
        self.seen.backing
    }

    /// The NUMA node to which its huge pages belong, by its latest view: all of its vCPUs ran there last, and at least
    /// four fifths of its memory is there. `None`: of several nodes, not known, or the host has one node.
    pub(super) fn node(&self) -> Option<NodeId> {
        let numa = self.seen.numa.as_ref().filter(|numa| numa.nodes.len() > 1)?;
        let mut with_vcpus = numa.nodes.iter().filter(|node| node.vcpus > 0);
        let only = with_vcpus.next().filter(|_| with_vcpus.next().is_none())?;
        let known = numa.nodes.iter().fold(0_u64, |known, node| known.saturating_add(node.memory));
        let is_there = known == 0 || PerTenThousand::of(only.memory, known).get() >= TouchedFrom::ALMOST_ALL.get();
        (is_there && only.node < NODES_MAX).then_some(NodeId(only.node))
    }

    /// Larger share of the guarantees of this daemon and of its own process, in ten thousandths.
    pub(super) fn guaranteed_share(&self) -> Option<u32> {
        self.wanted.guarantee.share().max(self.seen.guarantee.share())
    }

    /// Its policy while no guarantee is pursued.
    fn own_policy(&self) -> Option<String> {
        let is_set = matches!(self.hands, Hands::Attached(_)) || self.said.policy.is_some();
        let of_registered = || self.registered_with.clone().or_else(|| self.seen.policy.clone());
        if is_set { Some(self.wanted.policy.to_string()) } else { of_registered() }
    }

    /// Whether its guarantee is pursued. A policy that promotes nothing leaves none to pursue.
    pub(super) fn is_pursued(&self) -> bool {
        self.watch.is_pursued() && self.own_policy().is_some_and(|own| may_promote(&own))
    }

    /// Policy that it should have now: that of the pursuit, while its guarantee is pursued.
    fn due_policy(&self) -> Option<String> {
        let own = self.own_policy()?;
        Some(if self.is_pursued() { pursuit_policy(&own).to_owned() } else { own })
    }

    /// Settings that its manager should have now, if it does not have them.
    pub(super) fn due(&self) -> Option<Wanted> {
        let policy = PolicySetting::parse(&self.due_policy()?).expect("it comes from a policy");
        (policy != self.applied).then(|| Wanted { policy, ..self.wanted.clone() })
    }

    /// Keeps the policy of a registered VM from the begin of a pursuit until it reports that policy again.
    pub(super) fn keep_own_policy(&mut self) {
        match &self.registered_with {
            None if self.watch.is_pursued() => {
                self.registered_with = self.seen.policy.clone();
                if let (Some(due), true) = (self.due_policy(), self.is_pursued()) {
                    tracing::info!("{}: policy {due} for its guarantee of {}", self.found.name, self.wanted.guarantee);
                }
            }
            Some(own) if !self.watch.is_pursued() && self.seen.policy.as_ref() == Some(own) => {
                self.registered_with = None;
            }
            _ => {}
        }
    }

    /// Whether its bloat has reached the limit, with that of earlier managers.
    pub(super) fn is_bloated(&self) -> bool {
        let bloat = self.seen.work.as_ref().map_or(0, |work| work.bloat).saturating_add(self.before.bloat);
        self.wanted.bloat_max.is_some_and(|max| bloat >= max.get())
    }

    pub(super) fn watch_guarantee(&mut self, now: Duration, grace: Duration) -> Option<GuaranteeEvent> {
        self.watch.update(self.wanted.guarantee, self.seen.coverage(), now, grace)
    }

    /// Full description of the VM.
    pub(super) fn view(&self) -> VmView {
        let mut view = self.seen.shown(Instant::now());
        view.guarantee = self.wanted.guarantee;
        view.work = view.work.map(|work| persistent_counters::continued(&self.before, &work));
        let present = if self.care().is_some() { Some(self.applied.to_string()) } else { self.seen.policy.clone() };
        if let (true, Some(present), Some(own)) = (self.is_pursued(), present, self.own_policy())
            && present != own
        {
            let guarantee = self.wanted.guarantee;
            view.notes
                .insert(0, format!("its guarantee of {guarantee} is pursued: policy {present}, later {own} again"));
        }
        if let Some(reason) = &self.missed_because {
            view.notes.insert(0, format!("it is below its guarantee of {}: {reason}", self.wanted.guarantee));
        }
        if let Some(price) = self.price.filter(|price| price.cycles_per_s > 0) {
            let saved = price.cycles_per_s as f64 / 1e6;
            view.notes.push(format!(
                "huge pages are short on this host: a window of this VM gets one if that saves {saved:.2} M cycles/s"
            ));
        }
        if self.wanted.out_of_reach != OutOfReach::default() {
            let part = self.wanted.out_of_reach;
            let bound = format!("memory is out of its reach for at most {part} of any 100 ms");
            view.notes.push(format!("while pages change their size, {bound}"));
        }
        if self.is_bloated() {
            view.notes.push("it has taken as much memory for large pages as its bloat_max allows".into());
        }
        view
    }

    /// Its windows by reason, and the large ones.
    pub(super) fn windows_by_reason(&self) -> BTreeMap<String, u64> {
        let reported = self.windows.explanation().map(WindowCounts::from);
        let WindowCounts { large, reasons } = reported.unwrap_or_else(|| self.counts.clone());
        reasons.into_iter().chain(large.map(|windows| (LARGE.to_owned(), windows))).collect()
    }

    /// Counters since this daemon took it. Scraped counters begin at zero with each daemon. The saved totals of a
    /// killed one are some seconds old, and a counter that drops a little and rises again looks to Prometheus as if
    /// all of it had come again.
    pub(super) fn counted(&self) -> Option<WorkView> {
        self.seen.work.clone()
    }

    /// Whether it has been below its guarantee for longer than the grace time.
    pub(super) fn is_guarantee_missed(&self) -> bool {
        self.watch.is_missed()
    }

    /// Record that survives the daemon. A registered VM comes back by itself: its process registers again.
    pub(super) fn remembered(&self) -> Option<Remembered> {
        let Hands::Attached(_) = self.hands else { return None };
        let work = self
            .seen
            .work
            .as_ref()
            .map_or_else(|| self.before.clone(), |work| persistent_counters::continued(&self.before, work));
        Some(Remembered {
            process: self.found.process,
            name: self.found.name.clone(),
            said: self.said.clone(),
            work: persistent_counters::totals(&work),
            left_alone_until_s: self.left_alone_until.map(|until| until.at_s),
        })
    }

    /// Limits for a registered VM, and the price of huge pages. It is told once how many windows it may vacate, and
    /// once of each free page that it cannot see. Its process does not know of a memory shortage, so its copy limit is
    /// then zero. Its policy stays until an operator sets another, or its guarantee is pursued.
    pub(super) fn limits_reply(&mut self) -> Limits {
        let limits = self.limits.unwrap_or_default();
        let copy = if self.may_grow { limits.copy_per_second } else { Bytes::ZERO };
        let policy = self.due_policy().filter(|policy| self.seen.policy.as_ref() != Some(policy));
        let own_policy = self.own_policy().filter(|own| self.is_pursued() && pursuit_policy(own) != own);
        let wants_windows = self.windows.are_wanted(Instant::now());
        let huge_page = self.price.map(|price| {
            self.price = Some(HugePagePrice { may_vacate: 0, ..price });
            let HugePagePrice { cycles_per_s, may_vacate, free } = price;
            PriceOfHugePage { cycles_per_s, may_vacate, free }
        });
        let (copy_per_second, cpu_share) = (copy.get(), limits.cpu_share.get());
        let out_of_reach = Some(self.wanted.out_of_reach.to_string());
        let free_huge_pages = std::mem::take(&mut self.promised);
        Limits {
            copy_per_second,
            cpu_share,
            out_of_reach,
            policy,
            own_policy,
            wants_windows,
            huge_page,
            free_huge_pages,
        }
    }
}

fn activity(view: &VmView) -> Activity {
    view.work.as_ref().map_or((0, 0, 0), |work| (persistent_counters::actions(work), work.copied, work.budget_refusals))
}

/// `before` with the settings of `changes`, and without those that they unset. These stay unset: metadata of the
/// domain that libvirt reports again do not set them.
pub(super) fn merged(before: &Settings, changes: &Settings) -> Settings {
    let kept = |name: SettingName| !changes.unset.contains(&name);
    let Settings { policy, guarantee, out_of_reach, collapse_shared, qmp, mut unset } = before.clone();
    for name in &changes.unset {
        if !unset.contains(name) {
            unset.push(*name);
        }
    }
    let mut merged = Settings {
        policy: changes.policy.clone().or(policy.filter(|_| kept(SettingName::Policy))),
        guarantee: changes.guarantee.clone().or(guarantee.filter(|_| kept(SettingName::Guarantee))),
        out_of_reach: changes.out_of_reach.clone().or(out_of_reach.filter(|_| kept(SettingName::OutOfReach))),
        collapse_shared: changes.collapse_shared.or(collapse_shared.filter(|_| kept(SettingName::CollapseShared))),
        qmp: changes.qmp.clone().or(qmp.filter(|_| kept(SettingName::Qmp))),
        unset: Vec::new(),
    };
    unset.retain(|name| match name {
        SettingName::Policy => merged.policy.is_none(),
        SettingName::Guarantee => merged.guarantee.is_none(),
        SettingName::OutOfReach => merged.out_of_reach.is_none(),
        SettingName::CollapseShared => merged.collapse_shared.is_none(),
        SettingName::Qmp => merged.qmp.is_none(),
    });
    merged.unset = unset;
    merged
}
