//! A simulation of a recorded run (`wideleaf-lab trace record npb.cg --class A --iterations 1`).
//!
//! ```text
//!   init ──────────── compute ───────────── verify        phases of the trace
//!     × 1     × iterations of the class         × 1       weight of each
//!               by those recorded
//! ```
//!
//! The counters of the tables cover the whole process, and so does a trace, but only the kernel's accesses to its
//! arena. The stack, the code and the system are in the counters and not in the trace.

use std::fs::File;
use std::sync::atomic::Ordering;

use wideleaf_benches::scenario::{Ended, Waiting};
use wideleaf_simulator::streams::Access;
use wideleaf_trace::{Header, TraceError, TraceReader};

use crate::simulated::{Arm, Sums};

/// An open trace file.
pub struct Trace<'p> {
    path: &'p str,
    reader: TraceReader<File>,
    header: Header,
}

impl<'p> Trace<'p> {
    /// Opens a trace and reads its header.
    pub fn open(path: &'p str) -> Result<Trace<'p>, Ended> {
        let file = File::open(path).map_err(|error| Ended::Skipped(format!("{path}: {error}")))?;
        let reader = TraceReader::open(file).map_err(|error| unusable(path, error))?;
        Ok(Trace { path, header: reader.header().clone(), reader })
    }

    /// Name of the kernel.
    pub fn kernel(&self) -> &str {
        &self.header.kernel
    }

    /// Kernel and class, or kernel and edge: the name of a row of the tables.
    pub fn name(&self) -> String {
        let size = self.header.parameters.split_whitespace().find_map(|word| word.strip_prefix("n="));
        let size = if self.header.class.is_empty() { size.unwrap_or_default() } else { &self.header.class };
        format!("{} {size}", self.header.kernel).trim_end().to_owned()
    }

    /// Parameters that are not part of the name.
    pub fn variant(&self) -> String {
        let is_told = |word: &str| word.starts_with("n=") || word.starts_with("class=");
        let words: Vec<_> = self.header.parameters.split_whitespace().filter(|word| !is_told(word)).collect();
        if words.is_empty() { "trace".into() } else { format!("trace, {}", words.join(" ")) }
    }

    /// Number of recorded iterations and of the class's iterations.
    pub fn scale(&self) -> String {
        format!("{} of {}", self.header.iterations, self.header.class_iterations)
    }

    /// Size of the arena in bytes.
    pub fn arena_bytes(&self) -> u64 {
        self.header.arena_bytes
    }

    /// Simulates the whole run on each machine.
    pub fn simulate<const N: usize>(mut self, mut arms: [Arm; N], waiting: &Waiting) -> Result<[Sums; N], Ended> {
        let factor = match (self.header.iterations, self.header.class_iterations) {
            (0, _) | (_, 0) => 1.0,
            (run, of_class) => f64::from(of_class) / f64::from(run),
        };
        let (mut block, mut accesses) = (Vec::new(), Vec::new());
        while self.reader.next_block(&mut block).map_err(|error| unusable(self.path, error))? {
            let weight = if self.reader.phase() == "compute" { factor } else { 1.0 };
            accesses.clear();
            accesses.extend(block.iter().map(|it| Access {
                address: it.address,
                is_write: it.is_write,
                repeats: it.repeats,
            }));
            for arm in &mut arms {
                arm.run(&accesses);
                arm.sum_up(weight);
            }
            if waiting.flag().load(Ordering::Relaxed) {
                return Err(Ended::Interrupted);
            }
        }
        if self.reader.totals().is_cut {
            return Err(Ended::Skipped(format!(
                "{}: the trace is truncated and does not represent a whole run; record \
                it again",
                self.path
            )));
        }
        Ok(arms.map(|arm| arm.sums()))
    }
}

fn unusable(path: &str, error: TraceError) -> Ended {
    Ended::Skipped(format!("{path}: {error}"))
}
