//! Guests are saved, restored and migrated in random order, while clients, sources and targets are killed outright at
//! any moment and snapshots meet a full disk. After each round there is exactly one guest, with its disk locked for it,
//! unless the process that had it was killed. No guest finds a wrong word, in memory, on its disk or from a socket.
//!
//! ```text
//!   life      disk, 2 vCPUs ──────────────────────────────────────▶ finished: all its words are right
//!   rounds    save │ migrate ✗ client │ migrate │ restore │ save, full │ migrate ✗ source ─▶ restore or a new life
//! ```
//!
//! `WIDELEAF_MOVES_ROUNDS` sets the number of rounds (default 8), `WIDELEAF_MOVES_SEED` repeats the choices of a run,
//! not its timing. Needs KVM; root for network cards and the full disk.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod life;
mod run;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use life::{Kind, Life};
use wideleaf_testing::{has_kvm, number_from_environment};

const ROUNDS_DEFAULT: u64 = 8;
/// Longest time before a process is killed, in milliseconds: some migrations and saves are over by then.
const KILLED_WITHIN_MS: u64 = 400;
/// Rounds of one guest, which then comes to its own end.
const ROUNDS_OF_A_LIFE: std::ops::Range<u32> = 3..9;

/// What a round does to the guest.
#[derive(Clone, Copy, Debug)]
enum Action {
    /// Saves it while it runs, or paused.
    Save,
    /// Saves it onto a file system without room.
    SaveWithoutRoom,
    /// Kills it, and continues from the last snapshot.
    Restore,
    /// Moves it to another run.
    Migrate,
}

/// A process that is killed in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The client that asked for it.
    Client,
    /// The run that has the guest.
    Source,
    /// The run that waits for it.
    Target,
}

#[test]
fn a_guest_that_is_saved_and_moved_while_processes_are_killed_loses_no_word_and_is_one() {
    if !has_kvm() {
        return;
    }
    let rounds = number_from_environment("WIDELEAF_MOVES_ROUNDS").unwrap_or(ROUNDS_DEFAULT);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let seed = number_from_environment("WIDELEAF_MOVES_SEED").unwrap_or(now);
    println!("WIDELEAF_MOVES_SEED={seed}");
    let mut dice = fastrand::Rng::with_seed(seed);
    let mut counts = BTreeMap::<String, u32>::new();
    let mut count = |what: String| *counts.entry(what).or_default() += 1;
    let mut kinds = Kind::possible_here().into_iter().cycle();
    let mut life = Life::begin(kinds.next().unwrap());
    let mut left = dice.u32(ROUNDS_OF_A_LIFE);
    for round in 0..rounds {
        let action = match dice.u8(0..10) {
            0..=2 => Action::Save,
            3 => Action::SaveWithoutRoom,
            4 => Action::Restore,
            _ => Action::Migrate,
        };
        let victim = [None, None, Some(Victim::Client), Some(Victim::Source), Some(Victim::Target)][dice.usize(0..5)];
        let victim = victim.filter(|victim| match action {
            Action::Migrate => true,
            Action::Save => *victim != Victim::Target,
            Action::SaveWithoutRoom | Action::Restore => false,
        });
        let after = Duration::from_millis(dice.u64(0..KILLED_WITHIN_MS));
        let with_victim = victim.map_or(String::new(), |victim| format!(", {victim:?} killed"));
        let end = match action {
            Action::Save => life.save(victim, after, dice.bool()),
            Action::SaveWithoutRoom => life.save_without_room(),
            Action::Restore => life.kill_and_restore(),
            Action::Migrate => life.migrate(victim, after),
        };
        println!("round {round}: {}, {action:?}{with_victim}: {end:?}", life.kind.name());
        count(format!("{action:?}{with_victim}: {end:?}"));
        let is_lost = life.is_over() && !life.restore();
        life.check();
        left -= 1;
        if left == 0 || is_lost || life.is_over() {
            life.finish();
            let how = if is_lost { "lost" } else { "finished" };
            count(format!("guests, {}: {how}", life.kind.name()));
            drop(life);
            life = Life::begin(kinds.next().unwrap());
            left = dice.u32(ROUNDS_OF_A_LIFE);
        }
    }
    life.finish();
    println!("{rounds} rounds: {counts:#?}");
}
