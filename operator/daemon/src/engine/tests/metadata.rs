//! What the metadata of running domains say: settings, flavors and mistakes.

use super::*;

fn started_with_mistakes(pid: u32, domain: &str, mistakes: &[&str]) -> Request {
    let mistakes = mistakes.iter().map(|mistake| (*mistake).to_owned()).collect();
    let Request::Started { domain, uuid, pid, settings, .. } = started(pid, domain, None) else { unreachable!() };
    Request::Started { domain, uuid, pid, settings, mistakes, flavor: None }
}

#[test]
fn a_mistake_in_the_metadata_of_a_running_domain_is_in_its_view_also_after_a_restart() {
    let notes = |bench: &Bench| bench.list()[0].notes.clone();
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started_with_mistakes(10, "web", &["unknown attribute garantee"])).expect("it runs");
    let expected = ["a mistake in its metadata: unknown attribute garantee"];
    assert_eq!(notes(&bench), expected);
    bench.ask(Request::Detach { vm: "web".into() }).expect("it is managed");
    assert_eq!(notes(&bench), expected, "it is only observed");
    bench.attach(10).expect("it runs");
    let bench = bench.restarted();
    assert_eq!(notes(&bench), expected);
    bench
        .ask(started_with_mistakes(10, "web", &[]))
        .expect("libvirtd was restarted, and the metadata are right by now");
    assert_eq!(notes(&bench), [""; 0]);
}

#[test]
fn mistakes_are_forgotten_with_the_process() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started_with_mistakes(10, "web", &["unknown attribute garantee"])).expect("it runs");
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.scout();
    assert_eq!(bench.state().mistakes, []);
}

fn started_by_nova(pid: u32, domain: &str, flavor: &str) -> Request {
    let Request::Started { domain, uuid, pid, settings, mistakes, .. } = started(pid, domain, None) else {
        unreachable!()
    };
    Request::Started { domain, uuid, pid, settings, mistakes, flavor: Some(flavor.into()) }
}

#[test]
fn a_rule_by_flavor_holds_for_an_instance_also_after_a_restart_and_a_reload() {
    let policies = |bench: &Bench| {
        let views = bench.list();
        views.iter().map(|view| view.policy.clone().expect("it is managed")).collect::<Vec<_>>()
    };
    let rule = |policy: &str| format!("[[vm]]\nflavor = \"db.*\"\npolicy = \"{policy}\"\n");
    let bench = Bench::new(&rule("greedy"));
    for (pid, name, flavor) in [(10, "instance-1", "db.large"), (11, "instance-2", "web.large")] {
        bench.guests.start_domain(pid, name);
        bench.ask(started_by_nova(pid, name, flavor)).expect("it runs");
    }
    assert_eq!(policies(&bench), ["greedy", "auto"]);
    bench.configure(&rule("thp"));
    bench.ask(Request::Reload).expect("nothing is wrong");
    assert_eq!(policies(&bench), ["thp", "auto"]);
    let bench = bench.restarted();
    assert_eq!(bench.state().flavors.len(), 2);
    bench.configure(&rule("coverage"));
    bench.ask(Request::Reload).expect("nothing is wrong");
    assert_eq!(policies(&bench), ["coverage", "auto"]);
}

#[test]
fn a_flavor_is_forgotten_with_the_process_or_when_libvirt_reports_none() {
    let bench = Bench::new("");
    for (pid, name) in [(10, "instance-1"), (11, "instance-2")] {
        bench.guests.start_domain(pid, name);
        bench.ask(started_by_nova(pid, name, "db.large")).expect("it runs");
    }
    bench.ask(started(11, "instance-2", None)).expect("libvirtd was restarted, and the metadata changed");
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.scout();
    assert_eq!(bench.state().flavors, []);
}

#[test]
fn metadata_that_arrive_while_the_guest_is_being_attached_hold_once_it_is() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start_domain(10, "web");
    let Request::Started { domain, uuid, pid, mistakes, flavor, .. } = started(10, "web", None) else { unreachable!() };
    let settings = Settings { guarantee: Some("95%".into()), qmp: Some(monitor_of("web")), ..Settings::default() };
    let report = Request::Started { domain, uuid, pid, settings, mistakes, flavor };
    let busy = bench.guests.guest(10).busy;
    let attaching = busy.lock();
    thread::scope(|scope| {
        scope.spawn(|| bench.scout());
        while bench.engine.table().being_attached.is_empty() {
            thread::yield_now();
        }
        let reported = scope.spawn(|| bench.ask(report));
        // A report that did not wait would mostly be refused by then.
        thread::sleep(Duration::from_millis(100));
        drop(attaching);
        assert_eq!(reported.join().expect("no panic"), Ok(Answer::Done));
    });
    assert_eq!(bench.list()[0].guarantee, Guarantee::Coverage(9_500));
    assert_eq!(bench.guests.guest(10).qmp, Some(monitor_of("web")));
}

#[test]
fn settings_take_precedence_over_metadata_when_libvirtd_is_restarted() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started(10, "web", Some("greedy"))).expect("it runs");
    bench.set("web", "off").expect("it is managed");
    bench.ask(started(10, "web", Some("greedy"))).expect("it is reported again");
    assert_eq!(bench.list()[0].policy.as_deref(), Some("off"));
}

#[test]
fn a_setting_of_the_metadata_that_was_unset_stays_unset_until_it_is_set() {
    let policy = |bench: &Bench| bench.list()[0].policy.clone().expect("it is managed");
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started(10, "web", Some("greedy"))).expect("it runs");
    let changes = Settings { unset: vec![SettingName::Policy], ..Settings::default() };
    for _ in 0..2 {
        bench.ask(Request::Set { vm: "web".into(), changes: changes.clone() }).expect("it is managed");
        bench.ask(started(10, "web", Some("greedy"))).expect("libvirtd was restarted");
        assert_eq!(policy(&bench), "auto");
    }
    let bench = bench.restarted();
    bench.ask(started(10, "web", Some("greedy"))).expect("it is reported again");
    assert_eq!(policy(&bench), "auto");
    bench.set("web", "thp").expect("it is managed");
    assert_eq!((policy(&bench), bench.state().guests[0].said.unset.len()), ("thp".into(), 0));
}

#[test]
fn a_guest_that_was_taken_before_its_metadata_were_known_is_attached_again_and_its_counters_continue() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start_domain(10, "web");
    bench.guests.change(10, |guest| guest.work = work(mib(6)));
    bench.scout();
    bench.guests.change(10, |guest| guest.work = WorkView::default()); // that of its next manager
    for _ in 0..2 {
        bench.ask(started_with_monitor(10, "web", "greedy")).expect("it runs");
        let guest = bench.guests.guest(10);
        assert_eq!((guest.qmp, guest.attached, guest.stopped), (Some(monitor_of("web")), 2, 1), "and once");
    }
    let vm = &bench.list()[0];
    let copied = vm.work.as_ref().map(|work| work.copied);
    assert_eq!((vm.policy.as_deref(), copied), (Some("greedy"), Some(mib(6).get())));
    assert_eq!(bench.state().guests.len(), 1);
    assert_eq!(bench.restarted().guests.guest(10).qmp, Some(monitor_of("web")));
}

#[test]
fn invalid_metadata_leave_a_guest_as_it_was() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start_domain(10, "web");
    bench.scout();
    let refused = bench.ask(started_with_monitor(10, "web", "nonsense")).expect_err("there is no such policy");
    assert!(refused.contains("no policy \"nonsense\""), "{refused}");
    assert_eq!((bench.guests.guest(10).attached, bench.managed().len()), (1, 1));
}

#[test]
fn a_guest_that_cannot_be_attached_again_keeps_its_settings_until_it_can() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.attach(10).expect("it runs");
    bench.set("web", "coverage").expect("it is managed");
    // Its earlier manager hangs at the guest, and still holds it.
    bench.guests.change(10, |guest| guest.attach_error = Some("it has a manager already".into()));
    assert_eq!(bench.ask(started_with_monitor(10, "web", "greedy")), Err("it has a manager already".into()));
    assert_eq!((bench.managed().len(), bench.state().guests.len()), (0, 1));
    bench.scout();
    assert_eq!((bench.managed().len(), bench.state().guests.len()), (0, 1));
    bench.guests.change(10, |guest| guest.attach_error = None);
    bench.scout();
    assert_eq!((bench.managed(), bench.list()[0].policy.as_deref()), (vec!["web".to_owned()], Some("coverage")));
}
