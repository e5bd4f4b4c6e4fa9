//! The real minor faults: a userfaultfd on this process's mapping of the file.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use wideleaf_policies::{Bytes, Hva, PageSize, WindowIndex};

use super::MinorFaults;
use crate::backing::BackingKind;
use crate::host::HostError;
use crate::region::GuestRam;
use crate::sys::userfaultfd::{Message, Mode, Userfaultfd, UserfaultfdError};

/// Why minor faults are not available.
#[derive(Debug, thiserror::Error)]
pub enum MinorFaultsError {
    /// Its pages are in no file.
    #[error("cannot sample by minor faults: anonymous memory has none")]
    Anonymous,
    /// A touch would bring back 512 windows at once.
    #[error("cannot sample by minor faults: pages of {0} are larger than a window")]
    PagesTooLarge(PageSize),
    /// No userfaultfd is available, or none that reports minor faults.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// No thread could be started.
    #[error("cannot start the thread that answers minor faults: {0}")]
    Thread(io::Error),
}

/// Minor faults of one VM's RAM.
#[derive(Debug)]
pub struct LinuxMinorFaults {
    uffd: Userfaultfd,
    ram: Arc<GuestRam>,
}

impl LinuxMinorFaults {
    /// Opens a userfaultfd that watches nothing of `ram` yet.
    ///
    /// # Errors
    /// [`MinorFaultsError`] with its reason.
    pub fn open(ram: Arc<GuestRam>) -> Result<LinuxMinorFaults, MinorFaultsError> {
        match (ram.backing().kind(), ram.backing().fixed_page()) {
            (BackingKind::Anon, _) => Err(MinorFaultsError::Anonymous),
            (_, Some(page)) if page > PageSize::Huge2M => Err(MinorFaultsError::PagesTooLarge(page)),
            _ => Ok(LinuxMinorFaults { uffd: Userfaultfd::open_for_minor_faults()?, ram }),
        }
    }

    fn window(&self, window: WindowIndex) -> (Hva, Bytes) {
        let piece = self.ram.window(window);
        (piece.start(), piece.bytes())
    }

    fn wake(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        self.uffd.wake(start, bytes).map_err(host_error("UFFDIO_WAKE"))
    }
}

fn host_error(what: &'static str) -> impl Fn(io::Error) -> HostError {
    move |source| HostError { what, source }
}

impl MinorFaults for LinuxMinorFaults {
    fn watch(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        self.uffd.register(start, bytes, Mode::Minor).map_err(host_error("UFFDIO_REGISTER"))
    }

    fn unwatch(&self, window: WindowIndex) -> Result<(), HostError> {
        let (start, bytes) = self.window(window);
        self.uffd.unregister(start, bytes).map_err(host_error("UFFDIO_UNREGISTER"))?;
        // Unregistering wakes before it lets go: a thread that touched in between waits again, and is woken here.
        self.wake(window)
    }

    fn unmap(&self, window: WindowIndex, pages: Range<u16>) -> Result<(), HostError> {
        assert_ne!(self.ram.backing().kind(), BackingKind::Anon, "anonymous memory would be lost");
        let page = PageSize::Base4K.bytes();
        let piece = self.ram.window(window).part(page * u64::from(pages.start), page * pages.len() as u64);
        piece.discard().map_err(host_error("madvise(MADV_DONTNEED)"))
    }

    /// Page by page if necessary: pages that are mapped already or not in the file are skipped.
    fn map_from_file(&self, window: WindowIndex) -> Result<(), HostError> {
        let page = self.ram.backing().fixed_page().unwrap_or(PageSize::Base4K).bytes();
        let (start, bytes) = self.window(window);
        let mut done = Bytes::ZERO;
        while done < bytes {
            done += match self.uffd.map_file_pages(start + done, bytes - done) {
                Ok(mapped) => mapped,
                Err(error) if matches!(error.raw_os_error(), Some(libc::EEXIST | libc::EFAULT)) => page,
                Err(error) => return Err(host_error("UFFDIO_CONTINUE")(error)),
            };
        }
        self.wake(window)
    }

    fn read_touches(&self, touches: &mut Vec<WindowIndex>) -> Result<(), HostError> {
        let mut messages = Vec::new();
        self.uffd.read(&mut messages).map_err(host_error("read of a userfaultfd"))?;
        let window = |message: &Message| match message {
            Message::MinorFault(page) => self.ram.window_at(*page),
            Message::Fault(_) | Message::Other(_) => None,
        };
        // Known messages are passed on whatever else there is: a thread waits for each.
        touches.extend(messages.iter().filter_map(window));
        match messages.iter().find(|message| window(message).is_none()) {
            None => Ok(()),
            Some(other) => Err(host_error("read of a userfaultfd")(io::Error::other(format!("unexpected: {other:?}")))),
        }
    }
}

impl AsFd for LinuxMinorFaults {
    /// Readable when a thread waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}
