//! Conditions, annotations and events, as a fake API server in this process receives them. Times are given, not waited.

use super::*;
use crate::annotations::Requested;
use crate::figures::RESOURCE;
use crate::matching::tests::{guest, identity};
use crate::testing::FakeApi;
use wideleaf_control::view::{BackingView, PromotableView, VmView};

const VMI: &str = "/apis/kubevirt.io/v1/namespaces/shop/virtualmachineinstances/db";
const POD: &str = "/api/v1/namespaces/shop/pods/db";
const NODE: &str = "/api/v1/nodes/n1";
const GIB: u64 = 1 << 30;

struct Bench {
    api: FakeApi,
    counters: Arc<Counters>,
    publisher: Publisher,
    begun: Instant,
}

impl Bench {
    fn new() -> Bench {
        let api = FakeApi::default();
        let counters = Arc::new(Counters::default());
        let publisher = Publisher::new(api.client(), "n1", Arc::clone(&counters));
        Bench { api, counters, publisher, begun: Instant::now() }
    }

    /// Publishes a guest with that share of huge pages, in percent, at a second.
    async fn publish(&mut self, target: &Target, percent: u64, at_s: u64) -> bool {
        let backing = BackingView { huge_2m: percent * GIB, base_4k: (100 - percent) * GIB, ..BackingView::default() };
        let guest = VmView { backing: Some(backing), ..guest("shop_db", None) };
        let verdict = Verdict::of(&guest, None);
        let details = Details::of("n1", &guest, None, &verdict, &Requested::default());
        self.publisher.object(target, &verdict, Some(&details), self.begun + Duration::from_secs(at_s)).await
    }

    async fn node(&mut self, now_2m: u64, held: u64, at_s: u64) {
        let promotable = PromotableView { now_2m, compacted_2m: now_2m, ..PromotableView::default() };
        self.publisher.node(&promotable, held, self.begun + Duration::from_secs(at_s)).await;
    }

    fn condition(&self, path: &str, type_: &str) -> Value {
        let conditions = self.api.object(path)["status"]["conditions"].clone();
        conditions.as_array().into_iter().flatten().find(|one| one["type"] == type_).cloned().unwrap_or(Value::Null)
    }
}

fn vmi_target() -> Target {
    Target { kind: Kind::Vmi { has_status: false }, identity: identity("db", "v-1"), pod: None }
}

fn pod_target() -> Target {
    Target { kind: Kind::Pod, identity: identity("db", "p-1"), pod: None }
}

fn object(uid: &str, status: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Any", "metadata": {"name": "db", "namespace": "shop", "uid": uid},
        "status": status})
}

fn ready() -> Value {
    json!({"type": "Ready", "status": "True"})
}

#[tokio::test]
async fn a_vmis_condition_is_added_beside_other_conditions_and_replaced_alone() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": [ready()]})));
    assert!(!bench.publish(&vmi_target(), 96, 0).await, "the first verdict is no change");
    let [condition, annotation] = &bench.api.writes()[..] else { panic!("two writes") };
    assert_eq!(condition.content_type, "application/json-patch+json");
    assert!(condition.query.contains("fieldManager=wideleaf-node") && !condition.query.contains("force"));
    assert_eq!(condition.path, VMI, "KubeVirt's definition has no resource for the status");
    assert_eq!(annotation.content_type, "application/apply-patch+yaml");
    let first = bench.condition(VMI, CONDITION);
    assert_eq!((first["status"].as_str(), first["reason"].as_str()), (Some("True"), Some("Covered")));
    assert_eq!(bench.condition(VMI, "Ready"), ready());

    assert!(bench.publish(&vmi_target(), 10, 1).await, "a change of the status is written at once");
    let operations = bench.api.writes()[0].body.clone();
    assert_eq!(operations[0], json!({"op": "test", "path": "/status/conditions/1/type", "value": CONDITION}));
    let second = bench.condition(VMI, CONDITION);
    assert_eq!(second["status"], "False");
    let details = bench.api.object(VMI)["metadata"]["annotations"][STATUS].clone();
    let details = Details::parse(details.as_str().expect("text")).expect("it is ours");
    assert_eq!(
        (details.coverage_percent, details.changed.as_deref()),
        (Some(10.0), second["lastTransitionTime"].as_str())
    );
}

#[tokio::test]
async fn a_vmi_without_a_resource_for_its_status_has_the_annotation_and_its_pod_the_condition() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": [ready()]})));
    bench.api.put(POD, object("p-1", &json!({"conditions": [ready()]})));
    let target = Target { pod: Some(pod_target().identity), ..vmi_target() };
    bench.publish(&target, 96, 0).await;
    let [condition, annotation] = &bench.api.writes()[..] else { panic!("two writes") };
    assert_eq!((condition.path.as_str(), annotation.path.as_str()), (&*format!("{POD}/status"), VMI));
    assert_eq!(bench.condition(POD, &format!("{PREFIX}{CONDITION}"))["status"], "True");
    assert_eq!(bench.condition(VMI, CONDITION), Value::Null, "KubeVirt would put it back");
}

#[tokio::test]
async fn conditions_are_written_where_the_definition_has_them() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({})));
    let target = Target { kind: Kind::Vmi { has_status: true }, ..vmi_target() };
    bench.publish(&target, 96, 0).await;
    assert_eq!(bench.api.writes()[0].path, format!("{VMI}/status"));
    assert_eq!(bench.condition(VMI, CONDITION)["status"], "True");
}

#[tokio::test]
async fn a_pods_condition_is_applied_and_never_forced() {
    let mut bench = Bench::new();
    bench.api.put(POD, object("p-1", &json!({"conditions": [ready()]})));
    bench.publish(&pod_target(), 96, 0).await;
    let writes = bench.api.writes();
    assert_eq!(writes[0].path, format!("{POD}/status"));
    assert_eq!(writes[0].body["metadata"]["uid"], "p-1", "an apply must not make a pod");
    assert!(writes.iter().all(|write| write.content_type == "application/apply-patch+yaml"));
    assert!(writes.iter().all(|write| !write.query.contains("force")));
    assert_eq!(bench.condition(POD, "wideleaf.io/HugePagesCovered")["status"], "True");
    assert_eq!(bench.condition(POD, "Ready"), ready());
}

#[tokio::test]
async fn what_does_not_change_is_not_written_and_news_wait_half_a_minute() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": []})));
    bench.publish(&vmi_target(), 10, 0).await;
    bench.api.writes();
    for second in 1..300 {
        bench.publish(&vmi_target(), 10, second).await;
    }
    assert_eq!(bench.api.requests(), 0, "not even a question");
    bench.publish(&vmi_target(), 10, 300).await;
    assert!(bench.api.requests() == 1 && bench.api.writes().is_empty(), "a look");
    for second in 301..330 {
        bench.publish(&vmi_target(), 20 + second % 50, second).await;
    }
    assert_eq!(bench.api.requests(), 0);
    bench.publish(&vmi_target(), 20, 330).await;
    assert_eq!(bench.api.writes().len(), 2, "the condition and the annotation");
}

#[tokio::test]
async fn an_agent_that_restarts_writes_nothing_that_is_there_already() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": []})));
    bench.api.put(NODE, node(""));
    bench.publish(&vmi_target(), 96, 0).await;
    bench.node(3 * GIB, 0, 0).await;
    bench.api.writes();
    let changed = bench.condition(VMI, CONDITION)["lastTransitionTime"].clone();
    bench.publisher = Publisher::new(bench.api.client(), "n1", Arc::clone(&bench.counters));
    bench.publish(&vmi_target(), 96, 1).await;
    bench.node(4 * GIB, 0, 1).await;
    assert!(bench.api.writes().is_empty(), "4 GiB are within the margin of the 3 GiB that are published");
    assert_eq!(bench.condition(VMI, CONDITION)["lastTransitionTime"], changed);
}

#[tokio::test]
async fn an_object_of_the_same_name_is_not_touched() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-2", &json!({"conditions": []})));
    bench.publish(&vmi_target(), 96, 0).await;
    bench.api.remove(POD);
    bench.publish(&pod_target(), 96, 0).await;
    assert!(bench.api.writes().is_empty());
}

#[tokio::test]
async fn a_patch_that_another_writer_has_overtaken_changes_nothing_and_is_tried_again() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": []})));
    bench.api.race(Some(ready()));
    bench.publish(&vmi_target(), 96, 0).await;
    assert_eq!(bench.condition(VMI, CONDITION), Value::Null);
    assert_eq!(bench.condition(VMI, "Ready"), ready());
    assert_eq!(bench.counters.writes("vmi", "failed"), 1);
    bench.api.race(None);
    bench.publish(&vmi_target(), 96, 29).await;
    assert_eq!(bench.condition(VMI, CONDITION), Value::Null, "a refusal rests for half a minute");
    bench.publish(&vmi_target(), 96, 30).await;
    assert_eq!(bench.condition(VMI, CONDITION)["status"], "True");
}

#[tokio::test]
async fn fields_of_another_manager_are_left_and_that_is_said_once() {
    let mut bench = Bench::new();
    bench.api.put(POD, object("p-1", &json!({})));
    bench.api.own("HugePagesCovered\"");
    bench.api.own(STATUS);
    for second in [0, 400, 800] {
        bench.publish(&pod_target(), 96 - second / 10, second).await;
    }
    let events: Vec<_> = bench.api.writes().into_iter().filter(|write| write.path.contains("/events")).collect();
    assert_eq!(events.len(), 2, "one for the condition, one for the annotation");
    assert!(events.iter().all(|event| event.body["reason"] == "FieldOwnedByOther"));
    assert_eq!(events[0].body["reportingController"], MANAGER);
    assert_eq!(events[0].body["regarding"]["uid"], "p-1");
}

#[tokio::test]
async fn a_vmis_condition_that_another_writer_keeps_replacing_is_left_to_it() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": []})));
    let theirs = json!({"type": CONDITION, "status": "Unknown", "reason": "Theirs", "message": "m"});
    for round in 0..4 {
        bench.publish(&vmi_target(), 96, round * 300).await;
        bench.api.put(VMI, object("v-1", &json!({"conditions": [theirs]})));
        bench.publish(&vmi_target(), 96, round * 300 + 299).await;
    }
    assert_eq!(bench.condition(VMI, CONDITION), theirs);
    let writes = bench.api.writes();
    let patches = writes.iter().filter(|write| write.content_type == "application/json-patch+json").count();
    assert_eq!(patches, 3, "the first, and two more");
    assert_eq!(writes.iter().filter(|write| write.path.contains("/events")).count(), 1);
}

#[tokio::test]
async fn a_condition_of_the_agents_own_is_not_another_writers_where_the_annotation_was_not_written() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": []})));
    bench.publish(&vmi_target(), 96, 0).await;
    for round in 0..4 {
        bench.api.overtake(1);
        bench.publish(&vmi_target(), 97 + round % 2, 300 + round * 30).await;
    }
    bench.publish(&vmi_target(), 10, 420).await;
    assert_eq!(bench.condition(VMI, CONDITION)["status"], "False");
    assert!(bench.api.writes().iter().all(|write| !write.path.contains("/events")), "no field is left");
}

#[tokio::test]
async fn only_replacements_in_a_row_leave_a_condition_to_another_writer() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": []})));
    let theirs = json!({"type": CONDITION, "status": "Unknown", "reason": "Theirs", "message": "m"});
    for round in 0..5 {
        bench.publish(&vmi_target(), 96, round * 600).await;
        // A look that finds the agent's own.
        bench.publish(&vmi_target(), 96, round * 600 + 300).await;
        bench.api.put(VMI, object("v-1", &json!({"conditions": [theirs]})));
    }
    bench.publish(&vmi_target(), 96, 3_000).await;
    assert_eq!(bench.condition(VMI, CONDITION)["status"], "True");
}

#[tokio::test]
async fn while_the_api_server_is_away_writes_rest_longer_and_longer_and_then_catch_up() {
    let mut bench = Bench::new();
    bench.api.put(VMI, object("v-1", &json!({"conditions": []})));
    bench.api.fail(Some(503));
    let mut tries = 0;
    for second in 0..600 {
        bench.publish(&vmi_target(), 10 + second % 80, second).await;
        tries += usize::from(bench.api.requests() > 0);
        bench.api.writes();
    }
    // 1, 2, 4, … 60 s: 6 until a minute, then one a minute.
    assert!((10..20).contains(&tries), "{tries} tries in ten minutes");
    assert!(bench.publisher.trouble().is_some());
    assert_eq!(bench.publisher.objects.len(), 1, "nothing is kept for later");
    bench.api.fail(None);
    bench.publish(&vmi_target(), 96, 661).await;
    assert_eq!(bench.condition(VMI, CONDITION)["status"], "True");
    assert!(bench.publisher.trouble().is_none() && bench.publisher.is_ready(bench.begun));
}

fn node(kubelet: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "uid": "n-1", "labels": {"own": "x"}},
        "status": {"capacity": {"cpu": "2"}, "nodeInfo": {"kubeletVersion": kubelet, "architecture": "", "bootID": "",
            "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "", "machineID": "",
            "operatingSystem": "", "osImage": "", "systemUUID": ""}}})
}

#[tokio::test]
async fn a_node_has_labels_and_the_resource_and_one_write_a_minute() {
    let mut bench = Bench::new();
    bench.api.put(NODE, node("v1.37.0"));
    bench.node(3 * GIB, 2 * GIB, 0).await;
    let written = bench.api.object(NODE);
    assert_eq!(written["metadata"]["labels"]["wideleaf.io/promotable-2m-gib"], "3");
    assert_eq!(written["metadata"]["labels"]["own"], "x");
    assert_eq!(written["status"]["capacity"], json!({"cpu": "2", RESOURCE: "5"}));
    assert_eq!(written["status"]["allocatable"], Value::Null, "the kubelet copies it");
    let writes = bench.api.writes();
    assert_eq!(writes.iter().map(|write| write.path.as_str()).collect::<Vec<_>>(), [NODE, &format!("{NODE}/status")]);
    assert!(writes.iter().all(|write| write.body["metadata"]["uid"] == "n-1" && !write.query.contains("force")));
    for second in 1..60 {
        bench.node((second % 9) * GIB, 0, second).await;
    }
    assert!(bench.api.writes().is_empty());
    bench.node(GIB, 0, 60).await;
    assert_eq!(bench.api.object(NODE)["status"]["capacity"][RESOURCE], "1");
}

#[tokio::test]
async fn a_thousand_gibibytes_are_the_same_number_in_the_api_servers_form() {
    let mut bench = Bench::new();
    bench.api.put(NODE, node(""));
    bench.node(1000 * GIB, 0, 0).await;
    let mut as_stored = bench.api.object(NODE);
    for field in ["capacity", "allocatable"] {
        as_stored["status"][field][RESOURCE] = "1k".into();
    }
    bench.api.put(NODE, as_stored);
    bench.api.writes();
    bench.node(1000 * GIB, 0, 300).await;
    assert!(bench.api.writes().is_empty());
}

#[tokio::test]
async fn without_a_kubelet_the_agent_writes_what_it_would_copy() {
    let mut bench = Bench::new();
    bench.api.put(NODE, node(""));
    bench.node(3 * GIB, 0, 0).await;
    assert_eq!(bench.api.object(NODE)["status"]["allocatable"], json!({RESOURCE: "3"}));
    // One that names a version, and does not copy within a minute.
    let mut bench = Bench::new();
    bench.api.put(NODE, node("v1.37.0"));
    bench.node(3 * GIB, 0, 0).await;
    bench.node(3 * GIB, 0, 59).await;
    assert_eq!(bench.api.object(NODE)["status"]["allocatable"], Value::Null);
    bench.node(3 * GIB, 0, 60).await;
    assert_eq!(bench.api.object(NODE)["status"]["allocatable"], json!({RESOURCE: "3"}));
    bench.api.writes();
    bench.node(3 * GIB, 0, 200).await;
    assert_eq!(bench.api.requests(), 0, "all is as it should be");
}

#[tokio::test]
async fn a_kubelet_that_owns_allocatable_keeps_it() {
    let mut bench = Bench::new();
    bench.api.put(NODE, node(""));
    bench.api.own("allocatable");
    bench.node(3 * GIB, 0, 0).await;
    assert_eq!(bench.api.object(NODE)["status"]["capacity"][RESOURCE], "3");
    bench.node(GIB, 0, 60).await;
    assert_eq!(bench.api.object(NODE)["status"]["capacity"][RESOURCE], "1");
    assert_eq!(bench.api.object(NODE)["status"]["allocatable"], Value::Null);
}

#[tokio::test]
async fn labels_of_another_manager_are_left_and_a_missing_node_is_not_made() {
    let mut bench = Bench::new();
    bench.node(3 * GIB, 0, 0).await;
    assert!(bench.api.writes().is_empty());
    bench.api.put(NODE, node(""));
    bench.api.own("promotable");
    for second in [60, 120, 180] {
        bench.node(second * GIB, 0, second).await;
    }
    let writes = bench.api.writes();
    assert_eq!(writes.iter().filter(|write| write.path == NODE).count(), 1, "one try");
    assert_eq!(bench.counters.writes("node", "conflict"), 1);
    let events: Vec<_> = writes.iter().filter(|write| write.path.contains("/events")).collect();
    let [event] = &events[..] else { panic!("{events:?}") };
    assert_eq!(
        (&event.body["reason"], &event.body["regarding"]["kind"]),
        (&"FieldOwnedByOther".into(), &"Node".into())
    );
    assert_eq!(bench.api.object(NODE)["status"]["capacity"][RESOURCE], "179", "the resource is the agent's still");
}

#[tokio::test]
async fn a_resource_of_another_manager_is_left_and_labels_go_on() {
    let mut bench = Bench::new();
    bench.api.put(NODE, node("v1.37.0"));
    bench.api.own(RESOURCE);
    for second in [60, 120, 180] {
        bench.node(second * GIB, 0, second).await;
    }
    let writes = bench.api.writes();
    assert_eq!(writes.iter().filter(|write| write.path.ends_with("/status")).count(), 1, "one try");
    assert_eq!(writes.iter().filter(|write| write.path.contains("/events")).count(), 1);
    assert_eq!(bench.api.object(NODE)["metadata"]["labels"]["wideleaf.io/promotable-2m-gib"], "179");
}

#[tokio::test]
async fn an_object_that_has_changed_meanwhile_is_tried_again() {
    let mut bench = Bench::new();
    bench.api.put(NODE, node(""));
    bench.api.overtake(1);
    bench.node(3 * GIB, 0, 0).await;
    assert_eq!(bench.api.object(NODE)["metadata"]["labels"], json!({"own": "x"}));
    bench.node(3 * GIB, 0, 60).await;
    assert_eq!(bench.api.object(NODE)["metadata"]["labels"]["wideleaf.io/promotable-2m-gib"], "3");
    bench.api.put(POD, object("p-1", &json!({})));
    bench.api.overtake(1);
    bench.publish(&pod_target(), 96, 60).await;
    bench.publish(&pod_target(), 96, 90).await;
    assert_eq!(bench.condition(POD, "wideleaf.io/HugePagesCovered")["status"], "True");
    assert!(bench.api.writes().iter().all(|write| !write.path.contains("/events")), "no field is left");
}

#[tokio::test]
async fn an_object_that_cannot_be_written_rests_alone() {
    let mut bench = Bench::new();
    bench.api.put(POD, object("p-1", &json!({})));
    bench.api.put(VMI, object("v-1", &json!({"conditions": []})));
    bench.api.put(NODE, node(""));
    bench.api.fail_at(POD, Some(500));
    bench.publish(&pod_target(), 96, 0).await;
    bench.publish(&vmi_target(), 96, 0).await;
    bench.node(3 * GIB, 0, 0).await;
    assert_eq!(bench.condition(VMI, CONDITION)["status"], "True", "the next object has its turn");
    assert_eq!(bench.api.object(NODE)["metadata"]["labels"]["wideleaf.io/promotable-2m-gib"], "3");
    bench.api.writes();
    let mut tries = 0;
    for second in 1..600 {
        bench.publish(&pod_target(), 96, second).await;
        tries += bench.api.requests();
        bench.api.writes();
    }
    assert!((10..20).contains(&tries), "{tries} tries in ten minutes");
    bench.api.fail_at(POD, None);
    bench.publish(&pod_target(), 96, 660).await;
    assert_eq!(bench.condition(POD, "wideleaf.io/HugePagesCovered")["status"], "True");
}

#[tokio::test]
async fn a_node_has_its_turn_while_writes_of_objects_rest() {
    let mut bench = Bench::new();
    bench.api.put(POD, object("p-1", &json!({})));
    bench.api.put(NODE, node(""));
    bench.api.fail_at(POD, Some(503));
    bench.publish(&pod_target(), 96, 0).await;
    assert!(!bench.publisher.is_ready(bench.begun));
    bench.node(3 * GIB, 0, 0).await;
    assert_eq!(bench.api.object(NODE)["metadata"]["labels"]["wideleaf.io/promotable-2m-gib"], "3");
}
