//! The first moments of a daemon, and guests that do not answer then.

use super::*;
use crate::guests::fake::FakeGuest;

/// A host on which an earlier daemon managed one guest, and a daemon before its first scan.
fn not_looked_yet() -> Bench {
    let earlier = Bench::new("");
    earlier.guests.start(10, "web");
    earlier.attach(10).expect("it runs");
    earlier.set("web", "greedy").expect("it is managed");
    earlier.engine.save();
    let Bench { folder, guests, pools, .. } = earlier;
    Bench::not_begun(folder, guests, pools, "")
}

/// The same after its first scan of that guest, with a change.
fn begun_where(change: impl FnOnce(&mut FakeGuest)) -> Bench {
    let bench = not_looked_yet();
    bench.guests.change(10, change);
    bench.engine.resume().expect("its guests are seen");
    bench.engine.has_looked();
    bench
}

#[test]
fn a_list_waits_for_the_first_scan_and_calls_no_managed_guest_unmanaged() {
    let bench = not_looked_yet();
    thread::scope(|scope| {
        let listed = scope.spawn(|| bench.list());
        // A list that did not wait would mostly be answered by then.
        thread::sleep(Duration::from_millis(100));
        bench.engine.resume().expect("its guests are seen");
        bench.engine.has_looked();
        let listed = listed.join().expect("no panic");
        assert_ne!(listed[0].care, CareView::Unmanaged);
    });
    assert_eq!(bench.list()[0].care, CareView::Managed);
}

#[test]
fn a_guest_that_is_not_taken_up_yet_is_marked_and_has_its_policy_and_counters() {
    let bench = not_looked_yet();
    bench.engine.has_looked();
    let listed = bench.list().remove(0);
    assert!(
        matches!(&listed.care, CareView::LeftAlone { reason } if reason.contains("take it up again")),
        "{:?}",
        listed.care
    );
    assert_eq!((listed.name.as_str(), listed.policy.as_deref(), listed.work.is_some()), ("web", Some("greedy"), true));
    assert!(matches!(bench.ask(info("web")), Ok(Answer::Vm(view)) if view.care == listed.care));
    let refused = bench.set("web", "off").expect_err("not yet");
    assert!(refused.contains("web is not managed yet") && refused.contains("ask again"), "{refused}");
}

#[test]
fn the_hosts_memory_is_known_before_the_first_request() {
    let bench = not_looked_yet();
    bench.engine.begin();
    assert!(matches!(bench.ask(Request::Daemon), Ok(Answer::Daemon(daemon)) if daemon.host_free == gib(8).get()));
}

#[test]
fn a_guest_that_does_not_answer_is_taken_up_once_it_does_and_kept_in_the_state_until_then() {
    let bench = begun_where(|guest| guest.found.no_answer = Some("does not answer: of the test".into()));
    bench.scout();
    assert_eq!((bench.managed(), bench.state().guests.len()), (vec![], 1));
    let listed = bench.list().remove(0);
    assert!(
        matches!(&listed.care, CareView::LeftAlone { reason } if reason == "it does not answer: of the test"),
        "{:?}",
        listed.care
    );
    bench.guests.change(10, |guest| guest.found.no_answer = None);
    bench.scout();
    assert_eq!(bench.managed(), ["web"]);
    assert_eq!(bench.list()[0].policy.as_deref(), Some("greedy"));
}

#[test]
fn a_guest_that_an_operator_attaches_before_the_next_look_keeps_the_operators_settings() {
    let bench = begun_where(|guest| guest.found.no_answer = Some("does not answer: of the test".into()));
    bench.guests.change(10, |guest| guest.found.no_answer = None);
    let settings = Settings { policy: Some("coverage".into()), ..Settings::default() };
    bench.ask(Request::Attach { target: Target::Pid(10), settings }).expect("it runs");
    bench.scout();
    assert_eq!(bench.list()[0].policy.as_deref(), Some("coverage"), "and not that of an earlier daemon");
}

#[test]
fn a_guest_without_an_answer_is_not_taken_by_a_rule_for_another_name() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"\n[[vm]]\nname = \"web\"\npolicy = \"off\"");
    bench.guests.start(10, "10");
    bench.guests.change(10, |guest| guest.found.no_answer = Some("does not answer: of the test".into()));
    bench.scout();
    assert_eq!((bench.managed().len(), bench.guests.guest(10).attached), (0, 0));
}

#[test]
fn a_guest_that_cannot_be_taken_up_at_once_keeps_its_settings_until_it_can() {
    let bench = begun_where(|guest| guest.attach_error = Some("its map is locked".into()));
    assert_eq!((bench.managed(), bench.state().guests.len()), (vec![], 1));
    let listed = bench.list().remove(0);
    assert!(
        matches!(&listed.care, CareView::LeftAlone { reason } if reason.ends_with("keeps trying: its map is locked")),
        "{:?}",
        listed.care
    );
    bench.guests.change(10, |guest| guest.attach_error = None);
    bench.scout();
    assert_eq!(bench.managed(), ["web"]);
    assert_eq!(bench.list()[0].policy.as_deref(), Some("greedy"));
}

#[test]
fn a_guest_that_the_configuration_names_keeps_its_settings_too_while_it_cannot_be_taken_up() {
    let earlier = not_looked_yet();
    let mut state = earlier.state();
    // A policy of a later release.
    state.guests[0].said.policy = Some("unheard-of".into());
    state::save(&state_path(earlier.folder.path()), &state).expect("the test's own folder");
    let Bench { folder, guests, pools, .. } = earlier;
    let bench = Bench::on(folder, guests, pools, "[attach]\nautomatic = \"all\"");
    bench.scout();
    assert_eq!((bench.managed(), bench.state().guests), (vec![], state.guests));
}

#[test]
fn a_guest_that_could_not_be_taken_up_and_is_attached_by_an_operator_keeps_its_other_settings() {
    let bench = begun_where(|guest| guest.attach_error = Some("its map is locked".into()));
    bench.guests.change(10, |guest| guest.attach_error = None);
    let settings = Settings { guarantee: Some("90%".into()), ..Settings::default() };
    bench.ask(Request::Attach { target: Target::Pid(10), settings }).expect("it answers by now");
    let vm = bench.list().remove(0);
    assert_eq!((vm.policy.as_deref(), vm.guarantee), (Some("greedy"), Guarantee::Coverage(9_000)));
}

#[test]
fn a_guest_that_can_never_be_taken_up_is_given_up_on_request() {
    let bench = begun_where(|guest| guest.attach_error = Some("another program manages it".into()));
    bench.ask(Request::Detach { vm: "web".into() }).expect("it is given up");
    bench.guests.change(10, |guest| guest.attach_error = None);
    bench.scout();
    assert_eq!((bench.managed(), bench.state().guests.len()), (vec![], 0));
}

#[test]
fn a_guest_that_is_being_taken_up_again_is_given_up_only_after_that() {
    let bench = begun_where(|guest| guest.attach_error = Some("its map is locked".into()));
    bench.guests.change(10, |guest| guest.attach_error = None);
    let detach = || bench.ask(Request::Detach { vm: "web".into() });
    let busy = bench.guests.guest(10).busy;
    let attaching = busy.lock();
    let refused = thread::scope(|scope| {
        scope.spawn(|| bench.scout());
        while bench.engine.table().being_attached.is_empty() {
            thread::yield_now();
        }
        let refused = detach();
        drop(attaching);
        refused
    });
    assert!(refused.expect_err("the attach would undo it").contains("ask again"));
    assert_eq!(bench.managed(), ["web"]);
    detach().expect("it is managed");
    bench.scout();
    assert_eq!((bench.managed(), bench.state().guests.len()), (vec![], 0));
}
