//! The platform of a recorded kernel: threads of which the first is recorded, with its lines written between its
//! accesses, in order.

use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use wideleaf_kernels::Platform;
use wideleaf_kernels::team::{Team, ticks};
use wideleaf_protocol::Message;
use wideleaf_protocol::recording::LINE;

use crate::callbacks;

/// A platform of threads that share a kernel's work as the vCPUs of a guest do. The time stamp counter has no frequency
/// here: a kernel's time means nothing if each of its loads is a call. Parameters in time are refused, so that two
/// recordings are the same.
pub struct Recorded {
    /// Maximum number of steps of the timed part.
    steps_max: Option<u32>,
    steps: AtomicU8,
    team: Team,
    threads: usize,
}

/// How many steps of the timed part were run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Steps {
    /// The kernel has no steps: it has not asked for their number.
    None,
    /// All steps were run.
    All,
    /// Fewer steps than the kernel has, so its result is not the right one.
    Fewer,
}

impl Recorded {
    /// Creates a platform of this number of threads, at least one, for at most `steps_max` steps.
    pub fn new(steps_max: Option<u32>, threads: usize) -> Self {
        let team = Team::new();
        team.set_members(threads);
        Self { steps_max, steps: AtomicU8::new(Steps::None as u8), team, threads }
    }

    /// Runs `body` on this thread, the first, which is recorded; the others do their parts of its jobs until it ends.
    pub fn with_followers<R>(&self, body: impl FnOnce() -> R) -> R {
        thread::scope(|scope| {
            for index in 1..self.threads {
                scope.spawn(move || self.team.follow(index));
            }
            // Also if the body panics: the scope waits for the others.
            let _dismissal = Dismissal(&self.team);
            callbacks::record_this_thread();
            body()
        })
    }

    /// How many steps of the timed part were run.
    pub fn steps(&self) -> Steps {
        [Steps::None, Steps::All, Steps::Fewer][usize::from(self.steps.load(Ordering::Relaxed))]
    }
}

impl Platform for Recorded {
    fn now(&self) -> u64 {
        ticks()
    }

    fn tsc_hz(&self) -> u64 {
        0
    }

    fn vcpus(&self) -> usize {
        self.threads
    }

    fn steps_of(&self, total: u32) -> u32 {
        let steps = self.steps_max.map_or(total, |most| most.min(total));
        let became = if steps < total { Steps::Fewer } else { Steps::All };
        self.steps.fetch_max(became as u8, Ordering::Relaxed);
        steps
    }

    fn emit(&self, message: &Message<'_>) {
        // After fewer steps the kernel has no result, neither right nor wrong.
        if !(matches!(message, Message::Verify { .. }) && self.steps() == Steps::Fewer) {
            callbacks::write_frame(LINE, message.to_string().as_bytes());
        }
    }

    fn run_on_all(&self, job: &(dyn Fn(usize) + Sync)) {
        self.team.lead(job);
    }
}

/// Dismisses the team when dropped.
struct Dismissal<'t>(&'t Team);

impl Drop for Dismissal<'_> {
    fn drop(&mut self) {
        self.0.dismiss();
    }
}
