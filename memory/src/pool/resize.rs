//! Makes a pool larger and smaller, until that is undone or the machine boots.
//!
//! ```text
//!   Request ─▶ read (consistent numbers, under the lock) ─▶ Plan ─▶ compact, if whole blocks are short
//!                                                                           │
//!   Granted ◀─ read back: new pages by node ◀──────────── write nr_hugepages
//!      │                     └ less than asked: give back, NotEnoughMemory with the numbers
//!      ▼ plain data, to be kept in a file
//!   give_back ─▶ as many pages fewer. Pages in use by then leave the pool when they are unmapped: the kernel takes no
//!                page from a process, it makes surplus of it
//! ```
//!
//! For crash safety, a caller notes an [`Intent`] before each write and settles it afterwards.
//!
//! `nr_hugepages` reads as all pages, but a write to it sets the number of pages without surplus ones. So growing
//! first makes surplus pages in use persistent, then allocates new ones. The number to write includes both, and
//! giving back undoes both.

use std::path::PathBuf;

use wideleaf_policies::PageSize;

use super::{Granted, HugetlbPools, Intent, NodeMemory, NodePages, NotEnoughMemory, PoolError, PoolStatus, Settled};

/// Growth of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Page size of the pool.
    pub size: PageSize,
    /// Number of unused pages to add.
    pub pages: u64,
    /// NUMA node to grow; `None`: wherever the kernel finds memory.
    pub node: Option<u32>,
    /// What to do if there is memory for fewer pages.
    pub on_shortage: OnShortage,
}

/// Reaction to a shortage of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnShortage {
    /// Give back the new pages, and report why.
    Refuse,
    /// Take the pages that free memory is enough for. Nothing is reclaimed for it.
    TakeFewer,
}

/// Shrinking of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// Page size of the pool.
    pub size: PageSize,
    /// Number of unused pages to release; `None`: all of them.
    pub pages: Option<u64>,
    /// NUMA node of the pages; `None`: any.
    pub node: Option<u32>,
}

/// Planned write and its reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Number of pages to add or release; with [`OnShortage::TakeFewer`] a maximum.
    pub pages: u64,
    /// Path of the pool's file.
    pub file: PathBuf,
    /// Persistent pages now.
    pub before: u64,
    /// Number to be written.
    pub after: u64,
    /// Path of the file that starts compaction, if that comes first.
    pub compact: Option<PathBuf>,
    /// Memory available for new pages; empty if none are made or nothing is known.
    pub room: Vec<NodeMemory>,
}

/// Called with the intent before a pool changes. If it fails, the pool stays as it is.
pub type Note<'a> = &'a mut dyn FnMut(&Intent) -> Result<(), String>;

/// Result of giving pages back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Returned {
    /// Number of pages that are ordinary memory again.
    pub now: u64,
    /// Number of pages that are in use by now: they become ordinary memory once they are unmapped.
    pub later: u64,
}

/// Numbers of the part of a pool that a request is about.
#[derive(Clone, Copy)]
struct Part {
    total: u64,
    surplus: u64,
    /// Persistent pages that are not in use and not promised.
    unused: u64,
}

impl Part {
    fn persistent(self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }
}

/// A pool, or its part on one node. Promises are not made by node: each node is assumed to hold all of them.
fn part(pool: &PoolStatus, node: Option<u32>) -> Result<Part, PoolError> {
    let has = pool.in_use().saturating_add(pool.reserved);
    let unused = pool.persistent().saturating_sub(has);
    let Some(node) = node else { return Ok(Part { total: pool.total, surplus: pool.surplus, unused }) };
    let known = || pool.nodes.iter().map(|node| node.node).collect();
    let on_node = pool.nodes.iter().find(|known| known.node == node);
    let on_node = on_node.ok_or_else(|| PoolError::NoNode { size: pool.size, node, known: known() })?;
    let in_use = on_node.total.saturating_sub(on_node.free);
    let unused = unused.min(on_node.persistent().saturating_sub(in_use));
    Ok(Part { total: on_node.total, surplus: on_node.surplus, unused })
}

impl HugetlbPools {
    /// What [`HugetlbPools::reserve`] would do. Writes nothing.
    ///
    /// # Errors
    /// Those of [`HugetlbPools::reserve`], as far as they can be found without trying.
    pub fn plan_reserve(&self, request: &Request) -> Result<Plan, PoolError> {
        self.growth(&self.consistent_status(request.size)?, request)
    }

    /// Adds unused pages to a pool. Compacts memory first if whole blocks are short.
    ///
    /// # Errors
    /// [`PoolError::NotEnoughMemory`] if there is not that much memory, with the pool unchanged; [`PoolError::Write`]
    /// without root; [`PoolError::Changed`] if another program shrinks the pool at the same time.
    pub fn reserve(&self, request: &Request) -> Result<Granted, PoolError> {
        self.reserve_noting(request, &mut |_| Ok(()))
    }

    /// Like [`HugetlbPools::reserve`], with a `note` before the pool changes. After an error, except one for
    /// which [`PoolError::leaves_pool_as_it_was`] holds, the change may still have been made:
    /// [`HugetlbPools::settle`] finds out.
    ///
    /// # Errors
    /// [`PoolError::NotBegun`] if the note failed, and those of [`HugetlbPools::reserve`].
    pub fn reserve_noting(&self, request: &Request, note: Note<'_>) -> Result<Granted, PoolError> {
        let _lock = self.lock(request.size)?;
        let before = self.consistent_status(request.size)?;
        let plan = self.growth(&before, request)?;
        if let Some(file) = &plan.compact {
            self.write(file, 1)?;
        }
        let boot = self.boot()?;
        let nodes = persistent_by_node(&before);
        let surplus = part(&before, request.node)?.surplus;
        let intent = Intent::new(request.size, request.node, plan.before, plan.after, &boot);
        note(&intent.with_nodes(nodes, surplus)).map_err(PoolError::NotBegun)?;
        self.write(&plan.file, plan.after)?;
        let mut granted = match self.read_back(&before, request, &plan, boot) {
            Ok(granted) => granted,
            Err(error) => return Err(self.undone(&plan, error)),
        };
        let least = if request.on_shortage == OnShortage::Refuse { request.pages } else { request.pages.min(1) };
        if granted.pages >= least {
            return Ok(granted);
        }
        let made = Some(granted.pages);
        self.give_back_locked(&mut granted)?;
        Err(no_room(request, made, plan.room))
    }

    /// What [`HugetlbPools::release_beside`] would do with `kept` kept pages. Writes nothing.
    ///
    /// # Errors
    /// The same as for [`HugetlbPools::release`].
    pub fn plan_release(&self, release: &Release, kept: u64) -> Result<Plan, PoolError> {
        self.shrinking(self.consistent_status(release.size)?, release, kept)
    }

    /// Makes a pool smaller, by pages that are neither in use nor promised.
    ///
    /// # Errors
    /// [`PoolError::InUse`] if there are fewer; [`PoolError::Write`] without root.
    pub fn release(&self, release: &Release) -> Result<Returned, PoolError> {
        self.release_beside(release, || Ok(0))
    }

    /// Like [`HugetlbPools::release`], but leaves `kept` pages for domains that have not started yet. `kept` is
    /// called under the lock, when no other process can change the pool.
    ///
    /// # Errors
    /// [`PoolError::NotBegun`] if `kept` fails, and those of [`HugetlbPools::release`].
    pub fn release_beside(
        &self,
        release: &Release,
        kept: impl FnOnce() -> Result<u64, String>,
    ) -> Result<Returned, PoolError> {
        let _lock = self.lock(release.size)?;
        let kept = kept().map_err(PoolError::NotBegun)?;
        let plan = self.shrinking(self.consistent_status(release.size)?, release, kept)?;
        self.shrink(release.size, release.node, plan.before - plan.after, &mut |_| Ok(()))
    }

    /// Undoes a [`HugetlbPools::reserve`] of this boot; one of an earlier boot is undone already. Returned pages are
    /// taken out of `granted`, so that the rest can be retried after an error.
    ///
    /// # Errors
    /// [`PoolError`] if a file cannot be read or written.
    pub fn give_back(&self, granted: &mut Granted) -> Result<Returned, PoolError> {
        let mut sum = Returned::default();
        while !granted.is_undone() {
            let returned = self.give_back_part(granted, &mut |_| Ok(()))?;
            sum.now = sum.now.saturating_add(returned.now);
            sum.later = sum.later.saturating_add(returned.later);
        }
        Ok(sum)
    }

    /// Undoes one part of it, by one write, with a `note` before.
    ///
    /// # Errors
    /// [`PoolError::NotBegun`] if the note failed; [`PoolError`] if a file cannot be read or written. The write may
    /// still have been made: [`HugetlbPools::settle`] finds out, except after [`PoolError::leaves_pool_as_it_was`].
    pub fn give_back_part(&self, granted: &mut Granted, note: Note<'_>) -> Result<Returned, PoolError> {
        if granted.boot != self.boot()? {
            granted.added.clear();
        }
        let Some(NodePages { node, pages }) = granted.added.last().copied() else { return Ok(Returned::default()) };
        let _lock = self.lock(granted.size)?;
        let returned = self.shrink(granted.size, node, pages, note)?;
        granted.added.pop();
        Ok(returned)
    }

    /// Finds out the result of an `intent`: added pages are added to `granted`, and returned ones are taken
    /// out of it.
    ///
    /// # Errors
    /// [`PoolError`] if the pool cannot be read.
    pub fn settle(&self, intent: &Intent, granted: &mut Vec<Granted>) -> Result<Settled, PoolError> {
        // A pool of that boot may not exist in this one.
        let boot = self.boot()?;
        if !intent.is_of(&boot) {
            return Ok(Settled::Undone);
        }
        let _lock = self.lock(intent.size())?;
        let pool = self.consistent_status(intent.size())?;
        let now = part(&pool, intent.node())?.persistent();
        Ok(intent.settle(now, &persistent_by_node(&pool), &boot, granted))
    }

    fn give_back_locked(&self, granted: &mut Granted) -> Result<Returned, PoolError> {
        let mut sum = Returned::default();
        while let Some(NodePages { node, pages }) = granted.added.last().copied() {
            let returned = self.shrink(granted.size, node, pages, &mut |_| Ok(()))?;
            granted.added.pop();
            sum.now = sum.now.saturating_add(returned.now);
            sum.later = sum.later.saturating_add(returned.later);
        }
        Ok(sum)
    }

    fn growth(&self, pool: &PoolStatus, request: &Request) -> Result<Plan, PoolError> {
        let part = part(pool, request.node)?;
        let room = self.room(request.node)?;
        let sum = |pages: fn(&NodeMemory, PageSize) -> Option<u64>| {
            room.iter().try_fold(0u64, |sum, node| Some(sum.saturating_add(pages(node, request.size)?)))
        };
        let is_known = !room.is_empty();
        let pages = match request.on_shortage {
            OnShortage::TakeFewer if is_known => {
                request.pages.min(sum(|node, size| Some(node.pages_of_free_memory(size))).unwrap_or(0))
            }
            _ => request.pages,
        };
        let is_too_much = sum(NodeMemory::pages_max).is_some_and(|most| is_known && pages > most);
        if is_too_much || (pages == 0 && request.pages > 0) {
            return Err(no_room(request, None, room));
        }
        let whole = sum(|node, _| Some(node.whole_blocks)).unwrap_or(0);
        // A giant page is not found but made: the kernel empties a gibibyte for it, whatever compaction did before.
        let is_compacted = request.size == PageSize::Huge2M && is_known && whole < pages;
        let grows_by = if pages == 0 { 0 } else { pages.saturating_add(part.surplus) };
        Ok(Plan {
            pages,
            file: self.folder(request.size, request.node).join("nr_hugepages"),
            before: part.persistent(),
            after: part.persistent().saturating_add(grows_by),
            // A kernel built without compaction has no such file.
            compact: is_compacted.then(|| self.compaction(request.node)).filter(|file| file.exists()),
            room,
        })
    }

    fn shrinking(&self, pool: PoolStatus, release: &Release, kept: u64) -> Result<Plan, PoolError> {
        let part = part(&pool, release.node)?;
        let kept = kept.min(part.unused);
        let unused = part.unused - kept;
        let pages = release.pages.unwrap_or(unused);
        if pages > unused {
            return Err(PoolError::InUse { asked: pages, unused, kept, pool: Box::new(pool) });
        }
        Ok(Plan {
            pages,
            file: self.folder(release.size, release.node).join("nr_hugepages"),
            before: part.persistent(),
            after: part.persistent() - pages,
            compact: None,
            room: Vec::new(),
        })
    }

    /// Takes `pages` pages out of a pool, and returns the result. The kernel keeps pages in use or promised.
    fn shrink(&self, size: PageSize, node: Option<u32>, pages: u64, note: Note<'_>) -> Result<Returned, PoolError> {
        let before = part(&self.consistent_status(size)?, node)?;
        let file = self.folder(size, node).join("nr_hugepages");
        let to_stay = before.persistent().saturating_sub(pages);
        note(&Intent::new(size, node, before.persistent(), to_stay, &self.boot()?)).map_err(PoolError::NotBegun)?;
        self.write(&file, to_stay)?;
        let after = part(&self.consistent_status(size)?, node)?;
        Ok(Returned {
            now: before.total.saturating_sub(after.total).min(pages),
            later: after.surplus.saturating_sub(before.surplus).min(pages),
        })
    }

    /// Pages that a request got.
    fn read_back(
        &self,
        before: &PoolStatus,
        request: &Request,
        plan: &Plan,
        boot: String,
    ) -> Result<Granted, PoolError> {
        let after = self.consistent_status(request.size)?;
        let (was, is) = (part(before, request.node)?, part(&after, request.node)?);
        let changed = || PoolError::Changed {
            path: plan.file.clone(),
            before: plan.before,
            wanted: plan.after,
            after: is.persistent(),
        };
        let added = is.persistent().checked_sub(was.persistent()).ok_or_else(changed)?;
        let added = added.min(plan.after - plan.before); // any more are another program's
        let pages = added.saturating_sub(was.surplus).min(request.pages);
        Ok(Granted { size: request.size, pages, added: by_node(before, &after, request.node, added), boot })
    }

    /// Restores the earlier number if the new pages cannot be determined. Returns the reason.
    fn undone(&self, plan: &Plan, reason: PoolError) -> PoolError {
        // A pool that another program shrank below its former size belongs to that program.
        if !matches!(reason, PoolError::Changed { .. })
            && let Err(error) = self.write(&plan.file, plan.before)
        {
            tracing::error!("cannot undo a change of {}: {error}", plan.file.display());
        }
        reason
    }

    fn compaction(&self, node: Option<u32>) -> PathBuf {
        match node {
            None => self.root.join("proc/sys/vm/compact_memory"),
            Some(node) => self.node_folder(node).join("compact"),
        }
    }

    /// Identifier of this boot; empty if the kernel does not report it. A failure is not taken for another boot:
    /// pages of this one would then never go back.
    pub(super) fn boot(&self) -> Result<String, PoolError> {
        let path = self.root.join(BOOT_ID);
        match self.files.read(&path) {
            Ok(text) => Ok(text.trim().to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
            Err(source) => Err(PoolError::File { path, source }),
        }
    }
}

/// The kernel's name for one boot (random(4)).
const BOOT_ID: &str = "proc/sys/kernel/random/boot_id";

/// Persistent pages, node by node.
fn persistent_by_node(pool: &PoolStatus) -> Vec<NodePages> {
    pool.nodes.iter().map(|node| NodePages { node: Some(node.node), pages: node.persistent() }).collect()
}

/// The nodes of the `added` pages; one sum if the nodes do not add up to it.
fn by_node(before: &PoolStatus, after: &PoolStatus, node: Option<u32>, added: u64) -> Vec<NodePages> {
    let was = |node: u32| before.nodes.iter().find(|was| was.node == node).map_or(0, |was| was.persistent());
    let nodes = after
        .nodes
        .iter()
        .filter(|_| node.is_none())
        .map(|is| NodePages { node: Some(is.node), pages: is.persistent().saturating_sub(was(is.node)) });
    let nodes: Vec<NodePages> = nodes.filter(|node| node.pages > 0).collect();
    let is_sum = nodes.iter().try_fold(0u64, |sum, node| sum.checked_add(node.pages)) == Some(added);
    if is_sum { nodes } else { vec![NodePages { node, pages: added }] }
}

fn no_room(request: &Request, made: Option<u64>, room: Vec<NodeMemory>) -> PoolError {
    PoolError::NotEnoughMemory(Box::new(NotEnoughMemory { size: request.size, needed: request.pages, made, room }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::fake_kernel::{FakeKernel, FakeNode, State};

    fn of_nodes(nodes: &[FakeNode]) -> State {
        State { nodes: nodes.to_vec(), ..State::default() }
    }

    /// Two empty nodes that can make `whole` pages each.
    fn two_nodes(whole: [u64; 2]) -> State {
        of_nodes(&whole.map(|whole| FakeNode { whole, ..FakeNode::default() }))
    }

    fn request(pages: u64, node: Option<u32>) -> Request {
        Request { size: PageSize::Huge2M, pages, node, on_shortage: OnShortage::Refuse }
    }

    fn release(pages: Option<u64>, node: Option<u32>) -> Release {
        Release { size: PageSize::Huge2M, pages, node }
    }

    fn totals(state: &State) -> Vec<u64> {
        state.nodes.iter().map(|node| node.total).collect()
    }

    const GLOBAL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    const NODE_1: &str = "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";

    #[test]
    fn pages_from_anywhere_go_back_to_the_nodes_they_came_from() {
        let before = two_nodes([10, 10]);
        let kernel = FakeKernel::new(before.clone());
        let mut granted = kernel.pools().reserve(&request(6, None)).expect("there are 20");
        assert_eq!((granted.pages(), totals(&kernel.state())), (6, vec![3, 3]));
        let on = |node| NodePages { node: Some(node), pages: 3 };
        assert_eq!(granted.added(), [on(0), on(1)]);
        let returned = kernel.pools().give_back(&mut granted).expect("they are free");
        assert_eq!((returned, kernel.state()), (Returned { now: 6, later: 0 }, before));
        // A second attempt does nothing.
        assert_eq!(kernel.pools().give_back(&mut granted).expect("nothing"), Returned::default());
    }

    #[test]
    fn pages_of_one_node_come_from_that_node_and_nothing_is_written_to_others() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        let mut granted = kernel.pools().reserve(&request(6, Some(1))).expect("there are 10");
        assert_eq!((totals(&kernel.state()), kernel.written()), (vec![0, 6], vec![(NODE_1.into(), "6".into())]));
        kernel.pools().give_back(&mut granted).expect("they are free");
        assert_eq!(totals(&kernel.state()), [0, 0]);
    }

    #[test]
    fn a_missing_node_is_refused_and_the_existing_ones_are_named() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        let error = kernel.pools().reserve(&request(1, Some(7))).expect_err("no node 7").to_string();
        assert_eq!(error, "cannot use a hugetlb pool of 2m pages on node 7: it has none; these have: 0, 1");
    }

    #[test]
    fn a_request_beyond_all_memory_is_refused_before_any_write() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        let error = kernel.pools().reserve(&request(11, Some(0))).expect_err("10 blocks and no cache").to_string();
        assert!(
            error.starts_with(
                "cannot make 11 pages of 2m (22 MiB): there is not that much memory: node 0 has 20 MiB free"
            ),
            "{error}"
        );
        assert!(error.contains("10 whole blocks of 2 MiB now, compaction may make 0 more"), "{error}");
        assert_eq!(kernel.written(), []);
    }

    #[test]
    fn too_few_pages_are_given_back_and_the_reason_has_numbers() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        kernel.change(|state| state.nodes[1].compactable = 5);
        // 25 blocks with compaction, which is the first write; then another program takes 12 of them.
        kernel.after_next_write(|state| state.nodes[1].whole -= 12);
        let error = kernel.pools().reserve(&request(22, None)).expect_err("13 are left").to_string();
        assert!(
            error.contains("cannot make 22 pages of 2m (44 MiB): only 13 could be made, and were given back"),
            "{error}"
        );
        assert!(error.contains("node 0 has 20 MiB free") && error.contains("compaction may make 5 more"), "{error}");
        assert_eq!(totals(&kernel.state()), [0, 0]);
    }

    #[test]
    fn taking_fewer_means_at_most_free_memory_and_at_least_one_page() {
        let at_most = |pages| Request { on_shortage: OnShortage::TakeFewer, ..request(pages, None) };
        let kernel = FakeKernel::new(two_nodes([3, 2]));
        assert_eq!(kernel.pools().reserve(&at_most(100)).expect("five").pages(), 5);
        let error = kernel.pools().reserve(&at_most(100)).expect_err("none is left");
        assert!(matches!(error, PoolError::NotEnoughMemory(_)), "{error}");
        assert_eq!(totals(&kernel.state()), [3, 2]);
    }

    #[test]
    fn memory_is_compacted_first_and_only_if_whole_blocks_are_short() {
        let mut state = two_nodes([3, 3]);
        state.nodes[1].compactable = 4;
        let kernel = FakeKernel::new(state);
        kernel.pools().reserve(&request(3, Some(1))).expect("three whole blocks");
        kernel.pools().reserve(&request(4, Some(1))).expect("four more after compaction");
        let [first, second, third] = &kernel.written()[..] else { panic!("{:?}", kernel.written()) };
        assert_eq!((first.0.as_str(), first.1.as_str()), (NODE_1, "3"));
        assert_eq!((second.0.as_str(), second.1.as_str()), ("sys/devices/system/node/node1/compact", "1"));
        assert_eq!((third.0.as_str(), third.1.as_str()), (NODE_1, "7"));
    }

    #[test]
    fn a_plan_shows_the_write_and_writes_nothing() {
        let mut state = two_nodes([3, 3]);
        state.nodes[1].compactable = 4;
        let kernel = FakeKernel::new(state);
        let plan = kernel.pools().plan_reserve(&request(8, None)).expect("ten are there");
        assert_eq!((plan.before, plan.after), (0, 8));
        assert!(plan.file.ends_with(GLOBAL));
        assert!(plan.compact.is_some_and(|file| file.ends_with("proc/sys/vm/compact_memory")));
        let plan = kernel.pools().plan_release(&release(None, None), 0).expect("nothing to release");
        assert_eq!((plan.before, plan.after), (0, 0));
        assert_eq!(kernel.written(), []);
    }

    #[test]
    fn new_pages_come_on_top_of_surplus_ones_in_use_and_go_without_them() {
        // 2 pages are persistent and in use, 3 are surplus and in use.
        let before = of_nodes(&[FakeNode { total: 5, surplus: 3, whole: 10, ..FakeNode::default() }]);
        let kernel = FakeKernel::new(before.clone());
        let mut granted = kernel.pools().reserve(&request(4, None)).expect("there are 10");
        let node = kernel.state().nodes[0];
        assert_eq!((node.total, node.free, node.surplus), (9, 4, 0), "four unused ones");
        assert_eq!((granted.pages(), granted.added()), (4, &[NodePages { node: Some(0), pages: 7 }][..]));
        kernel.pools().give_back(&mut granted).expect("they are free");
        assert_eq!(kernel.state(), before);
    }

    #[test]
    fn pages_taken_in_the_meantime_are_given_back_later() {
        let kernel = FakeKernel::new(two_nodes([10, 0]));
        let mut granted = kernel.pools().reserve(&request(6, None)).expect("there are 10");
        kernel.change(|state| state.nodes[0].free -= 2); // faulted in
        let returned = kernel.pools().give_back(&mut granted).expect("some are free");
        assert_eq!(returned, Returned { now: 4, later: 2 });
        let node = kernel.state().nodes[0];
        assert_eq!((node.total, node.surplus), (2, 2), "no process loses a page, and they go when they are unmapped");
    }

    #[test]
    fn pages_in_use_or_promised_are_not_released() {
        // 10 pages, 4 in use, 3 of the 6 free ones promised.
        let node = FakeNode { total: 10, free: 6, ..FakeNode::default() };
        let kernel = FakeKernel::new(State { reserved: 3, ..of_nodes(&[node]) });
        let error = kernel.pools().release(&release(Some(4), None)).expect_err("three are unused").to_string();
        assert_eq!(error, "cannot release 4 pages of 2m: 3 are unused, of 10 in the pool, 4 in use, 3 promised");
        assert_eq!(kernel.written(), []);
        let returned = kernel.pools().release(&release(None, None)).expect("three");
        assert_eq!((returned, totals(&kernel.state())), (Returned { now: 3, later: 0 }, vec![7]));
    }

    #[test]
    fn surplus_pages_are_not_released() {
        // 6 are persistent, 4 are surplus, 8 are in use: the holders of the 8 may need all the persistent ones.
        let node = FakeNode { total: 10, free: 2, surplus: 4, ..FakeNode::default() };
        let kernel = FakeKernel::new(of_nodes(&[node]));
        assert_eq!(kernel.pools().release(&release(None, None)).expect("none"), Returned::default());
        assert_eq!(kernel.state().nodes[0].surplus, 4);
    }

    #[test]
    fn pages_are_released_on_the_requested_node() {
        let node = |free| FakeNode { total: 5, free, ..FakeNode::default() };
        let kernel = FakeKernel::new(of_nodes(&[node(5), node(2)]));
        assert_eq!(kernel.pools().release(&release(None, Some(1))).expect("two"), Returned { now: 2, later: 0 });
        assert_eq!(totals(&kernel.state()), [5, 3]);
        assert!(kernel.pools().release(&release(Some(1), Some(1))).is_err());
    }

    #[test]
    fn a_pool_that_another_program_shrinks_is_left_to_it() {
        let kernel = FakeKernel::new(of_nodes(&[FakeNode { total: 4, free: 4, whole: 10, ..FakeNode::default() }]));
        kernel.after_next_write(|state| (state.nodes[0].total, state.nodes[0].free) = (1, 1));
        let error = kernel.pools().reserve(&request(2, None)).expect_err("changed").to_string();
        assert!(error.contains("4 pages before, 1 after 6 were asked for; try again"), "{error}");
        assert_eq!((totals(&kernel.state()), kernel.written().len()), (vec![1], 1));
    }

    #[test]
    fn pages_added_by_another_program_are_not_ours() {
        let kernel = FakeKernel::new(of_nodes(&[FakeNode { whole: 10, ..FakeNode::default() }]));
        kernel.after_next_write(|state| (state.nodes[0].total, state.nodes[0].free) = (5, 5));
        let mut granted = kernel.pools().reserve(&request(2, None)).expect("there are 10");
        kernel.pools().give_back(&mut granted).expect("they are free");
        assert_eq!(totals(&kernel.state()), [3]);
    }

    #[test]
    fn numbers_that_cannot_be_read_back_leave_the_pool_as_it_was() {
        let kernel = FakeKernel::new(of_nodes(&[FakeNode { whole: 10, ..FakeNode::default() }]));
        kernel.after_next_write(|state| state.reserved = 99);
        let error = kernel.pools().reserve(&request(2, None)).expect_err("contradiction").to_string();
        assert!(error.ends_with("contradict each other: 99 pages promised, 2 free"), "{error}");
        let last = kernel.written().pop().expect("two writes");
        assert_eq!(last, (GLOBAL.into(), "0".into()));
    }

    #[test]
    fn without_root_one_line_says_so_and_nothing_is_given_back() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        kernel.refuse_writes_to("nr_hugepages");
        let error = kernel.pools().reserve(&request(2, None)).expect_err("refused").to_string();
        assert!(error.starts_with("cannot write ") && error.ends_with("takes root and a writable /sys"), "{error}");
        kernel.refuse_writes_to("nr_overcommit_hugepages");
        assert!(kernel.pools().lease(PageSize::Huge2M, 3).is_err());
        assert_eq!((totals(&kernel.state()), kernel.written()), (vec![0, 0], vec![]));
    }

    #[test]
    fn granted_pages_outlive_their_process_and_not_their_boot() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        let granted = kernel.pools().reserve(&request(4, None)).expect("there are 20");
        let kept = serde_json::to_string(&granted).expect("plain data");
        let mut read: Granted = serde_json::from_str(&kept).expect("as it was written");
        assert_eq!(read, granted);
        kernel.boot_again();
        assert_eq!(kernel.pools().give_back(&mut read).expect("nothing to do"), Returned::default());
        assert_eq!(
            (read.added(), totals(&kernel.state())),
            (&[][..], vec![2, 2]),
            "the owner of these pages is unknown"
        );
    }

    #[test]
    fn pages_that_could_not_be_given_back_are_kept_for_a_retry() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        let mut granted = kernel.pools().reserve(&request(4, None)).expect("there are 20");
        kernel.refuse_writes_to("node0/hugepages/hugepages-2048kB/nr_hugepages");
        kernel.pools().give_back(&mut granted).expect_err("node 0 is refused");
        assert_eq!(granted.added(), [NodePages { node: Some(0), pages: 2 }]);
        kernel.refuse_writes_to("nothing");
        kernel.pools().give_back(&mut granted).expect("now");
        assert_eq!(totals(&kernel.state()), [0, 0]);
    }

    #[test]
    fn a_note_before_a_change_shows_its_result() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        let mut noted = None;
        let mut note = |intent: &Intent| {
            noted = Some(intent.clone());
            Ok(())
        };
        let granted = kernel.pools().reserve_noting(&request(6, None), &mut note).expect("there are 20");
        let mut found = Vec::new();
        let settled = kernel.pools().settle(&noted.take().expect("before it grew"), &mut found).expect("readable");
        assert_eq!((settled, &found), (Settled::Done(6), &vec![granted.clone()]));

        let mut first = granted;
        let mut note = |intent: &Intent| {
            noted = Some(intent.clone());
            Ok(())
        };
        kernel.pools().give_back_part(&mut first, &mut note).expect("they are free");
        let settled = kernel.pools().settle(&noted.expect("before it shrank"), &mut found).expect("readable");
        assert_eq!((settled, found), (Settled::Done(3), vec![first]));
    }

    #[test]
    fn without_a_note_or_the_kept_number_nothing_is_done() {
        let node = FakeNode { total: 6, free: 6, whole: 10, ..FakeNode::default() };
        let kernel = FakeKernel::new(of_nodes(&[node]));
        let error = kernel.pools().reserve_noting(&request(2, None), &mut |_| Err("the disk is full".into()));
        assert_eq!(error.expect_err("not noted").to_string(), "the disk is full: the pool is as it was");
        let error = kernel.pools().release_beside(&release(None, None), || Err("it is unknown".into()));
        assert_eq!(error.expect_err("not told").to_string(), "it is unknown: the pool is as it was");
        assert_eq!(kernel.written(), []);
        let returned = kernel.pools().release_beside(&release(None, None), || Ok(4)).expect("two are not kept");
        assert_eq!((returned, totals(&kernel.state())), (Returned { now: 2, later: 0 }, vec![4]));
    }

    #[test]
    fn an_error_says_whether_the_pool_is_known_to_be_unchanged() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        kernel.change(|state| state.nodes[1].compactable = 5);
        let refused = kernel.pools().reserve_noting(&request(2, None), &mut |_| Err("the disk is full".into()));
        assert!(refused.expect_err("not noted").leaves_pool_as_it_was());
        kernel.after_next_write(|state| state.nodes[1].whole -= 12); // after compaction: 13 are left
        let short = kernel.pools().reserve_noting(&request(22, None), &mut |_| Ok(())).expect_err("13 are left");
        assert!(
            matches!(&short, PoolError::NotEnoughMemory(why) if why.made == Some(13)) && short.leaves_pool_as_it_was()
        );
        assert_eq!(totals(&kernel.state()), [0, 0]);
        // Perhaps fewer than were made could be given back, and only the numbers show how many.
        kernel.after_next_write(|state| state.reserved = 99);
        let unread = kernel.pools().reserve_noting(&request(2, None), &mut |_| Ok(())).expect_err("contradiction");
        assert!(!unread.leaves_pool_as_it_was(), "{unread}");
        kernel.refuse_writes_to("nr_hugepages");
        kernel.change(|state| state.reserved = 0);
        let unwritten = kernel.pools().reserve_noting(&request(2, None), &mut |_| Ok(())).expect_err("refused");
        assert!(!unwritten.leaves_pool_as_it_was(), "a write may fail after a part of it was done: {unwritten}");
    }

    #[test]
    fn pages_reserved_at_once_add_up() {
        let kernel = FakeKernel::new(two_nodes([10, 10]));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| kernel.pools().reserve(&request(5, None)).expect("there are 20"));
            }
        });
        assert_eq!(totals(&kernel.state()).iter().sum::<u64>(), 10);
    }
}
