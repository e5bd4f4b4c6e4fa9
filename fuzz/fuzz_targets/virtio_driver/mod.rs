//! A driver in memory with every step chosen by libFuzzer's bytes: descriptors, rings, chains, registers of any
//! width, configuration, in any order.
//!
//! ```text
//!   bytes ─▶ step after step ─▶ registers, RAM ◀─▶ the device, on the thread of all devices or on its own
//! ```
//!
//! It begins with a correct start, so that most inputs reach the queues; the bytes may undo it. After each
//! notification the device runs.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use event_manager::{EventOps, Events, MutEventSubscriber};
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize};
use wideleaf_vmm::devices::bus::MemoryDevice as _;
use wideleaf_vmm::devices::virtio::transport::Workers;
use wideleaf_vmm::devices::virtio::{Interrupt, IoThread, RestoreDeviceError, SavedDevice, Transport, VirtioDevice};
use wideleaf_vmm::dma::DeviceMemory;
use wideleaf_vmm::kvm::GuestMemory;
use wideleaf_vmm::run_loop::PAUSE_WAIT_MAX;

/// Register offsets (Virtual I/O Device 1.2, section 4.2.2).
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SEL: u64 = 0x24;
const QUEUE_SEL: u64 = 0x30;
const QUEUE_NUM: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const QUEUE_NOTIFY: u64 = 0x50;
const STATUS: u64 = 0x70;
const QUEUE_DESC: u64 = 0x80;
const QUEUE_AVAIL: u64 = 0x90;
const QUEUE_USED: u64 = 0xa0;
const REGISTERS: u64 = 0x1000;

const NEEDS_RESET: u32 = 64;

/// Flag of a descriptor (section 2.7.5).
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Entries of each queue: few, so that rings wrap.
pub const QUEUE_SIZE: u16 = 8;
/// Address of the first queue's rings, a page each; the next queue's follow.
const QUEUES_AT: u64 = 0x1_0000;
const QUEUE_BYTES: u64 = 0x3000;
/// Address of an indirect table.
const TABLE_AT: u64 = 0x7_0000;
/// Usual address of buffers.
pub const BUFFERS_AT: u64 = 0x8_0000;
pub const RAM_BYTES: u64 = 8 << 20;
/// Maximum steps of one input: more steps show nothing new.
pub const STEPS_MAX: usize = 200;
/// Polls of the used ring of a device with a thread of its own. A chain that is not returned is not a finding.
const LOOKS: u32 = 500;
/// Longest wait of a driver that follows the rules: shorter than libFuzzer's limit for an input.
const PATIENCE: Duration = Duration::from_secs(8);

/// The input as a stream of numbers; zeroes behind its end.
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub fn bytes(&mut self, at_most: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(at_most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// The part of `offered` that the driver takes: all of it if the bytes are zero.
    pub fn features(&mut self, offered: u64) -> u64 {
        offered & !(u64::from(self.word()) | u64::from(self.word()) << 16)
    }

    /// An address, mostly in RAM, at its end, or outside.
    fn address(&mut self) -> u64 {
        let low = u64::from(self.word());
        match low & 0xf {
            0 => u64::MAX - low,
            1 => RAM_BYTES - (low >> 4) % 64,
            2 => QUEUES_AT + low,
            3 => (low << 7) % RAM_BYTES,
            _ => BUFFERS_AT + low,
        }
    }
}

pub struct Driver {
    transport: Transport,
    pub memory: DeviceMemory,
    offered: Vec<u16>,
    is_alone: bool,
}

impl Driver {
    /// Creates the driver of a device on the thread of all devices.
    pub fn new(device: Box<dyn VirtioDevice>) -> Driver {
        let layout = [GpaRange::new(Gpa::new(0), mib(RAM_BYTES >> 20)).expect("a range")];
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM");
        let ram = GuestRam::map(&layout, backing).expect("there is memory");
        let memory = DeviceMemory::new(Arc::new(GuestMemory::new(ram).expect("a view")));
        let event = || EventFd::new(EFD_NONBLOCK).expect("there are file descriptors");
        let queues = device.queue_sizes().len();
        let kicks = (0..queues).map(|_| event()).collect();
        let workers = Workers { io_thread: io_thread(), threads: Arc::default() };
        let transport = Transport::new(device, memory.clone(), workers, Interrupt::new(None), kicks);
        Driver { transport, memory, offered: vec![0; queues], is_alone: false }
    }

    /// Creates the driver of a device on a thread of its own.
    #[allow(dead_code, reason = "not every target has such a device")]
    pub fn alone(device: Box<dyn VirtioDevice>) -> Driver {
        let mut driver = Driver::new(device);
        driver.is_alone = true;
        driver
    }

    /// Lets the device, which is as new, continue from a saved state.
    #[allow(dead_code, reason = "one target does")]
    pub fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreDeviceError> {
        self.transport.restore(saved)
    }

    /// Lets a restored device look at its queues.
    #[allow(dead_code, reason = "one target does")]
    pub fn look(&mut self) {
        self.transport.kick_queues();
        if !self.is_alone {
            settle();
        }
    }

    pub fn start(&mut self, features: u64) {
        self.set(STATUS, 0);
        self.set(STATUS, 3);
        let features = features | 1 << 32;
        for half in [0, 1] {
            self.set(DRIVER_FEATURES_SEL, half);
            self.set(DRIVER_FEATURES, (features >> (32 * half)) as u32);
        }
        self.set(STATUS, 3 | 8);
        for queue in 0..self.offered.len() {
            let at = rings(queue);
            self.put(at, &[0; QUEUE_BYTES as usize]);
            self.offered[queue] = 0;
            self.set(QUEUE_SEL, queue as u32);
            self.set(QUEUE_NUM, u32::from(QUEUE_SIZE));
            self.set(QUEUE_DESC, at as u32);
            self.set(QUEUE_AVAIL, at as u32 + 0x1000);
            self.set(QUEUE_USED, at as u32 + 0x2000);
            self.set(QUEUE_READY, 1);
        }
        self.set(STATUS, 3 | 8 | 4);
    }

    /// Runs one step of a driver that ignores the rules.
    pub fn step(&mut self, input: &mut Input<'_>, offered: u64) {
        let (what, queue) = (input.byte(), usize::from(input.byte()) % self.offered.len());
        match what % 10 {
            0 => {
                let features = input.features(offered);
                self.start(features);
            }
            1 => {
                let n = u16::from(input.byte()) % QUEUE_SIZE;
                let (buffer, flags, next) = (buffer(input), input.byte(), input.byte());
                self.describe(queue, n, buffer, u16::from(flags & 7), next.into());
            }
            2 => {
                let head = u16::from(input.byte()) % (QUEUE_SIZE + 1);
                self.offer(queue, head);
            }
            3 => {
                let claimed = input.word();
                self.claim(queue, claimed);
            }
            4 => {
                let (at, bytes) = (input.address(), usize::from(input.byte()) % 65);
                let _ = self.memory.access().write_slice(input.bytes(bytes), GuestAddress(at));
            }
            5 => {
                let (at, bytes) = (u64::from(input.word()) % REGISTERS, usize::from(input.byte()) % 9);
                self.transport.read(at, &mut [0; 8][..bytes]);
                self.transport.write(at, input.bytes(bytes));
            }
            6 => {
                let (register, value) = (u64::from(input.byte()) * 4, u32::from(input.word()));
                self.set(register, value);
            }
            7 => self.notify(queue),
            8 => self.set(STATUS, 0),
            _ => self.step_chain(input, queue),
        }
    }

    /// Builds a whole chain: buffers to read, then buffers to write, in the queue's table or in one of its own.
    fn step_chain(&mut self, input: &mut Input<'_>, queue: usize) {
        let shape = input.byte();
        let (read, written, is_indirect) = (u16::from(shape & 3), u16::from(shape >> 2 & 3), shape & 0x10 != 0);
        let table = if is_indirect { TABLE_AT } else { rings(queue) };
        for n in 0..read + written {
            let next = if n + 1 < read + written { NEXT } else { 0 };
            let write = if n < read { 0 } else { WRITE };
            self.describe_at(table + 16 * u64::from(n), buffer(input), next | write, n + 1);
        }
        if is_indirect {
            self.describe(queue, 0, (TABLE_AT, 16 * u32::from(read + written)), INDIRECT, 0);
        }
        self.offer(queue, 0);
        self.notify(queue);
    }

    pub fn describe(&mut self, queue: usize, n: u16, buffer: (u64, u32), flags: u16, next: u16) {
        self.describe_at(rings(queue) + 16 * u64::from(n), buffer, flags, next);
    }

    fn describe_at(&mut self, at: u64, (address, bytes): (u64, u32), flags: u16, next: u16) {
        let words =
            [&address.to_le_bytes()[..], &bytes.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        self.put(at, &words);
    }

    pub fn offer(&mut self, queue: usize, head: u16) {
        let slot = rings(queue) + 0x1004 + 2 * u64::from(self.offered[queue] % QUEUE_SIZE);
        self.put(slot, &head.to_le_bytes());
        self.offered[queue] = self.offered[queue].wrapping_add(1);
        self.claim(queue, self.offered[queue]);
    }

    fn claim(&mut self, queue: usize, offered: u16) {
        let at = GuestAddress(rings(queue) + 0x1002);
        self.memory.access().store(offered, at, Ordering::Release).expect("it is in RAM");
    }

    pub fn notify(&mut self, queue: usize) {
        self.set(QUEUE_NOTIFY, queue as u32);
        if !self.is_alone {
            return settle();
        }
        for _ in 0..LOOKS {
            if self.used(queue) == self.offered[queue] || self.needs_reset() {
                return;
            }
            std::thread::yield_now();
        }
    }

    pub fn put(&mut self, at: u64, bytes: &[u8]) {
        self.memory.access().write_slice(bytes, GuestAddress(at)).expect("it is in RAM");
    }

    /// Whether a chain is returned within the time limit.
    pub fn is_served(&mut self, queue: usize) -> bool {
        let end = Instant::now() + PATIENCE;
        while self.used(queue) == 0 && Instant::now() < end {
            std::thread::yield_now();
        }
        self.used(queue) > 0
    }

    /// Number of chains returned since the start.
    fn used(&self, queue: usize) -> u16 {
        let at = GuestAddress(rings(queue) + 0x2002);
        self.memory.access().load(at, Ordering::Acquire).expect("it is in RAM")
    }

    fn needs_reset(&mut self) -> bool {
        let mut status = [0; 4];
        self.transport.read(STATUS, &mut status);
        u32::from_le_bytes(status) & NEEDS_RESET != 0
    }

    fn set(&mut self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.transport.stop(Instant::now() + PAUSE_WAIT_MAX);
    }
}

/// Address and length of a buffer, up to 4 GiB.
fn buffer(input: &mut Input<'_>) -> (u64, u32) {
    let (address, bytes, scale) = (input.address(), u32::from(input.word()), input.byte() % 17);
    (address, bytes << scale)
}

fn rings(queue: usize) -> u64 {
    QUEUES_AT + QUEUE_BYTES * queue as u64
}

fn io_thread() -> Arc<IoThread> {
    static THREAD: OnceLock<Arc<IoThread>> = OnceLock::new();
    Arc::clone(THREAD.get_or_init(Arc::default))
}

struct Nothing;

impl MutEventSubscriber for Nothing {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {}
    fn init(&mut self, _: &mut EventOps<'_>) {}
}

/// Mostly lets the thread of all devices serve the ready queues.
pub fn settle() {
    drop(io_thread().add(Box::new(Nothing)).expect("the thread runs"));
}
