//! Page walks by the CPU's own counters, if the host has them: which events exist on which CPU is found by trying.
//! Not run on hardware yet: the development machines have no counters, so the table is from the vendors' lists, and
//! everything else is tested with a fake.
//!
//! ```text
//!   /proc/cpuinfo ─▶ EVENTS, by vendor, family, model ─▶ open all of them ─▶ selected │ why not
//!
//!   thread:  init │ start ── measured part ── stop │ verify        walks = readings at stop minus readings at start
//! ```
//!
//! AMD counts walks but not their cycles.

use std::fmt;
use std::io::ErrorKind;

use perf_event::events::{Hardware, Raw};
use perf_event::{Builder, Counter};
use wideleaf_memory::walk_cost::CpuModel;
pub use wideleaf_run::report::Walks;

/// An event: its vendor's name, and its `perf_event_attr.config` for raw events (event, unit mask << 8). None has a
/// counter mask, which would count the cycles in which any handler is busy.
#[derive(Debug, PartialEq, Eq)]
pub struct Event {
    /// Name in the vendor's list.
    pub name: &'static str,
    /// Configuration for the kernel.
    pub config: u64,
}

const fn event(name: &'static str, event: u64, unit_mask: u64) -> Event {
    Event { name, config: event | unit_mask << 8 }
}

/// Page-walk events of a kind of CPU.
#[derive(Debug)]
pub struct WalkEvents {
    /// Common name of the CPUs.
    pub name: &'static str,
    vendor: &'static str,
    /// Display family, and first and last model.
    models: &'static [(u32, u32, u32)],
    /// Cycles of each page-miss handler that is busy with a walk for data: a core with two of them counts up to two a
    /// cycle. Empty if that is not counted.
    pub walk_cycles: &'static [Event],
    /// Number of walks for data.
    pub walks: &'static [Event],
    /// Cycles in walks of the second level that `walk_cycles` excludes, of each handler too. Empty if the CPU has no
    /// such event, or its list does not say that the others exclude them.
    pub second_level_cycles: &'static [Event],
    /// Document with each of the events, and the parts that were not found there.
    pub source: &'static str,
}

/// Since Golden Cove, loads and stores have other event numbers than before.
const PENDING_SINCE_GOLDEN_COVE: &[Event] =
    &[event("DTLB_LOAD_MISSES.WALK_PENDING", 0x12, 0x10), event("DTLB_STORE_MISSES.WALK_PENDING", 0x13, 0x10)];
const COMPLETED_SINCE_GOLDEN_COVE: &[Event] =
    &[event("DTLB_LOAD_MISSES.WALK_COMPLETED", 0x12, 0x0e), event("DTLB_STORE_MISSES.WALK_COMPLETED", 0x13, 0x0e)];
const PENDING: &[Event] =
    &[event("DTLB_LOAD_MISSES.WALK_PENDING", 0x08, 0x10), event("DTLB_STORE_MISSES.WALK_PENDING", 0x49, 0x10)];
/// The name of the same event until Broadwell.
const DURATION: &[Event] =
    &[event("DTLB_LOAD_MISSES.WALK_DURATION", 0x08, 0x10), event("DTLB_STORE_MISSES.WALK_DURATION", 0x49, 0x10)];
const COMPLETED: &[Event] =
    &[event("DTLB_LOAD_MISSES.WALK_COMPLETED", 0x08, 0x0e), event("DTLB_STORE_MISSES.WALK_COMPLETED", 0x49, 0x0e)];

/// Events by kind of CPU, newest first. Models are those of `mapfile.csv` beside the lists.
pub const EVENTS: &[WalkEvents] = &[
    WalkEvents {
        name: "Sapphire, Emerald and Granite Rapids",
        vendor: "GenuineIntel",
        models: &[(6, 0x8f, 0x8f), (6, 0xcf, 0xcf), (6, 0xad, 0xae)],
        walk_cycles: PENDING_SINCE_GOLDEN_COVE,
        walks: COMPLETED_SINCE_GOLDEN_COVE,
        second_level_cycles: &[],
        source: "Intel's event list for SPR \
                 (linux/tools/perf/pmu-events/arch/x86/sapphirerapids/virtual-memory.json): all four; \
                 EMR has SPR's list; in GNR's only WALK_COMPLETED was found, the two events of cycles are SPR's \
                 (unverified)",
    },
    WalkEvents {
        name: "Alder, Raptor, Meteor, Arrow and Lunar Lake, performance cores",
        vendor: "GenuineIntel",
        models: &[
            (6, 0x97, 0x97),
            (6, 0x9a, 0x9a),
            (6, 0xb7, 0xb7),
            (6, 0xba, 0xba),
            (6, 0xbf, 0xbf),
            (6, 0xaa, 0xaa),
            (6, 0xac, 0xac),
            (6, 0xc5, 0xc6),
            (6, 0xbd, 0xbd),
        ],
        walk_cycles: PENDING_SINCE_GOLDEN_COVE,
        walks: COMPLETED_SINCE_GOLDEN_COVE,
        second_level_cycles: &[],
        source: "Intel's event lists for ADL, MTL, ARL and LNL, unit cpu_core \
                 (linux/tools/perf/pmu-events/arch/x86/alderlake, meteorlake, arrowlake and \
                 lunarlake/virtual-memory.json): all four in each; efficiency cores have other events, so nothing is \
                 counted on them",
    },
    WalkEvents {
        name: "Ice Lake-SP",
        vendor: "GenuineIntel",
        models: &[(6, 0x6a, 0x6a), (6, 0x6c, 0x6c)],
        walk_cycles: PENDING,
        walks: COMPLETED,
        second_level_cycles: &[],
        source: "Intel's event list for ICX (linux/tools/perf/pmu-events/arch/x86/icelakex/virtual-memory.json): \
                 all four",
    },
    WalkEvents {
        name: "Ice, Tiger and Rocket Lake",
        vendor: "GenuineIntel",
        models: &[(6, 0x7d, 0x7e), (6, 0x8c, 0x8d), (6, 0xa7, 0xa7)],
        walk_cycles: PENDING,
        walks: COMPLETED,
        second_level_cycles: &[],
        source: "Intel's event lists for ICL, TGL and RKL (linux/tools/perf/pmu-events/arch/x86/icelake, tigerlake \
                 and rocketlake/virtual-memory.json): all four in each",
    },
    WalkEvents {
        name: "Skylake-SP, Cascade Lake, and Skylake to Comet Lake",
        vendor: "GenuineIntel",
        models: &[(6, 0x55, 0x55), (6, 0x4e, 0x4e), (6, 0x5e, 0x5e), (6, 0x8e, 0x8e), (6, 0x9e, 0x9e), (6, 0xa5, 0xa6)],
        walk_cycles: PENDING,
        walks: COMPLETED,
        // The others exclude walks of the EPT on this microarchitecture, and on no other by its list.
        second_level_cycles: &[event("EPT.WALK_PENDING", 0x4f, 0x10)],
        source: "Intel's event lists for SKX, CLX and SKL (linux/tools/perf/pmu-events/arch/x86/skylakex, \
                 cascadelakex and skylake/virtual-memory.json): all five in each",
    },
    WalkEvents {
        name: "Broadwell",
        vendor: "GenuineIntel",
        models: &[(6, 0x4f, 0x4f), (6, 0x56, 0x56), (6, 0x3d, 0x3d), (6, 0x47, 0x47)],
        walk_cycles: DURATION,
        walks: COMPLETED,
        second_level_cycles: &[],
        source: "Intel's event lists for BDX, BDW-DE and BDW (linux/tools/perf/pmu-events/arch/x86/broadwellx, \
                 broadwellde and broadwell/virtual-memory.json): all four in each; EPT.WALK_CYCLES is not added, as \
                 in Page_Walks_Utilization of bdx-metrics.json; erratum BDM69 may count too much",
    },
    WalkEvents {
        name: "Haswell",
        vendor: "GenuineIntel",
        models: &[(6, 0x3f, 0x3f), (6, 0x3c, 0x3c), (6, 0x45, 0x46)],
        walk_cycles: DURATION,
        walks: COMPLETED,
        second_level_cycles: &[],
        source: "Intel's event lists for HSX and HSW (linux/tools/perf/pmu-events/arch/x86/haswellx and \
                 haswell/virtual-memory.json): all four in each; EPT.WALK_CYCLES is not added, as in \
                 page_walks_utilization of hsx-metrics.json",
    },
    WalkEvents {
        name: "Zen to Zen 5",
        vendor: "AuthenticAMD",
        models: &[(0x17, 0x00, 0xff), (0x19, 0x00, 0xff), (0x1a, 0x00, 0xff)],
        walk_cycles: &[],
        walks: &[event("LS_L1_D_TLB_MISS.ALL_L2_MISS", 0x45, 0xf0)],
        second_level_cycles: &[],
        source: "AMD's PMCx045, unit mask f0, as the event lists of Linux have it \
                 (tools/perf/pmu-events/arch/x86/amdzen*: ls_l1_d_tlb_miss.all_l2_miss; of Zen the four events of \
                 page sizes, in one mask); the PPR itself was not read",
    },
];

/// Opens counters. The real implementation is the kernel's; tests have a fake.
pub trait Pmu {
    /// A counter of this event in all threads that this thread starts from now on.
    ///
    /// # Errors
    /// Reason why it is not available.
    fn open(&self, event: &Event) -> Result<Box<dyn Count>, String>;

    /// A counter of the core's cycles, for the same threads.
    ///
    /// # Errors
    /// Reason why it is not available.
    fn open_cycles(&self) -> Result<Box<dyn Count>, String>;
}

/// A running counter.
pub trait Count: Send {
    /// Its current reading.
    ///
    /// # Errors
    /// Reason why it cannot be read.
    fn read(&mut self) -> Result<Reading, String>;
}

/// A counter at one moment. Several counters may share the hardware in turn: each reports how long it was enabled,
/// and how long it had the hardware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Number of events.
    pub count: u64,
    /// Time for which it was enabled, in nanoseconds.
    pub enabled_ns: u64,
    /// Time for which it had the hardware, in nanoseconds.
    pub running_ns: u64,
}

impl Reading {
    /// Events from `earlier` until now, scaled to the whole time if it had the hardware for a part only.
    fn since(self, earlier: Reading) -> Result<u64, String> {
        let count = self.count.saturating_sub(earlier.count);
        let enabled = self.enabled_ns.saturating_sub(earlier.enabled_ns);
        match self.running_ns.saturating_sub(earlier.running_ns) {
            0 if enabled > 0 => Err("a counter never ran: other counters use all of the hardware".into()),
            0 => Ok(count),
            running => Ok((count as f64 * enabled as f64 / running as f64) as u64),
        }
    }
}

/// The events that fit this CPU and their source, or why there are none.
pub fn describe(events: &Result<&'static WalkEvents, String>) -> String {
    match events {
        Ok(events) => format!("{} ({}; not run on hardware yet)", events.name, events.source),
        Err(why) => why.clone(),
    }
}

/// The events of this CPU, if all of them can be opened.
///
/// # Errors
/// The reason in one line.
pub fn select(pmu: &dyn Pmu, cpu: &CpuModel) -> Result<&'static WalkEvents, String> {
    pmu.open_cycles().map_err(|error| format!("the PMU is not usable: {error}"))?;
    let is_model = |(family, from, to): &(u32, u32, u32)| *family == cpu.family && (*from..=*to).contains(&cpu.model);
    let of_cpu = EVENTS.iter().find(|events| events.vendor == cpu.vendor && events.models.iter().any(is_model));
    let unknown = || format!("no table of events for {} family {:#x} model {:#x}", cpu.vendor, cpu.family, cpu.model);
    let events = of_cpu.ok_or_else(unknown)?;
    for event in events.walk_cycles.iter().chain(events.walks).chain(events.second_level_cycles) {
        pmu.open(event).map_err(|error| format!("{}: {error}", event.name))?;
    }
    Ok(events)
}

/// Counts walks only between [`Meter::start`] and [`Meter::stop`]: the thread's other work is in no figure.
pub struct Meter {
    counters: Vec<(Quantity, Box<dyn Count>)>,
    is_timed: bool,
    has_second_level: bool,
    began: Vec<Reading>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("is_timed", &self.is_timed).finish_non_exhaustive()
    }
}

/// Quantity that one of the CPU's counters counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quantity {
    Cycles,
    Walks,
    WalkCycles,
    SecondLevelCycles,
}

impl Meter {
    /// Counters of the calling thread, and of those that it starts from now on.
    ///
    /// # Errors
    /// Reason why it is not possible.
    pub fn open(pmu: &dyn Pmu, events: &WalkEvents) -> Result<Meter, String> {
        let mut counters = vec![(Quantity::Cycles, pmu.open_cycles()?)];
        let all = [
            (Quantity::WalkCycles, events.walk_cycles),
            (Quantity::SecondLevelCycles, events.second_level_cycles),
            (Quantity::Walks, events.walks),
        ];
        for (what, event) in all.into_iter().flat_map(|(what, events)| events.iter().map(move |event| (what, event))) {
            counters.push((what, pmu.open(event)?));
        }
        Ok(Meter {
            counters,
            is_timed: !events.walk_cycles.is_empty(),
            has_second_level: !events.second_level_cycles.is_empty(),
            began: Vec::new(),
        })
    }

    /// Begins to count.
    ///
    /// # Errors
    /// Reason why it is not possible.
    pub fn start(&mut self) -> Result<(), String> {
        self.began = self.readings()?;
        Ok(())
    }

    /// Counts since [`Meter::start`].
    ///
    /// # Errors
    /// Reason why they cannot be read.
    pub fn stop(&mut self) -> Result<Walks, String> {
        if self.began.is_empty() {
            return Err("they were not counted from the begin of this part".into());
        }
        let now = self.readings()?;
        let since = now.into_iter().zip(&self.began).map(|(now, began)| now.since(*began));
        let since = since.collect::<Result<Vec<u64>, _>>()?;
        let sum = |wanted| -> u64 {
            self.counters.iter().zip(&since).filter(|((what, _), _)| *what == wanted).map(|(_, count)| count).sum()
        };
        let second_level = sum(Quantity::SecondLevelCycles);
        Ok(Walks {
            cycles: sum(Quantity::Cycles),
            walks: sum(Quantity::Walks),
            walk_cycles: self.is_timed.then(|| sum(Quantity::WalkCycles) + second_level),
            second_level_walk_cycles: self.has_second_level.then_some(second_level),
        })
    }

    fn readings(&mut self) -> Result<Vec<Reading>, String> {
        self.counters.iter_mut().map(|(_, counter)| counter.read()).collect()
    }
}

/// The kernel's counters (perf_event_open(2)).
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

/// The same counters for guests: they count only while a CPU is in a guest, where its kernel counts too. No other
/// thread of the process has a part in them.
#[derive(Debug)]
pub struct GuestPmu;

impl Pmu for GuestPmu {
    fn open(&self, event: &Event) -> Result<Box<dyn Count>, String> {
        opened(Builder::new(Raw::new(event.config)).exclude_host(true).include_kernel())
    }

    fn open_cycles(&self) -> Result<Box<dyn Count>, String> {
        opened(Builder::new(Hardware::CPU_CYCLES).exclude_host(true).include_kernel())
    }
}

fn opened(builder: &mut Builder<'_>) -> Result<Box<dyn Count>, String> {
    let why = |error: std::io::Error| why_not(&error, std::fs::read_to_string(PARANOID).ok().as_deref());
    let mut counter = builder.observe_self().any_cpu().inherit(true).build().map_err(why)?;
    counter.enable().map_err(why)?;
    Ok(Box::new(LinuxCount(counter)))
}

/// File with the level from which on the kernel refuses counters (Documentation/admin-guide/sysctl/kernel.rst).
const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";

/// The reason why a counter cannot be opened, and the remedy. `paranoid` is the text of [`PARANOID`].
fn why_not(error: &std::io::Error, paranoid: Option<&str>) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => {
            let level = paranoid.map_or("unknown", str::trim);
            format!(
                "the kernel refuses it (kernel.perf_event_paranoid is {level}): run as root, or \
                 `sysctl kernel.perf_event_paranoid=1`"
            )
        }
        ErrorKind::NotFound | ErrorKind::Unsupported => {
            format!("{error}: this machine, or the virtual machine that it is, has no such counter")
        }
        ErrorKind::ResourceBusy => format!("{error}: another user, perhaps the NMI watchdog, has it"),
        _ => error.to_string(),
    }
}

struct LinuxCount(Counter);

impl Count for LinuxCount {
    fn read(&mut self) -> Result<Reading, String> {
        let counted = self.0.read_count_and_time().map_err(|error| error.to_string())?;
        let (enabled_ns, running_ns) = (counted.time_enabled, counted.time_running);
        Ok(Reading { count: counted.count, enabled_ns, running_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the requests, and lacks one event.
    struct FakePmu {
        lacks: Option<&'static str>,
        has_any: bool,
    }

    /// Counts this number of events between two readings, after a hundred times the number before the first.
    struct FakeCount {
        each: u64,
        reading: Reading,
    }

    impl FakeCount {
        fn boxed(each: u64) -> Box<dyn Count> {
            Box::new(FakeCount { each, reading: Reading { count: 99 * each, enabled_ns: 990, running_ns: 990 } })
        }
    }

    impl Count for FakeCount {
        fn read(&mut self) -> Result<Reading, String> {
            let Reading { count, enabled_ns, running_ns } = self.reading;
            self.reading =
                Reading { count: count + self.each, enabled_ns: enabled_ns + 10, running_ns: running_ns + 10 };
            Ok(self.reading)
        }
    }

    impl Pmu for FakePmu {
        fn open(&self, event: &Event) -> Result<Box<dyn Count>, String> {
            match self.lacks == Some(event.name) {
                true => Err("Invalid argument".into()),
                false => Ok(FakeCount::boxed(event.config & 0xff)),
            }
        }

        fn open_cycles(&self) -> Result<Box<dyn Count>, String> {
            if self.has_any { Ok(FakeCount::boxed(1000)) } else { Err("No such file or directory".into()) }
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
        assert_eq!(chosen("GenuineIntel", 6, 0x55), Ok("Skylake-SP, Cascade Lake, and Skylake to Comet Lake"));
        assert_eq!(chosen("GenuineIntel", 6, 0x3f), Ok("Haswell"));
        assert_eq!(chosen("GenuineIntel", 6, 0xa7), Ok("Ice, Tiger and Rocket Lake"));
        let hybrid = "Alder, Raptor, Meteor, Arrow and Lunar Lake, performance cores";
        assert!([0xb7, 0xaa, 0xc6, 0xbd].iter().all(|model| chosen("GenuineIntel", 6, *model) == Ok(hybrid)));
        assert!([(0x17, 0x01), (0x17, 0x31), (0x19, 0x11)].iter().all(|(family, model)| chosen(
            "AuthenticAMD",
            *family,
            *model
        ) == Ok("Zen to Zen 5")));
        assert_eq!(
            chosen("AuthenticAMD", 6, 0x55),
            Err("no table of events for AuthenticAMD family 0x6 model 0x55".into())
        );
    }

    #[test]
    fn a_host_without_counters_or_without_one_of_them_says_which() {
        let skylake = cpu("GenuineIntel", 6, 0x55);
        let none = select(&FakePmu { lacks: None, has_any: false }, &skylake).map(|events| events.name);
        assert_eq!(none, Err("the PMU is not usable: No such file or directory".into()));
        let one_less =
            select(&FakePmu { lacks: Some("EPT.WALK_PENDING"), has_any: true }, &skylake).map(|events| events.name);
        assert_eq!(one_less, Err("EPT.WALK_PENDING: Invalid argument".into()));
    }

    #[test]
    fn a_refused_counter_names_the_setting_and_an_absent_one_the_machine() {
        // EACCES, ENOENT, EOPNOTSUPP, EBUSY and EINVAL of perf_event_open(2).
        let why = |errno| why_not(&std::io::Error::from_raw_os_error(errno), Some("4\n"));
        assert!(why(13).contains("kernel.perf_event_paranoid is 4): run as root"), "{}", why(13));
        assert!([2, 95].iter().all(|errno| why(*errno).contains("has no such counter")), "{} {}", why(2), why(95));
        assert!(why(16).contains("watchdog") && why(22).starts_with("Invalid argument"), "{} {}", why(16), why(22));
    }

    fn counted(events: &WalkEvents) -> Walks {
        let mut meter = Meter::open(&ALL, events).expect("it has all of them");
        meter.start().and_then(|()| meter.stop()).expect("it counts")
    }

    #[test]
    fn walks_of_loads_stores_and_the_second_level_are_summed_over_the_measured_part_only() {
        let skylake = select(&ALL, &cpu("GenuineIntel", 6, 0x55)).expect("it has all of them");
        let walks = counted(skylake);
        let expected = Walks {
            cycles: 1000,
            walks: 0x08 + 0x49,
            walk_cycles: Some(0x08 + 0x49 + 0x4f),
            second_level_walk_cycles: Some(0x4f),
        };
        assert_eq!(walks, expected);
        assert_eq!(walks.share(), Some(f64::from(0x08 + 0x49 + 0x4f) / 1000.0));
        let zen = counted(select(&ALL, &cpu("AuthenticAMD", 0x19, 0x11)).expect("it has all of them"));
        assert_eq!((zen.walk_cycles, zen.share()), (None, None), "AMD counts no cycles of walks");
        assert_eq!(zen.second_level_walk_cycles, None);
    }

    #[test]
    fn a_counter_that_had_the_hardware_for_half_of_the_measured_part_counts_double() {
        let reading = |count, enabled_ns, running_ns| Reading { count, enabled_ns, running_ns };
        // It had the hardware all the time before: that is not part of the measured part.
        assert_eq!(reading(700, 300, 150).since(reading(100, 100, 50)), Ok(1200));
        assert!(reading(100, 300, 50).since(reading(100, 100, 50)).is_err(), "it never ran");
        assert_eq!(reading(0, 0, 0).since(Reading::default()), Ok(0));
    }

    #[test]
    fn configurations_match_the_vendors_lists() {
        let of = |name: &str| EVENTS.iter().find(|events| events.name.starts_with(name)).expect("it is in the table");
        assert_eq!(of("Sapphire").walk_cycles[0].config, 0x1012);
        assert_eq!(of("Skylake").walk_cycles[1].config, 0x1049);
        for name in ["Broadwell", "Haswell"] {
            assert_eq!(of(name).walk_cycles[0].config, 0x1008);
            assert_eq!(of(name).walks[1].config, 0x0e49);
        }
        assert_eq!(of("Zen").walks[0].config, 0xf045);
        assert!(EVENTS.iter().all(|events| !events.walks.is_empty() && !events.source.is_empty()));
    }

    /// Elsewhere they would count twice: Intel's lists exclude them from the other events on Skylake alone, and the
    /// kernel's metrics of Haswell and Broadwell do not add them.
    #[test]
    fn walks_of_the_second_level_are_added_only_where_the_list_excludes_them_from_the_others() {
        let adding: Vec<&WalkEvents> = EVENTS.iter().filter(|events| !events.second_level_cycles.is_empty()).collect();
        let [skylake] = &adding[..] else { panic!("{adding:?}") };
        assert!(skylake.name.starts_with("Skylake-SP"), "{}", skylake.name);
        let haswell = counted(select(&ALL, &cpu("GenuineIntel", 6, 0x3f)).expect("it has all of them"));
        assert_eq!(haswell.walk_cycles, Some(0x08 + 0x49));
        assert_eq!(haswell.second_level_walk_cycles, None, "which part of them it is, is not known");
    }

    #[test]
    fn no_model_is_of_two_kinds() {
        let models = EVENTS.iter().flat_map(|events| events.models.iter().map(move |of| (events.vendor, *of)));
        let mut models: Vec<_> = models.collect();
        models.sort_unstable();
        for pair in models.windows(2) {
            let [(vendor, (family, _, last)), (next_vendor, (next_family, next, _))] = pair else { continue };
            assert!((vendor, family) != (next_vendor, next_family) || last < next, "{pair:?}");
        }
    }
}
