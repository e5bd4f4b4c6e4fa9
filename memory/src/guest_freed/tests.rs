//! Compares the book with sets of pages, over random lists of events of guests and hosts.

use std::collections::BTreeSet;

use proptest::prelude::*;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::kib;

use super::*;

const WINDOWS: u64 = 3;
const PAGES: u64 = WINDOWS * 512;

/// Event of a page, by its number, or of a window.
#[derive(Clone, Copy, Debug)]
enum Event {
    Inflate(u64),
    Deflate(u64),
    /// A number of pages, from the first one, within their window are released: the inflated ones later, the
    /// others as reported.
    Release(u64, u64),
    /// These pages of a window are present.
    Seen(u64, u64),
    ForgetInflated,
}

fn event() -> impl Strategy<Value = Event> {
    let page = || 0..PAGES;
    prop_oneof![
        6 => page().prop_map(Event::Inflate),
        4 => page().prop_map(Event::Deflate),
        2 => (page(), 1_u64..512).prop_map(|(page, pages)| Event::Release(page, pages)),
        2 => (page(), 1_u64..512).prop_map(|(page, pages)| Event::Seen(page, pages)),
        1 => Just(Event::ForgetInflated),
    ]
}

fn gpa(page: u64) -> Gpa {
    Gpa::new(0) + kib(4) * page
}

fn run(page: u64, pages: u64) -> (WindowIndex, PageSet, std::ops::Range<u64>) {
    let end = (page + pages).min((page / 512 + 1) * 512);
    let window = WindowIndex::new(page / 512);
    let range = GpaRange::new(gpa(page), kib(4) * (end - page)).expect("it fits");
    (window, PageSet::of_range(window, range), page..end)
}

#[derive(Default)]
struct Model {
    inflated: BTreeSet<u64>,
    released: BTreeSet<u64>,
    reported: BTreeSet<u64>,
}

impl Model {
    fn happens(&mut self, event: Event) {
        match event {
            Event::Inflate(page) => {
                self.inflated.insert(page);
                self.released.remove(&page);
                self.reported.remove(&page);
            }
            Event::Deflate(page) => {
                for set in [&mut self.inflated, &mut self.released, &mut self.reported] {
                    set.remove(&page);
                }
            }
            Event::Release(page, pages) => {
                for page in run(page, pages).2 {
                    let is_inflated = self.inflated.contains(&page);
                    if is_inflated { &mut self.released } else { &mut self.reported }.insert(page);
                }
            }
            Event::Seen(page, pages) => {
                for page in run(page, pages).2 {
                    self.released.remove(&page);
                    self.reported.remove(&page);
                }
            }
            Event::ForgetInflated => {
                self.inflated.clear();
                self.released.clear();
            }
        }
    }

    fn count(&self, window: u64, of: impl Fn(&Model, u64) -> bool) -> u16 {
        (window * 512..(window + 1) * 512).filter(|page| of(self, *page)).count() as u16
    }
}

fn happens(book: &mut GivenBackPages, event: Event) {
    match event {
        Event::Inflate(page) => {
            book.inflate(gpa(page));
        }
        Event::Deflate(page) => {
            book.deflate(gpa(page));
        }
        Event::Release(page, pages) => {
            let (window, set, _) = run(page, pages);
            book.mark_released(window, set, set.len());
        }
        Event::Seen(page, pages) => {
            let (window, set, _) = run(page, pages);
            book.settle(window, set);
        }
        Event::ForgetInflated => book.forget_inflated(),
    }
}

proptest! {
    #[test]
    fn the_book_is_three_sets_of_pages(events in prop::collection::vec(event(), 0..200)) {
        let (mut book, mut model) = (GivenBackPages::default(), Model::default());
        for event in events {
            happens(&mut book, event);
            model.happens(event);
            for window in 0..WINDOWS {
                let index = WindowIndex::new(window);
                let all = model
                    .count(window, |model, page| model.inflated.contains(&page) || model.reported.contains(&page));
                let kept = model
                    .count(window, |model, page| model.inflated.contains(&page) && !model.released.contains(&page));
                prop_assert_eq!((book.count(index), book.kept(index).len()), (all, kept), "{}: {:?}", index, event);
            }
            prop_assert_eq!(book.counters().inflated_now, model.inflated.len() as u64);
            prop_assert!(book.counters().inflated_at_most >= book.counters().inflated_now);
            prop_assert_eq!(book.is_empty(), model.inflated.is_empty() && model.reported.is_empty());
        }
    }

    #[test]
    fn runs_are_the_pages_of_a_set_and_never_touch(pages in prop::collection::btree_set(0_u16..512, 0..512)) {
        let mut set = PageSet::default();
        pages.iter().for_each(|page| { set.insert(*page); });
        let window = WindowIndex::new(1);
        let runs = set.ranges(window);
        prop_assert!(runs.windows(2).all(|pair| pair[0].end() < pair[1].start()));
        let again = runs.iter().fold(PageSet::default(), |set, run| set.with(PageSet::of_range(window, *run)));
        prop_assert_eq!(again, set);
        prop_assert_eq!(runs.iter().map(|run| run.bytes()).sum::<Bytes>(), kib(4) * pages.len() as u64);
    }
}

#[test]
fn released_pages_that_are_present_again_are_checked_again() {
    let (mut book, window) = (GivenBackPages::default(), WindowIndex::new(0));
    (0..8).for_each(|page| assert!(book.inflate(gpa(page))));
    let (_, all, _) = run(0, 8);
    book.mark_released(window, all, all.len());
    assert!(!book.contradicts(window, 504) && book.contradicts(window, 505));
    assert!(book.to_look_at(window, false, 9).is_empty());
    book.settle(window, run(0, 2).1);
    assert_eq!((book.kept(window).len(), book.count(window)), (2, 8));
    assert_eq!(book.to_look_at(window, false, 9), [window]);
}

#[test]
fn one_page_beyond_the_tolerated_number_counts_as_given_back() {
    let (mut book, window) = (GivenBackPages::default(), WindowIndex::new(0));
    book.set_rules(GivenBackRules { tolerated: 2, ..GivenBackRules::default() });
    let giant = GpaRange::new(Gpa::new(0), PageSize::Giant1G.bytes()).expect("it fits");
    let seen = [0, 1, 2].map(|page| {
        book.inflate(gpa(page));
        (book.is_given_back(window), book.is_any_given_back(giant))
    });
    assert_eq!(seen, [(false, false), (false, false), (true, true)]);
}

#[test]
fn pages_in_the_balloon_are_runs_over_the_borders_of_windows() {
    let given_back = GivenBack::default();
    let mut book = given_back.book();
    let page = |number: u64| Gpa::new(number * 4096);
    for number in [1023, 1024, 1025, 5, 2000] {
        book.inflate(page(number));
    }
    book.deflate(page(2000));
    let run = |first: u64, pages: u64| GpaRange::new(page(first), PageSize::Base4K.bytes() * pages).expect("fits");
    assert_eq!(book.inflated_runs(), [run(5, 1), run(1023, 3)]);
}
