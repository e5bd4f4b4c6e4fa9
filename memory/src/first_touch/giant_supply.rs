//! Pages of 1 GiB for first touches. The pool's page is cleared, or a page is made, in a thread of its own: that takes
//! a tenth of a second to some seconds, and meanwhile the touches of other memory are answered.
//!
//! ```text
//!   service   order ───────────────┐        ┌─ look: a page, or the obstacle
//!   thread      └─▶ pool, or maker ─┴─ clear ┘
//! ```
//!
//! A giant that waits no longer marks its order as late. A page that then comes goes to the next giant with the same
//! memory policy, or back to where it came from.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use wideleaf_policies::PageSize;

use crate::giant_maker::GiantMaker;
use crate::giant_page::{GIANT, GiantPage};
use crate::kernel::Kernel;
use crate::numa::placement::NodePolicy;
use crate::pool::HugetlbPools;
use crate::sandboxed::{ThreadWork, thread_starts};

/// Reason why no page comes: the name of a counter.
pub(super) type Obstacle = &'static str;

/// Sources of giant pages.
#[derive(Clone, Debug)]
pub struct GiantSource {
    /// Pools with pages that may be free.
    pub pools: HugetlbPools,
    /// Maker of the pages that the pool lacks, if some may be made.
    pub maker: Option<Arc<dyn GiantMaker>>,
}

/// A page, and whether it was made.
#[derive(Debug)]
pub(super) struct Supplied {
    pub(super) page: Arc<GiantPage>,
    pub(super) is_made: bool,
}

impl GiantSource {
    /// A cleared page by that memory policy: one of the pool, or else one that is made.
    pub(super) fn page(&self, kernel: &dyn Kernel, policy: Option<&NodePolicy>) -> Result<Supplied, Obstacle> {
        if self.pools.check_for(policy, PageSize::Giant1G, GIANT).is_ok() {
            let file = kernel.create_giant().and_then(|file| kernel.fill_giant(&file, policy).map(|()| file));
            match file {
                Ok(file) => return Ok(Supplied { page: Arc::new(GiantPage::of_pool(file)), is_made: false }),
                // Another process was faster.
                Err(error) => tracing::debug!("no page of 1 GiB from the pool: {error}"),
            }
        }
        match &self.maker {
            Some(maker) if maker.left() > 0 => {
                let made = maker.make(policy.copied()).inspect_err(|error| tracing::info!("pages of 1 GiB: {error}"));
                let file = made.map_err(|_| "giant_not_made")?;
                // The manager counts the end of pages that it has made itself.
                let page = Arc::new(GiantPage::made(file, &Arc::<AtomicU64>::default()));
                Ok(Supplied { page, is_made: true })
            }
            _ => Err("giant_no_page"),
        }
    }
}

/// The thread that makes pages ready. Dropping it does not wait for a page in the making: that goes back when the
/// thread ends.
#[derive(Debug)]
pub(super) struct GiantSupply {
    orders: Sender<Option<NodePolicy>>,
    pages: Receiver<Result<Supplied, Obstacle>>,
    ordered: Option<Ordered>,
}

/// An order that is not answered yet.
#[derive(Clone, Copy, Debug)]
struct Ordered {
    policy: Option<NodePolicy>,
    /// Whether the giant of the order waits no more: the answer belongs to no giant.
    is_late: bool,
}

impl Ordered {
    /// Whether an answer to this order is one for a giant with that memory policy. A late page is as good as a new one;
    /// a late obstacle may be gone.
    fn fits(&self, policy: Option<NodePolicy>, answer: &Result<Supplied, Obstacle>) -> bool {
        !self.is_late || answer.is_ok() && self.policy == policy
    }
}

impl GiantSupply {
    /// Starts the thread, which waits for orders.
    pub(super) fn start(kernel: Arc<dyn Kernel>, mut source: GiantSource) -> io::Result<GiantSupply> {
        let ((orders, ordered), (supply, pages)) = (channel(), channel());
        let work = move || {
            thread_starts(ThreadWork::Loop);
            for policy in ordered {
                let policy: Option<NodePolicy> = policy;
                let page = source.page(kernel.as_ref(), policy.as_ref());
                // The memory that prevented one is still there at the next touch, and a vCPU waits for each attempt.
                source.maker.take_if(|_| page.as_ref().is_err_and(|why| *why == "giant_not_made"));
                if supply.send(page).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("giant-supply".into()).spawn(work)?;
        Ok(GiantSupply { orders, pages, ordered: None })
    }

    /// Asks for a page by that memory policy, unless one is on its way.
    pub(super) fn order(&mut self, policy: Option<NodePolicy>) {
        // A thread that has ended, after a panic, is noticed by the look.
        if self.ordered.is_none() && self.orders.send(policy).is_ok() {
            self.ordered = Some(Ordered { policy, is_late: false });
        }
    }

    /// Whether a page is on its way.
    pub(super) fn is_ordered(&self) -> bool {
        self.ordered.is_some()
    }

    /// The page for a giant with that memory policy, once it is ready, or the obstacle. An answer for a giant that
    /// waits no more is dropped if it does not fit, and a page is ordered.
    pub(super) fn look(&mut self, policy: Option<NodePolicy>) -> Option<Result<Supplied, Obstacle>> {
        let (ordered, answer) = match self.answer() {
            Answer::None => return None,
            Answer::NoThread => return Some(Err("giant_no_thread")),
            Answer::Ready(ordered, answer) => (ordered, answer),
        };
        if ordered.fits(policy, &answer) {
            return Some(answer);
        }
        drop(answer);
        self.order(policy);
        None
    }

    /// The giant of the order waits no more.
    pub(super) fn stop_waiting(&mut self) {
        self.ordered.iter_mut().for_each(|ordered| ordered.is_late = true);
    }

    /// Gives back a page that came too late, while no giant waits. Returns whether an answer came.
    pub(super) fn drop_late(&mut self) -> bool {
        matches!(self.answer(), Answer::Ready(..))
    }

    fn answer(&mut self) -> Answer {
        match self.pages.try_recv() {
            Ok(answer) => Answer::Ready(self.ordered.take().expect("each answer has one order"), answer),
            Err(TryRecvError::Empty) => Answer::None,
            Err(TryRecvError::Disconnected) => {
                self.ordered = None;
                Answer::NoThread
            }
        }
    }
}

/// What the thread has sent.
enum Answer {
    /// Nothing came yet.
    None,
    /// A page or an obstacle, for this order.
    Ready(Ordered, Result<Supplied, Obstacle>),
    /// The thread has ended, after a panic.
    NoThread,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;

    use super::*;
    use crate::giant_page::GiantFile;
    use crate::pool::NotMade;
    use crate::testing::fake_host::FakeHost;

    /// A pool of giant pages with this number of free ones.
    fn pools(free: u64) -> (tempfile::TempDir, HugetlbPools) {
        let root = tempfile::tempdir().expect("a temporary folder");
        let pool = root.path().join("sys/kernel/mm/hugepages/hugepages-1048576kB");
        std::fs::create_dir_all(&pool).expect("a folder can be made");
        let numbers = [
            ("nr_hugepages", free),
            ("free_hugepages", free),
            ("resv_hugepages", 0),
            ("surplus_hugepages", 0),
            ("nr_overcommit_hugepages", 0),
        ];
        for (name, number) in numbers {
            std::fs::write(pool.join(name), format!("{number}\n")).expect("a file can be written");
        }
        let pools = HugetlbPools::at(root.path());
        (root, pools)
    }

    /// Makes one page of ordinary memory, or refuses.
    #[derive(Debug)]
    struct Maker {
        asked: AtomicU64,
        /// Policy of the latest page.
        policy: Mutex<Option<NodePolicy>>,
        answers: Mutex<Vec<bool>>,
    }

    impl GiantMaker for Maker {
        fn left(&self) -> u64 {
            1
        }

        fn make(&self, policy: Option<NodePolicy>) -> Result<GiantFile, NotMade> {
            *self.policy.lock() = policy;
            self.asked.fetch_add(1, Ordering::Relaxed);
            match self.answers.lock().pop() {
                Some(true) => Ok(GiantFile::of_ordinary_memory().expect("it takes no memory yet")),
                _ => Err(NotMade::elsewhere("no_room", "no room")),
            }
        }
    }

    fn maker(answers: &[bool]) -> Arc<Maker> {
        Arc::new(Maker { asked: AtomicU64::new(0), policy: Mutex::default(), answers: Mutex::new(answers.to_vec()) })
    }

    fn next(supply: &mut GiantSupply) -> Result<Supplied, Obstacle> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(page) = supply.look(None) {
                return page;
            }
            assert!(Instant::now() < deadline, "the thread does not answer");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_pool_is_asked_before_the_maker() {
        let (_root, pools) = pools(1);
        let maker = maker(&[true]);
        let source = GiantSource { pools, maker: Some(maker.clone()) };
        assert!(!source.page(&FakeHost::default(), None).expect("one is free").is_made);
        assert_eq!(maker.asked.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_page_that_is_made_is_asked_for_by_the_giants_policy() {
        let (_root, pools) = pools(0);
        let (maker, policy) = (maker(&[true]), NodePolicy::preferring(1));
        let source = GiantSource { pools, maker: Some(maker.clone()) };
        assert!(source.page(&FakeHost::default(), policy.as_ref()).expect("one is made").is_made);
        assert_eq!(*maker.policy.lock(), policy);
    }

    #[test]
    fn a_page_of_the_pool_that_another_process_took_is_made_or_missing() {
        let (_root, pools) = pools(1);
        // create_giant, fill_giant
        for call in 0..2 {
            let host = FakeHost::default();
            host.fail_call(call, libc::ENOMEM);
            let source = GiantSource { pools: pools.clone(), maker: None };
            assert_eq!(source.page(&host, None).expect_err("it is gone"), "giant_no_page", "call {call}");
            host.fail_call(call, libc::ENOMEM);
            let source = GiantSource { maker: Some(maker(&[true])), ..source };
            assert!(source.page(&host, None).expect("one is made").is_made, "call {call}");
        }
    }

    #[test]
    fn after_a_failure_no_page_is_made_any_more() {
        let (_root, pools) = pools(0);
        let maker = maker(&[true, false]);
        let source = GiantSource { pools, maker: Some(maker.clone()) };
        let mut supply = GiantSupply::start(Arc::new(FakeHost::default()), source).expect("a thread");
        let mut ordered = || {
            supply.order(None);
            supply.order(None); // one is on its way: no second one
            next(&mut supply).expect_err("none is to be had")
        };
        assert_eq!([ordered(), ordered(), ordered()], ["giant_not_made", "giant_no_page", "giant_no_page"]);
        assert_eq!(maker.asked.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_thread_that_panicked_is_an_obstacle_at_every_look() {
        #[derive(Debug)]
        struct Panics;
        impl GiantMaker for Panics {
            fn left(&self) -> u64 {
                1
            }

            fn make(&self, _: Option<NodePolicy>) -> Result<GiantFile, NotMade> {
                panic!("this panic is part of the test")
            }
        }
        let (_root, pools) = pools(0);
        let source = GiantSource { pools, maker: Some(Arc::new(Panics)) };
        let mut supply = GiantSupply::start(Arc::new(FakeHost::default()), source).expect("a thread");
        supply.order(None);
        assert_eq!(next(&mut supply).expect_err("it is gone"), "giant_no_thread");
        supply.order(None);
        assert_eq!(next(&mut supply).expect_err("still"), "giant_no_thread");
    }

    /// Waits until the thread has sent an answer that no giant awaits, and drops it.
    fn drop_late(supply: &mut GiantSupply) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !supply.drop_late() {
            assert!(Instant::now() < deadline, "the thread does not answer");
            std::thread::yield_now();
        }
    }

    fn supply_of(answers: &[bool]) -> (tempfile::TempDir, Arc<Maker>, GiantSupply) {
        let (root, pools) = pools(0);
        let maker = maker(answers);
        let source = GiantSource { pools, maker: Some(maker.clone()) };
        (root, maker, GiantSupply::start(Arc::new(FakeHost::default()), source).expect("a thread"))
    }

    #[test]
    fn a_page_that_no_giant_awaits_any_more_is_given_back_and_the_next_giant_orders_its_own() {
        let (_root, maker, mut supply) = supply_of(&[true, true]);
        supply.order(NodePolicy::preferring(0));
        supply.stop_waiting();
        drop_late(&mut supply);
        assert!(!supply.is_ordered(), "so no look is due any more");
        supply.order(None);
        assert!(next(&mut supply).expect("one is made").is_made);
        assert_eq!((maker.asked.load(Ordering::Relaxed), *maker.policy.lock()), (2, None));
    }

    #[test]
    fn a_late_page_goes_to_the_next_giant_only_if_that_has_the_same_memory_policy() {
        for (late, pages) in [(NodePolicy::preferring(1), 2), (None, 1)] {
            let (_root, maker, mut supply) = supply_of(&[true, true]);
            supply.order(late);
            supply.stop_waiting();
            supply.order(None); // one is on its way
            assert!(next(&mut supply).expect("one is made").is_made);
            assert_eq!((maker.asked.load(Ordering::Relaxed), *maker.policy.lock()), (pages, None), "{late:?}");
        }
    }

    #[test]
    fn why_a_late_page_did_not_come_is_no_answer_for_the_next_giant() {
        let (_root, maker, mut supply) = supply_of(&[false]);
        supply.order(None);
        supply.stop_waiting();
        supply.order(None);
        assert_eq!(next(&mut supply).expect_err("the pool has none"), "giant_no_page", "asked anew");
        assert_eq!(maker.asked.load(Ordering::Relaxed), 1);
    }
}
