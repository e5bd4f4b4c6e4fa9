//! The guests of this machine, through `wideleaf_attach`.

use std::path::Path;

use wideleaf_attach::find;
use wideleaf_attach::session::{self, Attached};
use wideleaf_attach::survey::Survey;
use wideleaf_attach::{Places, VmProcess};
use wideleaf_control::protocol::{BidsReport, Target};
use wideleaf_control::view::{Explanation, VmView, WindowMap};
use wideleaf_memory::sensors::damon;
use wideleaf_memory::walk_cost::ChosenWalkCost;
use wideleaf_policies::{BudgetLimits, HugePagePrice, PolicyChoice};

use super::{Care, Found, Guests, ProcessId, WindowCounts};
use crate::config::{PolicySetting, Wanted};

/// The guests that run on this machine.
#[derive(Debug)]
pub struct RealGuests {
    places: Places,
    /// Cost of a TLB miss here, as of the daemon's start.
    walk: ChosenWalkCost,
}

impl RealGuests {
    /// The guests according to `/proc` and libvirt's files.
    pub fn of_this_machine() -> RealGuests {
        let walk = ChosenWalkCost::read(Path::new("/"));
        tracing::info!("policies count {walk}");
        walk.note.iter().for_each(|note| tracing::warn!("{note}"));
        // A daemon that was killed leaves it on for as long as its guests run, and this one may watch no guest.
        if damon::give_back_left_behind(Path::new("/")).unwrap_or(false) {
            tracing::info!("the kernel's monitor (DAMON), which a killed wideleaf process had left on, is given back");
        }
        RealGuests { places: Places::default(), walk }
    }

    /// The process of `found`; its number may belong to another by now.
    fn process(&self, found: &Found) -> Result<VmProcess, String> {
        let process = find::with_pid(&self.places, found.process.pid).map_err(|error| error.to_string())?;
        if process.started_at == found.process.started_at {
            Ok(process)
        } else {
            Err(format!("{} has ended", found.name))
        }
    }

    fn survey(&self, found: &Found) -> Result<Survey, String> {
        Ok(Survey::take(&self.process(found)?, None))
    }
}

impl Guests for RealGuests {
    fn find(&self) -> Result<Vec<Found>, String> {
        let all = find::all(&self.places).map_err(|error| error.to_string())?;
        Ok(all.guests.iter().map(found).collect())
    }

    fn resolve(&self, target: &Target) -> Result<Found, String> {
        find::resolve(&self.places, target).map(|process| found(&process)).map_err(|error| error.to_string())
    }

    fn look(&self, found: &Found) -> Result<VmView, String> {
        self.survey(found).map(|survey| survey.view())
    }

    fn explain(&self, found: &Found) -> Result<Explanation, String> {
        self.survey(found).map(|survey| survey.explanation())
    }

    fn windows(&self, found: &Found) -> Result<WindowMap, String> {
        self.survey(found).map(|survey| survey.windows())
    }

    fn attach(&self, found: &Found, wanted: &Wanted, is_left_alone: bool) -> Result<Box<dyn Care>, String> {
        let settings = session::Settings {
            policy: choice(&wanted.policy),
            may_collapse_shared: wanted.collapse_shared,
            qmp: wanted.qmp.clone(),
            limits: BudgetLimits::default(),
            out_of_reach: wanted.out_of_reach,
            walk: self.walk.cost,
            recovery: wanted.recovery,
            is_left_alone,
        };
        let attached = Attached::start(self.process(found)?, settings).map_err(|error| error.to_string())?;
        Ok(Box::new(RealCare { attached, wanted: wanted.clone() }))
    }
}

fn found(process: &VmProcess) -> Found {
    Found {
        process: ProcessId { pid: process.pid, started_at: process.started_at },
        // A process chooses its name, while a log entry of the daemon is one line.
        name: process.name.replace(char::is_control, "?"),
        uuid: process.uuid.clone(),
        domain: process.domain.clone(),
        is_name_anothers: process.is_name_anothers,
        vmm: process.vmm,
        no_answer: process.no_answer.clone(),
    }
}

fn choice(policy: &PolicySetting) -> Option<PolicyChoice> {
    match policy {
        PolicySetting::Off => None,
        PolicySetting::Use(choice) => Some(choice.clone()),
    }
}

/// A guest under a manager of `memory`.
struct RealCare {
    attached: Attached,
    wanted: Wanted,
}

impl Care for RealCare {
    fn view(&mut self) -> VmView {
        self.attached.view()
    }

    fn explain(&mut self) -> Explanation {
        self.attached.explain()
    }

    fn windows(&mut self) -> WindowMap {
        self.attached.windows()
    }

    fn counts(&mut self) -> WindowCounts {
        WindowCounts::from(&self.attached.explain())
    }

    fn bids(&mut self) -> Option<BidsReport> {
        self.attached.bids()
    }

    /// A manager with an unchanged policy continues: a new one would have to learn again what is hot.
    fn apply(&mut self, wanted: &Wanted) -> Result<(), String> {
        if wanted.policy != self.wanted.policy {
            self.attached.set_policy(choice(&wanted.policy)).map_err(|error| error.to_string())?;
        }
        self.attached.set_recovery(wanted.recovery);
        self.attached.set_out_of_reach(wanted.out_of_reach);
        self.wanted = wanted.clone();
        Ok(())
    }

    fn set_limits(&mut self, limits: BudgetLimits) {
        self.attached.set_limits(limits);
    }

    fn set_may_grow(&mut self, may_grow: bool) {
        self.attached.set_may_grow(may_grow);
    }

    fn set_huge_page_price(&mut self, price: Option<HugePagePrice>) {
        self.attached.set_huge_page_price(price);
    }

    fn promise_huge_pages(&mut self, pages: u64) {
        self.attached.promise_huge_pages(pages);
    }

    fn leave_alone(&mut self, is_asked: bool) {
        self.attached.leave_alone(is_asked);
    }

    fn has_ended(&self) -> bool {
        self.attached.has_ended()
    }

    fn stop(self: Box<Self>) {
        self.attached.stop();
    }
}
