//! The thread that saves a VM, into files of a client or to another run.
//!
//! It begins with the VM, so that it enters its restrictions before the guest runs. A client that goes away closes its
//! end of a pipe, which cancels its save.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use wideleaf_control::protocol::Reply;
use wideleaf_control::server::{ConnectionId, Replies};
use wideleaf_control::vm::{BaseView, BeforePauseView, MigratedView, PostCopyFrom, SavingView, VmAnswer};
use wideleaf_memory::SecondLevel as _;
use wideleaf_memory::save::SaveLimits;
use wideleaf_vmm::devices::virtio::block::DiskLocks;
use wideleaf_vmm::kvm::KvmSecondLevel;

use crate::migration::doubt::Doubt;
use crate::migration::recovering::{self, Recovered, Rejoining, broken};
use crate::migration::source::{self, Departing, End};
use crate::past_saves::PastSaves;
use crate::remapping::{Remapping, large_bytes};
use crate::snapshot::parts::{SavedParts, Shared, UnderWay, unless_it_panics};
use crate::snapshot::saving::{HowToPause, NewFiles, save};

/// Interval between two looks whether a guest that is paused in doubt was ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A client's request to save.
pub struct SaveJob {
    /// Connection of the reply.
    pub connection: ConnectionId,
    /// Way of the reply.
    pub replies: Replies,
    /// Destination of what is saved.
    pub to: SaveTo,
    /// Files that came with the request.
    pub files: Vec<OwnedFd>,
}

/// Destination of what is saved.
pub enum SaveTo {
    /// Files of a snapshot.
    Files {
        /// Longest pause to aim at.
        pause_max: Duration,
        /// Whether the VM stays paused, as if a user had paused it, at the instant that is saved.
        stays_paused: bool,
        /// Base of the snapshot.
        base: Option<BaseView>,
    },
    /// Another run, in which the VM continues.
    Run {
        /// Its address, as the client has it.
        address: String,
        /// Longest pause to aim at.
        pause_max: Duration,
        /// Limit of the speed while the guest runs.
        bytes_per_second: Option<NonZeroU64>,
        /// When the guest moves before all of its RAM has; `None`: never.
        post_copy: Option<PostCopyFrom>,
    },
    /// The run in which the VM continued before its connection was lost.
    Again {
        /// Its address, as the client has it.
        address: String,
    },
}

impl SaveTo {
    fn work(&self) -> UnderWay {
        match self {
            SaveTo::Files { .. } => UnderWay::Snapshot,
            SaveTo::Run { .. } | SaveTo::Again { .. } => UnderWay::Migration,
        }
    }
}

/// The thread that saves.
pub struct SavingThread {
    jobs: Option<SyncSender<SaveJob>>,
    shared: Arc<Shared>,
    second_level: Arc<KvmSecondLevel>,
    disks: DiskLocks,
    thread: Option<JoinHandle<()>>,
}

impl SavingThread {
    /// Starts the thread, which calls `begin` first.
    ///
    /// # Errors
    /// Error of the kernel if it cannot start a thread.
    pub fn start(parts: SavedParts, begin: impl FnOnce() + Send + 'static) -> io::Result<SavingThread> {
        // Room for a job while the thread begins, or ends with the one before.
        let (jobs, queue) = sync_channel(1);
        let shared = Arc::<Shared>::default();
        let with = shared.clone();
        let (second_level, disks) = (parts.second_level.clone(), parts.disks.clone());
        let thread = std::thread::Builder::new().name("save".to_owned()).spawn(move || {
            begin();
            serve(&queue, &parts, &with);
        })?;
        Ok(SavingThread { jobs: Some(jobs), shared, second_level, disks, thread: Some(thread) })
    }

    /// Hands a job to the thread, which replies to it.
    ///
    /// # Errors
    /// One line if another save is under way.
    pub fn begin(&self, job: SaveJob) -> Result<(), String> {
        let jobs = self.jobs.as_ref().expect("the thread ends with this");
        if matches!(job.to, SaveTo::Again { .. }) && self.shared.serves.lock().is_some() {
            // Its connection may be dead without a sign; the thread is free in a moment.
            self.shared.set_replaced(true);
            return jobs.try_send(job).map_err(|error| match error {
                TrySendError::Full(_) => "cannot recover the VM: another `recover` of it begins; try again".into(),
                TrySendError::Disconnected(_) => "cannot recover the VM: the thread that saves has ended".into(),
            });
        }
        // From now on other requests know of it: the thread may begin only after the next of them.
        let mut under_way = self.shared.under_way.lock();
        let busy = || "cannot save the VM: another save of it is under way; wait for its end".to_owned();
        if under_way.is_some() {
            return Err(busy());
        }
        let begins = job.to.work();
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => busy(),
            TrySendError::Disconnected(_) => "cannot save the VM: the thread that saves has ended".to_owned(),
        })?;
        *under_way = Some(begins);
        Ok(())
    }

    /// Progress of the save under way.
    pub fn progress(&self) -> Option<SavingView> {
        *self.shared.progress.lock()
    }

    /// Fails while the VM is saved or moved: its manager rests, and its state is being read.
    ///
    /// # Errors
    /// The reason, which ends a line.
    pub fn check_at_rest(&self) -> Result<(), &'static str> {
        match *self.shared.under_way.lock() {
            None => Ok(()),
            Some(UnderWay::Snapshot) => Err("a snapshot of it is being written; wait for its end, or end its client"),
            Some(UnderWay::Migration) => Err("it is being migrated; wait for the end of that, or end its client"),
        }
    }

    /// Fails while the VM is moved.
    ///
    /// # Errors
    /// As for [`SavingThread::check_at_rest`].
    pub fn check_not_moving(&self) -> Result<(), &'static str> {
        let is_saved = *self.shared.under_way.lock() == Some(UnderWay::Snapshot);
        if is_saved { Ok(()) } else { self.check_at_rest() }
    }

    /// Fails while the guest runs at a target that needs RAM of this process.
    ///
    /// # Errors
    /// One line.
    pub fn check_not_needed(&self) -> Result<(), String> {
        match self.shared.serves.lock().as_deref() {
            None => Ok(()),
            Some(to) => Err(format!(
                "cannot end or continue the VM here: it runs at {to}, and a part of its RAM is still here; wait until \
                 `migrate` or `recover` is done"
            )),
        }
    }

    /// Why the VM is paused, if a migration was not answered.
    pub fn doubt(&self) -> Option<String> {
        self.shared.doubt.lock().as_ref().map(|doubt| doubt.why.clone())
    }

    /// Resumes a VM that an unanswered migration left paused: an operator has seen that it does not run elsewhere.
    ///
    /// # Errors
    /// One line; it stays paused. Where it runs elsewhere, its disks are locked there.
    pub fn resume_after_doubt(&self) -> Result<(), String> {
        let mut doubt = self.shared.doubt.lock();
        // Under that lock: `recover` may have begun since the request was checked.
        self.check_not_needed()?;
        if doubt.is_some() {
            self.disks.take().map_err(|error| format!("cannot resume the VM: {error}; does it run elsewhere?"))?;
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
        shared.migrated.lock().take()
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
        // What waits in the rings of its devices may be the target's to do.
        if self.shared.doubt.lock().take().is_some() {
            self.second_level.end_devices();
        }
    }
}

/// The next job; `None` at the end. Meanwhile the devices of a guest that was ended in doubt end, and one that goes on
/// after a save is watched.
fn next(
    queue: &Receiver<SaveJob>,
    parts: &SavedParts,
    shared: &Shared,
    mut remapping: Option<Remapping>,
) -> Option<SaveJob> {
    loop {
        let is_in_doubt = {
            let doubt = shared.doubt.lock();
            if doubt.is_some() {
                parts.end_devices_if_stopped();
            }
            doubt.is_some()
        };
        remapping = remapping.and_then(|mut of| of.look(&*parts.second_level, &parts.past).then_some(of));
        if !is_in_doubt && remapping.is_none() {
            return queue.recv().ok();
        }
        match queue.recv_timeout(LOOK_EVERY) {
            Ok(job) => return Some(job),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

fn serve(queue: &Receiver<SaveJob>, parts: &SavedParts, shared: &Shared) {
    let mut remapping = None;
    while let Some(SaveJob { connection, replies, to, files }) = next(queue, parts, shared, remapping.take()) {
        let work = to.work();
        let large_before = large_bytes(&*parts.second_level);
        *shared.under_way.lock() = Some(work);
        shared.uncancel();
        shared.set_replaced(false);
        let mut stays = None;
        let answer = unless_it_panics(|| match to {
            SaveTo::Files { pause_max, stays_paused, base } => {
                let how = HowToPause { at_most: pause_max, stays: stays_paused };
                let saved = NewFiles::of(files, base).and_then(|files| save(parts, files, how, shared));
                saved.map(|saved| {
                    stays = saved.stays;
                    VmAnswer::Saved(saved.view)
                })
            }
            SaveTo::Run { address, pause_max, bytes_per_second, post_copy } => {
                let limits = SaveLimits { bytes_per_second, ..SaveLimits::default() };
                migrate(parts, Departing { to: address, pause_max, limits, post_copy, files }, shared)
            }
            SaveTo::Again { address } => recover(parts, Rejoining { to: address, files }, shared),
        });
        let has_read_ram = shared.progress.lock().take().is_some();
        count(&answer, work, shared.take_failed(), &parts.past);
        // It maps nothing large while it stays paused.
        let watch = || {
            let goes_on = has_read_ram && shared.doubt.lock().is_none() && !parts.control.is_stopping();
            let watched = Remapping::begin(large_before, large_bytes(&*parts.second_level)).filter(|_| goes_on);
            watched.inspect(|watched| parts.past.note_remapped(watched.view()))
        };
        let reply = match answer {
            Ok(answer) => Reply::Ok(Box::new(answer)),
            Err(why) => Reply::Error(why),
        };
        match stays {
            // The client has yet to give the files their place.
            Some(stays) => {
                replies.send(connection, &reply, false);
                stays.wait(&parts.pause, shared);
                remapping = watch();
                *shared.under_way.lock() = None;
            }
            None => {
                remapping = watch();
                *shared.under_way.lock() = None;
                replies.send(connection, &reply, false);
            }
        }
    }
}

/// Counts what is over, before its client knows. `paid`: by the guest, if it failed.
fn count(answer: &Result<VmAnswer, String>, work: UnderWay, paid: Option<BeforePauseView>, past: &PastSaves) {
    match (work, answer) {
        (UnderWay::Snapshot, Ok(VmAnswer::Saved(saved))) => past.count_snapshot(saved),
        (UnderWay::Snapshot, _) => past.count_failed_snapshot(paid),
        (UnderWay::Migration, Err(_)) => past.count_failed_migration(paid),
        // The run at which it is now counts it.
        (UnderWay::Migration, Ok(_)) => {}
    }
}

fn migrate(parts: &SavedParts, job: Departing, shared: &Shared) -> Result<VmAnswer, String> {
    if let Some(doubt) = &*shared.doubt.lock() {
        return Err(doubt.why.clone());
    }
    parts.restoring.as_ref().map_or(Ok(()), |restoring| restoring.check_not_mapped("migrate"))?;
    if parts.is_filling() {
        return Err("cannot migrate the VM: its RAM has not all come yet; try again in a moment".to_owned());
    }
    let end = unless_it_panics(|| source::migrate(parts, job, shared));
    let mut doubt = shared.doubt.lock();
    *shared.serves.lock() = None;
    match end? {
        End::Left(view) => Ok(left(view, shared)),
        End::InDoubt(why) => Err(doubt.insert(why).why.clone()),
    }
}

fn recover(parts: &SavedParts, job: Rejoining, shared: &Shared) -> Result<VmAnswer, String> {
    let kept = {
        let mut doubt = shared.doubt.lock();
        let kept = doubt.as_mut().and_then(|doubt| doubt.kept.take());
        let kept = kept.ok_or_else(|| {
            "cannot recover the VM: no target needs a part of its RAM; `recover` continues a migration that lost its \
             connection while pages followed the guest"
                .to_owned()
        })?;
        *shared.serves.lock() = Some(job.to.clone());
        kept
    };
    let to = job.to.clone();
    let recovered = unless_it_panics(|| Ok(recovering::recover(parts, kept, job, shared)));
    let recovered = recovered.unwrap_or_else(|why| Recovered::Lost(Doubt::new(broken(&to, &why))));
    let mut doubt = shared.doubt.lock();
    *shared.serves.lock() = None;
    match recovered {
        Recovered::Left(view) => {
            *doubt = None;
            Ok(left(view, shared))
        }
        Recovered::Refused(why, kept) => {
            if let Some(doubt) = &mut *doubt {
                doubt.kept = Some(kept);
            }
            Err(why)
        }
        Recovered::Lost(why) => Err(doubt.insert(why).why.clone()),
    }
}

fn left(view: MigratedView, shared: &Shared) -> VmAnswer {
    *shared.migrated.lock() = Some(view.clone());
    VmAnswer::Migrated(view)
}
