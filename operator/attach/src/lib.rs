//! Guests of other VMMs: finds them, examines them without changing them, and puts them under `memory`'s manager.
//!
//! ```text
//!   find ──▶ VmProcess ─┬─▶ survey    one look: view, windows, explanation; changes nothing
//!   name, pid, socket   └─▶ session   a manager's loop over its address space, its gate watched once a second
//!
//!   places   paths of what follows
//!   process  /proc              ┐           ┌─ ram           where RAM is, of what kind, whether it can be huge
//!   monitor  QEMU's, questions  ├─ read by ─┼─ gate          whether it is to be left alone
//!   virsh    libvirt's          ┘           ├─ second_level  what KVM maps
//!                                         └─ guest_pages   what the guest itself maps
//! ```
//!
//! A guest is never stopped, tainted or changed except by promoting and splitting its host pages. The README names
//! the privileges for that. This crate has no `unsafe`: `memory` has the system calls.

mod arguments;
pub mod command_line;
mod events;
pub mod find;
pub mod gate;
pub mod guarantee;
mod guest_pages;
mod heat;
pub mod host_clock;
pub mod live_view;
mod mapping;
pub mod monitor;
pub mod mtree;
pub mod numa;
mod other_vmms;
mod placed;
pub mod places;
pub mod process;
pub mod qmp;
pub mod ram;
mod ram_watch;
mod reasons;
pub mod refuse;
pub mod registers;
pub mod second_level;
pub mod session;
pub mod survey;
pub mod virsh;
mod window_map;
mod work;

pub use places::Places;
pub use process::VmProcess;
pub use session::{AttachError, Attached, Settings};
pub use survey::Survey;
