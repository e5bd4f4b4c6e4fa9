//! Random bytes of the kernel's (getrandom(2)): the call itself, as every thread in the sandbox may make it. Who looks for the C
//! library's function first opens files for that in a static program, and falls back to `/dev/urandom`.

use std::io;

/// Fills `bytes`.
///
/// # Errors
/// The kernel's.
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
