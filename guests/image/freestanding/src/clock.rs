//! The frequency of the time stamp counter: what CPUID says, else a measurement against the 8254 timer, else unknown.
//! Every wait ends, also where there is no timer.

use core::hint::spin_loop;

use wideleaf_kernels::team::ticks;

use crate::machine::{cpuid, in8, out8};

/// Assumed frequency of an unknown counter: faster than any CPU, so that no wait is too short.
const FASTEST_TSC_HZ: u64 = 5_000_000_000;

/// Ticks per second as reported by the CPU or the hypervisor: CPUID 0x40000010 (EAX in kHz, a convention of KVM and
/// others), then 0x15 (SDM volume 2, CPUID: crystal frequency and ratio). `None` if neither reports it.
pub fn tsc_hz_from_cpuid() -> Option<u64> {
    let [khz, ..] = cpuid(0x4000_0010);
    let [denominator, numerator, crystal_hz, _] = cpuid(0x15);
    let by_hypervisor = u64::from(khz) * 1000;
    let by_crystal = (u64::from(crystal_hz) * u64::from(numerator)).checked_div(u64::from(denominator));
    [Some(by_hypervisor), by_crystal].into_iter().flatten().find(|hz| *hz != 0)
}

/// Frequency of the 8254 timer in Hz: a third of the old colour carrier, 14.31818 MHz / 12.
const PIT_HZ: u64 = 1_193_182;
/// Timer ticks over which the counter is measured: 40 ms, of the 55 that the timer can count.
const PIT_SPAN: u16 = 47_727;
const _: () = assert!(PIT_SPAN as u64 * 1000 / PIT_HZ == 39, "the span is 40 ms, less one tick");
/// Maximum readings of the timer within one span: each takes a microsecond or more. A stopped timer ends the loop
/// by this.
const PIT_READINGS_MAX: u32 = 100_000;
/// Number of readings at each end, of which the fastest counts: slower ones were interrupted.
const PIT_READINGS_AT_ENDS: u32 = 8;
/// Attempts at a measurement, for a busy host that spoils some.
const PIT_ATTEMPTS: u32 = 10;
/// Precision of a good measurement: its readings took less than a thousandth of it.
const PIT_PRECISION: u64 = 1000;

/// Ticks per second, measured against channel 0 of the 8254 timer, which needs no other device to run (channel 2
/// has its gate in port 0x61, which small machines lack). `None` if there is no running timer.
pub fn tsc_hz_from_timer() -> Option<u64> {
    let mut attempts = (0..PIT_ATTEMPTS).filter_map(|_| measure());
    let first = attempts.next()?;
    let good = core::iter::once(first).chain(attempts).find(Measurement::is_good);
    let Measurement { turns, ticks, .. } = good.unwrap_or(first);
    (ticks * PIT_HZ).checked_div(turns)
}

#[derive(Clone, Copy)]
struct Measurement {
    turns: u64,
    ticks: u64,
    /// Uncertainty of the two ends together, in ticks.
    blur: u64,
}

impl Measurement {
    const fn is_good(&self) -> bool {
        self.blur * PIT_PRECISION < self.ticks
    }
}

/// One measurement; `None` if the timer is missing, or ran out because the host was busy.
fn measure() -> Option<Measurement> {
    const INTERRUPT_ON_TERMINAL_COUNT: u8 = 0x30;
    out8(PIT_COMMAND, INTERRUPT_ON_TERMINAL_COUNT);
    out8(PIT_CHANNEL_0, 0xff);
    out8(PIT_CHANNEL_0, 0xff);
    let quickest = || (0..PIT_READINGS_AT_ENDS).filter_map(|_| Reading::take()).min_by_key(|reading| reading.took);
    let start = quickest()?;
    (0..PIT_READINGS_MAX)
        .map_while(|_| Reading::take())
        .find(|now| start.count.saturating_sub(now.count) >= PIT_SPAN)?;
    let end = quickest()?;
    Some(Measurement {
        turns: u64::from(start.count.saturating_sub(end.count)),
        ticks: end.at.saturating_sub(start.at),
        blur: start.took + end.took,
    })
}

const PIT_COMMAND: u16 = 0x43;
const PIT_CHANNEL_0: u16 = 0x40;

/// The timer's count, which goes down, and the time of the reading.
struct Reading {
    count: u16,
    at: u64,
    took: u64,
}

impl Reading {
    /// `None` if the timer has run out, because its count has then started again. Also if no timer answers (0xff).
    fn take() -> Option<Self> {
        /// Latches count and status of channel 0 at the same moment.
        const READ_BACK_CHANNEL_0: u8 = 0xc2;
        const HAS_RUN_OUT: u8 = 0x80;
        let before = ticks();
        out8(PIT_COMMAND, READ_BACK_CHANNEL_0);
        let took = ticks().saturating_sub(before);
        let status = in8(PIT_CHANNEL_0);
        let count = u16::from_le_bytes([in8(PIT_CHANNEL_0), in8(PIT_CHANNEL_0)]);
        // The count belongs to some moment within the command.
        (status & HAS_RUN_OUT == 0).then_some(Self { count, at: before + took / 2, took })
    }
}

/// Waits until `condition` holds, for at most `microseconds`. Returns whether it held. With an unknown clock it may
/// wait longer.
pub fn wait_until(tsc_hz: u64, microseconds: u64, condition: impl Fn() -> bool) -> bool {
    let hz = if tsc_hz == 0 { FASTEST_TSC_HZ } else { tsc_hz };
    let start = ticks();
    while !condition() {
        if ticks().saturating_sub(start) > hz / 1_000_000 * microseconds {
            return condition();
        }
        spin_loop();
    }
    true
}
