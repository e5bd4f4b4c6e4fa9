//! A slice seen as planes of rows, of which each member owns the same rows in every plane.
//!
//! ```text
//!            plane 0        plane 1        plane 2
//!   row 0  ┌──────────┐   ┌──────────┐   ┌──────────┐
//!   row 1  │ member 0 │   │ member 0 │   │ member 0 │   each plane lies behind the one before,
//!   row 2  ├──────────┤   ├──────────┤   ├──────────┤   each row behind the one before
//!   row 3  │ member 1 │   │ member 1 │   │ member 1 │
//!          └──────────┘   └──────────┘   └──────────┘
//! ```
//!
//! A sweep along the outermost dimension is divided by the middle one, so a member's rows are not contiguous and
//! cannot be cut off by [`split`](crate::parts::split).
#![expect(
    unsafe_code,
    reason = "pieces of one slice, disjoint by their row numbers, which the borrow checker cannot see"
)]

use core::marker::PhantomData;
use core::ops::Range;

/// The rows of one member, in every plane.
#[derive(Debug)]
pub struct OwnRows<'s, T> {
    start: *mut T,
    planes: usize,
    plane_len: usize,
    row_len: usize,
    rows: Range<usize>,
    slice: PhantomData<&'s mut [T]>,
}

// SAFETY: it stands for mutable slices of `T`, which are `Send` where `T` is; no other `OwnRows` reaches the same
// elements.
unsafe impl<T: Send> Send for OwnRows<'_, T> {}

/// Distributes `slice`, with `rows_per_plane` rows of `row_len` elements in each plane, to the owners of `ranges` of
/// rows. Rows outside all ranges have no owner.
///
/// # Panics
/// Panics if a plane has no element or more than can be counted, or if the slice is not whole planes. The iterator
/// panics at a range that begins before the end of the one before it, or that ends outside the plane.
pub fn deal_rows<'s, T>(
    slice: &'s mut [T],
    rows_per_plane: usize,
    row_len: usize,
    ranges: impl Iterator<Item = Range<usize>>,
) -> impl Iterator<Item = OwnRows<'s, T>> {
    let plane_len = rows_per_plane.checked_mul(row_len).expect("the elements of a plane can be counted");
    assert!(plane_len > 0, "a plane has elements");
    assert!(slice.len().is_multiple_of(plane_len), "{} elements are not whole planes of {plane_len}", slice.len());
    let (start, planes) = (slice.as_mut_ptr(), slice.len() / plane_len);
    let mut dealt = 0;
    ranges.map(move |rows| {
        assert!(dealt <= rows.start && rows.start <= rows.end && rows.end <= rows_per_plane, "rows have one owner");
        dealt = rows.end;
        OwnRows { start, planes, plane_len, row_len, rows, slice: PhantomData }
    })
}

impl<T> OwnRows<'_, T> {
    /// Row numbers of these rows in each plane.
    pub const fn rows(&self) -> Range<usize> {
        self.rows.start..self.rows.end
    }

    /// Number of planes in the slice.
    pub const fn planes(&self) -> usize {
        self.planes
    }

    /// The own rows of a plane, one behind the other.
    pub fn plane(&self, plane: usize) -> &[T] {
        let (start, length) = self.place(plane);
        // SAFETY: inside the slice that this borrows mutably (`place`), and no other `OwnRows` has these rows
        // (`deal_rows`).
        unsafe { core::slice::from_raw_parts(start, length) }
    }

    /// The own rows of a plane, for writing.
    pub fn plane_mut(&mut self, plane: usize) -> &mut [T] {
        let (start, length) = self.place(plane);
        // SAFETY: as in `plane`; `self` is borrowed mutably.
        unsafe { core::slice::from_raw_parts_mut(start, length) }
    }

    /// The own rows of two planes, the first for writing, the second for reading.
    ///
    /// # Panics
    /// Panics if both are the same plane.
    pub fn plane_mut_beside(&mut self, plane: usize, other: usize) -> (&mut [T], &[T]) {
        assert!(plane != other, "a plane is either written or read");
        let (start, length) = self.place(plane);
        let (other, _) = self.place(other);
        // SAFETY: as in `plane`; `self` is borrowed mutably for both, and two planes have no element in common.
        let read = unsafe { core::slice::from_raw_parts(other, length) };
        // SAFETY: as for `read`.
        (unsafe { core::slice::from_raw_parts_mut(start, length) }, read)
    }

    /// One of the own rows of a plane; `row` counts from the beginning of the plane.
    pub fn row(&self, plane: usize, row: usize) -> &[T] {
        let range = self.range_of(row);
        &self.plane(plane)[range]
    }

    /// One of the own rows of a plane, for writing.
    pub fn row_mut(&mut self, plane: usize, row: usize) -> &mut [T] {
        let range = self.range_of(row);
        &mut self.plane_mut(plane)[range]
    }

    fn range_of(&self, row: usize) -> Range<usize> {
        let from = row.checked_sub(self.rows.start).expect("a member reaches its own rows alone") * self.row_len;
        from..from + self.row_len
    }

    fn place(&self, plane: usize) -> (*mut T, usize) {
        assert!(plane < self.planes, "plane {plane} of {}", self.planes);
        (
            self.start.wrapping_add(plane * self.plane_len + self.rows.start * self.row_len),
            self.rows.len() * self.row_len,
        )
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::parts::ranges;

    #[test]
    fn every_row_of_every_plane_has_one_owner() {
        let mut slice = vec![0; 3 * 5 * 2];
        for (member, mut own) in deal_rows(&mut slice, 5, 2, ranges(5, 2)).enumerate() {
            for plane in 0..own.planes() {
                own.plane_mut(plane).iter_mut().for_each(|number| *number += 1 + member);
            }
        }
        let plane = [1, 1, 1, 1, 2, 2, 2, 2, 2, 2];
        assert_eq!(slice, [plane, plane, plane].concat());
    }

    #[test]
    fn rows_are_counted_from_the_beginning_of_the_plane() {
        let mut slice: Vec<usize> = (0..24).collect();
        let dealt: Vec<_> = deal_rows(&mut slice, 4, 3, [1..2, 2..4].into_iter()).collect();
        let Ok([one, mut other]) = <[_; 2]>::try_from(dealt) else { panic!("two ranges") };
        assert_eq!((one.row(1, 1), other.row(0, 3)), (&[15, 16, 17][..], &[9, 10, 11][..]));
        let (written, read) = other.plane_mut_beside(1, 0);
        written.copy_from_slice(read);
        other.row_mut(1, 2)[0] = 99;
        assert_eq!(slice[18..], [99, 7, 8, 9, 10, 11]);
    }

    #[test]
    #[should_panic(expected = "one owner")]
    fn rows_that_overlap_are_not_dealt() {
        let mut slice = [0; 8];
        let _ = deal_rows(&mut slice, 4, 2, [0..2, 1..3].into_iter()).count();
    }

    #[test]
    #[should_panic(expected = "can be counted")]
    fn planes_of_more_elements_than_can_be_counted_are_not_dealt() {
        let _ = deal_rows(&mut [0; 8], 1 << 62, 8, core::iter::once(0..1));
    }

    #[test]
    #[should_panic(expected = "a plane has elements")]
    fn planes_of_nothing_are_not_dealt() {
        let _ = deal_rows(&mut [0; 8], 4, 0, core::iter::once(0..1));
    }

    #[test]
    #[should_panic]
    fn a_row_of_another_owner_is_out_of_reach() {
        let mut slice = [0; 8];
        let mut own = deal_rows(&mut slice, 4, 2, core::iter::once(1..2)).next().expect("one range");
        own.row_mut(0, 2);
    }
}
