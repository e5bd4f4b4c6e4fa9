//! Keeps a guest's gate, its RAM, KVM's totals and the guest's own tables up to date: a thread that wakes once a
//! second, or less often where nothing needs a question to another process.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use wideleaf_memory::gate::{Gate as _, GateState};

use super::guest::Guest;
use crate::gate::EVENT_EVERY;
use crate::ram_watch::{self, RamWatch, Watched};

/// Interval between refreshes of a gate that asks other processes.
const REFRESH_EVERY: Duration = Duration::from_secs(1);
/// Interval of the watcher where the gate refreshes itself and KVM's totals need no other process. It then wakes
/// for the RAM alone: to wake each second for 50 guests would take half a per cent of a core.
const WATCH_EVERY: Duration = ram_watch::LOOK_EVERY;

/// Keeps a guest's gate and its RAM up to date until it is dropped or the guest is gone.
pub(super) struct Watcher {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    pub(super) fn start(guest: Arc<Guest>, mut ram: RamWatch) -> std::io::Result<Watcher> {
        let (stop, stopped) = mpsc::channel::<()>();
        let of_gate = if guest.gate.is_quick() { WATCH_EVERY } else { REFRESH_EVERY };
        let of_kvm = guest.kvm.as_ref().and_then(|kvm| kvm.refresh_every());
        let every = of_kvm.map_or(of_gate, |every| every.min(of_gate));
        let watch = move || {
            let every = || if guest.gate.is_in_event() { every.min(EVENT_EVERY) } else { every };
            while guest.gate.state() != GateState::Gone
                && stopped.recv_timeout(every()) == Err(RecvTimeoutError::Timeout)
            {
                if !guest.gate.is_quick() {
                    guest.refresh_gate();
                }
                guest.kvm.iter().for_each(|kvm| kvm.refresh());
                let is_watched = guest.gate.is_watched();
                // Tables of a guest that is being restored may be absent, and reading one would fail.
                guest.tables().iter().filter(|_| !is_watched).for_each(|tables| tables.refresh());
                let watched = Watched { by_it: guest.gate.has_userfaultfd(), by_any: is_watched };
                // A change that could not be followed is tried again at the next check.
                if let Some(change) = ram.change(&guest.process, guest.monitor.as_deref(), watched) {
                    let began = Instant::now();
                    match guest.follow_ram() {
                        Ok(()) => {
                            ram.read(change, began.elapsed());
                            // The mappings had the last word on the end of an event.
                            if is_watched && !guest.gate.is_watched() {
                                guest.refresh_gate();
                            }
                        }
                        Err(_) => ram.not_read(),
                    }
                }
            }
        };
        let thread = thread::Builder::new().name("watcher".into()).spawn(watch)?;
        Ok(Watcher { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
