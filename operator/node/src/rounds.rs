//! The loop of the agent: it compares the guests of wideleafd with the pods and VMIs of this node.
//!
//! ```text
//!   guests of wideleafd ─▶ pod or VMI of each ─▶ annotations ─▶ settings of the guest, by wideleafd
//!        │                                        └────────────▶ verdict ─▶ condition and events of the pod or VMI
//!        └── wideleafd is silent: rounds go on, and conditions become Unknown after a minute
//!   figures of wideleafd ─▶ labels and resource of the node
//! ```
//!
//! A round begins after each period, and soon after a change of a pod, a VMI or a call of a hook. No write is kept for
//! an API server that does not answer: each round begins from the present state. The loop changes guests only through
//! wideleafd's socket, and objects only through the [`Publisher`], which decides when a write is due.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kube::runtime::events::EventType;
use parking_lot::{Mutex, MutexGuard};
use wideleaf_control::client::ClientError;
use wideleaf_control::protocol::Request;
use wideleaf_control::view::{Care, Explanation, VmView, Vmm};

use crate::annotations::{Annotations, Requested};
use crate::counters::Counters;
use crate::daemon::{Daemon, is_for_now};
use crate::details::{Details, STATUS};
use crate::matching::{Place, place, pod_of};
use crate::objects::PodFacts;
use crate::publish::{Kind, Publisher, Target};
use crate::store::{Store, VmiApi};
use crate::verdict::{Status, Verdict};

/// Time that a question to wideleafd may take.
const QUESTION_WITHIN: Duration = Duration::from_secs(5);

/// Time that a change by wideleafd may take.
const CHANGE_WITHIN: Duration = Duration::from_secs(10);

/// Maximum age of the reasons why a guest is not covered.
const EXPLANATION_AGE_MAX: Duration = Duration::from_secs(30);

/// Time for which wideleafd may be silent, or a guest not there, before its condition becomes unknown: a restart takes
/// less.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Pause after a refused setting before it is tried again. New ones are tried at once.
const REFUSAL_PAUSE: Duration = Duration::from_secs(60);

/// Time for which changes are gathered before a round.
const GATHER: Duration = Duration::from_millis(200);

/// Least time between the begins of two rounds, which bounds their cost while many objects change.
const ROUND_EVERY: Duration = Duration::from_secs(1);

/// Upper bound on the mistakes in annotations that are remembered for a guest, so that each is one event.
const MISTAKES_MAX: usize = 8;

/// Time after which a migration that is over ends the hold of its guest, also where its begin was not seen.
const HOLD_MIN: Duration = Duration::from_secs(15);

/// Time for which wideleafd is asked to leave a guest alone for its migration, in seconds: less than a migration of a
/// large guest may take.
pub const HOLD_S: u64 = 600;

/// Time after which wideleafd is asked again while the migration is under way.
const HOLD_AGAIN: Duration = Duration::from_secs(HOLD_S / 2);

/// Guest that is left alone for a migration.
#[derive(Clone, Copy, Debug)]
struct Hold {
    pid: u32,
    since: Instant,
    /// Time at which wideleafd was asked for it, or asked again.
    asked_at: Instant,
    /// Whether a round has seen the migration under way.
    is_under_way: bool,
}

/// Guests that are left alone for their migration, by UID of the VMI: written by hooks, ended by rounds.
#[derive(Debug, Default)]
pub struct Holds(Mutex<BTreeMap<String, Hold>>);

impl Holds {
    /// Remembers that the guest of a VMI is left alone.
    pub fn add(&self, uid: &str, pid: u32, now: Instant) {
        self.all().insert(uid.to_owned(), Hold { pid, since: now, asked_at: now, is_under_way: false });
    }

    /// Takes out the guests of which the migration is over. `is_over`: by UID of the VMI, whether its migration is;
    /// `None` for a VMI that is not on this node or has none.
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

    /// Holds of migrations under way that are to be asked for again, with the process of the guest.
    fn due(&self, now: Instant) -> Vec<(String, u32)> {
        let is_due = |hold: &Hold| hold.is_under_way && now.saturating_duration_since(hold.asked_at) >= HOLD_AGAIN;
        self.all().iter().filter(|(_, hold)| is_due(hold)).map(|(uid, hold)| (uid.clone(), hold.pid)).collect()
    }

    /// Notes that wideleafd leaves the guest alone for longer.
    fn renewed(&self, uid: &str, now: Instant) {
        if let Some(hold) = self.all().get_mut(uid) {
            hold.asked_at = now;
        }
    }

    /// Keeps a hold that could not be ended, for the next round; a later hold of the same VMI stays.
    fn keep(&self, uid: String, hold: Hold) {
        self.all().entry(uid).or_insert(hold);
    }

    /// Whether the guest of a VMI is left alone.
    pub(crate) fn contains(&self, uid: &str) -> bool {
        self.all().contains_key(uid)
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
    /// Settings that wideleafd has received.
    passed: Option<Requested>,
    /// The latest settings that wideleafd has refused, and the time of the refusal.
    refused: Option<(Requested, Instant)>,
    /// The latest explanation, and the time of the latest question, which may have had no answer.
    explained: Option<(Option<Explanation>, Instant)>,
}

/// What is known of one object between rounds.
#[derive(Debug, Default)]
struct Seen {
    /// Time of the latest round in which it had a guest.
    guest_at: Option<Instant>,
    /// Mistakes in its annotations that were reported.
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
    /// By process ID and start time of the process.
    guests: BTreeMap<(u32, u64), Known>,
    /// By UID of the object.
    objects: BTreeMap<String, Seen>,
    /// Begin of the first round without an answer of wideleafd; `None` while it answers.
    silent_since: Option<Instant>,
    /// Begin of the latest round in which wideleafd did not explain a guest in time.
    unexplained_at: Option<Instant>,
    /// The latest failure to reach wideleafd that was logged; `None` while it answers.
    complaint: Option<String>,
}

/// A guest and the object that has its condition.
struct Placed {
    guest: VmView,
    target: Target,
    requested: Requested,
    mistakes: Vec<String>,
    /// Settings that an earlier agent has passed on.
    asked_before: Requested,
}

impl Placed {
    /// The guest with its object; `None` where the object is on another node.
    fn of(guest: VmView, found: Place, vmi_api: VmiApi, node: &str) -> Option<Placed> {
        let of_pod = found.pod().map(|pod| &pod.annotations);
        let of_vmi = match &found {
            Place::Vmi(vmi, _) => Some(&vmi.annotations),
            Place::Pod(_) | Place::Elsewhere(_) => None,
        };
        let (requested, mistakes) = Requested::of(of_vmi, of_pod);
        let before = of_vmi.or(of_pod).and_then(|annotations| Details::parse(annotations.get(STATUS)?));
        let asked_before = before.filter(|before| before.node == node).map(|before| before.asked());
        let pod = found.pod().map(|pod| pod.identity.clone());
        let target = match found {
            Place::Vmi(vmi, _) => {
                let has_status = matches!(vmi_api, VmiApi::Present { has_status: true });
                Target { kind: Kind::Vmi { has_status }, identity: vmi.identity, pod }
            }
            Place::Pod(pod) => Target { kind: Kind::Pod, identity: pod.identity, pod: None },
            Place::Elsewhere(_) => return None,
        };
        Some(Placed { guest, target, requested, mistakes, asked_before: asked_before.unwrap_or_default() })
    }
}

/// Kinds of places, as the counters name them.
const PLACES: [&str; 4] = ["vmi", "pod", "elsewhere", "none"];

fn name_of(found: Option<&Place>) -> &'static str {
    let [vmi, pod, elsewhere, none] = PLACES;
    match found {
        Some(Place::Vmi(..)) => vmi,
        Some(Place::Pod(_)) => pod,
        Some(Place::Elsewhere(_)) => elsewhere,
        None => none,
    }
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

    /// Bytes that the node's resource counts beside promotable memory. The scheduler subtracts the request of each pod:
    /// memory that its guests hold beyond the request is not free for other pods.
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

    /// Runs rounds for ever.
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

    /// Runs one round.
    ///
    /// # Errors
    /// A line if wideleafd gave no answer, or if the API server did not take a write; the round is over nevertheless.
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
        // A daemon that starts again without its state file has forgotten all settings: they are passed on again.
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
        self.tend_holds(now).await;
        let keys: Vec<(u32, u64)> = guests.iter().map(|guest| (guest.pid, guest.started_at)).collect();
        self.guests.retain(|key, _| keys.contains(key));
        let mut summary = Summary { guests: guests.len(), ..Summary::default() };
        let Some((mut placed, held)) = self.places(guests) else { return summary };
        summary.placed = placed.len();
        // A write that fails may delay all later ones, so the object with the earliest try comes first.
        placed.sort_by_key(|placed| self.publisher.tried_at(&placed.target.identity.uid));
        for placed in &placed {
            self.pass_on(placed, now).await;
            self.hold(placed, now).await;
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
        let (mut held, mut counts) = (Held::default(), BTreeMap::from(PLACES.map(|place| (place, 0))));
        for guest in guests {
            let found = place(&guest, &objects);
            *counts.entry(name_of(found.as_ref())).or_default() += 1;
            let Some(found) = found else { continue };
            if let Some(pod) = found.pod() {
                held.add(pod, &guest);
            }
            let Some(candidate) = Placed::of(guest, found, objects.vmi_api, &self.node) else { continue };
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

    /// Passes the settings that annotations request on to wideleafd, once.
    async fn pass_on(&mut self, placed: &Placed, now: Instant) {
        let Placed { guest, target, requested, mistakes, asked_before } = placed;
        self.report_mistakes(target, mistakes).await;
        let known = self.guests.entry((guest.pid, guest.started_at)).or_default();
        let passed = known.passed.clone().unwrap_or_else(|| asked_before.clone());
        let is_refused = known
            .refused
            .as_ref()
            .is_some_and(|(refused, at)| refused == requested && now.saturating_duration_since(*at) < REFUSAL_PAUSE);
        if known.passed.as_ref() == Some(requested) || is_refused || guest.vmm == Vmm::Wideleaf {
            return;
        }
        let is_left_alone = guest.care == Care::Unmanaged && !requested.asks_for_care();
        if is_left_alone || !requested.is_any() && !passed.is_any() {
            // The other settings of a guest that is left alone are for the time when it is managed.
            known.passed = (!requested.is_any()).then(|| requested.clone());
            return;
        }
        match self.daemon.settle(guest, requested.settings(&passed), CHANGE_WITHIN).await {
            Ok(()) => {
                tracing::info!("{}: its annotations are in force", guest.name);
                (known.passed, known.refused) = (Some(requested.clone()), None);
            }
            Err(error) if is_for_now(&error) => {
                tracing::debug!("{}: its annotations are passed on in the next round: {error}", guest.name);
            }
            Err(ClientError::Refused(why)) => {
                let is_new = known.refused.as_ref().is_none_or(|(refused, _)| refused != requested);
                known.refused = Some((requested.clone(), now));
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
        let Placed { guest, target, requested, .. } = placed;
        self.objects.entry(target.identity.uid.clone()).or_default().guest_at = Some(now);
        let verdict = Verdict::of(&guest, None);
        let explanation = if verdict.status == Status::False { self.explanation(&guest, now).await } else { None };
        let verdict = if explanation.is_some() { Verdict::of(&guest, explanation.as_ref()) } else { verdict };
        let known = self.guests.get(&(guest.pid, guest.started_at));
        let asked = known.and_then(|known| known.passed.clone()).unwrap_or(requested);
        let details = Details::of(&self.node, &guest, explanation.as_ref(), &verdict, &asked);
        let details = details.scanned(guest.scan_age_s, Timestamp::now());
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

    /// Reasons why a guest is not covered, at most [`EXPLANATION_AGE_MAX`] old while wideleafd answers. A question
    /// without an answer is asked again after that time, and those about other guests in the next round: each may take
    /// [`QUESTION_WITHIN`].
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

    /// Writes the condition of objects that have had no guest for [`SILENCE_MAX`].
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

    /// Writes the node's labels and resource where that is due.
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

    /// Has wideleafd leave a guest alone while it migrates away where no hook did: a cluster may have none, and this
    /// agent may have started since.
    async fn hold(&self, placed: &Placed, now: Instant) {
        let Placed { guest, target, .. } = placed;
        let uid = &target.identity.uid;
        let is_migrating = self.store.objects().vmis.get(uid).is_some_and(|vmi| vmi.is_migrating);
        let may_change = matches!(guest.care, Care::Managed | Care::LeftAlone { .. }) && guest.vmm != Vmm::Wideleaf;
        if !is_migrating || !may_change || self.holds.contains(uid) {
            return;
        }
        let hold = Request::LeaveAlone { vm: guest.pid.to_string(), for_s: HOLD_S };
        match self.daemon.ask(hold, CHANGE_WITHIN).await {
            Ok(_) | Err(ClientError::Unsaved(_)) => self.holds.add(uid, guest.pid, now),
            Err(error) => tracing::debug!("{} may be changed while it migrates: {error}", guest.name),
        }
    }

    /// Ends the holds of guests with a migration that is over, and renews all other holds.
    async fn tend_holds(&self, now: Instant) {
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
        for (uid, pid) in self.holds.due(now) {
            let again = Request::LeaveAlone { vm: pid.to_string(), for_s: HOLD_S };
            match self.daemon.ask(again, CHANGE_WITHIN).await {
                Ok(_) | Err(ClientError::Unsaved(_)) => self.holds.renewed(&uid, now),
                Err(error) => tracing::warn!("process {pid} may be changed while it migrates: {error}"),
            }
        }
    }
}

fn size(guest: &VmView) -> u64 {
    guest.ram.iter().map(|ram| ram.bytes).sum()
}

#[cfg(test)]
mod tests;
