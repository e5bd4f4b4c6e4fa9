//! System calls that devices need and that no crate offers as safe functions. Only this module and [`crate::kvm`]
//! contain `unsafe` code.
//!
//! | module | what it does |
//! |---|---|
//! | [`random`] | random bytes from the kernel |
//! | [`signals`] | handlers that end the process |
//! | [`vectored`] | reads a file into pieces of guest RAM, and writes such pieces to one, in one call |
//! | [`tap`] | requests to `/dev/net/tun` |
#![expect(
    unsafe_code,
    reason = "readv, writev, getrandom and ioctl take raw pointers, a handler has to be safe in one"
)]

pub mod random;
pub mod signals;
pub mod tap;
pub mod vectored;
