//! What a gate concludes from answers: of QEMU's monitor, of libvirt's status file, of a process's open files. It asks
//! nothing itself.

use serde_json::Value;
use wideleaf_memory::gate::LeftAlone;
use wideleaf_policies::Bytes;
use wideleaf_policies::units::mib;

use crate::command_line::Returns;
use crate::events::Signs;
use crate::process::Descriptors;
use crate::virsh::Job;

/// Only a device pins more than this: buffers of `io_uring(7)` and the like are smaller.
const PINNED_MIN: Bytes = mib(64);

/// Why a process with these open files is left alone.
pub(super) fn of_descriptors(descriptors: &Descriptors, pinned: Bytes, is_encrypted: bool) -> Option<LeftAlone> {
    match () {
        () if is_encrypted || descriptors.is_encrypted => Some(LeftAlone::Encrypted),
        () if descriptors.has_guest_memfd => Some(LeftAlone::GuestMemfd),
        () if descriptors.has_device || pinned >= PINNED_MIN => Some(LeftAlone::Pinned),
        () => None,
    }
}

/// Why a guest with this job of libvirt's is left alone.
pub(super) fn of_job(job: Job) -> Option<LeftAlone> {
    match job {
        Job::None => None,
        Job::Migration | Job::Arrival => Some(LeftAlone::Migration),
        Job::Snapshot => Some(LeftAlone::Snapshot),
    }
}

/// State of a balloon, as far as the monitor reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Balloon {
    /// The guest has all of its memory.
    Empty,
    /// Some memory is in the balloon.
    Inflated,
}

impl Balloon {
    /// Compares the memory that the balloon leaves the guest with all of its memory. Plugged memory counts in both.
    pub fn of((left, all): (u64, u64)) -> Balloon {
        if left < all { Balloon::Inflated } else { Balloon::Empty }
    }
}

/// A balloon in an unknown state counts as inflated.
pub(super) fn keeps_holes(returns: Returns, balloon: Option<Balloon>) -> bool {
    let is_inflated = balloon.map_or(returns.balloon, |balloon| balloon == Balloon::Inflated);
    returns.free_page_reporting || returns.virtio_mem || is_inflated
}

/// Parses `dev: virtio-balloon-device, id ""` and, below it, `free-page-reporting = true`. A guest has at
/// most one balloon.
pub(super) fn of_device_tree(tree: &str) -> Returns {
    let has = |start: &str| tree.lines().any(|line| line.trim().starts_with(start));
    Returns {
        balloon: has("dev: virtio-balloon"),
        free_page_reporting: has("free-page-reporting = true"),
        virtio_mem: has("dev: virtio-mem"),
    }
}

/// Parses `<memballoon model='virtio' freePageReporting='on'>` and `<memory model='virtio-mem'>` of a
/// domain's status file.
pub(super) fn of_status(xml: &str) -> Returns {
    let tags = |name: &'static str| xml.split('<').filter(move |tag| tag.starts_with(name));
    let with = |name: &'static str, attribute: &str| tags(name).any(|tag| tag.contains(attribute));
    Returns {
        balloon: with("memballoon ", "model='virtio"),
        free_page_reporting: with("memballoon ", "freePageReporting='on'"),
        virtio_mem: with("memory ", "model='virtio-mem'"),
    }
}

/// Parses `<domstatus state='paused' reason='user' pid='7'>`.
pub(super) fn is_stopped(xml: &str) -> bool {
    let tag = xml.split_once("<domstatus ").and_then(|(_, rest)| rest.split_once('>')).map_or("", |(tag, _)| tag);
    ["state='paused'", "state='pmsuspended'"].iter().any(|state| tag.contains(state))
}

/// Parses `<memory unit='KiB'>262144</memory>` and, after it, `<currentMemory unit='KiB'>131072</currentMemory>` of a
/// domain's status file: the second is what the balloon leaves the guest, as QEMU told libvirt. Metadata come before
/// them, and may have elements of these names too.
pub(super) fn memory_of_status(xml: &str) -> Option<(u64, u64)> {
    let kib = |text: &str| text.parse::<u64>().ok()?.checked_mul(1 << 10);
    let (before, left) = xml.rsplit_once("<currentMemory ")?;
    let (left, _) = left.strip_prefix("unit='KiB'>")?.split_once("</")?;
    let (all, between) = before.rsplit_once("</memory>")?;
    let (tag, all) = all.rsplit_once('>')?;
    let is_in_kib = between.trim().is_empty() && tag.ends_with("unit='KiB'");
    Some((kib(left)?, kib(all)?)).filter(|_| is_in_kib)
}

/// Answers of the monitor to [`QUESTIONS`](super::QUESTIONS); null where it refused, for example an unknown command.
pub(super) struct Answers([Value; 7]);

impl Answers {
    pub fn of(answers: impl IntoIterator<Item = Value>) -> Answers {
        let mut answers = answers.into_iter();
        Answers(std::array::from_fn(|_| answers.next().unwrap_or_default()))
    }

    pub fn signs(&self) -> Signs {
        let [status, ..] = &self.0;
        Signs {
            left_alone: self.left_alone(),
            is_arriving: status["status"] == "inmigrate",
            has_userfaultfd: false,
            is_stopped: status["running"] == false,
            balloon: self.memory_left(),
        }
    }

    pub fn left_alone(&self) -> Option<LeftAlone> {
        let [status, migrate, dirty_rate, dump, jobs, ..] = &self.0;
        let text = |value: &'_ Value| value["status"].as_str().unwrap_or_default().to_owned();
        let over = ["", "none", "completed", "failed", "cancelled"];
        let is_migrating =
            !over.contains(&text(migrate).as_str()) || text(status).contains("migrate") || text(status) == "colo";
        // Sampling reads some pages; the other modes have KVM write-protect all of them.
        let measures = text(dirty_rate) == "measuring" && dirty_rate["mode"].as_str() != Some("page-sampling");
        let saves = ["save-vm", "restore-vm"].contains(&text(status).as_str()) || text(dump) == "active";
        match () {
            () if is_migrating => Some(LeftAlone::Migration),
            () if saves || jobs.as_array().into_iter().flatten().any(is_snapshot) => Some(LeftAlone::Snapshot),
            () if measures => Some(LeftAlone::DirtyRate),
            () => None,
        }
    }

    pub fn balloon(&self) -> Option<Balloon> {
        self.memory_left().map(Balloon::of)
    }

    /// Memory that the balloon leaves the guest, and all of its memory, in bytes.
    fn memory_left(&self) -> Option<(u64, u64)> {
        let [.., balloon, memory] = &self.0;
        let (left, base) = (balloon["actual"].as_u64()?, memory["base-memory"].as_u64()?);
        let plugged = memory["plugged-memory"].as_u64().unwrap_or(0);
        Some((left, base.saturating_add(plugged)))
    }
}

/// Whether a job saves or loads memory and is not finished.
fn is_snapshot(job: &Value) -> bool {
    let is = |key: &str, words: &[&str]| job[key].as_str().is_some_and(|text| words.contains(&text));
    is("type", &["snapshot-save", "snapshot-load"]) && !is("status", &["concluded", "null", "undefined"])
}
