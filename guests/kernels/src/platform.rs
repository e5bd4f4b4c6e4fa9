//! The interface between a kernel and the machine that it runs on.

use wideleaf_protocol::Message;

/// Register windows of virtio devices (Virtual I/O Device 1.2, 4.2.2) at equal distances. Some may have no device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// Address of the first window.
    pub first: u64,
    /// Distance from one window to the next, in bytes.
    pub stride: u64,
    /// Number of windows.
    pub count: u64,
}

/// A machine as a kernel sees it: a guest image's vCPUs or a process's threads.
pub trait Platform: Sync {
    /// Ticks of the time stamp counter, equal on every vCPU to within the hardware's guarantee.
    fn now(&self) -> u64;

    /// Ticks per second; 0 if unknown. Kernels then report ticks and refuse parameters in seconds.
    fn tsc_hz(&self) -> u64;

    /// Number of vCPUs that take part, at least 1 and at most [`VCPUS_MAX`](wideleaf_protocol::VCPUS_MAX).
    fn vcpus(&self) -> usize;

    /// Number of the timed part's `total` steps to run. The default is all; a platform that only records the
    /// accesses of some steps returns fewer, and must expect that the kernel's result is then wrong.
    fn steps_of(&self, total: u32) -> u32 {
        total
    }

    /// Has [`Platform::is_asked_to_end`] tell from now on. Kernels that can end early call it before their timed part.
    fn accept_end(&self) {}

    /// Whether the machine's user has asked for an early end. Kernels ask after each round, be it of microseconds.
    fn is_asked_to_end(&self) -> bool {
        false
    }

    /// Prints one line. On some machines every byte is an exit to the VMM, so kernels ration their lines.
    fn emit(&self, message: &Message<'_>);

    /// Register windows of virtio devices. Most machines have none.
    fn devices(&self) -> Devices {
        Devices::default()
    }

    /// Reads a 32-bit register of a device at an address that [`Platform::devices`] covers.
    fn read_register(&self, _address: u64) -> u32 {
        0
    }

    /// Writes a 32-bit register of a device.
    fn write_register(&self, _address: u64, _value: u32) {}

    /// Runs `job(i)` on every vCPU i, with the caller as vCPU 0, and returns when all are done. The caller then
    /// sees all writes of the jobs, and the jobs see the caller's earlier writes.
    fn run_on_all(&self, job: &(dyn Fn(usize) + Sync));
}

/// A span of ticks in nanoseconds; 0 if the frequency is unknown.
pub fn ticks_to_ns(ticks: u64, tsc_hz: u64) -> u64 {
    if tsc_hz == 0 {
        return 0;
    }
    let ns = u128::from(ticks) * 1_000_000_000 / u128::from(tsc_hz);
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// A span of ticks in seconds. Infinite or not a number if the frequency is unknown.
pub fn ticks_to_seconds(ticks: u64, tsc_hz: u64) -> f64 {
    ticks as f64 / tsc_hz as f64
}
