//! The registers as a driver, well-behaved or not, sees them.

use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::EFD_NONBLOCK;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSize};

use super::super::{ActivateError, DeviceKind, DeviceState};
use super::*;
use crate::kvm::GuestMemory;
use crate::run_loop::PAUSE_WAIT_MAX;

const FEATURE: u64 = 1 << 5;
const READY_STATUS: u32 = 1 | 2;
const FEATURES_OK: u32 = VIRTIO_CONFIG_S_FEATURES_OK;
const DRIVER_OK: u32 = VIRTIO_CONFIG_S_DRIVER_OK;
const NEEDS_RESET: u32 = VIRTIO_CONFIG_S_NEEDS_RESET;

/// Answers each buffer with its first byte plus one; records all calls.
#[derive(Default)]
struct Seen {
    activation: Mutex<Option<Activation>>,
    resets: AtomicU32,
}

struct Probe(Arc<Seen>);

impl VirtioDevice for Probe {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Entropy
    }
    fn features(&self) -> u64 {
        FEATURE
    }
    fn queue_sizes(&self) -> &[u16] {
        &[8, 4]
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.iter_mut().zip(offset..).for_each(|(byte, at)| *byte = if at < 8 { 0xc0 + at as u8 } else { 0 });
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if !activation.queues[0].is_ready() {
            return Err(ActivateError::NoQueue(0));
        }
        *self.0.activation.lock() = Some(activation);
        Ok(())
    }
    fn reset(&mut self) {
        self.0.resets.fetch_add(1, Ordering::Relaxed);
        *self.0.activation.lock() = None;
    }
    fn rest(&self, _: Instant) -> Result<Rest, NotAtRest> {
        let activation = self.0.activation.lock();
        let queues = activation.iter().flat_map(|activation| &activation.queues).map(|queue| queue.queue.state());
        Ok(Rest::held(DeviceState::Entropy, queues.enumerate().collect(), Box::new(())))
    }
    fn restore(&mut self, _: &DeviceState) -> Result<(), RestoreDeviceError> {
        Ok(())
    }
}

struct Driver {
    transport: Transport,
    seen: Arc<Seen>,
    memory: DeviceMemory,
}

fn driver() -> Driver {
    let layout = [GpaRange::new(Gpa::new(0), mib(2)).unwrap()];
    let ram = GuestRam::map(&layout, BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
    let memory = DeviceMemory::new(Arc::new(GuestMemory::new(ram).unwrap()));
    let seen = Arc::new(Seen::default());
    let event = || EventFd::new(EFD_NONBLOCK).unwrap();
    let interrupt = Interrupt::new(Some(event()));
    let device = Box::new(Probe(seen.clone()));
    let transport = Transport::new(device, memory.clone(), Workers::default(), interrupt, vec![event(), event()]);
    Driver { transport, seen, memory }
}

impl Driver {
    fn read(&mut self, register: u32) -> u32 {
        let mut data = [0xaa; 4];
        self.transport.read(u64::from(register), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&mut self, register: u32, value: u32) {
        self.transport.write(u64::from(register), &value.to_le_bytes());
    }

    fn take_features(&mut self, features: u64) {
        for half in [0, 1] {
            self.write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
            self.write(VIRTIO_MMIO_DRIVER_FEATURES, (features >> (32 * half)) as u32);
        }
    }

    fn set_up_queue(&mut self, queue: u32, at: u32) {
        self.write(VIRTIO_MMIO_QUEUE_SEL, queue);
        self.write(VIRTIO_MMIO_QUEUE_NUM, 4);
        self.write(VIRTIO_MMIO_QUEUE_DESC_LOW, at);
        self.write(VIRTIO_MMIO_QUEUE_AVAIL_LOW, at + 0x1000);
        self.write(VIRTIO_MMIO_QUEUE_USED_LOW, at + 0x2000);
        self.write(VIRTIO_MMIO_QUEUE_READY, 1);
    }

    /// Starts the device by all steps of section 3.1.1.
    fn start(&mut self) {
        self.write(VIRTIO_MMIO_STATUS, READY_STATUS);
        self.take_features(FEATURE | 1 << VIRTIO_F_VERSION_1);
        self.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK);
        self.set_up_queue(0, 0x1_0000);
        self.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK | DRIVER_OK);
    }

    /// Offers one descriptor of a byte to be read and one of two to be written, as the next chain.
    fn offer(&self, n: u16, byte: u8) {
        let view = self.memory.access();
        let (table, avail) = (0x1_0000, 0x1_1000);
        let descriptor = |at: u64, address: u64, len: u32, flags: u16, next: u16| {
            view.write_obj(address, GuestAddress(at)).unwrap();
            view.write_obj(len, GuestAddress(at + 8)).unwrap();
            view.write_obj(flags, GuestAddress(at + 12)).unwrap();
            view.write_obj(next, GuestAddress(at + 14)).unwrap();
        };
        descriptor(table, 0x2_0000, 1, 1, 1);
        descriptor(table + 16, 0x3_0000, 2, 2, 0);
        view.write_obj(byte, GuestAddress(0x2_0000)).unwrap();
        view.write_obj(0u16, GuestAddress(avail + 4 + 2 * u64::from(n % 4))).unwrap();
        view.write_obj(n + 1, GuestAddress(avail + 2)).unwrap();
    }
}

#[test]
fn the_handle_of_a_device_shows_the_progress_of_its_driver() {
    let mut driver = driver();
    let seen = driver.transport.driver_seen();
    let mut shows = |statuses: &[u32], state| {
        statuses.iter().for_each(|status| driver.write(VIRTIO_MMIO_STATUS, *status));
        assert_eq!(seen.state(), state, "{statuses:?}");
    };
    shows(&[], DriverState::None);
    shows(&[1], DriverState::Found);
    shows(&[READY_STATUS], DriverState::Probing);
    shows(&[READY_STATUS | VIRTIO_CONFIG_S_FAILED], DriverState::Failed);
    shows(&[0], DriverState::None);
    shows(&[READY_STATUS, READY_STATUS | FEATURES_OK], DriverState::Probing);
    assert!(!seen.has_worked());
    driver.start();
    assert_eq!((seen.state(), seen.has_worked()), (DriverState::Ready, true));
    // The device, not the driver, reports a broken queue.
    driver.seen.activation.lock().as_ref().unwrap().interrupt.needs_reset();
    assert_eq!(seen.state(), DriverState::Failed);
    driver.write(VIRTIO_MMIO_STATUS, 0);
    assert_eq!((seen.state(), seen.has_worked()), (DriverState::None, true));
}

#[test]
fn a_driver_reads_the_properties_of_the_device() {
    let mut driver = driver();
    assert_eq!(driver.read(VIRTIO_MMIO_MAGIC_VALUE).to_le_bytes(), *b"virt");
    assert_eq!((driver.read(VIRTIO_MMIO_VERSION), driver.read(VIRTIO_MMIO_DEVICE_ID)), (2, 4));
    assert_eq!(driver.read(VIRTIO_MMIO_DEVICE_FEATURES), FEATURE as u32);
    driver.write(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
    assert_eq!(driver.read(VIRTIO_MMIO_DEVICE_FEATURES), 1, "version 1");
    driver.write(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 2);
    assert_eq!(driver.read(VIRTIO_MMIO_DEVICE_FEATURES), 0);
    driver.write(VIRTIO_MMIO_QUEUE_SEL, 1);
    assert_eq!(driver.read(VIRTIO_MMIO_QUEUE_NUM_MAX), 4);
    driver.write(VIRTIO_MMIO_QUEUE_SEL, u32::MAX);
    assert_eq!((driver.read(VIRTIO_MMIO_QUEUE_NUM_MAX), driver.read(VIRTIO_MMIO_QUEUE_READY)), (0, 0));
    assert_eq!(driver.read(VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
}

#[test]
fn a_driver_that_follows_the_rules_is_served() {
    let mut driver = driver();
    driver.start();
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), READY_STATUS | FEATURES_OK | DRIVER_OK);
    driver.offer(0, 7);
    let seen = driver.seen.clone();
    let mut activation = seen.activation.lock();
    let Activation { memory, queues, interrupt, features, .. } = activation.as_mut().unwrap();
    assert_eq!(*features, FEATURE | 1 << VIRTIO_F_VERSION_1);
    assert!(queues[0].is_ready() && !queues[1].is_ready());
    let mut served = 0;
    queues[0]
        .serve_some(memory, interrupt, 2, |chain| {
            served += 1;
            let mut byte = [0];
            chain.clone().reader(chain.memory()).unwrap().read_exact(&mut byte).unwrap();
            chain.clone().writer(chain.memory()).unwrap().write_all(&[byte[0], byte[0] + 1]).unwrap();
            2
        })
        .unwrap();
    drop(activation);
    let view = driver.memory.access();
    let used: u16 = view.read_obj(GuestAddress(0x1_2002)).unwrap();
    let answer: [u8; 2] = view.read_obj(GuestAddress(0x3_0000)).unwrap();
    drop(view);
    assert_eq!((served, used, answer), (1, 1, [7, 8]));
    assert_eq!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    driver.write(VIRTIO_MMIO_INTERRUPT_ACK, 1);
    assert_eq!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    // The device's writes are in the log of devices: the answer's page and the used ring's.
    let log = driver.memory.memory().take_device_log(GpaRange::new(Gpa::new(0), mib(2)).unwrap());
    assert_eq!(log[0] >> 0x30 & 1, 1, "the answer");
    assert_eq!(log[0] >> 0x12 & 1, 1, "the used ring");
}

#[test]
fn queues_in_service_read_as_the_driver_set_them_up_here_and_on_the_other_machine() {
    let shown = |driver: &mut Driver, queue| {
        driver.write(VIRTIO_MMIO_QUEUE_SEL, queue);
        [VIRTIO_MMIO_QUEUE_NUM_MAX, VIRTIO_MMIO_QUEUE_READY].map(|register| driver.read(register))
    };
    let (mut here, mut there) = (driver(), driver());
    here.start();
    let (saved, _rest) = here.transport.save(Instant::now() + PAUSE_WAIT_MAX).unwrap();
    there.transport.restore(&saved).unwrap();
    for driver in [&mut here, &mut there] {
        assert!(driver.seen.activation.lock().is_some());
        assert_eq!([0, 1, 2].map(|queue| shown(driver, queue)), [[8, 1], [4, 0], [0, 0]]);
    }
}

#[test]
fn features_that_were_not_offered_or_no_version_1_are_refused() {
    for features in [FEATURE, FEATURE | 1 << 6 | 1 << VIRTIO_F_VERSION_1, 1 << 63 | 1 << VIRTIO_F_VERSION_1] {
        let mut driver = driver();
        driver.write(VIRTIO_MMIO_STATUS, READY_STATUS);
        driver.take_features(features);
        driver.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK);
        assert_eq!(driver.read(VIRTIO_MMIO_STATUS), READY_STATUS, "{features:#x}");
        driver.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK | DRIVER_OK);
        assert!(driver.seen.activation.lock().is_none());
    }
}

#[test]
fn writes_out_of_turn_are_dropped() {
    let mut driver = driver();
    // A queue before the features, features after them, a queue after the start.
    driver.set_up_queue(0, 0x1_0000);
    assert_eq!(driver.read(VIRTIO_MMIO_QUEUE_READY), 0);
    driver.start();
    driver.take_features(0);
    driver.set_up_queue(1, 0x4_0000);
    let activation = driver.seen.activation.lock();
    assert!(!activation.as_ref().unwrap().queues[1].is_ready());
    drop(activation);
    // A second start without a reset has no effect.
    driver.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK | DRIVER_OK);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS) & NEEDS_RESET, 0);
}

#[test]
fn a_queue_outside_ram_or_never_set_up_needs_a_reset_and_gets_it() {
    let mut driver = driver();
    driver.write(VIRTIO_MMIO_STATUS, READY_STATUS);
    driver.take_features(1 << VIRTIO_F_VERSION_1);
    driver.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK);
    driver.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK | DRIVER_OK);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS) & NEEDS_RESET, NEEDS_RESET, "queue 0 was never set up");
    driver.write(VIRTIO_MMIO_STATUS, 0);
    assert_eq!((driver.read(VIRTIO_MMIO_STATUS), driver.seen.resets.load(Ordering::Relaxed)), (0, 1));

    driver.write(VIRTIO_MMIO_STATUS, READY_STATUS);
    driver.take_features(1 << VIRTIO_F_VERSION_1);
    driver.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK);
    driver.set_up_queue(0, 0x1f_f000);
    driver.write(VIRTIO_MMIO_STATUS, READY_STATUS | FEATURES_OK | DRIVER_OK);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS) & NEEDS_RESET, NEEDS_RESET, "its used ring is beyond RAM");
    driver.write(VIRTIO_MMIO_STATUS, 0);
    driver.start();
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), READY_STATUS | FEATURES_OK | DRIVER_OK);
}

#[test]
fn a_reset_stops_the_device_and_clears_its_state() {
    let mut driver = driver();
    driver.start();
    driver.write(VIRTIO_MMIO_STATUS, 0);
    assert!(driver.seen.activation.lock().is_none());
    driver.write(VIRTIO_MMIO_QUEUE_SEL, 0);
    assert_eq!((driver.read(VIRTIO_MMIO_STATUS), driver.read(VIRTIO_MMIO_QUEUE_READY)), (0, 0));
    driver.start();
    assert!(driver.seen.activation.lock().is_some());
}

#[test]
fn a_reset_of_the_machine_clears_the_state_of_the_previous_driver() {
    let mut driver = driver();
    driver.start();
    let seen = driver.transport.driver_seen();
    driver.seen.activation.lock().as_ref().unwrap().interrupt.used();
    MemoryDevice::reset(&mut driver.transport);
    assert_eq!(driver.seen.resets.load(Ordering::Relaxed), 1);
    assert!(driver.seen.activation.lock().is_none(), "its queues are no longer served");
    assert_eq!((seen.state(), driver.read(VIRTIO_MMIO_STATUS)), (DriverState::None, 0));
    assert_eq!((driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), driver.read(VIRTIO_MMIO_QUEUE_READY)), (0, 0));
    driver.start();
    assert_eq!(seen.state(), DriverState::Ready, "the next driver finds it as the first did");
}

#[test]
fn registers_are_words_and_configuration_is_bytes() {
    let mut driver = driver();
    let mut two = [0xaa; 2];
    driver.transport.read(0, &mut two);
    assert_eq!(two, [0, 0]);
    let mut four = [0xaa; 4];
    driver.transport.read(2, &mut four);
    assert_eq!(four, [0; 4]);
    let mut eight = [0xaa; 8];
    driver.transport.read(0, &mut eight);
    assert_eq!(eight, [0; 8]);
    driver.transport.write(u64::from(VIRTIO_MMIO_STATUS), &[1]);
    driver.transport.write(u64::from(VIRTIO_MMIO_STATUS) + 1, &[1, 0, 0, 0]);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 0);
    let mut config = [0; 3];
    driver.transport.read(CONFIG + 6, &mut config);
    assert_eq!(config, [0xc6, 0xc7, 0]);
    driver.transport.write(CONFIG + 6, &[1; 8]);
}

#[test]
fn a_ring_that_claims_more_entries_than_it_has_is_broken() {
    let mut driver = driver();
    driver.start();
    driver.memory.access().write_obj(5u16, GuestAddress(0x1_1002)).unwrap();
    let seen = driver.seen.clone();
    let mut activation = seen.activation.lock();
    let Activation { memory, queues, interrupt, .. } = activation.as_mut().unwrap();
    assert!(queues[0].serve_some(memory, interrupt, 1, |_| panic!("there is no chain")).is_err());
    interrupt.needs_reset();
    drop(activation);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS) & NEEDS_RESET, NEEDS_RESET);
    assert_eq!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), 2, "the configuration changed");
}
