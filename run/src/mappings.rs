//! `wideleaf doctor --mappings`: checks that KVM maps memory as expected. Small guests that check every word of
//! their RAM run on each backing and each guest page size; promotion, hold and recovery happen while they run.
//! After each, the guest touches all of its memory again, and KVM's counters are compared with what this host's
//! paging should give.
//!
//! | paging | expected level of a window |
//! |---|---|
//! | EPT, NPT | the host's page, independent of the guest's mapping |
//! | shadow | the smaller of the guest's page and the host's; giant pages count as huge ones there |
//! | any, held | 4 KiB |

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use wideleaf_memory::actuators::collapse::collapse_window;
use wideleaf_memory::actuators::hold::{Hold, set_hold};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost, SecondLevel};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, GpaRange, MappingStats, OutcomeResult, PageSize, Refusal};
use wideleaf_vmm::run_loop::VcpuState;

use crate::failure::Failure;
use crate::front_end::{FrontEnd, NoProgress, Work};
use crate::guest::{self, Outside};
use crate::interrupts::Interrupts;
use crate::numa::NumaPlan;
use crate::report::KvmPages;
use crate::session::Session;
use crate::spec::{Console, RunSpec};

/// RAM that the guest checks, over and over.
const PATTERN: Bytes = mib(8);

/// Time limit of a pass: a guest on an emulated host needs seconds.
const PASS_TIMEOUT: Duration = Duration::from_secs(120);

/// Most 4 KiB leaves outside the pattern: the guest's program, its stacks, its page tables.
const OTHER_PAGES_MAX: u64 = 512;

/// Results of all checks.
#[derive(Clone, Debug, Serialize)]
pub struct MappingReport {
    /// Paging of the guests: `ept`, `npt` or `shadow`.
    pub paging: String,
    /// Checked RAM of a guest, in bytes.
    pub pattern_bytes: u64,
    /// Rows, one per state of one guest.
    pub rows: Vec<MappingRow>,
    /// Cases that could not be tried, with the reason.
    pub skipped: Vec<String>,
}

/// One guest in one state.
#[derive(Clone, Debug, Serialize)]
pub struct MappingRow {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Page size of the guest's tables.
    pub guest_page: String,
    /// Kind of backing.
    pub backing: String,
    /// Page size that RAM started with.
    pub host_page: String,
    /// State of the guest: `start`, `collapsed`, `held at 4k`, `recovered`.
    pub state: String,
    /// Level with which KVM should map the pattern.
    pub expected: String,
    /// Counters of KVM.
    pub kvm: KvmPages,
    /// Whether the counters are as expected.
    pub is_as_expected: bool,
    /// Passes over all of its RAM that the guest had made without finding a wrong word.
    pub passes: u64,
}

/// Runs every combination that this host supports.
///
/// # Errors
/// [`Failure`] if there is no KVM, or a guest crashes or finds a wrong word.
pub fn check_all(front: &Arc<dyn FrontEnd>, interrupts: &Interrupts) -> Result<MappingReport, Failure> {
    let guest_pages = guest::guest_pages()?;
    let paging = guest::paging_name()?;
    let vcpus = vcpus(paging, std::thread::available_parallelism().map_or(1, usize::from));
    let mut report =
        MappingReport { paging: paging.into(), pattern_bytes: PATTERN.get(), rows: Vec::new(), skipped: Vec::new() };
    let cases: Vec<_> = cases(guest_pages).collect();
    let progress = front.progress(Work::Mappings(cases.len() as u64));
    for (guest_page, kind, host_page) in cases {
        let backing = BackingConfig::new(kind, host_page).map_err(|error| Failure::Usage(error.to_string()))?;
        let name = format!("{} {host_page}, guest {guest_page}", kind.name());
        tracing::info!("{name}");
        interrupts.check()?;
        let checked = check_one(front, paging, vcpus, guest_page, backing, interrupts);
        match checked.map_err(|failure| failure.during(&name))? {
            Ok(rows) => report.rows.extend(rows),
            Err(why) => report.skipped.push(format!("{name}: {why}")),
        }
        progress.add(1);
    }
    progress.finish();
    Ok(report)
}

/// Number of vCPUs of a guest: two show what one leaves out, such as a flush of the other one's TLB, and on one
/// processor they take turns. In Bochs, which alone has EPT on one, the check would take hours.
fn vcpus(paging: &str, cpus: usize) -> u8 {
    if paging == "ept" && cpus == 1 { 1 } else { 2 }
}

/// Guest page, kind of backing, and host page at the start.
fn cases(guest_pages: Vec<PageSize>) -> impl Iterator<Item = (PageSize, BackingKind, PageSize)> {
    const BACKINGS: [(BackingKind, PageSize); 5] = [
        (BackingKind::Anon, PageSize::Base4K),
        (BackingKind::Anon, PageSize::Huge2M),
        (BackingKind::Memfd, PageSize::Base4K),
        (BackingKind::Hugetlb, PageSize::Huge2M),
        (BackingKind::Hugetlb, PageSize::Giant1G),
    ];
    guest_pages.into_iter().flat_map(|guest_page| BACKINGS.map(|(kind, host_page)| (guest_page, kind, host_page)))
}

/// Level with which this paging should map a window.
pub fn expected_level(paging: &str, guest_page: PageSize, host_page: PageSize, is_held: bool) -> PageSize {
    match paging {
        _ if is_held => PageSize::Base4K,
        "shadow" => guest_page.min(host_page).min(PageSize::Huge2M),
        _ => host_page,
    }
}

/// Whether KVM's totals are those of a guest with its pattern mapped at `level` throughout.
pub fn fits(level: PageSize, stats: MappingStats) -> bool {
    let windows = PATTERN.pages(PageSize::Huge2M);
    match level {
        PageSize::Base4K => stats.pages_4k >= PATTERN.pages(PageSize::Base4K),
        PageSize::Huge2M => stats.pages_2m >= windows && stats.pages_4k <= OTHER_PAGES_MAX,
        PageSize::Giant1G => stats.pages_1g >= 1 && stats.pages_4k <= OTHER_PAGES_MAX,
    }
}

/// The inner error is a reason to skip the case.
fn check_one(
    front: &Arc<dyn FrontEnd>,
    paging: &'static str,
    vcpus: u8,
    guest_page: PageSize,
    backing: BackingConfig,
    interrupts: &Interrupts,
) -> Result<Result<Vec<MappingRow>, String>, Failure> {
    // A giant page, at either level, needs 1 GiB of RAM; the part that the guest does not touch is never backed.
    let needs_giant = backing.start_page() == PageSize::Giant1G || guest_page == PageSize::Giant1G;
    let memory = if needs_giant { gib(1) } else { mib(64) };
    let pool = HugetlbPools::of_this_machine();
    let mut lease = None;
    if backing.kind() == BackingKind::Hugetlb {
        let size = backing.start_page();
        let missing = pool.status(size).map(|pool| memory.pages(size).saturating_sub(pool.available()));
        match missing.map_err(|error| error.to_string()).and_then(|pages| match pages {
            0 => Ok(None),
            _ => front.lease_pool(size, pages).map(Some),
        }) {
            Ok(taken) => lease = taken,
            Err(why) => return Ok(Err(why)),
        }
    }
    let guest = PatternGuest::start(front, vcpus, guest_page, memory, backing)?;
    let mut rows = Vec::new();
    let mut look = |guest: &PatternGuest, state: &str, host_page: PageSize, is_held: bool| {
        guest.wait_for_whole_pass(interrupts)?;
        let level = expected_level(paging, guest_page, host_page, is_held);
        let stats = guest.kvm.mapping_stats().map_err(|error| Failure::Host(error.to_string()))?;
        tracing::info!("  {state}: expected {level}, {stats:?}, {} passes", guest.passes());
        rows.push(MappingRow {
            vcpus,
            guest_page: guest_page.name().into(),
            backing: backing.kind().name().into(),
            host_page: backing.start_page().name().into(),
            state: state.into(),
            expected: level.name().into(),
            kvm: stats.into(),
            is_as_expected: fits(level, stats),
            passes: guest.passes(),
        });
        Ok::<(), Failure>(())
    };
    let mut host_page = backing.start_page();
    look(&guest, "start", host_page, false)?;
    if host_page == PageSize::Base4K {
        guest.collapse()?;
        host_page = PageSize::Huge2M;
        look(&guest, "collapsed", host_page, false)?;
    }
    guest.hold(Hold::At4K)?;
    look(&guest, "held at 4k", host_page, true)?;
    guest.hold(Hold::Recover)?;
    look(&guest, "recovered", host_page, false)?;
    guest.stop()?;
    drop(lease);
    Ok(Ok(rows))
}

/// A guest that checks and rewrites all words of its memory until it is stopped.
struct PatternGuest {
    ram: Arc<GuestRam>,
    host: Arc<LinuxHost>,
    session: Arc<Session>,
    kvm: Arc<dyn SecondLevel>,
    machine: wideleaf_vmm::Machine,
}

impl PatternGuest {
    fn start(
        front: &Arc<dyn FrontEnd>,
        vcpus: u8,
        guest_page: PageSize,
        memory: Bytes,
        backing: BackingConfig,
    ) -> Result<PatternGuest, Failure> {
        let pattern = format!("bytes={} passes=1000000", PATTERN.get());
        let spec = RunSpec { vcpus, guest_page, ..RunSpec::of_kernel("pattern", pattern, memory, backing) };
        let host_error = |error: &dyn std::fmt::Display| Failure::Host(error.to_string());
        let plan = guest::plan(&spec, backing, &NumaPlan::default(), &**front)?;
        let ram = GuestRam::map(&plan.layout(), backing).map_err(|error| host_error(&error))?;
        let host = Arc::new(LinuxHost::open().map_err(|error| host_error(&error))?);
        let session = Session::new(host.clone(), ram.clone(), None, front.clone(), Arc::new(NoProgress));
        let guest = plan.start(ram.clone(), &session, front, Console::Nothing, Outside::default())?;
        let kvm = guest.second_level();
        session.attach(Some(kvm.clone()), None);
        Ok(PatternGuest { ram, host, session, kvm, machine: guest.into_machine() })
    }

    /// Number of passes that the guest has made.
    fn passes(&self) -> u64 {
        self.session.units_done("pass").unwrap_or(0)
    }

    /// Waits until the guest has touched every word at least once after now. The guest does not report every pass, so
    /// its last report may be old: the first report after now ends a pass that began before, and the next one is of a
    /// later pass.
    fn wait_for_whole_pass(&self, interrupts: &Interrupts) -> Result<(), Failure> {
        let before = self.passes();
        self.wait_for_report(before, interrupts)?;
        let began_after = self.passes();
        self.wait_for_report(began_after, interrupts)
    }

    /// Waits until the guest has reported more than this number of passes.
    fn wait_for_report(&self, passes: u64, interrupts: &Interrupts) -> Result<(), Failure> {
        const STEP: Duration = Duration::from_millis(2);
        let deadline = Instant::now() + PASS_TIMEOUT;
        while self.passes() <= passes {
            interrupts.check()?;
            if self.machine.vcpu_states().iter().all(|state| *state == VcpuState::Finished) {
                return Err(self.ended_early());
            }
            if Instant::now() >= deadline {
                return Err(Failure::TookTooLong(format!("the guest reported no pass within {PASS_TIMEOUT:?}")));
            }
            std::thread::sleep(STEP);
        }
        Ok(())
    }

    fn pattern(&self) -> Result<GpaRange, Failure> {
        let range = self.session.region_of("pattern");
        range.ok_or_else(|| Failure::GuestCrashed("the guest did not report the place of its pattern".into()))
    }

    /// Collapses every window of the pattern, and retries if a page was busy.
    fn collapse(&self) -> Result<(), Failure> {
        const ATTEMPTS: u32 = 100;
        let pattern = self.pattern()?;
        for window in pattern.windows() {
            let range = self.ram.ranges().iter().find(|range| range.gpa.contains(window.start())).copied();
            let range = range.ok_or_else(|| Failure::GuestCrashed(format!("{window} of the pattern is not RAM")))?;
            let mut result = OutcomeResult::Refused(Refusal::Busy);
            for _ in 0..ATTEMPTS {
                result = collapse_window(self.host.as_ref(), range, window).result;
                match result {
                    OutcomeResult::Refused(Refusal::Busy) => std::thread::sleep(Duration::from_millis(5)),
                    _ => break,
                }
            }
            if result != OutcomeResult::Done {
                return Err(Failure::Host(format!("cannot collapse {window}: {result}")));
            }
        }
        Ok(())
    }

    fn hold(&self, hold: Hold) -> Result<(), Failure> {
        for slot in self.kvm.slots() {
            let window = wideleaf_policies::WindowIndex::containing(slot.range.start());
            let result = set_hold(self.kvm.as_ref(), window, hold);
            if result != OutcomeResult::Done {
                return Err(Failure::Host(format!("cannot switch the dirty log of {window}: {result}")));
            }
        }
        Ok(())
    }

    /// Stops the guest, which must not have ended by itself.
    fn stop(self) -> Result<(), Failure> {
        match self.machine.stop() {
            wideleaf_vmm::GuestExit::Stopped => Ok(()),
            _ => Err(self.ended_early()),
        }
    }

    fn ended_early(&self) -> Failure {
        let observed = self.session.observed(None, self.machine.started());
        let mismatch = observed.verification.and_then(|verification| verification.first_mismatch);
        match (mismatch, observed.panic) {
            (Some(mismatch), _) => Failure::GuestFailed(format!("a wrong word in guest RAM {mismatch}")),
            (None, Some(why)) => Failure::GuestCrashed(format!("the guest panicked: {why}")),
            (None, None) => Failure::GuestCrashed(self.machine.stop().to_string()),
        }
    }
}

impl MappingReport {
    /// Number of rows that are not as expected.
    pub fn wrong(&self) -> usize {
        self.rows.iter().filter(|row| !row.is_as_expected).count()
    }
}
