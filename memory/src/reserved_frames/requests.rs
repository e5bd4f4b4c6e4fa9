//! Requests to the thread that maps reserved frames: pages that the guest gave back. Only that thread changes what
//! windows map, so no page is punched while it is being mapped, and no window promoted while it loses a page.
//!
//! ```text
//!   balloon, manager ── window, pages ──▶ queue ── a byte in the pipe ──▶ thread: between two batches of answers
//!        ▲  waits                                                            │
//!        └───────────────────────────── result ──────────────────────────────┘   None: the service has ended
//! ```

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};

use wideleaf_policies::{PageSet, VmId, WindowIndex};

use crate::host::HostError;

/// Maximum number of requests answered between two batches of touches: a demotion takes up to a millisecond.
const ANSWERED_AT_ONCE: usize = 4;

/// Pages that a guest gave back.
pub(super) struct Request {
    pub vm: VmId,
    pub window: WindowIndex,
    pub pages: PageSet,
    answer: Sender<Result<(), HostError>>,
}

impl Request {
    /// Answers it. A requester that is gone needs no answer.
    pub fn answer(self, result: Result<(), HostError>) {
        let _ = self.answer.send(result);
    }
}

/// Way to the service that maps the reserved frames of one VM.
#[derive(Debug)]
pub(crate) struct FramesService {
    vm: VmId,
    requests: Sender<Request>,
    wake: PipeWriter,
}

impl FramesService {
    /// Gives the frames of these pages to the host; the pages read zero afterwards. The guest has given them back, and
    /// may touch them at any time all the same. All other pages of the window keep their contents. `None` once the
    /// service has ended: nothing watches the window any more.
    ///
    /// The caller has claimed the window as in place. It holds no lock that the service needs: the service takes none
    /// of the book, and no claim.
    pub fn give_back(&self, window: WindowIndex, pages: PageSet) -> Option<Result<(), HostError>> {
        let (answer, heard) = channel();
        self.requests.send(Request { vm: self.vm, window, pages, answer }).ok()?;
        (&self.wake).write_all(&[0]).ok()?;
        heard.recv().ok()
    }
}

/// The service's end of the requests.
#[derive(Debug)]
pub(super) struct Requests {
    queue: Receiver<Request>,
    woken: PipeReader,
    /// Ends for the requesters, until they are taken.
    send: Sender<Request>,
    wake: PipeWriter,
}

impl Requests {
    /// Without a request yet.
    pub fn new() -> io::Result<Requests> {
        let (send, queue) = channel();
        let (woken, wake) = io::pipe()?;
        Ok(Requests { queue, woken, send, wake })
    }

    /// A way to send requests about this VM.
    pub fn way(&self, vm: VmId) -> io::Result<FramesService> {
        Ok(FramesService { vm, requests: self.send.clone(), wake: self.wake.try_clone()? })
    }

    /// Takes the next requests, a few at a time. The pipe stays readable while there are more.
    pub fn take(&mut self) -> Vec<Request> {
        let requests: Vec<Request> = self.queue.try_iter().take(ANSWERED_AT_ONCE).collect();
        // A byte for each request is in the pipe, or will be in a moment: its sender writes it next, and waits.
        let mut bytes = [0; ANSWERED_AT_ONCE];
        let read = self.woken.read_exact(&mut bytes[..requests.len()]);
        read.unwrap_or_else(|error| tracing::warn!("cannot read the pipe of requests: {error}"));
        requests
    }
}

impl AsFd for Requests {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.woken.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: WindowIndex = WindowIndex::new(3);

    #[test]
    fn each_request_is_answered_once_and_a_few_at_a_time() {
        const ASKING: usize = 2 * ANSWERED_AT_ONCE + 1;
        let mut requests = Requests::new().expect("pipes");
        std::thread::scope(|scope| {
            for vm in 0..ASKING {
                let way = requests.way(VmId(vm as u32)).expect("descriptors");
                scope.spawn(move || assert!(matches!(way.give_back(WINDOW, PageSet::ALL), Some(Ok(())))));
            }
            let mut answered = std::collections::BTreeSet::new();
            while answered.len() < ASKING {
                let taken = requests.take();
                assert!(taken.len() <= ANSWERED_AT_ONCE);
                for request in taken {
                    assert!(answered.insert(request.vm) && request.pages == PageSet::ALL);
                    request.answer(Ok(()));
                }
                std::thread::yield_now();
            }
        });
        assert!(requests.take().is_empty());
    }

    #[test]
    fn a_requester_does_not_wait_for_a_service_that_ends() {
        let requests = Requests::new().expect("pipes");
        let (before, after) =
            (requests.way(VmId(0)).expect("descriptors"), requests.way(VmId(0)).expect("descriptors"));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || before.give_back(WINDOW, PageSet::ALL));
            std::thread::sleep(std::time::Duration::from_millis(5));
            drop(requests);
            assert!(waiting.join().expect("it ends").is_none());
        });
        assert!(after.give_back(WINDOW, PageSet::ALL).is_none());
    }
}
