//! Properties of ranges, windows and sizes, and of their text forms, over random values.

use proptest::prelude::*;
use wideleaf_policies::geometry::is_congruent;
use wideleaf_policies::units::{ParseUnitError, gib, kib, mib};
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, PageSize, WindowIndex};

fn page_size() -> impl Strategy<Value = PageSize> {
    prop::sample::select(PageSize::ALL.to_vec())
}

/// Base-page aligned ranges up to 4 GiB long below 1 TiB.
fn range() -> impl Strategy<Value = GpaRange> {
    (0_u64..1 << 28, 0_u64..1 << 20)
        .prop_map(|(start, pages)| GpaRange::new(Gpa::new(start << 12), Bytes::new(pages << 12)).expect("fits"))
}

proptest! {
    #[test]
    fn windows_are_whole_and_complete(range in range()) {
        let windows: Vec<WindowIndex> = range.windows().collect();
        for window in &windows {
            prop_assert!(window.start() >= range.start());
            prop_assert!(window.start() + mib(2) <= range.end());
        }
        for pair in windows.windows(2) {
            prop_assert_eq!(pair[0].get() + 1, pair[1].get());
        }
        // The parts outside the windows on both sides are less than two windows together.
        prop_assert!(range.bytes() - mib(2) * (windows.len() as u64) < mib(4));
    }

    #[test]
    fn pieces_partition_the_range_and_are_aligned(range in range(), largest in page_size()) {
        let mut at = range.start();
        for (start, size) in range.pieces(largest) {
            prop_assert_eq!(start, at);
            prop_assert!(start.is_aligned_to(size) && size <= largest);
            at = start + size.bytes();
        }
        prop_assert_eq!(at, range.end());
    }

    #[test]
    fn overlap_is_sharing_an_address(a in range(), b in range()) {
        let shares = a.bytes() > Bytes::ZERO && b.bytes() > Bytes::ZERO
            && (a.contains(b.start()) || b.contains(a.start()));
        prop_assert_eq!(a.overlaps(b) && a.bytes() > Bytes::ZERO && b.bytes() > Bytes::ZERO, shares);
    }

    #[test]
    fn alignment_down_and_up_enclose_the_address(address in 0_u64..1 << 60, size in page_size()) {
        let gpa = Gpa::new(address);
        let (down, up) = (gpa.align_down(size), gpa.checked_align_up(size).expect("fits"));
        prop_assert!(down <= gpa && gpa <= up && up - down <= size.bytes());
        prop_assert!(down.is_aligned_to(size) && up.is_aligned_to(size));
    }

    #[test]
    fn congruent_addresses_differ_by_whole_pages(gpa in 0_u64..1 << 50, pages in 0_u64..1 << 10, size in page_size()) {
        let (gpa, hva) = (Gpa::new(gpa), Hva::new(gpa + pages * size.bytes().get()));
        prop_assert!(is_congruent(gpa, hva, size));
        prop_assert!(!is_congruent(gpa, hva + kib(2), size));
    }

    #[test]
    fn a_window_holds_its_addresses(address in 0_u64..1 << 60) {
        let window = WindowIndex::containing(Gpa::new(address));
        prop_assert!(window.start().get() <= address && address < window.start().get() + mib(2).get());
    }

    #[test]
    fn sizes_are_parsed_with_every_suffix(
        n in 0_u64..1 << 20, suffix in prop::sample::select(vec!["", "K", "m", "GiB", "T", "MB"]),
    ) {
        let shift = match suffix { "" => 0, "K" => 10, "m" | "MB" => 20, "GiB" => 30, _ => 40 };
        prop_assert_eq!(Bytes::parse(&format!("{n}{suffix}")), Ok(Bytes::new(n << shift)));
    }

    #[test]
    fn no_text_makes_the_size_parser_panic(text in ".*") {
        let _ = Bytes::parse(&text);
        let _ = PageSize::parse(&text);
    }
}

#[test]
fn an_invalid_size_is_refused() {
    for text in ["", "G", "-1", "1.5", "1.G", ".5G", "1.5.5G", "1.0000000000G", "1 G", "1X", "1KK", "0x10"] {
        assert_eq!(Bytes::parse(text), Err(ParseUnitError::NotASize), "{text:?}");
    }
    assert_eq!(Bytes::parse("1.5G"), Ok(mib(1536)));
    assert_eq!(Bytes::parse("0.25TiB"), Ok(gib(256)));
    assert_eq!(Bytes::parse("1.1G"), Err(ParseUnitError::NotWhole));
    assert_eq!(Bytes::parse("16777215.999999999T"), Err(ParseUnitError::NotWhole));
    assert_eq!(Bytes::parse("99999999999T"), Err(ParseUnitError::TooLarge));
    assert_eq!(PageSize::parse("2M"), Ok(PageSize::Huge2M));
    assert_eq!(PageSize::parse("4m"), Err(ParseUnitError::NotAPageSize));
}

#[test]
fn sizes_are_shown_in_the_largest_exact_unit() {
    let shown: Vec<String> = [Bytes::ZERO, kib(4), mib(2), gib(1), mib(1536), kib(1), Bytes::new((5 << 30) + 1)]
        .map(|b| b.to_string())
        .into();
    assert_eq!(shown, ["0 B", "4 KiB", "2 MiB", "1 GiB", "1536 MiB", "1 KiB", "5.00 GiB"]);
}
