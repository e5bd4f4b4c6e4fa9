//! Recordings: what the loop saw, planned and did, encoded as bytes. Afterwards any policy can be replayed on a
//! recording to see what it would have done.
//!
//! ```text
//!   magic  version  header block │ frame │ frame │ frame │ …                version 7
//!   8      2 bytes               └ kind, block       block = length, that many bytes
//!
//!   per tick:  snapshot   plan   outcome  outcome  …         and at the end:  snapshot   end
//! ```
//!
//! The version is little endian. The rest consists of *numbers* (LEB128: seven bits a byte, lowest first; a set
//! highest bit means that more follow), *texts* (length, UTF-8), *times* (nanoseconds since the manager's start)
//! and *lists* (count, elements).
//!
//! | block | content |
//! |---|---|
//! | header | policy text; budget: bytes/s, 1/10 000 of a CPU, burst time; list of VMs (id, backing text, start page, list of ranges: first address, bytes); list of facts (name text, value text) |
//! | 1 snapshot | time the budget was refilled; host as below; list of VMs as below |
//! | 2 plan | time the policy was given; list of (action, bytes to copy, CPU time) |
//! | 3 outcome | mechanism text, action, time, bytes copied, CPU time, time out of reach, result, errno (zigzag) |
//! | 4 end | nothing: the recording was closed, not cut off |
//!
//! An action is its kind (0 promote, 1 demote, 2 release, 3 vacate, 4 move, 5 promote with a page of a NUMA node), VM,
//! window and, for promote and demote, the page size (0 4k, 1 2m, 2 1g), for 4 and 5 the number of the node. Versions
//! before 7 have neither 4 nor 5. Results are numbered in the order of `RESULTS`.
//!
//! A host is 0 if it was not measured, else its kind, total, available and free giant pages. Kind 1 has plenty of huge
//! pages. Kind 2 is followed by the number of free ones, 3 by their price and the number of windows that may be
//! vacated, 4 by these and the number of free ones. Versions before 4 have neither price nor number, those before 6 no
//! kind 4.
//!
//! A VM of a snapshot is its id, a mask of the parts that differ from the previous snapshot, and those parts in the
//! order of the bits: its windows (list of runs: gap to the previous run, length), the eight columns of
//! [`VmSnapshot`] up to the guest's pages, KVM's totals, the column of given-back pages, the number of those
//! that is tolerated, the readings of the guest's progress since the previous snapshot (list of phase, work done, CPU
//! time; versions before 5 have none), the guaranteed share in ten-thousandths (versions before 6 have none), and three
//! parts about NUMA nodes, of hosts with several of them: the column of nodes (0 unknown, 1 on, 2 spread; node), that
//! of touches (0 unknown, 1 one node, 2 several; node; share of the touches in ten-thousandths), and the list of nodes
//! (node, 1 if permitted, vCPUs, free pages of 2 MiB and of 1 GiB). If the windows differ from the previous ones,
//! columns are compared to those of unbacked windows without sensor data. A column consists of runs: `2·rows` for rows
//! that are as before, `2·rows + 1` and a value for rows with that value. So an idle guest costs a dozen bytes a tick.
//!
//! A file that ends within a frame was cut off (a kill, a full disk) and is valid up to there. Every
//! other deviation is an error with its offset. No input makes the decoder panic, or use more memory
//! than [`ROWS_MAX`] rows.
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

/// First bytes of a recording. No text begins with them (the first byte alone is not UTF-8), and they reveal a
/// transfer that changes line ends.
pub const MAGIC: [u8; 8] = *b"\x93wdleaf\n";

/// Version of the format that the encoder writes. It changes with every change of the format.
pub const VERSION: u16 = 7;

/// Oldest version that the decoder reads. Version 2 lacks the given-back pages; the decoder assumes that
/// there are none. Version 3 has no action vacate, version 4 no progress of guests, version 5 no
/// guarantees, nor the number of free huge pages beside their price, version 6 no NUMA nodes.
const VERSION_OLDEST: u16 = 2;

/// Largest number of windows of all VMs in one snapshot: 4 TiB of guest RAM. Bounds the memory that a few bytes of
/// a run can make a reader allocate (100 MB). A host with more is not recorded.
pub const ROWS_MAX: usize = 1 << 21;

/// Index of the last window below 2^52, the end of x86-64 physical addresses (SDM vol. 3, 4.1.4).
const WINDOW_MAX: u64 = (1 << (52 - 21)) - 1;

/// Largest moment and longest time, 146 years: sums of some of them fit a `Duration`, and nanoseconds fit a number.
/// Later moments (such as never, for a window that is being acted on) are stored as this value.
const TIME_MAX: Duration = Duration::from_nanos(1 << 62);

/// Upper limit on the bytes that an action may report as copied: four times the largest action. Sums over a
/// recording of any size fit 64 bits.
const COPIED_MAX: u64 = 1 << 32;

/// Largest memory of a host: the end of physical addresses, as for [`WINDOW_MAX`].
const MEMORY_MAX: u64 = 1 << 52;

/// All results, in the order of their numbers in a recording. Append new ones.
const RESULTS: [OutcomeResult; 23] = [
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
    OutcomeResult::Skipped(Skip::PageBeingMade),
    OutcomeResult::Skipped(Skip::StallBudget),
    OutcomeResult::Skipped(Skip::NextTick),
];

/// Description of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Name of the policy that decided.
    pub policy: String,
    /// Budget of that policy.
    pub limits: BudgetLimits,
    /// VMs in the recording.
    pub vms: Vec<VmHeader>,
    /// Further facts about host and guest, by name; nothing depends on them.
    pub facts: Vec<(String, String)>,
}

/// One VM of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmHeader {
    /// Id of the VM in snapshots and actions.
    pub vm: VmId,
    /// Kind of its RAM: `anon`, `memfd`, `hugetlb`.
    pub backing: String,
    /// Page size its RAM started with.
    pub start_page: PageSize,
    /// Guest-physical ranges of its RAM.
    pub ranges: Vec<GpaRange>,
}

impl Header {
    /// Number of windows of all VMs; `usize::MAX` if there are more.
    pub fn windows(&self) -> usize {
        let ranges = self.vms.iter().flat_map(|vm| &vm.ranges);
        ranges.fold(0, |sum: usize, range| sum.saturating_add(range.windows().len()))
    }
}

/// One event of the recorded loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The sensors took a snapshot.
    Snapshot {
        /// Start of the tick: the moment up to which the budget was refilled.
        at: Moment,
        /// Snapshot that the policy received.
        snapshot: Snapshot,
    },
    /// The policy decided on the preceding snapshot.
    Plan {
        /// Moment that the policy was given.
        now: Moment,
        /// Actions that the policy requested.
        actions: Vec<PlannedAction>,
    },
    /// The manager handled one request.
    Outcome(RecordedOutcome),
    /// The loop ended and closed its recording.
    End,
}

/// Outcome of a request, and the mechanism.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedOutcome {
    /// Name of the mechanism: `collapse`, `recover`, …; `none` if no mechanism was used.
    pub mechanism: String,
    /// Outcome of the request.
    pub outcome: Outcome,
}

/// Error: more windows than a recording can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyWindows(pub usize);

impl fmt::Display for TooManyWindows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot record {} windows of 2 MiB: a recording holds at most {ROWS_MAX}", self.0)
    }
}

impl core::error::Error for TooManyWindows {}

/// Reason why bytes are not a recording, or not a further one. Offsets are in bytes from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// The bytes do not begin with [`MAGIC`].
    NoRecording,
    /// The recording has an unknown version of the format.
    UnknownVersion(u16),
    /// The bytes end within the header, or within the frame that begins at this offset.
    CutOff {
        /// End of the last complete part.
        offset: usize,
    },
    /// A number that is impossible, or does not fit the preceding data.
    OutOfRange {
        /// Offset of the number.
        offset: usize,
        /// Name of the quantity.
        what: &'static str,
        /// The number itself.
        value: u64,
    },
    /// A text that is not UTF-8.
    NoText {
        /// Offset of the text.
        offset: usize,
    },
    /// A block that is shorter or longer than its content.
    WrongLength {
        /// End of its content.
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
            DecodeError::CutOff { offset } => write!(f, "cut off after byte {offset}"),
            DecodeError::OutOfRange { offset, what, value } => {
                write!(f, "damaged at byte {offset}: {value} is not a valid {what}")
            }
            DecodeError::NoText { offset } => write!(f, "damaged at byte {offset}: a text is not UTF-8"),
            DecodeError::WrongLength { offset } => {
                write!(f, "damaged at byte {offset}: the content does not end where its block ends")
            }
        }
    }
}

impl core::error::Error for DecodeError {}

/// Numbers of the kinds of frames.
mod kind {
    pub const SNAPSHOT: u64 = 1;
    pub const PLAN: u64 = 2;
    pub const OUTCOME: u64 = 3;
    pub const END: u64 = 4;
}
