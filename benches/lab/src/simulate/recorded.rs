//! `wideleaf simulate --recording`: what policies would have done in a recorded run, beside what its own policy did.
//!
//! ```text
//!   recording ──▶ read once: is it whole, what did actions cost ──┬─▶ as recorded ─────┐
//!                                                                 ├─▶ replay policy A ─┼─▶ one column each
//!                                                                 └─▶ replay policy B ─┘
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use comfy_table::Cell;
use serde::Serialize;
use wideleaf::failure::Failure;
use wideleaf::output::Output;
use wideleaf::report::{number, table};
use wideleaf::run::WALK_COST_FACT;
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::PolicyChoice;
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::units::gib;
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{Bytes, PerTenThousand};
use wideleaf_simulator::replay::{Recording, Tally};

/// A recording is read into memory whole; a busy host of a tebibyte needs weeks for so much.
const RECORDING_MAX: Bytes = gib(1);

/// What a simulation found.
#[derive(Debug, Serialize)]
pub struct SimulationReport {
    /// The recording.
    pub recording: RecordingInfo,
    /// What its own policy did.
    pub recorded: Side,
    /// What others would have done.
    pub simulated: Vec<Side>,
}

/// What was recorded.
#[derive(Debug, Serialize)]
pub struct RecordingInfo {
    /// Its file.
    pub file: String,
    /// Length of the file.
    pub bytes: u64,
    /// Rounds of the loop.
    pub ticks: u64,
    /// From the first snapshot to the last.
    pub length_s: f64,
    /// Windows of all VMs.
    pub windows: u64,
    /// Whether the loop closed it; where it was killed, the last of it may be missing.
    pub is_closed: bool,
    /// Where it was cut off within a frame, if it was.
    pub cut_off_at_bytes: Option<u64>,
    /// What it says of host and guest.
    pub facts: BTreeMap<String, String>,
}

/// What one policy did.
#[derive(Debug, Serialize)]
pub struct Side {
    /// Its name.
    pub policy: String,
    /// Actions by `action.result`.
    pub outcomes: BTreeMap<String, u64>,
    /// Times the budget said no; a recording does not say it of its own policy.
    pub budget_refusals: Option<u64>,
    /// Guest memory copied.
    pub copied_bytes: u64,
    /// CPU time of the actions.
    pub cpu_s: f64,
    /// Became resident only because the page is large.
    pub bloat_bytes: u64,
    /// Zero pages given back.
    pub released_bytes: u64,
    /// Present at the end.
    pub resident_at_end_bytes: u64,
    /// `host_coverage_2m` at the end.
    pub host_coverage_2m_at_end_bp: u32,
    /// `host_coverage_2m` over the whole time: the area below divided by the recording's length.
    pub host_coverage_2m_mean_bp: u32,
    /// `host_coverage_2m` times time: how long everything would have to be large for the same.
    pub host_coverage_2m_area_s: f64,
    /// `host_coverage_2m` whenever it changed: seconds since the manager's start, and the value as a fraction from then on.
    pub host_coverage_2m: Vec<(f64, f64)>,
}

/// Runs the subcommand: the policies, or all.
///
/// # Errors
/// [`Failure`] where the recording can not be used or the result not written.
pub fn main(path: &Path, policies: &[PolicyChoice], output: Output) -> Result<(), Failure> {
    let all: Vec<PolicyChoice>;
    let policies = match policies {
        [] => {
            all = POLICIES.iter().map(PolicyChoice::from).collect();
            &all
        }
        policies => policies,
    };
    let report = simulate(path, policies)?;
    output.write(&report, SimulationReport::to_table)
}

/// Replays a recording through each policy.
///
/// # Errors
/// [`Failure::Input`] where there is no recording, or it is damaged.
pub fn simulate(path: &Path, policies: &[PolicyChoice]) -> Result<SimulationReport, Failure> {
    let unusable = |why: &dyn std::fmt::Display| Failure::Input(format!("--recording {}: {why}", path.display()));
    let read = InputFile::open_stream(path).and_then(|file| file.read(RECORDING_MAX));
    let bytes = read.map_err(|error| unusable(&error))?;
    let recording = Recording::read(&bytes).map_err(|error| unusable(&error))?;
    let own = format!("{} (recorded)", recording.header().policy);
    // As it counted there, so that the recorded policy does again what it did; recordings from before say nothing and had the prior.
    let facts = &recording.header().facts;
    let walk = facts.iter().find(|(name, _)| name == WALK_COST_FACT).and_then(|(_, text)| text.parse().ok());
    let walk: WalkCost = walk.unwrap_or_default();
    let replay = |policy: &PolicyChoice| side(policy.to_string(), &recording.replay(policy.make_for(&walk).as_mut()));
    Ok(SimulationReport {
        recorded: side(own, &recording.recorded()),
        simulated: policies.iter().map(replay).collect(),
        recording: RecordingInfo {
            file: path.display().to_string(),
            bytes: bytes.len() as u64,
            ticks: recording.ticks,
            length_s: recording.length.as_secs_f64(),
            windows: recording.header().windows() as u64,
            is_closed: recording.is_closed,
            cut_off_at_bytes: recording.cut_off_at.map(|at| at as u64),
            facts: recording.header().facts.iter().cloned().collect(),
        },
    })
}

fn side(policy: String, tally: &Tally) -> Side {
    let outcomes = tally.actions.iter().map(|((action, result), n)| (format!("{action}.{result}"), *n));
    let coverage = tally.coverage.iter().map(|(at, share)| (at.since_start().as_secs_f64(), share.as_fraction()));
    Side {
        policy,
        outcomes: outcomes.collect(),
        budget_refusals: tally.budget_refusals,
        copied_bytes: tally.copied.get(),
        cpu_s: tally.cpu.as_secs_f64(),
        bloat_bytes: tally.bloat.get(),
        released_bytes: tally.released.get(),
        resident_at_end_bytes: tally.resident_at_end.get(),
        host_coverage_2m_at_end_bp: tally.coverage_at_end().get(),
        host_coverage_2m_mean_bp: tally.coverage_mean().get(),
        host_coverage_2m_area_s: tally.coverage_area.as_secs_f64(),
        host_coverage_2m: coverage.collect(),
    }
}

impl SimulationReport {
    /// For people: a column per policy.
    pub fn to_table(&self) -> String {
        let sides: Vec<&Side> = std::iter::once(&self.recorded).chain(&self.simulated).collect();
        let mut out = self.recording.to_lines();
        let mut columns = vec!["policy"];
        columns.extend(sides.iter().map(|side| side.policy.as_str()));
        let mut rows = table(&columns);
        let mut row = |name: &str, value: &dyn Fn(&Side) -> String| {
            rows.add_row(std::iter::once(Cell::new(name)).chain(sides.iter().map(|side| number(value(side)))));
        };
        let mut names: Vec<&String> = sides.iter().flat_map(|side| side.outcomes.keys()).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            row(name, &|side| side.outcomes.get(name).unwrap_or(&0).to_string());
        }
        row("budget said no", &|side| side.budget_refusals.map_or("-".into(), |n| n.to_string()));
        row("copied", &|side| Bytes::new(side.copied_bytes).to_string());
        row("CPU of the actions", &|side| format!("{:.1} ms", side.cpu_s * 1e3));
        row("bloat", &|side| Bytes::new(side.bloat_bytes).to_string());
        row("released", &|side| Bytes::new(side.released_bytes).to_string());
        row("resident at the end", &|side| Bytes::new(side.resident_at_end_bytes).to_string());
        row("host coverage 2m at the end", &|side| PerTenThousand::new(side.host_coverage_2m_at_end_bp).to_string());
        row("host coverage 2m over time", &|side| PerTenThousand::new(side.host_coverage_2m_mean_bp).to_string());
        let _ = writeln!(out, "{rows}");
        out
    }
}

impl RecordingInfo {
    fn to_lines(&self) -> String {
        let mut out = String::new();
        let fact = |name| self.facts.get(name).map_or("", String::as_str);
        let _ = writeln!(out, "{}: {} {} ({})", self.file, fact("workload"), fact("cmdline"), fact("mode"));
        let _ = writeln!(
            out,
            "  {} ticks in {:.3} s over {} windows, {}",
            self.ticks,
            self.length_s,
            self.windows,
            Bytes::new(self.bytes)
        );
        match (self.cut_off_at_bytes, self.is_closed) {
            (Some(at), _) => {
                let _ = writeln!(out, "  cut off behind byte {at}: simulated up to there");
            }
            (None, false) => {
                let _ = writeln!(out, "  not closed: the run was killed, its end may be missing");
            }
            (None, true) => {}
        }
        out
    }
}
