//! The thread that answers touches of windows that are aside.
//!
//! It sleeps until a thread waits for a window, or another thread has left a window stuck. Only while a window is stuck
//! does it wake by itself: with many VMs on a host, a thread that looks again and again costs more than its work.

use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Aside, STUCK_RETRY};
use crate::host::HostError;
use crate::kernel::Kernel;
use crate::mover::linux::{MoverError, OpenMover};
use crate::region::GuestRam;
use crate::sandboxed::{ThreadWork, thread_starts};

/// Number of consecutive failures to determine the waiting threads after which the service ends.
const SERVE_ATTEMPTS: u32 = 20;
/// Time between these attempts: descriptors stay readable, and the threads keep waiting.
const SERVE_RETRY: Duration = Duration::from_millis(1);

/// [`Aside`] over a VM's own RAM, with the thread that answers touches. Dropping it brings everything back and wakes
/// all waiting threads, even if other parts share [`WindowMover::aside`].
#[derive(Debug)]
pub struct WindowMover {
    aside: Arc<Aside>,
    /// End of the thread's pipe; dropping it ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl WindowMover {
    /// Opens a userfaultfd and starts the thread. No memory is watched until a window is taken aside.
    ///
    /// # Errors
    /// [`MoverError`]: only anonymous RAM can be moved, by a kernel that has `UFFDIO_MOVE` and permits it.
    pub fn start(host: Arc<dyn Kernel>, ram: Arc<GuestRam>) -> Result<WindowMover, MoverError> {
        let no_thread = |source| HostError { what: "start the thread that moves windows", source };
        let claims = ram.claims().clone();
        let OpenMover { mover, touches } = host.open_mover(ram)?;
        let (stopped, stop) = io::pipe().map_err(no_thread)?;
        let (aside, retries) = with_retries(Aside::new(host, mover, claims)).map_err(no_thread)?;
        let aside = Arc::new(aside);
        let closes = CloseAtTheEnd(aside.clone());
        let thread = std::thread::Builder::new()
            .name("window-mover".into())
            .spawn(move || {
                thread_starts(ThreadWork::Faults);
                if let Err(error) = answer_until(&stopped, &closes.0, &*touches, &retries) {
                    tracing::error!("moving of windows has ended: {error}");
                }
            })
            .map_err(no_thread)?;
        Ok(WindowMover { aside, stop: Some(stop), thread: Some(thread) })
    }

    /// Access to the windows that are aside.
    pub fn aside(&self) -> &Arc<Aside> {
        &self.aside
    }
}

impl Drop for WindowMover {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread that moves windows panicked, after bringing everything back");
        }
    }
}

/// Closes everything however the thread ends: stopped, failed or panicked.
struct CloseAtTheEnd(Arc<Aside>);

impl Drop for CloseAtTheEnd {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The same windows, and the pipe through which another thread asks for a retry of a stuck one.
fn with_retries(mut aside: Aside) -> io::Result<(Aside, PipeReader)> {
    let (retries, pipe) = io::pipe()?;
    aside.inner.get_mut().retry.pipe = Some(pipe);
    Ok((aside, retries))
}

/// Answers whenever `touched` or `retries` is readable. One failure may be an accident (no memory, a signal); many in a
/// row end the service.
fn answer_until(
    stop: &PipeReader,
    aside: &Aside,
    touched: &(impl AsFd + ?Sized),
    mut retries: &PipeReader,
) -> io::Result<()> {
    let again = PollTimeout::try_from(STUCK_RETRY).expect("some milliseconds are a timeout");
    let mut failures = 0;
    loop {
        // A window that another thread leaves stuck after this line makes the pipe readable.
        let timeout = if aside.inner().has_stuck() { again } else { PollTimeout::NONE };
        let mut fds = [touched.as_fd(), stop.as_fd(), retries.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let [_, is_stopped, is_retry] = fds.map(|fd| fd.any());
        if is_stopped.unwrap_or(true) {
            return Ok(());
        }
        if is_retry == Some(true) {
            let _ = retries.read(&mut [0]); // only its coming counts
        }
        failures = match aside.serve() {
            Ok(()) => 0,
            Err(error) if failures + 1 == SERVE_ATTEMPTS => return Err(io::Error::other(error)),
            Err(error) => {
                tracing::warn!("cannot determine the waiting threads, trying again: {error}");
                aside.host.sleep(SERVE_RETRY);
                failures + 1
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use wideleaf_policies::WindowIndex;

    use super::*;
    use crate::mover::{ALL_PAGES, Place};
    use crate::testing::fake_host::FakeHost;
    use crate::testing::fake_mover::{FakeMover, Touch};

    const WINDOW: WindowIndex = WindowIndex::new(3);

    /// Time limit of a test that waits for a retry, of which one comes every 50 ms.
    const LONG: Duration = Duration::from_secs(30);

    /// A window that is aside.
    fn aside() -> (Aside, Arc<FakeMover>, PipeReader) {
        let mover = Arc::new(FakeMover::default());
        mover.write(WINDOW, ALL_PAGES);
        let aside = Aside::new(Arc::new(FakeHost::default()), mover.clone(), Arc::default());
        let (aside, retries) = with_retries(aside).expect("a pipe");
        aside.set_aside(WINDOW).expect("nothing fails yet");
        (aside, mover, retries)
    }

    /// Result of a service that runs until `work` returns. Its descriptor is always readable, or never.
    fn service(
        aside: &Aside,
        retries: &PipeReader,
        is_readable: bool,
        work: impl FnOnce(&dyn Fn() -> bool),
    ) -> io::Result<()> {
        let (stopped, stop) = io::pipe().expect("a pipe");
        let (touched, mut writer) = io::pipe().expect("a pipe");
        if is_readable {
            io::Write::write_all(&mut writer, &[0]).expect("there is room for a byte");
        }
        std::thread::scope(|scope| {
            let service = scope.spawn(|| answer_until(&stopped, aside, &touched, retries));
            work(&|| service.is_finished());
            drop(stop);
            service.join().expect("it does not panic")
        })
    }

    /// A thread waits for the window. Returns the result of a service with a descriptor that is always readable, and
    /// the mover.
    fn served(prepare: impl FnOnce(&FakeMover)) -> (io::Result<()>, Arc<FakeMover>) {
        let (aside, mover, retries) = aside();
        assert_eq!(mover.touch(WINDOW, 0), Touch::Waits);
        prepare(&mover);
        let ended = service(&aside, &retries, true, |is_finished| {
            while mover.waiting() > 0 && !is_finished() {
                std::thread::yield_now();
            }
        });
        (ended, mover)
    }

    #[test]
    fn a_service_without_a_stuck_window_does_nothing_until_a_touch() {
        let (aside, mover, retries) = aside();
        let before = mover.calls();
        let ended = service(&aside, &retries, false, |_| std::thread::sleep(4 * STUCK_RETRY));
        assert!(ended.is_ok(), "{ended:?}");
        assert_eq!(mover.calls() - before, 0, "it looked although nothing had changed");
    }

    #[test]
    fn a_window_that_another_thread_leaves_stuck_is_retried_each_time() {
        let (aside, mover, retries) = aside();
        let is_back = || mover.pages_aside() == 0;
        let ended = service(&aside, &retries, false, |is_finished| {
            for _ in 0..2 {
                mover.pin(Place::Aside(0), 1);
                // Read the touches, look, list the pages; move page 0, fail at page 1; list the pages left; move the
                // rest; list the pages left; copy page 1.
                mover.fail_call(8, libc::ENOMEM);
                aside.bring_back(WINDOW).expect_err("a page is left");
                let began = Instant::now();
                while !(is_back() && aside.set_aside(WINDOW).is_ok()) {
                    assert!(began.elapsed() < LONG && !is_finished(), "the window is stuck for good");
                    std::thread::yield_now();
                }
            }
        });
        aside.bring_back(WINDOW).expect("nothing fails any more");
        assert!(ended.is_ok() && mover.is_intact(), "{ended:?}");
    }

    #[test]
    fn one_failure_to_read_touches_does_not_end_the_service() {
        let (ended, mover) = served(|mover| mover.fail_call(0, libc::EINTR));
        assert!(ended.is_ok() && mover.waiting() == 0, "{ended:?}");
    }

    #[test]
    fn a_service_that_can_never_read_touches_ends() {
        let (ended, mover) = served(|mover| mover.fail_all(Some(libc::EIO)));
        assert!(ended.is_err() && mover.waiting() == 1, "{ended:?}");
        mover.fail_all(None);
    }
}
