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
//! | [`protocol`] | requests, replies, their version |
//! | [`view`] | what is said about a VM, with a daemon or without one |
//!
//! The README has an example of every message.

pub mod client;
pub mod protocol;
pub mod view;
