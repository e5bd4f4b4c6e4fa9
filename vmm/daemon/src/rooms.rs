//! Room in the hugetlb pools for libvirt domains: made before a domain starts, given back when it is gone.
//!
//! ```text
//!   hook: prepare ──▶ Room ──▶ state file ──▶ … domain runs … ──▶ hook: release, or its process ended, or we find it gone: given back
//! ```
//!
//! A room is plain data, so that one that was made by a daemon that was killed is given back by the next.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use wideleaf_control::protocol::PoolRequest;
use wideleaf_memory::pool::{Granted, HugetlbPools, OnShortage, PoolStatus, Request};
use wideleaf_policies::PageSize;

/// Room for one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Of the domain.
    pub uuid: String,
    /// Of the domain.
    pub domain: String,
    /// What it takes of the pools.
    pub wanted: Vec<PoolRequest>,
    /// What they grew by for it: less, where there were free pages.
    pub grown: Vec<Granted>,
    /// Whether its process was seen: what it wanted is in use then, and no longer to be kept for it.
    pub has_started: bool,
    /// Seconds since the epoch when it was made.
    pub made_at_s: u64,
}

/// The door to the pools.
pub trait Pools: Send + Sync {
    /// Makes room for `request` in addition to what there is: all of it or nothing.
    ///
    /// # Errors
    /// One line: what is missing, in numbers, and what would help.
    fn grow(&self, request: &PoolRequest) -> Result<Granted, String>;

    /// Takes back what [`Pools::grow`] added. What is taken out of `granted` is done.
    ///
    /// # Errors
    /// One line: what stays.
    fn shrink(&self, granted: &mut Granted) -> Result<(), String>;

    /// Pages of that size, on that node or on any, that the next domain could have without growing.
    fn available(&self, request: &PoolRequest) -> u64;

    /// How the pools are.
    fn status(&self) -> Vec<PoolStatus>;
}

impl Pools for HugetlbPools {
    fn grow(&self, request: &PoolRequest) -> Result<Granted, String> {
        let PoolRequest { pages, node, .. } = *request;
        let request = Request { size: size_of(request)?, pages, node, on_shortage: OnShortage::Refuse };
        self.reserve(&request).map_err(|error| error.to_string())
    }

    /// Pages that somebody still has are memory again when they are unmapped: nobody needs to wait for that.
    fn shrink(&self, granted: &mut Granted) -> Result<(), String> {
        self.give_back(granted).map(|_| ()).map_err(|error| error.to_string())
    }

    /// Promises are not made by node: each node is taken to hold all of them.
    fn available(&self, request: &PoolRequest) -> u64 {
        let Some(pool) = size_of(request).ok().and_then(|size| HugetlbPools::status(self, size).ok()) else { return 0 };
        let Some(node) = request.node else { return pool.available() };
        let free = pool.nodes.iter().find(|on_node| on_node.node == node).map_or(0, |on_node| on_node.free);
        free.saturating_sub(pool.reserved)
    }

    /// A size that this kernel does not have has no pool.
    fn status(&self) -> Vec<PoolStatus> {
        POOL_SIZES.iter().filter_map(|size| HugetlbPools::status(self, *size).ok()).collect()
    }
}

const POOL_SIZES: [PageSize; 2] = [PageSize::Huge2M, PageSize::Giant1G];

fn size_of(request: &PoolRequest) -> Result<PageSize, String> {
    let size = POOL_SIZES.into_iter().find(|size| size.bytes().get() == request.page_bytes);
    size.ok_or_else(|| format!("there is no pool of pages of {} bytes: only of 2 MiB and 1 GiB", request.page_bytes))
}

/// How long a room waits for its domain. libvirt calls the hook some 100 ms before QEMU starts; a domain that is restored from a large file
/// takes longer, and shows its process meanwhile.
pub const UNUSED_MAX: Duration = Duration::from_secs(120);

/// Makes room for a domain beside `others`: as much as is missing of all that it wants, or nothing. Returns what the pools grew by.
///
/// # Errors
/// Of the first that is refused; what was made before it is given back.
pub fn make(pools: &dyn Pools, wanted: &[PoolRequest], others: &[Room]) -> Result<Vec<Granted>, String> {
    let mut grown = Vec::new();
    for request in wanted {
        let missing = PoolRequest { pages: missing(pools, request, others), ..request.clone() };
        if missing.pages == 0 {
            continue;
        }
        match pools.grow(&missing) {
            Ok(granted) => grown.push(granted),
            Err(error) => {
                give_back(pools, grown);
                return Err(error);
            }
        }
    }
    Ok(grown)
}

/// Free pages are anybody's, except those that were made for domains that have not started yet.
fn missing(pools: &dyn Pools, request: &PoolRequest, others: &[Room]) -> u64 {
    let is_of_the_same = |other: &&PoolRequest| (other.page_bytes, other.node) == (request.page_bytes, request.node);
    let waiting = others.iter().filter(|room| !room.has_started).flat_map(|room| &room.wanted);
    let promised: u64 = waiting.filter(is_of_the_same).map(|other| other.pages).sum();
    request.pages.saturating_add(promised).saturating_sub(pools.available(request)).min(request.pages)
}

/// Takes all of it back. What stays is a line in the log: there is nobody to tell.
pub fn give_back(pools: &dyn Pools, grown: Vec<Granted>) {
    for mut granted in grown {
        if let Err(error) = pools.shrink(&mut granted) {
            tracing::warn!("{} pages of {} are not given back: {error}", granted.pages(), granted.size());
        }
    }
}

/// Whether nobody needs the room any more: no guest has its UUID, and it has had time to come.
pub fn is_abandoned(room: &Room, running: &[&str], now_s: u64) -> bool {
    let is_running = running.contains(&room.uuid.as_str());
    !is_running && now_s.saturating_sub(room.made_at_s) > UNUSED_MAX.as_secs()
}

/// Pools that exist only here, and can run out.
#[derive(Debug, Default)]
pub struct FakePools(std::sync::Mutex<FakePool>);

/// The one pool of [`FakePools`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FakePool {
    /// Pages it has that nobody uses.
    pub free: u64,
    /// Pages it can still grow by.
    pub growth_left: u64,
}

impl FakePools {
    /// With a pool like that.
    pub fn new(pool: FakePool) -> FakePools {
        FakePools(pool.into())
    }

    /// How it is now.
    pub fn now(&self) -> FakePool {
        *self.pool()
    }

    fn pool(&self) -> std::sync::MutexGuard<'_, FakePool> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Pools for std::sync::Arc<FakePools> {
    fn grow(&self, request: &PoolRequest) -> Result<Granted, String> {
        let mut pool = self.pool();
        let left = pool.growth_left.checked_sub(request.pages);
        pool.growth_left =
            left.ok_or_else(|| format!("{} pages are missing, {} can be made", request.pages, pool.growth_left))?;
        pool.free += request.pages;
        let granted = serde_json::json!({ "size": "2m", "pages": request.pages, "added": [], "boot": "of a test" });
        serde_json::from_value(granted).map_err(|error| error.to_string())
    }

    fn shrink(&self, granted: &mut Granted) -> Result<(), String> {
        let mut pool = self.pool();
        pool.free = pool.free.checked_sub(granted.pages()).ok_or("they are in use")?;
        pool.growth_left += granted.pages();
        Ok(())
    }

    fn available(&self, _: &PoolRequest) -> u64 {
        self.pool().free
    }

    fn status(&self) -> Vec<PoolStatus> {
        let FakePool { free, .. } = self.now();
        let size = PageSize::Huge2M;
        vec![PoolStatus { size, total: free, free, reserved: 0, surplus: 0, overcommit: 0, nodes: Vec::new() }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn pages(pages: u64) -> PoolRequest {
        PoolRequest { page_bytes: 2 << 20, pages, node: None }
    }

    fn room(wanted: u64, has_started: bool) -> Room {
        let wanted = vec![pages(wanted)];
        Room { uuid: "u".into(), domain: "web".into(), grown: Vec::new(), wanted, has_started, made_at_s: 1_000 }
    }

    fn pools(free: u64, growth_left: u64) -> Arc<FakePools> {
        Arc::new(FakePools::new(FakePool { free, growth_left }))
    }

    #[test]
    fn it_is_all_of_the_room_or_none() {
        let pools = pools(0, 10);
        assert_eq!(make(&pools, &[pages(11)], &[]), Err("11 pages are missing, 10 can be made".into()));
        assert_eq!(pools.now(), FakePool { free: 0, growth_left: 10 });
        let grown = make(&pools, &[pages(10)], &[]).expect("there are ten");
        assert_eq!(pools.now(), FakePool { free: 10, growth_left: 0 });
        give_back(&pools, grown);
        assert_eq!(pools.now(), FakePool { free: 0, growth_left: 10 });
    }

    #[test]
    fn what_is_free_is_not_made_again_unless_it_is_kept_for_another() {
        let grown = |others: &[Room]| -> Vec<u64> {
            let grown = make(&pools(6, 100), &[pages(8)], others).expect("a hundred can be made");
            grown.iter().map(Granted::pages).collect()
        };
        assert_eq!(grown(&[]), [2]);
        assert_eq!(grown(&[room(5, true)]), [2]); // its pages are in use, and not among the free ones
        assert_eq!(grown(&[room(5, false)]), [7]);
        assert_eq!(grown(&[room(50, false)]), [8]);
        assert!(make(&pools(8, 0), &[pages(8)], &[]).expect("there are eight").is_empty());
    }

    #[test]
    fn a_size_that_is_no_pools_is_refused() {
        let request = PoolRequest { page_bytes: 64 << 10, pages: 1, node: None };
        let error = HugetlbPools::of_this_machine().grow(&request).expect_err("no such pool");
        assert!(error.contains("65536 bytes: only of 2 MiB and 1 GiB"), "{error}");
    }

    #[test]
    fn a_room_is_abandoned_when_its_domain_does_not_come_or_is_gone() {
        assert!(!is_abandoned(&room(1, false), &["u"], 9_999));
        assert!(!is_abandoned(&room(1, false), &["v"], 1_120));
        assert!(is_abandoned(&room(1, false), &["v"], 1_121));
    }
}
