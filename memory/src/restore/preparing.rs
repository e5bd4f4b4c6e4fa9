//! What comes before the threads of a restore: the RAM is checked, what is not to stay is dropped, and windows are
//! registered.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use wideleaf_policies::{Bytes, PageSize, PerTenThousand, WindowIndex};

use super::kernel_calls::LinuxCalls;
use super::report::{Progress, RestoreReport};
use super::rows::{Row, Rows, STRETCHES_MAX};
use super::shared::Shared;
use super::window_states::{Mapping, WindowStates};
use super::{RestoreConfig, RestoreError, SavedRam, SavedWindow};
use crate::backing::BackingKind;
use crate::faults::Counted;
use crate::host::linux::LinuxHost;
use crate::host::{Advice, Host, HostError};
use crate::region::GuestRam;
use crate::sys::pagemap::holds_nothing;
use crate::sys::userfaultfd::{Mode, Userfaultfd, UserfaultfdError};

/// What RAM has at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// No page of it exists.
    None,
    /// All pages that are not stored.
    Others,
}

/// Registers the windows, and makes everything that the threads need.
pub(super) fn prepare(
    ram: Arc<GuestRam>,
    saved: Arc<dyn SavedRam>,
    config: RestoreConfig,
    contents: Contents,
) -> Result<(Shared, LinuxCalls), RestoreError> {
    let host = LinuxHost::open()?;
    check_backing(&ram)?;
    if config.is_page_by_page && ram.backing().kind() == BackingKind::Hugetlb {
        return Err(RestoreError::HugetlbByPage);
    }
    if contents == Contents::Others && ram.backing().kind() != BackingKind::Anon {
        return Err(RestoreError::NotAnonymous);
    }
    ram.share()?;
    let rows = Rows::of(ram.ranges());
    // Of each window the number of stored pages, and its heat: the sets would be megabytes.
    let of_window = |window| {
        let SavedWindow { pages, heat, .. } = saved.window(window);
        (pages.len(), heat)
    };
    let (stored, heats): (Vec<u16>, Vec<PerTenThousand>) = rows.windows().map(of_window).unzip();
    // No gap is closed in hugetlb RAM: the kernel has no zero page for it.
    let most = if ram.backing().kind() == BackingKind::Hugetlb { usize::MAX } else { STRETCHES_MAX };
    let stretches = rows.registered(|row| stored[row] > 0, most);

    let pagemap = File::open("/proc/self/pagemap").map_err(host_error("open /proc/self/pagemap"))?;
    if contents == Contents::None {
        check_empty(&ram, &pagemap)?;
    }
    let (uffd, can_move) = open(&ram)?;
    let can_move = can_move && config.may_move && !config.is_page_by_page;
    let kernel = LinuxCalls { uffd, pagemap, ram: ram.clone() };
    check_free(&kernel, &rows)?;
    match contents {
        Contents::None => join_mappings(&kernel, &host)?,
        Contents::Others => drop_stored(&kernel, &host, &rows, &*saved)?,
    }
    register(&kernel, &host, &rows, &stretches)?;

    let other = if ram.backing().start_page() == PageSize::Base4K { Mapping::Base } else { Mapping::Huge };
    let firsts = ram.ranges().iter().filter_map(|range| rows.row_at(range.hva)).collect();
    let states = WindowStates::new(rows.count(), firsts, &stretches, |row| stored[row] > 0, other);
    let registered: usize = stretches.iter().map(Range::len).sum();
    let progress = Progress {
        stored_windows: states.left() as u64,
        stored_bytes: PageSize::Base4K.bytes() * stored.iter().map(|pages| u64::from(*pages)).sum::<u64>(),
        ..Progress::default()
    };
    let zero_windows = (registered - states.left()) as u64;
    let counted = Counted::<RestoreReport>::default();
    counted.count(|report| {
        *report = RestoreReport { progress, zero_windows, stretches: stretches.len() as u64, ..report.clone() };
    });
    let shared = Shared::new(ram, rows, saved, heats, states, host, counted, can_move, config);
    let shared = shared.map_err(RestoreError::Thread)?;
    let windows = stretches.into_iter().flatten().map(|row| shared.rows.window(row));
    shared.ram.claims().begin_filling(windows);
    Ok((shared, kernel))
}

pub(super) fn host_error(what: &'static str) -> impl Fn(io::Error) -> HostError {
    move |source| HostError { what, source }
}

pub(super) fn check_backing(ram: &GuestRam) -> Result<(), RestoreError> {
    match (ram.backing().kind(), ram.backing().start_page()) {
        _ if ram.backing().is_reservable() => Err(RestoreError::ReservedFrames),
        (BackingKind::Hugetlb, PageSize::Giant1G) => Err(RestoreError::GiantPages),
        _ => Ok(()),
    }
}

/// Filling drops page tables, and pages that exist would stay: so none may exist.
pub(super) fn check_empty(ram: &GuestRam, pagemap: &File) -> Result<(), RestoreError> {
    for range in ram.ranges() {
        let is_empty = match ram.backing().kind() {
            BackingKind::Anon => holds_nothing(pagemap, range.hva, range.gpa.bytes()),
            BackingKind::Memfd | BackingKind::Hugetlb => ram.file_bytes().map(|bytes| bytes == Bytes::ZERO),
        };
        if !is_empty.map_err(host_error("look for pages in guest RAM"))? {
            return Err(RestoreError::NotEmpty(WindowIndex::containing(range.gpa.start())));
        }
    }
    Ok(())
}

/// Opens a userfaultfd, and says whether it can move pages into this RAM.
pub(super) fn open(ram: &GuestRam) -> Result<(Userfaultfd, bool), UserfaultfdError> {
    if ram.backing().kind() != BackingKind::Anon {
        return Userfaultfd::open().map(|uffd| (uffd, false));
    }
    match Userfaultfd::open_for_moves() {
        Ok(uffd) => Ok((uffd, true)),
        Err(UserfaultfdError::NoMove) => Userfaultfd::open().map(|uffd| (uffd, false)),
        Err(error) => Err(error),
    }
}

fn mode(ram: &GuestRam) -> Mode {
    if ram.backing().kind() == BackingKind::Hugetlb { Mode::MissingCopied } else { Mode::Missing }
}

fn refused(window: WindowIndex, bytes: Bytes) -> impl Fn(io::Error) -> RestoreError {
    move |source| RestoreError::Register { window, bytes, source }
}

/// Whether another service has a part of RAM, before a page is touched that this service would answer.
fn check_free(kernel: &LinuxCalls, rows: &Rows) -> Result<(), RestoreError> {
    for range in kernel.ram.ranges() {
        let (row, bytes) = (rows.row_at(range.hva).expect("it is RAM"), range.gpa.bytes());
        let registered = kernel.uffd.register(range.hva, bytes, mode(&kernel.ram));
        registered.map_err(refused(rows.window(row), bytes))?;
        kernel.uffd.unregister(range.hva, bytes).map_err(host_error("UFFDIO_UNREGISTER"))?;
    }
    Ok(())
}

/// A page for a moment in each range of empty RAM: all parts of the range then have the same `anon_vma` (mm/rmap.c),
/// without which the mappings into which it is cut would never merge again.
fn join_mappings(kernel: &LinuxCalls, host: &LinuxHost) -> Result<(), RestoreError> {
    if kernel.ram.backing().kind() != BackingKind::Anon {
        return Ok(());
    }
    for range in kernel.ram.ranges() {
        host.advise(range.hva, PageSize::Base4K.bytes(), Advice::PopulateWrite)?;
        let first = kernel.ram.window(WindowIndex::containing(range.gpa.start()));
        first.discard().map_err(host_error("madvise(MADV_DONTNEED)"))?;
    }
    Ok(())
}

/// Drops what RAM has in the place of the stored pages.
fn drop_stored(kernel: &LinuxCalls, host: &LinuxHost, rows: &Rows, saved: &dyn SavedRam) -> Result<(), RestoreError> {
    for window in rows.windows() {
        let SavedWindow { pages, has_others, .. } = saved.window(window);
        let whole = kernel.ram.window(window);
        if pages.is_empty() {
            continue;
        }
        if !has_others {
            // The first trap: it may be marked since its pages came for the first time.
            host.advise(whole.start(), PageSize::Huge2M.bytes(), Advice::NoHugePage)?;
            whole.discard().map_err(host_error("madvise(MADV_DONTNEED)"))?;
            continue;
        }
        for run in pages.runs() {
            let page = PageSize::Base4K.bytes();
            let part = whole.part(page * u64::from(run.start), page * run.len() as u64);
            part.discard().map_err(host_error("madvise(MADV_DONTNEED)"))?;
        }
    }
    Ok(())
}

/// Registers the stretches. An error leaves none registered: the userfaultfd is closed.
fn register(kernel: &LinuxCalls, host: &LinuxHost, rows: &Rows, stretches: &[Range<Row>]) -> Result<(), RestoreError> {
    let ram = &kernel.ram;
    for stretch in stretches {
        let (start, bytes) = rows.place(stretch);
        if ram.backing().start_page() != PageSize::Base4K && ram.backing().kind() == BackingKind::Anon {
            host.advise(start, bytes, Advice::NoHugePage)?;
        }
        kernel.uffd.register(start, bytes, mode(ram)).map_err(refused(rows.window(stretch.start), bytes))?;
    }
    Ok(())
}
