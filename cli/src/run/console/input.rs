//! Input on its way to the guest. One thread reads and recognises the keys, another types at the guest's pace, so
//! that a guest that takes no input can still be stopped by its keys.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wideleaf_vmm::devices::PowerButton;
use wideleaf_vmm::devices::serial::SerialPort;
use wideleaf_vmm::run_loop::RunControl;
use wideleaf_vmm::{GuestExit, Machine};

use super::keys::{HELP, Keys, Meaning};
use crate::output::say;

/// Most bytes typed ahead of the guest. A Linux terminal keeps the same number (termios(3)) and drops the rest.
const AHEAD_MAX: usize = 4096;

/// Interval for retrying a port that is full or unused: its 64 bytes take this long at 115200 baud.
const TRY_AGAIN: Duration = Duration::from_millis(5);

/// Standard input, and a pair of sockets that wakes a thread that waits for it.
pub(super) struct Source {
    from: File,
    wake: UnixStream,
    woken: UnixStream,
}

impl Source {
    pub(super) fn open() -> io::Result<Source> {
        let (wake, woken) = UnixStream::pair()?;
        Ok(Source { from: File::from(io::stdin().as_fd().try_clone_to_owned()?), wake, woken })
    }
}

/// Threads that read until this is dropped.
pub(super) struct Input {
    wake: UnixStream,
    threads: Vec<JoinHandle<()>>,
}

impl Input {
    /// Starts the threads; each does `begin` first.
    pub(super) fn start(
        Source { from, wake, woken }: Source,
        machine: &Machine,
        has_keys: bool,
        begin: impl FnOnce() + Clone + Send + 'static,
    ) -> io::Result<Input> {
        let (typed, to_type) = sync_channel(AHEAD_MAX);
        let (serial, control, button) = (machine.serial(), machine.control(), machine.power_button());
        let keys = has_keys.then(Keys::default);
        let reader = Reader { from, woken, typed, control: Arc::clone(&control), button, keys };
        let mut input = Input { wake, threads: Vec::new() };
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let begin = begin.clone();
            let begun = move || {
                begin();
                work();
            };
            thread::Builder::new().name(name.into()).spawn(begun)
        };
        input.threads.push(spawn("console-in", Box::new(move || reader.read()))?);
        input.threads.push(spawn("typist", Box::new(move || type_in(&serial, &control, &to_type, !has_keys)))?);
        Ok(input)
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        let _ = self.wake.write(&[0]);
        for thread in self.threads.drain(..) {
            // A thread that panicked has reported it.
            let _ = thread.join();
        }
    }
}

struct Reader {
    from: File,
    woken: UnixStream,
    typed: SyncSender<u8>,
    control: Arc<RunControl>,
    button: PowerButton,
    /// Keys of the console; `None` if all bytes belong to the guest.
    keys: Option<Keys>,
}

impl Reader {
    /// Reads until the end of input, or until it is woken.
    fn read(mut self) {
        let mut bytes = [0; 256];
        while self.is_ready() {
            let count = match self.from.read(&mut bytes) {
                Ok(0) => return,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            if !bytes[..count].iter().all(|byte| self.take(*byte)) {
                return;
            }
        }
    }

    /// Waits for input; `false` when reading must stop.
    fn is_ready(&self) -> bool {
        loop {
            let mut files =
                [PollFd::new(self.from.as_fd(), PollFlags::POLLIN), PollFd::new(self.woken.as_fd(), PollFlags::POLLIN)];
            match poll(&mut files, PollTimeout::NONE) {
                Ok(_) => return !files[1].any().unwrap_or(true),
                Err(Errno::EINTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Handles a byte; `false` if the guest takes no more.
    fn take(&mut self, byte: u8) -> bool {
        let Some(keys) = &mut self.keys else { return self.typed.send(byte).is_ok() };
        match keys.press(byte) {
            // Bytes beyond the guest's capacity are dropped: the next key may be the one that stops the VM.
            Meaning::Typed(byte) => drop(self.typed.try_send(byte)),
            Meaning::Stop => self.control.stop(GuestExit::Stopped),
            Meaning::Ask => {
                if let Err(error) = self.button.press() {
                    say(format_args!("\r\ncannot press the power button: {error}\r"));
                }
            }
            Meaning::Help => say(format_args!("\r\n{HELP}\r")),
            Meaning::Nothing => {}
        }
        true
    }
}

/// Typed keys go to the port at once, as on any port. A pipe cannot see that it is too early, so its bytes wait
/// until the guest listens.
fn type_in(serial: &SerialPort, control: &RunControl, to_type: &Receiver<u8>, is_piped: bool) {
    for byte in to_type {
        while (is_piped && !serial.is_listened_to()) || serial.type_in(&[byte]) == 0 {
            if control.is_stopping() {
                return;
            }
            thread::sleep(TRY_AGAIN);
        }
    }
}
