//! Changes of the mappings of guest RAM by whole giants: a giant page takes the place of what is mapped, or anonymous
//! pages move beside guest RAM and back. The caller makes sure that no thread writes the giant meanwhile; each call
//! says what is left where it fails.

use wideleaf_policies::Gpa;

use crate::host::HostError;
use crate::host::linux::LinuxHost;
use crate::host::process::{ProcessHost, unsupported};
use crate::numa::placement::NodePolicy;
use crate::region::GuestRam;
use crate::side_mapping::{GiantFile, SideContents, SideMapping, map_giant_over};

/// Changes of the mappings of giants. All of them need RAM that this process has mapped.
pub trait GiantMappings: Send + Sync {
    /// Makes a file for one giant page of the hugetlb pool. It takes the page when it is first mapped and touched, or
    /// filled before.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno.
    fn create_giant(&self) -> Result<GiantFile, HostError>;

    /// Has the file take its page, cleared, while the process goes on with faults; by a memory policy, or the kernel's
    /// own.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno, where the pool has no page.
    fn fill_giant(&self, page: &GiantFile, policy: Option<&NodePolicy>) -> Result<(), HostError>;

    /// Maps addresses beside guest RAM, with these contents.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno; nothing stays mapped.
    fn map_aside(&self, contents: SideContents<'_>) -> Result<SideMapping, HostError>;

    /// Moves the anonymous pages of the giant at `giant` aside. Guest RAM there is empty afterwards.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno. Everything is then as it was, if guest RAM there is one mapping; else a
    /// part may have been moved.
    fn move_aside(&self, ram: &GuestRam, giant: Gpa, to: &SideMapping) -> Result<(), HostError>;

    /// Moves the anonymous pages of `from` to the giant at `giant`, in the place of its mapping. `from`
    /// is empty afterwards.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno. Guest RAM may then lack its former mapping there.
    fn move_in(&self, from: &SideMapping, ram: &GuestRam, giant: Gpa) -> Result<(), HostError>;

    /// Maps a giant page at the giant at `giant`, in the place of its mapping.
    ///
    /// # Errors
    /// [`HostError`] with the kernel's errno. Guest RAM may then lack its former mapping there.
    fn map_over(&self, ram: &GuestRam, giant: Gpa, page: &GiantFile) -> Result<(), HostError>;
}

impl GiantMappings for LinuxHost {
    fn create_giant(&self) -> Result<GiantFile, HostError> {
        GiantFile::of_pool()
    }

    fn fill_giant(&self, page: &GiantFile, policy: Option<&NodePolicy>) -> Result<(), HostError> {
        let filled = match policy {
            None => page.fill(),
            Some(policy) => policy
                .of_thread_during(|| page.fill())
                .map_err(|source| HostError { what: "set_mempolicy for a page of 1 GiB", source })?,
        };
        filled.map_err(|source| HostError { what: "fallocate of a page of 1 GiB", source })
    }

    fn map_aside(&self, contents: SideContents<'_>) -> Result<SideMapping, HostError> {
        Ok(SideMapping::map(contents)?)
    }

    fn move_aside(&self, ram: &GuestRam, giant: Gpa, to: &SideMapping) -> Result<(), HostError> {
        to.take(ram, giant).map_err(|source| HostError { what: "mremap of guest RAM aside", source })
    }

    fn move_in(&self, from: &SideMapping, ram: &GuestRam, giant: Gpa) -> Result<(), HostError> {
        from.give(ram, giant).map_err(|source| HostError { what: "mremap into guest RAM", source })
    }

    fn map_over(&self, ram: &GuestRam, giant: Gpa, page: &GiantFile) -> Result<(), HostError> {
        Ok(map_giant_over(page, ram, giant)?)
    }
}

impl GiantMappings for ProcessHost {
    fn create_giant(&self) -> Result<GiantFile, HostError> {
        unsupported("giant pages of another process")
    }

    fn fill_giant(&self, _: &GiantFile, _: Option<&NodePolicy>) -> Result<(), HostError> {
        unsupported("giant pages of another process")
    }

    fn map_aside(&self, _: SideContents<'_>) -> Result<SideMapping, HostError> {
        unsupported("mapping memory beside another process's")
    }

    fn move_aside(&self, _: &GuestRam, _: Gpa, _: &SideMapping) -> Result<(), HostError> {
        unsupported("moving another process's memory aside")
    }

    fn move_in(&self, _: &SideMapping, _: &GuestRam, _: Gpa) -> Result<(), HostError> {
        unsupported("moving memory into another process")
    }

    fn map_over(&self, _: &GuestRam, _: Gpa, _: &GiantFile) -> Result<(), HostError> {
        unsupported("mapping over another process's memory")
    }
}
