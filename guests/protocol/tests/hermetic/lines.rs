//! A message survives the way from guest to host, and no line can upset the parser.

use proptest::prelude::*;
use wideleaf_protocol::message::MismatchKind;
use wideleaf_protocol::{Entry, ExitCode, GuestPage, Message, Mismatch, Name, ProtocolError, Status, parse};

fn name() -> impl Strategy<Value = String> {
    "[!-<>-~]{1,20}"
}

fn hello() -> impl Strategy<Value = (u32, String, u32, usize, u64, usize)> {
    (any::<u32>(), name(), any::<u32>(), 0..3usize, any::<u64>(), 0..4usize)
}

fn parsed(line: &str) -> Message<'_> {
    parse(line).expect("a line of ours").expect("well formed")
}

proptest! {
    #[test]
    fn hello_survives_the_line((version, kernel, vcpus, page, tsc_hz, entry) in hello()) {
        let message = Message::Hello {
            version,
            kernel: Name::new(&kernel).unwrap(),
            vcpus,
            guest_page: GuestPage::ALL[page],
            tsc_hz,
            entry: Entry::ALL[entry],
        };
        let line = message.to_string();
        prop_assert_eq!(parsed(&line), message);
    }

    #[test]
    fn every_message_with_numbers_survives_the_line(
        text in name(), unit in name(), n in any::<[u64; 5]>(), vcpu in any::<u32>(),
    ) {
        let (name, unit) = (Name::new(&text).unwrap(), Name::new(&unit).unwrap());
        let messages = [
            Message::Problem { class: name, size: unit, iterations: vcpu },
            Message::Region { name, address: n[0], bytes: n[1] },
            Message::Begin { phase: name, tsc: n[0] },
            Message::End { phase: name, tsc: n[0] },
            Message::Progress { phase: name, tsc: n[0], done: n[1], total: n[2] },
            Message::Gaps { vcpu, count: n[0], p50_ns: n[1], p99_ns: n[2], p999_ns: n[3], max_ns: n[4] },
            Message::Mismatch(Mismatch {
                address: n[0],
                expected: n[1],
                found: n[2],
                kind: MismatchKind::ALL[n[3] as usize % 4],
            }),
            Message::Verify { status: Status::ALL[n[2] as usize % 2], errors: n[0], checked: n[1] },
            Message::Exit { code: ExitCode::ALL[n[0] as usize % 7] },
            Message::Result { name, value: f64::from_bits(n[0] & !(0x7ff << 52)), unit },
        ];
        for message in messages {
            let line = message.to_string();
            prop_assert_eq!(parsed(&line), message);
            let ended = format!("{line}\r\n");
            prop_assert_eq!(parsed(&ended), message);
            prop_assert!(line["@wideleaf ".len()..].starts_with(message.verb()));
        }
    }

    #[test]
    fn every_finite_result_survives_the_line(
        value in proptest::num::f64::NORMAL | proptest::num::f64::SUBNORMAL | proptest::num::f64::ZERO,
    ) {
        let name = Name::literal("gups");
        let message = Message::Result { name, value, unit: Name::literal("GUP/s") };
        let line = message.to_string();
        prop_assert_eq!(parsed(&line), message);
    }

    #[test]
    fn a_panic_message_keeps_its_words_and_loses_its_line_breaks(text in "\\PC{0,60}", more in "\\PC{0,20}") {
        let two_lines = format!("{text}\n{more}");
        let line = Message::Panic { message: &two_lines }.to_string();
        let one_line = format!("{text} {more}");
        prop_assert_eq!(parsed(&line), Message::Panic { message: &one_line });
    }

    #[test]
    fn no_line_upsets_the_parser(line in any::<String>()) {
        let _ = parse(&line);
        let _ = parse(&format!("@wideleaf {line}"));
    }

    #[test]
    fn no_damage_to_a_real_line_upsets_the_parser(
        verb in "hello|problem|region|begin|end|progress|result|gaps|mismatch|verify|panic|exit|[a-z]{1,6}",
        pairs in proptest::collection::vec(
            "(version|class|name|phase|tsc|address|bytes|code|value|status)?=?[ -~]{0,6}", 0..7,
        ),
    ) {
        let _ = parse(&format!("@wideleaf {verb} {}", pairs.join(" ")));
    }
}

#[test]
fn an_ordinary_console_line_is_not_ours() {
    assert_eq!(parse("SeaBIOS (version 1.16)"), None);
    assert_eq!(parse(" @wideleaf exit code=0"), None);
    assert_eq!(parse(""), None);
}

#[test]
fn a_malformed_line_gives_an_error_with_its_place() {
    let refused = |line| parse(line).expect("a line of ours").expect_err("malformed");
    let begin = "@wideleaf begin ";
    assert_eq!(refused("@wideleaf shout at=1"), ProtocolError::UnknownVerb { at: 10 });
    assert_eq!(refused("@wideleaf begin phase"), ProtocolError::NotAPair { at: begin.len() });
    assert_eq!(refused("@wideleaf begin phase=a  tsc=1"), ProtocolError::NotAPair { at: begin.len() + 8 });
    assert_eq!(refused("@wideleaf begin fase=a tsc=1"), ProtocolError::UnknownKey { verb: "begin", at: begin.len() });
    assert_eq!(refused("@wideleaf begin tsc=1 tsc=2"), ProtocolError::DuplicateKey { key: "tsc", at: begin.len() + 6 });
    assert_eq!(refused("@wideleaf begin tsc=1"), ProtocolError::MissingKey { verb: "begin", key: "phase" });
    let error = refused("@wideleaf begin tsc=x phase=a");
    let expected = "a decimal number in its range";
    assert_eq!(error, ProtocolError::BadValue { key: "tsc", expected, at: begin.len() + 4 });
    assert_eq!(error.to_string(), "byte 20: tsc= takes a decimal number in its range");
    assert_eq!(refused("@wideleaf panic"), ProtocolError::MissingKey { verb: "panic", key: "message" });
}

#[test]
fn a_cut_line_is_never_taken_for_a_whole_one_of_the_same_verb() {
    // Dropping whole pairs from the end leaves keys missing. A cut inside a number cannot be detected, and is not
    // claimed to be.
    let line = "@wideleaf gaps vcpu=0 count=1 p50_ns=2 p99_ns=3 p999_ns=4 max_ns=5";
    for (cut, _) in line.match_indices(' ').skip(1) {
        assert!(parse(&line[..cut]).expect("ours").is_err(), "{}", &line[..cut]);
    }
}
