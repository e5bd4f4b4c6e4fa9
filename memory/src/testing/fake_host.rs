//! A host in memory for tests. Pages are entries of a map, time passes only in a sleep, an advice, or a scan where a
//! test sets its time, and every call can be made to fail. Moves and mappings over guest RAM are real, with ordinary
//! memory for giant pages, so that a test can look for lost words.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use wideleaf_policies::{Bytes, Gpa, Hva, Moment, NodeId, PageSize};

use crate::host::{Advice, Host, HostError, PageRun};
use crate::kernel::{GiantMappings, Userfaultfds};
use crate::mover::linux::{MoverError, OpenMover};
use crate::numa::placement::NodePolicy;
use crate::region::GuestRam;
use crate::sensors::free_blocks::BUDDYINFO;
use crate::side_mapping::{GiantFile, SideContents, SideMapping, map_giant_over};
use crate::testing::fake_calls::FakeCalls;
use crate::testing::fake_mover::FakeMover;

/// Duration of one collapse on the fake host.
pub const COLLAPSE_TIME: Duration = Duration::from_micros(600);
/// Duration of one split on the fake host.
const SPLIT_TIME: Duration = Duration::from_micros(180);

/// A fake host; see the module.
#[derive(Debug, Default)]
pub struct FakeHost {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    now: Duration,
    /// Address of each base page that is present, and whether it is part of a huge page.
    pages: BTreeMap<u64, bool>,
    /// Ranges that are swapped out.
    swapped: Vec<PageRun>,
    /// Windows (by address) marked `MADV_NOHUGEPAGE`.
    no_huge: BTreeSet<u64>,
    /// Windows (by address) marked `MADV_HUGEPAGE`.
    huge: BTreeSet<u64>,
    /// Addresses of giant pages, with the base pages in use of each: looking at all would take seconds.
    giants: BTreeMap<u64, Vec<Bytes>>,
    calls: FakeCalls,
    fail_advice: Vec<(Advice, i32, u64)>,
    collapse_does_nothing: bool,
    cold_does_nothing: bool,
    texts: BTreeMap<String, String>,
    /// Node of each base page (by address) that is not on node 0.
    nodes: BTreeMap<u64, NodeId>,
    /// Nodes without a free page.
    full_nodes: BTreeSet<NodeId>,
    /// Base pages (by address) that do not move to another node.
    kept_on_node: BTreeSet<u64>,
    threads: Vec<u32>,
    moved_pages: u64,
    /// Time that a scan takes for each window.
    scan_time: Duration,
    scanned: Bytes,
    meanwhile: Option<Meanwhile>,
    mappings_are_in_pieces: bool,
    panics_at: Option<Hva>,
    moved_aside_to: Option<Hva>,
    fails_after_moving_aside: bool,
    is_of_another: bool,
    has_file: bool,
    made_ready: u64,
    /// Number of free blocks of 2 MiB; `None`: each collapse finds one.
    free_blocks: Option<u64>,
    /// Mover of all guest RAM; `None`: the real one.
    mover: Option<Arc<FakeMover>>,
}

/// Another event during a call.
struct Meanwhile(Box<dyn FnOnce() + Send>);

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meanwhile")
    }
}

const PAGE: u64 = PageSize::Base4K.bytes().get();
const WINDOW: u64 = PageSize::Huge2M.bytes().get();

impl FakeHost {
    /// A host on which exactly these pages are present.
    pub fn with_runs(runs: Vec<PageRun>) -> FakeHost {
        let host = FakeHost::default();
        for run in runs {
            host.make_present(run.start, run.bytes, run.is_huge);
        }
        host
    }

    /// Makes a range present in base pages, or in huge ones.
    pub fn make_present(&self, start: Hva, bytes: Bytes, is_huge: bool) {
        self.state().pages.extend(pages(start, bytes).map(|page| (page, is_huge)));
    }

    /// Makes a range absent.
    pub fn make_absent(&self, start: Hva, bytes: Bytes) {
        let mut state = self.state();
        for page in pages(start, bytes) {
            state.pages.remove(&page);
        }
    }

    /// Swaps out a range, none of which is present.
    pub fn swap_out(&self, start: Hva, bytes: Bytes) {
        self.state().swapped.push(PageRun { start, bytes, is_huge: false });
    }

    /// Whether any page of a range is present.
    pub fn has_page(&self, start: Hva, bytes: Bytes) -> bool {
        self.state().pages.range(start.get()..(start + bytes).get()).next().is_some()
    }

    /// Marks a range `MADV_NOHUGEPAGE`, as RAM that starts with base pages is.
    pub fn forbid_huge(&self, start: Hva, bytes: Bytes) {
        self.state().no_huge.extend(windows(start, bytes));
    }

    /// Makes the `call`-th call from now on (the next is 0) fail with `errno`, once.
    pub fn fail_call(&self, call: u64, errno: i32) {
        self.state().calls.fail(call, errno);
    }

    /// Makes the next `times` uses of an advice fail with `errno`.
    pub fn fail_advice(&self, advice: Advice, errno: i32, times: u64) {
        self.state().fail_advice.push((advice, errno, times));
    }

    /// Makes a collapse succeed and do nothing from now on, as the kernel's does for a range that it rounds away.
    pub fn collapse_does_nothing(&self, is_so: bool) {
        self.state().collapse_does_nothing = is_so;
    }

    /// Sets the text of a file of `/proc` or `/sys`. Other files do not exist.
    pub fn set_text(&self, path: &str, text: &str) {
        self.state().texts.insert(path.to_owned(), text.to_owned());
    }

    /// Puts the pages of a range, present now or later, on a node; all others are on node 0.
    pub fn put_on_node(&self, start: Hva, bytes: Bytes, node: NodeId) {
        self.state().nodes.extend(pages(start, bytes).map(|page| (page, node)));
    }

    /// Makes a node have no free page from now on.
    pub fn fill_node(&self, node: NodeId) {
        self.state().full_nodes.insert(node);
    }

    /// Makes a base page stay on its node from now on (`EBUSY`).
    pub fn keep_on_node(&self, page: Hva) {
        self.state().kept_on_node.insert(page.get());
    }

    /// Sets the numbers of the process's threads.
    pub fn set_threads(&self, threads: &[u32]) {
        self.state().threads = threads.to_vec();
    }

    /// Number of base pages that were moved to another node.
    pub fn moved_pages(&self) -> u64 {
        self.state().moved_pages
    }

    /// Makes each scan take this time for each window from now on.
    pub fn take_for_scans(&self, of_window: Duration) {
        self.state().scan_time = of_window;
    }

    /// Sum of the ranges that were scanned, in bytes.
    pub fn scanned(&self) -> Bytes {
        self.state().scanned
    }

    /// Calls `happens` when the next scan has read the pages, before its caller gets the result.
    pub fn when_scanned(&self, happens: impl FnOnce() + Send + 'static) {
        self.state().meanwhile = Some(Meanwhile(Box::new(happens)));
    }

    /// Makes all memory that of a file with every page, in base pages, from now on. A collapse also finds pages that
    /// are not mapped.
    pub fn be_of_a_file(&self) {
        self.state().has_file = true;
    }

    /// Makes `MADV_COLD` succeed and split nothing from now on, as the kernel does for a page that is
    /// shared or pinned.
    pub fn cold_does_nothing(&self, is_so: bool) {
        self.state().cold_does_nothing = is_so;
    }

    /// Makes no range of more than one window one mapping from now on.
    pub fn cut_mappings(&self) {
        self.state().mappings_are_in_pieces = true;
    }

    /// Makes advice about a range that starts there panic from now on, as by a defect of wideleaf.
    pub fn panic_at(&self, start: Hva) {
        self.state().panics_at = Some(start);
    }

    /// Makes the `call`-th call from now on (the next is 0) panic, once, before it has changed anything.
    pub fn panic_in_call(&self, call: u64) {
        self.state().calls.panic(call);
    }

    /// Makes it another process's address space from now on: ranges cannot be marked.
    pub fn be_of_another_process(&self) {
        self.state().is_of_another = true;
    }

    /// From now on, moving guest RAM aside reports an error after it has moved pages.
    pub fn fail_after_moving_aside(&self) {
        self.state().fails_after_moving_aside = true;
    }

    /// Address to which pages were moved aside last.
    pub fn moved_aside_to(&self) -> Option<Hva> {
        self.state().moved_aside_to
    }

    /// Number of huge pages that were made ready.
    pub fn made_ready(&self) -> u64 {
        self.state().made_ready
    }

    /// Has each collapse take one of this number of free blocks from now on, and refuses it where none is left.
    pub fn set_free_blocks(&self, blocks: u64) {
        self.state().set_free_blocks(blocks);
    }

    /// Number of free blocks of 2 MiB, as it was set and less those taken since.
    pub fn free_blocks(&self) -> u64 {
        self.state().free_blocks.unwrap_or(0)
    }

    /// Opens this mover for guest RAM from now on. The host has pages of its own: it does not see what the mover moves.
    pub fn move_with(&self, mover: Arc<FakeMover>) {
        self.state().mover = Some(mover);
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u64 {
        self.state().calls.made()
    }

    /// Number of windows that are one huge page.
    pub fn huge_windows(&self) -> u64 {
        self.state().pages.values().filter(|is_huge| **is_huge).count() as u64 * PAGE / WINDOW
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A call that panics has changed nothing yet.
        self.state.lock()
    }

    fn enter(&self, what: &'static str) -> Result<MutexGuard<'_, State>, HostError> {
        let mut state = self.state();
        state.calls.enter().map_err(|source| HostError { what, source })?;
        Ok(state)
    }
}

fn pages(start: Hva, bytes: Bytes) -> impl Iterator<Item = u64> {
    (start.get()..start.get() + bytes.get()).step_by(PAGE as usize)
}

fn windows(start: Hva, bytes: Bytes) -> impl Iterator<Item = u64> {
    (start.get()..start.get() + bytes.get()).step_by(WINDOW as usize)
}

impl State {
    fn collapse(&mut self, start: u64) -> Result<(), i32> {
        let is_hole = !self.has_file && self.pages.range(start..start + WINDOW).next().is_none();
        if is_hole || self.no_huge.contains(&start) {
            return Err(libc::EINVAL);
        }
        if self.free_blocks == Some(0) {
            return Err(libc::ENOMEM);
        }
        if !self.collapse_does_nothing {
            if let Some(blocks) = self.free_blocks {
                self.set_free_blocks(blocks - 1);
            }
            self.pages.extend(pages(Hva::new(start), PageSize::Huge2M.bytes()).map(|page| (page, true)));
        }
        Ok(())
    }

    /// Free blocks are shown in `/proc/buddyinfo`.
    fn set_free_blocks(&mut self, blocks: u64) {
        self.free_blocks = Some(blocks);
        let text = format!("Node 0, zone Normal 9 9 9 9 9 9 9 9 9 {blocks} 0\n");
        self.texts.insert(BUDDYINFO.to_owned(), text);
    }

    /// Makes absent pages present, as huge pages if that is the advice.
    fn populate(&mut self, pages: impl Iterator<Item = u64>) {
        for page in pages {
            let is_huge = !self.has_file && self.huge.contains(&(page - page % WINDOW));
            self.pages.entry(page).or_insert(is_huge);
        }
    }

    /// Splits the huge page that holds `at` into base pages.
    fn split(&mut self, at: u64) {
        let window = at - at % WINDOW;
        if !self.cold_does_nothing {
            self.pages.range_mut(window..window + WINDOW).for_each(|(_, is_huge)| *is_huge = false);
        }
    }

    /// Moves the pages of a giant from one address to another, in the place of those there.
    fn relocate(&mut self, from: Hva, to: Hva) {
        self.forget(to);
        let end = (from + PageSize::Giant1G.bytes()).get();
        let moved: Vec<(u64, bool)> =
            self.pages.range(from.get()..end).map(|(page, is_huge)| (*page, *is_huge)).collect();
        self.forget(from);
        self.pages.extend(moved.into_iter().map(|(page, is_huge)| (page - from.get() + to.get(), is_huge)));
    }

    fn forget(&mut self, start: Hva) {
        self.giants.remove(&start.get());
        let end = (start + PageSize::Giant1G.bytes()).get();
        self.pages.retain(|page, _| !(start.get()..end).contains(page));
    }
}

impl Host for FakeHost {
    fn is_own(&self) -> bool {
        !self.state().is_of_another
    }

    fn now(&self) -> Moment {
        Moment::after_start(self.state().now)
    }

    fn thread_cpu_time(&self) -> Duration {
        self.state().now
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError> {
        const WHAT: &str = "fake madvise";
        let fail = |errno| Err(HostError { what: WHAT, source: io::Error::from_raw_os_error(errno) });
        let is_mistake = self.state().panics_at == Some(start);
        assert!(!is_mistake, "as by a defect of wideleaf");
        let mut state = self.enter(WHAT)?;
        if let Some((_, errno, times)) = state.fail_advice.iter_mut().find(|(of, _, times)| *of == advice && *times > 0)
        {
            *times -= 1;
            return fail(*errno);
        }
        if state.is_of_another && !matches!(advice, Advice::Collapse | Advice::Cold) {
            return fail(libc::ENOTSUP);
        }
        if advice == Advice::PopulateRead {
            state.populate(pages(start, bytes)); // which need not be whole windows
            return Ok(());
        }
        for window in windows(start, bytes) {
            match advice {
                Advice::HugePage => {
                    state.no_huge.remove(&window);
                    state.huge.insert(window);
                }
                Advice::NoHugePage => {
                    state.huge.remove(&window);
                    state.no_huge.insert(window);
                }
                Advice::Collapse => {
                    state.now += COLLAPSE_TIME;
                    if let Err(errno) = state.collapse(window) {
                        return fail(errno);
                    }
                }
                Advice::PopulateRead => unreachable!("answered above"),
                Advice::PopulateWrite => {
                    state.populate(pages(Hva::new(window), PageSize::Huge2M.bytes()));
                }
                Advice::Cold => {
                    state.now += SPLIT_TIME;
                    state.split(window);
                }
            }
        }
        Ok(())
    }

    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        let mut state = self.enter("fake scan")?;
        let took = state.scan_time * bytes.get().div_ceil(WINDOW) as u32;
        state.now += took;
        state.scanned += bytes;
        for (page, is_huge) in state.pages.range(start.get()..start.get() + bytes.get()) {
            match runs.last_mut() {
                Some(run) if (run.start + run.bytes).get() == *page && run.is_huge == *is_huge => {
                    run.bytes += PageSize::Base4K.bytes();
                }
                _ => runs.push(PageRun { start: Hva::new(*page), bytes: PageSize::Base4K.bytes(), is_huge: *is_huge }),
            }
        }
        let meanwhile = state.meanwhile.take();
        drop(state);
        if let Some(Meanwhile(happens)) = meanwhile {
            happens();
        }
        Ok(())
    }

    fn scan_occupied(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        let giant = self.state().giants.get(&start.get()).cloned();
        let Some(occupied) = giant else {
            self.scan(start, bytes, runs)?;
            let is_in = |run: &&PageRun| start <= run.start && run.start + run.bytes <= start + bytes;
            runs.extend(self.state().swapped.iter().filter(is_in));
            runs.sort_by_key(|run| run.start);
            return Ok(());
        };
        drop(self.enter("fake scan")?);
        let page = |offset| PageRun { start: start + offset, bytes: PageSize::Base4K.bytes(), is_huge: true };
        runs.extend(occupied.into_iter().map(page));
        Ok(())
    }

    fn is_one_mapping(&self, _: Hva, bytes: Bytes) -> Result<bool, HostError> {
        let state = self.enter("fake look at the mappings")?;
        Ok(bytes.get() <= WINDOW || !state.mappings_are_in_pieces)
    }

    fn read_text(&self, path: &str) -> Result<String, HostError> {
        let text = self.enter("fake read")?.texts.get(path).cloned();
        let absent = || io::Error::new(io::ErrorKind::NotFound, path.to_owned());
        text.ok_or_else(|| HostError { what: "fake read", source: absent() })
    }

    fn nodes_of(&self, asked: &[Hva], nodes: &mut Vec<Option<NodeId>>) -> Result<(), HostError> {
        let state = self.enter("fake nodes_of")?;
        let node = |page: u64| state.nodes.get(&page).copied().unwrap_or_default();
        nodes.extend(asked.iter().map(|page| state.pages.contains_key(&page.get()).then(|| node(page.get()))));
        Ok(())
    }

    fn move_to_node(&self, moved: &[Hva], node: NodeId) -> Result<(), HostError> {
        const WHAT: &str = "fake move_to_node";
        let mut state = self.enter(WHAT)?;
        if state.full_nodes.contains(&node) {
            return Err(HostError { what: WHAT, source: io::Error::from_raw_os_error(libc::ENOMEM) });
        }
        state.now += COLLAPSE_TIME;
        let mut is_busy = false;
        for page in moved.iter().map(|page| page.get()) {
            let of_page = match state.pages.get(&page) {
                None => continue,
                Some(true) => page - page % WINDOW..page - page % WINDOW + WINDOW,
                Some(false) => page..page + PAGE,
            };
            let all: Vec<u64> = state.pages.range(of_page).map(|(page, _)| *page).collect();
            if all.iter().any(|page| state.kept_on_node.contains(page)) {
                is_busy = true;
                continue;
            }
            state.moved_pages += all.len() as u64;
            state.nodes.extend(all.into_iter().map(|page| (page, node)));
        }
        let busy = || HostError { what: WHAT, source: io::Error::from_raw_os_error(libc::EBUSY) };
        if is_busy { Err(busy()) } else { Ok(()) }
    }

    fn threads(&self) -> Result<Vec<u32>, HostError> {
        Ok(self.enter("fake threads")?.threads.clone())
    }

    fn make_huge_page_ready(&self, _: Hva) {
        self.state().made_ready += 1;
    }

    fn sleep(&self, time: Duration) {
        self.state().now += time;
    }
}

impl GiantMappings for FakeHost {
    fn create_giant(&self) -> Result<GiantFile, HostError> {
        drop(self.enter("fake memfd_create")?);
        GiantFile::of_ordinary_memory()
    }

    fn fill_giant(&self, _: &GiantFile, _: Option<&NodePolicy>) -> Result<(), HostError> {
        self.enter("fake fallocate").map(drop)
    }

    fn map_aside(&self, contents: SideContents<'_>) -> Result<SideMapping, HostError> {
        drop(self.enter("fake mmap aside")?);
        Ok(SideMapping::map(contents)?)
    }

    fn move_aside(&self, ram: &GuestRam, giant: Gpa, to: &SideMapping) -> Result<(), HostError> {
        const WHAT: &str = "fake mremap aside";
        let mut state = self.enter(WHAT)?;
        to.take(ram, giant).map_err(|source| HostError { what: WHAT, source })?;
        state.relocate(ram.base() + (giant - Gpa::new(0)), to.start());
        state.moved_aside_to = Some(to.start());
        match state.fails_after_moving_aside {
            true => Err(HostError { what: WHAT, source: io::Error::from_raw_os_error(libc::ENOMEM) }),
            false => Ok(()),
        }
    }

    fn move_in(&self, from: &SideMapping, ram: &GuestRam, giant: Gpa) -> Result<(), HostError> {
        const WHAT: &str = "fake mremap into guest RAM";
        let mut state = self.enter(WHAT)?;
        from.give(ram, giant).map_err(|source| HostError { what: WHAT, source })?;
        state.relocate(from.start(), ram.base() + (giant - Gpa::new(0)));
        Ok(())
    }

    fn map_over(&self, ram: &GuestRam, giant: Gpa, page: &GiantFile) -> Result<(), HostError> {
        let mut state = self.enter("fake mmap over guest RAM")?;
        map_giant_over(page, ram, giant)?;
        let start = ram.base() + (giant - Gpa::new(0));
        state.pages.extend(pages(start, PageSize::Giant1G.bytes()).map(|page| (page, true)));
        state.giants.insert(start.get(), page.occupied().collect());
        Ok(())
    }
}

impl Userfaultfds for FakeHost {
    fn open_mover(&self, ram: Arc<GuestRam>) -> Result<OpenMover, MoverError> {
        let mover = self.state().mover.clone();
        match mover {
            Some(mover) => Ok(OpenMover { mover, touches: Arc::new(NeverReadable::new()) }),
            None => OpenMover::of(ram),
        }
    }
}

/// Descriptor of a mover of which no touch is ever reported.
struct NeverReadable {
    reader: PipeReader,
    /// A pipe without a writer would count as readable.
    _writer: PipeWriter,
}

impl NeverReadable {
    fn new() -> NeverReadable {
        let (reader, writer) = io::pipe().expect("the process has descriptors left");
        NeverReadable { reader, _writer: writer }
    }
}

impl AsFd for NeverReadable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}
