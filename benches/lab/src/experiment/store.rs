//! The file of results. It is complete after every run: no run is repeated, however the experiment ends.

use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use wideleaf_experiments::definition::Experiment;
use wideleaf_experiments::results::{FORMAT, Results, Run};
use wideleaf_experiments::schedule;
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

use crate::experiment::environment;
use wideleaf_run::failure::Failure;
use wideleaf_run::place::{NamedPlace, new_file_in};

/// Largest file of results that is read: a thousand rounds of the longest experiment are some tens of MiB.
const RESULTS_MAX: Bytes = mib(512);

/// A growing file of results.
#[derive(Debug)]
pub(super) struct Store {
    path: PathBuf,
    results: Results,
}

impl Store {
    /// Creates a new file and tries it at once, so that a typo does not cost an hour of runs.
    pub(super) fn create(path: Option<&Path>, experiment: Experiment) -> Result<Store, Failure> {
        let now = now();
        let dated = || PathBuf::from(format!("{}-{}.json", experiment.name, now.replace([':', '-'], "")));
        let path = NamedPlace::open_file("--output", &path.map_or_else(dated, Path::to_path_buf))?.path().to_owned();
        let results = Results {
            wideleaf_experiment: FORMAT,
            environment: environment::capture(),
            started: now.clone(),
            ended: now,
            elapsed_s: 0.0,
            is_complete: false,
            runs: vec![],
            experiment,
        };
        let store = Store { path, results };
        store.write()?;
        Ok(store)
    }

    /// Opens the file of an unfinished experiment, without its failed runs: the cause of the failure may be gone.
    pub(super) fn resume(path: &Path, name: &str) -> Result<Store, Failure> {
        // After each run a new file replaces it.
        let path = NamedPlace::open_file("--resume", path)?.path().to_owned();
        let mut results = read(&path)?;
        if results.experiment.name != name {
            let has = &results.experiment.name;
            return Err(Failure::Usage(format!(
                "cannot resume {}: it has results of {has}, not of {name}",
                path.display()
            )));
        }
        results.runs.retain(|run| run.measured().is_some());
        Ok(Store { path, results })
    }

    /// Results in the file so far.
    pub(super) fn results(&self) -> &Results {
        &self.results
    }

    /// Path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds one run, made `elapsed_s` after the experiment began.
    pub(super) fn add(&mut self, run: Run, elapsed_s: f64) -> Result<(), Failure> {
        self.results.runs.push(run);
        self.results.ended = now();
        self.results.elapsed_s = elapsed_s;
        self.results.is_complete = schedule::left(&self.results.experiment, &self.results.runs).is_empty();
        self.write()
    }

    /// Marks the results as complete.
    pub(super) fn complete(&mut self) -> Result<(), Failure> {
        self.results.is_complete = true;
        self.write()
    }

    /// The failure, with the command that continues the experiment.
    pub(super) fn with_way_to_go_on(&self, failure: Failure) -> Failure {
        let (made, path) = (self.results.runs.len(), self.path.display());
        let all = schedule::turns(&self.results.experiment).len();
        let name = &self.results.experiment.name;
        let hint = format!(
            "{made} of {all} runs are in {path}; continue with `wideleaf-lab experiment run {name} --resume {path}`"
        );
        if let Failure::Interrupted = failure {
            wideleaf::output::say(format_args!("{hint}"));
            return failure;
        }
        failure.during(&hint)
    }

    /// Replaces the old file by a new one when that is complete.
    fn write(&self) -> Result<(), Failure> {
        let cannot = |error: std::io::Error| Failure::Output(format!("cannot write {}: {error}", self.path.display()));
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut file = new_file_in(folder).map_err(cannot)?;
        let mut writer = BufWriter::new(&mut *file);
        serde_json::to_writer(&mut writer, &self.results).map_err(|error| cannot(error.into()))?;
        writer.write_all(b"\n").and_then(|()| writer.flush()).map_err(cannot)?;
        drop(writer);
        file.sync_data().map_err(cannot)?;
        file.persist(&self.path).map(drop).map_err(cannot)
    }
}

/// Reads a file of results.
pub(super) fn read(path: &Path) -> Result<Results, Failure> {
    let shown = path.display();
    let read = InputFile::open_stream(path).and_then(|file| file.read(RESULTS_MAX));
    let text = read.map_err(|error| Failure::Input(format!("cannot read {shown}: {error}")))?;
    let value: serde_json::Value = serde_json::from_slice(&text)
        .map_err(|error| Failure::Input(format!("cannot read {shown}: it is not a file of results: {error}")))?;
    match value.get("wideleaf_experiment").and_then(serde_json::Value::as_u64) {
        Some(version) if version == u64::from(FORMAT) => serde_json::from_value(value)
            .map_err(|error| Failure::Input(format!("cannot read {shown}: damaged, or from another build: {error}"))),
        Some(version) => Err(Failure::Input(format!(
            "cannot read {shown}: its format is {version}, and this program reads format {FORMAT}; use the version of \
            wideleaf that wrote it"
        ))),
        None => Err(Failure::Input(format!(
            "cannot read {shown}: it is not a file of results of `wideleaf-lab experiment run`"
        ))),
    }
}

fn now() -> String {
    let now = OffsetDateTime::now_utc().replace_nanosecond(0).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    now.format(&Rfc3339).unwrap_or_default()
}
