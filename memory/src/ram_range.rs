//! One contiguous piece of guest RAM, with its place in an address space.

use wideleaf_policies::{GpaRange, Hva};

/// One contiguous piece of guest RAM with its mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamRange {
    /// Guest-physical addresses of the range.
    pub gpa: GpaRange,
    /// First address in this process.
    pub hva: Hva,
}

impl RamRange {
    /// The part of it that is also in `gpa`, if there is one.
    pub fn part(self, gpa: GpaRange) -> Option<RamRange> {
        let (start, end) = (self.gpa.start().max(gpa.start()), self.gpa.end().min(gpa.end()));
        let gpa = (start < end).then(|| GpaRange::new(start, end - start))??;
        Some(RamRange { gpa, hva: self.hva + (start - self.gpa.start()) })
    }
}
