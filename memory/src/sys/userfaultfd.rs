//! `userfaultfd(2)`: the kernel passes page faults of a memory range to this process, which answers them. The
//! structures and numbers are those of `ioctl_userfaultfd(2)` and include/uapi/linux/userfaultfd.h.
//!
//! The kinds of faults are requested by range ([`Mode`]), and no events other than faults. Closing the descriptor
//! (dropping the value) unregisters every range and wakes all waiting threads.
//!
//! Pages are moved and copied between [`Piece`]s only, and their contents are kept. A thread that touches a moving
//! page waits until it arrives, and an existing page is not overwritten.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use nix::errno::Errno;
use wideleaf_policies::{Bytes, Hva};

use crate::sys::mapping::Piece;

/// Why userfaultfd is not available.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultfdError {
    /// The kernel was built without it.
    #[error("cannot use userfaultfd: this kernel was built without CONFIG_USERFAULTFD")]
    NotSupported,
    /// The caller may not have one that sees the kernel's own faults. A vCPU faults in kernel mode, inside `KVM_RUN`,
    /// so the weaker kind that every user may have (`UFFD_USER_MODE_ONLY`) would fail the guest.
    #[error(
        "cannot use userfaultfd for a vCPU's faults, which happen in the kernel: run as root (CAP_SYS_PTRACE), or set \
         vm.unprivileged_userfaultfd=1, or let this user open /dev/userfaultfd ({device})"
    )]
    NotPermitted {
        /// Error of opening the device.
        device: io::Error,
    },
    /// The kernel has userfaultfd, but it cannot move pages.
    #[error("cannot move pages: this kernel's userfaultfd lacks UFFDIO_MOVE (Linux 6.8)")]
    NoMove,
    /// The kernel has userfaultfd, but it does not report minor faults.
    #[error(
        "cannot see minor faults of memfd and hugetlb memory: this kernel's userfaultfd lacks UFFD_FEATURE_MINOR_* \
         (Linux 5.14)"
    )]
    NoMinor,
    /// A call failed.
    #[error("{call}: {source}")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// Kinds of faults of a range that are passed to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Touches of missing pages, in anonymous memory. Answered with zero pages, copies or moved pages.
    Missing,
    /// Touches of missing pages, in memory of any kind. Answered with copies, which the kernel makes for all kinds.
    MissingCopied,
    /// Touches of pages that are in the file but not in the page tables (memfd and hugetlb, if it was opened [for
    /// them](Userfaultfd::open_for_minor_faults)). Answered with the file's pages.
    Minor,
    /// Both kinds, for a file. A missing page is answered like a minor fault, once the file has the page.
    MissingOrMinor,
}

impl Mode {
    /// Bits of `UFFDIO_REGISTER_MODE_*`.
    const fn bit(self) -> u64 {
        match self {
            Mode::Missing | Mode::MissingCopied => 1 << 0,
            Mode::Minor => 1 << 2,
            Mode::MissingOrMinor => Mode::Missing.bit() | Mode::Minor.bit(),
        }
    }

    /// The requests needed to answer such a fault, as bits of `uffdio_register.ioctls`.
    const fn answers(self) -> u64 {
        match self {
            Mode::Missing => IOCTL_WAKE | IOCTL_ZEROPAGE,
            Mode::MissingCopied => IOCTL_WAKE | IOCTL_COPY,
            Mode::Minor | Mode::MissingOrMinor => IOCTL_WAKE | IOCTL_CONTINUE,
        }
    }
}

/// Whether a caller with this error of the system call may still use the device (Linux 6.1), which has
/// its own permissions.
fn is_for_the_device(refused: io::Error) -> Result<(), UserfaultfdError> {
    match refused.raw_os_error() {
        Some(libc::EPERM) => Ok(()),
        Some(libc::ENOSYS) => Err(UserfaultfdError::NotSupported),
        _ => Err(UserfaultfdError::Call { call: "userfaultfd", source: refused }),
    }
}

/// Layout of `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// Layout of `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// Layout of `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// Layout of `struct uffdio_zeropage` and `struct uffdio_continue`, which is the same.
#[repr(C)]
struct Fill {
    range: Range,
    mode: u64,
    /// Bytes done, or the negative errno if none.
    done: i64,
}

/// Layout of `struct uffdio_move` and `struct uffdio_copy`, which is the same.
#[repr(C)]
struct Transfer {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    /// Bytes done, or the negative errno if none.
    done: i64,
}

/// `USERFAULTFD_IOC` and `UFFDIO`: the type of all these requests, and the version of the interface (`UFFD_API`).
const UFFD: u8 = 0xAA;
const IOCTL_WAKE: u64 = 1 << 0x02;
const IOCTL_COPY: u64 = 1 << 0x03;
const IOCTL_ZEROPAGE: u64 = 1 << 0x04;
const IOCTL_CONTINUE: u64 = 1 << 0x07;
const FEATURE_MINOR_HUGETLBFS: u64 = 1 << 9;
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const FEATURE_MOVE: u64 = 1 << 16;
/// Wakes no thread: waiting threads are woken when the whole range is in order.
const COPY_MODE_DONTWAKE: u64 = 1 << 0;
const MOVE_MODE_DONTWAKE: u64 = 1 << 0;
const MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;
const CONTINUE_MODE_DONTWAKE: u64 = 1 << 0;

nix::ioctl_write_int_bad!(userfaultfd_new, nix::request_code_none!(UFFD, 0x00));
nix::ioctl_readwrite!(uffdio_api, UFFD, 0x3F, Api);
nix::ioctl_readwrite!(uffdio_register, UFFD, 0x00, Register);
// The header calls these two `_IOR`, though the kernel reads their argument.
nix::ioctl_read!(uffdio_unregister, UFFD, 0x01, Range);
nix::ioctl_read!(uffdio_wake, UFFD, 0x02, Range);
nix::ioctl_readwrite!(uffdio_copy, UFFD, 0x03, Transfer);
nix::ioctl_readwrite!(uffdio_zeropage, UFFD, 0x04, Fill);
nix::ioctl_readwrite!(uffdio_move, UFFD, 0x05, Transfer);
nix::ioctl_readwrite!(uffdio_continue, UFFD, 0x07, Fill);

/// Size of `struct uffd_msg`, in bytes.
const MESSAGE_BYTES: usize = 32;

/// Number of messages fetched per call: as many as vCPUs and device threads usually fault at the same time.
pub(crate) const MESSAGES_PER_READ: usize = 16;

/// One `struct uffd_msg`, as far as it is used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// A thread waits for the missing page at this address (the kernel reports the address of the page, not
    /// of the access).
    Fault(Hva),
    /// A thread waits until the page at this address is mapped: the file has it.
    MinorFault(Hva),
    /// Number of another event. None is requested.
    Other(u8),
}

impl Message {
    /// `event` is the first byte; a fault's address follows eight bytes of head and eight of flags.
    fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Message {
        const PAGEFAULT: u8 = 0x12;
        const PAGEFAULT_FLAG_MINOR: u64 = 1 << 2;
        let [_head, flags, address, _tail] = bytes.as_chunks().0 else { unreachable!("a message is four words") };
        let address = Hva::new(u64::from_ne_bytes(*address));
        match bytes[0] {
            PAGEFAULT if u64::from_ne_bytes(*flags) & PAGEFAULT_FLAG_MINOR != 0 => Message::MinorFault(address),
            PAGEFAULT => Message::Fault(address),
            event => Message::Other(event),
        }
    }
}

/// An open userfaultfd with an agreed interface. Reading never blocks: wait with `poll(2)`.
#[derive(Debug)]
pub(crate) struct Userfaultfd {
    file: File,
    opened_by: &'static str,
}

impl Userfaultfd {
    /// Opens one that also sees faults in kernel mode: by the system call or, if that is not permitted, by the
    /// device (Linux 6.1).
    pub(crate) fn open() -> Result<Userfaultfd, UserfaultfdError> {
        Userfaultfd::open_with(0)
    }

    /// Opens one that can also move pages.
    pub(crate) fn open_for_moves() -> Result<Userfaultfd, UserfaultfdError> {
        Userfaultfd::open_with(FEATURE_MOVE).map_err(|error| unknown_feature(error, UserfaultfdError::NoMove))
    }

    /// Opens one that can also report minor faults.
    pub(crate) fn open_for_minor_faults() -> Result<Userfaultfd, UserfaultfdError> {
        let features = FEATURE_MINOR_SHMEM | FEATURE_MINOR_HUGETLBFS;
        Userfaultfd::open_with(features).map_err(|error| unknown_feature(error, UserfaultfdError::NoMinor))
    }

    fn open_with(features: u64) -> Result<Userfaultfd, UserfaultfdError> {
        const FLAGS: libc::c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let (fd, opened_by) = match KEPT_DEVICE.get() {
            Some(device) => (new_of(device, FLAGS)?, DEVICE),
            None => open_new(FLAGS)?,
        };
        // SAFETY: the descriptor is new and nothing else owns it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut api = Api { api: u64::from(UFFD), features, ioctls: 0 };
        // SAFETY: the argument is the kernel's structure and lives until the call returns.
        let agreed = unsafe { uffdio_api(file.as_raw_fd(), &mut api) };
        agreed.map_err(|errno| UserfaultfdError::Call { call: API, source: errno.into() })?;
        Ok(Userfaultfd { file, opened_by })
    }

    /// Name of the way by which it was opened.
    pub(crate) fn opened_by(&self) -> &'static str {
        self.opened_by
    }

    /// Makes such faults in the range, which is memory of this process, wait for an answer from now on. `EBUSY` if
    /// another userfaultfd has it; `Unsupported` if such faults of such memory could not be answered.
    pub(crate) fn register(&self, start: Hva, bytes: Bytes, mode: Mode) -> io::Result<()> {
        let mut argument = Register { range: range(start, bytes), mode: mode.bit(), ioctls: 0 };
        // SAFETY: the argument is the kernel's structure and lives until the call returns. The contents of memory do
        // not change; a faulting thread waits, at most as long as `self` lives.
        unsafe { uffdio_register(self.file.as_raw_fd(), &mut argument) }?;
        if argument.ioctls & mode.answers() == mode.answers() {
            return Ok(());
        }
        self.unregister(start, bytes)?;
        let refusal = format!("{mode:?} faults of this memory cannot be answered");
        Err(io::Error::new(io::ErrorKind::Unsupported, refusal))
    }

    /// Lets the kernel answer the range's faults itself again, and wakes the threads that wait there, which retry.
    /// A range that is not registered is left as it is. `ENOMEM` if this would need one mapping more than the
    /// process may have.
    pub(crate) fn unregister(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        let mut argument = range(start, bytes);
        // SAFETY: the argument is the kernel's structure and lives until the call returns; no memory changes.
        unsafe { uffdio_unregister(self.file.as_raw_fd(), &mut argument) }?;
        Ok(())
    }

    /// Wakes the threads that wait in the range, which retry.
    pub(crate) fn wake(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        let mut argument = range(start, bytes);
        // SAFETY: the argument is the kernel's structure and lives until the call returns; no memory changes.
        unsafe { uffdio_wake(self.file.as_raw_fd(), &mut argument) }?;
        Ok(())
    }

    /// Maps the zero page over missing pages of a registered range and wakes the threads that wait there. `EEXIST`
    /// for an existing page, `ENOENT` for a range that is no longer registered.
    pub(crate) fn zero_page(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        let mut argument = Fill { range: range(start, bytes), mode: 0, done: 0 };
        // SAFETY: the argument is the kernel's structure and lives until the call returns. Only missing pages of
        // registered anonymous memory are filled, with the zeroes they would read anyway.
        unsafe { uffdio_zeropage(self.file.as_raw_fd(), &mut argument) }?;
        Ok(())
    }

    /// Maps the pages that the file has in a range registered for minor faults: a hugetlb page whole, memfd
    /// memory as base pages whatever its folios. Wakes no thread. Returns the bytes done, which may be less than
    /// all; `Err` if none were done (`EEXIST`: the first page is mapped; `EFAULT`: the file has none there;
    /// `ENOENT`: not registered).
    pub(crate) fn map_file_pages(&self, start: Hva, bytes: Bytes) -> io::Result<Bytes> {
        let mut argument = Fill { range: range(start, bytes), mode: CONTINUE_MODE_DONTWAKE, done: 0 };
        // SAFETY: the argument is the kernel's structure and lives until the call returns. What memory holds does not
        // change: what is mapped is what a touch would have found.
        let answer = unsafe { uffdio_continue(self.file.as_raw_fd(), &mut argument) };
        done(answer, bytes, argument.done)
    }

    /// Moves the pages of `from` to `to`, of equal size, without copying them: a huge page stays whole if both begin
    /// at one and `to` has no page table. Holes stay holes. `to` must be registered here and must have no page where
    /// `from` has one. Wakes no thread. Returns the bytes done, which may be less than all; `Err` if none were done
    /// (`EAGAIN`: try again; `EBUSY`: the first page is pinned or shared; `EEXIST`: `to` has it already).
    pub(crate) fn move_pages(&self, from: Piece<'_>, to: Piece<'_>) -> io::Result<Bytes> {
        let mut argument = transfer(from, to, MOVE_MODE_DONTWAKE | MOVE_MODE_ALLOW_SRC_HOLES);
        // SAFETY: the argument is the kernel's structure and lives until the call returns. Both ranges are pieces,
        // and their memory stays mapped. No existing page is overwritten, and a page that went is missing at its old
        // place: if that is registered here, as all memory within reach of a guest or an owner is, a thread that
        // reaches for it waits until it is back. A `FillSlot` is not: no reference into it exists during the call.
        let answer = unsafe { uffdio_move(self.file.as_raw_fd(), &mut argument) };
        done(answer, Bytes::new(argument.len), argument.done)
    }

    /// Fills missing pages of `to`, which is registered here, with copies of those of `from`. Wakes no thread. All
    /// pages of `from` must exist: a fault in it, if it is registered itself, would wait for its own answer.
    pub(crate) fn copy_pages(&self, from: Piece<'_>, to: Piece<'_>) -> io::Result<Bytes> {
        let mut argument = transfer(from, to, COPY_MODE_DONTWAKE);
        // SAFETY: as for a move, but `from` keeps its pages too: only missing pages of registered memory are filled.
        let answer = unsafe { uffdio_copy(self.file.as_raw_fd(), &mut argument) };
        done(answer, Bytes::new(argument.len), argument.done)
    }

    /// The next message that is waiting, if there is one: several threads share the messages of one descriptor.
    pub(crate) fn read_one(&self) -> io::Result<Option<Message>> {
        let mut buffer = [0; MESSAGE_BYTES];
        match (&self.file).read(&mut buffer) {
            Ok(_) => Ok(Some(Message::parse(&buffer))),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Appends the messages that are waiting, at most 16 (`MESSAGES_PER_READ`). An interrupted read found none: the
    /// kernel looks for messages before it looks for signals (`userfaultfd_ctx_read` in fs/userfaultfd.c).
    pub(crate) fn read(&self, messages: &mut Vec<Message>) -> io::Result<()> {
        let mut buffer = [0; MESSAGE_BYTES * MESSAGES_PER_READ];
        match (&self.file).read(&mut buffer) {
            Ok(count) => messages.extend(buffer[..count].as_chunks().0.iter().map(Message::parse)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

const API: &str = "UFFDIO_API";
const DEVICE: &str = "/dev/userfaultfd";

/// Device that [`keep_device`] has opened, if it has.
static KEPT_DEVICE: OnceLock<File> = OnceLock::new();

/// Opens the device for the lifetime of the process: [`Userfaultfd`]s come from it from now on.
pub(crate) fn keep_device() -> io::Result<()> {
    if KEPT_DEVICE.get().is_none() {
        // If another thread was faster, its descriptor is as good.
        let _ = KEPT_DEVICE.set(open_device()?);
    }
    Ok(())
}

fn open_device() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(DEVICE)
}

/// Opens one by the system call or, if that is not permitted, by the device. Also returns the name of the way.
fn open_new(flags: libc::c_int) -> Result<(RawFd, &'static str), UserfaultfdError> {
    // SAFETY: the call takes flags and nothing else, and returns a new descriptor.
    let result = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if let Some(fd) = RawFd::try_from(result).ok().filter(|fd| *fd >= 0) {
        return Ok((fd, "userfaultfd(2)"));
    }
    is_for_the_device(io::Error::last_os_error())?;
    let device = open_device().map_err(|device| UserfaultfdError::NotPermitted { device })?;
    Ok((new_of(&device, flags)?, DEVICE))
}

fn new_of(device: &File, flags: libc::c_int) -> Result<RawFd, UserfaultfdError> {
    // SAFETY: the argument is flags, no pointer; the answer is a new descriptor.
    unsafe { userfaultfd_new(device.as_raw_fd(), flags) }
        .map_err(|errno| UserfaultfdError::Call { call: "USERFAULTFD_IOC_NEW", source: errno.into() })
}

fn range(start: Hva, bytes: Bytes) -> Range {
    Range { start: start.get(), len: bytes.get() }
}

fn transfer(from: Piece<'_>, to: Piece<'_>, mode: u64) -> Transfer {
    assert_eq!(from.bytes(), to.bytes(), "as much goes as comes");
    Transfer { dst: to.start().get(), src: from.start().get(), len: from.bytes().get(), mode, done: 0 }
}

/// Converts the answer: a request that stops half-way returns `EAGAIN` with the bytes it did.
fn done(answer: nix::Result<libc::c_int>, asked: Bytes, done: i64) -> io::Result<Bytes> {
    match (answer, u64::try_from(done)) {
        (Ok(_), _) => Ok(asked),
        (Err(Errno::EAGAIN), Ok(bytes)) if bytes > 0 => Ok(Bytes::new(bytes)),
        (Err(errno), _) => Err(errno.into()),
    }
}

/// Converts `EINVAL`, the answer of `UFFDIO_API` to an unknown feature.
fn unknown_feature(error: UserfaultfdError, missing: UserfaultfdError) -> UserfaultfdError {
    match error {
        UserfaultfdError::Call { call: API, source } if source.raw_os_error() == Some(libc::EINVAL) => missing,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::host::{Advice, Host, linux::LinuxHost};
    use crate::region::GuestRam;
    use crate::sensors::host_backing::window_backing;
    use proptest::prelude::*;
    use std::sync::atomic::Ordering;
    use wideleaf_policies::{Backing, Gpa, GpaRange, PageSize, WindowIndex};

    #[test]
    fn the_requests_have_the_numbers_of_the_header() {
        // From a C program that prints the header's macros on x86-64.
        assert_eq!(nix::request_code_none!(UFFD, 0x00), 0xaa00);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x3F, size_of::<Api>()), 0xc018_aa3f);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x00, size_of::<Register>()), 0xc020_aa00);
        assert_eq!(nix::request_code_read!(UFFD, 0x01, size_of::<Range>()), 0x8010_aa01);
        assert_eq!(nix::request_code_read!(UFFD, 0x02, size_of::<Range>()), 0x8010_aa02);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x03, size_of::<Transfer>()), 0xc028_aa03);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x04, size_of::<Fill>()), 0xc020_aa04);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x05, size_of::<Transfer>()), 0xc028_aa05);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x07, size_of::<Fill>()), 0xc020_aa07);
    }

    #[test]
    fn a_transfer_that_stopped_half_way_returns_the_bytes_done() {
        let asked = PageSize::Huge2M.bytes();
        let again = |done| super::done(Err(Errno::EAGAIN), asked, done).map_err(|error| error.raw_os_error());
        assert_eq!(again(4096), Ok(Bytes::new(4096)));
        assert_eq!(again(-i64::from(libc::EAGAIN)), Err(Some(libc::EAGAIN)));
        assert_eq!(again(0), Err(Some(libc::EAGAIN)), "the mapping was just changing: nothing was tried");
    }

    #[test]
    fn a_touch_of_a_page_that_only_the_file_has_waits_until_it_is_mapped() {
        let bytes = PageSize::Huge2M.bytes();
        let backing = BackingConfig::new(BackingKind::Memfd, PageSize::Base4K).expect("memfd has base pages");
        let ram = GuestRam::map(&[GpaRange::new(Gpa::new(0), bytes).expect("fits")], backing).expect("memory");
        let window = ram.window(wideleaf_policies::WindowIndex::new(0));
        let (start, word) = (window.start(), &window.words()[9]);
        window.words().iter().step_by(512).for_each(|word| word.store(7, Ordering::Relaxed));
        word.store(42, Ordering::Relaxed);
        let uffd = match Userfaultfd::open_for_minor_faults() {
            Ok(uffd) => uffd,
            Err(error) => return println!("skipped: {error}"),
        };
        uffd.register(start, bytes, Mode::Minor).expect("nothing else watches");
        window.discard().expect("it is mapped");
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| word.load(Ordering::Relaxed));
            let mut messages = Vec::new();
            while messages.is_empty() && !reader.is_finished() {
                uffd.read(&mut messages).expect("it is open");
                std::thread::yield_now();
            }
            assert_eq!(messages, [Message::MinorFault(start)], "not {messages:?}");
            assert_eq!(uffd.map_file_pages(start, bytes).expect("the file has all of it"), bytes);
            uffd.wake(start, bytes).expect("it is registered");
            assert_eq!(reader.join().expect("it reads"), 42, "the file kept what was written");
        });
        let again = uffd.map_file_pages(start, bytes).expect_err("all of it is mapped");
        assert_eq!(again.raw_os_error(), Some(libc::EEXIST));
    }

    #[test]
    fn anonymous_memory_has_no_call_that_maps_a_part_of_a_waiting_huge_page() {
        let (window, page) = (PageSize::Huge2M.bytes(), PageSize::Base4K.bytes());
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = GuestRam::map(&[GpaRange::new(Gpa::new(0), window * 2).expect("fits")], backing).expect("memory");
        let uffd = match Userfaultfd::open_for_minor_faults() {
            Ok(uffd) => uffd,
            Err(error) => return println!("skipped: {error}"),
        };
        let refused = uffd.register(ram.base(), window, Mode::Minor).expect_err("it is not a file's");
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL), "so UFFDIO_CONTINUE has nothing to continue");
        drop(uffd);
        let uffd = match Userfaultfd::open_for_moves() {
            Ok(uffd) => uffd,
            Err(error) => return println!("skipped, in part: {error}"),
        };
        let host = LinuxHost::open().expect("there is /proc");
        let is_huge = || {
            let seen = window_backing(&host, ram.ranges()[0], None, WindowIndex::new(0)).expect("it is RAM");
            seen.backing == Backing::Huge2M
        };
        for advice in [Advice::HugePage, Advice::PopulateWrite] {
            host.advise(ram.base(), window, advice).expect("memory");
        }
        if !is_huge() {
            return println!("skipped, in part: no huge page is available here");
        }
        let (from, to) = (ram.window(WindowIndex::new(0)), ram.window(WindowIndex::new(1)));
        uffd.register(to.start(), window, Mode::Missing).expect("nothing else watches");
        let moved = uffd.move_pages(from.part(page, page), to.part(page, page)).expect("it is not pinned");
        assert_eq!((moved, is_huge()), (page, false), "a piece is moved, but the huge page is split for it");
    }

    proptest! {
        #[test]
        fn a_fault_is_parsed_whatever_the_other_bytes_are(
            address: u64, head in any::<[u8; 7]>(), flags: u64, tail in any::<[u8; 8]>()
        ) {
            let bytes = [&[0x12][..], &head, &flags.to_ne_bytes(), &address.to_ne_bytes(), &tail].concat();
            let message = Message::parse(&bytes.try_into().expect("1 + 7 + 8 + 8 + 8 bytes are a message"));
            let is_minor = flags & 0b100 != 0;
            let kind = if is_minor { Message::MinorFault } else { Message::Fault };
            prop_assert_eq!(message, kind(Hva::new(address)));
        }

        #[test]
        fn any_other_event_is_its_number(
            mut bytes: [u8; 32], event in any::<u8>().prop_filter("no fault", |e| *e != 0x12)
        ) {
            bytes[0] = event;
            prop_assert_eq!(Message::parse(&bytes), Message::Other(event));
        }
    }

    #[test]
    fn a_kernel_without_userfaultfd_and_one_that_forbids_it_are_distinguished() {
        let of = |errno| is_for_the_device(io::Error::from_raw_os_error(errno));
        assert!(of(libc::EPERM).is_ok(), "the device is asked next");
        assert!(matches!(of(libc::ENOSYS), Err(UserfaultfdError::NotSupported)));
        assert!(matches!(of(libc::EMFILE), Err(UserfaultfdError::Call { call: "userfaultfd", .. })));
    }
}
