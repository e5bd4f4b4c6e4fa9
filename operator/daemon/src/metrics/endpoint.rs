//! The metrics endpoint: one thread that waits for all connections at once.
//!
//! ```text
//!              ┌──────────── one thread, poll(2) ────────────┐
//!   scrapers ─▶│ accept · read a head · write a page · close │◀── a byte: stop
//!              └─────────────────────────────────────────────┘
//! ```
//!
//! No client can keep the next scraper out. There are at most [`CONNECTIONS_MAX`] connections, each with a time
//! limit for each step. When all are taken, a newcomer replaces the one that has been silent for longest. To refuse
//! the newcomer instead would let any user with silent connections keep Prometheus out.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::exchange::{Exchange, Page, Progress, Socket};
use super::format::{self, Format};
use super::{Scrape, text};
use crate::config::{Listen, MetricsConfig};
use crate::listen_error::ListenError;
use wideleaf_control::server::ended_by;
use wideleaf_control::socket_file::{OwnSocket, SocketFile};
use wideleaf_control::tcp;

/// Upper bound on connections. A Prometheus or two and an operator need few; the rest is for clients that connect
/// and stay silent.
pub(super) const CONNECTIONS_MAX: usize = 32;

/// Age up to which a page is served again. Its figures are those of the last tick anyway, and a client that asks as
/// fast as it can then takes no core of the host.
const PAGE_AGE_MAX: Duration = Duration::from_millis(500);

/// Pause after a connection that could not be accepted, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// The HTTP server of the metrics.
pub struct MetricsServer {
    wake: UnixStream,
    thread: JoinHandle<()>,
    address: Option<SocketAddr>,
    file: Option<OwnSocket>,
}

impl MetricsServer {
    /// Serves the result of `scrape` at `/metrics`. `None` where the configuration says `off`. A file without a
    /// listener is replaced.
    ///
    /// # Errors
    /// [`ListenError`], which names the process that listens there already.
    pub fn start(
        config: &MetricsConfig,
        scrape: impl Fn() -> Scrape + Send + 'static,
    ) -> Result<Option<MetricsServer>, ListenError> {
        let scrape = Box::new(scrape);
        match &config.listen {
            Listen::Off => Ok(None),
            Listen::Tcp(address) => {
                let started = tcp::listen(*address).and_then(|listener| {
                    let address = listener.local_addr()?;
                    let server = MetricsServer::serve(Listener::Tcp(listener), scrape)?;
                    Ok(MetricsServer { address: Some(address), ..server })
                });
                started.map(Some).map_err(|source| ListenError::Metrics { address: *address, source })
            }
            Listen::Unix(path) => {
                let file = SocketFile {
                    path,
                    mode: config.mode,
                    gid: None,
                    makes_folder: true,
                    owner: "another wideleafd",
                    remedy: "give this daemon another metrics.listen",
                };
                let listener = Listener::Unix(file.bind()?);
                let file_of_ours = Some(OwnSocket::at(path));
                let server = MetricsServer::serve(listener, scrape).map_err(|source| file.failed(source))?;
                Ok(Some(MetricsServer { file: file_of_ours, ..server }))
            }
        }
    }

    fn serve(listener: Listener, scrape: Box<dyn Fn() -> Scrape + Send>) -> io::Result<MetricsServer> {
        listener.set_nonblocking()?;
        let (wake, woken) = UnixStream::pair()?;
        let shop = Shop { listener, woken, exchanges: VecDeque::new(), page: None, scrape };
        let thread = thread::Builder::new().name("metrics".into()).spawn(move || shop.run())?;
        Ok(MetricsServer { wake, thread, address: None, file: None })
    }

    /// Address of a TCP endpoint.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Ends the server, with any client connected. It waits for a scrape under way, until `until`.
    pub fn stop(self, until: Instant) {
        let _ = (&self.wake).write(&[0]);
        ended_by("a scrape", self.thread, until).iter().for_each(|problem| tracing::warn!("{problem}"));
        self.file.into_iter().for_each(OwnSocket::remove);
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => listener.set_nonblocking(true),
            Listener::Unix(listener) => listener.set_nonblocking(true),
        }
    }

    fn accept(&self) -> io::Result<Box<dyn Socket>> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true).map(|()| Box::new(stream) as _)
            }
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true).map(|()| Box::new(stream) as _)
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

/// The text of one scrape in both formats.
struct Pages {
    open_metrics: Page,
    classic: Page,
}

impl Pages {
    fn new(open_metrics: String) -> Pages {
        Pages { classic: format::classic(&open_metrics).into(), open_metrics: open_metrics.into() }
    }

    fn of(&self, format: Format) -> Page {
        match format {
            Format::OpenMetrics => self.open_metrics.clone(),
            Format::Classic => self.classic.clone(),
        }
    }
}

/// The thread that waits for connections.
struct Shop {
    listener: Listener,
    woken: UnixStream,
    /// Connections in the order of their arrival.
    exchanges: VecDeque<Exchange>,
    page: Option<(Instant, Pages)>,
    scrape: Box<dyn Fn() -> Scrape + Send>,
}

/// Sockets that are ready.
struct Ready {
    is_over: bool,
    listener: bool,
    exchanges: Vec<bool>,
}

impl Shop {
    fn run(mut self) {
        loop {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(errno) => return tracing::error!("metrics are no longer served: {errno}"),
            };
            if ready.is_over {
                let _ = self.woken.read(&mut [0]);
                return;
            }
            self.serve(&ready.exchanges);
            if ready.listener {
                self.accept();
            }
        }
    }

    fn wait(&self) -> Result<Ready, Errno> {
        let files = [(self.woken.as_fd(), PollFlags::POLLIN), (self.listener.as_fd(), PollFlags::POLLIN)];
        let exchanges = self.exchanges.iter().map(|exchange| (exchange.as_fd(), exchange.interest()));
        let mut files: Vec<PollFd<'_>> =
            files.into_iter().chain(exchanges).map(|(file, interest)| PollFd::new(file, interest)).collect();
        let deadline = self.exchanges.iter().map(Exchange::deadline).min();
        let timeout = deadline.map_or(PollTimeout::NONE, |deadline| {
            // Rounded up: a thread that wakes just before a deadline would wake again at once, and again.
            let milliseconds = deadline.saturating_duration_since(Instant::now()).as_millis() + 1;
            PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut files, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        let ready: Vec<bool> = files.iter().map(|file| file.any().unwrap_or(false)).collect();
        Ok(Ready { is_over: ready[0], listener: ready[1], exchanges: ready[2..].to_vec() })
    }

    fn serve(&mut self, is_ready: &[bool]) {
        let now = Instant::now();
        for (mut exchange, is_ready) in std::mem::take(&mut self.exchanges).into_iter().zip(is_ready) {
            let progress = if *is_ready { self.advance(&mut exchange, now) } else { Progress::Waiting };
            if progress == Progress::Waiting && now < exchange.deadline() {
                self.exchanges.push_back(exchange);
            }
        }
    }

    fn advance(&mut self, exchange: &mut Exchange, now: Instant) -> Progress {
        exchange.advance(now, &mut |format| match &self.page {
            Some((made_at, pages)) if now.saturating_duration_since(*made_at) < PAGE_AGE_MAX => pages.of(format),
            _ => self.page.insert((now, Pages::new(text((self.scrape)())))).1.of(format),
        })
    }

    fn accept(&mut self) {
        let socket = match self.listener.accept() {
            Ok(socket) => socket,
            // The connection stays in the queue and poll(2) returns at once: without a pause this would take all
            // of a core.
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return thread::sleep(ACCEPT_PAUSE),
            Err(_) => return,
        };
        let now = Instant::now();
        let mut exchange = Exchange::new(socket, now);
        // Most clients have sent their request by now.
        if self.advance(&mut exchange, now) == Progress::Over {
            return;
        }
        if self.exchanges.len() >= CONNECTIONS_MAX {
            let silent = self.exchanges.iter().position(|exchange| !exchange.has_asked());
            let _ = self.exchanges.remove(silent.unwrap_or(0));
        }
        self.exchanges.push_back(exchange);
    }
}
