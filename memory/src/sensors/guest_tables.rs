//! The guest's own page tables, read only: which page size the guest maps each window of its memory with. A guest that
//! maps a window with base pages gains less from a huge page behind it.
//!
//! ```text
//!   CR3 ─▶ [5] ─▶ 4 ─▶ 3 ─▶ 2 ─▶ 1        level of a table
//!                      │    │    └ leaf: 4 KiB    ┐
//!                      │    └ leaf: 2 MiB (PS)    ├─▶ marks the window of guest-physical memory it leads to
//!                      └ leaf: 1 GiB (PS)         ┘
//! ```
//!
//! Entries are those of SDM vol. 3, 4.5 (4-level and 5-level paging). The guest may write any value to its tables at
//! any time. As for the CPU, an entry with reserved bits maps nothing. A table outside RAM is not followed. Each
//! table is read once per level, so a loop ends, and the number of tables is bounded. Reading an absent table touches
//! the page, as the guest's own walk would.
//!
//! Mappings for user mode count. A kernel maps all memory to itself with large pages, whatever page sizes its programs
//! use. So a window that only supervisor mappings lead to is unknown: it may be memory of a process that runs on no
//! vCPU at this moment, and then the roots do not lead to its mapping.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Bytes, Gpa, GpaRange, GuestMapping, PageSize, WindowIndex};

use crate::host::HostError;
use crate::host::process::ProcessHost;
use crate::region::{GuestRam, RamRange};
use crate::second_level::{PagingMode, SecondLevel, SecondLevelError, TableLevels};

/// Maximum number of tables read in one walk: 512 MiB of them, enough for 256 GiB in base pages. Reading all takes
/// well below a second; for a guest with more tables, the answer is marked as incomplete.
pub const TABLES_MAX: usize = 1 << 17;

/// The entries of one table.
pub type Entries = [u64; ENTRIES];

/// Source of tables: guest RAM of this process ([`GuestRam`]) or of another one ([`ProcessRam`]).
pub trait TableMemory {
    /// Reads the table at an address that is a multiple of 4 KiB. Returns whether all of it is readable RAM; if not,
    /// the contents of `entries` are arbitrary.
    fn read_table(&self, at: Gpa, entries: &mut Entries) -> bool;
}

impl TableMemory for GuestRam {
    fn read_table(&self, at: Gpa, entries: &mut Entries) -> bool {
        let Some(range) = self.ranges().iter().find(|range| has_table(range.gpa, at)) else { return false };
        let (piece, first) = (self.piece(*range), (at - range.gpa.start()).as_usize() / size_of::<u64>());
        entries.iter_mut().enumerate().for_each(|(index, entry)| *entry = piece.peek(first + index));
        true
    }
}

/// Guest RAM that another process has mapped, read through its `/proc/PID/mem` (proc_pid_mem(5)). That needs the
/// right to attach a debugger (the owner, or `CAP_SYS_PTRACE`).
#[derive(Debug)]
pub struct ProcessRam {
    mem: File,
    ranges: Vec<RamRange>,
}

impl ProcessRam {
    /// Opens the RAM of this process, mapped at `ranges`.
    ///
    /// # Errors
    /// [`HostError`] if its memory may not be read.
    pub fn open(process: &ProcessHost, ranges: Vec<RamRange>) -> Result<ProcessRam, HostError> {
        Ok(ProcessRam { mem: process.open_file("mem")?, ranges })
    }
}

impl TableMemory for ProcessRam {
    fn read_table(&self, at: Gpa, entries: &mut Entries) -> bool {
        let Some(range) = self.ranges.iter().find(|range| has_table(range.gpa, at)) else { return false };
        let mut bytes = [0; TABLE.get() as usize];
        let hva = range.hva + (at - range.gpa.start());
        if self.mem.read_exact_at(&mut bytes, hva.get()).is_err() {
            return false;
        }
        let (words, _) = bytes.as_chunks();
        entries.iter_mut().zip(words).for_each(|(entry, word)| *entry = u64::from_le_bytes(*word));
        true
    }
}

/// Size of a table, in bytes.
const TABLE: Bytes = PageSize::Base4K.bytes();

fn has_table(range: GpaRange, at: Gpa) -> bool {
    range.contains(at) && range.end() - at >= TABLE
}

/// Result of a walk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestTables {
    /// Every whole window of RAM, ascending.
    pub windows: Vec<(WindowIndex, GuestMapping)>,
    /// Number of tables read, of 4 KiB each.
    pub tables: usize,
    /// Whether all tables were read. If not, a window may have mappings that are not in `windows`.
    pub is_complete: bool,
}

/// Source of a guest's tables, asked as often as its answer is useful: [`OwnTables`] for a guest of this process, or
/// a source that knows the roots of an external guest.
pub trait TableSource: Send + Sync {
    /// Time for which an answer is useful.
    fn every(&self) -> Duration;

    /// Reads the tables, or returns the latest result. The loop waits for it, so a source that asks another process
    /// must use its own thread.
    ///
    /// # Errors
    /// [`NoTables`] with its reason.
    fn sample(&self) -> Result<Walked, NoTables>;
}

/// A sample of a guest's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walked {
    /// Result of the walk.
    pub tables: GuestTables,
    /// Number of times a vCPU was stopped for it.
    pub waits: u64,
    /// CPU time that other threads than the caller's used for it.
    pub cpu_elsewhere: Duration,
}

/// Why a sample has no result.
#[derive(Debug, thiserror::Error)]
pub enum NoTables {
    /// Not available at the moment: the latest result may still hold.
    #[error("{0}")]
    NotNow(String),
    /// The guest has tables of an unsupported kind: earlier results do not apply.
    #[error("{0}")]
    NotThese(String),
    /// The latest result is too old to describe the present state.
    #[error("{0}")]
    TooOld(String),
}

/// Tables of a guest of this process.
pub struct OwnTables {
    /// RAM of the guest.
    pub ram: Arc<GuestRam>,
    /// Access to its vCPUs.
    pub second_level: Arc<dyn SecondLevel>,
}

impl TableSource for OwnTables {
    /// A sample stops the guest for the time of a kick, and reads all its tables.
    fn every(&self) -> Duration {
        Duration::from_secs(2)
    }

    /// Fails for a guest that has ended, or that another part keeps paused for long.
    fn sample(&self) -> Result<Walked, NoTables> {
        let tables = sample(self.second_level.as_ref(), &self.ram)?;
        Ok(Walked { tables, waits: 1, cpu_elsewhere: Duration::ZERO })
    }
}

/// Walks the tables of every vCPU. The guest is paused while the roots are fetched, and runs during the walk.
///
/// # Errors
/// [`NoTables`] if the guest cannot be paused, asked or resumed, or has no tables of a supported kind. It runs again,
/// unless resuming itself failed. Also while a restore or a migration fills the RAM: a table in a window that never
/// comes would keep the caller for ever.
pub fn sample(second_level: &dyn SecondLevel, ram: &GuestRam) -> Result<GuestTables, NoTables> {
    if ram.claims().is_filling() {
        return Err(NoTables::NotNow("the guest's RAM is still being filled".into()));
    }
    let not_now = |error: SecondLevelError| NoTables::NotNow(error.to_string());
    second_level.pause().map_err(not_now)?;
    let modes = second_level.paging_modes();
    second_level.resume().map_err(not_now)?;
    let (levels, roots) = roots(&modes.map_err(not_now)?)?;
    let ranges: Vec<GpaRange> = ram.ranges().iter().map(|range| range.gpa).collect();
    Ok(walk(ram, &ranges, &roots, levels, TABLES_MAX))
}

/// The roots of the vCPUs with as many levels as the first: CR4.LA57 differs only while vCPUs start.
///
/// # Errors
/// [`NoTables`] if no vCPU is in 64-bit mode with paging.
pub fn roots(modes: &[PagingMode]) -> Result<(TableLevels, Vec<u64>), NoTables> {
    let long = |mode: &PagingMode| match *mode {
        PagingMode::Long { root, levels } => Some((levels, root)),
        PagingMode::Off | PagingMode::Pae | PagingMode::Legacy => None,
    };
    if let Some((levels, _)) = modes.iter().find_map(long) {
        let roots = modes.iter().filter_map(long).filter(|(of, _)| *of == levels).map(|(_, root)| root).collect();
        return Ok((levels, roots));
    }
    let refused = |what: &str| NoTables::NotThese(format!("the guest uses {what}, which is not supported"));
    match modes {
        _ if modes.contains(&PagingMode::Pae) => Err(refused("32-bit mode with PAE (three levels)")),
        _ if modes.contains(&PagingMode::Legacy) => Err(refused("32-bit mode (two levels)")),
        _ => Err(NoTables::NotNow("no vCPU that was asked has paging switched on".into())),
    }
}

/// Follows `roots` (values of CR3) through `memory` and merges their mappings of `ram`, reading at
/// most `tables_max` tables.
///
/// A window without a mapping for user mode is unknown if a supervisor mapping leads to it.
pub fn walk(
    memory: &dyn TableMemory,
    ram: &[GpaRange],
    roots: &[u64],
    levels: TableLevels,
    tables_max: usize,
) -> GuestTables {
    let mut walk = Walk::new(ram, tables_max);
    let level = match levels {
        TableLevels::Four => 4,
        TableLevels::Five => 5,
    };
    for root in roots {
        walk.enqueue(Table { at: Gpa::new(root & ADDRESS), level, is_user: true });
    }
    let (mut tables, mut entries) = (0, [0; ENTRIES]);
    while let Some(table) = walk.queue.pop() {
        walk.read_table(memory, table, &mut entries);
        tables += 1;
    }
    GuestTables { is_complete: !walk.is_cut, windows: walk.into_windows(), tables }
}

const PRESENT: u64 = 1 << 0;
const USER: u64 = 1 << 2;
/// "Page size": a leaf at level 2 or 3, reserved above.
const LARGE: u64 = 1 << 7;
/// Bits 51 to 12: the address of a table or of a base page. The CPU's number of address bits is not checked, since an
/// address beyond it lies outside RAM.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Bit 12 of a large leaf chooses a memory type; those between it and the address are reserved.
const LARGE_PAT: u64 = 1 << 12;
const ENTRIES: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Table {
    at: Gpa,
    level: u8,
    /// Whether every entry on the path to this table allows user mode.
    is_user: bool,
}

/// Meaning of an entry of a table.
enum Entry {
    Nothing,
    Table(Gpa),
    Leaf(Gpa, PageSize),
}

impl Entry {
    fn parse(entry: u64, level: u8) -> Entry {
        let is_large = entry & LARGE != 0;
        let address = entry & ADDRESS;
        match (entry & PRESENT != 0, level, is_large) {
            (false, _, _) => Entry::Nothing,
            (_, 1, _) => Entry::Leaf(Gpa::new(address), PageSize::Base4K),
            (_, 2, true) => Entry::large_leaf(address, PageSize::Huge2M),
            (_, 3, true) => Entry::large_leaf(address, PageSize::Giant1G),
            (_, _, true) => Entry::Nothing,
            (_, _, false) => Entry::Table(Gpa::new(address)),
        }
    }

    fn large_leaf(address: u64, size: PageSize) -> Entry {
        let page = Gpa::new(address & !LARGE_PAT);
        if page.is_aligned_to(size) { Entry::Leaf(page, size) } else { Entry::Nothing }
    }
}

/// Mappings of a window or a giant.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Page sizes for user mode, one bit each.
    user: u8,
    /// Whether there is a mapping for the supervisor alone.
    is_supervisors: bool,
}

impl Seen {
    fn add(&mut self, size: PageSize, is_user: bool) {
        if is_user {
            self.user |= bit(size);
        } else {
            self.is_supervisors = true;
        }
    }

    fn merged(self, other: Seen) -> GuestMapping {
        match self.user | other.user {
            0 if self.is_supervisors || other.is_supervisors => GuestMapping::Unknown,
            0 => GuestMapping::Unmapped,
            sizes if sizes == bit(PageSize::Base4K) => GuestMapping::Base4K,
            sizes if sizes == bit(PageSize::Huge2M) => GuestMapping::Huge2M,
            sizes if sizes == bit(PageSize::Giant1G) => GuestMapping::Giant1G,
            _ => GuestMapping::Mixed,
        }
    }
}

const fn bit(size: PageSize) -> u8 {
    match size {
        PageSize::Base4K => 1 << 0,
        PageSize::Huge2M => 1 << 1,
        PageSize::Giant1G => 1 << 2,
    }
}

/// Windows one after another.
struct WindowRun {
    first: WindowIndex,
    windows: u64,
    /// Row of the first window.
    row: usize,
}

struct Walk<'a> {
    ram: &'a [GpaRange],
    windows: Vec<WindowIndex>,
    /// The same windows: a guest of some gibibytes has millions of leaves, and each looks up its row.
    runs: Vec<WindowRun>,
    seen: Vec<Seen>,
    /// Giants with a 1 GiB leaf, kept separately so that a leaf costs one mark for all its windows.
    giants: HashMap<u64, Seen>,
    queue: Vec<Table>,
    /// Tables that were queued, read or not: at most `tables_max`. A guest may fill its memory with tables of different
    /// entries, each of which leads to a table.
    known: HashSet<Table>,
    tables_max: usize,
    /// Whether there are more tables.
    is_cut: bool,
}

impl<'a> Walk<'a> {
    fn new(ram: &'a [GpaRange], tables_max: usize) -> Walk<'a> {
        let windows: Vec<WindowIndex> = ram.iter().flat_map(|range| range.windows()).collect();
        let mut runs: Vec<WindowRun> = Vec::new();
        for (row, window) in windows.iter().enumerate() {
            match runs.last_mut() {
                Some(run) if window.get() == run.first.get() + run.windows => run.windows += 1,
                _ => runs.push(WindowRun { first: *window, windows: 1, row }),
            }
        }
        let seen = vec![Seen::default(); windows.len()];
        let (giants, queue, known) = (HashMap::new(), Vec::new(), HashSet::new());
        Walk { ram, windows, runs, seen, giants, queue, known, tables_max, is_cut: false }
    }

    /// Row of a window of RAM.
    fn row(&self, window: WindowIndex) -> Option<usize> {
        self.runs.iter().find_map(|run| {
            let behind = window.get().checked_sub(run.first.get())?;
            (behind < run.windows).then(|| run.row + behind as usize)
        })
    }

    /// Queues a table to be read, unless it is outside RAM, known already, or one too many.
    fn enqueue(&mut self, table: Table) {
        if self.is_cut || !self.ram.iter().any(|range| range.contains(table.at)) {
            return;
        }
        if self.known.len() >= self.tables_max {
            self.is_cut = !self.known.contains(&table);
        } else if self.known.insert(table) {
            self.queue.push(table);
        }
    }

    fn read_table(&mut self, memory: &dyn TableMemory, table: Table, entries: &mut Entries) {
        if !memory.read_table(table.at, entries) {
            return;
        }
        for entry in *entries {
            let is_user = table.is_user && entry & USER != 0;
            match Entry::parse(entry, table.level) {
                Entry::Nothing => {}
                Entry::Table(at) => self.enqueue(Table { at, level: table.level - 1, is_user }),
                Entry::Leaf(page, size) => self.mark(page, size, is_user),
            }
        }
    }

    fn mark(&mut self, page: Gpa, size: PageSize, is_user: bool) {
        let window = WindowIndex::containing(page);
        if size == PageSize::Giant1G {
            if self.ram.iter().any(|range| range.overlaps(giant_range(page))) {
                self.giants.entry(window.giant()).or_default().add(size, is_user);
            }
        } else if let Some(row) = self.row(window) {
            self.seen[row].add(size, is_user);
        }
    }

    fn into_windows(self) -> Vec<(WindowIndex, GuestMapping)> {
        let giant = |window: WindowIndex| self.giants.get(&window.giant()).copied().unwrap_or_default();
        self.windows.iter().zip(&self.seen).map(|(window, seen)| (*window, seen.merged(giant(*window)))).collect()
    }
}

fn giant_range(page: Gpa) -> GpaRange {
    GpaRange::new(page, PageSize::Giant1G.bytes()).expect("the address of an entry has 52 bits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_second_level::FakeSecondLevel;
    use crate::{BackingConfig, BackingKind};
    use proptest::prelude::*;
    use std::sync::atomic::Ordering;
    use wideleaf_policies::units::mib;

    const LINK: u64 = PRESENT | USER | 2;

    /// RAM that is a vector of words; words that were never written read as zero.
    #[derive(Clone, Debug)]
    struct Words {
        range: GpaRange,
        words: Vec<u64>,
    }

    impl Words {
        fn new(start: u64, bytes: Bytes) -> Words {
            let range = GpaRange::new(Gpa::new(start), bytes).expect("fits");
            Words { range, words: vec![0; bytes.as_usize() / 8] }
        }

        fn set(&mut self, table: u64, index: u64, entry: u64) {
            self.words[((table - self.range.start().get()) / 8 + index) as usize] = entry;
        }

        fn walk(&self, roots: &[u64], levels: TableLevels) -> GuestTables {
            walk(self, &[self.range], roots, levels, TABLES_MAX)
        }
    }

    impl TableMemory for Words {
        fn read_table(&self, at: Gpa, entries: &mut Entries) -> bool {
            assert!(self.range.contains(at), "{at} is read, and is not RAM");
            assert_eq!(at.get() % 4096, 0);
            let first = (at - self.range.start()).as_usize() / 8;
            entries.copy_from_slice(&self.words[first..][..ENTRIES]);
            true
        }
    }

    fn mappings(tables: &GuestTables) -> Vec<GuestMapping> {
        tables.windows.iter().map(|(_, mapping)| *mapping).collect()
    }

    /// Root 0x1000 ─▶ 0x2000 ─▶ 0x3000 (level 2) ─▶ 0x4000 (level 1).
    fn chain() -> Words {
        let mut ram = Words::new(0, mib(8));
        ram.set(0x1000, 0, 0x2000 | LINK);
        ram.set(0x2000, 0, 0x3000 | LINK);
        ram.set(0x3000, 0, 0x4000 | LINK);
        ram
    }

    #[test]
    fn each_window_has_the_size_of_the_leaves_that_lead_to_it() {
        // window   0: a base page    1: a huge page    2: both    3: nothing
        let mut ram = chain();
        ram.set(0x4000, 7, 0x5000 | LINK);
        ram.set(0x4000, 8, 0x0040_3000 | LINK);
        ram.set(0x3000, 1, 0x0020_0000 | LINK | LARGE);
        ram.set(0x3000, 2, 0x0040_0000 | LINK | LARGE | LARGE_PAT);
        let found = ram.walk(&[0x1000 | 0x18], TableLevels::Four);
        use GuestMapping::{Base4K, Huge2M, Mixed, Unmapped};
        assert_eq!(mappings(&found), [Base4K, Huge2M, Mixed, Unmapped]);
        assert_eq!((found.tables, found.is_complete), (4, true));
    }

    #[test]
    fn a_giant_leaf_covers_all_windows_of_ram_in_it() {
        let mut ram = chain();
        ram.set(0x2000, 0, LINK | LARGE);
        assert_eq!(mappings(&ram.walk(&[0x1000], TableLevels::Four)), [GuestMapping::Giant1G; 4]);
    }

    #[test]
    fn a_fifth_level_is_one_table_more() {
        let mut ram = chain();
        ram.set(0x6000, 3, 0x1000 | LINK);
        ram.set(0x3000, 3, 0x0060_0000 | LINK | LARGE);
        let found = ram.walk(&[0x6000], TableLevels::Five);
        assert_eq!(mappings(&found)[3], GuestMapping::Huge2M);
        assert_eq!(found.tables, 5);
    }

    #[test]
    fn roots_are_merged_and_shared_tables_are_read_once() {
        let mut ram = chain();
        ram.set(0x4000, 0, LINK);
        ram.set(0x6000, 0, 0x2000 | LINK);
        ram.set(0x6000, 1, 0x7000 | LINK);
        ram.set(0x7000, 0, 0x3000 | LINK);
        let found = ram.walk(&[0x1000, 0x6000, 0x1000], TableLevels::Four);
        assert_eq!(mappings(&found)[0], GuestMapping::Base4K);
        assert_eq!(found.tables, 6);
    }

    #[test]
    fn what_user_mode_maps_counts_and_what_only_the_kernel_maps_is_unknown() {
        let mut ram = chain();
        ram.set(0x4000, 0, LINK);
        ram.set(0x2000, 1, (LINK | LARGE) & !USER);
        use GuestMapping::{Base4K, Unknown};
        assert_eq!(mappings(&ram.walk(&[0x1000], TableLevels::Four)), [Base4K, Unknown, Unknown, Unknown]);
    }

    #[test]
    fn reserved_bits_map_nothing() {
        let mut ram = chain();
        ram.set(0x3000, 1, 0x0020_2000 | LINK | LARGE); // bit 13 of a 2 MiB leaf
        ram.set(0x2000, 1, 0x0020_0000 | LINK | LARGE); // bit 21 of a 1 GiB leaf
        ram.set(0x1000, 1, LINK | LARGE); // a leaf at level 4
        let found = ram.walk(&[0x1000], TableLevels::Four);
        assert_eq!(mappings(&found), [GuestMapping::Unmapped; 4]);
    }

    #[test]
    fn a_table_that_leads_to_itself_ends() {
        let mut ram = Words::new(0, mib(2));
        (0..ENTRIES as u64).for_each(|index| ram.set(0x1000, index, 0x1000 | LINK));
        let found = ram.walk(&[0x1000], TableLevels::Five);
        assert_eq!((found.tables, found.is_complete), (5, true));
        assert_eq!(mappings(&found), [GuestMapping::Base4K]);
    }

    #[test]
    fn a_walk_that_reaches_its_bound_is_incomplete() {
        let ram = chain();
        let found = walk(&ram, &[ram.range], &[0x1000], TableLevels::Four, 2);
        assert_eq!((found.tables, found.is_complete), (2, false));
    }

    #[test]
    fn a_guest_that_fills_its_memory_with_tables_gets_no_more_of_them_queued_than_are_read() {
        let mut ram = Words::new(0, mib(2));
        // Each page of RAM is a table that leads to all of them.
        (0..ram.words.len() as u64).for_each(|word| ram.set(0, word, (word % 512 * 4096) | LINK));
        let ranges = [ram.range];
        let (mut walk, mut entries) = (Walk::new(&ranges, 64), [0; ENTRIES]);
        walk.enqueue(Table { at: Gpa::new(0x1000), level: 5, is_user: true });
        while let Some(table) = walk.queue.pop() {
            walk.read_table(&ram, table, &mut entries);
            assert!(walk.known.len() <= 64 && walk.queue.len() < 64, "{} queued", walk.queue.len());
        }
        assert!(walk.is_cut);
        let found = super::walk(&ram, &ranges, &[0x1000], TableLevels::Five, 64);
        assert_eq!((found.tables, found.is_complete), (64, false));
        // All tables of the three lower levels, with nothing left out.
        assert!(ram.walk(&[0x1000], TableLevels::Four).is_complete);
    }

    #[test]
    fn a_leaf_marks_its_window_on_either_side_of_a_hole_in_ram_and_none_in_the_hole() {
        let (low, high) = (GpaRange::new(Gpa::new(0), mib(4)), GpaRange::new(Gpa::new(8 << 20), mib(4)));
        let ranges = [low, high].map(|range| range.expect("fits"));
        let walk = Walk::new(&ranges, 1);
        let rows = [0, 1, 2, 3, 4, 5, 6].map(|window| walk.row(WindowIndex::new(window)));
        assert_eq!(rows, [Some(0), Some(1), None, None, Some(2), Some(3), None]);
    }

    fn mapped_ram(bytes: Bytes) -> (GpaRange, Arc<GuestRam>) {
        let range = GpaRange::new(Gpa::new(0), bytes).expect("fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("exists");
        (range, GuestRam::map(&[range], backing).expect("some mebibytes"))
    }

    fn store(ram: &GuestRam, table: u64, index: u64, entry: u64) {
        ram.words(ram.ranges()[0])[(table / 8 + index) as usize].store(entry, Ordering::Relaxed);
    }

    /// A Linux guest with two processes, and memory of 8 MiB that the kernel maps to itself by huge pages.
    ///
    /// ```text
    ///   0x1000  ─▶ 0x2000 ─▶ 0x3000  base pages of window 0, at 0x4000       root of one process
    ///   0x11000 ─▶ 0x12000 ─▶ 0x13000  window 1 as a huge page               root of the other
    ///   both    ─▶ 0x6000 ─▶ 0x7000  all windows, for the supervisor alone
    /// ```
    fn two_processes() -> (FakeSecondLevel, Arc<GuestRam>) {
        let (range, ram) = mapped_ram(mib(8));
        for (root, third, second) in [(0x1000, 0x2000, 0x3000), (0x1_1000, 0x1_2000, 0x1_3000)] {
            store(&ram, root, 0, third | LINK);
            store(&ram, third, 0, second | LINK);
            store(&ram, root, 273, 0x6000 | (LINK & !USER)); // Linux' direct map: Documentation/arch/x86/x86_64/mm.rst
        }
        store(&ram, 0x3000, 0, 0x4000 | LINK);
        store(&ram, 0x4000, 7, 0x5000 | LINK);
        store(&ram, 0x1_3000, 0, 0x0020_0000 | LINK | LARGE);
        store(&ram, 0x6000, 0, 0x7000 | (LINK & !USER));
        (0..4).for_each(|window| store(&ram, 0x7000, window, window << 21 | ((LINK | LARGE) & !USER)));
        (FakeSecondLevel::new(&[range]), ram)
    }

    const fn four_levels(root: u64) -> PagingMode {
        PagingMode::Long { root, levels: TableLevels::Four }
    }

    #[test]
    fn memory_of_a_process_on_no_vcpu_is_unknown_and_not_as_large_as_the_kernels_own_mapping() {
        let (guest, ram) = two_processes();
        use GuestMapping::{Base4K, Huge2M, Unknown};
        for (modes, expected) in [
            (&[four_levels(0x1000), four_levels(0x1_1000)][..], [Base4K, Huge2M, Unknown, Unknown]),
            (&[four_levels(0x1000)], [Base4K, Unknown, Unknown, Unknown]),
            (&[four_levels(0x1_1000)], [Unknown, Huge2M, Unknown, Unknown]),
        ] {
            guest.set_paging_modes(modes);
            assert_eq!(mappings(&sample(&guest, &ram).expect("64-bit mode")), expected, "{modes:?}");
        }
    }

    #[test]
    fn a_guest_with_five_levels_is_read_as_such_and_not_as_one_with_four() {
        let (guest, ram) = two_processes();
        store(&ram, 0x8000, 0, 0x1_1000 | LINK);
        guest.set_paging_modes(&[PagingMode::Long { root: 0x8000, levels: TableLevels::Five }]);
        let found = sample(&guest, &ram).expect("64-bit mode");
        use GuestMapping::{Huge2M, Unknown};
        assert_eq!(mappings(&found), [Unknown, Huge2M, Unknown, Unknown]);
    }

    #[test]
    fn a_vcpu_that_waits_to_be_started_has_no_root_to_follow() {
        let (guest, ram) = two_processes();
        // Its CR3 is 0, where a table of the guest may lie by chance: this one would map window 2 with a huge page.
        store(&ram, 0, 0, 0x9000 | LINK);
        store(&ram, 0x9000, 0, 0xa000 | LINK);
        store(&ram, 0xa000, 2, 0x0040_0000 | LINK | LARGE);
        guest.set_paging_modes(&[four_levels(0x1000), PagingMode::Off]);
        use GuestMapping::{Base4K, Unknown};
        assert_eq!(mappings(&sample(&guest, &ram).expect("one is at work")), [Base4K, Unknown, Unknown, Unknown]);
        guest.set_paging_modes(&[PagingMode::Off]);
        assert!(matches!(sample(&guest, &ram), Err(NoTables::NotNow(_))));
        guest.set_paging_modes(&[PagingMode::Off, PagingMode::Legacy]);
        assert!(matches!(sample(&guest, &ram), Err(NoTables::NotThese(_))));
    }

    #[test]
    fn no_table_is_read_and_no_vcpu_stopped_while_ram_is_filled() {
        let (guest, ram) = two_processes();
        let last = WindowIndex::new(3);
        ram.claims().begin_filling([last]);
        guest.fail_call(0, libc::EINTR);
        assert!(matches!(sample(&guest, &ram), Err(NoTables::NotNow(why)) if why.contains("filled")));
        ram.claims().filled(last);
        assert!(sample(&guest, &ram).is_err(), "this is the first call");
        assert!(sample(&guest, &ram).is_ok());
    }

    #[test]
    fn vcpus_without_paging_are_ignored_and_32_bit_ones_are_refused_by_name() {
        let long = |root, levels| PagingMode::Long { root, levels };
        let (four, five) = (TableLevels::Four, TableLevels::Five);
        let mixed = [PagingMode::Off, long(1, four), PagingMode::Pae, long(2, five), long(3, four)];
        assert_eq!(roots(&mixed).ok(), Some((four, vec![1, 3])));
        let refused = |modes: &[PagingMode]| roots(modes).expect_err("nothing to follow");
        assert!(matches!(refused(&[PagingMode::Off, PagingMode::Pae]), NoTables::NotThese(why) if why.contains("PAE")));
        assert!(matches!(refused(&[PagingMode::Legacy]), NoTables::NotThese(why) if why.contains("two levels")));
        assert!(matches!(refused(&[PagingMode::Off]), NoTables::NotNow(_)));
        assert!(matches!(refused(&[]), NoTables::NotNow(_)), "a monitor that names no vCPU");
    }

    #[test]
    fn a_guest_runs_again_after_any_failure_but_that_of_resume() {
        let (range, ram) = mapped_ram(mib(2));
        let guest = FakeSecondLevel::new(&[range]);
        assert!(sample(&guest, &ram).is_ok());
        for call in 0..3 {
            guest.fail_call(call, libc::EINTR);
            assert!(matches!(sample(&guest, &ram), Err(NoTables::NotNow(_))), "call {call}");
            let is_paused = guest.paging_modes().is_ok();
            assert_eq!(is_paused, call == 2, "only a resume that failed leaves it paused");
        }
    }

    proptest! {
        #[test]
        fn random_tables_neither_panic_nor_leave_ram(
            entries in prop::collection::vec((0u64..16 * 512, any::<u64>(), any::<bool>()), 0..2000),
            roots in prop::collection::vec(any::<u64>(), 1..4),
            start in prop::sample::select(vec![0u64, 2 << 20, 1 << 30, 1 << 40]),
        ) {
            let mut ram = Words::new(start, mib(4));
            for (index, entry, is_near) in entries {
                let near = (start + (entry & 0xffff)) | PRESENT;
                ram.words[index as usize] = if is_near { near } else { entry };
            }
            let roots: Vec<u64> = roots.iter().map(|root| start + (root & 0xf000)).chain(roots.clone()).collect();
            for levels in [TableLevels::Four, TableLevels::Five] {
                let found = ram.walk(&roots, levels);
                prop_assert!(found.is_complete);
                prop_assert!(found.tables <= 2 * 1024 * 5, "each page of RAM once a level and privilege");
                prop_assert_eq!(found.windows.len(), 2);
            }
        }
    }
}
