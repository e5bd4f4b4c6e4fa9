//! wideleafd: looks after the guests of a host.
//!
//! ```text
//!   main ─▶ daemon ─┬─ tick, scout ─▶ engine ─┬─▶ guests ─▶ wideleaf_attach     whom it looks after
//!                   ├─ server ─▶ answers ─────┤   share, guarantee, host_memory  how much each may do, and gets
//!                   └─ metrics ◀── scrape ────┘   rooms, state, carry            what outlives it
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`daemon`] | what is started and ended in which order |
//! | [`engine`] | the table of VMs, and what is answered to whom |
//! | [`guests`] | the door to guests of others; [`host`] has the real ones behind it |
//! | [`share`] | one budget for all VMs |
//! | [`guarantee`], [`host_memory`] | who lacks what was promised; whether the host is short of memory |
//! | [`rooms`] | room in the hugetlb pools |
//! | [`state`], [`carry`] | what outlives the daemon |
//! | [`server`], [`peer`] | the control socket, and who may change things |
//! | [`listen_error`] | why it does not listen |
//! | [`metrics`], [`usage`] | what is scraped, and what the daemon itself takes |
//! | [`config`] | what an operator may say |
//!
//! The README says what an operator sees of each.

pub mod carry;
pub mod config;
pub mod daemon;
pub mod engine;
pub mod guarantee;
pub mod guests;
pub mod host;
pub mod host_memory;
pub mod listen_error;
pub mod metrics;
pub mod peer;
pub mod rooms;
pub mod server;
pub mod share;
pub mod state;
pub mod usage;
