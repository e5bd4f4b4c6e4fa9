//! A maker of giant pages for a manager: pages that the pool lacks are made when a policy wants them. That compacts the
//! host's memory, so it happens only where an operator allows a number of pages.
//!
//! ```text
//!   manager ── make ──▶ GiantMaker ─┬─ PoolGiantMaker   this process changes the pool: a library user with root
//!                                   └─ of a run         another process does: the run itself is in its sandbox
//! ```

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

use wideleaf_policies::PageSize;

use crate::giant_page::GiantFile;
use crate::host::linux::LinuxHost;
use crate::kernel::GiantMappings as _;
use crate::numa::placement::{MemoryMode, NodePolicy};
use crate::pool::{HugetlbPools, NewPages, NotMade, PoolError};

/// Makes giant pages.
pub trait GiantMaker: Debug + Send + Sync {
    /// Number of pages that it may still make.
    fn left(&self) -> u64;

    /// Makes one by that memory policy, which may take seconds. The page goes back to the host with the file and its
    /// last mapping.
    ///
    /// # Errors
    /// [`NotMade`]; no page stays in the pool.
    fn make(&self, policy: Option<NodePolicy>) -> Result<GiantFile, NotMade>;
}

/// Makes pages by changes of the pool from this process.
#[derive(Debug)]
pub struct PoolGiantMaker {
    pools: HugetlbPools,
    node: Option<u32>,
    left: AtomicU64,
}

impl PoolGiantMaker {
    /// Makes at most `pages` pages in all, on that NUMA node where no policy names another; `None`: on the only one, or
    /// wherever there is memory.
    pub fn new(pools: HugetlbPools, node: Option<u32>, pages: u64) -> PoolGiantMaker {
        PoolGiantMaker { pools, node, left: AtomicU64::new(pages) }
    }
}

impl GiantMaker for PoolGiantMaker {
    fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    fn make(&self, policy: Option<NodePolicy>) -> Result<GiantFile, NotMade> {
        let file = GiantFile::of_pool().map_err(|error| NotMade::NotMapped(error.to_string()))?;
        let here = || self.node.and_then(|node| NodePolicy::preferring(node.try_into().ok()?));
        make_in(&self.pools, &file, policy.or_else(here))?;
        self.left.fetch_sub(1, Ordering::Relaxed);
        Ok(file)
    }
}

/// Makes a page of 1 GiB by that memory policy and has `file` hold it. `None`: on the only node, or wherever the kernel
/// finds memory. The calling thread has the policy while the page is made, since the kernel takes the page for a file
/// by the policy of the thread.
///
/// # Errors
/// [`NotMade`]; no page stays in the pool. Under a policy that only prefers a node, all nodes were tried.
pub fn make_in(pools: &HugetlbPools, file: &GiantFile, policy: Option<NodePolicy>) -> Result<(), NotMade> {
    let node = policy.and_then(|policy| policy.single_node()).map(|node| u32::from(node.0));
    let made = make_on(pools, file, node, policy.as_ref());
    let may_be_elsewhere = policy.is_some_and(|policy| policy.mode == MemoryMode::Preferred) && node.is_some();
    match made {
        Err(NotMade::Pool(PoolError::NotEnoughMemory(_) | PoolError::Short(_)) | NotMade::NotMapped(_))
            if may_be_elsewhere =>
        {
            make_on(pools, file, None, policy.as_ref())
        }
        made => made,
    }
}

fn make_on(
    pools: &HugetlbPools,
    file: &GiantFile,
    node: Option<u32>,
    policy: Option<&NodePolicy>,
) -> Result<(), NotMade> {
    let new = NewPages { size: PageSize::Giant1G, pages: 1, node };
    pools.with_new_pages(&new, || LinuxHost::open()?.fill_giant(file, policy))
}
