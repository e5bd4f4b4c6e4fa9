//! Questions about other processes, each with a deadline.
//!
//! The kernel takes a process's `mmap_lock` to answer most questions about that process's memory: `cmdline`,
//! `environ`, `maps`, `smaps`, `mem`, `pagemap` (proc(5)). It holds `exec_update_lock` while any of these is opened.
//! A process can keep these locks held for any time, for instance by a mapped file with a server that never answers.
//! A read of one of these files then never returns. So each such read is a question: it is asked on a thread of its
//! own, which is left behind when the deadline passes.
//!
//! ```text
//!   ask ─┬─ on a thread for this process already ────────▶ asked right there
//!        ├─ an earlier question is past its deadline ────▶ NoAnswer at once
//!        ├─ an earlier question is under way ────────────▶ waits for its return, until the deadline
//!        └─ a thread ─┬─ returns in time ────────────────▶ the answer
//!                     └─ does not ─▶ a line in the log ──▶ NoAnswer; the thread stays
//!                                     └─ returns later ──▶ the process is asked again
//! ```
//!
//! There is at most one thread for each process, and at most [`THREADS_MAX`] in all. The processes of one user that are
//! past their deadlines take at most half of the places that those of the others leave: hundreds where all VMs have one
//! user, as libvirt's have, and never all. The thread that is left behind is the retry: it returns when the lock is
//! free. `comm`, `stat`, `status`, `fd` and `exe` are read without a question: they answer for a locked process on
//! Linux 6.18, as tests/stuck.rs of `operator/attach` shows.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::panicked::{Panicked, caught};

/// Maximum number of threads for questions at the same time, including those left behind. Half of them are more than
/// one host has VMs of one user. A thread costs a few pages, and the unit's `TasksMax` is four times this number.
pub const THREADS_MAX: usize = 1024;

/// Deadline of a question that the kernel answers in microseconds, such as `cmdline`: only a locked process, or a
/// host with a hundred runnable threads per core, needs longer.
pub const BRIEF: Duration = Duration::from_millis(400);

/// Maximum number of processes remembered as named in the log. The list then starts anew, and a process may
/// be named again.
const NAMED_MAX: usize = 1024;

/// Identifies one process for ever: a process id is reused, a process id with its start time is not
/// (proc_pid_stat(5), field 22).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessKey {
    /// Number of the process (pid).
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub started_at: u64,
}

impl ProcessKey {
    /// The process that has this id now, by `stat` in its folder of `proc`. The start time is zero if that
    /// cannot be read.
    pub fn of(proc: &Path, pid: u32) -> ProcessKey {
        let stat = fs::read(proc.join(format!("{pid}/stat"))).unwrap_or_default();
        ProcessKey { pid, started_at: start_time(&String::from_utf8_lossy(&stat)).unwrap_or(0) }
    }
}

/// Parses `7 (a name) S 1 …`: the name may hold spaces and brackets.
fn start_time(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// The asking thread waits in the kernel.
    #[error("does not answer: its memory map is locked")]
    Locked,
    /// The asking thread has work to do, or waits for a core.
    #[error("does not answer: it is very large, or this host is very busy")]
    Slow,
    /// All threads for questions are in use.
    #[error("was not read: {THREADS_MAX} other processes do not answer, and no more are asked until one does")]
    TooMany,
    /// Processes of the same user that are past their deadlines have that user's part of the places.
    #[error(
        "was not read: {0} other processes of its user do not answer, and no more of that user's are asked until one \
         does"
    )]
    TooManyOfUser(usize),
    /// The kernel could not start a thread.
    #[error("was not read: cannot start a thread: {0}")]
    Thread(#[from] io::Error),
    /// A defect in this program.
    #[error("was not read: the read {0}")]
    Panicked(#[from] Panicked),
}

/// A question under way.
#[derive(Clone, Copy, Debug)]
struct QuestionState {
    since: Instant,
    thread: Option<nix::unistd::Pid>,
    is_overdue: bool,
    /// User of an overdue process, where known.
    user: Option<u32>,
}

impl QuestionState {
    fn no_answer(self) -> NoAnswer {
        if self.thread.is_some_and(is_running) { NoAnswer::Slow } else { NoAnswer::Locked }
    }
}

/// Whether a thread of this process runs or is runnable, by its state (proc_pid_stat(5)).
fn is_running(thread: nix::unistd::Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('R'))
}

#[derive(Default)]
struct State {
    out: BTreeMap<ProcessKey, QuestionState>,
    /// Processes that the log has named because they once did not answer in time.
    named: BTreeSet<ProcessKey>,
}

impl State {
    /// Number of overdue processes of the user of `of` if they have that user's part of the places, so that no other
    /// one is asked: as many as are left.
    fn full_for(&self, of: ProcessKey, places: usize, user_of: UserOf) -> Option<usize> {
        let overdue = || self.out.values().filter(|out| out.is_overdue);
        let left = places.saturating_sub(overdue().count());
        // The user is looked up only where it can matter.
        if left > places / 2 {
            return None;
        }
        let user = user_of(of.pid);
        let of_user = overdue().filter(|out| out.user == user).count();
        (of_user > 0 && of_user >= left).then_some(of_user)
    }
}

/// Finds the user of a process.
type UserOf = fn(u32) -> Option<u32>;

/// The real user of a process, by `status` (proc_pid_status(5)); `None` after its end. A process can make root the
/// owner of its folder in `/proc` (`PR_SET_DUMPABLE`), but cannot change this one.
fn user_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.parse().ok()
}

/// All questions of this program, or of one test.
pub struct Questions {
    state: Mutex<State>,
    returned: Condvar,
    /// Maximum number of threads at the same time.
    places: usize,
    user_of: UserOf,
}

impl Default for Questions {
    fn default() -> Questions {
        Questions { state: Mutex::default(), returned: Condvar::new(), places: THREADS_MAX, user_of }
    }
}

/// The questions of this program, for callers that a test gives its own ones.
pub fn questions() -> Arc<Questions> {
    Arc::clone(&QUESTIONS)
}

/// The questions of this program.
static QUESTIONS: LazyLock<Arc<Questions>> = LazyLock::new(Arc::default);

thread_local! {
    /// The process that this thread asks about.
    static ASKING: Cell<Option<ProcessKey>> = const { Cell::new(None) };
}

/// A question under way.
pub struct Asked<T> {
    questions: Arc<Questions>,
    of: ProcessKey,
    until: Instant,
    answer: Receiver<Result<T, Panicked>>,
}

/// Asks about `of`, and waits for the answer until `within` has passed. A later answer is dropped on the thread
/// that got it.
///
/// # Errors
/// [`NoAnswer`] with its reason.
pub fn ask<T: Send + 'static>(
    of: ProcessKey,
    within: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoAnswer> {
    QUESTIONS.ask(of, within, question)
}

/// Asks the same about many processes at the same time, and waits for all answers until `within` has passed.
pub fn ask_all<T: Send + 'static, Q: FnOnce() -> T + Send + 'static>(
    within: Duration,
    questions: impl IntoIterator<Item = (ProcessKey, Q)>,
) -> Vec<Result<T, NoAnswer>> {
    let until = Instant::now() + within;
    let asked: Vec<_> = questions.into_iter().map(|(of, question)| QUESTIONS.begin(of, until, question)).collect();
    asked.into_iter().map(|asked| asked?.wait()).collect()
}

/// Why this process gives no answer for now; `None` if no question is past its deadline.
pub fn silence_of(process: ProcessKey) -> Option<NoAnswer> {
    QUESTIONS.silence_of(process)
}

/// Runs `work`, which may wait for a process that hangs. Returns when it is done, or when `within` has passed, and
/// says whether it is done. The caller ensures that there is at most one such work for each process.
pub fn leave_behind(name: &str, within: Duration, work: impl FnOnce() + Send + 'static) -> bool {
    let (done, is_done) = mpsc::channel();
    let working = move || {
        let panicked = caught(work).err();
        panicked.inspect(|panicked| tracing::error!("a cleanup thread {panicked}"));
        // The caller may have stopped waiting.
        let _ = done.send(());
    };
    match thread::Builder::new().name(name.to_owned()).spawn(working) {
        Ok(_) => is_done.recv_timeout(within).is_ok(),
        Err(error) => {
            tracing::error!("cannot start a cleanup thread: {error}");
            false
        }
    }
}

impl Questions {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Like the function [`silence_of`].
    pub fn silence_of(&self, process: ProcessKey) -> Option<NoAnswer> {
        let out = self.state().out.get(&process).copied()?;
        out.is_overdue.then(|| out.no_answer())
    }

    /// Time since a question about this process was asked, if one is under way.
    pub fn out_for(&self, process: ProcessKey) -> Option<Duration> {
        self.state().out.get(&process).map(|out| out.since.elapsed())
    }

    /// Like the function [`ask`].
    ///
    /// # Errors
    /// [`NoAnswer`] with its reason.
    pub fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        of: ProcessKey,
        within: Duration,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        if ASKING.get() == Some(of) {
            return Ok(question());
        }
        self.begin(of, Instant::now() + within, question)?.wait()
    }

    fn begin<T: Send + 'static>(
        self: &Arc<Self>,
        of: ProcessKey,
        until: Instant,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Asked<T>, NoAnswer> {
        self.take_place(of, until)?;
        let (questions, (bring, answer)) = (Arc::clone(self), mpsc::channel());
        let asking = move || {
            questions.state().out.entry(of).and_modify(|out| out.thread = Some(nix::unistd::gettid()));
            ASKING.set(Some(of));
            let brought = caught(question);
            questions.give_place_back(of);
            // Dropped here if the caller no longer waits, since the drop may wait for the process once more.
            drop(bring.send(brought));
        };
        if let Err(error) = thread::Builder::new().name("question".into()).spawn(asking) {
            self.give_place_back(of);
            return Err(error.into());
        }
        Ok(Asked { questions: Arc::clone(self), of, until, answer })
    }

    /// Waits until no other question about this process is under way and there is room for one more thread. Does not
    /// wait for other processes of its user that are overdue.
    fn take_place(&self, of: ProcessKey, until: Instant) -> Result<(), NoAnswer> {
        let mut state = self.state();
        loop {
            let earlier = state.out.get(&of).copied();
            let is_full = state.out.len() >= self.places;
            if earlier.is_none()
                && let Some(others) = state.full_for(of, self.places, self.user_of)
            {
                return Err(NoAnswer::TooManyOfUser(others));
            }
            if earlier.is_none() && !is_full {
                state
                    .out
                    .insert(of, QuestionState { since: Instant::now(), thread: None, is_overdue: false, user: None });
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            let is_hopeless = is_full && state.out.values().all(|out| out.is_overdue);
            match earlier {
                Some(out) if out.is_overdue || left.is_zero() => return Err(out.no_answer()),
                None if is_hopeless || left.is_zero() => return Err(NoAnswer::TooMany),
                _ => {}
            }
            self.returned.wait_for(&mut state, left);
        }
    }

    fn give_place_back(&self, of: ProcessKey) {
        let out = self.state().out.remove(&of);
        self.returned.notify_all();
        if let Some(QuestionState { since, is_overdue: true, .. }) = out {
            tracing::info!("process {} answers again after {} ms", of.pid, since.elapsed().as_millis());
        }
    }

    /// Records that a question is past its deadline, and returns why; writes a line to the log the first time.
    fn overdue(&self, of: ProcessKey) -> NoAnswer {
        let user = (self.user_of)(of.pid);
        let mut state = self.state();
        let Some(out) = state.out.get_mut(&of) else {
            // It has returned just now.
            return NoAnswer::Slow;
        };
        out.is_overdue = true;
        out.user = user;
        let out = *out;
        if state.named.len() >= NAMED_MAX {
            state.named.clear();
        }
        let is_new = state.named.insert(of);
        drop(state);
        self.returned.notify_all();
        let why = out.no_answer();
        if is_new {
            let name = fs::read_to_string(format!("/proc/{}/comm", of.pid)).unwrap_or_default();
            let name = name.trim().replace(char::is_control, "?");
            tracing::warn!(
                "process {} ({name}) {why}; asking again after it does; other processes are not affected",
                of.pid
            );
        }
        why
    }
}

impl<T> Asked<T> {
    fn wait(self) -> Result<T, NoAnswer> {
        let left = self.until.saturating_duration_since(Instant::now());
        match self.answer.recv_timeout(left) {
            Ok(answer) => Ok(answer?),
            Err(RecvTimeoutError::Timeout) => Err(self.questions.overdue(self.of)),
            // The thread has ended without an answer, which `caught` prevents.
            Err(RecvTimeoutError::Disconnected) => Err(NoAnswer::TooMany),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const SOON: Duration = Duration::from_millis(20);
    /// Long enough for a busy machine to start a thread.
    const LONG: Duration = Duration::from_secs(60);

    fn key(pid: u32) -> ProcessKey {
        ProcessKey { pid, started_at: 1 }
    }

    /// A question that returns once the sender is gone.
    fn hanging() -> (mpsc::Sender<()>, impl FnOnce() + Send + 'static) {
        let (hold, held) = mpsc::channel::<()>();
        let hang = move || {
            let _ = held.recv();
        };
        (hold, hang)
    }

    #[test]
    fn a_process_that_hangs_has_one_thread_and_is_asked_again_once_it_answers() {
        let questions = Arc::<Questions>::default();
        let (hold, hang) = hanging();
        assert!(questions.ask(key(1), SOON, hang).is_err());
        let asked = Arc::new(AtomicUsize::new(0));
        for _ in 0..10 {
            let asked = Arc::clone(&asked);
            // The deadline is long: an answer at all shows that it is not waited for.
            let question = move || asked.fetch_add(1, Ordering::Relaxed);
            assert!(questions.ask(key(1), 10 * LONG, question).is_err());
        }
        assert_eq!((questions.state().out.len(), asked.load(Ordering::Relaxed)), (1, 0));
        assert_eq!(questions.ask(key(2), LONG, || 7).expect("another process"), 7);
        drop(hold);
        while !questions.state().out.is_empty() {
            thread::yield_now();
        }
        assert_eq!(questions.ask(key(1), LONG, || 8).expect("it answers again"), 8);
        assert_eq!(questions.state().named.len(), 1);
    }

    #[test]
    fn another_process_with_the_same_id_is_asked() {
        let questions = Arc::<Questions>::default();
        let (_hold, hang) = hanging();
        assert!(questions.ask(key(1), SOON, hang).is_err());
        let later = ProcessKey { pid: 1, started_at: 2 };
        assert_eq!(questions.ask(later, LONG, || 7).expect("another process"), 7);
    }

    #[test]
    fn a_second_question_waits_for_the_first_to_return() {
        let questions = Arc::<Questions>::default();
        let (hold, hang) = hanging();
        let first = questions.begin(key(1), Instant::now() + LONG, hang).expect("a thread");
        thread::scope(|scope| {
            let second = scope.spawn(|| questions.ask(key(1), LONG, || 7));
            assert_eq!(questions.state().out.len(), 1);
            drop(hold);
            assert_eq!(second.join().expect("no panic").expect("it waits"), 7);
        });
        first.wait().expect("it has returned");
    }

    /// Questions for that number of threads, in which each thousand process ids belong to one user.
    fn of_users(places: usize) -> Arc<Questions> {
        Arc::new(Questions { places, user_of: |pid| Some(pid / 1000), ..Questions::default() })
    }

    /// Leaves a question about each of these processes behind.
    fn hang(questions: &Arc<Questions>, pids: impl Iterator<Item = u32>) -> Vec<mpsc::Sender<()>> {
        let left = |pid| {
            let (hold, hang) = hanging();
            let no_answer = questions.ask(key(pid), SOON, hang).expect_err("it hangs");
            assert!(matches!(no_answer, NoAnswer::Locked | NoAnswer::Slow), "{pid}: {no_answer}");
            hold
        };
        pids.map(left).collect()
    }

    #[test]
    fn processes_of_one_user_that_hang_leave_the_others_to_be_asked() {
        let questions = of_users(8);
        let mut holds = hang(&questions, 0..4);
        let next = || questions.ask(key(999), LONG, || ());
        let refused = next().expect_err("its user has no place");
        assert!(refused.to_string().contains("4 other processes of its user do not answer"), "{refused}");
        assert!(matches!(questions.silence_of(key(0)), Some(NoAnswer::Locked | NoAnswer::Slow)), "asked before");
        assert_eq!(questions.ask(key(1000), LONG, || 7).expect("another user's process"), 7);
        drop(holds.pop());
        while questions.state().out.len() == 4 {
            thread::yield_now();
        }
        next().expect("there is room again");
    }

    #[test]
    fn hundreds_of_vms_of_one_user_that_hang_hold_up_no_new_one() {
        let questions = of_users(THREADS_MAX);
        let until = Instant::now() + SOON;
        let begin = |pid| {
            let (hold, hang) = hanging();
            (hold, questions.begin(key(pid), until, hang).expect("a thread"))
        };
        let (_holds, asked): (Vec<_>, Vec<_>) = (0..300).map(begin).unzip();
        asked.into_iter().for_each(|asked| assert!(asked.wait().is_err()));
        assert_eq!(questions.ask(key(300), LONG, || 7).expect("a new VM"), 7);
        assert!(matches!(questions.ask(key(0), LONG, || ()), Err(NoAnswer::Locked | NoAnswer::Slow)));
    }

    #[test]
    fn the_user_of_a_process_is_the_real_one_and_that_of_an_ended_one_is_not_known() {
        assert_eq!(user_of(std::process::id()), Some(nix::unistd::getuid().as_raw()));
        assert_eq!(user_of(u32::MAX), None);
    }

    #[test]
    fn no_more_threads_than_the_limit_are_left_behind_and_places_come_back() {
        let questions = of_users(8);
        // Half of what the others leave to each user, and one place at least.
        let of_user = |(user, count): (u32, u32)| (0..count).map(move |process| user * 1000 + process);
        let holds = hang(&questions, [(0, 4), (1, 2), (2, 1), (3, 1)].into_iter().flat_map(of_user));
        let free = 4000;
        assert!(matches!(questions.ask(key(free), LONG, || ()), Err(NoAnswer::TooMany)));
        assert_eq!(questions.state().out.len(), 8);
        drop(holds);
        while !questions.state().out.is_empty() {
            thread::yield_now();
        }
        questions.ask(key(free), LONG, || ()).expect("there is room again");
    }

    #[test]
    fn a_nested_question_about_the_same_process_is_asked_on_the_same_thread() {
        let questions = Arc::<Questions>::default();
        let inner = Arc::clone(&questions);
        let outer = move || inner.ask(key(1), LONG, || thread::current().id()).map(|id| id == thread::current().id());
        assert!(questions.ask(key(1), LONG, outer).expect("no hang").expect("no hang"));
    }

    #[test]
    fn a_question_that_panics_is_an_error_and_leaves_its_place() {
        let questions = Arc::<Questions>::default();
        let error = questions.ask(key(1), LONG, || panic!("of the test")).expect_err("it panics").to_string();
        assert_eq!(error, "was not read: the read panicked: of the test");
        assert!(questions.state().out.is_empty());
    }

    #[test]
    fn work_that_hangs_is_left_behind() {
        let (hold, hang) = hanging();
        assert!(!leave_behind("test", SOON, hang));
        drop(hold);
        assert!(leave_behind("test", LONG, || ()));
    }

    #[test]
    fn the_start_time_is_field_22_for_any_name() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1000 1 18446744073709551615";
        assert_eq!(start_time(stat), Some(12345));
        assert_eq!((start_time(""), start_time("7 (a) S 1")), (None, None));
        let this = ProcessKey::of(Path::new("/proc"), std::process::id());
        assert!(this.started_at > 0);
    }
}
