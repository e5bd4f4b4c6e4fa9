//! Result of a bench of a whole guest or machine: tables, targets and the machine, for people and for programs.
//!
//! ```text
//!   name: title
//!   ┌───────┬──────┐   tables
//!   └───────┴──────┘
//!     note             how to read them
//!     met:    target   bars, each with its value and limit
//!     machine
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::environment::Environment;
use crate::table::{Cell, Table};

/// Figures of one run of a bench.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Figures {
    /// Name of the bench.
    pub name: String,
    /// What was measured, in one line.
    pub title: String,
    /// Tables of the figures.
    pub tables: Vec<Table>,
    /// Targets and whether they are met.
    pub bars: Vec<Bar>,
    /// Sentences that say how to read the tables.
    pub notes: Vec<String>,
    /// Machine that was measured.
    pub environment: Environment,
}

/// A target of a bench, with the value that was measured.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Bar {
    /// What was measured, in words.
    pub what: String,
    /// Measured value with its unit; missing if it is not a finite number.
    pub value: Cell,
    /// Limit of the value, in its unit.
    pub limit: Limit,
    /// Whether the value is within the limit.
    pub is_met: bool,
}

/// Limit of a value; the ends are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Smallest value that is allowed.
    AtLeast(f64),
    /// Largest value that is allowed.
    AtMost(f64),
    /// Smallest and largest value that are allowed.
    Between(f64, f64),
}

impl Limit {
    fn allows(self, value: f64) -> bool {
        match self {
            Limit::AtLeast(least) => value >= least,
            Limit::AtMost(most) => value <= most,
            Limit::Between(least, most) => (least..=most).contains(&value),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Four decimals at most: a computed limit has digits that nothing measured.
        let short = |limit: f64| (limit * 1e4).round() / 1e4;
        match *self {
            Limit::AtLeast(least) => write!(f, "at least {}", short(least)),
            Limit::AtMost(most) => write!(f, "at most {}", short(most)),
            Limit::Between(least, most) => write!(f, "{} to {}", short(least), short(most)),
        }
    }
}

impl Figures {
    /// Figures with a title, and nothing else yet. The program that runs the bench adds name and machine.
    pub fn of(title: impl Into<String>) -> Figures {
        Figures { title: title.into(), ..Figures::default() }
    }

    /// Adds a table.
    #[must_use]
    pub fn table(mut self, table: Table) -> Figures {
        self.tables.push(table);
        self
    }

    /// Adds a sentence below the tables.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Figures {
        self.notes.push(note.into());
        self
    }

    /// Adds a target.
    #[must_use]
    pub fn bar(self, what: impl Into<String>, value: Cell, limit: Limit) -> Figures {
        self.bars([Bar::new(what, value, limit)])
    }

    /// Adds targets that were judged before.
    #[must_use]
    pub fn bars(mut self, bars: impl IntoIterator<Item = Bar>) -> Figures {
        self.bars.extend(bars);
        self
    }
}

impl Bar {
    /// A target, judged by its value. No limit allows a value that is missing.
    pub fn new(what: impl Into<String>, value: Cell, limit: Limit) -> Bar {
        let is_met = matches!(value, Cell::Number { value, .. } if limit.allows(value));
        Bar { what: what.into(), value, limit, is_met }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Bar { what, value, limit, is_met } = self;
        write!(f, "{} {what} {value}, {limit}", if *is_met { "met:   " } else { "MISSED:" })
    }
}

impl fmt::Display for Figures {
    /// All figures for a terminal, without a newline at the end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.title)?;
        for table in &self.tables {
            if !table.caption.is_empty() {
                write!(f, "\n{}", table.caption)?;
            }
            write!(f, "\n{}", table.text())?;
            for reason in table.reasons() {
                write!(f, "\n  -: {reason}")?;
            }
        }
        for note in &self.notes {
            write!(f, "\n  {note}")?;
        }
        for bar in &self.bars {
            write!(f, "\n  {bar}")?;
        }
        write!(f, "\n  {}", self.environment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Interval;

    fn figures() -> Figures {
        let mut table = Table::new(["arm"], ["rate", "range"]).captioned("Rates");
        let interval = Interval { median: 1.5, low: 1.25, high: 1.75 };
        table.row(["auto".into(), Cell::interval(interval, 2, "M/s"), Cell::range(1.0, 2.5, 1, "M/s")]);
        table.row(["never".into(), Cell::number(1.25, 2, "M/s"), Cell::missing("one round only")]);
        let figures = Figures::of("GUPS in turns")
            .table(table)
            .note("medians of 6 rounds")
            .bar("auto : never", Cell::number(1.2, 3, ""), Limit::AtLeast(1.0))
            .bar("memory", Cell::number(1.5, 1, "MiB"), Limit::AtMost(1.02));
        let environment = Environment { cpu: "a CPU".into(), cpus: 2, kernel: "6.1".into(), ..Environment::default() };
        Figures { name: "made_up".into(), environment, ..figures }
    }

    #[test]
    fn people_read_title_tables_notes_bars_and_the_machine() {
        let expected = "\
made_up: GUPS in turns
Rates
┌───────┬────────────────────────┬───────────────┐
│ arm   ┆                   rate ┆         range │
╞═══════╪════════════════════════╪═══════════════╡
│ auto  ┆ 1.50 (1.25 - 1.75) M/s ┆ 1.0 - 2.5 M/s │
│ never ┆               1.25 M/s ┆             - │
└───────┴────────────────────────┴───────────────┘
  -: one round only
  medians of 6 rounds
  met:    auto : never 1.200, at least 1
  MISSED: memory 1.5 MiB, at most 1.02
  2 x a CPU, kernel 6.1, load 0 at the start";
        assert_eq!(figures().to_string(), expected);
    }

    #[test]
    fn a_program_reads_back_the_same_figures() {
        let json = serde_json::to_value(figures()).expect("figures are JSON");
        let cell = serde_json::json!({"kind": "number", "value": 1.25, "unit": "M/s", "decimals": 2});
        assert_eq!(json["tables"][0]["rows"][1][1], cell);
        let bar = &json["bars"][1];
        let limit = serde_json::json!({"at_most": 1.02});
        assert_eq!((&bar["limit"], &bar["value"]["unit"]), (&limit, &serde_json::json!("MiB")));
        let back: Figures = serde_json::from_str(&json.to_string()).expect("JSON is figures");
        assert_eq!(back, figures());
    }

    #[test]
    fn a_value_at_its_limit_is_within_and_no_number_is_not() {
        let is_met = |value, limit| Bar::new("", Cell::number(value, 1, ""), limit).is_met;
        let limits = [Limit::AtLeast(2.0), Limit::AtMost(2.0), Limit::Between(1.0, 2.0)];
        assert_eq!(limits.map(|limit| is_met(2.0, limit)), [true; 3]);
        assert_eq!(limits.map(|limit| is_met(f64::NAN, limit)), [false; 3]);
        assert_eq!(limits.map(|limit| is_met(3.0, limit)), [true, false, false]);
        assert!(!is_met(f64::INFINITY, Limit::AtLeast(2.0)));
        assert_eq!(Limit::Between(1.05 - 0.08, 1.2).to_string(), "0.97 to 1.2");
    }
}
