//! Guests that are saved in the middle of their work and continue in another VM, with a copy of their RAM.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::PageSize;
use wideleaf_policies::units::mib;
use wideleaf_vmm::config::EntryChoice;
use wideleaf_vmm::devices::SerialOutput;
use wideleaf_vmm::devices::virtio::VirtioDevice;
use wideleaf_vmm::kvm::GuestMemory;
use wideleaf_vmm::run_loop::OnReset;
use wideleaf_vmm::{
    GuestExit, Hardware, HostLimits, ImageSource, Machine, MachineState, RestoreError, SaveError, VmConfig, VmOptions,
    WaitLimits,
};

use crate::tiny::{has_kvm, image};

/// Time limit: long enough for an emulated host, short enough for a person.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Number of lines that each vCPU of [`COUNTING`] prints.
const LINES: u32 = 300;

/// Two vCPUs count in a register, in memory and in an SSE register, compare the three after each step, and the time
/// stamp counter after each line. A lock in memory keeps their lines whole. A wrong value ends the guest with 1.
///
/// ```text
///         r15 = vCPU  r14 = line  rbx, [r12], xmm0 = counter  rbp = latest time stamp  [r13] = lock  [r13 + 8] = done
///   line: ecx = steps; do { rbx++; [r12]++; xmm0 += 1; if rbx != [r12]: bad } while --ecx
///         if xmm0 != rbx: bad; rdtsc; if it is less than rbp: bad; rbp = it
///         take the lock; out 0x3f8: '0' + r15, ' ', four letters of r14, newline; release the lock
///         if ++r14 < lines: line; [r13 + 8]++
///   wait: vCPU 0 waits until [r13 + 8] == 2 and writes 0 to the exit port; the other one waits forever
/// ```
const COUNTING: &[u8] = &[
    0x49, 0x89, 0xf7, 0x45, 0x31, 0xf6, 0x41, 0xbd, 0x00, 0x00, 0x50, 0x00, 0x41, 0xbc, 0x00, 0x10, 0x50, 0x00, 0x48,
    0xc1, 0xe6, 0x0c, 0x49, 0x01, 0xf4, 0x66, 0x0f, 0xef, 0xc0, 0xb8, 0x01, 0x00, 0x00, 0x00, 0x66, 0x48, 0x0f, 0x6e,
    0xc8, 0x31, 0xdb, 0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0, 0x48, 0x89, 0xc5, 0xb9, 0x11, 0x11, 0x11,
    0x11, 0x48, 0xff, 0xc3, 0x49, 0xff, 0x04, 0x24, 0x66, 0x0f, 0xd4, 0xc1, 0x49, 0x3b, 0x1c, 0x24, 0x0f, 0x85, 0x98,
    0x00, 0x00, 0x00, 0xff, 0xc9, 0x75, 0xe7, 0x66, 0x48, 0x0f, 0x7e, 0xc0, 0x48, 0x39, 0xd8, 0x0f, 0x85, 0x86, 0x00,
    0x00, 0x00, 0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0, 0x48, 0x39, 0xe8, 0x72, 0x78, 0x48, 0x89, 0xc5,
    0xb8, 0x01, 0x00, 0x00, 0x00, 0x41, 0x87, 0x45, 0x00, 0x85, 0xc0, 0x74, 0x04, 0xf3, 0x90, 0xeb, 0xef, 0xba, 0xf8,
    0x03, 0x00, 0x00, 0x44, 0x89, 0xf8, 0x83, 0xc0, 0x30, 0xee, 0xb0, 0x20, 0xee, 0x45, 0x89, 0xf0, 0xb9, 0x04, 0x00,
    0x00, 0x00, 0x66, 0x41, 0xc1, 0xc0, 0x04, 0x44, 0x89, 0xc0, 0x83, 0xe0, 0x0f, 0x83, 0xc0, 0x61, 0xee, 0xff, 0xc9,
    0x75, 0xed, 0xb0, 0x0a, 0xee, 0x41, 0xc7, 0x45, 0x00, 0x00, 0x00, 0x00, 0x00, 0x41, 0xff, 0xc6, 0x41, 0x81, 0xfe,
    0x22, 0x22, 0x22, 0x22, 0x0f, 0x82, 0x6d, 0xff, 0xff, 0xff, 0xf0, 0x49, 0xff, 0x45, 0x08, 0x4d, 0x85, 0xff, 0x75,
    0x11, 0x49, 0x83, 0x7d, 0x08, 0x02, 0xf3, 0x90, 0x75, 0xf2, 0xba, 0xf4, 0x00, 0x00, 0x00, 0x31, 0xc0, 0xee, 0xf3,
    0x90, 0xeb, 0xfc, 0xba, 0xf4, 0x00, 0x00, 0x00, 0xb0, 0x01, 0xee, 0xeb, 0xf2,
];

/// Places in [`COUNTING`] of the number of steps before a line, and of the number of lines.
const STEPS_AT: usize = 0x36;
const LINES_AT: usize = 0xbe;

fn counting(steps: u32) -> Vec<u8> {
    let mut code = COUNTING.to_vec();
    code[STEPS_AT..STEPS_AT + 4].copy_from_slice(&steps.to_le_bytes());
    code[LINES_AT..LINES_AT + 4].copy_from_slice(&LINES.to_le_bytes());
    code
}

fn options(code: &[u8]) -> VmOptions {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("base pages");
    let image = ImageSource::Bytes(Cow::Owned(image(code)));
    VmOptions { memory: mib(16), vcpus: 2, ..VmOptions::new(image, backing) }
}

fn config(options: VmOptions) -> VmConfig {
    VmConfig::new(options, &HostLimits::none()).expect("the options make sense")
}

fn new_ram(config: &VmConfig) -> Arc<GuestRam> {
    GuestRam::map(&config.ram_layout(), config.backing()).expect("RAM can be mapped")
}

/// All that a guest printed, in all machines in which it ran.
#[derive(Clone, Default)]
struct Printed {
    lines: Arc<Mutex<Vec<String>>>,
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Number of machines in which the guest ran. A machine that ends emits its unfinished line, which the next one
    /// has already.
    machine: Arc<AtomicUsize>,
}

impl Printed {
    /// Output of the next machine, which the earlier ones no longer reach.
    fn output(&self) -> SerialOutput {
        let (lines, all) = (Arc::clone(&self.lines), Arc::clone(&self.bytes));
        let number = self.machine.fetch_add(1, Ordering::SeqCst) + 1;
        let (of_lines, of_bytes) = (Arc::clone(&self.machine), Arc::clone(&self.machine));
        SerialOutput {
            lines: Box::new(move |line| {
                if of_lines.load(Ordering::SeqCst) == number {
                    lines.lock().push(String::from_utf8_lossy(line).into_owned());
                }
            }),
            bytes: Some(Box::new(move |bytes| {
                if of_bytes.load(Ordering::SeqCst) == number {
                    all.lock().extend_from_slice(bytes);
                }
            })),
        }
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().clone()
    }
}

fn hardware(ram: Arc<GuestRam>, output: SerialOutput) -> Hardware {
    Hardware { ram, output, devices: Vec::new(), sandbox: None }
}

fn start(config: &VmConfig, printed: &Printed) -> Machine {
    let image = wideleaf_vmm::boot::BootImage::read(config).unwrap();
    Machine::start_image(config, &image, hardware(new_ram(config), printed.output())).expect("the VM starts")
}

/// A copy of a paused machine's RAM.
fn copy_of_ram(config: &VmConfig, machine: &Machine) -> Arc<GuestRam> {
    let ram = new_ram(config);
    let to = GuestMemory::new(Arc::clone(&ram)).unwrap();
    let mut window = vec![0; 2 << 20];
    for range in config.ram_layout() {
        for at in (range.start().get()..range.end().get()).step_by(window.len()) {
            machine.memory().view().read_slice(&mut window, GuestAddress(at)).unwrap();
            to.view().write_slice(&window, GuestAddress(at)).unwrap();
        }
    }
    ram
}

fn json(state: &MachineState) -> Vec<u8> {
    serde_json::to_vec(state).unwrap()
}

fn of_json(bytes: &[u8]) -> MachineState {
    serde_json::from_slice(bytes).unwrap()
}

/// Pauses a machine and takes its state as JSON; it stays paused.
fn saved(machine: &Machine) -> Vec<u8> {
    machine.second_level().pause().unwrap();
    json(&machine.save_state().unwrap())
}

fn wait(machine: &Machine) -> GuestExit {
    machine.wait(WaitLimits { timeout: Some(WAIT_MAX), stop: None })
}

/// Waits until the guest has printed this number of lines in all.
fn wait_for_lines(printed: &Printed, lines: usize) {
    let deadline = Instant::now() + WAIT_MAX;
    while printed.lines.lock().len() < lines {
        assert!(Instant::now() < deadline, "the guest prints no more after {} lines", printed.lines().len());
        std::thread::yield_now();
    }
}

/// The lines of one vCPU of [`COUNTING`].
fn expected(vcpu: u32) -> Vec<String> {
    let letter = |line: u32, digit: u32| char::from(b'a' + (line >> (4 * digit) & 15) as u8);
    (0..LINES)
        .map(|line| format!("{vcpu} {}", [3, 2, 1, 0].map(|digit| letter(line, digit)).iter().collect::<String>()))
        .collect()
}

/// Asserts that the guest has printed every line of both vCPUs once, and no byte beside them.
fn assert_printed_all(printed: &Printed) {
    let lines = printed.lines();
    let of = |vcpu: u32| -> Vec<String> {
        let start = format!("{vcpu} ");
        lines.iter().filter(|line| line.starts_with(&start)).cloned().collect()
    };
    for vcpu in [0, 1] {
        let wrong = of(vcpu).into_iter().zip(expected(vcpu)).find(|(printed, expected)| printed != expected);
        assert_eq!(wrong, None, "vCPU {vcpu}");
    }
    assert_eq!(lines.len(), 2 * LINES as usize);
    let bytes: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
    assert_eq!(String::from_utf8_lossy(&printed.bytes.lock()), bytes);
}

#[test]
fn a_guest_of_two_vcpus_continues_in_another_vm_again_and_again_and_loses_no_byte() {
    if !has_kvm() {
        return;
    }
    let config = config(options(&counting(100_000)));
    let printed = Printed::default();
    let mut random = 0x1234_5678_9abc_def1_u64;
    let mut machine = start(&config, &printed);
    let mut moves = 0;
    for stop in (1..10).map(|tenth| tenth * 2 * LINES as usize / 10) {
        wait_for_lines(&printed, stop);
        // Any moment: within a line, within a lock, between two steps.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_micros(random >> 54));
        let state = saved(&machine);
        let ram = copy_of_ram(&config, &machine);
        let restored = hardware(ram, printed.output());
        drop(machine);
        machine = Machine::start_restored(&config, &of_json(&state), restored, |_| Ok(())).unwrap();
        moves += 1;
    }
    assert_eq!((wait(&machine), moves), (GuestExit::ExitPort(0), 9));
    assert_printed_all(&printed);
}

#[test]
fn the_saved_guest_itself_continues_as_if_nothing_had_happened() {
    if !has_kvm() {
        return;
    }
    let config = config(options(&counting(20_000)));
    let printed = Printed::default();
    let machine = start(&config, &printed);
    let mut saves = 0;
    while printed.lines.lock().len() < LINES as usize {
        let _ = saved(&machine);
        machine.second_level().resume().unwrap();
        saves += 1;
        // The guest gets on between two saves.
        wait_for_lines(&printed, saves.min(LINES as usize));
    }
    assert_eq!(wait(&machine), GuestExit::ExitPort(0));
    assert_printed_all(&printed);
}

/// Counts in 32-bit code with interrupt controllers around it, and prints a letter after each count: the second vCPU
/// waits for its startup interrupt all the time.
fn letters(count: usize) -> Vec<u8> {
    let mut code = Vec::new();
    for n in 0..count {
        // mov ecx, 1000; again: dec ecx; jnz again; mov al, letter; mov edx, 0x3f8; out dx, al
        code.extend([0xb9, 0xe8, 3, 0, 0, 0xff, 0xc9, 0x75, 0xfc, 0xb0, letter_of(n), 0xba, 0xf8, 3, 0, 0, 0xee]);
    }
    // mov al, 10; out dx, al; mov al, 9; mov edx, 0xf4; out dx, al; jmp $
    code.extend([0xb0, 10, 0xee, 0xb0, 9, 0xba, 0xf4, 0, 0, 0, 0xee, 0xeb, 0xfe]);
    code
}

fn letter_of(n: usize) -> u8 {
    b'a' + (n % 26) as u8
}

#[test]
fn a_guest_with_interrupt_controllers_continues_in_the_middle_of_a_line() {
    if !has_kvm() {
        return;
    }
    const LETTERS: usize = 400;
    let config = config(VmOptions { entry: EntryChoice::Pvh, ..options(&letters(LETTERS)) });
    let printed = Printed::default();
    let mut machine = start(&config, &printed);
    for stop in [1, 100, 200, 300] {
        let deadline = Instant::now() + WAIT_MAX;
        while printed.bytes.lock().len() < stop {
            assert!(Instant::now() < deadline, "the guest prints no more");
            std::thread::yield_now();
        }
        machine.type_in(b"x");
        let state = saved(&machine);
        let restored = hardware(copy_of_ram(&config, &machine), printed.output());
        drop(machine);
        machine = Machine::start_restored(&config, &of_json(&state), restored, |_| Ok(())).unwrap();
        assert_eq!((machine.entry_name(), machine.bus_counters()), ("pvh", of_json(&state).bus));
    }
    assert_eq!(wait(&machine), GuestExit::ExitPort(9));
    let expected: Vec<u8> = (0..LETTERS).map(letter_of).collect();
    assert_eq!(printed.lines(), [String::from_utf8(expected).unwrap()]);
    assert_eq!(machine.type_in(&[b'y'; 100]), 60, "four bytes that the guest has not read are still there");
}

/// A state of [`COUNTING`] in the middle of its work, and the RAM of that moment.
fn in_the_middle() -> (VmConfig, Vec<u8>, Arc<GuestRam>) {
    let config = config(options(&counting(1000)));
    let printed = Printed::default();
    let machine = start(&config, &printed);
    wait_for_lines(&printed, 1);
    let state = saved(&machine);
    (config.clone(), state, copy_of_ram(&config, &machine))
}

fn restored(
    config: &VmConfig,
    state: &MachineState,
    devices: Vec<Box<dyn VirtioDevice>>,
) -> Result<Machine, RestoreError> {
    let output = Printed::default().output();
    Machine::start_restored(config, state, Hardware { devices, ..hardware(new_ram(config), output) }, |_| Ok(()))
}

#[test]
fn a_state_is_refused_where_the_guest_could_not_continue() {
    if !has_kvm() {
        return;
    }
    let (config, bytes, _) = in_the_middle();
    let refused = |change: &dyn Fn(&mut MachineState), other: &VmConfig| {
        let mut state = of_json(&bytes);
        change(&mut state);
        restored(other, &state, Vec::new()).expect_err("it cannot continue").to_string()
    };
    let with = |change: &dyn Fn(&mut VmOptions)| {
        let mut changed = options(&counting(1000));
        change(&mut changed);
        self::config(changed)
    };
    let same = |_: &mut MachineState| {};

    let message = refused(&|state| state.version += 1, &config);
    assert!(message.contains("version 2") && message.contains("reads version 1"), "{message}");
    let message = refused(&same, &with(&|options| options.vcpus = 1));
    assert!(message.contains("2 vCPUs") && message.contains("has 1"), "{message}");
    let message = refused(&same, &with(&|options| options.memory = mib(32)));
    assert!(message.contains("16 MiB of RAM"), "{message}");
    let message = refused(&same, &with(&|options| options.on_reset = OnReset::Restart));
    assert!(message.starts_with("cannot restore with --on-reset restart"), "{message}");
    let message = refused(&|state| state.tsc_khz = state.tsc_khz.map(|khz| khz / 2), &config);
    assert!(message.contains("time stamp counter"), "{message}");
    let feature = |state: &mut MachineState| {
        let leaf = state.vcpus[1].cpuid.iter_mut().find(|entry| entry.0.function == 7 && entry.0.index == 0).unwrap();
        leaf.0.ebx = u32::MAX;
    };
    let message = refused(&feature, &config);
    assert!(message.contains("features") && message.contains("leaf 0x7.0"), "{message}");
    let vendor = |state: &mut MachineState| state.vcpus[0].cpuid.iter_mut().for_each(|entry| entry.0.ebx ^= 1);
    assert!(refused(&vendor, &config).contains("CPU of"));
    let controllers = |state: &mut MachineState| state.entry = wideleaf_vmm::state::Entry::Pvh;
    assert!(refused(&controllers, &config).contains("interrupt controllers"));
}

#[test]
fn a_machine_is_not_saved_while_its_vcpus_run_or_its_devices_move() {
    if !has_kvm() {
        return;
    }
    let config = config(options(&counting(1_000_000)));
    let machine = start(&config, &Printed::default());
    assert!(matches!(machine.save_state(), Err(SaveError::Vcpus(_))), "the vCPUs run");
    machine.control().pause().unwrap();
    assert!(matches!(machine.save_state(), Err(SaveError::Gate)), "the devices run");
    machine.control().resume().unwrap();
    machine.second_level().pause().unwrap();
    machine.second_level().pause().unwrap();
    assert!(matches!(machine.save_state(), Err(SaveError::Gate)), "another part of the VMM may move memory");
    machine.second_level().resume().unwrap();
    machine.save_state().unwrap();
    machine.second_level().resume().unwrap();
    machine.stop();
    assert!(matches!(machine.save_state(), Err(SaveError::Vcpus(_))), "the VM has ended");
}

/// A generator of the same numbers each time.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end.max(1)
    }
}

/// Changes one value of a JSON document: a number, the digits of a text, or a list's length.
fn change_somewhere(value: &mut serde_json::Value, random: &mut Random) {
    use serde_json::Value;
    match value {
        Value::Object(map) => {
            let n = random.below(map.len());
            if let Some((_, value)) = map.iter_mut().nth(n) {
                change_somewhere(value, random);
            }
        }
        Value::Array(list) => match random.below(8) {
            0 => drop(list.pop()),
            1 => list.extend(list.first().cloned()),
            _ => {
                let n = random.below(list.len());
                if let Some(value) = list.get_mut(n) {
                    change_somewhere(value, random);
                }
            }
        },
        Value::String(text) if !text.is_empty() => {
            let at = random.below(text.len());
            let digit = char::from(b"0123456789abcdefg"[random.below(17)]);
            text.replace_range(at..=at, &digit.to_string());
        }
        Value::Bool(is_true) => *is_true = !*is_true,
        _ => *value = [0, 1, 0xffff, u64::from(u32::MAX), 1 << 63, u64::MAX][random.below(6)].into(),
    }
}

#[test]
fn a_hostile_state_is_an_error_or_a_guest_that_ends_and_never_a_panic() {
    if !has_kvm() {
        return;
    }
    let pvh = || {
        let config = config(VmOptions { entry: EntryChoice::Pvh, ..options(&letters(400)) });
        let machine = start(&config, &Printed::default());
        let state = saved(&machine);
        (config, state)
    };
    let direct = || {
        let (config, state, _) = in_the_middle();
        (config, state)
    };
    let (mut refused, mut started) = (0, 0);
    for (config, bytes) in [direct(), pvh()] {
        for seed in 0..150 {
            let mut random = Random(seed);
            let mut document: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
            for _ in 0..=random.below(4) {
                change_somewhere(&mut document, &mut random);
            }
            let state = serde_json::from_value::<MachineState>(document);
            match state.ok().map(|state| restored(&config, &state, Vec::new())) {
                Some(Ok(machine)) => {
                    started += 1;
                    assert!(!matches!(machine.stop(), GuestExit::ThreadLost { .. }), "seed {seed}: a thread panicked");
                }
                Some(Err(error)) => {
                    refused += 1;
                    assert!(error.to_string().starts_with("cannot "), "seed {seed}: {error}");
                }
                None => refused += 1,
            }
        }
    }
    assert!(refused > 10 && started > 10, "{refused} refused, {started} started");
}
