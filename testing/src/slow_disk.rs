//! A slow disk image with transfers straight into the pages of the process that reads it: a file of a FUSE file
//! system of this process, without page cache (`FOPEN_DIRECT_IO`). The kernel pins the pages of a `preadv(2)` until
//! this server answers, as it does for glusterfs, sshfs and others. Needs root and `/dev/fuse`.
//!
//! ```text
//!   test ── preadv ─▶ kernel: pins the pages ── READ ─▶ this server: waits [`SlowDisk::hold`], takes its time ── bytes
//!   ─▶ kernel: unpins
//! ```
//!
//! Structures and numbers are those of include/uapi/linux/fuse.h, version 7.31. Dropping it, also by a panic,
//! aborts and unmounts the file system: a transfer under way fails, and no thread waits for it.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use parking_lot::{Condvar, Mutex, MutexGuard};
use tempfile::TempDir;

use crate::{Need, is_there};

/// Longest time that a test waits for a transfer to begin.
const TRANSFER_BEGINS_MAX: Duration = Duration::from_secs(60);
/// Largest transfer in bytes: the size of our disks' pieces.
const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// Room for the header of a request, beside the bytes of a WRITE.
const HEAD_ROOM: usize = 4096;
const NAME: &str = "disk";
const ROOT_NODE: u64 = 1;
const FILE_NODE: u64 = 2;

/// A mounted slow disk.
pub struct SlowDisk {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    folder: TempDir,
}

/// While this lives, transfers get no answers.
pub struct Hold<'a>(&'a Shared);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    delay: Duration,
}

struct State {
    bytes: Vec<u8>,
    holds: u32,
    /// Number of transfers that wait for their answers.
    waiting: u64,
    reads: u64,
    writes: u64,
    is_over: bool,
}

impl SlowDisk {
    /// A disk of zeroes with a `delay` for each transfer, or `None` if the test is to be skipped.
    ///
    /// # Panics
    /// Panics if FUSE is required (`WIDELEAF_REQUIRE=fuse`) and absent.
    pub fn mount(bytes: usize, delay: Duration) -> Option<SlowDisk> {
        match SlowDisk::try_mount(bytes, delay) {
            Ok(disk) => Some(disk),
            Err(error) => {
                is_there(
                    Need::Fuse,
                    Err(format!("a FUSE file system cannot be mounted: {error}; run the test as root")),
                );
                None
            }
        }
    }

    fn try_mount(bytes: usize, delay: Duration) -> io::Result<SlowDisk> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let folder = tempfile::tempdir()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("wideleaf-slow-disk"), folder.path(), Some("fuse"), flags, Some(options.as_str()))?;
        let state = State { bytes: vec![0; bytes], holds: 0, waiting: 0, reads: 0, writes: 0, is_over: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), delay });
        let served = Arc::clone(&shared);
        let thread = std::thread::spawn(move || serve(&device, &served));
        Ok(SlowDisk { shared, thread: Some(thread), folder })
    }

    /// Path of the image.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join(NAME)
    }

    /// Delays the answers of all transfers from now on, until the result is dropped.
    pub fn hold(&self) -> Hold<'_> {
        self.shared.lock().holds += 1;
        Hold(&self.shared)
    }

    /// Waits until a transfer waits for its answer: its pages are then pinned.
    ///
    /// # Panics
    /// Panics if no transfer comes within a minute.
    pub fn wait_for_a_transfer(&self) {
        let none_waits = |state: &mut State| state.waiting == 0;
        let waited = self.shared.changed.wait_while_for(&mut self.shared.lock(), none_waits, TRANSFER_BEGINS_MAX);
        assert!(!waited.timed_out(), "no transfer has begun");
    }

    /// The number of reads and writes that came so far.
    pub fn transfers(&self) -> (u64, u64) {
        let state = self.shared.lock();
        (state.reads, state.writes)
    }

    /// Contents of the disk.
    pub fn bytes(&self) -> Vec<u8> {
        self.shared.lock().bytes.clone()
    }

    /// Replaces the contents of the disk.
    ///
    /// # Panics
    /// Panics if the size differs.
    pub fn set_bytes(&self, bytes: &[u8]) {
        self.shared.lock().bytes.copy_from_slice(bytes);
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // Forced: transfers fail, and so does the server's next read (`fuse_umount_begin`). If the image is still
        // open, the mount is busy, and goes with its last user.
        let _ = umount2(self.folder.path(), MntFlags::MNT_FORCE);
        let _ = umount2(self.folder.path(), MntFlags::MNT_DETACH);
        // Only after that, or the server would still answer transfers under way.
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            println!("the server of a slow disk panicked");
        }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.lock().holds -= 1;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Sleeps for the duration of a transfer.
    fn wait(&self) {
        let mut state = self.lock();
        state.waiting += 1;
        self.changed.notify_all();
        let held = |state: &mut State| state.holds > 0 && !state.is_over;
        self.changed.wait_while(&mut state, held);
        state.waiting -= 1;
        drop(state);
        std::thread::sleep(self.delay);
    }
}

/// A `struct fuse_in_header` and its body.
struct Request<'a> {
    opcode: u32,
    unique: u64,
    node: u64,
    body: &'a [u8],
}

impl<'a> Request<'a> {
    const HEAD: usize = 40;

    fn parse(bytes: &'a [u8]) -> Request<'a> {
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Request { opcode: half(bytes, 4), unique: word(8), node: word(16), body: &bytes[Request::HEAD..] }
    }
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
}

/// Answers requests until the file system is gone.
fn serve(device: &File, shared: &Shared) {
    let mut buffer = vec![0; TRANSFER_BYTES_MAX + HEAD_ROOM];
    loop {
        let bytes = match (&*device).read(&mut buffer) {
            Ok(bytes) => bytes,
            Err(error) if is_for_now(&error) => continue,
            Err(_) => return,
        };
        let request = Request::parse(&buffer[..bytes]);
        if matches!(request.opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT) {
            continue; // no answer is expected
        }
        let (error, body) = match answer(&request, shared) {
            Ok(body) => (0, body),
            Err(errno) => (-(errno as i32), Vec::new()),
        };
        // `struct fuse_out_header`, and one write for all of it.
        let mut reply = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
        reply.extend(error.to_ne_bytes());
        reply.extend(request.unique.to_ne_bytes());
        reply.extend(body);
        let _ = (&*device).write_all(&reply); // fails if its caller has been killed
    }
}

/// `ENOENT`: the request was cancelled before it was read (fuse(4)).
fn is_for_now(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc_errno::EINTR | libc_errno::EAGAIN | libc_errno::ENOENT))
}

mod libc_errno {
    use nix::errno::Errno;
    pub const EINTR: i32 = Errno::EINTR as i32;
    pub const EAGAIN: i32 = Errno::EAGAIN as i32;
    pub const ENOENT: i32 = Errno::ENOENT as i32;
}

fn answer(request: &Request<'_>, shared: &Shared) -> Result<Vec<u8>, Errno> {
    match request.opcode {
        opcode::INIT => Ok(init()),
        opcode::LOOKUP if is_name(request.body) => Ok(entry(shared)),
        opcode::LOOKUP => Err(Errno::ENOENT),
        opcode::GETATTR | opcode::SETATTR => {
            Ok([&60_u64.to_ne_bytes()[..], &[0; 8], &attributes(request.node, shared)].concat())
        }
        opcode::OPEN => Ok(open()),
        opcode::READ => {
            shared.wait();
            Ok(read(request.body, shared))
        }
        opcode::WRITE => {
            shared.wait();
            write(request.body, shared)
        }
        opcode::RELEASE | opcode::FSYNC | opcode::FLUSH => Ok(Vec::new()),
        _ => Err(Errno::ENOSYS),
    }
}

fn is_name(body: &[u8]) -> bool {
    body.strip_suffix(&[0]).is_some_and(|name| name == NAME.as_bytes())
}

/// Encodes `struct fuse_init_out`.
fn init() -> Vec<u8> {
    const BIG_WRITES: u32 = 1 << 5;
    const MAX_PAGES: u32 = 1 << 22;
    let pages = (TRANSFER_BYTES_MAX / 4096) as u16;
    let mut out = Vec::new();
    [7, 31, 4096, BIG_WRITES | MAX_PAGES].iter().for_each(|word: &u32| out.extend(word.to_ne_bytes()));
    // Limits of background requests, which do not occur.
    [12_u16, 9].iter().for_each(|requests| out.extend(requests.to_ne_bytes()));
    [TRANSFER_BYTES_MAX as u32, 1].iter().for_each(|word| out.extend(word.to_ne_bytes()));
    out.extend(pages.to_ne_bytes());
    out.resize(64, 0);
    out
}

/// Encodes `struct fuse_entry_out`.
fn entry(shared: &Shared) -> Vec<u8> {
    let mut out = Vec::new();
    [FILE_NODE, 0, 60, 60, 0].iter().for_each(|word: &u64| out.extend(word.to_ne_bytes()));
    out.extend(attributes(FILE_NODE, shared));
    out
}

/// Encodes `struct fuse_attr`.
fn attributes(node: u64, shared: &Shared) -> Vec<u8> {
    const FOLDER: u32 = 0o040_755;
    const REGULAR: u32 = 0o100_666;
    let (mode, bytes) = if node == ROOT_NODE { (FOLDER, 0) } else { (REGULAR, shared.lock().bytes.len() as u64) };
    let mut out = Vec::new();
    [node, bytes, bytes / 512, 0, 0, 0].iter().for_each(|word| out.extend(word.to_ne_bytes()));
    // Three times, mode, links, user, group, device, block size, flags.
    [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0].iter().for_each(|word: &u32| out.extend(word.to_ne_bytes()));
    out
}

/// Encodes `struct fuse_open_out`.
fn open() -> Vec<u8> {
    const DIRECT_IO: u32 = 1;
    [&1_u64.to_ne_bytes()[..], &DIRECT_IO.to_ne_bytes(), &[0; 4]].concat()
}

/// Start and length of a transfer, from `struct fuse_read_in` or `struct fuse_write_in`, which begin alike.
fn place(body: &[u8]) -> (usize, usize) {
    let offset = u64::from_ne_bytes(body[8..16].try_into().expect("eight bytes"));
    (offset as usize, half(body, 16) as usize)
}

fn read(body: &[u8], shared: &Shared) -> Vec<u8> {
    let (offset, bytes) = place(body);
    let mut state = shared.lock();
    state.reads += 1;
    let end = offset.saturating_add(bytes).min(state.bytes.len());
    state.bytes[offset.min(end)..end].to_vec()
}

fn write(body: &[u8], shared: &Shared) -> Result<Vec<u8>, Errno> {
    const WRITE_HEAD: usize = 40;
    let (offset, bytes) = place(body);
    let mut state = shared.lock();
    state.writes += 1;
    let to = state.bytes.get_mut(offset..offset + bytes).ok_or(Errno::ENOSPC)?;
    to.copy_from_slice(&body[WRITE_HEAD..WRITE_HEAD + bytes]);
    Ok([&(bytes as u32).to_ne_bytes()[..], &[0; 4]].concat())
}

/// Whether a file system is mounted at a folder, for tests of the disk itself.
pub fn is_mounted(folder: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1) == folder.to_str())
}
