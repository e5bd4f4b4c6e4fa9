//! Jobs of experiments with guests that end in a moment: QEMU compared with ours, several guests at once, and
//! host settings that are restored. Needs KVM, and QEMU for its guests (`WIDELEAF_REQUIRE=kvm,qemu` turns a
//! skip into a failure).

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::program::new_scratch;
use nix::sys::signal::Signal;
use wideleaf_experiments::definition::{
    Arm, BudgetOf, Case, Cell, Experiment, GuestAmongOthers, GuestInQemu, Job, Work,
};
use wideleaf_experiments::disturbance::{DisturbedGuests, Event, PromotionOwner, TO_NEARLY_ALL_S, WATCHED_S};
use wideleaf_experiments::each_guest::{AT_THE_SAME_TIME, AT_THE_SAME_TIME_MIN_PERCENT, OfGuest};
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::peers::{Guest, QEMU, QemuRam};
use wideleaf_experiments::restoring::{
    Cache, DISK_MIB, FILLED_S, FIRST_PROGRESS_S, HOT_MIB, PAUSE_MS, READ_BYTES_PER_S, RestoredGuest, SAVE_ROUNDS,
    SAVE_S, STORED_MIB, WAIT_MAX_US, Way,
};
use wideleaf_experiments::results::{FORMAT, Measured, Results, Run, RunOutcome};
use wideleaf_run::report::{RunReport, Verification};
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::{Need, has_kvm, is_there};

/// A table of 8 MiB, updated for some milliseconds.
fn small() -> Guest {
    Guest::new("gups", "log2_words=20", 64)
}

fn job(work: Work) -> Job {
    Job::of(work, 2.0)
}

fn qemu(ram: QemuRam, guest: Guest) -> Job {
    job(Work::Qemu { guest, ram })
}

fn has_qemu() -> bool {
    let answers = Command::new(QEMU).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    is_there(Need::Qemu, answers.map(drop).map_err(|error| format!("{QEMU}: {error}")))
}

/// Writes a file of results with these jobs, one arm each, without runs. The name is that of an existing experiment.
fn to_be_run(scratch: &Scratch, jobs: Vec<(&str, Job)>) -> String {
    let arm = |(name, _): &(&str, Job)| Arm { name: (*name).to_owned(), summary: String::new() };
    let arms = jobs.iter().map(arm).collect();
    let cells = jobs.into_iter().map(|(_, job)| Cell::of(job)).collect();
    let results = Results {
        wideleaf_experiment: FORMAT,
        experiment: Experiment {
            name: "policies".into(),
            title: "Small ones".into(),
            question: "Does it run?".into(),
            source: None,
            rounds: 1,
            arms,
            cases: vec![Case { name: "small".into(), unit: "GUP/s".into(), working_set_mib: 64, cells }],
        },
        environment: Default::default(),
        started: String::new(),
        ended: String::new(),
        elapsed_s: 0.0,
        is_complete: false,
        runs: vec![],
    };
    scratch.file("small.json", serde_json::to_string(&results).unwrap().as_bytes())
}

/// Runs the jobs and returns the outcome of each, in the order given. No guest fails.
fn outcomes(scratch: &Scratch, jobs: Vec<(&str, Job)>) -> Vec<Run> {
    outcomes_and_exit_code(scratch, jobs, 0)
}

fn outcomes_and_exit_code(scratch: &Scratch, jobs: Vec<(&str, Job)>, code: i32) -> Vec<Run> {
    let file = to_be_run(scratch, jobs);
    scratch.wideleaf(&["experiment", "run", "policies", "--resume", &file]).assert().code(code);
    let mut results: Results = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(scratch.names(), ["small.json"], "nothing else is left");
    assert!(results.is_complete);
    // Arms run in another order than they were given.
    let place = |arm: &str| results.experiment.arms.iter().position(|of| of.name == arm);
    results.runs.sort_by_key(|run| place(&run.arm));
    results.runs
}

fn measured(run: &Run) -> &Measured {
    match &run.outcome {
        RunOutcome::Measured(measured) => measured,
        RunOutcome::Failed(why) => panic!("{}: {why}", run.arm),
    }
}

fn failure(run: &Run) -> &str {
    match &run.outcome {
        RunOutcome::Measured(measured) => panic!("{}: {measured:?}", run.arm),
        RunOutcome::Failed(why) => why,
    }
}

/// A wideleaf with a guest that found that many wrong words, as a script.
fn guest_with_wrong_words(scratch: &Scratch, errors: u64) -> Job {
    let verification = Verification { passed: errors == 0, errors, checked: 9, first_mismatch: None };
    let report = RunReport { verification: Some(verification), ..RunReport::default() };
    let report = scratch.file("report", &serde_json::to_vec(&report).unwrap());
    // The last argument is the file of --output.
    let script = format!("#!/bin/sh\nfor last; do :; done\ncp {report} \"$last\"\n");
    let program = scratch.file("program", script.as_bytes());
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    Job { program: Some(program), ..Job::run(&["gups"], 1.0) }
}

#[test]
fn wrong_words_make_the_exit_code_1_also_after_a_good_repetition() {
    let scratch = new_scratch();
    let job = guest_with_wrong_words(&scratch, 3);
    let file = to_be_run(&scratch, vec![("wrong", job)]);
    let run = || scratch.wideleaf(&["experiment", "run", "policies", "--resume", &file]).assert().code(1);
    let wrong = ["In 1 run the guest found wrong words", "the guest found 3 wrong words or results"];
    let says = |said: assert_cmd::assert::Assert, words: &[&str]| {
        // A table breaks its lines.
        let text = String::from_utf8(said.get_output().stdout.clone()).unwrap();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        words.iter().for_each(|word| assert!(text.contains(word), "no {word:?} in {text}"));
        said.stderr(predicates::str::contains("cannot vouch for these results: the guest failed in 1 run"));
    };
    says(run(), &[&wrong[..], &["1 of 1 runs failed"]].concat());
    guest_with_wrong_words(&scratch, 0);
    says(run(), &[&wrong[..], &["1 run failed before a --resume"]].concat());
    let results: Results = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert!(results.is_complete && results.runs.len() == 1 && results.runs[0].measured().is_some(), "{results:?}");
    says(run(), &wrong);
    // Not even a report that cannot be written hides it.
    let full = ["experiment", "run", "policies", "--resume", &file, "--html=/dev/full"];
    let lost = scratch.wideleaf(&full).assert().code(1).stderr(predicates::str::contains("No space left"));
    lost.stderr(predicates::str::contains("cannot vouch for these results"));
}

#[test]
fn a_guest_of_qemu_reports_the_same_metrics_as_ours() {
    if !has_kvm() || !has_qemu() {
        return;
    }
    // Long enough for several samples of its RAM.
    let guest = Guest::new("gups", "log2_words=20 seconds=2", 64);
    let jobs = vec![("ours", guest.run(&["--policy", "never"], 2.0)), ("qemu", qemu(QemuRam::Thp, guest))];
    let runs = outcomes(&new_scratch(), jobs);
    let [ours, qemu] = [&runs[0], &runs[1]].map(|run| &measured(run).metrics);
    for metric in [Metric::Figure, Metric::Seconds, Metric::FirstByteMs, Metric::ResidentMib, Metric::GapP99Us] {
        assert!(ours[&metric] > 0.0 && qemu[&metric] > 0.0, "{metric}: {ours:?} {qemu:?}");
    }
    // The table has four windows. THP decides which of them are large, but the coverage is known.
    assert_eq!(ours[&Metric::CoveragePercent], 0.0);
    assert!((0.0..=100.0).contains(&qemu[&Metric::CoveragePercent]));
    let seen = &measured(&runs[1]).series;
    assert!(seen.iter().any(|look| look.base_mib + look.huge_mib >= 8.0), "the table is resident: {seen:?}");
}

#[test]
fn a_qemu_guest_that_cannot_run_gives_its_reason_and_the_next_one_runs() {
    if !has_kvm() || !has_qemu() {
        return;
    }
    let wrong = Guest::new("gups", "log2_words=1", 64);
    // No pool has that many pages.
    let large = Guest::new("gups", "log2_words=20", 1 << 30);
    let jobs = vec![
        ("refused", qemu(QemuRam::Thp, wrong)),
        ("no pool", qemu(QemuRam::Hugetlb, large)),
        ("good", qemu(QemuRam::Thp, small())),
    ];
    let runs = outcomes(&new_scratch(), jobs);
    assert!(failure(&runs[0]).contains("log2_words"), "{}", failure(&runs[0]));
    assert!(failure(&runs[1]).contains(QEMU), "QEMU's own words: {}", failure(&runs[1]));
    assert!(measured(&runs[2]).metrics[&Metric::Figure] > 0.0);
}

/// A guest that works for so long that the event is over before, also on a busy machine.
fn disturbed(keeper: PromotionOwner, event: Event, seconds: u32) -> Job {
    let guest = Guest::new("gups", &format!("log2_words=20 seconds={seconds} progress_ms=250"), 64);
    job(Work::Disturbed(DisturbedGuests { guest, count: 1, ram: QemuRam::Thp, keeper, event }))
}

#[test]
fn a_guest_that_is_restored_moved_or_logged_is_measured_afterwards_and_has_lost_no_word() {
    if !has_kvm() || !has_qemu() {
        return;
    }
    let of = |event| disturbed(PromotionOwner::Kernel, event, 15);
    let jobs = vec![("restored", of(Event::Restore)), ("moved", of(Event::Postcopy)), ("logged", of(Event::DirtyLog))];
    // Their memory was checked by the guests themselves: a wrong word is a failure.
    for run in outcomes(&new_scratch(), jobs) {
        let Measured { metrics, told, .. } = measured(&run);
        for metric in [Metric::Figure, Metric::GapP99Us, Metric::GapMaxUs, Metric::ResidentMib] {
            assert!(metrics[&metric] > 0.0, "{}, {metric}: {metrics:?}", run.arm);
        }
        assert!(metrics.contains_key(&Metric::CoveragePercent), "{}: its table was found: {metrics:?}", run.arm);
        assert!(told[WATCHED_S] > 0.0, "{}: {told:?}", run.arm);
    }
}

#[test]
fn a_guest_that_is_denied_huge_pages_has_none() {
    if !has_kvm() || !has_qemu() {
        return;
    }
    let denied = disturbed(PromotionOwner::KernelWithoutHugePages, Event::Start, 2);
    let runs = outcomes(&new_scratch(), vec![("denied", denied)]);
    let Measured { metrics, told, .. } = measured(&runs[0]);
    assert_eq!((metrics[&Metric::CoveragePercent], told.get(TO_NEARLY_ALL_S)), (0.0, None));
}

#[test]
fn a_guest_with_a_wideleafd_is_attached_and_a_missing_daemon_is_named() {
    if !has_kvm() || !has_qemu() || !nix::unistd::geteuid().is_root() {
        return;
    }
    let scratch = new_scratch();
    let runs = outcomes(&scratch, vec![("wideleafd", disturbed(PromotionOwner::Daemon, Event::Start, 2))]);
    match scratch.program().with_file_name("wideleafd").exists() {
        true => assert!(measured(&runs[0]).metrics[&Metric::ManagerCpuS] > 0.0),
        false => assert_eq!(failure(&runs[0]), "cannot find wideleafd: it is not in the folder of this program"),
    }
}

#[test]
fn a_disturbed_guest_that_cannot_run_gives_its_reason_in_one_line() {
    if !has_kvm() || !has_qemu() {
        return;
    }
    let of = |guest: Guest, ram| {
        let (keeper, event) = (PromotionOwner::Kernel, Event::Start);
        job(Work::Disturbed(DisturbedGuests { guest, count: 1, ram, keeper, event }))
    };
    let wrong = of(Guest::new("gups", "log2_words=1", 64), QemuRam::Thp);
    // No pool has that many pages.
    let large = of(Guest::new("gups", "log2_words=20", 1 << 30), QemuRam::Hugetlb);
    // No machine has that much memory.
    let hog = disturbed(PromotionOwner::Kernel, Event::StartBesideHog { hog_pages_2m: 1 << 30 }, 1);
    let jobs = vec![("refused", wrong), ("no pool", large), ("no hog", hog)];
    let runs = outcomes_and_exit_code(&new_scratch(), jobs, 1);
    for (run, words) in runs.iter().zip(["log2_words", QEMU, "cannot take 1073741824 huge pages"]) {
        let why = failure(run);
        assert!(why.contains(words) && !why.contains('\n'), "{why}");
    }
}

/// A guest that is saved after a while, and watched for longer than a busy machine needs to restore 8 MiB.
fn restored(way: Way, cache: Cache, line: &str) -> Job {
    job(Work::Restored(RestoredGuest {
        guest: Guest::new("gups", &format!("log2_words=20 {line} progress_ms=10"), 64),
        phase: "update".into(),
        hot: vec!["table".into()],
        way,
        cache,
        works_ms: 500,
        saved_within_ms: 3000,
        watched_ms: 3000,
    }))
}

#[test]
fn a_guest_is_saved_once_and_continues_in_every_way() {
    if !has_kvm() {
        return;
    }
    let of = |way| restored(way, Cache::Warm, "seconds=3600");
    let mut jobs = vec![
        ("never", of(Way::NeverSaved)),
        ("moved", of(Way::Moved)),
        ("in order", of(Way::MovedInOrder)),
        ("pages", of(Way::CopiedByPage)),
        ("mapped", of(Way::Mapped)),
        ("cold", restored(Way::Moved, Cache::Cold, "seconds=3600")),
        ("cached", restored(Way::MovedCached, Cache::Cold, "seconds=3600")),
    ];
    if has_qemu() {
        jobs.push(("qemu", of(Way::Qemu)));
    }
    let runs = outcomes(&new_scratch(), jobs);
    let tells = |run: &Run, names: &[&str]| {
        let Measured { metrics, told, series, .. } = measured(run);
        assert!(metrics[&Metric::Figure] > 0.0 && !series.is_empty(), "{}: {metrics:?}", run.arm);
        for name in names {
            assert!(told.get(*name).is_some_and(|value| *value > 0.0), "{}, {name}: {told:?}", run.arm);
        }
    };
    let always = [FIRST_PROGRESS_S, WATCHED_S, HOT_MIB];
    let of_file = [READ_BYTES_PER_S, STORED_MIB, DISK_MIB, SAVE_ROUNDS, SAVE_S];
    tells(&runs[0], &always);
    for run in &runs[1..] {
        // A temporary folder in memory has no cold file.
        let is_cold = run.arm == "cold" || run.arm == "cached";
        if is_cold && matches!(&run.outcome, RunOutcome::Failed(why) if why.contains("set TMPDIR")) {
            continue;
        }
        tells(run, &[&always[..], &of_file].concat());
        // QEMU tells its pause in whole milliseconds, and a guest of 8 MiB may be saved in less than one.
        let pause = measured(run).told.get(PAUSE_MS).copied();
        assert!(pause.is_some_and(|pause| pause > 0.0 || run.arm == "qemu"), "{}: {pause:?}", run.arm);
    }
    let told = |arm: usize, name: &str| measured(&runs[arm]).told.get(name).copied();
    assert_eq!(told(1, STORED_MIB), told(4, STORED_MIB), "all ways of ours have one snapshot");
    // A guest waits for none of its pages if all are there before it touches them.
    assert!((1..4).all(|arm| told(arm, FILLED_S) > Some(0.0)), "threads filled the guest's memory");
    assert_eq!((told(4, WAIT_MAX_US), told(4, FILLED_S)), (None, None), "and none answers for a mapped file");
    assert!(told(1, STORED_MIB) >= Some(8.0) && told(1, DISK_MIB) < Some(32.0), "{:?}", measured(&runs[1]).told);
}

#[test]
fn a_guest_that_ends_before_it_works_in_its_phase_gives_the_reason_in_one_line() {
    if !has_kvm() {
        return;
    }
    let Work::Restored(guest) = restored(Way::Moved, Cache::Warm, "seconds=1").work else { panic!("it is restored") };
    let elsewhere = job(Work::Restored(RestoredGuest { phase: "other".into(), ..guest }));
    let runs = outcomes(&new_scratch(), vec![("elsewhere", elsewhere)]);
    let why = failure(&runs[0]);
    assert!(why.contains("it ended before it had worked in phase other for 500ms"), "{why}");
    assert!(!why.contains('\n'), "{why}");
}

/// Kills an experiment, and waits for the end of its children.
fn ends_with_its_children_when_killed(experiment: Running, children: &str) {
    experiment.signal(Signal::SIGKILL);
    experiment.end();
    let deadline = Instant::now() + Duration::from_secs(60);
    // If no process waits for the ended child, its command line is still gone.
    let is_left = |child: &str| fs::read(format!("/proc/{child}/cmdline")).is_ok_and(|line| !line.is_empty());
    while children.split_whitespace().any(is_left) {
        assert!(Instant::now() < deadline, "{children} are left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_disturbed_guest_its_daemon_and_its_hog_end_with_an_experiment_that_is_killed() {
    let has_setpriv = Command::new("setpriv").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !has_kvm() || !has_qemu() || !has_setpriv {
        return;
    }
    let scratch = new_scratch();
    let endless = disturbed(PromotionOwner::Kernel, Event::StartBesideHog { hog_pages_2m: 2 }, 600);
    let file = to_be_run(&scratch, vec![("qemu", endless)]);
    let mut experiment = Running::start(&scratch, &["experiment", "run", "policies", "--resume", &file]);
    let is_in = |children: &str, what: &str| {
        let line = |child: &str| fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap_or_default();
        // Before setpriv and a shell become QEMU, the name is an argument of theirs.
        children.split_whitespace().any(|child| line(child).contains(what))
    };
    let children = experiment
        .wait_for("children", |children| is_in(children, "hold-blocks") && is_in(children, &format!("{QEMU}\0-M")));
    ends_with_its_children_when_killed(experiment, &children);
}

#[test]
fn qemu_ends_when_its_experiment_is_killed_with_sigkill() {
    let has_setpriv = Command::new("setpriv").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !has_kvm() || !has_qemu() || !has_setpriv {
        return;
    }
    let scratch = new_scratch();
    let endless = Guest::new("gups", "log2_words=20 seconds=600", 64);
    let file = to_be_run(&scratch, vec![("qemu", qemu(QemuRam::Thp, endless))]);
    let mut experiment = Running::start(&scratch, &["experiment", "run", "policies", "--resume", &file]);
    let is_qemu =
        |child: &str| fs::read(format!("/proc/{child}/comm")).is_ok_and(|name| name.starts_with(b"qemu-system"));
    let children = experiment.wait_for("children", |children| children.split_whitespace().any(is_qemu));
    ends_with_its_children_when_killed(experiment, &children);
}

#[test]
fn several_guests_at_once_are_a_single_run() {
    if !has_kvm() {
        return;
    }
    let gups_for_a_second = Guest::new("gups", "log2_words=20 seconds=1", 64);
    let guest = |name: &str, is_judged| GuestAmongOthers {
        name: name.into(),
        is_judged,
        arguments: [gups_for_a_second.arguments(), vec!["--policy".into(), "greedy".into()]].concat(),
    };
    let together =
        |budget| job(Work::Together { guests: vec![guest("a", true), guest("b", true), guest("c", false)], budget });
    let scratch = new_scratch();
    let runs = outcomes(&scratch, vec![("each", together(BudgetOf::Each)), ("all", together(BudgetOf::All))]);
    let each = measured(&runs[0]);
    assert!(each.metrics[&Metric::ManagerCpuS] > 0.0);
    // On a busy machine they may be at work one after the other, or have no mark of progress in the shared time. Such
    // guests are not compared.
    let figure = |of: &str| each.told.get(&OfGuest::Figure.name(of));
    let fairness = each.metrics.get(&Metric::Fairness);
    assert_eq!(fairness.is_some(), figure("a").is_some() && figure("b").is_some(), "{each:?}");
    assert!(fairness.is_none_or(|fairness| *fairness > 0.0 && *fairness <= 1.0), "{each:?}");
    let may_be_compared = each.told[AT_THE_SAME_TIME] >= AT_THE_SAME_TIME_MIN_PERCENT;
    assert_eq!(each.notes.len(), 3, "{:?}", each.notes);
    for of in ["a", "b", "c"] {
        let told = |what: OfGuest<'_>| each.told[&what.name(of)];
        assert!(told(OfGuest::FigureOfWhole) > 0.0 && told(OfGuest::ManagerCpuS) > 0.0, "{:?}", each.told);
        assert!(figure(of).is_none_or(|figure| may_be_compared && *figure > 0.0), "{:?}", each.told);
        assert_eq!((told(OfGuest::SetMib("table")), told(OfGuest::Vacated)), (8.0, 0.0));
        assert!((0.0..=8.0).contains(&told(OfGuest::HugeMib("table"))), "{:?}", each.told);
    }
    // A daemon that is not built with this program is missing, and the failure names it.
    match scratch.program().with_file_name("wideleafd").exists() {
        true => assert!(measured(&runs[1]).told[&OfGuest::FigureOfWhole.name("a")] > 0.0),
        false => assert_eq!(failure(&runs[1]), "cannot find wideleafd: it is not in the folder of this program"),
    }
}

#[test]
fn several_guests_of_qemu_at_once_are_a_single_run() {
    if !has_kvm() || !has_qemu() {
        return;
    }
    let gups_for_two_seconds = Guest::new("gups", "log2_words=20 seconds=2", 64);
    let guest = |name: &str| GuestInQemu { name: name.into(), guest: gups_for_two_seconds.clone() };
    let work = Work::TogetherInQemu { guests: vec![guest("a"), guest("b")] };
    let runs = outcomes(&new_scratch(), vec![("qemu", job(work))]);
    let both = measured(&runs[0]);
    assert_eq!(both.notes.len(), 2, "{:?}", both.notes);
    let may_be_compared = both.told[AT_THE_SAME_TIME] >= AT_THE_SAME_TIME_MIN_PERCENT;
    for of in ["a", "b"] {
        let told = |what: OfGuest<'_>| both.told[&what.name(of)];
        assert!(told(OfGuest::FigureOfWhole) > 0.0, "{:?}", both.told);
        let figure = both.told.get(&OfGuest::Figure.name(of));
        assert!(figure.is_none_or(|figure| may_be_compared && *figure > 0.0), "{:?}", both.told);
        assert_eq!(told(OfGuest::SetMib("table")), 8.0);
        assert!((0.0..=8.0).contains(&told(OfGuest::HugeMib("table"))), "{:?}", both.told);
    }
}

#[test]
fn a_hog_takes_huge_pages_before_a_job_and_ends_with_it() {
    if !has_kvm() {
        return;
    }
    let guest = || small().run(&["--policy", "never"], 2.0);
    // No machine has that much memory.
    let jobs = vec![("beside", guest().beside_hog(2)), ("too large", guest().beside_hog(1 << 30))];
    let runs = outcomes(&new_scratch(), jobs);
    let notes = &measured(&runs[0]).notes;
    assert!(notes.iter().any(|note| note.contains("of 2 pages of 2 MiB were huge")), "{notes:?}");
    assert!(failure(&runs[1]).contains("cannot take 1073741824 huge pages"), "{}", failure(&runs[1]));
}

#[test]
fn khugepageds_settings_are_restored_when_the_parent_of_their_holder_is_gone() {
    let scratch = new_scratch();
    let folder = scratch.path("sys/kernel/mm/transparent_hugepage/khugepaged");
    fs::create_dir_all(&folder).unwrap();
    let files = [("scan_sleep_millisecs", "10000"), ("pages_to_scan", "4096")];
    files.iter().for_each(|(file, number)| fs::write(folder.join(file), number).unwrap());
    let now = || files.map(|(file, _)| fs::read_to_string(folder.join(file)).unwrap());
    let mut holder = Command::new(scratch.program());
    holder.args(["hold-khugepaged", "--scan-sleep-ms=0", "--pages-to-scan=99", "--root"]).arg(scratch.path("."));
    let mut holder =
        Running(holder.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut said = String::new();
    BufReader::new(holder.0.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert_eq!((said.as_str(), now()), ("held\n", ["0", "99"].map(str::to_owned)));
    // The kernel closes the pipe of a killed process.
    drop(holder.0.stdin.take());
    assert_eq!(holder.end(), (Some(0), String::new()));
    assert_eq!(now(), ["10000", "4096"].map(str::to_owned));
}

#[test]
fn settings_that_cannot_be_changed_are_refused_in_one_line() {
    let missing = new_scratch();
    let root = format!("--root={}", missing.path(".").display());
    let arguments = ["hold-khugepaged", "--scan-sleep-ms=0", "--pages-to-scan=1", &root];
    missing.refuses(&arguments, 4, &["khugepaged/scan_sleep_millisecs", "No such file"]);
}
