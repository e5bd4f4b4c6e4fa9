//! `wideleaf run --console`: the guest's serial port on standard input and output, byte by byte.
//!
//! ```text
//!   terminal ─▶ reader ─▶ keys ─┬─ 4 KiB ─▶ typist ─▶ serial port ─▶ guest
//!   or a pipe             │     └─ Ctrl-A x, p: stop, ask  │
//!                         └─ (a pipe has no keys)          ▼
//!   terminal ◀─ writer ◀──────── 64 KiB ◀────────── the vCPU's thread, which waits while they are full
//! ```
//!
//! On a terminal every key belongs to the guest, also Ctrl-C and Ctrl-Z, except those after Ctrl-A (`keys.rs`). The
//! terminal's settings are restored however the run ends (`terminal.rs`), unless it is killed. A reader that does
//! not read holds up only the guest: a VM can still pause and end, and output without space is then dropped and
//! counted. The guest's bytes are not changed: a console is meant to be a terminal of the guest.

use std::fs::File;
use std::io;
use std::sync::Arc;

use wideleaf_run::failure::Failure;
use wideleaf_run::front_end::{GuestConsole, ThreadBegin};
use wideleaf_run::guards::Noted;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_vmm::Machine;
use wideleaf_vmm::devices::SerialSink;

use input::{Input, Source};
use output::ConsoleOutput;
use terminal::Terminal;

mod input;
mod keys;
mod output;
mod terminal;

/// A console that is open until this is dropped.
///
/// It has no threads before there is a machine, because the process must enter its sandbox with one thread.
pub(crate) struct TerminalConsole {
    source: Option<Source>,
    to: Option<File>,
    // Fields end in this order: no more input, all output written, the terminal restored.
    input: Option<Input>,
    output: Arc<ConsoleOutput>,
    terminal: Option<Terminal>,
    _noted: Noted,
}

impl TerminalConsole {
    /// Uses standard input and output; a terminal is set to raw mode.
    ///
    /// # Errors
    /// [`Failure::Host`] if the kernel refuses.
    pub(crate) fn open(interrupts: &Interrupts) -> Result<TerminalConsole, Failure> {
        let cannot = |error: std::io::Error| Failure::Host(format!("cannot open the console: {error}"));
        let source = Some(Source::open().map_err(cannot)?);
        let to = Some(output::standard_output().map_err(cannot)?);
        let terminal = Terminal::open(interrupts).map_err(cannot)?;
        let noted = Noted::taken("console");
        Ok(TerminalConsole { source, to, input: None, output: ConsoleOutput::new(), terminal, _noted: noted })
    }

    fn start_threads(&mut self, machine: &Machine, begin: impl FnOnce() + Clone + Send + 'static) -> io::Result<()> {
        let has_keys = self.terminal.is_some();
        if let Some(terminal) = &mut self.terminal {
            terminal.handle_signals(begin.clone())?;
        }
        if let Some(to) = self.to.take() {
            self.output.serve(to, machine.control(), begin.clone())?;
        }
        if let Some(source) = self.source.take() {
            self.input = Some(Input::start(source, machine, has_keys, begin)?);
        }
        Ok(())
    }
}

impl GuestConsole for TerminalConsole {
    fn sink(&self) -> SerialSink {
        let output = Arc::clone(&self.output);
        Box::new(move |bytes| output.push(bytes))
    }

    fn begin(&mut self, machine: &Machine, begin: ThreadBegin) -> Result<(), Failure> {
        self.start_threads(machine, move || begin())
            .map_err(|error| Failure::Host(format!("cannot serve the console: {error}")))
    }

    fn end(self: Box<Self>) -> u64 {
        let output = Arc::clone(&self.output);
        drop(self);
        output.lost()
    }
}

impl Drop for TerminalConsole {
    fn drop(&mut self) {
        drop(self.input.take());
        self.output.finish();
        drop(self.terminal.take());
    }
}
