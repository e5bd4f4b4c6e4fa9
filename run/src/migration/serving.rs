//! Sends the pages that the target misses, while its guest runs there or is about to (post-copy).
//!
//! ```text
//!   pause ─▶ what is missing, hottest windows first ─▶ machine ─▶ ready, go, running ─▶ complete
//!                                                         └── requests come, pages go: urgent ones first ──┘
//! ```
//!
//! Nothing writes RAM meanwhile: the guest and its devices stand still here. A window is sent once, unless the target
//! says that it needs it again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use parking_lot::Mutex;
use wideleaf_memory::GuestRam;
use wideleaf_memory::save::{LeftPages, SaveSink, read_pages};
use wideleaf_policies::{PageSet, PageSize, WindowIndex};

use super::frames::{Kind, MISSING_WINDOWS_MAX, Malformed, PageRequest, PagesHead};
use super::link::{Limit, LinkError, Receiver};

/// Fewest missing pages for which a window on a huge page is sent whole: its pages then come onto one huge page again,
/// at the cost of those that the target had.
const PAGES_FOR_WHOLE: u16 = 256;
/// Most requests that wait. The target has a thread or two for touches, and asks for a few windows in advance.
const WISHES_MAX: usize = 1024;

/// Pages that the target may need, by window.
pub type Missing = BTreeMap<WindowIndex, PageSet>;

/// Pages that stay here at first.
pub struct Serving<'a> {
    ram: &'a GuestRam,
    sink: &'a dyn SaveSink,
    missing: Missing,
    sent: BTreeSet<WindowIndex>,
    urgent: VecDeque<WindowIndex>,
    others: VecDeque<WindowIndex>,
    buffer: Vec<u8>,
}

/// What is missing of each window, for the target. `heat` puts the hottest windows first; of equally hot ones, those
/// with the most missing pages.
pub fn heads(
    left: &[LeftPages],
    is_huge: impl Fn(WindowIndex) -> bool,
    heat: impl Fn(WindowIndex) -> u16,
) -> Vec<PagesHead> {
    let mut heads: Vec<PagesHead> = left
        .iter()
        .map(|LeftPages { window, pages, zero }| {
            let is_huge = is_huge(*window);
            match is_huge && pages.len() >= PAGES_FOR_WHOLE {
                true => PagesHead { window: *window, is_huge, stored: PageSet::ALL, zero: PageSet::EMPTY },
                false => PagesHead { window: *window, is_huge, stored: *pages, zero: *zero },
            }
        })
        .collect();
    heads.sort_by_key(|head| std::cmp::Reverse((heat(head.window), head.stored.len())));
    heads
}

/// Pages of `heads`, by window.
pub fn missing_of(heads: &[PagesHead]) -> Missing {
    heads.iter().map(|head| (head.window, head.stored)).collect()
}

/// Contents of the messages that say what is missing.
pub fn messages(heads: &[PagesHead]) -> impl Iterator<Item = Vec<u8>> + '_ {
    heads.chunks(MISSING_WINDOWS_MAX).map(|heads| heads.iter().flat_map(PagesHead::encode).collect())
}

impl<'a> Serving<'a> {
    /// Serves these pages of `ram`, which go through `sink`.
    pub fn new(ram: &'a GuestRam, sink: &'a dyn SaveSink, missing: Missing) -> Serving<'a> {
        let buffer = vec![0; PageSize::Huge2M.bytes().as_usize()];
        let (sent, urgent, others) = Default::default();
        Serving { ram, sink, missing, sent, urgent, others, buffer }
    }

    /// The pages, sent or not.
    pub fn into_missing(self) -> Missing {
        self.missing
    }

    /// Number of pages that are missing.
    pub fn pages(&self) -> u64 {
        self.missing.values().map(|pages| u64::from(pages.len())).sum()
    }

    /// Sends what is wished for until a message of another kind comes, which is returned. `on_sent` is told of each
    /// window.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn until_other(
        &mut self,
        receiver: &Mutex<Receiver>,
        limit: &Limit<'_>,
        on_sent: &dyn Fn(u16),
    ) -> Result<Kind, LinkError> {
        let mut content = Vec::new();
        loop {
            if let Some(window) = self.urgent.pop_front() {
                on_sent(self.send(window)?);
                continue;
            }
            // A touch that has come goes before windows that are only asked for in advance.
            if !self.others.is_empty() && !receiver.lock().has_some() {
                let window = self.others.pop_front().expect("it is not empty");
                on_sent(self.send(window)?);
                continue;
            }
            match receiver.lock().next(&mut content, limit)? {
                Kind::PageRequest => self.request(PageRequest::decode(&content)?)?,
                other => return Ok(other),
            }
        }
    }

    fn request(&mut self, PageRequest { window, is_urgent, is_again }: PageRequest) -> Result<(), LinkError> {
        if !self.missing.contains_key(&window) {
            return Err(Malformed::Outside(window).into());
        }
        if self.urgent.len() + self.others.len() >= WISHES_MAX {
            return Err(Malformed::Order.into());
        }
        if is_again {
            self.sent.remove(&window);
        }
        if self.sent.contains(&window) {
            return Ok(());
        }
        let waits_in = |queue: &VecDeque<WindowIndex>| queue.contains(&window);
        if is_urgent && !waits_in(&self.urgent) {
            self.others.retain(|other| *other != window);
            self.urgent.push_back(window);
        } else if !is_urgent && !waits_in(&self.urgent) && !waits_in(&self.others) {
            self.others.push_back(window);
        }
        Ok(())
    }

    fn send(&mut self, window: WindowIndex) -> Result<u16, LinkError> {
        let pages = self.missing[&window];
        read_pages(self.ram, window, pages, &mut self.buffer);
        self.sink.write(window, &pages, &self.buffer).map_err(lost_of)?;
        self.sent.insert(window);
        Ok(pages.len())
    }
}

/// The sink's error: a lost connection, in general.
fn lost_of(error: std::io::Error) -> LinkError {
    match error.downcast::<LinkError>() {
        Ok(lost) => lost,
        Err(error) => LinkError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use wideleaf_memory::{BackingConfig, BackingKind};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange};

    use super::super::link::Sender;
    use super::*;

    const PATIENT: Limit<'_> = Limit { silence: Duration::from_secs(60), until: None, keep_on: &|| true };

    #[derive(Default)]
    struct RecordedPages(Mutex<Vec<(u64, u16, u64)>>);

    impl SaveSink for RecordedPages {
        fn write(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> std::io::Result<()> {
            let first = usize::from(pages.iter().next().expect("a window has some")) * 4096;
            let word = u64::from_ne_bytes(data[first..first + 8].try_into().expect("eight bytes"));
            self.0.lock().push((window.get(), pages.len(), word));
            Ok(())
        }
    }

    fn left(window: u64, pages: u16) -> LeftPages {
        LeftPages { window: WindowIndex::new(window), pages: (0..pages).collect(), zero: PageSet::EMPTY }
    }

    #[test]
    fn hot_windows_come_first_and_a_huge_window_of_which_most_is_missing_is_sent_whole() {
        let all = [left(0, 1), left(1, 300), left(2, 300), left(3, 20)];
        let is_huge = |window: WindowIndex| window.get() != 2;
        let heads = heads(&all, is_huge, |window| if window.get() == 3 { 9_000 } else { 0 });
        let found: Vec<_> = heads.iter().map(|head| (head.window.get(), head.stored.len(), head.is_huge)).collect();
        assert_eq!(found, [(3, 20, true), (1, 512, true), (2, 300, false), (0, 1, true)]);
        let read: Vec<_> = messages(&heads).map(|text| super::super::frames::decode_missing(&text)).collect();
        assert_eq!(read, [Ok(heads)]);
    }

    #[test]
    fn a_touch_goes_before_windows_that_were_asked_for_earlier_and_another_message_ends_it() {
        let range = GpaRange::new(Gpa::new(0), mib(8)).expect("it fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous base pages exist");
        let ram = GuestRam::map(&[range], backing).expect("8 MiB can be mapped");
        ram.share().expect("it has no owner");
        let words = ram.words(ram.ranges()[0]);
        (0..4).for_each(|window| words[window * (2 << 20) / 8].store(window as u64 + 10, Ordering::Relaxed));
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let (mut sender, receiver) = (Sender::new(ours.into()), Mutex::new(Receiver::new(theirs.into())));
        for (window, is_urgent) in [(0, false), (1, false), (2, false), (3, true), (2, true)] {
            let request = PageRequest { window: WindowIndex::new(window), is_urgent, is_again: false };
            sender.send(Kind::PageRequest, &[&request.encode()], &PATIENT).expect("there is room");
        }
        sender.send(Kind::Complete, &[], &PATIENT).expect("there is room");
        let sink = RecordedPages::default();
        let heads = heads(&[left(0, 1), left(1, 2), left(2, 3), left(3, 4)], |_| false, |_| 0);
        let mut serving = Serving::new(&ram, &sink, missing_of(&heads));
        let kind = serving.until_other(&receiver, &PATIENT, &|_| ()).expect("all is sent");
        assert_eq!(kind, Kind::Complete);
        assert_eq!(*sink.0.lock(), [(3, 4, 13), (2, 3, 12)], "those for which a thread waits");
        drop(sender);
        assert!(matches!(serving.until_other(&receiver, &PATIENT, &|_| ()), Err(LinkError::Closed)));
    }

    #[test]
    fn a_wish_for_pages_that_are_not_missing_is_refused() {
        let range = GpaRange::new(Gpa::new(0), mib(8)).expect("it fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous base pages exist");
        let ram = GuestRam::map(&[range], backing).expect("8 MiB can be mapped");
        let sink = RecordedPages::default();
        let mut serving = Serving::new(&ram, &sink, missing_of(&heads(&[left(0, 1)], |_| false, |_| 0)));
        let request = PageRequest { window: WindowIndex::new(1), is_urgent: true, is_again: false };
        assert!(matches!(serving.request(request), Err(LinkError::Malformed(Malformed::Outside(_)))));
    }
}
