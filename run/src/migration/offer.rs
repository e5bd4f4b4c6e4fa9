//! Another connection for missing pages, after one was lost: an operator's client brings it to the target's control
//! socket.
//!
//! ```text
//!   wideleaf vm TARGET recover --incoming ADDRESS            wideleaf vm SOURCE recover ADDRESS
//!     takes one connection, passes it                          connects, passes the connection
//!        │                                                        │
//!        ▼   target                                   source      ▼
//!     Offer::accept ◀──────────── again: name of the migration ── the same RAM, still paused
//!                   ── welcome, and requests for all that was asked for and did not come ──▶
//! ```
//!
//! Until then, pages still come over the connection before it, if they do.

use std::os::fd::OwnedFd;
use std::time::Duration;

use wideleaf_control::vm::PostCopyView;

use super::address::{ConnectionEnds, PassedConnection};
use super::frames::Kind;
use super::link::{Limit, LinkError, Receiver, Sender};
use crate::snapshot::parts::has_gone;

/// Time without a byte after which the source counts as gone, before it has said which migration it is about.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Time in which the source learns that it is refused.
const REFUSAL_WAIT_MAX: Duration = Duration::from_secs(1);

/// Called once with the end: the figures, or one line.
pub type Done = Box<dyn FnOnce(Result<PostCopyView, String>) + Send>;

/// A connection that was not tried yet.
pub struct Offer {
    passed: PassedConnection,
    /// Answers the client.
    pub done: Done,
}

/// A connection on which the source of the migration has answered.
pub struct Accepted {
    /// Its writing end.
    pub sender: Sender,
    /// Its reading end.
    pub receiver: Receiver,
    /// Answers the client.
    pub done: Done,
}

impl Accepted {
    /// Refuses it after all, for this reason, which is told to both sides.
    pub fn refuse(mut self, why: &str) {
        let limit = Limit { silence: REFUSAL_WAIT_MAX, until: None, keep_on: &|| true };
        // The source may have gone.
        let _ = self.sender.send(Kind::Failed, &[why.as_bytes()], &limit);
        (self.done)(Err(why.to_owned()));
    }
}

impl Offer {
    /// Of the files that came with a client's request: reading end, writing end, and a pipe's reading end.
    ///
    /// # Errors
    /// One line.
    pub fn new(files: Vec<OwnedFd>, done: Done) -> Result<Offer, String> {
        let passed = PassedConnection::of(files).map_err(|why| format!("cannot recover the VM: {why}"))?;
        Ok(Offer { passed, done })
    }

    /// Waits until the source says which migration it is about.
    ///
    /// # Errors
    /// One line, and what answers the client.
    pub fn accept(self, id: &str, keep_on: &dyn Fn() -> bool) -> Result<Accepted, (String, Done)> {
        let Offer { passed: PassedConnection { ends: ConnectionEnds { reader, writer }, client }, done } = self;
        let (mut sender, mut receiver) = (Sender::new(writer), Receiver::new(reader));
        let keep_on = || keep_on() && !has_gone(&client);
        let limit = Limit { silence: SILENCE_MAX, until: None, keep_on: &keep_on };
        match greet(&mut sender, &mut receiver, id, &limit) {
            Ok(()) => Ok(Accepted { sender, receiver, done }),
            Err(lost) => Err((format!("cannot recover the VM: {lost}; its RAM is still incomplete"), done)),
        }
    }
}

fn greet(sender: &mut Sender, receiver: &mut Receiver, id: &str, limit: &Limit<'_>) -> Result<(), LinkError> {
    let mut content = Vec::new();
    sender.greet(limit)?;
    receiver.greeted(limit)?;
    receiver.expect(Kind::Again, &mut content, limit)?;
    if content != id.as_bytes() {
        let why = "this VM came by another migration; connect to the target of this one";
        sender.send(Kind::Failed, &[why.as_bytes()], limit)?;
        return Err(LinkError::Refused(why.to_owned()));
    }
    sender.send(Kind::Welcome, &[], limit)
}
