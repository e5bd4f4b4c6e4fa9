//! Has a page of 1 GiB made when a policy wants one and the pool has none free, in a thread of its own.
//!
//! ```text
//!             a plan names a giant                    made
//!   Waiting ───────────────────────▶ Making (thread) ──────▶ Ready ── the giant is moved onto it ──▶ Waiting
//!      ▲                                │                      │
//!      └── pause, doubled each time ────┘ not made             └── no plan wants it for a minute: it goes back
//! ```
//!
//! A plan names a giant only where a page is free ([`wideleaf_policies::HostMemory::giant_pages_free`]). So a page that
//! may be made counts as free until it is asked for. While it is being made, plans continue with windows of 2 MiB.
//! When it is ready, it counts as free again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use wideleaf_policies::Moment;

use crate::giant_maker::GiantMaker;
use crate::giant_page::{GiantFile, GiantPage};
use crate::numa::placement::NodePolicy;
use crate::pool::NotMade;

/// Wait after the first failure; each further one in a row doubles it. An attempt moves up to a gibibyte of other
/// programs' memory, which takes a second: attempts use at most a tenth of the time, and soon much less.
const PAUSE_SHORTEST: Duration = Duration::from_secs(10);
const PAUSE_LONGEST: Duration = Duration::from_secs(600);

/// Maximum number of failures in a row: with the pauses above, half an hour without a page. What prevents one then is
/// there for good, such as the kernel's own pages in each gibibyte.
const FAILURES_MAX: u32 = 9;

/// Maximum time that a page waits for a giant: a plan that wanted one asks again at the next ticks, unless
/// the budget or a back-off of the giant prevents it for some seconds.
const UNUSED_MAX: Duration = Duration::from_secs(60);

/// Makes pages, one at a time.
#[derive(Debug)]
pub(super) struct GiantMaking {
    maker: Option<Arc<dyn GiantMaker>>,
    state: State,
    failures: u32,
    next_attempt: Moment,
    /// Number of pages that were given back, wherever the last user let them go.
    given_back: Arc<AtomicU64>,
}

#[derive(Debug)]
enum State {
    Waiting,
    Making { thread: JoinHandle<Result<GiantFile, NotMade>>, policy: Option<NodePolicy> },
    Ready { page: Made, since: Moment },
}

/// A page that was made, and the memory policy by which it was.
#[derive(Clone, Debug)]
pub(super) struct Made {
    pub page: Arc<GiantPage>,
    pub policy: Option<NodePolicy>,
}

/// What became of a page since the last look.
#[derive(Debug)]
pub(super) enum News {
    /// A page was made and is ready.
    Made,
    /// No page was made.
    NotMade(NotMade),
    /// A page that no plan wanted went back.
    Unused,
}

impl GiantMaking {
    /// Makes no pages.
    pub fn none() -> GiantMaking {
        GiantMaking {
            maker: None,
            state: State::Waiting,
            failures: 0,
            next_attempt: Moment::after_start(Duration::ZERO),
            given_back: Arc::default(),
        }
    }

    /// Has pages made by `maker`.
    pub fn by(maker: Arc<dyn GiantMaker>) -> GiantMaking {
        GiantMaking { maker: Some(maker), ..GiantMaking::none() }
    }

    /// The maker, for others that need pages; `None` where none may be made.
    pub fn maker(&self) -> Option<Arc<dyn GiantMaker>> {
        self.maker.clone()
    }

    /// Number of pages that count as free beside those of the pool.
    pub fn pages(&self, now: Moment) -> u64 {
        match self.state {
            State::Ready { .. } => 1,
            State::Waiting => u64::from(self.may_begin(now)),
            State::Making { .. } => 0,
        }
    }

    /// Number of pages that were made and given back so far.
    pub fn given_back(&self) -> u64 {
        self.given_back.load(Ordering::Relaxed)
    }

    /// The page that is ready, for a giant with this memory policy that is to be moved onto it.
    pub fn take(&mut self, policy: Option<NodePolicy>) -> Option<Made> {
        match std::mem::replace(&mut self.state, State::Waiting) {
            State::Ready { page, .. } if page.policy == policy => Some(page),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Takes back a page, unless a giant was moved onto it: the claims of its RAM hold it then.
    pub fn put_back(&mut self, page: Made, now: Moment) {
        let is_free = Arc::strong_count(&page.page) == 1;
        if is_free && matches!(self.state, State::Waiting) {
            self.state = State::Ready { page, since: now };
        }
    }

    fn may_begin(&self, now: Moment) -> bool {
        let has_left = self.maker.as_ref().is_some_and(|maker| maker.left() > 0);
        has_left && self.failures < FAILURES_MAX && now >= self.next_attempt
    }

    /// Begins to make a page by this memory policy, if one may be made now. Returns whether one is being made, or is
    /// ready for a giant with another policy: it goes back first if that one does not come.
    pub fn begin(&mut self, policy: Option<NodePolicy>, now: Moment) -> bool {
        match (&self.state, &self.maker) {
            (State::Making { .. } | State::Ready { .. }, _) => true,
            (State::Waiting, Some(maker)) if self.may_begin(now) => {
                let maker = maker.clone();
                let work = move || maker.make(policy);
                let thread = std::thread::Builder::new().name("giant-maker".into()).spawn(work);
                match thread {
                    Ok(thread) => self.state = State::Making { thread, policy },
                    Err(error) => {
                        tracing::warn!("cannot start the thread that makes a page of 1 GiB: {error}");
                        self.failed(now);
                    }
                }
                matches!(self.state, State::Making { .. })
            }
            _ => false,
        }
    }

    /// Looks whether a page is ready, or has been ready for too long.
    pub fn look(&mut self, now: Moment) -> Option<News> {
        match &self.state {
            State::Making { thread, .. } if thread.is_finished() => {}
            State::Ready { since, .. } if now.since(*since) > UNUSED_MAX => {}
            _ => return None,
        }
        match std::mem::replace(&mut self.state, State::Waiting) {
            State::Making { thread, policy } => {
                let panicked = |_| Err(NotMade::elsewhere("other", "the thread that makes a page of 1 GiB panicked"));
                Some(match thread.join().unwrap_or_else(panicked) {
                    Ok(file) => {
                        let page = Made { page: Arc::new(GiantPage::made(file, &self.given_back)), policy };
                        self.failures = 0;
                        self.state = State::Ready { page, since: now };
                        News::Made
                    }
                    Err(error) => {
                        self.failed(now);
                        News::NotMade(error)
                    }
                })
            }
            State::Ready { .. } | State::Waiting => Some(News::Unused),
        }
    }

    fn failed(&mut self, now: Moment) {
        let pause = PAUSE_SHORTEST.saturating_mul(1 << self.failures.min(16)).min(PAUSE_LONGEST);
        self.next_attempt = now + pause;
        self.failures += 1;
    }

    /// Ends the making: a page that is ready goes back. One that is being made goes back when its thread ends: the
    /// thread has nothing to do with the VMs, so no part of the loop waits for it.
    pub fn end(&mut self) {
        self.maker = None;
        self.state = State::Waiting;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use parking_lot::Mutex;

    use super::*;

    /// Answers with what a test sends.
    #[derive(Debug)]
    struct Scripted {
        left: u64,
        answers: Mutex<Receiver<Result<GiantFile, NotMade>>>,
    }

    impl GiantMaker for Scripted {
        fn left(&self) -> u64 {
            self.left
        }

        fn make(&self, _: Option<NodePolicy>) -> Result<GiantFile, NotMade> {
            let answers = self.answers.lock();
            answers.recv().expect("the test sends an answer")
        }
    }

    fn making(left: u64) -> (GiantMaking, Sender<Result<GiantFile, NotMade>>) {
        let (answer, answers) = channel();
        (GiantMaking::by(Arc::new(Scripted { left, answers: Mutex::new(answers) })), answer)
    }

    fn at(seconds: u64) -> Moment {
        Moment::after_start(Duration::from_secs(seconds))
    }

    fn a_page() -> Result<GiantFile, NotMade> {
        Ok(GiantFile::of_ordinary_memory().expect("it takes no memory yet"))
    }

    fn no_page() -> Result<GiantFile, NotMade> {
        Err(NotMade::elsewhere("no_room", "no room"))
    }

    fn news(making: &mut GiantMaking, now: Moment) -> News {
        loop {
            if let Some(news) = making.look(now) {
                return news;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_page_counts_as_free_until_it_is_asked_for_and_again_when_it_is_ready() {
        let (mut making, answer) = making(1);
        assert_eq!(making.pages(at(0)), 1);
        assert!(making.begin(None, at(0)) && making.begin(None, at(0)));
        assert_eq!((making.pages(at(0)), making.take(None).is_some()), (0, false));
        answer.send(a_page()).expect("it waits");
        assert!(matches!(news(&mut making, at(3)), News::Made));
        assert_eq!(making.pages(at(3)), 1);
        let page = making.take(None).expect("ready");
        making.put_back(page.clone(), at(4));
        assert!(making.take(None).is_none(), "a giant is on it");
        making.put_back(page, at(4));
        drop(making.take(None).expect("no giant is on it"));
        assert_eq!(making.given_back(), 1);
    }

    #[test]
    fn a_page_of_one_node_waits_for_a_giant_of_that_node() {
        let (mut making, answer) = making(2);
        let [first, second] = [0, 1].map(NodePolicy::preferring);
        assert!(making.begin(first, at(0)));
        answer.send(a_page()).expect("it waits");
        assert!(matches!(news(&mut making, at(3)), News::Made));
        assert!(making.take(second).is_none() && making.begin(second, at(3)), "the other giant waits");
        assert_eq!(making.take(first).expect("it is ready").policy, first);
        assert!(making.begin(second, at(4)) && making.take(second).is_none(), "now its page is made");
        answer.send(a_page()).expect("it waits");
        assert!(matches!(news(&mut making, at(5)), News::Made) && making.take(second).is_some());
    }

    #[test]
    fn a_page_that_no_plan_wants_goes_back() {
        let (mut making, answer) = making(1);
        making.begin(None, at(0));
        answer.send(a_page()).expect("it waits");
        assert!(matches!(news(&mut making, at(3)), News::Made));
        assert!(making.look(at(63)).is_none() && making.given_back() == 0);
        assert!(matches!(making.look(at(64)), Some(News::Unused)));
        assert_eq!((making.given_back(), making.take(None).is_some()), (1, false));
    }

    #[test]
    fn failures_wait_longer_each_time_and_end_after_some() {
        let (mut making, answer) = making(1);
        let (mut now, mut waits) = (0, Vec::new());
        for _ in 0..FAILURES_MAX {
            assert!(making.begin(None, at(now)), "at {now}");
            answer.send(no_page()).expect("it waits");
            assert!(matches!(news(&mut making, at(now)), News::NotMade(error) if error.reason() == "no_room"));
            let wait = (1..10_000).find(|wait| making.pages(at(now + wait)) > 0);
            waits.push(wait);
            now += wait.unwrap_or(0);
        }
        let expected = [10, 20, 40, 80, 160, 320, 600, 600].map(Some);
        assert_eq!((&waits[..8], waits[8]), (&expected[..], None));
    }

    #[test]
    fn a_maker_with_nothing_left_is_not_asked() {
        let (mut making, _answer) = making(0);
        assert_eq!((making.pages(at(0)), making.begin(None, at(0))), (0, false));
        assert_eq!((GiantMaking::none().pages(at(0)), GiantMaking::none().begin(None, at(0))), (0, false));
    }

    #[test]
    fn the_end_waits_for_no_page() {
        let (mut making, answer) = making(1);
        making.begin(None, at(0));
        making.end();
        assert!(making.look(at(1)).is_none());
        answer.send(a_page()).expect("the thread still waits for it, and then lets it go");
    }
}
