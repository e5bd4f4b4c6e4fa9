//! The manager and the window mover on a fake host, which can fail at every call.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod audit_on_the_fake_host;
mod manager_on_the_fake_host;
mod market_on_the_fake_host;
mod moving_on_the_fake_mover;
mod nodes_on_the_fake_host;
mod pacing_on_the_fake_host;
mod pauses_on_the_fake_host;
mod recovery_on_the_fake_host;
mod scans_on_the_fake_host;
mod short_of_memory_on_the_fake_host;
mod test_gate;
mod vacating_on_the_fake_mover;
mod watching;
