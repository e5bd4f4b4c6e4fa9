//! ACPI tables: how a Linux guest learns of its CPUs, the IOAPIC, and how to switch itself off (ACPI 6.5, chapter 5).
//!
//! ```text
//!   RSDP ─▶ XSDT ─▶ FADT ─▶ DSDT: one name, the sleep state "off"
//!                └▶ MADT: a local APIC per vCPU, the IOAPIC
//! ```
//!
//! Kernels without ACPI find the same in the MP table ([`super::mp_table`]); distributions' kernels no longer look there.

use super::layout::{ACPI, IOAPIC, LOCAL_APIC};

/// The room the tables have.
pub const BYTES_MAX: usize = 0x1000;

/// First of the power management ports: event block (4 bytes), control block (2), timer (4). The control block is where
/// QEMU's machines have it, so that guests which do not read these tables find it too.
pub const POWER_PORTS: u16 = 0x600;
/// From there to the control block.
pub const POWER_CONTROL_OFFSET: u16 = 4;
const POWER_TIMER_OFFSET: u16 = 8;
/// Last of these ports.
pub const POWER_PORTS_LAST: u16 = POWER_PORTS + POWER_TIMER_OFFSET + 3;
/// Interrupt of power management events, which never come.
const SCI: u16 = 9;

const RSDP_BYTES: u64 = 36;
const HEADER_BYTES: usize = 36;

/// The tables for this many vCPUs: to be written at [`ACPI`], RSDP first.
pub fn bytes(vcpus: u8) -> Vec<u8> {
    let mut tables = Vec::with_capacity(BYTES_MAX);
    tables.resize(RSDP_BYTES.next_multiple_of(16) as usize, 0);
    let mut add = |table: Vec<u8>| -> u64 {
        let at = ACPI.get() + tables.len() as u64;
        tables.extend(table);
        tables.resize(tables.len().next_multiple_of(16), 0);
        at
    };
    // Name (_S5, Package () {0, 0, 0, 0}): "off" is sleep type 0 in both control registers.
    let off = [0x08, b'_', b'S', b'5', b'_', 0x12, 0x06, 0x04, 0, 0, 0, 0];
    let dsdt = add(table(b"DSDT", 2, &off));
    let fadt = add(table(b"FACP", 6, &fadt_body(dsdt)));
    let madt = add(table(b"APIC", 5, &madt_body(vcpus)));
    let xsdt = add(table(b"XSDT", 1, &[fadt.to_le_bytes(), madt.to_le_bytes()].concat()));
    tables[..RSDP_BYTES as usize].copy_from_slice(&rsdp(xsdt));
    assert!(tables.len() <= BYTES_MAX, "{vcpus} vcpus need {} bytes", tables.len());
    tables
}

/// The pointer to everything else, version 2: two checksums, of the first 20 bytes and of all.
fn rsdp(xsdt: u64) -> Vec<u8> {
    let mut rsdp = b"RSD PTR \0WDLEAF\x02".to_vec();
    rsdp.extend([0; 4]);
    rsdp.extend((RSDP_BYTES as u32).to_le_bytes());
    rsdp.extend(xsdt.to_le_bytes());
    rsdp.extend([0; 4]);
    rsdp[8] = checksum(&rsdp[..20]);
    rsdp[32] = checksum(&rsdp);
    rsdp
}

fn table(signature: &[u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    const CHECKSUM_AT: usize = 9;
    let mut table = signature.to_vec();
    table.extend(((HEADER_BYTES + body.len()) as u32).to_le_bytes());
    table.extend([revision, 0]);
    table.extend(b"WDLEAFWIDELEAF");
    table.extend(1u32.to_le_bytes());
    table.extend(b"WDLF");
    table.extend(1u32.to_le_bytes());
    debug_assert_eq!(table.len(), HEADER_BYTES);
    table.extend(body);
    table[CHECKSUM_AT] = checksum(&table);
    table
}

/// The fixed description. Not "hardware reduced": that would take PIC and timer, which KVM emulates, from the guest.
fn fadt_body(dsdt: u64) -> Vec<u8> {
    const BYTES: usize = 276;
    /// `wbinvd` works; C2 is not for many CPUs; no power or sleep button; the timer has 32 bits.
    const FLAGS: u32 = 1 | 1 << 4 | 1 << 5 | 1 << 8;
    /// There are ISA devices; no VGA, no CMOS clock to set.
    const BOOT_FLAGS: u16 = 1 | 1 << 2 | 1 << 5;
    let mut table = vec![0; BYTES];
    let mut put = |at: usize, bytes: &[u8]| table[at..at + bytes.len()].copy_from_slice(bytes);
    let ports = u32::from(POWER_PORTS);
    put(40, &(dsdt as u32).to_le_bytes());
    put(46, &SCI.to_le_bytes());
    put(56, &ports.to_le_bytes());
    put(64, &(ports + u32::from(POWER_CONTROL_OFFSET)).to_le_bytes());
    put(76, &(ports + u32::from(POWER_TIMER_OFFSET)).to_le_bytes());
    // Lengths of the event block, the control block, and the timer.
    put(88, &[4, 2]);
    put(91, &[4]);
    // C2 and C3 are slower than is allowed: there are none.
    put(96, &[0x65, 0, 0xe9, 3]);
    put(109, &BOOT_FLAGS.to_le_bytes());
    put(112, &FLAGS.to_le_bytes());
    put(140, &dsdt.to_le_bytes());
    table.split_off(HEADER_BYTES)
}

fn madt_body(vcpus: u8) -> Vec<u8> {
    const PROCESSOR: u8 = 0;
    const IO_APIC: u8 = 1;
    const HAS_PICS: u32 = 1;
    const ENABLED: u32 = 1;
    let mut body = (LOCAL_APIC.get() as u32).to_le_bytes().to_vec();
    body.extend(HAS_PICS.to_le_bytes());
    for vcpu in 0..vcpus {
        body.extend([PROCESSOR, 8, vcpu, vcpu]);
        body.extend(ENABLED.to_le_bytes());
    }
    body.extend([IO_APIC, 12, vcpus, 0]);
    body.extend((IOAPIC.get() as u32).to_le_bytes());
    body.extend(0u32.to_le_bytes());
    body
}

/// The byte that makes the sum of all bytes zero, where its own place holds zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// The table a 64-bit address at `at` points to.
    fn follow(bytes: &[u8], at: usize) -> Vec<u8> {
        let address = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let start = (address - ACPI.get()) as usize;
        bytes[start..start + u32_at(bytes, start + 4) as usize].to_vec()
    }

    #[test]
    fn every_table_is_found_and_sums_to_zero() {
        let bytes = bytes(3);
        assert_eq!(&bytes[..8], b"RSD PTR ");
        assert_eq!((checksum(&bytes[..20]), checksum(&bytes[..36])), (0, 0));
        let xsdt = follow(&bytes, 24);
        let at = |table: &[u8], at: usize| {
            let address = u64::from_le_bytes(table[at..at + 8].try_into().unwrap());
            let start = (address - ACPI.get()) as usize;
            bytes[start..start + u32_at(&bytes, start + 4) as usize].to_vec()
        };
        let (fadt, madt) = (at(&xsdt, 36), at(&xsdt, 44));
        let dsdt = at(&fadt, 140);
        for (table, signature) in [(&xsdt, b"XSDT"), (&fadt, b"FACP"), (&madt, b"APIC"), (&dsdt, b"DSDT")] {
            assert_eq!(&table[..4], signature);
            assert_eq!(checksum(table), 0);
        }
        assert_eq!(fadt.len(), 276);
        assert_eq!(u32_at(&fadt, 64), 0x604);
        // Header, APIC address and flags, three processors, the IOAPIC.
        assert_eq!(madt.len(), 36 + 8 + 3 * 8 + 12);
        assert_eq!(madt[44 + 8..44 + 12], [0, 8, 1, 1]);
    }

    #[test]
    fn the_most_vcpus_fit() {
        assert!(bytes(wideleaf_protocol::VCPUS_MAX as u8).len() <= BYTES_MAX);
    }
}
