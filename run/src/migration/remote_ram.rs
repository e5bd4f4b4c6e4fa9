//! RAM of a VM that runs here while a part of it is still at the source (post-copy).
//!
//! ```text
//!   a thread of the guest touches a missing page ─▶ Restorer ─▶ RemoteRam::read ── urgent request ─▶ source
//!   Restorer's background, hottest first          ─────────────▶ read           ── request ────────▶   │
//!                                                                 ▲                                    │
//!                    window complete ◀─ checked, placed ◀─────────┴────── thread `arriving` ◀──────  pages
//! ```
//!
//! The next windows are requested while one is placed, so that the background does not wait for each answer. Pages are
//! taken only for windows that were requested, and only those that are missing.
//!
//! A connection that is lost after `go` may be followed by another one ([`Offer`]): windows that were asked for and
//! have not come are asked for again. Until then, threads that need them wait. Another thread tries what is offered: a
//! connection that still works is only given up for one on which the source has answered.
//!
//! ```text
//!   client ── offer ─▶ thread `offers`: the source of this migration? ─ yes ─▶ thread `arriving` goes on over it
//!                                                                     └ no ──▶ all as before
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use wideleaf_memory::restore::{ReadError, SavedRam, SavedWindow};
use wideleaf_policies::{PageSet, WindowIndex};

use super::POST_COPY_SILENCE_MAX;
use super::frames::{Kind, Malformed, PAGE_BYTES, PageRequest, PagesHead};
use super::link::{Limit, LinkError, Receiver, Sender};
use super::offer::{Accepted, Done, Offer};

/// Most windows of the background that are under way, or here and not placed: 16 MiB. At 1 GiB/s, a touch waits for
/// at most that much in the network's buffers.
const AHEAD_MAX: usize = 8;

/// Interval at which a wait looks whether to keep on.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Answer to a connection that is not needed.
pub const NOTHING_MISSING: &str = "cannot recover the VM: no page of its RAM is missing here; if the VM at the source \
                                   is paused after a migration, `stop --how kill` ends it";

/// Why a connection is of no use any more, where another one was accepted.
const REPLACED: &str = "another one takes its place";

/// The missing part of RAM.
pub struct RemoteRam {
    from: String,
    windows: BTreeMap<WindowIndex, SavedWindow>,
    /// Missing windows, hottest first.
    order: Vec<WindowIndex>,
    sender: Arc<Mutex<Sender>>,
    /// Name of the migration, if a lost connection may be followed by another one.
    id: Option<String>,
    inbox: Mutex<Inbox>,
    came: Condvar,
    /// Told of an offer, and of a loss.
    offered: Condvar,
}

/// A connection that may take the place of the present one.
#[derive(Default)]
enum Successor {
    /// No other connection came.
    #[default]
    None,
    /// It was not tried yet.
    Offered(Offer),
    /// The source is asked which migration it is about.
    Tried,
    /// The source has answered.
    Accepted(Accepted),
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
    /// Whether `go` has come.
    has_go: bool,
    /// Bytes that came over connections before this one.
    received_before: u64,
    /// Bytes that came over this connection.
    received: u64,
    /// Why nothing comes until there is another connection.
    cut: Option<String>,
    /// Number of connections that were lost.
    cuts: u32,
    /// Number of connections before this one.
    before: u32,
    /// The next connection.
    successor: Successor,
    /// Whether no other connection may follow this one.
    is_last: bool,
    /// Whether all has come, and the source hears of it over this connection.
    is_finished: bool,
    /// Told of the end: the client that brought the connection.
    client: Option<Done>,
    /// Why nothing comes any more.
    lost: Option<String>,
}

impl Inbox {
    /// Whether all of this number of windows have come.
    fn has_all(&self, windows: usize) -> bool {
        self.here.len() + self.placed.len() == windows
    }

    /// Why no other connection may follow any more, if that is so.
    fn refusal(&self) -> Option<String> {
        match &self.lost {
            Some(why) => Some(format!("cannot receive the rest of the VM's RAM: {why}")),
            None => (self.is_last || self.is_finished).then(|| NOTHING_MISSING.to_owned()),
        }
    }

    /// What answers the client of a connection that is not needed any more.
    fn take_done(&mut self) -> Option<Done> {
        match std::mem::take(&mut self.successor) {
            Successor::Offered(offer) => Some(offer.done),
            Successor::Accepted(accepted) => Some(accepted.done),
            Successor::None | Successor::Tried => None,
        }
    }
}

impl RemoteRam {
    /// What `heads` say is missing, hottest first, comes from `from`. `id`: name of the migration, if a lost connection
    /// may be followed by another one.
    ///
    /// # Errors
    /// [`Malformed::Pages`] if a window is named twice.
    pub fn new(
        from: String,
        heads: &[PagesHead],
        sender: Arc<Mutex<Sender>>,
        id: Option<String>,
    ) -> Result<RemoteRam, Malformed> {
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
        let (inbox, came, offered) = Default::default();
        Ok(RemoteRam { from, windows, order, sender, id, inbox, came, offered })
    }

    /// Whether another connection may follow this one.
    pub fn may_be_recovered(&self) -> bool {
        self.id.is_some()
    }

    /// Missing windows, hottest first.
    pub fn order(&self) -> &[WindowIndex] {
        &self.order
    }

    /// Receives until every missing window and `go` have come, or `keep_on` says no. Waits for another connection where
    /// that may follow; any other loss is told to all that wait.
    pub fn receive(&self, receiver: &mut Receiver, keep_on: &dyn Fn() -> bool) -> bool {
        loop {
            let lost = match self.receive_all(receiver, keep_on) {
                Ok(()) if self.finish() => return true,
                Ok(()) => REPLACED.to_owned(),
                // The source's own words.
                Err(LinkError::Refused(why)) => why,
                Err(lost) => lost.to_string(),
            };
            if !(keep_on() && self.may_be_followed()) {
                self.lose(lost);
                return false;
            }
            self.cut(&lost);
            let Some(accepted) = self.next_connection(keep_on) else {
                self.lose(lost);
                return false;
            };
            self.begin_again(accepted, receiver);
        }
    }

    fn receive_all(&self, receiver: &mut Receiver, keep_on: &dyn Fn() -> bool) -> Result<(), LinkError> {
        let keep_on = || keep_on() && self.inbox.lock().cut.is_none();
        let limit = Limit { silence: POST_COPY_SILENCE_MAX, until: None, keep_on: &keep_on };
        while !self.has_come() {
            let mut content = Vec::new();
            let kind = receiver.next(&mut content, &limit)?;
            let mut inbox = self.inbox.lock();
            inbox.received = receiver.received();
            match kind {
                Kind::Pages => {
                    let window = self.check(&inbox, &content)?;
                    inbox.asked.remove(&window);
                    inbox.here.insert(window, content);
                }
                Kind::Go if !inbox.has_go => inbox.has_go = true,
                _ => return Err(Malformed::Order.into()),
            }
            drop(inbox);
            self.came.notify_all();
        }
        Ok(())
    }

    fn has_come(&self) -> bool {
        let inbox = self.inbox.lock();
        inbox.has_go && inbox.has_all(self.windows.len())
    }

    /// All has come: an offer is not needed. Returns false if another connection has taken the place of this one: the
    /// source waits for the end there.
    fn finish(&self) -> bool {
        let mut inbox = self.inbox.lock();
        if matches!(inbox.successor, Successor::Accepted(_)) && inbox.refusal().is_none() {
            return false;
        }
        inbox.is_finished = true;
        inbox.cut = None;
        let done = inbox.take_done();
        drop(inbox);
        done.into_iter().for_each(|done| done(Err(NOTHING_MISSING.to_owned())));
        true
    }

    fn may_be_followed(&self) -> bool {
        let inbox = self.inbox.lock();
        self.id.is_some() && inbox.has_go && !inbox.is_last
    }

    /// The connection is of no use any more; another one may come.
    fn cut(&self, why: &str) {
        let mut inbox = self.inbox.lock();
        let why = inbox.cut.get_or_insert(why.to_owned()).clone();
        inbox.cuts += 1;
        let client = inbox.client.take();
        drop(inbox);
        self.came.notify_all();
        tracing::warn!("the connection to the source at {} is lost, {why}; another one may follow", self.from);
        client.into_iter().for_each(|client| client(Err(format!("cannot receive the rest of the VM's RAM: {why}"))));
    }

    /// Waits for a connection on which the source of this migration has answered.
    fn next_connection(&self, keep_on: &dyn Fn() -> bool) -> Option<Accepted> {
        let mut inbox = self.inbox.lock();
        while inbox.refusal().is_none() && keep_on() {
            match std::mem::take(&mut inbox.successor) {
                Successor::Accepted(accepted) => return Some(accepted),
                other => inbox.successor = other,
            }
            self.came.wait_for(&mut inbox, LOOK_EVERY);
        }
        None
    }

    /// Tries the connections that are offered, until none is needed any more or `keep_on` says no. One on which the
    /// source of this migration answers takes the place of the present one, which stays in use until then.
    pub fn try_offers(&self, keep_on: &dyn Fn() -> bool) {
        let Some(id) = &self.id else { return };
        let keep_on = || keep_on() && self.inbox.lock().refusal().is_none();
        while let Some(offer) = self.next_offer(&keep_on) {
            match offer.accept(id, &keep_on) {
                Ok(accepted) => self.succeed(accepted),
                Err((why, done)) => self.fail(why, done),
            }
        }
    }

    fn next_offer(&self, keep_on: &dyn Fn() -> bool) -> Option<Offer> {
        while keep_on() {
            let mut inbox = self.inbox.lock();
            match std::mem::take(&mut inbox.successor) {
                Successor::Offered(offer) => {
                    inbox.successor = Successor::Tried;
                    return Some(offer);
                }
                other => inbox.successor = other,
            }
            self.offered.wait_for(&mut inbox, LOOK_EVERY);
        }
        None
    }

    /// The source has answered: the present connection is of no use any more.
    fn succeed(&self, accepted: Accepted) {
        let mut inbox = self.inbox.lock();
        if let Some(why) = inbox.refusal() {
            drop(inbox);
            return accepted.refuse(&why);
        }
        inbox.cut.get_or_insert_with(|| REPLACED.to_owned());
        inbox.successor = Successor::Accepted(accepted);
        drop(inbox);
        self.came.notify_all();
    }

    /// All is as before the offer.
    fn fail(&self, why: String, done: Done) {
        let mut inbox = self.inbox.lock();
        inbox.successor = Successor::None;
        let why = inbox.refusal().unwrap_or(why);
        drop(inbox);
        tracing::warn!("a connection for the VM that runs here: {why}");
        done(Err(why));
    }

    /// Goes on over another connection: asks again for what has not come.
    fn begin_again(&self, accepted: Accepted, receiver: &mut Receiver) {
        let Accepted { sender, receiver: new, done } = accepted;
        let old = std::mem::replace(receiver, new);
        // No thread holds it for longer than it takes to see the loss. Until the end of this change: a loss that a
        // thread then sees is that of the connection that it has used.
        let mut place = self.sender.lock();
        *place = sender;
        let mut inbox = self.inbox.lock();
        inbox.received_before += old.received();
        inbox.received = receiver.received();
        inbox.cut = None;
        inbox.before += 1;
        inbox.client = Some(done);
        let mut requests: Vec<PageRequest> = inbox
            .asked
            .iter()
            .map(|(window, is_urgent)| PageRequest { window: *window, is_urgent: *is_urgent, is_again: false })
            .collect();
        drop(inbox);
        drop(place);
        requests.sort_by_key(|request| !request.is_urgent);
        // A loss shows where the pages are received.
        let _ = requests.into_iter().try_for_each(|request| self.ask(request));
    }

    /// Takes another connection, over which missing pages come once the source has answered there.
    ///
    /// # Errors
    /// One line if there is nothing to wait for.
    pub fn offer(&self, offer: Offer) -> Result<(), String> {
        let mut inbox = self.inbox.lock();
        if let Some(why) = inbox.refusal() {
            return Err(why);
        }
        if self.id.is_none() || inbox.has_all(self.windows.len()) {
            return Err(NOTHING_MISSING.to_owned());
        }
        if !inbox.has_go {
            return Err("cannot recover the VM: its migration has not come to its switch; wait for that".to_owned());
        }
        if !matches!(inbox.successor, Successor::None) {
            return Err("cannot recover the VM: another connection for it is tried now; wait for its end".to_owned());
        }
        inbox.successor = Successor::Offered(offer);
        drop(inbox);
        self.offered.notify_all();
        Ok(())
    }

    /// Why missing pages do not come until there is another connection, if that is so.
    pub fn why_cut(&self) -> Option<String> {
        let inbox = self.inbox.lock();
        let text = |why: &String| {
            format!(
                "pages of its RAM are missing, and the connection to {} is lost, {why}: `recover --incoming ADDRESS` \
                 here, then `recover ADDRESS` at the source",
                self.from
            )
        };
        inbox.cut.as_ref().filter(|_| inbox.lost.is_none()).map(text)
    }

    /// No other connection may follow. Returns whether the last one is lost already, and pages are missing.
    pub fn takes_no_other(&self) -> bool {
        let mut inbox = self.inbox.lock();
        inbox.is_last = true;
        inbox.cut.is_some() && inbox.lost.is_none() && !inbox.has_all(self.windows.len())
    }

    /// Number of connections that were lost.
    pub fn cuts(&self) -> u32 {
        self.inbox.lock().cuts
    }

    /// The client that brought the connection, if one waits for the end.
    pub fn take_client(&self) -> Option<Done> {
        self.inbox.lock().client.take()
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
        let mut inbox = self.inbox.lock();
        let why = inbox.lost.get_or_insert(why).clone();
        let waiting = [inbox.client.take(), inbox.take_done()];
        drop(inbox);
        self.came.notify_all();
        self.offered.notify_all();
        let text = format!("cannot receive the rest of the VM's RAM: {why}");
        waiting.into_iter().flatten().for_each(|client| client(Err(text.clone())));
    }

    /// Waits for `go`.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn expect_go(&self, limit: &Limit<'_>) -> Result<(), LinkError> {
        let began = Instant::now();
        let mut inbox = self.inbox.lock();
        loop {
            if inbox.has_go {
                return Ok(());
            }
            if !(limit.keep_on)() {
                return Err(LinkError::Cancelled);
            }
            if let Some(why) = &inbox.lost {
                return Err(LinkError::Before(why.clone()));
            }
            if began.elapsed() > limit.silence {
                return Err(LinkError::Silent(limit.silence));
            }
            self.came.wait_for(&mut inbox, LOOK_EVERY);
        }
    }

    /// Bytes that have come over the connection.
    pub fn received(&self) -> u64 {
        let inbox = self.inbox.lock();
        inbox.received_before + inbox.received
    }

    /// Asks for a window that a thread may wait for, unless that was done, or it is here.
    fn ask_now(&self, window: WindowIndex) -> Result<(), LinkError> {
        let is_again = {
            let mut inbox = self.inbox.lock();
            if inbox.here.contains_key(&window) || inbox.asked.insert(window, true) == Some(true) {
                return Ok(());
            }
            // The thread that had it panicked.
            inbox.placed.remove(&window)
        };
        self.ask(PageRequest { window, is_urgent: true, is_again })
    }

    /// Asks for the next windows of the background.
    fn ask_ahead(&self) -> Result<(), LinkError> {
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
            self.ask(PageRequest { window, is_urgent: false, is_again: false })?;
        }
    }

    /// Sends a request. Where another connection may follow, a loss is no error: the request is sent again over it.
    fn ask(&self, request: PageRequest) -> Result<(), LinkError> {
        let keep_on = || {
            let inbox = self.inbox.lock();
            inbox.lost.is_none() && inbox.cut.is_none()
        };
        let limit = Limit { silence: POST_COPY_SILENCE_MAX, until: None, keep_on: &keep_on };
        let mut sender = self.sender.lock();
        let before = self.inbox.lock().before;
        let sent = sender.send(Kind::PageRequest, &[&request.encode()], &limit);
        drop(sender);
        match sent {
            Err(lost) if self.id.is_some() => {
                let mut inbox = self.inbox.lock();
                // Unless another connection has taken the place of that one meanwhile, or none is needed any more.
                if inbox.before == before && !inbox.is_finished {
                    inbox.cut.get_or_insert(lost.to_string());
                }
                Ok(())
            }
            sent => sent,
        }
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

impl SavedRam for RemoteRam {
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
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use wideleaf_control::vm::PostCopyView;
    use wideleaf_policies::PageSize;

    use super::super::frames::{Header, PAGES_HEAD_BYTES};
    use super::*;

    const PATIENT: Limit<'_> = Limit { silence: Duration::from_secs(60), until: None, keep_on: &|| true };
    const WINDOW: usize = PageSize::Huge2M.bytes().as_usize();

    fn head(window: u64, stored: &[u16], zero: &[u16]) -> PagesHead {
        let set = |pages: &[u16]| pages.iter().copied().collect();
        PagesHead { window: WindowIndex::new(window), is_huge: true, stored: set(stored), zero: set(zero) }
    }

    /// RAM of which these windows miss their first two pages, and the source's ends.
    fn remote(windows: u64) -> (Arc<RemoteRam>, Receiver, Sender, Receiver) {
        remote_of(windows, None)
    }

    /// The same for a migration of this name.
    fn remote_of(windows: u64, id: Option<String>) -> (Arc<RemoteRam>, Receiver, Sender, Receiver) {
        let pair = || UnixStream::pair().expect("a pair of sockets");
        let ((ours, theirs), (from_theirs, to_ours)) = (pair(), pair());
        let heads: Vec<PagesHead> = (0..windows).map(|window| head(window, &[0, 1], &[])).collect();
        let sender = Arc::new(Mutex::new(Sender::new(ours.into())));
        let remote = RemoteRam::new("there".to_owned(), &heads, sender, id).expect("each window once");
        let (requests, pages) = (Receiver::new(theirs.into()), Sender::new(to_ours.into()));
        (Arc::new(remote), requests, pages, Receiver::new(from_theirs.into()))
    }

    fn send(pages: &mut Sender, head: &PagesHead, values: &[u8]) {
        let content: Vec<u8> = values.iter().flat_map(|value| [*value; PAGE_BYTES]).collect();
        pages.send(Kind::Pages, &[&head.encode(), &content], &PATIENT).expect("there is room");
    }

    fn requests(from: &mut Receiver, count: usize) -> Vec<(u64, bool)> {
        let mut content = Vec::new();
        let mut next = || {
            from.expect(Kind::PageRequest, &mut content, &PATIENT).expect("it is open");
            PageRequest::decode(&content)
                .map(|request| (request.window.get(), request.is_urgent))
                .expect("it is a request")
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn a_window_is_asked_for_and_placed_and_the_next_ones_are_under_way() {
        let (remote, mut asked, mut pages, mut receiver) = remote(20);
        std::thread::scope(|scope| {
            let of = remote.clone();
            scope.spawn(move || of.receive(&mut receiver, &|| true));
            scope.spawn(|| {
                assert_eq!(requests(&mut asked, 1), [(5, true)]);
                send(&mut pages, &head(5, &[1], &[0]), &[7]);
                pages.send(Kind::Go, &[], &PATIENT).expect("there is room");
                let ahead: Vec<(u64, bool)> = [0, 1, 2, 3, 4, 6, 7, 8].map(|window| (window, false)).into();
                assert_eq!(requests(&mut asked, AHEAD_MAX), ahead, "the hottest first, none twice");
                drop(pages);
            });
            let mut into = vec![9; WINDOW];
            remote.read(WindowIndex::new(5), &mut into).expect("it is sent");
            let at = |page: usize| into[page * PAGE_BYTES];
            assert_eq!([0, 1, 2].map(at), [0, 7, 9], "a page of zeroes, one with content, one that is not missing");
            assert!(remote.expect_go(&PATIENT).is_ok());
            let error = remote.read(WindowIndex::new(3), &mut into).expect_err("the connection ends").to_string();
            assert!(error.contains("there does not send its pages") && error.contains("resume"), "{error}");
        });
    }

    #[test]
    fn what_was_not_asked_for_and_what_is_not_missing_is_refused() {
        let wrong = [head(5, &[0, 1], &[]), head(3, &[0], &[]), head(3, &[0, 1], &[2]), head(30, &[0], &[])];
        for head in wrong {
            let (remote, mut asked, mut pages, mut receiver) = remote(20);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(requests(&mut asked, 1), [(3, true)]);
                    send(&mut pages, &head, &vec![1; usize::from(head.stored.len())]);
                });
                let of = remote.clone();
                let received = scope.spawn(move || of.receive(&mut receiver, &|| true));
                let error = remote.read(WindowIndex::new(3), &mut vec![0; WINDOW]).expect_err("it is refused");
                assert!(error.to_string().contains("the other side sent"), "{error}");
                assert!(!received.join().expect("it does not panic"));
            });
        }
        let twice = [head(1, &[0], &[]), head(1, &[1], &[])];
        let sender = || Arc::new(Mutex::new(Sender::new(UnixStream::pair().expect("sockets").0.into())));
        assert_eq!(RemoteRam::new(String::new(), &twice, sender(), None).err(), Some(Malformed::Pages));
        let zero = RemoteRam::new(String::new(), &[head(1, &[], &[4])], sender(), None).expect("nothing is missing");
        assert_eq!((zero.order(), zero.window(WindowIndex::new(1))), (&[][..], SavedWindow::default()));
    }

    #[test]
    fn a_source_that_calls_the_migration_off_is_heard_in_its_own_words() {
        let (remote, _asked, mut pages, mut receiver) = remote(2);
        pages.send(Kind::Failed, &[b"the VM stays at the source"], &PATIENT).expect("there is room");
        assert!(!remote.receive(&mut receiver, &|| true));
        let lost = remote.expect_go(&PATIENT).expect_err("it does not run here");
        assert_eq!(lost.to_string(), "the VM stays at the source");
    }

    /// Another connection: its offer, the client's answer, and the source's ends of it. The client stays.
    struct Another {
        offer: Offer,
        answer: std::sync::mpsc::Receiver<Result<PostCopyView, String>>,
        asked: Receiver,
        pages: Sender,
        _client: std::io::PipeWriter,
    }

    fn another() -> Another {
        let pair = || UnixStream::pair().expect("a pair of sockets");
        let ((ours, theirs), (from_theirs, to_ours)) = (pair(), pair());
        let (client, keeps) = std::io::pipe().expect("a pipe");
        let (tell, answer) = std::sync::mpsc::channel();
        let done = move |end| tell.send(end).expect("the test waits for it");
        let files = vec![from_theirs.into(), ours.into(), client.into()];
        let offer = Offer::new(files, Box::new(done)).expect("three files");
        Another {
            offer,
            answer,
            asked: Receiver::new(theirs.into()),
            pages: Sender::new(to_ours.into()),
            _client: keeps,
        }
    }

    /// The source's first message on another connection.
    fn greet(another: &mut Another, id: &str) -> Result<(), LinkError> {
        another.pages.greet(&PATIENT)?;
        another.asked.greeted(&PATIENT)?;
        another.pages.send(Kind::Again, &[id.as_bytes()], &PATIENT)?;
        another.asked.expect(Kind::Welcome, &mut Vec::new(), &PATIENT)
    }

    /// Another connection that was offered.
    fn offered(remote: &RemoteRam) -> Another {
        let mut another_one = another();
        remote.offer(std::mem::replace(&mut another_one.offer, another().offer)).expect("pages are missing");
        another_one
    }

    fn refuses_another_migration(remote: &RemoteRam) {
        let mut wrong = offered(remote);
        let refused = greet(&mut wrong, "another one");
        assert!(matches!(&refused, Err(LinkError::Refused(why)) if why.contains("another migration")), "{refused:?}");
        let why = answer(&wrong).expect_err("it is another migration");
        assert!(why.contains("connect to the target of this one"), "{why}");
    }

    fn answer(another: &Another) -> Result<PostCopyView, String> {
        another.answer.recv_timeout(Duration::from_secs(60)).expect("it is answered")
    }

    /// Another connection, on which the source of this migration has answered.
    fn accepted(remote: &RemoteRam) -> Another {
        let mut another_one = another();
        let offer = std::mem::replace(&mut another_one.offer, another().offer);
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| offer.accept("this one", &|| true));
            greet(&mut another_one, "this one").expect("it is the right one");
            remote.succeed(accepted.join().expect("it does not panic").unwrap_or_else(|(why, _)| panic!("{why}")));
        });
        another_one
    }

    /// Sends `go`, and waits until it is there.
    fn go(remote: &RemoteRam, pages: &mut Sender) {
        pages.send(Kind::Go, &[], &PATIENT).expect("there is room");
        remote.expect_go(&PATIENT).expect("it was sent");
    }

    #[test]
    fn a_second_go_and_a_message_that_may_not_come_here_are_refused() {
        for kinds in [&[Kind::Machine][..], &[Kind::Go, Kind::Go], &[Kind::Go, Kind::Missing], &[Kind::Left]] {
            let (remote, _asked, mut pages, mut receiver) = remote(1);
            kinds.iter().for_each(|kind| pages.send(*kind, &[], &PATIENT).expect("there is room"));
            assert!(!remote.receive(&mut receiver, &|| true), "{kinds:?}");
            let error = remote.read(WindowIndex::new(0), &mut vec![0; WINDOW]).expect_err("it is refused").to_string();
            assert!(error.contains("out of its order"), "{kinds:?}: {error}");
        }
    }

    #[test]
    fn a_connection_that_works_stays_where_another_one_is_silent_or_of_another_migration() {
        let (remote, mut asked, mut pages, mut receiver) = remote_of(1, Some("this one".to_owned()));
        std::thread::scope(|scope| {
            let received = scope.spawn(|| remote.receive(&mut receiver, &|| true));
            scope.spawn(|| remote.try_offers(&|| true));
            assert!(remote.offer(another().offer).expect_err("before `go`").contains("its switch"));
            go(&remote, &mut pages);
            refuses_another_migration(&remote);
            let silent = offered(&remote);
            // Long enough for a look.
            std::thread::sleep(2 * LOOK_EVERY);
            assert_eq!((remote.why_cut(), remote.cuts()), (None, 0));
            let read = scope.spawn(|| remote.read(WindowIndex::new(0), &mut vec![0; WINDOW]));
            assert_eq!(requests(&mut asked, 1), [(0, true)]);
            send(&mut pages, &head(0, &[0, 1], &[]), &[7, 8]);
            read.join().expect("it does not panic").expect("it came");
            assert!(received.join().expect("it does not panic"));
            assert_eq!(answer(&silent).expect_err("all has come"), NOTHING_MISSING);
            assert_eq!((remote.why_cut(), remote.takes_no_other()), (None, false));
        });
    }

    #[test]
    fn another_connection_takes_the_place_of_one_on_which_bytes_come_without_a_gap() {
        let (remote, _asked, ..) = remote_of(1, Some("this one".to_owned()));
        let (mut trickle, old) = UnixStream::pair().expect("a pair of sockets");
        let (content, mut receiver) = (vec![0; PAGES_HEAD_BYTES + WINDOW], Receiver::new(old.into()));
        let header = Header { kind: Kind::Pages, number: 0, bytes: content.len(), checksum: 0 }.encode();
        trickle.write_all(&header).expect("there is room");
        std::thread::scope(|scope| {
            let received = scope.spawn(|| remote.receive(&mut receiver, &|| true));
            scope.spawn(|| remote.try_offers(&|| true));
            let read = scope.spawn(|| remote.read(WindowIndex::new(0), &mut vec![0; WINDOW]));
            remote.inbox.lock().has_go = true;
            // Until nothing reads them.
            scope.spawn(move || {
                let bytes = content.iter().take_while(|byte| trickle.write_all(&[**byte]).is_ok());
                bytes.for_each(|_| std::thread::sleep(Duration::from_millis(5)));
            });
            let mut right = offered(&remote);
            greet(&mut right, "this one").expect("it is the right one");
            assert_eq!(requests(&mut right.asked, 1), [(0, true)], "once more");
            send(&mut right.pages, &head(0, &[0, 1], &[]), &[7, 8]);
            read.join().expect("it does not panic").expect("it came");
            assert!(received.join().expect("it does not panic"));
            assert_eq!((remote.why_cut(), remote.cuts()), (None, 1));
            assert!(remote.take_client().is_some(), "it is answered with the figures");
        });
    }

    #[test]
    fn an_offer_that_was_not_tried_when_all_has_come_is_answered_and_no_loss_is_told() {
        let (remote, _asked, _pages, mut receiver) = remote_of(0, Some("this one".to_owned()));
        let late = another();
        remote.inbox.lock().successor = Successor::Offered(late.offer);
        remote.inbox.lock().cut = Some("a thread saw a loss".to_owned());
        remote.inbox.lock().has_go = true;
        assert!(remote.receive(&mut receiver, &|| true));
        let why = late.answer.recv().expect("it is answered").expect_err("all has come");
        assert_eq!((why.as_str(), remote.why_cut(), remote.takes_no_other()), (NOTHING_MISSING, None, false));
    }

    #[test]
    fn the_source_hears_of_the_end_on_the_connection_on_which_it_has_answered_last() {
        let (remote, _asked, _pages, mut receiver) = remote_of(0, Some("this one".to_owned()));
        remote.inbox.lock().has_go = true;
        let mut last = accepted(&remote);
        assert!(remote.receive(&mut receiver, &|| true));
        remote.sender.lock().send(Kind::Complete, &[], &PATIENT).expect("there is room");
        last.asked.expect(Kind::Complete, &mut Vec::new(), &PATIENT).expect("it hears of it");
        assert_eq!((remote.why_cut(), remote.cuts(), remote.take_client().is_some()), (None, 1, true));
    }

    #[test]
    fn a_connection_that_is_accepted_after_the_end_is_refused_on_both_sides() {
        let (remote, _asked, _pages, mut receiver) = remote_of(0, Some("this one".to_owned()));
        remote.inbox.lock().has_go = true;
        assert!(remote.receive(&mut receiver, &|| true));
        let mut late = accepted(&remote);
        assert_eq!(answer(&late).expect_err("all has come"), NOTHING_MISSING);
        let told = late.asked.next(&mut Vec::new(), &PATIENT);
        assert!(
            matches!(&told, Err(LinkError::Refused(why)) if why.contains("no page of its RAM is missing")),
            "{told:?}"
        );
    }

    #[test]
    fn a_read_waits_for_another_connection_of_the_same_migration_and_is_asked_for_again() {
        let (remote, mut asked, mut pages, mut receiver) = remote_of(2, Some("this one".to_owned()));
        assert_eq!(remote.why_cut(), None);
        std::thread::scope(|scope| {
            let of = remote.clone();
            let received = scope.spawn(move || of.receive(&mut receiver, &|| true));
            scope.spawn(|| remote.try_offers(&|| true));
            let of = remote.clone();
            let read = scope.spawn(move || {
                let mut into = vec![9; WINDOW];
                of.read(WindowIndex::new(1), &mut into).map(|()| into[0])
            });
            assert_eq!(requests(&mut asked, 1), [(1, true)]);
            pages.send(Kind::Go, &[], &PATIENT).expect("there is room");
            drop((asked, pages));
            while remote.why_cut().is_none() {
                std::thread::yield_now();
            }

            refuses_another_migration(&remote);
            let mut right = offered(&remote);
            greet(&mut right, "this one").expect("it is the right one");
            assert_eq!(requests(&mut right.asked, 1), [(1, true)], "once more");
            send(&mut right.pages, &head(1, &[0, 1], &[]), &[7, 8]);
            assert_eq!(read.join().expect("it does not panic").expect("it came"), 7);
            assert_eq!((remote.why_cut(), remote.cuts()), (None, 1));
            assert_eq!(requests(&mut right.asked, 1), [(0, false)], "the background goes on");
            send(&mut right.pages, &head(0, &[0, 1], &[]), &[1, 1]);
            assert!(received.join().expect("it does not panic"));
            assert!(remote.offer(another().offer).expect_err("all is here").contains("no page of its RAM is missing"));
        });
    }

    #[test]
    fn a_guest_that_has_ended_waits_for_no_other_connection() {
        let (remote, _asked, mut pages, mut receiver) = remote_of(2, Some(String::new()));
        std::thread::scope(|scope| {
            let of = remote.clone();
            let received = scope.spawn(move || of.receive(&mut receiver, &|| true));
            pages.send(Kind::Go, &[], &PATIENT).expect("there is room");
            drop(pages);
            while remote.why_cut().is_none() {
                std::thread::yield_now();
            }
            assert!(remote.takes_no_other(), "the last one is lost");
            assert!(!received.join().expect("it does not panic"));
            assert!(remote.read(WindowIndex::new(1), &mut vec![0; WINDOW]).is_err());
            assert!(!remote.takes_no_other());
        });
    }
}
