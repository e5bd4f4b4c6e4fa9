//! The RAM that a directly started image needs for a free piece of a given size, and the free piece that it has
//! in a given RAM. Callers ask before there is a guest; the rule is the one by which [`load`](super::load) lays
//! the RAM out.
//!
//! ```text
//!   little   [ image )[ page tables )·[ free ────▶ )                  the tables grow with the RAM they map
//!   much     [ image )[ page tables )·[ …    3 GiB )   hole   [ free ────────────────────▶ )
//! ```
//!
//! More RAM does not always give a longer piece: RAM beyond the hole needs tables that shorten the piece below it.

use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};

use super::image::{Image, ImageError, identify};
use super::load::tables_behind;
use crate::config::EntryChoice;
use crate::x86::layout::{HOLE_START, ram_ranges};

/// The least RAM, in whole windows, with which `image` has `free` bytes in one piece, behind tables of
/// `page`s. `None` for an image that is not started directly, which manages its own RAM, and where the sum is
/// beyond 64 bits.
///
/// # Errors
/// [`ImageError`] where `image` is not an image.
pub fn ram_with_free(image: &[u8], page: PageSize, free: Bytes) -> Result<Option<Bytes>, ImageError> {
    Ok(end_of_direct(image)?.and_then(|image_end| ram_behind(image_end, page, free)))
}

/// The longest free piece that `image` has in `ram` bytes of RAM, behind tables of `page`s; `None`
/// as for [`ram_with_free`].
///
/// # Errors
/// [`ImageError`] where `image` is not an image.
pub fn free_with_ram(image: &[u8], page: PageSize, ram: Bytes) -> Result<Option<Bytes>, ImageError> {
    Ok(end_of_direct(image)?.and_then(|image_end| free_behind(image_end, page, ram)))
}

/// First address behind an image that is started directly.
fn end_of_direct(image: &[u8]) -> Result<Option<Gpa>, ImageError> {
    let Image::Direct { segments, .. } = identify(image, EntryChoice::Best)? else { return Ok(None) };
    Ok(Some(segments.last().map_or(Gpa::default(), |segment| segment.memory.end())))
}

fn free_behind(image_end: Gpa, page: PageSize, ram: Bytes) -> Option<Bytes> {
    let ranges = ram_ranges(ram);
    let (_, free_start) = tables_behind(image_end, &ranges, page)?;
    let free_of = |range: &GpaRange| Bytes::new(range.end().get().saturating_sub(range.start().max(free_start).get()));
    ranges.iter().map(free_of).max()
}

fn ram_behind(image_end: Gpa, page: PageSize, free: Bytes) -> Option<Bytes> {
    /// Each round adds the tables for the RAM that the previous round added, a 512th of it; eight rounds are more
    /// than 64 bits need.
    const ROUNDS: usize = 8;
    let free = free.checked_round_up(PageSize::Huge2M)?;
    let with_tables_for = |ram| {
        let (_, free_start) = tables_behind(image_end, &ram_ranges(ram), page)?;
        Bytes::new(free_start.get()).checked_add(free)
    };
    let ram = (0..ROUNDS).try_fold(free, |ram, _| with_tables_for(ram))?;
    let below_hole = Bytes::new(HOLE_START.get());
    if ram <= below_hole { Some(ram) } else { below_hole.checked_add(free) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::{gib, kib, mib};

    const IMAGE_END: Gpa = Gpa::new(0x20_1234);

    #[test]
    fn the_image_and_its_tables_come_on_top_and_nothing_else() {
        // The image and three tables end inside the second window.
        assert_eq!(ram_behind(IMAGE_END, PageSize::Huge2M, mib(256)), Some(mib(260)));
        // 130 base tables take 520 KiB.
        assert_eq!(ram_behind(IMAGE_END, PageSize::Base4K, mib(256)), Some(mib(260)));
        // 1024 base tables and three above take 12 KiB more than two windows: they end inside the fourth.
        assert_eq!(ram_behind(IMAGE_END, PageSize::Base4K, mib(2040)), Some(mib(2040) + mib(8)));
    }

    #[test]
    fn a_piece_that_does_not_fit_below_the_hole_lies_above_it() {
        assert_eq!(ram_behind(IMAGE_END, PageSize::Huge2M, gib(3) - mib(4)), Some(gib(3)));
        assert_eq!(ram_behind(IMAGE_END, PageSize::Huge2M, gib(3) - mib(2)), Some(gib(6) - mib(2)));
    }

    #[test]
    fn the_least_ram_for_a_piece_has_room_for_that_piece() {
        for page in PageSize::ALL {
            for free in [mib(2), mib(256), mib(2040), gib(3) - mib(10), gib(3), gib(5)] {
                let ram = ram_behind(IMAGE_END, page, free).expect("less than 64 bits");
                assert!(free_behind(IMAGE_END, page, ram) >= Some(free), "{free} on {page:?}: {ram}");
            }
        }
    }

    #[test]
    fn ram_beyond_the_hole_takes_tables_from_the_piece_below_it() {
        // Base tables: 6 MiB for the 3 GiB below, which with image and upper tables end inside the fifth window; 2
        // MiB per GiB above.
        let free = |ram| free_behind(IMAGE_END, PageSize::Base4K, ram);
        assert_eq!(free(gib(3)), Some(gib(3) - mib(10)));
        assert_eq!(free(gib(4)), Some(gib(3) - mib(12)));
        assert_eq!(free(gib(5)), Some(gib(3) - mib(14)));
        assert_eq!(free(gib(7)), Some(gib(4)), "the piece above is the longer one");
    }

    #[test]
    fn ram_that_only_holds_image_and_tables_has_no_free_piece() {
        assert_eq!(free_behind(IMAGE_END, PageSize::Huge2M, mib(2)), Some(Bytes::ZERO));
        assert_eq!(free_behind(IMAGE_END, PageSize::Huge2M, mib(4) + kib(4)), Some(kib(4)));
    }

    #[test]
    fn a_size_beyond_all_addresses_is_refused() {
        assert_eq!(ram_behind(IMAGE_END, PageSize::Giant1G, Bytes::new(u64::MAX)), None);
    }
}
