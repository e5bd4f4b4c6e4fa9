//! Takes back what agents have written, on all nodes, pods and VMIs: after an uninstall, by an account of its own.
//!
//! ```text
//!   agents gone? ─▶ nodes: labels, resource │ pods and VMIs: annotation, condition ─▶ nothing of wideleaf.io is left
//! ```
//!
//! Objects are large and a cluster has many, so no more than one page of them is in memory. Each object is changed by
//! JSON patches (RFC 6902) that name what is there. A condition is removed only if it is still at its place (`test`);
//! an object that has changed meanwhile is looked at again.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::details::STATUS;
use crate::figures::{RESOURCE, label_names};
use crate::objects::vmi_resource;
use crate::reason::with_causes;
use crate::verdict::CONDITION;
use crate::{MANAGER, PREFIX};

/// Label of the agents' pods, as the chart sets it.
const AGENTS: &str = "app.kubernetes.io/component=wideleaf-node";

/// Time for which the agents may still be there: longer than a pod's grace period.
const AGENTS_WITHIN: Duration = Duration::from_secs(60);

/// Interval between looks whether they are gone.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Number of objects in a page of a list.
const PAGE: u32 = 100;

/// Number of times that a list begins anew because the API server has forgotten its place (410): what was on earlier
/// pages is removed by then.
const RESTARTS_MAX: usize = 10;

/// Number of tries for an object that others change at the same time.
const TRIES: usize = 5;

/// Objects from which something was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Number of nodes.
    pub nodes: usize,
    /// Number of pods.
    pub pods: usize,
    /// Number of VMIs.
    pub vmis: usize,
}

/// Waits until no agent is left, and takes back what they have written.
///
/// # Errors
/// One line: agents that stay, or the first call that the API server refuses. What was removed by then stays removed,
/// and another call goes on.
pub async fn forget(client: &Client) -> Result<Forgotten, String> {
    agents_are_gone(client).await?;
    let nodes = forget_all(client, &ApiResource::erase::<Node>(&())).await?;
    let pods = forget_all(client, &ApiResource::erase::<Pod>(&())).await?;
    let vmis = match forget_all(client, &vmi_resource()).await {
        Err(why) if why.is_unknown_kind => 0,
        done => done?,
    };
    Ok(Forgotten { nodes, pods, vmis })
}

/// A call that failed.
struct Failed {
    line: String,
    is_unknown_kind: bool,
    is_expired: bool,
    has_changed: bool,
}

impl From<Failed> for String {
    fn from(failed: Failed) -> String {
        failed.line
    }
}

fn failed(what: &str) -> impl Fn(kube::Error) -> Failed {
    move |error| {
        let code = if let kube::Error::Api(status) = &error { status.code } else { 0 };
        Failed {
            line: format!("cannot {what}: {}; run `wideleaf-node --forget` again", with_causes(&error)),
            is_unknown_kind: code == 404,
            is_expired: code == 410,
            // A `test` that does not hold is 422.
            has_changed: matches!(code, 409 | 422),
        }
    }
}

async fn agents_are_gone(client: &Client) -> Result<(), String> {
    let api = Api::<Pod>::all(client.clone());
    let since = tokio::time::Instant::now();
    loop {
        let left = api.list(&ListParams::default().labels(AGENTS)).await.map_err(failed("list the agents"))?;
        let Some(agent) = left.items.first() else { return Ok(()) };
        if since.elapsed() >= AGENTS_WITHIN {
            let name = agent.name_any();
            let within = AGENTS_WITHIN.as_secs();
            return Err(format!("cannot forget: agent {name} still runs after {within} s; uninstall the chart first"));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Takes back what is on all objects of a kind, one page after the other. Returns the number of objects from which
/// something was removed.
async fn forget_all(client: &Client, resource: &ApiResource) -> Result<usize, Failed> {
    let api = Api::<DynamicObject>::all_with(client.clone(), resource);
    let from_start = ListParams::default().limit(PAGE);
    let (mut count, mut restarts, mut params) = (0, 0, from_start.clone());
    loop {
        let listed = api.list(&params).await.map_err(failed(&format!("list {}", resource.plural)));
        let page = match listed {
            Err(why) if why.is_expired && restarts < RESTARTS_MAX => {
                (restarts, params) = (restarts + 1, from_start.clone());
                continue;
            }
            listed => listed?,
        };
        for object in page.items {
            count += usize::from(forget_one(client, resource, object).await?);
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(count),
        }
    }
}

/// Returns whether something was there.
async fn forget_one(client: &Client, resource: &ApiResource, object: DynamicObject) -> Result<bool, Failed> {
    let (name, namespace) = (object.name_any(), object.namespace());
    let api = match &namespace {
        Some(namespace) => Api::<DynamicObject>::namespaced_with(client.clone(), namespace, resource),
        None => Api::<DynamicObject>::all_with(client.clone(), resource),
    };
    let what = format!("take back what is on {} {name}", resource.kind);
    let mut object = object;
    let mut was_there = false;
    for left in (0..TRIES).rev() {
        let (own, of_status) = (of_metadata(&object), of_status(&object.data));
        was_there |= !own.is_empty() || !of_status.is_empty();
        match removed(&api, resource, &name, own, of_status).await.map_err(failed(&what)) {
            Ok(()) => return Ok(was_there),
            // It has ended.
            Err(why) if why.is_unknown_kind => return Ok(was_there),
            Err(why) if why.has_changed && left > 0 => {
                object = match api.get_opt(&name).await.map_err(failed(&what))? {
                    Some(object) => object,
                    None => return Ok(was_there),
                };
            }
            Err(why) => return Err(why),
        }
    }
    unreachable!("the last try returns")
}

async fn removed(
    api: &Api<DynamicObject>,
    resource: &ApiResource,
    name: &str,
    own: Vec<Value>,
    of_status: Vec<Value>,
) -> Result<(), kube::Error> {
    let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
    let patch = |operations: &[Value]| {
        let operations = serde_json::from_value(Value::Array(operations.to_vec())).map_err(kube::Error::SerdeError)?;
        Ok::<_, kube::Error>(Patch::<()>::Json(operations))
    };
    if !own.is_empty() {
        api.patch(name, &params, &patch(&own)?).await?;
    }
    if !of_status.is_empty() {
        // The status of KubeVirt's VMIs is a part of the object.
        let written = api.patch_status(name, &params, &patch(&of_status)?).await;
        match written {
            Err(kube::Error::Api(status)) if status.code == 404 && resource.kind == vmi_resource().kind => {
                api.patch(name, &params, &patch(&of_status)?).await?;
            }
            written => drop(written?),
        }
    }
    Ok(())
}

/// A key as a part of a path (RFC 6901).
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

fn remove(path: &str, key: &str) -> Value {
    json!({"op": "remove", "path": format!("{path}/{}", escaped(key))})
}

/// Labels and the annotation that are there.
fn of_metadata(object: &DynamicObject) -> Vec<Value> {
    let labels = label_names().filter(|name| object.labels().contains_key(*name));
    let labels = labels.map(|name| remove("/metadata/labels", name));
    let has_annotation = object.annotations().contains_key(STATUS);
    labels.chain(has_annotation.then(|| remove("/metadata/annotations", STATUS))).collect()
}

/// The resource and the condition that are there; a condition with a test that it is at its place.
fn of_status(data: &Value) -> Vec<Value> {
    let has_resource = |place: &&str| data["status"][place].get(RESOURCE).is_some();
    let resources = ["capacity", "allocatable"].into_iter().filter(has_resource);
    let mut operations: Vec<Value> = resources.map(|place| remove(&format!("/status/{place}"), RESOURCE)).collect();
    let names = [CONDITION.to_owned(), format!("{PREFIX}{CONDITION}")];
    let conditions = data["status"]["conditions"].as_array();
    let is_ours = |condition: &Value| names.iter().any(|name| condition["type"] == **name);
    if let Some(at) = conditions.and_then(|conditions| conditions.iter().position(is_ours)) {
        let path = format!("/status/conditions/{at}");
        let type_ = &data["status"]["conditions"][at]["type"];
        operations.push(json!({"op": "test", "path": format!("{path}/type"), "value": type_}));
        operations.push(json!({"op": "remove", "path": path}));
    }
    operations
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FakeApi;

    fn object(metadata: Value, status: Value) -> DynamicObject {
        let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status});
        serde_json::from_value(object).expect("an object")
    }

    #[test]
    fn labels_resources_annotation_and_condition_of_ours_are_removed_and_no_others() {
        let object = object(
            json!({
                "name": "n1",
                "labels": {"wideleaf.io/promotable-2m-gib": "4", "zone": "a"},
                "annotations": {"wideleaf.io/status": "{}", "wideleaf.io/policy": "auto"},
            }),
            json!({
                "capacity": {"cpu": "2", "wideleaf.io/huge-gib": "4"},
                "allocatable": {"cpu": "2"},
                "conditions": [{"type": "Ready"}, {"type": "wideleaf.io/HugePagesCovered"}],
            }),
        );
        assert_eq!(
            of_metadata(&object),
            [
                json!({"op": "remove", "path": "/metadata/labels/wideleaf.io~1promotable-2m-gib"}),
                json!({"op": "remove", "path": "/metadata/annotations/wideleaf.io~1status"}),
            ],
            "what people wrote stays"
        );
        assert_eq!(
            of_status(&object.data),
            [
                json!({"op": "remove", "path": "/status/capacity/wideleaf.io~1huge-gib"}),
                json!({"op": "test", "path": "/status/conditions/1/type", "value": "wideleaf.io/HugePagesCovered"}),
                json!({"op": "remove", "path": "/status/conditions/1"}),
            ]
        );
    }

    #[tokio::test]
    async fn a_page_of_objects_is_done_before_the_next_is_read() {
        let api = FakeApi::default();
        let pages: usize = 3;
        for number in 0..pages * PAGE as usize {
            let name = format!("pod-{number:04}");
            let metadata = json!({"name": name, "namespace": "shop", "uid": name, "annotations": {STATUS: "{}"}});
            let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {}});
            api.put(&format!("/api/v1/namespaces/shop/pods/{name}"), pod);
        }
        let forgotten = forget(&api.client()).await.expect("it answers");
        assert_eq!(forgotten, Forgotten { pods: pages * PAGE as usize, ..Forgotten::default() });
        let received = api.received();
        let is_list = |path: &str, query: &str| path == "/api/v1/pods" && query.contains("limit=");
        let lists = received.iter().enumerate().filter(|(_, one)| is_list(&one.path, &one.query));
        let lists: Vec<usize> = lists.map(|(at, _)| at).collect();
        assert_eq!(lists.len(), pages);
        assert!(lists.windows(2).all(|pair| pair[1] - pair[0] == PAGE as usize + 1), "a write each: {lists:?}");
        assert_eq!(api.object("/api/v1/namespaces/shop/pods/pod-0000")["metadata"]["annotations"], json!({}));
    }

    #[test]
    fn an_object_without_anything_of_ours_is_left_alone() {
        let object = object(json!({"name": "n1", "labels": {"zone": "a"}}), json!({"capacity": {"cpu": "2"}}));
        assert!(of_metadata(&object).is_empty() && of_status(&object.data).is_empty());
        assert!(of_status(&json!({})).is_empty());
    }
}
