//! Free blocks of 2 MiB for all guests of the host, as the daemon asks for them.

use wideleaf_memory::block_supply::{BlockSupply, SupplyDemand, SupplyReport, SupplyRules};

/// Maker of free blocks.
pub trait Supply: Send + Sync {
    /// Says what the windows of all VMs lack now; it holds until the next call.
    fn want(&self, demand: SupplyDemand);

    /// Changes its bounds.
    fn set_rules(&self, rules: SupplyRules);

    /// Counters so far.
    fn report(&self) -> SupplyReport;
}

impl Supply for BlockSupply {
    fn want(&self, demand: SupplyDemand) {
        if let Err(error) = BlockSupply::want(self, demand) {
            tracing::warn!("cannot make free blocks of 2 MiB: no thread: {error}; raise the daemon's limit on tasks");
        }
    }

    fn set_rules(&self, rules: SupplyRules) {
        BlockSupply::set_rules(self, rules);
    }

    fn report(&self) -> SupplyReport {
        BlockSupply::report(self)
    }
}

/// The supply of a host on which no block can be made.
#[derive(Clone, Copy, Debug)]
pub struct NoSupply;

impl Supply for NoSupply {
    fn want(&self, _: SupplyDemand) {}

    fn set_rules(&self, _: SupplyRules) {}

    fn report(&self) -> SupplyReport {
        SupplyReport::default()
    }
}
