//! Resources that this process holds, read from `/proc/self`, for tests that check that all of them are given back.

use std::fs;

use wideleaf_policies::Bytes;
use wideleaf_policies::units::kib;

/// Amounts of held resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Number of threads.
    pub threads: u64,
    /// Number of open files.
    pub files: u64,
    /// Number of mappings (VMAs).
    pub mappings: u64,
    /// Resident memory, without hugetlb pages.
    pub resident: Bytes,
    /// Mapped pages of the hugetlb pools. The pools' own counters also move when other processes take pages.
    pub hugetlb: Bytes,
}

impl Holdings {
    /// Reads the current amounts from `/proc/self` (proc_pid_status(5)).
    ///
    /// # Panics
    /// Panics if `/proc` is not mounted, or has another format.
    pub fn now() -> Holdings {
        let status = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel writes this line");
            line.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
        };
        Holdings {
            threads: field("Threads:"),
            files: fs::read_dir("/proc/self/fd").expect("/proc is mounted").count() as u64,
            mappings: fs::read_to_string("/proc/self/maps").expect("/proc is mounted").lines().count() as u64,
            resident: kib(field("VmRSS:")),
            hugetlb: kib(field("HugetlbPages:")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize};

    #[test]
    fn an_additional_mapping_and_file_are_counted() {
        let before = Holdings::now();
        let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).expect("exists");
        let range = GpaRange::new(Gpa::new(0), mib(2)).expect("fits");
        let ram = GuestRam::map(&[range], backing).expect("two mebibytes");
        let file = fs::File::open("/proc/self/status").expect("/proc is mounted");
        let after = Holdings::now();
        drop((ram, file));
        assert!(after.mappings > before.mappings && after.files > before.files, "{before:?}, {after:?}");
        assert!(after.threads >= 2, "the test's own and the harness's: {after:?}");
    }
}
