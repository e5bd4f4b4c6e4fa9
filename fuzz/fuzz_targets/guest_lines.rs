//! Input: output of a guest on its serial port, and the same text as a command line of a guest. A parsed line prints as
//! a line that parses to the same; each argument is found by its key; an error is one line. Nothing is touched.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_protocol::arguments::{CommandLine, parse_size};
use wideleaf_protocol::parse;

fuzz_target!(|text: &str| {
    for line in text.lines() {
        match parse(line) {
            Some(Ok(message)) => {
                let printed = message.to_string();
                let again = parse(&printed).expect("it is a protocol line").expect("it was just printed");
                assert_eq!(again.to_string(), printed, "{line:?}");
            }
            Some(Err(error)) => assert!(!error.to_string().contains('\n'), "a reason is one line: {error}"),
            None => {}
        }
    }
    match CommandLine::new(text) {
        Ok(line) => {
            for argument in line.arguments() {
                assert_eq!(line.value(argument.key), Some(argument.value));
                let _ = parse_size(argument.value);
            }
        }
        Err(error) => assert!(!error.to_string().contains('\n'), "a reason is one line: {error}"),
    }
});
