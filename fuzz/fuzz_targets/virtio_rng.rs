//! What a guest does with its source of random bytes: registers, rings, chains.
#![no_main]

mod virtio_driver;

use libfuzzer_sys::fuzz_target;
use wideleaf_vmm::devices::virtio::VirtioDevice as _;
use wideleaf_vmm::devices::virtio::rng::Entropy;

fuzz_target!(|bytes: &[u8]| {
    let device = Entropy::default();
    let features = device.features() as u32;
    virtio_driver::drive(Box::new(device), features, bytes);
});
