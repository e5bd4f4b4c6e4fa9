//! `wideleaf-lab experiment`: makes the runs of an experiment and reports their results. `benches/experiments` defines
//! the runs and the report; this module executes them.
//!
//! ```text
//!   catalogue::by_name ─▶ define(this host) ─▶ schedule ─▶ jobs: one child a run ─▶ store ─▶ report
//!                          or a file, --resume ┘     ▲ budget, Ctrl-C                └ the file, whole after each run
//! ```

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use wideleaf::options::some_time;
use wideleaf::output::{end_of_both, print, say};
use wideleaf::table::prose_table;
use wideleaf_experiments::definition::Experiment;
use wideleaf_experiments::results::Results;
use wideleaf_experiments::{catalogue, compare, scenarios, schedule};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::suggest::did_you_mean;

mod against;
mod environment;
mod failures;
mod host_facts;
pub mod host_state;
mod jobs;
mod memory_map;
mod rendered;
mod runner;
mod store;

use rendered::Rendering;
pub use rendered::{RenderArgs, ReportFormat};
use runner::Runner;
use store::{Store, Stored};

const EXAMPLES: &str = "\
Examples:
  The experiments, and their duration here:
    wideleaf-lab experiment list

  The picture of benches/README.md, and an HTML page:
    wideleaf-lab experiment run quick --output quick.json --html quick.html

  At most twenty minutes of one; the rest later:
    wideleaf-lab experiment run policies --budget 20m --output policies.json
    wideleaf-lab experiment run policies --resume policies.json

  Two arms of one case, with more rounds:
    wideleaf-lab experiment run consolidation --case 'hot 2 x 256 MiB' --arm auto --rounds 24

  The same results again, as Markdown tables:
    wideleaf-lab experiment report policies.json --format markdown

  As a page with its pictures, and the pictures alone:
    wideleaf-lab experiment report policies.json --html policies.html --svg pictures

  Check whether another day, machine or build repeats the results:
    wideleaf-lab experiment compare monday.json tuesday.json";

/// Arguments of `wideleaf-lab experiment`.
#[derive(Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct ExperimentArgs {
    /// Action on the experiments
    #[command(subcommand)]
    pub command: ExperimentCommand,
}

/// Subcommands of `wideleaf-lab experiment`.
#[derive(Debug, Subcommand)]
pub enum ExperimentCommand {
    /// List the experiments, their questions, and their duration on this host; then the scenarios of `cargo bench`
    List,
    /// Run one: arms in turn, host memory warmed before each run, the file of results complete after every run
    Run(RunExperimentArgs),
    /// Report on a file of results
    Report(ReportArgs),
    /// Compare two files of results of the same experiment
    Compare(CompareArgs),
    /// Measure the headline claims on this machine, in at most a quarter of an hour: a file of results and a page
    /// to send back
    Evidence(EvidenceArgs),
}

/// Arguments of `wideleaf-lab experiment run`.
#[derive(Args, Debug)]
pub struct RunExperimentArgs {
    /// Name of the experiment, from `wideleaf-lab experiment list`
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Number of rounds, instead of the experiment's own; with fewer than 6 a median has no 95 % interval
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000), conflicts_with = "resume")]
    pub rounds: Option<u32>,

    /// Only this case, one of those that --dry-run shows; may be repeated
    #[arg(long = "case", value_name = "CASE", conflicts_with = "resume")]
    pub cases: Vec<String>,

    /// Only this arm and the first, to which ratios are; one of those that --dry-run shows; may be repeated
    #[arg(long = "arm", value_name = "ARM", conflicts_with = "resume")]
    pub arms: Vec<String>,

    /// Also make those runs that make the experiment take hours, such as class C of NPB
    #[arg(long, conflicts_with = "resume")]
    pub long: bool,

    /// Begin no round that would end later than this: a number with s, m or h [default: the experiment's own, if it
    /// has one and --rounds is absent, minus the time that the results of --resume took]
    #[arg(long, value_name = "TIME", value_parser = parse_budget)]
    pub budget: Option<Duration>,

    /// Write the results to this file, which must be new or empty [default: NAME-DATE.json in this folder]
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub output: Option<PathBuf>,

    /// Continue these results, of this build on this machine: run only what is missing or failed
    #[arg(long, value_name = "FILE")]
    pub resume: Option<PathBuf>,

    /// Also write the report to this file, as one HTML page with its pictures
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Show the runs and their estimated time, and exit
    #[arg(long, conflicts_with = "resume")]
    pub dry_run: bool,

    /// Also make each run with this other wideleaf, in turn: B (benches/two-revisions)
    #[arg(long, value_name = "PROGRAM", hide = true, conflicts_with = "resume")]
    pub against: Option<PathBuf>,
}

/// Arguments of `wideleaf-lab experiment report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// File that `experiment run` wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Output forms of the report
    #[command(flatten)]
    pub render: RenderArgs,
}

/// Arguments of `wideleaf-lab experiment compare`.
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// Results of `experiment run`
    #[arg(value_name = "A.json")]
    pub a: PathBuf,

    /// Other results of the same experiment, shown as ratios to the first
    #[arg(value_name = "B.json")]
    pub b: PathBuf,

    /// Output forms of the report
    #[command(flatten)]
    pub render: RenderArgs,
}

/// Arguments of `wideleaf-lab experiment evidence`.
#[derive(Args, Debug)]
pub struct EvidenceArgs {
    /// Folder for wideleaf-evidence.json and wideleaf-evidence.html; if they exist, only the missing runs are made, and
    /// those of another build or machine are refused
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub folder: PathBuf,
}

/// Runs the subcommand `experiment`.
///
/// # Errors
/// [`Failure`]; the runs that were made are in the file, and nothing else is left. A guest that failed its verification
/// is a failure too, after the report.
pub fn main(args: &ExperimentArgs) -> Result<(), Failure> {
    match &args.command {
        ExperimentCommand::List => list(),
        ExperimentCommand::Run(args) => run(args),
        ExperimentCommand::Report(args) => report(args),
        ExperimentCommand::Compare(args) => compare(args),
        ExperimentCommand::Evidence(args) => evidence(args),
    }
}

fn list() -> Result<(), Failure> {
    let host = host_facts::read(false);
    let mut list = prose_table(&["experiment", "what it shows", "rounds", "runs", "about"]);
    for known in catalogue::ALL {
        let experiment = known.define(&host);
        let turns = schedule::turns(&experiment);
        let time = schedule::expected_of_all(&experiment, &[], &turns);
        let time = known.budget().map_or(time, |budget| time.min(budget));
        let minutes = format!("{:.0} min", (time.as_secs_f64() / 60.0).ceil());
        let [rounds, runs] = [experiment.rounds.to_string(), turns.len().to_string()];
        list.add_row([known.name(), known.summary(), &rounds, &runs, &minutes]);
    }
    print(&format!("{list}\n\nScenarios, run in the source folder:\n{}\n", list_of_scenarios()))
}

/// Scenarios of `cargo bench`, with their questions.
fn list_of_scenarios() -> impl std::fmt::Display {
    let mut list = prose_table(&["scenario", "what it asks", "about", "command"]);
    for scenario in scenarios::ALL {
        let minutes = scenario.minutes.map_or("-".into(), |minutes| format!("{minutes} min"));
        list.add_row([scenario.name, scenario.question, &minutes, &scenario.command()]);
    }
    list
}

fn run(args: &RunExperimentArgs) -> Result<(), Failure> {
    let known = catalogue::by_name(&args.name).ok_or_else(|| unknown(&args.name))?;
    let format = Some(ReportFormat::Table);
    let render = RenderArgs { format, html: args.html.clone(), ..RenderArgs::default() };
    let results: Vec<&Path> = args.output.iter().chain(&args.resume).map(PathBuf::as_path).collect();
    let rendering = Rendering::open(&render, &results)?;
    let interrupts = Interrupts::install_with(wideleaf::stderr::interrupted)?;
    let mut experiment = known.define(&host_facts::read(args.long));
    let own_rounds = experiment.rounds;
    let mut store = match &args.resume {
        Some(file) => Store::resume(file, known.name())?,
        None => {
            experiment.rounds = args.rounds.unwrap_or(experiment.rounds);
            keep_cases(&mut experiment, &args.cases)?;
            experiment = with_arms(experiment, &args.arms)?;
            if let Some(program) = &args.against {
                experiment = against::against(experiment, program)?;
            }
            if args.dry_run {
                return dry_run(&experiment);
            }
            Store::create(args.output.as_deref(), experiment)?
        }
    };
    let runs_before = store.results().runs.len();
    let is_own_length = args.budget.is_none() && args.rounds.is_none();
    let own_budget =
        known.budget().filter(|_| is_own_length).and_then(|budget| left_of(budget, own_rounds, store.results()));
    let budget = args.budget.or(own_budget);
    let ended = Runner { store: &mut store, budget, interrupts: &interrupts }.run();
    let ended = ended.and_then(|()| if own_budget.is_some() { store.complete() } else { Ok(()) });
    if let Err(failure) = ended {
        return Err(store.with_way_to_go_on(failure));
    }
    let written = rendering.put(&store.stored().report());
    if args.resume.is_some() && store.results().runs.len() == runs_before {
        say(format_args!("nothing was run: the results are of {}", store.results().ended));
    }
    say(format_args!("results: {}", store.path().display()));
    end_of_both("wideleaf-lab", store.stored().failures.check_guests(), written)
}

/// Remaining part of an experiment's own time, after its results. `None` if the results have other rounds than its
/// own: then its user chose its length.
fn left_of(budget: Duration, own_rounds: u32, results: &Results) -> Option<Duration> {
    let before = Duration::try_from_secs_f64(results.elapsed_s).unwrap_or_default();
    (results.experiment.rounds == own_rounds).then(|| budget.saturating_sub(before))
}

/// Keeps only the named cases; all if none is named.
fn keep_cases(experiment: &mut Experiment, names: &[String]) -> Result<(), Failure> {
    let known: Vec<String> = experiment.cases.iter().map(|case| case.name.clone()).collect();
    check_names(names, &known, "case")?;
    experiment.cases.retain(|case| names.is_empty() || names.contains(&case.name));
    Ok(())
}

/// Keeps only the named arms and the first; all if none is named.
fn with_arms(experiment: Experiment, names: &[String]) -> Result<Experiment, Failure> {
    let known: Vec<String> = experiment.arms.iter().map(|arm| arm.name.clone()).collect();
    check_names(names, &known, "arm")?;
    Ok(if names.is_empty() { experiment } else { experiment.with_arms(names) })
}

/// Refuses a name that is not known; `what` is named so, and has an option of that name.
fn check_names(names: &[String], known: &[String], what: &str) -> Result<(), Failure> {
    let unknown = names.iter().find(|name| !known.contains(name));
    unknown.map_or(Ok(()), |unknown| {
        let known = known.join("; ");
        Err(Failure::Usage(format!(
            "cannot run --{what} {unknown:?}: there is no such {what}; the {what}s are {known}"
        )))
    })
}

fn dry_run(experiment: &Experiment) -> Result<(), Failure> {
    let turns = schedule::turns(experiment);
    let time = schedule::expected_of_all(experiment, &[], &turns);
    let mut out = String::new();
    for turn in turns.iter().filter(|turn| turn.round == 1) {
        let (case, arm) = (&experiment.cases[turn.case].name, &experiment.arms[turn.arm].name);
        let command = experiment.job(turn.case, turn.arm).map(|job| job.command()).unwrap_or_default();
        let _ = writeln!(out, "{case}, {arm}: {command}");
    }
    print(&format!("{out}{} runs, about {:.0} s\n", turns.len(), time.as_secs_f64()))
}

fn report(args: &ReportArgs) -> Result<(), Failure> {
    let rendering = Rendering::open(&args.render, &[&args.file])?;
    rendering.put(&store::read(&args.file)?.report())
}

fn compare(args: &CompareArgs) -> Result<(), Failure> {
    let rendering = Rendering::open(&args.render, &[&args.a, &args.b])?;
    let [a, b] = [&args.a, &args.b].map(|file| store::read(file));
    let (a, b) = (a?, b?);
    let mut report = compare::report(&a.results, &b.results).map_err(|why| {
        Failure::Usage(format!("cannot compare {} (A) with {} (B): {why}", args.a.display(), args.b.display()))
    })?;
    let lead =
        |name: &str, of: &Stored| of.failures.lead().iter().map(|why| format!("{name}: {why}")).collect::<Vec<_>>();
    report.lead.splice(0..0, [lead("A", &a), lead("B", &b)].concat());
    rendering.put(&report)
}

fn evidence(args: &EvidenceArgs) -> Result<(), Failure> {
    let [json, html] = ["json", "html"].map(|form| args.folder.join(format!("wideleaf-evidence.{form}")));
    let (output, resume) = if store::has_content(&json) { (None, Some(json)) } else { (Some(json), None) };
    run(&RunExperimentArgs {
        long: false,
        name: "evidence".into(),
        rounds: None,
        cases: vec![],
        arms: vec![],
        budget: None,
        output,
        resume,
        html: Some(html),
        dry_run: false,
        against: None,
    })
}

/// As [`some_time`], with the remedy for `--budget`.
fn parse_budget(text: &str) -> Result<Duration, String> {
    some_time(text, "omit --budget to run all rounds, or see --dry-run")
}

fn unknown(name: &str) -> Failure {
    let known: Vec<&str> = catalogue::ALL.iter().map(|experiment| experiment.name()).collect();
    let hint = did_you_mean(name, known.iter().copied());
    Failure::Usage(format!("cannot find the experiment {name:?}; the experiments are {}{hint}", known.join(", ")))
}
