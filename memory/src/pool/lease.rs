//! Pages in a pool for as long as the lease exists: the pool's limit or the pool itself grows, and shrinks by the same
//! number when the lease is dropped. Needs root.

use wideleaf_policies::PageSize;

use super::{Granted, HugetlbPools, OnShortage, PoolError, Request, Shortage};

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
        if size != PageSize::Giant1G {
            return self.lease_limit(size, pages);
        }
        let request = Request { size, pages, node: None, on_shortage: OnShortage::Refuse };
        let growth = Growth::Pages(self.reserve(&request)?);
        Ok(PoolLease { pools: self.clone(), size, growth })
    }

    /// Permits `pages` more surplus pages.
    fn lease_limit(&self, size: PageSize, pages: u64) -> Result<PoolLease, PoolError> {
        // Surplus pages in use may be more than the limit: that number of them is permitted no longer.
        let surplus = self.status(size)?.surplus;
        let raised = |limit: u64| limit.max(surplus).saturating_add(pages);
        let [before, after] = self.change_limit(size, raised)?;
        let wanted = raised(before);
        let growth = Growth::Limit(after.min(wanted).saturating_sub(before));
        let lease = PoolLease { pools: self.clone(), size, growth };
        if after < wanted {
            let shortage = Shortage { pool: self.status(size)?, needed: pages, file: self.overcommit_file(size) };
            return Err(PoolError::Short(shortage));
        }
        Ok(lease)
    }

    /// Changes the limit of surplus pages under a lock, so that two leases taken at the same time add up. Returns the
    /// numbers before and after.
    fn change_limit(&self, size: PageSize, change: impl Fn(u64) -> u64) -> Result<[u64; 2], PoolError> {
        let _lock = self.lock(size)?;
        let file = self.overcommit_file(size);
        let before = self.number(&file)?;
        let wanted = change(before);
        self.write(&file, wanted)?;
        // It is written: if it cannot be read again it counts as done, or it would never be undone.
        Ok([before, self.number(&file).unwrap_or(wanted)])
    }
}

/// Growth of a pool, undone on drop.
#[derive(Debug)]
pub struct PoolLease {
    pools: HugetlbPools,
    size: PageSize,
    growth: Growth,
}

/// What a lease has added.
#[derive(Debug)]
enum Growth {
    /// Pages of the pool.
    Pages(Granted),
    /// Growth of the limit of surplus pages.
    Limit(u64),
}

impl Drop for PoolLease {
    fn drop(&mut self) {
        let given_back = match &mut self.growth {
            Growth::Pages(granted) => self.pools.give_back(granted).map(drop),
            Growth::Limit(raised) => {
                self.pools.change_limit(self.size, |limit| limit.saturating_sub(*raised)).map(drop)
            }
        };
        if let Err(error) = given_back {
            tracing::error!("cannot shrink the pool of {} pages to its former size: {error}", self.size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::fake_kernel::{FakeKernel, FakeNode, State};

    fn pool(node: FakeNode, is_giant: bool) -> State {
        State { nodes: vec![node], is_giant, ..State::default() }
    }

    #[test]
    fn a_page_that_goes_when_it_is_unmapped_still_does_after_a_lease_beside_it() {
        let in_use = FakeNode { total: 1, surplus: 1, whole: 2, ..FakeNode::default() };
        let kernel = FakeKernel::new(pool(in_use, true));
        let lease = kernel.pools().lease(PageSize::Giant1G, 1).expect("there are two");
        assert_eq!(kernel.pools().status(PageSize::Giant1G).expect("readable").available(), 1);
        drop(lease);
        assert_eq!(kernel.state(), pool(in_use, true));
        kernel.unmap(1);
        assert_eq!(kernel.state(), pool(FakeNode { whole: 3, ..FakeNode::default() }, true));
    }

    #[test]
    fn without_a_contiguous_gibibyte_the_pool_is_as_it_was() {
        let kernel = FakeKernel::new(pool(FakeNode { compactable: 1, ..FakeNode::default() }, true));
        let error = kernel.pools().lease(PageSize::Giant1G, 1).expect_err("scattered");
        assert!(matches!(error, PoolError::NotEnoughMemory(_)), "{error}");
        assert_eq!(kernel.state(), pool(FakeNode { compactable: 1, ..FakeNode::default() }, true));
    }

    #[test]
    fn a_lease_permits_its_pages_beside_surplus_ones_beyond_the_limit() {
        let in_use = FakeNode { total: 10, surplus: 10, whole: 9, ..FakeNode::default() };
        let kernel = FakeKernel::new(pool(in_use, false));
        let lease = kernel.pools().lease(PageSize::Huge2M, 5).expect("there are nine");
        kernel.map(5).expect("they are leased");
        kernel.map(1).expect_err("no more are");
        kernel.unmap(5);
        drop(lease);
        assert_eq!(kernel.state(), pool(in_use, false));
    }
}
