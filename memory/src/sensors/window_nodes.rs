//! NUMA node of each window, from samples of its pages (`move_pages(2)` without target nodes).
//!
//! ```text
//!   pass   window 0 … 511 │ 512 … 1023 │ …   one batch at a look; looks are as far apart as their cost asks
//!   large window: its first page      window on base pages: eight pages, other ones at each pass
//!   a window with a new size is asked about first: a promotion may have moved it
//! ```
//!
//! The call reads page tables under the lock that page faults take for reading, too; it stops no vCPU. It is paced like
//! the other slow sensors. On a host with one node the sensor does not exist.

use std::time::Duration;

use wideleaf_policies::units::BASE_PAGES_PER_WINDOW;
use wideleaf_policies::{Backing, Hva, Moment, NodeId, PageSize, VmSnapshot, WindowNode};

use crate::host::{Host, HostError};
use crate::region::RamRange;

/// Maximum number of windows of one look: with eight pages each as many pages as one call takes.
const WINDOWS_PER_LOOK: usize = 512;

/// Number of pages that are asked about in a window on base pages.
const PAGES_PER_WINDOW: usize = 8;

/// Part of a core that looks may use: a look is followed by a pause of that many times its own CPU time.
const PAUSE_PER_COST: u32 = 200;

/// Shortest pause between two looks.
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Time from the end of a pass over all windows to the next one. The kernel moves pages by itself where automatic NUMA
/// balancing is on, within seconds to minutes.
const PASS_EVERY: Duration = Duration::from_secs(10);

/// Nodes of the windows of one VM; see the module.
#[derive(Debug, Default)]
pub struct WindowNodes {
    /// Node of each window, by row.
    nodes: Vec<WindowNode>,
    /// Size of each window at its latest sample, by row; `None` for a window that has to be asked about.
    sampled: Vec<Option<Backing>>,
    /// Row from which the pass continues.
    next: usize,
    /// Number of complete passes; the pages of a window are others in each.
    passes: u64,
    /// Moment of the next look, and the earliest one for windows that changed.
    due: Moment,
    earliest: Moment,
    has_changed: bool,
    pages: Vec<Hva>,
    seen: Vec<Option<NodeId>>,
}

impl WindowNodes {
    /// Nodes by row, as far as they are known.
    pub fn nodes(&self) -> &[WindowNode] {
        &self.nodes
    }

    /// Whether every present window was asked about.
    pub fn is_complete(&self) -> bool {
        self.passes > 0
    }

    /// Forgets the node of a window that was moved.
    pub fn forget(&mut self, row: usize) {
        if let Some(sampled) = self.sampled.get_mut(row) {
            (*sampled, self.nodes[row]) = (None, WindowNode::Unknown);
            self.has_changed = true;
        }
    }

    /// Looks at all windows at once, for a caller that looks only once: at most `looks_max` batches.
    ///
    /// # Errors
    /// [`HostError`] if the kernel does not answer.
    pub fn look_at_all(
        &mut self,
        host: &dyn Host,
        ranges: &[RamRange],
        rows: &VmSnapshot,
        looks_max: usize,
    ) -> Result<(), HostError> {
        for _ in 0..looks_max {
            (self.due, self.earliest) = (Moment::START, Moment::START);
            self.look(host, ranges, rows)?;
            if self.is_complete() {
                break;
            }
        }
        Ok(())
    }

    /// Looks at the next windows of the VM if a look is due.
    ///
    /// # Errors
    /// [`HostError`] if the kernel does not answer; the next look is as far away as the next pass.
    pub fn look(&mut self, host: &dyn Host, ranges: &[RamRange], rows: &VmSnapshot) -> Result<(), HostError> {
        self.fit(rows);
        let now = host.now();
        if now < if self.has_changed { self.earliest } else { self.due } {
            return Ok(());
        }
        self.has_changed = false;
        let began = host.thread_cpu_time();
        let asked = self.choose(rows);
        let looked = self.ask(host, ranges, rows, &asked);
        let cost = host.thread_cpu_time().saturating_sub(began);
        let is_pass_over = self.next >= rows.len();
        if is_pass_over {
            (self.next, self.passes) = (0, self.passes + 1);
        }
        let pause = if is_pass_over || looked.is_err() { PASS_EVERY } else { PAUSE_MIN };
        self.earliest = now + PAUSE_MIN.max(cost.saturating_mul(PAUSE_PER_COST));
        self.due = self.earliest.max(now + pause);
        looked
    }

    /// Makes the columns fit the rows; a window that has another size than at its sample is unknown, and asked about
    /// before its turn.
    fn fit(&mut self, rows: &VmSnapshot) {
        if self.nodes.len() != rows.len() {
            *self = WindowNodes { due: self.earliest, earliest: self.earliest, ..WindowNodes::default() };
            self.nodes.resize(rows.len(), WindowNode::Unknown);
            self.sampled.resize(rows.len(), None);
        }
        for (row, sampled) in self.sampled.iter_mut().enumerate() {
            if sampled.is_some_and(|sampled| sampled != rows.backing[row]) {
                (*sampled, self.nodes[row]) = (None, WindowNode::Unknown);
                self.has_changed = true;
            }
        }
    }

    /// Rows of this look: those that changed behind the pass, then those of the pass.
    fn choose(&mut self, rows: &VmSnapshot) -> Vec<usize> {
        let is_present = |row: &usize| rows.backing[*row] != Backing::Unbacked;
        let changed = (0..self.next.min(rows.len())).filter(|row| self.sampled[*row].is_none() && is_present(row));
        let mut chosen: Vec<usize> = changed.take(WINDOWS_PER_LOOK).collect();
        while chosen.len() < WINDOWS_PER_LOOK && self.next < rows.len() {
            chosen.extend(Some(self.next).filter(is_present));
            self.next += 1;
        }
        chosen
    }

    fn ask(
        &mut self,
        host: &dyn Host,
        ranges: &[RamRange],
        rows: &VmSnapshot,
        chosen: &[usize],
    ) -> Result<(), HostError> {
        self.pages.clear();
        self.seen.clear();
        let mut parts = Vec::with_capacity(chosen.len());
        for row in chosen {
            let before = self.pages.len();
            let start = rows.windows[*row].start();
            if let Some(range) = ranges.iter().find(|range| range.gpa.contains(start)) {
                let first = range.hva + (start - range.gpa.start());
                self.pages.extend(pages_of(first, rows.backing[*row].is_large(), self.passes));
            }
            parts.push(self.pages.len() - before);
        }
        host.nodes_of(&self.pages, &mut self.seen)?;
        let mut seen = self.seen.as_slice();
        for (row, pages) in chosen.iter().zip(parts) {
            let (of_window, rest) = seen.split_at(pages.min(seen.len()));
            seen = rest;
            let node = node_of(of_window);
            self.sampled[*row] = Some(rows.backing[*row]);
            // None of the asked pages is present: what an earlier pass saw of the others still holds.
            if node != WindowNode::Unknown || rows.backing[*row] == Backing::Unbacked {
                self.nodes[*row] = node;
            }
        }
        Ok(())
    }
}

/// Addresses of the sampled pages of a window.
fn pages_of(first: Hva, is_large: bool, pass: u64) -> impl Iterator<Item = Hva> {
    let step = u64::from(BASE_PAGES_PER_WINDOW) / PAGES_PER_WINDOW as u64;
    let (count, shift) = if is_large { (1, 0) } else { (PAGES_PER_WINDOW as u64, pass % step) };
    (0..count).map(move |page| first + PageSize::Base4K.bytes() * (page * step + shift))
}

/// The node of a window, from its sampled pages.
fn node_of(pages: &[Option<NodeId>]) -> WindowNode {
    let mut counts: Vec<(NodeId, usize)> = Vec::new();
    for node in pages.iter().flatten() {
        match counts.iter_mut().find(|(known, _)| known == node) {
            Some((_, count)) => *count += 1,
            None => counts.push((*node, 1)),
        }
    }
    let most = counts.iter().max_by_key(|(node, count)| (*count, std::cmp::Reverse(*node)));
    match (most, counts.len()) {
        (None, _) => WindowNode::Unknown,
        (Some((node, _)), 1) => WindowNode::On(*node),
        (Some((node, _)), _) => WindowNode::Spread(*node),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_host::FakeHost;
    use wideleaf_policies::units::{kib, mib};
    use wideleaf_policies::{Gpa, GpaRange, VmId, WindowIndex, WindowRow};

    const BASE: Hva = Hva::new(1 << 40);

    fn ranges(windows: u64) -> [RamRange; 1] {
        [RamRange { gpa: GpaRange::new(Gpa::new(0), mib(2) * windows).expect("fits"), hva: BASE }]
    }

    fn rows(drawn: &str) -> VmSnapshot {
        let mut rows = VmSnapshot::with_capacity(VmId(0), drawn.len());
        for (at, window) in drawn.chars().enumerate() {
            let (resident, backing) = match window {
                'H' => (512, Backing::Huge2M),
                'f' => (512, Backing::Base4K),
                _ => (0, Backing::Unbacked),
            };
            rows.push(WindowRow::new(WindowIndex::new(at as u64), resident, backing));
        }
        rows
    }

    fn host(drawn: &str) -> FakeHost {
        let host = FakeHost::default();
        for (at, window) in drawn.chars().enumerate().filter(|(_, window)| *window != '.') {
            host.make_present(BASE + mib(2) * at as u64, mib(2), window == 'H');
        }
        host
    }

    fn look(sensor: &mut WindowNodes, host: &FakeHost, rows: &VmSnapshot) {
        sensor.look(host, &ranges(rows.len() as u64), rows).expect("the fake answers");
    }

    #[test]
    fn a_huge_page_is_on_one_node_and_base_pages_may_be_spread() {
        let (one, two) = (NodeId(0), NodeId(1));
        let host = host("Hff.");
        host.put_on_node(BASE, mib(2), two);
        host.put_on_node(BASE + mib(4), mib(1) + kib(512), two);
        let mut sensor = WindowNodes::default();
        look(&mut sensor, &host, &rows("Hff."));
        let seen = [WindowNode::On(two), WindowNode::On(one), WindowNode::Spread(two), WindowNode::Unknown];
        assert_eq!(sensor.nodes(), seen);
        assert!(sensor.is_complete());
    }

    #[test]
    fn a_promoted_window_is_asked_about_again_before_the_next_pass() {
        let host = host("ffff");
        let mut sensor = WindowNodes::default();
        look(&mut sensor, &host, &rows("ffff"));
        let calls = host.calls();
        look(&mut sensor, &host, &rows("ffff"));
        assert_eq!(host.calls(), calls, "no look is due");
        host.put_on_node(BASE + mib(2), mib(2), NodeId(1));
        host.make_present(BASE + mib(2), mib(2), true);
        let after = rows("fHff");
        look(&mut sensor, &host, &after);
        assert_eq!(sensor.nodes()[1], WindowNode::Unknown, "what was seen of its base pages no longer holds");
        host.sleep(PAUSE_MIN);
        look(&mut sensor, &host, &after);
        assert_eq!(sensor.nodes()[1], WindowNode::On(NodeId(1)));
        host.sleep(PASS_EVERY);
        look(&mut sensor, &host, &after);
        assert_eq!(sensor.nodes()[1], WindowNode::On(NodeId(1)));
    }

    #[test]
    fn a_pass_over_many_windows_takes_several_looks_with_pauses_between() {
        let drawn = "H".repeat(WINDOWS_PER_LOOK + 3);
        let (host, rows) = (host(&drawn), rows(&drawn));
        let mut sensor = WindowNodes::default();
        look(&mut sensor, &host, &rows);
        let known = |sensor: &WindowNodes| sensor.nodes().iter().filter(|node| **node != WindowNode::Unknown).count();
        assert_eq!((known(&sensor), sensor.is_complete()), (WINDOWS_PER_LOOK, false));
        look(&mut sensor, &host, &rows);
        assert_eq!(known(&sensor), WINDOWS_PER_LOOK, "too early");
        host.sleep(PAUSE_MIN);
        look(&mut sensor, &host, &rows);
        assert_eq!((known(&sensor), sensor.is_complete()), (WINDOWS_PER_LOOK + 3, true));
    }

    #[test]
    fn a_refused_look_keeps_what_is_known_and_waits_for_the_next_pass() {
        let host = host("H");
        let (mut sensor, rows) = (WindowNodes::default(), rows("H"));
        host.fail_call(0, libc::EPERM);
        let refused = sensor.look(&host, &ranges(1), &rows).expect_err("it was made to fail");
        assert_eq!(refused.source.raw_os_error(), Some(libc::EPERM));
        let calls = host.calls();
        look(&mut sensor, &host, &rows);
        assert_eq!(host.calls(), calls);
        host.sleep(PASS_EVERY);
        look(&mut sensor, &host, &rows);
        assert_eq!(sensor.nodes(), [WindowNode::On(NodeId(0))]);
    }
}
