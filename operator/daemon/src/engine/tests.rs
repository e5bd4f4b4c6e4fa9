//! The engine with guests, pools and host memory that a test makes up. Here: the daemon of a test ([`Bench`]) and the
//! requests that several subjects use; each file below has the tests of one subject.

mod budget;
mod concurrency;
mod killed;
mod left_alone;
mod market;
mod metadata;
mod registered;
mod reservations;
mod restarts;
mod settings;
mod starting;
mod supplying;
mod taking;
mod trading;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

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
use crate::permissions::{Access, Peer};
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

fn started(pid: u32, domain: &str, policy: Option<&str>) -> Request {
    started_with(pid, domain, Settings { policy: policy.map(str::to_owned), ..Settings::default() })
}

/// Report of a domain with these settings in its metadata.
fn started_with(pid: u32, domain: &str, settings: Settings) -> Request {
    Request::Started {
        domain: domain.into(),
        uuid: format!("u-{domain}"),
        pid,
        settings,
        mistakes: Vec::new(),
        flavor: None,
    }
}

/// Metadata that ask for a monitor.
fn started_with_monitor(pid: u32, domain: &str, policy: &str) -> Request {
    let settings = Settings { policy: Some(policy.into()), qmp: Some(monitor_of(domain)), ..Settings::default() };
    started_with(pid, domain, settings)
}
