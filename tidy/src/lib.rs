//! Checks of the repository itself; all of them are tests (`tests/house`).
//!
//! ```text
//!   dependencies   crates and folders depend downwards only; unsafe code is in a few modules
//!   cycles         files of a crate import each other one way
//!   decisions      the index of docs/decisions.md is complete
//!   documents      files that documents and comments name exist
//!   size           no folder holds more than a quarter of the lines; the README is short
//!   english        habits that slow a reader down, each with a limit that only goes down
//!   refusals       what a program prints as it refuses begins with "cannot"
//!   supply_chain   licences and sources of the crates that are built in
//! ```
