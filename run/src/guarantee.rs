//! A run's guarantee: compared with the host before the guest starts, and pursued while it runs.
//!
//! ```text
//!   check_at_start ── the host cannot meet it ─┬─ guaranteed: the run is refused, with numbers
//!                                              └─ best effort: started, and reported
//!   every quarter of a second: the manager's latest tick ─▶ GuaranteeWatch ─▶ policy of the pursuit, later the own one
//! ```
//!
//! A guest that is registered with wideleafd is pursued here all the same: the daemon only takes no huge page of this
//! guarantee for others.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_attach::guarantee::{GuaranteeEvent, GuaranteeWatch, may_promote, pursuit_policy};
use wideleaf_control::view::Guarantee;
use wideleaf_memory::manager::Live;
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::account::{HostBacking, host_backing};
use wideleaf_policies::{Bytes, PageSize, PerTenThousand};
use wideleaf_vmm::sandbox::{Sandbox, ThreadKind};

use crate::failure::Failure;
use crate::front_end::FrontEnd;
use crate::policy_switch::PolicySwitch;
use crate::report::{GuaranteeReport, RamAtEnd};
use crate::sandboxed;
use crate::session::Session;
use crate::spec::RunSpec;

/// Interval between comparisons: the error of the times in the report.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time below the guarantee after which a line says so: wideleafd's default.
const GRACE: Duration = Duration::from_secs(30);

/// Exists where the kernel has transparent huge pages.
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Compares the guarantee with the host. Returns why it cannot be met now, where that does not prevent the start.
///
/// # Errors
/// [`Failure`] with that reason, where it does.
pub fn check_at_start(spec: &RunSpec, backing: BackingConfig, available: Bytes) -> Result<Option<String>, Failure> {
    let Some(share) = spec.guarantee.share() else { return Ok(None) };
    let refused = |why: &str| format!("cannot give the guest its guarantee of {}: {why}", spec.guarantee);
    let small = backing.start_page() == PageSize::Base4K;
    if small && !spec.policy.make().promotes() {
        let why = format!("the policy {} makes no large pages; use another --policy", spec.policy);
        return Err(Failure::Usage(refused(&why)));
    }
    let own = spec.policy.to_string();
    if small && spec.record.is_some() && pursuit_policy(&own) != own {
        let why = "a recording is of one policy, and below the guarantee the guest gets another; omit --record, or use \
                   --policy greedy";
        return Err(Failure::Usage(refused(why)));
    }
    let why = (backing.kind() != BackingKind::Hugetlb).then(|| why_not(spec.memory, share, available)).flatten();
    match why {
        Some(why) if spec.guarantee.prevents_start() => Err(Failure::Host(refused(&why))),
        why => Ok(why),
    }
}

fn why_not(memory: Bytes, share: u32, available: Bytes) -> Option<String> {
    if !Path::new(THP).exists() {
        return Some("this kernel has no transparent huge pages; use --backing hugetlb".to_owned());
    }
    let large = Bytes::new((u128::from(memory.get()) * u128::from(share) / 10_000) as u64);
    let remedy = "free memory, or use less --memory or another --guarantee";
    (large > available).then(|| {
        format!("{large} of its {memory} have to be in large pages, and the host has {available} available: {remedy}")
    })
}

/// A guarantee that is watched and pursued until this is dropped.
pub struct WatchedGuarantee {
    guarantee: Guarantee,
    short_at_start: Option<String>,
    history: Arc<Mutex<History>>,
    _stop: Sender<()>,
}

impl WatchedGuarantee {
    /// Starts to watch; `None` for best effort without a share. Without a thread the guarantee is not pursued.
    pub fn start(
        guarantee: Guarantee,
        short_at_start: Option<String>,
        policy: &Arc<PolicySwitch>,
        session: &Arc<Session>,
        front: &Arc<dyn FrontEnd>,
        sandbox: Option<Arc<Sandbox>>,
    ) -> Option<WatchedGuarantee> {
        guarantee.share()?;
        let (stop, stopped) = mpsc::channel();
        let history = Arc::<Mutex<History>>::default();
        let keeper = GuaranteeThread {
            guarantee,
            policy: Arc::clone(policy),
            session: Arc::downgrade(session),
            front: Arc::clone(front),
            history: Arc::clone(&history),
            watch: GuaranteeWatch::default(),
            replaced: None,
            began: Instant::now(),
        };
        // The run's end does not wait for the thread, as for that of the registration.
        let work = move || {
            sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Status));
            keeper.keep(&stopped);
        };
        if let Err(error) = thread::Builder::new().name("guarantee".into()).spawn(work) {
            tracing::warn!("cannot pursue the guarantee of {guarantee}: {error}");
        }
        Some(WatchedGuarantee { guarantee, short_at_start, history, _stop: stop })
    }

    /// The guarantee's part of the report.
    pub fn report(&self, at_end: Option<&RamAtEnd>) -> GuaranteeReport {
        let History { first_met, met_since, below, pursued } = *self.history.lock();
        let coverage = at_end.and_then(RamAtEnd::coverage);
        GuaranteeReport {
            wanted: self.guarantee.to_string(),
            short_at_start: self.short_at_start.clone(),
            first_met_at_s: first_met.map(|at| at.as_secs_f64()),
            met_since_s: met_since.map(|at| at.as_secs_f64()),
            below_s: below.as_secs_f64(),
            pursued_s: pursued.as_secs_f64(),
            coverage_at_end: coverage.map(|share| f64::from(share.get()) / 10_000.0),
            is_met_at_end: coverage.zip(self.guarantee.share()).map(|(share, wanted)| share.get() >= wanted),
        }
    }
}

/// Times since the guest's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct History {
    first_met: Option<Duration>,
    /// Begin of the present stretch in which it is met.
    met_since: Option<Duration>,
    below: Duration,
    pursued: Duration,
}

impl History {
    /// Takes a comparison into account: `is_met` is `None` without resident memory.
    fn add(&mut self, is_met: Option<bool>, is_pursued: bool, now: Duration, since_last: Duration) {
        self.met_since = (is_met == Some(true)).then(|| self.met_since.unwrap_or(now));
        self.first_met = self.first_met.or(self.met_since);
        self.below += if is_met == Some(false) { since_last } else { Duration::ZERO };
        self.pursued += if is_pursued { since_last } else { Duration::ZERO };
    }
}

/// State of the thread. It does not own the session, so that the run's end does not wait for it.
struct GuaranteeThread {
    guarantee: Guarantee,
    policy: Arc<PolicySwitch>,
    session: Weak<Session>,
    front: Arc<dyn FrontEnd>,
    history: Arc<Mutex<History>>,
    watch: GuaranteeWatch,
    /// The run's own policy and that of the pursuit, while that one is set.
    replaced: Option<(String, String)>,
    began: Instant,
}

impl GuaranteeThread {
    fn keep(mut self, stopped: &Receiver<()>) {
        let mut last = Duration::ZERO;
        while let Some((live, session)) = self.session.upgrade().and_then(|session| Some((session.live()?, session))) {
            let now = self.began.elapsed();
            self.look(&live, now, now.saturating_sub(last));
            self.pursue(&session);
            last = now;
            drop((live, session));
            if stopped.recv_timeout(LOOK_EVERY) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    fn look(&mut self, live: &Live, now: Duration, since_last: Duration) {
        let coverage = coverage(live);
        let is_met = coverage.zip(self.guarantee.share()).map(|(coverage, wanted)| coverage >= wanted);
        let event = self.watch.update(self.guarantee, coverage, now, GRACE);
        let mut history = self.history.lock();
        history.add(is_met, self.watch.is_pursued() && self.is_at_work(), now, since_last);
        drop(history);
        let percent = PerTenThousand::new(coverage.unwrap_or_default());
        match event {
            Some(GuaranteeEvent::Missed) => {
                let said = format!("wideleaf: the guest is below its guarantee of {}: {percent}", self.guarantee);
                self.front.say(&said);
            }
            Some(GuaranteeEvent::MetAgain) => {
                self.front.say(&format!("wideleaf: the guest meets its guarantee of {} again", self.guarantee));
            }
            None => {}
        }
    }

    /// Whether the policy promotes all it can: that of the pursuit, the run's own, or one that a client has set since.
    fn is_at_work(&self) -> bool {
        let shown = self.policy.shown();
        pursuit_policy(&shown) == shown && may_promote(&shown)
    }

    /// Sets the policy of the pursuit, or the run's own again. A policy that a client has set since stays.
    fn pursue(&mut self, session: &Session) {
        let (from, to) = match (&self.replaced, self.watch.is_pursued()) {
            (None, true) => {
                let own = self.policy.shown();
                let due = pursuit_policy(&own).to_owned();
                (own, due)
            }
            (Some((own, due)), false) => (due.clone(), own.clone()),
            _ => return,
        };
        if from == to {
            return;
        }
        let exchanged = match self.replaced {
            None => self.policy.pursue(session, &from, &to),
            Some(_) => self.policy.exchange(session, &from, &to),
        };
        let was_from = match exchanged {
            Ok(was_from) => was_from,
            Err(error) => {
                tracing::debug!("{error}");
                return;
            }
        };
        match (self.replaced.take(), was_from) {
            (None, true) => {
                tracing::info!("policy {to} for the guarantee of {}, later {from} again", self.guarantee);
                self.replaced = Some((from, to));
            }
            (Some(_), true) => tracing::info!("policy {to} again"),
            // A client has set another policy, which stays.
            (_, false) => {}
        }
    }
}

/// Share of present memory in large pages, in ten thousandths; `None` without present memory.
fn coverage(live: &Live) -> Option<u32> {
    let add = |mut sum: HostBacking, of: HostBacking| {
        sum.base_4k += of.base_4k;
        sum.huge_2m += of.huge_2m;
        sum.giant_1g += of.giant_1g;
        sum
    };
    let all = live.snapshot.vms.iter().map(host_backing).fold(HostBacking::default(), add);
    let large = all.huge_2m + all.giant_1g;
    (all.resident() > Bytes::ZERO).then(|| PerTenThousand::of(large.get(), all.resident().get()).get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::front_end::Quiet;
    use wideleaf_policies::PolicyChoice;
    use wideleaf_policies::units::{gib, mib};
    use wideleaf_policies::walk::cost::WalkCost;

    fn spec(guarantee: &str, policy: &str) -> (RunSpec, BackingConfig) {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("it exists");
        let guarantee = guarantee.parse().expect("a guarantee");
        let policy = PolicyChoice::parse(policy).expect("a policy");
        (RunSpec { guarantee, policy, ..RunSpec::of_kernel("gups", "", gib(1), backing) }, backing)
    }

    #[test]
    fn a_guarantee_that_the_host_cannot_meet_is_refused_with_numbers_and_a_best_effort_one_is_reported() {
        let of = |guarantee: &str, available| {
            let (spec, backing) = spec(guarantee, "auto");
            check_at_start(&spec, backing, available)
        };
        let refused = of("guaranteed:50%", mib(511)).expect_err("512 MiB are needed");
        assert_eq!(refused.exit_code(), 4);
        let text = refused.to_string();
        assert!(text.contains("512 MiB of its 1 GiB") && text.contains("511 MiB available"), "{text}");
        assert!(of("bestEffort:50%", mib(511)).expect("it starts").is_some_and(|why| why.contains("511 MiB")));
        assert!(of("bestEffort", mib(1)).is_ok_and(|why| why.is_none()));
        if Path::new(THP).exists() {
            assert!(of("guaranteed:50%", mib(512)).is_ok_and(|why| why.is_none()));
        }
    }

    #[test]
    fn a_policy_that_makes_no_large_pages_cannot_keep_a_guarantee() {
        let (spec, backing) = spec("bestEffort:95%", "never");
        let refused = check_at_start(&spec, backing, gib(64)).expect_err("nothing would pursue it");
        assert!(refused.exit_code() == 2 && refused.to_string().contains("--policy"), "{refused}");
        let pool = BackingConfig::new(BackingKind::Hugetlb, PageSize::Huge2M).expect("it exists");
        assert!(check_at_start(&spec, pool, Bytes::ZERO).is_ok_and(|why| why.is_none()), "its pages are reserved");
    }

    #[test]
    fn a_guarantee_that_needs_another_policy_later_is_refused_with_a_recording_of_one() {
        let recorded = |policy: &str| {
            let (spec, backing) = spec("95%", policy);
            check_at_start(&RunSpec { record: Some("run.rec".into()), ..spec }, backing, gib(64))
        };
        let refused = recorded("auto").expect_err("the pursuit would need greedy");
        assert!(refused.exit_code() == 2 && refused.to_string().contains("omit --record"), "{refused}");
        if Path::new(THP).exists() {
            assert!(recorded("greedy").is_ok());
        }
    }

    #[test]
    fn a_guarantee_is_not_pursued_under_a_policy_that_a_client_has_set_since() {
        let keeper_under = |policy: &str| GuaranteeThread {
            guarantee: "95%".parse().expect("a guarantee"),
            policy: Arc::new(PolicySwitch::new(PolicyChoice::parse(policy).expect("a policy"), WalkCost::PRIOR)),
            session: Weak::new(),
            front: Arc::new(Quiet),
            history: Arc::default(),
            watch: GuaranteeWatch::default(),
            replaced: Some(("auto".into(), "greedy".into())),
            began: Instant::now(),
        };
        assert!(keeper_under("greedy").is_at_work());
        for set_since in ["never", "auto"] {
            assert!(!keeper_under(set_since).is_at_work(), "{set_since}");
        }
    }

    #[test]
    fn the_times_at_and_below_the_guarantee_add_up() {
        let at = Duration::from_secs;
        let mut history = History::default();
        for (second, is_met) in [(1, None), (2, Some(false)), (3, Some(true)), (4, Some(false)), (5, Some(true))] {
            history.add(is_met, is_met == Some(false), at(second), at(1));
        }
        let expected = History { first_met: Some(at(3)), met_since: Some(at(5)), below: at(2), pursued: at(2) };
        assert_eq!(history, expected);
    }
}
