//! Entries, exits, pause and resume of tiny guests, and what KVM maps for them.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_memory::second_level::{FaultCounters, PagingMode, SecondLevelError, Slot, TableLevels};
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, SecondLevel};
use wideleaf_policies::PageSize;
use wideleaf_policies::units::{gib, mib};
use wideleaf_vmm::config::EntryChoice;
use wideleaf_vmm::kvm::KvmSystem;
use wideleaf_vmm::run_loop::VcpuState;
use wideleaf_vmm::x86::cpuid::has_page_size;
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

use crate::tiny::{CODE, has_kvm, image};

/// Time limit: long enough for an emulated host, short enough for a person.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Address of the guests' counter, behind the page tables, which follow the code's page.
const COUNTER: u32 = 0x50_0000;

/// Whether this process runs only this test, so that its counts are its own. If not, starts a process that does.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "WIDELEAF_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let program = std::env::current_exe().unwrap();
    let output = std::process::Command::new(program).args([test, "--exact"]).env(ALONE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(" 1 passed"), "{test}, alone: {}\n{text}", output.status);
    false
}

// ---- the guests -----------------------------------------------------------------------------------------------------

/// `mov al, byte; mov edx, port; out dx, al`, valid as 64-bit and as 32-bit code.
fn out(port: u16, byte: u8) -> Vec<u8> {
    let port = port.to_le_bytes();
    vec![0xb0, byte, 0xba, port[0], port[1], 0, 0, 0xee]
}

fn print(text: &str) -> Vec<u8> {
    text.bytes().flat_map(|byte| out(0x3f8, byte)).collect()
}

fn exit(code: u8) -> Vec<u8> {
    [out(0xf4, code), SPIN.to_vec()].concat()
}

const SPIN: [u8; 2] = [0xeb, 0xfe];

/// Counts in [`COUNTER`] forever: `inc qword [COUNTER]; jmp` back.
fn count() -> Vec<u8> {
    let [a, b, c, d] = COUNTER.to_le_bytes();
    vec![0x48, 0xff, 0x04, 0x25, a, b, c, d, 0xeb, 0xf6]
}

/// Writes one byte of every page in `[start, end)`, over and over, and counts the passes in [`COUNTER`].
fn touch(start: u32, end: u32) -> Vec<u8> {
    let [a, b, c, d] = COUNTER.to_le_bytes();
    let mut code = vec![0xbb];
    code.extend(start.to_le_bytes());
    // again: mov [rbx], al; add rbx, 4096; cmp rbx, end; jb again
    code.extend([0x88, 0x03, 0x48, 0x81, 0xc3, 0x00, 0x10, 0, 0, 0x48, 0x81, 0xfb]);
    code.extend(end.to_le_bytes());
    code.extend([0x72, 0xee]);
    // inc qword [COUNTER]; jmp to the start
    code.extend([0x48, 0xff, 0x04, 0x25, a, b, c, d]);
    code.extend([0xeb, (-(code.len() as i8) - 2) as u8]);
    code
}

// ---- running them ---------------------------------------------------------------------------------------------------

fn options(code: &[u8]) -> VmOptions {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous huge pages exist");
    VmOptions { memory: mib(256), ..VmOptions::new(ImageSource::Bytes(Cow::Owned(image(code))), backing) }
}

type Lines = Arc<Mutex<Vec<String>>>;

fn start(options: VmOptions) -> (Machine, Lines) {
    let config = VmConfig::new(options, &HostLimits::none()).expect("the options make sense");
    let ram = GuestRam::map(&config.ram_layout(), config.backing()).expect("RAM can be mapped");
    let lines = Lines::default();
    let sink = Arc::clone(&lines);
    // A kernel that hangs leaves no other trace.
    let is_shown = matches!(config.image(), ImageSource::File(_));
    let machine = Machine::start(
        &config,
        ram,
        Box::new(move |line| {
            let line = String::from_utf8_lossy(line).into_owned();
            if is_shown {
                eprintln!("  | {line}");
            }
            sink.lock().push(line);
        }),
    )
    .expect("the VM starts");
    (machine, lines)
}

fn run(options: VmOptions) -> (GuestExit, Vec<String>) {
    let (machine, lines) = start(options);
    let exit = machine.wait(WaitLimits { timeout: Some(WAIT_MAX), stop: None });
    let lines = lines.lock().clone();
    (exit, lines)
}

fn counter(machine: &Machine) -> u64 {
    machine.memory().view().read_obj(GuestAddress(u64::from(COUNTER))).expect("the counter is RAM")
}

/// Polls until `is_done`, or fails with the last sample.
fn until<T: std::fmt::Debug>(what: &str, mut sample: impl FnMut() -> T, is_done: impl Fn(&T) -> bool) -> T {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        let seen = sample();
        if is_done(&seen) {
            return seen;
        }
        assert!(Instant::now() < deadline, "{what}: saw {seen:?} for {WAIT_MAX:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

// ---- entries and exits ----------------------------------------------------------------------------------------------

#[test]
fn a_direct_guest_prints_and_ends_with_its_code() {
    if !has_kvm() {
        return;
    }
    let (machine, lines) = start(options(&[print("hi\r\nthere"), exit(7)].concat()));
    let end = machine.wait(WaitLimits { timeout: Some(WAIT_MAX), stop: None });
    assert_eq!(end, GuestExit::ExitPort(7));
    assert_eq!(*lines.lock(), ["hi", "there"]);
    assert_eq!(machine.entry_name(), "direct");
    assert_eq!(machine.vcpu_states(), [VcpuState::Finished]);
    eprintln!("first byte after {:?}, of that {:?} setup:", machine.first_byte_after(), machine.setup_times().total());
    for (step, time) in &machine.setup_times().steps {
        eprintln!("  {step:<12}{time:?}");
    }
}

#[test]
fn every_guest_page_size_boots() {
    if !has_kvm() {
        return;
    }
    let cpuid = KvmSystem::open().unwrap().supported_cpuid().unwrap();
    for (guest_page, memory) in
        [(PageSize::Base4K, mib(256)), (PageSize::Huge2M, mib(256)), (PageSize::Giant1G, gib(1))]
    {
        if !has_page_size(&cpuid, guest_page) {
            eprintln!("skipped: this host offers guests no pages of {guest_page}");
            continue;
        }
        let (end, lines) = run(VmOptions { guest_page, memory, ..options(&[print("ok\n"), exit(0)].concat()) });
        assert_eq!((end, lines), (GuestExit::ExitPort(0), vec!["ok".to_owned()]), "{guest_page}");
    }
}

#[test]
fn a_pvh_guest_finds_its_start_info() {
    if !has_kvm() {
        return;
    }
    // 32-bit code: cmp dword [ebx], magic; jne spin; exit(9)
    let mut code = vec![0x81, 0x3b, 0x78, 0xc5, 0x6e, 0x33, 0x75, 0xfe];
    code.extend(print("pvh\n"));
    code.extend(exit(9));
    let (end, lines) = run(VmOptions { entry: EntryChoice::Pvh, ..options(&code) });
    assert_eq!((end, lines), (GuestExit::ExitPort(9), vec!["pvh".to_owned()]));
}

#[test]
fn a_device_may_be_accessed_right_after_an_exception_that_kvm_injects() {
    if !has_kvm() {
        return;
    }
    const DEVICE: u32 = 0xd000_0000;
    const TABLES_AT: usize = 0x80;
    let at = |offset: usize| (CODE as u32 + offset as u32).to_le_bytes();
    // 32-bit code: mov esp; lgdt; lidt; ud2, which KVM intercepts and then injects; the gate's code: mov [DEVICE], eax
    let mut code = [&[0xbc][..], &at(0x1000), &[0x0f, 0x01, 0x15], &at(TABLES_AT)].concat();
    code.extend([&[0x0f, 0x01, 0x1d][..], &at(TABLES_AT + 8), &[0x0f, 0x0b]].concat());
    let [low, high] = [0, 2].map(|part| [at(code.len())[part], at(code.len())[part + 1]]);
    code.extend([&[0xa3][..], &DEVICE.to_le_bytes(), &exit(7)].concat());
    code.resize(TABLES_AT, 0);
    // Limits and addresses of the two tables; one segment of code; six empty gates and that of #UD.
    code.extend([&[15, 0][..], &at(TABLES_AT + 16), &[0, 0, 55, 0], &at(TABLES_AT + 32), &[0, 0]].concat());
    code.extend([0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0x9b, 0xcf, 0]);
    code.extend([&[0; 48][..], &low, &[8, 0, 0, 0x8e], &high].concat());
    let (end, _) = run(VmOptions { entry: EntryChoice::Pvh, ..options(&code) });
    assert_eq!(end, GuestExit::ExitPort(7));
}

#[test]
fn a_stray_access_is_reported_with_its_address_and_registers() {
    if !has_kvm() {
        return;
    }
    // mov r15d, 0x1234; mov rbx, 3 GiB; mov rax, [rbx]
    let mut code = vec![0x41, 0xbf, 0x34, 0x12, 0, 0, 0x48, 0xbb];
    code.extend((3u64 << 30).to_le_bytes());
    code.extend([0x48, 0x8b, 0x03]);
    let (end, _) = run(options(&code));
    let GuestExit::Fault { vcpu: 0, vector: 14, error_code, registers } = end else { panic!("got {end}") };
    assert_eq!(error_code, 4, "a read by ring 3 of an absent page");
    assert_eq!((registers.cr2(), registers.rip), (3 << 30, CODE + 16));
    assert_eq!((registers.general[15], registers.segments), (0x1234, [0x1b, 0x23]));
    assert_eq!(registers.code[..3], [0x48, 0x8b, 0x03]);
}

#[test]
fn a_privileged_instruction_is_a_fault_not_a_halt() {
    if !has_kvm() {
        return;
    }
    let (end, _) = run(options(&[0xf4]));
    assert!(matches!(end, GuestExit::Fault { vector: 13, .. }), "got {end}");
}

#[test]
fn a_guest_that_destroys_its_gates_ends_in_a_triple_fault() {
    if !has_kvm() {
        return;
    }
    // mov edi, IDT; mov ecx, 64; xor eax, eax; rep stosq; ud2
    let code = [0xbf, 0, 0x20, 0, 0, 0xb9, 64, 0, 0, 0, 0x31, 0xc0, 0xf3, 0x48, 0xab, 0x0f, 0x0b];
    let (end, _) = run(options(&code));
    assert!(matches!(end, GuestExit::Shutdown { vcpu: 0, .. }), "got {end}");
    eprintln!("{end}");
}

#[test]
fn all_vcpus_start_and_know_their_number() {
    if !has_kvm() {
        return;
    }
    let [a, b, c, d] = COUNTER.to_le_bytes();
    // lock bts dword [COUNTER], esi: each sets its bit; then vcpu 0 waits for all four, the others spin.
    let mut code = vec![0xf0, 0x0f, 0xab, 0x34, 0x25, a, b, c, d];
    code.extend([0x85, 0xf6, 0x75, 0xfe]);
    // wait: cmp dword [COUNTER], 15; pause; jne wait
    code.extend([0x81, 0x3c, 0x25, a, b, c, d, 15, 0, 0, 0, 0x75, 0xf3]);
    code.extend(exit(42));
    let (end, _) = run(VmOptions { vcpus: 4, ..options(&code) });
    assert_eq!(end, GuestExit::ExitPort(42));
}

#[test]
fn a_guest_that_never_ends_is_stopped_in_time() {
    if !has_kvm() {
        return;
    }
    let (machine, _) = start(VmOptions { vcpus: 2, ..options(&SPIN) });
    let end = machine.wait(WaitLimits { timeout: Some(Duration::from_millis(200)), stop: None });
    assert_eq!(end, GuestExit::TimedOut);
    assert_eq!(machine.vcpu_states(), [VcpuState::Finished; 2]);

    let (machine, _) = start(options(&SPIN));
    let stop = AtomicBool::new(true);
    assert_eq!(machine.wait(WaitLimits { timeout: None, stop: Some(&stop) }), GuestExit::Stopped);

    let (machine, _) = start(options(&SPIN));
    assert_eq!(machine.stop(), GuestExit::Stopped);
}

#[test]
fn a_dropped_machine_leaves_no_thread_and_no_file() {
    if !has_kvm() || !is_alone("boot::a_dropped_machine_leaves_no_thread_and_no_file") {
        return;
    }
    let open_files = || std::fs::read_dir("/proc/self/fd").expect("proc is mounted").count();
    let threads = || std::fs::read_dir("/proc/self/task").expect("proc is mounted").count();
    // Run once before: the first VM of a process also opens files that stay open.
    drop(start(VmOptions { vcpus: 2, ..options(&SPIN) }));
    let before = (open_files(), threads());
    for _ in 0..20 {
        drop(start(VmOptions { vcpus: 2, ..options(&SPIN) }));
    }
    assert_eq!((open_files(), threads()), before);
}

#[test]
fn a_sink_that_panics_ends_the_vm_and_all_waits() {
    if !has_kvm() {
        return;
    }
    let config = VmConfig::new(options(&[print("x\n"), exit(0)].concat()), &HostLimits::none()).unwrap();
    let ram = GuestRam::map(&config.ram_layout(), config.backing()).unwrap();
    let machine = Machine::start(&config, ram, Box::new(|_| panic!("a test's sink"))).unwrap();
    let end = machine.wait(WaitLimits { timeout: Some(WAIT_MAX), stop: None });
    assert_eq!(end, GuestExit::ThreadLost { vcpu: 0 });
}

// ---- pause and resume -----------------------------------------------------------------------------------------------

#[test]
fn a_paused_guest_stands_still_and_continues_where_it_was() {
    if !has_kvm() {
        return;
    }
    let (machine, _) = start(VmOptions { vcpus: 2, ..options(&count()) });
    let second_level = machine.second_level();
    until("the guest counts", || counter(&machine), |count| *count > 0);
    for _ in 0..100 {
        second_level.pause().unwrap();
        assert!(second_level.is_paused());
        let at_pause = counter(&machine);
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(counter(&machine), at_pause);
        second_level.resume().unwrap();
        let seen = until(
            "the guest continues",
            || (counter(&machine), machine.vcpu_states()),
            |(count, states)| *count != at_pause || states.contains(&VcpuState::Finished),
        );
        assert_ne!(seen.0, at_pause, "the guest ended instead: {}", machine.stop());
        assert!(!second_level.is_paused());
    }
    let started = Instant::now();
    second_level.pause().unwrap();
    eprintln!("pause of 2 vcpus: {:?}", started.elapsed());
    second_level.pause().unwrap();
    let modes = second_level.paging_modes().unwrap();
    assert_eq!(modes.len(), 2);
    let (root, levels) = (CODE + 0x1000, TableLevels::Four);
    assert_eq!(modes[0], PagingMode::Long { root, levels }, "the tables follow the image");
    second_level.resume().unwrap();
    assert_eq!((machine.vcpu_states(), second_level.is_paused()), (vec![VcpuState::Paused; 2], true));
    second_level.resume().unwrap();
    assert!(matches!(second_level.paging_modes(), Err(SecondLevelError::WrongState(_))));
    assert!(second_level.resume().is_err());
    assert_eq!(machine.stop(), GuestExit::Stopped);
}

#[test]
fn a_paused_machine_can_be_dropped() {
    if !has_kvm() {
        return;
    }
    let (machine, _) = start(VmOptions { vcpus: 2, ..options(&SPIN) });
    machine.second_level().pause().unwrap();
    drop(machine);
}

#[test]
fn a_sink_may_pause_the_vm_and_read_its_counters() {
    if !has_kvm() {
        return;
    }
    let config = VmConfig::new(options(&[print("now\n"), exit(0)].concat()), &HostLimits::none()).unwrap();
    let ram = GuestRam::map(&config.ram_layout(), config.backing()).unwrap();
    let second_level: Arc<Mutex<Option<Arc<dyn SecondLevel>>>> = Arc::default();
    let seen = Arc::new(Mutex::new(None));
    let (of_sink, sink_seen) = (Arc::clone(&second_level), Arc::clone(&seen));
    // The sink waits for the machine's second level, which exists once the machine has started.
    let mut unset = second_level.lock();
    let machine = Machine::start(
        &config,
        ram,
        Box::new(move |_| {
            let second_level = of_sink.lock();
            let second_level = second_level.as_ref().expect("it was set before the lock was released");
            second_level.pause().unwrap();
            *sink_seen.lock() = Some(second_level.mapping_stats().unwrap());
            second_level.resume().unwrap();
        }),
    )
    .unwrap();
    *unset = Some(machine.second_level());
    drop(unset);
    assert_eq!(machine.wait(WaitLimits { timeout: Some(WAIT_MAX), stop: None }), GuestExit::ExitPort(0));
    let stats = seen.lock().expect("the sink ran");
    assert!(stats.pages_4k + stats.pages_2m > 0, "{stats:?}");
}

// ---- what KVM maps --------------------------------------------------------------------------------------------------

/// 64 MiB that begin at a memslot of the same size.
const TOUCH_START: u32 = 64 << 20;
const TOUCH_END: u32 = 128 << 20;
const WINDOWS: u64 = 32;

/// The memslot that the guest touches.
fn touched_slot(second_level: &dyn SecondLevel) -> Slot {
    second_level.slots().into_iter().find(|slot| slot.range.start().get() == u64::from(TOUCH_START)).unwrap()
}

#[test]
fn dirty_logging_holds_a_slot_at_4k_until_it_is_switched_off() {
    if !has_kvm() {
        return;
    }
    let (machine, _) = start(options(&touch(TOUCH_START, TOUCH_END)));
    let second_level = machine.second_level();
    let stats = || second_level.mapping_stats().unwrap();
    let slot = touched_slot(second_level.as_ref());
    assert_eq!(slot.range.bytes(), mib(64));

    until("a pass", || counter(&machine), |count| *count > 0);
    let large = until("large mappings", stats, |stats| stats.pages_2m >= WINDOWS);
    assert!(matches!(second_level.take_dirty_log(slot.id), Err(SecondLevelError::WrongState(_))));

    second_level.set_dirty_log(slot.id, true).unwrap();
    let small = until("4k mappings", stats, |stats| stats.pages_4k >= WINDOWS * 512);
    assert!(small.pages_2m + WINDOWS <= large.pages_2m, "{large:?} → {small:?}");
    assert!(second_level.slots().iter().any(|now| now.id == slot.id && now.is_dirty_logged));
    // KVM may split mappings on its own when logging begins; only a whole pass during logging has
    // written every page.
    let passes = counter(&machine);
    until("a whole pass under logging", || counter(&machine), |count| *count > passes + 1);
    let dirty = second_level.take_dirty_log(slot.id).unwrap();
    assert_eq!(dirty.len() as u64, WINDOWS * 512 / 64);
    assert!(dirty.iter().map(|word| word.count_ones()).sum::<u32>() > 0, "the guest wrote");

    second_level.set_dirty_log(slot.id, false).unwrap();
    let again = until("large mappings again", stats, |stats| stats.pages_2m >= large.pages_2m);
    eprintln!("{}: {large:?} → {small:?} → {again:?}", second_level.paging().name());
    assert!(second_level.set_dirty_log(wideleaf_memory::second_level::SlotId(99), true).is_err());
}

#[test]
fn a_log_that_begins_set_keeps_large_mappings_until_their_window_is_cleared_and_then_has_every_write() {
    if !has_kvm() {
        return;
    }
    let (machine, _) = start(options(&touch(TOUCH_START, TOUCH_END)));
    let second_level = machine.second_level();
    let stats = || second_level.mapping_stats().unwrap();
    let slot = touched_slot(second_level.as_ref());
    let large = until("large mappings", stats, |stats| stats.pages_2m >= WINDOWS);
    if !second_level.start_dirty_log_set(slot.id).unwrap() {
        return println!("skipped: this KVM has no KVM_DIRTY_LOG_INITIALLY_SET (Linux 5.7)");
    }
    assert!(second_level.start_dirty_log_set(slot.id).is_err(), "it is on");
    let all_set = |log: &[u64]| log.len() as u64 == WINDOWS * 8 && log.iter().all(|word| *word == u64::MAX);
    assert!(all_set(&second_level.read_dirty_log(slot.id).unwrap()));
    let passes = counter(&machine);
    until("a whole pass", || counter(&machine), |count| *count > passes + 1);
    let kept = stats();
    assert!(kept.pages_2m >= large.pages_2m, "nothing is split: {large:?} → {kept:?}");

    // One window, from the last page of a word on.
    second_level.clear_dirty_log(slot.id, 512, &[u64::MAX; 8]).unwrap();
    let passes = counter(&machine);
    until("a whole pass", || counter(&machine), |count| *count > passes + 1);
    let one_split = stats();
    assert_eq!(one_split.pages_2m + 1, kept.pages_2m, "{kept:?} → {one_split:?}");
    assert!(all_set(&second_level.read_dirty_log(slot.id).unwrap()), "it was written again, and is not cleared");

    // No pass writes while the guest stands still.
    second_level.pause().unwrap();
    second_level.clear_dirty_log(slot.id, 0, &[u64::MAX; 8 * WINDOWS as usize]).unwrap();
    assert!(second_level.read_dirty_log(slot.id).unwrap().iter().all(|word| *word == 0));
    second_level.resume().unwrap();
    let passes = counter(&machine);
    until("a whole pass", || counter(&machine), |count| *count > passes + 1);
    assert!(second_level.take_dirty_log(slot.id).unwrap().iter().any(|word| *word != 0), "the guest writes");
    assert!(second_level.clear_dirty_log(slot.id, 1, &[1]).is_err(), "pages of half a word");
    second_level.set_dirty_log(slot.id, false).unwrap();
    let again = until("large mappings again", stats, |stats| stats.pages_2m >= large.pages_2m);
    eprintln!("{}: {large:?} → {kept:?} → {one_split:?} → {again:?}", second_level.paging().name());
}

#[test]
fn faults_and_the_time_that_they_take_are_counted_until_the_vcpu_ends() {
    if !has_kvm() {
        return;
    }
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    let (machine, _) = start(VmOptions { backing, ..options(&touch(TOUCH_START, TOUCH_END)) });
    let second_level = machine.second_level();
    let counters = || second_level.fault_counters().unwrap();
    until("a pass", || counter(&machine), |count| *count > 0);
    let touched = counters();
    let time = second_level.vcpu_time().unwrap();
    assert!(time >= touched.time_in_kernel() && time >= touched.cpu_time, "in the guest and in the kernel: {time:?}");
    eprintln!("{}: {touched:?}, {:?}", second_level.paging().name(), second_level.mapping_stats());
    assert!(touched.faults >= WINDOWS * 512 && touched.exits >= touched.faults, "{touched:?}");
    assert!(touched.ticked_time >= touched.system_time, "{touched:?}");
    assert!(touched.time_in_kernel() > Duration::ZERO, "the kernel's timer found it there: {touched:?}");
    let passes = counter(&machine);
    until("more passes", || counter(&machine), |count| *count > passes + 2);
    assert!(second_level.vcpu_time().unwrap() > time, "the guest used a core for these passes");
    let later = counters();
    assert!(later.faults < touched.faults + WINDOWS * 512, "what is mapped does not fault again: {later:?}");
    assert_eq!(machine.stop(), GuestExit::Stopped);
    assert_eq!(counters(), FaultCounters::default(), "no thread runs the vCPU");
    assert_eq!(second_level.vcpu_time().unwrap(), Duration::ZERO);
}

#[test]
fn giant_backing_is_mapped_with_giant_pages() {
    if !has_kvm() {
        return;
    }
    let backing = BackingConfig::new(BackingKind::Hugetlb, PageSize::Giant1G).unwrap();
    let options = VmOptions { memory: gib(1), backing, ..options(&touch(TOUCH_START, TOUCH_END)) };
    let config = VmConfig::new(options.clone(), &HostLimits::none()).unwrap();
    if let Err(error) = GuestRam::map(&config.ram_layout(), backing) {
        eprintln!("skipped: {error} (needs one free 1 GiB page in the hugetlb pool)");
        return;
    }
    let (machine, _) = start(options);
    let second_level = machine.second_level();
    assert_eq!(second_level.slots().len(), 1);
    until("a pass", || counter(&machine), |count| *count > 0);
    let stats = second_level.mapping_stats().unwrap();
    eprintln!("{}: {stats:?}", second_level.paging().name());
    // Shadow paging maps min(guest, host) = 2m; two-dimensional paging maps the host's page.
    assert!(stats.pages_1g >= 1 || stats.pages_2m >= WINDOWS, "{stats:?}");
    assert_eq!(stats.mapped(PageSize::Giant1G).get() % gib(1).get(), 0);
}
