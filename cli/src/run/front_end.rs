//! A terminal as the front end of a run: lines on standard error, progress bars, and a console.

use std::sync::Arc;

use indicatif::ProgressBar;
use wideleaf_policies::PageSize;
use wideleaf_run::failure::Failure;
use wideleaf_run::front_end::{FrontEnd, GuestConsole, PoolRoom, Progress, ThreadBegin, Work};
use wideleaf_run::interrupts::Interrupts;

use super::console::TerminalConsole;
use crate::guardian::pool::HeldPool;
use crate::progress::visible_bar;
use crate::stderr;

/// Standard error, standard input and standard output of this program.
#[derive(Clone, Copy, Debug)]
pub struct TerminalFrontEnd;

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

    fn lease_pool(&self, size: PageSize, pages: u64) -> Result<PoolRoom, String> {
        Ok(Box::new(HeldPool::lease_of(size, pages)?))
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
