//! The image boots under QEMU, mostly with software emulation, runs its kernels on every page size, and ends as
//! specified.
//!
//! The tests need `qemu-system-x86_64` (Debian: qemu-system-x86). Without it they are skipped and say so; with
//! `WIDELEAF_REQUIRE=qemu` in the environment they fail instead.
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use wideleaf_guest_image::{IMAGE, write_to};
use wideleaf_kernels::registry::KERNELS;
use wideleaf_protocol::direct::DIRECT_BOOT_VERSION;
use wideleaf_protocol::elf_note::{self, DirectNote, notes};
use wideleaf_protocol::{DirectBoot, Entry, ExitCode, GuestPage, Message, Name, RamRange, Status, parse};

/// A boot takes about a second, and longer on a machine that compiles on all cores at the same time.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Whether a tool that a test needs can be started. If not, prints why the test is skipped, or fails if the tool is
/// required.
fn can_start(tool: &str, requirement: &str) -> bool {
    if Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok() {
        return true;
    }
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|word| word.trim() == requirement),
        "{tool} is not installed, and WIDELEAF_REQUIRE names {requirement}"
    );
    eprintln!("skipped: {tool} is not installed; WIDELEAF_REQUIRE={requirement} makes this a failure");
    false
}

fn can_run_qemu_on_kvm() -> bool {
    let is_usable = std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(
        is_usable || !required.split(',').any(|word| word.trim() == "kvm"),
        "/dev/kvm is not usable, and WIDELEAF_REQUIRE names kvm"
    );
    if !is_usable {
        eprintln!("skipped: /dev/kvm is not usable; WIDELEAF_REQUIRE=kvm makes this a failure");
    }
    is_usable && can_run_qemu()
}

fn can_run_qemu() -> bool {
    can_start("qemu-system-x86_64", "qemu")
}

/// One boot: the settings that differ between tests.
struct Boot<'a> {
    accel: &'a str,
    machine: &'a str,
    cpu: &'a str,
    vcpus: usize,
    memory: &'a str,
    line: &'a str,
}

const MICROVM: Boot<'static> =
    Boot { accel: "tcg", machine: "microvm", cpu: "max", vcpus: 1, memory: "128M", line: "" };
/// QEMU 7.2 reads `ARCH_CAPABILITIES` from KVM and then may not set it on some AMD hosts.
const ON_KVM: Boot<'static> = Boot { accel: "kvm", cpu: "host,arch-capabilities=off", ..MICROVM };

/// Output of a boot, and QEMU's status.
struct Run {
    console: String,
    status: Option<i32>,
}

impl Boot<'_> {
    fn run(&self) -> Run {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let image = folder.path().join("wideleaf-guest.elf");
        write_to(&image).expect("the image is written");
        self.run_with(&image, &[])
    }

    fn run_with(&self, kernel: &Path, more: &[String]) -> Run {
        self.run_and_meddle(kernel, more, || ())
    }

    /// Runs, and calls `meddle` once while the pattern kernel is running.
    fn run_and_meddle(&self, kernel: &Path, more: &[String], meddle: impl FnOnce()) -> Run {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-accel", self.accel, "-M", self.machine, "-cpu", self.cpu, "-m", self.memory])
            .args(["-smp", &self.vcpus.to_string()])
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"])
            .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
            .arg("-kernel")
            .arg(kernel)
            .args(["-append", self.line])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = qemu.spawn().expect("QEMU starts");
        let mut pipe = child.stdout.take().expect("a pipe was asked for");
        let console = Arc::new(Mutex::new(String::new()));
        let sink = Arc::clone(&console);
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut bytes) {
                sink.lock().expect("no holder panics").push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        let mut meddle = Some(meddle);
        let start = Instant::now();
        let status = loop {
            match child.try_wait().expect("QEMU can be waited for") {
                Some(status) => break status.code(),
                None if start.elapsed() > TIMEOUT => {
                    child.kill().expect("QEMU can be killed");
                    child.wait().expect("QEMU can be waited for");
                    break None;
                }
                None => thread::sleep(Duration::from_millis(10)),
            }
            let is_at_work = console.lock().expect("no holder panics").contains(" begin phase=pass ");
            if let Some(meddle) = meddle.take_if(|_| is_at_work) {
                meddle();
            }
        };
        reader.join().expect("the reader ends");
        let console = console.lock().expect("no holder panics").clone();
        assert!(status.is_some(), "no end within {TIMEOUT:?}; the console has:\n{console}");
        Run { console, status }
    }
}

impl Run {
    /// Every protocol line; a malformed one fails the test.
    fn messages(&self) -> Vec<Message<'_>> {
        let parsed = self.console.lines().filter_map(parse);
        parsed.map(|message| message.unwrap_or_else(|error| panic!("{error} in\n{}", self.console))).collect()
    }

    fn assert_ended_with(&self, code: ExitCode) {
        assert_eq!(self.status, Some(code.qemu_status()), "{}", self.console);
        assert_eq!(self.messages().last(), Some(&Message::Exit { code }), "{}", self.console);
    }

    fn assert_passed(&self, kernel: &str, vcpus: usize, page: GuestPage, entry: Entry) {
        self.assert_ended_with(ExitCode::Success);
        let messages = self.messages();
        let Some(Message::Hello { kernel: name, vcpus: said, guest_page, tsc_hz, entry: door, .. }) = messages.first()
        else {
            panic!("no hello in\n{}", self.console)
        };
        assert_eq!((name.as_str(), *said as usize, *guest_page, *door), (kernel, vcpus, page, entry));
        // QEMU's counter ticks like the host's: 0.5 to 8 GHz are plausible.
        assert!((500_000_000..8_000_000_000).contains(tsc_hz), "tsc_hz={tsc_hz}");
        let verified = |message: &&Message<'_>| matches!(message, Message::Verify { status: Status::Pass, .. });
        assert_eq!(messages.iter().filter(verified).count(), 1, "{}", self.console);
        let gaps = messages.iter().filter(|message| matches!(message, Message::Gaps { .. }));
        assert_eq!(gaps.count(), vcpus, "{}", self.console);
    }

    fn panic_message(&self) -> &str {
        let lines = self.console.lines().filter_map(parse);
        let mut panics = lines.filter_map(|line| match line {
            Ok(Message::Panic { message }) => Some(message),
            _ => None,
        });
        panics.next().unwrap_or_else(|| panic!("no panic line in\n{}", self.console))
    }
}

#[test]
fn image_has_a_pvh_note_and_a_note_for_the_direct_entry() {
    let found: Vec<_> = notes(IMAGE).map(|note| (note.owner, note.kind, note.descriptor.len())).collect();
    assert_eq!(found, [(&b"Xen"[..], 18, 8), (&b"wideleaf"[..], 1, 16)]);
    let pvh = elf_note::pvh_entry(IMAGE).expect("a PVH entry");
    let direct = elf_note::direct_entry(IMAGE).expect("a direct entry");
    assert_eq!(direct.version, 1);
    for entry in [u64::from(pvh), direct.entry64] {
        assert!((0x10_0000..0x20_0000).contains(&entry), "{entry:#x} is not in the image");
    }
}

#[test]
fn image_is_a_small_static_executable_between_one_and_four_mebibytes() {
    let number = |at: usize, bytes: usize| {
        IMAGE[at..at + bytes].iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte))
    };
    // e_type 2 is a static executable at fixed addresses, e_machine 62 is x86-64.
    assert_eq!((number(16, 2), number(18, 2)), (2, 62));
    let headers = (0..number(56, 2)).map(|index| (number(32, 8) + index * number(54, 2)) as usize);
    for header in headers {
        let (kind, address, bytes) = (number(header, 4), number(header + 24, 8), number(header + 40, 8));
        // PT_LOAD or PT_NOTE: no segment needs a dynamic linker.
        assert!(matches!(kind, 1 | 4), "segment of type {kind}");
        assert!(address >= 1 << 20 && address + bytes <= 4 << 20, "{address:#x}, {bytes:#x} bytes");
    }
    // All kernels with their unrolled loops take 867 KiB. Copying a MiB takes a tenth of a millisecond at each
    // start.
    assert!(IMAGE.len() < 1 << 20, "{} bytes", IMAGE.len());
}

/// Checks every page size on one and two vCPUs.
fn assert_passes_everywhere(machine: &str, kernel: &str, parameters: &str) {
    for vcpus in [1, 2] {
        for page in [GuestPage::Base4K, GuestPage::Huge2M, GuestPage::Giant1G] {
            let line = format!("kernel={kernel} {parameters} guest_pages={page}");
            let run = Boot { machine, vcpus, line: &line, ..MICROVM }.run();
            run.assert_passed(kernel, vcpus, page, Entry::Pvh);
        }
    }
}

#[test]
fn gups_passes_on_microvm_with_every_page_size_on_one_and_two_vcpus() {
    if can_run_qemu() {
        assert_passes_everywhere("microvm", "gups", "log2_words=16");
    }
}

#[test]
fn gups_passes_on_q35_with_every_page_size_on_one_and_two_vcpus() {
    if can_run_qemu() {
        assert_passes_everywhere("q35", "gups", "log2_words=16");
    }
}

#[test]
fn pattern_passes_on_microvm_with_every_page_size_on_one_and_two_vcpus() {
    if can_run_qemu() {
        assert_passes_everywhere("microvm", "pattern", "bytes=8M passes=4");
    }
}

#[test]
fn pattern_passes_on_q35_with_every_page_size_on_one_and_two_vcpus() {
    if can_run_qemu() {
        assert_passes_everywhere("q35", "pattern", "bytes=8M passes=4");
    }
}

/// A hot span that moves once, in 16 MiB.
const SMALL_PHASES: &str = "hot=2M range=4M sparse=4M cold=4M constant=4M passes=2";

#[test]
fn phases_passes_on_microvm_with_every_page_size_on_one_and_two_vcpus() {
    if can_run_qemu() {
        assert_passes_everywhere("microvm", "phases", SMALL_PHASES);
    }
}

#[test]
fn every_kernel_passes_under_kvm_on_one_and_two_vcpus() {
    if !can_run_qemu_on_kvm() {
        return;
    }
    for (machine, kernel, parameters) in [
        ("microvm", "gups", "log2_words=16"),
        ("q35", "pattern", "bytes=8M passes=4"),
        ("microvm", "phases", SMALL_PHASES),
    ] {
        let line = &format!("kernel={kernel} {parameters}");
        for vcpus in [1, 2] {
            let run = Boot { machine, vcpus, line, ..ON_KVM }.run();
            run.assert_passed(kernel, vcpus, GuestPage::Huge2M, Entry::Pvh);
        }
    }
}

#[test]
fn gups_on_one_vcpu_loses_no_update() {
    if can_run_qemu() {
        let run = Boot { line: "gups log2_words=18 rounds=3", ..MICROVM }.run();
        run.assert_ended_with(ExitCode::Success);
        let clean = Message::Verify { status: Status::Pass, errors: 0, checked: 1 << 18 };
        assert!(run.messages().contains(&clean), "{}", run.console);
    }
}

#[test]
fn an_arena_above_the_32_bit_hole_is_mapped_and_used() {
    if can_run_qemu() {
        // q35 has 2 GiB below the hole and puts the other 3 GiB at 4 GiB; QEMU takes host memory as the guest touches
        // it.
        for page in [GuestPage::Base4K, GuestPage::Huge2M] {
            let line = format!("pattern bytes=4M guest_pages={page}");
            let run = Boot { machine: "q35", memory: "5G", line: &line, ..MICROVM }.run();
            run.assert_passed("pattern", 1, page, Entry::Pvh);
            let is_high = |message: &Message<'_>| matches!(message, Message::Region { address: 0x1_0000_0000, .. });
            assert!(run.messages().iter().any(is_high), "{}", run.console);
        }
    }
}

#[test]
fn four_vcpus_start_although_their_apic_identifiers_have_a_hole() {
    if can_run_qemu() {
        // Two sockets of three cores each; a socket's cores take two bits: identifiers 0, 1, 2, 4, 5, 6.
        let boot = Boot { machine: "q35", line: "gups log2_words=16 vcpus=4", ..MICROVM };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let image = folder.path().join("wideleaf-guest.elf");
        write_to(&image).expect("the image is written");
        let topology = ["-smp", "6,sockets=2,cores=3,threads=1"].map(String::from);
        let run = boot.run_with(&image, &topology);
        run.assert_passed("gups", 4, GuestPage::Huge2M, Entry::Pvh);
    }
}

#[test]
fn the_command_line_may_ask_for_fewer_vcpus_than_there_are_and_not_for_more() {
    if can_run_qemu() {
        let one_of_two = Boot { vcpus: 2, line: "gups log2_words=16 vcpus=1", ..MICROVM }.run();
        one_of_two.assert_passed("gups", 1, GuestPage::Huge2M, Entry::Pvh);
        let three_of_two = Boot { vcpus: 2, line: "gups log2_words=16 vcpus=3", ..MICROVM }.run();
        three_of_two.assert_ended_with(ExitCode::Unsupported);
        assert_eq!(three_of_two.panic_message(), "vcpus=3, but the machine has 2");
    }
}

#[test]
fn giant_guest_pages_are_refused_on_a_cpu_without_them() {
    if can_run_qemu() {
        let run = Boot { cpu: "qemu64", line: "gups log2_words=16 guest_pages=1g", ..MICROVM }.run();
        run.assert_ended_with(ExitCode::Unsupported);
        assert!(run.panic_message().contains("this CPU has no 1 GiB pages"), "{}", run.console);
    }
}

#[test]
fn a_wrong_command_line_ends_with_the_bad_arguments_code_and_a_reason() {
    if can_run_qemu() {
        let kernels = KERNELS.iter().map(|kernel| kernel.name.as_str()).collect::<Vec<_>>().join(", ");
        let cases = [
            ("kernel=linpack", &*format!("unknown kernel \"linpack\"; choose one of {kernels}")),
            ("", &format!("no kernel named; give kernel=NAME, where NAME is {kernels}")),
            ("gups guest_pages=16k", "guest_pages=16k: expected 4k, 2m or 1g"),
            (
                &*format!("gups guest_pages={}", "x".repeat(1000)),
                &*format!("guest_pages={}...: expected 4k, 2m or 1g", "x".repeat(32)),
            ),
            ("gups vcpus=0", "vcpus=0: expected a count from 1 to 16"),
            (
                "gups words=7",
                "unknown parameter words=; choose one of log2_words, rounds, seconds, sparse, progress_ms",
            ),
        ];
        for (line, message) in cases {
            let run = Boot { line, ..MICROVM }.run();
            run.assert_ended_with(ExitCode::BadArguments);
            assert_eq!(run.panic_message(), message);
        }
    }
}

#[test]
fn a_table_larger_than_ram_is_refused_with_both_sizes() {
    if can_run_qemu() {
        let run = Boot { line: "gups log2_words=25", ..MICROVM }.run();
        run.assert_ended_with(ExitCode::Unsupported);
        assert!(run.panic_message().starts_with("needs 256 MiB of memory, but has 1"), "{}", run.console);
    }
}

#[test]
fn an_exception_ends_with_its_own_code_its_name_and_its_place() {
    if can_run_qemu() {
        // A non-maskable interrupt is an exception that a test can cause from outside. SeaBIOS opens its line.
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (image, socket) = (folder.path().join("wideleaf-guest.elf"), folder.path().join("qmp"));
        write_to(&image).expect("the image is written");
        let monitor = ["-qmp".to_owned(), format!("unix:{},server=on,wait=off", socket.display())];
        let interrupt = || {
            let mut monitor = UnixStream::connect(&socket).expect("QEMU listens");
            monitor.set_read_timeout(Some(TIMEOUT)).expect("a timeout that is not zero");
            let commands = r#"{"execute": "qmp_capabilities"} {"execute": "inject-nmi"}"#;
            monitor.write_all(commands.as_bytes()).expect("QEMU takes commands");
            // Wait until QEMU hangs up: closing at once could lose the second command.
            let mut answers = Vec::new();
            let _ = monitor.read_to_end(&mut answers);
        };
        let boot = Boot { machine: "q35", line: "pattern bytes=4M seconds=60", ..MICROVM };
        let run = boot.run_and_meddle(&image, &monitor, interrupt);
        run.assert_ended_with(ExitCode::Exception);
        let message = run.panic_message();
        assert!(message.starts_with("exception 2 (non-maskable interrupt), error code 0x0, rip 0x1"), "{message}");
    }
}

/// Address at which the stub for the direct entry expects the boot data.
const BOOT_DATA: u64 = 0x90_0000;

/// Starts the image by its direct entry. A stub brings QEMU's vCPUs into the state of the contract; without KVM
/// this is the closest substitute for our VMM.
fn run_directly(vcpus: u32, boot: DirectBoot, line: &str) -> Run {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = |name: &str| folder.path().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/direct_start/stub.s");
    let status = Command::new("cc")
        .args(["-nostdlib", "-static", "-no-pie", "-Wl,-Ttext=0x800000,-estart,--build-id=none", "-o"])
        .args([&file("stub.elf"), &source])
        .status();
    assert!(status.expect("cc starts").success());

    let mut boot = DirectBoot { vcpus, cmdline_gpa: BOOT_DATA + 0x400, cmdline_len: line.len() as u64, ..boot };
    boot.push_ram(RamRange { gpa: 0, bytes: 128 << 20 }).expect("room for a range");
    let DirectNote { entry64, .. } = elf_note::direct_entry(IMAGE).expect("a direct entry");
    let mut data = vec![0; 0x808];
    data[..boot.to_bytes().len()].copy_from_slice(&boot.to_bytes());
    data[0x400..0x400 + line.len()].copy_from_slice(line.as_bytes());
    data[0x800..].copy_from_slice(&entry64.to_le_bytes());
    std::fs::write(file("boot-data"), data).expect("the boot data are written");
    write_to(&file("image.elf")).expect("the image is written");

    let loader = |path: PathBuf, more: String| ["-device".to_owned(), format!("loader,file={}{more}", path.display())];
    let image = loader(file("image.elf"), String::new());
    let data = loader(file("boot-data"), format!(",addr={BOOT_DATA:#x},force-raw=on"));
    let vcpus = vcpus as usize;
    Boot { machine: "q35", vcpus, ..MICROVM }.run_with(&file("stub.elf"), &[image, data].concat())
}

/// Boot data as a VMM would give them: everything up to the stub's own memory is in use.
fn direct_boot() -> DirectBoot {
    DirectBoot { free_start: 0xa0_0000, tsc_hz: 2_000_000_000, ..DirectBoot::default() }
}

#[test]
fn the_direct_entry_runs_on_one_and_two_vcpus_in_the_memory_it_was_given() {
    if can_run_qemu() && can_start("cc", "cc") {
        for vcpus in [1, 2] {
            let run = run_directly(vcpus, direct_boot(), "pattern bytes=4M passes=3 guest_pages=2m");
            run.assert_passed("pattern", vcpus as usize, GuestPage::Huge2M, Entry::Direct);
            let name = Name::literal("pattern");
            let region = Message::Region { name, address: 0xa0_0000, bytes: 4 << 20 };
            assert!(run.messages().contains(&region), "{}", run.console);
        }
    }
}

#[test]
fn the_direct_entry_refuses_boot_data_it_does_not_understand() {
    if can_run_qemu() && can_start("cc", "cc") {
        let unknown = run_directly(1, DirectBoot { version: 7, ..direct_boot() }, "gups log2_words=16");
        unknown.assert_ended_with(ExitCode::Unsupported);
        assert_eq!(unknown.panic_message(), format!("boot data have version 7, expected {DIRECT_BOOT_VERSION}"));
        let inside = run_directly(1, DirectBoot { free_start: 0x10_0000, ..direct_boot() }, "gups log2_words=16");
        inside.assert_ended_with(ExitCode::Unsupported);
        assert!(inside.panic_message().starts_with("free_start 0x100000 lies before the image's end"));
        let other_pages = run_directly(1, direct_boot(), "gups log2_words=16 guest_pages=4k");
        other_pages.assert_ended_with(ExitCode::BadArguments);
    }
}
