//! From a recording to a map of guest RAM over time, and to the cost of actions.
//!
//! ```text
//!   run --record FILE ──▶ snapshots ──▶ columns: host backing, inferred second level, heat, KVM's counts
//!                     └─▶ outcomes ───▶ CPU time and longest pause by mechanism.result
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use wideleaf_experiments::results::{Actions, MapColumn, MemoryMap};
use wideleaf_policies::recording::{DecodeError, Decoder, Frame, RecordedOutcome};
use wideleaf_policies::snapshot::{AccessHistory, Backing, GuestMapping, VmSnapshot, WindowRow};
use wideleaf_policies::{MappingStats, PageSize};
use wideleaf_run::failure::Failure;

/// Most letters in all columns of a map. With its three columns per window it takes at most a megabyte in the file
/// of results.
const LETTERS_MAX: usize = 200_000;
/// Most instants that a picture can distinguish.
const COLUMNS_MAX: usize = 200;
/// Most windows from the first to the last: 64 GiB. A larger guest gets no map.
const WINDOWS_MAX: u64 = 1 << 15;

/// Facts about the run that its recording does not have.
pub(super) struct View {
    /// Begin of the timed part, in seconds after the manager's start.
    pub began_at_s: f64,
    /// Paging of the guest by KVM: `shadow`, `ept`, `npt`, `none`.
    pub paging: String,
    /// Page size of the guest's own tables, for windows that no sensor sampled: `4k`, `2m`, `1g`.
    pub guest_page: String,
}

/// Contents of a recording.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Recorded {
    /// Map of guest RAM; `None` for a guest that is too large.
    pub map: Option<MemoryMap>,
    /// Actions by `mechanism.result`.
    pub actions: BTreeMap<String, Actions>,
}

/// Reads the file of a recording.
///
/// # Errors
/// [`Failure::Output`]: the run was made, but its recording is lost.
pub(super) fn read(file: &Path, view: &View) -> Result<Recorded, Failure> {
    let unreadable =
        |why: &dyn std::fmt::Display| Failure::Output(format!("cannot read the recording of a run: {why}"));
    let bytes = std::fs::read(file).map_err(|error| unreadable(&error))?;
    decode(&bytes, view).map_err(|error| unreadable(&error))
}

/// Data after a cut are lost; those before it are good.
fn decode(bytes: &[u8], view: &View) -> Result<Recorded, DecodeError> {
    let mut columns = Vec::new();
    let mut recorded = Recorded::default();
    let mut windows = None;
    for frame in Decoder::open(bytes)? {
        match frame {
            Ok(Frame::Snapshot { at, snapshot }) => {
                let Some(vm) = snapshot.vms.first() else { continue };
                let at_s = at.since_start().as_secs_f64() - view.began_at_s;
                let span = *windows.get_or_insert_with(|| span(vm));
                columns.extend(span.map(|span| column(vm, span, at_s, view)));
            }
            Ok(Frame::Outcome(outcome)) => add(&mut recorded.actions, &outcome),
            Ok(Frame::Plan { .. }) => {}
            Ok(Frame::End) | Err(DecodeError::CutOff { .. }) => break,
            Err(error) => return Err(error),
        }
    }
    let columns = thinned(columns);
    recorded.map = windows.flatten().map(|(first_window, _)| MemoryMap { first_window, columns });
    Ok(recorded)
}

fn add(actions: &mut BTreeMap<String, Actions>, recorded: &RecordedOutcome) {
    let RecordedOutcome { mechanism, outcome } = recorded;
    let of = actions.entry(format!("{mechanism}.{}", outcome.result.name())).or_default();
    of.count += 1;
    *of.cpu_ms.get_or_insert(0.0) += outcome.cost.cpu.as_secs_f64() * 1e3;
    let longest = of.unavailable_max_us.get_or_insert(0.0);
    *longest = longest.max(outcome.unavailable.as_secs_f64() * 1e6);
}

/// First window, and the number of windows to the end of the last; `None` if there are too many, or none.
fn span(vm: &VmSnapshot) -> Option<(u64, u64)> {
    let (first, last) = (vm.windows.first()?.get(), vm.windows.last()?.get());
    Some((first, last - first + 1)).filter(|(_, windows)| *windows <= WINDOWS_MAX)
}

fn column(vm: &VmSnapshot, (first, windows): (u64, u64), at_s: f64, view: &View) -> MapColumn {
    let blank = || vec![b' '; windows as usize];
    let (mut backing, mut heat, mut second_level) = (blank(), blank(), blank());
    for row in (0..vm.len()).map(|row| vm.get(row)) {
        let place = row.window.get().checked_sub(first).and_then(|place| usize::try_from(place).ok());
        let Some(place) = place.filter(|place| *place < backing.len()) else { continue };
        backing[place] = letter(row.backing);
        heat[place] = digit(row.access);
        second_level[place] = inferred(&row, view);
    }
    let text = |letters: Vec<u8>| letters.into_iter().map(char::from).collect::<String>();
    let kvm_pages = vm.mapping.map(|MappingStats { pages_4k, pages_2m, pages_1g }| [pages_4k, pages_2m, pages_1g]);
    let second_level = if view.paging == "none" { String::new() } else { text(second_level) };
    MapColumn { at_s, backing: text(backing), heat: text(heat), second_level, kvm_pages }
}

fn letter(backing: Backing) -> u8 {
    match backing.page_size() {
        None => b'.',
        Some(PageSize::Base4K) => b'4',
        Some(PageSize::Huge2M) => b'2',
        Some(PageSize::Giant1G) => b'1',
    }
}

/// Share of samples in which the guest had touched the window, from 0 (never) to 9 (always).
fn digit(access: AccessHistory) -> u8 {
    access.rate().map_or(b' ', |rate| b'0' + (rate.get() * 9 + 5_000).div_euclid(10_000).min(9) as u8)
}

/// Largest size that the second level can map. It is limited by the host's backing, by a hold, and, where KVM
/// shadows the guest's tables, by the guest's own mapping (Documentation/virt/kvm/x86/mmu.rst, "Large pages").
fn inferred(row: &WindowRow, view: &View) -> u8 {
    let host = if row.is_held && row.backing != Backing::Unbacked { b'4' } else { letter(row.backing) };
    let guest = match row.guest_mapping {
        _ if view.paging != "shadow" => return host,
        GuestMapping::Unknown => match view.guest_page.as_str() {
            "4k" => b'4',
            "2m" => b'2',
            "1g" => b'1',
            _ => b'?',
        },
        GuestMapping::Unmapped => b'.',
        GuestMapping::Base4K => b'4',
        GuestMapping::Huge2M => b'2',
        GuestMapping::Giant1G => b'1',
        GuestMapping::Mixed => b'?',
    };
    // From the smallest to the largest; an unknown size stays unknown unless the host allows only base pages.
    let rank = |letter: u8| b".4?21".iter().position(|known| *known == letter);
    if rank(host) <= rank(guest) { host } else { guest }
}

/// Only instants at which something changed, and the last; at most as many as a file and a picture can hold.
fn thinned(mut columns: Vec<MapColumn>) -> Vec<MapColumn> {
    let last = columns.pop();
    columns.dedup_by(|now, before| {
        let of = |column: &MapColumn| {
            (column.kvm_pages, column.backing.clone(), column.heat.clone(), column.second_level.clone())
        };
        of(now) == of(before)
    });
    let windows = last.as_ref().map_or(1, |column| column.backing.len().max(1));
    let columns_max = (LETTERS_MAX / windows).clamp(1, COLUMNS_MAX);
    let step = columns.len().div_ceil(columns_max).max(1);
    columns.into_iter().step_by(step).chain(last).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use wideleaf_policies::action::Action;
    use wideleaf_policies::budget::{BudgetLimits, Cost};
    use wideleaf_policies::outcome::{Outcome, OutcomeResult};
    use wideleaf_policies::recording::{Encoder, Header, VmHeader};
    use wideleaf_policies::snapshot::{Snapshot, VmId};
    use wideleaf_policies::{Bytes, Moment, WindowIndex};

    use super::*;

    const VM: VmId = VmId(0);

    fn view(paging: &str, guest_page: &str) -> View {
        View { began_at_s: 1.0, paging: paging.into(), guest_page: guest_page.into() }
    }

    fn row(window: u64, backing: Backing) -> WindowRow {
        let resident = if backing == Backing::Unbacked { 0 } else { 512 };
        WindowRow::new(WindowIndex::new(window), resident, backing)
    }

    /// A recording of these samples, one per second, with one collapse after each.
    fn recording(looks: &[Vec<WindowRow>]) -> Vec<u8> {
        let vm = VmHeader { vm: VM, backing: "anon".into(), start_page: PageSize::Base4K, ranges: vec![] };
        let header = Header { policy: "auto".into(), limits: BudgetLimits::default(), vms: vec![vm], facts: vec![] };
        let mut bytes = Vec::new();
        let mut encoder = Encoder::start(&header, &mut bytes).expect("few windows");
        for (second, rows) in looks.iter().enumerate() {
            let mut vm = VmSnapshot::with_capacity(VM, rows.len());
            rows.iter().for_each(|row| vm.push(*row));
            vm.mapping = Some(MappingStats { pages_4k: 7, pages_2m: 1, pages_1g: 0 });
            let at = Moment::after_start(Duration::from_secs(second as u64 + 1));
            encoder.snapshot(at, &Snapshot { host: None, vms: vec![vm] }, &mut bytes);
            let action = Action::Promote { vm: VM, window: WindowIndex::new(4), to: PageSize::Huge2M };
            let cost = Cost { copied: Bytes::ZERO, cpu: Duration::from_millis(2) };
            let unavailable = Duration::from_micros(100 * (second as u64 + 1));
            let outcome = Outcome { action, at, cost, unavailable, result: OutcomeResult::Done };
            encoder.outcome("collapse", &outcome, &mut bytes);
        }
        encoder.end(&mut bytes);
        bytes
    }

    #[test]
    fn a_recording_becomes_columns_since_the_timed_part_began_and_costs() {
        let touched = WindowRow { access: AccessHistory::from_parts(0b01, 2), ..row(4, Backing::Base4K) };
        let looks = [vec![touched, row(6, Backing::Unbacked)], vec![row(4, Backing::Huge2M), row(6, Backing::Base4K)]];
        let recorded = decode(&recording(&looks), &view("ept", "4k")).expect("whole");
        let map = recorded.map.expect("three windows");
        assert_eq!(map.first_window, 4);
        let columns: Vec<_> = map.columns.iter().map(|c| (c.at_s, c.backing.as_str(), c.heat.as_str())).collect();
        // Between the two windows there is no RAM. Half of the samples: 9 × 0.5, rounded.
        assert_eq!(columns, [(0.0, "4 .", "5  "), (1.0, "2 4", "   ")]);
        assert_eq!(map.columns[0].kvm_pages, Some([7, 1, 0]));
        let costs = Actions { count: 2, cpu_ms: Some(4.0), unavailable_max_us: Some(200.0) };
        assert_eq!(recorded.actions, BTreeMap::from([("collapse.done".to_owned(), costs)]));
    }

    #[test]
    fn the_second_level_is_the_smaller_of_guest_and_host_if_tables_are_shadowed() {
        let huge = row(0, Backing::Huge2M);
        let guest = |guest_mapping| WindowRow { guest_mapping, ..huge };
        let shadow = |row: &WindowRow, guest_page: &str| char::from(inferred(row, &view("shadow", guest_page)));
        assert_eq!(
            [shadow(&huge, "4k"), shadow(&huge, "2m"), shadow(&huge, "1g"), shadow(&huge, "odd")],
            ['4', '2', '2', '?']
        );
        let by_sensor = [GuestMapping::Unmapped, GuestMapping::Base4K, GuestMapping::Giant1G, GuestMapping::Mixed];
        assert_eq!(by_sensor.map(|mapping| shadow(&guest(mapping), "2m")), ['.', '4', '2', '?']);
        assert_eq!(shadow(&row(0, Backing::Base4K), "odd"), '4', "no more than the host has, whatever the guest maps");
        let ept = |row: &WindowRow| char::from(inferred(row, &view("ept", "4k")));
        assert_eq!([ept(&huge), ept(&WindowRow { is_held: true, ..huge })], ['2', '4']);
    }

    #[test]
    fn unchanged_samples_are_one_column_and_the_last_is_always_present() {
        let looks = vec![vec![row(0, Backing::Base4K)]; 9];
        let map = decode(&recording(&looks), &view("ept", "2m")).expect("whole").map.expect("one window");
        assert_eq!(map.columns.iter().map(|column| column.at_s).collect::<Vec<_>>(), [0.0, 8.0]);
    }

    #[test]
    fn a_long_recording_of_many_windows_is_thinned_out() {
        let column = |second: usize| MapColumn {
            at_s: second as f64,
            backing: if second.is_multiple_of(2) { "4" } else { "2" }.repeat(4096),
            ..MapColumn::default()
        };
        let kept = thinned((0..500).map(column).collect());
        assert!(kept.len() * 4096 <= LETTERS_MAX + 4096 && kept.len() > 20, "{}", kept.len());
        assert_eq!(kept.last().map(|column| column.at_s), Some(499.0));
    }

    #[test]
    fn a_cut_recording_is_good_up_to_the_cut_and_a_damaged_one_is_refused() {
        let whole = recording(&[vec![row(0, Backing::Base4K)], vec![row(0, Backing::Huge2M)]]);
        let cut = decode(&whole[..whole.len() - 4], &view("ept", "2m")).expect("good up to there");
        assert_eq!(cut.map.expect("one window").columns.len(), 2);
        assert_eq!(decode(b"nothing", &view("ept", "2m")), Err(DecodeError::NoRecording));
    }
}
