//! Looks at guests that nobody manages: each by a thread of its own, so that who asks waits a moment and no longer, however large guests are
//! and whoever does not answer for them. A process that hangs (in the kernel, or its monitor) hangs the look at it, and no other.
//!
//! ```text
//!   list ─▶ older than LOOK_INTERVAL, nobody looks ─▶ a round: one guest after the other ─▶ views
//!        └▶ waits for its end, or ANSWER_WITHIN ─▶ what is known; "still being looked at" where nothing is
//!   each look ─▶ a thread ─┬─ back within PATIENCE ─▶ the next
//!                          └─ not back ─▶ named in the log, once ─▶ the next; this guest again when it is back
//!                                         OUT_MAX of them ─▶ no others begin
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use wideleaf_control::client::QUESTION_TIMEOUT;
use wideleaf_control::view::{Care, Guarantee, VmView};
use wideleaf_memory::panicked::caught;

use crate::guests::{Found, Guests, ProcessId};

/// Guests that nobody manages are looked at again only after that long: whoever may ask may ask as often as they like.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A host's small guests are looked at in some milliseconds. One of a terabyte takes seconds, and a libvirtd that hangs takes two for each.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// What takes longer is not waited for. Who asks over the socket gives up soon after.
const PATIENCE: Duration = Duration::from_millis(1500);

const _: () = assert!(
    PATIENCE.as_millis() < QUESTION_TIMEOUT.as_millis(),
    "who asks is still there to hear why there is no answer"
);

/// Looks that are under way at once. Three at most are waited for; the others hang, each with a thread for as long as it does.
const OUT_MAX: usize = 8;

/// See the module.
pub(super) struct Looks {
    seen: Mutex<Seen>,
    ended: Condvar,
    patience: Duration,
}

impl Default for Looks {
    fn default() -> Looks {
        Looks::with_patience(PATIENCE)
    }
}

#[derive(Default)]
struct Seen {
    ended_at: Option<Instant>,
    is_looking: bool,
    /// `None`: it could not be looked at, mostly because it has just ended.
    views: BTreeMap<ProcessId, Option<VmView>>,
    /// Looks under way, by their number: at whom, and since when.
    out: BTreeMap<u64, (ProcessId, Instant)>,
    next: u64,
    /// Whose look was not waited for, as the log has it.
    named: BTreeSet<ProcessId>,
}

impl Seen {
    /// For how long a look at it is under way.
    fn out_for(&self, process: ProcessId) -> Option<Duration> {
        self.out.values().filter(|(of, _)| *of == process).map(|(_, since)| since.elapsed()).max()
    }
}

impl Looks {
    fn with_patience(patience: Duration) -> Looks {
        Looks { seen: Mutex::default(), ended: Condvar::new(), patience }
    }

    /// Views of `found`, whom nobody manages.
    pub(super) fn at(self: &Arc<Looks>, guests: &Arc<dyn Guests>, found: &[Found]) -> Vec<VmView> {
        self.begin(guests, found);
        let is_looking = |seen: &mut Seen| seen.is_looking;
        let waited = self.ended.wait_timeout_while(self.seen(), ANSWER_WITHIN, is_looking);
        let (seen, _) = waited.unwrap_or_else(PoisonError::into_inner);
        found.iter().filter_map(|found| self.known(&seen, found)).collect()
    }

    /// What is known of one; `None` where it could not be looked at.
    fn known(&self, seen: &Seen, found: &Found) -> Option<VmView> {
        let hangs = seen.out_for(found.process).filter(|out_for| *out_for >= self.patience);
        let note = match (hangs, seen.views.get(&found.process)) {
            (None, Some(view)) => return view.clone(),
            (None, None) => "it is still being looked at: ask again in a moment".to_owned(),
            (Some(out_for), _) => {
                format!("a look at it is not back for {} s: it is very large, or its process hangs", out_for.as_secs())
            }
        };
        let mut view = seen.views.get(&found.process).cloned().flatten().unwrap_or_else(|| by_name(found));
        view.notes.push(note);
        Some(view)
    }

    /// What `look` sees of one guest.
    ///
    /// # Errors
    /// Its own, or that it is not back in time.
    pub(super) fn one<T: Send + 'static>(
        self: &Arc<Looks>,
        found: &Found,
        look: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let number = self.go_out(found)?;
        let (looks, (bring, brought)) = (Arc::clone(self), mpsc::channel());
        let looking = move || {
            // Whatever one shows of itself that nobody thought of, the others are looked at.
            let view = caught(look).unwrap_or_else(|panicked| Err(format!("the look at it {panicked}")));
            looks.seen().out.remove(&number);
            // Who asked may have given up.
            let _ = bring.send(view);
        };
        if let Err(error) = thread::Builder::new().name("look".into()).spawn(looking) {
            self.seen().out.remove(&number);
            return Err(format!("{} is not looked at: {error}", found.name));
        }
        brought.recv_timeout(self.patience).unwrap_or_else(|_| Err(self.given_up(found)))
    }

    fn go_out(&self, found: &Found) -> Result<u64, String> {
        let mut seen = self.seen();
        if let Some(out_for) = seen.out_for(found.process).filter(|out_for| *out_for >= self.patience) {
            return Err(format!("an earlier look at {} is not back for {} s", found.name, out_for.as_secs()));
        }
        if seen.out.len() >= OUT_MAX {
            return Err(format!("{OUT_MAX} looks at guests hang, see the log: no other is begun before one is back"));
        }
        let number = seen.next;
        seen.next += 1;
        seen.out.insert(number, (found.process, Instant::now()));
        Ok(number)
    }

    /// A line in the log, once for each guest, and why there is no answer.
    fn given_up(&self, found: &Found) -> String {
        let why = format!(
            "a look at it is not back within {} ms: it is very large, or its process hangs",
            self.patience.as_millis()
        );
        if self.seen().named.insert(found.process) {
            tracing::warn!("{} (pid {}): {why}; others are looked at meanwhile", found.name, found.process.pid);
        }
        why
    }

    fn begin(self: &Arc<Looks>, guests: &Arc<dyn Guests>, found: &[Found]) {
        let mut seen = self.seen();
        let is_fresh = seen.ended_at.is_some_and(|at| at.elapsed() < LOOK_INTERVAL);
        let is_known = |found: &Found| seen.views.contains_key(&found.process) || seen.out_for(found.process).is_some();
        if seen.is_looking || found.is_empty() || (is_fresh && found.iter().all(is_known)) {
            return;
        }
        seen.is_looking = true;
        drop(seen);
        let (looks, guests, found) = (Arc::clone(self), Arc::clone(guests), found.to_vec());
        let looking = thread::Builder::new().name("looks".into()).spawn(move || looks.round(&guests, &found));
        if let Err(error) = looking {
            tracing::error!("guests that nobody manages are not looked at: {error}");
            self.end();
        }
    }

    fn round(self: &Arc<Looks>, guests: &Arc<dyn Guests>, found: &[Found]) {
        {
            let is_found = |process: &ProcessId| found.iter().any(|found| found.process == *process);
            let mut seen = self.seen();
            seen.views.retain(|process, _| is_found(process));
            seen.named.retain(is_found);
        }
        for found in found {
            let (looks, guests, of) = (Arc::clone(self), Arc::clone(guests), found.clone());
            // What it sees is kept also where nobody waits for it any more.
            let look = move || {
                let view = caught(|| guests.look(&of)).ok().and_then(Result::ok);
                looks.seen().views.insert(of.process, view);
                Ok(())
            };
            if let Err(why) = self.one(found, look) {
                tracing::debug!("{} (pid {}): {why}", found.name, found.process.pid);
            }
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

/// Who it is, and no more.
fn by_name(found: &Found) -> VmView {
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
        notes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guests::fake::FakeGuests;

    fn looks() -> Arc<Looks> {
        Arc::new(Looks::with_patience(Duration::from_millis(250)))
    }

    /// Has a round made now, however new the last one is, and waits for its end.
    fn round(looks: &Arc<Looks>, guests: &FakeGuests) -> Vec<VmView> {
        let door: Arc<dyn Guests> = Arc::new(guests.clone());
        let found = guests.find().expect("they are seen");
        looks.round(&door, &found);
        looks.at(&door, &found)
    }

    fn is_seen(view: &VmView) -> bool {
        view.backing.is_some()
    }

    #[test]
    fn a_guest_that_hangs_is_named_once_and_the_others_are_looked_at_again_and_again() {
        let (looks, guests) = (looks(), FakeGuests::default());
        for (pid, name) in [(10, "hangs"), (11, "web"), (12, "db")] {
            guests.start(pid, name);
        }
        let busy = guests.guest(10).busy;
        let hanging = busy.lock().expect("nobody panicked");
        for huge in [4 << 20, 8 << 20] {
            guests.change(12, |guest| guest.backing.huge_2m = huge);
            let views = round(&looks, &guests);
            assert_eq!(views.iter().map(is_seen).collect::<Vec<_>>(), [false, true, true]);
            assert!(views[0].notes[0].contains("is not back for"), "{:?}", views[0].notes);
            assert_eq!(views[2].backing.map(|backing| backing.huge_2m), Some(huge));
        }
        let seen = looks.seen();
        assert_eq!((seen.out.len(), seen.named.iter().map(|process| process.pid).collect::<Vec<_>>()), (1, vec![10]));
        drop(seen);
        let found = guests.guest(10).found;
        assert!(looks.one(&found, || Ok(())).expect_err("it hangs").contains("an earlier look at hangs is not back"));
        drop(hanging);
        while !looks.seen().out.is_empty() {
            thread::yield_now();
        }
        assert!(round(&looks, &guests).iter().all(is_seen));
    }

    #[test]
    fn no_more_looks_hang_than_so_many_and_all_go_on_once_one_is_back() {
        let (looks, guests) = (looks(), FakeGuests::default());
        let busy: Arc<Mutex<()>> = Arc::default();
        for pid in 0..OUT_MAX as u32 + 3 {
            guests.start(pid, "hangs");
            guests.change(pid, |guest| guest.busy = busy.clone());
        }
        guests.start(100, "web");
        let hanging = busy.lock().expect("nobody panicked");
        let views = round(&looks, &guests);
        assert_eq!((views.len(), views.iter().filter(|view| is_seen(view)).count()), (OUT_MAX + 4, 0));
        let counts = |seen: MutexGuard<'_, Seen>| (seen.out.len(), seen.named.len());
        assert_eq!(counts(looks.seen()), (OUT_MAX, OUT_MAX));
        let refused = looks.one(&guests.guest(100).found, || Ok(())).expect_err("there is no place");
        assert!(refused.starts_with("8 looks at guests hang"), "{refused}");
        drop(hanging);
        while !looks.seen().out.is_empty() {
            thread::yield_now();
        }
        assert!(round(&looks, &guests).iter().all(is_seen));
    }
}
