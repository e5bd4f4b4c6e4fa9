//! Windows trade their huge pages on the running kernel: the frames of cold windows are behind hot ones afterwards, and
//! no word is lost, also while threads read and write both. If windows cannot be moved or huge pages are short, these
//! tests are skipped with the reason; `WIDELEAF_REQUIRE=uffd_move` turns the former into a failure.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{moves, steady_backing, tick_until};
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::swap::Swapper;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::detached::WindowMover;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::{GuestRam, LinuxHost};
use wideleaf_policies::policy::{Needs, Policy};
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Action, Backing, Budget, Cost, Gpa, GpaRange, Moment, OutcomeResult, PageSize, Plan, Snapshot, VmId, VmSnapshot,
    WindowIndex,
};

const VM: VmId = VmId(0);
const WORDS_PER_WINDOW: usize = 2 << 20 >> 3;

/// Trades in both directions: of each pair, the window on a huge page is vacated and the other one promoted.
struct Trader {
    pairs: u64,
}

impl Policy for Trader {
    fn name(&self) -> &'static str {
        "trader"
    }

    /// With this sensor, windows are moved; but it samples none of them.
    fn needs(&self) -> Needs {
        Needs { access: true, ..Needs::default() }
    }

    fn uses_access(&self, _: &VmSnapshot, _: usize) -> bool {
        false
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, _: &mut Budget, plan: &mut Plan) {
        let vm = &snapshot.vms[0];
        let row = |window| vm.row(WindowIndex::new(window)).unwrap();
        for pair in 0..self.pairs {
            let pair = [row(pair), row(pair + self.pairs)];
            let of = |backing| pair.into_iter().find(|row| vm.backing[*row] == backing && vm.ready_at[*row] <= now);
            if let (Some(huge), Some(small)) = (of(Backing::Huge2M), of(Backing::Base4K)) {
                plan.push(Action::Vacate { vm: VM, window: vm.windows[huge] }, Cost::default());
                let promote = Action::Promote { vm: VM, window: vm.windows[small], to: PageSize::Huge2M };
                plan.push(promote, Cost::default());
            }
        }
    }
}

/// As many cold windows on huge pages as hot ones on base pages behind them, with a value in each word.
struct Bed {
    host: Arc<LinuxHost>,
    ram: Arc<GuestRam>,
    pairs: u64,
}

impl Bed {
    /// `None`, with the reason printed, where this machine cannot trade.
    fn new(pairs: u64) -> Option<Bed> {
        if moves::are_missing() {
            return None;
        }
        let range = GpaRange::new(Gpa::new(0), mib(2) * (2 * pairs)).unwrap();
        let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
        let bed = Bed { host: Arc::new(LinuxHost::open().unwrap()), ram, pairs };
        bed.words().iter().enumerate().for_each(|(index, word)| word.store(value(index, 0), Ordering::Relaxed));
        let mut is_huge = |window| {
            let range = bed.ram.ranges()[0];
            collapse_window(bed.host.as_ref(), range, WindowIndex::new(window)).result == OutcomeResult::Done
        };
        if !(0..pairs).all(&mut is_huge) || !bed.can_swap() {
            println!("skipped: too few huge pages, or the kernel keeps empty page tables (before Linux 6.14)");
            return None;
        }
        Some(bed)
    }

    /// Whether a huge page arrives whole: tried with a window of its own.
    fn can_swap(&self) -> bool {
        let range = GpaRange::new(Gpa::new(0), mib(2)).unwrap();
        let ram = GuestRam::map(&[range], self.ram.backing()).unwrap();
        ram.words(ram.ranges()[0])[0].store(1, Ordering::Relaxed);
        let mover = WindowMover::start(self.host.clone(), ram).unwrap();
        let swap = Swapper::new(mover.aside().clone()).swap(self.host.as_ref(), WindowIndex::new(0));
        swap.result == OutcomeResult::Done
    }

    fn words(&self) -> &[AtomicU64] {
        self.ram.words(self.ram.ranges()[0])
    }

    fn manager(&self, copy_threads: u16) -> ManagerLoop {
        let vm = ManagedVm::new(VM, self.ram.clone(), None);
        let config = ManagerConfig { copy_threads, ..ManagerConfig::default() };
        ManagerLoop::new(self.host.clone(), vec![vm], Box::new(Trader { pairs: self.pairs }), config)
    }

    fn backing(&self, window: u64) -> (u16, Backing) {
        steady_backing(self.host.as_ref(), self.ram.ranges()[0], None, WindowIndex::new(window))
    }

    /// Number of the first frame of each of these windows, or 0 without the privilege to know it
    /// (`CAP_SYS_ADMIN`, Documentation/admin-guide/mm/pagemap.rst).
    fn frames(&self, windows: std::ops::Range<u64>) -> Vec<u64> {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let frame = |window| {
            let address = self.ram.ranges()[0].hva + mib(2) * window;
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, address.get() / 4096 * 8).unwrap();
            u64::from_le_bytes(entry) & ((1 << 55) - 1)
        };
        windows.map(frame).collect()
    }
}

/// The value of a word in a generation; never zero.
fn value(index: usize, generation: u64) -> u64 {
    ((generation << 40) | (index as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Numbers of huge pages that the machine made and split so far.
fn machine_s_huge_pages() -> String {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap();
    let names = ["thp_fault_alloc ", "thp_collapse_alloc ", "thp_split_page "];
    text.lines().filter(|line| names.iter().any(|name| line.starts_with(name))).collect::<Vec<_>>().join(", ")
}

#[test]
fn the_frames_of_64_cold_windows_are_behind_64_hot_ones_and_no_huge_page_is_made_or_split() {
    const PAIRS: u64 = 64;
    let Some(bed) = Bed::new(PAIRS) else { return };
    let mut manager = bed.manager(1);
    let before = (bed.frames(0..PAIRS), machine_s_huge_pages());
    manager.tick();
    let (frames, machine) = (bed.frames(PAIRS..2 * PAIRS), machine_s_huge_pages());
    println!("before: {}\nafter:  {machine}", before.1);
    let report = manager.report();
    assert_eq!((report.done("vacate"), report.done("swap")), (PAIRS, PAIRS), "{:?}", report.outcomes);
    assert!((0..PAIRS).all(|window| bed.backing(window) == (512, Backing::Base4K)));
    assert!((PAIRS..2 * PAIRS).all(|window| bed.backing(window) == (512, Backing::Huge2M)));
    // A huge page that had been made or split would be at another frame. Without privilege, all numbers are 0.
    assert_eq!(frames, before.0);
    let wrong = bed.words().iter().enumerate().filter(|(index, word)| word.load(Ordering::Relaxed) != value(*index, 0));
    assert_eq!(wrong.count(), 0);
}

#[test]
fn base_pages_of_a_vacated_window_are_not_made_huge_by_the_next_touch() {
    let Some(bed) = Bed::new(1) else { return };
    bed.manager(1).tick();
    assert_eq!(bed.backing(0), (512, Backing::Base4K));
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", bed.ram.ranges()[0].hva.get());
    let mapping = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let flags = mapping.take(40).find(|line| line.starts_with("VmFlags:")).unwrap();
    assert!(flags.split(' ').any(|flag| flag == "nh"), "MADV_NOHUGEPAGE: {flags}");
}

/// Checks and rewrites its words, pass after pass, until it is over, and at least once.
fn write_and_check(words: &[AtomicU64], indices: std::ops::Range<usize>, is_over: &AtomicBool) {
    let mut generation = 0;
    while generation == 0 || !is_over.load(Ordering::Relaxed) {
        for index in indices.clone() {
            let found = words[index].swap(value(index, generation + 1), Ordering::Relaxed);
            assert_eq!(found, value(index, generation), "word {index} in generation {generation}");
        }
        generation += 1;
    }
}

#[test]
fn two_writers_lose_nothing_while_their_windows_trade_pages_back_and_forth() {
    const PAIRS: u64 = 16;
    const TICKS: u64 = 60;
    let Some(bed) = Bed::new(PAIRS) else { return };
    let cold_words = PAIRS as usize * WORDS_PER_WINDOW;
    let is_over = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        let writers = [0..cold_words, cold_words..2 * cold_words];
        let writers = writers.map(|indices| scope.spawn(|| write_and_check(bed.words(), indices, &is_over)));
        let mut manager = bed.manager(2);
        // A window of which a page is in use for an instant backs off, and further ticks trade it.
        let have_traded = tick_until(&mut manager, |manager| {
            let report = manager.report();
            report.ticks >= TICKS && report.done("vacate") >= PAIRS && report.done("swap") > 0
        });
        let report = manager.finish();
        is_over.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        assert!(have_traded, "{:?}", report.outcomes);
        report
    });
    println!("{:?}", report.outcomes);
    assert!((0..2 * PAIRS).all(|window| bed.backing(window).0 == 512));
    assert!(report.panics.is_empty(), "{:?}", report.panics);
}
