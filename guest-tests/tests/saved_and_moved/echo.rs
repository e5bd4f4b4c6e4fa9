//! A program of the host that sends bytes to a guest's sockets, and compares what comes back.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::run::{PATIENCE, wait_for};

/// Port at which the guest echoes.
const CONNECT: &[u8] = b"CONNECT 1024\n";
/// Time before the next attempt where nothing listens.
const AGAIN_AFTER: Duration = Duration::from_millis(5);

/// Sends bytes and compares them with those that come back; the connection is over at both ends afterwards.
///
/// # Errors
/// The kernel's error where the connection ends before.
///
/// # Panics
/// If other bytes come back.
pub fn echo(at: &Path) -> io::Result<()> {
    let mut stream = UnixStream::connect(at)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(CONNECT)?;
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte)?;
    }
    let sent: Vec<u8> = (0..20_000_u32).flat_map(|word| word.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    stream.write_all(&sent)?;
    let mut back = vec![0; sent.len()];
    stream.read_exact(&mut back)?;
    assert!(back == sent, "other bytes came back");
    stream.shutdown(Shutdown::Write)?;
    stream.read_to_end(&mut Vec::new())?;
    Ok(())
}

/// One echo after another, until this is dropped. A connection that a move has cut is followed by another one.
pub struct Echoes {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    /// Place of the guest's sockets.
    place: Mutex<Option<PathBuf>>,
    /// Number of echoes so far.
    count: AtomicU64,
    is_over: AtomicBool,
}

impl Echoes {
    pub fn begin() -> Echoes {
        let shared = Arc::<Shared>::default();
        let of_thread = shared.clone();
        let thread = std::thread::spawn(move || {
            while !of_thread.is_over.load(Ordering::Relaxed) {
                let place = of_thread.place.lock().clone();
                match place.map(|place| echo(&place)) {
                    Some(Ok(())) => _ = of_thread.count.fetch_add(1, Ordering::Relaxed),
                    _ => std::thread::sleep(AGAIN_AFTER),
                }
            }
        });
        Echoes { shared, thread: Some(thread) }
    }

    /// Goes on with the guest that has its sockets here. Waits until bytes that were sent after this call have come
    /// back, or `is_over`.
    pub fn go_on(&self, place: &Path, is_over: impl Fn() -> bool) {
        *self.shared.place.lock() = Some(place.to_owned());
        let count = || self.shared.count.load(Ordering::Relaxed);
        // The first one that ends now may have begun before.
        let enough = count() + 2;
        wait_for(
            || {
                assert!(self.thread.as_ref().is_some_and(|thread| !thread.is_finished()), "other bytes came back");
                (count() >= enough || is_over()).then_some(())
            },
            &|| format!("nothing comes back from {}", place.display()),
        );
    }
}

impl Drop for Echoes {
    /// The guest has ended, and with it its sockets.
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_none_or(|ended| ended.is_ok()), "other bytes came back");
    }
}
