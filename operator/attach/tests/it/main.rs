//! Guests of QEMU, found, looked at and managed, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod balloons;
mod libvirt;
mod qemu;
mod recoveries;
mod sessions;
mod snapshots;
mod surveys;
mod userfaultfd;
