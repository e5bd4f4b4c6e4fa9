//! `auto` on a host that is short of memory, on the running kernel: sparse windows in use lose their zero pages, cold
//! ones become base pages, and dense ones in use stay huge, while threads read and write and no word is lost. If
//! windows cannot be moved or huge pages are short, this test is skipped with the reason; `WIDELEAF_REQUIRE=uffd_move`
//! turns the former into a failure.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::{moves, steady_backing};
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::explain::WhyNot;
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_memory::{GuestRam, LinuxHost};
use wideleaf_policies::policy::KeptSmall;
use wideleaf_policies::units::mib;
use wideleaf_policies::{
    Backing, Gpa, GpaRange, OutcomeResult, PageSize, PerTenThousand, PolicyChoice, VmId, WindowIndex,
};

const WORDS_PER_PAGE: usize = 512;
const WORDS_PER_WINDOW: usize = 512 * WORDS_PER_PAGE;
/// Pages in use of a sparse window: every 32nd.
const SPARSE: usize = 32;

/// Windows by their use. Sparse ones have 16 pages in use.
const SPARSE_IN_USE: Range<u64> = 0..2;
const DENSE_IN_USE: Range<u64> = 2..4;
const DENSE_COLD: Range<u64> = 4..6;
const SPARSE_COLD: Range<u64> = 6..8;

struct Bed {
    host: Arc<LinuxHost>,
    ram: Arc<GuestRam>,
}

impl Bed {
    /// Huge windows; each page in use has its number in its first word.
    fn new() -> Option<Bed> {
        if moves::are_missing() {
            return None;
        }
        let range = GpaRange::new(Gpa::new(0), mib(2) * SPARSE_COLD.end).unwrap();
        let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap());
        let bed = Bed { host: Arc::new(LinuxHost::open().unwrap()), ram: ram.unwrap() };
        bed.pages_in_use(0..SPARSE_COLD.end)
            .for_each(|page| bed.word_of(page).store(page as u64 + 1, Ordering::Relaxed));
        let mut is_huge = |window| {
            let range = bed.ram.ranges()[0];
            collapse_window(bed.host.as_ref(), range, WindowIndex::new(window)).result == OutcomeResult::Done
        };
        if !(0..SPARSE_COLD.end).all(&mut is_huge) {
            println!("skipped: too few huge pages");
            return None;
        }
        Some(bed)
    }

    fn pages_in_use(&self, windows: Range<u64>) -> impl Iterator<Item = usize> + use<> {
        windows.flat_map(|window| {
            let is_sparse = SPARSE_IN_USE.contains(&window) || SPARSE_COLD.contains(&window);
            (0..512).step_by(if is_sparse { SPARSE } else { 1 }).map(move |page| window as usize * 512 + page)
        })
    }

    fn word_of(&self, page: usize) -> &AtomicU64 {
        &self.ram.words(self.ram.ranges()[0])[page * WORDS_PER_PAGE]
    }

    fn backing(&self, window: u64) -> (u16, Backing) {
        steady_backing(self.host.as_ref(), self.ram.ranges()[0], None, WindowIndex::new(window))
    }

    fn is_each(&self, mut windows: Range<u64>, backing: Backing) -> bool {
        windows.all(|window| self.backing(window).1 == backing)
    }

    /// Adds one to the first word of each page in use of these windows, pass after pass. Returns the number of passes.
    fn use_all(&self, windows: Range<u64>, is_over: &AtomicBool) -> u64 {
        let mut passes = 0;
        while !is_over.load(Ordering::Relaxed) {
            for page in self.pages_in_use(windows.clone()) {
                let found = self.word_of(page).fetch_add(1, Ordering::Relaxed);
                assert_eq!(found, page as u64 + 1 + passes, "page {page} after {passes} passes");
            }
            passes += 1;
        }
        passes
    }

    fn assert_no_word_is_lost(&self, passes: u64) {
        for page in 0..SPARSE_COLD.end as usize * 512 {
            let is_in_use = self.pages_in_use(0..SPARSE_COLD.end).any(|used| used == page);
            let added = if (page as u64) < DENSE_IN_USE.end * 512 { passes } else { 0 };
            let expected = if is_in_use { page as u64 + 1 + added } else { 0 };
            assert_eq!(self.word_of(page).load(Ordering::Relaxed), expected, "page {page}");
        }
        assert_eq!(self.ram.words(self.ram.ranges()[0]).len(), SPARSE_COLD.end as usize * WORDS_PER_WINDOW);
    }
}

/// `auto`, for which this host is always short of memory, with sensors that are not limited. The guest has KVM's
/// counters, so that a demotion could hold its whole memslot; its page tables are not known.
fn short_of_memory(bed: &Bed) -> ManagerLoop {
    let policy = PolicyChoice::parse("auto:short_from=1,short_to=0").unwrap().make();
    let kvm = FakeSecondLevel::new(&[bed.ram.ranges()[0].gpa]);
    kvm.set_paging_modes(&[]);
    let vm = ManagedVm::new(VmId(0), bed.ram.clone(), Some(Arc::new(kvm)));
    let config = ManagerConfig { sampling: PerTenThousand::ALL, ..ManagerConfig::default() };
    ManagerLoop::new(bed.host.clone(), vec![vm], policy, config)
}

#[test]
fn sparse_and_cold_windows_are_given_up_and_dense_ones_in_use_stay_huge() {
    let Some(bed) = Bed::new() else { return };
    let (mut manager, is_over) = (short_of_memory(&bed), AtomicBool::new(false));
    let passes = std::thread::scope(|scope| {
        let guest = scope.spawn(|| bed.use_all(SPARSE_IN_USE.start..DENSE_IN_USE.end, &is_over));
        let deadline = Instant::now() + Duration::from_secs(120);
        let is_given_up = |window| !DENSE_IN_USE.contains(&window);
        // As of the tick's own look: a window that is aside for a sample afterwards looks unbacked.
        let is_done = |manager: &ManagerLoop| {
            let backing = &manager.live().snapshot.vms[0].backing;
            (0..8).filter(|window| is_given_up(*window)).all(|window| backing[window as usize] == Backing::Base4K)
        };
        manager.tick();
        while !is_done(&manager) && Instant::now() < deadline && !guest.is_finished() {
            manager.tick();
            std::thread::sleep(Duration::from_millis(5));
        }
        is_over.store(true, Ordering::Relaxed);
        guest.join().unwrap()
    });
    let live = manager.live();
    let report = manager.finish();
    println!("{:?}\n{:?}", report.outcomes, report.policy_figures);
    let resident: Vec<_> = (0..8).map(|window| bed.backing(window)).collect();
    bed.assert_no_word_is_lost(passes);
    for window in SPARSE_IN_USE.chain(SPARSE_COLD) {
        assert!(resident[window as usize].0 <= 16, "window {window} keeps no zero page: {resident:?}");
    }
    assert!(bed.is_each(DENSE_IN_USE, Backing::Huge2M), "{resident:?}");
    assert!(bed.is_each(DENSE_COLD, Backing::Base4K), "{resident:?}");
    let figure = |name| report.policy_figures.iter().find(|(known, _)| *known == name).unwrap().1;
    let done = (report.done("release"), report.done("split"));
    // A sparse window that is known to be cold before its zero pages are counted is demoted, which frees them too.
    assert!(done.0 >= 2 && done.1 >= 2 && done.0 + done.1 == 6, "{:?}", report.outcomes);
    assert_eq!((figure("released"), figure("demoted")), done);
    assert!(figure("split_in_use") >= 2);
    let why = |why| live.vms[0].why_not.get(&WhyNot::KeptSmall(why)).copied();
    assert_eq!((why(KeptSmall::ZeroPages), why(KeptSmall::Cold)), (Some(done.0), Some(done.1)));
}
