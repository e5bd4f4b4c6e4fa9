//! What this process holds of its machine: for tests that want to see all of it given back.

use std::fs;

use wideleaf_policies::Bytes;
use wideleaf_policies::units::kib;

/// So much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Its threads.
    pub threads: u64,
    /// Its open files.
    pub files: u64,
    /// Its mappings (VMAs).
    pub mappings: u64,
    /// Its resident memory, hugetlb pages not counted.
    pub resident: Bytes,
    /// Pages of the hugetlb pools that it maps. The pools' own counters also move when other processes take pages.
    pub hugetlb: Bytes,
}

impl Holdings {
    /// Now, as `/proc/self` has it (proc_pid_status(5)).
    ///
    /// # Panics
    /// Where `/proc` is not mounted, or says something else.
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
    fn a_mapping_and_a_file_more_are_seen() {
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
