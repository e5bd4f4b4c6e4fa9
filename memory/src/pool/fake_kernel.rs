//! Captured trees for tests, and a kernel that lives in one. Each of its nodes has a number of whole blocks. It
//! makes and frees pool pages as `set_max_huge_pages` does (mm/hugetlb.c), and lets a test change the pool
//! between two writes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::HugetlbPools;
use super::files::{KernelFiles, PoolFiles};

const POOL_2M: &str = "hugepages/hugepages-2048kB";
const POOL_1G: &str = "hugepages/hugepages-1048576kB";

/// A folder that stands for `/`.
pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    pub(crate) fn new() -> Tree {
        Tree(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn pools(&self) -> HugetlbPools {
        HugetlbPools::at(self.path())
    }

    pub(crate) fn put(&self, name: &str, text: &str) {
        put(&self.path().join(name), text);
    }
}

fn put(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder can be made");
    fs::write(path, text).expect("a file can be written");
}

/// One node's part of the pool of 2 MiB pages, and its room for more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FakeNode {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) surplus: u64,
    /// Number of blocks that it can make pages of.
    pub(crate) whole: u64,
    /// Number of further blocks after compaction.
    pub(crate) compactable: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) nodes: Vec<FakeNode>,
    pub(crate) reserved: u64,
    pub(crate) overcommit: u64,
    /// Whether the pool is that of giant pages; its `whole` blocks are gibibytes then.
    pub(crate) is_giant: bool,
    /// Whether a giant pool takes a limit of surplus pages (Linux 6.19).
    pub(crate) has_giant_surplus: bool,
}

type Change = Box<dyn FnOnce(&mut State) + Send>;

/// Kernel of one tree.
pub(crate) struct FakeKernel {
    tree: Tree,
    state: Mutex<State>,
    /// Writes so far, without the folder.
    written: Mutex<Vec<(String, String)>>,
    /// Change by another program right after the next write.
    then: Mutex<Option<Change>>,
    /// End of the paths that refuse writes.
    refused: Mutex<Option<&'static str>>,
    /// Number of calls until one fails, and how it fails.
    failing: Mutex<Option<(usize, Failing)>>,
}

/// Ends the process, as far as a test can: without a word.
pub(crate) fn killed() -> ! {
    std::panic::resume_unwind(Box::new("killed"))
}

/// How a call fails.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Failing {
    /// With an error, and nothing is done.
    Error,
    /// The process ends in it, before anything is done.
    KilledBefore,
    /// The process ends in it, after all is done.
    KilledAfter,
}

impl std::fmt::Debug for FakeKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeKernel").field("state", &self.state).finish_non_exhaustive()
    }
}

impl FakeKernel {
    pub(crate) fn new(state: State) -> Arc<FakeKernel> {
        let tree = Tree::new();
        tree.put("proc/sys/vm/compact_memory", "");
        tree.put("proc/sys/kernel/random/boot_id", "the-first-boot\n");
        for (node, _) in state.nodes.iter().enumerate() {
            tree.put(&format!("sys/devices/system/node/node{node}/compact"), "");
        }
        let (written, then, refused, failing) = Default::default();
        let kernel = FakeKernel { tree, state: Mutex::new(state), written, then, refused, failing };
        kernel.show();
        Arc::new(kernel)
    }

    pub(crate) fn pools(self: &Arc<FakeKernel>) -> HugetlbPools {
        HugetlbPools { root: self.tree.path().to_owned(), files: Arc::clone(self) as Arc<dyn PoolFiles> }
    }

    pub(crate) fn state(&self) -> State {
        self.state.lock().clone()
    }

    pub(crate) fn written(&self) -> Vec<(String, String)> {
        self.written.lock().clone()
    }

    pub(crate) fn after_next_write(&self, change: impl FnOnce(&mut State) + Send + 'static) {
        *self.then.lock() = Some(Box::new(change));
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        self.show();
    }

    pub(crate) fn refuse_writes_to(&self, end: &'static str) {
        *self.refused.lock() = Some(end);
    }

    /// The call after `calls` further ones fails.
    pub(crate) fn fail_after(&self, calls: usize, how: Failing) {
        *self.failing.lock() = Some((calls, how));
    }

    /// Whether that call has not come yet; no call fails from now on.
    pub(crate) fn stop_failing(&self) -> bool {
        self.failing.lock().take().is_some()
    }

    fn failing_now(&self) -> Option<Failing> {
        let mut failing = self.failing.lock();
        match failing.as_mut()? {
            (0, how) => {
                let how = *how;
                *failing = None;
                Some(how)
            }
            (calls, _) => {
                *calls -= 1;
                None
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.tree.path()
    }

    /// Maps pages and touches them: free ones first, then surplus ones as far as the limit permits. All or nothing.
    pub(crate) fn map(&self, pages: u64) -> io::Result<()> {
        let mut mapped = Ok(());
        self.change(|state| {
            let before = state.clone();
            for _ in 0..pages {
                if !state.step(None, |n| n.free, |n| n.free -= 1) && !state.make_surplus() {
                    *state = before;
                    mapped = Err(io::ErrorKind::OutOfMemory.into());
                    return;
                }
            }
        });
        mapped
    }

    /// Unmaps pages: surplus ones leave the pool, the others stay free in it.
    pub(crate) fn unmap(&self, pages: u64) {
        self.change(|state| {
            for _ in 0..pages {
                let used: fn(&FakeNode) -> u64 = |n| n.total - n.free;
                let unmap = |n: &mut FakeNode| match n.surplus {
                    0 => n.free += 1,
                    _ => (n.surplus, n.total, n.whole) = (n.surplus - 1, n.total - 1, n.whole + 1),
                };
                assert!(state.step(None, used, unmap), "no more pages are in use");
            }
        });
    }

    pub(crate) fn boot_again(&self) {
        self.tree.put("proc/sys/kernel/random/boot_id", "another-boot\n");
    }

    /// Writes the numbers into the files.
    fn show(&self) {
        let state = self.state();
        let sum = |number: fn(&FakeNode) -> u64| state.nodes.iter().map(number).sum::<u64>();
        let all = FakeNode {
            total: sum(|n| n.total),
            free: sum(|n| n.free),
            surplus: sum(|n| n.surplus),
            ..FakeNode::default()
        };
        let pool = if state.is_giant { POOL_1G } else { POOL_2M };
        let blocks_of_page = if state.is_giant { 512 } else { 1 };
        let kernel = PathBuf::from("sys/kernel/mm").join(pool);
        self.show_pool(&kernel, &all);
        let number = |name: &str, number: u64| put(&self.tree.path().join(&kernel).join(name), &format!("{number}\n"));
        number("resv_hugepages", state.reserved);
        number("nr_overcommit_hugepages", state.overcommit);
        let mut buddies = String::new();
        for (number, node) in state.nodes.iter().enumerate() {
            self.show_pool(&PathBuf::from(format!("sys/devices/system/node/node{number}")).join(pool), node);
            // Blocks that compaction can make are scattered as halves.
            let (halves, whole) = (node.compactable * 2 * blocks_of_page, node.whole * blocks_of_page);
            buddies += &format!("Node {number}, zone   Normal  0 0 0 0 0 0 0 0 {halves} {whole} 0\n");
            let meminfo = format!("Node {number} Active(file): 0 kB\nNode {number} Inactive(file): 0 kB\n");
            self.tree.put(&format!("sys/devices/system/node/node{number}/meminfo"), &meminfo);
        }
        self.tree.put("proc/buddyinfo", &buddies);
    }

    fn show_pool(&self, folder: &Path, node: &FakeNode) {
        for (name, number) in
            [("nr_hugepages", node.total), ("free_hugepages", node.free), ("surplus_hugepages", node.surplus)]
        {
            put(&self.tree.path().join(folder).join(name), &format!("{number}\n"));
        }
    }
}

impl PoolFiles for FakeKernel {
    fn read(&self, path: &Path) -> io::Result<String> {
        match self.failing_now() {
            Some(Failing::Error) => Err(io::ErrorKind::Other.into()),
            Some(Failing::KilledBefore | Failing::KilledAfter) => killed(),
            None => KernelFiles.read(path),
        }
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        if self.refused.lock().is_some_and(|end| path.ends_with(end)) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let failing = self.failing_now();
        match failing {
            Some(Failing::Error) => return Err(io::ErrorKind::Other.into()),
            Some(Failing::KilledBefore) => killed(),
            _ => {}
        }
        let name = path.strip_prefix(self.tree.path()).expect("in the tree").display().to_string();
        let is_limit = name.ends_with("nr_overcommit_hugepages");
        if is_limit && self.state().is_giant && !self.state().has_giant_surplus {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let node =
            name.strip_prefix("sys/devices/system/node/node").and_then(|rest| rest.split('/').next()?.parse().ok());
        self.written.lock().push((name.clone(), text.to_owned()));
        self.change(|state| {
            if name.contains("compact") {
                state.compact(node);
            } else if is_limit {
                state.overcommit = text.parse().expect("a number");
            } else {
                state.resize(node, text.parse().expect("a number"));
            }
            if let Some(change) = self.then.lock().take() {
                change(state);
            }
        });
        if failing.is_some() { killed() } else { Ok(()) }
    }
}

impl State {
    fn persistent(&self) -> u64 {
        self.nodes.iter().map(|node| node.total - node.surplus).sum()
    }

    /// Makes a surplus page in use, if the limit permits one more and there is memory.
    fn make_surplus(&mut self) -> bool {
        let surplus: u64 = self.nodes.iter().map(|node| node.surplus).sum();
        let make = |n: &mut FakeNode| (n.whole, n.total, n.surplus) = (n.whole - 1, n.total + 1, n.surplus + 1);
        surplus < self.overcommit && self.step(None, |n| n.whole, make)
    }

    fn compact(&mut self, node: Option<usize>) {
        let nodes = self.nodes.iter_mut().enumerate().filter(|(number, _)| node.is_none_or(|node| node == *number));
        nodes.for_each(|(_, node)| node.whole += std::mem::take(&mut node.compactable));
    }

    /// Does one step on the allowed node with the largest `wanted`; `false` if that is zero everywhere.
    fn step(&mut self, allowed: Option<usize>, wanted: fn(&FakeNode) -> u64, act: fn(&mut FakeNode)) -> bool {
        let nodes = self.nodes.iter_mut().enumerate();
        let allowed = nodes.filter(|(number, node)| allowed.is_none_or(|only| only == *number) && wanted(node) > 0);
        allowed.max_by_key(|(_, node)| wanted(node)).map(|(_, node)| act(node)).is_some()
    }

    fn resize(&mut self, node: Option<usize>, count: u64) {
        let elsewhere = node.map_or(0, |node| self.persistent() - (self.nodes[node].total - self.nodes[node].surplus));
        let count = count + elsewhere;
        while count > self.persistent() && self.step(node, |n| n.surplus, |n| n.surplus -= 1) {}
        let make = |n: &mut FakeNode| (n.whole, n.total, n.free) = (n.whole - 1, n.total + 1, n.free + 1);
        while count > self.persistent() && self.step(node, |n| n.whole, make) {}
        let sum = |number: fn(&FakeNode) -> u64| self.nodes.iter().map(number).sum::<u64>();
        let kept = count.max(self.reserved + sum(|n| n.total) - sum(|n| n.free));
        let free = |n: &mut FakeNode| (n.whole, n.total, n.free) = (n.whole + 1, n.total - 1, n.free - 1);
        while kept < self.persistent() && self.step(node, |n| n.free, free) {}
        while count < self.persistent() && self.step(node, |n| n.total - n.surplus, |n| n.surplus += 1) {}
    }
}
