//! The kind of memory behind guest RAM, and all that follows from it: page size, flags, advice, limits. One value, so
//! that no two options can contradict each other.

use std::fs::File;

use wideleaf_policies::{Bytes, Hva, PageSize};

use crate::host::{Advice, Host, HostError};
use crate::sys::mapping::{MapError, create_memfd};
use crate::sys::tmpfs;

/// Kinds of memory behind guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackingKind {
    /// Private anonymous memory: THP and collapse work best here.
    Anon,
    /// A memfd (shmem), shared: other processes can map the RAM too.
    Memfd,
    /// Pages of the hugetlb pool.
    Hugetlb,
}

impl BackingKind {
    /// List of all kinds.
    pub const ALL: [BackingKind; 3] = [BackingKind::Anon, BackingKind::Memfd, BackingKind::Hugetlb];

    /// Name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            BackingKind::Anon => "anon",
            BackingKind::Memfd => "memfd",
            BackingKind::Hugetlb => "hugetlb",
        }
    }
}

/// Kind and initial page size: only the combinations that exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackingConfig {
    kind: BackingKind,
    start_page: PageSize,
    folios: Folios,
}

/// Folios of the file behind memfd RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Folios {
    /// Those of an ordinary memfd, as `shmem_enabled` says.
    Memfd,
    /// Huge ones, for windows that are mapped whole.
    Huge,
    /// Huge ones, reserved for windows that are mapped page by page.
    Reserved,
}

/// A combination that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackingError {
    /// The hugetlb pool with base pages.
    #[error("cannot use the hugetlb pool with 4k pages: use --host-page 2m or 1g, or --backing anon")]
    HugetlbOf4K,
    /// Giant pages outside hugetlb.
    #[error("{} RAM cannot start with 1g pages: only the hugetlb pool has them; use --backing hugetlb", .0.name())]
    GiantNeedsHugetlb(BackingKind),
}

impl BackingConfig {
    /// Makes the combination, if it exists.
    ///
    /// # Errors
    /// [`BackingError`] with what to use instead.
    pub const fn new(kind: BackingKind, start_page: PageSize) -> Result<BackingConfig, BackingError> {
        match (kind, start_page) {
            (BackingKind::Hugetlb, PageSize::Base4K) => Err(BackingError::HugetlbOf4K),
            (BackingKind::Anon | BackingKind::Memfd, PageSize::Giant1G) => Err(BackingError::GiantNeedsHugetlb(kind)),
            _ => Ok(BackingConfig { kind, start_page, folios: Folios::Memfd }),
        }
    }

    /// memfd RAM on base pages, for which frames can be reserved 2 MiB at a time ([`crate::reserved_frames`]). No
    /// other process may write to it: memory that this process has not mapped counts as never touched.
    pub const fn reservable() -> BackingConfig {
        BackingConfig { folios: Folios::Reserved, ..BackingConfig::of_huge_folios() }
    }

    /// memfd RAM on base pages, of which a window gets 2 MiB in one piece where that is asked for
    /// ([`crate::first_touch`]), whatever `shmem_enabled` is.
    pub const fn of_huge_folios() -> BackingConfig {
        BackingConfig { kind: BackingKind::Memfd, start_page: PageSize::Base4K, folios: Folios::Huge }
    }

    /// The same RAM, of huge folios if it is memfd RAM on base pages that a policy decides about at the first touch.
    #[must_use]
    pub const fn for_first_touch(self, is_decided: bool) -> BackingConfig {
        match (self.kind, self.start_page, self.folios) {
            (BackingKind::Memfd, PageSize::Base4K, Folios::Memfd) if is_decided => BackingConfig::of_huge_folios(),
            _ => self,
        }
    }

    /// Whether frames can be reserved for its windows.
    pub const fn is_reservable(self) -> bool {
        matches!(self.folios, Folios::Reserved)
    }

    /// Kind of memory behind the RAM.
    pub const fn kind(self) -> BackingKind {
        self.kind
    }

    /// Page size that RAM starts with.
    pub const fn start_page(self) -> PageSize {
        self.start_page
    }

    /// Granule of RAM sizes.
    pub const fn granule(self) -> PageSize {
        match self.kind {
            BackingKind::Hugetlb => self.start_page,
            // Windows are the managed unit; a tail of base pages could never become large.
            BackingKind::Anon | BackingKind::Memfd => PageSize::Huge2M,
        }
    }

    /// Page size of all large pages, if the kind of memory fixes it.
    pub(crate) const fn fixed_page(self) -> Option<PageSize> {
        match self.kind {
            BackingKind::Hugetlb => Some(self.start_page),
            BackingKind::Anon | BackingKind::Memfd => None,
        }
    }

    pub(crate) fn create_file(self, bytes: Bytes) -> Result<Option<RamFile>, MapError> {
        let of_host = |file| Some(RamFile { file, supplies_huge_folios: false });
        match self.kind {
            BackingKind::Anon => Ok(None),
            BackingKind::Memfd => match self.folios {
                Folios::Memfd => create_memfd(bytes, None).map(of_host),
                Folios::Huge | Folios::Reserved => create_of_huge_folios(bytes).map(Some),
            },
            BackingKind::Hugetlb => create_memfd(bytes, Some(self.start_page)).map(of_host),
        }
    }

    /// The advice that makes new pages the requested size. It must come before the first touch: existing pages
    /// do not change.
    ///
    /// RAM that starts at 4 KiB is marked `MADV_NOHUGEPAGE`, so that neither a fault under `enabled=always` nor
    /// khugepaged promotes it without the manager. The collapse actuator lifts the mark window by window. The pool
    /// takes no such advice.
    pub(crate) fn advise_at_start(self, host: &dyn Host, start: Hva, bytes: Bytes) -> Result<(), HostError> {
        host.advise(start, bytes, self.advice_at_start())
    }

    /// Initial mark of RAM outside the pool.
    pub(crate) const fn advice_at_start(self) -> Advice {
        match self.start_page {
            PageSize::Base4K => Advice::NoHugePage,
            PageSize::Huge2M | PageSize::Giant1G => Advice::HugePage,
        }
    }
}

/// The file behind guest RAM.
#[derive(Debug)]
pub(crate) struct RamFile {
    pub file: File,
    /// Whether it allocates an empty window as one folio, as long as the host has one.
    pub supplies_huge_folios: bool,
}

/// A file that supplies 2 MiB in one piece. If that is not permitted, an ordinary memfd with scattered frames,
/// where promotion copies.
fn create_of_huge_folios(bytes: Bytes) -> Result<RamFile, MapError> {
    match tmpfs::create_file(bytes) {
        Ok(file) => Ok(RamFile { file, supplies_huge_folios: true }),
        Err(error) => {
            tracing::warn!(
                "cannot make a file of huge folios, so a window that becomes large is copied; run as root: {error}"
            );
            Ok(RamFile { file: create_memfd(bytes, None)?, supplies_huge_folios: false })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_combinations_that_exist_can_be_made() {
        use BackingKind::{Anon, Hugetlb, Memfd};
        use PageSize::{Base4K, Giant1G, Huge2M};
        let exists = |kind, page| BackingConfig::new(kind, page).is_ok();
        assert!(exists(Anon, Base4K) && exists(Anon, Huge2M) && exists(Memfd, Base4K) && exists(Memfd, Huge2M));
        assert!(exists(Hugetlb, Huge2M) && exists(Hugetlb, Giant1G));
        assert_eq!(BackingConfig::new(Hugetlb, Base4K), Err(BackingError::HugetlbOf4K));
        assert_eq!(BackingConfig::new(Anon, Giant1G), Err(BackingError::GiantNeedsHugetlb(Anon)));
        assert_eq!(BackingConfig::new(Memfd, Giant1G), Err(BackingError::GiantNeedsHugetlb(Memfd)));
    }
}
