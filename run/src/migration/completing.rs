//! Completes the RAM of a guest that runs here already (post-copy).
//!
//! ```text
//!   machine built, held ─▶ Completing::begin: missing pages dropped, threads started
//!                                  │
//!   go ─▶ guest runs ──────────────┤ pages come, `remote_ram`
//!                                  ▼
//!                     all of it is here ─▶ complete ─▶ figures of both sides
//! ```

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_control::vm::PostCopyView;
use wideleaf_memory::GuestRam;
use wideleaf_memory::restore::{GuestIsGone, OnFailure, RestoreConfig, RestoreReport, Restorer};

use super::link::Receiver;
use super::remote_ram::RemoteRam;

/// Interval at which the thread looks whether all that has come is in its place.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Time in which windows that are to be huge get a huge page, before both sides report.
const COLLAPSES_WAIT_MAX: Duration = Duration::from_secs(2);

/// Filling of the missing pages.
pub struct Completing {
    remote: Arc<RemoteRam>,
    restorer: Mutex<Option<Restorer>>,
    /// Whether the guest runs here. Before, the background would delay its beginning.
    runs: Arc<AtomicBool>,
    /// Moment from which the guest runs here.
    switched: OnceLock<Instant>,
    filled: OnceLock<Instant>,
    /// Whether the guest has ended.
    is_over: AtomicBool,
    /// Whether the guest has ended while pages were missing that nothing sends.
    has_given_up: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for Completing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Completing {{ is_filled: {} }}", self.is_filled())
    }
}

impl Completing {
    /// Drops what RAM has in the place of the missing pages, and begins to fill them. The guest does not run yet.
    /// `on_failure` is called for a window that does not come: the guest must end then.
    ///
    /// # Errors
    /// One line.
    pub fn begin(remote: Arc<RemoteRam>, ram: Arc<GuestRam>, on_failure: OnFailure) -> Result<Completing, String> {
        let runs = Arc::<AtomicBool>::default();
        let config = RestoreConfig {
            background_from: Some(runs.clone()),
            first: remote.order().to_vec(),
            // A read lasts as long as the connection.
            overdue_after: Duration::MAX,
            on_failure: Some(on_failure),
            ..RestoreConfig::default()
        };
        let restorer = Restorer::start_partial(ram, remote.clone(), config).map_err(|error| error.to_string())?;
        Ok(Completing {
            remote,
            restorer: Mutex::new(Some(restorer)),
            runs,
            switched: OnceLock::new(),
            filled: OnceLock::new(),
            is_over: AtomicBool::new(false),
            has_given_up: AtomicBool::new(false),
            threads: Mutex::default(),
        })
    }

    /// Starts the thread that receives, and the one that tries other connections where one may follow. Each calls
    /// `begin` first. Once all of RAM is here and the guest runs, the first one calls `conclude`.
    ///
    /// # Errors
    /// Error of the kernel if it cannot start a thread.
    pub fn start(
        self: &Arc<Completing>,
        mut receiver: Receiver,
        begin: impl Fn() + Clone + Send + 'static,
        conclude: impl FnOnce(&Completing, &mut Receiver) + Send + 'static,
    ) -> io::Result<()> {
        if self.remote.may_be_recovered() {
            let (of, begin) = (self.clone(), begin.clone());
            self.spawn("offers", move || {
                begin();
                of.remote.try_offers(&|| of.goes_on());
            })?;
        }
        let of = self.clone();
        self.spawn("arriving", move || {
            begin();
            if of.receive(&mut receiver) {
                conclude(&of, &mut receiver);
            }
        })
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.threads.lock().push(std::thread::Builder::new().name(name.to_owned()).spawn(work)?);
        Ok(())
    }

    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::SeqCst)
    }

    /// Receives until all is in its place and the guest runs. Returns whether that is so.
    fn receive(&self, receiver: &mut Receiver) -> bool {
        if !self.remote.receive(receiver, &|| self.goes_on()) {
            return false;
        }
        while !(self.is_filled() && self.switched.get().is_some()) {
            if !self.goes_on() || self.has_failed() {
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.filled.get_or_init(Instant::now);
        true
    }

    /// The missing part of RAM.
    pub fn remote(&self) -> &RemoteRam {
        &self.remote
    }

    /// The guest runs from now on.
    pub fn runs(&self) {
        self.switched.get_or_init(Instant::now);
        self.runs.store(true, Ordering::Release);
    }

    /// Whether all of RAM is here.
    pub fn is_filled(&self) -> bool {
        let is_filled = |restorer: &Restorer| restorer.progress().filled_windows == restorer.progress().stored_windows;
        self.restorer.lock().as_ref().is_none_or(is_filled)
    }

    /// Whether a part of RAM will not come. Threads that touched it sleep until the process ends.
    pub fn has_failed(&self) -> bool {
        let has_given_up = self.has_given_up.load(Ordering::SeqCst);
        has_given_up || self.restorer.lock().as_ref().is_some_and(|restorer| restorer.failure().is_some())
    }

    /// The guest has ended: waits for no other connection.
    pub fn give_up(&self) {
        if self.remote.takes_no_other() {
            self.has_given_up.store(true, Ordering::SeqCst);
            self.remote.lose("the guest has ended here".to_owned());
        }
    }

    /// Waits a moment for the windows that are to be huge.
    pub fn wait_for_huge_pages(&self) {
        let until = Instant::now() + COLLAPSES_WAIT_MAX;
        while !self.restorer.lock().as_ref().is_none_or(Restorer::is_finished) && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Figures so far; `None` once it has ended.
    pub fn view(&self) -> Option<PostCopyView> {
        self.restorer.lock().as_ref().map(|restorer| self.view_of(&restorer.report()))
    }

    fn view_of(&self, report: &RestoreReport) -> PostCopyView {
        let us = |ns: u64| ns as f64 / 1e3;
        let waits = &report.fault_ns;
        let took = self.switched.get().zip(self.filled.get()).map(|(from, to)| to.saturating_duration_since(*from));
        PostCopyView {
            seconds: took.map(|took| took.as_secs_f64()),
            missing_bytes: report.progress.stored_bytes.get(),
            filled_bytes: report.progress.filled_bytes.get(),
            windows_by_touch: report.by_fault,
            windows_in_background: report.by_background,
            windows_huge: report.huge_now(),
            windows_not_huge: report.not_huge_now(),
            wait_p50_us: us(waits.value_at_quantile(0.5)),
            wait_p99_us: us(waits.value_at_quantile(0.99)),
            wait_max_us: us(waits.max()),
            connections_lost: self.remote.cuts(),
        }
    }

    /// Ends it after its guest, whether all has come or not. Returns the last figures.
    pub fn end(&self) -> Option<PostCopyView> {
        let restorer = self.restorer.lock().take()?;
        // Pages that are under way still come: no thread of the restorer waits for ever.
        let report = match self.has_given_up.load(Ordering::SeqCst) {
            true => restorer.leave(),
            false => restorer.abandon_or_leave(GuestIsGone),
        };
        self.is_over.store(true, Ordering::SeqCst);
        self.remote.lose("its guest has ended".to_owned());
        let threads = std::mem::take(&mut *self.threads.lock());
        if threads.into_iter().filter_map(|thread| thread.join().err()).count() > 0 {
            tracing::warn!("a thread that receives the VM's RAM panicked");
        }
        Some(self.view_of(&report))
    }
}
