//! The source's connection to the target, and what goes over it while the guest runs there.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_memory::save::{SaveProgress, SaveSink};
use wideleaf_policies::{PageSet, WindowIndex};
use wideleaf_snapshot::is_zero;

use super::Arrived;
use super::address::ConnectionEnds;
use super::frames::{self, Kind, Malformed, PAGE_BYTES, PagesHead};
use super::link::{Limit, LinkError, Receiver, Sender};
use super::serving::Serving;
use crate::report::Left;
use crate::snapshot::parts::Shared;

/// Time for the figures of both sides, once the guest runs there.
const FIGURES_WAIT_MAX: Duration = Duration::from_secs(5);
/// Time in which the target's reason for an end may come.
const LAST_WORDS_WAIT_MAX: Duration = Duration::from_millis(200);

/// Both ends of the connection.
pub struct Wire {
    /// Its writing end.
    pub sender: Mutex<Sender>,
    /// Its reading end.
    pub receiver: Mutex<Receiver>,
}

impl Wire {
    /// Over these ends.
    pub fn new(ConnectionEnds { reader, writer }: ConnectionEnds) -> Wire {
        Wire { sender: Mutex::new(Sender::new(writer)), receiver: Mutex::new(Receiver::new(reader)) }
    }

    /// Begins with a message of this kind, and waits until the target welcomes it.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn greet(&self, kind: Kind, content: &[u8], limit: &Limit<'_>) -> Result<(), LinkError> {
        let (mut sender, mut receiver) = (self.sender.lock(), self.receiver.lock());
        sender.greet(limit)?;
        sender.send(kind, &[content], limit)?;
        receiver.greeted(limit)?;
        receiver.expect(Kind::Welcome, &mut Vec::new(), limit)
    }

    /// Bytes that have left.
    pub fn sent(&self) -> u64 {
        self.sender.lock().sent()
    }

    /// Sends the missing pages until the target has all, or its guest has ended.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn serve(&self, serving: &mut Serving<'_>, shared: &Shared, limit: &Limit<'_>) -> Result<(), LinkError> {
        let (sent, of) = (AtomicU64::new(0), serving.pages());
        // A round after all others.
        let round = shared.progress.lock().map_or(1, |view| view.round + 1);
        let on_sent = |pages: u16| {
            let done = sent.fetch_add(pages.into(), Ordering::Relaxed) + u64::from(pages);
            shared.show(SaveProgress { round, done: done.min(of), of });
        };
        on_sent(0);
        match serving.until_other(&self.receiver, limit, &on_sent)? {
            Kind::Complete => Ok(()),
            _ => Err(Malformed::Order.into()),
        }
    }

    /// Exchanges the figures for both reports. A loss is no failure any more.
    pub fn exchange(&self, left: &Left) -> Option<Arrived> {
        let until = Some(Instant::now() + FIGURES_WAIT_MAX);
        let limit = Limit { silence: FIGURES_WAIT_MAX, until, keep_on: &|| true };
        let mut content = serde_json::to_vec(left).ok()?;
        self.sender.lock().send(Kind::Left, &[&content], &limit).ok()?;
        self.receiver.lock().expect(Kind::Arrived, &mut content, &limit).ok()?;
        serde_json::from_slice(&content).ok()
    }

    /// Reason of a loss: the target's own words, if it had some before the connection ended.
    pub fn why(&self, lost: LinkError, shared: &Shared) -> String {
        match self.last_words(lost) {
            LinkError::Cancelled if shared.is_replaced() => "another connection took the place of this one".to_owned(),
            lost => lost.to_string(),
        }
    }

    fn last_words(&self, lost: LinkError) -> LinkError {
        if !matches!(lost, LinkError::Closed | LinkError::Io(_)) {
            return lost;
        }
        let until = Some(Instant::now() + LAST_WORDS_WAIT_MAX);
        let limit = Limit { silence: LAST_WORDS_WAIT_MAX, until, keep_on: &|| true };
        let said = self.receiver.lock().next(&mut Vec::new(), &limit);
        said.err().filter(|lost| matches!(lost, LinkError::Refused(_))).unwrap_or(lost)
    }
}

/// Sends pages to the target.
pub struct Sink<'a> {
    /// Writing end of the connection.
    pub sender: &'a Mutex<Sender>,
    /// Limits of a message, now.
    pub limit: &'a (dyn Fn() -> Limit<'a> + Sync),
    /// Windows on large pages when the migration began.
    pub huge: &'a BTreeSet<WindowIndex>,
}

impl SaveSink for Sink<'_> {
    fn write(&self, window: WindowIndex, pages: &PageSet, data: &[u8]) -> io::Result<()> {
        let zero: PageSet = pages.iter().filter(|page| is_zero(page_of(data, *page))).collect();
        let stored = pages.without(zero);
        let head = PagesHead { window, is_huge: self.huge.contains(&window), stored, zero }.encode();
        let run =
            |run: std::ops::Range<u16>| &data[usize::from(run.start) * PAGE_BYTES..usize::from(run.end) * PAGE_BYTES];
        let parts: Vec<&[u8]> = [&head[..]].into_iter().chain(stored.runs().map(run)).collect();
        // Outside the lock, since several threads come here.
        let checksum = frames::checksum(Kind::Pages, &parts);
        let limit = (self.limit)();
        self.sender.lock().send_checked(Kind::Pages, checksum, &parts, &limit).map_err(io::Error::other)
    }
}

fn page_of(data: &[u8], page: u16) -> &[u8] {
    let start = usize::from(page) * PAGE_BYTES;
    &data[start..start + PAGE_BYTES]
}
