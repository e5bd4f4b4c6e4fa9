//! `KEY=VALUE` of `wideleaf set`, read before anything is asked: what is wrong is said without a daemon.

use std::path::PathBuf;

use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Guarantee, GuaranteeError};
use wideleaf_policies::PolicyChoice;

use crate::args::with_files;

/// The policy of a VM that is only looked at.
pub const OFF: &str = "off";

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// A policy, as the daemon reads it.
    Policy(String),
    /// What is to be reached.
    Guarantee(Guarantee),
    /// Whether shared memory may be collapsed.
    CollapseShared(bool),
    /// A monitor to ask.
    Qmp(PathBuf),
}

impl Setting {
    /// Reads one.
    ///
    /// # Errors
    /// What there is instead.
    pub fn parse(text: &str) -> Result<Setting, String> {
        const KEYS: &str = "policy=, guarantee=, collapse-shared= or qmp=";
        let (key, value) = text.split_once('=').ok_or_else(|| format!("has no value: write {KEYS}"))?;
        match key {
            "policy" => parse_policy(value).map(Setting::Policy),
            "guarantee" => value.parse().map(Setting::Guarantee).map_err(|error: GuaranteeError| error.to_string()),
            "collapse-shared" => parse_yes_or_no(value).map(Setting::CollapseShared),
            "qmp" => parse_path(value).map(Setting::Qmp),
            _ => Err(format!("there is no {key}=: write {KEYS}")),
        }
    }

    /// Says it in the daemon's form; of two that say the same thing the later one counts.
    pub fn put_into(self, settings: &mut Settings) {
        match self {
            Setting::Policy(policy) => settings.policy = Some(policy),
            Setting::Guarantee(guarantee) => settings.guarantee = Some(guarantee.to_string()),
            Setting::CollapseShared(is_allowed) => settings.collapse_shared = Some(is_allowed),
            Setting::Qmp(path) => settings.qmp = Some(path),
        }
    }
}

/// A policy or `off`, with `@FILE` read, in the form that the daemon reads.
///
/// # Errors
/// What there is instead.
pub fn parse_policy(text: &str) -> Result<String, String> {
    if text == OFF {
        return Ok(text.to_owned());
    }
    let text = with_files(text)?;
    PolicyChoice::parse(&text).map_err(|error| format!("{error}; or {OFF}"))?;
    Ok(text)
}

/// An absolute path: the daemon's folder is another one.
///
/// # Errors
/// Where it is empty.
pub fn parse_path(text: &str) -> Result<PathBuf, String> {
    std::path::absolute(text).map_err(|error| format!("no path: {error}"))
}

fn parse_yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("write yes or no, not {text:?}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn the_last_of_two_counts_and_what_is_not_named_is_left_out() {
        let mut settings = Settings::default();
        for text in ["policy=off", "guarantee=99.5%", "policy=schemes:quota_windows=8"] {
            Setting::parse(text).unwrap().put_into(&mut settings);
        }
        let expected = Settings {
            policy: Some("schemes:quota_windows=8".into()),
            guarantee: Some("99.50%".into()),
            ..Settings::default()
        };
        assert_eq!(settings, expected);
    }

    #[test]
    fn a_path_is_whole_for_a_daemon_in_another_folder() {
        let Setting::Qmp(path) = Setting::parse("qmp=web.qmp").unwrap() else { panic!("another setting") };
        assert!(path.is_absolute() && path.ends_with("web.qmp"), "{}", path.display());
    }

    #[test]
    fn what_is_wrong_is_said_with_what_is_right() {
        for (text, right) in [
            ("policy", "write policy=, guarantee="),
            ("colour=red", "there is no colour=: write policy="),
            ("policy=nope", "never, prealloc"),
            ("policy=", "or off"),
            ("guarantee=95", "best-effort, or a share"),
            ("collapse-shared=maybe", "write yes or no"),
            ("qmp=", "no path"),
        ] {
            let error = Setting::parse(text).unwrap_err();
            assert!(error.contains(right), "{text}: {error}");
        }
    }
}
