//! `wideleaf pool`: the hugetlb pools of this host, the users of their pages, and changes with the numbers before
//! and after.
//!
//! ```text
//!   list     pools by size and node, holders, mounts ─────────────▶ table | JSON
//!   reserve  ┐ --dry-run: the plan ───────────────────────────────▶ what would be written, what it requires
//!   release  ┘ otherwise: done fully, or one line with the reason ─▶ what was written, what is left, its users
//! ```

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;
use wideleaf_memory::pool::{
    Holder, Holders, HugetlbMount, HugetlbPools, NodePool, OnShortage, Plan, PoolError, PoolStatus, Release, Request,
    Returned,
};
use wideleaf_policies::{Bytes, PageSize};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

use crate::output::{Output, say};
use crate::table::{number, table};

pub mod args;
mod starting_domains;

use args::{PoolArgs, PoolChangeArgs, PoolCommand, PoolListArgs, PoolReleaseArgs, PoolReserveArgs};
use starting_domains::KeptPages;

/// Page sizes that have pools.
const SIZES: [PageSize; 2] = [PageSize::Huge2M, PageSize::Giant1G];

/// Most processes that are named in one line; the others are counted.
const NAMED_MAX: usize = 5;

/// Runs the subcommand `pool`.
///
/// # Errors
/// [`Failure::Host`] if the pool lacks the requested pages, each with numbers and a remedy.
pub fn main(args: &PoolArgs) -> Result<(), Failure> {
    match &args.command {
        PoolCommand::List(args) => list(args),
        PoolCommand::Reserve(args) => reserve(args),
        PoolCommand::Release(args) => release(args),
    }
}

fn host(error: impl ToString) -> Failure {
    Failure::Host(error.to_string())
}

/// The pools of this host.
#[derive(Debug, Serialize)]
pub struct PoolList {
    /// Pools by page size.
    pub pools: Vec<PoolRow>,
    /// Processes that use pages.
    pub holders: Vec<HolderRow>,
    /// Mounts of hugetlbfs.
    pub mounts: Vec<MountRow>,
    /// Facts that could not be read, or that hinder most programs.
    pub notes: Vec<String>,
}

/// State of one pool.
#[derive(Debug, Serialize)]
pub struct PoolRow {
    /// Size of its pages: `2m` or `1g`.
    pub page: &'static str,
    /// Size of its pages, in bytes.
    pub page_bytes: u64,
    /// Number of all pages, including surplus ones.
    pub total_pages: u64,
    /// Number of free pages.
    pub free_pages: u64,
    /// Number of free pages that are reserved.
    pub reserved_pages: u64,
    /// Number of surplus pages, which go when they are unmapped.
    pub surplus_pages: u64,
    /// Most surplus pages that may be made.
    pub overcommit_pages: u64,
    /// Counts by NUMA node, as far as the kernel has them.
    pub nodes: Vec<NodeRow>,
}

/// Part of a pool on one node.
#[derive(Debug, Serialize)]
pub struct NodeRow {
    /// Number of the node, as text: `0` is not a count.
    pub node: String,
    /// Number of all pages.
    pub total_pages: u64,
    /// Number of free pages.
    pub free_pages: u64,
    /// Number of surplus pages.
    pub surplus_pages: u64,
}

/// A process with pages of a pool.
#[derive(Debug, Serialize)]
pub struct HolderRow {
    /// Id of the process.
    pub pid: u32,
    /// Name of the process.
    pub name: String,
    /// Pool that the pages are from.
    pub page: &'static str,
    /// Number of pages that it alone maps.
    pub private_pages: u64,
    /// Number of pages that other processes may map too: each of them is listed with it.
    pub shared_pages: u64,
}

/// A mount of hugetlbfs.
#[derive(Debug, Serialize)]
pub struct MountRow {
    /// Path of the mount.
    pub path: String,
    /// Size of its pages, in bytes; `None` if it is not given.
    pub page_bytes: Option<u64>,
}

fn list(args: &PoolListArgs) -> Result<(), Failure> {
    let output = Output::open(args.format, None)?;
    let pools = HugetlbPools::at(&args.root);
    let sizes = args.size.map_or(SIZES.to_vec(), |size| vec![size]);
    output.write(&PoolList::read(&pools, &sizes)?, PoolList::to_table)
}

impl PoolList {
    fn read(pools: &HugetlbPools, sizes: &[PageSize]) -> Result<PoolList, Failure> {
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for size in sizes {
            match pools.consistent_status(*size) {
                Ok(status) => found.push(status),
                Err(error @ PoolError::NoPool(..)) => missing.push(error.to_string()),
                Err(error) => return Err(host(error)),
            }
        }
        if found.is_empty() {
            return Err(Failure::Host(missing.join("; ")));
        }
        let (holders, mounts) = (pools.holders(), pools.mounts());
        let mut notes = missing;
        found.iter().for_each(|pool| notes.extend(unseen(pool, &holders)));
        notes.extend(found.iter().filter(|pool| pools.has_unfinished(pool.size)).map(|pool| unfinished(pool.size)));
        notes.extend(hidden(&holders));
        notes.extend(silent(&holders));
        let mounts = mounts.unwrap_or_else(|error| {
            notes.push(error.to_string());
            Vec::new()
        });
        notes.extend(not_mounted(&found, &mounts));
        let holders = holders.found.iter().filter(|holder| sizes.contains(&holder.size));
        Ok(PoolList {
            pools: found.iter().map(PoolRow::new).collect(),
            holders: holders.map(HolderRow::new).collect(),
            mounts: mounts.iter().map(MountRow::new).collect(),
            notes,
        })
    }

    /// The pools as a table for people.
    pub fn to_table(&self) -> String {
        let mut rows = table(&["pool", "pages", "free", "promised", "surplus", "overcommit"]);
        for pool in &self.pools {
            let numbers =
                [pool.total_pages, pool.free_pages, pool.reserved_pages, pool.surplus_pages, pool.overcommit_pages];
            rows.add_row([comfy_table::Cell::new(pool.page)].into_iter().chain(numbers.map(number)));
            for NodeRow { node, total_pages, free_pages, surplus_pages } in &pool.nodes {
                let name = comfy_table::Cell::new(format!("  node {node}"));
                rows.add_row([name, number(total_pages), number(free_pages), number(""), number(surplus_pages)]);
            }
        }
        let mut out = format!("{rows}\n");
        self.write_holders(&mut out);
        for MountRow { path, page_bytes } in &self.mounts {
            let page = page_bytes.map_or("default pages".to_owned(), |bytes| format!("pages of {}", Bytes::new(bytes)));
            let _ = writeln!(out, "hugetlbfs with {page} at {path}");
        }
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }

    fn write_holders(&self, out: &mut String) {
        if self.holders.is_empty() {
            return;
        }
        let mut rows = table(&["process", "name", "pool", "private pages", "shared pages"]);
        for HolderRow { pid, name, page, private_pages, shared_pages } in &self.holders {
            let [name, page] = [name.as_str(), page].map(comfy_table::Cell::new);
            rows.add_row([number(pid), name, page, number(private_pages), number(shared_pages)]);
        }
        let _ = writeln!(out, "{rows}");
    }
}

impl PoolRow {
    fn new(status: &PoolStatus) -> PoolRow {
        let PoolStatus { size, total, free, reserved, surplus, overcommit, nodes } = status;
        PoolRow {
            page: size.name(),
            page_bytes: size.bytes().get(),
            total_pages: *total,
            free_pages: *free,
            reserved_pages: *reserved,
            surplus_pages: *surplus,
            overcommit_pages: *overcommit,
            nodes: nodes.iter().map(NodeRow::new).collect(),
        }
    }
}

impl NodeRow {
    fn new(NodePool { node, total, free, surplus }: &NodePool) -> NodeRow {
        NodeRow { node: node.to_string(), total_pages: *total, free_pages: *free, surplus_pages: *surplus }
    }
}

impl HolderRow {
    fn new(holder: &Holder) -> HolderRow {
        // A process chooses its name; it must not control the terminal.
        let name = holder.name.replace(char::is_control, "?");
        let (page, private_pages, shared_pages) = (holder.size.name(), holder.private, holder.shared);
        HolderRow { pid: holder.pid, name, page, private_pages, shared_pages }
    }
}

impl MountRow {
    fn new(mount: &HugetlbMount) -> MountRow {
        let path = mount.path.display().to_string().replace(char::is_control, "?");
        MountRow { path, page_bytes: mount.page.map(Bytes::get) }
    }
}

/// Used pages that were found in no process.
fn unseen(pool: &PoolStatus, holders: &Holders) -> Option<String> {
    let unseen = pool.in_use().saturating_sub(holders.pages(pool.size));
    (unseen > 0).then(|| {
        format!(
            "{unseen} of {} pages of {} in use are mapped by no visible process: unmapped files of hugetlbfs have \
            them, or processes of other users",
            pool.in_use(),
            pool.size
        )
    })
}

/// A change of a pool that a process has begun.
fn unfinished(size: PageSize) -> String {
    format!(
        "a process makes pages of {size} now, or was killed while it did; `sudo wideleaf pool release --size {size} \
         --pages 0` waits for a living one, and undoes what a killed one left"
    )
}

/// Processes that could not be read.
fn hidden(holders: &Holders) -> Option<String> {
    let processes = processes(&holders.hidden)?;
    Some(format!("processes {processes} may have pages and could not be read: run this as root"))
}

/// Processes that hang.
fn silent(holders: &Holders) -> Option<String> {
    let processes = processes(&holders.silent)?;
    Some(format!(
        "processes {processes} have pages, but their memory maps could not be read in time: they are locked, or very \
        large"
    ))
}

/// Their ids, up to a useful number; `None` without any.
fn processes(pids: &[u32]) -> Option<String> {
    let named: Vec<String> = pids.iter().take(NAMED_MAX).map(u32::to_string).collect();
    let more = pids.len() - named.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!pids.is_empty()).then(|| named.join(", ") + &more)
}

/// Pools without a mount for programs that need a file.
fn not_mounted(pools: &[PoolStatus], mounts: &[HugetlbMount]) -> Vec<String> {
    let is_mounted = |size: PageSize| mounts.iter().any(|mount| mount.page.is_none_or(|page| page == size.bytes()));
    let without = pools.iter().filter(|pool| pool.total > 0 && !is_mounted(pool.size));
    let note = |pool: &PoolStatus| {
        let (size, option, path) = match pool.size {
            PageSize::Giant1G => (pool.size, "1G", "/dev/hugepages1G"),
            _ => (pool.size, "2M", "/dev/hugepages"),
        };
        format!(
            "no hugetlbfs of {size} pages is mounted; libvirt needs one before it starts: \
             `mkdir -p {path} && mount -t hugetlbfs -o pagesize={option} none {path}`"
        )
    };
    without.map(note).collect()
}

/// A change of a pool, planned or done.
#[derive(Debug, Serialize)]
pub struct PoolChange {
    /// Kind of change.
    pub change: Change,
    /// Whether it was only planned.
    pub is_dry_run: bool,
    /// Size of the pages.
    pub page: &'static str,
    /// Size of the pages, in bytes.
    pub page_bytes: u64,
    /// The only NUMA node of the change, its number as text.
    pub node: Option<String>,
    /// Number of requested pages; `None`: all free ones.
    pub asked_pages: Option<u64>,
    /// Number of pages by which the pool was changed, or would be.
    pub changed_pages: u64,
    /// Number of pages that were taken during the release: they go when they are unmapped.
    pub later_pages: u64,
    /// Planned writes, in this order.
    pub writes: Vec<PoolWrite>,
    /// Planned: memory of each node from which pages can be made.
    pub room: Vec<String>,
    /// The pool afterwards; for a plan, now.
    pub pool: PoolRow,
    /// Users of its pages.
    pub holders: Vec<HolderRow>,
}

/// Kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Add pages to the pool.
    Reserve,
    /// Remove pages from the pool.
    Release,
}

/// A number for a file.
#[derive(Debug, Serialize)]
pub struct PoolWrite {
    /// Path of the file.
    pub file: String,
    /// Number as text: that of pages, or the 1 that starts compaction.
    pub text: String,
}

/// Result of the change.
enum Outcome {
    Planned(Plan),
    Done { changed: u64, later: u64 },
}

impl PoolChange {
    fn new(
        change: Change,
        args: &PoolChangeArgs,
        asked_pages: Option<u64>,
        outcome: Outcome,
    ) -> Result<PoolChange, Failure> {
        let pools = HugetlbPools::at(&args.root);
        let (changed_pages, later_pages, writes, room) = match outcome {
            Outcome::Planned(plan) => {
                (plan.pages, 0, writes(&plan), plan.room.iter().map(ToString::to_string).collect())
            }
            Outcome::Done { changed, later } => (changed, later, Vec::new(), Vec::new()),
        };
        Ok(PoolChange {
            change,
            is_dry_run: args.dry_run,
            page: args.size.name(),
            page_bytes: args.size.bytes().get(),
            node: args.node.map(|node| node.to_string()),
            asked_pages,
            changed_pages,
            later_pages,
            writes,
            room,
            pool: PoolRow::new(&pools.consistent_status(args.size).map_err(host)?),
            holders: pools.holders().of(args.size).map(HolderRow::new).collect(),
        })
    }

    /// The change as a table for people.
    pub fn to_table(&self) -> String {
        let mut out = self.headline();
        if self.later_pages > 0 {
            let _ = writeln!(out, "{} were taken during the release: they go when they are unmapped", self.later_pages);
        }
        for PoolWrite { file, text } in &self.writes {
            let _ = writeln!(out, "would write {text} to {file}");
        }
        for node in &self.room {
            let _ = writeln!(out, "{node}");
        }
        if self.is_dry_run && self.change == Change::Reserve && self.page == PageSize::Giant1G.name() {
            out.push_str("whether that number of contiguous gibibytes can be emptied shows only when it is tried\n");
        }
        let PoolRow { total_pages, free_pages, reserved_pages, .. } = &self.pool;
        let (now, in_use) =
            (if self.is_dry_run { "now" } else { "afterwards" }, total_pages.saturating_sub(*free_pages));
        let _ = write!(out, "{now}: {total_pages} in the pool, {in_use} in use, {reserved_pages} reserved");
        let _ = writeln!(out, "{}", named(&self.holders));
        if !self.is_dry_run && self.change == Change::Reserve {
            let PoolChange { page, changed_pages, node, .. } = self;
            let on = node.as_ref().map_or(String::new(), |node| format!(" --node {node}"));
            let _ = writeln!(out, "to undo it: wideleaf pool release --size {page} --pages {changed_pages}{on}");
        }
        out
    }

    /// Headline such as `512 pages of 2m were added: 1 GiB`, with the requested number if it differs.
    fn headline(&self) -> String {
        let PoolChange { page, changed_pages, .. } = self;
        let bytes = Bytes::new(changed_pages.saturating_mul(self.page_bytes));
        let asked = self.asked_pages.filter(|asked| asked != changed_pages);
        let of = asked.map_or(String::new(), |asked| format!(" of {asked}"));
        let done = match (self.is_dry_run, self.change) {
            (true, Change::Reserve) => "would be added",
            (true, Change::Release) => "would be released",
            (false, Change::Reserve) => "were added",
            (false, Change::Release) => "were released",
        };
        format!("{changed_pages}{of} pages of {page} {done}: {bytes}\n")
    }
}

fn writes(plan: &Plan) -> Vec<PoolWrite> {
    let write = |file: &Path, number: u64| PoolWrite { file: file.display().to_string(), text: number.to_string() };
    plan.compact.iter().map(|file| write(file, 1)).chain([write(&plan.file, plan.after)]).collect()
}

/// Users of pages, as text; empty if there are none.
fn named(holders: &[HolderRow]) -> String {
    let pages = |holder: &HolderRow| holder.private_pages.saturating_add(holder.shared_pages);
    let name = |holder: &HolderRow| format!("; process {} ({}) has {}", holder.pid, holder.name, pages(holder));
    let mut words: String = holders.iter().take(NAMED_MAX).map(name).collect();
    if let more @ 1.. = holders.len().saturating_sub(NAMED_MAX) {
        let _ = write!(words, "; {more} more processes have some");
    }
    words
}

fn reserve(args: &PoolReserveArgs) -> Result<(), Failure> {
    let PoolChangeArgs { size, node, dry_run, format, root } = &args.change;
    let output = Output::open(*format, None)?;
    let pools = HugetlbPools::at(root);
    let pages = args.pages.unwrap_or_else(|| args.bytes.unwrap_or_default().pages(*size));
    let on_shortage = if args.at_most { OnShortage::TakeFewer } else { OnShortage::Refuse };
    let request = Request { size: *size, pages, node: *node, on_shortage };
    if !*dry_run {
        pools.undo_what_was_left(*size).map_err(host)?;
    }
    let outcome = if *dry_run {
        Outcome::Planned(pools.plan_reserve(&request).map_err(|error| with_remedy(&error, on_shortage))?)
    } else {
        Outcome::Done { changed: reserved(&pools, &request)?, later: 0 }
    };
    output.write(&PoolChange::new(Change::Reserve, &args.change, Some(pages), outcome)?, PoolChange::to_table)
}

/// Makes the pool larger. Ctrl-C or a closed terminal makes the kernel stop with fewer pages than requested, and all of
/// them are given back.
fn reserved(pools: &HugetlbPools, request: &Request) -> Result<u64, Failure> {
    let interrupts = Interrupts::install_with(crate::stderr::interrupted)?.also_at_hangup()?;
    // The kernel makes pages for as long as it takes, and partial results are given back.
    interrupts.stand_down();
    let result = pools.reserve(request);
    if let (Ok(mut granted), true) = (result.as_ref().cloned(), interrupts.is_set()) {
        pools.give_back(&mut granted).map_err(host)?;
    }
    interrupts.check()?;
    result.map(|granted| granted.pages()).map_err(|error| with_remedy(&error, request.on_shortage))
}

fn with_remedy(error: &PoolError, on_shortage: OnShortage) -> Failure {
    match (error, on_shortage) {
        (PoolError::NotEnoughMemory(_), OnShortage::Refuse) => Failure::Host(format!("{error} (--at-most)")),
        _ => host(error),
    }
}

fn release(args: &PoolReleaseArgs) -> Result<(), Failure> {
    let PoolChangeArgs { size, node, dry_run, format, root } = &args.change;
    let output = Output::open(*format, None)?;
    let pools = HugetlbPools::at(root);
    // clap requires one of them: without a number it is --all-unused.
    let release = Release { size: *size, pages: args.pages, node: *node };
    let refused = |error: PoolError| match error {
        PoolError::InUse { .. } => {
            let holders: Vec<HolderRow> = pools.holders().of(*size).map(HolderRow::new).collect();
            Failure::Host(format!("{error}{}; use --all-unused to release only free pages", named(&holders)))
        }
        error => host(error),
    };
    let kept = KeptPages::at(root, args.socket.as_deref());
    let outcome = if *dry_run {
        // A user that may not ask the daemon may still see the rest.
        let kept = kept.pages(*size, *node).unwrap_or_else(|why| {
            say(format_args!("wideleaf: {why}: fewer pages may be released"));
            0
        });
        Outcome::Planned(pools.plan_release(&release, kept).map_err(refused)?)
    } else {
        pools.undo_what_was_left(*size).map_err(host)?;
        let released = pools.release_beside(&release, || kept.pages(*size, *node));
        let Returned { now, later } = released.map_err(refused)?;
        Outcome::Done { changed: now, later }
    };
    output.write(&PoolChange::new(Change::Release, &args.change, args.pages, outcome)?, PoolChange::to_table)
}
