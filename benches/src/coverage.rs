//! Share of a guest's RAM that is backed and mapped large, measured from outside the manager.
//!
//! A window that an access sensor has detached at that moment appears unbacked. Coverage is therefore slightly
//! too low while a manager samples, and never too high. For an exact value, the caller asks the manager to have
//! all windows in place.

use wideleaf_memory::sensors::host_backing::HostBackingSensor;
use wideleaf_memory::{BackingKind, GuestRam, LinuxHost, SecondLevel};
use wideleaf_policies::account::HostBacking;
use wideleaf_policies::{GpaRange, PageSize, PerTenThousand};

use crate::scenario::ScenarioError;

/// Coverage that counts as all: 99 %.
pub const NEARLY_ALL: PerTenThousand = PerTenThousand::new(9_900);

/// Coverage that counts as nothing: less than 5 %, one window of 64 MiB.
pub const HARDLY_ANY: PerTenThousand = PerTenThousand::new(500);

/// Checks that memory of this coverage is on base pages before the clock of its promotion starts.
///
/// # Errors
/// [`ScenarioError::Failed`] if it is not; `refusal` is what the kernel said to a split.
pub fn needs_base_pages(coverage: PerTenThousand, refusal: Option<&str>) -> Result<(), ScenarioError> {
    if coverage < HARDLY_ANY {
        return Ok(());
    }
    let percent = coverage.as_fraction() * 100.0;
    let refusal = refusal.map_or_else(String::new, |refusal| format!(" ({refusal})"));
    Err(ScenarioError::Failed(format!(
        "cannot time a promotion: {percent:.0} % of the memory is still on huge pages after a split of each{refusal}; \
         give the host's khugepaged longer pauses and run the bench again"
    )))
}

/// Host backing of the windows of `part`.
///
/// # Panics
/// If the kernel has no `PAGEMAP_SCAN`.
pub fn host_backing(ram: &GuestRam, part: GpaRange) -> HostBacking {
    let host = LinuxHost::open().expect("/proc is mounted");
    let backing = ram.backing();
    let fixed_page = (backing.kind() == BackingKind::Hugetlb).then_some(backing.start_page());
    let mut sum = HostBacking::default();
    for range in ram.ranges().iter().filter_map(|range| range.part(part)) {
        let mut sensor = HostBackingSensor::default();
        let windows = sensor.sample(&host, range, fixed_page).expect("a kernel with PAGEMAP_SCAN");
        windows.for_each(|window| sum.add_window(window.resident, window.backing));
    }
    sum
}

/// Host backing of all of a guest's RAM.
pub fn host_backing_of_all(ram: &GuestRam) -> HostBacking {
    let (first, last) = (ram.ranges()[0].gpa, ram.ranges()[ram.ranges().len() - 1].gpa);
    let all = GpaRange::new(first.start(), last.end() - first.start()).expect("a guest's RAM fits 64 bits");
    host_backing(ram, all)
}

/// Share of `part` that the host backs with pages of 2 MiB or more.
pub fn host_coverage(ram: &GuestRam, part: GpaRange) -> PerTenThousand {
    let backing = host_backing(ram, part);
    PerTenThousand::of((backing.huge_2m + backing.giant_1g).get(), part.bytes().get())
}

/// Number of windows in the whole guest that KVM maps large.
///
/// # Panics
/// If KVM does not report its mappings.
pub fn windows_mapped_large(second_level: &dyn SecondLevel) -> u64 {
    let stats = second_level.mapping_stats().expect("KVM counts its mappings");
    stats.pages_2m + stats.pages_1g * PageSize::Giant1G.bytes().pages(PageSize::Huge2M)
}

/// Whether nearly all of `part` is backed with large pages, and KVM maps nearly `mapped` windows large.
pub fn is_nearly_all_large(ram: &GuestRam, part: GpaRange, second_level: &dyn SecondLevel, mapped: u64) -> bool {
    windows_mapped_large(second_level) * 10_000 >= mapped * u64::from(NEARLY_ALL.get())
        && host_coverage(ram, part) >= NEARLY_ALL
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promotion_is_not_timed_where_it_is_over_before() {
        let told =
            |coverage, refusal| needs_base_pages(PerTenThousand::new(coverage), refusal).map_err(|e| e.to_string());
        assert_eq!(told(499, None), Ok(()));
        assert_eq!(told(0, Some("EAGAIN")), Ok(()), "a split that was refused and not needed");
        let line = told(500, Some("EAGAIN")).expect_err("5 % is too much");
        assert!(line.starts_with("cannot time a promotion: 5 % ") && line.contains("(EAGAIN)"), "{line}");
        assert!(told(10_000, None).is_err_and(|line| line.len() < 200 && line.contains("100 %")));
    }
}
