//! The side that a VM leaves. It runs in the thread that saves, over a connection that a client has passed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::num::{NonZeroU32, NonZeroU64};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_control::vm::{MigratedView, PostCopyFrom};
use wideleaf_memory::manager::RestAnswer;
use wideleaf_memory::save::{BeyondBound, LastPages, LeftPages, SaveError, SaveLimits, SaveReport, Saver, page_sizes};
use wideleaf_memory::{BackingKind, SecondLevel as _};
use wideleaf_policies::{Bytes, PageSize, WindowIndex};
use wideleaf_vmm::devices::virtio::block::DiskError;

use super::address::PassedConnection;
use super::doubt::{Departed, Doubt, UnfinishedMigration};
use super::frames::{Kind, Malformed};
use super::handover::{Guest, Source, SourceEvent};
use super::link::{Limit, LinkError};
use super::recovering::{broken, leave, new_id};
use super::serving::{self, Missing, Serving, missing_of};
use super::wire::{Sink, Wire};
use super::{Hello, POST_COPY_SILENCE_MAX};
use crate::report::Left;
use crate::session::Session;
use crate::snapshot::accesses::SavedAccesses;
use crate::snapshot::parts::{Price, SavedParts, Shared, before_pause, has_gone, unless_it_panics};
use crate::snapshot::saved_text;
use crate::snapshot::saving::{flush_disks, heat_of, take_state};
use crate::spec::RunSpec;

/// Time without a byte after which the target counts as gone, while the guest runs.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Time limit for the disks to become durable before the pause: the target hears nothing meanwhile, and would take 60 s
/// of that for a loss.
const FLUSH_WAIT_MAX: Duration = Duration::from_secs(30);
/// Time in which the target says `running` after `go`.
const RUNNING_WAIT_MAX: Duration = Duration::from_secs(10);
/// Time in which a target that has ended gives up the locks of the disks: its process may have much RAM to free.
const TAKE_BACK_WAIT_MAX: Duration = Duration::from_secs(10);
/// Time in which the target learns that the guest stays here. One that does not read has no disk yet, or is gone.
const CALL_OFF_WAIT_MAX: Duration = Duration::from_secs(1);
/// Interval between two attempts to lock the disks again.
const TAKE_BACK_EVERY: Duration = Duration::from_millis(5);

/// Least speed that a client may ask for, in bytes per second: a window of 2 MiB then leaves in half of the time after
/// which the target counts this side as silent.
const RATE_MIN: NonZeroU64 = NonZeroU64::new(64 << 10).expect("not zero");

/// Checks the limit of a migration's speed.
///
/// # Errors
/// One line.
pub fn check_rate(bytes_per_second: Option<NonZeroU64>) -> Result<(), String> {
    match bytes_per_second {
        Some(rate) if rate < RATE_MIN => Err(format!(
            "cannot migrate with {rate} bytes per second: the target would take the silence between two windows of 2 \
             MiB for a loss; allow at least {}",
            Bytes::new(RATE_MIN.get())
        )),
        _ => Ok(()),
    }
}

/// A client's request to migrate.
pub struct Departing {
    /// Address of the target, as the client has it.
    pub to: String,
    /// Longest time without a running guest.
    pub pause_max: Duration,
    /// Limit of the speed while the guest runs.
    pub limits: SaveLimits,
    /// When the guest moves before all of its RAM has; `None`: never.
    pub post_copy: Option<PostCopyFrom>,
    /// Reading end, writing end, and a pipe's reading end that tells when the client has gone.
    pub files: Vec<OwnedFd>,
}

/// End of a migration that did not fail.
pub enum End {
    /// The target's guest runs, and this one has ended.
    Left(MigratedView),
    /// The guest stays paused here, until an operator acts, for this reason.
    InDoubt(Doubt),
}

/// Moves the VM. The guest runs on after an error.
///
/// # Errors
/// One line.
pub fn migrate(parts: &SavedParts, job: Departing, shared: &Shared) -> Result<End, String> {
    let to = job.to.clone();
    let cannot = |why: &str| format!("cannot migrate the VM to {to}: {why}");
    job.post_copy.map_or(Ok(()), |_| check_post_copy(&parts.spec)).map_err(|why| cannot(&why))?;
    let PassedConnection { ends, client } = PassedConnection::of(job.files).map_err(cannot)?;
    let keep_on = || !shared.is_ending() && !has_gone(&client) && parts.why_over().is_none();
    let session = parts.session.upgrade().ok_or_else(|| cannot("it has ended"))?;
    let accesses = SavedAccesses::of(session.live().as_deref());
    // Until the end of this function.
    let _resting = session.ask_to_rest().map(RestAnswer::wait);
    let departure = Departure {
        parts,
        to: &job.to,
        session: &session,
        accesses,
        shared,
        keep_on: &keep_on,
        follows: &|| parts.follows(shared),
        wire: Wire::new(ends),
        id: new_id().map_err(|error| cannot(&format!("no random number for its name: {error}")))?,
        began: Instant::now(),
        pause: Mutex::new(None),
        is_past_go: AtomicBool::new(false),
        is_called_off: AtomicBool::new(false),
        post_copy: job.post_copy,
    };
    let beyond = job.post_copy.map_or(BeyondBound::Refuse, |from| BeyondBound::Leave { after_rounds: rounds_of(from) });
    let limits = SaveLimits { pause: job.pause_max, state: job.pause_max / 2, beyond, ..job.limits };
    departure.run(&limits).map_err(|why| cannot(&why))
}

fn rounds_of(from: PostCopyFrom) -> Option<NonZeroU32> {
    match from {
        PostCopyFrom::WhenNeeded => None,
        PostCopyFrom::AfterRounds(rounds) => Some(rounds),
    }
}

/// Whether pages can come to the target later: single pages of a file or of a pool cannot be replaced there.
fn check_post_copy(spec: &RunSpec) -> Result<(), String> {
    if spec.backing.kind() != BackingKind::Anon {
        return Err("post-copy needs anonymous RAM; leave --postcopy out".to_owned());
    }
    if spec.policy.make().answers_faults() {
        return Err(format!(
            "post-copy and --policy {} both answer the first touches of RAM; choose another policy with `set-policy`, \
             or leave --postcopy out",
            spec.policy
        ));
    }
    Ok(())
}

/// A migration under way.
struct Departure<'a> {
    parts: &'a SavedParts,
    to: &'a str,
    session: &'a Session,
    /// What the manager knew when it went to rest.
    accesses: SavedAccesses,
    shared: &'a Shared,
    keep_on: &'a (dyn Fn() -> bool + Sync),
    /// Whether missing pages still go over this connection.
    follows: &'a (dyn Fn() -> bool + Sync),
    wire: Wire,
    /// Name of the migration.
    id: String,
    began: Instant,
    /// The pause, once it has begun.
    pause: Mutex<Option<Pause>>,
    /// Whether `go` may have left: nothing cancels the migration any more.
    is_past_go: AtomicBool,
    /// Whether the target was told that the guest stays here.
    is_called_off: AtomicBool,
    post_copy: Option<PostCopyFrom>,
}

/// The pause of the guest, and what has taken its time.
#[derive(Clone, Copy, Debug)]
struct Pause {
    began: Instant,
    at_most: Duration,
    /// Time until the devices were at rest, and their disks flushed.
    rested: Duration,
    /// Time until all had left.
    sent: Option<Duration>,
}

impl Pause {
    fn until(self) -> Option<Instant> {
        self.began.checked_add(self.at_most)
    }

    /// Why the guest does not run at the target although the pause is over.
    fn why_over(self) -> String {
        let Pause { at_most, rested, sent, .. } = self;
        match sent {
            Some(sent) => format!(
                "the target was not ready within the pause of {at_most:?}, of which this side took {sent:?}; allow a \
                 longer one with --pause"
            ),
            None => format!(
                "its last pages and its state did not leave within the pause of {at_most:?}, of which {rested:?} were \
                 over once its devices were at rest and their disks flushed; allow a longer one with --pause"
            ),
        }
    }
}

/// What the pause gives.
struct Switched {
    turn: Source,
    downtime: Duration,
    /// Reason of a doubt.
    why: String,
    /// Reason why the disks are not locked again, if that is the doubt.
    no_disks: Option<String>,
    /// Pages that the target may still need.
    missing: Option<Missing>,
}

impl Departure<'_> {
    fn run(&self, limits: &SaveLimits) -> Result<End, String> {
        self.greet().map_err(|lost| self.reason(lost))?;
        let huge = page_sizes(&*self.parts.host, &self.parts.ram).map_err(|error| error.to_string())?;
        let before = huge_bytes(&huge);
        let (huge, limit) = (huge.into_keys().collect(), || self.limit());
        let sink = Sink { sender: &self.wire.sender, limit: &limit, huge: &huge };
        let saver = Saver {
            ram: &self.parts.ram,
            host: &*self.parts.host,
            second_level: &*self.parts.second_level,
            sink: &sink,
        };
        let refused = Mutex::new(None);
        // The target says nothing before its `ready`, unless it ends.
        let keep_on = || (self.keep_on)() && !self.wire.receiver.lock().has_some();
        let progress = |progress| {
            self.shared.show(progress);
            if !keep_on() {
                self.shared.cancel();
            }
        };
        let mut is_flushed = false;
        let at_pause = |last: LastPages<'_>| {
            if !is_flushed && flush_disks(self.parts, FLUSH_WAIT_MAX, &keep_on)? {
                is_flushed = true;
                return Err(last.put_off());
            }
            is_flushed = false;
            self.switch(last, limits.pause, &sink).map_err(|why| {
                *refused.lock() = Some(why);
                SaveError::NoLastPages
            })
        };
        self.shared.uncancel();
        let price = Price::from_now(&*self.parts.second_level);
        let saved = saver.save(limits, self.shared.cancelled(), &progress, at_pause);
        let (switched, report) = saved.map_err(|error| {
            self.shared.note_failed(price.so_far());
            let why = refused.lock().take().filter(|_| matches!(error, SaveError::NoLastPages));
            let why = why.unwrap_or_else(|| self.reason_of(&error));
            self.call_off(&why);
            why
        })?;
        Ok(self.end(switched, &report, before, huge))
    }

    fn greet(&self) -> Result<(), LinkError> {
        let wideleaf = env!("CARGO_PKG_VERSION").to_owned();
        let hello = Hello { wideleaf, spec: self.spec(), may_post_copy: self.post_copy.is_some(), id: self.id.clone() };
        let text = serde_json::to_vec(&hello).map_err(io::Error::other)?;
        self.wire.greet(Kind::Hello, &text, &self.limit())
    }

    fn spec(&self) -> RunSpec {
        RunSpec { policy: self.parts.policy.lasting(), ..self.parts.spec.clone() }
    }

    fn limit(&self) -> Limit<'_> {
        if self.is_past_go.load(Ordering::Relaxed) {
            return Limit { silence: POST_COPY_SILENCE_MAX, until: None, keep_on: self.follows };
        }
        Limit { silence: SILENCE_MAX, until: self.pause.lock().and_then(Pause::until), keep_on: self.keep_on }
    }

    /// Pauses the guest, hands it over, and acts on what is then known.
    fn switch(&self, last: LastPages<'_>, pause_max: Duration, sink: &Sink<'_>) -> Result<Switched, String> {
        let parts = self.parts;
        let paused_at = parts.second_level.pause_since().map_err(|error| error.to_string())?;
        let pause = Pause { began: paused_at, at_most: pause_max, rested: Duration::ZERO, sent: None };
        *self.pause.lock() = Some(pause);
        let mut turn = Source::Sending;
        let mut serving = None;
        // A panic is a loss: the turn that it is says where the guest may run.
        let mut handed_over = unless_it_panics(|| self.hand_over(last, pause, &mut turn, &mut serving, sink));
        let downtime = paused_at.elapsed();
        if let (Source::Serving, Some(serving)) = (turn, &mut serving) {
            handed_over = unless_it_panics(|| self.serve(serving, &mut turn));
        }
        if handed_over.is_err() && turn != Source::TakingBack {
            turn = turn.after(SourceEvent::Lost);
        }
        let why = handed_over.err().unwrap_or_default();
        let missing = serving.filter(|_| matches!(turn, Source::Broken | Source::InDoubt)).map(Serving::into_missing);
        let mut no_disks = None;
        if turn == Source::TakingBack {
            self.call_off(&why);
            no_disks = self.take_back().err();
            turn = turn.after(if no_disks.is_none() { SourceEvent::TakenBack } else { SourceEvent::Lost });
        }
        match turn.guest() {
            Guest::Here => {
                // The save may go on, up to another pause.
                *self.pause.lock() = None;
                parts.second_level.resume().map_err(|error| format!("{why}; and its guest stays paused: {error}"))?;
                Err(why)
            }
            Guest::Waits => Ok(Switched { turn, downtime, why, no_disks, missing }),
            Guest::Ended => {
                parts.end_guest();
                Ok(Switched { turn, downtime, why, no_disks, missing: None })
            }
        }
    }

    /// Tells the target, once, that the guest stays here, so that it ends and gives the disks back.
    fn call_off(&self, why: &str) {
        if self.is_called_off.swap(true, Ordering::Relaxed) {
            return;
        }
        let until = Some(Instant::now() + CALL_OFF_WAIT_MAX);
        let limit = Limit { silence: CALL_OFF_WAIT_MAX, until, keep_on: &|| !self.shared.is_ending() };
        let text: String = format!("the VM stays at the source: {why}").chars().take(500).collect();
        if let Err(lost) = self.wire.sender.lock().send(Kind::Failed, &[text.as_bytes()], &limit) {
            tracing::debug!("the target is not told that the VM stays: {lost}");
        }
    }

    /// Locks the disks again, as soon as the target has ended.
    fn take_back(&self) -> Result<(), String> {
        let until = Instant::now() + TAKE_BACK_WAIT_MAX;
        loop {
            match self.parts.disks.take() {
                Err(DiskError::Elsewhere { .. }) if Instant::now() < until && !self.shared.is_ending() => {
                    std::thread::sleep(TAKE_BACK_EVERY);
                }
                taken => return taken.map_err(|error| error.to_string()),
            }
        }
    }

    /// Sends what is left, or says what is missing, and sends `go` once the target is ready.
    fn hand_over<'b>(
        &'b self,
        last: LastPages<'_>,
        mut pause: Pause,
        turn: &mut Source,
        serving: &mut Option<Serving<'b>>,
        sink: &'b Sink<'_>,
    ) -> Result<(), String> {
        // Devices complete requests in it, and write RAM: so the last pages come after it.
        let taken = take_state(self.parts, last, pause.began, pause.at_most);
        pause.rested = pause.began.elapsed();
        *self.pause.lock() = Some(pause);
        let (state, last) = taken.map_err(|error| self.reason_of(&error))?;
        let left = last.write_or_leave(pause.rested).map_err(|error| self.reason_of(&error))?;
        *serving = self.leave(&left, sink)?;
        let text = saved_text(&self.spec(), self.session.saved(), &self.accesses, &state)?;
        let (limit, lost) = (self.limit(), |lost| self.reason(lost));
        if self.parts.pause.is_held() {
            return Err("it was paused meanwhile; resume it first".to_owned());
        }
        // All writes are durable since the devices rest.
        *turn = turn.after(SourceEvent::GivingUp);
        self.parts.disks.give_up().map_err(|error| error.to_string())?;
        let sent = self.wire.sender.lock().send(Kind::Machine, &[&text], &limit);
        sent.map_err(lost)?;
        pause.sent = Some(pause.began.elapsed());
        *self.pause.lock() = Some(pause);
        *turn = turn.after(SourceEvent::AllSent);
        self.expect(Kind::Ready, serving, &limit).map_err(lost)?;
        if !(self.keep_on)() {
            return Err(self.reason(LinkError::Cancelled));
        }
        *turn = turn.after(SourceEvent::Ready);
        // From here on nothing cancels it: the target decides.
        self.is_past_go.store(true, Ordering::Relaxed);
        let limit = Limit { silence: RUNNING_WAIT_MAX, until: None, keep_on: &|| true };
        let before = self.wire.sent();
        let sent = self.wire.sender.lock().send(Kind::Go, &[], &limit);
        if let Err(lost) = sent {
            // The target may have said why before it ended.
            let has_left = self.wire.sent() != before;
            *turn = turn.after(if has_left { SourceEvent::Lost } else { SourceEvent::NoGo });
            return Err(self.reason(lost));
        }
        match self.expect(Kind::Running, serving, &limit) {
            Ok(()) if serving.is_some() => *turn = turn.after(SourceEvent::RunningPartly),
            Ok(()) => *turn = turn.after(SourceEvent::Running),
            Err(LinkError::Refused(why)) => {
                *turn = turn.after(SourceEvent::NeverRan);
                return Err(format!("the target says: {why}"));
            }
            Err(lost) => return Err(lost.to_string()),
        }
        Ok(())
    }

    /// Says which pages are missing at the target, if some are.
    fn leave<'b>(&'b self, left: &[LeftPages], sink: &'b Sink<'_>) -> Result<Option<Serving<'b>>, String> {
        if left.is_empty() {
            return Ok(None);
        }
        let live = self.session.live();
        let heat = |window| heat_of(window, live.as_deref()).0;
        let heads = serving::heads(left, |window| sink.huge.contains(&window), heat);
        let limit = self.limit();
        for message in serving::messages(&heads) {
            let sent = self.wire.sender.lock().send(Kind::Missing, &[&message], &limit);
            sent.map_err(|lost| self.reason(lost))?;
        }
        Ok(Some(Serving::new(&self.parts.ram, sink, missing_of(&heads))))
    }

    /// Waits for a message; meanwhile sends the pages that the target asks for.
    fn expect(&self, kind: Kind, serving: &mut Option<Serving<'_>>, limit: &Limit<'_>) -> Result<(), LinkError> {
        let found = match serving {
            Some(serving) => serving.until_other(&self.wire.receiver, limit, &|_| ())?,
            None => self.wire.receiver.lock().next(&mut Vec::new(), limit)?,
        };
        if found == kind { Ok(()) } else { Err(Malformed::Order.into()) }
    }

    /// Sends the missing pages until the target has all, or its guest has ended. Nothing cancels that.
    fn serve(&self, serving: &mut Serving<'_>, turn: &mut Source) -> Result<(), String> {
        *self.shared.serves.lock() = Some(self.to.to_owned());
        let served = self.wire.serve(serving, self.shared, &self.limit());
        *turn = turn.after(if served.is_ok() { SourceEvent::Complete } else { SourceEvent::Lost });
        served.map_err(|lost| self.reason(lost))
    }

    fn end(&self, switched: Switched, report: &SaveReport, huge_bytes_before: u64, huge: BTreeSet<WindowIndex>) -> End {
        let before_pause = before_pause(report);
        // Of a migration that left it in doubt, or was continued by `recover`.
        self.shared.note_failed(before_pause);
        if let Some(no_disks) = &switched.no_disks {
            return End::InDoubt(Doubt::new(format!(
                "cannot migrate the VM to {}: {}; it stays paused here: {no_disks}; end that process, then `resume` \
                 this VM",
                self.to, switched.why
            )));
        }
        let rounds = report.rounds.len() as u32 + 1;
        let downtime_ms = switched.downtime.as_secs_f64() * 1e3;
        let sizes = page_sizes(&*self.parts.host, &self.parts.ram).unwrap_or_default();
        let huge_bytes_at_switch = huge_bytes(&sizes);
        let logs_start_ms = report.logs_start.as_secs_f64() * 1e3;
        let left = Left { downtime_ms, rounds, huge_bytes_before, huge_bytes_at_switch, logs_start_ms, before_pause };
        let departed = Departed {
            id: self.id.clone(),
            began: self.began,
            left,
            logs_began_set: report.logs_began_set,
            sent_bytes: self.wire.sent(),
        };
        if switched.turn != Source::Left {
            let why = match switched.turn {
                Source::Broken => broken(self.to, &switched.why),
                _ => format!(
                    "cannot tell whether the VM runs at {}: {} after the last word was sent; it stays paused here: \
                     look at the target, then `stop --how kill` this VM if it runs there, or `resume` it if not{}",
                    self.to,
                    switched.why,
                    switched.missing.as_ref().map_or("", |_| "; if it waits there for pages, `recover` continues it")
                ),
            };
            let kept =
                switched.missing.map(|missing| UnfinishedMigration { turn: switched.turn, departed, missing, huge });
            return End::InDoubt(Doubt { why, kept });
        }
        End::Left(leave(&departed, self.to, &self.wire))
    }

    fn reason(&self, lost: LinkError) -> String {
        let pause = *self.pause.lock();
        match (lost, self.parts.why_over(), pause) {
            (LinkError::Cancelled, Some(why), _) => why.to_owned(),
            (LinkError::Late, _, Some(pause)) => pause.why_over(),
            (lost, ..) => self.wire.why(lost, self.shared),
        }
    }

    fn reason_of(&self, error: &SaveError) -> String {
        match error {
            SaveError::Cancelled if (self.keep_on)() => self.reason(LinkError::Closed),
            SaveError::Cancelled if self.shared.is_ending() => "it ends".to_owned(),
            SaveError::Cancelled => self.reason(LinkError::Cancelled),
            SaveError::Sink { source, .. } => {
                match source.get_ref().and_then(|inner| inner.downcast_ref::<LinkError>()) {
                    Some(LinkError::Cancelled) => self.reason(LinkError::Cancelled),
                    Some(LinkError::Late) => self.reason(LinkError::Late),
                    Some(LinkError::Closed | LinkError::Io(_)) => self.reason(LinkError::Closed),
                    _ => source.to_string(),
                }
            }
            SaveError::State(why) => why.to_string(),
            error => error.to_string(),
        }
    }
}

fn huge_bytes(sizes: &BTreeMap<WindowIndex, PageSize>) -> u64 {
    sizes.len() as u64 * PageSize::Huge2M.bytes().get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_that_is_over_names_what_took_its_time() {
        let ms = Duration::from_millis;
        let pause = Pause { began: Instant::now(), at_most: ms(50), rested: ms(45), sent: None };
        let names = |pause: Pause, words| {
            let why = pause.why_over();
            assert!(why.contains(words), "{why}");
        };
        names(pause, "within the pause of 50ms, of which 45ms were over once its devices were at rest");
        let sent = Some(ms(47));
        names(
            Pause { sent, ..pause },
            "the target was not ready within the pause of 50ms, of which this side took 47ms",
        );
    }
}
