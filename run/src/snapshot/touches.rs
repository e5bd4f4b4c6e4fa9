//! The order in which a restored guest first touched its memory, kept beside the snapshot for the next restore (as
//! REAP does: Ustiugov et al., ASPLOS '21).
//!
//! ```text
//!   --prefetch record ──▶ opened before the sandbox ─▶ the guest runs ─▶ FOLDER/touches, at the end of the run
//!   --prefetch use    ──▶ FOLDER/touches, if it is there ─▶ these windows first
//! ```
//!
//! The order is a hint. One that is damaged, or of another snapshot, is left out with a warning.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};
use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::units::mib;
use wideleaf_policies::{Bytes, WindowIndex};
use wideleaf_snapshot::{Opened, TOUCHES_FILE};

use crate::failure::Failure;

/// Longest file that is read: more than a number for each window of 16 TiB.
const FILE_BYTES_MAX: Bytes = mib(128);

/// Content of the file.
#[derive(Debug, Deserialize, Serialize)]
struct Touches {
    /// Id of the snapshot.
    snapshot: String,
    /// Windows by their first touch.
    windows: Vec<u64>,
}

/// The recorded order; empty without a usable one.
pub(super) fn read(folder: &Path, snapshot: &Opened) -> Vec<WindowIndex> {
    let path = folder.join(TOUCHES_FILE);
    match read_from(&path, snapshot) {
        Ok(windows) => windows,
        Err(why) => {
            tracing::warn!("{} is not used: {why}", path.display());
            Vec::new()
        }
    }
}

fn read_from(path: &Path, snapshot: &Opened) -> Result<Vec<WindowIndex>, String> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = InputFile::open(path).and_then(|file| file.read_text(FILE_BYTES_MAX));
    let text = text.map_err(|error| error.to_string())?;
    // A run that was killed has recorded nothing.
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let Touches { snapshot: of, windows } = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    if of != snapshot.id().to_string() {
        return Err("it is of another snapshot".to_owned());
    }
    // Only windows that are stored can be read first.
    let windows = windows.into_iter().map(WindowIndex::new);
    Ok(windows.filter(|window| snapshot.window(*window).is_some()).collect())
}

/// An order that is being recorded.
#[derive(Debug)]
pub(super) struct Recording {
    file: File,
    snapshot: String,
}

impl Recording {
    /// Opens the file, which is empty until the end of the run.
    pub fn open(folder: &Path, snapshot: &Opened) -> Result<Recording, Failure> {
        let path = folder.join(TOUCHES_FILE);
        let file = File::create(&path).map_err(|error| {
            let path = path.display();
            Failure::Output(format!("cannot record first touches in {path}: {error}; omit --prefetch record"))
        })?;
        Ok(Recording { file, snapshot: snapshot.id().to_string() })
    }

    /// Writes the order.
    pub fn write(&self, windows: &[WindowIndex]) -> io::Result<()> {
        let windows = windows.iter().map(|window| window.get()).collect();
        let text = serde_json::to_vec(&Touches { snapshot: self.snapshot.clone(), windows })?;
        (&self.file).write_all(&text)
    }
}
