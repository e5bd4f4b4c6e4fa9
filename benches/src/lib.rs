//! wideleaf-benches
