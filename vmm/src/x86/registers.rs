//! The registers at each entry. Each function converts KVM's registers of a new vCPU into those of the entry, so
//! that unset values (above all the local APIC's address) stay as KVM made them.

use kvm_bindings::{kvm_fpu, kvm_regs, kvm_segment, kvm_sregs};
use wideleaf_policies::Gpa;
use wideleaf_protocol::direct::{RFLAGS, USER_CODE_SELECTOR, USER_DATA_SELECTOR};

use super::gdt::{BOOT_CODE, BOOT_DATA, DIRECT_TABLE, LINUX_TABLE, PVH_TABLE, Segment};
use super::layout::{EXCEPTION_VECTORS, GATE_BYTES, GDT, IDT, TASK_SEGMENT_BYTES, TASK_STATE_BYTES, task_segment};

/// CR0: protected mode (SDM vol. 3, 2.5).
pub const CR0_PE: u64 = 1 << 0;
/// CR0: `wait` and `fwait` obey TS.
pub const CR0_MP: u64 = 1 << 1;
/// CR0: the coprocessor is a 387, always one.
pub const CR0_ET: u64 = 1 << 4;
/// CR0: floating-point errors are exceptions, not an external interrupt.
pub const CR0_NE: u64 = 1 << 5;
/// CR0: the kernel obeys read-only pages.
pub const CR0_WP: u64 = 1 << 16;
/// CR0: paging is on.
pub const CR0_PG: u64 = 1 << 31;
/// CR4: 64-bit page table entries.
pub const CR4_PAE: u64 = 1 << 5;
/// CR4: SSE is available.
pub const CR4_OSFXSR: u64 = 1 << 9;
/// CR4: SSE errors are exceptions.
pub const CR4_OSXMMEXCPT: u64 = 1 << 10;
/// CR4: XSAVE and XCR0 are in use, and with them AVX.
pub const CR4_OSXSAVE: u64 = 1 << 18;
/// XCR0: the registers of the 387, SSE and AVX are enabled (SDM vol. 1, 13.3).
pub const XCR0_AVX: u64 = 0b111;
/// EFER: long mode is enabled.
pub const EFER_LME: u64 = 1 << 8;
/// EFER: long mode is active.
pub const EFER_LMA: u64 = 1 << 10;
/// The bit of RFLAGS that is always one.
const RFLAGS_ALWAYS: u64 = 1 << 1;
/// Selector of a task segment that is in no table: KVM, not the guest, loads TR.
const TASK_SELECTOR: u16 = 0x28;

/// General registers of the direct entry: RDI and RSI are its two arguments.
pub fn direct(entry: u64, boot: Gpa, vcpu: u32) -> kvm_regs {
    kvm_regs { rip: entry, rdi: boot.get(), rsi: u64::from(vcpu), rflags: RFLAGS, ..Default::default() }
}

/// System registers of the direct entry: 64-bit ring 3, paged. Ring 3 cannot enable AVX, so it is enabled here if the
/// guest `has_avx`.
pub fn direct_system(new: kvm_sregs, tables: Gpa, vcpu: u32, has_avx: bool) -> kvm_sregs {
    let data = Segment::data(3).loaded_as(USER_DATA_SELECTOR);
    let idt_bytes = EXCEPTION_VECTORS as u64 * GATE_BYTES;
    let mut sregs = long_mode(new, tables);
    if has_avx {
        sregs.cr4 |= CR4_OSXSAVE;
    }
    sregs.cs = Segment::code64(3).loaded_as(USER_CODE_SELECTOR);
    set_data_segments(&mut sregs, data);
    sregs.tr = Segment::task(task_segment(vcpu).get(), TASK_SEGMENT_BYTES as u32).loaded_as(TASK_SELECTOR);
    set_gdt(&mut sregs, size_of_val(&DIRECT_TABLE));
    sregs.idt.base = IDT.get();
    sregs.idt.limit = (idt_bytes - 1) as u16;
    sregs
}

/// General registers of Linux's 64-bit entry: RSI is the zero page (Linux boot protocol, "64-bit boot protocol").
pub fn linux64(entry: u64, zero_page: Gpa) -> kvm_regs {
    kvm_regs { rip: entry, rsi: zero_page.get(), rflags: RFLAGS_ALWAYS, ..Default::default() }
}

/// System registers of Linux's 64-bit entry: ring 0, paged, `__BOOT_CS` and `__BOOT_DS`.
pub fn linux64_system(new: kvm_sregs, tables: Gpa) -> kvm_sregs {
    let mut sregs = long_mode(new, tables);
    sregs.cs = Segment::code64(0).loaded_as(BOOT_CODE);
    set_data_segments(&mut sregs, Segment::data(0).loaded_as(BOOT_DATA));
    sregs.tr = Segment::task(0, TASK_STATE_BYTES as u32).loaded_as(TASK_SELECTOR);
    set_gdt(&mut sregs, size_of_val(&LINUX_TABLE));
    sregs
}

/// General registers of the PVH entry: EBX is the start info (Xen, docs/misc/pvh.pandoc).
pub fn pvh(entry: u32, start_info: Gpa) -> kvm_regs {
    kvm_regs { rip: u64::from(entry), rbx: start_info.get(), rflags: RFLAGS_ALWAYS, ..Default::default() }
}

/// System registers of the PVH entry: 32-bit protected mode, unpaged, flat segments.
pub fn pvh_system(new: kvm_sregs) -> kvm_sregs {
    let mut sregs = new;
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
    sregs.cs = Segment::code32().loaded_as(BOOT_CODE);
    set_data_segments(&mut sregs, Segment::data(0).loaded_as(BOOT_DATA));
    sregs.tr = Segment::task(0, TASK_STATE_BYTES as u32).loaded_as(TASK_SELECTOR);
    set_gdt(&mut sregs, size_of_val(&PVH_TABLE));
    sregs
}

/// Floating-point state as a C program expects it: all exceptions masked, extended precision (System V ABI, 3.2.3).
pub fn fpu() -> kvm_fpu {
    kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() }
}

fn long_mode(new: kvm_sregs, tables: Gpa) -> kvm_sregs {
    let mut sregs = new;
    sregs.cr0 = CR0_PE | CR0_MP | CR0_ET | CR0_NE | CR0_WP | CR0_PG;
    sregs.cr3 = tables.get();
    sregs.cr4 = CR4_PAE | CR4_OSFXSR | CR4_OSXMMEXCPT;
    sregs.efer = EFER_LME | EFER_LMA;
    sregs
}

fn set_data_segments(sregs: &mut kvm_sregs, data: kvm_segment) {
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
}

fn set_gdt(sregs: &mut kvm_sregs, bytes: usize) {
    sregs.gdt.base = GDT.get();
    sregs.gdt.limit = (bytes - 1) as u16;
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: Gpa = Gpa::new(0x20_0000);

    fn new_vcpu() -> kvm_sregs {
        kvm_sregs { apic_base: 0xfee0_0900, ..Default::default() }
    }

    #[test]
    fn the_direct_entry_is_64_bit_ring_3_with_port_rights() {
        let regs = direct(0x40_0000, Gpa::new(0x8000), 5);
        assert_eq!((regs.rip, regs.rdi, regs.rsi, regs.rflags), (0x40_0000, 0x8000, 5, 0x3202));
        let sregs = direct_system(new_vcpu(), TABLES, 5, false);
        assert_eq!((sregs.cs.selector, sregs.cs.dpl, sregs.cs.l, sregs.cs.db), (0x1b, 3, 1, 0));
        for data in [sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs] {
            assert_eq!((data.selector, data.dpl, data.type_), (0x23, 3, 3));
        }
        assert_eq!((sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer), (0x8001_0033, 0x20_0000, 0x620, 0x500));
        assert_eq!(direct_system(new_vcpu(), TABLES, 5, true).cr4, 0x4_0620);
    }

    #[test]
    fn vt_x_accepts_the_task_register_and_each_vcpu_has_its_own() {
        let sregs = direct_system(new_vcpu(), TABLES, 3, false);
        // Busy 64-bit TSS, present, not unusable, byte granularity (SDM vol. 3, 27.3.1.2).
        assert_eq!((sregs.tr.type_, sregs.tr.present, sregs.tr.unusable, sregs.tr.g, sregs.tr.s), (0xb, 1, 0, 0, 0));
        assert_eq!(sregs.tr.base, task_segment(3).get());
        assert_ne!(sregs.tr.base, direct_system(new_vcpu(), TABLES, 2, false).tr.base);
    }

    #[test]
    fn table_limits_end_with_the_tables() {
        let sregs = direct_system(new_vcpu(), TABLES, 0, false);
        assert_eq!((sregs.gdt.base, sregs.gdt.limit), (0x1000, 39));
        assert_eq!((sregs.idt.base, sregs.idt.limit), (0x2000, 511));
    }

    #[test]
    fn linux_starts_in_ring_0_with_its_boot_selectors() {
        let regs = linux64(0x100_0200, Gpa::new(0x7000));
        assert_eq!((regs.rip, regs.rsi, regs.rflags), (0x100_0200, 0x7000, 2));
        let sregs = linux64_system(new_vcpu(), TABLES);
        assert_eq!((sregs.cs.selector, sregs.cs.dpl, sregs.cs.l, sregs.ss.selector), (0x10, 0, 1, 0x18));
        assert_eq!(sregs.efer, 0x500);
    }

    #[test]
    fn pvh_starts_unpaged_in_32_bits() {
        let regs = pvh(0x10_0000, Gpa::new(0x6000));
        assert_eq!((regs.rip, regs.rbx, regs.rflags), (0x10_0000, 0x6000, 2));
        let sregs = pvh_system(new_vcpu());
        assert_eq!((sregs.cr0, sregs.cr4, sregs.efer), (0x11, 0, 0));
        assert_eq!((sregs.cs.db, sregs.cs.l, sregs.cs.limit), (1, 0, u32::MAX));
    }

    #[test]
    fn registers_that_no_entry_sets_keep_their_kvm_values() {
        assert_eq!(direct_system(new_vcpu(), TABLES, 0, false).apic_base, 0xfee0_0900);
        assert_eq!(linux64_system(new_vcpu(), TABLES).apic_base, 0xfee0_0900);
        assert_eq!(pvh_system(new_vcpu()).apic_base, 0xfee0_0900);
    }
}
