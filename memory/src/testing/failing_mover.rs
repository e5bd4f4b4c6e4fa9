//! A wrapper of a mover in which calls fail now and then, and moves do only a part of their work.

use std::ops::Range;
use std::sync::Arc;

use wideleaf_policies::{Bytes, WindowIndex};

use crate::host::HostError;
use crate::mover::{Mover, Place, PlaceBacking};
use crate::numa::placement::Source;
use crate::testing::fault_injection::{Fate, FaultInjection};

/// Wraps a mover; see the module. It never injects `EEXIST`, which says that a page is there, so that a copy
/// may be discarded.
pub struct FailingMover {
    real: Arc<dyn Mover>,
    faults: Arc<FaultInjection>,
}

impl FailingMover {
    /// `faults` decides which calls to `real` fail.
    pub fn new(real: Arc<dyn Mover>, faults: Arc<FaultInjection>) -> FailingMover {
        FailingMover { real, faults }
    }

    fn refuse(&self, what: &'static str, errnos: &[i32]) -> Result<(), HostError> {
        self.faults.refuse(what, errnos).map_err(|source| HostError { what, source })
    }

    /// Calls `real`, or fails before or after the call.
    fn call_or_fail(
        &self,
        what: &'static str,
        errnos: &[i32],
        real: impl FnOnce() -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        let source = match self.faults.fate(what, errnos) {
            Fate::Fine => return real(),
            Fate::Early(error) => error,
            Fate::Late(error) => {
                real()?;
                error
            }
        };
        Err(HostError { what, source })
    }
}

impl Mover for FailingMover {
    fn watch(&self, window: WindowIndex) -> Result<(), HostError> {
        self.refuse("watch", &[libc::EBUSY, libc::ENOMEM])?;
        self.real.watch(window)
    }

    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError> {
        self.refuse("unwatch", &[libc::ENOMEM])?;
        self.real.unwatch(window)
    }

    fn wake(&self, window: WindowIndex) -> Result<(), HostError> {
        self.refuse("wake", &[libc::EAGAIN])?;
        self.real.wake(window)
    }

    fn move_pages(&self, from: Place, to: Place, pages: Range<u16>) -> Result<u16, HostError> {
        self.refuse("move_pages", &[libc::EAGAIN, libc::EBUSY, libc::EINVAL, libc::ENOMEM])?;
        let is_short = self.faults.is_short("move_pages, short");
        let end = if is_short { pages.start + (pages.len() as u16).div_ceil(2) } else { pages.end };
        self.real.move_pages(from, to, pages.start..end)
    }

    fn copy_page(&self, from: Place, to: Place, page: u16) -> Result<(), HostError> {
        self.refuse("copy_page", &[libc::EAGAIN, libc::ENOMEM])?;
        self.real.copy_page(from, to, page)
    }

    fn copy_all(&self, from: Place, to: Place) -> Result<(), HostError> {
        self.refuse("copy_all", &[libc::ENOMEM])?;
        self.real.copy_all(from, to)
    }

    fn clear(&self, place: Place) -> Result<(), HostError> {
        self.refuse("clear", &[libc::ENOMEM])?;
        self.real.clear(place)
    }

    fn discard(&self, place: Place, pages: Range<u16>) -> Result<(), HostError> {
        self.call_or_fail("discard", &[libc::EAGAIN], || self.real.discard(place, pages))
    }

    fn held(&self, place: Place) -> Result<Vec<Range<u16>>, HostError> {
        self.refuse("held", &[libc::EINTR, libc::ENOMEM])?;
        self.real.held(place)
    }

    fn occupied(&self, place: Place) -> Result<u16, HostError> {
        self.refuse("occupied", &[libc::EINTR, libc::ENOMEM])?;
        self.real.occupied(place)
    }

    fn zero_pages(&self, place: Place) -> Result<(Vec<Range<u16>>, Bytes), HostError> {
        self.refuse("zero_pages", &[libc::EINTR, libc::ENOMEM])?;
        self.real.zero_pages(place)
    }

    fn look(&self, place: Place) -> Result<PlaceBacking, HostError> {
        self.refuse("look", &[libc::EINTR, libc::ENOMEM])?;
        self.real.look(place)
    }

    fn allow_huge(&self, window: WindowIndex) -> Result<(), HostError> {
        self.call_or_fail("allow_huge", &[libc::EAGAIN, libc::ENOMEM], || self.real.allow_huge(window))
    }

    fn forbid_huge(&self, window: WindowIndex) -> Result<(), HostError> {
        self.call_or_fail("forbid_huge", &[libc::EAGAIN, libc::ENOMEM], || self.real.forbid_huge(window))
    }

    fn source_of(&self, window: WindowIndex) -> Source {
        self.real.source_of(window)
    }

    fn populate_base(&self, slot: u16, from: Source) -> Result<(), HostError> {
        self.call_or_fail("populate_base", &[libc::EHWPOISON, libc::ENOMEM], || self.real.populate_base(slot, from))
    }

    fn populate(&self, slot: u16, from: Source) -> Result<(), HostError> {
        self.call_or_fail("populate", &[libc::EHWPOISON, libc::ENOMEM], || self.real.populate(slot, from))
    }

    /// A late failure has read its messages, as the real one has after a message it does not know. An interrupted
    /// read is not an error of the real one: no thread waited then.
    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError> {
        self.call_or_fail("read_touches", &[libc::ENOMEM], || self.real.read_touches(touches))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::{ALL_PAGES, Place};
    use crate::testing::fake_mover::FakeMover;

    const WINDOW: WindowIndex = WindowIndex::new(1);

    #[test]
    fn a_move_fails_or_is_cut_in_half_and_never_reports_an_existing_page() {
        let real = Arc::new(FakeMover::default());
        real.write(WINDOW, ALL_PAGES);
        let mover = FailingMover::new(real.clone(), Arc::new(FaultInjection::new(3, 2)));
        real.watch(WINDOW).expect("nothing fails there");
        let (mut moved, mut failures) = (0, 0);
        for _ in 0..4096 {
            let pages = moved..ALL_PAGES.end.min(moved + 8);
            match mover.move_pages(Place::Guest(WINDOW), Place::Aside(0), pages) {
                Ok(pages) => moved += pages,
                Err(error) => {
                    failures += 1;
                    assert_ne!(error.source.raw_os_error(), Some(libc::EEXIST));
                }
            }
            if moved == ALL_PAGES.end {
                break;
            }
        }
        assert!(real.held(Place::Aside(0)).expect("nothing fails there").into_iter().flatten().eq(ALL_PAGES));
        assert!(failures > 0 && mover.faults.counts().contains_key("move_pages, short"), "{:?}", mover.faults);
    }
}
