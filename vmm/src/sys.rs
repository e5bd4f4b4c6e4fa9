//! The kernel's calls that devices need and no crate has as safe ones. With [`crate::kvm`] the only place of the crate that is `unsafe`.
//!
//! | module | what it does |
//! |---|---|
//! | [`allocator`] | whether threads allocate from memory of their own |
//! | [`random`] | random bytes of the kernel's |
//! | [`signals`] | handlers that end the process |
//! | [`vectored`] | reads a file into pieces of guest RAM, and writes such pieces to one, at once |
//! | [`tap`] | asks of `/dev/net/tun` |
#![expect(
    unsafe_code,
    reason = "readv, writev, getrandom and ioctl take raw pointers, mallopt is the C library's, a handler has to be safe in one"
)]

pub mod allocator;
pub mod random;
pub mod signals;
pub mod tap;
pub mod vectored;
