//! The host's end of a network card's cable: a tap, by name.

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

/// Bytes of a name: `IFNAMSIZ`, less the zero at its end.
const NAME_BYTES_MAX: usize = 15;

/// A tap that this process has opened. One that it has made is gone when this is.
#[derive(Debug)]
pub struct Tap {
    tun: File,
    name: String,
    mtu: u32,
    is_made: bool,
}

/// Why there is no tap.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The kernel has no such names.
    #[error("{0:?} is no name of an interface: 1 to 15 characters, no space, no `/`, `:` or `%`")]
    Name(String),
    /// The kernel has no taps, or hides them.
    #[error("cannot open {DEVICE}: {0}; taps need the module tun (`modprobe tun`) and the right to use it")]
    NoDevice(io::Error),
    /// It is not there, and making it is root's.
    #[error("there is no tap {name}, and only root makes one: sudo ip tuntap add dev {name} mode tap user $USER")]
    Absent {
        /// Its name.
        name: String,
    },
    /// It is somebody else's.
    #[error("tap {name} is not this user's: sudo ip tuntap add dev {name} mode tap user $USER makes one that is")]
    NotOurs {
        /// Its name.
        name: String,
    },
    /// Another program has it.
    #[error("tap {name} is in use by another program: a tap is one guest's")]
    Taken {
        /// Its name.
        name: String,
    },
    /// There is something else of this name.
    #[error("{name} is no tap, or one of several queues: `ip tuntap` lists the taps there are")]
    NoTap {
        /// Its name.
        name: String,
    },
    /// The kernel said no to something else.
    #[error("tap {name}: cannot {what}: {source}")]
    Host {
        /// Its name.
        name: String,
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl Tap {
    /// Opens the tap of this name; where there is none, makes one for as long as it is open, and switches it on.
    ///
    /// # Errors
    /// [`TapError`]; no tap was made then.
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

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The largest packet that it carried when it was opened.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Whether it was made for this process, and ends with it.
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
    fn what_is_no_tap_is_told_apart_from_what_is_taken_absent_or_another_s() {
        let said = |errno: Errno, is_made| cannot_attach("tap0", is_made, errno.into()).to_string();
        assert!(said(Errno::EPERM, true).starts_with("there is no tap tap0"));
        assert!(said(Errno::EPERM, false).starts_with("tap tap0 is not this user's"));
        assert!(said(Errno::EBUSY, false).contains("in use by another program"));
        assert!(said(Errno::EINVAL, false).starts_with("tap0 is no tap"));
        assert!(said(Errno::ENOMEM, true).starts_with("tap tap0: cannot open it: "));
    }
}
