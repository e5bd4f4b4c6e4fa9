//! Every call of the kernel for a window fails once, or for good, on the running kernel.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::*;
use crate::backing::BackingConfig;
use crate::numa::placement::Source;
use crate::sys::fill_slot::FillSlot;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, Hva, PageSize};

/// Contents that are made from their place; window 1 has holes.
struct Made;

impl SavedRam for Made {
    fn window(&self, window: WindowIndex) -> SavedWindow {
        let pages = if window.get() == 1 { (0..512).step_by(2).collect() } else { PageSet::ALL };
        SavedWindow { pages, was_huge: window.get() != 1, ..SavedWindow::default() }
    }

    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        for page in self.window(window).pages.iter().map(usize::from) {
            into[page * 4096..page * 4096 + 8].copy_from_slice(&word(window.get(), page).to_le_bytes());
        }
        Ok(())
    }
}

/// First word of a stored page.
fn word(window: u64, page: usize) -> u64 {
    window << 32 | (page as u64 + 1)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    NextTouch,
    AllowHuge,
    DropPageTable,
    MoveIn,
    CopyIn,
    ZeroPage,
    LetGo,
    Wake,
    IsHuge,
}

/// The real calls, except that some uses of one call fail before they reach the kernel.
struct Failing {
    real: LinuxCalls,
    call: Call,
    /// Number of the next uses that fail.
    times: Mutex<u32>,
    errno: i32,
}

impl Failing {
    fn pass(&self, call: Call) -> io::Result<()> {
        let mut times = self.times.lock();
        if call != self.call || *times == 0 {
            return Ok(());
        }
        *times -= 1;
        Err(io::Error::from_raw_os_error(self.errno))
    }
}

impl kernel_calls::KernelCalls for Failing {
    fn next_touch(&self) -> io::Result<Option<Hva>> {
        self.pass(Call::NextTouch)?;
        self.real.next_touch()
    }

    fn allow_huge(&self, window: WindowIndex) -> io::Result<()> {
        self.pass(Call::AllowHuge)?;
        self.real.allow_huge(window)
    }

    fn drop_page_table(&self, window: WindowIndex) -> io::Result<()> {
        self.pass(Call::DropPageTable)?;
        self.real.drop_page_table(window)
    }

    fn move_in(&self, slot: &FillSlot, window: WindowIndex, pages: Range<u16>) -> io::Result<u16> {
        self.pass(Call::MoveIn)?;
        self.real.move_in(slot, window, pages)
    }

    fn copy_in(&self, slot: &FillSlot, window: WindowIndex, pages: Range<u16>) -> io::Result<u16> {
        self.pass(Call::CopyIn)?;
        self.real.copy_in(slot, window, pages)
    }

    fn source_of(&self, window: WindowIndex) -> Source {
        self.real.source_of(window)
    }

    fn place(&self, slot: &FillSlot, source: Source) -> io::Result<()> {
        self.real.place(slot, source)
    }

    fn zero_page(&self, page: Hva) -> io::Result<()> {
        self.pass(Call::ZeroPage)?;
        self.real.zero_page(page)
    }

    fn let_go(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        self.pass(Call::LetGo)?;
        self.real.let_go(start, bytes)
    }

    fn wake(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        self.pass(Call::Wake)?;
        self.real.wake(start, bytes)
    }

    fn is_huge(&self, start: Hva) -> io::Result<bool> {
        self.pass(Call::IsHuge)?;
        self.real.is_huge(start)
    }

    fn touches(&self) -> BorrowedFd<'_> {
        self.real.touches()
    }
}

fn ram() -> Arc<GuestRam> {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    GuestRam::map(&[GpaRange::new(Gpa::new(0), mib(8)).expect("fits")], backing).expect("addresses")
}

/// Restores four windows through calls of the kernel that fail, while two threads read all of them.
fn restore(call: Call, times: u32, errno: i32, may_move: bool) -> Option<RestoreReport> {
    restore_with(
        RestoreConfig { may_move, background: Background::Off, ..RestoreConfig::default() },
        call,
        times,
        errno,
    )
}

/// The same with any configuration.
fn restore_with(config: RestoreConfig, call: Call, times: u32, errno: i32) -> Option<RestoreReport> {
    let (ram, saved): (_, Arc<dyn SavedRam>) = (ram(), Arc::new(Made));
    let prepared = prepare(ram.clone(), saved, config, Contents::None);
    let (shared, real) = match prepared {
        Ok(prepared) => prepared,
        Err(RestoreError::Userfaultfd(error)) => {
            println!("skipped: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let (shared, kernel) = (Arc::new(shared), Arc::new(Failing { real, call, times: Mutex::new(times), errno }));
    let workers: Vec<_> = (0..shared.workers())
        .map(|number| worker::start(number, shared.clone(), kernel.clone()).expect("a thread"))
        .collect();
    drop(kernel);
    let words = ram.words(ram.ranges()[0]);
    let read = |window: u64, page: usize| words[(window as usize * 512 + page) * 512].load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        for first in [0, 511] {
            scope.spawn(move || {
                for (window, page) in (0..4).flat_map(|window| (0..512_usize).map(move |page| (window, page ^ first))) {
                    let expected = if window == 1 && page % 2 == 1 { 0 } else { word(window, page) };
                    assert_eq!(read(window, page), expected, "{call:?} {times} {errno}: window {window}, page {page}");
                }
            });
        }
    });
    workers.into_iter().for_each(|worker| worker.join().expect("its panics are caught"));
    Some(shared.counted.read(Clone::clone))
}

#[test]
fn whatever_call_fails_every_thread_reads_right_bytes_and_none_waits_for_ever() {
    const CALLS: [Call; 7] = [
        Call::NextTouch,
        Call::AllowHuge,
        Call::DropPageTable,
        Call::MoveIn,
        Call::ZeroPage,
        Call::LetGo,
        Call::IsHuge,
    ];
    for call in CALLS {
        for (times, errno) in [(1, libc::EAGAIN), (1, libc::ENOMEM), (3, libc::EBUSY), (15, libc::ENOMEM)] {
            for may_move in [true, false] {
                let Some(report) = restore(call, times, errno, may_move) else { return };
                assert_eq!((report.progress.filled_windows, report.failures.len()), (4, 0), "{call:?}: {report:?}");
            }
        }
    }
}

#[test]
fn copies_are_tried_again_while_the_host_has_no_memory() {
    let Some(report) = restore(Call::CopyIn, 5, libc::ENOMEM, false) else { return };
    assert_eq!((report.progress.filled_windows, report.failures.len()), (4, 0), "{report:?}");
    assert_eq!(report.by_fault, 4);
}

#[test]
fn pages_are_copied_alone_while_the_background_copies_the_rest_and_no_window_becomes_huge() {
    // The background begins a window each quarter of a second: the readers have touched all pages before it ends.
    let slowly = || RestoreConfig {
        is_page_by_page: true,
        background: Background::PerSecond(mib(8)),
        ..RestoreConfig::default()
    };
    let calls = [
        (Call::NextTouch, 1, libc::EAGAIN),
        (Call::CopyIn, 3, libc::ENOMEM),
        (Call::CopyIn, 3, libc::EAGAIN),
        (Call::ZeroPage, 3, libc::ENOMEM),
        (Call::Wake, 0, 0),
    ];
    for (call, times, errno) in calls {
        let Some(report) = restore_with(slowly(), call, times, errno) else { return };
        assert_eq!((report.progress.filled_windows, report.failures.len()), (4, 0), "{call:?}: {report:?}");
        assert!(report.pages_alone > 0, "{call:?}: {report:?}");
        assert_eq!((report.huge, report.not_huge, report.collapsed), (0, 0, 0), "{call:?}: {report:?}");
    }
}

#[test]
fn a_window_that_cannot_be_let_go_is_filled_and_stays_registered_until_the_end() {
    // The four windows, and none of the end.
    let Some(report) = restore(Call::LetGo, 4, libc::ENOMEM, true) else { return };
    assert_eq!((report.kept, report.progress.filled_windows), (4, 4), "{report:?}");
}

/// Contents of which the first read does not return before the test ends.
struct FirstReadHangs {
    /// Whether a read hangs already.
    has_begun: AtomicBool,
    goes_on: Mutex<std::sync::mpsc::Receiver<()>>,
}

impl SavedRam for FirstReadHangs {
    fn window(&self, window: WindowIndex) -> SavedWindow {
        Made.window(window)
    }

    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        if !self.has_begun.swap(true, Ordering::SeqCst) {
            let _ = self.goes_on.lock().recv();
        }
        Made.read(window, into)
    }
}

#[test]
fn a_touch_of_a_window_that_another_thread_is_filling_counts_as_a_wait() {
    let (go_on, goes_on) = std::sync::mpsc::channel();
    let saved = Arc::new(FirstReadHangs { has_begun: AtomicBool::new(false), goes_on: Mutex::new(goes_on) });
    let (ram, config) = (ram(), RestoreConfig { overdue_after: Duration::MAX, ..RestoreConfig::default() });
    let restorer = match Restorer::start(ram.clone(), saved.clone(), config) {
        Ok(restorer) => restorer,
        Err(RestoreError::Userfaultfd(error)) => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let look_again = || std::thread::sleep(Duration::from_millis(1));
    // The background reads the first window.
    while !saved.has_begun.load(Ordering::SeqCst) {
        look_again();
    }
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| ram.words(ram.ranges()[0])[0].load(Ordering::Relaxed));
        while restorer.report().waited == 0 {
            look_again();
        }
        drop(go_on);
        assert_eq!(reader.join().expect("it only reads"), word(0, 0));
    });
    while !restorer.is_finished() {
        look_again();
    }
    let report = restorer.report();
    assert_eq!((report.by_fault, report.by_background, report.fault_ns.len()), (0, 4, 1), "{report:?}");
}

#[test]
fn ram_is_filled_although_a_thread_never_returns_from_its_read() {
    let (go_on, goes_on) = std::sync::mpsc::channel();
    let saved = Arc::new(FirstReadHangs { has_begun: AtomicBool::new(false), goes_on: Mutex::new(goes_on) });
    // Much longer than the other threads wait for a processor in a read, however busy the machine is.
    let config = RestoreConfig { overdue_after: Duration::from_secs(2), ..RestoreConfig::default() };
    let restorer = match Restorer::start(ram(), saved, config) {
        Ok(restorer) => restorer,
        Err(RestoreError::Userfaultfd(error)) => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let began = std::time::Instant::now();
    while !restorer.is_filled() {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", restorer.report());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!restorer.is_finished(), "one thread still reads");
    assert!(!restorer.shared.ram.claims().is_filling());
    assert_eq!(restorer.report().lost_threads.len(), 1);
    drop(go_on);
    restorer.abandon(GuestIsGone);
}
