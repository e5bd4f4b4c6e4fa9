//! `/init` of a Linux guest: does one job, reports how it ended, and switches the machine off.
//!
//! ```text
//!   process 1  mounts /proc, /sys, /dev; quiets Linux      a child, which may crash or be killed
//!      │  the image has a program? ── yes ──▶ program.rs ─▶ the program ── its output, relayed line by line ─▶ console
//!      │                           ── no ───▶ itself again ▶ kernel.rs, with its memory from memory.rs ─────▶ console
//!      │◀─ exit code, or how it died ─────────────────────────────────┘
//!      ▼
//!   `exit` line (unless the kernel has printed it), everything written out, power off
//! ```
//!
//! Process 1 must not end and cannot be killed. Linux panics when it ends, and also if all other memory is used up
//! and no other process is left to kill. So everything that may fail runs in a child.

mod failure;
mod kernel;
mod memory;
mod parameters;
mod program;

use std::io::{self, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;
use std::{fs, process};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::termios::tcdrain;
use nix::unistd::sync;
use parameters::Parameters;
use wideleaf_protocol::linux::PROGRAM_FILE;
use wideleaf_protocol::{ExitCode, Message};

use crate::failure::Failure;

/// Argument that process 1 gives to its child, which is this program again, to run the kernel.
const KERNEL_ROLE: &str = "kernel";

/// The required file systems, and their mount points.
const MOUNTS: [(&str, &str); 3] = [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")];

/// The command line that Linux was started with.
const CMDLINE_FILE: &str = "/proc/cmdline";

/// Time over which the time stamp counter's frequency is measured: accurate to one part in 50 000.
const TSC_MEASURED_OVER: Duration = Duration::from_millis(50);

fn main() {
    let is_child = std::env::args().nth(1).as_deref() == Some(KERNEL_ROLE);
    if is_child {
        end_panics_with(|code| process::exit(code.port_value().into()));
        let code = kernel::run().unwrap_or_else(|failure| failure.report());
        process::exit(code.port_value().into());
    }
    if process::id() != 1 {
        eprintln!("this is the first process of a Linux guest; `wideleaf-lab image linux` makes an initramfs with it");
        process::exit(ExitCode::Unsupported.port_value().into());
    }
    end_panics_with(|_| power_off());
    if let Err(failure) = set_up().and_then(|()| do_the_job()) {
        failure.report();
    }
    power_off();
}

/// Prints the reason of a panic as protocol lines, then ends the process with `end`.
fn end_panics_with(end: impl Fn(ExitCode) + Send + Sync + 'static) {
    std::panic::set_hook(Box::new(move |info| {
        let failure = Failure { code: ExitCode::Panic, message: info.to_string() };
        end(failure.report());
    }));
}

fn set_up() -> Result<(), Failure> {
    for (kind, target) in MOUNTS {
        match mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>) {
            Ok(()) | Err(Errno::EBUSY) => {}
            Err(error) => return Err(Failure::unsupported(format_args!("cannot mount {kind} on {target}: {error}"))),
        }
    }
    // Emergencies only: the log of Linux would split our lines. proc_sys_kernel(5), printk.
    let _ = fs::write("/proc/sys/kernel/printk", "1");
    Ok(())
}

/// Runs the kernel or program to its end, including its `exit` line.
fn do_the_job() -> Result<(), Failure> {
    let cmdline = cmdline()?;
    let parameters = Parameters::parse(&cmdline)?;
    let is_program = parameters.kernel.is_none() && Path::new(PROGRAM_FILE).exists();
    if is_program {
        parameters.check_for_program()?;
        let code = program::run()?;
        emit(&Message::Exit { code });
        return Ok(());
    }
    let status = Command::new("/proc/self/exe").arg(KERNEL_ROLE).status();
    let status = status.map_err(|error| Failure::unsupported(format_args!("cannot start the kernel: {error}")))?;
    check_end(status)
}

/// Checks how the kernel ended. A kernel that ended by itself has printed its `exit` line.
fn check_end(status: ExitStatus) -> Result<(), Failure> {
    match status.code().and_then(|code| ExitCode::from_port_value(u8::try_from(code).ok()?)) {
        Some(_) => Ok(()),
        None => Err(Failure { code: ExitCode::Panic, message: format!("the kernel {}", how_it_died(status)) }),
    }
}

/// The Linux command line.
fn cmdline() -> Result<String, Failure> {
    let text = fs::read_to_string(CMDLINE_FILE);
    text.map_err(|error| Failure::unsupported(format_args!("cannot read {CMDLINE_FILE}: {error}")))
}

fn how_it_died(status: ExitStatus) -> String {
    const SIGKILL: i32 = 9;
    match status.signal() {
        Some(SIGKILL) => "was killed, as Linux does when memory runs out; give the guest more RAM".to_owned(),
        Some(signal) => format!("was ended by signal {signal}"),
        None => format!("ended with {status}"),
    }
}

/// Prints one line on the console.
fn emit(message: &Message<'_>) {
    // If the console cannot be written to, the line is lost.
    let _ = writeln!(io::stdout().lock(), "{message}");
}

/// Switches the machine off after the console has printed everything and the disks have all writes.
fn power_off() {
    let mut stdout = io::stdout();
    let _ = stdout.flush();
    let _ = tcdrain(&stdout);
    // reboot(2) loses what is not written out. A disk that never answers keeps the machine on: the host sees that.
    sync();
    // A machine without a power switch restarts; one that cannot restart halts.
    for mode in [RebootMode::RB_POWER_OFF, RebootMode::RB_AUTOBOOT, RebootMode::RB_HALT_SYSTEM] {
        let _ = reboot(mode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How a process with this script ended.
    fn end_of(script: &str) -> Result<(), Failure> {
        check_end(Command::new("sh").args(["-c", script]).status().expect("there is a shell"))
    }

    #[test]
    fn a_kernel_that_ended_by_itself_has_reported_how() {
        for code in ExitCode::ALL {
            assert_eq!(end_of(&format!("exit {}", code.port_value())), Ok(()));
        }
    }

    #[test]
    fn a_kernel_that_is_killed_or_crashes_is_a_panic_with_its_reason() {
        let panic = |message: &str| Err(Failure { code: ExitCode::Panic, message: message.to_owned() });
        let killed = "the kernel was killed, as Linux does when memory runs out; give the guest more RAM";
        assert_eq!(end_of("kill -KILL $$"), panic(killed));
        assert_eq!(end_of("kill -SEGV $$"), panic("the kernel was ended by signal 11"));
        assert_eq!(end_of("exit 77"), panic("the kernel ended with exit status: 77"));
    }
}
