//! The lab itself: is it the API server that a cluster has?

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::server::{MERGE, Process, Ready, Server, core, eventually, namespace, program, vmis};

const RULES: &str = "/apis/rbac.authorization.k8s.io/v1";

fn vmi(name: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name},
        "spec": {"domain": {}},
        "status": {"phase": "Running", "nodeName": "n", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

/// Lets a user do this with these resources of a group.
fn permit(server: &Server, user: &str, group: &str, resources: &[&str], verbs: &[&str]) {
    let rules = json!([{"apiGroups": [group], "resources": resources, "verbs": verbs}]);
    let role = json!({"metadata": {"name": user}, "rules": rules});
    server.admin().post(&format!("{RULES}/clusterroles"), &role).done();
    let binding = json!({
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
        "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}],
    });
    server.admin().post(&format!("{RULES}/clusterrolebindings"), &binding).done();
}

#[test]
fn it_is_the_release_that_it_says_with_kubevirts_kinds() {
    let Some(server) = Server::shared() else { return };
    println!("ready after {} ms", server.ready.ready_after_ms);
    let version = server.admin().get("/version").done();
    let release = version["gitVersion"].as_str().unwrap();
    assert!(release.starts_with("v1.37."), "{version}");
    assert_eq!((version["major"].as_str(), version["minor"].as_str()), (Some("1"), Some("37")), "{version}");
    let kinds = server.admin().get("/apis/kubevirt.io/v1").done();
    let names: Vec<&str> =
        kinds["resources"].as_array().unwrap().iter().map(|kind| kind["name"].as_str().unwrap()).collect();
    for name in ["virtualmachines", "virtualmachines/status", "virtualmachineinstances"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(!names.contains(&"virtualmachineinstances/status"), "KubeVirt ships none: {names:?}");
    let plugins = server.admin().get("/apis/plugin.kubevirt.io/v1alpha1/plugins").done();
    assert_eq!(plugins["items"].as_array().unwrap().len(), 0);
    let plugin = |hooks: &[&str]| {
        json!({
            "apiVersion": "plugin.kubevirt.io/v1alpha1",
            "kind": "Plugin",
            "metadata": {"name": "p"},
            "spec": {"nodeHooks": [{"socket": "/s", "permittedHooks": hooks}]},
        })
    };
    let path = "/apis/plugin.kubevirt.io/v1alpha1/plugins";
    let why = server.admin().post(path, &plugin(&["PreVMBoot"])).refused(422);
    assert!(why.contains("PreVMBoot"), "{why}");
    server.admin().post(path, &plugin(&["PreVMStart"])).done();
    server.admin().delete(&format!("{path}/p")).done();
}

#[test]
fn a_status_of_a_vmi_that_is_not_kubevirts_is_put_back_and_an_annotation_stays() {
    let Some(server) = Server::shared() else { return };
    let space = namespace(&server, "status");
    server.admin().post(&vmis(&space), &vmi("db")).done();
    let user = "status-writer";
    permit(&server, user, "kubevirt.io", &["virtualmachineinstances"], &["get", "patch"]);
    let path = format!("{}/db", vmis(&space));
    // The API server compiles a policy some time after it was made, and a new role counts late as well.
    let mut tries = 0;
    eventually("the role counts, and the policy is in force", || {
        tries += 1;
        let phase = format!("{tries}");
        let probe = server.user(user, &[]).patch(&path, MERGE, &json!({"status": {"phase": phase}}));
        (probe.status == 200 && probe.body["status"]["phase"] != *phase).then_some(())
    });
    let before = server.admin().get(&path).done()["status"]["phase"].clone();
    let patch = json!({"metadata": {"annotations": {"a": "b"}}, "status": {"phase": "Failed"}});
    let after = server.user(user, &[]).patch(&path, MERGE, &patch).done();
    assert_eq!((&after["status"]["phase"], &after["metadata"]["annotations"]["a"]), (&before, &json!("b")));
    let after = server.admin().patch(&path, MERGE, &patch).done();
    assert_eq!(after["status"]["phase"], json!("Failed"), "the administrator stands for KubeVirt");
}

#[test]
fn with_the_subresource_a_status_is_written_by_each_account_with_the_right_to() {
    let Some(server) = Server::start(&["--vmi-status", "subresource"]) else { return };
    let space = namespace(&server, "status");
    let made = server.admin().post(&vmis(&space), &vmi("db")).done();
    assert_eq!(made["status"], Value::Null, "a status is not made with its object");
    let user = "status-writer";
    permit(&server, user, "kubevirt.io", &["virtualmachineinstances/status"], &["patch"]);
    let path = format!("{}/db/status", vmis(&space));
    let after = eventually("the role counts", || {
        let answer = server.user(user, &[]).patch(&path, MERGE, &json!({"status": {"phase": "Failed"}}));
        (answer.status == 200).then_some(answer.body)
    });
    assert_eq!(after["status"]["phase"], json!("Failed"));
    server.user(user, &[]).patch(&format!("{}/db", vmis(&space)), MERGE, &json!({})).refused(403);
}

#[test]
fn an_account_may_do_what_its_role_says_and_a_node_what_is_its_own() {
    let Some(server) = Server::shared() else { return };
    let space = namespace(&server, "roles");
    let user = "reader-of-pods";
    assert!(server.user(user, &[]).get(&core(&space, "pods")).refused(403).contains("cannot list resource"));
    permit(&server, user, "", &["pods"], &["list"]);
    eventually("the role counts", || (server.user(user, &[]).get(&core(&space, "pods")).status == 200).then_some(()));
    server.user(user, &[]).get(&core(&space, "secrets")).refused(403);

    for name in ["own", "other"] {
        server.admin().post("/api/v1/nodes", &json!({"metadata": {"name": name}})).done();
    }
    let node = server.user("system:node:own", &["system:nodes", "system:authenticated"]);
    let patch = json!({"metadata": {"labels": {"a": "b"}}});
    node.patch("/api/v1/nodes/own", MERGE, &patch).done();
    node.patch("/api/v1/nodes/other", MERGE, &patch).refused(403);
    for name in ["own", "other"] {
        server.admin().delete(&format!("/api/v1/nodes/{name}")).done();
    }
}

/// A pod that asks for this amount of `wideleaf.io/huge-gib`.
pub fn pod(name: &str, huge_gib: u64) -> Value {
    let amount = json!({"wideleaf.io/huge-gib": huge_gib.to_string()});
    json!({
        "metadata": {"name": name},
        "spec": {"containers": [{
            "name": "guest",
            "image": "guest",
            "resources": {"requests": amount, "limits": amount},
        }]},
    })
}

#[test]
fn the_scheduler_takes_the_node_with_huge_memory_and_says_where_it_is_missing() {
    let Some(server) = Server::start(&[]) else { return };
    let _poor = server.nodes(&["--count", "3", "--prefix", "poor"]);
    let _rich = server.nodes(&["--count", "1", "--prefix", "rich", "--resource", "wideleaf.io/huge-gib=8"]);
    let _scheduler = server.schedule();
    let space = namespace(&server, "huge");
    server.admin().post(&core(&space, "pods"), &pod("first", 6)).done();
    let read = |name: &str| server.admin().get(&format!("{}/{name}", core(&space, "pods"))).done();
    let first = eventually("the pod runs", || Some(read("first")).filter(|pod| pod["status"]["phase"] == "Running"));
    assert_eq!(first["spec"]["nodeName"], "rich-0000");

    server.admin().post(&core(&space, "pods"), &pod("second", 4)).done();
    let why = eventually("the scheduler says why not", || {
        let pod = read("second");
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let placed = conditions.into_iter().find(|condition| condition["type"] == "PodScheduled")?;
        (placed["status"] == "False").then(|| placed["message"].as_str().unwrap().to_owned())
    });
    assert!(why.contains("4 Insufficient wideleaf.io/huge-gib"), "{why}");
    server.admin().delete(&format!("{}/first", core(&space, "pods"))).done();
    eventually("its place is free", || (read("second")["status"]["phase"] == "Running").then_some(()));
}

#[test]
fn a_killed_server_goes_on_with_its_objects_and_a_watch_from_before_has_expired() {
    let Some(mut server) = Server::start(&[]) else { return };
    let space = namespace(&server, "killed");
    let maps = core(&space, "configmaps");
    let made = server.admin().post(&maps, &json!({"metadata": {"name": "before"}})).done();
    let version = made["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    for name in ["one", "two", "three"] {
        server.admin().post(&maps, &json!({"metadata": {"name": name}})).done();
    }
    let address = server.ready.server.clone();
    server.kill();
    server.restart();
    assert_eq!(server.ready.server, address, "clients find it again");
    server.compact();
    let after = server.admin().get(&format!("{maps}/before")).done();
    assert_eq!(after["metadata"]["uid"], made["metadata"]["uid"]);
    let event = server.admin().first_event(&format!("{maps}?watch=1&resourceVersion={version}"));
    assert_eq!((&event["type"], &event["object"]["code"]), (&json!("ERROR"), &json!(410)), "{event}");
}

#[test]
fn the_end_of_its_parent_ends_it_and_leaves_no_file() {
    let Some(program) = program() else { return };
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("server");
    let mut parent = Command::new("sh");
    parent.args(["-c", "\"$0\" serve --dir \"$1\" & wait"]).arg(program).arg(&folder);
    let mut parent = Process(parent.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(parent.0.stdout.take().unwrap()).lines();
    let ready: Ready = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert!(ready.kubeconfig.exists() && ready.admin_socket.exists());
    parent.0.kill().unwrap();
    parent.0.wait().unwrap();
    // It made the folder, and the removal of that is the last that it does.
    eventually("the server ends", || (!folder.exists()).then_some(()));
}

#[test]
fn a_folder_with_other_files_and_one_in_use_are_refused() {
    let Some(server) = Server::shared() else { return };
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("precious"), "").unwrap();
    let refusal = |dir: &std::path::Path| {
        let output = server.command("serve").arg("--dir").arg(dir).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    let text = refusal(place.path());
    assert!(
        text.starts_with("fleet-lab: cannot serve in ") && text.contains("name an empty or a new folder"),
        "{text}"
    );
    assert!(place.path().join("precious").exists());
    let text = refusal(server.ready.kubeconfig.parent().unwrap());
    assert!(text.contains("another server uses it"), "{text}");
    assert_eq!(server.admin().text("/readyz"), "ok");
}
