//! The service of a device's queues, which its thread does piece by piece. Between two pieces another thread may stop
//! it, to read how far the rings are used.
//!
//! ```text
//!   the device's thread   work ─▶ … ─▶ given back ─▶ work ─▶ … ─▶ waits ───────────────▶ work
//!   a snapshot                          rest: waits for the piece ─▶ taken ── read ─▶ given back
//! ```
//!
//! A piece is one request of a disk, or one event of another device: after it no chain is half done. The thread that
//! wants the rest is next, even if the device always has more work.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Instant;

use event_manager::{EventOps, Events, MutEventSubscriber};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// State of a service that one thread uses at a time.
#[derive(Debug)]
pub struct Service<T> {
    inner: Mutex<Inner<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Inner<T> {
    /// State of the service; `None` while a thread uses it.
    state: Option<Box<T>>,
    /// Number of threads that want the service to rest.
    rests_wanted: usize,
}

/// The state in the hands of the device's thread. Dropping gives it back.
#[derive(Debug)]
pub struct Working<'a, T> {
    service: &'a Service<T>,
    state: Option<Box<T>>,
}

/// The state while the service rests. Dropping lets the device's thread continue.
#[derive(Debug)]
pub struct Resting<T> {
    service: Arc<Service<T>>,
    state: Option<Box<T>>,
}

impl<T> Service<T> {
    /// A service with this state.
    pub fn new(state: T) -> Arc<Service<T>> {
        let inner = Inner { state: Some(Box::new(state)), rests_wanted: 0 };
        Arc::new(Service { inner: Mutex::new(inner), changed: Condvar::new() })
    }

    /// Takes the state for one piece of work; waits while the service rests.
    pub fn work(&self) -> Working<'_, T> {
        let mut inner = self.lock();
        loop {
            if inner.rests_wanted == 0
                && let Some(state) = inner.state.take()
            {
                return Working { service: self, state: Some(state) };
            }
            self.changed.wait(&mut inner);
        }
    }

    /// Stops the service after its present piece of work; `None` where that does not end by `until`.
    pub fn rest(self: &Arc<Self>, until: Instant) -> Option<Resting<T>> {
        let mut inner = self.lock();
        inner.rests_wanted += 1;
        while inner.state.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                inner.rests_wanted -= 1;
                self.changed.notify_all();
                return None;
            }
            self.changed.wait_for(&mut inner, left);
        }
        let state = inner.state.take();
        Some(Resting { service: Arc::clone(self), state })
    }

    fn give_back(&self, state: Option<Box<T>>, rests: usize) {
        let mut inner = self.lock();
        inner.state = state;
        inner.rests_wanted -= rests;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        // The state is moved in and out in one step, so it is whole after a panic elsewhere.
        self.inner.lock()
    }
}

/// The state is present until the value is dropped.
const PRESENT: &str = "the state is given back when this is dropped, and not before";

impl<T> Deref for Working<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.state.as_ref().expect(PRESENT)
    }
}

impl<T> DerefMut for Working<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.state.as_mut().expect(PRESENT)
    }
}

impl<T> Drop for Working<'_, T> {
    fn drop(&mut self) {
        self.service.give_back(self.state.take(), 0);
    }
}

impl<T> Deref for Resting<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.state.as_ref().expect(PRESENT)
    }
}

impl<T> Drop for Resting<T> {
    fn drop(&mut self) {
        self.service.give_back(self.state.take(), 1);
    }
}

/// A service on the devices' thread: each event is a piece of work.
#[derive(Debug)]
pub struct Served<T>(pub Arc<Service<T>>);

impl<T: MutEventSubscriber> MutEventSubscriber for Served<T> {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.0.work().init(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        self.0.work().process(events, ops);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(1)
    }

    #[test]
    fn a_rest_waits_for_the_piece_of_work_and_gives_up_in_time() {
        let service = Service::new(7);
        let mut working = service.work();
        assert!(service.rest(soon()).is_none());
        *working += 1;
        drop(working);
        let resting = service.rest(soon()).unwrap();
        assert_eq!(*resting, 8);
        assert!(service.rest(soon()).is_none(), "it rests already");
        drop(resting);
        assert_eq!(*service.work(), 8, "a rest that gave up stops nothing");
    }

    #[test]
    fn a_service_that_always_has_work_comes_to_rest_and_then_continues() {
        let (service, is_over) = (Service::new(0_u64), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    *service.work() += 1;
                }
            });
            for _ in 0..100 {
                let resting = service.rest(Instant::now() + Duration::from_secs(60)).unwrap();
                let before = *resting;
                std::thread::yield_now();
                assert_eq!(*resting, before);
                drop(resting);
                while *service.work() == before {}
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_piece_of_work_that_panics_gives_the_state_back() {
        let service = Service::new(1);
        let panics = std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                let _working = service.work();
                panic!("a broken device");
            });
            work.join().is_err()
        });
        assert!(panics && *service.rest(soon()).unwrap() == 1);
    }
}
