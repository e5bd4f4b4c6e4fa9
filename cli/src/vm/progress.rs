//! A request that takes a VM long: its progress on a terminal, and Ctrl-C, which cancels it.

use std::io::PipeWriter;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use wideleaf_control::vm::{SavingView, VM_FILES_TIMEOUT, VmAnswer, VmRequest, ask, ask_with_files};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

use crate::progress::visible_bar;

/// Interval between two looks at the progress.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Form of the bar: bytes of one pass over RAM.
const BAR: &str = "{prefix} [{wide_bar}] {bytes}/{total_bytes}";

/// Asks with open files, and shows the progress until the answer. `cancel` is closed at a signal: the VM has the other
/// end of that pipe, cancels, and says so.
///
/// # Errors
/// [`Failure`] in one line, also after a signal.
pub(super) fn ask_for_long(
    socket: &Path,
    request: VmRequest,
    passed: &[BorrowedFd<'_>],
    what: &str,
    cancel: PipeWriter,
    interrupts: &Interrupts,
) -> Result<VmAnswer, Failure> {
    let mut cancel = Some(cancel);
    let bar = visible_bar(0, BAR);
    let (answers, answer) = channel();
    let answer = std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = answers.send(ask_with_files(socket, request, passed, VM_FILES_TIMEOUT));
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
            if let Some(SavingView { round, done_bytes, total_bytes }) = progress(socket) {
                bar.set_prefix(format!("{what}, round {round}"));
                bar.set_length(total_bytes);
                bar.set_position(done_bytes);
            }
        }
    });
    bar.finish_and_clear();
    drop(cancel);
    // A request that was past cancelling has its answer.
    match answer {
        Ok(answer) => Ok(answer),
        // What the VM says is about this host, not about the arguments.
        Err(error) => interrupts.check().and(Err(Failure::Host(error.to_string()))),
    }
}

/// Progress of the work under way; `None` if the VM does not say.
fn progress(socket: &Path) -> Option<SavingView> {
    match ask(socket, VmRequest::Status) {
        Ok(VmAnswer::Status(status)) => status.saving,
        _ => None,
    }
}
