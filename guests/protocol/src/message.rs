//! The lines a guest prints, as one typed enum with an encoder ([`Display`](core::fmt::Display)) and a parser
//! ([`parse`]).
//!
//! ```text
//! @wideleaf hello version=1 kernel=gups vcpus=2 guest_page=2m tsc_hz=2500000000 entry=direct
//! @wideleaf region name=table address=0x400000 bytes=268435456
//! @wideleaf begin phase=update tsc=81250000000
//! @wideleaf progress phase=update tsc=81300000000 done=1300000 total=134217728
//! @wideleaf end phase=update tsc=86412000000
//! @wideleaf result name=gups value=0.065 unit=GUP/s
//! @wideleaf gaps vcpu=0 count=1048576 p50_ns=1900 p99_ns=2100 p999_ns=4400 max_ns=310000
//! @wideleaf verify status=pass errors=0 checked=33554432
//! @wideleaf exit code=0
//! ```
//!
//! A kernel with classes prints its class after `hello`:
//!
//! ```text
//! @wideleaf problem class=A size=256x256x128 iterations=6
//! ```
//!
//! A line begins with [`PREFIX`], then a verb, then `key=value` pairs separated by single spaces, in any order, each
//! key exactly once. Everything else on the console is not ours. The rest of a `panic` line is its message.

use core::fmt;

use crate::{ExitCode, Name};

/// Prefix of each of our lines.
pub const PREFIX: &str = "@wideleaf ";

/// One line from the guest. The variants are the verbs, the fields are the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Message<'a> {
    /// First line of every run with a known kernel.
    Hello {
        /// Protocol version of the guest, [`PROTOCOL_VERSION`](crate::PROTOCOL_VERSION) when it was built.
        version: u32,
        /// Kernel that is about to run.
        kernel: Name<'a>,
        /// Number of vCPUs (native: threads) that take part.
        vcpus: u32,
        /// Page size of the guest's own page tables (native: the one that the process asked for).
        guest_page: GuestPage,
        /// Time stamp counter ticks per second; 0 if unknown, and then no result is in seconds.
        tsc_hz: u64,
        /// How the kernel was started.
        entry: Entry,
    },
    /// The problem of a kernel with classes, in the words of the NPB's result block. Older guests do not print this
    /// line.
    Problem {
        /// Letter of the class.
        class: Name<'a>,
        /// One number, or the edges of a grid with an `x` between them.
        size: Name<'a>,
        /// Number of iterations of the timed part; 0 for a kernel without iterations.
        iterations: u32,
    },
    /// Range of the kernel's data: half-open, `[address, address + bytes)`.
    Region {
        /// Contents of the range.
        name: Name<'a>,
        /// GPA in a guest image (which maps memory one to one), virtual address in a process.
        address: u64,
        /// Length of the range in bytes.
        bytes: u64,
    },
    /// A phase begins: the host reads its counters on this line.
    Begin {
        /// Name of the phase.
        phase: Name<'a>,
        /// Time stamp counter when the guest began to write this line.
        tsc: u64,
    },
    /// A phase has ended: the host reads its counters again.
    End {
        /// Name of the phase.
        phase: Name<'a>,
        /// Time stamp counter when the guest began to write this line.
        tsc: u64,
    },
    /// Progress of a phase. The host computes the rate over any section from two of these.
    Progress {
        /// Name of the running phase.
        phase: Name<'a>,
        /// Time stamp counter at which `done` was true.
        tsc: u64,
        /// Units of work done since the phase began, over all vCPUs.
        done: u64,
        /// Units of work planned; 0 if the time decides.
        total: u64,
    },
    /// One measured number.
    Result {
        /// Name of the measured quantity.
        name: Name<'a>,
        /// Value of the result.
        value: f64,
        /// Its unit, for instance `GUP/s` or `s`.
        unit: Name<'a>,
    },
    /// Interruptions of a vCPU: the distribution of the time that one small batch of work took.
    Gaps {
        /// vCPU of these batches.
        vcpu: u32,
        /// Number of measured batches.
        count: u64,
        /// Median (p50), in nanoseconds.
        p50_ns: u64,
        /// 99th percentile, in nanoseconds.
        p99_ns: u64,
        /// 99.9th percentile, in nanoseconds.
        p999_ns: u64,
        /// The longest batch, in nanoseconds.
        max_ns: u64,
    },
    /// Memory differs from what the kernel wrote. At most one line per run, for the first such word.
    Mismatch(Mismatch),
    /// Result of the kernel's own verification.
    Verify {
        /// Whether the kernel passed by its own rule.
        status: Status,
        /// Number of wrong words.
        errors: u64,
        /// Number of checked words.
        checked: u64,
    },
    /// The guest gives up, with a reason. Control characters in it are printed as spaces.
    Panic {
        /// One sentence, to the end of the line.
        message: &'a str,
    },
    /// Last line of every run; the same code is then written to the exit port.
    Exit {
        /// Reason why the run ended.
        code: ExitCode,
    },
}

/// A word of memory with a wrong value (verb `mismatch`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Address of the word, in the same space as [`Message::Region`]'s.
    pub address: u64,
    /// Value that was written there last.
    pub expected: u64,
    /// Value that was read.
    pub found: u64,
    /// Kind of the value that was found.
    pub kind: MismatchKind,
}

/// A set of words for the variants of an enum: one place for both directions.
macro_rules! words {
    ($(#[$meta:meta])* $type:ident { $($(#[$doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type { $($(#[$doc])* $variant),+ }

        impl $type {
            /// Every variant, in the order of declaration.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The word for this variant in a line or on the command line.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }

            /// The variant of a word; `None` for an undefined word.
            pub fn from_word(word: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.as_str() == word)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

words! {
    /// Page size of the guest's own tables, in the words of the command line's `guest_pages=`.
    GuestPage {
        /// 4 KiB base pages.
        Base4K = "4k",
        /// 2 MiB huge pages.
        Huge2M = "2m",
        /// 1 GiB giant pages.
        Giant1G = "1g",
    }
}

impl GuestPage {
    /// Size of one page in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Base4K => 1 << 12,
            Self::Huge2M => 1 << 21,
            Self::Giant1G => 1 << 30,
        }
    }

    /// The page size with that many bytes; `None` if x86-64 has no such page.
    pub fn from_bytes(bytes: u64) -> Option<Self> {
        Self::ALL.iter().copied().find(|page| page.bytes() == bytes)
    }
}

words! {
    /// How a kernel was started.
    Entry {
        /// In a guest, through the PVH entry and the image's own boot code.
        Pvh = "pvh",
        /// In a guest, with vCPUs that the VMM started in 64-bit ring 3.
        Direct = "direct",
        /// As an ordinary process on the host.
        Native = "native",
        /// As a process of a Linux guest ([`linux`](crate::linux)).
        Linux = "linux",
    }
}

words! {
    /// Outcome of a verification.
    Status {
        /// The verification passed.
        Pass = "pass",
        /// The verification failed.
        Fail = "fail",
    }
}

words! {
    /// Kind of a value that was found instead of the expected one. It is only a hint for the reader: any value can
    /// occur by chance.
    MismatchKind {
        /// Zero, as in a page that was dropped and faulted in anew.
        Zero = "zero",
        /// An earlier value of the same word, as in a copy taken too soon.
        Stale = "stale",
        /// A value that another word has or had, as in a page at the wrong place.
        Elsewhere = "elsewhere",
        /// A value that this run never wrote.
        Foreign = "foreign",
    }
}

impl fmt::Display for Message<'_> {
    /// Writes the line without its line break.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        match self {
            Self::Hello { version, kernel, vcpus, guest_page, tsc_hz, entry } => write!(
                f,
                "hello version={version} kernel={kernel} vcpus={vcpus} guest_page={guest_page} tsc_hz={tsc_hz} \
                 entry={entry}"
            ),
            Self::Problem { class, size, iterations } => {
                write!(f, "problem class={class} size={size} iterations={iterations}")
            }
            Self::Region { name, address, bytes } => {
                write!(f, "region name={name} address={address:#x} bytes={bytes}")
            }
            Self::Begin { phase, tsc } => write!(f, "begin phase={phase} tsc={tsc}"),
            Self::End { phase, tsc } => write!(f, "end phase={phase} tsc={tsc}"),
            Self::Progress { phase, tsc, done, total } => {
                write!(f, "progress phase={phase} tsc={tsc} done={done} total={total}")
            }
            Self::Result { name, value, unit } => write!(f, "result name={name} value={value:?} unit={unit}"),
            Self::Gaps { vcpu, count, p50_ns, p99_ns, p999_ns, max_ns } => write!(
                f,
                "gaps vcpu={vcpu} count={count} p50_ns={p50_ns} p99_ns={p99_ns} p999_ns={p999_ns} max_ns={max_ns}"
            ),
            Self::Mismatch(Mismatch { address, expected, found, kind }) => {
                write!(f, "mismatch address={address:#x} expected={expected:#x} found={found:#x} kind={kind}")
            }
            Self::Verify { status, errors, checked } => {
                write!(f, "verify status={status} errors={errors} checked={checked}")
            }
            Self::Panic { message } => {
                f.write_str("panic message=")?;
                for part in message.split_inclusive(char::is_control) {
                    let text = part.strip_suffix(char::is_control);
                    f.write_str(text.unwrap_or(part))?;
                    if text.is_some() {
                        f.write_str(" ")?;
                    }
                }
                Ok(())
            }
            Self::Exit { code } => write!(f, "exit code={}", code.port_value()),
        }
    }
}

impl Message<'_> {
    /// Verb of this message, as printed.
    pub const fn verb(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "hello",
            Self::Problem { .. } => "problem",
            Self::Region { .. } => "region",
            Self::Begin { .. } => "begin",
            Self::End { .. } => "end",
            Self::Progress { .. } => "progress",
            Self::Result { .. } => "result",
            Self::Gaps { .. } => "gaps",
            Self::Mismatch(_) => "mismatch",
            Self::Verify { .. } => "verify",
            Self::Panic { .. } => "panic",
            Self::Exit { .. } => "exit",
        }
    }
}

/// Reason why a line with our prefix is malformed. `at` is the byte offset of the error in the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolError {
    /// The word after the prefix is not one of our verbs.
    UnknownVerb {
        /// Offset of the word.
        at: usize,
    },
    /// A word is not `key=value`, or two words are separated by more than one space.
    NotAPair {
        /// Offset of the word.
        at: usize,
    },
    /// The verb has no such key.
    UnknownKey {
        /// Verb of the line.
        verb: &'static str,
        /// Offset of the pair.
        at: usize,
    },
    /// A key is given twice.
    DuplicateKey {
        /// The repeated key.
        key: &'static str,
        /// Offset of the second pair.
        at: usize,
    },
    /// A key is missing.
    MissingKey {
        /// Verb of the line.
        verb: &'static str,
        /// The missing key.
        key: &'static str,
    },
    /// A value is not one that its key takes.
    BadValue {
        /// Key of the value.
        key: &'static str,
        /// Values that the key takes.
        expected: &'static str,
        /// Offset of the value.
        at: usize,
    },
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownVerb { at } => write!(f, "byte {at}: unknown verb"),
            Self::NotAPair { at } => write!(f, "byte {at}: expected one space and key=value"),
            Self::UnknownKey { verb, at } => write!(f, "byte {at}: unknown key for {verb}"),
            Self::DuplicateKey { key, at } => write!(f, "byte {at}: {key}= is given twice"),
            Self::MissingKey { verb, key } => write!(f, "{verb} lacks {key}="),
            Self::BadValue { key, expected, at } => write!(f, "byte {at}: {key}= takes {expected}"),
        }
    }
}

impl core::error::Error for ProtocolError {}

/// Parses one console line, with or without its line break.
///
/// `None`: an ordinary line that is not ours. `Some(Err)`: it has our prefix and is malformed. A host treats that
/// as a failed run, because a lost byte here suggests lost bytes elsewhere.
pub fn parse(line: &str) -> Option<Result<Message<'_>, ProtocolError>> {
    let line = line.strip_suffix('\n').unwrap_or(line);
    let line = line.strip_suffix('\r').unwrap_or(line);
    line.strip_prefix(PREFIX).map(|rest| parse_verb(line, rest))
}

fn parse_verb<'a>(line: &'a str, rest: &'a str) -> Result<Message<'a>, ProtocolError> {
    let (verb, pairs) = rest.split_once(' ').unwrap_or((rest, ""));
    let offset = line.len() - pairs.len();
    match verb {
        "hello" => {
            const KEYS: &[&str] = &["version", "kernel", "vcpus", "guest_page", "tsc_hz", "entry"];
            let fields = Fields::new("hello", KEYS, pairs, offset)?;
            Ok(Message::Hello {
                version: fields.number("version")?,
                kernel: fields.name("kernel")?,
                vcpus: fields.number("vcpus")?,
                guest_page: fields.word("guest_page", "4k, 2m or 1g", GuestPage::from_word)?,
                tsc_hz: fields.number("tsc_hz")?,
                entry: fields.word("entry", "pvh, direct, native or linux", Entry::from_word)?,
            })
        }
        "problem" => {
            let fields = Fields::new("problem", &["class", "size", "iterations"], pairs, offset)?;
            Ok(Message::Problem {
                class: fields.name("class")?,
                size: fields.name("size")?,
                iterations: fields.number("iterations")?,
            })
        }
        "region" => {
            let fields = Fields::new("region", &["name", "address", "bytes"], pairs, offset)?;
            Ok(Message::Region {
                name: fields.name("name")?,
                address: fields.hex("address")?,
                bytes: fields.number("bytes")?,
            })
        }
        "begin" => {
            let fields = Fields::new("begin", &["phase", "tsc"], pairs, offset)?;
            Ok(Message::Begin { phase: fields.name("phase")?, tsc: fields.number("tsc")? })
        }
        "end" => {
            let fields = Fields::new("end", &["phase", "tsc"], pairs, offset)?;
            Ok(Message::End { phase: fields.name("phase")?, tsc: fields.number("tsc")? })
        }
        "progress" => {
            let fields = Fields::new("progress", &["phase", "tsc", "done", "total"], pairs, offset)?;
            Ok(Message::Progress {
                phase: fields.name("phase")?,
                tsc: fields.number("tsc")?,
                done: fields.number("done")?,
                total: fields.number("total")?,
            })
        }
        "result" => {
            let fields = Fields::new("result", &["name", "value", "unit"], pairs, offset)?;
            Ok(Message::Result {
                name: fields.name("name")?,
                value: fields.word("value", "a finite number", |word| {
                    word.parse().ok().filter(|value: &f64| value.is_finite())
                })?,
                unit: fields.name("unit")?,
            })
        }
        "gaps" => {
            const KEYS: &[&str] = &["vcpu", "count", "p50_ns", "p99_ns", "p999_ns", "max_ns"];
            let fields = Fields::new("gaps", KEYS, pairs, offset)?;
            Ok(Message::Gaps {
                vcpu: fields.number("vcpu")?,
                count: fields.number("count")?,
                p50_ns: fields.number("p50_ns")?,
                p99_ns: fields.number("p99_ns")?,
                p999_ns: fields.number("p999_ns")?,
                max_ns: fields.number("max_ns")?,
            })
        }
        "mismatch" => {
            let fields = Fields::new("mismatch", &["address", "expected", "found", "kind"], pairs, offset)?;
            Ok(Message::Mismatch(Mismatch {
                address: fields.hex("address")?,
                expected: fields.hex("expected")?,
                found: fields.hex("found")?,
                kind: fields.word("kind", "zero, stale, elsewhere or foreign", MismatchKind::from_word)?,
            }))
        }
        "verify" => {
            let fields = Fields::new("verify", &["status", "errors", "checked"], pairs, offset)?;
            Ok(Message::Verify {
                status: fields.word("status", "pass or fail", Status::from_word)?,
                errors: fields.number("errors")?,
                checked: fields.number("checked")?,
            })
        }
        "panic" => match pairs.strip_prefix("message=") {
            Some(message) => Ok(Message::Panic { message }),
            None => Err(ProtocolError::MissingKey { verb: "panic", key: "message" }),
        },
        "exit" => {
            let fields = Fields::new("exit", &["code"], pairs, offset)?;
            let code = |word: &str| ExitCode::from_port_value(word.parse().ok()?);
            Ok(Message::Exit { code: fields.word("code", "an exit code (0 to 6)", code)? })
        }
        _ => Err(ProtocolError::UnknownVerb { at: PREFIX.len() }),
    }
}

/// Largest number of keys of a verb.
const KEYS_MAX: usize = 6;

/// The pairs of one line, checked against the keys of its verb.
struct Fields<'a> {
    verb: &'static str,
    keys: &'static [&'static str],
    /// Value of the key at the same index, and its offset in the line.
    values: [Option<(&'a str, usize)>; KEYS_MAX],
}

impl<'a> Fields<'a> {
    fn new(
        verb: &'static str,
        keys: &'static [&'static str],
        pairs: &'a str,
        offset: usize,
    ) -> Result<Self, ProtocolError> {
        assert!(keys.len() <= KEYS_MAX, "{verb} has more keys than KEYS_MAX");
        let mut fields = Self { verb, keys, values: [None; KEYS_MAX] };
        let mut at = offset;
        for pair in pairs.split(' ') {
            let (key, value) = pair.split_once('=').ok_or(ProtocolError::NotAPair { at })?;
            let index = keys.iter().position(|known| *known == key).ok_or(ProtocolError::UnknownKey { verb, at })?;
            if fields.values[index].is_some() {
                return Err(ProtocolError::DuplicateKey { key: keys[index], at });
            }
            fields.values[index] = Some((value, at + key.len() + 1));
            at += pair.len() + 1;
        }
        Ok(fields)
    }

    /// The value of `key`, as `read` understands it.
    fn word<T>(
        &self,
        key: &'static str,
        expected: &'static str,
        read: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<T, ProtocolError> {
        let index = self.keys.iter().position(|known| *known == key);
        let value = index.and_then(|index| self.values[index]);
        let (value, at) = value.ok_or(ProtocolError::MissingKey { verb: self.verb, key })?;
        read(value).ok_or(ProtocolError::BadValue { key, expected, at })
    }

    fn name(&self, key: &'static str) -> Result<Name<'a>, ProtocolError> {
        self.word(key, "printable ASCII without space and '='", Name::new)
    }

    fn number<T: core::str::FromStr>(&self, key: &'static str) -> Result<T, ProtocolError> {
        self.word(key, "a decimal number in its range", |word| word.parse().ok())
    }

    fn hex(&self, key: &'static str) -> Result<u64, ProtocolError> {
        let read = |word: &str| {
            let digits = word.strip_prefix("0x")?;
            u64::from_str_radix(digits, 16).ok()
        };
        self.word(key, "0x and hexadecimal digits, at most 64 bits", read)
    }
}
