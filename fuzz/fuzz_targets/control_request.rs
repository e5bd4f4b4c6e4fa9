//! Input: one line from a client on the daemon's control socket. It is parsed, its settings are resolved as the daemon
//! resolves them, and a parsed request, written again, parses again; an error is one line. No request is carried out.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_control::protocol::{Envelope, Request};
use wideleaf_daemon::config::Config;
use wideleaf_daemon::permissions::is_reading;
use wideleaf_daemon::server::decode;

fuzz_target!(|line: &[u8]| {
    let request = match decode(line) {
        Ok(request) => request,
        Err(why) => return assert!(!why.contains('\n'), "a reason is one line: {why}"),
    };
    if let Request::Set { changes: said, .. }
    | Request::Attach { settings: said, .. }
    | Request::Started { settings: said, .. } = &request
    {
        let _ = Config::default().wanted("web", None, said);
    }
    let _ = is_reading(&request);
    let again = serde_json::to_vec(&Envelope::from(request)).expect("it came as JSON");
    decode(&again).expect("a parsed request parses again");
});
