//! `wideleaf list`, `info`, `explain`, `set`, `attach`, `detach`, `reload` and `top` with a fake daemon in this test.

use std::fs::File;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use crate::host;
use crate::program::new_scratch;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::signal::Signal;
use nix::sys::termios::{LocalFlags, tcgetattr};
use serde_json::{Value, json};
use wideleaf_control::protocol::{Answer, Envelope, Reply, Request, Settings, Target, VERSION};
use wideleaf_testing::scratch::Running;
use wideleaf_testing::scratch::Scratch;

/// A daemon in a test's folder: it records its requests and ends with the test.
struct FakeDaemon {
    socket: PathBuf,
    asked: Arc<Mutex<Vec<Request>>>,
    thread: Option<JoinHandle<()>>,
}

/// Line that ends the daemon's thread.
const STOP: &[u8] = b"stop\n";

impl FakeDaemon {
    /// Starts a daemon with the made-up host.
    fn start(scratch: &Scratch) -> FakeDaemon {
        FakeDaemon::that_says(scratch, |request| serde_json::to_string(&reply_to(request)).unwrap() + "\n")
    }

    fn that_says(scratch: &Scratch, reply: impl Fn(&Request) -> String + Send + 'static) -> FakeDaemon {
        let socket = scratch.path("control.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let asked = Arc::default();
        let log = Arc::clone(&asked);
        let thread = Some(thread::spawn(move || serve(&listener, &log, reply)));
        FakeDaemon { socket, asked, thread }
    }

    fn socket(&self) -> &str {
        self.socket.to_str().unwrap()
    }

    /// The last request to the daemon.
    fn last_asked(&self) -> Request {
        self.asked.lock().last().cloned().unwrap()
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        UnixStream::connect(&self.socket).unwrap().write_all(STOP).unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn serve(listener: &UnixListener, asked: &Mutex<Vec<Request>>, reply: impl Fn(&Request) -> String) {
    for stream in listener.incoming() {
        let stream = stream.unwrap();
        let mut line = Vec::new();
        BufReader::new(&stream).read_until(b'\n', &mut line).unwrap();
        if line == STOP {
            return;
        }
        // A client that ended between connecting and sending.
        if line.is_empty() {
            continue;
        }
        let envelope: Envelope = serde_json::from_slice(&line).unwrap();
        assert_eq!(envelope.version, VERSION);
        asked.lock().push(envelope.request.clone());
        // A client may close before it has read a long reply.
        let _ = (&stream).write_all(reply(&envelope.request).as_bytes());
    }
}

fn reply_to(request: &Request) -> Reply {
    let about = |name: &str, answer: Answer| match name {
        "web" | "4711" => Reply::Ok(Box::new(answer)),
        other => Reply::Error(format!("there is no VM {other:?}: there are web, mail, gups")),
    };
    match request {
        Request::Daemon => Reply::Ok(Box::new(Answer::Daemon(host::daemon()))),
        Request::List => Reply::Ok(Box::new(Answer::Vms(host::vms()))),
        Request::Info { vm } | Request::Set { vm, .. } => about(vm, Answer::Vm(Box::new(host::web()))),
        Request::Explain { vm } => about(vm, Answer::Explanation(host::explanation())),
        Request::Windows { vm } => about(vm, Answer::Windows(host::windows())),
        Request::Attach { .. } => Reply::Ok(Box::new(Answer::Vm(Box::new(host::web())))),
        Request::Detach { vm } => about(vm, Answer::Done),
        Request::Reload => Reply::Error("wideleafd.toml, line 3: there is no key \"colour\"".into()),
        other => Reply::Error(format!("no operator asks {other:?}")),
    }
}

/// Standard output of a command that has to succeed.
fn output(scratch: &Scratch, daemon: &FakeDaemon, arguments: &[&str]) -> String {
    let arguments = [arguments, &["--socket", daemon.socket()]].concat();
    let output = scratch.wideleaf(&arguments).assert().success().stderr("");
    String::from_utf8(output.get_output().stdout.clone()).unwrap()
}

/// The command is refused with one line that contains each of `words`.
fn refuses(scratch: &Scratch, daemon: &FakeDaemon, arguments: &[&str], code: i32, words: &[&str]) {
    scratch.refuses(&[arguments, &["--socket", daemon.socket()]].concat(), code, words);
}

fn has_all(text: &str, words: &[&str]) {
    words.iter().for_each(|word| assert!(text.contains(word), "no {word:?} in\n{text}"));
}

#[test]
fn list_has_a_line_per_vm_and_names_its_source() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let text = output(&scratch, &daemon, &["list"]);
    has_all(
        &text,
        &["wideleafd at ", "wideleafd 0.1.0 (process 811), copies up to 2 GiB/s with up to 50.0 % of a core"],
    );
    let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap();
    has_all(line("│ web "), &["4711", "qemu", "coverage", "256 MiB", "192 MiB", "66.7 %", "95% MISSED"]);
    // 64 pages of 2 MiB, and 16384 of 4 KiB, half as much memory.
    has_all(line("│ web "), &["128 MiB", "64 MiB", "66.7 %"]);
    has_all(line("│ mail "), &["4812", "unmanaged", "512 MiB", "0.0 %"]);
    has_all(line("│ gups "), &["wideleaf", "giant, left alone: it is being saved", "4 GiB", "100.0 %", "50% met"]);
    has_all(&text, &["  mail: KVM's mapping sizes are missing: they need root"]);
    has_all(&text, &["\n  scanned a minute ago or before: web 72 s, gups 72 s\n"]);
}

#[test]
fn list_in_json_is_the_reply_of_the_daemon() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let report: Value = serde_json::from_str(&output(&scratch, &daemon, &["list", "--format=json"])).unwrap();
    assert_eq!(report["vms"], serde_json::to_value(host::vms()).unwrap());
    assert_eq!(report["daemon"], serde_json::to_value(host::daemon()).unwrap());
    assert_eq!(report["source"], json!(format!("wideleafd at {}", daemon.socket())));
}

#[test]
fn info_has_everything_about_one_vm() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let text = output(&scratch, &daemon, &["info", "web"]);
    has_all(&text, &["web", "0f4a6b53-9ad5-4b9e-8f2d-3c1d5a8f2b10", "4711, qemu", "95% MISSED", "256 MiB"]);
    has_all(&text, &["192 MiB, 66.7 % of it in large pages", "16384 of 4 KiB, 64 of 2 MiB, 0 of 1 GiB"]);
    has_all(
        &text,
        &["pc.ram", "0x7f0000000000", "anonymous", "collapse", "24 MiB", "01:01:01 0x000200000 collapse done"],
    );
    let json: Value = serde_json::from_str(&output(&scratch, &daemon, &["info", "4711", "--format=json"])).unwrap();
    assert_eq!(json, serde_json::to_value(host::web()).unwrap());
}

#[test]
fn info_counts_the_windows_by_reason_and_writes_a_page_that_is_complete_in_itself() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let text = output(&scratch, &daemon, &["info", "web"]);
    has_all(&text, &["windows          64 of 128 large, 32 never_touched, 32 holes"]);
    std::fs::write(scratch.path("web.html"), "an earlier page").unwrap();
    assert_eq!(output(&scratch, &daemon, &["info", "web", "--html=web.html"]), "");
    let page = std::fs::read_to_string(scratch.path("web.html")).unwrap();
    has_all(&page, &["<!DOCTYPE html>", "<h1>web</h1>", "95% MISSED", "never_touched", "132 windows of 2 MiB"]);
    has_all(&page, &["<b class=\"ks\">s</b>large, mapped in 4 KiB", "</html>\n"]);
    assert_eq!(output(&scratch, &daemon, &["info", "web", "--html=-"]), page);
    refuses(&scratch, &daemon, &["info", "db", "--html=db.html"], 2, &["there is no VM \"db\""]);
    refuses(
        &scratch,
        &daemon,
        &["info", "web", "--html=no/web.html"],
        7,
        &["cannot write --html", "there is no folder"],
    );
    scratch.wideleaf(&["info", "web", "--html=a.html", "--format=json"]).assert().code(2);
    assert!(!scratch.names().iter().any(|name| name.contains("db.html")), "{:?}", scratch.names());
}

#[test]
fn a_reader_of_the_page_that_has_gone_away_is_no_error() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(scratch.program());
    command.args(["info", "web", "--html=-", "--socket", daemon.socket()]);
    let info = Running(command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(info.end(), (Some(0), String::new()));
}

#[test]
fn explain_has_each_reason_with_its_count_and_its_remedy() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let text = output(&scratch, &daemon, &["explain", "web"]);
    has_all(
        &text,
        &[
            "web: 64 of 128 windows are in large pages (50.0 %), scanned 72 s ago",
            "32",
            "never_touched",
            "nothing to promote",
        ],
    );
    has_all(&text, &["holes", "`collapse-holes` would fill them", "the budget said no 3 times"]);
}

#[test]
fn set_sends_only_the_named_settings() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let text = output(&scratch, &daemon, &["set", "web", "policy=coverage", "guarantee=95%"]);
    assert_eq!(text, "web (process 4711): coverage, guarantee 95% MISSED\n");
    let changes = Settings { policy: Some("coverage".into()), guarantee: Some("95%".into()), ..Settings::default() };
    assert_eq!(daemon.last_asked(), Request::Set { vm: "web".into(), changes });
}

#[test]
fn attach_takes_a_process_a_domain_or_a_qmp_monitor() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let asked = |arguments: &[&str]| {
        has_all(&output(&scratch, &daemon, arguments), &["web (process 4711)"]);
        daemon.last_asked()
    };
    let request = |target, settings| Request::Attach { target, settings };
    let none = Settings::default();
    assert_eq!(asked(&["attach", "4711"]), request(Target::Pid(4711), none.clone()));
    assert_eq!(asked(&["attach", "web"]), request(Target::Domain("web".into()), none.clone()));
    let qmp = PathBuf::from("/run/web.qmp");
    let settings = Settings {
        policy: Some("off".into()),
        guarantee: Some("bestEffort".into()),
        out_of_reach: Some("10%".into()),
        collapse_shared: Some(true),
        qmp: Some(qmp.clone()),
        ..none.clone()
    };
    let arguments = ["--qmp=/run/web.qmp", "--policy=off", "--guarantee=best-effort", "--collapse-shared"];
    assert_eq!(
        asked(&[&["attach", "--out-of-reach=10%"], &arguments[..]].concat()),
        request(Target::Qmp(qmp.clone()), settings)
    );
    let settings = Settings { qmp: Some(qmp), ..none };
    assert_eq!(asked(&["attach", "4711", "--qmp=/run/web.qmp"]), request(Target::Pid(4711), settings));
}

#[test]
fn detach_says_that_the_pages_stay() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let text = output(&scratch, &daemon, &["detach", "web"]);
    assert_eq!(text, "web is no longer managed; its pages stay as they are\n");
    assert_eq!(daemon.last_asked(), Request::Detach { vm: "web".into() });
}

#[test]
fn top_without_a_terminal_prints_a_screen_as_text() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let list = output(&scratch, &daemon, &["top"]);
    has_all(&list, &["wideleaf top: 3 VMs, 3 GiB free", "web                coverage", "██████▒▒▒···  66.7 %!"]);
    assert!(!list.contains("0x004000000"), "no map was asked for:\n{list}");
    let map = output(&scratch, &daemon, &["top", "web", "--once"]);
    has_all(&map, &["0x000000000 s9s9s9s92929", "0x100000000 1?1?1?1?", "32 windows: never_touched"]);
}

#[test]
fn a_refusal_of_the_daemon_is_passed_on_unchanged() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    for command in
        [&["info", "db"][..], &["explain", "db"], &["set", "db", "policy=off"], &["detach", "db"], &["top", "db"]]
    {
        refuses(&scratch, &daemon, command, 2, &["wideleafd: there is no VM \"db\": there are web, mail, gups"]);
    }
    refuses(&scratch, &daemon, &["reload"], 2, &["wideleafd.toml, line 3"]);
}

#[test]
fn a_daemon_of_another_version_is_named_in_one_line() {
    let refusal = r#"{"error":"wideleafd 9.0 speaks version 9 of the protocol, not 1"}"#.to_owned() + "\n";
    for (reply, words) in [
        (refusal, "speaks version 9"),
        ("{\"ok\":{\"novelty\":[]}}\n".to_owned(), "of one version"),
        ("HTTP/1.1 400 Bad Request\r\n\r\n".to_owned(), "of one version"),
        ("{\"ok\":\"done\"}\n".to_owned(), "answered another question"),
        ("{\"ok\":".to_owned(), "closed the connection after 6 bytes"),
        ("x".repeat(9 << 20), "longer than 8388608 bytes"),
    ] {
        let scratch = new_scratch();
        let daemon = FakeDaemon::that_says(&scratch, move |_| reply.clone());
        let code = if words == "speaks version 9" { 2 } else { 4 };
        refuses(&scratch, &daemon, &["list"], code, &[words]);
    }
}

#[test]
fn without_a_daemon_a_change_says_how_to_start_one() {
    let scratch = new_scratch();
    for command in [&["set", "web", "policy=off"][..], &["attach", "web"], &["detach", "web"], &["reload"], &["list"]] {
        let command = [command, &["--socket=none.sock"]].concat();
        scratch.refuses(&command, 4, &["no wideleafd listens at none.sock", "start it with", "--socket"]);
    }
}

#[test]
fn a_path_that_is_not_a_socket_is_named() {
    let scratch = new_scratch();
    let file = scratch.file("file", b"");
    scratch.refuses(&["list", "--socket", &file], 4, &["no wideleafd listens at"]);
}

#[test]
fn invalid_arguments_are_refused_without_a_daemon() {
    let scratch = new_scratch();
    for (arguments, words) in [
        (&["set", "web"][..], "<KEY=VALUE>"),
        (&["set", "web", "colour=red"], "unknown setting colour="),
        (&["set", "web", "policy=nope"], "never, prealloc"),
        (&["attach"], "<PID|DOMAIN>"),
        (&["attach", "web", "--policy=nope"], "never, prealloc"),
        (&["attach", "web", "--guarantee=most"], "or a share of memory"),
        (&["attach", "web", "--out-of-reach=0%"], "from 1 to 100 and a %"),
        (&["set", "web", "out-of-reach=30"], "from 1 to 100 and a %"),
        (&["top", "--interval=1ms"], "shorter than 100ms"),
        (&["info"], "<VM>"),
    ] {
        let wrong = scratch.wideleaf(arguments).assert().code(2).stdout("");
        has_all(&String::from_utf8_lossy(&wrong.get_output().stderr), &[words]);
    }
}

#[test]
fn no_control_character_of_a_vm_reaches_the_terminal() {
    let scratch = new_scratch();
    let mut evil = host::web();
    evil.name = "\u{1b}[2Jevil\n".into();
    evil.notes = vec!["\u{7}ring".into()];
    let reply = move |request: &Request| {
        let answer = match request {
            Request::List => Answer::Vms(vec![evil.clone()]),
            Request::Info { .. } => Answer::Vm(Box::new(evil.clone())),
            _ => Answer::Daemon(host::daemon()),
        };
        serde_json::to_string(&Reply::Ok(Box::new(answer))).unwrap() + "\n"
    };
    let daemon = FakeDaemon::that_says(&scratch, reply);
    for command in [&["list"][..], &["info", "evil"], &["top"]] {
        let text = output(&scratch, &daemon, command);
        assert!(text.contains("evil") && !text.contains(['\u{1b}', '\u{7}']), "{command:?}: {text:?}");
    }
}

/// A terminal of 80 by 24 with `wideleaf top` in it. The test types its keys and reads its output.
struct Terminal {
    top: Running,
    ours: File,
    theirs: OwnedFd,
    shown: String,
}

impl Terminal {
    fn start(scratch: &Scratch, daemon: &FakeDaemon) -> Terminal {
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave: theirs } = openpty(&size, None).unwrap();
        fcntl(&master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        let mut command = Command::new(scratch.program());
        command.args(["top", "--interval=100ms", "--socket", daemon.socket()]).env("TERM", "xterm");
        command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(Stdio::piped());
        let top = Running(command.spawn().unwrap());
        Terminal { top, ours: master.into(), theirs, shown: String::new() }
    }

    fn read(&mut self) {
        let mut bytes = [0; 4096];
        // The read returns an error if there is no new output.
        while let Ok(length @ 1..) = self.ours.read(&mut bytes) {
            self.shown.push_str(&String::from_utf8_lossy(&bytes[..length]));
        }
    }

    /// Waits for a text. Only changes of the screen are written, so the blanks between two words may be missing.
    fn wait_for(&mut self, text: &str) {
        while !self.shown.contains(text) {
            self.read();
            assert_eq!(self.top.0.try_wait().unwrap(), None, "it ended before {text:?}: {}", self.shown);
            thread::yield_now();
        }
    }

    fn type_in(&mut self, keys: &[u8]) {
        self.ours.write_all(keys).unwrap();
    }
}

#[test]
fn top_restores_the_terminal_however_it_ends() {
    type End = fn(&mut Terminal);
    let ends: [(End, i32); 4] = [
        (|terminal| terminal.type_in(b"q"), 0),
        (|terminal| terminal.type_in(b"\x03"), 130),
        (|terminal| terminal.top.signal(Signal::SIGTERM), 130),
        (|terminal| terminal.top.signal(Signal::SIGINT), 130),
    ];
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    for (end, code) in ends {
        let mut terminal = Terminal::start(&scratch, &daemon);
        terminal.wait_for("unmanaged");
        assert!(!tcgetattr(&terminal.theirs).unwrap().local_flags.contains(LocalFlags::ICANON), "keys come at once");
        end(&mut terminal);
        while terminal.top.0.try_wait().unwrap().is_none() {
            terminal.read();
            thread::yield_now();
        }
        terminal.read();
        let flags = tcgetattr(&terminal.theirs).unwrap().local_flags;
        assert!(flags.contains(LocalFlags::ICANON | LocalFlags::ECHO), "{flags:?}");
        assert!(terminal.shown.contains("\x1b[?1049l"), "the screen before is shown again");
        assert_eq!(terminal.top.end().0, Some(code));
    }
}

#[test]
fn a_policy_chosen_in_top_reaches_the_daemon() {
    let scratch = new_scratch();
    let daemon = FakeDaemon::start(&scratch);
    let mut terminal = Terminal::start(&scratch, &daemon);
    terminal.wait_for("unmanaged");
    terminal.type_in(b"p");
    terminal.wait_for("utilization");
    terminal.type_in(b"\x1b[B\r");
    terminal.wait_for("MISSED");
    let changes = Settings { policy: Some("aligned".into()), ..Settings::default() };
    assert!(daemon.asked.lock().contains(&Request::Set { vm: "4711".into(), changes }));
}

#[test]
fn no_daemon_and_another_socket_are_mutually_exclusive() {
    let scratch = new_scratch();
    let output = scratch.wideleaf(&["list", "--no-daemon", "--format", "json"]).assert().success().stderr("");
    let report: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(report["daemon"], Value::Null);
    assert!(report["source"].as_str().unwrap().starts_with("no daemon was asked: "), "{report}");
    let both = scratch.wideleaf(&["list", "--no-daemon", "--socket", "s"]).assert().code(2);
    has_all(&String::from_utf8_lossy(&both.get_output().stderr), &["--no-daemon", "cannot be used with", "--socket"]);
}

/// Script: a private `/run` with a socket that only root may connect to, and `wideleaf` in it as another user.
const AS_ANOTHER_USER: &str = r#"
mount -t tmpfs -o mode=755 none /run && mkdir /run/wideleaf && cp "$0" /run/wideleaf/program
python3 -c 'import socket, os
os.umask(0o117)
socket.socket(socket.AF_UNIX).bind("/run/wideleaf/control.sock")' || exit 99
exec setpriv --reuid 65534 --regid 65534 --clear-groups /run/wideleaf/program "$@"
"#;

#[test]
fn a_user_without_permission_to_connect_gets_proc_data_and_a_line_that_says_so() {
    let scratch = new_scratch();
    let as_another_user = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", AS_ANOTHER_USER]).arg(scratch.program()).args(arguments);
        command.output().unwrap()
    };
    let probe = Command::new("unshare").args(["--mount", "sh", "-c", "command -v python3 setpriv"]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        println!("skipped: needs root, unshare, setpriv and python3");
        return;
    }
    let output = as_another_user(&["list", "--format", "json"]);
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(
        stderr.starts_with("wideleaf: cannot ask a wideleafd at /run/wideleaf/control.sock: permission denied; "),
        "{stderr}"
    );
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert!(report["source"].as_str().unwrap().starts_with("cannot ask a wideleafd at "), "{report}");
    let quiet = as_another_user(&["list", "--no-daemon"]);
    assert_eq!((quiet.status.code(), quiet.stderr.is_empty()), (Some(0), true));
    let change = as_another_user(&["detach", "web"]);
    let text = String::from_utf8_lossy(&change.stderr);
    assert!(change.status.code() == Some(4) && text.contains("no permission to connect"), "{text}");
}
