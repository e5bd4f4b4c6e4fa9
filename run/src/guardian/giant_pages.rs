//! Pages of 1 GiB for a run, made by another process while the guest runs: the run itself is in its sandbox and cannot
//! change a pool.
//!
//! ```text
//!   wideleaf run                        wideleaf make-giant-pages, outside the sandbox
//!     memfds, one for each page ───────▶ opens them at its start (/proc/PID/fd)
//!     giant-maker: "make bind 1" ──────▶ makes a page there, has the next memfd hold it, restores the pool, closes
//!                                        its own
//!                  "made" ◀────────────  or the reason why not
//!     ends: the kernel closes the pipe ▶ ends, after the attempt in progress
//! ```
//!
//! The kernel returns a page to the host when the run's memfd and mappings are gone, also after SIGKILL. If this child
//! is killed during an attempt too, the note of [`HugetlbPools::with_new_pages`] stays, and the next process that
//! makes pages or changes the pool undoes it. A guest that breaks out into the run gets no more pages than the run was
//! allowed: the child has no more memfds.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;
use wideleaf_memory::giant_maker::{GiantMaker, make_in};
use wideleaf_memory::numa::placement::{MemoryMode, NodePolicy};
use wideleaf_memory::pool::{HugetlbPools, NotMade};
use wideleaf_memory::sensors::numa_maps::fullest_node;
use wideleaf_memory::side_mapping::GiantFile;
use wideleaf_policies::{NodeSet, PageSize};

use crate::failure::Failure;
use crate::guards::Noted;

/// Name of the hidden subcommand.
pub const SUBCOMMAND: &str = "make-giant-pages";

/// Lines of the two processes.
const READY: &str = "ready";
const MAKE: &str = "make";
const MADE: &str = "made";
const NOT: &str = "not ";

/// The child that makes pages; it ends when this is dropped.
#[derive(Debug)]
pub struct HeldGiantMaker {
    child: Child,
    maker: Arc<ChildMaker>,
    _noted: Noted,
}

/// The run's end of the pipes.
#[derive(Debug)]
struct ChildMaker {
    requests: Mutex<Option<ChildStdin>>,
    answers: Mutex<BufReader<ChildStdout>>,
    /// Files for the pages that may still be made, in the order in which the child uses them.
    files: Mutex<VecDeque<GiantFile>>,
}

impl HeldGiantMaker {
    /// Starts the child, before this process enters its sandbox. No page is made yet.
    ///
    /// # Errors
    /// [`Failure::Host`] where the kernel has no pages of 1 GiB, or the child does not start.
    pub fn start(pages: u16) -> Result<HeldGiantMaker, Failure> {
        let failed = |why: &dyn std::fmt::Display| {
            Failure::Host(format!("cannot make pages of 1 GiB (--make-giant-pages): {why}; omit the option"))
        };
        let files: Result<VecDeque<GiantFile>, _> = (0..pages).map(|_| GiantFile::of_pool()).collect();
        let files = files.map_err(|error| failed(&error))?;
        let mut command = Command::new(std::env::current_exe().map_err(|error| failed(&error))?);
        command.arg(SUBCOMMAND).args(files.iter().map(|file| file.file().as_raw_fd().to_string()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // Ctrl-C in a terminal reaches the foreground group: this child must end after this process.
        let mut child = command.process_group(0).spawn().map_err(|error| failed(&error))?;
        let (requests, answers) = (child.stdin.take(), child.stdout.take().expect("it is piped"));
        let (requests, answers) = (Mutex::new(requests), Mutex::new(BufReader::new(answers)));
        let maker = Arc::new(ChildMaker { requests, answers, files: Mutex::new(files) });
        let held = HeldGiantMaker { child, maker, _noted: Noted::taken("giant maker") };
        match held.maker.answer() {
            Ok(line) if line == READY => Ok(held),
            Ok(line) => Err(failed(&format_args!("the process for it answered {line:?}"))),
            Err(error) => Err(failed(&error)),
        }
    }

    /// The maker, for a manager.
    pub fn maker(&self) -> Arc<dyn GiantMaker> {
        self.maker.clone()
    }
}

impl Drop for HeldGiantMaker {
    /// Waits for an attempt in progress, some seconds at most: afterwards the pool is as before.
    fn drop(&mut self) {
        drop(self.maker.requests.lock().take());
        if let Err(error) = self.child.wait() {
            tracing::error!("cannot end the process that makes pages of 1 GiB: {error}");
        }
    }
}

impl ChildMaker {
    fn answer(&self) -> io::Result<String> {
        let mut line = String::new();
        match self.answers.lock().read_line(&mut line)? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the process for it has ended")),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    fn ask(&self, policy: Option<NodePolicy>) -> io::Result<String> {
        match self.requests.lock().as_mut() {
            Some(requests) => writeln!(requests, "{}", request(policy))?,
            None => return Err(io::Error::other("the run ends")),
        }
        self.answer()
    }
}

impl GiantMaker for ChildMaker {
    fn left(&self) -> u64 {
        self.files.lock().len() as u64
    }

    fn make(&self, policy: Option<NodePolicy>) -> Result<GiantFile, NotMade> {
        let ended = |error: io::Error| {
            self.files.lock().clear();
            NotMade::elsewhere("other", format!("cannot make a page of 1g: {error}"))
        };
        let answer = self.ask(policy).map_err(ended)?;
        match answer.strip_prefix(NOT).and_then(|why| why.split_once(' ')) {
            None if answer == MADE => {
                let file = self.files.lock().pop_front();
                file.ok_or_else(|| NotMade::elsewhere("other", "cannot make a page of 1g: all were made"))
            }
            None => Err(ended(io::Error::other(format!("the process for it answered {answer:?}")))),
            Some((reason, why)) => Err(NotMade::elsewhere(reason, why)),
        }
    }
}

/// The child: opens the parent's files, then makes a page for each line of its standard input.
///
/// # Errors
/// [`Failure::Host`] if a file of the parent cannot be opened or a pipe fails. The end of the input is no error.
pub fn make_for_parent(descriptors: &[i32]) -> Result<(), Failure> {
    super::outlive_signals();
    let parent = std::os::unix::process::parent_id();
    let open = |descriptor: &i32| {
        let path = format!("/proc/{parent}/fd/{descriptor}");
        let opened = fs::File::options().read(true).write(true).open(&path).and_then(GiantFile::from_file);
        opened.map_err(|error| Failure::Host(format!("cannot open {path}: {error}; `wideleaf run` starts this")))
    };
    let mut files = descriptors.iter().map(open).collect::<Result<VecDeque<GiantFile>, Failure>>()?;
    let pools = HugetlbPools::of_this_machine();
    if let Err(error) = pools.undo_what_was_left(PageSize::Giant1G) {
        tracing::warn!("cannot undo what a killed process left of a pool: {error}");
    }
    let io_failed = |error: io::Error| Failure::Host(format!("cannot talk to the process that started this: {error}"));
    say(READY).map_err(io_failed)?;
    for line in io::stdin().lines() {
        let line = line.map_err(io_failed)?;
        let asked = policy_of(&line)
            .map_err(|line| Failure::Host(format!("cannot use the line {line:?} of standard input")))?;
        let policy = asked.or_else(|| NodePolicy::preferring(node_of(&pools, parent)?.try_into().ok()?));
        let answer = match files.front().map(|file| make_in(&pools, file, policy)) {
            Some(Ok(())) => {
                files.pop_front();
                MADE.to_owned()
            }
            Some(Err(error)) => {
                let why = error.to_string().replace(char::is_control, " ");
                format!("{NOT}{} {why}", error.reason())
            }
            None => format!("{NOT}other cannot make a page of 1g: all were made"),
        };
        // The parent may have ended during the attempt: the page went back with its file then.
        say(&answer).map_err(io_failed)?;
    }
    Ok(())
}

/// The line that asks for a page by that memory policy.
fn request(policy: Option<NodePolicy>) -> String {
    policy.map_or(MAKE.to_owned(), |policy| format!("{MAKE} {} {}", policy.mode.name(), policy.nodes))
}

/// The policy of such a line; or else the line.
fn policy_of(line: &str) -> Result<Option<NodePolicy>, &str> {
    let mut words = line.split(' ');
    let policy = match (words.next(), words.next(), words.next(), words.next()) {
        (Some(MAKE), None, ..) => return Ok(None),
        (Some(MAKE), Some(mode), Some(nodes), None) => MemoryMode::by_name(mode).zip(nodes.parse().ok()),
        _ => None,
    };
    let named = policy.filter(|(_, nodes): &(MemoryMode, NodeSet)| !nodes.is_empty());
    named.map(|(mode, nodes)| Some(NodePolicy { mode, nodes })).ok_or(line)
}

fn say(line: &str) -> io::Result<()> {
    let mut output = io::stdout();
    writeln!(output, "{line}").and_then(|()| output.flush())
}

/// The node with most of the parent's memory, where more than one has a pool.
fn node_of(pools: &HugetlbPools, parent: u32) -> Option<u32> {
    let has_nodes = pools.status(PageSize::Giant1G).is_ok_and(|pool| pool.nodes.len() > 1);
    let maps = has_nodes.then(|| fs::read_to_string(format!("/proc/{parent}/numa_maps")));
    fullest_node(&maps?.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_carries_the_policy_and_any_other_line_is_refused() {
        let policy = |mode, nodes: &str| Some(NodePolicy { mode, nodes: nodes.parse().expect("a list") });
        for asked in [None, policy(MemoryMode::Bind, "0-1,5"), policy(MemoryMode::Preferred, "1")] {
            assert_eq!(policy_of(&request(asked)), Ok(asked), "{}", request(asked));
        }
        for wrong in ["", "make ", "make bind", "make bind x", "make strict 0", "make bind 0 1", "take"] {
            assert_eq!(policy_of(wrong), Err(wrong));
        }
    }
}
