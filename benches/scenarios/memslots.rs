//! Cost of memslots: creating N of them over the same RAM, and switching the dirty log of each on and off: empty, as a
//! hold does, and with all pages set, as a save and a migration do; then clearing each log in pieces of one window. The
//! default size of a slot balances this cost against the granularity at which the second level can be held at 4
//! KiB. No guest runs, so KVM has no mapping to change: with a guest, an empty log costs more.
//!
//! `cargo bench -p wideleaf-benches --bench memslots` (needs KVM)

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wideleaf_benches::scenario::{self, ScenarioError};
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

/// Pages of a window.
const WINDOW_PAGES: u64 = 512;

/// Times of one round: create all slots, all dirty logs on, fetch all, all off; then all on with their pages set, and
/// all cleared window by window.
fn round(system: &KvmSystem, ram: &Arc<GuestRam>, count: u64) -> [Duration; 6] {
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
    let mut can = true;
    let on_set = timed(&mut || {
        for slot in &slots {
            can &= vm.start_dirty_log_set(slot.id).expect("KVM switches the log of its own slot") == Some(true);
        }
    });
    let cleared = timed(&mut || {
        for slot in slots.iter().filter(|_| can) {
            let pages = slot.range.bytes().pages(PageSize::Base4K);
            for first in (0..pages).step_by(WINDOW_PAGES as usize) {
                vm.clear_dirty_log(*slot, first, &[u64::MAX; 8]).expect("its log is on");
            }
        }
    });
    [made, on, fetched, off, on_set, cleared]
}

fn main() -> ExitCode {
    scenario::run("memslots", |_, _| measure())
}

fn measure() -> Result<Figures, ScenarioError> {
    let system = KvmSystem::open().map_err(|error| ScenarioError::Skipped(error.to_string()))?;
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
    let range = GpaRange::new(Gpa::new(0), RAM).expect("the range fits");
    let ram = GuestRam::map(&[range], backing).expect("addresses for the RAM");
    let columns = ["slots", "each", "make", "log on", "fetch", "log off", "log on, set", "clear by windows"];
    let mut table = Table::new([], columns);
    for count in COUNTS {
        let rounds: Vec<[Duration; 6]> = (0..ROUNDS).map(|_| round(&system, &ram, count)).collect();
        let us_per_slot = |time: Duration| time.as_secs_f64() * 1e6 / count as f64;
        let column = |index: usize| {
            Cell::number(median(rounds.iter().map(|round| us_per_slot(round[index])).collect()), 1, "us")
        };
        let each = Bytes::new(RAM.get() / count).to_string();
        let cells = [0, 1, 2, 3, 4, 5].map(column);
        table.row([Cell::count(count), each.into()].into_iter().chain(cells));
    }
    Ok(Figures::of(format!("{RAM} of RAM, medians of {ROUNDS} rounds, time per slot")).table(table))
}
