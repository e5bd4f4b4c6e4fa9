//! Input: bytes of a client on the control socket of a VM, in pieces of any length. Each line gets one reply, a parsed
//! request parses again, and an error shows no control character. The same bytes are also read as a reply from another
//! program. There is no VM: a thread answers each request with the same status.
#![no_main]

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use wideleaf_control::protocol::{Envelope, Reply};
use wideleaf_control::server::{Dialect, Job, LineServer, Listening, Places, REQUEST_BYTES_MAX, Replies, decode};
use wideleaf_control::socket_file::SocketFile;
use wideleaf_control::vm::{VM_VERSION, VmAnswer, VmRequest, VmState, VmStatus};

const DIALECT: Dialect = Dialect { server: "this VM", version: VM_VERSION };

/// Ends a piece: no character of UTF-8 has this byte.
const PAUSE: u8 = 0xff;

fuzz_target!(|said: &[u8]| {
    static SERVER: OnceLock<(PathBuf, LineServer)> = OnceLock::new();
    let (path, _) = SERVER.get_or_init(serve);
    let mut client = UnixStream::connect(path).expect("it listens, and has places");
    let mut lines = 0;
    for piece in said.split(|byte| *byte == PAUSE) {
        lines += piece.iter().filter(|byte| **byte == b'\n').count();
        client.write_all(piece).expect("it reads");
    }
    client.shutdown(Shutdown::Write).expect("it is connected");
    let mut replies = Vec::new();
    client.read_to_end(&mut replies).expect("it ends the connection");
    assert!(said.len() > REQUEST_BYTES_MAX || replies.iter().filter(|byte| **byte == b'\n').count() == lines);
    for reply in replies.split_inclusive(|byte| *byte == b'\n') {
        let reply = serde_json::from_slice::<Reply<VmAnswer>>(reply).expect("a reply is a line of the protocol");
        assert!(!matches!(&reply, Reply::Error(why) if why.contains(char::is_control)), "{reply:?}");
    }
    // The client's side: replies of a foreign program.
    if let Ok(reply) = serde_json::from_slice::<Reply<VmAnswer>>(said) {
        let again = serde_json::to_vec(&reply).expect("it came as JSON");
        serde_json::from_slice::<Reply<VmAnswer>>(&again).expect("a parsed reply parses again");
    }
});

fn serve() -> (PathBuf, LineServer) {
    let folder = tempfile::tempdir().expect("a folder").keep();
    let path = folder.join("vm.sock");
    let file =
        SocketFile { path: &path, mode: 0o600, gid: None, makes_folder: false, owner: "a fuzz target", remedy: "" };
    let listening = Listening::at(&file).expect("a socket");
    let answer = |jobs, replies| vec![std::thread::spawn(move || answer(jobs, replies))];
    let server = listening.serve(Places { of_all: 8, more_for_root: 2 }, || {}, answer);
    (path, server)
}

fn answer(jobs: std::sync::mpsc::Receiver<Job>, replies: Replies) {
    for job in jobs {
        let Job::Line { connection, line, .. } = job else { continue };
        let reply = decode::<VmRequest>(&line, DIALECT).map_or_else(Reply::Error, |request| {
            let again = serde_json::to_vec(&Envelope::from(request.clone())).expect("it came as JSON");
            assert_eq!(decode(&again, DIALECT), Ok(request), "a parsed request parses again");
            Reply::Ok(Box::new(VmAnswer::Status(status())))
        });
        replies.send(connection, &reply, false);
    }
}

fn status() -> VmStatus {
    VmStatus {
        state: VmState::Running,
        workload: "pattern".to_owned(),
        pid: 1,
        uptime_s: 0.5,
        vcpus: Vec::new(),
        resets: 0,
        policy: "off".to_owned(),
        phase: None,
        saving: None,
        restoring: None,
        past_saves: None,
        doubt: None,
        cut_off: None,
        exit: None,
        waits_for: None,
        virtio: Vec::new(),
    }
}
