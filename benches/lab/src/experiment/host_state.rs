//! What the host has to be like while a job runs. Each part is had by a child, so that it is put back however we end.

use wideleaf::failure::Failure;
use wideleaf::held_pool::HeldPool;
use wideleaf_experiments::definition::HostState;
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::Measured;

pub mod fragmentation;
pub mod khugepaged;

use fragmentation::HeldFragments;
use khugepaged::HeldKhugepaged;

/// So many whole blocks more than were left are no reason to break them up: others free memory as well.
const DRIFT_MAX: u64 = 16;

/// What is kept from one job to the next where both want it: memory takes up to a minute to be broken up.
#[derive(Debug, Default)]
pub(super) struct KeptState {
    /// How many huge pages were left.
    huge_pages_left: u64,
    /// Who broke up memory, and what has become whole since.
    fragments: Vec<HeldFragments>,
}

impl KeptState {
    /// What there is to say of memory that is as the job wants it.
    fn break_up(&mut self, huge_pages_left: Option<u64>) -> Result<Option<String>, String> {
        let Some(left) = huge_pages_left else {
            self.fragments.clear();
            return Ok(None);
        };
        let now = fragmentation::free_blocks_now();
        if left != self.huge_pages_left || now < left / 2 {
            // First whole again: of what is broken nothing can be left whole.
            self.fragments.clear();
        }
        if self.fragments.is_empty() || now > left + DRIFT_MAX {
            self.fragments.push(HeldFragments::hold(left)?);
            self.huge_pages_left = left;
        }
        let said: Vec<&str> = self.fragments.iter().map(HeldFragments::said).collect();
        let now = fragmentation::free_blocks_now();
        Ok(Some(format!("{}; /proc/buddyinfo has {now} whole ones at the begin", said.join(", then "))))
    }
}

/// The host is so until this is dropped or the process ends.
#[derive(Debug)]
pub(super) struct HeldState {
    khugepaged: Option<HeldKhugepaged>,
    /// What there is to say of its memory.
    fragments: Option<String>,
    _pool: Option<HeldPool>,
}

impl HeldState {
    /// Brings the host into this state: memory is broken up last, because a pool may want it whole.
    ///
    /// # Errors
    /// [`Failure::Host`] with the reason; everything is then as it was.
    pub(super) fn take(state: &HostState, kept: &mut KeptState) -> Result<HeldState, Failure> {
        let pages = Some(state.pool_pages_2m).filter(|pages| *pages > 0);
        let _pool = pages.map(HeldPool::lease).transpose().map_err(Failure::Host)?;
        let khugepaged = state.khugepaged.map(HeldKhugepaged::lease).transpose().map_err(Failure::Host)?;
        let fragments = kept.break_up(state.huge_pages_left).map_err(Failure::Host)?;
        Ok(HeldState { khugepaged, fragments, _pool })
    }

    /// Adds what there is to say of the host to what was measured on it.
    pub(super) fn tell(&self, measured: &mut Measured) {
        if let Some(fragments) = &self.fragments {
            measured.notes.push(format!("Memory was broken up on purpose: {fragments}."));
        }
        if let Some(cpu) = self.khugepaged.as_ref().and_then(HeldKhugepaged::cpu_time) {
            // Who promotes is the kernel's thread: what a manager beside it used is added to it.
            *measured.metrics.entry(Metric::ManagerCpuS).or_default() += cpu.as_secs_f64();
        }
    }
}
