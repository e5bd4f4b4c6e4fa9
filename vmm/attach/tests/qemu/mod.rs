//! Real QEMU on KVM with the guest image at work, a monitor in a temporary folder, and no trace left at the end.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use wideleaf_attach::find;
use wideleaf_attach::process::{Places, VmProcess};

/// Whether the tests here can run. Says why not, or fails where `WIDELEAF_REQUIRE` names what is missing.
pub fn can_run() -> bool {
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    let has = |name: &str, is_there: bool| {
        let is_required = required.split(',').any(|word| word.trim() == name);
        assert!(is_there || !is_required, "{name} is not usable, and WIDELEAF_REQUIRE names it");
        if !is_there {
            eprintln!("skipped: {name} is not usable; WIDELEAF_REQUIRE={name} makes this a failure");
        }
        is_there
    };
    let version =
        Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    has("qemu", version.is_ok()) && has("kvm", kvm.is_ok())
}

/// A guest, ended when this is dropped.
pub struct Guest {
    child: Child,
    folder: tempfile::TempDir,
}

impl Guest {
    /// Starts QEMU with `arguments` and the guest walking over 64 MiB for as long as it lives, on base pages where
    /// the host leaves that to the process.
    pub fn start(arguments: &[&str]) -> Guest {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let image = folder.path().join("guest.elf");
        wideleaf_guest_image::write_to(&image).expect("the image is written");
        let socket = format!("unix:{},server=on,wait=off", folder.path().join("qmp").display());
        let child = Command::new("qemu-system-x86_64")
            // QEMU 7.2 reads ARCH_CAPABILITIES from KVM and then may not set it on some AMD hosts.
            .args([
                "-accel",
                "kvm",
                "-cpu",
                "host,arch-capabilities=off",
                "-nodefaults",
                "-no-user-config",
                "-no-reboot",
            ])
            .args(["-display", "none", "-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-qmp", &socket])
            .args(["-serial", &format!("file:{}", folder.path().join("console").display())])
            .args(["-append", "pattern bytes=64M seconds=600", "-kernel"])
            .arg(&image)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("QEMU starts");
        let guest = Guest { child, folder };
        eventually("its monitor", || guest.qmp().exists());
        guest
    }

    /// Its monitor.
    pub fn qmp(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }

    /// What it has printed.
    pub fn console(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("console")).unwrap_or_default()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its process, with a VM.
    pub fn process(&self) -> VmProcess {
        let mut found = None;
        eventually("its VM", || {
            found = find::with_pid(&Places::default(), self.pid()).ok();
            found.is_some()
        });
        found.expect("just found")
    }

    /// Ends it.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits for something that is sure to come; a machine that compiles on all cores meanwhile needs some time.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    const WITHIN: Duration = Duration::from_secs(60);
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WITHIN, "{what}: not within {WITHIN:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
