//! VMs as text: one line each, all details of one, and the reasons why windows are not huge.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use comfy_table::{Cell, ContentArrangement};
use wideleaf_control::view::{
    BackingView, Care, DaemonView, Explanation, Guarantee, GuestPagesView, MappingView, PageTablesView, Quantiles,
    RamView, VmView, Vmm, WorkView,
};
use wideleaf_policies::PageSize;
use wideleaf_run::text::clean;

use super::amounts::{NAMED_MAX, NOTHING, old_scans};
pub use super::amounts::{UNKNOWN, bytes, known_bytes, percent, scanned};
use super::nodes;
use crate::table::{number, table};
use crate::vm_source::HostReport;

/// Number of latest actions that `wideleaf info` shows.
const ACTIONS_SHOWN: usize = 8;

/// Table of `wideleaf list`.
pub fn host(report: &HostReport) -> String {
    let mut out = format!("{}\n", clean(&report.source));
    if let Some(daemon) = &report.daemon {
        let _ = writeln!(out, "{}", daemon_line(daemon));
    }
    if report.vms.is_empty() {
        out.push_str("no VM runs on this host\n");
        write_notes(&mut out, &report.notes);
        return out;
    }
    let header = [
        "VM",
        "pid",
        "VMM",
        "care",
        "RAM",
        "resident",
        "on 2m+",
        "4k",
        "2m",
        "1g",
        "KVM 2m+",
        "misaligned",
        "swapped",
        "guarantee",
    ];
    // On a host with one node all memory is local.
    let has_nodes = report.vms.iter().any(|vm| vm.numa.is_some());
    let mut rows = table(&header.into_iter().chain(has_nodes.then_some("local")).collect::<Vec<_>>());
    rows.set_content_arrangement(ContentArrangement::Dynamic);
    for vm in &report.vms {
        rows.add_row(row(vm).into_iter().chain(has_nodes.then(|| number(nodes::local(vm)))));
    }
    let _ = writeln!(out, "{rows}");
    if let Some(old) = old_scans(report.vms.iter().map(|vm| (clean(&vm.name), vm.scan_age_s))) {
        let _ = writeln!(out, "  {old}");
    }
    for (note, names) in notes_of_all(&report.vms) {
        let _ = writeln!(out, "  {}: {}", together(&names, report.vms.len()), clean(note));
    }
    write_notes(&mut out, &report.notes);
    out
}

/// Each note once, with the names of its VMs: most notes are about the host.
fn notes_of_all(vms: &[VmView]) -> BTreeMap<&str, Vec<String>> {
    let mut notes: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for vm in vms {
        vm.notes.iter().for_each(|note| notes.entry(note).or_default().push(clean(&vm.name)));
    }
    notes
}

/// VMs that have a note, on a line that stays short on a host with many.
fn together(names: &[String], all: usize) -> String {
    match names.len() {
        many if many > NAMED_MAX && many == all => format!("all {all} VMs"),
        many if many > NAMED_MAX => format!("{} and {} more", names[..NAMED_MAX].join(", "), many - NAMED_MAX),
        _ => names.join(", "),
    }
}

fn row(vm: &VmView) -> [Cell; 14] {
    let of = |part: fn(&BackingView) -> u64| number(known_bytes(vm.backing.as_ref().map(part)));
    [
        Cell::new(clean(&vm.name)),
        number(vm.pid),
        Cell::new(vmm_name(vm.vmm)),
        Cell::new(care(vm)),
        number(known_bytes(ram(vm))),
        of(BackingView::resident),
        number(coverage(vm)),
        of(|backing| backing.base_4k),
        of(|backing| backing.huge_2m),
        of(|backing| backing.giant_1g),
        number(vm.mapping.as_ref().map_or(UNKNOWN.to_owned(), |mapping| percent(mapped_large(mapping)))),
        of(|backing| backing.misaligned),
        number(known_bytes(vm.saved.swapped)),
        Cell::new(guarantee(vm)),
    ]
}

/// Table of `wideleaf info`. `explanation`: where it is known, the windows by state are shown.
pub fn vm(vm: &VmView, explanation: Option<&Explanation>) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: &dyn Display| {
        let _ = writeln!(out, "{name:<16} {value}");
    };
    line("VM", &clean(&vm.name));
    if let Some(uuid) = &vm.uuid {
        line("UUID", &clean(uuid));
    }
    line("process", &format_args!("{}, {}", vm.pid, vmm_name(vm.vmm)));
    line("care", &care(vm));
    line("guarantee", &guarantee(vm));
    let of = |part: fn(&BackingView) -> u64| known_bytes(vm.backing.as_ref().map(part));
    let unknown = || UNKNOWN.to_owned();
    line("RAM", &known_bytes(ram(vm)));
    line("resident", &vm.backing.as_ref().map_or_else(unknown, |backing| resident(backing, vm.scan_age_s)));
    line("  4 KiB pages", &of(|backing| backing.base_4k));
    line("  2 MiB pages", &of(|backing| backing.huge_2m));
    line("  1 GiB pages", &of(|backing| backing.giant_1g));
    line("not present", &of(|backing| backing.unbacked));
    line("misaligned", &vm.backing.as_ref().map_or_else(unknown, misaligned));
    line("swapped out", &known_bytes(vm.saved.swapped));
    line("merged (KSM)", &known_bytes(vm.saved.merged));
    line("mapped by KVM", &vm.mapping.as_ref().map_or_else(unknown, mapping));
    line("page tables", &vm.page_tables.as_ref().map_or_else(unknown, page_tables));
    line("guest's pages", &vm.guest_pages.as_ref().map_or_else(unknown, guest_pages));
    if let Some(numa) = &vm.numa {
        line("NUMA", &nodes::line(numa));
    }
    if let Some(windows) = explanation.and_then(windows_line) {
        line("windows", &windows);
    }
    write_ram(&mut out, &vm.ram);
    if let Some(numa) = &vm.numa {
        nodes::write(&mut out, numa);
    }
    if let Some(work) = &vm.work {
        write_work(&mut out, work);
    }
    write_notes(&mut out, &vm.notes);
    out
}

fn write_ram(out: &mut String, ram: &[RamView]) {
    let mut rows = table(&["RAM block", "guest-physical", "size", "in its process", "kind"]);
    for block in ram {
        let guessed = if block.is_guess { " (guessed)" } else { "" };
        rows.add_row([
            Cell::new(clean(&block.name)),
            number(format_args!("{:#x}{guessed}", block.gpa)),
            number(bytes(block.bytes)),
            number(format_args!("{:#x}", block.hva)),
            Cell::new(clean(&block.kind)),
        ]);
    }
    let _ = writeln!(out, "\n{rows}");
    for block in ram {
        if let Some(why) = &block.never_huge {
            let _ = writeln!(out, "  {} at {:#x} can never be huge: {}", clean(&block.name), block.gpa, clean(why));
        }
    }
}

fn write_work(out: &mut String, work: &WorkView) {
    let mut rows = table(&["action", "outcome", "times"]);
    for (mechanism, outcomes) in &work.outcomes {
        for (outcome, times) in outcomes {
            rows.add_row([Cell::new(clean(mechanism)), Cell::new(clean(outcome)), number(times)]);
        }
    }
    if rows.row_count() > 0 {
        let _ = writeln!(out, "\n{rows}");
    }
    let mut line = |name: &str, value: &dyn Display| {
        let _ = writeln!(out, "{name:<16} {value}");
    };
    line("copied", &bytes(work.copied));
    line("bloat", &bytes(work.bloat));
    line("CPU time", &format_args!("{:.3} s, {:.3} s of it in actions", work.total_cpu_s, work.action_cpu_s));
    line("budget refused", &work.budget_refusals);
    if !work.by_kernel.is_empty() {
        line("by the kernel", &by_kernel(&work.by_kernel));
    }
    line("unavailable", &pauses(&work.unavailable));
    line("in page walks", &work.walk_share.map_or(UNKNOWN.to_owned(), |share| percent(Some(share))));
    for (sensor, times) in &work.sensor_failures {
        line("sensor failed", &format_args!("{} ({times} times)", clean(sensor)));
    }
    for action in work.latest.iter().rev().take(ACTIONS_SHOWN) {
        let _ = writeln!(out, "  {}", action_line(action));
    }
}

/// Windows that changed without the manager.
fn by_kernel(counts: &BTreeMap<String, u64>) -> String {
    let of = |name: &str| counts.get(name).copied().unwrap_or(0);
    let [at_fault, collapsed, split] = ["at_fault", "collapsed", "split"].map(of);
    format!(
        "{collapsed} windows made large by khugepaged or the VMM, {at_fault} large at the first touch, {split} split"
    )
}

/// One action: its time, place, mechanism and outcome.
pub fn action_line(action: &wideleaf_control::view::ActionView) -> String {
    let time = time_of_day(action.at_s);
    format!("{time} {:#011x} {} {}", action.gpa, clean(&action.mechanism), clean(&action.outcome))
}

/// Table of `wideleaf explain`.
pub fn explanation(explanation: &Explanation) -> String {
    let Explanation { reasons, guest_pages, notes, .. } = explanation;
    let mut out = format!("{}\n", clean(&huge_line(explanation)));
    if let Some(pages) = guest_pages {
        let _ = writeln!(out, "{}", guest_line(pages));
    }
    if !reasons.is_empty() {
        let mut rows = table(&["windows", "reason", "meaning and remedy"]);
        rows.set_content_arrangement(ContentArrangement::Dynamic);
        for reason in reasons {
            rows.add_row([number(reason.windows), Cell::new(clean(&reason.name)), Cell::new(clean(&reason.text))]);
        }
        let _ = writeln!(out, "{rows}");
    }
    write_notes(&mut out, notes);
    out
}

/// Number of large windows, and of the others by reason; `None` where the windows cannot be seen.
fn windows_line(explanation: &Explanation) -> Option<String> {
    let Explanation { windows, huge, reasons, .. } = explanation;
    let large = format!("{} of {} large", (*huge)?, (*windows)?);
    let others = reasons.iter().map(|reason| format!("{} {}", reason.windows, clean(&reason.name)));
    Some([large].into_iter().chain(others).collect::<Vec<_>>().join(", "))
}

/// Share of its memory in large pages, as a line.
pub fn huge_line(explanation: &Explanation) -> String {
    let Explanation { name, windows, huge, scan_age_s, .. } = explanation;
    match (huge, windows) {
        (Some(huge), Some(windows)) => {
            let share = percent(share_of(*huge, *windows));
            let scanned = scanned(*scan_age_s);
            format!("{name}: {huge} of {windows} windows are in large pages ({share}), {scanned}")
        }
        _ => format!("{name}: the share of its memory in large pages is unknown"),
    }
}

/// Page sizes of the guest's own tables, as a line.
pub fn guest_line(pages: &GuestPagesView) -> String {
    format!("the guest itself maps: {}", guest_pages(pages))
}

/// Windows by the guest's own page size, for sizes that occur.
fn guest_pages(pages: &GuestPagesView) -> String {
    let GuestPagesView { base_4k, huge_2m, giant_1g, mixed, unmapped, unknown } = *pages;
    let parts = [
        (huge_2m, "windows with 2 MiB"),
        (giant_1g, "with 1 GiB"),
        (base_4k, "with 4 KiB"),
        (mixed, "with several sizes"),
        (unmapped, "not mapped"),
        (unknown, "not sampled"),
    ];
    let told = parts.iter().enumerate().filter(|(first, (windows, _))| *first == 0 || *windows > 0);
    told.map(|(_, (windows, what))| format!("{windows} {what}")).collect::<Vec<_>>().join(", ")
}

/// State of a VM after a change: its manager and its guarantee.
pub fn care_line(vm: &VmView) -> String {
    format!("{} (process {}): {}, guarantee {}", clean(&vm.name), vm.pid, care(vm), guarantee(vm))
}

/// The daemon in one line.
pub fn daemon_line(daemon: &DaemonView) -> String {
    let DaemonView { version, pid, copy_per_second, cpu_share, host_free, is_host_short, .. } = daemon;
    let short = if *is_host_short { ": memory is short, promotions that need more are suspended" } else { "" };
    format!(
        "wideleafd {} (process {pid}), copies up to {}/s with up to {} of a core; {} free{short}",
        clean(version),
        bytes(*copy_per_second),
        percent(Some(*cpu_share)),
        bytes(*host_free)
    )
}

/// Manager of the VM, with its policy where known.
pub fn care(vm: &VmView) -> String {
    let policy = vm.policy.as_deref().map_or("managed".to_owned(), clean);
    match &vm.care {
        Care::Unmanaged if vm.vmm == Vmm::Wideleaf => "managed by its own process".to_owned(),
        Care::Unmanaged => "unmanaged".to_owned(),
        Care::Managed => policy,
        Care::Off => "off".to_owned(),
        Care::LeftAlone { reason } => format!("{policy}, left alone: {}", clean(reason)),
    }
}

fn guarantee(vm: &VmView) -> String {
    match (vm.guarantee, vm.is_guarantee_met()) {
        (Guarantee::BestEffort, _) => NOTHING.to_owned(),
        (wanted, Some(true)) => format!("{wanted} met"),
        (wanted, Some(false)) => format!("{wanted} MISSED"),
        (wanted, None) => wanted.to_string(),
    }
}

fn resident(backing: &BackingView, scan_age_s: Option<f64>) -> String {
    let (resident, share) = (bytes(backing.resident()), percent(backing.coverage()));
    format!("{resident}, {share} of it in large pages, {}", scanned(scan_age_s))
}

fn misaligned(backing: &BackingView) -> String {
    match backing.misaligned {
        0 => "nothing".to_owned(),
        some => format!("{}: none of it can be huge", bytes(some)),
    }
}

fn mapping(mapping: &MappingView) -> String {
    let MappingView { pages_4k, pages_2m, pages_1g } = mapping;
    let share = percent(mapped_large(mapping));
    format!("{pages_4k} of 4 KiB, {pages_2m} of 2 MiB, {pages_1g} of 1 GiB ({share} of the memory in large ones)")
}

fn page_tables(tables: &PageTablesView) -> String {
    let PageTablesView { process, second_level_of_host } = tables;
    let [process, of_host] = [process, second_level_of_host].map(|bytes| known_bytes(*bytes));
    format!("{process} of its process; {of_host} of KVM for all VMs of the host")
}

fn pauses(pauses: &Quantiles) -> String {
    let Quantiles { count, median_s, p99_s, max_s, .. } = pauses;
    let [median, p99, max] = [median_s, p99_s, max_s].map(|seconds| format!("{:.2} ms", seconds * 1e3));
    match count {
        0 => "never".to_owned(),
        _ => format!("{count} times, p50 {median}, p99 {p99}, max {max}"),
    }
}

fn write_notes(out: &mut String, notes: &[String]) {
    for note in notes {
        let _ = writeln!(out, "  {}", clean(note));
    }
}

/// Share of the memory mapped by KVM that it maps with 2 MiB or more, in ten-thousandths.
fn mapped_large(mapping: &MappingView) -> Option<u32> {
    let in_base_pages = |pages: u64, size: PageSize| pages.saturating_mul(size.bytes().pages(PageSize::Base4K));
    let large = in_base_pages(mapping.pages_2m, PageSize::Huge2M)
        .saturating_add(in_base_pages(mapping.pages_1g, PageSize::Giant1G));
    share_of(large, large.saturating_add(mapping.pages_4k))
}

/// A share in ten-thousandths; `None` if the whole is zero.
pub fn share_of(part: u64, whole: u64) -> Option<u32> {
    (u128::from(part) * 10_000).checked_div(u128::from(whole)).map(|share| share.min(10_000) as u32)
}

/// All RAM of a VM; `None` if none of it was found.
pub fn ram(vm: &VmView) -> Option<u64> {
    (!vm.ram.is_empty()).then(|| vm.ram.iter().map(|block| block.bytes).sum())
}

/// Share of present memory in large pages.
pub fn coverage(vm: &VmView) -> String {
    vm.backing.map_or(UNKNOWN.to_owned(), |backing| percent(backing.coverage()))
}

fn vmm_name(vmm: Vmm) -> &'static str {
    match vmm {
        Vmm::Qemu => "qemu",
        Vmm::Wideleaf => "wideleaf",
        Vmm::Firecracker => "firecracker",
        Vmm::CloudHypervisor => "cloud-hypervisor",
        Vmm::Crosvm => "crosvm",
        Vmm::Other => "other",
    }
}

/// Seconds since the epoch as a time of day, UTC.
fn time_of_day(at_s: f64) -> String {
    let seconds = at_s as u64 % 86_400;
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_of_many_vms_names_a_few_and_counts_the_rest() {
        let names = |count: usize| (1..=count).map(|n| format!("vm{n}")).collect::<Vec<_>>();
        assert_eq!(together(&names(2), 50), "vm1, vm2");
        assert_eq!(together(&names(4), 4), "vm1, vm2, vm3, vm4");
        assert_eq!(together(&names(49), 50), "vm1, vm2, vm3, vm4 and 45 more");
        assert_eq!(together(&names(50), 50), "all 50 VMs");
    }

    #[test]
    fn the_guests_own_pages_are_shown_without_sizes_that_do_not_occur() {
        let pages = GuestPagesView { base_4k: 3, unmapped: 61, ..GuestPagesView::default() };
        assert_eq!(guest_pages(&pages), "0 windows with 2 MiB, 3 with 4 KiB, 61 not mapped");
        let large = GuestPagesView { huge_2m: 512, giant_1g: 512, unknown: 1, ..GuestPagesView::default() };
        assert_eq!(guest_pages(&large), "512 windows with 2 MiB, 512 with 1 GiB, 1 not sampled");
    }

    #[test]
    fn windows_are_counted_by_reason_and_left_out_where_they_cannot_be_seen() {
        let reasons = [("never_touched", 32), ("holes", 1)];
        let reasons = reasons.map(|(name, windows)| wideleaf_control::view::Reason {
            name: name.into(),
            windows,
            text: String::new(),
        });
        let seen =
            Explanation { windows: Some(97), huge: Some(64), reasons: reasons.to_vec(), ..Explanation::default() };
        assert_eq!(windows_line(&seen).as_deref(), Some("64 of 97 large, 32 never_touched, 1 holes"));
        assert_eq!(windows_line(&Explanation::default()), None);
    }

    #[test]
    fn an_explanation_without_known_pages_has_no_number() {
        let unseen = Explanation { name: "web".into(), ..Explanation::default() };
        assert_eq!(explanation(&unseen), "web: the share of its memory in large pages is unknown\n");
    }
}
