//! A guest of QEMU's with our image, on KVM: what an operator of another VMM has, for tests and benches to attach to.
//!
//! ```text
//!   QemuSetup ─▶ arguments ─▶ QEMU ─┬─ console ─▶ QemuSaid: what the guest says, line by line
//!                                   └─ qmp.sock, to which nobody is connected
//! ```
//!
//! Its RAM may be made to start on base pages. QEMU asks for huge pages for all of it (`MADV_HUGEPAGE`), and a process that is
//! denied them by `prctl(2)` can not be given any from outside either; so a library is put before the C library that
//! drops this one advice and nothing else.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wideleaf_policies::{Bytes, Gpa, GpaRange};
use wideleaf_protocol::{Message, Status, parse};

/// The program.
pub const QEMU: &str = "qemu-system-x86_64";

/// What drops the advice, and only that: 14 is `MADV_HUGEPAGE` (asm-generic/mman-common.h).
const NO_HUGE_PAGES: &str = r"
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>
int madvise(void *start, size_t length, int advice)
{
	return advice == 14 ? 0 : (int)syscall(SYS_madvise, start, length, advice);
}
";

/// What stands behind guest RAM, in QEMU's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuRam {
    /// `memory-backend-ram`: anonymous memory, which QEMU advises to be huge.
    Anonymous,
    /// The same, without the advice: base pages where THP is `madvise` or `never`.
    AnonymousOnBasePages,
    /// `memory-backend-memfd`, which QEMU maps where no page of it can be huge.
    Memfd,
    /// `memory-backend-ram,share=on`: shared memory, mapped where it can be huge.
    Shared,
    /// `memory-backend-memfd,hugetlb=on` with pages of 2 MiB.
    Hugetlb,
}

impl QemuRam {
    fn object(self, memory: Bytes) -> String {
        let kind = match self {
            QemuRam::Anonymous | QemuRam::AnonymousOnBasePages => "memory-backend-ram",
            QemuRam::Memfd => "memory-backend-memfd",
            QemuRam::Shared => "memory-backend-ram,share=on",
            QemuRam::Hugetlb => "memory-backend-memfd,hugetlb=on,hugetlbsize=2M,prealloc=on",
        };
        format!("{kind},id=ram0,size={}", memory.get())
    }
}

/// What a guest is made of.
#[derive(Clone, Debug)]
pub struct QemuSetup {
    /// `-name`.
    pub name: String,
    /// All its RAM.
    pub memory: Bytes,
    /// What stands behind it.
    pub ram: QemuRam,
    /// Its processors.
    pub vcpus: u8,
    /// What it does.
    pub cmdline: String,
    /// More of QEMU's options.
    pub more: Vec<String>,
}

impl QemuSetup {
    /// One processor, and nothing more.
    pub fn new(name: &str, memory: Bytes, ram: QemuRam, cmdline: &str) -> QemuSetup {
        let (name, cmdline) = (name.to_owned(), cmdline.to_owned());
        QemuSetup { name, memory, ram, vcpus: 1, cmdline, more: Vec::new() }
    }
}

/// What a guest said so far.
#[derive(Clone, Debug, Default)]
pub struct QemuSaid {
    /// Its clock, in ticks per second.
    pub tsc_hz: u64,
    /// Memory it named.
    pub regions: BTreeMap<String, GpaRange>,
    /// Phases that began, and when their line came.
    pub begun: Vec<(String, Instant)>,
    /// Its clock, and how much of the running phase was done then.
    pub marks: Vec<(u64, u64)>,
    /// What its verification found.
    pub has_passed: Option<bool>,
    /// Every line of it.
    pub lines: Vec<String>,
    /// The first that tells of a wrong word or its own failure.
    pub complaint: Option<String>,
}

impl QemuSaid {
    fn hear(&mut self, line: &str) {
        match parse(line) {
            Some(Ok(Message::Hello { tsc_hz, .. })) => self.tsc_hz = tsc_hz,
            Some(Ok(Message::Region { name, address, bytes })) => {
                let range = GpaRange::new(Gpa::new(address), Bytes::new(bytes));
                self.regions.extend(range.map(|range| (name.as_str().to_owned(), range)));
            }
            Some(Ok(Message::Begin { phase, .. })) => {
                self.begun.push((phase.as_str().to_owned(), Instant::now()));
                self.marks.clear();
            }
            Some(Ok(Message::Progress { phase, tsc, done, .. })) if self.is_in(phase.as_str()) => {
                self.marks.push((tsc, done))
            }
            Some(Ok(Message::Verify { status, .. })) => self.has_passed = Some(status == Status::Pass),
            Some(Ok(Message::Mismatch(_) | Message::Panic { .. })) if self.complaint.is_none() => {
                self.complaint = Some(line.to_owned());
            }
            _ => {}
        }
        self.lines.push(line.to_owned());
    }

    fn is_in(&self, phase: &str) -> bool {
        self.begun.last().is_some_and(|(begun, _)| begun == phase)
    }

    /// Work per second of the guest's clock from mark `first` on; `None` where there are no two marks.
    pub fn rate_from(&self, first: usize) -> Option<f64> {
        let (first, last) = (self.marks.get(first)?, self.marks.last()?);
        let seconds = (last.0 - first.0) as f64 / self.tsc_hz as f64;
        (seconds > 0.0).then(|| (last.1 - first.1) as f64 / seconds)
    }
}

/// A running QEMU. Dropping it kills it.
#[derive(Debug)]
pub struct QemuGuest {
    child: Child,
    folder: tempfile::TempDir,
    said: Arc<Mutex<QemuSaid>>,
    listener: Option<JoinHandle<()>>,
}

/// A guest that has not done by then what was asked of it hangs.
const GUEST_TIMEOUT: Duration = Duration::from_secs(300);
const MONITOR_ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// How often it is looked whether it has.
const PACE: Duration = Duration::from_millis(5);

impl QemuGuest {
    /// Starts one.
    ///
    /// # Errors
    /// Where its files can not be made, or there is no QEMU; or no C compiler, for base pages.
    pub fn start(setup: &QemuSetup) -> io::Result<QemuGuest> {
        let (vcpus, memory) = (setup.vcpus.to_string(), format!("{}k", setup.memory.get() >> 10));
        let ram = setup.ram.object(setup.memory);
        let machine = ["-M", "microvm,memory-backend=ram0", "-m", &memory, "-object", &ram];
        let who = ["-name", &setup.name, "-smp", &vcpus];
        let more = setup.more.iter().map(String::as_str);
        let arguments: Vec<&str> = machine.into_iter().chain(who).chain(more).collect();
        QemuGuest::start_as(&arguments, &setup.cmdline, setup.ram == QemuRam::AnonymousOnBasePages)
    }

    /// Starts one on any machine with any memory: `arguments` say which.
    ///
    /// # Errors
    /// As [`QemuGuest::start`].
    pub fn start_as(arguments: &[&str], cmdline: &str, is_on_base_pages: bool) -> io::Result<QemuGuest> {
        let folder = tempfile::tempdir()?;
        let image = folder.path().join("wideleaf-guest.elf");
        wideleaf_guest_image::write_to(&image)?;
        let mut qemu = Command::new(QEMU);
        // QEMU 7.2 reads `ARCH_CAPABILITIES` from KVM and then may not set it on some AMD hosts.
        qemu.args(["-accel", "kvm", "-cpu", "host,arch-capabilities=off"])
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"])
            .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-append", cmdline])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", qmp(folder.path()).display()))
            .arg("-kernel")
            .arg(image)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if is_on_base_pages {
            qemu.env("LD_PRELOAD", base_pages_library(folder.path())?);
        }
        let mut child = qemu.spawn()?;
        let console = child.stdout.take().expect("a pipe was asked for");
        let said = Arc::<Mutex<QemuSaid>>::default();
        let listener = listen(console, Arc::clone(&said))?;
        Ok(QemuGuest { child, folder, said, listener: Some(listener) })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its QMP socket, to which nobody is connected.
    pub fn qmp(&self) -> PathBuf {
        qmp(self.folder.path())
    }

    /// What it said so far.
    pub fn said(&self) -> MutexGuard<'_, QemuSaid> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until what it said fulfils `is_there`.
    ///
    /// # Panics
    /// Where it complains of its memory or ends before, or hangs.
    pub fn wait_until(&mut self, what: &str, is_there: impl Fn(&QemuSaid) -> bool) {
        let began = Instant::now();
        while !is_there(&self.said()) {
            let said = self.said().clone();
            assert_eq!(said.complaint, None, "waiting for {what}");
            let has_ended = self.child.try_wait().expect("a child can be asked for").is_some();
            // What it said last may be on its way still.
            assert!(
                !has_ended || self.heard_all() && is_there(&self.said()),
                "it ended before {what}:\n{}",
                last_of(&said.lines)
            );
            assert!(began.elapsed() < GUEST_TIMEOUT, "{what} did not come:\n{}", last_of(&said.lines));
            std::thread::sleep(PACE);
        }
    }

    fn heard_all(&mut self) -> bool {
        self.listener.take().is_none_or(|listener| listener.join().is_ok())
    }

    /// Waits until every word of a `pattern` kernel was checked at least once from now on: the second report ends a pass that
    /// began after now.
    ///
    /// # Panics
    /// Where it finds a wrong word, ends or hangs.
    pub fn check_all_words(&mut self) {
        let before = self.said().marks.len();
        self.wait_until("two passes over all words", |said| said.marks.len() >= before + 2);
    }

    /// Stops its processors, as `stop` of QEMU's monitor does. Nobody else may be connected to that.
    ///
    /// # Errors
    /// Where the monitor does not answer.
    pub fn stop_vcpus(&self) -> io::Result<()> {
        let mut monitor = UnixStream::connect(self.qmp())?;
        monitor.set_read_timeout(Some(MONITOR_ANSWERS_WITHIN))?;
        let mut lines = BufReader::new(monitor.try_clone()?).lines();
        for command in ["qmp_capabilities", "stop"] {
            writeln!(monitor, "{{\"execute\":\"{command}\"}}")?;
            // A greeting and events come between.
            while !lines.next().ok_or(io::ErrorKind::UnexpectedEof)??.contains("\"return\"") {}
        }
        Ok(())
    }

    /// Whether it is still running.
    ///
    /// # Panics
    /// Where the kernel does not know its own child.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("a child can be asked for").is_none()
    }

    /// Kills it outright.
    ///
    /// # Panics
    /// Where the kernel does not let us.
    pub fn kill(&mut self) -> ExitStatus {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("and waited for")
    }
}

/// What a failure shows of a console: its last lines. A guest prints thousands.
fn last_of(lines: &[String]) -> String {
    const SHOWN: usize = 20;
    lines[lines.len().saturating_sub(SHOWN)..].join("\n")
}

impl Drop for QemuGuest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.heard_all();
    }
}

fn qmp(folder: &Path) -> PathBuf {
    folder.join("qmp.sock")
}

/// Compiles what makes a QEMU's RAM start on base pages, for `LD_PRELOAD`, into that folder.
///
/// # Errors
/// Where there is no C compiler, or no place.
pub fn base_pages_library(folder: &Path) -> io::Result<PathBuf> {
    let (source, library) = (folder.join("no_huge_pages.c"), folder.join("no_huge_pages.so"));
    fs::write(&source, NO_HUGE_PAGES)?;
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).output()?;
    let why = || io::Error::other(format!("cc: {}", String::from_utf8_lossy(&compiled.stderr)));
    if compiled.status.success() { Ok(library) } else { Err(why()) }
}

fn listen(console: ChildStdout, said: Arc<Mutex<QemuSaid>>) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("console".into()).spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            said.lock().unwrap_or_else(PoisonError::into_inner).hear(line.trim_end());
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_says_is_kept_by_kind() {
        let mut said = QemuSaid::default();
        for line in [
            "@wideleaf hello version=1 kernel=gups vcpus=1 guest_page=2m tsc_hz=1000 entry=pvh",
            "@wideleaf region name=table address=0x400000 bytes=4096",
            "@wideleaf begin phase=update tsc=0",
            "@wideleaf progress phase=update tsc=1000 done=10 total=100",
            "@wideleaf progress phase=pages tsc=2000 done=7 total=9",
            "@wideleaf progress phase=update tsc=3000 done=50 total=100",
            "@wideleaf verify status=pass errors=0 checked=5",
        ] {
            said.hear(line);
        }
        assert_eq!((said.rate_from(0), said.rate_from(1), said.has_passed), (Some(20.0), None, Some(true)));
        assert_eq!(said.regions["table"].start(), Gpa::new(0x40_0000));
        assert_eq!((said.begun.len(), said.lines.len(), said.complaint), (1, 7, None));
    }
}
