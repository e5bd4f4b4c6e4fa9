//! A guest of QEMU with our image, on KVM: the guest of another VMM, for tests and benches to attach to.
//!
//! ```text
//!   QemuSetup ─▶ arguments ─▶ QEMU ─┬─ console ─▶ QemuOutput: the guest's output, line by line
//!                                   └─ qmp.sock, without a client
//! ```
//!
//! Its RAM may be made to start on base pages. QEMU asks for huge pages for all of it (`MADV_HUGEPAGE`), and a
//! process that is denied them by `prctl(2)` cannot be given any from outside either. So a preloaded library drops
//! this one advice and nothing else.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{Bytes, Gpa, GpaRange};
use wideleaf_protocol::{Message, Status, parse};

/// Name of the program.
pub const QEMU: &str = "qemu-system-x86_64";

/// A library that drops only this advice: 14 is `MADV_HUGEPAGE` (asm-generic/mman-common.h).
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

/// Backing of guest RAM, in QEMU's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuRam {
    /// `memory-backend-ram`: anonymous memory, which QEMU advises to be huge.
    Anonymous,
    /// `memory-backend-ram` without the advice: base pages if THP is `madvise` or `never`.
    AnonymousOnBasePages,
    /// `memory-backend-memfd`, which QEMU maps at an address at which no page of it can be huge.
    Memfd,
    /// `memory-backend-ram,share=on`: shared memory, mapped at an address that permits huge pages.
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

/// Configuration of a guest.
#[derive(Clone, Debug)]
pub struct QemuSetup {
    /// Value of `-name`.
    pub name: String,
    /// Size of its RAM.
    pub memory: Bytes,
    /// Backing of its RAM.
    pub ram: QemuRam,
    /// Number of its processors.
    pub vcpus: u8,
    /// Command line of its kernel.
    pub cmdline: String,
    /// Additional options of QEMU.
    pub more: Vec<String>,
}

impl QemuSetup {
    /// A guest with one processor and no additional options.
    pub fn new(name: &str, memory: Bytes, ram: QemuRam, cmdline: &str) -> QemuSetup {
        let (name, cmdline) = (name.to_owned(), cmdline.to_owned());
        QemuSetup { name, memory, ram, vcpus: 1, cmdline, more: Vec::new() }
    }
}

/// Output of a guest so far.
#[derive(Clone, Debug, Default)]
pub struct QemuOutput {
    /// Frequency of its clock, in ticks per second.
    pub tsc_hz: u64,
    /// Memory regions that it named.
    pub regions: BTreeMap<String, GpaRange>,
    /// Phases that began, with the time of their line.
    pub begun: Vec<(String, Instant)>,
    /// Ticks of its clock, with the work done in the running phase.
    pub marks: Vec<(u64, u64)>,
    /// Result of its verification.
    pub has_passed: Option<bool>,
    /// All lines of its output.
    pub lines: Vec<String>,
    /// The first line about a wrong word or a failure.
    pub complaint: Option<String>,
}

impl QemuOutput {
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

    /// Work per second of the guest's clock from mark `first` on; `None` with fewer than two marks.
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
    said: Arc<Mutex<QemuOutput>>,
    listener: Option<JoinHandle<()>>,
}

/// Time limit of a guest's task; a guest that exceeds it hangs.
const GUEST_TIMEOUT: Duration = Duration::from_secs(300);
const MONITOR_ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// Interval between two checks of its output.
const PACE: Duration = Duration::from_millis(5);

impl QemuGuest {
    /// Starts a guest.
    ///
    /// # Errors
    /// If its files cannot be made, QEMU is missing, or, for base pages, a C compiler is missing.
    pub fn start(setup: &QemuSetup) -> io::Result<QemuGuest> {
        let (vcpus, memory) = (setup.vcpus.to_string(), format!("{}k", setup.memory.get() >> 10));
        let ram = setup.ram.object(setup.memory);
        let machine = ["-M", "microvm,memory-backend=ram0", "-m", &memory, "-object", &ram];
        let name = ["-name", &setup.name, "-smp", &vcpus];
        let more = setup.more.iter().map(String::as_str);
        let arguments: Vec<&str> = machine.into_iter().chain(name).chain(more).collect();
        QemuGuest::start_as(&arguments, &setup.cmdline, setup.ram == QemuRam::AnonymousOnBasePages)
    }

    /// Starts a guest on any machine with any memory, as given in `arguments`.
    ///
    /// # Errors
    /// The same errors as [`QemuGuest::start`].
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
        let said = Arc::<Mutex<QemuOutput>>::default();
        let listener = listen(console, Arc::clone(&said))?;
        Ok(QemuGuest { child, folder, said, listener: Some(listener) })
    }

    /// Id of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Path of its QMP socket, which has no client.
    pub fn qmp(&self) -> PathBuf {
        qmp(self.folder.path())
    }

    /// Its output so far.
    pub fn said(&self) -> MutexGuard<'_, QemuOutput> {
        self.said.lock()
    }

    /// Waits until its output fulfils `is_there`.
    ///
    /// # Panics
    /// Panics if it reports an error, ends before, or hangs.
    pub fn wait_until(&mut self, what: &str, is_there: impl Fn(&QemuOutput) -> bool) {
        let began = Instant::now();
        while !is_there(&self.said()) {
            let said = self.said().clone();
            assert_eq!(said.complaint, None, "waiting for {what}");
            let has_ended = self.child.try_wait().expect("a child can be asked for").is_some();
            // Its last lines may still be on their way.
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

    /// Waits until every word of a `pattern` kernel has been checked at least once from now on: the second report
    /// ends a pass that began after now.
    ///
    /// # Panics
    /// Panics if it finds a wrong word, ends or hangs.
    pub fn check_all_words(&mut self) {
        let before = self.said().marks.len();
        self.wait_until("two passes over all words", |said| said.marks.len() >= before + 2);
    }

    /// Stops its processors, like `stop` of QEMU's monitor. The monitor must have no other client.
    ///
    /// # Errors
    /// If the monitor does not answer.
    pub fn stop_vcpus(&self) -> io::Result<()> {
        let mut monitor = UnixStream::connect(self.qmp())?;
        monitor.set_read_timeout(Some(MONITOR_ANSWERS_WITHIN))?;
        let mut lines = BufReader::new(monitor.try_clone()?).lines();
        for command in ["qmp_capabilities", "stop"] {
            writeln!(monitor, "{{\"execute\":\"{command}\"}}")?;
            // A greeting and events may come before the answer.
            while !lines.next().ok_or(io::ErrorKind::UnexpectedEof)??.contains("\"return\"") {}
        }
        Ok(())
    }

    /// Whether it is still running.
    ///
    /// # Panics
    /// Panics if the kernel does not know its own child.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("a child can be asked for").is_none()
    }

    /// Kills it outright.
    ///
    /// # Panics
    /// Panics if the kernel refuses.
    pub fn kill(&mut self) -> ExitStatus {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("and waited for")
    }
}

/// Tail of a console for a failure message. A guest prints thousands of lines.
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

/// Compiles the `LD_PRELOAD` library that makes a QEMU's RAM start on base pages, into that folder.
///
/// # Errors
/// If the C compiler is missing, or the folder cannot be written.
pub fn base_pages_library(folder: &Path) -> io::Result<PathBuf> {
    let (source, library) = (folder.join("no_huge_pages.c"), folder.join("no_huge_pages.so"));
    fs::write(&source, NO_HUGE_PAGES)?;
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).output()?;
    let why = || io::Error::other(format!("cc: {}", String::from_utf8_lossy(&compiled.stderr)));
    if compiled.status.success() { Ok(library) } else { Err(why()) }
}

fn listen(console: ChildStdout, said: Arc<Mutex<QemuOutput>>) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("console".into()).spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            said.lock().hear(line.trim_end());
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_s_output_is_kept_by_kind() {
        let mut said = QemuOutput::default();
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
