//! `wideleaf vm SOCKET snapshot` and `wideleaf run --restore`: a guest that checks every word of its memory is saved,
//! killed and continued again and again, and damaged snapshots never reach a guest. Needs KVM
//! (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::fs::{self, File, OpenOptions};
use std::io::PipeWriter;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::thread::sleep;

use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;
use wideleaf_control::vm::{StopHow, VM_FILES_TIMEOUT, VmAnswer, VmRequest, ask, ask_with_files};
use wideleaf_memory::cached_pages;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::{Running, Scratch};

use crate::migration::{AMONG_QUESTIONS, has_lost_nothing, report as report_of, status};
use crate::program::new_scratch;
use crate::sandboxed::CALM;

/// A fixed number of passes over its memory: the number of words that it checks tells whether one was lost.
const PASSES: [&str; 4] = ["pattern", "--vcpus=2", "--memory=128M", "--cmdline=bytes=32M passes=600"];

/// Rewrites its memory until it is stopped.
const ENDLESS: [&str; 3] = ["pattern", "--memory=128M", "--cmdline=bytes=32M seconds=600"];

/// The same on one vCPU, of which two can work at once.
const ALONE: [&str; 3] = ["pattern", "--memory=128M", "--cmdline=bytes=32M passes=250"];

/// Number of words that it checks: all of them in each pass, and once more at its end.
const ALONE_CHECKED: u64 = (32 << 20) / 8 * 251;

/// Longer than any busy machine needs, so that no save is refused for its pause.
const PAUSE: &str = "--pause=60s";

const OPTIONS: [&str; 5] =
    ["--policy=greedy", "--no-daemon", "--control-socket=vm.sock", "--format=json", "--output=result.json"];

/// Starts a run, and waits until its VM answers or it has ended.
fn start(scratch: &Scratch, arguments: &[&str]) -> Running {
    let mut run = Running::start(scratch, &[&["run"], arguments, &OPTIONS].concat());
    while run.0.try_wait().unwrap().is_none() && !has_answered(scratch) {
        sleep(AMONG_QUESTIONS);
    }
    run
}

fn has_answered(scratch: &Scratch) -> bool {
    scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success()
}

/// Saves the VM; `None` if it has ended.
fn save(scratch: &Scratch, arguments: &[&str]) -> Option<Value> {
    let words = [&["vm", "vm.sock", "snapshot"], arguments, &[PAUSE, "--format=json"]].concat();
    let output = scratch.wideleaf(&words).output().unwrap();
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
}

fn report(scratch: &Scratch) -> Value {
    serde_json::from_slice(&fs::read(scratch.path("result.json")).unwrap()).unwrap()
}

/// A guest that was saved with its 32 MiB on large pages; its run has ended.
pub fn saved(scratch: &Scratch, arguments: &[&str]) -> Value {
    let run = start(scratch, arguments);
    let is_large = || {
        let output = scratch.wideleaf(&["vm", "vm.sock", "statistics", "--format=json"]).output().unwrap();
        let statistics: Value = serde_json::from_slice(&output.stdout).unwrap();
        statistics["vm"]["backing"]["huge_2m"].as_u64().unwrap() >= 32 << 20
    };
    while !is_large() {
        sleep(AMONG_QUESTIONS);
    }
    let saved = save(scratch, &["saved"]).expect("it runs until it is stopped");
    run.signal(Signal::SIGKILL);
    run.end();
    saved
}

fn change_a_byte(scratch: &Scratch, file: &str, at: u64) {
    let file = File::options().read(true).write(true).open(scratch.path(file)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

#[test]
fn a_guest_that_is_killed_and_continued_again_and_again_checks_as_many_words_as_one_that_is_not() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    start(&scratch, &PASSES).end();
    let undisturbed = report(&scratch);
    let mut run = start(&scratch, &PASSES);
    let mut generations = 0;
    // The folder of the snapshot before is replaced while the guest that came from it still runs.
    while save(&scratch, &["saved"]).is_some() {
        generations += 1;
        run.signal(Signal::SIGKILL);
        run.end();
        run = start(&scratch, &["--restore=saved"]);
        if generations == 5 {
            break;
        }
    }
    assert_eq!(run.end(), (Some(0), String::new()));
    let continued = report(&scratch);
    assert!(generations > 0, "it was saved before its end");
    assert_eq!(continued["outcome"], "success");
    assert_eq!(continued["verification"], undisturbed["verification"]);
    let names = |report: &Value| report["phases"].as_array().unwrap().iter().map(|p| p["name"].clone()).collect();
    let (before, after): (Vec<Value>, Vec<Value>) = (names(&undisturbed), names(&continued));
    assert_eq!(before, after, "the phases that were over when it was saved are in its report");
    assert!(scratch.names().iter().all(|name| !name.contains(".saving-")), "{:?}", scratch.names());
}

#[test]
fn windows_that_were_large_are_large_when_the_guest_is_restored_and_the_report_counts_them() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let saved = saved(&scratch, &ENDLESS);
    let stored = saved["stored_bytes"].as_u64().unwrap();
    assert!((32 << 20..40 << 20).contains(&stored), "its memory and its image, and nothing else: {saved}");

    let run = start(&scratch, &["--restore=saved"]);
    // A save waits until all of it is filled.
    let again = save(&scratch, &["again"]).expect("it runs until it is stopped");
    assert!(again["stored_bytes"].as_u64() >= Some(32 << 20), "{again}");
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end(), (Some(0), String::new()));
    let restored = &report(&scratch)["restored"];
    assert_eq!(restored["filled_bytes"], restored["stored_bytes"]);
    let [huge, not_huge] = ["windows_huge", "windows_not_huge"].map(|name| restored[name].as_u64().unwrap());
    assert!(huge + not_huge >= 16, "all that were on huge pages were to be: {restored}");
    let [prepared, entered] = ["prepared_ms", "first_entry_ms"].map(|name| restored[name].as_f64().unwrap());
    assert!(entered > prepared, "its RAM is prepared before it runs: {restored}");
    // Where other tests have the host's free huge pages, a window gets base pages.
    assert!(huge >= 8, "{restored}");
}

/// Saves a guest that has passes left, and ends it.
fn save_alone(scratch: &Scratch) {
    let run = start(scratch, &ALONE);
    save(scratch, &["saved", "--stop"]).expect("it has passes left");
    run.end();
}

/// Continues the snapshot of [`save_alone`], with a report of this name.
fn continue_alone(scratch: &Scratch, name: &str, options: &[&str]) -> Running {
    let output = format!("--output={name}");
    let arguments = ["run", "--restore=saved", "--no-daemon", "--format=json", &output];
    Running::start(scratch, &[&arguments, options].concat())
}

/// Way in which the snapshot was read for a run that has ended, which has lost no word.
fn way_of_reading(scratch: &Scratch, name: &str) -> Value {
    let report = report_of(scratch, name);
    has_lost_nothing(&report);
    assert_eq!(report["verification"]["checked"], ALONE_CHECKED, "{name}: before and after the save");
    assert_eq!(report["restored"]["filled_bytes"], report["restored"]["stored_bytes"], "{name}");
    report["restored"]["reads"].clone()
}

#[test]
fn two_guests_of_one_snapshot_work_at_once_one_of_them_past_the_page_cache_and_both_have_all_words() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    save_alone(&scratch);
    let runs = [("cached", "--restore-reads=cached"), ("direct", "--restore-reads=direct")]
        .map(|(name, option)| (name, continue_alone(&scratch, name, &[option])));
    for (name, run) in runs {
        let (code, said) = run.end();
        if name == "direct" && said.contains("Invalid argument") {
            println!("skipped, this file system has no O_DIRECT: {said}");
            continue;
        }
        assert_eq!((code, said.as_str()), (Some(0), ""), "{name}");
        assert_eq!(way_of_reading(&scratch, name), name);
    }
}

#[test]
fn a_snapshot_is_read_from_the_page_cache_where_it_is_there_and_past_it_where_it_is_not() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    save_alone(&scratch);
    let memory = File::open(scratch.path("saved/memory")).unwrap();
    let way = |name: &str| {
        assert_eq!(continue_alone(&scratch, name, &[]).end(), (Some(0), String::new()), "{name}");
        way_of_reading(&scratch, name)
    };
    assert_eq!(way("warm"), "cached", "it was written a moment ago");
    posix_fadvise(&memory, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    let direct = OpenOptions::new().read(true).custom_flags(OFlag::O_DIRECT.bits()).open(scratch.path("saved/memory"));
    // A page has 8 blocks of stat(2), and half of the file is the limit.
    match (direct, cached_pages(&memory)) {
        (Ok(_), Ok(pages)) if pages * 8 * 2 < memory.metadata().unwrap().blocks() => assert_eq!(way("cold"), "direct"),
        (direct, pages) => {
            println!("skipped in part: O_DIRECT {direct:?}, pages that stay in the page cache {pages:?}");
            assert_eq!(way("cold"), "cached");
        }
    }
}

#[test]
fn a_damaged_extent_ends_the_guest_with_its_name_and_a_damaged_index_keeps_it_from_starting() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    saved(&scratch, &ENDLESS);
    // The fifth page of the sixth window, which the guest uses.
    change_a_byte(&scratch, "saved/memory", (6 << 21) + (5 << 12) + 7);
    let at_fault = ["run", "--restore=saved", "--no-daemon", "--policy=at-fault"];
    scratch.refuses(&at_fault, 2, &["cannot restore saved with --policy at-fault", "use another policy"]);
    let (code, said) = Running::start(&scratch, &["run", "--restore=saved", "--no-daemon"]).end();
    assert_eq!(code, Some(5), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.contains("cannot restore window 6") && last.contains("checksum"), "{said}");

    change_a_byte(&scratch, "saved/windows", 70);
    scratch.refuses(&["run", "--restore=saved", "--no-daemon"], 3, &["cannot restore saved", "`windows`"]);
    fs::remove_file(scratch.path("saved/windows")).unwrap();
    scratch.refuses(&["run", "--restore=saved", "--no-daemon"], 3, &["cannot restore saved", "`windows`"]);
}

#[test]
fn a_save_that_fails_leaves_the_older_snapshot_and_the_guest_and_no_file() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch, &ENDLESS);
    assert_eq!(status(&scratch)["past_saves"], Value::Null);
    let saved = save(&scratch, &["saved"]).expect("it runs until it is stopped");
    let paid = &saved["before_pause"];
    assert!(paid["exits"].is_u64() && paid["seconds"].as_f64() < saved["seconds"].as_f64(), "{saved}");
    let before = fs::read(scratch.path("saved/windows")).unwrap();
    let too_short = ["vm", "vm.sock", "snapshot", "saved", "--pause=0ms"];
    scratch.refuses(&too_short, 4, &["cannot save the VM", "allow a longer pause"]);
    scratch.file("taken", b"by a file");
    scratch.refuses(&["vm", "vm.sock", "snapshot", "taken"], 3, &["is not a folder"]);
    assert_eq!(fs::read(scratch.path("saved/windows")).unwrap(), before);
    let past = &status(&scratch)["past_saves"];
    let counts = ["snapshots", "snapshots_failed", "migrations_failed"].map(|name| past[name].as_u64());
    assert_eq!(counts, [1, 1, 0].map(Some));
    assert_eq!((&past["last_pause_ms"], &past["last_before_pause"]), (&saved["pause_ms"], paid));
    let failed = &past["last_failed"];
    assert!(failed["exits"].is_u64() && failed["seconds"].as_f64() > Some(0.0), "its rounds cost something: {past}");
    // A client that is killed leaves its folder to the next save.
    let mut client = Running::start(&scratch, &["vm", "vm.sock", "snapshot", "saved", PAUSE]);
    while !scratch.names().iter().any(|name| name.contains(".saving-")) && client.0.try_wait().unwrap().is_none() {}
    client.signal(Signal::SIGKILL);
    client.end();
    while save(&scratch, &["saved"]).is_none() {
        assert!(has_answered(&scratch), "the guest goes on");
    }
    assert!(scratch.names().iter().all(|name| !name.contains(".saving-")), "{:?}", scratch.names());
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end(), (Some(0), String::new()));
}

#[test]
fn a_vm_that_was_paused_stays_so_after_a_save_with_a_stop_that_fails_at_its_end() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch, &ENDLESS);
    scratch.wideleaf(&["vm", "vm.sock", "pause"]).assert().success();
    run.signal(Signal::SIGSTOP);
    let client = Running::start(&scratch, &["vm", "vm.sock", "snapshot", "saved", "--stop", PAUSE]);
    while !scratch.names().iter().any(|name| name.contains(".saving-")) {
        std::thread::yield_now();
    }
    scratch.file("saved", b"another program's");
    run.signal(Signal::SIGCONT);
    let (code, why) = client.end();
    assert!(code.is_some_and(|code| code != 0) && why.contains("saved"), "{code:?}: {why}");
    assert_eq!(status(&scratch)["state"], "paused");
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end(), (Some(0), String::new()));
}

/// Saves the VM so that it stays paused. Returns the writing end of the client's pipe.
fn save_and_pause(scratch: &Scratch) -> PipeWriter {
    let request = VmRequest::Snapshot { pause_ms_max: 60_000, stays_paused: true, base: None };
    let (cancelled, cancel) = std::io::pipe().unwrap();
    let create = |name: &str| File::options().read(true).write(true).create_new(true).open(scratch.path(name)).unwrap();
    let files = ["memory", "windows", "machine.json"].map(create);
    let passed: Vec<_> = files.iter().map(AsFd::as_fd).chain([cancelled.as_fd()]).collect();
    let answer = ask_with_files(&scratch.path("vm.sock"), request, &passed, VM_FILES_TIMEOUT).unwrap();
    let VmAnswer::Saved(saved) = answer else { panic!("{answer:?}") };
    assert!(!saved.was_paused);
    cancel
}

#[test]
fn a_vm_that_stays_paused_for_a_client_goes_on_when_the_client_has_gone() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch, &ENDLESS);
    let client = save_and_pause(&scratch);
    assert_eq!(status(&scratch)["state"], "paused");
    drop(client);
    while status(&scratch)["state"] != "running" {
        sleep(AMONG_QUESTIONS);
    }
    save(&scratch, &["saved", "--stop"]).expect("nothing is under way any more");
    assert_eq!(run.end(), (Some(0), String::new()));
}

#[test]
fn a_vm_that_was_resumed_since_it_was_saved_is_not_stopped_for_the_snapshot() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch, &ENDLESS);
    let client = save_and_pause(&scratch);
    scratch.wideleaf(&["vm", "vm.sock", "resume"]).assert().success();
    let stop = || ask(&scratch.path("vm.sock"), VmRequest::Stop { how: StopHow::Kill, if_paused: true });
    let why = stop().expect_err("it works on").to_string();
    assert!(why.contains("cannot stop the VM: it is not paused any more"), "{why}");
    // A pause of another client is not ended by the end of this one.
    scratch.wideleaf(&["vm", "vm.sock", "pause"]).assert().success();
    drop(client);
    while save(&scratch, &["saved"]).is_none() {}
    assert_eq!(status(&scratch)["state"], "paused");
    assert!(stop().is_ok());
    assert_eq!(run.end(), (Some(0), String::new()));
}

#[test]
fn a_snapshot_on_a_base_has_only_what_changed_and_needs_its_base() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch, &ENDLESS);
    scratch.wideleaf(&["vm", "vm.sock", "pause"]).assert().success();
    save(&scratch, &["base"]).expect("it runs until it is stopped");
    let on_base = save(&scratch, &["on", "--base=base"]).expect("it runs until it is stopped");
    assert!(on_base["written_bytes"].as_u64() < Some(1 << 20), "a paused guest changes nothing: {on_base}");
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    run.end();
    let run = start(&scratch, &["--restore=on"]);
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end(), (Some(0), String::new()));
    fs::rename(scratch.path("base"), scratch.path("elsewhere")).unwrap();
    scratch.refuses(&["run", "--restore=on", "--no-daemon"], 3, &["cannot restore on", "base"]);
}

#[test]
fn a_guest_that_is_saved_at_work_on_a_base_and_that_on_another_one_has_all_of_its_words() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch, &["pattern", "--memory=128M", "--cmdline=bytes=16M passes=1000"]);
    for arguments in [&["first"][..], &["second", "--base=first"], &["third", "--base=second", "--stop"]] {
        save(&scratch, arguments).expect("it has passes left");
    }
    assert_eq!(run.end(), (Some(0), String::new()));
    let run = start(&scratch, &["--restore=third"]);
    assert_eq!(run.end(), (Some(0), String::new()));
    let continued = report(&scratch);
    has_lost_nothing(&continued);
    assert_eq!(continued["verification"]["checked"], (16_u64 << 20) / 8 * 1001);
}

#[test]
fn the_order_of_first_touches_is_recorded_once_and_used_by_the_next_restore() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    saved(&scratch, &ENDLESS);
    let restored = |prefetch: &str| {
        let run = start(&scratch, &["--restore=saved", prefetch]);
        save(&scratch, &["again"]).expect("it runs until it is stopped");
        scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
        assert_eq!(run.end(), (Some(0), String::new()));
        report(&scratch)["restored"].clone()
    };
    // The new order replaces all of an older one, in the sandbox.
    scratch.file("saved/touches", &[b'x'; 1 << 16]);
    let recorded = restored("--prefetch=record")["touches_recorded"].as_u64().unwrap();
    let touches = || -> Value { serde_json::from_slice(&fs::read(scratch.path("saved/touches")).unwrap()).unwrap() };
    assert!(recorded >= 16, "the guest touches all of its 16 windows");
    assert_eq!(touches()["windows"].as_array().unwrap().len() as u64, recorded);
    let used = restored("--restore-rate=64M");
    assert_eq!((&used["touches_recorded"], &used["filled_bytes"]), (&Value::from(0), &used["stored_bytes"]));
    // A damaged order is no reason not to restore.
    scratch.file("saved/touches", b"{\"snapshot\":\"another\",\"windows\":[1]}");
    let run = start(&scratch, &["--restore=saved"]);
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    let (code, said) = run.end();
    assert_eq!(code, Some(0));
    assert!(said.contains("touches is not used: it is of another snapshot"), "{said}");
    // A snapshot with a recorded order is replaced as any other.
    saved(&scratch, &ENDLESS);
    assert!(!scratch.path("saved/touches").exists());
}

#[test]
fn a_guest_that_is_restored_by_pages_or_on_a_mapped_file_has_all_of_its_words_and_no_huge_page_of_the_restore() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    start(&scratch, &PASSES).end();
    let undisturbed = report(&scratch);
    let run = start(&scratch, &PASSES);
    save(&scratch, &["saved", "--stop"]).expect("it has passes left");
    run.end();
    for (pages, more) in [("4k", "--prefetch=off"), ("mapped", "--policy=never")] {
        let run = Running::start(
            &scratch,
            &["run", "--restore=saved", &format!("--restore-pages={pages}"), more, "--no-daemon", "--format=json"]
                .into_iter()
                .chain(["--output=result.json"])
                .collect::<Vec<_>>(),
        );
        assert_eq!(run.end(), (Some(0), String::new()), "{pages}");
        let continued = report(&scratch);
        assert_eq!(continued["verification"], undisturbed["verification"], "{pages}");
        let restored = &continued["restored"];
        assert_eq!(
            (&restored["pages"], &restored["windows_huge"]),
            (&Value::from(pages), &Value::from(0)),
            "{restored}"
        );
    }
    // A mapped snapshot is one file, and the kernel reads it.
    let recorded = ["run", "--restore=saved", "--restore-pages=mapped", "--prefetch=record", "--no-daemon"];
    scratch.refuses(&recorded, 2, &["cannot map saved", "--prefetch record", "omit them"]);
    scratch.refuses(&["run", "gups", "--restore-pages=4k"], 2, &["without a snapshot", "--restore-pages"]);
}

#[test]
fn a_recording_follows_no_link_waits_for_no_pipe_and_a_start_that_fails_keeps_the_older_one() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    saved(&scratch, &ENDLESS);
    let record = ["run", "--restore=saved", "--prefetch=record", "--no-daemon"];
    let touches = scratch.path("saved/touches");
    scratch.file("precious", b"bytes");
    symlink("../precious", &touches).unwrap();
    scratch.refuses(&record, 7, &["cannot record first touches in saved/touches: it is a symbolic link; remove it"]);
    assert_eq!(fs::read(scratch.path("precious")).unwrap(), b"bytes");
    fs::remove_file(&touches).unwrap();
    mkfifo(&touches, Mode::S_IRWXU).unwrap();
    scratch.refuses(&record, 7, &["cannot record first touches in saved/touches: it is a FIFO; remove it"]);
    fs::remove_file(&touches).unwrap();
    fs::write(&touches, "older").unwrap();
    let no_place = [&record[..], &["--control-socket=no/such/vm.sock"]].concat();
    let (code, said) = Running::start(&scratch, &no_place).end();
    assert_ne!(code, Some(0), "{said}");
    assert_eq!(fs::read(&touches).unwrap(), b"older");
}

#[test]
fn a_guest_on_a_mapped_file_is_not_saved_and_the_error_says_how_it_can_be() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    saved(&scratch, &ENDLESS);
    let run = Running::start(
        &scratch,
        &["run", "--restore=saved", "--restore-pages=mapped", "--no-daemon", "--control-socket=vm.sock"],
    );
    while !has_answered(&scratch) {}
    let mapped = "cannot save the VM: its RAM is mapped from a snapshot; restore it with --restore-pages auto";
    scratch.refuses(&["vm", "vm.sock", "snapshot", "again"], 4, &[mapped]);
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    run.end();
}

#[test]
fn the_status_of_a_restored_vm_says_how_much_of_its_ram_has_come_until_all_of_it_has() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    saved(&scratch, &CALM);
    let stop = |run: Running| {
        scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
        run.end();
    };
    // Its memory comes within minutes, except for what it touches.
    let run = start(&scratch, &["--restore=saved", "--restore-rate=64K"]);
    let restoring = &status(&scratch)["restoring"];
    let [filled, stored] = ["filled_bytes", "stored_bytes"].map(|name| restoring[name].as_u64().unwrap());
    assert!(filled < stored, "{restoring}");
    let shown = scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().stdout;
    assert!(String::from_utf8_lossy(&shown).contains("have come from the snapshot"));
    stop(run);
    let run = start(&scratch, &["--restore=saved"]);
    while status(&scratch)["restoring"] != Value::Null {
        sleep(AMONG_QUESTIONS);
    }
    stop(run);
}

#[test]
fn a_guest_that_goes_on_after_a_save_is_watched_until_kvm_maps_it_large_again() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch, &ENDLESS);
    let windows_mapped_large = || {
        let output = scratch.wideleaf(&["vm", "vm.sock", "statistics", "--format=json"]).output().unwrap();
        let statistics: Value = serde_json::from_slice(&output.stdout).unwrap();
        statistics["vm"]["mapping"]["pages_2m"].as_u64().unwrap()
    };
    // How many depends on the host's free huge pages.
    while windows_mapped_large() == 0 {
        sleep(AMONG_QUESTIONS);
    }
    save(&scratch, &["saved"]).expect("it runs until it is stopped");
    let remapped = || status(&scratch)["past_saves"]["last_remapped"].clone();
    while remapped()["seconds"].is_null() {
        sleep(AMONG_QUESTIONS);
    }
    let remapped = remapped();
    assert!(remapped["large_before_bytes"].as_u64() >= Some(2 << 20), "{remapped}");
    assert!(remapped["large_after_bytes"].is_u64(), "{remapped}");
    let shown = scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().stdout;
    assert!(String::from_utf8_lossy(&shown).contains("nine tenths were large again after"));
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end(), (Some(0), String::new()));
}

#[test]
fn a_vm_of_which_no_restore_would_take_the_snapshot_is_not_saved_and_goes_on() {
    if !has_kvm() {
        return;
    }
    if let Err(why) = wideleaf_memory::first_touch::probe() {
        println!("skipped, no frames are reserved here: {why}");
        return;
    }
    let scratch = new_scratch();
    let options = ["--policy=reservation", "--no-daemon", "--control-socket=vm.sock"];
    let mut run = Running::start(&scratch, &[&["run"], &ENDLESS[..], &options].concat());
    while run.0.try_wait().unwrap().is_none() && !has_answered(&scratch) {
        sleep(AMONG_QUESTIONS);
    }
    let words = ["cannot save the VM: no restore would take the snapshot of this RAM", "reserved frames"];
    scratch.refuses(&["vm", "vm.sock", "snapshot", "saved", "--stop"], 4, &words);
    assert_eq!(status(&scratch)["state"], "running");
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end().0, Some(0));
}

#[test]
fn a_save_that_a_signal_ends_while_the_vm_does_not_answer_leaves_nothing_behind() {
    let scratch = new_scratch();
    let _silent = UnixListener::bind(scratch.path("vm.sock")).unwrap();
    let save = Running::start(&scratch, &["vm", "vm.sock", "snapshot", "saved"]);
    while !scratch.names().iter().any(|name| name.contains(".saving-")) {
        sleep(AMONG_QUESTIONS);
    }
    save.signal(Signal::SIGTERM);
    let (code, stderr) = save.end();
    assert_eq!(code, Some(130), "{stderr}");
    assert_eq!(scratch.names(), ["vm.sock"]);
}

#[test]
fn a_snapshot_on_a_base_is_not_mapped() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch, &ENDLESS);
    save(&scratch, &["base"]).expect("it runs until it is stopped");
    save(&scratch, &["on", "--base=base"]).expect("it runs until it is stopped");
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    run.end();
    let mapped = ["run", "--restore=on", "--restore-pages=mapped", "--no-daemon"];
    scratch.refuses(&mapped, 3, &["cannot map on", "on a base", "--restore-pages auto"]);
}

#[test]
fn options_of_the_saved_vm_are_refused_with_restore() {
    let scratch = new_scratch();
    scratch.refuses(&["run", "--restore=nothing", "--no-daemon"], 3, &["cannot restore nothing"]);
    scratch.refuses(&["run", "gups", "--prefetch=record"], 2, &["without a snapshot", "--restore"]);
    for option in ["--memory=1G", "--vcpus=2", "--cmdline=x", "gups"] {
        let output = scratch.wideleaf(&["run", "--restore=nothing", option]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{option}");
    }
}
