//! The configuration of a VM, validated: a built configuration cannot contradict itself.
//!
//! [`VmOptions`] holds the caller's requests. [`VmConfig::new`] is the only way from there, and refuses with numbers
//! and a remedy.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use wideleaf_memory::{BackingConfig, BackingKind};
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, CpuList, GpaRange, PageSize};
use wideleaf_protocol::VCPUS_MAX;

use crate::cells::{self, CellsError, GuestCell};
use crate::kvm::memslot;
use crate::run_loop::OnReset;
use crate::x86::layout::{self, CMDLINE_BYTES_MAX, MEMORY_MAX, MEMORY_MIN};

/// The source of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    /// A file of the host.
    File(PathBuf),
    /// Bytes in this program: the embedded guest image, or a test's.
    Bytes(Cow<'static, [u8]>),
}

impl fmt::Display for ImageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageSource::File(path) => write!(f, "{}", path.display()),
            ImageSource::Bytes(_) => f.write_str("(built in)"),
        }
    }
}

/// The entry of an image that is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EntryChoice {
    /// The best entry of the image: direct, then PVH, then Linux's.
    #[default]
    Best,
    /// The PVH entry, also where there is a direct one.
    Pvh,
}

/// The VM that the caller requests, unchecked.
#[derive(Clone, Debug)]
pub struct VmOptions {
    /// Size of guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Page size of the tables that a directly started guest receives. Guests that build their own
    /// tables ignore it.
    pub guest_page: PageSize,
    /// Backing of guest RAM.
    pub backing: BackingConfig,
    /// Image to boot.
    pub image: ImageSource,
    /// Entry of the image.
    pub entry: EntryChoice,
    /// The guest's command line.
    pub cmdline: String,
    /// Linux's initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Size of the memslots; `None` uses the default ([`memslot::default_slot_bytes`]).
    pub slot_bytes: Option<Bytes>,
    /// Effect of a machine reset.
    pub on_reset: OnReset,
    /// NUMA cells that the guest sees, in the order of their numbers; empty: its machine has no nodes.
    pub cells: Vec<GuestCell>,
    /// CPUs of the host on which each vCPU may run, by vCPU; a vCPU without a list, or with an empty one, may run on
    /// all that the process may.
    pub vcpu_cpus: Vec<CpuList>,
}

impl VmOptions {
    /// One vCPU, 512 MiB, 2 MiB guest pages: defaults for tests and for callers that change single fields.
    pub fn new(image: ImageSource, backing: BackingConfig) -> VmOptions {
        VmOptions {
            memory: mib(512),
            vcpus: 1,
            guest_page: PageSize::Huge2M,
            backing,
            image,
            entry: EntryChoice::Best,
            cmdline: String::new(),
            initrd: None,
            slot_bytes: None,
            on_reset: OnReset::Stop,
            cells: Vec::new(),
            vcpu_cpus: Vec::new(),
        }
    }
}

/// Upper limits of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostLimits {
    /// All memory of the host; `None` where the host does not report it.
    pub memory_total: Option<Bytes>,
}

impl HostLimits {
    /// Reads the limits of the host from its `/proc`, at the path `proc`. A missing value is no limit.
    pub fn read(proc: &Path) -> HostLimits {
        let meminfo = std::fs::read_to_string(proc.join("meminfo")).unwrap_or_default();
        HostLimits { memory_total: parse_memory_total(&meminfo) }
    }

    /// No limits, for tests of everything else.
    pub const fn none() -> HostLimits {
        HostLimits { memory_total: None }
    }
}

fn parse_memory_total(meminfo: &str) -> Option<Bytes> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).map(Bytes::new)
}

/// The reasons why a VM configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Too little RAM for a guest's tables.
    #[error("{memory} of RAM is too little: use at least {MEMORY_MIN}, for instance --memory 512M")]
    TooLittleMemory {
        /// Requested size of RAM.
        memory: Bytes,
    },
    /// RAM ends inside a page.
    #[error("{memory} of RAM is not a whole number of {page} {side} pages: use {}", one_or_both(*down, *up))]
    NotWholePages {
        /// Requested size of RAM.
        memory: Bytes,
        /// Size of the page.
        page: PageSize,
        /// Owner of the page: "host" or "guest".
        side: &'static str,
        /// Next smaller size that works; zero where none works.
        down: Bytes,
        /// Next larger size that works.
        up: Bytes,
    },
    /// The RAM has more bytes than an x86 CPU can address.
    #[error("{memory} of RAM is more than x86-64 can address ({MEMORY_MAX}): use less --memory")]
    BeyondArchitecture {
        /// Requested size of RAM.
        memory: Bytes,
    },
    /// The RAM is larger than the host's.
    #[error("{memory} of RAM is more than the host's {host}: use less --memory")]
    MoreThanHost {
        /// Requested size of RAM.
        memory: Bytes,
        /// Memory of the host.
        host: Bytes,
    },
    /// No vCPU, or too many.
    #[error("cannot run {vcpus} vCPUs: use 1 to {VCPUS_MAX}")]
    Vcpus {
        /// Requested number of vCPUs.
        vcpus: u32,
    },
    /// The borders of memslots would cut pages.
    #[error(
        "cannot use memslots of {slot}: KVM maps no {page} pages across their borders; use a multiple of {granule}"
    )]
    SlotCutsPages {
        /// Requested size of a memslot.
        slot: Bytes,
        /// Required granule of the size.
        granule: Bytes,
        /// Size of the pages that would be cut.
        page: PageSize,
    },
    /// The cells do not describe the VM.
    #[error("cannot use these cells (--numa): {0}")]
    Cells(#[from] CellsError),
    /// The command line does not fit.
    #[error(
        "cannot pass a command line of {bytes} bytes: the guest takes at most {} bytes; shorten --cmdline",
        CMDLINE_BYTES_MAX - 1
    )]
    CmdlineTooLong {
        /// Length of the command line, in bytes.
        bytes: usize,
    },
    /// A zero byte would end the command line early.
    #[error("cannot pass the command line: the guest would take the zero byte at {at} as its end")]
    CmdlineHasZero {
        /// Position of the zero byte.
        at: usize,
    },
}

fn one_or_both(down: Bytes, up: Bytes) -> String {
    if down == Bytes::ZERO { up.to_string() } else { format!("{down} or {up}") }
}

/// A VM that can be built: the validated configuration.
#[derive(Clone, Debug)]
pub struct VmConfig {
    options: VmOptions,
    slot_bytes: Bytes,
}

impl VmConfig {
    /// Validates `options` on a host with these limits.
    ///
    /// # Errors
    /// [`ConfigError`], the first that applies.
    pub fn new(options: VmOptions, host: &HostLimits) -> Result<VmConfig, ConfigError> {
        let pages = [(options.backing.granule(), "host"), (options.guest_page, "guest")];
        check_memory(options.memory, &pages, host)?;
        if options.vcpus == 0 || options.vcpus as usize > VCPUS_MAX {
            return Err(ConfigError::Vcpus { vcpus: options.vcpus });
        }
        cells::check(&options.cells, options.memory, options.backing.granule(), options.vcpus)?;
        let slot_bytes = check_slot(&options)?;
        check_cmdline(&options.cmdline)?;
        Ok(VmConfig { options, slot_bytes })
    }

    /// Size of guest RAM.
    pub fn memory(&self) -> Bytes {
        self.options.memory
    }

    /// Places of RAM: `[0, 3 GiB)` and from 4 GiB up, as [`wideleaf_memory::GuestRam::map`] takes them.
    pub fn ram_layout(&self) -> Vec<GpaRange> {
        layout::ram_ranges(self.options.memory)
    }

    /// NUMA cells that the guest sees.
    pub fn cells(&self) -> &[GuestCell] {
        &self.options.cells
    }

    /// CPUs of the host on which a vCPU may run; empty for all.
    pub fn cpus_of(&self, vcpu: u32) -> CpuList {
        self.options.vcpu_cpus.get(vcpu as usize).cloned().unwrap_or_default()
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> u32 {
        self.options.vcpus
    }

    /// Effect of a machine reset.
    pub fn on_reset(&self) -> OnReset {
        self.options.on_reset
    }

    /// Page size of a directly started guest.
    pub fn guest_page(&self) -> PageSize {
        self.options.guest_page
    }

    /// Backing of guest RAM.
    pub fn backing(&self) -> BackingConfig {
        self.options.backing
    }

    /// Image to boot.
    pub fn image(&self) -> &ImageSource {
        &self.options.image
    }

    /// Entry of the image.
    pub fn entry(&self) -> EntryChoice {
        self.options.entry
    }

    /// The guest's command line.
    pub fn cmdline(&self) -> &str {
        &self.options.cmdline
    }

    /// Linux's initial RAM disk.
    pub fn initrd(&self) -> Option<&Path> {
        self.options.initrd.as_deref()
    }

    /// Size of the memslots.
    pub fn slot_bytes(&self) -> Bytes {
        self.slot_bytes
    }
}

/// Checks that a VM can have `memory` bytes of RAM, in whole `pages`; each page size names its owner, "host" or
/// "guest". Also used for a kernel that runs natively, in RAM like a guest's.
///
/// # Errors
/// [`ConfigError`], the first that applies.
pub fn check_memory(memory: Bytes, pages: &[(PageSize, &'static str)], host: &HostLimits) -> Result<(), ConfigError> {
    if memory < MEMORY_MIN {
        return Err(ConfigError::TooLittleMemory { memory });
    }
    if memory > MEMORY_MAX {
        return Err(ConfigError::BeyondArchitecture { memory });
    }
    for &(page, side) in pages {
        if !memory.is_multiple_of(page) {
            let down = page.bytes() * (memory.get() / page.bytes().get());
            return Err(ConfigError::NotWholePages { memory, page, side, down, up: down + page.bytes() });
        }
    }
    match host.memory_total {
        Some(total) if memory > total => Err(ConfigError::MoreThanHost { memory, host: total }),
        _ => Ok(()),
    }
}

fn check_slot(options: &VmOptions) -> Result<Bytes, ConfigError> {
    let backing_page = match options.backing.kind() {
        BackingKind::Hugetlb => options.backing.start_page(),
        BackingKind::Anon | BackingKind::Memfd => PageSize::Huge2M,
    };
    let Some(slot) = options.slot_bytes else {
        return Ok(memslot::default_slot_bytes(options.memory, backing_page));
    };
    if slot == Bytes::ZERO || !slot.is_multiple_of(backing_page) {
        return Err(ConfigError::SlotCutsPages { slot, granule: backing_page.bytes(), page: backing_page });
    }
    Ok(slot)
}

fn check_cmdline(cmdline: &str) -> Result<(), ConfigError> {
    if cmdline.len() as u64 >= CMDLINE_BYTES_MAX {
        return Err(ConfigError::CmdlineTooLong { bytes: cmdline.len() });
    }
    match cmdline.bytes().position(|byte| byte == 0) {
        Some(at) => Err(ConfigError::CmdlineHasZero { at }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_policies::units::{gib, kib};

    fn options() -> VmOptions {
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Huge2M).unwrap();
        VmOptions::new(ImageSource::Bytes(Cow::Borrowed(b"")), backing)
    }

    fn giant() -> BackingConfig {
        BackingConfig::new(BackingKind::Hugetlb, PageSize::Giant1G).unwrap()
    }

    fn reject(options: VmOptions) -> ConfigError {
        VmConfig::new(options, &HostLimits::none()).unwrap_err()
    }

    #[test]
    fn the_defaults_make_a_vm() {
        let config = VmConfig::new(options(), &HostLimits::none()).unwrap();
        assert_eq!((config.vcpus(), config.memory(), config.slot_bytes()), (1, mib(512), mib(64)));
        assert_eq!(config.ram_layout().len(), 1);
    }

    #[test]
    fn memory_must_not_be_zero() {
        let zero = reject(VmOptions { memory: Bytes::ZERO, ..options() });
        assert_eq!(zero.to_string(), "0 B of RAM is too little: use at least 2 MiB, for instance --memory 512M");
        assert!(matches!(reject(VmOptions { memory: kib(4), ..options() }), ConfigError::TooLittleMemory { .. }));
    }

    #[test]
    fn memory_must_be_whole_pages_of_host_and_guest() {
        let host = reject(VmOptions { memory: mib(512) + kib(4), ..options() });
        assert!(host.to_string().ends_with("2m host pages: use 512 MiB or 514 MiB"), "{host}");
        let guest = reject(VmOptions { guest_page: PageSize::Giant1G, ..options() });
        assert!(guest.to_string().ends_with("1g guest pages: use 1 GiB"), "{guest}");
        let pool = reject(VmOptions { memory: mib(1536), backing: giant(), ..options() });
        assert!(matches!(pool, ConfigError::NotWholePages { page: PageSize::Giant1G, side: "host", .. }));
    }

    #[test]
    fn memory_must_not_exceed_host_and_architecture() {
        let absurd = reject(VmOptions { memory: gib(1 << 30), ..options() });
        assert!(matches!(absurd, ConfigError::BeyondArchitecture { .. }));
        let host = HostLimits { memory_total: Some(gib(16)) };
        let large = VmConfig::new(VmOptions { memory: gib(32), ..options() }, &host).unwrap_err();
        assert_eq!(large, ConfigError::MoreThanHost { memory: gib(32), host: gib(16) });
    }

    #[test]
    fn vcpus_are_one_to_sixteen() {
        assert_eq!(reject(VmOptions { vcpus: 0, ..options() }).to_string(), "cannot run 0 vCPUs: use 1 to 16");
        assert_eq!(reject(VmOptions { vcpus: 17, ..options() }), ConfigError::Vcpus { vcpus: 17 });
    }

    #[test]
    fn memslots_do_not_cut_pages() {
        for slot in [Bytes::ZERO, kib(4), mib(3)] {
            assert!(matches!(
                reject(VmOptions { slot_bytes: Some(slot), ..options() }),
                ConfigError::SlotCutsPages { .. }
            ));
        }
        let giant_slots = VmOptions { memory: gib(1), backing: giant(), slot_bytes: Some(mib(64)), ..options() };
        assert!(matches!(reject(giant_slots), ConfigError::SlotCutsPages { page: PageSize::Giant1G, .. }));
        let small = VmConfig::new(VmOptions { slot_bytes: Some(mib(2)), ..options() }, &HostLimits::none()).unwrap();
        assert_eq!(small.slot_bytes(), mib(2));
    }

    #[test]
    fn command_lines_fit_and_are_one_string() {
        let longest = "x".repeat(CMDLINE_BYTES_MAX as usize - 1);
        assert!(VmConfig::new(VmOptions { cmdline: longest.clone(), ..options() }, &HostLimits::none()).is_ok());
        let longer = reject(VmOptions { cmdline: longest + "x", ..options() });
        assert_eq!(
            longer.to_string(),
            "cannot pass a command line of 4096 bytes: the guest takes at most 4095 bytes; shorten --cmdline"
        );
        let cut = reject(VmOptions { cmdline: "a\0b".to_owned(), ..options() });
        assert_eq!(cut, ConfigError::CmdlineHasZero { at: 1 });
    }

    #[test]
    fn the_host_memory_comes_from_meminfo() {
        let proc = tempfile::tempdir().unwrap();
        assert_eq!(HostLimits::read(proc.path()), HostLimits::none(), "absent is no limit");
        std::fs::write(proc.path().join("meminfo"), "MemTotal:       24555428 kB\nMemFree: 1 kB\n").unwrap();
        assert_eq!(HostLimits::read(proc.path()).memory_total, Some(kib(24_555_428)));
        assert_eq!(parse_memory_total("MemTotal: much\n"), None);
    }
}
