//! Which side may run the guest and use its disks, as each side knows it. At no time may both.
//!
//! ```text
//!   source                                              target
//!   Sending ── disks given up ─▶ GivenUp                Receiving ── the machine came, disks locked ─▶ HasDisks
//!      │ loss, cancel               │ all is sent           │ loss                                   │      │ built
//!      ▼                    loss,   ▼                       ▼                                   loss ▼      ▼
//!     Kept ◀─┐          ┌─ cancel ─ Sent                   Ended ◀─────────────────────────────────────── Ready
//!    locked  │          ▼           │ ready came                                                 loss       │ go came
//!    again   └──── TakingBack       ▼                                                                       ▼
//!                   │   ▲       Committed ── running came ─▶ Left                                          Runs
//!    no lock        │   └──────────┤  the target says that its guest has never run, or no byte of `go` has left
//!                   ▼              ▼ loss
//!                  InDoubt ◀───────┘   an operator resumes it, and the disks are locked again ─▶ Kept
//! ```
//!
//! A side uses the disks only where it has their locks, and runs the guest only then. The source gives them up before
//! the machine's state leaves it, so that a target that cannot lock them says so before `go`.
//! With pages that come later (post-copy), the guest runs at the target before all of its RAM is there:
//!
//! ```text
//!   Committed ── running came ─▶ Serving ── complete came ─▶ Left       Ready ── go came ─▶ RunsPartly
//!                               ▲  │ loss                                                    │ loss    │ all is here
//!                      rejoined │  ▼                                                         ▼         ▼
//!                                Broken: paused, until the operator acts                   Ended      Runs
//! ```
//!
//! A target that can get another connection waits for it after a loss, in [`Target::RunsPartly`]: its guest runs until
//! it touches what is missing. The same connection ends the source's doubt between `go` and `running`.
//!
//! The source is [`Source::Committed`] from before the first byte of `go` leaves it: whether that byte arrives is then
//! unknown. It never resumes its guest by itself from there, except when no byte of `go` has left, or the target says
//! that its guest has never run and never will. An operator ends the doubt, after a look at the target.

/// State of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Pages are under way.
    Sending,
    /// The locks of the disks are given up, and the machine is under way; the guest is paused.
    GivenUp,
    /// All is sent.
    Sent,
    /// `go` may have left.
    Committed,
    /// The target's guest runs, and needs pages of this side's RAM.
    Serving,
    /// The target's guest runs.
    Left,
    /// The guest stays here, once the disks are locked again.
    TakingBack,
    /// The target's guest has run, and the connection is lost before it had all pages.
    Broken,
    /// The guest stays here.
    Kept,
    /// The target's guest may run, or another process has the disks.
    InDoubt,
}

/// Events at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// The first lock of a disk is about to be given up.
    GivingUp,
    /// All disks are locked again.
    TakenBack,
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
    /// The target answers over another connection: its guest has run, and needs pages.
    Rejoined,
    /// The target says that its guest has never run, and has ended.
    NeverRan,
    /// The connection is lost, and no byte of `go` has left.
    NoGo,
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
    pub fn after(self, event: SourceEvent) -> Source {
        match (self, event) {
            (Source::Sending, SourceEvent::GivingUp) => Source::GivenUp,
            (Source::GivenUp, SourceEvent::AllSent) => Source::Sent,
            (Source::Sent, SourceEvent::Ready) => Source::Committed,
            (Source::Committed, SourceEvent::Running) => Source::Left,
            (Source::Committed, SourceEvent::RunningPartly) => Source::Serving,
            (Source::Serving, SourceEvent::Complete) => Source::Left,
            (Source::Broken | Source::InDoubt, SourceEvent::Rejoined) => Source::Serving,
            (Source::Committed, SourceEvent::NeverRan | SourceEvent::NoGo) => Source::TakingBack,
            (Source::TakingBack | Source::InDoubt | Source::Broken, SourceEvent::TakenBack) => Source::Kept,
            (Source::Serving, _) => Source::Broken,
            (Source::Sending, _) => Source::Kept,
            (Source::GivenUp | Source::Sent, _) => Source::TakingBack,
            (Source::Committed | Source::TakingBack, _) => Source::InDoubt,
            (Source::Left | Source::Kept | Source::InDoubt | Source::Broken, _) => self,
        }
    }

    /// What it may do with its guest.
    pub fn guest(self) -> Guest {
        match self {
            Source::Sending | Source::Kept => Guest::Here,
            Source::GivenUp
            | Source::Sent
            | Source::Committed
            | Source::Serving
            | Source::TakingBack
            | Source::Broken
            | Source::InDoubt => Guest::Waits,
            Source::Left => Guest::Ended,
        }
    }
}

/// State of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Pages and the machine are under way.
    Receiving,
    /// The machine has come, and its disks are locked here.
    HasDisks,
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
pub enum TargetEvent {
    /// The machine has come, and all disks are locked here.
    Locked,
    /// All is checked and built.
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
    pub fn after(self, event: TargetEvent) -> Target {
        match (self, event) {
            (Target::Receiving, TargetEvent::Locked) => Target::HasDisks,
            (Target::HasDisks, TargetEvent::Built) => Target::Ready,
            (Target::Ready, TargetEvent::Go) => Target::Runs,
            (Target::Ready, TargetEvent::GoPartly) => Target::RunsPartly,
            (Target::RunsPartly, TargetEvent::AllHere) => Target::Runs,
            // Once it runs, the source has given it up: it goes on without a connection.
            (Target::Runs, _) => Target::Runs,
            // A guest that touches a page that will not come could only see wrong bytes.
            (Target::Receiving | Target::HasDisks | Target::Ready | Target::RunsPartly | Target::Ended, _) => {
                Target::Ended
            }
        }
    }

    /// What it may do with its guest.
    pub fn guest(self) -> Guest {
        match self {
            Target::Receiving | Target::HasDisks | Target::Ready => Guest::Waits,
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

    /// The lock of a disk, which the kernel gives to one process at a time.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum LockedBy {
        None,
        Source,
        Target,
        Another,
    }

    /// Both sides, and the lock of the disk.
    #[derive(Clone, Copy, Debug)]
    struct Sides {
        source: Source,
        target: Target,
        lock: LockedBy,
    }

    impl Sides {
        fn source(&mut self, event: SourceEvent) {
            self.source = self.source.after(event);
            self.check(event);
        }

        fn target(&mut self, event: TargetEvent) {
            self.target = self.target.after(event);
            // Its process ends.
            if self.target == Target::Ended && self.lock == LockedBy::Target {
                self.lock = LockedBy::None;
            }
            self.check(event);
        }

        /// The source tries to lock the disk again.
        fn take_back(&mut self) {
            if self.lock == LockedBy::None {
                self.lock = LockedBy::Source;
            }
            let has_it = self.lock == LockedBy::Source;
            self.source(if has_it { SourceEvent::TakenBack } else { SourceEvent::Lost });
        }

        /// One guest at most, and only where the disk is locked.
        fn check(self, event: impl std::fmt::Debug) {
            let (here, there) = (self.source.guest() == Guest::Here, self.target.guest() == Guest::Here);
            assert!(!here || self.lock == LockedBy::Source, "{event:?}: {self:?}");
            assert!(!there || self.lock == LockedBy::Target, "{event:?}: {self:?}");
        }
    }

    /// Both sides after a migration in which the connection breaks before `lost` arrives. The source notices that
    /// before the target does, or after it; `between`: what has the lock between the two; `is_partly`: whether pages
    /// come later.
    fn both(lost: Option<Message>, notices_first: bool, between: LockedBy, is_partly: bool) -> Sides {
        let mut both = Sides { source: Source::Sending, target: Target::Receiving, lock: LockedBy::Source };
        for message in ALL.into_iter().take(if is_partly { 6 } else { 4 }) {
            // What the sender of a message knows does not depend on its arrival.
            if message == Message::Machine {
                both.source(SourceEvent::GivingUp);
                both.lock = between;
                both.source(SourceEvent::AllSent);
            }
            if message == Message::Go {
                assert_eq!(both.source, Source::Committed, "before the first byte leaves");
            }
            if Some(message) == lost {
                if !notices_first {
                    both.target(TargetEvent::Lost);
                }
                both.source(SourceEvent::Lost);
                if both.source == Source::TakingBack {
                    both.take_back();
                }
                both.target(TargetEvent::Lost);
                return both;
            }
            match message {
                Message::Machine if both.lock == LockedBy::None => {
                    both.lock = LockedBy::Target;
                    both.target(TargetEvent::Locked);
                    both.target(TargetEvent::Built);
                }
                // It says why, and ends.
                Message::Machine => {
                    both.target(TargetEvent::Lost);
                    both.source(SourceEvent::Lost);
                    both.take_back();
                    return both;
                }
                Message::Ready => both.source(SourceEvent::Ready),
                Message::Go if is_partly => both.target(TargetEvent::GoPartly),
                Message::Go => both.target(TargetEvent::Go),
                Message::Running if is_partly => both.source(SourceEvent::RunningPartly),
                Message::Running => both.source(SourceEvent::Running),
                Message::LastPages => both.target(TargetEvent::AllHere),
                Message::Complete => both.source(SourceEvent::Complete),
            }
        }
        both
    }

    fn end(lost: Option<Message>, notices_first: bool) -> (Source, Target, LockedBy) {
        let Sides { source, target, lock } = both(lost, notices_first, LockedBy::None, false);
        (source, target, lock)
    }

    fn end_partly(lost: Option<Message>, notices_first: bool) -> (Source, Target, LockedBy) {
        let Sides { source, target, lock } = both(lost, notices_first, LockedBy::None, true);
        (source, target, lock)
    }

    #[test]
    fn a_loss_at_any_message_leaves_one_guest_with_the_disks_or_a_paused_one_that_waits_for_the_operator() {
        let kept = (Source::Kept, Target::Ended, LockedBy::Source);
        for notices_first in [false, true] {
            assert_eq!(end(Some(Message::Machine), notices_first), kept);
            assert_eq!(end(Some(Message::Go), notices_first), (Source::InDoubt, Target::Ended, LockedBy::None));
            assert_eq!(end(Some(Message::Running), notices_first), (Source::InDoubt, Target::Runs, LockedBy::Target));
        }
        assert_eq!(end(None, false), (Source::Left, Target::Runs, LockedBy::Target));
        assert_eq!(end(Some(Message::Ready), false), kept);
        // The target still has the disks: the source waits for it, and gives up where it takes too long.
        assert_eq!(end(Some(Message::Ready), true), (Source::InDoubt, Target::Ended, LockedBy::None));
    }

    #[test]
    fn a_guest_in_doubt_is_resumed_only_where_no_other_process_has_its_disks() {
        for (lost, resumed) in [(Message::Go, Source::Kept), (Message::Running, Source::InDoubt)] {
            let mut both = both(Some(lost), false, LockedBy::None, false);
            both.take_back();
            assert_eq!(both.source, resumed, "{lost:?}");
        }
        for (lost, resumed) in [(Message::LastPages, Source::Kept), (Message::Complete, Source::Broken)] {
            let mut both = both(Some(lost), false, LockedBy::None, true);
            both.take_back();
            assert_eq!(both.source, resumed, "pages are missing, {lost:?}");
        }
    }

    #[test]
    fn a_target_that_waits_for_another_connection_has_the_disks_and_gets_the_rest() {
        for lost in [SourceEvent::RunningPartly, SourceEvent::Complete] {
            // The target's guest has not ended: it waits.
            let mut both = Sides { source: Source::Committed, target: Target::RunsPartly, lock: LockedBy::Target };
            if lost == SourceEvent::Complete {
                both.source(SourceEvent::RunningPartly);
            }
            both.source(SourceEvent::Lost);
            assert_eq!(both.source.guest(), Guest::Waits);
            both.take_back();
            assert_eq!(both.source.guest(), Guest::Waits, "the operator cannot resume it: {both:?}");
            both.source(SourceEvent::Rejoined);
            assert_eq!(both.source, Source::Serving);
            both.source(SourceEvent::Lost);
            both.source(SourceEvent::Rejoined);
            both.target(TargetEvent::AllHere);
            both.source(SourceEvent::Complete);
            assert_eq!((both.source, both.target), (Source::Left, Target::Runs));
        }
        let kept = Source::Broken.after(SourceEvent::TakenBack);
        assert_eq!(kept.after(SourceEvent::Rejoined), Source::Kept, "a guest that was resumed sends nothing");
    }

    #[test]
    fn disks_that_another_process_locks_on_their_way_stop_the_migration_and_the_guest() {
        let both = both(None, false, LockedBy::Another, false);
        assert_eq!((both.source, both.target, both.lock), (Source::InDoubt, Target::Ended, LockedBy::Another));
    }

    #[test]
    fn a_loss_while_pages_are_missing_runs_no_second_guest_and_the_source_keeps_its_own_paused() {
        let kept = (Source::Kept, Target::Ended, LockedBy::Source);
        for notices_first in [false, true] {
            let end = |lost| end_partly(Some(lost), notices_first);
            assert_eq!(end(Message::Machine), kept);
            assert_eq!(end(Message::Go), (Source::InDoubt, Target::Ended, LockedBy::None));
            assert_eq!(end(Message::Running), (Source::InDoubt, Target::Ended, LockedBy::None));
            assert_eq!(end(Message::LastPages), (Source::Broken, Target::Ended, LockedBy::None));
            assert_eq!(end(Message::Complete), (Source::Broken, Target::Runs, LockedBy::Target));
        }
        assert_eq!(end_partly(Some(Message::Ready), false), kept);
        assert_eq!(end_partly(None, false), (Source::Left, Target::Runs, LockedBy::Target));
    }

    #[test]
    fn a_source_with_pages_that_are_needed_never_resumes_by_itself() {
        let sent = Source::Sending.after(SourceEvent::GivingUp).after(SourceEvent::AllSent);
        let serving = sent.after(SourceEvent::Ready).after(SourceEvent::RunningPartly);
        assert_eq!((serving, serving.guest()), (Source::Serving, Guest::Waits));
        for event in
            [SourceEvent::NeverRan, SourceEvent::NoGo, SourceEvent::Running, SourceEvent::Ready, SourceEvent::Lost]
        {
            assert_eq!(serving.after(event), Source::Broken, "{event:?}");
        }
        let broken = serving.after(SourceEvent::Lost);
        for event in [SourceEvent::NeverRan, SourceEvent::Complete, SourceEvent::Lost] {
            assert_eq!(broken.after(event).guest(), Guest::Waits, "{event:?}");
        }
    }

    #[test]
    fn the_source_resumes_after_go_only_when_none_of_it_left_or_the_target_says_that_its_guest_never_ran() {
        let sent = Source::Sending.after(SourceEvent::GivingUp).after(SourceEvent::AllSent);
        let committed = sent.after(SourceEvent::Ready);
        for event in [SourceEvent::AllSent, SourceEvent::Ready, SourceEvent::Lost, SourceEvent::TakenBack] {
            assert_eq!(committed.after(event), Source::InDoubt, "{event:?}");
        }
        for event in [SourceEvent::NeverRan, SourceEvent::NoGo] {
            assert_eq!(committed.after(event).after(SourceEvent::TakenBack).guest(), Guest::Here, "{event:?}");
            assert_eq!(committed.after(event).after(SourceEvent::Lost).guest(), Guest::Waits, "{event:?}");
        }
        for event in [SourceEvent::Ready, SourceEvent::Running, SourceEvent::NeverRan, SourceEvent::Lost] {
            assert_eq!(Source::Left.after(event).guest(), Guest::Ended, "{event:?}");
            assert_eq!(Source::InDoubt.after(event).guest(), Guest::Waits, "{event:?}");
        }
        assert_eq!(Source::Left.after(SourceEvent::TakenBack), Source::Left);
    }

    #[test]
    fn messages_out_of_their_order_end_a_migration_before_go() {
        for event in [SourceEvent::Ready, SourceEvent::Running, SourceEvent::NeverRan, SourceEvent::AllSent] {
            assert_eq!(Source::Sending.after(event), Source::Kept, "{event:?}");
        }
        let given_up = Source::Sending.after(SourceEvent::GivingUp);
        for event in [SourceEvent::Ready, SourceEvent::Running, SourceEvent::NeverRan] {
            assert_eq!(given_up.after(event), Source::TakingBack, "{event:?}");
        }
        assert_eq!(given_up.after(SourceEvent::AllSent).after(SourceEvent::Running), Source::TakingBack);
        for event in [TargetEvent::Go, TargetEvent::Built] {
            assert_eq!(Target::Receiving.after(event), Target::Ended, "{event:?} before all has come");
        }
        assert_eq!(Target::HasDisks.after(TargetEvent::Go), Target::Ended, "go before ready");
        assert_eq!(Target::Ended.after(TargetEvent::Go), Target::Ended);
    }
}
