//! Rooms in the pools: made once, kept for the next start, given back.

use super::*;

#[test]
fn a_guest_that_only_has_the_name_of_a_domain_gets_neither_its_room_nor_its_settings() {
    let bench = Bench::new("[attach]\nautomatic = [\"web\"]\n[[vm]]\nname = \"web\"\npolicy = \"greedy\"");
    bench.ask(prepare("00000000-0000-0000-0000-000000000010", 60)).expect("there is room");
    bench.guests.start(10, "web"); // and has that UUID
    bench.guests.change(10, |guest| guest.found.is_name_anothers = true);
    bench.scout();
    assert!(bench.managed().is_empty(), "the pattern is for the domain");
    bench.attach(10).expect("it runs");
    assert_eq!(bench.list()[0].policy.as_deref(), Some("auto"), "so is the rule");
    assert!(!bench.state().rooms[0].has_started, "and the room");
    bench.guests.start_domain(11, "web");
    bench.ask(started(11, "web", None)).expect("it runs");
    assert!(bench.set("web", "off").expect_err("which?").contains("name one by its process id (10, 11)"));
    assert_eq!(bench.list()[1].policy.as_deref(), Some("greedy"));
    bench.scout();
    assert_eq!(bench.state().rooms[0].process.map(|process| process.pid), Some(11));
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.tick_at(1);
    bench.scout();
    assert_eq!(bench.pools.now().growth_left, 40, "its end is not that of the domain");
}

#[test]
fn a_room_belongs_to_the_process_that_the_hook_reports() {
    let bench = Bench::new("[attach]\nautomatic = \"none\"");
    bench.guests.start(10, "web");
    bench.ask(prepare("u-web", 60)).expect("there is room");
    bench.ask(started(10, "web", None)).expect("it runs");
    assert!(bench.managed().is_empty());
    let Ok(Answer::Rooms(rooms)) = bench.ask(Request::Rooms) else { panic!("rooms are asked for") };
    assert_eq!((rooms.len(), rooms[0].has_started, rooms[0].kept(2 << 20, None)), (1, true, 0));
    bench.scout();
    assert_eq!(bench.pools.now().growth_left, 40);
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.scout();
    assert_eq!(bench.pools.now().growth_left, 100);
}

#[test]
fn the_state_file_has_the_same_rooms_as_the_daemons_answer() {
    let bench = Bench::new("");
    bench.ask(prepare("u", 60)).expect("there is room");
    let Ok(Answer::Rooms(rooms)) = bench.ask(Request::Rooms) else { panic!("rooms are asked for") };
    let file = std::fs::read(state_path(bench.folder.path())).expect("it is saved");
    let file: serde_json::Value = serde_json::from_slice(&file).expect("JSON");
    let read: Vec<wideleaf_control::protocol::RoomView> = serde_json::from_value(file["rooms"].clone()).expect("rooms");
    assert_eq!((read, rooms[0].kept(2 << 20, Some(3)), rooms[0].kept(1 << 30, None)), (rooms.clone(), 60, 0));
}

#[test]
fn a_domain_that_starts_while_the_scout_attaches_another_keeps_its_room() {
    let bench = Bench::new("[attach]\nautomatic = [\"slow\"]");
    bench.guests.start(10, "slow");
    let busy = bench.guests.guest(10).busy;
    let attaching = busy.lock();
    thread::scope(|scope| {
        let scouting = scope.spawn(|| bench.engine.scout());
        while bench.engine.table().being_attached.is_empty() {
            thread::yield_now();
        }
        bench.ask(prepare("u-web", 60)).expect("there is room");
        bench.guests.start_domain(11, "web");
        bench.ask(started(11, "web", None)).expect("it runs");
        drop(attaching);
        scouting.join().expect("it does not panic").expect("its guests are seen");
    });
    assert_eq!((bench.state().rooms.len(), bench.pools.now().growth_left), (1, 40));
    bench.guests.change(11, |guest| guest.has_ended = true);
    bench.scout();
    assert_eq!((bench.state().rooms.len(), bench.pools.now().growth_left), (0, 100));
}

#[test]
fn room_for_a_domain_is_made_once_and_goes_back_when_it_is_released() {
    let bench = Bench::new("");
    for _ in 0..2 {
        assert_eq!(bench.ask(prepare("u", 60)), Ok(Answer::Done));
        assert_eq!(bench.pools.now().growth_left, 40);
    }
    assert_eq!(bench.ask(prepare("v", 60)), Err("no room for web: 60 pages are missing, 40 can be made".into()));
    assert_eq!(bench.ask(release("u")), Ok(Answer::Done));
    assert_eq!(bench.ask(release("u")), Ok(Answer::Done)); // it has none any more
    assert_eq!((bench.pools.now().growth_left, bench.state().rooms.len()), (100, 0));
}

#[test]
fn room_goes_back_when_its_vm_ends_without_a_release() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(prepare("00000000-0000-0000-0000-000000000010", 60)).expect("there is room");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.tick_at(1);
    assert_eq!(bench.pools.now().growth_left, 40, "the tick waits for no pool");
    bench.scout();
    assert_eq!(bench.pools.now().growth_left, 100);
}

#[test]
fn pages_stay_promised_to_a_domain_while_its_process_may_still_be_taking_them() {
    let bench = Bench::new("[attach]\nautomatic = [\"web\"]");
    bench.ask(prepare("u-web", 60)).expect("there is room");
    bench.guests.start_domain(10, "web");
    bench.scout();
    assert_eq!(bench.managed().len(), 1);
    let refused = bench.ask(prepare_domain("db", "u-db", 60)).expect_err("sixty are promised, forty can be made");
    assert!(refused.contains("60 pages are missing, 40 can be made"), "{refused}");
    bench.ask(started(10, "web", None)).expect("it runs");
    assert!(bench.state().rooms[0].has_started, "all of its pages are in use");
}

#[test]
fn room_of_a_detached_vm_stays_until_it_ends() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(prepare("00000000-0000-0000-0000-000000000010", 60)).expect("there is room");
    bench.attach(10).expect("it runs");
    bench.ask(Request::Detach { vm: "web".into() }).expect("it is managed");
    bench.scout();
    assert_eq!(bench.pools.now().growth_left, 40);
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.scout();
    assert_eq!(bench.pools.now().growth_left, 100);
}

#[test]
fn a_new_daemon_gives_back_the_room_of_ended_domains_and_keeps_the_rest() {
    let bench = Bench::new("");
    for (pid, name, pages) in [(10, "stays", 10), (11, "goes", 20)] {
        bench.guests.start_domain(pid, name);
        bench.ask(prepare_domain(name, &format!("u-{pid}"), pages)).expect("there is room");
    }
    bench.ask(prepare("starting", 40)).expect("there is room");
    bench.scout();
    assert_eq!(bench.pools.now().growth_left, 30);
    bench.guests.change(11, |guest| guest.has_ended = true);
    let bench = bench.restarted();
    assert_eq!((bench.pools.now().growth_left, bench.state().rooms.len()), (50, 2));
}

#[test]
fn room_for_the_next_start_of_a_domain_is_kept_when_its_last_process_ends() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.has_ended = true);
    bench.ask(prepare("00000000-0000-0000-0000-000000000010", 60)).expect("there is room");
    bench.tick_at(1);
    assert_eq!((bench.managed().len(), bench.pools.now().growth_left), (0, 40));
}

#[test]
fn room_that_cannot_be_given_back_at_once_is_given_back_later() {
    let bench = Bench::new("");
    bench.ask(prepare("u", 60)).expect("there is room");
    bench.pools.set_free(0); // another process took its pages
    bench.ask(release("u")).expect("it is tried");
    assert_eq!((bench.pools.now().growth_left, bench.state().rooms.len()), (40, 1));
    bench.pools.set_free(60);
    bench.scout();
    assert_eq!((bench.pools.now().growth_left, bench.state().rooms.len()), (100, 0));
}

#[test]
fn without_a_list_of_processes_nothing_is_given_back_or_forgotten() {
    let bench = Bench::new("");
    bench.guests.start_domain(10, "web");
    bench.ask(prepare("00000000-0000-0000-0000-000000000010", 60)).expect("there is room");
    bench.attach(10).expect("it runs");
    bench.guests.hide(true);
    assert_eq!(bench.engine.scout(), Err("cannot list processes".into()));
    assert_eq!(bench.engine.resume(), Err("cannot list processes".into()));
    assert_eq!((bench.managed().len(), bench.pools.now().growth_left), (1, 40));
}

#[test]
fn a_guarantee_beyond_the_hosts_ordinary_memory_is_refused_and_leaves_nothing() {
    let bench = Bench::new("[host]\nlow_free = \"1G\"");
    bench.available.store(gib(25).get(), Ordering::Relaxed);
    let of_gib = |all: u64, large: u64, pages: Vec<PoolRequest>| {
        let ordinary = Some(OrdinaryMemory { bytes: gib(all).get(), large_bytes: gib(large).get() });
        bench.ask(Request::Prepare { domain: "web".into(), uuid: "u".into(), pages, ordinary })
    };
    let error = of_gib(2000, 1900, Vec::new()).expect_err("it has 25");
    let why = "of ordinary memory have to be in large pages, and 24 GiB are above host.low_free";
    assert!(error.starts_with("no room for web: ") && error.contains(why), "{error}");
    assert_eq!(bench.state().rooms, []);
    assert_eq!(of_gib(25, 24, Vec::new()), Ok(Answer::Done));
    // Pages of the pool are made of the remaining memory.
    let pages = vec![PoolRequest { page_bytes: 2 << 20, pages: 10, node: None, nodes: Vec::new() }];
    let error = of_gib(25, 24, pages).expect_err("nothing is left");
    assert!(error.contains("20 MiB are needed and 0 B are above host.low_free"), "{error}");
}

#[test]
fn a_domain_leaves_the_host_its_reserve() {
    let bench = Bench::new("[host]\nlow_free = \"1G\"");
    bench.available.store((gib(1) + mib(100)).get(), Ordering::Relaxed);
    assert!(bench.ask(prepare("u", 51)).expect_err("102 MiB").contains("100 MiB are above host.low_free"));
    assert_eq!(bench.ask(prepare("u", 50)), Ok(Answer::Done));
}
