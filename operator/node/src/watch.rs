//! Watches of this node's pods and VMIs. They list and watch again after each failure, with a growing pause of at most
//! 30 s; a watch that the API server has forgotten (410) begins with a new list.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::core::DynamicObject;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};

use crate::counters::Counters;
use crate::objects::{NODE_LABEL, PodFacts, VMI_API, VMI_PLURAL, VmiFacts, vmi_resource};
use crate::reason::with_causes;
use crate::store::{Mirror, Store, VmiApi};

/// Number of objects in a page of a list: a page of pods is less than a MiB.
const PAGE: u32 = 50;

/// Interval between looks for VMIs in a cluster that had none.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Pause after a failed look for VMIs.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Keeps the pods up to date, for ever.
pub async fn pods(client: Client, node: String, store: Arc<Store>, counters: Arc<Counters>) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}")).page_size(PAGE);
    let mut events = pin!(watcher(Api::<Pod>::all(client), config).default_backoff());
    let mut complaint = Complaint::of("pods");
    while let Some(event) = events.next().await {
        let Some(event) = complaint.event(event, &counters) else { continue };
        let facts = |pod: &Pod| PodFacts::of(pod).map(|facts| (facts.identity.uid.clone(), facts));
        if store.objects().pods.take(event, facts) {
            store.wake();
        }
    }
}

/// Keeps the VMIs up to date, for ever: looks whether the cluster has them, and watches them.
pub async fn vmis(client: Client, node: String, store: Arc<Store>, counters: Arc<Counters>) {
    let mut complaint = Complaint::of("the kinds of KubeVirt");
    loop {
        match look_for_vmis(&client).await {
            Ok(api) => {
                complaint.ends();
                if std::mem::replace(&mut store.objects().vmi_api, api) != api {
                    tracing::info!(
                        "{}",
                        if api == VmiApi::Absent { "the cluster has no VMIs" } else { "VMIs are watched" }
                    );
                    store.wake();
                }
                if api == VmiApi::Absent {
                    tokio::time::sleep(LOOK_EVERY).await;
                } else {
                    watch_vmis(&client, &node, &store, &counters).await;
                    // Their definition was removed.
                    store.objects().vmis = Mirror::default();
                }
            }
            Err(error) => {
                complaint.about(&with_causes(&error), &counters);
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}

async fn look_for_vmis(client: &Client) -> Result<VmiApi, kube::Error> {
    let listed = match client.list_api_group_resources(VMI_API).await {
        Ok(listed) => listed,
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(VmiApi::Absent),
        Err(error) => return Err(error),
    };
    let has = |name: &str| listed.resources.iter().any(|resource| resource.name == name);
    let has_status = has(&format!("{VMI_PLURAL}/status"));
    Ok(if has(VMI_PLURAL) { VmiApi::Present { has_status } } else { VmiApi::Absent })
}

/// Returns once the API server no longer knows VMIs.
async fn watch_vmis(client: &Client, node: &str, store: &Store, counters: &Counters) {
    let config = watcher::Config::default().labels(&format!("{NODE_LABEL}={node}")).page_size(PAGE);
    let api = Api::<DynamicObject>::all_with(client.clone(), &vmi_resource());
    let mut events = pin!(watcher(api, config).default_backoff());
    let mut complaint = Complaint::of("VMIs");
    while let Some(event) = events.next().await {
        if event.as_ref().is_err_and(is_unknown_kind) {
            return;
        }
        let Some(event) = complaint.event(event, counters) else { continue };
        let facts = |vmi: &DynamicObject| VmiFacts::of(vmi).map(|facts| (facts.identity.uid.clone(), facts));
        if store.objects().vmis.take(event, facts) {
            store.wake();
        }
    }
}

fn is_unknown_kind(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchFailed, WatchStartFailed};
    match error {
        InitialListFailed(kube::Error::Api(status))
        | WatchStartFailed(kube::Error::Api(status))
        | WatchFailed(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}

/// Errors of a watch: each text is logged once until the watch works again.
struct Complaint {
    what: &'static str,
    latest: Option<String>,
}

impl Complaint {
    fn of(what: &'static str) -> Complaint {
        Complaint { what, latest: None }
    }

    fn about(&mut self, error: &str, counters: &Counters) {
        counters.watch_error(self.what);
        if self.latest.as_deref() != Some(error) {
            tracing::warn!("cannot see {}: {error}; it is tried again", self.what);
            self.latest = Some(error.to_owned());
        }
    }

    fn ends(&mut self) {
        if self.latest.take().is_some() {
            tracing::info!("{} are seen again", self.what);
        }
    }

    fn event<K>(
        &mut self,
        event: watcher::Result<watcher::Event<K>>,
        counters: &Counters,
    ) -> Option<watcher::Event<K>> {
        match event {
            Ok(event) => {
                // The begin of a list is no answer yet.
                if !matches!(event, watcher::Event::Init) {
                    self.ends();
                }
                Some(event)
            }
            Err(error) => {
                self.about(&with_causes(&error), counters);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FakeApi;
    use serde_json::{Value, json};

    fn pod(name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop", "uid": name,
            "resourceVersion": "8"}})
    }

    fn names(store: &Store) -> Vec<String> {
        store.objects().pods.all().map(|pod| pod.identity.name.clone()).collect()
    }

    /// Waits for it: the watch runs beside the test.
    async fn until(what: &str, is_so: impl Fn() -> bool) {
        let so = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), so).await.unwrap_or_else(|_| panic!("not seen: {what}"));
    }

    fn watched(api: &FakeApi) -> (Arc<Store>, tokio::task::JoinHandle<()>) {
        let store = Arc::new(Store::default());
        let watch = pods(api.client(), "n1".into(), Arc::clone(&store), Arc::default());
        (store, tokio::spawn(watch))
    }

    #[tokio::test]
    async fn pods_of_the_node_are_listed_and_followed() {
        let api = FakeApi::default();
        api.put("/api/v1/pods/a", pod("a"));
        api.watch(vec![json!({"type": "ADDED", "object": pod("b")}), json!({"type": "DELETED", "object": pod("a")})]);
        let (store, task) = watched(&api);
        until("the pod that came", || names(&store) == ["b"]).await;
        task.abort();
    }

    #[tokio::test]
    async fn a_watch_that_the_api_server_has_forgotten_begins_with_a_new_list() {
        let api = FakeApi::default();
        api.put("/api/v1/pods/a", pod("a"));
        let gone = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": "too old", "reason": "Expired", "code": 410});
        api.watch(vec![json!({"type": "ERROR", "object": gone})]);
        let (store, task) = watched(&api);
        until("the first list", || names(&store) == ["a"]).await;
        api.remove("/api/v1/pods/a");
        api.put("/api/v1/pods/b", pod("b"));
        until("the second list", || names(&store) == ["b"]).await;
        task.abort();
    }

    #[tokio::test]
    async fn while_the_api_server_is_away_the_pods_stay_as_they_were() {
        let api = FakeApi::default();
        api.fail(Some(500));
        let (store, task) = watched(&api);
        until("a try", || api.requests() > 0).await;
        assert!(!store.objects().pods.is_listed());
        api.put("/api/v1/pods/a", pod("a"));
        api.fail(None);
        until("the pods", || names(&store) == ["a"]).await;
        task.abort();
    }

    #[tokio::test]
    async fn a_cluster_has_vmis_with_or_without_a_resource_for_their_status_or_none() {
        let api = FakeApi::default();
        assert_eq!(look_for_vmis(&api.client()).await.expect("it answers"), VmiApi::Absent);
        let resources = |names: &[&str]| {
            let resource = |name: &&str| {
                json!({"name": name, "kind": "K", "namespaced": true, "singularName": "",
                "verbs": []})
            };
            let resources: Vec<Value> = names.iter().map(resource).collect();
            json!({"kind": "APIResourceList", "groupVersion": VMI_API, "resources": resources})
        };
        for (names, expected) in [
            (&[VMI_PLURAL][..], VmiApi::Present { has_status: false }),
            (&[VMI_PLURAL, "virtualmachineinstances/status"], VmiApi::Present { has_status: true }),
            (&["virtualmachines"], VmiApi::Absent),
        ] {
            api.put("/apis/kubevirt.io/v1", resources(names));
            assert_eq!(look_for_vmis(&api.client()).await.expect("it answers"), expected, "{names:?}");
        }
        api.fail(Some(500));
        assert!(look_for_vmis(&api.client()).await.is_err(), "an API server without an answer is not one without VMIs");
    }
}
