//! KVM's side of a guest that somebody else runs: its totals by mapping size, and nothing else. Whoever has the VM's file
//! descriptor may ask KVM for more, and that is its own process alone.
//!
//! | way | needs | costs | asked at most |
//! |---|---|---|---|
//! | QMP `query-stats` | a monitor of its own | 1 ms of QEMU's main loop | once a second |
//! | `/sys/kernel/debug/kvm/PID-FD` | root | nothing | always |
//! | `virsh domstats --vm` | a libvirt domain | a process, 20 ms | every ten seconds |

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use wideleaf_memory::second_level::{SecondLevelError, Slot, SlotId};
use wideleaf_memory::{Paging, SecondLevel};
use wideleaf_policies::MappingStats;

use crate::monitor::Monitor;
use crate::process::{Places, VmProcess};
use crate::qmp::Question;
use crate::virsh::Virsh;

/// See the module.
#[derive(Debug)]
pub struct OutsideView {
    paging: Paging,
    source: Source,
    /// What it said when; `None` where it did not answer, which is not tried again at once either.
    latest: Mutex<(Instant, Option<MappingStats>)>,
}

/// Where the totals come from.
#[derive(Debug)]
enum Source {
    Monitor(Arc<Monitor>),
    Debugfs(PathBuf),
    Virsh(Virsh, String),
}

impl Source {
    /// How long an answer is good for.
    const fn good_for(&self) -> Duration {
        match self {
            Source::Monitor(_) => Duration::from_secs(1),
            Source::Debugfs(_) => Duration::ZERO,
            Source::Virsh(..) => Duration::from_secs(10),
        }
    }

    fn ask(&self) -> Result<MappingStats, SecondLevelError> {
        match self {
            Source::Monitor(monitor) => {
                let answer =
                    monitor.with(|qmp| qmp.ask(Question::Mappings)).map_err(|error| failed("query-stats", error))?;
                of_query_stats(&answer.map_err(|refused| failed("query-stats", refused))?)
                    .ok_or(SecondLevelError::NoSuchStatistic("pages_2m"))
            }
            Source::Debugfs(folder) => of_debugfs(folder).map_err(|error| failed("debugfs", error)),
            Source::Virsh(virsh, domain) => virsh.mappings(domain).map_err(|error| failed("virsh domstats", error)),
        }
    }
}

impl OutsideView {
    /// The best way there is now to ask about this guest; `Err`: what would bring one.
    ///
    /// # Errors
    /// One line.
    pub fn of(process: &VmProcess, monitor: Option<&Arc<Monitor>>) -> Result<OutsideView, String> {
        let monitor = monitor.map(|monitor| Source::Monitor(Arc::clone(monitor)));
        let debugfs = || debugfs_folders(process).into_iter().map(Source::Debugfs);
        let virsh = || process.domain.clone().map(|domain| Source::Virsh(Virsh::default(), domain));
        let mut why = Vec::new();
        for source in monitor.into_iter().chain(debugfs()).chain(virsh()) {
            match source.ask() {
                Ok(stats) => {
                    let latest = Mutex::new((Instant::now(), Some(stats)));
                    return Ok(OutsideView { paging: paging(&process.places), source, latest });
                }
                Err(error) => why.push(error.to_string()),
            }
        }
        let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join("; ")) };
        Err(format!(
            "what KVM maps is not known{why}: needs a QMP socket of its own, root and a mounted debugfs, or virsh"
        ))
    }
}

fn failed(what: &'static str, error: impl std::error::Error + Send + Sync + 'static) -> SecondLevelError {
    SecondLevelError::Ioctl { what, source: io::Error::other(error) }
}

const NOT_FROM_OUTSIDE: &str = "only the guest's own VMM can ask KVM for this";

impl SecondLevel for OutsideView {
    fn paging(&self) -> Paging {
        self.paging
    }

    fn mapping_stats(&self) -> Result<MappingStats, SecondLevelError> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.0.elapsed() < self.source.good_for() {
            return latest.1.ok_or(SecondLevelError::WrongState("KVM's totals could not be had a moment ago"));
        }
        let stats = self.source.ask();
        *latest = (Instant::now(), stats.as_ref().ok().copied());
        stats
    }

    fn slots(&self) -> Vec<Slot> {
        Vec::new()
    }

    fn set_dirty_log(&self, _slot: SlotId, _is_on: bool) -> Result<(), SecondLevelError> {
        Err(SecondLevelError::WrongState(NOT_FROM_OUTSIDE))
    }

    fn take_dirty_log(&self, _slot: SlotId) -> Result<Vec<u64>, SecondLevelError> {
        Err(SecondLevelError::WrongState(NOT_FROM_OUTSIDE))
    }

    fn pause(&self) -> Result<(), SecondLevelError> {
        Err(SecondLevelError::WrongState(NOT_FROM_OUTSIDE))
    }

    fn resume(&self) -> Result<(), SecondLevelError> {
        Err(SecondLevelError::WrongState(NOT_FROM_OUTSIDE))
    }

    fn page_table_roots(&self) -> Result<Vec<u64>, SecondLevelError> {
        Err(SecondLevelError::WrongState(NOT_FROM_OUTSIDE))
    }
}

/// `[{"provider": "kvm", "stats": [{"name": "pages_2m", "value": 64}, …]}]`
fn of_query_stats(answer: &Value) -> Option<MappingStats> {
    let providers = answer.as_array()?.iter();
    let stats: Vec<_> = providers.filter_map(|provider| provider["stats"].as_array()).flatten().collect();
    let figure = |name: &str| stats.iter().find(|figure| figure["name"] == name)?["value"].as_u64();
    Some(MappingStats { pages_4k: figure("pages_4k")?, pages_2m: figure("pages_2m")?, pages_1g: figure("pages_1g")? })
}

/// KVM names a VM's folder by the process and the number of its file.
fn debugfs_folders(process: &VmProcess) -> Vec<PathBuf> {
    let root = process.places.sys.join("kernel/debug/kvm");
    let vms = process.descriptors.as_ref().map(|descriptors| descriptors.vms.clone()).unwrap_or_default();
    vms.into_iter().map(|fd| root.join(format!("{}-{fd}", process.pid))).filter(|folder| folder.exists()).collect()
}

fn of_debugfs(folder: &Path) -> io::Result<MappingStats> {
    let figure = |name: &str| {
        let text = fs::read_to_string(folder.join(name))?;
        text.trim().parse::<u64>().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    };
    Ok(MappingStats { pages_4k: figure("pages_4k")?, pages_2m: figure("pages_2m")?, pages_1g: figure("pages_1g")? })
}

/// What this host's KVM makes its second level of: two dimensions where the module says so, else one folded table.
fn paging(places: &Places) -> Paging {
    let is_on = |parameter: &str| {
        let text = fs::read_to_string(places.sys.join("module").join(parameter)).unwrap_or_default();
        matches!(text.trim(), "Y" | "1")
    };
    match () {
        () if is_on("kvm_intel/parameters/ept") => Paging::Ept,
        () if is_on("kvm_amd/parameters/npt") => Paging::Npt,
        () => Paging::Shadow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::tests::{add_process, fake_places};
    use serde_json::json;

    fn guest_with_debugfs() -> (tempfile::TempDir, VmProcess, PathBuf) {
        let (folder, places) = fake_places();
        add_process(&places, 7, &["qemu-system-x86_64"], &["/dev/kvm", "anon_inode:kvm-vm"]);
        let kvm = places.sys.join("kernel/debug/kvm/7-1");
        fs::create_dir_all(&kvm).expect("the folder is new");
        for (name, text) in [("pages_4k", "40\n"), ("pages_2m", "64\n"), ("pages_1g", "0\n")] {
            fs::write(kvm.join(name), text).expect("written");
        }
        let process = VmProcess::look(&places, 7).expect("it is there").expect("it is a VM");
        (folder, process, kvm)
    }

    #[test]
    fn totals_come_from_debugfs_where_there_is_no_monitor() {
        let (_folder, process, kvm) = guest_with_debugfs();
        let view = OutsideView::of(&process, None).expect("readable");
        assert_eq!(view.mapping_stats().expect("readable"), MappingStats { pages_4k: 40, pages_2m: 64, pages_1g: 0 });
        fs::write(kvm.join("pages_2m"), "lots").expect("written");
        assert!(view.mapping_stats().expect_err("no number").to_string().contains("debugfs"));
        assert!(OutsideView::of(&process, None).expect_err("no way is left").contains("needs a QMP socket"));
    }

    #[test]
    fn only_totals_can_be_had_from_outside() {
        let (_folder, process, _kvm) = guest_with_debugfs();
        let view = OutsideView::of(&process, None).expect("readable");
        assert!(view.slots().is_empty());
        let refused = view.set_dirty_log(SlotId(0), true).expect_err("not from outside");
        assert_eq!(refused.to_string(), NOT_FROM_OUTSIDE);
        for refused in
            [view.pause(), view.resume(), view.take_dirty_log(SlotId(0)).map(drop), view.page_table_roots().map(drop)]
        {
            assert!(refused.is_err());
        }
    }

    #[test]
    fn query_stats_has_all_three_or_none() {
        let figure = |name: &str, value: u64| json!({ "name": name, "value": value });
        let answer = json!([{ "provider": "kvm", "stats": [figure("pages_1g", 1), figure("pages_2m", 2), figure("pages_4k", 3)] }]);
        assert_eq!(of_query_stats(&answer), Some(MappingStats { pages_4k: 3, pages_2m: 2, pages_1g: 1 }));
        for wrong in [json!([]), json!({}), json!([{ "provider": "kvm", "stats": [figure("pages_2m", 2)] }])] {
            assert_eq!(of_query_stats(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn paging_is_what_the_module_says() {
        let (_folder, places) = fake_places();
        assert_eq!(paging(&places), Paging::Shadow);
        let amd = places.sys.join("module/kvm_amd/parameters");
        fs::create_dir_all(&amd).expect("the folder is new");
        fs::write(amd.join("npt"), "Y\n").expect("written");
        assert_eq!(paging(&places), Paging::Npt);
    }
}
