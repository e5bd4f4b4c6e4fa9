//! The views of a host without a daemon: each VM's process is read once, and nothing is changed.

use std::fmt;
use std::path::PathBuf;

use wideleaf_attach::Places;
use wideleaf_attach::find;
use wideleaf_attach::survey::Survey;
use wideleaf_control::client::ClientError;
use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Explanation, VmView, WindowMap};

use super::{HostReport, Source};
use wideleaf_run::failure::Failure;

/// Reason why there is no daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WithoutDaemon {
    /// No process listens at that socket.
    Absent(PathBuf),
    /// This user may not connect to that socket; whether a daemon listens there is unknown.
    NotPermitted(PathBuf),
    /// The option `--no-daemon`.
    NotAsked,
}

impl fmt::Display for WithoutDaemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WithoutDaemon::Absent(path) => write!(
                f,
                "no wideleafd listens at {}: the processes themselves were read; no daemon manages them",
                path.display()
            ),
            WithoutDaemon::NotPermitted(path) => write!(
                f,
                "cannot ask a wideleafd at {}: permission denied; the processes themselves were read; run as root or \
                as a member of its group to see what is managed",
                path.display()
            ),
            WithoutDaemon::NotAsked => f.write_str("no daemon was asked: the processes themselves were read"),
        }
    }
}

/// Source that reads processes.
pub struct Processes {
    places: Places,
    why: WithoutDaemon,
}

impl Processes {
    /// Reads processes instead of asking a daemon.
    pub fn because(why: WithoutDaemon) -> Processes {
        Processes { places: Places::default(), why }
    }

    fn survey(&self, name: &str) -> Result<Survey, Failure> {
        Ok(Survey::take(&find::named(&self.places, name)?, None))
    }
}

impl Source for Processes {
    fn host(&self) -> Result<HostReport, Failure> {
        let found = find::all(&self.places)?;
        let source = self.why.to_string();
        let vms = found.guests.iter().map(|process| Survey::take(process, None).view()).collect();
        Ok(HostReport { source, daemon: None, vms, notes: found.notes })
    }

    fn vm(&self, name: &str) -> Result<VmView, Failure> {
        Ok(self.survey(name)?.view())
    }

    fn explanation(&self, name: &str) -> Result<Explanation, Failure> {
        Ok(self.survey(name)?.explanation())
    }

    fn windows(&self, name: &str) -> Result<WindowMap, Failure> {
        Ok(self.survey(name)?.windows())
    }

    fn set(&self, _: &str, _: Settings) -> Result<VmView, Failure> {
        match self.why.clone() {
            WithoutDaemon::Absent(path) => Err(ClientError::NoDaemon { path }.into()),
            WithoutDaemon::NotPermitted(path) => Err(ClientError::NotPermitted { path }.into()),
            WithoutDaemon::NotAsked => {
                let why = "cannot change a guest without a daemon: repeat the command without --no-daemon";
                Err(Failure::Usage(why.into()))
            }
        }
    }
}
