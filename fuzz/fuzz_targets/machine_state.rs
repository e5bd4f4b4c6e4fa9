//! The state of a machine as `machine.json` of a snapshot has it, or the source of a migration sends it, and the
//! devices that continue from it.
//!
//! Input: length of the text (u16), the text, and the rest is guest RAM from its second page on.
#![no_main]

#[allow(dead_code, reason = "its steps are those of other targets")]
mod virtio_driver;

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use libfuzzer_sys::fuzz_target;
use virtio_driver::{BUFFERS_AT, Driver, RAM_BYTES, WRITE};
use wideleaf_policies::Bytes;
use wideleaf_vmm::MachineState;
use wideleaf_vmm::devices::virtio::balloon::Balloon;
use wideleaf_vmm::devices::virtio::block::{Block, DiskImage, DiskOptions};
use wideleaf_vmm::devices::virtio::rng::Entropy;
use wideleaf_vmm::devices::virtio::vsock::{HostSocket, Vsock};
use wideleaf_vmm::devices::virtio::{DeviceKind, SavedDevice, VirtioDevice};

/// Most devices of one input: a VM has eight at most.
const DEVICES_MAX: usize = 8;
const DISK_BYTES: u64 = 1 << 16;
/// Address of what the input puts into RAM.
const RAM_AT: u64 = 0x1000;

fuzz_target!(|bytes: &[u8]| {
    let Some((length, rest)) = bytes.split_first_chunk::<2>() else { return };
    let (text, ram) = rest.split_at(rest.len().min(usize::from(u16::from_le_bytes(*length))));
    if let Ok(state) = serde_json::from_slice::<MachineState>(text) {
        is_read_as_written(&state);
        state.devices.iter().take(DEVICES_MAX).for_each(|saved| continues(saved, ram));
    }
    // Most inputs are one device.
    if let Ok(saved) = serde_json::from_slice::<SavedDevice>(text) {
        continues(&saved, ram);
    }
});

fn is_read_as_written(state: &MachineState) {
    let text = serde_json::to_string(state).expect("it is plain data");
    let again: MachineState = serde_json::from_str(&text).expect("it was written");
    assert_eq!(serde_json::to_string(&again).expect("it is plain data"), text);
    let layout = state.ram_layout().unwrap_or_default();
    assert!(layout.iter().all(|range| range.start() <= range.end()), "{layout:?}");
}

/// A device continues from the state, or refuses it in one line; after it, a driver that follows the rules is served.
fn continues(saved: &SavedDevice, ram: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = folder.path().join("disk");
    let mut driver = match saved.device.kind() {
        DeviceKind::Entropy => Driver::new(Box::new(Entropy::default())),
        DeviceKind::Balloon => Driver::alone(balloon()),
        DeviceKind::Block => Driver::alone(block(&disk)),
        DeviceKind::Vsock => {
            let host = HostSocket::listen(&folder.path().join("v")).expect("a socket");
            Driver::new(Box::new(Vsock::new(3, host)))
        }
        DeviceKind::Net => return,
    };
    driver.put(RAM_AT, &ram[..ram.len().min((RAM_BYTES - RAM_AT) as usize)]);
    match driver.restore(saved) {
        Ok(()) => driver.look(),
        Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
    }
    driver.start(0);
    if saved.device.kind() == DeviceKind::Entropy {
        driver.describe(0, 0, (BUFFERS_AT, 16), WRITE, 0);
        driver.offer(0, 0);
        driver.notify(0);
        assert!(driver.is_served(0));
    }
    drop(driver);
    if saved.device.kind() == DeviceKind::Block {
        assert_eq!(disk.metadata().expect("it stays").len(), DISK_BYTES);
    }
}

fn balloon() -> Box<dyn VirtioDevice> {
    Box::new(Balloon::new(Bytes::new(RAM_BYTES), Bytes::ZERO).expect("a balloon of zero bytes fits"))
}

fn block(path: &std::path::Path) -> Box<dyn VirtioDevice> {
    let file = File::create(path).expect("a file");
    file.write_all_at(&[7; 512], 0).and_then(|()| file.set_len(DISK_BYTES)).expect("it has room");
    let options = DiskOptions { path: path.to_owned(), is_read_only: false, id: Some("disk".to_owned()) };
    Box::new(Block::new(DiskImage::open(&options).expect("it is free")))
}
