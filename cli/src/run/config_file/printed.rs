//! `--print-config`: the options of a run as an equivalent file. Defaults are comments, so that they still depend
//! on the other options.

use std::ffi::OsStr;
use std::fmt::Write as _;

use clap::builder::Arg;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use toml::Value;

use super::{entries, key_of, options, paths};
use wideleaf_run::failure::Failure;

/// Text of the file.
///
/// # Errors
/// [`Failure::Usage`] if a value is not text, which TOML cannot contain.
pub(super) fn text(command: &Command, run: &ArgMatches) -> Result<String, Failure> {
    let mut text = String::from("# wideleaf run --config FILE; options that are commented out have their default\n");
    for arg in options(command) {
        let said = run.value_source(arg.get_id().as_str());
        let Some(source) = said.filter(|source| *source == ValueSource::CommandLine || takes_value(arg)) else {
            continue;
        };
        let mark = if source == ValueSource::CommandLine { "" } else { "# " };
        let value = value_of(arg, run)?;
        writeln!(text, "{mark}{} = {value}", key_of(arg)).expect("a string takes all");
    }
    Ok(text)
}

fn takes_value(arg: &Arg) -> bool {
    arg.get_action().takes_values()
}

fn value_of(arg: &Arg, run: &ArgMatches) -> Result<Value, Failure> {
    let raw = run.get_raw(arg.get_id().as_str()).into_iter().flatten();
    let values = raw.filter(|_| takes_value(arg)).map(|value| text_of(arg, value));
    let mut values = values.map(|text| text.map(Value::String)).collect::<Result<Vec<Value>, Failure>>()?;
    match values.len() {
        // A flag, or an option without its optional value.
        0 => Ok(Value::Boolean(true)),
        _ if entries::is_repeatable(arg) => Ok(Value::Array(values)),
        _ => Ok(values.remove(0)),
    }
}

fn text_of(arg: &Arg, value: &OsStr) -> Result<String, Failure> {
    let value = paths::absolute(arg, value);
    value.into_string().map_err(|value| {
        Failure::Usage(format!(
            "cannot print {} with --print-config: its value {value:?} is not UTF-8, which TOML requires",
            key_of(arg)
        ))
    })
}
