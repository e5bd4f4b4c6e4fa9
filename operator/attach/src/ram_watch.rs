//! Detects changes of RAM, or of what may be done to it, since it was last examined. It runs often, so it
//! costs little: one question to the monitor, or one read of `maps` (proc_pid_maps(5)), which walks no page
//! tables as `smaps` does.
//!
//! ```text
//!   every LOOK_EVERY   monitor: query-memory-devices ┐
//!                      without: large mappings       ├─ as before ─▶ nothing to do
//!                      THP of the process, the host  ┴▶ another ───▶ the RAM map is read again, then `read`
//!   a userfaultfd is opened or closed ─────────────────────────▶ the same, at once
//!   every READ_EVERY   or a thousand times what that takes ─▶ the same: advice (MADV_NOHUGEPAGE) is in smaps alone
//! ```

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

use crate::monitor::Monitor;
use crate::process::VmProcess;
use crate::qmp::Question;

/// Interval between checks. An operator or a scheduler plugs memory in, which takes seconds itself, and the memory
/// works unmanaged until then. A check takes half a millisecond.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Interval between reads of the RAM map without a sign of a change. A process seldom changes its advice, and until
/// the change is seen the kernel refuses the attempts.
const READ_EVERY: Duration = Duration::from_secs(300);

/// Limit on the reads' share of a core, as its inverse. A read takes some milliseconds per gibibyte in base pages:
/// at most a thousandth of a core goes into it, however large the guest is.
const READ_SHARE: u32 = 1000;

/// Smallest mapping that counts. Smaller ones come and go with threads and devices. Linux takes plugged memory in
/// blocks of 128 MiB (memory-hotplug.rst), and some VMMs give half of that.
const MAPPING_MIN: Bytes = mib(64);

/// Cheap summary of RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    ram: Ram,
    /// Whether a userfaultfd is open, according to the gate.
    is_watched: bool,
    /// `PR_SET_THP_DISABLE` of the process (proc_pid_status(5), `THP_enabled`).
    is_thp_off: bool,
    /// Whether the host's THP setting is `never`.
    is_thp_never: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Ram {
    /// The memory devices according to QEMU.
    Devices(Value),
    /// First address and end of each large writable mapping.
    Mappings(Vec<(u64, u64)>),
}

/// Userfaultfds of the RAM.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watched {
    /// Whether the process has one open.
    pub by_it: bool,
    /// Whether any process has.
    pub by_any: bool,
}

/// Watch on one guest's RAM; see the module.
#[derive(Debug)]
pub(crate) struct RamWatch {
    looked_at: Instant,
    followed: Option<Mark>,
    read_at: Instant,
    reading_took: Duration,
}

impl RamWatch {
    /// Remembers the present state. It is made before the RAM map is read, so that no change is missed.
    pub fn new(process: &VmProcess, monitor: Option<&Monitor>) -> RamWatch {
        let now = Instant::now();
        RamWatch { looked_at: now, followed: mark(process, monitor, false), read_at: now, reading_took: Duration::ZERO }
    }

    /// The present state, where it is time to check and the state is new, or time to read the RAM map all the same.
    /// A userfaultfd that the process opens or closes is followed at once: QEMU forbids huge pages
    /// (`MADV_NOHUGEPAGE`) from the start of a postcopy to its end. One that only another process has is known from the
    /// RAM map alone, which is therefore read at each check.
    pub fn change(&mut self, process: &VmProcess, monitor: Option<&Monitor>, watched: Watched) -> Option<Mark> {
        let is_watched = watched.by_it;
        let was_watched = self.followed.as_ref().is_some_and(|mark| mark.is_watched);
        if self.looked_at.elapsed() < LOOK_EVERY && is_watched == was_watched {
            return None;
        }
        self.looked_at = Instant::now();
        let read_every = if watched.by_any && !is_watched { LOOK_EVERY } else { READ_EVERY };
        let is_time = self.read_at.elapsed() >= read_every.max(self.reading_took * READ_SHARE);
        mark(process, monitor, is_watched).filter(|mark| is_time || self.followed.as_ref() != Some(mark))
    }

    /// Records that the RAM map was read after this state was seen, and the duration of that.
    pub fn read(&mut self, mark: Mark, took: Duration) {
        (self.read_at, self.reading_took) = (Instant::now(), took);
        self.followed = Some(mark);
    }

    /// Records that the RAM map could not be read. How long that took says nothing of the next time.
    pub fn not_read(&mut self) {
        self.read_at = Instant::now();
    }
}

/// `None` where the state is not readable for now.
fn mark(process: &VmProcess, monitor: Option<&Monitor>, is_watched: bool) -> Option<Mark> {
    let ram = match monitor {
        Some(monitor) => {
            let answer = monitor.with(|qmp| qmp.ask(Question::MemoryDevices)).ok()?;
            // A machine without such devices says so or refuses: neither answer changes.
            Ram::Devices(answer.unwrap_or_default())
        }
        None => Ram::Mappings(process.maps()?.lines().filter_map(large_mapping).collect()),
    };
    let status =
        fs::read_to_string(process.places.proc.join(process.pid.to_string()).join("status")).unwrap_or_default();
    let is_thp_off = status.lines().any(|line| line.split_whitespace().eq(["THP_enabled:", "0"]));
    Some(Mark { ram, is_watched, is_thp_off, is_thp_never: process.places.is_thp_never() })
}

/// Parses `7fc247e00000-7fc257e00000 rw-p 00000000 00:00 0`.
fn large_mapping(line: &str) -> Option<(u64, u64)> {
    let (addresses, rest) = line.split_once(' ')?;
    let (start, end) = addresses.split_once('-')?;
    let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
    (rest.starts_with("rw") && end.checked_sub(start)? >= MAPPING_MIN.get()).then_some((start, end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::tests::fake_places;
    use crate::process::tests::add_process;

    const BEFORE: &str = "\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
7f0010000000-7f0010001000 ---p 00000000 00:00 0
7f0020000000-7f0020800000 rw-p 00000000 00:00 0 [stack:9]
";
    const PLUGGED: &str = "7f0040000000-7f0048000000 rw-s 00000000 00:01 7 /memfd:dimm (deleted)\n";

    #[test]
    fn only_large_writable_mappings_are_seen() {
        let text = format!("{BEFORE}{PLUGGED}nonsense\n7f-\n7f0050000000-7f0060000000 r--p 0 00:00 0\n");
        let seen: Vec<_> = text.lines().filter_map(large_mapping).collect();
        assert_eq!(seen, [(0x7f00_0000_0000, 0x7f00_1000_0000), (0x7f00_4000_0000, 0x7f00_4800_0000)]);
    }

    fn guest() -> (tempfile::TempDir, VmProcess) {
        let (folder, places) = fake_places();
        add_process(&places, 7, &["other-vmm"], &["anon_inode:kvm-vm"]);
        fs::write(places.proc.join("7/maps"), BEFORE).expect("written");
        let process = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        (folder, process)
    }

    fn ago(time: Duration) -> Instant {
        Instant::now().checked_sub(time).expect("the clock has run for longer")
    }

    /// The change once it is time to check again.
    fn later(watch: &mut RamWatch, process: &VmProcess) -> Option<Mark> {
        watch.looked_at = ago(LOOK_EVERY);
        watch.change(process, None, Watched::default())
    }

    #[test]
    fn a_userfaultfd_that_is_opened_or_closed_is_a_change_at_once() {
        let (_folder, process) = guest();
        let mut watch = RamWatch::new(&process, None);
        for is_watched in [true, false] {
            let watched = Watched { by_it: is_watched, by_any: is_watched };
            let change = watch.change(&process, None, watched).expect("it has just changed");
            watch.read(change, Duration::ZERO);
            assert_eq!(watch.change(&process, None, watched), None);
        }
        (watch.looked_at, watch.read_at) = (ago(LOOK_EVERY), ago(LOOK_EVERY));
        assert!(watch.change(&process, None, Watched { by_it: false, by_any: true }).is_some(), "of another process");
    }

    #[test]
    fn a_mapping_that_comes_or_goes_is_a_change_until_it_is_followed() {
        let (_folder, process) = guest();
        let maps = process.places.proc.join("7/maps");
        let mut watch = RamWatch::new(&process, None);
        assert_eq!(later(&mut watch, &process), None);
        fs::write(&maps, [BEFORE, PLUGGED].concat()).expect("written");
        assert_eq!(watch.change(&process, None, Watched::default()), None, "it has just checked");
        let change = later(&mut watch, &process).expect("a mapping has come");
        assert_eq!(later(&mut watch, &process).as_ref(), Some(&change), "it was not followed");
        watch.read(change, Duration::ZERO);
        assert_eq!(later(&mut watch, &process), None);
        fs::write(&maps, BEFORE).expect("written");
        assert!(later(&mut watch, &process).is_some(), "a mapping has gone");
        fs::remove_file(&maps).expect("it was there");
        assert_eq!(later(&mut watch, &process), None, "the maps are not readable");
    }

    #[test]
    fn switching_thp_off_or_on_for_the_process_or_the_host_is_a_change() {
        let (_folder, process) = guest();
        let status = process.places.proc.join("7/status");
        let settings = process.places.sys.join("kernel/mm/transparent_hugepage");
        fs::create_dir_all(&settings).expect("the folder is new");
        let mut watch = RamWatch::new(&process, None);
        for (path, text, is_change) in [
            (&status, "Name:\tqemu\nTHP_enabled:\t1\nThreads:\t4\n", false),
            (&status, "Name:\tqemu\nTHP_enabled:\t0\nThreads:\t4\n", true),
            (&settings.join("enabled"), "always [madvise] never\n", false),
            (&settings.join("enabled"), "always madvise [never]\n", true),
            (&status, "Name:\tqemu\nTHP_enabled:\t1\nThreads:\t4\n", true),
        ] {
            fs::write(path, text).expect("written");
            let change = later(&mut watch, &process);
            assert_eq!(change.is_some(), is_change, "{text}");
            change.into_iter().for_each(|change| watch.read(change, Duration::ZERO));
        }
    }

    #[test]
    fn the_map_is_read_again_periodically_and_rarely_where_that_takes_long() {
        let (_folder, process) = guest();
        let mut watch = RamWatch::new(&process, None);
        watch.read_at = ago(READ_EVERY);
        let unchanged = later(&mut watch, &process).expect("it is time");
        watch.read(unchanged, Duration::from_secs(1));
        assert_eq!(later(&mut watch, &process), None);
        watch.read_at = ago(2 * READ_EVERY);
        assert_eq!(later(&mut watch, &process), None, "a thousand seconds have not gone by");
        watch.read_at = ago(READ_SHARE * watch.reading_took);
        assert!(later(&mut watch, &process).is_some());
        watch.not_read();
        assert_eq!((watch.reading_took, later(&mut watch, &process)), (Duration::from_secs(1), None));
    }
}
