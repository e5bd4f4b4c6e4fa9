//! The files of one kdamond in a folder, as the kernel makes them, for tests.

use std::fs;

use super::kdamonds::KDAMONDS;

/// Address of the guest RAM in these tests.
pub const BASE: u64 = 1 << 40;

/// The files of one kdamond with one target of one range, and these regions, in MiB from [`BASE`] on, with
/// their accesses in the scheme.
pub fn tree(nr_kdamonds: &str, operations: &str, regions: &[(u64, u64, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a temporary folder");
    put(&root, "nr_kdamonds", nr_kdamonds);
    put(&root, "0/contexts/0/avail_operations", operations);
    for file in [
        "0/state",
        "0/contexts/nr_contexts",
        "0/contexts/0/operations",
        "0/contexts/0/monitoring_attrs/intervals/sample_us",
        "0/contexts/0/monitoring_attrs/intervals/aggr_us",
        "0/contexts/0/monitoring_attrs/nr_regions/min",
        "0/contexts/0/monitoring_attrs/nr_regions/max",
        "0/contexts/0/targets/nr_targets",
        "0/contexts/0/schemes/nr_schemes",
        "0/contexts/0/schemes/0/action",
        "0/contexts/0/schemes/0/apply_interval_us",
        "0/contexts/0/schemes/0/tried_regions/total_bytes",
    ] {
        put(&root, file, "0\n");
    }
    add_target(&root, 0, 1);
    for of in ["sz", "nr_accesses", "age"] {
        put(&root, &format!("0/contexts/0/schemes/0/access_pattern/{of}/min"), "0\n");
        put(&root, &format!("0/contexts/0/schemes/0/access_pattern/{of}/max"), "0\n");
    }
    for (number, (start, mib, accesses)) in regions.iter().enumerate() {
        add_region(&root, number, (BASE + (start << 20), BASE + ((start + mib) << 20)), accesses);
    }
    root
}

/// Adds the files of a target with this number of ranges.
pub fn add_target(root: &tempfile::TempDir, number: usize, ranges: usize) {
    let target = format!("0/contexts/0/targets/{number}");
    put(root, &format!("{target}/pid_target"), "0\n");
    put(root, &format!("{target}/regions/nr_regions"), "0\n");
    for range in 0..ranges {
        put(root, &format!("{target}/regions/{range}/start"), "0\n");
        put(root, &format!("{target}/regions/{range}/end"), "0\n");
    }
}

/// Adds a region to the results.
pub fn add_region(root: &tempfile::TempDir, number: usize, (start, end): (u64, u64), accesses: &str) {
    let region = format!("0/contexts/0/schemes/0/tried_regions/{number}");
    put(root, &format!("{region}/start"), &format!("{start}\n"));
    put(root, &format!("{region}/end"), &format!("{end}\n"));
    put(root, &format!("{region}/nr_accesses"), accesses);
}

/// Makes a file with its folder.
pub fn put(root: &tempfile::TempDir, file: &str, text: &str) {
    let path = root.path().join(KDAMONDS).join(file);
    fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
    fs::write(path, text).expect("a file");
}

/// Writes a file that is there.
pub fn say(root: &tempfile::TempDir, file: &str, text: &str) {
    assert!(root.path().join(KDAMONDS).join(file).exists(), "{file}");
    put(root, file, text);
}

/// The text of a file.
pub fn said(root: &tempfile::TempDir, file: &str) -> String {
    fs::read_to_string(root.path().join(KDAMONDS).join(file)).expect("a file")
}
