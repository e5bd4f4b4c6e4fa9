//! Stalls of a whole guest of another process, by collapses of its shared memory: at most a hundredth of the time of a
//! guest at work, as many as the other budgets allow while it idles.
//!
//! Memory of this process is unmapped before such a collapse, and only threads that touch it wait
//! ([`unmapped_collapse`](crate::actuators::unmapped_collapse)). Another process's memory cannot be unmapped from
//! outside: `process_madvise(2)` accepts no advice that does so.
//!
//! ```text
//!   guest at work   credit += time / 100, at most 100 ms       a collapse takes what it took from the credit
//!   guest idle      its process used at most a tenth of a core since the last look, 0.2 s before or earlier
//! ```
//!
//! A guest that wakes up while windows are collapsed stalls for 0.2 s at most before the budget applies.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::Moment;

use crate::host::Host;
use crate::sensors::share::nanoseconds;

/// A guest at work stalls for one part in this many of its time.
const ONE_PART_IN: u32 = 100;

/// Stalls that may be saved up: some windows in a row.
const CREDIT_MAX: Duration = Duration::from_millis(100);

/// Interval between two reads of the process's CPU time, which the kernel gives in units of 10 ms.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Milliseconds of a unit of CPU time in `/proc/PID/stat`, USER_HZ (proc_pid_stat(5)): 100 units a second on all
/// architectures with KVM.
const TICK_MS: u64 = 10;

/// A process is idle that uses at most one part in this many of a core. Timers of an idle Linux guest and its VMM's
/// other threads use some hundredths.
const IDLE_PART_IN: u32 = 10;

/// Account of one VM; see the module.
#[derive(Debug, Default)]
pub(super) struct StallBudget(Mutex<Account>);

#[derive(Debug, Default)]
struct Account {
    credited_at: Option<Moment>,
    /// Stalls that are paid for, in nanoseconds. Below zero: a debt, since a stall can take longer than the credit.
    credit_ns: i64,
    /// CPU time of the process, when it was read.
    looked: Option<(Moment, Duration)>,
    is_idle: bool,
    is_spent: bool,
}

impl StallBudget {
    /// Whether the guest may stall now.
    pub fn may_stall(&self, host: &dyn Host) -> bool {
        let mut account = self.lock();
        account.earn(host.now());
        account.look(host);
        account.is_spent = !account.is_idle && account.credit_ns <= 0;
        !account.is_spent
    }

    /// Books a stall.
    pub fn stalled(&self, time: Duration) {
        let mut account = self.lock();
        if !account.is_idle {
            account.credit_ns = account.credit_ns.saturating_sub(nanoseconds(time));
        }
    }

    /// Whether the latest request was refused.
    pub fn is_spent(&self) -> bool {
        self.lock().is_spent
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        // Every change is complete after each statement, so the account is consistent after a panic elsewhere.
        self.0.lock()
    }
}

impl Account {
    fn earn(&mut self, now: Moment) {
        let time = self.credited_at.map_or(Duration::ZERO, |at| now.since(at));
        let earned = nanoseconds(time / ONE_PART_IN);
        self.credit_ns = self.credit_ns.saturating_add(earned).min(nanoseconds(CREDIT_MAX));
        self.credited_at = Some(now);
    }

    /// Looks whether the process idles. Without an answer it is at work.
    fn look(&mut self, host: &dyn Host) {
        let now = host.now();
        if self.looked.is_some_and(|(at, _)| now.since(at) < LOOK_EVERY) {
            return;
        }
        let used = host.read_text("/proc/self/stat").ok().and_then(|stat| cpu_time(&stat));
        let used_since = used.zip(self.looked).map(|(used, (at, before))| (used.saturating_sub(before), now.since(at)));
        self.is_idle = used_since.is_some_and(|(used, time)| used <= time / IDLE_PART_IN);
        self.looked = used.map(|used| (now, used));
    }
}

/// CPU time of all threads of a process so far, from its `/proc/PID/stat` (proc_pid_stat(5), fields 14 and 15). The
/// name in field 2 may contain anything, also `)`.
fn cpu_time(stat: &str) -> Option<Duration> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let mut ticks = behind_name.split_ascii_whitespace().skip(11).take(2).map(str::parse::<u64>);
    let (user, system) = (ticks.next()?.ok()?, ticks.next()?.ok()?);
    Some(Duration::from_millis(user.saturating_add(system).saturating_mul(TICK_MS)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;

    const STALL: Duration = Duration::from_millis(20);

    /// Sets the CPU time that the guest's process has used, in milliseconds.
    fn set_used(host: &FakeHost, ms: u64) {
        let text = format!("7 (a) b) R 1 1 1 0 -1 0 0 0 0 0 {} {} 0 0 20 0 9 0 1\n", ms / 20, ms / 10 - ms / 20);
        host.set_text("/proc/self/stat", &text);
    }

    /// Number of windows of `windows` that may be collapsed in a row.
    fn stalls(budget: &StallBudget, host: &FakeHost, windows: usize) -> usize {
        let stall = |_: &usize| {
            let may = budget.may_stall(host);
            if may {
                budget.stalled(STALL);
            }
            may
        };
        (0..windows).filter(stall).count()
    }

    #[test]
    fn a_guest_at_work_stalls_for_a_hundredth_of_its_time() {
        let (budget, host) = (StallBudget::default(), FakeHost::default());
        let mut done = 0;
        for second in 0..100 {
            set_used(&host, second * 1000);
            done += stalls(&budget, &host, 50);
            host.sleep(Duration::from_secs(1));
        }
        assert_eq!(done, 50, "100 s allow 1 s of stalls, 20 ms each");
        assert!(budget.is_spent());
    }

    #[test]
    fn credit_is_saved_up_for_five_windows_and_no_more() {
        let (budget, host) = (StallBudget::default(), FakeHost::default());
        set_used(&host, 0);
        assert_eq!(stalls(&budget, &host, 10), 0, "it begins with nothing");
        host.sleep(Duration::from_secs(1000));
        set_used(&host, 900_000);
        assert_eq!(stalls(&budget, &host, 10), 5);
    }

    #[test]
    fn a_stall_beyond_the_credit_is_paid_for_before_the_next() {
        let (budget, host) = (StallBudget::default(), FakeHost::default());
        set_used(&host, 0);
        assert!(!budget.may_stall(&host));
        host.sleep(Duration::from_secs(1));
        set_used(&host, 1000);
        assert!(budget.may_stall(&host), "10 ms are there");
        budget.stalled(Duration::from_millis(60));
        host.sleep(Duration::from_secs(5));
        set_used(&host, 6000);
        assert!(!budget.may_stall(&host), "5 s pay for the debt of 50 ms");
        host.sleep(Duration::from_secs(1));
        set_used(&host, 7000);
        assert!(budget.may_stall(&host));
    }

    #[test]
    fn an_idle_guest_stalls_as_often_as_is_asked_until_it_works_again() {
        let (budget, host) = (StallBudget::default(), FakeHost::default());
        set_used(&host, 5000);
        assert_eq!(stalls(&budget, &host, 1), 0, "one look says nothing");
        host.sleep(LOOK_EVERY);
        set_used(&host, 5020);
        assert_eq!(stalls(&budget, &host, 1000), 1000, "it used a tenth of a core");
        host.sleep(LOOK_EVERY);
        set_used(&host, 5050);
        assert_eq!(stalls(&budget, &host, 1000), 1, "and now more: 0.4 s have earned a part of a window");
    }

    #[test]
    fn a_guest_with_unknown_cpu_time_is_at_work() {
        let (budget, host) = (StallBudget::default(), FakeHost::default());
        for text in ["", "7 (a) R 1", "7 (a) R 1 1 1 0 -1 0 0 0 0 0 x 1 0\n"] {
            host.set_text("/proc/self/stat", text);
            assert_eq!(cpu_time(text), None, "{text:?}");
            host.sleep(LOOK_EVERY);
            budget.may_stall(&host);
            assert!(!budget.lock().is_idle);
        }
        let with_brackets = "7 (a (b) c) R 1 1 1 0 -1 0 0 0 0 0 3 4 0 0 20 0 9 0 1\n";
        assert_eq!(cpu_time(with_brackets), Some(Duration::from_millis(70)));
        // After eight days of 64 busy vCPUs.
        let long = "7 (a) R 1 1 1 0 -1 0 0 0 0 0 4294967296 4 0 0 20 0 9 0 1\n";
        assert_eq!(cpu_time(long), Some(Duration::from_millis(42_949_673_000)));
    }
}
