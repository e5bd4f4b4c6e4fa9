//! Common part of the tests of services that answer page faults: guest RAM with a unique word in every page,
//! threads that touch it with a time limit, and the real host with failures injected by a test.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wideleaf_memory::backing::BackingConfig;
use wideleaf_memory::first_touch::probe;
use wideleaf_memory::host::{Advice, Host, HostError, PageRun};
use wideleaf_memory::kernel::{GiantMappings, Userfaultfds};
use wideleaf_memory::numa::placement::NodePolicy;
use wideleaf_memory::side_mapping::{GIANT, GiantFile, SideContents, SideMapping};
use wideleaf_memory::{GuestRam, LinuxHost};
use wideleaf_policies::{Backing, Bytes, Gpa, GpaRange, Hva, Moment, VmId, WindowIndex};

use crate::steady_backing;

pub const VM: VmId = VmId(7);
pub const WORDS_PER_WINDOW: usize = 2 << 20 >> 3;
const WORDS_PER_PAGE: usize = 4096 >> 3;

/// Longest time that a test waits: a thread that hangs fails the test instead of hanging it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Whether the test is skipped, printed with the reason; a failure if `WIDELEAF_REQUIRE` names `userfaultfd`.
pub fn skip() -> bool {
    let Err(error) = probe() else { return false };
    let required = std::env::var("WIDELEAF_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == "userfaultfd"), "WIDELEAF_REQUIRE={required}, and {error}");
    println!("skipped: {error}");
    true
}

/// Maps RAM at these addresses, of these sizes.
pub fn map_of(layout: &[(Bytes, Bytes)], backing: BackingConfig) -> Arc<GuestRam> {
    let range = |(start, bytes): &(Bytes, Bytes)| GpaRange::new(Gpa::new(start.get()), *bytes).unwrap();
    GuestRam::map(&layout.iter().map(range).collect::<Vec<_>>(), backing).unwrap()
}

pub fn backing(ram: &GuestRam, window: u64) -> (u16, Backing) {
    let window = WindowIndex::new(window);
    let range = ram.ranges().iter().find(|range| range.gpa.contains(window.start())).unwrap();
    steady_backing(&LinuxHost::open().unwrap(), *range, None, window)
}

/// The word at this place of the first range.
pub fn word(ram: &GuestRam, window: u64, page: usize) -> &AtomicU64 {
    &ram.words(ram.ranges()[0])[window as usize * WORDS_PER_WINDOW + page * WORDS_PER_PAGE]
}

/// Writes a word unique to this place; returns the previous value.
pub fn touch(ram: &GuestRam, window: u64, page: usize) -> u64 {
    word(ram, window, page).swap(mark(window, page), Ordering::Relaxed)
}

/// The word that [`touch`] writes.
pub fn mark(window: u64, page: usize) -> u64 {
    0x5eed << 32 | window << 16 | (page as u64 + 1)
}

/// The thread's result, if it ends in time.
pub fn join<T>(thread: JoinHandle<T>) -> T {
    wait_for("a thread", || thread.is_finished());
    thread.join().unwrap()
}

pub fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} does not come in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Contents of `/proc/meminfo`.
#[derive(Clone, Copy)]
pub enum Meminfo {
    AsItIs,
    Says(&'static str),
    /// The first once, and the second from then on.
    SaysOnce(&'static str, &'static str),
    Absent,
}

/// The real host, except that it answers some uses of an advice itself, and reports the test's amount of memory.
pub struct AlteredHost {
    real: LinuxHost,
    pub meminfo: Mutex<Meminfo>,
    /// An advice, the number of its next uses that are not passed on, and their errno (0: "done").
    swallow: Mutex<Option<(Advice, u64, i32)>>,
    /// Whether ordinary memory stands for giant pages, and nothing fills it.
    has_ordinary_giants: bool,
    /// Number of the next mappings over guest RAM that fail, with the mapping before removed.
    pub map_over_fails: AtomicU64,
}

impl AlteredHost {
    pub fn with_memory(meminfo: Meminfo) -> AlteredHost {
        AlteredHost {
            real: LinuxHost::open().unwrap(),
            meminfo: Mutex::new(meminfo),
            swallow: Mutex::default(),
            has_ordinary_giants: false,
            map_over_fails: AtomicU64::new(0),
        }
    }

    /// Ordinary memory stands for giant pages: a page appears where it is touched, so that a test needs no pool.
    pub fn with_ordinary_giants() -> AlteredHost {
        AlteredHost { has_ordinary_giants: true, ..AlteredHost::with_memory(Meminfo::AsItIs) }
    }

    pub fn swallowing(self, advice: Advice, times: u64, errno: i32) -> Arc<AlteredHost> {
        *self.swallow.lock() = Some((advice, times, errno));
        Arc::new(self)
    }
}

impl Host for AlteredHost {
    fn now(&self) -> Moment {
        self.real.now()
    }

    fn thread_cpu_time(&self) -> Duration {
        self.real.thread_cpu_time()
    }

    fn advise(&self, start: Hva, bytes: Bytes, advice: Advice) -> Result<(), HostError> {
        match &mut *self.swallow.lock() {
            Some((of, times, errno)) if *of == advice && *times > 0 => {
                *times -= 1;
                let source = std::io::Error::from_raw_os_error(*errno);
                if *errno == 0 { Ok(()) } else { Err(HostError { what: "meddling", source }) }
            }
            _ if self.has_ordinary_giants && advice == Advice::PopulateWrite && bytes == GIANT => Ok(()),
            _ => self.real.advise(start, bytes, advice),
        }
    }

    fn scan(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        self.real.scan(start, bytes, runs)
    }

    fn scan_occupied(&self, start: Hva, bytes: Bytes, runs: &mut Vec<PageRun>) -> Result<(), HostError> {
        self.real.scan_occupied(start, bytes, runs)
    }

    fn is_one_mapping(&self, start: Hva, bytes: Bytes) -> Result<bool, HostError> {
        self.real.is_one_mapping(start, bytes)
    }

    fn read_text(&self, path: &str) -> Result<String, HostError> {
        if path != "/proc/meminfo" {
            return self.real.read_text(path);
        }
        let mut meminfo = self.meminfo.lock();
        match *meminfo {
            Meminfo::AsItIs => self.real.read_text(path),
            Meminfo::Says(text) => Ok(text.to_owned()),
            Meminfo::SaysOnce(text, then) => {
                *meminfo = Meminfo::Says(then);
                Ok(text.to_owned())
            }
            Meminfo::Absent => Err(HostError { what: "meddling", source: std::io::ErrorKind::NotFound.into() }),
        }
    }

    fn sleep(&self, time: Duration) {
        self.real.sleep(time);
    }
}

impl GiantMappings for AlteredHost {
    fn create_giant(&self) -> Result<GiantFile, HostError> {
        if !self.has_ordinary_giants {
            return self.real.create_giant();
        }
        let file = nix::sys::memfd::memfd_create("test-giant", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        let file = std::fs::File::from(file);
        file.set_len(GIANT.get()).unwrap();
        Ok(GiantFile::from_file(file).unwrap())
    }

    fn fill_giant(&self, page: &GiantFile, policy: Option<&NodePolicy>) -> Result<(), HostError> {
        if self.has_ordinary_giants { Ok(()) } else { self.real.fill_giant(page, policy) }
    }

    fn map_aside(&self, contents: SideContents<'_>) -> Result<SideMapping, HostError> {
        self.real.map_aside(contents)
    }

    fn move_aside(&self, ram: &GuestRam, giant: Gpa, to: &SideMapping) -> Result<(), HostError> {
        self.real.move_aside(ram, giant, to)
    }

    fn move_in(&self, from: &SideMapping, ram: &GuestRam, giant: Gpa) -> Result<(), HostError> {
        self.real.move_in(from, ram, giant)
    }

    fn map_over(&self, ram: &GuestRam, giant: Gpa, page: &GiantFile) -> Result<(), HostError> {
        let fails = |left: u64| left.checked_sub(1);
        if self.map_over_fails.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails).is_ok() {
            // The mapping before is gone: the kernel unmaps before it maps.
            self.real.map_aside(SideContents::Nothing).and_then(|hole| self.real.move_aside(ram, giant, &hole))?;
            return Err(HostError { what: "meddling", source: std::io::ErrorKind::OutOfMemory.into() });
        }
        self.real.map_over(ram, giant, page)
    }
}

impl Userfaultfds for AlteredHost {}
