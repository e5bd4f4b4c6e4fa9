//! One of our kernels as a process of its own: its memory, its threads, its lines. It may crash or be killed without
//! harm: process 1 reports the end.

use std::fs;
use std::thread::available_parallelism;

use wideleaf_kernels::registry::{self, Started};
use wideleaf_kernels::{Arena, Kernel, KernelError, native};
use wideleaf_memory::GuestRam;
use wideleaf_policies::Bytes;
use wideleaf_protocol::linux::{KERNEL_FILE, KEY_THREADS};
use wideleaf_protocol::{CommandLine, Entry, ExitCode, Message, Name};

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
    let kernel = kernel_on(&line).map_err(refusal)?;
    let processors = available_parallelism().map_or(1, usize::from);
    let threads = threads(parameters.threads, kernel, processors)?;
    let need = kernel.memory_for(&line, threads).map_err(refusal)?;
    let page = parameters.page.unwrap_or_default();
    if page == Page::Thp {
        memory::permit_huge_pages(&cmdline);
    }
    let ram = memory::map(page, parameters.memory, need)?;
    let mut words = ram.exclusive_words(ram.ranges()[0]).expect("no other user asks for the words of this RAM");
    let arena = Arena::from_words(words.as_mut_slice());
    let started = Started { entry: Entry::Linux, guest_page: page.asked_for() };
    let tsc_hz = native::measure_tsc_hz(TSC_MEASURED_OVER);
    let sink = Box::new(|message: &Message<'_>| {
        if matches!(message, Message::Exit { .. }) {
            emit_backed(&ram);
        }
        emit(message);
    });
    Ok(native::run(threads, tsc_hz, sink, |platform| registry::run(platform, &arena, &line, started)))
}

/// The kernel that this line names.
fn kernel_on(line: &str) -> Result<&'static Kernel, KernelError<'_>> {
    registry::find(CommandLine::new(line).map_err(KernelError::CommandLine)?)
}

fn refusal(error: KernelError<'_>) -> Failure {
    Failure { code: error.exit_code(), message: error.to_string() }
}

/// The kernel line that the image was made for.
fn made_for() -> Result<String, Failure> {
    let line = fs::read_to_string(KERNEL_FILE).map_err(|error| {
        let why = format_args!("no wideleaf.kernel= on the Linux command line, and {KERNEL_FILE}: {error}");
        Failure::bad_arguments(why)
    })?;
    Ok(line.trim_end().to_owned())
}

/// Number of threads. The default is as many as the kernel can use. Waiting threads spin, so there are never more
/// threads than processors.
fn threads(wanted: Option<usize>, kernel: &Kernel, processors: usize) -> Result<usize, Failure> {
    let Kernel { name, vcpus_max, .. } = *kernel;
    let threads = wanted.unwrap_or(processors.min(vcpus_max));
    if threads > vcpus_max {
        let message = format!("{KEY_THREADS}={threads}: {name} can use at most {vcpus_max}");
        return Err(Failure::bad_arguments(message));
    }
    if threads > processors {
        let message = format!("{KEY_THREADS}={threads} exceeds the machine's processors ({processors})");
        return Err(Failure::unsupported(message));
    }
    Ok(threads)
}

/// Reports what finally backed the memory: transparent huge pages are only a request to Linux.
fn emit_backed(ram: &GuestRam) {
    let Some(Backed { resident, large }) = memory::backed(ram) else { return };
    let bytes = |name, bytes: Bytes| Message::Result { name, value: bytes.get() as f64, unit: Name::literal("B") };
    emit(&bytes(Name::literal("memory_resident"), resident));
    emit(&bytes(Name::literal("memory_in_large_pages"), large));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads_of(line: &str, wanted: Option<usize>, processors: usize) -> Result<usize, (ExitCode, String)> {
        let kernel = kernel_on(line).expect("a kernel of ours");
        threads(wanted, kernel, processors).map_err(|Failure { code, message }| (code, message))
    }

    #[test]
    fn a_kernel_runs_on_as_many_processors_as_it_can_use() {
        assert_eq!(threads_of("gups", None, 2), Ok(2));
        assert_eq!(threads_of("gups", None, 64), Ok(16));
        assert_eq!(threads_of("latency", None, 2), Ok(1));
        assert_eq!(threads_of("gups", Some(2), 4), Ok(2));
    }

    #[test]
    fn more_threads_than_a_kernel_or_a_machine_can_use_are_refused_with_the_word() {
        let of_kernel = "wideleaf.threads=2: latency can use at most 1".to_owned();
        assert_eq!(threads_of("latency", Some(2), 4), Err((ExitCode::BadArguments, of_kernel)));
        let of_machine = "wideleaf.threads=2 exceeds the machine's processors (1)".to_owned();
        assert_eq!(threads_of("gups", Some(2), 1), Err((ExitCode::Unsupported, of_machine)));
    }
}
