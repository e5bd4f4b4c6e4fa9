//! Windows on folios between 4 KiB and 2 MiB (multi-size THP), on the kernel that this runs on. Page tables map them by
//! entries of 4 KiB, and so does KVM: the sensors must count base pages, and the actuators must act on them as on base
//! pages. Needs root and a kernel with folios of 64 KiB.

use std::fs;
use std::path::Path;

use crate::collapse_in_some_attempts;
use wideleaf_memory::actuators::split::split_window;
use wideleaf_memory::host::{Host as _, PageRun};
use wideleaf_memory::{BackingKind, LinuxHost, RamRange};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, OutcomeResult, WindowIndex};

const FOLDER: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB";
const WINDOW: usize = 2 << 20;

/// Minimum number of folios of 64 KiB in a window of 32 of them: where the allocator's own words were first, or memory
/// of that order is short, the kernel takes smaller ones.
const FOLIOS_LEAST: u64 = 16;

/// The setting of the size, restored on drop.
struct Always(String);

impl Always {
    fn set() -> Result<Always, String> {
        let enabled = Path::new(FOLDER).join("enabled");
        let text = |error: std::io::Error| format!("{}: {error}", enabled.display());
        let setting = fs::read_to_string(&enabled).map_err(text)?;
        let chosen = setting.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        let before = chosen.ok_or("no setting is chosen")?.0.to_owned();
        fs::write(&enabled, "always").map_err(text)?;
        Ok(Always(before))
    }
}

impl Drop for Always {
    fn drop(&mut self) {
        fs::write(Path::new(FOLDER).join("enabled"), &self.0).unwrap();
    }
}

fn made_at_faults() -> u64 {
    let count = fs::read_to_string(Path::new(FOLDER).join("stats/anon_fault_alloc")).unwrap();
    count.trim().parse().unwrap()
}

/// Memory without advice: at its faults the kernel makes folios of 64 KiB while the size is on.
fn one_window(words: &mut Vec<u64>) -> RamRange {
    *words = Vec::with_capacity(2 * WINDOW / 8);
    let start = (words.as_ptr() as usize).next_multiple_of(WINDOW);
    let first = (start - words.as_ptr() as usize) / 8;
    // Touched in order: the allocator has only reserved it.
    words.extend(0..(first + WINDOW / 8) as u64);
    let gpa = GpaRange::new(Gpa::new(0), mib(2)).unwrap();
    RamRange { gpa, hva: Hva::new(start as u64) }
}

fn seen(host: &LinuxHost, range: RamRange) -> (Bytes, Bytes) {
    let mut runs: Vec<PageRun> = Vec::new();
    host.scan(range.hva, mib(2), &mut runs).unwrap();
    let of = |is_huge| runs.iter().filter(|run| run.is_huge == is_huge).map(|run| run.bytes).sum();
    (of(false), of(true))
}

#[test]
fn a_window_on_folios_of_64_kib_is_on_base_pages_and_collapses_and_splits_as_one() {
    let before = fs::read_to_string(Path::new(FOLDER).join("enabled"));
    let always = match Always::set() {
        Ok(always) => always,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let (host, first, mut words) = (LinuxHost::open().unwrap(), made_at_faults(), Vec::new());
    let range = one_window(&mut words);
    let made = made_at_faults() - first;
    drop(always);
    assert_eq!(fs::read_to_string(Path::new(FOLDER).join("enabled")).ok(), before.ok());
    if made < FOLIOS_LEAST {
        println!("skipped: the kernel made {made} folios of 64 KiB for a window of 32");
        return;
    }
    assert_eq!(seen(&host, range), (mib(2), Bytes::ZERO), "{made} folios of 64 KiB");
    let window = WindowIndex::new(0);
    // There is no huge page to split.
    assert_ne!(split_window(&host, BackingKind::Anon, range, window).result, OutcomeResult::Done);
    let collapse = collapse_in_some_attempts(&host, range, 0);
    assert_eq!(collapse.result, OutcomeResult::Done, "{collapse:?}");
    assert_eq!(seen(&host, range), (Bytes::ZERO, mib(2)));
    let split = split_window(&host, BackingKind::Anon, range, window);
    assert_eq!(split.result, OutcomeResult::Done, "{split:?}");
    assert_eq!(seen(&host, range), (mib(2), Bytes::ZERO));
    assert!(words.iter().enumerate().all(|(index, word)| *word == index as u64), "no word is lost");
}
