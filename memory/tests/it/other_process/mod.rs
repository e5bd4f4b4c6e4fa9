//! A process that a test observes from outside: the test's own binary once more, with `the_other_process` as its
//! only test. It maps memory, prints its address on standard error, and answers to lines on its standard input.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStderr, Command, Stdio};

use wideleaf_memory::host::Host;
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::region::RamRange;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, PageSize, WindowIndex};

/// Size of the other process's memory in windows, window-aligned.
pub const WINDOWS: u64 = 8;
const WORDS_PER_PAGE: usize = 512;
const WORDS_PER_WINDOW: usize = 512 * WORDS_PER_PAGE;
/// Number of present pages in the last window: a guest that gave the others back.
const PAGES_OF_THE_LAST: usize = 100;

/// The word at this index of its memory.
pub fn word_at(index: usize) -> u64 {
    (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// Main function of the other process. Ends when its standard input does.
pub fn be_the_other_process() {
    let mut memory = vec![0_u64; (WINDOWS as usize + 1) * WORDS_PER_WINDOW];
    let first = (memory.as_ptr() as usize).next_multiple_of(WORDS_PER_WINDOW * 8) - memory.as_ptr() as usize;
    let ram = &mut memory[first / 8..][..WINDOWS as usize * WORDS_PER_WINDOW];
    let touched = (WINDOWS as usize - 1) * WORDS_PER_WINDOW + PAGES_OF_THE_LAST * WORDS_PER_PAGE;
    ram[..touched].iter_mut().enumerate().for_each(|(index, word)| *word = word_at(index));
    eprintln!("{:x}", ram.as_ptr() as usize);
    for line in std::io::stdin().lines() {
        assert_eq!(line.unwrap(), "check");
        let is_whole = ram[..touched].iter().enumerate().all(|(index, word)| *word == word_at(index));
        eprintln!("{}", if is_whole { "whole" } else { "changed" });
    }
}

/// The other process, seen from outside. Killed when dropped.
pub struct OtherProcess {
    pub child: Child,
    answers: BufReader<ChildStderr>,
    start: Hva,
}

impl OtherProcess {
    /// Starts it, and returns once its memory is present.
    pub fn start() -> OtherProcess {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["process_host::the_other_process", "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut answers = BufReader::new(child.stderr.take().unwrap());
        let start = u64::from_str_radix(&line(&mut answers), 16).unwrap();
        OtherProcess { child, answers, start: Hva::new(start) }
    }

    /// Host interface to the process.
    pub fn host(&self) -> ProcessHost {
        ProcessHost::open(self.child.id()).unwrap()
    }

    /// Its memory, as if it were a guest's from address zero on.
    pub fn ram(&self) -> RamRange {
        RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * WINDOWS).unwrap(), hva: self.start }
    }

    /// Number of its huge windows, by its own page tables.
    pub fn huge_windows(&self, host: &ProcessHost) -> u64 {
        let mut runs = Vec::new();
        host.scan(self.ram().hva, self.ram().gpa.bytes(), &mut runs).unwrap();
        let huge: Bytes = runs.iter().filter(|run| run.is_huge).map(|run| run.bytes).sum();
        huge.pages(PageSize::Huge2M)
    }

    /// Whether it still reads its own words.
    pub fn is_whole(&mut self) -> bool {
        writeln!(self.child.stdin.as_mut().unwrap(), "check").unwrap();
        line(&mut self.answers) == "whole"
    }

    /// Kills it and waits until it is reaped.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    line.trim().to_owned()
}

/// All of its windows that are full.
pub fn full_windows() -> impl Iterator<Item = WindowIndex> {
    (0..WINDOWS - 1).map(WindowIndex::new)
}
