//! Memory that a guest gives back, on the running kernel: resident memory falls, a huge page stays whole if only a
//! part is given back, all other memory keeps its contents, and memory that was given back is not taken again.
//! Tests that the host cannot run are skipped with a reason.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::{collapse_in_some_attempts, steady_backing, tick_until};
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::actuators::split::split_window;
use wideleaf_memory::host::Host;
use wideleaf_memory::manager::{ManagedVm, ManagerLoop};
use wideleaf_memory::sensors::smaps::resident_memory;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, ManagerConfig};
use wideleaf_policies::units::{gib, kib, mib};
use wideleaf_policies::{
    Backing, Bytes, GivenBackRules, Gpa, GpaRange, OutcomeResult, PageSize, VmId, WindowIndex, policy,
};

const WINDOWS: u64 = 8;
const PAGES: u64 = WINDOWS * 512;
const WORDS_PER_PAGE: usize = 512;

struct Guest {
    host: Arc<LinuxHost>,
    ram: Arc<GuestRam>,
    give_back: GiveBack,
}

/// Guest RAM without a page.
fn empty(kind: BackingKind) -> Guest {
    let host = Arc::new(LinuxHost::open().unwrap());
    let range = GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(kind, PageSize::Base4K).unwrap()).unwrap();
    Guest { give_back: GiveBack::new(host.clone(), ram.clone()).unwrap(), host, ram }
}

/// Guest RAM with its page number plus one in every page.
fn guest(kind: BackingKind) -> Guest {
    let guest = empty(kind);
    prefault(&*guest.host, guest.ram.ranges(), 1, &|_| ControlFlow::Continue(())).unwrap();
    (0..PAGES).for_each(|page| guest.write(page, page + 1));
    guest
}

fn gpa(page: u64) -> Gpa {
    Gpa::new(0) + kib(4) * page
}

impl Guest {
    fn write(&self, page: u64, word: u64) {
        self.ram.words(self.ram.ranges()[0])[page as usize * WORDS_PER_PAGE].store(word, Ordering::Relaxed);
    }

    fn read(&self, page: u64) -> u64 {
        self.ram.words(self.ram.ranges()[0])[page as usize * WORDS_PER_PAGE].load(Ordering::Relaxed)
    }

    fn backing(&self, window: u64) -> (u16, Backing) {
        steady_backing(&*self.host, self.ram.ranges()[0], None, WindowIndex::new(window))
    }

    fn resident(&self) -> Bytes {
        let smaps = self.host.read_text("/proc/self/smaps").unwrap();
        resident_memory(&smaps, &[(self.ram.base(), self.ram.bytes())]).unwrap().guest_ram
    }

    /// Makes windows huge; prints a reason and returns `false` if this host has no huge page for them.
    fn make_huge(&self, windows: std::ops::Range<u64>) -> bool {
        for window in windows {
            let collapse = collapse_in_some_attempts(&*self.host, self.ram.ranges()[0], window).result;
            if collapse != OutcomeResult::Done {
                eprintln!("skipped: no huge page is available here: {collapse:?}");
                return false;
            }
        }
        true
    }

    fn assert_untouched(&self, pages: impl IntoIterator<Item = u64>) {
        pages.into_iter().for_each(|page| assert_eq!(self.read(page), page + 1, "page {page}"));
    }
}

#[test]
fn base_pages_that_are_inflated_leave_memory_and_the_others_keep_what_they_hold() {
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let guest = guest(kind);
        // Under `shmem_enabled=always` a memfd starts huge.
        if guest.backing(0).1 != Backing::Base4K {
            eprintln!("skipped: {kind:?} does not start on base pages here");
            continue;
        }
        let before = guest.resident();
        guest.give_back.inflate((0..PAGES).step_by(2).map(gpa));
        assert_eq!(before - guest.resident(), kib(4) * (PAGES / 2), "{kind:?}");
        guest.assert_untouched((1..PAGES).step_by(2));
        guest.give_back.deflate((0..PAGES).step_by(2).map(gpa));
        (0..PAGES).step_by(2).for_each(|page| assert_eq!(guest.read(page), 0));
        guest.write(6, 7);
        assert_eq!(guest.read(6), 7);
        let counters = guest.ram.given_back().counters();
        assert_eq!((counters.inflated, counters.released, counters.deflated), (PAGES / 2, PAGES / 2, PAGES / 2));
        assert_eq!((counters.inflated_now, counters.kept_now, counters.kept), (0, 0, 0));
    }
}

#[test]
fn a_huge_page_stays_whole_until_all_of_its_window_is_given_back() {
    let guest = guest(BackingKind::Anon);
    if !guest.make_huge(0..WINDOWS) {
        return;
    }
    // One page of each window: no huge page is broken for it.
    guest.give_back.inflate((0..WINDOWS).map(|window| gpa(window * 512 + 7)));
    for window in 0..WINDOWS {
        assert_eq!(guest.backing(window), (512, Backing::Huge2M), "window {window}");
    }
    assert_eq!(guest.ram.given_back().counters().kept_now, WINDOWS);
    // The rest of window 3 follows, in two parts.
    guest.give_back.inflate((3 * 512..3 * 512 + 256).map(gpa));
    assert_eq!(guest.backing(3), (512, Backing::Huge2M));
    guest.give_back.inflate((3 * 512 + 256..4 * 512).map(gpa));
    assert_eq!(guest.backing(3), (0, Backing::Unbacked));
    assert_eq!(guest.ram.given_back().counters().inflated_twice, 1);
    // A page that was kept and is taken back has its old contents.
    guest.give_back.deflate([gpa(7)]);
    guest.assert_untouched((0..3 * 512).chain(4 * 512..PAGES));
}

#[test]
fn a_host_short_of_memory_splits_kept_huge_pages_and_gets_their_given_pages() {
    let guest = guest(BackingKind::Anon);
    if !guest.make_huge(0..2) {
        return;
    }
    guest.give_back.inflate((0..100).chain(512..512 + 63).map(gpa));
    assert_eq!((guest.backing(0).1, guest.backing(1).1), (Backing::Huge2M, Backing::Huge2M));
    guest.ram.given_back().set_short(true);
    assert_eq!(guest.give_back.look_again(WindowIndex::new(0), 64), None);
    assert_eq!(guest.backing(0), (412, Backing::Base4K));
    assert_eq!(guest.backing(1), (512, Backing::Huge2M), "63 pages are fewer than a split is worth");
    assert_eq!(guest.ram.given_back().counters().split_windows, 1);
    guest.assert_untouched((100..512).chain(512 + 63..PAGES));
}

/// A few ticks of a manager that promotes nothing.
fn tick(guest: &Guest) {
    let vm = ManagedVm::new(VmId(0), guest.ram.clone(), None);
    let never = policy::by_name("never").unwrap().with_defaults();
    let mut work = ManagerLoop::new(guest.host.clone(), vec![vm], never, ManagerConfig::default());
    for _ in 0..3 {
        work.tick();
    }
}

#[test]
fn kept_pages_go_once_another_part_has_split_their_huge_page() {
    let guest = guest(BackingKind::Anon);
    if !guest.make_huge(0..1) {
        return;
    }
    guest.give_back.inflate((0..10).map(gpa));
    tick(&guest);
    assert_eq!(guest.backing(0), (512, Backing::Huge2M), "no huge page is split for them");
    let split = split_window(&*guest.host, BackingKind::Anon, guest.ram.ranges()[0], WindowIndex::new(0));
    assert_eq!(split.result, OutcomeResult::Done);
    tick(&guest);
    assert_eq!(guest.backing(0), (502, Backing::Base4K));
    assert_eq!(guest.ram.given_back().counters().kept_now, 0);
    guest.assert_untouched(10..PAGES);
}

#[test]
fn the_balloon_of_a_restored_guest_goes_later() {
    let guest = empty(BackingKind::Anon);
    (512..1024).for_each(|page| guest.write(page, page + 1));
    if guest.backing(1).1 != Backing::Base4K {
        return eprintln!("skipped: memory starts on huge pages here");
    }
    // All of window 0, which has no page, and 10 pages of window 1.
    guest.give_back.inflate_restored([GpaRange::new(gpa(0), kib(4) * 522).unwrap()]);
    assert_eq!(guest.backing(1).0, 512, "nothing is released at once");
    tick(&guest);
    assert_eq!([guest.backing(0), guest.backing(1)], [(0, Backing::Unbacked), (502, Backing::Base4K)]);
    let counters = guest.ram.given_back().counters();
    assert_eq!((counters.inflated_now, counters.kept_now), (522, 0));
    guest.assert_untouched(522..1024);
}

#[test]
fn reported_memory_goes_only_with_a_whole_window_and_a_page_in_use_is_not_recorded() {
    let guest = guest(BackingKind::Anon);
    if !guest.make_huge(0..4) {
        return;
    }
    // [1M------------------7M): half of window 0, windows 1 and 2, half of window 3.
    guest.give_back.report(GpaRange::new(Gpa::new(0) + mib(1), mib(6)).unwrap());
    let backing = [0, 1, 2, 3].map(|window| guest.backing(window));
    let (whole, gone) = ((512, Backing::Huge2M), (0, Backing::Unbacked));
    assert_eq!(backing, [whole, gone, gone, whole]);
    let book = |window| guest.ram.given_back().book().count(WindowIndex::new(window));
    assert_eq!([0, 1, 2, 3].map(book), [0, 512, 512, 0], "kept pages were free then, and are unknown now");
    guest.assert_untouched((0..512).chain(3 * 512..PAGES));
}

#[test]
fn the_manager_takes_no_memory_again_until_the_guest_uses_it() {
    let guest = guest(BackingKind::Anon);
    guest.give_back.inflate((0..10).map(gpa));
    guest.give_back.report(GpaRange::new(gpa(512), kib(40)).unwrap());
    let vm = ManagedVm::new(VmId(0), guest.ram.clone(), None);
    let greedy = policy::by_name("greedy").unwrap().with_defaults();
    let mut work = ManagerLoop::new(guest.host.clone(), vec![vm], greedy, ManagerConfig::default());
    let given_back = |work: &ManagerLoop| work.live().snapshot.vms[0].given_back[..3].to_vec();
    if !tick_until(&mut work, |_| guest.backing(2).1 == Backing::Huge2M) {
        return eprintln!("skipped: no huge page is available here: {:?}", work.report().outcomes);
    }
    assert_eq!(given_back(&work), [10, 10, 0]);
    assert_eq!([guest.backing(0), guest.backing(1)], [(502, Backing::Base4K); 2]);
    // The guest takes one window from the balloon, and uses its reported pages of the other.
    guest.give_back.deflate((0..10).map(gpa));
    (512..522).for_each(|page| guest.write(page, page + 1));
    let are_huge = |_: &ManagerLoop| [guest.backing(0), guest.backing(1)] == [(512, Backing::Huge2M); 2];
    assert!(tick_until(&mut work, are_huge), "{:?}, {:?}", given_back(&work), work.report().outcomes);
    assert_eq!(given_back(&work), [0, 0, 0]);
    guest.assert_untouched(10..PAGES);
}

#[test]
fn a_tolerated_window_is_promoted() {
    let guest = guest(BackingKind::Anon);
    guest.give_back.inflate((0..10).chain(512..523).map(gpa));
    let vm = ManagedVm::new(VmId(0), guest.ram.clone(), None);
    let greedy = policy::by_name("greedy").unwrap().with_defaults();
    let given_back = GivenBackRules { tolerated: 10, ..GivenBackRules::default() };
    let config = ManagerConfig { given_back, ..ManagerConfig::default() };
    let mut work = ManagerLoop::new(guest.host.clone(), vec![vm], greedy, config);
    if !tick_until(&mut work, |_| guest.backing(2).1 == Backing::Huge2M) {
        return eprintln!("skipped: no huge page is available here: {:?}", work.report().outcomes);
    }
    assert!(tick_until(&mut work, |_| guest.backing(0).1 == Backing::Huge2M), "{:?}", work.report().outcomes);
    assert_eq!(guest.backing(1).1, Backing::Base4K);
}

#[test]
fn addresses_outside_ram_are_counted_and_have_no_effect() {
    let guest = guest(BackingKind::Anon);
    let beyond = [gpa(PAGES), Gpa::new(u64::MAX - 4095), Gpa::new(0) + gib(64)];
    guest.give_back.inflate(beyond);
    guest.give_back.deflate(beyond);
    guest.give_back.deflate([gpa(3)]);
    guest.give_back.report(GpaRange::new(gpa(PAGES), gib(1 << 20)).unwrap());
    let counters = guest.ram.given_back().counters();
    assert_eq!((counters.outside_ram, counters.deflated_absent, counters.released), (6 + (1 << 38), 1, 0));
    assert!(guest.ram.given_back().book().is_empty());
    guest.assert_untouched(0..PAGES);
}

#[test]
fn a_window_with_another_claim_is_released_when_the_claim_ends() {
    let guest = guest(BackingKind::Anon);
    let claim = guest.ram.claims().giant(Gpa::new(0)).unwrap();
    guest.give_back.inflate((0..512).map(gpa));
    guest.give_back.report(GpaRange::new(gpa(512), mib(2)).unwrap());
    assert_eq!((guest.backing(0).0, guest.backing(1).0), (512, 512));
    drop(claim);
    guest.give_back.look_again(WindowIndex::new(0), 64);
    assert_eq!((guest.backing(0).0, guest.backing(1).0), (0, 512), "reported memory is not released later");
    guest.assert_untouched(512..PAGES);
}

#[test]
fn pages_that_stay_count_as_kept_once_however_often_they_are_looked_at() {
    let guest = guest(BackingKind::Memfd);
    if !guest.make_huge(0..1) {
        return;
    }
    guest.give_back.inflate((0..64).map(gpa));
    guest.ram.given_back().set_short(true);
    let claim = guest.ram.claims().window_aside(WindowIndex::new(1)).unwrap();
    guest.give_back.inflate([gpa(512)]);
    for _ in 0..3 {
        guest.give_back.look_again(WindowIndex::new(0), 64);
    }
    let counters = guest.ram.given_back().counters();
    assert_eq!((counters.kept, counters.kept_now, counters.busy), (65, 65, 4));
    drop(claim);
    assert_eq!(guest.backing(0), (512, Backing::Huge2M), "memory of a file is not split");
}

#[test]
fn a_window_aside_keeps_its_inflated_pages_until_it_is_back() {
    let guest = guest(BackingKind::Anon);
    let aside = guest.ram.claims().window_aside(WindowIndex::new(0)).unwrap();
    guest.give_back.inflate((0..10).map(gpa));
    guest.give_back.report(GpaRange::new(gpa(20), kib(40)).unwrap());
    assert_eq!(guest.backing(0).0, 512);
    let counters = guest.ram.given_back().counters();
    // 10 inflated ones and 10 reported ones.
    assert_eq!((counters.busy, counters.kept, counters.released), (2, 20, 0));
    drop(aside);
    guest.give_back.look_again(WindowIndex::new(0), 64);
    assert_eq!(guest.backing(0).0, 502, "only the balloon's pages may still be released");
    guest.assert_untouched(10..PAGES);
}

#[test]
fn an_empty_balloon_is_released_no_more() {
    let guest = guest(BackingKind::Anon);
    if !guest.make_huge(0..1) {
        return;
    }
    guest.give_back.inflate((0..511).map(gpa));
    guest.ram.given_back().book().forget_inflated();
    guest.ram.given_back().set_short(true);
    guest.give_back.look_again(WindowIndex::new(0), 64);
    guest.give_back.inflate([gpa(511)]);
    assert_eq!(guest.backing(0), (512, Backing::Huge2M));
    guest.assert_untouched(0..511);
}
