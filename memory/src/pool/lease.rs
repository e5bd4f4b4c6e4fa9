//! Room in a pool for as long as the lease exists.

use std::path::PathBuf;

use wideleaf_policies::PageSize;

use super::{HugetlbPools, PoolError, Shortage};

impl HugetlbPools {
    /// Makes room for `pages` more pages until the lease is dropped. For 2 MiB pages that is a higher
    /// `nr_overcommit_hugepages`: the kernel then makes surplus pages when they are mapped and takes them back when
    /// they are unmapped. For giant pages, which have no surplus before Linux 6.19, the pool itself is grown and shrunk
    /// again.
    ///
    /// If the process of the lease is killed outright (`kill -9`, an out-of-memory kill of its whole cgroup), the
    /// lease is not dropped. With 2 MiB pages no memory stays then, but the permission does:
    /// `nr_overcommit_hugepages` stays raised, which costs nothing until another process maps that many. With 1 GiB
    /// pages the pages themselves stay in the pool. `wideleaf pool list` shows both. A run makes its giant pages by
    /// [`HugetlbPools::with_new_pages`], which leaves neither.
    ///
    /// # Errors
    /// [`PoolError`] if this process may not (root is needed) or the machine has too little contiguous memory.
    pub fn lease(&self, size: PageSize, pages: u64) -> Result<PoolLease, PoolError> {
        let name = if size == PageSize::Giant1G { "nr_hugepages" } else { "nr_overcommit_hugepages" };
        let path = self.folder(size, None).join(name);
        let mut lease = PoolLease { pools: self.clone(), size, path, pages: 0 };
        let [before, after] = lease.change(|n| n.saturating_add(pages))?;
        lease.pages = after.saturating_sub(before).min(pages);
        if lease.pages < pages {
            let pool = self.status(size)?;
            return Err(PoolError::Short(Shortage { pool, needed: pages, file: lease.path.clone() }));
        }
        Ok(lease)
    }
}

/// Room in a pool, given back on drop.
#[derive(Debug)]
pub struct PoolLease {
    pools: HugetlbPools,
    size: PageSize,
    path: PathBuf,
    pages: u64,
}

impl PoolLease {
    /// Changes the number in the file under a lock, so that two leases taken at the same time add up. Returns the
    /// numbers before and after; the second is less than asked if the kernel had no more.
    fn change(&self, change: impl Fn(u64) -> u64) -> Result<[u64; 2], PoolError> {
        let _lock = self.pools.lock(self.size)?;
        let before = self.pools.number(&self.path)?;
        let wanted = change(before);
        self.pools.write(&self.path, wanted)?;
        // It is written: if it cannot be read again it counts as done, or it would never be undone.
        Ok([before, self.pools.number(&self.path).unwrap_or(wanted)])
    }
}

impl Drop for PoolLease {
    fn drop(&mut self) {
        if let Err(error) = self.change(|n| n.saturating_sub(self.pages)) {
            tracing::error!("cannot give {} hugetlb pages back: {error}", self.pages);
        }
    }
}
