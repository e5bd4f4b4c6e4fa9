//! All connections of a guest, and the packets that it has still to receive.
//!
//! ```text
//!   programs of the host ── CONNECT PORT ──▶ requests ──┐
//!                                                       ▼
//!   packets of the guest ── by their ports ──▶ [`Connection`]s ── each in its turn ──▶ packets to the guest
//!                          └ for none of them ──▶ resets ────────────────────────────▶
//! ```
//!
//! Everything is bounded: connections, requests, connections that only deliver their remaining data, waiting
//! resets. While the resets are full, no packet of the guest is taken until the guest takes some of ours (Virtual
//! I/O Device 1.2, section 5.10.6.1).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use event_manager::{EventOps, Events};
use vmm_sys_util::epoll::EventSet;

use super::connect_request::{ConnectRequest, RequestState};
use super::connection::{Connection, Packet, SendResult};
use super::counters::Counting;
use super::host::HostSocket;
use super::packet::{HOST_CID, Header, Operation, Ports, STREAM};
use crate::devices::virtio::counters::add;
use crate::devices::virtio::pieces::Piece;

/// Largest number of connections of one guest. Each has a file descriptor here, of which a process
/// usually has 1024.
pub const CONNECTIONS_MAX: usize = 256;

/// Largest number of programs that have connected and not yet named a port. Beyond it, the one that took
/// longest is disconnected.
const REQUESTS_MAX: usize = 32;

/// Largest number of resets that wait until the guest has a buffer.
const RESETS_MAX: usize = 256;

/// First port of the host's own ends; lower ports are for programs that wait for the guest.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Largest number of connections that the guest has forgotten, while their programs have not yet taken all data.
/// Beyond it, the oldest is cut off.
const LEAVING_MAX: usize = 32;

/// First event number of a connection; lower ones belong to the worker.
pub(super) const FIRST_TOKEN: u32 = 16;

pub(super) struct Connections {
    cid: u64,
    host: Arc<HostSocket>,
    counting: Arc<Counting>,
    connections: HashMap<Ports, Connection>,
    by_token: HashMap<u32, Ports>,
    requests: VecDeque<(u32, ConnectRequest)>,
    leaving: VecDeque<Connection>,
    /// Connections with a packet for the guest, in turn.
    turns: VecDeque<Ports>,
    resets: VecDeque<Header>,
    next_token: u32,
    next_host_port: u32,
}

impl Connections {
    pub(super) fn new(cid: u64, host: Arc<HostSocket>, counting: Arc<Counting>) -> Connections {
        Connections {
            cid,
            host,
            counting,
            connections: HashMap::new(),
            by_token: HashMap::new(),
            requests: VecDeque::new(),
            leaving: VecDeque::new(),
            turns: VecDeque::new(),
            resets: VecDeque::new(),
            next_token: FIRST_TOKEN,
            next_host_port: FIRST_HOST_PORT,
        }
    }

    /// Whether a packet of the guest can be taken, whatever the answer.
    pub(super) fn takes_packets(&self) -> bool {
        self.resets.len() < RESETS_MAX
    }

    /// Whether there is a packet for the guest.
    pub(super) fn has_packet(&mut self) -> bool {
        // A turn may be obsolete, for instance because a credit was taken back.
        while let Some(ports) = self.turns.front() {
            if self.connections.get(ports).is_some_and(Connection::has_packet) {
                return true;
            }
            self.turns.pop_front();
        }
        !self.resets.is_empty()
    }

    /// The next packet for the guest, its data read into `room`.
    pub(super) fn next_packet(&mut self, room: &[Piece<'_>], ops: &mut EventOps<'_>) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        while let Some(ports) = self.turns.pop_front() {
            let Some(connection) = self.connections.get_mut(&ports) else { continue };
            match connection.next_packet(self.cid, ports, room) {
                Packet::Nothing => self.after(ports, ops),
                Packet::Some(header) => {
                    add(&self.counting.to_guest_bytes, header.bytes as usize);
                    self.after(ports, ops);
                    return Some(header);
                }
                Packet::Last(header) => {
                    self.remove(ports, ops);
                    return Some(header);
                }
            }
        }
        None
    }

    /// Handles a packet of the guest, with the data behind its header.
    pub(super) fn on_packet(&mut self, header: &Header, data: &[Piece<'_>], ops: &mut EventOps<'_>) {
        let operation = Operation::from_number(header.operation);
        if header.from_cid != self.cid || header.to_cid != HOST_CID {
            return add(&self.counting.malformed, 1);
        }
        let ports = Ports { host: header.to_port, guest: header.from_port };
        let (Some(operation), STREAM) = (operation, header.kind) else {
            add(&self.counting.malformed, 1);
            return self.refuse(ports, header);
        };
        let Some(connection) = self.connections.get_mut(&ports) else {
            return match operation {
                Operation::Request => self.connect(ports, header, ops),
                Operation::Reset => {}
                _ => self.refuse(ports, header),
            };
        };
        connection.credit(header);
        match operation {
            Operation::Response if connection.is_asked() => {
                if connection.accepted(ports) {
                    add(&self.counting.from_host, 1);
                } else {
                    return self.reset(ports, ops);
                }
            }
            Operation::Data if !connection.is_asked() => match connection.take(data) {
                SendResult::Bytes(bytes) => add(&self.counting.to_host_bytes, bytes),
                SendResult::OverCredit => {
                    add(&self.counting.over_credit, 1);
                    return self.reset(ports, ops);
                }
            },
            Operation::Shutdown if !connection.is_asked() => connection.shut_down(header.flags),
            Operation::CreditRequest => connection.ask_for_credit(),
            Operation::CreditUpdate => {}
            Operation::Reset => {
                if connection.is_asked() {
                    add(&self.counting.refused, 1);
                }
                return self.let_go(ports, ops);
            }
            // Out of turn: a second request, an unexpected answer, data before there is a connection.
            _ => {
                add(&self.counting.malformed, 1);
                return self.reset(ports, ops);
            }
        }
        self.after(ports, ops);
    }

    /// Accepts a program of the host. Returns false where file descriptors ran out.
    pub(super) fn on_program(&mut self, ops: &mut EventOps<'_>) -> bool {
        let stream = match self.host.accept() {
            Ok(stream) => stream,
            Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
        };
        if self.requests.len() == REQUESTS_MAX
            && let Some((token, request)) = self.requests.pop_front()
        {
            add(&self.counting.refused, 1);
            let _ = ops.remove(Events::with_data(request.stream(), token, EventSet::empty()));
        }
        let token = self.new_token();
        if ops.add(Events::with_data(&stream, token, EventSet::IN)).is_ok() {
            self.requests.push_back((token, ConnectRequest::new(stream)));
        }
        true
    }

    /// Handles the events of a host socket: data, or room.
    pub(super) fn on_socket(&mut self, token: u32, events: EventSet, ops: &mut EventOps<'_>) {
        if let Some(at) = self.requests.iter().position(|(of, _)| *of == token) {
            return self.on_request(at, ops);
        }
        if let Some(at) = self.leaving.iter().position(|connection| connection.token == token) {
            return self.on_leaving(at, ops);
        }
        let Some(ports) = self.by_token.get(&token).copied() else { return };
        let Some(connection) = self.connections.get_mut(&ports) else { return };
        if events.contains(EventSet::OUT) {
            add(&self.counting.to_host_bytes, connection.flush());
        }
        if events.intersects(EventSet::HANG_UP | EventSet::ERROR) {
            // The event would come again and again.
            let _ = ops.remove(Events::with_data(&connection.stream, token, EventSet::empty()));
            connection.hung_up();
            add(&self.counting.to_host_bytes, connection.flush());
        } else if events.contains(EventSet::IN) {
            connection.became_readable();
        }
        self.after(ports, ops);
    }

    fn on_request(&mut self, at: usize, ops: &mut EventOps<'_>) {
        let guest = match self.requests[at].1.go_on() {
            RequestState::NotYet => return,
            RequestState::Port(guest) => self.make_room(ops).then_some(guest),
            RequestState::Never => None,
        };
        let Some((token, request)) = self.requests.remove(at) else { return };
        let Some(guest) = guest else {
            add(&self.counting.refused, 1);
            let _ = ops.remove(Events::with_data(request.stream(), token, EventSet::empty()));
            return;
        };
        let ports = Ports { host: self.new_host_port(guest), guest };
        self.by_token.insert(token, ports);
        self.connections.insert(ports, Connection::from_host(request.into_stream(), token));
        self.after(ports, ops);
    }

    /// Handles a connection that the guest has forgotten. Linux waits 8 seconds for a slow program when a socket is
    /// closed (`VSOCK_CLOSE_TIMEOUT`), and then resets. The program still receives the earlier data.
    fn let_go(&mut self, ports: Ports, ops: &mut EventOps<'_>) {
        if !self.connections.get(&ports).is_some_and(Connection::has_last_words) {
            return self.remove(ports, ops);
        }
        if self.leaving.len() == LEAVING_MAX {
            self.cut_off(0, ops);
        }
        let Some(connection) = self.connections.remove(&ports) else { return };
        self.by_token.remove(&connection.token);
        let _ = ops.modify(Events::with_data(&connection.stream, connection.token, EventSet::OUT));
        self.leaving.push_back(connection);
    }

    fn on_leaving(&mut self, at: usize, ops: &mut EventOps<'_>) {
        add(&self.counting.to_host_bytes, self.leaving[at].flush());
        if !self.leaving[at].has_last_words() {
            self.cut_off(at, ops);
        }
    }

    fn cut_off(&mut self, at: usize, ops: &mut EventOps<'_>) {
        if let Some(connection) = self.leaving.remove(at) {
            let _ = ops.remove(Events::with_data(&connection.stream, connection.token, EventSet::empty()));
        }
    }

    /// Handles the guest's request for a connection to a program of the host.
    fn connect(&mut self, ports: Ports, request: &Header, ops: &mut EventOps<'_>) {
        let Some(stream) = self.make_room(ops).then(|| self.host.dial_port(ports.host).ok()).flatten() else {
            return self.refuse(ports, request);
        };
        let token = self.new_token();
        if ops.add(Events::with_data(&stream, token, EventSet::IN)).is_err() {
            return self.refuse(ports, request);
        }
        add(&self.counting.from_guest, 1);
        self.by_token.insert(token, ports);
        self.connections.insert(ports, Connection::from_guest(stream, token, request));
        self.after(ports, ops);
    }

    /// Makes room for one more connection, by ending one that only waits for the guest's confirmation of its end.
    fn make_room(&mut self, ops: &mut EventOps<'_>) -> bool {
        if self.connections.len() < CONNECTIONS_MAX {
            return true;
        }
        let ended = self.connections.iter().find(|(_, connection)| connection.is_closing()).map(|(ports, _)| *ports);
        ended.is_some_and(|ports| {
            self.reset(ports, ops);
            true
        })
    }

    /// Updates the watched events and the turn of a connection after a change.
    fn after(&mut self, ports: Ports, ops: &mut EventOps<'_>) {
        let Some(connection) = self.connections.get_mut(&ports) else { return };
        if !connection.is_hung_up() {
            let (for_data, for_room) = connection.watches();
            let mut events = EventSet::empty();
            events.set(EventSet::IN, for_data);
            events.set(EventSet::OUT, for_room);
            if events != connection.watched
                && ops.modify(Events::with_data(&connection.stream, connection.token, events)).is_ok()
            {
                connection.watched = events;
            }
        }
        if connection.has_packet() && !self.turns.contains(&ports) {
            self.turns.push_back(ports);
        }
    }

    /// Ends all connections, without a message to the guest.
    pub(super) fn clear(&mut self, ops: &mut EventOps<'_>) {
        for ports in self.connections.keys().copied().collect::<Vec<_>>() {
            self.remove(ports, ops);
        }
        for (token, request) in self.requests.drain(..) {
            let _ = ops.remove(Events::with_data(request.stream(), token, EventSet::empty()));
        }
        while !self.leaving.is_empty() {
            self.cut_off(0, ops);
        }
    }

    fn remove(&mut self, ports: Ports, ops: &mut EventOps<'_>) {
        let Some(connection) = self.connections.remove(&ports) else { return };
        self.by_token.remove(&connection.token);
        self.turns.retain(|of| *of != ports);
        // An error if that was done when it hung up. The next connection may get its descriptor.
        let _ = ops.remove(Events::with_data(&connection.stream, connection.token, EventSet::empty()));
    }

    fn reset(&mut self, ports: Ports, ops: &mut EventOps<'_>) {
        self.remove(ports, ops);
        self.resets.push_back(Header::to_guest(self.cid, ports, Operation::Reset));
    }

    /// Answers a packet of a connection that does not exist with a reset. A reset is not answered, or the two sides
    /// would never stop.
    fn refuse(&mut self, ports: Ports, header: &Header) {
        if header.operation == Operation::Reset as u16 {
            return;
        }
        if header.operation == Operation::Request as u16 {
            add(&self.counting.refused, 1);
        }
        let reset = Header::to_guest(self.cid, ports, Operation::Reset);
        self.resets.push_back(Header { kind: header.kind, ..reset });
    }

    fn new_token(&mut self) -> u32 {
        loop {
            let token = self.next_token;
            self.next_token = token.checked_add(1).unwrap_or(FIRST_TOKEN);
            let mut others = self.requests.iter().map(|(of, _)| *of).chain(self.leaving.iter().map(|of| of.token));
            if !self.by_token.contains_key(&token) && others.all(|other| other != token) {
                return token;
            }
        }
    }

    fn new_host_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.next_host_port;
            // All ones are reserved (VMADDR_PORT_ANY).
            self.next_host_port = if host >= u32::MAX - 1 { FIRST_HOST_PORT } else { host + 1 };
            if !self.connections.contains_key(&Ports { host, guest }) {
                return host;
            }
        }
    }
}
