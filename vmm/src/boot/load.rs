//! Step 5: image, page tables and boot data are written into guest RAM, which is new or cleared and therefore zero.
//!
//! ```text
//!   direct   [ GDT IDT TSS … DirectBoot cmdline )   [ image )[ page tables )··[ free_start: all the image's …
//!   PVH      [ GDT start info, map, cmdline     )   [ image ) …                          … [ initrd )
//!   Linux    [ GDT zero page, cmdline, tables   )   [ bzImage at 1 MiB ) …               … [ initrd )
//! ```

use std::fs::File;
use std::io::Cursor;
use std::path::Path;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::{Bytes as _, GuestAddress};
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};
use wideleaf_protocol::direct::DEVICE_STRIDE;
use wideleaf_protocol::{DirectBoot, RamRange, port};

use super::image::{Image, ImageError, Segment, check_placement};
use super::{BootError, BootImage, file_error};
use crate::config::VmConfig;
use crate::devices::virtio;
use crate::kvm::GuestMemory;
use crate::kvm::guest_memory::GuestView;
use crate::x86::acpi::{self, Cells, POWER_PORTS};
use crate::x86::page_tables::{self, IdentityTables};
use crate::x86::{fault_report, gdt, layout, mp_table, start_info, zero_page};

/// Facts about the loaded guest that the vCPUs' registers depend on.
#[derive(Debug)]
pub(crate) enum Loaded {
    /// Every vCPU starts in ring 3 at once.
    Direct {
        /// Address of the entry.
        entry: u64,
        /// Identity-mapping page tables.
        tables: IdentityTables,
        /// First address the image may use.
        free_start: Gpa,
    },
    /// The first vCPU starts in 32-bit mode, unpaged.
    Pvh {
        /// Address of the entry.
        entry: u32,
    },
    /// The first vCPU starts at Linux's 64-bit entry.
    Linux64 {
        /// Address of the entry.
        entry: u64,
        /// Identity tables of the first 4 GiB.
        tables: IdentityTables,
    },
}

/// Loads the image, the initrd and everything that does not depend on a vCPU.
pub(crate) fn load(
    config: &VmConfig,
    BootImage { bytes, image, initrd }: &BootImage,
    memory: &GuestMemory,
    devices: usize,
) -> Result<Loaded, BootError> {
    let machine = &Loading { config, view: memory.view(), devices, initrd: initrd.as_deref() };
    match image {
        Image::Direct { entry, segments } => load_direct(machine, bytes, *entry, segments),
        Image::Pvh { entry, segments } => load_pvh(machine, bytes, *entry, segments),
        Image::BzImage { header, setup_bytes } => load_bzimage(machine, bytes, header, *setup_bytes),
    }
}

/// A machine that is being loaded.
struct Loading<'a> {
    config: &'a VmConfig,
    view: &'a GuestView,
    devices: usize,
    /// Content of the initrd in memory; `None` reads it from its file.
    initrd: Option<&'a [u8]>,
}

const _: () = assert!(virtio::REGISTERS.get() == DEVICE_STRIDE, "the image finds devices where the bus has them");

/// Writes the direct entry's boot data, which contain the frequency of the guest's clock.
pub(crate) fn write_boot_data(
    config: &VmConfig,
    memory: &GuestMemory,
    loaded: &mut Loaded,
    tsc_hz: Option<u64>,
    devices: usize,
) -> Result<(), BootError> {
    let Loaded::Direct { free_start, .. } = loaded else { return Ok(()) };
    let mut boot = DirectBoot {
        vcpus: config.vcpus(),
        tsc_hz: tsc_hz.unwrap_or(0),
        guest_page_bytes: config.guest_page().bytes().get(),
        cmdline_gpa: layout::CMDLINE.get(),
        cmdline_len: config.cmdline().len() as u64,
        free_start: free_start.get(),
        devices_gpa: virtio::FIRST.get(),
        device_count: devices as u64,
        line_port: port::LINE.into(),
        power_port: POWER_PORTS.into(),
        ..DirectBoot::default()
    };
    for range in config.ram_layout() {
        boot.push_ram(RamRange { gpa: range.start().get(), bytes: range.bytes().get() })
            .map_err(|range| write_error("the RAM ranges")(format!("no room for the one at {:#x}", range.gpa)))?;
    }
    boot.validate().map_err(write_error("the boot data"))?;
    write(memory.view(), "the boot data", layout::DIRECT_BOOT, &boot.to_bytes())
}

fn load_direct(
    &Loading { config, view, devices, .. }: &Loading<'_>,
    bytes: &[u8],
    entry: u64,
    segments: &[Segment],
) -> Result<Loaded, BootError> {
    let ram = config.ram_layout();
    let image_end = place(config, segments, &ram)?;
    let page = config.guest_page();
    let mapped = layout::direct_mappings(&ram, page, devices > 0);
    let (root, free_start) = place_tables(image_end, &ram, &mapped, page)?;

    write_segments(view, bytes, segments)?;
    let tables = page_tables::write(view, root, &mapped, page).map_err(write_error("the page tables"))?;
    write_words(view, "the GDT", layout::GDT, &gdt::DIRECT_TABLE)?;
    fault_report::write(view, config.vcpus()).map_err(write_error("the fault gates"))?;
    write_cmdline(view, config.cmdline())?;
    Ok(Loaded::Direct { entry, tables, free_start })
}

/// Places the page tables behind the image, and the start of free memory behind them, at the next window. No window
/// is then shared between the VMM's data and the image's.
fn place_tables(
    image_end: Gpa,
    ram: &[GpaRange],
    mapped: &[GpaRange],
    page: PageSize,
) -> Result<(Gpa, Gpa), BootError> {
    let ram_end = ram
        .iter()
        .find(|range| range.start() <= image_end && image_end <= range.end())
        .map_or(Gpa::default(), |range| range.end());
    match tables_behind(image_end, mapped, page) {
        Some((root, free_start)) if free_start <= ram_end => Ok((root, free_start)),
        Some((_, end)) => Err(BootError::NoRoomForTables { page, end, ram_end }),
        None => Err(BootError::NoRoomForTables { page, end: Gpa::new(u64::MAX), ram_end }),
    }
}

/// Start of the page tables behind an image that map `mapped`, and start of the free memory behind them.
pub(super) fn tables_behind(image_end: Gpa, mapped: &[GpaRange], page: PageSize) -> Option<(Gpa, Gpa)> {
    let root = image_end.checked_align_up(PageSize::Base4K)?;
    let end = root.checked_add(page_tables::bytes_needed(mapped, page))?;
    Some((root, end.checked_align_up(PageSize::Huge2M)?))
}

fn load_pvh(machine: &Loading<'_>, bytes: &[u8], entry: u32, segments: &[Segment]) -> Result<Loaded, BootError> {
    let &Loading { config, view, devices, .. } = machine;
    let image_end = place(config, segments, &config.ram_layout())?;
    write_segments(view, bytes, segments)?;
    // PVH guests run unpaged: everything they receive must lie below 4 GiB.
    let initrd = machine.load_initrd(image_end, layout::HOLE_START)?;
    write_words(view, "the GDT", layout::GDT, &gdt::PVH_TABLE)?;
    write_cmdline(view, config.cmdline())?;
    write_machine_tables(config, view, devices)?;
    start_info::write(view, &layout::usable_ram(config.memory()), initrd)
        .map_err(|error| write_error("the start info")(error.to_string()))?;
    Ok(Loaded::Pvh { entry })
}

fn load_bzimage(
    machine: &Loading<'_>,
    bytes: &[u8],
    header: &setup_header,
    setup_bytes: usize,
) -> Result<Loaded, BootError> {
    /// Offset from the start of the loaded part (Linux boot protocol, "64-bit boot protocol").
    const ENTRY64_OFFSET: u64 = 0x200;
    let &Loading { config, view, devices, .. } = machine;
    let start = layout::IMAGE_START_MIN;
    let (init_bytes, initrd_max) = (header.init_size, header.initrd_addr_max);
    let unpacked_end = Gpa::new(unpacked_start(header, start).get().saturating_add(u64::from(init_bytes)));
    let packed_end = start + Bytes::new((bytes.len() - setup_bytes) as u64);
    let image_end = unpacked_end.max(packed_end);
    let ram_end = below_hole_end(config);
    if image_end > ram_end {
        let source = ImageError::BeyondRam { end: image_end, ram_end };
        return Err(BootError::Image { image: config.image().clone(), source });
    }

    BzImage::load(view, Some(GuestAddress(start.get())), &mut Cursor::new(bytes), None)
        .map_err(|error| write_error("the kernel")(error.to_string()))?;
    let initrd_limit = Gpa::new(u64::from(initrd_max).saturating_add(1));
    let initrd = machine.load_initrd(image_end, initrd_limit)?;
    let usable = layout::usable_ram(config.memory());
    let params = zero_page::build(*header, start, &usable, initrd);
    zero_page::write(view, &params).map_err(|error| write_error("the zero page")(error.to_string()))?;
    write_words(view, "the GDT", layout::GDT, &gdt::LINUX_TABLE)?;
    write_cmdline(view, config.cmdline())?;
    write_machine_tables(config, view, devices)?;
    // Tables of the first 4 GiB, RAM or not: the entry needs the kernel, the zero page and the command line mapped,
    // and builds its own tables at once.
    let first_4g: Vec<GpaRange> = GpaRange::new(Gpa::new(0), layout::HOLE_END - Gpa::new(0)).into_iter().collect();
    let tables = page_tables::write(view, layout::LINUX_PAGE_TABLES, &first_4g, PageSize::Huge2M)
        .map_err(write_error("the page tables"))?;
    Ok(Loaded::Linux64 { entry: start.get() + ENTRY64_OFFSET, tables })
}

/// Address where a bzImage that is loaded at `start` unpacks itself: its preferred address, or the
/// first aligned address from `start` on, whichever is higher (Linux boot protocol, `init_size`;
/// arch/x86/boot/compressed/head_64.S).
fn unpacked_start(header: &setup_header, start: Gpa) -> Gpa {
    let (preferred, alignment) = (header.pref_address, header.kernel_alignment);
    let aligned = start.get().next_multiple_of(u64::from(alignment.max(1)));
    Gpa::new(preferred.max(aligned))
}

impl Loading<'_> {
    /// Copies the initrd as high as possible, because kernels unpack themselves low.
    fn load_initrd(&self, image_end: Gpa, limit: Gpa) -> Result<Option<GpaRange>, BootError> {
        let Some(path) = self.config.initrd() else { return Ok(None) };
        if let Some(bytes) = self.initrd {
            let range = self.initrd_range(path, bytes.len() as u64, image_end, limit)?;
            write(self.view, "the initrd", range.start(), bytes)?;
            return Ok(Some(range));
        }
        let open = |path: &Path| -> std::io::Result<(File, u64)> {
            let file = InputFile::open(path)?;
            let bytes = file.bytes().get();
            Ok((file.into_file(), bytes))
        };
        let (mut file, length) = open(path).map_err(|source| file_error("initrd", path, source))?;
        let range = self.initrd_range(path, length, image_end, limit)?;
        self.view
            .read_exact_volatile_from(GuestAddress(range.start().get()), &mut file, range.bytes().as_usize())
            .map_err(write_error("the initrd"))?;
        Ok(Some(range))
    }

    fn initrd_range(&self, path: &Path, length: u64, image_end: Gpa, limit: Gpa) -> Result<GpaRange, BootError> {
        let bytes = Bytes::new(length);
        let limit = limit.min(below_hole_end(self.config)).align_down(PageSize::Base4K);
        let room = if limit > image_end { limit - image_end } else { Bytes::ZERO };
        limit
            .get()
            .checked_sub(length)
            .map(|start| Gpa::new(start).align_down(PageSize::Base4K))
            .filter(|start| *start >= image_end)
            .and_then(|start| GpaRange::new(start, bytes))
            .ok_or_else(|| BootError::InitrdTooLarge { path: path.to_owned(), bytes, room, limit })
    }
}

fn below_hole_end(config: &VmConfig) -> Gpa {
    config.ram_layout().first().map(|range| range.end()).unwrap_or_default()
}

fn place(config: &VmConfig, segments: &[Segment], ram: &[GpaRange]) -> Result<Gpa, BootError> {
    check_placement(segments, ram).map_err(|source| BootError::Image { image: config.image().clone(), source })
}

fn write_segments(view: &GuestView, bytes: &[u8], segments: &[Segment]) -> Result<(), BootError> {
    for segment in segments {
        write(view, "the image", segment.memory.start(), &bytes[segment.file.clone()])?;
    }
    Ok(())
}

fn write_cmdline(view: &GuestView, cmdline: &str) -> Result<(), BootError> {
    let mut bytes = cmdline.as_bytes().to_vec();
    bytes.push(0);
    write(view, "the command line", layout::CMDLINE, &bytes)
}

/// Writes the tables of CPUs and interrupts twice (ACPI and MP), because kernels read one or the other. Only
/// ACPI describes devices.
fn write_machine_tables(config: &VmConfig, view: &GuestView, devices: usize) -> Result<(), BootError> {
    let vcpus = config.vcpus() as u8;
    let tables = acpi::bytes(vcpus, devices, &Cells { cells: config.cells(), ram: &config.ram_layout() });
    write(view, "the ACPI tables", layout::ACPI, &tables)?;
    write(view, "the MP table", layout::MP_TABLE, &mp_table::bytes(vcpus))
}

fn write_words(view: &GuestView, what: &'static str, at: Gpa, words: &[u64]) -> Result<(), BootError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    write(view, what, at, &bytes)
}

fn write(view: &GuestView, what: &'static str, at: Gpa, bytes: &[u8]) -> Result<(), BootError> {
    view.write_slice(bytes, GuestAddress(at.get())).map_err(write_error(what))
}

fn write_error<E: Into<Box<dyn std::error::Error + Send + Sync>>>(what: &'static str) -> impl Fn(E) -> BootError {
    move |source| BootError::Write { what, source: source.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::layout::ram_ranges;
    use wideleaf_policies::units::{gib, mib};

    #[test]
    fn tables_follow_the_image_and_free_memory_begins_at_a_window() {
        // The image ends inside a page; 2m tables of 1 GiB take three pages.
        let (root, free_start) =
            place_tables(Gpa::new(0x20_1234), &ram_ranges(gib(1)), &ram_ranges(gib(1)), PageSize::Huge2M).unwrap();
        assert_eq!((root.get(), free_start.get()), (0x20_2000, 0x40_0000));
    }

    #[test]
    fn a_bzimage_unpacks_itself_at_its_preferred_address_and_never_below_its_start() {
        let start = |pref_address, kernel_alignment| {
            let header = setup_header { pref_address, kernel_alignment, ..Default::default() };
            unpacked_start(&header, Gpa::new(1 << 20)).get()
        };
        assert_eq!(start(16 << 20, 2 << 20), 16 << 20, "the usual build of Linux");
        assert_eq!(start(1 << 20, 0x1000), 1 << 20, "memtest86+");
        assert_eq!(start(0, 2 << 20), 2 << 20, "the first aligned address");
        assert_eq!(start(0, 0), 1 << 20, "an alignment that no kernel has");
    }

    #[test]
    fn tables_that_do_not_fit_are_refused_with_numbers() {
        let ram = ram_ranges(mib(4));
        let error = place_tables(Gpa::new(0x3f_f001), &ram, &ram, PageSize::Huge2M).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot place the page tables: image and 2m tables need memory up to 0x600000, guest RAM below the hole \
             ends at 0x400000; use more --memory or larger guest pages"
        );
    }
}
