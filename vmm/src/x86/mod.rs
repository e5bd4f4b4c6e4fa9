//! The state of the guest's CPUs and memory at the entry.
//!
//! | entry | mode | data for the guest | registers |
//! |---|---|---|---|
//! | direct | 64 bits, ring 3, paged | [`wideleaf_protocol::DirectBoot`] | [`registers::direct`] |
//! | PVH | 32 bits, unpaged | [`start_info`] | [`registers::pvh`] |
//! | Linux | 64 bits, ring 0, paged | [`zero_page`] | [`registers::linux64`] |

pub mod acpi;
pub mod cpuid;
pub mod fault_report;
pub mod gdt;
mod hmat;
pub mod layout;
pub mod mp_table;
pub mod page_tables;
pub mod ports;
pub mod registers;
pub mod start_info;
pub mod zero_page;
