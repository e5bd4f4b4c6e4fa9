//! wideleaf-memory
