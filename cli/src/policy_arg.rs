//! A policy as an argument: `name:key=value,…`, where `@FILE` as a value stands for the contents of a file.
//!
//! ```text
//!   text ──parse──▶ PolicyArg: checked except for values in files ──read──▶ text without @FILE ──▶ PolicyChoice
//!          touches nothing                                          opens the files
//! ```

use std::path::Path;

use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::policy::POLICIES;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, PolicyChoice, PolicyError};
use wideleaf_run::failure::Failure;
use wideleaf_run::suggest::did_you_mean;

/// What separates a key from the path of the file with its value.
const FROM_FILE: &str = "=@";

/// Largest file that may be a policy's value. The rules of `schemes` are some lines.
const VALUE_FILE_MAX: Bytes = mib(1);

/// Text that names a policy, checked except for the values that are in files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyArg(String);

impl PolicyArg {
    /// Checks the text without opening the files that it names.
    ///
    /// # Errors
    /// [`PolicyError`], with the valid alternatives.
    pub fn parse(text: &str) -> Result<PolicyArg, PolicyError> {
        let without_files = match text.split_once(':') {
            Some((name, settings)) => {
                let typed: Vec<&str> = settings.split(',').filter(|setting| !setting.contains(FROM_FILE)).collect();
                format!("{name}:{}", typed.join(","))
            }
            None => text.to_owned(),
        };
        PolicyChoice::parse(&without_files).map(|_| PolicyArg(text.to_owned()))
    }

    /// The text with the contents of each file in place of its `@FILE`: the form that a daemon takes. `option` is
    /// where the user wrote it.
    ///
    /// # Errors
    /// [`Failure::Usage`] if a file cannot be read, or its contents are no value of that parameter.
    pub fn read(&self, option: &str) -> Result<String, Failure> {
        self.read_and_check(option).map(|(text, _)| text)
    }

    /// The policy, with the contents of the files that the text names. `option` is where the user wrote it.
    ///
    /// # Errors
    /// As [`PolicyArg::read`].
    pub fn choice(&self, option: &str) -> Result<PolicyChoice, Failure> {
        self.read_and_check(option).map(|(_, choice)| choice)
    }

    fn read_and_check(&self, option: &str) -> Result<(String, PolicyChoice), Failure> {
        let read = with_files(&self.0).and_then(|text| match PolicyChoice::parse(&text) {
            Ok(choice) => Ok((text, choice)),
            Err(error) => Err(no_policy(&error)),
        });
        read.map_err(|why| Failure::Usage(format!("invalid value '{}' for '{option}': {why}", self.0)))
    }
}

/// Message for an invalid policy, with the name that was probably meant.
pub fn no_policy(error: &PolicyError) -> String {
    let hint = match error {
        PolicyError::UnknownPolicy { name } => did_you_mean(name, POLICIES.iter().map(|policy| policy.name)),
        PolicyError::UnknownKey { key, known, .. } => did_you_mean(key, known.iter().copied()),
        _ => String::new(),
    };
    format!("{error}{hint}")
}

/// Replaces each value `@FILE` in `name:key=value,…` by the contents of the file.
fn with_files(text: &str) -> Result<String, String> {
    let Some((name, settings)) = text.split_once(':') else { return Ok(text.to_owned()) };
    let settings = settings.split(',').map(|setting| match setting.split_once(FROM_FILE) {
        Some((key, path)) => Ok(format!("{key}={}", lines_of(path)?)),
        None => Ok(setting.to_owned()),
    });
    Ok(format!("{name}:{}", settings.collect::<Result<Vec<String>, String>>()?.join(",")))
}

/// The lines of a file joined by `;`, without comments (from `#` on) and empty lines.
fn lines_of(path: &str) -> Result<String, String> {
    let text = InputFile::open_stream(Path::new(path)).and_then(|file| file.read_text(VALUE_FILE_MAX));
    let text = text.map_err(|error| format!("cannot read {path}: {error}"))?;
    if text.contains(',') {
        return Err(format!("cannot use {path}: it has a comma, and no policy parameter may contain one"));
    }
    let line = |line: &str| line.split('#').next().unwrap_or("").trim().trim_end_matches(';').trim_end().to_owned();
    let lines: Vec<String> = text.lines().map(line).filter(|line| !line.is_empty()).collect();
    Ok(lines.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsing_checks_the_typed_values_and_opens_no_file() {
        let arg = PolicyArg::parse("schemes:quota_windows=8,rules=@/no/such/file").expect("no file is opened");
        let why = arg.choice("--policy").expect_err("there is no such file").to_string();
        let start = "invalid value 'schemes:quota_windows=8,rules=@/no/such/file' for '--policy': cannot read \
            /no/such/file: No such file";
        assert!(why.starts_with(start), "{why}");
        assert!(PolicyArg::parse("schemes:quota_windows=x,rules=@/no/such/file").is_err());
        assert!(PolicyArg::parse("shemes:rules=@/no/such/file").is_err());
    }

    #[test]
    fn a_file_stands_for_its_lines() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("rules");
        let text = format!("schemes:rules=@{}", file.display());
        std::fs::write(&file, "min max 10% max min max promote # used\n\n").expect("it is written");
        let arg = PolicyArg::parse(&text).expect("no file is opened");
        assert_eq!(arg.read("--policy").expect("they are rules"), "schemes:rules=min max 10% max min max promote");
        std::fs::write(&file, "min max\n").expect("it is written");
        let why = arg.read("policy=").expect_err("they are no rules").to_string();
        assert!(why.contains("for 'policy=': rules: "), "{why}");
    }
}
