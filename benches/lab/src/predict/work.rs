//! A kernel in this process, for the comparison: shortened to some of its iterations, timed over its measured part
//! only, with a PMU counting over that part only.
//!
//! ```text
//!   RAM on pages of one size, prefaulted ─▶ thread: init │ begin ─ update or compute ─ end │ verify
//!                                                          ▲ its CPU time, counters   ▲ its CPU time, counters
//! ```
//!
//! The kernel's thread cannot be ended: a caller that stops waiting ends the process with it, and nothing is left
//! of either.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_kernels::registry::{MemoryNeed, Started, by_name, run as run_kernel};
use wideleaf_kernels::{Arena, Kernel, Platform, native};
use wideleaf_memory::actuators::prefault::prefault;
use wideleaf_memory::sensors::host_backing::HostBackingSensor;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, Host, LinuxHost};
use wideleaf_policies::units::{BASE_PAGES_PER_WINDOW, kib, mib};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_protocol::{Entry, ExitCode, GuestPage, Message};

use wideleaf::tlbcost::counters::{LinuxPmu, Meter, WalkEvents, Walks};
use wideleaf_measure::environment::memory_available_kib;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::kernel;
use wideleaf_run::native::layout;

/// Time limit of a run.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);

/// Interval at which the waiting thread checks the clock and the interrupts.
const WAIT_STEP: Duration = Duration::from_millis(20);

/// Accurate to one part in 50 000.
const TSC_MEASURED_OVER: Duration = Duration::from_millis(50);

/// Phases that kernels measure.
const MEASURED: [&str; 2] = ["update", "compute"];

/// A kernel, its parameters, and the RAM that it needs.
#[derive(Clone)]
pub struct Work {
    /// Built-in kernel to run.
    pub kernel: &'static Kernel,
    /// Parameters, including the class.
    pub cmdline: String,
    /// Size of RAM, in whole windows.
    pub ram: Bytes,
}

/// Result of a run.
#[derive(Clone, Debug, Default)]
pub struct Timed {
    /// Name of the measured phase.
    pub phase: String,
    /// CPU time of its thread in that phase, in seconds: other processes take caches from it, but no time.
    pub seconds: f64,
    /// Iterations of the phase.
    pub steps: Steps,
    /// PMU counts of the phase.
    pub walks: Option<Walks>,
    /// Windows of the RAM that were large at the end, and all of them.
    pub large_windows: (u64, u64),
}

/// Iterations of the measured part. A kernel may run through them several times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Number of times that the kernel began them; 0 for a kernel without iterations.
    pub begun: u32,
    /// Number of iterations made.
    pub made: u32,
    /// Number of iterations of the kernel.
    pub all: u32,
}

impl Steps {
    /// Work of the run as a multiple of one with a single iteration.
    pub fn against_one(self) -> f64 {
        if self.begun == 0 { 1.0 } else { f64::from(self.made) / f64::from(self.begun) }
    }
}

impl Work {
    /// A kernel and its parameters.
    ///
    /// # Errors
    /// [`Failure::Usage`] if there is no such kernel, class or parameter.
    pub fn new(name: &str, class: Option<&str>, cmdline: &str) -> Result<Work, Failure> {
        let unknown =
            || Failure::Usage(format!("cannot predict {name}: no such kernel; `wideleaf kernels` lists them"));
        let kernel = by_name(name).ok_or_else(unknown)?;
        let cmdline = kernel::with_class(kernel, class, cmdline)?;
        let needed = match kernel::memory_needed(kernel, &cmdline, 1)? {
            MemoryNeed::Bytes(needed) => Bytes::new(needed),
            MemoryNeed::AllThereIs => mib(256),
        };
        let ram = kernel::least_ram(needed, kernel::Pages { host: PageSize::Huge2M, guest: None })?;
        Ok(Work { kernel, cmdline, ram })
    }

    /// Maps RAM for it, on pages of that size, all of it present.
    ///
    /// # Errors
    /// [`Failure`] if the host has too little memory, or an interrupt came.
    pub fn map(&self, page: PageSize, interrupts: &Interrupts) -> Result<Arc<GuestRam>, Failure> {
        let available = kib(memory_available_kib());
        if self.ram > available {
            let name = self.kernel.name;
            return Err(Failure::Host(format!(
                "cannot run {name}: it needs {} of memory, and the host has {available} available; use a smaller \
                problem",
                self.ram
            )));
        }
        let backing = BackingConfig::new(BackingKind::Anon, page).map_err(|error| Failure::Host(error.to_string()))?;
        let host_error = |error: &dyn std::fmt::Display| Failure::Host(error.to_string());
        let ram = GuestRam::map(&layout(self.ram)?, backing).map_err(|error| host_error(&error))?;
        let host = LinuxHost::open().map_err(|error| host_error(&error))?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let on_chunk = |_: Bytes| {
            if interrupts.is_set() { std::ops::ControlFlow::Break(()) } else { std::ops::ControlFlow::Continue(()) }
        };
        prefault(&host, ram.ranges(), threads, &on_chunk)
            .map_err(|error| Failure::Host(format!("cannot prefault {}: {error}", self.ram)))?;
        interrupts.check()?;
        Ok(ram)
    }

    /// Runs it on pages of that size, with at most this number of iterations, and counts walks if events are named.
    ///
    /// # Errors
    /// [`Failure`]: it failed, its result is wrong, it has no measured part, or an interrupt came.
    pub fn run(
        &self,
        page: PageSize,
        most: Option<u32>,
        events: Option<&'static WalkEvents>,
        interrupts: &Interrupts,
    ) -> Result<Timed, Failure> {
        let ram = self.map(page, interrupts)?;
        let name = self.kernel.name;
        let (line, its_ram) = (kernel::line(name.as_str(), &self.cmdline), ram.clone());
        let (sender, receiver) = mpsc::channel();
        let work = move || drop(sender.send(run_on(&its_ram, &line, most, events)));
        let thread = std::thread::Builder::new().name("kernel".into()).spawn(work);
        let thread = thread.map_err(|error| Failure::Host(format!("cannot start the kernel's thread: {error}")))?;
        let (code, timed) = wait(&receiver, interrupts)?
            .ok_or_else(|| Failure::GuestCrashed(format!("{name} panicked: this is a bug in wideleaf")))?
            .map_err(|why| Failure::Host(format!("cannot count with the PMU: {why}")))?;
        drop(thread.join());
        let is_shortened = timed.steps.made < timed.steps.all;
        match code {
            ExitCode::Success => {}
            // With fewer iterations the result differs from the published one.
            ExitCode::VerificationFailed if is_shortened => {}
            code => return Err(Failure::GuestFailed(format!("{name} {}: {code}", self.cmdline))),
        }
        if timed.seconds <= 0.0 {
            return Err(Failure::GuestFailed(format!("cannot time {name}: it has no measured part")));
        }
        Ok(Timed { large_windows: large_windows(&ram), ..timed })
    }
}

/// Runs the kernel, from its first line to its last, on the calling thread.
fn run_on(
    ram: &GuestRam,
    line: &str,
    most: Option<u32>,
    events: Option<&'static WalkEvents>,
) -> Result<(ExitCode, Timed), String> {
    // Before other threads start, which inherit the counters.
    let meter = events.map(|events| Meter::open(&LinuxPmu, events)).transpose()?;
    let host = LinuxHost::open().map_err(|error| error.to_string())?;
    let tsc_hz = native::measure_tsc_hz(TSC_MEASURED_OVER);
    let watch = Arc::new(Mutex::new(Watch { meter, began: Duration::ZERO, timed: Timed::default(), failed: None }));
    let seen = watch.clone();
    // Called only by the kernel's thread, because its clock is read.
    let sink = Box::new(move |message: &Message<'_>| {
        seen.lock().on(message, host.thread_cpu_time());
    });
    let (code, steps) = native::run(1, tsc_hz, sink, |platform| {
        let words = ram.exclusive_words(ram.ranges()[0]);
        let mut words = words.expect("the words of this RAM are taken once");
        let arena = Arena::from_words(words.as_mut_slice());
        let guest_page = GuestPage::from_bytes(PageSize::Base4K.bytes().get()).expect("x86 has 4 KiB pages");
        let shortened = Shortened { platform, most, steps: Mutex::default() };
        let code = run_kernel(&shortened, &arena, line, Started { entry: Entry::Native, guest_page });
        (code, *shortened.steps.lock())
    });
    let mut watch = watch.lock();
    match watch.failed.take() {
        Some(why) => Err(why),
        None => Ok((code, Timed { steps, ..watch.timed.clone() })),
    }
}

/// Waits for the result of the kernel's thread; `None` if it panicked.
fn wait<T>(receiver: &mpsc::Receiver<T>, interrupts: &Interrupts) -> Result<Option<T>, Failure> {
    let deadline = Instant::now() + RUN_TIMEOUT;
    loop {
        match receiver.recv_timeout(WAIT_STEP) {
            Ok(result) => return Ok(Some(result)),
            Err(mpsc::RecvTimeoutError::Timeout) => interrupts.check()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
        }
        if Instant::now() >= deadline {
            return Err(Failure::took_longer_than(RUN_TIMEOUT, "the kernel"));
        }
    }
}

/// Listener for the kernel's lines.
struct Watch {
    meter: Option<Meter>,
    began: Duration,
    timed: Timed,
    failed: Option<String>,
}

impl Watch {
    fn on(&mut self, message: &Message<'_>, now: Duration) {
        let is_measured = |phase: &str| MEASURED.contains(&phase);
        match message {
            Message::Begin { phase, .. } if is_measured(phase.as_str()) => {
                self.began = now;
                phase.as_str().clone_into(&mut self.timed.phase);
                let started = self.meter.as_mut().map(Meter::start);
                self.failed = started.and_then(Result::err);
            }
            Message::End { phase, .. } if is_measured(phase.as_str()) => {
                match self.meter.as_mut().map(Meter::stop) {
                    Some(Ok(walks)) => self.timed.walks = Some(walks),
                    Some(Err(why)) => self.failed = Some(why),
                    None => {}
                }
                self.timed.seconds = now.saturating_sub(self.began).as_secs_f64();
            }
            _ => {}
        }
    }
}

/// A platform on which a kernel makes only some of its iterations.
struct Shortened<'p> {
    platform: &'p dyn Platform,
    most: Option<u32>,
    steps: Mutex<Steps>,
}

impl Platform for Shortened<'_> {
    fn now(&self) -> u64 {
        self.platform.now()
    }

    fn tsc_hz(&self) -> u64 {
        self.platform.tsc_hz()
    }

    fn vcpus(&self) -> usize {
        self.platform.vcpus()
    }

    fn steps_of(&self, total: u32) -> u32 {
        let made = self.most.map_or(total, |most| most.min(total));
        let mut steps = self.steps.lock();
        *steps = Steps { begun: steps.begun + 1, made: steps.made + made, all: steps.all + total };
        made
    }

    fn emit(&self, message: &Message<'_>) {
        self.platform.emit(message);
    }

    fn run_on_all(&self, job: &(dyn Fn(usize) + Sync)) {
        self.platform.run_on_all(job);
    }
}

/// Windows that are whole and large, and all of them; 0 if the kernel does not report them.
fn large_windows(ram: &GuestRam) -> (u64, u64) {
    let all = ram.bytes().get() / PageSize::Huge2M.bytes().get();
    let mut sensor = HostBackingSensor::default();
    let large = LinuxHost::open().ok().and_then(|host| {
        let rows = sensor.sample(&host, ram.ranges()[0], None).ok()?;
        Some(rows.filter(|row| row.backing.is_large() && row.resident == BASE_PAGES_PER_WINDOW).count() as u64)
    });
    (large.unwrap_or(0), all)
}
