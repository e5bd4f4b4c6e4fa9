//! A TOML file as arguments of `run`, each with its line in the file.

use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, ArgAction, Command};
use toml::de::{DeTable, DeValue};

use super::{key_of, options, paths};

/// One key of the file.
#[derive(Debug)]
pub(super) struct Entry {
    /// Line number, from 1 on.
    pub(super) line: usize,
    /// Key, as in the file.
    pub(super) key: String,
    /// Clap's id of the option.
    pub(super) id: String,
    /// Arguments to type for it; none for a flag that is `false` and for an empty list.
    pub(super) arguments: Vec<OsString>,
}

/// An error in a file.
#[derive(Debug)]
pub(super) struct FileError {
    /// Line number, from 1 on.
    pub(super) line: usize,
    /// The mistake, with the valid forms.
    pub(super) why: String,
}

/// The entries of `text`, in order; relative paths begin at `folder`.
pub(super) fn read(text: &str, command: &Command, folder: &Path) -> Result<Vec<Entry>, FileError> {
    let line_of = |at: usize| text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| FileError {
        line: line_of(error.span().map_or(0, |span| span.start)),
        why: format!("this is not TOML: {}", error.message().replace('\n', " ")),
    })?;
    let mut items: Vec<_> = table.get_ref().iter().collect();
    items.sort_by_key(|(key, _)| key.span().start);
    let entry = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
        let line = line_of(key.span().start);
        let key: &std::borrow::Cow<'_, str> = key.get_ref();
        let arg = option_of(key, command).map_err(|why| FileError { line, why })?;
        let arguments = arguments_of(arg, key, value.get_ref(), folder).map_err(|why| FileError { line, why })?;
        Ok(Entry { line, key: key.to_string(), id: arg.get_id().to_string(), arguments })
    };
    items.into_iter().map(entry).collect()
}

fn option_of<'a>(key: &str, command: &'a Command) -> Result<&'a Arg, String> {
    let found = options(command).find(|arg| key_of(arg) == key);
    found.ok_or_else(|| {
        let mut keys: Vec<String> = options(command).filter(|arg| !arg.is_hide_set()).map(key_of).collect();
        keys.sort();
        format!("unknown key {key:?}: the keys are {}", keys.join(", "))
    })
}

fn arguments_of(arg: &Arg, key: &str, value: &DeValue<'_>, folder: &Path) -> Result<Vec<OsString>, String> {
    let word = |value: &DeValue<'_>| argument(arg, key, &text_of(key, value)?, folder);
    match value {
        DeValue::Boolean(is_set) if takes_no_value(arg) => {
            Ok(is_set.then(|| format!("--{key}").into()).into_iter().collect())
        }
        _ if !arg.get_action().takes_values() => {
            Err(format!("{key} is a flag, and this is {}: write {key} = true or {key} = false", kind_of(value)))
        }
        DeValue::Array(values) if is_repeatable(arg) => values.iter().map(|value| word(value.get_ref())).collect(),
        DeValue::Array(_) => Err(format!("{key} takes one value, and this is a list")),
        value => Ok(vec![word(value)?]),
    }
}

/// Whether it is a flag, or an option with an optional value.
fn takes_no_value(arg: &Arg) -> bool {
    !arg.get_action().takes_values() || arg.get_num_args().is_some_and(|number| number.min_values() == 0)
}

pub(super) fn is_repeatable(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append) || arg.get_num_args().is_some_and(|number| number.max_values() > 1)
}

/// The argument of an entry; a positional argument is its value alone.
fn argument(arg: &Arg, key: &str, value: &str, folder: &Path) -> Result<OsString, String> {
    if value.contains('\0') {
        return Err(format!("{key} contains a character with code 0"));
    }
    let value = paths::from_file(arg, value, folder);
    Ok(if arg.is_positional() { value } else { [format!("--{key}=").into(), value].into_iter().collect() })
}

/// The value as it would be typed.
fn text_of(key: &str, value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Ok(number.to_string()),
            Err(_) => Err(format!("{key} is a number of more than 127 bits")),
        },
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        DeValue::Boolean(is_true) => Ok(is_true.to_string()),
        other => Err(format!("{key} is {}: write it as on the command line, as a string", kind_of(other))),
    }
}

fn kind_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
