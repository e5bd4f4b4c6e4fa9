//! Times when an external guest must be left alone. [`GuestGate::refresh`] checks about every second. The manager's
//! loop reads the result of the latest check and never waits. Where a check takes only some files of `/proc`, the
//! loop does it itself: a thread that wakes for it would cost ten times as much.
//!
//! ```text
//!   refresh()  stat ───────────── it has ended                              ─▶ Gone
//!              fd, VmPin ──────── VFIO, SEV                                 ┐
//!              QMP, one turn ──── migration, dirty rate, dump, jobs         ├▶ Closed(why)
//!              or libvirt's status file, or virsh ── the same, as its jobs  ┘
//!              nothing answers, or no refresh for FACTS_AGE_MAX             ─▶ Closed(NoAnswer)
//!
//!              QMP or libvirt's status file, stat ── stopped           ─▶ is_paused
//!              fd, smaps ──────── userfaultfd                               ─▶ keeps_holes: Watched, no split
//!              command line, QMP's device tree or libvirt's file:
//!              free page reporting, virtio-mem, a balloon not known empty   ─▶ keeps_holes: GivenBack
//!              the daemon: the host is short of memory                      ─▶ keeps_holes: HostShort
//! ```
//!
//! An open userfaultfd does not close the gate: [`wideleaf_memory::gate`] says which actions are safe then. The
//! descriptor may also be in another process alone, so the gate is told as well what the mappings say.
//!
//! An operator can plug in devices by which a guest gives memory back at any time, so the command line alone
//! is not enough.

mod answers;

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use wideleaf_memory::gate::{Gate, GateState, KeptHoles, LeftAlone};
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_policies::recovery::Events;
use wideleaf_policies::{Bytes, Moment};

use self::answers::{
    Answers, Balloon, is_stopped, keeps_holes, memory_of_status, of_descriptors, of_device_tree, of_job, of_status,
};
use crate::command_line::Returns;
use crate::events::{Signs, Tracker};
use crate::monitor::Monitor;
use crate::process::VmProcess;
use crate::qmp::Question;
use crate::virsh::{Job, Virsh, job_of_status};

/// Age at which facts expire: some refreshes were missed, so something hangs.
const FACTS_AGE_MAX: Duration = Duration::from_secs(5);

/// Maximum age of the facts of a quick gate before its caller refreshes them.
const REFRESH_EVERY: Duration = Duration::from_secs(1);

/// The same during an event, also for a gate that a thread refreshes: its end is noticed within that time.
pub(crate) const EVENT_EVERY: Duration = Duration::from_millis(250);

/// Interval between reads of the process's open files, which cost as much as all the rest. They seldom change the
/// answer. Where they just did, the kernel refuses to move pinned pages.
const FILES_EVERY: Duration = Duration::from_secs(10);

/// The same while the files are not readable: until they are, no window with holes may be promoted. The end of a
/// userfaultfd, which makes those windows free for promotion, is looked for at each refresh.
const FILES_EVERY_WHEN_UNREADABLE: Duration = Duration::from_secs(1);

/// Maximum age of what is known of the open files when a huge page is about to be split.
const FILES_AGE_FOR_SPLIT: Duration = Duration::from_millis(100);

/// Note on a guest with an open userfaultfd.
const WATCHED: &str = "its pages are provided on demand (an open userfaultfd: a restore, or a postcopy, during which \
                       QEMU itself forbids huge pages): full windows are promoted, windows with absent pages wait, and \
                       nothing is split";

/// Interval between calls of virsh, each of which costs a process.
const VIRSH_EVERY: Duration = Duration::from_secs(10);

/// Interval between reads of the device tree. An operator or a scheduler plugs devices in, and a guest takes a
/// while to give memory back through one. QEMU answers in a millisecond, with 10 KiB for a small machine.
const DEVICES_EVERY: Duration = Duration::from_secs(30);

/// Questions that are sent at once.
const QUESTIONS: [Question; 7] = [
    Question::Status,
    Question::Migrate,
    Question::DirtyRate,
    Question::Dump,
    Question::Jobs,
    Question::Balloon,
    Question::MemorySize,
];

/// Gate of one guest; see the module.
#[derive(Debug)]
pub struct GuestGate {
    process: VmProcess,
    /// Handle of the process by a descriptor, which reports its end at a tenth of the cost.
    host: Option<Arc<ProcessHost>>,
    monitor: Option<Arc<Monitor>>,
    is_quick: bool,
    files: Mutex<Option<(Instant, FilesSay)>>,
    /// Whether its mappings have a userfaultfd, whichever process has that open.
    is_mapped_watched: AtomicBool,
    virsh: Mutex<Option<Answer>>,
    /// Devices in the device tree, with the time of reading it.
    devices: Mutex<Option<(Instant, Returns)>>,
    facts: Mutex<Facts>,
    is_asked: AtomicBool,
    holes_are_wanted: AtomicBool,
    events: Mutex<Tracker>,
}

/// What libvirt says of a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LibvirtSays {
    why: Option<LeftAlone>,
    is_arriving: bool,
    is_stopped: bool,
    returns: Returns,
    /// Memory that the balloon leaves the guest, and all of its memory, in bytes.
    memory: Option<(u64, u64)>,
}

/// Time of an answer, and the answer.
type Answer = (Instant, Option<LeftAlone>);

/// What the files of the process say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FilesSay {
    why: Option<LeftAlone>,
    userfaultfd: Userfaultfd,
}

/// Whether the process has a userfaultfd open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Userfaultfd {
    #[default]
    None,
    /// The file of this number, perhaps among others.
    Open(u32),
    /// The open files were readable and are not now, so that it may have been opened since.
    Unknown,
}

impl FilesSay {
    fn has_userfaultfd(self) -> bool {
        self.userfaultfd != Userfaultfd::None
    }
}

/// The latest answer, or a new one where it is too old.
fn no_older_than<T: Copy>(age: Duration, latest: &Mutex<Option<(Instant, T)>>, ask: impl FnOnce() -> T) -> T {
    let mut latest = latest.lock();
    match *latest {
        Some((at, answer)) if at.elapsed() < age => answer,
        _ => latest.insert((Instant::now(), ask())).1,
    }
}

/// Result of the latest refresh.
#[derive(Clone, Copy, Debug)]
struct Facts {
    at: Instant,
    says: Says,
}

/// What a refresh has found.
#[derive(Clone, Copy, Debug)]
struct Says {
    state: GateState,
    keeps_holes: Option<KeptHoles>,
    /// Whether the guest stands still: its VMM has stopped it, or a signal has stopped the VMM.
    is_paused: bool,
}

impl Says {
    const fn nothing_but(state: GateState) -> Says {
        Says { state, keeps_holes: None, is_paused: false }
    }
}

impl GuestGate {
    /// A gate that has been refreshed once.
    pub fn new(process: VmProcess, monitor: Option<Arc<Monitor>>) -> GuestGate {
        GuestGate::over(None, process, monitor)
    }

    /// As [`GuestGate::new`], for a process with a handle.
    pub fn of(host: Arc<ProcessHost>, process: VmProcess, monitor: Option<Arc<Monitor>>) -> GuestGate {
        GuestGate::over(Some(host), process, monitor)
    }

    fn over(host: Option<Arc<ProcessHost>>, process: VmProcess, monitor: Option<Arc<Monitor>>) -> GuestGate {
        let says = Says::nothing_but(GateState::Closed(LeftAlone::NoAnswer));
        let facts = Facts { at: Instant::now(), says };
        let [is_asked, holes_are_wanted, is_mapped_watched] = [const { AtomicBool::new(false) }; 3];
        let (files, virsh, devices, facts) = (Mutex::default(), Mutex::default(), Mutex::default(), Mutex::new(facts));
        let is_quick = monitor.is_none() && !needs_virsh(&process);
        let events = Mutex::default();
        let gate = GuestGate {
            process,
            host,
            monitor,
            is_quick,
            files,
            is_mapped_watched,
            virsh,
            devices,
            facts,
            is_asked,
            holes_are_wanted,
            events,
        };
        gate.refresh();
        gate
    }

    /// Whether a refresh asks no other process. The gate's caller then refreshes it, and no other thread has to.
    pub fn is_quick(&self) -> bool {
        self.is_quick
    }

    /// Closes the gate at an operator's request, or opens it again.
    pub fn leave_alone(&self, is_asked: bool) {
        self.is_asked.store(is_asked, Ordering::Relaxed);
    }

    /// Keeps holes whatever devices the guest has, because the host is short of memory, or ends that.
    pub fn keep_holes(&self, is_wanted: bool) {
        self.holes_are_wanted.store(is_wanted, Ordering::Relaxed);
    }

    /// Takes note of what the mappings say: whether a part of the RAM has a userfaultfd.
    pub fn mappings_say(&self, is_watched: bool) {
        self.is_mapped_watched.store(is_watched, Ordering::Relaxed);
    }

    /// Whether the process itself has a userfaultfd open.
    pub(crate) fn has_userfaultfd(&self) -> bool {
        self.lock().says.keeps_holes == Some(KeptHoles::Watched)
    }

    /// Whether a program provides or observes pages of the RAM by `userfaultfd(2)`.
    pub fn is_watched(&self) -> bool {
        self.keeps_holes() == Some(KeptHoles::Watched)
    }

    /// Note for the guest's view while a userfaultfd is open.
    pub fn note(&self) -> Option<String> {
        self.is_watched().then(|| WATCHED.to_owned())
    }

    /// Checks again. It takes a tenth of a millisecond, or half a second where the monitor does not answer.
    pub fn refresh(&self) {
        let is_alive = self.host.as_ref().map_or_else(|| self.process.is_alive(), |host| !host.has_ended());
        let says = if is_alive { self.of_the_living() } else { Says::nothing_but(GateState::Gone) };
        *self.lock() = Facts { at: Instant::now(), says };
    }

    fn of_the_living(&self) -> Says {
        let closed = |why: Option<LeftAlone>| why.map_or(GateState::Open, GateState::Closed);
        let files = self.files_say(self.files_every());
        let (of_process, has_userfaultfd) = (files.why, files.has_userfaultfd());
        let kept = |keeps: bool| match has_userfaultfd {
            true => Some(KeptHoles::Watched),
            false => keeps.then_some(KeptHoles::GivenBack),
        };
        let has_userfaultfd = has_userfaultfd || self.is_mapped_watched.load(Ordering::Relaxed);
        let look = |signs| self.look(Signs { has_userfaultfd, ..signs });
        let started_with = self.process.command_line.returns;
        match &self.monitor {
            Some(monitor) => match monitor.with(|qmp| qmp.ask_all(&QUESTIONS)) {
                Ok(answers) => {
                    let answers = Answers::of(answers.into_iter().map(Result::unwrap_or_default));
                    let holes = keeps_holes(started_with.or(self.devices(monitor)), answers.balloon());
                    let signs = answers.signs();
                    look(signs);
                    Says {
                        state: closed(of_process.or(answers.left_alone())),
                        keeps_holes: kept(holes),
                        is_paused: signs.is_stopped,
                    }
                }
                Err(_) => {
                    look(Signs { left_alone: Some(LeftAlone::NoAnswer), ..Signs::default() });
                    Says {
                        state: closed(of_process.or(Some(LeftAlone::NoAnswer))),
                        keeps_holes: kept(true),
                        is_paused: self.process.is_stopped(),
                    }
                }
            },
            None => {
                let LibvirtSays { why, is_arriving, is_stopped, returns, memory } = self.libvirt_says();
                look(Signs { left_alone: why, is_arriving, is_stopped, balloon: memory, ..Signs::default() });
                let holes = keeps_holes(started_with.or(returns), memory.map(Balloon::of));
                Says {
                    state: closed(of_process.or(why)),
                    keeps_holes: kept(holes),
                    is_paused: is_stopped || self.process.is_stopped(),
                }
            }
        }
    }

    /// Takes what a look has shown into account.
    fn look(&self, signs: Signs) {
        self.events.lock().look(&signs, Instant::now());
    }

    /// Whether an event is under way that a recovery follows, so that its end should be noticed soon.
    pub fn is_in_event(&self) -> bool {
        self.events.lock().is_in_event()
    }

    /// Number of times that such an event has begun or ended.
    pub(crate) fn changes(&self) -> u64 {
        self.events.lock().changes()
    }

    /// Devices in the device tree now. Without an answer, those of the last one.
    fn devices(&self, monitor: &Monitor) -> Returns {
        let mut latest = self.devices.lock();
        if let Some((at, returns)) = *latest
            && at.elapsed() < DEVICES_EVERY
        {
            return returns;
        }
        let tree = monitor.with(|qmp| qmp.ask(Question::DeviceTree)).ok().and_then(Result::ok);
        let before = latest.map_or(Returns::default(), |(_, returns)| returns);
        let returns = tree.as_ref().and_then(Value::as_str).map_or(before, of_device_tree);
        latest.insert((Instant::now(), returns)).1
    }

    fn files_every(&self) -> Duration {
        let latest = self.files.lock();
        let is_unknown = latest.is_some_and(|(_, files)| files.userfaultfd == Userfaultfd::Unknown);
        if is_unknown { FILES_EVERY_WHEN_UNREADABLE } else { FILES_EVERY }
    }

    /// What the open files said at most this long ago, or say now. They are read again too where the userfaultfd that
    /// was open is closed now.
    fn files_say(&self, age: Duration) -> FilesSay {
        let is_closed =
            |files: FilesSay| matches!(files.userfaultfd, Userfaultfd::Open(fd) if !self.process.is_userfaultfd(fd));
        let mut latest = self.files.lock();
        match *latest {
            Some((at, files)) if at.elapsed() < age && !is_closed(files) => files,
            before => {
                let kept = before.map_or(FilesSay::default(), |(_, files)| files);
                let files = self.read_files().unwrap_or(FilesSay { userfaultfd: Userfaultfd::Unknown, ..kept });
                latest.insert((Instant::now(), files)).1
            }
        }
    }

    /// `None` where they are not readable now. Those that never were say nothing.
    fn read_files(&self) -> Option<FilesSay> {
        let descriptors = match &self.process.descriptors {
            Ok(_) => self.process.descriptors_now().ok()?,
            Err(_) => self.process.descriptors_now().unwrap_or_default(),
        };
        let pinned = self.process.status().map_or(Bytes::ZERO, |status| status.pinned);
        let is_encrypted = self.process.command_line.is_encrypted;
        let why = of_descriptors(&descriptors, pinned, is_encrypted);
        let userfaultfd = descriptors.userfaultfd.map_or(Userfaultfd::None, Userfaultfd::Open);
        Some(FilesSay { why, userfaultfd })
    }

    /// Libvirt's status file of the domain. Where that file is not readable, the job from virsh.
    fn libvirt_says(&self) -> LibvirtSays {
        let only = |why| LibvirtSays { why, ..LibvirtSays::default() };
        let Some(domain) = &self.process.domain else { return only(None) };
        let Some(path) = self.process.places.domain_file(domain, "xml") else { return only(None) };
        match fs::read_to_string(path) {
            Ok(xml) => {
                let job = job_of_status(&xml);
                LibvirtSays {
                    why: of_job(job),
                    is_arriving: job == Job::Arrival,
                    is_stopped: is_stopped(&xml),
                    returns: of_status(&xml),
                    memory: memory_of_status(&xml),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => only(self.virsh_says(domain)),
            Err(_) => only(Some(LeftAlone::NoAnswer)),
        }
    }

    fn virsh_says(&self, domain: &str) -> Option<LeftAlone> {
        no_older_than(VIRSH_EVERY, &self.virsh, || {
            Virsh::default().job(domain).map_or(Some(LeftAlone::NoAnswer), of_job)
        })
    }

    fn lock(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock()
    }
}

impl Gate for GuestGate {
    fn state(&self) -> GateState {
        let every = || if self.is_in_event() { EVENT_EVERY } else { REFRESH_EVERY };
        let age = self.lock().at.elapsed();
        if self.is_quick && age >= every() {
            self.refresh();
        }
        let facts = *self.lock();
        match facts.says.state {
            GateState::Gone => GateState::Gone,
            _ if self.is_asked.load(Ordering::Relaxed) => GateState::Closed(LeftAlone::Asked),
            _ if facts.at.elapsed() > FACTS_AGE_MAX => GateState::Closed(LeftAlone::NoAnswer),
            state => state,
        }
    }

    fn keeps_holes(&self) -> Option<KeptHoles> {
        if self.is_mapped_watched.load(Ordering::Relaxed) {
            return Some(KeptHoles::Watched);
        }
        let is_host_short = self.holes_are_wanted.load(Ordering::Relaxed);
        self.lock().says.keeps_holes.or(is_host_short.then_some(KeptHoles::HostShort))
    }

    fn may_split(&self) -> bool {
        !self.is_mapped_watched.load(Ordering::Relaxed) && !self.files_say(FILES_AGE_FOR_SPLIT).has_userfaultfd()
    }

    fn is_paused(&self) -> bool {
        self.lock().says.is_paused
    }

    fn events(&self, now: Moment) -> Events {
        self.events.lock().events(now)
    }
}

/// Whether libvirt's status file of its domain is not readable.
fn needs_virsh(process: &VmProcess) -> bool {
    let notes = process.domain.as_ref().and_then(|domain| process.places.domain_file(domain, "xml"));
    let opened = notes.map(fs::File::open);
    matches!(opened, Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::CommandLine;
    use crate::places::tests::fake_places;
    use crate::process::Descriptors;
    use crate::process::tests::add_process;
    use serde_json::json;
    use wideleaf_policies::recovery::Cause;
    use wideleaf_policies::units::mib;

    /// Reason to leave the guest alone after answers about status, migration, dirty rate, dump and jobs.
    fn left_alone(answers: [Value; 5]) -> Option<LeftAlone> {
        Answers::of(answers).left_alone()
    }

    #[test]
    fn a_guest_that_only_runs_is_not_left_alone() {
        let running = json!({ "status": "running" });
        let measured = json!({ "status": "unstarted", "mode": "page-sampling" });
        let quiet = [running.clone(), json!({}), measured, json!({ "status": "none" }), json!([])];
        assert_eq!(left_alone(quiet), None);
        // An old QEMU refuses unknown commands.
        assert_eq!(left_alone([running, Value::Null, Value::Null, Value::Null, Value::Null]), None);
    }

    #[test]
    fn jobs_on_its_memory_close_the_gate() {
        let status = |text: &str| json!({ "status": text });
        let with = |place: usize, answer: Value| {
            let mut answers = [status("running"), Value::Null, Value::Null, Value::Null, Value::Null];
            answers[place] = answer;
            left_alone(answers)
        };
        for state in ["setup", "active", "postcopy-active", "postcopy-paused", "pre-switchover", "device", "cancelling"]
        {
            assert_eq!(with(1, status(state)), Some(LeftAlone::Migration), "{state}");
        }
        for state in ["completed", "failed", "cancelled", "none"] {
            assert_eq!(with(1, status(state)), None, "{state}");
        }
        assert_eq!(with(0, status("inmigrate")), Some(LeftAlone::Migration));
        assert_eq!(with(0, status("save-vm")), Some(LeftAlone::Snapshot));
        assert_eq!(with(2, json!({ "status": "measuring", "mode": "dirty-bitmap" })), Some(LeftAlone::DirtyRate));
        assert_eq!(with(2, json!({ "status": "measuring", "mode": "page-sampling" })), None);
        assert_eq!(with(3, status("active")), Some(LeftAlone::Snapshot));
        assert_eq!(with(4, json!([{ "type": "snapshot-save", "status": "running" }])), Some(LeftAlone::Snapshot));
        assert_eq!(
            with(
                4,
                json!([{ "type": "snapshot-save", "status": "concluded" }, { "type": "mirror", "status": "running" }])
            ),
            None
        );
    }

    #[test]
    fn devices_and_encryption_close_the_gate_and_a_userfaultfd_does_not() {
        let none = Descriptors::default();
        assert_eq!(of_descriptors(&none, mib(1), false), None);
        assert_eq!(of_descriptors(&none, mib(256), false), Some(LeftAlone::Pinned));
        assert_eq!(of_descriptors(&none, mib(0), true), Some(LeftAlone::Encrypted));
        let private = Descriptors { has_guest_memfd: true, has_device: true, ..none.clone() };
        assert_eq!(of_descriptors(&private, mib(0), false), Some(LeftAlone::GuestMemfd));
        assert_eq!(of_descriptors(&private, mib(0), true), Some(LeftAlone::Encrypted), "the stronger reason");
        let device = Descriptors { has_device: true, userfaultfd: Some(5), ..none.clone() };
        assert_eq!(of_descriptors(&device, mib(0), false), Some(LeftAlone::Pinned));
        let restored = Descriptors { userfaultfd: Some(5), ..none };
        assert_eq!(of_descriptors(&restored, mib(0), false), None);
    }

    /// A process with these open files, and a gate that looks again.
    fn with_files(files: &[&str]) -> (tempfile::TempDir, GuestGate) {
        let (folder, places) = fake_places();
        add_process(&places, 7, &["firecracker"], files);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        (folder, GuestGate::new(process, None))
    }

    /// Makes the gate's knowledge of the files as old as this.
    fn age_files(gate: &GuestGate, age: Duration) {
        let mut files = gate.files.lock();
        let (at, _) = files.as_mut().expect("it has looked");
        *at = Instant::now().checked_sub(age).expect("the clock has run for longer");
    }

    #[test]
    fn an_open_userfaultfd_keeps_holes_and_its_end_is_seen_at_the_next_refresh() {
        let (folder, gate) = with_files(&["anon_inode:kvm-vm", "anon_inode:[userfaultfd]"]);
        assert_eq!((gate.state(), gate.keeps_holes()), (GateState::Open, Some(KeptHoles::Watched)));
        assert!(gate.is_watched() && !gate.may_split());
        fs::remove_file(folder.path().join("proc/7/fd/1")).expect("it was there");
        std::os::unix::fs::symlink("anon_inode:[userfaultfd]", folder.path().join("proc/7/fd/9")).expect("it is new");
        gate.refresh();
        assert!(gate.is_watched(), "it has another one");
        fs::remove_file(folder.path().join("proc/7/fd/9")).expect("it was there");
        std::os::unix::fs::symlink("socket:[4711]", folder.path().join("proc/7/fd/9")).expect("the number is free");
        gate.refresh();
        assert_eq!((gate.keeps_holes(), gate.may_split()), (None, true));
    }

    #[test]
    fn a_userfaultfd_that_was_just_opened_is_seen_before_a_split() {
        let (folder, gate) = with_files(&["anon_inode:kvm-vm"]);
        assert!(gate.may_split());
        std::os::unix::fs::symlink("anon_inode:[userfaultfd]", folder.path().join("proc/7/fd/9")).expect("it is new");
        age_files(&gate, FILES_AGE_FOR_SPLIT);
        assert!(!gate.may_split());
    }

    #[test]
    fn nothing_is_split_and_pinned_memory_stays_known_while_the_open_files_are_not_readable() {
        let (folder, gate) = with_files(&["anon_inode:kvm-vm", "anon_inode:[vfio-device]"]);
        assert_eq!((gate.state(), gate.may_split()), (GateState::Closed(LeftAlone::Pinned), true));
        let [there, away] = ["fd", "away"].map(|name| folder.path().join("proc/7").join(name));
        fs::rename(&there, &away).expect("it was there");
        age_files(&gate, FILES_EVERY);
        gate.refresh();
        assert_eq!((gate.state(), gate.may_split()), (GateState::Closed(LeftAlone::Pinned), false));
        fs::rename(away, there).expect("it is there");
        age_files(&gate, FILES_EVERY_WHEN_UNREADABLE);
        gate.refresh();
        assert_eq!((gate.state(), gate.may_split()), (GateState::Closed(LeftAlone::Pinned), true));
    }

    #[test]
    fn a_userfaultfd_that_only_another_process_has_open_is_known_from_the_mappings() {
        let (_folder, gate) = with_files(&["anon_inode:kvm-vm"]);
        gate.mappings_say(true);
        assert!(gate.is_watched() && !gate.may_split());
        gate.mappings_say(false);
        gate.keep_holes(true);
        assert_eq!((gate.keeps_holes(), gate.may_split()), (Some(KeptHoles::HostShort), true));
    }

    #[test]
    fn holes_are_kept_unless_the_balloon_is_known_to_be_empty() {
        let line = |text: &str| CommandLine::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).returns;
        let balloon = line("qemu -m 256 -device virtio-balloon-pci,id=b");
        assert!(keeps_holes(balloon, None) && keeps_holes(balloon, Some(Balloon::Inflated)));
        assert!(!keeps_holes(balloon, Some(Balloon::Empty)));
        let reporting = line("qemu -m 256 -device virtio-balloon-pci,free-page-reporting=on");
        assert!(keeps_holes(reporting, Some(Balloon::Empty)));
        let none = line("qemu -m 256");
        assert!(!keeps_holes(none, None) && keeps_holes(none, Some(Balloon::Inflated)), "it may be plugged in later");
    }

    /// Device tree as QEMU 7.2 prints it, shortened.
    const DEVICE_TREE: &str = "bus: main-system-bus\r
  type System\r
      dev: virtio-balloon-pci, id \"b\"\r
        bus: virtio-bus\r
          dev: virtio-balloon-device, id \"\"\r
            free-page-hint = false\r
            free-page-reporting = false\r
      dev: VGA, id \"\"\r
";

    #[test]
    fn devices_that_were_plugged_in_are_seen_in_the_device_tree() {
        let with = |balloon, free_page_reporting, virtio_mem| Returns { balloon, free_page_reporting, virtio_mem };
        assert_eq!(of_device_tree(DEVICE_TREE), with(true, false, false));
        let reporting = DEVICE_TREE.replace("reporting = false", "reporting = true");
        assert_eq!(of_device_tree(&reporting), with(true, true, false));
        assert_eq!(of_device_tree("  dev: virtio-mem-pci, id \"vmem0\"\r\n"), with(false, false, true));
        assert_eq!(of_device_tree("  dev: VGA, id \"dev: virtio-mem\"\r\n"), Returns::default());
        assert_eq!(with(true, false, false).or(with(false, false, true)), with(true, false, true));
    }

    #[test]
    fn devices_that_libvirt_plugged_in_keep_holes_from_the_next_refresh_on() {
        let (_folder, process) = domain();
        let status = process.places.libvirt.join("web.xml");
        let gate = GuestGate::new(process, None);
        assert_eq!(gate.keeps_holes(), None);
        for (device, is_kept) in [
            ("<memory model='dimm' access='shared'>", false),
            ("<memory model='virtio-mem'>", true),
            ("<memballoon model='none'/>", false),
            ("<memballoon model='virtio' autodeflate='on' freePageReporting='on'>", true),
            ("<note>model='virtio-mem'</note><memoryBacking/>", false),
        ] {
            fs::write(&status, format!("<domstatus><devices>{device}</devices></domstatus>")).expect("written");
            gate.refresh();
            let kept = is_kept.then_some(KeptHoles::GivenBack);
            assert_eq!((gate.keeps_holes(), gate.state()), (kept, GateState::Open), "{device}");
        }
    }

    #[test]
    fn a_balloon_is_compared_with_all_memory_that_is_plugged_in() {
        let balloon = |actual: Value, memory: Value| {
            let [quiet @ .., _, _] = [const { Value::Null }; 7];
            Answers::of(quiet.into_iter().chain([actual, memory])).balloon()
        };
        let gib = |count: u64| count << 30;
        let plugged = json!({ "base-memory": gib(4), "plugged-memory": gib(1) });
        assert_eq!(balloon(json!({ "actual": gib(4) }), plugged.clone()), Some(Balloon::Inflated));
        assert_eq!(balloon(json!({ "actual": gib(5) }), plugged), Some(Balloon::Empty));
        assert_eq!(balloon(json!({ "actual": gib(4) }), json!({ "base-memory": gib(4) })), Some(Balloon::Empty));
        assert_eq!(balloon(json!({ "actual": gib(4) }), Value::Null), None);
        assert_eq!(balloon(Value::Null, json!({ "base-memory": gib(4) })), None);
    }

    /// A status file with these elements about memory, in the order of libvirt 9.
    fn status(state: &str, all: &str, left: &str) -> String {
        format!(
            "<domstatus state='{state}' reason='user' pid='7'>\n  <domain type='kvm' id='1'>\n    <metadata>\n      \
             <a><memory unit='KiB'>9</memory><currentMemory unit='KiB'>1</currentMemory></a>\n    </metadata>\n    \
             <memory {all}</memory>\n    <currentMemory {left}</currentMemory>\n    <devices>\n      \
             <memory model='dimm'>\n      </memory>\n      <memballoon model='virtio'>\n    </devices>\n</domain>"
        )
    }

    #[test]
    fn the_balloon_that_libvirt_gives_each_domain_keeps_no_holes_while_it_is_empty() {
        let (_folder, process) = domain();
        let path = process.places.libvirt.join("web.xml");
        let gate = GuestGate::new(process, None);
        let keeps = |all: &str, left: &str| {
            fs::write(&path, status("running", all, left)).expect("written");
            gate.refresh();
            gate.keeps_holes() == Some(KeptHoles::GivenBack)
        };
        assert!(!keeps("unit='KiB'>4096", "unit='KiB'>4096"));
        assert!(!keeps("dumpCore='off' unit='KiB'>4096", "unit='KiB'>4096"));
        assert!(keeps("unit='KiB'>4096", "unit='KiB'>4095") && !gate.is_in_event());
        assert!(!keeps("unit='KiB'>4096", "unit='KiB'>4096") && gate.is_in_event(), "it deflates");
        assert!(!keeps("unit='KiB'>4096", "unit='KiB'>4096") && !gate.is_in_event());
        for (all, left) in [
            ("unit='MiB'>4", "unit='KiB'>4096"),
            ("unit='KiB'>4096", "unit='MiB'>4"),
            ("unit='KiB'>a lot", "unit='KiB'>4096"),
            ("unit='KiB'>4096", "unit='KiB'>18446744073709551615"),
            ("unit='KiB'>4096</memory><memory model='dimm'>", "unit='KiB'>4096"),
        ] {
            assert!(keeps(all, left), "{all} {left} is not known");
        }
    }

    #[test]
    fn a_domain_that_migrates_to_this_host_has_arrived_once_libvirts_job_is_over() {
        let (_folder, process) = domain();
        let path = process.places.libvirt.join("web.xml");
        let gate = GuestGate::new(process, None);
        let at = |job: &str| {
            fs::write(&path, format!("<domstatus state='paused'>{job}</domstatus>")).expect("written");
            gate.refresh();
            gate.events(Moment::START).present
        };
        assert_eq!(at("<job type='none' async='migration in' phase='prepare'/>"), Some(Cause::Arrival));
        assert_eq!(gate.state(), GateState::Closed(LeftAlone::Migration));
        assert_eq!(at("<job type='none' async='none'/>"), Some(Cause::Arrival), "until it runs");
    }

    #[test]
    fn a_domain_that_stands_still_is_in_an_event_until_it_goes_on() {
        let (_folder, process) = domain();
        let path = process.places.libvirt.join("web.xml");
        let gate = GuestGate::new(process, None);
        for (state, is_stopped) in [("running", false), ("paused", true), ("pmsuspended", true), ("running", false)] {
            fs::write(&path, status(state, "unit='KiB'>4096", "unit='KiB'>4096")).expect("written");
            gate.refresh();
            assert_eq!((gate.is_in_event(), gate.state()), (is_stopped, GateState::Open), "{state}");
            assert_eq!(gate.is_paused(), is_stopped, "{state}");
        }
    }

    #[test]
    fn a_guest_stands_still_while_its_monitor_says_so_or_a_signal_has_stopped_its_process() {
        let said = |status: Value| {
            let answers = [const { Value::Null }; 6];
            Answers::of([status].into_iter().chain(answers)).signs().is_stopped
        };
        assert!(said(json!({ "status": "paused", "running": false })));
        assert!(!said(json!({ "status": "running", "running": true })) && !said(Value::Null));
        let (_folder, process) = domain();
        let stat = process.places.proc.join("7/stat");
        let gate = GuestGate::new(process, None);
        let running = fs::read_to_string(&stat).expect("it is there");
        assert!(running.contains(") S "), "{running}");
        for (state, is_stopped) in [("S", false), ("T", true), ("R", false), ("t", false)] {
            fs::write(&stat, running.replace(") S ", &format!(") {state} "))).expect("written");
            gate.refresh();
            assert_eq!((gate.is_paused(), gate.state()), (is_stopped, GateState::Open), "{state}");
        }
    }

    fn domain() -> (tempfile::TempDir, VmProcess) {
        let (folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64", "-name", "web"], &["anon_inode:kvm-vm"]);
        fs::write(places.libvirt.join("web.pid"), "7").expect("written");
        fs::write(places.libvirt.join("web.xml"), "<domstatus state='running'></domstatus>").expect("written");
        let process = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        (folder, process)
    }

    #[test]
    fn a_domain_is_left_alone_while_libvirt_has_a_job_for_its_memory() {
        let (_folder, process) = domain();
        let status = process.places.libvirt.join("web.xml");
        let gate = GuestGate::new(process, None);
        assert_eq!(gate.state(), GateState::Open);
        fs::write(&status, "<domstatus><job type='modify' async='dump'/></domstatus>").expect("written");
        assert_eq!(gate.state(), GateState::Open, "it answers from what it knows");
        gate.refresh();
        assert_eq!(gate.state(), GateState::Closed(LeftAlone::Snapshot));
        fs::remove_file(&status).expect("it was there");
        gate.refresh();
        assert_eq!(gate.state(), GateState::Closed(LeftAlone::NoAnswer));
    }

    #[test]
    fn a_quick_gate_is_refreshed_more_often_during_an_event() {
        let (_folder, process) = domain();
        let status = process.places.libvirt.join("web.xml");
        let gate = GuestGate::new(process, None);
        assert!(gate.is_quick());
        let age = || gate.lock().at = Instant::now().checked_sub(EVENT_EVERY).expect("the clock has run for longer");
        let write = |job: &str| fs::write(&status, format!("<domstatus>{job}</domstatus>")).expect("written");
        write("<job type='modify' async='save'/>");
        gate.refresh();
        assert_eq!((gate.state(), gate.is_in_event()), (GateState::Closed(LeftAlone::Snapshot), true));
        write("");
        age();
        assert_eq!(gate.state(), GateState::Open);
    }

    #[test]
    fn a_request_to_leave_the_guest_alone_holds_until_the_guest_ends() {
        let (_folder, process) = domain();
        let home = process.places.proc.join("7");
        let gate = GuestGate::new(process, None);
        gate.leave_alone(true);
        assert_eq!(gate.state(), GateState::Closed(LeftAlone::Asked));
        fs::remove_dir_all(home).expect("it was there");
        gate.refresh();
        assert_eq!(gate.state(), GateState::Gone);
    }

    #[test]
    fn expired_facts_close_the_gate() {
        let (_folder, process) = domain();
        let gate = GuestGate { is_quick: false, ..GuestGate::new(process, None) };
        gate.lock().at = Instant::now().checked_sub(2 * FACTS_AGE_MAX).expect("the clock has run for longer");
        assert_eq!(gate.state(), GateState::Closed(LeftAlone::NoAnswer));
    }

    #[test]
    fn the_caller_of_a_quick_gate_refreshes_it() {
        let (folder, process) = domain();
        let gate = GuestGate::new(process, None);
        assert!(gate.is_quick());
        let before = gate.state();
        assert_ne!(before, GateState::Gone);
        std::fs::remove_dir_all(folder.path()).expect("a folder of ours");
        assert_eq!(gate.state(), before, "the result of the refresh just now");
        gate.lock().at = Instant::now().checked_sub(2 * FACTS_AGE_MAX).expect("the clock has run for longer");
        assert_eq!(gate.state(), GateState::Gone);
    }
}
