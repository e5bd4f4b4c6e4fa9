//! `KEY=VALUE` of `wideleaf set`, checked before any request: mistakes are reported even without a daemon.

use std::path::{Path, PathBuf};

use wideleaf_control::protocol::{SettingName, Settings};
use wideleaf_control::view::{Guarantee, GuaranteeError};
use wideleaf_memory::manager::{OutOfReach, OutOfReachError};
use wideleaf_run::failure::Failure;
use wideleaf_run::policy_switch::OFF;

use crate::policy_arg::PolicyArg;

/// One setting of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Policy, or `off`.
    Policy(PolicyOrOff),
    /// Share of memory to reach.
    Guarantee(Guarantee),
    /// Largest part of the time for which memory may be out of the guest's reach.
    OutOfReach(OutOfReach),
    /// Whether shared memory may be collapsed.
    CollapseShared(bool),
    /// QEMU monitor to ask.
    Qmp(PathBuf),
    /// Empty value (`KEY=`): removes the setting.
    Unset(SettingName),
}

impl Setting {
    /// Parses one setting.
    ///
    /// # Errors
    /// Message with the valid forms.
    pub fn parse(text: &str) -> Result<Setting, String> {
        const KEYS: &str = "policy=, guarantee=, out-of-reach=, collapse-shared= or qmp=";
        let (key, value) = text.split_once('=').ok_or_else(|| format!("it has no value: write {KEYS}"))?;
        let name = match key {
            "policy" => SettingName::Policy,
            "guarantee" => SettingName::Guarantee,
            "out-of-reach" => SettingName::OutOfReach,
            "collapse-shared" => SettingName::CollapseShared,
            "qmp" => SettingName::Qmp,
            _ => return Err(format!("unknown setting {key}=: write {KEYS}")),
        };
        match name {
            _ if value.is_empty() => Ok(Setting::Unset(name)),
            SettingName::Policy => PolicyOrOff::parse(value).map(Setting::Policy),
            SettingName::Guarantee => {
                value.parse().map(Setting::Guarantee).map_err(|error: GuaranteeError| error.to_string())
            }
            SettingName::OutOfReach => {
                value.parse().map(Setting::OutOfReach).map_err(|error: OutOfReachError| error.to_string())
            }
            SettingName::CollapseShared => parse_yes_or_no(value).map(Setting::CollapseShared),
            SettingName::Qmp => Ok(parse_path(value).map(Setting::Qmp)?),
        }
    }

    /// Writes it in the daemon's form; of two values for one setting, the later one counts.
    ///
    /// # Errors
    /// [`Failure::Usage`] if a file that the value names cannot be used, or a path cannot be made absolute.
    pub fn put_into(self, settings: &mut Settings) -> Result<(), Failure> {
        settings.unset.retain(|name| *name != self.name());
        match self {
            Setting::Policy(policy) => settings.policy = Some(policy.read("policy=")?),
            Setting::Guarantee(guarantee) => settings.guarantee = Some(guarantee.to_string()),
            Setting::OutOfReach(part) => settings.out_of_reach = Some(part.to_string()),
            Setting::CollapseShared(is_allowed) => settings.collapse_shared = Some(is_allowed),
            Setting::Qmp(path) => settings.qmp = Some(absolute(&path, "qmp=")?),
            Setting::Unset(name) => {
                match name {
                    SettingName::Policy => settings.policy = None,
                    SettingName::Guarantee => settings.guarantee = None,
                    SettingName::OutOfReach => settings.out_of_reach = None,
                    SettingName::CollapseShared => settings.collapse_shared = None,
                    SettingName::Qmp => settings.qmp = None,
                }
                settings.unset.push(name);
            }
        }
        Ok(())
    }

    const fn name(&self) -> SettingName {
        match self {
            Setting::Policy(_) => SettingName::Policy,
            Setting::Guarantee(_) => SettingName::Guarantee,
            Setting::OutOfReach(_) => SettingName::OutOfReach,
            Setting::CollapseShared(_) => SettingName::CollapseShared,
            Setting::Qmp(_) => SettingName::Qmp,
            Setting::Unset(name) => *name,
        }
    }
}

/// A policy, or [`OFF`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyOrOff {
    /// The guest is only observed.
    Off,
    /// The guest has this policy.
    Use(PolicyArg),
}

impl PolicyOrOff {
    /// Parses a policy, or `off`.
    ///
    /// # Errors
    /// Message with the valid forms.
    pub fn parse(text: &str) -> Result<PolicyOrOff, String> {
        match text {
            OFF => Ok(PolicyOrOff::Off),
            text => PolicyArg::parse(text).map(PolicyOrOff::Use).map_err(|error| format!("{error}; or {OFF}")),
        }
    }

    /// The daemon's form, with the contents of the files that the text names. `option` is where the user wrote it.
    ///
    /// # Errors
    /// [`Failure::Usage`] if a file cannot be read, or its contents are no value of that parameter.
    pub fn read(&self, option: &str) -> Result<String, Failure> {
        match self {
            PolicyOrOff::Off => Ok(OFF.to_owned()),
            PolicyOrOff::Use(policy) => policy.read(option),
        }
    }
}

/// A path that is not empty.
///
/// # Errors
/// If the path is empty.
pub fn parse_path(text: &str) -> Result<PathBuf, &'static str> {
    if text.is_empty() { Err("not a path: it is empty") } else { Ok(PathBuf::from(text)) }
}

/// The path from the root, because the daemon's folder is another one. `option` is where the user wrote it.
///
/// # Errors
/// [`Failure::Usage`] if this process has no folder to begin at.
pub fn absolute(path: &Path, option: &str) -> Result<PathBuf, Failure> {
    std::path::absolute(path)
        .map_err(|error| Failure::Usage(format!("invalid value '{}' for '{option}': {error}", path.display())))
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
    fn the_last_of_two_counts_and_settings_that_are_not_named_are_left_out() {
        let mut settings = Settings::default();
        for text in ["policy=off", "guarantee=99.5%", "out-of-reach=5%", "policy=schemes:quota_windows=8"] {
            Setting::parse(text).unwrap().put_into(&mut settings).unwrap();
        }
        let expected = Settings {
            policy: Some("schemes:quota_windows=8".into()),
            guarantee: Some("99.50%".into()),
            out_of_reach: Some("5%".into()),
            ..Settings::default()
        };
        assert_eq!(settings, expected);
    }

    #[test]
    fn a_key_with_an_empty_value_is_unset_unless_it_is_set_later() {
        let said = |texts: &[&str]| {
            let mut settings = Settings::default();
            texts.iter().for_each(|text| Setting::parse(text).unwrap().put_into(&mut settings).unwrap());
            settings
        };
        let unset = said(&["policy=off", "policy=", "guarantee=", "out-of-reach=", "collapse-shared=", "qmp=", "qmp="]);
        let all = vec![
            SettingName::Policy,
            SettingName::Guarantee,
            SettingName::OutOfReach,
            SettingName::CollapseShared,
            SettingName::Qmp,
        ];
        assert_eq!(unset, Settings { unset: all, ..Settings::default() });
        let set = said(&["policy=", "policy=off"]);
        assert_eq!(set, Settings { policy: Some("off".into()), ..Settings::default() });
    }

    #[test]
    fn a_path_is_absolute_for_a_daemon_in_another_folder() {
        let mut settings = Settings::default();
        Setting::parse("qmp=web.qmp").unwrap().put_into(&mut settings).unwrap();
        let path = settings.qmp.unwrap();
        assert!(path.is_absolute() && path.ends_with("web.qmp"), "{}", path.display());
    }

    #[test]
    fn a_mistake_is_reported_with_the_valid_forms() {
        for (text, right) in [
            ("policy", "write policy=, guarantee="),
            ("colour=red", "unknown setting colour=: write policy="),
            ("policy=nope", "never, prealloc"),
            ("policy=nope:rules=@file", "never, prealloc"),
            ("guarantee=95", "or a share of memory"),
            ("out-of-reach=0%", "write a number from 1 to 100 and a %"),
            ("out-of-reach=30", "write a number from 1 to 100 and a %"),
            ("collapse-shared=maybe", "write yes or no"),
        ] {
            let error = Setting::parse(text).unwrap_err();
            assert!(error.contains(right), "{text}: {error}");
        }
    }
}
