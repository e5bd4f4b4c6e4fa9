//! The program itself: started, asked, signalled, killed, and started again.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Command, Stdio};

use crate::place::{Daemon, Place, WITHIN, eventually, scrape};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use wideleaf_control::client::{ClientError, ask};
use wideleaf_control::protocol::{Answer, Envelope, LiveReport, PoolRequest, Request, Settings, Target};
use wideleaf_control::view::VmView;
use wideleaf_policies::units::mib;
use wideleaf_testing::qemu_guest::{QemuGuest, QemuRam, QemuSetup};
use wideleaf_testing::{Need, has_kvm, is_there};

/// Standard error of a program that ends with `code`.
fn error_of(command: Command, code: i32) -> String {
    let output = assert_cmd::Command::from_std(command).assert().code(code).get_output().clone();
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn check_reads_the_configuration_and_starts_nothing() {
    let place = Place::new();
    let check = || {
        let mut command = place.command();
        command.arg("--check");
        command
    };
    let printed = || {
        let output = assert_cmd::Command::from_std(check()).assert().success().get_output().clone();
        String::from_utf8(output.stdout).unwrap()
    };
    let words = printed();
    assert!(words.contains("[budget]\ncopy_per_second = \"2G\"\ncpu_share = \"50%\"\n"), "{words}");
    std::fs::write(place.file("wideleafd.toml"), &words).unwrap();
    assert_eq!(printed(), words, "it reads what it prints");
    place.configure("[budget]\ncpu_share = \"half\"");
    let error = error_of(check(), 3);
    assert!(error.contains("wideleafd.toml:8:13: \"half\" is not a share"), "{error}");
    assert!(!place.socket().exists() && !place.file("state.json").exists());
}

#[test]
fn a_missing_configuration_file_that_was_named_is_an_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wideleafd"));
    command.args(["--config", "/nowhere/at.toml"]);
    let error = error_of(command, 3);
    assert_eq!(error.lines().count(), 1);
    assert!(error.starts_with("wideleafd: cannot read /nowhere/at.toml: "), "{error}");
}

#[test]
fn it_prints_its_manual_page() {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_wideleafd"));
    let output = command.arg("--man").assert().success().get_output().clone();
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(page.contains(".TH wideleafd 8"), "{page}");
    assert!(page.contains("logs more to standard error\nSignals: SIGHUP reads the configuration again"), "{page}");
}

#[test]
fn room_that_is_refused_is_a_warning_in_the_log_with_the_domain_and_the_reason() {
    let place = Place::new();
    let _daemon = place.start();
    // 2 EiB: more than any host has, so that no pool is touched.
    let pages = vec![PoolRequest { page_bytes: 2 << 20, pages: 1 << 40, node: None, nodes: Vec::new() }];
    let request = Request::Prepare { domain: "bigno".into(), uuid: "u".into(), pages, ordinary: None };
    let refused = ask(&place.socket(), request).unwrap_err().to_string();
    assert!(refused.contains("no room for bigno: ") && refused.contains("are above host.low_free"), "{refused}");
    let is_warning = |line: &str| {
        line.contains("WARN") && line.contains("no room for bigno: ") && line.contains("are above host.low_free")
    };
    eventually("the log has the warning", || place.log().lines().any(is_warning));
}

#[test]
fn an_unread_log_delays_neither_the_answers_nor_the_end() {
    let place = Place::new();
    let (_unread, mut full) = std::io::pipe().unwrap();
    let bytes = fcntl(&full, FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    full.write_all(&vec![0; bytes as usize]).unwrap();
    let child = place.command().stdin(Stdio::null()).stdout(Stdio::null()).stderr(full).spawn().unwrap();
    let daemon = Daemon { place: &place, child };
    eventually("the daemon answers", || ask(&place.socket(), Request::Daemon).is_ok());
    // Each refusal is a line of the log.
    for _ in 0..100 {
        let pages = vec![PoolRequest { page_bytes: 2 << 20, pages: 1 << 40, node: None, nodes: Vec::new() }];
        let request = Request::Prepare { domain: "bigno".into(), uuid: "u".into(), pages, ordinary: None };
        let refused = ask(&place.socket(), request).unwrap_err().to_string();
        assert!(refused.contains("no room for bigno: "), "{refused}");
    }
    assert!(daemon.end(Signal::SIGTERM).success());
    assert!(!place.socket().exists());
}

#[test]
fn it_answers_a_line_with_a_line_and_is_scraped() {
    let place = Place::new();
    let daemon = place.start();
    let stream = UnixStream::connect(place.socket()).unwrap();
    (&stream).write_all(b"{\"version\":1,\"request\":\"daemon\"}\n").unwrap();
    let mut reply = String::new();
    BufReader::new(&stream).read_line(&mut reply).unwrap();
    assert!(reply.contains(&format!("\"pid\":{}", daemon.child.id())), "{reply}");
    let scraped = scrape(UnixStream::connect(place.file("metrics.sock")).unwrap());
    assert!(scraped.contains("\nwideleaf_daemon_vms{} 0.0\n"), "{scraped}");
}

#[test]
fn it_is_scraped_over_tcp_where_that_is_configured() {
    let place = Place::new();
    // At an address of the loopback that no other test uses, so that the port stays free.
    let free = TcpListener::bind("127.9.7.1:0").unwrap().local_addr().unwrap();
    place.configure_with(&free.to_string(), "");
    let _daemon = place.start();
    let mut stream = None;
    eventually("it listens", || {
        stream = TcpStream::connect(free).ok();
        stream.is_some()
    });
    assert!(scrape(stream.unwrap()).starts_with("HTTP/1.1 200"));
}

#[test]
fn a_thousand_silent_clients_keep_no_scraper_out_and_delay_no_end() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    let place = Place::new();
    let daemon = place.start();
    let connect = || UnixStream::connect(place.file("metrics.sock")).unwrap();
    let silent: Vec<UnixStream> = (0..1000).map(|_| connect()).collect();
    let scraped = scrape(connect());
    assert!(scraped.starts_with("HTTP/1.1 200") && !scraped.contains("# EOF"), "{scraped}");
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).unwrap().count();
    assert!(open < 100, "{open} files are open");
    assert!(daemon.end(Signal::SIGTERM).success());
    drop(silent);
}

#[test]
fn sighup_reads_the_configuration_again_and_a_mistake_in_it_changes_nothing() {
    let place = Place::new();
    let daemon = place.start();
    assert_eq!(daemon.view().copy_per_second, 2 << 30);
    place.configure("[budget]\ncopy_per_second = \"1G\"");
    daemon.signal(Signal::SIGHUP);
    eventually("it is read", || daemon.view().copy_per_second == 1 << 30);
    place.configure("[budget]\ncopy_per_second = \"fast\"");
    daemon.signal(Signal::SIGHUP);
    eventually("the mistake is in the log", || place.log().contains("wideleafd.toml:8:19: "));
    assert_eq!(daemon.view().copy_per_second, 1 << 30);
}

#[test]
fn sigterm_ends_it_with_its_sockets_removed_and_its_state_kept() {
    let place = Place::new();
    let daemon = place.start();
    eventually("its state is written", || place.file("state.json").exists());
    assert!(daemon.end(Signal::SIGTERM).success());
    assert!(!place.socket().exists() && !place.file("metrics.sock").exists());
    assert!(place.file("state.json").exists());
}

#[test]
fn a_second_daemon_ends_with_the_first_ones_process_id_in_its_error_and_leaves_it_alone() {
    let place = Place::new();
    let daemon = place.start();
    let error = error_of(place.command(), 4);
    assert!(error.contains(&format!("another wideleafd (pid {}) is listening", daemon.child.id())), "{error}");
    assert_eq!(daemon.view().pid, daemon.child.id());
}

#[test]
fn the_sockets_of_a_killed_daemon_are_replaced_and_a_damaged_state_is_moved_aside() {
    let place = Place::new();
    assert!(!place.start().end(Signal::SIGKILL).success());
    assert!(place.socket().exists());
    std::fs::write(place.file("state.json"), "{\"version\":").unwrap();
    let daemon = place.start();
    assert_eq!(daemon.view().vms, 0);
    assert_eq!(std::fs::read_to_string(place.file("state.json.damaged")).unwrap(), "{\"version\":");
    eventually("the log has the reason", || place.log().contains("cannot read the state ("));
}

#[test]
fn another_file_in_the_sockets_place_is_left_alone() {
    let place = Place::new();
    std::fs::write(place.socket(), "precious").unwrap();
    assert!(error_of(place.command(), 4).contains("is not a socket"));
    assert_eq!(std::fs::read_to_string(place.socket()).unwrap(), "precious");
}

#[test]
fn the_daemon_notifies_systemd_when_it_is_ready_and_when_it_ends() {
    let place = Place::new();
    let told = UnixDatagram::bind(place.file("notify")).unwrap();
    told.set_read_timeout(Some(WITHIN)).unwrap();
    let hear = || {
        let mut text = [0; 256];
        let n = told.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..n]).trim().to_owned()
    };
    let mut command = place.command();
    let child = command.env("NOTIFY_SOCKET", place.file("notify")).stderr(Stdio::null()).spawn().unwrap();
    let daemon = Daemon { place: &place, child };
    assert_eq!(hear(), "READY=1");
    assert_eq!(daemon.view().vms, 0); // a client may ask at once after READY=1
    daemon.signal(Signal::SIGTERM);
    assert_eq!(hear(), "STOPPING=1");
}

/// This test as if it were `wideleaf run`: its own process, with a VM.
fn own_vm() -> Box<VmView> {
    let view = serde_json::json!({
        "name": "ours", "pid": std::process::id(), "started_at": 1, "vmm": "wideleaf", "state": "managed", "ram": [],
        "backing": { "unbacked": 0, "base_4k": 0, "huge_2m": 0, "giant_1g": 0, "misaligned": 0 },
    });
    Box::new(serde_json::from_value(view).unwrap())
}

#[test]
fn a_registered_vm_is_listed_as_long_as_its_connection() {
    let place = Place::new();
    let daemon = place.start();
    let stream = UnixStream::connect(place.socket()).unwrap();
    let line = serde_json::to_string(&Envelope::from(Request::Register { vm: own_vm(), live: LiveReport::default() }))
        .unwrap()
        + "\n";
    (&stream).write_all(line.as_bytes()).unwrap();
    let mut reply = String::new();
    BufReader::new(&stream).read_line(&mut reply).unwrap();
    assert!(reply.contains("\"copy_per_second\":2147483648"), "{reply}");
    assert_eq!(daemon.managed()[0].name, "ours");
    drop(stream);
    eventually("it is forgotten", || daemon.managed().is_empty());
}

#[test]
fn a_client_that_asks_while_an_earlier_state_is_read_waits_for_it() {
    let place = Place::new();
    // Long enough to be read while the client asks.
    let state = r#"{"version":1,"guests":[],"left":[],"rooms":[]}"#.to_owned() + &" ".repeat(32 << 20);
    std::fs::write(place.file("state.json"), state).unwrap();
    let child = place.command().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let _daemon = Daemon { place: &place, child };
    let prepare = || Request::Prepare { domain: "web".into(), uuid: "u".into(), pages: Vec::new(), ordinary: None };
    let mut answer = None;
    eventually("the daemon listens", || {
        answer = Some(ask(&place.socket(), prepare()));
        !matches!(answer, Some(Err(ClientError::NoDaemon { .. })))
    });
    assert!(matches!(answer, Some(Ok(Answer::Done))), "{answer:?}");
}

#[test]
fn a_real_guest_is_still_managed_with_its_settings_after_the_daemon_was_killed() {
    if !has_kvm() || !is_there(Need::Qemu, has_qemu()) {
        return;
    }
    let command_line = "pattern bytes=32M seconds=600";
    let setup = QemuSetup::new("held", mib(128), QemuRam::AnonymousOnBasePages, command_line);
    let mut guest = QemuGuest::start(&setup).unwrap();
    guest.check_all_words();
    let place = Place::new();

    let daemon = place.start();
    let settings = Settings { policy: Some("greedy".into()), ..Settings::default() };
    daemon.ask(Request::Attach { target: Target::Pid(guest.pid()), settings });
    eventually("its memory is huge", || daemon.managed()[0].backing.unwrap().huge_2m >= mib(32).get());
    let copied = |daemon: &Daemon<'_>| daemon.managed()[0].work.as_ref().map_or(0, |work| work.copied);
    let mut before = 0;
    eventually("its counters are saved", || {
        before = copied(&daemon); // it may copy more
        let state = std::fs::read_to_string(place.file("state.json")).unwrap_or_default();
        state.contains(&format!("\"copied\":{before}"))
    });
    assert!(before >= mib(32).get(), "{before}");
    daemon.end(Signal::SIGKILL);

    let daemon = place.start();
    eventually("it is managed again", || daemon.managed().len() == 1);
    let view = daemon.managed().remove(0);
    assert_eq!((view.name.as_str(), view.policy.as_deref(), view.pid), ("held", Some("greedy"), guest.pid()));
    assert!(copied(&daemon) >= before);
    assert!(daemon.end(Signal::SIGTERM).success());
    guest.check_all_words();
}

pub fn has_qemu() -> Result<(), String> {
    let version = Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status();
    version.map(|_| ()).map_err(|error| error.to_string())
}
