//! What the two queues of a card have in common: the state that both use, and the event that each waits for.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::Link;
use super::counters::Counting;
use crate::devices::virtio::Interrupt;
use crate::dma::DeviceMemory;

/// State that both queues use.
pub(super) struct Shared {
    pub(super) memory: DeviceMemory,
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) link: Arc<dyn Link>,
    pub(super) counting: Arc<Counting>,
    pub(super) is_up: Arc<AtomicBool>,
}

/// The event that a queue waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The link: a frame, or room for one.
    Link,
    /// The driver, which adds buffers.
    Buffers,
    /// Its own next turn, because there is more to do.
    Again,
    /// No event, because the link has ended.
    Gone,
}
