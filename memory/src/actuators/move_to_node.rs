//! Moves a window's memory to another NUMA node, on pages of the size that it has (`move_pages(2)`). The kernel copies;
//! the guest's addresses and contents stay.
//!
//! ```text
//!   huge page    one page is named: all of it moves, or nothing does
//!   base pages   all 512 are named; those that are absent have nothing to move
//!   afterwards   the nodes are asked for again: only then is it done
//! ```
//!
//! A page that a device or another process uses stays where it is; then the result is a refusal, and base pages before
//! it have moved. That loses nothing: each page is whole on one of the nodes.

use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Bytes, Cost, Hva, NodeId, OutcomeResult, PageSize, Refusal, Skip, WindowIndex};

use crate::backing::BackingConfig;
use crate::host::{Host, HostError};
use crate::region::RamRange;
use crate::sensors::host_backing::window_backing;

/// Result of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Result, checked in the page tables.
    pub result: OutcomeResult,
    /// Bytes copied, and CPU time of this thread.
    pub cost: Cost,
    /// Longest time for which a page of the window may have been out of the guest's reach: the duration of the call.
    pub unavailable: Duration,
}

/// Moves the window to the node.
pub fn move_window(
    host: &dyn Host,
    range: RamRange,
    backing: BackingConfig,
    window: WindowIndex,
    node: NodeId,
) -> Moved {
    let (began, began_cpu) = (host.now(), host.thread_cpu_time());
    let done = try_move(host, range, backing, window, node);
    let cpu = host.thread_cpu_time().saturating_sub(began_cpu);
    let (result, copied) = done.unwrap_or_else(|error| (OutcomeResult::from(&error), Bytes::ZERO));
    let was_asked = !matches!(result, OutcomeResult::Skipped(_));
    let unavailable = if was_asked { host.now().since(began) } else { Duration::ZERO };
    Moved { result, cost: Cost { copied, cpu }, unavailable }
}

fn try_move(
    host: &dyn Host,
    range: RamRange,
    backing: BackingConfig,
    window: WindowIndex,
    node: NodeId,
) -> Result<(OutcomeResult, Bytes), HostError> {
    let seen = window_backing(host, range, backing.fixed_page(), window)?;
    let (page_size, count) = match seen.backing.page_size() {
        None => return Ok((OutcomeResult::Skipped(Skip::NotResident), Bytes::ZERO)),
        // Its other 511 windows would move with it.
        Some(PageSize::Giant1G) => return Ok((OutcomeResult::Skipped(Skip::NoMechanism), Bytes::ZERO)),
        Some(PageSize::Huge2M) => (PageSize::Huge2M, 1),
        Some(PageSize::Base4K) => (PageSize::Base4K, u64::from(BASE_PAGES_PER_WINDOW)),
    };
    let first = range.hva + (window.start() - range.gpa.start());
    let pages: Vec<Hva> = (0..count).map(|page| first + PageSize::Base4K.bytes() * page).collect();
    let before = pages_elsewhere(host, &pages, node)?;
    if before == 0 {
        return Ok((OutcomeResult::Skipped(Skip::AlreadyDone), Bytes::ZERO));
    }
    let moved = host.move_to_node(&pages, node);
    let after = pages_elsewhere(host, &pages, node)?;
    let result = match moved {
        Err(error) => OutcomeResult::from(&error),
        Ok(()) if after > 0 => OutcomeResult::Refused(Refusal::NotObserved),
        Ok(()) => OutcomeResult::Done,
    };
    Ok((result, page_size.bytes() * before.saturating_sub(after)))
}

/// Number of present pages that are on another node.
fn pages_elsewhere(host: &dyn Host, pages: &[Hva], node: NodeId) -> Result<u64, HostError> {
    let mut nodes = Vec::with_capacity(pages.len());
    host.nodes_of(pages, &mut nodes)?;
    Ok(nodes.into_iter().flatten().filter(|on| *on != node).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::BackingKind;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::{kib, mib};
    use wideleaf_policies::{Gpa, GpaRange};

    const BASE: Hva = Hva::new(1 << 40);
    const THERE: NodeId = NodeId(1);

    fn moved(host: &FakeHost) -> Moved {
        let range = RamRange { gpa: GpaRange::new(Gpa::new(0), mib(4)).expect("fits"), hva: BASE };
        let backing = BackingConfig::new(BackingKind::Anon, PageSize::Base4K).expect("anonymous RAM");
        move_window(host, range, backing, WindowIndex::new(1), THERE)
    }

    fn nodes(host: &FakeHost) -> Vec<Option<NodeId>> {
        let mut nodes = Vec::new();
        host.nodes_of(&[BASE + mib(2), BASE + (mib(4) - kib(4))], &mut nodes).expect("the fake answers");
        nodes
    }

    #[test]
    fn a_huge_page_moves_whole_and_base_pages_move_one_by_one() {
        let host = FakeHost::default();
        host.make_present(BASE + mib(2), mib(2), true);
        let whole = moved(&host);
        assert_eq!(
            (whole.result, whole.cost.copied, nodes(&host)),
            (OutcomeResult::Done, mib(2), vec![Some(THERE); 2])
        );
        let host = FakeHost::default();
        host.make_present(BASE + mib(2), kib(8), false);
        let two_pages = moved(&host);
        assert_eq!((two_pages.result, two_pages.cost.copied), (OutcomeResult::Done, kib(8)));
        assert_eq!((host.moved_pages(), nodes(&host)), (2, vec![Some(THERE), None]));
        assert_eq!(moved(&host).result, OutcomeResult::Skipped(Skip::AlreadyDone));
    }

    #[test]
    fn only_the_pages_that_were_elsewhere_and_moved_are_copied() {
        let host = FakeHost::default();
        host.make_present(BASE + mib(2), mib(2), false);
        host.put_on_node(BASE + mib(2), mib(2) - kib(12), THERE);
        // Three pages are on the other node, and a device uses the last one.
        host.keep_on_node(BASE + (mib(4) - kib(4)));
        let in_part = moved(&host);
        assert_eq!((in_part.result, in_part.cost.copied), (OutcomeResult::Refused(Refusal::Busy), kib(8)));
        let host = FakeHost::default();
        host.make_present(BASE + mib(2), mib(2), false);
        host.put_on_node(BASE + mib(2), mib(2) - kib(4), THERE);
        let last = moved(&host);
        assert_eq!((last.result, last.cost.copied), (OutcomeResult::Done, kib(4)));
    }

    #[test]
    fn nothing_is_moved_where_nothing_is_and_a_full_node_is_a_want_of_pages() {
        let host = FakeHost::default();
        assert_eq!(moved(&host).result, OutcomeResult::Skipped(Skip::NotResident));
        host.make_present(BASE + mib(2), mib(2), true);
        host.fill_node(THERE);
        let refused = moved(&host);
        assert_eq!((refused.result, refused.cost.copied), (OutcomeResult::Refused(Refusal::NoHugePage), Bytes::ZERO));
        assert_eq!(nodes(&host), [Some(NodeId(0)); 2]);
    }

    #[test]
    fn every_failing_call_is_a_refusal() {
        for call in 0..4 {
            let host = FakeHost::default();
            host.make_present(BASE + mib(2), mib(2), true);
            host.fail_call(call, libc::EBUSY);
            assert_eq!(moved(&host).result, OutcomeResult::Refused(Refusal::Busy), "call {call}");
        }
    }
}
