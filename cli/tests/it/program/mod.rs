//! The program under test: `wideleaf`.

use wideleaf_testing::scratch::Scratch;

/// A folder for one test of the program: the one in `WIDELEAF_BIN`, or the one built together with this test.
pub fn new_scratch() -> Scratch {
    Scratch::of(std::env::var_os("WIDELEAF_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_wideleaf").into()))
}
