//! Messages between the daemon, its clients and the libvirt hook: JSON over a Unix socket, one message a line.
//!
//! ```text
//!   wideleaf list | info | explain | set | top ─┐
//!   wideleaf attach | detach ───────────────────┼── Request ──▶ /run/wideleaf/control.sock ──▶ wideleafd
//!   libvirt's hook (no wait for the reply) ─────┘ ◀── Reply ──
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`client`] | sends one request to the daemon |
//! | [`peer`], [`server`], [`socket_file`] | for servers: the peer, lines from many clients, the socket's file |
//! | [`tcp`] | for servers: a port of TCP |
//! | [`passed_files`] | open files that a client passes with its request |
//! | [`map`] | the windows of a VM, one by one |
//! | [`protocol`] | requests, replies, their version |
//! | [`vm`] | protocol of the control socket of one VM |
//! | [`view`] | description of a VM, with a daemon or without one |
//!
//! The README has an example of every message.

pub mod client;
pub mod map;
pub mod numa;
pub mod passed_files;
pub mod peer;
pub mod protocol;
pub mod server;
pub mod socket_file;
pub mod tcp;
mod units;
pub mod view;
pub mod vm;
