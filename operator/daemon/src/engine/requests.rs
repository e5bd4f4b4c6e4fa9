//! Answers to requests, and the permissions that they need.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wideleaf_control::protocol::{ASK_AGAIN, Answer, Limits, LiveReport, Reply, Request, Settings, Target};
use wideleaf_control::view::{self, DaemonView, Explanation, VmView, Vmm, WindowMap, WorkView};

use super::lifecycle::Earlier;
use super::offer::Offer;
use super::vm::{self, Hands, Vm};
use super::{Engine, Table, told};
use crate::guests::{Care, Found, Guests, ProcessId};
use crate::permissions::{Access, Peer, is_reading};
use crate::server::{Answers, ConnectionId, REGISTERED_MAX};
use crate::usage;

/// Number of VMs named in the error for an unknown one.
const NAMES_MAX: usize = 20;

/// Time that libvirt's report of a domain waits for an attach of its guest. A monitor may receive several questions
/// that take up to a second each.
const ATTACH_WAIT: Duration = Duration::from_secs(5);

/// Reason shown for a guest that an earlier daemon managed.
const IS_STARTING: &str = "wideleafd is about to take it up again";

/// Whether the answer needs to know the running guests and the managed ones among them.
fn is_about_guests(request: &Request) -> bool {
    match request {
        Request::List
        | Request::Info { .. }
        | Request::Explain { .. }
        | Request::Windows { .. }
        | Request::Set { .. }
        | Request::Attach { .. }
        | Request::Detach { .. }
        | Request::LeaveAlone { .. } => true,
        Request::Daemon | Request::Rooms | Request::Reload => false,
        Request::Register { .. } | Request::Status { .. } => false,
        // libvirt waits for its hook, and these requests also cover guests that are not taken up yet.
        Request::Prepare { .. } | Request::Started { .. } | Request::Release { .. } => false,
    }
}

/// The engine as the control socket uses it.
pub struct Service {
    engine: Arc<Engine>,
    access: Access,
}

impl Service {
    /// Answers for `engine`, with the permissions of `access`.
    pub fn new(engine: Arc<Engine>, access: Access) -> Service {
        Service { engine, access }
    }
}

impl Answers for Service {
    fn answer(&self, connection: ConnectionId, peer: Peer, request: Request) -> Reply {
        if !is_reading(&request) && !self.access.may_change(peer) {
            let uid = peer.uid;
            return Reply::Error(format!(
                "user {uid} may only read: root and members of socket.group may make changes"
            ));
        }
        let is_to_be_kept = matches!(
            request,
            Request::Set { .. } | Request::Attach { .. } | Request::Detach { .. } | Request::LeaveAlone { .. }
        );
        let answer = match self.engine.answer(connection, peer, request) {
            Ok(answer) => answer,
            Err(why) => return Reply::Error(why),
        };
        // The engine has already tried, and the log has its error. After a success this writes nothing.
        let saved = if is_to_be_kept { self.engine.write_state() } else { Ok(()) };
        match saved {
            Ok(()) => Reply::Ok(Box::new(self.engine.with_mistakes(answer))),
            Err(why) => Reply::Unsaved(format!(
                "the change is in force until wideleafd ends, but cannot be saved: {why}; make room there"
            )),
        }
    }

    fn closed(&self, connection: ConnectionId) {
        self.engine.unregister(connection);
    }
}

/// Function that reads a guest from outside.
type Look<T> = fn(&dyn Guests, &Found) -> Result<T, String>;

/// The guest that a name stands for.
enum Meant {
    /// A guest in the table.
    Managed(ProcessId),
    /// An unmanaged guest.
    Other(Found),
}

impl Engine {
    fn answer(&self, connection: ConnectionId, peer: Peer, request: Request) -> Result<Answer, String> {
        if is_about_guests(&request) {
            self.starting.wait();
        }
        match request {
            Request::Daemon => Ok(Answer::Daemon(self.daemon_view())),
            Request::List => self.list().map(Answer::Vms),
            Request::Rooms => Ok(Answer::Rooms(self.rooms())),
            Request::Info { vm } => self.info(&vm).map(|view| Answer::Vm(Box::new(view))),
            Request::Explain { vm } => self.explain(&vm).map(Answer::Explanation),
            Request::Windows { vm } => self.windows(&vm).map(Answer::Windows),
            Request::Set { vm, changes } => {
                let process = self.managed(&vm)?;
                self.set(process, &changes)?;
                self.save();
                self.view_of(process)
            }
            Request::Attach { target, settings } => {
                let found = self.attach(&target, settings)?;
                self.view_of(found.process)
            }
            Request::Detach { vm } => self.detach(&vm),
            Request::LeaveAlone { vm, for_s } => {
                let process = self.managed(&vm)?;
                self.leave_alone(process, for_s)?;
                self.view_of(process)
            }
            Request::Reload => self.reload().map(|()| Answer::Done).map_err(|error| error.to_string()),
            Request::Register { vm, live } => self.register(connection, peer, *vm, live).map(Answer::Limits),
            Request::Status { vm, live } => self.status(connection, *vm, live).map(Answer::Limits),
            // libvirt does not show a hook's output, unless the hook fails.
            Request::Prepare { domain, uuid, pages, ordinary } => {
                self.prepare(domain, uuid, pages, ordinary).inspect_err(|why| tracing::warn!("{why}"))
            }
            Request::Started { domain, uuid, pid, settings, mistakes, flavor } => {
                self.note_mistakes(&domain, pid, mistakes)?;
                self.note_flavor(pid, flavor)?;
                self.started(domain, &uuid, pid, &settings)
            }
            Request::Release { domain: _, uuid } => {
                self.give_back_rooms(|room| room.uuid == uuid);
                self.save();
                Ok(Answer::Done)
            }
        }
    }

    /// View of the daemon itself.
    pub fn daemon_view(&self) -> DaemonView {
        let promotable = self.promotable();
        let table = self.table();
        DaemonView {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            vms: table.vms.len(),
            copy_per_second: table.config.budget.copy_per_second.get(),
            cpu_share: table.config.budget.cpu_share,
            cpu_s: usage::cpu().as_secs_f64(),
            host_free: table.host.available.get(),
            is_host_short: table.host.is_short,
            promotable,
        }
    }

    /// The managed VMs, and then the others.
    fn list(&self) -> Result<Vec<VmView>, String> {
        let mut views = self.views();
        views.extend(self.others()?);
        Ok(views)
    }

    /// Views of the unmanaged guests.
    fn others(&self) -> Result<Vec<VmView>, String> {
        let found = self.others_found()?;
        let mut views = self.looks.at(&self.doors.guests, &found);
        for found in &found {
            let view = views.iter_mut().find(|view| process_of(view) == found.process);
            view.into_iter().for_each(|view| self.say_if_pending(found, view));
        }
        Ok(views)
    }

    fn others_found(&self) -> Result<Vec<Found>, String> {
        let found = self.looks.found(&self.doors.guests)?;
        let table = self.table();
        Ok(found.into_iter().filter(|found| !table.vms.contains_key(&found.process)).collect())
    }

    /// Marks a guest that an earlier daemon managed: it is not unmanaged, but this daemon has not yet taken
    /// it up again.
    fn say_if_pending(&self, found: &Found, view: &mut VmView) {
        let table = self.table();
        let Some(pending) = table.remembered(found.process) else { return };
        let wanted = table.wanted(found, &pending.said).ok();
        let why = match (&found.no_answer, table.refused.get(&found.process)) {
            (Some(why), _) => format!("it {why}"),
            (None, Some(why)) => format!("wideleafd cannot take it up again and keeps trying: {why}"),
            (None, None) => format!("{IS_STARTING}: {ASK_AGAIN}"),
        };
        view.care = view::Care::LeftAlone { reason: why };
        view.policy = wanted.map(|wanted| wanted.policy.to_string());
        (view.name, view.work) = (pending.name, Some(pending.work));
    }

    fn info(&self, name: &str) -> Result<VmView, String> {
        match self.meant(name)? {
            Meant::Managed(process) => {
                self.table().vms.get(&process).map(Vm::view).ok_or_else(|| format!("{name} has just ended"))
            }
            Meant::Other(found) => {
                let mut view = self.look_at(&found, |guests, found| guests.look(found))?;
                self.say_if_pending(&found, &mut view);
                Ok(view)
            }
        }
    }

    fn view_of(&self, process: ProcessId) -> Result<Answer, String> {
        let table = self.table();
        let vm = table.vms.get(&process).ok_or("the VM has just ended")?;
        Ok(Answer::Vm(Box::new(vm.view())))
    }

    fn explain(&self, name: &str) -> Result<Explanation, String> {
        match self.meant(name)? {
            Meant::Managed(process) => match self.explanation_of_run(process) {
                Some(explanation) => Ok(explanation),
                None => self.ask(process, |care| care.explain(), |guests, found| guests.explain(found)),
            },
            Meant::Other(found) => self.look_at(&found, |guests, found| guests.explain(found)),
        }
    }

    fn windows(&self, name: &str) -> Result<WindowMap, String> {
        match self.meant(name)? {
            Meant::Managed(process) => {
                let why = match self.windows_of_run(process) {
                    Some(Ok(map)) => return Ok(map),
                    Some(Err(why)) => Some(why),
                    None => None,
                };
                let map = self.ask(process, |care| care.windows(), |guests, found| guests.windows(found));
                map.map(|map| WindowMap { notes: why.into_iter().chain(map.notes).collect(), ..map })
            }
            Meant::Other(found) => self.look_at(&found, |guests, found| guests.windows(found)),
        }
    }

    /// Asks the manager of a VM. Where that is its own process, a survey from outside answers instead.
    fn ask<T: Send + 'static>(
        &self,
        process: ProcessId,
        ask: impl FnOnce(&mut (dyn Care + 'static)) -> T,
        look: Look<T>,
    ) -> Result<T, String> {
        let (care, found) = {
            let table = self.table();
            let vm = table.vms.get(&process).ok_or("the VM has just ended")?;
            (vm.care(), vm.found.clone())
        };
        match care {
            Some(care) => told(&care, ask).ok_or_else(|| format!("{} has just ended", found.name)),
            None => self.look_at(&found, look),
        }
    }

    /// Surveys one guest, and waits no longer than for a list.
    fn look_at<T: Send + 'static>(&self, found: &Found, look: Look<T>) -> Result<T, String> {
        let (guests, of) = (Arc::clone(&self.doors.guests), found.clone());
        self.looks.one(found, move || look(&*guests, &of))?
    }

    fn managed(&self, name: &str) -> Result<ProcessId, String> {
        match self.meant(name)? {
            Meant::Managed(process) => Ok(process),
            Meant::Other(Found { name, process, .. }) if self.table().remembered(process).is_some() => {
                Err(format!("{name} is not managed yet: {IS_STARTING}: {ASK_AGAIN}"))
            }
            Meant::Other(found) => {
                let Found { name, process, .. } = found;
                Err(format!("{name} is not managed: run `wideleaf attach {}` first", process.pid))
            }
        }
    }

    /// The guest that `text` stands for: a process id, a name or a UUID. The kernel assigns process ids, while
    /// processes choose their names and UUIDs. So an unmanaged guest can also make a name ambiguous.
    fn meant(&self, text: &str) -> Result<Meant, String> {
        let mut all: Vec<Found> = self.table().vms.values().map(|vm| vm.found.clone()).collect();
        let managed = all.len();
        let has_pid = |found: &Found| text.parse() == Ok(found.process.pid);
        if let Some(found) = all.iter().find(|found| has_pid(found)) {
            return Ok(Meant::Managed(found.process));
        }
        all.extend(self.others_found()?);
        let by_pid = all.iter().position(has_pid);
        let index = match by_pid {
            Some(index) => Some(index),
            None => the_one_called(text, &all)?,
        };
        match index {
            Some(index) if index < managed => Ok(Meant::Managed(all[index].process)),
            Some(index) => Ok(Meant::Other(all.swap_remove(index))),
            None => Err(unknown(text, all.iter())),
        }
    }

    /// A guest that the client names by its monitor is also managed over that monitor. One that an earlier daemon
    /// managed keeps the settings that the client leaves out.
    fn attach(&self, target: &Target, mut settings: Settings) -> Result<Found, String> {
        let found = self.doors.guests.resolve(target)?;
        if let (Target::Qmp(path), None) = (target, &settings.qmp) {
            settings.qmp = Some(path.clone());
        }
        let earlier = self.table().remembered(found.process);
        if let Some(earlier) = &earlier {
            settings = vm::merged(&earlier.said, &settings);
        }
        self.take(&found, settings, earlier.as_ref().map(Earlier::of).unwrap_or_default())?;
        self.save();
        Ok(found)
    }

    /// Handles libvirt's report that a domain runs. A domain that the configuration does not name and that does not
    /// ask for management is left alone. So is one that was detached, also when libvirtd was restarted and reports
    /// it again. Settings since it was taken stay. A domain that was taken before its metadata were known is
    /// attached again where they change settings that are fixed at attach. So is one that the scout is attaching now.
    fn started(&self, domain: String, uuid: &str, pid: u32, settings: &Settings) -> Result<Answer, String> {
        let found = self.doors.guests.resolve(&Target::Pid(pid))?;
        let settings = {
            let mut table = self.table();
            let is_being_attached = |table: &mut Table| table.being_attached.contains(&found.process);
            self.attach_ended.wait_while_for(&mut table, is_being_attached, ATTACH_WAIT);
            table.rooms.iter_mut().filter(|room| room.uuid == uuid).for_each(|room| room.start(found.process));
            let earlier = table.remembered(found.process);
            let said = table.vms.get(&found.process).map(|vm| vm.said.clone());
            let said = said.or_else(|| earlier.as_ref().map(|guest| guest.said.clone()));
            let is_left = table.left.contains(&found.process);
            let is_named = !is_left && table.config.attach.automatic.takes_domain(&domain, settings);
            if !is_left && !is_named && said.is_none() {
                let automatic = &table.config.attach.automatic;
                tracing::info!("{domain} (pid {pid}) is not managed: attach.automatic = {automatic} does not name it");
            }
            let settings = (said.is_some() || is_named).then(|| vm::merged(settings, &said.unwrap_or_default()));
            settings.map(|settings| (settings, earlier.as_ref().map(Earlier::of).unwrap_or_default()))
        };
        let taken = settings.map_or(Ok(()), |(settings, earlier)| {
            let found = Found { domain: Some(domain.clone()), is_name_anothers: false, ..found };
            match self.take_anew(&found, &settings)? {
                true => Ok(()),
                false => self.take(&found, settings, earlier),
            }
        });
        self.save();
        // The hook does not wait long enough for this result.
        taken.inspect_err(|why| tracing::warn!("{domain} (pid {pid}): {why}")).map(|()| Answer::Done)
    }

    fn detach(&self, name: &str) -> Result<Answer, String> {
        let process = match self.meant(name)? {
            Meant::Other(found) if self.table().cannot_take_up(found.process) => found.process,
            _ => self.managed(name)?,
        };
        {
            let mut table = self.table();
            if table.vms.get(&process).is_some_and(|vm| matches!(vm.hands, Hands::Registered(_))) {
                return Err(format!("{name} manages itself: `wideleaf set {name} policy=off` stops that"));
            }
            // The attach would put it on the table after all.
            if table.being_attached.contains(&process) {
                return Err(format!("{name} is being attached: {ASK_AGAIN}"));
            }
            table.left.insert(process);
            table.pending.retain(|guest| guest.process != process);
        }
        self.forget(process, "is detached");
        self.save();
        Ok(Answer::Done)
    }

    fn register(&self, connection: ConnectionId, peer: Peer, view: VmView, live: LiveReport) -> Result<Limits, String> {
        if view.pid != peer.pid {
            return Err(format!("process {} cannot register a VM of process {}", peer.pid, view.pid));
        }
        let mut found = Found {
            process: process_of(&view),
            name: view.name.clone(),
            uuid: view.uuid.clone(),
            domain: None,
            is_name_anothers: false,
            vmm: Vmm::Wideleaf,
            no_answer: None,
        };
        let process = found.process;
        {
            let mut table = self.table();
            // The rules of a libvirt domain apply only to that domain.
            found.is_name_anothers = table.has_domain(&found.name);
            if table.vms.contains_key(&process) {
                return Err(format!("{} (pid {}) is managed already: detach it first", found.name, process.pid));
            }
            let registered = table.vms.values().filter(|vm| matches!(vm.hands, Hands::Registered(_))).count();
            if registered >= REGISTERED_MAX {
                return Err(format!("all {REGISTERED_MAX} places for registered VMs are in use: try again later"));
            }
            let said = table.registered.get(&process).cloned().unwrap_or_default();
            let wanted = table.wanted(&found, &said)?;
            tracing::info!("{} (pid {}) has registered", found.name, process.pid);
            let hands = Hands::Registered(connection);
            let mut vm = Vm::new(found, said, wanted, WorkView::default(), hands, view);
            vm.offer = live.bids.as_deref().map(Offer::from);
            vm.windows.take(live, Instant::now());
            table.vms.insert(process, vm);
        }
        self.share_out();
        self.limits_of(connection)
    }

    fn status(&self, connection: ConnectionId, view: VmView, live: LiveReport) -> Result<Limits, String> {
        {
            let mut table = self.table();
            let vm = table.vms.values_mut().find(|vm| is_of(vm, connection)).ok_or("register first")?;
            if process_of(&view) != vm.found.process {
                return Err(format!("this connection belongs to process {}", vm.found.process.pid));
            }
            vm.see(view);
            vm.keep_own_policy();
            vm.offer = live.bids.as_deref().map(Offer::from);
            vm.windows.take(live, Instant::now());
            table.clear_market_again(self.now());
        }
        self.reported.notify_all();
        self.limits_of(connection)
    }

    fn limits_of(&self, connection: ConnectionId) -> Result<Limits, String> {
        let mut table = self.table();
        let vm = table.vms.values_mut().find(|vm| is_of(vm, connection));
        vm.map(Vm::limits_reply).ok_or_else(|| "register first".to_owned())
    }

    /// Removes the VM that was registered over a connection that has ended.
    fn unregister(&self, connection: ConnectionId) {
        let process = self.table().vms.values().find(|vm| is_of(vm, connection)).map(|vm| vm.found.process);
        if let Some(process) = process {
            self.bury(process);
        }
    }
}

fn is_of(vm: &Vm, connection: ConnectionId) -> bool {
    matches!(vm.hands, Hands::Registered(of) if of == connection)
}

pub(super) fn process_of(view: &VmView) -> ProcessId {
    ProcessId { pid: view.pid, started_at: view.started_at }
}

fn is_called(found: &Found, text: &str) -> bool {
    found.name == text || found.uuid.as_deref().is_some_and(|uuid| uuid.eq_ignore_ascii_case(text))
}

/// Index of the guest with that name in `all`.
fn the_one_called(text: &str, all: &[Found]) -> Result<Option<usize>, String> {
    let called: Vec<usize> = (0..all.len()).filter(|index| is_called(&all[*index], text)).collect();
    if let [] | [_] = called.as_slice() {
        return Ok(called.first().copied());
    }
    let pids: Vec<String> = called.iter().map(|index| all[*index].process.pid.to_string()).collect();
    Err(format!("{} VMs are called {text:?}: name one by its process id ({})", pids.len(), pids.join(", ")))
}

fn unknown<'a>(text: &str, all: impl Iterator<Item = &'a Found>) -> String {
    let mut names: Vec<&str> = all.take(NAMES_MAX + 1).map(|found| found.name.as_str()).collect();
    if names.len() > NAMES_MAX {
        names[NAMES_MAX] = "…";
    }
    match names.as_slice() {
        [] => format!("there is no VM {text:?}, nor any other"),
        _ => format!("there is no VM {text:?}; there are {}", names.join(", ")),
    }
}
