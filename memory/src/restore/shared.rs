//! What the threads of one restore share.

use std::io::{self, PipeReader, PipeWriter};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_policies::{Bytes, Moment, PerTenThousand, WindowIndex};

use super::background::{Background, Pace};
use super::kernel_calls::KernelCalls;
use super::report::{FillFailure, FirstTouches, RestoreReport};
use super::rows::{Row, Rows};
use super::window_states::WindowStates;
use super::{RestoreConfig, SavedRam};
use crate::faults::Counted;
use crate::host::Host;
use crate::host::linux::LinuxHost;
use crate::panicked::caught;
use crate::region::GuestRam;

/// Time without first touches after which a recording restore begins with the background.
const RECORDING_ENDS_AFTER: Duration = Duration::from_secs(1);

/// Interval at which the background looks whether it may begin.
const BACKGROUND_LOOKS_EVERY: Duration = Duration::from_millis(2);

/// Number of touched windows in a row that were not huge after a move, without one that was: the kernel keeps their
/// page tables.
const TABLES_STAY_AFTER: u32 = 3;

/// Parts of a restore that all threads use. The kernel calls are not among them: their descriptors are closed when
/// the last thread ends.
pub(super) struct Shared {
    pub ram: Arc<GuestRam>,
    pub rows: Rows,
    pub saved: Arc<dyn SavedRam>,
    pub states: WindowStates,
    pub host: LinuxHost,
    pub counted: Counted<RestoreReport>,
    pub config: RestoreConfig,
    /// Whether the kernel moves pages into this RAM.
    pub can_move: bool,
    /// Heat by row, for the order of the background.
    heats: Vec<PerTenThousand>,
    pace: Mutex<Pace>,
    touches: Mutex<FirstTouches>,
    /// Windows that were to be huge and are not, with the number of collapses that were tried.
    not_huge: Mutex<Vec<(Row, u32)>>,
    /// Number of moves under a touched window's page table that split the page, in a row.
    splits: AtomicU32,
    /// Number of threads that can still serve.
    living: AtomicUsize,
    is_done: AtomicBool,
    has_let_go: AtomicBool,
    stopped: PipeReader,
    stop: Mutex<Option<PipeWriter>>,
}

impl Shared {
    #[expect(clippy::too_many_arguments, reason = "each is one field; called once")]
    pub(super) fn new(
        ram: Arc<GuestRam>,
        rows: Rows,
        saved: Arc<dyn SavedRam>,
        heats: Vec<PerTenThousand>,
        states: WindowStates,
        host: LinuxHost,
        counted: Counted<RestoreReport>,
        can_move: bool,
        config: RestoreConfig,
    ) -> io::Result<Shared> {
        let (stopped, stop) = io::pipe()?;
        Ok(Shared {
            ram,
            rows,
            saved,
            states,
            host,
            counted,
            can_move,
            heats,
            pace: Mutex::default(),
            touches: Mutex::default(),
            not_huge: Mutex::default(),
            splits: AtomicU32::new(0),
            living: AtomicUsize::new(config.threads.get() + usize::from(config.background != Background::Off)),
            is_done: AtomicBool::new(false),
            has_let_go: AtomicBool::new(false),
            stopped,
            stop: Mutex::new(Some(stop)),
            config,
        })
    }

    /// Number of serving threads at the start.
    pub(super) fn workers(&self) -> usize {
        self.config.threads.get() + usize::from(self.config.background != Background::Off)
    }

    /// Time since the restore began.
    pub(super) fn since_start(&self) -> Duration {
        self.host.now().since_start()
    }

    /// End of the pipe that is readable once the threads have to end.
    pub(super) fn stopped(&self) -> &PipeReader {
        &self.stopped
    }

    /// Ends the threads after their present window.
    pub(super) fn stop(&self) {
        drop(self.stop.lock().take());
    }

    /// Whether all windows are filled or failed, or the threads were told to end.
    pub(super) fn must_end(&self) -> bool {
        self.stop.lock().is_none()
    }

    /// Whether every window is filled or has failed.
    pub(super) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::SeqCst)
    }

    /// Whether no window is registered any more.
    pub(super) fn has_all_let_go(&self) -> bool {
        self.has_let_go.load(Ordering::SeqCst)
    }

    /// Records that no window is registered any more.
    pub(super) fn has_let_go(&self) {
        self.has_let_go.store(true, Ordering::SeqCst);
    }

    /// Windows in the order of their first touches.
    pub(super) fn first_touches(&self) -> Vec<WindowIndex> {
        self.touches.lock().order.clone()
    }

    /// Records a touch, if that was asked for.
    pub(super) fn record(&self, window: WindowIndex, at: Moment) {
        if self.config.record {
            self.touches.lock().touched(window, at);
        }
    }

    /// Time until the background may fill its next window.
    pub(super) fn background_waits(&self, now: Moment) -> Duration {
        if self.config.background_from.as_ref().is_some_and(|begins| !begins.load(Ordering::Acquire)) {
            return BACKGROUND_LOOKS_EVERY;
        }
        let of_recording = || {
            let quiet_from = self.touches.lock().latest + RECORDING_ENDS_AFTER;
            quiet_from.since_start().saturating_sub(now.since_start())
        };
        let recording = if self.config.record { of_recording() } else { Duration::ZERO };
        recording.max(self.pace.lock().wait(now))
    }

    /// The background begins a window with this size of stored pages.
    pub(super) fn background_began(&self, bytes: Bytes, now: Moment) {
        self.pace.lock().began(self.config.background, bytes, now);
    }

    /// Rows in the order of the background.
    pub(super) fn order(&self) -> Vec<u32> {
        super::background::order(&self.rows, &self.config.first, &self.heats)
    }

    /// A window cannot be filled. Names it, to the caller too.
    pub(super) fn failed(&self, window: WindowIndex, why: String) {
        let failure = FillFailure { window, why };
        tracing::error!("{failure}");
        self.counted.count(|report| {
            report.progress.failed_windows += 1;
            report.failures.push(failure.clone());
        });
        let Some(on_failure) = &self.config.on_failure else { return };
        if let Err(panicked) = caught(|| on_failure(&failure)) {
            tracing::error!("the callback for a window that cannot be restored {panicked}");
        }
    }

    /// Names a thread that is lost, and what it was doing.
    pub(super) fn lost(&self, what: String) {
        tracing::error!("{what}");
        self.counted.count(|report| report.lost_threads.push(what));
    }

    /// Whether a thread that panicked may end: another one lives.
    pub(super) fn may_end(&self) -> bool {
        self.living.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |living| (living > 1).then(|| living - 1)).is_ok()
    }

    /// Whether pages of touched windows are split by a move.
    pub(super) fn tables_stay(&self) -> bool {
        self.splits.load(Ordering::Relaxed) >= TABLES_STAY_AFTER
    }

    /// Records whether a touched window was huge after a move. One that was proves that the kernel drops page tables.
    pub(super) fn was_moved(&self, is_huge: bool) {
        if is_huge {
            self.splits.store(0, Ordering::Relaxed);
        } else {
            self.splits.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A window that was to be huge and is not: an idle thread will collapse it.
    pub(super) fn is_not_huge(&self, row: Row, attempts: u32) {
        self.not_huge.lock().push((row, attempts));
    }

    /// A window to collapse, with the number of collapses that were tried.
    pub(super) fn next_to_collapse(&self) -> Option<(Row, u32)> {
        self.not_huge.lock().pop()
    }

    /// Lets rows go in as few calls as possible, and wakes all threads that wait there. An error is harmless once the
    /// descriptor is closed.
    pub(super) fn let_go_of(&self, kernel: &dyn KernelCalls, rows: &[Row]) {
        for stretch in self.rows.stretches(|row| rows.binary_search(&row).is_ok()) {
            let (start, bytes) = self.rows.place(&stretch);
            if let Err(error) = kernel.let_go(start, bytes) {
                tracing::warn!("cannot let {bytes} of RAM at {start} go yet: {error}");
                let _ = kernel.wake(start, bytes);
            }
        }
    }

    /// Lets the windows go that are still registered though they have their contents. A window that is being placed
    /// meanwhile is not among them: its thread calls this again ([`Shared::let_go_if_done`]).
    fn let_rest_go(&self, kernel: &dyn KernelCalls) {
        let rest = self.states.rest_to_let_go();
        self.let_go_of(kernel, &rest);
        rest.iter().for_each(|row| self.ram.claims().filled(self.rows.window(*row)));
    }

    /// Lets a window go that was kept after the restore had ended, if that is so. The end comes before the look at the
    /// rest, and the window was settled before this call: one of the two sees it.
    pub(super) fn let_go_if_done(&self, kernel: &dyn KernelCalls) {
        if self.is_done() {
            self.let_rest_go(kernel);
        }
    }

    /// Ends the restore if no stored window is left: once.
    pub(super) fn finish_if_done(&self, kernel: &dyn KernelCalls) {
        if self.states.left() == 0 && !self.is_done.swap(true, Ordering::SeqCst) {
            self.finish(kernel);
        }
    }

    /// Lets all other windows go. The threads end.
    pub(super) fn finish(&self, kernel: &dyn KernelCalls) {
        let took = self.since_start();
        self.is_done.store(true, Ordering::SeqCst);
        self.let_rest_go(kernel);
        let failed = self.counted.read(|report| report.progress.failed_windows);
        self.counted.count(|report| report.all_filled = Some(took));
        if failed == 0 {
            self.has_let_go();
        }
        self.stop();
    }
}
