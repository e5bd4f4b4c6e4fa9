//! KVM's side of an external guest: only its totals by mapping size. Further questions to KVM need the VM's file
//! descriptor, which only the guest's own process has.
//!
//! | way | needs | costs | asked |
//! |---|---|---|---|
//! | QMP `query-stats` | a monitor of its own | 1 ms of QEMU's main loop | once a second, by the watcher |
//! | `/sys/kernel/debug/kvm/PID-FD` | root | nothing | by the caller |
//! | `virsh domstats --vm` | a libvirt domain | a process, 20 ms | every ten seconds, by the watcher |
//!
//! Callers never wait for another process: the loop and the views receive the latest answer, with its age where
//! that is more than it should be.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use wideleaf_memory::second_level::{PagingMode, SecondLevelError, Slot, SlotId};
use wideleaf_memory::{Paging, SecondLevel};
use wideleaf_policies::MappingStats;

use crate::monitor::Monitor;
use crate::places::Places;
use crate::process::VmProcess;
use crate::qmp::{QmpError, Question};
use crate::virsh::Virsh;

/// Age at which an answer expires.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// Beginning of the line that says what would provide the totals.
pub(crate) const NOT_KNOWN: &str = "KVM's mapping sizes are not known";

/// Tolerance for a thread that wakes early: a nearly expired answer is asked for again.
const SLACK: Duration = Duration::from_millis(100);

/// KVM's totals of one external guest; see the module.
#[derive(Debug)]
pub struct OutsideView {
    paging: Paging,
    source: Source,
    /// Locked for moments, never during a question.
    latest: Mutex<Latest>,
}

#[derive(Debug)]
struct Latest {
    /// The latest answer with its time; `None` before the first.
    stats: Option<(MappingStats, Instant)>,
    asked_at: Instant,
    /// Reason why no answer has come since.
    trouble: Option<String>,
}

type Answer = Result<MappingStats, SecondLevelError>;

/// Source of the totals.
struct Source {
    /// Interval between questions to another process; `None` for a file of the kernel, which each caller reads.
    every: Option<Duration>,
    ask: Box<dyn Fn() -> Answer + Send + Sync>,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("every", &self.every).finish_non_exhaustive()
    }
}

impl Source {
    fn monitor(monitor: Arc<Monitor>) -> Source {
        let ask = move || {
            let answer =
                monitor.with(|qmp| qmp.ask(Question::Mappings)).map_err(|error| failed("query-stats", error))?;
            of_query_stats(&answer.map_err(|refused| failed("query-stats", refused))?)
                .ok_or(SecondLevelError::NoSuchStatistic("pages_2m"))
        };
        Source { every: Some(Duration::from_secs(1)), ask: Box::new(ask) }
    }

    fn debugfs(folder: PathBuf) -> Source {
        Source { every: None, ask: Box::new(move || of_debugfs(&folder).map_err(|error| failed("debugfs", error))) }
    }

    fn virsh(virsh: Virsh, domain: String) -> Source {
        let ask = move || virsh.mappings(&domain).map_err(|error| failed("virsh domstats", error));
        Source { every: Some(Duration::from_secs(10)), ask: Box::new(ask) }
    }
}

impl OutsideView {
    /// The best source for this guest now; `Err`: what would provide one.
    ///
    /// # Errors
    /// One line: what would provide the totals.
    pub fn of(process: &VmProcess, monitor: Option<&Arc<Monitor>>) -> Result<OutsideView, String> {
        OutsideView::best(process, monitor).map_err(|why| needs(&why))
    }

    /// As [`OutsideView::of`], also where only the monitor can tell and does not answer now but may later.
    ///
    /// # Errors
    /// One line: what would provide the totals.
    pub fn now_or_later(process: &VmProcess, monitor: Option<&Arc<Monitor>>) -> Result<OutsideView, String> {
        OutsideView::best(process, monitor).or_else(|why| match (monitor, why.iter().find(|error| may_pass(error))) {
            (Some(monitor), Some(error)) => {
                let source = Source::monitor(Arc::clone(monitor));
                let latest = Latest { stats: None, asked_at: Instant::now(), trouble: Some(error.to_string()) };
                Ok(OutsideView { paging: paging(&process.places), source, latest: Mutex::new(latest) })
            }
            _ => Err(needs(&why)),
        })
    }

    fn best(process: &VmProcess, monitor: Option<&Arc<Monitor>>) -> Result<OutsideView, Vec<SecondLevelError>> {
        let monitor = monitor.map(|monitor| Source::monitor(Arc::clone(monitor)));
        let debugfs = || debugfs_folders(process).into_iter().map(Source::debugfs);
        let virsh = || process.domain.clone().map(|domain| Source::virsh(Virsh::default(), domain));
        let mut why = Vec::new();
        for source in monitor.into_iter().chain(debugfs()).chain(virsh()) {
            match OutsideView::over(source, paging(&process.places)) {
                Ok(view) => return Ok(view),
                Err(error) => why.push(error),
            }
        }
        Err(why)
    }

    fn over(source: Source, paging: Paging) -> Result<OutsideView, SecondLevelError> {
        let stats = (source.ask)()?;
        let now = Instant::now();
        let latest = Latest { stats: Some((stats, now)), asked_at: now, trouble: None };
        Ok(OutsideView { paging, source, latest: Mutex::new(latest) })
    }

    /// Interval at which [`OutsideView::refresh`] has to be called; `None`: never.
    pub fn refresh_every(&self) -> Option<Duration> {
        self.source.every
    }

    /// Asks again when it is time to, and waits for the answer: half a second for a monitor, two for virsh.
    pub fn refresh(&self) {
        let Some(every) = self.source.every else { return };
        if self.latest().asked_at.elapsed() + SLACK < every {
            return;
        }
        let answer = (self.source.ask)();
        let mut latest = self.latest();
        latest.asked_at = Instant::now();
        match answer {
            Ok(stats) => (latest.stats, latest.trouble) = (Some((stats, latest.asked_at)), None),
            Err(error) => latest.trouble = Some(error.to_string()),
        }
    }

    /// Reason why the totals are older than they should be, and their age.
    pub fn trouble(&self) -> Option<String> {
        let latest = self.latest();
        let told = match latest.stats.map(|(_, at)| at.elapsed()) {
            None => "are not known yet".to_owned(),
            Some(age) if age > KEPT_FOR => "are no longer known".to_owned(),
            Some(age) => format!("are {} s old", age.as_secs()),
        };
        latest.trouble.as_ref().map(|why| format!("KVM's mapping sizes {told}: {why}"))
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock()
    }
}

/// What would provide the totals, after these errors.
fn needs(why: &[SecondLevelError]) -> String {
    let why: Vec<String> = why.iter().map(ToString::to_string).collect();
    let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join("; ")) };
    format!("{NOT_KNOWN}{why}: needs a QMP socket of its own, root and a mounted debugfs, or virsh")
}

/// Whether the monitor gave no answer now, and may give one later.
fn may_pass(error: &SecondLevelError) -> bool {
    let SecondLevelError::Ioctl { source, .. } = error else { return false };
    source.get_ref().and_then(|inner| inner.downcast_ref::<QmpError>()).is_some_and(QmpError::may_pass)
}

fn failed(what: &'static str, error: impl std::error::Error + Send + Sync + 'static) -> SecondLevelError {
    SecondLevelError::Ioctl { what, source: io::Error::other(error) }
}

const NOT_FROM_OUTSIDE: &str = "only the guest's own VMM can ask KVM for this";

impl SecondLevel for OutsideView {
    fn paging(&self) -> Paging {
        self.paging
    }

    fn mapping_stats(&self) -> Answer {
        if self.source.every.is_none() {
            return (self.source.ask)();
        }
        match self.latest().stats {
            None => Err(SecondLevelError::WrongState("KVM's totals are not known yet")),
            Some((_, at)) if at.elapsed() > KEPT_FOR => {
                Err(SecondLevelError::WrongState("KVM's totals were not available for a minute"))
            }
            Some((stats, _)) => Ok(stats),
        }
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

    fn paging_modes(&self) -> Result<Vec<PagingMode>, SecondLevelError> {
        Err(SecondLevelError::WrongState(NOT_FROM_OUTSIDE))
    }
}

/// Parses `[{"provider": "kvm", "stats": [{"name": "pages_2m", "value": 64}, …]}]`.
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

/// Kind of second-level tables of this host's KVM: two dimensions where the module reports it, else one folded table.
pub(crate) fn paging(places: &Places) -> Paging {
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
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::places::tests::fake_places;
    use crate::process::tests::add_process;
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
    fn a_caller_never_waits_for_the_source_and_learns_the_age_of_the_answer() {
        let totals = |pages_2m| MappingStats { pages_4k: 0, pages_2m, pages_1g: 0 };
        let (answer, answers) = std::sync::mpsc::channel::<Answer>();
        let answers = Mutex::new(answers);
        let ask = move || answers.lock().recv().expect("the test answers");
        let source = Source { every: Some(Duration::ZERO), ask: Box::new(ask) };
        answer.send(Ok(totals(1))).expect("heard");
        let view = OutsideView::over(source, Paging::Shadow).expect("it has answered");
        std::thread::scope(|scope| {
            let refreshed = scope.spawn(|| view.refresh());
            // No answer has come yet, and none will come before this assertion.
            assert_eq!((view.mapping_stats().expect("of before"), view.trouble()), (totals(1), None));
            answer.send(Err(SecondLevelError::NoSuchStatistic("pages_2m"))).expect("heard");
            refreshed.join().expect("it does not panic");
        });
        assert_eq!(view.mapping_stats().expect("of before"), totals(1));
        assert!(view.trouble().expect("it was refused").starts_with("KVM's mapping sizes are 0 s old: "));
        let long_ago = Instant::now().checked_sub(2 * KEPT_FOR).expect("the clock has run for longer");
        view.latest().stats = Some((totals(1), long_ago));
        assert!(view.mapping_stats().is_err() && view.trouble().expect("still").contains("no longer known"));
        answer.send(Ok(totals(2))).expect("heard");
        view.refresh();
        assert_eq!((view.mapping_stats().expect("anew"), view.trouble()), (totals(2), None));
    }

    /// Answers each question of each client as KVM's statistics.
    fn serve(listener: &UnixListener) {
        let figure = |name: &str, value: u64| json!({ "name": name, "value": value });
        let stats = [figure("pages_1g", 0), figure("pages_2m", 2), figure("pages_4k", 0)];
        let answer = json!({ "return": [{ "provider": "kvm", "stats": stats }] });
        for stream in listener.incoming() {
            let stream = stream.expect("a client");
            let say = |text: &str| writeln!(&stream, "{text}").is_ok();
            let mut heard = BufReader::new(&stream).lines().map_while(Result::ok);
            let greets = say(r#"{"QMP": {}}"#) && heard.next().is_some() && say(r#"{"return": {}}"#);
            while greets && heard.next().is_some() && say(&answer.to_string()) {}
        }
    }

    #[test]
    fn totals_of_a_monitor_that_is_silent_at_first_are_known_once_it_answers() {
        let (folder, places) = fake_places();
        let pid = std::process::id();
        add_process(&places, pid, &["qemu-system-x86_64"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, pid).expect("it is there").expect("it is a VM");
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("the socket is new");
        let monitor = Arc::new(Monitor::now_or_later(&process, &path).expect("it may answer later"));
        let view = OutsideView::now_or_later(&process, Some(&monitor)).expect("it may answer later");
        assert!(view.mapping_stats().is_err());
        assert!(view.trouble().expect("no answer").starts_with("KVM's mapping sizes are not known yet: "));
        assert!(OutsideView::of(&process, Some(&monitor)).is_err(), "a survey asks once");
        // The process ends with this thread in it.
        std::thread::spawn(move || serve(&listener));
        while view.mapping_stats().is_err() {
            view.latest().asked_at = Instant::now().checked_sub(KEPT_FOR).expect("the clock has run for longer");
            view.refresh();
        }
        assert_eq!((view.mapping_stats().expect("known").pages_2m, view.trouble()), (2, None));
    }

    #[test]
    fn only_totals_are_available_from_outside() {
        let (_folder, process, _kvm) = guest_with_debugfs();
        let view = OutsideView::of(&process, None).expect("readable");
        assert!(view.slots().is_empty());
        let refused = view.set_dirty_log(SlotId(0), true).expect_err("not from outside");
        assert_eq!(refused.to_string(), NOT_FROM_OUTSIDE);
        for refused in
            [view.pause(), view.resume(), view.take_dirty_log(SlotId(0)).map(drop), view.paging_modes().map(drop)]
        {
            assert!(refused.is_err());
        }
    }

    #[test]
    fn query_stats_has_all_three_or_none() {
        let figure = |name: &str, value: u64| json!({ "name": name, "value": value });
        let answer = json!([{
            "provider": "kvm",
            "stats": [figure("pages_1g", 1), figure("pages_2m", 2), figure("pages_4k", 3)],
        }]);
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
