//! The program under test: `wideleaf-lab`.

use wideleaf_testing::scratch::Scratch;

/// A folder for one test of the program that was built together with this test.
pub fn new_scratch() -> Scratch {
    Scratch::of(env!("CARGO_BIN_EXE_wideleaf-lab"))
}
