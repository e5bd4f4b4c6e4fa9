//! The division of guest RAM into memslots, and the state of each.
//!
//! A memslot is the unit in which the second level can be held at 4 KiB (dirty logging is a flag of the slot), so
//! RAM is cut into many. Each costs one ioctl at the start: about 20 us, before the interrupt controllers exist.
//!
//! ```text
//!   RAM     [0 ............ 160M)        slot 0 [0,64M)  slot 1 [64M,128M)  slot 2 [128M,160M)
//!   1g RAM  [0 ............... 2G)       slot 0 [0,1G)   slot 1 [1G,2G)     no border inside a giant page
//! ```

use wideleaf_memory::RamRange;
use wideleaf_memory::second_level::{Slot, SlotId};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Bytes, GpaRange, Hva, PageSize};

/// Default size of a slot: 32 windows. Smaller slots would allow less memory to be held at 4 KiB at a time, and
/// cost more ioctls and a deeper search in KVM; mapping sizes were measured with 64 MiB.
pub const SLOT_BYTES_DEFAULT: Bytes = mib(64);

/// Default limit on the number of slots: 16 GiB of RAM at 64 MiB. Beyond it, slots grow larger than
/// [`SLOT_BYTES_DEFAULT`]. KVM would accept 32764, but each costs time at the start.
pub const SLOTS_BY_DEFAULT_MAX: u64 = 256;

/// A memslot, and the host memory behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memslot {
    /// Slot as the manager sees it.
    pub slot: Slot,
    /// Address of its memory in this process.
    pub hva: Hva,
}

/// The slot size for this amount of RAM, backed by pages of up to `largest_page` now or later. It is never smaller
/// than such a page, because KVM maps no page larger than its slot.
pub fn default_slot_bytes(ram: Bytes, largest_page: PageSize) -> Bytes {
    let mut bytes = if largest_page == PageSize::Giant1G { gib(1) } else { SLOT_BYTES_DEFAULT };
    while ram.get().div_ceil(bytes.get()) > SLOTS_BY_DEFAULT_MAX {
        bytes = bytes * 2;
    }
    bytes
}

/// Cuts RAM at multiples of `slot_bytes` and at the ends of its ranges. Slots are numbered from zero, by address.
pub fn cut(ranges: &[RamRange], slot_bytes: Bytes) -> Vec<Memslot> {
    assert!(slot_bytes != Bytes::ZERO, "a slot is not empty");
    let mut slots = Vec::new();
    for range in ranges {
        let mut at = range.gpa.start();
        while at < range.gpa.end() {
            let until_border = slot_bytes.get() - at.get() % slot_bytes.get();
            let bytes = Bytes::new(until_border.min((range.gpa.end() - at).get()));
            let Some(slot_range) = GpaRange::new(at, bytes) else { break };
            let id = SlotId(u32::try_from(slots.len()).unwrap_or(u32::MAX));
            slots.push(Memslot {
                slot: Slot { id, range: slot_range, is_dirty_logged: false },
                hva: range.hva + (at - range.gpa.start()),
            });
            at = at + bytes;
        }
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::Gpa;

    fn ram(start: Bytes, bytes: Bytes) -> RamRange {
        let gpa = GpaRange::new(Gpa::new(start.get()), bytes).unwrap();
        RamRange { gpa, hva: Hva::new(0x7f00_0000_0000) + start }
    }

    #[test]
    fn slots_partition_ram_and_keep_the_distance_to_host_addresses() {
        let ranges = [ram(Bytes::ZERO, mib(160)), ram(gib(4), mib(64))];
        let slots = cut(&ranges, mib(64));
        let cut_at: Vec<(u64, u64)> =
            slots.iter().map(|slot| (slot.slot.range.start().get(), slot.slot.range.bytes().get() >> 20)).collect();
        assert_eq!(cut_at, [(0, 64), (64 << 20, 64), (128 << 20, 32), (4 << 30, 64)]);
        for slot in &slots {
            assert_eq!(slot.hva.get() - slot.slot.range.start().get(), 0x7f00_0000_0000);
        }
        assert_eq!(slots[3].slot.id, SlotId(3));
    }

    #[test]
    fn borders_are_multiples_of_the_slot_size_even_if_ram_begins_inside_a_slot() {
        let slots = cut(&[ram(mib(32), mib(64))], mib(64));
        let starts: Vec<u64> = slots.iter().map(|slot| slot.slot.range.start().get() >> 20).collect();
        assert_eq!(starts, [32, 64]);
    }

    #[test]
    fn giant_pages_are_never_cut() {
        assert_eq!(default_slot_bytes(gib(2), PageSize::Giant1G), gib(1));
        assert_eq!(default_slot_bytes(gib(2), PageSize::Huge2M), mib(64));
    }

    #[test]
    fn large_guests_get_larger_slots_instead_of_more() {
        assert_eq!(default_slot_bytes(gib(16), PageSize::Base4K), mib(64));
        assert_eq!(default_slot_bytes(gib(17), PageSize::Base4K), mib(128));
        assert_eq!(default_slot_bytes(gib(1024), PageSize::Giant1G), gib(4));
    }
}
