//! A written trace is read back, and any other file is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use proptest::prelude::*;
use wideleaf_trace::{Access, Header, Totals, TraceError, TraceReader, TraceWriter};

const ARENA_BYTES: u64 = 1 << 30;

fn header() -> Header {
    Header {
        kernel: "npb.cg".into(),
        class: "A".into(),
        parameters: "class=A".into(),
        arena_bytes: ARENA_BYTES,
        iterations: 2,
        class_iterations: 15,
    }
}

fn written(phases: &[(&str, Vec<Access>)]) -> (Vec<u8>, Totals) {
    let mut writer = TraceWriter::create(Vec::new(), &header()).unwrap();
    for (name, accesses) in phases {
        writer.phase(name).unwrap();
        accesses.iter().for_each(|access| writer.push(access).unwrap());
    }
    let (totals, bytes) = writer.finish(false).unwrap();
    (bytes, totals)
}

/// Each access with its phase.
type Phased = Vec<(String, Access)>;

fn read(bytes: &[u8]) -> Result<(Header, Phased, Totals), TraceError> {
    let mut reader = TraceReader::open(bytes)?;
    let (mut all, mut block) = (Vec::new(), Vec::new());
    while reader.next_block(&mut block)? {
        all.extend(block.iter().map(|access| (reader.phase().to_owned(), *access)));
    }
    assert_eq!(reader.bytes(), bytes.len() as u64);
    Ok((reader.header().clone(), all, *reader.totals()))
}

fn accesses() -> impl Strategy<Value = Vec<Access>> {
    let line = prop_oneof![0..ARENA_BYTES / 64, 0_u64..100];
    let repeats = prop_oneof![Just(1_u32), 1_u32..300, Just(u32::MAX)];
    let access = (line, any::<bool>(), repeats);
    let access = access.prop_map(|(line, is_write, repeats)| Access { address: line * 64, is_write, repeats });
    prop::collection::vec(access, 0..300)
}

/// A trace of two phases and three blocks.
fn example() -> Vec<u8> {
    let sweep =
        (0..70_000_u64).map(|i| Access { address: i % 1000 * 64, is_write: i % 3 == 0, repeats: 1 + i as u32 % 5 });
    written(&[("init", vec![Access { address: 64, is_write: true, repeats: 8 }]), ("compute", sweep.collect())]).0
}

proptest! {
    #[test]
    fn a_written_trace_is_read_back(one in accesses(), other in accesses()) {
        let (bytes, totals) = written(&[("init", one.clone()), ("compute", other.clone())]);
        let expected: Vec<_> = one.iter().map(|access| ("init".to_owned(), *access))
            .chain(other.iter().map(|access| ("compute".to_owned(), *access))).collect();
        let (read_header, read_back, read_totals) = read(&bytes).unwrap();
        prop_assert_eq!(read_header, header());
        prop_assert_eq!(read_back, expected);
        prop_assert_eq!(read_totals, totals);
        prop_assert_eq!(
            totals.accesses(),
            one.iter().chain(&other).map(|access| u64::from(access.repeats)).sum::<u64>()
        );
    }

    #[test]
    fn any_bytes_are_refused_and_nothing_panics(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
        prop_assert!(read(&bytes).is_err());
        let behind_the_header = [&example()[..56], &bytes].concat();
        prop_assert!(read(&behind_the_header).is_err());
    }

    #[test]
    fn a_trace_with_one_changed_byte_is_refused(at in any::<prop::sample::Index>(), change in 1_u8..) {
        let mut bytes = example();
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        let error = read(&bytes).expect_err("every byte counts");
        let place = match error {
            TraceError::Damaged { at, .. } | TraceError::Truncated { at } => at,
            _ => 0,
        };
        prop_assert!(place <= bytes.len() as u64, "{} in a file of {} bytes", error, bytes.len());
    }

    #[test]
    fn a_trace_that_ends_early_is_refused_with_its_length(at in any::<prop::sample::Index>()) {
        let bytes = example();
        let length = at.index(bytes.len());
        match read(&bytes[..length]).expect_err("its end is missing") {
            TraceError::Truncated { at } => prop_assert_eq!(at, length as u64),
            TraceError::NotATrace => prop_assert!(length < 8),
            other => prop_assert!(false, "{}", other),
        }
    }
}

#[test]
fn the_blocks_are_cut_at_their_limit_and_at_a_phase() {
    let bytes = example();
    let mut reader = TraceReader::open(&bytes[..]).unwrap();
    let (mut block, mut found) = (Vec::new(), Vec::new());
    while reader.next_block(&mut block).unwrap() {
        found.push((reader.phase().to_owned(), block.len()));
    }
    assert_eq!(found, [("init".into(), 1), ("compute".into(), 1 << 16), ("compute".into(), 70_000 - (1 << 16))]);
}

#[test]
fn a_file_of_another_kind_or_version_is_reported_as_such() {
    assert!(matches!(read(b""), Err(TraceError::NotATrace)));
    assert!(matches!(read(b"\x7fELF and so on"), Err(TraceError::NotATrace)));
    let mut bytes = example();
    bytes[8] = 9;
    let error = read(&bytes).unwrap_err();
    assert!(matches!(error, TraceError::Version { found: 9 }), "{error}");
    assert!(matches!(read(&bytes[..11]), Err(TraceError::Truncated { at: 11 })));
}

#[test]
fn bytes_after_the_end_are_refused_with_their_offset() {
    let mut bytes = example();
    let end = bytes.len() as u64;
    bytes.push(0);
    assert!(matches!(read(&bytes), Err(TraceError::Damaged { at, .. }) if at == end));
}

#[test]
fn a_cut_recording_says_so() {
    let (totals, bytes) = TraceWriter::create(Vec::new(), &header()).unwrap().finish(true).unwrap();
    assert!(totals.is_cut && read(&bytes).unwrap().2.is_cut);
}
