//! Another boot of a machine that was reset: in the same process, the same RAM, with the same devices.
//!
//! ```text
//!   1  devices and ports        as at the start: what they have begun ends, their drivers are gone
//!   2  RAM                      cleared (`wideleaf_memory::actuators::clear`)
//!   3  image, tables, boot data loaded as the first time, from memory: no file is opened
//!   4  interrupt controllers    put back, when no device interrupts any more
//!   5  vCPUs                    each by its own thread, see [`crate::run_loop`]
//! ```
//!
//! No vCPU is in the guest, and the manager rests. What stays: disks and what is on them, cards, the host's side of sockets, the size the balloon
//! is to have, the time stamp counter.

use wideleaf_memory::actuators::clear::{Pages, clear};
use wideleaf_memory::host::HostError;
use wideleaf_memory::{GuestRam, LinuxHost};

use super::load;
use super::{BootError, BootImage};
use crate::config::VmConfig;
use crate::devices::Bus;
use crate::dma::DeviceMemory;
use crate::kvm::fresh::FreshInterrupts;
use crate::kvm::{KvmError, Vm};
use crate::run_loop::PAUSE_WAIT_MAX;

/// What another boot takes that is not part of the machine.
#[derive(Debug)]
pub(crate) struct BootAgain {
    config: VmConfig,
    image: BootImage,
    devices: usize,
    interrupts: FreshInterrupts,
    /// Opened while files can be.
    host: LinuxHost,
}

/// Why a machine does not boot again.
#[derive(Debug, thiserror::Error)]
pub enum BootAgainError {
    /// What moved guest RAM failed in the midst of it, and the machine is paused for good.
    #[error("its memory was being moved when that failed, and nothing of it may be touched any more")]
    PausedForGood,
    /// RAM still has what was in it.
    #[error("its memory cannot be cleared: {0}")]
    Clear(#[from] HostError),
    /// RAM is not as at the start.
    #[error(transparent)]
    Load(#[from] BootError),
    /// KVM has something of the machine before.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

impl BootAgain {
    /// Of a machine whose vCPUs have not run.
    pub(super) fn new(config: &VmConfig, image: &BootImage, devices: usize, vm: &Vm) -> Result<BootAgain, BootError> {
        let host = LinuxHost::open().map_err(BootError::Host)?;
        let interrupts = FreshInterrupts::take(vm)?;
        Ok(BootAgain { config: config.clone(), image: image.clone(), devices, interrupts, host })
    }

    /// Steps 1 to 4.
    ///
    /// # Errors
    /// [`BootAgainError`]; the machine must not run any more.
    pub(crate) fn prepare(
        &self,
        vm: &Vm,
        bus: &Bus,
        memory: &DeviceMemory,
        ram: &GuestRam,
        pages: Pages,
    ) -> Result<(), BootAgainError> {
        // A device that stands at a closed gate would never end what it has begun.
        if !memory.gate().is_open_within(PAUSE_WAIT_MAX) {
            return Err(BootAgainError::PausedForGood);
        }
        bus.reset();
        clear(&self.host, ram, pages)?;
        // Registers are put back as they were, and no directly started guest comes here: there is nothing more to load.
        load::load(&self.config, &self.image, memory.memory(), self.devices)?;
        Ok(self.interrupts.put_back(vm)?)
    }
}
