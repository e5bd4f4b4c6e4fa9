//! Whether RAM was plugged in or unplugged since it was looked at. Asked often, so it costs little: one question to the monitor, or one
//! read of `maps` (proc_pid_maps(5)), which walks no page tables as `smaps` does.
//!
//! ```text
//!   every LOOK_EVERY   monitor: query-memory-devices ┐  as before ─▶ nothing to do
//!                      without: large mappings       ┴▶ another ──▶ the RAM map is read anew, then `followed`
//! ```

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

use crate::monitor::Monitor;
use crate::process::VmProcess;
use crate::qmp::Question;

/// Memory is plugged in by hand or by a scheduler that takes seconds itself, and works unmanaged until then. A look takes half a
/// millisecond.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Smaller mappings come and go with threads and devices. Linux takes plugged memory in blocks of 128 MiB (memory-hotplug.rst), and some
/// VMMs give half of that.
const MAPPING_MIN: Bytes = mib(64);

/// What RAM looks like from afar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The memory devices that QEMU tells of.
    Devices(Value),
    /// First address and end of each large mapping that can be written.
    Mappings(Vec<(u64, u64)>),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct RamWatch {
    looked_at: Instant,
    followed: Option<Mark>,
}

impl RamWatch {
    /// Remembers how things are now: made before the RAM map is read, so that no change falls between.
    pub fn new(process: &VmProcess, monitor: Option<&Monitor>) -> RamWatch {
        RamWatch { looked_at: Instant::now(), followed: mark(process, monitor) }
    }

    /// What RAM looks like now, where it is time to look and that is something new.
    pub fn change(&mut self, process: &VmProcess, monitor: Option<&Monitor>) -> Option<Mark> {
        if self.looked_at.elapsed() < LOOK_EVERY {
            return None;
        }
        self.looked_at = Instant::now();
        mark(process, monitor).filter(|mark| self.followed.as_ref() != Some(mark))
    }

    /// The RAM map was read after this was seen.
    pub fn followed(&mut self, mark: Mark) {
        self.followed = Some(mark);
    }
}

/// `None` where it can not be told for now.
fn mark(process: &VmProcess, monitor: Option<&Monitor>) -> Option<Mark> {
    match monitor {
        Some(monitor) => {
            let answer = monitor.with(|qmp| qmp.ask(Question::MemoryDevices)).ok()?;
            // A machine without such devices says so or refuses: both stay as they are.
            Some(Mark::Devices(answer.unwrap_or_default()))
        }
        None => {
            let maps = fs::read(process.places.proc.join(process.pid.to_string()).join("maps")).ok()?;
            Some(Mark::Mappings(String::from_utf8_lossy(&maps).lines().filter_map(large_mapping).collect()))
        }
    }
}

/// `7fc247e00000-7fc257e00000 rw-p 00000000 00:00 0`
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
    use crate::process::tests::{add_process, fake_places};

    const BEFORE: &str = "\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
7f0010000000-7f0010001000 ---p 00000000 00:00 0
7f0020000000-7f0020800000 rw-p 00000000 00:00 0 [stack:9]
";
    const PLUGGED: &str = "7f0040000000-7f0048000000 rw-s 00000000 00:01 7 /memfd:dimm (deleted)\n";

    #[test]
    fn large_mappings_that_can_be_written_are_seen_and_no_others() {
        let text = format!("{BEFORE}{PLUGGED}nonsense\n7f-\n7f0050000000-7f0060000000 r--p 0 00:00 0\n");
        let seen: Vec<_> = text.lines().filter_map(large_mapping).collect();
        assert_eq!(seen, [(0x7f00_0000_0000, 0x7f00_1000_0000), (0x7f00_4000_0000, 0x7f00_4800_0000)]);
    }

    #[test]
    fn a_mapping_that_comes_or_goes_is_a_change_until_it_is_followed() {
        let (_folder, places) = fake_places();
        add_process(&places, 7, &["other-vmm"], &["anon_inode:kvm-vm"]);
        let maps = places.proc.join("7/maps");
        fs::write(&maps, BEFORE).expect("written");
        let process = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        let mut watch = RamWatch::new(&process, None);
        let later = |watch: &mut RamWatch| {
            watch.looked_at = Instant::now().checked_sub(LOOK_EVERY).expect("the clock has run for longer");
            watch.change(&process, None)
        };
        assert_eq!(later(&mut watch), None);
        fs::write(&maps, [BEFORE, PLUGGED].concat()).expect("written");
        assert_eq!(watch.change(&process, None), None, "it has just looked");
        let change = later(&mut watch).expect("a mapping has come");
        assert_eq!(later(&mut watch).as_ref(), Some(&change), "nobody has followed it");
        watch.followed(change);
        assert_eq!(later(&mut watch), None);
        fs::write(&maps, BEFORE).expect("written");
        assert!(later(&mut watch).is_some(), "a mapping has gone");
        fs::remove_file(&maps).expect("it was there");
        assert_eq!(later(&mut watch), None, "nothing can be told");
    }
}
