//! One process that runs a VM, as `/proc` shows it (proc(5)). An unreadable part is [`Lost`] with the privilege
//! that it needs, and the rest is read all the same. The user of the QEMU process with `CAP_SYS_NICE` reads
//! everything here, and root does anyway.
//!
//! | file | says | needs |
//! |---|---|---|
//! | `comm`, `stat`, `status` | its identity; locked and pinned memory, THP switched off | nothing |
//! | `cmdline` | its name and how its RAM is made | nothing, and its `mmap_lock` |
//! | `fd/` | that it has a VM; VFIO, SEV, `userfaultfd` | its user, or `CAP_SYS_PTRACE` and `CAP_DAC_READ_SEARCH` |
//! | `maps`, `smaps` | its mappings, with their kind and advice | its user, or `CAP_SYS_PTRACE`; and its `mmap_lock` |
//!
//! Another process can keep the `mmap_lock` for ever, so reads that take it have a deadline
//! ([`wideleaf_memory::deadline`]). A process that does not answer is listed all the same, with libvirt's name for
//! it or its process id.

use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use procfs::ProcError;
use procfs::process::{Process, Stat};
use wideleaf_control::view::Vmm;
use wideleaf_memory::deadline::{self, NoAnswer, ProcessKey};
use wideleaf_policies::Bytes;

use crate::arguments::{self, Place};
use crate::command_line::CommandLine;
use crate::other_vmms;
use crate::places::Places;

mod mappings;

pub use crate::mapping::Mapping;

/// Privileges for examining another process.
pub(crate) const NEEDED_TO_LOOK: &str = "root, or the user of the process, or CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH";

/// Privileges for managing another process.
pub(crate) const NEEDED_TO_ACT: &str = "root, or the user of the process and CAP_SYS_NICE";

/// A figure that is not available, and the privilege that would provide it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Name of the figure.
    pub what: &'static str,
    /// Reason for the loss.
    pub why: String,
    /// Privilege or remedy that it needs.
    pub needs: &'static str,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot read {} ({}): needs {}", self.what, self.why, self.needs)
    }
}

/// Reason why a process cannot be examined.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The process does not exist.
    #[error("there is no process {0}")]
    Gone(u32),
    /// Any other error of the kernel.
    #[error("process {pid}: {source}")]
    Proc {
        /// Id of the process.
        pid: u32,
        /// Error from the kernel.
        source: Box<ProcError>,
    },
}

/// Findings from its open files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// Numbers of the open files that are KVM VMs.
    pub vms: Vec<u32>,
    /// Whether the guest has a device of the host (VFIO, iommufd, vDPA), which pins its pages.
    pub has_device: bool,
    /// Whether the guest's memory is encrypted (`/dev/sev`).
    pub is_encrypted: bool,
    /// Whether the guest's memory is private to it, in a file of KVM (guest_memfd).
    pub has_guest_memfd: bool,
    /// Number of an open file by which a handler provides or watches pages (`userfaultfd(2)`), if there is one.
    pub userfaultfd: Option<u32>,
}

/// A process that runs a VM.
#[derive(Clone, Debug)]
pub struct VmProcess {
    /// Id of the process.
    pub pid: u32,
    /// Start of the process, in clock ticks since boot (proc_pid_stat(5)). With the id it names one process for ever.
    pub started_at: u64,
    /// User id of the process.
    pub uid: u32,
    /// Name of the program's file, or its own name for itself.
    pub program: String,
    /// Program that runs the VM.
    pub vmm: Vmm,
    /// Name of the guest on its own command line, or the process id. It is only a label: the command line may
    /// contain any name.
    pub name: String,
    /// UUID on its command line, also only a label.
    pub uuid: Option<String>,
    /// Name of its libvirt domain, where libvirt assigns that to this process.
    pub domain: Option<String>,
    /// Whether libvirt assigns the domain of that name to another process: this one only uses the name.
    pub is_name_anothers: bool,
    /// Parsed command line of the process.
    pub command_line: CommandLine,
    /// Findings from its open files.
    pub descriptors: Result<Descriptors, Lost>,
    /// Reason why the process does not answer for now, in words that follow "it". Its command line is then unknown.
    pub no_answer: Option<String>,
    /// Paths where it was found.
    pub places: Places,
}

/// Parts of `status` (proc_pid_status(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Memory pinned by devices (`VmPin`), in bytes.
    pub pinned: Bytes,
    /// Locked memory (`VmLck`), in bytes.
    pub locked: Bytes,
    /// Resident and swapped memory (`VmRSS`, `VmSwap`), in bytes. hugetlb pages are not in it.
    pub in_use: Bytes,
    /// Whether THP is off for the process (`prctl(2)`, `PR_SET_THP_DISABLE`).
    pub is_thp_off: bool,
}

impl VmProcess {
    /// Examines a process; `None` where it runs no VM. Takes at most [`deadline::BRIEF`].
    ///
    /// # Errors
    /// [`ProcessError`] where the process does not exist.
    pub fn look(places: &Places, pid: u32) -> Result<Option<VmProcess>, ProcessError> {
        let Some(seen) = Seen::of(places, pid)? else { return Ok(None) };
        let arguments = match seen.known_arguments(places) {
            Some(arguments) => Ok(arguments),
            None => seen.told(places, deadline::ask(seen.key(), deadline::BRIEF, seen.question(places)))?,
        };
        seen.process(places, arguments)
    }

    /// Examines many processes, and leaves out those that run no VM or have ended. All that do not answer cost
    /// [`deadline::BRIEF`] together, for each `AT_ONCE` that were not known before.
    ///
    /// # Errors
    /// [`ProcessError`] where this process lacks files or memory: any of them may be a VM.
    pub fn look_at_all(places: &Places, pids: impl Iterator<Item = u32>) -> Result<Vec<VmProcess>, ProcessError> {
        let look = |pid| unless_scarce(Seen::of(places, pid)).map(Option::flatten).transpose();
        let seen = pids.filter_map(look).collect::<Result<Vec<Seen>, ProcessError>>()?;
        let mut arguments: Vec<Option<Result<Vec<String>, NoAnswer>>> =
            seen.iter().map(|seen| seen.known_arguments(places).map(Ok)).collect();
        let unknown: Vec<usize> = (0..seen.len()).filter(|index| arguments[*index].is_none()).collect();
        for some in unknown.chunks(AT_ONCE) {
            let questions = some.iter().map(|index| (seen[*index].key(), seen[*index].question(places)));
            for (index, answer) in some.iter().zip(deadline::ask_all(deadline::BRIEF, questions)) {
                arguments[*index] = unless_scarce(seen[*index].told(places, answer))?;
            }
        }
        let looked = seen.into_iter().zip(arguments).filter_map(|(seen, told)| Some((seen, told?)));
        let looked = looked.map(|(seen, told)| unless_scarce(seen.process(places, told)).map(Option::flatten));
        looked.filter_map(Result::transpose).collect()
    }

    /// Whether the process answers a read of its memory at all. A guest that hangs is known after `within`, also
    /// where a full examination may take much longer.
    ///
    /// # Errors
    /// [`NoAnswer`] after `within`.
    pub(crate) fn answers(&self, within: Duration) -> Result<(), NoAnswer> {
        let arguments = self.places.proc.join(self.pid.to_string()).join("cmdline");
        let read = move || {
            let _ = fs::File::open(arguments).map(|mut file| file.read(&mut [0]));
        };
        deadline::ask(self.key(), within, read)
    }

    /// Key of the process in questions with a deadline.
    pub fn key(&self) -> ProcessKey {
        ProcessKey { pid: self.pid, started_at: self.started_at }
    }

    /// Whether this very process still lives.
    pub fn is_alive(&self) -> bool {
        let stat = open(&self.places, self.pid).and_then(|process| process.stat());
        stat.is_ok_and(|stat| stat.starttime == self.started_at && !matches!(stat.state, 'Z' | 'X'))
    }

    /// Whether a signal has stopped it (SIGSTOP), so that its guest stands still.
    pub fn is_stopped(&self) -> bool {
        let stat = open(&self.places, self.pid).and_then(|process| process.stat());
        stat.is_ok_and(|stat| stat.starttime == self.started_at && stat.state == 'T')
    }

    /// Path of its control group below the root: of the unified hierarchy, else of that of the memory controller
    /// (cgroups(7)). `None` where the process has ended, or the kernel has neither.
    pub fn cgroup(&self) -> Option<String> {
        let text = fs::read_to_string(self.places.proc.join(self.pid.to_string()).join("cgroup")).ok()?;
        cgroup_of(&text)
    }

    /// Findings from its open files now.
    ///
    /// # Errors
    /// [`Lost`] without the permission.
    pub fn descriptors_now(&self) -> Result<Descriptors, Lost> {
        read_descriptors(&self.places, self.pid).map_err(lost_descriptors)
    }

    /// Whether the open file of this number is a userfaultfd now: one `readlink(2)`.
    pub(crate) fn is_userfaultfd(&self, number: u32) -> bool {
        let link = self.places.proc.join(self.pid.to_string()).join("fd").join(number.to_string());
        fs::read_link(link).is_ok_and(|target| target.as_os_str() == USERFAULTFD)
    }

    /// Locked and pinned memory, and whether THP is off.
    ///
    /// # Errors
    /// [`Lost`] where the process has ended.
    pub fn status(&self) -> Result<Status, Lost> {
        let lost = |error: ProcError| Lost { what: "status", why: error.to_string(), needs: "the process to live" };
        let status = open(&self.places, self.pid).and_then(|process| process.status()).map_err(lost)?;
        let kibibytes = |figure: Option<u64>| Bytes::new(figure.unwrap_or(0) << 10);
        Ok(Status {
            pinned: kibibytes(status.vmpin),
            locked: kibibytes(status.vmlck),
            in_use: kibibytes(status.vmrss) + kibibytes(status.vmswap),
            is_thp_off: status.thp_enabled == Some(false),
        })
    }
}

/// Target of the link to an open userfaultfd.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// Number of processes examined at once. More would delay a small host's other work for a moment.
const AT_ONCE: usize = 16;

/// Facts about a process that may run a VM, found without a read of its memory.
struct Seen {
    pid: u32,
    stat: Stat,
    descriptors: Result<Descriptors, Lost>,
    process: Process,
}

impl Seen {
    /// `None` for a process without a VM.
    fn of(places: &Places, pid: u32) -> Result<Option<Seen>, ProcessError> {
        let error = |source| process_error(pid, source);
        let process = open(places, pid).map_err(error)?;
        let descriptors = match read_descriptors(places, pid) {
            Err(source) if is_scarcity(&source) => return Err(error(ProcError::Io(source, None))),
            read => read.map_err(lost_descriptors),
        };
        if descriptors.as_ref().is_ok_and(|descriptors| descriptors.vms.is_empty()) {
            return Ok(None);
        }
        let stat = process.stat().map_err(error)?;
        Ok(Some(Seen { pid, stat, descriptors, process }))
    }

    fn key(&self) -> ProcessKey {
        ProcessKey { pid: self.pid, started_at: self.stat.starttime }
    }

    /// Place of its arguments. `None` where the kernel does not report it, and where the open files do not show a VM.
    fn place(&self, places: &Places) -> Option<Place> {
        let (start, end) = (self.stat.arg_start?, self.stat.arg_end?);
        let is_said = self.descriptors.is_ok() && start != 0;
        is_said.then(|| Place { proc: places.proc.clone(), of: self.key(), start, end })
    }

    fn known_arguments(&self, places: &Places) -> Option<Vec<String>> {
        arguments::known(&self.place(places)?)
    }

    fn question(&self, places: &Places) -> impl FnOnce() -> Result<Vec<String>, ProcError> + Send + 'static {
        let (places, of) = (places.clone(), self.key());
        move || {
            let process = open(&places, of.pid)?;
            let arguments = read_arguments(&process)?;
            // Another process may have received the process id since.
            let is_it = process.stat()?.starttime == of.started_at;
            if is_it { Ok(arguments) } else { Err(ProcError::NotFound(None)) }
        }
    }

    fn told(
        &self,
        places: &Places,
        answer: Result<Result<Vec<String>, ProcError>, NoAnswer>,
    ) -> Result<Result<Vec<String>, NoAnswer>, ProcessError> {
        let read = match answer {
            Ok(read) => read,
            Err(no_answer) => return Ok(Err(no_answer)),
        };
        let arguments = read.map_err(|source| process_error(self.pid, source))?;
        self.place(places).into_iter().for_each(|place| arguments::remember(place, &arguments));
        Ok(Ok(arguments))
    }

    /// `None` where the process has no VM after all.
    fn process(
        self,
        places: &Places,
        arguments: Result<Vec<String>, NoAnswer>,
    ) -> Result<Option<VmProcess>, ProcessError> {
        let Seen { pid, stat, descriptors, process } = self;
        if arguments.as_ref().is_ok_and(Vec::is_empty) {
            return Ok(None); // a kernel thread, or a process that has ended
        }
        let no_answer = arguments.as_ref().err().map(ToString::to_string);
        let arguments = arguments.unwrap_or_default();
        let program = program(&process, arguments.first().unwrap_or(&stat.comm));
        let vmm = vmm(&program);
        // A sandboxed device of crosvm is a process of that name too, and has no VM.
        let is_told_by_its_name = matches!(vmm, Vmm::Qemu | Vmm::Firecracker | Vmm::CloudHypervisor);
        if descriptors.is_err() && !is_told_by_its_name {
            return Ok(None);
        }
        let mut command_line = match vmm {
            Vmm::Qemu => CommandLine::parse(&arguments),
            other => other_vmms::command_line(other, &arguments),
        };
        if no_answer.is_some() {
            command_line.name = places.domain_of(pid);
        }
        let domain = command_line.name.clone().filter(|name| places.domain_pid(name) == Some(pid));
        let is_anothers = |name: &String| places.is_domain_of_another(name, pid);
        Ok(Some(VmProcess {
            is_name_anothers: domain.is_none() && command_line.name.as_ref().is_some_and(is_anothers),
            pid,
            started_at: stat.starttime,
            uid: process.uid().map_err(|source| process_error(pid, source))?,
            name: command_line.name.clone().unwrap_or_else(|| pid.to_string()),
            uuid: command_line.uuid.clone(),
            program,
            vmm,
            domain,
            command_line,
            descriptors,
            no_answer,
            places: places.clone(),
        }))
    }
}

/// The path in a file like `0::/kubepods.slice/…`, one line per hierarchy. The root says nothing about a process: on
/// hosts with both versions, the unified hierarchy often has all processes there.
fn cgroup_of(text: &str) -> Option<String> {
    let lines = text.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        rest.split_once(':')
    });
    let is_told = |(_, path): &(&str, &str)| *path != "/" && !path.is_empty();
    let rank = |controllers: &str| match controllers {
        "" => 0,
        several if several.split(',').any(|one| one == "memory") => 1,
        _ => 2,
    };
    let (_, path) = lines.filter(is_told).min_by_key(|(controllers, _)| rank(controllers))?;
    Some(path.to_owned())
}

fn open(places: &Places, pid: u32) -> Result<Process, ProcError> {
    Process::new_with_root(places.proc.join(pid.to_string()))
}

/// `None` in the place of an error of that process alone: it has ended, or does not show itself to this user. The other
/// errors say nothing about it.
fn unless_scarce<T>(looked: Result<T, ProcessError>) -> Result<Option<T>, ProcessError> {
    match looked {
        Ok(seen) => Ok(Some(seen)),
        Err(ProcessError::Proc { pid, source }) => match *source {
            ProcError::Io(error, path) if is_scarcity(&error) => {
                Err(ProcessError::Proc { pid, source: Box::new(ProcError::Io(error, path)) })
            }
            _ => Ok(None),
        },
        Err(ProcessError::Gone(_)) => Ok(None),
    }
}

/// Whether this process, or its host, has no more files or memory.
fn is_scarcity(error: &io::Error) -> bool {
    let scarcities = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|number| scarcities.contains(&Errno::from_raw(number)))
}

fn process_error(pid: u32, source: ProcError) -> ProcessError {
    match source {
        ProcError::NotFound(_) => ProcessError::Gone(pid),
        // Files of a process that ends during the read.
        ProcError::Io(error, _) if error.raw_os_error() == Some(Errno::ESRCH as i32) => ProcessError::Gone(pid),
        source => ProcessError::Proc { pid, source: Box::new(source) },
    }
}

/// Upper bound on the arguments, in bytes: `execve(2)` takes 2 MiB unless an operator raised the limit of the
/// stack. A process may declare any of its memory as its arguments (`PR_SET_MM_MAP`), gigabytes of it.
const ARGUMENTS_BYTES_MAX: usize = 2 << 20;

/// Reads a file with a length that the process chooses.
fn bounded(process: &Process, name: &str, bytes_max: usize) -> Result<Vec<u8>, ProcError> {
    let mut bytes = Vec::new();
    process.open_relative(name)?.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > bytes_max {
        return Err(ProcError::Other(format!("{name} has more than {bytes_max} bytes, which no VMM needs")));
    }
    Ok(bytes)
}

/// Its arguments, whatever bytes they contain.
fn read_arguments(process: &Process) -> Result<Vec<String>, ProcError> {
    let bytes = bounded(process, "cmdline", ARGUMENTS_BYTES_MAX)?;
    let arguments = bytes.split(|byte| *byte == 0).filter(|argument| !argument.is_empty());
    Ok(arguments.map(|argument| String::from_utf8_lossy(argument).into_owned()).collect())
}

/// Name of the program: of its file, else its own name for itself.
fn program(process: &Process, called: &str) -> String {
    let exe =
        process.exe().ok().and_then(|exe| Some(exe.file_name()?.to_str()?.trim_end_matches(" (deleted)").to_owned()));
    let called = || Path::new(called).file_name().and_then(|name| name.to_str()).unwrap_or(called).to_owned();
    exe.unwrap_or_else(called)
}

fn vmm(program: &str) -> Vmm {
    match program {
        "qemu-kvm" | "kvm" => Vmm::Qemu,
        name if name.starts_with("qemu-system-") => Vmm::Qemu,
        "wideleaf" => Vmm::Wideleaf,
        name => other_vmms::vmm(name).unwrap_or(Vmm::Other),
    }
}

fn lost_descriptors(error: io::Error) -> Lost {
    Lost { what: "its open files (fd)", why: error.kind().to_string(), needs: NEEDED_TO_LOOK }
}

/// One `readlink(2)` per file: this runs for every process of the host, and for every guest again and again.
fn read_descriptors(places: &Places, pid: u32) -> io::Result<Descriptors> {
    let mut found = Descriptors::default();
    let number = |path: &Path| path.file_name().and_then(|fd| fd.to_str()?.parse::<u32>().ok());
    for entry in fs::read_dir(places.proc.join(pid.to_string()).join("fd"))? {
        let path = entry?.path();
        // A file that the process has closed since.
        let Ok(target) = fs::read_link(&path) else { continue };
        let Some(target) = target.to_str() else { continue };
        match target {
            "anon_inode:kvm-vm" => found.vms.extend(number(&path)),
            USERFAULTFD => found.userfaultfd = number(&path),
            "anon_inode:[vfio-device]" | "/dev/iommu" => found.has_device = true,
            "/dev/sev" => found.is_encrypted = true,
            // Its name since Linux 6.8, and that of its file where it has a mount of its own.
            name if name.contains("[kvm-gmem]") || name.contains("[guest_memfd]") => found.has_guest_memfd = true,
            _ => found.has_device |= ["/dev/vfio/", "/dev/vhost-vdpa-"].iter().any(|device| target.starts_with(device)),
        }
    }
    Ok(found)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::places::tests::{fake_places, say_domain};
    use std::os::unix::fs::symlink;

    pub(crate) fn add_process(places: &Places, pid: u32, arguments: &[&str], files: &[&str]) {
        let home = places.proc.join(pid.to_string());
        fs::create_dir_all(home.join("fd")).expect("the folder is new");
        fs::write(home.join("cmdline"), arguments.join("\0")).expect("written");
        let stat = format!(
            "{pid} (qemu-system-x86) S 1 1 1 0 -1 4194304 1 0 0 0 1 1 0 0 20 0 4 0 4711 1 1{}",
            " 0".repeat(28)
        );
        fs::write(home.join("stat"), stat).expect("written");
        for (number, file) in files.iter().enumerate() {
            symlink(file, home.join("fd").join(number.to_string())).expect("the link is new");
        }
    }

    #[test]
    fn a_libvirt_guest_has_its_domains_name_and_any_other_its_own() {
        let (_folder, places) = fake_places();
        let line = ["/usr/bin/qemu-system-x86_64", "-name", "guest=web,debug-threads=on", "-uuid", "u-1"];
        add_process(&places, 7, &line, &["/dev/kvm", "anon_inode:kvm-vm", "/dev/vfio/3", "anon_inode:[userfaultfd]"]);
        say_domain(&places, "web", 7);
        let guest = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        assert_eq!(
            (guest.name.as_str(), guest.domain.as_deref(), guest.uuid.as_deref()),
            ("web", Some("web"), Some("u-1"))
        );
        assert_eq!((guest.vmm, guest.started_at), (Vmm::Qemu, 4711));
        let descriptors = guest.descriptors.clone().expect("readable");
        assert_eq!(
            descriptors,
            Descriptors { vms: vec![1], has_device: true, userfaultfd: Some(3), ..Descriptors::default() }
        );
        assert!(guest.is_alive());

        say_domain(&places, "web", 8);
        let guest = VmProcess::look(&places, 7).expect("there").expect("a VM");
        assert_eq!((guest.domain, guest.is_name_anothers), (None, false), "process 8 does not exist");
        add_process(&places, 8, &["/usr/bin/qemu-system-x86_64", "-name", "web"], &["anon_inode:kvm-vm"]);
        let is_anothers = |pid| VmProcess::look(&places, pid).expect("there").expect("a VM").is_name_anothers;
        assert_eq!([7, 8].map(is_anothers), [true, false]);
    }

    #[test]
    fn the_control_group_is_that_of_the_unified_hierarchy_else_of_the_memory_controller() {
        let both = "12:memory:/kubepods/pod1/c\n3:cpu,cpuacct:/other\n1:name=systemd:/named\n0::/\n";
        assert_eq!(cgroup_of(both).as_deref(), Some("/kubepods/pod1/c"));
        assert_eq!(cgroup_of("5:cpu:/c\n0::/kubepods.slice/a:b.scope\n").as_deref(), Some("/kubepods.slice/a:b.scope"));
        assert_eq!(cgroup_of("4:cpu:/only\n").as_deref(), Some("/only"));
        for text in ["", "0::/\n", "nonsense\n", "1:memory:\n"] {
            assert_eq!(cgroup_of(text), None, "{text:?}");
        }
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let guest = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        assert_eq!(guest.cgroup(), None, "the kernel has no such file");
        fs::write(places.proc.join("7/cgroup"), "0::/machine.slice/web\n").expect("written");
        assert_eq!(guest.cgroup().as_deref(), Some("/machine.slice/web"));
    }

    #[test]
    fn a_process_without_a_vm_is_left_out_and_one_that_has_ended_is_an_error() {
        let (_folder, places) = fake_places();
        add_process(&places, 8, &["/usr/bin/qemu-system-x86_64"], &["/dev/null"]);
        assert!(VmProcess::look(&places, 8).expect("it is there").is_none());
        let gone = VmProcess::look(&places, 9).expect_err("no such process");
        assert_eq!(gone.to_string(), "there is no process 9");
    }

    #[test]
    fn qemu_is_known_by_its_command_line_where_its_files_are_not_readable() {
        let (_folder, places) = fake_places();
        add_process(&places, 10, &["/usr/bin/qemu-system-x86_64", "-name", "db"], &[]);
        fs::remove_dir(places.proc.join("10/fd")).expect("it is empty");
        let guest = VmProcess::look(&places, 10).expect("it is there").expect("taken for a VM");
        assert!(guest.descriptors.expect_err("lost").to_string().contains("CAP_SYS_PTRACE"));
    }

    #[test]
    fn malicious_names_in_a_process_do_no_harm() {
        let (_folder, places) = fake_places();
        add_process(&places, 12, &["qemu-system-x86_64", "-name", "caf"], &["anon_inode:kvm-vm"]);
        fs::write(places.proc.join("12/cmdline"), b"qemu-system-x86_64\0-name\0caf\xe9\0").expect("written");
        let line = |path: &str| format!("7f0000000000-7f0000200000 rw-s 00000000 00:01 7    {path}\nSize: 2048 kB\n");
        let guest = VmProcess::look(&places, 12).expect("it is there").expect("a VM");
        assert_eq!(guest.name, "caf\u{fffd}");
        for (path, seen) in [("/SYSVx", "/sysvx"), ("/dev/zero (deleted)", "/dev/zero (deleted)")] {
            fs::write(places.proc.join("12/smaps"), line(path)).expect("written");
            let mappings = guest.mappings().expect("readable");
            assert_eq!((mappings.len(), mappings[0].path.as_deref()), (1, Some(seen)));
        }
    }

    #[test]
    fn a_file_without_end_is_a_one_line_error_and_bounded_memory() {
        let (_folder, places) = fake_places();
        add_process(&places, 13, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let guest = VmProcess::look(&places, 13).expect("it is there").expect("a VM");
        symlink("/dev/zero", places.proc.join("13/smaps")).expect("the link is new");
        assert!(guest.mappings().expect_err("no end").to_string().contains("more than 33554432 bytes"));
        fs::remove_file(places.proc.join("13/cmdline")).expect("it was there");
        symlink("/dev/zero", places.proc.join("13/cmdline")).expect("the link is new");
        assert!(matches!(VmProcess::look(&places, 13), Err(ProcessError::Proc { pid: 13, .. })));
    }

    /// A file that never answers: a FIFO without a writer.
    pub(crate) fn hang(places: &Places, pid: u32, name: &str) {
        let file = places.proc.join(pid.to_string()).join(name);
        let _ = fs::remove_file(&file);
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    }

    /// Ends the wait of a reader of that file, with nothing to read.
    pub(crate) fn end_of(places: &Places, pid: u32, name: &str) {
        let file = places.proc.join(pid.to_string()).join(name);
        drop(fs::File::options().write(true).open(file).expect("a reader waits"));
    }

    #[test]
    fn a_process_that_does_not_answer_is_listed_under_libvirts_name_for_it() {
        let (_folder, places) = fake_places();
        for pid in [71, 72, 73] {
            add_process(&places, pid, &["qemu-system-x86_64", "-name", &format!("vm{pid}")], &["anon_inode:kvm-vm"]);
        }
        hang(&places, 71, "cmdline");
        hang(&places, 72, "cmdline");
        say_domain(&places, "web", 72);
        let seen = VmProcess::look_at_all(&places, [71, 72, 73].into_iter()).expect("files are free");
        assert_eq!(seen.iter().map(|guest| guest.name.as_str()).collect::<Vec<_>>(), ["71", "web", "vm73"]);
        assert_eq!((seen[1].domain.as_deref(), seen[0].vmm), (Some("web"), Vmm::Qemu));
        let is_silent = seen.iter().map(|guest| guest.no_answer.as_deref().map(|why| why.contains("does not answer")));
        assert_eq!(is_silent.collect::<Vec<_>>(), [Some(true), Some(true), None]);
        // No second question is asked while the first one hangs.
        assert!(VmProcess::look(&places, 71).expect("it is there").expect("a VM").no_answer.is_some());
        for pid in [71, 72] {
            end_of(&places, pid, "cmdline");
        }
    }

    #[test]
    fn memory_that_is_private_to_the_guest_is_seen_in_the_open_files() {
        for name in ["anon_inode:[kvm-gmem]", "/[kvm-gmem] (deleted)", "anon_inode:[guest_memfd]"] {
            let (_folder, places) = fake_places();
            add_process(&places, 15, &["qemu-system-x86_64"], &["anon_inode:kvm-vm", name]);
            let guest = VmProcess::look(&places, 15).expect("it is there").expect("a VM");
            assert!(guest.descriptors.expect("readable").has_guest_memfd, "{name}");
        }
    }

    #[test]
    fn a_large_process_has_more_time_for_its_mappings() {
        let (_folder, places) = fake_places();
        add_process(&places, 16, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let guest = VmProcess::look(&places, 16).expect("it is there").expect("a VM");
        let least = Duration::from_secs(8);
        assert_eq!(guest.time_with_mappings(least), least, "its size is not known");
        let of_a_tebibyte = |line: &str| match line.split_once(':') {
            Some(("VmRSS", _)) => "VmRSS: 1073741824 kB\n".to_owned(),
            Some(("VmSwap", _)) => "VmSwap: 2097152 kB\n".to_owned(),
            _ => format!("{line}\n"),
        };
        let own = fs::read_to_string("/proc/self/status").expect("it is there");
        fs::write(places.proc.join("16/status"), own.lines().map(of_a_tebibyte).collect::<String>()).expect("written");
        assert_eq!(guest.time_with_mappings(least), least + Duration::from_millis(20) * 1026);
    }

    #[test]
    fn a_process_that_reuses_the_id_is_another_process() {
        let (_folder, places) = fake_places();
        add_process(&places, 11, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let mut guest = VmProcess::look(&places, 11).expect("it is there").expect("a VM");
        guest.started_at -= 1;
        assert!(!guest.is_alive());
    }
}
