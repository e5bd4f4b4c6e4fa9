//! Sweep3D by its loops, generated as `wideleaf-lab simulate sweep3d` generates them. The kernel `sweep3d` computes the
//! same in loops over more arrays.

use std::sync::atomic::Ordering;

use wideleaf_benches::scenario::{Ended, Waiting};
use wideleaf_lab::simulate::sweep3d::{OCTANTS, Sweep3d};
use wideleaf_simulator::streams::Access;

use crate::measured::Opteron;
use crate::opteron::{Arms, Row, arms};

/// Number of cells along an edge.
const N: u64 = 150;
/// Number of iterations. The sweep of one octant is simulated; the others do the same in another direction (fixups
/// access lines that are in the cache).
const ITERATIONS: u64 = 12;

/// Positions of the arrays, which the measured run does not tell. An allocator aligns arrays larger than 1
/// MiB to 1 MiB.
const LAYOUTS: [(&str, u64); 2] = [("generated, adjacent arrays", 64), ("generated, arrays aligned to 1 MiB", 1 << 20)];

/// Number of accesses between two checks of the interrupt flag.
const PART: usize = 1 << 20;

/// Rows for Sweep3D's entry in the tables, one per layout.
pub fn rows(measured: &Opteron, waiting: &Waiting) -> Result<Vec<Row>, Ended> {
    LAYOUTS.iter().map(|(from, border)| row(from, Sweep3d { n: N, border: *border }, measured, waiting)).collect()
}

fn row(from: &str, sweep: Sweep3d, measured: &Opteron, waiting: &Waiting) -> Result<Row, Ended> {
    let mut arms = arms(sweep.bytes());
    run(&mut arms, sweep.around(), ITERATIONS, waiting)?;
    run(&mut arms, sweep.octant(0), ITERATIONS * OCTANTS, waiting)?;
    let scale = format!("1 octant of {}", ITERATIONS * OCTANTS);
    Ok(Row::new("sweep3d 150".into(), from.into(), scale, arms.map(|arm| arm.sums()), measured))
}

/// Simulates all accesses on every machine, counted `times` times.
fn run(arms: &mut Arms, accesses: impl Iterator<Item = Access>, times: u64, waiting: &Waiting) -> Result<(), Ended> {
    let mut accesses = accesses.peekable();
    while accesses.peek().is_some() {
        let part: Vec<Access> = accesses.by_ref().take(PART).collect();
        for arm in arms.iter_mut() {
            arm.run(&part);
            arm.sum_up(times as f64);
        }
        if waiting.flag().load(Ordering::Relaxed) {
            return Err(Ended::Interrupted);
        }
    }
    Ok(())
}
