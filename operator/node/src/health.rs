//! `/healthz` and `/metrics` over HTTP.
//!
//! `/healthz` is 200 while rounds go on, also without wideleafd or the API server: a restart of the agent would not
//! help either. Its text says what is missing.
//!
//! No client can keep a probe out: few connections are open at a time, and a newcomer replaces the one that has been
//! silent for longest. To let the newcomer wait instead would have the kubelet kill the agent for the sake of a few
//! idle connections.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use crate::counters::Counters;
use crate::rounds::SharedHealth;

/// Number of connections at one time.
const CONNECTIONS_MAX: usize = 8;

/// Time that a client has for the head of its request.
const HEAD_WITHIN: Duration = Duration::from_secs(2);

/// Time that a connection has altogether.
const CONNECTION_WITHIN: Duration = Duration::from_secs(30);

/// Least age of the latest round at which the agent counts as stuck: a round with a daemon and an API server that both
/// give no answer takes half of it.
const ROUND_AGE_MAX: Duration = Duration::from_secs(180);

/// Time for such a round, and some more, after the pause before it: where the pause is long, the age may be higher.
const ROUND_WITHIN: Duration = Duration::from_secs(120);

/// Pause after a connection that could not be accepted, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers scrapes and probes.
#[derive(Clone)]
pub struct Pages {
    health: SharedHealth,
    counters: Arc<Counters>,
    started: Instant,
    round_age_max: Duration,
}

impl Pages {
    /// Pages about that agent, which pauses for `period` between two rounds.
    pub fn new(health: SharedHealth, counters: Arc<Counters>, period: Duration) -> Pages {
        let round_age_max = ROUND_AGE_MAX.max(period + ROUND_WITHIN);
        Pages { health, counters, started: Instant::now(), round_age_max }
    }

    /// The page at a path: its status and its text.
    pub fn at(&self, method: &Method, path: &str) -> (StatusCode, String) {
        match (method, path) {
            (&Method::GET | &Method::HEAD, "/healthz") => self.health(),
            (&Method::GET | &Method::HEAD, "/metrics") => (StatusCode::OK, self.counters.text()),
            (&Method::GET | &Method::HEAD, _) => (StatusCode::NOT_FOUND, "pages: /healthz, /metrics\n".into()),
            _ => (StatusCode::METHOD_NOT_ALLOWED, "only GET\n".into()),
        }
    }

    fn health(&self) -> (StatusCode, String) {
        let health = self.health.lock();
        let age = health.round_at.unwrap_or(self.started).elapsed();
        let status = if age < self.round_age_max { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let or_ok = |trouble: &Option<String>| trouble.clone().unwrap_or_else(|| "ok".into());
        let text = format!(
            "rounds: {}\nwideleafd: {}\nAPI server: {}\n",
            if status == StatusCode::OK { "ok".to_owned() } else { format!("the latest was {} s ago", age.as_secs()) },
            or_ok(&health.daemon),
            or_ok(&health.api)
        );
        (status, text)
    }
}

/// Serves the pages for ever.
///
/// # Errors
/// The address is not available.
pub async fn serve(address: SocketAddr, pages: Pages) -> std::io::Result<Infallible> {
    let listener = wideleaf_control::tcp::listen(address)?;
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    tracing::info!("metrics are at {}", listener.local_addr()?);
    serve_on(listener, pages).await
}

async fn serve_on(listener: TcpListener, pages: Pages) -> std::io::Result<Infallible> {
    let mut connections = Connections::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!("a connection for the metrics was not accepted: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let has_asked = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(answer(stream, pages.clone(), Arc::clone(&has_asked)));
        connections.add(Connection { task: task.abort_handle(), has_asked });
        // Most clients have sent their request by now: it counts before the next newcomer does.
        tokio::task::yield_now().await;
    }
}

/// Answers the one request of a connection.
async fn answer(stream: TcpStream, pages: Pages, has_asked: Arc<AtomicBool>) {
    let service = service_fn(move |request: Request<Incoming>| {
        has_asked.store(true, Ordering::Relaxed);
        let (status, text) = pages.at(request.method(), request.uri().path());
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        async move { Ok::<_, Infallible>(response) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).keep_alive(false);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    // A client that is slow or gone is no problem of the agent.
    let _ = tokio::time::timeout(CONNECTION_WITHIN, connection).await;
}

/// A connection that is open.
struct Connection {
    task: AbortHandle,
    /// Whether its request has arrived.
    has_asked: Arc<AtomicBool>,
}

/// Open connections in the order of their arrival.
#[derive(Default)]
struct Connections(VecDeque<Connection>);

impl Connections {
    /// Adds one. Where there is no place left, the one that has been silent for longest ends; without a silent one, the
    /// oldest.
    fn add(&mut self, connection: Connection) {
        self.0.retain(|known| !known.task.is_finished());
        if self.0.len() >= CONNECTIONS_MAX {
            let silent = self.0.iter().position(|known| !known.has_asked.load(Ordering::Relaxed));
            if let Some(ended) = self.0.remove(silent.unwrap_or(0)) {
                ended.task.abort();
            }
        }
        self.0.push_back(connection);
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.0.iter().for_each(|connection| connection.task.abort());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounds::Health;
    use parking_lot::Mutex;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    const PERIOD: Duration = Duration::from_secs(4);

    /// Long enough for any machine, and shorter than an idle connection was once kept for.
    const WITHIN: Duration = Duration::from_secs(20);

    #[test]
    fn an_agent_without_a_daemon_or_an_api_server_is_healthy_and_says_what_is_missing() {
        let health = SharedHealth::default();
        let pages = Pages::new(Arc::clone(&health), Arc::default(), PERIOD);
        *health.lock() =
            Health { round_at: Some(Instant::now()), daemon: Some("no wideleafd".into()), api: Some("refused".into()) };
        let (status, text) = pages.at(&Method::GET, "/healthz");
        assert_eq!(status, StatusCode::OK);
        assert_eq!(text, "rounds: ok\nwideleafd: no wideleafd\nAPI server: refused\n");
    }

    #[test]
    fn rounds_that_have_stopped_are_unhealthy() {
        let Some(long_ago) = Instant::now().checked_sub(ROUND_AGE_MAX) else { return };
        let health = Health { round_at: Some(long_ago), ..Health::default() };
        let pages = Pages::new(Arc::new(Mutex::new(health)), Arc::default(), PERIOD);
        let (status, text) = pages.at(&Method::GET, "/healthz");
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.starts_with("rounds: the latest was 180 s ago"), "{text}");
    }

    #[test]
    fn rounds_with_a_long_pause_between_them_have_more_time() {
        let Some(long_ago) = Instant::now().checked_sub(ROUND_AGE_MAX) else { return };
        let health = Health { round_at: Some(long_ago), ..Health::default() };
        let pages = Pages::new(Arc::new(Mutex::new(health)), Arc::default(), Duration::from_secs(240));
        assert_eq!(pages.at(&Method::GET, "/healthz").0, StatusCode::OK);
    }

    #[tokio::test]
    async fn idle_connections_do_not_keep_a_probe_out_and_end_soon() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let pages = Pages::new(SharedHealth::default(), Arc::default(), PERIOD);
        let serving = tokio::spawn(serve_on(listener, pages));
        let mut idle = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            idle.push(TcpStream::connect(address).await.expect("it listens"));
        }
        let mut probe = TcpStream::connect(address).await.expect("it listens");
        probe.write_all(b"GET /healthz HTTP/1.1\r\nHost: n1\r\n\r\n").await.expect("it reads");
        let mut text = String::new();
        let read = tokio::time::timeout(WITHIN, probe.read_to_string(&mut text)).await;
        read.expect("it is not kept out").expect("text");
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        for stream in &mut idle {
            let end = tokio::time::timeout(WITHIN, stream.read_to_end(&mut Vec::new())).await;
            drop(end.expect("a head that does not come ends it"));
        }
        serving.abort();
    }

    #[tokio::test]
    async fn a_newcomer_replaces_the_connection_that_has_been_silent_for_longest() {
        let mut connections = Connections::default();
        let mut tasks = Vec::new();
        let mut add = |connections: &mut Connections, has_asked: bool| {
            let task = tokio::spawn(std::future::pending::<()>());
            let has_asked = Arc::new(AtomicBool::new(has_asked));
            connections.add(Connection { task: task.abort_handle(), has_asked });
            tasks.push(task);
        };
        add(&mut connections, true);
        (1..CONNECTIONS_MAX).for_each(|_| add(&mut connections, false));
        add(&mut connections, true);
        assert_eq!(connections.0.len(), CONNECTIONS_MAX);
        tokio::task::yield_now().await;
        let ended: Vec<usize> = (0..tasks.len()).filter(|at| tasks[*at].is_finished()).collect();
        assert_eq!(ended, [1], "the oldest has asked, and is answered");
    }

    #[test]
    fn other_pages_and_methods_are_refused() {
        let pages = Pages::new(SharedHealth::default(), Arc::default(), PERIOD);
        assert_eq!(pages.at(&Method::GET, "/").0, StatusCode::NOT_FOUND);
        assert_eq!(pages.at(&Method::POST, "/healthz").0, StatusCode::METHOD_NOT_ALLOWED);
        assert!(pages.at(&Method::GET, "/metrics").1.ends_with("# EOF\n"));
    }
}
