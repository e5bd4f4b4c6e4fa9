//! A run that registers its guest with wideleafd, so that `wideleaf list` and `top` show it and it shares the
//! host's budget with the others.
//!
//! ```text
//!            register                    limits, price of huge pages
//!   alone ─────────────▶ wideleafd ─────────────▶ registered ──┐ status, every second, or four times
//!     ▲                                            │  ▲────────┘ while huge pages have a price
//!     └── no daemon, or gone: again later ─────────┘
//! ```
//!
//! A thread of its own does this, and the guest never waits for it. Without a daemon a run uses its own limits,
//! which is not an error. The run's end closes the connection, which tells the daemon.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use wideleaf_attach::guarantee::pursuit_policy;
use wideleaf_attach::live_view::OwnGuest;
use wideleaf_control::client::{self, ClientError, QUESTION_TIMEOUT};
use wideleaf_control::protocol::{Answer, Limits, LiveReport, PriceOfHugePage, Request};
use wideleaf_control::view::{Care, Guarantee, VmView};
use wideleaf_memory::manager::{ManagerConfig, OutOfReach};
use wideleaf_policies::{BudgetLimits, Bytes, HugePagePrice, PerTenThousand};
use wideleaf_vmm::sandbox::{Sandbox, ThreadKind};

use crate::guards::Noted;
use crate::live_report;
use crate::past_saves::PastSaves;
use crate::policy_switch::PolicySwitch;
use crate::sandboxed;
use crate::session::Session;

/// Interval of the protocol ([`Request::Register`]); the daemon drops a client that is silent for five intervals.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// Interval while huge pages have a price, so that bids and prices are of the same moment.
const BIDS_EVERY: Duration = Duration::from_millis(250);

/// A daemon that is restarted or installed finds its guests soon after; a `connect(2)` without a listener costs
/// microseconds.
const TRY_EVERY: Duration = Duration::from_secs(5);

/// What the run's own options say about its guest.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnOptions {
    /// Guarantee that this process pursues: the daemon takes no huge page of it for other guests.
    pub guarantee: Guarantee,
    /// Largest part of the time for which windows may be out of the guest's reach, if the user said one.
    pub out_of_reach: Option<OutOfReach>,
}

/// A guest that is registered with wideleafd until this is dropped.
pub struct Registered {
    _stop: Sender<()>,
    _noted: Noted,
}

impl Registered {
    /// Starts to register with the daemon at `socket`, whether it exists yet or not. Without a thread the guest is
    /// not registered.
    pub fn start(
        socket: &Path,
        policy: &Arc<PolicySwitch>,
        guest: Option<OwnGuest>,
        own: OwnOptions,
        past: PastSaves,
        session: &Arc<Session>,
        sandbox: Option<Arc<Sandbox>>,
    ) -> Registered {
        let (stop, stopped) = mpsc::channel();
        if let Some(guest) = guest {
            let teller = RegistrationThread {
                socket: socket.to_owned(),
                policy: Arc::clone(policy),
                guest,
                guarantee: own.guarantee,
                past,
                session: Arc::downgrade(session),
                connection: None,
                said_limits: DaemonLimits::beside(own.out_of_reach),
                wants_windows: false,
                said: None,
                own_policy: None,
                refused: None,
                complaint: None,
            };
            // The thread is not waited for at the end: a daemon that hangs must not hold up a run that is over.
            let work = move || {
                sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Status));
                teller.tell(&stopped);
            };
            if let Err(error) = thread::Builder::new().name("status".into()).spawn(work) {
                tracing::info!("cannot register this guest with wideleafd: {error}");
            }
        }
        Registered { _stop: stop, _noted: Noted::taken("registration") }
    }
}

/// State of the thread. It does not own the session, so that a pending question does not hold up the run's end.
struct RegistrationThread {
    socket: PathBuf,
    policy: Arc<PolicySwitch>,
    guest: OwnGuest,
    /// Guarantee that this process pursues.
    guarantee: Guarantee,
    /// Count of snapshots and migrations that are over.
    past: PastSaves,
    session: Weak<Session>,
    /// Connection over which it is registered.
    connection: Option<UnixStream>,
    said_limits: DaemonLimits,
    /// Whether a client of the daemon looks at the windows.
    wants_windows: bool,
    /// Latest policy from the daemon. The daemon repeats an operator's policy, and a policy that is set here must stay.
    said: Option<String>,
    /// Policy to return to without the daemon, while the daemon pursues a guarantee by another one.
    own_policy: Option<String>,
    /// Reason why the policy differs from the operator's.
    refused: Option<String>,
    /// Error of the latest try: it is logged once.
    complaint: Option<String>,
}

impl RegistrationThread {
    /// Runs until the end of the run.
    fn tell(mut self, stopped: &Receiver<()>) {
        while let Some((view, live)) = self.view() {
            let again_after = match self.ask(view, live) {
                Ok(limits) => self.obey(&limits),
                Err(error) => self.be_alone(&error),
            };
            if stopped.recv_timeout(again_after) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    /// The guest and its windows now; `None` once the run has ended.
    fn view(&self) -> Option<(VmView, LiveReport)> {
        let (live, mapping) = self.session.upgrade()?.seen()?;
        let mut view = self.guest.view(&live, mapping);
        view.policy = Some(self.policy.shown());
        view.guarantee = self.guarantee;
        view.care = if self.policy.is_off() { Care::Off } else { Care::Managed };
        view.notes.extend(self.refused.clone());
        if let Some(work) = &mut view.work {
            work.saves = self.past.view();
        }
        let report = live_report::report(&self.guest, &live, mapping, &self.policy, self.wants_windows);
        Some((view, report))
    }

    /// Registers the guest, or reports its state.
    fn ask(&mut self, view: VmView, live: LiveReport) -> Result<Limits, ClientError> {
        let vm = Box::new(view);
        let (connection, request) = match self.connection.take() {
            Some(connection) => (connection, Request::Status { vm, live }),
            None => (client::connect(&self.socket)?, Request::Register { vm, live }),
        };
        match client::ask_over(connection.try_clone()?, request, QUESTION_TIMEOUT)? {
            Answer::Limits(limits) => {
                self.connection = Some(connection);
                Ok(limits)
            }
            _ => Err(ClientError::Malformed { why: "it answers another question".into() }),
        }
    }

    /// Applies the daemon's limits and policy.
    fn obey(&mut self, said: &Limits) -> Duration {
        if self.complaint.take().is_some() {
            tracing::info!("this guest is registered with wideleafd at {}", self.socket.display());
        }
        let is_waited_for = said.wants_windows && !self.wants_windows;
        self.wants_windows = said.wants_windows;
        if let Some(session) = self.session.upgrade() {
            self.said_limits.apply(&session, said);
            if self.said != said.policy {
                self.refused = said.policy.as_deref().and_then(|policy| self.set(&session, policy, said).err());
                self.said.clone_from(&said.policy);
            }
            self.own_policy.clone_from(&said.own_policy);
        }
        match () {
            // A client waits for the first map; further ones come with each status.
            () if is_waited_for => Duration::ZERO,
            () if said.huge_page.is_some() => BIDS_EVERY,
            () => STATUS_EVERY,
        }
    }

    /// Sets the daemon's policy: an operator's, or that of a pursuit.
    fn set(&self, session: &Session, policy: &str, said: &Limits) -> Result<(), String> {
        match &said.own_policy {
            Some(own) => self.policy.set_in_pursuit(session, policy, own),
            None => self.policy.set(session, policy),
        }
    }

    /// Continues with the run's own limits and its own price of huge pages, and without the policy of a pursuit: a
    /// daemon that comes back pursues again. Operators' settings stay.
    fn be_alone(&mut self, error: &ClientError) -> Duration {
        let complaint = Some(error.to_string());
        if self.complaint != complaint {
            tracing::info!("not registered with wideleafd: {error}");
            self.complaint = complaint;
        }
        self.wants_windows = false;
        if let Some(session) = self.session.upgrade() {
            self.said_limits.end(&session);
            if let Some(own) = self.own_policy.take() {
                self.refused = self.policy.exchange(&session, pursuit_policy(&own), &own).err();
                self.said = None;
            }
        }
        TRY_EVERY
    }
}

/// Limits and price that hold while the daemon is there.
#[derive(Default)]
struct DaemonLimits {
    /// Limits from the daemon; `None`: the run's own.
    limits: Option<BudgetLimits>,
    /// Part of the time out of reach that the run's own option says, if the user said one.
    own_part: Option<OutOfReach>,
    /// Part that holds beside the daemon; `None`: the run's own.
    part: Option<OutOfReach>,
}

impl DaemonLimits {
    fn beside(own_part: Option<OutOfReach>) -> DaemonLimits {
        DaemonLimits { own_part, ..DaemonLimits::default() }
    }

    fn apply(&mut self, session: &Session, said: &Limits) {
        let limits = limits_of(said);
        if self.limits.replace(limits) != Some(limits) {
            session.set_limits(limits);
        }
        // A daemon of an earlier release says none.
        let of_daemon: Option<OutOfReach> = said.out_of_reach.as_deref().and_then(|text| text.parse().ok());
        let part = self.own_part.into_iter().chain(of_daemon).min().unwrap_or_default();
        if self.part.replace(part) != Some(part) {
            session.set_out_of_reach(part);
        }
        session.set_huge_page_price(said.huge_page.map(price_of));
        session.set_supplied(true);
        session.promise_huge_pages(said.free_huge_pages);
    }

    /// The daemon is gone, if it was there: the run has its own limits, price and supply again.
    fn end(&mut self, session: &Session) {
        if self.limits.take().is_some() {
            self.part = None;
            session.set_limits(ManagerConfig::default().limits);
            session.set_out_of_reach(self.own_part.unwrap_or_default());
            session.set_huge_page_price(None);
            session.set_supplied(false);
        }
    }
}

fn price_of(PriceOfHugePage { cycles_per_s, may_vacate, free }: PriceOfHugePage) -> HugePagePrice {
    HugePagePrice { cycles_per_s, may_vacate, free }
}

fn limits_of(said: &Limits) -> BudgetLimits {
    BudgetLimits {
        copy_per_second: Bytes::new(said.copy_per_second),
        cpu_share: PerTenThousand::new(said.cpu_share),
        ..ManagerConfig::default().limits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use wideleaf_memory::manager::Manager;
    use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
    use wideleaf_policies::policy::{Needs, Policy};
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Budget, Gpa, GpaRange, HugePages, Moment, PageSize, Plan, Snapshot, VmId};

    use crate::front_end::{NoProgress, Quiet};
    use wideleaf_memory::manager::ManagedVm;

    /// A policy that plans nothing and notes the supply of huge pages.
    struct SeesSupply(Arc<Mutex<HugePages>>);

    impl Policy for SeesSupply {
        fn name(&self) -> &'static str {
            "sees_supply"
        }

        fn needs(&self) -> Needs {
            Needs { host_memory: true, ..Needs::default() }
        }

        fn plan(&mut self, snapshot: &Snapshot, _: Moment, _: &mut Budget, _: &mut Plan) {
            *self.0.lock() = snapshot.host.expect("it has memory").huge_pages;
        }
    }

    /// A session with a manager at work, and the supply that its policy sees.
    fn session() -> (Arc<Session>, Arc<Mutex<HugePages>>) {
        let layout = [GpaRange::new(Gpa::new(0), mib(2)).expect("it fits")];
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous base pages exist");
        let ram = GuestRam::map(&layout, backing).expect("2 MiB can be mapped");
        let host = Arc::new(LinuxHost::open().expect("this host"));
        let seen = Arc::<Mutex<HugePages>>::default();
        let vm = ManagedVm::new(VmId(0), ram.clone(), None);
        let policy = Box::new(SeesSupply(seen.clone()));
        let manager = Manager::spawn(host.clone(), vec![vm], policy, ManagerConfig::default()).expect("a thread");
        let session = Session::new(host, ram, None, Arc::new(Quiet), Arc::new(NoProgress));
        session.attach(None, Some(manager));
        (session, seen)
    }

    fn wait_until(what: &str, is_so: impl Fn() -> bool) {
        for _ in 0..60_000 {
            if is_so() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("not within a minute: {what}");
    }

    #[test]
    fn a_run_without_its_daemon_has_its_own_limits_and_price_again() {
        let (session, seen) = session();
        let limits = || session.live().expect("the manager is at work").limits;
        let is_priced = || matches!(*seen.lock(), HugePages::Priced(_));
        let mut said_limits = DaemonLimits::default();
        let said = Limits {
            copy_per_second: 7 << 20,
            cpu_share: 1_250,
            huge_page: Some(PriceOfHugePage { cycles_per_s: 9, may_vacate: 0, free: Some(2) }),
            ..Limits::default()
        };
        said_limits.apply(&session, &said);
        wait_until("the daemon's price and limits", || is_priced() && limits() == limits_of(&said));
        said_limits.end(&session);
        wait_until("its own", || !is_priced() && limits() == ManagerConfig::default().limits);
        // Limits that were set since are not the daemon's, so its absence ends none of them.
        session.set_limits(limits_of(&said));
        session.set_huge_page_price(said.huge_page.map(price_of));
        said_limits.end(&session);
        wait_until("what was set since", || is_priced() && limits() == limits_of(&said));
        session.stop_manager();
    }

    #[test]
    fn the_smaller_part_of_the_time_counts_of_the_daemons_and_the_runs_own() {
        let (session, _) = session();
        let is_now = |part: &str| {
            let live = session.live().expect("the manager is at work");
            live.out_of_reach.to_string() == part
        };
        let said = |part: &str| Limits { out_of_reach: Some(part.to_owned()), ..Limits::default() };
        let cases = [(None, "10%", "10%", "30%"), (Some("20%"), "10%", "10%", "20%"), (Some("5%"), "60%", "5%", "5%")];
        for (own, daemons, beside_it, alone) in cases {
            let own: Option<OutOfReach> = own.map(|part| part.parse().expect("it is a part"));
            let mut said_limits = DaemonLimits::beside(own);
            said_limits.apply(&session, &said(daemons));
            wait_until("the smaller one", || is_now(beside_it));
            said_limits.end(&session);
            wait_until("the run's own", || is_now(alone));
        }
        let mut said_limits = DaemonLimits::default();
        said_limits.apply(&session, &Limits::default());
        wait_until("the default beside a daemon of an earlier release", || is_now("30%"));
        session.stop_manager();
    }

    #[test]
    fn the_daemon_sets_the_rates_and_the_burst_is_the_runs_own() {
        let said = Limits { copy_per_second: 7 << 20, cpu_share: 1_250, ..Limits::default() };
        let limits = limits_of(&said);
        assert_eq!((limits.copy_per_second.get(), limits.cpu_share), (7 << 20, PerTenThousand::new(1_250)));
        assert_eq!(limits.burst, BudgetLimits::default().burst);
    }
}
