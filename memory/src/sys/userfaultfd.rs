//! `userfaultfd(2)`: page faults of a range of memory handed to this process, and answered by it. The structures and
//! numbers are those of `ioctl_userfaultfd(2)` and include/uapi/linux/userfaultfd.h.
//!
//! Only missing faults of anonymous memory are asked for, and no event but faults. Closing the descriptor (dropping
//! the value) unregisters every range and wakes whoever waits.
//!
//! Pages are moved and copied between [`Piece`]s only: memory that nobody reaches but as atomic words.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use wideleaf_policies::{Bytes, Hva};

use crate::sys::mapping::Piece;

/// Why there is no userfaultfd.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultfdError {
    /// The kernel was built without it.
    #[error("this kernel has no userfaultfd (CONFIG_USERFAULTFD)")]
    NotSupported,
    /// The caller may not have one that sees the kernel's own faults. A vCPU faults in kernel mode, inside `KVM_RUN`,
    /// so the weaker one that anybody may have (`UFFD_USER_MODE_ONLY`) would fail the guest.
    #[error(
        "userfaultfd is not permitted, and a vCPU's faults are the kernel's: run as root (CAP_SYS_PTRACE), or set \
         vm.unprivileged_userfaultfd=1, or let this user open /dev/userfaultfd ({device})"
    )]
    NotPermitted {
        /// What opening the device answered.
        device: io::Error,
    },
    /// It is there, and cannot move pages.
    #[error("this kernel's userfaultfd cannot move pages (UFFDIO_MOVE, Linux 6.8)")]
    NoMove,
    /// A call failed.
    #[error("{call}: {source}")]
    Call {
        /// Which.
        call: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct ZeroPage {
    range: Range,
    mode: u64,
    zeropage: i64,
}

/// `struct uffdio_move` and `struct uffdio_copy`, which are alike.
#[repr(C)]
struct Transfer {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    /// Bytes done, or the negative errno where there are none.
    done: i64,
}

/// `USERFAULTFD_IOC` and `UFFDIO`: the type of all these requests, and the version of the interface (`UFFD_API`).
const UFFD: u8 = 0xAA;
const REGISTER_MODE_MISSING: u64 = 1 << 0;
const IOCTL_WAKE: u64 = 1 << 0x02;
const IOCTL_ZEROPAGE: u64 = 1 << 0x04;
const FEATURE_MOVE: u64 = 1 << 16;
/// Wakes nobody: whoever waits is woken when the whole range is in order.
const COPY_MODE_DONTWAKE: u64 = 1 << 0;
const MOVE_MODE_DONTWAKE: u64 = 1 << 0;
const MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;

nix::ioctl_write_int_bad!(userfaultfd_new, nix::request_code_none!(UFFD, 0x00));
nix::ioctl_readwrite!(uffdio_api, UFFD, 0x3F, Api);
nix::ioctl_readwrite!(uffdio_register, UFFD, 0x00, Register);
// The header calls these two `_IOR`, though the kernel reads their argument.
nix::ioctl_read!(uffdio_unregister, UFFD, 0x01, Range);
nix::ioctl_read!(uffdio_wake, UFFD, 0x02, Range);
nix::ioctl_readwrite!(uffdio_copy, UFFD, 0x03, Transfer);
nix::ioctl_readwrite!(uffdio_zeropage, UFFD, 0x04, ZeroPage);
nix::ioctl_readwrite!(uffdio_move, UFFD, 0x05, Transfer);

/// Size of `struct uffd_msg`.
const MESSAGE_BYTES: usize = 32;

/// Messages fetched per call: as many as vCPUs and device threads usually fault at once.
const MESSAGES_PER_READ: usize = 16;

/// One `struct uffd_msg`, as far as it is of use here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Somebody waits for the page at this address (the kernel gives the address of the page, not of the access).
    Fault(Hva),
    /// An event by its number. None is asked for.
    Other(u8),
}

impl Message {
    /// `event` is the first byte; a fault's address follows eight bytes of head and eight of flags.
    fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Message {
        const PAGEFAULT: u8 = 0x12;
        match bytes {
            [PAGEFAULT, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, a, b, c, d, e, f, g, h, ..] => {
                Message::Fault(Hva::new(u64::from_ne_bytes([*a, *b, *c, *d, *e, *f, *g, *h])))
            }
            [event, ..] => Message::Other(*event),
        }
    }
}

/// An open userfaultfd that speaks the interface. Reading never blocks: wait with `poll(2)`.
#[derive(Debug)]
pub(crate) struct Userfaultfd {
    file: File,
    opened_by: &'static str,
}

impl Userfaultfd {
    /// Opens one that sees faults of kernel mode too: by the system call, or where that is not permitted by the device
    /// (Linux 6.1).
    pub(crate) fn open() -> Result<Userfaultfd, UserfaultfdError> {
        Userfaultfd::open_with(0)
    }

    /// Opens one that can also move pages.
    pub(crate) fn open_for_moves() -> Result<Userfaultfd, UserfaultfdError> {
        match Userfaultfd::open_with(FEATURE_MOVE) {
            // What `UFFDIO_API` answers to a feature that it does not know.
            Err(UserfaultfdError::Call { call: API, source }) if source.raw_os_error() == Some(libc::EINVAL) => {
                Err(UserfaultfdError::NoMove)
            }
            opened => opened,
        }
    }

    fn open_with(features: u64) -> Result<Userfaultfd, UserfaultfdError> {
        const FLAGS: libc::c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call takes flags and nothing else, and returns a new descriptor.
        let result = unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) };
        let (fd, opened_by) = match RawFd::try_from(result) {
            Ok(fd) if fd >= 0 => (fd, "userfaultfd(2)"),
            _ => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENOSYS) => return Err(UserfaultfdError::NotSupported),
                error if error.raw_os_error() == Some(libc::EPERM) => (open_device(FLAGS)?, DEVICE),
                source => return Err(UserfaultfdError::Call { call: "userfaultfd", source }),
            },
        };
        // SAFETY: the descriptor is new and nobody else owns it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut api = Api { api: u64::from(UFFD), features, ioctls: 0 };
        // SAFETY: the argument is the kernel's structure and lives until the call returns.
        let agreed = unsafe { uffdio_api(file.as_raw_fd(), &mut api) };
        agreed.map_err(|errno| UserfaultfdError::Call { call: API, source: errno.into() })?;
        Ok(Userfaultfd { file, opened_by })
    }

    /// Which of the two ways it was opened by.
    pub(crate) fn opened_by(&self) -> &'static str {
        self.opened_by
    }

    /// From now on a touch of a page that is not there waits until it is answered. The range must be anonymous memory
    /// of this process.
    pub(crate) fn register_missing(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        let mut argument = Register { range: range(start, bytes), mode: REGISTER_MODE_MISSING, ioctls: 0 };
        // SAFETY: the argument is the kernel's structure and lives until the call returns. What memory holds does not
        // change; a touch of a missing page waits.
        unsafe { uffdio_register(self.file.as_raw_fd(), &mut argument) }?;
        let needed = IOCTL_WAKE | IOCTL_ZEROPAGE;
        if argument.ioctls & needed == needed {
            return Ok(());
        }
        self.unregister(start, bytes)?;
        Err(io::Error::new(io::ErrorKind::Unsupported, "faults of this memory can not be answered with zero pages"))
    }

    /// The kernel answers the range's faults itself again; whoever waits there is woken and tries again. A range that
    /// is not registered is left as it is. `ENOMEM` where this would need one mapping more than the process may have.
    pub(crate) fn unregister(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        let mut argument = range(start, bytes);
        // SAFETY: the argument is the kernel's structure and lives until the call returns; no memory changes.
        unsafe { uffdio_unregister(self.file.as_raw_fd(), &mut argument) }?;
        Ok(())
    }

    /// Whoever waits in the range tries again.
    pub(crate) fn wake(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        let mut argument = range(start, bytes);
        // SAFETY: the argument is the kernel's structure and lives until the call returns; no memory changes.
        unsafe { uffdio_wake(self.file.as_raw_fd(), &mut argument) }?;
        Ok(())
    }

    /// Maps the zero page over missing pages of a registered range and wakes whoever waits there. A page that is
    /// there is `EEXIST`, a range that is no longer registered `ENOENT`.
    pub(crate) fn zero_page(&self, start: Hva, bytes: Bytes) -> io::Result<()> {
        let mut argument = ZeroPage { range: range(start, bytes), mode: 0, zeropage: 0 };
        // SAFETY: the argument is the kernel's structure and lives until the call returns. Only missing pages of
        // registered anonymous memory are filled, with the zeroes they would read anyway.
        unsafe { uffdio_zeropage(self.file.as_raw_fd(), &mut argument) }?;
        Ok(())
    }

    /// Moves the pages of `from` to `to`, of equal size, without copying them: a huge page stays whole where both begin at
    /// one and `to` has no page table. Holes stay holes. `to` must be registered here and must have no page where `from`
    /// has one. Wakes nobody. Returns how far it came, which may be less than all; `Err` where it did not come anywhere
    /// (`EAGAIN`: try again; `EBUSY`: the first page is pinned or shared; `EEXIST`: `to` has it already).
    pub(crate) fn move_pages(&self, from: Piece<'_>, to: Piece<'_>) -> io::Result<Bytes> {
        let mut argument = transfer(from, to, MOVE_MODE_DONTWAKE | MOVE_MODE_ALLOW_SRC_HOLES);
        // SAFETY: the argument is the kernel's structure and lives until the call returns. Both ranges are pieces, whose
        // memory is reached as atomic words only: that words change is a store like any other.
        let answer = unsafe { uffdio_move(self.file.as_raw_fd(), &mut argument) };
        done(answer, &argument)
    }

    /// Fills missing pages of `to`, which is registered here, with copies of those of `from`. Wakes nobody. All of `from`
    /// must be there: a fault in it, where it is registered itself, would wait for its own answer.
    pub(crate) fn copy_pages(&self, from: Piece<'_>, to: Piece<'_>) -> io::Result<Bytes> {
        let mut argument = transfer(from, to, COPY_MODE_DONTWAKE);
        // SAFETY: as for a move; what `from` holds does not change.
        let answer = unsafe { uffdio_copy(self.file.as_raw_fd(), &mut argument) };
        done(answer, &argument)
    }

    /// Appends the messages that are waiting, at most 16 of them (`MESSAGES_PER_READ`).
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

fn open_device(flags: libc::c_int) -> Result<RawFd, UserfaultfdError> {
    let device = OpenOptions::new().read(true).write(true).open(DEVICE);
    let device = device.map_err(|device| UserfaultfdError::NotPermitted { device })?;
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

/// A transfer that stopped half-way is `EAGAIN` with the bytes it did.
fn done(answer: nix::Result<libc::c_int>, argument: &Transfer) -> io::Result<Bytes> {
    match (answer, u64::try_from(argument.done)) {
        (Ok(_), _) => Ok(Bytes::new(argument.len)),
        (Err(Errno::EAGAIN), Ok(bytes)) if bytes > 0 => Ok(Bytes::new(bytes)),
        (Err(errno), _) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_requests_have_the_numbers_of_the_header() {
        // From a C program that prints the header's macros on x86-64.
        assert_eq!(nix::request_code_none!(UFFD, 0x00), 0xaa00);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x3F, size_of::<Api>()), 0xc018_aa3f);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x00, size_of::<Register>()), 0xc020_aa00);
        assert_eq!(nix::request_code_read!(UFFD, 0x01, size_of::<Range>()), 0x8010_aa01);
        assert_eq!(nix::request_code_read!(UFFD, 0x02, size_of::<Range>()), 0x8010_aa02);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x03, size_of::<Transfer>()), 0xc028_aa03);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x04, size_of::<ZeroPage>()), 0xc020_aa04);
        assert_eq!(nix::request_code_readwrite!(UFFD, 0x05, size_of::<Transfer>()), 0xc028_aa05);
    }

    #[test]
    fn a_transfer_that_stopped_half_way_says_how_far_it_came() {
        let stopped_at = |done| Transfer { dst: 0, src: 0, len: 1 << 21, mode: 0, done };
        let again = |done| super::done(Err(Errno::EAGAIN), &stopped_at(done)).map_err(|error| error.raw_os_error());
        assert_eq!(again(4096), Ok(Bytes::new(4096)));
        assert_eq!(again(-i64::from(libc::EAGAIN)), Err(Some(libc::EAGAIN)));
        assert_eq!(again(0), Err(Some(libc::EAGAIN)), "the mapping was just changing: nothing was tried");
    }

    proptest! {
        #[test]
        fn a_fault_is_its_address_whatever_stands_around_it(
            address: u64, head in any::<[u8; 7]>(), flags in any::<[u8; 8]>(), tail in any::<[u8; 8]>()
        ) {
            let bytes = [&[0x12][..], &head, &flags, &address.to_ne_bytes(), &tail].concat();
            let message = Message::parse(&bytes.try_into().expect("1 + 7 + 8 + 8 + 8 bytes are a message"));
            prop_assert_eq!(message, Message::Fault(Hva::new(address)));
        }

        #[test]
        fn any_other_event_is_its_number(mut bytes: [u8; 32], event in any::<u8>().prop_filter("no fault", |e| *e != 0x12)) {
            bytes[0] = event;
            prop_assert_eq!(Message::parse(&bytes), Message::Other(event));
        }
    }
}
