//! The recording's codec: decoding returns the encoded frames, and no input makes it panic.

use std::time::Duration;

use proptest::prelude::*;
use wideleaf_policies::recording::{
    DecodeError, Decoder, Encoder, Frame, Header, MAGIC, ROWS_MAX, RecordedOutcome, TooManyWindows, VERSION, VmHeader,
};
use wideleaf_policies::units::{gib, mib};
use wideleaf_policies::{
    AccessHistory, Action, Backing, BudgetLimits, Bytes, Cost, Gpa, GpaRange, GuestMapping, GuestProgress, HostMemory,
    HugePagePrice, HugePages, MappingStats, Moment, NodeId, NodeOfVm, Outcome, OutcomeResult, PageSize, PerTenThousand,
    PlannedAction, Refusal, Skip, Snapshot, TouchedFrom, VmId, VmSnapshot, WindowIndex, WindowNode, WindowRow,
};

fn header() -> Header {
    let range = |start: Bytes, bytes| GpaRange::new(Gpa::new(start.get()), bytes).unwrap();
    Header {
        policy: "greedy".into(),
        limits: BudgetLimits::default(),
        vms: vec![VmHeader {
            vm: VmId(0),
            backing: "anon".into(),
            start_page: PageSize::Base4K,
            ranges: vec![range(Bytes::ZERO, gib(3)), range(gib(4), mib(64))],
        }],
        facts: vec![("kernel".into(), "6.18 …".into()), (String::new(), String::new())],
    }
}

fn page_size() -> impl Strategy<Value = PageSize> {
    prop::sample::select(PageSize::ALL.to_vec())
}

fn moment() -> impl Strategy<Value = Moment> {
    prop_oneof![0_u64..10_000, 0_u64..1 << 62].prop_map(|ns| Moment::after_start(Duration::from_nanos(ns)))
}

/// Few values, so that there are runs, and rows without a change.
fn frequency() -> impl Strategy<Value = Option<u64>> {
    prop::option::of(prop_oneof![0_u64..100, 0..u64::MAX])
}

fn row() -> impl Strategy<Value = WindowRow> {
    let backing = prop_oneof![
        Just((0, Backing::Unbacked)),
        (1_u16..=3).prop_map(|pages| (pages, Backing::Base4K)),
        Just((512, Backing::Huge2M)),
        Just((512, Backing::Giant1G)),
    ];
    let guest = prop::sample::select(GuestMapping::ALL.to_vec());
    let pages = || prop::option::of(510_u16..=512);
    let given_back = prop_oneof![Just(0_u16), 510_u16..=512];
    let of_pages = (pages(), pages(), given_back);
    let nodes = (window_node(), touched_from());
    (backing, any::<bool>(), moment(), any::<u16>(), (0_u8..=16, frequency()), of_pages, guest, nodes).prop_map(
        |((resident, backing), is_held, ready_at, touched, (samples, frequency), of_pages, guest_mapping, nodes)| {
            let ((written, zero, given_back), (node, touched_from)) = (of_pages, nodes);
            WindowRow {
                is_held,
                ready_at,
                access: AccessHistory::from_parts(touched, samples).with_touches_per_s(frequency),
                written,
                zero,
                guest_mapping,
                given_back,
                node,
                touched_from,
                ..WindowRow::new(WindowIndex::new(0), resident, backing)
            }
        },
    )
}

fn node() -> impl Strategy<Value = NodeId> {
    prop_oneof![4 => 0_u16..4, 1 => any::<u16>()].prop_map(NodeId)
}

fn window_node() -> impl Strategy<Value = WindowNode> {
    prop_oneof![
        2 => Just(WindowNode::Unknown),
        2 => node().prop_map(WindowNode::On),
        1 => node().prop_map(WindowNode::Spread),
    ]
}

fn touched_from() -> impl Strategy<Value = TouchedFrom> {
    let several = |(most, share)| TouchedFrom::Several { most, share: PerTenThousand::new(share) };
    prop_oneof![
        Just(TouchedFrom::Unknown),
        node().prop_map(TouchedFrom::Node),
        (node(), 0_u32..=10_000).prop_map(several),
    ]
}

fn nodes() -> impl Strategy<Value = Vec<NodeOfVm>> {
    let row = |(node, may_use, vcpus, free_2m, free_1g)| NodeOfVm { node, may_use, vcpus, free_2m, free_1g };
    prop::collection::vec((node(), any::<bool>(), any::<u16>(), any::<u64>(), any::<u64>()).prop_map(row), 0..3)
}

fn mapping() -> impl Strategy<Value = Option<MappingStats>> {
    let stats = |(pages_4k, pages_2m, pages_1g)| MappingStats { pages_4k, pages_2m, pages_1g };
    prop::option::of((0_u64..1 << 40, 0_u64..5, 0_u64..5).prop_map(stats))
}

fn progress() -> impl Strategy<Value = Vec<GuestProgress>> {
    let reading = |(phase, done, cpu_ns)| GuestProgress { phase, done, cpu: Duration::from_nanos(cpu_ns) };
    prop::collection::vec((any::<u64>(), any::<u64>(), 0_u64..1 << 62).prop_map(reading), 0..3)
}

fn vm(id: u32) -> impl Strategy<Value = VmSnapshot> {
    let rows = prop::collection::vec((prop_oneof![4 => Just(0_u64), 1 => 0..1000_u64], row()), 0..12);
    let tolerated = prop_oneof![Just(0_u16), any::<u16>()];
    let settings = (tolerated, (0_u32..=10_000).prop_map(PerTenThousand::new));
    (rows, mapping(), settings, progress(), nodes()).prop_map(move |(rows, mapping, settings, progress, nodes)| {
        let (given_back_tolerated, guarantee) = settings;
        let mut vm = VmSnapshot::with_capacity(VmId(id), rows.len());
        let mut next = 0;
        for (gap, row) in rows {
            vm.push(WindowRow { window: WindowIndex::new(next + gap), ..row });
            next += gap + 1;
        }
        VmSnapshot { mapping, given_back_tolerated, guarantee, progress, nodes, ..vm }
    })
}

fn snapshot() -> impl Strategy<Value = Snapshot> {
    let of_numbers = |(total, available, giant_pages_free, huge_pages)| HostMemory {
        total: Bytes::new(total),
        available: Bytes::new(available),
        giant_pages_free,
        huge_pages,
    };
    let host = (0_u64..1 << 52, 0_u64..1 << 52, 0_u64..9, huge_pages()).prop_map(of_numbers);
    (prop::option::of(host), vm(0), prop::option::of(vm(7)))
        .prop_map(|(host, a, b)| Snapshot { host, vms: [a].into_iter().chain(b).collect() })
}

fn huge_pages() -> impl Strategy<Value = HugePages> {
    let price = |(cycles_per_s, may_vacate, free)| HugePages::Priced(HugePagePrice { cycles_per_s, may_vacate, free });
    prop_oneof![
        Just(HugePages::Plenty),
        any::<u64>().prop_map(|free| HugePages::Scarce { free }),
        any::<(u64, u64, Option<u64>)>().prop_map(price),
    ]
}

fn action() -> impl Strategy<Value = Action> {
    (0..5, any::<u32>(), 0_u64..1 << 31, page_size(), node()).prop_map(|(kind, vm, window, to, node)| {
        let (vm, window) = (VmId(vm), WindowIndex::new(window));
        match kind {
            0 => Action::Promote { vm, window, to },
            1 => Action::Demote { vm, window, to },
            2 => Action::Release { vm, window },
            3 => Action::Vacate { vm, window },
            _ => Action::Move { vm, window, node },
        }
    })
}

fn cost() -> impl Strategy<Value = Cost> {
    (0_u64..=1 << 32, moment()).prop_map(|(copied, cpu)| Cost { copied: Bytes::new(copied), cpu: cpu.since_start() })
}

fn result() -> impl Strategy<Value = OutcomeResult> {
    use OutcomeResult::{Done, Refused, Skipped};
    let known = prop::sample::select(vec![
        Done,
        Refused(Refusal::NoHugePage),
        Refused(Refusal::Busy),
        Refused(Refusal::NotEligible),
        Refused(Refusal::NotPermitted),
        Refused(Refusal::NotObserved),
        Refused(Refusal::OutrunByWrites),
        Skipped(Skip::AlreadyDone),
        Skipped(Skip::NotResident),
        Skipped(Skip::NoMechanism),
        Skipped(Skip::BackingOff),
        Skipped(Skip::Stopping),
        Skipped(Skip::GiantUnderWay),
        Refused(Refusal::Merged),
        Refused(Refusal::Gone),
        Skipped(Skip::Hole),
        Skipped(Skip::LeftAlone),
        Skipped(Skip::GivenBack),
        Skipped(Skip::PageBeingMade),
        Skipped(Skip::StallBudget),
        Skipped(Skip::NextTick),
    ]);
    prop_oneof![4 => known, 1 => any::<i32>().prop_map(|errno| Refused(Refusal::Other(errno)))]
}

fn outcome() -> impl Strategy<Value = RecordedOutcome> {
    let parts = (action(), moment(), cost(), moment(), result());
    ("[a-z_0-9]{0,12}", parts).prop_map(|(mechanism, (action, at, cost, unavailable, result))| RecordedOutcome {
        mechanism,
        outcome: Outcome { action, at, cost, unavailable: unavailable.since_start(), result },
    })
}

fn frame() -> impl Strategy<Value = Frame> {
    let planned = (action(), cost(), prop::option::of(node())).prop_map(|(action, cost, node)| {
        let node = node.filter(|_| matches!(action, Action::Promote { .. }));
        PlannedAction { action, cost, node }
    });
    prop_oneof![
        3 => (moment(), snapshot()).prop_map(|(at, snapshot)| Frame::Snapshot { at, snapshot }),
        1 => (moment(), prop::collection::vec(planned, 0..4)).prop_map(|(now, actions)| Frame::Plan { now, actions }),
        1 => outcome().prop_map(Frame::Outcome),
    ]
}

/// A closed recording of these frames, and the end of each frame.
fn encode(frames: &[Frame]) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = Vec::new();
    let mut encoder = Encoder::start(&header(), &mut bytes).unwrap();
    let mut ends = vec![bytes.len()];
    for frame in frames {
        match frame {
            Frame::Snapshot { at, snapshot } => encoder.snapshot(*at, snapshot, &mut bytes),
            Frame::Plan { now, actions } => encoder.plan(*now, actions, &mut bytes),
            Frame::Outcome(RecordedOutcome { mechanism, outcome }) => encoder.outcome(mechanism, outcome, &mut bytes),
            Frame::End => unreachable!("no test asks for it"),
        }
        ends.push(bytes.len());
    }
    encoder.end(&mut bytes);
    ends.push(bytes.len());
    (bytes, ends)
}

/// All frames, and the error that ends them.
fn decode(bytes: &[u8]) -> (Vec<Frame>, Option<DecodeError>) {
    let mut frames = Vec::new();
    match Decoder::open(bytes) {
        Err(error) => (frames, Some(error)),
        Ok(decoder) => {
            for frame in decoder {
                match frame {
                    Ok(frame) => frames.push(frame),
                    Err(error) => return (frames, Some(error)),
                }
            }
            (frames, None)
        }
    }
}

fn frames() -> impl Strategy<Value = Vec<Frame>> {
    prop::collection::vec(frame(), 0..10)
}

proptest! {
    #[test]
    fn decoding_returns_the_encoded_frames(mut frames in frames()) {
        let (bytes, _) = encode(&frames);
        frames.push(Frame::End);
        prop_assert_eq!(Decoder::open(&bytes).unwrap().header().clone(), header());
        prop_assert_eq!(decode(&bytes), (frames, None));
    }

    #[test]
    fn a_recording_that_was_cut_off_is_valid_up_to_the_cut(frames in frames(), cut in any::<prop::sample::Index>()) {
        let (bytes, ends) = encode(&frames);
        let length = ends[0] + cut.index(bytes.len() - ends[0]);
        let whole = ends.iter().filter(|end| **end <= length).count() - 1;
        let (decoded, error) = decode(&bytes[..length]);
        prop_assert_eq!(&decoded[..], &frames[..whole]);
        let expected = (length != ends[whole]).then_some(DecodeError::CutOff { offset: ends[whole] });
        prop_assert_eq!(error, expected);
    }

    #[test]
    fn any_bytes_decode_to_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let (start, _) = encode(&[]);
        let header_end = start.len() - 2; // without the end mark
        decode(&bytes);
        decode(&[&MAGIC, &[1, 0][..], &bytes].concat());
        decode(&[&start[..header_end], &bytes].concat());
    }

    #[test]
    fn changed_bytes_decode_to_frames_or_an_error(
        frames in frames(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let (mut bytes, _) = encode(&frames);
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        decode(&bytes);
    }
}

fn idle_vm(windows: u64) -> VmSnapshot {
    let mut vm = VmSnapshot::with_capacity(VmId(0), windows as usize);
    for window in 0..windows {
        vm.push(WindowRow::new(WindowIndex::new(window), 512, Backing::Huge2M));
    }
    vm
}

#[test]
fn a_recording_of_an_older_version_is_still_read() {
    let window = WindowIndex::new(7);
    let release = PlannedAction { action: Action::Release { vm: VmId(0), window }, cost: Cost::default(), node: None };
    let plan = Frame::Plan { now: Moment::START, actions: vec![release] };
    // A guest without progress is written as before version 5.
    let snapshot = Snapshot { vms: vec![idle_vm(3)], ..Snapshot::default() };
    let frames = [Frame::Snapshot { at: Moment::START, snapshot }, plan, Frame::End];
    let (mut bytes, _) = encode(&frames[..2]);
    for version in 2..=VERSION {
        bytes[MAGIC.len()..][..2].copy_from_slice(&version.to_le_bytes());
        assert_eq!(decode(&bytes), (frames.to_vec(), None), "version {version}");
    }
}

#[test]
fn the_readings_of_a_snapshot_are_not_those_of_the_next() {
    let reading = GuestProgress { phase: 1, done: 2, cpu: Duration::from_millis(3) };
    let with = |progress| {
        let vm = VmSnapshot { progress, ..idle_vm(3) };
        Frame::Snapshot { at: Moment::START, snapshot: Snapshot { vms: vec![vm], ..Snapshot::default() } }
    };
    let frames = [with(vec![reading]), with(vec![]), Frame::End];
    let (bytes, _) = encode(&frames[..2]);
    assert_eq!(decode(&bytes), (frames.to_vec(), None));
}

#[test]
fn an_idle_guest_costs_a_dozen_bytes_a_tick() {
    let idle = |second| Frame::Snapshot {
        at: Moment::after_start(Duration::from_secs(second)),
        snapshot: Snapshot { vms: vec![idle_vm(512 * 1024)], ..Snapshot::default() },
    };
    let (_, ends) = encode(&[idle(1), idle(2), idle(3)]);
    assert!(ends[3] - ends[2] <= 12, "{} bytes", ends[3] - ends[2]);
}

#[test]
fn a_few_bytes_cannot_request_more_rows_than_the_bound() {
    let (start, _) = encode(&[]);
    // a snapshot, 12 bytes: at 0, no host, one VM, id 0, mask 1, one run, gap 0, 2^34 windows
    let frame = [1, 12, 0, 0, 1, 0, 1, 1, 0, 0x80, 0x80, 0x80, 0x80, 0x40];
    let (frames, error) = decode(&[&start[..start.len() - 2], &frame].concat());
    let is_refused =
        matches!(error, Some(DecodeError::OutOfRange { what: "number of windows", value, .. }) if value == 1 << 34);
    assert!(frames.is_empty() && is_refused, "{error:?}");
}

#[test]
fn a_moment_that_never_comes_is_stored_as_146_years() {
    let never = Moment::after_start(Duration::MAX);
    let mut vm = VmSnapshot::with_capacity(VmId(0), 1);
    vm.push(WindowRow { ready_at: never, ..WindowRow::new(WindowIndex::new(0), 1, Backing::Base4K) });
    let snapshot = Snapshot { vms: vec![vm], ..Snapshot::default() };
    let (frames, _) = decode(&encode(&[Frame::Snapshot { at: Moment::START, snapshot }]).0);
    let Frame::Snapshot { snapshot, .. } = &frames[0] else { panic!("{frames:?}") };
    assert_eq!(snapshot.vms[0].ready_at[0], Moment::after_start(Duration::from_nanos(1 << 62)));
}

#[test]
fn more_windows_than_fit_a_number_are_counted_as_the_largest_number() {
    // Each range has 2^43 - 1 windows: 2^21 of them stay just below 2^64. A file of 25 MB has one more.
    let all = GpaRange::new(Gpa::new(0), Bytes::new(u64::MAX)).unwrap();
    let mut header = header();
    header.vms[0].ranges = vec![all; (1 << 21) + 1];
    assert_eq!(header.windows(), usize::MAX);
    assert_eq!(Encoder::start(&header, &mut Vec::new()).unwrap_err(), TooManyWindows(usize::MAX));
}

#[test]
fn a_host_with_more_windows_than_the_bound_is_refused_without_output() {
    let mut large = header();
    large.vms[0].ranges = vec![GpaRange::new(Gpa::new(0), mib(2) * (ROWS_MAX as u64 + 1)).unwrap()];
    let mut bytes = Vec::new();
    assert_eq!(Encoder::start(&large, &mut bytes).unwrap_err(), TooManyWindows(ROWS_MAX + 1));
    assert!(bytes.is_empty());
}

#[test]
fn each_kind_of_damage_has_its_own_message() {
    let (bytes, _) = encode(&[]);
    let line = |bytes: &[u8]| decode(bytes).1.unwrap().to_string();
    assert_eq!(line(b""), "not a recording of wideleaf");
    assert_eq!(line(b"{\"json\": 1}"), "not a recording of wideleaf");
    assert_eq!(line(&bytes[..9]), "cut off after byte 8");
    assert_eq!(line(&bytes[..20]), "cut off after byte 8");
    assert_eq!(line(&[&MAGIC, &[2, 1][..]].concat()), "a recording of version 258; this program reads versions 2 to 7");
    let at = bytes.len() - 2;
    let with = |frame: &[u8]| line(&[&bytes[..at], frame].concat());
    assert_eq!(with(&[9, 0]), format!("damaged at byte {at}: 9 is not a valid kind of frame"));
    assert_eq!(with(&[4, 1, 0]), format!("damaged at byte {}: the content does not end where its block ends", at + 2));
    assert_eq!(with(&[3, 2, 1, 0xff]), format!("damaged at byte {}: a text is not UTF-8", at + 3));
    assert_eq!(with(&[2, 9]), format!("cut off after byte {at}"));
}
