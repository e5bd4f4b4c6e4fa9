//! Settings of a guest: which client may change them, from where they come, and what a reload changes.

use super::*;

#[test]
fn every_client_may_read_and_only_some_may_make_changes() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    for request in [Request::Daemon, Request::List, info("web"), Request::Explain { vm: "web".into() }] {
        assert!(bench.ask_as(UNPRIVILEGED, request).is_ok());
    }
    let attach = Request::Attach { target: Target::Pid(10), settings: Settings::default() };
    for request in [attach, Request::Reload, Request::Detach { vm: "web".into() }] {
        assert!(bench.ask_as(UNPRIVILEGED, request).expect_err("not for them").starts_with("user 4242 may only read"));
    }
    assert_eq!(bench.guests.guest(10).attached, 0);
}

#[test]
fn valid_settings_take_effect_and_invalid_ones_change_nothing() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    assert!(matches!(bench.set("web", "off"), Ok(Answer::Vm(view)) if view.care == CareView::Off));
    assert!(bench.set("web", "nope").expect_err("no such policy").contains("there is no policy \"nope\""));
    assert_eq!(bench.set("web", "giant"), Err("giant needs a guest of our own".into()));
    let Ok(Answer::Vm(view)) = bench.ask(info("web")) else { panic!("it is there") };
    assert_eq!(view.policy.as_deref(), Some("off"));
}

#[test]
fn a_change_that_cannot_be_saved_is_in_force_and_not_answered_as_done() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    // A folder is in the place of the new file.
    let new = bench.folder.path().join("state.json.new");
    std::fs::create_dir(&new).expect("nothing is there");
    let set = |policy: &str| {
        let changes = Settings { policy: Some(policy.into()), ..Settings::default() };
        bench.service.answer(HERE, ROOT, Request::Set { vm: "web".into(), changes })
    };
    let Reply::Unsaved(why) = set("greedy") else { panic!("it is not saved") };
    assert!(why.contains("in force until wideleafd ends") && why.contains("state.json"), "{why}");
    assert_eq!(bench.list()[0].policy.as_deref(), Some("greedy"));
    let detached = bench.service.answer(HERE, ROOT, Request::Detach { vm: "web".into() });
    assert!(matches!(detached, Reply::Unsaved(_)), "{detached:?}");
    assert!(bench.managed().is_empty());
    std::fs::remove_dir(new).expect("the test's own");
    assert!(bench.attach(10).is_ok());
    assert!(matches!(set("greedy"), Reply::Ok(_)));
}

#[test]
fn a_reload_changes_running_vms_and_keeps_their_counters() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.work = work(mib(6)));
    bench.configure("[defaults]\npolicy = \"greedy\"\nguarantee = \"95%\"");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    let view = bench.list().remove(0);
    assert_eq!((view.policy.as_deref(), view.guarantee), (Some("greedy"), Guarantee::Coverage(9_500)));
    assert_eq!((view.work.map(|work| work.copied), bench.guests.guest(10).attached), (Some(mib(6).get()), 1));
}

#[test]
fn a_reload_reads_a_file_that_was_written_after_the_start() {
    let bench = Bench::new("");
    std::fs::remove_file(bench.folder.path().join("wideleafd.toml")).expect("the test's own");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done), "the defaults hold without it");
    bench.configure("[defaults]\npolicy = \"greedy\"");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    assert_eq!(bench.list()[0].policy.as_deref(), Some("greedy"));
    bench.configure("[defaults]\npolicy = \"nonsense\"");
    assert!(bench.ask(Request::Reload).expect_err("there is no such policy").contains("wideleafd.toml:4:10: "));
}

#[test]
fn a_reload_keeps_the_sections_that_only_a_restart_changes() {
    let bench = Bench::new("");
    let of = |config: &Config| (config.socket.clone(), config.metrics.clone(), config.state.clone());
    let started_with = of(&bench.engine.table().config);
    bench.configure("[socket]\npath = \"/elsewhere\"\n[metrics]\nlisten = \"127.0.0.1:9999\"");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    assert_eq!(of(&bench.engine.table().config), started_with);
}

#[test]
fn a_mistake_in_the_file_changes_nothing() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.configure("[defaults]\npolicy = \"greedy\"\nguarantee = \"most\"");
    let error = bench.ask(Request::Reload).expect_err("it is not a guarantee");
    assert!(error.contains("wideleafd.toml:5:13: "), "{error}");
    assert_eq!(bench.list()[0].policy.as_deref(), Some("auto"));
}

#[test]
fn a_reload_changes_all_settings_but_those_fixed_at_attach() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.attach(10).expect("it runs");
    bench.configure("[defaults]\npolicy = \"greedy\"\ncollapse_shared = true");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    assert_eq!(bench.list()[0].policy.as_deref(), Some("greedy"));
    let qmp = Settings { qmp: Some(monitor_of("web")), ..Settings::default() };
    for changes in [Settings { collapse_shared: Some(true), ..Settings::default() }, qmp] {
        let error = bench.ask(Request::Set { vm: "web".into(), changes }).expect_err("it is attached");
        assert!(error.contains("is fixed when a guest is attached"), "{error}");
    }
}

#[test]
fn the_part_of_the_time_out_of_reach_comes_with_the_attach_a_reload_and_a_setting() {
    let bench = Bench::new("[budget]\nout_of_reach = \"20%\"");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    let is_now = |part: &str| {
        let now = bench.guests.guest(10).out_of_reach.map(|part| part.to_string());
        assert_eq!(now.as_deref(), Some(part));
    };
    is_now("20%");
    bench.configure("[budget]\nout_of_reach = \"5%\"");
    assert_eq!(bench.ask(Request::Reload), Ok(Answer::Done));
    is_now("5%");
    let set = |changes| bench.ask(Request::Set { vm: "web".into(), changes });
    let to = |part: &str| Settings { out_of_reach: Some(part.into()), ..Settings::default() };
    let Ok(Answer::Vm(view)) = set(to("60%")) else { panic!("it is managed") };
    is_now("60%");
    let note = "while pages change their size, memory is out of its reach for at most 60% of any 100 ms";
    assert!(view.notes.iter().any(|line| line == note), "{:?}", view.notes);
    set(Settings { unset: vec![SettingName::OutOfReach], ..Settings::default() }).expect("it is managed");
    is_now("5%");
    assert!(set(to("0%")).expect_err("it is below 1 %").contains("write a number from 1 to 100"));
    is_now("5%");
}

#[test]
fn unset_settings_follow_the_configuration_now_or_from_the_next_attach_on() {
    let bench = Bench::new("[defaults]\npolicy = \"greedy\"");
    bench.guests.start(10, "web");
    let said = Settings { policy: Some("off".into()), qmp: Some(monitor_of("web")), ..Settings::default() };
    bench.ask(Request::Attach { target: Target::Pid(10), settings: said }).expect("it runs");
    let changes = Settings { unset: vec![SettingName::Policy, SettingName::Qmp], ..Settings::default() };
    let Ok(Answer::Vm(view)) = bench.ask(Request::Set { vm: "web".into(), changes }) else { panic!("it is managed") };
    assert_eq!(view.policy.as_deref(), Some("greedy"));
    assert_eq!(bench.guests.guest(10).qmp, Some(monitor_of("web")), "it stays in use until the next attach");
    let unset = vec![SettingName::Policy, SettingName::Qmp];
    assert_eq!(bench.state().guests[0].said, Settings { unset, ..Settings::default() });
    let bench = bench.restarted();
    assert_eq!(bench.guests.guest(10).qmp, None);
}
