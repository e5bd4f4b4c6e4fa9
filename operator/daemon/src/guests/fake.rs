//! Guests that exist only in tests: they come and go, grow and fail as a test says.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_control::protocol::{BidsReport, Target};
use wideleaf_control::view::{self, BackingView, Explanation, Reason, VmView, Vmm, WindowMap, WindowRange, WorkView};
use wideleaf_memory::manager::OutOfReach;
use wideleaf_policies::{BudgetLimits, HugePagePrice};

use super::{Care, Found, Guests, ProcessId, WindowCounts};
use crate::config::{PolicySetting, Wanted};

/// One guest, and the calls that it received.
#[derive(Clone, Debug)]
pub struct FakeGuest {
    /// Identity of the guest.
    pub found: Found,
    /// Backing of its memory.
    pub backing: BackingView,
    /// Counters of its manager.
    pub work: WorkView,
    /// Reason why its manager leaves it alone, if it does.
    pub left_alone: Option<String>,
    /// Whether it has ended.
    pub has_ended: bool,
    /// Reason why it cannot be attached, if it cannot.
    pub attach_error: Option<String>,
    /// A thread that attaches, surveys or explains the guest waits until no other thread holds this.
    pub busy: Arc<Mutex<()>>,
    /// A thread that sets the guest's limits waits until no other thread holds this.
    pub deaf: Arc<Mutex<()>>,
    /// Number of times that it was attached.
    pub attached: u32,
    /// Number of times that it was detached.
    pub stopped: u32,
    /// Monitor that its manager asks.
    pub qmp: Option<PathBuf>,
    /// Policy that it received last.
    pub policy: Option<PolicySetting>,
    /// Limits that it received last.
    pub limits: Option<BudgetLimits>,
    /// Part of the time out of reach that it received last.
    pub out_of_reach: Option<OutOfReach>,
    /// Permission to grow that it received last.
    pub may_grow: bool,
    /// Bids of its policy.
    pub bids: Option<BidsReport>,
    /// Price of huge pages that it received last.
    pub price: Option<HugePagePrice>,
    /// Number of free huge pages that its manager was told of.
    pub promised: u64,
}

impl FakeGuest {
    fn view(self) -> VmView {
        let care = match (&self.policy, self.left_alone) {
            (None, _) => view::Care::Unmanaged,
            (Some(PolicySetting::Off), _) => view::Care::Off,
            (_, Some(reason)) => view::Care::LeftAlone { reason },
            _ => view::Care::Managed,
        };
        VmView {
            name: self.found.name,
            uuid: self.found.uuid,
            pid: self.found.process.pid,
            started_at: self.found.process.started_at,
            vmm: self.found.vmm,
            cgroup: None,
            care,
            work: self.policy.is_some().then_some(self.work),
            policy: self.policy.map(|policy| policy.to_string()),
            guarantee: view::Guarantee::BestEffort,
            ram: Vec::new(),
            backing: Some(self.backing),
            scan_age_s: None,
            mapping: None,
            page_tables: None,
            numa: None,
            guest_pages: None,
            saved: view::SavedView::default(),
            notes: Vec::new(),
        }
    }

    fn explanation(self) -> Explanation {
        let (huge, others) = (self.backing.huge_2m >> 21, self.backing.base_4k >> 21);
        let reason = Reason { name: "not_chosen".into(), windows: others, text: "the policy has not chosen it".into() };
        Explanation {
            name: self.found.name,
            windows: Some(huge + others),
            huge: Some(huge),
            reasons: vec![reason],
            ..Explanation::default()
        }
    }

    fn windows(self) -> WindowMap {
        let of = |character: &str, bytes: u64| character.repeat((bytes >> 21) as usize);
        let backing = of("2", self.backing.huge_2m) + &of("4", self.backing.base_4k);
        let unknown = "?".repeat(backing.len());
        let range =
            WindowRange { gpa: 0, backing, second_level: unknown.clone(), heat: unknown, ..WindowRange::default() };
        WindowMap { name: self.found.name, ranges: vec![range], ..WindowMap::default() }
    }
}

/// Reason why a manager leaves a guest alone at a client's request.
const ASKED: &str = "this was asked for";

/// Path of the monitor of a guest with that name.
pub fn monitor_of(name: &str) -> PathBuf {
    PathBuf::from(format!("/run/{name}.qmp"))
}

/// The guests of a host that a test makes up. Clones share the host.
#[derive(Clone, Debug, Default)]
pub struct FakeGuests {
    guests: Arc<Mutex<BTreeMap<u32, FakeGuest>>>,
    is_hidden: Arc<AtomicBool>,
    slow_find: Arc<Mutex<()>>,
}

impl FakeGuests {
    /// Starts a guest of 4 MiB, half of it huge, which is not a libvirt domain.
    pub fn start(&self, pid: u32, name: &str) -> ProcessId {
        let process = ProcessId { pid, started_at: u64::from(pid) * 100 };
        let uuid = Some(format!("00000000-0000-0000-0000-{pid:012}"));
        let guest = FakeGuest {
            found: Found {
                process,
                name: name.to_owned(),
                uuid,
                domain: None,
                is_name_anothers: false,
                vmm: Vmm::Qemu,
                no_answer: None,
            },
            backing: BackingView { base_4k: 2 << 20, huge_2m: 2 << 20, ..BackingView::default() },
            work: WorkView::default(),
            left_alone: None,
            has_ended: false,
            attach_error: None,
            busy: Arc::default(),
            deaf: Arc::default(),
            attached: 0,
            stopped: 0,
            qmp: None,
            policy: None,
            limits: None,
            out_of_reach: None,
            may_grow: true,
            bids: None,
            price: None,
            promised: 0,
        };
        self.all().insert(pid, guest);
        process
    }

    /// Starts a guest that is the libvirt domain of that name.
    pub fn start_domain(&self, pid: u32, name: &str) -> ProcessId {
        let process = self.start(pid, name);
        self.change(pid, |guest| guest.found.domain = Some(name.to_owned()));
        process
    }

    /// View of a guest that is started for it.
    pub fn started_view(&self, pid: u32) -> VmView {
        self.start(pid, "ours");
        self.guest(pid).view()
    }

    /// Changes one guest.
    ///
    /// # Panics
    /// Where no guest has that process id.
    pub fn change(&self, pid: u32, change: impl FnOnce(&mut FakeGuest)) {
        change(self.all().get_mut(&pid).expect("the test started it"));
    }

    /// Sets whether the list of running guests is unavailable.
    pub fn hide(&self, is_hidden: bool) {
        self.is_hidden.store(is_hidden, Ordering::Relaxed);
    }

    /// A scan for guests waits until no thread holds this.
    pub fn slow_find(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.slow_find)
    }

    /// State of one guest now.
    ///
    /// # Panics
    /// Where no guest has that process id.
    pub fn guest(&self, pid: u32) -> FakeGuest {
        self.all().get(&pid).expect("the test started it").clone()
    }

    /// State of one guest once it answers.
    fn once_free(&self, pid: u32) -> FakeGuest {
        let guest = self.guest(pid);
        drop(guest.busy.lock());
        guest
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u32, FakeGuest>> {
        self.guests.lock()
    }
}

impl Guests for FakeGuests {
    fn find(&self) -> Result<Vec<Found>, String> {
        drop(self.slow_find.lock());
        if self.is_hidden.load(Ordering::Relaxed) {
            return Err("cannot list processes".into());
        }
        Ok(self.all().values().filter(|guest| !guest.has_ended).map(|guest| guest.found.clone()).collect())
    }

    fn resolve(&self, target: &Target) -> Result<Found, String> {
        let is_it = |found: &Found| match target {
            Target::Pid(pid) => found.process.pid == *pid,
            Target::Domain(name) => found.name == *name || found.uuid.as_ref() == Some(name),
            Target::Qmp(path) => *path == monitor_of(&found.name),
        };
        self.find()?.into_iter().find(is_it).ok_or_else(|| format!("there is no guest {target:?}"))
    }

    fn look(&self, found: &Found) -> Result<VmView, String> {
        Ok(self.once_free(found.process.pid).view())
    }

    fn explain(&self, found: &Found) -> Result<Explanation, String> {
        Ok(self.guest(found.process.pid).explanation())
    }

    fn windows(&self, found: &Found) -> Result<WindowMap, String> {
        Ok(self.guest(found.process.pid).windows())
    }

    fn attach(&self, found: &Found, wanted: &Wanted, is_left_alone: bool) -> Result<Box<dyn Care>, String> {
        let pid = found.process.pid;
        if let Some(error) = self.once_free(pid).attach_error {
            return Err(error);
        }
        self.change(pid, |guest| {
            guest.attached += 1;
            guest.policy = Some(wanted.policy.clone());
            guest.out_of_reach = Some(wanted.out_of_reach);
            guest.qmp = wanted.qmp.clone();
            guest.left_alone = is_left_alone.then(|| ASKED.to_owned());
        });
        Ok(Box::new(FakeCare { guests: self.clone(), pid }))
    }
}

struct FakeCare {
    guests: FakeGuests,
    pid: u32,
}

impl Care for FakeCare {
    fn view(&mut self) -> VmView {
        self.guests.guest(self.pid).view()
    }

    fn explain(&mut self) -> Explanation {
        self.guests.once_free(self.pid).explanation()
    }

    fn windows(&mut self) -> WindowMap {
        self.guests.guest(self.pid).windows()
    }

    fn counts(&mut self) -> WindowCounts {
        WindowCounts::from(&self.guests.guest(self.pid).explanation())
    }

    fn bids(&mut self) -> Option<BidsReport> {
        self.guests.guest(self.pid).bids
    }

    fn apply(&mut self, wanted: &Wanted) -> Result<(), String> {
        if wanted.policy.to_string().starts_with("giant") {
            return Err("giant needs a guest of our own".into());
        }
        self.guests.change(self.pid, |guest| {
            guest.policy = Some(wanted.policy.clone());
            guest.out_of_reach = Some(wanted.out_of_reach);
        });
        Ok(())
    }

    fn set_limits(&mut self, limits: BudgetLimits) {
        drop(self.guests.guest(self.pid).deaf.lock());
        self.guests.change(self.pid, |guest| guest.limits = Some(limits));
    }

    fn set_may_grow(&mut self, may_grow: bool) {
        self.guests.change(self.pid, |guest| guest.may_grow = may_grow);
    }

    fn set_huge_page_price(&mut self, price: Option<HugePagePrice>) {
        self.guests.change(self.pid, |guest| guest.price = price);
    }

    fn promise_huge_pages(&mut self, pages: u64) {
        self.guests.change(self.pid, |guest| guest.promised += pages);
    }

    fn leave_alone(&mut self, is_asked: bool) {
        let reason = is_asked.then(|| ASKED.to_owned());
        self.guests.change(self.pid, |guest| guest.left_alone = reason);
    }

    fn has_ended(&self) -> bool {
        self.guests.guest(self.pid).has_ended
    }

    fn stop(self: Box<Self>) {
        self.guests.change(self.pid, |guest| {
            guest.stopped += 1;
            guest.policy = None;
        });
    }
}
