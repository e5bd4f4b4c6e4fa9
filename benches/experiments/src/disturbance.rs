//! QEMU guests on a host, the keeper of their huge pages, and one event that takes huge pages from them or keeps them
//! away.
//!
//! ```text
//!   start, one after the other ─▶ work ─▶ event ─▶ work again, watched from outside ─▶ each guest checks its memory
//!                                            └ speed, coverage and free huge pages count from here
//! ```

use serde::{Deserialize, Serialize};

use crate::guest::{Guest, QemuRam};

/// QEMU guests of one kind, and what happens to them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct DisturbedGuests {
    /// Guest that QEMU runs: GUPS, with its table as the hot set.
    pub guest: Guest,
    /// Number of such guests. Each starts when the one before it has begun its timed part.
    pub count: u32,
    /// Backing of the RAM of each guest.
    pub ram: QemuRam,
    /// Owner of the promotions.
    pub keeper: PromotionOwner,
    /// Event in the life of the guests.
    pub event: Event,
}

/// Owner of the promotions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PromotionOwner {
    /// The kernel alone.
    Kernel,
    /// The kernel, which denies this QEMU huge pages (`PR_SET_THP_DISABLE`).
    KernelWithoutHugePages,
    /// The kernel, and a wideleafd of the run that has every guest attached.
    Daemon,
}

/// Event in the life of the guests. A hog is a process that takes free huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// Nothing happens after the start.
    Start,
    /// A hog takes huge pages before the start and keeps them.
    StartBesideHog {
        /// Number of pages of 2 MiB that the hog takes.
        hog_pages_2m: u64,
    },
    /// A hog takes huge pages before the start, and ends while the guests work.
    HogEnds {
        /// Number of pages of 2 MiB that the hog takes.
        hog_pages_2m: u64,
    },
    /// QEMU saves the guest to a file and ends; a second QEMU restores it.
    Restore,
    /// As [`Event::Restore`], but a hog takes huge pages between the two, and ends when the guest works again.
    RestoreBesideHog {
        /// Number of pages of 2 MiB that the hog takes.
        hog_pages_2m: u64,
    },
    /// The guest moves by postcopy to a second QEMU on this host.
    Postcopy,
    /// QEMU measures the dirty rate for a second, with KVM's dirty bitmap.
    DirtyLog,
}

impl Event {
    /// The event in a few words; empty if nothing happens.
    pub fn in_words(self) -> String {
        match self {
            Event::Start => String::new(),
            Event::StartBesideHog { hog_pages_2m } => format!("beside a process with {hog_pages_2m} huge pages"),
            Event::HogEnds { hog_pages_2m } => {
                format!("beside a process with {hog_pages_2m} huge pages, which ends while the guest works")
            }
            Event::Restore => "saved to a file by `migrate`, and restored by `-incoming`".into(),
            Event::RestoreBesideHog { hog_pages_2m } => format!(
                "saved to a file by `migrate`, and restored by `-incoming` beside a process with {hog_pages_2m} huge \
                 pages, which ends when the guest works again"
            ),
            Event::Postcopy => "moved to a second QEMU by `migrate-start-postcopy`".into(),
            Event::DirtyLog => "`calc-dirty-rate` of 1 s by `dirty-bitmap`".into(),
        }
    }

    /// Number of pages of 2 MiB that a hog takes before the guests start.
    pub const fn hog_at_the_start(self) -> Option<u64> {
        match self {
            Event::StartBesideHog { hog_pages_2m } | Event::HogEnds { hog_pages_2m } => Some(hog_pages_2m),
            _ => None,
        }
    }

    /// Whether something happens to a guest after its start.
    pub const fn is_later(self) -> bool {
        !matches!(self, Event::Start | Event::StartBesideHog { .. })
    }
}

impl DisturbedGuests {
    /// Command line as a user would type it, and the event in words.
    pub fn command(&self) -> String {
        let count =
            if self.count == 1 { String::new() } else { format!("{} times, one after the other: ", self.count) };
        let denied = match self.keeper {
            PromotionOwner::KernelWithoutHugePages => "with PR_SET_THP_DISABLE: ",
            PromotionOwner::Kernel | PromotionOwner::Daemon => "",
        };
        let attached = if self.keeper == PromotionOwner::Daemon { "; wideleaf attach PID" } else { "" };
        let event = self.event.in_words();
        let event = if event.is_empty() { event } else { format!("; {event}") };
        format!("{count}{denied}{}{attached}{event}", self.guest.qemu_command(self.ram))
    }
}

/// Name under which a run tells the time from the event until 99 % of the hot set is on huge pages, in seconds. Absent
/// if that never came.
pub const TO_NEARLY_ALL_S: &str = "to_99_percent_s";
/// Name under which a run tells for how long it watched coverage after the event, in seconds.
pub const WATCHED_S: &str = "watched_s";
/// Name under which a run tells the number of free blocks of 2 MiB on the host at the end of the timed part.
pub const FREE_HUGE_PAGES: &str = "free_huge_pages";
/// Name under which a run tells the CPU time of wideleafd, in seconds.
pub const DAEMON_CPU_S: &str = "wideleafd_cpu_s";
/// Name under which a run tells the CPU time of khugepaged, in seconds.
pub const KHUGEPAGED_CPU_S: &str = "khugepaged_cpu_s";

/// Time between two looks at the guests' RAM in milliseconds: the resolution of [`TO_NEARLY_ALL_S`].
pub const LOOK_EVERY_MS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_names_the_guests_the_keeper_and_the_event() {
        let guests = DisturbedGuests {
            guest: Guest::new("gups", "log2_words=22", 64),
            count: 10,
            ram: QemuRam::Thp,
            keeper: PromotionOwner::Daemon,
            event: Event::Postcopy,
        };
        let command = guests.command();
        for part in ["10 times, one after the other: qemu-system", "; wideleaf attach PID; moved to a second QEMU"] {
            assert!(command.contains(part), "no {part} in {command}");
        }
        let plain = DisturbedGuests { count: 1, keeper: PromotionOwner::Kernel, event: Event::Start, ..guests };
        assert_eq!(plain.command(), plain.guest.qemu_command(QemuRam::Thp));
    }
}
