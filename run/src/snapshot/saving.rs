//! Saves a VM into the files that a client has passed.
//!
//! ```text
//!   job: files, limit ──▶ manager rests ──▶ RAM round by round ──▶ pause ─ last pages, machine ─ resume ──▶ index
//!                                                                                                            │
//!   reply: what was saved, or why not ◀── manager goes on ◀──────────────────────────────────────────────────┘
//! ```

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use wideleaf_control::vm::{BaseView, SavedView};
use wideleaf_memory::SecondLevel as _;
use wideleaf_memory::manager::{Live, RestAnswer};
use wideleaf_memory::panicked::caught;
use wideleaf_memory::restore::Restorer;
use wideleaf_memory::save::{LastPages, SaveError, SaveLimits, SaveProgress, SaveReport, SaveSink, Saver};
use wideleaf_policies::{PageSet, PageSize, WindowIndex};
use wideleaf_snapshot::{Base, Files, Layer, Opened, WindowNotes, WindowsWriter};
use wideleaf_vmm::MachineState;
use wideleaf_vmm::devices::bus::FlushError;

use super::accesses::SavedAccesses;
use super::parts::{Price, SavedParts, Shared, before_pause, has_gone, unless_it_panics};
use super::saved_text;
use crate::session::{SavedSession, Session};
use crate::spec::RunSpec;
use crate::users_pause::{PauseNumber, UsersPause};

/// Time limit for the disks to become durable before the pause. A disk that hangs must not keep the thread for ever.
const FLUSH_WAIT_MAX: Duration = Duration::from_secs(300);
/// Interval between two looks at RAM that is still being restored.
const RAM_LOOK_EVERY: Duration = Duration::from_millis(5);
/// Interval between two looks whether the client of a VM that stays paused has gone.
const CLIENT_LOOK_EVERY: Duration = Duration::from_millis(20);

/// The pause in which the last pages are saved.
#[derive(Clone, Copy)]
pub struct HowToPause {
    /// Longest pause to aim at.
    pub at_most: Duration,
    /// Whether the VM stays paused for its users, after a save that succeeded.
    pub stays: bool,
}

/// The files of one save.
pub struct NewFiles {
    memory: File,
    windows: File,
    machine: File,
    /// End of a pipe: closed at its other end, the client has gone.
    client: File,
    base: Option<Base>,
}

impl NewFiles {
    /// Files that came with a request, in their order.
    ///
    /// # Errors
    /// One line if one is missing, or the base is damaged.
    pub fn of(files: Vec<OwnedFd>, base: Option<BaseView>) -> Result<NewFiles, String> {
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

/// Saves the VM.
///
/// # Errors
/// One line; the guest goes on.
pub(crate) fn save(parts: &SavedParts, files: NewFiles, how: HowToPause, shared: &Shared) -> Result<Saved, String> {
    let paused = Cell::new(None);
    let saved = unless_it_panics(|| save_whole(parts, files, how, shared, &paused));
    if let (Err(_), Some(number)) = (&saved, paused.get()) {
        parts.pause.end_of(number).map_err(|error| error.to_string())?;
    }
    saved
}

/// A save that succeeded.
pub(crate) struct Saved {
    pub view: SavedView,
    /// The pause in which it left the VM, if that is its own.
    pub stays: Option<StaysPaused>,
}

/// A VM that stays paused after a save, until the client stops or resumes it.
pub(crate) struct StaysPaused {
    number: PauseNumber,
    client: File,
}

impl StaysPaused {
    /// Waits until the VM ends, or the client has gone: then the VM goes on, unless that was so before.
    pub fn wait(&self, pause: &UsersPause, shared: &Shared) {
        while !shared.is_ending() && !has_gone(&self.client) {
            std::thread::sleep(CLIENT_LOOK_EVERY);
        }
        pause.end_of(self.number).unwrap_or_else(|error| tracing::warn!("cannot resume the VM: {error}"));
    }
}

/// Sets `has_paused` when the VM stays paused by this save, and not by a user.
fn save_whole(
    parts: &SavedParts,
    files: NewFiles,
    how: HowToPause,
    shared: &Shared,
    has_paused: &Cell<Option<PauseNumber>>,
) -> Result<Saved, String> {
    let began = Instant::now();
    parts.restoring.iter().try_for_each(|restoring| restoring.check_not_mapped("save"))?;
    Restorer::check_kind(&parts.ram)
        .map_err(|why| format!("cannot save the VM: no restore would take the snapshot of this RAM: {why}"))?;
    wait_for_ram(parts, &files.client, shared)?;
    let session = parts.session.upgrade().ok_or("this VM has ended")?;
    let live = session.live();
    // Until the end of this function.
    let _resting = session.ask_to_rest().map(RestAnswer::wait);
    let NewFiles { memory, windows, mut machine, client, base } = files;
    let layout: Vec<_> = parts.ram.ranges().iter().map(|range| range.gpa).collect();
    let cannot = |why: &dyn std::fmt::Display| format!("cannot save the VM: {why}");
    let writer = WindowsWriter::new(memory, &layout, base).map_err(|error| cannot(&error))?;
    let ((state, said, paused), report) = save_ram(parts, &session, &writer, &client, how, shared, has_paused)?;

    let spec = RunSpec { policy: parts.policy.lasting(), ..parts.spec.clone() };
    let text = saved_text(&spec, said, &SavedAccesses::of(live.as_deref()), &state).map_err(|error| cannot(&error))?;
    machine.write_all(&text).map_err(|error| cannot(&format_args!("cannot write `machine.json`: {error}")))?;
    let notes = |window| notes(window, live.as_deref(), &report);
    let written = writer.finish(&windows, &text, notes).map_err(|error| cannot(&error))?;
    let view = SavedView {
        stored_bytes: PageSize::Base4K.bytes().get() * written.stored_pages,
        written_bytes: written.written.get(),
        rounds: report.rounds.len() as u32 + 1,
        pause_ms: paused.as_secs_f64() * 1e3,
        seconds: began.elapsed().as_secs_f64(),
        was_paused: how.stays && has_paused.get().is_none(),
        before_pause: before_pause(&report),
    };
    Ok(Saved { view, stays: has_paused.get().map(|number| StaysPaused { number, client }) })
}

fn save_ram(
    parts: &SavedParts,
    session: &Session,
    writer: &WindowsWriter,
    client: &File,
    how: HowToPause,
    shared: &Shared,
    has_paused: &Cell<Option<PauseNumber>>,
) -> Result<(AtPause, SaveReport), String> {
    let keep_on = || !shared.is_ending() && !has_gone(client) && parts.why_over().is_none();
    let progress = |progress: SaveProgress| {
        shared.show(progress);
        if !keep_on() {
            shared.cancel();
        }
    };
    let saver = Saver { ram: &parts.ram, host: &*parts.host, second_level: &*parts.second_level, sink: &Sink(writer) };
    let limits = SaveLimits { pause: how.at_most, ..SaveLimits::default() };
    let mut is_flushed = false;
    let at_pause = |last: LastPages<'_>| {
        if !is_flushed && flush_disks(parts, FLUSH_WAIT_MAX, &keep_on)? {
            is_flushed = true;
            return Err(last.put_off());
        }
        is_flushed = false;
        let paused_at = parts.second_level.pause_since()?;
        // Its disks stay as the snapshot knows them: what is in the rings is for the VM that continues.
        let was_held = parts.pause.is_held();
        if how.stays {
            parts.pause.rest_disks();
        }
        let take = || -> Result<_, SaveError> {
            // Devices complete requests in it, and write RAM: so the last pages come after it.
            let (state, last) = take_state(parts, last, paused_at, how.at_most)?;
            last.write(paused_at.elapsed())?;
            Ok((state, session.saved()))
        };
        let saved = caught(take).unwrap_or_else(|panicked| Err(SaveError::State(Box::new(panicked))));
        let stays = if how.stays && saved.is_ok() { parts.pause.hold() } else { Ok(None) };
        // Those of a VM that is paused already stay as another snapshot may know them.
        if how.stays && !was_held && (saved.is_err() || stays.is_err()) {
            parts.pause.use_disks();
        }
        parts.second_level.resume()?;
        has_paused.set(stays?);
        saved.map(|(state, said)| (state, said, paused_at.elapsed()))
    };
    let price = Price::from_now(&*parts.second_level);
    saver.save(&limits, shared.cancelled(), &progress, at_pause).map_err(|error| {
        shared.note_failed(price.so_far());
        match parts.why_over() {
            Some(why) if matches!(error, SaveError::Cancelled) => format!("cannot save the VM: {why}"),
            _ => format!("cannot save the VM: {error}"),
        }
    })
}

/// Makes the disks durable while the guest runs, so that little is left for the pause. Returns whether there are disks:
/// the guest has then written RAM for a while.
///
/// # Errors
/// [`SaveError`]; the save ends.
pub(crate) fn flush_disks(parts: &SavedParts, within: Duration, keep_on: &dyn Fn() -> bool) -> Result<bool, SaveError> {
    parts.machine.flush_disks(within, keep_on).map_err(|error| match error {
        FlushError::Cancelled => SaveError::Cancelled,
        error => SaveError::State(Box::new(error)),
    })
}

/// Takes the machine's state by the end of a pause, or breaks the pause off.
///
/// # Errors
/// [`SaveError::GoesOn`] where only time was missing; others end the save.
pub(crate) fn take_state<'a>(
    parts: &SavedParts,
    last: LastPages<'a>,
    paused_at: Instant,
    at_most: Duration,
) -> Result<(MachineState, LastPages<'a>), SaveError> {
    match parts.machine.save_state(at_most.saturating_sub(paused_at.elapsed())) {
        Ok(state) => Ok((state, last)),
        Err(error) if error.is_late() && paused_at.elapsed() >= at_most => Err(last.break_off(paused_at.elapsed())),
        Err(error) => Err(SaveError::State(Box::new(error))),
    }
}

/// Waits until the RAM of a restored guest has its content: a window without it cannot be saved.
fn wait_for_ram(parts: &SavedParts, client: &File, shared: &Shared) -> Result<(), String> {
    while parts.is_filling() {
        if shared.is_ending() || has_gone(client) {
            return Err("cannot save the VM: the save was cancelled while its RAM was still being restored".to_owned());
        }
        std::thread::sleep(RAM_LOOK_EVERY);
    }
    Ok(())
}

/// What the index says of a window beside its pages: the size of its page when the save began, and its heat when the
/// manager last looked.
fn notes(window: WindowIndex, live: Option<&Live>, report: &SaveReport) -> WindowNotes {
    let page = report.page_sizes.get(&window).copied().unwrap_or(PageSize::Base4K);
    let (heat, age_s) = heat_of(window, live);
    WindowNotes { page, heat, age_s }
}

/// Heat of a window when the manager last looked, in ten-thousandths of its samples, and the age of that in seconds.
pub(crate) fn heat_of(window: WindowIndex, live: Option<&Live>) -> (u16, u32) {
    let seen = live.and_then(|live| {
        let vm = live.snapshot.vms.first()?;
        let row = vm.windows.binary_search(&window).ok()?;
        Some((vm.access[row], vm.access_quality[row]))
    });
    seen.map_or((0, 0), |(access, quality)| {
        (access.rate().map_or(0, |rate| rate.get() as u16), u32::from(quality.age_s))
    })
}
