//! The side that a VM leaves. It runs in the thread that saves, over a connection that a client has passed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use wideleaf_control::vm::MigratedView;
use wideleaf_memory::SecondLevel as _;
use wideleaf_memory::manager::RestAnswer;
use wideleaf_memory::save::{LastPages, SaveError, SaveLimits, SaveReport, SaveSink, Saver, page_sizes};
use wideleaf_policies::{PageSet, PageSize, WindowIndex};
use wideleaf_snapshot::is_zero;
use wideleaf_vmm::GuestExit;
use wideleaf_vmm::devices::virtio::block::DiskError;

use super::frames::{self, Kind, PAGE_BYTES, PagesHead};
use super::handover::{AtSource, Guest, Source};
use super::link::{Limit, Lost, Receiver, Sender};
use super::{Arrived, Hello};
use crate::report::Left;
use crate::session::Session;
use crate::snapshot::parts::{SavedParts, Shared, has_gone, lock};
use crate::snapshot::saved_text;
use crate::spec::RunSpec;

/// Time without a byte after which the target counts as gone, while the guest runs.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Time in which the target says `running` after `go`.
const RUNNING_WAIT_MAX: Duration = Duration::from_secs(10);
/// Time for the figures of both sides, once the guest runs there.
const FIGURES_WAIT_MAX: Duration = Duration::from_secs(5);

/// Time in which a target that has ended gives up the locks of the disks: its process may have much RAM to free.
const TAKE_BACK_WAIT_MAX: Duration = Duration::from_secs(10);
/// Interval between two attempts to lock the disks again.
const TAKE_BACK_EVERY: Duration = Duration::from_millis(5);

/// Time in which the target's reason for an end may come.
const LAST_WORDS_WAIT_MAX: Duration = Duration::from_millis(200);

/// A client's request to migrate.
pub struct Departing {
    /// Address of the target, as the client has it.
    pub to: String,
    /// Longest time without a running guest.
    pub pause_max: Duration,
    /// Limit of the speed while the guest runs.
    pub limits: SaveLimits,
    /// Reading end, writing end, and a pipe's reading end that tells when the client has gone.
    pub files: Vec<OwnedFd>,
}

/// End of a migration that did not fail.
pub enum End {
    /// The target's guest runs, and this one has ended.
    Left(MigratedView),
    /// The guest stays paused here, until an operator has looked at the target.
    InDoubt(String),
}

/// Moves the VM. The guest runs on after an error.
///
/// # Errors
/// One line.
pub fn migrate(parts: &SavedParts, job: Departing, shared: &Shared) -> Result<End, String> {
    let to = job.to.clone();
    let cannot = |why: &str| format!("cannot migrate the VM to {to}: {why}");
    let [reader, writer, client] =
        <[OwnedFd; 3]>::try_from(job.files).map_err(|_| cannot("its connection is missing beside the request"))?;
    let client = File::from(client);
    let keep_on = || !shared.is_ending() && !has_gone(&client);
    let session = parts.session.upgrade().ok_or_else(|| cannot("it has ended"))?;
    // Until the end of this function.
    let _resting = session.ask_to_rest().map(RestAnswer::wait);
    let departure = Departure {
        parts,
        to: &job.to,
        session: &session,
        shared,
        keep_on: &keep_on,
        sender: Mutex::new(Sender::new(writer)),
        receiver: Mutex::new(Receiver::new(reader)),
        began: Instant::now(),
        until: Mutex::new(None),
    };
    let limits = SaveLimits { pause: job.pause_max, state: job.pause_max / 2, ..job.limits };
    departure.run(&limits).map_err(|why| cannot(&why))
}

/// A migration under way.
struct Departure<'a> {
    parts: &'a SavedParts,
    to: &'a str,
    session: &'a Session,
    shared: &'a Shared,
    keep_on: &'a (dyn Fn() -> bool + Sync),
    sender: Mutex<Sender>,
    receiver: Mutex<Receiver>,
    began: Instant,
    /// End of the pause, once it has begun.
    until: Mutex<Option<Instant>>,
}

/// What the pause gives.
struct Switched {
    turn: Source,
    downtime: Duration,
    /// Reason of a doubt.
    why: String,
    /// Reason why the disks are not locked again, if that is the doubt.
    no_disks: Option<String>,
}

impl Departure<'_> {
    fn run(&self, limits: &SaveLimits) -> Result<End, String> {
        self.greet().map_err(|lost| self.reason(lost))?;
        let huge = page_sizes(&*self.parts.host, &self.parts.ram).map_err(|error| error.to_string())?;
        let before = huge_bytes(&huge);
        let sink = Sink { departure: self, huge: huge.into_keys().collect() };
        let saver = Saver {
            ram: &self.parts.ram,
            host: &*self.parts.host,
            second_level: &*self.parts.second_level,
            sink: &sink,
        };
        let refused = Mutex::new(None);
        let progress = |progress| {
            self.shared.show(progress);
            // The target says nothing before its `ready`, unless it ends.
            if !(self.keep_on)() || lock(&self.receiver).has_some() {
                self.shared.cancel();
            }
        };
        let at_pause = |last: LastPages<'_>| {
            self.switch(last, limits.pause).map_err(|why| {
                *lock(&refused) = Some(why);
                SaveError::NoLastPages
            })
        };
        self.shared.uncancel();
        let saved = saver.save(limits, self.shared.cancelled(), &progress, at_pause);
        let (switched, report) = saved.map_err(|error| {
            let why = lock(&refused).take();
            why.unwrap_or_else(|| self.reason_of(&error))
        })?;
        Ok(self.end(&switched, &report, before))
    }

    fn greet(&self) -> Result<(), Lost> {
        let limit = self.limit();
        let hello = Hello { wideleaf: env!("CARGO_PKG_VERSION").to_owned(), spec: self.spec() };
        let text = serde_json::to_vec(&hello).map_err(io::Error::other)?;
        let (mut sender, mut receiver) = (lock(&self.sender), lock(&self.receiver));
        sender.greet(&limit)?;
        sender.send(Kind::Hello, &[&text], &limit)?;
        receiver.greeted(&limit)?;
        receiver.expect(Kind::Welcome, &mut Vec::new(), &limit)
    }

    fn spec(&self) -> RunSpec {
        RunSpec { policy: self.parts.policy.chosen(), ..self.parts.spec.clone() }
    }

    fn limit(&self) -> Limit<'_> {
        Limit { silence: SILENCE_MAX, until: *lock(&self.until), keep_on: self.keep_on }
    }

    /// Pauses the guest, hands it over, and acts on what is then known.
    fn switch(&self, last: LastPages<'_>, pause_max: Duration) -> Result<Switched, String> {
        let parts = self.parts;
        parts.second_level.pause().map_err(|error| error.to_string())?;
        let paused_at = Instant::now();
        *lock(&self.until) = paused_at.checked_add(pause_max);
        let mut turn = Source::Sending;
        let handed_over = self.hand_over(last, &mut turn);
        let downtime = paused_at.elapsed();
        if handed_over.is_err() && turn != Source::TakingBack {
            turn = turn.after(AtSource::Lost);
        }
        let why = handed_over.err().unwrap_or_default();
        let mut no_disks = None;
        if turn == Source::TakingBack {
            no_disks = self.take_back().err();
            turn = turn.after(if no_disks.is_none() { AtSource::TakenBack } else { AtSource::Lost });
        }
        match turn.guest() {
            Guest::Here => {
                parts.second_level.resume().map_err(|error| format!("{why}; and its guest stays paused: {error}"))?;
                Err(why)
            }
            Guest::Waits => Ok(Switched { turn, downtime, why, no_disks }),
            Guest::Ended => {
                // From now on no vCPU enters the guest, whatever is resumed.
                parts.control.stop(GuestExit::Stopped);
                Ok(Switched { turn, downtime, why, no_disks })
            }
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

    /// Sends what is left, and `go` once the target is ready.
    fn hand_over(&self, last: LastPages<'_>, turn: &mut Source) -> Result<(), String> {
        // Devices complete requests in it, and write RAM: so the last pages come after it.
        let state = self.parts.machine.save_state().map_err(|error| error.to_string())?;
        last.write().map_err(|error| self.reason_of(&error))?;
        let text = saved_text(&self.spec(), self.session.saved(), &state)?;
        let (limit, lost) = (self.limit(), |lost| self.reason(lost));
        let mut content = Vec::new();
        // All writes are durable since the devices rest.
        *turn = turn.after(AtSource::GivingUp);
        self.parts.disks.give_up().map_err(|error| error.to_string())?;
        let sent = lock(&self.sender).send(Kind::Machine, &[&text], &limit);
        sent.map_err(lost)?;
        *turn = turn.after(AtSource::AllSent);
        let said = lock(&self.receiver).expect(Kind::Ready, &mut content, &limit);
        said.map_err(lost)?;
        if !(self.keep_on)() {
            return Err(Lost::Cancelled.to_string());
        }
        *turn = turn.after(AtSource::Ready);
        // From here on nothing cancels it: the target decides.
        let limit = Limit { silence: RUNNING_WAIT_MAX, until: None, keep_on: &|| true };
        let sent = lock(&self.sender).send(Kind::Go, &[], &limit);
        let said = sent.and_then(|()| lock(&self.receiver).expect(Kind::Running, &mut content, &limit));
        match said {
            Ok(()) => *turn = turn.after(AtSource::Running),
            Err(Lost::Refused(why)) => {
                *turn = turn.after(AtSource::NeverRan);
                return Err(format!("the target says: {why}"));
            }
            Err(lost) => return Err(lost.to_string()),
        }
        Ok(())
    }

    fn end(&self, switched: &Switched, report: &SaveReport, huge_bytes_before: u64) -> End {
        if let Some(no_disks) = &switched.no_disks {
            return End::InDoubt(format!(
                "cannot migrate the VM to {}: {}; it stays paused here: {no_disks}; end that process, then `resume` \
                 this VM",
                self.to, switched.why
            ));
        }
        if switched.turn != Source::Left {
            return End::InDoubt(format!(
                "cannot tell whether the VM runs at {}: {} after the last word was sent; it stays paused here: look at \
                 the target, then `stop --how kill` this VM if it runs there, or `resume` it if not",
                self.to, switched.why
            ));
        }
        let rounds = report.rounds.len() as u32 + 1;
        let downtime_ms = switched.downtime.as_secs_f64() * 1e3;
        let sizes = page_sizes(&*self.parts.host, &self.parts.ram).unwrap_or_default();
        let huge_bytes_at_switch = huge_bytes(&sizes);
        let left = Left { downtime_ms, rounds, huge_bytes_before, huge_bytes_at_switch };
        let arrived = self.exchange(&left);
        let view = MigratedView {
            to: self.to.to_owned(),
            sent_bytes: lock(&self.sender).sent(),
            rounds,
            downtime_ms,
            seconds: self.began.elapsed().as_secs_f64(),
            huge_bytes_before,
            huge_bytes_at_switch,
            huge_bytes_at_target: arrived.map(|arrived| arrived.huge_bytes),
            base_bytes_at_target: arrived.map(|arrived| arrived.base_bytes),
        };
        // Devices have their gate open again, so that their threads end. No vCPU enters the guest.
        if let Err(error) = self.parts.second_level.resume() {
            tracing::warn!("the devices of a VM that has left: {error}");
        }
        End::Left(view)
    }

    /// Exchanges the figures for both reports. A loss is no failure any more.
    fn exchange(&self, left: &Left) -> Option<Arrived> {
        let until = Some(Instant::now() + FIGURES_WAIT_MAX);
        let limit = Limit { silence: FIGURES_WAIT_MAX, until, keep_on: &|| true };
        let mut content = serde_json::to_vec(left).ok()?;
        lock(&self.sender).send(Kind::Left, &[&content], &limit).ok()?;
        lock(&self.receiver).expect(Kind::Arrived, &mut content, &limit).ok()?;
        serde_json::from_slice(&content).ok()
    }

    /// Reason of a loss: the target's own words, if it had some before the connection ended.
    fn reason(&self, lost: Lost) -> String {
        let own = matches!(lost, Lost::Closed | Lost::Io(_)).then(|| self.last_words()).flatten();
        match own.unwrap_or(lost) {
            Lost::Late => "the target was not ready within the pause; allow a longer one with --pause".to_owned(),
            lost => lost.to_string(),
        }
    }

    fn last_words(&self) -> Option<Lost> {
        let until = Some(Instant::now() + LAST_WORDS_WAIT_MAX);
        let limit = Limit { silence: LAST_WORDS_WAIT_MAX, until, keep_on: &|| true };
        let said = lock(&self.receiver).next(&mut Vec::new(), &limit);
        said.err().filter(|lost| matches!(lost, Lost::Refused(_)))
    }

    fn reason_of(&self, error: &SaveError) -> String {
        match error {
            SaveError::Cancelled if (self.keep_on)() => self.reason(Lost::Closed),
            SaveError::Cancelled if self.shared.is_ending() => "it ends".to_owned(),
            SaveError::Cancelled => Lost::Cancelled.to_string(),
            SaveError::Sink { source, .. } => match source.get_ref().and_then(|inner| inner.downcast_ref::<Lost>()) {
                Some(Lost::Late) => self.reason(Lost::Late),
                Some(Lost::Closed | Lost::Io(_)) => self.reason(Lost::Closed),
                _ => source.to_string(),
            },
            error => error.to_string(),
        }
    }
}

/// Sends pages to the target.
struct Sink<'a> {
    departure: &'a Departure<'a>,
    /// Windows on large pages when the migration began.
    huge: BTreeSet<WindowIndex>,
}

impl SaveSink for Sink<'_> {
    fn write(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> io::Result<()> {
        let zero: PageSet = pages.iter().filter(|page| is_zero(page_of(data, *page))).collect();
        let stored = pages.without(zero);
        let head = PagesHead { window, is_huge: self.huge.contains(&window), stored, zero }.encode();
        let run =
            |run: std::ops::Range<u16>| &data[usize::from(run.start) * PAGE_BYTES..usize::from(run.end) * PAGE_BYTES];
        let parts: Vec<&[u8]> = [&head[..]].into_iter().chain(stored.runs().map(run)).collect();
        // Outside the lock, since several threads come here.
        let checksum = frames::checksum(Kind::Pages, &parts);
        let limit = self.departure.limit();
        lock(&self.departure.sender).send_checked(Kind::Pages, checksum, &parts, &limit).map_err(io::Error::other)
    }
}

fn page_of(data: &[u8], page: u16) -> &[u8] {
    let start = usize::from(page) * PAGE_BYTES;
    &data[start..start + PAGE_BYTES]
}

fn huge_bytes(sizes: &BTreeMap<WindowIndex, PageSize>) -> u64 {
    sizes.len() as u64 * PageSize::Huge2M.bytes().get()
}
