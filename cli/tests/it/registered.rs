//! A run that registers its guest with a daemon over the protocol, with this test as the daemon: the messages,
//! the run's reactions, and the end of the connection with the run. Needs KVM (`WIDELEAF_REQUIRE=kvm` turns a
//! skip into a failure).

use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};

use crate::program::new_scratch;
use wideleaf_control::map::letters;
use wideleaf_control::protocol::{Answer, Envelope, Limits, Reply, Request};
use wideleaf_control::view::{Care, VmView, Vmm};
use wideleaf_testing::has_kvm;
use wideleaf_testing::scratch::{Running, Scratch};

/// The daemon's side of a connection.
struct Told(BufReader<UnixStream>);

impl Told {
    fn accept(listener: &UnixListener) -> Told {
        Told(BufReader::new(listener.accept().unwrap().0))
    }

    /// The next request; `None` once the run has ended.
    fn next(&mut self) -> Option<Request> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) => None,
            // The run ended before it read an answer.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => None,
            read => read.map(|_| Some(serde_json::from_str::<Envelope>(&line).unwrap().request)).unwrap(),
        }
    }

    fn answer(&mut self, policy: Option<&str>) {
        self.answer_and_ask(policy, false);
    }

    fn answer_and_ask(&mut self, policy: Option<&str>, wants_windows: bool) {
        let policy = policy.map(str::to_owned);
        self.answer_with(Limits { policy, wants_windows, ..Limits::default() });
    }

    fn answer_with(&mut self, limits: Limits) {
        let limits = Limits { copy_per_second: 1 << 30, cpu_share: 2_500, ..limits };
        let reply = serde_json::to_string(&Reply::Ok(Box::new(Answer::Limits(limits)))).unwrap();
        writeln!(self.0.get_mut(), "{reply}").unwrap();
    }

    /// The next status, answered with the operator's `policy`.
    fn status(&mut self, policy: Option<&str>) -> VmView {
        let Some(Request::Status { vm, .. }) = self.next() else { panic!("a run that lives tells how it is") };
        self.answer(policy);
        *vm
    }
}

/// A run without an end that registers at the listener.
fn endless_run(scratch: &Scratch, more: &[&str]) -> (Running, UnixListener) {
    let socket = scratch.path("control.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let daemon = format!("--daemon={}", socket.display());
    let run = ["run", "pattern", "--memory=128M", "--cmdline=bytes=32M seconds=600", &daemon];
    (Running::start(scratch, &[&run, more].concat()), listener)
}

#[test]
fn a_run_registers_obeys_and_closes_its_connection_at_its_end() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (run, listener) = endless_run(&scratch, &["--policy=greedy"]);
    let mut told = Told::accept(&listener);
    let Some(Request::Register { vm, .. }) = told.next() else { panic!("it registers first") };
    assert_eq!(
        (vm.pid, vm.vmm, &vm.care, vm.policy.as_deref()),
        (run.0.id(), Vmm::Wideleaf, &Care::Managed, Some("greedy"))
    );
    assert_eq!(vm.ram.iter().map(|piece| piece.bytes).sum::<u64>(), 128 << 20);
    told.answer(Some("at-fault"));
    let refused = told.status(Some("off"));
    assert!(refused.notes.iter().any(|note| note.starts_with("its policy stays greedy")), "{:?}", refused.notes);
    let off = told.status(Some("greedy"));
    assert_eq!((off.care, off.policy.as_deref(), off.notes.len()), (Care::Off, Some("off"), refused.notes.len() - 1));
    let on = told.status(Some("auto"));
    assert_eq!((on.care, on.policy.as_deref()), (Care::Managed, Some("greedy")));
    let another = told.status(None);
    assert_eq!((another.care, another.policy.as_deref()), (Care::Managed, Some("auto")));
    drop(run);
    // At most one status was already sent.
    assert!(told.next().is_none() || told.next().is_none());
}

#[test]
fn a_run_reports_its_windows_where_the_daemon_asks_and_always_why_they_are_not_large() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (_run, listener) = endless_run(&scratch, &["--policy=never"]);
    let mut told = Told::accept(&listener);
    assert!(matches!(told.next(), Some(Request::Register { live, .. }) if live.windows.is_none()));
    told.answer_and_ask(None, true);
    let mut reported = |wants_windows| {
        let Some(Request::Status { live, .. }) = told.next() else { panic!("a run that lives tells how it is") };
        told.answer_and_ask(None, wants_windows);
        (live.explanation, live.windows)
    };
    let (explanation, map) = loop {
        // Before its manager's first tick a run reports nothing.
        if let (Some(explanation), Some(map)) = reported(true) {
            break (explanation, map);
        }
    };
    assert_eq!((map.windows(), explanation.windows), (64, Some(64)));
    let states: String = map.ranges.iter().flat_map(|range| letters(&range.state, range.windows())).collect();
    assert_eq!(states.matches('?').count(), 0, "its own manager knows all states: {map:?}");
    let names: Vec<&str> = map.reasons.iter().map(|reason| reason.name.as_str()).collect();
    assert!(names.iter().all(|name| ["never_touched", "policy_never_promotes"].contains(name)), "{names:?}");
    assert!(map.notes.iter().any(|note| note.starts_with("heat: policy never does not ask")), "{:?}", map.notes);
    assert!(reported(false).1.is_some(), "this one was asked for as well");
    assert_eq!(reported(false).1, None);
}

#[test]
fn a_run_reports_the_snapshots_that_were_written_of_it() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (_run, listener) = endless_run(&scratch, &["--policy=never", "--control-socket=vm.sock"]);
    let mut told = Told::accept(&listener);
    let Some(Request::Register { vm, .. }) = told.next() else { panic!("it registers first") };
    assert!(vm.work.is_none_or(|work| work.saves.is_none()));
    told.answer(None);
    scratch.wideleaf(&["vm", "vm.sock", "snapshot", "saved", "--pause=60s"]).assert().success();
    let saves = loop {
        if let Some(saves) = told.status(None).work.and_then(|work| work.saves) {
            break saves;
        }
    };
    assert_eq!((saves.snapshots, saves.snapshots_failed), (1, 0));
    assert!(saves.last_pause_ms > Some(0.0) && saves.last_before_pause.is_some(), "{saves:?}");
}

#[test]
fn a_run_returns_to_its_own_policy_when_the_daemon_that_pursues_its_guarantee_is_gone() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (_run, listener) = endless_run(&scratch, &["--policy=auto"]);
    let mut told = Told::accept(&listener);
    assert!(matches!(told.next(), Some(Request::Register { .. })));
    let pursuit = Limits { policy: Some("greedy".into()), own_policy: Some("auto".into()), ..Limits::default() };
    told.answer_with(pursuit.clone());
    let Some(Request::Status { vm, .. }) = told.next() else { panic!("a run that lives tells how it is") };
    assert_eq!(vm.policy.as_deref(), Some("greedy"));
    drop(told);
    let mut next = Told::accept(&listener);
    let Some(Request::Register { vm, .. }) = next.next() else { panic!("it registers first") };
    assert_eq!(vm.policy.as_deref(), Some("auto"));
    next.answer_with(pursuit);
    assert_eq!(next.status(None).policy.as_deref(), Some("greedy"), "the next daemon pursues again");
}

#[test]
fn a_run_registers_again_after_its_daemon_is_gone() {
    if !has_kvm() {
        return;
    }
    let scratch = new_scratch();
    let (_run, listener) = endless_run(&scratch, &[]);
    for _ in 0..2 {
        let mut told = Told::accept(&listener);
        assert!(matches!(told.next(), Some(Request::Register { .. })));
        told.answer(None);
    }
}
