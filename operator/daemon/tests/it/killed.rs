//! Managers that are killed at random moments, over and over, under a guest that checks its memory: daemons, and
//! `wideleaf attach --foreground`.
//!
//! Other tests change the machine's settings meanwhile. So a manager sees copies of them, which only it can change:
//!
//! ```text
//!   /sys/kernel/mm/{transparent_hugepage,hugepages} ──▶ copies in a folder ─┬─▶ mounted in the manager's namespace
//!   /sys/devices/system/node/*/hugepages                                    └─▶ compared when all managers are killed
//! ```

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::place::{Daemon, Place, eventually};
use crate::wideleafd::has_qemu;
use nix::sys::signal::Signal;
use wideleaf_attach::find;
use wideleaf_attach::survey::Survey;
use wideleaf_attach::{Places, VmProcess};
use wideleaf_control::client::ask;
use wideleaf_control::protocol::{Request, Settings, Target};
use wideleaf_memory::host::process::ProcessHost;
use wideleaf_memory::host::{Advice, Host};
use wideleaf_policies::units::{kib, mib};
use wideleaf_policies::{Hva, PageSize};
use wideleaf_testing::programs::wideleaf;
use wideleaf_testing::qemu_guest::{QemuGuest, QemuRam, QemuSetup};
use wideleaf_testing::{Need, has_kvm, is_there};

/// Number of managers that are killed if `MINUTES` is not set.
const KILLS: u32 = 12;

/// A manager has begun to collapse windows after this time.
const KILLED_WITHIN_MS: u32 = 400;

/// `MINUTES=60 cargo test -p wideleaf-daemon --test it killed::` kills managers for an hour. Such a run is alone, and
/// compares the machine's own settings too.
#[test]
fn managers_that_are_killed_at_random_leave_the_guest_and_the_settings_as_they_were() {
    if !has_kvm() || !is_there(Need::Qemu, has_qemu()) {
        return;
    }
    let (program, copies) = (wideleaf(), Copies::make());
    let minutes = env::var("MINUTES").ok().map(|minutes| minutes.parse::<u64>().unwrap());
    let until = minutes.map(|minutes| Instant::now() + Duration::from_secs(minutes * 60));
    let setup = QemuSetup::new("killed", mib(128), QemuRam::Anonymous, "pattern bytes=64M seconds=36000");
    let mut guest = QemuGuest::start(&setup).unwrap();
    guest.check_all_words();
    let process = find::with_pid(&Places::default(), guest.pid()).unwrap();
    let (place, before, mut kills) = (Place::new(), settings(Path::new("/")), 0);
    while until.map_or(kills < KILLS, |until| Instant::now() < until) {
        split_all_of(&process);
        match kills % 2 {
            0 => assert!(!managing_daemon(&place, copies.as_ref(), guest.pid()).end(Signal::SIGKILL).success()),
            _ => {
                let mut attach = managing_attach(&program, copies.as_ref(), guest.pid());
                attach.kill().unwrap();
                attach.wait().unwrap();
            }
        }
        kills += 1;
    }
    guest.check_all_words();
    if let Some(copies) = &copies {
        assert_eq!(settings(copies.folder.path()), copies.before);
    }
    assert!(until.is_none() || settings(Path::new("/")) == before, "{before:?}");
    let daemon = place.start();
    eventually("the guest is managed again, and on huge pages", || {
        daemon.managed().first().and_then(|vm| vm.backing).is_some_and(|backing| backing.huge_2m >= mib(64).get())
    });
    assert!(daemon.end(Signal::SIGTERM).success());
    guest.check_all_words();
    println!("{kills} managers were killed; the guest reported {} passes", guest.said().marks.len());
}

/// A daemon that has managed the guest for a random time.
fn managing_daemon<'a>(place: &'a Place, copies: Option<&Copies>, guest: u32) -> Daemon<'a> {
    let mut command = copies.map_or_else(|| place.command(), |copies| copies.seen_by(&place.command()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let daemon = Daemon { place, child: command.spawn().unwrap() };
    eventually("the daemon answers", || ask(&place.socket(), Request::Daemon).is_ok());
    let settings = Settings { policy: Some("greedy".into()), ..Settings::default() };
    // From the second daemon on it may be managed already.
    let _ = ask(&place.socket(), Request::Attach { target: Target::Pid(guest), settings });
    thread::sleep(at_random());
    daemon
}

/// `wideleaf attach --foreground` that has managed the guest for a random time.
fn managing_attach(program: &Path, copies: Option<&Copies>, guest: u32) -> Child {
    let mut attach = Command::new(program);
    attach.args(["attach", &guest.to_string(), "--foreground", "--policy=greedy"]);
    let mut command = match copies {
        Some(copies) => copies.seen_by(&attach),
        None => attach,
    };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut managed = String::new();
    // Its first line is that it manages the guest, or why it does not.
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut managed).unwrap();
    thread::sleep(at_random());
    assert_eq!(child.try_wait().unwrap(), None, "{managed}");
    child
}

fn at_random() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_micros();
    Duration::from_millis(u64::from(now % KILLED_WITHIN_MS))
}

/// Splits all huge pages of the guest, so that the next daemon has work.
fn split_all_of(process: &VmProcess) {
    let host = ProcessHost::open(process.pid).unwrap();
    for piece in Survey::take(process, None).view().ram {
        for start in (piece.hva..piece.hva + piece.bytes).step_by(PageSize::Huge2M.bytes().as_usize()) {
            host.advise(Hva::new(start), kib(4), Advice::Cold).unwrap();
        }
    }
}

/// Folders with settings that a manager could leave changed: THP, khugepaged, the pools of the host and of its nodes.
fn folders() -> Vec<PathBuf> {
    let nodes = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    let of_nodes = nodes.map(|node| node.path().join("hugepages")).filter(|folder| folder.is_dir());
    let of_host = ["/sys/kernel/mm/transparent_hugepage", "/sys/kernel/mm/hugepages"].map(PathBuf::from);
    of_host.into_iter().chain(of_nodes).collect()
}

/// All settings below a root, and the number of kdamonds: text by path. Pools include their free and surplus pages.
fn settings(root: &Path) -> BTreeMap<PathBuf, String> {
    const KDAMONDS: &str = "/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds";
    /// Counters of khugepaged, and the folder of those of each size.
    const COUNTERS: [&str; 3] = ["pages_collapsed", "full_scans", "stats"];
    let (mut all, mut left) = (BTreeMap::new(), folders());
    left.push(KDAMONDS.into());
    left.iter_mut().for_each(|path| *path = root.join(path.strip_prefix("/").unwrap()));
    while let Some(path) = left.pop() {
        if COUNTERS.iter().any(|counter| path.ends_with(counter)) {
            continue;
        }
        if let Ok(entries) = fs::read_dir(&path) {
            left.extend(entries.map(|entry| entry.unwrap().path()));
        } else if let Ok(text) = fs::read_to_string(&path) {
            all.insert(path, text);
        }
    }
    all
}

/// Copies of the settings, which managers see in the place of the machine's own.
struct Copies {
    folder: tempfile::TempDir,
    before: BTreeMap<PathBuf, String>,
}

impl Copies {
    /// `None` where this user cannot mount them.
    fn make() -> Option<Copies> {
        let mounts = Command::new("unshare").args(["--mount", "true"]).stderr(Stdio::null()).status();
        if !mounts.is_ok_and(|status| status.success()) {
            println!("the settings are not compared: unshare --mount fails");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in settings(Path::new("/")) {
            let copy = folder.path().join(path.strip_prefix("/").unwrap());
            fs::create_dir_all(copy.parent().unwrap()).unwrap();
            fs::write(copy, text).unwrap();
        }
        let before = settings(folder.path());
        assert!(before.keys().any(|path| path.ends_with("hugepages-2048kB/free_hugepages")), "{before:?}");
        Some(Copies { folder, before })
    }

    /// The same command with the copies, in a namespace of its own.
    fn seen_by(&self, command: &Command) -> Command {
        let mount = |folder: &PathBuf| {
            let copy = self.folder.path().join(folder.strip_prefix("/").unwrap());
            format!("mount --bind {} {} && ", copy.display(), folder.display())
        };
        let mounts: String = folders().iter().map(mount).collect();
        let mut seeing = Command::new("unshare");
        seeing.args(["--mount", "sh", "-c", &format!("{mounts}exec \"$0\" \"$@\"")]);
        seeing.arg(command.get_program()).args(command.get_args()).env_remove("NOTIFY_SOCKET");
        seeing
    }
}
