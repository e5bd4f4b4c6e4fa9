//! What is left of a panic that was caught: its words. A panic is a mistake of ours, and must not become a second one: whoever
//! has something half done (a guest that is paused, memory that is nowhere else) catches it and puts that right first.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Somebody panicked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("panicked: {0}")]
pub struct Panicked(String);

impl Panicked {
    /// `payload` is what was caught.
    pub(crate) fn new(payload: &(dyn Any + Send)) -> Panicked {
        let literal = payload.downcast_ref::<&str>().copied();
        let text = literal.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        Panicked(text.unwrap_or("without a word").to_owned())
    }
}

/// Calls `act`. Who asks sees to what a panic may have left half done.
///
/// # Errors
/// [`Panicked`], if it does.
pub fn caught<T>(act: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(act)).map_err(|payload| Panicked::new(payload.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_keeps_its_words_whatever_they_are_made_of() {
        let words = |act: fn()| caught(act).expect_err("it panics").to_string();
        assert_eq!(words(|| panic!("as it is")), "panicked: as it is");
        assert_eq!(words(|| panic!("{} of {}", 3, 4)), "panicked: 3 of 4");
        assert_eq!(words(|| std::panic::panic_any(5)), "panicked: without a word");
    }
}
