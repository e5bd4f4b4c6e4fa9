//! Giant pages under a guest that writes: duration of the pauses of its vCPUs and speed of the move of 1
//! GiB onto one pool page, by the guest's rate of writes. This is not a criterion bench, because each
//! swap of a live guest differs.
//!
//! `cargo bench -p wideleaf-benches --bench giant` (needs KVM and a page of 1 GiB)

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use wideleaf_benches::experiment;
use wideleaf_guest_image::IMAGE;
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

fn print(way: &str, swaps: &[GiantSwap]) {
    let done: Vec<&GiantSwap> = swaps.iter().filter(|swap| swap.result == OutcomeResult::Done).collect();
    println!("  {way}: {} of {} done", done.len(), swaps.len());
    let quantiles = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values.get(((values.len() as f64 - 1.0) * share).round() as usize).copied();
        [0.0, 0.5, 0.9, 1.0].map(|share| at(share).unwrap_or(f64::NAN))
    };
    let line = |name: &str, of: &dyn Fn(&GiantSwap) -> f64| {
        let [least, median, ninety, most] = quantiles(done.iter().map(|swap| of(swap)).collect());
        println!("    {name:<24} {least:>10.2} {median:>10.2} {ninety:>10.2} {most:>10.2}");
    };
    println!("    {:<24} {:>10} {:>10} {:>10} {:>10}", "", "min", "median", "p90", "max");
    line("pause, ms", &|swap| swap.unavailable.as_secs_f64() * 1e3);
    line("whole swap, ms", &|swap| swap.elapsed.as_secs_f64() * 1e3);
    line("CPU, ms", &|swap| swap.cost.cpu.as_secs_f64() * 1e3);
    line("copied, GiB/s", &|swap| swap.cost.copied.get() as f64 / gib(1).get() as f64 / swap.elapsed.as_secs_f64());
    line("pages written per s", &|swap| swap.written_pages as f64 / swap.elapsed.as_secs_f64());
    line("rounds", &|swap| f64::from(swap.rounds));
    line("pauses", &|swap| f64::from(swap.pauses));
}

fn main() -> ExitCode {
    experiment::run("giant", |_, _| {
        measure();
        Ok(())
    })
}

fn measure() {
    let pools = HugetlbPools::of_this_machine();
    let lease = pools.lease(PageSize::Giant1G, 1);
    if let Err(error) = &lease {
        println!("skipped: {error}");
        return;
    }
    let host = LinuxHost::open().expect("/proc is mounted");
    warm_host_memory(gib(3)).expect("memory to warm");
    for pattern in ["16M", "900M"] {
        let (ram, machine) = start(pattern);
        let second_level = machine.second_level();
        let site = SwapSite { host: &host, ram: &ram, second_level: second_level.as_ref() };
        let giants = GiantPages::new(pools.clone(), false, SwapLimits::default());
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for _ in 0..SWAPS {
            there.push(giants.promote(site, GIANT));
            std::thread::sleep(REST);
            back.push(giants.demote(site, GIANT, PageSize::Huge2M));
            std::thread::sleep(REST);
        }
        println!("a guest that rewrites {pattern} of its RAM, one vCPU:");
        print("onto a giant page", &there);
        print("and back", &back);
        machine.stop();
    }
    drop(lease);
}
