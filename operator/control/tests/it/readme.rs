//! The README's examples are the protocol: each parses, comes back as it was written, and none is missing. Damage
//! to one gives an error and no panic.

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use wideleaf_control::client;
use wideleaf_control::protocol::{Answer, Envelope, Reply, VERSION};

use crate::examples;

const README: &str = include_str!("../../README.md");

fn requests() -> Vec<String> {
    examples(README, "> ")
}

fn replies() -> Vec<String> {
    examples(README, "< ")
}

/// Parses a line as `T`, and compares it with what `T` writes.
fn round_trip<T: DeserializeOwned + Serialize>(line: &str) -> T {
    let parsed: T = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    let written = serde_json::to_value(&parsed).unwrap();
    assert_eq!(written, serde_json::from_str::<Value>(line).unwrap(), "{line}");
    parsed
}

/// Names that serde knows, from its error for an unknown one.
fn known_names(error: serde_json::Error) -> BTreeSet<String> {
    let text = error.to_string();
    let (_, expected) = text.split_once("expected").unwrap();
    expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn every_example_of_a_request_parses_and_none_is_missing() {
    let name_of = |line: &String| {
        assert_eq!(round_trip::<Envelope>(line).version, VERSION);
        serde_json::from_str::<Value>(line).unwrap()["request"].as_str().unwrap().to_owned()
    };
    let shown: BTreeSet<String> = requests().iter().map(name_of).collect();
    let unknown = serde_json::from_str::<Envelope>(r#"{"version":1,"request":"none of them"}"#).unwrap_err();
    assert_eq!(shown, known_names(unknown));
}

#[test]
fn every_example_of_a_reply_parses_and_none_is_missing() {
    let name_of = |line: &String| match round_trip::<Reply>(line) {
        Reply::Error(_) | Reply::Unsaved(_) => None,
        Reply::Ok(answer) => match serde_json::to_value(answer).unwrap() {
            Value::String(name) => Some(name),
            object => object.as_object().unwrap().keys().next().cloned(),
        },
    };
    let shown: BTreeSet<String> = replies().iter().filter_map(name_of).collect();
    let unknown = serde_json::from_str::<Answer>(r#""none of them""#).unwrap_err();
    assert_eq!(shown, known_names(unknown));
    let is_shown = |is_it: fn(&Reply) -> bool| replies().iter().any(|line| is_it(&round_trip::<Reply>(line)));
    assert!(is_shown(|reply| matches!(reply, Reply::Error(_))), "an error is shown too");
    assert!(is_shown(|reply| matches!(reply, Reply::Unsaved(_))), "and a change that is not saved");
}

proptest! {
    #[test]
    fn damage_to_a_reply_is_an_error_in_one_line_or_another_reply(
        which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte: u8,
    ) {
        let mut line = which.get(&replies()).clone().into_bytes();
        let at = at.index(line.len());
        line[at] = byte;
        if let Err(error) = client::parse(&line) {
            prop_assert_eq!(error.to_string().lines().count(), 1);
        }
    }

    #[test]
    fn damage_to_a_request_is_an_error_or_another_request(
        which in any::<prop::sample::Index>(), end in any::<prop::sample::Index>(), byte: u8,
    ) {
        let mut line = which.get(&requests()).clone().into_bytes();
        let whole = end.index(line.len());
        // A request cut short never parses.
        prop_assert!(serde_json::from_slice::<Envelope>(&line[..whole]).is_err());
        line[whole] = byte;
        if let Ok(envelope) = serde_json::from_slice::<Envelope>(&line) {
            prop_assert!(serde_json::to_string(&envelope).is_ok());
        }
    }
}
