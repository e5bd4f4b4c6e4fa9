//! A process that looks like a VMM and has a lockable memory map. While it is locked, every read of its `cmdline`,
//! `smaps` or `mem` waits, as for a VMM that has mapped a file of a dead file server.
//!
//! ```text
//!   this process                                     the victim: this program once more
//!   ├─ server   /dev/fuse: a READ is never answered  ├─ KVM_CREATE_VM, RAM, a page of the file is mapped
//!   └─ keeper   the mount, in a namespace of its own └─ maps and unmaps memory again and again
//!
//!   the reader, once more: /proc/VICTIM/mem ──▶ holds mmap_lock for reading ◀── the victim waits to write
//! ```
//!
//! A locked process also hangs `ps` and `pgrep` of every user of the machine, so it ends in any case: when this is
//! dropped, after [`LOCKED_MAX`], and when the process of the test ends in any way, because the file server ends
//! with it. For that reason the reader is a process of its own: a reader that waits for the server does not end
//! even when it is killed, and would keep the server's file open.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use vm_memory::{FileOffset, MmapRegion};

use crate::{Need, has_kvm, is_there};

/// Longest time for which a process stays locked.
pub const LOCKED_MAX: Duration = Duration::from_secs(60);

/// Generous limit for actions that take milliseconds.
const WITHIN: Duration = Duration::from_secs(30);

/// Bytes of memory that look like guest RAM. None of it is touched.
const RAM_BYTES: usize = 256 << 20;
const PAGE: usize = 4096;

/// Name of the ignored test that is the victim.
const VICTIM: &str = "be_the_stuck_process_itself";
const FILE_VARIABLE: &str = "WIDELEAF_STUCK_FILE";
/// `PID:ADDRESS`: set for the reader.
const READ_VARIABLE: &str = "WIDELEAF_STUCK_READ";

/// Main function of the victim and of the reader. Each test program that starts one must call it from an ignored
/// test `be_the_stuck_process_itself`. It ends when its standard input does.
///
/// # Panics
/// Panics if it has no KVM or cannot map the memory it needs.
pub fn be_the_stuck_process() {
    if let Ok(place) = std::env::var(READ_VARIABLE) {
        let (pid, address) = place.split_once(':').expect("a process and an address");
        let mem = File::open(format!("/proc/{pid}/mem")).expect("root may");
        let _ = mem.read_at(&mut [0], address.parse().expect("a number"));
        return;
    }
    let kvm = kvm_ioctls::Kvm::new().expect("the test has looked for KVM");
    let _vm = kvm.create_vm().expect("a VM");
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let map = move |bytes| MmapRegion::<()>::build(None, bytes, libc::PROT_READ | libc::PROT_WRITE, anonymous);
    let _ram = map(RAM_BYTES).expect("untouched memory costs nothing");
    let path = std::env::var_os(FILE_VARIABLE).expect("the test says which file");
    let file = FileOffset::new(File::open(path).expect("the file of the test's server"), 0);
    let page = MmapRegion::<()>::build(Some(file), PAGE, libc::PROT_READ, libc::MAP_PRIVATE).expect("a page of it");
    eprintln!("{:x}", page.as_ptr() as usize);
    thread::spawn(move || {
        loop {
            drop(map(PAGE));
            thread::sleep(Duration::from_millis(10));
        }
    });
    let _ = io::stdin().read(&mut [0]);
}

/// A running victim process.
pub struct StuckProcess {
    child: Child,
    page: u64,
    server: Server,
    reader: Option<Child>,
}

impl StuckProcess {
    /// Starts the victim, unlocked. `None` if the test is to be skipped.
    ///
    /// # Panics
    /// Panics on any other failure.
    pub fn start() -> Option<StuckProcess> {
        let server = Server::start();
        let found = server.as_ref().map(|_| ()).map_err(Clone::clone);
        if !has_kvm() || !is_there(Need::Fuse, found) {
            return None;
        }
        let mut server = server.ok()?;
        let mut child = server.spawn();
        let mut said = String::new();
        let stderr = child.stderr.take().expect("it is a pipe");
        BufReader::new(stderr).read_line(&mut said).expect("it says where its page is");
        let page = u64::from_str_radix(said.trim(), 16).unwrap_or_else(|_| panic!("no address: {said}"));
        Some(StuckProcess { child, page, server, reader: None })
    }

    /// Process id of the victim.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Locks its memory map: after the return every reader of the map waits.
    ///
    /// # Panics
    /// Panics if the map does not become locked.
    pub fn lock(&mut self) {
        let mut reader = this_program();
        reader.env(READ_VARIABLE, format!("{}:{}", self.pid(), self.page)).stdin(Stdio::null()).stderr(Stdio::null());
        self.reader = Some(reader.spawn().expect("this program can be started"));
        self.server.asked.recv_timeout(WITHIN).expect("the page is asked for");
        let until = Instant::now() + WITHIN;
        while !self.waits() {
            assert!(Instant::now() < until, "the victim does not wait for its own memory map");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether a thread of it is in uninterruptible sleep (proc_pid_stat(5)). The check itself takes no lock of the
    /// victim.
    fn waits(&self) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
        let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
        stats.filter_map(|stat| Some(stat.rsplit_once(')')?.1.trim_start().starts_with('D'))).any(|waits| waits)
    }

    /// Unlocks the victim, which lives on and answers.
    pub fn unlock(&mut self) {
        self.server.end();
        if let Some(mut reader) = self.reader.take() {
            let _ = reader.wait();
        }
    }
}

impl Drop for StuckProcess {
    fn drop(&mut self) {
        self.unlock();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn this_program() -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([VICTIM, "--exact", "--ignored", "--nocapture"]).stdout(Stdio::null());
    command
}

/// The file server, its mount and the mount's namespace.
struct Server {
    /// Orders for the keeper, which unmounts when the sender is dropped.
    orders: Option<Sender<Command>>,
    spawned: Receiver<io::Result<Child>>,
    /// Receives a message for each READ.
    asked: Receiver<()>,
    file: PathBuf,
    keeper: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Server {
    fn start() -> Result<Server, String> {
        let fuse = File::options().read(true).write(true).open("/dev/fuse");
        let fuse = Arc::new(fuse.map_err(|error| format!("/dev/fuse: {error}"))?);
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let ((orders, ordered), (ready, is_ready)) = (channel(), channel());
        let ((spawn, spawned), (ask, asked)) = (channel(), channel());
        let (served, at) = (Arc::clone(&fuse), folder.path().to_owned());
        let keeper = thread::spawn(move || keep(&fuse, &at, &ready, &ordered, &spawn));
        is_ready.recv().map_err(|_| "the thread that mounts has ended".to_owned())??;
        thread::spawn(move || serve(&served, &ask));
        let file = folder.path().join("file");
        Ok(Server { orders: Some(orders), spawned, asked, file, keeper: Some(keeper), _folder: folder })
    }

    /// Starts the victim in the namespace with the file.
    fn spawn(&mut self) -> Child {
        let mut command = this_program();
        command.env(FILE_VARIABLE, &self.file).stdin(Stdio::piped()).stderr(Stdio::piped());
        self.orders.as_ref().expect("it is mounted").send(command).expect("the keeper lives");
        self.spawned.recv().expect("the keeper lives").expect("this program can be started")
    }

    /// Ends the connection: unanswered requests then fail.
    fn end(&mut self) {
        drop(self.orders.take());
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// Mounts in a namespace of this thread's own and starts the ordered processes there. Unmounts when no more orders
/// can come or after a time limit. The mount goes with the last process in the namespace, also if this one is
/// killed.
fn keep(
    fuse: &File,
    at: &Path,
    ready: &Sender<Result<(), String>>,
    orders: &Receiver<Command>,
    spawned: &Sender<io::Result<Child>>,
) {
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", fuse.as_raw_fd());
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    let none = None::<&str>;
    let mounted = unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(none, "/", none, private, none))
        .and_then(|()| mount(Some("stuck"), at, Some("fuse"), MsFlags::MS_NOSUID, Some(options.as_str())));
    if ready.send(mounted.map_err(|errno| format!("mounting a file system of our own: {errno}"))).is_err() {
        return;
    }
    let until = Instant::now() + LOCKED_MAX;
    while let Ok(mut command) = orders.recv_timeout(until.saturating_duration_since(Instant::now())) {
        let _ = spawned.send(command.spawn());
    }
    // Forced: the kernel ends the connection, even while a process waits for an answer.
    let _ = umount2(at, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH);
}

/// Answers the kernel (include/uapi/linux/fuse.h, protocol 7.31) until the connection ends.
fn serve(fuse: &File, asked: &Sender<()>) {
    let mut request = vec![0; 128 << 10];
    loop {
        let read = match (&*fuse).read(&mut request) {
            Ok(read) => read,
            Err(error) if [Some(libc::EINTR), Some(libc::ENOENT)].contains(&error.raw_os_error()) => continue,
            Err(_) => return,
        };
        let word = |at: usize| u32::from_le_bytes(request[at..][..4].try_into().expect("four bytes"));
        let (operation, node) = (word(4), word(16));
        debug_assert!(read >= 40, "the header has 40 bytes");
        let reply = match operation {
            FORGET | BATCH_FORGET | INTERRUPT => continue,
            READ => {
                let _ = asked.send(());
                continue;
            }
            INIT => Ok(words(&[7, 31, 4096, 0, 12, 65536, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            LOOKUP => Ok([words(&[2, 0, 0, 0, 60, 0, 60, 0, 0, 0]), attributes(2)].concat()),
            GETATTR => Ok([words(&[60, 0, 0, 0]), attributes(node)].concat()),
            OPEN | OPENDIR => Ok(words(&[1, 0, 0, 0])),
            RELEASE | FLUSH | RELEASEDIR => Ok(Vec::new()),
            _ => Err(libc::ENOSYS),
        };
        let (error, body) = reply.map_or_else(|errno| (-errno, Vec::new()), |body| (0, body));
        let header = words(&[16 + body.len() as u32, error as u32, word(8), word(12)]);
        let _ = (&*fuse).write(&[header, body].concat());
    }
}

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Encodes `struct fuse_attr`: the folder is node 1, the file is node 2 and has 16 MiB.
fn attributes(node: u32) -> Vec<u8> {
    let (mode, bytes) = if node == 1 { (libc::S_IFDIR | 0o755, 0) } else { (libc::S_IFREG | 0o666, 16 << 20) };
    let (times, owner_and_device) = ([0; 9], [0; 3]);
    let size = [node, 0, bytes, 0, bytes / 512, 0];
    [&size[..], &times, &[mode, 1], &owner_and_device, &[PAGE as u32, 0]]
        .concat()
        .iter()
        .copied()
        .flat_map(u32::to_le_bytes)
        .collect()
}
