//! The views of a host without a daemon: each VM's process is looked at once, and nothing is changed.

use std::path::{Path, PathBuf};

use wideleaf_attach::find::{self, FindError};
use wideleaf_attach::process::Places;
use wideleaf_attach::survey::Survey;
use wideleaf_control::client::ClientError;
use wideleaf_control::protocol::Settings;
use wideleaf_control::view::{Explanation, VmView, WindowMap};

use super::{HostReport, Source};
use crate::failure::Failure;

/// Looks at processes.
pub struct Looking {
    places: Places,
    socket: PathBuf,
}

impl Looking {
    /// Where nobody listens at `socket`.
    pub fn instead_of_a_daemon_at(socket: &Path) -> Looking {
        Looking { places: Places::default(), socket: socket.to_owned() }
    }

    fn survey(&self, name: &str) -> Result<Survey, Failure> {
        Ok(Survey::take(&find::named(&self.places, name)?, None))
    }
}

impl Source for Looking {
    fn host(&self) -> Result<HostReport, Failure> {
        let found = find::all(&self.places)?;
        let source = format!(
            "no wideleafd listens at {}: this is a look at the processes themselves, which nobody manages",
            self.socket.display()
        );
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
        Err(ClientError::NoDaemon { path: self.socket.clone() }.into())
    }
}

impl From<FindError> for Failure {
    fn from(error: FindError) -> Failure {
        match error {
            FindError::Proc { .. } => Failure::Host(error.to_string()),
            _ => Failure::Usage(error.to_string()),
        }
    }
}
