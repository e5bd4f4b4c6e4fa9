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
        let monitor = Monitor { path: path.to_owned(), pid: process.pid, connection: Mutex::default() };
        monitor.with(|_| Ok(()))?;
        Ok(monitor)
    }

    /// Runs `ask` on the connection. After an error the next call connects again.
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
        *connection = Some(qmp);
        Ok(answer)
    }

    fn connect(&self) -> Result<Qmp, QmpError> {
        Qmp::connect_to(&self.path, ANSWER_WITHIN, |peer| match peer {
            pid if pid == self.pid => Ok(()),
            other => Err(QmpError::OfAnother { path: self.path.display().to_string(), pid: self.pid, other }),
        })
    }
}
