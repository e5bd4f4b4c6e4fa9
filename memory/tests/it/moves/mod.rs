//! Common part of the tests of moved windows.

use wideleaf_memory::detached::probe;

/// Whether windows cannot be moved here, printed with the reason; a failure if `WIDELEAF_REQUIRE` names
/// `uffd_move`.
pub fn are_missing() -> bool {
    let Err(error) = probe() else { return false };
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == "uffd_move"), "WIDELEAF_REQUIRE={required}, and {error}");
    println!("skipped: {error}");
    true
}
