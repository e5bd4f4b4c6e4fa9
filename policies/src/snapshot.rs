//! What the sensors saw at one instant: plain columns, one row a window, immutable once taken, the same whether it
//! comes from a live host or from a recording.

use alloc::vec::Vec;
use core::fmt;

use crate::units::{BASE_PAGES_PER_WINDOW, Bytes, Moment, PageSize, WindowIndex};

/// Which VM of the host a row or an action belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u32);

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vm {}", self.0)
    }
}

/// What stands behind a window in the host's page tables.
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

/// Leaf mappings of the second level by size: KVM's `pages_4k`, `pages_2m`, `pages_1g`. Per VM; KVM does not say
/// which window they belong to, and they rise only when the guest touches memory again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MappingStats {
    /// Leaf entries of 4 KiB.
    pub pages_4k: u64,
    /// Leaf entries of 2 MiB.
    pub pages_2m: u64,
    /// Leaf entries of 1 GiB.
    pub pages_1g: u64,
}

impl MappingStats {
    /// How much guest memory the mappings of one size cover.
    pub fn mapped(self, size: PageSize) -> Bytes {
        size.bytes()
            * match size {
                PageSize::Base4K => self.pages_4k,
                PageSize::Huge2M => self.pages_2m,
                PageSize::Giant1G => self.pages_1g,
            }
    }
}

/// One VM's windows, column by column; every column has one entry per entry of `windows`, which ascends.
#[derive(Clone, Debug)]
pub struct VmSnapshot {
    /// Whose windows these are.
    pub vm: VmId,
    /// Which windows.
    pub windows: Vec<WindowIndex>,
    /// Base pages of the window that are present in the host, 0 to 512.
    pub resident: Vec<u16>,
    /// Page size the host backs the window with.
    pub backing: Vec<Backing>,
    /// Whether the second level is held at 4 KiB by dirty logging on the window's memslot.
    pub is_held: Vec<bool>,
    /// Not before this moment may the window be acted on again (it refused, and backs off).
    pub ready_at: Vec<Moment>,
    /// KVM's totals, where there is a second level that can be asked.
    pub mapping: Option<MappingStats>,
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
            mapping: None,
        }
    }

    /// Appends one row.
    ///
    /// # Panics
    /// Where windows do not ascend, or the row contradicts itself: pages present without backing, or the reverse.
    pub fn push(&mut self, window: WindowIndex, resident: u16, backing: Backing, is_held: bool, ready_at: Moment) {
        assert!(
            self.windows.last().is_none_or(|last| *last < window),
            "windows ascend: {window} after {:?}",
            self.windows.last()
        );
        assert!(resident <= BASE_PAGES_PER_WINDOW, "{resident} base pages in a window of {BASE_PAGES_PER_WINDOW}");
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
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.windows.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// The row of a window.
    pub fn row(&self, window: WindowIndex) -> Option<usize> {
        self.windows.binary_search(&window).ok()
    }
}

/// Everything the sensors saw of all VMs of the host.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// One entry per VM, ascending by id.
    pub vms: Vec<VmSnapshot>,
}

impl Snapshot {
    /// The part of one VM.
    pub fn vm(&self, vm: VmId) -> Option<&VmSnapshot> {
        self.vms.iter().find(|snapshot| snapshot.vm == vm)
    }
}
