//! Kernels and programs as Linux guests, under QEMU's software emulation with the labs' Debian kernel. The tests read
//! the results from the serial console. They need QEMU and that kernel: without them each test that boots says that
//! it was skipped, which `WIDELEAF_REQUIRE=qemu` makes a failure.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::program::new_scratch;
use serde_json::Value;
use wideleaf_testing::c_program::compiled;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::{LabKernel, Need, has_kvm, is_there};

/// Time limit of a guest. A boot takes some seconds, or a minute if the machine compiles on all cores.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Kernel of the guests.
const KERNEL: LabKernel = LabKernel::V6_12;

/// Command line for Linux: its console; no check of timer ticks, which may be late if the emulator waits for a
/// processor; no mitigations on an emulated processor; no wait for entropy, nor for tests of ciphers, nor for grace
/// periods.
const LINUX_WORDS: &str = "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off random.trust_cpu=on \
    8250.nr_uarts=1 cryptomgr.notests=1 rcupdate.rcu_expedited=1";

fn can_boot() -> bool {
    is_there(Need::Qemu, KERNEL.prepare())
}

/// A Linux guest that has ended, with the log of its console.
struct Guest {
    scratch: Scratch,
}

impl Guest {
    /// Creates an initramfs with these arguments and boots it with these words. The machine must switch itself off.
    fn run(image: &[&str], words: &str) -> Guest {
        let scratch = new_scratch();
        let arguments = [&["image", "linux", "--output", "guest.cpio.gz"], image].concat();
        scratch.wideleaf(&arguments).assert().success();
        let log = fs::File::create(scratch.path("log")).unwrap();
        // Without cmpxchg16b, which QEMU 7.2 emulates incorrectly, and without fast string operations, which it runs
        // byte by byte (the labs' README).
        let mut qemu = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-M", "pc", "-cpu", "max,-cx16,-erms,-la57", "-m", "256M"])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"])
            .args(["-append", &format!("{LINUX_WORDS} {words}"), "-initrd"])
            .arg(scratch.path("guest.cpio.gz"))
            .arg("-kernel")
            .arg(KERNEL.elf())
            .stdin(Stdio::null())
            .stdout(log)
            .spawn()
            .unwrap();
        let deadline = Instant::now() + TIMEOUT;
        while qemu.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                qemu.kill().unwrap();
            }
            sleep(Duration::from_millis(20));
        }
        let guest = Guest { scratch };
        assert!(!guest.log().contains("Kernel panic"), "{}", guest.log());
        guest
    }

    fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.scratch.path("log")).unwrap()).into_owned()
    }

    /// Report of `wideleaf-lab image results`, and its exit code.
    fn results(&self) -> (Value, Option<i32>) {
        let output = self.scratch.wideleaf(&["image", "results", "log", "--format", "json"]).output().unwrap();
        let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", self.log()));
        (report, output.status.code())
    }

    fn is_refused(&self, code: i32, words: &[&str]) {
        self.scratch.refuses(&["image", "results", "log"], code, words);
    }
}

#[test]
fn linux_prints_its_first_lines_in_our_guest() {
    // If KVM shadows page tables, it emulates the guest's ring 0, at some million instructions per second and not for
    // all of them. A distribution's kernel may therefore stop after its first lines.
    if !can_boot() || !has_kvm() {
        return;
    }
    let (scratch, kernel) = (new_scratch(), KERNEL.elf().into_os_string().into_string().unwrap());
    let words = "--cmdline=console=ttyS0 earlyprintk=serial,ttyS0,115200";
    let mut guest =
        Running::start(&scratch, &["run", &kernel, words, "--memory=128M", "--policy=never", "--timeout=10m"]);
    let mut lines = BufReader::new(guest.0.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("] Linux version ")), "the guest ended before that");
}

/// Verified GUPS on a table of 8 MiB with these words; returns the bytes of its memory in large pages.
fn gups_in_large_pages(words: &str) -> f64 {
    let guest = Guest::run(&["--bench", "gups log2_words=20"], words);
    let (report, code) = guest.results();
    assert_eq!((code, &report["verification"]["passed"]), (Some(0), &Value::Bool(true)), "{}", guest.log());
    report["results"]["memory_in_large_pages"]["value"].as_f64().unwrap()
}

const TABLE_BYTES: f64 = (8 << 20) as f64;

#[test]
fn cg_of_class_s_is_verified_in_a_linux_guest() {
    if !can_boot() {
        return;
    }
    let guest = Guest::run(&["--bench", "cg.S"], "wideleaf.threads=1");
    let (report, code) = guest.results();
    assert_eq!((code, &report["outcome"]), (Some(0), &Value::from("success")), "{}", guest.log());
    assert_eq!((&report["kernel"], &report["vcpus"], &report["entry"]), (&"npb.cg".into(), &1.into(), &"linux".into()));
    assert_eq!(report["verification"]["passed"], true);
    assert_eq!((&report["problem"]["class"], &report["problem"]["size"]), (&"S".into(), &"1400".into()));
    assert_eq!((&report["figure"]["name"], &report["figure"]["unit"]), (&"mops".into(), &"Mop/s".into()));
    assert!(report["figure"]["value"].as_f64().unwrap() > 0.0);
    // The same results from standard input, as text.
    let mut table = guest.scratch.wideleaf(&["image", "results"]);
    let table = table.write_stdin(guest.log()).assert().success().get_output().stdout.clone();
    let table = String::from_utf8(table).unwrap();
    assert!(table.contains("verification passed") && table.contains("outcome: success"), "{table}");
}

#[test]
fn transparent_huge_pages_are_used_on_request() {
    if can_boot() {
        assert!(gups_in_large_pages("wideleaf.page=thp") >= TABLE_BYTES);
        assert_eq!(gups_in_large_pages("wideleaf.page=4k transparent_hugepage=always"), 0.0);
    }
}

#[test]
fn the_hugetlb_pool_is_used_on_request() {
    if can_boot() {
        assert!(gups_in_large_pages("wideleaf.page=2m hugepages=8") >= TABLE_BYTES);
    }
}

#[test]
fn an_impossible_run_ends_with_one_clear_line_and_the_machine_off() {
    if !can_boot() {
        return;
    }
    let cases = [
        ("wideleaf.page=2m", 3, "hugetlb pages of 2m, 0 are free; put hugepagesz=2m hugepages="),
        (
            "wideleaf.pages=2m",
            2,
            "unknown word wideleaf.pages on the Linux command line; choose one of wideleaf.kernel=",
        ),
        ("wideleaf.threads=2", 3, "wideleaf.threads=2 exceeds the machine's processors (1)"),
        ("wideleaf.kernel=\"gups log2_words=30\"", 3, "needs 8 GiB of memory, but has "),
    ];
    for (words, code, line) in cases {
        Guest::run(&["--bench", "cg.S"], words).is_refused(code, &[line]);
    }
}

/// A program that prints its arguments, without a newline at the end, and exits with its first argument.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int count, char **arguments) {
    for (int i = 1; i < count; i++) printf("[%s]\n", arguments[i]);
    fflush(stdout);
    fprintf(stderr, "@wideleaf exit code=0\n");
    if (fork() == 0) for (;;) pause();
    printf("to the end");
    fflush(stdout);
    if (arguments[1][0] == 'c') abort();
    return atoi(arguments[1]);
}
"#;

#[test]
fn any_static_program_runs_and_returns_its_output_and_status() {
    if !can_boot() {
        return;
    }
    let scratch = new_scratch();
    let source = scratch.file("program.c", PROGRAM.as_bytes());
    let folder = tempfile::tempdir().unwrap();
    let program = compiled(Path::new(&source), folder.path()).into_os_string().into_string().unwrap();
    for (first, status) in [("0", 0.0), ("3", 3.0), ("crash", 134.0)] {
        let guest = Guest::run(&["--exec", &program, first, "-v", "two words", ""], "");
        let (report, code) = guest.results();
        let first = format!("[{first}]");
        let output = [first.as_str(), "[-v]", "[two words]", "[]", " @wideleaf exit code=0", "to the end"];
        assert_eq!(report["program_output"], Value::from(output.to_vec()), "{}", guest.log());
        assert_eq!(report["results"]["exit_status"]["value"], status);
        assert_eq!(code, Some(if status == 0.0 { 0 } else { 1 }));
    }
    let guest = Guest::run(&["--exec", &program, "0"], "wideleaf.page=2m");
    guest.is_refused(2, &["wideleaf.page= is for kernels, and the image has a program"]);
}

#[test]
fn equal_arguments_give_equal_images() {
    let scratch = new_scratch();
    let images = ["one", "other"].map(|name| {
        scratch.wideleaf(&["image", "linux", "--bench", "cg.S", "-o", name]).assert().success();
        fs::read(scratch.path(name)).unwrap()
    });
    assert!(images[0] == images[1]);
    let mut names = scratch.names();
    names.sort();
    assert_eq!(names, ["one", "other"]);
}

#[test]
fn an_invalid_image_is_refused_and_nothing_is_written() {
    let scratch = new_scratch();
    let script = scratch.file("script", b"#!/bin/sh\n");
    let make = |more: &[&str], code, words: &[&str]| {
        scratch.refuses(&[&["image", "linux", "--output", "image"], more].concat(), code, words);
    };
    make(&["--bench", "linpack"], 2, &["unknown kernel \"linpack\"; choose one of gups"]);
    make(&["--bench", "cg.Q"], 2, &["class=Q"]);
    make(&["--exec", "absent"], 3, &["--exec absent", "No such file"]);
    make(&["--exec", &script], 3, &["it is not an ELF file"]);
    let nowhere = ["image", "linux", "--bench", "cg.S", "--output", "absent/image"];
    scratch.refuses(&nowhere, 7, &["cannot write --output", "there is no folder"]);
    scratch.refuses(&["image", "results", "absent"], 3, &["cannot read the log absent"]);
}
