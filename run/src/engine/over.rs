//! A run after the end of its guest, and its report.

use std::sync::Arc;
use std::time::Instant;

use wideleaf_control::view::NumaView;
use wideleaf_control::vm::MigratedView;

use super::{Finished, Prepared};
use crate::devices::WatchedDevices;
use crate::environment::{Environment, stolen_ms};
use crate::failure::Failure;
use crate::guards::step;
use crate::outcome::{Ended, Judged, judge};
use crate::report::{GuaranteeReport, RamAtEnd, RestoredReport, RunReport, Setup};
use crate::sandboxed::Sandboxed;
use crate::session::Observed;
use crate::setup::setup;
use crate::summary::summarise;

/// A run after the end of its guest; its manager, its session and its RAM still exist.
pub(super) struct Over<'a> {
    pub(super) ended: Ended,
    /// Number of boots after the first.
    pub(super) resets: u64,
    /// Run in which the guest continues, if it does.
    pub(super) migrated: Option<MigratedView>,
    /// When a vCPU first entered the guest, if one has.
    pub(super) first_entry: Option<Instant>,
    pub(super) ram_at_end: Option<RamAtEnd>,
    /// Memory and vCPUs by NUMA node at the end; `None` on a host with one node.
    pub(super) numa: Option<NumaView>,
    pub(super) guarantee: Option<GuaranteeReport>,
    pub(super) console_bytes_lost: u64,
    pub(super) paging: &'static str,
    pub(super) environment: Environment,
    pub(super) sandboxed: Option<Sandboxed>,
    pub(super) watched: Arc<WatchedDevices>,
    pub(super) of: Prepared<'a>,
}

impl Over<'_> {
    /// Stops the manager and reports what was observed. Without the headline, which is for people.
    pub(super) fn report(self, process_start: Instant) -> Result<Finished, Failure> {
        // The preparation is bound first, so that it is given back last.
        let Over { of, ended, resets, migrated, ram_at_end, numa, guarantee, console_bytes_lost, paging, .. } = self;
        let (mut environment, sandboxed, watched) = (self.environment, self.sandboxed, self.watched);
        let first_entry = self.first_entry;
        of.progress.finish();
        let manager = of.session.stop_manager();
        let mut observed = of.session.observed(manager.as_ref(), process_start);
        let is_at_request = matches!(ended, Ended::TimedOut | Ended::Interrupted | Ended::Asked | Ended::Migrated);
        let lines_lost = of.front.settle(&|| is_at_request || of.interrupts.is_set());
        step("standard error settled");
        for (what, count) in [("console_bytes", console_bytes_lost), ("stderr_lines", lines_lost)] {
            if count > 0 {
                observed.cut.insert(what.to_owned(), count);
            }
        }
        let devices = watched.reports();
        let progress = of.session.progress_here(process_start);
        let restored = of.restoring.as_ref().and_then(|restoring| restoring.end());
        let first_entry_ms = first_entry.map(|at| at.saturating_duration_since(process_start).as_secs_f64() * 1e3);
        let restored = restored.map(|restored| RestoredReport { progress, first_entry_ms, ..restored });
        of.incoming.iter().for_each(|incoming| incoming.end());
        let Judged { outcome, crash, end } = judge(of.spec, ended, &observed)?;
        environment.steal_ms = stolen_ms().saturating_sub(of.stolen_before_ms);
        let Observed { hello, problem, phases, regions, figure, results, gaps, verification, vmm, cut, .. } = observed;
        let setup = setup(of.spec, of.backing, paging, of.fallback.clone(), &environment);
        let report = RunReport {
            headline: String::new(),
            setup: Setup { walk_cost: of.walk.to_string(), sandbox: sandboxed, ..setup },
            hello,
            problem,
            outcome,
            crash,
            resets,
            figure,
            verification,
            results,
            phases,
            gaps,
            regions,
            ram_at_end,
            numa,
            restored,
            migrated,
            arrived: of.incoming.as_ref().map(|incoming| incoming.report()),
            guarantee,
            manager: manager.as_ref().map(summarise).unwrap_or_default(),
            devices,
            cut,
            vmm,
            environment,
        };
        Ok(Finished { report, end })
    }
}
