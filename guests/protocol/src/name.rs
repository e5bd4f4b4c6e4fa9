//! A word that is valid in a protocol line.

use core::fmt;

/// A name or a unit in a protocol line: printable ASCII, at least one character, no space and no `=`.
///
/// The type guarantees that every [`Message`](crate::Message) prints as one line that parses back to itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name<'a>(&'a str);

impl<'a> Name<'a> {
    /// Creates a name from external text; `None` if it is empty or has a forbidden character.
    pub const fn new(text: &'a str) -> Option<Self> {
        if is_name(text.as_bytes()) { Some(Self(text)) } else { None }
    }

    /// Creates a name from source text. Use it in a `const`, so that a mistake stops the build.
    ///
    /// # Panics
    /// Panics if `text` is not a name.
    pub const fn literal(text: &'a str) -> Self {
        assert!(is_name(text.as_bytes()), "a protocol name is printable ASCII without space and '='");
        Self(text)
    }

    /// The text of the name.
    pub const fn as_str(self) -> &'a str {
        self.0
    }
}

const fn is_name(bytes: &[u8]) -> bool {
    let mut index = 0;
    while index < bytes.len() {
        if !bytes[index].is_ascii_graphic() || bytes[index] == b'=' {
            return false;
        }
        index += 1;
    }
    !bytes.is_empty()
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl fmt::Debug for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0, f)
    }
}

impl PartialEq<str> for Name<'_> {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for Name<'_> {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}
