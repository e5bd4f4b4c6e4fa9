//! Where a result goes. Opened before anything runs, so that a result is never lost to a typo; put in place whole at
//! the end, so that a failure leaves nothing behind.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::NamedTempFile;

use crate::args::FormatArg;
use crate::failure::Failure;

/// An open place for one result.
pub struct Output {
    format: FormatArg,
    file: Option<(NamedTempFile, PathBuf)>,
}

impl Output {
    /// Opens a file beside its final place, or takes standard output.
    ///
    /// # Errors
    /// [`Failure::Output`] where the folder can not be written to.
    pub fn open(format: FormatArg, path: Option<&Path>) -> Result<Output, Failure> {
        let Some(path) = path else {
            return Ok(Output { format, file: None });
        };
        let failure = |why: String| Failure::Output(format!("cannot write {}: {why}", path.display()));
        if path.is_dir() {
            return Err(failure("it is a folder".into()));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = tempfile::Builder::new()
            .prefix(".wideleaf-")
            .tempfile_in(folder)
            .map_err(|error| failure(error.to_string()))?;
        Ok(Output { format, file: Some((file, path.to_owned())) })
    }

    /// Writes the result in the form asked for. A reader of standard output that has gone away is not an error.
    ///
    /// # Errors
    /// [`Failure::Output`]; the final place is then as it was.
    pub fn write<R: Serialize>(self, report: &R, to_table: impl FnOnce(&R) -> String) -> Result<(), Failure> {
        let text = match self.format {
            FormatArg::Table => to_table(report),
            FormatArg::Json => {
                let json = serde_json::to_string_pretty(report);
                json.map_err(|error| Failure::Output(format!("cannot write JSON: {error}")))? + "\n"
            }
        };
        match self.file {
            None => match std::io::stdout().lock().write_all(text.as_bytes()) {
                Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                    Err(Failure::Output(format!("cannot write to standard output: {error}")))
                }
                _ => Ok(()),
            },
            Some((mut file, path)) => {
                let failure = |why: String| Failure::Output(format!("cannot write {}: {why}", path.display()));
                file.write_all(text.as_bytes()).map_err(|error| failure(error.to_string()))?;
                file.persist(&path).map_err(|error| failure(error.to_string()))?;
                Ok(())
            }
        }
    }
}
