//! The I/O ports of a guest. All of them are x86 port numbers, written and read with `out` and `in`.

/// First port of the serial line (16550 compatible, COM1): the guest writes its lines here, one byte at a time.
///
/// An image that was started directly never reads the line status: its VMM must take every byte. An image that was
/// started through PVH reads [`SERIAL_LINE_STATUS`] once every 16 bytes.
pub const SERIAL: u16 = 0x3f8;

/// Line status of the 16550 at [`SERIAL`]; bit 5 is set if the transmitter can take bytes.
pub const SERIAL_LINE_STATUS: u16 = SERIAL + 5;

/// Port that our VMM gives in [`DirectBoot::line_port`](crate::DirectBoot::line_port): a 32-bit write is the address of
/// a [`LinePiece`](crate::direct::LinePiece). It is of the 80287's range, which is no longer used.
pub const LINE: u16 = 0xfc;

/// Exit port of a guest: one 8-bit write of an [`ExitCode`](crate::ExitCode). It is QEMU's
/// `-device isa-debug-exit,iobase=0xf4,iosize=4`; our VMM has the same port.
pub const EXIT: u16 = 0xf4;

/// PM1a control of QEMU's q35 and pc machines, tried after [`EXIT`] in case no device is there.
pub const ACPI_PM1A_CONTROL: u16 = 0x604;

/// Value written to [`ACPI_PM1A_CONTROL`] (16 bits): sleep enable (bit 13), sleep type 0, which is S5 on these
/// machines.
pub const ACPI_POWER_OFF: u16 = 0x2000;

/// The power button among PM1a's events (ACPI 6.5, 4.8.3.1.1), in the status register at
/// [`DirectBoot::power_port`](crate::DirectBoot::power_port) and in the enable register behind it: 16 bits each.
pub const ACPI_POWER_BUTTON: u16 = 1 << 8;

/// Distance from PM1a's status register to its enable register.
pub const ACPI_ENABLE_OFFSET: u16 = 2;
