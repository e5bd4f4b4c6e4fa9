//! The protocol's tests, in one program.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod contract;
mod lines;
