//! A built-in kernel in threads of this process: the baseline, without second-level page tables.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use wideleaf_kernels::{Arena, native};
use wideleaf_memory::GuestRam;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};
use wideleaf_protocol::{Entry, GuestPage};

use crate::failure::Failure;
use crate::interrupts::Interrupts;
use crate::outcome::Ended;
use crate::session::Session;
use crate::spec::RunSpec;

/// Interval at which the thread that waits for a native kernel checks the clock and the interrupts.
const WAIT_STEP: Duration = Duration::from_millis(20);

/// Runs the kernel in threads of this process. They cannot be killed: at a timeout the process ends while they
/// still run, so a native run has a process of its own.
pub fn run(
    spec: &RunSpec,
    ram: &Arc<GuestRam>,
    session: &Arc<Session>,
    interrupts: &Interrupts,
) -> Result<Ended, Failure> {
    /// Accurate to one part in 50 000.
    const TSC_MEASURED_OVER: Duration = Duration::from_millis(50);
    let guest_page = GuestPage::from_bytes(PageSize::Base4K.bytes().get()).expect("x86 has 4 KiB pages");
    let (line, threads) = (spec.guest_cmdline(), usize::from(spec.vcpus));
    let (ram, lines) = (ram.clone(), session.clone());
    let (sender, receiver) = mpsc::channel();
    let work = move || {
        let tsc_hz = native::measure_tsc_hz(TSC_MEASURED_OVER);
        let code = native::run(threads, tsc_hz, Box::new(|message| lines.on_message(message)), |platform| {
            let words = ram.exclusive_words(ram.ranges()[0]);
            let mut words = words.expect("the words of this RAM are taken once");
            let arena = Arena::from_words(words.as_mut_slice());
            let started = wideleaf_kernels::registry::Started { entry: Entry::Native, guest_page };
            wideleaf_kernels::registry::run(platform, &arena, &line, started)
        });
        let _ = sender.send(code);
    };
    let thread = std::thread::Builder::new().name("kernel".into()).spawn(work);
    let thread = thread.map_err(|error| Failure::Host(format!("cannot start the kernel's thread: {error}")))?;
    let deadline = spec.timeout.map(|timeout| Instant::now() + timeout);
    loop {
        match receiver.recv_timeout(WAIT_STEP) {
            Ok(code) => {
                let _ = thread.join();
                return Ok(Ended::Exit(code.port_value()));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if interrupts.is_set() {
                    return Ok(Ended::Interrupted);
                }
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Ok(Ended::TimedOut);
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Ok(Ended::Crashed("the native kernel panicked".into()));
            }
        }
    }
}

/// RAM of a native kernel: one piece.
pub fn layout(memory: Bytes) -> Result<Vec<GpaRange>, Failure> {
    let range = GpaRange::new(Gpa::new(0), memory);
    range
        .map(|range| vec![range])
        .ok_or_else(|| Failure::Usage(format!("cannot use --memory {memory}: it does not fit in 64 bits")))
}
