//! A kernel of ours as a process of its own: its memory, its threads, its lines.

use std::fs;
use std::thread::available_parallelism;

use wideleaf_kernels::registry::{self, MemoryNeed, Started};
use wideleaf_kernels::{Arena, KernelError, native};
use wideleaf_memory::GuestRam;
use wideleaf_policies::Bytes;
use wideleaf_protocol::linux::{KERNEL_FILE, KEY_THREADS};
use wideleaf_protocol::{CommandLine, Entry, ExitCode, Message, Name, VCPUS_MAX};

use crate::failure::Failure;
use crate::memory::{self, Backed};
use crate::parameters::{Page, Parameters};
use crate::{TSC_MEASURED_OVER, cmdline, emit};

/// Runs the kernel to its `exit` line.
pub fn run() -> Result<ExitCode, Failure> {
    let cmdline = cmdline()?;
    let parameters = Parameters::parse(&cmdline)?;
    let line = match parameters.kernel {
        Some(line) => line.to_owned(),
        None => made_for()?,
    };
    let threads = threads(parameters.threads)?;
    let need = need(&line, threads).map_err(|error| Failure { code: error.exit_code(), message: error.to_string() })?;
    if parameters.page == Page::Thp {
        memory::permit_huge_pages(&cmdline);
    }
    let ram = memory::map(parameters.page, parameters.memory, need)?;
    let mut words = ram.exclusive_words(ram.ranges()[0]).expect("nobody else asks for the words of this RAM");
    let arena = Arena::from_words(words.as_mut_slice());
    let started = Started { entry: Entry::Linux, guest_page: parameters.page.asked_for() };
    let tsc_hz = native::measure_tsc_hz(TSC_MEASURED_OVER);
    let sink = Box::new(|message: &Message<'_>| {
        if matches!(message, Message::Exit { .. }) {
            emit_backed(&ram);
        }
        emit(message);
    });
    Ok(native::run(threads, tsc_hz, sink, |platform| registry::run(platform, &arena, &line, started)))
}

/// The memory that the kernel on this line needs.
fn need(line: &str, threads: usize) -> Result<MemoryNeed, KernelError<'_>> {
    let command_line = CommandLine::new(line).map_err(KernelError::CommandLine)?;
    registry::find(command_line)?.memory_for(line, threads)
}

/// What the image was made for.
fn made_for() -> Result<String, Failure> {
    let line = fs::read_to_string(KERNEL_FILE).map_err(|error| Failure {
        code: ExitCode::BadArguments,
        message: format!("no wideleaf.kernel= on the Linux command line, and {KERNEL_FILE}: {error}"),
    })?;
    Ok(line.trim_end().to_owned())
}

/// Threads that wait spin, so there are never more of them than processors.
fn threads(wanted: Option<usize>) -> Result<usize, Failure> {
    let processors = available_parallelism().map_or(1, usize::from);
    let threads = wanted.unwrap_or(processors.min(VCPUS_MAX));
    if threads > processors {
        let message = format!("{KEY_THREADS}={threads} is more than the machine has processors ({processors})");
        return Err(Failure::unsupported(message));
    }
    Ok(threads)
}

/// Says what the memory was in the end: what was asked for is only a wish where transparent huge pages are concerned.
fn emit_backed(ram: &GuestRam) {
    let Some(Backed { resident, large }) = memory::backed(ram) else { return };
    let bytes = |name, bytes: Bytes| Message::Result { name, value: bytes.get() as f64, unit: Name::literal("B") };
    emit(&bytes(Name::literal("memory_resident"), resident));
    emit(&bytes(Name::literal("memory_in_large_pages"), large));
}
