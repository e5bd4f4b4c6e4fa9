//! What the next daemon knows of the one before: its guests, their settings and counters. After any events the books
//! balance.

use proptest::prelude::*;

use super::*;

#[test]
fn nothing_is_changed_before_the_state_of_an_earlier_daemon_is_read() {
    let bench = Bench::new("");
    *bench.engine.saved.lock() = Saved::NotYetRead;
    let error = bench.ask(prepare("u", 60)).expect_err("the file could not be written");
    assert!(error.contains("is not read yet: try again"), "{error}");
    assert_eq!((bench.pools.now().growth_left, bench.engine.rooms().len()), (100, 0));
}

#[test]
fn guests_that_are_not_taken_up_yet_stay_in_the_state() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    let (state, bench) = (bench.state(), bench.restarted());
    bench.engine.forget(bench.guests.guest(10).found.process, "is not taken up yet");
    bench.engine.adopt(state);
    bench.ask(prepare("u", 60)).expect("there is room");
    assert_eq!(bench.state().guests.len(), 1);
}

#[test]
fn a_killed_daemon_comes_back_with_its_state() {
    let bench = Bench::new("");
    for (pid, name) in [(10, "web"), (11, "db"), (12, "gone"), (13, "left")] {
        bench.guests.start(pid, name);
        bench.attach(pid).expect("it runs");
    }
    bench.set("web", "off").expect("it is managed");
    bench.ask(Request::Detach { vm: "left".into() }).expect("it is managed");
    bench.guests.change(11, |guest| guest.work = work(mib(6)));
    bench.tick_at(10);
    bench.guests.change(11, |guest| guest.work = work(Bytes::ZERO)); // its next manager counts from zero
    bench.guests.change(12, |guest| guest.has_ended = true);

    let bench = bench.restarted();
    assert_eq!(bench.managed(), ["web", "db"]);
    assert_eq!(bench.list()[0].policy.as_deref(), Some("off"));
    bench.guests.change(11, |guest| guest.work = work(mib(2)));
    bench.tick_at(1);
    assert_eq!(bench.list()[1].work.as_ref().map(|work| work.copied), Some(mib(8).get()));
    let counted = bench.engine.scrape().vms.remove(1).counted.expect("it is managed");
    assert_eq!(counted.copied, mib(2).get(), "a scraped counter begins at zero, as for a process that starts");
    assert_eq!(bench.state().left.len(), 1);
}

#[test]
fn a_reused_process_id_is_another_guest() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.found.process.started_at += 1);
    assert!(bench.restarted().managed().is_empty());
}

#[test]
fn guests_are_left_as_they_are_at_the_end() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.engine.stop(Duration::from_secs(60));
    assert_eq!((bench.guests.guest(10).stopped, bench.state().guests.len()), (1, 1));
    // A request that is late leaves the state as it is.
    bench.scout();
    assert_eq!(bench.state().guests.len(), 1);
}

/// An event on a host; they come in any order.
#[derive(Clone, Debug)]
enum Event {
    Starts(u32),
    Ends(u32),
    Attach(u32),
    Detach(u32),
    Prepare(u32),
    Release(u32),
    Tick,
    Scout,
    Restart,
}

fn any_event() -> impl Strategy<Value = Event> {
    let pid = 10..14_u32;
    prop_oneof![
        pid.clone().prop_map(Event::Starts),
        pid.clone().prop_map(Event::Ends),
        pid.clone().prop_map(Event::Attach),
        pid.clone().prop_map(Event::Detach),
        pid.clone().prop_map(Event::Prepare),
        pid.prop_map(Event::Release),
        Just(Event::Tick),
        Just(Event::Scout),
        Just(Event::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every managed guest runs, no room is lost, and the file agrees with the table, whatever happens.
    #[test]
    fn after_any_events_the_books_balance(events in proptest::collection::vec(any_event(), 0..30)) {
        let mut bench = Bench::new("");
        let uuid = |pid: u32| format!("00000000-0000-0000-0000-{pid:012}");
        let mut known: BTreeSet<u32> = BTreeSet::new();
        for event in events {
            match event {
                Event::Starts(pid) => {
                    if known.insert(pid) {
                        bench.guests.start_domain(pid, &format!("vm-{pid}"));
                    }
                }
                Event::Ends(pid) if known.contains(&pid) => bench.guests.change(pid, |guest| guest.has_ended = true),
                Event::Ends(_) => {}
                Event::Attach(pid) => drop(bench.attach(pid)),
                Event::Detach(pid) => drop(bench.ask(Request::Detach { vm: pid.to_string() })),
                Event::Prepare(pid) => drop(bench.ask(prepare_domain(&format!("vm-{pid}"), &uuid(pid), 30))),
                Event::Release(pid) => drop(bench.ask(release(&uuid(pid)))),
                Event::Tick => bench.tick_at(1),
                Event::Scout => bench.scout(),
                Event::Restart => bench = bench.restarted(),
            }
        }
        bench.tick_at(100);
        for view in bench.engine.views() {
            prop_assert!(!bench.guests.guest(view.pid).has_ended);
        }
        let state = bench.state();
        prop_assert_eq!(state.guests.len(), bench.managed().len());
        let grown = state.rooms.iter().flat_map(|room| &room.grown);
        let grown: u64 = grown.map(wideleaf_memory::pool::Granted::pages).sum();
        prop_assert_eq!(bench.pools.now().growth_left + grown, 100);
    }
}
