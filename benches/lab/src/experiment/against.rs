//! An experiment with two programs: this one and another build of it.

use std::path::Path;
use std::process::{Command, Stdio};

use wideleaf_experiments::definition::Experiment;
use wideleaf_run::failure::Failure;

/// The experiment with each arm repeated by `program`, which must be a wideleaf.
pub(super) fn against(experiment: Experiment, program: &Path) -> Result<Experiment, Failure> {
    let unusable = |why: &dyn std::fmt::Display| {
        Failure::Usage(format!("cannot run --against {}: {why}; name another build of wideleaf", program.display()))
    };
    // An absolute path, so that it is found from another folder, and when results are continued later.
    let program_found = std::fs::canonicalize(program).map_err(|error| unusable(&error))?;
    let asked = Command::new(&program_found).arg("--version").stdin(Stdio::null()).output();
    let asked = asked.map_err(|error| unusable(&format_args!("it does not start: {error}")))?;
    let version = String::from_utf8_lossy(&asked.stdout);
    match version.lines().next() {
        Some(version)
            if asked.status.success()
                && ["wideleaf ", "wideleaf-lab "].iter().any(|name| version.starts_with(name)) =>
        {
            Ok(experiment.against(&program_found.display().to_string(), version))
        }
        _ => Err(unusable(&"its --version does not name wideleaf")),
    }
}
