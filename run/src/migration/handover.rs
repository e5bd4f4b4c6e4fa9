//! Which side may run the guest, as each side knows it. At no time may both.
//!
//! ```text
//!   source                                            target
//!   Sending ── all is sent ─▶ Sent                    Receiving ── the machine came, and is built ─▶ Ready
//!      │                       │ ready came               │                                            │ go came
//!      │ loss, cancel          │     │                    │ loss                                  loss │    │
//!      ▼                       ▼     ▼                    ▼                                            ▼    ▼
//!     Kept ◀─ loss, cancel ────┘  Committed              Ended ◀──────────────────────────────────────┘  Runs
//!      ▲                             │ │ │
//!      └── the target says that its  │ │ └─ running came ─▶ Left
//!          guest has never run ──────┘ └─── loss ─▶ InDoubt
//! ```
//!
//! The source is [`Source::Committed`] from before the first byte of `go` leaves it: whether that byte arrives is then
//! unknown. It never resumes its guest by itself from there, except when the target says that its guest has never run
//! and never will. An operator ends the doubt, after a look at the target.

/// State of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Pages and the machine are under way.
    Sending,
    /// All is sent, and the guest is paused.
    Sent,
    /// `go` may have left.
    Committed,
    /// The target's guest runs.
    Left,
    /// The guest stays here.
    Kept,
    /// The target's guest may run.
    InDoubt,
}

/// Events at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtSource {
    /// The last byte of the machine's state left.
    AllSent,
    /// The target is ready, and `go` is about to be sent.
    Ready,
    /// The target's guest runs.
    Running,
    /// The target says that its guest has never run, and has ended.
    NeverRan,
    /// The connection is lost, a time limit is over, or the migration is cancelled.
    Lost,
}

/// What a side may do with its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// It runs, or may be resumed.
    Here,
    /// It stands still, until another event.
    Waits,
    /// It never runs here again.
    Ended,
}

impl Source {
    /// State after an event. An event that cannot happen in a state is a loss: the other side is broken.
    #[must_use]
    pub fn after(self, event: AtSource) -> Source {
        match (self, event) {
            (Source::Sending, AtSource::AllSent) => Source::Sent,
            (Source::Sent, AtSource::Ready) => Source::Committed,
            (Source::Committed, AtSource::Running) => Source::Left,
            (Source::Committed, AtSource::NeverRan) => Source::Kept,
            (Source::Sending | Source::Sent, _) => Source::Kept,
            (Source::Committed, _) => Source::InDoubt,
            (Source::Left | Source::Kept | Source::InDoubt, _) => self,
        }
    }

    /// What it may do with its guest.
    pub fn guest(self) -> Guest {
        match self {
            Source::Sending | Source::Kept => Guest::Here,
            Source::Sent | Source::Committed | Source::InDoubt => Guest::Waits,
            Source::Left => Guest::Ended,
        }
    }
}

/// State of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Pages and the machine are under way.
    Receiving,
    /// All is checked and built.
    Ready,
    /// The guest runs.
    Runs,
    /// There is no guest here.
    Ended,
}

/// Events at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtTarget {
    /// All has come, is checked and is built.
    Built,
    /// `go` came.
    Go,
    /// The connection is lost, a time limit is over, or a part is wrong.
    Lost,
}

impl Target {
    /// State after an event.
    #[must_use]
    pub fn after(self, event: AtTarget) -> Target {
        match (self, event) {
            (Target::Receiving, AtTarget::Built) => Target::Ready,
            (Target::Ready, AtTarget::Go) => Target::Runs,
            // Once it runs, the source has given it up: it goes on without a connection.
            (Target::Runs, _) => Target::Runs,
            (Target::Receiving | Target::Ready | Target::Ended, _) => Target::Ended,
        }
    }

    /// What it may do with its guest.
    pub fn guest(self) -> Guest {
        match self {
            Target::Receiving | Target::Ready => Guest::Waits,
            Target::Runs => Guest::Here,
            Target::Ended => Guest::Ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages in their order; each is lost, or arrives.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Message {
        Machine,
        Ready,
        Go,
        Running,
    }

    const ALL: [Message; 4] = [Message::Machine, Message::Ready, Message::Go, Message::Running];

    /// Both sides at the end of a migration in which the connection breaks before `lost` arrives.
    fn end(lost: Option<Message>) -> (Source, Target) {
        let (mut source, mut target) = (Source::Sending, Target::Receiving);
        for message in ALL {
            // What the sender of a message knows does not depend on its arrival.
            if message == Message::Machine {
                source = source.after(AtSource::AllSent);
            }
            if message == Message::Go {
                assert_eq!(source, Source::Committed, "before the first byte leaves");
            }
            if Some(message) == lost {
                return (source.after(AtSource::Lost), target.after(AtTarget::Lost));
            }
            match message {
                Message::Machine => target = target.after(AtTarget::Built),
                Message::Ready => source = source.after(AtSource::Ready),
                Message::Go => target = target.after(AtTarget::Go),
                Message::Running => source = source.after(AtSource::Running),
            }
            let both = source.guest() == Guest::Here && target.guest() == Guest::Here;
            assert!(!both, "{message:?}: {source:?} {target:?}");
        }
        (source, target)
    }

    #[test]
    fn a_loss_at_any_message_leaves_one_guest_or_a_paused_one_that_waits_for_the_operator() {
        assert_eq!(end(Some(Message::Machine)), (Source::Kept, Target::Ended));
        assert_eq!(end(Some(Message::Ready)), (Source::Kept, Target::Ended));
        assert_eq!(end(Some(Message::Go)), (Source::InDoubt, Target::Ended));
        assert_eq!(end(Some(Message::Running)), (Source::InDoubt, Target::Runs));
        assert_eq!(end(None), (Source::Left, Target::Runs));
    }

    #[test]
    fn the_source_resumes_after_go_only_when_the_target_says_that_its_guest_never_ran() {
        let committed = Source::Sending.after(AtSource::AllSent).after(AtSource::Ready);
        for event in [AtSource::AllSent, AtSource::Ready, AtSource::Lost] {
            assert_eq!(committed.after(event), Source::InDoubt, "{event:?}");
        }
        assert_eq!(committed.after(AtSource::NeverRan).guest(), Guest::Here);
        for event in [AtSource::Ready, AtSource::Running, AtSource::NeverRan, AtSource::Lost] {
            assert_eq!(Source::Left.after(event).guest(), Guest::Ended, "{event:?}");
            assert_eq!(Source::InDoubt.after(event).guest(), Guest::Waits, "{event:?}");
        }
    }

    #[test]
    fn messages_out_of_their_order_end_a_migration_before_go() {
        for event in [AtSource::Ready, AtSource::Running, AtSource::NeverRan] {
            assert_eq!(Source::Sending.after(event), Source::Kept, "{event:?}");
        }
        assert_eq!(Source::Sending.after(AtSource::AllSent).after(AtSource::Running), Source::Kept);
        assert_eq!(Target::Receiving.after(AtTarget::Go), Target::Ended, "go before all has come");
        assert_eq!(Target::Ended.after(AtTarget::Go), Target::Ended);
    }
}
