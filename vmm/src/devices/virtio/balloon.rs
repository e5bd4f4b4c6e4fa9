//! Memory that the guest gives back (Virtual I/O Device 1.2, section 5.5): a balloon with a target that can change at
//! run time, statistics of the guest, and reports of free pages.
//!
//! ```text
//!   inflate ── page numbers ─┐                    ┌─ the window is free, or not huge ─▶ released
//!   deflate ── page numbers ─┼─▶ the RAM's book ──┤
//!   reports ── free pages ───┘                    └─ a piece of a huge page ──────────▶ kept
//!                               [`wideleaf_memory::guest_freed`]
//!
//!   [`BalloonHandle`] ── target ──▶ num_pages ──▶ the driver ── actual
//! ```
//!
//! A driver that announces its next use of a balloon page (`MUST_TELL_HOST`; Linux does) has pages that can be
//! released later. A driver without it is trusted only while the device holds the buffer: its inflated pages are
//! treated like a report.
//!
//! The balloon's own thread serves the queues: giving back gigabytes takes longer than a disk may wait.

use std::sync::Arc;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wideleaf_memory::LinuxHost;
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_policies::Bytes;

use super::{ActivateError, Activation, ActiveQueue, DeviceKind, IoThread, Subscription, VirtioDevice};

mod handle;
mod serving;
mod statistics;

pub use handle::{BalloonHandle, BalloonReport, TooMuch};
pub use statistics::GuestStatistics;

use serving::{Queues, Serving, StatisticsQueue};

/// Feature bits (5.5.3); `virtio-bindings` has none of the balloon's.
pub mod feature {
    /// The driver announces its next use of a balloon page.
    pub const MUST_TELL_HOST: u32 = 0;
    /// There is a queue of statistics.
    pub const STATS_VQ: u32 = 1;
    /// The guest may take pages back when it has no other memory.
    pub const DEFLATE_ON_OOM: u32 = 2;
    /// There is a queue of reports.
    pub const PAGE_REPORTING: u32 = 5;
}

/// Sizes of the queues for inflate, deflate, statistics, reports. Linux puts 256 page numbers in a buffer, and 32
/// runs of pages in a report.
const QUEUE_SIZES: [u16; 4] = [128, 128, 16, 64];

/// Bytes of `actual` in the configuration (5.5.4): behind `num_pages`, and last.
const ACTUAL: std::ops::Range<usize> = 4..8;

/// The balloon device.
pub struct Balloon {
    handle: BalloonHandle,
    /// Number of pages that the balloon holds, written by the driver, piece by piece if it likes.
    actual: [u8; 4],
    serving: Option<Subscription>,
    give_back: Option<GiveBack>,
}

impl Balloon {
    /// An empty balloon for a guest with `ram` bytes of RAM, with the target `target`.
    ///
    /// # Errors
    /// [`TooMuch`] where the target exceeds the RAM.
    pub fn new(ram: Bytes, target: Bytes) -> Result<Balloon, TooMuch> {
        let handle = BalloonHandle::new(ram);
        handle.set_target(target)?;
        Ok(Balloon { handle, actual: [0; 4], serving: None, give_back: None })
    }

    /// A handle that steers and reads the balloon, also after the device is handed over.
    pub fn handle(&self) -> BalloonHandle {
        self.handle.clone()
    }

    fn config(&self) -> [u8; 8] {
        let mut config = [0; 8];
        config[..ACTUAL.start].copy_from_slice(&self.handle.target_pages().to_le_bytes());
        config[ACTUAL].copy_from_slice(&self.actual);
        config
    }
}

impl VirtioDevice for Balloon {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Balloon
    }

    fn features(&self) -> u64 {
        use feature::{DEFLATE_ON_OOM, MUST_TELL_HOST, PAGE_REPORTING, STATS_VQ};
        let bits = [MUST_TELL_HOST, STATS_VQ, DEFLATE_ON_OOM, PAGE_REPORTING, VIRTIO_RING_F_EVENT_IDX];
        bits.iter().fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = self.config();
        let from = usize::try_from(offset).ok().and_then(|offset| config.get(offset..)).unwrap_or_default();
        data.iter_mut().zip(from).for_each(|(byte, of_config)| *byte = *of_config);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            let at = usize::try_from(at).ok().and_then(|at| at.checked_sub(ACTUAL.start));
            if let Some(of_actual) = at.and_then(|at| self.actual.get_mut(at)) {
                *of_actual = *byte;
            }
        }
        self.handle.actual_is(u32::from_le_bytes(self.actual));
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let has = |bit| activation.has(bit);
        let (has_statistics, has_reports, tells) =
            (has(feature::STATS_VQ), has(feature::PAGE_REPORTING), has(feature::MUST_TELL_HOST));
        let Activation { memory, queues, interrupt, threads, .. } = activation;
        let queues = Queues::of(queues, has_statistics, has_reports)?;
        let host = LinuxHost::open().map_err(|error| ActivateError::Host { what: error.what, source: error.source })?;
        let ram = Arc::clone(memory.memory().ram());
        let no_ram = |error| ActivateError::Host { what: "the balloon", source: std::io::Error::other(error) };
        let give_back = GiveBack::new(Arc::new(host), Arc::clone(&ram)).map_err(no_ram)?;
        let no_event = |source| ActivateError::Host { what: "eventfd", source };
        let ask = EventFd::new(EFD_NONBLOCK).map_err(no_event)?;
        self.handle.is_active(ram, Arc::clone(&interrupt), ask.try_clone().map_err(no_event)?);
        self.give_back = Some(give_back.clone());
        let serving = Serving { queues, ask, memory, interrupt, give_back, tells, handle: self.handle.clone() };
        self.serving = Some(Arc::new(IoThread::new(threads)).add(Box::new(serving))?);
        Ok(())
    }

    /// All memory belongs to the guest again: the next driver does not know of this balloon.
    fn reset(&mut self) {
        self.serving = None;
        self.handle.is_over();
        if let Some(give_back) = self.give_back.take() {
            give_back.ram().given_back().book().forget_inflated();
        }
        self.actual = [0; 4];
    }
}

impl Queues {
    /// Assigns the queues. Linux and QEMU number those that the features name consecutively.
    fn of(queues: Vec<ActiveQueue>, has_statistics: bool, has_reports: bool) -> Result<Queues, ActivateError> {
        let mut queues = queues.into_iter().enumerate();
        let mut next = |is_there: bool| match is_there.then(|| queues.next()).flatten() {
            Some((number, queue)) if !queue.is_ready() => Err(ActivateError::NoQueue(number)),
            found => Ok(found.map(|(_, queue)| queue)),
        };
        let inflate = next(true)?.ok_or(ActivateError::NoQueue(0))?;
        let deflate = next(true)?.ok_or(ActivateError::NoQueue(1))?;
        let statistics = next(has_statistics)?.map(|queue| StatisticsQueue { queue, held: None });
        Ok(Queues { inflate, deflate, statistics, reports: next(has_reports)? })
    }
}

#[cfg(test)]
mod tests;
