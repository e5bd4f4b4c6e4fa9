//! A guest that prints forever into an output that is not read. Its VM can be paused, stopped, limited in
//! time and signalled nevertheless, and reports its true state. Needs KVM (`WIDELEAF_REQUIRE=kvm` turns a
//! skip into a failure).

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::migration::AMONG_QUESTIONS;
use crate::program::new_scratch;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::pty::openpty;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::tiny_guest::{elf, prints_for_ever, pvh};

/// Time limit of an end: more than ten times the time on a busy machine. A run that hangs never ends.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

const ARGUMENTS: [&str; 7] =
    ["run", "image", "--memory=64M", "--policy=never", "--no-daemon", "--control-socket=vm.sock", "--format=json"];

/// The output that is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unread {
    StandardError,
    Console,
}

/// A run with a guest that prints forever.
struct Printing {
    scratch: Scratch,
    run: Running,
}

impl Printing {
    fn start(unread: Unread, more: &[&str]) -> Printing {
        let scratch = new_scratch();
        scratch.file("image", &prints_for_ever(b"words and words and words and words\n"));
        let output: &[&str] = match unread {
            Unread::StandardError => &["--output=result.json"],
            Unread::Console => &["--output=result.json", "--console"],
        };
        // Both outputs are pipes and are not read before the end. They have one page, so that a guest with slow
        // exits fills them too.
        let run = Running::start(&scratch, &[&ARGUMENTS, output, more].concat());
        fcntl(run.0.stderr.as_ref().unwrap(), FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
        fcntl(run.0.stdout.as_ref().unwrap(), FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
        Printing { scratch, run }
    }

    /// Waits until the VM answers, and then until the pipe is full.
    fn has_filled(&mut self) {
        let begin = Instant::now();
        while !self.scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {
            assert_eq!(self.run.0.try_wait().unwrap(), None, "it ended before it listened");
            assert!(begin.elapsed() < ENDS_WITHIN, "it listens");
            std::thread::sleep(AMONG_QUESTIONS);
        }
        std::thread::sleep(Duration::from_secs(2));
    }

    fn vm(&self, words: &[&str]) -> Value {
        crate::control_socket::vm(&self.scratch, words)
    }

    fn ends(&mut self) -> Option<i32> {
        ends(&mut self.run)
    }

    fn report(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.scratch.path("result.json")).unwrap()).unwrap()
    }
}

fn ends(run: &mut Running) -> Option<i32> {
    let begin = Instant::now();
    loop {
        if let Some(status) = run.0.try_wait().unwrap() {
            eprintln!("ended {:?} later", begin.elapsed());
            return status.code();
        }
        assert!(begin.elapsed() < ENDS_WITHIN, "it ends, read or not");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_time_limit_ends_a_run_with_an_unread_output() {
    for unread in [Unread::StandardError, Unread::Console] {
        if has_kvm() {
            let mut printing = Printing::start(unread, &["--timeout=3s"]);
            assert!(printing.ends().is_some_and(|code| code != 0), "{unread:?}");
        }
    }
}

#[test]
fn a_signal_ends_a_run_with_an_unread_output() {
    for unread in [Unread::StandardError, Unread::Console] {
        if has_kvm() {
            let mut printing = Printing::start(unread, &[]);
            printing.has_filled();
            printing.run.signal(Signal::SIGTERM);
            assert_eq!(printing.ends(), Some(130), "{unread:?}");
        }
    }
}

#[test]
fn a_vm_with_an_unread_output_is_paused_resumed_and_killed_and_reports_its_true_state() {
    for unread in [Unread::StandardError, Unread::Console] {
        if !has_kvm() {
            return;
        }
        let mut printing = Printing::start(unread, &[]);
        printing.has_filled();
        for _ in 0..3 {
            let paused = printing.vm(&["pause"]);
            assert_eq!((&paused["state"], &paused["vcpus"]), (&json!("paused"), &json!(["paused"])), "{unread:?}");
            assert_eq!(printing.vm(&["resume"])["state"], "running");
        }
        let ended = printing.vm(&["stop", "--how=kill"]);
        assert_eq!((&ended["state"], &ended["vcpus"]), (&json!("ended"), &json!(["finished"])), "{unread:?}");
        assert_eq!(printing.ends(), Some(0));
        let report = printing.report();
        let lost = match unread {
            Unread::StandardError => "stderr_lines",
            Unread::Console => "console_bytes",
        };
        assert_eq!(report["outcome"], "stopped");
        assert!(report["cut"][lost].as_u64().is_some_and(|count| count > 0), "{unread:?}: {}", report["cut"]);
    }
}

#[test]
fn lost_lines_are_reported_once_after_standard_error_is_read_again() {
    // The time to fill the queue depends on the host.
    let has_lost = has_kvm() && [2, 8].into_iter().any(|seconds| loses_lines_within(Duration::from_secs(seconds)));
    if !has_lost {
        eprintln!("skipped: this host's guests print too slowly to fill a queue of 256 KiB in some seconds");
    }
}

/// Whether lines were lost. The output has the line that reports them exactly if they were.
fn loses_lines_within(time: Duration) -> bool {
    let mut printing = Printing::start(Unread::StandardError, &[]);
    printing.has_filled();
    std::thread::sleep(time);
    let mut stderr = printing.run.0.stderr.take().unwrap();
    let read = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stderr.read_to_end(&mut bytes).map(|_| String::from_utf8_lossy(&bytes).into_owned())
    });
    printing.vm(&["stop", "--how=kill"]);
    assert_eq!(printing.ends(), Some(0));
    let text = read.join().unwrap().unwrap();
    let lost = printing.report()["cut"]["stderr_lines"].as_u64().unwrap_or(0);
    let line = format!("wideleaf: {lost} lines were not written here, because standard error was not read\n");
    assert_eq!(text.matches(&line).count(), usize::from(lost > 0), "{}", &text[text.len().saturating_sub(300)..]);
    lost > 0
}

/// A terminal also has a progress bar, which the vCPU's thread draws.
#[test]
fn a_terminal_that_accepts_no_output_blocks_nothing() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let text = b"@wideleaf begin phase=p tsc=1\n@wideleaf progress phase=p tsc=2 done=3 total=4\nwords\n";
    scratch.file("image", &prints_for_ever(text));
    let terminal = openpty(None, None).unwrap();
    let mut command = Command::new(scratch.program());
    command.args(ARGUMENTS).args(["--output=result.json", "--timeout=3s"]).current_dir(scratch.path("."));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(terminal.slave));
    let mut run = Running(command.spawn().unwrap());
    assert!(ends(&mut run).is_some_and(|code| code != 0));
}

#[test]
fn a_guests_output_cannot_control_a_terminal_and_is_unchanged_elsewhere() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let line = b"\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x07end\n@wideleaf \x1b]0;malformed\x07\n";
    let exit = [0xb0, 0, 0xe6, 0xf4, 0xeb, 0xfe]; // mov al, 0; out 0xf4, al; jmp to itself
    let print = line.iter().flat_map(|byte| [0xb0, *byte, 0xee]); // mov al, byte; out dx, al
    let code: Vec<u8> = [0x66, 0xba, 0xf8, 0x03].into_iter().chain(print).chain(exit).collect();
    scratch.file("image", &elf(&pvh(), &code, 0x1000));
    let arguments = [&ARGUMENTS[..], &["--output=result.json"]].concat();
    let elsewhere = scratch.wideleaf(&arguments).output().unwrap();
    let raw = b"\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x07end\n";
    assert!(elsewhere.stderr.windows(raw.len()).any(|bytes| bytes == raw));

    let terminal = openpty(None, None).unwrap();
    let mut command = Command::new(scratch.program());
    command.args(arguments).current_dir(scratch.path("."));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(terminal.slave));
    let mut run = Running(command.spawn().unwrap());
    drop(command);
    let (mut shown, mut bytes) = (Vec::new(), [0; 4096]);
    let mut from = File::from(terminal.master);
    // EIO: the other end is closed.
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        shown.extend(&bytes[..count]);
    }
    ends(&mut run);
    let shown = String::from_utf8_lossy(&shown);
    assert!(shown.contains("?]52;c;ZXZpbA==??]0;title?end"), "{shown:?}");
    assert!(!shown.contains("\x1b]"), "{shown:?}");
    assert_eq!(shown.matches("?]0;malformed?").count(), 1, "the line that makes no sense is in the error: {shown:?}");
}

/// The result goes to standard output and waits for its reader; a signal ends that wait.
#[test]
fn an_unread_result_waits_until_a_signal() {
    let scratch = new_scratch();
    let (from, mut to) = std::io::pipe().unwrap();
    fcntl(&to, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    while to.write(&[b'x'; 4096]).is_ok() {}
    fcntl(&to, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    let mut command = Command::new(scratch.program());
    command.args(["run", "--native", "gups", "--cmdline=log2_words=20 seconds=1", "--memory=64M", "--format=json"]);
    command.current_dir(scratch.path(".")).stdin(Stdio::null()).stdout(Stdio::from(to)).stderr(Stdio::null());
    let mut run = Running(command.spawn().unwrap());
    drop(command);
    run.wait_for("comm", |name| name.trim() == "kernel");
    // The kernel ends by itself with its threads. After that only the result waits.
    let tasks = format!("/proc/{}/task", run.0.id());
    let names = || -> Vec<String> {
        let tasks = std::fs::read_dir(&tasks).unwrap();
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok()).collect()
    };
    let begin = Instant::now();
    while names().iter().any(|name| name.trim() == "kernel") {
        assert!(begin.elapsed() < ENDS_WITHIN, "the kernel ends");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(run.0.try_wait().unwrap(), None, "it waits for its reader");
    run.signal(Signal::SIGTERM);
    assert_eq!(ends(&mut run), Some(130));
    drop(from);
}
