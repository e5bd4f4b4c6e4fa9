//! Cost of a load over growing footprints, and the TLB levels that follow from it: number of entries and price of a
//! miss.
//!
//! [`chase`](crate::chase) has the chains, the analysis of a curve and the criterion for a settled result. This
//! module has the parameters and the output lines.

use core::ops::Range;
use core::sync::atomic::AtomicU64;

use wideleaf_protocol::{Message, Name};

use crate::chase::{Level, POINTS_MAX, Spacing, Survey, spots_at};
use crate::kernel::{Kernel, MemoryNeed};
use crate::parameters::{Parameter, Parameters};
use crate::platform::ticks_to_seconds;
use crate::report::{self, COMPUTE, Figure};
use crate::rounds::ASSUMED_TSC_HZ;
use crate::{Arena, KernelError, Platform};

/// The measurement of latencies in the table of kernels.
pub const KERNEL: Kernel = Kernel {
    name: Name::literal("latency"),
    summary: "pointer chase over growing footprints: TLB entries and the cost of a miss",
    classes: &[],
    parameters: PARAMETERS,
    quick: "bytes=1M rounds=2",
    figure: FIGURE,
    // A second vCPU would share caches with the first and change the measurement.
    vcpus_max: 1,
    memory,
    run,
};

/// Time of a load at the largest footprint, one load in each page.
const FIGURE: Figure = Figure::literal("load", "ns");

const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "bytes",
        default: "64M",
        unit: "bytes (K, M, G, T)",
        meaning: "largest footprint, at least 8 strides",
    },
    Parameter {
        name: "page",
        default: "4K",
        unit: "bytes (K, M, G, T)",
        meaning: "assumed page size, a power of two from 4K to 1G",
    },
    Parameter {
        name: "stride",
        default: "one page",
        unit: "bytes (K, M, G, T)",
        meaning: "distance between two spots, whole pages",
    },
    Parameter { name: "rounds", default: "12", unit: "count", meaning: "maximum number of rounds, 1 to 1000" },
];

/// Page sizes of x86-64, in bytes.
const PAGES: Range<u64> = 4 << 10..(1 << 30) + 1;
/// Number of spots of the smallest footprint.
const SPOTS_MIN: u64 = spots_at(0);
/// Longest footprint that can be requested: the spots at the last point, of the smallest pages.
const BYTES_MAX: u64 = PAGES.start * spots_at(POINTS_MAX - 1);
/// Length of a run in microseconds: many laps of a footprint that the TLB holds, and shorter than a time slice of a
/// busy host.
const RUN_US: u64 = 500;

/// The validated parameters of a run.
#[derive(Clone, Copy)]
struct Plan {
    bytes: u64,
    spacing: Spacing,
    spots: u64,
    rounds: u64,
}

impl Plan {
    fn from_parameters<'a>(parameters: &Parameters<'a>) -> Result<Self, KernelError<'a>> {
        let page = parameters.size("page", PAGES.start, PAGES.end - 1)?.unwrap_or(PAGES.start);
        // Rounded down, like sizes in the other kernels.
        let page = 1 << page.ilog2();
        let stride = parameters.size("stride", page, BYTES_MAX / SPOTS_MIN)?.unwrap_or(page) / page * page;
        let bytes =
            parameters.size("bytes", SPOTS_MIN * stride, BYTES_MAX)?.unwrap_or((64 << 20).max(SPOTS_MIN * stride));
        let rounds = parameters.count("rounds", 1, 1000)?.unwrap_or(12);
        let spots = bytes / stride;
        Ok(Self { bytes: spots * stride, spacing: Spacing::Pages { stride, page }, spots, rounds })
    }
}

fn memory<'a>(parameters: &Parameters<'a>, _vcpus: usize) -> Result<MemoryNeed, KernelError<'a>> {
    Ok(MemoryNeed::Bytes(Plan::from_parameters(parameters)?.bytes))
}

fn run<'a>(platform: &dyn Platform, arena: &Arena<'_>, parameters: &Parameters<'a>) -> Result<(), KernelError<'a>> {
    let plan = Plan::from_parameters(parameters)?;
    if arena.bytes() < plan.bytes {
        return Err(KernelError::ArenaTooSmall { needed: plan.bytes, bytes: arena.bytes() });
    }
    platform.emit(&Message::Region { name: Name::literal("chain"), address: arena.address(), bytes: plan.bytes });
    let (survey, _) = report::phase(platform, COMPUTE, || measure(platform, arena.words(), plan));
    report_survey(platform, &survey);
    report::verdict(platform, survey.broken(), survey.chains())
}

/// Measures round after round, until the rounds agree.
fn measure(platform: &dyn Platform, words: &[AtomicU64], plan: Plan) -> Survey {
    let hz = if platform.tsc_hz() == 0 { ASSUMED_TSC_HZ } else { platform.tsc_hz() };
    let mut survey = Survey::new(plan.spacing, plan.spots, hz / 1_000_000 * RUN_US);
    for _ in report::steps(platform, plan.rounds as u32) {
        survey.add_round(platform, words);
        if survey.is_settled() {
            break;
        }
    }
    survey
}

fn report_survey(platform: &dyn Platform, survey: &Survey) {
    let scale = Scale::of(platform);
    for (prefix, curve) in [("pages", survey.pages()), ("dense", survey.dense())] {
        for (point, ticks) in curve.ticks().iter().enumerate() {
            report::numbered_result(platform, prefix, spots_at(point), ticks * scale.per_tick, scale.unit);
        }
    }
    if let (Some(ticks), 1..) = (survey.pages().ticks().last(), platform.tsc_hz()) {
        FIGURE.emit(platform, ticks * scale.per_tick);
    }
    for (index, level) in survey.levels().iter().enumerate() {
        report_level(platform, index as u64 + 1, level);
    }
    report::result(platform, Name::literal("rounds"), survey.rounds() as f64, Name::literal("rounds"));
    report::result(platform, Name::literal("matches"), survey.matches() as f64, Name::literal("of_3_wanted"));
}

fn report_level(platform: &dyn Platform, number: u64, level: Level) {
    let scale = Scale::of(platform);
    let result = |prefix, value, unit| report::numbered_result(platform, prefix, number, value, unit);
    result("entries", level.entries as f64, Name::literal("entries"));
    result("miss", level.miss_ticks * scale.per_tick, scale.unit);
    result("miss_ticks", level.miss_ticks, Name::literal("ticks"));
    result("spread_ticks", level.spread_ticks, Name::literal("ticks"));
}

/// Nanoseconds, or ticks if the counter's frequency is unknown.
struct Scale {
    per_tick: f64,
    unit: Name<'static>,
}

impl Scale {
    fn of(platform: &dyn Platform) -> Self {
        match platform.tsc_hz() {
            0 => Self { per_tick: 1.0, unit: Name::literal("ticks") },
            hz => Self { per_tick: ticks_to_seconds(1, hz) * 1e9, unit: Name::literal("ns") },
        }
    }
}
