//! How the budget is shared out, and guarantees: reported, pursued, met.

use super::*;

#[test]
fn the_budget_goes_to_vms_with_work_and_is_never_exceeded() {
    let bench = Bench::new("[budget]\ncopy_per_second = \"1600M\"\n[[vm]]\nname = \"big\"\nweight = 3");
    for (pid, name) in [(10, "big"), (11, "small"), (12, "idle")] {
        bench.guests.start(pid, name);
        bench.attach(pid).expect("it runs");
    }
    let copies = || [10, 11, 12].map(|pid| bench.guests.guest(pid).limits.expect("it was told").copy_per_second);
    assert_eq!(copies(), [mib(960), mib(320), mib(320)]); // 3 : 1 : 1, since no VM has done anything yet
    for pid in [10, 11] {
        bench.guests.change(pid, |guest| guest.work = work(mib(2)));
    }
    bench.tick_at(1);
    assert_eq!(copies(), [mib(1125), mib(375), mib(100)]);
    bench.tick_at(2);
    assert_eq!(copies(), [mib(960), mib(320), mib(320)]);
}

#[test]
fn nothing_grows_while_the_host_is_short_or_a_vm_has_its_bloat() {
    let bench = Bench::new("[[vm]]\nname = \"web\"\nbloat_max = \"4M\"");
    for (pid, name) in [(10, "web"), (11, "db")] {
        bench.guests.start(pid, name);
        bench.attach(pid).expect("it runs");
    }
    let may_grow = || [10, 11].map(|pid| bench.guests.guest(pid).may_grow);
    bench.available.store(mib(511).get(), Ordering::Relaxed);
    bench.tick_at(1);
    assert_eq!(may_grow(), [false, false]);
    assert!(matches!(bench.ask(Request::Daemon), Ok(Answer::Daemon(daemon)) if daemon.is_host_short));
    bench.available.store(mib(1023).get(), Ordering::Relaxed);
    bench.tick_at(2);
    assert_eq!(may_grow(), [false, false]); // between the marks: unchanged
    bench.available.store(gib(1).get(), Ordering::Relaxed);
    bench.tick_at(3);
    assert_eq!(may_grow(), [true, true]);
    bench.guests.change(10, |guest| guest.work.bloat = mib(4).get());
    bench.tick_at(4);
    assert_eq!(may_grow(), [false, true]);
}

#[test]
fn bloat_under_an_earlier_daemon_counts_towards_the_limit() {
    let config = "[[vm]]\nname = \"web\"\nbloat_max = \"4M\"";
    let bench = Bench::new(config);
    bench.guests.start(10, "web");
    bench.attach(10).expect("it runs");
    bench.guests.change(10, |guest| guest.work.bloat = mib(4).get());
    bench.tick_at(1);
    bench.engine.save();
    let Bench { folder, guests, pools, .. } = bench;
    guests.change(10, |guest| guest.work.bloat = 0);
    let bench = Bench::on(folder, guests, pools, config);
    bench.tick_at(1);
    assert_eq!((bench.managed(), bench.guests.guest(10).may_grow), (vec!["web".to_owned()], false));
}

#[test]
fn a_missed_guarantee_is_in_the_view_with_its_reason_until_it_is_met() {
    let bench = Bench::new("[defaults]\nguarantee = \"95%\"\ngrace = \"10s\"");
    bench.guests.start(10, "web"); // half of it is huge
    bench.attach(10).expect("it runs");
    let notes = || bench.list().remove(0).notes;
    let is_met = || bench.engine.scrape().vms[0].is_guarantee_met;
    let pursued = "its guarantee of 95% is pursued: policy greedy, later auto again".to_owned();
    bench.tick_at(1);
    bench.tick_at(11);
    assert_eq!((notes(), is_met()), (vec![pursued.clone()], true));
    bench.tick_at(12);
    let missed = "it is below its guarantee of 95%: 1 windows: the policy has not chosen it".to_owned();
    assert_eq!((notes(), is_met()), (vec![missed, pursued.clone()], false));
    bench.guests.change(10, |guest| guest.backing.base_4k = 0);
    bench.tick_at(13);
    assert_eq!((notes(), is_met()), (vec![pursued], true));
}

#[test]
fn a_guarantee_is_pursued_with_priority_until_it_is_met() {
    let web = "[[vm]]\nname = \"web\"\nguarantee = \"95%\"";
    let still = "[[vm]]\nname = \"still\"\nguarantee = \"95%\"\npolicy = \"never\"";
    let bench = Bench::new(&format!("[budget]\ncopy_per_second = \"1600M\"\n{web}\n{still}"));
    for (pid, name) in [(10, "web"), (11, "db"), (12, "still")] {
        bench.guests.start(pid, name); // half of it is huge
        bench.attach(pid).expect("it runs");
    }
    let policies = || [10, 11, 12].map(|pid| bench.guests.guest(pid).policy.expect("it is managed").to_string());
    let is_pursued = || [0, 2].map(|n| bench.engine.scrape().vms[n].is_guarantee_pursued).to_vec();
    let weighed = ["auto", "auto", "never"].map(str::to_owned);
    for second in 1..=3 {
        bench.tick_at(second);
    }
    assert_eq!((policies(), is_pursued()), (weighed, vec![false; 2]));
    bench.tick_at(4);
    assert_eq!((policies(), is_pursued()), (["greedy", "auto", "never"].map(str::to_owned), vec![true, false]));
    let notes = bench.list().remove(0).notes;
    assert_eq!(notes, ["its guarantee of 95% is pursued: policy greedy, later auto again"]);
    let copies = || [10, 11].map(|pid| bench.guests.guest(pid).limits.expect("it was told").copy_per_second);
    assert_eq!(copies(), [mib(1500), mib(50)]); // only web counts as busy
    // A policy that an operator sets takes the place of its own one, and the guarantee is still pursued.
    bench.set("web", "thp").expect("it is managed");
    bench.tick_at(5);
    assert_eq!(policies()[0], "greedy");
    bench.guests.change(10, |guest| guest.backing.base_4k = 0);
    bench.tick_at(15);
    assert_eq!(policies()[0], "greedy");
    bench.tick_at(16);
    assert_eq!((policies()[0].as_str(), bench.list().remove(0).notes), ("thp", Vec::new()));
}
