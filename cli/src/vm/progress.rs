//! A request that takes a VM long: its progress on a terminal, and Ctrl-C, which cancels it. The VM cancels when a pipe
//! is closed, so it also does where this process is killed.

use std::io::{self, PipeWriter};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde::Serialize;
use wideleaf_control::vm::{
    RestoringView, SavingView, VM_FILES_TIMEOUT, VmAnswer, VmClientError, VmRequest, VmStatus, ask_with_files,
};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::migration::Address;

use crate::options::FormatArg;
use crate::output::{Output, say};
use crate::progress::visible_bar;

/// Interval between two looks at the progress.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Time for the answer about the progress: a VM that is stopped must not keep a signal from being seen.
const PROGRESS_WITHIN: Duration = Duration::from_secs(1);

/// Time after a signal without any answer of the VM, after which its last one is not waited for either: it is stopped.
const SILENT_MAX: Duration = Duration::from_secs(5);

/// Form of the bar: bytes of one pass over RAM.
const BAR: &str = "{prefix} [{wide_bar}] {bytes}/{total_bytes}";

/// Writing end of the pipe that ends a request when it is closed; `None` after a signal.
pub(super) type CancelPipe = Option<PipeWriter>;

/// Asks with open files, and shows the progress until the answer. Between the first files and the others, the VM gets
/// the reading end of a pipe that is closed at a signal: it cancels then, and says so. Returns the other end too. A VM
/// that is silent after a signal is left: it cancels when it continues.
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
    let (cancelled, cancel) = io::pipe().map_err(|error| Failure::Host(format!("cannot make a pipe: {error}")))?;
    let answer = ask_in_thread(socket, request, &[first, &[cancelled.as_fd()], others].concat())?;
    let mut cancel = Some(cancel);
    let mut heard_at = Instant::now();
    let bar = visible_bar(0, BAR);
    let answer = loop {
        match answer.recv_timeout(LOOK_EVERY) {
            Ok(answer) => break answer,
            Err(RecvTimeoutError::Disconnected) => unreachable!("the thread sends an answer"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if interrupts.is_set() && cancel.take().is_some() {
            heard_at = Instant::now();
        }
        if cancel.is_some() && bar.is_hidden() {
            continue;
        }
        if let Some(status) = status(socket) {
            heard_at = Instant::now();
            show(&bar, status, what);
        } else if cancel.is_none() && heard_at.elapsed() >= SILENT_MAX {
            bar.finish_and_clear();
            return Err(Failure::Interrupted);
        }
    };
    bar.finish_and_clear();
    // A request that was past cancelling has its answer.
    match answer {
        Ok(answer) => Ok((answer, cancel)),
        // What the VM says is about this host, not about the arguments.
        Err(error) => interrupts.check().and(Err(Failure::Host(error.to_string()))),
    }
}

/// Asks in a thread, which owns the files: it ends with the process where the VM never answers.
fn ask_in_thread(
    socket: &Path,
    request: VmRequest,
    passed: &[BorrowedFd<'_>],
) -> Result<Receiver<Result<VmAnswer, VmClientError>>, Failure> {
    let passed = passed.iter().map(BorrowedFd::try_clone_to_owned).collect::<io::Result<Vec<OwnedFd>>>();
    let passed = passed.map_err(|error| Failure::Host(format!("cannot pass files to the VM: {error}")))?;
    let (answers, answer) = channel();
    let socket = socket.to_owned();
    thread::spawn(move || {
        let passed: Vec<BorrowedFd<'_>> = passed.iter().map(OwnedFd::as_fd).collect();
        let _ = answers.send(ask_with_files(&socket, request, &passed, VM_FILES_TIMEOUT));
    });
    Ok(answer)
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

/// State of the VM; `None` where it does not answer in time.
fn status(socket: &Path) -> Option<VmStatus> {
    match ask_with_files(socket, VmRequest::Status, &[], PROGRESS_WITHIN) {
        Ok(VmAnswer::Status(status)) => Some(status),
        _ => None,
    }
}

/// Shows the progress of the work under way, if the VM says it.
fn show(bar: &ProgressBar, status: VmStatus, what: &str) {
    let VmStatus { saving, restoring, .. } = status;
    let save = saving.map(|SavingView { round, done_bytes, total_bytes }| {
        (format!("{what}, round {round}"), [done_bytes, total_bytes])
    });
    // Before the first round, a save waits for RAM that comes from a snapshot.
    let seen = save.or_else(|| {
        restoring.map(|RestoringView { filled_bytes, stored_bytes }| {
            (format!("{what}, when its RAM has come"), [filled_bytes, stored_bytes])
        })
    });
    if let Some((prefix, [done, total])) = seen {
        bar.set_prefix(prefix);
        bar.set_length(total);
        bar.set_position(done);
    }
}
