//! Linux's `boot_params`, the "zero page" (Linux, Documentation/arch/x86/boot.rst and zero-page.rst).

use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams, Error};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use wideleaf_policies::GpaRange;

use super::layout::{ACPI, CMDLINE, ZERO_PAGE};

/// "Some boot loader without a number of its own".
const LOADER_OTHER: u8 = 0xff;
/// Type of usable RAM in the map of the PC's firmware (INT 15h, E820h).
const E820_RAM: u32 = 1;

/// The page for a kernel with this header.
pub fn build(
    header: setup_header,
    usable_ram: &[GpaRange],
    cmdline_bytes: u32,
    initrd: Option<GpaRange>,
) -> boot_params {
    let mut params = boot_params { hdr: header, ..Default::default() };
    params.acpi_rsdp_addr = ACPI.get();
    params.hdr.type_of_loader = LOADER_OTHER;
    params.hdr.cmd_line_ptr = CMDLINE.get() as u32;
    params.hdr.cmdline_size = cmdline_bytes;
    if let Some(range) = initrd {
        params.hdr.ramdisk_image = range.start().get() as u32;
        params.hdr.ramdisk_size = range.bytes().get() as u32;
    }
    params.e820_entries = usable_ram.len() as u8;
    for (entry, range) in params.e820_table.iter_mut().zip(usable_ram) {
        *entry = boot_e820_entry { addr: range.start().get(), size: range.bytes().get(), r#type: E820_RAM };
    }
    params
}

/// Writes the page at its place.
///
/// # Errors
/// Where the layout's address is not RAM.
pub fn write(memory: &impl GuestMemoryBackend, params: &boot_params) -> Result<(), Error> {
    let params = BootParams::new(params, GuestAddress(ZERO_PAGE.get()));
    LinuxBootConfigurator::write_bootparams(&params, memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::layout::usable_ram;
    use vm_memory::{Bytes as _, GuestMemoryMmap};
    use wideleaf_policies::Gpa;
    use wideleaf_policies::units::{gib, mib};

    #[test]
    fn the_fields_are_where_the_boot_protocol_says() {
        let header = setup_header { header: 0x5372_6448, version: 0x20f, ..Default::default() };
        let initrd = GpaRange::new(Gpa::new(0x3000_0000), mib(1)).unwrap();
        let params = build(header, &usable_ram(gib(5)), 80, Some(initrd));
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write(&memory, &params).unwrap();

        let at = |offset: u64| GuestAddress(ZERO_PAGE.get() + offset);
        assert_eq!(memory.read_obj::<u8>(at(0x1e8)).unwrap(), 3, "entries of the memory map");
        assert_eq!(memory.read_obj::<u32>(at(0x202)).unwrap(), 0x5372_6448, "HdrS");
        assert_eq!(memory.read_obj::<u8>(at(0x210)).unwrap(), 0xff, "loader");
        assert_eq!(memory.read_obj::<u32>(at(0x218)).unwrap(), 0x3000_0000, "initrd");
        assert_eq!(memory.read_obj::<u32>(at(0x21c)).unwrap(), 1 << 20, "initrd's size");
        assert_eq!(memory.read_obj::<u32>(at(0x228)).unwrap(), CMDLINE.get() as u32, "command line");
        // Third entry: RAM behind the hole.
        assert_eq!(memory.read_obj::<u64>(at(0x2d0 + 2 * 20)).unwrap(), 4 << 30);
        assert_eq!(memory.read_obj::<u64>(at(0x2d0 + 2 * 20 + 8)).unwrap(), 2 << 30);
    }
}
