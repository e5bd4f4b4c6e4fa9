//! `wideleaf run --on-reset restart`: a guest of a few instructions checks at each boot that its memory is zeroed and
//! its command line is present, and obeys typed keys. Needs KVM (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::io::{Read as _, Write as _};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use crate::migration::{client, end, target_with};
use crate::program::new_scratch;
use serde_json::Value;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::tiny_guest::{image, pvh};

/// Checks that a word of each page of [16 MiB, 32 MiB), and the word at 0x5000, is zero, and prints `C` if so and `D`
/// if not. Then it prints its command line and, after it has written all these pages, a newline. It then obeys keys:
/// `r` resets by the reset register, `k` by the keyboard controller, `q` switches off. Any other key starts the
/// second vCPU, which counts at 0x5000 forever; the guest prints `2` when it does.
#[rustfmt::skip]
const REBOOTER: &[u8] = &[
    0xbf, 0x00, 0x00, 0x00, 0x01,               // 00 mov edi, 16 MiB
    0x83, 0x3f, 0x00,                           // 05 cmp dword [edi], 0
    0x75, 0x1b,                                 // 08 jne 25
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00,         // 0a add edi, 4096
    0x81, 0xff, 0x00, 0x00, 0x00, 0x02,         // 10 cmp edi, 32 MiB
    0x72, 0xed,                                 // 16 jb 05
    0x83, 0x3d, 0x00, 0x50, 0x00, 0x00, 0x00,   // 18 cmp dword [0x5000], 0
    0x75, 0x04,                                 // 1f jne 25
    0xb0, b'C',                                 // 21 mov al, 'C'
    0xeb, 0x02,                                 // 23 jmp 27
    0xb0, b'D',                                 // 25 mov al, 'D'
    0x66, 0xba, 0xf8, 0x03,                     // 27 mov dx, 0x3f8
    0xee,                                       // 2b out dx, al
    0x8b, 0x73, 0x18,                           // 2c mov esi, [ebx + 24]: the start info's command line
    0x8a, 0x06,                                 // 2f mov al, [esi]
    0x46,                                       // 31 inc esi
    0x84, 0xc0,                                 // 32 test al, al
    0x74, 0x03,                                 // 34 jz 39
    0xee,                                       // 36 out dx, al
    0xeb, 0xf6,                                 // 37 jmp 2f
    0xbf, 0x00, 0x00, 0x00, 0x01,               // 39 mov edi, 16 MiB
    0x89, 0x3f,                                 // 3e mov [edi], edi
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00,         // 40 add edi, 4096
    0x81, 0xff, 0x00, 0x00, 0x00, 0x02,         // 46 cmp edi, 32 MiB
    0x72, 0xf0,                                 // 4c jb 3e
    0xb0, b'\n',                                // 4e mov al, 10
    0xee,                                       // 50 out dx, al
    0x66, 0xba, 0xfd, 0x03,                     // 51 mov dx, 0x3fd
    0xec,                                       // 55 in al, dx
    0xa8, 0x01,                                 // 56 test al, 1
    0x74, 0xfb,                                 // 58 jz 55
    0x66, 0xba, 0xf8, 0x03,                     // 5a mov dx, 0x3f8
    0xec,                                       // 5e in al, dx
    0x3c, b'r',                                 // 5f cmp al, 'r'
    0x74, 0x5c,                                 // 61 je bf
    0x3c, b'k',                                 // 63 cmp al, 'k'
    0x74, 0x61,                                 // 65 je c8
    0x3c, b'q',                                 // 67 cmp al, 'q'
    0x74, 0x63,                                 // 69 je ce
    // Code in real mode at 0x8000: inc dword [0x5000]; jmp to it.
    0xc7, 0x05, 0x00, 0x80, 0x00, 0x00, 0x66, 0xff, 0x06, 0x00, // 6b mov dword [0x8000], ...
    0xc7, 0x05, 0x04, 0x80, 0x00, 0x00, 0x50, 0xeb, 0xf9, 0x00, // 75 mov dword [0x8004], ...
    // The local APIC is switched on and sends to number 1: INIT, then startup at page 8.
    0xc7, 0x05, 0xf0, 0x00, 0xe0, 0xfe, 0xff, 0x01, 0x00, 0x00, // 7f mov dword [0xfee000f0], 0x1ff
    0xc7, 0x05, 0x10, 0x03, 0xe0, 0xfe, 0x00, 0x00, 0x00, 0x01, // 89 mov dword [0xfee00310], 1 << 24
    0xc7, 0x05, 0x00, 0x03, 0xe0, 0xfe, 0x00, 0x45, 0x00, 0x00, // 93 mov dword [0xfee00300], 0x4500
    0xc7, 0x05, 0x10, 0x03, 0xe0, 0xfe, 0x00, 0x00, 0x00, 0x01, // 9d mov dword [0xfee00310], 1 << 24
    0xc7, 0x05, 0x00, 0x03, 0xe0, 0xfe, 0x08, 0x46, 0x00, 0x00, // a7 mov dword [0xfee00300], 0x4608
    0x83, 0x3d, 0x00, 0x50, 0x00, 0x00, 0x00,   // b1 cmp dword [0x5000], 0
    0x74, 0xf7,                                 // b8 je b1
    0xb0, b'2',                                 // ba mov al, '2'
    0xee,                                       // bc out dx, al
    0xeb, 0x92,                                 // bd jmp 51
    0xb0, 0x06,                                 // bf mov al, 6
    0x66, 0xba, 0xf9, 0x0c,                     // c1 mov dx, 0xcf9
    0xee,                                       // c5 out dx, al
    0xeb, 0xfe,                                 // c6 jmp to itself
    0xb0, 0xfe,                                 // c8 mov al, 0xfe
    0xe6, 0x64,                                 // ca out 0x64, al
    0xeb, 0xfe,                                 // cc jmp to itself
    0x66, 0xba, 0x04, 0x06,                     // ce mov dx, 0x604
    0x66, 0xb8, 0x00, 0x20,                     // d2 mov ax, 0x2000
    0x66, 0xef,                                 // d6 out dx, ax
    0xeb, 0xfe,                                 // d8 jmp to itself
];

/// Output of each boot with zeroed memory.
const BOOTED: &str = "Cagain and again\n";

struct Rebooter {
    scratch: Scratch,
    run: Running,
    keys: ChildStdin,
    shown: ChildStdout,
}

impl Rebooter {
    fn start(arguments: &[&str]) -> Rebooter {
        let scratch = new_scratch();
        scratch.file("image", &image(&pvh(), REBOOTER));
        scratch.file("disk.img", &[0; 4096]);
        let mut command = Command::new(scratch.program());
        command.args(["run", "image", "--memory=64M", "--cmdline=again and again", "--no-daemon", "--console"]);
        command.args([
            "--on-reset=restart",
            "--output=result",
            "--format=json",
            "--control-socket=vm.sock",
            "--timeout=5m",
        ]);
        command.args(arguments).current_dir(scratch.path(".")).env("TMPDIR", scratch.path("."));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut run = Running(command.spawn().unwrap());
        let (keys, shown) = (run.0.stdin.take().unwrap(), run.0.stdout.take().unwrap());
        Rebooter { scratch, run, keys, shown }
    }

    fn press(&mut self, key: u8) {
        self.keys.write_all(&[key]).unwrap();
    }

    /// Reads the expected text and checks that no other text comes before it.
    fn shows(&mut self, expected: &str) {
        let mut shown = Vec::new();
        let bytes = (&mut self.shown).take(expected.len() as u64).read_to_end(&mut shown).unwrap();
        let shown = String::from_utf8_lossy(&shown).into_owned();
        if bytes < expected.len() || shown != expected {
            let _ = self.run.0.kill();
            let stderr = std::io::read_to_string(self.run.0.stderr.take().unwrap()).unwrap();
            panic!("{shown:?} instead of {expected:?}: {stderr}");
        }
    }

    fn vm(&self, words: &[&str]) -> Value {
        crate::control_socket::vm(&self.scratch, words)
    }

    /// Switches the guest off and returns the report.
    fn ends(mut self) -> Value {
        self.press(b'q');
        let (code, stderr) = self.run.end();
        assert_eq!(code, Some(0), "{stderr}");
        serde_json::from_slice(&std::fs::read(self.scratch.path("result")).unwrap()).unwrap()
    }
}

#[test]
fn a_guest_finds_zeroed_memory_and_its_command_line_at_each_boot_after_a_reset() {
    if !has_kvm() {
        return;
    }
    let devices = ["--disk=disk.img", "--rng", "--balloon", "--vsock=cid=3,socket=sockets", "--policy=utilization"];
    for more in [&devices[..], &["--backing=memfd", "--policy=never"], &["--prefault"], &["--no-sandbox"]] {
        let mut guest = Rebooter::start(more);
        guest.shows(BOOTED);
        for key in [b'r', b'k', b'r'] {
            guest.press(key);
            guest.shows(BOOTED);
        }
        assert_eq!(guest.vm(&["status"])["resets"], 3, "{more:?}");
        let report = guest.ends();
        assert_eq!((&report["resets"], &report["outcome"]), (&3.into(), &"success".into()), "{more:?}");
    }
}

#[test]
fn the_second_vcpu_stops_at_a_reset_and_can_be_started_again() {
    if !has_kvm() {
        return;
    }
    let mut guest = Rebooter::start(&["--vcpus=2", "--policy=never"]);
    for _ in 0..3 {
        // If the vCPU were not stopped, it would continue to count in the memory that the guest checks.
        guest.shows(BOOTED);
        guest.press(b's');
        guest.shows("2");
        guest.press(b'r');
    }
    guest.shows(BOOTED);
    assert_eq!(guest.ends()["resets"], 3);
}

#[test]
fn a_guest_is_promoted_again_after_a_reset() {
    if !has_kvm() {
        return;
    }
    let mut guest = Rebooter::start(&["--policy=greedy"]);
    // The guest writes these 16 MiB. A figure may still be that of the boot before, so the actions count as well.
    let promoted = |guest: &Rebooter, boots: u64| loop {
        let vm = guest.vm(&["statistics"])["vm"].take();
        let done = ["swap", "collapse"].map(|how| vm["work"]["outcomes"][how]["done"].as_u64().unwrap_or_default());
        if done.iter().sum::<u64>() >= boots * 8 && vm["backing"]["huge_2m"].as_u64().unwrap() >= 16 << 20 {
            break;
        }
        std::thread::yield_now();
    };
    for boots in 1..3 {
        guest.shows(BOOTED);
        promoted(&guest, boots);
        guest.press(b'r');
    }
    guest.shows(BOOTED);
    promoted(&guest, 3);
    let report = guest.ends();
    let done = |name: &str| report["manager"]["outcomes"][name].as_u64().unwrap_or_default();
    assert!(done("swap.done") + done("collapse.done") >= 3 * 8, "{report}");
}

#[test]
fn a_guest_that_resets_in_a_loop_is_ended() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    // Code of `mov al, 6; mov dx, 0xcf9; out dx, al; jmp` to itself.
    scratch.file("image", &image(&pvh(), &[0xb0, 0x06, 0x66, 0xba, 0xf9, 0x0c, 0xee, 0xeb, 0xfe]));
    let run = ["run", "image", "--memory=64M", "--policy=never", "--no-daemon"];
    let words = ["the guest reset itself 10 times within ", "it does not come up; use --on-reset stop"];
    let looping = scratch.wideleaf(&[&run[..], &["--on-reset=restart", "--format=json"]].concat()).assert().code(5);
    let stderr = String::from_utf8(looping.get_output().stderr.clone()).unwrap();
    words.iter().for_each(|word| assert!(stderr.contains(word), "no {word:?} in {stderr}"));
    let report: Value = serde_json::from_slice(&looping.get_output().stdout).unwrap();
    let outcome = report["outcome"].as_str().unwrap();
    assert!(outcome.starts_with("crashed: the guest reset itself 10 times within "), "{outcome}");
    assert_eq!(report["resets"], 9);
    // Without the option, the first reset is the end.
    let output =
        scratch.wideleaf(&[&run[..], &["--format=json"]].concat()).assert().success().get_output().stdout.clone();
    assert_eq!(serde_json::from_slice::<Value>(&output).unwrap()["resets"], 0);
}

#[test]
fn a_requested_reset_waits_while_the_vm_is_paused_and_a_vm_without_restarts_refuses_it() {
    if !has_kvm() {
        return;
    }
    let mut guest = Rebooter::start(&["--policy=never"]);
    guest.shows(BOOTED);
    assert_eq!(guest.vm(&["reset"])["state"], "running");
    guest.shows(BOOTED);
    guest.vm(&["pause"]);
    guest.vm(&["reset"]);
    while guest.vm(&["status"])["resets"] != 2 {}
    assert_eq!(guest.vm(&["status"])["state"], "paused");
    guest.vm(&["resume"]);
    guest.shows(BOOTED);
    assert_eq!(guest.ends()["resets"], 2);

    let scratch = new_scratch();
    scratch.file("image", &image(&pvh(), &[0xeb, 0xfe]));
    let arguments = ["run", "image", "--memory=64M", "--policy=never", "--no-daemon", "--control-socket=vm.sock"];
    let mut run = Running::start(&scratch, &arguments);
    while !scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {
        assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it listened");
    }
    scratch.refuses(&["vm", "vm.sock", "reset"], 2, &["a reset ends this VM", "--on-reset restart"]);
    scratch.wideleaf(&["vm", "vm.sock", "stop", "--how=kill"]).assert().success();
    assert_eq!(run.end().0, Some(0));
}

#[test]
fn a_guest_that_resets_itself_ends_its_migration_and_boots_again() {
    if !has_kvm() {
        return;
    }
    let mut guest = Rebooter::start(&["--policy=never"]);
    guest.shows(BOOTED);
    let (target, place) = target_with(&guest.scratch, "unix:move.sock", &[]);
    // Two seconds a window, of which the guest has written eight.
    let client = client(&guest.scratch, &place, &["--bytes-per-second=1M", "--pause=60s"]);
    while guest.vm(&["status"])["saving"]["done_bytes"].as_u64().is_none_or(|bytes| bytes == 0) {
        std::thread::yield_now();
    }
    guest.press(b'r');
    let (code, _, why) = end(client);
    let said = "cannot migrate the VM to unix:move.sock: its guest resets its machine; try again";
    assert!(code == Some(4) && why.contains(said), "{code:?}: {why}");
    guest.shows(BOOTED);
    assert_eq!(target.end().0, Some(4));
    assert_eq!(guest.ends()["resets"], 1);
}

#[test]
fn options_for_a_single_boot_are_refused() {
    let scratch = new_scratch();
    scratch.file("image", &image(&pvh(), REBOOTER));
    let refuses = |more: &[&str], words: &[&str]| {
        scratch.refuses(&[&["run", "image", "--on-reset=restart"], more].concat(), 2, words);
    };
    refuses(&["--record=file"], &["a recording is of one boot", "--on-reset stop"]);
    refuses(&["--policy=at-fault"], &["--policy at-fault: it decides at the first touch", "--on-reset stop"]);
    refuses(&["--policy=reservation"], &["--policy reservation: it decides"]);
}
