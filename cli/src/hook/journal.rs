//! A line in the host's log, for what the daemon can not log itself: that it was not there.
//!
//! libvirt keeps a hook's standard error to itself unless the hook fails. `/dev/log` is where both journald and syslogd
//! read, one datagram a line (RFC 3164, 4.1, without the parts that the reader fills in).

use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// Where the host's log listens.
const SOCKET: &str = "dev/log";
/// Facility `daemon` (3), severity `warning` (4).
const PRIORITY: u8 = 3 * 8 + 4;

/// Writes a warning to the log of the host under `root`. It never waits; where no log listens, or its queue is full,
/// the line is lost.
pub fn warn(root: &Path, line: &str) {
    let line = line.replace(char::is_control, " ");
    let message = format!("<{PRIORITY}>wideleaf[{}]: {line}", std::process::id());
    let sent = UnixDatagram::unbound().and_then(|socket| {
        socket.set_nonblocking(true)?;
        socket.send_to(message.as_bytes(), root.join(SOCKET))
    });
    // The line is on standard error as well.
    let _ = sent;
}
