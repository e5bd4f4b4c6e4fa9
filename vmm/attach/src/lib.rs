//! Guests that somebody else started: QEMU's, with or without libvirt.

pub mod command_line;
pub mod find;
pub mod mtree;
pub mod process;
pub mod qmp;
pub mod ram;
