//! The daemon is killed after every step of making and giving back room, on a pool with files that keep what was
//! written to them. After any step, the next daemon leaves no page too many, and takes none of another owner.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::AtomicU32;

use wideleaf_memory::pool::{Granted, HugetlbPools, Intent, NodeMemory, Note, OnShortage, PoolStatus, Settled};

use super::*;
use crate::block_supply::NoSupply;
use crate::pool_reservations::Refusal;

const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";
/// Pages that an operator made before the test, all of them in use.
const BEFORE: u64 = 8;

/// The pools of a captured tree, with a user that dies after N steps.
#[derive(Clone)]
struct Mortal {
    root: PathBuf,
    pools: HugetlbPools,
    steps_left: Arc<AtomicU32>,
    /// Whether the kernel has done half of a write when the user dies in the middle of it, or none.
    is_half_done: bool,
}

impl Mortal {
    fn new(root: &Path, steps: u32, is_half_done: bool) -> Mortal {
        let pools = HugetlbPools::at(root);
        Mortal { root: root.to_owned(), pools, steps_left: Arc::new(AtomicU32::new(steps)), is_half_done }
    }

    fn step(&self) {
        let left = self.steps_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left.is_err() {
            resume_unwind(Box::new("killed"));
        }
    }

    /// Runs between the note and the write.
    fn noted(&self, intent: &Intent) {
        let left = self.steps_left.load(Ordering::Relaxed);
        if left == 0 && self.is_half_done {
            let intent = serde_json::to_value(intent).expect("plain data");
            let [before, after] = ["before", "after"].map(|name| intent[name].as_u64().expect("a number"));
            put(&self.root, "nr_hugepages", u64::midpoint(before, after));
        }
        self.step();
    }
}

impl Pools for Mortal {
    fn grow(&self, request: &PoolRequest, on_shortage: OnShortage, note: Note<'_>) -> Result<Granted, Refusal> {
        self.step();
        let granted = Pools::grow(&self.pools, request, on_shortage, &mut |intent| {
            note(intent)?;
            self.noted(intent);
            Ok(())
        });
        self.step();
        granted
    }

    fn shrink(&self, granted: &mut Granted, note: Note<'_>) -> Result<(), Refusal> {
        self.step();
        let done = Pools::shrink(&self.pools, granted, &mut |intent| {
            note(intent)?;
            self.noted(intent);
            Ok(())
        });
        self.step();
        done
    }

    fn settle(&self, intent: &Intent, granted: &mut Vec<Granted>) -> Result<Settled, String> {
        Pools::settle(&self.pools, intent, granted)
    }

    fn available(&self, request: &PoolRequest) -> u64 {
        Pools::available(&self.pools, request)
    }

    fn status(&self) -> Vec<PoolStatus> {
        Pools::status(&self.pools)
    }

    fn room(&self) -> Vec<NodeMemory> {
        Vec::new()
    }
}

fn put(root: &Path, name: &str, number: u64) {
    let path = root.join(POOL).join(name);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    std::fs::write(path, format!("{number}\n")).expect("written");
}

fn pages(root: &Path) -> u64 {
    let text = std::fs::read_to_string(root.join(POOL).join("nr_hugepages")).expect("it is there");
    text.trim().parse().expect("a number")
}

fn host() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for name in ["free_hugepages", "resv_hugepages", "surplus_hugepages", "nr_overcommit_hugepages"] {
        put(folder.path(), name, 0);
    }
    put(folder.path(), "nr_hugepages", BEFORE);
    folder
}

/// A daemon that has taken up an earlier one's state there.
fn daemon(root: &Path, pools: Mortal) -> Service {
    let config = Config::parse(&format!("[state]\npath = {:?}", state_path(root))).expect("it makes sense");
    let doors = Doors {
        guests: Arc::new(FakeGuests::default()),
        pools: Box::new(pools),
        available: Box::new(|| Some(gib(8))),
        supply: Arc::new(NoSupply),
        questions: Arc::default(),
    };
    let engine = Arc::new(Engine::new(doors, config, ConfigFile::at("/nowhere".into())));
    let Ok(Loaded::Fresh | Loaded::Known(_)) = state::load(&state_path(root)) else { panic!("a damaged state") };
    engine.adopt(match state::load(&state_path(root)).expect("it can be read") {
        Loaded::Known(state) => state,
        _ => State::default(),
    });
    engine.resume().expect("no guest runs");
    Service::new(engine, Access::with_files(None, 0, "/nowhere"))
}

fn ask(service: &Service, request: Request) {
    let reply = service.answer(HERE, ROOT, request);
    assert_eq!(reply, Reply::Ok(Box::new(Answer::Done)));
}

/// Makes two rooms, the first in two parts, and gives them back; `true` where all steps were done.
fn lives(root: &Path, steps: u32, is_half_done: bool) -> bool {
    let two_parts = || {
        let part = |pages| PoolRequest { page_bytes: 2 << 20, pages, node: None, nodes: Vec::new() };
        Request::Prepare { domain: "web".into(), uuid: "u".into(), pages: vec![part(6), part(10)], ordinary: None }
    };
    let all = || {
        let service = daemon(root, Mortal::new(root, steps, is_half_done));
        for request in [two_parts(), prepare("v", 4), two_parts(), release("u"), release("v")] {
            ask(&service, request);
        }
    };
    catch_unwind(AssertUnwindSafe(all)).is_ok()
}

/// Runs it with a death after each step. `operator` changes the pool before the next daemon. `check` gets the
/// number of pages after that daemon has given everything back.
fn after_each_death(operator: impl Fn(u64) -> u64, check: impl Fn(u64, &str)) {
    for is_half_done in [false, true] {
        for steps in 0.. {
            let folder = host();
            let root = folder.path();
            if lives(root, steps, is_half_done) {
                assert!(steps > 20, "there were {steps} steps");
                break;
            }
            put(root, "nr_hugepages", operator(pages(root)));
            let service = daemon(root, Mortal::new(root, u32::MAX, false));
            ["u", "v"].into_iter().for_each(|uuid| ask(&service, release(uuid)));
            check(pages(root), &format!("after {steps} steps, half done: {is_half_done}"));
            let Ok(Loaded::Known(state)) = state::load(&state_path(root)) else { panic!("no state") };
            assert_eq!(state.rooms, [], "after {steps} steps");
        }
    }
}

#[test]
fn whenever_the_daemon_is_killed_no_page_is_left_and_none_is_given_back_twice() {
    after_each_death(|pages| pages, |pages, when| assert_eq!(pages, BEFORE, "{when}"));
}

#[test]
fn pages_that_an_operator_adds_between_two_daemons_are_never_taken() {
    after_each_death(|pages| pages + 1_000, |pages, when| assert!(pages >= BEFORE + 1_000, "{pages} {when}"));
}

#[test]
fn a_pool_that_an_operator_shrinks_between_two_daemons_is_not_shrunk_further() {
    let fewer = |pages: u64| pages.saturating_sub(3);
    after_each_death(fewer, |pages, when| assert!(pages >= BEFORE - 3, "{pages} {when}"));
}
