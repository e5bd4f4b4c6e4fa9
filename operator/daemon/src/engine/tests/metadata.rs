//! What the metadata of running domains say: flavors, and mistakes.

use super::*;

fn started_with(pid: u32, domain: &str, mistakes: &[&str]) -> Request {
    let mistakes = mistakes.iter().map(|mistake| (*mistake).to_owned()).collect();
    let Request::Started { domain, uuid, pid, settings, .. } = started(pid, domain, None) else { unreachable!() };
    Request::Started { domain, uuid, pid, settings, mistakes, flavor: None }
}

#[test]
fn a_mistake_in_the_metadata_of_a_running_domain_is_in_its_view_also_after_a_restart() {
    let notes = |bench: &Bench| bench.list()[0].notes.clone();
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started_with(10, "web", &["unknown attribute garantee"])).expect("it runs");
    let expected = ["a mistake in its metadata: unknown attribute garantee"];
    assert_eq!(notes(&bench), expected);
    bench.ask(Request::Detach { vm: "web".into() }).expect("it is managed");
    assert_eq!(notes(&bench), expected, "it is only observed");
    bench.attach(10).expect("it runs");
    let bench = bench.restarted();
    assert_eq!(notes(&bench), expected);
    bench.ask(started_with(10, "web", &[])).expect("libvirtd was restarted, and the metadata are right by now");
    assert_eq!(notes(&bench), [""; 0]);
}

#[test]
fn mistakes_are_forgotten_with_the_process() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(started_with(10, "web", &["unknown attribute garantee"])).expect("it runs");
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
