//! wideleafd: manages the guests of a host.
//!
//! ```text
//!   main ─▶ daemon ─┬─ tick, scout ─▶ engine ─┬─▶ guests ─▶ wideleaf_attach     the guests
//!                   ├─ server ─▶ answers ─────┤   share, guarantee, host_memory  their shares and guarantees
//!                   └─ metrics ◀── scrape ────┘   rooms, state, carry            what survives a restart
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`daemon`] | parts of the daemon in the order of their start and end |
//! | [`engine`] | the table of VMs, and the answers to requests |
//! | [`guests`] | the interface to external guests; [`host`] has the real ones behind it |
//! | [`block_supply`] | free blocks of 2 MiB for all VMs |
//! | [`share`] | one budget for all VMs |
//! | [`host_memory`] | whether the host is short of memory |
//! | [`pool_reservations`] | room in the hugetlb pools |
//! | [`state`], [`persistent_counters`] | data that survives the daemon |
//! | [`server`], [`permissions`] | the control socket, and permissions for changes |
//! | [`listen_error`] | reasons why it does not listen |
//! | [`metrics`], [`usage`] | the metrics, and the daemon's own use of the host |
//! | [`config`] | the configuration file |
//!
//! The README describes what an operator sees of each.

pub mod block_supply;
pub mod config;
pub mod daemon;
pub mod engine;
pub mod guests;
pub mod host;
pub mod host_memory;
pub mod listen_error;
pub mod metrics;
pub mod permissions;
pub mod persistent_counters;
pub mod pool_reservations;
pub mod server;
pub mod share;
pub mod state;
pub mod usage;
