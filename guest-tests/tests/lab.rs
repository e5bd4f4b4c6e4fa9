//! All tests that need KVM, once more in the NPT lab: a Linux host with a real TDP MMU in KVM, emulated by QEMU.
//! On a machine without KVM they run only here; those in which no memory moves run here on such a machine alone.
//! The lab shows function, never speed.
//!
//! Memory that moves under a guest is tested on the newest kernel, which swaps windows. On 6.12 are tests of what that
//! kernel alone shows, the fallback to collapse, of giants that a policy chooses, and of what depends on no kernel.
//! `lab/README.md` has the table. With `WIDELEAF_LAB=ept` they run in the EPT lab, which takes many times as long, and
//! has neither nodes nor guests with five levels of tables.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use wideleaf_testing::programs::built;
use wideleaf_testing::{LabKernel, Need, c_program, is_there, lab_images, prepare_images};

/// The lab of these tests and the time limit of a command, for a machine that hangs. In the NPT lab the longest takes
/// four minutes on two idle processors.
fn kind_and_limit() -> [&'static str; 2] {
    match std::env::var("WIDELEAF_LAB").as_deref() {
        Ok("ept") => ["ept", "7200"],
        Ok("npt") | Err(_) => ["npt", "1500"],
        Ok(other) => panic!("WIDELEAF_LAB is {other}: choose npt or ept"),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn lab() -> Command {
    let mut lab = Command::new(root().join("guest-tests/lab/lab"));
    lab.stdin(Stdio::null());
    lab
}

/// Whether the NPT lab with this kernel is available here.
fn has_lab(kernel: LabKernel) -> bool {
    is_there(Need::Lab, kernel.prepare())
}

/// The program itself.
fn program() -> PathBuf {
    built(&["build", "-p", "wideleaf", "--bin", "wideleaf"], false)
}

/// A copy of a program without its line tables: an emulated machine unpacks every byte of it.
fn stripped(program: &Path, folder: &Path) -> PathBuf {
    let copy = folder.join(program.file_name().unwrap());
    let status = Command::new("strip").arg("--strip-debug").arg("-o").arg(&copy).arg(program).status().unwrap();
    assert!(status.success(), "strip: {status}");
    copy
}

/// Runs a command in the NPT lab with these files under `/bin`.
fn in_lab(kernel: LabKernel, files: &[(&Path, &str)], command: &str) -> Output {
    in_lab_with(&[], kernel, files, command)
}

/// The same with more options of `lab`.
fn in_lab_with(options: &[&str], kernel: LabKernel, files: &[(&Path, &str)], command: &str) -> Output {
    let (mut lab, [kind, limit]) = (lab(), kind_and_limit());
    lab.args([kind, "--kernel", kernel.name(), "--timeout", limit]).args(options);
    let folder = tempfile::tempdir().unwrap();
    for (file, name) in files {
        let is_ours = ["wideleaf", "test-under-lab"].contains(name);
        let file = if is_ours { stripped(file, folder.path()) } else { file.to_path_buf() };
        lab.arg("--file").arg(format!("{}:/bin/{name}", file.display()));
    }
    let began = std::time::Instant::now();
    let output = lab.args(["--", "sh", "-c", command]).output().unwrap();
    println!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("the lab ran for {} s", began.elapsed().as_secs());
    output
}

/// Features of the lab that no test may skip for lack of.
fn required(kernel: LabKernel) -> &'static str {
    match kernel {
        LabKernel::V6_12 => "kvm,hugetlb1g,damon,no_swap",
        LabKernel::Newest => "kvm,hugetlb,hugetlb1g,damon,uffd_move,uffd_minor,userfaultfd,swap",
    }
}

/// Runs the tests of one executable in the lab, those with one of these words in their names. None of them may skip for
/// lack of what the lab has.
fn tests_pass_in_lab(kernel: LabKernel, package: &str, test: &str, filters: &[&str]) {
    if !has_lab(kernel) {
        return;
    }
    let wideleaf = program();
    let executable = built(&["test", "--no-run", "-p", package, "--test", test], true);
    let command = format!(
        "WIDELEAF_REQUIRE={} WIDELEAF_BIN=/bin/wideleaf test-under-lab --test-threads 1 {}",
        required(kernel),
        filters.join(" ")
    );
    let output = in_lab(kernel, &[(&wideleaf, "wideleaf"), (&executable, "test-under-lab")], &command);
    assert!(output.status.success(), "{test} {filters:?} in the lab: {}", output.status);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("test result: ok."), "{test} {filters:?} ran");
    for filter in filters {
        assert!(text.lines().any(|line| line.starts_with("test ") && line.contains(filter)), "no test is {filter}");
    }
    assert!(!text.contains(" 0 passed"), "{test} {filters:?} ran");
}

#[test]
fn the_vmm_boots_and_stops_guests_in_the_lab() {
    tests_pass_in_lab(LabKernel::Newest, "wideleaf-vmm", "it", &["boot::"]);
}

#[test]
fn a_kernel_that_keeps_empty_page_tables_collapses_and_contents_survive_in_the_lab() {
    let fallback = ["fallback_to_collapse", "memfd_ram_survives_promotion"];
    tests_pass_in_lab(LabKernel::V6_12, "wideleaf-guest-tests", "it", &fallback);
}

#[test]
fn contents_survive_windows_that_are_swapped_sampled_and_split_in_the_lab() {
    let windows = ["contents_survive::", "moved_windows::", "minor_faults::", "sensors_and_actuators::"];
    tests_pass_in_lab(LabKernel::Newest, "wideleaf-guest-tests", "it", &windows);
}

#[test]
fn contents_survive_reserved_frames_and_giant_pages_that_kvm_maps_as_such_in_the_lab() {
    tests_pass_in_lab(LabKernel::Newest, "wideleaf-guest-tests", "it", &["reserved_frames::", "giant_swap::"]);
}

#[test]
fn contents_survive_giants_chosen_by_a_policy_in_the_lab() {
    tests_pass_in_lab(LabKernel::V6_12, "wideleaf-guest-tests", "it", &["giants_chosen::"]);
}

#[test]
fn nothing_is_lost_in_the_lab_whatever_fails() {
    tests_pass_in_lab(LabKernel::Newest, "wideleaf-guest-tests", "soak", &[]);
}

#[test]
fn the_kernels_own_monitor_sees_what_is_used_in_the_lab() {
    tests_pass_in_lab(LabKernel::Newest, "wideleaf-memory", "damon", &[]);
}

/// Lines of `run-all LAB --list`, by part.
fn parts_of_run_all(arguments: &[&str]) -> Vec<(String, String)> {
    let list = Command::new(root().join("guest-tests/lab/run-all")).args(arguments).output().unwrap();
    assert!(list.status.success(), "{}", String::from_utf8_lossy(&list.stderr));
    let text = String::from_utf8(list.stdout).unwrap();
    let parts = text.lines().map(|line| line.split_once(", at most ").unwrap());
    parts.map(|(part, rest)| (part.to_owned(), rest.to_owned())).collect()
}

#[test]
fn all_parts_of_both_labs_end_in_time_and_move_a_giant_where_that_works() {
    for (lab, limit) in [("npt", "1800 s: "), ("ept", "7200 s: ")] {
        let parts = parts_of_run_all(&[lab, "--list"]);
        for name in ["mappings", "windows", "frames", "giants", "soak", "damon"] {
            let found = parts.iter().find(|(part, _)| part == name);
            let Some((_, rest)) = found else { panic!("{lab} has no {name}: {parts:?}") };
            assert!(rest.starts_with(limit), "{rest}");
            // In seconds of the EPT lab, of 20 million instructions.
            assert_eq!(rest.contains("WIDELEAF_SOAK_SECONDS=240"), lab == "ept", "{rest}");
            assert!(!rest.contains("giants_chosen::"), "a policy's giants end in time on 6.12 alone: {rest}");
        }
    }
    let [(part, rest)] = &parts_of_run_all(&["npt", "--kernel", "6.12", "--list", "giants"])[..] else { panic!("one") };
    assert!(part == "giants" && rest.contains(",no_swap ") && rest.contains(" giants_chosen:: giant_swap::"), "{rest}");
}

#[test]
fn linux_guests_are_a_part_of_both_labs_on_the_newest_kernel_by_tests_that_are_here() {
    let here = std::fs::read_to_string(root().join("guest-tests/tests/lab.rs")).unwrap();
    for (lab, limit) in [("npt", "1500 s for each test: "), ("ept", "7200 s for each test: ")] {
        let parts = parts_of_run_all(&[lab, "--list"]);
        let Some((_, rest)) = parts.iter().find(|(part, _)| part == "linux") else { panic!("{lab} has no linux") };
        assert!(rest.starts_with(limit) && rest.contains(&format!("WIDELEAF_LAB={lab} ")), "{rest}");
        let tests: Vec<&str> = rest.split_once(" --test-threads 1 ").unwrap().1.split(' ').collect();
        assert_eq!(tests.len(), 4, "{rest}");
        for test in tests {
            assert_eq!(here.matches(&format!("\nfn {test}")).count(), 1, "a test begins with {test}");
        }
        let older = parts_of_run_all(&[lab, "--kernel", "6.12", "--list"]);
        assert!(older.iter().all(|(part, _)| part != "linux"), "{older:?}");
    }
    let mut run_all = Command::new(root().join("guest-tests/lab/run-all"));
    let refused = run_all.args(["ept", "--kernel", "6.12", "--list", "linux"]).output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("linux is of the newest kernel alone"), "{said}");
}

/// Runs the tests of NUMA nodes of one executable in a lab with this number of nodes: each has pages of 2 MiB in its
/// pool, and the last one a page of 1 GiB. None of them may skip for lack of what such a lab has.
fn numa_tests_pass_in_lab(kernel: LabKernel, nodes: u16, package: &str, filter: &str) {
    if !has_lab(kernel) {
        return;
    }
    let executable = built(&["test", "--no-run", "-p", package, "--test", "it"], true);
    let command = format!(
        "for pool in /sys/devices/system/node/node*/hugepages/hugepages-2048kB; do echo 24 >$pool/nr_hugepages; done; \
        WIDELEAF_REQUIRE={},hugetlb,nodes test-under-lab --test-threads 1 --nocapture {filter}",
        required(kernel)
    );
    let (nodes, page) = (nodes.to_string(), format!("{}:1", nodes - 1));
    let options = ["--nodes", &nodes, "--memory", "6G", "--hugepages-1g", &page];
    let output = in_lab_with(&options, kernel, &[(&executable, "test-under-lab")], &command);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("test result: ok."), "{}", output.status);
    assert!(!text.contains(" 0 passed") && !text.contains("skipped: this host has memory on one node"), "it ran");
}

#[test]
fn pages_lie_on_the_nodes_of_their_part_whatever_brings_them_in_the_lab() {
    numa_tests_pass_in_lab(LabKernel::Newest, 2, "wideleaf-memory", "numa::");
}

#[test]
fn pages_lie_on_the_nodes_of_their_part_among_four_in_the_lab() {
    numa_tests_pass_in_lab(LabKernel::V6_12, 4, "wideleaf-memory", "numa::");
}

#[test]
fn a_guests_pages_stay_on_their_nodes_and_intact_in_the_lab() {
    numa_tests_pass_in_lab(LabKernel::Newest, 2, "wideleaf-guest-tests", "numa::");
}

#[test]
fn a_linux_guest_sees_its_cells_on_the_nodes_that_it_was_given_in_the_lab() {
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let text = script_in_lab_with(&["--nodes", "2"], LabKernel::Newest, "cells.sh", &[]);
    let expected = [
        "nodes 0-1",
        "node 0 has CPUs 0, distances 10 31",
        "node 0 has 256 MiB",
        // More than 65534 MB/s is in tens; it is 81920.
        "node 0 is reached best from node0, in 81 ns, 81 ns, by 81920 MB/s, 81920 MB/s",
        "node 1 has CPUs 1, distances 31 10",
        "node 1 has 256 MiB",
        // Its own bandwidth is not given, and its latency is.
        "node 1 is reached best from node1, in 91 ns, 91 ns, by 0 MB/s, 0 MB/s",
        "ready",
    ];
    assert_eq!(said_by_guest(&text), expected, "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let has = |line: &str| lines.contains(&line);
    let pages: Vec<&str> = lines.iter().copied().filter(|line| line.contains(" N")).collect();
    let is_placed = |line: &&str| line.starts_with("bound N1=") || line.starts_with("preferred N0=");
    let is_of_a_part = |line: &&&str| line.starts_with("bound ") || line.starts_with("preferred ");
    assert!(pages.iter().filter(is_of_a_part).count() >= 2, "both cells have pages: {pages:?}");
    assert!(pages.iter().filter(is_of_a_part).all(is_placed), "{pages:?}");
    // The second vCPU may run on the CPUs of node 0, which are all that the lab has.
    assert!(has("vcpu0 on 0") && has("vcpu1 on 0") && has("status 0"), "{text}");
    let bad: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("bad: ")).collect();
    assert!(bad[0].contains("cell 0 asks for node 5, and this host has memory on node 0-1"), "{bad:?}");
    assert!(bad[1].contains("cell 0 asks for CPU 7, and this process may run on CPU 0"), "{bad:?}");
    assert!(bad[2].contains("cannot place cell 0 on node 1: 2 GiB are needed"), "{bad:?}");
    assert!(bad[3].contains("cell 0 has latencies=host, and this host's kernel tells none"), "{bad:?}");
    assert!(
        lines.iter().any(|line| line.starts_with("auto: wideleaf: the guest's memory comes from node 0")),
        "{text}"
    );
}

#[test]
fn windows_on_folios_between_both_page_sizes_are_on_base_pages_in_the_lab() {
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let executable = built(&["test", "--no-run", "-p", "wideleaf-memory", "--test", "it"], true);
    // With `always`, the lab's setting, the kernel would make one huge page of the window.
    let command = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled && \
        test-under-lab --test-threads 1 --nocapture mixed_sizes::";
    let output = in_lab(LabKernel::Newest, &[(&executable, "test-under-lab")], command);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("1 passed") && !text.contains("skipped: "), "{text}");
}

/// Makes pages of 1 GiB in the lab, and asserts that the kernel does it in this way.
fn giant_pages_are_made_in_lab(kernel: LabKernel, way: &str) {
    if !has_lab(kernel) {
        return;
    }
    let executable = built(&["test", "--no-run", "-p", "wideleaf-memory", "--test", "it"], true);
    // The page of the boot goes first: there is no room for two.
    let command = format!(
        "echo 0 > /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages && \
        WIDELEAF_REQUIRE=hugetlb1g WIDELEAF_GIANTS_MADE_BY={way} test-under-lab --test-threads 1 --nocapture \
        made_pages::the_kernels made_pages::a_page made_pages::guest_ram"
    );
    let output = in_lab(kernel, &[(&executable, "test-under-lab")], &command);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("3 passed") && !text.contains("skipped"), "{text}");
}

#[test]
fn a_page_of_1_gib_is_made_as_surplus_in_the_lab() {
    giant_pages_are_made_in_lab(LabKernel::Newest, "Surplus");
}

#[test]
fn a_page_of_1_gib_is_made_by_growth_of_the_pool_in_the_lab() {
    giant_pages_are_made_in_lab(LabKernel::V6_12, "Growth");
}

#[test]
fn guests_that_reset_boot_again_and_bad_ones_end_with_one_clear_line_in_the_lab() {
    if Path::new("/dev/kvm").exists() {
        println!("not run: no memory moves in these tests, and with this machine's KVM they are among wideleaf's own");
        return;
    }
    tests_pass_in_lab(LabKernel::V6_12, "wideleaf", "it", &["restart::", "guest::"]);
}

/// Runs a script of `linux_guests` with the files that a Linux guest needs, and more files. Returns its output.
fn script_in_lab(kernel: LabKernel, script: &str, more: &[(&Path, &str)]) -> String {
    script_in_lab_with(&[], kernel, script, more)
}

/// The same with more options of `lab`.
fn script_in_lab_with(options: &[&str], kernel: LabKernel, script: &str, more: &[(&Path, &str)]) -> String {
    let scripts = root().join("guest-tests/tests/linux_guests");
    let (wideleaf, script, user_space) = (program(), scripts.join(script), scripts.join("user_space.sh"));
    let (guest, files) = (kernel.guest(), [(&*script, "script.sh"), (&*user_space, "user_space.sh")]);
    let files = [&[(&*wideleaf, "wideleaf"), (&*guest, "guest")], &files[..], more].concat();
    let output = in_lab_with(options, kernel, &files, "sh /bin/script.sh");
    assert!(output.status.success(), "{}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// The lines of a guest's own.
fn said_by_guest(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.trim_end().strip_prefix("guest: ")).collect()
}

#[test]
fn linux_guests_boot_to_user_space_on_two_vcpus_and_end_in_every_way_in_the_lab() {
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let text = script_in_lab(LabKernel::Newest, "boots.sh", &[(&LabKernel::Newest.elf(), "vmlinux")]);
    let boots: Vec<&str> = text.split("boots: ").skip(1).collect();
    let [off, again, panic] = boots[..] else { panic!("three runs") };
    for (boot, lines) in [(off, 6), (again, 6), (panic, 5)] {
        let said = said_by_guest(boot);
        let expected = [
            "2 processors, clock kvm-clock",
            "packages 0 0",
            "the second one works",
            "both have timer interrupts",
            "the serial port interrupts",
            "filled 100663296 bytes",
        ];
        let boots = if boot == again { 2 } else { 1 };
        assert_eq!(said, expected[..lines].repeat(boots), "and no complaint");
    }
    assert!(again.contains("booted again 1 times"), "by a reset, in the same process");
    assert!(off.contains("manager: swap.done: "), "this kernel swaps");
    for boot in [off, again] {
        assert!(boot.contains("outcome: success") && boot.contains("status 0"));
        let is_promoted = ["swap", "collapse"].iter().any(|way| boot.contains(&format!("manager: {way}.done: ")));
        assert!(is_promoted, "it was promoted");
        assert!(boot.contains("manager: KVM's large mappings rose from 0 to "), "and used again");
    }
    assert!(panic.contains("wideleaf: the guest's kernel panicked: Attempted to kill init! exitcode=0x00000300"));
    assert!(panic.contains("status 5"));
}

#[test]
fn debians_older_kernel_and_its_memory_tester_boot_as_they_are_packaged_in_the_lab() {
    if !has_lab(LabKernel::V6_12) || !is_there(Need::Lab, prepare_images()) {
        return;
    }
    let text = script_in_lab(LabKernel::V6_12, "images.sh", &[(&lab_images(), "images")]);
    let [linux] = said_by_guest(&text)[..] else { panic!("one line, and no complaint: {:?}", said_by_guest(&text)) };
    assert!(linux.starts_with("Linux 6.1."), "{linux}");
    let number =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok());
    assert_eq!((number("linux_status"), number("memtest_status")), (Some(0), Some(0)));
    assert_eq!(number("huge_2m"), Some(64 * MIB), "all of its memory was promoted, and it went on");
    let screen: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("screen: ")).collect();
    assert!(screen.iter().any(|line| line.contains("Memtest86+ v6")), "{screen:?}");
    let errors = screen.iter().filter_map(|line| line.split_once("Errors: ")?.1.split_ascii_whitespace().next());
    let errors: Vec<&str> = errors.collect();
    assert!(errors.len() >= 6 && errors.iter().all(|count| *count == "0"), "it found no wrong word: {errors:?}");
}

#[test]
fn a_linux_guest_switches_itself_off_at_its_power_button_in_the_lab() {
    if !has_lab(LabKernel::V6_12) {
        return;
    }
    let text = script_in_lab(LabKernel::V6_12, "asked.sh", &[(&LabKernel::V6_12.elf(), "vmlinux")]);
    assert_eq!(said_by_guest(&text), ["is up", "listens", "was asked, by interrupts: 1"], "and no complaint");
    for line in ["too early: 2", "listens to no power button", "in time: 0", "status 0"] {
        assert!(text.contains(line), "{line}");
    }
}

/// The reports of the runs in a script's output.
fn reports(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| Some(serde_json::from_str(line.strip_prefix("report: ")?).unwrap())).collect()
}

/// A counter of a device in the report of a run.
fn counted(report: &Value, device: &str, counter: &str) -> u64 {
    let devices = report["devices"].as_array().unwrap();
    let is_it = |found: &&Value| found["device"].as_str().unwrap().starts_with(device);
    let device = devices.iter().find(is_it).unwrap_or_else(|| panic!("no {device} among {devices:?}"));
    assert_eq!(device["has_driver"], true, "{device}");
    device["counters"][counter].as_u64().unwrap_or_else(|| panic!("no {counter} in {device}"))
}

/// A program of the scripts.
fn compiled(name: &str, folder: &Path) -> PathBuf {
    c_program::compiled(&root().join("guest-tests/tests/linux_guests").join(name), folder)
}

#[test]
fn linux_uses_its_disks_card_sockets_and_random_bytes_and_finds_its_files_after_a_reset_in_the_lab() {
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let connect = compiled("connect.c", folder.path());
    let text = script_in_lab(LabKernel::Newest, "devices.sh", &[(&connect, "connect")]);
    let said = said_by_guest(&text);
    // Checksum of some bytes by name: from a line of the guest, or from one of the host.
    let guest = |name: &str| said.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap();
    let host = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap();
    assert!(!said.iter().any(|line| line.starts_with("complains")), "{said:?}");
    assert_eq!(guest("again"), guest("kept"), "the file is there after a reset");
    assert_eq!([guest("readonly"), host("readonly.img")], [host("readonly.img"); 2], "and the other disk as it was");
    assert!(said.contains(&"cannot write the second disk"));
    assert!(said.contains(&"rng virtio_rng.0 256"));
    for (direction, received) in [("vsock_out", host("vsock_out")), ("vsock_in", host("vsock_in"))] {
        assert_eq!(guest(direction), format!("{received} {}", host("sent")), "both ways, whichever side connects");
    }
    assert!(said.contains(&"address 10.7.0.2/24") && said.contains(&"pings"));
    assert_eq!((guest("net_in"), guest("net_out")), (host("served/sent"), host("net_out")));
    let [first, second] = &reports(&text)[..] else { panic!("two runs") };
    assert_eq!([&first["outcome"], &second["outcome"]], ["success"; 2]);
    assert!(counted(first, "disk disk.img", "flushes") > 0 && counted(first, "disk disk.img", "discarded_bytes") > 0);
    assert!(counted(first, "rng", "bytes") >= 256);
    assert_eq!(counted(second, "disk readonly.img", "written_bytes"), 0);
    assert!(
        counted(second, "net wl0", "sent_bytes") >= 8 << 20 && counted(second, "net wl0", "received_bytes") >= 4 << 20
    );
}

const MIB: u64 = 1 << 20;

/// The host's view of a guest's memory: resident bytes of its process, and bytes on huge pages.
fn seen(text: &str, state: &str) -> (u64, u64) {
    let line = text.lines().find_map(|line| line.strip_prefix(state)?.strip_prefix(" rss_kib "));
    let (resident, huge) = line.unwrap().split_once(" huge_2m ").unwrap();
    (resident.parse::<u64>().unwrap() << 10, huge.parse().unwrap())
}

#[test]
fn memory_that_linux_frees_returns_to_the_host_and_huge_pages_in_use_stay_whole_in_the_lab() {
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let text = script_in_lab(LabKernel::Newest, "give_back.sh", &[]);
    let seen = ["ready", "promoted", "freed", "promoted_again", "freed_again", "inflated", "split"]
        .map(|state| (state, seen(&text, state)));
    let [_, promoted, freed, promoted_again, freed_again, inflated, split] = seen.map(|(_, bytes)| bytes);
    // The file has 64 MiB. Its first and last pages share windows with others, and some of its windows may have
    // been on huge pages before, or not yet. What the guest's start freed may be reported while the first file is
    // filled, so nothing is compared with the first reading.
    for ((less, less_huge), (more, more_huge)) in
        [(freed, promoted), (freed, promoted_again), (freed_again, promoted_again)]
    {
        assert!(more >= less + 44 * MIB && more_huge >= less_huge + 32 * MIB, "{seen:?}");
    }
    // Pages in the balloon break no huge page until the host is short of memory.
    assert!(inflated.1 >= freed_again.1 + 24 * MIB && split.1 + 12 * MIB <= inflated.1, "{seen:?}");
    assert!(split.0 + 12 * MIB <= inflated.0, "{seen:?}");
    let said = said_by_guest(&text);
    let sums: Vec<&str> = said.iter().filter_map(|line| line.split_once(' ')?.1.into()).collect();
    assert!(!said.iter().any(|line| line.starts_with("complains")), "{said:?}");
    let [first, read, second, read_again, holes, read_holes] = sums[..] else { panic!("six sums: {said:?}") };
    assert_eq!([first, second, holes], [read, read_again, read_holes], "the guest's files are what it wrote");
    let [report] = &reports(&text)[..] else { panic!("one run") };
    assert_eq!(report["outcome"], "success");
    assert!(counted(report, "balloon", "pages_reported") >= 2 * 48 * MIB / 4096);
    assert!(counted(report, "balloon", "pages_split_windows") > 0);
    assert_eq!(counted(report, "balloon", "chains_malformed"), 0);
}

/// Numbers of the passes of one loop, in the order in which the guest printed them.
fn passes(said: &[&str], of: &str) -> Vec<u64> {
    let number = |line: &&str| {
        let (number, rest) = line.strip_prefix("pass ")?.split_once(" of ")?;
        rest.starts_with(of).then(|| number.parse().unwrap())
    };
    said.iter().filter_map(number).collect()
}

#[test]
fn a_linux_guest_that_is_saved_and_stopped_continues_with_its_devices_and_loses_no_pass_in_the_lab() {
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let text = script_in_lab(LabKernel::Newest, "snapshot.sh", &[]);
    let said = said_by_guest(&text);
    lost_no_pass(&said);
    let after = |name: &str| said.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap();
    let sum = after("sum");
    assert_eq!(after("kept"), [sum; 3].join(" "), "its files are what it wrote");
    assert_eq!(said.iter().filter(|line| **line == "random 256").count(), 3, "its devices work in every run");
    let reports = reports(&text);
    let [first, second, third] = &reports[..] else { panic!("three runs") };
    assert_eq!([&first["outcome"], &second["outcome"]], ["stopped"; 2]);
    assert_eq!(third["outcome"], "success");
    for restored in [second, third] {
        assert_eq!(restored["restored"]["filled_bytes"], restored["restored"]["stored_bytes"]);
        assert!(counted(restored, "disk disk.img", "written_bytes") > 0);
    }
}

#[test]
#[ignore = "six minutes; make lab"]
fn a_linux_guest_moves_twice_with_its_devices_and_a_connection_in_the_lab() {
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let connect = compiled("connect.c", folder.path());
    let text = script_in_lab(LabKernel::Newest, "moved.sh", &[(&connect, "connect")]);
    let said = said_by_guest(&text);
    lost_no_pass(&said);
    let guest = |name: &str| -> Vec<&str> {
        said.iter().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).collect()
    };
    let host = |name: &str| -> Vec<&str> {
        text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).collect()
    };
    let ([sum], [sent]) = (&guest("sum")[..], &host("sent")[..]) else { panic!("one sum each: {said:?}") };
    assert_eq!(guest("kept"), [[*sum; 3].join(" ")], "its files are what it wrote");
    assert_eq!((guest("random"), guest("net")), (vec!["256"; 3], vec![*sent; 3]), "its devices work in every run");
    assert_eq!((guest("socket"), host("socket")), (vec![*sent; 3], vec![*sum; 3]), "both ways, whatever its run");
    assert_eq!(guest("connection"), ["ended"], "a socket to the host does not move");
    assert_eq!(guest("stream"), host("stream"), "the connection over its card does, and lost nothing");
    let reports = reports(&text);
    let outcomes: Vec<&Value> = reports.iter().map(|report| &report["outcome"]).collect();
    assert_eq!(outcomes, ["migrated", "migrated", "success"]);
    assert!(counted(&reports[1], "balloon", "pages_inflated_at_most") >= 16 * MIB / 4096);
}

/// Each pass of both loops was printed once, and the guest complains of nothing and found no wrong file.
fn lost_no_pass(said: &[&str]) {
    assert!(!said.iter().any(|line| line.starts_with("complains") || line.starts_with("wrong")), "{said:?}");
    for of in ["a", "b"] {
        let passes = passes(said, of);
        let all: Vec<u64> = (1..=passes.len() as u64).collect();
        assert_eq!(passes, all, "whatever the guest was doing when it left");
    }
}

/// What the guest's process with pages of this size said of itself: windows on huge pages by its smaps, and windows of
/// physical memory.
fn own_pages(said: &[&str], size: &str) -> (u64, u64) {
    let line = said.iter().find_map(|line| line.strip_prefix("pages ")?.strip_prefix(size)?.strip_prefix(' '));
    let numbers: Vec<u64> = line.unwrap().split(' ').filter_map(|word| word.parse().ok()).collect();
    let [huge_kib, windows] = numbers[..] else { panic!("two numbers in {line:?}") };
    (huge_kib / 2048, windows)
}

#[test]
fn page_sizes_of_linux_processes_are_those_of_their_smaps_and_unknown_off_a_vcpu_in_the_lab() {
    const WINDOWS: u64 = 256 / 2;
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let pages = compiled("pages.c", folder.path());
    let text = script_in_lab_with(&["--five-levels"], LabKernel::Newest, "page_sizes.sh", &[(&pages, "pages")]);
    let guests: Vec<&str> = text.split("report: ").collect();
    for (levels, guest) in ["4", "5"].into_iter().zip(guests) {
        let said = said_by_guest(guest);
        assert!(said.contains(&&*format!("has {levels} levels")), "{said:?}");
        let ((none, base), (huge, huge_windows)) = (own_pages(&said, "base"), own_pages(&said, "huge"));
        assert!(none == 0 && base >= 16 && huge >= 8 && huge_windows == 16, "{said:?}");
        let seen = |state: &str| -> Value {
            let of = format!("{levels} {state} ");
            serde_json::from_str(guest.lines().find_map(|line| line.strip_prefix(&of)).unwrap()).unwrap()
        };
        let counts = |seen: &Value| {
            ["base_4k", "huge_2m", "giant_1g", "mixed", "unmapped", "unknown"].map(|size| seen[size].as_u64().unwrap())
        };
        let [base_seen, huge_seen, giant_seen, mixed, unmapped, unknown] = counts(&seen("running"));
        assert_eq!((huge_seen, giant_seen, mixed), (huge, 0, 0), "as its smaps says, and no direct map");
        // Beside the process with base pages, the other one's program and stack.
        assert!((base..base + 16).contains(&base_seen), "{base_seen} for {base}");
        assert_eq!(base_seen + huge_seen + unmapped + unknown, WINDOWS);
        let [base_seen, huge_seen, giant_seen, mixed, unmapped, unknown] = counts(&seen("stopped"));
        assert_eq!((huge_seen, giant_seen, mixed), (0, 0, 0), "only the kernel's own mapping leads there");
        // The shells that run now have some base pages.
        assert!(base_seen < base && unknown >= huge, "{base_seen} of {base}, {unknown}");
        assert_eq!(base_seen + unmapped + unknown, WINDOWS);
    }
    assert_eq!(reports(&text).len(), 2);
}

/// A Linux guest of ours that runs one of our kernels and switches off; then one that its /init refuses.
const BENCH_LINUX: &str = r#"
wideleaf-lab image linux --bench cg.S --output cg.cpio.gz && for words in wideleaf.page=thp wideleaf.page=16k; do
    wideleaf run /bin/vmlinux --initrd cg.cpio.gz --memory 256M --timeout 10m --format json \
        --cmdline "console=ttyS0 quiet panic=-1 $words"
    echo "status $?"
done
"#;

#[test]
fn a_linux_guest_of_ours_runs_a_kernel_to_its_verified_end_in_the_lab() {
    if !has_lab(LabKernel::V6_12) {
        return;
    }
    let (wideleaf, laboratory) = (program(), built(&["build", "-p", "wideleaf-lab"], false));
    let files = [(&*wideleaf, "wideleaf"), (&*laboratory, "wideleaf-lab"), (&*LabKernel::V6_12.elf(), "vmlinux")];
    let output = in_lab(LabKernel::V6_12, &files, BENCH_LINUX);
    let text = String::from_utf8(output.stdout).unwrap();
    let (json, rest) = text[text.find("\n{").unwrap()..].split_once("status 0").unwrap();
    let report: Value = serde_json::from_str(json).unwrap();
    assert_eq!((&report["outcome"], &report["verification"]["passed"]), (&"success".into(), &true.into()));
    assert!(report["results"]["mops"]["value"].as_f64().unwrap() > 0.0);
    assert!(rest.contains("wideleaf: --cmdline: wideleaf.page=16k: expected 4k, thp, 2m or 1g"), "{rest}");
    assert!(rest.contains("status 2"), "{rest}");
}

#[test]
fn every_mapping_is_at_its_level_in_the_lab() {
    if !has_lab(LabKernel::Newest) {
        return;
    }
    let wideleaf = program();
    let output = in_lab(LabKernel::Newest, &[(&wideleaf, "wideleaf")], "wideleaf doctor --mappings --format json");
    assert!(output.status.success(), "{}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    // What newer kernels changed for large pages, on a kernel with all of it.
    let capabilities = report["capabilities"].as_array().unwrap();
    for name in ["page_tables_freed", "giant_surplus", "khugepaged_mthp"] {
        let row = capabilities.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no row {name}"));
        assert_eq!(row["is_available"], true, "{row}");
    }
    let mappings = &report["mappings"];
    assert_eq!(mappings["paging"], "npt");
    let rows = mappings["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| row["vcpus"] == 2), "on the one processor of the lab too");
    let with = |guest: &str, expected: &str| {
        rows.iter().filter(|row| row["guest_page"] == guest && row["expected"] == expected).count()
    };
    // Shadow paging can show neither of these.
    assert!(with("4k", "2m") > 0, "4K guest pages over 2M host pages");
    assert!(with("2m", "1g") > 0 && with("4k", "1g") > 0, "giant pages: {}", mappings["skipped"]);
    assert!(rows.iter().all(|row| row["is_as_expected"] == true));
}
