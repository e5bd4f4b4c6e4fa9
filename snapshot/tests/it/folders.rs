//! The folder of a snapshot: put whole, replaced whole, or not touched.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::*;

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

#[test]
fn a_finished_snapshot_is_all_that_is_left_and_only_its_owner_may_read_it() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    save(&folder, None, &some_pages());
    assert_eq!(names_in(scratch.path()), ["s"]);
    assert_eq!(names_in(&folder), ["machine.json", "memory", "windows"]);
    assert_eq!(mode(&folder), 0o700);
    assert!(names_in(&folder).iter().all(|file| mode(&folder.join(file)) == 0o600));
}

#[test]
fn a_snapshot_is_replaced_whole_and_its_readers_keep_it() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    save(&folder, None, &some_pages());
    let old = Opened::open(&folder, Caching::PageCache).unwrap();
    let next: Pages = [((2, 9), page_of(77))].into();
    let saving = begin(&folder, None);
    put(&saving.2, &next);
    assert_eq!(read(&folder).unwrap(), some_pages(), "until the end the old one is there");
    end(saving);
    assert_eq!((read(&folder).unwrap(), names_in(scratch.path())), (next, vec!["s".to_owned()]));
    let mut buffer = vec![0; WINDOW];
    old.read(WindowIndex::new(0), &mut buffer).unwrap();
    assert_eq!(buffer[..PAGE], page_of(1));
}

#[test]
fn the_files_that_a_reader_opens_are_of_one_snapshot_while_others_take_its_place() {
    let scratch = tempfile::tempdir().unwrap();
    let [folder, other] = ["s", "t"].map(|name| scratch.path().join(name));
    save(&folder, None, &some_pages());
    save(&other, None, &some_pages());
    let inodes = |files: &Files| {
        let Files { machine, layers } = files;
        [machine, &layers[0].windows, &layers[0].memory].map(|file| file.metadata().unwrap().ino())
    };
    let wholes = [&folder, &other].map(|folder| inodes(&Files::open(folder, Caching::PageCache).unwrap()));
    let is_over = AtomicBool::new(false);
    let exchange = || renameat2(AT_FDCWD, &folder, AT_FDCWD, &other, RenameFlags::RENAME_EXCHANGE).unwrap();
    let is_whole = |files: Files| wholes.contains(&inodes(&files));
    let all_whole = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                exchange();
            }
        });
        let all_whole = (0..5000).all(|_| Files::open(&folder, Caching::PageCache).is_ok_and(is_whole));
        is_over.store(true, Ordering::SeqCst);
        all_whole
    });
    assert!(all_whole, "two snapshots are mixed");
}

#[test]
fn an_empty_folder_is_taken() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    fs::create_dir(&folder).unwrap();
    save(&folder, None, &some_pages());
    assert_eq!((read(&folder).unwrap(), names_in(scratch.path())), (some_pages(), vec!["s".to_owned()]));
}

#[test]
fn nothing_but_a_snapshot_is_replaced() {
    let scratch = tempfile::tempdir().unwrap();
    let refusal = |name: &str| Writing::create(&scratch.path().join(name), None).unwrap_err().to_string();
    fs::create_dir(scratch.path().join("photos")).unwrap();
    fs::write(scratch.path().join("photos/cat.jpg"), "a cat").unwrap();
    assert!(
        refusal("photos")
            .ends_with("the folder exists and has cat.jpg, which is not part of a snapshot; choose another folder")
    );
    save(&scratch.path().join("s"), None, &some_pages());
    fs::write(scratch.path().join("s/notes"), "mine").unwrap();
    assert!(refusal("s").contains("has notes, which is not part of a snapshot"));
    fs::create_dir(scratch.path().join("other")).unwrap();
    fs::write(scratch.path().join("other/windows"), "glass").unwrap();
    assert!(refusal("other").ends_with("the folder exists and is not a snapshot; choose another folder, or remove it"));
    fs::write(scratch.path().join("file"), "text").unwrap();
    assert!(refusal("file").ends_with("it exists and is not a folder; choose another name"));
    std::os::unix::fs::symlink("photos", scratch.path().join("link")).unwrap();
    assert!(refusal("link").ends_with("it exists and is not a folder; choose another name"));
    assert!(refusal("link/").ends_with("it exists and is not a folder; choose another name"));
    assert!(refusal("..").contains("the path names no folder of its own"));
    assert!(refusal("no/such").contains("cannot make a folder beside it: No such file or directory"));
    assert_eq!(names_in(scratch.path()), ["file", "link", "other", "photos", "s"], "nothing is left behind");
}

#[test]
fn a_file_that_appears_during_the_save_is_not_lost() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    save(&folder, None, &some_pages());
    let (writing, files, writer) = begin(&folder, None);
    fs::write(folder.join("notes"), "mine").unwrap();
    (&files.machine).write_all(MACHINE).unwrap();
    writer.finish(&files.windows, MACHINE, notes).unwrap();
    assert!(writing.finish().unwrap_err().to_string().contains("has notes"));
    assert_eq!(names_in(scratch.path()), ["s"]);
    assert_eq!(fs::read_to_string(folder.join("notes")).unwrap(), "mine");
}

#[test]
fn a_save_that_is_dropped_leaves_nothing_and_the_old_snapshot() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    drop(begin(&folder, None));
    assert_eq!(names_in(scratch.path()), [""; 0]);
    save(&folder, None, &some_pages());
    drop(begin(&folder, None));
    assert_eq!((read(&folder).unwrap(), names_in(scratch.path())), (some_pages(), vec!["s".to_owned()]));
}

#[test]
fn a_save_that_is_not_whole_is_not_put() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    save(&folder, None, &some_pages());
    let (writing, _files, _writer) = begin(&folder, None);
    let error = writing.finish().unwrap_err().to_string();
    assert!(error.contains("what was written is not a whole snapshot (it is not a snapshot: `windows`"), "{error}");
    let (writing, files, writer) = begin(&folder, None);
    writer.finish(&files.windows, MACHINE, notes).unwrap();
    let error = writing.finish().unwrap_err().to_string();
    assert!(error.contains("`machine.json` has 0 bytes, and 26 were saved"), "{error}");
    assert_eq!((read(&folder).unwrap(), names_in(scratch.path())), (some_pages(), vec!["s".to_owned()]));
}

#[test]
fn leftovers_are_removed_unless_a_save_holds_them() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    let running = begin(&folder, None);
    for name in [".s.saving-0123456789abcdef", ".s.saving-x", ".t.saving-0123456789abcdef"] {
        fs::create_dir(scratch.path().join(name)).unwrap();
        fs::write(scratch.path().join(name).join("memory"), "rest").unwrap();
    }
    let before = names_in(scratch.path());
    drop(begin(&folder, None));
    let after = names_in(scratch.path());
    let gone: Vec<_> = before.iter().filter(|name| !after.contains(name)).collect();
    assert_eq!(gone, [".s.saving-0123456789abcdef"], "other names and the running save stay");
    put(&running.2, &some_pages());
    end(running);
    assert_eq!(read(&folder).unwrap(), some_pages());
}

/// Set for the process that is killed: its folder.
const VICTIM: &str = "WIDELEAF_TEST_KILLED_SAVE";

/// No test by itself: the process of the next one.
#[test]
fn process_that_is_killed_while_it_saves() {
    let Some(folder) = std::env::var_os(VICTIM) else { return };
    let saving = begin(Path::new(&folder), None);
    put(&saving.2, &[((1, 1), page_of(99))].into());
    println!("saving");
    std::io::stdout().flush().unwrap();
    // Until it is killed, or the other test ends.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn a_killed_save_leaves_the_old_snapshot_and_the_next_one_cleans_up() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("s");
    save(&folder, None, &some_pages());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "folders::process_that_is_killed_while_it_saves"])
        .env(VICTIM, &folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("saving")), "the process saves");
    drop(begin(&folder, None));
    assert_eq!(names_in(scratch.path()).len(), 2, "the folder of a living process stays");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((read(&folder).unwrap(), names_in(scratch.path()).len()), (some_pages(), 2));
    let next: Pages = [((0, 3), page_of(3))].into();
    save(&folder, None, &next);
    assert_eq!((read(&folder).unwrap(), names_in(scratch.path())), (next, vec!["s".to_owned()]));
}
