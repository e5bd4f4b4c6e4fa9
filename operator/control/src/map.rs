//! Map of a VM's windows (2 MiB of guest-physical memory each): columns of letters, a range for each stretch of
//! addresses.
//!
//! ```text
//!   windows       0  1  2  3  4  5  6  7
//!   backing      "2  2  4  4  4  4  .  ."      a letter for each window
//!   state        "l2    h3       r  e2"        a letter, and for how many windows if for more than one
//!   why          "-2    A3       B  C2"        A, B, C: reasons of the map
//! ```
//!
//! The first three columns have a letter for each window. The others came later and are shortened, because a VM has
//! millions of windows and neighbours mostly have the same letter: [`push`] writes them and [`letters`] reads them. An
//! empty column is unknown for all windows. `?` is unknown everywhere, and [`WindowMap::notes`] has the cause.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Letter for an unknown figure.
pub const UNKNOWN: char = '?';

/// Letter of [`WindowRange::why`] and [`WindowRange::until`] for a window without reason, without a wait.
pub const NONE: char = '-';

/// All windows of a VM, in the order of guest-physical addresses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WindowMap {
    /// Name of the VM.
    pub name: String,
    /// Ranges of its windows.
    pub ranges: Vec<WindowRange>,
    /// Reasons that [`WindowRange::why`] refers to: `A` is the first of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<MapReason>,
    /// Numbers of the NUMA nodes that [`WindowRange::node`] refers to: `a` is the first. Empty on a host with one node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<u16>,
    /// Time of the map in seconds since the epoch: the manager's latest tick, or the survey; `None` where that is
    /// unknown. Rows may be as old as [`WindowMap::scan_age_s`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_s: Option<f64>,
    /// Time since the latest scan of all windows, in seconds: the largest age of a row. Windows on which the manager
    /// acted were looked at since. `None` before the first scan, and from earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_age_s: Option<f64>,
    /// Columns that are unknown or inferred, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl WindowMap {
    /// Number of windows.
    pub fn windows(&self) -> usize {
        self.ranges.iter().map(WindowRange::windows).sum()
    }

    /// Length of all columns, in bytes: nearly all of a long map's message.
    pub fn bytes(&self) -> usize {
        self.ranges.iter().map(WindowRange::bytes).sum()
    }
}

/// A reason why windows are not huge, as a letter of a map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapReason {
    /// For programs, as in [`crate::view::Reason`].
    pub name: String,
    /// For people: its meaning, and what would change it.
    pub text: String,
}

/// Adjacent windows in one range.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowRange {
    /// First guest-physical address.
    pub gpa: u64,
    /// A character a window: `.` nothing, `4` base pages, `2` a huge page, `1` part of a giant page.
    pub backing: String,
    /// A character a window: the size that KVM should map, `?` where unknown. It is the smallest of the host's page,
    /// what a hold allows, what the VM's totals allow, and under shadow paging the guest's own page.
    pub second_level: String,
    /// A character a window: `0` (cold) to `9` (hot), `?` without a sample.
    pub heat: String,
    /// Age of `heat`, shortened: the letter of [`letter_of_time`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub heat_age: String,
    /// Page size in the guest's own tables, shortened: `b` base, `h` huge, `g` giant, `m` mixed, `u` not mapped.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub guest: String,
    /// State of each window, shortened: [`WindowState::letter`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub state: String,
    /// Time until a waiting window is tried again, shortened: the letter of [`letter_of_time`]; `-` for others.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub until: String,
    /// Reason why each window is not huge, shortened: `A` is the first of [`WindowMap::reasons`], `Z` is followed by
    /// `a`; `-` for windows in large pages.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// NUMA node of each window's memory, shortened: `a` is the first of [`WindowMap::nodes`], `A` if most of the pages
    /// are there and some elsewhere; `-` for windows with nothing present.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node: String,
}

impl WindowRange {
    /// Number of windows.
    pub fn windows(&self) -> usize {
        self.backing.len()
    }

    fn bytes(&self) -> usize {
        let WindowRange { gpa: _, backing, second_level, heat, heat_age, guest, state, until, why, node } = self;
        [backing, second_level, heat, heat_age, guest, state, until, why, node].map(String::len).iter().sum()
    }
}

/// Whether a window is large, or may become so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WindowState {
    /// A large page serves it.
    Large,
    /// It may be promoted now.
    Ready,
    /// An attempt failed: it waits for the next.
    Waiting,
    /// Pages of it are absent, and stay so for now: the guest gave them back, they are swapped out, or a program
    /// provides them on demand.
    Holes,
    /// It is being moved.
    Moving,
    /// It has a large page, which KVM maps in base pages while a dirty log is on.
    Held,
    /// The whole VM is left as it is, or has no manager.
    LeftAlone,
    /// It can never be huge.
    Never,
    /// No page of it is present.
    Empty,
}

impl WindowState {
    /// All states, in the order of a legend.
    pub const ALL: [WindowState; 9] = [
        WindowState::Large,
        WindowState::Ready,
        WindowState::Waiting,
        WindowState::Holes,
        WindowState::Moving,
        WindowState::Held,
        WindowState::LeftAlone,
        WindowState::Never,
        WindowState::Empty,
    ];

    /// Letter in a map.
    pub const fn letter(self) -> char {
        match self {
            WindowState::Large => 'l',
            WindowState::Ready => 'r',
            WindowState::Waiting => 'w',
            WindowState::Holes => 'h',
            WindowState::Moving => 'm',
            WindowState::Held => 'k',
            WindowState::LeftAlone => 'a',
            WindowState::Never => 'n',
            WindowState::Empty => 'e',
        }
    }

    /// State of that letter; `None` for any other.
    pub fn of(letter: char) -> Option<WindowState> {
        WindowState::ALL.into_iter().find(|state| state.letter() == letter)
    }

    /// Meaning, for a legend.
    pub const fn meaning(self) -> &'static str {
        match self {
            WindowState::Large => "large",
            WindowState::Ready => "ready",
            WindowState::Waiting => "waiting",
            WindowState::Holes => "holes",
            WindowState::Moving => "moving",
            WindowState::Held => "held at 4 KiB",
            WindowState::LeftAlone => "left alone",
            WindowState::Never => "never huge",
            WindowState::Empty => "nothing present",
        }
    }
}

/// Appends a letter for one more window to a shortened column. Its last letter stands for `run` windows so far.
/// Returns the number for which it stands now.
pub fn push(column: &mut String, letter: char, run: u64) -> u64 {
    let digits = if run > 1 { run.ilog10() as usize + 1 } else { 0 };
    let before = column.len() - digits;
    if run > 0 && column[..before].ends_with(letter) {
        column.truncate(before);
        column.push_str(&(run + 1).to_string());
        return run + 1;
    }
    column.push(letter);
    1
}

/// A shortened column of these letters.
pub fn shortened(letters: impl Iterator<Item = char>) -> String {
    let mut column = String::new();
    let mut run = 0;
    letters.for_each(|letter| run = push(&mut column, letter, run));
    column
}

/// Letters of a shortened column for `windows` windows, whatever the column says: missing ones are `?`.
pub fn letters(column: &str, windows: usize) -> impl Iterator<Item = char> + '_ {
    let runs = column.char_indices().filter(|(_, letter)| !letter.is_ascii_digit()).map(|(at, letter)| {
        let rest = &column[at + letter.len_utf8()..];
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let times = if digits == 0 { 1 } else { rest[..digits].parse().unwrap_or(usize::MAX) };
        (letter, times)
    });
    let known = runs.flat_map(move |(letter, times)| std::iter::repeat_n(letter, times.min(windows)));
    known.chain(std::iter::repeat(UNKNOWN)).take(windows)
}

/// Letter of a time: `a` up to a second, `b` up to 2 s, `c` up to 4 s, each the double of the one before, to `z`
/// (a year, and all beyond).
pub fn letter_of_time(time: Duration) -> char {
    const LONGEST: Duration = Duration::from_secs(1 << 25);
    let seconds = time.min(LONGEST).as_millis().div_ceil(1000).max(1);
    char::from(b'a' + seconds.next_power_of_two().trailing_zeros() as u8)
}

/// Upper bound on a time with that letter, in seconds; `None` for a letter that is not one of a time.
pub fn time_of_letter(letter: char) -> Option<u64> {
    letter.is_ascii_lowercase().then(|| 1 << (letter as u32 - 'a' as u32))
}

/// Number of reasons that have a letter: the capital letters, and then the small ones.
const REASONS_MAX: usize = 52;

/// Letter of a map's reason with that index; `?` where all letters are taken.
pub fn letter_of_reason(index: usize) -> char {
    const CAPITALS: usize = 26;
    match index {
        0..CAPITALS => char::from(b'A' + index as u8),
        CAPITALS..REASONS_MAX => char::from(b'a' + (index - CAPITALS) as u8),
        _ => UNKNOWN,
    }
}

/// Index of the reason with that letter.
pub fn reason_of_letter(letter: char) -> Option<usize> {
    (0..REASONS_MAX).find(|index| letter_of_reason(*index) == letter)
}

/// Letter of a window on a map's node with that index, and whether some of its pages are `elsewhere`; `?` for nodes
/// beyond the alphabet.
pub fn letter_of_node(index: usize, elsewhere: bool) -> char {
    let letter = u8::try_from(index).ok().and_then(|index| b'a'.checked_add(index)).filter(u8::is_ascii_lowercase);
    match letter.map(char::from) {
        Some(letter) if elsewhere => letter.to_ascii_uppercase(),
        Some(letter) => letter,
        None => UNKNOWN,
    }
}

/// Index of the node with that letter, and whether some of the pages are elsewhere.
pub fn node_of_letter(letter: char) -> Option<(usize, bool)> {
    let small = letter.to_ascii_lowercase();
    small.is_ascii_lowercase().then(|| (usize::from(small as u8 - b'a'), letter.is_ascii_uppercase()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use proptest::prelude::*;

    use super::*;

    fn read(column: &str, windows: usize) -> String {
        letters(column, windows).collect()
    }

    #[test]
    fn a_shortened_column_has_each_letter_and_for_how_many_windows() {
        assert_eq!(shortened("llhhhreeeeeeeeeee".chars()), "l2h3re11");
        assert_eq!(shortened("".chars()), "");
        assert_eq!(read("l2h3re11", 17), "llhhhreeeeeeeeeee");
    }

    #[test]
    fn a_column_that_is_too_short_or_too_long_never_moves_other_windows() {
        assert_eq!(read("", 3), "???");
        assert_eq!(read("l2", 3), "ll?");
        assert_eq!(read("l99999999999999999999999999h", 3), "lll");
        assert_eq!(read("12l0h", 3), "h??", "numbers without a letter, and a letter for no window");
    }

    #[test]
    fn a_time_is_a_letter_that_bounds_it_to_a_factor_of_two() {
        let letter = |ms| letter_of_time(Duration::from_millis(ms));
        assert_eq!([0, 1000, 1001, 2000, 2001, 60_000].map(letter), ['a', 'a', 'b', 'b', 'c', 'g']);
        assert_eq!(letter_of_time(Duration::MAX), 'z');
        assert_eq!(['a', 'b', 'g', '?', '-'].map(time_of_letter), [Some(1), Some(2), Some(64), None, None]);
    }

    #[test]
    fn every_reason_and_every_state_has_a_letter_of_its_own() {
        for index in 0..REASONS_MAX {
            assert_eq!(reason_of_letter(letter_of_reason(index)), Some(index));
        }
        assert_eq!((letter_of_reason(REASONS_MAX), reason_of_letter(NONE)), (UNKNOWN, None));
        for state in WindowState::ALL {
            assert_eq!(WindowState::of(state.letter()), Some(state));
        }
        assert_eq!(WindowState::of(UNKNOWN), None);
    }

    #[test]
    fn a_node_has_a_small_letter_and_a_capital_where_pages_are_elsewhere() {
        assert_eq!([(0, false), (1, true), (25, false)].map(|(at, far)| letter_of_node(at, far)), ['a', 'B', 'z']);
        assert_eq!((letter_of_node(26, false), letter_of_node(usize::MAX, true)), (UNKNOWN, UNKNOWN));
        for index in 0..26 {
            for elsewhere in [false, true] {
                assert_eq!(node_of_letter(letter_of_node(index, elsewhere)), Some((index, elsewhere)));
            }
        }
        assert_eq!((node_of_letter(NONE), node_of_letter(UNKNOWN)), (None, None));
    }

    #[test]
    fn a_map_of_an_earlier_release_is_read_and_its_missing_columns_are_unknown() {
        let line = r#"{"name":"web","ranges":[{"gpa":0,"backing":"24","second_level":"24","heat":"9?"}]}"#;
        let map: WindowMap = serde_json::from_str(line).unwrap();
        assert_eq!((map.reasons.len(), map.notes.len(), map.at_s), (0, 0, None));
        assert_eq!(read(&map.ranges[0].state, map.ranges[0].windows()), "??");
        assert_eq!(serde_json::to_string(&map).unwrap(), line, "and what is unknown is left out");
    }

    #[test]
    fn a_client_of_an_earlier_release_finds_its_columns_as_they_were() {
        #[derive(Deserialize)]
        struct Before {
            name: String,
            ranges: Vec<RangeBefore>,
        }
        #[derive(Deserialize)]
        struct RangeBefore {
            backing: String,
            second_level: String,
            heat: String,
        }
        let range = WindowRange {
            backing: "244".into(),
            second_level: "244".into(),
            heat: "9??".into(),
            state: "lr2".into(),
            why: "-A2".into(),
            ..WindowRange::default()
        };
        let reasons = vec![MapReason { name: "not_chosen".into(), text: "not yet".into() }];
        let map =
            WindowMap { name: "web".into(), ranges: vec![range], reasons, at_s: Some(1.5), ..WindowMap::default() };
        let before: Before = serde_json::from_str(&serde_json::to_string(&map).unwrap()).unwrap();
        let range = &before.ranges[0];
        assert_eq!((before.name.as_str(), range.backing.as_str()), ("web", "244"));
        assert_eq!((range.second_level.as_str(), range.heat.as_str()), ("244", "9??"));
    }

    proptest! {
        #[test]
        fn a_column_comes_back_as_it_was(text in "[a-zA-Z?-]{0,40}(x{0,200})[a-z]{0,3}") {
            let column = shortened(text.chars());
            prop_assert!(column.len() <= text.len());
            prop_assert_eq!(read(&column, text.len()), text);
        }

        #[test]
        fn any_text_is_a_column_of_the_wanted_length(text: String, windows in 0_usize..2000) {
            prop_assert_eq!(letters(&text, windows).count(), windows);
        }
    }
}
