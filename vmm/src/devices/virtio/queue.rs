//! A queue at work: chains of buffers are taken from it one after another, each inside the gate for itself.

use std::sync::Arc;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::Interrupt;
use crate::dma::DeviceMemory;
use crate::kvm::guest_memory::GuestView;

/// Buffers that belong together: those the device reads, then those it writes.
pub type Chain<'a> = DescriptorChain<&'a GuestView>;

/// A queue that its driver set up, and what says that there is something in it.
#[derive(Debug)]
pub struct ActiveQueue {
    /// Its rings.
    pub queue: Queue,
    /// Written by KVM when the driver notifies the device.
    pub kick: Arc<EventFd>,
}

/// The driver left something in a queue that no driver may.
#[derive(Debug, thiserror::Error)]
#[error("the driver broke a queue: {0}")]
pub struct BrokenQueue(#[from] pub virtio_queue::Error);

impl ActiveQueue {
    /// Whether the driver set it up.
    pub fn is_ready(&self) -> bool {
        self.queue.ready()
    }

    /// Serves so many chains at most, so that others who wait for the same thread have their turn; whether the queue is empty now. If not, no
    /// notification comes for what is left. `serve` says how many bytes it wrote into a chain; see [`ActiveQueue::serve_one`].
    ///
    /// # Errors
    /// [`BrokenQueue`]: serve it no more, and say so ([`Interrupt::needs_reset`]).
    pub fn serve_some(
        &mut self,
        memory: &DeviceMemory,
        interrupt: &Interrupt,
        most: usize,
        mut serve: impl FnMut(Chain<'_>) -> u32,
    ) -> Result<bool, BrokenQueue> {
        self.queue.disable_notification(&*memory.access())?;
        for _ in 0..most {
            if !self.serve_one(memory, interrupt, &mut serve)? {
                // What came after the last look, and before notifications were wanted again, notified nobody.
                return Ok(!self.queue.enable_notification(&*memory.access())?);
            }
        }
        Ok(false)
    }

    /// Serves one chain; whether there was one. All of it is inside one [`DeviceMemory::access`]: `serve` asks for no other.
    ///
    /// # Errors
    /// [`BrokenQueue`], as for [`ActiveQueue::serve_some`].
    pub fn serve_one(
        &mut self,
        memory: &DeviceMemory,
        interrupt: &Interrupt,
        serve: impl FnOnce(Chain<'_>) -> u32,
    ) -> Result<bool, BrokenQueue> {
        let access = memory.access();
        let Some(chain) = self.queue.iter(&*access)?.next() else { return Ok(false) };
        let head = chain.head_index();
        let written = serve(chain);
        self.queue.add_used(&*access, head, written)?;
        if self.queue.needs_notification(&*access)? {
            interrupt.used();
        }
        Ok(true)
    }

    /// Takes the next chain and gives its head and what `read` made of it; whoever takes it hands it back with [`ActiveQueue::complete`]. For
    /// requests that take longer than one access may.
    ///
    /// # Errors
    /// [`BrokenQueue`], as for [`ActiveQueue::serve_some`].
    pub fn take<T>(
        &mut self,
        memory: &DeviceMemory,
        read: impl FnOnce(Chain<'_>) -> T,
    ) -> Result<Option<(u16, T)>, BrokenQueue> {
        let access = memory.access();
        let Some(chain) = self.queue.iter(&*access)?.next() else { return Ok(None) };
        Ok(Some((chain.head_index(), read(chain))))
    }

    /// Hands back a chain into which so many bytes were written.
    ///
    /// # Errors
    /// [`BrokenQueue`], as for [`ActiveQueue::serve_some`].
    pub fn complete(
        &mut self,
        memory: &DeviceMemory,
        interrupt: &Interrupt,
        head: u16,
        written: u32,
    ) -> Result<(), BrokenQueue> {
        let access = memory.access();
        self.queue.add_used(&*access, head, written)?;
        if self.queue.needs_notification(&*access)? {
            interrupt.used();
        }
        Ok(())
    }
}
