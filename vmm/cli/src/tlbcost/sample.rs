//! What a kernel asks of memory: its loads and stores, recorded, counted, and kept in part.
//!
//! ```text
//!   recorder ── trace ── pipe ──▶ ████····████····████····   bursts of records, evenly over the measured part
//!                                 └─ all of them counted     every second one is dropped when there are too many
//! ```

use std::io::{BufWriter, PipeReader, PipeWriter};

use wideleaf_recorder::{Progress, RecordError, Recorded, Request, record};
use wideleaf_trace::{Access, GRANULE_BYTES, TraceReader};

use crate::failure::Failure;

/// Records of a burst: so many that what a TLB of 3072 entries has to be filled with at its begin is less than a hundredth of it.
const BURST: usize = 1 << 19;

/// Bursts at most: 32 MiB of them.
const BURSTS_MAX: usize = 16;
const _: () = assert!(BURSTS_MAX.is_multiple_of(2), "every second one is dropped");

/// Set in a record that is a store; the rest is the number of its line.
pub const STORE: u32 = 1 << 31;

/// Some of the accesses of a kernel, and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// In the order of the program, each stretch for itself.
    pub bursts: Vec<Vec<u32>>,
    /// All records of what was recorded.
    pub records: u64,
}

impl Sample {
    /// Records that were kept.
    pub fn kept(&self) -> u64 {
        self.bursts.iter().map(|burst| burst.len() as u64).sum()
    }
}

/// Records what `request` names, in a process of its own that is gone when this returns.
///
/// # Errors
/// [`Failure`]: it could not be recorded, or `watch` wanted no more of it.
pub fn take(request: &Request<'_>, watch: &mut dyn FnMut(&Progress<'_>) -> bool) -> Result<Sample, Failure> {
    let name = request.kernel.name;
    let cannot = |error: std::io::Error| Failure::Host(format!("cannot record {name}: {error}"));
    let lines = request.arena_bytes().map_err(|error| failure(request, &error))? / u64::from(GRANULE_BYTES);
    if lines >= u64::from(STORE) {
        return Err(Failure::Usage(format!("{name} works on more than 128 GiB: take a smaller problem")));
    }
    let (reader, writer): (PipeReader, PipeWriter) = std::io::pipe().map_err(cannot)?;
    std::thread::scope(|scope| {
        let sampler = scope.spawn(move || read(reader));
        let recorded = record(request, BufWriter::new(writer), watch);
        // The pipe ends with it, and the sampler with the pipe.
        let totals = recorded.map(|Recorded { totals, .. }| totals);
        let sample = sampler.join().expect("the sampler does not panic");
        totals.map_err(|error| failure(request, &error))?;
        sample.map_err(|why| Failure::Host(format!("cannot read what {name} was recorded as: {why}")))
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

/// Keeps bursts of what passes by.
struct Sampler {
    sample: Sample,
    burst: u64,
    bursts_max: usize,
    /// From the begin of a burst to that of the next.
    every: u64,
}

impl Sampler {
    fn new(burst: usize, bursts_max: usize) -> Sampler {
        let burst = burst as u64;
        Sampler { sample: Sample::default(), burst, bursts_max, every: burst }
    }

    fn add(&mut self, access: &Access) {
        let Sample { bursts, records } = &mut self.sample;
        if records.is_multiple_of(self.every) {
            if bursts.len() == self.bursts_max {
                let mut number = 0;
                bursts.retain(|_| {
                    number += 1;
                    number % 2 == 1
                });
                self.every *= 2;
            }
            // An even number of bursts has passed: where every second one is kept, this one is.
            bursts.push(Vec::with_capacity(self.burst as usize));
        }
        if *records % self.every < self.burst
            && let Some(burst) = bursts.last_mut()
        {
            let store = if access.is_write { STORE } else { 0 };
            burst.push((access.address / u64::from(GRANULE_BYTES)) as u32 | store);
        }
        *records += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(records: u64) -> Sample {
        let mut sampler = Sampler::new(4, 4);
        for number in 0..records {
            sampler.add(&Access { address: 64 * number, is_write: number % 2 == 1, repeats: 1 });
        }
        sampler.sample
    }

    #[test]
    fn what_is_short_is_kept_whole() {
        let sample = sampled(6);
        assert_eq!(sample.bursts, [vec![0, 1 | STORE, 2, 3 | STORE], vec![4, 5 | STORE]]);
        assert_eq!((sample.records, sample.kept()), (6, 6));
    }

    #[test]
    fn what_is_long_is_kept_in_bursts_that_lie_evenly() {
        // 64 records, 4 bursts of 4: one in each sixteen.
        let sample = sampled(64);
        let starts: Vec<u32> = sample.bursts.iter().map(|burst| burst[0]).collect();
        assert_eq!(starts, [0, 16, 32, 48]);
        assert!(sample.bursts.iter().all(|burst| burst.len() == 4));
        assert_eq!((sample.records, sample.kept()), (64, 16));
    }
}
