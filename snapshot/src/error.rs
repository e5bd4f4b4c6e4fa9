//! Why a snapshot cannot be read or written. Each error is one line, with the folder, the file and the place in it.

use std::io;

use wideleaf_policies::WindowIndex;

use crate::VERSION;
use crate::id::SnapshotId;

/// Why a snapshot cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot restore {snapshot}: {problem}; {}", problem.remedy())]
pub struct OpenError {
    /// Folder of the snapshot, for messages.
    pub snapshot: String,
    /// Description of the problem.
    pub problem: Problem,
}

/// Why a window cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot restore {snapshot}: {window} in {file} {problem}; {}", problem.remedy())]
pub struct ReadError {
    /// Folder of the snapshot, for messages.
    pub snapshot: String,
    /// Index of the window.
    pub window: WindowIndex,
    /// File that has the damage: its name, and its folder if that is a base.
    pub file: String,
    /// Description of the problem.
    pub problem: WindowProblem,
}

/// What is wrong with a window.
#[derive(Debug, thiserror::Error)]
pub enum WindowProblem {
    /// The bytes are not those that were saved.
    #[error("does not have the bytes that were saved (checksum)")]
    Checksum,
    /// The file ends before the window's last page.
    #[error("is cut off: the file is too short")]
    CutOff,
    /// The kernel cannot read the file.
    #[error("cannot be read: {0}")]
    Io(#[source] io::Error),
}

impl WindowProblem {
    fn remedy(&self) -> &'static str {
        match self {
            WindowProblem::Checksum | WindowProblem::CutOff => {
                "the file was changed after the save, or its disk is damaged: use another snapshot"
            }
            WindowProblem::Io(_) => "check the disk, or use another snapshot",
        }
    }
}

impl From<io::Error> for WindowProblem {
    fn from(error: io::Error) -> WindowProblem {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => WindowProblem::CutOff,
            _ => WindowProblem::Io(error),
        }
    }
}

/// What is wrong with a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// A file cannot be opened or read.
    #[error("`{file}`: {source}")]
    Io {
        /// Name of the file.
        file: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A file is a folder, a pipe or a device.
    #[error("`{file}` is not a regular file")]
    NotAFile {
        /// Name of the file.
        file: &'static str,
    },
    /// The index does not begin like one.
    #[error("it is not a snapshot: `windows` does not begin with \"wl-snap\"")]
    NotASnapshot,
    /// The index has another version.
    #[error("`windows` has version {found}, and this program reads version {VERSION}")]
    Version {
        /// Version of the file.
        found: u32,
    },
    /// The index is damaged.
    #[error("`windows` is damaged at byte {at}: {what}")]
    Index {
        /// Offset of the first byte of the damaged part.
        at: u64,
        /// Description of the damage.
        what: &'static str,
    },
    /// A file has another length than the index says.
    #[error("`{file}` has {found} bytes, and {expected} were saved")]
    Length {
        /// Name of the file.
        file: &'static str,
        /// Length of the file, in bytes.
        found: u64,
        /// Length by the index, in bytes; for `memory` the least length.
        expected: u64,
    },
    /// The machine's state is not the one that was saved.
    #[error("`machine.json` does not have the bytes that were saved (checksum)")]
    MachineChecksum,
    /// The base is missing, or not a snapshot.
    #[error("its base {base} cannot be used: {problem}")]
    Base {
        /// Folder of the base.
        base: String,
        /// Reason, as one line.
        problem: Box<Problem>,
    },
    /// The base is another snapshot than the one that this one was saved on.
    #[error("its base {base} is another snapshot now: its id is {found}, and {expected} is needed")]
    BaseChanged {
        /// Folder of the base.
        base: String,
        /// Id of the snapshot in the folder.
        found: SnapshotId,
        /// Id of the snapshot that is needed.
        expected: SnapshotId,
    },
    /// The files of the bases were not all passed.
    #[error("it needs {needed} bases, and {found} were opened")]
    BaseCount {
        /// Number of bases by the index.
        needed: usize,
        /// Number of bases that were passed.
        found: usize,
    },
    /// The base has less than it should have.
    #[error("its base {base} does not have all pages of {window}")]
    BasePages {
        /// Folder of the base.
        base: String,
        /// Index of the window.
        window: WindowIndex,
    },
}

impl Problem {
    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            Problem::Io { .. } | Problem::NotAFile { .. } | Problem::NotASnapshot => {
                "name the folder of a snapshot that `wideleaf vm SOCKET snapshot FOLDER` made"
            }
            Problem::Version { .. } => "use the wideleaf that saved it, or save again",
            Problem::Index { .. } | Problem::Length { .. } | Problem::MachineChecksum => {
                "the file was changed after the save, or its disk is damaged: use another snapshot"
            }
            Problem::Base { .. } | Problem::BaseChanged { .. } | Problem::BaseCount { .. } => {
                "bring the base back to that place, or use a snapshot without a base"
            }
            Problem::BasePages { .. } => "use another snapshot",
        }
    }
}

/// Why a snapshot cannot be saved. Nothing is left behind, and a snapshot that was in the folder is whole.
#[derive(Debug, thiserror::Error)]
#[error("cannot save the snapshot {snapshot}: {problem}")]
pub struct SaveError {
    /// Folder of the snapshot, for messages.
    pub snapshot: String,
    /// Description of the problem, with the remedy.
    pub problem: SaveProblem,
}

/// What prevents a save.
#[derive(Debug, thiserror::Error)]
pub enum SaveProblem {
    /// The path has no last part that names a folder.
    #[error("the path names no folder of its own; give it a name, as in snapshots/monday")]
    NoName,
    /// The place is in use by something that is not a folder.
    #[error("it exists and is not a folder; choose another name")]
    NotAFolder,
    /// The folder has a file that no snapshot has.
    #[error("the folder exists and has {file}, which is not part of a snapshot; choose another folder")]
    ForeignFile {
        /// Name of the file.
        file: String,
    },
    /// The folder exists and does not hold a snapshot.
    #[error("the folder exists and is not a snapshot; choose another folder, or remove it")]
    NotASnapshot,
    /// The folder is what the new snapshot is based on.
    #[error("the folder holds the base of the new snapshot, or a base of that; choose another folder")]
    IsBase,
    /// A call failed.
    #[error("{what}: {source}; {}", remedy(source))]
    Io {
        /// Description of the step.
        what: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The files are not what a whole snapshot has.
    #[error("what was written is not a whole snapshot ({0}); save again")]
    Incomplete(Problem),
}

/// What an operator can do about an error of a file system.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space on that disk, or choose another one",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "choose a folder that you may write to",
        _ => "choose another folder",
    }
}
