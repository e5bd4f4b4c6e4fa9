//! QEMU's own save to a file and restore of the same guest.

use std::fs::File;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wideleaf_experiments::disturbance::{DisturbedGuests, Event, PromotionOwner};
use wideleaf_experiments::peers::QemuRam;
use wideleaf_experiments::restoring::{DISK_MIB, HOT_MIB, PAUSE_MS, RestoredGuest, SAVE_ROUNDS, SAVE_S, STORED_MIB};
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;

use super::file::disk_mib;
use super::{BESIDE, Continued, Look, PACE};
use crate::experiment::jobs::disturbed::guest_messages::{GuestMessages, Names};
use crate::experiment::jobs::disturbed::machine::{Machine, Place};
use crate::experiment::jobs::qemu::{Watch, with_clock};
use crate::experiment::jobs::wideleaf_run::MIB;

/// Speed of a save to a file, in bytes a second: no limit.
const UNLIMITED: u64 = 1 << 40;
/// Longest pause of a save in milliseconds, as for `wideleaf run`.
const PAUSE_MAX_MS: u64 = 10_000;
/// Interval between two looks at RAM for each GiB of it: a look at a GiB of base pages takes 4 ms.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Name of the saved guest.
const SAVED: &str = "saved";

/// A saved guest of QEMU.
#[derive(Debug)]
pub(super) struct SavedFile {
    place: Place,
    guests: DisturbedGuests,
    said: GuestMessages,
    told: Vec<(&'static str, f64)>,
    restores: u32,
}

impl SavedFile {
    /// Path of the file.
    pub(super) fn path(&self) -> PathBuf {
        self.place.path(SAVED)
    }

    /// Figures of the save.
    pub(super) fn told(&self) -> &[(&'static str, f64)] {
        &self.told
    }
}

/// The guest as other jobs start it, with the frequency of its clock.
fn guests(work: &RestoredGuest) -> DisturbedGuests {
    let guest = with_clock(&work.guest);
    DisturbedGuests { guest, count: 1, ram: QemuRam::Thp, keeper: PromotionOwner::Kernel, event: Event::Restore }
}

/// Runs the guest until it works in its phase, and saves it at its end.
pub(super) fn save(work: &RestoredGuest, interrupts: &Interrupts) -> Result<SavedFile, Failure> {
    let (place, guests) = (Place::make()?, guests(work));
    let mut said = GuestMessages::of(Names { timed: work.phase.clone(), hot: work.hot.clone() });
    let mut machine = Machine::start(&place, &guests, "to-be-saved", None, interrupts)?;
    let at_most = Duration::from_millis(work.saved_within_ms) + BESIDE;
    let works = Duration::from_millis(work.works_ms);
    let is_ready = |said: &GuestMessages| said.began.is_some_and(|began| began.elapsed() >= works);
    until(&mut machine, &mut said, at_most, interrupts, |_, said| is_ready(said))?;
    let parameters = json!({ "max-bandwidth": UNLIMITED, "downtime-limit": PAUSE_MAX_MS });
    machine.monitor.command("migrate-set-parameters", &parameters)?;
    let began = Instant::now();
    machine.monitor.command("migrate", &json!({ "uri": format!("exec:cat > {SAVED}") }))?;
    let outcome = until_migrated(&mut machine, &mut said, at_most, interrupts)?;
    let took = began.elapsed().as_secs_f64();
    machine.end(&mut said);
    let saved = SavedFile { place, guests, said, told: vec![], restores: 0 };
    let path = saved.path();
    let cannot = |error: std::io::Error| Failure::Host(format!("cannot write {} to the disk: {error}", path.display()));
    File::open(&path).and_then(|file| file.sync_all()).map_err(cannot)?;
    let hot: u64 = saved.said.hot_set.iter().map(|range| range.bytes().get()).sum();
    let number = |pointer: &str| outcome.pointer(pointer).and_then(Value::as_f64);
    let told = [
        (SAVE_S, Some(took)),
        (DISK_MIB, Some(disk_mib([path.as_path()]))),
        (HOT_MIB, Some(hot as f64 / MIB)),
        (PAUSE_MS, number("/downtime")),
        (SAVE_ROUNDS, number("/ram/dirty-sync-count")),
        // Of all passes: pages that were written again are sent again.
        (STORED_MIB, number("/ram/normal-bytes").map(|bytes| bytes / MIB)),
    ];
    let told = told.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    Ok(SavedFile { told, ..saved })
}

/// Continues the guest in another QEMU.
pub(super) fn restore(
    work: &RestoredGuest,
    saved: &mut SavedFile,
    interrupts: &Interrupts,
) -> Result<Continued, Failure> {
    saved.restores += 1;
    let name = format!("restored-{}", saved.restores);
    let incoming = format!("exec:cat {SAVED}");
    let mut machine = Machine::start(&saved.place, &saved.guests, &name, Some(&incoming), interrupts)?;
    let (began, mut watch) = (machine.began, Watch::of(machine.pid()));
    let (mut said, hot) = (saved.said.continued(), saved.said.hot_set.clone());
    let watched = Duration::from_millis(work.watched_ms);
    let every = LOOK_EVERY * (work.guest.memory_mib.div_ceil(1024) as u32);
    let (mut looks, mut next) = (Vec::new(), began);
    until(&mut machine, &mut said, watched + BESIDE, interrupts, |_, _| {
        if Instant::now() >= next {
            looks.extend(watch.look(&hot).map(|look| of_qemu(&look, began)));
            next = Instant::now() + every;
        }
        began.elapsed() >= watched
    })?;
    machine.end(&mut said);
    Ok(Continued { marks: said.progress_since(began), looks, told: vec![] })
}

fn of_qemu(look: &crate::experiment::jobs::qemu::RamSample, began: Instant) -> Look {
    let mebibytes = |windows: u64| (windows * 2) as f64;
    Look {
        at_s: look.at.saturating_duration_since(began).as_secs_f64(),
        windows: look.windows,
        windows_large: look.windows_large,
        base_mib: mebibytes(look.windows - look.windows_large),
        huge_mib: mebibytes(look.windows_large),
    }
}

/// Hears the guest until it is as wanted.
fn until(
    machine: &mut Machine,
    said: &mut GuestMessages,
    at_most: Duration,
    interrupts: &Interrupts,
    mut is_there: impl FnMut(&mut Machine, &GuestMessages) -> bool,
) -> Result<(), Failure> {
    let began = Instant::now();
    loop {
        interrupts.check()?;
        machine.tell(said);
        machine.check(said)?;
        if said.is_over() {
            return said.judge().and(Err(Failure::Host("cannot watch the guest: it ended before".into())));
        }
        if is_there(machine, said) {
            return Ok(());
        }
        if began.elapsed() > at_most {
            return Err(Failure::took_longer_than(at_most, "the wait for a guest under QEMU"));
        }
        thread::sleep(PACE);
    }
}

/// Waits for the end of the save, and returns what QEMU tells of it.
fn until_migrated(
    machine: &mut Machine,
    said: &mut GuestMessages,
    at_most: Duration,
    interrupts: &Interrupts,
) -> Result<Value, Failure> {
    let mut answer = Ok(Value::Null);
    until(machine, said, at_most, interrupts, |machine, _| {
        answer = machine.monitor.command("query-migrate", &json!({}));
        let status = |answer: &Value| answer["status"].as_str().unwrap_or_default().to_owned();
        answer.as_ref().map_or(true, |answer| ["completed", "failed", "cancelled"].contains(&&*status(answer)))
    })?;
    let answer = answer?;
    match answer["status"].as_str() {
        Some("completed") => Ok(answer),
        other => Err(Failure::Host(format!("cannot save QEMU's guest: its status is {}", other.unwrap_or("unknown")))),
    }
}
