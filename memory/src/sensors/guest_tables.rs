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

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_policies::{Bytes, Gpa, GpaRange, GuestMapping, PageSize, WindowIndex};

use crate::host::HostError;
use crate::host::process::ProcessHost;
use crate::region::{GuestRam, RamRange};
use crate::second_level::{SecondLevel, SecondLevelError};

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

/// Number of levels of the guest's tables: five if CR4.LA57 is set (SDM vol. 3, 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableLevels {
    /// Four levels, 48 bits of address.
    Four,
    /// Five levels, 57 bits of address.
    Five,
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

/// Tables of a guest of this process. `wideleaf_vmm` never offers a guest five levels.
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
        let tables = sample(self.second_level.as_ref(), &self.ram, TableLevels::Four);
        let walked = |tables| Walked { tables, waits: 1, cpu_elsewhere: Duration::ZERO };
        tables.map(walked).map_err(|error| NoTables::NotNow(error.to_string()))
    }
}

/// Walks the tables of every vCPU. The guest is paused while the roots are fetched, and runs during the walk. The
/// vCPUs must be in 64-bit mode: CR3 does not say so.
///
/// # Errors
/// [`SecondLevelError`] if the guest cannot be paused, asked or resumed. It runs again, unless
/// resuming itself failed.
pub fn sample(
    second_level: &dyn SecondLevel,
    ram: &GuestRam,
    levels: TableLevels,
) -> Result<GuestTables, SecondLevelError> {
    second_level.pause()?;
    let roots = second_level.page_table_roots();
    second_level.resume()?;
    let ranges: Vec<GpaRange> = ram.ranges().iter().map(|range| range.gpa).collect();
    Ok(walk(ram, &ranges, &roots?, levels, TABLES_MAX))
}

/// Follows `roots` (values of CR3) through `memory` and merges their mappings of `ram`, reading at
/// most `tables_max` tables.
///
/// Mappings for user mode count first. A window shows its supervisor mappings only if it has no others: a kernel maps
/// all memory to itself with large pages, which says nothing of how programs use it.
pub fn walk(
    memory: &dyn TableMemory,
    ram: &[GpaRange],
    roots: &[u64],
    levels: TableLevels,
    tables_max: usize,
) -> GuestTables {
    let mut walk = Walk::new(ram);
    let level = match levels {
        TableLevels::Four => 4,
        TableLevels::Five => 5,
    };
    for root in roots {
        walk.enqueue(Table { at: Gpa::new(root & ADDRESS), level, is_user: true });
    }
    let (mut tables, mut entries) = (0, [0; ENTRIES]);
    while tables < tables_max
        && let Some(table) = walk.queue.pop()
    {
        walk.read_table(memory, table, &mut entries);
        tables += 1;
    }
    GuestTables { is_complete: walk.queue.is_empty(), windows: walk.into_windows(), tables }
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

/// Page sizes that a window or a giant is mapped with, one bit each, separate for the two privileges.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    user: u8,
    supervisor: u8,
}

impl Seen {
    fn add(&mut self, size: PageSize, is_user: bool) {
        let sizes = if is_user { &mut self.user } else { &mut self.supervisor };
        *sizes |= bit(size);
    }

    fn merged(self, other: Seen) -> GuestMapping {
        let (user, supervisor) = (self.user | other.user, self.supervisor | other.supervisor);
        match if user != 0 { user } else { supervisor } {
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

struct Walk<'a> {
    ram: &'a [GpaRange],
    windows: Vec<WindowIndex>,
    seen: Vec<Seen>,
    /// Giants with a 1 GiB leaf, kept separately so that a leaf costs one mark for all its windows.
    giants: HashMap<u64, Seen>,
    queue: Vec<Table>,
    known: HashSet<Table>,
}

impl<'a> Walk<'a> {
    fn new(ram: &'a [GpaRange]) -> Walk<'a> {
        let windows: Vec<WindowIndex> = ram.iter().flat_map(|range| range.windows()).collect();
        let seen = vec![Seen::default(); windows.len()];
        Walk { ram, windows, seen, giants: HashMap::new(), queue: Vec::new(), known: HashSet::new() }
    }

    /// Queues a table to be read, unless it is outside RAM or known already.
    fn enqueue(&mut self, table: Table) {
        let is_in_ram = self.ram.iter().any(|range| range.contains(table.at));
        if is_in_ram && self.known.insert(table) {
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
        } else if let Ok(row) = self.windows.binary_search(&window) {
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
    fn what_user_mode_maps_counts_before_what_the_kernel_maps_to_itself() {
        let mut ram = chain();
        ram.set(0x4000, 0, LINK);
        ram.set(0x2000, 1, (LINK | LARGE) & !USER);
        assert_eq!(
            mappings(&ram.walk(&[0x1000], TableLevels::Four)),
            [GuestMapping::Base4K, GuestMapping::Giant1G, GuestMapping::Giant1G, GuestMapping::Giant1G]
        );
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
    fn a_guest_runs_again_after_any_failure_but_that_of_resume() {
        let range = GpaRange::new(Gpa::new(0), mib(2)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("exists");
        let ram = GuestRam::map(&[range], backing).expect("two mebibytes");
        let guest = FakeSecondLevel::new(&[range]);
        assert!(sample(&guest, &ram, TableLevels::Four).is_ok());
        for call in 0..3 {
            guest.fail_call(call, libc::EINTR);
            assert!(sample(&guest, &ram, TableLevels::Four).is_err(), "call {call}");
            let is_paused = guest.page_table_roots().is_ok();
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
