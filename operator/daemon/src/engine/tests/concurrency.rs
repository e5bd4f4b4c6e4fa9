//! Requests that come while others are under way: none waits for a guest of another, and none is lost.

use super::*;

#[test]
fn a_long_request_to_one_guest_delays_neither_the_tick_nor_a_registration() {
    let bench = Bench::new("");
    let web = bench.guests.start(10, "web");
    bench.guests.start(11, "db");
    for pid in [10, 11] {
        bench.attach(pid).expect("it runs");
    }
    let busy = bench.guests.guest(10).busy;
    let asking = busy.lock();
    thread::scope(|scope| {
        let explained = scope.spawn(|| bench.ask(Request::Explain { vm: "web".into() }));
        let care = bench.engine.table().vms[&web].care().expect("it is attached");
        while care.try_lock().is_some() {
            thread::yield_now();
        }
        for pid in [10, 11] {
            bench.guests.change(pid, |guest| guest.work = work(mib(6)));
        }
        bench.available.store(mib(1).get(), Ordering::Relaxed);
        bench.tick_at(1);
        bench.ask(Request::Register { vm: own_view(1), live: LiveReport::default() }).expect("it registers");
        let copied: Vec<u64> = bench.engine.views().iter().flat_map(|vm| &vm.work).map(|work| work.copied).collect();
        assert_eq!(copied, [0, mib(6).get()], "web has its earlier view");
        assert_eq!([10, 11].map(|pid| bench.guests.guest(pid).may_grow), [true, false]);
        drop(asking);
        assert!(explained.join().expect("it does not panic").is_ok());
    });
    bench.tick_at(2);
    assert!(!bench.guests.guest(10).may_grow, "it gets the change as soon as it is free");
}

#[test]
fn a_guest_with_a_long_survey_is_listed_by_its_name_and_delays_no_list() {
    let bench = Bench::new("");
    bench.guests.start(10, "web");
    bench.guests.start(11, "huge");
    let busy = bench.guests.guest(11).busy;
    let looking = busy.lock();
    let vms = bench.list();
    assert_eq!((vms[0].name.as_str(), huge_2m(&vms[0])), ("web", mib(2).get()));
    assert!(vms[1].name == "huge" && vms[1].notes[0].contains("survey is still under way"), "{:?}", vms[1]);
    drop(looking);
    while huge_2m(&bench.list()[1]) == 0 {
        thread::yield_now();
    }
}

#[test]
fn the_last_shares_sent_are_the_last_ones_computed() {
    let bench = Bench::new("");
    let first = bench.guests.start(10, "web");
    bench.guests.start(11, "db");
    for pid in [10, 11] {
        bench.attach(pid).expect("it runs");
    }
    let share = |bytes: Bytes| {
        bench.engine.table().config.budget.copy_per_second = bytes;
        bench.engine.share_out();
    };
    let deaf = bench.guests.guest(10).deaf;
    let telling = deaf.lock();
    let told = || bench.guests.guest(11).limits.expect("it was told").copy_per_second;
    thread::scope(|scope| {
        scope.spawn(|| share(mib(100)));
        let care = bench.engine.table().vms[&first].care().expect("it is attached");
        while care.try_lock().is_some() {
            thread::yield_now();
        }
        scope.spawn(|| share(mib(200)));
        // A thread that does not wait for the first one has called db by then; the first is still at web.
        for _ in 0..1_000 {
            thread::sleep(Duration::from_micros(100));
            if told() >= mib(90) {
                break;
            }
        }
        drop(telling);
    });
    assert!(told() > mib(90) && told() <= mib(100), "half of 200 MiB, and not of 100: {}", told());
}

#[test]
fn concurrent_reads_and_changes_do_not_deadlock() {
    let bench = Bench::new("[attach]\nautomatic = \"all\"");
    for pid in 10..20 {
        bench.guests.start(pid, &format!("vm-{pid}"));
    }
    thread::scope(|scope| {
        scope.spawn(|| (0..50).for_each(|second| bench.tick_at(second)));
        scope.spawn(|| (0..50).for_each(|_| bench.scout()));
        scope.spawn(|| (0..50).for_each(|n| drop(bench.set(&format!("vm-{}", 10 + n % 10), "off"))));
        scope.spawn(|| (0..50).for_each(|n| drop(bench.ask(Request::Detach { vm: format!("vm-{}", 10 + n % 10) }))));
        scope.spawn(|| (0..50).for_each(|_| drop(bench.ask(Request::List))));
    });
    assert!(bench.managed().len() <= 10);
    for pid in 10..20 {
        let guest = bench.guests.guest(pid);
        let is_managed = bench.managed().contains(&guest.found.name);
        assert_eq!(guest.attached - guest.stopped, u32::from(is_managed), "{}", guest.found.name);
    }
}
