//! `wideleaf vm SOCKET snapshot FOLDER`: makes the files, passes them to the VM, and puts the folder in its place.
//!
//! ```text
//!   this process                                   the VM
//!   temporary folder, empty files ──request──▶ writes them while its guest runs
//!   shows the progress            ◀──status───
//!   Ctrl-C: closes the pipe       ───────────▶ cancels
//!   fsync, exchange of folders    ◀──saved────
//! ```

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use wideleaf_control::vm::{BaseView, SavedView, StopHow, VmAnswer, VmRequest, ask};
use wideleaf_policies::Bytes;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::undo::Undo;
use wideleaf_snapshot::{Caching, Files, Finished, NewFiles, Writing};

use crate::options::{FormatArg, parse_duration};
use crate::output::{Output, say};
use crate::report::moved::before_pause;
use crate::vm::progress::{CancelPipe, ask_for_long, other_answer};

/// Arguments of `wideleaf vm SOCKET snapshot`.
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    /// Folder of the snapshot. One that is there already is replaced as a whole, once the new one is complete
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,

    /// Save only what changed since this snapshot of the same VM, which must stay where it is, seen from FOLDER
    #[arg(long, value_name = "FOLDER")]
    pub base: Option<PathBuf>,

    /// Longest pause of the guest: the save is refused if the guest writes too fast for it
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = parse_duration)]
    pub pause: Duration,

    /// Stop the VM at the instant that is saved, once the snapshot is complete: its disks then stay as the snapshot
    /// needs them
    #[arg(long)]
    pub stop: bool,
}

/// Result of the command.
#[derive(Debug, Serialize)]
struct Snapshot {
    /// Folder of the snapshot.
    folder: PathBuf,
    #[serde(flatten)]
    saved: SavedView,
}

/// Saves the VM at this socket, and says so.
///
/// # Errors
/// Those of [`save_vm`].
pub fn main(socket: &Path, args: &SnapshotArgs, format: FormatArg) -> Result<(), Failure> {
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?.also_at_hangup()?;
    let output = Output::open(format, None)?;
    let saved = save_vm(socket, args, &interrupts)?;
    output.write(&Snapshot { folder: args.folder.clone(), saved }, table)
}

/// Saves the VM at this socket.
///
/// # Errors
/// [`Failure`] in one line; the folder is then as it was.
pub fn save_vm(socket: &Path, args: &SnapshotArgs, interrupts: &Interrupts) -> Result<SavedView, Failure> {
    let unusable = |error: &dyn std::fmt::Display| Failure::Input(error.to_string());
    let base = args.base.as_deref().map(|base| Files::open(base, Caching::PageCache)).transpose();
    let base = base.map_err(|error| unusable(&error))?;
    let writing = Writing::create(&args.folder, base.as_ref()).map_err(|error| unusable(&error))?;
    // For the second signal, while the VM does not answer the first.
    let undo = Undo::at_the_end(writing.remover());
    let files = writing.files().map_err(|error| unusable(&error))?;
    let view = match (&args.base, &base) {
        (Some(folder), Some(files)) => Some(base_view(&writing, folder, files)?),
        _ => None,
    };
    let request =
        VmRequest::Snapshot { pause_ms_max: args.pause.as_millis() as u64, stays_paused: args.stop, base: view };
    // The VM goes on when the pipe is closed, unless it was stopped or resumed before.
    let (saved, _pipe) = save(socket, request, &files, base.as_ref(), interrupts)?;
    // The files are complete, and the older snapshot is to come to their place.
    drop(undo);
    if args.stop {
        // The VM stays paused until this is over, however long the disk takes: an interrupt comes too late.
        interrupts.stand_down();
    }
    let finished = writing.finish().map_err(|error| Failure::Output(error.to_string()));
    let next = match &finished {
        Ok(_) => Some(VmRequest::Stop { how: StopHow::Kill, if_paused: true }),
        // Without a snapshot the guest goes on, if it did before.
        Err(_) => (!saved.was_paused).then_some(VmRequest::Resume),
    };
    let done = next.filter(|_| args.stop).map(|next| ask(socket, next));
    if let (Err(_), Some(Err(error))) = (&finished, &done) {
        say(format_args!("wideleaf: the VM is still paused: {error}"));
    }
    let Finished { not_removed, .. } = finished?;
    done.transpose()
        .map_err(|error| Failure::Host(format!("{error}; the snapshot in {} is complete", args.folder.display())))?;
    if let Some((folder, error)) = not_removed {
        say(format_args!("wideleaf: cannot remove the older snapshot in {}: {error}; remove it", folder.display()));
    }
    Ok(saved)
}

/// The base as the VM is to name it.
fn base_view(writing: &Writing, folder: &Path, files: &Files) -> Result<BaseView, Failure> {
    let path = writing.path_to(folder).map_err(|error| Failure::Input(error.to_string()))?;
    let path = path.into_os_string().into_string();
    let path = path.map_err(|_| Failure::Usage("cannot use --base: its path is not UTF-8; rename it".to_owned()))?;
    Ok(BaseView { path, layers: files.layers.iter().map(|layer| layer.name.clone()).collect() })
}

/// Asks the VM to save, and shows the progress until its answer.
fn save(
    socket: &Path,
    request: VmRequest,
    files: &NewFiles,
    base: Option<&Files>,
    interrupts: &Interrupts,
) -> Result<(SavedView, CancelPipe), Failure> {
    let NewFiles { machine, windows, memory } = files;
    let mut of_base: Vec<BorrowedFd<'_>> = vec![];
    if let Some(base) = base {
        of_base.push(base.machine.as_fd());
        of_base.extend(base.layers.iter().flat_map(|layer| [layer.windows.as_fd(), layer.memory.as_fd()]));
    }
    let passed = [memory.as_fd(), windows.as_fd(), machine.as_fd()];
    match ask_for_long(socket, request, [&passed, &of_base], "saving", interrupts)? {
        (VmAnswer::Saved(saved), pipe) => Ok((saved, pipe)),
        _ => Err(other_answer(socket)),
    }
}

fn table(Snapshot { folder, saved }: &Snapshot) -> String {
    let SavedView { stored_bytes, written_bytes, rounds, pause_ms, seconds, before_pause: before, .. } = saved;
    format!(
        "saved to {}: {} of RAM in {seconds:.2} s, {} written in {rounds} rounds, the guest paused for {pause_ms:.1} \
         ms{}\n",
        folder.display(),
        Bytes::new(*stored_bytes),
        Bytes::new(*written_bytes),
        before_pause(before.as_ref()),
    )
}
