//! Linux's `boot_params`, the "zero page" (Linux, Documentation/arch/x86/boot.rst and zero-page.rst).

use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams, Error};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use wideleaf_policies::{Gpa, GpaRange};

use super::layout::{ACPI, CMDLINE, ZERO_PAGE};

/// Loader type: "some boot loader without a number of its own".
const LOADER_OTHER: u8 = 0xff;
/// Video mode `vga=normal`: the present mode of the machine.
const VIDEO_MODE_NORMAL: u16 = 0xffff;
/// Bit of `loadflags`: `heap_end_ptr` is valid.
const CAN_USE_HEAP: u8 = 1 << 7;
/// Type of usable RAM in the map of the PC's firmware (INT 15h, E820h).
const E820_RAM: u32 = 1;

/// The page for a kernel with this header, loaded at `start`.
///
/// Every field is the header's, except those that the boot protocol expects from the loader ("write" and "modify").
/// Those are always written: their values in the file have no meaning.
pub fn build(header: setup_header, start: Gpa, usable_ram: &[GpaRange], initrd: Option<GpaRange>) -> boot_params {
    let mut params = boot_params { hdr: header, ..Default::default() };
    params.acpi_rsdp_addr = ACPI.get();
    let header = &mut params.hdr;
    header.vid_mode = VIDEO_MODE_NORMAL;
    header.type_of_loader = LOADER_OTHER;
    // The heap belongs to the kernel's real-mode code, which the 64-bit entry leaves out.
    header.loadflags &= !CAN_USE_HEAP;
    header.heap_end_ptr = 0;
    header.code32_start = start.get() as u32;
    header.cmd_line_ptr = CMDLINE.get() as u32;
    header.ramdisk_image = initrd.map_or(0, |range| range.start().get() as u32);
    header.ramdisk_size = initrd.map_or(0, |range| range.bytes().get() as u32);
    header.setup_data = 0;
    params.e820_entries = usable_ram.len() as u8;
    for (entry, range) in params.e820_table.iter_mut().zip(usable_ram) {
        *entry = boot_e820_entry { addr: range.start().get(), size: range.bytes().get(), r#type: E820_RAM };
    }
    params
}

/// Writes the page at its address.
///
/// # Errors
/// If the layout's address is not RAM.
pub fn write(memory: &impl GuestMemoryBackend, params: &boot_params) -> Result<(), Error> {
    let params = BootParams::new(params, GuestAddress(ZERO_PAGE.get()));
    LinuxBootConfigurator::write_bootparams(&params, memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::layout::usable_ram;
    use vm_memory::{ByteValued as _, Bytes as _, GuestMemoryMmap};
    use wideleaf_policies::units::{gib, mib};

    #[test]
    fn the_fields_lie_at_the_offsets_of_the_boot_protocol() {
        let header = setup_header { header: 0x5372_6448, version: 0x20f, ..Default::default() };
        let initrd = GpaRange::new(Gpa::new(0x3000_0000), mib(1)).unwrap();
        let params = build(header, Gpa::new(1 << 20), &usable_ram(gib(5)), Some(initrd));
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write(&memory, &params).unwrap();

        let at = |offset: u64| GuestAddress(ZERO_PAGE.get() + offset);
        assert_eq!(memory.read_obj::<u8>(at(0x1e8)).unwrap(), 3, "entries of the memory map");
        assert_eq!(memory.read_obj::<u32>(at(0x202)).unwrap(), 0x5372_6448, "HdrS");
        assert_eq!(memory.read_obj::<u8>(at(0x210)).unwrap(), 0xff, "loader");
        assert_eq!(memory.read_obj::<u32>(at(0x214)).unwrap(), 1 << 20, "where the kernel is");
        assert_eq!(memory.read_obj::<u32>(at(0x218)).unwrap(), 0x3000_0000, "initrd");
        assert_eq!(memory.read_obj::<u32>(at(0x21c)).unwrap(), 1 << 20, "initrd's size");
        assert_eq!(memory.read_obj::<u32>(at(0x228)).unwrap(), CMDLINE.get() as u32, "command line");
        // Third entry: RAM behind the hole.
        assert_eq!(memory.read_obj::<u64>(at(0x2d0 + 2 * 20)).unwrap(), 4 << 30);
        assert_eq!(memory.read_obj::<u64>(at(0x2d0 + 2 * 20 + 8)).unwrap(), 2 << 30);
    }
    /// Bytes of the zero page for a file with `byte` everywhere in its header, by their offset in the page.
    fn page_of(byte: u8, initrd: Option<GpaRange>) -> impl Fn(usize) -> u8 {
        let mut header = setup_header::default();
        header.as_mut_slice().fill(byte);
        let params = build(header, Gpa::new(1 << 20), &usable_ram(mib(64)), initrd);
        move |at| params.as_slice()[at]
    }

    /// Every field of type "write" and "modify (obligatory)", and `code32_start`, because the kernel is not loaded
    /// at its default address: offset and bytes.
    const WRITTEN: [(usize, usize); 9] = [
        (0x1fa, 2), // vid_mode
        (0x210, 1), // type_of_loader
        (0x211, 1), // loadflags
        (0x214, 4), // code32_start
        (0x218, 4), // ramdisk_image
        (0x21c, 4), // ramdisk_size
        (0x224, 2), // heap_end_ptr
        (0x228, 4), // cmd_line_ptr
        (0x250, 8), // setup_data
    ];

    #[test]
    fn fields_of_the_kernel_are_unchanged() {
        const HEADER: std::ops::Range<usize> = 0x1f1..0x26c;
        let page = page_of(0x5a, None);
        for at in HEADER.filter(|at| !WRITTEN.iter().any(|(start, bytes)| (*start..start + bytes).contains(at))) {
            assert_eq!(page(at), 0x5a, "byte {at:#x}");
        }
    }

    #[test]
    fn fields_of_the_loader_do_not_come_from_the_file() {
        let (zeroes, ones) = (page_of(0, None), page_of(0xff, None));
        for at in WRITTEN.into_iter().flat_map(|(start, bytes)| start..start + bytes).filter(|at| *at != 0x211) {
            assert_eq!(zeroes(at), ones(at), "byte {at:#x}");
        }
        assert_eq!((zeroes(0x211), ones(0x211)), (0, 0x7f), "no heap; other flags come from the kernel");
    }
}
