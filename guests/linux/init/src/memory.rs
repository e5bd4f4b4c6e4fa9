//! The kernel's memory: its size, the requested pages, and what finally backs it. A size that the machine does not have
//! is refused before it is touched, since Linux would kill the process. It may change the guest's own setting for THP.

use std::fs;
use std::sync::Arc;

use wideleaf_kernels::registry::MemoryNeed;
use wideleaf_memory::pool::{HugetlbPools, PoolError};
use wideleaf_memory::sensors::smaps::resident_memory;
use wideleaf_memory::{BackingConfig, BackingKind, GuestRam};
use wideleaf_policies::units::kib;
use wideleaf_policies::{Bytes, Gpa, GpaRange, PageSize};
use wideleaf_protocol::GuestPage;
use wideleaf_protocol::linux::KEY_MEMORY;

use crate::failure::Failure;
use crate::parameters::Page;

/// Divisor of the available memory, for a kernel that takes all memory. The rest is for its page tables and for
/// Linux, which kills processes when memory runs out.
const PART_OF_AVAILABLE: u64 = 2;

/// Modes of transparent huge pages, with the current one in brackets. Documentation/admin-guide/mm/transhuge.rst.
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Maps memory on these pages: `bytes`, or the amount that the run needs.
pub fn map(page: Page, bytes: Option<Bytes>, need: MemoryNeed) -> Result<Arc<GuestRam>, Failure> {
    let backing = backing(page);
    let size = backing.granule();
    let bytes = match (bytes, need) {
        (Some(bytes), MemoryNeed::Bytes(needed)) if bytes.get() < needed => {
            return Err(too_little(bytes, whole_pages(needed, size)));
        }
        (Some(bytes), _) => bytes,
        (None, MemoryNeed::Bytes(needed)) => whole_pages(needed, size),
        (None, MemoryNeed::AllThereIs) => part_of_all(backing)?,
    };
    check_there_is(bytes, backing)?;
    let range =
        GpaRange::new(Gpa::new(0), bytes).ok_or_else(|| Failure::unsupported("cannot map 0 bytes of memory"))?;
    GuestRam::map(&[range], backing).map_err(Failure::unsupported)
}

/// Rounds bytes up to whole pages. Returns them unchanged on overflow, since such an amount does not exist.
fn whole_pages(bytes: u64, size: PageSize) -> Bytes {
    Bytes::new(bytes).checked_round_up(size).unwrap_or(Bytes::new(bytes))
}

fn too_little(given: Bytes, needed: Bytes) -> Failure {
    let enough_mib = needed.get() >> 20;
    let remedy = format_args!("use at least {KEY_MEMORY}={enough_mib}M, or leave it out");
    Failure::bad_arguments(format_args!("{KEY_MEMORY}={given}: the kernel needs {needed}; {remedy}"))
}

/// Linux turns transparent huge pages off by itself on machines of less than 512 MiB (mm/huge_memory.c,
/// `hugepage_init`), whatever its build options. Turns them on for processes that ask, unless the command line has
/// a word about them.
pub fn permit_huge_pages(cmdline: &str) {
    let is_chosen = cmdline.split_ascii_whitespace().any(|word| word.starts_with("transparent_hugepage="));
    let is_off = fs::read_to_string(ENABLED).is_ok_and(|modes| modes.contains("[never]"));
    if is_off && !is_chosen {
        // If Linux refuses, the results show that no memory was in large pages.
        let _ = fs::write(ENABLED, "madvise");
    }
}

/// The page size of a process that asks for none: huge if Linux is in the mode `always`.
pub fn default_page() -> GuestPage {
    page_in_mode(&fs::read_to_string(ENABLED).unwrap_or_default())
}

fn page_in_mode(modes: &str) -> GuestPage {
    if modes.contains("[always]") { GuestPage::Huge2M } else { GuestPage::Base4K }
}

fn backing(page: Page) -> BackingConfig {
    let (kind, size) = match page {
        Page::Base4K => (BackingKind::Anon, PageSize::Base4K),
        Page::Thp => (BackingKind::Anon, PageSize::Huge2M),
        Page::Huge2M => (BackingKind::Hugetlb, PageSize::Huge2M),
        Page::Giant1G => (BackingKind::Hugetlb, PageSize::Giant1G),
    };
    BackingConfig::new(kind, size).expect("these four exist")
}

/// Memory of a kernel that takes all memory: at least one pool page, so that an empty pool is reported later.
fn part_of_all(backing: BackingConfig) -> Result<Bytes, Failure> {
    let size = backing.granule();
    let pages = match backing.kind() {
        BackingKind::Hugetlb => HugetlbPools::of_this_machine().status(size).map_err(of_pool)?.available().max(1),
        BackingKind::Anon | BackingKind::Memfd => available()?.get() / PART_OF_AVAILABLE / size.bytes().get(),
    };
    Ok(size.bytes() * pages)
}

/// Checks before memory is touched, since Linux would otherwise kill the kernel.
fn check_there_is(bytes: Bytes, backing: BackingConfig) -> Result<(), Failure> {
    if backing.kind() == BackingKind::Hugetlb {
        return HugetlbPools::of_this_machine().check(backing.granule(), bytes).map_err(of_pool);
    }
    let available = available()?;
    if bytes <= available {
        return Ok(());
    }
    let message =
        format!("needs {bytes} of memory, but has {available}; give the guest more RAM or choose a smaller size");
    Err(Failure::unsupported(message))
}

fn of_pool(error: PoolError) -> Failure {
    let PoolError::Short(short) = error else { return Failure::unsupported(error) };
    let (needed, available, size) = (short.needed, short.pool.available(), short.pool.size);
    let remedy =
        format!("put hugepagesz={size} hugepages={needed} on the Linux command line, and give the guest RAM for them");
    Failure::unsupported(format_args!("needs {needed} hugetlb pages of {size}, {available} are free; {remedy}"))
}

/// Memory that Linux could hand out without swapping: `MemAvailable`, proc_meminfo(5).
fn available() -> Result<Bytes, Failure> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let available = field.and_then(|number| number.parse().ok()).map(kib);
    available.ok_or_else(|| Failure::unsupported("/proc/meminfo has no MemAvailable"))
}

/// Resident part of the memory, and its part in pages of 2 MiB or more.
pub struct Backed {
    /// Bytes that are resident.
    pub resident: Bytes,
    /// Bytes in large pages.
    pub large: Bytes,
}

/// Asks Linux what backs the memory now; `None` if it does not report it.
pub fn backed(ram: &GuestRam) -> Option<Backed> {
    if ram.backing().kind() == BackingKind::Hugetlb {
        let size = ram.backing().granule();
        let pool = HugetlbPools::of_this_machine().status(size).ok()?;
        // No other process of this machine uses the pool.
        let used = size.bytes() * (pool.total - pool.free);
        return Some(Backed { resident: used, large: used });
    }
    let smaps = fs::read_to_string("/proc/self/smaps").ok()?;
    let memory = resident_memory(&smaps, &[(ram.base(), ram.bytes())]).ok()?;
    Some(Backed { resident: memory.guest_ram, large: memory.guest_ram_thp })
}

#[cfg(test)]
mod tests {
    use wideleaf_policies::units::mib;
    use wideleaf_protocol::ExitCode;

    use super::*;

    #[test]
    fn a_kernel_gets_what_it_needs_in_whole_windows() {
        let needed = |bytes, need| map(Page::Base4K, bytes, need).expect("some MiB").bytes();
        assert_eq!(needed(None, MemoryNeed::Bytes(5 << 20)), mib(6));
        assert_eq!(needed(Some(mib(8)), MemoryNeed::Bytes(5 << 20)), mib(8));
        assert_eq!(needed(Some(mib(2)), MemoryNeed::AllThereIs), mib(2));
        assert!(needed(None, MemoryNeed::AllThereIs) >= mib(2));
    }

    #[test]
    fn memory_on_base_pages_is_there_once_it_is_touched_and_never_large() {
        let ram = map(Page::Base4K, None, MemoryNeed::Bytes(4 << 20)).expect("4 MiB");
        let words = ram.words(ram.ranges()[0]);
        words.iter().for_each(|word| word.store(1, std::sync::atomic::Ordering::Relaxed));
        let backed = backed(&ram).expect("Linux says what backs it");
        assert_eq!((backed.resident, backed.large), (mib(4), Bytes::ZERO));
    }

    #[test]
    fn memory_below_the_need_is_refused_with_the_word_that_is_enough() {
        let failure = map(Page::Base4K, Some(mib(4)), MemoryNeed::Bytes((4 << 20) + 1)).expect_err("a byte is missing");
        let line = "wideleaf.memory=4 MiB: the kernel needs 6 MiB; use at least wideleaf.memory=6M, or leave it out";
        assert_eq!((failure.code, failure.message.as_str()), (ExitCode::BadArguments, line));
    }

    #[test]
    fn a_process_without_a_request_gets_huge_pages_only_in_mode_always() {
        assert_eq!(page_in_mode("[always] madvise never\n"), GuestPage::Huge2M);
        assert_eq!(page_in_mode("always [madvise] never\n"), GuestPage::Base4K);
        assert_eq!(page_in_mode(""), GuestPage::Base4K);
    }

    #[test]
    fn impossible_memory_is_refused_with_a_remedy() {
        let pebibyte = MemoryNeed::Bytes(1 << 50);
        let refused = |page| map(page, None, pebibyte).expect_err("refused").message;
        assert!(refused(Page::Thp).starts_with("needs 1024 TiB of memory, but has "), "{}", refused(Page::Thp));
        let pool = refused(Page::Huge2M);
        assert!(
            pool.starts_with("needs 536870912 hugetlb pages of 2m, ") && pool.contains("hugepages=536870912"),
            "{pool}"
        );
    }
}
