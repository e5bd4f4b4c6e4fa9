//! Port and memory-mapped I/O: the bus finds the device of an access, and counts accesses that no device answers.
//!
//! ```text
//!   out 0x3f8 ──▶ ports   [ serial │ exit │ … ]                    each device behind a lock of its own
//!   mov [gpa] ──▶ memory  [ register file │ register file │ … ]
//! ```
//!
//! An access as wide as the CPU makes it arrives as its bytes; a string instruction (`rep outsb`) arrives as
//! all of its items at once, at one port. Each device has its own lock, so vCPUs wait for each other only at
//! the same device.

use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_policies::{Gpa, GpaRange};

use super::virtio::saved::{DeviceState, NotAtRest, Rest, RestoreDeviceError, SavedDevice};
use crate::run_loop::PAUSE_WAIT_MAX;

/// Interval in which a thread that waits for a flush looks whether to keep on.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The effect of an access on the whole VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusEvent {
    /// No effect: the guest continues.
    None,
    /// The guest ended itself with this code.
    Exit(u32),
    /// A fault stub of the direct entry reports a fault.
    Fault,
    /// The guest asked for a reset.
    Reset,
    /// The guest switched itself off.
    PowerOff,
}

/// A device behind ports.
pub trait PortDevice: Send {
    /// Fills `data` with what the guest reads at the port `offset` ports behind the device's first.
    fn read(&mut self, offset: u16, data: &mut [u8]);
    /// Takes the guest's write to the port `offset` ports behind the device's first.
    fn write(&mut self, offset: u16, data: &[u8]) -> BusEvent;
    /// Emits buffered output; the guest has ended.
    fn flush(&mut self) {}
    /// Sets the device back to the machine's start, because the guest has reset it. Most devices have no
    /// state to reset.
    fn reset(&mut self) {}
}

/// A device behind guest-physical addresses without RAM.
pub trait MemoryDevice: Send {
    /// Fills `data` with what the guest reads `offset` bytes behind the device's first address.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Takes the guest's write `offset` bytes behind the device's first address.
    fn write(&mut self, offset: u64, data: &[u8]);
    /// Stops all work of the device; the guest has ended. Work that does not end by `until` is left alone.
    fn stop(&mut self, _until: Instant) {}
    /// Sets the device back to the machine's start before it returns; the guest has reset it.
    fn reset(&mut self);
    /// Stops the device between two pieces of work until the second value is dropped, and returns its state; see
    /// [`VirtioDevice::rest`](super::virtio::VirtioDevice::rest).
    ///
    /// # Errors
    /// [`NotAtRest`], where its work does not end by `until`; then it continues.
    fn save(&self, until: Instant) -> Result<(SavedDevice, Rest), NotAtRest>;
    /// Starts a thread that makes the guest's writes to the device durable, and sends what came of that; `None` where
    /// there are none. Waits for a moment at most.
    ///
    /// # Errors
    /// [`NotAtRest::Busy`], where another thread uses the device; try again.
    fn start_flush(&self) -> Result<Option<Flushing>, NotAtRest>;
    /// Lets the device, which is as new, continue from a saved state.
    ///
    /// # Errors
    /// [`RestoreDeviceError`] where it cannot; then the machine must not run.
    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreDeviceError>;
    /// Makes the restored device look at its queues: its driver may have notified it just before it was saved.
    fn kick_queues(&self) {}
}

/// A flush under way. It ends without a word where its thread could not work.
pub type Flushing = Receiver<io::Result<DeviceState>>;

/// The reasons why disks are not flushed. Flushes that were begun go on.
#[derive(Debug, thiserror::Error)]
pub enum FlushError {
    /// The caller did not want to keep on.
    #[error("the flush of the disks was cancelled")]
    Cancelled,
    /// A disk takes longer than the time limit.
    #[error("cannot flush a disk: it does not end within {0:?}; look at the host's disk or network, and try again")]
    Late(Duration),
    /// A disk has an error.
    #[error("cannot flush a disk: {0}")]
    Io(#[from] io::Error),
}

struct Range {
    ports: RangeInclusive<u16>,
    // A panic of one vCPU in a device leaves no worse state than a hostile guest, which the device has to handle.
    device: Mutex<Box<dyn PortDevice>>,
}

struct MemoryRange {
    addresses: GpaRange,
    device: Mutex<Box<dyn MemoryDevice>>,
}

/// All devices of a VM.
#[derive(Default)]
pub struct Bus {
    ranges: Vec<Range>,
    memory_ranges: Vec<MemoryRange>,
    counters: Arc<Counters>,
}

/// The counters of a bus without its devices. The last owner of a device drops it, and not every thread of a
/// sandbox may do that.
#[derive(Clone)]
pub struct BusWatch(Arc<Counters>);

impl BusWatch {
    /// Accesses that no device answered until now, as [`Bus::counters`].
    pub fn counters(&self) -> BusCounters {
        self.0.read()
    }
}

#[derive(Default)]
struct Counters {
    port_reads_unanswered: AtomicU64,
    port_writes_unanswered: AtomicU64,
    mmio_reads_unanswered: AtomicU64,
    mmio_writes_unanswered: AtomicU64,
}

impl Counters {
    fn set(&self, to: BusCounters) {
        self.port_reads_unanswered.store(to.port_reads_unanswered, Ordering::Relaxed);
        self.port_writes_unanswered.store(to.port_writes_unanswered, Ordering::Relaxed);
        self.mmio_reads_unanswered.store(to.mmio_reads_unanswered, Ordering::Relaxed);
        self.mmio_writes_unanswered.store(to.mmio_writes_unanswered, Ordering::Relaxed);
    }

    fn read(&self) -> BusCounters {
        let Counters { port_reads_unanswered, port_writes_unanswered, mmio_reads_unanswered, mmio_writes_unanswered } =
            self;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BusCounters {
            port_reads_unanswered: load(port_reads_unanswered),
            port_writes_unanswered: load(port_writes_unanswered),
            mmio_reads_unanswered: load(mmio_reads_unanswered),
            mmio_writes_unanswered: load(mmio_writes_unanswered),
        }
    }
}

/// Numbers of accesses that no device answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BusCounters {
    /// Number of reads of ports without a device, which returned ones.
    pub port_reads_unanswered: u64,
    /// Number of writes to ports without a device, which were dropped.
    pub port_writes_unanswered: u64,
    /// Number of reads of guest-physical addresses without RAM or device, which returned ones.
    pub mmio_reads_unanswered: u64,
    /// Number of writes to guest-physical addresses without RAM or device, which were dropped.
    pub mmio_writes_unanswered: u64,
}

/// The byte that an undriven bus reads as.
const UNCLAIMED: u8 = 0xff;

impl Bus {
    /// Creates a bus without devices.
    pub fn new() -> Bus {
        Bus::default()
    }

    /// Adds a device at these ports.
    pub fn insert(&mut self, ports: RangeInclusive<u16>, device: Box<dyn PortDevice>) {
        let overlaps = |range: &Range| *range.ports.start() <= *ports.end() && *ports.start() <= *range.ports.end();
        assert!(!self.ranges.iter().any(overlaps), "ports {ports:x?} have a device already");
        self.ranges.push(Range { ports, device: Mutex::new(device) });
    }

    /// Performs the guest's read of a port.
    pub fn read_port(&self, port: u16, data: &mut [u8]) {
        match self.find(port) {
            Some((range, offset)) => range.device.lock().read(offset, data),
            None => {
                self.counters.port_reads_unanswered.fetch_add(1, Ordering::Relaxed);
                data.fill(UNCLAIMED);
            }
        }
    }

    /// Performs the guest's write to a port.
    pub fn write_port(&self, port: u16, data: &[u8]) -> BusEvent {
        match self.find(port) {
            Some((range, offset)) => range.device.lock().write(offset, data),
            None => {
                self.counters.port_writes_unanswered.fetch_add(1, Ordering::Relaxed);
                BusEvent::None
            }
        }
    }

    /// Adds a device at these addresses.
    pub fn insert_memory(&mut self, addresses: GpaRange, device: Box<dyn MemoryDevice>) {
        let overlaps = |range: &MemoryRange| {
            range.addresses.start() < addresses.end() && addresses.start() < range.addresses.end()
        };
        assert!(!self.memory_ranges.iter().any(overlaps), "{addresses:?} has a device already");
        self.memory_ranges.push(MemoryRange { addresses, device: Mutex::new(device) });
    }

    /// Performs the guest's read of an address without RAM.
    pub fn read_memory(&self, address: Gpa, data: &mut [u8]) {
        match self.find_memory(address, data.len()) {
            Some((range, offset)) => range.device.lock().read(offset, data),
            None => {
                self.counters.mmio_reads_unanswered.fetch_add(1, Ordering::Relaxed);
                data.fill(UNCLAIMED);
            }
        }
    }

    /// Performs the guest's write to an address without RAM.
    pub fn write_memory(&self, address: Gpa, data: &[u8]) {
        match self.find_memory(address, data.len()) {
            Some((range, offset)) => range.device.lock().write(offset, data),
            None => {
                self.counters.mmio_writes_unanswered.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Tells every device that the guest has ended. All devices behind addresses together have [`PAUSE_WAIT_MAX`] to
    /// stop: a file of the host that hangs does not delay the end.
    pub fn flush(&self) {
        for range in &self.ranges {
            range.device.lock().flush();
        }
        let until = Instant::now() + PAUSE_WAIT_MAX;
        for range in &self.memory_ranges {
            range.device.lock().stop(until);
        }
    }

    /// Sets every device back to the machine's start. No vCPU runs, and the gate of guest RAM is open: a device
    /// that is working finishes first.
    pub fn reset(&self) {
        for range in &self.ranges {
            range.device.lock().reset();
        }
        for range in &self.memory_ranges {
            range.device.lock().reset();
        }
    }

    /// Stops all devices behind addresses between two pieces of work, in the order in which they were added, until the
    /// second value is dropped.
    ///
    /// # Errors
    /// The number of the device that does not come to rest by `until`, and the reason; then all continue.
    pub fn save_devices(&self, until: Instant) -> Result<(Vec<SavedDevice>, Vec<Rest>), (usize, NotAtRest)> {
        let save =
            |(number, range): (usize, &MemoryRange)| range.device.lock().save(until).map_err(|error| (number, error));
        let saved: Result<Vec<_>, _> = self.memory_ranges.iter().enumerate().map(save).collect();
        Ok(saved?.into_iter().unzip())
    }

    /// Makes the guest's writes to all disks durable, as long as `keep_on` says so; the guest may run meanwhile.
    /// Returns whether there are disks.
    ///
    /// # Errors
    /// [`FlushError`], the first one of a disk. A disk that hangs keeps its own thread only.
    pub fn flush_disks(&self, at_most: Duration, keep_on: &dyn Fn() -> bool) -> Result<bool, FlushError> {
        let began = Instant::now();
        let mut started: Vec<Flushing> = Vec::new();
        for range in &self.memory_ranges {
            // A vCPU that resets a disk that hangs has its device until the VM ends.
            started.extend(wait_for(began, at_most, keep_on, || {
                range.device.try_lock_for(LOOK_EVERY).and_then(|device| device.start_flush().ok())
            })?);
        }
        for flushing in &started {
            wait_for(began, at_most, keep_on, || match flushing.recv_timeout(LOOK_EVERY) {
                Ok(flushed) => Some(flushed),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(Err(io::Error::other("no thread flushes it"))),
            })??;
        }
        Ok(!started.is_empty())
    }

    /// Lets the devices behind addresses, which are as new, continue from saved states, in their order. What their
    /// drivers asked for before is done after [`Bus::kick_queues`].
    ///
    /// # Errors
    /// The number of the device that cannot continue, and the reason; then the machine must not run.
    pub fn restore_devices(&self, saved: &[SavedDevice]) -> Result<(), (usize, RestoreDeviceError)> {
        for (number, (range, saved)) in self.memory_ranges.iter().zip(saved).enumerate() {
            range.device.lock().restore(saved).map_err(|error| (number, error))?;
        }
        Ok(())
    }

    /// Makes the restored devices look at their queues.
    pub fn kick_queues(&self) {
        self.memory_ranges.iter().for_each(|range| range.device.lock().kick_queues());
    }

    /// Accesses that no device answered until now.
    pub fn counters(&self) -> BusCounters {
        self.counters.read()
    }

    /// Counts on from the accesses before a snapshot.
    pub fn restore_counters(&self, before: BusCounters) {
        self.counters.set(before);
    }

    /// A handle that reads [`Bus::counters`] later.
    pub fn watch(&self) -> BusWatch {
        BusWatch(Arc::clone(&self.counters))
    }

    fn find(&self, port: u16) -> Option<(&Range, u16)> {
        let range = self.ranges.iter().find(|range| range.ports.contains(&port))?;
        Some((range, port - range.ports.start()))
    }

    /// The device that covers all bytes of an access; an access that reaches beyond a device has none.
    fn find_memory(&self, address: Gpa, bytes: usize) -> Option<(&MemoryRange, u64)> {
        let range = self.memory_ranges.iter().find(|range| range.addresses.contains(address))?;
        let offset = (address - range.addresses.start()).get();
        let is_inside = offset.checked_add(bytes as u64).is_some_and(|end| end <= range.addresses.bytes().get());
        is_inside.then_some((range, offset))
    }
}

/// Asks `answer`, which waits for a moment, until it has something.
fn wait_for<T>(
    began: Instant,
    at_most: Duration,
    keep_on: &dyn Fn() -> bool,
    mut answer: impl FnMut() -> Option<T>,
) -> Result<T, FlushError> {
    loop {
        match answer() {
            Some(found) => return Ok(found),
            None if !keep_on() => return Err(FlushError::Cancelled),
            None if began.elapsed() >= at_most => return Err(FlushError::Late(at_most)),
            None => {}
        }
    }
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bus")
            .field("ports", &self.ranges.iter().map(|range| &range.ports).collect::<Vec<_>>())
            .field("memory", &self.memory_ranges.iter().map(|range| range.addresses).collect::<Vec<_>>())
            .field("counters", &self.counters())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads as its offset, and ends the guest with the written value. Notes until when it may stop.
    #[derive(Default)]
    struct Echo(Arc<Mutex<Vec<Instant>>>);

    /// A disk of which the flush is this.
    struct Flushed(Mutex<Option<Flushing>>);

    impl PortDevice for Echo {
        fn read(&mut self, offset: u16, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&mut self, offset: u16, data: &[u8]) -> BusEvent {
            BusEvent::Exit(u32::from(offset) << 8 | u32::from(data[0]))
        }
    }

    #[test]
    fn a_device_sees_offsets_from_its_first_port() {
        let mut bus = Bus::new();
        bus.insert(0x60..=0x64, Box::<Echo>::default());
        let mut data = [0];
        bus.read_port(0x64, &mut data);
        assert_eq!(data, [4]);
        assert_eq!(bus.write_port(0x61, &[7]), BusEvent::Exit(0x107));
    }

    #[test]
    fn an_unanswered_access_reads_as_ones_and_is_counted() {
        let bus = Bus::new();
        let mut data = [0; 4];
        bus.read_port(0xcf8, &mut data);
        assert_eq!(data, [0xff; 4]);
        assert_eq!(bus.write_port(0xcf8, &[1]), BusEvent::None);
        data = [0; 4];
        bus.read_memory(Gpa::new(0xd000_0000), &mut data);
        assert_eq!(data, [0xff; 4]);
        bus.write_memory(Gpa::new(0xd000_0000), &data);
        assert_eq!(
            bus.counters(),
            BusCounters {
                port_reads_unanswered: 1,
                port_writes_unanswered: 1,
                mmio_reads_unanswered: 1,
                mmio_writes_unanswered: 1,
            }
        );
    }

    impl MemoryDevice for Echo {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&mut self, _: u64, _: &[u8]) {}
        fn stop(&mut self, until: Instant) {
            self.0.lock().push(until);
        }
        fn reset(&mut self) {}
        fn save(&self, _: Instant) -> Result<(SavedDevice, Rest), NotAtRest> {
            Err(NotAtRest::Busy)
        }
        fn start_flush(&self) -> Result<Option<Flushing>, NotAtRest> {
            Ok(None)
        }
        fn restore(&mut self, _: &SavedDevice) -> Result<(), RestoreDeviceError> {
            Err(RestoreDeviceError::Damaged("a device without a state"))
        }
    }

    impl MemoryDevice for Flushed {
        fn read(&mut self, _: u64, _: &mut [u8]) {}
        fn write(&mut self, _: u64, _: &[u8]) {}
        fn reset(&mut self) {}
        fn save(&self, _: Instant) -> Result<(SavedDevice, Rest), NotAtRest> {
            Err(NotAtRest::Busy)
        }
        fn start_flush(&self) -> Result<Option<Flushing>, NotAtRest> {
            self.0.lock().take().map(Some).ok_or(NotAtRest::Busy)
        }
        fn restore(&mut self, _: &SavedDevice) -> Result<(), RestoreDeviceError> {
            Err(RestoreDeviceError::Damaged("a device without a state"))
        }
    }

    /// A bus with a device that has nothing to flush, and with such a disk.
    fn with_a_disk(flushing: Option<Flushing>) -> Bus {
        let mut bus = Bus::new();
        let devices: [Box<dyn MemoryDevice>; 2] = [Box::<Echo>::default(), Box::new(Flushed(Mutex::new(flushing)))];
        for (device, start) in devices.into_iter().zip([0x1000, 0x2000]) {
            let range = GpaRange::new(Gpa::new(start), wideleaf_policies::Bytes::new(0x100)).unwrap();
            bus.insert_memory(range, device);
        }
        bus
    }

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_flush_that_hangs_ends_when_its_caller_does_not_keep_on_or_at_its_limit() {
        let (_hangs, flushing) = std::sync::mpsc::channel();
        // The second one waits for the device itself.
        for flushing in [Some(flushing), None] {
            let bus = with_a_disk(flushing);
            let looks = AtomicU64::new(0);
            let flushed = bus.flush_disks(LONG, &|| looks.fetch_add(1, Ordering::Relaxed) < 2);
            assert!(matches!(flushed, Err(FlushError::Cancelled)) && looks.into_inner() == 3, "{flushed:?}");
        }
        let (_hangs, flushing) = std::sync::mpsc::channel();
        let flushed = with_a_disk(Some(flushing)).flush_disks(Duration::ZERO, &|| true);
        assert!(matches!(flushed, Err(FlushError::Late(_))), "{flushed:?}");
    }

    #[test]
    fn a_flush_says_whether_there_are_disks_and_why_one_failed() {
        assert!(matches!(Bus::new().flush_disks(LONG, &|| true), Ok(false)));
        let flush = |result: Option<io::Result<DeviceState>>| {
            let (done, flushing) = std::sync::mpsc::channel();
            result.into_iter().for_each(|result| done.send(result).unwrap());
            drop(done);
            with_a_disk(Some(flushing)).flush_disks(LONG, &|| true)
        };
        assert!(matches!(flush(Some(Ok(DeviceState::Entropy))), Ok(true)));
        let failed = flush(Some(Err(io::Error::other("a bad sector")))).unwrap_err();
        assert_eq!(failed.to_string(), "cannot flush a disk: a bad sector");
        assert!(matches!(flush(None), Err(FlushError::Io(_))), "its thread has gone");
    }

    #[test]
    fn a_device_in_memory_receives_whole_accesses_only() {
        let mut bus = Bus::new();
        let range = GpaRange::new(Gpa::new(0x1000), wideleaf_policies::Bytes::new(0x100)).unwrap();
        bus.insert_memory(range, Box::<Echo>::default());
        let mut data = [0; 4];
        bus.read_memory(Gpa::new(0x10fc), &mut data);
        assert_eq!(data, [0xfc; 4]);
        bus.read_memory(Gpa::new(0x10fd), &mut data);
        bus.write_memory(Gpa::new(0xfff), &data);
        assert_eq!(
            (data, bus.counters().mmio_reads_unanswered, bus.counters().mmio_writes_unanswered),
            ([0xff; 4], 1, 1)
        );
    }

    #[test]
    fn all_devices_of_a_guest_that_has_ended_stop_by_the_same_time() {
        let (mut bus, untils) = (Bus::new(), Arc::<Mutex<Vec<Instant>>>::default());
        for start in [0x1000, 0x2000] {
            let range = GpaRange::new(Gpa::new(start), wideleaf_policies::Bytes::new(0x100)).unwrap();
            bus.insert_memory(range, Box::new(Echo(Arc::clone(&untils))));
        }
        bus.flush();
        let untils = untils.lock();
        assert_eq!((untils.len(), untils[0]), (2, untils[1]));
    }

    #[test]
    #[should_panic(expected = "already")]
    fn two_devices_cannot_have_one_port() {
        let mut bus = Bus::new();
        bus.insert(0x60..=0x64, Box::<Echo>::default());
        bus.insert(0x64..=0x70, Box::<Echo>::default());
    }
}
