//! What promoted pages are worth beside base pages and beside huge pages from the start, on a machine that changes its
//! speed from second to second: three guests live side by side and take turns of a quarter of a second.
//!
//! ```text
//!   base      ██······██······██······   4 KiB pages, never promoted
//!   promoted  ··██······██······██····   4 KiB pages, collapsed while it ran
//!   hugetlb   ····██······██······██··   2 MiB pages of the pool
//!             └ turn ┘                   rates within a turn are compared; whoever does not run is paused
//! ```
//!
//! A rate is updates per second of the guest's clock between the first and the last progress line within a slice, so
//! neither a pause nor the switch is in it. Guests are made anew for each set, because memory differs as well. Not a
//! criterion bench: pairs count, not single times.
//!
//! `cargo bench -p wideleaf-benches --bench interleaved [-- LOG2_WORDS]` (default 25; needs KVM and the right to lease
//! hugetlb pages)

use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use wideleaf_benches::ratio::{Interval, bootstrap_median};
use wideleaf_guest_image::IMAGE;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::host::linux::warm_host_memory;
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, SecondLevel};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, OutcomeResult, PageSize, Skip};
use wideleaf_protocol::{Message, parse};
use wideleaf_vmm::{GuestExit, HostLimits, ImageSource, Machine, VmConfig, VmOptions, WaitLimits};

/// New guests, new memory: this often.
const SETS: usize = 7;
/// Turns in a set, if the guests have that much to do.
const TURNS_MAX: usize = 16;
/// Long enough for three progress lines or more, short enough that the machine is the same for three of them.
const SLICE: Duration = Duration::from_millis(250);
/// Words a guest updates, all rounds together: HPCC's updates are repeated for smaller tables, so that there is work for
/// all turns.
const WORDS_UPDATED: u64 = 3 << 25;
/// A window whose collapse was refused is tried again this often.
const COLLAPSE_TRIES_MAX: usize = 20;
const GUEST_TIMEOUT: Duration = Duration::from_secs(600);

/// How the RAM of a guest begins, and whether it is promoted.
struct Arm {
    name: &'static str,
    kind: BackingKind,
    page: PageSize,
    is_promoted: bool,
}

const ARMS: [Arm; 3] = [
    Arm { name: "base", kind: BackingKind::Anon, page: PageSize::Base4K, is_promoted: false },
    Arm { name: "promoted", kind: BackingKind::Anon, page: PageSize::Base4K, is_promoted: true },
    Arm { name: "hugetlb", kind: BackingKind::Hugetlb, page: PageSize::Huge2M, is_promoted: false },
];
const BASE: usize = 0;
const PROMOTED: usize = 1;
const HUGETLB: usize = 2;

/// What a guest said so far.
#[derive(Default)]
struct Said {
    tsc_hz: u64,
    /// Progress of the updates: the guest's clock and how many are done.
    marks: Vec<(u64, u64)>,
    has_ended_updates: bool,
    has_passed: Option<bool>,
}

struct Guest {
    machine: Machine,
    second_level: Arc<dyn SecondLevel>,
    said: Arc<Mutex<Said>>,
}

impl Guest {
    /// Starts a guest, lets it fill its table and begin to update, promotes it if it is to be, and leaves it paused.
    fn prepare(arm: &Arm, log2_words: u32) -> Guest {
        let memory = table_bytes(log2_words) + mib(256);
        warm_host_memory(memory).expect("memory to warm");
        let backing = BackingConfig::new(arm.kind, arm.page).expect("a backing this page size goes with");
        let mut options = VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing);
        options.memory = memory;
        let rounds = (WORDS_UPDATED >> log2_words).max(1);
        options.cmdline = format!("kernel=gups log2_words={log2_words} rounds={rounds} progress_ms=50");
        let config = VmConfig::new(options, &HostLimits::none()).expect("a plain guest");
        let ram = GuestRam::map(&config.ram_layout(), backing).expect("memory for a guest");
        let said = Arc::new(Mutex::new(Said::default()));
        let listener = Arc::clone(&said);
        let sink = Box::new(move |line: &[u8]| listen(&listener, &String::from_utf8_lossy(line)));
        let machine = Machine::start(&config, Arc::clone(&ram), sink).expect("the built-in image starts");
        let guest = Guest { second_level: machine.second_level(), machine, said };
        guest.wait_for_first_mark();
        if arm.is_promoted {
            promote(&ram);
        }
        guest.second_level.pause().expect("a running guest can be paused");
        guest
    }

    fn wait_for_first_mark(&self) {
        let began = Instant::now();
        while self.said.lock().expect("no sink panics").marks.is_empty() {
            assert!(began.elapsed() < GUEST_TIMEOUT, "the guest does not begin");
            sleep(Duration::from_millis(5));
        }
    }

    /// Lets it run for a slice. Its updates per second, unless its updates ended meanwhile.
    fn slice(&self) -> Option<f64> {
        let before = self.said.lock().expect("no sink panics").marks.len();
        self.second_level.resume().expect("it was paused");
        sleep(SLICE);
        self.second_level.pause().expect("a running guest can be paused");
        let said = self.said.lock().expect("no sink panics");
        let (first, last) = (said.marks.get(before)?, said.marks.last()?);
        let is_whole = !said.has_ended_updates && last.0 > first.0;
        is_whole.then(|| (last.1 - first.1) as f64 / ((last.0 - first.0) as f64 / said.tsc_hz as f64))
    }

    /// Lets it run to its end, where it checks its table.
    fn finish(self) {
        self.second_level.resume().expect("it was paused");
        let exit = self.machine.wait(WaitLimits { timeout: Some(GUEST_TIMEOUT), stop: None });
        assert_eq!(exit, GuestExit::ExitPort(0));
        assert_eq!(self.said.lock().expect("no sink panics").has_passed, Some(true), "the table is wrong");
    }
}

fn listen(said: &Mutex<Said>, line: &str) {
    let mut said = said.lock().expect("no sink panics");
    match parse(line) {
        Some(Ok(Message::Hello { tsc_hz, .. })) => said.tsc_hz = tsc_hz,
        Some(Ok(Message::Progress { phase, tsc, done, .. })) if phase.as_str() == "update" => {
            said.marks.push((tsc, done));
        }
        Some(Ok(Message::End { phase, .. })) if phase.as_str() == "update" => said.has_ended_updates = true,
        Some(Ok(Message::Verify { status, .. })) => {
            said.has_passed = Some(status == wideleaf_protocol::Status::Pass);
        }
        _ => {}
    }
}

/// Collapses all that is resident, as the manager does it, while the guest runs.
fn promote(ram: &GuestRam) {
    let host = LinuxHost::open().expect("/proc is mounted");
    for range in ram.ranges() {
        for window in range.gpa.windows() {
            let is_over = (0..COLLAPSE_TRIES_MAX).any(|_| {
                let result = collapse_window(&host, *range, window).result;
                matches!(result, OutcomeResult::Done | OutcomeResult::Skipped(Skip::NotResident | Skip::AlreadyDone))
            });
            assert!(is_over, "{window:?} cannot be collapsed: the machine is short of huge pages");
        }
    }
}

fn table_bytes(log2_words: u32) -> Bytes {
    Bytes::new(8 << log2_words)
}

/// Rates of each turn in which all guests had work.
fn run_set(log2_words: u32) -> Vec<[f64; ARMS.len()]> {
    let guests = ARMS.each_ref().map(|arm| Guest::prepare(arm, log2_words));
    let turns = (0..TURNS_MAX).map_while(|turn| {
        let mut rates = [0.0; ARMS.len()];
        // Nobody is always the first.
        for step in 0..ARMS.len() {
            let arm = (turn + step) % ARMS.len();
            rates[arm] = guests[arm].slice()?;
        }
        Some(rates)
    });
    let turns = turns.collect();
    guests.into_iter().for_each(Guest::finish);
    turns
}

fn main() {
    // `cargo test --benches` runs this too; it measures only when asked to.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let skip = |why: &str| println!("interleaved: skipped: {why}");
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return skip("there is no usable /dev/kvm");
    }
    let log2_words = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(25);
    let pages = (table_bytes(log2_words) + mib(256)).pages(PageSize::Huge2M);
    let lease = match HugetlbPools::of_this_machine().lease(PageSize::Huge2M, pages) {
        Ok(lease) => lease,
        Err(error) => return skip(&error.to_string()),
    };
    let sets: Vec<_> = (0..SETS).map(|_| run_set(log2_words)).collect();
    drop(lease);

    println!("interleaved: GUPS, 2^{log2_words} words, {SETS} sets of guests, slices of {} ms", SLICE.as_millis());
    let turns: usize = sets.iter().map(Vec::len).sum();
    for (index, arm) in ARMS.iter().enumerate() {
        let rates: Vec<f64> = sets.iter().flatten().map(|turn| turn[index] / 1e6).collect();
        let Interval { median, low, high } = bootstrap_median(&[rates]);
        println!("interleaved: {:<8} {median:7.2} M updates/s ({low:.2} - {high:.2})", arm.name);
    }
    for (a, b) in [(PROMOTED, BASE), (PROMOTED, HUGETLB), (HUGETLB, BASE)] {
        let ratios: Vec<Vec<f64>> = sets.iter().map(|set| set.iter().map(|turn| turn[a] / turn[b]).collect()).collect();
        let Interval { median, low, high } = bootstrap_median(&ratios);
        println!("interleaved: {} : {} {median:.3} ({low:.3} - {high:.3})", ARMS[a].name, ARMS[b].name);
    }
    println!("interleaved: medians of {turns} turns, 95 % intervals by resampling sets and turns; all tables verified");
}
