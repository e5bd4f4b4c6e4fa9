//! One look at a guest without a manager of ours: what backs its RAM, and the reasons for windows that are not
//! huge. It changes nothing: it reads pagemap and smaps and asks questions.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_control::view::{
    BackingView, Care, Explanation, Guarantee, MappingView, NumaView, PageTablesView, SavedView, VmView, Vmm, WindowMap,
};
use wideleaf_memory::deadline;
use wideleaf_memory::explain::{CannotBeHuge, WhyNot};
use wideleaf_memory::gate::{Gate as _, GateState, KeptHoles, LeftAlone};
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Host, HostError, PageRun};
use wideleaf_memory::sensors::host_backing::{HostBackingSensor, WindowBacking};
use wideleaf_memory::sensors::kernel_flags::merged_pages;
use wideleaf_memory::sensors::page_tables::{TableMemory, table_memory};
use wideleaf_memory::sensors::swapped::swapped;
use wideleaf_memory::{Paging, SecondLevel as _};
use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, Bytes, MappingStats, Moment, PageSize, WindowNode};

use crate::gate::GuestGate;
use crate::host_clock::HostClock;
use crate::monitor::Monitor;
use crate::numa;
use crate::process::{self, VmProcess};
use crate::ram::{self, RamKind, RamMap, RamPiece};
use crate::reasons::reasons;
use crate::second_level::{NOT_KNOWN, OutsideView, paging};
use crate::window_map::{self, About, Row};

/// Time that a survey of a small guest may take: a monitor that hangs takes two seconds. A large one takes longer.
const SURVEY_WITHIN: Duration = Duration::from_secs(10);

/// Note on the guests of `wideleaf run`.
const MANAGES_ITSELF: &str = "it is managed by its own process, `wideleaf run`";

/// Remedies for columns that a survey cannot have.
const ASK_ITSELF: &str = "give its `wideleaf run` a daemon (--daemon), or ask its --control-socket";
const ATTACH_IT: &str = "run `wideleaf attach`";

fn manages_itself(process: &VmProcess) -> bool {
    process.vmm == Vmm::Wideleaf
}

/// Result of one survey.
#[derive(Clone, Debug)]
pub struct Survey {
    process: VmProcess,
    ram: RamMap,
    /// Windows by piece of RAM.
    windows: Vec<Vec<WindowBacking>>,
    backing: Option<BackingView>,
    mapping: Option<MappingStats>,
    page_tables: Option<PageTablesView>,
    numa: Option<NumaView>,
    /// Nodes of the windows, as `windows`; none on a host with one node.
    nodes: Vec<Vec<WindowNode>>,
    saved: SavedView,
    left_alone: Option<LeftAlone>,
    keeps_holes: Option<KeptHoles>,
    notes: Vec<String>,
    /// Clock that began with the scan.
    clock: HostClock,
}

impl Survey {
    /// Takes a survey. `qmp`: a monitor of QEMU with no other client, which gives exact addresses and KVM's totals.
    /// Unavailable figures are a note, never an error. A process that does not answer within `SURVEY_WITHIN`, longer
    /// for a large one, has that note and nothing else.
    pub fn take(process: &VmProcess, qmp: Option<&Path>) -> Survey {
        if let Some(why) = &process.no_answer {
            return Survey::unseen(process, why);
        }
        let (of, qmp) = (process.clone(), qmp.map(Path::to_path_buf));
        let within = process.time_with_mappings(SURVEY_WITHIN);
        let looked = deadline::ask(process.key(), within, move || Survey::look(&of, qmp.as_deref()));
        looked.unwrap_or_else(|no_answer| Survey::unseen(process, &no_answer.to_string()))
    }

    /// The survey of a process that does not answer.
    fn unseen(process: &VmProcess, why: &str) -> Survey {
        Survey {
            process: process.clone(),
            ram: RamMap::default(),
            windows: Vec::new(),
            backing: None,
            mapping: None,
            page_tables: None,
            numa: None,
            nodes: Vec::new(),
            saved: SavedView::default(),
            left_alone: None,
            keeps_holes: None,
            notes: vec![format!("it {why}")],
            clock: HostClock::showing(Moment::START),
        }
    }

    fn look(process: &VmProcess, qmp: Option<&Path>) -> Survey {
        let mut notes: Vec<String> = process.descriptors.as_ref().err().map(ToString::to_string).into_iter().collect();
        let monitor = qmp.and_then(|path| {
            Monitor::of(process, path).map(Arc::new).map_err(|error| notes.push(error.to_string())).ok()
        });
        let ram = map(process, monitor.as_deref());
        notes.extend(ram.notes.iter().cloned());
        let mapping = OutsideView::of(process, monitor.as_ref()).map_err(|why| notes.push(why)).ok();
        let mapping = mapping.and_then(|kvm| kvm.mapping_stats().ok());
        let clock = HostClock::showing(Moment::START);
        let looked = if ram.pieces.is_empty() { None } else { Some(look(process, &ram)) };
        let looked = looked.and_then(|looked| looked.map_err(|error| notes.push(not_known(&error))).ok());
        let (windows, backing) = looked.unzip();
        let windows = windows.unwrap_or_else(|| vec![Vec::new(); ram.pieces.len()]);
        let gate = GuestGate::new(process.clone(), monitor);
        gate.mappings_say(ram.is_watched);
        let left_alone = match gate.state() {
            // Its own manager asks no gate, and has the userfaultfd that would close one.
            GateState::Closed(why) if !manages_itself(process) => Some(why),
            GateState::Closed(_) | GateState::Open | GateState::Gone => None,
        };
        notes.extend(manages_itself(process).then(|| MANAGES_ITSELF.to_owned()));
        notes.extend(left_alone.map(|why| format!("a manager would leave it alone for now: {why}")));
        let keeps_holes = gate.keeps_holes().filter(|_| !manages_itself(process));
        notes.extend(gate.note().filter(|_| !manages_itself(process)));
        let host = ProcessHost::open(process.pid).ok();
        let page_tables = host.as_ref().map(|host| tables_view(table_memory(host)));
        let numa = host.as_ref().and_then(|host| numa(host, &ram, &windows, &mut notes));
        let (numa, nodes) = numa.map_or((None, Vec::new()), |(view, nodes)| (Some(view), nodes));
        let saved = host.map(|host| saved(&host, &ram, &windows)).unwrap_or_default();
        let process = process.clone();
        notes.extend(unknown_savings(&saved, true).filter(|_| backing.is_some()));
        Survey {
            process,
            ram,
            windows,
            backing,
            mapping,
            page_tables,
            numa,
            nodes,
            saved,
            left_alone,
            keeps_holes,
            notes,
            clock,
        }
    }

    /// Full description of the VM.
    pub fn view(&self) -> VmView {
        VmView {
            name: self.process.name.clone(),
            uuid: self.process.uuid.clone(),
            pid: self.process.pid,
            started_at: self.process.started_at,
            vmm: self.process.vmm,
            cgroup: self.process.cgroup(),
            care: Care::Unmanaged,
            policy: None,
            guarantee: Guarantee::BestEffort,
            ram: self.ram.pieces.iter().map(RamPiece::view).collect(),
            backing: self.backing,
            scan_age_s: self.scan_age_s(),
            mapping: self.mapping.map(mapping_view),
            page_tables: self.page_tables,
            numa: self.numa.clone(),
            guest_pages: None,
            saved: self.saved,
            work: None,
            notes: self.notes.clone(),
        }
    }

    /// Time since the scan, in seconds; `None` where it failed.
    fn scan_age_s(&self) -> Option<f64> {
        self.clock.age_s(self.backing.map(|_| Moment::START))
    }

    /// The map of all its windows.
    pub fn windows(&self) -> WindowMap {
        let why = self.notes.iter().find(|note| note.starts_with(NOT_KNOWN)).map_or(NOT_KNOWN, String::as_str);
        let about = About {
            name: &self.process.name,
            clock: self.clock,
            totals: self.mapping.ok_or(why),
            is_shadowed: paging(&self.process.places) == Paging::Shadow,
            no_tables: None,
        };
        let row = |piece, (row, node): (&WindowBacking, WindowNode)| Row {
            node,
            ..Row::seen(row.window, row.backing, self.why_not(piece, row, false, WhyNot::Unmanaged))
        };
        let no_nodes = Vec::new();
        let nodes = self.nodes.iter().chain(std::iter::repeat(&no_nodes));
        let pieces = self.ram.pieces.iter().zip(&self.windows).zip(nodes);
        let of_piece = |((piece, rows), nodes): ((_, &Vec<WindowBacking>), &Vec<WindowNode>)| {
            let nodes = nodes.iter().copied().chain(std::iter::repeat(WindowNode::Unknown));
            rows.iter().zip(nodes).map(|known| row(piece, known)).collect()
        };
        let rows: Vec<Vec<Row>> = pieces.map(of_piece).collect();
        let mut map = window_map::of_rows(&about, &rows);
        (map.at_s, map.scan_age_s) = (self.clock.wall_s(Moment::START), self.scan_age_s());
        if map.ranges.is_empty() {
            map.notes.extend(self.notes.iter().cloned());
        } else {
            let remedy = if manages_itself(&self.process) { ASK_ITSELF } else { ATTACH_IT };
            map.notes.push(format!("heat and guest's pages: only a manager measures them: {remedy}"));
        }
        map
    }

    /// Reasons why windows are not huge.
    pub fn explanation(&self) -> Explanation {
        self.reasons(false, WhyNot::Unmanaged)
    }

    /// As [`Survey::explanation`], under a manager that may collapse shared memory or may not. `otherwise`: the
    /// reason for windows that have none of their own.
    pub(crate) fn reasons(&self, may_collapse_shared: bool, otherwise: WhyNot) -> Explanation {
        let rows = self
            .ram
            .pieces
            .iter()
            .zip(&self.windows)
            .flat_map(|(piece, rows)| rows.iter().map(move |row| (piece, row)));
        let (mut windows, mut huge, mut counts) = (0, 0, BTreeMap::new());
        for (piece, row) in rows {
            windows += 1;
            match self.why_not(piece, row, may_collapse_shared, otherwise) {
                None => huge += 1,
                Some(why) => *counts.entry(why).or_default() += 1,
            }
        }
        let (windows, huge) = self.backing.map(|_| (windows, huge)).unzip();
        Explanation {
            name: self.process.name.clone(),
            windows,
            huge,
            reasons: reasons(&counts),
            scan_age_s: self.scan_age_s(),
            guest_pages: None,
            notes: self.notes.iter().cloned().chain(self.numa.iter().flat_map(NumaView::explanation)).collect(),
        }
    }

    /// The strongest reason, in the manager's order; `None` for a window that is huge.
    fn why_not(&self, piece: &RamPiece, row: &WindowBacking, may_collapse: bool, otherwise: WhyNot) -> Option<WhyNot> {
        let is_partial = row.resident < BASE_PAGES_PER_WINDOW;
        let stalls = piece.kind == RamKind::Shmem && !may_collapse && !manages_itself(&self.process);
        if row.backing.is_large() {
            return None;
        }
        Some(match (&piece.never_huge, self.left_alone) {
            (Some(why), _) => WhyNot::CannotBeHuge(why.why()),
            _ if stalls => WhyNot::CannotBeHuge(CannotBeHuge::SharedStalls),
            _ if row.backing == Backing::Unbacked => WhyNot::NeverTouched,
            _ if manages_itself(&self.process) => WhyNot::ManagesItself,
            (None, Some(why)) => WhyNot::LeftAlone(why),
            _ if otherwise == WhyNot::PolicyNeverPromotes => otherwise,
            _ => match self.keeps_holes {
                Some(KeptHoles::Watched) if piece.kind == RamKind::Shmem => WhyNot::SharedWatched,
                Some(why) if is_partial => WhyNot::Holes(why),
                _ => otherwise,
            },
        })
    }
}

fn not_known(error: &HostError) -> String {
    format!("what backs its RAM is not known: {error} (needs {})", process::NEEDED_TO_LOOK)
}

/// RAM according to the monitor, or by a guess.
pub(crate) fn map(process: &VmProcess, monitor: Option<&Monitor>) -> RamMap {
    match monitor {
        Some(monitor) => {
            let asked = monitor.with(|qmp| Ok(ram::map(process, Some(qmp))));
            asked.unwrap_or_else(|_| ram::map(process, None))
        }
        None => ram::map(process, None),
    }
}

pub(crate) fn mapping_view(stats: MappingStats) -> MappingView {
    MappingView { pages_4k: stats.pages_4k, pages_2m: stats.pages_2m, pages_1g: stats.pages_1g }
}

pub(crate) fn tables_view(memory: TableMemory) -> PageTablesView {
    let TableMemory { process, second_level_of_host } = memory;
    PageTablesView { process: process.map(Bytes::get), second_level_of_host: second_level_of_host.map(Bytes::get) }
}

/// Memory of its process that is merged with equal memory, in bytes; `None` where the kernel does not tell.
pub(crate) fn merged(host: &ProcessHost) -> Option<u64> {
    merged_pages(host).ok().flatten().map(|pages| (PageSize::Base4K.bytes() * pages).get())
}

/// Reasons for unknown figures of saved memory. A process that does not answer is no reason of the kernel's.
pub(crate) fn unknown_savings(saved: &SavedView, answers: bool) -> impl Iterator<Item = String> {
    let swapped = "swapped memory is not known: swapped pages of shared memory are in no page table";
    let merged = "merged memory is not known: ksm_stat needs Linux 6.1 and the right to read the process";
    let notes = [(saved.swapped.is_none(), swapped), (saved.merged.is_none() && answers, merged)];
    notes.into_iter().filter(|(is_unknown, _)| *is_unknown).map(|(_, note)| note.to_owned())
}

fn saved(host: &ProcessHost, ram: &RamMap, windows: &[Vec<WindowBacking>]) -> SavedView {
    let of = |(piece, rows): (&RamPiece, &Vec<WindowBacking>)| {
        let resident: Vec<u16> = rows.iter().map(|row| row.resident).collect();
        swapped(host, piece.kind.backing(), &[piece.range], &resident).ok()?.bytes()
    };
    let swapped = ram.pieces.iter().zip(windows).map(of).sum::<Option<Bytes>>();
    SavedView { swapped: swapped.filter(|_| !ram.pieces.is_empty()).map(Bytes::get), merged: merged(host) }
}

fn numa(
    host: &ProcessHost,
    ram: &RamMap,
    windows: &[Vec<WindowBacking>],
    notes: &mut Vec<String>,
) -> Option<(NumaView, Vec<Vec<WindowNode>>)> {
    let pieces = ram.pieces.iter().zip(windows).map(|(piece, rows)| (piece.range, rows.as_slice()));
    numa::of_look(host, &pieces.collect::<Vec<_>>(), &ram.placed(), notes)
}

type Looked = (Vec<Vec<WindowBacking>>, BackingView);

/// Scans all RAM. A descriptor holds the process, so the result is of this process or an error.
fn look(process: &VmProcess, ram: &RamMap) -> Result<Looked, HostError> {
    let host = ProcessHost::open(process.pid)?;
    let mut sensor = HostBackingSensor::default();
    let (mut windows, mut backing, mut runs) = (Vec::new(), BackingView::default(), Vec::new());
    for piece in &ram.pieces {
        windows.push(sensor.sample(&host, piece.range, piece.kind.fixed_page())?.collect());
        runs.clear();
        host.scan(piece.range.hva, piece.range.gpa.bytes(), &mut runs)?;
        add(&mut backing, piece, &runs);
    }
    Ok((windows, backing))
}

/// Adds all bytes of a piece by what backs them.
pub(crate) fn add(backing: &mut BackingView, piece: &RamPiece, runs: &[PageRun]) {
    let (huge, base): (Vec<&PageRun>, Vec<&PageRun>) = runs.iter().partition(|run| run.is_huge);
    let sum = |runs: Vec<&PageRun>| runs.iter().map(|run| run.bytes.get()).sum::<u64>();
    let (huge, base) = (sum(huge), sum(base));
    backing.unbacked += piece.range.gpa.bytes().get().saturating_sub(huge + base);
    match piece.kind.fixed_page() {
        Some(PageSize::Giant1G) => backing.giant_1g += huge + base,
        Some(_) => backing.huge_2m += huge + base,
        None => {
            backing.huge_2m += huge;
            backing.base_4k += base;
        }
    }
    if piece.never_huge.as_ref().is_some_and(|why| why.is_misaligned()) {
        backing.misaligned += huge + base;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::tests::fake_places;
    use crate::process::tests::{add_process, end_of, hang};
    use crate::ram::NeverHuge;
    use crate::session::{Attached, Settings};
    use wideleaf_memory::RamRange;
    use wideleaf_policies::units::{kib, mib};
    use wideleaf_policies::{Gpa, GpaRange, Hva, WindowIndex};

    fn piece(gpa: u64, kind: RamKind, never_huge: Option<NeverHuge>) -> RamPiece {
        let range =
            RamRange { gpa: GpaRange::new(Gpa::new(gpa), mib(8)).expect("fits"), hva: Hva::new((1 << 40) + gpa) };
        RamPiece { name: "ram".into(), range, kind, never_huge, is_guess: false, nodes: None }
    }

    fn survey() -> Survey {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64", "-name", "web"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        let row = |index: u64, resident, backing| WindowBacking { window: WindowIndex::new(index), resident, backing };
        let windows = vec![
            vec![
                row(0, 512, Backing::Huge2M),
                row(1, 512, Backing::Base4K),
                row(2, 9, Backing::Base4K),
                row(3, 0, Backing::Unbacked),
            ],
            vec![row(4, 512, Backing::Base4K), row(5, 0, Backing::Unbacked)],
        ];
        let off = Some(NeverHuge::Address(kib(4)));
        let pieces = vec![piece(0, RamKind::Anonymous, None), piece(8 << 20, RamKind::Shmem, off)];
        let (ram, backing) = (RamMap { pieces, ..RamMap::default() }, Some(BackingView::default()));
        Survey {
            process,
            ram,
            windows,
            backing,
            mapping: None,
            page_tables: None,
            numa: None,
            nodes: Vec::new(),
            saved: SavedView::default(),
            left_alone: None,
            keeps_holes: Some(KeptHoles::GivenBack),
            notes: Vec::new(),
            clock: HostClock::showing(Moment::START),
        }
    }

    fn named_reasons(survey: &Survey) -> Vec<(String, u64)> {
        survey.explanation().reasons.into_iter().map(|reason| (reason.name, reason.windows)).collect()
    }

    #[test]
    fn every_window_is_huge_or_has_one_reason() {
        let survey = survey();
        let explanation = survey.explanation();
        assert_eq!((explanation.windows, explanation.huge), (Some(6), Some(1)));
        assert_eq!(explanation.reasons.iter().map(|reason| reason.windows).sum::<u64>(), 5);
        let expected = [("misaligned", 2), ("never_touched", 1), ("holes", 1), ("unmanaged", 1)];
        assert_eq!(named_reasons(&survey), expected.map(|(name, windows)| (name.to_owned(), windows)));
    }

    #[test]
    fn a_process_that_does_not_answer_has_a_row_with_that_note() {
        let (_folder, places) = fake_places();
        add_process(&places, 75, &["qemu-system-x86_64", "-name", "web"], &["anon_inode:kvm-vm"]);
        hang(&places, 75, "cmdline");
        let silent = VmProcess::look(&places, 75).expect("it is there").expect("it is a VM");
        let view = Survey::take(&silent, None).view();
        assert_eq!((view.name.as_str(), view.backing), ("75", None));
        assert!(view.notes[0].starts_with("it does not answer"), "{:?}", view.notes);
        let refused = Attached::start(silent, Settings::default()).err().expect("refused").to_string();
        assert!(refused.starts_with("process 75 does not answer"), "{refused}");
        end_of(&places, 75, "cmdline");
    }

    #[test]
    fn unreadable_figures_are_unknown_and_not_zero() {
        let unseen = Survey { backing: None, windows: vec![Vec::new(); 2], ..survey() };
        assert_eq!((unseen.view().backing, unseen.view().resident()), (None, None));
        let explanation = unseen.explanation();
        assert_eq!((explanation.windows, explanation.huge, explanation.reasons.len()), (None, None, 0));
    }

    #[test]
    fn a_policy_that_never_promotes_comes_before_reasons_that_only_a_policy_would_change() {
        let under = |otherwise| survey().reasons(false, otherwise).reasons.into_iter().map(|reason| reason.name);
        let never = under(WhyNot::PolicyNeverPromotes).collect::<Vec<_>>();
        assert_eq!(never, ["misaligned", "policy_never_promotes", "never_touched"]);
        assert!(under(WhyNot::NotChosen).any(|name| name == "not_chosen"));
    }

    #[test]
    fn a_guest_that_would_be_left_alone_has_that_reason_for_each_window() {
        let survey = Survey { left_alone: Some(LeftAlone::Pinned), keeps_holes: None, ..survey() };
        assert!(named_reasons(&survey).contains(&("left_alone_pinned".to_owned(), 2)));
        assert_eq!(survey.view().care, Care::Unmanaged);
    }

    #[test]
    fn windows_with_holes_and_shared_ones_wait_for_the_end_of_a_userfaultfd() {
        let mut survey = Survey { keeps_holes: Some(KeptHoles::Watched), ..survey() };
        survey.ram.pieces[1].never_huge = None;
        let reasons = |survey: &Survey| survey.reasons(true, WhyNot::NotChosen).reasons;
        let windows = |name: &str| reasons(&survey).iter().find(|why| why.name == name).map(|why| why.windows);
        let seen = ["holes_userfaultfd", "shared_userfaultfd", "not_chosen"].map(windows);
        assert_eq!(seen, [Some(1), Some(1), Some(1)]);
    }

    #[test]
    fn a_guest_with_a_manager_of_its_own_is_not_reported_as_being_saved() {
        let (_folder, places) = fake_places();
        add_process(
            &places,
            7,
            &["/usr/bin/wideleaf", "run", "gups"],
            &["anon_inode:kvm-vm", "anon_inode:[userfaultfd]"],
        );
        let process = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        let seen = Survey::take(&process, None);
        assert_eq!(seen.left_alone, None);
        assert!(seen.notes.iter().any(|note| note == MANAGES_ITSELF), "{:?}", seen.notes);
        let of_another = named_reasons(&survey());
        let own = named_reasons(&Survey { process, ..survey() });
        let named = |reasons: &[(String, u64)], name: &str| reasons.iter().any(|(reason, _)| reason == name);
        assert!(named(&own, "manages_itself") && !named(&own, "unmanaged"), "{own:?}");
        assert!(named(&of_another, "unmanaged"), "{of_another:?}");
    }

    #[test]
    fn the_map_shows_no_larger_mapping_than_kvm_has() {
        let with = |pages_2m| Survey { mapping: Some(MappingStats { pages_4k: 9, pages_2m, pages_1g: 0 }), ..survey() };
        let first = |survey: &Survey| survey.windows().ranges[0].clone();
        let unknown = first(&survey());
        assert_eq!(
            (unknown.backing.as_str(), unknown.second_level.as_str(), unknown.heat.as_str()),
            ("244.", "????", "????")
        );
        assert_eq!((unknown.state.as_str(), unknown.why.as_str()), ("lahe", "-DCB"));
        let notes = survey().windows().notes;
        assert!(
            notes.iter().any(|note| note.starts_with("second level: KVM's mapping sizes are not known")),
            "{notes:?}"
        );
        assert!(notes.iter().any(|note| note.ends_with("run `wideleaf attach`")), "{notes:?}");
        assert_eq!(first(&with(1)).second_level, "244.");
        assert_eq!(first(&with(0)).second_level, "444.");
        assert_eq!(survey().windows().ranges[1].gpa, 8 << 20);
    }

    #[test]
    fn bytes_are_counted_once_and_misaligned_ones_also_apart() {
        let runs = [
            PageRun { start: Hva::new(1 << 40), bytes: mib(2), is_huge: true },
            PageRun { start: Hva::new((1 << 40) + (4 << 20)), bytes: kib(8), is_huge: false },
        ];
        let mut backing = BackingView::default();
        add(&mut backing, &piece(0, RamKind::Anonymous, None), &runs);
        let expected =
            BackingView { unbacked: mib(6).get() - 8192, base_4k: 8192, huge_2m: 2 << 20, ..BackingView::default() };
        assert_eq!(backing, expected);
        let mut pool = BackingView::default();
        add(&mut pool, &piece(0, RamKind::Hugetlb(PageSize::Giant1G), None), &runs);
        assert_eq!((pool.giant_1g, pool.misaligned), ((2 << 20) + 8192, 0));
        add(&mut pool, &piece(0, RamKind::Shmem, Some(NeverHuge::FileOffset(kib(4)))), &runs);
        assert_eq!(pool.misaligned, (2 << 20) + 8192);
    }
}
