//! The side at which a VM arrives. It takes one connection before its process enters the sandbox.
//!
//! ```text
//!   Incoming::wait ──▶ specification ──▶ RAM mapped ──▶ Incoming::receive: RAM and the machine's state
//!                                                            │ disks locked, machine built and held, sandbox,
//!   report ◀── guest runs ◀── Incoming::switch: ready, go ◀──┘ manager, sockets
//! ```
//!
//! Where the guest is to run before all of its RAM is here, [`Incoming::begin_filling`] comes before the machine's
//! first access, and [`Incoming::end`] after its last.
//!
//! What the source sends is checked before it is used: lengths, checksums, that all pages are RAM, and the machine's
//! state as that of a snapshot. The source chooses no file of this host: devices are those of the target's own options.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_control::vm::SavingView;
use wideleaf_memory::restore::{OnFailure, Restorer};
use wideleaf_memory::{GuestRam, Host};
use wideleaf_policies::{PolicyChoice, WindowIndex};
use wideleaf_vmm::devices::virtio::block::DiskLocks;

use super::address::{Address, ConnectionEnds};
use super::completing::Completing;
use super::frames::{self, Kind, Malformed, PagesHead};
use super::handover::{Guest, Target, TargetEvent};
use super::link::{Limit, LinkError, Receiver, Sender};
use super::offer::Offer;
use super::placing::Placing;
use super::remote_ram::{NOTHING_MISSING, RemoteRam};
use super::{Arrived, Hello};
use crate::failure::Failure;
use crate::guest::RunningGuest;
use crate::interrupts::Interrupts;
use crate::report::{ArrivedReport, Counters, Left};
use crate::snapshot::{SavedRun, parse};
use crate::spec::RunSpec;

/// Time without a byte after which the source counts as gone.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// The same before it has said which VM comes, where another connection can follow.
const HELLO_SILENCE_MAX: Duration = Duration::from_secs(15);
/// Time for the figures of both sides, once the guest runs here.
const FIGURES_WAIT_MAX: Duration = Duration::from_secs(5);

/// A VM that arrives.
#[derive(Debug)]
pub struct Incoming {
    from: String,
    spec: RunSpec,
    may_post_copy: bool,
    /// Name of the migration.
    id: String,
    began: Instant,
    sender: Arc<Mutex<Sender>>,
    link: Mutex<LinkState>,
    completing: OnceLock<Arc<Completing>>,
}

#[derive(Debug)]
struct LinkState {
    /// Until another thread has it.
    receiver: Option<Receiver>,
    turn: Target,
    report: ArrivedReport,
    /// What is missing, until it is dropped here.
    missing: Vec<PagesHead>,
}

/// Looks at RAM, from any thread.
pub type CountRam = Box<dyn Fn() -> Counters + Send>;

impl Incoming {
    /// Waits for the source, and for the specification of its VM. `on_wait` is told where it waits. A connection from
    /// no source is left, and another one waited for.
    ///
    /// # Errors
    /// [`Failure`] if it cannot listen there, a signal comes, or the other side is a source of which no VM can come.
    pub fn wait(address: &Address, interrupts: &Interrupts, on_wait: &dyn Fn(&str)) -> Result<Incoming, Failure> {
        let listening = address.listen(on_wait)?;
        let silence = if listening.has_others() { HELLO_SILENCE_MAX } else { SILENCE_MAX };
        let limit = Limit { silence, until: None, keep_on: &|| !interrupts.is_set() };
        loop {
            let (ConnectionEnds { reader, writer }, from) = listening.accept(interrupts)?;
            let (mut sender, mut receiver) = (Sender::new(writer), Receiver::new(reader));
            let mut content = Vec::new();
            let greeted = match sender.greet(&limit).and_then(|()| receiver.greeted(&limit)) {
                Ok(()) => receiver.expect(Kind::Hello, &mut content, &limit),
                Err(lost) => Err(lost),
            };
            match greeted {
                Ok(()) => return Incoming::of(from, sender, receiver, &content, &limit),
                Err(lost) if listening.has_others() && is_of_no_source(&lost) => {
                    tracing::warn!("a connection from {from} is from no source of a VM: {lost}; waiting for another");
                }
                Err(lost) => return Err(failure(&from, &lost)),
            }
        }
    }

    /// The VM of a source that has said this first.
    fn of(
        from: String,
        mut sender: Sender,
        receiver: Receiver,
        hello: &[u8],
        limit: &Limit<'_>,
    ) -> Result<Incoming, Failure> {
        let hello: Result<Hello, _> = serde_json::from_slice(hello);
        let Hello { spec, may_post_copy, id, .. } = hello.map_err(|error| {
            let why = format!("its specification is malformed: {error}; use equal releases of wideleaf");
            let _ = sender.send(Kind::Failed, &[why.as_bytes()], limit);
            Failure::Input(format!("cannot receive the VM from {from}: {why}"))
        })?;
        let report = ArrivedReport { from: from.clone(), ..ArrivedReport::default() };
        let missing = Vec::new();
        let link = Mutex::new(LinkState { receiver: Some(receiver), turn: Target::Receiving, report, missing });
        let (sender, completing) = (Arc::new(Mutex::new(sender)), OnceLock::new());
        Ok(Incoming { from, spec, may_post_copy, id, began: Instant::now(), sender, link, completing })
    }

    /// Specification of the source's run, which is not checked against this host.
    pub fn spec(&self) -> &RunSpec {
        &self.spec
    }

    /// Receives RAM, which no guest uses yet, and the state of everything else.
    ///
    /// # Errors
    /// [`Failure`] if the source ends, or sends what cannot be.
    pub fn receive(
        &self,
        ram: &GuestRam,
        host: &dyn Host,
        policy: &PolicyChoice,
        interrupts: &Interrupts,
    ) -> Result<SavedRun, Failure> {
        self.check_post_copy(ram, policy)?;
        let link = &mut *self.lock();
        let limit = Limit { silence: SILENCE_MAX, until: None, keep_on: &|| !interrupts.is_set() };
        let lost = |lost: LinkError| failure(&self.from, &lost);
        self.send(Kind::Welcome, &[], &limit).map_err(lost)?;
        let mut placing = Placing::new(ram, host);
        let mut named = BTreeSet::new();
        let mut content = Vec::new();
        let receiver = link.receiver.as_mut().expect("the guest does not run yet");
        loop {
            match receiver.next(&mut content, &limit).map_err(lost)? {
                Kind::Pages => {
                    let placed = PagesHead::decode(&content).and_then(|(head, pages)| placing.place(&head, pages));
                    placed.map_err(|why| lost(why.into()))?;
                }
                Kind::Missing if self.may_post_copy => {
                    let heads = frames::decode_missing(&content).and_then(|heads| name(&mut named, heads));
                    let missing = heads.and_then(|heads| placing.miss(heads));
                    link.missing.extend(missing.map_err(|why| lost(why.into()))?);
                }
                Kind::Machine => break,
                _ => return Err(lost(Malformed::Order.into())),
            }
        }
        (link.report.pages, link.report.windows_marked_huge) = (placing.pages, placing.windows_huge);
        parse(&content, &|why| Failure::Input(format!("cannot receive the VM from {}: {why}", self.from)))
    }

    /// Locks the disks of the VM here: the source has given them up with the machine's state.
    ///
    /// # Errors
    /// [`Failure::Host`] for a disk that is locked elsewhere: by the source again if it called the migration off.
    pub fn take_disks(&self, disks: &DiskLocks) -> Result<(), Failure> {
        disks.take().map_err(|error| failure_at_host(&self.from, &error))?;
        let link = &mut *self.lock();
        link.turn = link.turn.after(TargetEvent::Locked);
        Ok(())
    }

    /// Whether missing pages could come later, if the source says so.
    fn check_post_copy(&self, ram: &GuestRam, policy: &PolicyChoice) -> Result<(), Failure> {
        if !self.may_post_copy {
            return Ok(());
        }
        if policy.make().answers_faults() {
            return Err(Failure::Usage(format!(
                "cannot receive the VM from {} by post-copy with --policy {policy}: it decides at the first touch of a \
                 page; use another policy, for example --policy auto",
                self.from
            )));
        }
        let checked = Restorer::check_partial(ram);
        checked.map_err(|why| Failure::Host(format!("cannot receive the VM from {} by post-copy: {why}", self.from)))
    }

    /// Begins to fill what is missing of RAM, if anything is; the guest does not run yet. `on_failure` is called for a
    /// window that does not come: the guest must end then. `may_recover`: whether a client can bring another connection
    /// where one is lost; the guest then waits for it. `begin` is called by each thread at its start, and `count` by
    /// the one that receives, once all is here.
    ///
    /// # Errors
    /// One line.
    pub fn begin_filling(
        self: &Arc<Incoming>,
        ram: Arc<GuestRam>,
        on_failure: OnFailure,
        may_recover: bool,
        begin: impl Fn() + Clone + Send + 'static,
        count: CountRam,
    ) -> Result<(), String> {
        let link = &mut *self.lock();
        let missing = std::mem::take(&mut link.missing);
        if missing.is_empty() {
            return Ok(());
        }
        let id = may_recover.then(|| self.id.clone());
        let remote = RemoteRam::new(self.from.clone(), &missing, self.sender.clone(), id);
        let remote = Arc::new(remote.map_err(|why| format!("cannot receive RAM from {}: it sent {why}", self.from))?);
        let completing = Arc::new(Completing::begin(remote, ram, on_failure)?);
        let receiver = link.receiver.take().expect("this is called once");
        let of = self.clone();
        let conclude = move |completing: &Completing, receiver: &mut Receiver| {
            of.conclude(completing, receiver, &count);
        };
        let started = completing.start(receiver, begin, conclude);
        let completing = self.completing.get_or_init(|| completing);
        started.map_err(|error| {
            completing.end();
            format!("cannot start the thread that receives RAM: {error}")
        })
    }

    /// All of RAM is here, and the guest runs: lets the source go, and exchanges the figures for both reports.
    fn conclude(&self, completing: &Completing, receiver: &mut Receiver, count: &CountRam) {
        let until = Some(Instant::now() + FIGURES_WAIT_MAX);
        let limit = Limit { silence: FIGURES_WAIT_MAX, until, keep_on: &|| true };
        {
            let link = &mut *self.lock();
            link.turn = link.turn.after(TargetEvent::AllHere);
        }
        let told = self.send(Kind::Complete, &[], &limit).and_then(|()| {
            completing.wait_for_huge_pages();
            let post_copy = completing.view();
            self.lock().report.post_copy.clone_from(&post_copy);
            let Counters { host_4k_bytes, host_2m_bytes, host_1g_bytes, .. } = count();
            let (huge_bytes, base_bytes) = (host_2m_bytes + host_1g_bytes, host_4k_bytes);
            self.send_figures(&Arrived { huge_bytes, base_bytes, post_copy }, &limit)?;
            let mut content = Vec::new();
            receiver.expect(Kind::Left, &mut content, &limit)?;
            self.lock().report.source = serde_json::from_slice(&content).ok();
            Ok(())
        });
        // All is here, also where the source does not hear of it.
        if let (Some(client), Some(view)) = (completing.remote().take_client(), completing.view()) {
            client(Ok(view));
        }
        if let Err(lost) = told {
            tracing::warn!("the source at {} of the VM that runs here now: {lost}", self.from);
        }
    }

    /// Whether some of the guest's RAM has not come yet.
    pub fn is_filling(&self) -> bool {
        self.completing.get().is_some_and(|completing| !completing.is_filled() && !completing.has_failed())
    }

    /// Takes another connection to the source, for a guest with pages that do not come any more. Its end is told to the
    /// offer.
    ///
    /// # Errors
    /// One line if nothing is missing.
    pub(crate) fn recover(&self, offer: Offer) -> Result<(), String> {
        match self.completing.get().filter(|completing| !completing.is_filled()) {
            Some(completing) => completing.remote().offer(offer),
            None => Err(NOTHING_MISSING.to_owned()),
        }
    }

    /// Why missing pages do not come until there is another connection, if that is so.
    pub(crate) fn why_cut(&self) -> Option<String> {
        self.completing.get().and_then(|completing| completing.remote().why_cut())
    }

    /// Progress of the missing pages, while the guest runs here without them.
    pub(crate) fn progress(&self) -> Option<SavingView> {
        let view = self.completing.get().filter(|_| self.is_filling())?.view()?;
        Some(SavingView { round: 1, done_bytes: view.filled_bytes, total_bytes: view.missing_bytes })
    }

    /// The guest has ended: it waits for no other connection.
    pub(crate) fn give_up(&self) {
        self.completing.get().into_iter().for_each(|completing| completing.give_up());
    }

    /// Whether a part of RAM will not come. Threads that touched it sleep until the process ends: neither the guest's
    /// devices nor this may be taken apart.
    pub fn has_failed(&self) -> bool {
        self.completing.get().is_some_and(|completing| completing.has_failed())
    }

    /// Ends it after the guest. A source that still has a part of RAM is told that it is not needed, except where that
    /// part was lost.
    pub fn end(&self) {
        let Some(completing) = self.completing.get() else { return };
        let has_failed = completing.has_failed();
        let view = completing.end();
        let link = &mut *self.lock();
        link.report.post_copy = view.or(link.report.post_copy.take());
        if link.turn != Target::RunsPartly {
            return;
        }
        if has_failed {
            link.turn = link.turn.after(TargetEvent::Lost);
            return;
        }
        link.turn = link.turn.after(TargetEvent::AllHere);
        let limit = Limit { silence: Duration::from_secs(1), until: None, keep_on: &|| true };
        // RAM is about to go: what was on large pages is known of the switch alone.
        let ArrivedReport { huge_bytes, base_bytes, post_copy, .. } = link.report.clone();
        let told = self.send(Kind::Complete, &[], &limit);
        let told = told.and_then(|()| self.send_figures(&Arrived { huge_bytes, base_bytes, post_copy }, &limit));
        if let Err(lost) = told {
            tracing::warn!("the source at {} of the VM that has ended: {lost}", self.from);
        }
    }

    fn send(&self, kind: Kind, parts: &[&[u8]], limit: &Limit<'_>) -> Result<(), LinkError> {
        self.sender.lock().send(kind, parts, limit)
    }

    fn send_figures(&self, arrived: &Arrived, limit: &Limit<'_>) -> Result<(), LinkError> {
        let text = serde_json::to_vec(arrived).map_err(std::io::Error::other)?;
        self.send(Kind::Arrived, &[&text], limit)
    }

    /// Says that all is ready, and lets the held guest run when the source says so. `counters` looks at RAM.
    ///
    /// # Errors
    /// [`Failure`] if it does not run here: then it never will.
    pub fn switch(
        &self,
        guest: &RunningGuest,
        counters: &dyn Fn() -> Counters,
        interrupts: &Interrupts,
    ) -> Result<(), Failure> {
        let link = &mut *self.lock();
        let is_over = || interrupts.is_set() || guest.machine().control().is_stopping();
        let limit = Limit { silence: SILENCE_MAX, until: None, keep_on: &|| !is_over() };
        link.turn = link.turn.after(TargetEvent::Built);
        let completing = self.completing.get();
        let go = self.send(Kind::Ready, &[], &limit).and_then(|()| match (completing, &mut link.receiver) {
            (Some(completing), _) => completing.remote().expect_go(&limit),
            (None, Some(receiver)) => receiver.expect(Kind::Go, &mut Vec::new(), &limit),
            (None, None) => Err(LinkError::Closed),
        });
        // A stop that came with `go` counts: the guest has not run.
        let go = go.and_then(|()| if is_over() { Err(LinkError::Cancelled) } else { Ok(()) });
        if let Err(lost) = go {
            link.turn = link.turn.after(TargetEvent::Lost);
            return Err(failure(&self.from, &lost));
        }
        let event = if completing.is_some() { TargetEvent::GoPartly } else { TargetEvent::Go };
        debug_assert_eq!(link.turn.after(event).guest(), Guest::Here);
        guest.release().map_err(|error| Failure::Host(format!("cannot let the VM run: {error}")))?;
        link.turn = link.turn.after(event);
        link.report.seconds = self.began.elapsed().as_secs_f64();
        link.report.received_bytes = match (completing, &link.receiver) {
            (Some(completing), _) => completing.remote().received(),
            (None, receiver) => receiver.as_ref().map_or(0, Receiver::received),
        };
        self.exchange(link, counters, interrupts);
        completing.into_iter().for_each(|completing| completing.runs());
        Ok(())
    }

    /// Says `running`, and exchanges the figures for both reports if all of RAM is here. A loss is no failure: the
    /// guest runs here.
    fn exchange(&self, link: &mut LinkState, counters: &dyn Fn() -> Counters, interrupts: &Interrupts) {
        let until = Some(Instant::now() + FIGURES_WAIT_MAX);
        let limit = Limit { silence: FIGURES_WAIT_MAX, until, keep_on: &|| !interrupts.is_set() };
        let told = self.send(Kind::Running, &[], &limit).and_then(|()| {
            let Counters { host_4k_bytes, host_2m_bytes, host_1g_bytes, .. } = counters();
            let (huge_bytes, base_bytes) = (host_2m_bytes + host_1g_bytes, host_4k_bytes);
            (link.report.huge_bytes, link.report.base_bytes) = (huge_bytes, base_bytes);
            let Some(receiver) = &mut link.receiver else { return Ok(()) };
            self.send_figures(&Arrived { huge_bytes, base_bytes, post_copy: None }, &limit)?;
            let mut content = Vec::new();
            receiver.expect(Kind::Left, &mut content, &limit)?;
            link.report.source = serde_json::from_slice(&content).ok();
            Ok(())
        });
        if let Err(lost) = told {
            tracing::warn!("the source at {} of the VM that runs here now: {lost}", self.from);
        }
    }

    /// Tells the source why its VM does not run here, and never will; not after it has run.
    pub fn refuse(&self, why: &str) {
        let link = &mut *self.lock();
        if link.turn.guest() == Guest::Here {
            return;
        }
        link.turn = Target::Ended;
        let limit = Limit { silence: Duration::from_secs(1), until: None, keep_on: &|| true };
        let end = why.floor_char_boundary(why.len().min(Kind::Failed.bytes_max()));
        // The source may be the reason.
        let _ = self.send(Kind::Failed, &[&why.as_bytes()[..end]], &limit);
    }

    /// Figures of the source, once it has said them. It never waits: the switch holds the lock until the source lets
    /// the guest go.
    pub fn figures_of_source(&self) -> Option<Left> {
        self.link.try_lock()?.report.source
    }

    /// Arrival, for the report.
    pub fn report(&self) -> ArrivedReport {
        self.lock().report.clone()
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.link.lock()
    }
}

/// Whether a connection was lost before it said which VM comes, as those of other programs are, and those of a client
/// that was refused.
fn is_of_no_source(lost: &LinkError) -> bool {
    matches!(lost, LinkError::Closed | LinkError::Io(_) | LinkError::Silent(_) | LinkError::Malformed(Malformed::Magic))
}

/// Notes windows with missing pages. Each is named once, so that RAM bounds their number.
fn name(named: &mut BTreeSet<WindowIndex>, heads: Vec<PagesHead>) -> Result<Vec<PagesHead>, Malformed> {
    if heads.iter().all(|head| named.insert(head.window)) { Ok(heads) } else { Err(Malformed::Pages) }
}

fn failure(from: &str, lost: &LinkError) -> Failure {
    match lost {
        LinkError::Cancelled => Failure::Interrupted,
        LinkError::Malformed(_) => Failure::Input(failure_text(from, lost)),
        // The source says why its VM stays there.
        LinkError::Refused(why) => failure_at_host(from, why),
        _ => failure_at_host(from, lost),
    }
}

fn failure_at_host(from: &str, why: &dyn Display) -> Failure {
    Failure::Host(failure_text(from, why))
}

fn failure_text(from: &str, why: &dyn Display) -> String {
    format!("cannot receive the VM from {from}: {why}; it does not run here")
}

#[cfg(test)]
mod tests {
    use wideleaf_policies::PageSet;

    use super::*;

    #[test]
    fn a_window_that_is_named_as_missing_twice_is_refused_in_the_same_message_and_in_a_later_one() {
        let head = |window| {
            let (stored, zero) = ([0].into_iter().collect(), PageSet::EMPTY);
            PagesHead { window: WindowIndex::new(window), is_huge: false, stored, zero }
        };
        let mut named = BTreeSet::new();
        assert_eq!(name(&mut named, vec![head(3), head(1)]), Ok(vec![head(3), head(1)]), "in their order");
        assert_eq!(name(&mut named, vec![head(2), head(3)]), Err(Malformed::Pages));
        assert_eq!(name(&mut named, vec![head(4), head(4)]), Err(Malformed::Pages));
    }
}
