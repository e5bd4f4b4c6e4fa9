//! VMs of `wideleaf run`, which register themselves and have a manager of their own.

use super::*;
use crate::server::REGISTERED_MAX;

fn limits(answer: Result<Answer, String>) -> Limits {
    let Ok(Answer::Limits(limits)) = answer else { panic!("{answer:?}") };
    limits
}

fn register(pid: u32) -> Request {
    Request::Register { vm: own_view(pid), live: LiveReport::default() }
}

fn status_of(vm: Box<VmView>) -> Request {
    Request::Status { vm, live: LiveReport::default() }
}

#[test]
fn a_registered_vm_is_listed_limited_and_forgotten_with_its_connection() {
    let bench = Bench::new("[budget]\ncopy_per_second = \"1600M\"");
    let first = limits(bench.ask(register(1)));
    assert_eq!((first.copy_per_second, first.policy), (mib(1600).get(), None));
    bench.guests.start_domain(10, "web");
    bench.attach(10).expect("it runs");
    assert_eq!(bench.managed(), ["ours", "web"]);
    let second = limits(bench.ask(status_of(own_view(1))));
    assert_eq!(second.copy_per_second, mib(800).get());
    bench.set("ours", "greedy").expect("it is managed");
    assert_eq!(limits(bench.ask(status_of(own_view(1)))).policy.as_deref(), Some("greedy"));
    assert!(bench.ask(Request::Detach { vm: "ours".into() }).expect_err("it is its own").contains("policy=off"));
    bench.service.closed(HERE);
    assert_eq!(bench.managed(), ["web"]);
    assert_eq!(bench.ask(status_of(own_view(1))), Err("register first".into()));
}

#[test]
fn a_registered_vm_is_told_the_part_of_the_time_for_which_its_memory_may_be_out_of_reach() {
    let bench = Bench::new("[budget]\nout_of_reach = \"20%\"");
    assert_eq!(limits(bench.ask(register(1))).out_of_reach.as_deref(), Some("20%"));
    let changes = Settings { out_of_reach: Some("10%".into()), ..Settings::default() };
    bench.ask(Request::Set { vm: "ours".into(), changes }).expect("it is managed");
    assert_eq!(limits(bench.ask(status_of(own_view(1)))).out_of_reach.as_deref(), Some("10%"));
}

#[test]
fn the_guarantee_of_a_registered_vm_is_pursued_and_its_policy_comes_back() {
    let bench = Bench::new("[defaults]\nguarantee = \"95%\"\npolicy = \"thp\"");
    let status = |policy: &str, base_4k: u64| {
        let mut view = own_view(1);
        view.policy = Some(policy.into());
        view.backing.as_mut().expect("it is known").base_4k = base_4k;
        limits(bench.ask(status_of(view))).policy
    };
    bench.ask(register(1)).expect("it registers");
    assert_eq!(status("auto:weight=2", mib(2).get()), None);
    bench.tick_at(1);
    bench.tick_at(4);
    assert_eq!(status("auto:weight=2", mib(2).get()).as_deref(), Some("greedy"));
    assert_eq!(status("greedy", mib(2).get()), None);
    let notes = || bench.list().remove(0).notes;
    assert_eq!(notes(), ["its guarantee of 95% is pursued: policy greedy, later auto:weight=2 again"]);
    assert_eq!(status("greedy", 0), None);
    bench.tick_at(15);
    assert_eq!(status("greedy", 0).as_deref(), Some("auto:weight=2"));
    assert_eq!((status("auto:weight=2", 0), notes()), (None, Vec::new()));
    // A policy that promotes nothing stays.
    bench.tick_at(16);
    assert_eq!(status("never", mib(2).get()), None);
    bench.tick_at(17);
    bench.tick_at(20);
    assert_eq!(status("never", mib(2).get()), None);
}

#[test]
fn a_registered_vm_is_told_to_which_policy_it_returns_without_a_daemon_that_pursues_its_guarantee() {
    let bench = Bench::new("[defaults]\nguarantee = \"95%\"\npolicy = \"thp\"");
    let status = || {
        let mut view = own_view(1);
        view.policy = Some("auto".into());
        view.backing.as_mut().expect("it is known").base_4k = mib(2).get();
        limits(bench.ask(status_of(view)))
    };
    bench.ask(register(1)).expect("it registers");
    assert_eq!(status().own_policy, None);
    bench.tick_at(1);
    bench.tick_at(4);
    let pursued = status();
    assert_eq!((pursued.policy.as_deref(), pursued.own_policy.as_deref()), (Some("greedy"), Some("auto")));
}

#[test]
fn settings_of_a_registered_vm_hold_when_it_registers_again_also_with_the_next_daemon() {
    let bench = Bench::new("");
    bench.guests.start(1, "ours");
    bench.ask(register(1)).expect("it registers");
    let guarantee = Settings { guarantee: Some("95%".into()), ..Settings::default() };
    bench.engine.set(requests::process_of(&own_view(1)), &guarantee).expect("it is managed");
    let guaranteed = |bench: &Bench| bench.list()[0].guarantee.to_string();
    assert_eq!(guaranteed(&bench), "95%");
    bench.service.closed(HERE);
    bench.scout();
    bench.ask(register(1)).expect("it registers again");
    assert_eq!(guaranteed(&bench), "95%");
    let next = Bench::new("");
    next.engine.adopt(bench.engine.state());
    next.ask(register(1)).expect("it registers with the next daemon");
    assert_eq!(guaranteed(&next), "95%");
    bench.service.closed(HERE);
    bench.guests.change(1, |guest| guest.has_ended = true);
    bench.scout();
    assert_eq!(bench.engine.state().registered, Vec::new(), "its process has ended");
}

#[test]
fn a_registered_vm_copies_nothing_while_the_host_is_short() {
    let bench = Bench::new("");
    bench.ask(register(1)).expect("it registers");
    bench.available.store(0, Ordering::Relaxed);
    bench.tick_at(1);
    assert_eq!(limits(bench.ask(status_of(own_view(1)))).copy_per_second, 0);
}

#[test]
fn a_process_cannot_register_the_vm_of_another() {
    let bench = Bench::new("");
    let error = bench.ask(register(77)).expect_err("we are process 1 here");
    assert_eq!(error, "process 1 cannot register a VM of process 77");
    bench.ask(register(1)).expect("it registers");
    assert!(bench.ask(register(1)).expect_err("twice").contains("managed already"));
}

#[test]
fn registered_vms_are_bounded_and_one_that_ends_makes_room() {
    let bench = Bench::new("");
    let register_as = |pid: u32| {
        let (connection, peer) = (ConnectionId::new(u64::from(pid)), Peer { pid, ..ROOT });
        bench.service.answer(connection, peer, register(pid))
    };
    let most = u32::try_from(REGISTERED_MAX).expect("it is small");
    for pid in 1..=most {
        assert!(matches!(register_as(pid), Reply::Ok(_)), "{pid}");
    }
    let refused = format!("all {REGISTERED_MAX} places for registered VMs are in use: try again later");
    assert_eq!(register_as(most + 1), Reply::Error(refused));
    bench.service.closed(ConnectionId::new(1));
    assert!(matches!(register_as(most + 1), Reply::Ok(_)));
}

#[test]
fn a_registered_vm_with_the_name_of_a_domain_does_not_get_the_rules_of_the_domain() {
    let weight = |bench: &Bench| {
        let table = bench.engine.table();
        table.vms.values().find(|vm| vm.found.vmm == Vmm::Wideleaf).map(|vm| vm.wanted.weight)
    };
    let rules = "[[vm]]\nname = \"ours\"\nweight = 7";
    let bench = Bench::new(rules);
    bench.ask(register(1)).expect("it registers");
    assert_eq!(weight(&bench), Some(7), "no domain has that name");
    let bench = Bench::new(rules);
    bench.guests.start_domain(10, "ours");
    bench.ask(started(10, "ours", None)).expect("it runs");
    bench.ask(register(1)).expect("it registers");
    assert_eq!(weight(&bench), Some(1));
}

fn explained(name: &str) -> LiveReport {
    LiveReport {
        explanation: Some(Box::new(Explanation { name: name.into(), windows: Some(9), ..Explanation::default() })),
        ..LiveReport::default()
    }
}

fn with_map(ranges: Vec<WindowRange>, notes: Vec<String>) -> LiveReport {
    let map = WindowMap { name: "of itself".into(), ranges, notes, ..WindowMap::default() };
    LiveReport { windows: Some(Box::new(map)), ..explained("of itself") }
}

fn windows(bench: &Bench) -> WindowMap {
    match bench.ask(Request::Windows { vm: "ours".into() }) {
        Ok(Answer::Windows(map)) => map,
        other => panic!("{other:?}"),
    }
}

/// A registered run that a client asks for its windows. It sends statuses with `report` where they are wanted.
fn windows_of_run(report: &LiveReport) -> WindowMap {
    let bench = Bench::new("");
    bench.guests.start(1, "ours");
    bench.ask(Request::Register { vm: own_view(1), live: explained("ours") }).expect("it registers");
    let send = |live| limits(bench.ask(Request::Status { vm: own_view(1), live })).wants_windows;
    assert!(!send(explained("ours")), "no client looks yet");
    thread::scope(|scope| {
        let client = scope.spawn(|| windows(&bench));
        while !client.is_finished() {
            if send(explained("ours")) {
                send(report.clone());
            }
            thread::sleep(Duration::from_millis(1));
        }
        client.join().expect("it does not panic")
    })
}

#[test]
fn the_windows_of_a_registered_vm_are_those_that_its_own_manager_reports() {
    let range =
        WindowRange { backing: "2424".into(), heat: "9??0".into(), state: "lrlw".into(), ..WindowRange::default() };
    let map = windows_of_run(&with_map(vec![range.clone()], vec!["of the run".into()]));
    assert_eq!((map.name.as_str(), map.ranges, map.notes), ("ours", vec![range], vec!["of the run".to_owned()]));
}

#[test]
fn a_map_that_does_not_come_or_is_too_long_is_replaced_by_a_look_from_outside_with_the_reason() {
    let from_outside = |map: &WindowMap| map.ranges[0].backing == "24";
    let too_long = windows_of_run(&with_map(Vec::new(), vec!["too long".into()]));
    assert!(from_outside(&too_long) && too_long.notes == ["too long"], "{too_long:?}");
    let silent = windows_of_run(&explained("ours"));
    assert!(from_outside(&silent) && silent.notes[0].contains("did not come in time"), "{silent:?}");
}

#[test]
fn a_registered_vm_is_explained_by_its_own_manager_and_a_run_of_an_earlier_release_from_outside() {
    let bench = Bench::new("");
    bench.guests.start(1, "ours");
    let explained_windows = || match bench.ask(Request::Explain { vm: "ours".into() }) {
        Ok(Answer::Explanation(explanation)) => (explanation.name, explanation.windows),
        other => panic!("{other:?}"),
    };
    bench.ask(register(1)).expect("it registers");
    assert_eq!(explained_windows(), ("ours".into(), Some(2)));
    assert!(windows(&bench).notes[0].contains("does not report its windows"));
    bench.ask(Request::Status { vm: own_view(1), live: explained("of itself") }).expect("it is registered");
    assert_eq!(explained_windows(), ("ours".into(), Some(9)));
    let reasons = ["holes", "busy", "holes"].map(|name| Reason { name: name.into(), windows: 2, text: String::new() });
    let counted = Explanation { huge: Some(3), reasons: reasons.to_vec(), ..Explanation::default() };
    let live = LiveReport { explanation: Some(Box::new(counted)), ..LiveReport::default() };
    bench.ask(Request::Status { vm: own_view(1), live }).expect("it is registered");
    let expected = [("busy", 2), ("holes", 4), ("large", 3)].map(|(name, windows)| (name.to_owned(), windows));
    assert_eq!(bench.engine.scrape().vms[0].windows, BTreeMap::from(expected));
}

#[test]
fn the_age_of_a_scan_that_a_run_reports_grows_until_its_next_report() {
    let bench = Bench::new("");
    bench.guests.start(1, "ours");
    let vm = Box::new(VmView { scan_age_s: Some(70.0), ..*own_view(1) });
    bench.ask(Request::Register { vm, live: LiveReport::default() }).expect("it registers");
    let age = || match bench.ask(info("ours")) {
        Ok(Answer::Vm(view)) => view.scan_age_s.expect("it was reported"),
        other => panic!("{other:?}"),
    };
    let first = age();
    thread::sleep(Duration::from_millis(1));
    assert!(first >= 70.0 && age() > first, "{first}");
    let scraped = bench.engine.scrape().vms[0].view.scan_age_s;
    assert!(scraped > Some(first), "{scraped:?}");
    bench.ask(status_of(own_view(1))).expect("it reports");
    assert_eq!(bench.engine.scrape().vms[0].view.scan_age_s, None, "its manager has not scanned yet");
}
