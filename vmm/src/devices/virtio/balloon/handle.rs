//! The balloon from outside: its target, its actual size, the guest's memory statistics, and its counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use vmm_sys_util::eventfd::EventFd;
use wideleaf_memory::GuestRam;
use wideleaf_memory::guest_freed::GivenBackCounters;
use wideleaf_policies::{Bytes, PageSize};

use super::statistics::GuestStatistics;
use crate::devices::virtio::Interrupt;

/// Steers a balloon and reads it, from any thread, before and after its driver is present.
#[derive(Clone, Debug)]
pub struct BalloonHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    ram_bytes: Bytes,
    target: AtomicU32,
    actual: AtomicU32,
    state: Mutex<State>,
    pub(super) counters: Counters,
}

#[derive(Debug, Default)]
struct State {
    /// Interrupt of the device, while there is a driver.
    interrupt: Option<Arc<Interrupt>>,
    ask: Option<EventFd>,
    /// Guest RAM, present since the first driver.
    ram: Option<Arc<GuestRam>>,
    guest: GuestStatistics,
    /// Time of the latest statistics.
    guest_said_at: Option<Instant>,
}

/// Counters of the balloon, beside those of the RAM's book.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub requests: AtomicU64,
    pub chains_malformed: AtomicU64,
    pub reports_cut: AtomicU64,
    pub statistics: AtomicU64,
}

/// The target is larger than the guest's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a balloon of {asked} is more than the guest's RAM, {ram}")]
pub struct BalloonTooLarge {
    /// Requested size of the balloon.
    pub asked: Bytes,
    /// Size of guest RAM.
    pub ram: Bytes,
}

/// The state of a balloon at one moment.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BalloonReport {
    /// Target size, in bytes.
    pub target_bytes: u64,
    /// Actual size as the driver reports it, in bytes.
    pub actual_bytes: u64,
    /// Number of buffers of page numbers and reports that were served.
    pub requests: u64,
    /// Number of buffers that do not lie in RAM.
    pub chains_malformed: u64,
    /// Number of reports that exceeded the memory limit of one buffer and were cut.
    pub reports_cut: u64,
    /// Number of statistics messages from the guest.
    pub statistics: u64,
    /// Results for the pages; empty before the first driver.
    pub pages: GivenBackCounters,
    /// Latest statistics of the guest.
    pub guest: GuestStatistics,
    /// Age of these statistics, in milliseconds; `None` before the first.
    pub guest_age_ms: Option<u64>,
}

impl BalloonHandle {
    pub(super) fn new(ram_bytes: Bytes) -> BalloonHandle {
        BalloonHandle(Arc::new(Shared {
            ram_bytes,
            target: AtomicU32::new(0),
            actual: AtomicU32::new(0),
            state: Mutex::default(),
            counters: Counters::default(),
        }))
    }

    /// Sets the target size, rounded down to whole base pages. The driver is notified, and follows as far as it can.
    ///
    /// # Errors
    /// [`BalloonTooLarge`] where the target exceeds the RAM.
    pub fn set_target(&self, target: Bytes) -> Result<(), BalloonTooLarge> {
        let too_large = BalloonTooLarge { asked: target, ram: self.0.ram_bytes };
        let pages = u32::try_from(target.get() / PageSize::Base4K.bytes().get()).map_err(|_| too_large)?;
        if target > self.0.ram_bytes {
            return Err(too_large);
        }
        self.0.target.store(pages, Ordering::Release);
        if let Some(interrupt) = &self.state().interrupt {
            interrupt.configuration_changed();
        }
        Ok(())
    }

    /// Target size of the balloon.
    pub fn target(&self) -> Bytes {
        bytes(self.target_pages())
    }

    /// Actual size as the driver reports it; the book of pages has what was really given back
    /// ([`BalloonReport::pages`]).
    pub fn actual(&self) -> Bytes {
        bytes(self.0.actual.load(Ordering::Acquire))
    }

    /// Asks the guest for new statistics, which come later. A change of the actual size also asks for them.
    pub fn ask_statistics(&self) {
        if let Some(ask) = &self.state().ask {
            // The event is full only if a request is already pending.
            let _ = ask.write(1);
        }
    }

    /// State of the balloon now.
    pub fn report(&self) -> BalloonReport {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { requests, chains_malformed, reports_cut, statistics } = &self.0.counters;
        let (ram, guest, said_at) = {
            let state = self.state();
            (state.ram.clone(), state.guest.clone(), state.guest_said_at)
        };
        BalloonReport {
            target_bytes: self.target().get(),
            actual_bytes: self.actual().get(),
            requests: load(requests),
            chains_malformed: load(chains_malformed),
            reports_cut: load(reports_cut),
            statistics: load(statistics),
            pages: ram.map(|ram| ram.given_back().counters()).unwrap_or_default(),
            guest,
            guest_age_ms: said_at.map(|at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX)),
        }
    }

    pub(super) fn target_pages(&self) -> u32 {
        self.0.target.load(Ordering::Acquire)
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.0.counters
    }

    pub(super) fn actual_is(&self, pages: u32) {
        self.0.actual.store(pages, Ordering::Release);
        self.ask_statistics();
    }

    pub(super) fn guest_says(&self, guest: GuestStatistics) {
        self.0.counters.statistics.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        (state.guest, state.guest_said_at) = (guest, Some(Instant::now()));
    }

    pub(super) fn is_active(&self, ram: Arc<GuestRam>, interrupt: Arc<Interrupt>, ask: EventFd) {
        let mut state = self.state();
        (state.ram, state.interrupt, state.ask) = (Some(ram), Some(interrupt), Some(ask));
    }

    pub(super) fn is_over(&self) {
        let mut state = self.state();
        (state.interrupt, state.ask) = (None, None);
        self.0.actual.store(0, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each field is set in one assignment, so they are valid after a panic elsewhere.
        self.0.state.lock()
    }
}

fn bytes(pages: u32) -> Bytes {
    PageSize::Base4K.bytes() * u64::from(pages)
}
