//! A migration's connection: messages with time limits, over any pair of a readable and a writable descriptor.
//!
//! Descriptors may block or not: before each read and write, `poll(2)` waits until it does not block, and looks every
//! so often whether to keep on, also while bytes come without a gap. A descriptor that blocks is only written where a
//! short write cannot block for long: the client that passes the source's connection sets `O_NONBLOCK`.

use std::fs::File;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::frames::{self, GREETING_BYTES, HEADER_BYTES, Header, Kind, Malformed};

/// Interval at which a wait looks whether to keep on.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Most of a content for which memory is taken before more of it has come.
const STEP_BYTES: usize = 4 << 20;

/// The reasons why a connection is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The other side has ended, or the network between.
    #[error("the connection ended")]
    Closed,
    /// Nothing came or went for too long.
    #[error("the other side was silent for {0:?}")]
    Silent(Duration),
    /// The message did not come in time.
    #[error("the other side did not answer in time")]
    Late,
    /// The kernel refused a read or write.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The other side sent something else than the protocol has.
    #[error("the other side sent {0}")]
    Malformed(#[from] Malformed),
    /// This side does not keep on.
    #[error("it was cancelled")]
    Cancelled,
    /// The target's own reason.
    #[error("the target says: {0}")]
    Refused(String),
    /// It was lost before, for this reason.
    #[error("{0}")]
    Before(String),
}

/// Limits of a wait.
#[derive(Clone, Copy)]
pub struct Limit<'a> {
    /// Time without a byte after which the connection counts as lost.
    pub silence: Duration,
    /// Time at which the whole message must have come.
    pub until: Option<Instant>,
    /// Whether to keep on.
    pub keep_on: &'a dyn Fn() -> bool,
}

impl Limit<'_> {
    /// Waits until `end` is ready for `what`. `looked`: when it was last looked whether to keep on.
    fn wait(&self, end: BorrowedFd<'_>, what: PollFlags, looked: &mut Instant) -> Result<(), LinkError> {
        let began = Instant::now();
        let mut looks = looked.elapsed() >= LOOK_EVERY;
        loop {
            if looks && !(self.keep_on)() {
                return Err(LinkError::Cancelled);
            }
            if looks {
                *looked = Instant::now();
            }
            let mut ends = [PollFd::new(end, what)];
            let slice = PollTimeout::try_from(self.slice(began)?).unwrap_or(PollTimeout::ZERO);
            match poll(&mut ends, slice) {
                Ok(0) | Err(nix::errno::Errno::EINTR) => looks = true,
                Ok(_) => return Ok(()),
                Err(error) => return Err(LinkError::Io(error.into())),
            }
        }
    }

    /// Time of the next wait.
    fn slice(&self, began: Instant) -> Result<Duration, LinkError> {
        let silent = self.silence.checked_sub(began.elapsed()).ok_or(LinkError::Silent(self.silence))?;
        let left = match self.until {
            None => silent,
            Some(until) => silent.min(until.checked_duration_since(Instant::now()).ok_or(LinkError::Late)?),
        };
        // Rounded up: poll(2) counts milliseconds.
        Ok(left.min(LOOK_EVERY) + Duration::from_millis(1))
    }
}

/// The writing end.
#[derive(Debug)]
pub struct Sender {
    writer: File,
    next: u32,
    sent: u64,
    /// Whether only a part of the last message has left: the other side would read another message as its rest.
    is_cut: bool,
}

impl Sender {
    /// Over this descriptor.
    pub fn new(writer: OwnedFd) -> Sender {
        Sender { writer: File::from(writer), next: 0, sent: 0, is_cut: false }
    }

    /// Sends the first bytes.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn greet(&mut self, limit: &Limit<'_>) -> Result<(), LinkError> {
        self.write(&mut [IoSlice::new(&frames::greeting())], limit)
    }

    /// Sends a message with these parts as content.
    ///
    /// # Errors
    /// [`LinkError`]; an unknown part of the message has then left, [`Sender::sent`] does not grow if none has.
    pub fn send(&mut self, kind: Kind, parts: &[&[u8]], limit: &Limit<'_>) -> Result<(), LinkError> {
        self.send_checked(kind, frames::checksum(kind, parts), parts, limit)
    }

    /// The same with a checksum that the caller has made, outside a lock.
    ///
    /// # Errors
    /// [`LinkError`], as above.
    pub fn send_checked(
        &mut self,
        kind: Kind,
        checksum: u32,
        parts: &[&[u8]],
        limit: &Limit<'_>,
    ) -> Result<(), LinkError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if bytes > kind.bytes_max() {
            return Err(Malformed::Length(bytes).into());
        }
        let header = Header { kind, number: self.next, bytes, checksum }.encode();
        let mut slices: Vec<IoSlice<'_>> =
            [&header[..]].into_iter().chain(parts.iter().copied()).map(IoSlice::new).collect();
        let before = self.sent;
        let written = self.write(&mut slices, limit);
        // A message of which no byte has left was none: the next one has its number.
        if self.sent != before {
            self.next = self.next.wrapping_add(1);
        }
        written
    }

    /// Bytes that have left.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    fn write(&mut self, slices: &mut [IoSlice<'_>], limit: &Limit<'_>) -> Result<(), LinkError> {
        if self.is_cut {
            return Err(LinkError::Closed);
        }
        let before = self.sent;
        let written = self.write_all(slices, limit);
        self.is_cut = written.is_err() && self.sent != before;
        written
    }

    fn write_all(&mut self, mut slices: &mut [IoSlice<'_>], limit: &Limit<'_>) -> Result<(), LinkError> {
        // A message for which there is room leaves in any case: it may be the last word.
        let mut looked = Instant::now();
        while slices.iter().any(|slice| !slice.is_empty()) {
            limit.wait(self.writer.as_fd(), PollFlags::POLLOUT, &mut looked)?;
            // More slices than this is an error (writev(2), IOV_MAX).
            let some = slices.len().min(1024);
            match self.writer.write_vectored(&slices[..some]) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(written) => {
                    self.sent += written as u64;
                    IoSlice::advance_slices(&mut slices, written);
                }
                Err(error) if is_to_be_tried_again(&error) => {}
                Err(error) => return Err(from_io(error)),
            }
        }
        Ok(())
    }
}

/// The reading end.
#[derive(Debug)]
pub struct Receiver {
    reader: File,
    next: u32,
    received: u64,
    /// When it was last looked whether to keep on.
    looked: Instant,
}

impl Receiver {
    /// Over this descriptor.
    pub fn new(reader: OwnedFd) -> Receiver {
        Receiver { reader: File::from(reader), next: 0, received: 0, looked: Instant::now() }
    }

    /// Receives the first bytes of the other side.
    ///
    /// # Errors
    /// [`LinkError`], also where it is another program or version.
    pub fn greeted(&mut self, limit: &Limit<'_>) -> Result<(), LinkError> {
        let mut bytes = [0; GREETING_BYTES];
        self.read(&mut bytes, limit)?;
        Ok(frames::check_greeting(&bytes)?)
    }

    /// Receives the next message; its content replaces that of `into`.
    ///
    /// # Errors
    /// [`LinkError`]; [`LinkError::Refused`] for [`Kind::Failed`].
    pub fn next(&mut self, into: &mut Vec<u8>, limit: &Limit<'_>) -> Result<Kind, LinkError> {
        let mut bytes = [0; HEADER_BYTES];
        self.read(&mut bytes, limit)?;
        let header = Header::decode(&bytes, self.next)?;
        self.next = self.next.wrapping_add(1);
        let mut have = 0;
        while have < header.bytes {
            let step = (header.bytes - have).min(STEP_BYTES);
            into.resize(into.len().max(have + step), 0);
            self.read(&mut into[have..have + step], limit)?;
            have += step;
        }
        into.truncate(have);
        header.check(into)?;
        if header.kind == Kind::Failed {
            return Err(LinkError::Refused(crate::text::clean(&String::from_utf8_lossy(into))));
        }
        Ok(header.kind)
    }

    /// Receives the next message, which must be of this kind.
    ///
    /// # Errors
    /// [`LinkError`], also for another kind.
    pub fn expect(&mut self, kind: Kind, into: &mut Vec<u8>, limit: &Limit<'_>) -> Result<(), LinkError> {
        if self.next(into, limit)? == kind { Ok(()) } else { Err(Malformed::Order.into()) }
    }

    /// Whether a byte has come, or the connection has ended.
    pub fn has_some(&self) -> bool {
        let mut ends = [PollFd::new(self.reader.as_fd(), PollFlags::POLLIN)];
        poll(&mut ends, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Bytes that have come.
    pub fn received(&self) -> u64 {
        self.received
    }

    fn read(&mut self, mut into: &mut [u8], limit: &Limit<'_>) -> Result<(), LinkError> {
        while !into.is_empty() {
            limit.wait(self.reader.as_fd(), PollFlags::POLLIN, &mut self.looked)?;
            match self.reader.read(into) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(read) => {
                    self.received += read as u64;
                    into = &mut into[read..];
                }
                Err(error) if is_to_be_tried_again(&error) => {}
                Err(error) => return Err(from_io(error)),
            }
        }
        Ok(())
    }
}

fn is_to_be_tried_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn from_io(error: io::Error) -> LinkError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => LinkError::Closed,
        _ => LinkError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    const PATIENT: Limit<'_> = Limit { silence: Duration::from_secs(60), until: None, keep_on: &|| true };

    fn pair() -> (Sender, Receiver, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        ours.set_nonblocking(true).expect("it is a socket");
        let reader = theirs.try_clone().expect("a descriptor");
        (Sender::new(ours.into()), Receiver::new(reader.into()), theirs)
    }

    #[test]
    fn messages_larger_than_the_sockets_buffer_arrive_whole_and_in_order() {
        let (mut sender, mut receiver, _end) = pair();
        let machine: Vec<u8> = (0..9_000_000_u32).map(|byte| byte as u8).collect();
        let sent = machine.clone();
        let thread = std::thread::spawn(move || {
            sender.greet(&PATIENT).expect("it is open");
            sender.send(Kind::Machine, &[&sent[..7], &sent[7..]], &PATIENT).expect("it is open");
            sender.send(Kind::Go, &[], &PATIENT).expect("it is open");
            sender.sent()
        });
        let mut into = vec![1; 100];
        receiver.greeted(&PATIENT).expect("the same version");
        receiver.expect(Kind::Machine, &mut into, &PATIENT).expect("it was sent");
        assert!(into == machine, "the content");
        receiver.expect(Kind::Go, &mut into, &PATIENT).expect("it was sent");
        assert!(into.is_empty());
        assert_eq!(thread.join().expect("it does not panic"), receiver.received());
    }

    #[test]
    fn an_end_in_the_middle_of_a_message_is_a_loss() {
        let (mut sender, mut receiver, end) = pair();
        sender.send(Kind::Machine, &[&[7; 100]], &PATIENT).expect("there is room");
        let mut bytes = [0; 50];
        (&end).read_exact(&mut bytes).expect("they were sent");
        let (mut again, mut other, _end) = pair();
        again.writer.write_all(&bytes).expect("there is room");
        drop((again, sender));
        assert!(matches!(other.next(&mut Vec::new(), &PATIENT), Err(LinkError::Closed)));
        assert!(receiver.next(&mut Vec::new(), &PATIENT).is_err(), "the middle of a message is not a message");
    }

    #[test]
    fn a_wait_ends_at_its_limits_and_when_it_is_cancelled() {
        let (_sender, mut receiver, _end) = pair();
        let soon = Limit { until: Some(Instant::now()), ..PATIENT };
        assert!(matches!(receiver.next(&mut Vec::new(), &soon), Err(LinkError::Late)));
        let silent = Limit { silence: Duration::from_millis(1), ..PATIENT };
        assert!(matches!(receiver.next(&mut Vec::new(), &silent), Err(LinkError::Silent(_))));
        let cancelled = Limit { keep_on: &|| false, ..PATIENT };
        assert!(matches!(receiver.next(&mut Vec::new(), &cancelled), Err(LinkError::Cancelled)));
    }

    #[test]
    fn a_wait_is_cancelled_also_while_bytes_come_without_a_gap() {
        let (mut sender, mut receiver, _end) = pair();
        (0..2).for_each(|_| sender.send(Kind::Go, &[], &PATIENT).expect("there is room"));
        let cancelled = Limit { keep_on: &|| false, ..PATIENT };
        receiver.next(&mut Vec::new(), &PATIENT).expect("it was sent");
        std::thread::sleep(LOOK_EVERY);
        assert!(matches!(receiver.next(&mut Vec::new(), &cancelled), Err(LinkError::Cancelled)));
        assert!(sender.send(Kind::Go, &[], &cancelled).is_ok(), "the last word leaves");
    }

    #[test]
    fn a_sender_with_a_reader_that_is_gone_or_stuck_ends() {
        let (mut sender, receiver, end) = pair();
        let big = vec![0; 8 << 20];
        let silent = Limit { silence: Duration::from_millis(10), ..PATIENT };
        assert!(matches!(sender.send(Kind::Machine, &[&big], &silent), Err(LinkError::Silent(_))), "nothing reads");
        drop((receiver, end));
        let (mut sender, receiver, end) = pair();
        drop((receiver, end));
        assert!(matches!(sender.send(Kind::Machine, &[&big], &PATIENT), Err(LinkError::Closed)));
        assert_eq!((sender.sent(), sender.is_cut), (0, false));
    }

    #[test]
    fn nothing_follows_a_message_of_which_only_a_part_has_left() {
        let (mut sender, mut receiver, _end) = pair();
        let silent = Limit { silence: Duration::from_millis(10), ..PATIENT };
        let cut = sender.send(Kind::Machine, &[&vec![0; 8 << 20]], &silent);
        assert!(matches!(cut, Err(LinkError::Silent(_))), "nothing reads");
        let reader = std::thread::spawn(move || receiver.next(&mut Vec::new(), &PATIENT));
        assert!(matches!(sender.send(Kind::Failed, &[b"it stays"], &PATIENT), Err(LinkError::Closed)));
        drop((sender, _end));
        assert!(matches!(reader.join().expect("it does not panic"), Err(LinkError::Closed)), "not a wrong content");
    }

    #[test]
    fn a_message_that_was_too_late_to_leave_makes_no_gap_before_the_reason() {
        let (mut sender, mut receiver, _end) = pair();
        sender.send(Kind::Welcome, &[], &PATIENT).expect("there is room");
        let late = Limit { until: Some(Instant::now()), ..PATIENT };
        assert!(matches!(sender.send(Kind::Machine, &[b"{}"], &late), Err(LinkError::Late)));
        sender.send(Kind::Failed, &[b"it stays"], &PATIENT).expect("there is room");
        receiver.expect(Kind::Welcome, &mut Vec::new(), &PATIENT).expect("it was sent");
        let said = receiver.next(&mut Vec::new(), &PATIENT);
        assert!(matches!(&said, Err(LinkError::Refused(why)) if why == "it stays"), "{said:?}");
    }

    #[test]
    fn the_targets_own_reason_is_told() {
        let (mut sender, mut receiver, _end) = pair();
        sender.send(Kind::Failed, &[b"no \x1bmemory"], &PATIENT).expect("there is room");
        let said = receiver.next(&mut Vec::new(), &PATIENT).expect_err("it is a refusal").to_string();
        assert!(
            said.starts_with("the target says: no ") && said.ends_with("memory") && !said.contains('\x1b'),
            "{said}"
        );
    }
}
