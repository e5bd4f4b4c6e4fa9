//! Several vCPUs or threads doing one job: dispatch, wait, and their common counter.
//!
//! ```text
//!   member 0 (leader)                       members 1…n−1
//!   lead(job): publish job                  follow(i): spin on `generation`
//!              generation += 1  ─────────▶  changed: run job(i)
//!              run job(0)                            done += 1
//!              spin until done = n − 1  ◀──────────┘
//!   dismiss(): generation = DISMISSED ───▶  return
//! ```
//!
//! Members spin instead of sleeping: a guest in ring 3 cannot halt, and a sleeping thread would measure the host's
//! wake-up. Threads of a process yield their CPU once a wait is long: the thread they wait for may need it.
#![expect(
    unsafe_code,
    reason = "the job is borrowed by threads that outlive the borrow's scope, and rdtsc is an intrinsic"
)]

use core::cell::UnsafeCell;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

// Action of a member between two checks after a long wait. A guest has no other thread to yield to.
#[cfg(not(any(test, feature = "std")))]
use core::hint::spin_loop as give_way;
#[cfg(any(test, feature = "std"))]
use std::thread::yield_now as give_way;

/// Ticks of this CPU's time stamp counter (SDM volume 3, 17.17: invariant on every CPU KVM runs on since 2008).
///
/// Not serialising: the CPU may read it some tens of instructions early or late, which is negligible beside a batch
/// of memory accesses.
pub fn ticks() -> u64 {
    // SAFETY: rdtsc exists on every x86-64 CPU; in ring 3 it needs CR4.TSD clear, which the boot contract, the
    // image's own boot code and Linux all provide.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Number of checks before a wait is long: some tens of microseconds, in which running members meet. That is short
/// beside a time slice of milliseconds that a thread would spin away.
const LOOKS_OF_A_SHORT_WAIT: u32 = 1000;

/// Calls `look` until it finds something, and returns that.
fn wait_for<T>(look: impl Fn() -> Option<T>) -> T {
    for _ in 0..LOOKS_OF_A_SHORT_WAIT {
        if let Some(found) = look() {
            return found;
        }
        spin_loop();
    }
    loop {
        if let Some(found) = look() {
            return found;
        }
        give_way();
    }
}

/// A job as the team carries it: the borrow's lifetime is erased, [`Team::lead`] does not return before its last use.
type Job = *const (dyn Fn(usize) + Sync);

/// Value of `generation` that ends the followers; no team counts that far.
const DISMISSED: u64 = u64::MAX;

/// A leader and its followers. `const`-constructible, so that an image can keep it in a `static`.
pub struct Team {
    /// Counts the jobs. A change is the signal, and its release/acquire pair carries the job.
    generation: AtomicU64,
    /// Number of followers that have finished the current job.
    done: AtomicUsize,
    /// Number of followers that take part; set before the first job.
    followers: AtomicUsize,
    /// Set if a follower's job ended by a panic: the follower does not come for the next one.
    broken: AtomicBool,
    /// Current job. The leader writes it while no follower runs; followers read it after they saw `generation`
    /// change.
    job: UnsafeCell<Option<Job>>,
}

// SAFETY: `job` is only written between jobs (the leader has waited for `done`) and only read during one; the jobs
// themselves are Sync.
unsafe impl Sync for Team {}
// SAFETY: the team holds no thread's identity; a job pointer is only alive within `lead`.
unsafe impl Send for Team {}

impl Default for Team {
    fn default() -> Self {
        Self::new()
    }
}

impl Team {
    /// Creates a team of the leader alone.
    pub const fn new() -> Self {
        Self {
            generation: AtomicU64::new(0),
            done: AtomicUsize::new(0),
            followers: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            job: UnsafeCell::new(None),
        }
    }

    /// Sets the number of members, including the leader. To be called once, before the first job.
    ///
    /// # Panics
    /// Panics if `members` is 0, or if a job has run already.
    pub fn set_members(&self, members: usize) {
        assert!(members > 0, "a team has at least its leader");
        assert!(self.generation.load(Ordering::Relaxed) == 0, "the team has already worked");
        self.followers.store(members - 1, Ordering::Relaxed);
    }

    /// Runs `job(i)` on every member i and returns when all are done. Only member 0 calls this, and not within a job.
    ///
    /// # Panics
    /// Panics if a follower's part panicked.
    pub fn lead(&self, job: &(dyn Fn(usize) + Sync)) {
        let job: *const (dyn Fn(usize) + Sync + '_) = job;
        // SAFETY: only the lifetime changes. The pointer is used by followers until they count themselves in `done`,
        // and this function waits for all of them while the borrow lives, also when the leader's own part panics.
        let job: Job = unsafe { core::mem::transmute(job) };
        let followers = self.followers.load(Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        // SAFETY: no follower reads `job` now: the previous call waited for all of them.
        unsafe { *self.job.get() = Some(job) };
        self.generation.fetch_add(1, Ordering::Release);
        let wait = WaitForFollowers { team: self, followers };
        // SAFETY: the pointer came from a reference that is still borrowed.
        unsafe { (*job)(0) };
        drop(wait);
        assert!(!self.broken.load(Ordering::Relaxed), "a member of the team panicked in its job");
    }

    /// Main loop of member `index`: does its part of every job until the leader dismisses the team.
    pub fn follow(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = wait_for(|| Some(self.generation.load(Ordering::Acquire)).filter(|generation| *generation != seen));
            if seen == DISMISSED {
                return;
            }
            // SAFETY: the acquire load above saw the leader's release, so the write of `job` is visible and complete;
            // the leader does not write it again before this member has counted itself in `done`.
            let job = unsafe { *self.job.get() };
            let mut part = Part { team: self, is_complete: false };
            if let Some(job) = job {
                // SAFETY: the leader is inside `lead` and holds the borrow until this member is done.
                unsafe { (*job)(index) };
            }
            part.is_complete = true;
        }
    }

    /// Ends the followers. No job may follow.
    pub fn dismiss(&self) {
        self.generation.store(DISMISSED, Ordering::Release);
    }
}

/// Waits when dropped, so that the borrow of a job cannot end early by a panic.
struct WaitForFollowers<'t> {
    team: &'t Team,
    followers: usize,
}

impl Drop for WaitForFollowers<'_> {
    fn drop(&mut self) {
        wait_for(|| (self.team.done.load(Ordering::Acquire) == self.followers).then_some(()));
    }
}

/// A follower's part of a job, counted as done when dropped: the leader must not spin forever if a native thread
/// panics.
struct Part<'t> {
    team: &'t Team,
    is_complete: bool,
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if !self.is_complete {
            self.team.broken.store(true, Ordering::Relaxed);
        }
        self.team.done.fetch_add(1, Ordering::Release);
    }
}

/// Holds one value on its way from the leader to a member, or back. It is safe for any caller: only the thread that
/// wins the change of `state` moves the value.
pub struct Slot<T> {
    state: AtomicU8,
    value: UnsafeCell<Option<T>>,
}

const EMPTY: u8 = 0;
const BUSY: u8 = 1;
const FULL: u8 = 2;

// SAFETY: `value` is only touched by the thread that changed `state` to BUSY, one at a time; the release/acquire pair
// of FULL carries the value, which may change threads because it is Send. No reference to it is ever shared.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Slot<T> {
    /// Creates a slot that holds nothing, or a value.
    pub const fn new(value: Option<T>) -> Self {
        let state = if value.is_some() { FULL } else { EMPTY };
        Self { state: AtomicU8::new(state), value: UnsafeCell::new(value) }
    }

    /// Puts a value into an empty slot.
    ///
    /// # Panics
    /// Panics if the slot is not empty.
    pub fn put(&self, value: T) {
        assert!(self.change(EMPTY), "the slot is not empty");
        // SAFETY: this call made the state BUSY, so no other thread touches the value until it is FULL.
        unsafe { *self.value.get() = Some(value) };
        self.state.store(FULL, Ordering::Release);
    }

    /// Takes the value out; `None` if the slot is empty.
    pub fn take(&self) -> Option<T> {
        if !self.change(FULL) {
            return None;
        }
        // SAFETY: this call made the state BUSY, so no other thread touches the value until it is EMPTY.
        let value = unsafe { (*self.value.get()).take() };
        self.state.store(EMPTY, Ordering::Release);
        value
    }

    /// Makes the slot busy if it is in that state.
    fn change(&self, from: u8) -> bool {
        self.state.compare_exchange(from, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

/// A meeting point of the members of one job. Reusable: the last to arrive opens it for all.
#[derive(Debug, Default)]
pub struct Barrier {
    arrived: AtomicUsize,
    openings: AtomicUsize,
}

impl Barrier {
    /// Creates a closed barrier.
    pub const fn new() -> Self {
        Self { arrived: AtomicUsize::new(0), openings: AtomicUsize::new(0) }
    }

    /// Waits until `members` have arrived. All their earlier writes are then visible to all of them.
    pub fn wait(&self, members: usize) {
        let opening = self.openings.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == members {
            self.arrived.store(0, Ordering::Relaxed);
            self.openings.fetch_add(1, Ordering::Release);
        } else {
            wait_for(|| (self.openings.load(Ordering::Acquire) != opening).then_some(()));
        }
    }
}
