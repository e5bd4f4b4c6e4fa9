//! Other ways to back a guest's RAM with large pages on the same host. They run with the same image, command line and
//! memory as wideleaf, for comparison.
//!
//! ```text
//!   Guest: kernel, parameters, memory ─┬─▶ wideleaf run … --policy P              ours
//!                                      ├─▶ wideleaf run … --host-page 2m          THP at first touch, then khugepaged
//!                                      ├─▶ wideleaf run … --backing hugetlb       a pool, from the start
//!                                      └─▶ qemu-system-x86_64 -M microvm …        THP and hugetlb in QEMU
//! ```

use serde::{Deserialize, Serialize};

use crate::definition::{Arm, Cell, HostFacts, Job, KhugepagedSettings, Work};

/// Name of the QEMU program.
pub const QEMU: &str = "qemu-system-x86_64";
/// CPU model for QEMU. QEMU 7.2 reads `ARCH_CAPABILITIES` from KVM, and on some AMD hosts it then may not set it.
const QEMU_CPU: &str = "host,arch-capabilities=off";
/// Path of the image in a command that is shown to the user.
const IMAGE_SHOWN: &str = "guest.elf";
/// Additional time from start to first line of a QEMU guest compared to wideleaf, guessed, in seconds.
const QEMU_START_S: f64 = 1.0;

/// A guest of the built-in image.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Guest {
    /// Name of the kernel, as `wideleaf run` takes it.
    pub kernel: String,
    /// Parameters of the kernel, including the class.
    pub cmdline: String,
    /// RAM of the guest in MiB.
    pub memory_mib: u64,
    /// Number of processors.
    pub vcpus: u8,
}

/// Backing of a QEMU guest's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum QemuRam {
    /// `memory-backend-ram` with QEMU's advice MADV_HUGEPAGE: huge pages at first touch and by khugepaged.
    Thp,
    /// `memory-backend-memfd` on 2 MiB pages of the hugetlb pool, all allocated before the guest runs.
    Hugetlb,
}

impl QemuRam {
    fn object(self) -> &'static str {
        match self {
            QemuRam::Thp => "memory-backend-ram",
            QemuRam::Hugetlb => "memory-backend-memfd,hugetlb=on,hugetlbsize=2M,prealloc=on",
        }
    }
}

impl Guest {
    /// A guest with one processor.
    pub fn new(kernel: &str, cmdline: &str, memory_mib: u64) -> Guest {
        Guest { kernel: kernel.into(), cmdline: cmdline.into(), memory_mib, vcpus: 1 }
    }

    /// A job that runs this guest in `wideleaf run`, with more arguments at the end. No daemon of
    /// the host takes part.
    pub fn run(&self, more: &[&str], seconds_guess: f64) -> Job {
        let arguments = self.arguments();
        let own: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Job::run(&[&own, more, &["--no-daemon"]].concat(), seconds_guess)
    }

    /// Arguments for `wideleaf run`.
    pub fn arguments(&self) -> Vec<String> {
        let (memory, vcpus) = (format!("{}M", self.memory_mib), self.vcpus.to_string());
        let vcpus = if self.vcpus == 1 { vec![] } else { vec!["--vcpus", &vcpus] };
        let cmdline = if self.cmdline.is_empty() { vec![] } else { vec!["--cmdline", &self.cmdline] };
        let all = [vec![&*self.kernel, "--memory", &memory], vcpus, cmdline].concat();
        all.into_iter().map(str::to_owned).collect()
    }

    /// Arguments for QEMU.
    pub fn qemu_arguments(&self, ram: QemuRam, image: &str) -> Vec<String> {
        let Guest { kernel, cmdline, memory_mib, vcpus } = self;
        let (memory, vcpus) = (format!("{memory_mib}M"), vcpus.to_string());
        let object = format!("{},id=ram0,size={memory}", ram.object());
        let line = format!("kernel={kernel} guest_pages=2m {cmdline}");
        let machine = ["-M", "microvm,memory-backend=ram0", "-accel", "kvm", "-cpu", QEMU_CPU, "-m", &memory];
        let ram = ["-object", &object, "-smp", &vcpus, "-nodefaults", "-no-user-config", "-no-reboot"];
        let console = ["-display", "none", "-serial", "stdio", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"];
        let what = ["-append", line.trim_end(), "-kernel", image];
        [&machine[..], &ram, &console, &what].concat().into_iter().map(str::to_owned).collect()
    }

    /// QEMU command line as a user would type it.
    pub(crate) fn qemu_command(&self, ram: QemuRam) -> String {
        format!("{QEMU} {}", crate::definition::typed(&self.qemu_arguments(ram, IMAGE_SHOWN)))
    }

    fn qemu(&self, ram: QemuRam, seconds_guess: f64) -> Job {
        let work = Work::Qemu { guest: self.clone(), ram };
        Job::of(work, seconds_guess + QEMU_START_S)
    }

    /// Number of 2 MiB pages in the guest's RAM.
    pub fn pages_2m(&self) -> u64 {
        self.memory_mib.div_ceil(2)
    }
}

/// Another way to large pages, without our manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Host THP with khugepaged at Linux's defaults.
    Thp,
    /// Host THP with khugepaged at its fastest.
    ThpTuned,
    /// Pages of the hugetlb pool.
    Hugetlb,
    /// QEMU on THP.
    QemuThp,
    /// QEMU on the hugetlb pool.
    QemuHugetlb,
}

impl Peer {
    /// All peers, in the order of tables.
    pub const ALL: [Peer; 5] = [Peer::Thp, Peer::ThpTuned, Peer::Hugetlb, Peer::QemuThp, Peer::QemuHugetlb];

    /// Arm of this peer.
    pub fn arm(self) -> Arm {
        let (name, summary) = match self {
            Peer::Thp => ("host THP", "no manager; MADV_HUGEPAGE on all RAM, khugepaged at Linux's defaults"),
            Peer::ThpTuned => ("host THP, tuned", "as host THP, khugepaged without pause; its CPU counts as manager's"),
            Peer::Hugetlb => ("hugetlb", "no manager; pages of the hugetlb pool, reserved on the host beforehand"),
            Peer::QemuThp => ("QEMU THP", "QEMU's microvm with the same image on memory-backend-ram"),
            Peer::QemuHugetlb => ("QEMU hugetlb", "as QEMU THP, on memory-backend-memfd,hugetlb=on,prealloc=on"),
        };
        Arm { name: name.into(), summary: summary.into() }
    }

    /// Cell of this peer in a case; absent if the host cannot run it.
    pub fn cell(self, guest: &Guest, seconds_guess: f64, host: &HostFacts) -> Cell {
        if let Some(why) = self.why_not(host) {
            return Cell::Absent(why);
        }
        let thp = || guest.run(&["--host-page", "2m", "--policy", "never"], seconds_guess);
        Cell::of(match self {
            Peer::Thp => thp().with_khugepaged(KhugepagedSettings::DEFAULTS),
            Peer::ThpTuned => thp().with_khugepaged(KhugepagedSettings::FASTEST),
            Peer::Hugetlb => {
                guest.run(&["--backing", "hugetlb", "--policy", "never"], seconds_guess).with_pool(guest.pages_2m())
            }
            Peer::QemuThp => guest.qemu(QemuRam::Thp, seconds_guess),
            Peer::QemuHugetlb => guest.qemu(QemuRam::Hugetlb, seconds_guess).with_pool(guest.pages_2m()),
        })
    }

    fn why_not(self, host: &HostFacts) -> Option<String> {
        let needs_root = matches!(self, Peer::Thp | Peer::ThpTuned) && !host.is_root;
        let needs_qemu = matches!(self, Peer::QemuThp | Peer::QemuHugetlb) && !host.has_qemu;
        let needs_pool = matches!(self, Peer::Hugetlb | Peer::QemuHugetlb);
        (host.why_no_kvm.clone())
            .or_else(|| needs_root.then(|| "needs root, to change khugepaged's settings".to_owned()))
            .or_else(|| needs_qemu.then(|| format!("{QEMU} is not installed")))
            .or_else(|| host.why_no_pool_2m.clone().filter(|_| needs_pool))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostFacts {
        HostFacts { memory_available_mib: 16 << 10, ..HostFacts::of_a_test() }
    }

    fn absent(host: &HostFacts) -> Vec<(Peer, String)> {
        let guest = Guest::new("gups", "log2_words=25", 512);
        let why = |peer: Peer| match peer.cell(&guest, 1.0, host) {
            Cell::Absent(why) => Some((peer, why)),
            Cell::Job(_) => None,
        };
        Peer::ALL.into_iter().filter_map(why).collect()
    }

    #[test]
    fn a_peer_that_the_host_lacks_is_absent_with_the_reason_and_the_other_peers_run() {
        assert_eq!(absent(&host()), []);
        let no_qemu = HostFacts { has_qemu: false, ..host() };
        let why = format!("{QEMU} is not installed");
        assert_eq!(absent(&no_qemu), [(Peer::QemuThp, why.clone()), (Peer::QemuHugetlb, why)]);
        let user = HostFacts { is_root: false, why_no_pool_2m: Some("only root".into()), ..host() };
        assert_eq!(
            absent(&user).iter().map(|(peer, _)| *peer).collect::<Vec<_>>(),
            [Peer::Thp, Peer::ThpTuned, Peer::Hugetlb, Peer::QemuHugetlb]
        );
        let no_kvm = HostFacts { why_no_kvm: Some("no /dev/kvm".into()), ..host() };
        assert_eq!(absent(&no_kvm).len(), Peer::ALL.len());
    }

    #[test]
    fn qemu_has_the_same_kernel_parameters_and_memory() {
        let guest = Guest::new("npb.cg", "class=A", 128);
        let command = guest.qemu_command(QemuRam::Hugetlb);
        for part in [
            "-append 'kernel=npb.cg guest_pages=2m class=A'",
            "-object memory-backend-memfd,hugetlb=on,hugetlbsize=2M,prealloc=on,id=ram0,size=128M",
            "-kernel guest.elf",
        ] {
            assert!(command.contains(part), "no {part} in {command}");
        }
        assert_eq!(guest.arguments().join(" "), "npb.cg --memory 128M --cmdline class=A");
    }

    #[test]
    fn the_pool_has_a_page_for_each_2_mib_of_ram() {
        let Cell::Job(job) = Peer::Hugetlb.cell(&Guest::new("gups", "", 511), 1.0, &host()) else { panic!("a job") };
        assert_eq!(job.host.pool_pages_2m, 256);
    }
}
