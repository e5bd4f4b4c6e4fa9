//! Agreement between the inferred second-level mappings and KVM's counters. The inference is per window;
//! the counters are totals.

use crate::results::{MapColumn, MemoryMap};

/// Both numbers at the last instant at which both are known, and their largest difference at any instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Number of windows inferred to have one 2 MiB entry.
    pub inferred_2m: u64,
    /// KVM's leaf mappings of 2 MiB.
    pub counted_2m: u64,
    /// Largest difference between the two at any instant.
    pub difference_max: u64,
}

/// Agreement at the last instant at which both are known; `None` if that never happens.
pub fn agreement(map: &MemoryMap) -> Option<Agreement> {
    let both: Vec<(u64, u64)> = map.columns.iter().filter_map(both_of).collect();
    let (inferred_2m, counted_2m) = *both.last()?;
    let difference_max = both.iter().map(|(inferred, counted)| inferred.abs_diff(*counted)).max().unwrap_or(0);
    Some(Agreement { inferred_2m, counted_2m, difference_max })
}

fn both_of(column: &MapColumn) -> Option<(u64, u64)> {
    let counted = column.kvm_pages?[1];
    let is_known = !column.second_level.is_empty() && !column.second_level.contains('?');
    is_known.then(|| (column.second_level.bytes().filter(|letter| *letter == b'2').count() as u64, counted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_is_kept_and_unknown_windows_are_not_compared() {
        let column = |second_level: &str, pages_2m| MapColumn {
            second_level: second_level.into(),
            kvm_pages: Some([0, pages_2m, 0]),
            ..MapColumn::default()
        };
        let map = |columns| MemoryMap { first_window: 0, columns };
        let seen = agreement(&map(vec![column("4422", 0), column("2224", 4), column("?222", 9)]));
        assert_eq!(seen, Some(Agreement { inferred_2m: 3, counted_2m: 4, difference_max: 2 }));
        assert_eq!(agreement(&map(vec![column("????", 4), column("", 4)])), None);
    }
}
