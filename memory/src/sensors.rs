//! Sources of measurements, one in each file. Each turns a kernel interface into plain columns or typed samples.

pub mod access;
pub mod access_regions;
pub mod access_sample;
pub(crate) mod compactions;
pub mod damon;
pub mod free_blocks;
pub mod guest_tables;
pub mod host_backing;
pub mod host_memory;
pub mod kernel_flags;
pub mod minor_faults;
pub mod numa_maps;
pub mod outside_heat;
pub mod page_tables;
pub mod resident;
pub mod share;
pub mod smaps;
pub mod swapped;
pub mod vcpu_nodes;
pub mod window_nodes;
pub mod written;
pub mod zero_pages;
