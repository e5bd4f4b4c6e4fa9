//! Whether other work on the host waits for memory or for a CPU: pressure stall information
//! (Documentation/accounting/psi.rst).
//!
//! ```text
//!   some avg10=0.00 avg60=0.38 avg300=1.28 total=369034280      us in which at least one thread waited, since boot
//! ```
//!
//! The kernel counts its own compaction as a wait for memory (`__alloc_pages_direct_compact`, mm/page_alloc.c), so the
//! time of this thread's requests is subtracted. A kernel without these files (`psi=0`, or
//! `CONFIG_PSI_DEFAULT_DISABLED`) has `/proc/loadavg`, which tells how many threads run or wait for a CPU now.

use std::time::Duration;

use wideleaf_policies::{Moment, PerTenThousand};

use super::SupplyRules;
use crate::host::Host;

/// Files of the host's pressure.
pub(super) const CPU: &str = "/proc/pressure/cpu";
pub(super) const MEMORY: &str = "/proc/pressure/memory";
pub(super) const LOADAVG: &str = "/proc/loadavg";

/// Shortest time between two looks. Shorter ones would be decided by single threads.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Time after which a look is forgotten: what was before says nothing about now.
const FORGET_AFTER: Duration = Duration::from_secs(3);

/// Reasons why no block is made although windows wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The host is short of memory.
    HostShort,
    /// Other work waits for memory.
    MemoryPressure,
    /// Other work waits for a CPU.
    CpuPressure,
}

impl Stop {
    pub const fn name(self) -> &'static str {
        match self {
            Stop::HostShort => "host_short",
            Stop::MemoryPressure => "memory_pressure",
            Stop::CpuPressure => "cpu_pressure",
        }
    }
}

/// Result of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// It takes two looks to know.
    NotYet,
    /// Other work does not wait for more than the rules permit.
    Calm,
    /// Other work waits for more, for this resource.
    Pressure(Stop),
}

/// Looks at the pressure, and remembers the latest look.
#[derive(Debug)]
pub(super) struct PressureWatch {
    before: Option<Totals>,
    seen: Reading,
    /// Time of this thread's requests since the latest look.
    own: Duration,
}

/// Times in which at least one thread waited, since boot; `None` where the kernel does not say.
#[derive(Clone, Copy, Debug)]
struct Totals {
    at: Moment,
    cpu: Option<Duration>,
    memory: Option<Duration>,
}

impl PressureWatch {
    pub fn new() -> PressureWatch {
        PressureWatch { before: None, seen: Reading::NotYet, own: Duration::ZERO }
    }

    /// Subtracts this time of a request from the next look.
    pub fn was_busy(&mut self, time: Duration) {
        self.own += time;
    }

    /// The pressure since the look before.
    pub fn look(&mut self, host: &dyn Host, rules: &SupplyRules) -> Reading {
        let before = self.before.filter(|before| host.now().since(before.at) < FORGET_AFTER);
        let is_recent = before.is_some_and(|before| host.now().since(before.at) < LOOK_EVERY);
        if !is_recent {
            let now = Totals::read(host);
            let own = std::mem::take(&mut self.own);
            self.seen = before.map_or(Reading::NotYet, |before| before.until(&now, own, host, rules));
            self.before = Some(now);
        }
        self.seen
    }
}

impl Totals {
    fn read(host: &dyn Host) -> Totals {
        let total = |path| host.read_text(path).ok().and_then(|text| total_of_some(&text));
        Totals { at: host.now(), cpu: total(CPU), memory: total(MEMORY) }
    }

    /// `own`: time of this thread's requests in between.
    fn until(&self, now: &Totals, own: Duration, host: &dyn Host, rules: &SupplyRules) -> Reading {
        let time = now.at.since(self.at);
        let stalls = |from: Option<Duration>, to: Option<Duration>| Some(to?.saturating_sub(from?));
        let is_over = |stalled: Duration, max| share(stalled, time) > max;
        let memory = stalls(self.memory, now.memory).map(|stalled| stalled.saturating_sub(own));
        let is_cpu_busy = match stalls(self.cpu, now.cpu) {
            Some(stalled) => is_over(stalled, rules.cpu_stalls_max),
            None => has_thread_without_cpu(host),
        };
        match memory {
            Some(stalled) if is_over(stalled, rules.memory_stalls_max) => Reading::Pressure(Stop::MemoryPressure),
            _ if is_cpu_busy => Reading::Pressure(Stop::CpuPressure),
            _ => Reading::Calm,
        }
    }
}

fn share(part: Duration, whole: Duration) -> PerTenThousand {
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    PerTenThousand::of(us(part), us(whole))
}

/// The total of the line `some`.
fn total_of_some(text: &str) -> Option<Duration> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = line.split_ascii_whitespace().find_map(|word| word.strip_prefix("total="))?;
    total.parse().ok().map(Duration::from_micros)
}

/// Whether more threads are runnable than there are CPUs. The fourth word of `/proc/loadavg` is `runnable/all`
/// (proc_loadavg(5)); this thread is one of them.
fn has_thread_without_cpu(host: &dyn Host) -> bool {
    let text = host.read_text(LOADAVG).unwrap_or_default();
    let runnable = text.split_ascii_whitespace().nth(3).and_then(|word| word.split('/').next()?.parse::<usize>().ok());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    runnable.is_some_and(|runnable| runnable > cpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;

    const HALF_A_SECOND: Duration = Duration::from_millis(500);

    /// Sets the time in which threads have waited so far, in milliseconds.
    fn set_waited(host: &FakeHost, path: &str, ms: u64) {
        let total = ms * 1000;
        let text = format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull avg10=0.00 total=9\n");
        host.set_text(path, &text);
    }

    /// What is seen half a second after a first look, in which threads have waited that long.
    fn seen_after(cpu_ms: u64, memory_ms: u64, own_ms: u64) -> Reading {
        let (host, mut watch, rules) = (FakeHost::default(), PressureWatch::new(), SupplyRules::default());
        set_waited(&host, CPU, 7_000);
        set_waited(&host, MEMORY, 8_000);
        assert_eq!(watch.look(&host, &rules), Reading::NotYet);
        host.sleep(HALF_A_SECOND);
        set_waited(&host, CPU, 7_000 + cpu_ms);
        set_waited(&host, MEMORY, 8_000 + memory_ms);
        watch.was_busy(Duration::from_millis(own_ms));
        watch.look(&host, &rules)
    }

    #[test]
    fn waits_are_pressure_from_a_share_of_the_time_on_and_own_requests_are_none() {
        let (memory, cpu) = (Reading::Pressure(Stop::MemoryPressure), Reading::Pressure(Stop::CpuPressure));
        assert_eq!(
            [seen_after(250, 50, 0), seen_after(251, 50, 0), seen_after(251, 51, 0)],
            [Reading::Calm, cpu, memory]
        );
        assert_eq!([seen_after(0, 151, 100), seen_after(0, 150, 100)], [memory, Reading::Calm]);
    }

    #[test]
    fn a_look_holds_for_half_a_second_and_an_old_one_says_nothing() {
        let (host, mut watch, rules) = (FakeHost::default(), PressureWatch::new(), SupplyRules::default());
        set_waited(&host, CPU, 0);
        watch.look(&host, &rules);
        host.sleep(HALF_A_SECOND);
        assert_eq!(watch.look(&host, &rules), Reading::Calm);
        set_waited(&host, CPU, 400);
        assert_eq!(watch.look(&host, &rules), Reading::Calm, "it is the same look");
        host.sleep(HALF_A_SECOND);
        assert_eq!(watch.look(&host, &rules), Reading::Pressure(Stop::CpuPressure));
        host.sleep(FORGET_AFTER);
        assert_eq!(watch.look(&host, &rules), Reading::NotYet);
    }

    #[test]
    fn a_kernel_without_stall_information_tells_the_runnable_threads() {
        let (host, mut watch, rules) = (FakeHost::default(), PressureWatch::new(), SupplyRules::default());
        let mut look = |runnable: usize| {
            host.set_text(LOADAVG, &format!("0.20 0.18 0.12 {runnable}/800 11206\n"));
            host.sleep(HALF_A_SECOND);
            watch.look(&host, &rules)
        };
        assert_eq!(
            [look(9999), look(9999), look(1)],
            [Reading::NotYet, Reading::Pressure(Stop::CpuPressure), Reading::Calm]
        );
    }

    #[test]
    fn text_that_is_not_of_this_form_tells_nothing() {
        for text in ["", "full total=7\n", "some avg10=0.00\n", "some total=many\n"] {
            assert_eq!(total_of_some(text), None, "{text:?}");
        }
    }
}
