//! Guests that a client has left alone for a time.

use wideleaf_control::protocol::LEFT_ALONE_S_MAX;

use super::*;
use crate::engine::vm::LeftAloneUntil;

#[test]
fn a_guest_is_left_alone_until_the_time_is_over_or_a_client_ends_it() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    let ask = |for_s| bench.ask(Request::LeaveAlone { vm: "web".into(), for_s });
    let care = || bench.list()[0].care.clone();
    assert!(ask(60).expect_err("it is unmanaged").contains("web is not managed"));
    bench.attach(10).expect("it runs");
    assert!(matches!(ask(60), Ok(Answer::Vm(view)) if matches!(view.care, CareView::LeftAlone { .. })));
    bench.engine.end_of_leaving_alone(Instant::now() + Duration::from_secs(59));
    bench.tick_at(1);
    assert!(matches!(care(), CareView::LeftAlone { .. }));
    bench.engine.end_of_leaving_alone(Instant::now() + Duration::from_secs(61));
    bench.tick_at(2);
    assert_eq!(care(), CareView::Managed);
    ask(60).expect("it is managed");
    assert!(matches!(ask(0), Ok(Answer::Vm(view)) if view.care == CareView::Managed));
    assert!(ask(3601).expect_err("too long").contains("at most 3600 s"));
    let mut own = own_view(11);
    own.pid = ROOT.pid;
    bench.ask(Request::Register { vm: own, live: LiveReport::default() }).expect("it runs");
    let of_a_run = bench.ask(Request::LeaveAlone { vm: "ours".into(), for_s: 1 });
    assert!(of_a_run.expect_err("it has its own manager").contains("manages itself"));
    let unprivileged = bench.ask_as(UNPRIVILEGED, Request::LeaveAlone { vm: "web".into(), for_s: 1 });
    assert!(unprivileged.expect_err("a change").contains("may only read"));
}

#[test]
fn a_guest_that_is_attached_again_is_left_alone_as_long_as_a_client_asked() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    bench.guests.start_domain(10, "web");
    bench.scout();
    bench.ask(Request::LeaveAlone { vm: "web".into(), for_s: 60 }).expect("it is managed");
    bench.ask(started_with_monitor(10, "web", "greedy")).expect("it runs");
    assert_eq!(bench.guests.guest(10).attached, 2);
    assert!(matches!(bench.list()[0].care, CareView::LeftAlone { .. }));
    bench.engine.end_of_leaving_alone(Instant::now() + Duration::from_secs(61));
    bench.tick_at(1);
    assert_eq!(bench.list()[0].care, CareView::Managed);
}

#[test]
fn a_guest_that_is_left_alone_stays_so_under_the_next_daemon_for_the_rest_of_the_time() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    let ask = |bench: &Bench, for_s| {
        bench.ask(Request::LeaveAlone { vm: "web".into(), for_s }).expect("it is managed");
    };
    ask(&bench, 60);
    // Killed right after the answer.
    let bench = bench.restarted();
    assert!(matches!(bench.list()[0].care, CareView::LeftAlone { .. }));
    bench.engine.end_of_leaving_alone(Instant::now() + Duration::from_secs(61));
    bench.tick_at(1);
    assert_eq!(bench.list()[0].care, CareView::Managed);
    ask(&bench, 60);
    ask(&bench, 0);
    assert_eq!(bench.restarted().list()[0].care, CareView::Managed);
}

#[test]
fn a_clock_that_was_set_back_leaves_no_guest_alone_for_longer_than_a_client_may_ask_for() {
    assert_eq!(LeftAloneUntil::noted(0), None, "its time has passed");
    let until = LeftAloneUntil::noted(u64::MAX).expect("its time has not come");
    assert!(until.is_over(Instant::now() + Duration::from_secs(LEFT_ALONE_S_MAX)));
}
