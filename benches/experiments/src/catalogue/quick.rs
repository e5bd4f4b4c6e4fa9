//! `quick`: the picture for the README. It shows the gain of large pages for a few kernels on this host, and whether
//! a guest without large pages at its start reaches that gain.
//!
//! Many short runs instead of a few long ones: runs differ here by the position of their memory and by other load on
//! the machine. Each run draws both anew.

use std::time::Duration;

use crate::catalogue::Catalogued;
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::report::Section;
use crate::results::Results;

/// The `quick` experiment of the catalogue.
pub struct Quick;

/// Budget: half a minute of ten minutes remains for the last round, which may take longer than the rounds before.
const BUDGET: Duration = Duration::from_secs(570);

/// More rounds than most machines complete in the budget. A machine with faults of 25 us completes 32. These suffice
/// for an interval of 2 % if two runs differ by 4.6 %: 1.25 · 1.96 · 4.6 % / √32 (the error of a median).
const ROUNDS: u32 = 60;

/// Memory beyond the kernel's data.
const BESIDE_MIB: u64 = 64;

/// A kernel: name in tables, unit of its figure, size of its data, arguments, duration of a run in seconds.
struct QuickKernel {
    name: &'static str,
    unit: &'static str,
    data_mib: u64,
    arguments: &'static [&'static str],
    seconds: f64,
}

/// Kernels from a large gain to none: the last one hardly uses memory, so it shows the cost of managing it. They are
/// small, because a guest's first touch of memory takes longer than any of them computes.
const KERNELS: [QuickKernel; 5] = [
    QuickKernel {
        name: "GUPS 2^24",
        unit: "GUP/s",
        data_mib: 128,
        arguments: &["gups", "--memory", "256M", "--cmdline", "log2_words=24"],
        seconds: 1.7,
    },
    QuickKernel { name: "MG W", unit: "Mop/s", data_mib: 58, arguments: &["npb.mg", "--class", "W"], seconds: 0.4 },
    QuickKernel {
        name: "STREAM",
        unit: "MB/s",
        data_mib: 128,
        arguments: &["stream", "--cmdline", "words=5592405 times=20"],
        seconds: 1.2,
    },
    QuickKernel { name: "CG A", unit: "Mop/s", data_mib: 29, arguments: &["npb.cg", "--class", "A"], seconds: 0.7 },
    QuickKernel { name: "EP W", unit: "Mop/s", data_mib: 1, arguments: &["npb.ep", "--class", "W"], seconds: 0.5 },
];

impl Catalogued for Quick {
    fn name(&self) -> &'static str {
        "quick"
    }

    fn summary(&self) -> &'static str {
        "five kernels on base pages, promoted by auto while they run, and on huge pages from the start"
    }

    fn budget(&self) -> Option<Duration> {
        Some(BUDGET)
    }

    fn define(&self, host: &HostFacts) -> Experiment {
        let arm = |name: &str, summary: &str| Arm { name: name.into(), summary: summary.into() };
        let arms = vec![
            arm("base", "4 KiB pages, never promoted"),
            arm("auto", "4 KiB pages, promoted by `auto` while the kernel runs, its set-up included"),
            arm("huge", "2 MiB transparent huge pages from the start"),
        ];
        let jobs: [fn(&[&str], f64) -> Job; 3] = [
            |arguments, seconds| Job::run(&[arguments, &["--host-page", "4k", "--policy", "never"]].concat(), seconds),
            |arguments, seconds| {
                Job::run(&[arguments, &["--host-page", "4k", "--policy", "auto"]].concat(), seconds).with_map()
            },
            |arguments, seconds| Job::run(&[arguments, &["--host-page", "2m", "--policy", "never"]].concat(), seconds),
        ];
        let native: &[&str] = if host.why_no_kvm.is_some() { &["--native"] } else { &["--no-daemon"] };
        let case = |kernel: &QuickKernel| Case {
            name: kernel.name.into(),
            unit: kernel.unit.into(),
            working_set_mib: kernel.data_mib + BESIDE_MIB,
            cells: jobs.iter().map(|job| Cell::of(job(&[kernel.arguments, native].concat(), kernel.seconds))).collect(),
        };
        let (title, where_it_is) = match &host.why_no_kvm {
            None => ("Quick: gain of large pages for a guest here", "a guest"),
            Some(_) => ("Quick: gain of large pages for a process here", "a process (no guests can be run here)"),
        };
        let question = format!(
            "What does {where_it_is} gain from 2 MiB pages on this host, and how much of that does `auto` give to \
             one that starts without them?"
        );
        Experiment {
            name: self.name().into(),
            title: title.into(),
            question,
            source: None,
            rounds: ROUNDS,
            arms,
            cases: KERNELS.iter().map(case).collect(),
        }
    }

    fn sections(&self, _results: &Results) -> Vec<Section> {
        vec![] // the common sections answer the question
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{expected_of_all, turns};

    #[test]
    fn it_takes_at_most_ten_minutes_with_enough_rounds() {
        let once = Experiment { rounds: 1, ..Quick.define(&HostFacts::of_a_test()) };
        let a_round = expected_of_all(&once, &[], &turns(&once));
        assert!(BUDGET + a_round <= Duration::from_mins(10), "{a_round:?}");
        assert!(a_round * 25 <= BUDGET, "{a_round:?}");
    }

    #[test]
    fn it_runs_natively_on_a_host_without_guests() {
        let mut host = HostFacts::of_a_test();
        host.why_no_kvm = Some("there is no /dev/kvm".into());
        let command = Quick.define(&host).job(0, 0).expect("a job").command();
        assert!(command.contains("--native") && !command.contains("--no-daemon"), "{command}");
    }
}
