//! RAM that is saved while threads write it, give it back and touch it first: what was saved is what RAM had when they
//! stood still.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_memory::save::{BeyondBound, SaveError, SaveLimits, SaveReport, SaveSink, Saver};
use wideleaf_memory::second_level::{Paging, PagingMode, SecondLevelError, Slot, SlotId};
use wideleaf_memory::testing::fake_second_level::FakeSecondLevel;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, SecondLevel};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Bytes, Gpa, GpaRange, MappingStats, PageSet, PageSize, WindowIndex};

const WINDOWS: u64 = 8;
const PAGES: u64 = WINDOWS * 512;
const WORDS: usize = PAGES as usize * 512;
const WINDOW_WORDS: usize = 512 * 512;

/// A guest of threads: its writes are logged as KVM does, and it stands still during a pause.
struct Guest {
    ram: Arc<GuestRam>,
    host: Arc<LinuxHost>,
    give_back: GiveBack,
    log: FakeSecondLevel,
    /// Held for reading during a write and its entry in the log; the value says whether the guest is paused.
    gate: RwLock<bool>,
    keeps_log_on: bool,
}

/// Contents of the windows that were saved, in words.
#[derive(Default)]
struct Memory(Mutex<BTreeMap<u64, Vec<u64>>>);

impl SaveSink for Memory {
    fn write(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> io::Result<()> {
        let mut windows = self.0.lock();
        let words = windows.entry(window.get()).or_insert_with(|| vec![0; WINDOW_WORDS]);
        for run in pages.runs() {
            for word in usize::from(run.start) * 512..usize::from(run.end) * 512 {
                words[word] = u64::from_le_bytes(data[word * 8..][..8].try_into().unwrap());
            }
        }
        Ok(())
    }
}

impl Memory {
    /// All of RAM: windows that were not saved are zero.
    fn all(&self) -> Vec<u64> {
        let windows = self.0.lock();
        let zero = vec![0; WINDOW_WORDS];
        (0..WINDOWS).flat_map(|window| windows.get(&window).unwrap_or(&zero).clone()).collect()
    }
}

impl Guest {
    fn new(kind: BackingKind) -> Guest {
        let range = |start, bytes| GpaRange::new(Gpa::new(0) + start, bytes).unwrap();
        let backing = BackingConfig::new(kind, PageSize::Base4K).unwrap();
        let ram = GuestRam::map(&[range(Bytes::ZERO, mib(2) * WINDOWS)], backing).unwrap();
        let slots: Vec<GpaRange> = (0..WINDOWS / 2).map(|slot| range(mib(4) * slot, mib(4))).collect();
        let host = Arc::new(LinuxHost::open().unwrap());
        let give_back = GiveBack::new(host.clone(), ram.clone()).unwrap();
        let (log, gate) = (FakeSecondLevel::new(&slots), RwLock::new(false));
        Guest { ram, host, give_back, log, gate, keeps_log_on: false }
    }

    /// Runs `act` as a step of the guest, as soon as it is not paused.
    fn step(&self, act: impl FnOnce()) {
        let mut act = Some(act);
        while let Some(now) = act.take() {
            let is_paused = self.gate.read();
            if *is_paused {
                drop(is_paused);
                std::thread::yield_now();
                act = Some(now);
            } else {
                now();
            }
        }
    }

    fn write(&self, word: usize, value: u64) {
        self.step(|| {
            self.log.write(Gpa::new(word as u64 * 8));
            self.ram.words(self.ram.ranges()[0])[word].store(value, Ordering::Relaxed);
        });
    }

    fn report_free(&self, page: u64, pages: u64) {
        let range = GpaRange::new(Gpa::new(0) + kib(4) * page, kib(4) * pages).unwrap();
        self.step(|| self.give_back.report(range));
    }

    fn contents(&self) -> Vec<u64> {
        self.ram.words(self.ram.ranges()[0]).iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Saves, and returns what RAM had at the pause.
    fn save(&self, sink: &dyn SaveSink, limits: &SaveLimits) -> Result<(Vec<u64>, SaveReport), SaveError> {
        let saver = Saver { ram: &self.ram, host: &*self.host, second_level: self, sink };
        saver.save(limits, &AtomicBool::new(false), &|_| (), |last| {
            self.pause()?;
            let written = last.write(Duration::ZERO);
            let contents = self.contents();
            self.resume()?;
            written.map(|()| contents)
        })
    }

    /// A guest at work until `is_over`: writes anywhere, pages of zeroes, pages given back.
    fn work(&self, seed: u64, is_over: &AtomicBool, steps: &AtomicU64) {
        let mut random = fastrand_like(seed);
        while !is_over.load(Ordering::Relaxed) {
            let (page, value) = (random() % PAGES, random());
            match random() % 16 {
                0..10 => self.write((page * 512 + value % 512) as usize, value),
                10..15 => (0..512).for_each(|word| {
                    if self.ram.words(self.ram.ranges()[0])[page as usize * 512 + word].load(Ordering::Relaxed) != 0 {
                        self.write(page as usize * 512 + word, 0);
                    }
                }),
                _ => self.report_free(page, (value % 64 + 1).min(PAGES - page)),
            }
            steps.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A xorshift generator (Marsaglia, 2003): enough to mix places and values.
fn fastrand_like(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

impl SecondLevel for Guest {
    fn paging(&self) -> Paging {
        self.log.paging()
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        self.log.mapping_stats()
    }

    fn slots(&self) -> Vec<Slot> {
        self.log.slots()
    }

    fn set_dirty_log(&self, slot: SlotId, is_on: bool) -> Result<(), SecondLevelError> {
        if self.keeps_log_on && !is_on && slot == SlotId(1) {
            return Err(SecondLevelError::WrongState("this log stays on"));
        }
        let _alone = self.gate.write();
        self.log.set_dirty_log(slot, is_on)
    }

    /// As KVM: after it, the next write of a page is logged again. No write is between its entry and its bytes.
    fn take_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let _alone = self.gate.write();
        self.log.take_dirty_log(slot)
    }

    fn start_dirty_log_set(&self, slot: SlotId) -> Result<bool, SecondLevelError> {
        let _alone = self.gate.write();
        self.log.start_dirty_log_set(slot)
    }

    fn read_dirty_log(&self, slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        let _alone = self.gate.write();
        self.log.read_dirty_log(slot)
    }

    fn clear_dirty_log(&self, slot: SlotId, first_page: u64, pages: &[u64]) -> Result<(), SecondLevelError> {
        let _alone = self.gate.write();
        self.log.clear_dirty_log(slot, first_page, pages)
    }

    fn pause(&self) -> Result<(), SecondLevelError> {
        *self.gate.write() = true;
        Ok(())
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        *self.gate.write() = false;
        Ok(())
    }

    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        self.log.paging_modes()
    }
}

/// Saves a guest at work again and again.
fn save_while_it_works(guest: Guest, saves: usize) {
    let kind = guest.ram.backing().kind();
    let (is_over, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut pages = [0; 2];
    std::thread::scope(|scope| {
        (1..4).for_each(|seed| {
            let (guest, is_over, steps) = (&guest, &is_over, &steps);
            scope.spawn(move || guest.work(seed, is_over, steps));
        });
        for save in 0..saves {
            let before = steps.load(Ordering::Relaxed);
            while steps.load(Ordering::Relaxed) < before + 200 {
                std::thread::yield_now();
            }
            let threads = NonZeroUsize::new(1 + save % 3).unwrap();
            let limits =
                SaveLimits { threads, rounds_max: 4, beyond: BeyondBound::PauseLonger, ..SaveLimits::default() };
            let sink = Memory::default();
            let saved = guest.save(&sink, &limits);
            is_over.store(saved.is_err() || save + 1 == saves, Ordering::Relaxed);
            let (contents, report) = saved.unwrap();
            let wrong = contents.iter().zip(sink.all()).position(|(in_ram, saved)| *in_ram != saved);
            is_over.fetch_or(wrong.is_some(), Ordering::Relaxed);
            assert_eq!(wrong, None, "save {save}, {kind:?}: this word is not as it was; {report:?}");
            pages[0] += report.rounds.iter().map(|round| round.pages).sum::<u64>();
            pages[1] += report.last.pages;
        }
    });
    assert_eq!(guest.contents().len(), WORDS);
    assert!(pages[0] > 0 && pages[1] > 0, "pages were saved while the guest ran and in the pause: {pages:?}");
    assert!(guest.slots().iter().all(|slot| !slot.is_dirty_logged), "all logs are off");
}

/// Whether this kernel has what the saver needs; the reason to skip is printed.
fn can_scan() -> bool {
    let guest = Guest::new(BackingKind::Anon);
    let saved = guest.save(&Memory::default(), &SaveLimits::default());
    if let Err(SaveError::Host(error)) = &saved {
        println!("skipped: {error} (PAGEMAP_SCAN needs Linux 6.7)");
    }
    saved.is_ok()
}

#[test]
fn what_is_saved_of_anonymous_ram_is_what_it_had_at_the_pause() {
    if can_scan() {
        save_while_it_works(Guest::new(BackingKind::Anon), 30);
    }
}

#[test]
fn what_is_saved_of_a_memfd_is_what_it_had_at_the_pause() {
    if can_scan() {
        save_while_it_works(Guest::new(BackingKind::Memfd), 30);
    }
}

#[test]
fn what_is_saved_with_logs_that_begin_set_is_what_ram_had_at_the_pause() {
    if !can_scan() {
        return;
    }
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let guest = Guest::new(kind);
        guest.log.start_logs_set();
        save_while_it_works(guest, 30);
    }
}

#[test]
fn memory_that_was_never_touched_is_neither_read_nor_allocated() {
    if !can_scan() {
        return;
    }
    for kind in [BackingKind::Anon, BackingKind::Memfd] {
        let guest = Guest::new(kind);
        guest.write(3 * WINDOW_WORDS + 512, 7);
        let sink = Memory::default();
        let (contents, report) = guest.save(&sink, &SaveLimits::default()).unwrap();
        assert_eq!(report.rounds[0].windows, 1, "{kind:?}");
        assert!(report.rounds[0].pages <= 512, "{kind:?}");
        assert_eq!(sink.all(), contents);
    }
}

#[test]
fn a_log_that_stays_on_is_reported_and_the_next_save_uses_it() {
    if !can_scan() {
        return;
    }
    let guest = Guest { keeps_log_on: true, ..Guest::new(BackingKind::Anon) };
    for save in 1..3 {
        guest.write(save, 7);
        let sink = Memory::default();
        let (contents, report) = guest.save(&sink, &SaveLimits::default()).unwrap();
        assert_eq!((sink.all() == contents, report.logs_left_on), (true, u32::from(save == 1)));
        let logged: Vec<_> = guest.slots().iter().filter(|slot| slot.is_dirty_logged).map(|slot| slot.id.0).collect();
        assert_eq!(logged, [1]);
    }
}
