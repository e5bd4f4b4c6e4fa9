//! A network card (Virtual I/O Device 1.2, section 5.1) that is connected to a tap of the host.
//!
//! ```text
//!   guest ─ queue 1 ─▶ [`transmit`] ─ writev ─▶ tap ─▶ the host's network
//!         ◀─ queue 0 ─ [`receive`] ◀── readv ──┘          both on the devices' thread: [`worker`]
//! ```
//!
//! Frames pass between guest RAM and the tap without a copy by the VMM. Each has a header in which guest and kernel
//! name missing checksums and unsplit TCP segments: a virtual card is fast because it leaves this work out.

pub mod counters;
pub mod mac;
mod receive;
mod shared;
pub mod tap;
mod transmit;
mod worker;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub use counters::NetCounters;
pub use mac::{Mac, MacError};
pub use tap::{Offload, Tap, TapError};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
    VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use self::counters::Counting;
use self::receive::Receiver;
use self::shared::Shared;
use self::transmit::Transmitter;
use self::worker::Worker;
use super::saved::unless_equal;
use super::service::{Served, Service};
use super::{
    ActivateError, Activation, DeviceKind, DeviceState, NotAtRest, Rest, RestoreDeviceError, Subscription, VirtioDevice,
};

/// Length in bytes of the header before each frame: `struct virtio_net_hdr` with its last field, which every device
/// of version 1 has (section 5.1.6).
pub(crate) const HEADER_BYTES: usize = 12;

/// Length in bytes of the longest frame with its header: 65550 bytes of which 14 are Ethernet's, so that an IP
/// packet has its greatest length (section 5.1.6.3.1 has the same sum), and four for a VLAN.
const FRAME_BYTES_MAX: usize = HEADER_BYTES + 65_550 + VLAN_BYTES;
const ETHERNET_BYTES: usize = 14;
const VLAN_BYTES: usize = 4;

/// Number of entries of each queue, as in QEMU's cards. Twice that was not faster for a tap: its own queue has 500
/// to 1000 frames.
const QUEUE_SIZES: [u16; 2] = [256; 2];

/// Smallest MTU that a card can report: the least that IPv4 allows a link (RFC 791; section 5.1.4.1).
const MTU_MIN: u32 = 68;

/// The other end of a card's cable: a file descriptor where one read or write moves one frame with its
/// header. Neither blocks.
pub trait Link: AsFd + Send + Sync {
    /// Tells the link which offloads the guest accepts.
    ///
    /// # Errors
    /// The kernel's error: `EBADFD` where the link has ended.
    fn set_offload(&self, offload: Offload) -> io::Result<()>;
}

/// The properties of a card.
#[derive(Clone, Copy, Debug)]
pub struct NetConfig {
    /// Address of the card.
    pub mac: Mac,
    /// Largest packet of the link, in bytes.
    pub mtu: u32,
}

/// A virtio network card.
pub struct Net {
    link: Arc<dyn Link>,
    config: NetConfig,
    counting: Arc<Counting>,
    is_up: Arc<AtomicBool>,
    running: Option<(Subscription, Arc<Service<Worker>>)>,
}

/// A handle on a card's counters that remains after the card is given to a VM.
#[derive(Clone, Debug)]
pub struct NetHandle {
    counting: Arc<Counting>,
}

impl NetHandle {
    /// Values of the card's counters now.
    pub fn counters(&self) -> NetCounters {
        self.counting.statistics()
    }
}

impl Net {
    /// Creates a card on `link`, which must not block.
    pub fn new(link: Arc<dyn Link>, config: NetConfig) -> Net {
        let is_up = Arc::new(AtomicBool::new(true));
        Net { link, config, counting: Arc::default(), is_up, running: None }
    }

    /// Handle on the counters, valid also after the card is given to a VM.
    pub fn handle(&self) -> NetHandle {
        NetHandle { counting: Arc::clone(&self.counting) }
    }

    /// `struct virtio_net_config` as far as the features make it valid (section 5.1.4): the address, the status,
    /// the number of queue pairs, which is one by default, and the MTU.
    fn config_space(&self) -> [u8; 12] {
        let status = if self.is_up.load(Ordering::Acquire) { VIRTIO_NET_S_LINK_UP as u16 } else { 0 };
        let mtu = u16::try_from(self.config.mtu).unwrap_or(u16::MAX);
        let mut bytes = [0; 12];
        bytes[..6].copy_from_slice(&self.config.mac.bytes());
        bytes[6..8].copy_from_slice(&status.to_le_bytes());
        bytes[8..10].copy_from_slice(&1_u16.to_le_bytes());
        bytes[10..].copy_from_slice(&mtu.to_le_bytes());
        bytes
    }

    /// Length of the longest frame that the link may deliver, in bytes.
    fn frame_bytes_max(&self, offload: Offload) -> usize {
        if offload.tcp4 || offload.tcp6 {
            return FRAME_BYTES_MAX;
        }
        let frame = HEADER_BYTES + ETHERNET_BYTES + VLAN_BYTES + self.config.mtu as usize;
        frame.min(FRAME_BYTES_MAX)
    }

    /// Creates the worker that serves the queues of an activated card.
    fn worker(&self, mut activation: Activation) -> Result<Worker, ActivateError> {
        if let Some(number) = activation.queues.iter().position(|queue| !queue.is_ready()) {
            return Err(ActivateError::NoQueue(number));
        }
        let offload = Offload {
            checksum: activation.has(VIRTIO_NET_F_GUEST_CSUM),
            tcp4: activation.has(VIRTIO_NET_F_GUEST_TSO4),
            tcp6: activation.has(VIRTIO_NET_F_GUEST_TSO6),
        };
        let is_mergeable = activation.has(VIRTIO_NET_F_MRG_RXBUF);
        // A link that has ended never comes back: each later driver finds it down, and is served.
        if self.is_up.load(Ordering::Acquire) {
            let what = "cannot set the offloads of its link";
            match self.link.set_offload(offload) {
                // It ended while the card had no driver.
                Err(error) if error.raw_os_error() == Some(libc::EBADFD) => {
                    self.is_up.store(false, Ordering::Release);
                    activation.interrupt.configuration_changed();
                }
                set => set.map_err(|source| ActivateError::Host { what, source })?,
            }
        }
        let transmit = activation.queues.pop().ok_or(ActivateError::NoQueue(1))?;
        let receive = activation.queues.pop().ok_or(ActivateError::NoQueue(0))?;
        let shared = Shared {
            memory: activation.memory,
            interrupt: activation.interrupt,
            link: Arc::clone(&self.link),
            counting: Arc::clone(&self.counting),
            is_up: Arc::clone(&self.is_up),
        };
        let receiver = Receiver::new(receive, is_mergeable, self.frame_bytes_max(offload));
        Ok(Worker::new(shared, receiver, Transmitter::new(transmit)))
    }
}

impl VirtioDevice for Net {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        let bits = [
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_STATUS,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_RING_F_EVENT_IDX,
        ];
        let mtu = if self.config.mtu >= MTU_MIN { 1 << VIRTIO_NET_F_MTU } else { 0 };
        bits.iter().fold(mtu, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = self.config_space();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(space.len());
        data.iter_mut().zip(&space[from..]).for_each(|(to, byte)| *to = *byte);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let io_thread = Arc::clone(&activation.io_thread);
        let service = Service::new(self.worker(activation)?);
        self.running = Some((io_thread.add(Box::new(Served(Arc::clone(&service))))?, service));
        Ok(())
    }

    fn reset(&mut self) {
        if self.running.take().is_some() {
            // A persistent tap is left as it was found: the next program that opens it may only
            // accept plain frames.
            let _ = self.link.set_offload(Offload::default());
        }
    }

    /// Buffers that were taken for a frame and stayed empty are in the ring again.
    fn rest(&self, until: Instant) -> Result<Rest, NotAtRest> {
        let device = DeviceState::Net { mac: self.config.mac.to_string(), mtu: self.config.mtu };
        let Some((_, service)) = &self.running else { return Ok(Rest::idle(device)) };
        let resting = service.rest(until).ok_or(NotAtRest::Busy)?;
        let queues = resting.queues().map(|queue| queue.queue.state());
        Ok(Rest::held(device, queues.into_iter().enumerate().collect(), Box::new(resting)))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreDeviceError> {
        let DeviceState::Net { mac, mtu } = state else { return Ok(()) };
        unless_equal("address", mac, &self.config.mac.to_string(), "add mac= to --net")?;
        unless_equal("MTU", mtu, &self.config.mtu, "set the tap's MTU with ip link")
    }
}

#[cfg(test)]
mod tests;
