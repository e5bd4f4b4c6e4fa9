//! A node's figures in whole GiB. They change seldom: an object of a node is read by many programs, and each write goes
//! to all of them.
//!
//! ```text
//!   bytes      ───────╲                     ╱──────    down: at once, a pod must not be placed on memory that is gone
//!   published  ──────┐ └────────────────┘           up:   once a quarter GiB more than the next whole one is there
//! ```

use std::collections::BTreeMap;

use wideleaf_control::view::PromotableView;

/// A figure of the daemon's answer, in bytes.
type FigureOf = fn(&PromotableView) -> u64;

/// Labels of the node, and the field of the daemon's answer that each shows.
const LABELS: [(&str, FigureOf); 4] = [
    ("wideleaf.io/promotable-2m-gib", |view| view.now_2m),
    ("wideleaf.io/promotable-1g-gib", |view| view.now_1g),
    ("wideleaf.io/compactable-2m-gib", |view| view.compacted_2m),
    ("wideleaf.io/compactable-1g-gib", |view| view.compacted_1g),
];

/// Extended resource of the node: GiB of 2 MiB pages that pods which request it may count on.
pub const RESOURCE: &str = "wideleaf.io/huge-gib";

const GIB: u64 = 1 << 30;

/// Memory above the next whole GiB before a figure rises, in bytes.
const MARGIN: u64 = GIB / 4;

/// Figures as they are published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Labels by name, whole GiB.
    pub labels: BTreeMap<&'static str, u64>,
    /// Value of the extended resource, whole GiB.
    pub huge_gib: u64,
}

impl Figures {
    /// Figures after `before`. `held`: memory in large pages of guests of pods that request the resource, in bytes. The
    /// scheduler subtracts what these pods request, so that it must be in the sum.
    pub fn after(before: Option<&Figures>, promotable: &PromotableView, held: u64) -> Figures {
        let label = |(name, of): (&'static str, FigureOf)| {
            let published = before.and_then(|before| before.labels.get(name)).copied();
            (name, whole_gib(published, of(promotable)))
        };
        Figures {
            labels: LABELS.map(label).into_iter().collect(),
            huge_gib: whole_gib(before.map(|before| before.huge_gib), promotable.now_2m.saturating_add(held)),
        }
    }
}

/// Whole GiB of `bytes`, rounded down; the published number while the difference may be noise.
fn whole_gib(published: Option<u64>, bytes: u64) -> u64 {
    match published {
        None => bytes / GIB,
        Some(published) if bytes / GIB < published => bytes / GIB,
        Some(published) => published.max(bytes.saturating_sub(MARGIN) / GIB),
    }
}

/// Names of all labels.
pub fn label_names() -> impl Iterator<Item = &'static str> {
    LABELS.into_iter().map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn promotable(now_2m: u64) -> PromotableView {
        PromotableView { now_2m, now_1g: GIB, compacted_2m: 5 * GIB - 1, compacted_1g: 2 * GIB }
    }

    #[test]
    fn figures_are_whole_gibibytes_rounded_down() {
        let figures = Figures::after(None, &promotable(3 * GIB - 1), 2 * GIB);
        assert_eq!(figures.labels.values().copied().collect::<Vec<_>>(), [2, 4, 1, 2], "by name");
        assert_eq!(figures.huge_gib, 4, "3 GiB less a byte are free, and 2 GiB are held");
    }

    #[test]
    fn a_figure_falls_at_once_and_rises_past_a_margin() {
        let mut figures = Figures::after(None, &promotable(3 * GIB), 0);
        for (bytes, expected) in [
            (3 * GIB - 1, 2),
            (3 * GIB, 2),
            (3 * GIB + MARGIN - 1, 2),
            (3 * GIB + MARGIN, 3),
            (9 * GIB, 8),
            (9 * GIB + MARGIN, 9),
            (0, 0),
            (1, 0),
        ] {
            figures = Figures::after(Some(&figures), &promotable(bytes), 0);
            assert_eq!(figures.huge_gib, expected, "{bytes}");
        }
    }

    #[test]
    fn memory_that_swings_around_a_whole_gibibyte_writes_at_most_once() {
        let mut figures = Figures::after(None, &promotable(3 * GIB), 0);
        let mut changes = 0;
        for swing in 0..100 {
            let bytes = 3 * GIB + (swing % 7) * (MARGIN / 8) - MARGIN / 4;
            let next = Figures::after(Some(&figures), &promotable(bytes), 0);
            changes += u32::from(next != figures);
            figures = next;
        }
        assert!(changes <= 1, "{changes} changes");
    }
}
