//! `wideleaf run --config FILE`: the options of a run from a file; `--print-config`: a file from the options of a run.
//!
//! ```text
//!   vm.toml ──▶ entries ──▶ one by one, alone: is it a value of that option? ──┐ if not, with the line
//!                                                                              ▼
//!   wideleaf run ─┬─ --key=value …  of the file, minus those typed  ──────▶ clap ──▶ RunArgs ──▶ printed ──▶ vm.toml
//!                 └─ --key=value …  as typed  ─────────────────────────────▶
//! ```
//!
//! The file is read here, in a step before clap parses the whole command line. Clap's own parsers open no file.
//!
//! There is no second description of the options: the file's entries become arguments, which clap parses like the
//! command line. So an option that is added to `run` can be in a file from then on, with the same form, default and
//! conflicts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches};
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;
use wideleaf_run::failure::Failure;

use super::args::PolicyOrHelp;
use crate::args::{Cli, Command as Chosen};
use crate::moved_commands;
use entries::Entry;

mod entries;
mod paths;
mod printed;

/// Name of the subcommand that takes a file.
const RUN: &str = "run";

/// Longest configuration: a hundred options of a line each are some KiB, and a device instead of a file never ends.
const FILE_BYTES_MAX: Bytes = mib(1);

/// Options about files or help, which cannot be in a file.
const NOT_IN_A_FILE: [&str; 4] = ["config", "print_config", "help", "version"];

/// The command line, with the contents of the file that it names. A command line that is wrong by itself ends the
/// process as clap does, unless it names a command that has moved to another program.
///
/// # Errors
/// [`Failure::Usage`] for such a command, with the present one.
/// [`Failure::Input`] with file and line if the file is wrong, or contradicts itself or the command line.
pub fn command_line(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, Failure> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let typed = Cli::command().try_get_matches_from(&arguments).or_else(|error| {
        let moved = if error.use_stderr() { moved_commands::refusal(&arguments) } else { None };
        moved.map_or_else(|| said_by_clap(error), Err)
    })?;
    let matches = match config_of(&typed) {
        Some(path) => ConfigFile::read(path)?.under(&arguments, &typed)?,
        None => typed,
    };
    let mut cli = Cli::from_arg_matches(&matches).or_else(said_by_clap)?;
    if let (Chosen::Run(args), Some(run)) = (&mut cli.command, matches.subcommand_matches(RUN))
        && args.print_config
    {
        args.effective = Some(printed::text(&run_command(), run)?);
    }
    Ok(cli)
}

/// Ends the process with clap's message: an error, or help that must be written.
pub fn said_by_clap<T>(error: clap::Error) -> Result<T, Failure> {
    if error.use_stderr() {
        error.exit();
    }
    match error.print().and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Output(format!("cannot write to standard output: {error}")))
        }
        _ => std::process::exit(error.exit_code()),
    }
}

fn config_of(typed: &ArgMatches) -> Option<&PathBuf> {
    typed.subcommand_matches(RUN)?.get_one("config")
}

fn run_command() -> Command {
    let mut all = Cli::command();
    // Building the command lets clap add its own parts.
    all.build();
    all.find_subcommand(RUN).expect("it is one of the subcommands").clone()
}

/// Key of an option in a file: its long name, or the name of a positional argument.
fn key_of(arg: &clap::Arg) -> String {
    arg.get_long().map_or_else(|| arg.get_id().as_str().replace('_', "-"), str::to_owned)
}

/// Options that may be in a file.
fn options(command: &Command) -> impl Iterator<Item = &clap::Arg> {
    command.get_arguments().filter(|arg| !NOT_IN_A_FILE.contains(&arg.get_id().as_str()))
}

/// A file of options of `run`, each with a valid value.
struct ConfigFile<'a> {
    path: &'a Path,
    entries: Vec<Entry>,
}

impl ConfigFile<'_> {
    fn read(path: &Path) -> Result<ConfigFile<'_>, Failure> {
        let cannot =
            |why: &dyn std::fmt::Display| Failure::Input(format!("cannot use --config {}: {why}", path.display()));
        let text = InputFile::open_stream(path).and_then(|file| file.read_text(FILE_BYTES_MAX));
        let text = text.map_err(|error| cannot(&error))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let command = run_command();
        let read = entries::read(&text, &command, folder);
        let entries = read.map_err(|wrong| wrong_at(path, wrong.line, &wrong.why))?;
        for entry in &entries {
            check_alone(entry).map_err(|why| wrong_at(path, entry.line, &why))?;
        }
        Ok(ConfigFile { path, entries })
    }

    /// The file's entries and the typed arguments; a typed option wins.
    fn under(&self, arguments: &[OsString], typed: &ArgMatches) -> Result<ArgMatches, Failure> {
        let run = typed.subcommand_matches(RUN).expect("it was typed");
        let is_typed = |entry: &&Entry| run.value_source(&entry.id) == Some(ValueSource::CommandLine);
        let kept: Vec<&Entry> = self.entries.iter().filter(|entry| !is_typed(entry)).collect();
        let at = arguments.iter().position(|argument| argument == RUN).expect("it was typed") + 1;
        let of_file = kept.iter().flat_map(|entry| entry.arguments.iter());
        let all = arguments[..at].iter().chain(of_file).chain(&arguments[at..]);
        Cli::command().try_get_matches_from(all).map_err(|error| self.contradiction(&error, &kept))
    }

    /// Error for contradicting options, with the lines of those from the file.
    fn contradiction(&self, error: &clap::Error, kept: &[&Entry]) -> Failure {
        let named = names_in(error);
        let of_file = kept.iter().filter(|entry| named.contains(&format!("--{}", entry.key)));
        let lines: BTreeMap<usize, &str> = of_file.map(|entry| (entry.line, entry.key.as_str())).collect();
        match lines.first_key_value() {
            Some((first, _)) => {
                let where_all: Vec<String> = lines.iter().map(|(line, key)| format!("{key}: line {line}")).collect();
                wrong_at(self.path, *first, &format!("{} ({})", one_line(error), where_all.join(", ")))
            }
            None => Failure::Input(format!("cannot use --config {}: {}", self.path.display(), one_line(error))),
        }
    }
}

fn wrong_at(path: &Path, line: usize, why: &str) -> Failure {
    Failure::Input(format!("{}:{line}: {why}", path.display()))
}

/// Checks that the option takes that value; conflicts show when all options are together.
fn check_alone(entry: &Entry) -> Result<(), String> {
    let words = ["wideleaf", RUN, "--config=-"].map(OsString::from);
    match Cli::command().try_get_matches_from(words.iter().chain(&entry.arguments)) {
        Ok(matches) => check_policy(entry, &matches),
        Err(error) if !matches!(error.kind(), ErrorKind::ArgumentConflict | ErrorKind::MissingRequiredArgument) => {
            Err(format!("{}: {}", entry.key, one_line(&error)))
        }
        _ => Ok(()),
    }
}

/// Checks the files that a policy names, so that a mistake there is reported with the line of the policy.
fn check_policy(entry: &Entry, matches: &ArgMatches) -> Result<(), String> {
    let run = matches.subcommand_matches(RUN).expect("it is the subcommand");
    match run.try_get_one(&entry.id) {
        Ok(Some(PolicyOrHelp::Use(policy))) => {
            policy.choice("--policy").map(drop).map_err(|error| format!("{}: {error}", entry.key))
        }
        _ => Ok(()),
    }
}

/// Options that an error of clap is about, without their values.
fn names_in(error: &clap::Error) -> Vec<String> {
    let bare = |name: &String| name.split([' ', '=']).next().unwrap_or_default().to_owned();
    let named = error.context().filter(|(kind, _)| matches!(kind, ContextKind::InvalidArg | ContextKind::PriorArg));
    let names = named.flat_map(|(_, value)| match value {
        ContextValue::String(name) => vec![bare(name)],
        ContextValue::Strings(names) => names.iter().map(bare).collect(),
        _ => Vec::new(),
    });
    names.collect()
}

/// Error of clap, without usage and tips.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let complaint: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    complaint.join(" ").trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests;
