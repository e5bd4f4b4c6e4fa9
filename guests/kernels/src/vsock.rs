//! Sockets: an echo server for programs of the host, over one connection after another.
//!
//! ```text
//!   host ── REQUEST to port 1024 ──▶ RESPONSE       data ─▶ a buffer ─▶ the same bytes back, from the buffer
//!        ── SHUTDOWN of its sending ─▶ SHUTDOWN of both, then its RST     SHUTDOWN of both ─▶ RST
//!   connect=P: first a connection to port P of the host, opened by the guest
//! ```
//!
//! It handles one packet after another, and one connection at a time (Virtual I/O Device 1.2, 5.10). The guest
//! stores nothing, so an echo needs the host's room: a program that sends more than that (256 KiB) without reading
//! loses its connection. When the guest has moved, the device says that its connection is over.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name};

use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::report::{self, Figure};
use crate::virtio::{BROKEN, Buffer, Device, Fault, Kind, Queue, device_error, queue_words};
use crate::{Arena, KernelError, Platform};

/// The sockets kernel in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("vsock"),
    summary: "echoes the bytes that programs of the host send to port 1024; needs a guest with --vsock",
    classes: &[],
    parameters: PARAMETERS,
    quick: "connections=1",
    figure: FIGURE,
    vcpus_max: 1,
    memory,
    run,
};

const FIGURE: Figure = Figure::literal("echoed", "bytes");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "connections",
        default: "1",
        unit: "count",
        meaning: "number of connections to serve before it ends",
    },
    Parameter {
        name: "connect",
        default: "not used",
        unit: "port",
        meaning: "host port that it connects to first; that connection counts too",
    },
];

/// Port for programs of the host, and source port of its own connection.
const PORT: u32 = 1024;
const HOST: u64 = 2;
/// Number of buffers for packets of the host.
const SLOTS: u64 = 16;
const SLOT_WORDS: usize = 512;
const HEADER_BYTES: u32 = 44;
/// The last word of a header is only half used.
const HEADER_WORDS: usize = 6;
const STREAM: u64 = 1;
/// Room that the guest claims to have; it passes all data on.
const ROOM: u32 = 1 << 18;

// Operations.
const REQUEST: u16 = 1;
const RESPONSE: u16 = 2;
const RESET: u16 = 3;
const SHUTDOWN: u16 = 4;
const DATA: u16 = 5;
const CREDIT_UPDATE: u16 = 6;
const CREDIT_REQUEST: u16 = 7;
/// Flags of a shutdown: neither receives nor sends any more.
const NOTHING_MORE: u32 = 3;

const QUEUE_WORDS: usize = queue_words(SLOTS);
/// Bytes of an event, in a word of its own.
const EVENT_BYTES: u32 = 4;
const EVENT_WORDS: usize = 1;
/// Words of the queues and buffers of the sockets.
pub(crate) const WORDS: usize = 3 * QUEUE_WORDS + HEADER_WORDS + EVENT_WORDS + SLOTS as usize * SLOT_WORDS;
const NEEDED: u64 = 8 * WORDS as u64;

fn memory<'a>(_: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Ok(MemoryNeed::Bytes(NEEDED))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let connections = parameters.count("connections", 1, 1 << 32)?.unwrap_or(1);
    let connect = parameters.count("connect", 1, u64::from(u32::MAX))?;
    if arena.bytes() < NEEDED {
        return Err(KernelError::ArenaTooSmall { needed: NEEDED, bytes: arena.bytes() });
    }
    platform.emit(&Message::Region { name: Name::literal("vsock"), address: arena.address(), bytes: NEEDED });
    let mut sockets = Sockets::start(platform, arena.words(), arena.address()).map_err(device_error)?;
    let done = report::phase(platform, report::COMPUTE, || sockets.serve(connections, connect.map(|port| port as u32)));
    let echoed = done.0.map_err(device_error)?;
    FIGURE.emit(platform, echoed as f64);
    // The host's program compares the bytes with those that it sent.
    report::verdict(platform, 0, 0)
}

/// Echoes until `is_over`, with the queues and buffers in these words. Returns the number of bytes it has sent back.
///
/// # Errors
/// [`Fault`] of the device.
pub(crate) fn echo_until(
    platform: &dyn Platform,
    words: &[AtomicU64],
    address: u64,
    is_over: &AtomicBool,
) -> Result<u64, Fault> {
    let mut sockets = Sockets::start(platform, words, address)?;
    let mut echoed = 0;
    while !is_over.load(Ordering::Acquire) {
        if sockets.from_host.has_used() {
            echoed += sockets.serve_packet()?;
        } else {
            spin_loop();
        }
    }
    Ok(echoed)
}

/// The header fields that matter here.
#[derive(Clone, Copy)]
struct Packet {
    host_port: u32,
    guest_port: u32,
    bytes: u32,
    operation: u16,
    flags: u32,
}

/// An open connection.
#[derive(Clone, Copy)]
struct Connection {
    host_port: u32,
    /// Number of received bytes, modulo 2^32.
    passed: u32,
}

struct Sockets<'m> {
    from_host: Queue<'m>,
    to_host: Queue<'m>,
    /// The device's messages that all connections are over.
    events: Queue<'m>,
    /// Connection that is open.
    open: Option<Connection>,
    /// Number of connections that are over.
    ended: u64,
    header: &'m [AtomicU64],
    header_address: u64,
    slots: &'m [AtomicU64],
    slots_address: u64,
    cid: u64,
}

impl<'m> Sockets<'m> {
    /// Starts the device, with its queues and buffers in these words, and offers it the buffers.
    fn start(platform: &'m dyn Platform, words: &'m [AtomicU64], address: u64) -> Result<Self, Fault> {
        let place = |word: usize| address + 8 * word as u64;
        let (queues, rest) = words.split_at(3 * QUEUE_WORDS);
        let (header, rest) = rest.split_at(HEADER_WORDS);
        let slots = &rest[EVENT_WORDS..];
        let header_address = place(3 * QUEUE_WORDS);
        let event_address = place(3 * QUEUE_WORDS + HEADER_WORDS);
        let slots_address = place(3 * QUEUE_WORDS + HEADER_WORDS + EVENT_WORDS);
        let device = Device::begin(platform, Kind::Sockets, 0)?;
        let queue = |number: u32| {
            let first = number as usize * QUEUE_WORDS;
            device.queue(number, SLOTS, &queues[first..], place(first))
        };
        let (from_host, to_host, events) = (queue(0)?, queue(1)?, queue(2)?);
        device.start()?;
        let cid = u64::from(device.configuration(0));
        let (open, ended) = (None, 0);
        let mut sockets =
            Self { from_host, to_host, events, open, ended, header, header_address, slots, slots_address, cid };
        for slot in 0..SLOTS {
            let buffer = Buffer { address: sockets.slot_address(slot), bytes: SLOT_WORDS as u32 * 8, is_written: true };
            sockets.from_host.describe(slot, buffer, None);
            sockets.from_host.offer(slot);
        }
        let event = Buffer { address: event_address, bytes: EVENT_BYTES, is_written: true };
        sockets.events.describe(0, event, None);
        sockets.events.offer(0);
        Ok(sockets)
    }

    fn slot_address(&self, slot: u64) -> u64 {
        self.slots_address + slot * SLOT_WORDS as u64 * 8
    }

    /// Serves this number of connections. Returns the number of bytes it has sent back.
    fn serve(&mut self, connections: u64, connect: Option<u32>) -> Result<u64, Fault> {
        if let Some(host_port) = connect {
            self.say(host_port, PORT, REQUEST, 0, 0, None)?;
            self.open = Some(Connection { host_port, passed: 0 });
        }
        let mut echoed = 0;
        while self.ended < connections {
            echoed += self.serve_packet()?;
        }
        Ok(echoed)
    }

    /// Waits for a packet and handles it. Returns the number of bytes sent back.
    fn serve_packet(&mut self) -> Result<u64, Fault> {
        let slot = self.from_host.wait()?.head;
        // Packets of the connections that follow an event come after it.
        if self.events.has_used() {
            self.events.wait()?;
            self.close();
            self.events.offer(0);
        }
        let sent_back = self.answer(self.packet(slot), slot)?;
        self.from_host.offer(slot);
        Ok(sent_back)
    }

    /// The open connection is over, if there is one.
    fn close(&mut self) {
        self.ended += u64::from(self.open.take().is_some());
    }

    fn packet(&self, slot: u64) -> Packet {
        let word = |at: usize| self.slots[slot as usize * SLOT_WORDS + at].load(Ordering::Relaxed);
        let (ports, lengths) = (word(2), word(3));
        Packet {
            host_port: ports as u32,
            guest_port: (ports >> 32) as u32,
            bytes: lengths as u32,
            operation: (lengths >> 48) as u16,
            flags: word(4) as u32,
        }
    }

    /// Handles a packet. Returns the number of bytes sent back.
    fn answer(&mut self, packet: Packet, slot: u64) -> Result<u64, Fault> {
        let Packet { host_port, guest_port, bytes, operation, flags } = packet;
        let is_ours = guest_port == PORT && self.open.is_some_and(|one| one.host_port == host_port);
        let passed = self.open.map_or(0, |one| one.passed);
        match operation {
            REQUEST if guest_port == PORT && self.open.is_none() => {
                self.open = Some(Connection { host_port, passed: 0 });
                self.say(host_port, PORT, RESPONSE, 0, 0, None)?;
            }
            RESET if is_ours => self.close(),
            RESET => {}
            _ if !is_ours => self.say(host_port, guest_port, RESET, 0, 0, None)?,
            DATA => {
                let passed = passed.wrapping_add(bytes);
                self.open = Some(Connection { host_port, passed });
                let data = self.slot_address(slot) + u64::from(HEADER_BYTES);
                let data = Buffer { address: data, bytes, is_written: false };
                self.say(host_port, PORT, DATA, 0, passed, Some(data))?;
                return Ok(u64::from(bytes));
            }
            SHUTDOWN if flags & NOTHING_MORE == NOTHING_MORE => {
                self.close();
                self.say(host_port, PORT, RESET, 0, passed, None)?;
            }
            SHUTDOWN => self.say(host_port, PORT, SHUTDOWN, NOTHING_MORE, passed, None)?,
            CREDIT_REQUEST => self.say(host_port, PORT, CREDIT_UPDATE, 0, passed, None)?,
            // An answer to our packet, or an update of the host's room.
            RESPONSE | CREDIT_UPDATE => {}
            _ => return Err(BROKEN),
        }
        Ok(0)
    }

    /// Sends a packet, and waits until the device has taken it.
    fn say(
        &mut self,
        host_port: u32,
        guest_port: u32,
        operation: u16,
        flags: u32,
        passed: u32,
        data: Option<Buffer>,
    ) -> Result<(), Fault> {
        let bytes = data.map_or(0, |data| data.bytes);
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let words = [
            self.cid,
            HOST,
            pair(guest_port, host_port),
            u64::from(bytes) | STREAM << 32 | u64::from(operation) << 48,
            pair(flags, ROOM),
            u64::from(passed),
        ];
        self.header.iter().zip(words).for_each(|(slot, word)| slot.store(word, Ordering::Relaxed));
        let header = Buffer { address: self.header_address, bytes: HEADER_BYTES, is_written: false };
        self.to_host.describe(0, header, data.map(|_| 1));
        if let Some(data) = data {
            self.to_host.describe(1, data, None);
        }
        self.to_host.offer(0);
        self.to_host.wait().map(|_| ())
    }
}
