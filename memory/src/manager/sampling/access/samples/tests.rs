//! Tests of access samples with samplers that need no kernel. Here: what the tests of the budget and those of the
//! results share.

mod budget;
mod results;

use std::time::Duration;

use wideleaf_policies::{Backing, PerTenThousand, VmId, VmSnapshot, WindowIndex, WindowRow};

use super::{ACCESS_COST, ACCESS_LEAST, ACCESS_MOST, AccessSampling};
use crate::host::Host;
use crate::sensors::access::{AccessCost, AccessSample, AccessSampler, Seen};
use crate::sensors::share::{Share, ShareLimits};
use crate::testing::fake_host::FakeHost;

/// A sensor that sees the same of each window of its sample, and needs no CPU time.
struct Always {
    seen: Seen,
    /// Number of windows that share each result.
    shared_by: u64,
    sample: Vec<WindowIndex>,
}

impl AccessSampler for Always {
    fn start(&mut self, _: &dyn Host, windows: &[WindowIndex]) {
        self.sample = windows.to_vec();
    }

    fn finish(&mut self, _: &dyn Host) -> AccessSample {
        let rows: Vec<_> = std::mem::take(&mut self.sample).into_iter().map(|window| (window, self.seen)).collect();
        let windows = rows.len() as u64;
        let events = if self.seen == Seen::Touched { windows } else { 0 };
        let shared_by = rows.iter().map(|(window, _)| (*window, self.shared_by)).collect();
        let cost = AccessCost { windows, events, cpu: Duration::ZERO };
        AccessSample { rows, shared_by, cost, ..AccessSample::default() }
    }

    fn why_it_ended(&self) -> Option<String> {
        None
    }
}

/// Windows with all base pages present, and their snapshot.
fn on_base_pages(number: usize) -> (Vec<WindowIndex>, VmSnapshot) {
    let windows: Vec<_> = (0..number as u64).map(WindowIndex::new).collect();
    let mut rows = VmSnapshot::with_capacity(VmId(0), number);
    windows.iter().for_each(|window| rows.push(WindowRow::new(*window, 512, Backing::Base4K)));
    (windows, rows)
}

fn sampling_of(seen: Seen, windows: &[WindowIndex], share: Share) -> AccessSampling {
    AccessSampling::of_sampler(
        VmId(0),
        "access",
        Box::new(Always { seen, shared_by: 1, sample: Vec::new() }),
        windows.to_vec(),
        share,
    )
}

/// A budget that pays for each sample of at most `most` windows.
fn paid(host: &FakeHost, burst: Duration, most: usize) -> Share {
    let limits = ShareLimits { budget: PerTenThousand::ALL, burst, least: ACCESS_LEAST, most };
    Share::new(limits, ACCESS_COST, host.now())
}

/// A sensor of windows that are always touched, as a manager starts it, but with this burst.
fn earning(host: &FakeHost, windows: &[WindowIndex], burst: Duration) -> AccessSampling {
    let limits = ShareLimits { budget: PerTenThousand::new(50), burst, least: ACCESS_LEAST, most: ACCESS_MOST };
    let share = Share::new(limits, ACCESS_COST, host.now()).beginning_with_nothing();
    AccessSampling { takes_aside: true, ..sampling_of(Seen::Touched, windows, share) }
}
