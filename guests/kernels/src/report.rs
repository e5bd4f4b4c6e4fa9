//! What a kernel that works on typed memory prints: its region, phases, results and verification.

use core::fmt;

use wideleaf_protocol::{Message, Name, Status};

use crate::arena::{Layout, Typed};
use crate::npb::classes::Class;
use crate::platform::ticks_to_seconds;
use crate::registry::Figure;
use crate::rounds::Progress;
use crate::text::FixedText;
use crate::{Arena, KernelError, Platform};

/// The untimed preparation.
pub const INIT: Name<'static> = Name::literal("init");
/// What is timed.
pub const COMPUTE: Name<'static> = Name::literal("compute");
/// The untimed check.
pub const VERIFY: Name<'static> = Name::literal("verify");

/// Millions of operations per second, counted by the NPB's formulas: what stands for a run of each of these kernels.
pub const MOPS: Figure = Figure::literal("mops", "Mop/s");

/// Says what is solved, for the result block of whoever reads: the class, the edges of the grid (or the one number that is the size), and
/// how often the timed part repeats itself.
pub fn problem(platform: &dyn Platform, class: Class, edges: &[usize], iterations: u32) {
    let size = FixedText::new(format_args!("{}", Edges(edges)));
    let size = Name::new(size.as_str()).expect("numbers with an x between them are a name");
    platform.emit(&Message::Problem { class: Name::literal(class.letter()), size, iterations });
}

/// Lengths as the NPB prints them: `64x64x64`.
struct Edges<'e>(&'e [usize]);

impl fmt::Display for Edges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, edge) in self.0.iter().enumerate() {
            write!(f, "{}{edge}", if index == 0 { "" } else { "x" })?;
        }
        Ok(())
    }
}

/// Runs `body` between `begin` and `end`. Returns what it returns, and the ticks it took.
pub fn phase<R>(platform: &dyn Platform, phase: Name<'static>, body: impl FnOnce() -> R) -> (R, u64) {
    platform.emit(&Message::Begin { phase, tsc: platform.now() });
    let start = platform.now();
    let result = body();
    let end = platform.now();
    platform.emit(&Message::End { phase, tsc: platform.now() });
    (result, end.saturating_sub(start))
}

/// Least time between two progress lines: four a second move a bar, and their exits take less than a thousandth of the run.
const PROGRESS_MS: u64 = 250;

/// Progress of the timed part in `total` units: for a bar on a terminal, for the rates before and after a promotion, and for a
/// policy that may act only some time after the begin. Made inside the phase, and used by vCPU 0 alone.
pub fn progress(platform: &dyn Platform, total: u64) -> Progress<'_> {
    Progress::new(platform, COMPUTE, total, PROGRESS_MS)
}

/// The steps 1 to `total` of the timed part, or as many as the platform wants, with progress lines between them: what the leader's loop
/// goes over.
pub fn steps(platform: &dyn Platform, total: u32) -> impl Iterator<Item = u32> {
    let total = platform.steps_of(total);
    let progress = progress(platform, u64::from(total));
    (1..=total).inspect(move |step| progress.note(u64::from(step - 1)))
}

/// The memory that `layout` asks for, announced as a region of that name. The slices are not touched before they are taken.
pub fn claim<'m, 'a>(
    platform: &dyn Platform,
    arena: &Arena<'m>,
    layout: &Layout,
    name: Name<'static>,
) -> Result<Typed<'m>, KernelError<'a>> {
    let (needed, bytes) = (layout.needed(), arena.bytes());
    let typed = arena.typed(layout).ok_or(KernelError::ArenaTooSmall { needed, bytes })?;
    platform.emit(&Message::Region { name, address: arena.address(), bytes: needed });
    Ok(typed)
}

/// The part of an NPB result block that all of them have: seconds and Mop/s, or ticks where nobody knows the counter's frequency.
pub fn rate(platform: &dyn Platform, operations: f64, ticks: u64) {
    if let Some(seconds) = time(platform, ticks) {
        MOPS.emit(platform, operations / seconds / 1e6);
    }
}

/// Prints the time that is measured and returns it in seconds; prints ticks where nobody knows the counter's frequency, and returns
/// nothing that a rate could be made of.
pub fn time(platform: &dyn Platform, ticks: u64) -> Option<f64> {
    let hz = platform.tsc_hz();
    if hz == 0 {
        result(platform, Name::literal("ticks"), ticks as f64, Name::literal("ticks"));
        return None;
    }
    let seconds = ticks_to_seconds(ticks, hz);
    result(platform, Name::literal("seconds"), seconds, Name::literal("s"));
    Some(seconds)
}

/// A value without a unit, which is compared with a published one.
#[derive(Clone, Copy, Debug)]
pub struct Compared {
    /// What it is called.
    pub name: Name<'static>,
    /// What the published one is called.
    pub reference_name: Name<'static>,
    /// As computed.
    pub value: f64,
    /// As published.
    pub reference: f64,
    /// Largest relative difference that passes.
    pub tolerance: f64,
}

impl Compared {
    /// Whether it passes. A value that is not a number does not.
    pub fn is_right(&self) -> bool {
        ((self.value - self.reference) / self.reference).abs() <= self.tolerance
    }

    /// Prints both values.
    pub fn emit(&self, platform: &dyn Platform) {
        result(platform, self.name, self.value, Name::literal("1"));
        result(platform, self.reference_name, self.reference, Name::literal("1"));
    }
}

/// Prints the verification and turns it into the kernel's end.
pub fn verdict<'a>(platform: &dyn Platform, errors: u64, checked: u64) -> Result<(), KernelError<'a>> {
    let status = if errors == 0 { Status::Pass } else { Status::Fail };
    platform.emit(&Message::Verify { status, errors, checked });
    if errors == 0 { Ok(()) } else { Err(KernelError::VerificationFailed { errors, checked }) }
}

/// Prints one result.
pub fn result(platform: &dyn Platform, name: Name<'static>, value: f64, unit: Name<'static>) {
    platform.emit(&Message::Result { name, value, unit });
}

/// Prints one of several results that are told apart by a number behind their name.
///
/// # Panics
/// When `prefix` is not a name.
pub fn numbered_result(platform: &dyn Platform, prefix: &str, number: u64, value: f64, unit: Name<'static>) {
    let text = FixedText::new(format_args!("{prefix}{number}"));
    let name = Name::new(text.as_str()).expect("a name and a number are a name");
    platform.emit(&Message::Result { name, value, unit });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_right_within_its_tolerance_and_never_when_it_is_no_number() {
        let name = Name::literal("x");
        let compared = |value| Compared { name, reference_name: name, value, reference: -2.0, tolerance: 1e-8 };
        assert!(compared(-2.0).is_right() && compared(-2.0 - 1e-8).is_right());
        assert!(!compared(-2.0 - 3e-8).is_right() && !compared(2.0).is_right());
        assert!(!compared(f64::NAN).is_right() && !compared(f64::INFINITY).is_right());
    }
}
