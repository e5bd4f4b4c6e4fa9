//! Published measurements with hardware counters, compared with the simulator on the same accesses.
//!
//! ```text
//!   gups:log2_words=25…28   ─▶ generated ─┐                       ┌─ 4 KiB ─┐
//!   sweep3d, its own order  ─▶ generated ─┼─▶ K8, natively, on ───┤         ├──▶ misses, walks that missed the L2 │ FreeBSD's
//!   TRACE …                 ─▶ recorded  ─┘                       └─ 2 MiB ─┘                           their ratio │ OpenMP's
//!   TRACE of amr            ─▶ recorded  ───▶ A64FX ── 4 KiB, 64 KiB, 2 MiB ──▶ misses, cycles                     │ FLASH's
//! ```
//!
//! All rows except GUPS and Sweep3D need a trace each (`wideleaf-lab trace record npb.cg --class A --iterations 1`).
//!
//! `cargo bench -p wideleaf-benches --bench seeds [-- UPDATES TRACE …]` (default 16 million updates per table, no
//! trace; 0 omits GUPS and Sweep3D)

mod a64fx;
mod gups;
mod measured;
mod openmp;
mod opteron;
mod simulated;
mod sweep3d;
mod traced;

use std::process::ExitCode;

use wideleaf_benches::scenario;
use wideleaf_policies::PageSize;

use measured::Opteron;
use opteron::Row;
use traced::Trace;

/// Page sizes that are compared.
const PAGES: [PageSize; 2] = [PageSize::Base4K, PageSize::Huge2M];

fn main() -> ExitCode {
    scenario::run("seeds", |arguments, waiting| {
        let updates = arguments.number(0, 1 << 24)?;
        let measured = Opteron::read();
        let (mut rows, mut meshes) = (Vec::new(), Vec::new());
        if updates > 0 {
            gups::rows(updates, waiting)?;
            rows.extend(sweep3d::rows(&measured, waiting)?);
        }
        for path in (1..).map_while(|index| arguments.text(index)) {
            let trace = Trace::open(path)?;
            match trace.kernel() {
                a64fx::KERNEL => meshes.push(a64fx::Mesh::simulate(trace, waiting)?),
                _ => rows.push(Row::simulate(trace, &measured, waiting)?),
            }
        }
        opteron::print(&rows);
        openmp::print(&rows, &measured);
        a64fx::print(&meshes);
        Ok(())
    })
}
