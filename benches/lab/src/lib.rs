//! The laboratory: what researchers run on guests of `wideleaf`, as a library; `main` parses and prints.
//!
//! ```text
//!   experiment ▶ many runs by a plan, in turn ────────────────────────────▶ a file of results, a report
//!   simulate ──▶ a recording through policies; a trace through machines ──▶ table | JSON | plot
//!   predict ───▶ a kernel's accesses replayed on both page sizes ─────────▶ gain and bound, side by side
//!   trace ─────▶ every load and store of a kernel ▶ a file; a file ───────▶ table | JSON
//!   image ─────▶ an initramfs for a Linux guest; the log of its console ──▶ table | JSON
//! ```
//!
//! A run of an experiment is `wideleaf run` in a process of its own; this program has that command as well, hidden, so
//! that an experiment always runs the revision it was built with.

pub mod args;
pub mod experiment;
pub mod image;
pub mod predict;
pub mod simulate;
pub mod trace;
