//! What a kernel needs from where it runs.

use wideleaf_protocol::Message;

/// Places of virtio devices' registers (Virtual I/O Device 1.2, 4.2.2), at equal distances; not each needs to have a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// First address of the first.
    pub first: u64,
    /// From one to the next.
    pub stride: u64,
    /// How many.
    pub count: u64,
}

/// A machine as a kernel sees it: a guest image's vCPUs or a process's threads.
pub trait Platform: Sync {
    /// Ticks of the time stamp counter, the same on every vCPU to within what the hardware promises.
    fn now(&self) -> u64;

    /// Ticks per second; 0 when nobody knows. Then kernels report ticks and refuse parameters in seconds.
    fn tsc_hz(&self) -> u64;

    /// How many vCPUs take part, at least 1 and at most [`VCPUS_MAX`](wideleaf_protocol::VCPUS_MAX).
    fn vcpus(&self) -> usize;

    /// How many of the timed part's `total` steps are run: all of them, but where only the accesses of some are wanted. The kernel then
    /// cannot come to the right result, and whoever answers with fewer knows that.
    fn steps_of(&self, total: u32) -> u32 {
        total
    }

    /// Prints one line. On some machines every byte is an exit to the VMM, so kernels ration their lines.
    fn emit(&self, message: &Message<'_>);

    /// Where registers of virtio devices may be. Most machines have none.
    fn devices(&self) -> Devices {
        Devices::default()
    }

    /// Reads a 32-bit register of a device at an address that [`Platform::devices`] covers.
    fn read_register(&self, _address: u64) -> u32 {
        0
    }

    /// Writes one.
    fn write_register(&self, _address: u64, _value: u32) {}

    /// Runs `job(i)` on every vCPU i, the caller being vCPU 0, and returns when all are done. What a vCPU wrote in its job
    /// is visible to the caller afterwards, and what the caller wrote before is visible in the jobs.
    fn run_on_all(&self, job: &(dyn Fn(usize) + Sync));
}

/// A span of ticks in nanoseconds; 0 when the frequency is unknown.
pub fn ticks_to_ns(ticks: u64, tsc_hz: u64) -> u64 {
    if tsc_hz == 0 {
        return 0;
    }
    let ns = u128::from(ticks) * 1_000_000_000 / u128::from(tsc_hz);
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// A span of ticks in seconds. Meaningless (infinite or not a number) when the frequency is unknown.
pub fn ticks_to_seconds(ticks: u64, tsc_hz: u64) -> f64 {
    ticks as f64 / tsc_hz as f64
}
