//! The MP table, which tells a guest without ACPI of several CPUs, of the IOAPIC, and of its interrupt lines
//! (Intel, MultiProcessor specification 1.4, section 4).

use super::layout::{IOAPIC, LOCAL_APIC, MP_TABLE};

/// Number of interrupt lines, one to one with the IOAPIC's pins: the PC's, then our devices'. The latter are
/// edge-triggered and active high too, like lines of the ISA bus.
const LINES: u8 = 24;
/// Version 1.4 of the specification.
const SPECIFICATION: u8 = 4;
/// Version of the local APICs and the IOAPIC that KVM emulates.
const APIC_VERSION: u8 = 0x14;
const IOAPIC_VERSION: u8 = 0x11;
const POINTER_BYTES: usize = 16;
const HEADER_BYTES: usize = 44;
/// Room for the table, in bytes: one kilobyte.
pub const BYTES_MAX: usize = 1024;

/// The floating pointer and, right behind, the table: to be written at [`MP_TABLE`].
pub fn bytes(vcpus: u8) -> Vec<u8> {
    let entries = entries(vcpus);
    let mut table = Vec::with_capacity(BYTES_MAX);
    table.extend(b"PCMP");
    table.extend(((HEADER_BYTES + entries.iter().map(Vec::len).sum::<usize>()) as u16).to_le_bytes());
    table.extend([SPECIFICATION, 0]);
    table.extend(b"WIDELEAFvmm         ");
    table.extend([0; 6]);
    table.extend((entries.len() as u16).to_le_bytes());
    table.extend((LOCAL_APIC.get() as u32).to_le_bytes());
    table.extend([0; 4]);
    debug_assert_eq!(table.len(), HEADER_BYTES);
    table.extend(entries.concat());
    table[7] = checksum(&table);

    let mut bytes = Vec::with_capacity(BYTES_MAX);
    bytes.extend(b"_MP_");
    bytes.extend((MP_TABLE.get() as u32 + POINTER_BYTES as u32).to_le_bytes());
    bytes.extend([1, SPECIFICATION, 0, 0, 0, 0, 0, 0]);
    bytes[10] = checksum(&bytes);
    bytes.extend(table);
    assert!(bytes.len() <= BYTES_MAX, "{vcpus} vcpus need {} bytes", bytes.len());
    bytes
}

/// CPUs, the bus, the IOAPIC, its lines, and the two local lines, in the order of the specification.
fn entries(vcpus: u8) -> Vec<Vec<u8>> {
    const PROCESSOR: u8 = 0;
    const BUS: u8 = 1;
    const IO_APIC: u8 = 2;
    const IO_INTERRUPT: u8 = 3;
    const LOCAL_INTERRUPT: u8 = 4;
    const ENABLED: u8 = 1;
    const BOOT_PROCESSOR: u8 = 2;
    const EXTERNAL: u8 = 3;
    const NMI: u8 = 1;
    const ALL_APICS: u8 = 0xff;
    let ioapic = vcpus;

    let mut entries = Vec::new();
    for vcpu in 0..vcpus {
        let flags = if vcpu == 0 { ENABLED | BOOT_PROCESSOR } else { ENABLED };
        let mut entry = vec![PROCESSOR, vcpu, APIC_VERSION, flags];
        // Family 6; FPU and APIC: information for a guest that cannot use CPUID.
        entry.extend(0x600u32.to_le_bytes());
        entry.extend(0x201u32.to_le_bytes());
        entry.extend([0; 8]);
        entries.push(entry);
    }
    entries.push([&[BUS, 0][..], b"ISA   "].concat());
    entries.push([&[IO_APIC, ioapic, IOAPIC_VERSION, ENABLED][..], &(IOAPIC.get() as u32).to_le_bytes()].concat());
    for line in 0..LINES {
        entries.push(vec![IO_INTERRUPT, 0, 0, 0, 0, line, ioapic, line]);
    }
    entries.push(vec![LOCAL_INTERRUPT, EXTERNAL, 0, 0, 0, 0, 0, 0]);
    entries.push(vec![LOCAL_INTERRUPT, NMI, 0, 0, 0, 0, ALL_APICS, 1]);
    entries
}

/// The byte that makes the sum of all bytes zero; its own place must hold zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte))
    }

    #[test]
    fn both_parts_sum_to_zero_and_contain_their_length() {
        let bytes = bytes(4);
        assert_eq!(&bytes[..4], b"_MP_");
        assert_eq!(sum(&bytes[..16]), 0);
        let table = &bytes[16..];
        assert_eq!(&table[..4], b"PCMP");
        assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
        assert_eq!(sum(table), 0);
        assert_eq!(u32::from_le_bytes(bytes[4..8].try_into().unwrap()), 0x9_fc10);
    }

    #[test]
    fn the_first_processor_boots_and_each_has_its_number() {
        let bytes = bytes(2);
        let first = &bytes[60..80];
        let second = &bytes[80..100];
        assert_eq!(first[..4], [0, 0, 0x14, 3]);
        assert_eq!(second[..4], [0, 1, 0x14, 1]);
    }

    #[test]
    fn the_lines_of_all_devices_are_listed() {
        use crate::devices::virtio::{DEVICES_MAX, Place};
        assert_eq!(Place::of(DEVICES_MAX).gsi, u32::from(LINES));
        let bytes = bytes(1);
        assert!(bytes.windows(8).any(|entry| entry == [3, 0, 0, 0, 0, 23, 1, 23]));
    }

    #[test]
    fn the_largest_number_of_vcpus_fits() {
        assert!(bytes(wideleaf_protocol::VCPUS_MAX as u8).len() <= BYTES_MAX);
    }
}
