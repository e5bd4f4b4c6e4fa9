//! One guest from its start to its end, over any number of runs.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use wideleaf_testing::programs::wideleaf;
use wideleaf_testing::scratch::Scratch;
use wideleaf_vmm::devices::virtio::block::{DiskError, DiskImage, DiskOptions};

use crate::Victim;
use crate::echo::{Echoes, echo};
use crate::run::{End, Run, State, said, wait_for};

/// No save or migration is refused for its pause.
const PAUSE: &str = "--pause=60s";
/// A migration that leaves pages behind: what a guest writes in a round of some seconds does not fit into the pause.
const POST_COPY: [&str; 3] = ["--postcopy=1", "--pause=3s", "--bytes-per-second=4M"];
const DISK_BYTES: u64 = 8 << 20;
/// Most snapshots below one here.
const BASES_MAX: u32 = 3;

/// Number of network cards so far: no two of this process have one name.
static CARDS: AtomicU32 = AtomicU32::new(0);

/// The program in the guest, with the devices that it drives; all have a balloon, a disk and sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two vCPUs check memory.
    Pattern,
    /// Two vCPUs: one writes its disk and reads it back, the other one checks memory.
    Disk,
    /// Gives memory back and takes it again.
    Balloon,
    /// Echoes what programs of the host send.
    Sockets,
    /// Sends frames over its network card.
    Net,
    /// Does all of this at once, with a vCPU for each device.
    Devices,
}

impl Kind {
    /// Kinds for which this user has the rights.
    pub fn possible_here() -> Vec<Kind> {
        let mut kinds = vec![Kind::Disk, Kind::Pattern, Kind::Balloon, Kind::Sockets];
        if Kind::has_cards() {
            kinds.push(Kind::Net);
        }
        kinds
    }

    /// Whether guests can have a network card here.
    pub fn has_cards() -> bool {
        let has = is_root() && fs::File::options().read(true).write(true).open("/dev/net/tun").is_ok();
        if !has {
            println!("skipped: guests with a network card: they need root and /dev/net/tun");
        }
        has
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Pattern => "pattern",
            Kind::Disk => "disk",
            Kind::Balloon => "balloon",
            Kind::Sockets => "vsock",
            Kind::Net => "net",
            Kind::Devices => "devices",
        }
    }

    /// Arguments of the VM itself, which is one of those that live for some ten seconds.
    fn arguments(self) -> [&'static str; 3] {
        match self {
            Kind::Pattern => ["pattern", "--vcpus=2", "--cmdline=bytes=16M passes=1500"],
            Kind::Disk => ["disk", "--vcpus=2", "--cmdline=bytes=4M passes=200"],
            Kind::Balloon => ["balloon", "--vcpus=1", "--cmdline=bytes=32M passes=400"],
            Kind::Sockets => ["vsock", "--vcpus=1", "--cmdline=connections=10"],
            Kind::Net => ["net", "--vcpus=1", "--cmdline=frames=1500000"],
            Kind::Devices => ["devices", "--vcpus=4", "--cmdline=bytes=4M passes=200"],
        }
    }

    fn has_card(self) -> bool {
        matches!(self, Kind::Net | Kind::Devices)
    }

    fn writes_disk(self) -> bool {
        matches!(self, Kind::Disk | Kind::Devices)
    }
}

pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Result of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundResult {
    /// What was asked for.
    Done,
    /// The guest goes on as before.
    GoesOn,
    /// The run that had the guest was killed.
    Lost,
    /// The guest came to its end.
    Finished,
    /// Nothing: it was not possible now.
    Nothing,
}

/// A guest and its files.
pub struct Life {
    pub kind: Kind,
    scratch: Scratch,
    /// The run that has it, if there is one.
    run: Option<Run>,
    runs: u32,
    /// Number of the disk's file, which a restore replaces by the copy of the snapshot.
    disk: u32,
    has_snapshot: bool,
    /// Number of snapshots that were put aside, as bases of later ones.
    bases_made: u32,
    /// Number of bases below the snapshot.
    bases: u32,
    /// Program of the host that talks with it all the time.
    echoes: Option<Echoes>,
}

impl Life {
    pub fn begin(kind: Kind) -> Life {
        let scratch = Scratch::of(wideleaf());
        let echoes = (kind == Kind::Devices).then(Echoes::begin);
        let (run, has_snapshot) = (None, false);
        let mut life = Life { kind, scratch, run, runs: 0, disk: 0, has_snapshot, bases_made: 0, bases: 0, echoes };
        fs::File::create(life.disk_path()).unwrap().set_len(DISK_BYTES).unwrap();
        let mut arguments: Vec<String> = kind.arguments().map(str::to_owned).into();
        arguments.push("--memory=128M".to_owned());
        let run = life.start(arguments);
        run.settled();
        life.run = Some(run);
        life
    }

    fn disk_path(&self) -> PathBuf {
        self.scratch.path(&format!("disk{}", self.disk))
    }

    /// Starts a run with the devices of this guest. Names that two runs cannot have are new.
    fn start(&mut self, mut arguments: Vec<String>) -> Run {
        self.runs += 1;
        let number = self.runs;
        arguments.extend([
            format!("--disk=disk{},id=disk", self.disk),
            "--balloon".to_owned(),
            format!("--vsock=cid=3,socket=vsock{number}"),
        ]);
        if self.kind.has_card() {
            let card = CARDS.fetch_add(1, Ordering::Relaxed);
            arguments.push(format!("--net=tap=wlm{}x{card},mac=02:00:00:00:00:07", std::process::id() % 10_000));
        }
        Run::start(&self.scratch, number, &arguments)
    }

    pub fn is_over(&self) -> bool {
        self.run.is_none()
    }

    fn run(&self) -> &Run {
        self.run.as_ref().unwrap()
    }

    /// The guest came to its end: its disk and its sockets are free.
    fn finished(&mut self) -> RoundResult {
        if let (Kind::Devices, Some(run)) = (self.kind, &self.run) {
            let results = &run.report()["results"];
            for done in ["frames", "given", "echoed"] {
                assert!(results[done]["value"].as_f64() > Some(0.0), "a device did nothing: {results}");
            }
        }
        self.run = None;
        self.has_snapshot = false;
        RoundResult::Finished
    }

    /// Waits for its own end.
    pub fn finish(&mut self) {
        while !self.is_over() {
            self.check();
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What is known after a round in which only this run may have the guest.
    fn goes_on(&mut self, did: RoundResult) -> RoundResult {
        match self.run().settled() {
            State::Here => did,
            State::Gone(End::Finished) => self.finished(),
            State::Gone(End::Killed) => {
                self.run = None;
                RoundResult::Lost
            }
            other => panic!("{other:?}: {}", self.run().log()),
        }
    }

    /// Checks that its disk is locked for it, and that it answers.
    pub fn check(&mut self) {
        let Some(run) = &self.run else { return };
        let options = DiskOptions { path: self.disk_path(), ..DiskOptions::default() };
        match DiskImage::open(&options) {
            Err(DiskError::InUse { holder: Some(holder), .. }) => assert_eq!(holder, run.pid()),
            // It ended just before, or between the two looks.
            _ => assert_eq!(run.settled(), State::Gone(End::Finished), "its disk is not locked"),
        }
        match &self.echoes {
            Some(echoes) => echoes.go_on(&self.sockets(), || self.run().end() == Some(End::Finished)),
            None if self.kind == Kind::Sockets => self.echo(),
            None => {}
        }
        if self.run().end() == Some(End::Finished) {
            self.finished();
        }
    }

    /// Place of its sockets.
    fn sockets(&self) -> PathBuf {
        self.scratch.path(&format!("vsock{}", self.run().number))
    }

    /// Sends bytes to the guest and compares what comes back; the connection is over at both ends afterwards.
    fn echo(&self) {
        if let Err(error) = echo(&self.sockets()) {
            assert_eq!(self.run().settled(), State::Gone(End::Finished), "{error}");
        }
    }

    /// Saves it while all of its devices are at work, ends it as the snapshot knows it, and continues from there.
    pub fn save_and_stop(&mut self) -> RoundResult {
        let (is_saved, why) = self.run().tell(&["snapshot", "saved", "--stop", PAUSE]);
        if !is_saved {
            let is_over = self.run().settled() == State::Gone(End::Finished);
            assert!(is_over || is_under_way(&why), "{why}");
            return self.goes_on(RoundResult::Nothing);
        }
        assert_eq!(self.run().settled(), State::Gone(End::Stopped));
        fs::copy(self.disk_path(), self.scratch.path("saved.img")).unwrap();
        self.has_snapshot = true;
        self.bases = 0;
        self.run = None;
        assert!(self.restore());
        RoundResult::Done
    }

    /// Saves it, where that is asked for on the snapshot before. A guest with a disk is paused, and the disk is copied:
    /// a snapshot has none.
    pub fn save(&mut self, victim: Option<Victim>, after: Duration, pauses: bool, is_on_base: bool) -> RoundResult {
        let pauses = pauses || self.kind.writes_disk();
        if pauses && !self.run().tell(&["pause"]).0 {
            return self.goes_on(RoundResult::Nothing);
        }
        fs::copy(self.disk_path(), self.scratch.path("next.img")).unwrap();
        let before = self.snapshot();
        let base = is_on_base.then(|| self.put_aside()).flatten();
        let option = base.as_ref().map(|base| format!("--base={base}"));
        let words: Vec<&str> = ["snapshot", "saved", PAUSE].into_iter().chain(option.as_deref()).collect();
        let mut client = self.run().client(&words).spawn().unwrap();
        if victim.is_some() {
            std::thread::sleep(after);
        }
        match victim {
            Some(Victim::Client) => client.kill().unwrap(),
            Some(_) => self.run().kill(),
            None => {}
        }
        let (is_saved, why) = said(client);
        if let (Some(base), None) = (&base, self.snapshot()) {
            fs::rename(self.scratch.path(base), self.scratch.path("saved")).unwrap();
        }
        let is_new = self.snapshot() != before;
        assert!(!is_saved || is_new, "a save without a snapshot");
        if is_new {
            fs::rename(self.scratch.path("next.img"), self.scratch.path("saved.img")).unwrap();
            self.has_snapshot = true;
            self.bases = base.map_or(0, |_| self.bases + 1);
        }
        if victim.is_none() && !is_saved && !is_under_way(&why) {
            assert_eq!(self.run().settled(), State::Gone(End::Finished), "{why}");
        }
        if pauses && self.run().end().is_none() {
            self.run().tell(&["resume"]);
        }
        self.goes_on(if is_new { RoundResult::Done } else { RoundResult::GoesOn })
    }

    /// Puts the snapshot where it stays as the base of the next one. Returns its name there; `None` without a
    /// snapshot, or if it has the highest number of bases already.
    fn put_aside(&mut self) -> Option<String> {
        if !self.has_snapshot || self.bases == BASES_MAX {
            return None;
        }
        let base = format!("base{}", self.bases_made);
        self.bases_made += 1;
        fs::rename(self.scratch.path("saved"), self.scratch.path(&base)).unwrap();
        Some(base)
    }

    /// Identity of the snapshot.
    fn snapshot(&self) -> Option<Vec<u8>> {
        fs::read(self.scratch.path("saved/windows")).ok()
    }

    /// Saves it where there is no room: nothing is left there, and the guest goes on.
    pub fn save_without_room(&mut self) -> RoundResult {
        if !is_root() {
            return self.goes_on(RoundResult::Nothing);
        }
        let place = self.scratch.path("full");
        fs::create_dir_all(&place).unwrap();
        let run = |command: &mut Command| assert!(command.status().unwrap().success());
        run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "none"]).arg(&place));
        let _unmounted = Unmounted(place.clone());
        let (is_saved, why) = self.run().tell(&["snapshot", "full/saved", PAUSE]);
        let is_refused = why.contains("space") || is_under_way(&why);
        assert!(!is_saved && (is_refused || self.run().settled() == State::Gone(End::Finished)), "{is_saved}: {why}");
        assert_eq!(fs::read_dir(&place).unwrap().count(), 0, "{why}");
        self.goes_on(RoundResult::GoesOn)
    }

    pub fn kill_and_restore(&mut self) -> RoundResult {
        if !self.has_snapshot {
            return self.goes_on(RoundResult::Nothing);
        }
        self.run().kill();
        if self.run().end() == Some(End::Finished) {
            return self.finished();
        }
        self.run = None;
        assert!(self.restore());
        RoundResult::Done
    }

    /// Continues from the last snapshot, with a copy of the disk of that moment; false without a snapshot.
    pub fn restore(&mut self) -> bool {
        if !self.has_snapshot {
            return false;
        }
        self.disk += 1;
        fs::copy(self.scratch.path("saved.img"), self.disk_path()).unwrap();
        let run = self.start(vec!["--restore=saved".to_owned()]);
        let state = run.settled();
        assert!(matches!(state, State::Here | State::Gone(End::Finished)), "{state:?}: {}", run.log());
        self.run = Some(run);
        true
    }

    /// Moves it to another run of this host; `is_post_copy`: before all of its RAM has, which needs root here.
    pub fn migrate(&mut self, victim: Option<Victim>, after: Duration, is_post_copy: bool) -> RoundResult {
        let place = self.scratch.path("move.sock");
        // A target that was killed has left it.
        let _ = fs::remove_file(&place);
        let target = self.start(vec!["--incoming=unix:move.sock".to_owned()]);
        wait_for(|| place.exists().then_some(()), &|| target.log());
        let options: &[&str] = if is_post_copy && is_root() { &POST_COPY } else { &[PAUSE] };
        let mut client = self.run().client(&[&["migrate", "unix:move.sock"], options].concat()).spawn().unwrap();
        if victim.is_some() {
            std::thread::sleep(after);
        }
        match victim {
            Some(Victim::Client) => client.kill().unwrap(),
            Some(Victim::Source) => self.run().kill(),
            Some(Victim::Target) => target.kill(),
            None => {}
        }
        let (has_moved, why) = said(client);
        self.after_migration(target, has_moved, victim, &why)
    }

    fn after_migration(&mut self, target: Run, has_moved: bool, victim: Option<Victim>, why: &str) -> RoundResult {
        let source = self.run.take().unwrap();
        let place = self.scratch.path("move.sock");
        let (at_source, at_target) = wait_for(
            || {
                let states = (source.state(), target.state());
                // A target to which nothing has connected waits for ever.
                if place.exists() && matches!(states.0, State::Here | State::Gone(_)) && states.1 == State::Busy {
                    target.kill();
                    let _ = fs::remove_file(&place);
                }
                is_decided(&states).then_some(states)
            },
            &|| format!("{:?} {:?}: {why}\n{}\n{}", source.state(), target.state(), source.log(), target.log()),
        );
        let context = format!("{at_source:?} {at_target:?}: {why}");
        assert!(!has_moved || at_source == State::Gone(End::Migrated) || victim.is_some(), "{context}");
        assert!(!(at_source == State::Here && at_target == State::Here), "two guests: {context}");
        match (at_source, at_target) {
            (State::Doubt, State::Here | State::Gone(End::Finished)) => {
                assert!(!source.tell(&["resume"]).0, "its disk is locked at the target, or was written: {context}");
                assert!(source.tell(&["stop", "--how=kill"]).0);
                self.run = Some(target);
                self.goes_on(RoundResult::Done)
            }
            (State::Doubt, State::Gone(_)) => {
                let (is_resumed, why) = source.tell(&["resume"]);
                assert!(is_resumed || why.contains("was written after its lock was given up"), "{why}");
                if !is_resumed {
                    // The target ran, and was killed before it could say so.
                    assert_eq!(victim, Some(Victim::Target), "{context}");
                    return RoundResult::Lost;
                }
                self.run = Some(source);
                self.goes_on(RoundResult::GoesOn)
            }
            (State::Here, State::Gone(end)) => {
                assert!(matches!(end, End::NeverCame | End::Killed), "{context}");
                let is_too_early = why.contains("has not all come yet") || is_under_way(why);
                // On a busy machine the short pause of a post-copy is over before the devices rest.
                let is_late = why.contains("allow a longer pause") || why.contains("allow a longer one");
                assert!(victim.is_some() || is_too_early || is_late, "nothing was killed: {context}");
                self.run = Some(source);
                self.goes_on(RoundResult::GoesOn)
            }
            (State::Gone(End::Finished), State::Gone(_)) => self.finished(),
            (State::Gone(_), State::Here | State::Gone(End::Finished)) => {
                self.run = Some(target);
                self.goes_on(RoundResult::Done)
            }
            (State::Gone(_), State::Gone(_)) => {
                assert!(matches!(victim, Some(Victim::Source | Victim::Target)), "no guest is left: {context}");
                RoundResult::Lost
            }
            _ => panic!("two guests, or none: {context}"),
        }
    }
}

/// Whether the save or migration of a client that was killed is still about to end.
fn is_under_way(why: &str) -> bool {
    why.contains("another save of it is under way")
}

/// Whether both sides of a migration know where the guest is.
fn is_decided((source, target): &(State, State)) -> bool {
    match (source, target) {
        (State::Busy, _) | (_, State::Busy) => false,
        // It is about to learn of its end.
        (State::Here, State::Here) => false,
        (_, State::Doubt) => panic!("a target is in doubt"),
        _ => true,
    }
}

struct Unmounted(PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
