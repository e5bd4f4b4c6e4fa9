//! A vCPU touches an untouched giant: it waits, finds a page of 1 GiB there, and goes on. When the guest gives a window
//! of it back, the giant is demoted under the running guest, once and for good. Needs KVM, a userfaultfd for kernel
//! faults and a page of 1 GiB.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::actuators::giant::SwapLimits;
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop, ManagerReport};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, Manager};
use wideleaf_policies::policy::Policy;
use wideleaf_policies::units::gib;
use wideleaf_policies::{
    Backing, Budget, Gpa, Moment, Outcome, PageSize, Plan, PolicyChoice, Snapshot, VmId, WindowIndex,
};
use wideleaf_protocol::{Message, parse};
use wideleaf_testing::{GiantPage, Need, has_kvm, is_there};
use wideleaf_vmm::{HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

const VM: VmId = VmId(0);
/// 600 windows behind a small table, one touched page each: the last 90 or so are in the second giant.
const CMDLINE: &str = "kernel=gups log2_words=20 sparse=1200M seconds=8";
/// A window of the second giant that the guest does not use.
const UNUSED: WindowIndex = WindowIndex::new(900);
const WAIT_MAX: Duration = Duration::from_secs(240);
/// The guest fills its memory in seconds, and its touch is answered after ten at most.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);
/// For shared machines, which stop for tens of milliseconds, and slow emulated processors.
const PATIENT: SwapLimits = SwapLimits { pause_max: Duration::from_secs(5), rounds_max: 100 };

/// The real policy, except that the first giant, which the loader has touched, stays on base pages: less memory.
struct SecondGiant(Box<dyn Policy>);

impl Policy for SecondGiant {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn promotes(&self) -> bool {
        self.0.promotes()
    }

    fn largest_page(&self) -> PageSize {
        self.0.largest_page()
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.0.plan(snapshot, now, budget, plan);
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.0.learn(outcome);
    }

    fn decides_at_first_touch(&self) -> bool {
        true
    }

    fn first_touch(&mut self, vm: VmId, window: WindowIndex) -> PageSize {
        if window.giant() == 0 { PageSize::Base4K } else { self.0.first_touch(vm, window) }
    }
}

/// Wrong words and problems that the guest reported, and whether it has verified its table.
#[derive(Default)]
struct GuestProblems {
    bad_news: Vec<String>,
    passed: bool,
}

fn hear(said: &Mutex<GuestProblems>, line: &str) {
    let mut said = said.lock();
    match parse(line) {
        Some(Ok(Message::Mismatch(_) | Message::Panic { .. })) => said.bad_news.push(line.to_owned()),
        Some(Ok(Message::Verify { errors: 0, .. })) => said.passed = true,
        Some(Ok(Message::Verify { .. })) => said.bad_news.push(line.to_owned()),
        _ => {}
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    assert!(becomes_so(WAIT_MAX, is_so), "{what} does not come in time");
}

fn becomes_so(within: Duration, is_so: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + within;
    while !is_so() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

fn done(report: &ManagerReport, mechanism: &str) -> u64 {
    report.done(mechanism)
}

#[test]
fn a_vcpu_finds_a_giant_at_its_first_touch_and_survives_its_demotion() {
    let userfaultfd = wideleaf_memory::first_touch::probe().map(drop).map_err(|error| error.to_string());
    if !(has_kvm() && is_there(Need::Userfaultfd, userfaultfd)) {
        return;
    }
    let Some(page) = GiantPage::of_this_machine() else { return };
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let options = VmOptions {
        memory: gib(2),
        cmdline: CMDLINE.into(),
        slot_bytes: Some(gib(1)),
        ..VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing)
    };
    let config = VmConfig::new(options, &HostLimits::none()).unwrap();
    let ram = GuestRam::map(&config.ram_layout(), backing).unwrap();
    let said = Arc::<Mutex<GuestProblems>>::default();
    let listener = said.clone();
    let sink = move |line: &[u8]| hear(&listener, &String::from_utf8_lossy(line));
    let machine = Machine::start(&config, ram.clone(), Box::new(sink)).unwrap();
    let kvm = machine.second_level();
    kvm.pause().unwrap();

    let policy = SecondGiant(PolicyChoice::parse("at-fault:giant=1").unwrap().make());
    let host = Arc::new(LinuxHost::open().unwrap());
    let vm = ManagedVm::new(VM, ram.clone(), Some(kvm.clone()));
    let work = ManagerLoop::new(host.clone(), vec![vm], Box::new(policy), ManagerConfig::default());
    let manager = Manager::spawn_loop(work.with_giants_from(page.pools().clone(), PATIENT)).unwrap();
    manager.activate();
    kvm.resume().unwrap();

    let first_of_giant = WindowIndex::containing(Gpa::new(0) + gib(1));
    if !becomes_so(ANSWERED_WITHIN, || ram.claims().is_on_giant_page(first_of_giant)) {
        machine.stop();
        let at_first = manager.stop().first_touch.unwrap();
        assert_eq!(at_first.giant_refused.keys().collect::<Vec<_>>(), [&"giant_too_late"], "{at_first:?}");
        return println!("skipped: this host needs more than 10 s to clear a page of 1 GiB");
    }
    wait_until("a look at it", || {
        let live = manager.live();
        let vm = live.snapshot.vms.first();
        vm.and_then(|vm| Some(vm.backing[vm.row(first_of_giant)?])) == Some(Backing::Giant1G)
    });
    // The guest gives a window back, as a balloon would.
    let pages = (0..512).map(|page| UNUSED.start() + PageSize::Base4K.bytes() * page);
    GiveBack::new(host, ram.clone()).unwrap().inflate(pages);
    wait_until("the demotion", || !ram.claims().is_on_giant_page(first_of_giant));

    let exit = machine.wait(WaitLimits { timeout: Some(WAIT_MAX), stop: None });
    let report = manager.stop();
    println!("{exit:?} {:?} {:?}", report.outcomes, report.first_touch);
    let said = said.lock();
    assert!(said.passed && said.bad_news.is_empty(), "{exit:?}, {:?}", said.bad_news);
    assert_eq!((done(&report, "giant_demote"), done(&report, "giant_promote")), (1, 0), "{:?}", report.outcomes);
    assert_eq!(report.kvm_checks[0].unwrap().contradictions, 0);
    let at_first = report.first_touch.unwrap();
    assert_eq!((at_first.answered_1g, at_first.giant_pages_made), (1, 0), "{at_first:?}");
    assert_eq!((&at_first.giant_refused.len(), &at_first.gave_up), (&0, &None), "{at_first:?}");
    let region = &at_first.regions[0];
    let now = region.now.unwrap();
    assert_eq!((region.at_first.giants, now.pages_1g, now.demoted_1g), (1, 0, 1), "{region:?}");
    assert_eq!(machine.stop(), exit);
    drop((machine, kvm, ram));
    page.assert_given_back();
}
