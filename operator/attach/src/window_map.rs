//! The map of a VM's windows, from a manager's latest tick or from a survey.
//!
//! ```text
//!   Live: snapshot, reasons, moments of the samples ──┐
//!   Survey: backing, reasons ─────────────────────────┴─▶ Row, one a window ─▶ columns of letters, a note on each `?`
//!   KVM's totals ──────────────────────────────────────────────────────────────▲  and on what is inferred
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use wideleaf_control::map::{self, MapReason, NONE, UNKNOWN, WindowMap, WindowRange, WindowState};
use wideleaf_memory::explain::WhyNot;
use wideleaf_memory::manager::{Live, LiveVm};
use wideleaf_policies::{
    AccessHistory, Backing, GuestMapping, MappingStats, Moment, NodeId, PageSize, VmSnapshot, WindowIndex, WindowNode,
};

use crate::host_clock::HostClock;

/// Question of the access sensor in [`Live::unanswered`].
const ABOUT_ACCESS: &str = "which windows are used";

/// Question of the sensor of the guest's tables in [`Live::unanswered`].
const ABOUT_GUEST_PAGES: &str = "which pages the guest itself uses";

/// Difference between KVM's totals and the map that is no contradiction: the guest runs on between the two readings.
const TOLERANCE: u64 = 2;

/// The VM as a whole, and when it was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About<'a> {
    /// Name of the VM.
    pub name: &'a str,
    /// Clock of the manager's host.
    pub clock: HostClock,
    /// KVM's totals, or why they are not known.
    pub totals: Result<MappingStats, &'a str>,
    /// Whether KVM shadows the guest's tables.
    pub is_shadowed: bool,
    /// Why the guest's own tables cannot be read, where that is known.
    pub no_tables: Option<&'a str>,
}

/// One window of a map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub window: WindowIndex,
    pub backing: Backing,
    pub is_held: bool,
    pub guest: GuestMapping,
    pub access: AccessHistory,
    /// Age of the latest sample of accesses.
    pub access_age: Option<Duration>,
    /// Reason why it is not large.
    pub why: Option<WhyNot>,
    /// Time until its next attempt.
    pub until: Option<Duration>,
    /// NUMA node of its memory.
    pub node: WindowNode,
}

impl Row {
    /// A window of which only the backing and the reason are known.
    pub const fn seen(window: WindowIndex, backing: Backing, why: Option<WhyNot>) -> Row {
        Row {
            window,
            backing,
            is_held: false,
            guest: GuestMapping::Unknown,
            access: AccessHistory::from_parts(0, 0),
            access_age: None,
            why,
            until: None,
            node: WindowNode::Unknown,
        }
    }

    /// KVM maps nothing larger than its backing, nor in a size that its totals do not have. Under shadow paging it maps
    /// nothing larger than the guest's page either.
    fn second_level(&self, about: &About<'_>) -> Option<Backing> {
        let totals = about.totals.ok()?;
        let is_small = self.is_held || (about.is_shadowed && self.guest == GuestMapping::Base4K);
        Some(match self.backing {
            Backing::Giant1G | Backing::Huge2M if is_small => Backing::Base4K,
            Backing::Giant1G if totals.pages_1g > 0 => Backing::Giant1G,
            Backing::Giant1G | Backing::Huge2M if totals.pages_2m > 0 => Backing::Huge2M,
            Backing::Giant1G | Backing::Huge2M => Backing::Base4K,
            smaller => smaller,
        })
    }

    fn node_letter(&self, nodes: &[NodeId]) -> char {
        let place = |node| nodes.iter().position(|known| *known == node);
        let letter = |node, elsewhere| place(node).map_or(UNKNOWN, |index| map::letter_of_node(index, elsewhere));
        match self.node {
            _ if self.backing == Backing::Unbacked => NONE,
            WindowNode::Unknown => UNKNOWN,
            WindowNode::On(node) => letter(node, false),
            WindowNode::Spread(node) => letter(node, true),
        }
    }

    fn until_letter(&self) -> char {
        match (self.why.map(state_of), self.until) {
            (Some(WindowState::Waiting), Some(until)) => map::letter_of_time(until),
            (Some(WindowState::Waiting), None) => UNKNOWN,
            _ => NONE,
        }
    }
}

/// Map of a VM under a manager, as of its latest tick. What backs a window is as old as the latest scan at most.
pub(crate) fn of_live(about: &About<'_>, live: &Live) -> WindowMap {
    let rows: Vec<Vec<Row>> =
        live.snapshot.vms.iter().zip(&live.vms).map(|(rows, vm)| rows_of(rows, vm, live.at)).collect();
    let mut map = of_rows(about, &rows);
    map.at_s = about.clock.wall_s(live.at);
    map.scan_age_s = about.clock.age_s(live.scanned_at());
    map.notes.extend(not_scanned(live).map(str::to_owned));
    let is_sampled = live.snapshot.vms.iter().flat_map(|rows| &rows.access_quality).any(|sample| sample.windows > 0);
    let heat_of_some = format!("heat: windows with {UNKNOWN} are not sampled yet");
    let heat = if is_sampled { heat_of_some } else { unasked(live, live.needs.access, "heat", ABOUT_ACCESS) };
    let is_read = live.needs.guest_mapping && about.no_tables.is_none();
    let guest_of_some = format!("guest's pages: windows with {UNKNOWN} are not read yet, or only its kernel maps them");
    let guest = match about.no_tables {
        Some(why) => format!("guest's pages: {why}"),
        None if is_read && !has_line(live, ABOUT_GUEST_PAGES) => guest_of_some,
        None => unasked(live, live.needs.guest_mapping, "guest's pages", ABOUT_GUEST_PAGES),
    };
    let of = |column: fn(&WindowRange) -> &str| has_unknown(&map, column);
    let node = format!("nodes: windows with {UNKNOWN} were not looked at yet; a pass over all begins every 10 s");
    let has_node = !map.nodes.is_empty() && of(|range| &range.node);
    let notes = [(of(|range| &range.heat), heat), (of(|range| &range.guest), guest), (has_node, node)];
    map.notes.extend(notes.into_iter().filter_map(|(is_unknown, note)| is_unknown.then_some(note)));
    let samples = live.snapshot.vms.iter().flat_map(|rows| &rows.access_quality);
    map.notes.extend(note_on_shared_heat(samples.map(|sample| sample.windows)));
    map
}

/// Why its manager has no scan of all its windows, if so. A manager has no tick yet with --policy-delay.
pub(crate) fn not_scanned(live: &Live) -> Option<&'static str> {
    match live.scanned_at() {
        Some(_) => None,
        None if live.ticks == 0 => Some("its manager has not begun yet, and knows no windows"),
        None => Some("its manager has not scanned all its windows yet: no scan has succeeded"),
    }
}

/// How many windows have no result of their own, but that of a region; `None` if each has its own. `sharing`: for each
/// window, the number of windows with its result.
fn note_on_shared_heat(sharing: impl Iterator<Item = u16>) -> Option<String> {
    let shared = sharing.filter(|windows| *windows > 1);
    let (number, most) = shared.fold((0_u64, 0), |(number, most), windows| (number + 1, windows.max(most)));
    (number > 0).then(|| format!("heat: {number} windows have the result of a region, the widest of {most} windows"))
}

fn has_line(live: &Live, question: &str) -> bool {
    live.unanswered.iter().any(|line| line.contains(question))
}

/// Why a sensor does not tell: it is missing, or the policy does not ask it.
fn unasked(live: &Live, is_asked: bool, column: &str, question: &str) -> String {
    match live.unanswered.iter().find(|line| line.contains(question)) {
        Some(line) => format!("{column}: {line}"),
        None if is_asked => format!("{column}: no sensor has told yet"),
        None => format!("{column}: policy {} does not ask {question}, so that no sensor runs", live.policy),
    }
}

/// Whether a window of the map has `?` in that column, or the column is missing.
fn has_unknown(map: &WindowMap, column: fn(&WindowRange) -> &str) -> bool {
    map.ranges.iter().any(|range| column(range).is_empty() || column(range).contains(UNKNOWN))
}

fn rows_of(rows: &VmSnapshot, vm: &LiveVm, now: Moment) -> Vec<Row> {
    let reasons = vm.reasons.iter().flat_map(|(windows, why)| std::iter::repeat_n(*why, *windows as usize));
    let age = |row: usize| {
        let sample = rows.access_quality[row];
        (sample.windows > 0).then(|| Duration::from_secs(sample.age_s.into()))
    };
    let row = |(row, why): (usize, Option<WhyNot>)| Row {
        window: rows.windows[row],
        backing: rows.backing[row],
        is_held: rows.is_held[row],
        guest: rows.guest_mapping[row],
        access: rows.access[row],
        access_age: age(row),
        why,
        until: (rows.ready_at[row] > now).then(|| rows.ready_at[row].since(now)),
        node: rows.node[row],
    };
    (0..rows.len()).zip(reasons).map(row).collect()
}

/// Map of these windows, a list for each piece of RAM, in any order. Notes say what is inferred or missing of KVM's
/// side.
pub(crate) fn of_rows(about: &About<'_>, pieces: &[Vec<Row>]) -> WindowMap {
    let letters = Letters::of(pieces.iter().flatten());
    let nodes = nodes_of(pieces.iter().flatten());
    let follows = |a: &Row, b: &Row| a.window.get() + 1 == b.window.get();
    let stretches = pieces.iter().flat_map(|rows| rows.chunk_by(follows));
    let mut ranges: Vec<WindowRange> = stretches.map(|rows| range_of(about, rows, &letters, &nodes)).collect();
    ranges.sort_by_key(|range| range.gpa);
    let notes = if ranges.is_empty() { Vec::new() } else { vec![note_on_second_level(about, &ranges)] };
    let nodes = nodes.iter().map(|node| node.0).collect();
    let name = about.name.to_owned();
    WindowMap { name, ranges, reasons: letters.reasons(), nodes, notes, at_s: None, scan_age_s: None }
}

/// The nodes on which a window is, ascending; none on a host with one node.
fn nodes_of<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<NodeId> {
    let nodes: BTreeSet<NodeId> = rows.filter_map(|row| row.node.most()).collect();
    nodes.into_iter().collect()
}

/// Columns of adjacent windows.
fn range_of(about: &About<'_>, rows: &[Row], letters: &Letters, nodes: &[NodeId]) -> WindowRange {
    let shortened = |letter: &dyn Fn(&Row) -> char| map::shortened(rows.iter().map(letter));
    let known =
        |column: String| if column.starts_with(UNKNOWN) && is_one_letter(&column) { String::new() } else { column };
    WindowRange {
        gpa: rows[0].window.start().get(),
        backing: rows.iter().map(|row| letter(row.backing)).collect(),
        second_level: rows.iter().map(|row| row.second_level(about).map_or(UNKNOWN, letter)).collect(),
        heat: rows.iter().map(|row| heat(row.access)).collect(),
        heat_age: known(shortened(&heat_age)),
        guest: known(shortened(&|row| guest_letter(row.guest))),
        state: shortened(&|row| row.why.map_or(WindowState::Large, state_of).letter()),
        until: shortened(&Row::until_letter),
        why: shortened(&|row| letters.letter(row.why)),
        node: if nodes.is_empty() { String::new() } else { known(shortened(&|row| row.node_letter(nodes))) },
    }
}

/// Whether a shortened column has the same letter for all its windows.
fn is_one_letter(column: &str) -> bool {
    column.chars().filter(|letter| !letter.is_ascii_digit()).count() == 1
}

/// Letters of the reasons: the most frequent has the first.
struct Letters(Vec<WhyNot>);

impl Letters {
    fn of<'a>(rows: impl Iterator<Item = &'a Row>) -> Letters {
        let mut counts = BTreeMap::<WhyNot, u64>::new();
        rows.filter_map(|row| row.why).for_each(|why| *counts.entry(why).or_default() += 1);
        let mut reasons: Vec<(WhyNot, u64)> = counts.into_iter().collect();
        reasons.sort_by_key(|(_, windows)| std::cmp::Reverse(*windows));
        Letters(reasons.into_iter().map(|(why, _)| why).collect())
    }

    fn letter(&self, why: Option<WhyNot>) -> char {
        let Some(why) = why else { return NONE };
        self.0.iter().position(|known| *known == why).map_or(UNKNOWN, map::letter_of_reason)
    }

    fn reasons(&self) -> Vec<MapReason> {
        self.0.iter().map(|why| MapReason { name: why.name().to_owned(), text: why.to_string() }).collect()
    }
}

/// State of a window that is not large for that reason.
const fn state_of(why: WhyNot) -> WindowState {
    match why {
        WhyNot::CannotBeHuge(_) => WindowState::Never,
        WhyNot::NeverTouched => WindowState::Empty,
        WhyNot::Held | WhyNot::HeldByOthers => WindowState::Held,
        WhyNot::Holes(_) | WhyNot::Swapped => WindowState::Holes,
        WhyNot::UnderWay => WindowState::Moving,
        WhyNot::Merged | WhyNot::BackingOff(_) => WindowState::Waiting,
        WhyNot::StallBudgetSpent
        | WhyNot::BudgetSpent
        | WhyNot::KeptSmall(_)
        | WhyNot::GainsNothing
        | WhyNot::NotChosen => WindowState::Ready,
        WhyNot::Panicked
        | WhyNot::LeftAlone(_)
        | WhyNot::SharedWatched
        | WhyNot::PolicyNeverPromotes
        | WhyNot::Unmanaged
        | WhyNot::ManagesItself => WindowState::LeftAlone,
    }
}

const fn letter(backing: Backing) -> char {
    match backing {
        Backing::Unbacked => '.',
        Backing::Base4K => '4',
        Backing::Huge2M => '2',
        Backing::Giant1G => '1',
    }
}

const fn guest_letter(guest: GuestMapping) -> char {
    match guest {
        GuestMapping::Unknown => UNKNOWN,
        GuestMapping::Unmapped => 'u',
        GuestMapping::Base4K => 'b',
        GuestMapping::Huge2M => 'h',
        GuestMapping::Giant1G => 'g',
        GuestMapping::Mixed => 'm',
    }
}

/// The share of samples with an access, in tenths, cut off at nine.
fn heat(access: AccessHistory) -> char {
    let tenths = |rate: u32| char::from_digit((rate / 1000).min(9), 10).expect("a digit");
    access.rate().map_or(UNKNOWN, |rate| tenths(rate.get()))
}

fn heat_age(row: &Row) -> char {
    row.access_age.filter(|_| row.access.samples() > 0).map_or(UNKNOWN, map::letter_of_time)
}

/// What is known of KVM's side, and how its totals compare with the map.
fn note_on_second_level(about: &About<'_>, ranges: &[WindowRange]) -> String {
    let totals = match about.totals {
        Ok(totals) => totals,
        Err(why) => return format!("second level: {why}"),
    };
    let windows_per_giant = PageSize::Giant1G.bytes().pages(PageSize::Huge2M);
    let of_kvm = totals.pages_2m.saturating_add(totals.pages_1g.saturating_mul(windows_per_giant));
    let is_large = |letter: &u8| matches!(letter, b'2' | b'1');
    let of_map: usize = ranges.iter().map(|range| range.second_level.bytes().filter(|b| is_large(b)).count()).sum();
    let of_map = of_map as u64;
    let how = "second level: inferred, since KVM tells totals only";
    if of_kvm > of_map + TOLERANCE {
        format!("{how}: it maps {of_kvm} windows large, and the map {of_map}: it was read later, or has several tables")
    } else if of_kvm + TOLERANCE < of_map {
        format!("{how}: it maps {of_kvm} windows large, and the map {of_map}: the guest must touch the others first")
    } else {
        format!("{how}, which agree: it maps {of_kvm} windows large")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::Refusal;

    const TOTALS: MappingStats = MappingStats { pages_4k: 7, pages_2m: 2, pages_1g: 0 };

    fn about(totals: Result<MappingStats, &str>) -> About<'_> {
        let clock = HostClock::showing(Moment::START);
        About { name: "web", clock, totals, is_shadowed: false, no_tables: None }
    }

    fn row(index: u64, backing: Backing, why: Option<WhyNot>) -> Row {
        Row::seen(WindowIndex::new(index), backing, why)
    }

    fn rows() -> Vec<Row> {
        let hot = AccessHistory::default().with(true);
        let backs_off = WhyNot::BackingOff(Refusal::Busy);
        vec![
            Row { access: hot, access_age: Some(Duration::from_secs(3)), ..row(0, Backing::Huge2M, None) },
            Row { is_held: true, ..row(1, Backing::Huge2M, Some(WhyNot::Held)) },
            Row { until: Some(Duration::from_millis(10)), ..row(2, Backing::Base4K, Some(backs_off)) },
            Row { guest: GuestMapping::Base4K, ..row(3, Backing::Base4K, Some(WhyNot::NotChosen)) },
            row(4, Backing::Base4K, Some(WhyNot::NotChosen)),
            row(2048, Backing::Unbacked, Some(WhyNot::NeverTouched)),
        ]
    }

    #[test]
    fn every_column_has_a_letter_for_every_window_and_a_gap_begins_a_range() {
        let map = of_rows(&about(Ok(TOTALS)), &[rows()]);
        let expected = WindowRange {
            gpa: 0,
            backing: "22444".into(),
            second_level: "24444".into(),
            heat: "9????".into(),
            heat_age: "c?4".into(),
            guest: "?3b?".into(),
            state: "lkwr2".into(),
            until: "-2a-2".into(),
            why: "-CDA2".into(),
            node: String::new(),
        };
        assert_eq!(map.ranges[0], expected);
        let far = &map.ranges[1];
        assert_eq!((far.gpa, far.backing.as_str(), far.state.as_str(), far.why.as_str()), (4 << 30, ".", "e", "B"));
        assert_eq!((far.guest.as_str(), far.heat_age.as_str()), ("", ""), "unknown for all of its windows");
        let names: Vec<&str> = map.reasons.iter().map(|reason| reason.name.as_str()).collect();
        assert_eq!(names, ["not_chosen", "never_touched", "held", "backing_off_busy"]);
    }

    #[test]
    fn the_node_of_a_window_is_a_letter_of_the_maps_nodes() {
        let on = |index, node| Row { node, ..row(index, Backing::Huge2M, None) };
        let (first, third) = (NodeId(0), NodeId(2));
        let rows = vec![
            on(0, WindowNode::On(third)),
            on(1, WindowNode::On(first)),
            on(2, WindowNode::Spread(third)),
            on(3, WindowNode::Unknown),
            row(4, Backing::Unbacked, Some(WhyNot::NeverTouched)),
        ];
        let map = of_rows(&about(Ok(TOTALS)), &[rows]);
        assert_eq!((map.nodes, map.ranges[0].node.as_str()), (vec![0, 2], "baB?-"));
        let without = of_rows(&about(Ok(TOTALS)), &[self::rows()]);
        assert_eq!((without.nodes.len(), without.ranges[0].node.as_str()), (0, ""), "a host with one node");
    }

    #[test]
    fn pieces_in_any_order_are_in_the_order_of_addresses() {
        let map =
            of_rows(&about(Ok(TOTALS)), &[vec![row(9, Backing::Huge2M, None)], vec![row(3, Backing::Huge2M, None)]]);
        assert_eq!(map.ranges.iter().map(|range| range.gpa).collect::<Vec<_>>(), [3 << 21, 9 << 21]);
    }

    #[test]
    fn the_second_level_is_no_larger_than_the_page_the_hold_and_the_totals_allow() {
        let first = |about: &About<'_>, row: Row| of_rows(about, &[vec![row]]).ranges[0].second_level.clone();
        let huge = row(0, Backing::Huge2M, None);
        let of_base = Row { guest: GuestMapping::Base4K, ..huge };
        let shadowed = About { is_shadowed: true, ..about(Ok(TOTALS)) };
        assert_eq!(first(&about(Ok(TOTALS)), huge), "2");
        assert_eq!(first(&about(Ok(TOTALS)), row(0, Backing::Giant1G, None)), "2");
        assert_eq!(first(&about(Ok(MappingStats { pages_2m: 0, ..TOTALS })), huge), "4");
        assert_eq!(first(&about(Ok(TOTALS)), Row { is_held: true, ..huge }), "4");
        assert_eq!((first(&about(Ok(TOTALS)), of_base), first(&shadowed, of_base)), ("2".into(), "4".into()));
        assert_eq!(first(&about(Err("not known")), huge), "?");
    }

    #[test]
    fn kvms_totals_are_compared_with_the_map() {
        let of = |pages_2m, windows: u64| {
            let rows = (0..windows).map(|index| row(index, Backing::Huge2M, None)).collect();
            of_rows(&about(Ok(MappingStats { pages_2m, ..TOTALS })), &[rows]).notes[0].clone()
        };
        assert!(of(5, 7).contains("which agree"), "{}", of(5, 7));
        assert!(of(5, 8).contains("must touch the others"), "{}", of(5, 8));
        assert!(of(8, 5).contains("was read later"), "{}", of(8, 5));
        assert_eq!(of_rows(&about(Err("ask root")), &[rows()]).notes, ["second level: ask root"]);
    }

    #[test]
    fn results_that_windows_share_are_told_with_the_widest_region() {
        assert_eq!(note_on_shared_heat([0, 1, 1].into_iter()), None);
        let note = note_on_shared_heat([1, 64, 128, 0, 64].into_iter());
        assert_eq!(note.as_deref(), Some("heat: 3 windows have the result of a region, the widest of 128 windows"));
    }

    #[test]
    fn a_window_that_waits_shows_how_long_and_one_that_does_not_shows_none() {
        let waits = |until| Row { until, ..row(0, Backing::Base4K, Some(WhyNot::BackingOff(Refusal::NoHugePage))) };
        let letter = |row: Row| of_rows(&about(Ok(TOTALS)), &[vec![row]]).ranges[0].until.clone();
        assert_eq!(letter(waits(Some(Duration::from_secs(60)))), "g");
        assert_eq!(letter(waits(None)), "?");
        let for_ever = Some(Duration::MAX);
        assert_eq!(letter(Row { until: for_ever, ..row(0, Backing::Base4K, Some(WhyNot::Swapped)) }), "-");
    }
}
