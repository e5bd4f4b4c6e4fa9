//! wideleafd: looks after the guests of a host.
pub mod carry;
pub mod config;
pub mod daemon;
pub mod engine;
pub mod guarantee;
pub mod guests;
pub mod host;
pub mod host_memory;
pub mod metrics;
pub mod peer;
pub mod rooms;
pub mod server;
pub mod share;
pub mod state;
pub mod usage;
