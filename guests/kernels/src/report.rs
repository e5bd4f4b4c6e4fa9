//! Output of a kernel that works on typed memory: its region, phases, results and verification.

use core::fmt;

use wideleaf_protocol::{Message, Name, Status};

use crate::arena::{Layout, Typed};
use crate::npb::classes::Class;
use crate::platform::ticks_to_seconds;
use crate::rounds::Progress;
use crate::text::FixedText;
use crate::{Arena, KernelError, Platform};

/// The number that stands for a run: a result that the kernel prints if the counter's frequency is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Name of the result.
    pub name: Name<'static>,
    /// Unit of the result.
    pub unit: Name<'static>,
}

impl Figure {
    /// Creates a figure of this name and unit.
    ///
    /// # Panics
    /// Panics if one of them is not a valid [`Name`].
    pub const fn literal(name: &'static str, unit: &'static str) -> Self {
        Self { name: Name::literal(name), unit: Name::literal(unit) }
    }

    /// Prints the figure with its value.
    pub fn emit(&self, platform: &dyn Platform, value: f64) {
        result(platform, self.name, value, self.unit);
    }
}

/// Phase of the untimed preparation.
pub const INIT: Name<'static> = Name::literal("init");
/// Phase of the timed part.
pub const COMPUTE: Name<'static> = Name::literal("compute");
/// Phase of the untimed check.
pub const VERIFY: Name<'static> = Name::literal("verify");

/// Millions of operations per second, counted by the NPB's formulas: the figure of each of these kernels.
pub const MOPS: Figure = Figure::literal("mops", "Mop/s");

/// Prints the problem for the reader's result block: the class, the edges of the grid (or the one number that is
/// the size), and the number of iterations of the timed part.
pub fn problem(platform: &dyn Platform, class: Class, edges: &[usize], iterations: u32) {
    let size = FixedText::new(format_args!("{}", Edges(edges)));
    let size = Name::new(size.as_str()).expect("numbers with an x between them are a name");
    platform.emit(&Message::Problem { class: Name::literal(class.letter()), size, iterations });
}

/// Lengths in the NPB's format: `64x64x64`.
struct Edges<'e>(&'e [usize]);

impl fmt::Display for Edges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, edge) in self.0.iter().enumerate() {
            write!(f, "{}{edge}", if index == 0 { "" } else { "x" })?;
        }
        Ok(())
    }
}

/// Runs `body` between `begin` and `end` lines. Returns its result, and the ticks it took.
pub fn phase<R>(platform: &dyn Platform, phase: Name<'static>, body: impl FnOnce() -> R) -> (R, u64) {
    platform.emit(&Message::Begin { phase, tsc: platform.now() });
    let start = platform.now();
    let result = body();
    let end = platform.now();
    platform.emit(&Message::End { phase, tsc: platform.now() });
    (result, end.saturating_sub(start))
}

/// Minimum time between two progress lines in milliseconds: four a second move a bar, and their exits take less
/// than a thousandth of the run.
pub const PROGRESS_MS: u64 = 250;

/// Progress of the timed part in `total` units: for a bar on a terminal, for the rates before and after a
/// promotion, and for a policy that may act only some time after the beginning. It is made inside the phase, and
/// only vCPU 0 uses it.
pub fn progress(platform: &dyn Platform, total: u64) -> Progress<'_> {
    Progress::new(platform, COMPUTE, total, PROGRESS_MS)
}

/// The steps 1 to `total` of the timed part, or as many as the platform wants, with progress lines between them,
/// for the leader's loop.
pub fn steps(platform: &dyn Platform, total: u32) -> impl Iterator<Item = u32> {
    let total = platform.steps_of(total);
    let progress = progress(platform, u64::from(total));
    (1..=total).inspect(move |step| progress.note(u64::from(step - 1)))
}

/// The memory of `layout`, announced as a region of that name. A slice is not touched before it is taken.
pub fn claim<'m, 'a>(
    platform: &dyn Platform,
    arena: &Arena<'m>,
    layout: &Layout,
    name: Name<'static>,
) -> Result<Typed<'m>, KernelError<'a>> {
    claim_with_temporary(platform, arena, layout, name, layout.needed())
}

/// The same where only the first `lasting` bytes are used all the time: the rest is a region `temporary`.
pub fn claim_with_temporary<'m, 'a>(
    platform: &dyn Platform,
    arena: &Arena<'m>,
    layout: &Layout,
    name: Name<'static>,
    lasting: u64,
) -> Result<Typed<'m>, KernelError<'a>> {
    let (needed, bytes, address) = (layout.needed(), arena.bytes(), arena.address());
    let typed = arena.typed(layout).ok_or(KernelError::ArenaTooSmall { needed, bytes })?;
    platform.emit(&Message::Region { name, address, bytes: lasting });
    if lasting < needed {
        let name = Name::literal("temporary");
        platform.emit(&Message::Region { name, address: address + lasting, bytes: needed - lasting });
    }
    Ok(typed)
}

/// Prints the common part of the NPB result blocks: seconds and Mop/s, or ticks if the counter's frequency is
/// unknown.
pub fn rate(platform: &dyn Platform, operations: f64, ticks: u64) {
    if let Some(seconds) = time(platform, ticks) {
        MOPS.emit(platform, operations / seconds / 1e6);
    }
}

/// Prints the measured time and returns it in seconds. If the counter's frequency is unknown, prints ticks and
/// returns `None`, since there is no rate.
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

/// A value without a unit, and the published value for comparison.
#[derive(Clone, Copy, Debug)]
pub struct Compared {
    /// Name of the value.
    pub name: Name<'static>,
    /// Name of the published value.
    pub reference_name: Name<'static>,
    /// Value as computed.
    pub value: f64,
    /// Value as published.
    pub reference: f64,
    /// Largest relative difference that passes.
    pub tolerance: f64,
}

impl Compared {
    /// Whether it passes. NaN does not.
    pub fn is_right(&self) -> bool {
        ((self.value - self.reference) / self.reference).abs() <= self.tolerance
    }

    /// Prints both values.
    pub fn emit(&self, platform: &dyn Platform) {
        result(platform, self.name, self.value, Name::literal("1"));
        result(platform, self.reference_name, self.reference, Name::literal("1"));
    }
}

/// Prints the verification and turns it into the kernel's result.
pub fn verdict<'a>(platform: &dyn Platform, errors: u64, checked: u64) -> Result<(), KernelError<'a>> {
    let status = if errors == 0 { Status::Pass } else { Status::Fail };
    platform.emit(&Message::Verify { status, errors, checked });
    if errors == 0 { Ok(()) } else { Err(KernelError::VerificationFailed { errors, checked }) }
}

/// Prints one result. A value that is no finite number has no line: the protocol has no word for it, and a kernel's
/// verification counts it as wrong.
pub fn result(platform: &dyn Platform, name: Name<'_>, value: f64, unit: Name<'_>) {
    if value.is_finite() {
        platform.emit(&Message::Result { name, value, unit });
    }
}

/// Prints one of several results that are distinguished by a number behind their name.
///
/// # Panics
/// Panics if `prefix` is not a name.
pub fn numbered_result(platform: &dyn Platform, prefix: &str, number: u64, value: f64, unit: Name<'static>) {
    let text = FixedText::new(format_args!("{prefix}{number}"));
    let name = Name::new(text.as_str()).expect("a name and a number are a name");
    result(platform, name, value, unit);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_right_within_its_tolerance_and_never_if_it_is_nan() {
        let name = Name::literal("x");
        let compared = |value| Compared { name, reference_name: name, value, reference: -2.0, tolerance: 1e-8 };
        assert!(compared(-2.0).is_right() && compared(-2.0 - 1e-8).is_right());
        assert!(!compared(-2.0 - 3e-8).is_right() && !compared(2.0).is_right());
        assert!(!compared(f64::NAN).is_right() && !compared(f64::INFINITY).is_right());
    }
}
