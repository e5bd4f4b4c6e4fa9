//! Formatting without allocation.

use core::fmt;

/// Bytes of text that fit into a [`FixedText`]: one line on any console.
pub const TEXT_BYTES: usize = 240;

/// A line of text on the stack. What does not fit is cut off, at a character border.
#[derive(Clone, Copy)]
pub struct FixedText {
    bytes: [u8; TEXT_BYTES],
    length: usize,
}

impl FixedText {
    /// The text that `arguments` print.
    pub fn new(arguments: fmt::Arguments<'_>) -> Self {
        let mut text = Self { bytes: [0; TEXT_BYTES], length: 0 };
        // Our `write_str` never fails; an error of somebody's Display leaves what was printed so far.
        let _ = fmt::write(&mut text, arguments);
        text
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        // Only whole characters are ever stored.
        core::str::from_utf8(&self.bytes[..self.length]).unwrap_or("")
    }
}

impl fmt::Write for FixedText {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let fits = part.floor_char_boundary(TEXT_BYTES - self.length);
        self.bytes[self.length..self.length + fits].copy_from_slice(&part.as_bytes()[..fits]);
        self.length += fits;
        Ok(())
    }
}

impl fmt::Display for FixedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
