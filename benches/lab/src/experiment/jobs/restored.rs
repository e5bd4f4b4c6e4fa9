//! Saves a guest, and continues it in one of several ways, watched from outside until it is at full speed.
//!
//! ```text
//!   kept from run to run:  the snapshot of `wideleaf run`, QEMU's file            one for all ways of a round
//!   each run:   file cold or warm ─ read once ─ free memory warmed ─▶ process ─▶ marks, looks at the hot set ─▶ ended
//! ```
//!
//! Everything ends with this process, and is removed with it.

use std::path::Path;
use std::time::Duration;

use wideleaf_experiments::disturbance::WATCHED_S;
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::peers::Guest;
use wideleaf_experiments::restoring::speeds::Speeds;
use wideleaf_experiments::restoring::{
    CACHED_PERCENT, FIRST_PROGRESS_S, HUGE_AT_FIRST_PERCENT, READ_BYTES_PER_S, RestoredGuest, Way,
};
use wideleaf_experiments::results::{Measured, Sample};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

use crate::experiment::host_state::warm_memory;

mod file;
mod hot_set;
mod ours;
mod qemu;

/// Time that a process may need beyond what it is watched for: its start, and its end.
const BESIDE: Duration = Duration::from_secs(120);
/// Interval at which processes and consoles are looked at.
const PACE: Duration = Duration::from_millis(5);

/// Saved guests that later runs continue too.
#[derive(Debug, Default)]
pub(super) struct SavedGuests {
    ours: Option<(Guest, ours::Snapshot)>,
    qemu: Option<(Guest, qemu::SavedFile)>,
}

/// What was seen of a guest that continued.
#[derive(Debug, Default)]
struct Continued {
    /// Progress marks: seconds since the process began, and units of work.
    marks: Vec<(f64, u64)>,
    /// Looks at the hot set.
    looks: Vec<Look>,
    told: Vec<(&'static str, f64)>,
}

/// The hot set at one instant.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Look {
    /// Time since the process began, in seconds.
    at_s: f64,
    /// Windows that have a page.
    windows: u64,
    windows_large: u64,
    base_mib: f64,
    huge_mib: f64,
}

/// The share of the hot set that is large at a look, in per cent of the windows that have a page at some look: those
/// that are still missing count, and those that never hold anything do not.
fn percent_large(look: &Look, looks: &[Look]) -> f64 {
    let windows = looks.iter().map(|look| look.windows).max().unwrap_or_default();
    look.windows_large as f64 * 100.0 / windows.max(1) as f64
}

/// Continues the guest, after it was saved if no earlier run did so.
pub(super) fn run(work: &RestoredGuest, kept: &mut SavedGuests, interrupts: &Interrupts) -> Result<Measured, Failure> {
    let SavedGuests { ours, qemu } = kept;
    let continued = match work.way {
        Way::NeverSaved => ours::never_saved(work, interrupts)?,
        Way::Qemu => {
            let saved = kept_of(qemu, &work.guest, || qemu::save(work, interrupts))?;
            let (path, told) = (saved.path(), saved.told().to_vec());
            with_file(work, &path, told, || qemu::restore(work, saved, interrupts))?
        }
        Way::Moved | Way::MovedInOrder | Way::MovedCached | Way::CopiedByPage | Way::Mapped => {
            let saved = kept_of(ours, &work.guest, || ours::save(work, interrupts))?;
            if work.way == Way::MovedInOrder {
                saved.record(work, interrupts)?;
            }
            let (path, told) = (saved.memory(), saved.told().to_vec());
            with_file(work, &path, told, || ours::restore(work, saved, interrupts))?
        }
    };
    measured(&continued)
}

/// The saved guest that is kept, or a new one: the old one is removed first.
fn kept_of<'k, T>(
    kept: &'k mut Option<(Guest, T)>,
    guest: &Guest,
    save: impl FnOnce() -> Result<T, Failure>,
) -> Result<&'k mut T, Failure> {
    if kept.as_ref().is_none_or(|(of, _)| of != guest) {
        *kept = None;
        *kept = Some((guest.clone(), save()?));
    }
    Ok(kept.as_mut().map(|(_, saved)| saved).expect("it was just put there"))
}

/// Brings the file into its state, warms the memory that the guest takes, and continues it. The memory was warmed
/// before this job too, but a save or a cold file takes seconds.
fn with_file(
    work: &RestoredGuest,
    path: &Path,
    told: Vec<(&'static str, f64)>,
    restore: impl FnOnce() -> Result<Continued, Failure>,
) -> Result<Continued, Failure> {
    let file = file::prepare(path, work.cache)?;
    warm_memory(work.guest.memory_mib)?;
    let mut continued = restore()?;
    continued.told.extend(told);
    continued.told.extend([(READ_BYTES_PER_S, file.read_bytes_per_s), (CACHED_PERCENT, file.cached_percent)]);
    Ok(continued)
}

/// Speeds and the looks as the measurements of the run: T99 depends on the other rounds too.
fn measured(continued: &Continued) -> Result<Measured, Failure> {
    let Continued { marks, looks, told } = continued;
    let speeds = Speeds::of(marks);
    let (Some(steady), Some(first), Some(last)) = (speeds.steady(), marks.first(), marks.last()) else {
        return Err(Failure::Host(format!(
            "cannot measure the steady speed: the guest made {} marks of progress, too few; run it on a machine with \
             less other work",
            marks.len()
        )));
    };
    let mut measured = Measured::default();
    measured.metrics.insert(Metric::Figure, steady);
    measured.metrics.extend(looks.last().map(|look| (Metric::CoveragePercent, percent_large(look, looks))));
    let mut tell = |name: &str, value: Option<f64>| {
        measured.told.extend(value.map(|value| (name.to_owned(), value)));
    };
    let look = speeds.first_s().and_then(|first_s| looks.iter().find(|look| look.at_s >= first_s));
    tell(FIRST_PROGRESS_S, Some(first.0));
    tell(WATCHED_S, Some(last.0));
    tell(HUGE_AT_FIRST_PERCENT, look.map(|look| percent_large(look, looks)));
    told.iter().for_each(|(name, value)| tell(name, Some(*value)));
    measured.series = series(&speeds, looks);
    Ok(measured)
}

/// Speeds and looks in the order of time.
fn series(speeds: &Speeds, looks: &[Look]) -> Vec<Sample> {
    let of_interval = |(at_s, rate): &(f64, f64)| Sample { at_s: *at_s, rate_per_s: Some(*rate), ..Sample::default() };
    let of_look = |look: &Look| {
        let Look { at_s, base_mib, huge_mib, .. } = *look;
        Sample { at_s, base_mib, huge_mib, ..Sample::default() }
    };
    let mut series: Vec<Sample> = speeds.intervals().iter().map(of_interval).chain(looks.iter().map(of_look)).collect();
    series.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    series
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A look at 100 windows, of which the large ones have pages.
    fn look(at_s: f64, windows_large: u64) -> Look {
        Look { at_s, windows: windows_large, windows_large, base_mib: 0.0, huge_mib: 2.0 * windows_large as f64 }
    }

    #[test]
    fn the_hot_set_counts_as_it_was_at_the_first_look_from_full_speed_on() {
        // Full speed from 0.3 s on.
        let marks: Vec<(f64, u64)> = (0..=40).map(|n: u64| (0.1 * n as f64, n.saturating_sub(3) * 500)).collect();
        let looks = vec![look(0.0, 0), look(0.25, 90), look(0.35, 99), look(3.0, 100)];
        let continued = Continued { marks, looks, told: vec![(READ_BYTES_PER_S, 7.0)] };
        let measured = measured(&continued).expect("it has a steady speed");
        let told = |name: &str| measured.told.get(name).map(|value| (value * 1e3).round() / 1e3);
        assert_eq!(told(FIRST_PROGRESS_S), Some(0.0));
        assert_eq!((told(HUGE_AT_FIRST_PERCENT), told(READ_BYTES_PER_S)), (Some(99.0), Some(7.0)));
        assert_eq!(measured.metrics.get(&Metric::CoveragePercent), Some(&100.0));
        assert_eq!(measured.series.len(), 40 + 4);
        assert!(measured.series.is_sorted_by(|a, b| a.at_s <= b.at_s));
    }

    #[test]
    fn a_guest_without_progress_has_failed() {
        let error = measured(&Continued::default()).expect_err("no marks").to_string();
        assert!(error.contains("made 0 marks of progress"), "{error}");
    }

    #[test]
    fn a_saved_guest_is_kept_for_the_same_guest_and_removed_before_another_is_saved() {
        let mut kept = None;
        let guest = |line: &str| Guest::new("gups", line, 64);
        let mut saves = 0;
        for (line, expected) in [("a", 1), ("a", 1), ("b", 2), ("a", 3)] {
            let saved = kept_of(&mut kept, &guest(line), || {
                saves += 1;
                Ok(saves)
            });
            assert_eq!(saved.map(|saved| *saved).map_err(|error| error.to_string()), Ok(expected));
        }
        let failed = kept_of(&mut kept, &guest("c"), || Err(Failure::Host("no room".into())));
        assert!(failed.is_err() && kept.is_none(), "the old one is gone");
    }
}
