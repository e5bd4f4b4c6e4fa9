//! Guests are saved, restored and migrated in random order, while clients, sources and targets are killed outright at
//! any moment and snapshots meet a full disk. After each round there is exactly one guest, with its disk locked for it,
//! unless the process that had it was killed. No guest finds a wrong word, in memory, on its disk or from a socket.
//!
//! ```text
//!   life      disk, 2 vCPUs ──────────────────────────────────────▶ finished: all its words are right
//!   rounds    save │ migrate ✗ client │ migrate │ restore │ save, full │ migrate ✗ source ─▶ restore or a new life
//! ```
//!
//! One test has guests that drive a device each, the other one guests that drive all of theirs at once: a disk, a
//! network card, a balloon and sockets, over which a program of the host talks with them all the time.
//!
//! `WIDELEAF_MOVES_ROUNDS` sets the number of rounds of each (default 8 and 5), `WIDELEAF_MOVES_SEED` repeats the
//! choices of a run, not its timing. Needs KVM; root for network cards and the full disk.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod echo;
mod life;
mod run;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use life::{Kind, Life};
use wideleaf_testing::{has_kvm, number_from_environment};

const ROUNDS_DEFAULT: u64 = 8;
const ROUNDS_OF_ALL_DEVICES_DEFAULT: u64 = 5;
/// Longest time before a process is killed, in milliseconds: some migrations and saves are over by then.
const KILLED_WITHIN_MS: u64 = 400;
/// Rounds of one guest, which then comes to its own end.
const ROUNDS_OF_A_LIFE: std::ops::Range<u32> = 3..9;

/// What a round does to the guest.
#[derive(Clone, Copy, Debug)]
enum Action {
    /// Saves it while it runs, or paused, also on the snapshot before.
    Save,
    /// Saves it while it runs, ends it and continues from there.
    SaveAndStop,
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
    if has_kvm() {
        play(Kind::possible_here(), ROUNDS_DEFAULT);
    }
}

#[test]
fn a_guest_with_all_devices_at_work_that_is_saved_and_moved_while_processes_are_killed_loses_no_word_and_is_one() {
    if has_kvm() && Kind::has_cards() {
        play(vec![Kind::Devices], ROUNDS_OF_ALL_DEVICES_DEFAULT);
    }
}

/// Plays the rounds with guests of these kinds, one after another.
fn play(kinds: Vec<Kind>, rounds_default: u64) {
    let rounds = number_from_environment("WIDELEAF_MOVES_ROUNDS").unwrap_or(rounds_default);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let seed = number_from_environment("WIDELEAF_MOVES_SEED").unwrap_or(now);
    println!("WIDELEAF_MOVES_SEED={seed}");
    let mut dice = fastrand::Rng::with_seed(seed);
    let mut counts = BTreeMap::<String, u32>::new();
    let mut count = |what: String| *counts.entry(what).or_default() += 1;
    let mut kinds = kinds.into_iter().cycle();
    let mut life = Life::begin(kinds.next().unwrap());
    let mut left = dice.u32(ROUNDS_OF_A_LIFE);
    for round in 0..rounds {
        let action = match dice.u8(0..10) {
            0..=1 => Action::Save,
            2 => Action::SaveAndStop,
            3 => Action::SaveWithoutRoom,
            4 => Action::Restore,
            _ => Action::Migrate,
        };
        let victim = [None, None, Some(Victim::Client), Some(Victim::Source), Some(Victim::Target)][dice.usize(0..5)];
        let victim = victim.filter(|victim| match action {
            Action::Migrate => true,
            Action::Save => *victim != Victim::Target,
            Action::SaveAndStop | Action::SaveWithoutRoom | Action::Restore => false,
        });
        let is_post_copy = dice.bool() && victim.is_none();
        let is_on_base = dice.bool();
        let after = Duration::from_millis(dice.u64(0..KILLED_WITHIN_MS));
        let killed = victim.map_or(String::new(), |victim| format!(", {victim:?} killed"));
        let how = match action {
            Action::Migrate if is_post_copy => ", post-copy".to_owned(),
            Action::Save if is_on_base => format!(", on a base if there is one{killed}"),
            _ => killed,
        };
        let end = match action {
            Action::Save => life.save(victim, after, dice.bool(), is_on_base),
            Action::SaveAndStop => life.save_and_stop(),
            Action::SaveWithoutRoom => life.save_without_room(),
            Action::Restore => life.kill_and_restore(),
            Action::Migrate => life.migrate(victim, after, is_post_copy),
        };
        println!("round {round}: {}, {action:?}{how}: {end:?}", life.kind.name());
        count(format!("{action:?}{how}: {end:?}"));
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
