//! Runs several guests of QEMU at once, and measures them as several `wideleaf run` are measured.
//!
//! ```text
//!   QEMU × n ── consoles: progress, figure ──▶ the time in which all are at work ──▶ one result, and numbers of each
//!          └─── RAM, looked at from outside ─▶ huge pages of each set of data
//! ```

use std::time::{Duration, Instant};

use wideleaf_experiments::definition::{GuestAmongOthers, GuestInQemu};
use wideleaf_experiments::each_guest::OfGuest;
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::peers::{Guest, QemuRam};
use wideleaf_experiments::results::Measured;
use wideleaf_policies::PageSize;

use super::shared_time::TimedPart;
use super::{GuestRun, all, together};
use crate::experiment::jobs::disturbed::guest_messages::{GuestMessages, Names};
use crate::experiment::jobs::qemu::{self, EndedGuest};
use crate::experiment::jobs::wideleaf_run::MIB;
use ::wideleaf_run::failure::Failure;
use ::wideleaf_run::interrupts::Interrupts;

/// Interval between two samples of RAM. A sample takes 2 to 3 ms of a CPU, which the guests share: less than 1 %.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Runs all of them until they end.
pub(in crate::experiment::jobs) fn run(
    guests: &[GuestInQemu],
    timeout: Duration,
    interrupts: &Interrupts,
) -> Result<Measured, Failure> {
    let with_clock = |of: &GuestInQemu| (of.name.clone(), qemu::with_clock(&of.guest));
    let guests: Vec<(String, Guest)> = guests.iter().map(with_clock).collect();
    let began = Instant::now();
    let one = |(name, guest): &(String, Guest)| {
        let ended = qemu::watched(guest, QemuRam::Thp, LOOK_EVERY, timeout, interrupts);
        ended.map(|ended| of_qemu(name, &ended, began)).map_err(|failure| failure.during(name))
    };
    let ended = all(&guests, one)?;
    let judged =
        |(name, _): &(String, Guest)| GuestAmongOthers { name: name.clone(), is_judged: true, arguments: vec![] };
    Ok(together(&guests.iter().map(judged).collect::<Vec<_>>(), ended))
}

/// The run of a guest, in seconds since `began`.
fn of_qemu(name: &str, ended: &EndedGuest, began: Instant) -> GuestRun {
    let measured = ended.measured();
    let mib = |windows: u64| (windows * PageSize::Huge2M.bytes().get()) as f64 / MIB;
    let figure = measured.metrics.get(&Metric::Figure).map(|figure| (OfGuest::FigureOfWhole.name(name), *figure));
    let of_sets = ended.sets().into_iter().flat_map(|(set, of)| {
        let numbers = [(OfGuest::SetMib(set), of.windows), (OfGuest::HugeMib(set), of.windows_large)];
        numbers.map(|(what, windows)| (what.name(name), mib(windows)))
    });
    let told = figure.into_iter().chain(of_sets).collect();
    GuestRun { name: name.to_owned(), measured: Measured { told, ..measured }, timed: timed_part(ended, began) }
}

/// Its timed part, by the marks of progress on its console.
fn timed_part(ended: &EndedGuest, began: Instant) -> Option<TimedPart> {
    let mut said = GuestMessages::of(Names { timed: ended.timed()?.name.clone(), hot: vec![] });
    ended.lines().iter().for_each(|(at, line)| said.hear(*at, line));
    said.timed_part(began)
}
