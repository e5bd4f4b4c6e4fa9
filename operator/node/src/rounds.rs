//! The loop of the agent.
//!
//! ```text
//!   guests of wideleafd ─▶ place of each ─▶ wishes passed on ─▶ verdicts ─▶ objects written where due
//!        └── silent: rounds go on, and conditions become Unknown after a minute
//!   figures of wideleafd ─▶ node written where due
//! ```
//!
//! A round begins after each period, and soon after a change of a pod, a VMI or a call of a hook. Nothing is kept for
//! an API server that is away: each round begins from what is true then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::runtime::events::EventType;
use parking_lot::{Mutex, MutexGuard};
use wideleaf_control::client::ClientError;
use wideleaf_control::protocol::Request;
use wideleaf_control::view::{Care, Explanation, VmView, Vmm};

use crate::counters::Counters;
use crate::daemon::{Daemon, is_for_now};
use crate::details::{Details, STATUS};
use crate::matching::{Place, place, pod_of};
use crate::objects::PodFacts;
use crate::publish::{Kind, Publisher, Target};
use crate::store::{Store, VmiApi};
use crate::verdict::{Status, Verdict};
use crate::wishes::{Annotations, Wishes};

/// Time that a question to wideleafd may take.
const QUESTION_WITHIN: Duration = Duration::from_secs(5);

/// Time that a change by wideleafd may take.
const CHANGE_WITHIN: Duration = Duration::from_secs(10);

/// Maximum age of the reasons why a guest is not covered.
const EXPLANATION_AGE_MAX: Duration = Duration::from_secs(30);

/// Time for which wideleafd may be silent, or a guest not there, before its condition becomes unknown: a restart takes
/// less.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Pause after a refused setting before it is tried again. New wishes are tried at once.
const REFUSAL_PAUSE: Duration = Duration::from_secs(60);

/// Time for which changes are gathered before a round.
const GATHER: Duration = Duration::from_millis(200);

/// Least time between the begins of two rounds, which bounds their cost while many objects change.
const ROUND_EVERY: Duration = Duration::from_secs(1);

/// Upper bound on the mistakes in annotations that are remembered for a guest, so that each is one event.
const MISTAKES_MAX: usize = 8;

/// Time after which a migration that is over ends the hold of its guest, also where its begin was not seen.
const HOLD_MIN: Duration = Duration::from_secs(15);

/// Guest that is left alone for a migration.
#[derive(Clone, Copy, Debug)]
struct Hold {
    pid: u32,
    since: Instant,
    is_under_way: bool,
}

/// Guests that are left alone for their migration, by UID of the VMI: written by hooks, ended by rounds.
#[derive(Debug, Default)]
pub struct Holds(Mutex<BTreeMap<String, Hold>>);

impl Holds {
    /// Remembers that the guest of a VMI is left alone.
    pub fn add(&self, uid: &str, pid: u32, now: Instant) {
        self.all().insert(uid.to_owned(), Hold { pid, since: now, is_under_way: false });
    }

    /// Takes the guests out that need not be left alone any more: their migration is over.
    fn over(&self, is_over: impl Fn(&str) -> Option<bool>, now: Instant) -> Vec<(String, Hold)> {
        let mut ended = Vec::new();
        self.all().retain(|uid, hold| {
            let state = is_over(uid);
            hold.is_under_way |= state == Some(false);
            let is_known = hold.is_under_way || now.saturating_duration_since(hold.since) >= HOLD_MIN;
            // A VMI that is gone or has moved has no guest here.
            let is_ended = state != Some(false) && is_known;
            if is_ended {
                ended.push((uid.clone(), *hold));
            }
            !is_ended
        });
        ended
    }

    /// Keeps a hold that could not be ended, for the next round; a later hold of the same VMI stays.
    fn keep(&self, uid: String, hold: Hold) {
        self.all().entry(uid).or_insert(hold);
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Hold>> {
        self.0.lock()
    }
}

/// State of the loop for `/healthz`.
#[derive(Debug, Default)]
pub struct Health {
    /// End of the latest round.
    pub round_at: Option<Instant>,
    /// Why wideleafd gave no answer at the latest round.
    pub daemon: Option<String>,
    /// Why the API server could not be written to.
    pub api: Option<String>,
}

/// Health that several tasks share.
pub type SharedHealth = Arc<Mutex<Health>>;

/// What is known of one guest between rounds.
#[derive(Debug, Default)]
struct Known {
    /// Wishes that wideleafd has received.
    passed: Option<Wishes>,
    refused: Option<(Wishes, Instant)>,
    /// The latest explanation, and the time of the latest question, which may have had no answer.
    explained: Option<(Option<Explanation>, Instant)>,
}

/// What is known of one object between rounds.
#[derive(Debug, Default)]
struct Seen {
    guest_at: Option<Instant>,
    mistakes: Vec<String>,
}

/// Summary of one round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Guests of wideleafd.
    pub guests: usize,
    /// Guests that belong to a VMI or a pod of this node.
    pub placed: usize,
    /// Guests among them that are covered.
    pub covered: usize,
}

/// The loop of the agent.
pub struct Rounds {
    node: String,
    daemon: Daemon,
    store: Arc<Store>,
    holds: Arc<Holds>,
    counters: Arc<Counters>,
    health: SharedHealth,
    publisher: Publisher,
    guests: BTreeMap<(u32, u64), Known>,
    objects: BTreeMap<String, Seen>,
    silent_since: Option<Instant>,
    /// Begin of the latest round in which wideleafd did not explain a guest in time.
    unexplained_at: Option<Instant>,
    complaint: Option<String>,
}

/// A guest and the object that has its condition.
struct Placed {
    guest: VmView,
    target: Target,
    wishes: Wishes,
    mistakes: Vec<String>,
    /// Wishes that an earlier agent has passed on.
    asked_before: Wishes,
}

/// Memory in large pages of guests of pods that request the node's resource, by UID of the pod: what the guests hold,
/// and what the pod requests, both in bytes.
#[derive(Debug, Default)]
struct Held(BTreeMap<String, (u64, u64)>);

impl Held {
    fn add(&mut self, pod: &PodFacts, guest: &VmView) {
        if pod.has_ended {
            return;
        }
        let requested = pod.requested_gib.saturating_mul(1 << 30);
        let (held, _) = self.0.entry(pod.identity.uid.clone()).or_insert((0, requested));
        *held = held.saturating_add(guest.backing.map_or(0, |backing| backing.huge_2m + backing.giant_1g));
    }

    /// What the node's resource counts beside promotable memory. The scheduler subtracts of each pod what it requests:
    /// what its guests hold beyond that is not free for other pods.
    fn bytes(&self) -> u64 {
        self.0.values().map(|(held, requested)| *held.min(requested)).fold(0, u64::saturating_add)
    }
}

impl Rounds {
    /// A loop that has not begun.
    pub fn new(
        node: &str,
        daemon: Daemon,
        store: Arc<Store>,
        holds: Arc<Holds>,
        counters: Arc<Counters>,
        health: SharedHealth,
        publisher: Publisher,
    ) -> Rounds {
        Rounds {
            node: node.to_owned(),
            daemon,
            store,
            holds,
            counters,
            health,
            publisher,
            guests: BTreeMap::new(),
            objects: BTreeMap::new(),
            silent_since: None,
            unexplained_at: None,
            complaint: None,
        }
    }

    /// Runs for ever.
    pub async fn run(mut self, period: Duration) {
        loop {
            let begun = Instant::now();
            self.round().await;
            let store = Arc::clone(&self.store);
            tokio::select! {
                () = tokio::time::sleep(period.saturating_sub(begun.elapsed())) => {}
                () = store.woken() => {
                    let since = begun.elapsed();
                    tokio::time::sleep(ROUND_EVERY.saturating_sub(since).max(GATHER)).await;
                }
            }
        }
    }

    /// One round.
    ///
    /// # Errors
    /// wideleafd gave no answer, or the API server did not take a write: the round is over all the same.
    pub async fn once(&mut self) -> Result<Summary, String> {
        let summary = self.round().await;
        let health = self.health.lock();
        match (&health.daemon, &health.api) {
            (Some(why), _) => Err(why.clone()),
            (None, Some(why)) => Err(format!("cannot write to the API server: {why}")),
            (None, None) => Ok(summary),
        }
    }

    async fn round(&mut self) -> Summary {
        let now = Instant::now();
        let listed = self.daemon.guests(QUESTION_WITHIN).await;
        let (summary, daemon) = match listed {
            Ok(guests) => (self.with_guests(guests, now).await, None),
            Err(error) => {
                self.without_daemon(&error, now).await;
                (Summary::default(), Some(error.to_string()))
            }
        };
        self.counters.round(if daemon.is_some() { "no_daemon" } else { "done" });
        let api = self.publisher.trouble().map(str::to_owned);
        *self.health.lock() = Health { round_at: Some(Instant::now()), daemon, api };
        summary
    }

    async fn without_daemon(&mut self, error: &ClientError, now: Instant) {
        let text = error.to_string();
        if self.complaint.as_ref() != Some(&text) {
            tracing::warn!("{text}");
            self.complaint = Some(text.clone());
        }
        let since = *self.silent_since.get_or_insert(now);
        // A new daemon has forgotten nothing, but one without its state file has.
        self.guests.values_mut().for_each(|known| known.passed = None);
        if now.saturating_duration_since(since) < SILENCE_MAX {
            return;
        }
        for target in self.published_targets().into_iter().chain(self.adopted_targets()) {
            self.publisher.object(&target, &Verdict::silent(&text), None, now).await;
        }
    }

    async fn with_guests(&mut self, guests: Vec<VmView>, now: Instant) -> Summary {
        if self.complaint.take().is_some() {
            tracing::info!("wideleafd answers again");
        }
        self.silent_since = None;
        self.end_holds(now).await;
        let keys: Vec<(u32, u64)> = guests.iter().map(|guest| (guest.pid, guest.started_at)).collect();
        self.guests.retain(|key, _| keys.contains(key));
        let mut summary = Summary { guests: guests.len(), ..Summary::default() };
        let Some((mut placed, held)) = self.places(guests) else { return summary };
        summary.placed = placed.len();
        // A try may rest all writes: each object has its turn, and one that fails again and again is not always first.
        placed.sort_by_key(|placed| self.publisher.tried_at(&placed.target.identity.uid));
        for placed in &placed {
            self.pass_on(placed, now).await;
        }
        for placed in placed {
            summary.covered += usize::from(self.judge(placed, now).await == Status::True);
        }
        self.guests_that_ended(now).await;
        self.figures(held, now).await;
        summary
    }

    /// Guests with their objects, and the memory of [`Held`]. `None` while pods and VMIs are not known.
    fn places(&mut self, guests: Vec<VmView>) -> Option<(Vec<Placed>, u64)> {
        let objects = self.store.objects();
        if !objects.are_known() {
            return None;
        }
        let mut placed: BTreeMap<String, Placed> = BTreeMap::new();
        let (mut held, mut counts) = (Held::default(), [("vmi", 0), ("pod", 0), ("elsewhere", 0), ("none", 0)]);
        for guest in guests {
            let found = place(&guest, &objects);
            let pod = found.as_ref().and_then(Place::pod);
            if let Some(pod) = pod {
                held.add(pod, &guest);
            }
            let (of_vmi, of_pod) = match &found {
                Some(Place::Vmi(vmi, _)) => (Some(&vmi.annotations), pod.map(|pod| &pod.annotations)),
                _ => (None, pod.map(|pod| &pod.annotations)),
            };
            let (wishes, mistakes) = Wishes::of(of_vmi, of_pod);
            let before = of_vmi.or(of_pod).and_then(|annotations| Details::parse(annotations.get(STATUS)?));
            let asked_before = before.filter(|before| before.node == self.node).map(|before| before.asked());
            let pod_identity = pod.map(|pod| pod.identity.clone());
            let (index, target) = match found {
                Some(Place::Vmi(vmi, _)) => {
                    let has_status = matches!(objects.vmi_api, VmiApi::Present { has_status: true });
                    (0, Target { kind: Kind::Vmi { has_status }, identity: vmi.identity, pod: pod_identity })
                }
                Some(Place::Pod(pod)) => (1, Target { kind: Kind::Pod, identity: pod.identity, pod: None }),
                Some(Place::Elsewhere(_)) => {
                    counts[2].1 += 1;
                    continue;
                }
                None => {
                    counts[3].1 += 1;
                    continue;
                }
            };
            counts[index].1 += 1;
            let asked_before = asked_before.unwrap_or_default();
            let candidate = Placed { guest, target, wishes, mistakes, asked_before };
            let uid = candidate.target.identity.uid.clone();
            // A pod may run several guests, and has one condition: that of the largest.
            if placed.get(&uid).is_none_or(|known| size(&known.guest) < size(&candidate.guest)) {
                placed.insert(uid, candidate);
            }
        }
        self.publisher.keep(|uid| objects.has(uid));
        self.objects.retain(|uid, _| objects.has(uid));
        counts.into_iter().for_each(|(place, number)| self.counters.guests(place, number));
        Some((placed.into_values().collect(), held.bytes()))
    }

    /// Passes the wishes of annotations on to wideleafd, once.
    async fn pass_on(&mut self, placed: &Placed, now: Instant) {
        let Placed { guest, target, wishes, mistakes, asked_before } = placed;
        self.report_mistakes(target, mistakes).await;
        let known = self.guests.entry((guest.pid, guest.started_at)).or_default();
        let passed = known.passed.clone().unwrap_or_else(|| asked_before.clone());
        let is_refused = known
            .refused
            .as_ref()
            .is_some_and(|(refused, at)| refused == wishes && now.saturating_duration_since(*at) < REFUSAL_PAUSE);
        if known.passed.as_ref() == Some(wishes) || is_refused || guest.vmm == Vmm::Wideleaf {
            return;
        }
        if !wishes.is_any() && !passed.is_any() || !wishes.is_any() && guest.care == Care::Unmanaged {
            known.passed = Some(wishes.clone());
            return;
        }
        match self.daemon.settle(guest, wishes.settings(&passed), CHANGE_WITHIN).await {
            Ok(()) => {
                tracing::info!("{}: its annotations are in force", guest.name);
                (known.passed, known.refused) = (Some(wishes.clone()), None);
            }
            Err(error) if is_for_now(&error) => {
                tracing::debug!("{}: its annotations are passed on in the next round: {error}", guest.name);
            }
            Err(ClientError::Refused(why)) => {
                let is_new = known.refused.as_ref().is_none_or(|(refused, _)| refused != wishes);
                known.refused = Some((wishes.clone(), now));
                if is_new {
                    let note = format!("wideleafd refuses what the annotations ask for: {why}");
                    tracing::warn!("{}: {note}", guest.name);
                    self.publisher.event(target, EventType::Warning, "AnnotationRefused", &note).await;
                }
            }
            Err(error) => tracing::warn!("{}: cannot pass its annotations on: {error}", guest.name),
        }
    }

    async fn report_mistakes(&mut self, target: &Target, mistakes: &[String]) {
        let seen = self.objects.entry(target.identity.uid.clone()).or_default();
        let new: Vec<String> = mistakes.iter().filter(|mistake| !seen.mistakes.contains(mistake)).cloned().collect();
        seen.mistakes.retain(|known| mistakes.contains(known));
        seen.mistakes.extend(new.iter().cloned());
        seen.mistakes.truncate(MISTAKES_MAX);
        for mistake in new {
            tracing::warn!("{}/{}: {mistake}", target.identity.namespace, target.identity.name);
            self.publisher.event(target, EventType::Warning, "AnnotationInvalid", &mistake).await;
        }
    }

    /// Writes the condition of a guest where that is due.
    async fn judge(&mut self, placed: Placed, now: Instant) -> Status {
        let Placed { guest, target, wishes, .. } = placed;
        self.objects.entry(target.identity.uid.clone()).or_default().guest_at = Some(now);
        let verdict = Verdict::of(&guest, None);
        let explanation = if verdict.status == Status::False { self.explanation(&guest, now).await } else { None };
        let verdict = if explanation.is_some() { Verdict::of(&guest, explanation.as_ref()) } else { verdict };
        let known = self.guests.get(&(guest.pid, guest.started_at));
        let asked = known.and_then(|known| known.passed.clone()).unwrap_or(wishes);
        let details = Details::of(&self.node, &guest, explanation.as_ref(), &verdict, &asked);
        if self.publisher.object(&target, &verdict, Some(&details), now).await {
            let (type_, reason) = match verdict.status {
                Status::True => (EventType::Normal, "HugePagesCovered"),
                Status::False => (EventType::Warning, "HugePagesNotCovered"),
                Status::Unknown => (EventType::Warning, "HugePagesUnknown"),
            };
            self.publisher.event(&target, type_, reason, &verdict.message).await;
        }
        verdict.status
    }

    /// Reasons why a guest is not covered, from some seconds ago. Without an answer the question waits as long as
    /// after one, and all other guests' wait for the next round: each may take [`QUESTION_WITHIN`].
    async fn explanation(&mut self, guest: &VmView, now: Instant) -> Option<Explanation> {
        let known = self.guests.entry((guest.pid, guest.started_at)).or_default();
        let asked_at = known.explained.as_ref().map(|(_, at)| *at);
        let is_recent = asked_at.is_some_and(|at| now.saturating_duration_since(at) < EXPLANATION_AGE_MAX);
        let earlier = known.explained.as_ref().and_then(|(explanation, _)| explanation.clone());
        if is_recent || self.unexplained_at == Some(now) {
            return earlier;
        }
        let explanation = match self.daemon.explain(guest.pid, QUESTION_WITHIN).await {
            Ok(explanation) => Some(explanation),
            Err(error) => {
                tracing::debug!("{}: no explanation: {error}", guest.name);
                if is_for_now(&error) {
                    return earlier;
                }
                if matches!(error, ClientError::Silent { .. }) {
                    self.unexplained_at = Some(now);
                }
                earlier
            }
        };
        known.explained = Some((explanation.clone(), now));
        explanation
    }

    /// Objects that had a guest, and have none for a while.
    async fn guests_that_ended(&mut self, now: Instant) {
        let adopted = self.adopted_targets();
        for target in &adopted {
            self.objects.entry(target.identity.uid.clone()).or_default().guest_at.get_or_insert(now);
        }
        for target in self.published_targets().into_iter().chain(adopted) {
            let guest_at = self.objects.get(&target.identity.uid).and_then(|seen| seen.guest_at);
            if guest_at.is_some_and(|at| now.saturating_duration_since(at) >= SILENCE_MAX) {
                self.publisher.object(&target, &Verdict::no_guest(), None, now).await;
            }
        }
    }

    /// Objects of the store that have a condition by this agent.
    fn published_targets(&self) -> Vec<Target> {
        let objects = self.store.objects();
        let is_there = |target: &&Target| objects.has(&target.identity.uid);
        self.publisher.published().filter(is_there).cloned().collect()
    }

    /// Objects of the store that have a condition by an earlier agent of this node, and none by this one yet.
    fn adopted_targets(&self) -> Vec<Target> {
        let objects = self.store.objects();
        if !objects.are_known() {
            return Vec::new();
        }
        let is_ours = |annotations: &Annotations| {
            let details = annotations.get(STATUS).and_then(|text| Details::parse(text));
            details.is_some_and(|details| details.node == self.node)
        };
        let mut targets = Vec::new();
        if let VmiApi::Present { has_status } = objects.vmi_api {
            for vmi in objects.vmis.all().filter(|vmi| is_ours(&vmi.annotations)) {
                let pod = pod_of(vmi, &objects).map(|pod| pod.identity.clone());
                targets.push(Target { kind: Kind::Vmi { has_status }, identity: vmi.identity.clone(), pod });
            }
        }
        // The pod of a VMI has the condition of that, or none.
        let stands_alone = |pod: &&PodFacts| pod.vmi.is_none() || objects.vmi_api == VmiApi::Absent;
        for pod in objects.pods.all().filter(stands_alone).filter(|pod| is_ours(&pod.annotations)) {
            targets.push(Target { kind: Kind::Pod, identity: pod.identity.clone(), pod: None });
        }
        let published: Vec<&str> = self.publisher.published().map(|target| target.identity.uid.as_str()).collect();
        targets.retain(|target| !published.contains(&target.identity.uid.as_str()));
        targets
    }

    async fn figures(&mut self, held: u64, now: Instant) {
        let view = match self.daemon.view(QUESTION_WITHIN).await {
            Ok(view) => view,
            Err(error) => return tracing::debug!("no figures of the node: {error}"),
        };
        // A daemon of an earlier release, or a kernel that does not tell: no figure is better than a wrong one.
        let Some(promotable) = view.promotable else { return };
        for (which, bytes) in [
            ("now_2m", promotable.now_2m),
            ("now_1g", promotable.now_1g),
            ("compacted_2m", promotable.compacted_2m),
            ("compacted_1g", promotable.compacted_1g),
        ] {
            self.counters.promotable(which, bytes);
        }
        self.publisher.node(&promotable, held, now).await;
    }

    /// Ends the holds of guests with a migration that is over.
    async fn end_holds(&self, now: Instant) {
        let over = {
            let objects = self.store.objects();
            self.holds.over(|uid| objects.vmis.get(uid).and_then(|vmi| vmi.is_migration_over), now)
        };
        for (uid, hold) in over {
            let pid = hold.pid;
            let end = Request::LeaveAlone { vm: pid.to_string(), for_s: 0 };
            match self.daemon.ask(end, CHANGE_WITHIN).await {
                Err(error) if is_for_now(&error) => self.holds.keep(uid, hold),
                Err(error) => tracing::debug!("process {pid} is left alone until its time is over: {error}"),
                Ok(_) => {}
            }
        }
    }
}

fn size(guest: &VmView) -> u64 {
    guest.ram.iter().map(|ram| ram.bytes).sum()
}

#[cfg(test)]
mod tests;
