//! What tests of moved windows share.

use wideleaf_memory::detached::probe;

/// Whether windows cannot be moved here, said with the reason; a failure where `WIDELEAF_REQUIRE` names `uffd_move`.
pub fn are_missing() -> bool {
    let Err(error) = probe() else { return false };
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == "uffd_move"), "WIDELEAF_REQUIRE={required}, and {error}");
    println!("skipped: {error}");
    true
}
