//! The node agent with everything real but the kubelet: API server, scheduler, wideleafd, QEMU, and the chart's account
//! for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use serde_json::{Value, json};
use wideleaf_control::client::ask;
use wideleaf_control::protocol::{Answer, Request};
use wideleaf_control::view::{Care, VmView};
use wideleaf_policies::units::mib;
use wideleaf_testing::programs::built;
use wideleaf_testing::qemu_guest::{QEMU, QemuGuest, QemuRam, QemuSetup};
use wideleaf_testing::{Need, has_kvm, is_there};

use crate::chart::{ACCOUNT, NAMESPACE, install};
use crate::control_plane::pod;
use crate::server::{APPLY, Client, MERGE, Process, Server, core, eventually, namespace, vmis};

/// Field manager and reporting component of the agent.
const MANAGER: &str = "wideleaf-node";
/// Annotation with the coverage for programs.
const STATUS: &str = "wideleaf.io/status";
/// Annotation that asks for a guarantee.
pub const GUARANTEE: &str = "wideleaf.io/guarantee";
/// Condition of a pod.
const POD_CONDITION: &str = "wideleaf.io/HugePagesCovered";
/// Condition of a VMI.
const VMI_CONDITION: &str = "HugePagesCovered";
/// Extended resource of a node.
const RESOURCE: &str = "wideleaf.io/huge-gib";
/// The node that this machine is.
pub const NODE: &str = "here-0000";

/// Whether guests of QEMU run here.
fn has_guests() -> bool {
    let qemu = Command::new(QEMU).arg("--version").stdout(Stdio::null()).status();
    has_kvm() && is_there(Need::Qemu, qemu.map(drop).map_err(|error| format!("{QEMU}: {error}")))
}

/// A node of a fleet: the API server with the chart, wideleafd, and the agent with the chart's account.
pub struct Node {
    pub server: Server,
    pub agent: Option<Process>,
    pub daemon: Option<Process>,
    /// Start of the names of its guests: a daemon of another test takes none of them.
    mark: String,
    program: PathBuf,
    folder: tempfile::TempDir,
    _paper: Process,
    _scheduler: Process,
}

impl Node {
    /// A node on which nothing runs yet; `None` if the test is to be skipped.
    pub fn start(options: &[&str], nodes: &[&str]) -> Option<Node> {
        let server = Server::start(options)?;
        let mut arguments = vec!["--prefix", "here"];
        arguments.extend(if nodes.is_empty() { &["--count", "1"] } else { nodes });
        let (paper, made) = server.nodes(&arguments);
        println!("nodes and guests on paper: {made}");
        // It also places the pods of the DaemonSet.
        let scheduler = server.schedule();
        install(&server);
        let program = built(&["build", "-p", "wideleaf-node", "--bin", "wideleaf-node"], false);
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mark = format!("fleet{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::tempdir().unwrap();
        let mut node =
            Node { server, agent: None, daemon: None, mark, program, folder, _paper: paper, _scheduler: scheduler };
        node.write_kubeconfig();
        node.start_daemon();
        node.start_agent(&[]);
        Some(node)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Path of the daemon's control socket.
    pub fn socket(&self) -> PathBuf {
        self.file("control.sock")
    }

    /// Path of the socket for node hooks.
    pub fn hooks(&self) -> PathBuf {
        self.file("hooks.sock")
    }

    /// A token of the account that is bound to the chart's pod on this node, as the kubelet asks for.
    fn write_kubeconfig(&self) {
        let pods = core(NAMESPACE, "pods");
        let pod = eventually("the DaemonSet's pod is on this node", || {
            let pods = self.server.admin().get(&pods).done()["items"].as_array().cloned().unwrap();
            pods.into_iter().find(|pod| pod["spec"]["nodeName"] == NODE && pod["status"]["phase"] == "Running")
        });
        let bound = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        });
        let path = format!("{}/{ACCOUNT}/token", core(NAMESPACE, "serviceaccounts"));
        let request = json!({"spec": {"expirationSeconds": 7200, "boundObjectRef": bound}});
        let token = self.server.admin().post(&path, &request).done()["status"]["token"].clone();
        let admin = fs::read_to_string(&self.server.ready.kubeconfig).unwrap();
        let authority =
            admin.lines().find_map(|line| line.trim().strip_prefix("certificate-authority-data: ")).unwrap();
        let cluster = json!({"server": self.server.ready.server, "certificate-authority-data": authority});
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": "agent", "user": {"token": token}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "agent"}}],
        });
        fs::write(self.file("kubeconfig"), config.to_string()).unwrap();
    }

    /// Starts wideleafd, which takes the guests of this test by itself.
    pub fn start_daemon(&mut self) {
        let (socket, state, metrics) = (self.socket(), self.file("state.json"), self.file("metrics.sock"));
        let metrics = format!("unix:{}", metrics.display());
        let names = format!("{}-*", self.mark);
        let text = format!(
            "[socket]\npath = {socket:?}\n[state]\npath = {state:?}\n[metrics]\nlisten = {metrics:?}\n[attach]\n\
             automatic = [{names:?}]\ninterval = \"1s\"\n[defaults]\npolicy = \"greedy\"\n"
        );
        fs::write(self.file("wideleafd.toml"), text).unwrap();
        let mut command = Command::new(built(&["build", "-p", "wideleaf-daemon", "--bin", "wideleafd"], false));
        command.arg("--config").arg(self.file("wideleafd.toml")).env_remove("NOTIFY_SOCKET");
        self.daemon = Some(self.spawn(command, "daemon.log"));
        eventually("the daemon answers", || ask(&self.socket(), Request::Daemon).ok());
    }

    /// Starts the agent.
    pub fn start_agent(&mut self, more: &[&str]) {
        let mut command = Command::new(&self.program);
        command.args(["--node", NODE]).arg("--daemon").arg(self.socket()).arg("--hooks").arg(self.hooks());
        command.arg("--kubeconfig").arg(self.file("kubeconfig")).args(more);
        command.env_remove("KUBECONFIG").env_remove("NODE_NAME");
        self.agent = Some(self.spawn(command, "agent.log"));
    }

    fn spawn(&self, mut command: Command, log: &str) -> Process {
        let log = fs::File::options().create(true).append(true).open(self.file(log)).unwrap();
        Process(command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }

    /// Log of the agent so far.
    pub fn agent_log(&self) -> String {
        fs::read_to_string(self.file("agent.log")).unwrap()
    }

    /// Name of the agent's account, and requests as it makes them, with its node in them.
    pub fn account(&self) -> (String, Client<'_>) {
        let user = format!("system:serviceaccount:{NAMESPACE}:{ACCOUNT}");
        let groups = ["system:serviceaccounts", "system:authenticated"];
        let client = self.server.user(&user, &groups).of_node(NODE);
        (user, client)
    }

    /// The guests that the daemon manages.
    pub fn managed(&self) -> Vec<VmView> {
        let Ok(Answer::Vms(mut vms)) = ask(&self.socket(), Request::List) else { return Vec::new() };
        vms.retain(|vm| vm.care != Care::Unmanaged);
        vms
    }

    /// The node's object.
    pub fn object(&self) -> Value {
        self.server.admin().get(&format!("/api/v1/nodes/{NODE}")).done()
    }
}

/// A guest of QEMU in the control group of its pod, with a VMI and a pod as KubeVirt makes them.
pub struct Guest {
    pub qemu: QemuGuest,
    pub space: String,
    pub vmi: String,
    pub pod: String,
    group: PathBuf,
}

impl Guest {
    /// Starts one; `None` if the test is to be skipped.
    pub fn start(node: &Node, name: &str) -> Option<Guest> {
        if !has_guests() {
            return None;
        }
        let space = namespace(&node.server, "shop");
        let (vmi, pod) = make_vmi(&node.server, &space, name);
        let setup_name = format!("{}-{name}", node.mark);
        let work = "pattern bytes=64M seconds=36000";
        let setup = QemuSetup::new(&setup_name, mib(128), QemuRam::AnonymousOnBasePages, work);
        let mut qemu = QemuGuest::start(&setup).unwrap();
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        let group = groups().join(format!("kubepods/burstable/pod{uid}/guest"));
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("cgroup.procs"), qemu.pid().to_string()).unwrap();
        qemu.check_all_words();
        let pod = format!("{}/{}", core(&space, "pods"), pod["metadata"]["name"].as_str().unwrap());
        let vmi = format!("{}/{}", vmis(&space), vmi["metadata"]["name"].as_str().unwrap());
        Some(Guest { qemu, space, vmi, pod, group })
    }

    /// The status that the agent writes for programs, from the VMI's annotation.
    pub fn status(&self, node: &Node) -> Option<Value> {
        let vmi = node.server.admin().get(&self.vmi).done();
        serde_json::from_str(vmi["metadata"]["annotations"][STATUS].as_str()?).ok()
    }

    /// A condition of an object, by its path.
    pub fn condition(&self, node: &Node, path: &str, name: &str) -> Option<Value> {
        let object = node.server.admin().get(path).done();
        let conditions = object["status"]["conditions"].as_array()?.clone();
        conditions.into_iter().find(|condition| condition["type"] == name)
    }

    /// Whether the agent has published an event with this reason in its namespace.
    pub fn has_event(&self, node: &Node, reason: &str) -> bool {
        let events = node.server.admin().get(&core(&self.space, "events")).done();
        let is_it = |event: &Value| {
            let by = [&event["reportingComponent"], &event["source"]["component"]];
            event["reason"] == reason && by.into_iter().any(|name| name == MANAGER)
        };
        events["items"].as_array().unwrap().iter().any(is_it)
    }

    /// The condition of its pod.
    pub fn pod_condition(&self, node: &Node) -> Option<Value> {
        self.condition(node, &self.pod, POD_CONDITION)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.qemu.kill();
        // Groups above these are shared with other tests; the kernel keeps those that are in use.
        for group in self.group.ancestors().take(4) {
            let _ = fs::remove_dir(group);
        }
    }
}

/// Root of the control groups of version 2.
fn groups() -> &'static Path {
    let hybrid = Path::new("/sys/fs/cgroup/unified");
    if hybrid.exists() { hybrid } else { Path::new("/sys/fs/cgroup") }
}

/// A running VMI on this node, and the pod of its virt-launcher.
fn make_vmi(server: &Server, space: &str, name: &str) -> (Value, Value) {
    let status = json!({"phase": "Running", "nodeName": NODE, "conditions": [{"type": "Ready", "status": "True"}]});
    let object = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "labels": {"kubevirt.io/nodeName": NODE}},
        "spec": {"domain": {"memory": {"guest": "128Mi"}}},
        "status": status,
    });
    let vmi = server.admin().post(&vmis(space), &object).done();
    if vmi["status"].is_null() {
        let path = format!("{}/{name}/status", vmis(space));
        server.admin().patch(&path, MERGE, &json!({"status": status})).done();
    }
    let uid = &vmi["metadata"]["uid"];
    let owner = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "name": name,
        "uid": uid,
        "controller": true,
    });
    let object = json!({
        "metadata": {
            "name": format!("virt-launcher-{name}"),
            "labels": {"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": uid, "vm.kubevirt.io/name": name},
            "annotations": {"kubevirt.io/domain": name},
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": NODE, "containers": [{"name": "compute", "image": "virt-launcher"}]},
    });
    let pod = server.admin().post(&core(space, "pods"), &object).done();
    (vmi, pod)
}

/// Whether a guest's RAM is on huge pages but for what its VMM keeps back.
fn is_large(node: &Node) -> bool {
    node.managed().first().and_then(VmView::coverage).is_some_and(|coverage| coverage >= 9_000)
}

#[test]
fn a_guest_s_coverage_is_on_its_pod_and_its_vmi_seconds_after_it_changed() {
    let Some(node) = Node::start(&[], &[]) else { return };
    let Some(guest) = Guest::start(&node, "db") else { return };
    eventually("it is on huge pages", || is_large(&node).then_some(()));
    let changed = Instant::now();
    let condition =
        eventually("the pod says so", || guest.pod_condition(&node).filter(|condition| condition["status"] == "True"));
    println!("condition of the pod {} ms after the change: {condition}", changed.elapsed().as_millis());
    assert!(condition["message"].as_str().unwrap().contains('%'), "{condition}");
    let status = eventually("the VMI has it for programs", || guest.status(&node));
    println!("annotation: {status}");
    assert_eq!(guest.condition(&node, &guest.vmi, VMI_CONDITION), None, "KubeVirt would have put it back");
    let wish = json!({"metadata": {"annotations": {GUARANTEE: "much"}}});
    node.server.admin().patch(&guest.vmi, MERGE, &wish).done();
    eventually("there is an event of the mistake", || guest.has_event(&node, "AnnotationInvalid").then_some(()));
}

#[test]
fn where_the_status_of_a_vmi_is_a_subresource_the_condition_is_on_it_beside_others() {
    let Some(node) = Node::start(&["--vmi-status", "subresource"], &[]) else { return };
    let Some(guest) = Guest::start(&node, "web") else { return };
    let condition = eventually("the VMI says that it is covered", || {
        guest.condition(&node, &guest.vmi, VMI_CONDITION).filter(|condition| condition["status"] == "True")
    });
    println!("{condition}");
    assert!(guest.condition(&node, &guest.vmi, "Ready").is_some(), "KubeVirt's own condition stays");
}

#[test]
fn the_scheduler_counts_the_node_s_memory_that_can_become_large() {
    let Some(node) = Node::start(&[], &[]) else { return };
    let _others = node.server.nodes(&["--count", "2", "--prefix", "poor"]);
    let gib = |node: &Value, part: &str| node["status"][part][RESOURCE].as_str()?.parse::<u64>().ok();
    let object = eventually("the node has the resource", || {
        Some(node.object()).filter(|object| gib(object, "capacity").is_some() && gib(object, "allocatable").is_some())
    });
    let labels = object["metadata"]["labels"].as_object().unwrap();
    for name in ["promotable-2m-gib", "promotable-1g-gib", "compactable-2m-gib", "compactable-1g-gib"] {
        let value = labels[&format!("wideleaf.io/{name}")].as_str().unwrap();
        println!("wideleaf.io/{name}: {value}");
        assert!(value.parse::<u64>().is_ok(), "{value}");
    }
    let all = gib(&object, "allocatable").unwrap();
    println!("{RESOURCE}: {all}");
    assert!(all > 0, "this machine has no free blocks of 2 MiB: {object}");
    let space = namespace(&node.server, "placed");
    node.server.admin().post(&core(&space, "pods"), &pod("fits", 1)).done();
    let read = |name: &str| node.server.admin().get(&format!("{}/{name}", core(&space, "pods"))).done();
    let placed = eventually("it is placed", || read("fits")["spec"]["nodeName"].as_str().map(str::to_owned));
    assert_eq!(placed, NODE);
}

#[test]
fn the_agent_s_account_changes_its_own_fields_of_its_own_node_and_nothing_else() {
    let Some(node) = Node::start(&[], &[]) else { return };
    let _others = node.server.nodes(&["--count", "1", "--prefix", "other"]);
    let (_, account) = node.account();
    let own = format!("/api/v1/nodes/{NODE}");
    let other = "/api/v1/nodes/other-0000";
    let label = |name: &str| json!({"metadata": {"labels": {name: "1"}}});
    account.patch(&own, MERGE, &label("wideleaf.io/test")).done();
    // The API server compiles a policy some time after it was made. A label that is there already is no change.
    let mut tries = 0;
    eventually("the chart's policy is in force", || {
        tries += 1;
        [403, 422].contains(&account.patch(&own, MERGE, &label(&format!("probe-{tries}"))).status).then_some(())
    });
    for (path, name) in [(own.as_str(), "kubernetes.io/hostname"), (own.as_str(), "else"), (other, "wideleaf.io/test")]
    {
        let answer = account.patch(path, MERGE, &label(name));
        assert!([403, 422].contains(&answer.status), "{path} {name}: {answer:?}");
    }
    let taint = json!({"spec": {"unschedulable": true}});
    assert!([403, 422].contains(&account.patch(&own, MERGE, &taint).status));
    let capacity = |name: &str| json!({"status": {"capacity": {name: "7"}}});
    assert!([403, 422].contains(&account.patch(&format!("{own}/status"), MERGE, &capacity("cpu")).status));
    account.patch(&format!("{own}/status"), MERGE, &capacity("wideleaf.io/test")).done();

    let space = namespace(&node.server, "account");
    let (_, launcher) = make_vmi(&node.server, &space, "db");
    let launcher = format!("{}/{}", core(&space, "pods"), launcher["metadata"]["name"].as_str().unwrap());
    for kind in ["secrets", "configmaps", "serviceaccounts"] {
        account.get(&core(&space, kind)).refused(403);
    }
    account.post(&core(&space, "pods"), &pod("made", 1)).refused(403);
    account.delete(&launcher).refused(403);
    account.delete(&own).refused(403);
    let image = json!({"spec": {"containers": [{"name": "compute", "image": "other"}]}});
    let strategic = "application/strategic-merge-patch+json";
    assert!([403, 422].contains(&account.patch(&launcher, strategic, &image).status));
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    assert!([403, 422].contains(&account.patch(&format!("{launcher}/status"), strategic, &ready).status));
    account.get("/api/v1/secrets").refused(403);
    account.get("/apis/rbac.authorization.k8s.io/v1/clusterroles").refused(403);
}

#[test]
fn each_node_hook_of_kubevirt_is_answered_also_while_the_daemon_hangs() {
    let Some(node) = Node::start(&[], &[]) else { return };
    eventually("the agent has its socket", || node.hooks().exists().then_some(()));
    let space = namespace(&node.server, "hooked");
    let (vmi, _) = make_vmi(&node.server, &space, "db");
    let file = node.file("vmi.json");
    let call = |point: &str, vmi: &Value| {
        fs::write(&file, vmi.to_string()).unwrap();
        let mut command = node.server.command("hook");
        command.arg("--socket").arg(node.hooks()).args(["--point", point, "--node", NODE]).arg("--vmi").arg(&file);
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        println!("{point}: {} {}", text(&output.stdout), text(&output.stderr));
        (output.status.code(), text(&output.stderr))
    };
    const POINTS: [&str; 7] = [
        "PreVMStart",
        "PostVMStart",
        "PreMigrationSource",
        "PreMigrationTarget",
        "PostMigrationTarget",
        "PreVMStop",
        "PostVMStop",
    ];
    for point in POINTS {
        assert_eq!(call(point, &vmi).0, Some(0), "{point}");
    }
    let mut large = vmi.clone();
    large["spec"]["domain"]["memory"]["guest"] = json!("64Ti");
    assert_eq!(call("PreVMStart", &large).0, Some(0), "it asks for no guarantee");
    large["metadata"]["annotations"] = json!({"wideleaf.io/huge-pages": "guaranteed", GUARANTEE: "95%"});
    let (code, why) = call("PreVMStart", &large);
    assert_eq!(code, Some(1));
    assert!(why.contains("was refused"), "{why}");
    let daemon = node.daemon.as_ref().unwrap();
    daemon.signal(nix::sys::signal::Signal::SIGSTOP);
    let codes: Vec<_> = POINTS.iter().map(|point| call(point, &vmi).0).collect();
    daemon.signal(nix::sys::signal::Signal::SIGCONT);
    assert_eq!(codes, [Some(0); 7]);
}

#[test]
fn what_another_writer_has_taken_is_left_to_it() {
    let Some(mut node) = Node::start(&[], &[]) else { return };
    let path = format!("/api/v1/nodes/{NODE}");
    let name = "wideleaf.io/promotable-2m-gib";
    eventually("the agent has set its label", || node.object()["metadata"]["labels"][name].as_str().map(drop));
    let theirs = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": {name: "31337"}},
    });
    node.server.admin().patch(&format!("{path}?fieldManager=other&force=true"), APPLY, &theirs).done();
    // An agent that runs looks at its node again after minutes; one that begins looks at once.
    let mut agent = node.agent.take().unwrap();
    agent.0.kill().unwrap();
    agent.0.wait().unwrap();
    node.start_agent(&[]);
    eventually("the agent has tried its labels, and left them", || {
        node.agent_log().contains("labels are left to the other writer").then_some(())
    });
    assert_eq!(node.object()["metadata"]["labels"][name], json!("31337"), "{}", node.agent_log());
    eventually("there is an event about the node", || {
        let events = node.server.admin().get(&core("default", "events")).done();
        let is_it = |event: &Value| event["reason"] == "FieldOwnedByOther" && event["involvedObject"]["kind"] == "Node";
        events["items"].as_array().unwrap().iter().any(is_it).then_some(())
    });
}
