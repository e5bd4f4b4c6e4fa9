//! `wideleaf run --control-socket PATH`: clients that may open the socket pause, resume, stop and query this VM
//! ([`wideleaf_control::vm`] has the messages).
//!
//! ```text
//!   clients ──▶ LineServer (one thread, bounds on all they send) ──▶ one thread that answers ──▶ RunControl, Session
//!                                                                          the guest's threads wait for neither
//! ```
//!
//! **Pauses.** A vCPU runs while no pause holds it ([`RunControl::pause`] counts them). The manager's own pauses
//! take milliseconds and nest with the user's: a guest that the user paused stays paused after the manager's pause.
//! All users together have one pause, so that another client can undo the pause of a client that died. During a
//! pause, the manager continues to work on the guest's memory, `--timeout` and the guest's time stamp counter
//! continue, and `stop` ends the VM.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wideleaf_attach::live_view::OwnGuest;
use wideleaf_control::protocol::Reply;
use wideleaf_control::server::{ConnectionId, Dialect, Job, LineServer, Listening, Places, Replies, decode};
use wideleaf_control::socket_file::SocketFile;
use wideleaf_control::view::{Care, Explanation, WindowMap};
use wideleaf_control::vm::{
    PostCopyView, StopHow, VM_VERSION, VcpuView, VmAnswer, VmHello, VmRequest, VmState, VmStatistics, VmStatus,
};
use wideleaf_policies::Bytes;
use wideleaf_vmm::devices::{BusWatch, PowerButton};
use wideleaf_vmm::run_loop::{OnReset, RunControl, VcpuState};
use wideleaf_vmm::sandbox::{Sandbox, ThreadKind};
use wideleaf_vmm::{GuestExit, Machine};

use crate::devices::WatchedDevices;
use crate::failure::Failure;
use crate::guardian::path::HeldPath;
use crate::guards::{Noted, step};
use crate::live_report;
use crate::migration::{Incoming, Offer, check_rate};
use crate::past_saves::PastSaves;
use crate::policy_switch::PolicySwitch;
use crate::sandboxed;
use crate::save_thread::{SaveJob, SaveTo, SavingThread};
use crate::session::Session;
use crate::snapshot::restoring::Restoring;
use crate::text::clean;
use crate::users_pause::UsersPause;

/// Connections for a person or two, a supervisor and a dashboard; the rest is for clients that connect and stay silent.
const PLACES: Places = Places { of_all: 8, more_for_root: 2 };

const DIALECT: Dialect = Dialect { server: "this VM", version: VM_VERSION };

/// Mode that admits only the user that started the VM: a process that can stop a VM controls its data.
const MODE: u32 = 0o600;

/// Capabilities at any time.
const CAPABILITIES: [&str; 11] = [
    "pause",
    "resume",
    "stop.kill",
    "status",
    "statistics",
    "windows",
    "explain",
    "set_policy",
    "snapshot",
    "migrate",
    "recover",
];

/// Capability of a VM with a balloon.
const BALLOON: &str = "balloon";

/// Capability of a VM that boots again after a reset.
const RESET: &str = "reset";

/// Capability while the guest listens to its power button.
const STOP_ASK: &str = "stop.ask";

/// A socket that clients can connect to until this is dropped; the file is then removed. Clients wait until the VM
/// is built.
pub struct ControlSocket {
    listening: Option<Listening>,
    /// User that started the VM, whatever user it becomes in its sandbox.
    user: u32,
    server: Option<LineServer>,
    /// After the socket: the file is removed after the socket is closed.
    _file: HeldPath,
    _noted: Noted,
}

impl ControlSocket {
    /// Listens at `path`. No thread is started yet, because the process must enter its sandbox with one thread.
    ///
    /// # Errors
    /// [`Failure::Host`] if another process already listens there, or the kernel refuses.
    pub fn open(path: &Path) -> Result<ControlSocket, Failure> {
        let remedy = "name another path with --control-socket";
        let file = SocketFile { path, mode: MODE, gid: None, makes_folder: false, owner: "another process", remedy };
        let listening = Listening::at(&file).map_err(|error| Failure::Host(error.to_string()))?;
        let held = HeldPath::hold(path).map_err(|error| {
            let _ = std::fs::remove_file(path);
            Failure::Host(format!(
                "cannot use --control-socket {}: the process that removes it does not start: {error}",
                path.display()
            ))
        })?;
        let user = nix::unistd::geteuid().as_raw();
        let noted = Noted::taken("control socket");
        Ok(ControlSocket { listening: Some(listening), user, server: None, _file: held, _noted: noted })
    }

    /// Answers requests for that VM, in its own threads.
    pub fn serve(&mut self, vm: ControlledVm, sandbox: Option<&Arc<Sandbox>>) {
        let sandbox = sandbox.cloned();
        let begin = move || sandbox.iter().for_each(|sandbox| sandboxed::enter(sandbox, ThreadKind::Control));
        let begin_too = begin.clone();
        let listening = self.listening.take().expect("a socket is about one VM").taking_files();
        let user = self.user;
        let answer = |jobs, replies| answer_in_a_thread(jobs, replies, vm, user, begin_too);
        self.server = Some(listening.serve(PLACES, begin, answer));
        step("control socket served");
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let problems = self.server.take().map(LineServer::stop);
        problems.iter().flatten().for_each(|problem| tracing::warn!("{problem}"));
    }
}

fn answer_in_a_thread(
    jobs: Receiver<Job>,
    replies: Replies,
    vm: ControlledVm,
    user: u32,
    begin: impl FnOnce() + Send + 'static,
) -> Vec<JoinHandle<()>> {
    vec![std::thread::spawn(move || {
        begin();
        for job in jobs {
            // A client that has gone left nothing behind.
            let Job::Line { connection, peer, line, files } = job else { continue };
            // The file's mode says the same, but between binding and setting the mode, the umask applies.
            let answer = if peer.uid != 0 && peer.uid != user {
                Err("only root and the user that runs this VM may use its control socket".to_owned())
            } else {
                decode::<VmRequest>(&line, DIALECT).and_then(|request| vm.answer(request))
            };
            let reply = match answer {
                Ok(Answered::Now(answer)) => Reply::Ok(answer),
                Ok(Answered::Receiving) => match vm.receive(files, connection, replies.clone()) {
                    Ok(()) => continue,
                    Err(why) => Reply::Error(why),
                },
                Ok(Answered::Saving(to)) => {
                    let job = SaveJob { connection, replies: replies.clone(), to, files };
                    match vm.begin_save(job) {
                        Ok(()) => continue,
                        Err(why) => Reply::Error(why),
                    }
                }
                Err(why) => Reply::Error(why),
            };
            replies.send(connection, &reply, false);
        }
    })]
}

/// Parts of a run that requests are about, beside its machine.
pub struct Controlled {
    pub session: Weak<Session>,
    pub policy: Arc<PolicySwitch>,
    /// View of the process's own guest; `None` if the process cannot read itself.
    pub guest: Option<OwnGuest>,
    pub devices: Arc<WatchedDevices>,
    pub workload: String,
    /// Pause that the VM's users share.
    pub pause: Arc<UsersPause>,
    /// Thread that saves the VM, while the guest runs.
    pub saving: Weak<SavingThread>,
    /// Count of snapshots and migrations that are over.
    pub past: PastSaves,
    /// Snapshot from which the guest continues, if it does.
    pub restoring: Option<Arc<Restoring>>,
    /// Migration by which the VM came, if it did.
    pub arriving: Option<Arc<Incoming>>,
}

/// Answer to a request.
enum Answered {
    Now(Box<VmAnswer>),
    /// Another thread answers when it has saved the VM, or moved it.
    Saving(SaveTo),
    /// Another thread answers when missing pages have come over the connection of the request.
    Receiving,
}

/// Target of the socket's requests.
pub struct ControlledVm {
    control: Arc<RunControl>,
    bus: BusWatch,
    button: PowerButton,
    run: Controlled,
    started: Instant,
}

impl ControlledVm {
    pub fn new(machine: &Machine, run: Controlled) -> ControlledVm {
        let (control, bus, button) = (machine.control(), machine.bus(), machine.power_button());
        ControlledVm { control, bus, button, run, started: machine.started() }
    }

    fn answer(&self, request: VmRequest) -> Result<Answered, String> {
        let answer = match request {
            VmRequest::Hello => VmAnswer::Hello(self.hello()),
            VmRequest::Pause => self.pause().map(|()| self.changed())?,
            VmRequest::Resume => self.resume().map(|()| self.changed())?,
            VmRequest::Stop { how: StopHow::Kill, if_paused } => {
                self.check_not_needed()?;
                self.kill(if_paused)?;
                self.changed()
            }
            VmRequest::Stop { how: StopHow::Ask, .. } => self.ask().map(|()| self.changed())?,
            VmRequest::Reset => self.reset().map(|()| self.changed())?,
            VmRequest::Status => self.changed(),
            VmRequest::Statistics => VmAnswer::Statistics(Box::new(self.statistics()?)),
            VmRequest::Windows => VmAnswer::Windows(Box::new(self.windows()?)),
            VmRequest::Explain => VmAnswer::Explanation(Box::new(self.explanation()?)),
            VmRequest::SetPolicy { policy } => {
                // It would wait for the end of that.
                self.check_saving(SavingThread::check_at_rest, "set the policy of")?;
                self.run.policy.set(&*self.session()?, &policy)?;
                self.changed()
            }
            VmRequest::Balloon { target_bytes } => {
                VmAnswer::Device(self.run.devices.set_balloon(Bytes::new(target_bytes))?)
            }
            VmRequest::Snapshot { pause_ms_max, stays_paused, base } => {
                let pause_max = Duration::from_millis(pause_ms_max);
                return Ok(Answered::Saving(SaveTo::Files { pause_max, stays_paused, base }));
            }
            VmRequest::Migrate { to, pause_ms_max, bytes_per_second_max, post_copy } => {
                self.check_not_paused()?;
                check_rate(bytes_per_second_max)?;
                let pause_max = Duration::from_millis(pause_ms_max);
                let (address, bytes_per_second) = (clean(&to), bytes_per_second_max);
                return Ok(Answered::Saving(SaveTo::Run { address, pause_max, bytes_per_second, post_copy }));
            }
            VmRequest::Recover { is_target: true, .. } => return Ok(Answered::Receiving),
            VmRequest::Recover { with, is_target: false } => {
                return Ok(Answered::Saving(SaveTo::Again { address: clean(&with) }));
            }
        };
        Ok(Answered::Now(Box::new(answer)))
    }

    /// Answer to a change of the VM.
    fn changed(&self) -> VmAnswer {
        VmAnswer::Status(self.status())
    }

    fn begin_save(&self, job: SaveJob) -> Result<(), String> {
        self.run.saving.upgrade().ok_or_else(has_ended)?.begin(job)
    }

    /// Takes another connection to the source of this VM, over which missing pages come.
    fn receive(&self, files: Vec<OwnedFd>, connection: ConnectionId, replies: Replies) -> Result<(), String> {
        let incoming = self.run.arriving.as_ref().ok_or("cannot recover the VM: it has not come by a migration")?;
        let done = move |end: Result<PostCopyView, String>| {
            let reply = match end {
                Ok(view) => Reply::Ok(Box::new(VmAnswer::Recovered(view))),
                Err(why) => Reply::Error(why),
            };
            replies.send(connection, &reply, false);
        };
        incoming.recover(Offer::new(files, Box::new(done))?)
    }

    fn hello(&self) -> VmHello {
        let asks = self.button.is_listening().then_some(STOP_ASK);
        let of_devices = self.run.devices.has_balloon().then_some(BALLOON);
        let of_reset = (self.control.on_reset() == OnReset::Restart).then_some(RESET);
        VmHello {
            version: VM_VERSION,
            wideleaf: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            capabilities: CAPABILITIES
                .into_iter()
                .chain(of_devices)
                .chain(of_reset)
                .chain(asks)
                .map(str::to_owned)
                .collect(),
        }
    }

    /// Stops the VM, and waits for its end; [`ControlledVm::status`] tells whether it has ended.
    fn kill(&self, if_paused: bool) -> Result<(), String> {
        if !if_paused {
            self.control.stop(GuestExit::Stopped);
        } else if !self.run.pause.stop_held() {
            return Err(
                "cannot stop the VM: it is not paused any more, so it may have worked on; look at it, and stop \
                        it with `stop --how kill`"
                    .to_owned(),
            );
        }
        self.control.wait(Some(STOP_WAIT_MAX));
        Ok(())
    }

    /// Presses the power button. The guest's reaction shows in its end.
    fn ask(&self) -> Result<(), String> {
        if self.control.is_stopping() {
            return Err(self.is_over());
        }
        let remedy = "shut it down from inside, or stop it with kill";
        self.button.press().map_err(|error| format!("{error}: {remedy}"))
    }

    /// A guest that has moved may need this process.
    fn check_not_needed(&self) -> Result<(), String> {
        self.run.saving.upgrade().map_or(Ok(()), |saving| saving.check_not_needed())
    }

    /// Asks the thread that saves whether it permits what a client wants.
    fn check_saving(&self, check: fn(&SavingThread) -> Result<(), &'static str>, what: &str) -> Result<(), String> {
        let saving = self.run.saving.upgrade();
        saving.map_or(Ok(()), |saving| check(&saving)).map_err(|why| format!("cannot {what} the VM: {why}"))
    }

    fn reset(&self) -> Result<(), String> {
        self.check_not_needed()?;
        // A target may need its RAM as it is.
        if let Some(doubt) = self.run.saving.upgrade().and_then(|saving| saving.doubt()) {
            return Err(format!("cannot reset the VM: {doubt}"));
        }
        self.check_saving(SavingThread::check_at_rest, "reset")?;
        match self.control.on_reset() {
            OnReset::Stop => Err("a reset ends this VM: start it with --on-reset restart, or stop it".to_owned()),
            OnReset::Restart if self.control.ask_for_reset() => Ok(()),
            OnReset::Restart => Err(self.is_over()),
        }
    }

    fn session(&self) -> Result<Arc<Session>, String> {
        self.run.session.upgrade().ok_or_else(has_ended)
    }

    fn pause(&self) -> Result<(), String> {
        if self.control.is_stopping() {
            return Err(self.is_over());
        }
        // It would run on at the target.
        self.check_saving(SavingThread::check_not_moving, "pause")?;
        let held = self.run.pause.hold();
        held.map(drop).map_err(|error| format!("cannot pause the VM: {error}; try again"))
    }

    /// A guest that moves runs at the target.
    fn check_not_paused(&self) -> Result<(), String> {
        if self.run.pause.is_held() {
            Err("cannot migrate the VM: it is paused; resume it first".to_owned())
        } else {
            Ok(())
        }
    }

    fn resume(&self) -> Result<(), String> {
        self.check_not_needed()?;
        if let Some(saving) = self.run.saving.upgrade() {
            saving.resume_after_doubt()?;
        }
        self.run.pause.end().map_err(|error| error.to_string())
    }

    fn status(&self) -> VmStatus {
        let (saving, doubt) = self.run.saving.upgrade().map_or((None, None), |of| (of.progress(), of.doubt()));
        let arriving = self.run.arriving.as_ref();
        let saving = saving.or_else(|| arriving.and_then(|incoming| incoming.progress()));
        let is_paused = doubt.is_some() || self.run.pause.is_held();
        let (states, waits_for) = self.ending();
        let state = match (self.control.is_stopping(), is_paused) {
            (true, _) if waits_for.is_some() => VmState::Ending,
            (true, _) => VmState::Ended,
            (false, true) => VmState::Paused,
            (false, false) => VmState::Running,
        };
        let exit = self.control.exit().map(|exit| exit.to_string().lines().next().unwrap_or_default().to_owned());
        VmStatus {
            state,
            workload: self.run.workload.clone(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            vcpus: states.into_iter().map(vcpu_view).collect(),
            resets: self.control.resets(),
            policy: self.run.policy.shown(),
            phase: self.run.session.upgrade().and_then(|session| session.phase_under_way()),
            virtio: self.run.devices.drivers(),
            saving,
            restoring: self.run.restoring.as_ref().and_then(|restoring| restoring.progress()),
            past_saves: self.run.past.view().map(Box::new),
            doubt,
            cut_off: arriving.and_then(|incoming| incoming.why_cut()),
            exit,
            waits_for,
        }
    }

    /// State of the vCPUs, and for a VM that is ending, what it waits for.
    fn ending(&self) -> (Vec<VcpuState>, Option<String>) {
        // In this order: a vCPU that has left does not come back, so `Ended` is reported only after all vCPUs have
        // left.
        let is_stopping = self.control.is_stopping();
        let states = self.control.states();
        let left = (0..states.len()).filter(|vcpu| states[*vcpu] != VcpuState::Finished).map(|vcpu| vcpu.to_string());
        let left: Vec<String> = left.collect();
        let waits_for = (is_stopping && !left.is_empty())
            .then(|| format!("vCPU {}, in the guest, in a page fault of the host or in a device", left.join(", ")));
        (states, waits_for)
    }

    fn is_over(&self) -> String {
        self.ending().1.map_or_else(has_ended, |what| format!("this VM is ending, and waits for {what}"))
    }

    fn guest(&self) -> Result<&OwnGuest, String> {
        self.run.guest.as_ref().ok_or_else(|| "this process cannot read its own guest: /proc is not mounted".to_owned())
    }

    fn windows(&self) -> Result<WindowMap, String> {
        let guest = self.guest()?;
        let (live, mapping) = self.session()?.seen().ok_or_else(has_ended)?;
        Ok(live_report::windows(guest, &live, mapping, &self.run.policy))
    }

    fn explanation(&self) -> Result<Explanation, String> {
        let guest = self.guest()?;
        let (live, _) = self.session()?.seen().ok_or_else(has_ended)?;
        Ok(live_report::explanation(guest, &live, &self.run.policy))
    }

    fn statistics(&self) -> Result<VmStatistics, String> {
        let guest = self.guest()?;
        let (live, mapping) = self.session()?.seen().ok_or_else(has_ended)?;
        let mut vm = guest.view(&live, mapping);
        vm.policy = Some(self.run.policy.shown());
        vm.care = if self.run.policy.is_off() { Care::Off } else { Care::Managed };
        let devices = BTreeMap::from([("bus".to_owned(), self.bus_counters())]);
        Ok(VmStatistics { vm, devices, virtio: self.run.devices.views() })
    }

    fn bus_counters(&self) -> BTreeMap<String, u64> {
        let counters = self.bus.counters();
        let named = [
            ("port_reads_unanswered", counters.port_reads_unanswered),
            ("port_writes_unanswered", counters.port_writes_unanswered),
            ("mmio_reads_unanswered", counters.mmio_reads_unanswered),
            ("mmio_writes_unanswered", counters.mmio_writes_unanswered),
        ];
        named.map(|(name, count)| (name.to_owned(), count)).into()
    }
}

/// Time for which [`StopHow::Kill`] waits for the VM's end: a vCPU leaves the guest within microseconds, or after a
/// page fault of the host, perhaps of a giant page. Shorter than a client's wait for its answer.
const STOP_WAIT_MAX: Duration = Duration::from_secs(3);

fn has_ended() -> String {
    "this VM has ended".to_owned()
}

fn vcpu_view(state: VcpuState) -> VcpuView {
    match state {
        VcpuState::Running => VcpuView::Running,
        VcpuState::Paused => VcpuView::Paused,
        VcpuState::Finished => VcpuView::Finished,
    }
}
