//! `wideleaf-lab simulate --trace`: machines and policies on generated streams and on files; needs no
//! features of the host.

use std::fs;

use crate::program::new_scratch;
use predicates::prelude::*;
use serde_json::Value;
use wideleaf_testing::scratch::Scratch;
use wideleaf_trace::{Access, Header, TraceWriter};

/// Stream of 20 passes over 64 MiB: 2 s of simulated time at 12 us per access.
const HALF_SPARSE: &str = "--trace=half-sparse:windows=32,passes=20";

fn simulate(scratch: &Scratch, arguments: &[&str]) -> Value {
    let all = [&["simulate", "--format=json"], arguments].concat();
    let output = scratch.wideleaf(&all).assert().success().stderr("").get_output().stdout.clone();
    serde_json::from_slice(&output).unwrap()
}

fn misses(result: &Value) -> u64 {
    result["misses"].as_u64().unwrap()
}

#[test]
fn policies_and_fixed_pages_on_several_machines_are_compared_in_the_order_of_the_arguments() {
    let scratch = new_scratch();
    let found = simulate(
        &scratch,
        &[
            HALF_SPARSE,
            "--machine=k8,skylake-sp",
            "--host-page=4k,2m",
            "--policy=never,thp:scan_sleep_ms=0,greedy,prealloc",
            "--guest-page=2m",
            "--cycles-per-access=20000",
        ],
    );
    let results = found["results"].as_array().unwrap();
    let named: Vec<_> =
        results.iter().map(|r| (r["machine"].as_str().unwrap(), r["pages"].as_str().unwrap())).collect();
    let arms = ["4k", "2m", "never", "thp:scan_sleep_ms=0", "greedy", "prealloc"];
    let expected: Vec<_> = ["k8", "skylake-sp"].iter().flat_map(|machine| arms.map(|arm| (*machine, arm))).collect();
    assert_eq!(named, expected);
    for of_machine in results.chunks(arms.len()) {
        let [fixed_4k, fixed_2m, never, thp, greedy, prealloc] = of_machine else { panic!("{of_machine:?}") };
        for same in ["misses", "references_by_place", "cycles_of_walks", "tlb_hits"] {
            assert_eq!(fixed_4k[same], never[same], "{same}");
            assert_eq!(fixed_2m[same], prealloc[same], "{same}");
        }
        let order = [prealloc, greedy, thp, never].map(misses);
        assert!(order.is_sorted() && order[0] < order[1] && order[2] < order[3], "{order:?}");
        assert_eq!(
            (&fixed_4k["policy"], &greedy["policy"]["host_coverage_2m_at_end_bp"]),
            (&Value::Null, &10_000.into())
        );
        // 504 of 512 pages of 16 windows are never touched
        assert_eq!(greedy["policy"]["bloat_at_end_bytes"], 16 * 504 * 4096);
        assert_eq!(never["policy"]["bloat_at_most_bytes"], 0);
    }
    // The policy decides the same on both machines, so the time is the same.
    assert_eq!(results[4]["policy"], results[10]["policy"]);
}

#[test]
fn a_repeated_simulation_gives_the_same_result() {
    let scratch = new_scratch();
    let arguments =
        ["--trace=gups:log2_words=20,updates=200000", "--machine=k8", "--policy=auto,reservation", "--native"];
    assert_eq!(simulate(&scratch, &arguments), simulate(&scratch, &arguments));
}

#[test]
fn reservation_utilization_and_auto_leave_sparse_windows_alone() {
    let scratch = new_scratch();
    let arguments = [HALF_SPARSE, "--machine=skylake-sp", "--policy=reservation,utilization,auto", "--guest-page=2m"];
    let found = simulate(&scratch, &[&arguments[..], &["--cycles-per-access=20000"]].concat());
    for result in found["results"].as_array().unwrap() {
        let policy = &result["policy"];
        // 16 * 512 of 16 * 520 pages
        assert_eq!(policy["host_coverage_2m_at_end_bp"], 9_846, "{}", result["pages"]);
        // A window may become large while it is being filled; the guest touches its remaining pages soon after.
        assert_eq!(policy["bloat_at_end_bytes"], 0, "{}", result["pages"]);
    }
}

#[test]
fn a_limited_simulation_reports_its_number_of_accesses() {
    let scratch = new_scratch();
    let found = simulate(&scratch, &["--trace=gups", "--machine=k8", "--accesses=1000"]);
    assert_eq!(found["results"][0]["accesses"], 1000);
    let misses_of_base_pages = found["results"][0]["misses_by_page"]["4k"].as_u64().unwrap();
    assert!(misses_of_base_pages > 900, "{misses_of_base_pages}");
}

#[test]
fn the_table_and_the_plot_name_the_simulated_machines_and_policies() {
    let scratch = new_scratch();
    let arguments =
        ["simulate", HALF_SPARSE, "--machine=k8", "--policy=greedy,never", "--plot=p.svg", "--cycles-per-access=20000"];
    let table = scratch.wideleaf(&arguments).assert().success().stderr("");
    let words = ["half-sparse windows=32,pages=8,passes=20", "in a guest on 4k pages, 4 + 4 levels", "promote_2m.done"];
    words.iter().fold(table, |table, word| table.stdout(predicate::str::contains(*word)));
    let picture = fs::read_to_string(scratch.path("p.svg")).unwrap();
    assert!(picture.starts_with("<svg ") && picture.trim_end().ends_with("</svg>"));
    for word in ["k8, greedy", "k8, never", "host coverage 2m, %", "bloat, MiB", "TLB misses per 1000 accesses"] {
        assert!(picture.contains(word), "{word}");
    }
}

#[test]
fn a_result_says_what_lies_on_the_other_node_and_a_process_has_no_row_of_a_host() {
    let scratch = new_scratch();
    let gups = ["--trace=gups:log2_words=24,updates=20000", "--machine=skylake-sp"];
    let remote = [&gups[..], &["--remote=host-tables,data"]].concat();
    let found = simulate(&scratch, &remote);
    assert_eq!(found["setup"]["remote"], serde_json::json!(["host-tables", "data"]));
    assert!(found["results"][0]["remote_references"].as_u64().unwrap() > 0);
    assert_eq!(simulate(&scratch, &gups)["setup"]["remote"], serde_json::json!([]));

    let table = |arguments: &[&str]| -> String {
        let output = scratch.wideleaf(&[&["simulate"], arguments].concat()).assert().success().get_output().clone();
        String::from_utf8(output.stdout).unwrap()
    };
    let of_both = table(&remote);
    for word in ["4 + 4 levels of page tables, host-tables and data on the other node; simulated", "from the other"] {
        assert!(of_both.contains(word), "{word} in {of_both}");
    }
    let near = table(&[&gups[..], &["--native"]].concat());
    assert!(near.contains("tables of the process") && !near.contains("other node"), "{near}");
    assert!(!near.contains("tables of the guest") && !near.contains("host's tables"), "{near}");
}

/// A trace of loads from each page of 4 MiB, in `rounds` rounds.
fn trace(rounds: u64) -> Vec<u8> {
    let header = Header {
        kernel: "npb.cg".into(),
        class: "S".into(),
        parameters: String::new(),
        arena_bytes: 4 << 20,
        iterations: 1,
        class_iterations: 15,
    };
    let mut writer = TraceWriter::create(Vec::new(), &header).unwrap();
    for page in (0..rounds).flat_map(|_| 0..1024) {
        writer.push(&Access { address: page * 4096, is_write: false, repeats: 3 }).unwrap();
    }
    writer.finish(false).unwrap().1
}

#[test]
fn a_recorded_trace_is_simulated_to_its_last_access() {
    let scratch = new_scratch();
    scratch.file("t", &trace(10));
    let found = simulate(&scratch, &["--trace=t", "--machine=k8", "--native", "--host-page=4k,2m"]);
    assert_eq!((&found["trace"]["kernel"], &found["trace"]["class"]), (&"npb.cg".into(), &"S".into()));
    assert_eq!((&found["trace"]["iterations"], &found["trace"]["class_iterations"]), (&1.into(), &15.into()));
    let [small, huge] = [&found["results"][0], &found["results"][1]];
    assert_eq!((&small["accesses"], &huge["accesses"]), (&30_720.into(), &30_720.into()));
    // 1024 pages in turn through 544 entries, and 2 huge pages through 8
    assert_eq!((misses(small), misses(huge)), (10_240, 2));
    let table = scratch.wideleaf(&["simulate", "--trace=t", "--machine=k8"]).assert().success();
    table.stdout(predicate::str::contains("npb.cg S: 4 MiB, 1 of 15 iterations"));
}

#[test]
fn an_unusable_trace_gives_one_clear_line() {
    let scratch = new_scratch();
    let whole = trace(10);
    let refuses = |bytes: &[u8], words: &[&str]| {
        scratch.file("t", bytes);
        let arguments = ["simulate", "--trace=t", "--machine=k8,skylake-sp", "--plot=p.svg", "--output=o"];
        scratch.refuses(&arguments, 3, &[&["--trace t: "], words].concat());
        assert_eq!(scratch.names(), ["t"], "nothing is left behind");
    };
    refuses(b"", &["not a trace"]);
    refuses(b"not a trace at all, but long enough to be one", &["not a trace: the file"]);
    refuses(&whole[..whole.len() - 7], &["ends at byte"]);
    let mut damaged = whole.clone();
    damaged[200] ^= 1;
    refuses(&damaged, &["damaged at byte"]);
    scratch.refuses(&["simulate", "--trace=gone", "--machine=k8"], 3, &["--trace gone: No such file"]);
}

#[test]
fn invalid_arguments_give_one_clear_line() {
    let scratch = new_scratch();
    let refuses = |arguments: &[&str], words: &[&str]| {
        scratch.refuses(&[&["simulate"], arguments].concat(), 2, words);
    };
    refuses(&["--trace=gups"], &["no machine is named; use --machine NAME", "--machine help"]);
    refuses(&["--trace=nope:x=1", "--machine=k8"], &["no such stream", "gups, stride, stream"]);
    refuses(&["--trace=gups:x=1", "--machine=k8"], &["--trace gups:x=1: gups has no parameter \"x\""]);
    refuses(&["--trace=gups", "--machine=k8", "--memory=64M"], &["--memory 64 MiB: the trace accesses 256 MiB"]);
    refuses(&["--trace=gups", "--machine=k8", "--plot=f", "--output=f"], &["--plot and --output are both f"]);
    refuses(&["--trace=gups", "--machine=zen4,k8", "--smt"], &["cannot use --smt: a core of k8 has one thread"]);
    let no_host = ["--trace=gups", "--machine=k8", "--native", "--remote=data,host-tables"];
    refuses(&no_host, &["cannot use --remote host-tables with --native: a process has one table, guest-tables"]);
    let wrong = |arguments: &[&str], word: &str| {
        let run = scratch.wideleaf(&[&["simulate"], arguments].concat()).assert().code(2).stdout("");
        run.stderr(predicate::str::contains(word));
    };
    wrong(&["--trace=gups", "--machine=z80"], "there is no machine \"z80\"; the machines are madison, k8");
    wrong(&["--trace=gups", "--machine=k8", "--policy=never,nope"], "there is no policy \"nope\"");
    wrong(&["--trace=gups", "--recording=f"], "cannot be used with");
    wrong(&["--recording=f", "--machine=k8"], "cannot be used with");
}

#[test]
fn machines_and_streams_are_listed_with_their_sources() {
    let scratch = new_scratch();
    let machines = scratch.wideleaf(&["simulate", "--machine=help"]).assert().success();
    machines.stdout(predicate::str::contains("skylake-sp").and(predicate::str::contains("CPUID")));
    let listed = simulate(&scratch, &["--machine=help"]);
    let names = listed["machines"].as_array().unwrap().iter().map(|machine| machine["name"].as_str().unwrap());
    let known = wideleaf_simulator::machines().iter().map(|machine| machine.name);
    assert!(names.eq(known));
    let streams = scratch.wideleaf(&["simulate", "--trace=help"]).assert().success();
    streams.stdout(predicate::str::contains("log2_words").and(predicate::str::contains("half-sparse")));
}
