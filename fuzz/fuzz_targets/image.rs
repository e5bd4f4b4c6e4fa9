//! Input: a file to boot. Where its format is accepted, the loader may rely on what `check` asserts: segments lie
//! inside the file, ascend without overlap, and contain the entry. An error is one line. No memory of a guest is
//! touched.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_policies::units::gib;
use wideleaf_policies::{Bytes, Gpa};
use wideleaf_vmm::boot::image::{Image, Segment, check_placement, identify};
use wideleaf_vmm::config::EntryChoice;
use wideleaf_vmm::x86::layout::ram_ranges;

fuzz_target!(|bytes: &[u8]| {
    for choice in [EntryChoice::Best, EntryChoice::Pvh] {
        match identify(bytes, choice) {
            Ok(Image::Direct { entry, segments }) => check(bytes, entry, &segments),
            Ok(Image::Pvh { entry, segments }) => check(bytes, entry.into(), &segments),
            Ok(Image::BzImage { setup_bytes, .. }) => assert!(setup_bytes < bytes.len()),
            Err(error) => assert!(!error.to_string().contains('\n'), "a reason is one line: {error}"),
        }
    }
});

/// Asserts what the loader relies on when it copies the segments.
fn check(bytes: &[u8], entry: u64, segments: &[Segment]) {
    for segment in segments {
        let of_file = bytes.get(segment.file.clone()).expect("inside the file");
        assert!(Bytes::new(of_file.len() as u64) <= segment.memory.bytes());
    }
    assert!(segments.windows(2).all(|pair| pair[0].memory.end() <= pair[1].memory.start()), "{segments:?}");
    assert!(segments.iter().any(|segment| segment.memory.contains(Gpa::new(entry))), "{entry:#x}");
    let ram = ram_ranges(gib(5));
    if let Ok(end) = check_placement(segments, &ram) {
        assert!(ram.iter().any(|range| range.end() >= end), "{end}");
    }
}
