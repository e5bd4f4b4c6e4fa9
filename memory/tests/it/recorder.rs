//! The recorded loop: on a host in memory, to files that accept all bytes, none, or some.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wideleaf_memory::backing::{BackingConfig, BackingKind};
use wideleaf_memory::host::{Advice, Host};
use wideleaf_memory::manager::{ManagedVm, ManagerConfig, ManagerLoop};
use wideleaf_memory::recorder::RecordTo;
use wideleaf_memory::region::RamRange;
use wideleaf_memory::testing::fake_host::{COLLAPSE_TIME, FakeHost};
use wideleaf_policies::policy;
use wideleaf_policies::recording::{Decoder, Frame, ROWS_MAX, RecordedOutcome};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Backing, Gpa, GpaRange, Hva, Outcome, OutcomeResult, PageSize, Refusal, VmId, WindowIndex};

const WINDOWS: u64 = 4;

/// A file in memory that is full after a number of bytes.
#[derive(Clone)]
struct Disk {
    written: Arc<Mutex<Vec<u8>>>,
    room: usize,
}

impl Disk {
    fn with_room(room: usize) -> Disk {
        Disk { written: Arc::default(), room }
    }

    fn bytes(&self) -> Vec<u8> {
        self.written.lock().clone()
    }
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut written = self.written.lock();
        let fits = bytes.len().min(self.room - written.len());
        written.extend_from_slice(&bytes[..fits]);
        if fits == 0 { Err(io::Error::from_raw_os_error(libc::ENOSPC)) } else { Ok(fits) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn vm(windows: u64) -> ManagedVm {
    let gpa = GpaRange::new(Gpa::new(0), mib(2) * windows).unwrap();
    let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).unwrap();
    ManagedVm::external(VmId(3), vec![RamRange { gpa, hva: Hva::new(1 << 40) }], backing, None)
}

fn host() -> Arc<FakeHost> {
    let host = FakeHost::default();
    host.make_present(Hva::new(1 << 40), mib(2) * WINDOWS, false);
    Arc::new(host)
}

fn greedy_loop(host: &Arc<FakeHost>, windows: u64) -> ManagerLoop {
    let greedy = policy::by_name("greedy").unwrap().with_defaults();
    ManagerLoop::new(host.clone(), vec![vm(windows)], greedy, ManagerConfig::default())
}

fn recorded(host: &Arc<FakeHost>, disk: &Disk) -> ManagerLoop {
    let facts = vec![("kernel".to_owned(), "6.18".to_owned())];
    greedy_loop(host, WINDOWS).recorded(RecordTo { file: Box::new(disk.clone()), facts }).unwrap()
}

#[test]
fn a_recording_has_snapshots_plans_and_outcomes() {
    let (host, disk) = (host(), Disk::with_room(usize::MAX));
    host.fail_advice(Advice::Collapse, libc::EBUSY, 1);
    let mut work = recorded(&host, &disk);
    work.tick();
    let report = work.finish();

    let bytes = disk.bytes();
    let decoder = Decoder::open(&bytes).unwrap();
    let header = decoder.header();
    assert_eq!((header.policy.as_str(), header.vms[0].vm, header.windows()), ("greedy", VmId(3), WINDOWS as usize));
    assert_eq!(header.facts, [("kernel".to_owned(), "6.18".to_owned())]);
    let frames: Vec<Frame> = decoder.map(Result::unwrap).collect();
    let [
        Frame::Snapshot { snapshot: first, .. },
        Frame::Plan { actions, .. },
        outcomes @ ..,
        Frame::Snapshot { snapshot: last, .. },
        Frame::End,
    ] = &frames[..]
    else {
        panic!("{frames:?}")
    };
    assert_eq!(first.vms[0].backing, [Backing::Base4K; WINDOWS as usize]);
    assert_eq!(actions.len() as u64, WINDOWS);
    let outcomes: Vec<&RecordedOutcome> = outcomes
        .iter()
        .map(|frame| match frame {
            Frame::Outcome(outcome) => outcome,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(outcomes.iter().all(|recorded| recorded.mechanism == "collapse"));
    assert_eq!(outcomes[0].outcome.result, OutcomeResult::Refused(Refusal::Busy));
    let Outcome { action, result, cost, .. } = outcomes[1].outcome;
    assert_eq!((action.window(), result, cost.copied), (WindowIndex::new(1), OutcomeResult::Done, mib(2)));
    assert_eq!(cost.cpu, COLLAPSE_TIME);
    assert_eq!(last.vms[0].backing[..2], [Backing::Base4K, Backing::Huge2M]);
    assert!(last.vms[0].ready_at[0] > host.now(), "it backs off");
    let recording = report.recording.unwrap();
    assert_eq!((recording.frames, recording.frames_lost), (frames.len() as u64 - 1, 0));
    assert_eq!(recording.bytes, bytes.len() as u64);
}

#[test]
fn a_tick_is_in_the_file_at_its_end() {
    let (host, disk) = (host(), Disk::with_room(usize::MAX));
    let mut work = recorded(&host, &disk);
    work.tick();
    let bytes = disk.bytes();
    let frames: Vec<_> = Decoder::open(&bytes).unwrap().map(Result::unwrap).collect();
    assert_eq!(frames.len() as u64, 2 + WINDOWS, "a killed process leaves this");
}

#[test]
fn a_full_disk_ends_the_recording_and_not_the_loop() {
    let whole = {
        let disk = Disk::with_room(usize::MAX);
        let mut work = recorded(&host(), &disk);
        work.tick();
        work.finish();
        disk.bytes()
    };
    for room in 0..whole.len() {
        let (host, disk) = (host(), Disk::with_room(room));
        let mut work = recorded(&host, &disk);
        assert_eq!(work.tick(), WINDOWS, "room for {room} bytes");
        let recording = work.finish().recording.unwrap();
        assert_eq!(recording.error.unwrap().raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(recording.frames + recording.frames_lost, 3 + WINDOWS);
        let bytes = disk.bytes();
        let readable = Decoder::open(&bytes).map(|frames| frames.filter_map(Result::ok).count()).unwrap_or(0);
        assert!(readable as u64 >= recording.frames, "room for {room} bytes: {readable}");
        assert_eq!(bytes[..], whole[..room]);
    }
}

#[test]
fn recording_does_not_change_the_loop() {
    let (plain, watched) = (host(), host());
    let mut one = greedy_loop(&plain, WINDOWS);
    let mut other = recorded(&watched, &Disk::with_room(usize::MAX));
    for _ in 0..3 {
        assert_eq!(one.tick(), other.tick());
        plain.sleep(Duration::from_secs(1));
        watched.sleep(Duration::from_secs(1));
    }
    let (one, other) = (one.finish(), other.finish());
    assert!(one.recording.is_none());
    assert_eq!(one.outcomes, other.outcomes);
    assert_eq!(plain.calls(), watched.calls());
}

#[test]
fn more_windows_than_a_recording_holds_are_refused_at_the_start() {
    let work = greedy_loop(&host(), ROWS_MAX as u64 + 1);
    let to = RecordTo { file: Box::new(Disk::with_room(0)), facts: Vec::new() };
    assert_eq!(work.recorded(to).err().unwrap().0, ROWS_MAX + 1);
}
