//! The laboratory's tests, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod experiment;
mod experiment_parts;
mod experiment_reports;
mod linux_guest;
mod predict;
mod program;
mod recording;
mod trace;
mod traces;
