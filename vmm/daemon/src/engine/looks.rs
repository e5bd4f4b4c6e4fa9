//! Looks at guests that nobody manages: by a thread of their own, so that who asks for all of them waits for [`ANSWER_WITHIN`] and no longer,
//! however large they are and whoever does not answer for them.
//!
//! ```text
//!   list ─▶ older than LOOK_INTERVAL, nobody looks ─▶ a thread: one guest after the other ─▶ views
//!        └▶ waits for its end, or ANSWER_WITHIN ─▶ what is known; "still being looked at" where nothing is
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use wideleaf_control::view::{Care, Guarantee, VmView};
use wideleaf_memory::panicked::caught;

use crate::guests::{Found, Guests, ProcessId};

/// Guests that nobody manages are looked at again only after that long: whoever may ask may ask as often as they like.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A host's small guests are looked at in some milliseconds. One of a terabyte takes seconds, and a libvirtd that hangs takes two for each.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Default)]
pub(super) struct Looks {
    seen: Mutex<Seen>,
    ended: Condvar,
}

#[derive(Default)]
struct Seen {
    ended_at: Option<Instant>,
    is_looking: bool,
    /// `None`: it could not be looked at, mostly because it has just ended.
    views: BTreeMap<ProcessId, Option<VmView>>,
}

impl Looks {
    /// Views of `found`, whom nobody manages.
    pub(super) fn at(self: &Arc<Looks>, guests: &Arc<dyn Guests>, found: &[Found]) -> Vec<VmView> {
        self.begin(guests, found);
        let is_looking = |seen: &mut Seen| seen.is_looking;
        let waited = self.ended.wait_timeout_while(self.seen(), ANSWER_WITHIN, is_looking);
        let (seen, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let view = |found: &Found| seen.views.get(&found.process).cloned().unwrap_or_else(|| Some(not_yet(found)));
        found.iter().filter_map(view).collect()
    }

    fn begin(self: &Arc<Looks>, guests: &Arc<dyn Guests>, found: &[Found]) {
        let mut seen = self.seen();
        let is_fresh = seen.ended_at.is_some_and(|at| at.elapsed() < LOOK_INTERVAL);
        let is_known = found.iter().all(|found| seen.views.contains_key(&found.process));
        if seen.is_looking || found.is_empty() || (is_fresh && is_known) {
            return;
        }
        seen.is_looking = true;
        drop(seen);
        let (looks, guests, found) = (Arc::clone(self), Arc::clone(guests), found.to_vec());
        let looking = thread::Builder::new().name("looks".into()).spawn(move || looks.look(&*guests, &found));
        if let Err(error) = looking {
            tracing::error!("guests that nobody manages are not looked at: {error}");
            self.end();
        }
    }

    fn look(&self, guests: &dyn Guests, found: &[Found]) {
        self.seen().views.retain(|process, _| found.iter().any(|found| found.process == *process));
        for found in found {
            // Whatever one shows of itself that nobody thought of, the others are looked at.
            let view = caught(|| guests.look(found)).ok().and_then(Result::ok);
            self.seen().views.insert(found.process, view);
        }
        self.end();
    }

    fn end(&self) {
        let mut seen = self.seen();
        (seen.is_looking, seen.ended_at) = (false, Some(Instant::now()));
        self.ended.notify_all();
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who it is, and why there is no more.
fn not_yet(found: &Found) -> VmView {
    VmView {
        name: found.name.clone(),
        uuid: found.uuid.clone(),
        pid: found.process.pid,
        started_at: found.process.started_at,
        vmm: found.vmm,
        care: Care::Unmanaged,
        policy: None,
        guarantee: Guarantee::BestEffort,
        ram: Vec::new(),
        backing: None,
        mapping: None,
        guest_pages: None,
        work: None,
        notes: vec!["it is still being looked at: ask again in a moment".to_owned()],
    }
}
