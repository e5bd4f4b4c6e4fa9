//! Giant pages under a guest that writes: duration of the pauses of its vCPUs and speed of the move of 1
//! GiB onto one pool page, by the guest's rate of writes. This is not a criterion bench, because each
//! swap of a live guest differs.
//!
//! `cargo bench -p wideleaf-benches --bench giant` (needs KVM and a page of 1 GiB)

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_benches::scenario::{self, Ended, Waiting};
use wideleaf_guest_image::IMAGE;
use wideleaf_measure::figures::Figures;
use wideleaf_measure::statistics::quantile;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::actuators::giant::{GiantPages, GiantSwap, SwapLimits, SwapSite};
use wideleaf_memory::pool::HugetlbPools;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam, LinuxHost};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{Gpa, OutcomeResult, PageSize};
use wideleaf_vmm::{HostLimits, ImageSource, Machine, VmConfig, VmOptions};

const SWAPS: usize = 20;
const GIANT: Gpa = Gpa::new(0);
/// Time in which the guest fills its pattern, before it writes at an even rate.
const FILL_TIME: Duration = Duration::from_secs(4);
/// Time between two swaps, in which the guest runs on large pages again.
const REST: Duration = Duration::from_millis(300);

fn start(pattern: &str) -> (Arc<GuestRam>, Machine) {
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).expect("anonymous RAM has huge pages");
    let options = VmOptions {
        memory: gib(1) + mib(64),
        cmdline: format!("kernel=pattern bytes={pattern} passes=1000000"),
        slot_bytes: Some(gib(1)),
        ..VmOptions::new(ImageSource::Bytes(IMAGE.into()), backing)
    };
    let config = VmConfig::new(options, &HostLimits::none()).expect("the options make sense");
    let ram = GuestRam::map(&config.ram_layout(), backing).expect("memory for the guest");
    let machine = Machine::start(&config, Arc::clone(&ram), Box::new(|_| ())).expect("a guest that starts");
    std::thread::sleep(FILL_TIME);
    (ram, machine)
}

/// Figures of all swaps in one direction.
fn table(caption: &str, swaps: &[GiantSwap]) -> Table {
    let done: Vec<&GiantSwap> = swaps.iter().filter(|swap| swap.result == OutcomeResult::Done).collect();
    let mut table = Table::new(["figure"], ["min", "median", "p90", "max"]);
    let mut row = |name: &str, unit: &str, of: &dyn Fn(&GiantSwap) -> f64| {
        let values: Vec<f64> = done.iter().map(|swap| of(swap)).collect();
        let cells = [0.0, 0.5, 0.9, 1.0].map(|share| match quantile(&values, share) {
            Some(value) => Cell::number(value, 2, unit),
            None => Cell::missing("no swap was done"),
        });
        table.row(std::iter::once(Cell::from(name)).chain(cells));
    };
    row("pause", "ms", &|swap| swap.unavailable.as_secs_f64() * 1e3);
    row("whole swap", "ms", &|swap| swap.elapsed.as_secs_f64() * 1e3);
    row("CPU", "ms", &|swap| swap.cost.cpu.as_secs_f64() * 1e3);
    row("copied", "GiB/s", &|swap| swap.cost.copied.get() as f64 / gib(1).get() as f64 / swap.elapsed.as_secs_f64());
    row("pages written", "1/s", &|swap| swap.written_pages as f64 / swap.elapsed.as_secs_f64());
    row("rounds", "", &|swap| f64::from(swap.rounds));
    row("pauses", "", &|swap| f64::from(swap.pauses));
    table.captioned(format!("{caption}: {} of {} done", done.len(), swaps.len()))
}

fn main() -> ExitCode {
    scenario::run("giant", |_, waiting| measure(waiting))
}

fn measure(waiting: &Waiting) -> Result<Figures, Ended> {
    let pools = HugetlbPools::of_this_machine();
    let _lease = pools.lease(PageSize::Giant1G, 1).map_err(|error| Ended::Skipped(error.to_string()))?;
    let host = LinuxHost::open().expect("/proc is mounted");
    warm_host_memory(gib(3)).expect("memory to warm");
    let mut figures = Figures::of("moves of 1 GiB onto a giant page and back, under a guest with one vCPU");
    for pattern in ["16M", "900M"] {
        let (ram, machine) = start(pattern);
        let second_level = machine.second_level();
        let site = SwapSite { host: &host, ram: &ram, second_level: second_level.as_ref() };
        let giants = GiantPages::new(pools.clone(), false, SwapLimits::default());
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for _ in 0..SWAPS {
            there.push(giants.promote(site, GIANT));
            waiting.pass(REST)?;
            back.push(giants.demote(site, GIANT, PageSize::Huge2M));
            waiting.pass(REST)?;
        }
        let guest = format!("a guest that rewrites {pattern} of its RAM");
        figures = figures.table(table(&format!("{guest}, onto a giant page"), &there));
        figures = figures.table(table(&format!("{guest}, and back"), &back));
        machine.stop();
    }
    Ok(figures)
}
