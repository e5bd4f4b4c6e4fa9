//! Real QEMU guests, as [`wideleaf_testing`] starts them, from this crate's view.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use wideleaf_attach::find;
use wideleaf_attach::{Places, VmProcess};
use wideleaf_testing::qemu_guest::{QEMU, QemuGuest};
use wideleaf_testing::{Need, has_kvm, is_there};

/// Work of the guest: it walks over 64 MiB for as long as it lives.
pub const WORK: &str = "pattern bytes=64M seconds=600";

/// Whether the tests here can run. Prints why not, or fails where `WIDELEAF_REQUIRE` names what is missing.
pub fn can_run() -> bool {
    let qemu = std::process::Command::new(QEMU).arg("--version").output();
    is_there(Need::Qemu, qemu.map(drop).map_err(|error| format!("{QEMU}: {error}"))) && has_kvm()
}

/// A guest that ends when this is dropped.
pub struct Guest(QemuGuest);

impl Guest {
    /// Starts QEMU with `arguments` and the guest at its work; `more` extends the guest's own command line.
    pub fn start(arguments: &[&str], more: &str) -> Guest {
        Guest::with_kernel(arguments, &format!("{WORK} {more}"))
    }

    /// As [`Guest::start`], with another work.
    pub fn with_kernel(arguments: &[&str], kernel: &str) -> Guest {
        let guest = Guest(QemuGuest::start_as(arguments, kernel, false).expect("QEMU starts"));
        eventually("its monitor", || listens(&guest.qmp()));
        guest
    }

    /// The process of the guest, with a VM.
    pub fn process(&self) -> VmProcess {
        let mut found = None;
        eventually("its VM", || {
            found = find::with_pid(&Places::default(), self.pid()).ok();
            found.is_some()
        });
        found.expect("just found")
    }

    /// Lines that the guest has printed.
    pub fn console(&self) -> String {
        self.said().lines.join("\n")
    }
}

impl std::ops::Deref for Guest {
    type Target = QemuGuest;

    fn deref(&self) -> &QemuGuest {
        &self.0
    }
}

impl std::ops::DerefMut for Guest {
    fn deref_mut(&mut self) -> &mut QemuGuest {
        &mut self.0
    }
}

/// Whether a program accepts connections on this Unix socket: its file is there before. A connection would be the only
/// one that a monitor serves.
pub fn listens(socket: &Path) -> bool {
    // Flags of a socket that listens: __SO_ACCEPTCON (include/linux/net.h).
    const ACCEPTS: &str = "00010000";
    let (sockets, path) = (fs::read_to_string("/proc/net/unix").expect("it is there"), socket.display().to_string());
    sockets.lines().any(|line| line.split_whitespace().nth(3) == Some(ACCEPTS) && line.ends_with(&path))
}

/// Waits for something that is sure to come. A machine that compiles on all cores at the same time needs some
/// time for it.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    const WITHIN: Duration = Duration::from_secs(60);
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WITHIN, "{what}: not within {WITHIN:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
