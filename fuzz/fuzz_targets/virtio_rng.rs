//! Input: a guest's use of its source of random bytes: registers, rings, chains. Afterwards a driver that follows the
//! rules gets exactly the bytes that it asks for.
#![no_main]

mod virtio_driver;

use libfuzzer_sys::fuzz_target;
use virtio_driver::{BUFFERS_AT, Driver, Input, STEPS_MAX, WRITE};
use wideleaf_vmm::devices::virtio::VirtioDevice as _;
use wideleaf_vmm::devices::virtio::rng::Entropy;

fuzz_target!(|bytes: &[u8]| {
    let device = Entropy::default();
    let (counters, offered) = (device.counters(), device.features());
    let mut driver = Driver::new(Box::new(device));
    let mut input = Input(bytes);
    driver.start(input.features(offered));
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        driver.step(&mut input, offered);
    }
    // After any input, a driver that follows the rules is served.
    driver.start(0);
    let before = counters.statistics();
    driver.describe(0, 0, (BUFFERS_AT, 16), WRITE, 0);
    driver.offer(0, 0);
    driver.notify(0);
    assert!(driver.is_served(0));
    let after = counters.statistics();
    assert_eq!((after.requests, after.bytes), (before.requests + 1, before.bytes + 16));
});
