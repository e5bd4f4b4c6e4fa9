//! Message of a caught panic. A panic is a defect of wideleaf and must not cause a second one: code with half-done
//! work (a paused guest, memory that is nowhere else) catches it and repairs that first.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Message of a panic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("panicked: {0}")]
pub struct Panicked(String);

impl Panicked {
    /// Makes it from the caught `payload`.
    pub(crate) fn new(payload: &(dyn Any + Send)) -> Panicked {
        let literal = payload.downcast_ref::<&str>().copied();
        let text = literal.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        Panicked(text.unwrap_or("without a message").to_owned())
    }
}

/// Calls `act`. The caller handles half-done work after a panic.
///
/// # Errors
/// [`Panicked`], after a panic.
pub fn caught<T>(act: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(act)).map_err(|payload| Panicked::new(payload.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_keeps_its_message_of_any_type() {
        let words = |act: fn()| caught(act).expect_err("it panics").to_string();
        assert_eq!(words(|| panic!("as it is")), "panicked: as it is");
        assert_eq!(words(|| panic!("{} of {}", 3, 4)), "panicked: 3 of 4");
        assert_eq!(words(|| std::panic::panic_any(5)), "panicked: without a message");
    }
}
