//! A real libvirtd with real QEMU guests, for one test, which leaves nothing behind.
//!
//! ```text
//!   test ── standard input ──▶ unshare (mounts, processes, network) ──▶ sh libvirt.sh: virtlogd, libvirtd, QEMU …
//!     │                                                                      ▲
//!     └── nsenter: virsh, wideleaf, wideleafd ───────────────────────────────┘
//!   the test ends or dies: standard input ends, the shell ends, and with it every process and mount of its
//!   namespaces; if the test did not reach its end, the shell first gives back the pages added to the pool
//! ```
//!
//! The test and the processes inside share two folders: [`Libvirt::run_folder`] is `/run/wideleaf` there, and
//! [`IMAGES`] holds the guest image and the guests' consoles.

use std::fs::{self, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tempfile::TempDir;

use crate::qemu_guest::base_pages_library;
use crate::{Need, is_there};

/// Folder in which libvirt keeps images, inside.
pub const IMAGES: &str = "/var/lib/libvirt/images";

const SCRIPT: &str = include_str!("libvirt.sh");
/// All programs that are started here; libvirt-daemon-system brings the daemons, libvirt-clients virsh, util-linux
/// the rest.
const PROGRAMS: [&str; 6] = ["libvirtd", "virtlogd", "virsh", "qemu-system-x86_64", "unshare", "nsenter"];
/// Firmware qboot: a guest is up in a tenth of a second, instead of SeaBIOS's two.
const FIRMWARE: &str = "/usr/share/qemu/bios-microvm.bin";
/// Time limit of a start. The first one probes all of QEMU's capabilities, which took 8 to 13 s.
const START_MAX: Duration = Duration::from_secs(90);
/// Time limit of each command inside, as an argument of `timeout`.
const COMMAND_SECONDS: &str = "90";

/// Serialises libvirts: guests are large and cores are few.
static TURN: Mutex<()> = Mutex::new(());

/// A running libvirtd, until this is dropped.
pub struct Libvirt {
    unshare: Child,
    /// Process id outside of the first process inside.
    inside: String,
    folder: TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Libvirt {
    /// Starts a libvirtd; `None` if the test is to be skipped. `cache` keeps libvirt's findings about QEMU.
    ///
    /// # Panics
    /// Panics if all needs are met and it still does not start.
    pub fn start(cache: &Path) -> Option<Libvirt> {
        if !is_there(Need::Libvirt, what_is_missing().map_or(Ok(()), Err)) {
            return None;
        }
        let turn = TURN.lock();
        let folder = tempfile::tempdir().expect("a temporary folder");
        for name in ["run", "images"] {
            fs::create_dir(folder.path().join(name)).expect("a folder");
            // QEMU runs as another user.
            fs::set_permissions(folder.path().join(name), Permissions::from_mode(0o755)).expect("a mode");
        }
        let cache = cache.join("libvirt");
        fs::create_dir_all(&cache).expect("a folder");
        wideleaf_guest_image::write_to(&folder.path().join("images/guest.elf")).expect("the image is written");
        let mut unshare = Command::new("unshare")
            .args(["--mount", "--pid", "--mount-proc", "--net", "--fork", "--kill-child"])
            .args(["sh", "-c", SCRIPT, "sh"])
            .args([folder.path(), &cache])
            .stdin(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        let inside = first_child(&mut unshare);
        let libvirt = Libvirt { unshare, inside, folder, _turn: turn };
        libvirt.wait_until_it_answers();
        Some(libvirt)
    }

    /// Runs a command inside.
    ///
    /// # Panics
    /// Panics if it cannot be started.
    pub fn run(&self, command: &[&str]) -> Output {
        let output = self.command(command).stdin(Stdio::null()).output();
        output.expect("timeout starts")
    }

    /// A command inside, not yet started. It is ended after a minute and a half.
    pub fn command(&self, command: &[&str]) -> Command {
        let mut inside = Command::new("timeout");
        inside.args([COMMAND_SECONDS, "nsenter", "--target", &self.inside, "--mount", "--pid", "--net", "--"]);
        inside.args(command);
        inside
    }

    /// Runs `virsh` and returns its output, or its error message.
    ///
    /// # Errors
    /// The error message of `virsh`.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String, String> {
        let output = self.run(&[&["virsh", "--connect", "qemu:///system", "--quiet"], arguments].concat());
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// Defines a domain.
    ///
    /// # Panics
    /// Panics if libvirt rejects it.
    pub fn define(&self, domain: &Domain<'_>) {
        let images = self.folder.path().join("images");
        let library = domain.is_on_base_pages.then(|| base_pages_library(&images).expect("a C compiler"));
        let library = library.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
        let file = format!("{}.xml", domain.name);
        fs::write(images.join(&file), domain.xml(library)).expect("a file");
        self.virsh(&["define", &format!("{IMAGES}/{file}")]).expect("libvirt accepts the domain");
    }

    /// Ends libvirtd and starts it again. Guests live on.
    ///
    /// # Panics
    /// Panics if it does not come back.
    pub fn restart_libvirtd(&self) {
        let script =
            "pid=$(cat /run/libvirtd.pid) && kill $pid && while [ -d /proc/$pid ]; do sleep 0.05; done && libvirtd -d";
        let output = self.run(&["sh", "-c", script]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.wait_until_it_answers();
    }

    /// Kills libvirtd outright and starts it again. Guests live on.
    ///
    /// # Panics
    /// Panics if it does not come back.
    pub fn kill_libvirtd(&self) {
        let script = "pid=$(cat /run/libvirtd.pid) && kill -9 $pid && \
            while [ -d /proc/$pid ]; do sleep 0.05; done && libvirtd -d";
        let output = self.run(&["sh", "-c", script]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.wait_until_it_answers();
    }

    /// Folder that is `/run/wideleaf` inside.
    pub fn run_folder(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// Process id inside of a running domain.
    ///
    /// # Panics
    /// Panics if the domain does not run.
    pub fn pid(&self, domain: &str) -> u32 {
        let output = self.run(&["cat", &format!("/run/libvirt/qemu/{domain}.pid")]);
        String::from_utf8_lossy(&output.stdout).trim().parse().expect("a domain that runs")
    }

    /// Console output of a guest.
    pub fn console(&self, domain: &str) -> String {
        let path = self.folder.path().join(format!("images/{domain}.log"));
        fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Waits until `is_so`.
    ///
    /// # Panics
    /// Panics after the time limit, with `what` in the message.
    pub fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + START_MAX;
        while !is_so() {
            assert!(Instant::now() < deadline, "not within {START_MAX:?}: {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn wait_until_it_answers(&self) {
        self.wait_until("libvirtd answers", || self.virsh(&["version"]).is_ok());
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // Without this word, the shell inside gives back what a daemon has added to the pool.
        if let (Some(mut stdin), false) = (self.unshare.stdin.take(), std::thread::panicking()) {
            let _ = stdin.write_all(b"done");
        }
        // It ends when its first process has ended, which is after all others have been killed.
        let deadline = Instant::now() + START_MAX;
        while matches!(self.unshare.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        // A process inside may wait in the kernel for ever. Its namespaces are killed with `unshare`.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// Reason why there can be no libvirt here, if there is one.
fn what_is_missing() -> Option<String> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let is_installed = |program: &&str| std::env::split_paths(&paths).any(|folder| folder.join(program).is_file());
    if let Some(program) = PROGRAMS.iter().find(|program| !is_installed(program)) {
        return Some(format!("{program} is not installed (guest-tests/install-tools)"));
    }
    if !Path::new(FIRMWARE).exists() {
        return Some(format!("{FIRMWARE} is not installed"));
    }
    let is_root = fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0);
    (!is_root).then(|| "only root can start a libvirtd in its own namespaces".to_owned())
}

/// The process that `unshare` starts in its namespaces.
fn first_child(unshare: &mut Child) -> String {
    let children = format!("/proc/{0}/task/{0}/children", unshare.id());
    let deadline = Instant::now() + START_MAX;
    loop {
        let text = fs::read_to_string(&children).unwrap_or_default();
        if let Some(child) = text.split_whitespace().next() {
            return child.to_owned();
        }
        let ended = unshare.try_wait().expect("our own child");
        assert!(ended.is_none() && Instant::now() < deadline, "unshare: {ended:?}, no child in {children}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A domain that runs the guest image.
#[derive(Clone, Copy, Debug)]
pub struct Domain<'a> {
    /// Name of the domain.
    pub name: &'a str,
    /// Size of RAM in MiB.
    pub memory_mib: u64,
    /// Attributes of its `<wideleaf:memory>`.
    pub metadata: &'a str,
    /// Elements in its `<memoryBacking>`.
    pub backing: &'a str,
    /// Command line of the guest image.
    pub cmdline: &'a str,
    /// Whether QEMU is kept from asking for huge pages for it.
    pub is_on_base_pages: bool,
}

impl Domain<'_> {
    /// A domain with 128 MiB of ordinary memory, 32 of them checked and rewritten for longer than any test takes.
    pub const PATTERN: Domain<'static> = Domain {
        name: "pattern",
        memory_mib: 128,
        metadata: "",
        backing: "",
        cmdline: "kernel=pattern bytes=32M passes=1000000",
        is_on_base_pages: false,
    };

    /// XML for `virsh define`; on KVM if available, and with a library among the images preloaded into QEMU.
    fn xml(&self, library: Option<&str>) -> String {
        let Domain { name, memory_mib, metadata, backing, cmdline, .. } = self;
        let preload = library.map_or_else(String::new, |library| {
            let set = format!("<qemu:env name='LD_PRELOAD' value='{IMAGES}/{library}'/>");
            format!(
                "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>{set}</qemu:commandline>"
            )
        });
        let (kind, cpu) = if Path::new("/dev/kvm").exists() {
            // A feature that QEMU reports and KVM does not have on AMD.
            let without = "<feature policy='disable' name='arch-capabilities'/>";
            ("kvm", format!("<cpu mode='host-passthrough'>{without}</cpu>"))
        } else {
            ("qemu", "<cpu mode='maximum'/>".to_owned())
        };
        format!(
            "<domain type='{kind}'>
               <name>{name}</name>
               <metadata><wideleaf:memory xmlns:wideleaf='urn:wideleaf:memory:1' {metadata}/></metadata>
               <memory unit='MiB'>{memory_mib}</memory>
               <memoryBacking>{backing}</memoryBacking>
               <os>
                 <type arch='x86_64' machine='q35'>hvm</type>
                 <loader readonly='yes' type='rom'>{FIRMWARE}</loader>
                 <kernel>{IMAGES}/guest.elf</kernel>
                 <cmdline>{cmdline}</cmdline>
               </os>
               {cpu}
               <on_reboot>destroy</on_reboot>
               <devices>
                 <serial type='file'><source path='{IMAGES}/{name}.log'/></serial>
                 <memballoon model='none'/>
               </devices>
               {preload}
             </domain>"
        )
    }
}
