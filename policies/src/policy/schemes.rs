//! Rules over size, access rate and age, like DAMON's schemes (Linux, mm/damon/design: DAMOS). The default text is
//! `ethp`: accessed regions become huge, and regions idle for 7 s are demoted (damo's scheme file of that name).
//!
//! ```text
//!   size      rate     age       action
//!   min max   5% max   min max   promote ;        from 5 % of samples on, any size, any age
//!   2M  max   0% 0%    7s  max   demote           2 MiB and larger, never accessed, for 7 s
//! ```
//!
//! A *region* is a run of neighbouring windows with the same access rate, in tenths (0 is its own class), and about
//! the same age, the time for which that class has held: windows are sampled in turns, so neighbours change their
//! class a turn apart. Its age is that of its youngest window. The first rule that fits a region is applied to its
//! windows. The manager's budget takes the place of DAMON's quota on time. Windows without samples belong to no
//! region. No window is demoted where that would hold its whole memslot at 4 KiB.

use core::ops::Range;
use core::time::Duration;

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::{Needs, Policy};
use crate::action::{Action, Plan};
use crate::budget::Budget;
use crate::candidates::{is_demotable, is_promotable};
use crate::demotions::Demotions;
use crate::expectations::Expectations;
use crate::outcome::Outcome;
use crate::parameter_table::{ParameterInfo, ParameterKind, Parameters};
use crate::snapshot::{AccessHistory, Snapshot, VmSnapshot};
use crate::units::{Bytes, Moment, PageSize, PerTenThousand};
use crate::watermark::Watermark;
use crate::window_memory::WindowMemory;

/// The published thresholds: 5 % and 0 % for 7 s.
pub const ETHP: &str = "min max 5% max min max promote; 2M max 0% 0% 7s max demote";

/// Largest number of rules; more are a mistake, because each is compared with each region.
const RULES_MAX: usize = 32;

/// Parameters that a user may set.
pub const PARAMETERS: &[ParameterInfo] = &[
    ParameterInfo {
        name: "rules",
        kind: ParameterKind::Text { default: ETHP, check: |text| parse_rules(text).map(|_| ()) },
        unit: "rules with ; between",
        meaning: "size from, to; rate from, to; age from, to; promote, demote or release (DAMOS' ethp)",
    },
    ParameterInfo::number(
        "quota_windows",
        4096,
        (1, 1 << 32),
        "windows an interval",
        "most windows that are acted on (DAMOS' size quota)",
    ),
    ParameterInfo::number(
        "interval_ms",
        100,
        (1, super::thp::SLEEP_MS_MAX),
        "ms",
        "time between two applications (DAMON aggregates over 100)",
    ),
    ParameterInfo::number(
        "on_from",
        0,
        (0, 100),
        "% of host memory",
        "memory use from which on rules are applied (0: always)",
    ),
    ParameterInfo::number("off_below", 0, (0, 100), "% of host memory", "memory use below which rules are not applied"),
];

/// One rule of a scheme.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    size: Between<Bytes>,
    rate: Between<PerTenThousand>,
    age: Between<Duration>,
    effect: Effect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    Promote,
    Demote,
    Release,
}

/// A closed interval; both ends belong to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Between<T> {
    least: T,
    most: T,
}

impl<T: PartialOrd + Copy> Between<T> {
    fn contains(self, value: T) -> bool {
        self.least <= value && value <= self.most
    }

    /// Parses two words; `min` and `max` stand for the ends of `all`.
    fn parse(words: &[&str], all: Between<T>, read: impl Fn(&str) -> Result<T, String>) -> Result<Between<T>, String> {
        let end = |word: &str| match word {
            "min" => Ok(all.least),
            "max" => Ok(all.most),
            word => read(word),
        };
        let (least, most) = (end(words[0])?, end(words[1])?);
        if least > most {
            return Err(format!("{} is larger than {}; write the smaller value first", words[0], words[1]));
        }
        Ok(Between { least, most })
    }
}

impl Rule {
    fn parse(text: &str) -> Result<Rule, String> {
        const FORM: &str = "SIZE SIZE RATE RATE AGE AGE ACTION, like: 2M max 0% 0% 7s max demote";
        let words: Vec<&str> = text.split_whitespace().collect();
        let [sizes @ .., effect] = words.as_slice() else {
            return Err(format!("a rule is empty; write {FORM}"));
        };
        if sizes.len() != 6 {
            return Err(format!("{} words in {text:?}; write {FORM}", words.len()));
        }
        let all_sizes = Between { least: Bytes::ZERO, most: Bytes::new(u64::MAX) };
        let all_rates = Between { least: PerTenThousand::new(0), most: PerTenThousand::ALL };
        let all_ages = Between { least: Duration::ZERO, most: Duration::MAX };
        Ok(Rule {
            size: Between::parse(&sizes[0..2], all_sizes, |word| {
                Bytes::parse(word).map_err(|error| format!("{word:?} is {error}"))
            })?,
            rate: Between::parse(&sizes[2..4], all_rates, parse_rate)?,
            age: Between::parse(&sizes[4..6], all_ages, parse_age)?,
            effect: match *effect {
                "promote" => Effect::Promote,
                "demote" => Effect::Demote,
                "release" => Effect::Release,
                other => return Err(format!("{other:?} is not an action; choose one of promote, demote, release")),
            },
        })
    }

    fn fits(&self, region: &Region) -> bool {
        self.size.contains(region.size()) && self.rate.contains(region.rate) && self.age.contains(region.age)
    }
}

fn parse_rules(text: &str) -> Result<Vec<Rule>, String> {
    let rules: Vec<Rule> = text.split(';').map(Rule::parse).collect::<Result<_, String>>()?;
    if rules.len() > RULES_MAX {
        return Err(format!("{} rules are too many; write at most {RULES_MAX}", rules.len()));
    }
    Ok(rules)
}

fn parse_rate(word: &str) -> Result<PerTenThousand, String> {
    let percent = word.strip_suffix('%').and_then(|number| number.parse().ok()).filter(|percent| *percent <= 100);
    percent
        .map(|percent: u64| PerTenThousand::of(percent, 100))
        .ok_or_else(|| format!("{word:?} is not a rate from 0% to 100%; write one like 5%"))
}

fn parse_age(word: &str) -> Result<Duration, String> {
    let milliseconds = match (word.strip_suffix("ms"), word.strip_suffix('s')) {
        (Some(number), _) => number.parse().ok(),
        (None, Some(number)) => number.parse().ok().and_then(|seconds: u64| seconds.checked_mul(1000)),
        (None, None) => None,
    };
    milliseconds.map(Duration::from_millis).ok_or_else(|| format!("{word:?} is not an age like 100ms or 7s"))
}

/// Access class of a window, and the moment since which it holds.
#[derive(Clone, Copy, Debug, Default)]
struct Pattern {
    /// Tenths of the samples with an access, rounded up; `None` before the first sample.
    class: Option<u8>,
    since: Moment,
}

fn class_of(access: AccessHistory) -> Option<u8> {
    access.rate().map(|rate| rate.get().div_ceil(1_000) as u8)
}

/// Neighbouring windows with about the same pattern.
#[derive(Clone, Debug)]
struct Region {
    rows: Range<usize>,
    rate: PerTenThousand,
    age: Duration,
}

impl Region {
    fn size(&self) -> Bytes {
        PageSize::Huge2M.bytes() * self.rows.len() as u64
    }
}

/// The region that begins at `first`: windows without a gap, of one class, with ages that differ from that of the
/// first by at most a tenth of it or `interval`, whichever is longer. `None` if the window has no samples.
fn region_at(vm: &VmSnapshot, patterns: &[Pattern], first: usize, interval: Duration, now: Moment) -> Option<Region> {
    let rate = vm.access[first].rate()?;
    let age = |row: usize| now.since(patterns[row].since);
    let tolerated = interval.max(age(first) / 10);
    let belongs = |row: &usize| {
        let is_next = vm.windows[*row].get() == vm.windows[first].get() + (*row - first) as u64;
        let is_alike = patterns[*row].class == patterns[first].class && age(*row).abs_diff(age(first)) <= tolerated;
        is_next && is_alike
    };
    let end = (first + 1..vm.len()).find(|row| !belongs(row)).unwrap_or(vm.len());
    let youngest = (first..end).map(age).min().unwrap_or_default();
    Some(Region { rows: first..end, rate, age: youngest })
}

/// Applies rules to regions.
#[derive(Clone, Debug)]
pub struct Schemes {
    rules: Vec<Rule>,
    quota: u64,
    interval: Duration,
    active: Watermark,
    apply_at: Moment,
    patterns: WindowMemory<Pattern>,
    expectations: Expectations,
    demotions: Demotions,
}

impl Schemes {
    /// A policy that has seen nothing yet.
    pub fn new(parameters: &Parameters) -> Schemes {
        Schemes {
            rules: parse_rules(parameters.text("rules")).expect("a parameter's text was checked when it was set"),
            quota: parameters.number("quota_windows"),
            interval: Duration::from_millis(parameters.number("interval_ms")),
            active: Watermark::of_percent(parameters.number("on_from"), parameters.number("off_below")),
            apply_at: Moment::START,
            patterns: WindowMemory::default(),
            expectations: Expectations::default(),
            demotions: Demotions::default(),
        }
    }

    /// Notes the windows that have changed their class.
    fn observe(&mut self, snapshot: &Snapshot, now: Moment) {
        self.patterns.fit(snapshot);
        for (index, vm) in snapshot.vms.iter().enumerate() {
            for (pattern, access) in self.patterns.of_vm(index).iter_mut().zip(&vm.access) {
                let class = class_of(*access);
                if pattern.class != class {
                    *pattern = Pattern { class, since: now };
                }
            }
        }
    }
}

/// The action that a rule requests for one window, if it is possible there.
fn action(effect: Effect, vm: &VmSnapshot, row: usize, now: Moment) -> Option<Action> {
    let (id, window) = (vm.vm, vm.windows[row]);
    let (action, is_possible) = match effect {
        Effect::Promote => (Action::Promote { vm: id, window, to: PageSize::Huge2M }, is_promotable(vm, row, now)),
        Effect::Demote => (Action::Demote { vm: id, window, to: PageSize::Base4K }, is_demotable(vm, row, now)),
        Effect::Release => {
            let has_zeroes = vm.zero[row].is_some_and(|zero| zero > 0);
            (Action::Release { vm: id, window }, has_zeroes && is_demotable(vm, row, now))
        }
    };
    is_possible.then_some(action)
}

impl Policy for Schemes {
    fn name(&self) -> &'static str {
        "schemes"
    }

    fn needs(&self) -> Needs {
        Needs { access: true, zero: true, host_memory: true, ..Needs::default() }
    }

    fn plan(&mut self, snapshot: &Snapshot, now: Moment, budget: &mut Budget, plan: &mut Plan) {
        self.observe(snapshot, now);
        self.demotions.observe(snapshot);
        if self.demotions.take_back(snapshot, now, &self.expectations, budget, plan).is_break() {
            return;
        }
        // A host without data counts as empty: rules without watermarks are applied there, others are not.
        let host = snapshot.host.unwrap_or_default();
        if !self.active.update(Some(host)) || now < self.apply_at {
            return;
        }
        self.apply_at = now + self.interval;
        let mut quota = self.quota;
        for (index, vm) in snapshot.vms.iter().enumerate() {
            let patterns = self.patterns.of_vm(index);
            let mut first = 0;
            while first < vm.len() {
                let Some(region) = region_at(vm, patterns, first, self.interval, now) else {
                    first += 1;
                    continue;
                };
                first = region.rows.end;
                let Some(rule) = self.rules.iter().find(|rule| rule.fits(&region)) else {
                    continue;
                };
                for row in region.rows {
                    let is_demotion = rule.effect == Effect::Demote;
                    let is_taken_back = vm.is_held[row] && self.demotions.held(vm) == Some(row);
                    let may_act = !is_taken_back && (!is_demotion || self.demotions.may_demote(vm));
                    let Some(action) = action(rule.effect, vm, row, now).filter(|_| may_act) else {
                        continue;
                    };
                    if quota == 0 || self.expectations.request(action, vm.is_held[row], budget, plan).is_break() {
                        return;
                    }
                    if is_demotion {
                        self.demotions.planned(vm, row);
                    }
                    quota -= 1;
                }
            }
        }
    }

    fn learn(&mut self, outcome: &Outcome) {
        self.expectations.learn(outcome);
        self.demotions.learn(outcome);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ethp_has_the_published_thresholds() {
        let rules = parse_rules(ETHP).expect("it is the default");
        let (all, never) = (PerTenThousand::ALL, PerTenThousand::new(0));
        assert_eq!(rules[0].rate, Between { least: PerTenThousand::new(500), most: all });
        assert_eq!((rules[0].effect, rules[1].effect), (Effect::Promote, Effect::Demote));
        assert_eq!(rules[1].rate, Between { least: never, most: never });
        assert_eq!((rules[1].age.least, rules[1].size.least), (Duration::from_secs(7), PageSize::Huge2M.bytes()));
    }

    #[test]
    fn an_invalid_rule_is_refused_with_the_reason() {
        let why = |text| parse_rules(text).expect_err("the rule is invalid");
        assert!(why("").starts_with("a rule is empty"));
        assert!(why("min max 5% max promote").starts_with("5 words in"));
        assert!(why("min max 5 max min max promote").contains("\"5\" is not a rate"));
        assert!(why("min max 101% max min max promote").contains("not a rate from 0% to 100%"));
        assert!(why("min max 5% max 7 max promote").contains("\"7\" is not an age"));
        assert!(why("4M 2M 5% max min max promote").contains("4M is larger than 2M"));
        assert!(why("1X max 5% max min max promote").contains("\"1X\" is not a size"));
        assert!(why("min max 5% max min max hugepage").contains("promote, demote, release"));
        assert!(why(&["min max min max min max demote"; 33].join(";")).contains("at most 32"));
    }
}
