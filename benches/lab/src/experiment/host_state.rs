//! State that the host must have while a job runs. A child holds each part, so that it is restored however this
//! process ends.

use wideleaf::guardian::pool::HeldPool;
use wideleaf_experiments::definition::{FREE_BLOCKS_AT_BEGIN, HostState};
use wideleaf_experiments::metric::Metric;
use wideleaf_experiments::results::Measured;
use wideleaf_memory::warming::warm_host_memory;
use wideleaf_policies::units::mib;
use wideleaf_run::failure::Failure;

pub mod fragmentation;
pub mod khugepaged;

use fragmentation::{HeldFragments, Hog};
use khugepaged::HeldKhugepaged;

/// Number of whole blocks by which a run may begin with more or fewer than it wants, of 32 wanted ones or more: other
/// processes free and use memory as well. Of fewer wanted ones, half may be missing.
const DRIFT_MAX: u64 = 16;
/// Number of whole blocks that may always be there too many: the kernel keeps the DMA zone, of 16 MiB, for itself.
const KEPT_BY_KERNEL_MAX: u64 = 8;
/// Most times that memory is broken up before a run. The note about the run tells how many blocks it began with.
const BREAKS_MAX: u32 = 2;

/// Makes this much free memory fast, in MiB, right before a clock starts: a hypervisor takes free memory back within
/// seconds.
pub(super) fn warm_memory(memory_mib: u64) -> Result<(), Failure> {
    let cannot = |error| Failure::Host(format!("cannot warm {memory_mib} MiB of memory: {error}"));
    warm_host_memory(mib(memory_mib)).map_err(cannot)
}

/// State of the host that is kept from one job to the next if both need it: breaking up memory takes up to a minute.
#[derive(Debug, Default)]
pub(super) struct KeptState {
    /// Number of huge pages that were left.
    huge_pages_left: u64,
    /// Children that broke up memory, and later the blocks that had become whole again.
    fragments: Vec<HeldFragments>,
}

impl KeptState {
    /// Breaks memory up as the job needs it, and returns a note about it.
    fn break_up(&mut self, huge_pages_left: Option<u64>) -> Result<Option<String>, String> {
        let Some(left) = huge_pages_left else {
            self.fragments.clear();
            return Ok(None);
        };
        if left != self.huge_pages_left {
            self.fragments.clear();
        }
        for _ in 0..BREAKS_MAX {
            match Step::to(left, fragmentation::free_blocks_now(), self.fragments.is_empty()) {
                Step::Done => break,
                Step::BreakMore => {}
                Step::BreakAnew => self.fragments.clear(),
            }
            self.fragments.push(HeldFragments::hold(left)?);
            self.huge_pages_left = left;
        }
        let said: Vec<&str> = self.fragments.iter().map(HeldFragments::said).collect();
        let now = fragmentation::free_blocks_now();
        Ok(Some(format!("{}; /proc/buddyinfo has {now} whole ones at the begin", said.join(", then "))))
    }
}

/// The next step to memory with a number of whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The number is near enough.
    Done,
    /// All blocks beyond the number are to be broken up.
    BreakMore,
    /// All blocks are to be made whole first: of broken memory, no block can be left whole.
    BreakAnew,
}

impl Step {
    /// The step from `now` blocks to the wanted number.
    fn to(wanted: u64, now: u64, is_whole: bool) -> Step {
        let fewer = DRIFT_MAX.min(wanted / 2);
        let more = KEPT_BY_KERNEL_MAX.max(fewer);
        match now {
            _ if is_whole => Step::BreakMore,
            now if now < wanted - fewer => Step::BreakAnew,
            now if now > wanted + more => Step::BreakMore,
            _ => Step::Done,
        }
    }
}

/// The state of the host until this is dropped or the process ends.
#[derive(Debug)]
pub(super) struct HeldState {
    khugepaged: Option<HeldKhugepaged>,
    /// Note about its memory, if it is broken up.
    fragments: Option<String>,
    hog: Option<Hog>,
    /// Number of free blocks of 2 MiB at the begin, if memory is broken up.
    free_blocks: Option<u64>,
    _pool: Option<HeldPool>,
}

impl HeldState {
    /// Brings the host into this state. Memory is broken up after a pool is made, which may need whole blocks.
    ///
    /// # Errors
    /// [`Failure::Host`] with the reason; everything is then as before.
    pub(super) fn take(state: &HostState, kept: &mut KeptState) -> Result<HeldState, Failure> {
        let pages = Some(state.pool_pages_2m).filter(|pages| *pages > 0);
        let _pool = pages.map(HeldPool::lease).transpose().map_err(Failure::Host)?;
        let khugepaged = state.khugepaged.map(HeldKhugepaged::lease).transpose().map_err(Failure::Host)?;
        let fragments = kept.break_up(state.huge_pages_left).map_err(Failure::Host)?;
        // Later than the breaking up, which would otherwise leave other blocks whole in place of the hog's.
        let hog = Some(state.hog_pages_2m).filter(|pages| *pages > 0);
        let hog = hog.map(Hog::take).transpose().map_err(Failure::Host)?;
        let free_blocks = fragments.is_some().then(fragmentation::free_blocks_now);
        Ok(HeldState { khugepaged, fragments, hog, free_blocks, _pool })
    }

    /// Adds the notes about the host to the measurements.
    pub(super) fn tell(&self, measured: &mut Measured) {
        if let Some(fragments) = &self.fragments {
            measured.notes.push(format!("Memory was broken up on purpose: {fragments}."));
        }
        if let Some(hog) = &self.hog {
            measured.notes.push(format!("A process took huge pages before the guests began: {}.", hog.said()));
        }
        let free = self.free_blocks.map(|blocks| (FREE_BLOCKS_AT_BEGIN.to_owned(), blocks as f64));
        measured.told.extend(free);
        if let Some(cpu) = self.khugepaged.as_ref().and_then(HeldKhugepaged::cpu_time) {
            // The kernel's thread promotes, so its CPU time is added to that of a manager beside it.
            *measured.metrics.entry(Metric::ManagerCpuS).or_default() += cpu.as_secs_f64();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_begins_with_at_most_16_blocks_more_or_fewer_than_it_wants() {
        let steps = |wanted: u64, now: [u64; 4]| now.map(|now| Step::to(wanted, now, false));
        let expected = [Step::BreakAnew, Step::Done, Step::Done, Step::BreakMore];
        assert_eq!(steps(128, [111, 112, 144, 145]), expected);
        assert_eq!(steps(32, [15, 16, 48, 49]), expected);
    }

    #[test]
    fn of_fewer_than_32_blocks_half_may_be_missing_and_of_none_some_are_the_kernels() {
        let steps = |wanted: u64, now: [u64; 4]| now.map(|now| Step::to(wanted, now, false));
        assert_eq!(steps(20, [9, 10, 30, 31]), [Step::BreakAnew, Step::Done, Step::Done, Step::BreakMore]);
        assert_eq!(steps(0, [0, 7, 8, 9]), [Step::Done, Step::Done, Step::Done, Step::BreakMore]);
    }

    #[test]
    fn whole_memory_is_broken_up_even_if_it_has_the_wanted_number_of_blocks() {
        assert_eq!([100, 128, 5000].map(|now| Step::to(128, now, true)), [Step::BreakMore; 3]);
    }
}
