//! Host memory that is fragmented on purpose: memory is free, but almost no 2 MiB of it in one piece.
//!
//! ```text
//!   a free block of 2 MiB ─ fault ─▶ a huge page ─ MADV_COLD ─▶ 512 base pages ─ vmsplice ─▶ one is in a pipe as well
//!                                                                               └ unmap ──▶ 511 are free, but no block
//!                                                                                           as long as the pipe is
//! ```
//!
//! The reader of the pipe needs that page in place, so compaction cannot move it (mm/migrate.c counts references).
//! First the blocks that are to be left are set aside whole. Then blocks are taken one chunk at a time until the
//! kernel has none left, not even by compaction. Then the blocks set aside are freed. One page of each block is
//! held, a 512th of the free memory, and for a moment a chunk: memory never runs short. A child holds all of it, so
//! that the kernel gets it back however the experiment ends.
//!
//! Those pages are then free, but not all blocks are whole at once: the kernel keeps pages that are freed one by
//! one on lists of each CPU (`pagesets` of `/proc/zoneinfo`; up to 10 000 of them with 24 GiB), and
//! `/proc/buddyinfo` counts only merged ones. They are merged as that CPU's memory is used.

use std::fs;
use std::io::{self, IoSlice, PipeReader, PipeWriter};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use clap::Args;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SpliceFFlags, fcntl, vmsplice};
use wideleaf::guardian::{self, Held};
use wideleaf_memory::host::{Advice, HostError};
use wideleaf_memory::sensors::free_blocks::{BUDDYINFO, free_huge_pages};
use wideleaf_memory::{Host as _, LinuxHost};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, Hva, PageSize};
use wideleaf_run::failure::Failure;

const BLOCK: usize = PageSize::Huge2M.bytes().get() as usize;
const PAGE: usize = PageSize::Base4K.bytes().get() as usize;

/// Memory taken at once. Large enough that the C library maps it anew, whatever its threshold (mallopt(3): 32 MiB
/// at most).
const CHUNK: Bytes = mib(256);
/// Minimum of available memory: a chunk, and what the machine needs while the blocks are broken up.
const AVAILABLE_MIN: Bytes = gib(2);
/// Number of consecutive chunks with almost no huge page after which none is left. After a failed compaction the
/// kernel compacts less eagerly (mm/compaction.c, `defer_compaction`), so that one such chunk says little.
const EMPTY_CHUNKS: u32 = 3;
/// Number of blocks in such a chunk.
const EMPTY_LOOK: usize = 16;
/// At most this number of huge pages in a chunk counts as almost none: other processes free memory all the time,
/// and that memory is not chased.
const EMPTY_MAX: u64 = 2;
/// Time limit. What is not broken by then stays whole, and `/proc/buddyinfo` counts it. 20 GiB that the hypervisor
/// below has reclaimed take a minute, and three on a machine with other work.
const TIME_MAX: Duration = Duration::from_secs(240);
/// Size that a pipe is asked to hold: the default of fs.pipe-max-size for all users, 1 MiB.
const PIPE_BYTES: i32 = 1 << 20;

/// Arguments of the child that keeps memory fragmented for an experiment.
#[derive(Debug, Args)]
pub struct HoldFragmentsArgs {
    /// Number of 2 MiB pages that stay available
    #[arg(long, value_name = "N")]
    pub huge_pages_left: u64,
}

/// The child: runs until its standard input ends.
///
/// # Errors
/// [`Failure::Host`] if memory is short, or if the kernel does not allow pages to be held.
pub fn main(args: &HoldFragmentsArgs) -> Result<(), Failure> {
    let mut fragments = Fragments::default();
    let [broken, left] = fragments
        .break_all_but(args.huge_pages_left)
        .map_err(|why| Failure::Host(format!("cannot break up free memory: {why}")))?;
    guardian::until_input_ends(&format!("{broken} blocks of 2 MiB are in pieces, {left} were left whole"))
}

/// Arguments of the child that takes free huge pages for a while: a hog.
#[derive(Debug, Args)]
pub struct HoldBlocksArgs {
    /// Number of 2 MiB pages that are taken
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub huge_pages: u32,
}

/// The hog: takes the pages, and runs until its standard input ends.
///
/// # Errors
/// [`Failure::Host`] if memory is short.
pub fn hog(args: &HoldBlocksArgs) -> Result<(), Failure> {
    let cannot = |why: FragmentError| Failure::Host(format!("cannot take {} huge pages: {why}", args.huge_pages));
    let host = LinuxHost::open().map_err(|error| cannot(error.into()))?;
    let taken = Blocks::take(&host, args.huge_pages as usize).map_err(cannot)?;
    guardian::until_input_ends(&format!("{} of {} pages of 2 MiB were huge", taken.huge().count(), args.huge_pages))
}

/// Huge pages that a hog has until this is dropped or the process ends.
#[derive(Debug)]
pub(in crate::experiment) struct Hog(Held);

impl Hog {
    /// Takes this number of pages of 2 MiB; those that no free block can back are base pages.
    ///
    /// # Errors
    /// The reason why it is not possible.
    pub(in crate::experiment) fn take(huge_pages: u64) -> Result<Hog, String> {
        Held::start(&["hold-blocks", "--huge-pages", &huge_pages.to_string()]).map(Hog)
    }

    /// What the child reported.
    pub(in crate::experiment) fn said(&self) -> &str {
        self.0.said()
    }
}

/// Fragmented memory until this is dropped or the process ends.
#[derive(Debug)]
pub(super) struct HeldFragments(Held);

impl HeldFragments {
    /// Breaks up all free memory except this number of 2 MiB pages.
    ///
    /// # Errors
    /// The reason why it is not possible.
    pub(super) fn hold(huge_pages_left: u64) -> Result<HeldFragments, String> {
        Held::start(&["hold-fragments", "--huge-pages-left", &huge_pages_left.to_string()]).map(HeldFragments)
    }

    /// What the child reported.
    pub(super) fn said(&self) -> &str {
        self.0.said()
    }
}

/// Pages that are held in a pipe, one of each block.
#[derive(Debug, Default)]
struct Fragments {
    pipes: Vec<Pipe>,
}

#[derive(Debug)]
struct Pipe {
    writer: PipeWriter,
    _reader: PipeReader,
}

/// Reason why memory stays as it is.
#[derive(Debug, thiserror::Error)]
enum FragmentError {
    #[error("only {available} are available: it needs {AVAILABLE_MIN}, so that other processes do not run short")]
    Short { available: Bytes },
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("cannot use a pipe: {0}")]
    Pipe(#[from] io::Error),
}

impl From<Errno> for FragmentError {
    fn from(errno: Errno) -> FragmentError {
        FragmentError::Pipe(errno.into())
    }
}

impl Fragments {
    /// Takes blocks until only `huge_pages_left` remain. Returns the number of broken blocks and of those left.
    fn break_all_but(&mut self, huge_pages_left: u64) -> Result<[u64; 2], FragmentError> {
        let host = LinuxHost::open()?;
        let aside = Blocks::take(&host, huge_pages_left as usize)?;
        let left = aside.is_huge.iter().filter(|is_huge| **is_huge).count() as u64;
        let (began, whole_chunk) = (Instant::now(), CHUNK.pages(PageSize::Huge2M));
        let (mut broken, mut empty) = (0, 0);
        while empty < EMPTY_CHUNKS && began.elapsed() < TIME_MAX {
            // If few are left, each fault that finds none compacts all memory first.
            let is_plenty = free_blocks_now() >= whole_chunk;
            let blocks = if is_plenty { whole_chunk as usize } else { EMPTY_LOOK };
            let some = self.break_some(&host, blocks)?;
            broken += some;
            empty = if some > EMPTY_MAX { 0 } else { empty + 1 };
        }
        Ok([broken, left])
    }

    /// Takes at most this number of blocks, and keeps a page of each. Returns the number of blocks found.
    fn break_some(&mut self, host: &LinuxHost, blocks: usize) -> Result<u64, FragmentError> {
        let taken = Blocks::take(host, blocks)?;
        let is_split = taken.split(host)?;
        let mut broken = 0;
        // A block that the kernel did not split would be kept whole.
        for index in taken.huge().filter(|index| is_split[*index]) {
            self.keep(taken.first_page(index))?;
            broken += 1;
        }
        Ok(broken)
    }

    /// Keeps a page, even after it is unmapped.
    fn keep(&mut self, page: &[u8]) -> Result<(), FragmentError> {
        if let Some(pipe) = self.pipes.last_mut() {
            match pipe.take(page) {
                Err(Errno::EAGAIN) => {} // the pipe is full
                taken => return Ok(taken?),
            }
        }
        let (reader, writer) = io::pipe()?;
        fcntl(&writer, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES))?;
        let mut pipe = Pipe { writer, _reader: reader };
        pipe.take(page)?;
        self.pipes.push(pipe);
        Ok(())
    }
}

impl Pipe {
    fn take(&mut self, page: &[u8]) -> Result<(), Errno> {
        vmsplice(self.writer.as_fd(), &[IoSlice::new(page)], SpliceFFlags::SPLICE_F_NONBLOCK).map(drop)
    }
}

/// Memory aligned to 2 MiB, in huge pages as far as the kernel has them.
struct Blocks {
    memory: Vec<u8>,
    start: usize,
    is_huge: Vec<bool>,
}

impl Blocks {
    /// Takes this number of blocks, all of them touched.
    fn take(host: &LinuxHost, blocks: usize) -> Result<Blocks, FragmentError> {
        let bytes = blocks * BLOCK;
        let available = Bytes::new(wideleaf_measure::environment::memory_available_kib() * 1024);
        if available < AVAILABLE_MIN + Bytes::new(bytes as u64) {
            return Err(FragmentError::Short { available });
        }
        // A request for all of it, so that it is a mapping of its own, and zeroed, which touches none of it.
        let mut memory = vec![0_u8; bytes.max(CHUNK.get() as usize) + BLOCK];
        let start = memory.as_ptr().align_offset(BLOCK);
        let address = Hva::new(memory[start..].as_ptr() as u64);
        if bytes > 0 {
            host.advise(address, Bytes::new(bytes as u64), Advice::HugePage)?;
        }
        // Every page is non-zero: when the kernel splits a huge page, it looks for zero pages and drops them.
        memory[start..start + bytes].chunks_mut(PAGE).for_each(|page| page[0] = 1);
        let is_huge = huge_blocks(host, address, blocks)?;
        Ok(Blocks { memory, start, is_huge })
    }

    /// Splits the huge pages into base pages. Returns for each block whether it is on base pages now.
    fn split(&self, host: &LinuxHost) -> Result<Vec<bool>, HostError> {
        for index in self.huge() {
            host.advise(self.address(index), Bytes::new(PAGE as u64), Advice::Cold)?;
        }
        let is_huge = huge_blocks(host, self.address(0), self.is_huge.len())?;
        Ok(is_huge.into_iter().map(|is_huge| !is_huge).collect())
    }

    fn huge(&self) -> impl Iterator<Item = usize> {
        (0..self.is_huge.len()).filter(|index| self.is_huge[*index])
    }

    fn first_page(&self, index: usize) -> &[u8] {
        &self.memory[self.start + index * BLOCK..][..PAGE]
    }

    fn address(&self, index: usize) -> Hva {
        Hva::new(self.first_page(index).as_ptr() as u64)
    }
}

/// Tells which blocks from `address` on are huge pages.
fn huge_blocks(host: &LinuxHost, address: Hva, blocks: usize) -> Result<Vec<bool>, HostError> {
    let mut runs = Vec::new();
    host.scan(address, Bytes::new((blocks * BLOCK) as u64), &mut runs)?;
    let mut is_huge = vec![false; blocks];
    for run in runs.iter().filter(|run| run.is_huge) {
        let first = ((run.start - address).get() as usize) / BLOCK;
        let after = ((run.start + run.bytes - address).get() as usize).div_ceil(BLOCK);
        is_huge[first..after].fill(true);
    }
    Ok(is_huge)
}

/// Free blocks of 2 MiB of this machine.
pub(in crate::experiment) fn free_blocks_now() -> u64 {
    free_huge_pages(&fs::read_to_string(BUDDYINFO).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use super::*;

    /// Bit of `/proc/kpageflags` (Documentation/admin-guide/mm/pagemap.rst): a free page.
    const BUDDY: u64 = 1 << 10;

    fn flags(frame: u64) -> u64 {
        let mut entry = [0; 8];
        let file = File::open("/proc/kpageflags").expect("root may");
        file.read_exact_at(&mut entry, frame * 8).expect("a frame of this machine");
        u64::from_ne_bytes(entry)
    }

    /// The frame behind an address; `None` if the kernel hides it.
    fn frame(address: u64) -> Option<u64> {
        let mut entry = [0; 8];
        File::open("/proc/self/pagemap").ok()?.read_exact_at(&mut entry, address / PAGE as u64 * 8).ok()?;
        Some(u64::from_ne_bytes(entry) & ((1 << 55) - 1)).filter(|frame| *frame != 0)
    }

    #[test]
    fn a_kept_page_stays_where_it_is_through_a_compaction() {
        const COMPACT: &str = "/proc/sys/vm/compact_memory";
        let page = vec![1_u8; 2 * PAGE];
        let page = &page[page.as_ptr().align_offset(PAGE)..][..PAGE];
        let Some(frame) = frame(page.as_ptr() as u64).filter(|_| File::options().write(true).open(COMPACT).is_ok())
        else {
            return println!("skipped: frame numbers and compaction are root's");
        };
        let mut fragments = Fragments::default();
        fragments.keep(page).expect("a pipe");
        fs::write(COMPACT, "1").expect("root may");
        assert_eq!(flags(frame) & BUDDY, 0, "it is in the pipe");
        assert_eq!(super::tests::frame(page.as_ptr() as u64), Some(frame), "and not moved");
    }

    #[test]
    fn a_block_is_on_base_pages_before_one_of_them_is_kept() {
        let host = LinuxHost::open().expect("/proc is mounted");
        let blocks = Blocks::take(&host, EMPTY_LOOK).expect("some memory");
        if blocks.huge().next().is_none() {
            return println!("skipped: no huge page is available");
        }
        let is_split = blocks.split(&host).expect("anonymous memory");
        assert!(blocks.huge().all(|index| is_split[index]), "{is_split:?}");
    }

    #[test]
    #[ignore = "takes all blocks of the machine for some seconds: other processes then get no huge pages"]
    fn no_huge_page_is_left_when_all_blocks_are_broken_and_those_given_back_are_available() {
        const LEFT: u64 = 64;
        let host = LinuxHost::open().expect("/proc is mounted");
        let mut fragments = Fragments::default();
        let [broken, left] = fragments.break_all_but(LEFT).expect("root, and memory");
        assert!(broken > LEFT && left == LEFT, "{broken} were broken, {left} set aside: the host needs free blocks");
        let had = Blocks::take(&host, 2 * LEFT as usize).expect("memory").huge().count() as u64;
        assert!((LEFT / 2..=LEFT + LEFT / 4).contains(&had), "{had} are available, {LEFT} were left");
        drop(fragments);
        let had = Blocks::take(&host, 4 * LEFT as usize).expect("memory").huge().count() as u64;
        assert_eq!(had, 4 * LEFT, "everything is as before");
    }
}
