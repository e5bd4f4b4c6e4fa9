//! A line in the host's log for events that the daemon cannot log itself, such as its own absence.
//!
//! libvirt shows a hook's standard error only if the hook fails. Both journald and syslogd read `/dev/log`, one
//! datagram per line (RFC 3164, 4.1, without the parts that the reader fills in).

use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// Socket of the host's log.
const SOCKET: &str = "dev/log";
/// Facility `daemon` (3), severity `warning` (4).
const PRIORITY: u8 = 3 * 8 + 4;

/// Writes a warning to the log of the host under `root`. It never waits: if no log listens, or its queue is full,
/// the line is lost.
pub fn warn(root: &Path, line: &str) {
    let line = line.replace(char::is_control, " ");
    let message = format!("<{PRIORITY}>wideleaf[{}]: {line}", std::process::id());
    let sent = UnixDatagram::unbound().and_then(|socket| {
        socket.set_nonblocking(true)?;
        socket.send_to(message.as_bytes(), root.join(SOCKET))
    });
    // Standard error has the line as well.
    let _ = sent;
}
