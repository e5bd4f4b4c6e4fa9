//! `wideleaf run --disk` and `--rng`: an invalid disk is refused before any change, and the report has the devices'
//! counters. Tests with a guest need KVM.

use std::fs::File;

use crate::program::new_scratch;
use serde_json::Value;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Scratch;
use wideleaf_vmm::devices::virtio::block::{DiskImage, DiskOptions};

fn scratch_with_disk(bytes: u64) -> Scratch {
    let scratch = new_scratch();
    File::create(scratch.path("disk.img")).unwrap().set_len(bytes).unwrap();
    scratch
}

fn refuses(scratch: &Scratch, disk: &str, code: i32, words: &[&str]) {
    scratch.refuses(&["run", "gups", "--disk", disk], code, words);
}

#[test]
fn a_file_that_is_not_a_disk_is_refused_in_one_line() {
    let scratch = scratch_with_disk(1000);
    refuses(&scratch, "none.img", 3, &["cannot open disk none.img: it does not exist", "truncate"]);
    refuses(&scratch, ".", 3, &["disk .: it is a folder"]);
    refuses(&scratch, "/dev/zero", 3, &["disk /dev/zero: it is a character device"]);
    refuses(&scratch, "disk.img", 3, &["disk disk.img: it has 1000 bytes", "512"]);
    // clap's own error has several lines.
    scratch.wideleaf(&["run", "gups", "--native", "--disk", "disk.img"]).assert().code(2).stdout("");
}

#[test]
fn the_options_of_a_disk_are_checked() {
    let scratch = scratch_with_disk(4096);
    let output =
        scratch.wideleaf(&["run", "gups", "--disk", "disk.img,ro"]).assert().code(2).get_output().stderr.clone();
    let text = String::from_utf8(output).unwrap();
    assert!(text.contains("\"ro\" after the file") && text.contains("readonly"), "{text}");
    refuses(&scratch, "disk.img,id=a-name-of-21-bytes---", 3, &["at most 20 bytes"]);
}

#[test]
fn a_disk_in_use_is_refused_with_the_process_that_uses_it() {
    let scratch = scratch_with_disk(4096);
    let options = DiskOptions { path: scratch.path("disk.img"), ..DiskOptions::default() };
    let ours = DiskImage::open(&options).unwrap();
    let process = format!("in use by process {};", std::process::id());
    refuses(&scratch, "disk.img", 3, &[&process]);
    refuses(&scratch, "disk.img,readonly", 3, &[&process]);
    drop(ours);
    // The same disk twice in one guest is refused as well.
    let twice = ["run", "gups", "--disk", "disk.img", "--disk", "disk.img"];
    scratch.refuses(&twice, 3, &["disk disk.img: it is in use"]);
}

fn report(scratch: &Scratch, arguments: &[&str]) -> (Value, String) {
    let assert = scratch.wideleaf(arguments).assert().success();
    let output = assert.get_output();
    (serde_json::from_slice(&output.stdout).unwrap(), String::from_utf8(output.stderr.clone()).unwrap())
}

#[test]
fn a_guest_reports_the_speed_of_its_disk_and_the_report_the_number_of_requests() {
    if !has_kvm() {
        return;
    }
    let scratch = scratch_with_disk(4 << 20);
    let cmdline = "--cmdline=bytes=4M passes=2 requests=100";
    let arguments =
        ["run", "disk", "--memory=64M", cmdline, "--disk=disk.img", "--rng", "--format=json", "--no-daemon"];
    let (report, stderr) = report(&scratch, &arguments);
    let [disk, rng] = [0, 1].map(|number| report["devices"][number].clone());
    assert_eq!((disk["device"].as_str(), disk["has_driver"].as_bool()), (Some("disk disk.img"), Some(true)));
    // Two passes of 64 blocks of 64 KiB, then 100 random blocks.
    assert_eq!((disk["counters"]["reads"].as_u64(), disk["counters"]["flushes"].as_u64()), (Some(228), Some(2)));
    assert!(report["results"]["sequential_read"]["value"].as_f64().unwrap() > 0.0, "{report}");
    assert_eq!((rng["device"].as_str(), rng["has_driver"].as_bool()), (Some("rng"), Some(false)));
    assert!(stderr.contains("no driver took rng"), "{stderr}");
}

#[test]
fn an_unusable_disk_fails_the_guest_that_writes_it() {
    if !has_kvm() {
        return;
    }
    let scratch = scratch_with_disk(4 << 20);
    let cmdline = "--cmdline=bytes=4M passes=2 requests=100";
    let run = |disk: &str, words: &[&str]| {
        scratch.refuses(&["run", "disk", "--memory=64M", cmdline, "--no-daemon", "--disk", disk], 3, words);
    };
    run("disk.img,readonly", &["disk cannot run: the disk failed a request"]);
    scratch.refuses(&["run", "disk", "--memory=64M", "--no-daemon"], 3, &["no virtio disk found"]);
    File::options().write(true).open(scratch.path("disk.img")).unwrap().set_len(1 << 20).unwrap();
    run("disk.img", &["the disk is smaller than bytes="]);
}
