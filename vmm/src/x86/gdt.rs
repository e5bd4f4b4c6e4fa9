//! Segments, as a descriptor in guest memory, and as the hidden part of a segment register that KVM receives.
//! (SDM vol. 3, 3.4.5 and 7.2.3; APM vol. 2, 4.8.)

use kvm_bindings::kvm_segment;

/// A segment, field by field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First address of the segment; ignored by 64-bit code and data.
    pub base: u64,
    /// Last offset of the segment, in bytes.
    pub limit: u32,
    /// Type field: 0xb code (readable, accessed), 0x3 data (writable, accessed), 0xb busy task segment.
    pub kind: u8,
    /// Ring that may use it: 0 for the kernel, 3 for user code.
    pub privilege: u8,
    /// Class of the segment.
    pub class: SegmentClass,
}

/// The class of a segment: only combinations of the descriptor's flags that exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentClass {
    /// Code of 64-bit mode.
    Code64,
    /// 32-bit code or data, and the data of 64-bit code.
    Flat32,
    /// A task segment (TSS).
    Task,
}

const ACCESSED_CODE: u8 = 0xb;
const ACCESSED_DATA: u8 = 0x3;
/// Type of a busy task segment: VM entry on VT-x accepts no other in TR (SDM vol. 3, 27.3.1.2).
const BUSY_TASK: u8 = 0xb;

impl Segment {
    /// Code of 64-bit mode.
    pub const fn code64(privilege: u8) -> Segment {
        Segment { base: 0, limit: u32::MAX, kind: ACCESSED_CODE, privilege, class: SegmentClass::Code64 }
    }

    /// Flat code of 32-bit mode.
    pub const fn code32() -> Segment {
        Segment { base: 0, limit: u32::MAX, kind: ACCESSED_CODE, privilege: 0, class: SegmentClass::Flat32 }
    }

    /// Flat data for any mode.
    pub const fn data(privilege: u8) -> Segment {
        Segment { base: 0, limit: u32::MAX, kind: ACCESSED_DATA, privilege, class: SegmentClass::Flat32 }
    }

    /// A task segment of `bytes` bytes at `base`.
    pub const fn task(base: u64, bytes: u32) -> Segment {
        Segment { base, limit: bytes - 1, kind: BUSY_TASK, privilege: 0, class: SegmentClass::Task }
    }

    /// Its eight bytes in a descriptor table. A task segment takes sixteen in 64-bit mode: see
    /// [`Segment::upper_half`].
    pub const fn descriptor(self) -> u64 {
        let is_system = matches!(self.class, SegmentClass::Task);
        let has_pages = self.limit > 0xf_ffff;
        let limit = if has_pages { self.limit >> 12 } else { self.limit } as u64;
        let long = matches!(self.class, SegmentClass::Code64) as u64;
        let big = matches!(self.class, SegmentClass::Flat32) as u64;
        (limit & 0xffff)
            | (self.base & 0xff_ffff) << 16
            | (self.kind as u64) << 40
            | (!is_system as u64) << 44
            | (self.privilege as u64) << 45
            | 1 << 47
            | (limit >> 16) << 48
            | long << 53
            | big << 54
            | (has_pages as u64) << 55
            | (self.base >> 24 & 0xff) << 56
    }

    /// The upper half of a system descriptor in 64-bit mode.
    pub const fn upper_half(self) -> u64 {
        self.base >> 32
    }

    /// The segment register after `selector` was loaded.
    pub const fn loaded_as(self, selector: u16) -> kvm_segment {
        kvm_segment {
            base: self.base,
            limit: self.limit,
            selector,
            type_: self.kind,
            present: 1,
            dpl: self.privilege,
            db: matches!(self.class, SegmentClass::Flat32) as u8,
            s: !matches!(self.class, SegmentClass::Task) as u8,
            l: matches!(self.class, SegmentClass::Code64) as u8,
            g: (self.limit > 0xf_ffff) as u8,
            avl: 0,
            unusable: 0,
            padding: 0,
        }
    }
}

/// Selector of 64-bit kernel code in the direct entry's table, for the fault stubs.
pub const DIRECT_KERNEL_CODE: u16 = 0x08;
/// Linux's `__BOOT_CS` (Linux boot protocol, "64-bit boot protocol"), also used for PVH.
pub const BOOT_CODE: u16 = 0x10;
/// Linux's `__BOOT_DS` selector.
pub const BOOT_DATA: u16 = 0x18;

/// The direct entry's table: null, kernel code, kernel data, user code (selector 0x1b), user data (0x23).
pub const DIRECT_TABLE: [u64; 5] = [
    0,
    Segment::code64(0).descriptor(),
    Segment::data(0).descriptor(),
    Segment::code64(3).descriptor(),
    Segment::data(3).descriptor(),
];

/// Linux's table for its 64-bit entry: two unused entries, code, data.
pub const LINUX_TABLE: [u64; 4] = [0, 0, Segment::code64(0).descriptor(), Segment::data(0).descriptor()];

/// The table for PVH, on which its guests may not rely: two unused entries, 32-bit code, data.
pub const PVH_TABLE: [u64; 4] = [0, 0, Segment::code32().descriptor(), Segment::data(0).descriptor()];

const _: () = {
    use wideleaf_protocol::direct::{USER_CODE_SELECTOR, USER_DATA_SELECTOR};
    assert!(USER_CODE_SELECTOR >> 3 == 3 && USER_DATA_SELECTOR >> 3 == 4, "the table has these entries at 3 and 4");
    assert!(USER_CODE_SELECTOR & 3 == 3 && USER_DATA_SELECTOR & 3 == 3, "both selectors request ring 3");
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_well_known_numbers() {
        // The values in the table of every 64-bit kernel, with the accessed bit set.
        assert_eq!(Segment::code64(0).descriptor(), 0x00af_9b00_0000_ffff);
        assert_eq!(Segment::data(0).descriptor(), 0x00cf_9300_0000_ffff);
        assert_eq!(Segment::code64(3).descriptor(), 0x00af_fb00_0000_ffff);
        assert_eq!(Segment::data(3).descriptor(), 0x00cf_f300_0000_ffff);
        assert_eq!(Segment::code32().descriptor(), 0x00cf_9b00_0000_ffff);
    }

    #[test]
    fn a_task_segment_keeps_its_base_in_pieces() {
        let task = Segment::task(0x1234_5678_9abc_def0, 104);
        assert_eq!(task.descriptor(), 0x9a00_8bbc_def0_0067);
        assert_eq!(task.upper_half(), 0x1234_5678);
    }

    #[test]
    fn a_loaded_segment_matches_its_descriptor() {
        let code = Segment::code64(3).loaded_as(0x1b);
        assert_eq!((code.selector, code.dpl, code.l, code.db, code.g, code.s, code.type_), (0x1b, 3, 1, 0, 1, 1, 0xb));
        let task = Segment::task(0x3000, 104).loaded_as(0x28);
        assert_eq!((task.base, task.limit, task.s, task.g, task.type_), (0x3000, 0x67, 0, 0, 0xb));
    }
}
