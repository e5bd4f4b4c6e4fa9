//! Sensor data at one instant: plain columns, one row a window, immutable once taken, the same from a live host and
//! from a recording.

use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use crate::bucket::{bucket_of, lowest_of};
use crate::huge_page_price::HugePagePrice;
use crate::units::{BASE_PAGES_PER_WINDOW, Bytes, Moment, PageSize, PerTenThousand, WindowIndex};
use crate::window_node::{NodeOfVm, TouchedFrom, WindowNode};

/// Identity of a VM on the host; rows and actions refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u32);

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vm {}", self.0)
    }
}

/// Page that backs a window in the host's page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backing {
    /// No page of the window is present.
    Unbacked,
    /// At least one base page is present and no huge page covers the window.
    Base4K,
    /// One huge page covers the window, mapped as such.
    Huge2M,
    /// The window is part of a giant page, mapped as such.
    Giant1G,
}

impl Backing {
    /// The page size, if there is a page.
    pub const fn page_size(self) -> Option<PageSize> {
        match self {
            Backing::Unbacked => None,
            Backing::Base4K => Some(PageSize::Base4K),
            Backing::Huge2M => Some(PageSize::Huge2M),
            Backing::Giant1G => Some(PageSize::Giant1G),
        }
    }

    /// Whether a page of at least 2 MiB covers the window.
    pub const fn is_large(self) -> bool {
        matches!(self, Backing::Huge2M | Backing::Giant1G)
    }
}

/// Leaf mappings of the second level by size: KVM's `pages_4k`, `pages_2m`, `pages_1g`. Totals per VM: KVM does not
/// report their windows, and they rise only when the guest touches memory again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MappingStats {
    /// Number of 4 KiB leaf entries.
    pub pages_4k: u64,
    /// Number of 2 MiB leaf entries.
    pub pages_2m: u64,
    /// Number of 1 GiB leaf entries.
    pub pages_1g: u64,
}

impl MappingStats {
    /// Guest memory that the mappings of one size cover.
    pub fn mapped(self, size: PageSize) -> Bytes {
        size.bytes()
            * match size {
                PageSize::Base4K => self.pages_4k,
                PageSize::Huge2M => self.pages_2m,
                PageSize::Giant1G => self.pages_1g,
            }
    }
}

/// Whether the guest touched a window in its latest samples, the newest in the lowest bit, and how often it touches
/// the window if the sensor measures that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AccessHistory {
    touched: u16,
    samples: u8,
    /// 0: unknown. Otherwise one more than the bucket of the touches per second: precise to 12.5 %, in a byte
    /// that was free.
    frequency: u8,
}

impl AccessHistory {
    /// Number of samples that a history keeps.
    pub const SAMPLES_MAX: u8 = 16;

    /// Largest number of touches per second; higher values are stored as this one.
    pub const TOUCHES_PER_S_MAX: u64 = 1 << 30;

    /// A history from its parts, as stored in a recording. Surplus samples are dropped, and so are
    /// touches beyond `samples`.
    pub const fn from_parts(touched: u16, samples: u8) -> AccessHistory {
        let samples = if samples > Self::SAMPLES_MAX { Self::SAMPLES_MAX } else { samples };
        let mask = if samples == Self::SAMPLES_MAX { u16::MAX } else { (1 << samples) - 1 };
        AccessHistory { touched: touched & mask, samples, frequency: 0 }
    }

    /// Returns the history with one more sample.
    #[must_use]
    pub const fn with(self, was_touched: bool) -> AccessHistory {
        let next = AccessHistory::from_parts(self.touched << 1 | was_touched as u16, self.samples + 1);
        AccessHistory { frequency: self.frequency, ..next }
    }

    /// Returns the history with the touch frequency, which the sensor computes from the times to the first touch.
    #[must_use]
    pub const fn with_touches_per_s(self, touches_per_s: Option<u64>) -> AccessHistory {
        let frequency = match touches_per_s {
            None => 0,
            Some(touches) if touches > Self::TOUCHES_PER_S_MAX => bucket_of(Self::TOUCHES_PER_S_MAX) as u8 + 1,
            Some(touches) => bucket_of(touches) as u8 + 1,
        };
        AccessHistory { frequency, ..self }
    }

    /// Touches of the window per second over its latest samples, from the time between the start of watching and
    /// the first touch; `None` if the sensor does not measure it. Touches in a burst count as one.
    pub const fn touches_per_s(self) -> Option<u64> {
        match self.frequency.checked_sub(1) {
            None => None,
            Some(bucket) => Some(lowest_of(bucket as u16)),
        }
    }

    /// One bit per sample, the newest lowest.
    pub const fn touched(self) -> u16 {
        self.touched
    }

    /// Number of samples, up to [`AccessHistory::SAMPLES_MAX`].
    pub const fn samples(self) -> u8 {
        self.samples
    }

    /// Result of the newest sample; `None` before the first.
    pub const fn was_touched(self) -> Option<bool> {
        if self.samples == 0 { None } else { Some(self.touched & 1 == 1) }
    }

    /// The share of samples that saw an access; `None` before the first.
    pub const fn rate(self) -> Option<PerTenThousand> {
        if self.samples == 0 {
            return None;
        }
        // In 32 bits, because this runs in the loop of every policy that uses accesses.
        Some(PerTenThousand::new(self.touched.count_ones() * 10_000 / self.samples as u32))
    }

    /// Number of the newest samples without a touch.
    pub const fn idle_samples(self) -> u8 {
        let idle = self.touched.trailing_zeros() as u8;
        if idle < self.samples { idle } else { self.samples }
    }

    /// Number of the newest samples that all saw a touch, or all saw none.
    pub const fn same_samples(self) -> u8 {
        // No bit above the samples is set.
        let touched = self.touched.trailing_ones() as u8;
        if touched > 0 { touched } else { self.idle_samples() }
    }
}

const _: () = assert!(bucket_of(AccessHistory::TOUCHES_PER_S_MAX) < u8::MAX as u16, "every frequency has a bucket");

/// Age and precision of a window's newest sample of accesses. Policies see how far to trust a history by these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SampleQuality {
    /// Age of the newest sample, in seconds, at most `u16::MAX`; 0 before the first.
    pub age_s: u16,
    /// Number of neighbouring windows that share the result, at most `u16::MAX`: 1 from a sensor that looks at each
    /// window, more from one that samples a page here and there in a region; 0 if that is not known.
    pub windows: u16,
}

impl SampleQuality {
    /// Largest number of windows of a shared result without a touch that still holds for each of them. Ten samples
    /// at random places miss one busy window of four with a probability of 0.75^10, 6 %.
    pub const WINDOWS_SHARED_MOST: u16 = 4;

    /// Quality of a sample taken `age` ago, of one result for `windows` windows.
    pub fn new(age: Duration, windows: u64) -> SampleQuality {
        let most = |number: u64| u16::try_from(number).unwrap_or(u16::MAX);
        SampleQuality { age_s: most(age.as_secs()), windows: most(windows) }
    }

    /// Whether a result without a touch says that this very window is idle.
    pub const fn is_of_this_window(self) -> bool {
        self.windows <= Self::WINDOWS_SHARED_MOST
    }
}

/// Page size with which the guest's own tables map a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GuestMapping {
    /// No sensor has looked, or only the guest's kernel maps the window, as it maps all memory.
    #[default]
    Unknown,
    /// No entry maps the window.
    Unmapped,
    /// Mapped by base pages.
    Base4K,
    /// Mapped by one huge page.
    Huge2M,
    /// Mapped by a part of a giant page.
    Giant1G,
    /// Mapped with several sizes, at several addresses.
    Mixed,
}

impl GuestMapping {
    /// All of them, in the order of the enum.
    pub const ALL: [GuestMapping; 6] = [
        GuestMapping::Unknown,
        GuestMapping::Unmapped,
        GuestMapping::Base4K,
        GuestMapping::Huge2M,
        GuestMapping::Giant1G,
        GuestMapping::Mixed,
    ];
}

/// A reading of a guest's own count of its work: a benchmark's progress line, or instructions of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestProgress {
    /// Number of the guest's phase, in any order. Counts of different phases do not compare.
    pub phase: u64,
    /// Units of work done in this phase so far, in the guest's own unit.
    pub done: u64,
    /// CPU time that the vCPUs have used so far: without waits, and without stolen time where the kernel knows it.
    pub cpu: Duration,
}

/// One row: the data of one window. Columns without sensor data stay as in [`WindowRow::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowRow {
    /// The window itself.
    pub window: WindowIndex,
    /// See [`VmSnapshot::resident`].
    pub resident: u16,
    /// See [`VmSnapshot::backing`].
    pub backing: Backing,
    /// See [`VmSnapshot::is_held`].
    pub is_held: bool,
    /// See [`VmSnapshot::ready_at`].
    pub ready_at: Moment,
    /// See [`VmSnapshot::access`].
    pub access: AccessHistory,
    /// See [`VmSnapshot::access_quality`].
    pub access_quality: SampleQuality,
    /// See [`VmSnapshot::written`].
    pub written: Option<u16>,
    /// See [`VmSnapshot::zero`].
    pub zero: Option<u16>,
    /// See [`VmSnapshot::guest_mapping`].
    pub guest_mapping: GuestMapping,
    /// See [`VmSnapshot::given_back`].
    pub given_back: u16,
    /// See [`VmSnapshot::node`].
    pub node: WindowNode,
    /// See [`VmSnapshot::touched_from`].
    pub touched_from: TouchedFrom,
}

impl WindowRow {
    /// A window of which only the host backing is known; not held, ready.
    pub const fn new(window: WindowIndex, resident: u16, backing: Backing) -> WindowRow {
        WindowRow {
            window,
            resident,
            backing,
            is_held: false,
            ready_at: Moment::START,
            access: AccessHistory::from_parts(0, 0),
            access_quality: SampleQuality { age_s: 0, windows: 0 },
            written: None,
            zero: None,
            guest_mapping: GuestMapping::Unknown,
            given_back: 0,
            node: WindowNode::Unknown,
            touched_from: TouchedFrom::Unknown,
        }
    }
}

/// One VM's windows, column by column; every column has one entry per entry of `windows`, which ascends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmSnapshot {
    /// VM that the windows belong to.
    pub vm: VmId,
    /// Indices of the windows.
    pub windows: Vec<WindowIndex>,
    /// Number of base pages present in the host, 0 to 512.
    pub resident: Vec<u16>,
    /// Page size with which the host backs the window.
    pub backing: Vec<Backing>,
    /// Whether the second level is held at 4 KiB by dirty logging on the window's memslot.
    pub is_held: Vec<bool>,
    /// Earliest moment for the next action on the window (after a refusal it backs off).
    pub ready_at: Vec<Moment>,
    /// Samples of the access sensor: whether the guest touched the window.
    pub access: Vec<AccessHistory>,
    /// Age and precision of the newest of these samples. Recordings do not keep it.
    pub access_quality: Vec<SampleQuality>,
    /// Number of base pages written during the last interval of the write sensor.
    pub written: Vec<Option<u16>>,
    /// Number of present base pages that held only zeroes when the zero sensor read them.
    pub zero: Vec<Option<u16>>,
    /// Page size of the guest's own mapping.
    pub guest_mapping: Vec<GuestMapping>,
    /// Number of base pages that the guest gave back and has not used again, present or not: a large page would
    /// take them again.
    pub given_back: Vec<u16>,
    /// NUMA node of the window's memory; unknown on a host with one node.
    pub node: Vec<WindowNode>,
    /// NUMA nodes from which the window is touched; unknown on a host with one node.
    pub touched_from: Vec<TouchedFrom>,
    /// NUMA nodes of the host, ascending; empty on a host with one node.
    pub nodes: Vec<NodeOfVm>,
    /// Largest number of given-back pages in a window that may still be promoted ([`crate::given_back`]).
    pub given_back_tolerated: u16,
    /// Share of the present memory that has to stay on large pages; zero where none is guaranteed.
    pub guarantee: PerTenThousand,
    /// KVM's totals, if there is a second level with counters.
    pub mapping: Option<MappingStats>,
    /// Readings of the guest's progress since the previous snapshot, oldest first; none if the guest reports none.
    pub progress: Vec<GuestProgress>,
}

impl VmSnapshot {
    /// An empty snapshot with room for `windows` rows.
    pub fn with_capacity(vm: VmId, windows: usize) -> VmSnapshot {
        VmSnapshot {
            vm,
            windows: Vec::with_capacity(windows),
            resident: Vec::with_capacity(windows),
            backing: Vec::with_capacity(windows),
            is_held: Vec::with_capacity(windows),
            ready_at: Vec::with_capacity(windows),
            access: Vec::with_capacity(windows),
            access_quality: Vec::with_capacity(windows),
            written: Vec::with_capacity(windows),
            zero: Vec::with_capacity(windows),
            guest_mapping: Vec::with_capacity(windows),
            given_back: Vec::with_capacity(windows),
            node: Vec::with_capacity(windows),
            touched_from: Vec::with_capacity(windows),
            nodes: Vec::new(),
            given_back_tolerated: 0,
            guarantee: PerTenThousand::new(0),
            mapping: None,
            progress: Vec::new(),
        }
    }

    /// Appends one row.
    ///
    /// # Panics
    /// If windows do not ascend, or the row contradicts itself: pages present without backing, or the reverse, or
    /// more pages than a window has.
    pub fn push(&mut self, row: WindowRow) {
        let WindowRow {
            window,
            resident,
            backing,
            is_held,
            ready_at,
            access,
            access_quality,
            written,
            zero,
            guest_mapping,
            given_back,
            node,
            touched_from,
        } = row;
        assert!(
            self.windows.last().is_none_or(|last| *last < window),
            "windows ascend: {window} after {:?}",
            self.windows.last()
        );
        let most = resident.max(given_back).max(written.unwrap_or(0)).max(zero.unwrap_or(0));
        assert!(most <= BASE_PAGES_PER_WINDOW, "{most} base pages in a window of {BASE_PAGES_PER_WINDOW}");
        assert_eq!(
            resident == 0,
            backing == Backing::Unbacked,
            "{window}: {resident} pages present, backing {backing:?}"
        );
        self.windows.push(window);
        self.resident.push(resident);
        self.backing.push(backing);
        self.is_held.push(is_held);
        self.ready_at.push(ready_at);
        self.access.push(access);
        self.access_quality.push(access_quality);
        self.written.push(written);
        self.zero.push(zero);
        self.guest_mapping.push(guest_mapping);
        self.given_back.push(given_back);
        self.node.push(node);
        self.touched_from.push(touched_from);
    }

    /// All columns of one row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn get(&self, row: usize) -> WindowRow {
        WindowRow {
            window: self.windows[row],
            resident: self.resident[row],
            backing: self.backing[row],
            is_held: self.is_held[row],
            ready_at: self.ready_at[row],
            access: self.access[row],
            access_quality: self.access_quality[row],
            written: self.written[row],
            zero: self.zero[row],
            guest_mapping: self.guest_mapping[row],
            given_back: self.given_back[row],
            node: self.node[row],
            touched_from: self.touched_from[row],
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.windows.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// Whether the guest gave back more of a window than is tolerated, so that a large page must not take it again.
    pub fn is_given_back(&self, row: usize) -> bool {
        self.given_back[row] > self.given_back_tolerated
    }

    /// The row of a window. Without a search where the windows have one gap at most, as RAM below and above 4 GiB has:
    /// those below the gap are as far from the first row as from the first window, those above as far from the last.
    pub fn row(&self, window: WindowIndex) -> Option<usize> {
        let (first, last) = (self.windows.first()?, self.windows.last()?);
        let from_first = window.get().checked_sub(first.get())? as usize;
        let from_last = last.get().checked_sub(window.get())? as usize;
        let below = Some(from_first).filter(|row| self.windows.get(*row) == Some(&window));
        let above = || (self.len() - 1).checked_sub(from_last).filter(|row| self.windows[*row] == window);
        below.or_else(above).or_else(|| self.windows.binary_search(&window).ok())
    }
}

/// Memory of the host, for policies that react to a shortage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Total memory of the host.
    pub total: Bytes,
    /// Memory available without swapping (`MemAvailable`, proc_meminfo(5)).
    pub available: Bytes,
    /// Number of free giant pages in the hugetlb pool.
    pub giant_pages_free: u64,
    /// Supply of huge pages.
    pub huge_pages: HugePages,
}

/// Supply of huge pages of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// The kernel gives huge pages to all that ask, by compaction if it must.
    #[default]
    Plenty,
    /// The kernel has refused one. A policy clears its own bids against those that are free.
    Scarce {
        /// Number of huge pages in blocks that have become free since.
        free: u64,
    },
    /// The bids of all VMs of the host were cleared together, because one of them was refused a huge page.
    Priced(HugePagePrice),
}

/// The sensor data of all VMs of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Memory of the host; `None` if no sensor measured it.
    pub host: Option<HostMemory>,
    /// One entry per VM, ascending by id.
    pub vms: Vec<VmSnapshot>,
}

impl Snapshot {
    /// The snapshot of one VM.
    pub fn vm(&self, vm: VmId) -> Option<&VmSnapshot> {
        self.vms.iter().find(|snapshot| snapshot.vm == vm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_found_below_and_above_gaps_and_in_none() {
        // One run, two with a gap between, three of which the middle one is found by search.
        let runs: [&[u64]; 5] = [&[5, 6, 7], &[0, 1, 2, 9, 10], &[3, 4, 8, 9, 10, 20], &[7], &[]];
        for windows in runs {
            let mut vm = VmSnapshot::with_capacity(VmId(0), windows.len());
            let indices = windows.iter().map(|window| WindowIndex::new(*window));
            indices.for_each(|window| vm.push(WindowRow::new(window, 512, Backing::Base4K)));
            for window in (0..25).chain([u64::MAX >> 30]) {
                let row = windows.iter().position(|one| *one == window);
                assert_eq!(vm.row(WindowIndex::new(window)), row, "{window} of {windows:?}");
            }
        }
    }

    #[test]
    fn the_list_of_guest_mappings_has_the_order_of_the_enum() {
        assert_eq!(GuestMapping::ALL.map(|mapping| mapping as usize), [0, 1, 2, 3, 4, 5]);
        assert_eq!(GuestMapping::Mixed as usize + 1, GuestMapping::ALL.len());
    }

    #[test]
    fn a_history_keeps_sixteen_samples_and_summarises_them() {
        let mut history = AccessHistory::default();
        assert_eq!((history.was_touched(), history.rate(), history.idle_samples()), (None, None, 0));
        history = history.with(true).with(true).with(false).with(false);
        assert_eq!((history.was_touched(), history.samples(), history.idle_samples()), (Some(false), 4, 2));
        assert_eq!(history.rate(), Some(PerTenThousand::of(1, 2)));
        let same = [AccessHistory::default(), history, history.with(true), history.with(true).with(true)];
        assert_eq!(same.map(AccessHistory::same_samples), [0, 2, 1, 2]);
        for _ in 0..20 {
            history = history.with(false);
        }
        assert_eq!((history.samples(), history.touched(), history.idle_samples()), (16, 0, 16));
        assert_eq!(AccessHistory::from_parts(0b1111, 2).touched(), 0b11);
    }

    #[test]
    fn a_result_for_many_windows_says_little_of_one() {
        let of = |windows| SampleQuality::new(Duration::from_secs(100_000), windows);
        assert_eq!(
            [0, 1, 4, 5, 1 << 20].map(|windows| of(windows).is_of_this_window()),
            [true, true, true, false, false]
        );
        assert_eq!((of(1).age_s, of(1 << 20).windows), (u16::MAX, u16::MAX), "both are cut off");
    }

    #[test]
    fn a_history_keeps_a_frequency_within_an_eighth_and_zero_differs_from_unknown() {
        let frequency = |touches| AccessHistory::default().with_touches_per_s(touches).with(true).touches_per_s();
        assert_eq!([None, Some(0), Some(7), Some(1000)].map(frequency), [None, Some(0), Some(7), Some(960)]);
        assert_eq!(frequency(Some(u64::MAX)), Some(AccessHistory::TOUCHES_PER_S_MAX));
        assert_eq!(size_of::<AccessHistory>(), 4, "a column of a terabyte is two megabytes");
    }
}
