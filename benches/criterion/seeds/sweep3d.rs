//! Sweep3D by its loops, generated as `wideleaf simulate sweep3d` generates them; the kernel `sweep3d` computes the same in loops over more arrays.

use std::sync::atomic::Ordering;

use wideleaf_benches::experiment::{Ended, Waiting};
use wideleaf_lab::simulate::sweep3d::{OCTANTS, Sweep3d};
use wideleaf_simulator::streams::Access;

use crate::measured::Opteron;
use crate::opteron::{Arms, Row, arms};

/// Cells along an edge.
const N: u64 = 150;
/// Of each the sweep of one octant is simulated: the others do the same in another direction (fixups look again at what is in the cache).
const ITERATIONS: u64 = 12;

/// Where the arrays lie is not known of the run that was measured. At a MiB each is how an allocator places what is larger than that.
const LAYOUTS: [(&str, u64); 2] = [("generated, arrays in a row", 64), ("generated, arrays at a MiB each", 1 << 20)];

/// Accesses between two looks at whether somebody wants an end.
const PART: usize = 1 << 20;

/// The row of the tables that this stands for, for each layout.
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

/// All of it on every machine; it counts `times` times.
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
