//! One connection: a socket of the host, and what the guest was told of it.
//!
//! ```text
//!   REQUEST of the host ─▶ asked ── RESPONSE ──▶ open ── SHUTDOWN of both directions, or RST ──▶ gone
//!   REQUEST of the guest ─────────────────────────▲
//! ```
//!
//! Credit (Virtual I/O Device 1.2, section 5.10.6.3): each side says how many bytes it keeps at most and how many have passed through, and the
//! other sends no more than fits. The guest's numbers are its own claim: the worst that false ones do is that its connection stands still.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::net::Shutdown;
use std::num::Wrapping;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{MsgFlags, send as send_bytes};
use vmm_sys_util::epoll::EventSet;

use super::packet::{Header, NO_MORE_RECEIVED, NO_MORE_SENT, NOTHING_MORE, Operation, Ports};
use crate::devices::virtio::pieces::{self, Piece};
use crate::sys::vectored::{read, send};

/// Bytes of a connection that are kept while its program is slow, and that the guest may send ahead: as much as Linux keeps
/// (`VIRTIO_VSOCK_DEFAULT_BUF_SIZE` is 256 KiB in net/vmw_vsock/af_vsock.c).
pub const ROOM_BYTES: usize = 256 << 10;

/// How much may pass before the guest is told: it always has three quarters of the room then.
const TOLD_AFTER_BYTES: u32 = ROOM_BYTES as u32 / 4;

/// What the guest is still to be told.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    request: bool,
    response: bool,
    reset: bool,
    shutdown: bool,
    credit_update: bool,
    credit_request: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: UnixStream,
    pub(super) token: u32,
    /// What the socket is watched for.
    pub(super) watched: EventSet,
    /// The guest has not said yet whether it takes the host's connection.
    is_asked: bool,
    due: Due,
    /// The guest's bytes that the host's program has not taken yet.
    to_host: VecDeque<u8>,
    passed: Wrapping<u32>,
    passed_as_told: Wrapping<u32>,
    sent: Wrapping<u32>,
    guest_room: u32,
    guest_passed: Wrapping<u32>,
    /// The host's program has something for the guest, or its end.
    is_readable: bool,
    /// What the guest said, and what was said to it, of [`NOTHING_MORE`].
    guest_ended: u32,
    host_ended: u32,
    /// The host's program has closed both directions.
    is_hung_up: bool,
}

/// What the host's program did to the connection, or could not.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// The guest's bytes, so many of which the program has already.
    Bytes(usize),
    /// More than there was room for.
    OverCredit,
}

/// What the guest gets next of a connection.
pub(super) enum Packet {
    /// Nothing at present.
    Nothing,
    /// This; its data are in place.
    Some(Header),
    /// This, and the connection is gone.
    Last(Header),
}

impl Connection {
    /// One that the guest asked for and gets.
    pub(super) fn from_guest(stream: UnixStream, token: u32, request: &Header) -> Connection {
        let mut connection = Connection::new(stream, token);
        connection.due.response = true;
        connection.credit(request);
        connection
    }

    /// One that the host asks the guest for.
    pub(super) fn from_host(stream: UnixStream, token: u32) -> Connection {
        let mut connection = Connection::new(stream, token);
        (connection.is_asked, connection.due.request) = (true, true);
        connection
    }

    fn new(stream: UnixStream, token: u32) -> Connection {
        Connection {
            stream,
            token,
            watched: EventSet::IN,
            is_asked: false,
            due: Due::default(),
            to_host: VecDeque::new(),
            passed: Wrapping(0),
            passed_as_told: Wrapping(0),
            sent: Wrapping(0),
            guest_room: 0,
            guest_passed: Wrapping(0),
            is_readable: false,
            guest_ended: 0,
            host_ended: 0,
            is_hung_up: false,
        }
    }

    pub(super) fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// The guest takes the connection: the host's program is told its port. Whether it still listens.
    pub(super) fn accepted(&mut self, ports: Ports) -> bool {
        self.is_asked = false;
        let greeting = format!("OK {}\n", ports.host);
        // A fresh socket has room for it.
        self.stream.write_all(greeting.as_bytes()).is_ok()
    }

    /// What every packet of the guest says of its side.
    pub(super) fn credit(&mut self, header: &Header) {
        (self.guest_room, self.guest_passed) = (header.room, Wrapping(header.passed));
    }

    /// Bytes that the guest has room for.
    fn guest_free(&self) -> usize {
        let on_their_way = (self.sent - self.guest_passed).0;
        self.guest_room.saturating_sub(on_their_way) as usize
    }

    /// Bytes of the guest's, to the program or, where that is slow, into the room.
    pub(super) fn take(&mut self, data: &[Piece<'_>]) -> Taken {
        let bytes: usize = data.iter().map(Piece::len).sum();
        if self.to_host.len() + bytes > ROOM_BYTES {
            return Taken::OverCredit;
        }
        let mut sent = 0;
        if self.to_host.is_empty() {
            match send(self.stream.as_fd(), data) {
                Ok(bytes) => sent = bytes,
                Err(error) if is_temporary(&error) => {}
                Err(_) => {
                    self.lose(bytes);
                    return Taken::Bytes(0);
                }
            }
        }
        let mut rest = vec![0; bytes - sent];
        pieces::read_at(data, sent, &mut rest);
        self.to_host.extend(rest);
        self.count_passed(sent);
        Taken::Bytes(sent)
    }

    /// The program has room again: what was kept goes on. How many bytes went.
    pub(super) fn flush(&mut self) -> usize {
        let mut done = 0;
        while !self.to_host.is_empty() {
            let (front, _) = self.to_host.as_slices();
            match send_bytes(self.stream.as_raw_fd(), front, MsgFlags::MSG_NOSIGNAL).map_err(io::Error::from) {
                Ok(sent) => {
                    self.to_host.drain(..sent);
                    done += sent;
                }
                Err(error) if is_temporary(&error) => break,
                Err(_) => self.lose(self.to_host.len()),
            }
        }
        self.count_passed(done);
        self.end_directions();
        done
    }

    /// The program takes nothing any more: what it would have got has nowhere to go, and the guest learns that.
    fn lose(&mut self, bytes: usize) {
        self.to_host.clear();
        self.count_passed(bytes);
        self.say_ended(NO_MORE_RECEIVED);
    }

    fn count_passed(&mut self, bytes: usize) {
        self.passed += bytes as u32;
        if (self.passed - self.passed_as_told).0 >= TOLD_AFTER_BYTES {
            self.due.credit_update = true;
        }
    }

    /// The guest wants to know how much room there is.
    pub(super) fn ask_for_credit(&mut self) {
        self.due.credit_update = true;
    }

    /// The guest ends directions.
    pub(super) fn shut_down(&mut self, flags: u32) {
        self.guest_ended |= flags & NOTHING_MORE;
        self.end_directions();
    }

    /// Ends at the program what the guest has ended, once it has all that was sent before.
    fn end_directions(&mut self) {
        if self.guest_ended & NO_MORE_RECEIVED != 0 {
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        if self.guest_ended & NO_MORE_SENT != 0 && self.to_host.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
            // Section 5.10.6.5: a reset says that the end of both was heard.
            self.due.reset |= self.guest_ended == NOTHING_MORE;
        }
    }

    /// The program has written something, or ended.
    pub(super) fn became_readable(&mut self) {
        self.is_readable = true;
    }

    /// The program has closed the connection; what it wrote before can still be read.
    pub(super) fn hung_up(&mut self) {
        (self.is_hung_up, self.is_readable) = (true, true);
        // The guest has not answered yet, and nobody waits for it.
        self.due.reset |= self.is_asked;
        // Where the guest still reads, it gets what was written before the end, and then hears of it.
        if !self.is_asked && !self.may_read() {
            self.say_ended(NOTHING_MORE);
        }
    }

    pub(super) fn is_hung_up(&self) -> bool {
        self.is_hung_up
    }

    /// The guest has said all, and the program has not taken all of it.
    pub(super) fn has_last_words(&self) -> bool {
        self.guest_ended & NO_MORE_SENT != 0 && !self.to_host.is_empty() && !self.is_hung_up
    }

    /// Nothing is left but that the guest says so.
    pub(super) fn is_closing(&self) -> bool {
        self.host_ended == NOTHING_MORE && !self.due.shutdown
    }

    fn say_ended(&mut self, directions: u32) {
        if self.host_ended | directions != self.host_ended {
            self.host_ended |= directions;
            self.due.shutdown = true;
        }
    }

    /// Whether the guest takes data of the program.
    fn may_read(&self) -> bool {
        !self.is_asked && self.host_ended & NO_MORE_SENT == 0 && self.guest_ended & NO_MORE_RECEIVED == 0
    }

    /// Whether the program's socket is to be watched for data, and for room.
    pub(super) fn watches(&self) -> (bool, bool) {
        (self.may_read() && !self.is_readable, !self.to_host.is_empty())
    }

    /// Whether there is something for the guest.
    pub(super) fn has_packet(&self) -> bool {
        let Due { request, response, reset, shutdown, credit_update, credit_request } = self.due;
        let has_data = self.is_readable && self.may_read() && self.guest_free() > 0;
        request || response || reset || shutdown || credit_update || credit_request || has_data
    }

    /// What the guest gets next, its data read into `room`, which is not empty.
    pub(super) fn next_packet(&mut self, cid: u64, ports: Ports, room: &[Piece<'_>]) -> Packet {
        let header = |operation| Header::to_guest(cid, ports, operation);
        if std::mem::take(&mut self.due.request) {
            return Packet::Some(self.with_credit(header(Operation::Request)));
        }
        if std::mem::take(&mut self.due.response) {
            return Packet::Some(self.with_credit(header(Operation::Response)));
        }
        if self.due.reset {
            return Packet::Last(header(Operation::Reset));
        }
        if let Some(bytes) = self.read_data(room) {
            return Packet::Some(self.with_credit(Header { bytes, ..header(Operation::Data) }));
        }
        if std::mem::take(&mut self.due.shutdown) {
            return Packet::Some(self.with_credit(Header { flags: self.host_ended, ..header(Operation::Shutdown) }));
        }
        if std::mem::take(&mut self.due.credit_update) {
            return Packet::Some(self.with_credit(header(Operation::CreditUpdate)));
        }
        if std::mem::take(&mut self.due.credit_request) {
            return Packet::Some(self.with_credit(header(Operation::CreditRequest)));
        }
        Packet::Nothing
    }

    /// Reads what the guest has room for; `None` where there is nothing.
    fn read_data(&mut self, room: &[Piece<'_>]) -> Option<u32> {
        if !self.is_readable || !self.may_read() {
            return None;
        }
        let free = self.guest_free();
        if free == 0 {
            return None;
        }
        let room: Vec<_> = pieces::up_to(room.iter().copied(), free).collect();
        match read(self.stream.as_fd(), &room, &mut []) {
            Ok(0) => self.program_ended(),
            Ok(bytes) => {
                self.sent += bytes as u32;
                self.due.credit_request = self.guest_free() == 0;
                return Some(bytes as u32);
            }
            Err(error) if is_temporary(&error) => self.is_readable = false,
            Err(_) => {
                self.is_hung_up = true;
                self.program_ended();
            }
        }
        None
    }

    fn program_ended(&mut self) {
        self.is_readable = false;
        self.say_ended(if self.is_hung_up { NOTHING_MORE } else { NO_MORE_SENT });
    }

    fn with_credit(&mut self, header: Header) -> Header {
        self.passed_as_told = self.passed;
        self.due.credit_update = false;
        Header { room: ROOM_BYTES as u32, passed: self.passed.0, ..header }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
