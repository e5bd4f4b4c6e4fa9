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
//! With pages that come later (post-copy), the guest runs at the target before all of its RAM is there:
//!
//! ```text
//!   Committed ── running came ─▶ Serving ── complete came ─▶ Left       Ready ── go came ─▶ RunsPartly
//!                                  │ loss                                                    │ loss    │ all is here
//!                                  ▼                                                         ▼         ▼
//!                                Broken: paused, until the operator acts                   Ended      Runs
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
    /// The target's guest runs, and needs pages of this side's RAM.
    Serving,
    /// The target's guest runs.
    Left,
    /// The target's guest has run, and the connection is lost before it had all pages.
    Broken,
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
    /// The target's guest runs without all pages.
    RunningPartly,
    /// The target's guest needs no more pages.
    Complete,
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
            (Source::Committed, AtSource::RunningPartly) => Source::Serving,
            (Source::Serving, AtSource::Complete) => Source::Left,
            (Source::Serving, _) => Source::Broken,
            (Source::Committed, AtSource::NeverRan) => Source::Kept,
            (Source::Sending | Source::Sent, _) => Source::Kept,
            (Source::Committed, _) => Source::InDoubt,
            (Source::Left | Source::Kept | Source::InDoubt | Source::Broken, _) => self,
        }
    }

    /// What it may do with its guest.
    pub fn guest(self) -> Guest {
        match self {
            Source::Sending | Source::Kept => Guest::Here,
            Source::Sent | Source::Committed | Source::InDoubt | Source::Serving | Source::Broken => Guest::Waits,
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
    /// The guest runs; a part of its RAM is at the source.
    RunsPartly,
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
    /// `go` came, and pages are missing.
    GoPartly,
    /// The last missing page came.
    AllHere,
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
            (Target::Ready, AtTarget::GoPartly) => Target::RunsPartly,
            (Target::RunsPartly, AtTarget::AllHere) => Target::Runs,
            // Once it runs, the source has given it up: it goes on without a connection.
            (Target::Runs, _) => Target::Runs,
            // A guest that touches a page that will not come could only see wrong bytes.
            (Target::Receiving | Target::Ready | Target::RunsPartly | Target::Ended, _) => Target::Ended,
        }
    }

    /// What it may do with its guest.
    pub fn guest(self) -> Guest {
        match self {
            Target::Receiving | Target::Ready => Guest::Waits,
            Target::Runs | Target::RunsPartly => Guest::Here,
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
        LastPages,
        Complete,
    }

    const ALL: [Message; 6] =
        [Message::Machine, Message::Ready, Message::Go, Message::Running, Message::LastPages, Message::Complete];

    /// Both sides at the end of a migration in which the connection breaks before `lost` arrives.
    fn end(lost: Option<Message>) -> (Source, Target) {
        end_of(lost, false)
    }

    fn end_of(lost: Option<Message>, is_partly: bool) -> (Source, Target) {
        let (mut source, mut target) = (Source::Sending, Target::Receiving);
        for message in ALL.into_iter().take(if is_partly { 6 } else { 4 }) {
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
                Message::Go if is_partly => target = target.after(AtTarget::GoPartly),
                Message::Go => target = target.after(AtTarget::Go),
                Message::Running if is_partly => source = source.after(AtSource::RunningPartly),
                Message::Running => source = source.after(AtSource::Running),
                Message::LastPages => target = target.after(AtTarget::AllHere),
                Message::Complete => source = source.after(AtSource::Complete),
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
    fn a_loss_while_pages_are_missing_runs_no_second_guest_and_the_source_keeps_its_own_paused() {
        let end = |lost| end_of(lost, true);
        assert_eq!(end(Some(Message::Machine)), (Source::Kept, Target::Ended));
        assert_eq!(end(Some(Message::Ready)), (Source::Kept, Target::Ended));
        assert_eq!(end(Some(Message::Go)), (Source::InDoubt, Target::Ended));
        assert_eq!(end(Some(Message::Running)), (Source::InDoubt, Target::Ended));
        assert_eq!(end(Some(Message::LastPages)), (Source::Broken, Target::Ended));
        assert_eq!(end(Some(Message::Complete)), (Source::Broken, Target::Runs));
        assert_eq!(end(None), (Source::Left, Target::Runs));
    }

    #[test]
    fn a_source_that_has_missing_pages_never_resumes_by_itself() {
        let serving = Source::Sending.after(AtSource::AllSent).after(AtSource::Ready).after(AtSource::RunningPartly);
        assert_eq!((serving, serving.guest()), (Source::Serving, Guest::Waits));
        for event in [AtSource::NeverRan, AtSource::Running, AtSource::Ready, AtSource::Lost] {
            assert_eq!(serving.after(event), Source::Broken, "{event:?}");
        }
        let broken = serving.after(AtSource::Lost);
        for event in [AtSource::NeverRan, AtSource::Complete, AtSource::Lost] {
            assert_eq!(broken.after(event).guest(), Guest::Waits, "{event:?}");
        }
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
