//! `wideleaf doctor`: the capabilities of this host, each "no" with its reason and its replacement.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use clap::Args;
use comfy_table::Cell;
use serde::Serialize;
use wideleaf_memory::capabilities::{Capability, probe};
use wideleaf_memory::walk_cost::ChosenWalkCost;
use wideleaf_policies::Bytes;
use wideleaf_run::environment::Environment;
use wideleaf_run::failure::Failure;
use wideleaf_run::front_end::FrontEnd;
use wideleaf_run::guardian::cgroup;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::mappings::{MappingReport, check_all};
use wideleaf_run::{devices, guest};
use wideleaf_vmm::sandbox;

use crate::options::FormatArg;
use crate::output::{Output, end_of_both};
use crate::run::front_end::TerminalFrontEnd;
use crate::table::{number, prose_table, table};

const DOCTOR_EXAMPLES: &str = "\
Examples:
  What is available, and what replaces the rest:
    wideleaf doctor

  Whether KVM maps guests as expected; exit code 1 if it does not:
    wideleaf doctor --mappings

  The same, for programs:
    wideleaf doctor --mappings --format json";

/// Arguments of `wideleaf doctor`.
#[derive(Args, Debug)]
#[command(after_long_help = DOCTOR_EXAMPLES)]
pub struct DoctorArgs {
    /// Also run small guests and compare KVM's mapping counters with the expected ones (needs KVM, half a minute)
    #[arg(long)]
    pub mappings: bool,

    /// Format of the output
    #[arg(long, value_enum, default_value = "table")]
    pub format: FormatArg,
}

/// Everything that the doctor found.
#[derive(Serialize)]
pub struct DoctorReport {
    /// Machine that was examined.
    pub environment: Environment,
    /// Assumed cost of a TLB miss for `auto`, and its source.
    pub walk_cost: String,
    /// Reason why a measurement of that cost is not used, if so.
    pub walk_cost_note: Option<String>,
    /// Capabilities, one per row.
    pub capabilities: Vec<Capability>,
    /// KVM's counters compared with the expected ones, with `--mappings`.
    pub mappings: Option<MappingReport>,
}

/// Runs the subcommand `doctor`.
///
/// # Errors
/// [`Failure`]. A wrong mapping is reported as a failure of the guest.
pub fn main(args: &DoctorArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?;
    let front: Arc<dyn FrontEnd> = Arc::new(TerminalFrontEnd::default());
    let mut capabilities = guest::capabilities();
    capabilities.extend(probe(Path::new("/")));
    capabilities.extend(sandbox::probe::probe(Path::new("/")));
    capabilities.push(cgroup::cgroups());
    capabilities.extend(devices::capabilities());
    let walk = ChosenWalkCost::read(Path::new("/"));
    let checked = args.mappings.then(|| check_all(&front, &interrupts)).transpose();
    let (mappings, checked) = match checked {
        Ok(mappings) => (mappings, Ok(())),
        Err(why) => (None, Err(why)),
    };
    let report = DoctorReport {
        environment: Environment::capture(),
        walk_cost: walk.to_string(),
        walk_cost_note: walk.note,
        capabilities,
        mappings,
    };
    let wrong = report.mappings.as_ref().map_or(0, MappingReport::wrong);
    let verdict = checked.and_then(|()| match wrong {
        0 => Ok(()),
        _ => Err(Failure::GuestFailed(format!("{wrong} mappings are not as expected; see the table above"))),
    });
    end_of_both("wideleaf", verdict, output.write(&report, DoctorReport::to_table))
}

impl DoctorReport {
    /// The report as a table for people.
    pub fn to_table(&self) -> String {
        let Environment { cpu, cpus, kernel, .. } = &self.environment;
        let mut out = format!("{cpus} x {cpu}, kernel {kernel}\n");
        let mut rows = prose_table(&["what", "", "found", "without it"]);
        for capability in &self.capabilities {
            let without = if capability.is_available { "" } else { capability.without };
            rows.add_row([
                Cell::new(capability.name),
                Cell::new(if capability.is_available { "yes" } else { "no" }),
                Cell::new(&capability.detail),
                Cell::new(without),
            ]);
        }
        let _ = writeln!(out, "{rows}");
        let _ = writeln!(out, "auto uses {}", self.walk_cost);
        if let Some(note) = &self.walk_cost_note {
            let _ = writeln!(out, "  {note}");
        }
        if let Some(mappings) = &self.mappings {
            out.push_str(&mappings_table(mappings));
        }
        out
    }
}

/// The results as a table for people.
fn mappings_table(report: &MappingReport) -> String {
    let pattern = Bytes::new(report.pattern_bytes);
    let mut out = format!("KVM's mappings of a guest that checks {pattern} of its RAM, paging: {}\n", report.paging);
    let mut rows = table(&[
        "vCPU", "guest", "backing", "host", "state", "expected", "pages_4k", "pages_2m", "pages_1g", "", "passes",
    ]);
    for row in &report.rows {
        rows.add_row([
            number(row.vcpus),
            Cell::new(&row.guest_page),
            Cell::new(&row.backing),
            Cell::new(&row.host_page),
            Cell::new(&row.state),
            Cell::new(&row.expected),
            number(row.kvm.pages_4k),
            number(row.kvm.pages_2m),
            number(row.kvm.pages_1g),
            Cell::new(if row.is_as_expected { "ok" } else { "WRONG" }),
            number(row.passes),
        ]);
    }
    let _ = writeln!(out, "{rows}");
    for why in &report.skipped {
        let _ = writeln!(out, "  skipped: {why}");
    }
    let wrong = report.wrong();
    let _ = writeln!(out, "  {} of {} as expected, no word lost", report.rows.len() - wrong, report.rows.len());
    out
}
