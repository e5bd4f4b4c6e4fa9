//! A migration that lost its connection while pages were missing at the target, continued over another one: the
//! source's side.
//!
//! ```text
//!   serving ── loss ─▶ Doubt with an UnfinishedMigration ── `recover` ─▶ again, welcome ─▶ serving ─▶ complete
//!                            │                       │ no welcome: the doubt stays      │ loss: another doubt
//!                            └── `resume`: what is kept is dropped, since the guest writes its RAM from then on
//! ```

use std::os::fd::OwnedFd;
use std::time::Duration;

use wideleaf_control::vm::MigratedView;
use wideleaf_memory::manager::RestAnswer;
use wideleaf_vmm::sys::random;

use super::POST_COPY_SILENCE_MAX;
use super::address::PassedConnection;
use super::doubt::{Departed, Doubt, UnfinishedMigration};
use super::frames::Kind;
use super::handover::{Guest, SourceEvent};
use super::link::Limit;
use super::serving::Serving;
use super::wire::{Sink, Wire};
use crate::report::Left;
use crate::snapshot::parts::{SavedParts, Shared, has_gone};

/// Time without a byte after which the target counts as gone, before it has said that it goes on.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Exchanges the figures with the target of a guest that has ended here.
pub fn leave(departed: &Departed, to: &str, wire: &Wire) -> MigratedView {
    let arrived = wire.exchange(&departed.left);
    let Left { downtime_ms, rounds, huge_bytes_before, huge_bytes_at_switch, .. } = departed.left;
    MigratedView {
        to: to.to_owned(),
        sent_bytes: departed.sent_bytes,
        rounds,
        downtime_ms,
        seconds: departed.began.elapsed().as_secs_f64(),
        huge_bytes_before,
        huge_bytes_at_switch,
        huge_bytes_at_target: arrived.as_ref().map(|arrived| arrived.huge_bytes),
        base_bytes_at_target: arrived.as_ref().map(|arrived| arrived.base_bytes),
        logs_start_ms: departed.left.logs_start_ms,
        logs_began_set: departed.logs_began_set,
        before_pause: departed.left.before_pause,
        post_copy: arrived.and_then(|arrived| arrived.post_copy),
    }
}

/// Why the VM waits, after a loss.
pub fn broken(to: &str, why: &str) -> String {
    format!(
        "the VM ran at {to} while a part of its RAM was still here, and then {why}; it stays paused here as it was at \
         the switch: if it waits there, `recover --incoming ADDRESS` there and `recover ADDRESS` here continue it \
         there; if it has all of its RAM there, `stop --how kill` this VM; if it has ended there, `resume` continues \
         it here, without what it did since, unless it has written a disk"
    )
}

/// A name that no other migration has.
///
/// # Errors
/// The kernel's error (getrandom(2)).
pub fn new_id() -> std::io::Result<String> {
    let mut bytes = [0; 16];
    random::fill(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// A client's request to go on.
pub struct Rejoining {
    /// Address of the target, as the client has it.
    pub to: String,
    /// Reading end, writing end, and a pipe's reading end that tells when the client has gone.
    pub files: Vec<OwnedFd>,
}

/// End of an attempt.
pub enum Recovered {
    /// The target has all, and the guest has ended here.
    Left(MigratedView),
    /// The target did not answer, or is another one, for this reason: all is as before.
    Refused(String, UnfinishedMigration),
    /// Pages went, and then the connection was lost.
    Lost(Doubt),
}

/// Sends the rest over another connection.
pub fn recover(parts: &SavedParts, mut kept: UnfinishedMigration, job: Rejoining, shared: &Shared) -> Recovered {
    let Rejoining { to, files } = job;
    let cannot = |why: &str| format!("cannot recover the VM at {to}: {why}");
    let PassedConnection { ends, client } = match PassedConnection::of(files) {
        Ok(passed) => passed,
        Err(why) => return Recovered::Refused(cannot(why), kept),
    };
    let wire = Wire::new(ends);
    let keep_on = || !shared.is_ending() && !shared.is_replaced() && !has_gone(&client);
    let limit = Limit { silence: SILENCE_MAX, until: None, keep_on: &keep_on };
    if let Err(lost) = wire.greet(Kind::Again, kept.departed.id.as_bytes(), &limit) {
        return Recovered::Refused(cannot(&wire.why(lost, shared)), kept);
    }
    kept.turn = kept.turn.after(SourceEvent::Rejoined);
    // Pages must not move while they are read.
    let _resting = parts.session.upgrade().and_then(|session| session.ask_to_rest()).map(RestAnswer::wait);
    let follows = || parts.follows(shared);
    let limit = || Limit { silence: POST_COPY_SILENCE_MAX, until: None, keep_on: &follows };
    let sink = Sink { sender: &wire.sender, limit: &limit, huge: &kept.huge };
    let mut serving = Serving::new(&parts.ram, &sink, kept.missing);
    let served = wire.serve(&mut serving, shared, &limit());
    kept.missing = serving.into_missing();
    kept.turn = kept.turn.after(if served.is_ok() { SourceEvent::Complete } else { SourceEvent::Lost });
    kept.departed.sent_bytes += wire.sent();
    let why = served.err().map(|lost| wire.why(lost, shared)).unwrap_or_default();
    match kept.turn.guest() {
        Guest::Ended => {
            parts.end_guest();
            Recovered::Left(leave(&kept.departed, &to, &wire))
        }
        Guest::Here | Guest::Waits => Recovered::Lost(Doubt { why: broken(&to, &why), kept: Some(kept) }),
    }
}
