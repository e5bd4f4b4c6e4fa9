//! The hugetlb pools: their contents, whether these suffice, which processes hold pages, and resizing.
//!
//! ```text
//!   total (nr_hugepages) = in use + free          persistent = total - surplus: what is written to nr_hugepages
//!   ┌────────────────────┬──────────┬─────────┐
//!   │ in use             │ promised │ unused  │   lease     room until it is dropped, as surplus if the size has it
//!   │                    │◀────── free ──────▶│   reserve   more unused pages, until they are given back
//!   └────────────────────┴──────────┴─────────┘   release   fewer unused pages
//! ```
//!
//! A VM that asks for more than the pool has is refused before it starts, with the size, the node, the number of
//! missing pages and the command that helps: a shortage found at a fault is a SIGBUS.
//! Files: Documentation/admin-guide/mm/hugetlbpage.rst.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use wideleaf_policies::{Bytes, NodeId, NodeSet, PageSize};

use crate::numa::placement::NodePolicy;

#[cfg(test)]
pub(crate) mod fake_kernel;
mod files;
mod granted;
mod holders;
mod intent;
mod lease;
mod lock;
mod making;
mod mounts;
mod node_memory;
mod resize;

use files::{KernelFiles, PoolFiles};
pub use granted::{Granted, NodePages};
pub use holders::{Holder, Holders};
pub use intent::{Intent, Settled};
pub use lease::PoolLease;
pub use making::{MakingMethod, NewPages, NotMade};
pub use mounts::HugetlbMount;
pub use node_memory::{Blocks, NodeMemory, NotEnoughMemory};
pub use resize::{Note, OnShortage, Plan, Release, Request, Returned};

/// Maximum number of reads of a pool with numbers that contradict each other, before that is an error. The numbers
/// are read one after the other, so one read may fall between two changes by the kernel; three in a row do not.
const LOOKS_MAX: usize = 3;

/// The pools of this machine, or of a captured tree.
#[derive(Clone, Debug)]
pub struct HugetlbPools {
    root: PathBuf,
    files: Arc<dyn PoolFiles>,
}

/// State of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// Size of its pages.
    pub size: PageSize,
    /// Pages in the pool, surplus ones included.
    pub total: u64,
    /// Pages that are not faulted in.
    pub free: u64,
    /// Free pages that are promised to a mapping.
    pub reserved: u64,
    /// Pages beyond those requested with `nr_hugepages`: made when they are mapped, and removed when
    /// they are unmapped.
    pub surplus: u64,
    /// Maximum number of surplus pages.
    pub overcommit: u64,
    /// The same numbers by NUMA node, without promises, which are not made by node.
    pub nodes: Vec<NodePool>,
}

/// Part of a pool on one NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePool {
    /// Number of the node.
    pub node: u32,
    /// Number of pages, surplus ones included.
    pub total: u64,
    /// Pages that are not faulted in.
    pub free: u64,
    /// Number of surplus pages.
    pub surplus: u64,
}

impl NodePool {
    /// Pages that stay after they are unmapped.
    pub fn persistent(&self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }
}

impl PoolStatus {
    /// Pages available to a new mapping: free and not promised, plus those that may be added as surplus.
    pub fn available(&self) -> u64 {
        self.unpromised().saturating_add(self.overcommit.saturating_sub(self.surplus))
    }

    /// Free pages that are not promised.
    pub fn unpromised(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }

    /// Pages that are faulted in.
    pub fn in_use(&self) -> u64 {
        self.total.saturating_sub(self.free)
    }

    /// Pages that stay after they are unmapped: the value to which `nr_hugepages` is set.
    pub fn persistent(&self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }

    /// The part of it on these nodes, if the kernel counts by node. Promises are not made by node: pages elsewhere are
    /// assumed to serve them first.
    fn on(mut self, nodes: NodeSet) -> PoolStatus {
        if !self.nodes.is_empty() {
            self.nodes.retain(|part| u16::try_from(part.node).is_ok_and(|node| nodes.contains(NodeId(node))));
            let free = self.nodes.iter().map(|part| part.free).fold(0, u64::saturating_add);
            self.free = self.reserved.saturating_add(self.unpromised().min(free));
        }
        self
    }

    /// Numbers that cannot all be true, if any.
    fn contradiction(&self) -> Option<String> {
        let PoolStatus { total, free, reserved, surplus, .. } = *self;
        let pool = [
            ("free", free, "in all", total),
            ("surplus", surplus, "in all", total),
            ("promised", reserved, "free", free),
        ];
        let nodes = self.nodes.iter().flat_map(|node| {
            [("free", node.free, "in all", node.total), ("surplus", node.surplus, "in all", node.total)]
        });
        let wrong = pool.into_iter().chain(nodes).find(|(_, part, _, whole)| part > whole);
        wrong.map(|(name, part, of, whole)| format!("{part} pages {name}, {whole} {of}"))
    }
}

/// Why a pool cannot serve a request.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The kernel has no pool of that size.
    #[error("cannot use a hugetlb pool of {0} pages: this kernel has none ({1} is missing)")]
    NoPool(PageSize, PathBuf),
    /// The NUMA node does not exist, or has no memory.
    #[error("cannot use a hugetlb pool of {size} pages on node {node}: it has none; {}", known_nodes(.known))]
    NoNode {
        /// Page size of the pool.
        size: PageSize,
        /// Number of the node.
        node: u32,
        /// Nodes that have such a pool.
        known: Vec<u32>,
    },
    /// A file of the pool cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A file of the pool cannot be written.
    #[error("cannot write {}: {source}; changing a pool takes root and a writable /sys", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A file of the pool does not hold what it should.
    #[error("cannot use {}: expected {expected}, found {text:?}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Expected contents of the file.
        expected: &'static str,
        /// Actual contents of the file.
        text: String,
    },
    /// Numbers of a pool that cannot all be true, also after reading them again.
    #[error("cannot use the hugetlb pool of {size} pages: its numbers contradict each other: {what}")]
    Contradiction {
        /// Page size of the pool.
        size: PageSize,
        /// Numbers that contradict each other.
        what: String,
    },
    /// Another process keeps the pool locked.
    #[error("cannot lock {}: another process has held the lock for {waited_s} s; see `lslocks`", path.display())]
    Locked {
        /// Path of the file.
        path: PathBuf,
        /// Time waited, in seconds.
        waited_s: u64,
    },
    /// A lock file that another user could have made, or could hold.
    #[error("cannot trust {}: {why}; remove it, and root makes it anew", path.display())]
    Untrusted {
        /// Path of the file.
        path: PathBuf,
        /// Reason for the distrust.
        why: String,
    },
    /// A step before the change failed.
    #[error("{0}: the pool is as it was")]
    NotBegun(String),
    /// Another program made the pool smaller during a growth.
    #[error(
        "cannot change {}: another program changed it at the same time: {before} pages before, {after} after {wanted} \
         were asked for; try again",
        path.display()
    )]
    Changed {
        /// Path of the file that was written.
        path: PathBuf,
        /// Number of pages before.
        before: u64,
        /// Number of pages asked for.
        wanted: u64,
        /// Number of pages after that.
        after: u64,
    },
    /// The pool has too few pages.
    #[error("{0}")]
    Short(Shortage),
    /// There is not enough memory to make pages.
    #[error("{0}")]
    NotEnoughMemory(Box<NotEnoughMemory>),
    /// More pages are to be released than are unused.
    #[error(
        "cannot release {asked} pages of {}: {unused} are unused, of {} in the pool, {} in use, {} promised{}",
        pool.size, pool.total, pool.in_use(), pool.reserved, kept_for_domains(*.kept)
    )]
    InUse {
        /// Number of pages asked for.
        asked: u64,
        /// Unused pages, on the requested node.
        unused: u64,
        /// Pages, among the others, that are kept for domains about to start.
        kept: u64,
        /// State of the pool.
        pool: Box<PoolStatus>,
    },
}

impl PoolError {
    /// Whether the pool is known to be unchanged: it was not touched, or new pages were given back. The note of the
    /// change is then closed. The numbers cannot decide it: another program may have changed them since.
    pub fn leaves_pool_as_it_was(&self) -> bool {
        matches!(self, PoolError::NotBegun(_) | PoolError::NotEnoughMemory(_))
    }
}

fn kept_for_domains(kept: u64) -> String {
    if kept == 0 { String::new() } else { format!(", {kept} kept for domains that are about to start") }
}

fn known_nodes(known: &[u32]) -> String {
    match known {
        [] => "no node has one".to_owned(),
        known => format!("these have: {}", known.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// A shortage of pages, in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// State of the pool.
    pub pool: PoolStatus,
    /// Number of pages asked for.
    pub needed: u64,
    /// Path of the file that grows the pool.
    pub file: PathBuf,
}

impl Shortage {
    /// Number of missing pages.
    pub fn short(&self) -> u64 {
        self.needed.saturating_sub(self.pool.available())
    }
}

impl std::fmt::Display for Shortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut nodes = String::new();
        for NodePool { node, free, .. } in &self.pool.nodes {
            let _ = write!(nodes, "{}node {node}: {free} free", if nodes.is_empty() { "" } else { ", " });
        }
        write!(
            f,
            "hugetlb pool of {size} pages is {short} short: {} needed, {} available ({nodes}); run `sudo wideleaf \
             pool reserve --size {size} --pages {short}`",
            self.needed,
            self.pool.available(),
            size = self.pool.size,
            short = self.short(),
        )
    }
}

impl HugetlbPools {
    /// The pools of this machine.
    pub fn of_this_machine() -> HugetlbPools {
        HugetlbPools::at("/")
    }

    /// The pools of the tree under `root` (which holds `sys/` and `proc/`).
    pub fn at(root: impl Into<PathBuf>) -> HugetlbPools {
        HugetlbPools { root: root.into(), files: Arc::new(KernelFiles) }
    }

    /// Reads the state of one pool.
    ///
    /// # Errors
    /// [`PoolError`] if the kernel has no such pool or its files cannot be parsed.
    pub fn status(&self, size: PageSize) -> Result<PoolStatus, PoolError> {
        let folder = self.folder(size, None);
        if !folder.is_dir() {
            return Err(PoolError::NoPool(size, folder));
        }
        let read = |name: &str| self.number(&folder.join(name));
        let nodes = self.node_numbers().into_iter().filter(|node| self.folder(size, Some(*node)).is_dir());
        Ok(PoolStatus {
            size,
            total: read("nr_hugepages")?,
            free: read("free_hugepages")?,
            reserved: read("resv_hugepages")?,
            surplus: read("surplus_hugepages")?,
            // Missing in trees older than the setting. Before Linux 6.19, giant pages have the file and no surplus.
            overcommit: self.number_if_there(&folder.join("nr_overcommit_hugepages"))?.unwrap_or(0),
            nodes: nodes.map(|node| self.node_pool(size, node)).collect::<Result<_, PoolError>>()?,
        })
    }

    fn node_pool(&self, size: PageSize, node: u32) -> Result<NodePool, PoolError> {
        let folder = self.folder(size, Some(node));
        let read = |name: &str| self.number(&folder.join(name));
        let (total, free, surplus) = (read("nr_hugepages")?, read("free_hugepages")?, read("surplus_hugepages")?);
        Ok(NodePool { node, total, free, surplus })
    }

    /// Like [`HugetlbPools::status`], but reads again if the numbers contradict each other.
    ///
    /// # Errors
    /// [`PoolError::Contradiction`] if they still do, and those of [`HugetlbPools::status`].
    pub fn consistent_status(&self, size: PageSize) -> Result<PoolStatus, PoolError> {
        let mut contradiction = None;
        for _ in 0..LOOKS_MAX {
            let status = self.status(size)?;
            match status.contradiction() {
                None => return Ok(status),
                found => contradiction = found,
            }
        }
        Err(PoolError::Contradiction { size, what: contradiction.unwrap_or_default() })
    }

    /// Whether `bytes` bytes can be mapped from the pool now.
    ///
    /// # Errors
    /// [`PoolError::Short`] with the numbers and the command that helps.
    pub fn check(&self, size: PageSize, bytes: Bytes) -> Result<(), PoolError> {
        self.check_for(None, size, bytes)
    }

    /// Like [`HugetlbPools::check`], by that memory policy: pages on nodes that it excludes are not available.
    ///
    /// # Errors
    /// The same as for [`HugetlbPools::check`].
    pub fn check_for(&self, policy: Option<&NodePolicy>, size: PageSize, bytes: Bytes) -> Result<(), PoolError> {
        let pool = self.status(size)?;
        let pool = match policy.and_then(NodePolicy::bound_to) {
            Some(nodes) => pool.on(nodes),
            None => pool,
        };
        let needed = bytes.pages(size);
        if pool.available() >= needed {
            return Ok(());
        }
        Err(PoolError::Short(Shortage { pool, needed, file: self.folder(size, None).join("nr_hugepages") }))
    }

    fn folder(&self, size: PageSize, node: Option<u32>) -> PathBuf {
        let pools = match node {
            None => self.root.join("sys/kernel/mm/hugepages"),
            Some(node) => self.node_folder(node).join("hugepages"),
        };
        pools.join(format!("hugepages-{}kB", size.bytes().get() >> 10))
    }

    fn node_folder(&self, node: u32) -> PathBuf {
        self.root.join(format!("sys/devices/system/node/node{node}"))
    }

    /// The NUMA nodes, in order; none if the kernel reports no nodes.
    fn node_numbers(&self) -> Vec<u32> {
        numbers_in(&self.root.join("sys/devices/system/node"), "node")
    }

    fn text(&self, path: &Path) -> Result<String, PoolError> {
        self.files.read(path).map_err(|source| PoolError::File { path: path.to_owned(), source })
    }

    fn number(&self, path: &Path) -> Result<u64, PoolError> {
        let text = self.text(path)?;
        let malformed = |_| PoolError::Malformed { path: path.to_owned(), expected: "a number", text: text.clone() };
        text.trim().parse().map_err(malformed)
    }

    /// As [`HugetlbPools::number`]; `None` if there is no such file.
    fn number_if_there(&self, path: &Path) -> Result<Option<u64>, PoolError> {
        match self.number(path) {
            Ok(number) => Ok(Some(number)),
            Err(PoolError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn write(&self, path: &Path, number: u64) -> Result<(), PoolError> {
        let written = self.files.write(path, &number.to_string());
        written.map_err(|source| PoolError::Write { path: path.to_owned(), source })
    }
}

/// The numbers after `prefix` in the names of a folder's entries, in order; none if there is no such folder.
fn numbers_in(folder: &Path, prefix: &str) -> Vec<u32> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let number =
        |entry: io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.strip_prefix(prefix)?.parse().ok();
    let mut numbers: Vec<u32> = entries.filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numa::placement::MemoryMode;
    use std::fs;
    use wideleaf_policies::units::mib;

    /// A captured tree with one 2M pool on two nodes.
    fn tree(total: u64, free: u64, reserved: u64, overcommit: u64) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let pool = dir.path().join("sys/kernel/mm/hugepages/hugepages-2048kB");
        fs::create_dir_all(&pool).expect("a pool");
        for (name, value) in [
            ("nr_hugepages", total),
            ("free_hugepages", free),
            ("resv_hugepages", reserved),
            ("surplus_hugepages", 0),
            ("nr_overcommit_hugepages", overcommit),
        ] {
            fs::write(pool.join(name), format!("{value}\n")).expect("a pool file");
        }
        for (node, free) in [(0, free), (1, 0)] {
            let node = dir.path().join(format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB"));
            fs::create_dir_all(&node).expect("a node");
            for (name, value) in [("nr_hugepages", free), ("free_hugepages", free), ("surplus_hugepages", 0)] {
                fs::write(node.join(name), format!("{value}\n")).expect("a node file");
            }
        }
        dir
    }

    #[test]
    fn a_shortage_says_size_node_number_and_command() {
        let dir = tree(100, 60, 10, 0); // 50 are available
        let error = HugetlbPools::at(dir.path()).check(PageSize::Huge2M, mib(256)).expect_err("128 are needed");
        let text = error.to_string();
        assert!(text.contains("pool of 2m pages is 78 short: 128 needed, 50 available"), "{text}");
        assert!(text.contains("node 0: 60 free, node 1: 0 free"), "{text}");
        assert!(text.ends_with("run `sudo wideleaf pool reserve --size 2m --pages 78`"), "{text}");
    }

    #[test]
    fn promised_pages_are_not_available_and_overcommit_is() {
        let dir = tree(100, 60, 60, 128);
        assert!(HugetlbPools::at(dir.path()).check(PageSize::Huge2M, mib(256)).is_ok());
        let dir = tree(100, 60, 60, 127);
        assert!(HugetlbPools::at(dir.path()).check(PageSize::Huge2M, mib(256)).is_err());
    }

    #[test]
    fn pages_of_other_nodes_are_not_available_to_memory_that_is_bound() {
        let dir = tree(100, 60, 10, 0); // all 60 on node 0
        let check = |mode, node: u16, pages: u64| {
            let policy = NodePolicy { mode, nodes: NodeSet::of(NodeId(node)) };
            HugetlbPools::at(dir.path()).check_for(Some(&policy), PageSize::Huge2M, mib(2) * pages)
        };
        assert!(check(MemoryMode::Bind, 0, 50).is_ok() && check(MemoryMode::Bind, 0, 51).is_err());
        assert!(check(MemoryMode::Preferred, 1, 50).is_ok(), "it may be elsewhere");
        let text = check(MemoryMode::Bind, 1, 1).expect_err("node 1 has none").to_string();
        assert!(text.contains("is 1 short: 1 needed, 0 available (node 1: 0 free)"), "{text}");
    }

    #[test]
    fn a_size_that_the_kernel_lacks_is_named() {
        let dir = tree(0, 0, 0, 0);
        let error = HugetlbPools::at(dir.path()).status(PageSize::Giant1G).expect_err("no such pool");
        assert!(
            error.to_string().starts_with("cannot use a hugetlb pool of 1g pages: this kernel has none"),
            "{error}"
        );
    }

    #[test]
    fn a_malformed_file_is_not_zero() {
        let dir = tree(0, 0, 0, 0);
        let file = dir.path().join("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
        fs::write(&file, "many\n").expect("write");
        let error = HugetlbPools::at(dir.path()).status(PageSize::Huge2M).expect_err("not a number");
        assert!(matches!(error, PoolError::Malformed { .. }), "{error}");
    }

    #[test]
    fn leases_add_up_and_are_given_back() {
        let dir = tree(0, 0, 0, 5);
        let pools = HugetlbPools::at(dir.path());
        let overcommit = || pools.status(PageSize::Huge2M).expect("status").overcommit;
        let first = pools.lease(PageSize::Huge2M, 10).expect("room");
        let second = pools.lease(PageSize::Huge2M, 20).expect("room");
        assert_eq!(overcommit(), 35);
        drop(first);
        assert_eq!(overcommit(), 25);
        drop(second);
        assert_eq!(overcommit(), 5);
    }
}
