//! An experiment as data: what is compared (arms), on what (cases), and what has to be run for each of both.
//!
//! ```text
//!              arm base      arm auto      arm hugetlb
//!   case CG A   job           job           job          one round: a row from left to right, each row begins one further
//!   case IS A   job           job           absent: why
//! ```

use serde::{Deserialize, Serialize};

use crate::peers::{Guest, QemuRam};

/// An experiment for this host.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Experiment {
    /// What somebody types.
    pub name: String,
    /// What it is called in a report.
    pub title: String,
    /// What it asks, in a sentence or two.
    pub question: String,
    /// Where its form comes from, if it repeats somebody's measurements.
    pub source: Option<String>,
    /// How often each job runs.
    pub rounds: u32,
    /// What is compared. Ratios are to the first.
    pub arms: Vec<Arm>,
    /// On what.
    pub cases: Vec<Case>,
}

/// A way to do it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Arm {
    /// A word.
    pub name: String,
    /// What it is.
    pub summary: String,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Case {
    /// As rows are called: `CG A`.
    pub name: String,
    /// Unit of its figure.
    pub unit: String,
    /// Host memory that is warmed before each of its runs: what the largest of them touches.
    pub working_set_mib: u64,
    /// Its part of each arm, in the order of the arms.
    pub cells: Vec<Cell>,
}

/// A case in an arm.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cell {
    /// This is run.
    Job(Box<Job>),
    /// Nothing is run, and no figure is made up: this is why.
    Absent(String),
}

impl Cell {
    /// Runs this.
    pub fn of(job: Job) -> Cell {
        Cell::Job(Box::new(job))
    }

    /// The same by another program; nothing where no program of ours is run.
    fn with_program(self, program: &str) -> Cell {
        match self {
            Cell::Job(job) if matches!(job.work, Work::Run { .. }) => {
                Cell::of(Job { program: Some(program.to_owned()), ..*job })
            }
            Cell::Job(_) => Cell::Absent("only runs of wideleaf are made with two programs".into()),
            absent => absent,
        }
    }

    /// Whether the same is run in both, on a host in the same state; the reason why nothing is does not matter.
    pub fn runs_the_same(&self, other: &Cell) -> bool {
        match (self, other) {
            (Cell::Job(job), Cell::Job(other)) => (&job.work, &job.host) == (&other.work, &other.host),
            (Cell::Absent(_), Cell::Absent(_)) => true,
            _ => false,
        }
    }
}

/// A run, and what the host has to be like for it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Job {
    /// What is run.
    pub work: Work,
    /// In what state of the host.
    #[serde(default)]
    pub host: HostState,
    /// How long it is thought to take, before any has run.
    pub seconds_guess: f64,
    /// Whether it gives the same each time, so that one round is enough: simulations do.
    #[serde(default)]
    pub is_exact: bool,
    /// Whether its run of the first round is recorded too, for a map of guest RAM over time and for what actions cost. Only a
    /// [`Work::Run`] can be.
    #[serde(default)]
    pub wants_map: bool,
    /// The wideleaf that a [`Work::Run`] runs, where it is not the one that makes the experiment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// What is run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Work {
    /// `wideleaf run` with these arguments behind it.
    Run {
        /// The first is the kernel.
        arguments: Vec<String>,
    },
    /// A machine's TLB and caches at the accesses of a kernel, natively. Counts are those of a whole run.
    Simulation {
        /// What is accessed.
        accesses: Accesses,
        /// One that `wideleaf simulate --machine help` names.
        machine: String,
        /// Size of all pages: `4k`, `64k`, `2m`.
        page: String,
    },
    /// `wideleaf tlbcost`: what a miss costs; or `wideleaf-lab predict`: what large pages should gain, and what they do. The command is the
    /// first argument.
    TlbCost {
        /// All that is behind it.
        arguments: Vec<String>,
    },
    /// A guest of the built-in image in QEMU.
    Qemu {
        /// The guest.
        guest: Guest,
        /// What stands behind its RAM.
        ram: QemuRam,
    },
    /// Several `wideleaf run` at once.
    Together {
        /// The guests; they begin together.
        guests: Vec<GuestAmongOthers>,
        /// Who has the budget.
        budget: BudgetOf,
    },
}

/// Loads and stores, in their order.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "from", rename_all = "kebab-case")]
pub enum Accesses {
    /// A kernel's own, recorded while it runs. What its timed part does counts for all iterations of the class.
    Recorded {
        /// The kernel.
        kernel: String,
        /// Its parameters, the class among them.
        parameters: String,
        /// Iterations that are recorded; all where the kernel has none.
        iterations: Option<u32>,
    },
    /// A stream of `wideleaf simulate --trace help`.
    Generated {
        /// With its parameters.
        stream: String,
        /// What it counts, times this, is a whole run's.
        scale: f64,
    },
}

/// A guest that is not alone.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct GuestAmongOthers {
    /// What it is called.
    pub name: String,
    /// Whether its figure counts: the others are there to be in the way.
    pub is_judged: bool,
    /// For `wideleaf run`; the first is the kernel. Nothing of a daemon: that is the work's.
    pub arguments: Vec<String>,
}

/// Who may spend how much on promotion where several guests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BudgetOf {
    /// Each guest's manager has its own.
    Each,
    /// All of them share that of a wideleafd, which is there for them alone.
    All,
}

/// What the host has to be like while a job runs; it is put back afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct HostState {
    /// Pages of 2 MiB that the hugetlb pool has free.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pool_pages_2m: u64,
    /// What the host's khugepaged may do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub khugepaged: Option<KhugepagedSettings>,
    /// Free memory is broken up on purpose, so that no more than so many pages of 2 MiB can be had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages_left: Option<u64>,
}

/// How much the host's khugepaged scans, and how often (Documentation/admin-guide/mm/transhuge.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct KhugepagedSettings {
    /// Milliseconds between two scans; with 0 it never rests.
    pub scan_sleep_ms: u64,
    /// Base pages looked at in one scan.
    pub pages_to_scan: u64,
}

impl KhugepagedSettings {
    /// What Linux starts with (mm/khugepaged.c).
    pub const DEFAULTS: KhugepagedSettings = KhugepagedSettings { scan_sleep_ms: 10_000, pages_to_scan: 4_096 };
    /// As fast as it goes: no rest, and a gibibyte in one scan.
    pub const FASTEST: KhugepagedSettings = KhugepagedSettings { scan_sleep_ms: 0, pages_to_scan: 262_144 };
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Job {
    /// This work on the host as it is.
    pub fn of(work: Work, seconds_guess: f64) -> Job {
        Job { work, host: HostState::default(), seconds_guess, is_exact: false, wants_map: false, program: None }
    }

    /// `wideleaf run` with these arguments.
    pub fn run(arguments: &[&str], seconds_guess: f64) -> Job {
        Job::of(Work::Run { arguments: words(arguments) }, seconds_guess)
    }

    /// A simulation. It gives the same each time.
    pub fn simulation(accesses: Accesses, machine: &str, page: &str, seconds_guess: f64) -> Job {
        let work = Work::Simulation { accesses, machine: machine.into(), page: page.into() };
        Job { is_exact: true, ..Job::of(work, seconds_guess) }
    }

    /// `wideleaf tlbcost` or `wideleaf-lab predict`, which repeat by themselves what they measure: one round is enough.
    pub fn tlbcost(arguments: &[&str], seconds_guess: f64) -> Job {
        Job { is_exact: true, ..Job::of(Work::TlbCost { arguments: words(arguments) }, seconds_guess) }
    }

    /// The same with so many pages of 2 MiB free in the hugetlb pool.
    #[must_use]
    pub fn with_pool(mut self, pages_2m: u64) -> Job {
        self.host.pool_pages_2m = pages_2m;
        self
    }

    /// The same with khugepaged set so.
    #[must_use]
    pub fn with_khugepaged(mut self, settings: KhugepagedSettings) -> Job {
        self.host.khugepaged = Some(settings);
        self
    }

    /// The same on a host whose memory is in pieces.
    #[must_use]
    pub fn with_huge_pages_left(mut self, pages: u64) -> Job {
        self.host.huge_pages_left = Some(pages);
        self
    }

    /// The same, with a map of its memory from the first round.
    #[must_use]
    pub fn with_map(mut self) -> Job {
        self.wants_map = true;
        self
    }

    /// As somebody would type it.
    pub fn command(&self) -> String {
        match &self.work {
            Work::Run { arguments } => {
                let program = self.program.iter().cloned().collect::<Vec<_>>();
                let program = if program.is_empty() { "wideleaf".to_owned() } else { typed(&program) };
                format!("{program} run {}", typed(arguments))
            }
            Work::Simulation { accesses, machine, page } => simulated(accesses, machine, page),
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
        }
    }
}

/// What a simulation is, as commands where there are some. (No command has pages of 64 KiB, and none scales counts.)
fn simulated(accesses: &Accesses, machine: &str, page: &str) -> String {
    let (source, scale) = match accesses {
        Accesses::Recorded { kernel, parameters, iterations } => {
            let iterations = iterations.map_or(String::new(), |n| format!(" --iterations {n}"));
            let parameters = typed(std::slice::from_ref(parameters));
            (
                format!("wideleaf trace record {kernel} --cmdline {parameters}{iterations}"),
                "the iterations of the class".into(),
            )
        }
        Accesses::Generated { stream, scale } => (format!("stream {stream}"), format!("a whole run (times {scale})")),
    };
    format!("{source}, on a simulated {machine} with pages of {page}; counts scaled to {scale}")
}

fn words(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|argument| (*argument).to_owned()).collect()
}

/// Arguments as a shell takes them.
pub fn typed(arguments: &[String]) -> String {
    let is_plain = |argument: &str| {
        !argument.is_empty() && argument.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c))
    };
    let quote = |argument: &String| match is_plain(argument) {
        true => argument.clone(),
        false => format!("'{}'", argument.replace('\'', r"'\''")),
    };
    arguments.iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// Behind the name of an arm that is the same with another program.
const OTHER_PROGRAM: &str = " (B)";

impl Experiment {
    /// The same with each arm doubled: with this program, and with another one, `B`. Both run next to each other in every round, so that what
    /// the machine does in a round it does to both.
    #[must_use]
    pub fn against(self, program: &str, version: &str) -> Experiment {
        let other = |arm: &Arm| Arm {
            name: format!("{}{OTHER_PROGRAM}", arm.name),
            summary: format!("{}; by {version} ({program})", arm.summary),
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

    /// Arms that are the same with two programs: this one's, the other's.
    pub fn arms_of_two_programs(&self) -> Vec<(&Arm, &Arm)> {
        let pairs = self.arms.iter().zip(self.arms.iter().skip(1));
        pairs.filter(|(a, b)| b.name.strip_suffix(OTHER_PROGRAM) == Some(&a.name)).collect()
    }

    /// How often the job of a cell runs.
    pub fn rounds_of(&self, job: &Job) -> u32 {
        if job.is_exact { 1 } else { self.rounds }
    }

    /// The job of a case in an arm, both by their place.
    pub fn job(&self, case: usize, arm: usize) -> Option<&Job> {
        match self.cases.get(case)?.cells.get(arm)? {
            Cell::Job(job) => Some(job),
            Cell::Absent(_) => None,
        }
    }
}

/// What an experiment is made for: it asks for no more than this host has.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct HostFacts {
    /// Processors online.
    pub cpus: u32,
    /// Memory that is free or can be freed.
    pub memory_available_mib: u64,
    /// Why guests cannot be run here, if so.
    pub why_no_kvm: Option<String>,
    /// How KVM pages guests: `shadow`, `ept`, `npt`, `none`.
    pub paging: String,
    /// Whether QEMU is installed.
    pub has_qemu: bool,
    /// Whether wideleafd is beside this program.
    pub has_daemon: bool,
    /// Why the hugetlb pool of 2 MiB cannot be made larger, if so.
    pub why_no_pool_2m: Option<String>,
    /// Free giant pages.
    pub free_pages_1g: u64,
    /// Whether settings of the host may be changed: we are root.
    pub is_root: bool,
}

#[cfg(test)]
impl HostFacts {
    /// Two CPUs, 20 GiB, guests by shadow tables, root, everything installed.
    pub(crate) fn of_a_test() -> HostFacts {
        HostFacts {
            cpus: 2,
            memory_available_mib: 20 * 1024,
            why_no_kvm: None,
            paging: "shadow".into(),
            has_qemu: true,
            why_no_pool_2m: None,
            free_pages_1g: 0,
            is_root: true,
            has_daemon: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_typed_as_it_is_shown() {
        let job = Job::run(&["gups", "--cmdline", "log2_words=25 seed=it's"], 1.0);
        assert_eq!(job.command(), r"wideleaf run gups --cmdline 'log2_words=25 seed=it'\''s'");
    }

    #[test]
    fn against_another_program_each_arm_stands_beside_its_other() {
        let arm = |name: &str| Arm { name: name.into(), summary: "it".into() };
        let case = |cells| Case { name: "one".into(), unit: "x".into(), working_set_mib: 1, cells };
        let experiment = Experiment {
            name: "e".into(),
            title: "E".into(),
            question: String::new(),
            source: None,
            rounds: 2,
            arms: vec![arm("base"), arm("auto")],
            cases: vec![case(vec![Cell::of(Job::run(&["gups"], 1.0)), Cell::Absent("why".into())])],
        };
        let both = experiment.against("/b/wide leaf", "wideleaf 2");
        let names: Vec<&str> = both.arms.iter().map(|arm| arm.name.as_str()).collect();
        assert_eq!(names, ["base", "base (B)", "auto", "auto (B)"]);
        assert_eq!(both.arms_of_two_programs(), [(&both.arms[0], &both.arms[1]), (&both.arms[2], &both.arms[3])]);
        let commands: Vec<Option<String>> = (0..4).map(|arm| both.job(0, arm).map(Job::command)).collect();
        assert_eq!(commands[..2], [Some("wideleaf run gups".to_owned()), Some("'/b/wide leaf' run gups".to_owned())]);
        assert_eq!(commands[2..], [None, None], "what is absent stays so");
    }

    #[test]
    fn a_definition_survives_a_file() {
        let job = Job::run(&["npb.cg"], 2.5).with_pool(9);
        let text = serde_json::to_string(&job).expect("plain data");
        assert_eq!(serde_json::from_str::<Job>(&text).expect("what was written"), job);
    }
}
