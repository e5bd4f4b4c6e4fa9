//! Sweeps in which a row needs the row before it, and the same row of the previous plane: several members at once,
//! a plane apart.
//!
//! ```text
//!   step 4, rising      plane 1   plane 2   plane 3   plane 4
//!   rows of member 0    done      done      done      now       a member writes its own rows of one plane; it reads
//!   rows of member 1    done      done      now                   behind: its own rows of the plane before,
//!   rows of member 2    done      now                             beside: the row before its first, of the same plane
//! ```
//!
//! All rows that are read were finished in an earlier step. The first and the last row and plane are faces, which
//! are read and never written.

use core::ops::Range;

use wideleaf_protocol::VCPUS_MAX;

use crate::parts::ranges;

/// The part of a field that a member has in one step.
#[derive(Debug, PartialEq, Eq)]
pub struct Front<'s, T> {
    /// Number of the plane.
    pub plane: usize,
    /// Numbers of the rows.
    pub rows: Range<usize>,
    /// These rows of this plane, for writing.
    pub own: &'s mut [T],
    /// The row of this plane that the sweep passes just before these.
    pub beside: &'s [T],
    /// These rows of the plane that the sweep has passed before.
    pub behind: &'s [T],
}

/// Direction of a sweep, through rows and planes alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the first to the last.
    Rising,
    /// From the last to the first.
    Falling,
}

/// A field of planes of rows, and the number of members that sweep through it.
#[derive(Clone, Copy, Debug)]
pub struct Wavefront {
    /// Number of planes, and of used rows of a plane, including faces.
    pub edge: usize,
    /// Elements from one row to the next.
    pub row_len: usize,
    /// Elements from one plane to the next.
    pub plane_len: usize,
    /// Number of members that share the work, at most [`VCPUS_MAX`].
    pub members: usize,
}

impl Wavefront {
    /// Number of steps of a sweep: the last member begins when the first is `members - 1` planes ahead.
    pub const fn steps(&self) -> usize {
        self.inner() + self.members - 1
    }

    /// The part of each member in a step; `None` for one that has not begun, is done, or does not exist.
    pub fn fronts<'s, T>(&self, field: &'s mut [T], direction: Direction, step: usize) -> Fronts<'s, T> {
        match direction {
            Direction::Rising => self.rising(field, step),
            Direction::Falling => self.falling(field, self.steps() - 1 - step),
        }
    }

    /// Number of planes, and of rows of a plane, between the faces.
    const fn inner(&self) -> usize {
        self.edge - 2
    }

    /// The members with a plane at that time, their rows, and the plane: member m is m planes below member 0.
    fn active(&self, time: usize) -> impl DoubleEndedIterator<Item = (usize, Range<usize>, usize)> + use<> {
        let mut rows = [const { 0..0 }; VCPUS_MAX];
        let dealt = ranges(self.inner(), self.members).map(|range| range.start + 1..range.end + 1);
        rows.iter_mut().zip(dealt).for_each(|(rows, dealt)| *rows = dealt);
        let (members, inner) = (self.members, self.inner());
        rows.into_iter().enumerate().take(members).filter_map(move |(member, rows)| {
            let plane = (time + 1).checked_sub(member).filter(|plane| (1..=inner).contains(plane))?;
            Some((member, rows, plane))
        })
    }

    /// Fronts from the lowest plane to the highest. In each plane, the rows before the own ones are finished, and
    /// the owner of the next plane reads some of them.
    fn rising<'s, T>(&self, field: &'s mut [T], time: usize) -> Fronts<'s, T> {
        let mut fronts = [const { None }; VCPUS_MAX];
        let mut active = self.active(time).rev().peekable();
        let Some((_, _, lowest)) = active.peek() else { return fronts };
        let (finished, mut rest) = field[(lowest - 1) * self.plane_len..].split_at_mut(self.plane_len);
        let mut finished = &*finished;
        for (member, rows, plane) in active {
            let (here, above) = rest.split_at_mut(self.plane_len);
            let (before, own) = here.split_at_mut(rows.start * self.row_len);
            let before = &*before;
            fronts[member] = Some(Front {
                own: &mut own[..rows.len() * self.row_len],
                beside: &before[before.len() - self.row_len..],
                behind: &finished[rows.start * self.row_len..rows.end * self.row_len],
                plane,
                rows,
            });
            (finished, rest) = (before, above);
        }
        fronts
    }

    /// Fronts from the highest plane to the lowest. In each plane, the rows after the own ones are finished.
    fn falling<'s, T>(&self, field: &'s mut [T], time: usize) -> Fronts<'s, T> {
        let mut fronts = [const { None }; VCPUS_MAX];
        let mut active = self.active(time).peekable();
        let Some((_, _, highest)) = active.peek() else { return fronts };
        let (mut rest, finished) = field[..(highest + 2) * self.plane_len].split_at_mut((highest + 1) * self.plane_len);
        // Start of the finished part within its plane.
        let (mut finished, mut start) = (&*finished, 0);
        for (member, rows, plane) in active {
            let (below, here) = rest.split_at_mut(plane * self.plane_len);
            let end = rows.end * self.row_len;
            let (own, after) = here.split_at_mut(end);
            let after = &*after;
            fronts[member] = Some(Front {
                own: &mut own[rows.start * self.row_len..],
                beside: &after[..self.row_len],
                behind: &finished[rows.start * self.row_len - start..end - start],
                plane,
                rows,
            });
            (finished, start, rest) = (after, end, below);
        }
        fronts
    }
}

/// The parts of all members in a step.
pub type Fronts<'s, T> = [Option<Front<'s, T>>; VCPUS_MAX];

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    const EDGE: usize = 7;
    const ROW_LEN: usize = 2;
    /// Longer than the used rows, as in fields with gaps between the planes.
    const PLANE_LEN: usize = (EDGE + 1) * ROW_LEN;

    /// Number of each row in the order of a sweep; faces are 0. Panics if a row comes before one that it needs.
    fn sweep(direction: Direction, members: usize) -> vec::Vec<usize> {
        let wavefront = Wavefront { edge: EDGE, row_len: ROW_LEN, plane_len: PLANE_LEN, members };
        let mut field = vec![0; EDGE * PLANE_LEN];
        for step in 0..wavefront.steps() {
            for front in wavefront.fronts(&mut field, direction, step).into_iter().flatten() {
                assert!(front.own.iter().all(|number| *number == 0), "a row is written once");
                let is_at = |place: usize| (1..EDGE - 1).contains(&place);
                let (first, before) = match direction {
                    Direction::Rising => (front.rows.start - 1, front.plane - 1),
                    Direction::Falling => (front.rows.end, front.plane + 1),
                };
                assert!(front.rows.is_empty() || front.beside.iter().all(|number| (*number > 0) == is_at(first)));
                assert!(front.behind.iter().all(|number| (*number > 0) == is_at(before)));
                front.own.fill(step + 1);
            }
        }
        field
    }

    #[test]
    fn every_row_is_swept_once_and_after_those_it_needs() {
        for direction in [Direction::Rising, Direction::Falling] {
            for members in [1, 2, 3, 5, VCPUS_MAX] {
                let field = sweep(direction, members);
                let swept = field.iter().filter(|number| **number > 0).count();
                assert_eq!(swept, (EDGE - 2) * (EDGE - 2) * ROW_LEN, "{direction:?}, {members} members");
            }
        }
    }

    #[test]
    fn a_member_is_a_plane_behind_the_one_before_it() {
        let wavefront = Wavefront { edge: EDGE, row_len: ROW_LEN, plane_len: PLANE_LEN, members: 3 };
        let mut field = vec![0; EDGE * PLANE_LEN];
        let mut planes = |direction, step| {
            let fronts = wavefront.fronts(&mut field, direction, step);
            [0, 1, 2].map(|member| fronts[member].as_ref().map(|front| front.plane))
        };
        assert_eq!(planes(Direction::Rising, 0), [Some(1), None, None]);
        assert_eq!(planes(Direction::Rising, 3), [Some(4), Some(3), Some(2)]);
        assert_eq!(planes(Direction::Falling, 0), [None, None, Some(5)]);
        assert_eq!(planes(Direction::Falling, 6), [Some(1), None, None]);
    }
}
