//! wideleaf
