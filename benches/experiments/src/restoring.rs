//! A guest that is saved and continued in one of several ways: what a run does, and the names of what it tells.
//!
//! ```text
//!   guest ─ works ─▶ saved, ends │ file cold or warm │ process starts ─▶ first progress ─▶ 99 % of its steady speed
//!                                                    └──────────────── T99 ─────────────────┘
//! ```

use serde::{Deserialize, Serialize};

use crate::command_line::typed;
use crate::guest::{Guest, QemuRam};

pub mod speeds;

/// A guest that is saved once for all ways, and continued in one way.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct RestoredGuest {
    /// Guest, with work for longer than it is watched. Its progress marks are those of its command line.
    pub guest: Guest,
    /// Name of the phase in which it is saved and watched.
    pub phase: String,
    /// Names of the regions that it uses all the time in this phase: its hot set.
    pub hot: Vec<String>,
    /// Way in which it continues.
    pub way: Way,
    /// State of the snapshot's file before that.
    pub cache: Cache,
    /// Time for which it works in its phase before it is saved, in milliseconds.
    pub works_ms: u64,
    /// Time from its start to its save on a slow machine, in milliseconds.
    pub saved_within_ms: u64,
    /// Time for which it is watched after it continues, in milliseconds.
    pub watched_ms: u64,
}

/// Way in which a guest continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// It is not saved: a guest of `wideleaf run`, from its start.
    NeverSaved,
    /// `--restore`, huge pages moved in, in the order of heat.
    Moved,
    /// The same in the order of first touches, which an earlier restore has recorded.
    MovedInOrder,
    /// As `Moved`, read through the page cache although the file is not there.
    MovedCached,
    /// `--restore-pages 4k`.
    CopiedByPage,
    /// `--restore-pages mapped`.
    Mapped,
    /// QEMU's own save and restore, by a file.
    Qemu,
}

/// State of a snapshot's file in the host's page cache before a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// All of the file is in the page cache.
    Warm,
    /// None of the file is.
    Cold,
}

impl Way {
    /// Options of `wideleaf run --restore`; `None` for ways without it. The saved guest has the policy `auto`; a mapped
    /// file can have no huge page, so that a manager would only cost time.
    pub fn options(self) -> Option<&'static [&'static str]> {
        match self {
            Way::NeverSaved | Way::Qemu => None,
            Way::Moved => Some(&["--prefetch", "off"]),
            Way::MovedInOrder => Some(&["--prefetch", "use"]),
            Way::MovedCached => Some(&["--prefetch", "off", "--restore-reads", "cached"]),
            Way::CopiedByPage => Some(&["--prefetch", "off", "--restore-pages", "4k"]),
            Way::Mapped => Some(&["--prefetch", "off", "--restore-pages", "mapped", "--policy", "never"]),
        }
    }
}

impl Cache {
    /// The state in a few words.
    pub const fn in_words(self) -> &'static str {
        match self {
            Cache::Warm => "in the page cache",
            Cache::Cold => "not in the page cache",
        }
    }
}

impl RestoredGuest {
    /// Time for which the process runs after the guest continues, as `--timeout` takes it.
    pub fn timeout(&self) -> String {
        format!("{}ms", self.watched_ms)
    }

    /// Command line as a user would type it.
    pub fn command(&self) -> String {
        let own = typed(&self.guest.arguments());
        let timeout = self.timeout();
        let file = self.cache.in_words();
        match self.way.options() {
            Some(options) => {
                let options = options.join(" ");
                format!(
                    "wideleaf run --restore SAVED {options} --timeout {timeout}, SAVED {file}; saved from run {own}"
                )
            }
            None if self.way == Way::NeverSaved => format!("wideleaf run {own} --policy auto --timeout {timeout}"),
            None => {
                let qemu = self.guest.qemu_command(QemuRam::Thp);
                format!("{qemu} -incoming 'exec:cat SAVED', SAVED {file}; saved by `migrate`")
            }
        }
    }
}

/// Name under which a run tells the time from its process's start to the guest's first progress, in seconds.
pub const FIRST_PROGRESS_S: &str = "first_progress_s";
/// Name under which a run tells the share of the hot set on 2 MiB pages when the guest is first at full speed, in per
/// cent: at T99 it is at least that.
pub const HUGE_AT_FIRST_PERCENT: &str = "huge_at_first_percent";
/// Name under which a run tells the size of the hot set, in MiB.
pub const HOT_MIB: &str = "hot_mib";
/// Name under which a run tells the speed at which its snapshot's file was read right before, in bytes a second.
pub const READ_BYTES_PER_S: &str = "read_bytes_per_s";
/// Name under which a run tells the share of the file in the page cache right before, in per cent.
pub const CACHED_PERCENT: &str = "cached_percent";
/// Name under which a run tells the guest's RAM without pages of zeroes in its snapshot, in MiB.
pub const STORED_MIB: &str = "stored_mib";
/// Name under which a run tells the space of its snapshot's files on the disk, in MiB.
pub const DISK_MIB: &str = "disk_mib";
/// Name under which a run tells the guest's pause while it was saved, in milliseconds.
pub const PAUSE_MS: &str = "pause_ms";
/// Name under which a run tells the number of passes over RAM while it was saved.
pub const SAVE_ROUNDS: &str = "save_rounds";
/// Name under which a run tells the time of the save, in seconds.
pub const SAVE_S: &str = "save_s";
/// Name under which a run tells the guest's waits of which 50 of 100 were not longer, in microseconds.
pub const WAIT_P50_US: &str = "wait_p50_us";
/// The same for 99 of 100.
pub const WAIT_P99_US: &str = "wait_p99_us";
/// Name under which a run tells the guest's longest wait, in microseconds.
pub const WAIT_MAX_US: &str = "wait_max_us";
/// Name under which a run tells the time until all of RAM had its content, in seconds.
pub const FILLED_S: &str = "filled_s";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_names_the_way_and_the_state_of_the_file() {
        let of = |way, cache| RestoredGuest {
            guest: Guest::new("gups", "log2_words=26 seconds=600", 1024),
            phase: "update".into(),
            hot: vec!["table".into()],
            way,
            cache,
            works_ms: 1000,
            saved_within_ms: 4000,
            watched_ms: 3000,
        };
        let command = of(Way::CopiedByPage, Cache::Cold).command();
        for part in ["--restore SAVED --prefetch off --restore-pages 4k --timeout 3000ms", "not in the page cache"] {
            assert!(command.contains(part), "no {part} in {command}");
        }
        let qemu = of(Way::Qemu, Cache::Warm).command();
        assert!(qemu.contains("-incoming 'exec:cat SAVED', SAVED in the page cache"), "{qemu}");
        assert!(of(Way::NeverSaved, Cache::Warm).command().contains("--policy auto --timeout 3000ms"));
    }
}
