//! A kernel as a process that sends every load and store of its arena to its parent, in program order.
//!
//! ```text
//!   arguments: STEPS|all  THREADS  KERNEL LINE    standard output: frames of `wideleaf_protocol::recording`
//!   standard input: open as long as the parent wants the recording; the process ends with it
//! ```
//!
//! It is useful only as `wideleaf-recorder` builds it, with the compiler's calls; otherwise it runs a kernel and
//! records nothing.

mod callbacks;
mod recorded;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::process::{ExitCode, exit};
use std::thread;

use wideleaf_kernels::registry::{self, MemoryNeed, Started};
use wideleaf_kernels::{Arena, KernelError, vectors};
use wideleaf_protocol::recording::{ENDED_LOST, ENDED_MISUSED, ENDED_NO_MEMORY, ENDED_WITHOUT_STEPS};
use wideleaf_protocol::{CommandLine, Entry, ExitCode as KernelExit, GuestPage};

use recorded::{Recorded, Steps};

/// Alignment of the arena's start: that of a kernel's large slices, so that they have the same offsets in every
/// arena.
const BORDER: usize = 2 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [steps, threads, line] = arguments.as_slice() else { return ExitCode::from(ENDED_MISUSED) };
    let steps = if steps == "all" { None } else { steps.parse().ok() };
    let Ok(threads) = threads.parse() else { return ExitCode::from(ENDED_MISUSED) };
    let Ok(bytes) = arena_bytes(line, threads) else { return ExitCode::from(ENDED_MISUSED) };
    let Ok(out) = io::stdout().as_fd().try_clone_to_owned() else { return ExitCode::from(ENDED_MISUSED) };
    end_with_standard_input();
    vectors::stay_narrow();

    let (words, spare) = (bytes.div_ceil(8), BORDER / 8);
    if Vec::<u64>::new().try_reserve_exact(words + spare).is_err() {
        return ExitCode::from(ENDED_NO_MEMORY);
    }
    // Fresh zero pages from the kernel: untouched pages take no memory.
    let mut memory = vec![0; words + spare];
    let before = memory.as_ptr().align_offset(BORDER);
    let arena = Arena::from_words(&mut memory[before..][..words]);
    callbacks::begin(arena.address(), arena.bytes(), File::from(out));

    let platform = Recorded::new(steps, threads);
    let started = Started { entry: Entry::Native, guest_page: GuestPage::Base4K };
    let code = platform.with_followers(|| registry::run(&platform, &arena, line, started));
    match (code, platform.steps()) {
        (KernelExit::VerificationFailed, Steps::Fewer) => ExitCode::SUCCESS,
        (KernelExit::Success, Steps::None) if steps.is_some() => ExitCode::from(ENDED_WITHOUT_STEPS),
        (code, _) => ExitCode::from(code.port_value()),
    }
}

/// Bytes that the kernel needs on this number of threads.
fn arena_bytes(line: &str, threads: usize) -> Result<usize, KernelError<'_>> {
    let kernel = registry::find(CommandLine::new(line).map_err(KernelError::CommandLine)?)?;
    match kernel.memory_for(line, threads)? {
        MemoryNeed::Bytes(bytes) => Ok(bytes as usize),
        MemoryNeed::AllThereIs => Err(KernelError::ArenaTooSmall { needed: u64::MAX, bytes: 0 }),
    }
}

/// Ends this process when the other end of its standard input is closed, whatever the kernel does at that time.
fn end_with_standard_input() {
    thread::spawn(|| {
        while matches!(io::stdin().read(&mut [0]), Ok(1..)) {}
        exit(i32::from(ENDED_LOST));
    });
}
