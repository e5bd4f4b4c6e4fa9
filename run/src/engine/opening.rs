//! The first steps of a run: what it opens before its sandbox is planned, and its memory.
//!
//! ```text
//!   RunSpec ─▶ Opened ───────────────────▶ sandbox is planned ─▶ Memory
//!              files, devices, backing,                          claim, control socket, RAM
//!              snapshot, plan of the guest
//! ```
//!
//! Each keeps its fields in the order in which they are given back where a later step fails: the reverse of the order
//! in which they are taken.

use std::path::Path;
use std::sync::Arc;

use wideleaf_memory::host::process::{self, ProcessHost};
use wideleaf_memory::manager::AccessesBefore;
use wideleaf_memory::{BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::GpaRange;
use wideleaf_vmm::devices::virtio::VirtioDevice;
use wideleaf_vmm::sandbox::Sandbox;

use crate::control_socket::ControlSocket;
use crate::devices::{Devices, WatchedDevices};
use crate::failure::Failure;
use crate::front_end::FrontEnd;
use crate::guarantee;
use crate::guardian::giant_pages::HeldGiantMaker;
use crate::guardian::path::HeldPath;
use crate::guards::Noted;
use crate::guest::{self, GuestPlan};
use crate::interrupts::Interrupts;
use crate::migration::Incoming;
use crate::numa::NumaPlan;
use crate::output_file::OutputFile;
use crate::ram::ChosenBacking;
use crate::session::SavedSession;
use crate::snapshot::SavedRun;
use crate::snapshot::restoring::{Continued, Restoring};
use crate::spec::RunSpec;
use crate::{native, numa, ram, sandboxed};

/// What a run opens and checks before anything of it can be seen from outside. The process has one thread until then.
pub(super) struct Opened {
    /// Plan of the guest; `None` for a native run.
    pub plan: Option<GuestPlan>,
    /// Samples of accesses that came with a guest that continues.
    pub accesses_before: Vec<AccessesBefore>,
    /// What a guest that continues has said so far.
    pub said: Option<SavedSession>,
    /// Snapshot that the guest continues, if it does.
    pub restoring: Option<Arc<Restoring>>,
    pub giant_maker: Option<HeldGiantMaker>,
    /// Reason why the host could not meet the guarantee at the start, if it could not.
    pub short_of_guarantee: Option<String>,
    pub numa: NumaPlan,
    pub chosen: ChosenBacking,
    pub held: Vec<HeldPath>,
    /// Observable parts of the devices.
    pub watched: WatchedDevices,
    pub devices: Vec<Box<dyn VirtioDevice>>,
    pub record: Option<OutputFile>,
    /// Run that the guest comes from, if it does.
    pub incoming: Option<Arc<Incoming>>,
}

impl Opened {
    /// Opens and checks everything that needs no guest.
    pub fn open(spec: &RunSpec, incoming: Option<Arc<Incoming>>, front: &dyn FrontEnd) -> Result<Opened, Failure> {
        let record = spec.record.as_deref().map(|path| OutputFile::open("--record", path)).transpose()?;
        let opened = Devices::open(&spec.devices, spec.memory, incoming.is_some(), front)?;
        let (devices, watched, held) = opened.hand_over();
        ram::check_size(spec)?;
        let chosen = ram::choose_backing(spec)?;
        let backing = chosen.backing;
        let numa = numa::plan(spec, spec.restore.is_some() || incoming.is_some(), backing, Path::new("/"))?;
        numa.said.iter().for_each(|line| front.say(line));
        let short_of_guarantee = guarantee::check_at_start(spec, backing, ram::available())?;
        short_of_guarantee.iter().for_each(|why| front.say(&below_at_start(spec, why)));
        let takeable = ram::takeable(backing);
        let continued = spec.restore.as_deref().map(|folder| Restoring::open(folder, spec, takeable)).transpose()?;
        let makes_giants = backing.kind() == BackingKind::Anon && spec.giant_pages_made_max > 0;
        let giant_maker = makes_giants.then(|| HeldGiantMaker::start(spec.giant_pages_made_max)).transpose()?;
        let mut opened = Opened {
            plan: None,
            accesses_before: Vec::new(),
            said: None,
            restoring: None,
            giant_maker,
            short_of_guarantee,
            numa,
            chosen,
            held,
            watched,
            devices,
            record,
            incoming,
        };
        opened.plan_guest(spec, continued, front)?;
        Ok(opened)
    }

    fn plan_guest(
        &mut self,
        spec: &RunSpec,
        continued: Option<(Restoring, Continued)>,
        front: &dyn FrontEnd,
    ) -> Result<(), Failure> {
        let (backing, numa) = (self.chosen.backing, &self.numa);
        self.plan = match continued {
            _ if spec.is_native => None,
            None if self.incoming.is_some() => Some(guest::plan_incoming(spec, backing, numa)?),
            None => Some(guest::plan(spec, backing, numa, front)?),
            Some((filling, Continued { machine, session, accesses })) => {
                let filling = Arc::new(filling);
                (self.restoring, self.said) = (Some(filling.clone()), Some(session));
                self.accesses_before = accesses.before();
                Some(guest::plan_restored(spec, backing, numa, machine, filling)?)
            }
        };
        Ok(())
    }

    /// Plans the sandbox, if the run has one.
    pub fn plan_sandbox(&self, spec: &RunSpec) -> Result<Option<Arc<Sandbox>>, Failure> {
        let sandbox = spec.sandbox.as_ref();
        sandbox.map(|sandbox| sandboxed::plan(sandbox, spec, self.continues(), &self.numa)).transpose()
    }

    /// Whether the guest has run before, in another run.
    fn continues(&self) -> bool {
        self.restoring.is_some() || self.incoming.is_some()
    }

    fn layout(&self, spec: &RunSpec) -> Result<Vec<GpaRange>, Failure> {
        self.plan.as_ref().map_or_else(|| native::layout(spec.memory), |plan| Ok(plan.layout()))
    }

    /// Receives a guest that comes from another run, up to the pause there, and the locks of its disks.
    pub fn receive(&mut self, spec: &RunSpec, memory: &Memory, interrupts: &Interrupts) -> Result<(), Failure> {
        let (Some(incoming), Some(plan)) = (&self.incoming, &mut self.plan) else { return Ok(()) };
        let SavedRun { session, accesses, machine, .. } =
            incoming.receive(&memory.ram, &*memory.host, &spec.policy, interrupts)?;
        // The sandbox takes no locks.
        incoming.take_disks(self.watched.locks())?;
        plan.arrived(machine, self.watched.locks().clone());
        (self.said, self.accesses_before) = (Some(session), accesses.before());
        Ok(())
    }
}

/// Claim of this process on its own guest.
pub(super) type Claim = (Option<process::Claim>, Noted);

/// The memory of a run, with what exists before a daemon could find the guest.
pub(super) struct Memory {
    pub host: Arc<LinuxHost>,
    /// Why the loader's giant is not on a page of 1 GiB, if the policy wanted one there.
    pub giant_before_loading: Option<String>,
    pub ram_noted: Noted,
    pub ram: Arc<GuestRam>,
    pub socket: Option<ControlSocket>,
    pub claim: Claim,
}

impl Memory {
    /// Claims this process, opens the control socket, and maps the RAM.
    pub fn map(spec: &RunSpec, opened: &Opened) -> Result<Memory, Failure> {
        let layout = opened.layout(spec)?;
        // This happens before a guest exists that a daemon could find. The daemon also recognises this process by the
        // program's name, which any process may imitate. If the kernel does not lock that file, the name has to
        // suffice.
        let claim = (ProcessHost::claim_this_one().ok().flatten(), Noted::taken("claim"));
        let socket = spec.control_socket.as_deref().map(ControlSocket::open).transpose()?;
        let ChosenBacking { backing, pages_to_make, .. } = opened.chosen;
        let ram = ram::map(&layout, backing, pages_to_make, &opened.numa)?;
        let ram_noted = Noted::taken("RAM");
        let giant_before_loading = match &opened.plan {
            Some(_) if !opened.continues() => {
                ram::giant_before_loading(spec, &ram, opened.giant_maker.as_ref().map(HeldGiantMaker::maker))?
            }
            _ => None,
        };
        let host = Arc::new(LinuxHost::open().map_err(|error| Failure::Host(error.to_string()))?);
        Ok(Memory { host, giant_before_loading, ram_noted, ram, socket, claim })
    }

    /// Touches all pages that must be there before the guest runs. Pages of a guest that is restored come by faults; a
    /// page that is there already would stay empty.
    pub fn populate(
        &self,
        spec: &RunSpec,
        opened: &Opened,
        front: &dyn FrontEnd,
        interrupts: &Interrupts,
    ) -> Result<(), Failure> {
        let backing = opened.chosen.backing;
        if spec.is_prefaulted || (opened.numa.must_populate(backing) && opened.restoring.is_none()) {
            ram::check_available(spec.memory, backing)?;
            ram::prefault_all(&self.host, &self.ram, front, interrupts)?;
        }
        Ok(())
    }
}

/// Line about a guarantee that does not prevent the start.
fn below_at_start(spec: &RunSpec, why: &str) -> String {
    format!("wideleaf: the guest starts below its guarantee of {}: {why}", spec.guarantee)
}
