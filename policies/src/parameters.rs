//! The settings of a policy, and how a user writes them: `name` or `name:key=value,key=value`.
//!
//! ```text
//!   "thp:max_ptes_none=64"  ──parse──▶  PolicyChoice { info: thp, parameters: [.., max_ptes_none = 64, ..] }
//!                                                 └──make──▶  Box<dyn Policy>
//! ```
//!
//! Everything is checked here, against the table of the policy itself, so making a policy cannot fail. Values are
//! whole numbers in the unit that the table names, or a text with its own rules.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::parameter_table::{Parameters, Unfit};
use crate::policy::{POLICIES, Policy, PolicyInfo, by_name};
use crate::walk::cost::WalkCost;

/// A policy and its checked parameters: the meaning of `--policy`.
#[derive(Clone)]
pub struct PolicyChoice {
    info: &'static PolicyInfo,
    parameters: Parameters,
}

impl PolicyChoice {
    /// Parses `name` or `name:key=value,key=value`.
    ///
    /// # Errors
    /// [`PolicyError`], with the valid alternatives.
    pub fn parse(text: &str) -> Result<PolicyChoice, PolicyError> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let info = by_name(name).ok_or_else(|| PolicyError::UnknownPolicy { name: name.into() })?;
        let mut choice = PolicyChoice::from(info);
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            let (key, value) =
                setting.split_once('=').ok_or_else(|| PolicyError::NoValue { setting: setting.into() })?;
            let (key, value) = (key.trim(), value.trim());
            choice.parameters.set(key, value).map_err(|unfit| PolicyError::of(unfit, info.name, key, value))?;
        }
        Ok(choice)
    }

    /// The policy's name.
    pub fn name(&self) -> &'static str {
        self.info.name
    }

    /// Makes a policy that has decided nothing yet, and uses the prior as the cost of a TLB miss.
    pub fn make(&self) -> Box<dyn Policy> {
        (self.info.make)(&self.parameters)
    }

    /// Makes a policy that uses this machine's cost of a TLB miss.
    pub fn make_for(&self, walk: &WalkCost) -> Box<dyn Policy> {
        let mut policy = self.make();
        policy.take_walk_cost(walk);
        policy
    }
}

/// The policy with its defaults.
impl From<&'static PolicyInfo> for PolicyChoice {
    fn from(info: &'static PolicyInfo) -> PolicyChoice {
        PolicyChoice { info, parameters: Parameters::defaults(info.parameters) }
    }
}

/// The name, and the parameters that differ from the defaults. Reports show this text, and [`PolicyChoice::parse`]
/// reads it again.
impl fmt::Display for PolicyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.info.name)?;
        for (number, (name, value)) in self.parameters.changed().enumerate() {
            write!(f, "{}{name}={value}", if number == 0 { ':' } else { ',' })?;
        }
        Ok(())
    }
}

impl fmt::Debug for PolicyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reason why a text names no policy. (Written out, not derived: this crate has no dependency.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyError {
    /// No policy has that name.
    UnknownPolicy {
        /// Name as written.
        name: String,
    },
    /// The policy has no such parameter.
    UnknownKey {
        /// Name of the policy.
        policy: &'static str,
        /// Key as written.
        key: String,
        /// Names of all its parameters.
        known: Vec<&'static str>,
    },
    /// A key without `=value`.
    NoValue {
        /// Setting as written.
        setting: String,
    },
    /// The value is not a whole number in the parameter's range.
    OutOfRange {
        /// Name of the parameter.
        parameter: &'static str,
        /// Value as written.
        value: String,
        /// Smallest allowed value.
        min: u64,
        /// Largest allowed value.
        max: u64,
        /// Unit of the number.
        unit: &'static str,
    },
    /// The policy cannot read the text.
    BadText {
        /// Name of the parameter.
        parameter: &'static str,
        /// Reason why the policy cannot parse it.
        why: String,
    },
}

impl PolicyError {
    /// What does not fit the table of a policy, with the key and the value as written.
    fn of(unfit: Unfit, policy: &'static str, key: &str, value: &str) -> PolicyError {
        match unfit {
            Unfit::UnknownKey { known } => PolicyError::UnknownKey { policy, key: key.into(), known },
            Unfit::OutOfRange { parameter, min, max, unit } => {
                PolicyError::OutOfRange { parameter, value: value.into(), min, max, unit }
            }
            Unfit::BadText { parameter, why } => PolicyError::BadText { parameter, why },
        }
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyError::UnknownPolicy { name } => {
                let names: Vec<&str> = POLICIES.iter().map(|policy| policy.name).collect();
                write!(f, "there is no policy {name:?}; choose one of {}", names.join(", "))
            }
            PolicyError::UnknownKey { policy, key, known } if known.is_empty() => {
                write!(f, "{policy} has no parameter {key:?}; it takes no parameters")
            }
            PolicyError::UnknownKey { policy, key, known } => {
                write!(f, "{policy} has no parameter {key:?}; choose one of {}", known.join(", "))
            }
            PolicyError::NoValue { setting } => write!(f, "{setting:?} has no value; write key=value"),
            PolicyError::OutOfRange { parameter, value, min, max, unit } => {
                write!(f, "{parameter}={value} is not a whole number from {min} to {max} ({unit})")
            }
            PolicyError::BadText { parameter, why } => write!(f, "{parameter}: {why}"),
        }
    }
}

impl core::error::Error for PolicyError {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString as _;

    fn error(text: &str) -> String {
        PolicyChoice::parse(text).expect_err("the text names no policy").to_string()
    }

    #[test]
    fn a_parsed_text_makes_and_shows_the_policy_it_names() {
        let choice = PolicyChoice::parse("thp:max_ptes_none=64,scan_sleep_ms=10000").expect("both are parameters");
        assert_eq!((choice.name(), choice.make().name()), ("thp", "thp"));
        assert_eq!(choice.to_string(), "thp:max_ptes_none=64"); // the other one is the default
        assert_eq!(PolicyChoice::parse("greedy").expect("in the list").to_string(), "greedy");
    }

    #[test]
    fn an_invalid_text_is_refused_with_the_valid_choices() {
        assert!(error("nope").starts_with("there is no policy \"nope\"; choose one of never, "));
        assert!(error("").starts_with("there is no policy \"\""));
        assert_eq!(error("never:pace=1"), "never has no parameter \"pace\"; it takes no parameters");
        assert!(error("thp:pace=1").starts_with("thp has no parameter \"pace\"; choose one of pages_to_scan, "));
        assert_eq!(error("thp:max_ptes_none"), "\"max_ptes_none\" has no value; write key=value");
        for wrong in ["512", "-1", "", "1.5", "many"] {
            let expected = alloc::format!("max_ptes_none={wrong} is not a whole number from 0 to 511 (base pages)");
            assert_eq!(error(&alloc::format!("thp:max_ptes_none={wrong}")), expected);
        }
    }

    #[test]
    fn every_default_can_be_written_and_makes_the_same_policy() {
        for info in POLICIES {
            for parameter in info.parameters {
                let written = alloc::format!("{}:{}={}", info.name, parameter.name, parameter.default_text());
                let choice = PolicyChoice::parse(&written).expect("a default is a value");
                assert_eq!(choice.to_string(), info.name, "{written}");
            }
            assert_eq!(PolicyChoice::from(info).make().name(), info.name);
        }
    }
}
