//! Readings of the manager's sensors for a live guest, and proof that its memory survives every actuator at once:
//! `pattern` checks and rewrites each word while another thread splits, collapses and releases its windows. Needs
//! KVM.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::release::release_window;
use wideleaf_memory::actuators::split::split_window;
use wideleaf_memory::detached::{Aside, WindowMover, probe};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::sensors::guest_tables::sample;
use wideleaf_memory::sensors::written::{WindowWrites, WriteSensor};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::{BASE_PAGES_PER_WINDOW, mib};
use wideleaf_policies::{GuestMapping, OutcomeResult, PageSize};
use wideleaf_protocol::{Message, Status, parse};
use wideleaf_testing::{Need, has_kvm, is_there, pattern_lasts};
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

/// Time limit of a guest: ten times the need of any guest here on an idle machine.
const GUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Output of a guest about its own check.
#[derive(Default)]
struct GuestVerdict {
    has_begun: bool,
    verdict: Option<(Status, u64)>,
}

struct Guest {
    machine: Machine,
    said: Arc<Mutex<GuestVerdict>>,
}

impl Guest {
    /// Starts a guest with 32 MiB of anonymous base pages, all of them present before it starts.
    fn start(guest_page: PageSize, vcpus: u32, cmdline: &str) -> Guest {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let mut options = VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing);
        options.memory = mib(32);
        options.guest_page = guest_page;
        options.vcpus = vcpus;
        options.slot_bytes = Some(mib(8));
        options.cmdline = format!("kernel=pattern {cmdline}");
        let config = VmConfig::new(options, &HostLimits::none()).unwrap();
        let ram = GuestRam::map(&config.ram_layout(), backing).unwrap();
        prefault(&LinuxHost::open().unwrap(), ram.ranges(), 1, &|_| ControlFlow::Continue(())).unwrap();
        let said = Arc::new(Mutex::new(GuestVerdict::default()));
        let listener = Arc::clone(&said);
        let sink = Box::new(move |line: &[u8]| listen(&listener, &String::from_utf8_lossy(line)));
        Guest { machine: Machine::start(&config, ram, sink).unwrap(), said }
    }

    fn has_ended(&self) -> bool {
        assert!(self.machine.started().elapsed() < GUEST_TIMEOUT, "the guest does not end");
        self.machine.vcpu_states().iter().all(|state| *state == wideleaf_vmm::run_loop::VcpuState::Finished)
    }

    fn wait_until_it_works(&self) {
        let began = Instant::now();
        while !self.said.lock().has_begun {
            assert!(began.elapsed() < GUEST_TIMEOUT, "the guest does not begin");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn assert_passes(&self) {
        let exit = self.machine.wait(WaitLimits { timeout: Some(GUEST_TIMEOUT), stop: None });
        assert_eq!(exit, GuestExit::ExitPort(0));
        assert_eq!(self.said.lock().verdict, Some((Status::Pass, 0)), "the guest lost a word");
    }
}

fn listen(said: &Mutex<GuestVerdict>, line: &str) {
    let mut said = said.lock();
    match parse(line) {
        Some(Ok(Message::Region { .. })) => said.has_begun = true,
        Some(Ok(Message::Verify { status, errors, .. })) => said.verdict = Some((status, errors)),
        _ => {}
    }
}

#[test]
fn the_guest_s_tables_show_the_page_size_it_was_started_with() {
    if !has_kvm() {
        return;
    }
    for (page, expected) in [(PageSize::Base4K, GuestMapping::Base4K), (PageSize::Huge2M, GuestMapping::Huge2M)] {
        let guest = Guest::start(page, 2, "bytes=8M seconds=60");
        guest.wait_until_it_works();
        let ram = guest.machine.ram();
        let found = sample(&*guest.machine.second_level(), ram).unwrap();
        assert!(found.is_complete);
        let expected: Vec<_> = ram.ranges()[0].gpa.windows().map(|window| (window, expected)).collect();
        assert_eq!(found.windows, expected, "{page}");
        assert_eq!(guest.machine.stop(), GuestExit::Stopped);
    }
}

#[test]
fn the_dirty_log_counts_the_guest_s_writes_and_all_slots_are_as_before() {
    if !has_kvm() {
        return;
    }
    let guest = Guest::start(PageSize::Huge2M, 1, &format!("bytes=8M {}", pattern_lasts(2)));
    guest.wait_until_it_works();
    let second_level = guest.machine.second_level();
    let mut sensor = WriteSensor::default();
    let mut most = vec![0; 16];
    while !guest.has_ended() {
        sensor.begin(&*second_level, 2).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        for WindowWrites { window, pages } in sensor.end(&*second_level).unwrap() {
            assert!(pages <= BASE_PAGES_PER_WINDOW);
            most[window.get() as usize] = most[window.get() as usize].max(pages);
        }
        assert!(second_level.slots().iter().all(|slot| !slot.is_dirty_logged));
    }
    guest.assert_passes();
    let written = most.iter().filter(|pages| **pages > 0).count();
    assert!((1..16).contains(&written), "a pattern of four windows is written, and most of RAM is not: {most:?}");
}

/// Number of successful actions of each actuator.
#[derive(Debug, Default)]
struct Done {
    collapses: u64,
    splits: u64,
    releases_of_huge: u64,
    releases_of_base: u64,
}

/// Goes through all windows: fills the holes of each with base pages and releases zero pages, then collapses it and
/// splits each second one. The next round releases the others as huge pages.
fn meddle(aside: &Aside, host: &LinuxHost, ram: &GuestRam, done: &mut Done) {
    let range = ram.ranges()[0];
    let is_done = |result: OutcomeResult| u64::from(result == OutcomeResult::Done);
    for window in range.gpa.windows() {
        let start = range.hva + (window.start() - range.gpa.start());
        host.advise(start, PageSize::Huge2M.bytes(), Advice::PopulateWrite).unwrap();
        let release = release_window(aside, host, range, window);
        *if release.was_split { &mut done.releases_of_huge } else { &mut done.releases_of_base } +=
            is_done(release.result);
        done.collapses += is_done(collapse_window(host, range, window).result);
        if window.get().is_multiple_of(2) {
            done.splits += is_done(split_window(host, BackingKind::Anon, range, window).result);
        }
    }
}

#[test]
fn a_guest_loses_nothing_while_its_windows_are_split_collapsed_and_released() {
    if !has_kvm() || !is_there(Need::UffdMove, probe().map(drop)) {
        return;
    }
    for guest_page in [PageSize::Base4K, PageSize::Huge2M] {
        // Before the guest's first store, so that its fill meets the release of pages that are still zero.
        let guest = Guest::start(guest_page, 2, &format!("bytes=16M {}", pattern_lasts(8)));
        let host = Arc::new(LinuxHost::open().unwrap());
        let mover = WindowMover::start(host.clone(), guest.machine.ram().clone()).unwrap();
        let mut done = Done::default();
        while !guest.has_ended() {
            meddle(mover.aside(), &host, guest.machine.ram(), &mut done);
        }
        guest.assert_passes();
        println!("{guest_page}: {done:?}");
        assert!(done.collapses > 16 && done.splits > 8, "{guest_page}: {done:?}");
        assert!(done.releases_of_huge > 0 && done.releases_of_base > 8, "{guest_page}: {done:?}");
    }
}
