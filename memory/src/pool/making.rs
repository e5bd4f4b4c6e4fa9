//! Makes pages when they are wanted, and ties them to the mapping that takes them: no setting stays changed, and the
//! pages go with their last mapping and descriptor, also after `kill -9`.
//!
//! ```text
//!   making-lock ─▶ note ─▶ raise ────────────▶ map, which takes the pages ─▶ lower ─▶ note removed
//!                     │      surplus: nr_overcommit_hugepages                 the number as it was
//!                     │      growth:  nr_hugepages of a node                  in use by now: the kernel makes
//!                     │                                                       surplus of them, and takes them back
//!                     └─ killed: the next process that makes pages, or       when they are unmapped
//!                        changes the pool, undoes what the note says
//! ```
//!
//! Linux makes surplus pages of 1 GiB since 6.19 ("mm/hugetlb: allow overcommitting gigantic hugepages"). Before, it
//! refuses any write to `nr_overcommit_hugepages` of that size (`EINVAL`): that is the probe. A number written to
//! `nr_hugepages` makes the kernel empty a gibibyte, which takes seconds where memory is in use. So the caller is a
//! thread or a process of its own.

use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wideleaf_policies::{Bytes, PageSize};

use super::granted::by_name;
use super::{Granted, HugetlbPools, Intent, NodeMemory, NotEnoughMemory, OnShortage, PoolError, Request, Settled};
use crate::proc_fields::bytes_of;

/// Part of the host's memory that stays available when pages are made, in per cent: the kernel would turn all of it
/// into pages, and then kill processes.
const STAYS_PERCENT: u64 = 10;

/// How the kernel makes a page that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MakingMethod {
    /// As a surplus page, when it is mapped: `nr_overcommit_hugepages` permits it.
    Surplus,
    /// By a larger `nr_hugepages`: the kernel refuses surplus pages of this size.
    Growth,
}

/// Pages that a mapping needs and its pool lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewPages {
    /// Page size of the pool.
    pub size: PageSize,
    /// Number of pages to make.
    pub pages: u64,
    /// NUMA node to make them on; `None`: the only one, or wherever the kernel finds memory.
    pub node: Option<u32>,
}

/// Why no page was made. The pool's settings are as before, or a note of the change is kept.
#[derive(Debug, thiserror::Error)]
pub enum NotMade {
    /// The pool could not be changed.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The host would have too little memory left.
    #[error(
        "cannot make {pages} pages of {size}: {available} of memory are available, and {stays} of them stay for the \
         host; free memory, or ask for fewer pages"
    )]
    HostShort {
        /// Page size of the pool.
        size: PageSize,
        /// Number of pages asked for.
        pages: u64,
        /// Available memory of the host.
        available: Bytes,
        /// Memory that must stay available.
        stays: Bytes,
    },
    /// The pages could not be mapped.
    #[error("cannot map a new page: {0}; another process took it, or no contiguous memory was found")]
    NotMapped(String),
    /// Another process that makes pages gave a reason.
    #[error("{why}")]
    Elsewhere {
        /// Name of the reason, as from [`NotMade::reason`].
        reason: &'static str,
        /// Reason in one line.
        why: String,
    },
}

/// Names of the reasons, for counters.
const REASONS: [&str; 5] = ["no_room", "host_short", "not_permitted", "not_mapped", "other"];

impl NotMade {
    /// Name under which it is counted.
    pub fn reason(&self) -> &'static str {
        match self {
            NotMade::Pool(PoolError::NotEnoughMemory(_) | PoolError::Short(_)) => "no_room",
            NotMade::Pool(PoolError::Write { source, .. } | PoolError::File { source, .. })
                if matches!(source.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) =>
            {
                "not_permitted"
            }
            NotMade::Pool(_) => "other",
            NotMade::HostShort { .. } => "host_short",
            NotMade::NotMapped(_) => "not_mapped",
            NotMade::Elsewhere { reason, .. } => reason,
        }
    }

    /// The reason as another process gave it, by name and in one line.
    pub fn elsewhere(reason: &str, why: impl Into<String>) -> NotMade {
        let known = REASONS.into_iter().find(|known| *known == reason);
        NotMade::Elsewhere { reason: known.unwrap_or("other"), why: why.into() }
    }
}

/// A raised limit of surplus pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RaisedLimit {
    /// Limit before the change.
    before: u64,
    /// Limit that was to be written.
    after: u64,
}

/// The changes that are not undone yet, as the file beside the locks has them.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct PendingChanges {
    #[serde(with = "by_name")]
    size: PageSize,
    /// Identifier of the boot: nothing of it survives the next.
    boot: String,
    /// Growth of the pool.
    grown: Vec<Granted>,
    /// A change that was begun; the pool shows whether it was made.
    open: Option<Intent>,
    /// Limit of surplus pages.
    raised: Option<RaisedLimit>,
}

impl HugetlbPools {
    /// How this kernel makes a page of that size. The probe writes to `nr_overcommit_hugepages` the number that it
    /// has, under the lock.
    ///
    /// # Errors
    /// [`PoolError::Write`] without root; those of [`HugetlbPools::status`].
    pub fn made_by(&self, size: PageSize) -> Result<MakingMethod, PoolError> {
        let _lock = self.lock(size)?;
        let file = self.overcommit_file(size);
        let Some(limit) = self.number_if_there(&file)? else { return Ok(MakingMethod::Growth) };
        match self.write(&file, limit) {
            Ok(()) => Ok(MakingMethod::Surplus),
            Err(PoolError::Write { source, .. }) if source.kind() == io::ErrorKind::InvalidInput => {
                Ok(MakingMethod::Growth)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes pages, has `map` take them, and restores the pool's setting. The pages go back to the host with their
    /// last mapping and descriptor. The call may take seconds, and one process of the host makes pages at a time.
    ///
    /// # Errors
    /// [`NotMade`]; no page stays in the pool.
    pub fn with_new_pages<T, E: fmt::Display>(
        &self,
        new: &NewPages,
        map: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, NotMade> {
        let _turn = self.turn_to_make(new.size)?;
        self.undo_unfinished(new.size)?;
        self.check_host_keeps_enough(new)?;
        let map = || map().map_err(|error| NotMade::NotMapped(error.to_string()));
        match self.made_by(new.size)? {
            MakingMethod::Surplus => self.as_surplus(new, map),
            MakingMethod::Growth => self.by_growth(new, map),
        }
    }

    /// Undoes what a killed process left of making pages. Returns whether it was undone: not where there was nothing,
    /// and not where another program has changed the pool too, which the log says.
    ///
    /// # Errors
    /// [`PoolError`]; the note is kept for the next attempt.
    pub fn undo_what_was_left(&self, size: PageSize) -> Result<bool, PoolError> {
        if !self.has_unfinished(size) {
            return Ok(false);
        }
        let _turn = self.turn_to_make(size)?;
        self.undo_unfinished(size)
    }

    /// Whether a process makes pages of that size now, or was killed while it did.
    pub fn has_unfinished(&self, size: PageSize) -> bool {
        self.note_file(size).exists()
    }

    fn as_surplus<T>(&self, new: &NewPages, map: impl FnOnce() -> Result<T, NotMade>) -> Result<T, NotMade> {
        let mut noted = self.nothing_unfinished(new.size)?;
        {
            let _lock = self.lock(new.size)?;
            let room = self.room(new.node)?;
            let most = room.iter().try_fold(0u64, |sum, node| Some(sum.saturating_add(node.pages_max(new.size)?)));
            if most.is_some_and(|most| !room.is_empty() && new.pages > most) {
                return Err(no_room(new, room));
            }
            let pool = self.consistent_status(new.size)?;
            let before = pool.overcommit;
            // Surplus pages in use may be more than the limit: that number of them is permitted no longer.
            let after = before.max(pool.surplus).saturating_add(new.pages);
            noted.raised = Some(RaisedLimit { before, after });
            self.note(&noted)?;
            if let Err(error) = self.write(&self.overcommit_file(new.size), after) {
                self.forget(new.size);
                return Err(error.into());
            }
        }
        let mapped = map();
        self.undone_now(&mut noted);
        mapped
    }

    fn by_growth<T>(&self, new: &NewPages, map: impl FnOnce() -> Result<T, NotMade>) -> Result<T, NotMade> {
        let mut noted = self.nothing_unfinished(new.size)?;
        let node = new.node.or_else(|| self.only_node(new.size));
        let request = Request { size: new.size, pages: new.pages, node, on_shortage: OnShortage::Refuse };
        let grown = self.reserve_noting(&request, &mut |intent| {
            noted.open = Some(intent.clone());
            self.note(&noted).map_err(|error| error.to_string())
        });
        match grown {
            Ok(granted) => {
                (noted.open, noted.grown) = (None, vec![granted]);
                if let Err(error) = self.note(&noted) {
                    tracing::warn!("the note of a change of the pool is older than the pool: {error}");
                }
                let mapped = map();
                self.undone_now(&mut noted);
                mapped
            }
            Err(error) => {
                if error.leaves_pool_as_it_was() {
                    self.forget(new.size);
                } else if noted.open.is_some() {
                    self.undone_now(&mut noted);
                }
                Err(error.into())
            }
        }
    }

    /// Undoes changes of this process. What cannot be undone now stays noted, and the log says why.
    fn undone_now(&self, noted: &mut PendingChanges) {
        if let Err(error) = self.undo(noted) {
            tracing::error!("cannot restore the pool of {} pages yet: {error}", noted.size);
        }
    }

    fn undo_unfinished(&self, size: PageSize) -> Result<bool, PoolError> {
        let file = self.note_file(size);
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(source) => return Err(PoolError::File { path: file, source }),
        };
        let parsed = serde_json::from_str(&text).ok();
        let malformed = || PoolError::Malformed { path: file, expected: "a note of this program", text };
        let mut noted: PendingChanges = parsed.ok_or_else(malformed)?;
        if noted.boot != self.boot()? {
            self.forget(size);
            return Ok(false);
        }
        self.undo(&mut noted)
    }

    /// Returns `false` if pages may stay, because another program has changed the pool as well.
    fn undo(&self, noted: &mut PendingChanges) -> Result<bool, PoolError> {
        let mut is_known = true;
        if let Some(intent) = noted.open.take() {
            // A note of the growth with its result unknown; the pool knows, unless another program changed it too.
            match self.settle(&intent, &mut noted.grown) {
                Ok(Settled::Unclear { before, after, now }) => {
                    tracing::warn!(
                        "cannot tell which pages of {} were made for a run that was killed: the pool had {before}, was \
                         to have {after}, and has {now} now; `wideleaf pool release` gives unused ones back",
                        noted.size
                    );
                    is_known = false;
                }
                Ok(Settled::Undone | Settled::Done(_)) => {}
                Err(error) => {
                    noted.open = Some(intent);
                    return Err(error);
                }
            }
        }
        if let Some(RaisedLimit { before, after }) = noted.raised {
            let _lock = self.lock(noted.size)?;
            let file = self.overcommit_file(noted.size);
            let now = self.number(&file)?;
            // A smaller limit is another program's: it stays.
            if now >= after {
                self.write(&file, now - (after - before))?;
            }
            noted.raised = None;
        }
        let mut grown = std::mem::take(&mut noted.grown);
        for granted in &mut grown {
            while !granted.is_undone() {
                let rest = granted.clone();
                self.give_back_part(granted, &mut |intent| {
                    let noted =
                        PendingChanges { open: Some(intent.clone()), grown: vec![rest.clone()], ..noted.clone() };
                    self.note(&noted).map_err(|error| error.to_string())
                })?;
            }
        }
        self.forget(noted.size);
        Ok(is_known)
    }

    fn check_host_keeps_enough(&self, new: &NewPages) -> Result<(), NotMade> {
        let Ok(text) = self.files.read(&self.root.join("proc/meminfo")) else { return Ok(()) };
        let [total, available] = ["MemTotal", "MemAvailable"].map(|name| bytes_of(&text, name));
        let (Some(total), Some(available)) = (total, available) else { return Ok(()) };
        let stays = Bytes::new(total.get() / 100 * STAYS_PERCENT);
        let needed = new.pages.saturating_mul(new.size.bytes().get()).saturating_add(stays.get());
        if needed > available.get() {
            return Err(NotMade::HostShort { size: new.size, pages: new.pages, available, stays });
        }
        Ok(())
    }

    /// The node, where only one has such a pool: its own file leaves all other nodes alone.
    fn only_node(&self, size: PageSize) -> Option<u32> {
        let mut nodes = self.node_numbers().into_iter().filter(|node| self.folder(size, Some(*node)).is_dir());
        nodes.next().filter(|_| nodes.next().is_none())
    }

    pub(super) fn overcommit_file(&self, size: PageSize) -> PathBuf {
        self.folder(size, None).join("nr_overcommit_hugepages")
    }

    fn note_file(&self, size: PageSize) -> PathBuf {
        self.file_beside_locks(size, "unfinished")
    }

    fn nothing_unfinished(&self, size: PageSize) -> Result<PendingChanges, PoolError> {
        Ok(PendingChanges { size, boot: self.boot()?, grown: Vec::new(), open: None, raised: None })
    }

    /// Writes the note, so that the next process can undo what this one leaves. A note is replaced as a whole.
    fn note(&self, noted: &PendingChanges) -> Result<(), PoolError> {
        let path = self.note_file(noted.size);
        let text = serde_json::to_string(noted).expect("plain data");
        let new = path.with_extension("new");
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &path));
        written.map_err(|source| PoolError::Write { path, source })
    }

    fn forget(&self, size: PageSize) {
        let file = self.note_file(size);
        if let Err(error) = fs::remove_file(&file)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::error!("cannot remove {}: {error}", file.display());
        }
    }
}

fn no_room(new: &NewPages, room: Vec<NodeMemory>) -> NotMade {
    PoolError::NotEnoughMemory(Box::new(NotEnoughMemory { size: new.size, needed: new.pages, made: None, room })).into()
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use super::*;
    use crate::pool::fake_kernel::{Failing, FakeKernel, FakeNode, State, killed};

    /// Giant pools of two nodes that can make `whole` pages each.
    fn giants(whole: [u64; 2], has_giant_surplus: bool) -> State {
        let nodes = whole.map(|whole| FakeNode { whole, ..FakeNode::default() }).to_vec();
        State { nodes, is_giant: true, has_giant_surplus, ..State::default() }
    }

    fn new(pages: u64, node: Option<u32>) -> NewPages {
        NewPages { size: PageSize::Giant1G, pages, node }
    }

    /// Makes pages and takes them, as a caller does.
    fn make(kernel: &Arc<FakeKernel>, pages: u64, node: Option<u32>) -> Result<(), NotMade> {
        kernel.pools().with_new_pages(&new(pages, node), || kernel.map(pages))
    }

    fn note(kernel: &FakeKernel) -> PathBuf {
        kernel.path().join("run/wideleaf/pool-1g.unfinished")
    }

    fn used(state: &State) -> Vec<(u64, u64)> {
        state.nodes.iter().map(|node| (node.total - node.free, node.surplus)).collect()
    }

    #[test]
    fn a_kernel_with_surplus_giants_makes_them_under_its_limit() {
        let before = State { overcommit: 3, ..giants([4, 0], true) };
        let kernel = FakeKernel::new(before.clone());
        assert_eq!(kernel.pools().made_by(PageSize::Giant1G).expect("readable"), MakingMethod::Surplus);
        make(&kernel, 2, None).expect("there are four");
        assert_eq!((used(&kernel.state()), kernel.state().overcommit), (vec![(2, 2), (0, 0)], 3));
        // The two in use count against the limit, which is raised beyond them.
        make(&kernel, 2, None).expect("two are left");
        assert_eq!((used(&kernel.state()), kernel.state().overcommit), (vec![(4, 4), (0, 0)], 3));
        let limits: Vec<_> = kernel.written().into_iter().map(|(_, number)| number).collect();
        assert_eq!(limits, ["3", "3", "5", "3", "3", "5", "3"], "each probe writes the number that is there");
        kernel.unmap(4);
        assert_eq!((kernel.state(), note(&kernel).exists()), (before, false));
    }

    #[test]
    fn a_kernel_without_them_grows_the_pool_of_the_node_and_takes_the_page_back_when_it_is_unmapped() {
        let before = giants([4, 4], false);
        let kernel = FakeKernel::new(before.clone());
        assert_eq!(kernel.pools().made_by(PageSize::Giant1G).expect("readable"), MakingMethod::Growth);
        for round in 1..3 {
            make(&kernel, 1, Some(1)).expect("there are four");
            assert_eq!(used(&kernel.state()), [(0, 0), (round, round)], "surplus: it goes when it is unmapped");
        }
        let node_1 = "sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages";
        assert!(kernel.written().iter().all(|(file, _)| file == node_1), "{:?}", kernel.written());
        kernel.unmap(2);
        assert_eq!((kernel.state(), note(&kernel).exists()), (before, false));
    }

    #[test]
    fn pages_of_other_programs_stay_as_they_are() {
        // Another program has one page in use and two free ones, and promises both.
        let mut before = giants([4, 0], false);
        (before.nodes[0].total, before.nodes[0].free, before.reserved) = (3, 2, 2);
        let kernel = FakeKernel::new(before.clone());
        let pools = kernel.pools();
        let made = pools.with_new_pages(&new(1, None), || {
            assert_eq!(kernel.state().nodes[0].free, 3);
            kernel.change(|state| state.nodes[0].free -= 1);
            Ok::<_, io::Error>(())
        });
        made.expect("there is room");
        let node = kernel.state().nodes[0];
        assert_eq!((node.total, node.free, node.surplus), (4, 2, 1));
        kernel.unmap(1);
        assert_eq!(kernel.state(), before);
    }

    #[test]
    fn without_a_contiguous_gibibyte_nothing_is_changed_and_the_reason_has_numbers() {
        for has_surplus in [false, true] {
            let before = giants([0, 0], has_surplus);
            let kernel = FakeKernel::new(before.clone());
            let error = make(&kernel, 1, None).expect_err("no memory");
            assert_eq!(error.reason(), "no_room", "{error}");
            assert!(error.to_string().starts_with("cannot make 1 pages of 1g (1 GiB): there is not"), "{error}");
            // Free memory enough, but no gibibyte of it in one piece.
            kernel.change(|state| state.nodes[0].compactable = 1);
            let error = make(&kernel, 1, None).expect_err("scattered");
            let reason = if has_surplus { "not_mapped" } else { "no_room" };
            assert_eq!(error.reason(), reason, "{error}");
            kernel.change(|state| state.nodes[0].compactable = 0);
            assert_eq!((kernel.state(), note(&kernel).exists()), (before, false));
        }
    }

    #[test]
    fn a_page_that_another_process_takes_is_left_to_it() {
        let kernel = FakeKernel::new(giants([1, 0], false));
        let error = kernel.pools().with_new_pages(&new(1, None), || {
            kernel.map(1).expect("the new one");
            kernel.map(1)
        });
        assert_eq!(error.expect_err("none is left").reason(), "not_mapped");
        assert_eq!(used(&kernel.state()), [(1, 1), (0, 0)]);
        kernel.unmap(1);
        assert_eq!(kernel.state(), giants([1, 0], false));
    }

    #[test]
    fn a_tenth_of_the_hosts_memory_stays_available() {
        let kernel = FakeKernel::new(giants([9, 0], true));
        let meminfo = |available: u64| {
            let text = format!("MemTotal: 10485760 kB\nMemAvailable: {available} kB\n");
            fs::write(kernel.path().join("proc/meminfo"), text).expect("a file");
        };
        meminfo((2 << 20) - 1);
        let error = make(&kernel, 1, None).expect_err("one page and a gibibyte are two");
        assert_eq!(error.reason(), "host_short");
        assert!(error.to_string().starts_with("cannot make 1 pages of 1g: "), "{error}");
        assert_eq!(kernel.written(), []);
        meminfo(2 << 20);
        make(&kernel, 1, None).expect("enough");
    }

    #[test]
    fn without_root_the_reason_is_the_permission() {
        for file in ["nr_overcommit_hugepages", "nr_hugepages"] {
            let before = giants([2, 0], false);
            let kernel = FakeKernel::new(before.clone());
            kernel.refuse_writes_to(file);
            assert_eq!(make(&kernel, 1, None).expect_err("refused").reason(), "not_permitted");
            assert_eq!((kernel.state(), note(&kernel).exists()), (before, false));
        }
    }

    #[test]
    fn without_a_note_nothing_is_changed() {
        for has_surplus in [false, true] {
            let before = giants([2, 0], has_surplus);
            let kernel = FakeKernel::new(before.clone());
            fs::create_dir_all(note(&kernel).with_extension("new")).expect("a folder in its place");
            make(&kernel, 1, None).expect_err("not noted");
            assert_eq!(kernel.state(), before);
        }
    }

    /// Calls of one making, including those that undo it.
    const CALLS_MAX: usize = 500;

    /// Lets each call of a making fail in turn, then has another process make and return a page.
    fn each_call(how: Failing, has_giant_surplus: bool) {
        let before = State { overcommit: if has_giant_surplus { 2 } else { 0 }, ..giants([3, 3], has_giant_surplus) };
        let (mut failed, mut is_over) = (0, false);
        for calls in 0..CALLS_MAX {
            let kernel = FakeKernel::new(before.clone());
            kernel.fail_after(calls, how);
            let made = catch_unwind(AssertUnwindSafe(|| make(&kernel, 1, Some(0))));
            is_over = kernel.stop_failing();
            if is_over {
                break;
            }
            failed += u64::from(!matches!(made, Ok(Ok(()))));
            // The end of the process unmaps what it had mapped.
            kernel.unmap(used(&kernel.state()).iter().map(|(used, _)| used).sum());
            kernel.pools().undo_what_was_left(PageSize::Giant1G).expect("no call fails any more");
            let state = kernel.state();
            assert_eq!((&state, note(&kernel).exists()), (&before, false), "{how:?} in call {calls}: {made:?}");
            make(&kernel, 1, Some(0)).expect("there is room");
            kernel.unmap(1);
            assert_eq!(kernel.state(), before, "{how:?} in call {calls}");
        }
        assert!(is_over && failed > 10, "{failed} calls failed");
    }

    #[test]
    fn each_call_that_fails_leaves_the_pool_as_it_was_or_a_note_that_restores_it() {
        each_call(Failing::Error, false);
        each_call(Failing::Error, true);
    }

    #[test]
    fn a_process_that_is_killed_in_any_call_leaves_a_note_that_restores_the_pool() {
        for how in [Failing::KilledBefore, Failing::KilledAfter] {
            each_call(how, false);
            each_call(how, true);
        }
    }

    #[test]
    fn a_note_of_an_earlier_boot_is_removed_and_undoes_nothing() {
        let kernel = FakeKernel::new(giants([2, 0], true));
        let ended = catch_unwind(AssertUnwindSafe(|| {
            kernel.pools().with_new_pages(&new(1, None), || -> io::Result<()> { killed() })
        }));
        assert!(ended.is_err() && note(&kernel).exists());
        kernel.boot_again();
        kernel.change(|state| state.overcommit = 7);
        assert!(!kernel.pools().undo_what_was_left(PageSize::Giant1G).expect("readable"));
        assert_eq!((kernel.state().overcommit, note(&kernel).exists()), (7, false));
    }

    #[test]
    fn pages_that_may_be_of_another_program_stay_and_are_not_called_undone() {
        let kernel = FakeKernel::new(giants([4, 0], false));
        kernel.after_next_write(|_| killed());
        let ended = catch_unwind(AssertUnwindSafe(|| make(&kernel, 1, Some(0))));
        assert!(ended.is_err() && note(&kernel).exists());
        kernel.change(|state| {
            let node = &mut state.nodes[0];
            (node.total, node.free, node.whole) = (3, 3, 1);
        });
        assert!(!kernel.pools().undo_what_was_left(PageSize::Giant1G).expect("readable"));
        assert_eq!((kernel.state().nodes[0].total, note(&kernel).exists()), (3, false));
    }

    #[test]
    fn a_limit_that_another_program_lowered_is_left_to_it() {
        let kernel = FakeKernel::new(State { overcommit: 5, ..giants([2, 0], true) });
        let made = kernel.pools().with_new_pages(&new(1, None), || {
            kernel.map(1)?;
            kernel.change(|state| state.overcommit = 0);
            Ok::<_, io::Error>(())
        });
        made.expect("there are two");
        assert_eq!(kernel.state().overcommit, 0);
    }
}
