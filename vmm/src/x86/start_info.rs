//! PVH's start info, to which EBX points at a guest's 32-bit PVH entry (Xen, public/arch-x86/hvm/start_info.h).

use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams, Error};
use linux_loader::loader::elf::start_info::{
    XEN_HVM_MEMMAP_TYPE_RAM, XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use wideleaf_policies::GpaRange;

use super::layout::{ACPI, CMDLINE, MEMORY_MAP, MODULE_LIST, START_INFO};

/// Version of the format that has a memory map.
const VERSION: u32 = 1;

/// Writes start info, memory map and, where there is an initrd, the list of modules. The command line is
/// already in place.
///
/// # Errors
/// If the layout's addresses are not RAM.
pub fn write(memory: &impl GuestMemoryBackend, usable_ram: &[GpaRange], initrd: Option<GpaRange>) -> Result<(), Error> {
    let map: Vec<hvm_memmap_table_entry> = usable_ram
        .iter()
        .map(|range| hvm_memmap_table_entry {
            addr: range.start().get(),
            size: range.bytes().get(),
            type_: XEN_HVM_MEMMAP_TYPE_RAM,
            reserved: 0,
        })
        .collect();
    let modules: Vec<hvm_modlist_entry> = initrd
        .iter()
        .map(|range| hvm_modlist_entry { paddr: range.start().get(), size: range.bytes().get(), ..Default::default() })
        .collect();
    let info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: VERSION,
        nr_modules: modules.len() as u32,
        modlist_paddr: if modules.is_empty() { 0 } else { MODULE_LIST.get() },
        cmdline_paddr: CMDLINE.get(),
        rsdp_paddr: ACPI.get(),
        memmap_paddr: MEMORY_MAP.get(),
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    let mut params = BootParams::new(&info, GuestAddress(START_INFO.get()));
    params.set_sections(&map, GuestAddress(MEMORY_MAP.get()));
    if !modules.is_empty() {
        params.set_modules(&modules, GuestAddress(MODULE_LIST.get()));
    }
    PvhBootConfigurator::write_bootparams(&params, memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::layout::usable_ram;
    use vm_memory::{Bytes as _, GuestMemoryMmap};
    use wideleaf_policies::Gpa;
    use wideleaf_policies::units::{gib, mib};

    #[test]
    fn a_guest_finds_map_command_line_and_initrd() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let initrd = GpaRange::new(Gpa::new(64 << 20), mib(3)).unwrap();
        write(&memory, &usable_ram(gib(1)), Some(initrd)).unwrap();

        let info: hvm_start_info = memory.read_obj(GuestAddress(START_INFO.get())).unwrap();
        assert_eq!((info.magic, info.version, info.nr_modules), (0x336e_c578, 1, 1));
        assert_eq!((info.cmdline_paddr, info.memmap_entries), (CMDLINE.get(), 2));
        let second: hvm_memmap_table_entry = memory.read_obj(GuestAddress(info.memmap_paddr + 24)).unwrap();
        assert_eq!((second.addr, second.size, second.type_), (1 << 20, (1 << 30) - (1 << 20), 1));
        let module: hvm_modlist_entry = memory.read_obj(GuestAddress(info.modlist_paddr)).unwrap();
        assert_eq!((module.paddr, module.size), (64 << 20, 3 << 20));
    }

    #[test]
    fn without_an_initrd_there_are_no_modules() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write(&memory, &usable_ram(gib(1)), None).unwrap();
        let info: hvm_start_info = memory.read_obj(GuestAddress(START_INFO.get())).unwrap();
        assert_eq!((info.nr_modules, info.modlist_paddr), (0, 0));
    }
}
