//! Input: one line from the daemon, as its client parses it. A parsed reply, written again, parses again; an error is
//! one line. Nothing outside this process is touched.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_control::client::parse;

fuzz_target!(|line: &[u8]| match parse(line) {
    Ok(reply) => {
        let again = serde_json::to_vec(&reply).expect("it came as JSON");
        parse(&again).expect("a parsed reply parses again");
    }
    Err(error) => assert!(!error.to_string().contains('\n'), "a reason is one line: {error}"),
});
