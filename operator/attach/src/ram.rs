//! The guest's RAM: guest-physical ranges, their addresses in the VMM's process, their backing, and whether any of
//! it can ever be huge.
//!
//! ```text
//!   QMP:       info mtree -f ─▶ pieces of RAM blocks ─ gpa2hva ─▶ addresses ┐
//!   without:   -m, -object memory-backend-…, the machine's hole ─┐          ├─ smaps ─▶ kind, verdict
//!              smaps: the mapping of just that size ─────────────┴─ guess ──┘
//! ```
//!
//! A window can be huge only where its guest-physical address, its address in the process and (for a file) its
//! file offset are equal modulo 2 MiB. QEMU aligns memfd and file RAM only to the file's page size, so most of
//! it never can.

use std::fmt;

use serde_json::Value;
use wideleaf_control::view::{RamView, Vmm};
use wideleaf_memory::explain::CannotBeHuge;
use wideleaf_memory::numa::placement::NodePolicy;
use wideleaf_memory::{BackingKind, RamRange};
use wideleaf_policies::geometry::is_congruent;
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, Gpa, GpaRange, Hva, PageSize};

use crate::command_line::{Backend, CommandLine};
use crate::mapping::Mapping;
use crate::mtree::{PIECES_MAX, ram_pieces};
use crate::other_vmms;
use crate::placed::{self, Placed as PlacedOnNodes};
use crate::process::VmProcess;
use crate::qmp::{Qmp, QmpError, Question};

/// RAM of one guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RamMap {
    /// Pieces ascending by guest-physical address.
    pub pieces: Vec<RamPiece>,
    /// Notes on missing or doubtful parts.
    pub notes: Vec<String>,
    /// Whether faults or writes of a part of it are reported to a userfaultfd, in whichever process that is open.
    pub is_watched: bool,
}

/// A piece of RAM of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamPiece {
    /// Name of QEMU's memory backend, or of the mapping.
    pub name: String,
    /// Place of the piece.
    pub range: RamRange,
    /// Kind of its backing.
    pub kind: RamKind,
    /// Reason why it can never be huge.
    pub never_huge: Option<NeverHuge>,
    /// Whether its guest-physical addresses are a guess.
    pub is_guess: bool,
    /// NUMA nodes that its backend names; `None` where the kernel chooses.
    pub nodes: Option<NodePolicy>,
}

/// Backing of RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamKind {
    /// Anonymous memory without a file.
    Anonymous,
    /// Shared memory without a disk: memfd, tmpfs, `memory-backend-ram,share=on`.
    Shmem,
    /// Pages of a hugetlb pool.
    Hugetlb(PageSize),
    /// A file on a disk, or the private copy of any file.
    File,
}

impl RamKind {
    /// Name of the kind in views.
    pub const fn name(self) -> &'static str {
        match self {
            RamKind::Anonymous => "anonymous",
            RamKind::Shmem => "shmem",
            RamKind::Hugetlb(_) => "hugetlb",
            RamKind::File => "file",
        }
    }

    /// The kind as the manager has it.
    pub const fn backing(self) -> BackingKind {
        match self {
            RamKind::Anonymous => BackingKind::Anon,
            RamKind::Shmem | RamKind::File => BackingKind::Memfd,
            RamKind::Hugetlb(_) => BackingKind::Hugetlb,
        }
    }

    /// The page size, where it is fixed.
    pub const fn fixed_page(self) -> Option<PageSize> {
        match self {
            RamKind::Hugetlb(size) => Some(size),
            RamKind::Anonymous | RamKind::Shmem | RamKind::File => None,
        }
    }
}

/// Reason why no window of a piece can ever be huge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NeverHuge {
    /// Guest-physical addresses and addresses in the process differ modulo 2 MiB, by that many bytes.
    Address(Bytes),
    /// File offsets and addresses in the process differ modulo 2 MiB.
    FileOffset(Bytes),
    /// Its backing is a file on a disk.
    OnDisk(String),
    /// Writes stay private to the process, page by page.
    PrivateFile,
    /// Marked `MADV_NOHUGEPAGE` by the process.
    NoHugePage,
    /// THP is off for the process.
    ThpOff,
}

impl NeverHuge {
    /// The manager's reason for it.
    pub const fn why(&self) -> CannotBeHuge {
        match self {
            NeverHuge::Address(_) | NeverHuge::FileOffset(_) => CannotBeHuge::Misaligned,
            NeverHuge::OnDisk(_) | NeverHuge::PrivateFile => CannotBeHuge::OnDisk,
            NeverHuge::NoHugePage => CannotBeHuge::Marked,
            NeverHuge::ThpOff => CannotBeHuge::Disabled,
        }
    }

    /// Whether the reason is the place of the mapping.
    pub const fn is_misaligned(&self) -> bool {
        matches!(self, NeverHuge::Address(_) | NeverHuge::FileOffset(_))
    }
}

/// Shows the details of this piece, then the general reason, with options for the guest's command line
/// that would help.
impl fmt::Display for NeverHuge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = self.why();
        match self {
            NeverHuge::Address(off) => write!(f, "it is mapped off by {} KiB: {why}", off.get() >> 10),
            NeverHuge::FileOffset(off) => write!(f, "its place in the file is off by {} KiB: {why}", off.get() >> 10),
            NeverHuge::OnDisk(path) => write!(f, "{path}: {why}"),
            NeverHuge::PrivateFile => write!(f, "its writes stay private: {why}"),
            NeverHuge::NoHugePage | NeverHuge::ThpOff => why.fmt(f),
        }
    }
}

impl RamMap {
    /// Size of all pieces together.
    pub fn bytes(&self) -> Bytes {
        self.pieces.iter().map(|piece| piece.range.gpa.bytes()).sum()
    }

    /// What the policies of its backends say of NUMA nodes.
    pub(crate) fn placed(&self) -> PlacedOnNodes {
        PlacedOnNodes::of(self.pieces.iter().map(|piece| (piece.name.as_str(), piece.nodes)))
    }

    /// Reason why the RAM is too large to examine. Every window takes memory of this process, and a process may map
    /// more than the host has.
    fn excess(&self, host: Option<Bytes>) -> Option<String> {
        let most = Bytes::new(host.map_or(u64::MAX, |host| host.get().saturating_mul(HOST_MEMORY_TIMES_MAX)));
        let (bytes, pieces) = (self.bytes(), self.pieces.len());
        (bytes > most || pieces > PIECES_MAX).then(|| {
            format!(
                "{bytes} in {pieces} pieces is too much to examine: the limits are {HOST_MEMORY_TIMES_MAX} times the \
                 host's memory and {PIECES_MAX} pieces"
            )
        })
    }
}

impl RamPiece {
    /// The piece as views show it.
    pub fn view(&self) -> RamView {
        RamView {
            name: self.name.clone(),
            gpa: self.range.gpa.start().get(),
            bytes: self.range.gpa.bytes().get(),
            hva: self.range.hva.get(),
            kind: self.kind.name().to_owned(),
            is_guess: self.is_guess,
            never_huge: self.never_huge.as_ref().map(NeverHuge::to_string),
        }
    }
}

/// MADV_COLLAPSE ignores this setting (madvise(2)).
const THP_NEVER: &str = "THP is off on this host (transparent_hugepage/enabled is never): the kernel makes no huge \
                         pages by itself, only the manager does";

/// Upper bound on a guest's RAM, as a multiple of the host's memory: more can never all be used.
const HOST_MEMORY_TIMES_MAX: u64 = 4;

/// Upper bound on guest-physical addresses: 52 bits (SDM vol. 3, 4.4).
const ADDRESSES: Bytes = Bytes::new(1 << 52);

/// Place of a part of RAM, before its backing is known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Placed {
    name: String,
    range: RamRange,
    nodes: Option<NodePolicy>,
}

/// Finds a guest's RAM: with its monitor if it has one, else by a guess.
pub fn map(process: &VmProcess, monitor: Option<&mut Qmp>) -> RamMap {
    let mut mappings = match process.mappings() {
        Ok(mappings) => mappings,
        Err(lost) => return RamMap { notes: vec![lost.to_string()], ..RamMap::default() },
    };
    if process.vmm == Vmm::Wideleaf {
        // Its own manager marks windows, and clears the mark of those that it makes huge.
        mappings.iter_mut().for_each(|mapping| mapping.is_kept_small = false);
    }
    let mut notes = Vec::new();
    let asked = monitor.map(from_monitor).and_then(|asked| {
        asked.map_err(|error| notes.push(format!("guest-physical addresses are guessed: {error}"))).ok()
    });
    let is_guess = asked.is_none();
    let placed = asked.unwrap_or_else(|| guess(process, &mappings, &mut notes));
    let is_thp_off = process.status().is_ok_and(|status| status.is_thp_off);
    notes.extend(smaller_folios(process));
    notes.extend(process.places.is_thp_never().then(|| THP_NEVER.to_owned()));
    let mut pieces: Vec<_> =
        placed.iter().flat_map(|part| cut(part, &mappings, is_thp_off, is_guess)).take(PIECES_MAX + 1).collect();
    pieces.sort_by_key(|piece| piece.range.gpa.start());
    let found = pieces.len();
    pieces.dedup_by(|next, kept| next.range.gpa.start() < kept.range.gpa.end());
    if pieces.len() < found {
        notes.push("guest-physical addresses were reported twice: the first mapping is used".into());
    }
    let is_watched = placed.iter().any(|part| mapped_in(part, &mappings).any(|mapping| mapping.is_watched));
    let ram = RamMap { pieces, notes, is_watched };
    match ram.excess(process.places.host_memory()) {
        Some(why) => RamMap { pieces: Vec::new(), notes: [ram.notes, vec![why]].concat(), is_watched },
        None => ram,
    }
}

/// Note on the sizes between 4 KiB and 2 MiB. Page tables do not show them, and smaps does not by size.
fn smaller_folios(process: &VmProcess) -> Option<String> {
    let sizes: Vec<String> = process.places.smaller_folios().iter().map(Bytes::to_string).collect();
    let sizes = (!sizes.is_empty()).then(|| sizes.join(", "))?;
    Some(format!("this host also makes pages of {sizes} (multi-size THP): memory on them counts as base pages"))
}

/// Places according to QEMU.
fn from_monitor(qmp: &mut Qmp) -> Result<Vec<Placed>, QmpError> {
    let backends = qmp.ask(Question::Memdevs)?.unwrap_or_default();
    let ids: Vec<&str> =
        backends.as_array().into_iter().flatten().filter_map(|backend| backend["id"].as_str()).collect();
    let tree = qmp.ask(Question::MemoryTree)?.unwrap_or_default();
    // Old machine types name a block by its whole path among QEMU's objects.
    let is_ram = |block: &str| block.rsplit('/').next().is_some_and(|name| ids.contains(&name));
    let pieces = ram_pieces(tree.as_str().unwrap_or_default(), is_ram);
    let questions: Vec<_> = pieces.iter().map(|piece| Question::HostAddress(piece.gpa.start())).collect();
    let mut found = Vec::with_capacity(pieces.len());
    for (piece, answer) in pieces.into_iter().zip(qmp.ask_all(&questions)?) {
        let answer = answer.unwrap_or_default();
        let hva = host_address(&answer).filter(|hva| hva.checked_add(piece.gpa.bytes()).is_some());
        let hva = hva.ok_or_else(|| QmpError::NotQmp(format!("gpa2hva answered {answer}")))?;
        let nodes = piece.block.rsplit('/').next().and_then(|name| placed::policy_of(&backends, name));
        found.push(Placed { name: piece.block, range: RamRange { gpa: piece.gpa, hva }, nodes });
    }
    if found.is_empty() { Err(QmpError::NotQmp("a memory tree without RAM".into())) } else { Ok(found) }
}

/// Parses `Host virtual address for 0x0 (pc.ram) is 0x7fc247e00000`.
fn host_address(answer: &Value) -> Option<Hva> {
    let (_, address) = answer.as_str()?.trim().rsplit_once(" is 0x")?;
    u64::from_str_radix(address, 16).ok().map(Hva::new)
}

/// Likely places according to the process's mappings.
fn guess(process: &VmProcess, mappings: &[Mapping], notes: &mut Vec<String>) -> Vec<Placed> {
    let placed = match process.vmm {
        Vmm::Qemu => guess_of_qemu(&process.command_line, mappings),
        Vmm::Wideleaf => guess_of_our_own(mappings),
        Vmm::Other => guess_of_unknown(mappings),
        vmm => {
            let placed = other_vmms::guess(vmm, process.command_line.ram, mappings);
            placed.into_iter().map(|(name, range)| Placed { name, range, nodes: None }).collect()
        }
    };
    if placed.is_empty() {
        notes.push("no mapping of the process has the size of the guest's RAM".into());
    } else if process.vmm == Vmm::Qemu {
        notes.push(
            "guest-physical addresses are guessed from the mappings, without memory that was plugged in: a QMP socket \
             of its own would provide them"
                .into(),
        );
    } else if process.vmm == Vmm::Other {
        notes.push("the largest mapping is taken for the guest's RAM, from address 0".into());
    } else if process.vmm != Vmm::Wideleaf {
        notes.push("guest-physical addresses are guessed from the mappings, by the layout of its VMM".into());
    }
    placed
}

/// Size of the RAM below 4 GiB; the rest is above it. As QEMU 7.2 lays it out, according to its `info mtree`.
fn below_4g(machine: &str, ram: Bytes) -> Bytes {
    let (holds, else_below) = match machine {
        name if name.contains("q35") => (ram < mib(2816), gib(2)),
        name if name.contains("microvm") => (ram <= gib(3), gib(3)),
        _ => (ram < mib(3584), gib(3)),
    };
    if holds { ram } else { else_below }
}

/// Backends fill guest-physical addresses one after the other, with the hole between.
fn guess_of_qemu(line: &CommandLine, mappings: &[Mapping]) -> Vec<Placed> {
    let below = below_4g(&line.machine, line.ram);
    let mut taken: Vec<Hva> = Vec::new();
    let mut placed = Vec::new();
    let mut ram_offset = Bytes::ZERO;
    for backend in line.start_backends() {
        if let Some(start) = likely(&backend, mappings, &taken) {
            taken.push(start);
            placed.extend(
                halves(ram_offset, backend.bytes, below)
                    .into_iter()
                    .map(|(gpa, at)| (RamRange { gpa, hva: start + at }, backend.id.clone()))
                    .map(|(range, name)| Placed { name, range, nodes: backend.nodes }),
            );
        }
        // A backend that was not found keeps its place all the same.
        let next = ram_offset.checked_add(backend.bytes).filter(|next| *next <= ADDRESSES);
        let Some(next) = next else { break };
        ram_offset = next;
    }
    placed
}

/// The guest-physical ranges of `bytes` of RAM after the first `from`, each with its offset in these bytes.
fn halves(from: Bytes, bytes: Bytes, below: Bytes) -> Vec<(GpaRange, Bytes)> {
    let low = below.saturating_sub(from).min(bytes);
    let high = bytes - low;
    let above = gib(4) + (from + low).saturating_sub(below);
    let low_range = GpaRange::new(Gpa::new(from.get()), low).map(|gpa| (gpa, Bytes::ZERO));
    let high_range = GpaRange::new(Gpa::new(above.get()), high).map(|gpa| (gpa, low));
    [low_range, high_range].into_iter().flatten().filter(|(gpa, _)| gpa.bytes() > Bytes::ZERO).collect()
}

/// The mapping, or the adjacent mappings, of exactly the backend's size. QEMU maps backends downwards: of two equal
/// ones the first has the higher address.
fn likely(backend: &Backend, mappings: &[Mapping], taken: &[Hva]) -> Option<Hva> {
    let fits = |mapping: &Mapping| match (&mapping.path, &backend.path, backend.is_memfd) {
        (Some(path), _, true) => path.starts_with("/memfd:"),
        (Some(path), Some(file), _) => path.starts_with(file.as_str()),
        (None, None, false) => mapping.is_private,
        (Some(path), None, false) => path.starts_with("/dev/zero") || path.contains("qemu_back_mem"),
        (None, ..) => false,
    };
    let up_to = |first: usize| side_by_side(&mappings[first..]).take_while(|bytes| *bytes <= backend.bytes);
    let has_size = |first: usize| up_to(first).last() == Some(backend.bytes);
    let candidates = (0..mappings.len()).rev().filter(|first| {
        let mapping = &mappings[*first];
        mapping.is_writable && fits(mapping) && !taken.contains(&mapping.start) && has_size(*first)
    });
    candidates.map(|first| mappings[first].start).next()
}

/// The lengths of the first mapping, of the first two, … as long as each begins where the one before ends.
fn side_by_side(mappings: &[Mapping]) -> impl Iterator<Item = Bytes> + '_ {
    let start = mappings.first().map_or(Hva::new(0), |first| first.start);
    let mut end = start;
    mappings.iter().map_while(move |mapping| {
        let follows = mapping.start == end && mapping.is_writable;
        end = mapping.end();
        follows.then(|| end - start)
    })
}

/// Our own VMM: addresses are equal modulo 1 GiB, from 0 up to 3 GiB and from 4 GiB.
fn guess_of_our_own(mappings: &[Mapping]) -> Vec<Placed> {
    let run = |start: Hva| {
        let first = mappings.iter().position(|mapping| mapping.start == start)?;
        side_by_side(&mappings[first..]).last()
    };
    let is_ours = |mapping: &&Mapping| mapping.is_writable && mapping.start.is_aligned_to(PageSize::Giant1G);
    let starts = mappings.iter().filter(is_ours).map(|mapping| mapping.start);
    let Some((base, low)) = starts
        .filter_map(|start| Some((start, run(start)?)))
        .max_by_key(|(start, low)| (*low, std::cmp::Reverse(*start)))
    else {
        return Vec::new();
    };
    let high = base.checked_add(gib(4)).and_then(|start| Some((start, run(start)?)));
    let parts = [Some((Gpa::new(0), base, low.min(gib(3)))), high.map(|(hva, bytes)| (Gpa::new(4 << 30), hva, bytes))];
    let placed = |(gpa, hva, bytes)| {
        Some(Placed { name: "ram".into(), range: RamRange { gpa: GpaRange::new(gpa, bytes)?, hva }, nodes: None })
    };
    parts.into_iter().flatten().filter_map(placed).collect()
}

/// Guess for any other VMM.
fn guess_of_unknown(mappings: &[Mapping]) -> Vec<Placed> {
    let largest = mappings.iter().filter(|mapping| mapping.is_writable).max_by_key(|mapping| mapping.bytes);
    let placed = |mapping: &Mapping| {
        let gpa = GpaRange::new(Gpa::new(0), mapping.bytes)?;
        Some(Placed {
            name: mapping.path.clone().unwrap_or_else(|| "ram".into()),
            range: RamRange { gpa, hva: mapping.start },
            nodes: None,
        })
    };
    largest.and_then(placed).into_iter().collect()
}

/// Mappings of a part.
fn mapped_in<'a>(part: &Placed, mappings: &'a [Mapping]) -> impl Iterator<Item = &'a Mapping> {
    let (start, end) = (part.range.hva, part.range.hva + part.range.gpa.bytes());
    mappings.iter().filter(move |mapping| mapping.start < end && start < mapping.end())
}

/// Cuts a part where the mapping changes. Unmapped addresses are not RAM.
fn cut(part: &Placed, mappings: &[Mapping], is_thp_off: bool, is_guess: bool) -> Vec<RamPiece> {
    let mut pieces: Vec<RamPiece> = Vec::new();
    let end = part.range.hva + part.range.gpa.bytes();
    for mapping in mapped_in(part, mappings) {
        let (from, to) = (mapping.start.max(part.range.hva), mapping.end().min(end));
        let start = part.range.gpa.start() + (from - part.range.hva);
        let Some(gpa) = GpaRange::new(start, to - from) else { continue };
        let (range, kind) = (RamRange { gpa, hva: from }, kind(mapping));
        let never_huge = never_huge(range, kind, mapping, is_thp_off);
        match pieces.last_mut() {
            Some(last)
                if last.kind == kind
                    && last.never_huge == never_huge
                    && last.range.hva + last.range.gpa.bytes() == from =>
            {
                let bytes = last.range.gpa.bytes() + gpa.bytes();
                last.range.gpa = GpaRange::new(last.range.gpa.start(), bytes).expect("it ends where a range ends");
            }
            _ => {
                let (name, nodes) = (part.name.clone(), part.nodes);
                pieces.push(RamPiece { name, range, kind, never_huge, is_guess, nodes });
            }
        }
    }
    pieces
}

fn kind(mapping: &Mapping) -> RamKind {
    let is_of_the_kernel = |path: &str| ["/memfd:", "/dev/zero", "/sysv"].iter().any(|name| path.starts_with(name));
    match (&mapping.path, mapping.kernel_page) {
        (_, page) if page == PageSize::Giant1G.bytes() => RamKind::Hugetlb(PageSize::Giant1G),
        (_, page) if page == PageSize::Huge2M.bytes() => RamKind::Hugetlb(PageSize::Huge2M),
        (None, _) => RamKind::Anonymous,
        (Some(_), _) if mapping.is_private => RamKind::File,
        (Some(path), _) if is_of_the_kernel(path) || mapping.file_system.as_deref() == Some("tmpfs") => RamKind::Shmem,
        (Some(_), _) => RamKind::File,
    }
}

fn never_huge(range: RamRange, kind: RamKind, mapping: &Mapping, is_thp_off: bool) -> Option<NeverHuge> {
    const HUGE: u64 = PageSize::Huge2M.bytes().get();
    let off = |address: u64| Bytes::new(range.hva.get().wrapping_sub(address) % HUGE);
    let in_file = mapping.offset.get().wrapping_add((range.hva - mapping.start).get());
    match (kind, &mapping.path) {
        (RamKind::Hugetlb(_), _) => None,
        (RamKind::File, Some(_)) if mapping.is_private => Some(NeverHuge::PrivateFile),
        (RamKind::File, path) => Some(NeverHuge::OnDisk(path.clone().unwrap_or_default())),
        _ if !is_congruent(range.gpa.start(), range.hva, PageSize::Huge2M) => {
            Some(NeverHuge::Address(off(range.gpa.start().get())))
        }
        (RamKind::Shmem, _) if off(in_file) > Bytes::ZERO => Some(NeverHuge::FileOffset(off(in_file))),
        _ if mapping.is_kept_small => Some(NeverHuge::NoHugePage),
        _ if is_thp_off => Some(NeverHuge::ThpOff),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::tests::fake_places;
    use crate::process::tests::add_process;
    use proptest::prelude::*;

    fn mapping(start: u64, bytes: Bytes, path: Option<&str>) -> Mapping {
        Mapping {
            start: Hva::new(start),
            bytes,
            offset: Bytes::ZERO,
            is_writable: true,
            is_private: path.is_none(),
            path: path.map(str::to_owned),
            file_system: None,
            kernel_page: PageSize::Base4K.bytes(),
            is_kept_small: false,
            is_watched: false,
        }
    }

    fn line(text: &str) -> CommandLine {
        CommandLine::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    fn ranges(placed: &[Placed]) -> Vec<(&str, u64, u64, u64)> {
        placed
            .iter()
            .map(|part| {
                (part.name.as_str(), part.range.gpa.start().get(), part.range.gpa.bytes().get(), part.range.hva.get())
            })
            .collect()
    }

    #[test]
    fn ram_goes_on_above_the_hole_of_its_machine() {
        // Layout according to QEMU 7.2's memory tree for these machines and sizes.
        for (machine, ram, below) in [
            ("q35", mib(2815), mib(2815)),
            ("pc-q35-6.0", mib(2816), gib(2)),
            ("q35", gib(5), gib(2)),
            ("pc", mib(3583), mib(3583)),
            ("pc-i440fx-7.2", mib(3584), gib(3)),
            ("microvm", gib(3), gib(3)),
            ("microvm", mib(3073), gib(3)),
        ] {
            assert_eq!(below_4g(machine, ram), below, "{machine} {ram}");
        }
    }

    #[test]
    fn one_block_is_on_both_sides_of_the_hole() {
        let mappings = [mapping(0x7fa3_fde0_0000, mib(8), None), mapping(0x7fa4_07e0_0000, mib(3584), None)];
        let placed = guess_of_qemu(&line("qemu -M q35 -m 3584M"), &mappings);
        let (base, g) = (0x7fa4_07e0_0000_u64, 1 << 30);
        assert_eq!(ranges(&placed), [("ram", 0, 2 * g, base), ("ram", 4 * g, 3 * g / 2, base + 2 * g)]);
    }

    #[test]
    fn nodes_of_equal_size_are_taken_from_the_top() {
        let mappings = [mapping(0x7000_0000_0000, mib(512), None), mapping(0x7000_3000_0000, mib(512), None)];
        let text = "qemu -M q35 -m 1G -object memory-backend-ram,id=a,size=512M \
            -object memory-backend-ram,id=b,size=512M -numa node,memdev=a -numa node,memdev=b";
        let placed = guess_of_qemu(&line(text), &mappings);
        assert_eq!(
            ranges(&placed),
            [("a", 0, 512 << 20, 0x7000_3000_0000), ("b", 512 << 20, 512 << 20, 0x7000_0000_0000)]
        );
    }

    #[test]
    fn a_missing_node_leaves_the_others_at_their_addresses() {
        let mappings = [mapping(0x7000_0000_0000, mib(512), None)];
        let text = "qemu -M q35 -m 1G -object memory-backend-memfd,id=a,size=512M \
            -object memory-backend-ram,id=b,size=512M -numa node,memdev=a -numa node,memdev=b";
        assert_eq!(ranges(&guess_of_qemu(&line(text), &mappings)), [("b", 512 << 20, 512 << 20, 0x7000_0000_0000)]);
    }

    #[test]
    fn ram_beyond_the_hosts_memory_is_not_examined() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["firecracker"], &["anon_inode:kvm-vm"]);
        let smaps = "7f0000000000-7f0004000000 rw-p 00000000 00:00 0 \nSize: 65536 kB\n";
        std::fs::write(places.proc.join("7/smaps"), smaps).expect("written");
        let process = VmProcess::look(&places, 7).expect("it is there").expect("a VM");
        for (host_kib, pieces) in [(16 << 10, 1), ((16 << 10) - 1, 0)] {
            std::fs::write(places.proc.join("meminfo"), format!("MemTotal:  {host_kib} kB\n")).expect("written");
            let ram = map(&process, None);
            assert_eq!(ram.pieces.len(), pieces, "{:?}", ram.notes);
            assert_eq!(ram.notes.iter().any(|note| note.contains("too much to examine")), pieces == 0);
        }
    }

    #[test]
    fn a_mapping_that_was_cut_in_two_is_still_found() {
        let mappings = [mapping(0x7000_0000_0000, mib(100), None), mapping(0x7000_0640_0000, mib(156), None)];
        let placed = guess_of_qemu(&line("qemu -M q35 -m 256"), &mappings);
        assert_eq!(ranges(&placed), [("ram", 0, 256 << 20, 0x7000_0000_0000)]);
        assert!(guess_of_qemu(&line("qemu -M q35 -m 512"), &mappings).is_empty());
    }

    #[test]
    fn our_own_vmm_maps_at_a_multiple_of_a_gibibyte() {
        let base = 0x7e80_0000_0000_u64;
        let mappings = [
            mapping(0x5500_0000_0000, mib(1), None), // smaller, and aligned by chance
            mapping(base, gib(1), None),
            mapping(base + (1 << 30), gib(2), None),
            mapping(base + (4 << 30), mib(512), None),
        ];
        assert_eq!(
            ranges(&guess_of_our_own(&mappings)),
            [("ram", 0, 3 << 30, base), ("ram", 4 << 30, 512 << 20, base + (4 << 30))]
        );
    }

    fn verdict(mapping: &Mapping, gpa: u64, is_thp_off: bool) -> (RamKind, Option<NeverHuge>) {
        let range = GpaRange::new(Gpa::new(gpa), mapping.bytes).expect("fits");
        let part = Placed { name: "ram".into(), range: RamRange { gpa: range, hva: mapping.start }, nodes: None };
        let pieces = cut(&part, std::slice::from_ref(mapping), is_thp_off, false);
        (pieces[0].kind, pieces[0].never_huge.clone())
    }

    #[test]
    fn a_memfd_as_qemu_maps_it_can_never_be_huge_and_the_reason_names_a_remedy() {
        let (kind, never) =
            verdict(&mapping(0x7f39_27ff_f000, mib(128), Some("/memfd:memory-backend-memfd (deleted)")), 0, false);
        assert_eq!((kind, never.clone()), (RamKind::Shmem, Some(NeverHuge::Address(mib(2) - Bytes::new(4096)))));
        let text = never.expect("a verdict").to_string();
        assert!(text.contains("off by 2044 KiB") && text.contains("align=2M"), "{text}");
    }

    #[test]
    fn kinds_and_verdicts_follow_from_the_mapping() {
        let start = 0x7f00_0000_0000;
        let anonymous = mapping(start, mib(64), None);
        assert_eq!(verdict(&anonymous, 0, false), (RamKind::Anonymous, None));
        assert_eq!(verdict(&anonymous, 0, true), (RamKind::Anonymous, Some(NeverHuge::ThpOff)));
        let kept_small = Mapping { is_kept_small: true, ..anonymous };
        assert_eq!(verdict(&kept_small, 0, false).1, Some(NeverHuge::NoHugePage));
        let shared = mapping(start, mib(64), Some("/dev/zero (deleted)"));
        assert_eq!(verdict(&shared, 0, false), (RamKind::Shmem, None));
        let off = Mapping { offset: mib(1), ..shared };
        assert_eq!(verdict(&off, 0, false).1, Some(NeverHuge::FileOffset(mib(1))));
        let disk = mapping(start, mib(64), Some("/var/lib/libvirt/qemu/ram/1-a/pc.ram"));
        assert!(matches!(verdict(&disk, 0, false), (RamKind::File, Some(NeverHuge::OnDisk(_)))));
        let tmpfs = Mapping { file_system: Some("tmpfs".into()), ..disk };
        assert_eq!(verdict(&tmpfs, 0, false), (RamKind::Shmem, None));
        let pool = Mapping { kernel_page: mib(2), ..tmpfs };
        assert_eq!(verdict(&pool, 0x1000, true), (RamKind::Hugetlb(PageSize::Huge2M), None));
    }

    #[test]
    fn a_userfaultfd_on_a_part_of_the_ram_is_seen_in_the_mappings() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["firecracker"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        for (flags, is_watched) in [("rd wr mr", false), ("rd wr um", true), ("rd wr uw", true)] {
            let ram = "7f0000000000-7f0004000000 rw-p 00000000 00:00 0 \nSize: 65536 kB\n";
            let other = "7f0040000000-7f0040001000 rw-p 00000000 00:00 0 \nSize: 4 kB\nVmFlags: rd wr um\n";
            let text = format!("{ram}VmFlags: {flags}\n{other}");
            std::fs::write(places.proc.join("7/smaps"), text).expect("written");
            let map = map(&process, None);
            assert_eq!((map.pieces.len(), map.is_watched), (1, is_watched), "{flags}");
        }
    }

    #[test]
    fn a_part_is_cut_where_its_backing_changes_and_only_there() {
        let start = 0x7f00_0000_0000;
        let mut mappings = [
            mapping(start, mib(64), None),
            mapping(start + (64 << 20), mib(64), None),
            mapping(start + (128 << 20), mib(64), None),
        ];
        mappings[2].is_kept_small = true;
        let range = GpaRange::new(Gpa::new(0), mib(256)).expect("fits");
        let part = Placed { name: "ram".into(), range: RamRange { gpa: range, hva: Hva::new(start) }, nodes: None };
        let pieces = cut(&part, &mappings, false, true);
        let seen: Vec<_> = pieces
            .iter()
            .map(|piece| (piece.range.gpa.start().get(), piece.range.gpa.bytes(), piece.never_huge.is_some()))
            .collect();
        assert_eq!(seen, [(0, mib(128), false), (128 << 20, mib(64), true)]);
    }

    #[test]
    fn the_host_address_is_the_last_word() {
        let answer = Value::from("Host virtual address for 0x0 (pc.ram) is 0x7fc247e00000\r\n");
        assert_eq!(host_address(&answer), Some(Hva::new(0x7fc2_47e0_0000)));
        assert_eq!(host_address(&Value::from("No memory is mapped at address 0xd0000000\r\n")), None);
    }

    proptest! {
        #[test]
        fn any_command_line_gives_a_bounded_number_of_places(
            words in prop::collection::vec(
                "-m|-M|-object|-numa|-name|q35|[0-9]{1,21}[kMGTx]?|\
                memory-backend-ram,id=[ab],size=[0-9]{1,20}[MGT]?|node,memdev=[ab]|.{0,30}",
                0..12,
            ),
        ) {
            let line = CommandLine::parse(&words);
            let mappings = [mapping(0x7000_0000_0000, mib(64), None)];
            let placed = guess_of_qemu(&line, &mappings);
            prop_assert!(placed.len() <= 2 * line.start_backends().len());
        }

        #[test]
        fn halves_hold_all_bytes_once(from in 0_u64..8192, bytes in 1_u64..8192, below in 0_u64..4096) {
            let halves = halves(mib(from), mib(bytes), mib(below));
            prop_assert_eq!(halves.iter().map(|(gpa, _)| gpa.bytes()).sum::<Bytes>(), mib(bytes));
            prop_assert!(halves.windows(2).all(|pair| pair[0].0.end() <= pair[1].0.start()));
        }
    }
}
