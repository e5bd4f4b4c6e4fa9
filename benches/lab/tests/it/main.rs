//! The laboratory's tests, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod counters;
mod experiment;
mod experiment_parts;
mod experiment_reports;
mod help;
mod linux_guest;
mod paths;
mod predict;
mod program;
mod recording;
mod scaled;
mod scripts;
mod trace;
mod traces;
