//! `wideleaf run --console`: a guest of a few instructions echoes its input, with and without a terminal. Needs KVM
//! (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use crate::program::new_scratch;
use nix::pty::{OpenptyResult, openpty};
use nix::sys::signal::Signal;
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use wideleaf_protocol::ExitCode;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::tiny_guest::{image, pvh};

/// A guest that prints `>`, then each byte that it reads, up to a `q`.
fn echo() -> Vec<u8> {
    let greet: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'>', 0xee]; // mov dx, 0x3f8; mov al, '>'; out dx, al
    // mov dx, 0x3fd; in al, dx; test al, 1; jz again
    let again: &[u8] = &[0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7];
    // mov dx, 0x3f8; in al, dx; cmp al, 'q'; je end
    let read: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xec, 0x3c, b'q', 0x74, 0x03];
    let write: &[u8] = &[0xee, 0xeb, 0xeb]; // out dx, al; jmp again
    let end = [0xb0, ExitCode::Success.port_value(), 0xe6, 0xf4, 0xeb, 0xfe]; // mov al, 0; out 0xf4, al; jmp to itself
    [greet, again, read, write, &end].concat()
}

/// `mov dx, 0x3f8; mov al, 'x'; out dx, al; jmp` to the `out`.
const ENDLESS: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee, 0xeb, 0xfd];

const ARGUMENTS: [&str; 7] =
    ["run", "image", "--memory=64M", "--policy=never", "--no-daemon", "--console", "--output=result"];

/// A run of the echoing guest on its own terminal.
struct OnTerminal {
    scratch: Scratch,
    run: Running,
    keys: File,
    /// Kept open, so that its settings can be read after the run.
    theirs: OwnedFd,
    before: Termios,
}

impl OnTerminal {
    fn start() -> OnTerminal {
        let mut on_terminal = OnTerminal::of(&echo());
        on_terminal.shows(b">");
        on_terminal
    }

    fn of(code: &[u8]) -> OnTerminal {
        let scratch = new_scratch();
        scratch.file("image", &image(&pvh(), code));
        let OpenptyResult { master, slave: theirs } = openpty(None, None).unwrap();
        let before = tcgetattr(&theirs).unwrap();
        let end = || Stdio::from(theirs.try_clone().unwrap());
        let mut command = Command::new(scratch.program());
        command.args(ARGUMENTS).current_dir(scratch.path(".")).stdin(end()).stdout(end()).stderr(Stdio::piped());
        let run = Running(command.spawn().unwrap());
        OnTerminal { scratch, run, keys: File::from(master), theirs, before }
    }

    fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
    }

    /// Reads the expected bytes and checks that no other bytes come before them.
    fn shows(&mut self, expected: &[u8]) {
        let mut shown = vec![0; expected.len()];
        self.keys.read_exact(&mut shown).unwrap();
        assert_eq!(shown, expected);
    }

    fn settings(&self) -> Termios {
        tcgetattr(self.theirs.as_fd()).unwrap()
    }

    /// Ends the run, and checks the exit code and that the terminal has its old settings.
    fn ends(self, code: i32) -> String {
        let (settings_of, before) = (self.theirs.try_clone().unwrap(), self.before.clone());
        let (ended, stderr) = self.run.end();
        assert_eq!(ended, Some(code), "{stderr}");
        assert_eq!(tcgetattr(settings_of.as_fd()).unwrap(), before);
        let mut names = self.scratch.names();
        names.retain(|name| name != "result");
        assert_eq!(names, ["image"]);
        stderr
    }
}

#[test]
fn on_a_terminal_every_key_goes_to_the_guest_and_ctrl_a_x_stops_it() {
    if !has_kvm() {
        return;
    }
    let mut terminal = OnTerminal::start();
    assert!(!terminal.settings().local_flags.intersects(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG));
    // Ctrl-C, Ctrl-Z, Ctrl-S and an invalid character: neither the terminal nor wideleaf interprets them.
    terminal.press(b"a\x03\x1a\x13\xff\x00z");
    terminal.shows(b"a\x03\x1a\x13\xff\x00z");
    terminal.press(b"\x01ab\x01h\x01pc");
    terminal.shows(b"\x01bc");
    terminal.press(b"\x01x");
    let stderr = terminal.ends(0);
    assert!(stderr.contains("Ctrl-A x  stop the VM"), "{stderr}");
    assert!(stderr.contains("cannot press the power button: the guest listens to no power button"), "{stderr}");
}

#[test]
fn the_terminal_is_restored_when_the_guest_ends_and_when_a_signal_ends_the_run() {
    if !has_kvm() {
        return;
    }
    let mut terminal = OnTerminal::start();
    terminal.press(b"q");
    terminal.ends(0);
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        let terminal = OnTerminal::start();
        terminal.run.signal(signal);
        terminal.ends(130);
    }
}

#[test]
fn the_terminal_is_restored_after_a_second_signal_and_raw_again_after_a_stop() {
    if !has_kvm() {
        return;
    }
    // The output is not read. The end of the run waits for a reader, and the second signal ends that wait.
    let mut terminal = OnTerminal::of(ENDLESS);
    terminal.shows(b"x");
    terminal.run.signal(Signal::SIGTERM);
    terminal.run.signal(Signal::SIGINT);
    terminal.ends(130);

    let mut terminal = OnTerminal::start();
    let raw = terminal.settings();
    terminal.run.signal(Signal::SIGSTOP);
    tcsetattr(terminal.theirs.as_fd(), SetArg::TCSANOW, &terminal.before).unwrap();
    terminal.run.signal(Signal::SIGCONT);
    while terminal.settings() != raw {
        std::thread::yield_now();
    }
    terminal.press(b"kq");
    terminal.shows(b"k");
    terminal.ends(0);
}

#[test]
fn without_a_terminal_all_bytes_pass_in_both_directions() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    scratch.file("image", &image(&pvh(), &echo()));
    // More bytes than the port's 64; Ctrl-A is an ordinary byte here.
    let typed: Vec<u8> = (0..4000_u32).map(|number| number as u8).filter(|byte| *byte != b'q').collect();
    let input = [&typed[..], b"q"].concat();
    let output = scratch.wideleaf(&ARGUMENTS).write_stdin(input).assert().success();
    assert_eq!(output.get_output().stdout, [b">", &typed[..]].concat());
}

/// A guest like a driver that opens the port: it reads and drops all input, enables the receive
/// interrupt, and then echoes.
fn driver() -> Vec<u8> {
    let times: &[u8] = &[0xb9, 0xd0, 0x07, 0, 0]; // mov ecx, 2000
    // in al from 0x3f8, from 0x3fa; loop
    let drop: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xec, 0x66, 0xba, 0xfa, 0x03, 0xec, 0xe2, 0xf4];
    let enable: &[u8] = &[0x66, 0xba, 0xf9, 0x03, 0xb0, 0x01, 0xee]; // mov dx, 0x3f9; mov al, 1; out dx, al
    [times, drop, enable, &echo()].concat()
}

#[test]
fn piped_input_waits_until_the_driver_no_longer_drops_it() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    scratch.file("image", &image(&pvh(), &driver()));
    // Enough `q` bytes that one is left if the driver drops all that it can; then the guest ends
    // without echoing the text.
    let input = format!("root\n{}", "q".repeat(10_000));
    let output = scratch.wideleaf(&ARGUMENTS).write_stdin(input).assert().success();
    assert_eq!(output.get_output().stdout, b">root\n");
}

#[test]
fn an_unread_console_does_not_keep_a_vm_from_ending() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    scratch.file("image", &image(&pvh(), ENDLESS));
    let mut run = Running::start(&scratch, &ARGUMENTS);
    let mut first = [0];
    run.0.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    run.signal(Signal::SIGTERM);
    let mut unread = run.0.stdout.take();
    assert_eq!(run.end().0, Some(130));
    drop(unread.take());
}

#[test]
fn a_console_takes_standard_output_alone() {
    let scratch = new_scratch();
    scratch.file("image", b"x");
    scratch.refuses(
        &["run", "image", "--console", "--format=json"],
        2,
        &["--console gives standard output to the guest", "--output"],
    );
    scratch.wideleaf(&["run", "gups", "--native", "--console"]).assert().code(2);
}
