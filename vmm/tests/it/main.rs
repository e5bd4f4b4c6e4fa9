//! Guests of a few instructions on real KVM. Without `/dev/kvm` every test here reports that it was skipped;
//! `WIDELEAF_REQUIRE=kvm` makes that a failure. To run them on a machine without KVM:
//!
//! ```text
//! cargo test -p wideleaf-vmm --no-run
//! guest-tests/lab/lab npt --file target/…/it-…:/it -- /it --test-threads 1
//! ```
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod boot;
mod snapshot;
mod tiny;
