//! The daemon's tests, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod alerts;
mod ansible;
mod image;
mod killed;
mod package;
#[path = "../place/mod.rs"]
mod place;
mod proxmox;
mod runs;
mod wideleafd;
