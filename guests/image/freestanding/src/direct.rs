//! The direct entry: our VMM has set everything up, and this module only reads the boot data (wideleaf-protocol,
//! `direct`).
#![expect(unsafe_code, reason = "reads what the VMM left at physical addresses, and is called from boot.s")]

use wideleaf_kernels::platform::Devices;
use wideleaf_protocol::arguments::{COMMAND_LINE_BYTES_MAX, KEY_GUEST_PAGES, KEY_VCPUS};
use wideleaf_protocol::direct::{DEVICE_STRIDE, DIRECT_BOOT_BYTES};
use wideleaf_protocol::{DirectBoot, Entry, ExitCode, GuestPage};

use crate::console::{self, fail};
use crate::machine::{end_of_image, read_physical, set_entry};
use crate::power_button::PowerButton;
use crate::run::{self, Machine, Options};
use crate::{clock, vcpus};

/// First Rust code of every vCPU after a direct start, on its own stack.
#[unsafe(no_mangle)]
extern "C" fn direct_main(boot_gpa: u64, vcpu: usize) -> ! {
    if vcpu == 0 { lead(boot_gpa) } else { vcpus::follow(vcpu) }
}

fn lead(boot_gpa: u64) -> ! {
    set_entry(Entry::Direct);
    let mut bytes = [0; DIRECT_BOOT_BYTES];
    // SAFETY: by the contract the address is that of the boot data, in RAM, which is all mapped one to one.
    unsafe { read_physical(boot_gpa, &mut bytes) };
    let boot = DirectBoot::from_bytes(&bytes);
    if let Err(error) = boot.validate() {
        fail(ExitCode::Unsupported, format_args!("{error}"));
    }
    console::set_line_port(boot.line_port);
    if boot.free_start < end_of_image() {
        let end = end_of_image();
        fail(
            ExitCode::Unsupported,
            format_args!("free_start {:#x} lies before the image's end {end:#x}", boot.free_start),
        );
    }
    if boot.cmdline_len > COMMAND_LINE_BYTES_MAX as u64 {
        fail(ExitCode::BadArguments, format_args!("command line: longer than {COMMAND_LINE_BYTES_MAX} bytes"));
    }
    let mut line = [0; COMMAND_LINE_BYTES_MAX];
    let line = &mut line[..boot.cmdline_len as usize];
    // SAFETY: by the contract the command line lies in RAM.
    unsafe { read_physical(boot.cmdline_gpa, line) };
    let options = Options::new(line);

    let guest_page = GuestPage::from_bytes(boot.guest_page_bytes).unwrap_or(GuestPage::Base4K);
    if options.guest_page.is_some_and(|asked| asked != guest_page) {
        fail(ExitCode::BadArguments, format_args!("{KEY_GUEST_PAGES}= differs from the VMM's page size, {guest_page}"));
    }
    let count = options.vcpus.unwrap_or(boot.vcpus as usize);
    if count > boot.vcpus as usize {
        fail(ExitCode::Unsupported, format_args!("{KEY_VCPUS}={count}, but the VMM started {}", boot.vcpus));
    }
    let by_vmm = Some(boot.tsc_hz).filter(|hz| *hz != 0);
    let tsc_hz = options.tsc_hz.or(by_vmm).or_else(clock::tsc_hz_from_cpuid).unwrap_or(0);
    let devices = Devices { first: boot.devices_gpa, stride: DEVICE_STRIDE, count: boot.device_count };
    let (ram, power_button) = (boot.ram(), PowerButton::new(boot.power_port, tsc_hz));
    let machine = Machine { vcpus: count, tsc_hz, guest_page, ram, free_start: boot.free_start, devices, power_button };
    // SAFETY: by the contract all RAM and the devices' registers are mapped one to one, and all at or above
    // `free_start` is the image's.
    unsafe { run::run(&machine, &options) }
}
