//! What the market (`market.rs`) tells one VM. A snapshot contains it.

/// Price of a huge page for one VM, and what the VM may give back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugePagePrice {
    /// Benefit below which a window is not promoted, in the VM's own cycles per second; 0 while free pages suffice. At
    /// most the host's price: less where pages that the VM cannot spare serve its own buyers.
    pub cycles_per_s: u64,
    /// Number of windows that may give their huge page back now, for other VMs. Trades within the VM need no
    /// permission: each moves a page to a window that is served from one that is worth at most half of the price.
    pub may_vacate: u64,
    /// Number of huge pages that are free for all bidders, on the host or on the VM's NUMA node; `None` where that is
    /// not known. Those that other VMs may give back are not counted: a request before they have done so makes the
    /// kernel compact.
    pub free: Option<u64>,
}
