//! `PAGEMAP_SCAN`, the ioctl on `/proc/<pid>/pagemap` that reports runs of pages by category (Linux 6.7,
//! Documentation/admin-guide/mm/pagemap.rst, include/uapi/linux/fs.h).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use wideleaf_policies::{Bytes, Hva};

use crate::host::PageRun;

/// Layout of `struct pm_scan_arg`.
#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Layout of `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;

nix::ioctl_readwrite!(pagemap_scan, b'f', 16, ScanArgument);

/// Number of runs fetched per call: 24 bytes each, so that one call's answer is 24 KiB.
const REGIONS_PER_CALL: usize = 1024;

/// Categories of the pages that a scan finds.
#[derive(Clone, Copy, Debug)]
struct Categories {
    /// Categories that are inverted before they are compared.
    inverted: u64,
    /// Categories that a page must all have.
    all_of: u64,
    /// Categories of which a page must have at least one, if there are any.
    any_of: u64,
}

/// The present pages of `[start, start + bytes)` as runs of one kind, ascending. The shared zero page counts as
/// absent: it holds no data of the guest, and collapse would have to allocate it like a hole.
pub(crate) fn scan(pagemap: &File, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> io::Result<()> {
    let wanted = Categories { inverted: PAGE_IS_PFNZERO, all_of: PAGE_IS_PRESENT | PAGE_IS_PFNZERO, any_of: 0 };
    scan_for(wanted, pagemap, start, bytes, runs)
}

/// The pages of anonymous memory that may hold data: those present, and those swapped out or on their way to another
/// frame (the kernel calls both "swapped").
pub(crate) fn scan_occupied(pagemap: &File, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> io::Result<()> {
    let any_of = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
    scan_for(Categories { inverted: PAGE_IS_PFNZERO, all_of: PAGE_IS_PFNZERO, any_of }, pagemap, start, bytes, runs)
}

/// The pages of `[start, start + bytes)` that exist in any form, ascending: those of [`scan_occupied`], and the
/// shared zero page. Reading them causes no missing fault.
pub(crate) fn scan_held(pagemap: &File, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> io::Result<()> {
    let wanted = Categories { inverted: 0, all_of: 0, any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED };
    scan_for(wanted, pagemap, start, bytes, runs)
}

fn scan_for(wanted: Categories, pagemap: &File, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> io::Result<()> {
    let mut regions = [Region::default(); REGIONS_PER_CALL];
    let end = (start + bytes).get();
    let mut at = start.get();
    while at < end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: 0,
            start: at,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS_PER_CALL as u64,
            max_pages: 0,
            category_inverted: wanted.inverted,
            category_mask: wanted.all_of,
            category_anyof_mask: wanted.any_of,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_HUGE,
        };
        // SAFETY: the argument is the kernel's structure with its size in it, `vec` points to `vec_len` regions that
        // live until the call returns, and the kernel writes nothing else.
        let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &mut argument) }?;
        let found = regions.get(..count as usize).ok_or(io::ErrorKind::InvalidData)?;
        runs.extend(found.iter().map(|region| PageRun {
            start: Hva::new(region.start),
            bytes: Bytes::new(region.end - region.start),
            is_huge: region.categories & PAGE_IS_HUGE != 0,
        }));
        // The kernel works in steps of 512 regions. If its last step reaches the end, `walk_end` is still that of the
        // step before (seen on 6.18): continuing from there would report pages twice.
        let reported_to = found.last().map_or(at, |region| region.end);
        let next = argument.walk_end.max(reported_to);
        if next <= at {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        at = next;
    }
    Ok(())
}

/// Whether `[start, start + bytes)` holds nothing: no page is present, not even the shared zero page, and none is
/// swapped out or on its way to another frame (the kernel calls both "swapped"). Only then is there nothing to lose:
/// an absent page may still hold the guest's data.
pub(crate) fn holds_nothing(pagemap: &File, start: Hva, bytes: Bytes) -> io::Result<bool> {
    let mut first = Region::default();
    let mut argument = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        flags: 0,
        start: start.get(),
        end: (start + bytes).get(),
        walk_end: 0,
        vec: (&raw mut first) as u64,
        vec_len: 1,
        max_pages: 1,
        category_inverted: 0,
        category_mask: 0,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
    };
    // SAFETY: the argument is the kernel's structure with its size in it, `vec` points to one region that lives until
    // the call returns, and the kernel writes nothing else.
    let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &mut argument) }?;
    Ok(count == 0)
}
