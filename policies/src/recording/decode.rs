//! Decodes bytes to frames, trusting none of them.

use alloc::vec::Vec;

use super::columns::{node_id, vm};
use super::wire::Reader;
use super::{
    COPIED_MAX, DecodeError, Frame, Header, MAGIC, MEMORY_MAX, RESULTS, ROWS_MAX, RecordedOutcome, VERSION,
    VERSION_OLDEST, VmHeader, WINDOW_MAX, kind,
};
use crate::action::{Action, PlannedAction};
use crate::budget::{BudgetLimits, Cost};
use crate::geometry::GpaRange;
use crate::huge_page_price::HugePagePrice;
use crate::node::NodeId;
use crate::outcome::{Outcome, OutcomeResult, Refusal};
use crate::snapshot::{HostMemory, HugePages, Snapshot, VmId, VmSnapshot};
use crate::units::{Bytes, Gpa, PageSize, PerTenThousand, WindowIndex};

/// Reads a recording frame by frame. Returns no frame after the first error.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    bytes: &'a [u8],
    /// Offset of the next frame; `None` after an error or the end mark.
    next: Option<usize>,
    header: Header,
    previous: Vec<VmSnapshot>,
}

impl<'a> Decoder<'a> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`DecodeError`] if this is not a recording, has an unknown version, or has a damaged header.
    pub fn open(bytes: &'a [u8]) -> Result<Decoder<'a>, DecodeError> {
        let behind_magic = bytes.strip_prefix(&MAGIC).ok_or(DecodeError::NoRecording)?;
        let cut_off = DecodeError::CutOff { offset: MAGIC.len() };
        let version = u16::from_le_bytes(*behind_magic.first_chunk().ok_or(cut_off)?);
        if !(VERSION_OLDEST..=VERSION).contains(&version) {
            return Err(DecodeError::UnknownVersion(version));
        }
        let mut reader = Reader::new(bytes, MAGIC.len() + size_of_val(&version));
        let mut block = reader.block()?.ok_or(cut_off)?;
        let header = header(&mut block)?;
        block.finish()?;
        Ok(Decoder { bytes, next: Some(reader.offset()), header, previous: Vec::new() })
    }

    /// Header of the recording.
    pub fn header(&self) -> &Header {
        &self.header
    }

    fn frame(&mut self, at: usize) -> Result<Frame, DecodeError> {
        let mut reader = Reader::new(self.bytes, at);
        let kind = reader.number_to("kind of frame", kind::END)?;
        let mut block = reader.block()?.ok_or(DecodeError::CutOff { offset: at })?;
        let frame = match kind {
            kind::SNAPSHOT => self.snapshot(&mut block)?,
            kind::PLAN => Frame::Plan { now: block.moment()?, actions: block.list("number of actions", planned)? },
            kind::OUTCOME => Frame::Outcome(outcome(&mut block)?),
            kind::END => Frame::End,
            other => return Err(DecodeError::OutOfRange { offset: at, what: "kind of frame", value: other }),
        };
        block.finish()?;
        self.next = (kind != kind::END).then_some(reader.offset());
        Ok(frame)
    }

    fn snapshot(&mut self, reader: &mut Reader<'_>) -> Result<Frame, DecodeError> {
        let at = reader.moment()?;
        let host = host(reader)?;
        let mut rows_left = ROWS_MAX;
        let mut last = None;
        let vms = reader.list("number of VMs", |reader| {
            let offset = reader.offset();
            let vm = vm(reader, &self.previous, rows_left)?;
            rows_left -= vm.len();
            if last.replace(vm.vm).is_some_and(|last| last >= vm.vm) {
                return Err(DecodeError::OutOfRange {
                    offset,
                    what: "VM id above the previous one",
                    value: vm.vm.0.into(),
                });
            }
            Ok(vm)
        })?;
        self.previous.clone_from(&vms);
        Ok(Frame::Snapshot { at, snapshot: Snapshot { host, vms } })
    }
}

impl Iterator for Decoder<'_> {
    type Item = Result<Frame, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        let at = self.next.take().filter(|at| *at < self.bytes.len())?;
        Some(self.frame(at))
    }
}

fn header(reader: &mut Reader<'_>) -> Result<Header, DecodeError> {
    let offset = reader.offset();
    let header = Header {
        policy: reader.text()?,
        limits: BudgetLimits {
            copy_per_second: Bytes::new(reader.number()?),
            cpu_share: PerTenThousand::new(reader.number_to("share of a CPU", u32::MAX.into())? as u32),
            burst: reader.time()?,
        },
        vms: reader.list("number of VMs", vm_header)?,
        facts: reader.list("number of facts", |reader| Ok((reader.text()?, reader.text()?)))?,
    };
    match header.windows() {
        0..=ROWS_MAX => Ok(header),
        more => Err(DecodeError::OutOfRange { offset, what: "number of windows", value: more as u64 }),
    }
}

fn vm_header(reader: &mut Reader<'_>) -> Result<VmHeader, DecodeError> {
    Ok(VmHeader {
        vm: VmId(reader.number_to("VM", u32::MAX.into())? as u32),
        backing: reader.text()?,
        start_page: reader.one_of("page size", &PageSize::ALL)?,
        ranges: reader.list("number of ranges", range)?,
    })
}

fn range(reader: &mut Reader<'_>) -> Result<GpaRange, DecodeError> {
    let start = Gpa::new(reader.number()?);
    let (offset, bytes) = (reader.offset(), reader.number()?);
    GpaRange::new(start, Bytes::new(bytes)).ok_or(DecodeError::OutOfRange {
        offset,
        what: "length of a range from its start",
        value: bytes,
    })
}

fn host(reader: &mut Reader<'_>) -> Result<Option<HostMemory>, DecodeError> {
    let kind = reader.number_to("kind of host", 4)?;
    if kind == 0 {
        return Ok(None);
    }
    let mut number = || reader.number_to("amount of memory", MEMORY_MAX);
    let (total, available, giant_pages_free) = (Bytes::new(number()?), Bytes::new(number()?), number()?);
    let huge_pages = match kind {
        1 => HugePages::Plenty,
        2 => HugePages::Scarce { free: reader.number()? },
        _ => HugePages::Priced(HugePagePrice {
            cycles_per_s: reader.number()?,
            may_vacate: reader.number()?,
            free: if kind == 4 { Some(reader.number()?) } else { None },
        }),
    };
    Ok(Some(HostMemory { total, available, giant_pages_free, huge_pages }))
}

fn planned(reader: &mut Reader<'_>) -> Result<PlannedAction, DecodeError> {
    let (action, node) = placed_action(reader)?;
    Ok(PlannedAction { action, cost: cost(reader)?, node })
}

fn action(reader: &mut Reader<'_>) -> Result<Action, DecodeError> {
    placed_action(reader).map(|(action, _)| action)
}

fn placed_action(reader: &mut Reader<'_>) -> Result<(Action, Option<NodeId>), DecodeError> {
    let kind = reader.number_to("kind of action", 5)?;
    let vm = VmId(reader.number_to("VM", u32::MAX.into())? as u32);
    let window = WindowIndex::new(reader.number_to("window below 2^52", WINDOW_MAX)?);
    let mut to = || reader.one_of("page size", &PageSize::ALL);
    let action = match kind {
        0 | 5 => Action::Promote { vm, window, to: to()? },
        1 => Action::Demote { vm, window, to: to()? },
        2 => Action::Release { vm, window },
        3 => Action::Vacate { vm, window },
        _ => Action::Move { vm, window, node: node_id(reader)? },
    };
    let node = if kind == 5 { Some(node_id(reader)?) } else { None };
    Ok((action, node))
}

fn cost(reader: &mut Reader<'_>) -> Result<Cost, DecodeError> {
    Ok(Cost { copied: Bytes::new(reader.number_to("number of bytes copied", COPIED_MAX)?), cpu: reader.time()? })
}

fn outcome(reader: &mut Reader<'_>) -> Result<RecordedOutcome, DecodeError> {
    Ok(RecordedOutcome {
        mechanism: reader.text()?,
        outcome: Outcome {
            action: action(reader)?,
            at: reader.moment()?,
            cost: cost(reader)?,
            unavailable: reader.time()?,
            result: result(reader)?,
        },
    })
}

fn result(reader: &mut Reader<'_>) -> Result<OutcomeResult, DecodeError> {
    let known = reader.one_of("result", &RESULTS)?;
    let zigzag = reader.number_to("errno", u32::MAX.into())? as u32;
    let errno = (zigzag >> 1) as i32 ^ -((zigzag & 1) as i32);
    Ok(match known {
        OutcomeResult::Refused(Refusal::Other(_)) => OutcomeResult::Refused(Refusal::Other(errno)),
        known => known,
    })
}
