//! A process that stands in for a VMM which cannot be installed here: it has the name and the arguments of that VMM, a
//! VM of KVM, RAM as that VMM maps it, and a handler of `userfaultfd(2)` as for a guest that is restored on demand. A
//! thread of it plays the guest and checks every word of the pages that it visits.
//!
//! ```text
//!   the test ─ "visit 0 512" ─▶ firecracker --id web      (this program, compiled from C under that name)
//!            ◀─ "ok 512" ────   ├─ guest    reads and writes pages 0 to 512, again and again
//!                               └─ handler  has provided 512 of them
//! ```

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use wideleaf_policies::{Bytes, Hva};

/// Source of the program.
const SOURCE: &str = include_str!("stand_in_vmm.c");

/// Kind of the RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandInRam {
    /// Private memory without a file.
    Anonymous,
    /// Shared memory of a memfd with this name.
    Memfd(&'static str),
}

/// Faults that a userfaultfd reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandInFaults {
    /// None: all of the RAM is there from the start.
    None,
    /// Touches of missing pages.
    Missing,
    /// Touches of missing pages, and writes to protected ones.
    MissingAndWrites,
    /// Touches of pages that the memfd has and the page tables do not.
    Minor,
    /// Touches of missing pages. The process closes its userfaultfd, and only a child of it has that open.
    MissingOfAChild,
}

impl StandInFaults {
    const fn name(self) -> &'static str {
        match self {
            StandInFaults::None => "none",
            StandInFaults::Missing => "missing",
            StandInFaults::MissingAndWrites => "wp",
            StandInFaults::Minor => "minor",
            StandInFaults::MissingOfAChild => "child",
        }
    }
}

/// A running stand-in. Dropping it ends it.
#[derive(Debug)]
pub struct StandIn {
    child: Child,
    answers: BufReader<ChildStdout>,
    ram: Hva,
    _folder: tempfile::TempDir,
}

impl StandIn {
    /// Starts one under the name `program` with these arguments. The caller has looked for KVM.
    ///
    /// # Errors
    /// If it cannot be compiled or started, or the kernel refuses what it asks for.
    pub fn start(
        program: &str,
        arguments: &[&str],
        ram: StandInRam,
        bytes: Bytes,
        faults: StandInFaults,
    ) -> io::Result<StandIn> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join(program);
        compile(folder.path(), &path)?;
        let ram = match ram {
            StandInRam::Anonymous => "anonymous",
            StandInRam::Memfd(name) => name,
        };
        let setup = format!("{ram},{},{}", bytes.get() >> 20, faults.name());
        let mut command = Command::new(path);
        command.args(arguments).env("WIDELEAF_STAND_IN", setup).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let answers = BufReader::new(child.stdout.take().expect("a pipe was asked for"));
        let mut started = StandIn { child, answers, ram: Hva::new(0), _folder: folder };
        let ready = started.hear()?;
        let address = ready.strip_prefix("ready 0x").and_then(|text| u64::from_str_radix(text, 16).ok());
        started.ram = address.map(Hva::new).ok_or_else(|| io::Error::other(ready))?;
        Ok(started)
    }

    /// Id of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Address of its RAM.
    pub fn ram(&self) -> Hva {
        self.ram
    }

    /// Gives a command, and returns the number of faults answered so far. The source lists the commands.
    ///
    /// # Panics
    /// Panics if its guest has found a wrong word, or if it has ended.
    pub fn tell(&mut self, command: &str) -> u64 {
        let stdin = self.child.stdin.as_mut().expect("a pipe was asked for");
        writeln!(stdin, "{command}").expect("it reads commands");
        let answer = self.hear().expect("it answers");
        let faults = answer.strip_prefix("ok ").and_then(|faults| faults.parse().ok());
        faults.unwrap_or_else(|| panic!("{command}: {answer}"))
    }

    fn hear(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.answers.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim().to_owned()),
        }
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn compile(folder: &Path, program: &Path) -> io::Result<()> {
    let source = folder.join("stand_in_vmm.c");
    fs::write(&source, SOURCE)?;
    let options = ["-static", "-O1", "-Wall", "-Werror", "-o"];
    let compiled = Command::new("cc").args(options).arg(program).arg(&source).output()?;
    let why = || io::Error::other(format!("cc: {}", String::from_utf8_lossy(&compiled.stderr)));
    if compiled.status.success() { Ok(()) } else { Err(why()) }
}
