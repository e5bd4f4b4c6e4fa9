//! What a guest does with its disk: registers, configuration, rings, chains and headers. Its file stays as long as it is.
#![no_main]

mod virtio_driver;

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use tempfile::NamedTempFile;
use wideleaf_vmm::devices::virtio::VirtioDevice as _;
use wideleaf_vmm::devices::virtio::block::{Block, DiskImage, DiskOptions};

const DISK_BYTES: u64 = 64 << 10;

static FILE: OnceLock<NamedTempFile> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let file = FILE.get_or_init(|| {
        let file = NamedTempFile::new().expect("there is a folder for such files");
        file.as_file().set_len(DISK_BYTES).expect("there is room");
        file
    });
    let is_read_only = bytes.first().is_some_and(|byte| byte & 0x80 != 0);
    let options = DiskOptions { path: file.path().to_owned(), is_read_only, id: None };
    let device = Block::new(DiskImage::open(&options).expect("nobody else has it"));
    let (features, counters) = (device.features() as u32, device.counters());
    virtio_driver::drive(Box::new(device), features, bytes);
    assert_eq!(file.as_file().metadata().expect("it is open").len(), DISK_BYTES, "no request makes it longer");
    assert!(!is_read_only || counters.statistics().writes == 0, "it cannot be written");
});
