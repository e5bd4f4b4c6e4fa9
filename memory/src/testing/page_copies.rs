//! A restore as other VMMs do it: each touch of a missing page of 4 KiB is answered with a copy of that page
//! (`UFFDIO_COPY`). The kernel makes no huge page of them. A measure for [`crate::restore`].

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_policies::{Bytes, Gpa, PageSize};

use crate::region::GuestRam;
use crate::sys::fill_slot::FillSlot;
use crate::sys::userfaultfd::{Message, Mode, Userfaultfd, UserfaultfdError};

const PAGE: Bytes = PageSize::Base4K.bytes();

/// The service in its thread, until it is dropped. All touches must have been answered then.
#[derive(Debug)]
pub struct PageCopies {
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<u64>>,
}

impl PageCopies {
    /// Registers the first range of the RAM. `read` reads a page to a buffer of 4 KiB.
    ///
    /// # Errors
    /// [`UserfaultfdError`], also where no thread can be started.
    pub fn start(
        ram: Arc<GuestRam>,
        read: impl FnMut(Gpa, &mut [u8]) + Send + 'static,
    ) -> Result<PageCopies, UserfaultfdError> {
        let failed = |call| move |source| UserfaultfdError::Call { call, source };
        let uffd = Userfaultfd::open()?;
        let range = ram.ranges()[0];
        uffd.register(range.hva, range.gpa.bytes(), Mode::Missing).map_err(failed("UFFDIO_REGISTER"))?;
        let (stopped, stop) = io::pipe().map_err(failed("pipe"))?;
        let slot = FillSlot::map().map_err(|error| failed("mmap")(io::Error::other(error)))?;
        let work = move || serve(&ram, &uffd, slot, &stopped, read);
        let thread = std::thread::Builder::new().name("page-copies".into()).spawn(work);
        Ok(PageCopies { stop: Some(stop), thread: Some(thread.map_err(failed("clone"))?) })
    }

    /// Ends the service. Returns the number of pages that it copied.
    pub fn stop(mut self) -> u64 {
        self.end()
    }

    fn end(&mut self) -> u64 {
        drop(self.stop.take());
        self.thread.take().map_or(0, |thread| thread.join().expect("it does not panic"))
    }
}

impl Drop for PageCopies {
    fn drop(&mut self) {
        self.end();
    }
}

fn serve(
    ram: &GuestRam,
    uffd: &Userfaultfd,
    mut slot: FillSlot,
    stop: &PipeReader,
    mut read: impl FnMut(Gpa, &mut [u8]),
) -> u64 {
    let (range, mut copied, mut messages) = (ram.ranges()[0], 0, Vec::new());
    loop {
        let mut fds = [uffd.as_fd(), stop.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        poll(&mut fds, PollTimeout::NONE).expect("two open descriptors");
        if fds[1].any().unwrap_or(true) {
            return copied;
        }
        uffd.read(&mut messages).expect("it is open");
        for message in messages.drain(..) {
            let Message::Fault(page) = message else { unreachable!("no other faults were requested") };
            let gpa = range.gpa.start() + (page - range.hva);
            read(gpa, &mut slot.bytes()[..PAGE.as_usize()]);
            let to = ram.piece(range).part(page - range.hva, PAGE);
            // Two threads may have touched the same page.
            copied += u64::from(uffd.copy_pages(slot.piece().part(Bytes::ZERO, PAGE), to).is_ok());
            uffd.wake(page, PAGE).expect("it is registered");
        }
    }
}
