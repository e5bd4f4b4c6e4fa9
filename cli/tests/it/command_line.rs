//! The user's view of mistyped commands, interrupts and unread output: one line with the error, its cause and a
//! remedy, the documented exit code, and no files or settings left behind. Runs anywhere, natively.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt as _, PermissionsExt};
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::program::new_scratch;
use crate::turn_at_the_pool;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use predicates::prelude::*;
use serde_json::Value;
use wideleaf_kernels::KERNELS;
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_testing::has_kvm;
use wideleaf_testing::json::numbers_without_unit;
use wideleaf_testing::scratch::Running;
use wideleaf_vmm::HostLimits;

/// A native GUPS on a table of 512 KiB: over in some milliseconds.
const SMALL: [&str; 6] = ["run", "--native", "gups", "--cmdline=log2_words=16", "--memory", "64M"];

/// A native GUPS that outlasts any test. `--timeout` ends it if a test fails to.
const LONG: [&str; 6] =
    ["run", "--native", "gups", "--cmdline=log2_words=16 seconds=3600", "--memory=64M", "--timeout=5m"];

fn small_and<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&SMALL, more].concat()
}

/// All memory of this host, in whole 2 MiB pages.
fn host_memory() -> Bytes {
    let total = HostLimits::read(Path::new("/proc")).memory_total.unwrap();
    PageSize::Huge2M.bytes() * (total.get() / PageSize::Huge2M.bytes().get())
}

#[test]
fn rules_of_a_policy_come_from_a_file() {
    let scratch = new_scratch();
    let rules = "# what is used\nmin max 10% max min max promote;\n\n2M max 0% 0% 9s max demote # and what is not\n";
    let file = scratch.file("rules.txt", rules.as_bytes());
    let policy = format!("--policy=schemes:quota_windows=8,rules=@{file}");
    let output = scratch.wideleaf(&small_and(&[&policy, "--format=json"])).assert().success();
    let report: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let rules = "rules=min max 10% max min max promote; 2M max 0% 0% 9s max demote,quota_windows=8";
    assert_eq!(report["setup"]["policy"], format!("schemes:{rules}"));
}

/// Parsing opens no file, so that `--help` and the refusals of other arguments come first.
#[test]
fn a_file_that_a_policy_names_is_read_after_all_arguments_are_parsed() {
    let scratch = new_scratch();
    let policy = "--policy=schemes:rules=@none";
    let words = ["invalid value 'schemes:rules=@none' for '--policy': cannot read none: No such file"];
    scratch.refuses(&small_and(&[policy]), 2, &words);
    scratch.refuses(&["attach", "1", policy, "--dry-run"], 2, &words);
    let words = ["invalid value 'schemes:rules=@none' for 'policy=': cannot read none: No such file"];
    scratch.refuses(&["set", "web", "policy=schemes:rules=@none"], 2, &words);
    let words = ["invalid value 'schemes:rules=@none' for 'set-policy': cannot read none: No such file"];
    scratch.refuses(&["vm", "vm.sock", "set-policy", "schemes:rules=@none"], 2, &words);
    is_no_argument(&small_and(&[policy, "--vcpus=17"]), "1..=16");
    is_no_argument(&small_and(&["--policy=shemes:rules=@none"]), "there is no policy \"shemes\"");
    scratch.wideleaf(&small_and(&[policy, "--help"])).assert().success();
}

/// The parser refuses the arguments: clap's own form, with the option and `why` in it.
fn is_no_argument(arguments: &[&str], why: &str) {
    let scratch = new_scratch();
    let wrong = scratch.wideleaf(arguments).assert().code(2).stdout("");
    wrong.stderr(predicate::str::starts_with("error: ").and(predicate::str::contains(why)));
    assert_eq!(scratch.names(), [""; 0]);
}

#[test]
fn an_invalid_value_of_an_option_is_refused_with_the_valid_ones() {
    is_no_argument(&small_and(&["--policy", "nope"]), "never, prealloc, at-fault, greedy");
    is_no_argument(&small_and(&["--policy", "gready"]), "; did you mean greedy?");
    is_no_argument(&small_and(&["--policy", "thp:max_ptes_nine=1"]), "; did you mean max_ptes_none?");
    is_no_argument(&small_and(&["--policy", "thp:pace=1"]), "choose one of pages_to_scan");
    is_no_argument(&small_and(&["--policy", "thp:max_ptes_none=512"]), "from 0 to 511 (base pages)");
    is_no_argument(&small_and(&["--backing", "nope"]), "anon, memfd, hugetlb");
    is_no_argument(&small_and(&["--fallback", "nope"]), "fail, thp");
    is_no_argument(&small_and(&["--format", "nope"]), "table, json");
    is_no_argument(&small_and(&["--host-page", "3m"]), "write 4k, 2m or 1g");
    is_no_argument(&["run", "gups", "--guest-page", "3m"], "write 4k, 2m or 1g");
    is_no_argument(&small_and(&["--vcpus", "0"]), "1..=16");
    is_no_argument(&small_and(&["--vcpus", "17"]), "1..=16");
    is_no_argument(&["demo", "--rounds", "0"], "1..=100");
    is_no_argument(&["demo", "--log2-words", "31"], "20..=30");
    is_no_argument(&["run"], "<KERNEL|IMAGE>");
    is_no_argument(&["frobnicate"], "frobnicate");
}

#[test]
fn an_invalid_size_or_time_is_refused_with_a_valid_example() {
    for size in ["", "3M+1", "16E", "1.5", "64mb", "much"] {
        is_no_argument(&["run", "--native", "gups", "--memory", size], "a number with K, M, G or T");
    }
    is_no_argument(&["run", "--native", "gups", "--memory", "1.1G"], "not a whole number of bytes");
    is_no_argument(&["run", "--native", "gups", "--memory", "16777216T"], "larger than 64 bits");
    is_no_argument(&small_and(&["--timeout", "5x"]), "a whole number of seconds, or one followed by ms, s, m or h");
    is_no_argument(
        &small_and(&["--policy-delay", "1.5s"]),
        "a whole number of seconds, or one followed by ms, s, m or h",
    );
    is_no_argument(&small_and(&["--timeout", "0s"]), "the time is zero: omit --timeout");
    for part in ["0%", "101%", "30", "much"] {
        is_no_argument(&small_and(&["--out-of-reach", part]), "write a number from 1 to 100 and a %, like \"30%\"");
    }
}

#[test]
fn options_of_guests_are_refused_for_native_kernels() {
    is_no_argument(&small_and(&["--initrd", "some-file"]), "cannot be used with");
    is_no_argument(&small_and(&["--guest-page", "2m"]), "cannot be used with");
}

#[test]
fn a_missing_or_unknown_workload_is_refused() {
    let scratch = new_scratch();
    let kernels = KERNELS.iter().map(|kernel| kernel.name.as_str()).collect::<Vec<_>>().join(", ");
    scratch.refuses(
        &["run", "--policy", "greedy"],
        2,
        &["cannot run: no guest is named; name a built-in kernel", &kernels, "--help"],
    );
    scratch.refuses(
        &["run", "--native", "gusp"],
        2,
        &[&format!("with --native: it is not a built-in kernel ({kernels})"), "gusp"],
    );
    scratch.refuses(
        &["run", "gusp"],
        3,
        &[&format!("\"gusp\": it is neither a built-in kernel ({kernels}) nor a file")],
    );
    scratch.refuses(&["run", "GUPS"], 3, &["nor a file; did you mean gups?"]);
    scratch.refuses(&["run", "--native", "gupz"], 2, &["; did you mean gups?"]);
    scratch.refuses(&["run", "./nosuch"], 3, &["cannot read the image ./nosuch: No such file"]);
    scratch.refuses(&["run", ""], 3, &["\"\": it is neither"]);
    scratch.refuses(&["kernels", "gusp"], 2, &[&format!("cannot find the kernel \"gusp\"; the kernels are {kernels}")]);
}

#[test]
fn impossible_ram_is_refused_with_a_possible_size() {
    let scratch = new_scratch();
    let with = |memory, code, words: &[&str]| {
        scratch.refuses(&["run", "--native", "gups", "--memory", memory, "--output=result"], code, words);
    };
    with("0", 2, &["0 B of RAM is too little", "at least 2 MiB", "--memory 512M"]);
    with("1", 2, &["1 B of RAM is too little"]);
    with("3145729", 2, &["not a whole number of 2m host pages", "use 2 MiB or 4 MiB"]);
    with("65M", 2, &["65 MiB", "use 64 MiB or 66 MiB"]);
    with("18446744073709551615", 2, &["more than x86-64 can address"]);
    // 4095 TiB can be addressed, but no host has that much.
    with("4095T", 4, &["4095 TiB of RAM is more than the host's", "less --memory"]);
}

#[test]
fn prefaulting_more_than_is_available_is_refused_without_an_out_of_memory_kill() {
    let memory = format!("--memory={}", host_memory().get());
    let arguments = ["run", "--native", "gups", "--prefault", &memory, "--output=result"];
    new_scratch().refuses(&arguments, 4, &["cannot prefault", "the host has", "available", "omit --prefault"]);
}

#[test]
fn a_bad_image_is_refused_before_its_ram_is_allocated() {
    let scratch = new_scratch();
    let (image, memory) = (scratch.file("image", b"no kernel"), format!("--memory={}", host_memory().get()));
    // A request for that much prefaulted RAM would be refused with code 4 if it came first.
    let arguments = ["run", &image, "--prefault", &memory, "--output=result"];
    scratch.refuses(&arguments, 3, &["is neither an ELF file nor a bzImage"]);
}

#[test]
fn the_size_of_ram_is_checked_before_the_pool_is_read() {
    let scratch = new_scratch();
    let arguments = ["run", "--native", "gups", "--backing=hugetlb", "--host-page=1g", "--memory=1536M"];
    let words = ["1536 MiB of RAM is not a whole number of 1g host pages", "use 1 GiB or 2 GiB"];
    scratch.refuses(&arguments, 2, &words);
}

#[test]
fn each_backing_accepts_only_its_own_page_sizes() {
    let scratch = new_scratch();
    scratch.refuses(&small_and(&["--host-page=1g"]), 2, &["anon RAM cannot start with 1g pages", "--backing hugetlb"]);
    for unfit in ["--backing=anon", "--backing=hugetlb", "--host-page=2m"] {
        let arguments = small_and(&["--policy=reservation", unfit]);
        scratch.refuses(&arguments, 2, &["needs memfd RAM on 4k pages", "use --backing memfd"]);
    }
    scratch.refuses(
        &small_and(&["--backing=hugetlb", "--host-page=4k"]),
        2,
        &["cannot use the hugetlb pool with 4k pages", "--host-page 2m or 1g"],
    );
}

#[test]
fn huge_pages_requested_at_the_start_exist_from_the_start() {
    let scratch = new_scratch();
    let cmdline = "--cmdline=log2_words=20";
    let huge =
        ["run", "--native", "gups", cmdline, "--memory=64M", "--host-page=2m", "--policy=never", "--format=json"];
    let output = scratch.wideleaf(&huge).assert().success().get_output().stdout.clone();
    let report: Value = serde_json::from_slice(&output).unwrap();
    let table = &report["regions"][0];
    assert_eq!((&table["windows"], &table["windows_host_large"]), (&4.into(), &4.into()), "{report}");
    assert_eq!(report["phases"][0]["at_end"]["host_4k_bytes"], 0, "{report}");
}

/// A native run in as much RAM as the host has: no hugetlb pool can serve that.
fn more_than_any_pool() -> Vec<String> {
    let memory = format!("--memory={}", host_memory().get());
    let arguments = ["run", "--native", "gups", "--cmdline=log2_words=16", "--backing=hugetlb", &memory];
    arguments.map(str::to_owned).into()
}

#[test]
fn a_short_pool_is_named_with_size_node_number_and_a_remedy() {
    let (scratch, arguments) = (new_scratch(), more_than_any_pool());
    let needed = format!("{} needed", host_memory().pages(PageSize::Huge2M));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    scratch.refuses(
        &arguments,
        4,
        &[
            "hugetlb pool of 2m pages is ",
            " short: ",
            &needed,
            "node 0: ",
            "run `sudo wideleaf pool reserve --size 2m --pages ",
            "--fallback thp",
        ],
    );
}

#[test]
fn a_short_pool_can_be_replaced_and_the_report_says_so() {
    let (scratch, arguments) = (new_scratch(), more_than_any_pool());
    let arguments: Vec<&str> =
        arguments.iter().map(String::as_str).chain(["--fallback=thp", "--format=json"]).collect();
    let output = scratch.wideleaf(&arguments).assert().success().stderr("").get_output().stdout.clone();
    let report: Value = serde_json::from_slice(&output).unwrap();
    assert_eq!((&report["setup"]["backing"], &report["setup"]["host_page"]), (&"anon".into(), &"2m".into()));
    let why = report["setup"]["fallback"].as_str().unwrap();
    assert!(why.starts_with("anonymous RAM with transparent huge pages, because: hugetlb pool of 2m pages"), "{why}");
}

#[test]
fn a_kernels_parameters_are_checked_by_name_and_value() {
    let scratch = new_scratch();
    let with = |cmdline, words: &[&str]| {
        scratch.refuses(
            &["run", "--native", "gups", "--memory=64M", "--cmdline", cmdline, "--output=result"],
            2,
            words,
        );
    };
    with(
        "nonsense=1",
        &["--cmdline", "unknown parameter nonsense=", "log2_words, rounds, seconds, sparse, progress_ms"],
    );
    with("log2_words=99", &["--cmdline", "log2_words=99: expected a count from 10 to 40"]);
    with("log2_words=abc", &["log2_words=abc: expected a count"]);
    with("log2_words=16 rounds=1 seconds=1", &["exclude each other"]);
    with("garbage", &["\"garbage\" is not key=value"]);
    with("kernel=pattern", &["kernel= is given twice"]);
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_anything_runs() {
    let scratch = new_scratch();
    // A run that started and lasted would end with code 6.
    let long_and = |output| [&LONG[..5], &["--timeout=1m", "--output", output]].concat();
    fs::create_dir(scratch.path("folder")).unwrap();
    let file = scratch.file("file", b"");
    let in_file = format!("{file}/result");
    scratch.refuses(&long_and("missing/result"), 7, &["--output missing/result: there is no folder missing"]);
    scratch.refuses(&long_and(&in_file), 7, &["there is no folder"]);
    scratch.refuses(&long_and("folder"), 7, &["folder: it is a folder"]);
    // No user can create files there, not even root.
    scratch.refuses(
        &long_and("/proc/result"),
        7,
        &["cannot write --output /proc/result: No such file or directory (os"],
    );
    assert!(fs::read_dir(scratch.path("folder")).unwrap().next().is_none());
}

#[test]
fn an_output_is_complete_and_has_the_permissions_of_the_umask() {
    let scratch = new_scratch();
    scratch.file("result", b"what was there");
    scratch.wideleaf(&small_and(&["--format=json", "--output=result"])).assert().success().stdout("").stderr("");
    let text = fs::read_to_string(scratch.path("result")).unwrap();
    assert!(serde_json::from_str::<Value>(&text).is_ok_and(|report| report["outcome"] == "success"), "{text}");
    let by_the_shell = {
        fs::write(scratch.path("other"), "").unwrap();
        fs::metadata(scratch.path("other")).unwrap().permissions().mode()
    };
    assert_eq!(fs::metadata(scratch.path("result")).unwrap().permissions().mode(), by_the_shell);
    assert_eq!(scratch.names().len(), 2);
}

#[test]
fn an_output_that_is_a_fifo_stays_a_fifo_and_receives_the_result() {
    let scratch = new_scratch();
    mkfifo(&scratch.path("fifo"), Mode::S_IRWXU).unwrap();
    // The reader is open before the program starts, and the report fits into the pipe.
    let mut reader = fs::OpenOptions::new();
    let reader = reader.read(true).custom_flags(nix::libc::O_NONBLOCK).open(scratch.path("fifo")).unwrap();
    scratch.wideleaf(&small_and(&["--output=fifo"])).assert().success().stdout("").stderr("");
    assert!(std::io::read_to_string(reader).unwrap().contains("outcome: success"));
    assert!(fs::metadata(scratch.path("fifo")).unwrap().file_type().is_fifo(), "a rename would have replaced it");
}

#[test]
fn an_output_through_a_link_is_written_to_the_target() {
    let scratch = new_scratch();
    scratch.file("result", b"");
    std::os::unix::fs::symlink("result", scratch.path("link")).unwrap();
    scratch.wideleaf(&small_and(&["--output=link"])).assert().success();
    assert!(fs::symlink_metadata(scratch.path("link")).unwrap().is_symlink());
    assert!(fs::read_to_string(scratch.path("result")).unwrap().contains("outcome: success"));
}

#[test]
fn a_native_run_longer_than_its_timeout_ends_with_code_6_and_its_report() {
    let scratch = new_scratch();
    let arguments = [&LONG[..5], &["--timeout=1s", "--format=json", "--output=result"]].concat();
    let run = scratch.wideleaf(&arguments).assert().code(6).stdout("");
    run.stderr("wideleaf: the guest did not end within 1s (--timeout)\n");
    let report: Value = serde_json::from_slice(&fs::read(scratch.path("result")).unwrap()).unwrap();
    assert_eq!((&report["outcome"], &report["setup"]["mode"]), (&"timed out".into(), &"native".into()));
    assert_eq!(report["ram_at_end"]["kvm"], Value::Null, "there is no second level");
    assert!(report["ram_at_end"]["host_4k_bytes"].as_u64().unwrap() > 0, "{report}");
    assert!(report["phases"].as_array().unwrap().iter().any(|phase| phase["is_complete"] == false), "{report}");
}

/// Interrupts a native run while its kernel works.
fn interrupted_by(signal: Signal) {
    let scratch = new_scratch();
    let mut run = Running::start(&scratch, &[&LONG[..], &["--output=result"]].concat());
    run.wait_for("comm", |name| name == "kernel\n");
    run.signal(signal);
    // LONG's own end, five minutes later, has code 6.
    assert_eq!(run.end(), (Some(130), "wideleaf: interrupted\n".to_owned()));
    assert_eq!(scratch.names(), ["result"]);
    let report = fs::read_to_string(scratch.path("result")).unwrap();
    assert!(report.starts_with("interrupted: ") && report.ends_with("  outcome: interrupted\n"), "{report}");
}

#[test]
fn ctrl_c_ends_a_native_run_with_code_130_and_its_report() {
    interrupted_by(Signal::SIGINT);
}

#[test]
fn sigterm_ends_a_native_run_like_ctrl_c() {
    interrupted_by(Signal::SIGTERM);
}

/// Whether the process runs an arm of a demo; the other child holds the pool.
fn is_arm(process: &str) -> bool {
    fs::read(Path::new("/proc").join(process).join("cmdline")).is_ok_and(|line| {
        let mut words = line.split(|byte| *byte == 0);
        words.nth(1) == Some(b"run")
    })
}

#[test]
fn the_pools_holder_releases_it_when_its_parent_is_gone() {
    releases_it("2m", "hugepages-2048kB", "nr_overcommit_hugepages");
    releases_it("1g", "hugepages-1048576kB", "nr_hugepages");
}

fn releases_it(size: &str, pool: &str, raised: &str) {
    let scratch = new_scratch();
    let pool = format!("sys/kernel/mm/hugepages/{pool}");
    fs::create_dir_all(scratch.path(&pool)).unwrap();
    let files = ["nr_hugepages", "free_hugepages", "resv_hugepages", "surplus_hugepages", "nr_overcommit_hugepages"];
    for file in files {
        fs::write(scratch.path(&pool).join(file), if file == raised { "3" } else { "0" }).unwrap();
    }
    let number = || fs::read_to_string(scratch.path(&pool).join(raised)).unwrap();
    let mut holder = std::process::Command::new(scratch.program());
    holder.args(["hold-pool", "--size", size, "--pages=5", "--root"]).arg(scratch.path("."));
    let mut holder =
        Running(holder.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut said = [0; 4];
    holder.0.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!((&said, number().trim()), (b"held", "8"));
    // The kernel closes the pipe of a killed process.
    drop(holder.0.stdin.take());
    assert_eq!(holder.end(), (Some(0), String::new()));
    assert_eq!(number().trim(), "3");
}

/// Whether the process holds pages of the pool for another one.
fn is_holder(process: &str) -> bool {
    fs::read(Path::new("/proc").join(process).join("cmdline"))
        .is_ok_and(|line| line.split(|byte| *byte == 0).nth(1) == Some(b"hold-pool"))
}

#[test]
fn a_doctor_killed_with_sigkill_leaves_no_holder_of_the_pool() {
    let file = Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages");
    if !has_kvm() || fs::File::options().write(true).open(file).is_err() {
        println!("skipped: {} cannot be written", file.display());
        return;
    }
    let _turn = turn_at_the_pool();
    let scratch = new_scratch();
    let mut doctor = Running::start(&scratch, &["doctor", "--mappings"]);
    let children = doctor.wait_for("children", |children| children.split_whitespace().any(is_holder));
    doctor.signal(Signal::SIGKILL);
    assert_eq!(doctor.end().0, None);
    let deadline = Instant::now() + Duration::from_secs(60);
    while children.split_whitespace().any(is_holder) {
        assert!(Instant::now() < deadline, "{children} are left");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_demo_killed_with_sigkill_leaves_no_holder_of_the_pool() {
    let _turn = turn_at_the_pool();
    let scratch = new_scratch();
    let mut demo = Running::start(&scratch, &["demo", "--native", "--log2-words=20", "--rounds=100"]);
    let children = demo.wait_for("children", |children| children.split_whitespace().any(is_arm));
    demo.signal(Signal::SIGKILL);
    assert_eq!(demo.end().0, None);
    // The demo's arm ends by itself. If no process waits for the ended child, its command line is still gone.
    let is_left =
        |child: &str| fs::read(Path::new("/proc").join(child).join("cmdline")).is_ok_and(|line| !line.is_empty());
    let deadline = Instant::now() + Duration::from_secs(60);
    while children.split_whitespace().any(is_left) {
        assert!(Instant::now() < deadline, "{children} are left");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_demo_ended_with_sigterm_leaves_no_arm_and_no_file() {
    let _turn = turn_at_the_pool();
    let scratch = new_scratch();
    let arguments = ["demo", "--native", "--log2-words=20", "--rounds=100", "--output=result"];
    let mut demo = Running::start(&scratch, &arguments);
    let children = demo.wait_for("children", |children| children.split_whitespace().any(is_arm));
    demo.signal(Signal::SIGTERM);
    let (code, stderr) = demo.end();
    assert_eq!((code, stderr.lines().last()), (Some(130), Some("wideleaf: interrupted")));
    let is_left = |child: &str| Path::new("/proc").join(child).exists();
    assert!(!children.split_whitespace().any(is_left), "no process");
    assert_eq!(scratch.names(), [""; 0], "no file");
}

/// Number of 2 MiB pages in the pool, and number of surplus pages that it may have.
fn pool() -> Vec<String> {
    let pool = Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
    ["nr_hugepages", "nr_overcommit_hugepages", "free_hugepages"]
        .map(|file| fs::read_to_string(pool.join(file)).unwrap_or_default())
        .into()
}

#[test]
fn runs_and_interrupted_demos_leave_the_pool_as_it_was() {
    // Other programs may use the pool at the same time. One undisturbed attempt is enough, because a
    // leak shows in each.
    const ATTEMPTS: u32 = 20;
    let leaves_it = || {
        let (scratch, before) = (new_scratch(), pool());
        scratch.wideleaf(&small_and(&["--backing=hugetlb", "--fallback=thp"])).assert().success();
        let mut demo = Running::start(&scratch, &["demo", "--native", "--log2-words=20", "--rounds=100"]);
        demo.wait_for("children", |children| !children.is_empty());
        demo.signal(Signal::SIGINT);
        assert_eq!(demo.end().0, Some(130));
        pool() == before
    };
    let _turn = turn_at_the_pool();
    assert!((0..ATTEMPTS).any(|_| leaves_it()));
}

#[test]
fn a_closed_standard_output_is_not_a_failure() {
    let scratch = new_scratch();
    for arguments in [small_and(&[]), small_and(&["--format=json"]), vec!["run", "--policy=help"], vec!["doctor"]] {
        let mut run = Running::start(&scratch, &arguments);
        drop(run.0.stdout.take());
        assert_eq!(run.end(), (Some(0), String::new()), "{arguments:?}");
    }
}

#[test]
fn a_closed_standard_error_does_not_change_the_exit_code() {
    let scratch = new_scratch();
    let mut run = Running::start(&scratch, &["run", "--native", "gups", "--memory=65M"]);
    drop(run.0.stderr.take());
    assert_eq!(run.0.wait().unwrap().code(), Some(2));
}

#[test]
fn completions_without_a_reader_are_no_failure() {
    let scratch = new_scratch();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = std::process::Command::new(scratch.program()).args(["completions", "bash"]).stdout(writer).output();
    let output = output.unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

#[test]
fn a_full_standard_output_is_a_failure() {
    let scratch = new_scratch();
    let mut command = std::process::Command::new(scratch.program());
    let output = command.args(SMALL).stdout(fs::File::create("/dev/full").unwrap()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(7), "{stderr}");
    assert!(stderr.starts_with("wideleaf: cannot write to standard output: No space left"), "{stderr}");
}

#[test]
fn the_doctor_reports_what_a_sandbox_and_devices_can_use() {
    let scratch = new_scratch();
    let output = scratch.wideleaf(&["doctor", "--format=json"]).assert().success().get_output().stdout.clone();
    let found: Value = serde_json::from_slice(&output).unwrap();
    for name in ["seccomp", "landlock", "jail", "cgroup_v2", "tun", "vsock"] {
        let row = found["capabilities"].as_array().unwrap().iter().find(|row| row["name"] == name);
        assert!(!row.unwrap_or_else(|| panic!("no row {name}"))["detail"].as_str().unwrap().is_empty(), "{name}");
    }
}

/// The rows about newer kernels, compared with what this test finds without the program.
#[test]
fn the_doctor_reports_what_newer_kernels_changed_and_changes_nothing() {
    const LIMIT: &str = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_overcommit_hugepages";
    const COUNTER: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/stats/collapse_exceed_none_pte";
    let limit = std::fs::read_to_string(LIMIT);
    let scratch = new_scratch();
    let output = scratch.wideleaf(&["doctor", "--format=json"]).assert().success().get_output().stdout.clone();
    let found: Value = serde_json::from_slice(&output).unwrap();
    let row = |name: &str| {
        let row = found["capabilities"].as_array().unwrap().iter().find(|row| row["name"] == name);
        let row = row.unwrap_or_else(|| panic!("no row {name}"));
        (row["is_available"].as_bool().unwrap(), row["detail"].as_str().unwrap())
    };
    let (_, detail) = row("page_tables_freed");
    assert!(detail.starts_with("of 64 emptied page tables "), "{detail}");
    assert_eq!(row("khugepaged_mthp").0, std::path::Path::new(COUNTER).exists());
    assert_eq!(std::fs::read_to_string(LIMIT).ok(), limit.as_ref().ok().cloned());
    if let Ok(limit) = limit {
        let taken = std::fs::write(LIMIT, limit.trim());
        assert_eq!(row("giant_surplus").0, taken.is_ok(), "{taken:?}, {}", row("giant_surplus").1);
    }
}

#[test]
fn a_table_in_a_pipe_has_no_control_characters() {
    let scratch = new_scratch();
    for arguments in [small_and(&[]), vec!["doctor"], vec!["kernels"], vec!["run", "--policy=help"]] {
        let output = scratch.wideleaf(&arguments).assert().success().stderr("").get_output().stdout.clone();
        let text = String::from_utf8(output).unwrap();
        assert!(text.chars().all(|character| character == '\n' || !character.is_control()), "{text}");
    }
}

#[test]
fn every_number_in_json_has_its_unit_in_its_name() {
    let scratch = new_scratch();
    let json = |arguments: &[&str]| -> Value {
        let output = scratch.wideleaf(arguments).assert().success().get_output().stdout.clone();
        serde_json::from_slice(&output).unwrap()
    };
    let report = json(&small_and(&["--format=json"]));
    assert_eq!(report["outcome"], "success");
    assert_eq!(report["verification"]["passed"], true);
    assert_eq!(numbers_without_unit("", &report), [""; 0]);
    assert_eq!(numbers_without_unit("", &serde_json::json!({"a": [{"length": 1}]})), ["length"], "it does look");
}

#[test]
fn without_kvm_a_guest_is_refused_with_an_alternative() {
    if Path::new("/dev/kvm").exists() {
        println!("skipped: there is a /dev/kvm here; tests/it/guest.rs runs guests on it");
        return;
    }
    let words = ["cannot open /dev/kvm: it does not exist", "--native"];
    new_scratch().refuses(&["run", "gups", "--memory=64M", "--output=result"], 4, &words);
}

#[test]
fn a_doctor_that_cannot_check_the_mappings_says_so_after_its_table() {
    let scratch = new_scratch();
    // In a mount namespace of its own, /dev/kvm is another device.
    let doctor = "[ ! -e /dev/kvm ] || mount --bind /dev/null /dev/kvm || exit 77; exec \"$0\" doctor --mappings";
    let mut hidden = std::process::Command::new("unshare");
    let ended = hidden.args(["--mount", "sh", "-c", doctor]).arg(scratch.program()).output().unwrap();
    let stderr = String::from_utf8_lossy(&ended.stderr);
    if ended.status.code() == Some(77) || stderr.contains("unshare failed") {
        println!("skipped: {stderr}");
        return;
    }
    let stdout = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(ended.status.code(), Some(4), "{stdout}{stderr}");
    assert!(stderr.contains("/dev/kvm") && stdout.contains("guest_kernels"), "{stdout}{stderr}");
    assert!(!stdout.contains("no word lost"), "{stdout}");
}
