//! Contents of the fake mover's pages.

use std::collections::BTreeMap;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;

use crate::mover::Place;

/// A page of a place.
pub(super) type Page = (Place, u16);

const PAGES: usize = BASE_PAGES_PER_WINDOW as usize;

/// Contents of pages, in one array for each place: tests write and compare millions of pages in unoptimised code.
#[derive(Debug, Default)]
pub(super) struct FakePages(BTreeMap<Place, Box<[Option<u64>; PAGES]>>);

impl FakePages {
    /// Contents of a page; `None` if it does not exist.
    pub(super) fn get(&self, (place, page): Page) -> Option<u64> {
        self.0.get(&place)?[usize::from(page)]
    }

    /// Makes a page, or overwrites it.
    pub(super) fn insert(&mut self, (place, page): Page, value: u64) {
        self.0.entry(place).or_insert_with(|| Box::new([None; PAGES]))[usize::from(page)] = Some(value);
    }

    /// Removes a page, and returns its contents.
    pub(super) fn remove(&mut self, (place, page): Page) -> Option<u64> {
        self.0.get_mut(&place)?[usize::from(page)].take()
    }

    /// Existing pages of a place, with their contents.
    pub(super) fn of(&self, place: Place) -> impl Iterator<Item = (u16, u64)> + '_ {
        self.0.get(&place).into_iter().flat_map(|pages| existing(pages))
    }

    /// All existing pages, with their contents.
    pub(super) fn all(&self) -> impl Iterator<Item = (Page, u64)> + '_ {
        self.0.iter().flat_map(|(place, pages)| existing(pages).map(|(page, value)| ((*place, page), value)))
    }
}

fn existing(pages: &[Option<u64>; PAGES]) -> impl Iterator<Item = (u16, u64)> + '_ {
    (0..).zip(pages).filter_map(|(page, value)| Some((page, (*value)?)))
}
