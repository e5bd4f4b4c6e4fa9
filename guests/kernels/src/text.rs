//! Formatting without allocation and without floats, for lines of a guest that has no heap: a text that is too long is
//! cut off, never refused.

use core::fmt;

/// Capacity of a [`FixedText`] in bytes: one line on any console. Every refusal fits, even one that repeats a word
/// as long as a command line.
pub const TEXT_BYTES: usize = 240;

/// A line of text on the stack. Text beyond its capacity is cut off at a character border.
#[derive(Clone, Copy)]
pub struct FixedText {
    bytes: [u8; TEXT_BYTES],
    length: usize,
}

impl FixedText {
    /// Formats `arguments` into a text.
    pub fn new(arguments: fmt::Arguments<'_>) -> Self {
        let mut text = Self { bytes: [0; TEXT_BYTES], length: 0 };
        // Our `write_str` never fails; an error of a foreign Display keeps the text printed so far.
        let _ = fmt::write(&mut text, arguments);
        text
    }

    /// The formatted text.
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

/// A number of bytes for human readers, in the largest unit that is exact.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        let exact = UNITS.into_iter().find(|(unit, _)| self.0 > 0 && self.0.is_multiple_of(*unit));
        let (unit, name) = exact.unwrap_or((1, "B"));
        write!(f, "{} {name}", self.0 / unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact_in_their_largest_unit() {
        let cases = [(0, "0 B"), (4095, "4095 B"), (4096, "4 KiB"), (5 << 19, "2560 KiB"), (3 << 20, "3 MiB")];
        for (bytes, text) in cases {
            assert_eq!(FixedText::new(format_args!("{}", Size(bytes))).as_str(), text);
        }
        assert_eq!(FixedText::new(format_args!("{}", Size(1 << 40))).as_str(), "1 TiB");
    }
}
