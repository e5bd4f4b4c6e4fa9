//! Events of a guest that may have made its windows small, from what each look at it shows.
//!
//! ```text
//!   look   migration?  dirty log?  snapshot?  userfaultfd?  stopped?  balloon smaller than at the look before?
//!            └─ one or more ─▶ an event is under way; the strongest names it
//!            └─ none, and there was one ─▶ it is over, as of the last look that saw it
//! ```
//!
//! An event that begins and ends between two looks is not seen. A guest that gives no answer for a while may have had
//! one, so that the end of the silence ends an event of its own.

use std::time::Instant;

use wideleaf_memory::gate::LeftAlone;
use wideleaf_policies::Moment;
use wideleaf_policies::recovery::{Cause, Events};

/// What a look at a guest shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Signs {
    /// Reason to leave the guest alone.
    pub left_alone: Option<LeftAlone>,
    /// Whether the process waits for a guest that migrates to it, or receives its memory.
    pub is_arriving: bool,
    /// Whether a userfaultfd is open.
    pub has_userfaultfd: bool,
    /// Whether the guest stands still.
    pub is_stopped: bool,
    /// Memory that a balloon leaves the guest, and all of its memory, in bytes.
    pub balloon: Option<(u64, u64)>,
}

impl Signs {
    /// The strongest event.
    fn cause(&self) -> Option<Cause> {
        let of_reason = match self.left_alone {
            Some(LeftAlone::Migration) => Some(Cause::Migration),
            Some(LeftAlone::DirtyRate) => Some(Cause::DirtyLog),
            Some(LeftAlone::Snapshot) if !self.has_userfaultfd => Some(Cause::Snapshot),
            Some(LeftAlone::NoAnswer) => Some(Cause::Unseen),
            _ => None,
        };
        let signs = [
            of_reason,
            self.is_arriving.then_some(Cause::Arrival),
            self.has_userfaultfd.then_some(Cause::FaultsServed),
            self.is_stopped.then_some(Cause::Stop),
        ];
        signs.into_iter().flatten().max()
    }

    fn is_inflated(&self) -> bool {
        self.balloon.is_some_and(|(left, all)| left < all)
    }
}

/// Events so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tracker {
    looks: u64,
    /// The event under way, and the last look that saw it.
    present: Option<(Cause, Instant)>,
    ended: u64,
    latest: Option<(Cause, Instant)>,
    /// Memory that the balloon left the guest at the latest look.
    left: Option<u64>,
    is_inflated: bool,
}

impl Tracker {
    /// Takes a look into account.
    pub fn look(&mut self, signs: &Signs, now: Instant) {
        self.looks += 1;
        let left = signs.balloon.map(|(left, _)| left);
        let is_deflating = left.zip(self.left).is_some_and(|(now, before)| now > before);
        // A monitor that refuses one answer says nothing about the balloon.
        self.left = left.or(self.left);
        self.is_inflated = signs.is_inflated() || (left.is_none() && self.is_inflated);
        let seen = signs.cause().max(is_deflating.then_some(Cause::Balloon));
        self.present = match (seen, self.present.take()) {
            (Some(cause), before) => Some((before.map_or(cause, |(before, _)| before.max(cause)), now)),
            (None, Some(over)) => {
                self.ended += 1;
                self.latest = Some(over);
                None
            }
            (None, None) => None,
        };
    }

    /// Whether an event is under way.
    pub fn is_in_event(&self) -> bool {
        self.present.is_some()
    }

    /// Number of times that an event has begun or ended.
    pub fn changes(&self) -> u64 {
        2 * self.ended + u64::from(self.is_in_event())
    }

    /// The events, on the clock on which it is now `now`.
    pub fn events(&self, now: Moment) -> Events {
        let moment = |at: Instant| Moment::after_start(now.since_start().saturating_sub(at.elapsed()));
        Events {
            looks: self.looks,
            present: self.present.map(|(cause, _)| cause),
            ended: self.ended,
            latest: self.latest.map(|(cause, at)| (cause, moment(at))),
            is_inflated: self.is_inflated,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn after(looks: &[Signs]) -> Tracker {
        let (mut tracker, began) = (Tracker::default(), Instant::now());
        for (signs, second) in looks.iter().zip(0..) {
            tracker.look(signs, began + Duration::from_secs(second));
        }
        tracker
    }

    /// The cause of the latest event that is over, with the number of such events.
    fn over(looks: &[Signs]) -> (Option<Cause>, u64) {
        let tracker = after(looks);
        (tracker.latest.map(|(cause, _)| cause), tracker.ended)
    }

    const QUIET: Signs =
        Signs { left_alone: None, is_arriving: false, has_userfaultfd: false, is_stopped: false, balloon: None };

    fn left_alone(why: LeftAlone) -> Signs {
        Signs { left_alone: Some(why), ..QUIET }
    }

    fn balloon(left: u64) -> Signs {
        Signs { balloon: Some((left, 100)), ..QUIET }
    }

    #[test]
    fn every_kind_of_event_is_over_at_the_first_quiet_look_as_of_the_look_before() {
        let stopped = Signs { is_stopped: true, ..QUIET };
        let served = Signs { has_userfaultfd: true, ..QUIET };
        let served_and_closed = Signs { has_userfaultfd: true, ..left_alone(LeftAlone::Snapshot) };
        let arriving = Signs { is_arriving: true, is_stopped: true, ..left_alone(LeftAlone::Migration) };
        for (signs, cause) in [
            (left_alone(LeftAlone::Migration), Cause::Migration),
            (left_alone(LeftAlone::DirtyRate), Cause::DirtyLog),
            (left_alone(LeftAlone::Snapshot), Cause::Snapshot),
            (left_alone(LeftAlone::NoAnswer), Cause::Unseen),
            (stopped, Cause::Stop),
            (served, Cause::FaultsServed),
            (served_and_closed, Cause::FaultsServed),
            (arriving, Cause::Arrival),
        ] {
            assert_eq!(over(&[QUIET, signs, signs]), (None, 0));
            assert_eq!(over(&[QUIET, signs, signs, QUIET, QUIET]), (Some(cause), 1));
            let tracker = after(&[QUIET, signs, signs, QUIET]);
            assert_eq!(tracker.present, None);
            let second = after(&[QUIET, signs]);
            assert!(second.is_in_event() && second.events(Moment::START).present == Some(cause));
        }
    }

    #[test]
    fn each_begin_and_each_end_of_an_event_is_a_change() {
        let stopped = Signs { is_stopped: true, ..QUIET };
        let looks = [QUIET, stopped, stopped, QUIET, QUIET, left_alone(LeftAlone::DirtyRate), QUIET];
        let changes: Vec<_> = (1..=looks.len()).map(|number| after(&looks[..number]).changes()).collect();
        assert_eq!(changes, [0, 1, 1, 2, 2, 3, 4]);
    }

    #[test]
    fn a_guest_that_is_pinned_encrypted_or_left_alone_by_request_has_no_event() {
        for why in [LeftAlone::Pinned, LeftAlone::Encrypted, LeftAlone::Asked] {
            assert_eq!(over(&[QUIET, left_alone(why), QUIET]), (None, 0), "{why}");
        }
    }

    #[test]
    fn a_migration_to_a_file_and_the_pause_after_it_are_one_event() {
        let stopped = Signs { is_stopped: true, ..QUIET };
        let looks = [QUIET, left_alone(LeftAlone::Migration), stopped, stopped, QUIET];
        assert_eq!(over(&looks), (Some(Cause::Migration), 1));
    }

    #[test]
    fn a_balloon_that_deflates_is_an_event_once_it_stands_still_and_one_that_inflates_is_no_event() {
        assert_eq!(over(&[balloon(100), balloon(60), balloon(40), balloon(40)]), (None, 0));
        assert_eq!(over(&[balloon(40), balloon(60), balloon(100)]), (None, 0), "it still deflates");
        assert_eq!(over(&[balloon(40), balloon(60), balloon(100), balloon(100)]), (Some(Cause::Balloon), 1));
        let partly = after(&[balloon(40), balloon(60), balloon(60)]);
        assert_eq!((partly.ended, partly.is_inflated), (1, true));
        let unknown = after(&[balloon(40), QUIET, balloon(60), balloon(60)]);
        assert_eq!((unknown.ended, after(&[balloon(40), QUIET]).is_inflated), (1, true));
    }

    #[test]
    fn events_that_follow_each_other_are_counted_and_the_latest_is_told() {
        let looks = [left_alone(LeftAlone::DirtyRate), QUIET, balloon(1), balloon(2), balloon(2)];
        assert_eq!(over(&looks), (Some(Cause::Balloon), 2));
    }
}
