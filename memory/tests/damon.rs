//! The kernel's own monitor on this process's memory, and on the memory of a guest of another process. If it cannot
//! observe a process's addresses, a test is skipped with the reason; `WIDELEAF_REQUIRE=damon` turns the skip into a
//! failure. The guest is one of the program that `WIDELEAF_BIN` names.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::sensors::access::{AccessSampler, Seen};
use wideleaf_memory::sensors::damon::{self, DamonSensor, GuestMonitor, Watch};
use wideleaf_memory::sensors::outside_heat::HeatSource;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, ProcessHost, RamRange};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, Hva, PageSize, PerTenThousand, WindowIndex};

const WINDOWS: u64 = 16;
const TIMEOUT: Duration = Duration::from_secs(120);
const KDAMONDS: &str = "/sys/kernel/mm/damon/admin/kdamonds";

fn skip(why: &str) {
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == "damon"), "WIDELEAF_REQUIRE={required}, and {why}");
    println!("skipped: {why}");
}

/// The kernel's monitor: tests that use it take turns.
fn turn_at_the_monitor() -> MutexGuard<'static, ()> {
    static MONITOR: Mutex<()> = Mutex::new(());
    MONITOR.lock()
}

/// Text of a file of the kernel's monitor.
fn kdamonds(file: &str) -> String {
    fs::read_to_string(Path::new(KDAMONDS).join(file)).unwrap().trim().to_owned()
}

#[test]
fn the_kernels_monitor_distinguishes_the_busy_half_from_the_idle_one_and_is_given_back() {
    let _turn = turn_at_the_monitor();
    let range = GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
    let host = LinuxHost::open().unwrap();
    host.advise(ram.base(), ram.bytes(), Advice::PopulateWrite).unwrap();
    let mut sensor = match DamonSensor::start(Path::new("/"), ram.ranges()) {
        Ok(sensor) => sensor,
        Err(error) => return skip(&error.to_string()),
    };
    let windows: Vec<_> = (0..WINDOWS).map(WindowIndex::new).collect();
    // A region reaches over the middle now and then: the two windows there may appear as either.
    let is_right = |window: WindowIndex, seen: Seen| match window.get() * 2 / WINDOWS {
        _ if (WINDOWS / 2 - 1..=WINDOWS / 2).contains(&window.get()) => true,
        0 => seen == Seen::Touched,
        _ => seen == Seen::Untouched,
    };
    let is_over = AtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        scope.spawn(|| {
            let words = ram.words(ram.ranges()[0]);
            while !is_over.load(Ordering::Relaxed) {
                words[..words.len() / 2].iter().step_by(512).for_each(|word| {
                    word.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        let began = Instant::now();
        let mut sample = || {
            sensor.start(&host, &windows);
            std::thread::sleep(Duration::from_millis(200));
            sensor.finish(&host).rows
        };
        let mut rows = sample();
        while !rows.iter().all(|(window, seen)| is_right(*window, *seen)) && began.elapsed() < TIMEOUT {
            rows = sample();
        }
        is_over.store(true, Ordering::Relaxed);
        rows
    });
    assert!(last.iter().all(|(window, seen)| is_right(*window, *seen)), "{last:?}");
    drop(sensor);
    assert_eq!(kdamonds("nr_kdamonds"), "0");
}

const MEMORY: u64 = 192 << 20;
/// Windows of the guest's hot and cold sets.
const HOT: usize = 16;
const COLD: usize = 32;
/// Phases that outlast the test: all words of the hot set in each pass, none of the cold set after the first.
const PHASES: &str = "hot=32M range=32M sparse=0 cold=64M constant=0 phases=1 phase_ms=600000";

/// A process that is killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A guest of another process, ended when dropped.
struct OtherGuest {
    process: Killed,
    ram: RamRange,
}

impl OtherGuest {
    /// A guest that its own manager leaves as it is.
    fn start(program: &str) -> OtherGuest {
        let run = ["run", "phases", "--policy", "never", "--memory", "192M", "--cmdline", PHASES];
        let process = Command::new(program).args(run).stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let process = Killed(process);
        let began = Instant::now();
        loop {
            if let Some(ram) = ram_of(process.0.id()) {
                return OtherGuest { process, ram };
            }
            assert!(began.elapsed() < TIMEOUT, "the guest has no RAM");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Number of its windows with pages.
    fn resident_windows(&self, host: &ProcessHost) -> usize {
        self.windows().filter(|start| is_resident(host, *start)).count()
    }

    /// Addresses of its windows.
    fn windows(&self) -> impl Iterator<Item = Hva> {
        let start = self.ram.hva;
        (0..MEMORY >> 21).map(move |window| start + mib(2) * window)
    }
}

/// The mapping of a process that is as large as the guest's RAM.
fn ram_of(pid: u32) -> Option<RamRange> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let range = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    };
    let is_ram = |(start, end): &(u64, u64)| end - start == MEMORY;
    let (start, _) = maps.lines().filter(|line| line.contains("rw-")).filter_map(range).find(is_ram)?;
    Some(RamRange { gpa: GpaRange::new(Gpa::new(0), mib(192)).unwrap(), hva: Hva::new(start) })
}

fn is_resident(host: &ProcessHost, window: Hva) -> bool {
    let mut runs = Vec::new();
    host.scan(window, mib(2), &mut runs).unwrap();
    !runs.is_empty()
}

/// Windows in use that saw an access in more than half of the looks, and those that saw none.
fn hot_and_cold(guest: &OtherGuest, host: &ProcessHost, watch: &Watch) -> (Vec<Hva>, Vec<Hva>) {
    let Some(latest) = watch.latest() else { return Default::default() };
    let rate = |window: &Hva| latest.heat.of_window(*window).map(|heat| heat.rate);
    let resident: Vec<_> = guest.windows().filter(|window| is_resident(host, *window)).collect();
    let hot = |window: &Hva| rate(window) > Some(PerTenThousand::new(5000));
    let cold = |window: &Hva| rate(window) == Some(PerTenThousand::new(0));
    (resident.iter().copied().filter(hot).collect(), resident.iter().copied().filter(cold).collect())
}

/// CPU time of the kernel's monitor so far, in clock ticks of 10 ms (proc_pid_stat(5), fields 14 and 15).
fn kdamond_ticks() -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", kdamonds("0/pid"))).unwrap();
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2);
    fields.map(|field| field.parse::<u64>().unwrap()).sum()
}

#[test]
fn the_hot_set_of_a_guest_of_another_process_is_found_and_the_monitor_is_given_back() {
    let _turn = turn_at_the_monitor();
    let Ok(program) = std::env::var("WIDELEAF_BIN") else { return skip("WIDELEAF_BIN names no program") };
    if let Err(error) = damon::give_back_left_behind(Path::new("/")) {
        return skip(&error.to_string());
    }
    let guest = OtherGuest::start(&program);
    let host = Arc::new(ProcessHost::open(guest.process.0.id()).unwrap());
    let began = Instant::now();
    while guest.resident_windows(&host) < HOT + COLD {
        assert!(began.elapsed() < TIMEOUT, "{} windows are in use", guest.resident_windows(&host));
        std::thread::sleep(Duration::from_millis(100));
    }
    let watch = GuestMonitor::of_this_host().watch(Arc::clone(&host), &[guest.ram]);
    let began = Instant::now();
    let mut readings = 0;
    // A region reaches over the border of the sets now and then: two windows there may appear as either.
    let is_found = |(hot, cold): &(Vec<Hva>, Vec<Hva>)| {
        let span = hot.last().zip(hot.first()).map_or(0, |(last, first)| (*last - *first).get() >> 21);
        (HOT - 2..=HOT + 2).contains(&hot.len()) && span < hot.len() as u64 + 2 && cold.len() >= COLD - 4
    };
    let mut seen = hot_and_cold(&guest, &host, &watch);
    while !is_found(&seen) && began.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(100));
        if watch.latest().is_some_and(|latest| latest.number >= readings) {
            readings += 1;
            seen = hot_and_cold(&guest, &host, &watch);
            println!("after {:?}: {} hot, {} cold", began.elapsed(), seen.0.len(), seen.1.len());
        }
    }
    assert!(is_found(&seen), "{:?}: {seen:x?}", watch.why_not());
    println!("found after {:?} and {readings} readings", began.elapsed());
    println!("the kernel's monitor used {} ms of an emulated CPU", kdamond_ticks() * 10);
    drop(watch);
    assert_eq!(kdamonds("nr_kdamonds"), "0");
}

/// Windows of the writer. In each pass it updates a word in `window * PAGES_FOR_EACH` pages of a window.
const GRADES: u64 = 24;
const PAGES_FOR_EACH: u64 = 512 / (GRADES - 1);
/// Pages of a window in the order in which they are taken: an odd factor scatters them over the window.
const SCATTERED: u64 = 181;
/// Number of readings of which the mean is ranked, and the least coefficient. In the lab one reading had 0.93 to 0.98,
/// the mean of two 0.96, that of four 0.995.
const READINGS: u64 = 2;
const SPEARMAN_MIN: f64 = 0.8;

/// The writer of [`windows_are_ranked_as_their_numbers_of_updates`]: tells its address on standard error, and writes
/// until its standard input ends.
#[test]
#[ignore = "it is the writer of a test here, which starts and ends it"]
fn the_writer_of_known_updates() {
    let range = GpaRange::new(Gpa::new(0), mib(2) * GRADES).unwrap();
    let ram = GuestRam::map(&[range], BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap()).unwrap();
    LinuxHost::open().unwrap().advise(ram.base(), ram.bytes(), Advice::PopulateWrite).unwrap();
    eprintln!("{}", ram.base().get());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let words = ram.words(ram.ranges()[0]);
            while !is_over.load(Ordering::Relaxed) {
                for page in (0..GRADES).flat_map(|window| {
                    (0..window * PAGES_FOR_EACH).map(move |page| window * 512 + page * SCATTERED % 512)
                }) {
                    words[page as usize * 512].fetch_add(1, Ordering::Relaxed);
                }
                // Many passes between two looks of the kernel's.
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let _ = std::io::stdin().read(&mut [0]);
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Ranks from one on; equal values share the mean of theirs.
fn ranks(values: &[f64]) -> Vec<f64> {
    let below = |value: &f64| values.iter().filter(|other| *other < value).count() as f64;
    let equal = |value: &f64| values.iter().filter(|other| *other == value).count() as f64;
    values.iter().map(|value| below(value) + (equal(value) + 1.0) / 2.0).collect()
}

/// Spearman's coefficient: that of Pearson, of the ranks. Zero where all values of a side are equal.
fn spearman(a: &[f64], b: &[f64]) -> f64 {
    let (a, b, mean) = (ranks(a), ranks(b), (a.len() as f64 + 1.0) / 2.0);
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>();
    let spread = (product(&a, &a) * product(&b, &b)).sqrt();
    if spread > 0.0 { product(&a, &b) / spread } else { 0.0 }
}

#[test]
fn spearmans_coefficient_compares_ranks_and_shares_them_among_equals() {
    assert_eq!(ranks(&[5.0, 1.0, 5.0, 9.0]), [2.5, 1.0, 2.5, 4.0]);
    assert_eq!(spearman(&[1.0, 2.0, 3.0], &[10.0, 100.0, 1000.0]), 1.0);
    assert_eq!(spearman(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]), -1.0);
    assert_eq!(spearman(&[1.0, 2.0, 3.0], &[7.0; 3]), 0.0);
}

#[test]
fn windows_are_ranked_as_their_numbers_of_updates() {
    let _turn = turn_at_the_monitor();
    if let Err(error) = damon::give_back_left_behind(Path::new("/")) {
        return skip(&error.to_string());
    }
    let writer = Command::new(std::env::current_exe().unwrap())
        .args(["the_writer_of_known_updates", "--exact", "--ignored", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut writer = Killed(writer.unwrap());
    let mut address = String::new();
    BufReader::new(writer.0.stderr.as_mut().unwrap()).read_line(&mut address).unwrap();
    let start = Hva::new(address.trim().parse().unwrap());
    let gpa = GpaRange::new(Gpa::new(0), mib(2) * GRADES).unwrap();
    let host = Arc::new(ProcessHost::open(writer.0.id()).unwrap());
    let watch = GuestMonitor::of_this_host().watch(host, &[RamRange { gpa, hva: start }]);
    let updates: Vec<f64> = (0..GRADES).map(|window| (window * PAGES_FOR_EACH) as f64).collect();
    let (mut sums, mut readings, began) = (vec![0.0; GRADES as usize], 0, Instant::now());
    while readings < READINGS {
        assert!(began.elapsed() < TIMEOUT, "{readings} readings: {:?}", watch.why_not());
        std::thread::sleep(Duration::from_millis(100));
        let Some(latest) = watch.latest().filter(|latest| latest.number >= readings) else { continue };
        readings += 1;
        let heat = |window| latest.heat.of_window(start + mib(2) * window);
        let rates: Vec<f64> = (0..GRADES).map(|at| heat(at).map_or(0.0, |heat| f64::from(heat.rate.get()))).collect();
        sums.iter_mut().zip(&rates).for_each(|(sum, rate)| *sum += rate);
        let (one, all) = (spearman(&rates, &updates), spearman(&sums, &updates));
        println!("Spearman of reading {readings}: {one:.3}; of the mean so far: {all:.3}");
    }
    assert!(spearman(&sums, &updates) >= SPEARMAN_MIN, "{sums:?}");
    drop(watch);
    assert_eq!(kdamonds("nr_kdamonds"), "0");
}

/// The manager of [`a_killed_managers_monitor_is_given_back_while_its_guest_runs`]: it watches its parent for ever.
#[test]
#[ignore = "it is the manager of a test here, which starts and kills it"]
fn the_manager_that_is_killed() {
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let host = ProcessHost::open(number("WATCHED_PID") as u32).unwrap();
    let ram = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2)).unwrap(), hva: Hva::new(number("WATCHED_HVA")) };
    let _watch = GuestMonitor::of_this_host().watch(Arc::new(host), &[ram]);
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_managers_monitor_is_given_back_while_its_guest_runs() {
    let _turn = turn_at_the_monitor();
    let ram = GuestRam::map(
        &[GpaRange::new(Gpa::new(0), mib(2)).unwrap()],
        BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap(),
    )
    .unwrap();
    // Also tells whether the kernel can watch a process.
    match DamonSensor::start(Path::new("/"), ram.ranges()) {
        Ok(sensor) => drop(sensor),
        Err(error) => return skip(&error.to_string()),
    }
    let manager = Command::new(std::env::current_exe().unwrap())
        .args(["the_manager_that_is_killed", "--exact", "--ignored"])
        .env("WATCHED_PID", std::process::id().to_string())
        .env("WATCHED_HVA", ram.base().get().to_string())
        .stdout(Stdio::null())
        .spawn();
    let manager = Killed(manager.unwrap());
    let began = Instant::now();
    let is_on = || fs::read_to_string(Path::new(KDAMONDS).join("0/state")).is_ok_and(|state| state.trim() == "on");
    while !is_on() {
        assert!(began.elapsed() < TIMEOUT, "the manager does not watch");
        std::thread::sleep(Duration::from_millis(10));
    }
    let live = damon::give_back_left_behind(Path::new("/")).unwrap_err().to_string();
    assert!(live.contains(&format!("(process {})", manager.0.id())), "{live}");
    drop(manager);
    assert_eq!((kdamonds("nr_kdamonds"), kdamonds("0/state")), ("1".into(), "on".into()));
    assert!(damon::give_back_left_behind(Path::new("/")).unwrap());
    assert_eq!(kdamonds("nr_kdamonds"), "0");
}
