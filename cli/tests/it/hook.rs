//! The hook as libvirt runs it, and its script, without a libvirt. The tests in guest-tests have one.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use crate::program::new_scratch;
use wideleaf::hook::script::{OwnerRules, text_for};
use wideleaf_control::protocol::{Answer, Envelope, OrdinaryMemory, PoolRequest, Reply, Request};
use wideleaf_testing::scratch::Scratch;

/// Domain with 64 pages of 2 MiB and a guarantee.
const LIVE: &str = include_str!("../domains/live.xml");
const UUID: &str = "8d2f4c5e-0f4b-4c3a-9d38-1f0f5a7c2b11";

/// Whether a hook can be installed from the folder of this program.
fn is_trusted(scratch: &Scratch) -> bool {
    let trusted = OwnerRules::root_alone().check(&scratch.program());
    if let Err(why) = &trusted {
        println!("skipped: {why}");
    }
    trusted.is_ok()
}

/// A host with libvirt's folder, and the arguments of a command for it.
fn host() -> (Scratch, String, PathBuf) {
    let scratch = new_scratch();
    let root = scratch.path("root");
    fs::create_dir_all(root.join("etc/libvirt")).unwrap();
    let script = root.join("etc/libvirt/hooks/qemu.d/wideleaf");
    (scratch, root.into_os_string().into_string().unwrap(), script)
}

fn says(scratch: &Scratch, arguments: &[&str]) -> String {
    ends(scratch, arguments, 0)
}

/// Output of a command that ends with this code.
fn ends(scratch: &Scratch, arguments: &[&str], code: i32) -> String {
    let output = scratch.wideleaf(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_script_is_written_once_shown_as_installed_and_removed() {
    let (scratch, root, script) = host();
    if !is_trusted(&scratch) {
        return;
    }
    assert!(ends(&scratch, &["hook", "status", "--root", &root], 10).contains("not installed"));
    assert!(says(&scratch, &["hook", "install", "--root", &root]).starts_with("wrote "));
    assert!(says(&scratch, &["hook", "install", "--root", &root]).contains("is already installed"));
    assert_eq!(fs::metadata(&script).unwrap().permissions().mode() & 0o777, 0o755);
    let status = says(&scratch, &["hook", "status", "--root", &root]);
    assert!(status.contains("wideleaf: installed\n") && status.contains("libvirtd  not running"), "{status}");
    let json = says(&scratch, &["hook", "status", "--root", &root, "--format", "json"]);
    assert!(json.contains(r#""script": "current""#) && json.contains(r#""libvirtd": "no_daemon""#), "{json}");
    let siblings = fs::read_dir(script.parent().unwrap()).unwrap().count();
    assert_eq!(siblings, 1, "libvirt runs whatever is left there");
    assert!(says(&scratch, &["hook", "uninstall", "--root", &root]).starts_with("removed "));
    assert!(!script.exists());
    assert!(says(&scratch, &["hook", "uninstall", "--root", &root]).starts_with("nothing to remove: there is no "));
}

#[test]
fn a_dry_run_writes_and_removes_nothing() {
    let (scratch, root, script) = host();
    if !is_trusted(&scratch) {
        return;
    }
    assert!(says(&scratch, &["hook", "install", "--dry-run", "--root", &root]).contains("#!/bin/sh\n"));
    assert!(!script.parent().unwrap().exists());
    says(&scratch, &["hook", "install", "--root", &root]);
    assert!(says(&scratch, &["hook", "uninstall", "--dry-run", "--root", &root]).starts_with("would remove "));
    assert!(script.exists());
}

#[test]
fn a_script_that_libvirt_would_skip_or_that_is_old_is_renewed() {
    let (scratch, root, script) = host();
    if !is_trusted(&scratch) {
        return;
    }
    says(&scratch, &["hook", "install", "--root", &root]);
    fs::set_permissions(&script, Permissions::from_mode(0o644)).unwrap();
    assert!(ends(&scratch, &["hook", "status", "--root", &root], 10).contains("not executable"));
    says(&scratch, &["hook", "install", "--root", &root]);
    assert!(says(&scratch, &["hook", "status", "--root", &root]).contains(": installed\n"));
    let other = ends(&scratch, &["hook", "status", "--socket", "/elsewhere", "--root", &root], 11);
    assert!(other.contains("for another program or socket"), "{other}");
}

#[test]
fn a_relative_socket_is_written_from_the_root() {
    let (scratch, root, script) = host();
    if !is_trusted(&scratch) {
        return;
    }
    says(&scratch, &["hook", "install", "--socket", "run/daemon.sock", "--root", &root]);
    let folder = fs::canonicalize(scratch.path(".")).unwrap();
    let text = fs::read_to_string(&script).unwrap();
    assert!(text.contains(&format!("--socket '{}/run/daemon.sock'", folder.display())), "{text}");
    assert!(
        says(&scratch, &["hook", "status", "--socket", "run/daemon.sock", "--root", &root]).contains(": installed\n")
    );
}

#[test]
fn an_upgrade_keeps_the_socket_of_the_installed_script() {
    let (scratch, root, script) = host();
    if !is_trusted(&scratch) {
        return;
    }
    let install = ["hook", "install", "--root", &root];
    says(&scratch, &[&install[..], &["--socket", "/elsewhere"]].concat());
    let first = fs::read_to_string(&script).unwrap();
    // As of an earlier version, for the same program.
    fs::write(&script, first.replace(" >/dev/null", "")).unwrap();
    ends(&scratch, &["hook", "status", "--root", &root], 11);
    let said = says(&scratch, &install);
    assert!(said.starts_with("wrote ") && said.contains("it keeps its daemon's socket /elsewhere"), "{said}");
    assert_eq!(fs::read_to_string(&script).unwrap(), first);
    assert!(says(&scratch, &["hook", "status", "--root", &root]).contains(": installed\n"));
    assert!(says(&scratch, &install).contains("is already installed; it keeps"));
    let default = "/run/wideleaf/control.sock";
    ends(&scratch, &["hook", "status", "--socket", default, "--root", &root], 11);
    says(&scratch, &[&install[..], &["--socket", default]].concat());
    assert!(!fs::read_to_string(&script).unwrap().contains("--socket"), "a requested socket counts more");
    // A socket in a form that is not understood is not replaced by the default one.
    let edited = first.replace("--socket '/elsewhere'", "--socket=/elsewhere");
    fs::write(&script, &edited).unwrap();
    ends(&scratch, &["hook", "status", "--root", &root], 11);
    scratch.refuses(&install, 4, &["its option --socket has another form", "--socket PATH"]);
    assert_eq!(fs::read_to_string(&script).unwrap(), edited);
}

#[test]
fn renewing_the_script_in_an_upgrade_does_not_ask_for_a_restart() {
    let (scratch, root, script) = host();
    if !is_trusted(&scratch) {
        return;
    }
    says(&scratch, &["hook", "install", "--root", &root]);
    // libvirtd started 100 s after boot, which was 400 s ago, and the script was written a minute before that.
    let process = scratch.path("root/proc/7");
    fs::create_dir_all(&process).unwrap();
    fs::write(scratch.path("root/proc/uptime"), "500.00 900.00\n").unwrap();
    fs::write(process.join("stat"), format!("7 (libvirtd) S 1 {}10000 55\n", "0 ".repeat(17))).unwrap();
    let installed = SystemTime::now() - Duration::from_secs(460);
    fs::File::options().write(true).open(&script).unwrap().set_modified(installed).unwrap();
    assert!(says(&scratch, &["hook", "status", "--root", &root]).contains("runs it"));
    let renew = ["hook", "install", "--socket", "/elsewhere", "--root", &root];
    assert!(says(&scratch, &renew).starts_with("wrote "));
    let status = says(&scratch, &["hook", "status", "--socket", "/elsewhere", "--root", &root]);
    assert!(status.contains(": installed\n") && status.contains("runs it"), "{status}");
    // A script that was removed in between counts as new.
    says(&scratch, &["hook", "uninstall", "--root", &root]);
    says(&scratch, &renew);
    assert!(ends(&scratch, &["hook", "status", "--socket", "/elsewhere", "--root", &root], 12).contains("restart"));
}

#[test]
fn a_script_of_another_author_is_neither_overwritten_nor_removed() {
    let (scratch, root, script) = host();
    fs::create_dir_all(script.parent().unwrap()).unwrap();
    fs::write(&script, "#!/bin/sh\necho mine\n").unwrap();
    for command in ["install", "uninstall"] {
        scratch.refuses(&["hook", command, "--root", &root], 4, &["qemu.d/wideleaf: it is a foreign file"]);
    }
    assert_eq!(fs::read_to_string(&script).unwrap(), "#!/bin/sh\necho mine\n");
    assert!(ends(&scratch, &["hook", "status", "--root", &root], 10).contains("a foreign file is there"));
}

#[test]
fn a_host_without_libvirt_gets_no_script() {
    let scratch = new_scratch();
    let root = scratch.path("").into_os_string().into_string().unwrap();
    scratch.refuses(&["hook", "install", "--root", &root], 4, &["is libvirt installed?"]);
}

/// A daemon that answers one request and returns it.
fn daemon(socket: &Path, reply: Reply) -> JoinHandle<Request> {
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        writeln!(&stream, "{}", serde_json::to_string(&reply).unwrap()).unwrap();
        serde_json::from_str::<Envelope>(&line).unwrap().request
    })
}

fn done() -> Reply {
    Reply::Ok(Box::new(Answer::Done))
}

/// A script for the daemon at `socket`, as it would be installed.
fn script(scratch: &Scratch, socket: &Path) -> PathBuf {
    program_of(scratch, "wideleaf", &text_for(&scratch.program(), socket).unwrap())
}

fn program_of(scratch: &Scratch, name: &str, text: &str) -> PathBuf {
    let written = scratch.path("text");
    fs::write(&written, text).unwrap();
    copy_program(&written, &scratch.path(name))
}

/// Copies a program in another process. If this process wrote the file, a child that another test's
/// thread has just forked could have it open for writing. Starting the program would then fail with "Text
/// file busy" (execve(2), ETXTBSY).
fn copy_program(from: &Path, to: &Path) -> PathBuf {
    assert!(Command::new("install").args(["-m", "755"]).args([from, to]).status().unwrap().success());
    to.to_owned()
}

#[test]
fn a_hook_is_not_installed_for_a_program_that_other_users_can_replace() {
    let (scratch, root, script) = host();
    let open = scratch.path("open");
    fs::create_dir(&open).unwrap();
    let program = open.join("wideleaf");
    copy_program(&scratch.program(), &program);
    fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
    for arguments in [&["hook", "install", "--root", &root][..], &["hook", "install", "--dry-run", "--root", &root]] {
        let output = Command::new(&program).args(arguments).output().unwrap();
        let text = stderr(&output);
        assert_eq!((output.status.code(), text.lines().count()), (Some(4), 1), "{text}");
        assert!(
            text.starts_with("wideleaf: cannot install the hook: libvirtd would run ")
                && text.contains(" can be written by "),
            "{text}"
        );
    }
    assert!(!script.exists());
}

/// Runs the script as libvirt does: with almost no environment, in the root folder, with the XML on standard input.
fn call(script: &Path, operation: &str, xml: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let stdin = folder.path().join("domain.xml");
    fs::write(&stdin, xml).unwrap();
    let mut command = Command::new(script);
    // A domain's name may begin like an option.
    command.args(["-t1", operation, "begin", "-"]).current_dir("/").env_clear().env("PATH", "/usr/bin:/bin");
    let output = command.stdin(fs::File::open(stdin).unwrap()).output().unwrap();
    assert!(output.stdout.is_empty(), "{operation}: what is on standard output can replace a domain's XML");
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_shell_accepts_the_script() {
    let scratch = new_scratch();
    let script = script(&scratch, Path::new("/a 'socket"));
    assert!(Command::new("sh").arg("-n").arg(&script).status().unwrap().success());
    assert_eq!(call(&script, "release", LIVE).status.code(), Some(0));
}

#[test]
fn prepare_requests_the_pages_of_the_domain_and_waits_for_them() {
    let scratch = new_scratch();
    let socket = scratch.path("control.sock");
    let daemon = daemon(&socket, done());
    let output = call(&script(&scratch, &socket), "prepare", LIVE);
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    let pages = vec![PoolRequest { page_bytes: 2 << 20, pages: 64, node: None, nodes: Vec::new() }];
    let wanted = Request::Prepare { domain: "-t1".into(), uuid: UUID.into(), pages, ordinary: None };
    assert_eq!(daemon.join().unwrap(), wanted);
}

#[test]
fn prepare_sends_the_guarantee_for_ordinary_memory() {
    let scratch = new_scratch();
    let socket = scratch.path("control.sock");
    let daemon = daemon(&socket, done());
    let output = call(&script(&scratch, &socket), "prepare", &LIVE.replace("<hugepages/>", ""));
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    // Guarantee of 95 % of 128 MiB.
    let ordinary = Some(OrdinaryMemory { bytes: 128 << 20, large_bytes: (128 << 20) * 95 / 100 });
    let wanted = Request::Prepare { domain: "-t1".into(), uuid: UUID.into(), pages: Vec::new(), ordinary };
    assert_eq!(daemon.join().unwrap(), wanted);
}

#[test]
fn release_sends_the_domain() {
    let scratch = new_scratch();
    let socket = scratch.path("control.sock");
    let daemon = daemon(&socket, done());
    assert_eq!(call(&script(&scratch, &socket), "release", LIVE).status.code(), Some(0));
    assert_eq!(daemon.join().unwrap(), Request::Release { domain: "-t1".into(), uuid: UUID.into() });
}

#[test]
fn a_guarantee_without_a_daemon_keeps_a_guest_from_starting_and_gives_the_reason() {
    let scratch = new_scratch();
    let output = call(&script(&scratch, &scratch.path("none.sock")), "prepare", LIVE);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.starts_with("wideleaf: cannot give -t1 its guarantee: no wideleafd listens"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn a_refusal_of_the_daemon_stops_a_guest_with_a_guarantee_and_is_only_printed_without() {
    for (guarantee, code) in [("95%", 1), ("guaranteed:95%", 1), ("best-effort", 0), ("bestEffort", 0)] {
        let scratch = new_scratch();
        let socket = scratch.path("control.sock");
        let daemon = daemon(&socket, Reply::Error("the pool is 3 pages short".into()));
        let xml = LIVE.replace("95%", guarantee);
        let output = call(&script(&scratch, &socket), "prepare", &xml);
        assert_eq!(output.status.code(), Some(code), "{guarantee}");
        assert!(stderr(&output).contains("the pool is 3 pages short"), "{}", stderr(&output));
        daemon.join().unwrap();
    }
}

#[test]
fn a_best_effort_guarantee_that_cannot_be_met_is_reported_and_the_guest_starts() {
    let scratch = new_scratch();
    let socket = scratch.path("control.sock");
    let daemon = daemon(&socket, Reply::Error("64 MiB are above host.low_free".into()));
    let xml = LIVE.replace("<hugepages/>", "").replace("95%", "bestEffort:95%");
    let output = call(&script(&scratch, &socket), "prepare", &xml);
    assert_eq!(output.status.code(), Some(0));
    let text = stderr(&output);
    assert!(text.contains("-t1 starts below its guarantee of bestEffort:95%") && text.contains("64 MiB"), "{text}");
    let Request::Prepare { ordinary: Some(ordinary), .. } = daemon.join().unwrap() else { panic!("a prepare") };
    assert_eq!(ordinary.large_bytes, (128 << 20) * 95 / 100);
}

#[test]
fn an_unreadable_guarantee_stops_the_guest() {
    let scratch = new_scratch();
    let output = call(&script(&scratch, &scratch.path("none.sock")), "prepare", &LIVE.replace("95%", "much"));
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("\"much\" is not a guarantee"), "{}", stderr(&output));
}

#[test]
fn only_prepare_can_fail() {
    let scratch = new_scratch();
    let script = script(&scratch, &scratch.path("none.sock"));
    let operations = ["start", "started", "stopped", "release", "reconnect", "restore", "migrate", "attach", ""];
    for operation in operations {
        for xml in [LIVE, "", "<domain", "\0"] {
            assert_eq!(call(&script, operation, xml).status.code(), Some(0), "{operation:?} {xml:.10}");
        }
    }
}

#[test]
fn an_invalid_domain_prepares_nothing_and_starts() {
    let scratch = new_scratch();
    let script = script(&scratch, &scratch.path("none.sock"));
    for xml in ["", "<domain>", "<!DOCTYPE d [<!ENTITY e 'x'>]><domain>&e;</domain>"] {
        let output = call(&script, "prepare", xml);
        assert_eq!(output.status.code(), Some(0), "{xml}");
        let text = stderr(&output);
        assert!(text.starts_with("wideleaf: hook: prepare of -t1: the domain's XML: "), "{text}");
    }
}

#[test]
fn a_mistake_in_the_metadata_keeps_a_guest_from_starting_with_a_suggestion() {
    let scratch = new_scratch();
    let script = script(&scratch, &scratch.path("none.sock"));
    for (right, wrong, why) in [
        ("guarantee=", "garantee=", "unknown attribute garantee: did you mean guarantee? the attributes are policy, "),
        ("pool=\"yes\"", "pool=\"maybe\"", "pool=\"maybe\": write yes or no"),
        ("policy=\"auto\"", "policy=\"at-fault\"", "works only for guests of `wideleaf run`"),
        ("wideleaf:memory xmlns", "wideleaf:memry xmlns", "unknown element <memry>: the only element is <memory>"),
    ] {
        let output = call(&script, "prepare", &LIVE.replace(right, wrong));
        let text = stderr(&output);
        assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{wrong}: {text}");
        assert!(text.starts_with("wideleaf: cannot use the metadata of -t1: ") && text.contains(why), "{text}");
    }
}

/// Runs the hook of a host in a folder of the test, on which the domain t1 is process 4711.
fn call_on(scratch: &Scratch, socket: &Path, operation: &str, xml: &str) -> Output {
    for folder in ["host/dev", "host/run/libvirt/qemu"] {
        fs::create_dir_all(scratch.path(folder)).unwrap();
    }
    fs::write(scratch.path("host/run/libvirt/qemu/t1.pid"), "4711").unwrap();
    let stdin = scratch.path("domain.xml");
    fs::write(&stdin, xml).unwrap();
    let mut command = Command::new(scratch.program());
    command.args(["hook", "run", "--root"]).arg(scratch.path("host")).arg("--socket").arg(socket);
    command.args(["--", "t1", operation, "begin", "-"]).stdin(fs::File::open(stdin).unwrap()).output().unwrap()
}

#[test]
fn a_running_guest_with_a_mistake_in_its_metadata_runs_on_and_the_daemon_learns_of_it() {
    for operation in ["started", "reconnect"] {
        let scratch = new_scratch();
        let socket = scratch.path("control.sock");
        let daemon = daemon(&socket, done());
        let output = call_on(&scratch, &socket, operation, &LIVE.replace("guarantee=", "garantee="));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let Request::Started { pid, settings, mistakes, .. } = daemon.join().unwrap() else { panic!("no Started") };
        assert_eq!((pid, settings.policy.as_deref(), settings.guarantee), (4711, Some("auto"), None));
        assert!(mistakes.len() == 1 && mistakes[0].contains("did you mean guarantee?"), "{mistakes:?}");
    }
}

/// The domain of an OpenStack instance, as Nova writes it.
const INSTANCE: &str = include_str!("../domains/nova.xml");

#[test]
fn the_daemon_learns_the_flavor_of_an_instance_of_nova() {
    for (xml, expected) in [(INSTANCE, Some("db.large")), (LIVE, None)] {
        let scratch = new_scratch();
        let socket = scratch.path("control.sock");
        let daemon = daemon(&socket, done());
        let output = call_on(&scratch, &socket, "started", xml);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let Request::Started { flavor, mistakes, .. } = daemon.join().unwrap() else { panic!("no Started") };
        assert_eq!((flavor.as_deref(), mistakes.len()), (expected, 0));
    }
}

/// Log of that host: all lines sent before the hook ended.
fn log(scratch: &Scratch) -> UnixDatagram {
    fs::create_dir_all(scratch.path("host/dev")).unwrap();
    let log = UnixDatagram::bind(scratch.path("host/dev/log")).unwrap();
    log.set_nonblocking(true).unwrap();
    log
}

#[test]
fn an_error_is_in_the_hosts_log_if_the_daemon_is_not_running() {
    let scratch = new_scratch();
    let log = log(&scratch);
    let xml = LIVE.replace("guarantee=\"95%\"", "");
    let output = call_on(&scratch, &scratch.path("none.sock"), "prepare", &xml);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let mut line = [0; 4096];
    let length = log.recv(&mut line).expect("a line");
    let line = String::from_utf8_lossy(&line[..length]);
    let text = line.strip_prefix("<28>wideleaf[").and_then(|rest| rest.split_once("]: ")).map(|(_, text)| text);
    assert!(text.is_some_and(|text| text.starts_with("hook: prepare of t1: no wideleafd listens at ")), "{line}");
    assert!(log.recv(&mut [0; 16]).is_err(), "one line");
}

#[test]
fn a_refusal_of_the_daemon_is_not_in_the_hosts_log() {
    let scratch = new_scratch();
    let (log, socket) = (log(&scratch), scratch.path("control.sock"));
    let daemon = daemon(&socket, Reply::Error("the pool is 3 pages short".into()));
    let xml = LIVE.replace("guarantee=\"95%\"", "");
    assert_eq!(call_on(&scratch, &socket, "prepare", &xml).status.code(), Some(0));
    daemon.join().unwrap();
    assert!(log.recv(&mut [0; 16]).is_err());
}

#[test]
fn a_domain_without_hugepages_requests_no_reservation() {
    let scratch = new_scratch();
    let xml = LIVE.replace("pool=\"yes\"", "pool=\"no\"").replace("guarantee=\"95%\"", "");
    let output = call(&script(&scratch, &scratch.path("none.sock")), "prepare", &xml);
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "no caller was looked for");
}

#[test]
fn a_daemon_that_never_answers_does_not_delay_a_guest_for_long() {
    let scratch = new_scratch();
    let socket = scratch.path("control.sock");
    let _silent = UnixListener::bind(&socket).unwrap();
    let output = call(&script(&scratch, &socket), "release", LIVE);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("did not answer within"), "{}", stderr(&output));
}

#[test]
fn a_missing_crashing_or_outdated_program_keeps_no_guest_from_starting() {
    let scratch = new_scratch();
    let script = script(&scratch, &scratch.path("none.sock"));
    let text = fs::read_to_string(&script).unwrap();
    let program = scratch.program();
    let crashed = program_of(&scratch, "crashed", "#!/bin/sh\nkill -SEGV $$\n");
    for other in ["/nowhere/wideleaf", "/bin/false", crashed.to_str().unwrap()] {
        let script = program_of(&scratch, "wideleaf", &text.replace(program.to_str().unwrap(), other));
        for operation in ["prepare", "reconnect"] {
            assert_eq!(call(&script, operation, LIVE).status.code(), Some(0), "{other} {operation}");
        }
    }
}
