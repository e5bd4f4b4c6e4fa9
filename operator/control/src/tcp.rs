//! TCP ports of servers, also on hosts without IPv6.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use nix::errno::Errno;

/// Listens at an address. `[::]` stands for all addresses of this host: those of IPv4 alone where the kernel has no
/// IPv6 (`ipv6.disable=1`).
///
/// # Errors
/// The kernel refuses the address.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    listen_by(TcpListener::bind, address)
}

fn listen_by<L>(bind: impl Fn(SocketAddr) -> io::Result<L>, address: SocketAddr) -> io::Result<L> {
    bind(address).or_else(|error| {
        let has_no_ipv6 = error.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32);
        match address {
            SocketAddr::V6(all) if has_no_ipv6 && all.ip().is_unspecified() => {
                bind((Ipv4Addr::UNSPECIFIED, all.port()).into())
            }
            _ => Err(error),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn all_addresses_are_those_of_ipv4_where_the_kernel_has_no_ipv6() {
        let bind = |address: SocketAddr| match address {
            SocketAddr::V4(_) => Ok(address),
            SocketAddr::V6(_) => Err(io::Error::from(Errno::EAFNOSUPPORT)),
        };
        assert_eq!(listen_by(bind, address("[::]:9477")).expect("IPv4 is there"), address("0.0.0.0:9477"));
        listen_by(bind, address("[::1]:9477")).expect_err("another address is not what was asked for");
        let in_use = |_: SocketAddr| Err::<SocketAddr, _>(io::Error::from(Errno::EADDRINUSE));
        listen_by(in_use, address("[::]:9477")).expect_err("the port is in use");
    }

    #[test]
    fn all_addresses_serve_clients_of_ipv4() {
        let listener = listen(address("[::]:0")).expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("it listens");
    }
}
