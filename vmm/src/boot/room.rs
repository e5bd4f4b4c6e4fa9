//! How much RAM a directly started image needs to have a given amount in one piece for itself: asked before there is a guest, and
//! by the rule by which [`load`](super::load) lays the RAM out.
//!
//! ```text
//!   little   [ image )[ page tables )·[ free ────▶ )                  the tables grow with the RAM they map
//!   much     [ image )[ page tables )·[ …    3 GiB )   hole   [ free ────────────────────▶ )
//! ```

use wideleaf_policies::{Bytes, Gpa, PageSize};

use super::image::{Image, ImageError, identify};
use super::load::tables_behind;
use crate::config::EntryChoice;
use crate::x86::layout::{HOLE_START, ram_ranges};

/// The least RAM, in whole windows, with which `image` has `free` bytes in one piece, behind tables of `page`s; `None` for an image
/// that is not started directly, whose RAM is its own affair, and where the sum is beyond 64 bits.
///
/// # Errors
/// [`ImageError`] where it is no image.
pub fn ram_with_free(image: &[u8], page: PageSize, free: Bytes) -> Result<Option<Bytes>, ImageError> {
    let Image::Direct { segments, .. } = identify(image, EntryChoice::Best)? else { return Ok(None) };
    let image_end = segments.last().map_or(Gpa::default(), |segment| segment.memory.end());
    Ok(ram_behind(image_end, page, free))
}

fn ram_behind(image_end: Gpa, page: PageSize, free: Bytes) -> Option<Bytes> {
    /// Each round adds the tables for what the one before added, a 512th of it: eight are more than 64 bits need.
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
    use wideleaf_policies::units::{gib, mib};

    const IMAGE_END: Gpa = Gpa::new(0x20_1234);

    #[test]
    fn the_image_and_its_tables_come_on_top_and_nothing_else() {
        // Image and three tables end inside the second window.
        assert_eq!(ram_behind(IMAGE_END, PageSize::Huge2M, mib(256)), Some(mib(260)));
        // 130 base tables take 520 KiB.
        assert_eq!(ram_behind(IMAGE_END, PageSize::Base4K, mib(256)), Some(mib(260)));
        // 1024 of them and three above take 12 KiB more than two windows: they end inside the fourth.
        assert_eq!(ram_behind(IMAGE_END, PageSize::Base4K, mib(2040)), Some(mib(2040) + mib(8)));
    }

    #[test]
    fn a_piece_that_does_not_fit_below_the_hole_lies_above_it() {
        assert_eq!(ram_behind(IMAGE_END, PageSize::Huge2M, gib(3) - mib(4)), Some(gib(3)));
        assert_eq!(ram_behind(IMAGE_END, PageSize::Huge2M, gib(3) - mib(2)), Some(gib(6) - mib(2)));
    }

    #[test]
    fn more_than_there_are_addresses_is_no_size() {
        assert_eq!(ram_behind(IMAGE_END, PageSize::Giant1G, Bytes::new(u64::MAX)), None);
    }
}
