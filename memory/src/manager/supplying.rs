//! Tells the supply of free blocks how many windows wait for a huge page.
//!
//! ```text
//!   tick ─▶ windows without a page, bids ─▶ demand ─▶ block-supply ─▶ free blocks ─▶ noticed at a pulse (thread.rs)
//! ```
//!
//! A host with several loops has one supply for all of them, outside. The loop's own one then rests
//! ([`Manager::set_supplied`](super::Manager::set_supplied)).

use std::sync::Arc;

use wideleaf_policies::{Bids, HugePages, NodeSet};

use super::{ManagedVm, ManagerConfig, ManagerLoop};
use crate::block_supply::{BlockSupply, SupplyDemand};
use crate::host::Host;
use crate::kernel::Kernel;
use crate::numa::placement::Placement;
use crate::sensors::host_memory::host_memory;

/// The loop's own supply, if it is to have one, of blocks on these nodes. Blocks are made in the memory of this process
/// alone.
pub(super) fn supply_for(host: &Arc<dyn Kernel>, config: &ManagerConfig, nodes: NodeSet) -> Option<BlockSupply> {
    let rules = config.supply.filter(|_| host.is_own())?;
    let host: Arc<dyn Host> = host.clone();
    Some(BlockSupply::new(host, rules).on_nodes(nodes))
}

/// The nodes on which RAM of these VMs is placed; empty if some of it may be anywhere.
pub(super) fn nodes_of(vms: &[ManagedVm]) -> NodeSet {
    let placements = || vms.iter().map(|vm| vm.ram.as_ref().map(|ram| ram.placement()));
    if placements().any(|placement| placement.is_none_or(Placement::is_none)) {
        return NodeSet::EMPTY;
    }
    let policies = placements().flatten().flat_map(|placement| placement.parts()).map(|part| part.policy.nodes);
    policies.fold(NodeSet::EMPTY, |all, nodes| all.union(&nodes))
}

impl ManagerLoop {
    /// Whether windows wait and a page is free for them that `/proc/buddyinfo` does not count.
    pub(super) fn is_promised_a_page(&self) -> bool {
        self.huge_pages.is_waited_for() && (self.steering.has_promise() || self.unseen() > self.known_unseen)
    }

    /// Takes note of such pages, from outside and from its own supply.
    pub(super) fn take_promises(&mut self) {
        let unseen = self.unseen();
        let promised = self.steering.take_promised() + (unseen - self.known_unseen);
        self.known_unseen = unseen;
        self.huge_pages.promise(promised);
    }

    fn unseen(&self) -> u64 {
        self.supply.as_ref().map_or(self.known_unseen, |supply| supply.report().unseen)
    }

    /// Called at the end of a tick.
    pub(super) fn tell_supply(&mut self) {
        if self.supply.is_none() {
            return;
        }
        let demand = self.demand();
        let wanted = self.supply.as_ref().map_or(Ok(()), |supply| supply.want(demand));
        if let Err(error) = wanted {
            tracing::debug!("no free block is made ahead: {error}");
        }
    }

    fn demand(&mut self) -> SupplyDemand {
        let waiting = self.huge_pages.waiting();
        if waiting == 0 || self.steering.is_supplied() {
            return SupplyDemand::default();
        }
        let HugePages::Scarce { free } = self.huge_pages.shortage(self.host.as_ref()) else {
            return SupplyDemand::default();
        };
        // A policy that bids plans only for the windows that the free pages suffice for.
        let windows = self.policy.lock().bids().map_or(0, Bids::wanted).max(waiting);
        let is_host_short = self.shortage.update(host_memory(self.host.as_ref()).ok());
        SupplyDemand { windows, free, is_host_short, keeps_reserve: false, nodes: self.huge_pages.nodes_waited_for() }
    }

    /// No window waits from now on.
    pub(super) fn rest_supply(&self) {
        // Without a window that waits, no thread is started, so nothing fails.
        let _ = self.supply.as_ref().map(|supply| supply.want(SupplyDemand::default()));
    }

    pub(super) fn end_supply(&mut self) {
        self.report.supply = self.supply.take().map(BlockSupply::stop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{BackingConfig, BackingKind};
    use crate::host::Advice;
    use crate::manager::ManagedVm;
    use crate::region::GuestRam;
    use crate::sensors::free_blocks::BUDDYINFO;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::mib;
    use wideleaf_policies::{Gpa, GpaRange, PageSize, VmId, policy};

    /// A loop over four full windows on a host with this number of free blocks. Its kernel refuses the first `times`
    /// requests.
    fn refused(free: u64, times: u64) -> (Arc<FakeHost>, ManagerLoop) {
        let range = GpaRange::new(Gpa::new(0), mib(8)).expect("fits");
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM has base pages");
        let ram = GuestRam::map(&[range], backing).expect("addresses");
        let host = Arc::<FakeHost>::default();
        host.make_present(ram.base(), mib(8), false);
        set_free(&host, free);
        host.fail_advice(Advice::Collapse, libc::ENOMEM, times);
        let greedy = policy::by_name("greedy").expect("it is in the table").with_defaults();
        let vms = vec![ManagedVm::new(VmId(0), ram, None)];
        let work = ManagerLoop::new(host.clone(), vms, greedy, ManagerConfig::default());
        (host, work)
    }

    fn set_free(host: &FakeHost, blocks: u64) {
        host.set_text(BUDDYINFO, &format!("Node 0, zone Normal 9 9 9 9 9 9 9 9 9 {blocks} 0\n"));
    }

    fn set_available(host: &FakeHost, percent: u64) {
        host.set_text("/proc/meminfo", &format!("MemTotal: 1000 kB\nMemAvailable: {} kB\n", 10 * percent));
    }

    #[test]
    fn every_window_that_waits_is_asked_for_with_the_blocks_that_became_free() {
        let (host, mut work) = refused(5, 1000);
        assert_eq!(work.demand(), SupplyDemand::default(), "no window waits yet");
        work.tick();
        assert_eq!(work.demand(), SupplyDemand { windows: 4, ..SupplyDemand::default() });
        set_free(&host, 7);
        set_available(&host, 10);
        let short = SupplyDemand { windows: 4, free: 2, is_host_short: true, ..SupplyDemand::default() };
        assert_eq!(work.demand(), short);
        work.steering.set_supplied(true);
        assert_eq!(work.demand(), SupplyDemand::default(), "the daemon asks for all");
    }

    #[test]
    fn a_promised_page_brings_a_tick_forward_and_is_requested() {
        let (_host, mut work) = refused(0, 1);
        assert_eq!(work.tick(), 0);
        assert!(!work.is_promised_a_page());
        work.steering.promise(2);
        assert!(work.is_promised_a_page());
        assert_eq!((work.tick(), work.is_promised_a_page()), (2, false));
        assert_eq!(work.tick(), 0, "the last window waits, and the first one backs off");
    }

    #[test]
    fn a_loop_has_a_supply_only_where_its_configuration_says_so_and_of_its_own_memory() {
        let with = ManagerConfig { supply: Some(crate::block_supply::SupplyRules::default()), ..Default::default() };
        let (own, of_another): (Arc<FakeHost>, Arc<FakeHost>) = Default::default();
        of_another.be_of_another_process();
        let has = |host: &Arc<FakeHost>, config| {
            supply_for(&(host.clone() as Arc<dyn Kernel>), config, NodeSet::EMPTY).is_some()
        };
        assert_eq!([has(&own, &with), has(&of_another, &with)], [true, false]);
        assert!(!has(&own, &ManagerConfig::default()));
    }
}
