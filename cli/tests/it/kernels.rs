//! Every built-in kernel through the command line: verified natively in its quick run, and in a guest on one vCPU and
//! on two, in its classes S and W too. Also the refusals before any start. The tests use the table of kernels, so a
//! new kernel is covered by its entry. Without KVM, its tests say that they were skipped, which
//! `WIDELEAF_REQUIRE=kvm` makes a failure.

use parking_lot::Mutex;

use crate::program::new_scratch;
use nix::sys::signal::Signal;
use serde_json::Value;
use wideleaf_kernels::npb::classes::Class;
use wideleaf_kernels::registry::{MemoryNeed, by_name};
use wideleaf_kernels::{KERNELS, Kernel};
use wideleaf_protocol::VCPUS_MAX;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;

/// Lock for one run at a time: vCPUs and threads spin while they wait for each other, and would take the CPUs
/// that the others need.
static ALONE: Mutex<()> = Mutex::new(());

/// Argument of the quick run of a kernel, after its name.
fn quick(kernel: &Kernel) -> Vec<String> {
    vec![format!("--cmdline={}", kernel.quick)]
}

/// The same for its small classes too.
fn quick_and_small(kernel: &Kernel) -> Vec<String> {
    let small = kernel.classes.iter().filter(|class| **class <= Class::W);
    small.map(|class| format!("--class={class}")).chain(quick(kernel)).collect()
}

fn report_of(scratch: &Scratch, arguments: &[&str]) -> Value {
    let all = [arguments, &["--memory=256M", "--timeout=10m", "--format=json"]].concat();
    let output = scratch.wideleaf(&all).assert().success().stderr("");
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// Makes these runs of all kernels with each of these numbers of vCPUs; `how` is the rest of the command line.
fn all_are_verified(runs_of: impl Fn(&Kernel) -> Vec<String>, vcpus: &[usize], how: &[&str]) {
    let _alone = ALONE.lock();
    let scratch = new_scratch();
    for (kernel, run) in KERNELS.iter().flat_map(|kernel| runs_of(kernel).into_iter().map(move |run| (kernel, run))) {
        for vcpus in vcpus.iter().filter(|vcpus| **vcpus <= kernel.vcpus_max) {
            let vcpus = format!("--vcpus={vcpus}");
            let report = report_of(&scratch, &[&["run", kernel.name.as_str(), &run, &vcpus], how].concat());
            let what = format!("{} {run} {vcpus}: {report}", kernel.name);
            assert_eq!(report["verification"]["passed"], true, "{what}");
            let figure = &report["figure"];
            assert_eq!(
                (&figure["name"], &figure["unit"]),
                (&kernel.figure.name.as_str().into(), &kernel.figure.unit.as_str().into()),
                "{what}"
            );
            assert!(figure["value"].as_f64().is_some_and(|value| value > 0.0), "{what}");
            assert_eq!(report["setup"]["class"].is_string(), !kernel.classes.is_empty(), "{what}");
            assert_eq!(report["problem"]["class"], report["setup"]["class"], "{what}");
        }
    }
}

#[test]
fn every_kernel_is_verified_natively() {
    // The kernels' own tests run their classes natively, with one thread and with two.
    all_are_verified(quick, &[1], &["--native"]);
}

#[test]
fn every_kernel_is_verified_in_a_guest() {
    if has_kvm() {
        all_are_verified(quick_and_small, &[1, 2], &[]);
    }
}

#[test]
fn a_run_reports_its_class_and_memory_and_its_result_is_readable() {
    let scratch = new_scratch();
    let report = report_of(&scratch, &["run", "--native", "npb.is", "--class=w"]);
    assert_eq!((&report["setup"]["class"], &report["setup"]["cmdline"]), (&"W".into(), &"class=W".into()));
    let is = by_name("npb.is").unwrap();
    let Ok(MemoryNeed::Bytes(needed)) = is.memory_for("class=W", 1) else { panic!("sorting needs some memory") };
    assert_eq!(report["setup"]["memory_needed_bytes"], needed);
    let problem = &report["problem"];
    let said = (&problem["class"], &problem["size"], &problem["iterations"]);
    assert_eq!(said, (&"W".into(), &"1048576".into(), &10.into()), "2^20 keys, ten rankings");
    // The default is class S, with enough memory for it.
    let output = scratch.wideleaf(&["run", "--native", "npb.is"]).assert().success().get_output().stdout.clone();
    let table = String::from_utf8(output).unwrap();
    for line in [
        "  1 GiB RAM (needs 1 MiB)",
        "    class          S\n    size           65536\n    iterations     10\n    time ",
        "    threads        1\n",
        " Mop/s\n",
        "    verification   SUCCESSFUL\n",
        "verification passed",
    ] {
        assert!(table.contains(line), "no {line:?} in {table}");
    }
}

#[test]
fn the_list_of_kernels_is_the_table_of_kernels() {
    let scratch = new_scratch();
    let output = scratch.wideleaf(&["kernels", "--format=json"]).assert().success().get_output().stdout.clone();
    let list: Value = serde_json::from_slice(&output).unwrap();
    for (kernel, info) in KERNELS.iter().zip(list["kernels"].as_array().unwrap()) {
        assert_eq!(info["name"], kernel.name.as_str());
        let memory = info["memory"].as_array().unwrap();
        assert_eq!(memory.len(), kernel.classes.len().max(1), "{info}");
        for (entry, class) in memory.iter().zip(kernel.classes) {
            assert_eq!(entry["class"], class.letter());
            let Ok(MemoryNeed::Bytes(bytes)) = kernel.memory_for(&format!("class={class}"), 1) else {
                panic!("{info}")
            };
            assert_eq!(entry["bytes"], bytes);
        }
    }
    assert_eq!(list["kernels"].as_array().map(Vec::len), Some(KERNELS.len()));
}

#[test]
fn too_little_memory_for_a_kernel_is_refused_with_the_required_size() {
    let scratch = new_scratch();
    let arguments = ["run", "--native", "gups", "--cmdline=log2_words=25", "--memory=64M", "--output=result"];
    scratch.refuses(&arguments, 2, &["--memory 64 MiB: gups needs 256 MiB", "use at least --memory 256M, or omit it"]);
    // A guest's image and page tables come on top; no guest is made for the answer.
    let arguments = ["run", "gups", "--cmdline=log2_words=25", "--memory=256M", "--output=result"];
    scratch.refuses(
        &arguments,
        2,
        &["gups needs 256 MiB in one piece, and the guest needs some for itself; use at least --memory 26"],
    );
}

#[test]
fn only_classes_of_the_kernel_are_accepted() {
    let scratch = new_scratch();
    let with = |arguments: &[&str], words: &[&str]| {
        scratch.refuses(&[&["run", "--output=result"], arguments].concat(), 2, words);
    };
    with(&["npb.cg", "--class=D"], &["npb.cg has no class \"D\"; it has S, W, A, B, C"]);
    with(&["npb.cg", "--cmdline=class=D"], &["class=D: expected one of S, W, A, B, C"]);
    with(
        &["npb.cg", "--class=A", "--cmdline=class=A"],
        &["--class together with class= in --cmdline: omit one of them"],
    );
    with(&["gups", "--class=A"], &["gups has no classes; omit --class (kernels with classes: npb."]);
    let image = scratch.file("image", b"");
    with(&[&image, "--class=A"], &["image has no classes"]);
}

#[test]
fn more_vcpus_than_a_kernel_can_use_are_refused() {
    let scratch = new_scratch();
    for kernel in KERNELS.iter().filter(|kernel| kernel.vcpus_max < VCPUS_MAX) {
        let vcpus = format!("--vcpus={VCPUS_MAX}");
        scratch.refuses(&["run", kernel.name.as_str(), &vcpus], 2, &["--vcpus", kernel.name.as_str(), "at most"]);
    }
}

#[test]
fn a_guest_killed_with_sigkill_leaves_nothing() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let cmdline = "--cmdline=log2_words=16 seconds=3600";
    let arguments = ["run", "gups", cmdline, "--vcpus=2", "--memory=64M", "--timeout=5m", "--output=result"];
    let mut run = Running::start(&scratch, &arguments);
    run.wait_for("comm", |name| name == "vcpu1\n");
    run.signal(Signal::SIGKILL);
    assert_eq!(run.end(), (None, String::new()));
    assert_eq!(scratch.names(), [""; 0]);
}
