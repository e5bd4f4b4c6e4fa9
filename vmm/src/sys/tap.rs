//! A tap: a network card of the host with a cable that ends in a file descriptor
//! (Documentation/networking/tuntap.rst, drivers/net/tun.c).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// Frames that the tap may deliver although a wire would not carry them: without checksums, and several TCP
/// segments in one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Whether the checksum may be missing.
    pub checksum: bool,
    /// Whether long TCP over IPv4 is allowed. The kernel accepts it only with the checksum.
    pub tcp4: bool,
    /// Whether long TCP over IPv6 is allowed, likewise only with the checksum.
    pub tcp6: bool,
}

mod ioctls {
    nix::ioctl_write_ptr_bad!(set_interface, libc::TUNSETIFF, libc::ifreq);
    nix::ioctl_write_int_bad!(set_offload, libc::TUNSETOFFLOAD);
    nix::ioctl_write_ptr_bad!(set_header_bytes, libc::TUNSETVNETHDRSZ, libc::c_int);
    nix::ioctl_read_bad!(get_flags, libc::SIOCGIFFLAGS, libc::ifreq);
    nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);
    nix::ioctl_read_bad!(get_mtu, libc::SIOCGIFMTU, libc::ifreq);
}

/// Makes an open `/dev/net/tun` the other end of the tap `name`, and creates the tap if it does not exist. Each
/// frame has a virtio header before it.
///
/// # Errors
/// The kernel's error: `EBUSY` where another process is its other end, `EPERM` where the caller may not open or
/// create it, `EINVAL` where the interface is not a tap, or has several queues.
pub fn attach(tun: &File, name: &str, header_bytes: u32) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the descriptor is open, and the request an `ifreq` as TUNSETIFF reads it: a name that ends with a
    // zero, and flags.
    unsafe { ioctls::set_interface(tun.as_raw_fd(), &raw const request) }?;
    let bytes = header_bytes as libc::c_int;
    // SAFETY: the descriptor is open; TUNSETVNETHDRSZ reads one int.
    unsafe { ioctls::set_header_bytes(tun.as_raw_fd(), &raw const bytes) }?;
    Ok(())
}

/// Sets the kinds of frames that the tap may deliver.
///
/// # Errors
/// The kernel's error (TUNSETOFFLOAD).
pub fn set_offload(tun: BorrowedFd<'_>, offload: Offload) -> io::Result<()> {
    let Offload { checksum, tcp4, tcp6 } = offload;
    let bit = |is_set: bool, bit: libc::c_uint| if is_set { bit } else { 0 };
    let bits = bit(checksum, libc::TUN_F_CSUM)
        | bit(checksum && tcp4, libc::TUN_F_TSO4)
        | bit(checksum && tcp6, libc::TUN_F_TSO6);
    // SAFETY: the descriptor is open; the argument is a number and no pointer.
    unsafe { ioctls::set_offload(tun.as_raw_fd(), bits as libc::c_int) }?;
    Ok(())
}

/// Switches an interface on, as `ip link set NAME up` does.
///
/// # Errors
/// The kernel's error (SIOCSIFFLAGS).
pub fn bring_up(name: &str) -> io::Result<()> {
    let (asked, mut request) = (any_socket()?, request(name)?);
    // SAFETY: the socket is open, and SIOCGIFFLAGS reads the name of an `ifreq` and writes its flags.
    unsafe { ioctls::get_flags(asked.as_raw_fd(), &raw mut request) }?;
    // SAFETY: the call above has written this member of the union, and any bits are a number.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    // SAFETY: as for the call above; it reads both.
    unsafe { ioctls::set_flags(asked.as_raw_fd(), &raw const request) }?;
    Ok(())
}

/// The largest packet that an interface carries, in bytes.
///
/// # Errors
/// The kernel's error (SIOCGIFMTU).
pub fn mtu(name: &str) -> io::Result<u32> {
    let (asked, mut request) = (any_socket()?, request(name)?);
    // SAFETY: the socket is open, and SIOCGIFMTU reads the name of an `ifreq` and writes its MTU.
    unsafe { ioctls::get_mtu(asked.as_raw_fd(), &raw mut request) }?;
    // SAFETY: the call above has written this member of the union, and any bits are a number.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// A socket for requests about an interface; any socket will do.
fn any_socket() -> io::Result<std::os::fd::OwnedFd> {
    Ok(socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?)
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an `ifreq` is bytes, numbers and a union of both; all zeroes is one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    request.ifr_name.iter_mut().zip(name.bytes()).for_each(|(to, byte)| *to = byte.cast_signed());
    Ok(request)
}
