//! The thread that serves all devices without a thread of their own, one event after another.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use event_manager::{EventManager, MutEventSubscriber, RemoteEndpoint, SubscriberId};
use parking_lot::Mutex;

use super::activate_error::ActivateError;
use super::threads::DeviceThreads;

/// An object with file descriptors that cause events. Its `process` must be short, because all other devices
/// wait for it.
pub type Subscriber = Box<dyn MutEventSubscriber + Send>;

/// The devices' thread: see the module. It starts with the first subscriber and ends with its last owner.
#[derive(Default)]
pub struct IoThread {
    threads: Arc<DeviceThreads>,
    running: Mutex<Option<Running>>,
}

struct Running {
    endpoint: RemoteEndpoint<Subscriber>,
    thread: JoinHandle<()>,
}

/// A subscriber of the thread. Dropping this ends its service, and never in the middle of an event.
pub struct Subscription {
    id: SubscriberId,
    endpoint: RemoteEndpoint<Subscriber>,
    /// Keeps the thread alive as long as a subscription needs it.
    _thread: Arc<IoThread>,
}

/// Number of events taken at once.
const EVENTS: usize = 64;

impl IoThread {
    /// Creates the thread's handle; `threads` will start the thread.
    pub fn new(threads: Arc<DeviceThreads>) -> IoThread {
        IoThread { threads, running: Mutex::default() }
    }

    /// Serves `subscriber` from now on.
    ///
    /// # Errors
    /// [`ActivateError::Host`] where the host gives no thread.
    pub fn add(self: &Arc<Self>, subscriber: Subscriber) -> Result<Subscription, ActivateError> {
        let mut running = self.running.lock();
        if running.is_none() {
            *running = Some(start(&self.threads)?);
        }
        let endpoint = running.as_ref().expect("it was just started").endpoint.clone();
        let id = endpoint.call_blocking(move |thread| Ok::<_, event_manager::Error>(thread.add_subscriber(subscriber)));
        let id = id.map_err(|error| cannot(&error))?;
        Ok(Subscription { id, endpoint, _thread: Arc::clone(self) })
    }
}

fn cannot(error: &event_manager::Error) -> ActivateError {
    ActivateError::Host { what: "the devices' thread", source: std::io::Error::other(error.to_string()) }
}

fn start(threads: &DeviceThreads) -> Result<Running, ActivateError> {
    let mut manager = EventManager::<Subscriber>::new_with_capacity(EVENTS).map_err(|error| cannot(&error))?;
    let endpoint = manager.remote_endpoint();
    let work = move || {
        // The loop ends by a call of the last owner that sets this flag; see `Drop`.
        while !ENDED.get() {
            if let Err(error) = manager.run() {
                tracing::error!(%error, "the devices' thread ends: it cannot wait for events");
                return;
            }
        }
    };
    Ok(Running { endpoint, thread: threads.spawn("io", work)? })
}

thread_local! {
    /// Flag set by a call on the thread itself.
    static ENDED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl Drop for IoThread {
    fn drop(&mut self) {
        let running = self.running.get_mut().take();
        let Some(Running { endpoint, thread }) = running else { return };
        let _ = endpoint.fire(|_| ENDED.set(true));
        // The last owner may be a subscriber, which is dropped on the thread itself.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let id = self.id;
        // If the thread has ended, its subscribers have ended too.
        let _ = self.endpoint.call_blocking(move |thread| thread.remove_subscriber(id).map(drop));
    }
}

impl fmt::Debug for IoThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoThread").finish_non_exhaustive()
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Subscription").field(&self.id).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use event_manager::{EventOps, Events};
    use vmm_sys_util::epoll::EventSet;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;

    struct Counting {
        event: EventFd,
        told: mpsc::Sender<u64>,
    }

    impl MutEventSubscriber for Counting {
        fn init(&mut self, ops: &mut EventOps<'_>) {
            ops.add(Events::new(&self.event, EventSet::IN)).unwrap();
        }

        fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
            self.told.send(self.event.read().unwrap()).unwrap();
        }
    }

    #[test]
    fn a_subscriber_is_served_until_its_subscription_ends() {
        let (thread, event) = (Arc::new(IoThread::default()), EventFd::new(EFD_NONBLOCK).unwrap());
        let (told, hears) = mpsc::channel();
        let counting = Counting { event: event.try_clone().unwrap(), told };
        let subscription = thread.add(Box::new(counting)).unwrap();
        event.write(7).unwrap();
        assert_eq!(hears.recv(), Ok(7));
        drop(subscription);
        event.write(1).unwrap();
        assert_eq!(hears.recv(), Err(mpsc::RecvError), "it was dropped");
    }

    #[test]
    fn the_thread_ends_with_its_last_owner() {
        let thread = Arc::new(IoThread::default());
        let (told, hears) = mpsc::channel();
        let event = EventFd::new(EFD_NONBLOCK).unwrap();
        let subscription = thread.add(Box::new(Counting { event, told })).unwrap();
        drop(thread);
        drop(subscription);
        assert_eq!(hears.recv(), Err(mpsc::RecvError));
    }
}
