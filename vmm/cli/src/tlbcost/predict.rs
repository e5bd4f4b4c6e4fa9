//! What 2 MiB pages would gain, said first and measured then: the share of a kernel's time that goes into TLB misses bounds what any page
//! size can gain; runs on base and on 2 MiB pages, in turn, say what it is ("Huge pages part 5", LWN 2010, does the same on STREAM).
//!
//! ```text
//!   misses of the timed part ── a PMU's count, or a closed form of the kernel's accesses (MissSource)
//!        × cost of a miss  ÷ time  =  share: the most that can be gained;  × 0.7: what that article's machine made of it
//!   base │ huge │ base │ huge │ …   ─▶ time saved within each round, median and interval
//! ```
//!
//! A count of misses times their cost says too much where misses overlap with other work and with each other: the article's machine gained
//! 12 to 12.7 % of 17.6 predicted. So the factor 0.7 is printed beside the bound, and never in it.

use std::time::Duration;

use indicatif::ProgressBar;
use serde::Serialize;
use wideleaf_kernels::Kernel;
use wideleaf_kernels::registry::{MemoryNeed, by_name};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PageSize};

use super::counters::{LinuxPmu, WalkEvents, Walks, count};
use super::measure::CellReport;
use crate::child;
use crate::failure::Failure;
use crate::interrupts::Interrupts;
use crate::report::{Phase, RunReport};
use crate::run::kernel;

/// A run of a kernel takes no longer.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);

/// What a static count of misses times their cost over-predicts by: 12.7 % measured of 17.6 % (LWN, one machine, STREAM).
pub const SCALE: f64 = 0.7;

/// The loops of STREAM read and write so many bytes for each element of an array: 16, 16, 24 and 24.
const STREAM_BYTES_PER_WORD: f64 = 80.0;
/// STREAM's arrays, of eight bytes an element.
const STREAM_ARRAYS_BYTES_PER_WORD: f64 = 24.0;

/// Misses of the timed part of a run on base pages, and how long it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// Misses in all levels of the TLB.
    pub misses: f64,
    /// Seconds.
    pub seconds: f64,
}

/// Who knows how often a kernel misses.
pub trait MissSource {
    /// For the report.
    fn describe(&self) -> String;

    /// Of a run on base pages, with a TLB that reaches so far. `None` where the run does not tell what is needed.
    fn timed(&self, run: &RunReport, reach_bytes: u64) -> Option<Timed>;
}

/// Kernels whose accesses are simple enough to count their misses on paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosedForm {
    /// Each update is somewhere in the table: 1 - reach/table misses (within 1.1 % of the counters of the FreeBSD study's Opteron).
    Gups,
    /// Each array is gone through from end to end: a miss a page and array.
    Stream,
}

impl ClosedForm {
    /// That of a kernel.
    pub fn of(kernel: &str) -> Option<ClosedForm> {
        match kernel {
            "gups" => Some(ClosedForm::Gups),
            "stream" => Some(ClosedForm::Stream),
            _ => None,
        }
    }
}

/// The part of random accesses to a table that miss in a TLB of this reach.
pub fn missing_part(table_bytes: u64, reach_bytes: u64) -> f64 {
    1.0 - (reach_bytes as f64 / table_bytes.max(1) as f64).min(1.0)
}

impl MissSource for ClosedForm {
    fn describe(&self) -> String {
        match self {
            ClosedForm::Gups => "closed form: 1 - reach/table misses an update",
            ClosedForm::Stream => "closed form: one miss a page of each array passed",
        }
        .into()
    }

    fn timed(&self, run: &RunReport, reach_bytes: u64) -> Option<Timed> {
        let bytes = run.regions.first()?.bytes;
        match self {
            ClosedForm::Gups => {
                let phase = work_of(run)?;
                Some(Timed { misses: phase.units as f64 * missing_part(bytes, reach_bytes), seconds: phase.seconds })
            }
            ClosedForm::Stream => {
                let words = bytes as f64 / STREAM_ARRAYS_BYTES_PER_WORD;
                let pages = words * STREAM_BYTES_PER_WORD / PageSize::Base4K.bytes().get() as f64;
                // What one pass leaves in the TLB the next one, over more than it reaches, does not find.
                let misses = if bytes > reach_bytes { pages } else { 0.0 };
                Some(Timed { misses, seconds: seconds_of(run)? })
            }
        }
    }
}

/// The timed part of a kernel.
fn work_of(run: &RunReport) -> Option<&Phase> {
    run.phases.iter().find(|phase| ["update", "compute"].contains(&phase.name.as_str()))
}

/// Time of the work: STREAM's own mean of a repetition, which leaves the first out, else that of the timed part.
fn seconds_of(run: &RunReport) -> Option<f64> {
    let loops = ["copy_avg", "scale_avg", "add_avg", "triad_avg"].map(|name| run.results.get(name));
    match loops {
        [Some(copy), Some(scale), Some(add), Some(triad)] => Some(copy.value + scale.value + add.value + triad.value),
        _ => Some(work_of(run)?.seconds),
    }
}

/// A median and how far it can be trusted, without an assumption on how values spread: between two of them, by their ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MedianInterval {
    /// The middle.
    pub median: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// How often such an interval holds the true median: 0.95 or more, or less where there are too few values.
    pub confidence: f64,
}

/// The narrowest pair of ranks, one from each end, that holds the median with 95 %; the lowest and highest value where none does
/// (a binomial with probability one half: the sign test's interval).
///
/// # Panics
/// Where there are no values.
pub fn median_interval(values: &[f64]) -> MedianInterval {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let mut chosen = (0, 1.0 - 2.0 * 0.5_f64.powi(n as i32));
    let (mut outside, mut ways) = (0.0, 1.0);
    for rank in 0..n.div_ceil(2) {
        outside += ways * 0.5_f64.powi(n as i32);
        ways *= (n - rank) as f64 / (rank + 1) as f64;
        if 1.0 - 2.0 * outside >= 0.95 {
            chosen = (rank, 1.0 - 2.0 * outside);
        }
    }
    let median = f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]);
    MedianInterval { median, low: sorted[chosen.0], high: sorted[n - 1 - chosen.0], confidence: chosen.1 }
}

/// Prediction and measurement, side by side.
#[derive(Clone, Debug, Serialize)]
pub struct Prediction {
    /// What ran, natively.
    pub kernel: String,
    /// Its parameters.
    pub cmdline: String,
    /// Where the number of misses is from.
    pub misses_from: String,
    /// On base pages, a second.
    pub misses_per_s: Option<f64>,
    /// Cost of one, where it was multiplied with.
    pub miss_ns: Option<f64>,
    /// Share of the time in page walks on base pages: the most that 2 MiB pages can save. Above 1 where misses overlap.
    pub share_bound: f64,
    /// The same times [`SCALE`].
    pub share_scaled: f64,
    /// The factor.
    pub scale: f64,
    /// What was counted, where there is a PMU.
    pub counted: Option<Walks>,
    /// Time that 2 MiB pages saved, as part of the time on base pages.
    pub saved: MedianInterval,
    /// Rounds of one run each.
    pub rounds: usize,
    /// Windows of its data that were large in the last run on 2 MiB pages, and all of them.
    pub large_windows: (u64, u64),
}

/// What is to be predicted.
pub struct Subject {
    kernel: &'static Kernel,
    cmdline: String,
    ram: Bytes,
}

impl Subject {
    /// A kernel and its parameters.
    ///
    /// # Errors
    /// [`Failure::Usage`] where there is no such kernel, class or parameter.
    pub fn new(name: &str, class: Option<&str>, cmdline: &str) -> Result<Subject, Failure> {
        let unknown =
            || Failure::Usage(format!("--predict {name}: there is no such kernel; `wideleaf kernels` lists them"));
        let kernel = by_name(name).ok_or_else(unknown)?;
        let cmdline = kernel::with_class(kernel, class, cmdline)?;
        let needed = match kernel::memory_needed(kernel, &cmdline, 1)? {
            MemoryNeed::Bytes(needed) => Bytes::new(needed),
            MemoryNeed::AllThereIs => mib(256),
        };
        let ram = kernel::least_ram(needed, kernel::Pages { host: PageSize::Huge2M, guest: None })?;
        Ok(Subject { kernel, cmdline, ram })
    }

    /// Where the number of its misses is to come from.
    ///
    /// # Errors
    /// [`Failure::Host`] where nothing here tells it.
    pub fn source(&self, pmu: &Result<&'static WalkEvents, String>) -> Result<Source, Failure> {
        match (pmu, ClosedForm::of(self.kernel.name.as_str())) {
            (Ok(events), _) if !events.walk_cycles.is_empty() => Ok(Source::Counted(events)),
            (_, Some(form)) => Ok(Source::Misses(Box::new(form))),
            (pmu, None) => {
                let why = pmu.as_ref().err().map_or("the CPU counts no cycles of walks", String::as_str);
                let name = self.kernel.name;
                Err(Failure::Host(format!(
                    "nothing tells how often {name} misses: only gups and stream have a closed form, and a host with a PMU counts ({why})"
                )))
            }
        }
    }

    fn arguments(&self, page: PageSize) -> Vec<String> {
        let mut arguments: Vec<String> =
            ["run", "--native", self.kernel.name.as_str(), "--policy", "never", "--prefault"].map(str::to_owned).into();
        arguments.extend(["--cmdline".into(), self.cmdline.clone(), "--memory".into(), self.ram.get().to_string()]);
        arguments.extend(["--host-page".into(), page.name().into()]);
        arguments
    }

    fn run(&self, page: PageSize, interrupts: &Interrupts) -> Result<RunReport, Failure> {
        let report = child::run(&self.arguments(page), RUN_TIMEOUT, interrupts)?;
        if report.verification.as_ref().is_some_and(|verification| !verification.passed) {
            return Err(Failure::GuestFailed(format!("{} did not pass its verification", self.kernel.name)));
        }
        Ok(report)
    }

    /// Predicts, then runs in turn on base and on 2 MiB pages. `cost` is what a miss on base pages costs in a process.
    ///
    /// # Errors
    /// [`Failure`]: a run failed, or the cost of a miss is not known.
    pub fn predict(
        &self,
        source: &Source,
        cost: Option<&CellReport>,
        rounds: usize,
        interrupts: &Interrupts,
        bar: &ProgressBar,
    ) -> Result<Prediction, Failure> {
        // Before the runs, which would be for nothing without it.
        let known = cost.and_then(cost_and_reach);
        if source.needs_cost() && known.is_none() {
            let why =
                "what a miss costs here did not agree with itself, or its footprint showed one level of the TLB alone";
            return Err(Failure::Host(format!("{why}: repeat it on a quiet machine, or with a larger --bytes")));
        }
        let (miss_ns, reach) = known.unwrap_or_default();
        let mut runs = Vec::new();
        for round in 1..=rounds {
            bar.set_message(format!("{} round {round} of {rounds}", self.kernel.name));
            let pair = (self.run(PageSize::Base4K, interrupts)?, self.run(PageSize::Huge2M, interrupts)?);
            bar.inc(2);
            runs.push(pair);
        }
        let untimed = || Failure::GuestFailed(format!("{} told no time of its work", self.kernel.name));
        let saved = runs.iter().map(|(base, huge)| Some(1.0 - seconds_of(huge)? / seconds_of(base)?));
        let saved = median_interval(&saved.collect::<Option<Vec<f64>>>().ok_or_else(untimed)?);
        let large = runs.last().and_then(|(_, huge)| huge.regions.first());
        let large_windows = large.map_or((0, 0), |region| (region.windows_host_large, region.windows));
        let mut prediction = Prediction {
            kernel: self.kernel.name.to_string(),
            cmdline: self.cmdline.clone(),
            misses_from: source.describe(),
            misses_per_s: None,
            miss_ns: None,
            share_bound: 0.0,
            share_scaled: 0.0,
            scale: SCALE,
            counted: None,
            saved,
            rounds,
            large_windows,
        };
        match source {
            Source::Counted(events) => {
                let counted = count(&LinuxPmu, events, || self.run(PageSize::Base4K, interrupts));
                let (walks, run) = counted.map_err(|why| Failure::Host(format!("the PMU did not count: {why}")))?;
                run?;
                prediction.share_bound = walks.share().unwrap_or_default();
                prediction.counted = Some(walks);
            }
            Source::Misses(source) => {
                let rates =
                    runs.iter().map(|(base, _)| source.timed(base, reach).map(|timed| timed.misses / timed.seconds));
                let rates = rates.collect::<Option<Vec<f64>>>().ok_or_else(untimed)?;
                let misses_per_s = median_interval(&rates).median;
                prediction.share_bound = misses_per_s * miss_ns / 1e9;
                (prediction.misses_per_s, prediction.miss_ns) = (Some(misses_per_s), Some(miss_ns));
            }
        }
        prediction.share_scaled = prediction.share_bound * SCALE;
        Ok(prediction)
    }
}

/// Where the number of misses comes from. Whoever can count a trace is one more [`MissSource`].
pub enum Source {
    /// The CPU counts the cycles themselves.
    Counted(&'static WalkEvents),
    /// Somebody knows the misses.
    Misses(Box<dyn MissSource>),
}

impl Source {
    fn describe(&self) -> String {
        match self {
            Source::Counted(events) => format!("PMU: cycles of page walks ({})", events.source),
            Source::Misses(source) => source.describe(),
        }
    }

    /// Whether what a miss costs has to be known.
    pub fn needs_cost(&self) -> bool {
        matches!(self, Source::Misses(_))
    }
}

/// Nanoseconds of a miss in all levels, and the reach of the last.
fn cost_and_reach(cell: &CellReport) -> Option<(f64, u64)> {
    Some((cell.walk_ns?.median, cell.levels.last()?.reach_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_accesses_miss_where_the_table_is_beyond_the_reach() {
        // freebsd_gups.csv counts two passes; reach 2.125 MiB of 4 KiB pages.
        for (log2_words, observed) in [(25, 1.99542), (26, 2.00636), (27, 2.01330), (28, 2.01977)] {
            let predicted = 2.0 * missing_part(8 << log2_words, 2_228_224);
            assert!((predicted / observed - 1.0_f64).abs() < 0.011, "2^{log2_words}: {predicted} of {observed}");
        }
        assert_eq!(missing_part(1 << 20, 2 << 20), 0.0);
    }

    #[test]
    fn an_interval_is_between_ranks_that_hold_the_median_with_95_per_cent() {
        let of = |n: u32| median_interval(&(1..=n).map(f64::from).collect::<Vec<_>>());
        // Six values: 1 - 2/64. Eight: the second and the seventh hold it with 93 % only.
        assert_eq!(of(6), MedianInterval { median: 3.5, low: 1.0, high: 6.0, confidence: 1.0 - 2.0 / 64.0 });
        assert_eq!((of(8).low, of(8).high), (1.0, 8.0));
        // Nine: 1 - 2 (1 + 9)/512.
        assert_eq!((of(9).low, of(9).high, of(9).confidence), (2.0, 8.0, 1.0 - 20.0 / 512.0));
        assert_eq!((of(3).low, of(3).high, of(3).confidence), (1.0, 3.0, 0.75));
        assert_eq!((of(1).median, of(1).confidence), (1.0, 0.0));
    }

    #[test]
    fn a_kernel_without_a_closed_form_is_refused_without_a_pmu() {
        let no_pmu = Err("no PMU: No such file or directory".to_owned());
        let subject = |name, class| Subject::new(name, class, "").expect("it is a kernel");
        let gups = subject("gups", None).source(&no_pmu).expect("it has a closed form");
        assert!(gups.needs_cost() && gups.describe().starts_with("closed form"), "{}", gups.describe());
        let refused =
            subject("npb.cg", Some("A")).source(&no_pmu).err().expect("nothing counts its misses").to_string();
        assert!(
            refused.starts_with("nothing tells how often npb.cg misses")
                && refused.ends_with("(no PMU: No such file or directory)"),
            "{refused}"
        );
        let unknown = Subject::new("cg", None, "").err().expect("there is no such kernel").to_string();
        assert!(unknown.contains("there is no such kernel"), "{unknown}");
    }
}
