//! The daemon's tests, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod killed;
mod package;
#[path = "../place/mod.rs"]
mod place;
mod runs;
mod wideleafd;
