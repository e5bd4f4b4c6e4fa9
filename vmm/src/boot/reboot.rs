//! Another boot of a machine that was reset: in the same process and RAM, with the same devices.
//!
//! ```text
//!   1  devices and ports        as at the start: what they have begun ends, their drivers are gone
//!   2  RAM                      cleared (`wideleaf_memory::actuators::clear`)
//!   3  image, tables, boot data loaded as the first time, from memory: no file is opened
//!   4  interrupt controllers    put back, when no device interrupts any more
//!   5  vCPUs                    each by its own thread, see [`crate::run_loop`]
//! ```
//!
//! No vCPU runs the guest meanwhile, and the manager rests. These things stay: disks and their content, network
//! cards, the host's side of sockets, the balloon's target size, the time stamp counter.

use wideleaf_memory::actuators::clear::{Pages, clear};
use wideleaf_memory::host::HostError;
use wideleaf_memory::{GuestRam, LinuxHost};

use super::load;
use super::{BootError, BootImage};
use crate::config::VmConfig;
use crate::devices::Bus;
use crate::dma::DeviceMemory;
use crate::kvm::saved::SavedInterrupts;
use crate::kvm::{KvmError, Vm};
use crate::run_loop::PAUSE_WAIT_MAX;

/// State for another boot that is not part of the machine.
#[derive(Debug)]
pub(crate) struct Reboot {
    config: VmConfig,
    image: BootImage,
    devices: usize,
    interrupts: SavedInterrupts,
    /// Handle on the host, opened before the sandbox forbids it.
    host: LinuxHost,
}

/// The reasons why a machine does not boot again.
#[derive(Debug, thiserror::Error)]
pub enum RebootError {
    /// Moving guest RAM failed midway, and the machine is paused for good.
    #[error("cannot use its memory any more: moving it failed midway; start a new guest")]
    PausedForGood,
    /// RAM still has its old content.
    #[error("cannot clear its memory: {0}")]
    Clear(#[from] HostError),
    /// RAM could not be loaded as at the start.
    #[error(transparent)]
    Load(#[from] BootError),
    /// KVM could not be set back to the machine's start.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

impl Reboot {
    /// Takes the machine's state before its vCPUs run.
    pub(super) fn new(config: &VmConfig, image: &BootImage, devices: usize, vm: &Vm) -> Result<Reboot, BootError> {
        let host = LinuxHost::open().map_err(BootError::Host)?;
        let interrupts = SavedInterrupts::take(vm)?;
        Ok(Reboot { config: config.clone(), image: image.clone(), devices, interrupts, host })
    }

    /// Runs steps 1 to 4.
    ///
    /// # Errors
    /// [`RebootError`]; the machine must not run afterwards.
    pub(crate) fn prepare(
        &self,
        vm: &Vm,
        bus: &Bus,
        memory: &DeviceMemory,
        ram: &GuestRam,
        pages: Pages,
    ) -> Result<(), RebootError> {
        // A device that waits at a closed gate would never finish its work.
        if !memory.gate().is_open_within(PAUSE_WAIT_MAX) {
            return Err(RebootError::PausedForGood);
        }
        bus.reset();
        clear(&self.host, ram, pages)?;
        // Registers are set back, and directly started guests never come here, so there is nothing more to load.
        load::load(&self.config, &self.image, memory.memory(), self.devices)?;
        Ok(self.interrupts.put_back(vm)?)
    }
}
