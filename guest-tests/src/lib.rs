//! wideleaf-guest-tests
