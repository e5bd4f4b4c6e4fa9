//! The thread that saves a VM into the files that a client has passed.
//!
//! ```text
//!   job: files, limit ──▶ manager rests ──▶ RAM round by round ──▶ pause ─ last pages, machine ─ resume ──▶ index
//!                                                                                                            │
//!   reply: what was saved, or why not ◀── manager goes on ◀──────────────────────────────────────────────────┘
//! ```
//!
//! The thread begins with the VM, so that it enters its restrictions before the guest runs. A client that goes away
//! closes its end of a pipe, which cancels its save.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_control::protocol::Reply;
use wideleaf_control::server::{ConnectionId, Replies};
use wideleaf_control::vm::{BaseView, SavedView, SavingView, VmAnswer};
use wideleaf_memory::manager::{Live, RestAnswer};
use wideleaf_memory::save::{LastPages, SaveError, SaveLimits, SaveProgress, SaveReport, SaveSink, Saver};
use wideleaf_memory::{GuestRam, LinuxHost, SecondLevel as _};
use wideleaf_policies::{PageSet, PageSize, WindowIndex};
use wideleaf_snapshot::{Base, Files, Layer, Opened, WindowNotes, WindowsWriter};
use wideleaf_vmm::MachineState;
use wideleaf_vmm::kvm::KvmSecondLevel;
use wideleaf_vmm::machine::MachineSaver;

use super::restoring::Restoring;
use super::{Saved, VERSION};
use crate::policy_switch::PolicySwitch;
use crate::session::{SavedSession, Session};
use crate::spec::RunSpec;
use crate::users_pause::UsersPause;

/// Interval between two looks at RAM that is still being restored.
const RAM_LOOK_EVERY: Duration = Duration::from_millis(5);

/// A client's request to save.
pub struct SaveJob {
    /// Connection of the reply.
    pub connection: ConnectionId,
    /// Way of the reply.
    pub replies: Replies,
    /// Longest pause to aim at.
    pub pause_max: Duration,
    /// Whether the VM stays paused, as if a user had paused it, at the instant that is saved.
    pub stays_paused: bool,
    /// Base of the snapshot.
    pub base: Option<BaseView>,
    /// Files that came with the request.
    pub files: Vec<OwnedFd>,
}

/// Parts of a run that a save is about.
pub struct SavedParts {
    /// Guest RAM.
    pub ram: Arc<GuestRam>,
    /// Address space of this process.
    pub host: Arc<LinuxHost>,
    /// KVM's side of the VM.
    pub second_level: Arc<KvmSecondLevel>,
    /// Reader of the machine's state.
    pub machine: MachineSaver,
    /// Session of the run.
    pub session: Weak<Session>,
    /// Pause that the VM's users share.
    pub pause: Arc<UsersPause>,
    /// Policy of the run, which may have been changed.
    pub policy: Arc<PolicySwitch>,
    /// Snapshot from which the guest continues, if it does.
    pub restoring: Option<Arc<Restoring>>,
    /// Specification of the run.
    pub spec: RunSpec,
}

/// Progress of the save under way.
#[derive(Debug, Default)]
struct Shared {
    progress: Mutex<Option<SavingView>>,
    is_ending: AtomicBool,
}

/// The thread that saves.
pub struct SavingThread {
    jobs: Option<SyncSender<SaveJob>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl SavingThread {
    /// Starts the thread, which calls `begin` first.
    ///
    /// # Errors
    /// Error of the kernel if it cannot start a thread.
    pub fn start(parts: SavedParts, begin: impl FnOnce() + Send + 'static) -> io::Result<SavingThread> {
        // Without room: a job is taken at once, or another save is under way.
        let (jobs, queue) = sync_channel(0);
        let shared = Arc::<Shared>::default();
        let with = shared.clone();
        let thread = std::thread::Builder::new().name("save".to_owned()).spawn(move || {
            begin();
            serve(&queue, &parts, &with);
        })?;
        Ok(SavingThread { jobs: Some(jobs), shared, thread: Some(thread) })
    }

    /// Hands a job to the thread, which replies to it.
    ///
    /// # Errors
    /// One line if another save is under way.
    pub fn begin(&self, job: SaveJob) -> Result<(), String> {
        let jobs = self.jobs.as_ref().expect("the thread ends with this");
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => "cannot save the VM: another save of it is under way; wait for its end".to_owned(),
            TrySendError::Disconnected(_) => "cannot save the VM: the thread that saves has ended".to_owned(),
        })
    }

    /// Progress of the save under way.
    pub fn progress(&self) -> Option<SavingView> {
        *self.shared.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SavingThread {
    /// Cancels the save under way, and waits for its reply.
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Relaxed);
        drop(self.jobs.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::warn!("the thread that saves the VM panicked");
        }
    }
}

fn serve(queue: &Receiver<SaveJob>, parts: &SavedParts, shared: &Shared) {
    for SaveJob { connection, replies, pause_max, stays_paused, base, files } in queue {
        let how = HowToPause { at_most: pause_max, stays: stays_paused };
        let saved = NewFiles::of(files, base).and_then(|files| save(parts, files, how, shared));
        *shared.progress.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let reply = match saved {
            Ok(saved) => Reply::Ok(Box::new(VmAnswer::Saved(saved))),
            Err(why) => Reply::Error(why),
        };
        replies.send(connection, &reply, false);
    }
}

/// The pause in which the last pages are saved.
#[derive(Clone, Copy)]
struct HowToPause {
    at_most: Duration,
    /// Whether the VM stays paused for its users.
    stays: bool,
}

/// The files of one save.
struct NewFiles {
    memory: File,
    windows: File,
    machine: File,
    /// End of a pipe: closed at its other end, the client has gone.
    client: File,
    base: Option<Base>,
}

impl NewFiles {
    fn of(files: Vec<OwnedFd>, base: Option<BaseView>) -> Result<NewFiles, String> {
        let mut files = files.into_iter().map(File::from);
        let mut next =
            || files.next().ok_or_else(|| "cannot save the VM: files are missing beside the request".to_owned());
        let [memory, windows, machine, client] = [next()?, next()?, next()?, next()?];
        let base = base.map(|base| {
            let machine = next()?;
            let mut layer = |name| Ok(Layer { name, windows: next()?, memory: next()? });
            let layers = base.layers.into_iter().map(&mut layer).collect::<Result<_, String>>()?;
            let opened = Opened::from_files(Files { machine, layers });
            let opened = opened.map_err(|error| format!("cannot save the VM on this base: {error}"))?;
            Ok::<_, String>(Base { opened, path: PathBuf::from(base.path) })
        });
        Ok(NewFiles { memory, windows, machine, client, base: base.transpose()? })
    }
}

/// Stores pages of RAM in the snapshot.
struct Sink<'a>(&'a WindowsWriter);

impl SaveSink for Sink<'_> {
    fn write(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> io::Result<()> {
        self.0.write(window, pages, data)
    }
}

/// What a pause gives beside the last pages.
type AtPause = (MachineState, SavedSession, Duration);

fn save(parts: &SavedParts, files: NewFiles, how: HowToPause, shared: &Shared) -> Result<SavedView, String> {
    let began = Instant::now();
    wait_for_ram(parts, &files.client, shared)?;
    let session = parts.session.upgrade().ok_or("this VM has ended")?;
    let live = session.live();
    // Until the end of this function.
    let _resting = session.ask_to_rest().map(RestAnswer::wait);
    let NewFiles { memory, windows, mut machine, client, base } = files;
    let layout: Vec<_> = parts.ram.ranges().iter().map(|range| range.gpa).collect();
    let cannot = |why: &dyn std::fmt::Display| format!("cannot save the VM: {why}");
    let writer = WindowsWriter::new(memory, &layout, base).map_err(|error| cannot(&error))?;
    let ((state, said, paused), report) = save_ram(parts, &session, &writer, &client, how, shared)?;

    let spec = RunSpec { policy: parts.policy.chosen(), ..parts.spec.clone() };
    let saved =
        Saved { version: VERSION, wideleaf: env!("CARGO_PKG_VERSION"), spec: &spec, session: said, machine: &state };
    let text = serde_json::to_vec(&saved).map_err(|error| cannot(&error))?;
    machine.write_all(&text).map_err(|error| cannot(&format_args!("cannot write `machine.json`: {error}")))?;
    let notes = |window| notes(window, live.as_deref(), &report);
    let written = writer.finish(&windows, &text, notes).map_err(|error| cannot(&error))?;
    Ok(SavedView {
        stored_bytes: PageSize::Base4K.bytes().get() * written.stored_pages,
        written_bytes: written.written.get(),
        rounds: report.rounds.len() as u32 + 1,
        pause_ms: paused.as_secs_f64() * 1e3,
        seconds: began.elapsed().as_secs_f64(),
    })
}

fn save_ram(
    parts: &SavedParts,
    session: &Session,
    writer: &WindowsWriter,
    client: &File,
    how: HowToPause,
    shared: &Shared,
) -> Result<(AtPause, SaveReport), String> {
    let cancel = AtomicBool::new(false);
    let progress = |progress: SaveProgress| {
        let bytes = |pages| PageSize::Base4K.bytes().get() * pages;
        let view =
            SavingView { round: progress.round, done_bytes: bytes(progress.done), total_bytes: bytes(progress.of) };
        *shared.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(view);
        if shared.is_ending.load(Ordering::Relaxed) || has_gone(client) {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let saver = Saver { ram: &parts.ram, host: &*parts.host, second_level: &*parts.second_level, sink: &Sink(writer) };
    let limits = SaveLimits { pause: how.at_most, ..SaveLimits::default() };
    // While the guest runs, so that little is left for the pause.
    parts.machine.flush_disks().map_err(|error| format!("cannot save the VM: cannot flush its disks: {error}"))?;
    let at_pause = |last: LastPages<'_>| {
        parts.second_level.pause()?;
        let paused_at = Instant::now();
        // Devices complete requests in it, and write RAM: so the last pages come after it.
        let state = parts.machine.save_state().map_err(|error| SaveError::State(Box::new(error)));
        let saved = state.and_then(|state| last.write().map(|()| (state, session.saved())));
        let stays = if how.stays && saved.is_ok() { parts.pause.hold() } else { Ok(()) };
        parts.second_level.resume()?;
        stays?;
        saved.map(|(state, said)| (state, said, paused_at.elapsed()))
    };
    saver.save(&limits, &cancel, &progress, at_pause).map_err(|error| format!("cannot save the VM: {error}"))
}

/// Waits until the RAM of a restored guest has its content: a window without it cannot be saved.
fn wait_for_ram(parts: &SavedParts, client: &File, shared: &Shared) -> Result<(), String> {
    while parts.restoring.as_ref().is_some_and(|restoring| !restoring.is_over()) {
        if shared.is_ending.load(Ordering::Relaxed) || has_gone(client) {
            return Err("cannot save the VM: the save was cancelled while its RAM was still being restored".to_owned());
        }
        std::thread::sleep(RAM_LOOK_EVERY);
    }
    Ok(())
}

/// Whether the other end of the pipe is closed.
fn has_gone(client: &File) -> bool {
    let mut ends = [PollFd::new(client.as_fd(), PollFlags::empty())];
    poll(&mut ends, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// What the index says of a window beside its pages: the size of its page when the save began, and its heat when the
/// manager last looked.
fn notes(window: WindowIndex, live: Option<&Live>, report: &SaveReport) -> WindowNotes {
    let page = report.page_sizes.get(&window).copied().unwrap_or(PageSize::Base4K);
    let seen = live.and_then(|live| {
        let vm = live.snapshot.vms.first()?;
        let row = vm.windows.binary_search(&window).ok()?;
        Some((vm.access[row], vm.access_quality[row]))
    });
    let (heat, age_s) = seen.map_or((0, 0), |(access, quality)| {
        (access.rate().map_or(0, |rate| rate.get() as u16), u32::from(quality.age_s))
    });
    WindowNotes { page, heat, age_s }
}
