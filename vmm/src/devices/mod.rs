//! The devices that a guest can reach, beside its RAM.
//!
//! | ports | device | used by |
//! |---|---|---|
//! | 0x3f8–0x3ff | [`serial`]: a 16550, lines go to a sink | every guest |
//! | 0xf4 | [`exit_port`]: ends the VM with a code | our guests |
//! | 0xf8 | fault reports of the direct entry ([`crate::x86::fault_report`]) | stubs the VMM wrote |
//! | 0xfc | [`line_port`]: pieces of lines for the serial port's sink | our guests, directly started |
//! | 0x60–0x64 | [`legacy`]: keyboard controller, for its reset command | Linux with `reboot=k` |
//! | 0x70–0x71 | [`legacy`]: the clock's memory, all zeroes | Linux, which otherwise waits for it |
//! | 0x600–0x605 | [`power`]: ACPI's power management; power-off is where QEMU's machines have it | our guests, Linux |
//!
//! Devices in memory are [`virtio`]'s, from 0xd000_0000 on. All other accesses read as ones and are
//! counted: [`bus`].

pub mod bus;
pub mod exit_port;
pub mod legacy;
pub mod line_port;
pub mod power;
pub mod serial;
pub mod virtio;

pub use bus::{Bus, BusCounters, BusEvent, BusWatch};
pub use power::PowerButton;
pub use serial::{SerialOutput, SerialSink};
