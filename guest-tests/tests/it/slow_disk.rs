//! A transfer that has pages of guest RAM pinned ends in the guest's current pages, whatever an actuator does to
//! them during the transfer. The disk is a file system of this test's own, which answers on request
//! ([`wideleaf_testing::slow_disk`]). While a transfer is under way, each actuator of `memory` is asked to work
//! on its pages. Needs root and `/dev/fuse`.
//!
//! ```text
//!   transfer   preadv into pages 8 to 23: pinned ─────────────────────────▶ answered ─▶ are the bytes in guest RAM?
//!   actuator                              release, swap, collapse, split, … ─▶ refused, or without these pages
//! ```

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vm_memory::{GuestAddress, GuestMemoryBackend as _};
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::release::release_window;
use wideleaf_memory::actuators::split::split_window;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::detached::{WindowMover, probe};
use wideleaf_memory::second_level::{SecondLevel, SecondLevelError};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, Paging};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Bytes, Gpa, GpaRange, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};
use wideleaf_testing::slow_disk::{SlowDisk, is_mounted};
use wideleaf_testing::{Need, has_kvm, is_there};
use wideleaf_vmm::devices::virtio::block::{DiskImage, DiskOptions};
use wideleaf_vmm::dma::DeviceMemory;
use wideleaf_vmm::kvm::second_level::KvmSecondLevel;
use wideleaf_vmm::kvm::{GuestMemory, KvmSystem, Vm};
use wideleaf_vmm::run_loop::{OnReset, RunControl};

const WINDOW: WindowIndex = WindowIndex::new(0);
const WORDS_PER_PAGE: usize = 512;
/// Pages that the transfer fills.
const FILLED: std::ops::Range<usize> = 8..24;
const FILLED_BYTES: usize = 16 * 4096;
/// A page in use, and one that is present and zero.
const IN_USE: usize = 0;
const ZERO: usize = 100;

/// RAM of one window, and a disk that transfers into it.
struct Site {
    disk: SlowDisk,
    image: DiskImage,
    ram: Arc<GuestRam>,
    devices: DeviceMemory,
    host: Arc<LinuxHost>,
}

impl Site {
    /// Creates a site; `None` if the test is to be skipped.
    fn new(kind: BackingKind) -> Option<Site> {
        let disk = SlowDisk::mount(FILLED_BYTES, Duration::ZERO)?;
        disk.set_bytes(&[0xaa; FILLED_BYTES]);
        let image = DiskImage::open(&DiskOptions { path: disk.path(), ..DiskOptions::default() }).unwrap();
        let layout = [GpaRange::new(Gpa::new(0), mib(2)).unwrap()];
        let ram = GuestRam::map(&layout, BackingConfig::new(kind, PageSize::Base4K).unwrap()).unwrap();
        let devices = DeviceMemory::new(Arc::new(GuestMemory::new(ram.clone()).unwrap()));
        Some(Site { disk, image, ram, devices, host: Arc::new(LinuxHost::open().unwrap()) })
    }

    /// Creates a site if pages can be moved.
    fn with_moves() -> Option<(Site, WindowMover)> {
        let site = Site::new(BackingKind::Anon).filter(|_| is_there(Need::UffdMove, probe().map(drop)))?;
        let mover = WindowMover::start(site.host.clone(), site.ram.clone()).unwrap();
        Some((site, mover))
    }

    fn words(&self) -> &[AtomicU64] {
        self.ram.words(self.ram.ranges()[0])
    }

    fn write(&self, page: usize, value: u64) {
        self.words()[page * WORDS_PER_PAGE].store(value, Ordering::Relaxed);
    }

    /// Makes all pages of the window present, and zero except for one.
    fn populate(&self) {
        prefault(self.host.as_ref(), self.ram.ranges(), 1, &|_| ControlFlow::Continue(())).unwrap();
        self.write(IN_USE, 1);
    }

    /// Reads the disk into the pages, past the gate, like a device of another process.
    fn read_past_the_gate(&self) {
        let view = self.devices.memory().view();
        let pieces = [view.get_slice(GuestAddress(FILLED.start as u64 * 4096), FILLED_BYTES).unwrap()];
        assert_eq!(self.image.read_at(&pieces, 0).unwrap(), FILLED_BYTES);
    }

    /// Reads the disk into the pages inside the gate, like a device of this process.
    fn read_inside_the_gate(&self) {
        let access = self.devices.access();
        let pieces = [access.get_slice(GuestAddress(FILLED.start as u64 * 4096), FILLED_BYTES).unwrap()];
        assert_eq!(self.image.read_at(&pieces, 0).unwrap(), FILLED_BYTES);
    }

    /// Runs `act` while a transfer has the pages pinned.
    fn during<R>(&self, transfer: impl FnOnce() + Send, act: impl FnOnce() -> R) -> R {
        std::thread::scope(|scope| {
            let hold = self.disk.hold(); // ends before the scope waits, also when `act` panics
            let transfer = scope.spawn(transfer);
            self.disk.wait_for_a_transfer();
            let done = act();
            drop(hold);
            transfer.join().unwrap();
            done
        })
    }

    /// Number of pages that the transfer reported as filled, and that have other contents.
    fn lost(&self) -> usize {
        let is_lost = |page: &usize| {
            let words = &self.words()[page * WORDS_PER_PAGE..(page + 1) * WORDS_PER_PAGE];
            words.iter().any(|word| word.load(Ordering::Relaxed) != 0xaaaa_aaaa_aaaa_aaaa)
        };
        FILLED.filter(is_lost).count()
    }

    fn assert_nothing_is_lost(&self) {
        assert_eq!(self.lost(), 0, "of {} pages that preadv(2) said it had filled", FILLED.len());
        assert_eq!(self.words()[IN_USE * WORDS_PER_PAGE].load(Ordering::Relaxed), 1);
    }

    fn collapse(&self) -> OutcomeResult {
        // A page is busy while it is on its way to an LRU list.
        let attempt = || collapse_window(self.host.as_ref(), self.ram.ranges()[0], WINDOW).result;
        (0..50).map(|_| attempt()).find(|result| *result != busy()).unwrap_or(busy())
    }
}

fn busy() -> OutcomeResult {
    OutcomeResult::Refused(Refusal::Busy)
}

#[test]
fn a_pinned_page_is_not_released_and_its_neighbours_are() {
    let Some((site, mover)) = Site::with_moves() else { return };
    site.write(IN_USE, 1);
    site.write(ZERO, 0);
    let release = || release_window(mover.aside(), site.host.as_ref(), site.ram.ranges()[0], WINDOW);
    let released = site.during(|| site.read_past_the_gate(), release);
    assert_eq!(released.result, OutcomeResult::Done);
    assert_eq!((released.freed, released.unmoved), (kib(4), Bytes::new(FILLED_BYTES as u64)));
    site.assert_nothing_is_lost();
    assert_eq!(release().result, OutcomeResult::Skipped(Skip::AlreadyDone), "nothing of it is zero any more");
}

#[test]
fn a_window_with_zeroes_only_in_pinned_pages_is_busy() {
    let Some((site, mover)) = Site::with_moves() else { return };
    site.write(IN_USE, 1);
    let release = || release_window(mover.aside(), site.host.as_ref(), site.ram.ranges()[0], WINDOW);
    let released = site.during(|| site.read_past_the_gate(), release);
    assert_eq!((released.result, released.freed), (busy(), Bytes::ZERO));
    site.assert_nothing_is_lost();
}

#[test]
fn a_huge_page_of_which_a_part_is_pinned_is_neither_split_nor_released() {
    let Some((site, mover)) = Site::with_moves() else { return };
    site.populate();
    if site.collapse() != OutcomeResult::Done {
        return println!("skipped: this host has no huge page for the window");
    }
    let range = site.ram.ranges()[0];
    let (split, release) = site.during(
        || site.read_past_the_gate(),
        || {
            let split = split_window(site.host.as_ref(), BackingKind::Anon, range, WINDOW);
            (split, release_window(mover.aside(), site.host.as_ref(), range, WINDOW))
        },
    );
    assert!(matches!(split.result, OutcomeResult::Refused(_)), "{split:?}");
    assert!(matches!(release.result, OutcomeResult::Refused(_)), "{release:?}");
    assert_eq!((split.freed, release.freed), (Bytes::ZERO, Bytes::ZERO));
    site.assert_nothing_is_lost();
}

#[test]
fn a_window_of_which_a_page_is_pinned_is_not_swapped() {
    let Some((site, mover)) = Site::with_moves() else { return };
    site.populate();
    let mut swapper = Swapper::new(mover.aside().clone());
    let swap = site.during(|| site.read_past_the_gate(), || swapper.swap(site.host.as_ref(), WINDOW));
    assert!(matches!(swap.result, OutcomeResult::Refused(_)), "{swap:?}");
    site.assert_nothing_is_lost();
}

#[test]
fn a_window_of_which_a_page_is_pinned_is_not_vacated() {
    let Some((site, mover)) = Site::with_moves() else { return };
    site.populate();
    if site.collapse() != OutcomeResult::Done {
        return println!("skipped: this host has no huge page for the window");
    }
    let mut swapper = Swapper::new(mover.aside().clone());
    let vacate = site.during(|| site.read_past_the_gate(), || swapper.vacate(site.host.as_ref(), WINDOW));
    assert!(matches!(vacate.result, OutcomeResult::Refused(_)) && !swapper.has_vacated(), "{vacate:?}");
    site.assert_nothing_is_lost();
}

#[test]
fn a_window_of_which_a_page_is_pinned_is_not_taken_aside() {
    let Some((site, mover)) = Site::with_moves() else { return };
    site.populate();
    let aside = mover.aside();
    site.during(|| site.read_past_the_gate(), || assert!(aside.set_aside(WINDOW).is_err() && !aside.is_aside(WINDOW)));
    site.assert_nothing_is_lost();
}

#[test]
fn a_window_of_which_a_page_is_pinned_is_not_collapsed() {
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let Some(site) = Site::new(kind) else { return };
        site.populate();
        let collapsed = site.during(|| site.read_past_the_gate(), || site.collapse());
        assert!(matches!(collapsed, OutcomeResult::Refused(_)), "{kind:?}: {collapsed:?}");
        site.assert_nothing_is_lost();
    }
}

#[test]
fn what_a_guest_gives_to_its_balloon_goes_and_pinned_pages_beside_it_stay() {
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let Some(site) = Site::new(kind) else { return };
        site.populate();
        let balloon = GiveBack::new(site.host.clone(), site.ram.clone()).unwrap();
        let beside = (FILLED.end..512).map(|page| Gpa::new(page as u64 * 4096));
        site.during(|| site.read_past_the_gate(), || balloon.inflate(beside));
        assert_eq!(site.ram.given_back().counters().released, 512 - FILLED.end as u64, "{kind:?}");
        site.assert_nothing_is_lost();
    }
}

#[test]
fn a_guest_that_gives_away_pages_it_reads_into_loses_only_those() {
    let Some(site) = Site::new(BackingKind::Anon) else { return };
    site.populate();
    let balloon = GiveBack::new(site.host.clone(), site.ram.clone()).unwrap();
    let filled = || FILLED.map(|page| Gpa::new(page as u64 * 4096));
    site.during(|| site.read_past_the_gate(), || balloon.inflate(filled()));
    balloon.deflate(filled());
    assert_eq!(site.lost(), FILLED.len(), "the guest declared them unused");
    assert_eq!(site.words()[IN_USE * WORDS_PER_PAGE].load(Ordering::Relaxed), 1);
}

#[test]
fn a_pause_waits_for_a_transfer_and_none_begins_while_it_lasts() {
    let Some(site) = Site::new(BackingKind::Anon).filter(|_| has_kvm()) else { return };
    site.write(IN_USE, 1);
    let vm = Vm::create(&KvmSystem::open().unwrap(), site.ram.clone(), mib(2)).unwrap();
    let control = RunControl::new(Vec::new(), OnReset::Stop);
    let second_level = KvmSecondLevel::new(Paging::Shadow, vm, control, site.devices.clone());
    let slot = second_level.slots()[0].id;
    second_level.set_dirty_log(slot, true).unwrap();
    let refused = site.during(|| site.read_inside_the_gate(), || second_level.pause());
    assert!(matches!(refused, Err(SecondLevelError::DeviceBusy { .. })), "{refused:?}");
    site.assert_nothing_is_lost();
    let log = second_level.take_dirty_log(slot).unwrap();
    assert_eq!(log[0], 0xff_ff00, "pages 8 to 23, and no other, were written by the device");

    second_level.pause().unwrap();
    let before = site.disk.transfers();
    std::thread::scope(|scope| {
        scope.spawn(|| site.read_inside_the_gate());
        std::thread::sleep(Duration::from_millis(20));
        let during = site.disk.transfers();
        second_level.resume().unwrap(); // before anything is asserted: the transfer would wait for ever
        assert_eq!(during, before, "no transfer while it is paused");
    });
    assert_eq!(site.disk.transfers(), (before.0 + 1, before.1));
}

#[test]
fn a_disk_that_is_dropped_during_a_transfer_fails_it_and_is_gone() {
    let Some(disk) = SlowDisk::mount(FILLED_BYTES, Duration::ZERO) else { return };
    let path = disk.path();
    let folder = path.parent().unwrap().to_owned();
    assert!(is_mounted(&folder));
    let hold = disk.hold();
    let reader = std::thread::spawn(move || std::fs::read(path));
    disk.wait_for_a_transfer();
    std::mem::forget(hold); // as a test that panics elsewhere would leave it
    drop(disk);
    assert!(reader.join().unwrap().is_err());
    assert!(!is_mounted(&folder) && !folder.exists());
}
