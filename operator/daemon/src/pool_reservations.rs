//! Room in the hugetlb pools for libvirt domains: made before a domain starts, given back when it is gone.
//!
//! ```text
//!   hook: prepare ──▶ Room: filled ──▶ … domain runs … ──▶ hook: release, or its process has ended or is not found:
//!                      │  intent ──▶ book ──▶ pool            emptied: the same, part by part
//!                      ├─ refused, and the pool is known to be unchanged: the intent is closed
//!                      └─ killed in between, or result unknown: settled from the pool's numbers
//! ```
//!
//! A room is plain data. The next daemon therefore gives back the room that a killed daemon made: once, and no more
//! than was made.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use wideleaf_control::protocol::{OrdinaryMemory, PoolRequest};
use wideleaf_memory::pool::{
    Granted, HugetlbPools, Intent, NodeMemory, Note, OnShortage, PoolError, PoolStatus, Request, Settled,
};
use wideleaf_policies::{Bytes, PageSize};

use crate::guests::{Found, ProcessId};

/// Room for one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// UUID of the domain.
    pub uuid: String,
    /// Name of the domain.
    pub domain: String,
    /// Pages that the domain takes from the pools.
    pub wanted: Vec<PoolRequest>,
    /// Growth of the pools for it: less than `wanted` where there were free pages.
    pub grown: Vec<Granted>,
    /// A change of a pool that was begun for it. The pool shows whether it was made.
    #[serde(default)]
    pub open: Option<Intent>,
    /// Process of the domain according to libvirt.
    #[serde(default)]
    pub process: Option<ProcessId>,
    /// Whether its pages count as in use, and are no longer kept for it. A process takes them one by one until libvirt
    /// reports that the domain runs.
    pub has_started: bool,
    /// Creation time, in seconds since the epoch.
    pub made_at_s: u64,
}

/// Reason why a pool was not changed as asked, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The pool is known to be unchanged.
    #[error("{0}")]
    AsBefore(String),
    /// The pool may have changed all the same; [`Pools::settle`] finds out.
    #[error("{0}")]
    Unknown(String),
}

impl From<PoolError> for Refusal {
    fn from(error: PoolError) -> Refusal {
        let line = error.to_string();
        if error.leaves_pool_as_it_was() { Refusal::AsBefore(line) } else { Refusal::Unknown(line) }
    }
}

/// The daemon's interface to the pools.
pub trait Pools: Send + Sync {
    /// Makes room for `request` in addition to the present pages: all of it or nothing, unless `on_shortage` says to
    /// take fewer. A change is noted before it is made.
    ///
    /// # Errors
    /// [`Refusal`]: what is missing, in numbers, and what would help.
    fn grow(&self, request: &PoolRequest, on_shortage: OnShortage, note: Note<'_>) -> Result<Granted, Refusal>;

    /// Takes back a part of the growth by [`Pools::grow`], noted before, and removes it from `granted`.
    ///
    /// # Errors
    /// [`Refusal`]: why the rest stays.
    fn shrink(&self, granted: &mut Granted, note: Note<'_>) -> Result<(), Refusal>;

    /// Determines the result of a noted change, and adds it to `granted` or removes it there.
    ///
    /// # Errors
    /// One line: the pool cannot be read.
    fn settle(&self, intent: &Intent, granted: &mut Vec<Granted>) -> Result<Settled, String>;

    /// Pages of that size, on that node or on any, that the next domain could have without growth.
    fn available(&self, request: &PoolRequest) -> u64;

    /// State of the pools.
    fn status(&self) -> Vec<PoolStatus>;

    /// Free memory by node and block, as far as the kernel tells.
    fn room(&self) -> Vec<NodeMemory>;
}

impl Pools for HugetlbPools {
    fn grow(&self, request: &PoolRequest, on_shortage: OnShortage, note: Note<'_>) -> Result<Granted, Refusal> {
        let PoolRequest { pages, node, .. } = *request;
        let size = size_of(request).map_err(Refusal::AsBefore)?;
        Ok(self.reserve_noting(&Request { size, pages, node, on_shortage }, note)?)
    }

    /// Pages in use become ordinary memory when they are unmapped, so there is no need to wait for them.
    fn shrink(&self, granted: &mut Granted, note: Note<'_>) -> Result<(), Refusal> {
        self.give_back_part(granted, note)?;
        Ok(())
    }

    fn settle(&self, intent: &Intent, granted: &mut Vec<Granted>) -> Result<Settled, String> {
        HugetlbPools::settle(self, intent, granted).map_err(|error| error.to_string())
    }

    /// The kernel does not keep reservations by node, so each node counts all of them.
    fn available(&self, request: &PoolRequest) -> u64 {
        let Some(pool) = size_of(request).ok().and_then(|size| HugetlbPools::status(self, size).ok()) else { return 0 };
        let Some(nodes) = request.on_nodes() else { return pool.available() };
        let there = pool.nodes.iter().filter(|on_node| nodes.contains(&on_node.node));
        there.map(|on_node| on_node.free).sum::<u64>().saturating_sub(pool.reserved)
    }

    /// A size that this kernel does not support has no pool.
    fn status(&self) -> Vec<PoolStatus> {
        POOL_SIZES.iter().filter_map(|size| HugetlbPools::status(self, *size).ok()).collect()
    }

    fn room(&self) -> Vec<NodeMemory> {
        HugetlbPools::room(self, None).unwrap_or_default()
    }
}

const POOL_SIZES: [PageSize; 2] = [PageSize::Huge2M, PageSize::Giant1G];

fn size_of(request: &PoolRequest) -> Result<PageSize, String> {
    let size = POOL_SIZES.into_iter().find(|size| size.bytes().get() == request.page_bytes);
    size.ok_or_else(|| format!("there is no pool of pages of {} bytes: only of 2 MiB and 1 GiB", request.page_bytes))
}

/// Time that a room waits for its domain. libvirt calls the hook some 100 ms before QEMU starts. A domain that is
/// restored from a large file takes longer, but its process already runs.
pub const UNUSED_MAX: Duration = Duration::from_secs(120);

/// Records a room before a pool changes for it, so that the next daemon knows. An error keeps the pool as it is.
pub type Book<'a> = &'a mut dyn FnMut(&Room) -> Result<(), String>;

/// Makes room for a domain beside `others`: the missing part of all that it wants, or nothing. The pools grow by at
/// most `spare`, where that is known: the kernel would turn all available memory into pages.
///
/// # Errors
/// The first refusal. Earlier growth is given back; what could not be is still in the room.
pub fn fill(
    pools: &dyn Pools,
    room: &mut Room,
    others: &[Room],
    spare: Option<Bytes>,
    book: Book<'_>,
) -> Result<(), String> {
    let waiting = others.iter().filter(|room| !room.has_started).flat_map(|room| &room.wanted);
    let mut promised: Vec<PoolRequest> = waiting.cloned().collect();
    let mut spare = spare;
    for request in room.wanted.clone() {
        let missing = PoolRequest { pages: missing(pools, &request, &promised), ..request.clone() };
        promised.push(request);
        if missing.pages == 0 {
            continue;
        }
        if let Err(error) = take(&missing, &mut spare).and_then(|()| grow_on_its_nodes(pools, room, &missing, book)) {
            empty(pools, room, book);
            return Err(error);
        }
    }
    Ok(())
}

/// Makes the missing pages on the nodes that may have them: an even share on each, then what a node could not give on
/// the others.
fn grow_on_its_nodes(pools: &dyn Pools, room: &mut Room, missing: &PoolRequest, book: Book<'_>) -> Result<(), String> {
    let of_node = |node: u32, pages| PoolRequest { pages, node: Some(node), nodes: Vec::new(), ..*missing };
    let Some(nodes @ [.., last]) = missing.on_nodes().filter(|nodes| nodes.len() > 1) else {
        return grow(pools, room, missing, OnShortage::Refuse, book).map(drop);
    };
    let mut left = missing.pages;
    let shares = nodes.iter().enumerate().map(|(number, node)| (node, (nodes.len() - number) as u64));
    for (node, nodes_left) in shares.chain(nodes.iter().map(|node| (node, 1))) {
        let share = left.div_ceil(nodes_left);
        if share > 0 {
            left -= grow(pools, room, &of_node(*node, share), OnShortage::TakeFewer, book)?.min(left);
        }
    }
    if left == 0 {
        return Ok(());
    }
    let why = grow(pools, room, &of_node(*last, left), OnShortage::Refuse, book);
    why.map(drop).map_err(|error| {
        let nodes = nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        format!("{left} of {} pages are missing on its nodes ({nodes}): {error}", missing.pages)
    })
}

/// Makes pages, and returns their number. None is no failure where fewer may be taken.
fn grow(
    pools: &dyn Pools,
    room: &mut Room,
    missing: &PoolRequest,
    on_shortage: OnShortage,
    book: Book<'_>,
) -> Result<u64, String> {
    let grown = pools.grow(missing, on_shortage, &mut |intent| {
        room.open = Some(intent.clone());
        book(room)
    });
    if on_shortage == OnShortage::TakeFewer && matches!(grown, Err(Refusal::AsBefore(_))) {
        room.open = None;
        return Ok(0);
    }
    let granted = closed(room, grown)?;
    let pages = granted.pages();
    room.grown.push(granted);
    Ok(pages)
}

/// Result of a change. Its intent stays open only if the result is unknown.
fn closed<T>(room: &mut Room, changed: Result<T, Refusal>) -> Result<T, String> {
    if !matches!(changed, Err(Refusal::Unknown(_))) {
        room.open = None;
    }
    changed.map_err(|refusal| refusal.to_string())
}

/// Gives back all of the room. The rest stays in the room for another attempt, with the reason in the log.
pub fn empty(pools: &dyn Pools, room: &mut Room, book: Book<'_>) {
    let not_all = |room: &Room, error| tracing::warn!("cannot give back all room for {} yet: {error}", room.domain);
    // One change at a time is open: while its result is unknown, the others wait.
    if let Err(error) = settle(pools, room) {
        return not_all(room, error);
    }
    for index in (0..room.grown.len()).rev() {
        if let Err(error) = shrink(pools, room, index, book) {
            not_all(room, error);
            if let Err(error) = settle(pools, room) {
                return not_all(room, error);
            }
        }
    }
    room.grown.retain(|granted| !granted.is_undone());
}

/// Gives back one growth of the pools, part by part.
fn shrink(pools: &dyn Pools, room: &mut Room, index: usize, book: Book<'_>) -> Result<(), String> {
    while let Some(mut granted) = room.grown.get(index).filter(|granted| !granted.is_undone()).cloned() {
        let shrunk = pools.shrink(&mut granted, &mut |intent| {
            room.open = Some(intent.clone());
            book(room)
        });
        closed(room, shrunk)?;
        room.grown[index] = granted;
    }
    Ok(())
}

/// Determines the result of a change that was begun for a room.
///
/// # Errors
/// One line: the pool cannot be read, and the change stays open.
pub fn settle(pools: &dyn Pools, room: &mut Room) -> Result<(), String> {
    let Some(intent) = room.open.clone() else { return Ok(()) };
    match pools.settle(&intent, &mut room.grown)? {
        Settled::Undone => {}
        Settled::Done(pages) => tracing::info!("a change of the pool for {} was made: {pages} pages", room.domain),
        Settled::Unclear { before, after, now } => tracing::warn!(
            "another process changed the pool of {} pages while it was changed for {}: it had {before}, {after} were \
             asked for, it has {now}; pages that may be too many are left there, see `wideleaf pool list`",
            intent.size(),
            room.domain
        ),
    }
    room.open = None;
    Ok(())
}

/// Free pages are available to any process, except those that are promised to a domain. A promise that names no node
/// may be kept on any, so it counts on each.
fn missing(pools: &dyn Pools, request: &PoolRequest, promised: &[PoolRequest]) -> u64 {
    let may_be_there = |of: &PoolRequest| of.may_be_on(request.on_nodes());
    let rival = promised.iter().filter(|of| of.page_bytes == request.page_bytes && may_be_there(of));
    let promised = rival.fold(0, |sum: u64, of| sum.saturating_add(of.pages));
    request.pages.saturating_add(promised).saturating_sub(pools.available(request)).min(request.pages)
}

/// Takes the memory that a domain needs in ordinary large pages out of `spare`, where that is known.
///
/// # Errors
/// Where there is less: the domain could have all of the host's memory and still miss its guarantee.
pub fn take_ordinary(ordinary: Option<OrdinaryMemory>, spare: &mut Option<Bytes>) -> Result<(), String> {
    let (Some(OrdinaryMemory { bytes, large_bytes }), Some(spare)) = (ordinary, spare) else { return Ok(()) };
    let (all, large) = (Bytes::new(bytes), Bytes::new(large_bytes));
    if large > *spare {
        return Err(format!(
            "{large} of its {all} of ordinary memory have to be in large pages, and {spare} are above host.low_free: \
             free memory, set host.low_free lower, or give the domain less memory or another guarantee"
        ));
    }
    *spare = spare.saturating_sub(large);
    Ok(())
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

impl Room {
    /// A room without pages yet.
    pub fn new(uuid: String, domain: String, wanted: Vec<PoolRequest>, made_at_s: u64) -> Room {
        Room { uuid, domain, wanted, grown: Vec::new(), open: None, process: None, has_started: false, made_at_s }
    }

    /// Whether it was made for that guest. Libvirt decides which process is the domain; the guest's own claims
    /// do not count.
    pub fn belongs_to(&self, found: &Found) -> bool {
        match self.process {
            Some(process) => process == found.process,
            None => found.domain.as_ref() == Some(&self.domain),
        }
    }

    /// Records that its domain runs with all of its memory.
    pub fn start(&mut self, process: ProcessId) {
        (self.process, self.has_started) = (Some(process), true);
    }

    /// Records a process that is its domain and may still be taking its pages: they stay promised to it until libvirt
    /// reports the start, or for [`UNUSED_MAX`] where that report does not come.
    pub fn see(&mut self, process: ProcessId, now_s: u64) {
        self.process = Some(process);
        self.has_started |= self.has_had_time(now_s);
    }

    /// Whether it is unneeded while its domain does not run: the domain did run, or has had the time to come.
    pub fn is_abandoned(&self, now_s: u64) -> bool {
        self.has_started || self.process.is_some() || self.has_had_time(now_s)
    }

    fn has_had_time(&self, now_s: u64) -> bool {
        now_s.saturating_sub(self.made_at_s) > UNUSED_MAX.as_secs()
    }
}

/// Pools that exist only in tests, and can run out.
#[derive(Debug, Default)]
pub struct FakePools(parking_lot::Mutex<FakePool>);

/// The one pool of [`FakePools`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FakePool {
    /// Free pages of the pool.
    pub free: u64,
    /// Pages that it can still grow by.
    pub growth_left: u64,
}

impl FakePools {
    /// Pools with that one.
    pub fn new(pool: FakePool) -> FakePools {
        FakePools(pool.into())
    }

    /// Present state of the pool.
    pub fn now(&self) -> FakePool {
        *self.pool()
    }

    /// Sets the free pages, as if another process took or left some.
    pub fn set_free(&self, free: u64) {
        self.pool().free = free;
    }

    fn pool(&self) -> parking_lot::MutexGuard<'_, FakePool> {
        self.0.lock()
    }
}

/// Size that the pool of [`FakePools`] would have after all of its growth: its present size is that less
/// the remaining growth.
const FAKE_PAGES_MAX: u64 = 1 << 32;
const FAKE_BOOT: &str = "of a test";

impl Pools for std::sync::Arc<FakePools> {
    /// Acts as a kernel that knows only when it has tried.
    fn grow(&self, request: &PoolRequest, on_shortage: OnShortage, note: Note<'_>) -> Result<Granted, Refusal> {
        let most = if on_shortage == OnShortage::TakeFewer { self.now().growth_left } else { request.pages };
        let request = PoolRequest { pages: request.pages.min(most), ..request.clone() };
        if request.pages == 0 {
            return Err(Refusal::AsBefore("0 pages can be made".to_owned()));
        }
        let before = FAKE_PAGES_MAX - self.now().growth_left;
        let after = before + request.pages;
        let intent = Intent::new(PageSize::Huge2M, None, before, after, FAKE_BOOT);
        note(&intent).map_err(Refusal::AsBefore)?;
        let FakePool { growth_left, free } = self.now();
        let short = || Refusal::AsBefore(format!("{} pages are missing, {growth_left} can be made", request.pages));
        let growth_left = growth_left.checked_sub(request.pages).ok_or_else(short)?;
        *self.pool() = FakePool { growth_left, free: free + request.pages };
        let mut granted = Vec::new();
        intent.settle(after, &[], FAKE_BOOT, &mut granted);
        granted.pop().ok_or_else(|| Refusal::AsBefore("nothing was asked for".to_owned()))
    }

    fn shrink(&self, granted: &mut Granted, note: Note<'_>) -> Result<(), Refusal> {
        let FakePool { growth_left, free } = self.now();
        let in_use = || Refusal::AsBefore("they are in use".to_owned());
        let free = free.checked_sub(granted.pages()).ok_or_else(in_use)?;
        let [before, after] = [growth_left, growth_left + granted.pages()].map(|left| FAKE_PAGES_MAX - left);
        let intent = Intent::new(PageSize::Huge2M, None, before, after, FAKE_BOOT);
        note(&intent).map_err(Refusal::AsBefore)?;
        (self.pool().growth_left, self.pool().free) = (FAKE_PAGES_MAX - after, free);
        let mut left = vec![granted.clone()];
        intent.settle(after, &[], FAKE_BOOT, &mut left);
        *granted = left.remove(0);
        Ok(())
    }

    fn settle(&self, intent: &Intent, granted: &mut Vec<Granted>) -> Result<Settled, String> {
        Ok(intent.settle(FAKE_PAGES_MAX - self.now().growth_left, &[], FAKE_BOOT, granted))
    }

    fn available(&self, _: &PoolRequest) -> u64 {
        self.pool().free
    }

    fn status(&self) -> Vec<PoolStatus> {
        let FakePool { free, .. } = self.now();
        let size = PageSize::Huge2M;
        vec![PoolStatus { size, total: free, free, reserved: 0, surplus: 0, overcommit: 0, nodes: Vec::new() }]
    }

    /// One node with a free block for each page that the pool can grow by.
    fn room(&self) -> Vec<NodeMemory> {
        let whole_blocks = self.now().growth_left;
        let free = Bytes::new(whole_blocks * PageSize::Huge2M.bytes().get());
        vec![NodeMemory { free, whole_blocks, ..NodeMemory::default() }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use wideleaf_policies::units::mib;

    fn pages(pages: u64) -> PoolRequest {
        PoolRequest { page_bytes: 2 << 20, pages, node: None, nodes: Vec::new() }
    }

    fn room(wanted: u64, has_started: bool) -> Room {
        Room { has_started, ..Room::new("u".into(), "web".into(), vec![pages(wanted)], 1_000) }
    }

    fn pools(free: u64, growth_left: u64) -> Arc<FakePools> {
        Arc::new(FakePools::new(FakePool { free, growth_left }))
    }

    /// Growth of the pools for that request.
    fn make(
        pools: &dyn Pools,
        wanted: &[PoolRequest],
        others: &[Room],
        spare: Option<Bytes>,
    ) -> Result<Vec<Granted>, String> {
        let mut room = Room { wanted: wanted.to_vec(), ..room(0, false) };
        let filled = fill(pools, &mut room, others, spare, &mut |_| Ok(()));
        assert!(filled.is_ok() || room.grown.is_empty());
        filled.map(|()| room.grown)
    }

    #[test]
    fn a_room_is_made_whole_or_not_at_all() {
        let pools = pools(0, 10);
        assert_eq!(make(&pools, &[pages(4), pages(7)], &[], None), Err("7 pages are missing, 6 can be made".into()));
        assert_eq!(pools.now(), FakePool { free: 0, growth_left: 10 });
        let mut room = room(10, false);
        fill(&pools, &mut room, &[], None, &mut |_| Ok(())).expect("there are ten");
        assert_eq!(pools.now(), FakePool { free: 10, growth_left: 0 });
        empty(&pools, &mut room, &mut |_| Ok(()));
        assert_eq!((pools.now(), room.grown.len()), (FakePool { free: 0, growth_left: 10 }, 0));
    }

    #[test]
    fn without_a_saved_note_nothing_is_changed() {
        let (pools, mut room) = (pools(0, 10), room(4, false));
        let mut full = |_: &Room| Err("the disk is full".to_owned());
        assert_eq!(fill(&pools, &mut room, &[], None, &mut full), Err("the disk is full".into()));
        assert_eq!((pools.now().growth_left, &room.grown, &room.open), (10, &Vec::new(), &None));
        fill(&pools, &mut room, &[], None, &mut |_| Ok(())).expect("there are ten");
        empty(&pools, &mut room, &mut full);
        assert_eq!((pools.now().growth_left, room.grown.len(), &room.open), (6, 1, &None));
    }

    #[test]
    fn pages_that_another_process_adds_while_a_change_fails_are_not_counted_as_growth() {
        let (pools, mut room) = (pools(0, 10), room(6, false));
        let others = || {
            let mut pool = pools.pool();
            (pool.growth_left, pool.free) = (pool.growth_left - 3, pool.free + 3);
        };
        let mut unnoted = |_: &Room| {
            others();
            Err("the disk is full".to_owned())
        };
        assert_eq!(fill(&pools, &mut room, &[], None, &mut unnoted), Err("the disk is full".into()));
        assert_eq!((pools.now(), &room.grown, &room.open), (FakePool { free: 3, growth_left: 7 }, &Vec::new(), &None));
        // By the time that the kernel tries, other processes have taken three of the seven that it could make.
        let mut late = |_: &Room| {
            others();
            Ok(())
        };
        room.wanted = vec![pages(10)];
        let error = fill(&pools, &mut room, &[], None, &mut late).expect_err("four are left");
        assert_eq!(error, "7 pages are missing, 4 can be made");
        assert_eq!((pools.now(), &room.grown, &room.open), (FakePool { free: 6, growth_left: 4 }, &Vec::new(), &None));
    }

    #[test]
    fn a_room_belongs_to_the_process_that_libvirt_names_for_its_domain() {
        let guests = crate::guests::fake::FakeGuests::default();
        let process = guests.start(10, "web");
        let mut room = room(1, false);
        assert!(!room.belongs_to(&guests.guest(10).found), "any process can have that name");
        let process_2 = guests.start_domain(11, "web");
        assert!(room.belongs_to(&guests.guest(11).found));
        room.start(process);
        assert!(room.belongs_to(&guests.guest(10).found) && !room.belongs_to(&guests.guest(11).found));
        assert_ne!(process, process_2);
    }

    #[test]
    fn free_pages_are_used_unless_they_are_kept_for_another_domain() {
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
    fn promises_on_other_nodes_do_not_count() {
        let on = |nodes: &[u32]| PoolRequest { nodes: nodes.to_vec(), ..pages(6) };
        let grown =
            |wanted: &PoolRequest, other: &PoolRequest| missing(&pools(6, 0), wanted, std::slice::from_ref(other));
        assert_eq!(grown(&on(&[0, 1]), &PoolRequest { node: Some(2), ..pages(6) }), 0);
        assert_eq!(grown(&on(&[0, 1]), &PoolRequest { node: Some(1), ..pages(6) }), 6);
        assert_eq!(grown(&on(&[0, 1]), &on(&[1, 2])), 6);
        assert_eq!(grown(&on(&[0, 1]), &pages(6)), 6, "it may take them anywhere");
    }

    /// Number of pages that each node can still make.
    struct ByNode(parking_lot::Mutex<std::collections::BTreeMap<u32, u64>>);

    impl Pools for ByNode {
        fn grow(&self, request: &PoolRequest, on_shortage: OnShortage, note: Note<'_>) -> Result<Granted, Refusal> {
            let mut nodes = self.0.lock();
            let left = nodes.get_mut(&request.node.expect("a node is named")).expect("it exists");
            let takes_fewer = on_shortage == OnShortage::TakeFewer;
            let taken = if takes_fewer { request.pages.min(*left) } else { request.pages };
            if taken == 0 || taken > *left {
                return Err(Refusal::AsBefore(format!("{taken} pages are missing, {left} can be made")));
            }
            let intent = Intent::new(PageSize::Huge2M, request.node, 0, taken, FAKE_BOOT);
            note(&intent).map_err(Refusal::AsBefore)?;
            *left -= taken;
            let mut granted = Vec::new();
            intent.settle(taken, &[], FAKE_BOOT, &mut granted);
            Ok(granted.remove(0))
        }

        fn shrink(&self, granted: &mut Granted, _: Note<'_>) -> Result<(), Refusal> {
            Err(Refusal::AsBefore(format!("{} pages stay: the test looks at them", granted.pages())))
        }

        fn settle(&self, _: &Intent, _: &mut Vec<Granted>) -> Result<Settled, String> {
            Ok(Settled::Undone)
        }

        fn available(&self, _: &PoolRequest) -> u64 {
            0
        }

        fn status(&self) -> Vec<PoolStatus> {
            Vec::new()
        }

        fn room(&self) -> Vec<NodeMemory> {
            Vec::new()
        }
    }

    #[test]
    fn a_domain_that_several_nodes_bind_gets_an_even_share_of_each_and_the_rest_where_there_is_some() {
        // Number of pages that nodes 0, 1 and 2 have left, after a domain on nodes 0 and 1 got its pages.
        let left = |of: [u64; 3], wanted| {
            let nodes = ByNode(parking_lot::Mutex::new((0..).zip(of).collect()));
            let wanted = PoolRequest { nodes: vec![0, 1], ..pages(wanted) };
            let mut room = Room::new("u".into(), "web".into(), vec![wanted], 1_000);
            let filled = fill(&nodes, &mut room, &[], None, &mut |_| Ok(()));
            let left: Vec<u64> = nodes.0.lock().values().copied().collect();
            filled.map(|()| left)
        };
        assert_eq!(left([9, 9, 9], 7), Ok(vec![5, 6, 9]));
        assert_eq!(left([2, 9, 9], 8), Ok(vec![0, 3, 9]));
        assert_eq!(left([9, 0, 9], 8), Ok(vec![1, 0, 9]));
        let why = left([2, 3, 9], 8).expect_err("three are missing");
        assert!(why.starts_with("3 of 8 pages are missing on its nodes (0, 1): 3 pages are missing, 0"), "{why}");
    }

    #[test]
    fn a_domain_does_not_get_the_hosts_reserve() {
        let room = |wanted: &[PoolRequest]| make(&pools(0, 100), wanted, &[], Some(mib(20)));
        assert_eq!(room(&[pages(10)]).expect("twenty mebibytes").len(), 1);
        let error = room(&[pages(1), pages(10)]).expect_err("two mebibytes too many");
        assert!(error.starts_with("20 MiB are needed and 18 MiB are above host.low_free"), "{error}");
    }

    #[test]
    fn a_size_without_a_pool_is_refused() {
        let request = PoolRequest { page_bytes: 64 << 10, pages: 1, node: None, nodes: Vec::new() };
        let error = HugetlbPools::of_this_machine()
            .grow(&request, OnShortage::Refuse, &mut |_| Ok(()))
            .expect_err("no such pool");
        assert!(error.to_string().contains("65536 bytes: only of 2 MiB and 1 GiB"), "{error}");
    }

    #[test]
    fn a_room_is_abandoned_when_its_domain_does_not_come_or_is_gone() {
        let is_abandoned = |has_started, now_s| room(1, has_started).is_abandoned(now_s);
        assert_eq!([1_000, 1_120, 1_121].map(|now_s| is_abandoned(false, now_s)), [false, false, true]);
        assert!(is_abandoned(true, 1_000));
    }

    #[test]
    fn pages_of_a_domain_that_libvirt_never_reports_are_promised_for_two_minutes() {
        let process = crate::guests::fake::FakeGuests::default().start(10, "web");
        let mut room = room(1, false);
        room.see(process, 1_120);
        assert_eq!((room.process, room.has_started, room.is_abandoned(1_120)), (Some(process), false, true));
        room.see(process, 1_121);
        assert!(room.has_started);
    }
}
