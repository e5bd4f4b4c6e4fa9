//! The loop and pages of 1 GiB that are made because a policy wants them, on the fake host: plans go on meanwhile,
//! failures wait, and each page is counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::Host as _;
use wideleaf_memory::giant_maker::GiantMaker;
use wideleaf_memory::kernel::GiantMappings as _;
use wideleaf_memory::manager::ManagerReport;
use wideleaf_memory::numa::placement::NodePolicy;
use wideleaf_memory::pool::NotMade;
use wideleaf_memory::side_mapping::GiantFile;
use wideleaf_memory::testing::fake_host::FakeHost;
use wideleaf_policies::{Gpa, WindowIndex};

use crate::manager_moves_giants::{Bed, POOL, PROMOTE, Script, count};

/// Makes a page, or not, when the test says so.
#[derive(Debug)]
struct Prompted {
    left: u64,
    prompts: Mutex<Receiver<Result<GiantFile, NotMade>>>,
}

impl GiantMaker for Prompted {
    fn left(&self) -> u64 {
        self.left
    }

    fn make(&self, _: Option<NodePolicy>) -> Result<GiantFile, NotMade> {
        self.prompts.lock().recv().unwrap()
    }
}

/// A VM of two giants, a pool without a page, and a maker that waits for the test.
fn bed(left: u64) -> (Bed, Script, Sender<Result<GiantFile, NotMade>>) {
    let script = Script::default();
    let mut bed = Bed::new(Box::new(script.clone()), true);
    std::fs::write(bed.pool.path().join(POOL).join("free_hugepages"), "0\n").unwrap();
    let (prompt, prompts) = channel();
    let idle = wideleaf_memory::manager::ManagerLoop::new(
        bed.host.clone(),
        Vec::new(),
        wideleaf_policies::policy::by_name("never").unwrap().with_defaults(),
        wideleaf_memory::ManagerConfig::default(),
    );
    let maker = Arc::new(Prompted { left, prompts: Mutex::new(prompts) });
    bed.work = std::mem::replace(&mut bed.work, idle).with_giant_maker(maker);
    (bed, script, prompt)
}

fn page(host: &FakeHost) -> Result<GiantFile, NotMade> {
    Ok(host.create_giant().unwrap())
}

/// Number of pages that the policy saw as free at the latest tick.
fn free(script: &Script) -> u64 {
    script.0.lock().giant_pages_free
}

fn is_made(report: &ManagerReport) -> bool {
    count(report, "giant_page", "made") > 0
}

#[test]
fn a_page_is_made_when_a_plan_names_a_giant_and_the_giant_moves_onto_it() {
    let (mut bed, script, prompt) = bed(1);
    bed.work.tick();
    assert_eq!(free(&script), 1, "one can be made");
    script.then(&[PROMOTE]);
    bed.work.tick();
    assert_eq!(count(bed.work.report(), "giant_promote", "skipped_page_being_made"), 1);
    // The giant is free for other actions until its page is there.
    let other = wideleaf_policies::Action::Promote {
        vm: wideleaf_policies::VmId(0),
        window: WindowIndex::new(1),
        to: wideleaf_policies::PageSize::Huge2M,
    };
    script.then(&[other]);
    bed.work.tick();
    assert_eq!((free(&script), count(bed.work.report(), "collapse", "done")), (0, 1), "nothing waits for it");
    prompt.send(page(&bed.host)).unwrap();
    bed.tick_until_report(is_made);
    bed.work.tick();
    assert_eq!(free(&script), 1);
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "done");
    assert!(bed.ram.claims().is_on_giant_page(WindowIndex::containing(Gpa::new(0))));
    bed.assert_words();
    let report = bed.work.finish();
    assert_eq!(count(&report, "giant_page", "given_back"), 0, "it goes back with the RAM");
    assert!(report.unanswered.is_empty(), "{:?}", report.unanswered);
}

#[test]
fn a_page_that_cannot_be_made_is_counted_with_its_reason_and_asked_for_again_later() {
    let (mut bed, script, prompt) = bed(1);
    script.then(&[PROMOTE]);
    bed.work.tick();
    prompt.send(Err(NotMade::elsewhere("no_room", "no gibibyte is free"))).unwrap();
    bed.tick_until("giant_page_not_made", "no_room");
    assert_eq!(bed.work.report().unanswered, ["pages of 1 GiB: no gibibyte is free"]);
    bed.work.tick();
    assert_eq!(free(&script), 0, "it waits");
    bed.host.sleep(Duration::from_secs(11));
    bed.work.tick();
    assert_eq!(free(&script), 1);
    script.then(&[PROMOTE]);
    bed.work.tick();
    prompt.send(page(&bed.host)).unwrap();
    bed.tick_until_report(is_made);
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "done");
    bed.assert_words();
}

#[test]
fn a_page_that_a_giant_was_not_moved_onto_is_cleared_and_used_for_the_next() {
    let (mut bed, script, prompt) = bed(1);
    script.then(&[PROMOTE]);
    bed.work.tick();
    prompt.send(page(&bed.host)).unwrap();
    bed.tick_until_report(is_made);
    // All words are copied before the exchange fails. The test does not tick until it has.
    let (host, failing) = (bed.host.clone(), Arc::new(AtomicU64::new(0)));
    let fails = failing.clone();
    bed.second_level.in_pause(move || {
        host.fail_call(0, libc::EINVAL);
        fails.store(host.calls() + 1, Ordering::SeqCst);
    });
    script.then(&[PROMOTE]);
    bed.work.tick();
    while failing.load(Ordering::SeqCst) == 0 || bed.host.calls() < failing.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    bed.tick_until("giant_promote", "refused_not_eligible");
    bed.assert_words();
    // Zero in the guest now: the page must not keep the old word.
    let ram = bed.ram.clone();
    let word = &ram.words(ram.ranges()[0])[0];
    word.store(0, Ordering::Relaxed);
    bed.host.sleep(Duration::from_secs(30));
    bed.work.tick();
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "done");
    assert_eq!(word.load(Ordering::Relaxed), 0);
    let report = bed.work.finish();
    assert_eq!((count(&report, "giant_page", "made"), count(&report, "giant_page", "given_back")), (1, 0));
}

#[test]
fn a_page_that_a_giant_was_not_moved_onto_is_there_for_the_policy_that_takes_over() {
    let (mut bed, script, prompt) = bed(1);
    script.then(&[PROMOTE]);
    bed.work.tick();
    prompt.send(page(&bed.host)).unwrap();
    bed.tick_until_report(is_made);
    // The exchange fails after the tick: only the switch can see the end of the move.
    let (host, (ticked, tick_ended)) = (bed.host.clone(), channel());
    bed.second_level.in_pause(move || {
        tick_ended.recv().unwrap();
        host.fail_call(0, libc::EINVAL);
    });
    script.then(&[PROMOTE]);
    bed.work.tick();
    ticked.send(()).unwrap();
    bed.work.switch_policy(Box::new(script.clone())).unwrap();
    bed.work.tick();
    let report = bed.work.report();
    assert_eq!(count(report, "giant_promote", "refused_not_eligible"), 1, "{:?}", report.outcomes);
    assert_eq!(count(report, "giant_page", "given_back"), 0);
    bed.host.sleep(Duration::from_secs(30));
    script.then(&[PROMOTE]);
    bed.tick_until("giant_promote", "done");
    assert_eq!(count(bed.work.report(), "giant_page", "made"), 1);
    bed.assert_words();
}

#[test]
fn a_page_that_no_plan_uses_goes_back_and_so_does_one_at_the_end() {
    let (mut bed, script, prompt) = bed(9);
    for round in 1..3 {
        script.then(&[PROMOTE]);
        bed.work.tick();
        prompt.send(page(&bed.host)).unwrap();
        bed.tick_until_report(|report| count(report, "giant_page", "made") == round);
        if round == 1 {
            bed.host.sleep(Duration::from_secs(61));
            bed.work.tick();
            let report = bed.work.report();
            assert_eq!((count(report, "giant_page", "unused"), count(report, "giant_page", "given_back")), (1, 1));
        }
    }
    assert_eq!(count(&bed.work.finish(), "giant_page", "given_back"), 2);
}

#[test]
fn the_end_waits_for_no_page_that_is_being_made() {
    let (mut bed, script, prompt) = bed(1);
    script.then(&[PROMOTE]);
    bed.work.tick();
    let report = bed.work.finish();
    assert_eq!(count(&report, "giant_page", "made"), 0);
    prompt.send(page(&FakeHost::default())).unwrap();
}
