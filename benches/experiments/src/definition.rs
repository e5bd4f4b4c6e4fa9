//! An experiment as data: its arms (what is compared), its cases (the workloads), and the job of each
//! case in each arm.
//!
//! ```text
//!              arm base      arm auto      arm hugetlb
//!   case CG A   job           job           job          one round: left to right; the next begins one arm further
//!   case IS A   job           job           absent: why
//! ```

use serde::{Deserialize, Serialize};

use crate::command_line::typed;
use crate::disturbance::DisturbedGuests;
use crate::guest::{Guest, QemuRam};
use crate::metric::Better;
use crate::restoring::RestoredGuest;

pub use crate::host_facts::{HostFacts, NodeFacts};

/// An experiment for this host.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Experiment {
    /// Name of the experiment on the command line.
    pub name: String,
    /// Title of the experiment in a report.
    pub title: String,
    /// Question that the experiment answers, in a sentence or two.
    pub question: String,
    /// Published measurements that the experiment repeats in form, if any.
    pub source: Option<String>,
    /// Number of runs of each job.
    pub rounds: u32,
    /// Arms that are compared. Ratios are to the first arm.
    pub arms: Vec<Arm>,
    /// Cases that each arm runs.
    pub cases: Vec<Case>,
}

/// One way to run a case.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Arm {
    /// Name of the arm, one word as a rule.
    pub name: String,
    /// Description of the arm.
    pub summary: String,
}

impl Arm {
    /// Arms of these names and summaries.
    pub fn all(arms: &[(&str, &str)]) -> Vec<Arm> {
        arms.iter().map(|(name, summary)| Arm { name: (*name).into(), summary: (*summary).into() }).collect()
    }
}

/// A workload that every arm runs.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Case {
    /// Name of the case as in the rows of tables: `CG A`.
    pub name: String,
    /// Unit of the case's figure.
    pub unit: String,
    /// Host memory that is warmed before each of the case's runs, in MiB: the memory that the largest run touches.
    pub working_set_mib: u64,
    /// Cells of the case, in the order of the arms.
    pub cells: Vec<Cell>,
}

impl Case {
    /// Whether the case's figure is a time, such as that of one access. All other figures are rates.
    pub fn is_timed(&self) -> bool {
        self.unit == "ns"
    }

    /// Direction in which the case's figure is better.
    pub fn better(&self) -> Better {
        if self.is_timed() { Better::Lower } else { Better::Higher }
    }
}

/// One case in one arm.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cell {
    /// A job that is run.
    Job(Box<Job>),
    /// No run and no figure, with the reason.
    Absent(String),
}

impl Cell {
    /// A cell that runs this job.
    pub fn of(job: Job) -> Cell {
        Cell::Job(Box::new(job))
    }

    /// This cell with another wideleaf program. The cell becomes absent if its job does not run wideleaf.
    fn with_program(self, program: &str) -> Cell {
        match self {
            Cell::Job(job) if matches!(job.work, Work::Run { .. }) => {
                Cell::of(Job { program: Some(program.to_owned()), ..*job })
            }
            Cell::Job(_) => Cell::Absent("only jobs that run wideleaf can be compared between two programs".into()),
            absent => absent,
        }
    }

    /// Whether both cells run the same work on a host in the same state. Two absent cells are the same
    /// whatever their reasons are.
    pub fn runs_the_same(&self, other: &Cell) -> bool {
        match (self, other) {
            (Cell::Job(job), Cell::Job(other)) => (&job.work, &job.host) == (&other.work, &other.host),
            (Cell::Absent(_), Cell::Absent(_)) => true,
            _ => false,
        }
    }
}

/// A run, and the state of the host that it needs.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Job {
    /// Work that the job does.
    pub work: Work,
    /// Host state that the job needs.
    #[serde(default)]
    pub host: HostState,
    /// Guessed duration before the job has run, in seconds.
    pub seconds_guess: f64,
    /// Whether every run gives the same result, so that one round is enough (simulations).
    #[serde(default)]
    pub is_exact: bool,
    /// Whether the run of the first round is also recorded, for a map of guest RAM over time and the cost of actions.
    /// Only a [`Work::Run`] can be recorded.
    #[serde(default)]
    pub wants_map: bool,
    /// Path of the wideleaf program for a [`Work::Run`], if it is not the program that makes the experiment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// Work of one job.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Work {
    /// `wideleaf run` with these arguments.
    Run {
        /// Arguments after `run`; the first is the kernel.
        arguments: Vec<String>,
    },
    /// A simulation of a machine's TLB and caches on a kernel's accesses, without a guest. The counts are scaled
    /// to a whole run.
    Simulation {
        /// Source of the accesses.
        accesses: Accesses,
        /// Name of a machine that `wideleaf-lab simulate --machine help` lists.
        machine: String,
        /// Size of all pages: `4k`, `64k`, `2m`, `1g`; in a guest, of the guest's own pages.
        page: String,
        /// Size of the host's pages under a guest; `None` for a process.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host_page: Option<String>,
    },
    /// `wideleaf tlbcost`: the cost of a miss; or `wideleaf-lab predict`: the predicted and the actual gain of large
    /// pages.
    TlbCost {
        /// The command and its arguments.
        arguments: Vec<String>,
    },
    /// A guest of the built-in image in QEMU.
    Qemu {
        /// Guest that QEMU runs.
        guest: Guest,
        /// Backing of the guest's RAM.
        ram: QemuRam,
    },
    /// Several `wideleaf run` at the same time.
    Together {
        /// Guests, which all start together.
        guests: Vec<GuestAmongOthers>,
        /// Owner of the promotion budget.
        budget: BudgetOf,
    },
    /// Several guests of the built-in image at the same time, each in a QEMU of its own on transparent huge pages.
    TogetherInQemu {
        /// Guests, which all start together. The figure of each counts.
        guests: Vec<GuestInQemu>,
    },
    /// Guests of QEMU, and an event that takes huge pages from them.
    Disturbed(DisturbedGuests),
    /// A guest that is saved, and continued in one of several ways.
    Restored(RestoredGuest),
}

/// Name under which a simulation tells the cycles of the second level of the TLB and of walks.
pub const TRANSLATION_CYCLES: &str = "translation_cycles";
/// Name under which a simulation tells the cycles from load to use of all data lines, as if sequential.
pub const DATA_CYCLES: &str = "data_cycles";

/// Name under which a run in broken-up memory tells the number of free blocks of 2 MiB at its begin.
pub const FREE_BLOCKS_AT_BEGIN: &str = "free_blocks_at_begin";

/// Name under which a steady-state sample tells the number of misses that it counted.
pub const COUNTED_MISSES: &str = "counted_misses";
/// Name under which a steady-state sample tells the number of accesses that counted.
pub const COUNTED_ACCESSES: &str = "counted_accesses";

/// Name under which a run tells the number of page walks that the CPU counted in its timed part.
pub const COUNTED_WALKS: &str = "counted_walks";
/// Name under which a run tells the cycles that the CPU counted in them.
pub const COUNTED_WALK_CYCLES: &str = "counted_walk_cycles";

/// Source of a sequence of loads and stores.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "from", rename_all = "kebab-case")]
pub enum Accesses {
    /// Accesses of a kernel, recorded while it runs. The counts of its timed part are scaled to all
    /// iterations of the class.
    Recorded {
        /// Name of the kernel.
        kernel: String,
        /// Parameters of the kernel, including the class.
        parameters: String,
        /// Number of iterations that are recorded; `None` records all, for a kernel without iterations.
        iterations: Option<u32>,
        /// Number of threads of the kernel; the accesses of the first are recorded.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        threads: u32,
    },
    /// A generated stream, as listed by `wideleaf-lab simulate --trace help`.
    Generated {
        /// Name of the stream with its parameters.
        stream: String,
        /// Factor from the simulated counts to those of a whole run.
        scale: f64,
    },
    /// A steady-state sample of each loop of a kernel, over memory of any size. Its figures are per access.
    Scaled {
        /// Name of the program: `gups`, `cg`, `mg`, `stream`, `sweep3d`.
        program: String,
        /// Memory of the program in GiB, at most.
        footprint_gib: u64,
    },
}

/// One of several guests that run at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct GuestAmongOthers {
    /// Name of the guest.
    pub name: String,
    /// Whether the guest's figure counts. The other guests are there to compete for memory.
    pub is_judged: bool,
    /// Arguments for `wideleaf run`, the kernel first, without options about a daemon: the work adds these.
    pub arguments: Vec<String>,
}

/// One of several guests of QEMU that run at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct GuestInQemu {
    /// Name of the guest.
    pub name: String,
    /// Guest that QEMU runs.
    pub guest: Guest,
}

/// Owner of the promotion budget when several guests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BudgetOf {
    /// Each guest's manager has a budget of its own.
    Each,
    /// All guests share the budget of one wideleafd, which the run starts for them.
    All,
}

/// State of the host that a job needs. The program that runs the job restores the old state afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct HostState {
    /// Number of free 2 MiB pages in the hugetlb pool.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pool_pages_2m: u64,
    /// Settings of the host's khugepaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub khugepaged: Option<KhugepagedSettings>,
    /// Number of free 2 MiB blocks that remain after the free memory was fragmented on purpose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages_left: Option<u64>,
    /// Number of free 2 MiB blocks that another process, a hog, takes while the job runs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hog_pages_2m: u64,
}

/// How much the host's khugepaged scans, and how often (Documentation/admin-guide/mm/transhuge.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct KhugepagedSettings {
    /// Pause between two scans in milliseconds; 0 means no pause.
    pub scan_sleep_ms: u64,
    /// Number of base pages that one scan examines.
    pub pages_to_scan: u64,
}

impl KhugepagedSettings {
    /// Default settings of Linux (mm/khugepaged.c).
    pub const DEFAULTS: KhugepagedSettings = KhugepagedSettings { scan_sleep_ms: 10_000, pages_to_scan: 4_096 };
    /// Fastest possible settings: no pause, and 1 GiB in one scan.
    pub const FASTEST: KhugepagedSettings = KhugepagedSettings { scan_sleep_ms: 0, pages_to_scan: 262_144 };
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_one(number: &u32) -> bool {
    *number == 1
}

impl Job {
    /// A job that does this work on the host in its present state.
    pub fn of(work: Work, seconds_guess: f64) -> Job {
        Job { work, host: HostState::default(), seconds_guess, is_exact: false, wants_map: false, program: None }
    }

    /// A job of `wideleaf run` with these arguments.
    pub fn run(arguments: &[&str], seconds_guess: f64) -> Job {
        Job::of(Work::Run { arguments: words(arguments) }, seconds_guess)
    }

    /// A simulation, which gives the same result each time.
    pub fn simulation(accesses: Accesses, machine: &str, page: &str, seconds_guess: f64) -> Job {
        let work = Work::Simulation { accesses, machine: machine.into(), page: page.into(), host_page: None };
        Job { is_exact: true, ..Job::of(work, seconds_guess) }
    }

    /// This simulation in a guest, with its RAM on host pages of this size.
    #[must_use]
    pub fn under_host_page(mut self, page: &str) -> Job {
        if let Work::Simulation { host_page, .. } = &mut self.work {
            *host_page = Some(page.to_owned());
        }
        self
    }

    /// A job of `wideleaf tlbcost` or `wideleaf-lab predict`. One round is enough, because both repeat their
    /// measurement.
    pub fn tlbcost(arguments: &[&str], seconds_guess: f64) -> Job {
        Job { is_exact: true, ..Job::of(Work::TlbCost { arguments: words(arguments) }, seconds_guess) }
    }

    /// This job with `pages_2m` free 2 MiB pages in the hugetlb pool.
    #[must_use]
    pub fn with_pool(mut self, pages_2m: u64) -> Job {
        self.host.pool_pages_2m = pages_2m;
        self
    }

    /// This job with these settings of khugepaged.
    #[must_use]
    pub fn with_khugepaged(mut self, settings: KhugepagedSettings) -> Job {
        self.host.khugepaged = Some(settings);
        self
    }

    /// This job on a host with fragmented free memory and `pages` free 2 MiB blocks left.
    #[must_use]
    pub fn with_huge_pages_left(mut self, pages: u64) -> Job {
        self.host.huge_pages_left = Some(pages);
        self
    }

    /// This job beside a hog that takes this number of free 2 MiB blocks.
    #[must_use]
    pub fn beside_hog(mut self, pages_2m: u64) -> Job {
        self.host.hog_pages_2m = pages_2m;
        self
    }

    /// This job with a map of guest RAM from the first round.
    #[must_use]
    pub fn with_map(mut self) -> Job {
        self.wants_map = true;
        self
    }

    /// Command line of the job as a user would type it.
    pub fn command(&self) -> String {
        match &self.work {
            Work::Run { arguments } => {
                let program = self.program.iter().cloned().collect::<Vec<_>>();
                let program = if program.is_empty() { "wideleaf".to_owned() } else { typed(&program) };
                format!("{program} run {}", typed(arguments))
            }
            Work::Simulation { accesses, machine, page, host_page } => {
                simulated(accesses, machine, page, host_page.as_deref())
            }
            Work::TlbCost { arguments } => format!("wideleaf-lab {}", typed(arguments)),
            Work::Qemu { guest, ram } => guest.qemu_command(*ram),
            Work::Together { guests, budget } => {
                let daemon = match budget {
                    BudgetOf::Each => "--no-daemon",
                    BudgetOf::All => "--daemon control.sock",
                };
                let command = |guest: &GuestAmongOthers| format!("wideleaf run {} {daemon}", typed(&guest.arguments));
                guests.iter().map(command).collect::<Vec<_>>().join(" & ")
            }
            Work::TogetherInQemu { guests } => {
                let commands = guests.iter().map(|of| of.guest.qemu_command(QemuRam::Thp));
                commands.collect::<Vec<_>>().join(" & ")
            }
            Work::Disturbed(guests) => guests.command(),
            Work::Restored(guest) => guest.command(),
        }
    }
}

/// A simulation in words, with the commands that exist for it. (No command has 64 KiB pages or scales counts.)
fn simulated(accesses: &Accesses, machine: &str, page: &str, host_page: Option<&str>) -> String {
    let (source, counts) = match accesses {
        Accesses::Recorded { kernel, parameters, iterations, threads } => {
            let threads = if *threads == 1 { String::new() } else { format!(" --threads {threads}") };
            let iterations = iterations.map_or(String::new(), |n| format!(" --iterations {n}"));
            let parameters = typed(std::slice::from_ref(parameters));
            (
                format!("wideleaf-lab trace record {kernel} --cmdline {parameters}{iterations}{threads}"),
                "counts scaled to the iterations of the class".to_owned(),
            )
        }
        Accesses::Generated { stream, scale } => {
            (format!("stream {stream}"), format!("counts scaled to a whole run (times {scale})"))
        }
        Accesses::Scaled { program, footprint_gib } => {
            (format!("steady-state sample of {program} over {footprint_gib} GiB"), "figures per access".to_owned())
        }
    };
    let host = host_page.map_or(String::new(), |host| format!(" in a guest over pages of {host}"));
    format!("{source}, on a simulated {machine} with pages of {page}{host}; {counts}")
}

fn words(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|argument| (*argument).to_owned()).collect()
}

/// Suffix of an arm that runs the other program.
const OTHER_PROGRAM: &str = " (B)";

/// End of the summary of such an arm.
fn by(program: &str, version: &str) -> String {
    format!("; by {version} ({program})")
}

impl Experiment {
    /// This experiment with each arm doubled: once with this program, once with another program, `B`. Both arms run
    /// next to each other in every round, each of them first in every second one, so that changes of the machine affect
    /// both alike.
    #[must_use]
    pub fn against(self, program: &str, version: &str) -> Experiment {
        let other = |arm: &Arm| Arm {
            name: format!("{}{OTHER_PROGRAM}", arm.name),
            summary: format!("{}{}", arm.summary, by(program, version)),
        };
        let cases = self.cases.into_iter().map(|case| {
            let cells = case.cells.into_iter().flat_map(|cell| [cell.clone(), cell.with_program(program)]).collect();
            Case { cells, ..case }
        });
        Experiment {
            title: format!("{}, with two programs", self.title),
            arms: self.arms.iter().flat_map(|arm| [arm.clone(), other(arm)]).collect(),
            cases: cases.collect(),
            ..self
        }
    }

    /// This experiment with only the arms of these names, and with the first one, to which ratios are.
    #[must_use]
    pub fn with_arms(self, names: &[String]) -> Experiment {
        let kept = |(index, arm): (usize, &Arm)| index == 0 || names.contains(&arm.name);
        let is_kept: Vec<bool> = self.arms.iter().enumerate().map(kept).collect();
        let cases = self.cases.into_iter().map(|case| Case { cells: only(case.cells, &is_kept), ..case });
        Experiment { arms: only(self.arms, &is_kept), cases: cases.collect(), ..self }
    }

    /// Path of the other program, if the experiment has jobs for one.
    pub fn other_program(&self) -> Option<&str> {
        let jobs = self.cases.iter().flat_map(|case| &case.cells).filter_map(|cell| match cell {
            Cell::Job(job) => Some(job),
            Cell::Absent(_) => None,
        });
        jobs.filter_map(|job| job.program.as_deref()).next()
    }

    /// Whether [`Self::against`] made the experiment with this other program of this version.
    pub fn is_against(&self, program: &str, version: &str) -> bool {
        self.arms.iter().any(|arm| arm.summary.ends_with(&by(program, version)))
    }

    /// Pairs of arms that differ only in the program: this program's arm, the other program's arm.
    pub fn arms_of_two_programs(&self) -> Vec<(&Arm, &Arm)> {
        let pairs = self.arms.iter().zip(self.arms.iter().skip(1));
        pairs.filter(|(a, b)| b.name.strip_suffix(OTHER_PROGRAM) == Some(&a.name)).collect()
    }

    /// Number of rounds for a job.
    pub fn rounds_of(&self, job: &Job) -> u32 {
        if job.is_exact { 1 } else { self.rounds }
    }

    /// Job of a case in an arm, both by index.
    pub fn job(&self, case: usize, arm: usize) -> Option<&Job> {
        match self.cases.get(case)?.cells.get(arm)? {
            Cell::Job(job) => Some(job),
            Cell::Absent(_) => None,
        }
    }
}

/// Those of the values that are kept.
fn only<T>(values: Vec<T>, is_kept: &[bool]) -> Vec<T> {
    values.into_iter().zip(is_kept).filter(|(_, is_kept)| **is_kept).map(|(value, _)| value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_typed_as_it_is_shown() {
        let job = Job::run(&["gups", "--cmdline", "log2_words=25 seed=it's"], 1.0);
        assert_eq!(job.command(), r"wideleaf run gups --cmdline 'log2_words=25 seed=it'\''s'");
    }

    fn of_two_rounds(arms: Vec<Arm>, cases: Vec<Case>) -> Experiment {
        let (name, title) = ("e".into(), "E".into());
        Experiment { name, title, question: String::new(), source: None, rounds: 2, arms, cases }
    }

    #[test]
    fn a_comparison_of_two_programs_puts_each_arm_next_to_its_twin() {
        let arm = |name: &str| Arm { name: name.into(), summary: "it".into() };
        let case = |cells| Case { name: "one".into(), unit: "x".into(), working_set_mib: 1, cells };
        let cells = vec![Cell::of(Job::run(&["gups"], 1.0)), Cell::Absent("why".into())];
        let experiment = of_two_rounds(vec![arm("base"), arm("auto")], vec![case(cells)]);
        let both = experiment.against("/b/wide leaf", "wideleaf 2");
        let names: Vec<&str> = both.arms.iter().map(|arm| arm.name.as_str()).collect();
        assert_eq!(names, ["base", "base (B)", "auto", "auto (B)"]);
        assert_eq!(both.arms_of_two_programs(), [(&both.arms[0], &both.arms[1]), (&both.arms[2], &both.arms[3])]);
        let commands: Vec<Option<String>> = (0..4).map(|arm| both.job(0, arm).map(Job::command)).collect();
        assert_eq!(commands[..2], [Some("wideleaf run gups".to_owned()), Some("'/b/wide leaf' run gups".to_owned())]);
        assert_eq!(commands[2..], [None, None], "an absent cell stays absent");
        assert_eq!(both.other_program(), Some("/b/wide leaf"));
        let versions = ["wideleaf 2", "wideleaf 3"].map(|version| both.is_against("/b/wide leaf", version));
        assert_eq!(versions, [true, false]);
    }

    #[test]
    fn an_experiment_of_some_arms_has_their_cells_and_those_of_the_first_arm() {
        let arms = Arm::all(&[("base", ""), ("auto", ""), ("greedy", ""), ("huge", "")]);
        let job = |kernel: &str| Cell::of(Job::run(&[kernel], 1.0));
        let cells = vec![job("of base"), job("of auto"), Cell::Absent("why".into()), job("of huge")];
        let case = Case { name: "one".into(), unit: "x".into(), working_set_mib: 1, cells: cells.clone() };
        let experiment = of_two_rounds(arms, vec![case.clone(), case]);
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            experiment.clone().with_arms(&names)
        };
        let some = of(&["huge", "greedy"]);
        assert_eq!(some.arms.iter().map(|arm| &*arm.name).collect::<Vec<_>>(), ["base", "greedy", "huge"]);
        let expected = [0, 2, 3].map(|arm: usize| cells[arm].clone());
        assert!(some.cases.len() == 2 && some.cases.iter().all(|case| case.cells == expected), "{some:?}");
        assert_eq!(of(&["base"]), of(&[]), "the first is there in any case");
    }

    #[test]
    fn a_job_survives_serialisation() {
        let job = Job::run(&["npb.cg"], 2.5).with_pool(9);
        let text = serde_json::to_string(&job).expect("plain data");
        assert_eq!(serde_json::from_str::<Job>(&text).expect("what was written"), job);
    }
}
