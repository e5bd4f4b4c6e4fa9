//! A queue in service: chains of buffers are taken from it one after another, each in its own access
//! inside the gate.

use std::sync::Arc;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::Interrupt;
use crate::dma::DeviceMemory;
use crate::kvm::guest_memory::GuestView;

/// Buffers of one request: those that the device reads, then those that it writes.
pub type Chain<'a> = DescriptorChain<&'a GuestView>;

/// A queue that its driver set up, and the event of its notifications.
#[derive(Debug)]
pub struct ActiveQueue {
    /// Rings of the queue.
    pub queue: Queue,
    /// Event that KVM writes when the driver notifies the device.
    pub kick: Arc<EventFd>,
}

/// The driver put something invalid into a queue.
#[derive(Debug, thiserror::Error)]
#[error("the driver broke a queue: {0}")]
pub struct BrokenQueue(#[from] pub virtio_queue::Error);

impl ActiveQueue {
    /// Whether the driver set the queue up.
    pub fn is_ready(&self) -> bool {
        self.queue.ready()
    }

    /// Serves at most `most` chains, so that other devices of the same thread have their turn. Returns whether the
    /// queue is empty now. If not, no notification comes for the rest. `serve` returns the number of bytes that it
    /// wrote into a chain; see [`ActiveQueue::serve_one`].
    ///
    /// # Errors
    /// [`BrokenQueue`]: stop serving it, and report it ([`Interrupt::needs_reset`]).
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
                // A chain that came after the last look, and before notifications were enabled again,
                // caused no notification.
                return Ok(!self.queue.enable_notification(&*memory.access())?);
            }
        }
        Ok(false)
    }

    /// Serves one chain, and returns whether there was one. All of it is inside one [`DeviceMemory::access`]:
    /// `serve` must not ask for another.
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
        self.hand_back(&access, interrupt, head, written)?;
        Ok(true)
    }

    /// Takes the next chain and returns its head and the result of `read`. The caller hands it back with
    /// [`ActiveQueue::complete`]. For requests that take longer than one access may.
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

    /// Hands back a chain into which `written` bytes were written.
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
        self.hand_back(&memory.access(), interrupt, head, written)
    }

    fn hand_back(
        &mut self,
        view: &GuestView,
        interrupt: &Interrupt,
        head: u16,
        written: u32,
    ) -> Result<(), BrokenQueue> {
        self.queue.add_used(view, head, written)?;
        if self.queue.needs_notification(view)? {
            interrupt.used();
        }
        Ok(())
    }
}
