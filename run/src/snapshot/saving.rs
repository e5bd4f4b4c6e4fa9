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
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_control::protocol::Reply;
use wideleaf_control::server::{ConnectionId, Replies};
use wideleaf_control::vm::{BaseView, MigratedView, SavedView, SavingView, VmAnswer};
use wideleaf_memory::manager::{Live, RestAnswer};
use wideleaf_memory::save::{LastPages, SaveError, SaveLimits, SaveProgress, SaveReport, SaveSink, Saver};
use wideleaf_memory::{GuestRam, LinuxHost, SecondLevel as _};
use wideleaf_policies::{PageSet, PageSize, WindowIndex};
use wideleaf_snapshot::{Base, Files, Layer, Opened, WindowNotes, WindowsWriter};
use wideleaf_vmm::MachineState;
use wideleaf_vmm::kvm::KvmSecondLevel;
use wideleaf_vmm::machine::MachineSaver;
use wideleaf_vmm::run_loop::RunControl;

use super::restoring::Restoring;
use super::{Saved, VERSION};
use crate::migration::source::{self, Departing, End};
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
    /// Destination of what is saved.
    pub to: SaveTo,
    /// Files that came with the request.
    pub files: Vec<OwnedFd>,
}

/// Destination of what is saved.
pub enum SaveTo {
    /// Files of a snapshot.
    Files {
        /// Whether the VM stays paused, as if a user had paused it, at the instant that is saved.
        stays_paused: bool,
        /// Base of the snapshot.
        base: Option<BaseView>,
    },
    /// Another run, in which the VM continues.
    Run {
        /// Its address, as the client has it.
        address: String,
        /// Limit of the speed while the guest runs.
        bytes_per_second: Option<NonZeroU64>,
    },
}

/// Parts of a run that a save is about.
pub struct SavedParts {
    /// RAM of the guest.
    pub ram: Arc<GuestRam>,
    /// Address space of this process.
    pub host: Arc<LinuxHost>,
    /// KVM's side of the VM.
    pub second_level: Arc<KvmSecondLevel>,
    /// Reader of the machine's state.
    pub machine: MachineSaver,
    /// Control of the vCPUs, for the end of a VM that has left.
    pub control: Arc<RunControl>,
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

/// State of the save under way, and of a VM that has left.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    progress: Mutex<Option<SavingView>>,
    is_ending: AtomicBool,
    /// Set where the save is to end early.
    cancel: AtomicBool,
    migrated: Mutex<Option<MigratedView>>,
    /// Why the VM is paused after a migration that was not answered.
    doubt: Mutex<Option<String>>,
}

impl Shared {
    /// Whether the VM ends.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    pub(crate) fn show(&self, progress: SaveProgress) {
        let bytes = |pages| PageSize::Base4K.bytes().get() * pages;
        let view =
            SavingView { round: progress.round, done_bytes: bytes(progress.done), total_bytes: bytes(progress.of) };
        *lock(&self.progress) = Some(view);
    }

    pub(crate) fn cancelled(&self) -> &AtomicBool {
        &self.cancel
    }

    pub(crate) fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    pub(crate) fn uncancel(&self) {
        self.cancel.store(false, Ordering::Relaxed);
    }
}

/// The thread that saves.
pub struct SavingThread {
    jobs: Option<SyncSender<SaveJob>>,
    shared: Arc<Shared>,
    second_level: Arc<KvmSecondLevel>,
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
        let second_level = parts.second_level.clone();
        let thread = std::thread::Builder::new().name("save".to_owned()).spawn(move || {
            begin();
            serve(&queue, &parts, &with);
        })?;
        Ok(SavingThread { jobs: Some(jobs), shared, second_level, thread: Some(thread) })
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
        *lock(&self.shared.progress)
    }

    /// Why the VM is paused, if a migration was not answered.
    pub fn doubt(&self) -> Option<String> {
        lock(&self.shared.doubt).clone()
    }

    /// Resumes a VM that an unanswered migration left paused: an operator has seen that it does not run elsewhere.
    ///
    /// # Errors
    /// One line; it stays paused.
    pub fn resume_after_doubt(&self) -> Result<(), String> {
        let mut doubt = lock(&self.shared.doubt);
        if doubt.is_some() {
            self.second_level.resume().map_err(|error| error.to_string())?;
            *doubt = None;
        }
        Ok(())
    }

    /// Ends the thread; cancels the save under way, and waits for its reply. Returns where the VM has gone, if it has.
    pub fn end(mut self: Arc<SavingThread>) -> Option<MigratedView> {
        let shared = self.shared.clone();
        shared.is_ending.store(true, Ordering::Relaxed);
        // A client's thread that asks for the progress has it for a moment.
        loop {
            match Arc::try_unwrap(self) {
                Ok(thread) => break drop(thread),
                Err(again) => self = again,
            }
            std::thread::yield_now();
        }
        lock(&shared.migrated).take()
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
        // The devices' threads could not end before.
        if lock(&self.shared.doubt).take().is_some() {
            self.second_level.resume().unwrap_or_else(|error| tracing::warn!("{error}"));
        }
    }
}

fn serve(queue: &Receiver<SaveJob>, parts: &SavedParts, shared: &Shared) {
    for SaveJob { connection, replies, pause_max, to, files } in queue {
        shared.uncancel();
        let answer = match to {
            SaveTo::Files { stays_paused, base } => {
                let how = HowToPause { at_most: pause_max, stays: stays_paused };
                NewFiles::of(files, base).and_then(|files| save(parts, files, how, shared)).map(VmAnswer::Saved)
            }
            SaveTo::Run { address, bytes_per_second } => {
                let limits = SaveLimits { bytes_per_second, ..SaveLimits::default() };
                migrate(parts, Departing { to: address, pause_max, limits, files }, shared)
            }
        };
        *lock(&shared.progress) = None;
        let reply = match answer {
            Ok(answer) => Reply::Ok(Box::new(answer)),
            Err(why) => Reply::Error(why),
        };
        replies.send(connection, &reply, false);
    }
}

fn migrate(parts: &SavedParts, job: Departing, shared: &Shared) -> Result<VmAnswer, String> {
    if let Some(doubt) = lock(&shared.doubt).clone() {
        return Err(doubt);
    }
    if parts.restoring.as_ref().is_some_and(|restoring| !restoring.is_over()) {
        return Err("cannot migrate the VM: its RAM is still being restored; try again in a moment".to_owned());
    }
    match source::migrate(parts, job, shared)? {
        End::Left(view) => {
            *lock(&shared.migrated) = Some(view.clone());
            Ok(VmAnswer::Migrated(view))
        }
        End::InDoubt(why) => {
            *lock(&shared.doubt) = Some(why.clone());
            Err(why)
        }
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
    let text = saved_text(&spec, said, &state).map_err(|error| cannot(&error))?;
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

/// Content of `machine.json`.
pub(crate) fn saved_text(spec: &RunSpec, session: SavedSession, machine: &MachineState) -> Result<Vec<u8>, String> {
    let saved = Saved { version: VERSION, wideleaf: env!("CARGO_PKG_VERSION"), spec, session, machine };
    serde_json::to_vec(&saved).map_err(|error| error.to_string())
}

fn save_ram(
    parts: &SavedParts,
    session: &Session,
    writer: &WindowsWriter,
    client: &File,
    how: HowToPause,
    shared: &Shared,
) -> Result<(AtPause, SaveReport), String> {
    let progress = |progress: SaveProgress| {
        shared.show(progress);
        if shared.is_ending() || has_gone(client) {
            shared.cancel();
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
    saver.save(&limits, shared.cancelled(), &progress, at_pause).map_err(|error| format!("cannot save the VM: {error}"))
}

/// Waits until the RAM of a restored guest has its content: a window without it cannot be saved.
fn wait_for_ram(parts: &SavedParts, client: &File, shared: &Shared) -> Result<(), String> {
    while parts.restoring.as_ref().is_some_and(|restoring| !restoring.is_over()) {
        if shared.is_ending() || has_gone(client) {
            return Err("cannot save the VM: the save was cancelled while its RAM was still being restored".to_owned());
        }
        std::thread::sleep(RAM_LOOK_EVERY);
    }
    Ok(())
}

/// Whether the other end of the pipe is closed.
pub(crate) fn has_gone(client: &File) -> bool {
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
