//! Interface to reserved frames: the file behind guest RAM (`fallocate(2)`).

use std::io;

use wideleaf_policies::{Bytes, GpaRange, PageSize, WindowIndex};

use crate::host::{Advice, Host};
use crate::region::GuestRam;
use crate::sys::mapping::{AddressReservation, MapError};

/// Source of frames: the file behind guest RAM, or a failing one in tests.
pub(super) trait Frames: Send {
    /// Whether the file is empty in a window.
    fn has_nothing(&self, ram: &GuestRam, window: WindowIndex) -> io::Result<bool>;
    /// Reserves frames for these pages.
    fn take(&self, ram: &GuestRam, pages: GpaRange) -> io::Result<()>;
    /// Whether the frames of a window that was just reserved are one huge page; `None` if that is not known.
    fn are_one_page(&mut self, host: &dyn Host, ram: &GuestRam, window: WindowIndex) -> Option<bool>;
    /// Gives frames back that hold nothing the guest uses.
    fn give_back(&self, ram: &GuestRam, pages: &[GpaRange]) -> GivenBack;
}

/// Result of giving frames back.
pub(super) struct GivenBack {
    /// Bytes that became free, even if not all did.
    pub freed: Bytes,
    /// Error after which the rest was not tried.
    pub refused: Option<io::Error>,
}

/// The file behind guest RAM.
#[derive(Debug, Default)]
pub(super) struct FileFrames {
    /// Addresses at which a window is mapped once more for a moment, from the first use on.
    second: Option<AddressReservation>,
}

impl FileFrames {
    /// Maps the window elsewhere and reads its first page: the kernel maps a huge folio by one entry, whatever is
    /// registered or mapped in guest RAM. The folio is cleared by that, as it would be by the guest's first touch. The
    /// kernel falls back to base pages without an error, so that no call tells.
    fn look_at(&mut self, host: &dyn Host, ram: &GuestRam, window: WindowIndex) -> Result<bool, MapError> {
        let bytes = PageSize::Huge2M.bytes();
        let second = match &self.second {
            Some(second) => second,
            None => self.second.insert(AddressReservation::new(bytes, PageSize::Huge2M)?),
        };
        let start = ram.map_again(window, second)?;
        let mut runs = Vec::new();
        let looked = host
            .advise(start, bytes, Advice::HugePage)
            .and_then(|()| host.advise(start, PageSize::Base4K.bytes(), Advice::PopulateRead))
            .and_then(|()| host.scan(start, bytes, &mut runs));
        // Anonymous memory in its place: no second mapping of guest RAM stays.
        second.map_at(Bytes::ZERO, bytes, None)?;
        looked.map_err(|error| MapError::Call { call: error.what, source: error.source })?;
        Ok(runs.iter().any(|run| run.is_huge))
    }
}

impl Frames for FileFrames {
    fn has_nothing(&self, ram: &GuestRam, window: WindowIndex) -> io::Result<bool> {
        ram.file_holds_nothing(window)
    }

    fn take(&self, ram: &GuestRam, pages: GpaRange) -> io::Result<()> {
        ram.allocate(pages)
    }

    fn are_one_page(&mut self, host: &dyn Host, ram: &GuestRam, window: WindowIndex) -> Option<bool> {
        if !ram.supplies_huge_folios() {
            return None;
        }
        self.look_at(host, ram, window).inspect_err(|error| tracing::debug!("{window}: {error}")).ok()
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
