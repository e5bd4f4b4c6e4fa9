//! `/proc/<pid>/smaps` (proc(5)): resident memory of the process, and which part of it is guest RAM.

use wideleaf_policies::{Bytes, Hva};

/// Resident memory of a process, split at guest RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidentMemory {
    /// Resident bytes inside the given ranges: `Rss`, without hugetlb pages (which smaps counts separately).
    pub guest_ram: Bytes,
    /// Bytes of huge pages of THP inside the given ranges, mapped as such (`AnonHugePages` and `ShmemPmdMapped`).
    pub guest_ram_thp: Bytes,
    /// All other resident bytes of the process.
    pub beyond_guest_ram: Bytes,
}

/// A line that cannot be parsed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("smaps line {line}: expected {expected}, found {text:?}")]
pub struct SmapsError {
    /// Line number, counted from one.
    pub line: usize,
    /// Kind of text that was expected.
    pub expected: &'static str,
    /// Text of the line.
    pub text: String,
}

/// Adds up the text of an smaps file; `guest_ram` are the ranges with the guest's RAM.
///
/// # Errors
/// [`SmapsError`] for the first line that is neither a mapping nor a field.
pub fn resident_memory(smaps: &str, guest_ram: &[(Hva, Bytes)]) -> Result<ResidentMemory, SmapsError> {
    let mut sum = ResidentMemory::default();
    let mut is_guest_ram = false;
    for (number, line) in smaps.lines().enumerate() {
        let error = |expected| SmapsError { line: number + 1, expected, text: line.to_owned() };
        let (name, rest) = line.split_once(|c: char| c.is_ascii_whitespace()).unwrap_or((line, ""));
        let Some(field) = name.strip_suffix(':') else {
            let start = parse_mapping_start(name).ok_or_else(|| error("a mapping"))?;
            is_guest_ram = guest_ram.iter().any(|(ram, bytes)| *ram <= start && start < *ram + *bytes);
            continue;
        };
        let into = match (field, is_guest_ram) {
            ("Rss", true) => &mut sum.guest_ram,
            ("Rss", false) => &mut sum.beyond_guest_ram,
            ("AnonHugePages" | "ShmemPmdMapped", true) => &mut sum.guest_ram_thp,
            _ => continue,
        };
        let sum_of = |kibibytes: u64| into.checked_add(Bytes::new(kibibytes.checked_mul(1024)?));
        let sum = rest.trim().strip_suffix(" kB").and_then(|n| sum_of(n.parse().ok()?));
        *into = sum.ok_or_else(|| error("a number of kB with a sum below 2^64 bytes"))?;
    }
    Ok(sum)
}

fn parse_mapping_start(range: &str) -> Option<Hva> {
    let (start, end) = range.split_once('-')?;
    u64::from_str_radix(end, 16).ok()?;
    u64::from_str_radix(start, 16).ok().map(Hva::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::{kib, mib};

    const SMAPS: &str = "\
55d0c0000000-55d0c0100000 r-xp 00000000 08:01 42    /usr/bin/wideleaf
Size:               1024 kB
Rss:                 512 kB
AnonHugePages:         0 kB
VmFlags: rd ex mr mw me
7f0040000000-7f0048000000 rw-p 00000000 00:00 0
Size:             131072 kB
Rss:               65536 kB
AnonHugePages:     40960 kB
VmFlags: rd wr mr mw me ac sd hg
7f0048000000-7f0048800000 rw-p 00000000 00:00 0
Rss:                  12 kB
";

    #[test]
    fn guest_ram_and_other_memory_are_counted_separately() {
        let memory = resident_memory(SMAPS, &[(Hva::new(0x7f00_4000_0000), mib(128))]).expect("well formed");
        assert_eq!(memory.guest_ram, mib(64));
        assert_eq!(memory.guest_ram_thp, mib(40));
        assert_eq!(memory.beyond_guest_ram, kib(524));
    }

    #[test]
    fn a_malformed_line_is_named() {
        let error = resident_memory("nonsense\n", &[]).expect_err("not a mapping");
        assert_eq!((error.line, error.expected), (1, "a mapping"));
        let error = resident_memory("1000-2000 rw-p\nRss: lots\n", &[]).expect_err("not a number");
        assert_eq!((error.line, error.expected), (2, "a number of kB with a sum below 2^64 bytes"));
    }

    #[test]
    fn a_number_that_exceeds_64_bits_is_named() {
        for text in
            ["1000-2000 rw-p\nRss: 18014398509481984 kB\n", "1000-2000 rw-p\nRss: 18014398509481983 kB\nRss: 1 kB\n"]
        {
            let error = resident_memory(text, &[]).expect_err("2^64 bytes");
            assert_eq!(error.line, text.lines().count());
        }
    }

    #[test]
    fn an_empty_file_is_nothing_resident() {
        assert_eq!(resident_memory("", &[]), Ok(ResidentMemory::default()));
    }
}
