//! The daemon with guests of `wideleaf run`, both as installed: registered, killed, and registered again. Needs KVM
//! (`WIDELEAF_REQUIRE=kvm` turns a skip into a failure).

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use crate::place::{Daemon, Place, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use wideleaf_control::client::ask;
use wideleaf_control::map::letters;
use wideleaf_control::protocol::{Answer, Request, Settings, Target};
use wideleaf_control::view::{VmView, Vmm, WindowMap, WorkView};
use wideleaf_policies::units::mib;
use wideleaf_testing::has_kvm;
use wideleaf_testing::programs::built;

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| built(&["build", "-p", "wideleaf", "--bin", "wideleaf"], false))
}

/// `wideleaf run` that ends with the test.
struct Run(Child);

impl Run {
    /// A guest that rewrites 32 MiB until it is ended. Its policy waits until the guest has long been registered.
    fn start(program: &Path, more: &[&str]) -> Run {
        let mut command = Command::new(program);
        command.args(["run", "pattern", "--memory=128M", "--cmdline=bytes=32M seconds=600", "--policy=greedy"]);
        command.args(["--policy-delay=3s"]).args(more);
        Run(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn only(daemon: &Daemon<'_>) -> Option<VmView> {
    let mut managed = daemon.managed();
    assert!(managed.len() <= 1, "{managed:?}");
    managed.pop()
}

fn work(daemon: &Daemon<'_>) -> WorkView {
    only(daemon).and_then(|vm| vm.work).unwrap_or_default()
}

#[test]
fn a_run_is_listed_kept_within_the_budget_and_back_after_the_daemon_was_killed() {
    if !has_kvm() {
        return;
    }
    let place = Place::new();
    place.configure("[budget]\ncopy_per_second = \"0\"");
    let daemon = place.start();
    let socket = format!("--daemon={}", place.socket().display());
    let run = Run::start(program(), &[&socket]);
    eventually("it has registered", || only(&daemon).is_some());
    let vm = only(&daemon).unwrap();
    assert_eq!((vm.pid, vm.vmm), (run.0.id(), Vmm::Wideleaf));
    let listed = Command::new(program()).arg("list").arg("--socket").arg(place.socket()).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.contains(&vm.name), "{listed}");

    eventually("its budget says no", || work(&daemon).budget_refusals > 0);
    assert_eq!(work(&daemon).copied, 0);
    place.configure("[budget]\ncopy_per_second = \"1G\"");
    daemon.signal(Signal::SIGHUP);
    eventually("it may copy", || work(&daemon).copied >= mib(32).get());

    daemon.end(Signal::SIGKILL);
    let daemon = place.start();
    eventually("it has registered again", || only(&daemon).is_some());
    assert_eq!(only(&daemon).unwrap().pid, run.0.id());
    assert!(work(&daemon).copied >= mib(32).get(), "its counters are its own process's");
    drop(run);
    eventually("it is forgotten", || only(&daemon).is_none());
}

/// Also without a control socket of its own, and in its sandbox.
#[test]
fn the_windows_of_a_run_are_shown_as_its_own_manager_knows_them_and_from_outside_while_it_hangs() {
    if !has_kvm() {
        return;
    }
    let place = Place::new();
    let daemon = place.start();
    let socket = format!("--daemon={}", place.socket().display());
    let run = Run::start(program(), &[&socket]);
    eventually("it has registered", || only(&daemon).is_some());
    let name = || run.0.id().to_string();
    let windows = || match daemon.ask(Request::Windows { vm: name() }) {
        Answer::Windows(map) => map,
        other => panic!("{other:?}"),
    };
    let is_from_outside = |map: &WindowMap| map.notes.iter().any(|note| note.contains("only a manager measures them"));
    // Its manager begins after the delay of its policy.
    eventually("its manager has told", || !is_from_outside(&windows()));
    let large = |map: &WindowMap| map.ranges.iter().map(|range| range.backing.matches('2').count()).sum::<usize>();
    eventually("its memory is large", || large(&windows()) >= 16);
    let map = windows();
    assert_eq!(map.windows(), 64);
    let states: String = map.ranges.iter().flat_map(|range| letters(&range.state, range.windows())).collect();
    assert!(states.contains('l') && states.contains('e') && !states.contains('?'), "{map:?}");
    assert!(map.notes.iter().any(|note| note.starts_with("second level: ")), "{:?}", map.notes);
    let Answer::Explanation(explanation) = daemon.ask(Request::Explain { vm: name() }) else { panic!("no answer") };
    let of_reasons = explanation.reasons.iter().map(|reason| reason.windows).sum::<u64>();
    assert_eq!((explanation.windows, explanation.huge.unwrap() + of_reasons), (Some(64), 64), "{explanation:?}");
    assert!(explanation.reasons.iter().all(|reason| reason.name != "manages_itself"), "{explanation:?}");

    let pid = Pid::from_raw(run.0.id() as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    eventually("it is read from outside", || is_from_outside(&windows()));
    assert_eq!(windows().windows(), 64);
    kill(pid, Signal::SIGCONT).unwrap();
    eventually("its own manager tells again", || !is_from_outside(&windows()));
}

#[test]
fn a_run_under_another_program_name_is_left_to_its_own_manager() {
    if !has_kvm() {
        return;
    }
    let place = Place::new();
    let renamed = place.file("other-vmm");
    // Another process copies it: a child of another test may hold a file that this process has open
    // for writing (ETXTBSY).
    assert!(Command::new("cp").args([program(), &*renamed]).status().unwrap().success());
    let daemon = place.start();
    let run = Run::start(&renamed, &["--no-daemon"]);
    let attach = || {
        let target = Target::Pid(run.0.id());
        ask(&place.socket(), Request::Attach { target, settings: Settings::default() })
            .map_err(|error| error.to_string())
    };
    let mut refusal = String::new();
    eventually("its guest runs", || {
        refusal = attach().expect_err("it manages its guest itself");
        !refusal.contains("has no KVM guest")
    });
    assert!(refusal.contains("has a manager already"), "{refusal}");
    assert!(daemon.managed().is_empty());
}
