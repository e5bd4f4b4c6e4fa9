//! `wideleaf run --control-socket` and `wideleaf vm`: a VM is paused, resumed, queried and stopped over its socket,
//! whatever other clients write there. Needs KVM (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::sleep;
use std::time::Duration;

use crate::migration::AMONG_QUESTIONS;
use crate::program::new_scratch;
use serde_json::{Value, json};
use wideleaf_policies::units::mib;
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;
use wideleaf_testing::tiny_guest::{image, pvh};

const ARGUMENTS: [&str; 7] = [
    "run",
    "pattern",
    "--memory=128M",
    "--cmdline=bytes=32M seconds=600",
    "--no-daemon",
    "--control-socket=vm.sock",
    "--output=result.json",
];

/// Longest time between two ticks of a manager.
const TICK_LONGEST: Duration = Duration::from_secs(1);

/// A guest that rewrites its memory as long as the test needs it.
fn start(scratch: &Scratch) -> Running {
    start_with(scratch, &[&ARGUMENTS[..], &["--policy=greedy"]].concat())
}

fn start_with(scratch: &Scratch, arguments: &[&str]) -> Running {
    let mut run = Running::start(scratch, &[arguments, &["--format=json"]].concat());
    // The test waits for a reply, not only for the socket file: before that there is no VM.
    while !scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {
        assert_eq!(run.0.try_wait().unwrap(), None, "it ended before it listened");
        sleep(AMONG_QUESTIONS);
    }
    run
}

/// The answer of the VM at `vm.sock` to a request.
pub fn vm(scratch: &Scratch, words: &[&str]) -> Value {
    let output = scratch.wideleaf(&[&["vm", "vm.sock"], words, &["--format=json"]].concat()).assert().success();
    serde_json::from_slice(&output.get_output().stdout).unwrap()
}

/// Sends a raw line and returns the reply.
fn say(stream: &UnixStream, line: &str) -> Value {
    (&*stream).write_all(format!("{line}\n").as_bytes()).unwrap();
    reply(stream)
}

fn reply(stream: &UnixStream) -> Value {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).unwrap();
    serde_json::from_str(&reply).unwrap_or_else(|error| panic!("{reply:?}: {error}"))
}

#[test]
fn a_vm_is_paused_resumed_and_stopped_and_its_run_ends_well() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let run = start(&scratch);
    let mode = std::fs::metadata(scratch.path("vm.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let running = vm(&scratch, &["status"]);
    assert_eq!(
        (&running["state"], &running["workload"], &running["pid"]),
        (&json!("running"), &json!("pattern"), &json!(run.0.id()))
    );
    // It is left out where the host is busy.
    let phase = || loop {
        let phase = vm(&scratch, &["status"])["phase"].clone();
        if phase["done"].as_u64() > Some(0) {
            return phase;
        }
        sleep(TICK_LONGEST / 10);
    };
    let (one, next) = (phase(), phase());
    assert!(one["since_s"].as_f64().is_some_and(|since| next["since_s"].as_f64() > Some(since)), "{one}, {next}");
    assert!(one["name"].as_str().is_some_and(|name| !name.is_empty()), "{one}");
    for _ in 0..2 {
        let paused = vm(&scratch, &["pause"]);
        assert_eq!((&paused["state"], &paused["vcpus"]), (&json!("paused"), &json!(["paused"])));
    }
    for _ in 0..2 {
        assert_eq!(vm(&scratch, &["resume"])["state"], "running", "one resume ends both pauses");
    }
    assert_eq!(vm(&scratch, &["pause"])["state"], "paused");
    sleep(2 * TICK_LONGEST);
    let ended = vm(&scratch, &["stop", "--how=kill"]);
    assert_eq!((&ended["state"], &ended["exit"]), (&json!("ended"), &json!("stopped")));
    assert_eq!(run.end(), (Some(0), String::new()));
    let report: Value = serde_json::from_slice(&std::fs::read(scratch.path("result.json")).unwrap()).unwrap();
    assert_eq!(report["outcome"], "stopped");
    let [all, paused] = ["ticks", "ticks_paused"].map(|name| report["manager"][name].as_u64().unwrap());
    assert!(0 < paused && paused < all, "{paused} of {all} ticks");
    assert_eq!(scratch.names(), ["result.json"], "the socket is removed");
}

#[test]
fn its_policy_is_switched_off_and_on_and_its_statistics_are_available() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let _run = start(&scratch);
    assert_eq!(vm(&scratch, &["set-policy", "off"])["policy"], "off");
    let statistics = vm(&scratch, &["statistics"]);
    let of_vm = &statistics["vm"];
    assert_eq!((&of_vm["state"], &of_vm["policy"], &of_vm["vmm"]), (&json!("off"), &json!("off"), &json!("wideleaf")));
    let ram = of_vm["ram"].as_array().unwrap().iter().map(|piece| piece["bytes"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(ram, 128 << 20);
    assert!(statistics["devices"]["bus"]["port_reads_unanswered"].is_u64(), "{statistics}");
    assert_eq!(vm(&scratch, &["set-policy", "greedy"])["policy"], "greedy");
    for words in ["statistics", "status"] {
        scratch.wideleaf(&["vm", "vm.sock", words]).assert().success();
    }
}

#[test]
fn every_window_has_a_state_and_each_that_is_not_large_a_reason() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let _run = start_with(&scratch, &[&ARGUMENTS[..], &["--policy=greedy"]].concat());
    let windows_of = |map: &Value| {
        map["ranges"].as_array().unwrap().iter().map(|r| r["backing"].as_str().unwrap().len()).sum::<usize>()
    };
    // The guest has used its 32 MiB, and all of it is large.
    let map = loop {
        let map = vm(&scratch, &["windows"]);
        let large: usize =
            map["ranges"].as_array().unwrap().iter().map(|r| r["backing"].as_str().unwrap().matches('2').count()).sum();
        if large >= 16 {
            break map;
        }
        sleep(AMONG_QUESTIONS);
    };
    assert_eq!(windows_of(&map), 64);
    let range = &map["ranges"][0];
    assert!(range["state"].as_str().unwrap().contains('l') && range["why"].as_str().unwrap().contains('-'), "{range}");
    let reasons: Vec<&str> = map["reasons"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert!(reasons.contains(&"never_touched"), "{reasons:?}");
    assert!(map["notes"].to_string().contains("second level"), "{map}");
    let explanation = vm(&scratch, &["explain"]);
    for seen in [&map, &explanation] {
        assert!(seen["scan_age_s"].as_f64().is_some_and(|age| (0.0..3600.0).contains(&age)), "{seen}");
    }
    let counted: u64 = explanation["reasons"].as_array().unwrap().iter().map(|r| r["windows"].as_u64().unwrap()).sum();
    assert_eq!(explanation["windows"], 64);
    assert_eq!(explanation["huge"].as_u64().unwrap() + counted, 64, "{explanation}");
    let text = scratch.wideleaf(&["vm", "vm.sock", "windows"]).assert().success();
    let text = String::from_utf8(text.get_output().stdout.clone()).unwrap();
    for word in ["64 windows of 2 MiB", ", scanned ", "l=large", "e=nothing present", "=never_touched"] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    scratch.wideleaf(&["vm", "vm.sock", "explain"]).assert().success();
    let hello: Value =
        say(&UnixStream::connect(scratch.path("vm.sock")).unwrap(), r#"{"version":1,"request":"hello"}"#);
    let capabilities = hello["ok"]["hello"]["capabilities"].to_string();
    assert!(capabilities.contains("windows") && capabilities.contains("explain"), "{capabilities}");
}

#[test]
fn a_manager_that_has_not_begun_has_no_scan_and_says_so() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let _run = start_with(&scratch, &[&ARGUMENTS[..], &["--policy-delay=3600s"]].concat());
    for question in ["windows", "explain"] {
        let seen = vm(&scratch, &[question]);
        assert!(seen["scan_age_s"].is_null(), "{seen}");
        assert!(seen["notes"].to_string().contains("its manager has not begun yet"), "{seen}");
    }
}

/// In a sandbox, with a sensor that the first policy did not need, on RAM of either kind.
#[test]
fn another_policy_takes_over_and_a_policy_that_must_start_with_the_run_is_refused() {
    if !has_kvm() {
        return;
    }
    for backing in ["--backing=anon", "--backing=memfd"] {
        let scratch = new_scratch();
        let run = start_with(&scratch, &[&ARGUMENTS[..], &["--policy=never", backing]].concat());
        let backed_large = || vm(&scratch, &["statistics"])["vm"]["backing"]["huge_2m"].as_u64().unwrap();
        assert_eq!(backed_large(), 0);
        let set = |policy: &str| vm(&scratch, &["set-policy", policy])["policy"].clone();
        // The policy asks for accesses and zero pages, which `never` does not.
        assert_eq!(set("coverage"), "coverage");
        assert_eq!(set("greedy"), "greedy");
        while backed_large() < mib(32).get() {
            sleep(AMONG_QUESTIONS);
        }
        assert_eq!(vm(&scratch, &["statistics"])["vm"]["policy"], "greedy");
        assert_eq!(set("auto:horizon_s=120"), "auto:horizon_s=120");
        assert_eq!((set("off"), set("never")), (json!("off"), json!("never")));
        let stays = |policy: &str, why: &str| {
            scratch.refuses(&["vm", "vm.sock", "set-policy", policy], 2, &["its policy stays never: ", why]);
        };
        stays("at-fault", "start it with --policy at-fault");
        stays("reservation", "start it with --policy reservation");
        stays("prealloc", "windows are not");
        vm(&scratch, &["stop", "--how=kill"]);
        assert_eq!(run.end(), (Some(0), String::new()));
        let report: Value = serde_json::from_slice(&std::fs::read(scratch.path("result.json")).unwrap()).unwrap();
        let changes = report["manager"]["policy_changes"].as_array().unwrap();
        let changes: Vec<_> = changes.iter().map(|change| change["policy"].as_str().unwrap()).collect();
        assert_eq!(
            (changes, &report["setup"]["policy"]),
            (vec!["coverage", "greedy", "auto", "never"], &json!("never"))
        );
    }
}

#[test]
fn a_recorded_run_and_a_run_with_a_policy_that_serves_faults_keep_their_policy() {
    if !has_kvm() {
        return;
    }
    for (more, why) in [
        (&["--policy=greedy", "--record=frames"][..], "its policy stays greedy: the run is recorded"),
        (&["--policy=at-fault"], "its policy stays at-fault: at-fault answers the guest's faults"),
    ] {
        let scratch = new_scratch();
        let _run = start_with(&scratch, &[&ARGUMENTS[..], more].concat());
        scratch.refuses(&["vm", "vm.sock", "set-policy", "never"], 2, &[why]);
        scratch.wideleaf(&["vm", "vm.sock", "set-policy", "nope"]).assert().code(2);
    }
}

/// Code of `mov dword [address], value`.
fn store(address: u32, value: u32) -> Vec<u8> {
    [&[0xc7, 0x05][..], &address.to_le_bytes(), &value.to_le_bytes()].concat()
}

/// A guest that writes these statuses to each of its devices in order. It then prints a line and stays.
fn statuses_of(devices: &[&[u32]]) -> Vec<u8> {
    const FIRST: u32 = 0xd000_0000;
    let (driver_features, features_selector, status_register) = (0x20, 0x24, 0x70);
    let mut code = Vec::<u8>::new();
    for (statuses, device) in devices.iter().zip(0_u32..) {
        let at = FIRST + 0x1000 * device;
        code.extend(store(at + features_selector, 1));
        code.extend(store(at + driver_features, 1));
        statuses.iter().for_each(|status| code.extend(store(at + status_register, *status)));
    }
    // mov dx, 0x3f8; mov al, '\n'; out dx, al; jmp to itself
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'\n', 0xee, 0xeb, 0xfe]);
    code
}

#[test]
fn devices_report_the_state_of_their_drivers_and_a_balloon_takes_its_target() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    std::fs::write(scratch.path("disk.img"), vec![0; 1 << 20]).unwrap();
    // The guest finds the disk, the balloon's driver gives up, and the driver of the source of random bytes
    // is about to start.
    scratch.file("image", &image(&pvh(), &statuses_of(&[&[1], &[1, 3, 0x83], &[1, 3]])));
    let arguments = [
        "run",
        "image",
        "--memory=64M",
        "--policy=never",
        "--no-daemon",
        "--control-socket=vm.sock",
        "--output=result.json",
        "--disk=disk.img",
        "--balloon",
        "--rng",
    ];
    let run = start_with(&scratch, &arguments);
    let drivers = |answer: &Value| -> Vec<(String, String)> {
        let text = |device: &Value, name: &str| device[name].as_str().unwrap().to_owned();
        answer["virtio"].as_array().unwrap().iter().map(|of| (text(of, "device"), text(of, "driver"))).collect()
    };
    let expected = [("disk disk.img", "found"), ("balloon", "failed"), ("rng", "probing")];
    let expected = expected.map(|(device, driver)| (device.to_owned(), driver.to_owned()));
    while drivers(&vm(&scratch, &["status"])) != expected {
        std::thread::yield_now();
    }
    let balloon = vm(&scratch, &["balloon", "16M"]);
    assert_eq!((&balloon["device"], &balloon["counters"]["target_bytes"]), (&json!("balloon"), &json!(16 << 20)));
    let statistics = vm(&scratch, &["statistics"]);
    assert_eq!(drivers(&statistics), expected);
    assert_eq!(statistics["virtio"][1]["counters"]["target_bytes"], 16 << 20);
    assert_eq!(
        (&statistics["virtio"][0]["counters"]["reads"], &statistics["virtio"][2]["counters"]["requests"]),
        (&json!(0), &json!(0))
    );
    let table = scratch.wideleaf(&["vm", "vm.sock", "statistics"]).assert().success();
    let table = String::from_utf8(table.get_output().stdout.clone()).unwrap();
    assert!(["disk disk.img", "its driver failed", "16 MiB"].iter().all(|word| table.contains(word)), "{table}");
    scratch.refuses(
        &["vm", "vm.sock", "balloon", "65M"],
        2,
        &["a balloon of 65 MiB is more than the guest's RAM, 64 MiB; request at most 64 MiB"],
    );
    let stream = UnixStream::connect(scratch.path("vm.sock")).unwrap();
    let hello = say(&stream, r#"{"version":1,"request":"hello"}"#);
    assert!(hello["ok"]["hello"]["capabilities"].as_array().unwrap().contains(&json!("balloon")), "{hello}");
    vm(&scratch, &["stop", "--how=kill"]);
    let (code, stderr) = run.end();
    assert_eq!(code, Some(0));
    for word in
        ["no driver took disk disk.img: the guest's kernel found it", "no driver took balloon: its driver gave up"]
    {
        assert!(stderr.contains(word), "{stderr}");
    }
}

#[test]
fn a_vm_without_a_balloon_reports_that() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let _run = start(&scratch);
    scratch.refuses(&["vm", "vm.sock", "balloon", "0"], 2, &["this VM has no balloon: start it with --balloon"]);
    assert_eq!(vm(&scratch, &["status"]).get("virtio"), None);
}

#[test]
fn malformed_requests_do_not_stop_the_vm_from_answering_other_clients() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let _run = start(&scratch);
    let connect = || UnixStream::connect(scratch.path("vm.sock")).unwrap();
    let stream = connect();
    let hello = say(&stream, r#"{"version":1,"request":"hello"}"#);
    assert_eq!(hello["ok"]["hello"]["version"], 1);
    assert!(hello["ok"]["hello"]["capabilities"].as_array().unwrap().contains(&json!("stop.kill")));
    let error = |line: &str| say(&stream, line)["error"].as_str().unwrap_or_else(|| panic!("{line}")).to_owned();
    assert!(error(r#"{"version":2,"request":"pause"}"#).starts_with("this VM speaks version 1, not 2"));
    assert!(error(r#"{"version":1,"request":"explode"}"#).contains("unknown variant `explode`"));
    assert!(error(r#"{"version":1,"request":"stop"}"#).contains("missing field `how`"));
    assert!(error("hello?").starts_with("cannot read the request: "));
    // A request longer than the limit, without an end.
    let endless = connect();
    let chunk = vec![b'x'; 1 << 20];
    while (&endless).write_all(&chunk).is_ok() {}
    drop(endless);
    // Silent clients take all connections, and the next client receives an error. Root has two more
    // connections than other users.
    let silent: Vec<UnixStream> = (0..12).map(|_| connect()).collect();
    assert!(reply(&silent[11])["error"].as_str().unwrap().contains("connections are in use"));
    drop(silent);
    while !scratch.wideleaf(&["vm", "vm.sock", "status"]).output().unwrap().status.success() {
        sleep(AMONG_QUESTIONS);
    }
    assert_eq!(vm(&scratch, &["status"])["state"], "running");
}

#[test]
fn a_used_socket_path_is_refused_and_a_stale_socket_is_replaced() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let pid = std::process::id().to_string();
    let live = UnixListener::bind(scratch.path("vm.sock")).unwrap();
    scratch.refuses(
        &ARGUMENTS,
        4,
        &[
            "cannot listen at vm.sock: another process (pid ",
            &pid,
            "is listening there",
            "name another path with --control-socket",
        ],
    );
    drop(live);
    let run = start(&scratch);
    vm(&scratch, &["stop", "--how=kill"]);
    assert_eq!(run.end().0, Some(0));
    std::fs::remove_file(scratch.path("result.json")).unwrap();
    scratch.file("vm.sock", b"a file of another program");
    scratch.refuses(&ARGUMENTS, 4, &["vm.sock: it is not a socket; move it away, or name another path"]);
    let nowhere = [&ARGUMENTS[..5], &["--control-socket=none/vm.sock"]].concat();
    scratch.refuses(&nowhere, 4, &["cannot listen at none/vm.sock: No such file"]);
}

#[test]
fn a_client_of_a_vm_that_does_not_exist_receives_an_error() {
    let scratch = new_scratch();
    scratch.refuses(&["vm", "none.sock", "status"], 4, &["no VM listens at none.sock", "--control-socket"]);
    drop(UnixListener::bind(scratch.path("left.sock")).unwrap());
    scratch.refuses(&["vm", "left.sock", "pause"], 4, &["no VM listens at left.sock"]);
    let native = ["run", "--native", "gups", "--control-socket=vm.sock"];
    scratch.wideleaf(&native).assert().code(2);
}
