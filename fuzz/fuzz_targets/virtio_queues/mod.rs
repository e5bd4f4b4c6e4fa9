//! A driver in memory whose every step is one of libFuzzer's bytes: descriptors, rings, registers, configuration, in any order.
//!
//! The devices' thread is the real one. After each notification the target lets it have a turn.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use event_manager::{EventOps, Events, MutEventSubscriber};
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize};
use wideleaf_vmm::devices::bus::MemoryDevice as _;
use wideleaf_vmm::devices::virtio::transport::Workers;
use wideleaf_vmm::devices::virtio::{Interrupt, IoThread, Transport, VirtioDevice};
use wideleaf_vmm::dma::DeviceMemory;
use wideleaf_vmm::kvm::GuestMemory;

/// Registers (Virtual I/O Device 1.2, section 4.2.2).
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
const CONFIG: u64 = 0x100;

/// Entries of each queue: few, so that rings wrap.
pub const QUEUE_SIZE: u16 = 8;
/// The queue's rings, a page each; the next queue's follow.
const QUEUES_AT: u64 = 0x1_0000;
const QUEUE_BYTES: u64 = 0x3000;
/// Where buffers are, as a rule.
pub const BUFFERS_AT: u64 = 0x8_0000;
const RAM_MIB: u64 = 2;
/// Looks at a used ring: each waits for the devices' thread, so that these are seconds.
const LOOKS_MAX: u32 = 50_000;

/// Bytes, one number after another; zeroes behind the end.
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

    /// Mostly in RAM, at its end, or nowhere.
    fn address(&mut self) -> u64 {
        let low = u64::from(self.word());
        match low & 0xf {
            0 => u64::MAX - low,
            1 => (RAM_MIB << 20) - (low >> 4) % 64,
            2 => QUEUES_AT + low,
            _ => BUFFERS_AT + low,
        }
    }
}

pub struct Driver {
    pub transport: Transport,
    memory: DeviceMemory,
    offered: Vec<u16>,
}

impl Driver {
    pub fn new(device: Box<dyn VirtioDevice>) -> Driver {
        let layout = [GpaRange::new(Gpa::new(0), mib(RAM_MIB)).expect("a range")];
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM");
        let ram = GuestRam::map(&layout, backing).expect("there is memory");
        let memory = DeviceMemory::new(Arc::new(GuestMemory::new(ram).expect("a view")));
        let event = || EventFd::new(EFD_NONBLOCK).expect("there are file descriptors");
        let queues = device.queue_sizes().len();
        let kicks = (0..queues).map(|_| event()).collect();
        let workers = Workers { io_thread: io_thread(), threads: Arc::default() };
        let transport = Transport::new(device, memory.clone(), workers, Interrupt::new(None), kicks);
        Driver { transport, memory, offered: vec![0; queues] }
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
            let at = QUEUES_AT + QUEUE_BYTES * queue as u64;
            self.memory.access().write_slice(&[0; QUEUE_BYTES as usize], GuestAddress(at)).expect("it is in RAM");
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

    /// One step of a driver that knows no rules.
    pub fn step(&mut self, input: &mut Input<'_>, features: u64) {
        let (what, queue) = (input.byte(), usize::from(input.byte()) % self.offered.len());
        match what % 8 {
            0 => self.start(features & u64::from(input.word())),
            1 => {
                let (address, bytes) = (input.address(), u32::from(input.word()));
                let (n, flags, next) = (input.byte(), input.byte(), input.byte());
                self.describe(
                    queue,
                    u16::from(n) % QUEUE_SIZE,
                    (address, bytes << (flags >> 4)),
                    u16::from(flags & 7),
                    next.into(),
                );
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
                let (at, bytes) = (input.address(), input.bytes(64).to_vec());
                let _ = self.memory.access().write_slice(&bytes, GuestAddress(at));
            }
            5 => {
                let mut data = [0; 8];
                let bytes = usize::from(input.byte()) % 9;
                self.transport.read(CONFIG + u64::from(input.word()), &mut data[..bytes]);
                self.transport.write(CONFIG + u64::from(input.word()), &data[..bytes]);
            }
            6 => {
                let (register, value) = (u64::from(input.byte()) * 4, u32::from(input.word()));
                self.set(register, value);
            }
            _ => self.notify(queue),
        }
    }

    pub fn describe(&mut self, queue: usize, n: u16, (address, bytes): (u64, u32), flags: u16, next: u16) {
        let at = QUEUES_AT + QUEUE_BYTES * queue as u64 + 16 * u64::from(n);
        let words =
            [&address.to_le_bytes()[..], &bytes.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        self.memory.access().write_slice(&words, GuestAddress(at)).expect("it is in RAM");
    }

    pub fn offer(&mut self, queue: usize, head: u16) {
        let at = QUEUES_AT + QUEUE_BYTES * queue as u64 + 0x1004 + 2 * u64::from(self.offered[queue] % QUEUE_SIZE);
        self.memory.access().write_obj(head, GuestAddress(at)).expect("it is in RAM");
        self.offered[queue] = self.offered[queue].wrapping_add(1);
        self.claim(queue, self.offered[queue]);
    }

    fn claim(&mut self, queue: usize, offered: u16) {
        let at = QUEUES_AT + QUEUE_BYTES * queue as u64 + 0x1002;
        self.memory.access().store(offered, GuestAddress(at), Ordering::Release).expect("it is in RAM");
    }

    pub fn notify(&mut self, queue: usize) {
        self.set(QUEUE_NOTIFY, queue as u32);
        settle();
    }

    pub fn put(&mut self, at: u64, bytes: &[u8]) {
        self.memory.access().write_slice(bytes, GuestAddress(at)).expect("it is in RAM");
    }

    /// Chains that were handed back since the start.
    pub fn used(&self, queue: usize) -> u16 {
        let at = QUEUES_AT + QUEUE_BYTES * queue as u64 + 0x2002;
        self.memory.access().load(GuestAddress(at), Ordering::Acquire).expect("it is in RAM")
    }

    /// Whether a chain is handed back, sooner or later.
    pub fn is_served(&self, queue: usize) -> bool {
        (0..LOOKS_MAX).any(|_| {
            settle();
            self.used(queue) > 0
        })
    }

    fn set(&mut self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }
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

/// Lets the thread serve what is ready, as a rule.
pub fn settle() {
    drop(io_thread().add(Box::new(Nothing)).expect("the thread runs"));
}
