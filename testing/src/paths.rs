//! Checks of arguments that are paths, with something other than a regular file behind them: a FIFO, a folder, an
//! endless device, a socket, nothing. A program's tests give the tables of its commands.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test may panic")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use clap::Command;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::scratch::Scratch;

/// Time limit for a command that ends, also on a host with a load of 40.
pub const LONG: Duration = Duration::from_secs(120);

/// Placeholder for the path in the arguments.
pub const HERE: &str = "@";

/// Name of an argument, and a command with [`HERE`] in its place.
pub type Row<'a> = (&'a str, &'a [&'a str]);

/// Paths that are not regular files, and their names in a refusal.
fn no_files(scratch: &Scratch) -> Vec<(PathBuf, &'static str)> {
    mkfifo(&scratch.path("fifo"), Mode::S_IRWXU).unwrap();
    fs::create_dir(scratch.path("folder")).unwrap();
    drop(UnixListener::bind(scratch.path("socket")).unwrap());
    let kinds = [("fifo", "a FIFO"), ("folder", "a folder"), ("socket", "a socket")];
    kinds.map(|(name, kind)| (scratch.path(name), kind)).into()
}

/// Last line of the output of a command with this path, which must fail by itself.
fn refusal(scratch: &Scratch, arguments: &[&str], path: &str) -> String {
    let arguments: Vec<String> = arguments.iter().map(|argument| with(argument, path)).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let before = scratch.names();
    let output = scratch.wideleaf(&arguments).timeout(LONG).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(matches!(output.status.code(), Some(2..=7)), "{arguments:?}: {:?} {stderr}", output.status);
    assert_eq!(scratch.names(), before, "{arguments:?} leaves nothing behind");
    stderr
}

/// The argument with the path in place of the placeholder; a value from a file keeps the `@` before it.
fn with(argument: &str, path: &str) -> String {
    match argument.strip_suffix(HERE) {
        Some(before) if before.is_empty() || before.ends_with(HERE) => format!("{before}{path}"),
        _ => argument.to_owned(),
    }
}

/// Each command refuses to read what is not a file, and says what it is.
pub fn refuses_to_read(scratch: &Scratch, table: &[Row<'_>]) {
    let mut paths = no_files(scratch);
    paths.extend([(PathBuf::from("/dev/zero"), "a character device"), (scratch.path("none"), "")]);
    for (name, arguments) in table {
        for (path, kind) in &paths {
            let said = refusal(scratch, arguments, path.to_str().unwrap());
            // The second file is not reached if the first does not exist.
            let is_reached = *name != "experiment compare b";
            assert!(said.contains(kind) || !is_reached, "{name}: no {kind:?} in {said}");
        }
    }
}

/// Each command refuses to write to what is not a file, and says what it is.
pub fn refuses_to_write(scratch: &Scratch, table: &[Row<'_>]) {
    for (path, kind) in no_files(scratch) {
        for (name, arguments) in table {
            let is_folder = name.ends_with("svg") || name.ends_with("folder") || name.ends_with("jail");
            if is_folder && kind == "a folder" {
                continue;
            }
            let said = refusal(scratch, arguments, path.to_str().unwrap());
            assert!(is_folder || said.contains(kind), "{name}: no {kind:?} in {said}");
        }
    }
}

/// Path arguments of the program that are in none of these tables. A name with `*` stands for all commands.
pub fn missing_in(program: &Command, tables: &[&[Row<'_>]], not_files: &[(&str, &str)]) -> Vec<String> {
    let rows = tables.iter().flat_map(|table| table.iter()).map(|(name, _)| *name);
    let known: BTreeSet<&str> = rows.chain(not_files.iter().map(|(name, _)| *name)).collect();
    let is_known = |name: &String| {
        let everywhere = format!("* {}", name.rsplit(' ').next().unwrap());
        known.contains(name.as_str()) || known.contains(everywhere.as_str())
    };
    let mut paths = Vec::new();
    add_paths(program, "", &mut paths);
    assert!(paths.len() > 15, "{paths:?}");
    paths.into_iter().filter(|name| !is_known(name)).collect()
}

/// Names of all path arguments of a command and its subcommands.
fn add_paths(command: &Command, before: &str, paths: &mut Vec<String>) {
    let types = [clap::value_parser!(PathBuf).type_id(), clap::value_parser!(std::ffi::OsString).type_id()];
    let is_path = |arg: &&clap::Arg| types.contains(&arg.get_value_parser().type_id());
    paths.extend(command.get_arguments().filter(is_path).map(|arg| format!("{before}{}", arg.get_id())));
    for inner in command.get_subcommands() {
        add_paths(inner, &format!("{before}{} ", inner.get_name()), paths);
    }
}
