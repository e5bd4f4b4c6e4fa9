//! The simulator's tests, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod kept_counts;
mod managed;
mod readme;
mod replay;
mod shortage;
mod walk_cost;
mod walk_gups;
mod walk_machines;
mod walk_nested;
mod walk_nodes;
