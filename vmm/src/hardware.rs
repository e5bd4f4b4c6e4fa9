//! The parts of a VM that its configuration only describes: RAM, serial output, devices, sandbox. The caller makes
//! them, and they belong to the machine from its start on.

use std::sync::Arc;

use wideleaf_memory::GuestRam;

use crate::devices::SerialOutput;
use crate::devices::virtio::VirtioDevice;
use crate::sandbox::Sandbox;

/// The parts of a VM beside its configuration.
pub struct Hardware {
    /// New RAM, laid out by [`crate::VmConfig::ram_layout`], already advised and prefaulted as the caller wants.
    pub ram: Arc<GuestRam>,
    /// Sinks of the guest's serial output.
    pub output: SerialOutput,
    /// Devices in the order of their places: the first is `vda`, `eth0`, or the guest's name for the first
    /// of its kind.
    pub devices: Vec<Box<dyn VirtioDevice>>,
    /// Sandbox that restricts the process while the guest runs, for good.
    pub sandbox: Option<Arc<Sandbox>>,
}
