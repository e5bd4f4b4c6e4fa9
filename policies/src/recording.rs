//! Recordings: what the loop saw, planned and did, as bytes, so that any policy can be asked afterwards what it would
//! have done.
//!
//! ```text
//!   magic  version  header block │ frame │ frame │ frame │ …                version 3
//!   8      2 bytes               └ kind, block       block = length, that many bytes
//!
//!   per tick:  snapshot   plan   outcome  outcome  …         and at the end:  snapshot   end
//! ```
//!
//! The version is little endian. Everything behind it is made of *numbers* (LEB128: seven bits a byte, lowest first, the
//! highest bit says that more follow), *texts* (length, UTF-8), *times* (nanoseconds since the manager's start) and
//! *lists* (count, elements).
//!
//! | block | content |
//! |---|---|
//! | header | policy text; budget: bytes/s, 1/10 000 of a CPU, burst time; list of VMs (id, backing text, start page, list of ranges: first address, bytes); list of facts (name text, value text) |
//! | 1 snapshot | time the budget was refilled; host: 0, or 1 and total, available, free giant pages; list of VMs as below |
//! | 2 plan | time the policy was given; list of (action, bytes to copy, CPU time) |
//! | 3 outcome | mechanism text, action, time, bytes copied, CPU time, time out of reach, result, errno (zigzag) |
//! | 4 end | nothing: the recording was closed, not cut off |
//!
//! An action is its kind (0 promote, 1 demote, 2 release), VM, window and, but for release, the page size (0 4k, 1 2m, 2 1g).
//! Results are numbered in the order of `RESULTS`.
//!
//! A VM of a snapshot is its id, a mask of what differs from the previous snapshot, and only that, in the order of the
//! bits: its windows (list of runs: gap to the run before, length), the eight columns of [`VmSnapshot`] up to the guest's
//! pages, KVM's totals, the column of what was given back, and how much of that is tolerated.
//! With other windows than before, columns are compared to those of unbacked windows nobody looked at. A
//! column is runs: `2·rows` for rows that are as before, `2·rows + 1` and a value for rows that have that value. So an
//! idle guest costs a dozen bytes a tick.
//!
//! A file that ends within a frame was cut off (a kill, a full disk) and is good up to there. Every other deviation is an
//! error with its offset; no bytes make the decoder panic, or take more memory than [`ROWS_MAX`] rows.
//!
//! [`VmSnapshot`]: crate::VmSnapshot

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use crate::action::PlannedAction;
use crate::budget::BudgetLimits;
use crate::geometry::GpaRange;
use crate::outcome::{Outcome, OutcomeResult, Refusal, Skip};
use crate::snapshot::{Snapshot, VmId};
use crate::units::{Moment, PageSize};

mod columns;
mod decode;
mod encode;
mod wire;

pub use decode::Decoder;
pub use encode::Encoder;

/// What a recording begins with. No text does (the first byte alone is no UTF-8), and a transfer that changes line ends is
/// seen at once.
pub const MAGIC: [u8; 8] = *b"\x93wdleaf\n";

/// Which form of the format is written. It changes with every change of the format.
pub const VERSION: u16 = 3;

/// The oldest form that is read. Version 2 lacks what was given back, which is the same as that nothing was.
const VERSION_OLDEST: u16 = 2;

/// Windows of all VMs of one snapshot: 4 TiB of guest RAM. Bounds what a few bytes of a run can make a reader allocate
/// (100 MB); a host with more is not recorded.
pub const ROWS_MAX: usize = 1 << 21;

/// The last window below 2^52, the end of x86-64 physical addresses (SDM vol. 3, 4.1.4).
const WINDOW_MAX: u64 = (1 << (52 - 21)) - 1;

/// No moment is later and no time longer, 146 years: sums of some of them fit a `Duration`, and nanoseconds a number. What
/// lies beyond (never, for a window that is being acted on) is kept as this.
const TIME_MAX: Duration = Duration::from_nanos(1 << 62);

/// Four times what the largest action copies; sums over a recording of any size fit 64 bits.
const COPIED_MAX: u64 = 1 << 32;

/// No host has more memory: the end of physical addresses, as for [`WINDOW_MAX`].
const MEMORY_MAX: u64 = 1 << 52;

/// Every result, in the order of their numbers in a recording. New ones go to the end.
const RESULTS: [OutcomeResult; 20] = [
    OutcomeResult::Done,
    OutcomeResult::Refused(Refusal::NoHugePage),
    OutcomeResult::Refused(Refusal::Busy),
    OutcomeResult::Refused(Refusal::NotEligible),
    OutcomeResult::Refused(Refusal::NotPermitted),
    OutcomeResult::Refused(Refusal::NotObserved),
    OutcomeResult::Refused(Refusal::Other(0)),
    OutcomeResult::Skipped(Skip::AlreadyDone),
    OutcomeResult::Skipped(Skip::NotResident),
    OutcomeResult::Skipped(Skip::NoMechanism),
    OutcomeResult::Skipped(Skip::BackingOff),
    OutcomeResult::Skipped(Skip::Stopping),
    OutcomeResult::Refused(Refusal::OutrunByWrites),
    OutcomeResult::Skipped(Skip::GiantUnderWay),
    OutcomeResult::Refused(Refusal::Merged),
    OutcomeResult::Refused(Refusal::Gone),
    OutcomeResult::Skipped(Skip::Hole),
    OutcomeResult::Skipped(Skip::LeftAlone),
    OutcomeResult::Skipped(Skip::GivenBack),
    OutcomeResult::Skipped(Skip::NoHugePage),
];

/// What a recording is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Name of the policy that decided.
    pub policy: String,
    /// The budget it had.
    pub limits: BudgetLimits,
    /// The VMs.
    pub vms: Vec<VmHeader>,
    /// What else is worth knowing of host and guest, by name; nothing depends on it.
    pub facts: Vec<(String, String)>,
}

/// One VM of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmHeader {
    /// Its name towards the policy.
    pub vm: VmId,
    /// What its RAM is made of: `anon`, `memfd`, `hugetlb`.
    pub backing: String,
    /// Page size its RAM started with.
    pub start_page: PageSize,
    /// Where its RAM is.
    pub ranges: Vec<GpaRange>,
}

impl Header {
    /// Windows of all VMs; `usize::MAX` where they are more.
    pub fn windows(&self) -> usize {
        let ranges = self.vms.iter().flat_map(|vm| &vm.ranges);
        ranges.fold(0, |sum: usize, range| sum.saturating_add(range.windows().len()))
    }
}

/// One thing the loop did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// It looked.
    Snapshot {
        /// When the tick began: the moment the budget was refilled to.
        at: Moment,
        /// What it saw.
        snapshot: Snapshot,
    },
    /// The policy decided, upon the snapshot before.
    Plan {
        /// The moment the policy was given.
        now: Moment,
        /// What it asked for.
        actions: Vec<PlannedAction>,
    },
    /// One request was dealt with.
    Outcome(RecordedOutcome),
    /// The loop ended and closed its recording.
    End,
}

/// What became of a request, and by which mechanism.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedOutcome {
    /// The mechanism's name: `collapse`, `recover`, …; `none` where none was used.
    pub mechanism: String,
    /// What became of it.
    pub outcome: Outcome,
}

/// More windows than a recording holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyWindows(pub usize);

impl fmt::Display for TooManyWindows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} windows of 2 MiB are more than a recording holds ({ROWS_MAX})", self.0)
    }
}

impl core::error::Error for TooManyWindows {}

/// Why bytes are not a recording, or no further one. Offsets are in bytes from the begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// It does not begin like one.
    NoRecording,
    /// Another form of the format.
    UnknownVersion(u16),
    /// It ends within the header, or within the frame that begins at this offset.
    CutOff {
        /// Where the last whole part ends.
        offset: usize,
    },
    /// A number that cannot be, or does not fit what was before it.
    OutOfRange {
        /// Where it is.
        offset: usize,
        /// What it is of.
        what: &'static str,
        /// The number.
        value: u64,
    },
    /// A text that is no UTF-8.
    NoText {
        /// Where it is.
        offset: usize,
    },
    /// A block that is shorter or longer than what is in it.
    WrongLength {
        /// Where its content ends.
        offset: usize,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            DecodeError::NoRecording => write!(f, "not a recording of wideleaf"),
            DecodeError::UnknownVersion(version) => {
                write!(f, "a recording of version {version}; this program reads versions {VERSION_OLDEST} to {VERSION}")
            }
            DecodeError::CutOff { offset } => write!(f, "cut off behind byte {offset}"),
            DecodeError::OutOfRange { offset, what, value } => {
                write!(f, "damaged at byte {offset}: {value} is no {what}")
            }
            DecodeError::NoText { offset } => write!(f, "damaged at byte {offset}: a text that is no UTF-8"),
            DecodeError::WrongLength { offset } => {
                write!(f, "damaged at byte {offset}: what is there does not end where it should")
            }
        }
    }
}

impl core::error::Error for DecodeError {}

/// Numbers of the frames' kinds.
mod kind {
    pub const SNAPSHOT: u64 = 1;
    pub const PLAN: u64 = 2;
    pub const OUTCOME: u64 = 3;
    pub const END: u64 = 4;
}
