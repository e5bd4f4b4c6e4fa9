//! Samples the VMs in a separate thread, so that keys never wait: a daemon may take two seconds to answer.
//!
//! ```text
//!   screen ── WatchRequest ──▶ watch: sample, wait for a request or the interval, sample again ── Sampled ──▶ screen
//! ```

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Explanation, WindowMap};
use wideleaf_run::failure::Failure;

use crate::guests::tables::care_line;
use crate::vm_source::{HostReport, Source};

/// Request of the screen to the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchRequest {
    /// Also sample the windows and the explanation of this process's VM from now on.
    Detail(u32),
    /// Set another policy for this process's VM.
    SetPolicy(u32, String),
}

/// Result of one sample.
#[derive(Debug)]
pub struct Sampled {
    /// All VMs, or the reason of the failure.
    pub host: Result<HostReport, Failure>,
    /// Details of the requested VM.
    pub detail: Option<Detail>,
    /// Result of a change.
    pub message: Option<String>,
}

/// Details of one VM.
#[derive(Debug)]
pub struct Detail {
    /// Process id of the VM.
    pub pid: u32,
    /// Its windows, or the reason of the failure.
    pub windows: Result<WindowMap, Failure>,
    /// Reasons why they are not huge, or the reason of the failure.
    pub explanation: Result<Explanation, Failure>,
}

/// Both ends of the thread, which ends when they are dropped.
pub struct Watch {
    requests: Sender<WatchRequest>,
    samples: Receiver<Sampled>,
}

impl Watch {
    /// Starts to sample.
    pub fn start(source: Box<dyn Source>, interval: Duration) -> Watch {
        let (requests, received) = channel();
        let (sender, samples) = sync_channel(1);
        thread::spawn(move || run(source.as_ref(), interval, &received, &sender));
        Watch { requests, samples }
    }

    /// Sends a request to the thread.
    pub fn send(&self, request: WatchRequest) {
        // The thread lives as long as this, unless it panicked: then no more samples come, and the screen shows the
        // last one.
        let _ = self.requests.send(request);
    }

    /// The samples that have not been taken yet: at most one waits.
    pub fn samples(&self) -> impl Iterator<Item = Sampled> + '_ {
        self.samples.try_iter()
    }
}

/// Runs until the screen is gone.
fn run(source: &dyn Source, interval: Duration, requests: &Receiver<WatchRequest>, samples: &SyncSender<Sampled>) {
    let mut watched = None;
    let mut message = None;
    while samples.send(sample(source, watched, message.take())).is_ok() {
        let first = match requests.recv_timeout(interval) {
            Ok(request) => Some(request),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        // All that wait, before one sample: held arrow keys must not delay a change of policy.
        for request in first.into_iter().chain(requests.try_iter()) {
            match request {
                WatchRequest::Detail(pid) => watched = Some(pid),
                WatchRequest::SetPolicy(pid, policy) => message = Some(set_policy(source, pid, policy)),
            }
        }
    }
}

/// Takes one sample.
fn sample(source: &dyn Source, watched: Option<u32>, message: Option<String>) -> Sampled {
    let detail = |pid: u32| Detail {
        pid,
        windows: source.windows(&pid.to_string()),
        explanation: source.explanation(&pid.to_string()),
    };
    Sampled { host: source.host(), detail: watched.map(detail), message }
}

fn set_policy(source: &dyn Source, pid: u32, policy: String) -> String {
    let changes = Settings { policy: Some(policy), ..Settings::default() };
    match source.set(&pid.to_string(), changes) {
        Ok(vm) => care_line(&vm),
        Err(failure) => failure.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    #[test]
    fn one_sample_follows_all_requests_that_wait() {
        use WatchRequest::{Detail, SetPolicy};
        let (requests, received) = channel();
        let waiting = [Detail(1), Detail(2), SetPolicy(2, "off".into()), Detail(3)];
        waiting.into_iter().for_each(|request| requests.send(request).expect("it is received below"));
        drop(requests);
        let (sender, seen) = sync_channel(8);
        run(&Fake::default(), Duration::from_secs(3600), &received, &sender);
        drop(sender);
        let seen: Vec<_> = seen.iter().map(|seen| (seen.detail.map(|detail| detail.pid), seen.message)).collect();
        assert_eq!(seen, [(None, None), (Some(3), Some("no VM 2".into()))]);
    }
}
