//! The grammar of a guest's command line; a native run takes the same words.
//!
//! ```text
//! [KERNEL] key=value key=value …
//!
//! gups log2_words=25 guest_pages=2m vcpus=2
//! kernel=gups log2_words=25 guest_pages=2m vcpus=2          the same
//! ```
//!
//! Words are separated by white space; only the first may lack `=`, and is then the kernel's name. The keys below
//! belong to the image, all others to the kernel. A key given twice is refused, whether it is the image's or the
//! kernel's.

use core::fmt;

/// Kernel to run: `kernel=gups`, or `gups` as the first word.
pub const KEY_KERNEL: &str = "kernel";
/// Page size of the guest's tables: `4k`, `2m` or `1g` ([`GuestPage`](crate::GuestPage)); default `2m`. Only the
/// PVH entry builds tables; at the direct entry the VMM has built them, and the key must match.
pub const KEY_GUEST_PAGES: &str = "guest_pages";
/// Number of vCPUs that take part, 1 to [`VCPUS_MAX`](crate::VCPUS_MAX). Default: all vCPUs of the machine, if it
/// reports their number.
pub const KEY_VCPUS: &str = "vcpus";
/// Ticks of the time stamp counter per second, for a machine that does not report it.
pub const KEY_TSC_HZ: &str = "tsc_hz";
/// The keys that belong to the image and not to the kernel.
pub const IMAGE_KEYS: [&str; 4] = [KEY_KERNEL, KEY_GUEST_PAGES, KEY_VCPUS, KEY_TSC_HZ];

/// Prefix of ignored keys: QEMU's microvm adds one for every virtio device, for Linux to find it.
pub const IGNORED_KEY_PREFIX: &str = "virtio_mmio.";

/// Longest command line that an image reads, in bytes.
pub const COMMAND_LINE_BYTES_MAX: usize = 2048;

/// One `key=value` of a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument<'a> {
    /// Text before the first `=`.
    pub key: &'a str,
    /// Text after the first `=`.
    pub value: &'a str,
}

/// A command line of well-formed words. The image and the kernel check their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandLine<'a> {
    text: &'a str,
}

impl<'a> CommandLine<'a> {
    /// Checks the form of every word.
    pub fn new(text: &'a str) -> Result<Self, CommandLineError<'a>> {
        let line = Self { text };
        for (index, word) in text.split_ascii_whitespace().enumerate() {
            let argument = argument_of(index, word).ok_or(CommandLineError::NotAPair { word })?;
            let same_key = line.arguments().filter(|other| other.key == argument.key);
            if same_key.count() > 1 {
                return Err(CommandLineError::DuplicateKey { key: argument.key });
            }
        }
        Ok(line)
    }

    /// Every argument in the order given; a bare first word comes out as `kernel=WORD`.
    pub fn arguments(self) -> impl Iterator<Item = Argument<'a>> {
        let words = self.text.split_ascii_whitespace().enumerate();
        let arguments = words.filter_map(|(index, word)| argument_of(index, word));
        arguments.filter(|argument| !argument.key.starts_with(IGNORED_KEY_PREFIX))
    }

    /// The arguments that belong to the kernel.
    pub fn kernel_arguments(self) -> impl Iterator<Item = Argument<'a>> {
        self.arguments().filter(|argument| !IMAGE_KEYS.contains(&argument.key))
    }

    /// The value of a key; `None` if it is absent.
    pub fn value(self, key: &str) -> Option<&'a str> {
        self.arguments().find(|argument| argument.key == key).map(|argument| argument.value)
    }

    /// The line as it was given.
    pub const fn as_str(self) -> &'a str {
        self.text
    }
}

fn argument_of(index: usize, word: &str) -> Option<Argument<'_>> {
    match word.split_once('=') {
        Some(("", _)) => None,
        Some((key, value)) => Some(Argument { key, value }),
        None if index == 0 => Some(Argument { key: KEY_KERNEL, value: word }),
        None => None,
    }
}

/// Most bytes of a word that a message repeats. Every valid word is shorter, and a panic line of 240 bytes has room
/// for the rest of the message, which contains the remedy.
const REPEATED_BYTES_MAX: usize = 32;

/// A word of the command line as a message repeats it: one that is too long ends with `...`.
#[derive(Clone, Copy, Debug)]
pub struct Repeated<'a>(pub &'a str);

impl fmt::Display for Repeated<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(word) = self;
        let shown = word.floor_char_boundary(REPEATED_BYTES_MAX);
        write!(f, "{}{}", &word[..shown], if shown < word.len() { "..." } else { "" })
    }
}

/// Reason why a command line is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandLineError<'a> {
    /// A word is not `key=value`.
    NotAPair {
        /// The malformed word.
        word: &'a str,
    },
    /// A key is given twice.
    DuplicateKey {
        /// The repeated key.
        key: &'a str,
    },
}

impl fmt::Display for CommandLineError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAPair { word } => {
                let word = Repeated(word);
                write!(f, "\"{word}\" is not key=value (only the first word may be a kernel's name)")
            }
            Self::DuplicateKey { key } => write!(f, "{}= is given twice", Repeated(key)),
        }
    }
}

impl core::error::Error for CommandLineError<'_> {}

/// A size on the command line: a decimal number with an optional K, M, G or T (powers of 1024, either case); a bare
/// number is bytes. `None` if it is invalid or does not fit 64 bits.
pub fn parse_size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        b'T' | b't' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    parse_count(digits)?.checked_mul(1 << shift)
}

/// A count on the command line: decimal digits only. `None` if it is invalid or does not fit 64 bits.
pub fn parse_count(text: &str) -> Option<u64> {
    // `parse` alone would take a leading plus sign.
    text.as_bytes().first()?.is_ascii_digit().then(|| text.parse().ok())?
}
