//! Memory of the page tables themselves: those of the VM's process (`VmPTE` of `/proc/PID/status`, proc_pid_status(5)),
//! and those of KVM (`SecPageTables` of `/proc/meminfo`, proc_meminfo(5), Linux 6.1).
//!
//! ```text
//!   guest RAM of 1 GiB on 4 KiB pages:  512 tables of 4 KiB in the process, as many in KVM
//!                   on 2 MiB pages:     1 table in each
//! ```
//!
//! The kernel counts KVM's tables for the whole host: all guests together, and the tables of IOMMUs on kernels that
//! count these there. It has no number for one VM. A huge page of anonymous memory keeps a spare table for a later
//! split, so `VmPTE` need not fall when a window becomes huge.

use wideleaf_policies::Bytes;

use crate::host::Host;
use crate::proc_fields::bytes_of;

/// Memory of page tables; `None` where the kernel does not tell it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableMemory {
    /// Page tables of the process that holds guest RAM.
    pub process: Option<Bytes>,
    /// Second-level page tables of the whole host, of all guests.
    pub second_level_of_host: Option<Bytes>,
}

/// Reads both numbers.
pub fn table_memory(host: &dyn Host) -> TableMemory {
    let number = |path: &str, name: &str| bytes_of(&host.read_text(path).ok()?, name);
    TableMemory {
        process: number("/proc/self/status", "VmPTE"),
        second_level_of_host: number("/proc/meminfo", "SecPageTables"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::kib;

    #[test]
    fn both_numbers_are_read_and_a_missing_malformed_or_unreadable_one_is_unknown() {
        let host = FakeHost::with_runs(Vec::new());
        assert_eq!(table_memory(&host), TableMemory::default(), "there are no files");
        host.set_text("/proc/self/status", "Name:\tqemu\nVmPTE:\t    2108 kB\nVmSwap:\t 0 kB\n");
        host.set_text("/proc/meminfo", "PageTables:      17284 kB\nSecPageTables:     1040 kB\n");
        let both = TableMemory { process: Some(kib(2108)), second_level_of_host: Some(kib(1040)) };
        assert_eq!(table_memory(&host), both);
        host.set_text("/proc/meminfo", "PageTables:      17284 kB\n");
        assert_eq!(table_memory(&host), TableMemory { second_level_of_host: None, ..both }, "before Linux 6.1");
        host.set_text("/proc/self/status", "VmPTE:\tmany kB\n");
        assert_eq!(table_memory(&host), TableMemory::default());
    }
}
