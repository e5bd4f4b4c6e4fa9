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
use wideleaf_policies::{Bytes, PageSize};

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

/// Makes room for a domain beside `others`: as much as is missing of all that it wants, or nothing. Returns what the pools grew by,
/// which is no more than `spare`, where that is known: the kernel would make pages of all the memory there is.
///
/// # Errors
/// Of the first that is refused; what was made before it is given back.
pub fn make(
    pools: &dyn Pools,
    wanted: &[PoolRequest],
    others: &[Room],
    spare: Option<Bytes>,
) -> Result<Vec<Granted>, String> {
    let waiting = others.iter().filter(|room| !room.has_started).flat_map(|room| &room.wanted);
    let mut promised: Vec<&PoolRequest> = waiting.collect();
    let mut grown = Vec::new();
    let mut spare = spare;
    for request in wanted {
        let missing = PoolRequest { pages: missing(pools, request, &promised), ..request.clone() };
        promised.push(request);
        if missing.pages == 0 {
            continue;
        }
        match take(&missing, &mut spare).and_then(|()| pools.grow(&missing)) {
            Ok(granted) => grown.push(granted),
            Err(error) => {
                give_back(pools, grown);
                return Err(error);
            }
        }
    }
    Ok(grown)
}

/// Free pages are anybody's, except those that are promised. A promise that names no node may be kept on any, and so counts on each.
fn missing(pools: &dyn Pools, request: &PoolRequest, promised: &[&PoolRequest]) -> u64 {
    let may_be_there = |of: &PoolRequest| of.node == request.node || of.node.is_none() || request.node.is_none();
    let rival = promised.iter().filter(|of| of.page_bytes == request.page_bytes && may_be_there(of));
    let promised = rival.fold(0, |sum: u64, of| sum.saturating_add(of.pages));
    request.pages.saturating_add(promised).saturating_sub(pools.available(request)).min(request.pages)
}

/// Takes the memory of `missing` out of `spare`.
fn take(missing: &PoolRequest, spare: &mut Option<Bytes>) -> Result<(), String> {
    let Some(spare) = spare else { return Ok(()) };
    let needed = Bytes::new(missing.pages.saturating_mul(missing.page_bytes));
    if needed > *spare {
        return Err(format!(
            "{needed} are needed and {spare} are above host.low_free: free memory, or set host.low_free lower"
        ));
    }
    *spare = spare.saturating_sub(needed);
    Ok(())
}

/// Takes all of it back. Returns what stays, to be tried again; why is a line in the log.
pub fn give_back(pools: &dyn Pools, mut grown: Vec<Granted>) -> Vec<Granted> {
    grown.retain_mut(|granted| match pools.shrink(granted) {
        Ok(()) => false,
        Err(error) => {
            tracing::warn!("{} pages of {} are not given back yet: {error}", granted.pages(), granted.size());
            true
        }
    });
    grown
}

impl Room {
    /// Whether nobody needs it, where its domain does not run: it did, or it has had the time to come.
    pub fn is_abandoned(&self, now_s: u64) -> bool {
        self.has_started || now_s.saturating_sub(self.made_at_s) > UNUSED_MAX.as_secs()
    }
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

    /// Somebody took or left pages.
    pub fn set_free(&self, free: u64) {
        self.pool().free = free;
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
    use wideleaf_policies::units::mib;

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
        assert_eq!(make(&pools, &[pages(11)], &[], None), Err("11 pages are missing, 10 can be made".into()));
        assert_eq!(pools.now(), FakePool { free: 0, growth_left: 10 });
        let grown = make(&pools, &[pages(10)], &[], None).expect("there are ten");
        assert_eq!(pools.now(), FakePool { free: 10, growth_left: 0 });
        assert_eq!(give_back(&pools, grown), []);
        assert_eq!(pools.now(), FakePool { free: 0, growth_left: 10 });
    }

    #[test]
    fn what_is_free_is_not_made_again_unless_it_is_kept_for_another() {
        let grown = |others: &[Room]| -> Vec<u64> {
            let grown = make(&pools(6, 100), &[pages(8)], others, None).expect("a hundred can be made");
            grown.iter().map(Granted::pages).collect()
        };
        assert_eq!(grown(&[]), [2]);
        assert_eq!(grown(&[room(5, true)]), [2]); // its pages are in use, and not among the free ones
        assert_eq!(grown(&[room(5, false)]), [7]);
        assert_eq!(grown(&[room(50, false)]), [8]);
        assert!(make(&pools(8, 0), &[pages(8)], &[], None).expect("there are eight").is_empty());
    }

    #[test]
    fn a_page_is_promised_once_whichever_node_is_asked_for() {
        let grown = |wanted: &[PoolRequest], others: &[Room]| -> u64 {
            let grown = make(&pools(6, 100), wanted, others, None).expect("a hundred can be made");
            grown.iter().map(Granted::pages).sum()
        };
        let of_node = |node| PoolRequest { node: Some(node), ..pages(6) };
        assert_eq!(grown(&[of_node(0)], &[room(6, false)]), 6); // the other may take all six from node 0
        assert_eq!(grown(&[of_node(0), pages(4)], &[]), 4); // the first takes the six
    }

    #[test]
    fn a_domain_does_not_get_the_memory_that_the_host_is_to_keep() {
        let room = |wanted: &[PoolRequest]| make(&pools(0, 100), wanted, &[], Some(mib(20)));
        assert_eq!(room(&[pages(10)]).expect("twenty mebibytes").len(), 1);
        let error = room(&[pages(1), pages(10)]).expect_err("two mebibytes too many");
        assert!(error.starts_with("20 MiB are needed and 18 MiB are above host.low_free"), "{error}");
    }

    #[test]
    fn a_size_that_is_no_pools_is_refused() {
        let request = PoolRequest { page_bytes: 64 << 10, pages: 1, node: None };
        let error = HugetlbPools::of_this_machine().grow(&request).expect_err("no such pool");
        assert!(error.contains("65536 bytes: only of 2 MiB and 1 GiB"), "{error}");
    }

    #[test]
    fn a_room_is_abandoned_when_its_domain_does_not_come_or_is_gone() {
        let is_abandoned = |has_started, now_s| room(1, has_started).is_abandoned(now_s);
        assert_eq!([1_000, 1_120, 1_121].map(|now_s| is_abandoned(false, now_s)), [false, false, true]);
        assert!(is_abandoned(true, 1_000));
    }
}
