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
use std::time::Instant;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT as _;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wideleaf_memory::LinuxHost;
use wideleaf_memory::actuators::give_back::GiveBack;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};

use super::saved::SavedBalloon;
use super::service::{Served, Service};
use super::{
    ActivateError, Activation, ActiveQueue, DeviceKind, DeviceState, IoThread, NotAtRest, Rest, RestoreDeviceError,
    Subscription, VirtioDevice,
};

mod handle;
mod serving;
mod statistics;

pub use handle::{BalloonHandle, BalloonReport, BalloonTooLarge};
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
    serving: Option<(Subscription, Arc<Service<Serving>>)>,
    give_back: Option<GiveBack>,
    /// State of a snapshot, for the next start.
    restored: SavedBalloon,
}

impl Balloon {
    /// An empty balloon for a guest with `ram` bytes of RAM, with the target `target`.
    ///
    /// # Errors
    /// [`BalloonTooLarge`] where the target exceeds the RAM.
    pub fn new(ram: Bytes, target: Bytes) -> Result<Balloon, BalloonTooLarge> {
        let handle = BalloonHandle::new(ram);
        handle.set_target(target)?;
        Ok(Balloon { handle, actual: [0; 4], serving: None, give_back: None, restored: SavedBalloon::default() })
    }

    /// A handle that steers and reads the balloon, also after the device is handed over.
    pub fn handle(&self) -> BalloonHandle {
        self.handle.clone()
    }

    /// The state without a service: its driver has not come, or is gone.
    fn idle(&self) -> SavedBalloon {
        let actual_pages = u32::from_le_bytes(self.actual);
        SavedBalloon { target_pages: self.handle.target_pages(), actual_pages, ..SavedBalloon::default() }
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
        let mut queues = Queues::of(queues, has_statistics, has_reports)?;
        let restored = std::mem::take(&mut self.restored);
        if let Some(statistics) = &mut queues.statistics {
            statistics.held = restored.statistics_held.filter(|head| *head < statistics.queue.queue.size());
        }
        let host = LinuxHost::open().map_err(|error| ActivateError::Host { what: error.what, source: error.source })?;
        let ram = Arc::clone(memory.memory().ram());
        let no_ram = |error| ActivateError::Host { what: "the balloon", source: std::io::Error::other(error) };
        let give_back = GiveBack::new(Arc::new(host), Arc::clone(&ram)).map_err(no_ram)?;
        let no_event = |source| ActivateError::Host { what: "eventfd", source };
        let ask = EventFd::new(EFD_NONBLOCK).map_err(no_event)?;
        self.handle.is_active(ram, Arc::clone(&interrupt), ask.try_clone().map_err(no_event)?);
        give_back.inflate_restored(restored.inflated.iter().filter_map(|run| range_of(*run)));
        self.give_back = Some(give_back.clone());
        let serving = Serving { queues, ask, memory, interrupt, give_back, tells, handle: self.handle.clone() };
        let service = Service::new(serving);
        let subscription = Arc::new(IoThread::new(threads)).add(Box::new(Served(Arc::clone(&service))))?;
        self.serving = Some((subscription, service));
        Ok(())
    }

    /// All memory belongs to the guest again: the next driver does not know of this balloon.
    fn reset(&mut self) {
        self.serving = None;
        self.handle.is_over();
        if let Some(give_back) = self.give_back.take() {
            give_back.ram().given_back().book().forget_inflated();
        }
        (self.actual, self.restored) = ([0; 4], SavedBalloon::default());
    }

    fn rest(&self, until: Instant) -> Result<Rest, NotAtRest> {
        let idle = self.idle();
        let Some((_, service)) = &self.serving else { return Ok(Rest::idle(DeviceState::Balloon(idle))) };
        let resting = service.rest(until).ok_or(NotAtRest::Busy)?;
        let inflated = resting.give_back.ram().given_back().book().inflated_runs().into_iter().map(of_range).collect();
        let statistics_held = resting.queues.statistics.as_ref().and_then(|statistics| statistics.held);
        let queues = resting.queues.all().map(|(number, queue)| (number, queue.queue.state())).collect();
        let device = DeviceState::Balloon(SavedBalloon { inflated, statistics_held, ..idle });
        Ok(Rest::held(device, queues, Box::new(resting)))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreDeviceError> {
        let DeviceState::Balloon(saved) = state else { return Ok(()) };
        // Each run ends before the next one begins, so restoring them takes no longer than the RAM is large.
        let is_ascending = saved.inflated.windows(2).all(|pair| ends_before(pair[0], pair[1]));
        if !is_ascending || saved.inflated.iter().any(|run| range_of(*run).is_none()) {
            return Err(RestoreDeviceError::Damaged("the balloon's pages are not in order"));
        }
        let target = PageSize::Base4K.bytes() * u64::from(saved.target_pages);
        self.handle.set_target(target).map_err(|_| RestoreDeviceError::Damaged("its target exceeds the RAM"))?;
        self.actual = saved.actual_pages.to_le_bytes();
        self.handle.actual_is(saved.actual_pages);
        self.restored = saved.clone();
        Ok(())
    }
}

/// The memory of a saved run of pages; `None` where it has no end.
fn range_of((first, pages): (u64, u64)) -> Option<GpaRange> {
    let page = PageSize::Base4K.bytes().get();
    GpaRange::new(Gpa::new(first.checked_mul(page)?), Bytes::new(pages.checked_mul(page)?))
}

fn of_range(range: GpaRange) -> (u64, u64) {
    let page = PageSize::Base4K.bytes().get();
    (range.start().get() / page, range.bytes().get() / page)
}

fn ends_before((first, pages): (u64, u64), (next, _): (u64, u64)) -> bool {
    first.checked_add(pages).is_some_and(|end| end <= next)
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

    /// All queues that the driver set up, with their numbers.
    fn all(&self) -> impl Iterator<Item = (usize, &ActiveQueue)> {
        let statistics = self.statistics.as_ref().map(|statistics| &statistics.queue);
        [&self.inflate, &self.deflate].into_iter().chain(statistics).chain(&self.reports).enumerate()
    }
}

#[cfg(test)]
mod tests;
