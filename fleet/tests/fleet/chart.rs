//! The chart, by Helm's real client.

use serde_json::{Value, json};

use crate::server::{Server, core, eventually, namespace, root, vmis};

/// Namespace of the release.
pub const NAMESPACE: &str = "wideleaf";
/// Account of the agent, as the chart names it in a release `wideleaf`.
pub const ACCOUNT: &str = "wideleaf";

fn chart() -> String {
    root().join("packaging/helm/wideleaf").display().to_string()
}

/// Runs Helm, which must succeed.
fn helm(server: &Server, arguments: &[&str]) -> String {
    let output = server.helm(arguments);
    assert!(output.status.success(), "helm {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Installs the chart. There is no container on paper, so the agents of tests are processes with the chart's account.
pub fn install(server: &Server) {
    helm(server, &["install", "wideleaf", &chart(), "--namespace", NAMESPACE, "--create-namespace"]);
}

/// Everything of the cluster that the chart or its pods might change, without what changes by itself.
fn without_time(mut object: Value) -> Value {
    let metadata = object["metadata"].as_object_mut().unwrap();
    for name in ["resourceVersion", "managedFields", "uid", "creationTimestamp", "generation"] {
        metadata.remove(name);
    }
    object
}

fn objects(server: &Server, path: &str) -> Vec<Value> {
    let items = server.admin().get(path).done()["items"].as_array().cloned().unwrap();
    items.into_iter().map(without_time).collect()
}

/// Paths of all kinds that the chart has objects of, and that outlive its namespace.
const KINDS: [&str; 6] = [
    "/api/v1/nodes",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "/apis/plugin.kubevirt.io/v1alpha1/plugins",
];

#[test]
fn the_chart_is_installed_upgraded_and_uninstalled_and_leaves_nothing() {
    let Some(server) = Server::start(&[]) else { return };
    let _paper = server.nodes(&["--count", "3"]);
    let _scheduler = server.schedule();
    let before: Vec<_> = KINDS.iter().map(|kind| objects(&server, kind)).collect();
    install(&server);
    let pods = || server.admin().get(&core(NAMESPACE, "pods")).done()["items"].as_array().cloned().unwrap();
    eventually("each node has a pod", || {
        (pods().iter().filter(|pod| pod["status"]["phase"] == "Running").count() == 3).then_some(())
    });
    let listed = helm(&server, &["list", "--namespace", NAMESPACE, "--output", "json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((&listed[0]["status"], &listed[0]["revision"]), (&json!("deployed"), &json!("1")), "{listed}");

    let more = ["--set", "kubevirt.plugin.enabled=true", "--wait"];
    let mut upgrade = vec!["upgrade", "wideleaf", "--namespace", NAMESPACE];
    let chart = chart();
    upgrade.push(&chart);
    upgrade.extend(more);
    helm(&server, &upgrade);
    let plugins = objects(&server, "/apis/plugin.kubevirt.io/v1alpha1/plugins");
    assert_eq!(plugins.len(), 1, "{plugins:?}");
    let policies = objects(&server, KINDS[3]);
    let status = &policies.iter().find(|policy| policy["metadata"]["name"] == "wideleaf").unwrap()["status"];
    assert_eq!(status["typeChecking"]["expressionWarnings"], Value::Null, "{status}");

    helm(&server, &["uninstall", "wideleaf", "--namespace", NAMESPACE, "--wait"]);
    eventually("its pods end", || pods().is_empty().then_some(()));
    for (kind, before) in KINDS.iter().zip(before) {
        assert_eq!(objects(&server, kind), before, "{kind}");
    }
}

/// A policy that refuses VMIs for which the condition holds: the API server's language for it is KubeVirt's (CEL).
fn refuse(server: &Server, condition: &str) {
    let path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic";
    let vmis = json!({
        "apiGroups": ["kubevirt.io"],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["virtualmachineinstances"],
    });
    let expression = format!("!({})", condition.replace("vmi.metadata", "object.metadata"));
    let spec = json!({
        "matchConstraints": {"resourceRules": [vmis]},
        "validations": [{"expression": expression, "message": "it asks for guaranteed"}],
    });
    server.admin().post(&format!("{path}ies"), &json!({"metadata": {"name": "probe"}, "spec": spec})).done();
    let spec = json!({"policyName": "probe", "validationActions": ["Deny"]});
    server.admin().post(&format!("{path}ybindings"), &json!({"metadata": {"name": "probe"}, "spec": spec})).done();
}

#[test]
fn a_failed_call_fails_the_vms_alone_that_ask_for_guaranteed() {
    let Some(server) = Server::start(&[]) else { return };
    let (chart, with_plugin) = (chart(), ["--set", "kubevirt.plugin.enabled=true"]);
    let install = ["install", "wideleaf", &chart, "--namespace", NAMESPACE, "--create-namespace"];
    helm(&server, &[&install[..], &with_plugin].concat());
    let plugin = server.admin().get("/apis/plugin.kubevirt.io/v1alpha1/plugins/wideleaf").done();
    let hooks = plugin["spec"]["nodeHooks"].as_array().unwrap();
    let failing: Vec<&Value> = hooks.iter().filter(|hook| hook["failureStrategy"] != "Ignore").collect();
    assert_eq!(failing.len(), 1, "{hooks:?}");
    refuse(&server, failing[0]["condition"].as_str().unwrap());

    let space = namespace(&server, "conditions");
    let is_refused = |annotations: Value| {
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "db", "annotations": annotations},
            "spec": {"domain": {}},
        });
        let answer = server.admin().post(&format!("{}?dryRun=All", vmis(&space)), &vmi);
        answer.status >= 300 && answer.refused(422).contains("it asks for guaranteed")
    };
    let (kind, share) = ("wideleaf.io/huge-pages", "wideleaf.io/guarantee");
    eventually("the policy is in force", || is_refused(json!({kind: "guaranteed"})).then_some(()));
    for guaranteed in [json!({kind: "guaranteed", share: "90%"}), json!({share: "95%"}), json!({share: "guaranteed"})] {
        assert!(is_refused(guaranteed.clone()), "{guaranteed}");
    }
    for other in [Value::Null, json!({}), json!({kind: "bestEffort", share: "95%"}), json!({share: "bestEffort:95%"})] {
        assert!(!is_refused(other.clone()), "{other}");
    }
}

#[test]
fn a_chart_with_a_wrong_value_is_refused_before_anything_is_made() {
    let Some(server) = Server::shared() else { return };
    let chart = chart();
    for (value, name) in [
        ("agent.intervalSeconds=soon", "intervalSeconds"),
        ("daemon.budget.outOfReach=0%", "outOfReach"),
        ("daemon.budget.outOfReach=101%", "outOfReach"),
    ] {
        let output = server.helm(&["install", "bad", &chart, "--namespace", "bad", "--set", value]);
        assert!(!output.status.success(), "{value}");
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(why.contains(name), "{why}");
    }
    assert_eq!(server.admin().get("/apis/apps/v1/namespaces/bad/daemonsets").done()["items"], json!([]));
}
