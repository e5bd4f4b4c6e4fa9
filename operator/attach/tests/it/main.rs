//! Guests of QEMU, found, looked at and managed, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod libvirt;
mod qemu;
mod recoveries;
mod sessions;
mod surveys;
mod userfaultfd;
