//! An experiment with two programs: this one and another build of it.

use std::path::Path;
use std::process::{Command, Stdio};

use wideleaf::failure::Failure;
use wideleaf_experiments::definition::Experiment;

/// The experiment with each arm also by `program`, which has to be a wideleaf.
pub(super) fn against(experiment: Experiment, program: &Path) -> Result<Experiment, Failure> {
    let unusable = |why: &dyn std::fmt::Display| {
        Failure::Usage(format!("--against {}: {why}; name another build of wideleaf", program.display()))
    };
    // Where it is also found from another folder, and from a file of results that goes on later.
    let program_found = std::fs::canonicalize(program).map_err(|error| unusable(&error))?;
    let asked = Command::new(&program_found).arg("--version").stdin(Stdio::null()).output();
    let asked = asked.map_err(|error| unusable(&format_args!("it cannot be run: {error}")))?;
    let version = String::from_utf8_lossy(&asked.stdout);
    match version.lines().next() {
        Some(version)
            if asked.status.success()
                && ["wideleaf ", "wideleaf-lab "].iter().any(|name| version.starts_with(name)) =>
        {
            Ok(experiment.against(&program_found.display().to_string(), version))
        }
        _ => Err(unusable(&"it does not say that it is wideleaf when asked for its --version")),
    }
}
