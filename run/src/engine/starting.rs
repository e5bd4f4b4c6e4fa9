//! Starts a prepared guest or native kernel: its threads, its manager, its sockets, each inside the sandbox.

use std::sync::Arc;

use wideleaf_attach::host_clock::HostClock;
use wideleaf_attach::live_view::OwnGuest;
use wideleaf_memory::manager::{ManagedVm, ManagerLoop};
use wideleaf_memory::recorder::RecordTo;
use wideleaf_memory::walk_cost::ChosenWalkCost;
use wideleaf_memory::{Host as _, Manager, SecondLevel};
use wideleaf_policies::{PerTenThousand, VmId};
use wideleaf_vmm::devices::virtio::block::DiskLocks;
use wideleaf_vmm::sandbox::ThreadKind;

use super::running::{GuestWork, Running, Working};
use super::{Prepared, WALK_COST_FACT, begin_console, serve_lines};
use crate::control_socket::{Controlled, ControlledVm};
use crate::devices::WatchedDevices;
use crate::environment::Environment;
use crate::failure::Failure;
use crate::guarantee::WatchedGuarantee;
use crate::guest::{Fill, GuestPlan, Outside, RunningGuest};
use crate::migration::Incoming;
use crate::past_saves::{Arrival, AskArrival, PastSaves};
use crate::policy_switch::PolicySwitch;
use crate::recording::QueuedFile;
use crate::registered::{OwnOptions, Registered};
use crate::report::Left;
use crate::sandboxed;
use crate::save_thread::SavingThread;
use crate::snapshot::parts::SavedParts;
use crate::snapshot::restoring::teardown::Teardown;
use crate::spec::{Console, RunSpec};
use crate::users_pause::UsersPause;

impl<'a> Prepared<'a> {
    pub(super) fn start(mut self) -> Result<Running<'a>, Failure> {
        match self.plan.take() {
            None => self.start_native(),
            Some(plan) => self.start_guest(plan),
        }
    }

    fn start_native(mut self) -> Result<Running<'a>, Failure> {
        let manager = self.start_manager(None)?;
        self.session.attach(None, Some(manager));
        let watched = Arc::new(std::mem::take(&mut self.watched));
        let work = Working::Native;
        Ok(Running { work, paging: "none", environment: Environment::capture(), sandboxed: None, watched, of: self })
    }

    fn start_guest(mut self, plan: GuestPlan) -> Result<Running<'a>, Failure> {
        let spec = self.spec;
        let is_console = spec.console == Console::Bytes;
        let mut console = is_console.then(|| self.front.open_console(self.interrupts)).transpose()?;
        let bytes = console.as_ref().map(|console| console.sink());
        let (sandbox, fill) = (self.sandbox.clone(), self.incoming.clone().map(|incoming| self.fill(incoming)));
        let outside = Outside { bytes, devices: std::mem::take(&mut self.devices), sandbox, fill };
        let guest = plan.start(self.ram.clone(), &self.session, &self.front, spec.console, outside)?;
        let watched = Arc::new(std::mem::take(&mut self.watched).driven_by(guest.drivers()));
        let kvm = guest.second_level();
        let begun = serve_lines(&*self.front, self.sandbox.as_ref())
            .and_then(|()| match &mut console {
                Some(console) => console.begin(guest.machine(), begin_console(self.sandbox.as_ref())),
                None => Ok(()),
            })
            .and_then(|()| spec.sandbox.as_ref().map_or(Ok(()), sandboxed::check_output))
            .and_then(|()| self.start_manager(Some(kvm.clone())));
        // Otherwise a vCPU that waits for the manager with its line would keep a stopped guest from ending.
        let manager = begun.inspect_err(|_| self.session.attach(None, None))?;
        self.session.attach(Some(kvm), Some(manager));
        let policy = Arc::new(PolicySwitch::new(spec.policy.clone(), self.walk.cost));
        let past = self.past_saves();
        let saving = self.serve_socket(&guest, &policy, &watched, &past)?;
        let registration = self.register(&policy, past.clone());
        let (guarantee, short) = (spec.guarantee, self.short_of_guarantee.take());
        let kept = WatchedGuarantee::start(guarantee, short, &policy, &self.session, &self.front, self.sandbox.clone());
        // The environment is read while the guest starts: reading some files takes as long as the start itself.
        let environment = Environment::capture();
        let teardown = self.start_teardown()?;
        self.sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Main));
        let sandboxed = guest.sandboxed();
        if let Some(incoming) = &self.incoming
            && let Err(why) = incoming.switch(&guest, &|| self.session.counters_now(), self.interrupts)
        {
            // Its devices may wait for RAM that does not come now: the source must not wait for them.
            incoming.refuse(&why.to_string());
            drop((kept, registration, saving));
            self.tear_down(teardown, guest);
            return Err(why);
        }
        if self.incoming.is_some() {
            past.count_arrival();
        }
        let paging = plan.paging;
        // The plan is given back with the sandbox.
        self.plan = Some(plan);
        let _registration = registration;
        let work = GuestWork { saving, guest, teardown, console, _registration, policy, kept };
        let work = Working::Guest(Box::new(work));
        Ok(Running { work, paging, environment, sandboxed, watched, of: self })
    }

    /// Record of the saves of this guest, with the figures of its source where it comes from another run.
    fn past_saves(&self) -> PastSaves {
        let arrival = self.incoming.as_ref().map(|incoming| {
            let incoming = Arc::downgrade(incoming);
            let figures = move || {
                let Left { downtime_ms, before_pause, .. } = incoming.upgrade()?.figures_of_source()?;
                Some(Arrival { downtime_ms, before_pause })
            };
            Arc::new(figures) as AskArrival
        });
        PastSaves::new(arrival)
    }

    /// Starts the thread that drops a guest of which a part of RAM may not come. It does what the main thread would.
    fn start_teardown(&self) -> Result<Option<Teardown<RunningGuest>>, Failure> {
        if self.restoring.is_none() && self.incoming.is_none() {
            return Ok(None);
        }
        let sandbox = self.sandbox.clone();
        let begin = move || {
            let entered = sandbox.iter().try_for_each(|sandbox| sandbox.enter_thread(ThreadKind::Main));
            entered.unwrap_or_else(|error| panic!("cannot restrict the thread that takes the guest apart: {error}"));
        };
        Teardown::start(begin)
            .map(Some)
            .map_err(|error| Failure::Host(format!("cannot start the thread that takes the guest apart: {error}")))
    }

    /// Completes the RAM of a guest that comes from another run.
    fn fill(&self, incoming: Arc<Incoming>) -> Fill {
        let (sandbox, session) = (self.sandbox.clone(), self.session.clone());
        let may_recover = self.spec.control_socket.is_some();
        Box::new(move |ram, on_failure| {
            let begin = move || sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Faults));
            let count = Box::new(move || session.counters_now());
            incoming.begin_filling(ram, on_failure, may_recover, begin, count)
        })
    }

    fn start_manager(&mut self, second_level: Option<Arc<dyn SecondLevel>>) -> Result<Manager, Failure> {
        let progress = Some(self.session.readings());
        let guarantee = PerTenThousand::new(self.spec.guarantee.share().unwrap_or(0));
        let accesses_before = std::mem::take(&mut self.accesses_before);
        let vm = ManagedVm {
            progress,
            guarantee,
            accesses_before,
            ..ManagedVm::new(VmId(0), self.ram.clone(), second_level)
        };
        let policy = self.spec.policy.make_for(&self.walk.cost);
        let mut work = ManagerLoop::new(self.host.clone(), vec![vm], policy, self.config);
        if let Some(giant_maker) = &self.giant_maker {
            work = work.with_giant_maker(giant_maker.maker());
        }
        if let Some(why) = self.giant_before_loading.take() {
            work = work.without_giant_page(&why);
        }
        if let Some(file) = self.record.take() {
            let begin = begin_console(self.sandbox.as_ref());
            let file = QueuedFile::start(file, move || begin());
            let file = file.map_err(|error| Failure::Host(format!("cannot start the thread of --record: {error}")))?;
            let to = RecordTo { file: Box::new(file), facts: facts(self.spec, &self.walk) };
            work = work.recorded(to).map_err(|error| Failure::Usage(format!("cannot record (--record): {error}")))?;
        }
        Manager::spawn_loop(work).map_err(|error| Failure::Host(error.to_string()))
    }

    /// Answers clients of the VM's control socket, if it has one. The thread that saves the VM at a client's request
    /// ends before the guest's memory does.
    fn serve_socket(
        &mut self,
        guest: &RunningGuest,
        policy: &Arc<PolicySwitch>,
        watched: &Arc<WatchedDevices>,
        past: &PastSaves,
    ) -> Result<Option<Arc<SavingThread>>, Failure> {
        if self.socket.is_none() {
            return Ok(None);
        }
        let pause = Arc::new(UsersPause::new(guest.machine(), watched.locks().clone()));
        let saving = Arc::new(self.start_saving(guest, policy, &pause, watched.locks(), past)?);
        let parts = Controlled {
            pause,
            saving: Arc::downgrade(&saving),
            past: past.clone(),
            restoring: self.restoring.clone(),
            arriving: self.incoming.clone(),
            session: Arc::downgrade(&self.session),
            policy: policy.clone(),
            guest: OwnGuest::of_this_process(&self.ram, HostClock::showing(self.host.now())),
            devices: watched.clone(),
            workload: self.spec.workload_name(),
        };
        if let Some(socket) = &mut self.socket {
            socket.serve(ControlledVm::new(guest.machine(), parts), self.sandbox.as_ref());
        }
        Ok(Some(saving))
    }

    fn start_saving(
        &self,
        guest: &RunningGuest,
        policy: &Arc<PolicySwitch>,
        pause: &Arc<UsersPause>,
        disks: &DiskLocks,
        past: &PastSaves,
    ) -> Result<SavingThread, Failure> {
        let parts = SavedParts {
            ram: self.ram.clone(),
            host: self.host.clone(),
            second_level: guest.machine().kvm_second_level().clone(),
            machine: guest.machine().saver(),
            control: guest.machine().control(),
            session: Arc::downgrade(&self.session),
            pause: pause.clone(),
            policy: policy.clone(),
            restoring: self.restoring.clone(),
            disks: disks.clone(),
            is_arriving: {
                let incoming = self.incoming.clone();
                Box::new(move || incoming.as_ref().is_some_and(|incoming| incoming.is_filling()))
            },
            past: past.clone(),
            spec: self.spec.clone(),
        };
        let sandbox = self.sandbox.clone();
        let begin = move || sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Save));
        SavingThread::start(parts, begin)
            .map_err(|error| Failure::Host(format!("cannot start the thread that saves the VM: {error}")))
    }

    fn register(&self, policy: &Arc<PolicySwitch>, past: PastSaves) -> Option<Registered> {
        let socket = self.spec.daemon.as_ref()?;
        let guest = OwnGuest::of_this_process(&self.ram, HostClock::showing(self.host.now()));
        let own = OwnOptions { guarantee: self.spec.guarantee, out_of_reach: self.spec.out_of_reach };
        Some(Registered::start(socket, policy, guest, own, past, &self.session, self.sandbox.clone()))
    }
}

/// Facts about the run, for its recording.
fn facts(spec: &RunSpec, walk: &ChosenWalkCost) -> Vec<(String, String)> {
    let Environment { kernel, cpu, cpus, thp_enabled, is_virtual, wideleaf, .. } = Environment::capture();
    let facts = [
        ("workload", spec.workload_name()),
        ("cmdline", spec.cmdline.clone()),
        ("mode", if spec.is_native { "native" } else { "guest" }.to_owned()),
        ("kernel", kernel),
        ("cpu", cpu),
        ("cpus", cpus.to_string()),
        ("thp_enabled", thp_enabled),
        ("is_virtual", is_virtual.to_string()),
        ("wideleaf", wideleaf),
        (WALK_COST_FACT, walk.cost.to_string()),
    ];
    facts.map(|(name, value)| (name.to_owned(), value)).to_vec()
}
