//! Surveys of unmanaged guests, and the list of running guests. Each survey is a question with a deadline, so a
//! request waits only a moment, however large guests are and whatever does not answer. A process that hangs (in the
//! kernel, or its monitor) delays only its own survey.
//!
//! ```text
//!   list ─▶ find ────────── waits FIND_WITHIN ─▶ the guests of this find, or of the latest
//!        └▶ older than LOOK_INTERVAL, no round yet ─▶ a round: WORKERS guests at a time ─▶ views
//!             └▶ waits for its end, but not for guests that are slow, nor longer than ANSWER_WITHIN
//!                  ─▶ known views; otherwise "its survey is still under way", or why it does not answer
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use wideleaf_control::client::QUESTION_TIMEOUT;
use wideleaf_control::protocol::ASK_AGAIN;
use wideleaf_control::view::{Care, Guarantee, SavedView, VmView};
use wideleaf_memory::deadline::Questions;
use wideleaf_memory::panicked::caught;

use super::kept_view::KeptView;
use super::reported::MAP_WITHIN;
use crate::guests::{Found, Guests, ProcessId};

/// Shortest time between two surveys of an unmanaged guest, however often clients ask.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Time that a request waits for a new list of guests. The scan reads the links of all open files of all processes:
/// some ten milliseconds, or a second on a busy host. After that the answer has the guests of the latest scan.
const FIND_WITHIN: Duration = Duration::from_millis(500);

/// The same limit where there is no earlier scan, as when the daemon has just started.
const FIRST_FIND_WITHIN: Duration = Duration::from_secs(2);

/// Time that a list waits for the surveys. A host's small guests take some milliseconds. One of a terabyte takes
/// seconds, and a libvirtd that hangs takes two for each.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Duration of a survey after which a list shows the guest's last view instead of waiting.
const SLOW: Duration = Duration::from_millis(200);

/// Time that a request for one guest waits, shorter than the wait of its client.
const PATIENCE: Duration = Duration::from_millis(1500);

const _: () = assert!(
    FIRST_FIND_WITHIN.as_millis() + MAP_WITHIN.as_millis() + PATIENCE.as_millis() < QUESTION_TIMEOUT.as_millis(),
    "the client still waits for the reason why there is no answer"
);

/// Number of guests surveyed at once: one that hangs for the first time delays a part of the round.
const WORKERS: usize = 4;

/// Interval between checks whether only slow guests are left.
const STEP: Duration = Duration::from_millis(20);

/// Views of unmanaged guests; see the module.
pub(super) struct Surveys {
    questions: Arc<Questions>,
    seen: Mutex<Seen>,
    changed: Condvar,
    patience: Duration,
}

#[derive(Default)]
struct Seen {
    /// Guests of the latest scan.
    found: Option<Result<Vec<Found>, String>>,
    is_finding: bool,
    ended_at: Option<Instant>,
    is_looking: bool,
    /// Guests of the round that are still to be surveyed.
    due: BTreeSet<ProcessId>,
    /// `None` after a failed survey, mostly because the guest has just ended.
    views: BTreeMap<ProcessId, Option<KeptView>>,
}

impl Surveys {
    pub(super) fn new(questions: Arc<Questions>) -> Surveys {
        Surveys { questions, seen: Mutex::default(), changed: Condvar::new(), patience: PATIENCE }
    }

    /// The running guests: of a new scan, or where that takes long, of the latest.
    ///
    /// # Errors
    /// One line: the guests are not known, or not yet.
    pub(super) fn found(self: &Arc<Surveys>, guests: &Arc<dyn Guests>) -> Result<Vec<Found>, String> {
        if !std::mem::replace(&mut self.seen().is_finding, true) {
            let (looks, guests) = (Arc::clone(self), Arc::clone(guests));
            let find = move || {
                let found =
                    caught(|| guests.find()).unwrap_or_else(|panicked| Err(format!("finding guests {panicked}")));
                let mut seen = looks.seen();
                (seen.found, seen.is_finding) = (Some(found), false);
                looks.changed.notify_all();
            };
            if let Err(error) = thread::Builder::new().name("find".into()).spawn(find) {
                self.seen().is_finding = false;
                return Err(format!("cannot look for guests: {error}"));
            }
        }
        let within = if self.seen().found.is_none() { FIRST_FIND_WITHIN } else { FIND_WITHIN };
        let mut seen = self.seen();
        self.changed.wait_while_for(&mut seen, |seen| seen.is_finding, within);
        seen.found.clone().unwrap_or_else(|| Err(format!("the search for guests is still under way: {ASK_AGAIN}")))
    }

    /// Stores the result of the daemon's own scan, for requests that come while another takes long.
    pub(super) fn keep(&self, found: Vec<Found>) {
        self.seen().found = Some(Ok(found));
    }

    /// Views of the unmanaged guests `found`.
    pub(super) fn at(self: &Arc<Surveys>, guests: &Arc<dyn Guests>, found: &[Found]) -> Vec<VmView> {
        self.begin(guests, found);
        let until = Instant::now() + ANSWER_WITHIN;
        let mut seen = self.seen();
        while seen.is_looking && Instant::now() < until && found.iter().any(|found| self.is_worth_waiting(&seen, found))
        {
            self.changed.wait_for(&mut seen, STEP);
        }
        found.iter().filter_map(|found| self.known(&seen, found)).collect()
    }

    fn is_worth_waiting(&self, seen: &Seen, found: &Found) -> bool {
        let is_slow = || self.questions.out_for(found.key()).is_some_and(|out_for| out_for >= SLOW);
        seen.due.contains(&found.process) && !is_slow()
    }

    /// The latest view of one guest; `None` after a failed survey.
    fn known(&self, seen: &Seen, found: &Found) -> Option<VmView> {
        let silence = || self.questions.silence_of(found.key()).map(|no_answer| no_answer.to_string());
        let kept = seen.views.get(&found.process);
        let view = kept.map(|kept| kept.as_ref().map(|view| view.shown(Instant::now())));
        let note = match (found.no_answer.clone().or_else(silence), &view) {
            (None, Some(_)) => return view.flatten(),
            (None, None) => format!("its survey is still under way: {ASK_AGAIN}"),
            (Some(why), _) => format!("it {why}"),
        };
        let mut view = view.flatten().unwrap_or_else(|| by_name(found));
        view.notes.push(note);
        Some(view)
    }

    /// Result of `look` on one guest.
    ///
    /// # Errors
    /// The guest does not answer.
    pub(super) fn one<T: Send + 'static>(
        &self,
        found: &Found,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let silent = |why: &dyn std::fmt::Display| format!("{} (pid {}) {why}", found.name, found.process.pid);
        if let Some(why) = &found.no_answer {
            return Err(silent(why));
        }
        self.questions.ask(found.key(), self.patience, look).map_err(|no_answer| silent(&no_answer))
    }

    fn begin(self: &Arc<Surveys>, guests: &Arc<dyn Guests>, found: &[Found]) {
        let mut seen = self.seen();
        let is_fresh = seen.ended_at.is_some_and(|at| at.elapsed() < LOOK_INTERVAL);
        let is_known = |found: &Found| {
            found.no_answer.is_some()
                || seen.views.contains_key(&found.process)
                || self.questions.out_for(found.key()).is_some()
        };
        if seen.is_looking || found.is_empty() || (is_fresh && found.iter().all(is_known)) {
            return;
        }
        seen.is_looking = true;
        seen.due = found.iter().map(|found| found.process).collect();
        drop(seen);
        let (looks, guests, found) = (Arc::clone(self), Arc::clone(guests), found.to_vec());
        let looking = thread::Builder::new().name("looks".into()).spawn(move || looks.round(&guests, &found));
        if let Err(error) = looking {
            tracing::error!("cannot survey unmanaged guests: {error}");
            self.end();
        }
    }

    fn round(self: &Arc<Surveys>, guests: &Arc<dyn Guests>, found: &[Found]) {
        self.seen().views.retain(|process, _| found.iter().any(|found| found.process == *process));
        let mut queue: VecDeque<&Found> = found.iter().collect();
        {
            // New ones first: guests that were seen before may all hang now, each for `patience`.
            let seen = self.seen();
            queue.make_contiguous().sort_by_key(|found| seen.views.contains_key(&found.process));
        }
        let queue = Mutex::new(queue);
        let next = || queue.lock().pop_front();
        let work = || {
            while let Some(found) = next() {
                self.look_at(guests, found);
            }
        };
        thread::scope(|scope| {
            for _ in 1..WORKERS.min(found.len()) {
                // Without another thread this one does all of the work.
                let _ = thread::Builder::new().name("looks".into()).spawn_scoped(scope, work);
            }
            work();
        });
        self.end();
    }

    fn look_at(self: &Arc<Surveys>, guests: &Arc<dyn Guests>, found: &Found) {
        let (looks, guests, of) = (Arc::clone(self), Arc::clone(guests), found.clone());
        // The view is stored even after the asking thread has given up.
        let look = move || {
            let view = caught(|| guests.look(&of)).ok().and_then(Result::ok).map(KeptView::from);
            looks.seen().views.insert(of.process, view);
        };
        if let Err(why) = self.one(found, look) {
            tracing::debug!("{why}");
        }
        self.seen().due.remove(&found.process);
        self.changed.notify_all();
    }

    fn end(&self) {
        let mut seen = self.seen();
        (seen.is_looking, seen.ended_at) = (false, Some(Instant::now()));
        seen.due.clear();
        self.changed.notify_all();
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock()
    }
}

/// A view with the guest's identity only.
fn by_name(found: &Found) -> VmView {
    VmView {
        name: found.name.clone(),
        uuid: found.uuid.clone(),
        pid: found.process.pid,
        started_at: found.process.started_at,
        vmm: found.vmm,
        cgroup: None,
        care: Care::Unmanaged,
        policy: None,
        guarantee: Guarantee::BestEffort,
        ram: Vec::new(),
        backing: None,
        scan_age_s: None,
        mapping: None,
        page_tables: None,
        numa: None,
        guest_pages: None,
        saved: SavedView::default(),
        work: None,
        notes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guests::fake::FakeGuests;

    fn looks() -> Arc<Surveys> {
        let patience = Duration::from_millis(250);
        Arc::new(Surveys { patience, ..Surveys::new(Arc::default()) })
    }

    /// Runs a round now, however recent the last one is, and waits for its end.
    fn round(looks: &Arc<Surveys>, guests: &FakeGuests) -> Vec<VmView> {
        let door: Arc<dyn Guests> = Arc::new(guests.clone());
        let found = looks.found(&door).expect("they are seen");
        looks.round(&door, &found);
        looks.at(&door, &found)
    }

    fn is_seen(view: &VmView) -> bool {
        view.backing.is_some()
    }

    fn say(view: &VmView) -> &str {
        view.notes.first().map_or("", String::as_str)
    }

    #[test]
    fn a_guest_that_hangs_has_a_note_and_the_others_are_surveyed_again_and_again() {
        let (looks, guests) = (looks(), FakeGuests::default());
        for (pid, name) in [(10, "hangs"), (11, "web"), (12, "db")] {
            guests.start(pid, name);
        }
        let busy = guests.guest(10).busy;
        let hanging = busy.lock();
        for huge in [4 << 20, 8 << 20] {
            guests.change(12, |guest| guest.backing.huge_2m = huge);
            let views = round(&looks, &guests);
            assert_eq!(views.iter().map(is_seen).collect::<Vec<_>>(), [false, true, true]);
            assert!(say(&views[0]).starts_with("it does not answer"), "{:?}", views[0].notes);
            assert_eq!(views[2].backing.map(|backing| backing.huge_2m), Some(huge));
        }
        let found = guests.guest(10).found;
        let refused = looks.one(&found, || ()).expect_err("it hangs");
        assert!(refused.starts_with("hangs (pid 10) does not answer"), "{refused}");
        drop(hanging);
        while looks.questions.out_for(found.key()).is_some() {
            thread::yield_now();
        }
        assert!(round(&looks, &guests).iter().all(is_seen));
    }

    #[test]
    fn many_guests_that_hang_delay_no_other_and_all_are_seen_once_they_answer() {
        let (looks, guests) = (looks(), FakeGuests::default());
        let busy: Arc<Mutex<()>> = Arc::default();
        for pid in 0..3 * WORKERS as u32 {
            guests.start(pid, "hangs");
            guests.change(pid, |guest| guest.busy = busy.clone());
        }
        guests.start(100, "web");
        let hanging = busy.lock();
        let views = round(&looks, &guests);
        let seen: Vec<u32> = views.iter().filter(|view| is_seen(view)).map(|view| view.pid).collect();
        assert_eq!((views.len(), seen), (3 * WORKERS + 1, vec![100]));
        drop(hanging);
        let is_out = |pid| looks.questions.out_for(guests.guest(pid).found.key()).is_some();
        while (0..3 * WORKERS as u32).any(is_out) {
            thread::yield_now();
        }
        assert!(round(&looks, &guests).iter().all(is_seen));
    }

    #[test]
    fn a_new_guest_is_surveyed_before_those_that_were_seen_and_may_hang_now() {
        const HANGING: u32 = 3 * WORKERS as u32;
        let (patient, guests) = (Duration::from_secs(60), FakeGuests::default());
        let looks = Arc::new(Surveys { patience: patient, ..Surveys::new(Arc::default()) });
        let busy: Arc<Mutex<()>> = Arc::default();
        for pid in 0..HANGING {
            guests.start(pid, "hangs");
            guests.change(pid, |guest| guest.busy = busy.clone());
        }
        assert!(round(&looks, &guests).iter().all(is_seen));
        while looks.seen().is_looking {
            thread::yield_now();
        }
        let hanging = busy.lock();
        guests.start(100, "web");
        let door: Arc<dyn Guests> = Arc::new(guests.clone());
        let found = looks.found(&door).expect("they are seen");
        looks.begin(&door, &found);
        let new = guests.guest(100).found.process;
        let left = loop {
            let seen = looks.seen();
            if seen.views.contains_key(&new) {
                break seen.due.len();
            }
            drop(seen);
            thread::yield_now();
        };
        assert!(left >= HANGING as usize, "it was surveyed after {}", HANGING as usize - left);
        drop(hanging);
        while looks.seen().is_looking {
            thread::yield_now();
        }
    }

    #[test]
    fn a_guest_that_did_not_even_give_its_name_is_not_asked_more() {
        let (looks, guests) = (looks(), FakeGuests::default());
        guests.start(10, "10");
        guests.change(10, |guest| guest.found.no_answer = Some("does not answer: of the test".into()));
        let views = round(&looks, &guests);
        assert_eq!((is_seen(&views[0]), say(&views[0])), (false, "it does not answer: of the test"));
    }

    #[test]
    fn the_latest_list_of_guests_is_used_while_a_new_scan_takes_long() {
        let (looks, guests) = (looks(), FakeGuests::default());
        guests.start(10, "web");
        let door: Arc<dyn Guests> = Arc::new(guests.clone());
        let names = |found: Vec<Found>| found.into_iter().map(|found| found.name).collect::<Vec<_>>();
        assert_eq!(looks.found(&door).map(names), Ok(vec!["web".to_owned()]));
        let slow = guests.slow_find();
        let hanging = slow.lock();
        guests.start(11, "db");
        assert_eq!(looks.found(&door).map(names), Ok(vec!["web".to_owned()]));
        drop(hanging);
        while looks.seen().is_finding {
            thread::yield_now();
        }
        assert_eq!(looks.found(&door).map(names), Ok(vec!["web".to_owned(), "db".to_owned()]));
    }
}
