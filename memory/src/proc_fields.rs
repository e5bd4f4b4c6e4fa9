//! Fields in kB of files under `/proc`: `Name:   123 kB` (proc_meminfo(5), proc_pid_status(5)).

use wideleaf_policies::Bytes;
use wideleaf_policies::units::kib;

/// The number of the field `name`; `None` if there is no such field, or it is no number in kB.
pub(crate) fn bytes_of(text: &str, name: &str) -> Option<Bytes> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse().ok().map(kib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name_and_must_be_a_number_in_kb() {
        let text = "VmPTEs:\t 7 kB\nVmPTE:\t    2108 kB\nThreads:\t1\nVmSwap:\tmany kB\n";
        assert_eq!(bytes_of(text, "VmPTE"), Some(kib(2108)));
        for missing in ["VmRSS", "Threads", "VmSwap"] {
            assert_eq!(bytes_of(text, missing), None, "{missing}");
        }
    }
}
