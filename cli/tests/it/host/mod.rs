//! A made-up host in the view of an operator: a libvirt guest that is partly huge, a guest that can never be huge,
//! and one of ours.

use wideleaf_control::view::{
    ActionView, BackingView, Care, DaemonView, Explanation, Guarantee, GuestPagesView, MappingView, PageTablesView,
    RamView, Reason, SavedView, VmView, Vmm, WindowMap, WindowRange, WorkView,
};

const MIB: u64 = 1 << 20;

/// Guest pages of 128 windows.
const GUEST_PAGES: GuestPagesView =
    GuestPagesView { base_4k: 30, huge_2m: 64, giant_1g: 0, mixed: 2, unmapped: 32, unknown: 0 };

pub fn daemon() -> DaemonView {
    DaemonView {
        version: "0.1.0".into(),
        pid: 811,
        uptime_s: 60.0,
        vms: 3,
        copy_per_second: 2 << 30,
        cpu_share: 5_000,
        cpu_s: 0.5,
        host_free: 3 << 30,
        is_host_short: false,
        promotable: None,
    }
}

fn ram(kind: &str, bytes: u64) -> RamView {
    RamView {
        name: "pc.ram".into(),
        gpa: 0,
        bytes,
        hva: 0x7f00_0000_0000,
        kind: kind.into(),
        is_guess: false,
        never_huge: None,
    }
}

/// A guest of 256 MiB: a quarter is not backed yet, a quarter on base pages, half huge; its guarantee is 95 %.
pub fn web() -> VmView {
    let latest = ActionView { at_s: 3_661.0, gpa: 2 * MIB, mechanism: "collapse".into(), outcome: "done".into() };
    let mut work = WorkView { copied: 24 * MIB, latest: vec![latest], ..WorkView::default() };
    work.outcomes.entry("collapse".into()).or_default().insert("done".into(), 12);
    VmView {
        name: "web".into(),
        uuid: Some("0f4a6b53-9ad5-4b9e-8f2d-3c1d5a8f2b10".into()),
        pid: 4711,
        started_at: 123,
        vmm: Vmm::Qemu,
        cgroup: None,
        care: Care::Managed,
        policy: Some("coverage".into()),
        guarantee: Guarantee::Coverage(9_500),
        ram: vec![ram("anonymous", 256 * MIB)],
        backing: Some(BackingView {
            unbacked: 64 * MIB,
            base_4k: 64 * MIB,
            huge_2m: 128 * MIB,
            giant_1g: 0,
            misaligned: 0,
        }),
        scan_age_s: Some(72.4),
        mapping: Some(MappingView { pages_4k: 16_384, pages_2m: 64, pages_1g: 0 }),
        page_tables: Some(PageTablesView { process: Some(2 * MIB), second_level_of_host: Some(3 * MIB) }),
        numa: None,
        guest_pages: Some(GUEST_PAGES),
        saved: SavedView { swapped: Some(MIB), merged: None },
        work: Some(work),
        notes: Vec::new(),
    }
}

/// An unmanaged guest on a memfd with a mapping that is offset by 4 KiB.
pub fn mail() -> VmView {
    let never_huge = Some("it is mapped off by 4 KiB: start the guest with memory-backend-ram".into());
    VmView {
        name: "mail".into(),
        uuid: None,
        pid: 4812,
        care: Care::Unmanaged,
        policy: None,
        guarantee: Guarantee::BestEffort,
        ram: vec![RamView { never_huge, is_guess: true, ..ram("shmem", 512 * MIB) }],
        backing: Some(BackingView { unbacked: 0, base_4k: 512 * MIB, huge_2m: 0, giant_1g: 0, misaligned: 512 * MIB }),
        scan_age_s: Some(1.5),
        mapping: None,
        page_tables: None,
        guest_pages: None,
        work: None,
        notes: vec!["KVM's mapping sizes are missing: they need root".into()],
        ..web()
    }
}

/// A guest of `wideleaf run`, unmanaged, with half of its 4 GiB on giant pages.
pub fn gups() -> VmView {
    VmView {
        name: "gups".into(),
        uuid: None,
        pid: 99,
        vmm: Vmm::Wideleaf,
        cgroup: None,
        care: Care::LeftAlone { reason: "it is being saved".into() },
        policy: Some("giant".into()),
        guarantee: Guarantee::Coverage(5_000),
        ram: vec![ram("hugetlb", 4 << 30)],
        backing: Some(BackingView { unbacked: 2 << 30, base_4k: 0, huge_2m: 0, giant_1g: 2 << 30, misaligned: 0 }),
        work: None,
        ..web()
    }
}

pub fn vms() -> Vec<VmView> {
    vec![web(), mail(), gups()]
}

pub fn explanation() -> Explanation {
    let reason = |name: &str, windows, text: &str| Reason { name: name.into(), windows, text: text.into() };
    Explanation {
        name: "web".into(),
        windows: Some(128),
        huge: Some(64),
        guest_pages: Some(Box::new(GUEST_PAGES)),
        reasons: vec![
            reason("never_touched", 32, "the guest has never touched them: there is nothing to promote"),
            reason("holes", 32, "the balloon took some of their pages; `collapse-holes` would fill them"),
        ],
        scan_age_s: Some(72.4),
        notes: vec!["the budget said no 3 times".into()],
    }
}

/// 128 windows: 64 huge, the first 4 of them mapped in base pages; 32 base; 32 unbacked. Then 4 of a
/// giant page, far above.
pub fn windows() -> WindowMap {
    let range = |gpa, backing: String, second_level: String, heat: String| WindowRange {
        gpa,
        backing,
        second_level,
        heat,
        ..WindowRange::default()
    };
    let low = [("2", 64), ("4", 32), (".", 32)].map(|(window, times)| window.repeat(times)).concat();
    let mapped = format!("4444{}", &low[4..]);
    let heat = ["9", "5", "0", "?"].map(|heat| heat.repeat(32)).concat();
    WindowMap {
        name: "web".into(),
        ranges: vec![range(0, low, mapped, heat), range(4 << 30, "1111".into(), "1111".into(), "????".into())],
        scan_age_s: Some(72.4),
        ..WindowMap::default()
    }
}
