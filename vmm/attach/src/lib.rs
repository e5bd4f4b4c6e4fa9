//! Guests that somebody else started: QEMU's, with or without libvirt.

pub mod command_line;
pub mod find;
pub mod gate;
pub mod monitor;
pub mod mtree;
pub mod process;
pub mod qmp;
pub mod ram;
pub mod refuse;
pub mod second_level;
pub mod survey;
pub mod virsh;
