//! Random bytes from the kernel (getrandom(2)): the call itself, which every thread in the sandbox may make. In a
//! static program, looking up the C library's function first opens files, and falls back to `/dev/urandom`.

use std::io;

/// Fills `bytes` with random bytes.
///
/// # Errors
/// The kernel's error (getrandom(2)).
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &mut bytes[done..];
        // SAFETY: the kernel writes at most `rest.len()` bytes there, and `rest` is ours alone.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(got) {
            Ok(bytes) => done += bytes,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}
