//! The examples in VM.md are the protocol of a VM's control socket: each parses, comes back as it was written, and
//! none is missing.

use std::collections::BTreeSet;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use wideleaf_control::protocol::{Envelope, Reply};
use wideleaf_control::vm::{DriverView, VM_VERSION, VmAnswer, VmRequest};

use crate::examples;

const DOCUMENT: &str = include_str!("../../VM.md");

/// Parses a line as `T`, and compares it with what `T` writes.
fn round_trip<T: DeserializeOwned + Serialize>(line: &str) -> T {
    let parsed: T = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    assert_eq!(serde_json::to_value(&parsed).unwrap(), serde_json::from_str::<Value>(line).unwrap(), "{line}");
    parsed
}

/// Names that serde knows, from its error for an unknown one.
fn known_names(error: serde_json::Error) -> BTreeSet<String> {
    let text = error.to_string();
    text.split_once("expected").unwrap().1.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn every_example_of_a_request_parses_and_none_is_missing() {
    let name_of = |line: &String| {
        assert_eq!(round_trip::<Envelope<VmRequest>>(line).version, VM_VERSION);
        serde_json::from_str::<Value>(line).unwrap()["request"].as_str().unwrap().to_owned()
    };
    let shown: BTreeSet<String> = examples(DOCUMENT, "> ").iter().map(name_of).collect();
    let unknown = serde_json::from_str::<VmRequest>(r#"{"request":"none of them"}"#).unwrap_err();
    assert_eq!(shown, known_names(unknown));
}

#[test]
fn every_example_of_a_reply_parses_and_none_is_missing() {
    let name_of = |line: &String| match round_trip::<Reply<VmAnswer>>(line) {
        Reply::Error(_) | Reply::Unsaved(_) => None,
        Reply::Ok(answer) => serde_json::to_value(answer).unwrap().as_object().unwrap().keys().next().cloned(),
    };
    let shown: BTreeSet<String> = examples(DOCUMENT, "< ").iter().filter_map(name_of).collect();
    let unknown = serde_json::from_str::<VmAnswer>(r#""none of them""#).unwrap_err();
    assert_eq!(shown, known_names(unknown));
}

#[test]
fn every_state_of_a_driver_is_in_the_table() {
    let rows = || DOCUMENT.lines().skip_while(|line| !line.starts_with("| `driver`")).skip(2);
    let of_row = |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned());
    let shown: BTreeSet<String> = rows().map_while(of_row).collect();
    let unknown = serde_json::from_str::<DriverView>(r#""none of them""#).unwrap_err();
    assert_eq!(shown, known_names(unknown));
}
