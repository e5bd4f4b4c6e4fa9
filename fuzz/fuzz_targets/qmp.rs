//! Input: messages of a QEMU monitor in any order: greeting, events, answers. Whatever comes, and when the connection
//! ends, each question returns an answer or an error. Both ends of the connection are in this process.
#![no_main]

use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use libfuzzer_sys::{Corpus, fuzz_target};
use wideleaf_attach::qmp::{ANSWER_WITHIN, Qmp, Question};

/// Bytes that a socket holds at least before its writer blocks.
const BYTES_MAX: usize = 64 << 10;

fuzz_target!(|bytes: &[u8]| -> Corpus {
    if bytes.len() > BYTES_MAX {
        return Corpus::Reject;
    }
    let (ours, mut monitor) = UnixStream::pair().expect("a pair of sockets");
    monitor.write_all(bytes).expect("there is room");
    // It sends nothing more, but still listens.
    monitor.shutdown(Shutdown::Write).expect("it is connected");
    if let Ok(mut qmp) = Qmp::over(ours, ANSWER_WITHIN)
        && qmp.ask(Question::Status).is_ok()
    {
        let _ = qmp.ask_all(&[Question::Memdevs, Question::Balloon]);
    }
    Corpus::Keep
});
