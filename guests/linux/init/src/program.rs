//! Any static program instead of a kernel: its output between two of our lines, and how it ended. No line of it can be
//! taken for one of ours, and no process of it outlives it.

use std::io::{self, BufRead, BufReader, Read as _, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::{self, available_parallelism};
use std::{ffi::OsStr, fs, process};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use wideleaf_kernels::native;
use wideleaf_kernels::team::ticks;
use wideleaf_protocol::linux::{ARGUMENTS_FILE, EXIT_STATUS, PROGRAM_FILE, PROGRAM_PHASE, STATUS};
use wideleaf_protocol::message::PREFIX;
use wideleaf_protocol::{Entry, ExitCode, Message, PROTOCOL_VERSION};

use crate::failure::Failure;
use crate::{TSC_MEASURED_OVER, emit, memory};

/// Longest piece in which a line is relayed, in bytes. A longer line is relayed in several pieces.
const PIECE_BYTES_MAX: u64 = 64 << 10;

/// Offset that a shell adds to the number of a signal to form an exit status.
const SIGNAL_STATUS: i32 = 128;

/// Runs the program to its end, and ends the processes that it left running.
pub fn run() -> Result<ExitCode, Failure> {
    emit(&Message::Hello {
        version: PROTOCOL_VERSION,
        kernel: PROGRAM_PHASE,
        vcpus: available_parallelism().map_or(1, usize::from) as u32,
        // The program's own memory is not known in advance.
        guest_page: memory::default_page(),
        tsc_hz: native::measure_tsc_hz(TSC_MEASURED_OVER),
        entry: Entry::Linux,
    });
    emit(&Message::Begin { phase: PROGRAM_PHASE, tsc: ticks() });
    let status = run_and_relay().map_err(|error| Failure::unsupported(format_args!("{PROGRAM_FILE}: {error}")))?;
    emit(&Message::End { phase: PROGRAM_PHASE, tsc: ticks() });
    emit(&Message::Result { name: EXIT_STATUS, value: number_of(status).into(), unit: STATUS });
    Ok(if status.success() { ExitCode::Success } else { ExitCode::ProgramFailed })
}

fn run_and_relay() -> io::Result<ExitStatus> {
    let arguments = fs::read(ARGUMENTS_FILE)?;
    let (output, input) = io::pipe()?;
    let mut program = Command::new(PROGRAM_FILE)
        .args(arguments_of(&arguments))
        .current_dir("/tmp")
        .env_clear()
        .envs([("PATH", "/bin"), ("HOME", "/tmp"), ("TERM", "dumb")])
        .stdin(Stdio::null())
        .stdout(input.try_clone()?)
        .stderr(input)
        .spawn()?;
    let relaying = thread::spawn(|| relay(BufReader::new(output), io::stdout()));
    let status = program.wait()?;
    end_everything_else();
    let relayed = relaying.join();
    relayed.expect("the relay does not panic")?;
    Ok(status)
}

/// Splits the arguments, each of which ends with a zero byte.
fn arguments_of(file: &[u8]) -> impl Iterator<Item = &OsStr> {
    file.split_inclusive(|byte| *byte == 0)
        .map(|argument| OsStr::from_bytes(argument.strip_suffix(b"\0").unwrap_or(argument)))
}

/// Kills all other processes, since one that the program left running would keep its pipe open for ever. kill(2):
/// -1 means all but process 1 and the caller.
fn end_everything_else() {
    assert_eq!(process::id(), 1, "outside a guest these are foreign processes");
    let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
}

fn number_of(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| SIGNAL_STATUS + status.signal().unwrap_or_default())
}

/// Copies output until its end. No line of it can be mistaken for ours, and our next line begins a line.
fn relay(mut from: impl BufRead, mut to: impl Write) -> io::Result<()> {
    let (mut piece, mut is_at_line_start) = (Vec::new(), true);
    while from.by_ref().take(PIECE_BYTES_MAX).read_until(b'\n', &mut piece)? > 0 {
        if is_at_line_start && piece.starts_with(PREFIX.as_bytes()) {
            to.write_all(b" ")?;
        }
        to.write_all(&piece)?;
        is_at_line_start = piece.ends_with(b"\n");
        piece.clear();
    }
    if !is_at_line_start {
        to.write_all(b"\n")?;
    }
    to.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relayed(output: &[u8]) -> Vec<u8> {
        let mut console = Vec::new();
        relay(output, &mut console).expect("memory can be written to");
        console
    }

    #[test]
    fn output_is_relayed_as_it_is_and_ends_with_a_line() {
        assert_eq!(relayed(b"one\n\xff two\n"), b"one\n\xff two\n");
        assert_eq!(relayed(b"one\ntwo"), b"one\ntwo\n");
        assert_eq!(relayed(b""), b"");
    }

    #[test]
    fn no_line_of_a_program_is_taken_for_ours() {
        assert_eq!(relayed(b"@wideleaf exit code=0\n a @wideleaf\n"), b" @wideleaf exit code=0\n a @wideleaf\n");
    }

    #[test]
    fn a_line_longer_than_a_piece_stays_one_line() {
        let line = b"@wideleaf ".repeat(PIECE_BYTES_MAX as usize / 5);
        assert_eq!(relayed(&line), [b" ", &line[..], b"\n"].concat());
    }

    #[test]
    fn arguments_keep_their_spaces_and_may_be_empty() {
        assert_eq!(arguments_of(b"a b\0\0-v\0").collect::<Vec<_>>(), ["a b", "", "-v"]);
        assert_eq!(arguments_of(b"").count(), 0);
    }
}
