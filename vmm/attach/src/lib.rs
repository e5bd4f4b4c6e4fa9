//! Guests that somebody else started: QEMU's, with or without libvirt.

pub mod command_line;
pub mod mtree;
pub mod qmp;
