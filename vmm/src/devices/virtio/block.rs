//! A disk (Virtual I/O Device 1.2, section 5.2), backed directly by a file or a block device of the host.
//!
//! ```text
//!   chain ──▶ [`request`]: header, buffers, status byte ──▶ [`worker`], a thread per disk:
//!                                                           request by request until the queue is empty
//!                                                              │ a megabyte at most inside the gate at a time
//!                                                              ▼
//!                  guest RAM ◀── preadv, pwritev ──▶ [`image`]: the file, locked against others
//! ```
//!
//! The host's page cache of the file is the guest's write-back cache: FLUSH makes it durable. For a driver that
//! does not accept FLUSH, every write is durable when it completes (5.2.6.2).
//!
//! A VM that moves to another process hands the file's lock over ([`disk_locks`]): without it, no request is carried
//! out.

pub mod counters;
pub mod disk_locks;
pub mod image;
mod lock;
pub mod request;
mod worker;

use std::sync::Arc;
use std::time::Instant;

pub use counters::{DiskCounters, DiskStatistics};
pub use disk_locks::DiskLocks;
pub use image::{DiskError, DiskImage, DiskOptions};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES, virtio_blk_config,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use worker::Worker;

use super::{
    ActivateError, Activation, ActiveQueue, DeviceKind, DeviceState, Flusher, NotAtRest, Rest, RestoreDeviceError,
    VirtioDevice,
};

/// Unit of all positions and lengths in bytes, whatever the block size (5.2.6).
pub const SECTOR_BYTES: u64 = 512;

/// Largest number of requests under way at once, and of descriptors in one chain.
const QUEUE_SIZES: [u16; 1] = [256];
/// Largest number of a request's buffers beside header and status: a chain that fills the queue.
const SEGMENTS_MAX: u32 = QUEUE_SIZES[0] as u32 - 2;
/// Largest number of sectors in one segment of a DISCARD or WRITE_ZEROES: 1 GiB, so that a reset does not wait long
/// for one call.
const ZEROED_SECTORS_MAX: u32 = 1 << 21;
/// Largest number of segments of such a request.
const ZEROED_SEGMENTS_MAX: u32 = 32;

/// The disk device.
#[derive(Debug)]
pub struct Block {
    image: Arc<DiskImage>,
    counters: Arc<DiskCounters>,
    config: Vec<u8>,
    worker: Option<Worker>,
}

impl Block {
    /// Creates the device for the disk `image`.
    pub fn new(image: DiskImage) -> Block {
        let config = config_bytes(&image);
        Block { image: Arc::new(image), counters: Arc::default(), config, worker: None }
    }

    /// The disk, also after the device is handed over.
    pub fn image(&self) -> Arc<DiskImage> {
        Arc::clone(&self.image)
    }

    /// The device's counters, also after it is handed over.
    pub fn counters(&self) -> Arc<DiskCounters> {
        Arc::clone(&self.counters)
    }
}

impl VirtioDevice for Block {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn features(&self) -> u64 {
        let always = [
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
        ];
        let read_only = self.image.is_read_only().then_some(VIRTIO_BLK_F_RO);
        let zeroing = [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
        let zeroing = zeroing.into_iter().filter(|_| self.image.can_zero());
        always.into_iter().chain(read_only).chain(zeroing).fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.config.get(offset..)).unwrap_or(&[]);
        data.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if !activation.queues.first().is_some_and(ActiveQueue::is_ready) {
            return Err(ActivateError::NoQueue(0));
        }
        let (image, counters) = (Arc::clone(&self.image), Arc::clone(&self.counters));
        self.worker = Some(Worker::start(image, counters, activation)?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
    }

    /// The request that was begun is completed; requests in the ring stay there. Nothing here waits for the file.
    fn rest(&self, until: Instant) -> Result<Rest, NotAtRest> {
        let resting = self.worker.as_ref().map(|worker| worker.service().rest(until).ok_or(NotAtRest::Busy));
        let resting = resting.transpose()?;
        Ok(match resting {
            None => Rest::idle(None),
            Some(resting) => Rest::held(None, vec![(0, resting.queue.state())], Box::new(resting)),
        })
    }

    fn flusher(&self) -> Option<Flusher> {
        let image = Arc::clone(&self.image);
        Some(Box::new(move || {
            image.flush()?;
            image.saved().map(DeviceState::Block)
        }))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreDeviceError> {
        let DeviceState::Block(saved) = state else { return Ok(()) };
        self.image.check_is(saved)
    }
}

/// The configuration of section 5.2.4. Fields of features that are not offered are zero.
fn config_bytes(image: &DiskImage) -> Vec<u8> {
    use std::mem::offset_of;
    let mut bytes = vec![0; size_of::<virtio_blk_config>()];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(offset_of!(virtio_blk_config, capacity), &image.sectors().to_le_bytes());
    put(offset_of!(virtio_blk_config, seg_max), &SEGMENTS_MAX.to_le_bytes());
    put(offset_of!(virtio_blk_config, blk_size), &(SECTOR_BYTES as u32).to_le_bytes());
    if image.can_zero() {
        let alignment = image.hole_sectors();
        put(offset_of!(virtio_blk_config, max_discard_sectors), &ZEROED_SECTORS_MAX.to_le_bytes());
        put(offset_of!(virtio_blk_config, max_discard_seg), &ZEROED_SEGMENTS_MAX.to_le_bytes());
        put(offset_of!(virtio_blk_config, discard_sector_alignment), &alignment.to_le_bytes());
        put(offset_of!(virtio_blk_config, max_write_zeroes_sectors), &ZEROED_SECTORS_MAX.to_le_bytes());
        put(offset_of!(virtio_blk_config, max_write_zeroes_seg), &ZEROED_SEGMENTS_MAX.to_le_bytes());
        put(offset_of!(virtio_blk_config, write_zeroes_may_unmap), &[1]);
    }
    bytes
}

#[cfg(test)]
mod tests;
