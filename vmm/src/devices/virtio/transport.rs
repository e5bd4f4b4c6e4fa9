//! The registers of a device (Virtual I/O Device 1.2, section 4.2.2) and the life cycle that they
//! control (section 3.1).
//!
//! ```text
//!             ACKNOWLEDGE, DRIVER            FEATURES_OK                    DRIVER_OK
//!   reset ───────────────────────▶ features ─────────────▶ queues set up ─────────────▶ activated
//!     ▲                                                                                     │
//!     └──────────────── status 0, at any time ──────────────────────────────────────────────┘
//! ```
//!
//! Writes out of turn are dropped: features after FEATURES_OK, queues before it or after DRIVER_OK. Registers are
//! 32 bits wide and are read and written as such. Any other access to them reads zeroes and writes nothing.
//! Configuration may be read in any piece.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_CONFIG_GENERATION, VIRTIO_MMIO_DEVICE_FEATURES, VIRTIO_MMIO_DEVICE_FEATURES_SEL,
    VIRTIO_MMIO_DEVICE_ID, VIRTIO_MMIO_DRIVER_FEATURES, VIRTIO_MMIO_DRIVER_FEATURES_SEL, VIRTIO_MMIO_INTERRUPT_ACK,
    VIRTIO_MMIO_INTERRUPT_STATUS, VIRTIO_MMIO_MAGIC_VALUE, VIRTIO_MMIO_QUEUE_AVAIL_HIGH, VIRTIO_MMIO_QUEUE_AVAIL_LOW,
    VIRTIO_MMIO_QUEUE_DESC_HIGH, VIRTIO_MMIO_QUEUE_DESC_LOW, VIRTIO_MMIO_QUEUE_NOTIFY, VIRTIO_MMIO_QUEUE_NUM,
    VIRTIO_MMIO_QUEUE_NUM_MAX, VIRTIO_MMIO_QUEUE_READY, VIRTIO_MMIO_QUEUE_SEL, VIRTIO_MMIO_QUEUE_USED_HIGH,
    VIRTIO_MMIO_QUEUE_USED_LOW, VIRTIO_MMIO_SHM_BASE_HIGH, VIRTIO_MMIO_SHM_BASE_LOW, VIRTIO_MMIO_SHM_LEN_HIGH,
    VIRTIO_MMIO_SHM_LEN_LOW, VIRTIO_MMIO_STATUS, VIRTIO_MMIO_VENDOR_ID, VIRTIO_MMIO_VERSION,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;
use wideleaf_policies::Bytes;

use super::saved::{NotAtRest, Rest, RestoreDeviceError, SavedDevice, SavedQueue};
use super::{
    ActivateError, Activation, ActiveQueue, DeviceKind, DeviceState, DeviceThreads, Flusher, Interrupt, IoThread,
    VirtioDevice,
};
use crate::devices::bus::{Flushing, LOOK_EVERY, MemoryDevice};
use crate::dma::DeviceMemory;

/// The letters "virt" as a little-endian number.
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// The letters "WDLF" as a little-endian number.
const VENDOR: u32 = u32::from_le_bytes(*b"WDLF");
const REGISTER_BYTES: usize = 4;
const CONFIG: u64 = VIRTIO_MMIO_CONFIG as u64;

/// Offset of the register to which a driver writes the number of a queue with new buffers.
pub const NOTIFY_OFFSET: Bytes = Bytes::new(VIRTIO_MMIO_QUEUE_NOTIFY as u64);

/// The progress of the guest with a device (3.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverState {
    /// The guest has not found it: it never looked, or has reset it and left it.
    None,
    /// The guest knows the device (ACKNOWLEDGE), and no driver has come.
    Found,
    /// A driver is about to use it (DRIVER).
    Probing,
    /// A driver works with it (DRIVER_OK).
    Ready,
    /// The driver gave up (FAILED), or broke a queue, or the host failed it: it needs a reset.
    Failed,
}

/// The progress of a driver, for a caller that has handed the device over.
#[derive(Clone, Debug)]
pub struct DriverSeen {
    kind: DeviceKind,
    has_worked: Arc<AtomicBool>,
    /// Status as its driver set it.
    status: Arc<AtomicU32>,
    interrupt: Arc<Interrupt>,
}

impl DriverSeen {
    fn new(kind: DeviceKind, interrupt: Arc<Interrupt>) -> DriverSeen {
        DriverSeen { kind, has_worked: Arc::default(), status: Arc::default(), interrupt }
    }

    /// Kind of the device.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Whether a driver ever let the device work.
    pub fn has_worked(&self) -> bool {
        self.has_worked.load(Ordering::Relaxed)
    }

    /// Progress of the driver now.
    pub fn state(&self) -> DriverState {
        let status = self.status.load(Ordering::Relaxed) | self.interrupt.device_status();
        let is = |bits| status & bits != 0;
        match status {
            0 => DriverState::None,
            _ if is(VIRTIO_CONFIG_S_FAILED | VIRTIO_CONFIG_S_NEEDS_RESET) => DriverState::Failed,
            _ if is(VIRTIO_CONFIG_S_DRIVER_OK) => DriverState::Ready,
            _ if is(VIRTIO_CONFIG_S_DRIVER) => DriverState::Probing,
            _ => DriverState::Found,
        }
    }
}

/// The threads that serve the queues of a VM's devices.
#[derive(Clone, Debug, Default)]
pub struct Workers {
    /// Thread of all devices without a thread of their own.
    pub io_thread: Arc<IoThread>,
    /// Service that starts device threads.
    pub threads: Arc<DeviceThreads>,
}

impl Workers {
    /// Workers that start all their threads by `threads`.
    pub fn new(threads: Arc<DeviceThreads>) -> Workers {
        Workers { io_thread: Arc::new(IoThread::new(Arc::clone(&threads))), threads }
    }
}

/// A device behind its registers.
pub struct Transport {
    /// The device, shared with the thread that activates and resets it.
    device: Arc<Mutex<Box<dyn VirtioDevice>>>,
    memory: DeviceMemory,
    workers: Workers,
    interrupt: Arc<Interrupt>,
    kicks: Vec<Arc<EventFd>>,
    /// The queues as the driver set them up, also while the device serves them.
    queues: Vec<Queue>,
    status: u32,
    features: u64,
    /// Halves of the features that the driver reads and writes, by its selectors.
    feature_halves: (u32, u32),
    selected: u32,
    driver_seen: DriverSeen,
}

impl Transport {
    /// Creates the registers of `device`, with an event for each of its queues that the driver's
    /// notifications write.
    ///
    /// # Panics
    /// If the numbers of kicks and queues differ, or a size is not a power of two.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: DeviceMemory,
        workers: Workers,
        interrupt: Interrupt,
        kicks: Vec<EventFd>,
    ) -> Transport {
        assert_eq!(kicks.len(), device.queue_sizes().len(), "an event for each queue");
        let (kind, queues) = (device.kind(), fresh_queues(&*device));
        let interrupt = Arc::new(interrupt);
        Transport {
            device: Arc::new(Mutex::new(device)),
            memory,
            workers,
            driver_seen: DriverSeen::new(kind, Arc::clone(&interrupt)),
            interrupt,
            kicks: kicks.into_iter().map(Arc::new).collect(),
            queues,
            status: 0,
            features: 0,
            feature_halves: (0, 0),
            selected: 0,
        }
    }

    /// Handle on the progress of a driver, now or later.
    pub fn driver_seen(&self) -> DriverSeen {
        self.driver_seen.clone()
    }

    fn device(&self) -> MutexGuard<'_, Box<dyn VirtioDevice>> {
        locked(&self.device)
    }

    fn offered(&self) -> u64 {
        self.device().features() | 1 << VIRTIO_F_VERSION_1
    }

    fn is(&self, status: u32) -> bool {
        self.status & status != 0
    }

    fn read_register(&self, register: u32) -> u32 {
        let queue = self.queues.get(self.selected as usize);
        match register {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.device().kind() as u32,
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.offered(), self.feature_halves.0),
            VIRTIO_MMIO_QUEUE_NUM_MAX => queue.map_or(0, |queue| u32::from(queue.max_size())),
            VIRTIO_MMIO_QUEUE_READY => queue.map_or(0, |queue| u32::from(queue.ready())),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt.status(),
            VIRTIO_MMIO_STATUS => self.status | self.interrupt.device_status(),
            // The device has no shared memory: "a length of all ones" (4.2.2).
            VIRTIO_MMIO_SHM_LEN_LOW
            | VIRTIO_MMIO_SHM_LEN_HIGH
            | VIRTIO_MMIO_SHM_BASE_LOW
            | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            // The configuration changes one field at a time, and the driver reads each whole.
            VIRTIO_MMIO_CONFIG_GENERATION => 0,
            _ => 0,
        }
    }

    fn write_register(&mut self, register: u32, value: u32) {
        match register {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.feature_halves.0 = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.feature_halves.1 = value,
            VIRTIO_MMIO_DRIVER_FEATURES if !self.is(VIRTIO_CONFIG_S_FEATURES_OK) => match self.feature_halves.1 {
                0 => self.features = self.features >> 32 << 32 | u64::from(value),
                1 => self.features = self.features & u64::from(u32::MAX) | u64::from(value) << 32,
                _ => {}
            },
            VIRTIO_MMIO_QUEUE_SEL => self.selected = value,
            // KVM takes notifications and writes the events itself; without it this register serves the queue
            // all the same.
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                if let Some(kick) = self.kicks.get(value as usize) {
                    let _ = kick.write(1);
                }
            }
            VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt.acknowledge(value),
            VIRTIO_MMIO_STATUS => {
                self.set_status(value);
                self.driver_seen.status.store(self.status, Ordering::Relaxed);
            }
            _ => self.write_queue(register, value),
        }
    }

    fn write_queue(&mut self, register: u32, value: u32) {
        if !self.is(VIRTIO_CONFIG_S_FEATURES_OK) || self.is(VIRTIO_CONFIG_S_DRIVER_OK) {
            return;
        }
        let Some(queue) = self.queues.get_mut(self.selected as usize) else { return };
        match register {
            // The queue ignores an invalid size.
            VIRTIO_MMIO_QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(0)),
            VIRTIO_MMIO_QUEUE_READY => queue.set_ready(value == 1),
            VIRTIO_MMIO_QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => queue.set_avail_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => queue.set_avail_ring_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_USED_LOW => queue.set_used_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_USED_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    /// Applies a status write: a driver sets bit after bit, and clears either all of them or none.
    fn set_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        let added = value & !self.status & !VIRTIO_CONFIG_S_NEEDS_RESET;
        self.status |= added & !(VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK);
        if added & VIRTIO_CONFIG_S_FEATURES_OK != 0 && self.are_features_fit() {
            self.status |= VIRTIO_CONFIG_S_FEATURES_OK;
        }
        if added & VIRTIO_CONFIG_S_DRIVER_OK != 0 && self.is(VIRTIO_CONFIG_S_FEATURES_OK) {
            self.status |= VIRTIO_CONFIG_S_DRIVER_OK;
            self.activate();
        }
    }

    /// Whether the driver accepted only offered features, and version 1: older drivers lay out the
    /// rings differently.
    fn are_features_fit(&self) -> bool {
        self.features & !self.offered() == 0 && self.features >> VIRTIO_F_VERSION_1 & 1 == 1
    }

    fn activate(&mut self) {
        let kind = format!("a device of kind {:?}", self.device().kind());
        match self.start() {
            Ok(Some(())) => {}
            Ok(None) => self.interrupt.broken(&kind, &"its driver set up a queue outside RAM"),
            Err(error) => self.interrupt.broken(&kind, &error),
        }
    }

    /// Activates the device with its queues; `Ok(None)` where one is not within RAM.
    fn start(&mut self) -> Result<Option<()>, ActivateError> {
        let Some(queues) = self.active_queues() else { return Ok(None) };
        let activation = Activation {
            memory: self.memory.clone(),
            features: self.features,
            queues,
            interrupt: Arc::clone(&self.interrupt),
            io_thread: Arc::clone(&self.workers.io_thread),
            threads: Arc::clone(&self.workers.threads),
        };
        self.driver_seen.has_worked.store(true, Ordering::Relaxed);
        let device = Arc::clone(&self.device);
        // A VM that ends needs no device.
        self.workers.threads.call(move || locked(&device).activate(activation)).unwrap_or(Ok(())).map(Some)
    }

    /// The queues for the device; `None` where one is not within RAM. The registers go on to show them as the driver
    /// set them up.
    fn active_queues(&self) -> Option<Vec<ActiveQueue>> {
        let active = |(queue, kick): (&Queue, &Arc<EventFd>)| {
            let mut queue = Queue::try_from(queue.state()).ok()?;
            queue.set_event_idx(self.features >> VIRTIO_RING_F_EVENT_IDX & 1 == 1);
            let is_fit = !queue.ready() || queue.is_valid(self.memory.memory().view());
            is_fit.then(|| ActiveQueue { queue, kick: Arc::clone(kick) })
        };
        self.queues.iter().zip(&self.kicks).map(active).collect()
    }

    /// Stops the service between two pieces of work until the second value is dropped.
    fn saved(&self, until: Instant) -> Result<(SavedDevice, Rest), NotAtRest> {
        let device = Arc::clone(&self.device);
        let rest = self.workers.threads.call_within(until, move || locked(&device).rest(until));
        let rest = rest.ok_or(NotAtRest::Busy)??;
        let state = rest.device.clone().map_or_else(|| self.flushed(until), Ok)?;
        let mut queues: Vec<_> = self.queues.iter().map(|queue| SavedQueue::of(queue.state())).collect();
        // The device is further in those that it serves.
        for (number, queue) in &rest.queues {
            queues[*number] = SavedQueue::of(*queue);
        }
        let saved = SavedDevice {
            device: state,
            status: self.status,
            features: self.features,
            device_features_half: self.feature_halves.0,
            driver_features_half: self.feature_halves.1,
            queue_selected: self.selected,
            interrupt_status: self.interrupt.status(),
            needs_reset: self.interrupt.device_status() != 0,
            queues,
        };
        Ok((saved, rest))
    }

    /// The state of a device that makes its writes durable before it is known. A disk that hangs keeps neither the
    /// thread that activates devices nor the device's lock: the guest goes on after a save that was given up.
    fn flushed(&self, until: Instant) -> Result<DeviceState, NotAtRest> {
        let flusher = self.device().flusher().expect("a device without a flusher has its state at rest");
        let state = self.flush_by(flusher).recv_timeout(until.saturating_duration_since(Instant::now()));
        state.map_err(|_| NotAtRest::Busy)?.map_err(NotAtRest::Flush)
    }

    /// Starts a thread that flushes, and does not wait for it.
    fn flush_by(&self, flusher: Flusher) -> Flushing {
        let threads = Arc::clone(&self.workers.threads);
        let (done, state) = mpsc::channel();
        let failed = done.clone();
        let flush = move || {
            let _ = done.send(flusher());
            Ok(())
        };
        let start = move || {
            if let Err(error) = threads.spawn_fallible("flush", flush) {
                let _ = failed.send(Err(io::Error::other(error)));
            }
        };
        self.workers.threads.call_within(Instant::now(), start);
        state
    }

    /// Continues from a saved state: this transport is as new.
    fn restored(&mut self, saved: &SavedDevice) -> Result<(), RestoreDeviceError> {
        self.check_is(saved)?;
        let queues: Option<Vec<_>> = saved.queues.iter().map(|queue| queue.restored()).collect();
        self.queues = queues.ok_or(RestoreDeviceError::Damaged("a queue has an impossible size or address"))?;
        self.device().restore(&saved.device)?;
        (self.status, self.features) = (saved.status, saved.features);
        self.feature_halves = (saved.device_features_half, saved.driver_features_half);
        self.selected = saved.queue_selected;
        self.interrupt.restore(saved.interrupt_status, saved.needs_reset);
        self.driver_seen.status.store(self.status, Ordering::Relaxed);
        // After an error nothing is served until the driver resets the device.
        if !self.is(VIRTIO_CONFIG_S_DRIVER_OK) || saved.needs_reset {
            return Ok(());
        }
        self.start()?.ok_or(RestoreDeviceError::Damaged("a queue lies outside RAM"))
    }

    /// Checks that a driver of the saved device finds everything here that it knows.
    fn check_is(&self, saved: &SavedDevice) -> Result<(), RestoreDeviceError> {
        let kind = self.device().kind();
        let offered = self.offered();
        if saved.device.kind() != kind {
            return Err(RestoreDeviceError::OtherKind { saved: saved.device.kind(), here: kind });
        }
        if saved.features & !offered != 0 {
            return Err(RestoreDeviceError::Features(saved.features & !offered));
        }
        let sizes = saved.queues.iter().map(|queue| queue.entries_max);
        if !sizes.eq(self.device().queue_sizes().iter().copied()) {
            return Err(RestoreDeviceError::Damaged("it has other queues"));
        }
        Ok(())
    }

    fn reset(&mut self) {
        let device = Arc::clone(&self.device);
        if self.workers.threads.call(move || locked(&device).reset()).is_none() {
            // The VM ends, and a device that hangs keeps its lock.
            return;
        }
        let queues = fresh_queues(&**self.device());
        self.queues = queues;
        self.interrupt.reset();
        (self.status, self.features, self.feature_halves, self.selected) = (0, 0, (0, 0), 0);
    }
}

fn locked(device: &Mutex<Box<dyn VirtioDevice>>) -> MutexGuard<'_, Box<dyn VirtioDevice>> {
    // Locks the device, also after a panic in it: that leaves no worse state than a hostile guest, which the device
    // has to handle.
    device.lock()
}

fn fresh_queues(device: &dyn VirtioDevice) -> Vec<Queue> {
    let fresh = |size: &u16| Queue::new(*size).expect("a queue has a power of two of entries, 32768 at most");
    device.queue_sizes().iter().map(fresh).collect()
}

/// One half of 64 bits by its selector; other selectors read zero.
fn half(features: u64, selector: u32) -> u32 {
    match selector {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

impl MemoryDevice for Transport {
    fn save(&self, until: Instant) -> Result<(SavedDevice, Rest), NotAtRest> {
        self.saved(until)
    }

    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreDeviceError> {
        self.restored(saved)
    }

    fn kick_queues(&self) {
        // Without a driver that is ready, the device looks at its queues when it is activated.
        if self.is(VIRTIO_CONFIG_S_DRIVER_OK) {
            self.kicks.iter().for_each(|kick| drop(kick.write(1)));
        }
    }

    fn start_flush(&self) -> Result<Option<Flushing>, NotAtRest> {
        let flusher = self.device.try_lock_for(LOOK_EVERY).ok_or(NotAtRest::Busy)?.flusher();
        Ok(flusher.map(|flusher| self.flush_by(flusher)))
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= CONFIG {
            return self.device().read_config(offset - CONFIG, data);
        }
        if let Ok(word) = <&mut [u8; REGISTER_BYTES]>::try_from(data)
            && offset.is_multiple_of(REGISTER_BYTES as u64)
        {
            *word = self.read_register(offset as u32).to_le_bytes();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if offset >= CONFIG {
            return self.device().write_config(offset - CONFIG, data);
        }
        if let Ok(word) = <[u8; REGISTER_BYTES]>::try_from(data)
            && offset.is_multiple_of(REGISTER_BYTES as u64)
        {
            self.write_register(offset as u32, u32::from_le_bytes(word));
        }
    }

    fn stop(&mut self, until: Instant) {
        let device = Arc::clone(&self.device);
        let is_open = self.memory.gate().is_open_within(until.saturating_duration_since(Instant::now()));
        if is_open && self.workers.threads.call_within(until, move || locked(&device).reset()).is_some() {
            return;
        }
        // A pause that is never undone, because moving the VM's memory failed midway: the device's thread waits at the
        // gate for good. Or a request that the host does not complete. Dropping the device would wait for that thread.
        let kind = self.driver_seen.kind();
        tracing::error!(?kind, "cannot stop a device: its VM was paused for good, or a file of the host hangs");
        std::mem::forget(Arc::clone(&self.device));
    }

    fn reset(&mut self) {
        self.set_status(0);
        self.driver_seen.status.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
