//! What a process undoes that a signal ends. In a program of its own: afterwards this process makes no file any more.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::sync::mpsc;
use std::time::Duration;

use tempfile::NamedTempFile;
use wideleaf_run::undo::{self, TemporaryFile, TemporaryFolder};

#[test]
fn files_are_removed_at_the_end_but_for_those_with_a_name_and_none_is_made_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let new = |folder: &std::path::Path| TemporaryFile::new(|| NamedTempFile::new_in(folder));
    let stays = new(&path).unwrap();
    new(&path).unwrap().persist(&path.join("kept")).unwrap();
    drop(new(&path).unwrap());
    let held = TemporaryFolder::new().unwrap();
    undo::all();
    let names = || fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(names(), ["kept"]);
    assert!(!held.path().exists());
    // A thread that is late waits until the process has ended.
    let (made, is_made) = mpsc::channel();
    let late = path.clone();
    std::thread::spawn(move || made.send(new(&late).is_ok()));
    assert!(is_made.recv_timeout(Duration::from_millis(300)).is_err());
    assert_eq!(names(), ["kept"]);
    // The list stays locked, and their entries are gone.
    std::mem::forget((stays, held));
}
