//! `KEY=VALUE` of `wideleaf set`, read before anything is asked: what is wrong is said without a daemon.

use std::path::PathBuf;

use wideleaf_control::protocol::{SettingName, Settings};
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
    /// `KEY=` with nothing behind it: what was said of it no longer holds.
    Unset(SettingName),
}

impl Setting {
    /// Reads one.
    ///
    /// # Errors
    /// What there is instead.
    pub fn parse(text: &str) -> Result<Setting, String> {
        const KEYS: &str = "policy=, guarantee=, collapse-shared= or qmp=";
        let (key, value) = text.split_once('=').ok_or_else(|| format!("has no value: write {KEYS}"))?;
        let name = match key {
            "policy" => SettingName::Policy,
            "guarantee" => SettingName::Guarantee,
            "collapse-shared" => SettingName::CollapseShared,
            "qmp" => SettingName::Qmp,
            _ => return Err(format!("there is no {key}=: write {KEYS}")),
        };
        match name {
            _ if value.is_empty() => Ok(Setting::Unset(name)),
            SettingName::Policy => parse_policy(value).map(Setting::Policy),
            SettingName::Guarantee => {
                value.parse().map(Setting::Guarantee).map_err(|error: GuaranteeError| error.to_string())
            }
            SettingName::CollapseShared => parse_yes_or_no(value).map(Setting::CollapseShared),
            SettingName::Qmp => parse_path(value).map(Setting::Qmp),
        }
    }

    /// Says it in the daemon's form; of two that say the same thing the later one counts.
    pub fn put_into(self, settings: &mut Settings) {
        settings.unset.retain(|name| *name != self.name());
        match self {
            Setting::Policy(policy) => settings.policy = Some(policy),
            Setting::Guarantee(guarantee) => settings.guarantee = Some(guarantee.to_string()),
            Setting::CollapseShared(is_allowed) => settings.collapse_shared = Some(is_allowed),
            Setting::Qmp(path) => settings.qmp = Some(path),
            Setting::Unset(name) => {
                match name {
                    SettingName::Policy => settings.policy = None,
                    SettingName::Guarantee => settings.guarantee = None,
                    SettingName::CollapseShared => settings.collapse_shared = None,
                    SettingName::Qmp => settings.qmp = None,
                }
                settings.unset.push(name);
            }
        }
    }

    const fn name(&self) -> SettingName {
        match self {
            Setting::Policy(_) => SettingName::Policy,
            Setting::Guarantee(_) => SettingName::Guarantee,
            Setting::CollapseShared(_) => SettingName::CollapseShared,
            Setting::Qmp(_) => SettingName::Qmp,
            Setting::Unset(name) => *name,
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
    fn a_key_with_nothing_behind_it_is_unset_unless_it_is_set_later() {
        let said = |texts: &[&str]| {
            let mut settings = Settings::default();
            texts.iter().for_each(|text| Setting::parse(text).unwrap().put_into(&mut settings));
            settings
        };
        let all = [SettingName::Policy, SettingName::Guarantee, SettingName::CollapseShared, SettingName::Qmp];
        let unset = said(&["policy=off", "policy=", "guarantee=", "collapse-shared=", "qmp=", "qmp="]);
        assert_eq!(unset, Settings { unset: all.to_vec(), ..Settings::default() });
        let set = said(&["policy=", "policy=off"]);
        assert_eq!(set, Settings { policy: Some("off".into()), ..Settings::default() });
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
            ("guarantee=95", "best-effort, or a share"),
            ("collapse-shared=maybe", "write yes or no"),
        ] {
            let error = Setting::parse(text).unwrap_err();
            assert!(error.contains(right), "{text}: {error}");
        }
    }
}
