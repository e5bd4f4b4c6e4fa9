//! `quick`: the README's picture. What large pages are worth to a few kernels on this host, and whether a guest gets them without asking.

use crate::catalogue::Catalogued;
use crate::definition::{Arm, Case, Cell, Experiment, HostFacts, Job};
use crate::report::Section;
use crate::results::Results;

/// See the head of this file.
pub struct Quick;

impl Catalogued for Quick {
    fn name(&self) -> &'static str {
        "quick"
    }

    fn summary(&self) -> &'static str {
        "a few kernels on base pages, under auto, on huge pages from the start: at most 10 minutes"
    }

    fn define(&self, _host: &HostFacts) -> Experiment {
        let arm = |name: &str, summary: &str| Arm { name: name.into(), summary: summary.into() };
        let job = |extra: &[&str]| {
            Cell::of(Job::run(
                &[&["gups", "--memory", "512M", "--cmdline", "log2_words=25", "--no-daemon"], extra].concat(),
                3.0,
            ))
        };
        Experiment {
            name: self.name().into(),
            title: "Quick".into(),
            question: "What are large pages worth here, and does a guest get them while it runs?".into(),
            source: None,
            rounds: 6,
            arms: vec![arm("base", "base pages, never promoted"), arm("auto", "base pages, promoted while it runs")],
            cases: vec![Case {
                name: "GUPS 2^25".into(),
                unit: "GUP/s".into(),
                working_set_mib: 640,
                cells: vec![job(&["--policy", "never"]), job(&["--policy", "auto"])],
            }],
        }
    }

    fn sections(&self, _results: &Results) -> Vec<Section> {
        vec![]
    }
}
