//! A kernel's memory accesses: its loads and stores, recorded, counted, and sampled.
//!
//! ```text
//!   recorder ── trace ── pipe ──▶ ████····████····████····   bursts of records, evenly over the measured part
//!                                 └─ all of them counted     every second one is dropped when there are too many
//! ```

use std::io::{BufWriter, PipeReader, PipeWriter};

use wideleaf_recorder::{Progress, RecordError, Recorded, Request, record};
use wideleaf_run::failure::Failure;
use wideleaf_trace::{Access, GRANULE_BYTES, TraceReader};

/// Number of visits in a burst. Filling a TLB of 3072 entries at its begin takes less than a hundredth of it.
const BURST: usize = 1 << 19;

/// Most bursts: 32 MiB of them.
const BURSTS_MAX: usize = 16;
const _: () = assert!(BURSTS_MAX.is_multiple_of(2), "every second one is dropped");

/// Number of words in a line.
pub const LINE_WORDS: u32 = GRANULE_BYTES / 8;

/// A visit is the number of a word: of its line's first word for a load, and of the next one for a store. So no
/// mask is needed to find the word, which would cost a replay more than the visit.
pub const STORE: u32 = 1;
const _: () = assert!(STORE < LINE_WORDS, "a store is in its line");

/// Some of a kernel's visits of lines, and their total number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Bursts in the order of the program, each a separate stretch.
    pub bursts: Vec<Vec<u32>>,
    /// Number of all recorded visits.
    pub visits: u64,
}

impl Sample {
    /// Number of visits that were kept.
    pub fn kept(&self) -> u64 {
        self.bursts.iter().map(|burst| burst.len() as u64).sum()
    }
}

/// Records the request in a separate process, which has ended when this returns.
///
/// # Errors
/// [`Failure`]: it could not be recorded, or `watch` stopped it.
pub fn take(request: &Request<'_>, watch: &mut dyn FnMut(&Progress<'_>) -> bool) -> Result<Sample, Failure> {
    let name = request.kernel.name;
    let cannot = |error: std::io::Error| Failure::Host(format!("cannot record {name}: {error}"));
    let lines = request.arena_bytes().map_err(|error| failure(request, &error))? / u64::from(GRANULE_BYTES);
    if lines * u64::from(LINE_WORDS) > u64::from(u32::MAX) {
        return Err(Failure::Usage(format!("cannot sample {name}: it works on 32 GiB or more; use a smaller problem")));
    }
    let (reader, writer): (PipeReader, PipeWriter) = std::io::pipe().map_err(cannot)?;
    std::thread::scope(|scope| {
        let sampler = scope.spawn(move || read(reader));
        let recorded = record(request, BufWriter::new(writer), watch);
        // The pipe ends with the recording, and the sampler with the pipe.
        let totals = recorded.map(|Recorded { totals, .. }| totals);
        let sample = sampler.join().expect("the sampler does not panic");
        totals.map_err(|error| failure(request, &error))?;
        sample.map_err(|why| Failure::Host(format!("cannot read the recording of {name}: {why}")))
    })
}

fn failure(request: &Request<'_>, error: &RecordError) -> Failure {
    let why = format!("cannot record {}: {error}", request.kernel.name);
    match error {
        RecordError::Interrupted => Failure::Interrupted,
        RecordError::ByTime | RecordError::Parameters(_) => Failure::Usage(why),
        RecordError::Wrong => Failure::GuestFailed(why),
        RecordError::KernelFailed { .. } | RecordError::Killed(_) | RecordError::Garbled => Failure::GuestCrashed(why),
        _ => Failure::Host(why),
    }
}

fn read(trace: PipeReader) -> Result<Sample, String> {
    let mut reader = TraceReader::open(trace).map_err(|error| error.to_string())?;
    let (mut block, mut sampler) = (Vec::new(), Sampler::new(BURST, BURSTS_MAX));
    while reader.next_block(&mut block).map_err(|error| error.to_string())? {
        block.iter().for_each(|access| sampler.add(access));
    }
    Ok(sampler.sample)
}

/// Number of lines that the kernel visited last: visiting them again needs neither a new translation nor a new
/// line. They fit in the first-level TLB (at least 64 entries on servers since 2008) and in the first-level cache.
const RECENT: usize = 64;

/// Keeps bursts of the passing visits.
struct Sampler {
    sample: Sample,
    burst: u64,
    bursts_max: usize,
    /// Visits from the begin of a burst to that of the next.
    every: u64,
    /// By a hash of the line: the latest line there, and the index of its visit in the newest burst, if it was kept.
    recent: [(u32, Option<usize>); RECENT],
}

/// Marker for no line: its words would have larger numbers than exist.
const NO_LINE: u32 = u32::MAX;

impl Sampler {
    fn new(burst: usize, bursts_max: usize) -> Sampler {
        let burst = burst as u64;
        Sampler { sample: Sample::default(), burst, bursts_max, every: burst, recent: [(NO_LINE, None); RECENT] }
    }

    fn add(&mut self, access: &Access) {
        let line = (access.address / u64::from(GRANULE_BYTES)) as u32;
        let store = if access.is_write { STORE } else { 0 };
        // The upper bits of a product, so that arrays at similar addresses do not collide.
        let place = (line.wrapping_mul(0x9E37_79B1) >> (u32::BITS - RECENT.ilog2())) as usize;
        if let (recent, kept) = self.recent[place]
            && recent == line
        {
            if let (Some(index), Some(burst)) = (kept, self.sample.bursts.last_mut()) {
                burst[index] |= store;
            }
            return;
        }
        let kept = self.keep((line * LINE_WORDS) | store);
        self.recent[place] = (line, kept);
    }

    /// Keeps a visit that is in a burst; returns its index.
    fn keep(&mut self, visit: u32) -> Option<usize> {
        let Sample { bursts, visits } = &mut self.sample;
        if visits.is_multiple_of(self.every) {
            if bursts.len() == self.bursts_max {
                let mut number = 0;
                bursts.retain(|_| {
                    number += 1;
                    number % 2 == 1
                });
                self.every *= 2;
            }
            // An even number of bursts has passed: if every second one is kept, this one is.
            bursts.push(Vec::with_capacity(self.burst as usize));
            self.recent = [(NO_LINE, None); RECENT];
        }
        let is_kept = *visits % self.every < self.burst;
        *visits += 1;
        let burst = bursts.last_mut().filter(|_| is_kept)?;
        burst.push(visit);
        Some(burst.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(line: u64, is_write: bool) -> Access {
        Access { address: 64 * line, is_write, repeats: 1 }
    }

    fn sampled(accesses: impl IntoIterator<Item = Access>) -> Sample {
        let mut sampler = Sampler::new(4, 4);
        accesses.into_iter().for_each(|access| sampler.add(&access));
        sampler.sample
    }

    #[test]
    fn a_short_recording_is_kept_whole() {
        let sample = sampled((0..6).map(|line| access(line, line % 2 == 1)));
        assert_eq!(sample.bursts, [vec![0, 8 | STORE, 16, 24 | STORE], vec![32, 40 | STORE]]);
        assert_eq!((sample.visits, sample.kept()), (6, 6));
    }

    #[test]
    fn a_long_recording_is_kept_in_evenly_spaced_bursts() {
        // 64 visits, 4 bursts of 4: one in each sixteen.
        let sample = sampled((0..64).map(|line| access(line, false)));
        let starts: Vec<u32> = sample.bursts.iter().map(|burst| burst[0]).collect();
        assert_eq!(starts, [0, 16, 32, 48].map(|line| line * LINE_WORDS));
        assert!(sample.bursts.iter().all(|burst| burst.len() == 4));
        assert_eq!((sample.visits, sample.kept()), (64, 16));
    }

    #[test]
    fn a_recently_visited_line_is_not_visited_again() {
        // Three arrays in step, eight elements a line, the third one stored to: three visits. Arrays of 2 MiB are
        // 32768 lines apart.
        let arrays = [access(0, false), access(32_768, false), access(65_536, true)];
        let sample = sampled(arrays.into_iter().cycle().take(24));
        assert_eq!(sample.bursts, [[0, 32_768, 65_536].map(|line| (line * LINE_WORDS) | u32::from(line == 65_536))]);
        assert_eq!(sample.visits, 3);
    }

    #[test]
    fn a_store_after_its_load_makes_one_visit_of_both() {
        let sample = sampled([access(7, false), access(7, true), access(9, false)]);
        assert_eq!((sample.bursts, sample.visits), (vec![vec![(7 * LINE_WORDS) | STORE, 9 * LINE_WORDS]], 2));
    }
}
