//! The parameters of a policy: its table, and a value for each entry. `parameters.rs` reads what users write.

use alloc::borrow::Cow;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

/// One parameter of a policy. The list, the parser and the documentation all use this entry.
#[derive(Debug)]
pub struct ParameterInfo {
    /// Key of the parameter.
    pub name: &'static str,
    /// Kind of value, and the default.
    pub kind: ParameterKind,
    /// Unit of a number.
    pub unit: &'static str,
    /// Effect of the parameter in one line, with the source of the default.
    pub meaning: &'static str,
}

/// Kinds of value that a parameter may have.
#[derive(Debug)]
pub enum ParameterKind {
    /// A whole number between two others, both allowed.
    Number {
        /// Value if the user sets none.
        default: u64,
        /// Smallest allowed value.
        min: u64,
        /// Largest allowed value.
        max: u64,
    },
    /// A text that the policy parses itself.
    Text {
        /// Value if the user sets none.
        default: &'static str,
        /// Check whether the policy can parse it; the error says why not.
        check: fn(&str) -> Result<(), String>,
    },
}

impl ParameterInfo {
    /// A number between `min` and `max`.
    pub const fn number(
        name: &'static str,
        default: u64,
        (min, max): (u64, u64),
        unit: &'static str,
        meaning: &'static str,
    ) -> ParameterInfo {
        assert!(min <= default && default <= max, "a default is a value");
        ParameterInfo { name, kind: ParameterKind::Number { default, min, max }, unit, meaning }
    }

    /// The default, as a user would write it.
    pub fn default_text(&self) -> String {
        self.default_value().to_string()
    }

    fn default_value(&self) -> Value {
        match self.kind {
            ParameterKind::Number { default, .. } => Value::Number(default),
            ParameterKind::Text { default, .. } => Value::Text(Cow::Borrowed(default)),
        }
    }

    fn parse(&self, text: &str) -> Result<Value, Unfit> {
        match self.kind {
            ParameterKind::Number { min, max, .. } => {
                let in_range = |number: &u64| (min..=max).contains(number);
                let number = text.parse().ok().filter(in_range).map(Value::Number);
                number.ok_or(Unfit::OutOfRange { parameter: self.name, min, max, unit: self.unit })
            }
            ParameterKind::Text { check, .. } => match check(text) {
                Ok(()) => Ok(Value::Text(Cow::Owned(text.into()))),
                Err(why) => Err(Unfit::BadText { parameter: self.name, why }),
            },
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Number(u64),
    Text(Cow<'static, str>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Number(number) => number.fmt(f),
            Value::Text(text) => text.fmt(f),
        }
    }
}

/// A value for each parameter of one policy.
#[derive(Clone, Debug)]
pub struct Parameters {
    values: Vec<(&'static ParameterInfo, Value)>,
}

impl Parameters {
    /// The defaults of a table.
    pub fn defaults(table: &'static [ParameterInfo]) -> Parameters {
        Parameters { values: table.iter().map(|info| (info, info.default_value())).collect() }
    }

    /// The value of a number.
    ///
    /// # Panics
    /// If the policy's table has no number of that name.
    pub fn number(&self, name: &str) -> u64 {
        match self.value(name) {
            Value::Number(number) => *number,
            Value::Text(_) => panic!("{name} is a text"),
        }
    }

    /// The value of a text.
    ///
    /// # Panics
    /// If the policy's table has no text of that name.
    pub fn text(&self, name: &str) -> &str {
        match self.value(name) {
            Value::Text(text) => text,
            Value::Number(_) => panic!("{name} is a number"),
        }
    }

    fn value(&self, name: &str) -> &Value {
        let found = self.values.iter().find(|(info, _)| info.name == name);
        &found.unwrap_or_else(|| panic!("a policy asks for {name}, which is not in its table")).1
    }

    /// Sets the value of a key as a user wrote it.
    pub(crate) fn set(&mut self, key: &str, text: &str) -> Result<(), Unfit> {
        let Some((info, value)) = self.values.iter_mut().find(|(info, _)| info.name == key) else {
            return Err(Unfit::UnknownKey { known: self.values.iter().map(|(info, _)| info.name).collect() });
        };
        *value = info.parse(text)?;
        Ok(())
    }

    /// Names and values of those that differ from the defaults.
    pub(crate) fn changed(&self) -> impl Iterator<Item = (&'static str, &dyn fmt::Display)> {
        let changed = self.values.iter().filter(|(info, value)| *value != info.default_value());
        changed.map(|(info, value)| (info.name, value as &dyn fmt::Display))
    }
}

/// Reason why a key or its value does not fit the table.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// The table has only these keys.
    UnknownKey { known: Vec<&'static str> },
    /// The value is not a whole number in this range.
    OutOfRange { parameter: &'static str, min: u64, max: u64, unit: &'static str },
    /// The policy cannot read the text.
    BadText { parameter: &'static str, why: String },
}
