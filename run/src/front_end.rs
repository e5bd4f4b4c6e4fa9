//! Interface of a run to the program that embeds it: the guest's lines and bytes, the program's own lines, and
//! progress. The run itself prints nothing and opens no terminal.

use std::fmt::Debug;
use std::sync::Arc;

use wideleaf_memory::pool::HugetlbPools;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_vmm::Machine;
use wideleaf_vmm::devices::SerialSink;

use crate::failure::Failure;
use crate::interrupts::Interrupts;
use crate::walks::Walks;

/// First action of a thread of the front end: it enters the sandbox of the run, if there is one.
pub type ThreadBegin = Arc<dyn Fn() + Send + Sync>;

/// Work with a progress that a front end may show.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    /// Work of the guest or native kernel of this name.
    Guest(&'a str),
    /// Faults for this amount of guest RAM, before the guest starts.
    Prefault(Bytes),
    /// This number of small guests with different mappings.
    Mappings(u64),
}

/// Room in a pool, given back when it is dropped.
pub type PoolReservation = Box<dyn Debug + Send>;

/// Shown progress of one piece of work.
pub trait Progress: Send + Sync {
    /// Sets the number of units of the whole work.
    fn set_length(&self, _units: u64) {}

    /// Sets the number of units done.
    fn set_position(&self, _units: u64) {}

    /// Adds units done.
    fn add(&self, _units: u64) {}

    /// Sets the name of the current part.
    fn set_part(&self, _name: &str) {}

    /// Ends the display.
    fn finish(&self) {}
}

/// Progress that is not shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {}

/// Console of a guest: its serial port, byte by byte. It is open until it is dropped.
///
/// It has no threads before there is a machine, because the process must enter its sandbox with one thread.
pub trait GuestConsole {
    /// Sink for the guest's bytes.
    fn sink(&self) -> SerialSink;

    /// Connects the console to that machine's guest: typed bytes go to it, and its output is written. Each thread
    /// does `begin` first.
    ///
    /// # Errors
    /// [`Failure::Host`] if a thread cannot be started.
    fn begin(&mut self, machine: &Machine, begin: ThreadBegin) -> Result<(), Failure>;

    /// Ends the console. Returns the number of bytes that were not written because their reader took none.
    fn end(self: Box<Self>) -> u64;
}

/// Program that embeds a run. Each method has a default for a program that shows nothing.
pub trait FrontEnd: Debug + Send + Sync {
    /// Shows a line of the run itself.
    fn say(&self, line: &str) {
        tracing::warn!("{line}");
    }

    /// Shows a line of the guest that is not a protocol line. It never waits: a vCPU calls it.
    fn guest_line(&self, _line: &str) {}

    /// Starts the thread that writes all waiting and future lines, if there is one; it does `begin` first.
    ///
    /// # Errors
    /// [`Failure::Host`] if the thread cannot be started.
    fn serve(&self, _begin: ThreadBegin) -> Result<(), Failure> {
        Ok(())
    }

    /// Waits for the reader of the guest's lines after the run. `is_at_request`: whether something other than the
    /// guest has ended the run by now. Returns the number of lines that were not written.
    fn settle(&self, _is_at_request: &dyn Fn() -> bool) -> u64 {
        0
    }

    /// Begins to show the progress of that work.
    fn progress(&self, _work: Work<'_>) -> Arc<dyn Progress> {
        Arc::new(NoProgress)
    }

    /// Makes room in the pool for that number of pages more. This default holds it in this process, and a SIGKILL
    /// leaves it; a program with a child that holds it leaves nothing.
    ///
    /// # Errors
    /// The reason why there is no room.
    fn lease_pool(&self, size: PageSize, pages: u64) -> Result<PoolReservation, String> {
        let lease = HugetlbPools::of_this_machine().lease(size, pages).map_err(|error| error.to_string())?;
        Ok(Box::new(lease))
    }

    /// Begins to count page walks: the guest begins a timed part. A vCPU calls it.
    fn begin_walks(&self) {}

    /// Page walks since they began to be counted; `None` if they are not. A vCPU calls it.
    fn end_walks(&self) -> Option<Walks> {
        None
    }

    /// Opens the console of a guest.
    ///
    /// # Errors
    /// [`Failure`] if this program has no console.
    fn open_console(&self, _interrupts: &Interrupts) -> Result<Box<dyn GuestConsole>, Failure> {
        Err(Failure::Usage("cannot open a console: this program has none".into()))
    }
}

/// Front end of a program that shows nothing: lines of the run go to the log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl FrontEnd for Quiet {}
