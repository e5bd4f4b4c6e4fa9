//! The door to reserved frames: the file behind guest RAM (`fallocate(2)`).

use std::io;

use wideleaf_policies::{Bytes, GpaRange, WindowIndex};

use crate::region::GuestRam;

/// Source of frames: the file behind guest RAM, or a failing one in tests.
pub(super) trait Frames: Send {
    /// Whether the file is empty in a window.
    fn has_nothing(&self, ram: &GuestRam, window: WindowIndex) -> io::Result<bool>;
    /// Reserves frames for these pages.
    fn take(&self, ram: &GuestRam, pages: GpaRange) -> io::Result<()>;
    /// Gives unused frames back.
    fn give_back(&self, ram: &GuestRam, pages: &[GpaRange]) -> GivenBack;
}

/// Result of giving frames back.
pub(super) struct GivenBack {
    /// Bytes that became free, even if not all did.
    pub freed: Bytes,
    /// Error after which the rest was not tried.
    pub refused: Option<io::Error>,
}

pub(super) struct FileFrames;

impl Frames for FileFrames {
    fn has_nothing(&self, ram: &GuestRam, window: WindowIndex) -> io::Result<bool> {
        ram.file_holds_nothing(window)
    }

    fn take(&self, ram: &GuestRam, pages: GpaRange) -> io::Result<()> {
        ram.allocate(pages)
    }

    /// A huge folio that cannot be split (it has another reference) is cleared there and stays: hence the file's own
    /// count. Pages that the kernel brings in other windows at the same time reduce it a little.
    fn give_back(&self, ram: &GuestRam, pages: &[GpaRange]) -> GivenBack {
        let before = ram.file_bytes();
        let punched = pages.iter().try_for_each(|run| ram.punch(*run));
        let freed = before.and_then(|before| Ok(before.saturating_sub(ram.file_bytes()?)));
        GivenBack { freed: *freed.as_ref().unwrap_or(&Bytes::ZERO), refused: punched.and(freed).err() }
    }
}
