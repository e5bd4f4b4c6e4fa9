//! The user's view of `wideleaf run --config` and `--print-config`: options come from a file, the command line
//! overrides them, and each mistake is one line with the file and the position in it. Runs anywhere.

use crate::program::new_scratch;
use serde_json::Value;
use wideleaf_testing::scratch::Scratch;

/// A native GUPS on a table of 512 KiB: over in some milliseconds.
const SMALL: &str = "workload = \"gups\"\nnative = true\ncmdline = \"log2_words=16\"\nmemory = \"64M\"\n";

fn report(scratch: &Scratch, arguments: &[&str]) -> Value {
    let output = scratch.wideleaf(arguments).assert().success();
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// A file with this text is refused with these words, the first of which give the position.
fn is_refused(text: &str, more: &[&str], words: &[&str]) {
    let scratch = new_scratch();
    scratch.file("vm.toml", text.as_bytes());
    scratch.refuses(&[&["run", "--config", "vm.toml"], more].concat(), 3, words);
}

#[test]
fn a_run_takes_its_options_from_a_file_and_the_command_line_overrides_them() {
    let scratch = new_scratch();
    scratch.file("vm.toml", format!("{SMALL}format = \"json\"\npolicy = \"never\"\n").as_bytes());
    let from_file = report(&scratch, &["run", "--config", "vm.toml"]);
    assert_eq!(
        (&from_file["setup"]["memory_bytes"], &from_file["setup"]["policy"]),
        (&(64 << 20).into(), &"never".into())
    );
    let typed = report(&scratch, &["run", "--config", "vm.toml", "--policy=greedy", "--memory", "128M"]);
    assert_eq!((&typed["setup"]["memory_bytes"], &typed["setup"]["policy"]), (&(128 << 20).into(), &"greedy".into()));
}

#[test]
fn the_part_of_the_time_out_of_reach_is_in_the_report_from_a_file_or_the_command_line() {
    let scratch = new_scratch();
    scratch.file("vm.toml", format!("{SMALL}format = \"json\"\nout-of-reach = \"12.5%\"\n").as_bytes());
    let setup = |more: &[&str]| report(&scratch, &[&["run", "--config", "vm.toml"], more].concat())["setup"].clone();
    assert_eq!(setup(&[])["out_of_reach"], "12.50%");
    assert_eq!(setup(&["--out-of-reach", "5%"])["out_of_reach"], "5%");
    is_refused(&format!("{SMALL}out-of-reach = \"0%\"\n"), &[], &["vm.toml:5: out-of-reach: ", "from 1 to 100"]);
}

#[test]
fn paths_in_a_file_are_relative_to_its_folder() {
    let scratch = new_scratch();
    std::fs::create_dir(scratch.path("vms")).unwrap();
    let rules = "policy = \"schemes:rules=@rules.txt\"\noutput = \"result.json\"\nformat = \"json\"\n";
    scratch.file("vms/vm.toml", format!("{SMALL}{rules}").as_bytes());
    scratch.file("vms/rules.txt", b"min max 10% max min max promote\n");
    scratch.wideleaf(&["run", "--config", "vms/vm.toml"]).assert().success().stdout("");
    let result: Value = serde_json::from_slice(&std::fs::read(scratch.path("vms/result.json")).unwrap()).unwrap();
    assert_eq!(result["setup"]["policy"], "schemes:rules=min max 10% max min max promote");
}

#[test]
fn a_printed_configuration_runs_the_same() {
    let scratch = new_scratch();
    let words = ["run", "gups", "--native", "--cmdline=log2_words=16", "--memory=64M", "--policy=thp:scan_sleep_ms=10"];
    let printed = scratch.wideleaf(&[&words[..], &["--format=json", "--print-config"]].concat()).assert().success();
    scratch.file("vm.toml", &printed.get_output().stdout);
    let again = scratch.wideleaf(&["run", "--config=vm.toml", "--print-config"]).assert().success();
    assert_eq!(again.get_output().stdout, printed.get_output().stdout);
    assert_eq!(report(&scratch, &["run", "--config=vm.toml"])["setup"]["policy"], "thp:scan_sleep_ms=10");
}

#[test]
fn the_options_of_a_target_are_printed_without_its_vm() {
    let scratch = new_scratch();
    let words = ["run", "--incoming=unix:move.sock", "--policy=greedy", "--print-config"];
    let printed = scratch.wideleaf(&words).assert().success();
    let text = String::from_utf8(printed.get_output().stdout.clone()).unwrap();
    assert!(text.contains("incoming = ") && text.contains("policy = \"greedy\""), "{text}");
    scratch.file("vm.toml", text.as_bytes());
    let again = scratch.wideleaf(&["run", "--config=vm.toml", "--print-config"]).assert().success();
    assert_eq!(again.get_output().stdout, text.as_bytes());
    scratch.refuses(&[&words[..], &["--numa=off", "--numa=auto"]].concat(), 2, &["beside another --numa"]);
}

#[test]
fn a_result_replaces_no_file_that_the_run_reads_and_no_disk() {
    let scratch = new_scratch();
    scratch.file("vm.toml", format!("{SMALL}output = \"vm.toml\"\n").as_bytes());
    for file in ["vmlinuz", "initrd", "root.img", "saved.img"] {
        scratch.file(file, file.as_bytes());
    }
    let image = ["run", "./vmlinuz", "--initrd=initrd", "--disk=root.img"];
    for (more, option) in [
        ("--output=vmlinuz", "the image and --output"),
        ("--record=./initrd", "--initrd and --record"),
        ("--output=../root.img", "--disk and --output"),
        ("--record=root.img", "--disk and --record"),
    ] {
        let more = more.replace("../", &format!("{}/", scratch.path(".").display()));
        scratch.refuses(&[&image[..], &[&more]].concat(), 2, &[option, "name two files"]);
    }
    scratch.refuses(&["run", "--config=vm.toml"], 2, &["--config and --output", "name two files"]);
    let incoming = ["run", "--incoming=unix:move.sock", "--disk=root.img", "--output=root.img"];
    scratch.refuses(&incoming, 2, &["--disk and --output"]);
    for file in ["vmlinuz", "initrd", "root.img"] {
        assert_eq!(std::fs::read_to_string(scratch.path(file)).unwrap(), file);
    }
}

#[test]
fn a_run_that_is_refused_is_not_printed() {
    let scratch = new_scratch();
    scratch.refuses(&["run", "gusp", "--native", "--print-config"], 2, &["with --native: it is not a built-in kernel"]);
}

#[test]
fn an_unreadable_file_is_named() {
    let scratch = new_scratch();
    std::fs::create_dir(scratch.path("folder")).unwrap();
    scratch.refuses(&["run", "--config=none.toml"], 3, &["--config none.toml: No such file"]);
    scratch.refuses(&["run", "--config=folder"], 3, &["--config folder: it is a folder"]);
    scratch.refuses(&["run", "--config=/dev/zero"], 3, &["--config /dev/zero: it is a character device"]);
    scratch.file("large.toml", &vec![b'\n'; (1 << 20) + 1]);
    scratch.refuses(&["run", "--config=large.toml"], 3, &["large.toml: it is longer than the limit of 1 MiB"]);
    scratch.file("bytes.toml", b"\xff");
    scratch.refuses(&["run", "--config=bytes.toml"], 3, &["--config bytes.toml: ", "UTF-8"]);
}

#[test]
fn mistakes_in_a_file_are_reported_with_their_line() {
    is_refused(
        &format!("{SMALL}policies = \"auto\""),
        &[],
        &["vm.toml:5: unknown key \"policies\": the keys are", " policy, "],
    );
    is_refused("memory = \"1.5\"", &[], &["vm.toml:1: memory: invalid value '1.5'", "a number with K, M, G or T"]);
    is_refused("\nbacking = \"nope\"", &[], &["vm.toml:2: backing: invalid value 'nope'", "anon, memfd, hugetlb"]);
    is_refused(
        &format!("{SMALL}policy = \"schemes:rules=@none\""),
        &[],
        &["vm.toml:5: policy: invalid value 'schemes:rules=@none'", "cannot read none: No such file"],
    );
    is_refused("vcpus = 17", &[], &["vm.toml:1: vcpus: ", "1..=16"]);
    is_refused("vcpus = [1, 2]", &[], &["vm.toml:1: vcpus takes one value"]);
    is_refused("native = \"yes\"", &[], &["vm.toml:1: native is a flag", "write native = true"]);
    is_refused("vcpus = 1\nvcpus = 2", &[], &["vm.toml:2: this is not TOML: duplicate key"]);
    is_refused("[vm]\nvcpus = 1", &[], &["vm.toml:1: unknown key \"vm\""]);
    is_refused("what is this", &[], &["vm.toml:1: this is not TOML"]);
}

#[test]
fn contradictions_are_reported_with_all_lines_of_the_file_that_take_part() {
    let both = format!("{SMALL}initrd = \"x\"\n");
    is_refused(&both, &[], &["vm.toml:2: ", "'--native'", "'--initrd <FILE>'", "(native: line 2, initrd: line 5)"]);
    is_refused("workload = \"gups\"\nno-daemon = true", &["--daemon=x"], &["vm.toml:2: ", "(no-daemon: line 2)"]);
}

#[test]
fn a_file_without_a_workload_takes_it_from_the_command_line() {
    let scratch = new_scratch();
    scratch.file("vm.toml", b"native = true\n");
    scratch.refuses(&["run", "--config=vm.toml"], 2, &["cannot run: no guest is named; name a built-in kernel"]);
    scratch
        .wideleaf(&["run", "--config=vm.toml", "gups", "--cmdline=log2_words=16", "--memory=64M"])
        .assert()
        .success();
}
