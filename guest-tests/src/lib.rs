//! Checks of what a guest sees: contents, mapping levels, and both in the labs. All of them are tests (`tests/`).
