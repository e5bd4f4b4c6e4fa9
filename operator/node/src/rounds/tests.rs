//! Rounds of the agent with a fake API server and a fake daemon in this process, between which a test changes guests.

use super::*;
use crate::annotations::{GUARANTEE, OUT_OF_REACH, POLICY};
use crate::matching::tests::{POD, guest, identity, objects, pod, vmi};
use crate::objects::{Identity, PodFacts, VmiFacts, VmiOfPod};
use crate::testing::{FakeApi, FakeDaemon, ok, refusal};
use crate::verdict::CONDITION;
use serde_json::{Value, json};
use wideleaf_control::protocol::{Answer, Reply, SettingName};
use wideleaf_control::view::{BackingView, DaemonView, PromotableView, Reason};

const VMI: &str = "/apis/kubevirt.io/v1/namespaces/shop/virtualmachineinstances/db";
const NODE: &str = "/api/v1/nodes/n1";
const WITH_VMIS: VmiApi = VmiApi::Present { has_status: true };

/// Guests of the fake daemon, which a test changes between rounds.
type Guests = Arc<Mutex<Vec<VmView>>>;

struct Bench {
    folder: tempfile::TempDir,
    api: FakeApi,
    daemon: Option<FakeDaemon>,
    guests: Guests,
    store: Arc<Store>,
    holds: Arc<Holds>,
    health: SharedHealth,
    rounds: Rounds,
}

fn launcher() -> PodFacts {
    pod(Some(VmiOfPod { uid: Some("v-1".into()), name: Some("db".into()) }))
}

fn in_pod() -> VmView {
    guest("shop_db", Some(&format!("/kubepods/burstable/pod{POD}/c")))
}

fn with_coverage(percent: u64) -> VmView {
    let backing = BackingView { huge_2m: percent << 30, base_4k: (100 - percent) << 30, ..BackingView::default() };
    VmView { backing: Some(backing), ..in_pod() }
}

fn annotated(pairs: &[(&str, &str)]) -> VmiFacts {
    let annotations = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    VmiFacts { annotations, ..vmi() }
}

fn answers(guests: &Guests, request: &Request) -> Option<Reply> {
    let reason = Reason { name: "no_huge_page".into(), windows: 7, text: "none is free".into() };
    match request {
        Request::List => ok(Answer::Vms(guests.lock().clone())),
        Request::Daemon => {
            let promotable = PromotableView { now_2m: 3 << 30, compacted_2m: 4 << 30, ..PromotableView::default() };
            ok(Answer::Daemon(DaemonView { promotable: Some(promotable), ..DaemonView::default() }))
        }
        Request::Explain { .. } => {
            ok(Answer::Explanation(Explanation { reasons: vec![reason], ..Explanation::default() }))
        }
        Request::Set { changes, .. } if changes.policy.as_deref() == Some("early") => {
            refusal("db is not managed yet: wideleafd is about to take it up again: ask again in a moment")
        }
        Request::Set { changes, .. } if changes.policy.as_deref() == Some("nonsense") => refusal("no such policy"),
        Request::LeaveAlone { vm, .. } if vm == "4712" => refusal("it begins: ask again in a moment"),
        Request::Set { .. } | Request::Attach { .. } | Request::LeaveAlone { .. } => ok(Answer::Done),
        other => panic!("{other:?}"),
    }
}

impl Bench {
    fn new(pods: &[PodFacts], vmis: &[VmiFacts], vmi_api: VmiApi) -> Bench {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let socket = folder.path().join("control.sock");
        let (api, store, holds) = (FakeApi::default(), Arc::new(Store::default()), Arc::new(Holds::default()));
        let (counters, health) = (Arc::new(Counters::default()), SharedHealth::default());
        *store.objects() = objects(pods, vmis, vmi_api);
        let publisher = Publisher::new(api.client(), "n1", Arc::clone(&counters));
        let rounds = Rounds::new(
            "n1",
            Daemon::at(&socket),
            Arc::clone(&store),
            Arc::clone(&holds),
            counters,
            Arc::clone(&health),
            publisher,
        );
        let meta = json!({"name": "db", "namespace": "shop", "uid": "v-1"});
        api.put(VMI, json!({"apiVersion": "v1", "kind": "Any", "metadata": meta, "status": {"conditions": []}}));
        api.put(NODE, json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "uid": "n-1"}}));
        let mut bench = Bench { folder, api, daemon: None, guests: Guests::default(), store, holds, health, rounds };
        bench.start_daemon();
        bench
    }

    fn start_daemon(&mut self) {
        self.daemon = None;
        let guests = Arc::clone(&self.guests);
        let socket = self.folder.path().join("control.sock");
        self.daemon = Some(FakeDaemon::at(&socket, move |request| answers(&guests, request)));
    }

    /// Has the daemon answer requests for an explanation so. Returns their number.
    fn with_explanations(&mut self, mut answer: impl FnMut() -> Option<Reply> + Send + 'static) -> Arc<Mutex<u32>> {
        self.daemon = None;
        let (guests, number) = (Arc::clone(&self.guests), Arc::<Mutex<u32>>::default());
        let (socket, counted) = (self.folder.path().join("control.sock"), Arc::clone(&number));
        self.daemon = Some(FakeDaemon::at(&socket, move |request| match request {
            Request::Explain { .. } => {
                *counted.lock() += 1;
                answer()
            }
            other => answers(&guests, other),
        }));
        number
    }

    async fn end_daemon(&mut self) {
        self.daemon = None;
        // Its task ends when it is its turn.
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
    }

    fn guests(&self, guests: &[VmView]) {
        *self.guests.lock() = guests.to_vec();
    }

    /// Changes that the daemon was asked for since the last call.
    fn changes(&self) -> Vec<Request> {
        let asked = self.daemon.as_ref().expect("it runs").asked();
        let is_change = |request: &Request| {
            matches!(request, Request::Set { .. } | Request::Attach { .. } | Request::LeaveAlone { .. })
        };
        asked.into_iter().filter(is_change).collect()
    }

    fn condition(&self) -> Value {
        let conditions = self.api.object(VMI)["status"]["conditions"].clone();
        conditions.as_array().into_iter().flatten().find(|one| one["type"] == CONDITION).cloned().unwrap_or(Value::Null)
    }

    fn events(&self) -> Vec<String> {
        let writes = self.api.writes().into_iter().filter(|write| write.path.ends_with("/events"));
        writes.map(|write| write.body["reason"].as_str().unwrap_or_default().to_owned()).collect()
    }
}

#[tokio::test]
async fn a_round_publishes_the_guest_and_the_node() {
    let mut bench = Bench::new(&[launcher()], &[vmi()], WITH_VMIS);
    bench.guests(&[with_coverage(10), guest("other", None)]);
    let summary = bench.rounds.once().await.expect("all is there");
    assert_eq!(summary, Summary { guests: 2, placed: 1, covered: 0 });
    let condition = bench.condition();
    assert_eq!((condition["status"].as_str(), condition["reason"].as_str()), (Some("False"), Some("NoHugePage")));
    assert!(condition["message"].as_str().expect("text").ends_with("7 windows: none is free"));
    assert_eq!(bench.api.object(NODE)["metadata"]["labels"]["wideleaf.io/promotable-2m-gib"], "3");
    bench.events();
    bench.guests(&[with_coverage(96)]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition()["status"], "True");
    assert_eq!(bench.events(), ["HugePagesCovered"]);
}

#[tokio::test]
async fn memory_of_guests_is_added_only_for_guests_that_request_the_resource() {
    // 40 GiB are held: of a pod with a smaller request the scheduler subtracts that request alone.
    for (requested_gib, expected) in [(0, "3"), (40, "43"), (10, "13"), (60, "43")] {
        let mut bench = Bench::new(&[PodFacts { requested_gib, ..launcher() }], &[vmi()], WITH_VMIS);
        bench.guests(&[with_coverage(40)]);
        bench.rounds.once().await.expect("all is there");
        assert_eq!(bench.api.object(NODE)["status"]["capacity"][crate::figures::RESOURCE], expected);
    }
}

#[tokio::test]
async fn annotations_are_passed_on_once_and_unset_when_they_are_over() {
    let asked = annotated(&[(GUARANTEE, "90%"), (POLICY, "coverage"), (OUT_OF_REACH, "10%")]);
    let mut bench = Bench::new(&[launcher()], &[asked], WITH_VMIS);
    bench.guests(&[with_coverage(96)]);
    for _ in 0..3 {
        bench.rounds.once().await.expect("all is there");
    }
    let changes = bench.changes();
    let [Request::Set { vm, changes }] = &changes[..] else { panic!("{changes:?}") };
    assert_eq!((vm.as_str(), changes.policy.as_deref()), ("4711", Some("coverage")));
    assert_eq!((changes.guarantee.as_deref(), changes.out_of_reach.as_deref()), (Some("90%"), Some("10%")));
    *bench.store.objects() = objects(&[launcher()], &[annotated(&[(GUARANTEE, "90%")])], WITH_VMIS);
    bench.rounds.once().await.expect("all is there");
    let changes = bench.changes();
    let [Request::Set { changes, .. }] = &changes[..] else { panic!("{changes:?}") };
    assert_eq!(changes.unset, [SettingName::Policy, SettingName::OutOfReach]);
}

#[tokio::test]
async fn an_unmanaged_guest_is_attached_for_its_annotations_and_left_alone_without() {
    let unmanaged = VmView { care: Care::Unmanaged, ..with_coverage(96) };
    let mut bench = Bench::new(&[launcher()], &[vmi()], WITH_VMIS);
    bench.guests(std::slice::from_ref(&unmanaged));
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.changes(), []);
    *bench.store.objects() = objects(&[launcher()], &[annotated(&[(GUARANTEE, "90%")])], WITH_VMIS);
    bench.rounds.once().await.expect("all is there");
    assert!(matches!(&bench.changes()[..], [Request::Attach { .. }]));
}

#[tokio::test]
async fn a_part_of_the_time_alone_asks_for_no_manager_and_is_passed_on_once_there_is_one() {
    let mut bench = Bench::new(&[launcher()], &[annotated(&[(OUT_OF_REACH, "10%")])], WITH_VMIS);
    for (care, expected) in [(Care::Unmanaged, None), (Care::Managed, Some("10%"))] {
        bench.guests(&[VmView { care, ..with_coverage(96) }]);
        bench.rounds.once().await.expect("all is there");
        let changes = bench.changes();
        let set = changes.iter().map(|change| match change {
            Request::Set { changes, .. } => changes.out_of_reach.as_deref(),
            other => panic!("{other:?}"),
        });
        assert_eq!(set.collect::<Vec<_>>(), expected.into_iter().map(Some).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn an_agent_that_restarts_unsets_what_an_earlier_one_has_passed_on() {
    let asked = Requested { policy: Some("coverage".into()), ..Requested::default() };
    let verdict = Verdict::of(&in_pod(), None);
    let before = Details::of("n1", &in_pod(), None, &verdict, &asked);
    let elsewhere = Details { node: "n2".into(), ..before.clone() };
    for (details, expected) in [(before, 1), (elsewhere, 0)] {
        let mut bench = Bench::new(&[launcher()], &[annotated(&[(STATUS, &details.text())])], WITH_VMIS);
        bench.guests(&[with_coverage(96)]);
        bench.rounds.once().await.expect("all is there");
        assert_eq!(bench.changes().len(), expected, "settings of another node's daemon are not here");
    }
}

#[tokio::test]
async fn invalid_and_refused_annotations_are_one_event_each() {
    let mut bench = Bench::new(&[launcher()], &[annotated(&[(GUARANTEE, "lots"), (POLICY, "nonsense")])], WITH_VMIS);
    bench.guests(&[with_coverage(96)]);
    for _ in 0..3 {
        bench.rounds.once().await.expect("all is there");
    }
    assert_eq!(bench.events(), ["AnnotationInvalid", "AnnotationRefused"]);
    assert_eq!(bench.changes().len(), 1, "the refused setting is not tried again at once");
    assert_eq!(bench.condition()["status"], "True", "the guest is treated as without it");
}

#[tokio::test]
async fn several_guests_of_a_pod_count_together_up_to_its_request() {
    let facts = PodFacts { requested_gib: 50, ..launcher() };
    let mut bench = Bench::new(&[facts], &[vmi()], WITH_VMIS);
    bench.guests(&[with_coverage(40), VmView { pid: 4712, ..with_coverage(30) }]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.api.object(NODE)["status"]["capacity"][crate::figures::RESOURCE], "53");
}

#[tokio::test]
async fn a_refusal_for_a_moment_is_no_event_and_is_tried_again_in_the_next_round() {
    let mut bench = Bench::new(&[launcher()], &[annotated(&[(POLICY, "early")])], WITH_VMIS);
    bench.guests(&[with_coverage(96)]);
    for _ in 0..3 {
        bench.rounds.once().await.expect("all is there");
    }
    assert_eq!(bench.changes().len(), 3);
    assert_eq!(bench.events(), [] as [String; 0]);
}

#[tokio::test]
async fn an_object_with_which_the_api_server_stops_is_not_first_again() {
    const OTHER: &str = "9f4a6b53-9ad5-4b9e-8f2d-3c1d5a8f2b10";
    let (first, second) = (pod(None), pod(None));
    let identity = Identity { name: "kata".into(), uid: OTHER.into(), ..second.identity.clone() };
    let mut bench = Bench::new(&[first.clone(), PodFacts { identity, ..second }], &[], VmiApi::Absent);
    let path = |name: &str| format!("/api/v1/namespaces/shop/pods/{name}");
    for (name, uid) in [(first.identity.name.as_str(), POD), ("kata", OTHER)] {
        let meta = json!({"name": name, "namespace": "shop", "uid": uid});
        bench.api.put(&path(name), json!({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": {}}));
    }
    let beside = VmView { pid: 4712, ..guest("kata", Some(&format!("/kubepods/pod{OTHER}/c"))) };
    bench.guests(&[with_coverage(96), beside]);
    bench.api.fail_at(&path(&first.identity.name), Some(503));
    bench.rounds.once().await.expect("the node was written");
    let conditions = |bench: &Bench| bench.api.object(&path("kata"))["status"]["conditions"].clone();
    assert_eq!(conditions(&bench), Value::Null, "all objects rest");
    while !bench.rounds.publisher.is_ready(Instant::now()) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let _ = bench.rounds.once().await;
    assert_eq!(conditions(&bench)[0]["type"], "wideleaf.io/HugePagesCovered");
}

#[tokio::test]
async fn a_daemon_that_is_gone_makes_conditions_unknown_after_a_minute_and_a_new_one_knows_again() {
    let mut bench = Bench::new(&[launcher()], &[annotated(&[(GUARANTEE, "90%")])], WITH_VMIS);
    bench.guests(&[with_coverage(96)]);
    bench.rounds.once().await.expect("all is there");
    bench.changes();
    bench.end_daemon().await;
    let error = bench.rounds.once().await.expect_err("no daemon");
    assert!(error.starts_with("no wideleafd listens at"), "{error}");
    assert_eq!(bench.condition()["status"], "True", "a restart takes less than a minute");
    let health = || bench.health.lock().daemon.clone();
    assert_eq!(health(), Some(error));
    bench.rounds.silent_since = Instant::now().checked_sub(SILENCE_MAX);
    let _ = bench.rounds.once().await;
    let condition = bench.condition();
    assert_eq!(
        (condition["status"].as_str(), condition["reason"].as_str()),
        (Some("Unknown"), Some("WideleafdSilent"))
    );
    bench.start_daemon();
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition()["status"], "True");
    assert_eq!(bench.changes().len(), 1, "a new daemon may have lost its settings");
}

/// A bench with a VMI that has a condition that an agent of that node has written before.
fn with_condition_of_an_earlier_agent(node: &str) -> Bench {
    let verdict = Verdict::of(&in_pod(), None);
    let text = Details::of(node, &in_pod(), None, &verdict, &Requested::default()).text();
    let bench = Bench::new(&[launcher()], &[annotated(&[(STATUS, &text)])], WITH_VMIS);
    let mut vmi = bench.api.object(VMI);
    vmi["status"]["conditions"] = json!([{"type": CONDITION, "status": "True", "reason": "Covered", "message": "m"}]);
    bench.api.put(VMI, vmi);
    bench
}

#[tokio::test]
async fn a_condition_of_an_earlier_agent_becomes_unknown_where_the_daemon_is_gone() {
    for (node, expected) in [("n1", "Unknown"), ("n2", "True")] {
        let mut bench = with_condition_of_an_earlier_agent(node);
        bench.end_daemon().await;
        let _ = bench.rounds.once().await;
        assert_eq!(bench.condition()["status"], "True", "a restart takes less than a minute");
        bench.rounds.silent_since = Instant::now().checked_sub(SILENCE_MAX);
        let _ = bench.rounds.once().await;
        assert_eq!(bench.condition()["status"], expected, "{node}");
    }
}

#[tokio::test]
async fn a_guest_that_ended_while_no_agent_ran_leaves_an_unknown_condition() {
    let mut bench = with_condition_of_an_earlier_agent("n1");
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition()["status"], "True", "the guest may come yet");
    bench.rounds.objects.get_mut("v-1").expect("it is known").guest_at = Instant::now().checked_sub(SILENCE_MAX);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition()["reason"], "NoGuest");
}

#[tokio::test]
async fn a_guest_that_is_not_explained_is_not_asked_about_again_in_each_round() {
    let mut bench = Bench::new(&[launcher()], &[vmi()], WITH_VMIS);
    bench.guests(&[with_coverage(10)]);
    let explains = bench.with_explanations(|| refusal("it ends"));
    for _ in 0..2 {
        bench.rounds.once().await.expect("all is there");
    }
    assert_eq!(*explains.lock(), 1);
    assert_eq!(bench.condition()["reason"], "NotCovered");
}

#[tokio::test]
async fn a_round_waits_once_for_explanations_that_do_not_come() {
    let other = VmiFacts { identity: identity("other", "v-2"), pods: Vec::new(), ..vmi() };
    let mut bench = Bench::new(&[launcher()], &[vmi(), other], WITH_VMIS);
    let beside = VmView { name: "shop_other".into(), pid: 4712, cgroup: None, ..with_coverage(10) };
    bench.guests(&[with_coverage(10), beside]);
    let explains = bench.with_explanations(|| None);
    let summary = bench.rounds.once().await.expect("all is there");
    assert_eq!((summary.placed, *explains.lock()), (2, 1));
}

#[tokio::test]
async fn where_a_vmi_names_no_pod_and_keeps_its_status_its_pod_says_that_the_daemon_is_gone() {
    let vmi = VmiFacts { pods: Vec::new(), ..vmi() };
    let mut bench = Bench::new(&[launcher()], &[vmi], VmiApi::Present { has_status: false });
    let path = "/api/v1/namespaces/shop/pods/virt-launcher-db-x";
    let meta = json!({"name": "virt-launcher-db-x", "namespace": "shop", "uid": POD});
    bench.api.put(path, json!({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": {"conditions": []}}));
    bench.guests(&[with_coverage(96)]);
    bench.rounds.once().await.expect("all is there");
    let status = |bench: &Bench| bench.api.object(path)["status"]["conditions"][0]["status"].clone();
    assert_eq!(status(&bench), "True");
    bench.end_daemon().await;
    bench.rounds.silent_since = Instant::now().checked_sub(SILENCE_MAX);
    let _ = bench.rounds.once().await;
    assert_eq!(status(&bench), "Unknown");
    assert_eq!(bench.condition(), Value::Null, "KubeVirt would put it back");
}

#[tokio::test]
async fn a_guest_that_is_gone_leaves_an_unknown_condition_on_its_object() {
    let mut bench = Bench::new(&[launcher()], &[vmi()], WITH_VMIS);
    bench.guests(&[with_coverage(96)]);
    bench.rounds.once().await.expect("all is there");
    bench.guests(&[]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition()["status"], "True");
    bench.rounds.objects.get_mut("v-1").expect("it is known").guest_at = Instant::now().checked_sub(SILENCE_MAX);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition()["reason"], "NoGuest");
}

#[tokio::test]
async fn nothing_is_published_before_pods_and_vmis_are_known_nor_about_a_guest_that_is_still_elsewhere() {
    let mut bench = Bench::new(&[launcher()], &[], WITH_VMIS);
    bench.guests(&[with_coverage(96)]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition(), Value::Null, "the VMI runs on the source yet");
    *bench.store.objects() = objects(&[launcher()], &[vmi()], VmiApi::Unknown);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition(), Value::Null);
}

#[tokio::test]
async fn of_several_guests_in_a_pod_the_largest_has_the_condition() {
    let sized = |bytes: u64, percent| {
        let ram = wideleaf_control::view::RamView {
            name: "pc.ram".into(),
            gpa: 0,
            bytes,
            hva: 0,
            kind: "anonymous".into(),
            is_guess: false,
            never_huge: None,
        };
        VmView { ram: vec![ram], ..with_coverage(percent) }
    };
    let mut bench = Bench::new(&[launcher()], &[vmi()], WITH_VMIS);
    bench.guests(&[sized(1 << 30, 10), sized(2 << 30, 99), sized(1 << 20, 20)]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.condition()["status"], "True");
}

#[test]
fn a_hold_ends_with_its_migration() {
    let (holds, now) = (Holds::default(), Instant::now());
    let over = |state, seconds| -> Vec<u32> {
        let ended = holds.over(|_| state, now + Duration::from_secs(seconds));
        ended.into_iter().map(|(_, hold)| hold.pid).collect()
    };
    holds.add("v-1", 4711, now);
    assert_eq!(over(Some(true), 1), [] as [u32; 0], "of an earlier migration");
    assert_eq!(over(Some(false), 2), [] as [u32; 0]);
    assert_eq!(over(Some(false), 500), [] as [u32; 0]);
    assert_eq!(over(Some(true), 501), [4711]);
    assert_eq!(over(Some(true), 502), [] as [u32; 0]);
    holds.add("v-1", 4711, now);
    assert_eq!(over(None, 16), [4711], "the VMI runs elsewhere now");
}

#[tokio::test]
async fn a_guest_is_no_longer_left_alone_once_its_migration_is_over() {
    let over = VmiFacts { is_migration_over: Some(true), ..vmi() };
    let mut bench = Bench::new(&[launcher()], &[over], WITH_VMIS);
    let Some(long_ago) = Instant::now().checked_sub(HOLD_MIN) else { return };
    bench.holds.add("v-1", 4711, long_ago);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.changes(), [Request::LeaveAlone { vm: "4711".into(), for_s: 0 }]);
}

#[tokio::test]
async fn a_guest_is_left_alone_for_as_long_as_its_migration_takes() {
    let under_way = VmiFacts { is_migration_over: Some(false), ..vmi() };
    let mut bench = Bench::new(&[launcher()], &[under_way], WITH_VMIS);
    let Some(long_ago) = Instant::now().checked_sub(HOLD_AGAIN) else { return };
    bench.holds.add("v-1", 4711, long_ago);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.changes(), [Request::LeaveAlone { vm: "4711".into(), for_s: HOLD_S }]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.changes(), [], "it was asked for just now");
}

#[tokio::test]
async fn a_guest_that_migrates_is_left_alone_where_no_hook_told_of_it() {
    let under_way = VmiFacts { is_migration_over: Some(false), is_migrating: true, ..vmi() };
    let mut bench = Bench::new(&[launcher()], &[under_way], WITH_VMIS);
    bench.guests(&[in_pod()]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.changes(), [Request::LeaveAlone { vm: "4711".into(), for_s: HOLD_S }]);
    bench.guests(&[VmView { care: Care::LeftAlone { reason: "this was asked for".into() }, ..in_pod() }]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.changes(), [], "once");
    bench.holds.all().clear();
    bench.guests(&[VmView { care: Care::Off, ..in_pod() }]);
    bench.rounds.once().await.expect("all is there");
    assert_eq!(bench.changes(), [], "no page changes anyway");
}

#[tokio::test]
async fn a_hold_that_wideleafd_cannot_end_now_is_ended_in_a_later_round() {
    let over = VmiFacts { is_migration_over: Some(true), ..vmi() };
    let mut bench = Bench::new(&[launcher()], &[over], WITH_VMIS);
    let Some(long_ago) = Instant::now().checked_sub(HOLD_MIN) else { return };
    bench.holds.add("v-1", 4712, long_ago);
    for _ in 0..2 {
        bench.rounds.once().await.expect("all is there");
        assert_eq!(bench.changes(), [Request::LeaveAlone { vm: "4712".into(), for_s: 0 }]);
    }
}
