//! An experiment with two programs: this one and another build of it.

use std::path::Path;
use std::process::{Command, Stdio};

use wideleaf_experiments::definition::Experiment;
use wideleaf_run::failure::Failure;

/// The experiment with each arm repeated by `program`, which must be a wideleaf.
pub(super) fn against(experiment: Experiment, program: &Path) -> Result<Experiment, Failure> {
    let cannot = |why: &str| Failure::Usage(format!("cannot run --against {}: {why}", program.display()));
    let unusable = |why: String| cannot(&format!("{why}; name another build of wideleaf"));
    // An absolute path, so that it is found from another folder, and when results are continued later.
    let program_found = std::fs::canonicalize(program).map_err(|error| unusable(error.to_string()))?;
    let version = version_of(&program_found).map_err(unusable)?;
    let both = experiment.against(&program_found.display().to_string(), &version);
    match both.other_program() {
        Some(_) => Ok(both),
        None => Err(cannot(&format!(
            "{} has no `wideleaf run` on this host, and two programs can be compared only by such runs; name another \
             experiment",
            both.name
        ))),
    }
}

/// Why the other program of stored results, if they have one, is not that of their runs.
pub(super) fn changed(experiment: &Experiment) -> Option<String> {
    let program = experiment.other_program().filter(|_| !experiment.arms_of_two_programs().is_empty())?;
    match version_of(Path::new(program)) {
        Ok(version) if experiment.is_against(program, &version) => None,
        Ok(version) => Some(format!("{program} is now {version}")),
        Err(why) => Some(format!("{program}: {why}")),
    }
}

/// Name and version that a wideleaf gives, or why the program is no wideleaf.
fn version_of(program: &Path) -> Result<String, String> {
    let asked = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let asked = asked.map_err(|error| format!("it does not start: {error}"))?;
    let text = String::from_utf8_lossy(&asked.stdout);
    let is_wideleaf = |line: &&str| ["wideleaf ", "wideleaf-lab "].iter().any(|name| line.starts_with(name));
    let version = text.lines().next().filter(is_wideleaf).filter(|_| asked.status.success());
    version.map(str::to_owned).ok_or_else(|| "its --version does not name wideleaf".to_owned())
}
