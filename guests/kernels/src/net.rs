//! Net: sends frames as fast as its card takes them, then receives frames from the host. Reports the frame rates
//! and checks every received word.
//!
//! ```text
//!   buffer  │ 2 unused │ virtio header 12 │ Ethernet 14 │ IPv4 20 │ UDP 8 │ words of frame k │
//!   words   │ word(256 k) │ word(256 k + 1) │ …
//!
//!   first    frames= of them as broadcast on the link (the guest is 10.77.0.2, port 7777)      ─▶ sent
//!   then     receive= of the same kind, in their order, some of which may have been dropped   ─▶ received, lost
//! ```
//!
//! Other frames are ignored: a link has traffic of its own. Checksums are left out, as UDP over IPv4 allows (RFC
//! 768).

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use wideleaf_protocol::{Message, Name};

use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::platform::ticks_to_seconds;
use crate::report::{self, Figure};
use crate::test_pattern::{FIRST_GENERATION, Findings, origin, word};
use crate::virtio::{Buffer, Device, Fault, Kind, Queue, device_error, queue_words};
use crate::{Arena, KernelError, Platform};

/// Net in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("net"),
    summary: "sends frames, receives frames and checks their words; needs a guest with --net",
    classes: &[],
    parameters: PARAMETERS,
    quick: "frames=1000",
    figure: FIGURE,
    vcpus_max: 1,
    memory,
    run,
};

const FIGURE: Figure = Figure::literal("sent", "frames/s");

const PARAMETERS: &[Parameter] = &[
    Parameter { name: "frames", default: "10000", unit: "count", meaning: "number of frames to send" },
    Parameter {
        name: "receive",
        default: "0",
        unit: "count",
        meaning: "number of frames to receive afterwards; the host must send them",
    },
    Parameter {
        name: "bytes",
        default: "1500",
        unit: "bytes (K, M, G, T)",
        meaning: "length of a frame, including its Ethernet header",
    },
];

/// Frames in flight in each direction: the number of entries that the queues of our card and QEMU's have.
const SLOTS: u64 = 256;
/// Bytes of a slot's buffer; the longest frame without a VLAN is 1514 bytes.
const SLOT_BYTES: u64 = 2048;
const SLOT_WORDS: usize = SLOT_BYTES as usize / 8;
const FRAME_BYTES_MIN: u64 = 64;
const FRAME_BYTES_MAX: u64 = 1514;
const FRAMES_MAX: u64 = 1 << 31;

/// Unused bytes in a buffer before the virtio header, so that the words behind all headers are aligned.
const UNUSED_BYTES: u64 = 2;
const VIRTIO_BYTES: u64 = 12;
const HEADERS_BYTES: u64 = 14 + 20 + 8;
const HEAD_WORDS: usize = (UNUSED_BYTES + VIRTIO_BYTES + HEADERS_BYTES) as usize / 8;
/// Word indices from one frame to the next.
const INDICES_PER_FRAME: u64 = 256;
const _: () = assert!(FRAME_BYTES_MAX / 8 < INDICES_PER_FRAME, "no frame has a word of the next one");

/// `VIRTIO_NET_F_MAC`: the configuration has the card's address (5.1.3).
const FEATURES: u32 = 1 << 5;
const QUEUE_WORDS: usize = queue_words(SLOTS);
const BUFFERS_WORDS: usize = SLOTS as usize * SLOT_WORDS;
/// Words of the queues and buffers of a card.
pub(crate) const WORDS: usize = 2 * (QUEUE_WORDS + BUFFERS_WORDS);
const NEEDED: u64 = 8 * WORDS as u64;

const GUEST: [u8; 4] = [10, 77, 0, 2];
const BROADCAST: [u8; 4] = [255; 4];
const PORT: [u8; 2] = 7777u16.to_be_bytes();

struct Plan {
    frames: u64,
    receive: u64,
    bytes: u64,
}

impl Plan {
    fn read<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        Ok(Self {
            frames: parameters.count("frames", 0, FRAMES_MAX)?.unwrap_or(10_000),
            receive: parameters.count("receive", 0, FRAMES_MAX)?.unwrap_or(0),
            bytes: parameters.size("bytes", FRAME_BYTES_MIN, FRAME_BYTES_MAX)?.unwrap_or(1500),
        })
    }

    /// Whole words of a frame, without its headers.
    fn words(&self) -> usize {
        ((self.bytes - HEADERS_BYTES) / 8) as usize
    }
}

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Plan::read(parameters).map(|_| MemoryNeed::Bytes(NEEDED))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let plan = Plan::read(parameters)?;
    if arena.bytes() < NEEDED {
        return Err(KernelError::ArenaTooSmall { needed: NEEDED, bytes: arena.bytes() });
    }
    platform.emit(&Message::Region { name: Name::literal("net"), address: arena.address(), bytes: NEEDED });
    let mut card = Card::start(platform, arena.words(), arena.address(), &plan).map_err(device_error)?;
    let (sent, _) = report::phase(platform, report::COMPUTE, || card.send(platform, &plan));
    let sent = sent.map_err(device_error)?;
    rate(platform, FIGURE.name, plan.frames, sent);
    let mut received = Received::default();
    if plan.receive > 0 {
        let taken = report::phase(platform, Name::literal("receive"), || card.receive(platform, &plan, &mut received));
        taken.0.map_err(device_error)?;
        rate(platform, Name::literal("received"), plan.receive - 1, received.ticks);
        report::result(platform, Name::literal("lost"), received.lost as f64, Name::literal("frames"));
    }
    report::verdict(platform, received.findings.errors(), received.checked)
}

/// Sends frames until `is_over`, with the queues and buffers in these words. Returns their number.
///
/// # Errors
/// [`Fault`] of the card.
pub(crate) fn send_until(
    platform: &dyn Platform,
    words: &[AtomicU64],
    address: u64,
    is_over: &AtomicBool,
) -> Result<u64, Fault> {
    let plan = Plan { frames: SLOTS, receive: 0, bytes: 1500 };
    let mut card = Card::start(platform, words, address, &plan)?;
    let mut sent = 0;
    while sent == 0 || !is_over.load(Ordering::Acquire) {
        card.send(platform, &plan)?;
        sent += plan.frames;
    }
    Ok(sent)
}

/// Reports the frame rate, if the length of a tick is known.
fn rate(platform: &dyn Platform, name: Name<'static>, frames: u64, ticks: u64) {
    if platform.tsc_hz() != 0 {
        let seconds = ticks_to_seconds(ticks.max(1), platform.tsc_hz());
        report::result(platform, name, frames as f64 / seconds, FIGURE.unit);
    }
}

/// Statistics of received frames.
#[derive(Default)]
struct Received {
    findings: Findings,
    /// Ticks from the first frame to the last.
    ticks: u64,
    /// Frames missing between the first and the last.
    lost: u64,
    checked: u64,
}

/// An initialised network card.
struct Card<'m> {
    to_link: Queue<'m>,
    from_link: Queue<'m>,
    outgoing: Slots<'m>,
    incoming: Slots<'m>,
    head: [u64; HEAD_WORDS],
}

impl<'m> Card<'m> {
    fn start(platform: &'m dyn Platform, words: &'m [AtomicU64], address: u64, plan: &Plan) -> Result<Self, Fault> {
        let mut rest = Slots { words, address };
        let device = Device::begin(platform, Kind::Net, FEATURES)?;
        let mut queue = |number| {
            let Slots { words, address } = rest.cut(QUEUE_WORDS);
            device.queue(number, SLOTS, words, address)
        };
        let (from_link, to_link) = (queue(0)?, queue(1)?);
        device.start()?;
        let [low, high] = [0, 4].map(|offset| device.configuration(offset).to_le_bytes());
        let head = head([low[0], low[1], low[2], low[3], high[0], high[1]], plan.bytes);
        Ok(Self { to_link, from_link, outgoing: rest.cut(BUFFERS_WORDS), incoming: rest.cut(BUFFERS_WORDS), head })
    }

    /// Sends all frames. Returns the ticks until the device had taken the last.
    fn send(&mut self, platform: &dyn Platform, plan: &Plan) -> Result<u64, Fault> {
        for slot in 0..SLOTS {
            let words = self.outgoing.of(slot);
            words.iter().zip(self.head).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
            self.to_link.describe(slot, self.outgoing.frame(slot, plan.bytes, false), None);
        }
        let start = platform.now();
        let mut number = 0;
        while number < plan.frames.min(SLOTS) {
            self.put(number, number, plan);
            number += 1;
        }
        for _ in 0..plan.frames {
            let slot = self.to_link.wait()?.head;
            if number < plan.frames {
                self.put(slot, number, plan);
                number += 1;
            }
        }
        Ok(platform.now().saturating_sub(start))
    }

    fn put(&mut self, slot: u64, number: u64, plan: &Plan) {
        let words = &self.outgoing.of(slot)[HEAD_WORDS..][..plan.words()];
        for (index, slot) in (number * INDICES_PER_FRAME..).zip(words) {
            slot.store(word(index, FIRST_GENERATION), Ordering::Relaxed);
        }
        self.to_link.offer(slot);
    }

    /// Receives as many frames as the plan asks for.
    fn receive(&mut self, platform: &dyn Platform, plan: &Plan, received: &mut Received) -> Result<(), Fault> {
        for slot in 0..SLOTS {
            let room = SLOT_BYTES - UNUSED_BYTES - VIRTIO_BYTES;
            self.from_link.describe(slot, self.incoming.frame(slot, room, true), None);
            self.from_link.offer(slot);
        }
        let (mut count, mut first_number, mut start) = (0, 0, 0);
        while count < plan.receive {
            let used = self.from_link.wait()?;
            let words = &self.incoming.of(used.head)[HEAD_WORDS..][..plan.words()];
            let number = if u64::from(used.bytes) == VIRTIO_BYTES + plan.bytes { number_of(words) } else { None };
            if let Some(number) = number {
                if count == 0 {
                    (first_number, start) = (number, platform.now());
                }
                count += 1;
                check(words, number, received);
                received.lost = (number + 1).saturating_sub(first_number + count);
            }
            self.from_link.offer(used.head);
        }
        received.ticks = platform.now().saturating_sub(start);
        Ok(())
    }
}

/// Number of the frame with these words; `None` for a foreign frame.
fn number_of(words: &[AtomicU64]) -> Option<u64> {
    let (index, generation) = origin(words.first()?.load(Ordering::Relaxed));
    let is_first = generation == FIRST_GENERATION && index.is_multiple_of(INDICES_PER_FRAME);
    is_first.then_some(index / INDICES_PER_FRAME)
}

fn check(words: &[AtomicU64], number: u64, received: &mut Received) {
    for (index, slot) in (number * INDICES_PER_FRAME..).zip(words) {
        received.findings.check(slot, index, FIRST_GENERATION);
    }
    received.checked += words.len() as u64;
}

/// Adjacent words and their address.
#[derive(Clone, Copy)]
struct Slots<'m> {
    words: &'m [AtomicU64],
    address: u64,
}

impl<'m> Slots<'m> {
    /// Takes words from the beginning.
    fn cut(&mut self, words: usize) -> Slots<'m> {
        let (cut, rest) = self.words.split_at(words);
        let cut = Slots { words: cut, address: self.address };
        *self = Slots { words: rest, address: self.address + 8 * words as u64 };
        cut
    }

    fn of(&self, slot: u64) -> &'m [AtomicU64] {
        &self.words[slot as usize * SLOT_WORDS..][..SLOT_WORDS]
    }

    /// The virtio header of a slot and the bytes behind it.
    fn frame(&self, slot: u64, bytes: u64, is_written: bool) -> Buffer {
        let address = self.address + slot * SLOT_BYTES + UNUSED_BYTES;
        Buffer { address, bytes: (VIRTIO_BYTES + bytes) as u32, is_written }
    }
}

/// All headers of a frame of `bytes` bytes, sent by the card with this address.
fn head(from: [u8; 6], bytes: u64) -> [u64; HEAD_WORDS] {
    let ip_bytes = (bytes - 14) as u16;
    let mut head = [0; HEAD_WORDS * 8];
    let mut at = (UNUSED_BYTES + VIRTIO_BYTES) as usize;
    let mut put = |piece: &[u8]| {
        head[at..at + piece.len()].copy_from_slice(piece);
        at += piece.len();
    };
    put(&[0xff; 6]);
    put(&from);
    put(&[8, 0]);
    let mut ip = [0; 20];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&ip_bytes.to_be_bytes());
    // Don't-fragment flag, 64 hops, UDP.
    ip[6..10].copy_from_slice(&[0x40, 0, 64, 17]);
    ip[12..16].copy_from_slice(&GUEST);
    ip[16..20].copy_from_slice(&BROADCAST);
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    put(&ip);
    put(&PORT);
    put(&PORT);
    put(&(ip_bytes - 20).to_be_bytes());
    let mut words = [0; HEAD_WORDS];
    for (word, bytes) in words.iter_mut().zip(head.chunks(8)) {
        *word = bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_its_lengths_and_an_ip_header_that_sums_to_zero() {
        let bytes: std::vec::Vec<u8> =
            head([2, 0, 0, 0, 0, 7], 1500).iter().flat_map(|word| word.to_le_bytes()).collect();
        let ip = &bytes[28..48];
        let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!((&ip[2..4], &bytes[52..54]), (&1486u16.to_be_bytes()[..], &1466u16.to_be_bytes()[..]));
        assert_eq!(bytes[14..28], [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 7, 8, 0]);
    }
}
