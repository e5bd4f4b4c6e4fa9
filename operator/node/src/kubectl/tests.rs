//! The plugin's tables and explanations, on the objects of a fake API server in this process.

use super::*;
use crate::annotations::Requested;
use crate::matching::tests::guest;
use crate::testing::FakeApi;
use crate::verdict::Verdict;
use serde_json::json;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn api() -> FakeApi {
    let api = FakeApi::default();
    let guest = guest("shop_db", None);
    let details = Details::of("n1", &guest, None, &Verdict::of(&guest, None), &Requested::default());
    let details = Details { explanation: Some("512 windows: none is free".into()), ..details };
    let condition = |type_: &str| {
        json!([{"type": "Ready", "status": "True"},
            {"type": type_, "status": "False", "reason": "NoHugePage", "message": "75 % of present memory"}])
    };
    let object = |name: &str, conditions: Value, annotations: Value| {
        let metadata = json!({"name": name, "namespace": "shop", "annotations": annotations});
        json!({"metadata": metadata, "status": {"conditions": conditions}})
    };
    let told = json!({STATUS: details.text()});
    let base = "/apis/kubevirt.io/v1/virtualmachineinstances";
    api.put(&format!("{base}/db"), object("db", condition(CONDITION), told.clone()));
    api.put(&format!("{base}/new"), object("new", json!([]), json!({})));
    api.put("/api/v1/pods/kata", object("kata", condition("wideleaf.io/HugePagesCovered"), told));
    api.put("/api/v1/pods/web", object("web", json!([]), json!({})));
    let labels: std::collections::BTreeMap<_, _> = label_names().map(|name| (name, "3")).collect();
    api.put(
        "/api/v1/nodes/n1",
        json!({"metadata": {"name": "n1", "labels": labels},
        "status": {"capacity": {RESOURCE: "5"}}}),
    );
    api
}

use serde_json::Value;

#[tokio::test]
async fn vmis_are_listed_and_pods_with_the_annotation() {
    let rows = vms(&api().client(), None).await.expect("it answers");
    let names: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.covered.as_deref())).collect();
    assert_eq!(names, [("db", Some("False")), ("kata", Some("False")), ("new", None)]);
    let text = list_text(&rows, true, NOW);
    for part in ["namespace", "shop", "75.0 %", "3 GiB", "NoHugePage", "kata", "95 %"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[tokio::test]
async fn of_the_pods_of_a_vmi_the_one_that_runs_on_its_node_counts() {
    let api = api();
    let base = "/apis/kubevirt.io/v1/virtualmachineinstances";
    let metadata = json!({"name": "new", "namespace": "shop", "uid": "v-9"});
    api.put(&format!("{base}/new"), json!({"metadata": metadata, "status": {"nodeName": "n2"}}));
    let launcher = |name: &str, node: &str, phase: &str, status: &str| {
        let metadata = json!({"name": name, "namespace": "shop", "labels": {CREATED_BY: "v-9"}});
        let condition = json!({"type": "wideleaf.io/HugePagesCovered", "status": status, "reason": "R"});
        let pod = json!({"metadata": metadata, "spec": {"nodeName": node, "containers": []},
            "status": {"phase": phase, "conditions": [condition]}});
        api.put(&format!("/api/v1/pods/{name}"), pod);
    };
    launcher("a-ended", "n2", "Succeeded", "False");
    launcher("b-source", "n2", "Running", "True");
    launcher("c-target", "n3", "Running", "Unknown");
    launcher("d-failed", "n2", "Failed", "False");
    let rows = vms(&api.client(), None).await.expect("it answers");
    let row = rows.iter().find(|row| row.name == "new").expect("it is listed");
    assert_eq!(row.covered.as_deref(), Some("True"));
}

#[tokio::test]
async fn a_cluster_without_kubevirt_has_pods_alone() {
    let api = api();
    api.remove("/apis/kubevirt.io/v1/virtualmachineinstances/db");
    api.remove("/apis/kubevirt.io/v1/virtualmachineinstances/new");
    let rows = vms(&api.client(), None).await.expect("it answers");
    assert_eq!(rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), ["kata"]);
    api.fail(Some(403));
    assert!(vms(&api.client(), None).await.expect_err("forbidden").contains("kubectl auth can-i"));
}

#[tokio::test]
async fn an_explanation_has_the_reason_and_what_annotations_ask_for() {
    let rows = vms(&api().client(), None).await.expect("it answers");
    let text = explain_text(&rows[0]);
    for part in ["shop/db", "NoHugePage", "75.0 % of present memory", "3 GiB in 2 MiB", "512 windows: none is free"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(text.contains("nothing, by annotations"), "{text}");
    assert!(explain_text(&rows[2]).contains("no agent has published facts about it"));
}

#[tokio::test]
async fn top_has_the_nodes_and_the_vms_with_most_memory_in_base_pages() {
    let api = api();
    let nodes = all(&Api::<Node>::all(api.client())).await.expect("it answers");
    let nodes: Vec<NodeRow> = nodes.iter().map(node_row).collect();
    assert_eq!((nodes[0].huge_gib, nodes[0].labels_gib.len()), (Some(5), 4));
    let vms = most_in_base_pages(vms(&api.client(), None).await.expect("it answers"));
    assert_eq!(vms.last().map(|row| row.name.as_str()), Some("new"));
    let text = top_text(&Top { nodes, vms }, true, NOW);
    assert!(text.contains("promotable-2m") && text.contains("huge-gib"), "{text}");
}

#[tokio::test]
async fn an_old_scan_is_a_line_below_the_table_and_in_the_explanation() {
    let mut rows = vms(&api().client(), None).await.expect("it answers");
    for row in &mut rows {
        row.details = row.details.take().map(|details| details.scanned(Some(59.0), NOW));
    }
    assert!(!list_text(&rows, true, NOW).contains("scanned") && !explain_text(&rows[0]).contains("scanned"));
    let of_db = rows[0].details.take().expect("it has details");
    rows[0].details = Some(of_db.scanned(Some(72.0), NOW));
    let text = list_text(&rows, true, NOW);
    assert!(text.ends_with("\n  scanned a minute ago or before: shop/db 120 s\n"), "{text}");
    assert!(list_text(&rows, false, NOW).ends_with(": db 120 s\n"));
    assert!(explain_text(&rows[0]).contains("scanned      1969-12-31T23:58:00Z\n"));
}

#[test]
fn text_of_other_programs_does_not_control_the_terminal() {
    let row = VmRow {
        namespace: "shop".into(),
        name: "db\u{1b}[2J".into(),
        kind: "Pod".into(),
        covered: Some("True".into()),
        reason: Some("a\nb".into()),
        message: Some("\u{7}".into()),
        details: None,
    };
    let text = list_text(std::slice::from_ref(&row), false, NOW) + &explain_text(&row);
    assert!(!text.contains(['\u{1b}', '\u{7}']), "{text:?}");
    assert_eq!(list_text(&[], false, NOW), NO_VM);
}

#[test]
fn options_go_before_and_after_the_command() {
    for line in [&["list", "-A", "-o", "json"][..], &["-n", "shop", "explain", "db"], &["top", "-n", "shop"]] {
        Arguments::try_parse_from([&["kubectl-wideleaf"], line].concat()).expect("valid");
    }
    for line in [&[][..], &["explain"], &["list", "-o", "yaml"]] {
        assert!(Arguments::try_parse_from([&["kubectl-wideleaf"], line].concat()).is_err(), "{line:?}");
    }
}
