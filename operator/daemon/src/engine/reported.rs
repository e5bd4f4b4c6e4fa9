//! Windows of a registered VM, as its own process reports them.
//!
//! ```text
//!   client ── windows ──▶ looked at ─▶ the reply to the next status has wants_windows ─▶ each further status has a map
//!                │                                                                            │
//!                └──────────── waits for it, MAP_WITHIN at most, and not again after that ◀───┘
//!   10 s without a look: no more maps, and the last one is dropped
//! ```
//!
//! Each status has the explanation, which is short, so that `explain` waits for nothing. A run that hangs holds up one
//! question for a moment. Its client then gets a survey from outside, with the reason.

use std::time::{Duration, Instant};

use wideleaf_control::protocol::LiveReport;
use wideleaf_control::view::{Explanation, WindowMap, aged};

use super::{Engine, ProcessId};

/// Time that a request waits for the first map: a run reports every second. Together with a survey it is shorter than
/// the wait of a client.
pub(super) const MAP_WITHIN: Duration = Duration::from_millis(1400);

/// Age up to which a map or a report is the present one: two intervals of reports, and time for a busy host.
const FRESH: Duration = Duration::from_millis(2500);

/// Time for which a run sends maps after a look: clients that look again do so sooner.
const LOOKED_FOR: Duration = Duration::from_secs(10);

/// What the process of a registered VM has reported of its windows.
#[derive(Debug, Default)]
pub(super) struct ReportedWindows {
    explanation: Option<Explanation>,
    map: Option<(WindowMap, Instant)>,
    reported_at: Option<Instant>,
    looked_at: Option<Instant>,
    /// Whether a request has waited too long for a map since the last one.
    is_late: bool,
}

/// Result of a look for a map.
#[derive(Debug, PartialEq)]
pub(super) enum Look {
    /// The present map.
    Map(WindowMap),
    /// It may come with the next report.
    NotYet,
    /// It does not come, for this reason.
    Never(&'static str),
}

const NO_REPORT: &str = "its `wideleaf run` does not report its windows (its manager has not begun yet, or its release \
                         is too old): they were read from outside";
const LATE: &str = "its own manager's map did not come in time: its windows were read from outside";

impl ReportedWindows {
    /// Takes a report.
    pub(super) fn take(&mut self, report: LiveReport, now: Instant) {
        self.explanation = report.explanation.map(|explanation| *explanation);
        self.reported_at = Some(now);
        match report.windows {
            Some(map) => (self.map, self.is_late) = (Some((*map, now)), false),
            None if !self.are_wanted(now) => self.map = None,
            None => {}
        }
    }

    /// Whether a client has looked at the windows lately.
    pub(super) fn are_wanted(&self, now: Instant) -> bool {
        self.looked_at.is_some_and(|at| now.saturating_duration_since(at) <= LOOKED_FOR)
    }

    /// The latest explanation.
    pub(super) fn explanation(&self) -> Option<&Explanation> {
        self.explanation.as_ref()
    }

    /// The latest explanation, with the age of its scan at `now`.
    fn explanation_at(&self, now: Instant) -> Option<Explanation> {
        let explanation = self.explanation.clone()?;
        let kept_for = self.reported_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        Some(Explanation { scan_age_s: aged(explanation.scan_age_s, kept_for), ..explanation })
    }

    /// Looks for a map; reports have one from then on.
    fn look(&mut self, now: Instant) -> Look {
        self.looked_at = Some(now);
        let is_fresh = |at: &Instant| now.saturating_duration_since(*at) <= FRESH;
        match &self.map {
            Some((map, at)) if is_fresh(at) => {
                let scan_age_s = aged(map.scan_age_s, now.saturating_duration_since(*at));
                Look::Map(WindowMap { scan_age_s, ..map.clone() })
            }
            _ if self.explanation.is_none() => Look::Never(NO_REPORT),
            _ if self.is_late || !self.reported_at.as_ref().is_some_and(is_fresh) => Look::Never(LATE),
            _ => Look::NotYet,
        }
    }
}

impl Engine {
    /// Explanation of a registered VM; `None` for any other, and for a run that does not report one.
    pub(super) fn explanation_of_run(&self, process: ProcessId) -> Option<Explanation> {
        let table = self.table();
        let vm = table.vms.get(&process)?;
        Some(Explanation { name: vm.found.name.clone(), ..vm.windows.explanation_at(Instant::now())? })
    }

    /// Windows of a registered VM, or why its process does not report them; `None` for any other.
    pub(super) fn windows_of_run(&self, process: ProcessId) -> Option<Result<WindowMap, String>> {
        let until = Instant::now() + MAP_WITHIN;
        let mut table = self.table();
        loop {
            let (now, vm) = (Instant::now(), table.vms.get_mut(&process)?);
            if vm.care().is_some() {
                return None;
            }
            match vm.windows.look(now) {
                // A map without windows says why it has none.
                Look::Map(map) if map.ranges.is_empty() => return Some(Err(map.notes.join("; "))),
                Look::Map(map) => return Some(Ok(WindowMap { name: vm.found.name.clone(), ..map })),
                Look::Never(why) => return Some(Err(why.to_owned())),
                Look::NotYet if now >= until => vm.windows.is_late = true,
                Look::NotYet => {
                    let left = until.saturating_duration_since(now);
                    self.reported.wait_for(&mut table, left);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wideleaf_control::view::WindowRange;

    fn report(backing: Option<&str>) -> LiveReport {
        let range = |backing: &str| WindowRange { backing: backing.into(), ..WindowRange::default() };
        let map = |backing| WindowMap { ranges: vec![range(backing)], ..WindowMap::default() };
        LiveReport {
            explanation: Some(Box::new(Explanation { windows: Some(2), ..Explanation::default() })),
            windows: backing.map(|backing| Box::new(map(backing))),
            ..LiveReport::default()
        }
    }

    fn backing(look: &Look) -> Option<&str> {
        match look {
            Look::Map(map) => Some(&map.ranges[0].backing),
            Look::NotYet | Look::Never(_) => None,
        }
    }

    #[test]
    fn maps_are_wanted_for_as_long_as_a_client_looks_and_dropped_afterwards() {
        let (mut windows, start) = (ReportedWindows::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        windows.take(report(None), at(0));
        assert!(!windows.are_wanted(at(0)), "nothing asks the run for work");
        assert_eq!(windows.look(at(0)), Look::NotYet);
        assert!(windows.are_wanted(at(1)));
        windows.take(report(Some("24")), at(1));
        assert_eq!(backing(&windows.look(at(2))), Some("24"));
        windows.take(report(Some("22")), at(2));
        assert_eq!(backing(&windows.look(at(2))), Some("22"));
        assert!(!windows.are_wanted(at(13)));
        windows.take(report(None), at(13));
        assert_eq!(windows.map, None);
    }

    #[test]
    fn a_run_that_hangs_or_sends_no_map_is_waited_for_once() {
        let (mut windows, start) = (ReportedWindows::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        windows.take(report(None), at(0));
        assert_eq!(windows.look(at(1)), Look::NotYet);
        windows.is_late = true;
        assert_eq!(windows.look(at(1)), Look::Never(LATE));
        windows.take(report(Some("24")), at(1));
        assert_eq!(backing(&windows.look(at(1))), Some("24"));
        assert_eq!(windows.look(at(4)), Look::Never(LATE), "its last report is too old");
    }

    #[test]
    fn the_age_of_a_scan_grows_until_it_is_shown() {
        let (mut windows, start) = (ReportedWindows::default(), Instant::now());
        let mut report = report(Some("24"));
        report.windows.as_mut().expect("it has a map").scan_age_s = Some(70.0);
        report.explanation.as_mut().expect("it has one").scan_age_s = Some(70.0);
        windows.take(report, start);
        let later = start + Duration::from_secs(2);
        let Look::Map(map) = windows.look(later) else { panic!("it is fresh") };
        assert_eq!(map.scan_age_s, Some(72.0));
        assert_eq!(windows.explanation_at(later).and_then(|explanation| explanation.scan_age_s), Some(72.0));
    }

    #[test]
    fn a_run_of_an_earlier_release_is_not_waited_for() {
        let (mut windows, now) = (ReportedWindows::default(), Instant::now());
        windows.take(LiveReport::default(), now);
        assert_eq!((windows.look(now), windows.explanation()), (Look::Never(NO_REPORT), None));
    }
}
