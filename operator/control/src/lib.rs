//! What the daemon, its clients and the libvirt hook say to each other: JSON over a Unix socket, one message a line.
//!
//! ```text
//!   wideleaf list | info | explain | set | top ─┐
//!   wideleaf attach | detach ───────────────────┼── Request ──▶ /run/wideleaf/control.sock ──▶ wideleafd
//!   libvirt's hook (no wait for the reply) ─────┘ ◀── Reply ──
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`client`] | asks the daemon one thing |
//! | [`peer`], [`server`], [`socket_file`] | who is at the other end, lines from many clients, the file they connect to: for whoever answers |
//! | [`protocol`] | requests, replies, their version |
//! | [`vm`] | the same for the control socket of one VM |
//! | [`view`] | what is said about a VM, with a daemon or without one |
//!
//! The README has an example of every message.

pub mod client;
pub mod peer;
pub mod protocol;
pub mod server;
pub mod socket_file;
pub mod view;
pub mod vm;
mod vm_client;
