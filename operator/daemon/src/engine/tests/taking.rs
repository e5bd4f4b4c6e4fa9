//! Which guests the daemon finds, takes, gives back and forgets, and by which names it knows them.

use super::*;

#[test]
fn unmanaged_guests_are_listed_and_surveyed() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    assert_eq!(bench.list()[0].care, CareView::Unmanaged);
    assert!(matches!(bench.ask(info("web")), Ok(Answer::Vm(view)) if view.pid == 10));
    assert!(matches!(
        bench.ask(Request::Explain { vm: "10".into() }),
        Ok(Answer::Explanation(why)) if why.windows == Some(2)
    ));
    assert!(matches!(
        bench.ask(Request::Windows { vm: "web".into() }),
        Ok(Answer::Windows(map)) if map.ranges[0].backing == "24"
    ));
    assert_eq!(bench.guests.guest(10).attached, 0);
}

#[test]
fn the_daemon_tells_how_much_memory_can_become_large_pages() {
    let bench = Bench::new("[host]\nlow_free = \"1G\"\nhigh_free = \"2G\"");
    let promotable = || match bench.ask(Request::Daemon) {
        Ok(Answer::Daemon(daemon)) => daemon.promotable.expect("the pools tell it"),
        other => panic!("{other:?}"),
    };
    bench.engine.begin();
    let all = promotable();
    assert_eq!(all.now_2m, mib(200).get(), "a hundred blocks");
    bench.pools.set_free(7);
    assert_eq!(promotable(), all, "figures of some seconds ago are not read again");
}

#[test]
fn a_guest_is_attached_once_however_often_a_client_asks() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    for _ in 0..2 {
        assert!(matches!(bench.attach(10), Ok(Answer::Vm(view)) if view.care == CareView::Managed));
    }
    assert_eq!((bench.guests.guest(10).attached, bench.list().len()), (1, 1));
    assert!(matches!(bench.ask(Request::Daemon), Ok(Answer::Daemon(daemon)) if daemon.vms == 1));
}

#[test]
fn a_guest_that_is_attached_by_its_monitor_keeps_that_monitor_after_a_restart() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    let target = Target::Qmp(monitor_of("web"));
    bench.ask(Request::Attach { target, settings: Settings::default() }).expect("it runs");
    assert_eq!(bench.guests.guest(10).qmp, Some(monitor_of("web")));
    bench.guests.change(10, |guest| guest.qmp = None);
    assert_eq!(bench.restarted().guests.guest(10).qmp, Some(monitor_of("web")));
}

#[test]
fn a_failed_attach_is_an_error_and_leaves_nothing_behind() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.guests.change(10, |guest| guest.attach_error = Some("needs CAP_SYS_NICE".into()));
    for _ in 0..2 {
        assert_eq!(bench.attach(10), Err("needs CAP_SYS_NICE".into()));
    }
    bench.guests.change(10, |guest| guest.attach_error = None);
    assert!(bench.attach(10).is_ok());
}

#[test]
fn a_guest_of_wideleaf_run_is_not_taken_from_its_own_manager() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start(10, "ours");
    bench.guests.change(10, |guest| guest.found.vmm = Vmm::Wideleaf);
    bench.scout();
    assert!(bench.attach(10).expect_err("it has a manager").contains("a manager of its own"));
    assert_eq!(bench.guests.guest(10).attached, 0);
}

#[test]
fn new_guests_are_taken_if_the_configuration_names_them() {
    let bench = Bench::new("[attach]\nautomatic = [\"web*\"]\n[[vm]]\nname = \"web-2\"\npolicy = \"off\"");
    for (pid, name) in [(10, "web-1"), (11, "web-2"), (12, "db")] {
        bench.guests.start(pid, name);
    }
    bench.scout();
    assert_eq!(bench.managed(), ["web-1", "web-2"]);
    assert_eq!(bench.guests.guest(11).policy.expect("it was told").to_string(), "off");
}

#[test]
fn a_detached_guest_is_taken_again_only_on_request() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start(10, "web");
    bench.scout();
    assert_eq!(bench.ask(Request::Detach { vm: "web".into() }), Ok(Answer::Done));
    assert_eq!(bench.guests.guest(10).stopped, 1);
    bench.scout();
    assert!(bench.managed().is_empty());
    assert!(bench.attach(10).is_ok());
}

#[test]
fn domains_that_the_hook_reports_are_taken_unless_the_configuration_says_otherwise() {
    for (config, taken) in [
        ("", vec!["web-1", "db", "asks"]),
        ("[attach]\nautomatic = \"libvirt\"", vec!["web-1", "db", "asks"]),
        ("[attach]\nautomatic = \"none\"", vec!["asks"]),
        ("[attach]\nautomatic = \"all\"", vec!["web-1", "db", "asks"]),
        ("[attach]\nautomatic = [\"web*\"]", vec!["web-1", "asks"]),
    ] {
        let bench = Bench::new(config);
        for (pid, name, policy) in [(10, "web-1", None), (11, "db", Some("off")), (12, "asks", Some("greedy"))] {
            bench.guests.start_domain(pid, name);
            assert_eq!(bench.ask(started(pid, name, policy)), Ok(Answer::Done), "{config}");
        }
        assert_eq!(bench.managed(), taken, "{config}");
    }
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web-1");
    bench.scout();
    assert_eq!(bench.managed(), [""; 0], "the hook did not report it");
}

#[test]
fn a_detached_domain_stays_detached_when_libvirtd_is_restarted_until_it_is_attached_or_ends() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    for _ in 0..2 {
        bench.ask(started(10, "web", Some("greedy"))).expect("it runs");
        assert_eq!(bench.managed(), ["web"]);
        bench.ask(Request::Detach { vm: "web".into() }).expect("it is managed");
        bench.ask(started(10, "web", Some("greedy"))).expect("it is reported again");
        assert!(bench.managed().is_empty());
        bench.attach(10).expect("it runs");
    }
    bench.ask(Request::Detach { vm: "web".into() }).expect("it is managed");
    let bench = bench.restarted();
    bench.ask(started(10, "web", None)).expect("also by the next daemon");
    assert!(bench.managed().is_empty());
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.guests.start_domain(11, "web");
    bench.ask(started(11, "web", None)).expect("it is another process");
    assert_eq!(bench.managed(), ["web"]);
}

#[test]
fn a_guest_with_a_process_id_as_its_name_does_not_hide_that_process() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.guests.start(11, "10");
    assert!(matches!(bench.ask(info("10")), Ok(Answer::Vm(view)) if view.name == "web"));
    bench.attach(11).expect("it runs");
    assert!(matches!(bench.ask(info("10")), Ok(Answer::Vm(view)) if view.name == "web"));
}

#[test]
fn a_guest_that_has_ended_is_forgotten() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.tick_at(1);
    assert!(bench.managed().is_empty() && bench.state().guests.is_empty());
    assert_eq!(bench.ask(info("web")), Err("there is no VM \"web\", nor any other".into()));
}

#[test]
fn an_ambiguous_name_is_refused_with_the_process_ids_and_an_unknown_one_with_the_known_names() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.guests.start(11, "web");
    assert_eq!(bench.ask(info("web")), Err("2 VMs are called \"web\": name one by its process id (10, 11)".into()));
    assert!(bench.ask(info("00000000-0000-0000-0000-000000000011")).is_ok());
    assert_eq!(bench.ask(info("db")), Err("there is no VM \"db\"; there are web, web".into()));
    assert!(bench.set("10", "off").expect_err("it is unmanaged").contains("run `wideleaf attach 10` first"));
}
