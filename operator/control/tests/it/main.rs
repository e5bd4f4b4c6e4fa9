//! The control socket's tests, in one program.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod readme;
mod server_stop;
mod vm_readme;
