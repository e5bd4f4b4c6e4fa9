//! `wideleaf run --console`: the guest's serial port on standard input and output, byte by byte.
//!
//! ```text
//!   terminal ─▶ reader ─▶ keys ─┬─ 4 KiB ─▶ typist ─▶ serial port ─▶ guest
//!   or a pipe             │     └─ Ctrl-A x, p: stop, ask  │
//!                         └─ (a pipe has no keys)          ▼
//!   terminal ◀─ writer ◀──────── 64 KiB ◀────────── the vCPU's thread, which waits where they are full
//! ```
//!
//! On a terminal every key is the guest's, Ctrl-C and Ctrl-Z too, but for what follows a Ctrl-A (`keys.rs`); its
//! settings are as before however the run ends (`terminal.rs`), unless it is killed outright. A reader that does not
//! read holds up the guest, and nothing else: a VM that is to pause or to end does so, and what found no room then is
//! counted. The bytes are the guest's as they are: a console is a terminal of the guest's by intent.

use std::fs::File;
use std::io;
use std::sync::Arc;

use wideleaf_vmm::Machine;
use wideleaf_vmm::devices::SerialSink;
use wideleaf_vmm::sandbox::{Sandbox, ThreadKind};

use super::sandboxed;
use crate::failure::Failure;
use crate::interrupts::Interrupts;
use input::{Input, Source};
use output::ConsoleOutput;
use terminal::Terminal;

mod input;
mod keys;
mod output;
mod terminal;

/// A console that is open until this is dropped.
///
/// It has no threads until there is a machine: the process is to enter its sandbox alone.
pub(crate) struct GuestConsole {
    source: Option<Source>,
    to: Option<File>,
    // In the order in which they end: nothing is typed any more, all is written, the terminal is as it was.
    input: Option<Input>,
    output: Arc<ConsoleOutput>,
    terminal: Option<Terminal>,
}

impl GuestConsole {
    /// Takes standard input and output; a terminal gets into its raw mode.
    ///
    /// # Errors
    /// [`Failure::Host`] where the kernel refuses.
    pub(crate) fn open(interrupts: &Interrupts) -> Result<GuestConsole, Failure> {
        let cannot = |error: std::io::Error| Failure::Host(format!("cannot open the console: {error}"));
        let source = Some(Source::open().map_err(cannot)?);
        let to = Some(output::standard_output().map_err(cannot)?);
        let terminal = Terminal::open(interrupts).map_err(cannot)?;
        Ok(GuestConsole { source, to, input: None, output: ConsoleOutput::new(), terminal })
    }

    /// Where the guest's bytes go.
    pub(crate) fn sink(&self) -> SerialSink {
        let output = Arc::clone(&self.output);
        Box::new(move |bytes| output.push(bytes))
    }

    /// From now on what is typed goes to that machine's guest, and what it has printed is written.
    ///
    /// # Errors
    /// [`Failure::Host`] where there can be no thread for it.
    pub(crate) fn begin(&mut self, machine: &Machine, sandbox: Option<&Arc<Sandbox>>) -> Result<(), Failure> {
        let sandbox = sandbox.cloned();
        let begin = move || sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Console));
        self.start_threads(machine, begin).map_err(|error| Failure::Host(format!("cannot serve the console: {error}")))
    }

    /// Ends it. How many bytes of the guest were not written, because standard output was not read.
    pub(crate) fn end(self) -> u64 {
        let output = Arc::clone(&self.output);
        drop(self);
        output.lost()
    }

    fn start_threads(&mut self, machine: &Machine, begin: impl FnOnce() + Clone + Send + 'static) -> io::Result<()> {
        let has_keys = self.terminal.is_some();
        if let Some(terminal) = &mut self.terminal {
            terminal.hear(begin.clone())?;
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

impl Drop for GuestConsole {
    fn drop(&mut self) {
        drop(self.input.take());
        self.output.finish();
        drop(self.terminal.take());
    }
}
