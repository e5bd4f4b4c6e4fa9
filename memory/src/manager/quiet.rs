//! Spares a loop its pulses while its guest hardly runs. A guest has to run before it has touched a window, so the
//! loop waits until its process has used some CPU time instead.
//!
//! ```text
//!   loop    pulse, pulse ─ the process hardly ran ─▶ no pulses until a tick, a request or the alarm ─▶ pulse, pulse
//!                                                      │ sets                              ▲
//!   alarm   ───────────────────────────────────────────┴─▶ sleeps by the process's clock ──┘
//! ```
//!
//! The kernel checks CPU clocks at its timer interrupts, every 1 to 10 ms. A guest that touches some windows between
//! two of them and then stops is noticed at the next tick. Only while the alarm is set does the kernel keep these
//! interrupts on CPUs that could do without (`nohz_full`): for half a millisecond of CPU time at most.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::host::Host;
use crate::kernel::Kernel;

/// CPU time in which no guest touches a window of base pages: a fault takes a microsecond or more under KVM.
const TOUCHES_A_WINDOW: Duration = Duration::from_micros(500);

/// CPU time between two looks up to which the process hardly runs: a quarter of that, so that a process that runs
/// evenly is left without pulses only if the alarm wakes the loop less often than they would.
const HARDLY: Duration = Duration::from_micros(125);

/// Decides whether a loop needs pulses; see the module.
pub(super) struct Quiet {
    host: Arc<dyn Kernel>,
    wake: Arc<dyn Fn() + Send + Sync>,
    /// CPU time of the process's other threads at the latest look.
    used: Duration,
    /// `None` before its first use, or where no thread could be started.
    alarm: Option<Arc<Alarm>>,
    has_failed: bool,
}

impl Quiet {
    /// `wake` ends a wait of the loop for its next pulse or tick.
    pub fn new(host: Arc<dyn Kernel>, wake: impl Fn() + Send + Sync + 'static) -> Quiet {
        Quiet { host, wake: Arc::new(wake), used: Duration::ZERO, alarm: None, has_failed: false }
    }

    /// Whether the process hardly ran since the latest call, so that the loop can wait without pulses. The alarm then
    /// wakes it. Called by the loop's thread: its own CPU time does not count.
    pub fn begins(&mut self) -> bool {
        let Some(process) = self.host.process_cpu_time() else { return false };
        let used = process.saturating_sub(self.host.thread_cpu_time());
        let ran = used.saturating_sub(std::mem::replace(&mut self.used, used));
        let is_quiet = ran <= HARDLY;
        let alarm = if is_quiet { self.alarm() } else { self.alarm.as_deref() };
        alarm.is_some_and(|alarm| alarm.set(is_quiet.then_some(process + TOUCHES_A_WINDOW))) && is_quiet
    }

    fn alarm(&mut self) -> Option<&Alarm> {
        if self.alarm.is_none() && !self.has_failed {
            self.alarm = Alarm::start(&self.host, &self.wake);
            self.has_failed = self.alarm.is_none();
        }
        self.alarm.as_deref()
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        self.alarm.iter().for_each(|alarm| alarm.end());
    }
}

/// A thread that wakes the loop when the process has used some CPU time.
#[derive(Default)]
struct Alarm {
    state: Mutex<AlarmState>,
    changed: Condvar,
}

#[derive(Default)]
struct AlarmState {
    /// CPU time of the process at which the loop is woken; `None`: not at all.
    at: Option<Duration>,
    is_over: bool,
}

impl Alarm {
    fn start(host: &Arc<dyn Kernel>, wake: &Arc<dyn Fn() + Send + Sync>) -> Option<Arc<Alarm>> {
        let alarm = Arc::<Alarm>::default();
        let (this, host, wake) = (Arc::clone(&alarm), Arc::clone(host), Arc::clone(wake));
        let started = thread::Builder::new().name("alarm".into()).spawn(move || this.run(host.as_ref(), wake.as_ref()));
        started.inspect_err(|error| tracing::debug!("the loop keeps its pulses: {error}")).ok().map(|_| alarm)
    }

    /// Moves the alarm. Returns `false` if it wakes no loop any more.
    fn set(&self, at: Option<Duration>) -> bool {
        let mut state = self.state.lock();
        if state.at.is_none() && at.is_some() {
            self.changed.notify_all();
        }
        state.at = at;
        !state.is_over
    }

    /// The thread ends now, or when the process has run: no call ends its sleep before.
    fn end(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_all();
    }

    fn run(&self, host: &dyn Host, wake: &dyn Fn()) {
        while let Some(at) = self.next() {
            if self.is_due(at, host.sleep_until_process_used(at)) {
                wake();
            }
        }
    }

    /// Whether the loop is to be woken after a sleep until `at`: not where it has moved the alarm meanwhile, but always
    /// where the sleep failed, since nothing else wakes it then.
    fn is_due(&self, at: Duration, has_slept: bool) -> bool {
        let mut state = self.state.lock();
        state.is_over |= !has_slept;
        state.at.take_if(|moved_to| *moved_to == at || !has_slept).is_some()
    }

    /// Waits until it is set; `None` at the end.
    fn next(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.at.is_none() && !state.is_over);
        state.at.filter(|_| !state.is_over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    #[test]
    fn a_host_without_a_clock_of_its_process_keeps_the_pulses() {
        let mut quiet = Quiet::new(Arc::new(FakeHost::default()), || ());
        assert!(!quiet.begins() && quiet.alarm.is_none());
    }

    #[test]
    fn the_alarm_wakes_the_loop_when_the_process_has_run_and_not_before_it_is_set() {
        let host: Arc<dyn Kernel> = Arc::new(crate::LinuxHost::open().expect("/proc is mounted"));
        let (wake, woken) = channel();
        let wake: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            let _ = wake.send(());
        });
        let alarm = Alarm::start(&host, &wake).expect("a thread");
        assert!(woken.recv_timeout(Duration::from_millis(20)).is_err());
        let used = || host.process_cpu_time().expect("it has a clock");
        let at = used() + Duration::from_millis(20);
        assert!(alarm.set(Some(at)));
        // The test runs until then, and some milliseconds more: timer interrupts see that it has.
        let began = Instant::now();
        while woken.try_recv().is_err() {
            let late = used().saturating_sub(at);
            assert!(began.elapsed() < Duration::from_secs(20), "it has run for {late:?} more");
        }
        assert!(used() >= at, "the process had not run yet");
        alarm.end();
        assert!(!alarm.set(Some(at)), "it has ended");
    }

    #[test]
    fn a_loop_that_moved_the_alarm_is_woken_early_only_where_the_sleep_failed() {
        let [before, at] = [1, 2].map(Duration::from_secs);
        let alarm = Alarm::default();
        assert!(alarm.set(Some(at)));
        assert!(!alarm.is_due(before, true), "it sleeps again, until then");
        assert!(alarm.is_due(before, false), "no sleep wakes the loop any more");
        assert!(!alarm.set(Some(at)), "the loop has to keep its pulses");
    }
}
