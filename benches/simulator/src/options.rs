//! What a simulation is told besides its machine and its address space. It is below caches, walker and simulator, which
//! all read it.

/// Options besides machine and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether another thread of the core uses its half of all shared resources.
    pub is_core_shared: bool,
    /// Seed of random replacement.
    pub seed: u64,
    /// Lines that go through the caches.
    pub lines: Lines,
    /// NUMA nodes of tables and data, as seen from the thread.
    pub distances: Distances,
}

/// Distance of the thread's node to the memory of tables and data, as ACPI's SLIT has it: 10 is the own node, and
/// memory at distance 20 takes twice the time. Lines that a cache holds are as near as ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distances {
    /// Tables of the guest, or native ones.
    pub guest_tables: u32,
    /// Tables of the host: EPT or NPT.
    pub host_tables: u32,
    /// Data of loads and stores.
    pub data: u32,
}

impl Distances {
    /// The own node (ACPI specification, System Locality Information Table).
    pub const LOCAL: u32 = 10;

    /// The other socket of common servers with two: 21 in the SLIT of Intel's Xeons, with which a remote access takes
    /// 2.1 times the time of a local one.
    pub const OTHER_SOCKET: u32 = 21;
}

impl Default for Distances {
    /// All on the own node.
    fn default() -> Distances {
        Distances { guest_tables: Self::LOCAL, host_tables: Self::LOCAL, data: Self::LOCAL }
    }
}

/// Lines that go through the caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lines {
    /// Lines of loads and stores, and lines of the entries that walks read.
    All,
    /// Lines of entries only. The location of data is not counted, and the caches hold only tables.
    OfTables,
    /// No lines: only translation is simulated. TLBs and walk caches work as usual, and their misses and the
    /// entries that walks read are counted. All entries count as
    /// [`Served::unplaced`](super::counts::Served::unplaced), and walks have no cycles.
    None,
}

impl Default for Options {
    fn default() -> Options {
        Options { is_core_shared: false, seed: 1, lines: Lines::All, distances: Distances::default() }
    }
}
