//! One connection: a socket of the host, and the part of its state that the guest knows.
//!
//! ```text
//!   REQUEST of the host ─▶ asked ── RESPONSE ──▶ open ── SHUTDOWN of both directions, or RST ──▶ gone
//!   REQUEST of the guest ─────────────────────────▲
//! ```
//!
//! Credit (Virtual I/O Device 1.2, section 5.10.6.3): each side announces the size of its buffer and the number of
//! bytes that have passed through, and the other sends no more than fits. The guest's numbers are not trusted: with
//! false ones only its own connection stalls.

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

/// Size of a connection's buffer in bytes, for a slow program; the guest may send this much ahead. Linux has the
/// same (`VIRTIO_VSOCK_DEFAULT_BUF_SIZE` is 256 KiB in net/vmw_vsock/af_vsock.c).
pub const ROOM_BYTES: usize = 256 << 10;

/// Number of bytes that pass before the guest receives new credit: it then always knows of three quarters
/// of the room.
const CREDIT_UPDATE_BYTES: u32 = ROOM_BYTES as u32 / 4;

/// Messages that the guest has still to receive.
#[derive(Clone, Copy, Debug, Default)]
struct PendingMessages {
    request: bool,
    response: bool,
    reset: bool,
    shutdown: bool,
    credit_update: bool,
    credit_request: bool,
}

/// The connection: see the module.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: UnixStream,
    pub(super) token: u32,
    /// Events that the socket is watched for.
    pub(super) watched: EventSet,
    /// Whether the guest has not yet answered the host's request for a connection.
    is_asked: bool,
    pending: PendingMessages,
    /// Bytes of the guest that the host's program has not yet taken.
    to_host: VecDeque<u8>,
    passed: Wrapping<u32>,
    passed_as_announced: Wrapping<u32>,
    sent: Wrapping<u32>,
    guest_room: u32,
    guest_passed: Wrapping<u32>,
    /// Whether the host's program has data for the guest, or its end.
    is_readable: bool,
    /// Directions of [`NOTHING_MORE`] that the guest has ended, and that the host has ended.
    guest_ended: u32,
    host_ended: u32,
    /// Whether the host's program has closed both directions.
    is_hung_up: bool,
}

/// The result of passing the guest's bytes to the host's program.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SendResult {
    /// The bytes were accepted; the program has received this number of them.
    Bytes(usize),
    /// The bytes exceeded the room.
    OverCredit,
}

/// The next packet of a connection for the guest.
pub(super) enum Packet {
    /// No packet at present.
    Nothing,
    /// A packet; its data are in place.
    Some(Header),
    /// A last packet, after which the connection is gone.
    Last(Header),
}

impl Connection {
    /// A connection that the guest asked for and receives.
    pub(super) fn from_guest(stream: UnixStream, token: u32, request: &Header) -> Connection {
        let mut connection = Connection::new(stream, token);
        connection.pending.response = true;
        connection.credit(request);
        connection
    }

    /// A connection that the host asks the guest for.
    pub(super) fn from_host(stream: UnixStream, token: u32) -> Connection {
        let mut connection = Connection::new(stream, token);
        (connection.is_asked, connection.pending.request) = (true, true);
        connection
    }

    fn new(stream: UnixStream, token: u32) -> Connection {
        Connection {
            stream,
            token,
            watched: EventSet::IN,
            is_asked: false,
            pending: PendingMessages::default(),
            to_host: VecDeque::new(),
            passed: Wrapping(0),
            passed_as_announced: Wrapping(0),
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

    /// Records that the guest accepted the connection, and tells the host's program its port. Returns whether the
    /// program still listens.
    pub(super) fn accepted(&mut self, ports: Ports) -> bool {
        self.is_asked = false;
        let answer = format!("OK {}\n", ports.host);
        // A new socket has room for it.
        self.stream.write_all(answer.as_bytes()).is_ok()
    }

    /// Records the credit that every packet of the guest contains.
    pub(super) fn credit(&mut self, header: &Header) {
        (self.guest_room, self.guest_passed) = (header.room, Wrapping(header.passed));
    }

    /// Number of bytes that the guest has room for.
    fn guest_free(&self) -> usize {
        let on_their_way = (self.sent - self.guest_passed).0;
        self.guest_room.saturating_sub(on_their_way) as usize
    }

    /// Passes the guest's bytes to the program or, where that is slow, into the buffer.
    pub(super) fn take(&mut self, data: &[Piece<'_>]) -> SendResult {
        let bytes: usize = data.iter().map(Piece::len).sum();
        if self.to_host.len() + bytes > ROOM_BYTES {
            return SendResult::OverCredit;
        }
        let mut sent = 0;
        if self.to_host.is_empty() {
            match send(self.stream.as_fd(), data) {
                Ok(bytes) => sent = bytes,
                Err(error) if is_temporary(&error) => {}
                Err(_) => {
                    self.lose(bytes);
                    return SendResult::Bytes(0);
                }
            }
        }
        let mut rest = vec![0; bytes - sent];
        pieces::read_at(data, sent, &mut rest);
        self.to_host.extend(rest);
        self.count_passed(sent);
        SendResult::Bytes(sent)
    }

    /// Passes buffered bytes on, because the program has room again. Returns their number.
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

    /// Drops the program's bytes, because it takes no more; the guest learns that.
    fn lose(&mut self, bytes: usize) {
        self.to_host.clear();
        self.count_passed(bytes);
        self.say_ended(NO_MORE_RECEIVED);
    }

    fn count_passed(&mut self, bytes: usize) {
        self.passed += bytes as u32;
        if (self.passed - self.passed_as_announced).0 >= CREDIT_UPDATE_BYTES {
            self.pending.credit_update = true;
        }
    }

    /// Records that the guest asks for the free room.
    pub(super) fn ask_for_credit(&mut self) {
        self.pending.credit_update = true;
    }

    /// Records that the guest ends directions.
    pub(super) fn shut_down(&mut self, flags: u32) {
        self.guest_ended |= flags & NOTHING_MORE;
        self.end_directions();
    }

    /// Ends the directions at the program that the guest has ended, once it has received all earlier bytes.
    fn end_directions(&mut self) {
        if self.guest_ended & NO_MORE_RECEIVED != 0 {
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        if self.guest_ended & NO_MORE_SENT != 0 && self.to_host.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
            // Section 5.10.6.5: a reset confirms the end of both directions.
            self.pending.reset |= self.guest_ended == NOTHING_MORE;
        }
    }

    /// Records that the program has written something, or ended.
    pub(super) fn became_readable(&mut self) {
        self.is_readable = true;
    }

    /// Records that the program has closed the connection; its earlier data can still be read.
    pub(super) fn hung_up(&mut self) {
        (self.is_hung_up, self.is_readable) = (true, true);
        // The guest has not answered yet, and no program waits for it any more.
        self.pending.reset |= self.is_asked;
        // A guest that still reads receives the earlier data, and then the end.
        if !self.is_asked && !self.may_read() {
            self.say_ended(NOTHING_MORE);
        }
    }

    pub(super) fn is_hung_up(&self) -> bool {
        self.is_hung_up
    }

    /// Whether the guest has ended, and the program has not taken all of its data.
    pub(super) fn has_last_words(&self) -> bool {
        self.guest_ended & NO_MORE_SENT != 0 && !self.to_host.is_empty() && !self.is_hung_up
    }

    /// Whether only the guest's confirmation of the end is missing.
    pub(super) fn is_closing(&self) -> bool {
        self.host_ended == NOTHING_MORE && !self.pending.shutdown
    }

    fn say_ended(&mut self, directions: u32) {
        if self.host_ended | directions != self.host_ended {
            self.host_ended |= directions;
            self.pending.shutdown = true;
        }
    }

    /// Whether the guest accepts data of the program.
    fn may_read(&self) -> bool {
        !self.is_asked && self.host_ended & NO_MORE_SENT == 0 && self.guest_ended & NO_MORE_RECEIVED == 0
    }

    /// Whether the program's socket must be watched for data, and for room.
    pub(super) fn watches(&self) -> (bool, bool) {
        (self.may_read() && !self.is_readable, !self.to_host.is_empty())
    }

    /// Whether there is a packet for the guest.
    pub(super) fn has_packet(&self) -> bool {
        let PendingMessages { request, response, reset, shutdown, credit_update, credit_request } = self.pending;
        let has_data = self.is_readable && self.may_read() && self.guest_free() > 0;
        request || response || reset || shutdown || credit_update || credit_request || has_data
    }

    /// The guest's next packet, its data read into `room`, which is not empty.
    pub(super) fn next_packet(&mut self, cid: u64, ports: Ports, room: &[Piece<'_>]) -> Packet {
        let header = |operation| Header::to_guest(cid, ports, operation);
        if std::mem::take(&mut self.pending.request) {
            return Packet::Some(self.with_credit(header(Operation::Request)));
        }
        if std::mem::take(&mut self.pending.response) {
            return Packet::Some(self.with_credit(header(Operation::Response)));
        }
        if self.pending.reset {
            return Packet::Last(header(Operation::Reset));
        }
        if let Some(bytes) = self.read_data(room) {
            return Packet::Some(self.with_credit(Header { bytes, ..header(Operation::Data) }));
        }
        if std::mem::take(&mut self.pending.shutdown) {
            return Packet::Some(self.with_credit(Header { flags: self.host_ended, ..header(Operation::Shutdown) }));
        }
        if std::mem::take(&mut self.pending.credit_update) {
            return Packet::Some(self.with_credit(header(Operation::CreditUpdate)));
        }
        if std::mem::take(&mut self.pending.credit_request) {
            return Packet::Some(self.with_credit(header(Operation::CreditRequest)));
        }
        Packet::Nothing
    }

    /// Reads data up to the guest's free room; `None` where there is nothing.
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
                self.pending.credit_request = self.guest_free() == 0;
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
        self.passed_as_announced = self.passed;
        self.pending.credit_update = false;
        Header { room: ROOM_BYTES as u32, passed: self.passed.0, ..header }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
