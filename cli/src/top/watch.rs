//! Looks at the VMs in a thread of its own, so that a key is never waited for: a daemon may take two seconds to answer.
//!
//! ```text
//!   screen ── Ask ──▶ watch: look, wait for an Ask or the interval, look again, ... ── Seen ──▶ screen
//! ```

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Explanation, WindowMap};

use crate::failure::Failure;
use crate::guests::tables::care_line;
use crate::source::{HostReport, Source};

/// What the screen wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// From now on also the windows and the explanation of this process's VM.
    Look(u32),
    /// Another policy for this process's VM.
    SetPolicy(u32, String),
}

/// One look.
#[derive(Debug)]
pub struct Seen {
    /// All VMs, or why not.
    pub host: Result<HostReport, Failure>,
    /// More about the one that was asked for.
    pub detail: Option<Detail>,
    /// What came of a change.
    pub message: Option<String>,
}

/// One VM.
#[derive(Debug)]
pub struct Detail {
    /// Its process.
    pub pid: u32,
    /// Its windows, or why not.
    pub windows: Result<WindowMap, Failure>,
    /// Why they are not huge, or why that is not known.
    pub explanation: Result<Explanation, Failure>,
}

/// Both ends of the thread. It ends when they are dropped.
pub struct Watch {
    asks: Sender<Ask>,
    seen: Receiver<Seen>,
}

impl Watch {
    /// Starts to look.
    pub fn start(source: Box<dyn Source>, interval: Duration) -> Watch {
        let (asks, asked) = channel();
        let (sender, seen) = sync_channel(1);
        thread::spawn(move || run(source.as_ref(), interval, &asked, &sender));
        Watch { asks, seen }
    }

    /// Hands a wish over.
    pub fn ask(&self, ask: Ask) {
        // The thread lives as long as this does, unless it panicked: then nothing comes any more, and the screen shows its last look.
        let _ = self.asks.send(ask);
    }

    /// The looks that have not been taken yet: at most one waits.
    pub fn looks(&self) -> impl Iterator<Item = Seen> + '_ {
        self.seen.try_iter()
    }
}

/// Until the screen is gone.
fn run(source: &dyn Source, interval: Duration, asked: &Receiver<Ask>, seen: &SyncSender<Seen>) {
    let mut watched = None;
    let mut message = None;
    while seen.send(look(source, watched, message.take())).is_ok() {
        match asked.recv_timeout(interval) {
            Ok(Ask::Look(pid)) => watched = Some(pid),
            Ok(Ask::SetPolicy(pid, policy)) => message = Some(set_policy(source, pid, policy)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Looks once.
pub fn look(source: &dyn Source, watched: Option<u32>, message: Option<String>) -> Seen {
    let detail = |pid: u32| Detail {
        pid,
        windows: source.windows(&pid.to_string()),
        explanation: source.explanation(&pid.to_string()),
    };
    Seen { host: source.host(), detail: watched.map(detail), message }
}

fn set_policy(source: &dyn Source, pid: u32, policy: String) -> String {
    let changes = Settings { policy: Some(policy), ..Settings::default() };
    match source.set(&pid.to_string(), changes) {
        Ok(vm) => care_line(&vm),
        Err(failure) => failure.to_string(),
    }
}
