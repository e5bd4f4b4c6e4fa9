//! What a session knows of its guest, in a snapshot: a restored guest says neither hello nor `begin` again.
//!
//! Times of the host are left out: its clock began with its process. Marks of a phase are of the guest's clock, which
//! goes on where it was; on the host's clock all of them were before the restored run began.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wideleaf_policies::{Bytes, Gpa, GpaRange, Moment};
use wideleaf_protocol::Entry;

use super::Session;
use super::limits::{GAPS_MAX, Mark, Marks, PHASES_MAX, begin_of};
use super::log::{Log, PhaseLog};
use crate::report::{Counters, Gaps, Hello, Measurement, Problem, Verification};
use crate::text::clean;

/// What a session knows of its guest.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct SavedSession {
    hello: Option<Hello>,
    problem: Option<Problem>,
    /// Frequency of the guest's time stamp counter, in Hz; zero if it has not said it.
    tsc_hz: u64,
    phases: Vec<SavedPhase>,
    /// Name, first guest-physical address and length in bytes of each region.
    regions: Vec<(String, u64, u64)>,
    results: BTreeMap<String, Measurement>,
    gaps: Vec<Gaps>,
    verification: Option<Verification>,
    mismatch: Option<String>,
    panic: Option<String>,
    kernel_panic: Option<String>,
}

/// A stretch between `begin` and `end`, which may be open.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct SavedPhase {
    name: String,
    begin_tsc: u64,
    end_tsc: Option<u64>,
    at_begin: Counters,
    at_end: Option<Counters>,
    is_complete: bool,
    /// Guest clock in ticks, and units of work done.
    marks: Vec<(u64, u64)>,
}

impl Session {
    /// What the guest has said until now. Its vCPUs must be paused, so that none is about to say more.
    pub fn saved(&self) -> SavedSession {
        let log = self.log();
        SavedSession {
            hello: log.hello.clone(),
            problem: log.problem.clone(),
            tsc_hz: log.tsc_hz,
            phases: log.phases.iter().map(SavedPhase::of).collect(),
            regions: log.regions.iter().map(|(name, range)| named(name, *range)).collect(),
            results: log.results.clone(),
            gaps: log.gaps.clone(),
            verification: log.verification.clone(),
            mismatch: log.mismatch.clone(),
            panic: log.panic.clone(),
            kernel_panic: log.kernel_panic.clone(),
        }
    }

    /// Begins with what the guest had said when it was saved; before the guest runs.
    pub fn begin_with(&self, mut saved: SavedSession) {
        let mut log = self.log();
        let regions = std::mem::take(&mut saved.regions);
        *log = saved.into_log();
        for (name, start, bytes) in regions {
            if let Some(range) = GpaRange::new(Gpa::new(start), Bytes::new(bytes)) {
                self.keep_region(&mut log, &text(&name), range);
            }
        }
        let has_begun = log.hello.is_some();
        log.first_line_at = has_begun.then(std::time::Instant::now);
    }
}

impl SavedSession {
    /// The log of these messages without the regions, within the limits on what a guest may say: a snapshot is no more
    /// trusted than one.
    fn into_log(self) -> Log {
        let hello = self.hello.map(|hello| Hello {
            kernel: text(&hello.kernel),
            guest_page: text(&hello.guest_page),
            entry: text(&hello.entry),
            ..hello
        });
        let problem = |of: Problem| Problem { class: text(&of.class), size: text(&of.size), ..of };
        let verification =
            |of: Verification| Verification { first_mismatch: of.first_mismatch.as_deref().map(text), ..of };
        let mut log = Log {
            entry: hello.as_ref().and_then(|hello| Entry::from_word(&hello.entry)),
            hello,
            problem: self.problem.map(problem),
            tsc_hz: self.tsc_hz,
            phases: self.phases.into_iter().take(PHASES_MAX).map(SavedPhase::into_log).collect(),
            gaps: self.gaps.into_iter().take(GAPS_MAX).collect(),
            verification: self.verification.map(verification),
            mismatch: self.mismatch.as_deref().map(text),
            panic: self.panic.as_deref().map(text),
            kernel_panic: self.kernel_panic.as_deref().map(text),
            ..Log::default()
        };
        for (name, Measurement { value, unit }) in self.results {
            log.keep_result(&text(&name), Measurement { value, unit: text(&unit) });
        }
        log
    }
}

/// Text of a guest as a terminal may show it, as long as a guest may say it.
fn text(text: &str) -> String {
    clean(begin_of(text))
}

fn named(name: &str, range: GpaRange) -> (String, u64, u64) {
    (name.to_owned(), range.start().get(), range.bytes().get())
}

impl SavedPhase {
    fn of(phase: &PhaseLog) -> SavedPhase {
        SavedPhase {
            name: phase.name.clone(),
            begin_tsc: phase.begin_tsc,
            end_tsc: phase.end_tsc,
            at_begin: phase.at_begin,
            at_end: phase.at_end,
            is_complete: phase.is_complete,
            marks: phase.marks.all().iter().map(|mark| (mark.tsc, mark.done)).collect(),
        }
    }

    fn into_log(self) -> PhaseLog {
        let mut marks = Marks::default();
        for (tsc, done) in self.marks {
            marks.add(Mark { at: Moment::START, tsc, done });
        }
        PhaseLog {
            name: text(&self.name),
            began_at: Moment::START,
            begin_tsc: self.begin_tsc,
            end_tsc: self.end_tsc,
            at_begin: self.at_begin,
            at_end: self.at_end,
            is_complete: self.is_complete,
            marks,
            walks: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use wideleaf_protocol::{Message, Name};

    use super::super::limits::{REGIONS_OF_RAM_MAX, TEXT_MAX};
    use super::super::tests::session;
    use super::*;

    fn feed(session: &Session, lines: &[&str]) {
        for line in lines {
            assert!(session.on_line(&format!("@wideleaf {line}")), "{line}");
        }
    }

    /// The session after it was written, read, and taken over by the session of another run.
    fn restored(session: &Session) -> Arc<Session> {
        let text = serde_json::to_string(&session.saved()).expect("it is plain data");
        let restored = super::super::tests::session();
        restored.begin_with(serde_json::from_str(&text).expect("it was written"));
        restored
    }

    #[test]
    fn a_phase_that_was_open_ends_in_the_restored_run_with_the_time_of_the_guests_clock() {
        let before = session();
        feed(
            &before,
            &[
                "hello version=1 kernel=gups vcpus=1 guest_page=2m tsc_hz=1000 entry=direct",
                "region name=table address=0x200000 bytes=2097152",
                "begin phase=update tsc=1000",
                "progress phase=update tsc=2000 done=10 total=30",
                "result name=early value=7 unit=s",
            ],
        );
        let after = restored(&before);
        feed(&after, &["progress phase=update tsc=3000 done=20 total=30", "end phase=update tsc=4000", "exit code=0"]);
        let observed = after.observed(None, std::time::Instant::now());
        assert_eq!(observed.hello.map(|hello| hello.kernel).as_deref(), Some("gups"));
        let [phase] = &observed.phases[..] else { panic!("one phase") };
        assert!((phase.seconds - 3.0).abs() < 1e-9 && phase.is_complete && phase.units == 20, "{phase:?}");
        assert!(observed.has_begun && observed.results.contains_key("early"));
        assert_eq!(after.region_of("table"), before.region_of("table"));
    }

    #[test]
    fn progress_here_is_that_of_this_process_since_it_began() {
        let process_start = std::time::Instant::now();
        let before = session();
        let lines = ["begin phase=update tsc=1000", "progress phase=update tsc=2000 done=10 total=30"];
        feed(&before, &lines);
        let here = before.progress_here(process_start);
        assert!(matches!(&here[..], [(at_s, 10)] if *at_s > 0.0 && *at_s < 3600.0), "{here:?}");
        let after = restored(&before);
        assert_eq!(after.progress_here(process_start), [], "the mark came in another process");
        feed(&after, &["progress phase=update tsc=3000 done=20 total=30"]);
        let later = after.progress_here(process_start);
        assert!(matches!(&later[..], [(at_s, 20)] if *at_s >= here[0].0), "{here:?} {later:?}");
    }

    #[test]
    fn a_session_of_a_silent_guest_has_not_begun() {
        let after = restored(&session());
        assert!(!after.observed(None, std::time::Instant::now()).has_begun);
    }

    #[test]
    fn a_result_that_is_no_finite_number_is_not_kept_and_its_session_can_be_read_again() {
        let before = session();
        feed(&before, &["result name=a value=nan unit=s", "result name=b value=1e999 unit=s"]);
        let [name, unit] = ["c", "s"].map(Name::literal);
        before.on_message(&Message::Result { name, value: f64::INFINITY, unit });
        feed(&before, &["result name=d value=2 unit=s"]);
        let log = before.saved();
        assert_eq!(log.results.keys().collect::<Vec<_>>(), ["d"]);
        assert!(restored(&before).observed(None, std::time::Instant::now()).results.contains_key("d"));
    }

    #[test]
    fn a_forged_session_is_cut_to_the_limits_of_a_guests_messages() {
        let long = format!("\\u001b{}", "x".repeat(100_000));
        let phase = r#"{"name":"\u001bp","begin_tsc":1,"end_tsc":null,"at_begin":{"host_4k_bytes":0,"host_2m_bytes":0,
            "host_1g_bytes":0,"kvm":null},"at_end":null,"is_complete":true,"marks":[]}"#;
        let session = session();
        let bytes = session.ram.bytes().get();
        let region = [r#"["r",18446744073709551615,2]"#.to_owned(), format!(r#"["\u001br",0,{bytes}]"#)].join(",");
        let (phases, regions) = (vec![phase; 1000].join(","), vec![region; 1000].join(","));
        let hello = format!(r#"{{"kernel":"{long}","vcpus":1,"guest_page":"{long}","entry":"{long}"}}"#);
        let problem = format!(r#"{{"class":"{long}","size":"{long}","iterations":1}}"#);
        let verification = format!(r#"{{"passed":true,"errors":0,"checked":1,"first_mismatch":"{long}"}}"#);
        let text = format!(
            r#"{{"hello":{hello},"problem":{problem},"verification":{verification},"panic":"{long}","mismatch":"{long}",
            "kernel_panic":"{long}","results":{{"{long}":{{"value":1.0,"unit":"{long}"}}}},
            "tsc_hz":0,"phases":[{phases}],"regions":[{regions}],"gaps":[]}}"#
        );
        session.begin_with(serde_json::from_str(&text).expect("its form is valid"));
        let log = session.log();
        assert_eq!((log.phases.len(), log.regions.len()), (PHASES_MAX, REGIONS_OF_RAM_MAX as usize));
        assert!(log.phases.iter().all(|phase| phase.name == "?p") && log.regions.iter().all(|(name, _)| name == "?r"));
        drop(log);
        // Escaped, as a control character is in JSON.
        let kept = serde_json::to_string(&session.saved()).expect("it is plain data");
        let texts = kept.matches("?xxx").count();
        assert_eq!((texts, kept.contains("\\u001b")), (11, false));
        assert!(!kept.contains(&"x".repeat(TEXT_MAX)), "{} bytes", kept.len());
    }
}
