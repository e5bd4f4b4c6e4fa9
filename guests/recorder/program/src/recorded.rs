//! The platform of a recorded kernel: one vCPU, with its lines written between the accesses, in order.

use std::sync::atomic::{AtomicU8, Ordering};

use wideleaf_kernels::Platform;
use wideleaf_kernels::team::ticks;
use wideleaf_protocol::Message;
use wideleaf_protocol::recording::LINE;

use crate::callbacks;

/// A platform with one thread. The time stamp counter has no frequency here: a kernel's time means nothing if each
/// of its loads is a call. Parameters in time are refused, so that two recordings are the same.
pub struct Recorded {
    /// Maximum number of steps of the timed part.
    steps_max: Option<u32>,
    steps: AtomicU8,
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
    /// Creates a platform for at most `steps_max` steps.
    pub const fn new(steps_max: Option<u32>) -> Self {
        Self { steps_max, steps: AtomicU8::new(Steps::None as u8) }
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
        1
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
        job(0);
    }
}
