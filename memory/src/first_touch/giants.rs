//! Giants at their first touch: a giant with no page and all windows registered waits for a page of 1 GiB, which then
//! replaces its mapping.
//!
//! A giant is only replaced while it has no page and the guest has given back no part of it, so no contents are lost.
//! The supply makes pages in a thread of its own; this thread looks for them, and waits for none.
//!
//! ```text
//!   touch ─▶ untouched? ── order ─▶ [awaited] ── page ready ─▶ still untouched? ─▶ placed: threads wake on the page
//!               │ no                    │ no page, or 10 s                │ no
//!               └──────────▶ 2 MiB ◀────┴─────────────────────────────────┘  decided once for each giant
//! ```

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use wideleaf_policies::{Gpa, GpaRange, Moment, PageSize};

use super::giant_supply::{GiantSupply, Obstacle, Supplied};
use super::placing::{self, NotPlaced};
use super::{Deciding, State};
use crate::backing::BackingKind;
use crate::claims::Claimed;
use crate::faults::Touch;
use crate::giant_page::GIANT;
use crate::numa::placement::NodePolicy;
use crate::sys::pagemap::holds_nothing;

/// Maximum time that a touch waits for a page of 1 GiB. A guest kernel complains about a vCPU that stood still for 20 s
/// (`kernel.watchdog_thresh`, twice its default); a page of memory that is new to this host takes 3 s to clear, and to
/// make one takes seconds too.
const GIANT_WAIT_MAX: Duration = Duration::from_secs(10);

/// Interval between two looks for the page that a giant waits for, in milliseconds: a fiftieth of the time to clear it.
const LOOK_FOR_GIANT_EVERY_MS: u16 = 2;

/// Interval between two looks for a page that no giant awaits any more, in milliseconds. Until the page is given back,
/// the host lacks it.
const LOOK_FOR_LATE_PAGE_EVERY_MS: u16 = 100;

/// The giants of which a touch was answered with a page of 1 GiB.
pub(super) struct Giants {
    /// Supply of pages; `None` where there are no sources.
    supply: Option<GiantSupply>,
    /// Giants that wait for a page, in the order of their first touches.
    awaited: VecDeque<WaitingGiant>,
    /// Giants that are decided, by range and address.
    decided: BTreeSet<(usize, Gpa)>,
}

/// A giant that waits for its page.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingGiant {
    giant: Gpa,
    /// The touch that was answered 1g.
    touch: Touch,
    since: Moment,
}

impl Giants {
    /// Giants of which none is awaited yet.
    pub(super) fn new(supply: Option<GiantSupply>) -> Giants {
        Giants { supply, awaited: VecDeque::new(), decided: BTreeSet::new() }
    }

    /// Interval between two looks for a page for which touches wait, or which came too late, in milliseconds. `None` if
    /// no page is being made.
    pub(super) fn look_every_ms(&self) -> Option<u16> {
        let is_ordered = self.supply.as_ref().is_some_and(GiantSupply::is_ordered);
        match self.awaited.is_empty() {
            false => Some(LOOK_FOR_GIANT_EVERY_MS),
            true => is_ordered.then_some(LOOK_FOR_LATE_PAGE_EVERY_MS),
        }
    }
}

/// Giants at their first touch.
impl<D> Deciding<D> {
    /// Answers the touches of the first awaited giant, if its page is ready or too late. Without one, gives back a page
    /// that came too late.
    pub(super) fn look_for_giant(&mut self) {
        let Some(awaited) = self.giants.awaited.front().copied() else {
            if let Some(supply) = &mut self.giants.supply {
                supply.drop_late();
            }
            return;
        };
        let policy = self.page_policy(awaited);
        let supplied = self.giants.supply.as_mut().and_then(|supply| supply.look(policy));
        let is_late = self.host.now().since(awaited.since) > GIANT_WAIT_MAX;
        let ended = match supplied {
            Some(Ok(supplied)) => self.put_giant(awaited, supplied),
            Some(Err(why)) => Err(NotPlaced::Unchanged(why)),
            None if is_late => {
                self.giants.supply.iter_mut().for_each(GiantSupply::stop_waiting);
                Err(NotPlaced::Unchanged("giant_too_late"))
            }
            None => return,
        };
        self.giants.awaited.pop_front();
        self.end_of_wait(awaited, ended);
        if let Some(next) = self.giants.awaited.front().copied() {
            self.order_page(next);
        }
    }

    /// Orders a page for a giant, on its nodes.
    fn order_page(&mut self, awaited: WaitingGiant) {
        let policy = self.page_policy(awaited);
        self.giants.supply.iter_mut().for_each(|supply| supply.order(policy));
    }

    /// Memory policy of the page that a giant waits for.
    fn page_policy(&self, awaited: WaitingGiant) -> Option<NodePolicy> {
        self.faults.ram(awaited.touch).placement().giant_policy(awaited.giant)
    }

    /// Whether the touch waits for the page of the giant around it.
    pub(super) fn is_awaited(&self, touch: Touch) -> bool {
        let giant = touch.window.start().align_down(PageSize::Giant1G);
        let region = self.faults.region(touch);
        self.giants.awaited.iter().any(|awaited| (self.faults.region(awaited.touch), awaited.giant) == (region, giant))
    }

    /// Whether the touch waits for a giant page from now on. Each giant is decided once, so that later touches of it
    /// cost nothing more.
    pub(super) fn await_giant(&mut self, touch: Touch) -> bool {
        let around = touch.window.start().align_down(PageSize::Giant1G);
        if self.giants.decided.contains(&(self.faults.region(touch), around)) {
            return false;
        }
        match self.may_be_giant(touch) {
            Ok(giant) => {
                self.faults.set_state(touch, State::Deferred);
                let since = self.host.now();
                let awaited = WaitingGiant { giant, touch, since };
                self.giants.awaited.push_back(awaited);
                self.order_page(awaited);
                true
            }
            Err(why) => {
                self.refuse_giant(touch, around, why);
                false
            }
        }
    }

    /// The giant around a touch, if one page may be put there.
    fn may_be_giant(&self, touch: Touch) -> Result<Gpa, Obstacle> {
        let ram = self.faults.ram(touch);
        let giant = self.faults.giant(touch).ok_or("giant_not_all_ram")?;
        if !GpaRange::new(giant, GIANT).is_some_and(|all| ram.placement().is_one(all)) {
            return Err("giant_in_two_cells");
        }
        if ram.backing().kind() != BackingKind::Anon {
            return Err("giant_not_anonymous");
        }
        if self.giants.supply.is_none() {
            return Err("giant_no_page");
        }
        if !self.faults.is_all_of_giant(touch, giant, |state| *state == State::Unasked) {
            return Err("giant_touched");
        }
        self.check_untouched(touch, giant).map(|()| giant)
    }

    /// Checks that the giant has no page, and that the guest gave back no part of it.
    fn check_untouched(&self, touch: Touch, giant: Gpa) -> Result<(), Obstacle> {
        let all = GpaRange::new(giant, GIANT).expect("RAM does not reach the end of 64 bits");
        if self.faults.ram(touch).given_back().book().is_any_given_back(all) {
            return Err("giant_given_back");
        }
        match holds_nothing(&self.pagemap, self.faults.giant_start(touch, giant), GIANT) {
            Ok(true) => Ok(()),
            Ok(false) => Err("giant_touched"),
            Err(error) => {
                tracing::debug!("{giant}: {error}");
                Err("giant_touched")
            }
        }
    }

    /// Maps the page at the giant, if that is still untouched. Since the first touch, only this thread could have
    /// placed a page in the giant, and it has answered none of its touches; but the guest may have given back a part.
    fn put_giant(&mut self, awaited: WaitingGiant, supplied: Supplied) -> Result<(), NotPlaced> {
        let WaitingGiant { giant, touch, .. } = awaited;
        self.check_untouched(touch, giant).map_err(NotPlaced::Unchanged)?;
        let ram = self.faults.ram(touch).clone();
        let claim = ram.claims().giant(giant).map_err(|claimed: Claimed| {
            tracing::debug!("{giant}: {claimed}");
            NotPlaced::Unchanged("giant_claimed")
        })?;
        placing::place(self.host.as_ref(), &ram, &claim, &supplied.page)?;
        self.counted.count(|report| report.giant_pages_made += u64::from(supplied.is_made));
        Ok(())
    }

    /// Counts the end of a giant's wait, and wakes the threads that wait in it: they find its page, or touch again.
    fn end_of_wait(&mut self, awaited: WaitingGiant, ended: Result<(), NotPlaced>) {
        let WaitingGiant { giant, touch, .. } = awaited;
        self.giants.decided.insert((self.faults.region(touch), giant));
        match ended {
            Ok(()) => {
                self.faults.giant_was_replaced(touch, giant);
                self.count_first(touch, PageSize::Giant1G, |report| report.answered_1g += 1);
            }
            Err(NotPlaced::Unchanged(why)) => self.refuse_giant(touch, giant, why),
            Err(NotPlaced::Replaced(why)) => {
                self.faults.giant_was_replaced(touch, giant);
                self.refuse_giant(touch, giant, why);
                self.count_first(touch, PageSize::Base4K, |report| *report.refused.entry(why).or_default() += 1);
            }
            Err(NotPlaced::Lost(error)) => {
                tracing::error!("cannot restore guest RAM at {giant}: {error}");
                self.faults.giant_was_replaced(touch, giant);
                self.refuse_giant(touch, giant, "giant_lost");
                self.count_first(touch, PageSize::Base4K, |report| *report.refused.entry("lost").or_default() += 1);
            }
        }
        if let Err(error) = self.faults.wake_giant(touch, giant) {
            tracing::error!("cannot wake the threads that wait in the giant at {giant}: {error}");
        }
    }

    /// Decides against a page of 1 GiB, and counts the reason.
    fn refuse_giant(&mut self, touch: Touch, giant: Gpa, why: Obstacle) {
        let region = self.faults.region(touch);
        self.giants.decided.insert((region, giant));
        self.counted.count(|report| {
            *report.giant_refused.entry(why).or_default() += 1;
            *report.regions[region].refused.entry(why).or_default() += 1;
        });
    }
}
