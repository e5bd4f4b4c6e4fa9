//! No guest may lose a byte that a device wrote because the manager moves its memory. A guest writes a disk, erases
//! the data, reads it back, and checks every word of it and of other RAM. The pages beneath both are promoted,
//! split, given back, sampled, swapped and put onto giant pages. Devices write by the kernel's own faults (`preadv`
//! into guest RAM), past the CPU's tables that KVM keeps. A slow disk without page cache writes into pages that the
//! kernel pins from the start of the transfer. Needs KVM, and FUSE for the slow disk.
//!
//! ```text
//!   guest      fill ─▶ write to disk ─▶ zero ─▶ read from disk ─▶ check …         vCPU 1: check and rewrite other RAM
//!   disk       pwritev from the pages ────────▶ preadv into the pages
//!   host       collapse, split, hold, release │ UFFDIO_MOVE aside and back, swap │ giants: copy, pause, exchange
//! ```

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tempfile::NamedTempFile;
use wideleaf_guest_image::IMAGE;
use wideleaf_kernels::test_pattern::{FIRST_GENERATION, origin, word};
use wideleaf_memory::actuators::giant::{GiantPages, SwapLimits, SwapSite};
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::detached::{WindowMover, probe};
use wideleaf_memory::second_level::SecondLevel;
use wideleaf_memory::sensors::access::{AccessConfig, AccessSampler, AccessSensor};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::policy::{PolicyInfo, by_name};
use wideleaf_policies::rotation::Rotation;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, Gpa, OutcomeResult, PageSize, PolicyChoice, Refusal, WindowIndex};
use wideleaf_run::engine::execute;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::RunReport;
use wideleaf_run::spec::{DeviceSpec, RunSpec};
use wideleaf_testing::chaos::Chaos;
use wideleaf_testing::slow_disk::SlowDisk;
use wideleaf_testing::{GiantPage, Need, has_kvm, is_there};
use wideleaf_vmm::boot::BootImage;
use wideleaf_vmm::devices::SerialOutput;
use wideleaf_vmm::devices::virtio::block::{Block, DiskCounters, DiskImage, DiskOptions};
use wideleaf_vmm::{GuestExit, Hardware, HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

const TIMEOUT: Duration = Duration::from_secs(300);
/// Bytes of the disk and of RAM: some windows, and short enough for many passes.
const DISK_BYTES: u64 = 12 << 20;
/// Parameters of the guest, with its working time by its own clock.
const CMDLINE: &str = "bytes=12M seconds=5 requests=2000";

/// Duration of a transfer of the slow disk: like that of a fast disk, and long enough for every actuator to meet
/// one.
const SLOW: Duration = Duration::from_millis(1);

/// Image of the guest's disk.
enum Image {
    /// A file of the host, which the kernel copies from its page cache.
    Cached(NamedTempFile),
    /// A disk served by [`wideleaf_testing::slow_disk`].
    Slow(SlowDisk),
}

impl Image {
    fn cached() -> Image {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(DISK_BYTES).unwrap();
        Image::Cached(file)
    }

    /// Creates a slow disk; `None` if the test is to be skipped.
    fn slow() -> Option<Image> {
        SlowDisk::mount(DISK_BYTES as usize, SLOW).map(Image::Slow)
    }

    fn options(&self) -> DiskOptions {
        let path = match self {
            Image::Cached(file) => PathBuf::from(file.path()),
            Image::Slow(disk) => disk.path(),
        };
        DiskOptions { path, ..DiskOptions::default() }
    }

    /// Asserts that the disk has one whole pass of the guest's words, in their places.
    fn check(&self) {
        let bytes = match self {
            Image::Cached(file) => std::fs::read(file.path()).unwrap(),
            Image::Slow(disk) => disk.bytes(),
        };
        assert_eq!(bytes.len() as u64, DISK_BYTES);
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let (_, generation) = origin(words[0]);
        assert!(generation >= FIRST_GENERATION, "the guest wrote");
        let wrong = (0..).zip(&words).find(|(index, found)| **found != word(*index, generation));
        assert_eq!(wrong, None, "of pass {generation}");
    }
}

/// Runs the guest under a policy, with every sensor and actuator that it asks for.
fn run(policy: impl Into<PolicyChoice>, kind: BackingKind, start: PageSize, image: &Image) -> RunReport {
    let spec = RunSpec {
        devices: DeviceSpec { disks: vec![image.options()], ..DeviceSpec::default() },
        vcpus: 2,
        policy: policy.into(),
        timeout: Some(TIMEOUT),
        ..RunSpec::of_kernel("disk", CMDLINE, mib(40), BackingConfig::new(kind, start).unwrap())
    };
    let report = execute(&spec, &Interrupts::install().unwrap(), Instant::now()).unwrap();
    let verification = report.verification.clone().unwrap();
    assert!(verification.passed, "{verification:?}");
    image.check();
    let device = &report.devices[0];
    println!("{:?} {:?}", device.counters, report.manager.outcomes);
    assert!(device.has_driver && device.counters["reads"] > 0 && device.counters["flushes"] > 0, "{device:?}");
    let failed: Vec<_> = device.counters.iter().filter(|(name, _)| name.starts_with("failed")).collect();
    assert!(failed.iter().all(|(_, count)| **count == 0), "{failed:?}");
    report
}

fn count(report: &RunReport, outcome: &str) -> u64 {
    report.manager.outcomes.get(outcome).copied().unwrap_or(0)
}

static CHAOS: PolicyInfo = PolicyInfo {
    name: "chaos",
    summary: "asks for random actions",
    parameters: &[],
    make: |_| Box::new(Chaos::new(7)),
};

#[test]
fn disk_reads_into_ram_survive_promotion() {
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        if !has_kvm() {
            return;
        }
        let report = run(by_name("greedy").unwrap(), kind, PageSize::Base4K, &Image::cached());
        assert!(count(&report, "collapse.done") >= 6, "{:?}", report.manager.outcomes);
    }
}

#[test]
fn disk_reads_into_anonymous_ram_survive_random_actions() {
    if !has_kvm() {
        return;
    }
    assert_anything_was_done(&run(&CHAOS, BackingKind::Anon, PageSize::Base4K, &Image::cached()));
}

fn assert_anything_was_done(report: &RunReport) {
    let promoted = count(report, "swap.done") + count(report, "collapse.done");
    assert!(promoted > 0 && count(report, "split.done") > 0, "{:?}", report.manager.outcomes);
    // The guest zeroes its buffers before it reads into them: there are pages to give back, and devices write them
    // again.
    let released = report.manager.outcomes.iter().filter(|(name, _)| name.starts_with("release.")).map(|(_, n)| n);
    assert!(released.sum::<u64>() > 0, "{:?}", report.manager.outcomes);
}

#[test]
fn disk_reads_into_memfd_ram_survive_random_actions() {
    if !has_kvm() {
        return;
    }
    let report = run(&CHAOS, BackingKind::Memfd, PageSize::Base4K, &Image::cached());
    assert!(count(&report, "hold_at_4k.done") > 0, "{:?}", report.manager.outcomes);
}

#[test]
fn slow_disk_reads_into_pinned_pages_survive_random_actions() {
    let Some(image) = Image::slow().filter(|_| has_kvm()) else { return };
    assert_anything_was_done(&run(&CHAOS, BackingKind::Anon, PageSize::Base4K, &image));
}

#[test]
fn slow_disk_reads_into_pinned_pages_survive_the_release_of_huge_windows() {
    // The host counts as short of memory whatever it has, so that each huge window with a zero page is split and
    // released.
    const ALWAYS_SHORT: &str = "coverage:recover_from=1,recover_to=0,zero_pages_min=1";
    // By a rule, independent of the host: any huge window with a zero page, at any time.
    const BY_RULE: &str = "schemes:rules=min max min max min max release";
    for policy in [ALWAYS_SHORT, BY_RULE] {
        let Some(image) = Image::slow().filter(|_| has_kvm()) else { return };
        let policy = PolicyChoice::parse(policy).unwrap();
        let report = run(policy.clone(), BackingKind::Anon, PageSize::Huge2M, &image);
        let released = report.manager.outcomes.iter().filter(|(name, _)| name.starts_with("release.")).map(|(_, n)| n);
        assert!(released.sum::<u64>() > 0, "{policy}: {:?}", report.manager.outcomes);
    }
}

/// A guest that uses its disk, with RAM that the test moves.
struct DiskGuest {
    machine: Machine,
    ram: Arc<GuestRam>,
    counters: Arc<DiskCounters>,
    lines: Arc<Mutex<String>>,
    // Dropped after the machine, which has it open.
    image: Image,
}

impl DiskGuest {
    fn start(memory: Bytes, cmdline: &str, image: Image) -> DiskGuest {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
        let mut options = VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing);
        options.memory = memory;
        options.vcpus = 2;
        options.cmdline = format!("kernel=disk {cmdline}");
        options.slot_bytes = (memory >= gib(1)).then(|| gib(1));
        let config = VmConfig::new(options, &HostLimits::none()).unwrap();
        let ram = GuestRam::map(&config.ram_layout(), backing).unwrap();
        let device = Block::new(DiskImage::open(&image.options()).unwrap());
        let counters = device.counters();
        let lines = Arc::new(Mutex::new(String::new()));
        let sink = {
            let lines = lines.clone();
            Box::new(move |line: &[u8]| lines.lock().push_str(&String::from_utf8_lossy(line)))
        };
        let hardware = Hardware {
            ram: ram.clone(),
            output: SerialOutput { lines: sink, bytes: None },
            devices: vec![Box::new(device)],
            sandbox: None,
        };
        let machine = Machine::start_image(&config, &BootImage::read(&config).unwrap(), hardware).unwrap();
        DiskGuest { machine, ram, counters, lines, image }
    }

    /// Runs `meddle` until the guest has ended. The guest's exit code is success only if no word was ever wrong.
    fn run_beside<R: Send>(&self, meddle: impl FnOnce(&AtomicBool) -> R + Send) -> R {
        let is_over = AtomicBool::new(false);
        let (exit, result) = std::thread::scope(|scope| {
            let meddler = scope.spawn(|| meddle(&is_over));
            let exit = self.machine.wait(WaitLimits { timeout: Some(TIMEOUT), stop: None });
            is_over.store(true, Ordering::Relaxed);
            (exit, meddler.join().unwrap())
        });
        let statistics = self.counters.statistics();
        println!("{statistics:?}");
        assert_eq!(exit, GuestExit::ExitPort(0), "{}", self.lines.lock());
        assert_eq!((statistics.failed_host, statistics.failed_no_ram, statistics.failed_short), (0, 0, 0));
        assert!(statistics.reads > 0 && statistics.writes > 0);
        self.image.check();
        result
    }
}

#[test]
fn disk_reads_into_windows_that_are_taken_aside_and_swapped_are_not_lost() {
    if !has_kvm() || !is_there(Need::UffdMove, probe().map(drop)) {
        return;
    }
    let guest = DiskGuest::start(mib(40), CMDLINE, Image::cached());
    prefault(&LinuxHost::open().unwrap(), guest.ram.ranges(), 1, &|_| ControlFlow::Continue(())).unwrap();
    let ram = &guest.ram;
    let (touched, swapped, not_observed) = guest.run_beside(|is_over| {
        let host = Arc::new(LinuxHost::open().unwrap());
        let mover = WindowMover::start(host.clone(), ram.clone()).unwrap();
        let mut sensor = AccessSensor::new(mover.aside().clone(), AccessConfig::default());
        let mut swapper = Swapper::new(mover.aside().clone());
        let windows: Vec<WindowIndex> = ram.ranges().iter().flat_map(|range| range.gpa.windows()).collect();
        let (mut to_sample, mut to_swap) = (Rotation::default(), Rotation::default());
        let (mut touched, mut swapped, mut not_observed) = (0, 0, 0);
        while !is_over.load(Ordering::Relaxed) {
            sensor.start(host.as_ref(), &to_sample.next_share(&windows, 4));
            touched += sensor.finish(host.as_ref()).cost.events;
            let swap = swapper.swap(host.as_ref(), to_swap.next_share(&windows, 1)[0]);
            swapped += u64::from(swap.result == OutcomeResult::Done);
            not_observed += u64::from(swap.result == OutcomeResult::Refused(Refusal::NotObserved));
        }
        (touched, swapped, not_observed)
    });
    println!("{touched} touches of what was aside, {swapped} swaps");
    assert!(touched > 0 && (swapped >= 16 || not_observed > 0), "{touched} {swapped} {not_observed}");
}

/// Words of the base pages of all ranges of RAM.
fn copy_of(ram: &GuestRam) -> Vec<u64> {
    let words = ram.ranges().iter().flat_map(|range| ram.words(*range));
    words.map(|word| word.load(Ordering::Relaxed)).collect()
}

/// Copies RAM of a running guest like the move to a giant page: all of it under the dirty log, then, while the
/// guest is paused, the pages in the log; and compares. Returns the number of differing words, or `None` if a
/// device was too slow to be paused.
fn copy_under_the_log(ram: &GuestRam, second_level: &dyn SecondLevel) -> Option<usize> {
    let slots = second_level.slots();
    slots.iter().for_each(|slot| second_level.set_dirty_log(slot.id, true).unwrap());
    let mut copy = copy_of(ram);
    let paused = second_level.pause();
    let wrong = paused.is_ok().then(|| {
        let [range] = ram.ranges() else { panic!("40 MiB of RAM are one range") };
        for slot in &slots {
            for (index, log) in second_level.take_dirty_log(slot.id).unwrap().into_iter().enumerate() {
                for page in (0..64).filter(|bit| log >> bit & 1 == 1) {
                    let first = slot.range.start().get() as usize / 8 + (index * 64 + page) * 512;
                    let words = &ram.words(*range)[first..first + 512];
                    copy[first..].iter_mut().zip(words).for_each(|(to, word)| *to = word.load(Ordering::Relaxed));
                }
            }
        }
        // A transfer under way would write now, or a little later.
        std::thread::sleep(SLOW * 2);
        let differs = copy_of(ram).iter().zip(&copy).filter(|(now, then)| now != then).count();
        second_level.resume().unwrap();
        differs
    });
    slots.iter().for_each(|slot| second_level.set_dirty_log(slot.id, false).unwrap());
    wrong
}

#[test]
fn a_copy_under_the_dirty_log_equals_the_memory_of_the_paused_guest_and_slow_disk() {
    let Some(image) = Image::slow().filter(|_| has_kvm()) else { return };
    let guest = DiskGuest::start(mib(40), CMDLINE, image);
    let second_level = guest.machine.second_level();
    let (copies, wrong) = guest.run_beside(|is_over| {
        let (mut copies, mut wrong) = (0, 0);
        while !is_over.load(Ordering::Relaxed) {
            let words = copy_under_the_log(&guest.ram, second_level.as_ref());
            copies += u64::from(words.is_some());
            wrong += words.unwrap_or(0);
        }
        (copies, wrong)
    });
    println!("{copies} copies");
    assert!(copies > 0 && wrong == 0, "{wrong} words of {copies} copies are not what the guest had");
}

#[test]
fn disk_reads_into_a_gibibyte_that_becomes_a_giant_and_back_are_not_lost() {
    giants_there_and_back(Image::cached);
}

#[test]
fn slow_disk_reads_into_a_gibibyte_that_becomes_a_giant_and_back_are_not_lost() {
    // Requested first: making a page of the pool may take seconds.
    if Image::slow().is_some() {
        giants_there_and_back(|| Image::slow().unwrap());
    }
}

fn giants_there_and_back(image: impl FnOnce() -> Image) {
    const PATIENT: SwapLimits = SwapLimits { pause_max: Duration::from_secs(5), rounds_max: 100 };
    let Some(page) = GiantPage::of_this_machine().filter(|_| has_kvm()) else { return };
    let guest = DiskGuest::start(gib(1) + mib(64), "bytes=12M seconds=10 requests=2000", image());
    let second_level = guest.machine.second_level();
    let giants = GiantPages::new(page.pools().clone(), false, PATIENT);
    let ram = &guest.ram;
    let there_and_back = guest.run_beside(|is_over| {
        let host = LinuxHost::open().unwrap();
        let site = SwapSite { host: &host, ram, second_level: second_level.as_ref() };
        let mut done = 0;
        while !is_over.load(Ordering::Relaxed) {
            let there = giants.promote(site, Gpa::new(0));
            assert!(!there.is_stuck, "{there:?}");
            let back = giants.demote(site, Gpa::new(0), PageSize::Base4K);
            assert!(!back.is_stuck, "{back:?}");
            done += u64::from(there.result == OutcomeResult::Done && back.result == OutcomeResult::Done);
        }
        done
    });
    println!("{there_and_back} times onto a giant page and back");
    assert!(there_and_back > 0);
    drop(guest);
    page.assert_given_back();
}
