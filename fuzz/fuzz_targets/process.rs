//! Input: the files of a process in `/proc`. The map of guest RAM that is inferred from them has pieces that ascend and
//! do not overlap. The files are written into one temporary folder; no process of this host is read.
//!
//! ```text
//!   input = cmdline ␌ smaps ␌ status ␌ mountinfo      (␌: a form feed; what is missing is empty)
//! ```
#![no_main]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use wideleaf_attach::ram::map;
use wideleaf_attach::{Places, VmProcess};
use wideleaf_memory::sensors::smaps::resident_memory;

const PID: u32 = 7;
const FILES: [&str; 4] = ["cmdline", "smaps", "status", "mountinfo"];

/// Folder under `TMPDIR`. libFuzzer ends without dropping it: `run` removes it.
static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let process = folder.path().join(PID.to_string());
    fs::create_dir_all(process.join("fd")).expect("the folder is new");
    symlink("anon_inode:kvm-vm", process.join("fd/3")).expect("the link is new");
    let stat = format!("{PID} (qemu) S 1 1 1 0 -1 4194304 1 0 0 0 1 1 0 0 20 0 4 0 4711 1 1{}", " 0".repeat(28));
    fs::write(process.join("stat"), stat).expect("written");
    folder
});

fuzz_target!(|bytes: &[u8]| {
    let process = FOLDER.path().join(PID.to_string());
    let mut parts = bytes.split(|byte| *byte == b'\x0c');
    for file in FILES {
        fs::write(process.join(file), parts.next().unwrap_or_default()).expect("written");
    }
    let nowhere = PathBuf::from("/nonexistent");
    let places = Places { proc: FOLDER.path().into(), libvirt: nowhere.clone(), sys: nowhere, libvirt_uid: 0 };
    if let Ok(Some(guest)) = VmProcess::look(&places, PID) {
        let ram = map(&guest, None);
        let _ = ram.bytes();
        let is_apart = |pair: &[_]| matches!(pair, [one, next] if ends_before(one, next));
        assert!(ram.pieces.windows(2).all(is_apart), "{:?}", ram.pieces);
        let _ = guest.status();
    }
    let _ = resident_memory(&String::from_utf8_lossy(bytes), &[]);
});

fn ends_before(one: &wideleaf_attach::ram::RamPiece, next: &wideleaf_attach::ram::RamPiece) -> bool {
    one.range.gpa.end() <= next.range.gpa.start()
}
