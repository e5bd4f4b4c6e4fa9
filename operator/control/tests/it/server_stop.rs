//! A server that stops while it answers.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::thread;

use wideleaf_control::protocol::Reply;
use wideleaf_control::server::{Job, Listening, Places};
use wideleaf_control::socket_file::SocketFile;

#[test]
fn a_client_that_asks_the_server_to_end_gets_its_answer_before_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    let file = SocketFile { path: &path, mode: 0o600, gid: None, makes_folder: false, owner: "a test", remedy: "" };
    let (asked, is_asked) = channel();
    let (let_go, is_stopping) = channel::<()>();
    let places = Places { of_all: 4, more_for_root: 0 };
    let server = Listening::at(&file).unwrap().serve(
        places,
        || {},
        |jobs, replies| {
            vec![thread::spawn(move || {
                for job in jobs {
                    let Job::Line { connection, .. } = job else { continue };
                    asked.send(()).unwrap();
                    // Not before the server is about to stop.
                    is_stopping.recv().unwrap();
                    while !replies.is_stopping() {
                        thread::yield_now();
                    }
                    replies.send(connection, &Reply::Ok(Box::new("ended")), false);
                }
            })]
        },
    );
    let mut stream = UnixStream::connect(&path).unwrap();
    let mut silent = UnixStream::connect(&path).unwrap();
    stream.write_all(b"stop\n").unwrap();
    is_asked.recv().unwrap();
    let_go.send(()).unwrap();
    assert_eq!(server.stop(), Vec::<String>::new());
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert_eq!(reply, "{\"ok\":\"ended\"}\n");
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
}
