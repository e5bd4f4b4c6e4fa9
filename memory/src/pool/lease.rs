//! Room in a pool for as long as somebody holds the lease.

use std::path::PathBuf;

use wideleaf_policies::PageSize;

use super::{HugetlbPools, PoolError, Shortage};

impl HugetlbPools {
    /// Makes room for `pages` more pages until the lease is dropped. For 2 MiB pages that is a higher
    /// `nr_overcommit_hugepages`: the kernel then makes surplus pages when they are mapped and takes them back when
    /// they are unmapped. Giant pages know no surplus; the pool itself is grown and shrunk again.
    ///
    /// Where the process of the lease is killed outright (`kill -9`, an out-of-memory kill of its whole cgroup), the
    /// lease is not dropped. Of 2 MiB pages no memory stays then, but the permission does: `nr_overcommit_hugepages`
    /// stays raised, which costs nothing until another process maps that many. Of 1 GiB pages the pages themselves stay
    /// in the pool. `wideleaf pool list` shows both.
    ///
    /// # Errors
    /// [`PoolError`] where we may not (root is needed) or the machine has not that much contiguous memory.
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
    /// Changes the number in the file under a lock, so that two leases taken at once add up. Returns the numbers that
    /// were there before and after; the second is less than asked where the kernel had no more.
    fn change(&self, change: impl Fn(u64) -> u64) -> Result<[u64; 2], PoolError> {
        let _lock = self.pools.lock(self.size)?;
        let before = self.pools.number(&self.path)?;
        let wanted = change(before);
        self.pools.write(&self.path, wanted)?;
        // Written it is, and where it can not be read again it counts as done, or nobody would undo it.
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
