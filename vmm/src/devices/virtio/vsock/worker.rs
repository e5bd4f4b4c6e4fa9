//! The service of the device on the devices' thread: the guest's packets go to their connections, and the
//! connections' packets to the guest.

use std::sync::Arc;

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio_queue::{QueueOwnedT, QueueT};
use vmm_sys_util::epoll::EventSet;

use super::connections::Connections;
use super::counters::Counting;
use super::host::HostSocket;
use super::packet::{HEADER_BYTES, Header};
use crate::devices::virtio::counters::add;
use crate::devices::virtio::pieces::{Piece, collect, from, read_at, up_to, write_at};
use crate::devices::virtio::queue::Chain;
use crate::devices::virtio::used::{NotifiedUpTo, publish};
use crate::devices::virtio::{ActiveQueue, BrokenQueue, Interrupt};
use crate::dma::DeviceMemory;
use crate::kvm::guest_memory::GuestView;

/// Number of packets of either direction before other work on the thread has its turn.
const PACKETS_AT_ONCE: usize = 64;

/// Largest number of data bytes in one packet, as in Linux (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`,
/// include/linux/virtio_vsock.h).
const DATA_BYTES_MAX: usize = 64 << 10;

/// Sources of an event, by number; higher numbers are the sockets' tokens.
const TO_GUEST: u32 = 0;
const FROM_GUEST: u32 = 1;
const HOST: u32 = 2;
const EVENTS: u32 = 3;

/// The event that all connections have ended, as it lies in its buffer (section 5.10.6.7,
/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`).
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// The device's worker: see the module.
pub(super) struct Worker {
    pub(super) memory: DeviceMemory,
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) host: Arc<HostSocket>,
    pub(super) counting: Arc<Counting>,
    pub(super) connections: Connections,
    pub(super) to_guest: ActiveQueue,
    pub(super) from_guest: ActiveQueue,
    /// Queue of events; `None` where the driver did not set it up.
    pub(super) events: Option<ActiveQueue>,
    /// Whether the guest has still to learn that all connections have ended.
    pub(super) has_reset: bool,
    pub(super) notified: [NotifiedUpTo; 2],
    /// Whether the guest broke a queue; then the worker stops.
    pub(super) is_broken: bool,
    /// Whether file descriptors ran out: the programs that wait are accepted after another event, or when one more
    /// connects.
    pub(super) is_accepting_paused: bool,
}

impl Worker {
    /// The queues that the driver set up, with their numbers.
    pub(super) fn queues(&self) -> impl Iterator<Item = (usize, &ActiveQueue)> {
        [&self.to_guest, &self.from_guest].into_iter().chain(&self.events).enumerate()
    }

    /// Does all pending work, within bounds.
    fn serve(&mut self, ops: &mut EventOps<'_>) -> Result<(), BrokenQueue> {
        self.report_reset()?;
        let has_more = self.take_packets(ops)?;
        let was_cut = self.give_packets(ops)?;
        // Packets of the guest that had to wait for room among the resets, and the rest of a long turn.
        if was_cut || has_more && self.connections.takes_packets() {
            let _ = self.from_guest.kick.write(1);
        }
        Ok(())
    }

    /// Tells the driver that all connections have ended, once it has a buffer for that.
    fn report_reset(&mut self) -> Result<(), BrokenQueue> {
        let Some(events) = self.events.as_mut().filter(|_| self.has_reset) else { return Ok(()) };
        let write = |chain: Chain<'_>| -> Result<u32, BrokenQueue> {
            let mut pieces = Vec::new();
            collect(chain.clone().writable(), chain.memory(), &mut pieces)?;
            Ok(write_at(&pieces, 0, &TRANSPORT_RESET) as u32)
        };
        let mut broken = None;
        let write = |chain: Chain<'_>| {
            write(chain).unwrap_or_else(|error| {
                broken = Some(error);
                0
            })
        };
        self.has_reset = !events.serve_one(&self.memory, &self.interrupt, write)?;
        broken.map_or(Ok(()), Err)
    }

    /// Takes packets of the guest. Returns whether there may be more.
    fn take_packets(&mut self, ops: &mut EventOps<'_>) -> Result<bool, BrokenQueue> {
        let access = self.memory.access();
        let (view, queue): (&GuestView, _) = (&access, &mut self.from_guest.queue);
        let mut has_more = true;
        queue.disable_notification(view)?;
        for _ in 0..PACKETS_AT_ONCE {
            if !self.connections.takes_packets() {
                break;
            }
            let Some(chain) = queue.iter(view)?.next() else {
                if queue.enable_notification(view)? {
                    continue;
                }
                has_more = false;
                break;
            };
            let head = chain.head_index();
            let mut pieces = Vec::new();
            let bytes = collect(chain.readable(), view, &mut pieces)?;
            match packet(&pieces, bytes) {
                Some((header, data)) => self.connections.on_packet(&header, &data, ops),
                None => add(&self.counting.malformed, 1),
            }
            publish(queue, view, &[(head, 0)])?;
        }
        if self.notified[1].is_due(queue, view)? {
            self.interrupt.used();
        }
        Ok(has_more)
    }

    /// Gives the guest packets, as far as it has buffers for them. Returns whether there would be more to give.
    fn give_packets(&mut self, ops: &mut EventOps<'_>) -> Result<bool, BrokenQueue> {
        let access = self.memory.access();
        let (view, queue): (&GuestView, _) = (&access, &mut self.to_guest.queue);
        let mut was_cut = true;
        queue.disable_notification(view)?;
        for _ in 0..PACKETS_AT_ONCE {
            if !self.connections.has_packet() {
                was_cut = false;
                break;
            }
            let Some(chain) = queue.iter(view)?.next() else {
                if queue.enable_notification(view)? {
                    continue;
                }
                was_cut = false;
                break;
            };
            let head = chain.head_index();
            let mut pieces = Vec::new();
            let bytes = collect(chain.writable(), view, &mut pieces)?;
            // Room for a header and some data is required: with less, a connection would stall forever.
            if bytes <= HEADER_BYTES {
                return Err(virtio_queue::Error::InvalidChain.into());
            }
            let room: Vec<_> = up_to(from(&pieces, HEADER_BYTES), DATA_BYTES_MAX).collect();
            let Some(header) = self.connections.next_packet(&room, ops) else {
                queue.go_to_previous_position();
                continue;
            };
            write_at(&pieces, 0, &header.to_bytes());
            publish(queue, view, &[(head, HEADER_BYTES as u32 + header.bytes)])?;
        }
        if self.notified[0].is_due(queue, view)? {
            self.interrupt.used();
        }
        Ok(was_cut)
    }

    /// Accepts programs again, also those that have connected before. Between two calls each program causes one event.
    fn accept_programs(&mut self, ops: &mut EventOps<'_>) {
        self.is_accepting_paused = ops.modify(self.programs()).is_err();
    }

    /// The event of a program that connects. One that cannot be accepted would cause it without end if it were not
    /// edge-triggered (epoll(7)).
    fn programs(&self) -> Events {
        Events::with_data(&*self.host, HOST, EventSet::IN | EventSet::EDGE_TRIGGERED)
    }

    fn give_up(&mut self, error: &BrokenQueue, ops: &mut EventOps<'_>) {
        add(&self.counting.broken_queues, 1);
        self.is_broken = true;
        self.connections.clear(ops);
        let _ = ops.remove(Events::with_data(&*self.host, HOST, EventSet::empty()));
        for (_, queue) in self.queues() {
            let _ = ops.remove(Events::new(&queue.kick, EventSet::empty()));
        }
        self.interrupt.broken(&"the device of sockets between guest and host", error);
    }
}

/// The packet in a chain; `None` where it is shorter than its header claims, or too long.
fn packet<'a>(pieces: &[Piece<'a>], bytes: usize) -> Option<(Header, Vec<Piece<'a>>)> {
    let mut header = [0; HEADER_BYTES];
    if read_at(pieces, 0, &mut header) < HEADER_BYTES {
        return None;
    }
    let header = Header::read(&header);
    let data = header.bytes as usize;
    let is_whole = data <= DATA_BYTES_MAX && data <= bytes - HEADER_BYTES;
    is_whole.then(|| (header, up_to(from(pieces, HEADER_BYTES), data).collect()))
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let events = [
            Events::with_data(&self.to_guest.kick, TO_GUEST, EventSet::IN),
            Events::with_data(&self.from_guest.kick, FROM_GUEST, EventSet::IN),
            self.programs(),
        ];
        let with_buffers = self.events.iter().map(|queue| Events::with_data(&queue.kick, EVENTS, EventSet::IN));
        for events in events.into_iter().chain(with_buffers) {
            if let Err(error) = ops.add(events) {
                tracing::error!(%error, "cannot wait for the sockets between guest and host");
                return self.interrupt.needs_reset();
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if self.is_broken {
            return;
        }
        match events.data() {
            TO_GUEST => drop(self.to_guest.kick.read()),
            FROM_GUEST => drop(self.from_guest.kick.read()),
            EVENTS => drop(self.events.as_ref().map(|queue| queue.kick.read())),
            HOST => {
                self.is_accepting_paused = !self.connections.on_program(ops);
                if !self.is_accepting_paused {
                    self.accept_programs(ops);
                }
            }
            token => self.connections.on_socket(token, events.event_set(), ops),
        }
        if let Err(error) = self.serve(ops) {
            return self.give_up(&error, ops);
        }
        if self.is_accepting_paused && events.data() != HOST {
            self.accept_programs(ops);
        }
    }
}
