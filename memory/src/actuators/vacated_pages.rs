//! Pages that a swapper has between a window that was vacated and the swap that uses its huge page. All but new base
//! pages are in slots where windows were aside ([`crate::detached`]).
//!
//! ```text
//!   vacate ──▶ [huge] ──▶ swap: the slot is stale while its page is used
//!   swap   ──▶ [spare] ─▶ vacate: the same              stale ──▶ given back: after each use, also after a panic
//! ```

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

use crate::detached::Aside;
use crate::host::HostError;
use crate::mover::{ALL_PAGES, Mover, Place};
use crate::numa::placement::Source;

/// The pages of one swapper; see the module.
#[derive(Debug)]
pub(super) struct VacatedPages {
    /// Slots aside with a huge page that reads zero, and the source of the page.
    huge: Vec<(u16, Source)>,
    /// Slot aside with the 512 base pages of a window that got a vacated page, and their source.
    spare: Option<(u16, Source)>,
    /// Slots aside with pages that are used now or are of no more use.
    stale: Vec<u16>,
    /// Slot of this swapper for base pages.
    base: u16,
    /// Whether that slot may have pages.
    is_base_used: bool,
    /// Source of the pages that it may have.
    base_from: Source,
}

impl VacatedPages {
    /// No pages; `base` is the number of the swapper's slot for base pages.
    pub fn new(base: u16) -> VacatedPages {
        let (is_base_used, base_from) = (false, Source::default());
        VacatedPages { huge: Vec::new(), spare: None, stale: Vec::new(), base, is_base_used, base_from }
    }

    /// Number of huge pages.
    pub fn huge_pages(&self) -> usize {
        self.huge.len()
    }

    /// A place with 512 base pages of this source: those of a spare slot, or new ones.
    pub fn take_base_pages(&mut self, mover: &dyn Mover, from: Source) -> Result<Place, HostError> {
        if let Some((slot, _)) = self.spare.take_if(|(_, source)| *source == from) {
            self.stale.push(slot);
            if is_full_of_base_pages(mover, Place::Aside(slot))? {
                return Ok(Place::Aside(slot));
            }
        }
        if std::mem::replace(&mut self.is_base_used, true) && self.base_from != from {
            mover.discard(Place::Base(self.base), ALL_PAGES)?;
        }
        self.base_from = from;
        mover.populate_base(self.base, from)?;
        match is_full_of_base_pages(mover, Place::Base(self.base))? {
            true => Ok(Place::Base(self.base)),
            false => Err(no_base_pages()),
        }
    }

    /// The slot of a huge page of this source that a vacated window left.
    pub fn take_huge_page(&mut self, from: Source) -> Option<u16> {
        let at = self.huge.iter().rposition(|(_, source)| *source == from)?;
        let (slot, _) = self.huge.remove(at);
        self.stale.push(slot);
        Some(slot)
    }

    /// Takes over a slot: its pages are of no use yet.
    pub fn take_over(&mut self, slot: u16) {
        self.stale.push(slot);
    }

    /// The page of this slot, of that source, is whole and reads zero.
    pub fn keep_huge_page(&mut self, slot: u16, of: Source) {
        self.stale.retain(|stale| *stale != slot);
        self.huge.push((slot, of));
    }

    /// Takes over a slot with 512 base pages of that source, for the next window that is vacated.
    pub fn keep_base_pages(&mut self, slot: u16, of: Source) {
        self.stale.extend(self.spare.replace((slot, of)).map(|(slot, _)| slot));
    }

    /// Gives the pages back that are of no more use.
    pub fn give_back_stale(&mut self, aside: &Aside) {
        while let Some(slot) = self.stale.pop() {
            aside.give_back(slot);
        }
    }

    /// Gives all pages back.
    pub fn give_back(&mut self, aside: &Aside) {
        self.stale.extend(self.huge.drain(..).chain(self.spare.take()).map(|(slot, _)| slot));
        self.give_back_stale(aside);
        if std::mem::take(&mut self.is_base_used)
            && let Err(error) = aside.mover().discard(Place::Base(self.base), ALL_PAGES)
        {
            tracing::warn!("cannot give back base pages yet: {error}");
            self.is_base_used = true;
        }
    }
}

fn is_full_of_base_pages(mover: &dyn Mover, place: Place) -> Result<bool, HostError> {
    let look = mover.look(place)?;
    Ok(!look.is_huge && look.resident == BASE_PAGES_PER_WINDOW)
}

fn no_base_pages() -> HostError {
    HostError { what: "populating base pages", source: std::io::Error::from_raw_os_error(libc::ENOMEM) }
}
