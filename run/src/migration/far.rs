//! RAM of a VM that runs here while a part of it is still at the source (post-copy).
//!
//! ```text
//!   a thread of the guest touches a missing page ─▶ Restorer ─▶ FarRam::read ── urgent wish ──▶ source
//!   Restorer's background, hottest first          ─────────────▶ read        ── wish ────────▶   │
//!                                                                 ▲                              │
//!                    window complete ◀─ checked, placed ◀─────────┴──── thread `arriving` ◀─ pages
//! ```
//!
//! A wish for the next windows is under way while one is placed, so that the background does not wait for each answer.
//! What arrives is only taken where it was wished for, and only the pages that are missing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use wideleaf_memory::restore::{ReadError, SavedRam, SavedWindow};
use wideleaf_policies::{PageSet, WindowIndex};

use super::POST_COPY_SILENCE_MAX;
use super::frames::{Kind, Malformed, PAGE_BYTES, PagesHead, Wish};
use super::link::{Limit, Lost, Receiver, Sender};

/// Most windows of the background that are under way, or here and not placed: 16 MiB. At 1 GiB/s, a touch waits for
/// at most that much in the network's buffers.
const AHEAD_MAX: usize = 8;

/// The missing part of RAM.
pub struct FarRam {
    from: String,
    windows: BTreeMap<WindowIndex, SavedWindow>,
    /// Missing windows, hottest first.
    order: Vec<WindowIndex>,
    sender: Arc<Mutex<Sender>>,
    inbox: Mutex<Inbox>,
    came: Condvar,
}

/// What has come, and what is under way.
#[derive(Default)]
struct Inbox {
    /// Place in the order up to which windows were asked for.
    next: usize,
    /// Windows that were asked for and have not come, and whether a thread may wait for them.
    asked: BTreeMap<WindowIndex, bool>,
    /// Messages with pages that are not placed yet.
    here: BTreeMap<WindowIndex, Vec<u8>>,
    /// Windows that were placed.
    placed: BTreeSet<WindowIndex>,
    /// Other messages, with their contents.
    said: VecDeque<(Kind, Vec<u8>)>,
    received: u64,
    /// Why nothing comes any more.
    lost: Option<String>,
}

impl FarRam {
    /// What `heads` say is missing, hottest first, comes from `from`.
    ///
    /// # Errors
    /// [`Malformed::Pages`] if a window is named twice.
    pub fn new(from: String, heads: &[PagesHead], sender: Arc<Mutex<Sender>>) -> Result<FarRam, Malformed> {
        let heads: Vec<&PagesHead> = heads.iter().filter(|head| !head.stored.is_empty()).collect();
        let order: Vec<WindowIndex> = heads.iter().map(|head| head.window).collect();
        let windows: BTreeMap<WindowIndex, SavedWindow> = heads
            .iter()
            .map(|head| {
                let has_others = head.stored != PageSet::ALL;
                let saved =
                    SavedWindow { pages: head.stored, was_huge: head.is_huge, has_others, ..Default::default() };
                (head.window, saved)
            })
            .collect();
        if windows.len() != order.len() {
            return Err(Malformed::Pages);
        }
        Ok(FarRam { from, windows, order, sender, inbox: Mutex::default(), came: Condvar::new() })
    }

    /// Missing windows, hottest first.
    pub fn order(&self) -> &[WindowIndex] {
        &self.order
    }

    /// Receives until every missing window and a message that satisfies `is_last` have come, or `keep_on` says no.
    /// A loss is told to all that wait.
    pub fn receive(&self, receiver: &mut Receiver, is_last: impl Fn(Kind) -> bool, keep_on: &dyn Fn() -> bool) -> bool {
        let received = self.receive_all(receiver, is_last, keep_on);
        if let Err(lost) = &received {
            self.lose(lost.to_string());
        }
        received.is_ok()
    }

    fn receive_all(
        &self,
        receiver: &mut Receiver,
        is_last: impl Fn(Kind) -> bool,
        keep_on: &dyn Fn() -> bool,
    ) -> Result<(), Lost> {
        let limit = Limit { silence: POST_COPY_SILENCE_MAX, until: None, keep_on };
        let (mut left, mut has_last) = (self.windows.keys().copied().collect::<BTreeSet<_>>(), false);
        while !left.is_empty() || !has_last {
            let mut content = Vec::new();
            let kind = receiver.next(&mut content, &limit)?;
            has_last |= is_last(kind);
            let mut inbox = self.inbox.lock();
            inbox.received = receiver.received();
            if kind == Kind::Pages {
                let window = self.check(&inbox, &content)?;
                inbox.asked.remove(&window);
                inbox.here.insert(window, content);
                left.remove(&window);
            } else {
                inbox.said.push_back((kind, content));
            }
            drop(inbox);
            self.came.notify_all();
        }
        Ok(())
    }

    /// The window of a message with pages, which was asked for and is whole.
    fn check(&self, inbox: &Inbox, content: &[u8]) -> Result<WindowIndex, Malformed> {
        let (head, _) = PagesHead::decode(content)?;
        let missing = self.windows.get(&head.window).ok_or(Malformed::Outside(head.window))?;
        if !inbox.asked.contains_key(&head.window) {
            return Err(Malformed::Order);
        }
        if head.stored.with(head.zero) != missing.pages {
            return Err(Malformed::Pages);
        }
        Ok(head.window)
    }

    /// Nothing comes any more, for this reason: reads fail from now on.
    pub fn lose(&self, why: String) {
        self.inbox.lock().lost.get_or_insert(why);
        self.came.notify_all();
    }

    /// Waits for the next message that has no pages; it must be of this kind.
    ///
    /// # Errors
    /// [`Lost`].
    pub fn expect(&self, kind: Kind, limit: &Limit<'_>) -> Result<Vec<u8>, Lost> {
        /// Interval at which the wait looks whether to keep on.
        const LOOK_EVERY: Duration = Duration::from_millis(50);
        let began = Instant::now();
        let mut inbox = self.inbox.lock();
        loop {
            if let Some((found, content)) = inbox.said.pop_front() {
                return if found == kind { Ok(content) } else { Err(Malformed::Order.into()) };
            }
            if inbox.lost.is_some() {
                return Err(Lost::Closed);
            }
            if !(limit.keep_on)() {
                return Err(Lost::Cancelled);
            }
            if began.elapsed() > limit.silence {
                return Err(Lost::Silent(limit.silence));
            }
            self.came.wait_for(&mut inbox, LOOK_EVERY);
        }
    }

    /// Bytes that have come over the connection.
    pub fn received(&self) -> u64 {
        self.inbox.lock().received
    }

    /// Asks for a window that a thread may wait for, unless that was done, or it is here.
    fn ask_now(&self, window: WindowIndex) -> Result<(), Lost> {
        let is_again = {
            let mut inbox = self.inbox.lock();
            if inbox.here.contains_key(&window) || inbox.asked.insert(window, true) == Some(true) {
                return Ok(());
            }
            // The thread that had it panicked.
            inbox.placed.remove(&window)
        };
        self.ask(Wish { window, is_urgent: true, is_again })
    }

    /// Asks for the next windows of the background.
    fn ask_ahead(&self) -> Result<(), Lost> {
        loop {
            let mut inbox = self.inbox.lock();
            let Some(window) = self.order.get(inbox.next).copied() else { return Ok(()) };
            if inbox.asked.len() + inbox.here.len() >= AHEAD_MAX {
                return Ok(());
            }
            inbox.next += 1;
            let is_known =
                inbox.asked.contains_key(&window) || inbox.here.contains_key(&window) || inbox.placed.contains(&window);
            if is_known {
                continue;
            }
            inbox.asked.insert(window, false);
            drop(inbox);
            self.ask(Wish { window, is_urgent: false, is_again: false })?;
        }
    }

    fn ask(&self, wish: Wish) -> Result<(), Lost> {
        let keep_on = || self.inbox.lock().lost.is_none();
        let limit = Limit { silence: POST_COPY_SILENCE_MAX, until: None, keep_on: &keep_on };
        self.sender.lock().send(Kind::Wish, &[&wish.encode()], &limit)
    }

    /// Waits for the message with the pages of a window.
    fn wait_for(&self, window: WindowIndex) -> Result<Vec<u8>, String> {
        let mut inbox = self.inbox.lock();
        loop {
            if let Some(content) = inbox.here.remove(&window) {
                inbox.placed.insert(window);
                return Ok(content);
            }
            if let Some(why) = &inbox.lost {
                return Err(why.clone());
            }
            self.came.wait(&mut inbox);
        }
    }

    fn fetch(&self, window: WindowIndex) -> Result<Vec<u8>, String> {
        self.ask_now(window).map_err(|lost| lost.to_string())?;
        let content = self.wait_for(window)?;
        // A loss shows where a window is waited for.
        let _ = self.ask_ahead();
        Ok(content)
    }
}

impl SavedRam for FarRam {
    fn window(&self, window: WindowIndex) -> SavedWindow {
        self.windows.get(&window).copied().unwrap_or_default()
    }

    fn read(&self, window: WindowIndex, into: &mut [u8]) -> Result<(), ReadError> {
        let not_sent = |why: String| {
            let why = format!(
                "{why}; the source keeps the VM paused as it was at the switch: `wideleaf vm SOCKET resume` there \
                 continues it, without what it did here"
            );
            ReadError::NotSent { window, from: self.from.clone(), why }
        };
        let content = self.fetch(window).map_err(not_sent)?;
        let (head, pages) = PagesHead::decode(&content).map_err(|malformed| not_sent(malformed.to_string()))?;
        let mut pages = pages.chunks_exact(PAGE_BYTES);
        for page in head.stored.with(head.zero).iter() {
            let place = &mut into[usize::from(page) * PAGE_BYTES..][..PAGE_BYTES];
            match if head.stored.contains(page) { pages.next() } else { None } {
                Some(content) => place.copy_from_slice(content),
                None => place.fill(0),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use wideleaf_policies::PageSize;

    use super::*;

    const PATIENT: Limit<'_> = Limit { silence: Duration::from_secs(60), until: None, keep_on: &|| true };
    const WINDOW: usize = PageSize::Huge2M.bytes().as_usize();

    fn head(window: u64, stored: &[u16], zero: &[u16]) -> PagesHead {
        let set = |pages: &[u16]| pages.iter().copied().collect();
        PagesHead { window: WindowIndex::new(window), is_huge: true, stored: set(stored), zero: set(zero) }
    }

    /// RAM of which these windows miss their first two pages, and the source's ends.
    fn far(windows: u64) -> (Arc<FarRam>, Receiver, Sender, Receiver) {
        let pair = || UnixStream::pair().expect("a pair of sockets");
        let ((ours, theirs), (from_theirs, to_ours)) = (pair(), pair());
        let heads: Vec<PagesHead> = (0..windows).map(|window| head(window, &[0, 1], &[])).collect();
        let sender = Arc::new(Mutex::new(Sender::new(ours.into())));
        let far = FarRam::new("there".to_owned(), &heads, sender).expect("each window once");
        let (wishes, pages) = (Receiver::new(theirs.into()), Sender::new(to_ours.into()));
        (Arc::new(far), wishes, pages, Receiver::new(from_theirs.into()))
    }

    fn send(pages: &mut Sender, head: &PagesHead, values: &[u8]) {
        let content: Vec<u8> = values.iter().flat_map(|value| [*value; PAGE_BYTES]).collect();
        pages.send(Kind::Pages, &[&head.encode(), &content], &PATIENT).expect("there is room");
    }

    fn wishes(from: &mut Receiver, count: usize) -> Vec<(u64, bool)> {
        let mut content = Vec::new();
        let mut next = || {
            from.expect(Kind::Wish, &mut content, &PATIENT).expect("it is open");
            Wish::decode(&content).map(|wish| (wish.window.get(), wish.is_urgent)).expect("it is a wish")
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn a_window_is_asked_for_and_placed_and_the_next_ones_are_under_way() {
        let (far, mut asked, mut pages, mut receiver) = far(20);
        std::thread::scope(|scope| {
            let of = far.clone();
            scope.spawn(move || of.receive(&mut receiver, |kind| kind == Kind::Go, &|| true));
            scope.spawn(|| {
                assert_eq!(wishes(&mut asked, 1), [(5, true)]);
                send(&mut pages, &head(5, &[1], &[0]), &[7]);
                pages.send(Kind::Go, &[], &PATIENT).expect("there is room");
                let ahead: Vec<(u64, bool)> = [0, 1, 2, 3, 4, 6, 7, 8].map(|window| (window, false)).into();
                assert_eq!(wishes(&mut asked, AHEAD_MAX), ahead, "the hottest first, none twice");
                drop(pages);
            });
            let mut into = vec![9; WINDOW];
            far.read(WindowIndex::new(5), &mut into).expect("it is sent");
            let at = |page: usize| into[page * PAGE_BYTES];
            assert_eq!([0, 1, 2].map(at), [0, 7, 9], "a page of zeroes, one with content, one that is not missing");
            assert!(far.expect(Kind::Go, &PATIENT).is_ok());
            let error = far.read(WindowIndex::new(3), &mut into).expect_err("the connection ends").to_string();
            assert!(error.contains("there does not send its pages") && error.contains("resume"), "{error}");
        });
    }

    #[test]
    fn what_was_not_asked_for_and_what_is_not_missing_is_refused() {
        let wrong = [head(5, &[0, 1], &[]), head(3, &[0], &[]), head(3, &[0, 1], &[2]), head(30, &[0], &[])];
        for head in wrong {
            let (far, mut asked, mut pages, mut receiver) = far(20);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(wishes(&mut asked, 1), [(3, true)]);
                    send(&mut pages, &head, &vec![1; usize::from(head.stored.len())]);
                });
                let of = far.clone();
                let received = scope.spawn(move || of.receive(&mut receiver, |_| true, &|| true));
                let error = far.read(WindowIndex::new(3), &mut vec![0; WINDOW]).expect_err("it is refused");
                assert!(error.to_string().contains("the other side sent"), "{error}");
                assert!(!received.join().expect("it does not panic"));
            });
        }
        let twice = [head(1, &[0], &[]), head(1, &[1], &[])];
        let sender = || Arc::new(Mutex::new(Sender::new(UnixStream::pair().expect("sockets").0.into())));
        assert_eq!(FarRam::new(String::new(), &twice, sender()).err(), Some(Malformed::Pages));
        let zero = FarRam::new(String::new(), &[head(1, &[], &[4])], sender()).expect("nothing is missing");
        assert_eq!((zero.order(), zero.window(WindowIndex::new(1))), (&[][..], SavedWindow::default()));
    }
}
