//! The target of a migration reads what its source sends. The stream is the input as it is, or messages with numbers,
//! lengths and checksums corrected, so that the code behind these checks is reached.
//!
//! After each stream, RAM has exactly the pages that were accepted, and an error is one line about the stream. Nothing
//! but a temporary file and anonymous memory is touched.
//!
//! Input: one byte that selects, then the stream; or messages, each kind (u8), length (u16), content.
#![no_main]
#![allow(dead_code, reason = "the two sides use more of these files than this target")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Gpa, GpaRange, PageSet, PageSize};

// The program's own files are included, because their crate embeds the guest image, which cannot be built with
// instrumentation.
#[path = "../../run/src/migration/frames.rs"]
mod frames;
#[path = "../../run/src/migration/link.rs"]
mod link;
#[path = "../../run/src/migration/placing.rs"]
mod placing;
#[path = "../../run/src/text.rs"]
mod text;

use frames::{Header, Kind, Malformed, PAGE_BYTES, PAGES_HEAD_BYTES, PagesHead, checksum, greeting};
use link::{Limit, LinkError, Receiver};
use placing::Placing;

const KINDS: [Kind; 11] = [
    Kind::Hello,
    Kind::Pages,
    Kind::Machine,
    Kind::Go,
    Kind::Left,
    Kind::Welcome,
    Kind::Ready,
    Kind::Running,
    Kind::Arrived,
    Kind::Failed,
    Kind::Again,
];
/// Most pages with content of a corrected message: more show nothing new.
const PAGES_MAX: usize = 6;

fuzz_target!(|bytes: &[u8]| {
    let Some((how, stream)) = bytes.split_first() else { return };
    match how & 1 {
        0 => receive(stream),
        _ => receive(&corrected(stream)),
    }
});

/// RAM from 2 MiB to 6 MiB, and from 8 MiB to 10 MiB.
fn ram() -> Arc<GuestRam> {
    let range = |start, bytes| GpaRange::new(Gpa::new(0) + mib(start), mib(bytes)).expect("a range");
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM");
    let ram = GuestRam::map(&[range(2, 4), range(8, 2)], backing).expect("there is memory");
    ram.share().expect("it has no owner");
    ram
}

/// Reads a stream as the target does, up to the machine's state, and checks that RAM has the pages of the messages and
/// zeroes elsewhere.
fn receive(stream: &[u8]) {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(stream).and_then(|()| file.rewind()).expect("it has room");
    let mut receiver = Receiver::new(File::into(file));
    let limit = Limit { silence: Duration::from_secs(5), until: None, keep_on: &|| true };
    let (ram, host) = (ram(), LinuxHost::open().expect("it is Linux"));
    let mut placing = Placing::new(&ram, &host);
    let mut expected = BTreeMap::new();
    let ended = read_all(&mut receiver, &limit, &mut placing, &mut expected);
    if let Err(lost) = ended {
        assert_eq!(lost.to_string().lines().count(), 1, "{lost:?}");
        assert!(!matches!(lost, LinkError::Io(_) | LinkError::Late | LinkError::Silent(_)), "{lost:?}");
    }
    assert!(receiver.received() <= stream.len() as u64);
    for range in ram.ranges() {
        let words = ram.words(*range);
        for (index, page) in words.chunks_exact(PAGE_BYTES / 8).enumerate() {
            let address = range.gpa.start().get() + (index * PAGE_BYTES) as u64;
            let is_right = match expected.get(&address) {
                Some(content) => page.iter().zip(content_words(content)).all(|(word, right)| load(word) == right),
                None => page.iter().all(|word| load(word) == 0),
            };
            assert!(is_right, "page at {address:#x}");
        }
    }
}

fn load(word: &std::sync::atomic::AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

fn content_words(content: &[u8]) -> impl Iterator<Item = u64> {
    content.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().expect("eight bytes")))
}

/// Reads messages up to the machine's state, places their pages, and adds each to `expected` by its address.
fn read_all(
    receiver: &mut Receiver,
    limit: &Limit<'_>,
    placing: &mut Placing<'_>,
    expected: &mut BTreeMap<u64, Vec<u8>>,
) -> Result<(), LinkError> {
    let mut content = Vec::new();
    receiver.greeted(limit)?;
    receiver.expect(Kind::Hello, &mut content, limit)?;
    loop {
        match receiver.next(&mut content, limit)? {
            Kind::Pages => {
                let (head, pages) = PagesHead::decode(&content)?;
                assert_eq!(head.encode(), content[..PAGES_HEAD_BYTES]);
                placing.place(&head, pages)?;
                let address = |page: u16| head.window.start().get() + u64::from(page) * PAGE_BYTES as u64;
                let stored = head.stored.iter().zip(pages.chunks_exact(PAGE_BYTES));
                expected.extend(stored.map(|(page, content)| (address(page), content.to_vec())));
                expected.extend(head.zero.iter().map(|page| (address(page), vec![0; PAGE_BYTES])));
            }
            Kind::Machine => return Ok(()),
            _ => return Err(Malformed::Order.into()),
        }
    }
}

/// A stream of whole messages: the greeting, a hello, and what the input has.
fn corrected(mut input: &[u8]) -> Vec<u8> {
    let mut stream = greeting().to_vec();
    let mut number = 0;
    put(&mut stream, Kind::Hello, &mut number, b"{}");
    while let Some(([kind, low, high], rest)) = input.split_first_chunk() {
        let kind = KINDS[usize::from(*kind) % KINDS.len()];
        let (content, rest) = rest.split_at(rest.len().min(usize::from(u16::from_le_bytes([*low, *high]))));
        input = rest;
        let content = if kind == Kind::Pages { pages_of(content) } else { content.to_vec() };
        put(&mut stream, kind, &mut number, &content[..content.len().min(kind.bytes_max())]);
    }
    stream
}

/// Content of a message with pages. Input: window (u8), whether it is huge (u8), then pairs of page (u16) and byte; a
/// page of an even byte is one of zeroes.
fn pages_of(content: &[u8]) -> Vec<u8> {
    let [window, is_huge, rest @ ..] = content else { return content.to_vec() };
    let (mut stored, mut zero) = (BTreeMap::new(), PageSet::EMPTY);
    for pair in rest.chunks_exact(3) {
        let page = u16::from_le_bytes([pair[0], pair[1]]) % 512;
        match pair[2] {
            byte if byte % 2 == 1 && stored.len() < PAGES_MAX => drop(stored.insert(page, byte)),
            _ => zero = zero.with([page].into_iter().collect()),
        }
    }
    let set: PageSet = stored.keys().copied().collect();
    let window = wideleaf_policies::WindowIndex::new(u64::from(*window));
    let head = PagesHead { window, is_huge: is_huge % 2 == 1, stored: set, zero: zero.without(set) };
    let mut bytes = head.encode().to_vec();
    stored.values().for_each(|byte| bytes.extend([*byte; PAGE_BYTES]));
    bytes
}

fn put(stream: &mut Vec<u8>, kind: Kind, number: &mut u32, content: &[u8]) {
    let header = Header { kind, number: *number, bytes: content.len(), checksum: checksum(kind, &[content]) };
    *number += 1;
    stream.extend(header.encode());
    stream.extend(content);
}
