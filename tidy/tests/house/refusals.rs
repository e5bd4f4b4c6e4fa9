//! A program that refuses says first what it cannot do: "cannot X: why; do Y".
//!
//! The test reads the texts of each `Failure` with which a program ends because it did not begin, or could not write.
//! A failure of the guest is a result, and has words of its own.

use std::fmt::Write as _;

use regex::Regex;

use super::texts;

/// Kinds of `Failure` that refuse.
const REFUSALS: &str = "Usage|Input|Host|Output";

/// Other beginnings: a value, mostly an error with a text of its own, and the words of clap, which checks most values.
const EXCUSED: [&str; 2] = ["{", "invalid value '"];

/// Line and text of each literal that becomes a refusal.
fn refusals(text: &str) -> Vec<(usize, String)> {
    let literal = format!(r#"\bFailure::(?:{REFUSALS})\(\s*(?:format!\(\s*)?"((?:[^"\\]|\\.|\\\n)*)""#);
    let found = Regex::new(&literal).unwrap();
    let line = |at: usize| text[..at].matches('\n').count() + 1;
    found.captures_iter(text).map(|found| (line(found.get(0).unwrap().start()), found[1].to_owned())).collect()
}

fn says_what_it_cannot_do(said: &str) -> bool {
    said.starts_with("cannot ") || EXCUSED.iter().any(|start| said.starts_with(start))
}

#[test]
fn a_refusal_begins_with_what_cannot_be_done() {
    let (mut number, mut wrong) = (0, String::new());
    for text in texts(&["rs"]) {
        // Tests make up refusals.
        let source = text.text.split("\n#[cfg(test)]\nmod ").next().unwrap();
        if text.path.starts_with("tidy/") || text.path.contains("tests") || text.path.ends_with("/fake.rs") {
            continue;
        }
        for (line, said) in refusals(source) {
            number += 1;
            if !says_what_it_cannot_do(&said) {
                let _ = writeln!(wrong, "{}:{line}: {said}", text.path);
            }
        }
    }
    assert!(number > 150, "found only {number} refusals");
    assert!(wrong.is_empty(), "write \"cannot X: why; do Y\":\n{wrong}");
}

#[test]
fn refusals_are_found_in_one_line_and_in_several() {
    let source = "Err(Failure::Usage(\"no \\\"guest\\\"\".into()))\nFailure::Host(format!(\n  \"cannot {x}\", x))\n\
        Failure::GuestFailed(\"lost\".into())";
    let found = refusals(source);
    assert_eq!(found, [(1, r#"no \"guest\""#.to_owned()), (2, "cannot {x}".to_owned())]);
    assert!(!says_what_it_cannot_do(&found[0].1) && says_what_it_cannot_do(&found[1].1));
}
