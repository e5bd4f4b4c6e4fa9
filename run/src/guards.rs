//! Log of the order in which a run takes its guards, gives them back, and enters its sandbox:
//! `WIDELEAF_LOG=wideleaf_run::guards=trace`. Tests compare it, because a guard that moves by one line can leave a
//! file behind, or need a system call that the sandbox denies.
//!
//! ```text
//!   + guard    it is taken          - guard    it is given back          = step    a step between them
//! ```

/// Name of the log's target, whatever module writes to it.
pub const TARGET: &str = "wideleaf_run::guards";

/// A guard's line in the log. Its owner declares it after the guard itself, and so it is dropped after the guard's
/// own end in a struct.
#[derive(Debug)]
pub struct Noted(&'static str);

impl Noted {
    /// Notes that the guard is taken.
    pub fn taken(guard: &'static str) -> Noted {
        tracing::trace!(target: TARGET, "+ {guard}");
        Noted(guard)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        tracing::trace!(target: TARGET, "- {}", self.0);
    }
}

/// Notes a step between guards.
pub fn step(what: &str) {
    tracing::trace!(target: TARGET, "= {what}");
}
