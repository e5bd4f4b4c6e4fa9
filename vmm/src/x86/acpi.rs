//! ACPI tables, which tell a Linux guest of its CPUs, the IOAPIC, its power button, and the way to switch itself
//! off (ACPI 6.5, chapter 5).
//!
//! ```text
//!   RSDP ─▶ XSDT ─▶ FADT ─▶ DSDT: the sleep state "off", a device for each of ours
//!                ├▶ MADT: a local APIC per vCPU, the IOAPIC
//!                ├▶ SRAT: the NUMA cell of each vCPU and of each range of RAM     where the guest has cells
//!                ├▶ SLIT: the distances between cells
//!                └▶ HMAT: latencies and bandwidths between them               where they are known
//! ```
//!
//! Kernels without ACPI find the same in the MP table ([`super::mp_table`]); distributions' kernels no
//! longer read that.

use acpi_tables::Aml;
use acpi_tables::aml::{Device, Interrupt, Memory32Fixed, Name, ONE, Package, Path, ResourceTemplate, Scope, ZERO};

use wideleaf_policies::GpaRange;

use super::hmat;
use super::layout::{ACPI, ACPI_BYTES_MAX, IOAPIC, LOCAL_APIC};
pub use super::ports::{POWER_CONTROL_OFFSET, POWER_PORTS, POWER_PORTS_LAST, RESET_PORT, RESET_VALUE, SCI};
use crate::cells::{GuestCell, split};
use crate::devices::virtio::{Place, REGISTERS};

const RSDP_BYTES: u64 = 36;
const HEADER_BYTES: usize = 36;

/// NUMA cells, and the RAM that they divide.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cells<'a> {
    /// Cells in the order of their numbers; none: the guest has no nodes.
    pub cells: &'a [GuestCell],
    /// Ranges of the guest's RAM.
    pub ram: &'a [GpaRange],
}

/// The tables for this number of vCPUs and virtio devices, and these cells: to be written at [`ACPI`], RSDP first.
pub fn bytes(vcpus: u8, devices: usize, cells: &Cells<'_>) -> Vec<u8> {
    let mut tables = Vec::with_capacity(ACPI_BYTES_MAX);
    tables.resize(RSDP_BYTES.next_multiple_of(16) as usize, 0);
    let mut add = |table: Vec<u8>| -> u64 {
        let at = ACPI.get() + tables.len() as u64;
        tables.extend(table);
        tables.resize(tables.len().next_multiple_of(16), 0);
        at
    };
    let dsdt = add(table(b"DSDT", 2, &dsdt_body(devices)));
    let fadt = add(table(b"FACP", 6, &fadt_body(dsdt)));
    let madt = add(table(b"APIC", 5, &madt_body(vcpus)));
    let mut listed = [fadt.to_le_bytes(), madt.to_le_bytes()].concat();
    if !cells.cells.is_empty() {
        listed.extend(add(table(b"SRAT", 3, &srat_body(cells))).to_le_bytes());
        listed.extend(add(table(b"SLIT", 1, &slit_body(cells.cells))).to_le_bytes());
        if let Some(body) = hmat::body(cells.cells) {
            listed.extend(add(table(b"HMAT", hmat::REVISION, &body)).to_le_bytes());
        }
    }
    let xsdt = add(table(b"XSDT", 1, &listed));
    tables[..RSDP_BYTES as usize].copy_from_slice(&rsdp(xsdt));
    assert!(tables.len() <= ACPI_BYTES_MAX, "{vcpus} vcpus need {} bytes", tables.len());
    tables
}

/// The pointer to everything else, version 2, with two checksums: of the first 20 bytes and of all.
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

/// The code for the guest's ACPI interpreter. Each device is named by the ID under which Linux knows virtio's
/// registers (drivers/virtio/virtio_mmio.c); the only other way to tell a kernel of them is its command line.
fn dsdt_body(devices: usize) -> Vec<u8> {
    let mut body = Vec::new();
    // "Off" is sleep type 0 in both control registers.
    let off = Package::new(vec![&ZERO, &ZERO, &ZERO, &ZERO]);
    Name::new(Path::new("_S5_"), &off).to_aml_bytes(&mut body);
    for number in 0..devices {
        let Place { start, gsi } = Place::of(number);
        let memory = Memory32Fixed::new(true, start.get() as u32, REGISTERS.get() as u32);
        // The interrupt is consumed by the device, edge-triggered, active high and exclusive.
        let interrupt = Interrupt::new(true, true, false, false, gsi);
        let resources = ResourceTemplate::new(vec![&memory, &interrupt]);
        let name = Name::new(Path::new("_HID"), &"LNRO0005");
        let uid = Name::new(Path::new("_UID"), &(number as u8));
        // Its DMA is as coherent as a CPU's stores: without this, Linux on some machines allows it no DMA at all.
        let coherent = Name::new(Path::new("_CCA"), &ONE);
        let resources = Name::new(Path::new("_CRS"), &resources);
        let path = Path::new(&format!("VR{number:02}"));
        let device = Device::new(path, vec![&name, &uid, &coherent, &resources]);
        Scope::new(Path::new("_SB_"), vec![&device]).to_aml_bytes(&mut body);
    }
    body
}

/// The fixed description. It is not "hardware reduced": that would remove PIC and timer, which KVM emulates. There
/// is no power management timer, which is optional (ACPI 6.5, 4.8.2.1), because guests of KVM have its clock.
fn fadt_body(dsdt: u64) -> Vec<u8> {
    const BYTES: usize = 276;
    /// Flags: `wbinvd` works; no sleep button; there is a reset register. The power button is that of the event
    /// block: bit 4 is clear.
    const FLAGS: u32 = 1 | 1 << 5 | 1 << 10;
    /// Flags: there are ISA devices; no VGA, no CMOS clock to set.
    const BOOT_FLAGS: u16 = 1 | 1 << 2 | 1 << 5;
    let mut table = vec![0; BYTES];
    let mut put = |at: usize, bytes: &[u8]| table[at..at + bytes.len()].copy_from_slice(bytes);
    let ports = u32::from(POWER_PORTS);
    put(40, &(dsdt as u32).to_le_bytes());
    put(46, &SCI.to_le_bytes());
    put(56, &ports.to_le_bytes());
    put(64, &(ports + u32::from(POWER_CONTROL_OFFSET)).to_le_bytes());
    // Lengths of the event block and the control block.
    put(88, &[4, 2]);
    // C2 and C3 have latencies above the allowed limit, which means that they do not exist.
    put(96, &[0x65, 0, 0xe9, 3]);
    put(109, &BOOT_FLAGS.to_le_bytes());
    put(112, &FLAGS.to_le_bytes());
    // A port of one byte (ACPI 6.5, 5.2.3.2), and the value to write.
    put(116, &[1, 8, 0, 1]);
    put(120, &u64::from(RESET_PORT).to_le_bytes());
    put(128, &[RESET_VALUE]);
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

/// The cell of each vCPU and of each range of RAM (ACPI 6.5, 5.2.16). The number of a vCPU is that of its APIC.
fn srat_body(cells: &Cells<'_>) -> Vec<u8> {
    const PROCESSOR: u8 = 0;
    const MEMORY: u8 = 1;
    const ENABLED: u32 = 1;
    // Reserved: 1 in 32 bits, and 64 bits of zero.
    let mut body = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
    for (number, cell) in cells.cells.iter().enumerate() {
        for vcpu in cell.vcpus.iter() {
            body.extend([PROCESSOR, 16, number as u8, vcpu as u8]);
            body.extend(ENABLED.to_le_bytes());
            // SAPIC, the other bytes of the number, and the clock domain, of which there is one.
            body.extend([0; 8]);
        }
    }
    let ranges = split(cells.ram, cells.cells.iter().map(|cell| cell.memory));
    for (number, range) in ranges.iter().enumerate().flat_map(|(number, of)| of.iter().map(move |one| (number, one))) {
        body.extend([MEMORY, 40]);
        body.extend((number as u32).to_le_bytes());
        body.extend([0; 2]);
        body.extend(range.start().get().to_le_bytes());
        body.extend(range.bytes().get().to_le_bytes());
        body.extend([0; 4]);
        body.extend(ENABLED.to_le_bytes());
        body.extend([0; 8]);
    }
    body
}

/// The distances between cells, row by row (ACPI 6.5, 5.2.17).
fn slit_body(cells: &[GuestCell]) -> Vec<u8> {
    let mut body = (cells.len() as u64).to_le_bytes().to_vec();
    body.extend(cells.iter().flat_map(|cell| &cell.distances));
    body
}

/// The byte that makes the sum of all bytes zero; its own place must hold zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::super::layout::ram_ranges;
    use super::*;
    use crate::cells::{Access, CELLS_MAX};
    use wideleaf_policies::units::{gib, mib};

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// The table that a 64-bit address at `at` points to.
    fn follow(bytes: &[u8], at: usize) -> Vec<u8> {
        let address = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let start = (address - ACPI.get()) as usize;
        bytes[start..start + u32_at(bytes, start + 4) as usize].to_vec()
    }

    #[test]
    fn every_table_is_found_and_sums_to_zero() {
        let bytes = bytes(3, 0, &Cells::default());
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
        assert_eq!((u32_at(&fadt, 56), u32_at(&fadt, 64)), (0x600, 0x604));
        // The interrupt, and a power button of the event block (flag bit 4 would be another kind) but no
        // such sleep button.
        assert_eq!((fadt[46..48].to_vec(), u32_at(&fadt, 112) >> 4 & 0b11), (vec![9, 0], 0b10));
        // No timer; a reset register behind I/O ports, and its value.
        assert_eq!((u32_at(&fadt, 76), fadt[91]), (0, 0));
        assert_eq!(fadt[116..129], [1, 8, 0, 1, 0xf9, 0x0c, 0, 0, 0, 0, 0, 0, 6]);
        // Header, APIC address and flags, three processors, the IOAPIC.
        assert_eq!(madt.len(), 36 + 8 + 3 * 8 + 12);
        assert_eq!(madt[44 + 8..44 + 12], [0, 8, 1, 1]);
    }

    #[test]
    fn a_device_is_described_at_its_address() {
        assert_eq!(dsdt_body(0), [0x08, b'_', b'S', b'5', b'_', 0x12, 0x06, 0x04, 0, 0, 0, 0]);
        let body = dsdt_body(2);
        let has = |part: &[u8]| body.windows(part.len()).any(|window| window == part);
        assert!(has(b"VR00") && has(b"VR01") && has(b"LNRO0005"));
        // 32-bit fixed memory, writable (ACPI 6.5, 6.4.3.4), and an extended interrupt (6.4.3.6): consumer, edge.
        assert!(has(&[0x86, 9, 0, 1, 0x00, 0x10, 0x00, 0xd0, 0x00, 0x10, 0, 0]));
        assert!(has(&[0x89, 6, 0, 0b0011, 1, 17, 0, 0, 0]));
    }

    #[test]
    fn the_largest_number_of_vcpus_and_devices_fits() {
        let (vcpus, devices) = (wideleaf_protocol::VCPUS_MAX, crate::devices::virtio::DEVICES_MAX);
        // Reads and writes differ, so that there are four matrices.
        let access =
            Access { read_latency_ns: 1, write_latency_ns: 2, read_bandwidth_mb_s: 3, write_bandwidth_mb_s: 4 };
        let cell = |number: u16| GuestCell {
            vcpus: [number].into_iter().collect(),
            memory: mib(256),
            distances: vec![10; CELLS_MAX],
            access: vec![access; CELLS_MAX],
        };
        let cells: Vec<GuestCell> = (0..CELLS_MAX as u16).map(cell).collect();
        let cells = Cells { cells: &cells, ram: &ram_ranges(gib(4)) };
        assert!(bytes(vcpus as u8, devices, &cells).len() <= ACPI_BYTES_MAX);
    }

    #[test]
    fn cells_are_described_with_their_vcpus_their_ranges_and_their_distances() {
        let cell = |vcpus: &str, memory, distances: [u8; 2]| GuestCell {
            vcpus: vcpus.parse().unwrap(),
            memory,
            distances: distances.to_vec(),
            access: Vec::new(),
        };
        // The second cell lies over the hole.
        let cells = [cell("0,2", gib(2), [10, 21]), cell("1", gib(2), [31, 10])];
        let bytes = bytes(3, 0, &Cells { cells: &cells, ram: &ram_ranges(gib(4)) });
        let xsdt = follow(&bytes, 24);
        assert_eq!(xsdt.len(), 36 + 4 * 8);
        let at = |number: usize| {
            let address = u64::from_le_bytes(xsdt[36 + 8 * number..44 + 8 * number].try_into().unwrap());
            let start = (address - ACPI.get()) as usize;
            bytes[start..start + u32_at(&bytes, start + 4) as usize].to_vec()
        };
        let (srat, slit) = (at(2), at(3));
        assert_eq!((&srat[..4], checksum(&srat), &slit[..4], checksum(&slit)), (&b"SRAT"[..], 0, &b"SLIT"[..], 0));
        // Header, 12 reserved bytes, three processors, three ranges of memory.
        assert_eq!(srat.len(), 36 + 12 + 3 * 16 + 3 * 40);
        let processors: Vec<[u8; 8]> = (0..3).map(|i| srat[48 + 16 * i..56 + 16 * i].try_into().unwrap()).collect();
        assert_eq!(processors, [[0, 16, 0, 0, 1, 0, 0, 0], [0, 16, 0, 2, 1, 0, 0, 0], [0, 16, 1, 1, 1, 0, 0, 0]]);
        let u64_at = |at: usize| u64::from_le_bytes(srat[at..at + 8].try_into().unwrap());
        let memory = |number: usize| {
            let at = 96 + 40 * number;
            assert_eq!((srat[at], srat[at + 1], u32_at(&srat, at + 28)), (1, 40, 1));
            (u32_at(&srat, at + 2), u64_at(at + 8) >> 30, u64_at(at + 16) >> 30)
        };
        assert_eq!([memory(0), memory(1), memory(2)], [(0, 0, 2), (1, 2, 1), (1, 4, 1)]);
        assert_eq!(slit[36..], [2, 0, 0, 0, 0, 0, 0, 0, 10, 21, 31, 10]);
    }
    #[test]
    fn figures_between_cells_are_one_more_table() {
        let access = Access { read_latency_ns: 90, ..Access::default() };
        let cell = GuestCell { vcpus: "0".parse().unwrap(), memory: gib(1), distances: vec![10], access: vec![access] };
        let bytes = bytes(1, 0, &Cells { cells: &[cell], ram: &ram_ranges(gib(1)) });
        let xsdt = follow(&bytes, 24);
        assert_eq!(xsdt.len(), 36 + 5 * 8);
        let start = (u64::from_le_bytes(xsdt[68..76].try_into().unwrap()) - ACPI.get()) as usize;
        let hmat = &bytes[start..start + u32_at(&bytes, start + 4) as usize];
        assert_eq!((&hmat[..4], hmat[8], checksum(hmat)), (&b"HMAT"[..], 2, 0));
        // Header, 4 reserved bytes, one proximity structure, one matrix of one entry.
        assert_eq!(hmat.len(), 36 + 4 + 40 + 32 + 8 + 2);
    }
}
