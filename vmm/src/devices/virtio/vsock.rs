//! Sockets between the guest and programs of the host (Virtual I/O Device 1.2, section 5.10): `AF_VSOCK` in the
//! guest, Unix sockets here.
//!
//! ```text
//!   guest: connect to port P of the host    ──▶ connected to the Unix socket PATH_P
//!   host:  connect to PATH, say "CONNECT P" ──▶ connected to port P of the guest, told "OK" and a port of its own
//!
//!   queue 1 ──▶ [`worker`] ──▶ [`connections`] ──▶ [`connection`] ──▶ a program of the host
//!   queue 0 ◀──                                                  ◀──
//! ```
//!
//! It needs no kernel module of the host and no root, and any program that can use a Unix socket can be
//! the other end.

mod connect_request;
mod connection;
mod connections;
pub mod counters;
pub mod host;
pub mod packet;
mod worker;

use std::sync::Arc;
use std::time::Instant;

pub use counters::VsockCounters;
pub use host::{HostSocket, HostSocketError};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use self::connections::Connections;
use self::counters::Counting;
use self::worker::Worker;
use super::saved::unless_equal;
use super::service::{Served, Service};
use super::used::NotifiedUpTo;
use super::{
    ActivateError, Activation, DeviceKind, DeviceState, NotAtRest, Rest, RestoreDeviceError, Subscription, VirtioDevice,
};

/// Numbers of entries of the queues, as in the kernel's own device (drivers/vhost/vsock.c). The third, of events,
/// tells a guest that it was restored, and that its connections have ended.
const QUEUE_SIZES: [u16; 3] = [128; 3];

/// Feature bit for stream sockets (section 5.10.3).
const VIRTIO_VSOCK_F_STREAM: u32 = 0;

/// First address of a guest: 0 to 2 mean hypervisor, local and host (vsock(7)).
pub const GUEST_CID_MIN: u32 = 3;
/// Last address of a guest: all ones mean any.
pub const GUEST_CID_MAX: u32 = u32::MAX - 1;

/// The guest's end of the sockets.
pub struct Vsock {
    /// Service of the sockets. Declared first so that it ends first: the last owner of the sockets removes a file,
    /// which the service's thread may not.
    running: Option<(Subscription, Arc<Service<Worker>>)>,
    /// Whether the guest has to learn at the next start that its connections have ended.
    is_restored: bool,
    cid: u32,
    host: Arc<HostSocket>,
    counting: Arc<Counting>,
}

/// A handle on the device's counters that remains after the device is given to a VM.
#[derive(Clone, Debug)]
pub struct VsockHandle {
    counting: Arc<Counting>,
}

impl VsockHandle {
    /// Values of the device's counters now.
    pub fn counters(&self) -> VsockCounters {
        self.counting.statistics()
    }
}

impl Vsock {
    /// Creates the device for a guest with this address, from [`GUEST_CID_MIN`] to [`GUEST_CID_MAX`], and for
    /// programs that connect to `host`.
    pub fn new(cid: u32, host: HostSocket) -> Vsock {
        Vsock { cid, host: Arc::new(host), counting: Arc::default(), running: None, is_restored: false }
    }

    /// Handle on the counters, valid also after the device is given to a VM.
    pub fn handle(&self) -> VsockHandle {
        VsockHandle { counting: Arc::clone(&self.counting) }
    }
}

impl VirtioDevice for Vsock {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Vsock
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_VSOCK_F_STREAM | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// Reads the guest's address, eight bytes (section 5.10.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = u64::from(self.cid).to_le_bytes();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(space.len());
        data.iter_mut().zip(&space[from..]).for_each(|(to, byte)| *to = *byte);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut queues = activation.queues.into_iter();
        let mut next = |number| queues.next().filter(|queue| queue.is_ready()).ok_or(ActivateError::NoQueue(number));
        let (to_guest, from_guest) = (next(0)?, next(1)?);
        let (events, notified) = (next(2).ok(), [&to_guest, &from_guest].map(|queue| NotifiedUpTo::now(&queue.queue)));
        let connections = Connections::new(u64::from(self.cid), Arc::clone(&self.host), Arc::clone(&self.counting));
        let worker = Worker {
            memory: activation.memory,
            interrupt: activation.interrupt,
            host: Arc::clone(&self.host),
            counting: Arc::clone(&self.counting),
            connections,
            to_guest,
            from_guest,
            events,
            has_reset: std::mem::take(&mut self.is_restored),
            notified,
            is_broken: false,
            is_accepting_paused: false,
        };
        let service = Service::new(worker);
        self.running = Some((activation.io_thread.add(Box::new(Served(Arc::clone(&service))))?, service));
        Ok(())
    }

    fn reset(&mut self) {
        (self.running, self.is_restored) = (None, false);
    }

    fn rest(&self, until: Instant) -> Result<Rest, NotAtRest> {
        let device = DeviceState::Vsock { cid: self.cid };
        let Some((_, service)) = &self.running else { return Ok(Rest::idle(device)) };
        let resting = service.rest(until).ok_or(NotAtRest::Busy)?;
        let queues = resting.queues().map(|(number, queue)| (number, queue.queue.state())).collect();
        Ok(Rest::held(device, queues, Box::new(resting)))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreDeviceError> {
        let DeviceState::Vsock { cid } = state else { return Ok(()) };
        self.is_restored = true;
        unless_equal("address", cid, &self.cid, "pass the same cid= to --vsock")
    }
}

#[cfg(test)]
mod tests;
