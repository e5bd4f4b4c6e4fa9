//! The side at which a VM arrives. It takes one connection before its process enters the sandbox.
//!
//! ```text
//!   Incoming::wait ──▶ specification ──▶ RAM mapped ──▶ Incoming::receive: RAM and the machine's state
//!                                                            │ disks locked, machine built and held, sandbox,
//!   report ◀── guest runs ◀── Incoming::switch: ready, go ◀──┘ manager, sockets
//! ```
//!
//! What the source sends is checked before it is used: lengths, checksums, that all pages are RAM, and the machine's
//! state as that of a snapshot. The source chooses no file of this host: devices are those of the target's own options.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wideleaf_memory::{GuestRam, Host};

use super::address::{Address, Ends};
use super::frames::{Kind, Malformed, PagesHead};
use super::handover::{AtTarget, Guest, Target};
use super::link::{Limit, Lost, Receiver, Sender};
use super::placing::Placing;
use super::{Arrived, Hello};
use crate::failure::Failure;
use crate::guest::RunningGuest;
use crate::interrupts::Interrupts;
use crate::report::{ArrivedReport, Counters};
use crate::snapshot::{SavedRun, parse};
use crate::spec::RunSpec;

/// Time without a byte after which the source counts as gone.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Time for the figures of both sides, once the guest runs here.
const FIGURES_WAIT_MAX: Duration = Duration::from_secs(5);

/// A VM that arrives.
#[derive(Debug)]
pub struct Incoming {
    from: String,
    spec: RunSpec,
    began: Instant,
    link: Mutex<LinkState>,
}

#[derive(Debug)]
struct LinkState {
    sender: Sender,
    receiver: Receiver,
    turn: Target,
    report: ArrivedReport,
}

impl Incoming {
    /// Waits for the source, and for the specification of its VM. `on_wait` is told where it waits.
    ///
    /// # Errors
    /// [`Failure`] if it cannot listen there, a signal comes, or the other side is no source.
    pub fn wait(address: &Address, interrupts: &Interrupts, on_wait: &dyn Fn(&str)) -> Result<Incoming, Failure> {
        let (Ends { reader, writer }, from) = address.accept(interrupts, on_wait)?;
        let (mut sender, mut receiver) = (Sender::new(writer), Receiver::new(reader));
        let limit = Limit { silence: SILENCE_MAX, until: None, keep_on: &|| !interrupts.is_set() };
        let mut content = Vec::new();
        let greeted = match sender.greet(&limit).and_then(|()| receiver.greeted(&limit)) {
            Ok(()) => receiver.expect(Kind::Hello, &mut content, &limit),
            Err(lost) => Err(lost),
        };
        greeted.map_err(|lost| failure(&from, &lost))?;
        let hello: Result<Hello, _> = serde_json::from_slice(&content);
        let spec = hello.map(|hello| hello.spec).map_err(|error| {
            let why = format!("its specification is malformed: {error}; use equal releases of wideleaf");
            let _ = sender.send(Kind::Failed, &[why.as_bytes()], &limit);
            Failure::Input(format!("cannot receive the VM from {from}: {why}"))
        })?;
        let report = ArrivedReport { from: from.clone(), ..ArrivedReport::default() };
        let link = Mutex::new(LinkState { sender, receiver, turn: Target::Receiving, report });
        Ok(Incoming { from, spec, began: Instant::now(), link })
    }

    /// Specification of the source's run, which is not checked against this host.
    pub fn spec(&self) -> &RunSpec {
        &self.spec
    }

    /// Receives RAM, which no guest uses yet, and the state of everything else.
    ///
    /// # Errors
    /// [`Failure`] if the source ends, or sends what cannot be.
    pub fn receive(&self, ram: &GuestRam, host: &dyn Host, interrupts: &Interrupts) -> Result<SavedRun, Failure> {
        let link = &mut *self.lock();
        let limit = Limit { silence: SILENCE_MAX, until: None, keep_on: &|| !interrupts.is_set() };
        let lost = |lost: Lost| failure(&self.from, &lost);
        link.sender.send(Kind::Welcome, &[], &limit).map_err(lost)?;
        let mut placing = Placing::new(ram, host);
        let mut content = Vec::new();
        loop {
            match link.receiver.next(&mut content, &limit).map_err(lost)? {
                Kind::Pages => {
                    let placed = PagesHead::decode(&content).and_then(|(head, pages)| placing.place(&head, pages));
                    placed.map_err(|why| lost(why.into()))?;
                }
                Kind::Machine => break,
                _ => return Err(lost(Malformed::Order.into())),
            }
        }
        (link.report.pages, link.report.windows_marked_huge) = (placing.pages, placing.windows_huge);
        parse(&content, &|why| Failure::Input(format!("cannot receive the VM from {}: {why}", self.from)))
    }

    /// Notes that the disks of the VM are locked here.
    pub fn has_disks(&self) {
        let link = &mut *self.lock();
        link.turn = link.turn.after(AtTarget::Locked);
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
        let mut content = Vec::new();
        link.turn = link.turn.after(AtTarget::Built);
        let go = match link.sender.send(Kind::Ready, &[], &limit) {
            Ok(()) => link.receiver.expect(Kind::Go, &mut content, &limit),
            Err(lost) => Err(lost),
        };
        // A stop that came with `go` counts: the guest has not run.
        let go = go.and_then(|()| if is_over() { Err(Lost::Cancelled) } else { Ok(()) });
        if let Err(lost) = go {
            link.turn = link.turn.after(AtTarget::Lost);
            return Err(failure(&self.from, &lost));
        }
        debug_assert_eq!(link.turn.after(AtTarget::Go).guest(), Guest::Here);
        guest.release().map_err(|error| Failure::Host(format!("cannot let the VM run: {error}")))?;
        link.turn = link.turn.after(AtTarget::Go);
        link.report.seconds = self.began.elapsed().as_secs_f64();
        self.exchange(link, counters, interrupts);
        Ok(())
    }

    /// Says `running`, and exchanges the figures for both reports. A loss is no failure: the guest runs here.
    fn exchange(&self, link: &mut LinkState, counters: &dyn Fn() -> Counters, interrupts: &Interrupts) {
        let until = Some(Instant::now() + FIGURES_WAIT_MAX);
        let limit = Limit { silence: FIGURES_WAIT_MAX, until, keep_on: &|| !interrupts.is_set() };
        let told = link.sender.send(Kind::Running, &[], &limit).and_then(|()| {
            let Counters { host_4k_bytes, host_2m_bytes, host_1g_bytes, .. } = counters();
            (link.report.huge_bytes, link.report.base_bytes) = (host_2m_bytes + host_1g_bytes, host_4k_bytes);
            let arrived = Arrived { huge_bytes: link.report.huge_bytes, base_bytes: link.report.base_bytes };
            let text = serde_json::to_vec(&arrived).map_err(std::io::Error::other)?;
            link.sender.send(Kind::Arrived, &[&text], &limit)?;
            let mut content = Vec::new();
            link.receiver.expect(Kind::Left, &mut content, &limit)?;
            link.report.source = serde_json::from_slice(&content).ok();
            Ok(())
        });
        link.report.received_bytes = link.receiver.received();
        if let Err(lost) = told {
            tracing::warn!("the source at {} of the VM that runs here now: {lost}", self.from);
        }
    }

    /// Tells the source why its VM does not run here, and never will; not after it has run.
    pub fn refuse(&self, why: &str) {
        let link = &mut *self.lock();
        if link.turn == Target::Runs {
            return;
        }
        link.turn = Target::Ended;
        let limit = Limit { silence: Duration::from_secs(1), until: None, keep_on: &|| true };
        let end = why.floor_char_boundary(why.len().min(Kind::Failed.bytes_max()));
        // The source may be the reason.
        let _ = link.sender.send(Kind::Failed, &[&why.as_bytes()[..end]], &limit);
    }

    /// Arrival, for the report.
    pub fn report(&self) -> ArrivedReport {
        self.lock().report.clone()
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failure(from: &str, lost: &Lost) -> Failure {
    let text = format!("cannot receive the VM from {from}: {lost}; it does not run here");
    match lost {
        Lost::Cancelled => Failure::Interrupted,
        Lost::Malformed(_) => Failure::Input(text),
        _ => Failure::Host(text),
    }
}
