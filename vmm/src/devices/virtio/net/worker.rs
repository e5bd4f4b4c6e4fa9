//! The service of a card on the devices' thread: it decides whether to wait for the link or for the guest.
//!
//! | the receiver waits for | the link is watched for frames | | the transmitter waits for | the link is watched for room |
//! |---|---|---|---|---|
//! | the link | yes | | the driver | no |
//! | buffers | no: frames wait in the link | | the link | yes: frames wait in the queue |

use std::sync::atomic::Ordering;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use super::receive::Receiver;
use super::shared::{Next, Shared};
use super::transmit::Transmitter;
use crate::devices::virtio::counters::add;
use crate::devices::virtio::{ActiveQueue, BrokenQueue};

/// The card's worker: see the module.
pub(super) struct Worker {
    shared: Shared,
    receiver: Receiver,
    transmitter: Transmitter,
    /// Events that the link is watched for; `None` where it has ended, or a queue is broken.
    watched: Option<EventSet>,
}

/// Sources of an event, by number.
const RECEIVE: u32 = 0;
const TRANSMIT: u32 = 1;
const LINK: u32 = 2;

impl Worker {
    pub(super) fn new(shared: Shared, receiver: Receiver, transmitter: Transmitter) -> Worker {
        // Its first turn comes with the first frame, or with the driver's first buffers.
        let watched = shared.is_up.load(Ordering::Acquire).then_some(EventSet::IN);
        Worker { shared, receiver, transmitter, watched }
    }

    /// The queues, in order.
    pub(super) fn queues(&self) -> [&ActiveQueue; 2] {
        [&self.receiver.queue, &self.transmitter.queue]
    }

    fn receive(&mut self, ops: &mut EventOps<'_>) {
        match again_after_others(|| self.receiver.serve(&self.shared)) {
            Ok(Next::Link) => self.watch(EventSet::IN, true, ops),
            // The rest may be in the link, or already held; the link's own event would only cover the first case.
            Ok(Next::Again) => take_another_turn(&self.receiver.queue.kick),
            Ok(Next::Buffers) => self.watch(EventSet::IN, false, ops),
            Ok(Next::Gone) => self.link_ended(ops),
            Err(error) => self.give_up(&error, ops),
        }
    }

    fn transmit(&mut self, ops: &mut EventOps<'_>) {
        match again_after_others(|| self.transmitter.serve(&self.shared)) {
            Ok(Next::Link) => self.watch(EventSet::OUT, true, ops),
            Ok(Next::Buffers) => self.watch(EventSet::OUT, false, ops),
            Ok(Next::Again) => take_another_turn(&self.transmitter.queue.kick),
            Ok(Next::Gone) => self.link_ended(ops),
            Err(error) => self.give_up(&error, ops),
        }
    }

    fn watch(&mut self, what: EventSet, is_wanted: bool, ops: &mut EventOps<'_>) {
        let Some(before) = self.watched else { return };
        let now = if is_wanted { before | what } else { before - what };
        if now != before && ops.modify(self.link_events(now)).is_ok() {
            self.watched = Some(now);
        }
    }

    fn link_events(&self, events: EventSet) -> Events {
        use std::os::fd::AsRawFd as _;
        Events::with_data_raw(self.shared.link.as_fd().as_raw_fd(), LINK, events)
    }

    fn link_ended(&mut self, ops: &mut EventOps<'_>) {
        tracing::warn!("a network card's link has ended: its tap was deleted");
        self.unwatch(ops);
        self.shared.is_up.store(false, Ordering::Release);
        self.shared.interrupt.configuration_changed();
    }

    fn unwatch(&mut self, ops: &mut EventOps<'_>) {
        if self.watched.take().is_some() {
            let _ = ops.remove(self.link_events(EventSet::empty()));
        }
    }

    /// Stops serving, because the guest broke a queue; a reset of the card starts it again.
    fn give_up(&mut self, error: &BrokenQueue, ops: &mut EventOps<'_>) {
        add(&self.shared.counting.broken_queues, 1);
        self.unwatch(ops);
        for kick in [&self.receiver.queue.kick, &self.transmitter.queue.kick] {
            let _ = ops.remove(Events::new(kick, EventSet::empty()));
        }
        self.shared.interrupt.broken(&"a network card", error);
    }
}

/// Serves a queue. If nothing was left, yields the CPU and serves once more: on a busy host the waiting thread
/// often makes the next frames, and a thread that sleeps after each frame must be woken for each.
fn again_after_others(mut serve: impl FnMut() -> Result<Next, BrokenQueue>) -> Result<Next, BrokenQueue> {
    match serve()? {
        Next::Link | Next::Buffers => {
            std::thread::yield_now();
            serve()
        }
        next => Ok(next),
    }
}

/// Schedules another turn after all others that wait for the thread now.
fn take_another_turn(kick: &EventFd) {
    // The write fails only if the event's counter is full; then the turn comes anyway.
    let _ = kick.write(1);
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let kicks = [
            Events::with_data(&self.receiver.queue.kick, RECEIVE, EventSet::IN),
            Events::with_data(&self.transmitter.queue.kick, TRANSMIT, EventSet::IN),
        ];
        let link = self.watched.map(|events| self.link_events(events));
        for events in kicks.into_iter().chain(link) {
            if let Err(error) = ops.add(events) {
                tracing::error!(%error, "cannot wait for a network card's events");
                return self.shared.interrupt.needs_reset();
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            RECEIVE => {
                let _ = self.receiver.queue.kick.read();
                if self.watched.is_some() {
                    self.receive(ops);
                }
            }
            TRANSMIT => {
                let _ = self.transmitter.queue.kick.read();
                self.transmit(ops);
            }
            _ if events.event_set().intersects(EventSet::ERROR | EventSet::HANG_UP) => self.link_ended(ops),
            _ => {
                // The event may have become unwanted since it was fetched.
                if events.event_set().contains(EventSet::IN) && self.watched.is_some_and(|on| on.contains(EventSet::IN))
                {
                    self.receive(ops);
                }
                if events.event_set().contains(EventSet::OUT) && self.watched.is_some() {
                    self.transmit(ops);
                }
            }
        }
    }
}
