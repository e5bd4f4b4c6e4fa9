//! Writes to the API server: the condition and the annotation of a VMI or pod, the figures of the node, events.
//!
//! ```text
//!   due? ── no ─▶ nothing        status changed: at once · news: 30 s after the last write · else a look each 5 min
//!    │ yes
//!    ▼
//!   GET ──▶ as it should be: nothing · else one patch for each part that differs
//!            field of another manager: said once, and left to it · object changed meanwhile: tried again
//!            error about one object: that object rests, 1 s to 60 s · not reachable, busy: all objects do
//! ```
//!
//! Conditions of pods, annotations, labels and capacity are applied (server-side apply, never forced). KubeVirt's VMIs
//! have no resource for their status, and KubeVirt puts back what others write there: the condition is then on the pod
//! of the guest, and the annotation on the VMI. The conditions of a VMI are one field for all writers in KubeVirt's
//! definition (a list without `x-kubernetes-list-type`), which apply would take away from KubeVirt. There one element
//! is added or replaced by a JSON patch (RFC 6902) with `test` operations, which make it fail if the object has
//! changed.

mod node;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::{ApiResource, DynamicObject};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use self::node::NodeState;
use crate::counters::Counters;
use crate::details::{Details, STATUS};
use crate::objects::{Identity, VMI_API, VMI_KIND, vmi_resource};
use crate::reason::with_causes;
use crate::verdict::{CONDITION, Verdict};
use crate::{MANAGER, PREFIX};

/// Least time between two writes to an object with a condition that keeps its status.
const OBJECT_EVERY: Duration = Duration::from_secs(30);

/// Interval between looks at an object or a node that had no news: another writer may have removed what was written.
const LOOK_EVERY: Duration = Duration::from_secs(300);

/// Time that one call may take.
const CALL_WITHIN: Duration = Duration::from_secs(10);

/// Shortest and longest rest after a failed call.
const REST: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Number of times that another writer may replace a VMI's condition before it is left to that writer.
const FOREIGN_MAX: u32 = 3;

/// Upper bound on a note of an event, in bytes (events.k8s.io/v1).
const NOTE_MAX: usize = 1_000;

/// Reason for a write that was not made.
#[derive(Debug, thiserror::Error)]
enum ApiError {
    /// Another manager owns the field.
    #[error("{0}")]
    Owned(String),
    /// The object does not exist.
    #[error("it does not exist")]
    Gone,
    /// The API server refuses, and will refuse the same again; or the object has changed.
    #[error("{0}")]
    Refused(String),
    /// The API server fails for this request, and may answer others.
    #[error("{0}")]
    Failed(String),
    /// The API server cannot be reached, or cannot answer now.
    #[error("{0}")]
    Down(String),
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> ApiError {
        match error {
            kube::Error::Api(status) => {
                let text = format!("{} ({})", status.message, status.code);
                match status.code {
                    404 => ApiError::Gone,
                    409 if is_of_manager(&status) => ApiError::Owned(text),
                    429 | 503 => ApiError::Down(text),
                    500.. => ApiError::Failed(text),
                    _ => ApiError::Refused(text),
                }
            }
            other => ApiError::Down(with_causes(&other)),
        }
    }
}

/// Whether a conflict is about a field of another manager (`StatusCause` of server-side apply). Any other conflict is
/// over with the next look: the object has changed, or is another one of that name.
fn is_of_manager(status: &kube::core::Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    causes.any(|cause| cause.reason == "FieldManagerConflict")
}

/// Kind of an object that has a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A VirtualMachineInstance (VMI).
    Vmi {
        /// Whether its status is a resource of its own.
        has_status: bool,
    },
    /// A pod without a VMI.
    Pod,
}

impl Kind {
    const fn word(self) -> &'static str {
        match self {
            Kind::Vmi { .. } => "vmi",
            Kind::Pod => "pod",
        }
    }

    fn resource(self) -> ApiResource {
        match self {
            Kind::Vmi { .. } => vmi_resource(),
            Kind::Pod => ApiResource::erase::<Pod>(&()),
        }
    }

    /// Group, version and kind in a body.
    const fn types(self) -> (&'static str, &'static str) {
        match self {
            Kind::Vmi { .. } => (VMI_API, VMI_KIND),
            Kind::Pod => ("v1", "Pod"),
        }
    }

    fn condition(self) -> String {
        match self {
            Kind::Vmi { .. } => CONDITION.to_owned(),
            Kind::Pod => format!("{PREFIX}{CONDITION}"),
        }
    }
}

/// An object that has a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Kind of the object.
    pub kind: Kind,
    /// Identity of the object.
    pub identity: Identity,
    /// Pod of a VMI. It has the condition where the status of VMIs is not a resource of its own: KubeVirt then puts
    /// back what others write there.
    pub pod: Option<Identity>,
}

impl Target {
    /// Object that has the condition, and the kind of it.
    fn of_condition(&self) -> Target {
        match (&self.kind, &self.pod) {
            (Kind::Vmi { has_status: false }, Some(pod)) => {
                Target { kind: Kind::Pod, identity: pod.clone(), pod: None }
            }
            _ => self.clone(),
        }
    }

    /// Reference to the object in its events.
    fn reference(&self) -> ObjectReference {
        let (api_version, kind) = self.kind.types();
        let Identity { namespace, name, uid } = self.identity.clone();
        ObjectReference {
            api_version: Some(api_version.into()),
            kind: Some(kind.into()),
            namespace: Some(namespace),
            name: Some(name),
            uid: Some(uid),
            ..ObjectReference::default()
        }
    }
}

/// State of one object's writes.
#[derive(Debug, Default)]
struct Published {
    /// The object. The pod of a VMI may have been found by its labels alone.
    target: Option<Target>,
    latest: Option<(Verdict, Option<Details>)>,
    looked_at: Option<Instant>,
    /// The latest try, with or without success.
    tried_at: Option<Instant>,
    /// Not before this time, after a refusal.
    not_before: Option<Instant>,
    /// Rests after failures of the API server about this object alone.
    rest: Rest,
    /// The condition of the object, as of the latest look or write.
    had: Option<Text>,
    /// The condition that was sent last, which the object may have although the write has failed.
    sent: Option<Text>,
    /// Replacements by another writer in a row.
    foreign: u32,
    is_condition_left: bool,
    is_annotation_left: bool,
    complaint: Option<String>,
}

impl Published {
    fn is_due(&self, verdict: &Verdict, details: Option<&Details>, now: Instant) -> bool {
        let is_resting = self.not_before.is_some_and(|until| now < until) || !self.rest.is_over(now);
        if is_resting || self.is_condition_left && self.is_annotation_left {
            return false;
        }
        let (Some((before, told)), Some(looked_at)) = (&self.latest, self.looked_at) else { return true };
        let since = now.saturating_duration_since(looked_at);
        let is_news = before.reason != verdict.reason
            || match (details, told) {
                (Some(details), Some(told)) => details.is_news_after(told),
                (Some(_), None) => true,
                (None, _) => before.message != verdict.message,
            };
        before.status != verdict.status || is_news && since >= OBJECT_EVERY || since >= LOOK_EVERY
    }
}

/// Pauses of writes while the API server fails.
#[derive(Debug, Default)]
struct Rest {
    until: Option<Instant>,
    length: Duration,
}

impl Rest {
    fn begin(&mut self, now: Instant) {
        self.length = (self.length * 2).clamp(REST.0, REST.1);
        self.until = Some(now + self.length);
    }

    fn is_over(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }
}

/// Writes of one agent.
pub struct Publisher {
    client: Client,
    node: String,
    counters: Arc<Counters>,
    recorder: Recorder,
    objects: BTreeMap<String, Published>,
    of_node: NodeState,
    rest: Rest,
    /// The latest failure to reach the API server; `None` while it answers.
    trouble: Option<String>,
}

impl Publisher {
    /// Writes about `node` through `client`.
    pub fn new(client: Client, node: &str, counters: Arc<Counters>) -> Publisher {
        let reporter = Reporter { controller: MANAGER.into(), instance: Some(format!("{MANAGER}-{node}")) };
        let recorder = Recorder::new(client.clone(), reporter);
        let (objects, of_node, rest) = (BTreeMap::new(), NodeState::default(), Rest::default());
        Publisher { client, node: node.to_owned(), counters, recorder, objects, of_node, rest, trouble: None }
    }

    /// The latest failure to reach the API server; `None` while it answers.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Time of the latest try to write an object.
    pub fn tried_at(&self, uid: &str) -> Option<Instant> {
        self.objects.get(uid)?.tried_at
    }

    /// Whether writes of objects are possible now: not while they rest after a failure.
    pub fn is_ready(&self, now: Instant) -> bool {
        self.rest.is_over(now)
    }

    /// Forgets objects that are no longer there.
    pub fn keep(&mut self, is_there: impl Fn(&str) -> bool) {
        self.objects.retain(|uid, _| is_there(uid));
    }

    /// Objects that have a condition by this agent.
    pub fn published(&self) -> impl Iterator<Item = &Target> {
        self.objects.values().filter(|state| state.latest.is_some()).filter_map(|state| state.target.as_ref())
    }

    fn answered(&mut self) {
        if self.trouble.take().is_some() {
            tracing::info!("the API server takes writes again");
        }
    }

    fn failed(&mut self, error: &str) {
        if self.trouble.as_deref() != Some(error) {
            tracing::warn!("cannot write to the API server: {error}; it is tried again");
        }
        self.trouble = Some(error.to_owned());
    }

    /// Writes the condition and the annotation of an object where that is due. `details`: `None` leaves the annotation
    /// as it is. Returns whether the condition's status has changed.
    pub async fn object(
        &mut self,
        target: &Target,
        verdict: &Verdict,
        details: Option<&Details>,
        now: Instant,
    ) -> bool {
        let uid = &target.identity.uid;
        let mut state = self.objects.remove(uid).unwrap_or_default();
        state.target = Some(target.clone());
        let mut has_changed = false;
        if self.is_ready(now) && state.is_due(verdict, details, now) {
            state.tried_at = Some(now);
            let written = self.write_object(target, &mut state, verdict, details).await;
            match &written {
                Err(ApiError::Down(_)) => self.rest.begin(now),
                _ => self.rest = Rest::default(),
            }
            match written {
                Ok(()) => {
                    self.answered();
                    state.rest = Rest::default();
                    has_changed = state.latest.as_ref().is_some_and(|(before, _)| before.status != verdict.status);
                    let told = details.cloned().or_else(|| state.latest.take().and_then(|(_, told)| told));
                    state.latest = Some((verdict.clone(), told));
                    (state.looked_at, state.complaint) = (Some(now), None);
                }
                Err(ApiError::Down(error)) => self.failed(&error),
                Err(error) => {
                    self.answered();
                    match error {
                        ApiError::Failed(_) => state.rest.begin(now),
                        _ => state.not_before = Some(now + OBJECT_EVERY),
                    }
                    let name = format!("{}/{}", target.identity.namespace, target.identity.name);
                    complain(&mut state.complaint, &name, &error);
                }
            }
        }
        self.objects.insert(uid.clone(), state);
        has_changed
    }

    async fn write_object(
        &self,
        target: &Target,
        state: &mut Published,
        verdict: &Verdict,
        details: Option<&Details>,
    ) -> Result<(), ApiError> {
        let Target { kind, identity, .. } = target;
        let (api, seen) = self.look(target).await?;
        let of_condition = target.of_condition();
        let elsewhere = if of_condition == *target { None } else { Some(self.look(&of_condition).await?) };
        let (api_there, seen_there) = elsewhere.as_ref().map_or((&api, &seen), |(api, seen)| (api, seen));
        let condition = Condition::of(of_condition.kind, verdict, &seen_there.data);
        if !state.is_condition_left {
            self.write_condition(api_there, &of_condition, state, seen_there, &condition).await?;
        }
        let Some(details) = details.filter(|_| !state.is_annotation_left) else { return Ok(()) };
        let text = Details { changed: Some(condition.changed), ..details.clone() }.text();
        if seen.annotations().get(STATUS) == Some(&text) {
            return Ok(());
        }
        let body = body(*kind, identity, json!({"annotations": {STATUS: text}}), &json!({}));
        match called(api.patch(&identity.name, &PatchParams::apply(MANAGER), &Patch::Apply(&body))).await {
            Ok(_) => self.counters.write("annotation", "done"),
            Err(ApiError::Owned(why)) => {
                state.is_annotation_left = true;
                self.leave(target, STATUS, &why).await;
            }
            Err(error) => return Err(self.counted("annotation", error)),
        }
        Ok(())
    }

    /// The object as it is now.
    async fn look(&self, target: &Target) -> Result<(Api<DynamicObject>, DynamicObject), ApiError> {
        let Target { kind, identity, .. } = target;
        let resource = kind.resource();
        let api = Api::<DynamicObject>::namespaced_with(self.client.clone(), &identity.namespace, &resource);
        let seen = called(api.get(&identity.name)).await?;
        if seen.uid().as_ref() == Some(&identity.uid) { Ok((api, seen)) } else { Err(ApiError::Gone) }
    }

    async fn write_condition(
        &self,
        api: &Api<DynamicObject>,
        target: &Target,
        state: &mut Published,
        seen: &DynamicObject,
        condition: &Condition,
    ) -> Result<(), ApiError> {
        let Target { kind, identity, .. } = target;
        let what = kind.word();
        let before = state.had.take();
        state.had = condition.present.clone().or_else(|| before.clone());
        if condition.is_there || condition.present.is_some() && condition.present == state.sent {
            state.foreign = 0;
        }
        if condition.is_there {
            self.counters.write(what, "same");
            return Ok(());
        }
        let is_foreign = before.is_some() && state.had != before && state.had != state.sent;
        if is_foreign {
            state.foreign += 1;
            if state.foreign >= FOREIGN_MAX && matches!(kind, Kind::Vmi { .. }) {
                state.is_condition_left = true;
                self.leave(target, &kind.condition(), "another writer replaces it again and again").await;
                return Ok(());
            }
        }
        state.sent = Some(condition.wanted.clone());
        let written = match kind {
            Kind::Pod => {
                let status = json!({"status": {"conditions": [condition.value]}});
                let body = body(*kind, identity, json!({}), &status);
                called(api.patch_status(&identity.name, &PatchParams::apply(MANAGER), &Patch::Apply(&body))).await
            }
            Kind::Vmi { has_status } => {
                let Some(operations) = condition.operations(seen) else {
                    // Its controllers have not seen it yet.
                    return Err(ApiError::Refused("it has no status yet".into()));
                };
                let patch = serde_json::from_value(operations).map_err(|error| ApiError::Refused(error.to_string()))?;
                let (params, patch) = (patched_by(), Patch::<()>::Json(patch));
                match has_status {
                    true => called(api.patch_status(&identity.name, &params, &patch)).await,
                    false => called(api.patch(&identity.name, &params, &patch)).await,
                }
            }
        };
        match written {
            Ok(_) => {
                state.had.clone_from(&state.sent);
                self.counters.write(what, "done");
                Ok(())
            }
            Err(ApiError::Owned(why)) if *kind == Kind::Pod => {
                state.is_condition_left = true;
                self.leave(target, &kind.condition(), &why).await;
                Ok(())
            }
            Err(error) => Err(self.counted(what, error)),
        }
    }

    fn counted(&self, what: &'static str, error: ApiError) -> ApiError {
        self.counters.write(what, if matches!(error, ApiError::Owned(_)) { "conflict" } else { "failed" });
        error
    }

    /// Says once that a field belongs to another writer.
    async fn leave(&self, target: &Target, field: &str, why: &str) {
        let name = format!("{}/{}", target.identity.namespace, target.identity.name);
        self.say_left(target.kind.word(), &target.reference(), &name, &format!("{field} is"), why).await;
    }

    async fn say_left(&self, word: &'static str, about: &ObjectReference, name: &str, fields: &str, why: &str) {
        self.counters.write(word, "conflict");
        let note = format!("{fields} left to the other writer: {why}");
        self.event_about(about, EventType::Warning, "FieldOwnedByOther", &note).await;
        tracing::warn!("{name}: {note}");
    }

    /// Publishes an event on an object. A failure is logged and not tried again.
    pub async fn event(&self, target: &Target, type_: EventType, reason: &str, note: &str) {
        self.event_about(&target.reference(), type_, reason, note).await;
    }

    async fn event_about(&self, about: &ObjectReference, type_: EventType, reason: &str, note: &str) {
        let end = (0..=note.len().min(NOTE_MAX)).rev().find(|end| note.is_char_boundary(*end)).unwrap_or(0);
        let note = Some(note[..end].to_owned());
        let event = Event { type_, reason: reason.into(), note, action: "Observe".into(), secondary: None };
        match called(self.recorder.publish(&event, about)).await {
            Ok(()) => self.counters.write("event", "done"),
            Err(error) => {
                self.counters.write("event", "failed");
                tracing::warn!("cannot publish the event {reason}: {error}");
            }
        }
    }
}

/// Logs a refusal once.
fn complain(latest: &mut Option<String>, what: &str, error: &ApiError) {
    let text = error.to_string();
    if latest.as_ref() != Some(&text) {
        tracing::warn!("cannot write the state of {what}: {text}");
        *latest = Some(text);
    }
}

/// One call, with a limit on its time.
async fn called<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, ApiError> {
    match tokio::time::timeout(CALL_WITHIN, call).await {
        Ok(answer) => answer.map_err(ApiError::from),
        Err(_) => Err(ApiError::Down(format!("no answer within {} s", CALL_WITHIN.as_secs()))),
    }
}

/// Parameters of a patch that is not an apply, with the same manager.
fn patched_by() -> PatchParams {
    PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() }
}

/// Body of an apply. The UID keeps the API server from making an object anew that was deleted in between.
fn body(kind: Kind, identity: &Identity, metadata: Value, rest: &Value) -> Value {
    let (api_version, kind) = kind.types();
    let Identity { namespace, name, uid } = identity;
    let named = json!({"namespace": namespace, "name": name, "uid": uid});
    let mut body = json!({"apiVersion": api_version, "kind": kind, "metadata": named});
    merge(&mut body["metadata"], &metadata);
    merge(&mut body, rest);
    body
}

fn merge(into: &mut Value, fields: &Value) {
    for (name, value) in fields.as_object().into_iter().flatten() {
        into[name.as_str()] = value.clone();
    }
}

/// Status, reason and message of a condition.
type Text = (String, String, String);

/// The condition as it should be, beside that of the object.
struct Condition {
    value: Value,
    /// Time at which its status changed last, RFC 3339.
    changed: String,
    /// Place of the present one among the object's conditions.
    index: Option<usize>,
    /// The present one, without times.
    present: Option<Text>,
    /// As it should be, without times.
    wanted: Text,
    /// Whether the object has it so.
    is_there: bool,
}

impl Condition {
    fn of(kind: Kind, verdict: &Verdict, data: &Value) -> Condition {
        let type_ = kind.condition();
        let conditions = data["status"]["conditions"].as_array();
        let index = conditions.and_then(|all| all.iter().position(|one| one["type"] == *type_));
        let now = index.and_then(|index| conditions?.get(index));
        let text = |name: &str| now.and_then(|now| now[name].as_str()).unwrap_or_default().to_owned();
        let present = now.map(|_| (text("status"), text("reason"), text("message")));
        let wanted = (verdict.status.word().to_owned(), verdict.reason.clone(), verdict.message.clone());
        let is_there = present.as_ref() == Some(&wanted);
        let keeps_time = present.as_ref().is_some_and(|(status, ..)| *status == wanted.0);
        let changed = Some(text("lastTransitionTime")).filter(|time| keeps_time && !time.is_empty());
        let changed = changed.unwrap_or_else(now_text);
        let (status, reason, message) = &wanted;
        let value = json!({
            "type": type_,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": changed,
        });
        Condition { value, changed, index, present, wanted, is_there }
    }

    /// JSON patch that changes this one element, and fails where the object has another form by then; `None` for an
    /// object without a status.
    fn operations(&self, seen: &DynamicObject) -> Option<Value> {
        let status = seen.data["status"].as_object()?;
        let unchanged = || json!({"op": "test", "path": "/metadata/resourceVersion", "value": seen.resource_version()});
        Some(match (self.index, status.get("conditions").is_some_and(Value::is_array)) {
            (Some(index), _) => json!([
                {"op": "test", "path": format!("/status/conditions/{index}/type"), "value": self.value["type"]},
                {"op": "replace", "path": format!("/status/conditions/{index}"), "value": self.value},
            ]),
            (None, true) => json!([unchanged(), {"op": "add", "path": "/status/conditions/-", "value": self.value}]),
            (None, false) => {
                json!([unchanged(), {"op": "add", "path": "/status/conditions", "value": [self.value]}])
            }
        })
    }
}

/// The time of this machine, in whole seconds, RFC 3339. Durations never use it.
fn now_text() -> String {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

#[cfg(test)]
mod tests;
