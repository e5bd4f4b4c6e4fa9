//! A source of random bytes (Virtual I/O Device 1.2, section 5.4): the host's own, up to the length of
//! the driver's buffers.
//!
//! ```text
//!   chain of writable buffers ── 4 KiB at a time ◀── getrandom(2)
//!                                at most 64 KiB of one chain, the rest stays as it was
//! ```
//!
//! The kernel's source does not run dry (`random(7)`). The only limit is the time that one request may occupy
//! the devices' thread.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::epoll::EventSet;

use super::queue::Chain;
use super::service::{Served, Service};
use super::{
    ActivateError, Activation, ActiveQueue, DeviceKind, DeviceState, Interrupt, NotAtRest, Rest, RestoreDeviceError,
    Subscription, VirtioDevice,
};
use crate::dma::DeviceMemory;
use crate::sys::random;

/// Sizes of the queues. Linux asks for about 64 bytes at a time; a few requests are enough.
const QUEUE_SIZES: [u16; 1] = [64];
/// Largest number of bytes for one chain: a request for gigabytes must not delay other devices, or a pause
/// of the VM.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Number of chains served before other devices have their turn.
const CHAINS_AT_ONCE: usize = 16;
/// Number of random bytes generated at once.
const PIECE_BYTES: usize = 4096;

/// The entropy device.
#[derive(Debug, Default)]
pub struct Entropy {
    counters: Arc<EntropyCounters>,
    serving: Option<(Subscription, Arc<Service<Serving>>)>,
}

/// Counters of the device, updated while it works.
#[derive(Debug, Default)]
pub struct EntropyCounters {
    requests: AtomicU64,
    bytes: AtomicU64,
    chains_malformed: AtomicU64,
    host_failures: AtomicU64,
}

/// Values of an entropy device's counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct EntropyStatistics {
    /// Number of requests.
    pub requests: u64,
    /// Number of random bytes given.
    pub bytes: u64,
    /// Number of chains with buffers outside RAM.
    pub chains_malformed: u64,
    /// Number of requests for which the host had no random bytes.
    pub host_failures: u64,
}

impl EntropyCounters {
    /// Values of the counters now.
    pub fn statistics(&self) -> EntropyStatistics {
        let Self { requests, bytes, chains_malformed, host_failures } = self;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EntropyStatistics {
            requests: load(requests),
            bytes: load(bytes),
            chains_malformed: load(chains_malformed),
            host_failures: load(host_failures),
        }
    }
}

impl Entropy {
    /// The device's counters, also after it is handed over.
    pub fn counters(&self) -> Arc<EntropyCounters> {
        Arc::clone(&self.counters)
    }
}

impl VirtioDevice for Entropy {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Entropy
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// Reads nothing: the device has no configuration (5.4.4).
    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, queues, interrupt, io_thread, .. } = activation;
        let queue = queues.into_iter().next().filter(ActiveQueue::is_ready).ok_or(ActivateError::NoQueue(0))?;
        let counters = Arc::clone(&self.counters);
        let service = Service::new(Serving { queue, memory, interrupt, counters });
        self.serving = Some((io_thread.add(Box::new(Served(Arc::clone(&service))))?, service));
        Ok(())
    }

    fn reset(&mut self) {
        self.serving = None;
    }

    /// A request that waits stays in the ring.
    fn rest(&self, until: Instant) -> Result<Rest, NotAtRest> {
        let Some((_, service)) = &self.serving else { return Ok(Rest::idle(DeviceState::Entropy)) };
        let resting = service.rest(until).ok_or(NotAtRest::Busy)?;
        let queues = vec![(0, resting.queue.queue.state())];
        Ok(Rest::held(DeviceState::Entropy, queues, Box::new(resting)))
    }

    fn restore(&mut self, _: &DeviceState) -> Result<(), RestoreDeviceError> {
        Ok(())
    }
}

/// The service of the queue, on the devices' thread.
#[derive(Debug)]
struct Serving {
    queue: ActiveQueue,
    memory: DeviceMemory,
    interrupt: Arc<Interrupt>,
    counters: Arc<EntropyCounters>,
}

impl MutEventSubscriber for Serving {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Err(error) = ops.add(Events::new(&self.queue.kick, EventSet::IN)) {
            tracing::error!(%error, "cannot wait for the entropy device's driver");
            self.interrupt.needs_reset();
        }
    }

    fn process(&mut self, _: Events, ops: &mut EventOps<'_>) {
        let _ = self.queue.kick.read();
        let Self { queue, memory, interrupt, counters } = self;
        match queue.serve_some(memory, interrupt, CHAINS_AT_ONCE, |chain| counters.fill(chain)) {
            Ok(true) => {}
            // Schedules the rest after the other devices had their turn.
            Ok(false) => drop(queue.kick.write(1)),
            Err(error) => {
                interrupt.broken(&"the entropy device", &error);
                let _ = ops.remove(Events::new(&queue.kick, EventSet::IN));
            }
        }
    }
}

impl EntropyCounters {
    /// Fills the buffers of a chain as far as possible, and returns the number of bytes written.
    fn fill(&self, chain: Chain<'_>) -> u32 {
        let count = |counter: &AtomicU64, by: usize| counter.fetch_add(by as u64, Ordering::Relaxed);
        count(&self.requests, 1);
        let memory = chain.memory();
        let Ok(mut writer) = chain.clone().writer(memory) else {
            count(&self.chains_malformed, 1);
            return 0;
        };
        let wanted = writer.available_bytes().min(REQUEST_BYTES_MAX);
        let mut random = [0; PIECE_BYTES];
        while writer.bytes_written() < wanted {
            let piece = &mut random[..PIECE_BYTES.min(wanted - writer.bytes_written())];
            if random::fill(piece).is_err() || writer.write_all(piece).is_err() {
                count(&self.host_failures, 1);
                break;
            }
        }
        let written = writer.bytes_written();
        count(&self.bytes, written);
        written as u32
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_driver::{Driver, Piece, RAM_BYTES};
    use super::*;

    const ROOM: u64 = 0x10_0000;

    fn started() -> (Driver, Arc<EntropyCounters>) {
        let device = Entropy::default();
        let counters = device.counters();
        let mut driver = Driver::new(Box::new(device));
        driver.start(1 << VIRTIO_RING_F_EVENT_IDX);
        (driver, counters)
    }

    #[test]
    fn buffers_are_filled_with_random_bytes() {
        let (mut driver, counters) = started();
        let used = driver.request(0, &[Piece::write(ROOM, 64), Piece::write(ROOM + 0x100, 5000)]);
        assert_eq!(used.written, 5064);
        let (first, second) = (driver.bytes(ROOM, 32), driver.bytes(ROOM + 32, 32));
        assert_ne!(first, second);
        assert_ne!(driver.bytes(ROOM + 0x100 + 4968, 32), [0; 32], "the last byte is filled");
        assert_eq!(driver.bytes(ROOM + 0x100 + 5000, 32), [0; 32], "bytes behind the buffer are unchanged");
        let statistics = counters.statistics();
        assert_eq!((statistics.requests, statistics.bytes), (1, 5064));
    }

    #[test]
    fn one_request_gets_at_most_64_kib() {
        let (mut driver, _) = started();
        let used = driver.request(0, &[Piece::write(ROOM, 0x2_0000)]);
        assert_eq!(used.written as usize, REQUEST_BYTES_MAX);
        assert_eq!(driver.bytes(ROOM + 0x1_0000, 64), [0; 64]);
    }

    #[test]
    fn buffers_outside_ram_or_read_only_get_nothing() {
        let (mut driver, counters) = started();
        assert_eq!(driver.request(0, &[Piece::write(RAM_BYTES - 8, 64)]).written, 0);
        assert_eq!(driver.request(0, &[Piece::read(ROOM, 64)]).written, 0);
        assert_eq!(driver.request(0, &[Piece::write(ROOM, 0)]).written, 0);
        assert_eq!((counters.statistics().chains_malformed, counters.statistics().bytes), (1, 0));
        assert_eq!(driver.request(0, &[Piece::write(ROOM, 16)]).written, 16, "the device still serves");
    }

    #[test]
    fn the_device_serves_again_after_a_reset() {
        let (mut driver, counters) = started();
        for _ in 0..3 {
            assert_eq!(driver.request(0, &[Piece::write(ROOM, 16)]).written, 16);
            driver.reset();
            driver.start(0);
        }
        assert_eq!(counters.statistics().requests, 3);
    }

    #[test]
    fn a_broken_ring_needs_a_reset() {
        let (mut driver, _) = started();
        driver.claim_available(0, 65);
        driver.wait_for_needs_reset();
        driver.reset();
        driver.start(0);
        assert_eq!(driver.request(0, &[Piece::write(ROOM, 16)]).written, 16);
    }
}
