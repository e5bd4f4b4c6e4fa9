//! Runs the daemon.

fn main() {}
