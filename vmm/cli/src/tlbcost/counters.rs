//! Page walks by the CPU's own counters, where the host has them: which events on which CPU, found by trying. Not run on hardware yet: the
//! machines this was written on have no counters, so the table is from the vendors' lists and the selection is tested with a fake.
//!
//! ```text
//!   /proc/cpuinfo ─▶ EVENTS, by vendor, family, model ─▶ open all of them ─▶ selected │ why not
//!                                                             └─▶ a run in a child, which inherits them ─▶ walks, their cycles
//! ```
//!
//! AMD counts walks but not their cycles: there the calibrated cost of one is needed beside the count.

use perf_event::events::{Hardware, Raw};
use perf_event::{Builder, Counter};
use serde::Serialize;
use wideleaf_memory::walk_cost::CpuModel;

/// An event: its vendor's name, and as `perf_event_attr.config` of raw events has it (event, unit mask << 8, counter mask << 24).
#[derive(Debug, PartialEq, Eq)]
pub struct Event {
    /// In the vendor's list.
    pub name: &'static str,
    /// For the kernel.
    pub config: u64,
}

const fn event(name: &'static str, event: u64, unit_mask: u64, counter_mask: u64) -> Event {
    Event { name, config: event | unit_mask << 8 | counter_mask << 24 }
}

/// What a kind of CPU counts of page walks.
#[derive(Debug)]
pub struct WalkEvents {
    /// The name people use.
    pub name: &'static str,
    vendor: &'static str,
    /// Display family and models, from and to.
    models: &'static [(u32, u32, u32)],
    /// Cycles in which a walk for data is under way; empty where that is not counted.
    pub walk_cycles: &'static [Event],
    /// Walks for data.
    pub walks: &'static [Event],
    /// Cycles in walks of the second level that `walk_cycles` leaves out.
    pub second_level_cycles: &'static [Event],
    /// Where that is from.
    pub source: &'static str,
}

const ZEN_SOURCE: &str = "AMD, Processor Programming Reference of the family, PMCx045 L1 DTLB misses";

/// By kind, newest first.
pub const EVENTS: &[WalkEvents] = &[
    WalkEvents {
        name: "Sapphire, Emerald and Granite Rapids",
        vendor: "GenuineIntel",
        models: &[(6, 0x8f, 0x8f), (6, 0xcf, 0xcf), (6, 0xad, 0xae)],
        walk_cycles: &[
            event("DTLB_LOAD_MISSES.WALK_ACTIVE", 0x12, 0x10, 1),
            event("DTLB_STORE_MISSES.WALK_ACTIVE", 0x13, 0x10, 1),
        ],
        walks: &[
            event("DTLB_LOAD_MISSES.WALK_COMPLETED", 0x12, 0x0e, 0),
            event("DTLB_STORE_MISSES.WALK_COMPLETED", 0x13, 0x0e, 0),
        ],
        second_level_cycles: &[],
        source: "Intel perfmon, SPR, EMR and GNR core events",
    },
    WalkEvents {
        name: "Ice Lake-SP",
        vendor: "GenuineIntel",
        models: &[(6, 0x6a, 0x6a), (6, 0x6c, 0x6c)],
        walk_cycles: &[
            event("DTLB_LOAD_MISSES.WALK_ACTIVE", 0x08, 0x10, 1),
            event("DTLB_STORE_MISSES.WALK_ACTIVE", 0x49, 0x10, 1),
        ],
        walks: &[
            event("DTLB_LOAD_MISSES.WALK_COMPLETED", 0x08, 0x0e, 0),
            event("DTLB_STORE_MISSES.WALK_COMPLETED", 0x49, 0x0e, 0),
        ],
        second_level_cycles: &[],
        source: "Intel perfmon, ICX core events",
    },
    WalkEvents {
        name: "Skylake-SP and Cascade Lake",
        vendor: "GenuineIntel",
        models: &[(6, 0x55, 0x55)],
        walk_cycles: &[
            event("DTLB_LOAD_MISSES.WALK_ACTIVE", 0x08, 0x10, 1),
            event("DTLB_STORE_MISSES.WALK_ACTIVE", 0x49, 0x10, 1),
        ],
        walks: &[
            event("DTLB_LOAD_MISSES.WALK_COMPLETED", 0x08, 0x0e, 0),
            event("DTLB_STORE_MISSES.WALK_COMPLETED", 0x49, 0x0e, 0),
        ],
        // The others leave walks of the EPT out on this microarchitecture.
        second_level_cycles: &[event("EPT.WALK_PENDING", 0x4f, 0x10, 0)],
        source: "Intel perfmon, SKX and CLX core events",
    },
    WalkEvents {
        name: "Broadwell-EP and -DE",
        vendor: "GenuineIntel",
        models: &[(6, 0x4f, 0x4f), (6, 0x56, 0x56)],
        walk_cycles: &[
            event("DTLB_LOAD_MISSES.WALK_DURATION", 0x08, 0x10, 0),
            event("DTLB_STORE_MISSES.WALK_DURATION", 0x49, 0x10, 0),
        ],
        walks: &[
            event("DTLB_LOAD_MISSES.WALK_COMPLETED", 0x08, 0x0e, 0),
            event("DTLB_STORE_MISSES.WALK_COMPLETED", 0x49, 0x0e, 0),
        ],
        second_level_cycles: &[event("EPT.WALK_CYCLES", 0x4f, 0x10, 0)],
        source: "Intel perfmon, BDX and BDW-DE core events",
    },
    WalkEvents {
        name: "Zen 2 to Zen 5",
        vendor: "AuthenticAMD",
        models: &[(0x17, 0x30, 0xff), (0x19, 0x00, 0xff), (0x1a, 0x00, 0xff)],
        walk_cycles: &[],
        walks: &[event("LS_L1_D_TLB_MISS.ALL_L2_MISS", 0x45, 0xf0, 0)],
        second_level_cycles: &[],
        source: ZEN_SOURCE,
    },
];

/// Opens counters. The real one is the kernel's; tests have another.
pub trait Pmu {
    /// A counter of this event in whatever this thread starts from now on.
    ///
    /// # Errors
    /// Why not.
    fn open(&self, event: &Event) -> Result<Box<dyn Count>, String>;

    /// A counter of the core's cycles, likewise.
    ///
    /// # Errors
    /// Why not.
    fn open_cycles(&self) -> Result<Box<dyn Count>, String>;
}

/// A counter that runs.
pub trait Count {
    /// What it has counted, for the whole time where it had the hardware for a part only.
    ///
    /// # Errors
    /// Why it cannot be told.
    fn read(&mut self) -> Result<u64, String>;
}

/// The events of this CPU, each of which could be opened.
///
/// # Errors
/// Why not, in one line.
pub fn select(pmu: &dyn Pmu, cpu: &CpuModel) -> Result<&'static WalkEvents, String> {
    pmu.open_cycles().map_err(|error| format!("no PMU: {error}"))?;
    let is_model = |(family, from, to): &(u32, u32, u32)| *family == cpu.family && (*from..=*to).contains(&cpu.model);
    let of_cpu = EVENTS.iter().find(|events| events.vendor == cpu.vendor && events.models.iter().any(is_model));
    let unknown = || format!("no table of events for {} family {:#x} model {:#x}", cpu.vendor, cpu.family, cpu.model);
    let events = of_cpu.ok_or_else(unknown)?;
    for event in events.walk_cycles.iter().chain(events.walks).chain(events.second_level_cycles) {
        pmu.open(event).map_err(|error| format!("{}: {error}", event.name))?;
    }
    Ok(events)
}

/// What was counted over a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Walks {
    /// Cycles of the core.
    pub cycles: u64,
    /// Walks for data.
    pub walks: u64,
    /// Cycles with a walk under way; `None` where the CPU does not count them.
    pub walk_cycles: Option<u64>,
}

impl Walks {
    /// Part of all cycles with a walk under way.
    pub fn share(&self) -> Option<f64> {
        (self.cycles > 0).then_some(self.walk_cycles? as f64 / self.cycles as f64)
    }
}

/// Counts the walks of what `work` starts.
///
/// # Errors
/// Why not; what `work` said otherwise.
pub fn count<R>(pmu: &dyn Pmu, events: &WalkEvents, work: impl FnOnce() -> R) -> Result<(Walks, R), String> {
    let open = |events: &'static [Event]| events.iter().map(|event| pmu.open(event)).collect::<Result<Vec<_>, _>>();
    let sum =
        |counters: Vec<Box<dyn Count>>| counters.into_iter().map(|mut counter| counter.read()).sum::<Result<u64, _>>();
    let mut cycles = pmu.open_cycles()?;
    let (walk_cycles, walks, second_level) =
        (open(events.walk_cycles)?, open(events.walks)?, open(events.second_level_cycles)?);
    let is_timed = !walk_cycles.is_empty();
    let result = work();
    let walk_cycles = sum(walk_cycles)? + sum(second_level)?;
    Ok((Walks { cycles: cycles.read()?, walks: sum(walks)?, walk_cycles: is_timed.then_some(walk_cycles) }, result))
}

/// The kernel's (perf_event_open(2)).
#[derive(Debug)]
pub struct LinuxPmu;

impl Pmu for LinuxPmu {
    fn open(&self, event: &Event) -> Result<Box<dyn Count>, String> {
        opened(&mut Builder::new(Raw::new(event.config)))
    }

    fn open_cycles(&self) -> Result<Box<dyn Count>, String> {
        opened(&mut Builder::new(Hardware::CPU_CYCLES))
    }
}

fn opened(builder: &mut Builder<'_>) -> Result<Box<dyn Count>, String> {
    let mut counter = builder.observe_self().any_cpu().inherit(true).build().map_err(|error| error.to_string())?;
    counter.enable().map_err(|error| error.to_string())?;
    Ok(Box::new(LinuxCount(counter)))
}

struct LinuxCount(Counter);

impl Count for LinuxCount {
    fn read(&mut self) -> Result<u64, String> {
        let counted = self.0.read_count_and_time().map_err(|error| error.to_string())?;
        match counted.time_running {
            0 if counted.time_enabled > 0 => Err("it never had the hardware: other counters take all of it".into()),
            0 => Ok(counted.count),
            running => Ok((counted.count as f64 * counted.time_enabled as f64 / running as f64) as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts how often it is asked, and lacks one event.
    struct FakePmu {
        lacks: Option<&'static str>,
        has_any: bool,
    }

    struct FakeCount(u64);

    impl Count for FakeCount {
        fn read(&mut self) -> Result<u64, String> {
            Ok(self.0)
        }
    }

    impl Pmu for FakePmu {
        fn open(&self, event: &Event) -> Result<Box<dyn Count>, String> {
            match self.lacks == Some(event.name) {
                true => Err("Invalid argument".into()),
                false => Ok(Box::new(FakeCount(event.config & 0xff))),
            }
        }

        fn open_cycles(&self) -> Result<Box<dyn Count>, String> {
            if self.has_any { Ok(Box::new(FakeCount(1000))) } else { Err("No such file or directory".into()) }
        }
    }

    fn cpu(vendor: &str, family: u32, model: u32) -> CpuModel {
        CpuModel { vendor: vendor.into(), family, model, name: "a CPU".into() }
    }

    const ALL: FakePmu = FakePmu { lacks: None, has_any: true };

    #[test]
    fn events_are_chosen_by_vendor_family_and_model() {
        let chosen = |vendor, family, model| select(&ALL, &cpu(vendor, family, model)).map(|events| events.name);
        assert_eq!(chosen("GenuineIntel", 6, 0x8f), Ok("Sapphire, Emerald and Granite Rapids"));
        assert_eq!(chosen("GenuineIntel", 6, 0x55), Ok("Skylake-SP and Cascade Lake"));
        assert_eq!(chosen("AuthenticAMD", 0x19, 0x11), Ok("Zen 2 to Zen 5"));
        assert_eq!(
            chosen("AuthenticAMD", 6, 0x55),
            Err("no table of events for AuthenticAMD family 0x6 model 0x55".into())
        );
    }

    #[test]
    fn a_host_without_counters_or_without_one_of_them_says_which() {
        let skylake = cpu("GenuineIntel", 6, 0x55);
        let none = select(&FakePmu { lacks: None, has_any: false }, &skylake).map(|events| events.name);
        assert_eq!(none, Err("no PMU: No such file or directory".into()));
        let one_less =
            select(&FakePmu { lacks: Some("EPT.WALK_PENDING"), has_any: true }, &skylake).map(|events| events.name);
        assert_eq!(one_less, Err("EPT.WALK_PENDING: Invalid argument".into()));
    }

    #[test]
    fn walks_of_loads_and_stores_and_of_the_second_level_are_summed() {
        let skylake = select(&ALL, &cpu("GenuineIntel", 6, 0x55)).expect("it has all of them");
        let (walks, result) = count(&ALL, skylake, || "done").expect("it has all of them");
        assert_eq!(walks, Walks { cycles: 1000, walks: 0x08 + 0x49, walk_cycles: Some(0x08 + 0x49 + 0x4f) });
        assert_eq!((walks.share(), result), (Some(f64::from(0x08 + 0x49 + 0x4f) / 1000.0), "done"));
        let zen = select(&ALL, &cpu("AuthenticAMD", 0x19, 0x11)).expect("it has all of them");
        let (walks, ()) = count(&ALL, zen, || ()).expect("it has all of them");
        assert_eq!((walks.walk_cycles, walks.share()), (None, None), "AMD counts no cycles of walks");
    }

    #[test]
    fn configurations_are_as_the_vendors_lists_have_them() {
        let of = |name: &str| EVENTS.iter().find(|events| events.name.starts_with(name)).expect("it is in the table");
        assert_eq!(of("Sapphire").walk_cycles[0].config, 0x0100_1012);
        assert_eq!(of("Skylake").walk_cycles[1].config, 0x0100_1049);
        assert_eq!(of("Broadwell").walk_cycles[0].config, 0x1008);
        assert_eq!(of("Zen").walks[0].config, 0xf045);
        assert!(EVENTS.iter().all(|events| !events.walks.is_empty() && !events.source.is_empty()));
    }
}
