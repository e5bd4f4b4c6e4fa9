//! What the host has to be like while a job runs. Each part is had by a child, so that it is put back however we end.

use wideleaf_experiments::definition::HostState;
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::Measured;

use crate::failure::Failure;
use crate::held_pool::HeldPool;

pub mod fragmentation;
pub mod khugepaged;

use fragmentation::HeldFragments;
use khugepaged::HeldKhugepaged;

/// What is kept from one job to the next where both want it: memory takes many seconds to be broken up.
#[derive(Debug, Default)]
pub(super) struct KeptState {
    fragments: Option<HeldFragments>,
}

impl KeptState {
    fn fragments(&mut self, huge_pages_left: Option<u64>) -> Result<Option<&HeldFragments>, String> {
        let is_as_wanted = |held: &HeldFragments| huge_pages_left.is_some_and(|left| held.still_leaves(left));
        if !self.fragments.as_ref().is_some_and(is_as_wanted) {
            // First whole again: what is broken cannot be left whole.
            self.fragments = None;
            self.fragments = huge_pages_left.map(HeldFragments::hold).transpose()?;
        }
        Ok(self.fragments.as_ref())
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
        let fragments = kept.fragments(state.huge_pages_left).map_err(Failure::Host)?;
        Ok(HeldState { khugepaged, fragments: fragments.map(HeldFragments::said), _pool })
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
