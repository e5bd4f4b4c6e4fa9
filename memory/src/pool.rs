//! The hugetlb pools: what is there, whether it is enough, and taking some for a while.
//!
//! A VM that asks for more than the pool has is refused before it starts, with the size, the node, the number of
//! pages that are short and the command that would help: a shortage found at a fault is a SIGBUS.
//! Files: Documentation/admin-guide/mm/hugetlbpage.rst.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use wideleaf_policies::{Bytes, PageSize};

/// The pools of this machine, or of a captured tree.
#[derive(Clone, Debug)]
pub struct HugetlbPools {
    root: PathBuf,
}

/// One pool, now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// Size of its pages.
    pub size: PageSize,
    /// Pages in the pool, surplus ones included.
    pub total: u64,
    /// Pages nobody has faulted in.
    pub free: u64,
    /// Free pages that are promised to a mapping.
    pub reserved: u64,
    /// Pages beyond `nr_hugepages`.
    pub surplus: u64,
    /// How many surplus pages may exist at most.
    pub overcommit: u64,
    /// Free pages by NUMA node.
    pub free_by_node: Vec<(u32, u64)>,
}

impl PoolStatus {
    /// Pages a new mapping can have: free and not promised, plus what may be added as surplus.
    pub fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved) + self.overcommit.saturating_sub(self.surplus)
    }
}

/// Why a pool can not serve.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The kernel has no pool of that size.
    #[error("this kernel has no hugetlb pool of {0} pages ({1} is missing)")]
    NoPool(PageSize, PathBuf),
    /// A file of the pool can not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file of the pool does not hold a number.
    #[error("{}: expected a number, found {text:?}", path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// What it holds.
        text: String,
    },
    /// Not enough pages.
    #[error("{0}")]
    Short(Shortage),
}

/// Not enough pages, in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The pool.
    pub pool: PoolStatus,
    /// Pages asked for.
    pub needed: u64,
    /// The file that grows the pool.
    pub file: PathBuf,
}

impl Shortage {
    /// Pages that are missing.
    pub fn short(&self) -> u64 {
        self.needed - self.pool.available()
    }
}

impl std::fmt::Display for Shortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PoolStatus { size, total, surplus, .. } = &self.pool;
        let mut nodes = String::new();
        for (node, free) in &self.pool.free_by_node {
            let _ = write!(nodes, "{}node {node}: {free} free", if nodes.is_empty() { "" } else { ", " });
        }
        write!(
            f,
            "hugetlb pool of {size} pages is {} short: {} needed, {} available ({nodes}); run `echo {} | sudo tee {}`",
            self.short(),
            self.needed,
            self.pool.available(),
            total - surplus + self.short(),
            self.file.display(),
        )
    }
}

impl HugetlbPools {
    /// The pools of this machine.
    pub fn of_this_machine() -> HugetlbPools {
        HugetlbPools::at("/")
    }

    /// The pools of the tree under `root` (which holds `sys/`).
    pub fn at(root: impl Into<PathBuf>) -> HugetlbPools {
        HugetlbPools { root: root.into() }
    }

    fn folder(&self, size: PageSize) -> PathBuf {
        self.root.join("sys/kernel/mm/hugepages").join(format!("hugepages-{}kB", size.bytes().get() >> 10))
    }

    /// The state of one pool.
    ///
    /// # Errors
    /// [`PoolError`] where the kernel has no such pool or its files make no sense.
    pub fn status(&self, size: PageSize) -> Result<PoolStatus, PoolError> {
        let folder = self.folder(size);
        if !folder.is_dir() {
            return Err(PoolError::NoPool(size, folder));
        }
        let read = |name: &str| read_number(&folder.join(name));
        Ok(PoolStatus {
            size,
            total: read("nr_hugepages")?,
            free: read("free_hugepages")?,
            reserved: read("resv_hugepages")?,
            surplus: read("surplus_hugepages")?,
            // Absent in trees older than the setting; gigantic pages have the file and allow no surplus.
            overcommit: read("nr_overcommit_hugepages").unwrap_or(0),
            free_by_node: self.free_by_node(size),
        })
    }

    fn free_by_node(&self, size: PageSize) -> Vec<(u32, u64)> {
        let Ok(nodes) = fs::read_dir(self.root.join("sys/devices/system/node")) else {
            return Vec::new();
        };
        let pool = format!("hugepages/hugepages-{}kB/free_hugepages", size.bytes().get() >> 10);
        let mut free: Vec<(u32, u64)> = nodes
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let node = path.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
                Some((node, read_number(&path.join(&pool)).ok()?))
            })
            .collect();
        free.sort_unstable();
        free
    }

    /// Whether `bytes` can be mapped from the pool now.
    ///
    /// # Errors
    /// [`PoolError::Short`] with everything a person needs to help themselves.
    pub fn check(&self, size: PageSize, bytes: Bytes) -> Result<(), PoolError> {
        let pool = self.status(size)?;
        let needed = bytes.pages(size);
        if pool.available() >= needed {
            return Ok(());
        }
        Err(PoolError::Short(Shortage { pool, needed, file: self.folder(size).join("nr_hugepages") }))
    }

    /// Makes room for `pages` more pages until the lease is dropped. For 2 MiB pages that is a higher
    /// `nr_overcommit_hugepages`: the kernel then makes surplus pages when they are mapped and takes them back when
    /// they are unmapped, so that nothing stays even if this process is killed. Giant pages know no surplus; the pool
    /// itself is grown and shrunk again.
    ///
    /// # Errors
    /// [`PoolError`] where we may not (root is needed) or the machine has not that much contiguous memory.
    pub fn lease(&self, size: PageSize, pages: u64) -> Result<PoolLease, PoolError> {
        let name = if size == PageSize::Giant1G { "nr_hugepages" } else { "nr_overcommit_hugepages" };
        let path = self.folder(size).join(name);
        let lease = PoolLease { path, pages };
        let before = lease.change(|n| n + pages)?;
        let after = read_number(&lease.path)?;
        if after < before + pages {
            let pool = self.status(size)?;
            drop(PoolLease { path: lease.path.clone(), pages: after.saturating_sub(before) });
            let short = Shortage { pool, needed: pages, file: lease.path.clone() };
            std::mem::forget(lease); // what it took has just been given back
            return Err(PoolError::Short(short));
        }
        Ok(lease)
    }
}

/// Room in a pool, given back on drop.
#[derive(Debug)]
pub struct PoolLease {
    path: PathBuf,
    pages: u64,
}

impl PoolLease {
    /// Changes the number in the file under a lock, so that two leases taken at once add up. Returns the number that
    /// was there before.
    fn change(&self, change: impl Fn(u64) -> u64) -> Result<u64, PoolError> {
        let at = |source| PoolError::File { path: self.path.clone(), source };
        let file = fs::File::open(&self.path).map_err(at)?;
        let _lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| at(errno.into()))?;
        let before = read_number(&self.path)?;
        fs::write(&self.path, change(before).to_string()).map_err(at)?;
        Ok(before)
    }
}

impl Drop for PoolLease {
    fn drop(&mut self) {
        if let Err(error) = self.change(|n| n.saturating_sub(self.pages)) {
            tracing::error!("cannot give {} hugetlb pages back: {error}", self.pages);
        }
    }
}

fn read_number(path: &Path) -> Result<u64, PoolError> {
    let text = fs::read_to_string(path).map_err(|source| PoolError::File { path: path.to_owned(), source })?;
    text.trim().parse().map_err(|_| PoolError::Malformed { path: path.to_owned(), text })
}

#[cfg(test)]
mod tests {
    use super::*;
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
            fs::write(node.join("free_hugepages"), format!("{free}\n")).expect("a node file");
        }
        dir
    }

    #[test]
    fn a_shortage_says_size_node_number_and_command() {
        let dir = tree(100, 60, 10, 0); // 50 can be had
        let error = HugetlbPools::at(dir.path()).check(PageSize::Huge2M, mib(256)).expect_err("128 are needed");
        let text = error.to_string();
        assert!(text.contains("pool of 2m pages is 78 short: 128 needed, 50 available"), "{text}");
        assert!(text.contains("node 0: 60 free, node 1: 0 free"), "{text}");
        assert!(text.contains("echo 178 | sudo tee") && text.contains("hugepages-2048kB/nr_hugepages"), "{text}");
    }

    #[test]
    fn promised_pages_are_not_available_and_overcommit_is() {
        let dir = tree(100, 60, 60, 128);
        assert!(HugetlbPools::at(dir.path()).check(PageSize::Huge2M, mib(256)).is_ok());
        let dir = tree(100, 60, 60, 127);
        assert!(HugetlbPools::at(dir.path()).check(PageSize::Huge2M, mib(256)).is_err());
    }

    #[test]
    fn a_size_the_kernel_does_not_have_is_named() {
        let dir = tree(0, 0, 0, 0);
        let error = HugetlbPools::at(dir.path()).status(PageSize::Giant1G).expect_err("no such pool");
        assert!(error.to_string().starts_with("this kernel has no hugetlb pool of 1g pages"), "{error}");
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
