//! A QEMU of an experiment with two monitors: one for the experiment, one for wideleafd. It ends with its [`Machine`],
//! and its files are in a temporary folder that goes with the run.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::prctl::set_thp_disable;
use wideleaf::child;
use wideleaf_experiments::disturbance::{DisturbedGuests, PromotionOwner};
use wideleaf_experiments::peers::QEMU;
use wideleaf_run::failure::Failure;
use wideleaf_run::interrupts::Interrupts;
use wideleaf_run::undo::TemporaryFolder;

use super::guest_messages::GuestMessages;
use super::monitor::Monitor;

/// A monitor that does not answer within this time never will.
const LISTENS_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// File that the guest's image is written to.
const IMAGE: &str = "guest.elf";

/// Folder with the guest's image, the sockets and the saved guests of one run.
#[derive(Debug)]
pub(in crate::experiment::jobs) struct Place(TemporaryFolder);

impl Place {
    /// Makes the folder and writes the image.
    ///
    /// # Errors
    /// [`Failure::Host`] if one of them cannot be written.
    pub(in crate::experiment::jobs) fn make() -> Result<Place, Failure> {
        let place = Place(TemporaryFolder::new().map_err(|error| cannot("make a temporary folder", &error))?);
        wideleaf_guest_image::write_to(&place.path(IMAGE))
            .map_err(|error| cannot("write the guest's image", &error))?;
        Ok(place)
    }

    /// Path of a file in it, which QEMU may name without the folder.
    pub(in crate::experiment::jobs) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

pub(in crate::experiment::jobs) fn cannot(what: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::Host(format!("cannot {what}: {error}"))
}

/// A running QEMU. Dropping it ends it.
#[derive(Debug)]
pub(in crate::experiment::jobs) struct Machine {
    child: Child,
    /// When it was started.
    pub(in crate::experiment::jobs) began: Instant,
    console: Receiver<(Instant, String)>,
    /// The experiment's monitor.
    pub(in crate::experiment::jobs) monitor: Monitor,
    words: PathBuf,
    for_daemon: PathBuf,
}

impl Machine {
    /// Starts QEMU under a name that no other one of this place has, and waits until its monitor answers. With
    /// `incoming`, it waits for a guest instead of starting one.
    ///
    /// # Errors
    /// [`Failure::Host`] with QEMU's own words, if it ends before.
    pub(in crate::experiment::jobs) fn start(
        place: &Place,
        work: &DisturbedGuests,
        name: &str,
        incoming: Option<&str>,
        interrupts: &Interrupts,
    ) -> Result<Machine, Failure> {
        let files = ["qmp", "daemon", "words"].map(|end| place.path(&format!("{name}.{end}")));
        let [socket, for_daemon, words] = files;
        let file = File::create(&words).map_err(|error| cannot("make a temporary file", &error))?;
        let mut command = child::that_ends_with_us(Path::new(QEMU));
        command.args(work.guest.qemu_arguments(work.ram, IMAGE)).args(["-name", name]);
        for socket in [&socket, &for_daemon] {
            let end = socket.file_name().unwrap_or_default().to_string_lossy();
            command.args(["-qmp", &format!("unix:{end},server=on,wait=off")]);
        }
        command.args(incoming.iter().flat_map(|uri| ["-incoming", uri]));
        // Sockets and saved guests are named without their folder: a path may be long, or need a shell's quotes.
        command.current_dir(place.0.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let began = Instant::now();
        let denied =
            (work.keeper == PromotionOwner::KernelWithoutHugePages).then(WithoutHugePages::begin).transpose()?;
        let mut child = KilledOnDrop(Some(command.spawn().map_err(|error| cannot("start QEMU", &error))?));
        drop(denied);
        loop {
            interrupts.check()?;
            match Monitor::connect(&socket) {
                Ok(monitor) => {
                    let mut child = child.0.take().expect("it is taken once");
                    let console = super::super::qemu::listen(child.stdout.take().expect("a pipe was asked for"));
                    return Ok(Machine { child, began, console, monitor, words, for_daemon });
                }
                Err(error) if began.elapsed() > LISTENS_WITHIN => {
                    return Err(cannot("use QEMU: its monitor does not answer", &error));
                }
                Err(_) => {}
            }
            if let Some(status) = child.has_ended()? {
                return Err(ended(status, &words));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Id of the process.
    pub(in crate::experiment::jobs) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Path of the monitor that has no client.
    pub(in crate::experiment::jobs) fn monitor_for_daemon(&self) -> &Path {
        &self.for_daemon
    }

    /// Lets the guest's lines be heard that have arrived.
    pub(in crate::experiment::jobs) fn tell(&self, said: &mut GuestMessages) {
        self.console.try_iter().for_each(|(at, line)| said.hear(at, &line));
    }

    /// Checks that QEMU runs, or that its guest has said that it ends.
    ///
    /// # Errors
    /// [`Failure::Host`] with QEMU's own words.
    pub(in crate::experiment::jobs) fn check(&mut self, said: &mut GuestMessages) -> Result<(), Failure> {
        let Some(status) = self.child.try_wait().map_err(|error| cannot("wait for QEMU", &error))? else {
            return Ok(());
        };
        // Its last lines may still be on their way; the listener ends with the console.
        self.console.iter().for_each(|(at, line)| said.hear(at, &line));
        if said.is_over() { Ok(()) } else { Err(ended(status, &self.words)) }
    }

    /// Ends QEMU and hears the last of its lines.
    pub(in crate::experiment::jobs) fn end(mut self, said: &mut GuestMessages) {
        self.kill();
        self.console.iter().for_each(|(at, line)| said.hear(at, &line));
    }

    fn kill(&mut self) {
        // It has ended, or is no longer wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A child that is killed when this is dropped: its monitor never answered.
struct KilledOnDrop(Option<Child>);

impl KilledOnDrop {
    fn has_ended(&mut self) -> Result<Option<ExitStatus>, Failure> {
        let child = self.0.as_mut().expect("it was not taken yet");
        child.try_wait().map_err(|error| cannot("wait for QEMU", &error))
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Failure of a QEMU that ended too early, with the last line of its error output.
fn ended(status: ExitStatus, words: &Path) -> Failure {
    let words = fs::read_to_string(words).unwrap_or_default();
    let last = words.trim().lines().last().map(str::to_owned);
    let why = last.unwrap_or_else(|| match status.signal() {
        Some(signal) => format!("signal {signal} ended it"),
        None => format!("it ended with {status} and printed nothing"),
    });
    Failure::Host(format!("cannot keep {QEMU} running: {why}"))
}

/// This process without huge pages of THP, while a child is started: the child inherits that and keeps it through
/// `execve` (`PR_SET_THP_DISABLE`, prctl(2)).
struct WithoutHugePages;

impl WithoutHugePages {
    fn begin() -> Result<WithoutHugePages, Failure> {
        set_thp_disable(true).map_err(|errno| cannot("deny QEMU huge pages by PR_SET_THP_DISABLE", &errno))?;
        Ok(WithoutHugePages)
    }
}

impl Drop for WithoutHugePages {
    fn drop(&mut self) {
        // The kernel that took the setting takes it back; without it this program alone has no huge pages.
        let _ = set_thp_disable(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_started_without_huge_pages_and_this_process_has_them_again() {
        let denied = WithoutHugePages::begin().expect("Linux has it");
        // The words of proc_pid_status(5).
        let of_child = std::process::Command::new("grep").args(["THP_enabled", "/proc/self/status"]).output();
        drop(denied);
        assert_eq!(String::from_utf8_lossy(&of_child.expect("grep").stdout), "THP_enabled:\t0\n");
        assert!(fs::read_to_string("/proc/self/status").expect("it is mounted").contains("THP_enabled:\t1"));
    }

    #[test]
    fn a_qemu_that_ended_is_told_in_its_last_words() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let words = folder.path().join("words");
        fs::write(&words, "a warning\nqemu: no such machine\n").expect("written");
        let why = ended(ExitStatus::from_raw(1 << 8), &words).to_string();
        assert_eq!(why, format!("cannot keep {QEMU} running: qemu: no such machine"));
        fs::write(&words, "").expect("written");
        assert!(ended(ExitStatus::from_raw(9), &words).to_string().ends_with("signal 9 ended it"));
    }
}
