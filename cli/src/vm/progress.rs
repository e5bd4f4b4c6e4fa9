//! A request that takes a VM long: its progress on a terminal, and Ctrl-C, which cancels it. The VM cancels when a pipe
//! is closed, so it also does where this process is killed.

use std::io::PipeWriter;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serde::Serialize;
use wideleaf_control::vm::{RestoringView, SavingView, VM_FILES_TIMEOUT, VmAnswer, VmRequest, VmStatus};
use wideleaf_control::vm::{ask, ask_with_files};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::migration::Address;

use crate::options::FormatArg;
use crate::output::{Output, say};
use crate::progress::visible_bar;

/// Interval between two looks at the progress.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Form of the bar: bytes of one pass over RAM.
const BAR: &str = "{prefix} [{wide_bar}] {bytes}/{total_bytes}";

/// Writing end of the pipe that ends a request when it is closed; `None` after a signal.
pub(super) type CancelPipe = Option<PipeWriter>;

/// Asks with open files, and shows the progress until the answer. Between the first files and the others, the VM gets
/// the reading end of a pipe that is closed at a signal: it cancels then, and says so. Returns the other end too.
///
/// # Errors
/// [`Failure`] in one line, also after a signal.
pub(super) fn ask_for_long(
    socket: &Path,
    request: VmRequest,
    [first, others]: [&[BorrowedFd<'_>]; 2],
    what: &str,
    interrupts: &Interrupts,
) -> Result<(VmAnswer, CancelPipe), Failure> {
    let (cancelled, cancel) = std::io::pipe().map_err(|error| Failure::Host(format!("cannot make a pipe: {error}")))?;
    let passed = [first, &[cancelled.as_fd()], others].concat();
    let mut cancel = Some(cancel);
    let bar = visible_bar(0, BAR);
    let (answers, answer) = channel();
    let answer = std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = answers.send(ask_with_files(socket, request, &passed, VM_FILES_TIMEOUT));
        });
        loop {
            match answer.recv_timeout(LOOK_EVERY) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Disconnected) => unreachable!("the thread sends an answer"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if interrupts.is_set() {
                cancel = None;
            }
            if let Some((prefix, [done, total])) = progress(socket, what) {
                bar.set_prefix(prefix);
                bar.set_length(total);
                bar.set_position(done);
            }
        }
    });
    bar.finish_and_clear();
    // A request that was past cancelling has its answer.
    match answer {
        Ok(answer) => Ok((answer, cancel)),
        // What the VM says is about this host, not about the arguments.
        Err(error) => interrupts.check().and(Err(Failure::Host(error.to_string()))),
    }
}

/// Destination of the result of a migration: standard output, or standard error where the connection is that.
pub(super) struct ResultOutput(Option<Output>);

impl ResultOutput {
    /// For a migration over a connection at this address.
    ///
    /// # Errors
    /// [`Failure`] if nothing can be written there.
    pub(super) fn open(address: &Address, format: FormatArg) -> Result<ResultOutput, Failure> {
        let output = if address.takes_standard_output() { None } else { Some(Output::open(format, None)?) };
        Ok(ResultOutput(output))
    }

    /// Shows a result, with this line for people.
    ///
    /// # Errors
    /// [`Failure`] if it cannot be written.
    pub(super) fn show<R: Serialize>(self, result: &R, line: String) -> Result<(), Failure> {
        match self.0 {
            Some(output) => output.write(result, |_| line + "\n"),
            None => {
                say(line);
                Ok(())
            }
        }
    }
}

/// Failure of a request with the answer to another one.
pub(super) fn other_answer(socket: &Path) -> Failure {
    Failure::Host(format!("cannot use the answer of {}: it answers another question", socket.display()))
}

/// Progress of the work under way: its name, bytes that are done and bytes in all; `None` if the VM does not say.
fn progress(socket: &Path, what: &str) -> Option<(String, [u64; 2])> {
    let Ok(VmAnswer::Status(status)) = ask(socket, VmRequest::Status) else { return None };
    let VmStatus { saving, restoring, .. } = status;
    let save = saving.map(|SavingView { round, done_bytes, total_bytes }| {
        (format!("{what}, round {round}"), [done_bytes, total_bytes])
    });
    // Before the first round, a save waits for RAM that comes from a snapshot.
    save.or_else(|| {
        restoring.map(|RestoringView { filled_bytes, stored_bytes }| {
            (format!("{what}, when its RAM has come"), [filled_bytes, stored_bytes])
        })
    })
}
