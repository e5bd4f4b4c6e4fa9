//! `cachestat(2)`: the pages of a file that are in the host's page cache.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Number of the call, the same on every architecture (scripts/syscall.tbl of the kernel). Since Linux 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` (linux/mman.h): a length of 0 is up to the end of the file.
#[repr(C)]
struct Range {
    start: u64,
    bytes: u64,
}

/// `struct cachestat` (linux/mman.h): numbers of pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    under_writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Number of the file's pages that are in the page cache. The answer may be old when it is here.
///
/// # Errors
/// Error of the kernel: `ENOSYS` before Linux 6.5; `EPERM` on newer kernels for a file that the caller neither owns nor
/// may write; `EOPNOTSUPP` for a file on hugetlbfs.
pub fn cached_pages(file: &File) -> io::Result<u64> {
    let whole = Range { start: 0, bytes: 0 };
    let mut counts = Counts::default();
    // SAFETY: the kernel reads `whole` and writes `counts`, which have the layout that it expects and live until the
    // call returns. The descriptor is open, and the call changes nothing.
    let asked = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const whole, &raw mut counts, 0_u32) };
    if asked == 0 { Ok(counts.cached) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn pages_that_were_just_written_are_in_the_page_cache_and_those_of_a_hole_are_not() {
        let mut file = tempfile::tempfile().expect("a file");
        let before = match cached_pages(&file) {
            Ok(pages) => pages,
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                return println!("skipped, this kernel has no cachestat: {error}");
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(before, 0);
        file.write_all(&[1; 5 * 4096]).expect("room for it");
        file.set_len(100 << 20).expect("a hole");
        assert_eq!(cached_pages(&file).expect("as before"), 5);
    }
}
