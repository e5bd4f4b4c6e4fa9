//! Ports and the interrupt by which a guest switches its machine off and resets it. The ACPI tables name them, the
//! devices answer there, and a directly started guest may write them.

/// First of the power management ports: event block (4 bytes: status, enable), control block (2). The control block
/// has the port of QEMU's machines, so that guests which do not read these tables find it too.
pub const POWER_PORTS: u16 = 0x600;
/// Offset from there to the control block.
pub const POWER_CONTROL_OFFSET: u16 = 4;
/// Last of these ports.
pub const POWER_PORTS_LAST: u16 = POWER_PORTS + POWER_CONTROL_OFFSET + 1;
/// Interrupt of power management events: that of every PC. It is level-triggered and active low by default (ACPI
/// 6.5, 5.2.9); KVM's IOAPIC ignores the polarity.
pub const SCI: u16 = 9;
/// The reset register at a PC's usual port, so that Linux also finds it by its own list (`reboot=p`).
pub const RESET_PORT: u16 = 0xcf9;
/// Value that causes a hard reset of the CPU (Intel ICH datasheets, "RST_CNT, Reset Control Register").
pub const RESET_VALUE: u8 = 1 << 1 | 1 << 2;
