//! The form of a migration's messages. All numbers are little-endian.
//!
//! ```text
//!   each side first    "WLMOVEVM"  version (u32)
//!   each message       kind (u32)  number (u32)  bytes (u32)  CRC-32 of kind, bytes and content (u32)  content
//!   content of pages   window (u64)  flags (u64)  pages with content (64 bytes)  pages of zeroes (64 bytes)
//!                      4 KiB for each page with content
//!   content of what is missing, for each window: that beginning, with the missing pages as those with content
//!   content of a request for pages   window (u64)  flags (u64)
//! ```
//!
//! The number counts a side's messages from zero, so that none is missing. Every length has a limit by its kind, which
//! is checked before anything is read.

use wideleaf_policies::{PageSet, PageSize, WindowIndex};

/// First bytes of each side.
pub const MAGIC: [u8; 8] = *b"WLMOVEVM";
/// Version of the messages, and of what they mean.
pub const VERSION: u32 = 3;
/// Length of the first bytes with the version.
pub const GREETING_BYTES: usize = 12;
/// Length of a message's header.
pub const HEADER_BYTES: usize = 16;
/// Length of the beginning of a message with pages.
pub const PAGES_HEAD_BYTES: usize = 144;
/// Length of a page.
pub const PAGE_BYTES: usize = PageSize::Base4K.bytes().as_usize();

/// Length of a request for the pages of a window.
pub const PAGE_REQUEST_BYTES: usize = 16;
/// Most windows in a message of what is missing.
pub const MISSING_WINDOWS_MAX: usize = 4096;

const IS_HUGE: u64 = 1;
const IS_URGENT: u64 = 1;
const IS_AGAIN: u64 = 2;
/// Windows of an address space of 64 bits.
const WINDOWS_MAX: u64 = u64::MAX / PageSize::Huge2M.bytes().get();

/// Kinds of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Source: its release and specification, as JSON.
    Hello,
    /// Source: pages of one window.
    Pages,
    /// Source: windows of which pages are not up to date: they come once the guest runs at the target.
    Missing,
    /// Source: the state of everything but RAM, as JSON.
    Machine,
    /// Source: the target's guest may run.
    Go,
    /// Source: figures for the target's report, as JSON.
    Left,
    /// Source, on another connection after one was lost: the migration's name, as in its first hello.
    Again,
    /// Target: it has RAM, or the migration goes on over this connection.
    Welcome,
    /// Target: all is checked and built.
    Ready,
    /// Target: its guest runs.
    Running,
    /// Target: the missing pages of a window are to be sent.
    PageRequest,
    /// Target: nothing of the source's RAM is needed any more.
    Complete,
    /// Target: figures for the source's report, as JSON.
    Arrived,
    /// Target: the reason why its guest has not run and never will, as text. Source: the reason why the guest stays
    /// there, instead of `go`.
    Failed,
}

impl Kind {
    const ALL: [(Kind, u32, usize); 14] = [
        (Kind::Hello, 1, 1 << 20),
        (Kind::Pages, 2, PAGES_HEAD_BYTES + PageSize::Huge2M.bytes().as_usize()),
        (Kind::Machine, 3, 64 << 20),
        (Kind::Go, 4, 0),
        (Kind::Left, 5, 4096),
        (Kind::Missing, 6, MISSING_WINDOWS_MAX * PAGES_HEAD_BYTES),
        (Kind::Again, 7, 64),
        (Kind::Welcome, 16, 0),
        (Kind::Ready, 17, 0),
        (Kind::Running, 18, 0),
        (Kind::Arrived, 19, 4096),
        (Kind::Failed, 20, 4000),
        (Kind::PageRequest, 21, PAGE_REQUEST_BYTES),
        (Kind::Complete, 22, 0),
    ];

    fn row(self) -> (Kind, u32, usize) {
        Kind::ALL.into_iter().find(|(kind, ..)| *kind == self).expect("all kinds are in the table")
    }

    /// Longest content, in bytes.
    pub fn bytes_max(self) -> usize {
        self.row().2
    }
}

/// A message that does not follow the form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Other first bytes.
    #[error("it does not speak wideleaf's migration protocol")]
    Magic,
    /// Version that this program does not speak.
    #[error("it speaks version {0} of the migration protocol, and this program version {VERSION}; use equal releases")]
    Version(u32),
    /// No such kind.
    #[error("a message of the unknown kind {0}")]
    Kind(u32),
    /// Too long, too short or cut off.
    #[error("a message of {0} bytes, which is no length of its kind")]
    Length(usize),
    /// A message is missing, or came twice.
    #[error("message {found} where message {expected} must be")]
    Number {
        /// Number of the next message.
        expected: u32,
        /// Number in the message.
        found: u32,
    },
    /// The content was changed on its way.
    #[error("a message with a wrong checksum")]
    Checksum,
    /// Pages that cannot be.
    #[error("pages of a window that contradict each other")]
    Pages,
    /// Pages outside the guest's RAM.
    #[error("pages of {0}, outside the guest's RAM")]
    Outside(WindowIndex),
    /// Another message must come.
    #[error("a message out of its order")]
    Order,
}

/// First bytes of a side.
pub fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// Checks the first bytes of the other side.
///
/// # Errors
/// [`Malformed::Magic`] and [`Malformed::Version`].
pub fn check_greeting(bytes: &[u8; GREETING_BYTES]) -> Result<(), Malformed> {
    if bytes[..8] != MAGIC {
        return Err(Malformed::Magic);
    }
    match number(&bytes[8..]) {
        VERSION => Ok(()),
        other => Err(Malformed::Version(other)),
    }
}

/// The beginning of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the message.
    pub kind: Kind,
    /// Number of the message, from zero.
    pub number: u32,
    /// Length of the content, in bytes.
    pub bytes: usize,
    /// Checksum of kind, length and content.
    pub checksum: u32,
}

impl Header {
    /// Bytes of the header.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let fields = [self.kind.row().1, self.number, self.bytes as u32, self.checksum];
        bytes.chunks_exact_mut(4).zip(fields).for_each(|(into, field)| into.copy_from_slice(&field.to_le_bytes()));
        bytes
    }

    /// Reads a header, and checks it against the number of the next message.
    ///
    /// # Errors
    /// [`Malformed`] for an unknown kind, a length beyond its limit, or another number.
    pub fn decode(bytes: &[u8; HEADER_BYTES], expected: u32) -> Result<Header, Malformed> {
        let field = |index: usize| number(&bytes[index * 4..index * 4 + 4]);
        let row = Kind::ALL.into_iter().find(|(_, code, _)| *code == field(0));
        let (kind, _, bytes_max) = row.ok_or(Malformed::Kind(field(0)))?;
        let header = Header { kind, number: field(1), bytes: field(2) as usize, checksum: field(3) };
        if header.bytes > bytes_max {
            return Err(Malformed::Length(header.bytes));
        }
        if header.number != expected {
            return Err(Malformed::Number { expected, found: header.number });
        }
        Ok(header)
    }

    /// Checks the content.
    ///
    /// # Errors
    /// [`Malformed::Checksum`].
    pub fn check(&self, content: &[u8]) -> Result<(), Malformed> {
        if checksum(self.kind, &[content]) == self.checksum { Ok(()) } else { Err(Malformed::Checksum) }
    }
}

/// Checksum of a message with these parts of a content.
pub fn checksum(kind: Kind, parts: &[&[u8]]) -> u32 {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&kind.row().1.to_le_bytes());
    hasher.update(&(bytes as u32).to_le_bytes());
    parts.iter().for_each(|part| hasher.update(part));
    hasher.finalize()
}

/// The beginning of a message with pages; the pages with content follow, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesHead {
    /// Index of the window.
    pub window: WindowIndex,
    /// Whether the window is on one huge page at the source.
    pub is_huge: bool,
    /// Pages with content.
    pub stored: PageSet,
    /// Pages that are zero, perhaps after they had a content.
    pub zero: PageSet,
}

impl PagesHead {
    /// Bytes of this beginning.
    pub fn encode(&self) -> [u8; PAGES_HEAD_BYTES] {
        let flags = if self.is_huge { IS_HUGE } else { 0 };
        let [stored, zero] = [self.stored, self.zero].map(<[u64; 8]>::from);
        let words = [self.window.get(), flags].into_iter().chain(stored).chain(zero);
        let mut bytes = [0; PAGES_HEAD_BYTES];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(into, word)| into.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    /// Splits the content of a message into its beginning and its pages.
    ///
    /// # Errors
    /// [`Malformed::Length`] and [`Malformed::Pages`].
    pub fn decode(content: &[u8]) -> Result<(PagesHead, &[u8]), Malformed> {
        let (head, pages) = content.split_first_chunk::<PAGES_HEAD_BYTES>().ok_or(Malformed::Length(content.len()))?;
        let head = PagesHead::decode_head(head)?;
        if pages.len() != usize::from(head.stored.len()) * PAGE_BYTES {
            return Err(Malformed::Length(content.len()));
        }
        Ok((head, pages))
    }

    /// Reads the beginning alone, as a message of what is missing has it for each window.
    ///
    /// # Errors
    /// [`Malformed::Pages`].
    pub fn decode_head(head: &[u8; PAGES_HEAD_BYTES]) -> Result<PagesHead, Malformed> {
        let word = |index: usize| u64::from_le_bytes(head[index * 8..index * 8 + 8].try_into().expect("eight bytes"));
        let set = |from: usize| PageSet::from(std::array::from_fn(|index| word(from + index)));
        let (window, flags, stored, zero) = (word(0), word(1), set(2), set(10));
        if window >= WINDOWS_MAX || flags & !IS_HUGE != 0 || !stored.and(zero).is_empty() {
            return Err(Malformed::Pages);
        }
        Ok(PagesHead { window: WindowIndex::new(window), is_huge: flags == IS_HUGE, stored, zero })
    }
}

/// Reads a message of what is missing.
///
/// # Errors
/// [`Malformed::Length`] and [`Malformed::Pages`].
pub fn decode_missing(content: &[u8]) -> Result<Vec<PagesHead>, Malformed> {
    let (heads, rest) = content.as_chunks::<PAGES_HEAD_BYTES>();
    if !rest.is_empty() {
        return Err(Malformed::Length(content.len()));
    }
    heads.iter().map(PagesHead::decode_head).collect()
}

/// A request for the missing pages of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRequest {
    /// Index of the window.
    pub window: WindowIndex,
    /// Whether a thread of the guest may wait for it.
    pub is_urgent: bool,
    /// Whether it has come before, and is needed once more.
    pub is_again: bool,
}

impl PageRequest {
    /// Bytes of this request.
    pub fn encode(self) -> [u8; PAGE_REQUEST_BYTES] {
        let mut bytes = [0; PAGE_REQUEST_BYTES];
        bytes[..8].copy_from_slice(&self.window.get().to_le_bytes());
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        let flags = flag(self.is_urgent, IS_URGENT) | flag(self.is_again, IS_AGAIN);
        bytes[8..].copy_from_slice(&flags.to_le_bytes());
        bytes
    }

    /// Reads a request.
    ///
    /// # Errors
    /// [`Malformed::Length`] and [`Malformed::Pages`].
    pub fn decode(content: &[u8]) -> Result<PageRequest, Malformed> {
        let ([window, flags], []) = content.as_chunks::<8>() else { return Err(Malformed::Length(content.len())) };
        let (window, flags) = (u64::from_le_bytes(*window), u64::from_le_bytes(*flags));
        if window >= WINDOWS_MAX || flags & !(IS_URGENT | IS_AGAIN) != 0 {
            return Err(Malformed::Pages);
        }
        let has = |flag| flags & flag != 0;
        Ok(PageRequest { window: WindowIndex::new(window), is_urgent: has(IS_URGENT), is_again: has(IS_AGAIN) })
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> PagesHead {
        let stored: PageSet = [0, 3, 511].into_iter().collect();
        PagesHead { window: WindowIndex::new(7), is_huge: true, stored, zero: [1, 4].into_iter().collect() }
    }

    fn content() -> Vec<u8> {
        let mut content = head().encode().to_vec();
        content.extend((0..3 * PAGE_BYTES).map(|byte| byte as u8));
        content
    }

    fn header(content: &[u8]) -> Header {
        Header { kind: Kind::Pages, number: 5, bytes: content.len(), checksum: checksum(Kind::Pages, &[content]) }
    }

    /// What the receiver does with a whole message.
    fn receive(message: &[u8]) -> Result<PagesHead, Malformed> {
        let (bytes, content) = message.split_first_chunk().ok_or(Malformed::Length(message.len()))?;
        let header = Header::decode(bytes, 5)?;
        if header.bytes != content.len() {
            return Err(Malformed::Length(content.len()));
        }
        header.check(content)?;
        PagesHead::decode(content).map(|(head, _)| head)
    }

    fn message() -> Vec<u8> {
        let content = content();
        [&header(&content).encode()[..], &content].concat()
    }

    #[test]
    fn a_message_that_is_encoded_and_decoded_is_the_same() {
        assert_eq!(receive(&message()), Ok(head()));
        for (kind, ..) in Kind::ALL {
            let header = Header { kind, number: 9, bytes: kind.bytes_max(), checksum: 0xdead_beef };
            assert_eq!(Header::decode(&header.encode(), 9), Ok(header));
        }
    }

    #[test]
    fn a_flipped_bit_at_any_place_is_noticed() {
        let message = message();
        // Every bit of the header and of the beginning, and one of each hundred bytes of the pages.
        let places = (0..160).chain((160..message.len()).step_by(100));
        for place in places {
            for bit in 0..8 {
                let mut flipped = message.clone();
                flipped[place] ^= 1 << bit;
                assert!(receive(&flipped).is_err(), "byte {place}, bit {bit}");
            }
        }
    }

    #[test]
    fn a_message_that_is_cut_off_anywhere_is_refused() {
        let message = message();
        for bytes in (0..200).chain((200..message.len()).step_by(97)) {
            assert!(receive(&message[..bytes]).is_err(), "{bytes} bytes");
        }
    }

    #[test]
    fn a_length_beyond_its_limit_is_refused_before_anything_is_read() {
        for (kind, ..) in Kind::ALL {
            let mut bytes = Header { kind, number: 0, bytes: 0, checksum: 0 }.encode();
            for length in [kind.bytes_max() as u32 + 1, u32::MAX] {
                bytes[8..12].copy_from_slice(&length.to_le_bytes());
                assert_eq!(Header::decode(&bytes, 0), Err(Malformed::Length(length as usize)), "{kind:?}");
            }
        }
    }

    #[test]
    fn seeds_of_the_fuzz_target_have_the_version_of_the_protocol() {
        let greeting = |seed: &[u8]| check_greeting(seed[1..].first_chunk().expect("a greeting after the selector"));
        assert_eq!(greeting(include_bytes!("../../../fuzz/seeds/migration_frames/whole")), Ok(()));
        assert_eq!(greeting(include_bytes!("../../../fuzz/seeds/migration_frames/failed")), Ok(()));
        let other = greeting(include_bytes!("../../../fuzz/seeds/migration_frames/version"));
        assert!(matches!(other, Err(Malformed::Version(_))), "{other:?}");
    }

    #[test]
    fn an_unknown_kind_and_a_missing_message_are_refused() {
        let bytes = Header { kind: Kind::Go, number: 3, bytes: 0, checksum: 0 }.encode();
        assert_eq!(Header::decode(&bytes, 2), Err(Malformed::Number { expected: 2, found: 3 }));
        let mut unknown = bytes;
        unknown[0] = 99;
        assert_eq!(Header::decode(&unknown, 3), Err(Malformed::Kind(99)));
    }

    #[test]
    fn pages_with_and_without_content_exclude_each_other_and_must_all_be_there() {
        let both = PagesHead { zero: head().stored, ..head() };
        let pages = vec![0; 3 * PAGE_BYTES];
        assert_eq!(PagesHead::decode(&[&both.encode()[..], &pages].concat()), Err(Malformed::Pages));
        let far = PagesHead { window: WindowIndex::new(u64::MAX), ..head() };
        assert_eq!(PagesHead::decode(&[&far.encode()[..], &pages].concat()), Err(Malformed::Pages));
        let mut flags = head().encode();
        flags[8] = 2;
        assert_eq!(PagesHead::decode(&[&flags[..], &pages].concat()), Err(Malformed::Pages));
        for wrong in [2 * PAGE_BYTES, 4 * PAGE_BYTES, 3 * PAGE_BYTES - 1] {
            let content = [&head().encode()[..], &vec![0; wrong]].concat();
            assert_eq!(PagesHead::decode(&content), Err(Malformed::Length(content.len())));
        }
    }

    #[test]
    fn what_is_missing_and_what_is_wished_is_read_back_or_refused() {
        let heads = [head(), PagesHead { window: WindowIndex::new(9), is_huge: false, ..head() }];
        let content: Vec<u8> = heads.iter().flat_map(PagesHead::encode).collect();
        assert_eq!(decode_missing(&content), Ok(heads.to_vec()));
        assert_eq!(decode_missing(&content[1..]), Err(Malformed::Length(content.len() - 1)));
        for (is_urgent, is_again) in [(false, false), (true, false), (true, true)] {
            let request = PageRequest { window: WindowIndex::new(7), is_urgent, is_again };
            assert_eq!(PageRequest::decode(&request.encode()), Ok(request));
        }
        let request = PageRequest { window: WindowIndex::new(7), is_urgent: false, is_again: false }.encode();
        assert_eq!(PageRequest::decode(&request[..15]), Err(Malformed::Length(15)));
        for (place, byte) in [(7, 0xff), (8, 4)] {
            let mut wrong = request;
            wrong[place] = byte;
            assert_eq!(PageRequest::decode(&wrong), Err(Malformed::Pages));
        }
    }

    #[test]
    fn another_program_and_another_version_have_refusals_of_their_own() {
        assert_eq!(check_greeting(&greeting()), Ok(()));
        let mut other = greeting();
        other[8] = 1;
        assert_eq!(check_greeting(&other), Err(Malformed::Version(1)));
        assert_eq!(check_greeting(b"SSH-2.0-Open"), Err(Malformed::Magic));
    }
}
