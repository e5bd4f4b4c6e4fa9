//! A terminal as the front end of a run: lines on standard error, progress bars, and a console.

use std::path::Path;
use std::sync::Arc;

use indicatif::ProgressBar;
use parking_lot::Mutex;
use wideleaf_memory::walk_cost::CpuModel;
use wideleaf_policies::PageSize;
use wideleaf_run::failure::Failure;
use wideleaf_run::front_end::{FrontEnd, GuestConsole, PoolReservation, Progress, ThreadBegin, Work};
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::report::Walks;

use super::console::TerminalConsole;
use crate::guardian::pool::HeldPool;
use crate::progress::visible_bar;
use crate::stderr;
use crate::tlbcost::counters::{GuestPmu, LinuxPmu, Meter, Pmu, select};

/// Standard error, standard input and standard output of this program.
#[derive(Debug, Default)]
pub struct TerminalFrontEnd {
    /// Counters of page walks, for a run that counts them.
    meter: Option<Mutex<Meter>>,
}

impl TerminalFrontEnd {
    /// One that counts page walks of the threads that this thread starts from now on: in their guests, or those of a
    /// native kernel.
    ///
    /// # Errors
    /// The reason why the CPU does not count them here.
    pub fn counting_walks(is_native: bool) -> Result<TerminalFrontEnd, String> {
        let pmu: &dyn Pmu = if is_native { &LinuxPmu } else { &GuestPmu };
        let events = select(pmu, &CpuModel::read(Path::new("/")))?;
        Ok(TerminalFrontEnd { meter: Some(Mutex::new(Meter::open(pmu, events)?)) })
    }
}

impl FrontEnd for TerminalFrontEnd {
    fn say(&self, line: &str) {
        stderr::say(line);
    }

    fn guest_line(&self, line: &str) {
        stderr::guest_line(line);
    }

    fn serve(&self, begin: ThreadBegin) -> Result<(), Failure> {
        stderr::serve(move || begin())
            .map_err(|error| Failure::Host(format!("cannot start the thread for standard error: {error}")))
    }

    fn settle(&self, is_at_request: &dyn Fn() -> bool) -> u64 {
        stderr::settle(is_at_request);
        stderr::lines_lost()
    }

    fn progress(&self, work: Work<'_>) -> Arc<dyn Progress> {
        Arc::new(Bar(match work {
            Work::Guest(name) => {
                let bar = visible_bar(0, "{spinner} {prefix} {msg} {wide_bar} {percent}%");
                bar.set_prefix(name.to_owned());
                bar
            }
            Work::Prefault(bytes) => visible_bar(bytes.get(), "prefault {bar:30} {bytes}/{total_bytes}"),
            Work::Mappings(guests) => visible_bar(guests, "{bar:30} {pos}/{len} guests [{elapsed}]"),
        }))
    }

    fn lease_pool(&self, size: PageSize, pages: u64) -> Result<PoolReservation, String> {
        Ok(Box::new(HeldPool::lease_of(size, pages)?))
    }

    fn begin_walks(&self) {
        if let Some(Err(why)) = self.meter.as_ref().map(|meter| meter.lock().start()) {
            tracing::warn!("page walks: {why}");
        }
    }

    fn end_walks(&self) -> Option<Walks> {
        let counted = self.meter.as_ref()?.lock().stop();
        counted.inspect_err(|why| tracing::warn!("page walks: {why}")).ok()
    }

    fn open_console(&self, interrupts: &Interrupts) -> Result<Box<dyn GuestConsole>, Failure> {
        Ok(Box::new(TerminalConsole::open(interrupts)?))
    }
}

/// A progress bar on a terminal.
struct Bar(ProgressBar);

impl Progress for Bar {
    fn set_length(&self, units: u64) {
        self.0.set_length(units);
    }

    fn set_position(&self, units: u64) {
        self.0.set_position(units);
    }

    fn add(&self, units: u64) {
        self.0.inc(units);
    }

    fn set_part(&self, name: &str) {
        self.0.set_message(name.to_owned());
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}
