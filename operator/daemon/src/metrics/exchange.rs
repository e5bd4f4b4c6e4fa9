//! One connection of a scraper: a request in, a reply out, and it ends. Prometheus connects every fifteen seconds
//! or so, so keeping a connection open is not worth the separation of requests.
//!
//! ```text
//!             a whole head              all written                   its end, or late
//!   Reading ──────────────▶ Writing ──────────────▶ Closing ─────────────────────────▶ over
//!      │ end, late             │ gone, late           (what it still sends is thrown away: a close with
//!      ▼                       ▼                       unread bytes would take the reply back, tcp(7))
//!     over                    over
//! ```

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use httparse::Status;
use nix::poll::PollFlags;
use nix::sys::socket::{Shutdown, shutdown};

use super::format::Format;

/// Upper bound on a request's head, in bytes. A scraper's has some 300; one that comes through a proxy has more.
pub(super) const HEAD_BYTES_MAX: usize = 8 << 10;

/// Upper bound on the headers of a request.
const HEADERS_MAX: usize = 64;

/// Time from the connection to the end of the head: a few packets.
const READ_TIME_MAX: Duration = Duration::from_secs(5);

/// Time from the head to the end of the reply: as long as Prometheus waits by default (`scrape_timeout`).
const WRITE_TIME_MAX: Duration = Duration::from_secs(10);

/// Time from the reply to the other side's close.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(1);

/// A socket of either kind.
pub(super) trait Socket: Read + Write + AsFd + Send {}

impl<S: Read + Write + AsFd + Send> Socket for S {}

/// One connection; see the module.
pub(super) struct Exchange {
    socket: Box<dyn Socket>,
    phase: Phase,
    until: Instant,
}

enum Phase {
    Reading(Vec<u8>),
    Writing { reply: Reply, written: usize },
    Closing,
}

/// State of the connection after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The connection continues once the socket is ready.
    Waiting,
    /// The connection has ended.
    Over,
}

/// The text of a scrape, shared by all replies with it.
pub(super) type Page = Arc<str>;

struct Reply {
    head: String,
    body: Page,
}

impl Exchange {
    /// A connection that begins at `now`.
    pub(super) fn new(socket: Box<dyn Socket>, now: Instant) -> Exchange {
        Exchange { socket, phase: Phase::Reading(Vec::new()), until: now + READ_TIME_MAX }
    }

    /// Events that the connection waits for.
    pub(super) fn interest(&self) -> PollFlags {
        match self.phase {
            Phase::Reading(_) | Phase::Closing => PollFlags::POLLIN,
            Phase::Writing { .. } => PollFlags::POLLOUT,
        }
    }

    /// Time at which it has taken too long.
    pub(super) fn deadline(&self) -> Instant {
        self.until
    }

    /// Whether its request is complete and its reply is not.
    pub(super) fn has_asked(&self) -> bool {
        matches!(self.phase, Phase::Writing { .. })
    }

    /// Goes as far as possible without waiting. A request for `/metrics` calls `page`.
    pub(super) fn advance(&mut self, now: Instant, page: &mut dyn FnMut(Format) -> Page) -> Progress {
        match self.go_on(now, page) {
            Ok(progress) => progress,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Progress::Waiting,
            // A client that closes early needs no answer.
            Err(_) => Progress::Over,
        }
    }

    fn go_on(&mut self, now: Instant, page: &mut dyn FnMut(Format) -> Page) -> io::Result<Progress> {
        loop {
            match &mut self.phase {
                Phase::Reading(head) => {
                    if read_some(&mut *self.socket, head)? == 0 {
                        return Ok(Progress::Over);
                    }
                    if let Some(reply) = answer(head, page) {
                        (self.phase, self.until) = (Phase::Writing { reply, written: 0 }, now + WRITE_TIME_MAX);
                    }
                }
                Phase::Writing { reply, written } => {
                    while let Some(rest) = reply.rest(*written) {
                        *written += again(|| self.socket.write(rest))?;
                    }
                    shutdown(self.socket.as_fd().as_raw_fd(), Shutdown::Write)?;
                    (self.phase, self.until) = (Phase::Closing, now + CLOSE_TIME_MAX);
                }
                // At most once, so that a client that sends without end does not delay the others.
                Phase::Closing => {
                    let n = read_some(&mut *self.socket, &mut Vec::new())?;
                    return Ok(if n == 0 { Progress::Over } else { Progress::Waiting });
                }
            }
        }
    }
}

impl AsFd for Exchange {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Reply {
    /// The bytes still to write; `None` after the last.
    fn rest(&self, written: usize) -> Option<&[u8]> {
        let (head, body) = (self.head.as_bytes(), self.body.as_bytes());
        let rest = head.get(written..).filter(|rest| !rest.is_empty());
        rest.or_else(|| body.get(written - head.len().min(written)..).filter(|rest| !rest.is_empty()))
    }
}

/// Reads at most as many bytes as a head may have.
fn read_some(socket: &mut dyn Socket, into: &mut Vec<u8>) -> io::Result<usize> {
    let mut bytes = [0; HEAD_BYTES_MAX];
    let n = again(|| socket.read(&mut bytes))?;
    into.extend_from_slice(&bytes[..n]);
    Ok(n)
}

fn again(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// The reply to a head; `None` while the head is incomplete.
fn answer(head: &[u8], page: &mut dyn FnMut(Format) -> Page) -> Option<Reply> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let is_whole = match request.parse(head) {
        Ok(Status::Complete(_)) => true,
        Ok(Status::Partial) => false,
        Err(httparse::Error::TooManyHeaders) => return Some(too_long()),
        Err(error) => return Some(text("400 Bad Request", &format!("cannot read the request: {error}\n"))),
    };
    if !is_whole {
        return (head.len() >= HEAD_BYTES_MAX).then(too_long);
    }
    let accepted = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
    let format = Format::wanted(accepted.filter_map(|header| std::str::from_utf8(header.value).ok()));
    let path = request.path.unwrap_or_default().split('?').next().unwrap_or_default();
    Some(match (request.method.unwrap_or_default(), path) {
        ("GET", "/metrics") => reply("200 OK", format.content_type(), page(format)),
        ("HEAD", "/metrics") => {
            let whole = reply("200 OK", format.content_type(), page(format));
            Reply { body: "".into(), ..whole }
        }
        ("GET", _) => text("404 Not Found", "the metrics are at /metrics\n"),
        ("HEAD", _) => Reply { body: "".into(), ..text("404 Not Found", "the metrics are at /metrics\n") },
        _ => text("405 Method Not Allowed", "only GET\n"),
    })
}

fn too_long() -> Reply {
    let most = format!("a request has at most {HEAD_BYTES_MAX} bytes and {HEADERS_MAX} headers\n");
    text("431 Request Header Fields Too Large", &most)
}

fn text(status: &str, body: &str) -> Reply {
    reply(status, "text/plain; charset=utf-8", body.into())
}

fn reply(status: &str, content_type: &str, body: Page) -> Reply {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    Reply { head, body }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Shutdown as Side;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    /// An exchange, the client's side of it, and the time of its start.
    fn exchange() -> (Exchange, UnixStream, Instant) {
        let (here, there) = UnixStream::pair().expect("a pair of sockets");
        here.set_nonblocking(true).expect("nonblocking");
        there.set_nonblocking(true).expect("nonblocking");
        let now = Instant::now();
        (Exchange::new(Box::new(here), now), there, now)
    }

    fn heard(mut client: &UnixStream) -> String {
        let mut text = Vec::new();
        let _ = client.read_to_end(&mut text); // all there is, to the end or for now
        String::from_utf8(text).expect("UTF-8")
    }

    #[test]
    fn a_request_byte_by_byte_is_answered_once_complete_and_gets_no_extra_time() {
        let (mut exchange, mut client, began) = exchange();
        let request = b"GET /metrics?a=b HTTP/1.1\r\nHost: a\r\n\r\n";
        for (n, byte) in request.iter().enumerate() {
            assert_eq!((exchange.has_asked(), exchange.deadline() - began), (false, READ_TIME_MAX), "byte {n}");
            client.write_all(&[*byte]).expect("written");
            assert_eq!(exchange.advance(Instant::now(), &mut |_| "figures\n".into()), Progress::Waiting);
        }
        let reply = heard(&client);
        assert!(reply.starts_with("HTTP/1.1 200 OK\r\n") && reply.ends_with("\r\n\r\nfigures\n"), "{reply}");
        client.shutdown(Side::Write).expect("its end");
        assert_eq!(exchange.advance(Instant::now(), &mut |_| unreachable!("once is enough")), Progress::Over);
    }

    #[test]
    fn a_client_that_never_reads_has_a_deadline_and_one_that_reads_gets_the_whole_page() {
        let (mut exchange, mut client, began) = exchange();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("written");
        let page: Page = "a figure\n".repeat(1 << 17).into();
        let asked_at = began + Duration::from_secs(1);
        assert_eq!(exchange.advance(asked_at, &mut |_| page.clone()), Progress::Waiting);
        assert!(exchange.has_asked(), "a socket's buffer holds less than a mebibyte");
        assert_eq!(exchange.deadline(), asked_at + WRITE_TIME_MAX);
        let mut reply = heard(&client);
        while exchange.has_asked() {
            assert_eq!(exchange.advance(Instant::now(), &mut |_| unreachable!("once is enough")), Progress::Waiting);
            reply += &heard(&client);
        }
        assert_eq!(reply.split_once("\r\n\r\n").expect("a head").1, &*page);
    }

    fn status_of(request: &[u8]) -> String {
        let (mut exchange, mut client, now) = exchange();
        client.write_all(request).expect("it fits a buffer");
        let _ = exchange.advance(now, &mut |_| "figures\n".into());
        heard(&client).lines().next().unwrap_or_default().to_owned()
    }

    /// A request, and then bytes without end.
    struct Endless {
        request: &'static [u8],
        socket: UnixStream,
    }

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.request.read(buffer)? {
                0 => Ok(buffer.len()),
                n => Ok(n),
            }
        }
    }

    impl Write for Endless {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.socket.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl AsFd for Endless {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.socket.as_fd()
        }
    }

    #[test]
    fn a_client_that_sends_without_end_delays_no_other_and_has_a_second() {
        let (socket, client) = UnixStream::pair().expect("a pair of sockets");
        let began = Instant::now();
        let endless = Endless { request: b"GET /else HTTP/1.1\r\n\r\n", socket };
        let mut exchange = Exchange::new(Box::new(endless), began);
        for _ in 0..3 {
            assert_eq!(exchange.advance(began, &mut |_| unreachable!("that is elsewhere")), Progress::Waiting);
        }
        assert_eq!(exchange.deadline() - began, CLOSE_TIME_MAX);
        assert!(heard(&client).contains(" 404 "));
    }

    #[test]
    fn a_head_that_does_not_end_and_one_of_many_headers_are_too_large() {
        let long = [b"GET /metrics HTTP/1.1\r\na: ".as_slice(), &[b'b'; HEAD_BYTES_MAX]].concat();
        assert!(status_of(&long).contains(" 431 "));
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(HEADERS_MAX + 1));
        assert!(status_of(many.as_bytes()).contains(" 431 "));
    }

    #[test]
    fn head_has_the_length_and_no_figures_and_a_body_is_thrown_away() {
        let (mut exchange, mut client, now) = exchange();
        client.write_all(b"HEAD /metrics HTTP/1.1\r\n\r\n").expect("written");
        let _ = exchange.advance(now, &mut |_| "figures\n".into());
        let reply = heard(&client);
        assert!(reply.contains("Content-Length: 8\r\n") && reply.ends_with("\r\n\r\n"), "{reply}");
        assert!(status_of(b"POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody").contains(" 405 "));
        assert!(status_of(b"GET /else HTTP/1.1\r\n\r\n").contains(" 404 "));
        assert!(status_of(b"\x16\x03\x01 a TLS client\r\n\r\n").contains(" 400 "));
    }

    #[test]
    fn a_client_gets_the_format_that_it_asks_for_and_the_classic_one_by_default() {
        for (accept, expected) in [
            ("", Format::Classic),
            ("Accept: application/openmetrics-text; version=1.0.0\r\n", Format::OpenMetrics),
            ("accept: text/plain\r\nACCEPT: application/openmetrics-text\r\n", Format::OpenMetrics),
        ] {
            let (mut exchange, mut client, now) = exchange();
            client.write_all(format!("GET /metrics HTTP/1.1\r\n{accept}\r\n").as_bytes()).expect("written");
            let mut asked = None;
            let _ = exchange.advance(now, &mut |format| {
                asked = Some(format);
                "figures\n".into()
            });
            let content_type = format!("Content-Type: {}\r\n", expected.content_type());
            assert!(asked == Some(expected) && heard(&client).contains(&content_type), "{accept}: {asked:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_or_waited_for(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let status = status_of(&bytes);
            prop_assert!(status.is_empty() || status.starts_with("HTTP/1.1 "), "{status}");
        }
    }
}
