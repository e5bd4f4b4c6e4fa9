//! `/healthz` and `/metrics` over HTTP.
//!
//! `/healthz` is 200 while rounds go on, also without wideleafd or the API server: a restart of the agent would not
//! help either. Its text says what is missing.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::counters::Counters;
use crate::rounds::SharedHealth;

/// Number of connections at one time.
const CONNECTIONS_MAX: usize = 8;

/// Time that a client has for its request, and a connection altogether.
const CONNECTION_WITHIN: Duration = Duration::from_secs(30);

/// Age of the latest round after which the agent counts as stuck: a round with a daemon and an API server that both
/// give no answer takes half of it.
const ROUND_AGE_MAX: Duration = Duration::from_secs(180);

/// Pause after a connection that could not be accepted, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers scrapes and probes.
#[derive(Clone)]
pub struct Pages {
    health: SharedHealth,
    counters: Arc<Counters>,
    started: Instant,
}

impl Pages {
    /// Pages about that agent.
    pub fn new(health: SharedHealth, counters: Arc<Counters>) -> Pages {
        Pages { health, counters, started: Instant::now() }
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
        let status = if age < ROUND_AGE_MAX { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
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
    let listener = TcpListener::bind(address).await?;
    tracing::info!("metrics are at {}", listener.local_addr()?);
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return Err(std::io::Error::other("closed")) };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!("a connection for the metrics was not accepted: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let pages = pages.clone();
        tokio::spawn(async move {
            let _place = place;
            let answer = service_fn(move |request: Request<Incoming>| {
                let (status, text) = pages.at(request.method(), request.uri().path());
                let mut response = Response::new(Full::new(Bytes::from(text)));
                *response.status_mut() = status;
                async move { Ok::<_, Infallible>(response) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(CONNECTION_WITHIN).keep_alive(false);
            let connection = http.serve_connection(TokioIo::new(stream), answer);
            // A client that is slow or gone is no problem of the agent.
            let _ = tokio::time::timeout(CONNECTION_WITHIN, connection).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounds::Health;
    use parking_lot::Mutex;

    #[test]
    fn an_agent_without_a_daemon_or_an_api_server_is_healthy_and_says_what_is_missing() {
        let health = SharedHealth::default();
        let pages = Pages::new(Arc::clone(&health), Arc::default());
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
        let pages = Pages::new(Arc::new(Mutex::new(health)), Arc::default());
        let (status, text) = pages.at(&Method::GET, "/healthz");
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.starts_with("rounds: the latest was 180 s ago"), "{text}");
    }

    #[test]
    fn other_pages_and_methods_are_refused() {
        let pages = Pages::new(SharedHealth::default(), Arc::default());
        assert_eq!(pages.at(&Method::GET, "/").0, StatusCode::NOT_FOUND);
        assert_eq!(pages.at(&Method::POST, "/healthz").0, StatusCode::METHOD_NOT_ALLOWED);
        assert!(pages.at(&Method::GET, "/metrics").1.ends_with("# EOF\n"));
    }
}
