//! A fleet on one machine: what the API server, the scheduler and Helm make of our agent and chart, and what the agent
//! makes of their faults.
//!
//! ```text
//!   fleet-lab serve ◀── admin.sock ── requests of these tests
//!        ▲  ▲  ▲
//!        │  │  └── fleet-lab schedule, nodes, helm
//!        │  └── wideleaf-node ── wideleafd ── QEMU
//!        └── wideleaf-node's account, as the chart makes it
//! ```
//!
//! They skip until `fleet/build` has built the program (`WIDELEAF_REQUIRE=fleet` turns a skip into a failure). Those
//! that take minutes are ignored; `make fleet-lab` runs all.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod agent;
mod chart;
mod control_plane;
mod faults;
mod scale;
mod server;
