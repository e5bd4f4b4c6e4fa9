//! The engine with guests, pools and host memory that a test makes up.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use proptest::prelude::*;
use wideleaf_control::protocol::{
    Answer, Limits, LiveReport, OrdinaryMemory, PoolRequest, Reply, Request, SettingName, Target,
};
use wideleaf_control::view::{
    BackingView, Care as CareView, Explanation, Guarantee, Reason, Vmm, WindowMap, WindowRange, WorkView,
};
use wideleaf_memory::block_supply::{SupplyDemand, SupplyReport, SupplyRules};
use wideleaf_policies::units::{gib, mib};

use super::*;
use crate::guests::Found;
use crate::guests::fake::{FakeGuests, monitor_of};
use crate::peer::{Access, Peer};
use crate::pool_reservations::{FakePool, FakePools};
use crate::server::{Answers, ConnectionId};
use crate::state::Loaded;

const ROOT: Peer = Peer { pid: 1, uid: 0, gid: 0 };
const UNPRIVILEGED: Peer = Peer { pid: 1, uid: 4_242, gid: 4_242 };
const HERE: ConnectionId = ConnectionId::new(0);

/// Remembers what it was asked for.
#[derive(Debug, Default)]
struct FakeSupply {
    demand: Mutex<SupplyDemand>,
    unseen: AtomicU64,
    rules: Mutex<SupplyRules>,
}

impl Supply for FakeSupply {
    fn want(&self, demand: SupplyDemand) {
        *self.demand.lock() = demand;
    }

    fn set_rules(&self, rules: SupplyRules) {
        *self.rules.lock() = rules;
    }

    fn report(&self) -> SupplyReport {
        SupplyReport { made: 7, unseen: self.unseen.load(Ordering::Relaxed), ..SupplyReport::default() }
    }
}

struct Bench {
    folder: tempfile::TempDir,
    guests: FakeGuests,
    pools: Arc<FakePools>,
    available: Arc<AtomicU64>,
    supply: Arc<FakeSupply>,
    engine: Arc<Engine>,
    service: Service,
}

impl Bench {
    fn new(config: &str) -> Bench {
        let guests = FakeGuests::default();
        let pools = Arc::new(FakePools::new(FakePool { free: 0, growth_left: 100 }));
        Bench::on(tempfile::tempdir().expect("a temporary folder"), guests, pools, config)
    }

    /// A daemon on that host, with its configuration in the folder for reloads.
    fn on(folder: tempfile::TempDir, guests: FakeGuests, pools: Arc<FakePools>, config: &str) -> Bench {
        let bench = Bench::not_begun(folder, guests, pools, config);
        bench.engine.resume().expect("its guests are seen");
        bench.engine.has_looked();
        bench
    }

    /// A daemon before its first scan of the host.
    fn not_begun(folder: tempfile::TempDir, guests: FakeGuests, pools: Arc<FakePools>, config: &str) -> Bench {
        let config_path = folder.path().join("wideleafd.toml");
        let text = format!("[state]\npath = {:?}\n{config}", state_path(folder.path()));
        std::fs::write(&config_path, &text).expect("written");
        let available = Arc::new(AtomicU64::new(gib(8).get()));
        let seen = available.clone();
        let supply = Arc::<FakeSupply>::default();
        let doors = Doors {
            guests: Arc::new(guests.clone()),
            pools: Box::new(pools.clone()),
            available: Box::new(move || Some(Bytes::new(seen.load(Ordering::Relaxed)))),
            supply: supply.clone(),
            questions: Arc::default(),
        };
        let config = Config::parse(&text).expect("the test's configuration makes sense");
        let engine = Arc::new(Engine::new(doors, config, ConfigFile { path: config_path, may_be_missing: true }));
        let service = Service::new(engine.clone(), Access::with_files(None, 0, "/nowhere"));
        let bench = Bench { folder, guests, pools, available, supply, engine, service };
        bench.engine.adopt(bench.state());
        bench
    }

    /// Kills the daemon and starts another on the same host.
    fn restarted(self) -> Bench {
        Bench::on(self.folder, self.guests, self.pools, "")
    }

    fn state(&self) -> State {
        match state::load(&state_path(self.folder.path())).expect("a folder of the test's") {
            Loaded::Known(state) => state,
            Loaded::Fresh => State::default(),
            Loaded::Damaged { why, .. } => panic!("{why}"),
        }
    }

    fn configure(&self, config: &str) {
        let text = format!("[state]\npath = {:?}\n{config}", state_path(self.folder.path()));
        std::fs::write(self.folder.path().join("wideleafd.toml"), text).expect("written");
    }

    fn ask(&self, request: Request) -> Result<Answer, String> {
        self.ask_as(ROOT, request)
    }

    fn ask_as(&self, peer: Peer, request: Request) -> Result<Answer, String> {
        match self.service.answer(HERE, peer, request) {
            Reply::Ok(answer) => Ok(*answer),
            Reply::Error(why) | Reply::Unsaved(why) => Err(why),
        }
    }

    fn attach(&self, pid: u32) -> Result<Answer, String> {
        self.ask(Request::Attach { target: Target::Pid(pid), settings: Settings::default() })
    }

    fn set(&self, vm: &str, policy: &str) -> Result<Answer, String> {
        let changes = Settings { policy: Some(policy.into()), ..Settings::default() };
        self.ask(Request::Set { vm: vm.into(), changes })
    }

    fn list(&self) -> Vec<VmView> {
        let Ok(Answer::Vms(vms)) = self.ask(Request::List) else { panic!("a list is answered with VMs") };
        vms
    }

    fn managed(&self) -> Vec<String> {
        self.engine.views().into_iter().map(|view| view.name).collect()
    }

    fn scout(&self) {
        self.engine.scout().expect("its guests are seen");
    }

    fn tick_at(&self, second: u64) {
        self.engine.tick(Duration::from_secs(second));
    }
}

fn state_path(folder: &Path) -> PathBuf {
    folder.join("state.json")
}

fn huge_2m(vm: &VmView) -> u64 {
    vm.backing.map_or(0, |backing| backing.huge_2m)
}

fn info(vm: &str) -> Request {
    Request::Info { vm: vm.into() }
}

fn work(copied: Bytes) -> WorkView {
    WorkView { copied: copied.get(), ..WorkView::default() }
}

fn prepare(uuid: &str, pages: u64) -> Request {
    prepare_domain("web", uuid, pages)
}

fn prepare_domain(domain: &str, uuid: &str, pages: u64) -> Request {
    let pages = vec![PoolRequest { page_bytes: 2 << 20, pages, node: None, nodes: Vec::new() }];
    Request::Prepare { domain: domain.into(), uuid: uuid.into(), pages, ordinary: None }
}

fn release(uuid: &str) -> Request {
    Request::Release { domain: "web".into(), uuid: uuid.into() }
}

fn own_view(pid: u32) -> Box<VmView> {
    let guests = FakeGuests::default();
    let found = guests.start(pid, "ours");
    let view = guests.look(&Found { vmm: Vmm::Wideleaf, ..guests.guest(found.pid).found });
    Box::new(view.expect("it runs"))
}

#[test]
fn unmanaged_guests_are_listed_and_surveyed() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    assert_eq!(bench.list()[0].care, CareView::Unmanaged);
    assert!(matches!(bench.ask(info("web")), Ok(Answer::Vm(view)) if view.pid == 10));
    assert!(matches!(
        bench.ask(Request::Explain { vm: "10".into() }),
        Ok(Answer::Explanation(why)) if why.windows == Some(2)
    ));
    assert!(matches!(
        bench.ask(Request::Windows { vm: "web".into() }),
        Ok(Answer::Windows(map)) if map.ranges[0].backing == "24"
    ));
    assert_eq!(bench.guests.guest(10).attached, 0);
}

#[test]
fn the_daemon_tells_how_much_memory_can_become_large_pages() {
    let bench = Bench::new("[host]\nlow_free = \"1G\"\nhigh_free = \"2G\"");
    let promotable = || match bench.ask(Request::Daemon) {
        Ok(Answer::Daemon(daemon)) => daemon.promotable.expect("the pools tell it"),
        other => panic!("{other:?}"),
    };
    bench.engine.begin();
    let all = promotable();
    assert_eq!(all.now_2m, mib(200).get(), "a hundred blocks");
    bench.pools.set_free(7);
    assert_eq!(promotable(), all, "figures of some seconds ago are not read again");
}

#[test]
fn a_guest_is_attached_once_however_often_a_client_asks() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    for _ in 0..2 {
        assert!(matches!(bench.attach(10), Ok(Answer::Vm(view)) if view.care == CareView::Managed));
    }
    assert_eq!((bench.guests.guest(10).attached, bench.list().len()), (1, 1));
    assert!(matches!(bench.ask(Request::Daemon), Ok(Answer::Daemon(daemon)) if daemon.vms == 1));
}

#[test]
fn a_guest_that_is_attached_by_its_monitor_keeps_that_monitor_after_a_restart() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    let target = Target::Qmp(monitor_of("web"));
    bench.ask(Request::Attach { target, settings: Settings::default() }).expect("it runs");
    assert_eq!(bench.guests.guest(10).qmp, Some(monitor_of("web")));
    bench.guests.change(10, |guest| guest.qmp = None);
    assert_eq!(bench.restarted().guests.guest(10).qmp, Some(monitor_of("web")));
}

#[test]
fn a_failed_attach_is_an_error_and_leaves_nothing_behind() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.guests.change(10, |guest| guest.attach_error = Some("needs CAP_SYS_NICE".into()));
    for _ in 0..2 {
        assert_eq!(bench.attach(10), Err("needs CAP_SYS_NICE".into()));
    }
    bench.guests.change(10, |guest| guest.attach_error = None);
    assert!(bench.attach(10).is_ok());
}

#[test]
fn a_guest_of_wideleaf_run_is_not_taken_from_its_own_manager() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start(10, "ours");
    bench.guests.change(10, |guest| guest.found.vmm = Vmm::Wideleaf);
    bench.scout();
    assert!(bench.attach(10).expect_err("it has a manager").contains("a manager of its own"));
    assert_eq!(bench.guests.guest(10).attached, 0);
}

#[test]
fn new_guests_are_taken_if_the_configuration_names_them() {
    let bench = Bench::new("[attach]\nautomatic = [\"web*\"]\n[[vm]]\nname = \"web-2\"\npolicy = \"off\"");
    for (pid, name) in [(10, "web-1"), (11, "web-2"), (12, "db")] {
        bench.guests.start(pid, name);
    }
    bench.scout();
    assert_eq!(bench.managed(), ["web-1", "web-2"]);
    assert_eq!(bench.guests.guest(11).policy.expect("it was told").to_string(), "off");
}

#[test]
fn a_detached_guest_is_taken_again_only_on_request() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start(10, "web");
    bench.scout();
    assert_eq!(bench.ask(Request::Detach { vm: "web".into() }), Ok(Answer::Done));
    assert_eq!(bench.guests.guest(10).stopped, 1);
    bench.scout();
    assert!(bench.managed().is_empty());
    assert!(bench.attach(10).is_ok());
}

fn started(pid: u32, domain: &str, policy: Option<&str>) -> Request {
    let settings = Settings { policy: policy.map(str::to_owned), ..Settings::default() };
    Request::Started {
        domain: domain.into(),
        uuid: format!("u-{domain}"),
        pid,
        settings,
        mistakes: Vec::new(),
        flavor: None,
    }
}

#[test]
fn domains_that_the_hook_reports_are_taken_unless_the_configuration_says_otherwise() {
    for (config, taken) in [
        ("", vec!["web-1", "db", "asks"]),
        ("[attach]\nautomatic = \"libvirt\"", vec!["web-1", "db", "asks"]),
        ("[attach]\nautomatic = \"none\"", vec!["asks"]),
        ("[attach]\nautomatic = \"all\"", vec!["web-1", "db", "asks"]),
        ("[attach]\nautomatic = [\"web*\"]", vec!["web-1", "asks"]),
    ] {
        let bench = Bench::new(config);
        for (pid, name, policy) in [(10, "web-1", None), (11, "db", Some("off")), (12, "asks", Some("greedy"))] {
            bench.guests.start_domain(pid, name);
            assert_eq!(bench.ask(started(pid, name, policy)), Ok(Answer::Done), "{config}");
        }
        assert_eq!(bench.managed(), taken, "{config}");
    }
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web-1");
    bench.scout();
    assert_eq!(bench.managed(), [""; 0], "the hook did not report it");
}

#[test]
fn a_detached_domain_stays_detached_when_libvirtd_is_restarted_until_it_is_attached_or_ends() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    for _ in 0..2 {
        bench.ask(started(10, "web", Some("greedy"))).expect("it runs");
        assert_eq!(bench.managed(), ["web"]);
        bench.ask(Request::Detach { vm: "web".into() }).expect("it is managed");
        bench.ask(started(10, "web", Some("greedy"))).expect("it is reported again");
        assert!(bench.managed().is_empty());
        bench.attach(10).expect("it runs");
    }
    bench.ask(Request::Detach { vm: "web".into() }).expect("it is managed");
    let bench = bench.restarted();
    bench.ask(started(10, "web", None)).expect("also by the next daemon");
    assert!(bench.managed().is_empty());
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.guests.start_domain(11, "web");
    bench.ask(started(11, "web", None)).expect("it is another process");
    assert_eq!(bench.managed(), ["web"]);
}

#[test]
fn settings_take_precedence_over_metadata_when_libvirtd_is_restarted() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started(10, "web", Some("greedy"))).expect("it runs");
    bench.set("web", "off").expect("it is managed");
    bench.ask(started(10, "web", Some("greedy"))).expect("it is reported again");
    assert_eq!(bench.list()[0].policy.as_deref(), Some("off"));
}

#[test]
fn a_setting_of_the_metadata_that_was_unset_stays_unset_until_it_is_set() {
    let policy = |bench: &Bench| bench.list()[0].policy.clone().expect("it is managed");
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started(10, "web", Some("greedy"))).expect("it runs");
    let changes = Settings { unset: vec![SettingName::Policy], ..Settings::default() };
    for _ in 0..2 {
        bench.ask(Request::Set { vm: "web".into(), changes: changes.clone() }).expect("it is managed");
        bench.ask(started(10, "web", Some("greedy"))).expect("libvirtd was restarted");
        assert_eq!(policy(&bench), "auto");
    }
    let bench = bench.restarted();
    bench.ask(started(10, "web", Some("greedy"))).expect("it is reported again");
    assert_eq!(policy(&bench), "auto");
    bench.set("web", "thp").expect("it is managed");
    assert_eq!((policy(&bench), bench.state().guests[0].said.unset.len()), ("thp".into(), 0));
}

#[test]
fn a_guest_with_a_process_id_as_its_name_does_not_hide_that_process() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.guests.start(11, "10");
    assert!(matches!(bench.ask(info("10")), Ok(Answer::Vm(view)) if view.name == "web"));
    bench.attach(11).expect("it runs");
    assert!(matches!(bench.ask(info("10")), Ok(Answer::Vm(view)) if view.name == "web"));
}

#[test]
fn nothing_is_changed_before_the_state_of_an_earlier_daemon_is_read() {
    let bench = Bench::new("");
    *bench.engine.saved.lock() = Saved::NotYetRead;
    let error = bench.ask(prepare("u", 60)).expect_err("the file could not be written");
    assert!(error.contains("is not read yet: try again"), "{error}");
    assert_eq!((bench.pools.now().growth_left, bench.engine.rooms().len()), (100, 0));
}

#[test]
fn guests_that_are_not_taken_up_yet_stay_in_the_state() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    let (state, bench) = (bench.state(), bench.restarted());
    bench.engine.forget(bench.guests.guest(10).found.process, "is not taken up yet");
    bench.engine.adopt(state);
    bench.ask(prepare("u", 60)).expect("there is room");
    assert_eq!(bench.state().guests.len(), 1);
}

#[test]
fn a_guest_that_has_ended_is_forgotten() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.tick_at(1);
    assert!(bench.managed().is_empty() && bench.state().guests.is_empty());
    assert_eq!(bench.ask(info("web")), Err("there is no VM \"web\", nor any other".into()));
}

#[test]
fn an_ambiguous_name_is_refused_with_the_process_ids_and_an_unknown_one_with_the_known_names() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.guests.start(11, "web");
    assert_eq!(bench.ask(info("web")), Err("2 VMs are called \"web\": name one by its process id (10, 11)".into()));
    assert!(bench.ask(info("00000000-0000-0000-0000-000000000011")).is_ok());
    assert_eq!(bench.ask(info("db")), Err("there is no VM \"db\"; there are web, web".into()));
    assert!(bench.set("10", "off").expect_err("it is unmanaged").contains("run `wideleaf attach 10` first"));
}

#[test]
fn every_client_may_read_and_only_some_may_make_changes() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    for request in [Request::Daemon, Request::List, info("web"), Request::Explain { vm: "web".into() }] {
        assert!(bench.ask_as(UNPRIVILEGED, request).is_ok());
    }
    let attach = Request::Attach { target: Target::Pid(10), settings: Settings::default() };
    for request in [attach, Request::Reload, Request::Detach { vm: "web".into() }] {
        assert!(bench.ask_as(UNPRIVILEGED, request).expect_err("not for them").starts_with("user 4242 may only read"));
    }
    assert_eq!(bench.guests.guest(10).attached, 0);
}

#[test]
fn valid_settings_take_effect_and_invalid_ones_change_nothing() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    assert!(matches!(bench.set("web", "off"), Ok(Answer::Vm(view)) if view.care == CareView::Off));
    assert!(bench.set("web", "nope").expect_err("no such policy").contains("there is no policy \"nope\""));
    assert_eq!(bench.set("web", "giant"), Err("giant needs a guest of our own".into()));
    let Ok(Answer::Vm(view)) = bench.ask(info("web")) else { panic!("it is there") };
    assert_eq!(view.policy.as_deref(), Some("off"));
}

#[test]
fn a_change_that_cannot_be_saved_is_in_force_and_not_answered_as_done() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    // A folder is in the place of the new file.
    let new = bench.folder.path().join("state.json.new");
    std::fs::create_dir(&new).expect("nothing is there");
    let set = |policy: &str| {
        let changes = Settings { policy: Some(policy.into()), ..Settings::default() };
        bench.service.answer(HERE, ROOT, Request::Set { vm: "web".into(), changes })
    };
    let Reply::Unsaved(why) = set("greedy") else { panic!("it is not saved") };
    assert!(why.contains("in force until wideleafd ends") && why.contains("state.json"), "{why}");
    assert_eq!(bench.list()[0].policy.as_deref(), Some("greedy"));
    let detached = bench.service.answer(HERE, ROOT, Request::Detach { vm: "web".into() });
    assert!(matches!(detached, Reply::Unsaved(_)), "{detached:?}");
    assert!(bench.managed().is_empty());
    std::fs::remove_dir(new).expect("the test's own");
    assert!(bench.attach(10).is_ok());
    assert!(matches!(set("greedy"), Reply::Ok(_)));
}

#[test]
fn a_reload_changes_running_vms_and_keeps_their_counters() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.work = work(mib(6)));
    bench.configure("[defaults]\npolicy = \"greedy\"\nguarantee = \"95%\"");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    let view = bench.list().remove(0);
    assert_eq!((view.policy.as_deref(), view.guarantee), (Some("greedy"), Guarantee::Coverage(9_500)));
    assert_eq!((view.work.map(|work| work.copied), bench.guests.guest(10).attached), (Some(mib(6).get()), 1));
}

#[test]
fn a_reload_reads_a_file_that_was_written_after_the_start() {
    let bench = Bench::new("");
    std::fs::remove_file(bench.folder.path().join("wideleafd.toml")).expect("the test's own");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done), "the defaults hold without it");
    bench.configure("[defaults]\npolicy = \"greedy\"");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    assert_eq!(bench.list()[0].policy.as_deref(), Some("greedy"));
    bench.configure("[defaults]\npolicy = \"nonsense\"");
    assert!(bench.ask(Request::Reload).expect_err("there is no such policy").contains("wideleafd.toml:4:10: "));
}

#[test]
fn a_reload_keeps_the_sections_that_only_a_restart_changes() {
    let bench = Bench::new("");
    let of = |config: &Config| (config.socket.clone(), config.metrics.clone(), config.state.clone());
    let started_with = of(&bench.engine.table().config);
    bench.configure("[socket]\npath = \"/elsewhere\"\n[metrics]\nlisten = \"127.0.0.1:9999\"");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    assert_eq!(of(&bench.engine.table().config), started_with);
}

#[test]
fn a_mistake_in_the_file_changes_nothing() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.configure("[defaults]\npolicy = \"greedy\"\nguarantee = \"most\"");
    let error = bench.ask(Request::Reload).expect_err("it is not a guarantee");
    assert!(error.contains("wideleafd.toml:5:13: "), "{error}");
    assert_eq!(bench.list()[0].policy.as_deref(), Some("auto"));
}

#[test]
fn the_budget_goes_to_vms_with_work_and_is_never_exceeded() {
    let bench = Bench::new("[budget]\ncopy_per_second = \"1600M\"\n[[vm]]\nname = \"big\"\nweight = 3");
    for (pid, name) in [(10, "big"), (11, "small"), (12, "idle")] {
        bench.guests.start(pid, name);
        bench.attach(pid).expect("it runs");
    }
    let copies = || [10, 11, 12].map(|pid| bench.guests.guest(pid).limits.expect("it was told").copy_per_second);
    assert_eq!(copies(), [mib(960), mib(320), mib(320)]); // 3 : 1 : 1, since no VM has done anything yet
    for pid in [10, 11] {
        bench.guests.change(pid, |guest| guest.work = work(mib(2)));
    }
    bench.tick_at(1);
    assert_eq!(copies(), [mib(1125), mib(375), mib(100)]);
    bench.tick_at(2);
    assert_eq!(copies(), [mib(960), mib(320), mib(320)]);
}

#[test]
fn nothing_grows_while_the_host_is_short_or_a_vm_has_its_bloat() {
    let bench = Bench::new("[[vm]]\nname = \"web\"\nbloat_max = \"4M\"");
    for (pid, name) in [(10, "web"), (11, "db")] {
        bench.guests.start(pid, name);
        bench.attach(pid).expect("it runs");
    }
    let may_grow = || [10, 11].map(|pid| bench.guests.guest(pid).may_grow);
    bench.available.store(mib(511).get(), Ordering::Relaxed);
    bench.tick_at(1);
    assert_eq!(may_grow(), [false, false]);
    assert!(matches!(bench.ask(Request::Daemon), Ok(Answer::Daemon(daemon)) if daemon.is_host_short));
    bench.available.store(mib(1023).get(), Ordering::Relaxed);
    bench.tick_at(2);
    assert_eq!(may_grow(), [false, false]); // between the marks: unchanged
    bench.available.store(gib(1).get(), Ordering::Relaxed);
    bench.tick_at(3);
    assert_eq!(may_grow(), [true, true]);
    bench.guests.change(10, |guest| guest.work.bloat = mib(4).get());
    bench.tick_at(4);
    assert_eq!(may_grow(), [false, true]);
}

#[test]
fn bloat_under_an_earlier_daemon_counts_towards_the_limit() {
    let config = "[[vm]]\nname = \"web\"\nbloat_max = \"4M\"";
    let bench = Bench::new(config);
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.work.bloat = mib(4).get());
    bench.tick_at(1);
    bench.engine.save();
    let Bench { folder, guests, pools, .. } = bench;
    guests.change(10, |guest| guest.work.bloat = 0);
    let bench = Bench::on(folder, guests, pools, config);
    bench.tick_at(1);
    assert_eq!((bench.managed(), bench.guests.guest(10).may_grow), (vec!["web".to_owned()], false));
}

#[test]
fn a_missed_guarantee_is_in_the_view_with_its_reason_until_it_is_met() {
    let bench = Bench::new("[defaults]\nguarantee = \"95%\"\ngrace = \"10s\"");
    bench.guests.start(10, "web"); // half of it is huge
    bench.attach(10).expect("it runs");
    let notes = || bench.list().remove(0).notes;
    let is_met = || bench.engine.scrape().vms[0].is_guarantee_met;
    let pursued = "its guarantee of 95% is pursued: policy greedy, later auto again".to_owned();
    bench.tick_at(1);
    bench.tick_at(11);
    assert_eq!((notes(), is_met()), (vec![pursued.clone()], true));
    bench.tick_at(12);
    let missed = "it is below its guarantee of 95%: 1 windows: the policy has not chosen it".to_owned();
    assert_eq!((notes(), is_met()), (vec![missed, pursued.clone()], false));
    bench.guests.change(10, |guest| guest.backing.base_4k = 0);
    bench.tick_at(13);
    assert_eq!((notes(), is_met()), (vec![pursued], true));
}

#[test]
fn a_guarantee_is_pursued_with_priority_until_it_is_met() {
    let web = "[[vm]]\nname = \"web\"\nguarantee = \"95%\"";
    let still = "[[vm]]\nname = \"still\"\nguarantee = \"95%\"\npolicy = \"never\"";
    let bench = Bench::new(&format!("[budget]\ncopy_per_second = \"1600M\"\n{web}\n{still}"));
    for (pid, name) in [(10, "web"), (11, "db"), (12, "still")] {
        bench.guests.start(pid, name); // half of it is huge
        bench.attach(pid).expect("it runs");
    }
    let policies = || [10, 11, 12].map(|pid| bench.guests.guest(pid).policy.expect("it is managed").to_string());
    let is_pursued = || [0, 2].map(|n| bench.engine.scrape().vms[n].is_guarantee_pursued).to_vec();
    let weighed = ["auto", "auto", "never"].map(str::to_owned);
    for second in 1..=3 {
        bench.tick_at(second);
    }
    assert_eq!((policies(), is_pursued()), (weighed, vec![false; 2]));
    bench.tick_at(4);
    assert_eq!((policies(), is_pursued()), (["greedy", "auto", "never"].map(str::to_owned), vec![true, false]));
    let notes = bench.list().remove(0).notes;
    assert_eq!(notes, ["its guarantee of 95% is pursued: policy greedy, later auto again"]);
    let copies = || [10, 11].map(|pid| bench.guests.guest(pid).limits.expect("it was told").copy_per_second);
    assert_eq!(copies(), [mib(1500), mib(50)]); // only web counts as busy
    // A policy that an operator sets takes the place of its own one, and the guarantee is still pursued.
    bench.set("web", "thp").expect("it is managed");
    bench.tick_at(5);
    assert_eq!(policies()[0], "greedy");
    bench.guests.change(10, |guest| guest.backing.base_4k = 0);
    bench.tick_at(15);
    assert_eq!(policies()[0], "greedy");
    bench.tick_at(16);
    assert_eq!((policies()[0].as_str(), bench.list().remove(0).notes), ("thp", Vec::new()));
}

#[test]
fn a_killed_daemon_comes_back_with_its_state() {
    let bench = Bench::new("");
    for (pid, name) in [(10, "web"), (11, "db"), (12, "gone"), (13, "left")] {
        bench.guests.start(pid, name);
        bench.attach(pid).expect("it runs");
    }
    bench.set("web", "off").expect("it is managed");
    bench.ask(Request::Detach { vm: "left".into() }).expect("it is managed");
    bench.guests.change(11, |guest| guest.work = work(mib(6)));
    bench.tick_at(10);
    bench.guests.change(11, |guest| guest.work = work(Bytes::ZERO)); // its next manager counts from zero
    bench.guests.change(12, |guest| guest.has_ended = true);

    let bench = bench.restarted();
    assert_eq!(bench.managed(), ["web", "db"]);
    assert_eq!(bench.list()[0].policy.as_deref(), Some("off"));
    bench.guests.change(11, |guest| guest.work = work(mib(2)));
    bench.tick_at(1);
    assert_eq!(bench.list()[1].work.as_ref().map(|work| work.copied), Some(mib(8).get()));
    let counted = bench.engine.scrape().vms.remove(1).counted.expect("it is managed");
    assert_eq!(counted.copied, mib(2).get(), "a scraped counter begins at zero, as for a process that starts");
    assert_eq!(bench.state().left.len(), 1);
}

#[test]
fn a_reused_process_id_is_another_guest() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.found.process.started_at += 1);
    assert!(bench.restarted().managed().is_empty());
}

#[test]
fn a_long_request_to_one_guest_delays_neither_the_tick_nor_a_registration() {
    let bench = Bench::new("");
    let web = bench.guests.start(10, "web");
    bench.guests.start(11, "db");
    for pid in [10, 11] {
        bench.attach(pid).expect("it runs");
    }
    let busy = bench.guests.guest(10).busy;
    let asking = busy.lock();
    thread::scope(|scope| {
        let explained = scope.spawn(|| bench.ask(Request::Explain { vm: "web".into() }));
        let care = bench.engine.table().vms[&web].care().expect("it is attached");
        while care.try_lock().is_some() {
            thread::yield_now();
        }
        for pid in [10, 11] {
            bench.guests.change(pid, |guest| guest.work = work(mib(6)));
        }
        bench.available.store(mib(1).get(), Ordering::Relaxed);
        bench.tick_at(1);
        bench.ask(Request::Register { vm: own_view(1), live: LiveReport::default() }).expect("it registers");
        let copied: Vec<u64> = bench.engine.views().iter().flat_map(|vm| &vm.work).map(|work| work.copied).collect();
        assert_eq!(copied, [0, mib(6).get()], "web has its earlier view");
        assert_eq!([10, 11].map(|pid| bench.guests.guest(pid).may_grow), [true, false]);
        drop(asking);
        assert!(explained.join().expect("it does not panic").is_ok());
    });
    bench.tick_at(2);
    assert!(!bench.guests.guest(10).may_grow, "it gets the change as soon as it is free");
}

#[test]
fn a_guest_with_a_long_survey_is_listed_by_its_name_and_delays_no_list() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.guests.start(11, "huge");
    let busy = bench.guests.guest(11).busy;
    let looking = busy.lock();
    let vms = bench.list();
    assert_eq!((vms[0].name.as_str(), huge_2m(&vms[0])), ("web", mib(2).get()));
    assert!(vms[1].name == "huge" && vms[1].notes[0].contains("survey is still under way"), "{:?}", vms[1]);
    drop(looking);
    while huge_2m(&bench.list()[1]) == 0 {
        thread::yield_now();
    }
}

#[test]
fn guests_are_left_as_they_are_at_the_end() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.engine.stop(Duration::from_secs(60));
    assert_eq!((bench.guests.guest(10).stopped, bench.state().guests.len()), (1, 1));
    // A request that is late leaves the state as it is.
    bench.scout();
    assert_eq!(bench.state().guests.len(), 1);
}

#[test]
fn the_last_shares_sent_are_the_last_ones_computed() {
    let bench = Bench::new("");
    let first = bench.guests.start(10, "web");
    bench.guests.start(11, "db");
    for pid in [10, 11] {
        bench.attach(pid).expect("it runs");
    }
    let share = |bytes: Bytes| {
        bench.engine.table().config.budget.copy_per_second = bytes;
        bench.engine.share_out();
    };
    let deaf = bench.guests.guest(10).deaf;
    let telling = deaf.lock();
    let told = || bench.guests.guest(11).limits.expect("it was told").copy_per_second;
    thread::scope(|scope| {
        scope.spawn(|| share(mib(100)));
        let care = bench.engine.table().vms[&first].care().expect("it is attached");
        while care.try_lock().is_some() {
            thread::yield_now();
        }
        scope.spawn(|| share(mib(200)));
        // A thread that does not wait for the first one has called db by then; the first is still at web.
        for _ in 0..1_000 {
            thread::sleep(Duration::from_micros(100));
            if told() >= mib(90) {
                break;
            }
        }
        drop(telling);
    });
    assert!(told() > mib(90) && told() <= mib(100), "half of 200 MiB, and not of 100: {}", told());
}

/// Metadata that ask for a monitor.
fn started_with_monitor(pid: u32, domain: &str, policy: &str) -> Request {
    let settings = Settings { policy: Some(policy.into()), qmp: Some(monitor_of(domain)), ..Settings::default() };
    Request::Started {
        domain: domain.into(),
        uuid: format!("u-{domain}"),
        pid,
        settings,
        mistakes: Vec::new(),
        flavor: None,
    }
}

#[test]
fn a_guest_that_was_taken_before_its_metadata_were_known_is_attached_again_and_its_counters_continue() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start_domain(10, "web");
    bench.guests.change(10, |guest| guest.work = work(mib(6)));
    bench.scout();
    bench.guests.change(10, |guest| guest.work = WorkView::default()); // that of its next manager
    for _ in 0..2 {
        bench.ask(started_with_monitor(10, "web", "greedy")).expect("it runs");
        let guest = bench.guests.guest(10);
        assert_eq!((guest.qmp, guest.attached, guest.stopped), (Some(monitor_of("web")), 2, 1), "and once");
    }
    let vm = &bench.list()[0];
    let copied = vm.work.as_ref().map(|work| work.copied);
    assert_eq!((vm.policy.as_deref(), copied), (Some("greedy"), Some(mib(6).get())));
    assert_eq!(bench.state().guests.len(), 1);
    assert_eq!(bench.restarted().guests.guest(10).qmp, Some(monitor_of("web")));
}

#[test]
fn invalid_metadata_leave_a_guest_as_it_was() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start_domain(10, "web");
    bench.scout();
    let refused = bench.ask(started_with_monitor(10, "web", "nonsense")).expect_err("there is no such policy");
    assert!(refused.contains("no policy \"nonsense\""), "{refused}");
    assert_eq!((bench.guests.guest(10).attached, bench.managed().len()), (1, 1));
}

#[test]
fn a_guest_that_cannot_be_attached_again_keeps_its_settings_until_it_can() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.attach(10).expect("it runs");
    bench.set("web", "coverage").expect("it is managed");
    // Its earlier manager hangs at the guest, and still holds it.
    bench.guests.change(10, |guest| guest.attach_error = Some("it has a manager already".into()));
    assert_eq!(bench.ask(started_with_monitor(10, "web", "greedy")), Err("it has a manager already".into()));
    assert_eq!((bench.managed().len(), bench.state().guests.len()), (0, 1));
    bench.scout();
    assert_eq!((bench.managed().len(), bench.state().guests.len()), (0, 1));
    bench.guests.change(10, |guest| guest.attach_error = None);
    bench.scout();
    assert_eq!((bench.managed(), bench.list()[0].policy.as_deref()), (vec!["web".to_owned()], Some("coverage")));
}

mod killed;
mod left_alone;
mod market;
mod metadata;
mod registered;
mod reservations;
mod starting;
mod supplying;
mod trading;

#[test]
fn a_reload_changes_all_settings_but_those_fixed_at_attach() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.attach(10).expect("it runs");
    bench.configure("[defaults]\npolicy = \"greedy\"\ncollapse_shared = true");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    assert_eq!(bench.list()[0].policy.as_deref(), Some("greedy"));
    let qmp = Settings { qmp: Some(monitor_of("web")), ..Settings::default() };
    for changes in [Settings { collapse_shared: Some(true), ..Settings::default() }, qmp] {
        let error = bench.ask(Request::Set { vm: "web".into(), changes }).expect_err("it is attached");
        assert!(error.contains("is fixed when a guest is attached"), "{error}");
    }
}

#[test]
fn the_part_of_the_time_out_of_reach_comes_with_the_attach_a_reload_and_a_setting() {
    let bench = Bench::new("[budget]\nout_of_reach = \"20%\"");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    let is_now = |part: &str| {
        let now = bench.guests.guest(10).out_of_reach.map(|part| part.to_string());
        assert_eq!(now.as_deref(), Some(part));
    };
    is_now("20%");
    bench.configure("[budget]\nout_of_reach = \"5%\"");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    is_now("5%");
    let set = |changes| bench.ask(Request::Set { vm: "web".into(), changes });
    let to = |part: &str| Settings { out_of_reach: Some(part.into()), ..Settings::default() };
    let Ok(Answer::Vm(view)) = set(to("60%")) else { panic!("it is managed") };
    is_now("60%");
    let note = "while pages change their size, memory is out of its reach for at most 60% of any 100 ms";
    assert!(view.notes.iter().any(|line| line == note), "{:?}", view.notes);
    set(Settings { unset: vec![SettingName::OutOfReach], ..Settings::default() }).expect("it is managed");
    is_now("5%");
    assert!(set(to("0%")).expect_err("it is below 1 %").contains("write a number from 1 to 100"));
    is_now("5%");
}

#[test]
fn unset_settings_follow_the_configuration_now_or_from_the_next_attach_on() {
    let bench = Bench::new("[defaults]\npolicy = \"greedy\"");
    bench.guests.start(10, "web");
    let said = Settings { policy: Some("off".into()), qmp: Some(monitor_of("web")), ..Settings::default() };
    bench.ask(Request::Attach { target: Target::Pid(10), settings: said }).expect("it runs");
    let changes = Settings { unset: vec![SettingName::Policy, SettingName::Qmp], ..Settings::default() };
    let Ok(Answer::Vm(view)) = bench.ask(Request::Set { vm: "web".into(), changes }) else { panic!("it is managed") };
    assert_eq!(view.policy.as_deref(), Some("greedy"));
    assert_eq!(bench.guests.guest(10).qmp, Some(monitor_of("web")), "it stays in use until the next attach");
    let unset = vec![SettingName::Policy, SettingName::Qmp];
    assert_eq!(bench.state().guests[0].said, Settings { unset, ..Settings::default() });
    let bench = bench.restarted();
    assert_eq!(bench.guests.guest(10).qmp, None);
}

#[test]
fn concurrent_reads_and_changes_do_not_deadlock() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    for pid in 10..20 {
        bench.guests.start(pid, &format!("vm-{pid}"));
    }
    thread::scope(|scope| {
        scope.spawn(|| (0..50).for_each(|second| bench.tick_at(second)));
        scope.spawn(|| (0..50).for_each(|_| bench.scout()));
        scope.spawn(|| (0..50).for_each(|n| drop(bench.set(&format!("vm-{}", 10 + n % 10), "off"))));
        scope.spawn(|| (0..50).for_each(|n| drop(bench.ask(Request::Detach { vm: format!("vm-{}", 10 + n % 10) }))));
        scope.spawn(|| (0..50).for_each(|_| drop(bench.ask(Request::List))));
    });
    assert!(bench.managed().len() <= 10);
    for pid in 10..20 {
        let guest = bench.guests.guest(pid);
        let is_managed = bench.managed().contains(&guest.found.name);
        assert_eq!(guest.attached - guest.stopped, u32::from(is_managed), "{}", guest.found.name);
    }
}

/// An event on a host; they come in any order.
#[derive(Clone, Debug)]
enum Event {
    Starts(u32),
    Ends(u32),
    Attach(u32),
    Detach(u32),
    Prepare(u32),
    Release(u32),
    Tick,
    Scout,
    Restart,
}

fn any_event() -> impl Strategy<Value = Event> {
    let pid = 10..14_u32;
    prop_oneof![
        pid.clone().prop_map(Event::Starts),
        pid.clone().prop_map(Event::Ends),
        pid.clone().prop_map(Event::Attach),
        pid.clone().prop_map(Event::Detach),
        pid.clone().prop_map(Event::Prepare),
        pid.prop_map(Event::Release),
        Just(Event::Tick),
        Just(Event::Scout),
        Just(Event::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every managed guest runs, no room is lost, and the file agrees with the table, whatever happens.
    #[test]
    fn after_any_events_the_books_balance(events in proptest::collection::vec(any_event(), 0..30)) {
        let mut bench = Bench::new("");
        let uuid = |pid: u32| format!("00000000-0000-0000-0000-{pid:012}");
        let mut known: BTreeSet<u32> = BTreeSet::new();
        for event in events {
            match event {
                Event::Starts(pid) => {
                    if known.insert(pid) {
                        bench.guests.start_domain(pid, &format!("vm-{pid}"));
                    }
                }
                Event::Ends(pid) if known.contains(&pid) => bench.guests.change(pid, |guest| guest.has_ended = true),
                Event::Ends(_) => {}
                Event::Attach(pid) => drop(bench.attach(pid)),
                Event::Detach(pid) => drop(bench.ask(Request::Detach { vm: pid.to_string() })),
                Event::Prepare(pid) => drop(bench.ask(prepare_domain(&format!("vm-{pid}"), &uuid(pid), 30))),
                Event::Release(pid) => drop(bench.ask(release(&uuid(pid)))),
                Event::Tick => bench.tick_at(1),
                Event::Scout => bench.scout(),
                Event::Restart => bench = bench.restarted(),
            }
        }
        bench.tick_at(100);
        for view in bench.engine.views() {
            prop_assert!(!bench.guests.guest(view.pid).has_ended);
        }
        let state = bench.state();
        prop_assert_eq!(state.guests.len(), bench.managed().len());
        let grown = state.rooms.iter().flat_map(|room| &room.grown);
        let grown: u64 = grown.map(wideleaf_memory::pool::Granted::pages).sum();
        prop_assert_eq!(bench.pools.now().growth_left + grown, 100);
    }
}
