//! Specification of a run: plain values, with which nothing has been opened or changed yet.

use std::path::PathBuf;
use std::time::Duration;

use wideleaf_kernels::Kernel;
use wideleaf_kernels::npb::classes::Class;
use wideleaf_kernels::registry::{MemoryNeed, by_name};
use wideleaf_memory::BackingConfig;
use wideleaf_policies::{Bytes, PageSize, PolicyChoice};
use wideleaf_vmm::devices::virtio::block::DiskOptions;
use wideleaf_vmm::devices::virtio::net::Mac;
use wideleaf_vmm::run_loop::OnReset;
use wideleaf_vmm::sandbox::User;

use crate::kernel;

/// Kernel or image to run.
#[derive(Clone, Debug)]
pub enum Workload {
    /// A built-in kernel, in the embedded guest image or natively.
    Kernel(&'static str),
    /// A file: an ELF image with a PVH entry, a bzImage or a vmlinux.
    Image(PathBuf),
}

/// A run with checked arguments.
#[derive(Clone, Debug)]
pub struct RunSpec {
    /// Kernel or image to run.
    pub workload: Workload,
    /// Whether it runs in this process instead of in a guest.
    pub is_native: bool,
    /// Command line of the guest or kernel.
    pub cmdline: String,
    /// File with the initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Devices of the guest.
    pub devices: DeviceSpec,
    /// Size of guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs, or of threads of a native kernel.
    pub vcpus: u8,
    /// Memory that backs guest RAM.
    pub backing: BackingConfig,
    /// Page size of the guest's tables.
    pub guest_page: PageSize,
    /// Policy of the manager.
    pub policy: PolicyChoice,
    /// Delay before the policy may act.
    pub policy_delay: Option<Duration>,
    /// Whether all RAM is faulted in first.
    pub is_prefaulted: bool,
    /// Action when the pool is too small.
    pub fallback: Fallback,
    /// File that records what the manager observes, plans and does.
    pub record: Option<PathBuf>,
    /// Time after which the guest is stopped.
    pub timeout: Option<Duration>,
    /// Action when the guest resets its machine.
    pub on_reset: OnReset,
    /// Place of the guest's serial console.
    pub console: Console,
    /// Socket of the wideleafd that the guest registers with, if it listens; `None`: no registration.
    pub daemon: Option<PathBuf>,
    /// Control socket of the VM itself.
    pub control_socket: Option<PathBuf>,
    /// Permanent restrictions of the guest's process while it runs. They apply to all else that this process would do.
    pub sandbox: Option<SandboxSpec>,
}

/// Place of the guest's serial console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// The front end's console, byte by byte.
    Bytes,
    /// The front end's lines, for all lines that are no results of a kernel.
    Lines,
    /// No console output at all.
    Nothing,
}

/// Action when the hugetlb pool is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The run is refused.
    Fail,
    /// Anonymous memory that starts with transparent huge pages.
    Thp,
}

/// Devices that a guest has.
#[derive(Clone, Debug, Default)]
pub struct DeviceSpec {
    /// Disks, in the order in which the guest finds them.
    pub disks: Vec<DiskOptions>,
    /// Network cards, in the order in which the guest finds them.
    pub cards: Vec<NetOptions>,
    /// Sockets between guest and host.
    pub vsock: Option<VsockOptions>,
    /// Balloon, with the size that it takes of the guest's RAM at first.
    pub balloon: Option<Bytes>,
    /// Whether there is a source of random bytes.
    pub has_rng: bool,
}

/// Settings of a network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// Name of the tap.
    pub tap: String,
    /// Address of the card, if it is not derived from names.
    pub mac: Option<Mac>,
}

/// Settings of the sockets between guest and host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockOptions {
    /// Context id (address) of the guest.
    pub cid: u32,
    /// Socket that programs of the host connect to.
    pub socket: PathBuf,
}

/// Settings of a run's sandbox.
#[derive(Clone, Debug, Default)]
pub struct SandboxSpec {
    /// User to become.
    pub user: Option<User>,
    /// Folder that becomes the root directory.
    pub jail: Option<PathBuf>,
    /// Whether the run is refused if this host's kernel lacks a part.
    pub must_be_complete: bool,
    /// Folder of the result: files can be made nowhere else.
    pub output_folder: Option<PathBuf>,
}

impl RunSpec {
    /// The guest's whole command line: first the part for the image, then the user's.
    pub fn guest_cmdline(&self) -> String {
        match self.workload {
            Workload::Kernel(name) => kernel::line(name, &self.cmdline),
            Workload::Image(_) => self.cmdline.clone(),
        }
    }

    fn kernel(&self) -> Option<&'static Kernel> {
        match self.workload {
            Workload::Kernel(name) => by_name(name),
            Workload::Image(_) => None,
        }
    }

    /// Class of the problem; `None` if the workload has no classes.
    pub fn class(&self) -> Option<Class> {
        kernel::class_of(self.kernel()?, &self.cmdline)
    }

    /// RAM that the kernel needs, in bytes; `None` for an image, and for a kernel that uses all RAM.
    pub fn memory_needed_bytes(&self) -> Option<u64> {
        match kernel::memory_needed(self.kernel()?, &self.cmdline, self.vcpus) {
            Ok(MemoryNeed::Bytes(bytes)) => Some(bytes),
            Ok(MemoryNeed::AllThereIs) | Err(_) => None,
        }
    }

    /// Name of the kernel, or path of the image.
    pub fn workload_name(&self) -> String {
        match &self.workload {
            Workload::Kernel(name) => (*name).to_owned(),
            Workload::Image(path) => path.display().to_string(),
        }
    }
}
