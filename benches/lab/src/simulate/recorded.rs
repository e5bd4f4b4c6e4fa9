//! `wideleaf-lab simulate --recording`: actions of policies in a recorded run, beside those of its own policy.
//!
//! ```text
//!   recording ──▶ read once: completeness, cost of actions      ──┬─▶ as recorded ─────┐
//!                                                                 ├─▶ replay policy A ─┼─▶ one column each
//!                                                                 └─▶ replay policy B ─┘
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use comfy_table::Cell;
use serde::Serialize;
use wideleaf::output::Output;
use wideleaf::table::{number, table};
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::PolicyChoice;
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::units::gib;
use wideleaf_policies::walk::cost::WalkCost;
use wideleaf_policies::{Bytes, PerTenThousand};
use wideleaf_run::engine::WALK_COST_FACT;
use wideleaf_run::failure::Failure;
use wideleaf_simulator::replay::{Recording, Tally};

/// Largest recording, which is read into memory whole; a busy host of a tebibyte needs weeks for this size.
const RECORDING_MAX: Bytes = gib(1);

/// Result of a simulation.
#[derive(Debug, Serialize)]
pub struct SimulationReport {
    /// Facts about the recording.
    pub recording: RecordingInfo,
    /// Actions of its own policy.
    pub recorded: PolicyActions,
    /// Actions of the simulated policies.
    pub simulated: Vec<PolicyActions>,
}

/// Facts about a recording.
#[derive(Debug, Serialize)]
pub struct RecordingInfo {
    /// Path of the file.
    pub file: String,
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// Number of rounds of the loop.
    pub ticks: u64,
    /// Time from the first snapshot to the last, in seconds.
    pub length_s: f64,
    /// Number of windows of all VMs.
    pub windows: u64,
    /// Whether the loop closed it; if the run was killed, the end may be missing.
    pub is_closed: bool,
    /// Offset at which it was cut off within a frame, if it was.
    pub cut_off_at_bytes: Option<u64>,
    /// Recorded facts about host and guest.
    pub facts: BTreeMap<String, String>,
}

/// Actions of one policy.
#[derive(Debug, Serialize)]
pub struct PolicyActions {
    /// Name of the policy.
    pub policy: String,
    /// Actions by `action.result`.
    pub outcomes: BTreeMap<String, u64>,
    /// Number of times that the budget refused an action; a recording does not have it for its own policy.
    pub budget_refusals: Option<u64>,
    /// Guest memory copied, in bytes.
    pub copied_bytes: u64,
    /// CPU time of the actions, in seconds.
    pub cpu_s: f64,
    /// Bytes that became resident only because their page is large.
    pub bloat_bytes: u64,
    /// Zero pages given back, in bytes.
    pub released_bytes: u64,
    /// Resident bytes at the end.
    pub resident_at_end_bytes: u64,
    /// `host_coverage_2m` at the end, in basis points.
    pub host_coverage_2m_at_end_bp: u32,
    /// Mean of `host_coverage_2m`: the area below divided by the recording's length.
    pub host_coverage_2m_mean_bp: u32,
    /// `host_coverage_2m` times time: the time for which everything would have to be large for the same value.
    pub host_coverage_2m_area_s: f64,
    /// Changes of `host_coverage_2m`: seconds since the manager's start, and the fraction from then on.
    pub host_coverage_2m: Vec<(f64, f64)>,
}

/// Simulates the given policies, or all.
///
/// # Errors
/// [`Failure`] if the recording is unusable or the result could not be written.
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
/// [`Failure::Input`] if there is no recording, or it is damaged.
pub fn simulate(path: &Path, policies: &[PolicyChoice]) -> Result<SimulationReport, Failure> {
    let unusable =
        |why: &dyn std::fmt::Display| Failure::Input(format!("cannot use --recording {}: {why}", path.display()));
    let read = InputFile::open_stream(path).and_then(|file| file.read(RECORDING_MAX));
    let bytes = read.map_err(|error| unusable(&error))?;
    let recording = Recording::read(&bytes).map_err(|error| unusable(&error))?;
    let own = format!("{} (recorded)", recording.header().policy);
    // With the costs of the recording, so that the recorded policy repeats its actions; older recordings lack them
    // and used the prior.
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

fn side(policy: String, tally: &Tally) -> PolicyActions {
    let outcomes = tally.actions.iter().map(|((action, result), n)| (format!("{action}.{result}"), *n));
    let coverage = tally.coverage.iter().map(|(at, share)| (at.since_start().as_secs_f64(), share.as_fraction()));
    PolicyActions {
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
    /// A table for people, with a column per policy.
    pub fn to_table(&self) -> String {
        let sides: Vec<&PolicyActions> = std::iter::once(&self.recorded).chain(&self.simulated).collect();
        let mut out = self.recording.to_lines();
        let mut columns = vec!["policy"];
        columns.extend(sides.iter().map(|side| side.policy.as_str()));
        let mut rows = table(&columns);
        let mut row = |name: &str, value: &dyn Fn(&PolicyActions) -> String| {
            rows.add_row(std::iter::once(Cell::new(name)).chain(sides.iter().map(|side| number(value(side)))));
        };
        let mut names: Vec<&String> = sides.iter().flat_map(|side| side.outcomes.keys()).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            row(name, &|side| side.outcomes.get(name).unwrap_or(&0).to_string());
        }
        row("budget refused", &|side| side.budget_refusals.map_or("-".into(), |n| n.to_string()));
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
                let _ = writeln!(out, "  cut off after byte {at}: simulated up to there");
            }
            (None, false) => {
                let _ = writeln!(out, "  not closed: the run was killed, its end may be missing");
            }
            (None, true) => {}
        }
        out
    }
}
