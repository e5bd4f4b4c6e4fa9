//! The kernel's process: started from memory, without a file on a disk, and ended together with its owner, however that
//! ends.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, Stdio};

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use wideleaf_protocol::ExitCode;
use wideleaf_protocol::recording::{ENDED_NO_MEMORY, ENDED_WITHOUT_STEPS};

use crate::RecordError;

/// Bytes of the pipe; users other than root may have one mebibyte (pipe(7)). The kernel runs on while a block is
/// being compressed.
const PIPE_BYTES: i32 = 1 << 20;

/// The process. It ends when this is dropped. It also ends when this process ends in any way, because its standard
/// input is then closed.
pub struct Process(Child);

impl Process {
    /// Starts the program with these steps, this number of threads and this kernel line.
    pub fn start(program: &[u8], steps: Option<u32>, threads: usize, line: &str) -> Result<Self, RecordError> {
        let file = in_memory(program).map_err(RecordError::Start)?;
        let mut command = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
        command.arg0("wideleaf-recorded");
        command.arg(steps.map_or("all".to_owned(), |steps| steps.to_string())).arg(threads.to_string()).arg(line);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // In a terminal Ctrl-C goes to the foreground process group: this child is to end after us.
        let child = command.process_group(0).spawn().map_err(RecordError::Start)?;
        if let Some(stdout) = &child.stdout {
            // Only for speed: it works with a smaller pipe as well.
            let _ = fcntl(stdout, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
        }
        Ok(Self(child))
    }

    /// Returns the stream of its frames. To be called once.
    ///
    /// # Panics
    /// Panics if it is called twice.
    pub fn output(&mut self) -> ChildStdout {
        self.0.stdout.take().expect("the output is taken once, and it is a pipe")
    }

    /// Waits for its end, which is near. `last_words` is its message about a failure.
    pub fn end(mut self, last_words: &str) -> Result<(), RecordError> {
        let status = self.0.wait().map_err(RecordError::Read)?;
        let Some(code) = status.code() else { return Err(RecordError::Killed(status.signal().unwrap_or(0))) };
        match u8::try_from(code) {
            Ok(0) => Ok(()),
            Ok(ENDED_NO_MEMORY) => Err(RecordError::NoMemory),
            Ok(ENDED_WITHOUT_STEPS) => Err(RecordError::NoIterations),
            Ok(code) if code == ExitCode::VerificationFailed as u8 => Err(RecordError::Wrong),
            Ok(code) if code == ExitCode::BadArguments as u8 => Err(RecordError::Parameters(last_words.to_owned())),
            // It has enough memory and all its vCPUs, so only the counter's frequency is missing.
            Ok(code) if code == ExitCode::Unsupported as u8 => Err(RecordError::ByTime),
            _ => Err(RecordError::KernelFailed { status: code, message: last_words.to_owned() }),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Creates a file without a name, which disappears when no process runs it.
fn in_memory(program: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"wideleaf-recorded", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(program)?;
    Ok(file)
}
