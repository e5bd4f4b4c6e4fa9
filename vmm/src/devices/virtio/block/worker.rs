//! The thread of one disk: it serves requests until the queue is empty, then waits for its driver.
//!
//! ```text
//!   kick ─▶ take ─▶ piece by piece: gate in, preadv or pwritev, gate out ─▶ status byte ─▶ used ring
//!           ─▶ take … ─▶ empty: wait
//! ```
//!
//! The driver need not notify the thread while that works. Between two pieces the VM may be paused, and
//! the device reset.

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_WRITE_ZEROES};
use virtio_queue::QueueT as _;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::request::{Buffers, FAILED, Limits, OK, Operation, Range, Refusal, Request};
use super::{DiskCounters, DiskImage};
use crate::devices::virtio::pieces::{PIECES_MAX, Piece};
use crate::devices::virtio::service::Service;
use crate::devices::virtio::{ActivateError, Activation, ActiveQueue, BrokenQueue, Interrupt};
use crate::dma::{Access, DeviceMemory};

/// Largest number of bytes moved inside the gate at once. A pause of the VM waits for no more than one such piece,
/// which takes a slow disk (10 MB/s) a tenth of a second; the limit [`crate::run_loop::PAUSE_WAIT_MAX`] is two.
const BYTES_AT_ONCE: u64 = 1 << 20;

/// A thread that serves a disk until this value is dropped.
#[derive(Debug)]
pub struct Worker {
    stop: Arc<Stop>,
    /// The queue, used by the thread for one request at a time.
    service: Arc<Service<ActiveQueue>>,
    thread: Option<JoinHandle<()>>,
}

/// Request to end: checked between two pieces, and waited for between two requests.
#[derive(Debug)]
struct Stop {
    is_said: AtomicBool,
    event: EventFd,
}

impl Worker {
    /// Serves the first queue of an activation.
    ///
    /// # Errors
    /// [`ActivateError::Host`] where the host gives no event or thread.
    pub fn start(
        image: Arc<DiskImage>,
        counters: Arc<DiskCounters>,
        activation: Activation,
    ) -> Result<Worker, ActivateError> {
        let host = |what| move |source| ActivateError::Host { what, source };
        let event = EventFd::new(EFD_NONBLOCK).map_err(host("cannot create a disk's event"))?;
        let stop = Arc::new(Stop { is_said: AtomicBool::new(false), event });
        let has = |feature| activation.has(feature);
        let limits = Limits {
            bytes: image.bytes(),
            is_read_only: image.is_read_only(),
            has_discard: has(VIRTIO_BLK_F_DISCARD),
            has_write_zeroes: has(VIRTIO_BLK_F_WRITE_ZEROES),
        };
        let is_written_through = !has(VIRTIO_BLK_F_FLUSH);
        let Activation { memory, queues, interrupt, threads, .. } = activation;
        let queue = queues.into_iter().next().ok_or(ActivateError::NoQueue(0))?;
        let served = Arc::clone(&stop);
        let events = wait_for(&[&queue.kick, &stop.event]).map_err(host("cannot wait for a disk's driver"))?;
        let disk = Disk { image, counters, memory, interrupt, limits, is_written_through, stop: served };
        let (kick, service) = (Arc::clone(&queue.kick), Service::new(queue));
        let of_thread = Arc::clone(&service);
        let thread = threads.spawn("disk", move || disk.work(&events, &kick, &of_thread))?;
        Ok(Worker { stop, service, thread: Some(thread) })
    }

    /// The queue, for a thread that wants the disk to rest.
    pub fn service(&self) -> &Arc<Service<ActiveQueue>> {
        &self.service
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.is_said.store(true, Ordering::Release);
        let _ = self.stop.event.write(1);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked serves nothing any more, as is intended here.
            let _ = thread.join();
        }
    }
}

/// Everything that the thread uses, except the queue.
struct Disk {
    image: Arc<DiskImage>,
    counters: Arc<DiskCounters>,
    memory: DeviceMemory,
    interrupt: Arc<Interrupt>,
    limits: Limits,
    /// The driver does not flush, so each write is durable when it completes.
    is_written_through: bool,
    stop: Arc<Stop>,
}

/// The reasons why a well-formed request failed.
enum Failure {
    NoRam,
    Short,
    Host(io::Error),
    /// The device is reset, and the driver expects no answer.
    Stopped,
}

impl Disk {
    fn work(self, events: &Epoll, kick: &EventFd, service: &Service<ActiveQueue>) {
        while self.wait(events, kick) {
            self.counters.wake_ups.add(1);
            if let Err(error) = self.serve(service) {
                return self.interrupt.broken(&"a disk", &error);
            }
        }
    }

    /// Waits for the driver. Returns whether the thread should continue.
    fn wait(&self, events: &Epoll, kick: &EventFd) -> bool {
        let mut happened = [EpollEvent::default(); 2];
        loop {
            match events.wait(-1, &mut happened) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for a disk's driver");
                    self.interrupt.needs_reset();
                    return false;
                }
                Ok(_) => {
                    let _ = kick.read();
                    return !self.is_stopped();
                }
            }
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.is_said.load(Ordering::Acquire)
    }

    /// Serves the queue until it is empty, or the disk is lost.
    fn serve(&self, service: &Service<ActiveQueue>) -> Result<(), BrokenQueue> {
        loop {
            service.work().queue.disable_notification(&*self.memory.access())?;
            while self.serve_one(&mut service.work())? {}
            // A disk that rests is told when it goes on.
            if self.is_stopped() || self.image.rests() {
                return Ok(());
            }
            let mut queue = service.work();
            let access = self.memory.access();
            // A request that came after the last look, and before notifications were enabled again,
            // caused no notification.
            if !queue.queue.enable_notification(&*access)? || self.is_lost() {
                return Ok(());
            }
        }
    }

    /// Whether the disk is another VM's for good, for a caller inside the gate. The VM that gives a disk up is paused,
    /// and its gate is closed until it has taken the disk back or ends.
    fn is_lost(&self) -> bool {
        self.memory.gate().is_open_within(Duration::ZERO) && !self.image.is_ours()
    }

    /// Serves one request. Returns whether to look for another.
    fn serve_one(&self, queue: &mut ActiveQueue) -> Result<bool, BrokenQueue> {
        if !self.image.takes_requests() {
            return Ok(false);
        }
        let taken = queue.take(&self.memory, |chain| Request::read(chain, self.limits))?;
        let Some((head, request)) = taken else { return Ok(false) };
        let Some(written) = self.answer(request) else { return Ok(false) };
        queue.complete(&self.memory, &self.interrupt, head, written)?;
        Ok(!self.is_stopped())
    }

    /// Executes a request and writes its status. Returns the number of the chain's writable bytes that were
    /// written, from the first one on (2.7.8.2); `None` where the driver expects no answer: the device was reset during
    /// the request, or its VM continues elsewhere.
    fn answer(&self, Request { operation, status }: Request) -> Option<u32> {
        // The gate is open again at the end of a VM that has moved: a request for which the thread waited there is the
        // other VM's.
        if !self.image.is_ours() {
            return None;
        }
        let done = match operation {
            Ok(operation) => self.carry_out(&operation),
            Err(refusal) => Err(self.refuse(refusal)),
        };
        if self.is_stopped() {
            return None;
        }
        let (code, data_bytes) = match done {
            Ok(data_bytes) => (OK, Some(data_bytes)),
            Err(code) => (code, None),
        };
        let status = status.map(|at| self.memory.access().write_obj(code, GuestAddress(at)).is_ok());
        // The status lies behind the data: it counts only where all data bytes were written.
        Some(if status == Some(true) { data_bytes.map_or(0, |bytes| bytes.saturating_add(1)) } else { 0 })
    }

    /// Executes a request. Returns the number of data bytes written into RAM, or the status of the failure.
    fn carry_out(&self, operation: &Operation) -> Result<u32, u8> {
        let counters = &self.counters;
        let done = match operation {
            Operation::Read(offset, buffers) => self.read(*offset, buffers),
            Operation::Write(offset, buffers) => self.write(*offset, buffers),
            Operation::Flush => self.image.flush().map_err(Failure::Host).map(|()| {
                counters.flushes.add(1);
                0
            }),
            Operation::Id(buffers) => self.id(buffers),
            Operation::Discard(ranges) => {
                let discard = |range: &Range| self.image.discard(range.offset, range.bytes);
                self.zero(ranges, discard).map(|bytes| {
                    counters.discards.add(1);
                    counters.discarded_bytes.add(bytes);
                    0
                })
            }
            Operation::WriteZeroes(ranges) => {
                let is_stopped = || self.is_stopped();
                let zero =
                    |range: &Range| self.image.write_zeroes(range.offset, range.bytes, range.may_unmap, &is_stopped);
                self.zero(ranges, zero).map(|bytes| {
                    counters.zeroings.add(1);
                    counters.zeroed_bytes.add(bytes);
                    0
                })
            }
        };
        done.map_err(|failure| self.fail(&failure))
    }

    fn read(&self, offset: u64, buffers: &Buffers) -> Result<u32, Failure> {
        self.transfer(offset, buffers, |pieces, at| self.image.read_at(pieces, at))?;
        self.counters.reads.add(1);
        self.counters.read_bytes.add(buffers.bytes());
        Ok(buffers.bytes() as u32)
    }

    fn write(&self, offset: u64, buffers: &Buffers) -> Result<u32, Failure> {
        self.transfer(offset, buffers, |pieces, at| self.image.write_at(pieces, at))?;
        if self.is_written_through {
            self.image.flush().map_err(Failure::Host)?;
        }
        self.counters.writes.add(1);
        self.counters.written_bytes.add(buffers.bytes());
        Ok(0)
    }

    /// Moves all bytes of the buffers, piece by piece, each in its own access inside the gate. Each access resolves
    /// the buffers again: between two pieces nothing of guest RAM is held.
    fn transfer(
        &self,
        offset: u64,
        buffers: &Buffers,
        move_pieces: impl Fn(&[Piece<'_>], u64) -> io::Result<usize>,
    ) -> Result<(), Failure> {
        let (all, mut done) = (buffers.bytes(), 0);
        while done < all {
            if self.is_stopped() {
                return Err(Failure::Stopped);
            }
            let access = self.memory.access();
            let pieces = next_pieces(&access, buffers, done)?;
            match move_pieces(&pieces, offset + done) {
                Ok(0) => return Err(Failure::Short),
                Ok(moved) => done += moved as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::Host(error)),
            }
        }
        Ok(())
    }

    fn id(&self, buffers: &Buffers) -> Result<u32, Failure> {
        let access = self.memory.access();
        let mut left = self.image.id().as_slice();
        let mut written = 0;
        for buffer in buffers.from(0) {
            let (now, later) = left.split_at(left.len().min(buffer.bytes as usize));
            access.write_slice(now, GuestAddress(buffer.address)).map_err(|_| Failure::NoRam)?;
            written += now.len() as u32;
            left = later;
        }
        self.counters.ids.add(1);
        Ok(written)
    }

    /// Applies `one` to pieces of the disk. Returns their total length in bytes.
    fn zero(&self, ranges: &[Range], one: impl Fn(&Range) -> io::Result<()>) -> Result<u64, Failure> {
        let mut bytes = 0;
        for range in ranges.iter().filter(|range| range.bytes > 0) {
            if self.is_stopped() {
                return Err(Failure::Stopped);
            }
            one(range).map_err(Failure::Host)?;
            bytes += range.bytes;
        }
        if self.is_written_through {
            self.image.flush().map_err(Failure::Host)?;
        }
        Ok(bytes)
    }

    fn refuse(&self, refusal: Refusal) -> u8 {
        let counters = &self.counters;
        let counter = match refusal {
            Refusal::Malformed => &counters.refused_malformed,
            Refusal::BeyondEnd => &counters.refused_beyond_end,
            Refusal::ReadOnly => &counters.refused_read_only,
            Refusal::Unsupported => &counters.refused_unsupported,
        };
        counter.add(1);
        refusal.status()
    }

    /// Counts a failure. The first of each kind of host failure is logged, because the guest does not report it.
    fn fail(&self, failure: &Failure) -> u8 {
        match failure {
            Failure::NoRam => drop(self.counters.failed_no_ram.add(1)),
            Failure::Short => {
                if self.counters.failed_short.add(1) == 0 {
                    let bytes = self.image.bytes();
                    tracing::warn!(
                        bytes,
                        "a disk's file was shortened after its guest started: reads beyond its end fail"
                    );
                }
            }
            Failure::Host(error) => {
                if self.counters.failed_host.add(1) == 0 {
                    tracing::warn!(%error, "the host failed a disk request; the guest sees the error, and further \
                        failures are only counted");
                }
            }
            Failure::Stopped => {}
        }
        FAILED
    }
}

fn wait_for(events: &[&EventFd]) -> io::Result<Epoll> {
    let epoll = Epoll::new()?;
    for event in events {
        epoll.ctl(ControlOperation::Add, event.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
    }
    Ok(epoll)
}

/// The part of the buffers that is moved next: from byte `done` on, at most [`BYTES_AT_ONCE`] in
/// [`PIECES_MAX`] pieces.
fn next_pieces<'a>(access: &'a Access<'_>, buffers: &Buffers, done: u64) -> Result<Vec<Piece<'a>>, Failure> {
    let mut pieces = Vec::new();
    let mut room = BYTES_AT_ONCE;
    for buffer in buffers.from(done) {
        let bytes = room.min(u64::from(buffer.bytes));
        // A buffer may lie across ranges of RAM, and then consists of several pieces.
        for piece in access.get_slices(GuestAddress(buffer.address), bytes as usize) {
            pieces.push(piece.map_err(|_| Failure::NoRam)?);
        }
        room -= bytes;
        if room == 0 || pieces.len() >= PIECES_MAX {
            break;
        }
    }
    pieces.truncate(PIECES_MAX);
    Ok(pieces)
}
