//! Guests that are invalid, hang, crash or fail: one clear line, the documented exit code, and no files left behind;
//! and guests that succeed. Needs KVM: without it each test says that it was skipped, which `WIDELEAF_REQUIRE=kvm`
//! makes a failure. The program is the one in `WIDELEAF_BIN` if that is set, so this file also runs in the labs.

use std::fs;
use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use crate::program::new_scratch;
use crate::turn_at_the_pool;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::Signal;
use serde_json::Value;
use wideleaf_protocol::{ExitCode, Message, Name, Status};
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::tiny_guest::{CODE_AT, LOADED_AT, direct, elf, image, image32, note, pvh};

/// Code of `jmp` to itself.
const HANG: &[u8] = &[0xeb, 0xfe];
/// Code of `lidt` with ten zero bytes (at 0, which is RAM), then `ud2`. In 32 bits, neither that exception nor its
/// absence has a handler.
const TRIPLE_FAULT: &[u8] = &[0x0f, 0x01, 0x1d, 0, 0, 0, 0, 0x0f, 0x0b];
/// Code of `ud2`, an undefined instruction.
const UNDEFINED: &[u8] = &[0x0f, 0x0b];
/// Code of `mov al, 77; out 0xf4, al; jmp` to itself.
const EXIT_77: &[u8] = &[0xb0, 77, 0xe6, 0xf4, 0xeb, 0xfe];

/// The image is refused with exit code 3 and these words.
fn is_no_image(content: &[u8], words: &[&str]) {
    let scratch = new_scratch();
    let file = scratch.file("image", content);
    scratch.refuses(&["run", &file, "--memory=64M", "--timeout=1m", "--output=result"], 3, words);
}

#[test]
fn an_unreadable_image_is_named() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    fs::create_dir(scratch.path("folder")).unwrap();
    scratch.refuses(
        &["run", "no-such-image", "--memory=64M"],
        3,
        &["cannot run \"no-such-image\": it is neither", "nor a file"],
    );
    scratch.refuses(&["run", "./folder", "--memory=64M"], 3, &["cannot read the image ./folder", "it is a folder"]);
    scratch.refuses(
        &["run", "/dev/zero", "--memory=64M"],
        3,
        &["cannot read the image /dev/zero", "it is a character device"],
    );
}

#[test]
fn a_file_that_is_not_an_image_is_identified() {
    if !has_kvm() {
        return;
    }
    is_no_image(b"", &["image: it is empty"]);
    is_no_image(b"#!/bin/sh\necho hello\n", &["is neither an ELF file nor a bzImage: it looks like"]);
    is_no_image(b"just some words\n", &["it looks like"]);
    is_no_image(&[0; 4096], &["it looks like"]);
}

#[test]
fn an_elf_file_that_cannot_be_booted_gives_the_reason() {
    if !has_kvm() {
        return;
    }
    let whole = image(&pvh(), HANG);
    let changed = |at: usize, byte: u8| {
        let mut file = whole.clone();
        file[at] = byte;
        file
    };
    is_no_image(&whole[..5], &["is truncated: the ELF header ends at byte 64, the file has 5"]);
    is_no_image(&whole[..100], &["is truncated: a program header ends at byte 120, the file has 100"]);
    is_no_image(&whole[..CODE_AT as usize + 1], &["is truncated: a segment ends at byte 4098, the file has 4097"]);
    is_no_image(&changed(4, 1), &["has nothing to load: no PT_LOAD segment"]);
    is_no_image(&changed(4, 3), &["is a malformed ELF file: it is of neither 32 nor 64 bits"]);
    is_no_image(&image32(&direct(), HANG), &["is an ELF file without a PVH (Xen, type 18) note"]);
    is_no_image(&changed(18, 183), &["is an ELF file for ", "build it for x86_64"]);
    is_no_image(&image(&note("other", 1, &[]), HANG), &["without a wideleaf or PVH", "CONFIG_PVH=y"]);
    is_no_image(
        &elf(&pvh(), HANG, 1 << 30),
        &["needs memory up to 0x40200000", "guest RAM ends at 0x4000000", "1026 MiB"],
    );
}

#[test]
fn an_ordinary_program_is_not_an_image() {
    if !has_kvm() {
        return;
    }
    is_no_image(&fs::read("/proc/self/exe").unwrap(), &["is an ELF file without a", "an ordinary program"]);
}

#[test]
fn an_initrd_must_exist_and_fit() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (pvh, direct) = (scratch.file("pvh", &image(&pvh(), HANG)), scratch.file("direct", &image(&direct(), HANG)));
    let small = scratch.file("small", b"initrd");
    fs::File::create(scratch.path("large")).unwrap().set_len(65 << 20).unwrap();
    let with = |image: &str, initrd: &str, words: &[&str]| {
        scratch.refuses(&["run", image, "--initrd", initrd, "--memory=64M", "--timeout=1m"], 3, words);
    };
    with(&pvh, "missing", &["cannot read --initrd missing: No such file"]);
    with(&pvh, "/dev/zero", &["cannot read --initrd /dev/zero: it is a character device"]);
    with(&pvh, "large", &["initrd large of 65 MiB", "use more --memory"]);
    with(&direct, &small, &["takes no initrd"]);
}

#[test]
fn ram_is_a_multiple_of_the_guest_page() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let arguments = ["run", "gups", "--guest-page=1g", "--memory=64M"];
    scratch.refuses(&arguments, 2, &["64 MiB of RAM is not a whole number of 1g guest pages: use 1 GiB"]);
}

/// The run fails with this exit code, and a line of standard error begins with `said`. Returns the report, which is
/// complete nevertheless, and standard error from that line on.
fn fails_with_a_report(scratch: &Scratch, arguments: &[&str], code: i32, said: &str) -> (Value, String) {
    let json = ["--format=json", "--output=result"];
    let run = scratch.wideleaf(&[arguments, &json].concat()).assert().code(code).stdout("");
    let stderr = String::from_utf8(run.get_output().stderr.clone()).unwrap();
    // A busy machine may be warned about before.
    let begins = format!("\n{stderr}").find(&format!("\nwideleaf: {said}"));
    let stderr = stderr[begins.unwrap_or_else(|| panic!("no line begins with {said:?}: {stderr}"))..].to_owned();
    let report: Value = serde_json::from_slice(&fs::read(scratch.path("result")).unwrap()).unwrap();
    assert!(report["headline"].as_str().unwrap().starts_with(report["outcome"].as_str().unwrap()), "{report}");
    fs::remove_file(scratch.path("result")).unwrap();
    (report, stderr)
}

#[test]
fn a_guest_that_hangs_is_ended_by_its_timeout_and_leaves_its_report() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let said = "the guest did not end within 2s (--timeout)\n";
    for (name, note) in [("pvh", pvh()), ("direct", direct())] {
        let file = scratch.file(name, &image(&note, HANG));
        let arguments = ["run", &file, "--memory=64M", "--timeout=2s", "--policy=never"];
        let (report, _) = fails_with_a_report(&scratch, &arguments, 6, said);
        assert_eq!(report["outcome"], "timed out");
        assert_eq!(report["setup"]["guest_page"], Value::Null, "whatever it maps its memory with");
        is_all_ram(&report);
    }
    let busy = ["run", "gups", "--memory=64M", "--cmdline=log2_words=16 seconds=3600", "--timeout=4s", "--vcpus=2"];
    let (report, _) = fails_with_a_report(&scratch, &busy, 6, "the guest did not end within 4s (--timeout)\n");
    is_all_ram(&report);
    assert_eq!((&report["setup"]["guest_page"], &report["regions"][0]["windows"]), (&"2m".into(), &0.into()));
    // The pages may be small or large: a slow host promotes nothing within the time.
    let kvm = ["pages_4k", "pages_2m"].map(|name| report["ram_at_end"]["kvm"][name].as_u64().unwrap());
    assert!(kvm.iter().sum::<u64>() > 0, "{report}");
    let update = report["phases"].as_array().unwrap().iter().find(|phase| phase["name"] == "update").unwrap();
    assert_eq!(update["is_complete"], false, "{update}");
    let at_end = |name: &str| update["at_end"][name].as_u64().unwrap();
    assert!(at_end("host_4k_bytes") + at_end("host_2m_bytes") > 0, "{update}");
    assert!(report["manager"]["ticks"].as_u64().unwrap() > 0, "{report}");
}

/// Backed and unbacked RAM at the end add up to 64 MiB, and KVM's totals exist.
fn is_all_ram(report: &Value) {
    let ram = &report["ram_at_end"];
    let bytes = ["host_4k_bytes", "host_2m_bytes", "host_1g_bytes", "host_unbacked_bytes"];
    let [base, huge, giant, unbacked] = bytes.map(|name| ram[name].as_u64().unwrap());
    assert_eq!(base + huge + giant + unbacked, 64 << 20, "{ram}");
    assert!(base + huge > 0, "{ram}");
    // The totals are zero if KVM emulates ring 0: a guest at such an early point has touched no
    // memory through its tables.
    assert!(ram["kvm"]["pages_4k"].is_u64() && ram["kvm"]["pages_2m"].is_u64(), "{ram}");
}

/// The guest ends the run with exit code 5, with `first` in the first line and its registers below.
/// The report has both.
fn crashes(content: &[u8], first: &[&str]) {
    let scratch = new_scratch();
    let file = scratch.file("image", content);
    let arguments = ["run", &file, "--memory=64M", "--timeout=1m"];
    let (report, stderr) = fails_with_a_report(&scratch, &arguments, 5, "vcpu 0: ");
    let line = stderr.lines().next().unwrap();
    first.iter().for_each(|word| assert!(line.contains(word), "no {word:?} in the first line of {stderr}"));
    assert!(stderr.lines().nth(1).unwrap().starts_with("rip=0x"), "{stderr}");
    assert!(stderr.contains("rsp=0x") && stderr.contains("cr3=0x"), "{stderr}");
    let (_, line) = line.split_once(": ").unwrap();
    assert_eq!(report["outcome"], format!("crashed: {line}"));
    assert_eq!(format!("wideleaf: {}\n", report["crash"].as_str().unwrap()), stderr);
    is_all_ram(&report);
    assert_eq!(scratch.names(), ["image"]);
}

#[test]
fn a_triple_fault_gives_one_clear_line_and_the_registers() {
    if !has_kvm() {
        return;
    }
    crashes(&image(&pvh(), TRIPLE_FAULT), &["triple fault"]);
}

#[test]
fn an_exception_of_a_direct_guest_is_named() {
    if !has_kvm() {
        return;
    }
    crashes(&image(&direct(), UNDEFINED), &["#UD"]);
}

#[test]
fn a_panic_of_a_guest_leaves_the_report_with_its_earlier_output() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let name = |word| Name::new(word).unwrap();
    let result = Message::Result { name: name("before"), value: 1.5, unit: name("s") };
    let lines = [result, Message::Panic { message: "no more" }, Message::Exit { code: ExitCode::Panic }];
    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let file = scratch.file("image", &image(&pvh(), &says(&lines, ExitCode::Panic)));
    let arguments = ["run", &file, "--memory=64M", "--timeout=1m"];
    let (report, _) = fails_with_a_report(&scratch, &arguments, 5, "the guest panicked: no more\n");
    assert_eq!(report["outcome"], "crashed: the guest panicked: no more");
    assert_eq!(report["results"]["before"]["value"], 1.5, "{report}");
}

#[test]
fn a_guests_own_exit_code_is_reported() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    for (name, note) in [("pvh", pvh()), ("direct", direct())] {
        let file = scratch.file(name, &image(&note, EXIT_77));
        let arguments = ["run", &file, "--memory=64M", "--timeout=1m"];
        let (report, _) = fails_with_a_report(&scratch, &arguments, 1, "the guest ended with exit code 77\n");
        assert_eq!(report["outcome"], "exit code 77");
    }
}

/// Code that writes its command line from the start info to the serial port and ends: `cmp dword [ebx],
/// 0x336ec578; jne FAIL; mov dx, 0x3f8; mov esi, [ebx + 24]`, then `lodsb; test al, al; jz +3; out dx, al; jmp
/// -8`, then `mov al, 10; out dx, al; mov al, 0; out 0xf4, al; hlt; jmp -3`. If EBX does not point to the start
/// info: `mov al, 77` and the end.
const SAYS_ITS_CMDLINE: &[u8] = &[
    0x81, 0x3b, 0x78, 0xc5, 0x6e, 0x33, 0x75, 0x19, 0x66, 0xba, 0xf8, 0x03, 0x8b, 0x73, 0x18, 0xac, 0x84, 0xc0, 0x74,
    0x03, 0xee, 0xeb, 0xf8, 0xb0, 0x0a, 0xee, 0xb0, 0x00, 0xe6, 0xf4, 0xf4, 0xeb, 0xfd, 0xb0, 77, 0xeb, 0xf7,
];

#[test]
fn a_pvh_image_runs_as_a_file_of_32_bits_and_of_64() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    for (name, content) in [("elf32", image32(&pvh(), SAYS_ITS_CMDLINE)), ("elf64", image(&pvh(), SAYS_ITS_CMDLINE))] {
        let file = scratch.file(name, &content);
        let words = format!("--cmdline=these are my words, {name}");
        let run = scratch.wideleaf(&["run", &file, &words, "--memory=64M", "--timeout=1m"]).assert().success();
        let stderr = String::from_utf8(run.get_output().stderr.clone()).unwrap();
        assert!(stderr.contains(&format!("these are my words, {name}\n")), "{stderr}");
    }
}

/// Code that writes `lines` on the serial port and ends with `code`: `mov esi, LINES; mov dx, 0x3f8`, then `lodsb;
/// test al, al; jz +3; out dx, al; jmp -8`, then `mov al, CODE; out 0xf4, al; jmp` to itself, and the lines.
fn says(lines: &str, code: ExitCode) -> Vec<u8> {
    const CODE_BYTES: u32 = 23;
    let lines_at = (LOADED_AT as u32 + CODE_BYTES).to_le_bytes();
    let load = [&[0xbe], &lines_at[..], &[0x66, 0xba, 0xf8, 0x03]].concat();
    let print = [0xac, 0x84, 0xc0, 0x74, 0x03, 0xee, 0xeb, 0xf8];
    let end = [0xb0, code.port_value(), 0xe6, 0xf4, 0xeb, 0xfe];
    [&load[..], &print, &end, lines.as_bytes(), b"\0"].concat()
}

/// An image of a guest that reports wrong words.
fn with_wrong_words() -> Vec<u8> {
    let lines = [
        Message::Verify { status: Status::Fail, errors: 3, checked: 50 },
        Message::Exit { code: ExitCode::VerificationFailed },
    ];
    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
    image(&pvh(), &says(&lines, ExitCode::VerificationFailed))
}

#[test]
fn wrong_words_are_reported_where_the_report_cannot_be_written() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let file = scratch.file("image", &with_wrong_words());
    let mut run = std::process::Command::new(scratch.program());
    run.args(["run", &file, "--memory=64M", "--timeout=1m"]).stdout(fs::File::create("/dev/full").unwrap());
    let output = run.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("wideleaf: cannot write to standard output: No space left"), "{said}");
    assert!(said.ends_with("\nwideleaf: verification failed: 3 of 50 words or results are wrong\n"), "{said}");
}

#[test]
fn a_failed_verification_gives_exit_code_1_and_a_complete_report() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let file = scratch.file("image", &with_wrong_words());
    let arguments = ["run", &file, "--memory=64M", "--timeout=1m", "--format=json"];
    let run = scratch.wideleaf(&arguments).assert().code(1);
    let run = run.stderr("wideleaf: verification failed: 3 of 50 words or results are wrong\n");
    let report: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
    assert_eq!(report["verification"]["passed"], false);
    assert_eq!(report["figure"], Value::Null, "the table knows no such kernel");
}

#[test]
fn a_kernels_refusal_is_the_only_line() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let with = |cmdline, code, words: &[&str]| {
        scratch.refuses(&["run", "gups", "--memory=64M", "--timeout=1m", "--cmdline", cmdline], code, words);
    };
    with("nonsense=1", 2, &["--cmdline: unknown parameter nonsense="]);
    with("log2_words=99", 2, &["--cmdline: log2_words=99: expected a count from 10 to 40"]);
}

#[test]
fn too_little_ram_for_an_image_is_refused_with_a_sufficient_size() {
    if !has_kvm() {
        return;
    }
    new_scratch().refuses(&["run", "pattern", "--memory=2M"], 3, &["guest RAM ends at 0x200000: use at least 4 MiB"]);
}

#[test]
fn ctrl_c_and_sigterm_end_a_guest_with_code_130_and_its_report() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let cmdline = "--cmdline=log2_words=16 seconds=3600";
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let arguments = ["run", "gups", cmdline, "--vcpus=2", "--memory=64M", "--timeout=5m", "--output=result"];
        let mut run = Running::start(&scratch, &arguments);
        run.wait_for("comm", |name| name == "vcpu1\n");
        run.signal(signal);
        assert_eq!(run.end(), (Some(130), "wideleaf: interrupted\n".to_owned()));
        assert_eq!(scratch.names(), ["result"]);
        let report = fs::read_to_string(scratch.path("result")).unwrap();
        assert!(report.starts_with("interrupted: ") && report.ends_with("  outcome: interrupted\n"), "{report}");
        assert!(report.contains("\n  at the end: ") && report.contains(" not backed\n"), "{report}");
    }
}

/// The first signal ends the run after it has waited a second for a reader; the next signal ends it at once. The
/// output depends on which happens first.
#[test]
fn signals_end_a_run_that_cannot_write_its_report() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    // Standard output is full before the start, and is not read.
    let (_unread, mut full) = std::io::pipe().unwrap();
    let bytes = fcntl(&full, FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    full.write_all(&vec![0; bytes as usize]).unwrap();
    let mut command = std::process::Command::new(scratch.program());
    command.args(["run", "gups", "--cmdline=log2_words=16 seconds=3600", "--memory=64M", "--timeout=5m"]);
    command.current_dir(scratch.path(".")).stdin(Stdio::null()).stdout(full).stderr(Stdio::piped());
    let mut run = Running(command.spawn().unwrap());
    run.wait_for("comm", |name| name == "vcpu0\n");
    while run.0.try_wait().unwrap().is_none() {
        run.signal(Signal::SIGINT);
        std::thread::sleep(Duration::from_millis(50));
    }
    let (code, said) = run.end();
    assert_eq!(code, Some(130), "{said}");
    assert!(said.is_empty() || said.ends_with("wideleaf: interrupted\n"), "{said}");
}

/// As `timeout(1)` sends them: to its child, and to the child's process group.
#[test]
fn two_simultaneous_signals_leave_the_report() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let cmdline = "--cmdline=log2_words=16 seconds=3600";
    let mut run =
        Running::start(&scratch, &["run", "gups", cmdline, "--memory=64M", "--output=report", "--format=json"]);
    run.wait_for("comm", |name| name == "vcpu0\n");
    run.signal(Signal::SIGTERM);
    run.signal(Signal::SIGTERM);
    assert_eq!(run.end().0, Some(130));
    let report: Value = serde_json::from_slice(&fs::read(scratch.path("report")).unwrap()).unwrap();
    assert_eq!(report["outcome"], "interrupted");
}

/// Memory of this run is huge from its start. Where it is not at first, as after builds, which leave the host's memory
/// in pieces, it is once the kernel has put them together.
fn is_huge(arguments: &[&str], is_so: impl Fn(&Value) -> bool) {
    let report = succeeds(arguments);
    if !is_so(&report) {
        println!("in pieces, it seems: {report}");
        let _for_root_alone = fs::write("/proc/sys/vm/compact_memory", "1");
        let again = succeeds(arguments);
        assert!(is_so(&again), "{again}");
    }
}

/// Runs a built-in kernel in a guest, which has to verify its memory, and returns the report.
fn succeeds(arguments: &[&str]) -> Value {
    let scratch = new_scratch();
    let small = ["--memory=64M", "--timeout=5m", "--format=json"];
    let output = scratch.wideleaf(&[&["run"], arguments, &small].concat()).assert().success().stderr("");
    let report: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(report["verification"]["passed"], true, "{arguments:?}");
    assert_eq!(report["setup"]["mode"], "guest");
    assert_eq!(scratch.names(), [""; 0]);
    report
}

const GUPS: [&str; 2] = ["gups", "--cmdline=log2_words=16"];
const PATTERN: [&str; 2] = ["pattern", "--cmdline=bytes=8M passes=1"];
const PHASES: [&str; 2] = ["phases", "--cmdline=hot=2M range=4M sparse=4M cold=4M constant=4M passes=2"];

#[test]
fn gups_runs_on_one_and_two_vcpus() {
    if !has_kvm() {
        return;
    }
    for vcpus in ["1", "2"] {
        let report = succeeds(&[&GUPS[..], &["--vcpus", vcpus]].concat());
        assert_eq!(report["results"]["updates"]["value"], 262_144.0, "4 updates for each of 2^16 words");
    }
}

#[test]
fn pattern_runs_on_one_and_two_vcpus() {
    if !has_kvm() {
        return;
    }
    for vcpus in ["1", "2"] {
        let report = succeeds(&[&PATTERN[..], &["--vcpus", vcpus]].concat());
        assert_eq!(report["verification"]["errors"], 0);
    }
}

#[test]
fn phases_runs_on_one_and_two_vcpus() {
    if !has_kvm() {
        return;
    }
    for vcpus in ["1", "2"] {
        let report = succeeds(&[&PHASES[..], &["--vcpus", vcpus]].concat());
        assert_eq!(report["verification"]["errors"], 0);
        assert_eq!(
            report["results"]["updates"]["value"], 1_048_576.0,
            "two passes in each of two phases over 2^18 words"
        );
    }
}

#[test]
fn huge_pages_requested_at_the_start_exist_from_the_start_on_both_levels() {
    if !has_kvm() {
        return;
    }
    let huge = ["--backing=anon", "--host-page=2m", "--guest-page=2m", "--policy=never"];
    // Table of four windows.
    is_huge(&[&["gups", "--cmdline=log2_words=20"], &huge[..]].concat(), |report| {
        let has_no_small = |phase: &Value| ["at_begin", "at_end"].iter().all(|at| phase[at]["host_4k_bytes"] == 0);
        let kvm_has_large = |phase: &Value| phase["at_end"]["kvm"]["pages_2m"].as_u64().is_some_and(|pages| pages >= 4);
        let phases = report["phases"].as_array().unwrap();
        let table = &report["regions"][0];
        assert_eq!(table["windows"], 4, "{report}");
        phases.iter().all(|phase| has_no_small(phase) && kvm_has_large(phase)) && table["windows_host_large"] == 4
    });
}

#[test]
fn the_memory_of_page_tables_is_in_the_report_of_each_phase() {
    if !has_kvm() {
        return;
    }
    let report = succeeds(&[&GUPS[..], &["--host-page=4k", "--prefault", "--policy=never"]].concat());
    for phase in report["phases"].as_array().unwrap() {
        // 32 windows on base pages have a table of 4 KiB each.
        let process = phase["at_end"]["process_tables_bytes"].as_u64().unwrap();
        assert!((128 << 10..16 << 20).contains(&process), "{phase}");
        // The host's number for KVM's tables; the kernel adds the latest of each CPU a second later.
        assert!(phase["at_end"]["second_level_tables_of_host_bytes"].is_u64(), "{phase}");
    }
}

#[test]
fn every_backing_and_guest_page_runs() {
    if !has_kvm() {
        return;
    }
    for backing in ["--backing=anon", "--backing=memfd"] {
        for page in ["--guest-page=4k", "--guest-page=2m"] {
            succeeds(&[&GUPS[..], &[backing, page]].concat());
        }
    }
    // On the pool if it has 32 pages, otherwise on its fallback.
    let _turn = turn_at_the_pool();
    succeeds(&[&GUPS[..], &["--backing=hugetlb", "--fallback=thp"]].concat());
}

#[test]
fn a_prefaulted_guest_that_starts_huge_stays_huge() {
    if !has_kvm() {
        return;
    }
    is_huge(&[&GUPS[..], &["--host-page=2m", "--prefault", "--policy=never"]].concat(), |report| {
        let phases = report["phases"].as_array().unwrap();
        !phases.is_empty() && phases.iter().all(|phase| phase["at_end"]["host_2m_bytes"] == 64 << 20)
    });
}

#[test]
fn with_a_console_the_guests_output_is_on_standard_output_and_the_result_on_standard_error() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let arguments = ["run", GUPS[0], GUPS[1], "--memory=64M", "--timeout=1m", "--console"];
    let output = scratch.wideleaf(&arguments).assert().success();
    let text = |bytes: &Vec<u8>| String::from_utf8(bytes.clone()).unwrap();
    let (lines, result) = (text(&output.get_output().stdout), text(&output.get_output().stderr));
    assert!(lines.contains("exit") && lines.lines().count() > 3, "{lines}");
    assert!(result.contains("64 MiB") && !lines.contains("64 MiB"), "{result}");
}

#[test]
fn a_closed_console_does_not_end_the_guest() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let arguments = ["run", GUPS[0], GUPS[1], "--memory=64M", "--timeout=1m", "--console", "--output=result"];
    let mut run = Running::start(&scratch, &arguments);
    drop((run.0.stdout.take(), run.0.stderr.take()));
    assert_eq!(run.0.wait().unwrap().code(), Some(0));
    assert_eq!(scratch.names(), ["result"]);
}
