//! Samples of the accesses to windows in a snapshot: the manager of the run that continues begins with them, so that it
//! knows at once what is hot.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use wideleaf_memory::manager::{AccessesBefore, Live};
use wideleaf_policies::{AccessHistory, VmSnapshot, WindowIndex};

/// Largest number of windows with samples in a snapshot, 128 GiB: a list of these has 1.6 MB. Those with the newest
/// samples are kept.
const WINDOWS_MAX: usize = 1 << 16;

/// Samples by window, ascending.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(transparent)]
pub(crate) struct SavedAccesses(Vec<SavedWindow>);

/// Samples of one window: its index, a bit for each sample (the newest lowest), the number of samples, touches per
/// second, and the age of the newest sample in seconds.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct SavedWindow(u64, u16, u8, Option<u64>, u16);

impl SavedAccesses {
    /// What the manager knew at its latest look; nothing if no manager looks.
    pub(crate) fn of(live: Option<&Live>) -> SavedAccesses {
        live.and_then(|live| live.snapshot.vms.first()).map(SavedAccesses::of_vm).unwrap_or_default()
    }

    fn of_vm(vm: &VmSnapshot) -> SavedAccesses {
        let rows = vm.windows.iter().zip(&vm.access).zip(&vm.access_quality);
        // The result of a region is not kept as that of each of its windows.
        let sampled = rows.filter(|((_, history), quality)| history.samples() > 0 && quality.windows <= 1);
        let mut saved: Vec<_> = sampled
            .map(|((window, history), quality)| {
                let (touched, samples, frequency) = (history.touched(), history.samples(), history.touches_per_s());
                SavedWindow(window.get(), touched, samples, frequency, quality.age_s)
            })
            .collect();
        if saved.len() > WINDOWS_MAX {
            saved.sort_by_key(|saved| saved.4);
            saved.truncate(WINDOWS_MAX);
            saved.sort_by_key(|saved| saved.0);
        }
        SavedAccesses(saved)
    }

    /// The samples for the manager of the run that continues. A snapshot is not trusted: each value has its limits.
    pub(crate) fn before(&self) -> Vec<AccessesBefore> {
        let before = |SavedWindow(window, touched, samples, frequency, age_s): &SavedWindow| AccessesBefore {
            window: WindowIndex::new(*window),
            history: AccessHistory::from_parts(*touched, *samples).with_touches_per_s(*frequency),
            age: Duration::from_secs((*age_s).into()),
        };
        self.0.iter().take(WINDOWS_MAX).map(before).collect()
    }
}

#[cfg(test)]
mod tests {
    use wideleaf_policies::{Backing, SampleQuality, VmId, WindowRow};

    use super::*;

    /// A snapshot with these windows: number of samples, and age of the newest in seconds.
    fn vm(windows: &[(u8, u16)]) -> VmSnapshot {
        let mut vm = VmSnapshot::with_capacity(VmId(0), windows.len());
        for (index, &(samples, age_s)) in (0..).zip(windows) {
            let mut row = WindowRow::new(WindowIndex::new(index), 512, Backing::Base4K);
            row.access = AccessHistory::from_parts(0b101, samples);
            row.access_quality = SampleQuality { age_s, windows: 1 };
            vm.push(row);
        }
        vm
    }

    fn read_again(saved: &SavedAccesses) -> SavedAccesses {
        let text = serde_json::to_string(saved).expect("it is plain data");
        serde_json::from_str(&text).expect("it was written")
    }

    #[test]
    fn the_next_manager_begins_with_the_windows_that_were_sampled() {
        let saved = SavedAccesses::of_vm(&vm(&[(3, 9), (0, 0), (16, 600)]));
        let history = |samples| AccessHistory::from_parts(0b101, samples);
        let before = |window, samples, age| AccessesBefore {
            window: WindowIndex::new(window),
            history: history(samples),
            age: Duration::from_secs(age),
        };
        assert_eq!(read_again(&saved).before(), [before(0, 3, 9), before(2, 16, 600)]);
    }

    #[test]
    fn results_that_windows_share_are_not_saved_as_their_own() {
        let mut vm = vm(&[(3, 9), (4, 9)]);
        vm.access_quality[0].windows = 2;
        let windows: Vec<_> = SavedAccesses::of_vm(&vm).0.iter().map(|saved| saved.0).collect();
        assert_eq!(windows, [1]);
    }

    #[test]
    fn of_too_large_a_guest_the_newest_samples_are_kept_in_the_order_of_windows() {
        // The first window has the oldest sample.
        let samples = [vec![(1, 2)], vec![(1, 1); WINDOWS_MAX]].concat();
        let windows: Vec<_> = SavedAccesses::of_vm(&vm(&samples)).0.iter().map(|saved| saved.0).collect();
        assert_eq!((windows.len(), windows[0]), (WINDOWS_MAX, 1));
        assert!(windows.is_sorted());
    }

    #[test]
    fn a_forged_history_is_cut_to_what_a_history_can_be() {
        let text = "[[18446744073709551615,65535,255,18446744073709551615,65535]]";
        let forged: SavedAccesses = serde_json::from_str(text).expect("its form is valid");
        let history = forged.before()[0].history;
        assert_eq!(history.samples(), AccessHistory::SAMPLES_MAX);
        assert!(history.touches_per_s() <= Some(AccessHistory::TOUCHES_PER_S_MAX));
    }
}
