//! The monitor of several guests on captured files of DAMON in a temporary folder: the kernel's DAMON is not touched.

use super::*;
use crate::sensors::damon::fake_tree::{BASE, add_region, add_target, put, said, say, tree};
use crate::sensors::damon::{give_back_left_behind, kdamonds, probe};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::fs;
use tempfile::TempDir;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange};

/// Times at which a test need not wait.
const QUICK: Times = Times {
    first: Duration::from_millis(1),
    every: Duration::from_millis(1),
    turn: Duration::from_secs(3600),
    retry: Duration::from_millis(1),
};
const TIMEOUT: Duration = Duration::from_secs(60);

fn this_process() -> Arc<ProcessHost> {
    Arc::new(ProcessHost::open(std::process::id()).expect("a process may open itself"))
}

/// Four windows of RAM.
fn ram() -> [RamRange; 1] {
    [RamRange { gpa: GpaRange::new(Gpa::new(0), mib(8)).expect("it fits"), hva: Hva::new(BASE) }]
}

/// The files of a kdamond for this number of guests with the RAM of [`ram`].
fn tree_for(guests: usize) -> TempDir {
    let root = tree("0\n", "vaddr\nfvaddr\npaddr\n", &[]);
    for target in 0..guests * 2 {
        add_target(&root, target, if target % 2 == 0 { 1 } else { 4 });
    }
    root
}

/// Puts these results into the tree, guest by guest, in MiB from the base on.
fn put_results(root: &TempDir, guests: &[&[(u64, u64, &str)]]) {
    let separator = (SEPARATOR.0.get(), SEPARATOR.1.get());
    let at = |mib: u64| BASE + (mib << 20);
    let parts = guests.iter().flat_map(|regions| {
        let regions = regions.iter().map(|(start, end, accesses)| ((at(*start), at(*end)), *accesses));
        [(separator, "0\n")].into_iter().chain(regions)
    });
    parts.enumerate().for_each(|(number, (range, accesses))| add_region(root, number, range, accesses));
}

/// Waits for a condition.
fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn rates(watch: &Watch) -> Vec<Option<(u32, u64)>> {
    let heat = watch.latest().expect("there is a reading").heat;
    let of = |window: u64| heat.of_window(Hva::new(BASE + (window << 21)));
    (0..4).map(|window| of(window).map(|heat| (heat.rate.get(), heat.windows))).collect()
}

#[test]
fn each_guest_gets_its_own_part_of_the_results_also_at_equal_addresses() {
    let root = tree_for(2);
    put_results(&root, &[&[(0, 2, "10\n"), (2, 8, "0\n")], &[(0, 6, "0\n"), (6, 8, "3\n")]]);
    let monitor = GuestMonitor::at(root.path(), QUICK);
    let (one, another) = (monitor.watch(this_process(), &ram()), monitor.watch(this_process(), &ram()));
    eventually("both are read", || one.latest().is_some() && another.latest().is_some());
    // The first turn may have had one guest alone. The results of two are refused then, and the other comes first next.
    let mut of_both = [rates(&one), rates(&another)];
    of_both.sort_unstable();
    let idle_at_first = vec![Some((0, 3)), Some((0, 3)), Some((0, 3)), Some((3_000, 1))];
    assert_eq!(of_both, [idle_at_first, vec![Some((10_000, 1)), Some((0, 3)), Some((0, 3)), Some((0, 3))]]);
    let number = one.latest().expect("a reading").number;
    eventually("there are newer readings", || one.latest().is_some_and(|latest| latest.number > number + 3));
    assert_eq!((one.why_not(), another.why_not()), (None, None));
    drop(one);
    assert_eq!(said(&root, "nr_kdamonds"), "1", "the other guest is still watched");
    drop(another);
    assert_eq!((said(&root, "nr_kdamonds"), said(&root, "0/state")), ("0".into(), "off".into()));
}

#[test]
fn a_guest_is_told_to_the_kernel_by_its_process_its_whole_windows_and_the_owner_before_it() {
    let root = tree_for(1);
    put_results(&root, &[&[(0, 8, "0\n")]]);
    let monitor = GuestMonitor::at(root.path(), QUICK);
    let watch = monitor.watch(this_process(), &ram());
    eventually("it is read", || watch.latest().is_some());
    let own = std::process::id().to_string();
    let said_in = |file: &str| said(&root, &format!("0/contexts/0/{file}"));
    for (file, text) in [
        ("operations", "fvaddr"),
        ("monitoring_attrs/intervals/sample_us", "250000"),
        ("monitoring_attrs/intervals/aggr_us", "2500000"),
        ("monitoring_attrs/nr_regions/min", "10"),
        ("monitoring_attrs/nr_regions/max", "40"),
        ("schemes/0/action", "stat"),
        ("schemes/0/apply_interval_us", "250000"),
        ("targets/nr_targets", "2"),
        ("targets/0/pid_target", &own),
        ("targets/0/regions/0/start", "4096"),
        ("targets/0/regions/0/end", "8192"),
        ("targets/1/pid_target", &own),
        ("targets/1/regions/nr_regions", "4"),
        ("targets/1/regions/3/start", &(BASE + (6 << 20)).to_string()),
        ("targets/1/regions/3/end", &(BASE + (8 << 20)).to_string()),
    ] {
        assert_eq!(said_in(file), text, "{file}");
    }
}

/// The state after a daemon with the start time 77 was killed while its guests run.
fn left_behind() -> TempDir {
    let root = tree_for(1);
    let monitor = GuestMonitor::at(root.path(), QUICK);
    put_results(&root, &[&[(0, 8, "0\n")]]);
    let watch = monitor.watch(this_process(), &ram());
    eventually("it is read", || watch.latest().is_some());
    drop(watch);
    for (file, text) in [("nr_kdamonds", "1\n"), ("0/state", "on\n")] {
        say(&root, file, text);
    }
    say(&root, "0/contexts/0/targets/0/pid_target", "4711\n");
    say(&root, "0/contexts/0/schemes/0/access_pattern/age/max", &format!("{}\n", (1_u32 << 31) + 77));
    root
}

fn add_process(root: &TempDir, started_at: u64) {
    let folder = root.path().join("proc/4711");
    fs::create_dir_all(&folder).expect("a folder");
    let fields = format!("4711 (wideleafd) S {}{started_at} 0\n", "0 ".repeat(18));
    fs::write(folder.join("stat"), fields).expect("a file");
    fs::write(folder.join("comm"), "wideleafd\n").expect("a file");
}

#[test]
fn a_monitor_that_still_runs_for_a_killed_owner_is_given_back() {
    let root = left_behind();
    assert!(probe(root.path()).is_ok());
    assert!(give_back_left_behind(root.path()).expect("its owner is gone"));
    assert_eq!((said(&root, "nr_kdamonds"), said(&root, "0/state")), ("0".into(), "off".into()));
    assert!(!give_back_left_behind(root.path()).expect("nothing is left"));
}

#[test]
fn a_process_with_the_id_of_a_killed_owner_does_not_protect_its_monitor() {
    let root = left_behind();
    add_process(&root, 78);
    assert!(give_back_left_behind(root.path()).expect("its owner is gone"));
    assert_eq!(said(&root, "nr_kdamonds"), "0");
}

#[test]
fn a_monitor_of_a_live_owner_is_refused_with_the_owners_name_and_left_alone() {
    let root = left_behind();
    add_process(&root, 77);
    let refused = give_back_left_behind(root.path()).expect_err("its owner lives").to_string();
    assert!(refused.contains("wideleafd (process 4711) has 1 DAMON threads"), "{refused}");
    let monitor = GuestMonitor::at(root.path(), QUICK);
    let watch = monitor.watch(this_process(), &ram());
    eventually("it is refused", || watch.why_not().is_some_and(|why| why.contains("wideleafd (process 4711)")));
    assert_eq!((said(&root, "nr_kdamonds"), said(&root, "0/state")), ("1\n".into(), "on\n".into()));
    // Once the owner has ended, the next attempt gets it.
    fs::remove_dir_all(root.path().join("proc/4711")).expect("it is there");
    eventually("it is read", || watch.latest().is_some() && watch.why_not().is_none());
    drop(watch);
    assert_eq!(said(&root, "nr_kdamonds"), "0");
}

#[test]
fn a_monitor_of_another_program_is_refused_and_left_alone() {
    for (file, text) in [
        ("nr_kdamonds", "2\n"),
        ("0/contexts/0/operations", "paddr\n"),
        ("0/contexts/0/monitoring_attrs/intervals/sample_us", "5000\n"),
        ("0/contexts/0/schemes/0/action", "pageout\n"),
    ] {
        let root = left_behind();
        say(&root, file, text);
        let refused = give_back_left_behind(root.path()).expect_err("it is another program's").to_string();
        assert!(refused.contains("another program"), "{file}: {refused}");
        assert_eq!(said(&root, "0/state"), "on\n", "{file}");
    }
}

#[test]
fn two_wideleaf_processes_do_not_set_it_up_at_the_same_time() {
    let root = tree_for(1);
    let first = Kdamonds::claim(root.path(), &KINDS).expect("it is free");
    let second = Kdamonds::claim(root.path(), &KINDS);
    assert!(matches!(second, Err(DamonError::InUse { kdamonds: 1, .. })), "{second:?}");
    drop(first);
    assert!(Kdamonds::claim(root.path(), &KINDS).is_ok());
}

#[test]
fn where_the_kernel_has_no_monitor_the_thread_ends_and_every_guest_gets_the_reason() {
    let physical_only = tree("0\n", "paddr\n", &[]);
    let nothing = tempfile::tempdir().expect("a folder");
    for (root, why) in [(physical_only, "CONFIG_DAMON_VADDR"), (nothing, "CONFIG_DAMON_SYSFS")] {
        let monitor = GuestMonitor::at(root.path(), QUICK);
        let first = monitor.watch(this_process(), &ram());
        eventually("it is refused", || first.why_not().is_some_and(|said| said.contains(why)));
        eventually("the thread ends", || !monitor.state.lock().is_running);
        let later = monitor.watch(this_process(), &ram());
        assert!(later.why_not().is_some_and(|said| said.contains(why)) && !monitor.state.lock().is_running);
        assert!(first.latest().is_none() && later.latest().is_none());
    }
}

#[test]
fn a_file_that_another_program_removes_for_a_moment_is_no_reason_to_give_up() {
    for file in ["0/contexts/nr_contexts", "0/contexts/0/targets/1/pid_target"] {
        let root = tree_for(1);
        put_results(&root, &[&[(0, 8, "0\n")]]);
        fs::remove_file(root.path().join(kdamonds::KDAMONDS).join(file)).expect("it was there");
        let watch = GuestMonitor::at(root.path(), QUICK).watch(this_process(), &ram());
        eventually("it is refused", || watch.why_not().is_some_and(|why| why.contains(file)));
        put(&root, file, "0\n");
        eventually("it is read", || watch.latest().is_some());
    }
}

#[test]
fn results_of_other_targets_are_refused_and_the_monitor_is_given_back() {
    let root = tree_for(1);
    put_results(&root, &[&[(0, 8, "5\n")], &[(0, 8, "5\n")]]);
    let times = Times { retry: Duration::from_secs(3600), ..QUICK };
    let watch = GuestMonitor::at(root.path(), times).watch(this_process(), &ram());
    eventually("it is refused", || {
        watch.why_not().is_some_and(|why| why.contains("2 ranges of processes instead of 1"))
    });
    eventually("it is given back", || said(&root, "nr_kdamonds") == "0");
    assert!(watch.latest().is_none());
}

#[test]
fn a_module_of_the_kernel_that_runs_it_is_named() {
    let root = tree_for(1);
    let own = Kdamonds::claim(root.path(), &KINDS).expect("it is free");
    let parameter = root.path().join("sys/module/damon_stat/parameters/enabled");
    fs::create_dir_all(parameter.parent().expect("a folder")).expect("a folder");
    let busy = |errno| kdamonds::file_error(Path::new("state"))(std::io::Error::from_raw_os_error(errno));
    let named = |text: &str, errno| {
        fs::write(&parameter, text).expect("a file");
        own.named(busy(errno)).to_string()
    };
    assert!(named("Y\n", libc::EBUSY).contains("write N to /sys/module/damon_stat/parameters/enabled"));
    assert!(!named("N\n", libc::EBUSY).contains("damon_stat"));
    assert!(!named("Y\n", libc::EINVAL).contains("damon_stat"));
    put(&root, "0/state", "off\n");
}

fn guest(ranges: &[RamRange]) -> Arc<Guest> {
    let process = this_process();
    let key = ProcessKey::of(Path::new("/proc"), process.pid());
    Arc::new(Guest { process, key, ranges: ranges.to_vec(), latest: Mutex::default() })
}

#[test]
fn where_there_are_more_guests_than_a_turn_has_each_gets_its_turn() {
    let all: Vec<_> = (0..GUESTS_MOST + 2).map(|_| guest(&ram())).collect();
    let place = |of: &Arc<Guest>| all.iter().position(|guest| Arc::ptr_eq(guest, of)).expect("it is one of them");
    let turn = || {
        let turn = next_turn(&all);
        turn.iter().for_each(|guest| guest.latest.lock().watched_at = Some(Instant::now()));
        turn.iter().map(place).collect::<Vec<_>>()
    };
    assert_eq!(turn(), (0..GUESTS_MOST).collect::<Vec<_>>());
    assert!(all[GUESTS_MOST].latest.lock().why_not.as_ref().is_some_and(|why| why.contains("its turn comes")));
    assert_eq!(turn()[..2], [GUESTS_MOST, GUESTS_MOST + 1]);
}

#[test]
fn guests_with_much_plugged_memory_share_a_bound_on_ranges_and_leave_none_to_waste() {
    let plugged = |ranges: u64| {
        let range = |number: u64| RamRange {
            gpa: GpaRange::new(Gpa::new(number << 32), mib(128 + number)).expect("it fits"),
            hva: Hva::new(BASE + (number << 32)),
        };
        guest(&(0..ranges).map(range).collect::<Vec<_>>())
    };
    let regions = |turn: &[Arc<Guest>]| {
        let targets = setup(turn).targets.into_iter().skip(1).step_by(2);
        targets.map(|target| target.regions).collect::<Vec<_>>()
    };
    let all_large = regions(&[(); GUESTS_MOST].map(|()| plugged(256)));
    let sum = all_large.iter().map(Vec::len).sum::<usize>() as u64;
    assert!(sum + GUESTS_MOST as u64 <= 400, "{sum}");
    let starts = |regions: &[(Hva, Hva)]| regions.iter().map(|region| region.0.get() >> 32).collect::<BTreeSet<_>>();
    let largest: BTreeSet<u64> = (252..256).map(|number| (BASE >> 32) + number).collect();
    assert_eq!(starts(&all_large[0]), largest);
    let mut turn: Vec<_> = (1..GUESTS_MOST).map(|_| plugged(1)).collect();
    turn.push(plugged(256));
    assert_eq!(starts(&regions(&turn)[GUESTS_MOST - 1]).len(), RANGES_MOST - (GUESTS_MOST - 1));
}

proptest! {
    #[test]
    fn the_kernels_work_does_not_grow_with_ram(sizes in prop::collection::vec(1_u64..=(16 << 19), 1..=16)) {
        let ram = |windows: u64| RamRange {
            gpa: GpaRange::new(Gpa::new(0), mib(2) * windows).expect("it fits"),
            hva: Hva::new(BASE),
        };
        let turn: Vec<_> = sizes.iter().map(|windows| guest(&[ram(*windows)])).collect();
        let Setup { regions: (least, most), targets, .. } = setup(&turn);
        prop_assert!(least <= 100 && most <= 400);
        let regions = targets.iter().map(|target| target.regions.len() as u64).sum::<u64>();
        prop_assert!(regions <= REGIONS_AT_FIRST + 2 * GUESTS_MOST as u64, "{}", regions);
        for (guest, target) in turn.iter().zip(targets.iter().skip(1).step_by(2)) {
            let range = guest.ranges[0];
            prop_assert_eq!(target.regions[0].0, range.hva);
            prop_assert_eq!(target.regions.last().map(|last| last.1), Some(range.hva + range.gpa.bytes()));
            prop_assert!(target.regions.windows(2).all(|pair| pair[0].1 == pair[1].0));
        }
    }
}
