//! Other ways to back a guest's RAM with large pages on the same host. They run with the same image, command line and
//! memory as wideleaf, for comparison.
//!
//! ```text
//!   Guest: kernel, parameters, memory ─┬─▶ wideleaf run … --policy P              ours
//!                                      ├─▶ wideleaf run … --host-page 2m          THP at first touch, then khugepaged
//!                                      ├─▶ wideleaf run … --backing hugetlb       a pool, from the start
//!                                      └─▶ qemu-system-x86_64 -M microvm …        THP and hugetlb in QEMU
//! ```

use crate::definition::{Arm, Cell, HostFacts, Job, KhugepagedSettings, Work};

pub use crate::guest::{Guest, QEMU, QemuRam};

/// Additional time from start to first line of a QEMU guest compared to wideleaf, guessed, in seconds.
const QEMU_START_S: f64 = 1.0;

impl Guest {
    /// A job that runs this guest in `wideleaf run`, with more arguments at the end. No daemon of
    /// the host takes part.
    pub fn run(&self, more: &[&str], seconds_guess: f64) -> Job {
        let arguments = self.arguments();
        let own: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Job::run(&[&own, more, &["--no-daemon"]].concat(), seconds_guess)
    }

    fn qemu(&self, ram: QemuRam, seconds_guess: f64) -> Job {
        let work = Work::Qemu { guest: self.clone(), ram };
        Job::of(work, seconds_guess + QEMU_START_S)
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
    fn the_pool_has_a_page_for_each_2_mib_of_ram() {
        let Cell::Job(job) = Peer::Hugetlb.cell(&Guest::new("gups", "", 511), 1.0, &host()) else { panic!("a job") };
        assert_eq!(job.host.pool_pages_2m, 256);
    }
}
