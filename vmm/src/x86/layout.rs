//! All guest addresses that the VMM chooses, with their reasons.
//!
//! ```text
//!   0x0000_0000  nothing: a guest's null pointer finds zeroes, and nothing of ours is overwritten through one
//!   0x0000_1000  GDT
//!   0x0000_2000  IDT and fault stubs          direct entry
//!   0x0000_3000  task segments, one per vCPU  direct entry
//!   0x0000_5000  fault stacks, one per vCPU   direct entry
//!   0x0000_6000  start info, modules, map     PVH
//!   0x0000_7000  zero page                    Linux
//!   0x0000_8000  DirectBoot                   direct entry
//!   0x0000_9000  command line
//!   0x0001_0000  page tables for the entry    Linux
//!   0x0009_fc00  MP table                     PVH, Linux; the kilobyte before the PC's 640 KiB
//!   0x000e_0000  ACPI tables                 PVH, Linux; where firmware has them
//!   0x0010_0000  images begin here at the earliest; the direct entry's page tables follow the image
//!   0xc000_0000  hole: no RAM up to 4 GiB     interrupt controllers, KVM's own pages
//!   0xd000_0000  registers of virtio devices, a page each
//!   0x1_0000_0000  the rest of RAM
//! ```

use wideleaf_policies::units::gib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};
use wideleaf_protocol::VCPUS_MAX;
use wideleaf_protocol::direct::DIRECT_BOOT_BYTES;

use super::ports::POWER_PORTS_LAST;
use crate::devices::virtio;

/// Address of the descriptor table. It has one page, because the first page stays empty.
pub const GDT: Gpa = Gpa::new(0x1000);
/// Interrupt descriptor table of the direct entry.
pub const IDT: Gpa = Gpa::new(0x2000);
/// Number of exceptions of the architecture (SDM vol. 3, 6.3.1): the vectors of the IDT.
pub const EXCEPTION_VECTORS: usize = 32;
/// Size of a 64-bit gate in bytes (SDM vol. 3, 6.14.1).
pub const GATE_BYTES: u64 = 16;
/// Address of the code that reports a fault to the VMM, one stub per vector; right behind the IDT.
pub const FAULT_STUBS: Gpa = Gpa::new(IDT.get() + EXCEPTION_VECTORS as u64 * GATE_BYTES);
/// Room for each stub in bytes; the code has at most 8.
pub const FAULT_STUB_BYTES: u64 = 16;
/// Task segments of the direct entry, one per vCPU.
pub const TASK_SEGMENTS: Gpa = Gpa::new(0x3000);
/// Size of a task segment without its port map, in bytes (SDM vol. 3, 7.7).
pub const TASK_STATE_BYTES: u64 = 104;
/// Size of its port map in bytes: one bit per port up to the last one that our guests write, and the required byte
/// of ones behind (SDM vol. 1, 18.5.2).
pub const PORT_MAP_BYTES: u64 = POWER_PORTS_LAST as u64 / 8 + 2;
/// Size of both in bytes.
pub const TASK_SEGMENT_BYTES: u64 = TASK_STATE_BYTES + PORT_MAP_BYTES;
/// Distance between task segments in bytes, so that none crosses a page.
pub const TASK_SEGMENT_STRIDE: u64 = 512;
/// Addresses of the stacks for fault reports, one per vCPU.
pub const FAULT_STACKS: Gpa = Gpa::new(0x5000);
/// Size of each in bytes: one frame of 7 words is pushed, and nothing returns.
pub const FAULT_STACK_BYTES: u64 = 256;
/// Address of PVH's start info.
pub const START_INFO: Gpa = Gpa::new(0x6000);
/// PVH's list of modules (the initrd), one entry.
pub const MODULE_LIST: Gpa = Gpa::new(0x6100);
/// Address of PVH's memory map.
pub const MEMORY_MAP: Gpa = Gpa::new(0x6200);
/// Linux's `boot_params`, one page.
pub const ZERO_PAGE: Gpa = Gpa::new(0x7000);
/// Address of the direct entry's [`wideleaf_protocol::DirectBoot`].
pub const DIRECT_BOOT: Gpa = Gpa::new(0x8000);
/// Address of the command line.
pub const CMDLINE: Gpa = Gpa::new(0x9000);
/// Longest command line in bytes, with its terminating zero: one page, twice Linux's limit (`COMMAND_LINE_SIZE`).
pub const CMDLINE_BYTES_MAX: u64 = 0x1000;
/// Page tables for Linux's 64-bit entry: one root, one table of giants, four tables of huge pages for 4 GiB.
pub const LINUX_PAGE_TABLES: Gpa = Gpa::new(0x1_0000);
/// MP table: the last kilobyte of the PC's 640 KiB is one of the places where Linux looks for it (MP specification 1.4,
/// section 4; arch/x86/kernel/mpparse.c).
pub const MP_TABLE: Gpa = Gpa::new(0x9_fc00);
/// ACPI tables: in the range where kernels look for them by default (ACPI 6.5, 5.2.5.1).
pub const ACPI: Gpa = Gpa::new(0xe_0000);
/// Room for the ACPI tables, in bytes.
pub const ACPI_BYTES_MAX: usize = 0x4000;
/// End of low RAM: above it are the PC's video memory and ROMs, which no guest uses as RAM.
pub const LOW_RAM_END: Gpa = Gpa::new(0xa_0000);
/// Lowest address of an image: below are our tables and the PC's legacy ranges.
pub const IMAGE_START_MIN: Gpa = Gpa::new(0x10_0000);

/// Start of the hole below 4 GiB. 3 GiB is a multiple of a giant page, so giants fit on both sides.
pub const HOLE_START: Gpa = Gpa::new(3 << 30);
/// Start of RAM behind the hole.
pub const HOLE_END: Gpa = Gpa::new(4 << 30);
/// Address of the IOAPIC, the same as in every PC (82093AA datasheet).
pub const IOAPIC: Gpa = Gpa::new(0xfec0_0000);
/// Address of the local APICs (SDM vol. 3, 10.4.1).
pub const LOCAL_APIC: Gpa = Gpa::new(0xfee0_0000);
/// A page table of KVM's own for unpaged guests on Intel CPUs without unrestricted guest mode;
/// KVM's default address.
pub const KVM_IDENTITY_MAP: Gpa = Gpa::new(0xfffb_c000);
/// Three pages of KVM's own for real mode on the same CPUs, right behind.
pub const KVM_TSS: Gpa = Gpa::new(0xfffb_d000);

const fn end(start: Gpa, bytes: u64) -> u64 {
    start.get() + bytes
}

const _: () = {
    let vcpus = VCPUS_MAX as u64;
    assert!(end(FAULT_STUBS, EXCEPTION_VECTORS as u64 * FAULT_STUB_BYTES) <= TASK_SEGMENTS.get(), "stubs before TSSs");
    assert!(end(TASK_SEGMENTS, vcpus * TASK_SEGMENT_STRIDE) <= FAULT_STACKS.get(), "one task segment per vCPU");
    assert!(TASK_SEGMENT_BYTES <= TASK_SEGMENT_STRIDE, "task segments do not overlap");
    assert!(end(FAULT_STACKS, vcpus * FAULT_STACK_BYTES) <= START_INFO.get(), "one fault stack per vCPU");
    assert!(end(MEMORY_MAP, 32 * 24) <= ZERO_PAGE.get(), "room for 32 entries of PVH's memory map");
    assert!(end(ZERO_PAGE, 0x1000) <= DIRECT_BOOT.get(), "boot_params is one page");
    assert!(end(DIRECT_BOOT, DIRECT_BOOT_BYTES as u64) <= CMDLINE.get(), "DirectBoot before the command line");
    assert!(end(CMDLINE, CMDLINE_BYTES_MAX) <= LINUX_PAGE_TABLES.get(), "command line before the page tables");
    assert!(end(LINUX_PAGE_TABLES, 6 * 0x1000) <= MP_TABLE.get(), "page tables before the MP table");
    assert!(MP_TABLE.get() + 1024 == LOW_RAM_END.get(), "Linux searches exactly this kilobyte");
    assert!(LOW_RAM_END.get() <= ACPI.get(), "ACPI tables are in the range of firmware");
    assert!(end(ACPI, ACPI_BYTES_MAX as u64) <= IMAGE_START_MIN.get(), "ACPI tables before the image");
    assert!(HOLE_START.is_aligned_to(PageSize::Giant1G) && HOLE_END.is_aligned_to(PageSize::Giant1G), "giants fit");
    assert!(KVM_IDENTITY_MAP.get() + 0x1000 == KVM_TSS.get(), "KVM's own pages do not overlap");
    let devices = virtio::DEVICES_MAX as u64 * virtio::REGISTERS.get();
    assert!(HOLE_START.get() <= virtio::FIRST.get() && end(virtio::FIRST, devices) <= IOAPIC.get(), "devices too");
    assert!(HOLE_START.get() < IOAPIC.get() && KVM_TSS.get() < HOLE_END.get(), "devices are in the hole");
};

/// The ranges of guest RAM of this size: `[0, 3 GiB)` and from 4 GiB up.
pub fn ram_ranges(memory: Bytes) -> Vec<GpaRange> {
    let below_hole = Bytes::new(memory.get().min(HOLE_START.get()));
    let above_hole = memory.saturating_sub(below_hole);
    [(Gpa::new(0), below_hole), (HOLE_END, above_hole)]
        .into_iter()
        .filter(|(_, bytes)| *bytes != Bytes::ZERO)
        .filter_map(|(start, bytes)| GpaRange::new(start, bytes))
        .collect()
}

/// The identity mappings of a directly started guest: its RAM and, if there are devices, their registers, extended
/// to whole pages of its tables. Ascending.
pub fn direct_mappings(ram: &[GpaRange], page: PageSize, has_devices: bool) -> Vec<GpaRange> {
    let start = virtio::FIRST.align_down(page);
    let end = (virtio::FIRST + Bytes::new(virtio::DEVICES_MAX as u64 * virtio::REGISTERS.get())).checked_align_up(page);
    let registers = end.and_then(|end| GpaRange::new(start, end - start)).filter(|_| has_devices);
    let (below, above) = ram.split_at(ram.partition_point(|range| range.end() <= start));
    below.iter().copied().chain(registers).chain(above.iter().copied()).collect()
}

/// The ranges that a guest may use as RAM: RAM without the PC's legacy ranges and our MP table. For the PVH
/// and Linux entries, where guests manage memory by a map.
pub fn usable_ram(memory: Bytes) -> Vec<GpaRange> {
    let mut usable = Vec::new();
    for range in ram_ranges(memory) {
        if range.start() != Gpa::new(0) || range.end() <= IMAGE_START_MIN {
            usable.push(range);
            continue;
        }
        usable.extend(GpaRange::new(Gpa::new(0), MP_TABLE - Gpa::new(0)));
        usable.extend(GpaRange::new(IMAGE_START_MIN, range.end() - IMAGE_START_MIN));
    }
    usable
}

/// Address of a vCPU's task segment.
pub fn task_segment(vcpu: u32) -> Gpa {
    TASK_SEGMENTS + Bytes::new(u64::from(vcpu) * TASK_SEGMENT_STRIDE)
}

/// The first address above the fault stack of a vCPU.
pub fn fault_stack_top(vcpu: u32) -> Gpa {
    FAULT_STACKS + Bytes::new((u64::from(vcpu) + 1) * FAULT_STACK_BYTES)
}

/// Smallest RAM of a guest: low RAM, and one megabyte for an image.
pub const MEMORY_MIN: Bytes = Bytes::new(2 << 20);
/// Largest RAM that the architecture's 52 physical bits can address (SDM vol. 3, 4.1.4).
pub const MEMORY_MAX: Bytes = Bytes::new((1 << 52) - gib(1).get());

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::mib;

    fn numbers(ranges: Vec<GpaRange>) -> Vec<(u64, u64)> {
        ranges.into_iter().map(|range| (range.start().get(), range.end().get())).collect()
    }

    #[test]
    fn ram_continues_behind_the_hole() {
        assert_eq!(numbers(ram_ranges(mib(512))), [(0, 512 << 20)]);
        assert_eq!(numbers(ram_ranges(gib(3))), [(0, 3 << 30)]);
        assert_eq!(numbers(ram_ranges(gib(3) + mib(2))), [(0, 3 << 30), (4 << 30, (4 << 30) + (2 << 20))]);
    }

    #[test]
    fn usable_ram_leaves_the_legacy_range_and_the_mp_table_out() {
        let usable = numbers(usable_ram(gib(4)));
        assert_eq!(usable, [(0, 0x9_fc00), (0x10_0000, 3 << 30), (4 << 30, 5 << 30)]);
    }

    #[test]
    fn stacks_and_task_segments_of_neighbours_touch_and_do_not_overlap() {
        assert_eq!(task_segment(1) - task_segment(0), Bytes::new(TASK_SEGMENT_STRIDE));
        assert_eq!(fault_stack_top(0), FAULT_STACKS + Bytes::new(FAULT_STACK_BYTES));
        assert!(fault_stack_top(VCPUS_MAX as u32 - 1) <= START_INFO);
    }
}
