//! The common part of both entries: from a machine with RAM and vCPUs to the exit code. The longest free range of RAM
//! becomes the kernel's arena; a wrong word for the image ends the program before the kernel begins.
#![expect(unsafe_code, reason = "hands a range of physical memory to the kernel as its arena")]

use wideleaf_kernels::platform::Devices;
use wideleaf_kernels::team::ticks;
use wideleaf_kernels::{Arena, Platform, registry};
use wideleaf_protocol::arguments::{self, KEY_GUEST_PAGES, KEY_TSC_HZ, KEY_VCPUS, Repeated};
use wideleaf_protocol::{CommandLine, ExitCode, GuestPage, Message, RamRange, VCPUS_MAX};

use crate::console::{self, fail};
use crate::machine::{entry, read_u32, write_u32};
use crate::power_button::PowerButton;
use crate::vcpus;

/// Alignment of the arena, so that the kernel's data begin at a window of the host.
const ARENA_ALIGNMENT: u64 = GuestPage::Huge2M.bytes();

/// The image's own arguments, and the line they came from.
#[derive(Clone, Copy)]
pub struct Options<'l> {
    /// The whole command line.
    pub line: CommandLine<'l>,
    /// Requested page size.
    pub guest_page: Option<GuestPage>,
    /// Requested number of vCPUs.
    pub vcpus: Option<usize>,
    /// Ticks per second, as given by the user.
    pub tsc_hz: Option<u64>,
}

impl<'l> Options<'l> {
    /// Reads the image's own keys; ends the program on an invalid value.
    pub fn new(line: &'l [u8]) -> Self {
        let refuse = |reason: core::fmt::Arguments<'_>| -> ! { fail(ExitCode::BadArguments, reason) };
        let Ok(line) = core::str::from_utf8(line) else { refuse(format_args!("command line: not UTF-8 text")) };
        let line = CommandLine::new(line).unwrap_or_else(|error| refuse(format_args!("command line: {error}")));
        let guest_page = line.value(KEY_GUEST_PAGES).map(|value| {
            GuestPage::from_word(value)
                .unwrap_or_else(|| refuse(format_args!("{KEY_GUEST_PAGES}={}: expected 4k, 2m or 1g", Repeated(value))))
        });
        let vcpus = line.value(KEY_VCPUS).map(|value| match arguments::parse_count(value) {
            Some(vcpus) if (1..=VCPUS_MAX as u64).contains(&vcpus) => vcpus as usize,
            _ => refuse(format_args!("{KEY_VCPUS}={}: expected a count from 1 to {VCPUS_MAX}", Repeated(value))),
        });
        let tsc_hz = line.value(KEY_TSC_HZ).map(|value| {
            arguments::parse_count(value)
                .unwrap_or_else(|| refuse(format_args!("{KEY_TSC_HZ}={}: expected a frequency in Hz", Repeated(value))))
        });
        Self { line, guest_page, vcpus, tsc_hz }
    }
}

/// A machine that is ready to run a kernel: the calling vCPU leads, the others wait for the team's first job.
pub struct Machine<'r> {
    /// Number of vCPUs, including this one.
    pub vcpus: usize,
    /// Ticks per second; 0 if unknown.
    pub tsc_hz: u64,
    /// Page size of the tables in use.
    pub guest_page: GuestPage,
    /// Ranges of RAM, all mapped one to one.
    pub ram: &'r [RamRange],
    /// First address after all memory in use.
    pub free_start: u64,
    /// Possible places of devices; mapped one to one.
    pub devices: Devices,
    /// Button that ends a timed run early.
    pub power_button: PowerButton,
}

impl Platform for Machine<'_> {
    fn now(&self) -> u64 {
        ticks()
    }

    fn tsc_hz(&self) -> u64 {
        self.tsc_hz
    }

    fn vcpus(&self) -> usize {
        self.vcpus
    }

    fn accept_end(&self) {
        self.power_button.enable();
    }

    fn is_asked_to_end(&self) -> bool {
        self.power_button.was_pressed()
    }

    fn emit(&self, message: &Message<'_>) {
        console::emit(message);
    }

    fn devices(&self) -> Devices {
        self.devices
    }

    fn read_register(&self, address: u64) -> u32 {
        self.check_register(address);
        // SAFETY: the address is a register's, aligned and mapped one to one.
        unsafe { read_u32(address) }
    }

    fn write_register(&self, address: u64, value: u32) {
        self.check_register(address);
        // SAFETY: as for reading; what a device writes by itself is the arena, which is atomic words to Rust.
        unsafe { write_u32(address, value) };
    }

    fn run_on_all(&self, job: &(dyn Fn(usize) + Sync)) {
        vcpus::TEAM.lead(job);
    }
}

impl Machine<'_> {
    fn check_register(&self, address: u64) {
        let Devices { first, stride, count } = self.devices;
        let is_one = address.is_multiple_of(4) && (first..first + stride * count).contains(&address);
        assert!(is_one, "a kernel accesses a register outside all devices");
    }
}

/// Runs the kernel that the command line names, and ends the program.
///
/// # Safety
/// All of `machine.ram` at or above `machine.free_start` is mapped one to one, writable, and used by nothing; so are
/// the registers at `machine.devices`.
pub unsafe fn run(machine: &Machine<'_>, options: &Options<'_>) -> ! {
    vcpus::assemble(machine.vcpus);
    if machine.tsc_hz == 0 {
        // Not a line of the protocol: a note for a human reader of the console.
        console::note(format_args!("no clock: the frequency of the time stamp counter is unknown; give tsc_hz="));
    }
    let Some(range) = largest_free(machine.ram, machine.free_start) else {
        fail(ExitCode::Unsupported, format_args!("no RAM above {:#x} is left for the kernel", machine.free_start));
    };
    let start = core::ptr::with_exposed_provenance_mut::<u64>(range.gpa as usize);
    // SAFETY: the caller vouches for mapping and exclusivity of all free RAM; the range is aligned to 2 MiB, not at 0
    // because the image lies below it, and shorter than the address space.
    let arena = unsafe { Arena::from_raw(start, range.bytes as usize) };
    let started = registry::Started { entry: entry(), guest_page: machine.guest_page };
    console::exit(registry::run(machine, &arena, options.line.as_str(), started))
}

/// The longest range of free RAM that begins at a multiple of 2 MiB, in whole 4 KiB pages.
fn largest_free(ram: &[RamRange], free_start: u64) -> Option<RamRange> {
    const PAGE: u64 = GuestPage::Base4K.bytes();
    let free = ram.iter().filter_map(|range| {
        let gpa = range.gpa.max(free_start).checked_next_multiple_of(ARENA_ALIGNMENT)?;
        let end = range.end()? / PAGE * PAGE;
        let bytes = end.checked_sub(gpa).filter(|bytes| *bytes > 0)?;
        Some(RamRange { gpa, bytes })
    });
    free.max_by_key(|range| range.bytes)
}
