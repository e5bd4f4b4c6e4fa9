//! A guest's monitor. It connects on the first question and again after an error. Several threads may ask;
//! they take turns.

use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::process::VmProcess;
use crate::qmp::{ANSWER_WITHIN, Qmp, QmpError};

/// Monitor of one guest; see the module.
#[derive(Debug)]
pub struct Monitor {
    path: PathBuf,
    pid: u32,
    connection: Mutex<Option<Qmp>>,
}

impl Monitor {
    /// The monitor of this guest at that socket.
    ///
    /// # Errors
    /// [`QmpError`] where no monitor answers there, or that of another process.
    pub fn of(process: &VmProcess, path: &Path) -> Result<Monitor, QmpError> {
        let monitor = Monitor::later(process, path);
        monitor.with(|_| Ok(()))?;
        Ok(monitor)
    }

    /// As [`Monitor::of`], also where it does not answer now but may later: without it, a migration would not be seen.
    ///
    /// # Errors
    /// [`QmpError`] where no monitor of that guest will ever answer there.
    pub fn now_or_later(process: &VmProcess, path: &Path) -> Result<Monitor, QmpError> {
        match Monitor::of(process, path) {
            Err(error) if error.may_pass() => Ok(Monitor::later(process, path)),
            known => known,
        }
    }

    fn later(process: &VmProcess, path: &Path) -> Monitor {
        Monitor { path: path.to_owned(), pid: process.pid, connection: Mutex::default() }
    }

    /// Runs `ask` on the connection. After an error, also one that `ask` does not return, the next call connects
    /// again.
    ///
    /// # Errors
    /// The [`QmpError`] of the connection or of `ask`.
    pub fn with<T>(&self, ask: impl FnOnce(&mut Qmp) -> Result<T, QmpError>) -> Result<T, QmpError> {
        let mut connection = self.connection.lock();
        let mut qmp = match connection.take() {
            Some(qmp) => qmp,
            None => self.connect()?,
        };
        let answer = ask(&mut qmp)?;
        *connection = (!qmp.is_broken()).then_some(qmp);
        Ok(answer)
    }

    fn connect(&self) -> Result<Qmp, QmpError> {
        Qmp::connect_to(&self.path, ANSWER_WITHIN, |peer| match peer {
            pid if pid == self.pid => Ok(()),
            other => Err(QmpError::OfAnother { path: self.path.display().to_string(), pid: self.pid, other }),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;
    use crate::places::tests::fake_places;
    use crate::process::tests::add_process;
    use crate::qmp::Question;

    /// Serves one client. Where `is_slow`, its first question has no answer before the second one. Returns whether it
    /// asked a question.
    fn serve(stream: UnixStream, is_slow: bool) -> bool {
        let mut lines = BufReader::new(stream.try_clone().expect("a descriptor is free")).lines();
        let say = |text: &str| (&stream).write_all(text.as_bytes()).is_ok();
        let mut heard = || lines.next().is_some_and(|line| line.is_ok());
        let greets = say("{\"QMP\": {}}\n") && heard() && say("{\"return\": {}}\n") && heard();
        if greets && (!is_slow || heard() && say("{\"return\": \"the late one\"}\n")) {
            say("{\"return\": \"in time\"}\n");
            heard();
        }
        greets
    }

    #[test]
    fn a_late_answer_is_not_taken_for_that_to_a_later_question() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("the socket is new");
        // The process ends with these threads in it.
        std::thread::spawn(move || {
            let mut is_slow = true;
            for stream in listener.incoming() {
                is_slow &= !serve(stream.expect("a client"), is_slow);
            }
        });
        let monitor = Monitor { path, pid: std::process::id(), connection: Mutex::default() };
        // On a busy machine not even the greeting comes in time.
        let swallowed = |qmp: &mut Qmp| Ok(qmp.ask(Question::Memdevs).is_err());
        while !matches!(monitor.with(swallowed), Ok(true)) {}
        let answer = loop {
            if let Ok(answer) = monitor.with(|qmp| qmp.ask(Question::Status)) {
                break answer;
            }
        };
        assert_eq!(answer.expect("it knows"), "in time");
    }

    #[test]
    fn a_monitor_that_is_silent_now_is_kept_and_one_that_is_not_there_is_not() {
        let (folder, places) = fake_places();
        let pid = std::process::id();
        add_process(&places, pid, &["qemu-system-x86_64", "-name", "web"], &["anon_inode:kvm-vm"]);
        let process = VmProcess::look(&places, pid).expect("it is there").expect("it is a VM");
        let path = folder.path().join("qmp");
        let missing = Monitor::now_or_later(&process, &path).expect_err("no socket");
        assert!(matches!(missing, QmpError::Connect { .. }), "{missing}");
        let listener = UnixListener::bind(&path).expect("the socket is new");
        let monitor = Monitor::now_or_later(&process, &path).expect("it may answer later");
        assert!(matches!(monitor.with(|_| Ok(())), Err(QmpError::TimedOut(_))));
        drop(listener);
        assert!(Monitor::now_or_later(&process, &path).is_ok(), "a socket that QEMU may serve again");
    }
}
