//! The hooks of a node, with a fake daemon in this process that a test scripts.

use super::*;
use crate::annotations::{GUARANTEE, HUGE_PAGES, POLICY};
use crate::matching::tests::{POD, guest};
use crate::testing::{FakeDaemon, ok, refusal};
use parking_lot::Mutex;
use serde_json::{Value, json};
use wideleaf_control::protocol::{ASK_AGAIN, Answer, Reply, Settings, Target};
use wideleaf_control::view::{DaemonView, PromotableView};

const GIB: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(30);

struct Bench {
    _folder: tempfile::TempDir,
    daemon: FakeDaemon,
    hooks: Arc<Hooks>,
}

fn vmi(annotations: &Value) -> Vec<u8> {
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "db", "namespace": "shop", "uid": "v-1", "annotations": annotations},
        "spec": {"domain": {"memory": {"guest": "4Gi"}}},
        "status": {"activePods": {POD: "n1"}},
    });
    vmi.to_string().into_bytes()
}

fn guaranteed() -> Vec<u8> {
    vmi(&json!({HUGE_PAGES: "guaranteed"}))
}

fn plain() -> Vec<u8> {
    vmi(&json!({}))
}

fn unmanaged() -> VmView {
    VmView { care: Care::Unmanaged, ..guest("shop_db", Some(&format!("/kubepods/pod{POD}/c"))) }
}

fn view(compacted_2m: u64) -> Option<Reply> {
    let promotable = PromotableView { now_2m: GIB, compacted_2m, ..PromotableView::default() };
    ok(Answer::Daemon(DaemonView { promotable: Some(promotable), ..DaemonView::default() }))
}

impl Bench {
    fn new(answer: impl FnMut(&Ask) -> Option<Reply> + Send + 'static) -> Bench {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let socket = folder.path().join("control.sock");
        let daemon = FakeDaemon::at(&socket, answer);
        let (store, holds, counters) = (Arc::default(), Arc::default(), Arc::default());
        let hooks = Arc::new(Hooks::new(Daemon::at(&socket), store, holds, counters));
        Bench { _folder: folder, daemon, hooks }
    }

    /// A daemon with one guest, and that much memory for large pages.
    fn with(guest: VmView, compacted_2m: u64) -> Bench {
        Bench::new(move |request| match request {
            Ask::List => ok(Answer::Vms(vec![guest.clone()])),
            Ask::Daemon => view(compacted_2m),
            _ => ok(Answer::Done),
        })
    }

    async fn call(&self, point: &str, vmi: &[u8]) -> Result<(), Status> {
        self.hooks.call(point, vmi, LIMIT).await
    }
}

#[tokio::test]
async fn a_start_with_a_guarantee_is_prepared_and_one_without_is_not_asked_about() {
    let bench = Bench::with(unmanaged(), 4 * GIB);
    bench.call("PreVMStart", &plain()).await.expect("best effort");
    assert_eq!(bench.daemon.asked(), []);
    bench.call("PreVMStart", &guaranteed()).await.expect("there is room");
    let asked = bench.daemon.asked();
    let [Ask::Daemon, Ask::Prepare { domain, uuid, pages, ordinary }] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((domain.as_str(), uuid.as_str(), pages.len()), ("shop_db", "v-1", 0));
    let expected = OrdinaryMemory { bytes: 4 * GIB, large_bytes: (4 * GIB * 95).div_ceil(100) };
    assert_eq!(*ordinary, Some(expected));
}

#[tokio::test]
async fn only_a_guarantee_that_cannot_be_met_fails_a_vm_and_the_error_says_what_to_do() {
    let bench = Bench::with(unmanaged(), 3 * GIB);
    let status = bench.call("PreVMStart", &guaranteed()).await.expect_err("too little");
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(
        status.message(),
        "no huge pages for shop_db: 3.8 GiB have to be in huge pages, and 3 GiB can be, 1 GiB of it now; free memory \
         on this node, or set the annotation wideleaf.io/huge-pages to bestEffort"
    );
    let sought = vmi(&json!({HUGE_PAGES: "bestEffort", GUARANTEE: "95%"}));
    bench.call("PreVMStart", &sought).await.expect("a share that is sought never prevents a start");
    bench.call("PreMigrationTarget", &guaranteed()).await.expect_err("nor does it fit after a migration");

    let bench = Bench::new(|request| match request {
        Ask::Daemon => view(4 * GIB),
        _ => refusal("no room for shop_db: too little memory"),
    });
    let status = bench.call("PreVMStart", &guaranteed()).await.expect_err("the daemon refuses");
    assert!(status.message().contains("too little memory"), "{status}");
}

#[tokio::test]
async fn memory_of_the_kubelets_pools_is_left_to_the_kubelet() {
    let bench = Bench::with(unmanaged(), 0);
    let mut vmi: Value = serde_json::from_slice(&guaranteed()).expect("JSON");
    vmi["spec"]["domain"]["memory"]["hugepages"] = json!({"pageSize": "2Mi"});
    bench.call("PreVMStart", vmi.to_string().as_bytes()).await.expect("it has its pages already");
    assert_eq!(bench.daemon.asked(), []);
}

#[tokio::test]
async fn a_silent_daemon_delays_no_call_past_its_limit_and_fails_only_what_asks_for_it() {
    let bench = Bench::new(|_| None);
    let limit = Duration::from_millis(200);
    for point in ["PreVMStart", "PostVMStart", "PreMigrationSource", "PostMigrationTarget", "PreVMStop", "Unheard"] {
        let answered = tokio::time::timeout(LIMIT, bench.hooks.call(point, &plain(), limit)).await;
        answered.expect("long before").expect("the VM goes on");
    }
    let answered = tokio::time::timeout(LIMIT, bench.hooks.call("PreVMStart", &guaranteed(), limit)).await;
    let status = answered.expect("long before").expect_err("nothing tells that there is room");
    assert!(status.message().contains("wideleafd"), "{status}");
    bench.hooks.call("PostVMStart", &guaranteed(), limit).await.expect("it has started already");
}

#[tokio::test]
async fn a_guest_that_appears_after_the_answer_is_managed_all_the_same() {
    let guests = Arc::new(Mutex::new(Vec::new()));
    let listed = Arc::clone(&guests);
    let bench = Bench::new(move |request| match request {
        Ask::List => ok(Answer::Vms(listed.lock().clone())),
        _ => ok(Answer::Done),
    });
    bench.call("PostVMStart", &plain()).await.expect("it runs");
    assert!(bench.daemon.asked().iter().all(|ask| *ask == Ask::List), "virt-handler does not wait for the guest");
    guests.lock().push(unmanaged());
    let is_managed = async {
        while !bench.daemon.asked().iter().any(|ask| matches!(ask, Ask::Attach { target: Target::Pid(4711), .. })) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, is_managed).await.expect("at the next look");
}

#[tokio::test]
async fn calls_that_go_on_after_their_answer_are_bounded() {
    let bench = Bench::new(|_| None);
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..CALLS_MAX {
        let hooks = Arc::clone(&bench.hooks);
        calls.spawn(async move { hooks.call("PreMigrationSource", &plain(), LIMIT).await });
    }
    while let Some(answer) = calls.join_next().await {
        answer.expect("no panic").expect("it runs");
    }
    let mut asked = bench.daemon.asked().len();
    while asked < CALLS_MAX {
        tokio::time::sleep(Duration::from_millis(10)).await;
        asked += bench.daemon.asked().len();
    }
    bench.call("PreMigrationSource", &plain()).await.expect("it runs");
    assert_eq!(bench.daemon.asked(), [], "there is no room for one more");
}

#[tokio::test]
async fn without_a_daemon_only_guaranteed_fails() {
    let daemon = Daemon::at(Path::new("/nowhere/control.sock"));
    let hooks = Arc::new(Hooks::new(daemon, Arc::default(), Arc::default(), Arc::default()));
    hooks.call("PreVMStart", &plain(), LIMIT).await.expect("best effort");
    let status = hooks.call("PreVMStart", &guaranteed(), LIMIT).await.expect_err("no daemon");
    assert!(status.message().contains("no wideleafd listens at /nowhere/control.sock: start it"), "{status}");
}

#[tokio::test]
async fn a_vmi_that_cannot_be_read_fails_no_vm() {
    let bench = Bench::with(unmanaged(), 0);
    for text in ["", "{", "[]", "{\"metadata\":{}}", "{\"metadata\":{\"name\":1}}"] {
        bench.call("PreVMStart", text.as_bytes()).await.expect("the VM goes on");
    }
}

#[tokio::test]
async fn a_guest_that_has_started_is_attached_with_its_settings() {
    let bench = Bench::with(unmanaged(), GIB);
    for point in ["PostVMStart", "PostMigrationTarget"] {
        bench.call(point, &vmi(&json!({POLICY: "coverage", GUARANTEE: "bestEffort:90%"}))).await.expect("it runs");
        let asked = bench.daemon.asked();
        let [Ask::List, Ask::Attach { target: Target::Pid(4711), settings }] = &asked[..] else { panic!("{asked:?}") };
        let expected = Settings {
            policy: Some("coverage".into()),
            guarantee: Some("bestEffort:90%".into()),
            ..Settings::default()
        };
        assert_eq!(*settings, expected);
    }
    bench.call("PostVMStart", &plain()).await.expect("it runs");
    assert!(matches!(&bench.daemon.asked()[..], [Ask::List, Ask::Attach { .. }]), "without settings too");
    let managed = Bench::with(VmView { care: Care::Managed, ..unmanaged() }, GIB);
    managed.call("PostVMStart", &plain()).await.expect("it runs");
    assert_eq!(managed.daemon.asked(), [Ask::List], "its settings are an operator's");
}

#[tokio::test]
async fn a_guest_of_another_pod_is_not_taken_for_its_name() {
    let other = "/kubepods/podffffffff-ffff-ffff-ffff-ffffffffffff/c";
    let bench = Bench::with(VmView { cgroup: Some(other.into()), ..unmanaged() }, GIB);
    bench.call("PreMigrationSource", &plain()).await.expect("ignored");
    assert_eq!(bench.daemon.asked(), [Ask::List]);
}

#[tokio::test]
async fn a_guest_that_migrates_away_is_left_alone() {
    let bench = Bench::with(VmView { care: Care::Managed, ..unmanaged() }, GIB);
    bench.call("PreMigrationSource", &plain()).await.expect("it runs");
    let asked = bench.daemon.asked();
    assert_eq!(asked, [Ask::List, Ask::LeaveAlone { vm: "4711".into(), for_s: HOLD_S }]);
    let off = Bench::with(VmView { care: Care::Off, ..unmanaged() }, GIB);
    off.call("PreMigrationSource", &plain()).await.expect("it runs");
    assert_eq!(off.daemon.asked(), [Ask::List], "no page changes anyway");
}

#[tokio::test]
async fn a_guest_that_wideleafd_is_about_to_take_up_is_left_alone_as_soon_as_it_has() {
    let mut refused = 0;
    let bench = Bench::new(move |request| match request {
        Ask::List => {
            let care = Care::LeftAlone { reason: "wideleafd is about to take it up again".into() };
            ok(Answer::Vms(vec![VmView { care, ..unmanaged() }]))
        }
        _ if refused == 0 => {
            refused += 1;
            refusal(&format!("shop_db is not managed yet: {ASK_AGAIN}"))
        }
        _ => ok(Answer::Done),
    });
    bench.call("PreMigrationSource", &plain()).await.expect("it runs");
    let is_held = async {
        while !bench.hooks.holds.contains("v-1") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, is_held).await.expect("at the second request");
}

#[tokio::test]
async fn a_guest_that_wideleafd_cannot_take_for_the_moment_is_managed_at_the_second_request() {
    let mut refused = 0;
    let bench = Bench::new(move |request| match request {
        Ask::List => ok(Answer::Vms(vec![unmanaged()])),
        _ if refused == 0 => {
            refused += 1;
            refusal(&format!("the guest is being attached already; {ASK_AGAIN}"))
        }
        _ => ok(Answer::Done),
    });
    bench.call("PostVMStart", &plain()).await.expect("it runs");
    let mut asked = Vec::new();
    let is_managed = async {
        while asked.len() < 2 {
            asked.extend(bench.daemon.asked().into_iter().filter(|ask| matches!(ask, Ask::Attach { .. })));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, is_managed).await.expect("at the second request");
}

#[tokio::test]
async fn a_hold_that_wideleafd_cannot_save_ends_with_its_migration_too() {
    let bench = Bench::new(|request| match request {
        Ask::List => ok(Answer::Vms(vec![VmView { care: Care::Managed, ..unmanaged() }])),
        _ => Some(Reply::Unsaved("the disk is full".into())),
    });
    bench.call("PreMigrationSource", &plain()).await.expect("it runs");
    assert!(bench.hooks.holds.contains("v-1"));
}

#[tokio::test]
async fn room_goes_back_when_the_vm_stops() {
    let bench = Bench::with(unmanaged(), GIB);
    bench.call("PostVMStop", &plain()).await.expect("it had none");
    assert_eq!(bench.daemon.asked(), []);
    bench.call("PostVMStop", &guaranteed()).await.expect("it goes back");
    assert_eq!(bench.daemon.asked(), [Ask::Release { domain: "shop_db".into(), uuid: "v-1".into() }]);
}

#[test]
fn the_chart_has_a_migration_checked_like_a_start() {
    let template = include_str!("../../../../packaging/helm/wideleaf/templates/plugin.yaml");
    let entries: Vec<&str> = template.lines().filter(|line| line.contains("permittedHooks")).collect();
    for start in entries.iter().filter(|entry| entry.contains("PreVMStart")) {
        assert!(start.contains("PreMigrationTarget"), "{start}");
    }
    assert_eq!(entries.iter().filter(|entry| entry.contains("PreVMStart")).count(), 3, "{entries:?}");
}

#[test]
fn the_chart_reads_each_annotation_that_may_mean_guaranteed() {
    let template = include_str!("../../../../packaging/helm/wideleaf/templates/plugin.yaml");
    let (condition, _) = template.split_once("apiVersion").expect("the condition comes first");
    for name in [HUGE_PAGES, GUARANTEE] {
        assert!(condition.contains(&format!("'{name}' in ")), "{name}: {condition}");
    }
}

#[test]
fn the_chart_s_notes_show_the_annotation_that_the_agent_writes() {
    let notes = include_str!("../../../../packaging/helm/wideleaf/templates/NOTES.txt");
    let path = format!("{{.metadata.annotations.{}}}", crate::details::STATUS.replace('.', "\\."));
    assert!(notes.contains(&path), "{path} is not in {notes}");
}

#[test]
fn the_limit_is_that_of_the_call() {
    for (text, limit) in [
        (Some("29S"), Duration::from_secs(29)),
        (Some("1500m"), Duration::from_millis(1500)),
        (Some("29999987u"), Duration::from_micros(29_999_987)),
        (Some("2M"), Duration::from_secs(120)),
        (Some("5n"), Duration::from_nanos(5)),
        (Some("1H"), Duration::from_secs(3600)),
        (None, TIMEOUT_DEFAULT),
        (Some(""), TIMEOUT_DEFAULT),
        (Some("S"), TIMEOUT_DEFAULT),
        (Some("-1S"), TIMEOUT_DEFAULT),
        (Some("5x"), TIMEOUT_DEFAULT),
        (Some("99999999999999999999S"), TIMEOUT_DEFAULT),
    ] {
        assert_eq!(limit_of(text), limit, "{text:?}");
    }
}

/// A client of the service, as virt-handler is one: over the socket, with a limit.
async fn over_grpc(socket: &Path, request: ExecuteNodeHookRequest) -> Result<ExecuteNodeHookResponse, Status> {
    let connect = tower::service_fn({
        let socket = socket.to_owned();
        move |_: http::Uri| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
        }
    });
    let endpoint = tonic::transport::Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connect).await.expect("it listens");
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.expect("it is connected");
    let mut request = Request::new(request);
    request.set_timeout(LIMIT);
    let path = http::uri::PathAndQuery::from_static(EXECUTE_NODE_HOOK);
    let codec = tonic_prost::ProstCodec::<ExecuteNodeHookRequest, ExecuteNodeHookResponse>::default();
    client.unary(request, path, codec).await.map(Response::into_inner)
}

#[tokio::test]
async fn virt_handler_calls_over_the_socket_which_is_there_while_hooks_are_served() {
    let bench = Bench::with(unmanaged(), 3 * GIB);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("plugins/wideleaf/hooks.sock");
    let socket = HookSocket::bind(&path).expect("the folder is new");
    let again = HookSocket::bind(&path).err().expect("one listens there").to_string();
    assert!(again.contains("is listening there") && again.contains("--hooks"), "{again}");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let hooks = Arc::clone(&bench.hooks);
    let serving = tokio::spawn(socket.serve(hooks, async move { drop(stopped.await) }));
    let request = |vmi: Vec<u8>| ExecuteNodeHookRequest {
        hook_point: "PreVMStart".into(),
        vmi,
        node_context: Some(NodeContext { node_name: "n1".into() }),
    };
    over_grpc(&path, request(plain())).await.expect("best effort");
    let status = over_grpc(&path, request(guaranteed())).await.expect_err("too little memory");
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().starts_with("no huge pages for shop_db"), "{status}");
    stop.send(()).expect("it serves");
    serving.await.expect("no panic").expect("no error");
    assert!(!path.exists(), "without the file virt-handler knows that the plugin is not ready");
}
