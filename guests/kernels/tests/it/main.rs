//! The kernels' tests, in one program.

mod applications;
mod gups;
mod npb;
mod phases;
mod readme;
mod runner;
mod runs;
mod table;
mod test_pattern;
