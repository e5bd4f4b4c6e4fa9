//! The host's end of a network card's cable: a tap, opened by name.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;

use super::{HEADER_BYTES, Link};
pub use crate::sys::tap::Offload;
use crate::sys::tap::{attach, bring_up, mtu, set_offload};

const DEVICE: &str = "/dev/net/tun";

/// Longest name of an interface, in bytes: `IFNAMSIZ` without the zero at its end.
const NAME_BYTES_MAX: usize = 15;

/// A tap that this process has opened. A tap that it has created disappears when this is dropped.
#[derive(Debug)]
pub struct Tap {
    tun: File,
    name: String,
    mtu: u32,
    is_made: bool,
}

/// The reasons why a tap cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The kernel does not allow the name.
    #[error("cannot open tap {0:?}: an interface's name has 1 to 15 characters, no space, no `/`, `:` or `%`")]
    Name(String),
    /// The kernel has no taps, or this process may not use them.
    #[error("cannot open {DEVICE}: {0}; load the module tun (`modprobe tun`) and allow this user to open the device")]
    NoDevice(io::Error),
    /// The tap does not exist, and this user may not create it.
    #[error(
        "cannot open tap {name}: it does not exist; create it with `sudo ip tuntap add dev {name} mode tap user $USER`"
    )]
    Absent {
        /// Name of the tap.
        name: String,
    },
    /// The tap belongs to another user.
    #[error(
        "cannot open tap {name}: it is another user's; create one of this user with \
         `sudo ip tuntap add dev {name} mode tap user $USER`"
    )]
    NotOurs {
        /// Name of the tap.
        name: String,
    },
    /// Another program has opened it.
    #[error("cannot open tap {name}: it is in use by another program; use one tap per guest")]
    Taken {
        /// Name of the tap.
        name: String,
    },
    /// The interface of this name is not a usable tap.
    #[error("cannot open tap {name}: it is not a tap, or a tap with several queues; `ip tuntap` lists all taps")]
    NoTap {
        /// Name of the interface.
        name: String,
    },
    /// The kernel refused another step.
    #[error("cannot open tap {name}: cannot {what}: {source}")]
    Host {
        /// Name of the tap.
        name: String,
        /// Name of the failed step.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Tap {
    /// Opens the tap of this name and switches it on. If it does not exist, creates one for as long as
    /// this is open.
    ///
    /// # Errors
    /// [`TapError`]; then no tap was created.
    pub fn open(name: &str) -> Result<Tap, TapError> {
        let is_name = (1..=NAME_BYTES_MAX).contains(&name.len())
            && !name.contains(['/', ':', '%'])
            && name.chars().all(|c| c.is_ascii_graphic())
            && !matches!(name, "." | "..");
        if !is_name {
            return Err(TapError::Name(name.to_owned()));
        }
        let is_made = if_nametoindex(name).is_err();
        let tun = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE);
        let tun = tun.map_err(TapError::NoDevice)?;
        attach(&tun, name, HEADER_BYTES as u32).map_err(|error| cannot_attach(name, is_made, error))?;
        let cannot = |what| move |source| TapError::Host { name: name.to_owned(), what, source };
        if is_made {
            bring_up(name).map_err(cannot("switch it on"))?;
        }
        let mtu = mtu(name).map_err(cannot("read its MTU"))?;
        Ok(Tap { tun, name: name.to_owned(), mtu, is_made })
    }

    /// Name of the tap.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Largest packet that it carried when it was opened, in bytes.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Whether it was created for this process, and ends with it.
    pub fn is_made(&self) -> bool {
        self.is_made
    }
}

fn cannot_attach(name: &str, is_made: bool, source: io::Error) -> TapError {
    let name = name.to_owned();
    match source.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EPERM) if is_made => TapError::Absent { name },
        Some(Errno::EPERM) => TapError::NotOurs { name },
        Some(Errno::EBUSY) => TapError::Taken { name },
        Some(Errno::EINVAL) => TapError::NoTap { name },
        _ => TapError::Host { name, what: "open it", source },
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tun.as_fd()
    }
}

impl Link for Tap {
    fn set_offload(&self, offload: Offload) -> io::Result<()> {
        set_offload(self.as_fd(), offload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_interface_can_have_is_refused_before_anything_is_opened() {
        for name in ["", "a-name-of-sixteen", "a b", "tap%d", "a/b", "..", "tap\n", "eth0:1"] {
            assert!(matches!(Tap::open(name), Err(TapError::Name(_))), "{name:?}");
        }
    }

    #[test]
    fn the_error_distinguishes_taps_that_are_absent_foreign_taken_or_not_taps() {
        let said = |errno: Errno, is_made| cannot_attach("tap0", is_made, errno.into()).to_string();
        assert!(said(Errno::EPERM, true).starts_with("cannot open tap tap0: it does not exist;"));
        assert!(said(Errno::EPERM, false).starts_with("cannot open tap tap0: it is another user's;"));
        assert!(said(Errno::EBUSY, false).contains("in use by another program"));
        assert!(said(Errno::EINVAL, false).starts_with("cannot open tap tap0: it is not a tap"));
        assert!(said(Errno::ENOMEM, true).starts_with("cannot open tap tap0: cannot open it:"));
    }
}
