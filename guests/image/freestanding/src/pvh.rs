//! The PVH entry: the loader's data, and the machine that ring 3 builds from it (Xen: docs/misc/pvh.pandoc,
//! public/arch-x86/hvm/start_info.h).
#![expect(unsafe_code, reason = "reads what the loader left at physical addresses, and is called from boot.s")]

use core::sync::atomic::Ordering;

use wideleaf_kernels::platform::Devices;
use wideleaf_protocol::arguments::COMMAND_LINE_BYTES_MAX;
use wideleaf_protocol::{Entry, ExitCode, GuestPage, RamRange};

use crate::console::{self, fail};
use crate::machine::{end_of_image, load_cr3, read_physical, set_entry, start_info_gpa};
use crate::power_button::PowerButton;
use crate::run::{self, Machine, Options};
use crate::{clock, paging, vcpus};

/// First word of the start info.
const MAGIC: u32 = 0x336e_c578;
/// First version with the memory map.
const VERSION_WITH_MEMORY_MAP: u32 = 1;
/// Type of a memory map entry for RAM, as in the BIOS's E820.
const MEMORY_MAP_RAM: u32 = 1;
/// Bytes of one memory map entry: u64 address, u64 size, u32 type, u32 reserved.
const MEMORY_MAP_ENTRY_BYTES: usize = 24;
/// Most entries that are read; QEMU gives about ten.
const MEMORY_MAP_ENTRIES_MAX: usize = 128;
/// Largest number of RAM ranges that are kept.
const RAM_RANGES_MAX: usize = 16;
/// Bytes that boot.s has mapped.
const MAPPED_AT_FIRST: u64 = GuestPage::Giant1G.bytes();

/// First Rust code after a PVH start: vCPU 0 in ring 3, on tables that map the first GiB.
#[unsafe(no_mangle)]
extern "C" fn pvh_main() -> ! {
    set_entry(Entry::Pvh);
    console::init();
    let info = StartInfo::read(u64::from(start_info_gpa.load(Ordering::Relaxed)));
    let mut line = [0; COMMAND_LINE_BYTES_MAX];
    let options = Options::new(info.command_line(&mut line));
    let mut ranges = [RamRange::default(); RAM_RANGES_MAX];
    let ram = info.ram(&mut ranges);

    let guest_page = options.guest_page.unwrap_or(GuestPage::Huge2M);
    let count = vcpus::count(options.vcpus);
    let registers = [vcpus::LOCAL_APIC, MICROVM_DEVICES];
    let tables = paging::build(guest_page, ram, &registers, end_of_image(), MAPPED_AT_FIRST);
    // SAFETY: the tables map the image, itself in RAM, at the same addresses.
    unsafe { load_cr3(tables.root) };
    let tsc_hz = options.tsc_hz.or_else(clock::tsc_hz_from_cpuid).or_else(clock::tsc_hz_from_timer).unwrap_or(0);
    vcpus::start_others(count, tables.root, tsc_hz);

    let devices = Devices { first: MICROVM_DEVICES, stride: 0x200, count: 24 };
    // The port of another VMM's button is in its ACPI tables, which the image does not read.
    let power_button = PowerButton::new(0, tsc_hz);
    let free_start = tables.end;
    let machine = Machine { vcpus: count, tsc_hz, guest_page, ram, free_start, devices, power_button };
    // SAFETY: the tables map all RAM and the devices' registers; the image and the tables are all that is in use,
    // both end before `free_start`; what the loader left above has been read.
    unsafe { run::run(&machine, &options) }
}

/// Address of the virtio devices of QEMU's microvm (`include/hw/i386/microvm.h`). On other machines no device
/// answers there.
const MICROVM_DEVICES: u64 = 0xfeb0_0000;

/// The fields of the start info that the image uses.
struct StartInfo {
    command_line: u64,
    memory_map: u64,
    memory_map_entries: usize,
}

impl StartInfo {
    fn read(address: u64) -> Self {
        let mut bytes = [0; 56];
        read_mapped(address, &mut bytes);
        let half = |at: usize| u32_at(&bytes, at);
        if half(0) != MAGIC {
            fail(ExitCode::Unsupported, format_args!("the loader left no PVH start info at {address:#x}"));
        }
        let entries = half(48) as usize;
        if half(4) < VERSION_WITH_MEMORY_MAP || entries == 0 || entries > MEMORY_MAP_ENTRIES_MAX {
            fail(
                ExitCode::Unsupported,
                format_args!(
                    "PVH start info version {} with {entries} memory map entries, \
                     expected version 1 and 1 to {MEMORY_MAP_ENTRIES_MAX}",
                    half(4)
                ),
            );
        }
        Self { command_line: u64_at(&bytes, 24), memory_map: u64_at(&bytes, 40), memory_map_entries: entries }
    }

    /// The command line without its terminating zero; empty if it is absent.
    fn command_line<'l>(&self, space: &'l mut [u8; COMMAND_LINE_BYTES_MAX]) -> &'l [u8] {
        if self.command_line == 0 {
            return &[];
        }
        for (index, byte) in space.iter_mut().enumerate() {
            read_mapped(self.command_line + index as u64, core::slice::from_mut(byte));
            if *byte == 0 {
                return &space[..index];
            }
        }
        fail(ExitCode::BadArguments, format_args!("command line: longer than {} bytes", COMMAND_LINE_BYTES_MAX - 1))
    }

    /// The ranges of RAM, in the loader's order.
    fn ram<'r>(&self, ranges: &'r mut [RamRange; RAM_RANGES_MAX]) -> &'r [RamRange] {
        let mut count = 0;
        for index in 0..self.memory_map_entries {
            let mut entry = [0; MEMORY_MAP_ENTRY_BYTES];
            read_mapped(self.memory_map + (index * MEMORY_MAP_ENTRY_BYTES) as u64, &mut entry);
            let range = RamRange { gpa: u64_at(&entry, 0), bytes: u64_at(&entry, 8) };
            let is_ram = u32_at(&entry, 16) == MEMORY_MAP_RAM && range.bytes > 0 && range.end().is_some();
            if is_ram && count < RAM_RANGES_MAX {
                ranges[count] = range;
                count += 1;
            }
        }
        &ranges[..count]
    }
}

fn read_mapped(address: u64, bytes: &mut [u8]) {
    if address.checked_add(bytes.len() as u64).is_none_or(|end| end > MAPPED_AT_FIRST) {
        fail(ExitCode::Unsupported, format_args!("the loader left boot data at {address:#x}, not in the first GiB"));
    }
    // SAFETY: the range is inside the first GiB, which is mapped one to one, and no other vCPU runs yet.
    unsafe { read_physical(address, bytes) };
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |chunk| u32::from_le_bytes(*chunk))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |chunk| u64::from_le_bytes(*chunk))
}
