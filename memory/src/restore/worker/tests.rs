//! What one thread does while another one ends the restore, with calls that reach no kernel.

use std::os::fd::BorrowedFd;
use std::sync::Weak;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use std::ops::Range;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSet, PerTenThousand, WindowIndex};

use super::*;
use crate::backing::BackingConfig;
use crate::faults::Counted;
use crate::host::linux::LinuxHost;
use crate::numa::placement::Source;
use crate::region::GuestRam;
use crate::restore::rows::Rows;
use crate::restore::window_states::WindowStates;
use crate::restore::{ReadError, RestoreConfig, RestoreReport, SavedRam, SavedWindow};
use crate::sensors::host_backing::window_backing;
use crate::sys::fill_slot::FillSlot;

/// Window 0 is stored, window 1 is not.
struct First;

impl SavedRam for First {
    fn window(&self, window: WindowIndex) -> SavedWindow {
        let pages = if window.get() == 0 { PageSet::ALL } else { PageSet::EMPTY };
        SavedWindow { pages, ..SavedWindow::default() }
    }

    fn read(&self, _: WindowIndex, _: &mut [u8]) -> Result<(), ReadError> {
        unreachable!("no window is read")
    }
}

/// The first window to be let go cannot be, and another thread fills the last stored window meanwhile.
struct EndsMeanwhile {
    shared: Mutex<Weak<Shared>>,
    let_go: Mutex<Vec<Hva>>,
}

impl KernelCalls for EndsMeanwhile {
    fn next_touch(&self) -> io::Result<Option<Hva>> {
        Ok(None)
    }

    fn allow_huge(&self, _: WindowIndex) -> io::Result<()> {
        Ok(())
    }

    fn drop_page_table(&self, _: WindowIndex) -> io::Result<()> {
        Ok(())
    }

    fn move_in(&self, _: &FillSlot, _: WindowIndex, pages: Range<u16>) -> io::Result<u16> {
        Ok(pages.end - pages.start)
    }

    fn copy_in(&self, _: &FillSlot, _: WindowIndex, pages: Range<u16>) -> io::Result<u16> {
        Ok(pages.end - pages.start)
    }

    fn zero_page(&self, _: Hva) -> io::Result<()> {
        Ok(())
    }

    fn let_go(&self, start: Hva, _: Bytes) -> io::Result<()> {
        let shared = std::mem::take(&mut *self.shared.lock());
        let Some(shared) = shared.upgrade() else {
            self.let_go.lock().push(start);
            return Ok(());
        };
        let Touched::Fill(claim) = shared.states.touched(0, 1, shared.host.now()) else { panic!("window 0 waits") };
        assert!(shared.states.begin_placing(0, claim));
        shared.states.settle(0, Settled::LetGo(Mapping::Base));
        shared.ram.claims().filled(WindowIndex::new(0));
        shared.finish_if_done(self);
        Err(io::Error::from_raw_os_error(libc::ENOMEM))
    }

    fn wake(&self, _: Hva, _: Bytes) -> io::Result<()> {
        Ok(())
    }

    fn source_of(&self, _: WindowIndex) -> Source {
        unreachable!("no page is made ready")
    }

    fn place(&self, _: &FillSlot, _: Source) -> io::Result<()> {
        Ok(())
    }

    fn is_huge(&self, _: Hva) -> io::Result<bool> {
        Ok(false)
    }

    fn touches(&self) -> BorrowedFd<'_> {
        unreachable!("the thread does not sleep")
    }
}

/// A restore of window 0 in two windows of RAM, both of them registered.
fn shared() -> Arc<Shared> {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let range = GpaRange::new(Gpa::new(0), mib(4)).expect("fits");
    let ram = GuestRam::map(&[range], backing).expect("addresses");
    ram.claims().begin_filling(range.windows());
    let rows = Rows::of(ram.ranges());
    let states = WindowStates::new(2, vec![0], std::slice::from_ref(&(0..2)), |row| row == 0, Mapping::Base);
    let (host, counted) = (LinuxHost::open().expect("/proc exists"), Counted::<RestoreReport>::default());
    let heats = vec![PerTenThousand::new(0); 2];
    let config = RestoreConfig::default();
    Arc::new(Shared::new(ram, rows, Arc::new(First), heats, states, host, counted, false, config).expect("a pipe"))
}

#[test]
fn a_window_of_which_the_guest_gave_pages_back_is_not_collapsed() {
    let shared = shared();
    let range = shared.ram.ranges()[0];
    let words = shared.ram.words(range);
    for row in 0..2 {
        shared.ram.claims().filled(WindowIndex::new(row as u64));
        words[row * (words.len() / 2)].store(1, Ordering::Relaxed);
        shared.is_not_huge(row, 0);
    }
    shared.ram.given_back().book().inflate(Gpa::new(4096));
    let kernel = Arc::new(EndsMeanwhile { shared: Mutex::default(), let_go: Mutex::default() });
    let slots = Slots::default();
    let serving = Serving { number: 0, shared: shared.clone(), kernel, slots, placing: None, read_errors: 0 };
    while serving.collapse_one() {}
    let resident = |row| window_backing(&shared.host, range, None, WindowIndex::new(row)).expect("readable").resident;
    assert_eq!(resident(0), 1, "its holes stay");
    // The host may have no huge page.
    assert_eq!(shared.counted.read(|report| report.collapsed), u64::from(resident(1) == 512));
}

#[test]
fn a_window_of_zeroes_that_is_kept_while_the_restore_ends_is_let_go_and_may_be_claimed() {
    let shared = shared();
    let kernel = Arc::new(EndsMeanwhile { shared: Mutex::new(Arc::downgrade(&shared)), let_go: Mutex::default() });
    let slots = Slots::default();
    let mut serving =
        Serving { number: 0, shared: shared.clone(), kernel: kernel.clone(), slots, placing: None, read_errors: 0 };
    let (second, _) = shared.rows.place(&(1..2));
    serving.answer(second);
    assert!(shared.is_done() && !shared.ram.claims().is_filling(), "saves, balloons and actuators would wait for ever");
    assert_eq!(*kernel.let_go.lock(), [second]);
    assert_eq!(shared.states.touched(1, 0, shared.host.now()), Touched::Wake);
}
