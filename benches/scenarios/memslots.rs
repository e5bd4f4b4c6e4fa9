//! Cost of memslots: creating N of them over the same RAM, and switching the dirty log of each on and off. The
//! default size of a slot balances this cost against the granularity at which the second level can be held at 4
//! KiB. No guest runs.
//!
//! `cargo bench -p wideleaf-benches --bench memslots` (needs KVM)

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wideleaf_benches::scenario::{self, Ended};
use wideleaf_measure::figures::Figures;
use wideleaf_measure::statistics::median;
use wideleaf_measure::table::{Cell, Table};
use wideleaf_memory::GuestRam;
use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::units::gib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};
use wideleaf_vmm::kvm::{KvmSystem, Vm};

const RAM: Bytes = gib(16);
/// Numbers of slots: slots of 4 GiB, 1 GiB, 256, 64, 16 and 4 MiB.
const COUNTS: [u64; 6] = [4, 16, 64, 256, 1024, 4096];
const ROUNDS: usize = 15;

/// Times of one round: create all slots, all dirty logs on, fetch all, all off.
fn round(system: &KvmSystem, ram: &Arc<GuestRam>, count: u64) -> [Duration; 4] {
    let timed = |act: &mut dyn FnMut()| {
        let began = Instant::now();
        act();
        began.elapsed()
    };
    let mut vm = None;
    let made = timed(&mut || vm = Vm::create(system, Arc::clone(ram), Bytes::new(RAM.get() / count)).ok());
    let vm = vm.expect("KVM takes the slots");
    let slots = vm.slots();
    let switch = |is_on: bool| {
        for slot in &slots {
            vm.set_dirty_log(slot.id, is_on).expect("KVM switches the log of its own slot");
        }
    };
    let on = timed(&mut || switch(true));
    let fetched = timed(&mut || {
        for slot in &slots {
            vm.take_dirty_log(*slot).expect("its log is on");
        }
    });
    let off = timed(&mut || switch(false));
    [made, on, fetched, off]
}

fn main() -> ExitCode {
    scenario::run("memslots", |_, _| measure())
}

fn measure() -> Result<Figures, Ended> {
    let system = KvmSystem::open().map_err(|error| Ended::Skipped(error.to_string()))?;
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let range = GpaRange::new(Gpa::new(0), RAM).expect("the range fits");
    let ram = GuestRam::map(&[range], backing).expect("addresses for the RAM");
    let mut table = Table::new([], ["slots", "each", "make", "log on", "fetch", "log off"]);
    for count in COUNTS {
        let rounds: Vec<[Duration; 4]> = (0..ROUNDS).map(|_| round(&system, &ram, count)).collect();
        let us_per_slot = |time: Duration| time.as_secs_f64() * 1e6 / count as f64;
        let column = |index: usize| {
            Cell::number(median(rounds.iter().map(|round| us_per_slot(round[index])).collect()), 1, "us")
        };
        let each = Bytes::new(RAM.get() / count).to_string();
        table.row([Cell::count(count), each.into(), column(0), column(1), column(2), column(3)]);
    }
    Ok(Figures::of(format!("{RAM} of RAM, medians of {ROUNDS} rounds, time per slot")).table(table))
}
