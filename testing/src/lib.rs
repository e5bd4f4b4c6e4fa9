//! Support for tests that need more than a compiler: they ask for a need, and skip with a reason if it is absent.
//! Also a guest that notices every lost word, and a policy that asks for random actions.

pub mod c_program;
pub mod chaos;
pub mod holdings;
pub mod json;
pub mod libvirt;
pub mod paths;
pub mod pattern_guest;
pub mod programs;
pub mod qemu_guest;
pub mod scratch;
pub mod slow_disk;
pub mod stand_in_vmm;
pub mod stuck_process;
pub mod swaps;
pub mod tiny_guest;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use wideleaf_memory::giant_maker::make_in;
use wideleaf_memory::pool::{HugetlbPools, PoolLease, PoolStatus};
use wideleaf_memory::side_mapping::GiantFile;
use wideleaf_policies::PageSize;

/// A feature of the machine that a test may need; the names of `WIDELEAF_REQUIRE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A usable `/dev/kvm`.
    Kvm,
    /// A free page of 1 GiB in the hugetlb pool, or the right and the memory to make one.
    Hugetlb1G,
    /// Room for pages of 2 MiB in the hugetlb pool, or the right and the memory to make it.
    Hugetlb,
    /// Debian's tools for building and unpacking a package.
    Dpkg,
    /// The labs: QEMU or Bochs, and a Debian kernel for them.
    Lab,
    /// libvirt's daemons, and root to start them in namespaces of their own.
    Libvirt,
    /// `/dev/fuse`, and root to mount a file system of the test's own.
    Fuse,
    /// QEMU, and the labs' kernel for it.
    Qemu,
    /// The kernel's taps, and root to create a network namespace for them.
    Tap,
    /// A kernel that moves pages of anonymous memory, and permits it.
    UffdMove,
    /// A kernel that reports minor faults of memfd and hugetlb memory, and permits it.
    UffdMinor,
    /// A userfaultfd that sees the kernel's own faults.
    Userfaultfd,
    /// A kernel on which a window can be swapped: it moves pages, and frees the empty page table on the way (Linux
    /// 6.14).
    Swap,
    /// A kernel that moves pages and keeps empty page tables, so that promotion falls back to collapse.
    NoSwap,
    /// A host with several NUMA nodes that have memory.
    Nodes,
    /// `tar`, `gzip`, `jq` and `strip`, which make a container image.
    Image,
    /// Prometheus' `promtool`.
    Promtool,
    /// Ansible, and root to give it a root file system of its own.
    Ansible,
    /// The control plane of Kubernetes that `fleet/build` has built.
    Fleet,
}

impl Need {
    const fn name(self) -> &'static str {
        match self {
            Need::Kvm => "kvm",
            Need::Hugetlb1G => "hugetlb1g",
            Need::Hugetlb => "hugetlb",
            Need::Dpkg => "dpkg",
            Need::Lab => "lab",
            Need::Libvirt => "libvirt",
            Need::Fuse => "fuse",
            Need::Qemu => "qemu",
            Need::Tap => "tap",
            Need::UffdMove => "uffd_move",
            Need::UffdMinor => "uffd_minor",
            Need::Userfaultfd => "userfaultfd",
            Need::Swap => "swap",
            Need::NoSwap => "no_swap",
            Need::Nodes => "nodes",
            Need::Image => "image",
            Need::Promtool => "promtool",
            Need::Ansible => "ansible",
            Need::Fleet => "fleet",
        }
    }
}

/// Whether the test can run: `found` confirms it, or gives the reason why not, which is printed.
/// `WIDELEAF_REQUIRE`, a list of needs separated by commas, turns the skip into a failure.
///
/// # Panics
/// Panics if the need is required and absent.
pub fn is_there(need: Need, found: Result<(), String>) -> bool {
    let Err(why) = found else { return true };
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    let name = need.name();
    assert!(
        !required.split(',').any(|word| word == name),
        "WIDELEAF_REQUIRE={required}, but there is no {name}: {why}"
    );
    println!("skipped, no {name}: {why}");
    false
}

/// The number in this environment variable, if it is set.
///
/// # Panics
/// Panics if its value is not a number.
pub fn number_from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Duration of a guest that runs the kernel `pattern`, as a word of its command line: a number of seconds, by the time
/// stamp counter. An emulated counter may count instructions, of which a second has too few for the manager's work. In
/// that case `WIDELEAF_PATTERN_PASSES` sets the number of passes instead.
pub fn pattern_lasts(seconds: u64) -> String {
    match number_from_environment("WIDELEAF_PATTERN_PASSES") {
        Some(passes) => format!("passes={passes}"),
        None => format!("seconds={seconds}"),
    }
}

/// Kernels of the labs; `guest-tests/lab/README.md` says which test runs on which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabKernel {
    /// Keeps empty page tables: promotion is by collapse.
    V6_12,
    /// The newest of the Debian suite: promotion is by swap.
    Newest,
}

impl LabKernel {
    /// Name of the kernel for `lab --kernel`, and of its folder in the cache.
    pub const fn name(self) -> &'static str {
        match self {
            LabKernel::V6_12 => "6.12",
            LabKernel::Newest => "newest",
        }
    }

    fn folder(self) -> PathBuf {
        lab_cache().join("kernels").join(self.name())
    }

    /// Path of the kernel, an ELF file, once it is prepared.
    pub fn elf(self) -> PathBuf {
        self.folder().join("vmlinux")
    }

    /// Folder with the files that Linux guests inside the labs boot: `vmlinuz`, this kernel as packaged; the drivers
    /// of virtio devices, numbered in load order; and `tun.ko`, for their host.
    pub fn guest(self) -> PathBuf {
        self.folder().join("guest")
    }

    /// Prepares the NPT lab with this kernel, or returns the reason why it is not available here.
    ///
    /// # Errors
    /// The reason why it is not available.
    pub fn prepare(self) -> Result<(), String> {
        prepare(&["npt", "--kernel", self.name()])
    }
}

/// Prepares the images that guests inside the labs boot beside the lab's own kernel, or returns the reason why they
/// are not available here.
///
/// # Errors
/// The reason why they are not available.
pub fn prepare_images() -> Result<(), String> {
    prepare(&["images"])
}

fn prepare(what: &[&str]) -> Result<(), String> {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-tests/lab/lab");
    let prepared = Command::new(lab).arg("prepare").args(what).stdin(Stdio::null()).output();
    let prepared = prepared.map_err(|error| error.to_string())?;
    let why = String::from_utf8_lossy(&prepared.stderr).trim().to_owned();
    if prepared.status.success() { Ok(()) } else { Err(why) }
}

/// Folder with other images for guests inside the labs, as packaged by Debian: `vmlinuz-6.1` and
/// `memtest86+x64.bin`.
pub fn lab_images() -> PathBuf {
    lab_cache().join("images")
}

fn lab_cache() -> PathBuf {
    let ours = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/lab");
    std::env::var_os("WIDELEAF_LAB_CACHE").map_or_else(ours, PathBuf::from)
}

/// Whether `/dev/kvm` can be opened for reading and writing.
pub fn has_kvm() -> bool {
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    is_there(Need::Kvm, kvm.map(drop).map_err(|error| format!("/dev/kvm: {error}")))
}

/// A giant page in this machine's pool that a test may use while this lives.
pub struct GiantPage {
    pools: HugetlbPools,
    before: PoolStatus,
    _lease: Option<PoolLease>,
    _turn: std::fs::File,
}

/// The pool of giant pages while this lives, for a test in which the program makes pages itself.
pub struct GiantPool {
    pools: HugetlbPools,
    before: PoolStatus,
    _turn: std::fs::File,
}

impl GiantPool {
    /// The pool without a free page; `None` if the test is to be skipped: there is no such pool, it has a free page,
    /// or this user or this host's memory does not allow to make one.
    pub fn without_a_page() -> Option<GiantPool> {
        let turn = turn_at_the_giants();
        let pools = HugetlbPools::of_this_machine();
        let found = turn.and_then(|turn| {
            let before = pools.status(PageSize::Giant1G).map_err(|error| error.to_string())?;
            if before.available() > 0 {
                return Err("the pool has a free page of 1 GiB, so that no run makes one".to_owned());
            }
            // Whether this kernel can: the page goes back at once.
            let file = GiantFile::of_pool().map_err(|error| error.to_string())?;
            make_in(&pools, &file, None).map_err(|error| error.to_string())?;
            Ok((turn, before))
        });
        match found {
            Ok((_turn, before)) => Some(GiantPool { pools, before, _turn }),
            Err(why) => {
                println!("skipped: {why}");
                None
            }
        }
    }

    /// Waits until the pool is as before: the kernel frees a killed process's memory after its end.
    ///
    /// # Panics
    /// Panics if it is not within 30 seconds.
    pub fn assert_given_back(&self) {
        let is_as_before = || self.pools.status(PageSize::Giant1G).ok().as_ref() == Some(&self.before);
        for _ in 0..300 {
            if is_as_before() && !self.pools.has_unfinished(PageSize::Giant1G) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        panic!("before: {:?}, now: {:?}", self.before, self.pools.status(PageSize::Giant1G));
    }
}

/// Lock of the tests that use its pages: each checks whether the pool is as before.
const GIANT_POOL: &str = "/sys/kernel/mm/hugepages/hugepages-1048576kB";

/// A test's turn at the pool of giant pages, until the file is dropped: for a test that takes pages by other means than
/// [`GiantPage`].
///
/// # Errors
/// The machine has no such pool.
pub fn turn_at_the_giants() -> Result<std::fs::File, String> {
    let turn = std::fs::File::open(GIANT_POOL).and_then(|folder| folder.lock().map(|()| folder));
    turn.map_err(|error| format!("{GIANT_POOL}: {error}"))
}

impl GiantPage {
    /// A page that is free, or one that is added to the pool; `None` if the test is to be skipped. The kernel may
    /// have to move a gibibyte of memory for it, so call it while no guest waits.
    pub fn of_this_machine() -> Option<GiantPage> {
        let pools = HugetlbPools::of_this_machine();
        let turn = turn_at_the_giants();
        let lease = match pools.check(PageSize::Giant1G, PageSize::Giant1G.bytes()) {
            Ok(()) => Ok(None),
            Err(_) => pools.lease(PageSize::Giant1G, 1).map(Some).map_err(|error| error.to_string()),
        };
        let status = pools.status(PageSize::Giant1G).map_err(|error| error.to_string());
        let found = turn.and_then(|turn| Ok((turn, lease?, status?)));
        let has_page = found.as_ref().map(|_| ()).map_err(Clone::clone);
        is_there(Need::Hugetlb1G, has_page).then_some(())?;
        let (turn, lease, before) = found.ok()?;
        Some(GiantPage { pools, before, _lease: lease, _turn: turn })
    }

    /// The pools of this machine.
    pub fn pools(&self) -> &HugetlbPools {
        &self.pools
    }

    /// # Panics
    /// Panics if the pool has changed: the page is still in use, or the pool has another size.
    pub fn assert_given_back(&self) {
        assert_eq!(self.pools.status(PageSize::Giant1G).ok().as_ref(), Some(&self.before), "the pool is as it was");
    }
}
