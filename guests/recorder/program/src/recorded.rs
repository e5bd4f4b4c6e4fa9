//! The platform of a kernel that is recorded: one vCPU, whose lines go between the accesses, where they belong.

use std::sync::atomic::{AtomicU8, Ordering};

use wideleaf_kernels::Platform;
use wideleaf_kernels::team::ticks;
use wideleaf_protocol::Message;
use wideleaf_protocol::recording::LINE;

use crate::callbacks;

/// One thread. The time stamp counter has no frequency here: a kernel's time says nothing when each of its loads is a call, and what
/// depends on time is refused, so that two recordings are the same.
pub struct Recorded {
    /// Most steps of the timed part.
    steps_max: Option<u32>,
    steps: AtomicU8,
}

/// What became of the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Steps {
    /// The kernel has not asked how many to run: it has none.
    None,
    /// All of them.
    All,
    /// Not all, so the result is not the right one.
    Fewer,
}

impl Recorded {
    /// A platform for so many steps at most.
    pub const fn new(steps_max: Option<u32>) -> Self {
        Self { steps_max, steps: AtomicU8::new(Steps::None as u8) }
    }

    /// What became of the steps.
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
        1
    }

    fn steps_of(&self, total: u32) -> u32 {
        let steps = self.steps_max.map_or(total, |most| most.min(total));
        let became = if steps < total { Steps::Fewer } else { Steps::All };
        self.steps.fetch_max(became as u8, Ordering::Relaxed);
        steps
    }

    fn emit(&self, message: &Message<'_>) {
        // A result of fewer steps is not wrong, it is none.
        if !(matches!(message, Message::Verify { .. }) && self.steps() == Steps::Fewer) {
            callbacks::write_frame(LINE, message.to_string().as_bytes());
        }
    }

    fn run_on_all(&self, job: &(dyn Fn(usize) + Sync)) {
        job(0);
    }
}
